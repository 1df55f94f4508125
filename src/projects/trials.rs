//! Snapshots are tried out before they count as good: one at a time on the whole host, when it has nothing more urgent to do.
//!
//! A daemon opens a clone of the snapshot, under a key of its own that no project has, and everything is taken away again. Until then
//! a snapshot is there and unchecked; one that was not tried because Kiln was stopped meanwhile stays so, and the next one is
//! tried.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_domain::cache::history::newest_good;
use kiln_domain::{Key, SnapshotName, Step, Verdict};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::effects::EffectError;
use super::handle::Projects;
use super::messages::Message;

/// More are not remembered: the oldest is the least worth it.
const QUEUE: usize = 256;

/// A start that is waited for goes before.
const CALM: Duration = Duration::from_secs(2);

/// Whatever keeps something of a trial from being removed is not over at once.
const SWEEP_AGAIN: Duration = Duration::from_mins(1);

/// What a trial had given up on may be done when everything else of it is gone.
const SWEEP_EVERY: Duration = Duration::from_mins(10);

/// Longer than a trial gives its daemon, with what it takes to clear it away; beside the copy.
const PATIENCE: Duration = Duration::from_mins(5);

/// What is to be tried out.
#[derive(Debug, Clone, Default)]
pub(super) struct Trials(Arc<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    queue: Mutex<VecDeque<(Key, SnapshotName)>>,
    under_way: Mutex<Option<(Key, SnapshotName)>>,
    asked: Notify,
}

impl Trials {
    /// Of one cache the newest snapshot is the one worth knowing.
    pub(super) fn ask(&self, key: &Key, snapshot: SnapshotName) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.retain(|(waiting, _)| waiting != key);
        if queue.len() >= QUEUE {
            queue.pop_front();
        }
        queue.push_back((key.clone(), snapshot));
        drop(queue);
        self.0.asked.notify_one();
    }

    /// Which one of this cache is being tried out: it is not to be destroyed under that.
    pub(super) fn under_way(&self, key: &Key) -> Option<SnapshotName> {
        let under_way = self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.as_ref().filter(|(of, _)| of == key).map(|(_, snapshot)| *snapshot)
    }

    fn set_under_way(&self, trial: Option<(Key, SnapshotName)>) {
        *self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner) = trial;
    }

    async fn next(&self) -> (Key, SnapshotName) {
        loop {
            let next = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            if let Some(next) = next {
                return next;
            }
            self.0.asked.notified().await;
        }
    }
}

impl Projects {
    pub(super) async fn try_snapshots_out(&self) {
        // A host that does not answer yet has others to answer first.
        while !self.shared.surveyed.load(Ordering::Acquire) {
            tokio::time::sleep(CALM).await;
        }
        let mut sweep = Sweep { told: None, next: Instant::now() };
        self.sweep_trials(&mut sweep).await;
        loop {
            let Ok((key, snapshot)) = tokio::time::timeout_at(sweep.next, self.shared.trials.next()).await else {
                self.sweep_trials(&mut sweep).await;
                continue;
            };
            while self.shared.admission.is_busy() {
                tokio::time::sleep(CALM).await;
            }
            let patience = PATIENCE + self.shared.deadlines.of(Step::CloneVolume);
            self.shared.trials.set_under_way(Some((key.clone(), snapshot)));
            let tried = tokio::time::timeout(patience, self.try_out(&key, snapshot)).await;
            self.shared.trials.set_under_way(None);
            let late = EffectError::TimedOut { step: "try a snapshot out", after: patience };
            if let Err(error) = tried.unwrap_or(Err(late)) {
                // One whose project went meanwhile took its snapshots with it.
                if matches!(self.shared.store.project(&key).await, Ok(None)) {
                    tracing::debug!(%key, %snapshot, %error, "a snapshot went with its project before it was tried out");
                } else {
                    tracing::warn!(%key, %snapshot, %error, "a snapshot could not be tried out; it stays unchecked");
                }
                self.sweep_trials(&mut sweep).await;
            }
        }
    }

    async fn try_out(&self, key: &Key, snapshot: SnapshotName) -> Result<(), EffectError> {
        let effects = &self.shared.effects;
        // It may be gone with its project.
        let Ok(Some(record)) = self.shared.store.project(key).await else { return Ok(()) };
        let settings = self.shared.settings(&record);
        let verdict = effects.try_out(&record, &settings, snapshot).await?;
        effects.judge(key, snapshot, verdict).await?;
        // One that sleeps reads it when it has to.
        if let Some(worker) = self.registry.get(key) {
            let _ = worker.mailbox.send(Message::Judged { snapshot, verdict }).await;
        } else if verdict == Verdict::Bad {
            self.note("snapshot-bad", format!("{key}@{snapshot} is no good: it is damaged"));
        }
        let good = newest_good(&effects.snapshots(key).await?).map(|good| good.name);
        tracing::debug!(%key, %snapshot, verdict = verdict.name(), ?good, "a snapshot was tried out");
        Ok(())
    }

    /// Removes what trials have left that were cut off. What cannot be removed now holds up none of the others.
    async fn sweep_trials(&self, sweep: &mut Sweep) {
        let swept = tokio::time::timeout(PATIENCE, self.shared.effects.sweep_trials()).await;
        let late = EffectError::TimedOut { step: "remove what trials have left", after: PATIENCE };
        let told = swept.unwrap_or(Err(late)).err().map(|error| error.in_words());
        if let Some(error) = told.as_ref().filter(|told| sweep.told.as_ref() != Some(*told)) {
            tracing::warn!(error, "what an earlier trial has left cannot be removed; it is tried again every minute");
        }
        let pause = if told.is_some() { SWEEP_AGAIN } else { SWEEP_EVERY };
        *sweep = Sweep { told, next: Instant::now() + pause };
    }
}

/// Where the removal of what trials have left stands.
#[derive(Debug)]
struct Sweep {
    /// What was in its way, as it was told.
    told: Option<String>,
    next: Instant,
}
