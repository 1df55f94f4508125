//! Looks and steps, each as a task of its own, and what their outcomes change.

use std::sync::Arc;
use std::time::Duration;

use kiln_domain::health::Probed;
use kiln_domain::plan::{Counted, Done, InstanceSeen, Observed};
use kiln_domain::{Phase, ProjectRecord, Step};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::effects::EffectError;
use super::super::messages::{Refusal, RefusalKind, StopRefusal};
use super::{Cause, FirstAnswer, Occasion, Run, Worker};
use crate::causes;
use crate::metrics::{Fault, Stage, StepLabel};

pub(super) enum Outcome {
    Observed(Result<Look, EffectError>),
    Performed(Step, Result<Done, EffectError>),
}

pub(super) struct Look {
    seen: Observed,
    /// Of a daemon that went away by itself.
    last_words: Option<String>,
}

/// An effect under way. Dropping it does not cancel it: every step is safe to repeat, and half of one is not better.
pub(super) struct InFlight {
    /// `None`: it looks.
    pub(super) step: Option<Step>,
    /// A look for no reason.
    routine: bool,
    since: Instant,
    task: JoinHandle<Outcome>,
}

impl InFlight {
    pub(super) fn lets_builds_through(&self) -> bool {
        self.routine || self.step.is_some_and(|step| step == Step::Probe || step.is_upkeep())
    }
}

impl Worker {
    pub(super) fn start_observing(&mut self) {
        self.changed_since = false;
        let routine = self.look.take() == Some(Occasion::Routine);
        let shared = Arc::clone(&self.shared);
        let (record, settings) = (self.record.clone(), self.settings.clone());
        let task = tokio::spawn(async move {
            let after = shared.deadlines.observe;
            let look = shared.effects.observe(&record, &settings);
            let timed_out = EffectError::TimedOut { step: "look at the host", after };
            let seen = match tokio::time::timeout(after, look).await.unwrap_or(Err(timed_out)) {
                Ok(seen) => seen,
                Err(error) => return Outcome::Observed(Err(error)),
            };
            let last_words = if went_away(&record, &seen) {
                let words = tokio::time::timeout(after, shared.effects.last_words(&record, &settings)).await;
                Some(words.unwrap_or_default())
            } else {
                None
            };
            Outcome::Observed(Ok(Look { seen, last_words }))
        });
        self.in_flight = Some(InFlight { step: None, routine, since: Instant::now(), task });
    }

    pub(super) fn start_step(&mut self, step: Step) {
        self.stepped = Some(step);
        let shared = Arc::clone(&self.shared);
        let (record, settings) = (self.record.clone(), self.settings.clone());
        let task = tokio::spawn(async move {
            let after = shared.deadlines.of(step);
            let effect = shared.effects.perform(step, &record, &settings);
            let timed_out = EffectError::TimedOut { step: step.name(), after };
            Outcome::Performed(step, tokio::time::timeout(after, effect).await.unwrap_or(Err(timed_out)))
        });
        self.in_flight = Some(InFlight { step: Some(step), routine: false, since: Instant::now(), task });
    }

    pub(super) async fn take_in(&mut self, outcome: Outcome, took: Duration) {
        self.measure(&outcome, took);
        if let Outcome::Performed(Step::Rollback(to), Err(_)) = &outcome {
            self.note_unclear_rollback(*to);
        }
        match outcome {
            // It may be out of date already.
            Outcome::Observed(Ok(_)) if self.changed_since => self.look = Some(Occasion::Event),
            Outcome::Observed(Ok(Look { seen, last_words })) => {
                if let Some(words) = last_words {
                    self.note_death(&words);
                }
                (self.doubtful, self.stepped) = (false, None);
                self.note_run(&seen);
                self.observed = Some((seen, self.now()));
                self.outdate_if_full();
            }
            Outcome::Observed(Err(error))
                if self.run.first_answer == FirstAnswer::Given
                    && self.record.phase == Phase::Warm
                    && self.observed.is_some() =>
            {
                self.doubt(&error);
            }
            Outcome::Observed(Err(error)) => self.set_back("look at it", &error).await,
            Outcome::Performed(step, Ok(done)) => self.note_done(step, &done),
            Outcome::Performed(_, Err(error @ EffectError::NotIsolated { .. })) => self.note_leak(&error),
            Outcome::Performed(step, Err(error)) if step.only_asks() => {
                tracing::debug!(key = %self.key, %error, "could not {}", step.name());
                self.note_probe(Probed { answered: false, cpu: None });
                if step == Step::Probe && self.key.is_fork() {
                    self.note_unproven(&error);
                }
            }
            Outcome::Performed(step, Err(error)) if step.is_upkeep() => self.note_failed_upkeep(step, &error),
            Outcome::Performed(step, Err(error)) if step.is_a_wish() && self.cause != Cause::Rescue => {
                self.note_failed_wish(step, &error);
            }
            Outcome::Performed(step, Err(error)) => {
                if self.note_damage(&error) || self.note_full(&error) {
                    return;
                }
                if step == Step::AwaitServing {
                    self.run.gave_up_on.clone_from(&self.record.incarnation);
                }
                self.set_back(step.name(), &error).await;
            }
        }
    }

    fn measure(&self, outcome: &Outcome, took: Duration) {
        let metrics = &self.shared.metrics;
        let (step, failed) = match outcome {
            Outcome::Observed(outcome) => (StepLabel::Observe, outcome.is_err()),
            Outcome::Performed(step, outcome) => (StepLabel::from(*step), outcome.is_err()),
        };
        if failed {
            metrics.step_failed(step, took);
        } else {
            metrics.step_done(step, took);
        }
        if let Outcome::Performed(step, Ok(_)) = outcome
            && let Some(stage) = Stage::of(*step)
        {
            metrics.waited(stage, took);
        }
    }

    fn note_done(&mut self, step: Step, done: &Done) {
        let now = self.now();
        if let Some((observed, _)) = &mut self.observed {
            observed.apply(step, done);
        }
        if matches!(step, Step::Discard | Step::DestroyVolume) {
            // What is forgotten nobody removes: something that was given up on before may have been done meanwhile.
            self.something_happened(Occasion::Event);
        }
        match (step, done) {
            (Step::StartInstance, Done::Started { incarnation }) => {
                self.record.incarnation = Some(incarnation.clone());
                self.forget_run();
                self.run.first_answer = FirstAnswer::Due;
            }
            (Step::StopInstance(_), _) => {
                self.record.incarnation = None;
                self.forget_run();
            }
            (Step::AdoptInstance, _) => self.forget_run(),
            (Step::CreateVolume, _) => self.note_new_cache(),
            (Step::AwaitServing, _) => {
                self.room.full = false;
                self.note_probe(Probed { answered: true, cpu: None });
            }
            (_, Done::Snapshots { all, taken }) => self.note_snapshots(step, all, *taken),
            (_, Done::Cloned { from }) => {
                self.log_event(self.event("cloned", format!("its cache is a copy of {from}")));
            }
            (Step::DestroySnapshot(name), _) => self.note_destroyed(name),
            (_, Done::Measured(fill)) => self.room.measured = Some((now, *fill)),
            (Step::Resize(to), _) => self.note_resized(to),
            (Step::Rollback(to), _) => self.note_rollback(to),
            (Step::DiscardCache | Step::DestroyVolume, _) => self.note_emptied(step),
            (_, Done::Probed(probed)) => self.note_probe(*probed),
            (_, Done::Builds { count, cpu }) => {
                self.note_counted(Probed { answered: count.is_some(), cpu: *cpu });
                self.run.counted = count.map(|builds| Counted { builds, at: now });
                if count.is_some_and(|builds| builds > 0) {
                    self.touch_on_disk();
                }
            }
            _ => {}
        }
    }

    fn note_probe(&mut self, probed: Probed) {
        self.note_health(probed);
        // One call may be lost to anything; builds are kept away from a daemon only when it is silent for certain.
        if let Some((observed, _)) = &mut self.observed
            && (probed.answered || self.run.health.is_mute())
        {
            observed.answers(probed.answered);
        }
    }

    /// K7: one that says what it builds has not been shown to be kept apart by that, as a probe does.
    fn note_counted(&mut self, probed: Probed) {
        let serves =
            matches!(self.seen(), Some(Observed { instance: InstanceSeen::Running { serving: true, .. }, .. }));
        if self.key.is_fork() && probed.answered && !serves {
            self.note_health(probed);
            self.run.health.suspect();
        } else {
            self.note_probe(probed);
        }
    }

    fn note_health(&mut self, probed: Probed) {
        self.run.health.note(self.now(), probed, &self.shared.policy.health);
        if !probed.answered && probed.cpu.is_none() {
            // It may not be there any more, and nobody have told: events are hints.
            self.something_happened(Occasion::Event);
        }
        if probed.answered {
            self.run.first_answer = FirstAnswer::Given;
            self.run.gave_up_on = None;
            self.note_opened();
        }
    }

    /// What a look tells of the daemon's health. One that answers is well; one that does not is asked properly, which takes
    /// longer than a look has time for.
    fn note_run(&mut self, seen: &Observed) {
        if let InstanceSeen::Running { serving, incarnation, .. } = &seen.instance
            && self.record.incarnation.as_ref() == Some(incarnation)
        {
            if *serving {
                self.note_probe(Probed { answered: true, cpu: None });
            } else {
                self.run.health.suspect();
            }
        }
    }

    fn forget_run(&mut self) {
        // A start that was waited for in vain is remembered by its name.
        let gave_up_on = self.run.gave_up_on.take();
        self.run = Run { gave_up_on, ..Run::default() };
    }

    /// The host could not be looked at. What was seen before stays true until the contrary is seen: a daemon does not need
    /// the host's interfaces to serve.
    fn doubt(&mut self, error: &EffectError) {
        self.setbacks = self.setbacks.and_another(self.now());
        self.doubtful = true;
        let reason = causes::in_one_line(error);
        tracing::warn!(key = %self.key, %reason, "could not look at it; it is taken to be as it was");
        self.log_event(self.event("doubt", format!("could not look at it: {reason}")));
    }

    /// K7: nobody is sent there any more, and it goes down at once, whoever is there.
    fn note_leak(&mut self, error: &EffectError) {
        let reached = causes::in_one_line(error);
        tracing::error!(key = %self.key, reached, "an untrusted daemon is not kept apart; it is stopped");
        self.setbacks = self.setbacks.and_another(self.now());
        self.shared.metrics.daemon_at_fault(Fault::NotIsolated);
        self.log_event(self.event("not-isolated", reached.clone()));
        if let Some((observed, _)) = &mut self.observed {
            observed.answers(false);
        }
        (self.run.first_answer, self.run.leaks) = (FirstAnswer::Unknown, Some(reached.clone()));
        self.refuse_all(&Refusal { kind: RefusalKind::Broken, text: reached });
    }

    /// K7: nobody is sent there until it is shown again. What runs in it stays: nothing says that it leaks.
    fn note_unproven(&mut self, error: &EffectError) {
        let reason = causes::in_one_line(error);
        tracing::warn!(key = %self.key, reason, "an untrusted daemon cannot be shown to be kept apart; it gets no more builds");
        if let Some((observed, _)) = &mut self.observed {
            observed.answers(false);
        }
    }

    /// A crash is worth a line in the journal.
    fn note_death(&mut self, last_words: &str) {
        self.setbacks = self.setbacks.and_another(self.now());
        self.shared.metrics.daemon_at_fault(Fault::Died);
        self.forget_run();
        let event = self.event("died", format!("the daemon went away by itself; its last words:\n{last_words}"));
        self.log_event(event);
    }

    async fn set_back(&mut self, what: &str, error: &EffectError) {
        self.setbacks = self.setbacks.and_another(self.now());
        (self.observed, self.look, self.doubtful) = (None, None, false);
        self.leave_queue();
        let text = "the host cannot be looked at or changed now".to_owned();
        self.answer_snapshot_askers(&StopRefusal::Failed { text, retryable: true });
        self.answer_thinners();
        let reason = error.in_words();
        tracing::warn!(key = %self.key, %reason, "could not {what}");
        let text = format!("could not {what}: {reason}");
        // A removal that began stays one, whatever comes between.
        let phase = match self.record.phase {
            Phase::Removing => Phase::Removing,
            _ => Phase::Failed { reason: text.clone() },
        };
        self.show(&phase, text.clone(), None);
        let event = self.event("failed", text.clone());
        // What cannot be written now is written with the next change.
        let _ = self.enter(phase, event).await;
        let kind = match (error.timed_out(), error.is_retryable()) {
            _ if error.is_no_room() => RefusalKind::NoRoom,
            (true, _) => RefusalKind::TimedOut,
            (false, true) => RefusalKind::NotNow,
            (false, false) => RefusalKind::Broken,
        };
        self.refuse_all(&Refusal { kind, text });
        self.explain_failure();
    }

    /// Whoever asked why hears what is known without a look.
    fn explain_failure(&mut self) {
        let explanation = kiln_domain::explain::Explanation {
            headline: self.record.phase.to_string(),
            because: vec!["the host could not be looked at or changed; it is tried again".to_owned()],
            next: None,
        };
        for asker in self.askers.drain(..) {
            drop(asker.send(explanation.clone()));
        }
    }
}

/// It was warm, nobody stopped it, and it is not running.
fn went_away(record: &ProjectRecord, seen: &Observed) -> bool {
    record.phase == Phase::Warm && matches!(seen.instance, InstanceSeen::Stopped { .. } | InstanceSeen::Absent)
}

/// The outcome of what is in flight; never, if nothing is.
pub(super) async fn landed(in_flight: &mut Option<InFlight>) -> (Outcome, Duration) {
    let Some(InFlight { step, since, task, .. }) = in_flight else { return std::future::pending().await };
    let outcome = match task.await {
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
    };
    (outcome, since.elapsed())
}
