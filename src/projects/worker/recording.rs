//! What a worker writes down: phases with their reasons, in memory, on the disk and in the journal.

use std::time::Duration;

use kiln_domain::plan::{InstanceSeen, Observed, Place, Reason};
use kiln_domain::{Generation, Phase, Settings, Step};

use super::super::effects::EffectError;
use super::super::messages::{Refusal, RefusalKind, Status, StopRefusal};
use super::{Occasion, Worker};
use crate::causes::in_one_line;
use crate::metrics::PhaseLabel;
use crate::store::{NewEvent, StoreError};

/// Between two tries to write a record to a disk that does not let itself be written to.
pub(super) const SAVE_AGAIN: Duration = Duration::from_secs(10);

impl Worker {
    /// False: the plan cannot be carried out, because it could not be recorded.
    pub(super) async fn record_phase(&mut self, phase: Phase, step: Option<Step>, reason: &Reason) -> bool {
        // The generation goes up before the start, so that a crash in between can only skip a number.
        let starts = matches!(step, Some(Step::StartInstance | Step::AdoptInstance));
        if starts {
            self.record.generation = self.record.generation.next();
        }
        // Neither a start whose number could be given out twice nor a removal that nobody would remember.
        let must_be_recorded = starts || (phase == Phase::Removing && self.record.phase != Phase::Removing);
        let before = (self.record.phase.clone(), self.record.incarnation.clone());
        if step == Some(Step::StartInstance) {
            // The new number is not that of the run before, which has ended.
            self.record.incarnation = None;
        }
        if let (Some(Step::AdoptInstance), Some(Observed { instance: InstanceSeen::Running { incarnation, .. }, .. })) =
            (step, self.seen())
        {
            self.record.incarnation = Some(incarnation.clone());
        }
        self.show(&phase, reason.to_string(), step);
        let asks = step.is_none_or(Step::only_asks);
        if phase == self.record.phase && asks {
            return true;
        }
        let text = match step {
            Some(step) => format!("{}: {reason}", step.name()),
            None => format!("{phase}: {reason}"),
        };
        let kind = if step.is_some() { "step" } else { "phase" };
        let event = self.event(kind, text).rule(reason.rule());
        let Err(error) = self.enter(phase, event).await else { return true };
        if !must_be_recorded {
            return true;
        }
        let text = format!("it could not be recorded in the database, so it was not begun: {}", in_one_line(&error));
        let kind = if matches!(error, StoreError::Full { .. }) { RefusalKind::NoRoom } else { RefusalKind::NotNow };
        self.record.incarnation = before.1;
        self.change_phase(before.0);
        self.setbacks = self.setbacks.and_another(self.now());
        self.look = Some(Occasion::Routine);
        self.refuse_all(&Refusal { kind, text });
        self.look_again = self.setbacks.pause_ends(self.now());
        false
    }

    pub(super) fn show(&self, phase: &Phase, reason: String, step: Option<Step>) {
        let queue = match self.place {
            Place::Queued { position, length, .. } => Some((position, length)),
            _ => None,
        };
        let pending = self.seen().and_then(Observed::outdated);
        let status = Status {
            phase: Some(phase.clone()),
            reason,
            step: step.map(Step::name),
            queue,
            leases: self.leases.len(),
            pending,
        };
        self.desk.status.send_replace(status);
    }

    fn change_phase(&mut self, phase: Phase) {
        let before = std::mem::replace(&mut self.record.phase, phase);
        if before != self.record.phase {
            let labels = (PhaseLabel::from(&before), PhaseLabel::from(&self.record.phase));
            self.shared.metrics.phase_changed(Some(labels.0), Some(labels.1));
        }
    }

    /// Takes note of a phase, in memory and on disk. What cannot be written now is written with the next change.
    pub(super) async fn enter(&mut self, phase: Phase, event: NewEvent) -> Result<(), StoreError> {
        self.change_phase(phase);
        let saved = self.shared.store.save_project(&self.record, Some(event)).await;
        if let Err(error) = &saved {
            tracing::error!(key = %self.key, %error, "cannot record a phase");
        }
        self.save_again = saved.is_err().then(|| self.now().plus(SAVE_AGAIN));
        saved
    }

    /// What could not be written is written when the disk lets it be, also if nothing changes any more.
    pub(super) async fn make_up_for_a_save(&mut self) {
        if self.save_again.is_some_and(|at| at <= self.now()) {
            let saved = self.shared.store.save_project(&self.record, None).await;
            self.save_again = saved.is_err().then(|| self.now().plus(SAVE_AGAIN));
        }
    }

    /// Whether nothing ever came of it: a request made it, and was refused or went away before anything was begun.
    pub(super) fn is_unborn(&self) -> bool {
        let record = &self.record;
        record.phase == Phase::Absent && record.generation == Generation::NONE && record.settings == Settings::default()
    }

    /// Lets go of a project of which nothing ever came: it would keep its address for ever. False: it stays.
    pub(in crate::projects) async fn let_go(&mut self) -> bool {
        match self.shared.store.forget_unborn(&self.key).await {
            Ok(gone) => {
                if gone {
                    self.shared.metrics.phase_changed(Some(PhaseLabel::Absent), None);
                }
                gone
            }
            Err(error) => {
                tracing::debug!(key = %self.key, %error, "could not let go of a project of which nothing came");
                false
            }
        }
    }

    /// Somebody came while it was let go of.
    pub(in crate::projects) async fn take_back(&mut self) -> bool {
        let created = self.shared.store.create_project(self.record.identity(), self.shared.addresses, self.now()).await;
        match created {
            Ok(created) => {
                self.shared.metrics.phase_changed(None, Some(PhaseLabel::Absent));
                self.record = created.record;
                true
            }
            Err(error) => {
                tracing::error!(key = %self.key, %error, "cannot make a project anew");
                false
            }
        }
    }

    /// The last of a removal: neither instance nor volume is on the host any more.
    pub(super) async fn forget(&mut self) {
        let after = self.shared.deadlines.write_files;
        let forgotten = tokio::time::timeout(after, self.shared.effects.forget(&self.key)).await;
        let forgotten = forgotten.unwrap_or(Err(EffectError::TimedOut { step: "remove its certificates", after }));
        if let Err(error) = forgotten {
            return self.is_not_forgotten(&error.in_words(), error.is_no_room());
        }
        // A later write may have been lost with the disk.
        drop(self.shared.store.save_project(&self.record, None));
        let event = if let Some(why) = self.why_evicted() {
            self.event("evicted", why)
        } else if self.key.role().is_derived() {
            self.event("removed", "nobody needs it any more; its copy of the cache was freed".to_owned())
        } else {
            self.event("removed", "the project was removed; its cache is in the trash".to_owned()).by("admin")
        };
        match self.shared.store.remove_project(&self.key, Some(event)).await {
            Ok(_) => {
                self.shared.metrics.phase_changed(Some(PhaseLabel::Removing), None);
                self.removed = true;
            }
            Err(error) => self.is_not_forgotten(&in_one_line(&error), matches!(error, StoreError::Full { .. })),
        }
    }

    /// It is tried again, whether somebody waits for it or not.
    fn is_not_forgotten(&mut self, why: &str, full: bool) {
        self.setbacks = self.setbacks.and_another(self.now());
        self.look_again = self.setbacks.pause_ends(self.now());
        let text = format!("cannot forget the project: {why}");
        let failed = if full { StopRefusal::NoRoom(text) } else { StopRefusal::Failed { text, retryable: true } };
        self.answer_stoppers(&Err(failed));
    }

    pub(super) fn event(&self, kind: &'static str, text: String) -> NewEvent {
        NewEvent::new(self.now(), Some(&self.key), kind, text)
    }

    pub(super) fn log_event(&self, event: NewEvent) {
        drop(self.shared.store.record(event));
    }
}
