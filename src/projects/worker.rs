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

use std::sync::Arc;
use std::time::Duration;

use kiln_domain::plan::{Demand, InstanceSeen, Observed, Reason, Setbacks, Situation, Step};
use kiln_domain::{BuildSpec, Key, Lease, Phase, Plan, ProjectRecord, Timestamp, TokenHash, plan};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::effects::EffectError;
use super::messages::{
    Granted, Held, Message, Refusal, Releasing, Reply, Status, StopRefusal, Undelivered, Waiter, Warm,
};
use super::registry::{Desk, Registry, Shared};
use crate::causes;
use crate::store::{NewEvent, StoreError};

enum Outcome {
    Observed(Result<Look, EffectError>),
    Performed(Step, Result<Option<String>, EffectError>),
}

struct Look {
    seen: Observed,
    /// Of a daemon that went away by itself.
    last_words: Option<String>,
}

/// An effect under way. Dropping it does not cancel it: every step is safe to repeat, and half of one is not better.
struct InFlight {
    step: Option<Step>,
    task: JoinHandle<Outcome>,
}

pub(super) struct Worker {
    key: Key,
    shared: Arc<Shared>,
    registry: Registry,
    desk: Desk,
    record: ProjectRecord,
    leases: Vec<Lease>,
    /// Connections at the last look, to notice when the last one ends.
    last_connections: usize,
    waiters: Vec<Waiter>,
    stoppers: Vec<oneshot::Sender<Result<(), StopRefusal>>>,
    /// A prewarm counts as a request until the daemon answers or fails.
    prewarming: bool,
    observed: Option<Observed>,
    /// Something happened to the instance since the last look began.
    changed_since: bool,
    setbacks: Setbacks,
    /// The run of the instance whose first answer was waited for in vain.
    gave_up_on: Option<String>,
    in_flight: Option<InFlight>,
    look_again: Option<Timestamp>,
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
            shared,
            registry,
            desk,
            record,
            leases,
            last_connections: 0,
            waiters: Vec::new(),
            stoppers: Vec::new(),
            prewarming: false,
            observed: None,
            changed_since: false,
            setbacks: Setbacks::default(),
            gave_up_on: None,
            in_flight: None,
            look_again: None,
        }
    }

    /// Runs until the project is quiet.
    pub(super) async fn work(mut self) {
        loop {
            if self.in_flight.is_none() {
                self.decide().await;
            }
            if self.may_go() && self.registry.remove_if_idle(&self.key, &self.desk.mailbox) {
                return;
            }
            let timer = self.look_again.map(|at| at.since(self.now()));
            tokio::select! {
                message = self.desk.mailbox.recv() => match message {
                    Some(message) => self.hear(message),
                    None => return,
                },
                outcome = landed(&mut self.in_flight) => {
                    self.in_flight = None;
                    self.take_in(outcome).await;
                }
                () = sleep(timer) => self.look_again = None,
            }
            self.note_connections();
        }
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    // === What comes in

    fn hear(&mut self, message: Message) {
        match message {
            Message::Route { spec, token, reply } => {
                if let Err(refusal) = self.check_identity(&spec) {
                    return drop(reply.send(Err(refusal)));
                }
                self.touch();
                match self.routable() {
                    Some(warm) => self.grant(warm, token, reply),
                    None => self.waiters.push(Waiter::Route { token, reply }),
                }
            }
            Message::Connect { reply } => {
                if let Some(warm) = self.routable() {
                    return self.connect(warm, reply);
                }
                // As a route does: a start that outlasts this client's patience is for the client's next try.
                self.touch();
                self.waiters.push(Waiter::Connect { reply });
            }
            Message::Prewarm { spec, reply } => {
                let answer = self.check_identity(&spec).map(|()| self.routable());
                if answer.is_ok() {
                    self.touch_on_disk();
                    self.prewarming = true;
                }
                drop(reply.send(answer));
            }
            Message::Complete { token, why, reply } => {
                let released = self.complete(&token, why);
                if let Some(reply) = reply {
                    drop(reply.send(released));
                }
            }
            Message::StillHeld { lease } => {
                // A worker made since then has read it from the disk.
                if !self.leases.iter().any(|known| known.token == lease.token) {
                    self.leases.push(lease);
                }
            }
            Message::Stop { reply } => self.hear_stop(reply),
            Message::InstanceChanged if self.in_flight.is_none() => self.observed = None,
            Message::InstanceChanged => self.changed_since = true,
            Message::Nudge => {}
        }
    }

    /// A key that two identities share is refused, never shared (K1).
    fn check_identity(&self, spec: &BuildSpec) -> Result<(), Refusal> {
        if self.record.spec == *spec {
            return Ok(());
        }
        let text = StoreError::OtherIdentity { key: self.key.clone(), stored: Box::new(self.record.spec.clone()) };
        Err(Refusal { retryable: false, timed_out: false, text: text.to_string() })
    }

    fn touch(&mut self) {
        self.record.last_activity = self.now();
    }

    /// Activity that no other write takes along to the disk.
    fn touch_on_disk(&mut self) {
        self.touch();
        drop(self.shared.store.save_project(&self.record, None));
    }

    /// It counts no more from here on; as with its making, whoever wants to waits for the disk. One that nobody waits for
    /// and that could not be removed there comes back with the next start of Kiln, and ends with its grace.
    fn complete(&mut self, token: &TokenHash, why: &str) -> Option<Releasing> {
        let at = self.leases.iter().position(|lease| lease.token == *token)?;
        let lease = self.leases.remove(at);
        self.touch();
        let event = self.event("completed", format!("a build ended: {why}"));
        Some(Releasing { lease, removed: self.shared.store.remove_lease(token, self.now(), Some(event)) })
    }

    fn hear_stop(&mut self, reply: oneshot::Sender<Result<(), StopRefusal>>) {
        let demand = self.demand();
        if demand.is_busy(self.now(), &self.shared.policy) {
            let need = demand.need(&self.record, self.now(), &self.shared.policy);
            let text = need.map(|need| need.to_string()).unwrap_or_default();
            drop(reply.send(Err(StopRefusal::Busy(text))));
        } else {
            self.stoppers.push(reply);
        }
    }

    /// The end of a connection is activity: the idle window starts there.
    fn note_connections(&mut self) {
        let count = self.desk.connections.count();
        if count < self.last_connections {
            self.touch_on_disk();
        }
        self.last_connections = count;
    }

    async fn take_in(&mut self, outcome: Outcome) {
        match outcome {
            // It may be out of date already: look again.
            Outcome::Observed(Ok(_)) if self.changed_since => {}
            Outcome::Observed(Ok(Look { seen, last_words })) => {
                if let Some(words) = last_words {
                    self.note_death(&words);
                }
                self.observed = Some(seen);
            }
            Outcome::Observed(Err(error)) => self.set_back("look at it", &error).await,
            Outcome::Performed(step, Ok(incarnation)) => {
                if let Some(observed) = &mut self.observed {
                    observed.apply(step, incarnation.clone());
                }
                match step {
                    Step::StartInstance => self.record.incarnation = incarnation,
                    Step::StopInstance(_) => self.record.incarnation = None,
                    _ => {}
                }
            }
            Outcome::Performed(step, Err(error)) => {
                if step == Step::AwaitServing {
                    self.gave_up_on.clone_from(&self.record.incarnation);
                }
                self.set_back(step.name(), &error).await;
            }
        }
    }

    /// A crash is worth a line in the journal.
    fn note_death(&mut self, last_words: &str) {
        self.setbacks = self.setbacks.and_another(self.now());
        let event = self.event("died", format!("the daemon went away by itself; its last words:\n{last_words}"));
        self.log_event(event);
    }

    async fn set_back(&mut self, what: &str, error: &EffectError) {
        self.setbacks = self.setbacks.and_another(self.now());
        self.observed = None;
        let reason = causes::in_one_line(error);
        tracing::warn!(key = %self.key, %reason, "could not {what}");
        let text = format!("could not {what}: {reason}");
        let phase = Phase::Failed { reason: text.clone() };
        self.show(&phase, text.clone(), None);
        self.enter(phase, "failed", text.clone()).await;
        let refusal = Refusal { retryable: error.is_retryable(), timed_out: error.timed_out(), text };
        self.refuse_all(&refusal);
    }

    // === Deciding

    /// Until something is in flight, or nothing is left to do for now.
    async fn decide(&mut self) {
        loop {
            self.waiters.retain(|waiter| !waiter.has_gone());
            self.forget_expired_leases();
            if self.observed.is_none() {
                if self.wants_a_look() {
                    self.start_observing();
                }
                return;
            }
            let Some(Plan { phase, step, reason, look_again }) = self.plan() else { return };
            self.look_again = look_again.into_iter().chain(self.next_expiry()).min();
            self.record_phase(phase, step, &reason).await;
            if !matches!(self.observed, Some(Observed { instance: InstanceSeen::Running { .. }, .. })) {
                self.answer_stoppers(&Ok(()));
            }
            if let Some(step) = step {
                return self.start_step(step);
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
            let text = self.record.phase.to_string();
            self.refuse_all(&Refusal { retryable: false, timed_out: false, text });
        }
        self.answer_stoppers(&Err(StopRefusal::Busy(reason.to_string())));
    }

    fn answer_stoppers(&mut self, answer: &Result<(), StopRefusal>) {
        for stopper in self.stoppers.drain(..) {
            drop(stopper.send(answer.clone()));
        }
    }

    /// After a setback with nobody waiting there is no hurry to look.
    fn wants_a_look(&mut self) -> bool {
        let calm_at = self.setbacks.pause_ends(self.now()).filter(|_| !self.somebody_waits());
        if calm_at.is_some() {
            self.look_again = calm_at;
        }
        calm_at.is_none()
    }

    fn demand(&self) -> Demand<'_> {
        Demand {
            waiters: self.waiters.len() + usize::from(self.prewarming),
            leases: &self.leases,
            connections: self.desk.connections.count(),
            stop_requested: !self.stoppers.is_empty(),
        }
    }

    fn plan(&self) -> Option<Plan> {
        let observed = self.observed.as_ref()?;
        Some(plan(&Situation {
            record: &self.record,
            observed,
            demand: self.demand(),
            setbacks: self.setbacks,
            gave_up_on: self.gave_up_on.as_deref(),
            now: self.now(),
            policy: &self.shared.policy,
        }))
    }

    /// The daemon, if a build may be sent to it this instant.
    fn routable(&self) -> Option<Warm> {
        let warm = self.record.phase == Phase::Warm && self.in_flight.is_none() && self.observed.is_some();
        warm.then_some(Warm { address: self.record.address, generation: self.record.generation })
    }

    async fn record_phase(&mut self, phase: Phase, step: Option<Step>, reason: &Reason) {
        // The generation goes up before the start, so that a crash in between can only skip a number.
        if matches!(step, Some(Step::StartInstance | Step::AdoptInstance)) {
            self.record.generation = self.record.generation.next();
        }
        if let (Some(Step::AdoptInstance), Some(Observed { instance: InstanceSeen::Running { incarnation, .. }, .. })) =
            (step, &self.observed)
        {
            self.record.incarnation = Some(incarnation.clone());
        }
        self.show(&phase, reason.to_string(), step);
        if phase != self.record.phase || step.is_some() {
            let text = match step {
                Some(step) => format!("{}: {reason}", step.name()),
                None => format!("{phase}: {reason}"),
            };
            let kind = if step.is_some() { "step" } else { "phase" };
            self.enter(phase, kind, text).await;
        }
    }

    fn show(&self, phase: &Phase, reason: String, step: Option<Step>) {
        self.desk.status.send_replace(Status { phase: Some(phase.clone()), reason, step: step.map(Step::name) });
    }

    /// Takes note of a phase, in memory and on disk. What cannot be written now is written with the next change.
    async fn enter(&mut self, phase: Phase, kind: &'static str, text: String) {
        self.record.phase = phase;
        let event = self.event(kind, text);
        if let Err(error) = self.shared.store.save_project(&self.record, Some(event)).await {
            tracing::error!(key = %self.key, %error, "cannot record a phase");
        }
    }

    // === What goes out

    fn start_observing(&mut self) {
        self.changed_since = false;
        let shared = Arc::clone(&self.shared);
        let record = self.record.clone();
        let task = tokio::spawn(async move {
            let after = shared.deadlines.observe;
            let look = shared.effects.observe(&record);
            let timed_out = EffectError::TimedOut { step: "look at the host", after };
            let seen = match tokio::time::timeout(after, look).await.unwrap_or(Err(timed_out)) {
                Ok(seen) => seen,
                Err(error) => return Outcome::Observed(Err(error)),
            };
            let last_words = if went_away(&record, &seen) {
                let words = tokio::time::timeout(after, shared.effects.last_words(&record)).await;
                Some(words.unwrap_or_default())
            } else {
                None
            };
            Outcome::Observed(Ok(Look { seen, last_words }))
        });
        self.in_flight = Some(InFlight { step: None, task });
    }

    fn start_step(&mut self, step: Step) {
        let shared = Arc::clone(&self.shared);
        let record = self.record.clone();
        let task = tokio::spawn(async move {
            let after = shared.deadlines.of(step);
            let effect = shared.effects.perform(step, &record);
            let timed_out = EffectError::TimedOut { step: step.name(), after };
            Outcome::Performed(step, tokio::time::timeout(after, effect).await.unwrap_or(Err(timed_out)))
        });
        self.in_flight = Some(InFlight { step: Some(step), task });
    }

    fn answer_all(&mut self, warm: Warm) {
        self.prewarming = false;
        for waiter in std::mem::take(&mut self.waiters) {
            match waiter {
                Waiter::Route { token, reply } => self.grant(warm, token, reply),
                Waiter::Connect { reply } => self.connect(warm, reply),
            }
        }
    }

    fn refuse_all(&mut self, refusal: &Refusal) {
        self.prewarming = false;
        for waiter in std::mem::take(&mut self.waiters) {
            waiter.refuse(refusal.clone());
        }
        self.answer_stoppers(&Err(StopRefusal::Failed(refusal.text.clone())));
    }

    /// The lease is born here, so that a long start takes nothing of its grace, and counts from here on, in memory; the
    /// caller waits until it is on disk. Not waiting for it here is what lets the leases of many callers share one commit.
    fn grant(&mut self, warm: Warm, token: TokenHash, reply: Reply<Granted>) {
        let lease = Lease::new(token.clone(), self.now(), &self.shared.policy.lease);
        self.record.builds.note(lease.created);
        let event = self.event("routed", format!("a build was routed to generation {}", warm.generation.get()));
        let durable = self.shared.store.add_lease(&self.key, &lease, &self.record.builds, Some(event));
        self.leases.push(lease);
        let undelivered = Undelivered::new(self.desk.own_mailbox.clone(), token);
        // A caller that has gone drops the grant, and that releases the lease.
        drop(reply.send(Ok(Granted { warm, durable, undelivered })));
    }

    fn connect(&mut self, warm: Warm, reply: Reply<(Warm, Held)>) {
        let held = self.desk.connections.hold(self.desk.own_mailbox.clone());
        // A caller that has gone drops the hold with the answer.
        drop(reply.send(Ok((warm, held))));
        self.note_connections();
    }

    fn forget_expired_leases(&mut self) {
        let now = self.now();
        let expired: Vec<TokenHash> =
            self.leases.iter().filter(|l| l.is_expired(now)).map(|l| l.token.clone()).collect();
        if !expired.is_empty() {
            self.leases.retain(|lease| !lease.is_expired(now));
            let text = format!("{} lease(s) reached the maximum build age", expired.len());
            drop(self.shared.store.forget_leases(expired));
            let event = self.event("expired", text);
            self.log_event(event);
        }
    }

    fn next_expiry(&self) -> Option<Timestamp> {
        self.leases.iter().map(|lease| lease.expires).min()
    }

    fn event(&self, kind: &'static str, text: String) -> NewEvent {
        NewEvent::new(self.now(), Some(&self.key), kind, text)
    }

    fn log_event(&self, event: NewEvent) {
        drop(self.shared.store.record(event));
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

/// It was warm, nobody stopped it, and it is not running.
fn went_away(record: &ProjectRecord, seen: &Observed) -> bool {
    record.phase == Phase::Warm && matches!(seen.instance, InstanceSeen::Stopped | InstanceSeen::Absent)
}

/// The outcome of what is in flight; never, if nothing is.
async fn landed(in_flight: &mut Option<InFlight>) -> Outcome {
    let Some(InFlight { step, task }) = in_flight else { return std::future::pending().await };
    match task.await {
        Ok(outcome) => outcome,
        Err(error) => {
            // A panic in an effect is a fault of ours; the project stands still and says so, nobody else notices.
            tracing::error!(%error, "an effect ended without an outcome");
            let failed = EffectError::TimedOut { step: "an effect ended without an outcome", after: Duration::ZERO };
            match *step {
                Some(step) => Outcome::Performed(step, Err(failed)),
                None => Outcome::Observed(Err(failed)),
            }
        }
    }
}

async fn sleep(timer: Option<Duration>) {
    match timer {
        Some(span) => tokio::time::sleep(span).await,
        None => std::future::pending().await,
    }
}
