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
//! | `past.rs` | snapshots, going back, and what is told of both |
//! | `recording.rs` | phases, on the disk and in the journal |
//! | `run.rs` | what is known of one run of the daemon |
//! | `clock.rs` | the worker's own time |

mod answers;
mod clock;
mod doing;
mod inbox;
mod past;
mod recording;
mod run;

use std::sync::Arc;
use std::time::Duration;

use answers::Stopped;
use doing::{InFlight, landed};
use kiln_domain::cache::HistoryPolicy;
use kiln_domain::explain::{Explanation, explain};
use kiln_domain::plan::{
    Demand, InstanceSeen, Observed, Past, Place, Reason, Room, Setbacks, Situation, StopWish, VolumeSeen,
};
use kiln_domain::{
    Key, Lease, Phase, Plan, ProjectRecord, Settings, Snapshot, SnapshotName, Step, Timestamp, Verdict, plan,
};
use past::Damage;
use run::{FirstAnswer, Run};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::admission::Standing;
use super::messages::{Refusal, RefusalKind, StopRefusal, Waiter, Warm};
use super::registry::{Desk, Registry, Shared};
use crate::metrics::{Fault, Stage};

/// A daemon that is up is looked at this often even if nothing happens: its certificates grow old, and so may its image
/// without anybody telling.
const LOOK_EVERY: Duration = Duration::from_hours(1);

/// A project that is needed, and whose volume's place is taken, looks this often whether it still is.
const LOOK_FOR_OURS: Duration = Duration::from_mins(1);

type SnapshotReply = oneshot::Sender<Result<Option<Snapshot>, StopRefusal>>;

type StopReply = oneshot::Sender<Result<(), StopRefusal>>;

/// Somebody who wants it down, and what for.
struct Stopper {
    wish: StopWish,
    /// Whoever uses it.
    force: bool,
    /// What the journal says when it is done.
    why: Option<String>,
    reply: StopReply,
}

impl Stopper {
    /// By force it is stopped first; what is wanted beyond that is done before it comes up again.
    fn wants(&self, running: bool) -> StopWish {
        if self.force && running { StopWish::Force } else { self.wish }
    }
}

/// Somebody who wants its older snapshots gone, and what may stay of them.
struct Thinner {
    keep: HistoryPolicy,
    reply: StopReply,
}

pub(super) struct Worker {
    key: Key,
    shared: Arc<Shared>,
    registry: Registry,
    desk: Desk,
    record: ProjectRecord,
    /// The effective ones, all on the disk.
    settings: Settings,
    /// Changes of settings that are on their way to the disk.
    sets: usize,
    leases: Vec<Lease>,
    /// Connections at the last look, to notice when the last one ends.
    last_connections: usize,
    waiters: Vec<Waiter>,
    stoppers: Vec<Stopper>,
    askers: Vec<oneshot::Sender<Explanation>>,
    snapshot_askers: Vec<SnapshotReply>,
    /// Who wants its older snapshots gone.
    thinners: Vec<Thinner>,
    /// What there is to go back to; `None`: nobody has looked.
    snapshots: Option<Vec<Snapshot>>,
    /// The last that was tried out of this cache, for lists that were read before.
    judged: Option<(SnapshotName, Verdict)>,
    damage: Option<Damage>,
    /// What the last step was begun for.
    cause: Cause,
    room: Room,
    /// Something about the past failed.
    upkeep_paused_until: Option<Timestamp>,
    /// As of the last look that succeeded, and what was done since; `None`: nothing is known.
    observed: Option<(Observed, Timestamp)>,
    /// A look is wanted before anything else is decided.
    look: Option<Occasion>,
    /// The last look failed, and what was seen before is held to be true until another succeeds.
    doubtful: bool,
    /// The last step that was begun since the last look.
    stepped: Option<Step>,
    /// Something happened to the instance since the last look began.
    changed_since: bool,
    setbacks: Setbacks,
    run: Run,
    place: Place,
    queued_since: Option<Instant>,
    standing: Standing,
    in_flight: Option<InFlight>,
    look_again: Option<Timestamp>,
    /// When to try again to write the record.
    save_again: Option<Timestamp>,
    /// One moment on both clocks: what its time is counted from, until it follows the wall clock again.
    anchor: (Timestamp, Instant),
    /// Its record is gone from the store.
    removed: bool,
}

/// What a step is begun for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Plan,
    /// It takes a damaged cache back, and nobody had to ask for it.
    Rescue,
}

/// Why a look is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Occasion {
    /// Nothing happened that is known of: builds are routed meanwhile.
    Routine,
    /// The instance may not be what it was.
    Event,
}

impl Worker {
    /// `record` and `leases` are as the store has them.
    pub(super) fn new(
        shared: Arc<Shared>,
        registry: Registry,
        desk: Desk,
        mut record: ProjectRecord,
        mut leases: Vec<Lease>,
    ) -> Self {
        let now = shared.clock.now();
        // The clock may have gone back while Kiln was not there.
        for lease in &mut leases {
            lease.clamp_to(now, &shared.policy.lease);
        }
        record.last_activity = record.last_activity.min(now);
        for at in [&mut record.cache.snapshot, &mut record.cache.rescued].into_iter().flatten() {
            *at = (*at).min(now);
        }
        desk.load.set_leases(leases.len());
        let settings = shared.settings(&record);
        desk.load.set_members(settings.fan_out);
        Self {
            key: record.key.clone(),
            settings,
            run: Run::of(&record.phase),
            anchor: (now, Instant::now()),
            shared,
            registry,
            desk,
            record,
            sets: 0,
            leases,
            last_connections: 0,
            waiters: Vec::new(),
            stoppers: Vec::new(),
            askers: Vec::new(),
            snapshot_askers: Vec::new(),
            thinners: Vec::new(),
            snapshots: None,
            judged: None,
            damage: None,
            cause: Cause::Plan,
            room: Room::default(),
            upkeep_paused_until: None,
            observed: None,
            look: None,
            doubtful: false,
            stepped: None,
            changed_since: false,
            setbacks: Setbacks::default(),
            place: Place::Unasked,
            queued_since: None,
            standing: Standing::Down,
            in_flight: None,
            look_again: None,
            save_again: None,
            removed: false,
        }
    }

    /// Runs until the project is quiet.
    pub(super) async fn work(mut self) {
        loop {
            if self.in_flight.is_none() {
                self.decide().await;
            }
            if self.removed {
                return self.leave();
            }
            if self.may_go() && self.goes().await {
                return;
            }
            let timer = self.look_again.map(|at| at.since(self.now()));
            // In this order, so that a run on a model host can be repeated.
            tokio::select! {
                biased;
                (outcome, took) = landed(&mut self.in_flight) => {
                    self.in_flight = None;
                    // Before what is told now is dated.
                    self.follow_the_clock();
                    self.take_in(outcome, took).await;
                }
                message = self.desk.mailbox.recv() => match message {
                    Some(message) => {
                        self.follow_the_clock();
                        self.hear(message);
                    }
                    None => return,
                },
                () = sleep(timer) => self.look_again = None,
            }
            self.note_connections();
        }
    }

    /// True: it is out of the registry, and nobody will come any more.
    async fn goes(&mut self) -> bool {
        let forgotten = self.is_unborn() && self.desk.mailbox.is_empty() && self.let_go().await;
        let goes = self.registry.remove_if_idle(&self.key, &self.desk.mailbox);
        if forgotten && !goes && !self.take_back().await {
            self.removed = true;
        }
        goes
    }

    /// Its record is gone: whoever still waits asks again, and makes a new project.
    fn leave(mut self) {
        // What was asked for of the cache was not done to it: it has gone.
        self.answer_wishes(|wish| matches!(wish, StopWish::Rollback(_)), &Err(StopRefusal::NoCache));
        self.answer_stoppers(&Ok(()));
        self.answer_snapshot_askers(&StopRefusal::NoCache);
        let text = "the project was being removed".to_owned();
        self.answer_thinners();
        self.refuse_all(&Refusal { kind: RefusalKind::NotNow, text });
    }

    fn seen(&self) -> Option<&Observed> {
        self.observed.as_ref().map(|(seen, _)| seen)
    }

    // === Deciding

    /// Until something is in flight, or nothing is left to do for now.
    async fn decide(&mut self) {
        self.refresh_place();
        self.follow_the_clock();
        self.make_up_for_a_save().await;
        let mut stopped = Stopped::default();
        loop {
            self.forget_who_has_gone();
            self.tidy_leases();
            self.look_again_now_and_then();
            if self.observed.is_none() || self.look.is_some() {
                if self.wants_a_look() {
                    self.start_observing();
                }
                return;
            }
            if self.record.phase != Phase::Removing
                && let Some((seen, _)) = &self.observed
                && !seen.instance.is_running()
            {
                // Before anything else is planned: what they wanted no longer stands in the way.
                stopped.take_from(&mut self.stoppers, seen);
            }
            let Some(Plan { phase, step, reason, look_again }) = self.with_situation(plan) else { return };
            if reason == Reason::NeedsPlace {
                self.place = self.ask_for_place().await;
                self.follow_the_clock();
                self.queued_since = Some(Instant::now());
                continue;
            }
            // Nothing may run on it. A start that was given up on lands when it likes, and nobody may tell.
            if self.stepped.is_some() && step.is_some_and(Step::takes_the_cache) {
                self.look = Some(Occasion::Event);
                continue;
            }
            if self.place == Place::Admitted
                && let Some(since) = self.queued_since.take()
            {
                self.shared.metrics.waited(Stage::Queue, since.elapsed());
            }
            self.give_place_back(step, &reason);
            let next = look_again.into_iter().chain(self.next_expiry()).chain(self.next_look());
            self.look_again = next.chain(self.save_again).min();
            self.explain_to_askers();
            let recorded = self.record_phase(phase, step, &reason).await;
            // A disk takes its time, and whoever is answered now is not to have a lease of before the leap.
            self.follow_the_clock();
            stopped.answer();
            if !recorded {
                return self.leave_queue();
            }
            self.report();
            if let Some(step) = step {
                self.note_fault(&reason);
                self.cause = if matches!(reason, Reason::Rescue { .. }) { Cause::Rescue } else { Cause::Plan };
                return self.start_step(step);
            }
            if self.record.phase == Phase::Removing {
                return self.forget().await;
            }
            // They get what they wait for by waiting; whoever wants it down does not.
            if matches!(reason, Reason::Queued { .. } | Reason::NotAnswering) {
                self.answer_stoppers(&Err(StopRefusal::Busy(reason.to_string())));
                return;
            }
            // With a cache there is one, or it is on its way.
            self.answer_snapshot_askers(&StopRefusal::NoCache);
            self.answer_thinners();
            if self.somebody_waits() {
                self.answer_who_waits(&reason);
            } else if self.changed_since {
                self.look = Some(Occasion::Event);
            } else {
                return;
            }
        }
    }

    /// Whoever gave up on a stop or a removal does not want it done behind their back; one that has begun is finished.
    fn forget_who_has_gone(&mut self) {
        self.waiters.retain(|waiter| !waiter.has_gone());
        if self.record.phase != Phase::Removing {
            self.stoppers.retain(|stopper| !stopper.reply.is_closed());
        }
    }

    fn note_fault(&self, reason: &Reason) {
        match reason {
            Reason::Wedged(_) | Reason::NotServing => self.shared.metrics.daemon_at_fault(Fault::Wedged),
            Reason::HalfMade { .. } => self.shared.metrics.daemon_at_fault(Fault::HalfMade),
            _ => {}
        }
    }

    fn somebody_waits(&self) -> bool {
        !self.waiters.is_empty() || !self.stoppers.is_empty()
    }

    /// When no step is left that would bring them what they wait for.
    fn answer_who_waits(&mut self, reason: &Reason) {
        if let Some(warm) = self.routable() {
            self.answer_all(warm);
        } else if !self.waiters.is_empty() {
            let refusal = match reason {
                Reason::Refused(why) => {
                    self.shared.metrics.admission_refused((*why).into());
                    Refusal { kind: RefusalKind::NotAdmitted, text: reason.to_string() }
                }
                Reason::Foreign { .. } => {
                    self.shared.metrics.daemon_at_fault(Fault::Foreign);
                    Refusal { kind: RefusalKind::Broken, text: self.record.phase.to_string() }
                }
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
        if self.look.is_none() && self.next_look().is_some_and(|at| at <= self.now()) {
            self.look = Some(Occasion::Routine);
        }
    }

    /// Only what runs grows old unnoticed; after a look that failed, as soon as its pause is over.
    fn next_look(&self) -> Option<Timestamp> {
        let (seen, at) = self.observed.as_ref()?;
        if self.doubtful {
            return Some(self.setbacks.pause_ends(self.now()).unwrap_or(self.now()));
        }
        let every = match (seen.instance.is_running(), &seen.volume) {
            // It may have been moved out of the way, and nothing tells.
            (_, VolumeSeen::Foreign { .. }) if self.is_needed() => LOOK_FOR_OURS,
            (true, _) => LOOK_EVERY,
            (false, _) => return None,
        };
        Some((*at).min(self.now()).plus(every))
    }

    fn is_needed(&self) -> bool {
        self.demand().need(&self.settings, self.now(), &self.shared.policy).is_some()
    }

    /// What is known of the instance may not be true any more.
    fn something_happened(&mut self, occasion: Occasion) {
        if self.in_flight.is_some() {
            self.changed_since = true;
        } else if self.look != Some(Occasion::Event) {
            self.look = Some(occasion);
        }
    }

    fn demand(&self) -> Demand<'_> {
        let running = self.seen().is_some_and(|seen| seen.instance.is_running());
        Demand {
            waiters: self.waiters.len(),
            leases: &self.leases,
            connections: self.desk.connections.count(),
            stop: self.stoppers.iter().map(|stopper| stopper.wants(running)).max(),
            snapshot: !self.snapshot_askers.is_empty(),
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
            health: self.run.health,
            counted: self.run.counted,
            served: self.run.first_answer == FirstAnswer::Given,
            unborn: self.run.first_answer == FirstAnswer::Due,
            leaks: self.run.leaks.as_deref(),
            gave_up_on: self.run.gave_up_on.as_deref(),
            place: self.place,
            past: Past {
                snapshots: self.snapshots.as_deref(),
                damage: self.damage.as_ref().map(|damage| damage.says.as_str()),
                unclear: self.damage.as_ref().is_some_and(|damage| damage.unclear.is_some()),
                cheap: self.shared.effects.snapshots_are_cheap(),
                on_trial: self.shared.trials.under_way(&self.key),
                thin: self.thinners.iter().map(|thinner| thinner.keep).min_by_key(|keep| (keep.keep, keep.keep_for)),
                paused_until: self.upkeep_paused_until,
            },
            room: self.room,
            room_wanted: self.run.room_wanted,
            now: self.now(),
            policy: &self.shared.policy,
        }))
    }

    /// The daemon, if a build may be sent to it this instant. A question to it does not change that, nor does a look out of
    /// routine.
    fn routable(&self) -> Option<Warm> {
        let undisturbed = self.in_flight.as_ref().is_none_or(InFlight::lets_builds_through);
        let undisturbed = undisturbed && self.look != Some(Occasion::Event);
        // Its number is that of the run which was recorded with it, and no other's.
        let serving = match self.seen().map(|seen| &seen.instance) {
            Some(InstanceSeen::Running { serving, incarnation, .. }) => {
                *serving && self.record.incarnation.as_ref() == Some(incarnation)
            }
            _ => false,
        };
        let warm = self.record.phase == Phase::Warm && undisturbed && serving;
        warm.then_some(Warm { address: self.record.address, generation: self.record.generation })
    }

    // === A place among the starts

    /// Others before it may have gone, and a start that was refused may be asked for again.
    fn refresh_place(&mut self) {
        match self.place {
            Place::Queued { .. } => self.place = self.shared.admission.place(&self.key),
            Place::Refused(_) => self.place = Place::Unasked,
            Place::Unasked | Place::Admitted => {}
        }
    }

    async fn ask_for_place(&self) -> Place {
        let new_volume = self.seen().is_some_and(|seen| seen.volume == VolumeSeen::Absent);
        self.shared.admission.ask(&self.key, new_volume, &self.desk.own_mailbox).await
    }

    /// Once it is not on its way up any more.
    fn give_place_back(&mut self, step: Option<Step>, reason: &Reason) {
        let waits = matches!(reason, Reason::Queued { .. } | Reason::Refused(_));
        if !waits && !step.is_some_and(Step::brings_up) {
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
        let needed = self.is_needed();
        let standing = match (running, needed) {
            (false, _) => Standing::Down,
            (true, true) => Standing::Needed,
            (true, false) => Standing::Unneeded(self.record.last_activity),
        };
        if needed || !running {
            self.run.room_wanted = false;
        }
        if standing != self.standing {
            self.standing = standing;
            self.shared.admission.report(&self.key, standing, &self.desk.own_mailbox);
        }
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
            && self.look.is_none()
            && self.place == Place::Unasked
            && !self.seen().is_some_and(|seen| seen.instance.is_running())
            && self.save_again.is_none()
            && self.waiters.is_empty()
            && self.stoppers.is_empty()
            && self.snapshot_askers.is_empty()
            && self.thinners.is_empty()
            && self.leases.is_empty()
            && self.sets == 0
            && self.desk.connections.count() == 0
            && self.look_again.is_none()
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
