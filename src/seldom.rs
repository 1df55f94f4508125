//! What would be said again and again while something is wrong, kept down to once in a while.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Seldom {
    pause: Duration,
    last: Option<Instant>,
}

impl Seldom {
    /// At most once in `pause`.
    pub const fn once_in(pause: Duration) -> Self {
        Self { pause, last: None }
    }

    /// Whether it is to be said now; then not again for a pause.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = self.last.is_none_or(|last| now.saturating_duration_since(last) >= self.pause);
        if due {
            self.last = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_minute_is_enough() {
        let (start, mut seldom) = (Instant::now(), Seldom::once_in(Duration::from_mins(1)));
        let said: Vec<u64> = (0..200).filter(|s| seldom.is_due(start + Duration::from_secs(*s))).collect();
        assert_eq!(said, [0, 60, 120, 180]);
    }
}
