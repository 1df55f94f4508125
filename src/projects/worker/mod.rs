//! The loop of one project: observe → plan → one step → record.
//!
//! ```text
//!              ┌──────────── message, connection closed, event, timer ───────────┐
//!              ▼                                                                 │
//!   (looked?) no ─▶ observe ─▶ plan ─▶ phase changed? record it ─▶ step? perform ─┤
//!                     │ failed  ▲         │ warm: answer who waits                │
//!                     ▼         └─────────┤ nothing to do: refuse who waits       │
//!                  setback                └── nobody waited ──▶ wait ────────────┘
//! ```
//!
//! At most one effect is in flight. It runs as a task of its own, so that messages are answered meanwhile; its outcome
//! comes back here, and only here the state changes. Whoever is answered changes what the project needs, so the plan
//! is made again then: no timer is left over from before. An event that comes while an effect is in flight may be
//! newer than what the effect reports, so the host is looked at once more before anything is left as it is.
//!
//! | file | |
//! |---|---|
//! | `inbox.rs` | what a worker does with each message |
//! | `doing.rs` | looks and steps as tasks, and what their outcomes change |
//! | `answers.rs` | leases, grants and refusals |

mod answers;
mod doing;
mod inbox;

use std::sync::Arc;
use std::time::Duration;

use doing::{InFlight, landed};
use kiln_domain::explain::{Explanation, explain};
use kiln_domain::health::Health;
use kiln_domain::plan::{Counted, Demand, InstanceSeen, Observed, Place, Reason, Setbacks, Situation, StopWish};
use kiln_domain::{Key, Lease, Phase, Plan, ProjectRecord, Settings, Step, Timestamp, plan};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::admission::Standing;
use super::messages::{Refusal, RefusalKind, Status, StopRefusal, Waiter, Warm};
use super::registry::{Desk, Registry, Shared};
use crate::store::NewEvent;

/// A daemon that is up is looked at this often even if nothing happens: its certificates grow old, and so may its image
/// without anybody telling.
const LOOK_EVERY: Duration = Duration::from_hours(1);

/// Further apart than this, the wall clock did not go on but was set.
const A_JUMP: Duration = Duration::from_secs(1);

type StopReply = oneshot::Sender<Result<(), StopRefusal>>;

pub(super) struct Worker {
    key: Key,
    shared: Arc<Shared>,
    registry: Registry,
    desk: Desk,
    record: ProjectRecord,
    /// The effective ones.
    settings: Settings,
    leases: Vec<Lease>,
    /// Connections at the last look, to notice when the last one ends.
    last_connections: usize,
    waiters: Vec<Waiter>,
    stoppers: Vec<(StopWish, StopReply)>,
    askers: Vec<oneshot::Sender<Explanation>>,
    /// A prewarm counts as a request until the daemon answers or fails.
    prewarming: bool,
    observed: Option<(Observed, Timestamp)>,
    /// Something happened to the instance since the last look began.
    changed_since: bool,
    setbacks: Setbacks,
    health: Health,
    counted: Option<Counted>,
    /// The run of the instance whose first answer was waited for in vain.
    gave_up_on: Option<String>,
    /// The run that this worker started, until its first answer.
    unborn: Option<String>,
    place: Place,
    room_wanted: bool,
    standing: Standing,
    in_flight: Option<InFlight>,
    look_again: Option<Timestamp>,
    /// Both clocks at the last look at them.
    clocks: (Timestamp, Instant),
    /// The store has its record as it is.
    saved: bool,
    /// Its record is gone from the store.
    removed: bool,
}

impl Worker {
    /// `record` and `leases` are as the store has them.
    pub(super) fn new(
        shared: Arc<Shared>,
        registry: Registry,
        desk: Desk,
        record: ProjectRecord,
        leases: Vec<Lease>,
    ) -> Self {
        Self {
            key: record.key.clone(),
            settings: shared.settings(&record),
            clocks: (shared.clock.now(), Instant::now()),
            shared,
            registry,
            desk,
            record,
            leases,
            last_connections: 0,
            waiters: Vec::new(),
            stoppers: Vec::new(),
            askers: Vec::new(),
            prewarming: false,
            observed: None,
            changed_since: false,
            setbacks: Setbacks::default(),
            health: Health::default(),
            counted: None,
            gave_up_on: None,
            unborn: None,
            place: Place::Unasked,
            room_wanted: false,
            standing: Standing::Down,
            in_flight: None,
            look_again: None,
            saved: true,
            removed: false,
        }
    }

    /// Runs until the project is quiet.
    pub(super) async fn work(mut self) {
        // The clock may have gone back while Kiln was not there.
        self.leave_the_future(self.now());
        loop {
            if self.in_flight.is_none() {
                self.decide().await;
            }
            if self.removed {
                return self.leave();
            }
            if self.may_go() && self.registry.remove_if_idle(&self.key, &self.desk.mailbox) {
                return;
            }
            let timer = self.look_again.map(|at| at.since(self.now()));
            // In this order, so that a run on a model host can be repeated.
            tokio::select! {
                biased;
                outcome = landed(&mut self.in_flight) => {
                    self.in_flight = None;
                    self.notice_a_jump();
                    self.take_in(outcome).await;
                }
                message = self.desk.mailbox.recv() => match message {
                    Some(message) => self.hear(message),
                    None => return,
                },
                () = sleep(timer) => self.look_again = None,
            }
            self.note_connections();
        }
    }

    /// Its record is gone: whoever still waits asks again, and makes a new project.
    fn leave(mut self) {
        self.answer_stoppers(&Ok(()));
        let text = "the project was being removed".to_owned();
        self.refuse_all(&Refusal { kind: RefusalKind::NotNow, text });
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    /// The wall clock was set. What was told and not told of the daemon cannot be dated any more, so it is asked anew: a
    /// jump is no silence, and no word holds longer for one (K2).
    fn notice_a_jump(&mut self) {
        let (wall, steady) = (self.now(), Instant::now());
        let expected = self.clocks.0.plus(steady.duration_since(self.clocks.1));
        if wall.since(expected).max(expected.since(wall)) > A_JUMP {
            (self.health, self.counted) = (Health::default(), None);
            self.leave_the_future(wall);
        }
        self.clocks = (wall, steady);
    }

    /// After a clock that went back: what seems to be still to come was now. Else a window would stay open, and a pause
    /// last, until the clock is there again.
    fn leave_the_future(&mut self, now: Timestamp) {
        self.record.last_activity = self.record.last_activity.min(now);
        self.setbacks.clamp_to(now);
        if let Some((_, at)) = &mut self.observed {
            *at = (*at).min(now);
        }
    }

    fn seen(&self) -> Option<&Observed> {
        self.observed.as_ref().map(|(seen, _)| seen)
    }

    // === Deciding

    /// Until something is in flight, or nothing is left to do for now.
    async fn decide(&mut self) {
        if matches!(self.place, Place::Refused(_)) {
            self.place = Place::Unasked;
        }
        self.notice_a_jump();
        loop {
            self.waiters.retain(|waiter| !waiter.has_gone());
            self.tidy_leases();
            self.look_again_now_and_then();
            if self.observed.is_none() {
                if self.wants_a_look() {
                    self.start_observing();
                }
                return;
            }
            let Some(Plan { phase, step, reason, look_again }) = self.with_situation(plan) else { return };
            if reason == Reason::NeedsPlace {
                self.place = self.ask_for_place().await;
                continue;
            }
            self.give_place_back(step, &reason);
            self.look_again = look_again.into_iter().chain(self.next_expiry()).chain(self.next_look()).min();
            self.explain_to_askers();
            if !self.record_phase(phase, step, &reason).await {
                return;
            }
            self.report();
            if !self.seen().is_some_and(|seen| seen.instance.is_running()) && self.record.phase != Phase::Removing {
                self.answer_stopped();
            }
            if let Some(step) = step {
                return self.start_step(step);
            }
            if self.record.phase == Phase::Removing {
                return self.forget().await;
            }
            if matches!(reason, Reason::Queued { .. }) {
                return;
            }
            if self.somebody_waits() {
                self.answer_who_waits(&reason);
            } else if self.changed_since {
                self.observed = None;
            } else {
                return;
            }
        }
    }

    fn somebody_waits(&self) -> bool {
        !self.waiters.is_empty() || self.prewarming || !self.stoppers.is_empty()
    }

    /// When no step is left that would bring them what they wait for.
    fn answer_who_waits(&mut self, reason: &Reason) {
        if let Some(warm) = self.routable() {
            self.answer_all(warm);
        } else if !self.waiters.is_empty() || self.prewarming {
            let refusal = match reason {
                Reason::Refused(_) => Refusal { kind: RefusalKind::NotAdmitted, text: reason.to_string() },
                Reason::NotAnswering => Refusal { kind: RefusalKind::NotNow, text: self.record.phase.to_string() },
                _ => Refusal { kind: RefusalKind::Broken, text: self.record.phase.to_string() },
            };
            self.refuse_all(&refusal);
        }
        self.answer_stoppers(&Err(StopRefusal::Busy(reason.to_string())));
    }

    /// After a setback with nobody waiting there is no hurry to look.
    fn wants_a_look(&mut self) -> bool {
        let hurry = self.somebody_waits() || !self.askers.is_empty();
        let calm_at = self.setbacks.pause_ends(self.now()).filter(|_| !hurry);
        if calm_at.is_some() {
            self.look_again = calm_at;
        }
        calm_at.is_none()
    }

    fn look_again_now_and_then(&mut self) {
        if self.next_look().is_some_and(|at| at <= self.now()) {
            self.observed = None;
        }
    }

    /// Only what runs grows old unnoticed.
    fn next_look(&self) -> Option<Timestamp> {
        let (seen, at) = self.observed.as_ref()?;
        seen.instance.is_running().then(|| (*at).min(self.now()).plus(LOOK_EVERY))
    }

    fn demand(&self) -> Demand<'_> {
        Demand {
            waiters: self.waiters.len() + usize::from(self.prewarming),
            leases: &self.leases,
            connections: self.desk.connections.count(),
            stop: self.stoppers.iter().map(|(wish, _)| *wish).max(),
        }
    }

    /// `None` until it has looked.
    fn with_situation<T>(&self, work: impl FnOnce(&Situation<'_>) -> T) -> Option<T> {
        Some(work(&Situation {
            record: &self.record,
            settings: &self.settings,
            observed: self.seen()?,
            demand: self.demand(),
            setbacks: self.setbacks,
            health: self.health,
            counted: self.counted,
            gave_up_on: self.gave_up_on.as_deref(),
            unborn: self.unborn.is_some() && self.unborn == self.record.incarnation,
            place: self.place,
            room_wanted: self.room_wanted,
            now: self.now(),
            policy: &self.shared.policy,
        }))
    }

    /// The daemon, if a build may be sent to it this instant. A question to it does not change that.
    fn routable(&self) -> Option<Warm> {
        let undisturbed = self.in_flight.as_ref().is_none_or(|flight| flight.step == Some(Step::Probe));
        let serving =
            matches!(self.seen(), Some(Observed { instance: InstanceSeen::Running { serving: true, .. }, .. }));
        let warm = self.record.phase == Phase::Warm && undisturbed && serving;
        warm.then_some(Warm { address: self.record.address, generation: self.record.generation })
    }

    // === A place among the starts

    async fn ask_for_place(&self) -> Place {
        let new_volume = self.seen().is_some_and(|seen| seen.volume == kiln_domain::plan::VolumeSeen::Absent);
        self.shared.admission.ask(&self.key, new_volume, &self.desk.own_mailbox).await
    }

    /// Once it is not on its way up any more.
    fn give_place_back(&mut self, step: Option<Step>, reason: &Reason) {
        let on_its_way = matches!(reason, Reason::Queued { .. } | Reason::Refused(_))
            || matches!(
                step,
                Some(Step::CreateVolume | Step::WriteFiles | Step::CreateInstance | Step::DestroyInstance)
            )
            || matches!(step, Some(Step::StartInstance | Step::AdoptInstance | Step::AwaitServing));
        if !on_its_way {
            self.leave_queue();
        }
    }

    fn leave_queue(&mut self) {
        if self.place != Place::Unasked {
            self.place = Place::Unasked;
            self.shared.admission.leave(&self.key);
        }
    }

    /// Tells the door how this daemon stands.
    fn report(&mut self) {
        let running = self.seen().is_some_and(|seen| seen.instance.is_running());
        let needed = self.demand().need(&self.settings, self.now(), &self.shared.policy).is_some();
        let standing = match (running, needed) {
            (false, _) => Standing::Down,
            (true, true) => Standing::Needed,
            (true, false) => Standing::Unneeded(self.record.last_activity),
        };
        if needed || !running {
            self.room_wanted = false;
        }
        if standing != self.standing {
            self.standing = standing;
            self.shared.admission.report(&self.key, standing, &self.desk.own_mailbox);
        }
    }

    // === Recording

    /// False: the plan cannot be carried out, because it could not be recorded.
    async fn record_phase(&mut self, phase: Phase, step: Option<Step>, reason: &Reason) -> bool {
        // The generation goes up before the start, so that a crash in between can only skip a number.
        let starts = matches!(step, Some(Step::StartInstance | Step::AdoptInstance));
        if starts {
            self.record.generation = self.record.generation.next();
        }
        if let (Some(Step::AdoptInstance), Some(Observed { instance: InstanceSeen::Running { incarnation, .. }, .. })) =
            (step, self.seen())
        {
            self.record.incarnation = Some(incarnation.clone());
        }
        self.show(&phase, reason.to_string(), step);
        let asks = step.is_none_or(Step::only_asks);
        if phase == self.record.phase && asks && self.saved {
            return true;
        }
        let text = match step {
            Some(step) => format!("{}: {reason}", step.name()),
            None => format!("{phase}: {reason}"),
        };
        let kind = if step.is_some() { "step" } else { "phase" };
        let event = self.event(kind, text).rule(reason.rule());
        let recorded = self.enter(phase, event).await;
        if recorded || !starts {
            return true;
        }
        // A start whose number is not on the disk could be given out twice.
        let text = "the start could not be recorded in the database".to_owned();
        self.setbacks = self.setbacks.and_another(self.now());
        self.observed = None;
        self.refuse_all(&Refusal { kind: RefusalKind::NotNow, text });
        self.look_again = self.setbacks.pause_ends(self.now());
        false
    }

    fn show(&self, phase: &Phase, reason: String, step: Option<Step>) {
        let queue = match self.place {
            Place::Queued { position, length, .. } => Some((position, length)),
            _ => None,
        };
        let pending = self.seen().and_then(Observed::outdated);
        let status = Status { phase: Some(phase.clone()), reason, step: step.map(Step::name), queue, pending };
        self.desk.status.send_replace(status);
    }

    /// Takes note of a phase, in memory and on disk. What cannot be written now is written with the next decision.
    async fn enter(&mut self, phase: Phase, event: NewEvent) -> bool {
        self.record.phase = phase;
        let saved = self.shared.store.save_project(&self.record, Some(event)).await;
        if let Err(error) = &saved {
            tracing::error!(key = %self.key, %error, "cannot record a phase");
        }
        self.saved = saved.is_ok();
        self.saved
    }

    /// The last of a removal: nothing of it is on the host any more.
    async fn forget(&mut self) {
        let event = self.event("removed", "the project was removed; its cache is in the trash".to_owned()).by("admin");
        match self.shared.store.remove_project(&self.key, Some(event)).await {
            Ok(_) => self.removed = true,
            Err(error) => {
                self.setbacks = self.setbacks.and_another(self.now());
                self.look_again = self.setbacks.pause_ends(self.now());
                let text = format!("cannot forget the project: {error}");
                self.answer_stoppers(&Err(StopRefusal::Failed { text, retryable: true }));
            }
        }
    }

    fn event(&self, kind: &'static str, text: String) -> NewEvent {
        NewEvent::new(self.now(), Some(&self.key), kind, text)
    }

    fn log_event(&self, event: NewEvent) {
        drop(self.shared.store.record(event));
    }

    // === Why

    fn explanation(&self) -> Option<Explanation> {
        self.with_situation(|situation| explain(situation, &plan(situation)))
    }

    fn explain_to_askers(&mut self) {
        if self.askers.is_empty() {
            return;
        }
        if let Some(explanation) = self.explanation() {
            for asker in self.askers.drain(..) {
                drop(asker.send(explanation.clone()));
            }
        }
    }

    /// Whether nothing is left that this worker would have to see.
    fn may_go(&self) -> bool {
        self.in_flight.is_none()
            && self.observed.is_some()
            && self.waiters.is_empty()
            && self.stoppers.is_empty()
            && self.leases.is_empty()
            && self.desk.connections.count() == 0
            && self.look_again.is_none()
            && !self.prewarming
            && (self.record.phase.is_quiet() || matches!(self.record.phase, Phase::Failed { .. }))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.leave_queue();
        if self.standing != Standing::Down {
            self.shared.admission.report(&self.key, Standing::Down, &self.desk.own_mailbox);
        }
    }
}

async fn sleep(timer: Option<Duration>) {
    match timer {
        Some(span) => tokio::time::sleep(span).await,
        None => std::future::pending().await,
    }
}
