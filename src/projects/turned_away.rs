//! Which refused connections become events: one a minute for each project, so that a client that tries again and again, or
//! a stranger who knows a name, does not fill the journal.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_domain::Key;

const PAUSE: Duration = Duration::from_mins(1);

/// More are not remembered: while so many are refused at a time, further ones are not written down.
const MOST: usize = 1024;

/// When each was last written down.
#[derive(Clone, Default)]
pub(super) struct TurnedAway(Arc<Mutex<BTreeMap<Key, Instant>>>);

impl TurnedAway {
    /// Whether it is to be written down now; then not again for a while.
    pub(super) fn is_due(&self, key: &Key, now: Instant) -> bool {
        // Whole between any two operations, so a panic elsewhere cannot have torn it.
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = |then: &Instant| now.saturating_duration_since(*then) < PAUSE;
        if last.get(key).is_some_and(recent) {
            return false;
        }
        if last.len() >= MOST {
            last.retain(|_, then| recent(then));
        }
        let room = last.len() < MOST;
        if room {
            last.insert(key.clone(), now);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_project_has_one_a_minute_and_there_is_an_end_to_them() {
        let (start, events) = (Instant::now(), TurnedAway::default());
        let key = |number: usize| format!("p{number:016x}").parse::<Key>().expect("a key");
        assert!(events.is_due(&key(0), start));
        assert!(!events.is_due(&key(0), start + Duration::from_secs(59)));
        assert!(events.is_due(&key(0), start + PAUSE));
        let due = (1..2 * MOST).filter(|number| events.is_due(&key(*number), start + PAUSE)).count();
        assert_eq!(due, MOST - 1);
        assert!(events.is_due(&key(2 * MOST), start + 2 * PAUSE), "the old ones have made room");
    }
}
