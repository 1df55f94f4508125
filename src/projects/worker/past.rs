//! The past of a cache: what is told of its snapshots, and what a way back changes.

use std::time::Duration;

use kiln_domain::cache::history::surplus;
use kiln_domain::cache::size::{Resize, Why};
use kiln_domain::plan::{InstanceSeen, Room, StopWish, bounds};
use kiln_domain::{Phase, Snapshot, SnapshotName, Step};
use kiln_wire::units::show_size;

use super::super::effects::EffectError;
use super::super::messages::StopRefusal;
use super::{Cause, Occasion, Thinner, Worker};

/// Before anything about the past is tried again that failed.
pub(super) const UPKEEP_AGAIN: Duration = Duration::from_mins(5);

/// Of a cache.
pub(super) struct Damage {
    /// What a daemon said that could not open it.
    pub(super) says: String,
    /// A way back from it since, of which nobody knows whether it was gone: where to, and for what.
    pub(super) unclear: Option<(SnapshotName, Cause)>,
}

impl Worker {
    pub(super) fn note_snapshots(&mut self, step: Step, all: &[Snapshot], taken: bool) {
        let mut listed = all.to_vec();
        // Judged while the step was under way, it may have been read before.
        if let Some((name, verdict)) = self.judged
            && let Some(snapshot) = listed.iter_mut().find(|snapshot| snapshot.name == name)
        {
            snapshot.verdict = verdict;
        }
        self.snapshots = Some(listed);
        if step != Step::TakeSnapshot {
            return;
        }
        self.record.cache.snapshot = Some(self.now());
        let newest = all.last().copied();
        let event = newest.filter(|_| taken).map(|newest| {
            self.shared.trials.ask(&self.key, newest.name);
            self.event("snapshot", format!("{} was taken", newest.name))
        });
        drop(self.shared.store.save_project(&self.record, event));
        for asker in self.snapshot_askers.drain(..) {
            drop(asker.send(Ok(newest)));
        }
    }

    pub(super) fn note_destroyed(&mut self, name: SnapshotName) {
        if let Some(known) = &mut self.snapshots {
            known.retain(|snapshot| snapshot.name != name);
        }
    }

    /// The past is another now.
    pub(super) fn note_rollback(&mut self, to: SnapshotName) {
        (self.snapshots, self.judged) = (None, None);
        let text = match self.damage.take() {
            // Whoever asked for it by hand may ask as often as they like: it takes nothing from what Kiln does by itself.
            Some(Damage { says, .. }) if self.cause == Cause::Rescue => self.note_rescue(to, &says),
            _ => format!("its cache has gone back to {to}; what it was is in the trash"),
        };
        drop(self.shared.store.save_project(&self.record, Some(self.event("rollback", text))));
        self.answer_wishes(|wish| matches!(wish, StopWish::Rollback(wanted) if wanted == to), &Ok(()));
        // What the daemon was told of its cache may not be so any more.
        self.something_happened(Occasion::Event);
    }

    /// What the journal is to say of it.
    fn note_rescue(&mut self, to: SnapshotName, damage: &str) -> String {
        self.record.cache.rescued = Some(self.now());
        self.shared.metrics.daemon_at_fault(crate::metrics::Fault::CacheDamaged);
        tracing::error!(key = %self.key, %to, damage, "its cache was damaged and has gone back to a snapshot");
        format!("its cache was damaged ({damage}) and has gone back to {to}; the damaged one is in the trash")
    }

    /// It may have been done, or will be: what is there now may not be what was known of it.
    pub(super) fn note_unclear_rollback(&mut self, to: SnapshotName) {
        // Which there are is to be asked anew before one is given up.
        (self.snapshots, self.judged) = (None, None);
        if let Some(damage) = &mut self.damage {
            damage.unclear.get_or_insert((to, self.cause));
        }
    }

    /// A daemon answers, so it could open the cache. If Kiln had begun to take that back, it has gone back, and counts as taken back.
    pub(super) fn note_opened(&mut self) {
        let Some(Damage { says, unclear: Some((to, Cause::Rescue)) }) = self.damage.take() else { return };
        let text = self.note_rescue(to, &says);
        drop(self.shared.store.save_project(&self.record, Some(self.event("rollback", text))));
    }

    /// What is known of the cache before is not about this one.
    pub(super) fn note_new_cache(&mut self) {
        (self.snapshots, self.judged, self.damage) = (None, None, None);
    }

    pub(super) fn note_emptied(&mut self, step: Step) {
        (self.snapshots, self.judged, self.damage) = (None, None, None);
        self.record.cache = kiln_domain::project::CacheNotes::default();
        if self.record.phase != Phase::Removing {
            if step != Step::DiscardCache {
                return self.note_evicted();
            }
            let text = "its next build begins with an empty cache; what it was is in the trash".to_owned();
            drop(self.shared.store.save_project(&self.record, Some(self.event("reset", text))));
        }
    }

    fn note_evicted(&self) {
        // A stop of Kiln in the middle of it has lost the reason.
        let text = self.why_evicted().unwrap_or_else(|| "its cache was freed to make room".to_owned());
        drop(self.shared.store.save_project(&self.record, Some(self.event("evicted", text))));
    }

    /// What the journal is to say of an eviction that somebody waits for.
    pub(super) fn why_evicted(&self) -> Option<String> {
        self.stoppers.iter().find(|stopper| stopper.wish == StopWish::Evict)?.why.clone()
    }

    /// Nothing of the daemon is different for it.
    pub(super) fn note_failed_upkeep(&mut self, step: Step, error: &EffectError) {
        let reason = error.in_words();
        tracing::warn!(key = %self.key, %reason, "could not {}", step.name());
        self.upkeep_paused_until = Some(self.now().plus(UPKEEP_AGAIN));
        self.log_event(self.event("upkeep-failed", format!("could not {}: {reason}", step.name())));
        self.answer_snapshot_askers(&Self::failed_wish(error, step));
        if self.room.full && step == Step::Measure {
            // What cannot be measured cannot be helped.
            self.room.measured = Some((self.now(), None));
        }
        if self.damage.is_some() {
            // Without a list there is nothing to go back to.
            self.snapshots = Some(Vec::new());
        }
    }

    /// Whoever asked is told, and everything stays as it was.
    pub(super) fn note_failed_wish(&mut self, step: Step, error: &EffectError) {
        let refusal = Self::failed_wish(error, step);
        tracing::warn!(key = %self.key, reason = error.in_words(), "could not {}", step.name());
        self.log_event(self.event("failed", format!("could not {}: {}", step.name(), error.in_words())));
        self.setbacks = self.setbacks.and_another(self.now());
        self.answer_stoppers(&Err(refusal));
        self.something_happened(Occasion::Event);
        self.look_again = self.setbacks.pause_ends(self.now());
    }

    /// True: a way back may help, and whoever waits for the daemon waits on.
    pub(super) fn note_damage(&mut self, error: &EffectError) -> bool {
        let Some(damage) = error.damage() else { return false };
        let fresh = Damage { says: damage.clone(), unclear: None };
        // What was found after a way back is news: that was not gone, or did not help.
        let already = self.damage.replace(fresh).is_some_and(|before| before.unclear.is_none());
        if !already {
            tracing::error!(key = %self.key, damage, "no daemon can open its cache");
            self.log_event(self.event("cache-damaged", error.in_words()));
            // What is known of its snapshots may be less than what was found of them meanwhile.
            (self.observed, self.look, self.snapshots, self.judged) = (None, None, None, None);
        }
        !already
    }

    /// True: more room may help, and whoever waits for the daemon waits on.
    pub(super) fn note_full(&mut self, error: &EffectError) -> bool {
        if !error.is_full_volume() || self.room.full || bounds(&self.settings, &self.shared.policy.size).is_none() {
            return false;
        }
        self.log_event(self.event("full", format!("its volume has no room for a daemon: {}", error.in_words())));
        self.room = Room { measured: None, full: true };
        (self.observed, self.look) = (None, None);
        true
    }

    pub(super) fn note_resized(&mut self, to: u64) {
        let resize = self.room.resize(&self.settings, &self.shared.policy.size);
        // A daemon that met the end of its room gets no use of more before it is started anew.
        if matches!(resize, Some(Resize { why: Why::Full { .. } | Why::Inodes { .. }, .. })) {
            self.run.was_full = true;
            self.outdate_if_full();
        }
        let why = resize.map_or_else(String::new, |resize| format!(": {}", resize.why));
        self.record.cache.size = Some(to);
        self.room = Room::default();
        let text = format!("its volume may hold {} now{why}", show_size(to));
        drop(self.shared.store.save_project(&self.record, Some(self.event("resized", text))));
        // The configuration that says when it is collected follows with the next start.
        self.something_happened(Occasion::Routine);
    }

    /// After each look, too: nothing on the host tells of it.
    pub(super) fn outdate_if_full(&mut self) {
        let Some((observed, _)) = self.observed.as_mut().filter(|_| self.run.was_full) else { return };
        let ours = self.record.incarnation.as_ref();
        if matches!(&observed.instance, InstanceSeen::Running { incarnation, .. } if ours == Some(incarnation)) {
            observed.outdate("its volume, which was full");
        }
    }

    /// Nothing is left to do for them, or nothing can be done now.
    pub(super) fn answer_thinners(&mut self) {
        let now = self.now();
        for Thinner { keep, reply } in self.thinners.drain(..) {
            let done = self.snapshots.as_ref().is_some_and(|all| surplus(all, now, &keep).is_empty());
            let text = || "its snapshots cannot be looked at or destroyed now".to_owned();
            let answer = if done { Ok(()) } else { Err(StopRefusal::Failed { text: text(), retryable: true }) };
            drop(reply.send(answer));
        }
    }

    pub(super) fn answer_snapshot_askers(&mut self, refusal: &StopRefusal) {
        for asker in self.snapshot_askers.drain(..) {
            drop(asker.send(Err(refusal.clone())));
        }
    }

    pub(super) fn answer_wishes(&mut self, is_met: impl Fn(StopWish) -> bool, answer: &Result<(), StopRefusal>) {
        for stopper in std::mem::take(&mut self.stoppers) {
            if is_met(stopper.wish) {
                drop(stopper.reply.send(answer.clone()));
            } else {
                self.stoppers.push(stopper);
            }
        }
    }

    fn failed_wish(error: &EffectError, step: Step) -> StopRefusal {
        let text = format!("could not {}: {}", step.name(), error.in_words());
        if error.is_no_room() {
            StopRefusal::NoRoom(text)
        } else {
            StopRefusal::Failed { text, retryable: error.is_retryable() }
        }
    }
}
