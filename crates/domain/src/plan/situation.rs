//! Everything that the rules look at.

use std::time::Duration;

use super::reason::Reason;
use super::step::{Done, Step};
use crate::admission::{Refused, WaitsFor};
use crate::cache::size::{self, Bounds, Fill, Resize, SizePolicy};
use crate::cache::{HistoryPolicy, Snapshot, SnapshotName};
use crate::health::{Health, HealthPolicy};
use crate::idle::IdlePolicy;
use crate::lease::{Lease, LeasePolicy};
use crate::project::ProjectRecord;
use crate::settings::{Settings, Tier};
use crate::time::Timestamp;

/// The host's settings that the rules need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    pub lease: LeasePolicy,
    pub idle: IdlePolicy,
    pub health: HealthPolicy,
    /// A lease that was not released keeps its daemon from being replaced for this long, even where it no longer keeps it
    /// up; at most to its end.
    pub roll_held: Duration,
    /// Leases a project may have at a time; a route beyond is refused.
    pub max_leases: usize,
    pub history: HistoryPolicy,
    pub size: SizePolicy,
}

impl Default for Policy {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_mins(1);
        Self {
            lease: LeasePolicy { grace: 30 * MINUTE, max_build_age: 120 * MINUTE },
            idle: IdlePolicy { window: 15 * MINUTE, longest: 360 * MINUTE, fork_window: 5 * MINUTE },
            health: HealthPolicy {
                probe_every: MINUTE / 2,
                ask_again: MINUTE / 6,
                wedged_after: MINUTE,
                wedged_after_connected: 5 * MINUTE,
                silent_at_most: 120 * MINUTE,
            },
            roll_held: 60 * MINUTE,
            max_leases: 1024,
            history: HistoryPolicy::default(),
            size: SizePolicy::default(),
        }
    }
}

/// All that [`plan`](super::plan) looks at.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    pub record: &'a ProjectRecord,
    /// The effective ones.
    pub settings: &'a Settings,
    pub observed: &'a Observed,
    pub demand: Demand<'a>,
    pub setbacks: Setbacks,
    pub health: Health,
    /// What the daemon said when it was last asked for its builds.
    pub counted: Option<Counted>,
    /// Whether this run of the daemon has answered before. One that has is up, however slow; a build may be in it.
    pub served: bool,
    /// Whether Kiln has watched this run since its start, and it has not answered yet. Of a run from before a restart of Kiln
    /// nobody can say that: a build may be in it.
    pub unborn: bool,
    /// What this run was found to reach, and must not.
    pub leaks: Option<&'a str>,
    /// The run of the instance whose first answer was waited for in vain.
    pub gave_up_on: Option<&'a str>,
    pub place: Place,
    pub past: Past<'a>,
    pub room: Room,
    /// Somebody waits for a start, and this daemon's stop would make room for it.
    pub room_wanted: bool,
    pub now: Timestamp,
    pub policy: &'a Policy,
}

/// Who needs the daemon now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand<'a> {
    /// Requests that wait for the daemon to answer.
    pub waiters: usize,
    pub leases: &'a [Lease],
    /// Open data-plane connections.
    pub connections: usize,
    /// What an admin asked for, and what has not happened yet.
    pub stop: Option<StopWish>,
    /// Somebody waits for a snapshot.
    pub snapshot: bool,
}

/// How much an admin, or the host's storage, wants it down, and what for. Ordered: the greater wish goes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopWish {
    Stop,
    /// To begin with an empty cache.
    Reset,
    Rollback(SnapshotName),
    /// To give its room to others.
    Evict,
    Remove,
    Force,
}

/// What is known of the moments of a cache that one can go back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Past<'a> {
    /// Oldest first; `None`: nobody has looked.
    pub snapshots: Option<&'a [Snapshot]>,
    /// What a daemon said that could not open the cache.
    pub damage: Option<&'a str>,
    /// A way back from that was begun, and nobody knows whether it was gone: the next start tells.
    pub unclear: bool,
    /// Whether a snapshot costs next to nothing, and can be taken while the daemon runs. Where it is a copy of everything, none
    /// is taken but by hand.
    pub cheap: bool,
    /// The one that is being tried out just now: it may turn out to be good.
    pub on_trial: Option<SnapshotName>,
    /// Somebody wants those gone that this does not keep, whether they are known or not: the storage is short, or they may
    /// have grown too old.
    pub thin: Option<HistoryPolicy>,
    /// The last thing that was tried here failed: not before.
    pub paused_until: Option<Timestamp>,
}

impl Demand<'_> {
    /// Why the daemon must be up, if it must. The order is the order of the answers to "why is it running?".
    pub fn need(&self, settings: &Settings, now: Timestamp, policy: &Policy) -> Option<Reason> {
        if self.connections > 0 {
            Some(Reason::Connected { connections: self.connections })
        } else if let Some(leases) = self.live_leases(now, policy) {
            Some(Reason::Leased { leases })
        } else if self.waiters > 0 {
            Some(Reason::Requested)
        } else if settings.tier == Some(Tier::Hot) && self.stop.is_none() {
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

    pub(super) fn next_lease_change(&self, now: Timestamp, policy: &Policy) -> Option<Timestamp> {
        self.leases.iter().filter_map(|l| l.next_change(now, &policy.lease)).min()
    }

    /// Until when an unreleased lease keeps the daemon from being replaced.
    pub fn roll_held_until(&self, now: Timestamp, policy: &Policy) -> Option<Timestamp> {
        let ends = |lease: &Lease| lease.created.plus(policy.roll_held).min(lease.expires);
        self.leases.iter().map(ends).filter(|until| *until > now).max()
    }
}

/// What is known of the room that a cache has.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Room {
    /// The last measurement, and when it was made. Without a fill: nothing bounds this volume.
    pub measured: Option<(Timestamp, Option<Fill>)>,
    /// A daemon could not start for want of it.
    pub full: bool,
}

impl Room {
    /// `None`: the size that it has is right, or nothing bounds it, or nobody has looked.
    pub fn resize(&self, settings: &Settings, policy: &SizePolicy) -> Option<Resize> {
        let (_, fill) = self.measured?;
        size::next(&fill?, &bounds(settings, policy)?, policy)
    }
}

/// Between what a project's volume stays; `None`: it has no size of its own.
pub fn bounds(settings: &Settings, policy: &SizePolicy) -> Option<Bounds> {
    settings.volume_bytes.map(|first| Bounds::new(first, settings.volume_max_bytes, policy))
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
    Stopped {
        /// What of it is not as it would be made today: "the image, the limits".
        outdated: Option<String>,
    },
    Running {
        /// This run of the instance, in the runtime's words.
        incarnation: String,
        /// Whether the daemon in it answered a real call.
        serving: bool,
        outdated: Option<String>,
    },
}

impl InstanceSeen {
    pub const STOPPED: Self = Self::Stopped { outdated: None };

    pub const fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

impl Observed {
    pub const NOTHING: Self =
        Self { volume: VolumeSeen::Absent, files: FilesSeen::Stale, instance: InstanceSeen::Absent };

    /// What of a running daemon a roll would bring up to date. Files are written only while it is down, so stale ones are
    /// those it runs with.
    pub fn outdated(&self) -> Option<String> {
        let InstanceSeen::Running { outdated, .. } = &self.instance else { return None };
        match (outdated, self.files) {
            (Some(what), FilesSeen::Stale) => Some(format!("{what}, its configuration or certificates")),
            (None, FilesSeen::Stale) => Some("its configuration or certificates".to_owned()),
            (what, FilesSeen::Current) => what.clone(),
        }
    }

    /// What is there after `step` succeeded, without another look.
    pub fn apply(&mut self, step: Step, done: &Done) {
        match step {
            Step::CreateVolume | Step::CloneVolume => self.volume = VolumeSeen::Ready,
            Step::WriteFiles => self.files = FilesSeen::Current,
            Step::CreateInstance => self.instance = InstanceSeen::STOPPED,
            Step::StopInstance(_) => {
                if let InstanceSeen::Running { outdated, .. } = &mut self.instance {
                    self.instance = InstanceSeen::Stopped { outdated: outdated.take() };
                }
            }
            Step::DestroyInstance => self.instance = InstanceSeen::Absent,
            Step::StartInstance => {
                if let Done::Started { incarnation } = done {
                    let incarnation = incarnation.clone();
                    self.instance = InstanceSeen::Running { incarnation, serving: false, outdated: None };
                }
            }
            Step::AwaitServing => self.answers(true),
            Step::Discard => (self.volume, self.files) = (VolumeSeen::Absent, FilesSeen::Stale),
            Step::DestroyVolume | Step::DiscardCache => self.volume = VolumeSeen::Absent,
            Step::AdoptInstance
            | Step::Probe
            | Step::CountBuilds
            | Step::Rollback(_)
            | Step::ListSnapshots
            | Step::TakeSnapshot
            | Step::DestroySnapshot(_)
            | Step::Measure
            | Step::Resize(_) => {}
        }
    }

    /// Made anew, a running daemon would be another, in this.
    pub fn outdate(&mut self, what: &str) {
        if let InstanceSeen::Running { outdated, .. } = &mut self.instance {
            *outdated = Some(outdated.as_ref().map_or_else(|| what.to_owned(), |others| format!("{others}, {what}")));
        }
    }

    /// Whether the daemon answered a real call just now.
    pub fn answers(&mut self, answered: bool) {
        if let InstanceSeen::Running { serving, .. } = &mut self.instance {
            *serving = answered;
        }
    }
}

/// Builds that ran in the daemon at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    pub builds: u32,
    pub at: Timestamp,
}

impl Counted {
    /// "None" is good for the stop that follows it at once.
    const NONE_HOLDS: Duration = Duration::from_secs(5);
    /// A build that ran a moment ago may have ended.
    const SOME_HOLD: Duration = Duration::from_secs(30);

    /// Until when it need not be asked again.
    pub(super) fn holds_until(self, now: Timestamp) -> Timestamp {
        let span = if self.builds == 0 { Self::NONE_HOLDS } else { Self::SOME_HOLD };
        self.at.plus(span).min(now.plus(span))
    }
}

/// The project's place among the starts of the host.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Place {
    #[default]
    Unasked,
    Admitted,
    /// `position` counts from 1.
    Queued {
        position: usize,
        length: usize,
        waits_for: WaitsFor,
    },
    Refused(Refused),
}

/// What went wrong lately. Kept in memory: after a restart of Kiln a project has a clean slate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Setbacks {
    /// In a row: no more than a minute and its pause between one and the next.
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

    /// After a clock that went back: a setback from the future is one of now.
    pub fn clamp_to(&mut self, now: Timestamp) {
        self.last = self.last.map(|last| last.min(now));
    }

    /// `None` when it is over. Until then only somebody who waits is worth another try.
    pub fn pause_ends(self, now: Timestamp) -> Option<Timestamp> {
        // From one pause after now on it can only be a clock that went back.
        let ends = self.last?.min(now).plus(self.pause());
        (self.count > 0 && ends > now).then_some(ends)
    }
}
