//! How many connections may be open, in all and before they have said who they want.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Refusal, source_of};

pub(super) struct Admission {
    connections: usize,
    half_open: usize,
    per_source: usize,
    now: Arc<Mutex<Now>>,
}

#[derive(Default)]
struct Now {
    open: usize,
    half_open: usize,
    /// Only sources that have any, so it is never larger than `half_open`.
    by_source: HashMap<IpAddr, usize>,
}

/// A place among the open connections, given back when dropped.
pub(super) struct Admitted {
    now: Arc<Mutex<Now>>,
    half_open_from: Option<IpAddr>,
}

impl Admission {
    pub(super) fn new(connections: usize, half_open: usize, per_source: usize) -> Self {
        Self { connections, half_open, per_source, now: Arc::default() }
    }

    pub(super) fn admit(&self, from: IpAddr) -> Result<Admitted, Refusal> {
        let source = source_of(from);
        let mut now = lock(&self.now);
        if now.open >= self.connections {
            return Err(Refusal::TooManyConnections);
        }
        if now.half_open >= self.half_open {
            return Err(Refusal::TooManyHalfOpen);
        }
        let of_source = now.by_source.get(&source).copied().unwrap_or(0);
        // Loopback is not one client: tunnels and runners of this host all come from there.
        if of_source >= self.per_source && !source.is_loopback() {
            return Err(Refusal::TooManyFromSource);
        }
        now.by_source.insert(source, of_source + 1);
        now.half_open += 1;
        now.open += 1;
        Ok(Admitted { now: Arc::clone(&self.now), half_open_from: Some(source) })
    }
}

impl Admitted {
    /// It has said its name: it is no longer half-open.
    pub(super) fn said_hello(&mut self) {
        if let Some(source) = self.half_open_from.take() {
            lock(&self.now).close_half(source);
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut now = lock(&self.now);
        if let Some(source) = self.half_open_from.take() {
            now.close_half(source);
        }
        now.open -= 1;
    }
}

impl Now {
    fn close_half(&mut self, source: IpAddr) {
        self.half_open -= 1;
        if let Some(count) = self.by_source.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&source);
            }
        }
    }
}

/// Nothing panics while it is held, and counters would still be right if something did.
fn lock(now: &Mutex<Now>) -> MutexGuard<'_, Now> {
    now.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn each_limit_holds_and_places_are_given_back() {
        let admission = Admission::new(3, 2, 1);
        let refusal = |from| admission.admit(ip(from)).err();
        let mut first = admission.admit(ip("192.0.2.1")).expect("room");
        assert_eq!(refusal("192.0.2.1"), Some(Refusal::TooManyFromSource));
        assert_eq!(refusal("::ffff:192.0.2.1"), Some(Refusal::TooManyFromSource));
        let second = admission.admit(ip("2001:db8::1")).expect("room");
        assert_eq!(refusal("192.0.2.3"), Some(Refusal::TooManyHalfOpen));
        first.said_hello();
        first.said_hello();
        assert_eq!(refusal("2001:db8::2"), Some(Refusal::TooManyFromSource), "the same /64");
        let third = admission.admit(ip("192.0.2.1")).expect("the first is not half-open any more");
        assert_eq!(refusal("192.0.2.4"), Some(Refusal::TooManyConnections));
        drop((first, second, third));
        drop((admission.admit(ip("127.0.0.1")).expect("room"), admission.admit(ip("127.0.0.1")).expect("room")));
        let now = lock(&admission.now);
        assert_eq!((now.open, now.half_open, now.by_source.len()), (0, 0, 0));
    }
}
