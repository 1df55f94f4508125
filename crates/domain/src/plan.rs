//! What to do next for a project: the rules of the product.
//!
//! ```text
//!            first request                    daemon answers
//!   Absent ───────────────▶ Provisioning ──▶ Starting ──▶ Warm ◀────────┐
//!                                ▲              ▲          │            │ a build came
//!                                │              │          │ quiet      │ before the stop
//!            instance is gone    │              │          ▼            │
//!                                └──── Idle ────┴───── Draining ────────┘
//!                                       ▲                  │
//!                                       └──────────────────┘ stopped; the cache stays
//!
//!   any step that fails ──▶ Failed ──▶ the next request, or the back-off, tries again
//! ```
//!
//! [`plan`] looks at one [`Situation`] and answers with at most one [`Step`], the phase that the project is in while
//! the step runs, why, and when to look again if nothing happens. The worker that owns the project carries the step
//! out, observes, and asks again. Every step names its objects from the key and is safe to repeat, so a crash between
//! any two steps costs nothing but the repetition.
//!
//! The rules, in the order in which they are tried:
//!
//! 1. **Somebody needs the daemon** ([`Demand::need`]: a request waits, a lease is alive, a connection is open, or the
//!    project is hot): bring it up, one step at a time ([`bring_up`]). Nothing below can stop it (K2).
//! 2. **An admin asked for a stop**: stop it.
//! 3. **The idle window is open** ([`linger`]): leave what runs as it is, and look again when the window closes.
//! 4. **Otherwise**: stop it. The volume is never touched (K3).

use std::fmt;
use std::time::Duration;

use crate::lease::{Lease, LeasePolicy};
use crate::project::{Phase, ProjectRecord};
use crate::settings::Tier;
use crate::time::Timestamp;

/// The host's settings that the rules need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub lease: LeasePolicy,
    /// How long a daemon stays up after its last activity.
    pub idle_window: Duration,
}

/// Who needs the daemon now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand<'a> {
    /// Requests that wait for the daemon to answer.
    pub waiters: usize,
    pub leases: &'a [Lease],
    /// Open data-plane connections.
    pub connections: usize,
    /// An admin asked for a stop that has not happened yet.
    pub stop_requested: bool,
}

impl Demand<'_> {
    /// Why the daemon must be up, if it must. The order is the order of the answers to "why is it running?".
    pub fn need(&self, record: &ProjectRecord, now: Timestamp, policy: &Policy) -> Option<Reason> {
        if self.connections > 0 {
            Some(Reason::Connected { connections: self.connections })
        } else if let Some(leases) = self.live_leases(now, policy) {
            Some(Reason::Leased { leases })
        } else if self.waiters > 0 {
            Some(Reason::Requested)
        } else if record.settings.tier == Some(Tier::Hot) && !self.stop_requested {
            Some(Reason::Hot)
        } else {
            None
        }
    }

    /// Busy in the sense of K2: nothing may take the daemon away.
    pub fn is_busy(&self, now: Timestamp, policy: &Policy) -> bool {
        self.connections > 0 || self.live_leases(now, policy).is_some()
    }

    fn live_leases(&self, now: Timestamp, policy: &Policy) -> Option<usize> {
        let connected = self.connections > 0;
        let alive = self.leases.iter().filter(|l| l.is_alive(now, connected, &policy.lease)).count();
        (alive > 0).then_some(alive)
    }

    fn next_lease_change(&self, now: Timestamp, policy: &Policy) -> Option<Timestamp> {
        self.leases.iter().filter_map(|l| l.next_change(now, &policy.lease)).min()
    }
}

/// What was seen on the host. Errors are not in here: a look that failed is no observation (F18).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    pub volume: VolumeSeen,
    pub files: FilesSeen,
    pub instance: InstanceSeen,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeSeen {
    Absent,
    Ready,
    /// There is something under the name that does not carry this project's identity.
    Foreign {
        found: String,
    },
}

/// The daemon's certificates and configuration on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilesSeen {
    Current,
    /// Missing, about to expire, or made for other settings.
    Stale,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceSeen {
    Absent,
    /// Exists without everything that it needs, or is not ours to start: never started, made anew.
    HalfMade {
        why: String,
    },
    Stopped,
    Running {
        /// This run of the instance, in the runtime's words.
        incarnation: String,
        /// Whether the daemon in it answered a real call.
        serving: bool,
    },
}

impl Observed {
    /// What is there after `step` succeeded, without another look. `incarnation` is what a start answered.
    pub fn apply(&mut self, step: Step, incarnation: Option<String>) {
        match step {
            Step::CreateVolume => self.volume = VolumeSeen::Ready,
            Step::WriteFiles => self.files = FilesSeen::Current,
            Step::CreateInstance | Step::StopInstance(_) => self.instance = InstanceSeen::Stopped,
            Step::DestroyInstance => self.instance = InstanceSeen::Absent,
            Step::StartInstance => {
                let incarnation = incarnation.unwrap_or_default();
                self.instance = InstanceSeen::Running { incarnation, serving: false };
            }
            Step::AdoptInstance => {}
            Step::AwaitServing => {
                if let InstanceSeen::Running { serving, .. } = &mut self.instance {
                    *serving = true;
                }
            }
        }
    }
}

/// What went wrong lately. Kept in memory: after a restart of Kiln a project has a clean slate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Setbacks {
    /// In a row, without a minute of service between them.
    pub count: u32,
    pub last: Option<Timestamp>,
}

impl Setbacks {
    /// Service of this length wipes the slate.
    pub const FORGIVEN_AFTER: Duration = Duration::from_secs(60);
    const LONGEST_PAUSE: Duration = Duration::from_secs(300);

    #[must_use]
    pub fn and_another(self, now: Timestamp) -> Self {
        let recent = self.last.is_some_and(|last| now.since(last) < Self::FORGIVEN_AFTER + self.pause());
        Self { count: if recent { self.count.saturating_add(1) } else { 1 }, last: Some(now) }
    }

    /// 1 s after the first, doubled each time.
    fn pause(self) -> Duration {
        let doublings = self.count.saturating_sub(1).min(16);
        Duration::from_secs(1 << doublings).min(Self::LONGEST_PAUSE)
    }

    /// `None` when it is over. Until then only somebody who waits is worth another try.
    pub fn pause_ends(self, now: Timestamp) -> Option<Timestamp> {
        let ends = self.last?.plus(self.pause());
        (self.count > 0 && ends > now).then_some(ends)
    }
}

/// All that [`plan`] looks at.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    pub record: &'a ProjectRecord,
    pub observed: &'a Observed,
    pub demand: Demand<'a>,
    pub setbacks: Setbacks,
    /// The run of the instance whose first answer was waited for in vain.
    pub gave_up_on: Option<&'a str>,
    pub now: Timestamp,
    pub policy: &'a Policy,
}

/// One effect on the host. Each is idempotent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    CreateVolume,
    /// Write certificates and configuration.
    WriteFiles,
    /// One request with everything in it; leaves the instance stopped.
    CreateInstance,
    /// Undo a half-made instance. Never touches the volume.
    DestroyInstance,
    /// The generation goes up with this step.
    StartInstance,
    /// Somebody else started it: take note of the new incarnation. The generation goes up.
    AdoptInstance,
    /// Wait until the daemon answers a real call.
    AwaitServing,
    StopInstance(Stop),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// SIGTERM, which BuildKit takes as a drain, and force after a bound.
    Graceful,
    Force,
}

impl Step {
    pub const fn name(self) -> &'static str {
        match self {
            Self::CreateVolume => "create volume",
            Self::WriteFiles => "write certificates and configuration",
            Self::CreateInstance => "create instance",
            Self::DestroyInstance => "destroy half-made instance",
            Self::StartInstance => "start instance",
            Self::AdoptInstance => "adopt instance",
            Self::AwaitServing => "wait for the daemon to answer",
            Self::StopInstance(Stop::Graceful) => "stop instance",
            Self::StopInstance(Stop::Force) => "force instance to stop",
        }
    }
}

/// Why something is done or left alone; its `Display` is what people read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    Connected { connections: usize },
    Leased { leases: usize },
    Requested,
    Hot,
    IdleWindowOpen { closes: Timestamp },
    IdleWindowPassed,
    StopRequested,
    NotServing,
    HalfMade { why: String },
    BackingOff { until: Timestamp },
    Foreign { found: String },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connections } => write!(f, "{connections} open connection(s)"),
            Self::Leased { leases } => write!(f, "{leases} live lease(s)"),
            Self::Requested => f.write_str("a request waits for it"),
            Self::Hot => f.write_str("the project is hot"),
            Self::IdleWindowOpen { .. } => f.write_str("its idle window is open"),
            Self::IdleWindowPassed => f.write_str("its idle window has passed"),
            Self::StopRequested => f.write_str("an admin asked for it"),
            Self::NotServing => f.write_str("it runs but did not answer in time"),
            Self::HalfMade { why } => write!(f, "the instance is incomplete: {why}"),
            Self::BackingOff { .. } => f.write_str("it failed a moment ago; waiting before the next try"),
            Self::Foreign { found } => write!(f, "the volume's name is taken by {found}"),
        }
    }
}

/// The answer of [`plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The phase the project is in, while the step runs if there is one.
    pub phase: Phase,
    pub step: Option<Step>,
    pub reason: Reason,
    /// Look again at this time even if nothing happens; `None`: only an event can change the answer.
    pub look_again: Option<Timestamp>,
}

/// The one function that decides. See the module's documentation for its rules.
pub fn plan(situation: &Situation<'_>) -> Plan {
    let Situation { record, demand, now, policy, .. } = *situation;
    if let Some(need) = demand.need(record, now, policy) {
        return bring_up(situation, need);
    }
    if demand.stop_requested {
        return take_down(situation, Reason::StopRequested);
    }
    let window = record.settings.idle_window.unwrap_or(policy.idle_window);
    let closes = record.last_activity.plus(window);
    // A clock set back must not make a window endless: it never closes later than one window from now.
    let closes = closes.min(now.plus(window));
    if closes > now
        && let InstanceSeen::Running { incarnation, serving } = &situation.observed.instance
    {
        return linger(situation, incarnation, *serving, closes);
    }
    take_down(situation, Reason::IdleWindowPassed)
}

/// Rule 3. What is on its way up is seen through, for the next build: whoever asked for it may only have hung up.
fn linger(situation: &Situation<'_>, incarnation: &str, serving: bool, closes: Timestamp) -> Plan {
    let Situation { record, gave_up_on, .. } = *situation;
    let reason = Reason::IdleWindowOpen { closes };
    let (phase, step) = if record.incarnation.as_deref() != Some(incarnation) {
        (Phase::Starting, Some(Step::AdoptInstance))
    } else if serving {
        (Phase::Warm, None)
    } else if gave_up_on != Some(incarnation) {
        (Phase::Starting, Some(Step::AwaitServing))
    } else {
        (failed(record, &Reason::NotServing), None)
    };
    Plan { phase, step, reason, look_again: Some(closes) }
}

/// Rule 1, from the ground up: volume, files, instance, run, answer.
fn bring_up(situation: &Situation<'_>, need: Reason) -> Plan {
    let Situation { record, observed, demand, setbacks, gave_up_on, now, policy } = *situation;
    let look_again = demand.next_lease_change(now, policy);
    let step = |phase, step, reason| Plan { phase, step: Some(step), reason, look_again: None };

    if let InstanceSeen::Running { incarnation, serving } = &observed.instance {
        if record.incarnation.as_deref() != Some(incarnation) {
            return step(Phase::Starting, Step::AdoptInstance, need);
        }
        if *serving {
            return Plan { phase: Phase::Warm, step: None, reason: need, look_again };
        }
    }
    if let VolumeSeen::Foreign { found } = &observed.volume {
        let reason = Reason::Foreign { found: found.clone() };
        return Plan { phase: Phase::Failed { reason: reason.to_string() }, step: None, reason, look_again: None };
    }
    // A request is worth an immediate try; a lease or the hot tier alone is not worth a busy loop.
    if let (0, Some(until)) = (demand.waiters, setbacks.pause_ends(now)) {
        let reason = Reason::BackingOff { until };
        return Plan { phase: failed(record, &reason), step: None, reason, look_again: Some(until) };
    }
    match &observed.instance {
        // A build may be running in a daemon too loaded to answer: busy is not broken (F10).
        InstanceSeen::Running { incarnation, .. }
            if gave_up_on == Some(incarnation) && !demand.is_busy(now, policy) =>
        {
            step(Phase::Draining, Step::StopInstance(Stop::Force), Reason::NotServing)
        }
        InstanceSeen::Running { .. } => step(Phase::Starting, Step::AwaitServing, need),
        InstanceSeen::HalfMade { why } => {
            step(Phase::Provisioning, Step::DestroyInstance, Reason::HalfMade { why: why.clone() })
        }
        _ if observed.volume == VolumeSeen::Absent => step(Phase::Provisioning, Step::CreateVolume, need),
        _ if observed.files == FilesSeen::Stale => step(Phase::Provisioning, Step::WriteFiles, need),
        InstanceSeen::Absent => step(Phase::Provisioning, Step::CreateInstance, need),
        InstanceSeen::Stopped => step(Phase::Starting, Step::StartInstance, need),
    }
}

/// Rules 2 and 4. What is not running is left as it is.
fn take_down(situation: &Situation<'_>, reason: Reason) -> Plan {
    let (phase, step) = match (&situation.observed.instance, &situation.observed.volume) {
        (InstanceSeen::Running { .. }, _) => (Phase::Draining, Some(Step::StopInstance(Stop::Graceful))),
        // A failure stays visible until the next request tries again.
        _ if matches!(situation.record.phase, Phase::Failed { .. }) => (situation.record.phase.clone(), None),
        (InstanceSeen::Absent, VolumeSeen::Absent) => (Phase::Absent, None),
        _ => (Phase::Idle, None),
    };
    Plan { phase, step, reason, look_again: None }
}

fn failed(record: &ProjectRecord, reason: &Reason) -> Phase {
    match &record.phase {
        Phase::Failed { reason } => Phase::Failed { reason: reason.clone() },
        _ => Phase::Failed { reason: reason.to_string() },
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
