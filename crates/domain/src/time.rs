//! Instants as data, so that no rule needs a clock.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A wall-clock instant: milliseconds since the Unix epoch, UTC.
///
/// Wall clock and not monotonic, because instants outlive the process and the boot they were taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(i64);

impl Timestamp {
    pub const EPOCH: Self = Self(0);

    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// How long ago `earlier` was. Zero if it lies in the future: a clock that went backwards makes nothing older.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// On a clock that is ahead by `by_millis` of the one it was taken from.
    #[must_use]
    pub const fn shifted(self, by_millis: i64) -> Self {
        Self(self.0.saturating_add(by_millis))
    }

    /// Saturates at the end of time.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        let millis = i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(millis))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0.div_euclid(1000), self.0.rem_euclid(1000))
    }
}

/// A span for people: its largest unit and the next, "2 h 30 min", "15 min", "4 s", "120 ms".
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let pair = |large: u64, unit: &str, small: u64, smaller: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {smaller}"),
    };
    match (days, hours, minutes, seconds) {
        (1.., ..) => pair(days, "d", hours, "h"),
        (0, 1.., ..) => pair(hours, "h", minutes, "min"),
        (0, 0, 1.., _) => pair(minutes, "min", seconds % 60, "s"),
        (0, 0, 0, 1..) => format!("{seconds} s"),
        _ => format!("{} ms", span.as_millis()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_backwards_makes_nothing_older() {
        let later = Timestamp::from_millis(5_000);
        assert_eq!(Timestamp::from_millis(1_000).since(later), Duration::ZERO);
        assert_eq!(later.since(Timestamp::from_millis(1_000)), Duration::from_secs(4));
    }

    #[test]
    fn the_end_of_time_is_an_end() {
        assert_eq!(Timestamp::from_millis(i64::MAX - 1).plus(Duration::MAX).as_millis(), i64::MAX);
    }

    #[test]
    fn spans_for_people() {
        let shown = |seconds| span(Duration::from_secs(seconds));
        assert_eq!(
            [shown(1), shown(60), shown(61), shown(9000), shown(86_400)],
            ["1 s", "1 min", "1 min 1 s", "2 h 30 min", "1 d"]
        );
        assert_eq!(span(Duration::from_millis(120)), "120 ms");
    }
}
