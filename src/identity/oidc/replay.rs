//! Which tokens were seen before.
//!
//! Only tokens whose signature is good are remembered, so that a stranger cannot fill it; and only hashes of what names them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use kiln_domain::Timestamp;
use sha2::{Digest as _, Sha256};

/// Of one issuer: an hour of a busy one, and some 2 MiB.
const MOST: usize = 16_384;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    First,
    Again,
    /// It has no name to know it by.
    Nameless,
    /// So many good tokens are remembered that this one has no place.
    Full,
}

type Name = [u8; 16];

#[derive(Debug, Default)]
pub(super) struct Memory {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    until: HashMap<Name, i64>,
    by_end: BTreeSet<(i64, Name)>,
}

impl Memory {
    /// Notes a token by its `jti`, until it has ended.
    pub(super) fn note(&self, jti: &str, until: Timestamp, now: Timestamp) -> Seen {
        if jti.is_empty() {
            return Seen::Nameless;
        }
        let digest = Sha256::digest(jti.as_bytes());
        let mut name = Name::default();
        name.copy_from_slice(&digest[..16]);
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).note(name, until.as_millis(), now.as_millis())
    }
}

impl Inner {
    fn note(&mut self, name: Name, until: i64, now: i64) -> Seen {
        while let Some((end, ended)) = self.by_end.first().copied().filter(|(end, _)| *end <= now) {
            self.by_end.remove(&(end, ended));
            self.until.remove(&ended);
        }
        if self.until.contains_key(&name) {
            return Seen::Again;
        }
        if self.until.len() >= MOST {
            return Seen::Full;
        }
        self.until.insert(name, until);
        self.by_end.insert((until, name));
        Seen::First
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    #[test]
    fn a_token_is_known_again_until_it_has_ended() {
        let memory = Memory::default();
        assert_eq!(memory.note("a", at(10), at(0)), Seen::First);
        assert_eq!(memory.note("a", at(10), at(9)), Seen::Again);
        assert_eq!(memory.note("b", at(10), at(9)), Seen::First);
        assert_eq!(memory.note("a", at(20), at(10)), Seen::First);
        assert_eq!(memory.note("", at(20), at(10)), Seen::Nameless);
    }

    #[test]
    fn it_has_a_bound_and_makes_room_when_tokens_end() {
        let memory = Memory::default();
        for number in 0..MOST {
            assert_eq!(memory.note(&number.to_string(), at(10), at(0)), Seen::First);
        }
        assert_eq!(memory.note("one more", at(10), at(0)), Seen::Full);
        assert_eq!(memory.note("7", at(10), at(0)), Seen::Again);
        assert_eq!(memory.note("one more", at(20), at(10)), Seen::First);
        assert_eq!(memory.inner.lock().expect("sound").until.len(), 1);
    }
}
