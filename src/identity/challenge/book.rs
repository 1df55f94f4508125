//! Challenges and tokens under way: bounded, in memory, by hashes of their secrets.

use std::collections::HashMap;
use std::time::Duration;

use kiln_domain::{RepoName, Timestamp};
use sha2::{Digest as _, Sha256};

/// For a job to get its runner, print, and end; and for the next one to ask.
pub(super) const CHALLENGE_LIFE: Duration = Duration::from_mins(30);
/// As tokens of forges.
pub(super) const TOKEN_LIFE: Duration = Duration::from_mins(15);
pub(super) const MOST_CHALLENGES: usize = 2048;
/// Of one repository, so that it cannot take all places.
pub(super) const MOST_OF_ONE: usize = 128;
pub(super) const MOST_TOKENS: usize = 4096;
/// Of one challenge at the forge.
pub(super) const MOST_LOOKS: u32 = 60;
pub(super) const BETWEEN_LOOKS: Duration = Duration::from_secs(5);

type Hash = [u8; 32];

#[derive(Default)]
pub(super) struct Book {
    asked: HashMap<Hash, Pending>,
    granted: HashMap<Hash, (Grant, Timestamp)>,
}

struct Pending {
    asked: Asked,
    until: Timestamp,
    looks: u32,
    next: Timestamp,
}

/// What the forge is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) repo: RepoName,
    pub(super) run: u64,
    pub(super) words: String,
    pub(super) at: Timestamp,
}

/// What a token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) repo: RepoName,
    pub(super) run: u64,
    pub(super) fork: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Turn {
    Look(Asked),
    Later(Duration),
    Unknown,
}

impl Book {
    /// Until when it counts; or when to ask again, if there is no room.
    pub(super) fn ask(
        &mut self,
        secret: &str,
        repo: RepoName,
        run: u64,
        words: String,
        now: Timestamp,
    ) -> Result<Timestamp, Duration> {
        self.asked.retain(|_, pending| pending.until > now);
        let of_one = self.asked.values().filter(|pending| pending.asked.repo == repo).count();
        if self.asked.len() >= MOST_CHALLENGES || of_one >= MOST_OF_ONE {
            return Err(Duration::from_mins(1));
        }
        let until = now.plus(CHALLENGE_LIFE);
        let asked = Asked { repo, run, words, at: now };
        self.asked.insert(hash(secret), Pending { asked, until, looks: 0, next: now });
        Ok(until)
    }

    /// Whether the forge is to be asked now; it then is not again for a while, whatever becomes of it.
    pub(super) fn turn(&mut self, secret: &str, now: Timestamp) -> Turn {
        let Some(pending) = self.asked.get_mut(&hash(secret)).filter(|pending| pending.until > now) else {
            return Turn::Unknown;
        };
        if pending.looks == MOST_LOOKS {
            return Turn::Unknown;
        }
        if pending.next > now {
            return Turn::Later(pending.next.since(now));
        }
        pending.looks += 1;
        pending.next = now.plus(BETWEEN_LOOKS);
        Turn::Look(pending.asked.clone())
    }

    pub(super) fn forget(&mut self, secret: &str) {
        self.asked.remove(&hash(secret));
    }

    /// The challenge is over; the token counts from now on. `None` if the challenge was over before, or there is no room.
    pub(super) fn grant(&mut self, secret: &str, token: &str, grant: Grant, now: Timestamp) -> Option<Timestamp> {
        self.granted.retain(|_, (_, until)| *until > now);
        self.asked.remove(&hash(secret))?;
        if self.granted.len() >= MOST_TOKENS {
            return None;
        }
        let until = now.plus(TOKEN_LIFE);
        self.granted.insert(hash(token), (grant, until));
        Some(until)
    }

    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.asked.len()
    }

    pub(super) fn granted(&self, token: &str, now: Timestamp) -> Option<(Grant, Timestamp)> {
        self.granted.get(&hash(token)).filter(|(_, until)| *until > now).cloned()
    }
}

fn hash(secret: &str) -> Hash {
    Sha256::digest(secret.as_bytes()).into()
}
