//! How often somebody may ask. Each has a measure of its own, so nobody's haste is another's wait (W10).
//!
//! Whoever proves what it is, is counted by that: a build by its repository and lane, a token by its name. Strangers are counted by
//! where they come from, and so is the work of looking at a token that may be anybody's. Who keeps the host going is not counted, nor
//! are programs of this host that come over loopback: they are many, and have one name.
//!
//! Memory is bounded: of more names than [`MOST`] those are forgotten that have not asked lately, and if all have, new ones wait.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use kiln_domain::Lane;
use kiln_domain::access::Standing;

use crate::gateway::source_of;
use crate::identity::{Caller, Source};

/// Names that are counted at a time, of each kind.
const MOST: usize = 4096;

/// When there is no room to count somebody.
const CROWDED: Duration = Duration::from_secs(5);

/// Requests a second, each with twice as many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    pub builds: NonZeroU32,
    pub untrusted: NonZeroU32,
    pub strangers: NonZeroU32,
}

impl Rates {
    /// The reference has 50 for all callers together, and 100 at once.
    pub const DEFAULT: Self = Self { builds: rate(50), untrusted: rate(10), strangers: rate(5) };
}

const fn rate(number: u32) -> NonZeroU32 {
    match NonZeroU32::new(number) {
        Some(rate) => rate,
        None => NonZeroU32::MIN,
    }
}

type Limiter<K, C> = RateLimiter<K, DashMapStateStore<K>, C, NoOpMiddleware<<C as Clock>::Instant>>;

pub(super) struct Limits<C: Clock = DefaultClock> {
    builds: Limiter<String, C>,
    untrusted: Limiter<String, C>,
    strangers: Limiter<IpAddr, C>,
    /// Tokens that have to be looked at before it is known whose they are.
    proofs: Limiter<IpAddr, C>,
    /// The same from this host, behind whose proxy there may be many.
    nearby: Limiter<IpAddr, C>,
    clock: C,
}

impl Limits {
    pub(super) fn new(rates: Rates) -> Self {
        Self::on(rates, DefaultClock::default())
    }
}

impl<C: Clock + Clone> Limits<C> {
    pub(super) fn on(rates: Rates, clock: C) -> Self {
        let quota = |rate: NonZeroU32| Quota::per_second(rate).allow_burst(rate.saturating_mul(TWICE));
        Self {
            builds: RateLimiter::dashmap_with_clock(quota(rates.builds), clock.clone()),
            untrusted: RateLimiter::dashmap_with_clock(quota(rates.untrusted), clock.clone()),
            strangers: RateLimiter::dashmap_with_clock(quota(rates.strangers), clock.clone()),
            proofs: RateLimiter::dashmap_with_clock(quota(rates.builds), clock.clone()),
            nearby: RateLimiter::dashmap_with_clock(quota(rates.builds.saturating_mul(NEARBY)), clock.clone()),
            clock,
        }
    }

    /// Before a token is looked at. The error: when to come again.
    pub(super) fn may_prove(&self, source: Source) -> Result<(), Duration> {
        match source {
            Source::Tcp(address) if address.to_canonical().is_loopback() => self.take(&self.nearby, &place(address)),
            Source::Tcp(address) => self.take(&self.proofs, &place(address)),
            Source::Socket { .. } => Ok(()),
        }
    }

    pub(super) fn may_ask(&self, caller: &Caller, source: Source) -> Result<(), Duration> {
        match (&caller.standing, source) {
            (Standing::Admin | Standing::Operator(_), _) => Ok(()),
            (Standing::Stranger, Source::Tcp(address)) => self.take(&self.strangers, &place(address)),
            (Standing::Stranger, Source::Socket { .. }) => self.take(&self.untrusted, &caller.who),
            (Standing::Holder { .. }, Source::Tcp(address))
                if address.to_canonical().is_loopback() && caller.who == Caller::THIS_HOST =>
            {
                Ok(())
            }
            (standing, _) => {
                let name = standing.repo().map_or_else(|| caller.who.clone(), ToString::to_string);
                match standing.lane() {
                    Lane::Trusted => self.take(&self.builds, &name),
                    Lane::Untrusted => self.take(&self.untrusted, &name),
                }
            }
        }
    }

    fn take<K: std::hash::Hash + Eq + Clone>(&self, limiter: &Limiter<K, C>, name: &K) -> Result<(), Duration> {
        if limiter.len() >= MOST {
            limiter.retain_recent();
            if limiter.len() >= MOST {
                return Err(CROWDED);
            }
        }
        limiter.check_key(name).map_err(|early| early.wait_time_from(self.clock.now()))
    }
}

/// All of a host's own addresses are one.
fn place(address: IpAddr) -> IpAddr {
    if address.to_canonical().is_loopback() { Ipv4Addr::LOCALHOST.into() } else { source_of(address) }
}

/// A look at a token costs a quarter of a millisecond.
const NEARBY: NonZeroU32 = rate(8);

const TWICE: NonZeroU32 = rate(2);

#[cfg(test)]
mod tests {
    use governor::clock::FakeRelativeClock;
    use kiln_domain::RepoName;
    use kiln_domain::access::{Proven, Trust};

    use super::*;

    fn caller(repo: &str, trust: Trust, who: &str) -> Caller {
        let repo = RepoName::parse(repo).expect("a name");
        Caller { standing: Standing::Build(Proven { repo, trust }), who: who.to_owned() }
    }

    fn far(address: &str) -> Source {
        Source::Tcp(address.parse().expect("an address"))
    }

    /// How often it goes through at once.
    fn burst(limits: &Limits<FakeRelativeClock>, caller: &Caller, source: Source) -> usize {
        (0..1000).take_while(|_| limits.may_ask(caller, source).is_ok()).count()
    }

    #[test]
    fn nobody_s_haste_is_another_s_wait() {
        let clock = FakeRelativeClock::default();
        let limits = Limits::on(Rates::DEFAULT, clock.clone());
        let (here, there) = (far("203.0.113.7"), far("203.0.113.8"));
        let one = caller("h/one", Trust::Trusted, "run 1");
        assert_eq!(burst(&limits, &one, here), 100);
        assert_eq!(burst(&limits, &caller("h/one", Trust::Trusted, "run 2"), there), 0, "its runs have one measure");
        assert_eq!(burst(&limits, &caller("h/two", Trust::Trusted, "run 3"), here), 100);
        let fork = caller("h/one", Trust::Untrusted { fork: "7".to_owned() }, "run 4");
        assert_eq!(burst(&limits, &fork, here), 20, "untrusted code takes nothing from its project");
        assert_eq!(burst(&limits, &Caller::stranger("x"), here), 10);
        assert_eq!(burst(&limits, &Caller::stranger("y"), here), 0);
        assert_eq!(burst(&limits, &Caller::stranger("x"), there), 10);
        clock.advance(Duration::from_secs(1));
        assert_eq!(burst(&limits, &one, here), 50);
        let wait = limits.may_ask(&one, here).expect_err("too soon");
        assert!(wait > Duration::ZERO && wait <= Duration::from_millis(20), "{wait:?}");
        let admin = Caller { standing: Standing::Admin, who: "uid 0".to_owned() };
        assert_eq!(burst(&limits, &admin, Source::Socket { uid: 0 }), 1000);
    }

    #[test]
    fn a_customer_s_addresses_of_ipv6_count_as_one() {
        let limits = Limits::on(Rates::DEFAULT, FakeRelativeClock::default());
        assert_eq!(burst(&limits, &Caller::stranger("x"), far("2001:db8::1")), 10);
        assert_eq!(burst(&limits, &Caller::stranger("x"), far("2001:db8::2")), 0);
        assert_eq!(burst(&limits, &Caller::stranger("x"), far("2001:db8:0:1::1")), 10);
    }

    #[test]
    fn those_that_are_counted_are_bounded() {
        let clock = FakeRelativeClock::default();
        let limits = Limits::on(Rates::DEFAULT, clock.clone());
        let stranger = Caller::stranger("x");
        let from = |number: u32| Source::Tcp(std::net::Ipv4Addr::from_bits(0x0a00_0000 + number).into());
        let through =
            (0..2 * u32::try_from(MOST).expect("small")).filter(|n| limits.may_ask(&stranger, from(*n)).is_ok());
        assert_eq!(through.count(), MOST);
        assert_eq!(limits.strangers.len(), MOST);
        clock.advance(Duration::from_secs(10));
        assert!(limits.may_ask(&stranger, from(1_000_000)).is_ok(), "who has not asked lately is forgotten");
        assert_eq!(limits.strangers.len(), 1);
    }
}
