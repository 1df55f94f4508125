//! The worker's own time: the wall clock's, and even where that is not.

use kiln_domain::Timestamp;
use tokio::time::Instant;

use super::Worker;
use super::past::UPKEEP_AGAIN;
use super::recording::SAVE_AGAIN;

/// A wall clock may drift this far from the other between two decisions without having leapt.
const LEAP_MILLIS: u64 = 5000;

impl Worker {
    /// By the wall clock as it was when this worker followed it last: what is dated between two of its decisions is dated by
    /// one clock, and leaps along with all the rest.
    pub(super) fn now(&self) -> Timestamp {
        let (then, instant) = self.anchor;
        then.plus(instant.elapsed())
    }

    /// A wall clock that leaps makes nothing older or younger: what is remembered leaps along. On the disk it stays as it
    /// was written; a restart takes the clock as it finds it.
    pub(super) fn follow_the_clock(&mut self) {
        let (now, instant) = (self.shared.clock.now(), Instant::now());
        let elapsed = i64::try_from(instant.duration_since(self.anchor.1).as_millis()).unwrap_or(i64::MAX);
        let leap = now.as_millis().saturating_sub(self.anchor.0.as_millis().saturating_add(elapsed));
        self.anchor = (now, instant);
        if leap.unsigned_abs() >= LEAP_MILLIS {
            tracing::warn!(key = %self.key, leap_ms = leap, "the clock has leapt; nothing is taken to be older or younger for it");
            self.leap(leap);
        }
        // What is less than a leap must not put anything off, either.
        self.setbacks.clamp_to(now);
        self.save_again = self.save_again.map(|at| at.min(now.plus(SAVE_AGAIN)));
        self.upkeep_paused_until = self.upkeep_paused_until.map(|at| at.min(now.plus(UPKEEP_AGAIN)));
    }

    fn leap(&mut self, by_millis: i64) {
        for lease in &mut self.leases {
            lease.shift(by_millis);
        }
        self.record.last_activity = self.record.last_activity.shifted(by_millis);
        self.record.builds.shift(by_millis);
        self.run.health.shift(by_millis);
        self.setbacks.last = self.setbacks.last.map(|last| last.shifted(by_millis));
        let cache = &mut self.record.cache;
        let of_the_cache = [&mut cache.snapshot, &mut cache.rescued, &mut self.upkeep_paused_until];
        let next = [&mut self.look_again, &mut self.save_again];
        for at in next.into_iter().chain(of_the_cache).flatten() {
            *at = at.shifted(by_millis);
        }
        if let Some((_, at)) = &mut self.observed {
            *at = at.shifted(by_millis);
        }
        if let Some((at, _)) = &mut self.room.measured {
            *at = at.shifted(by_millis);
        }
        self.run.counted = None;
    }
}
