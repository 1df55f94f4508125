//! How long a build may count on its daemon.
//!
//! A lease is made with the route it belongs to. Its token is a capability: whoever holds it can release that one
//! build, and nothing else. Only the token's SHA-256 is kept. Each lease has its own clock, so one build's activity
//! never prolongs or ends another's.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::key::hex;
use crate::time::Timestamp;

/// What a client holds: 16 hexadecimal digits, on the wire as `buildId`.
///
/// Has no `Display`, and its `Debug` does not show it, so that it cannot end up in a log by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct LeaseToken(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("malformed buildId: it is the 16 hexadecimal digits that /route answered")]
pub struct ParseTokenError;

impl LeaseToken {
    /// From 8 random bytes; the caller brings the randomness.
    pub fn from_random(bytes: [u8; 8]) -> Self {
        Self(hex(&bytes))
    }

    /// The text to hand to the client, once.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> TokenHash {
        TokenHash(hex(&Sha256::digest(self.0.as_bytes())))
    }
}

impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseToken(..)")
    }
}

impl FromStr for LeaseToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        let well_formed = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        if well_formed { Ok(Self(text.to_owned())) } else { Err(ParseTokenError) }
    }
}

/// SHA-256 of a token, in hexadecimal: what is stored, and what names a lease in lists and logs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenHash(String);

impl TokenHash {
    /// As read back from the store.
    pub fn from_stored(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One build's hold on its project's daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub token: TokenHash,
    pub created: Timestamp,
    /// Last time the client showed that it is there; equal to `created` until then.
    pub renewed: Timestamp,
    /// The end of it, whatever its client does. Fixed at its birth: a policy that changes later changes later leases.
    pub expires: Timestamp,
}

/// The two spans every lease obeys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasePolicy {
    /// A lease nobody uses counts this long: it covers the way from `/route` to the first connection.
    pub grace: Duration,
    /// No lease counts longer than this, whatever happens: a hung client must not pin a daemon.
    pub max_build_age: Duration,
}

impl Lease {
    pub fn new(token: TokenHash, now: Timestamp, policy: &LeasePolicy) -> Self {
        Self { token, created: now, renewed: now, expires: now.plus(policy.max_build_age) }
    }

    /// Whether this lease keeps its daemon up. `connected`: its project has an open data-plane connection.
    pub fn is_alive(&self, now: Timestamp, connected: bool, policy: &LeasePolicy) -> bool {
        !self.is_expired(now) && (connected || now.since(self.renewed) < policy.grace)
    }

    /// Whether this lease can never count again and may be forgotten.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        now >= self.expires
    }

    /// Its client is there: the grace starts anew, the end stays. False: it is too late for that.
    pub fn renew(&mut self, now: Timestamp) -> bool {
        let alive = !self.is_expired(now);
        if alive {
            self.renewed = now;
        }
        alive
    }

    /// When [`Lease::is_alive`] can next change by time alone.
    pub fn next_change(&self, now: Timestamp, policy: &LeasePolicy) -> Option<Timestamp> {
        let grace_ends = self.renewed.plus(policy.grace);
        [grace_ends, self.expires].into_iter().filter(|at| *at > now).min()
    }

    /// As if the clock had always been ahead by what it is now: a leap of the clock is nobody's age.
    pub fn shift(&mut self, by_millis: i64) {
        for at in [&mut self.created, &mut self.renewed, &mut self.expires] {
            *at = at.shifted(by_millis);
        }
    }

    /// A clock that went back must not make a lease older than it can get: one from the future is from now.
    pub fn clamp_to(&mut self, now: Timestamp, policy: &LeasePolicy) {
        self.created = self.created.min(now);
        self.renewed = self.renewed.min(now);
        self.expires = self.expires.min(now.plus(policy.max_build_age));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: LeasePolicy =
        LeasePolicy { grace: Duration::from_secs(600), max_build_age: Duration::from_secs(7200) };

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    fn lease() -> Lease {
        Lease::new(LeaseToken::from_random([7; 8]).hash(), at(0), &POLICY)
    }

    #[test]
    fn vectors_of_the_reference() {
        let hash = |token: &str| token.parse::<LeaseToken>().map(|t| t.hash().as_str().to_owned());
        assert_eq!(
            hash("deadbeefdeadbeef").as_deref(),
            Ok("5428f29eb8e0873b4b5fd4ad30843f6b867b8ca49f9f22caaab8222bc4ef8841")
        );
        assert_eq!(
            hash("b1b1b1b1b1b1b1b1").as_deref(),
            Ok("c6a8cfe8ee5ee1e69f2771a5a25a382136deeadfa2233ca1717550a10a3efa6a")
        );
        for malformed in ["", "deadbeefdeadbee", "deadbeefdeadbeef0", "deadbeefdeadbeeg", "deadbeefdeadbe\u{e9}"] {
            assert_eq!(hash(malformed), Err(ParseTokenError), "of {malformed:?}");
        }
    }

    #[test]
    fn an_unused_lease_counts_for_its_grace() {
        assert!(lease().is_alive(at(599), false, &POLICY));
        assert!(!lease().is_alive(at(600), false, &POLICY));
    }

    #[test]
    fn a_connection_keeps_it_alive_up_to_the_maximum_age() {
        assert!(lease().is_alive(at(7199), true, &POLICY));
        assert!(!lease().is_alive(at(7200), true, &POLICY));
    }

    #[test]
    fn renewing_moves_the_grace_and_not_the_end() {
        let mut renewed = lease();
        assert!(renewed.renew(at(7000)));
        assert!(renewed.is_alive(at(7199), false, &POLICY));
        assert!(!renewed.is_alive(at(7200), false, &POLICY));
    }

    #[test]
    fn nothing_is_renewed_after_its_end() {
        let mut lease = lease();
        assert!(!lease.renew(at(7200)));
        assert_eq!(lease, self::lease());
    }

    #[test]
    fn a_longer_policy_does_not_prolong_what_there_is() {
        let longer = LeasePolicy { max_build_age: Duration::from_secs(1 << 20), ..POLICY };
        assert!(!lease().is_alive(at(7200), true, &longer));
    }

    #[test]
    fn a_clock_that_went_back_a_year_leaves_a_lease_its_longest_life_and_no_more() {
        let mut lease = Lease::new(LeaseToken::from_random([7; 8]).hash(), at(31_536_000), &POLICY);
        lease.clamp_to(at(0), &POLICY);
        assert!(lease.is_alive(at(599), false, &POLICY) && !lease.is_alive(at(600), false, &POLICY));
        assert!(!lease.is_alive(at(7200), true, &POLICY));
        let before = self::lease();
        lease = before.clone();
        lease.clamp_to(at(10), &POLICY);
        assert_eq!(lease, before, "one from the past stays as it is");
    }

    #[test]
    fn next_change_is_never_in_the_past() {
        assert_eq!(lease().next_change(at(0), &POLICY), Some(at(600)));
        assert_eq!(lease().next_change(at(600), &POLICY), Some(at(7200)));
        assert_eq!(lease().next_change(at(7200), &POLICY), None);
    }

    #[test]
    fn a_token_does_not_show_itself() {
        assert_eq!(format!("{:?}", LeaseToken::from_random([1; 8])), "LeaseToken(..)");
    }
}
