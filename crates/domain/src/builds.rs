//! How busy a project was in the last day.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// When the latest builds of a project began, the oldest first. Builds of the last 24 hours, at most 30 of them: the
/// reference's ring, whose length bounds what is stored and is more than any sensible window needs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BuildTimes(Vec<Timestamp>);

impl BuildTimes {
    pub const KEPT: usize = 30;
    pub const SPAN: Duration = Duration::from_hours(24);

    /// Takes note of a build that begins, and forgets those of more than a day ago.
    pub fn note(&mut self, now: Timestamp) {
        self.0.retain(|began| now.since(*began) < Self::SPAN);
        self.0.push(now);
        let surplus = self.0.len().saturating_sub(Self::KEPT);
        self.0.drain(..surplus);
    }

    /// Builds that began within the day before `now`.
    pub fn count(&self, now: Timestamp) -> usize {
        self.0.iter().filter(|began| now.since(**began) < Self::SPAN).count()
    }

    /// When the next one falls out of the day, which shortens an adaptive window.
    pub fn next_change(&self, now: Timestamp) -> Option<Timestamp> {
        self.0.iter().map(|began| began.plus(Self::SPAN)).filter(|out| *out > now).min()
    }

    /// As if the clock had always been ahead by what it is now.
    pub fn shift(&mut self, by_millis: i64) {
        for began in &mut self.0 {
            *began = began.shifted(by_millis);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(count: i64) -> Timestamp {
        Timestamp::from_millis(count * 3_600_000)
    }

    #[test]
    fn a_day_and_thirty_are_kept() {
        let mut builds = BuildTimes::default();
        builds.note(hours(0));
        builds.note(hours(1));
        assert_eq!((builds.count(hours(2)), builds.count(hours(24)), builds.count(hours(25))), (2, 1, 0));
        builds.note(hours(24));
        assert_eq!(
            (builds.0.as_slice(), builds.next_change(hours(24))),
            ([hours(1), hours(24)].as_slice(), Some(hours(25)))
        );
        for _ in 0..100 {
            builds.note(hours(25));
        }
        assert_eq!(builds.0.len(), BuildTimes::KEPT);
    }

    #[test]
    fn a_clock_that_went_back_forgets_nothing() {
        let mut builds = BuildTimes::default();
        builds.note(hours(100));
        builds.note(hours(0));
        assert_eq!(builds.count(hours(0)), 2);
    }
}
