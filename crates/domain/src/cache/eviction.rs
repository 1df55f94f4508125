//! Which caches go when their storage is nearly full.
//!
//! From [`EvictionPolicy::begin_percent`] on, what is worth least is given up, until the storage is down to
//! [`EvictionPolicy::end_percent`]: first what was thrown away before, the oldest first; then the copies of forks and members
//! that nobody uses; then the older snapshots of idle projects; then idle caches, the one that nobody has used for longest
//! first. The gap between the two keeps it from beginning again with each build.
//!
//! What somebody uses is never given up: [`Candidate`]s cannot be made of it.
//!
//! A cache that was used lately stays until the storage is so full that nothing would work soon, and then no more of those
//! go than it takes to get below that.
//!
//! How many bytes come free is an estimate. What cannot be estimated goes alone, and is measured before anything else goes;
//! so does everything when it is not the bytes that run out.

use std::cmp::Ordering;
use std::fmt;
use std::time::Duration;

use crate::key::{Key, Role};
use crate::time::{Timestamp, span};

/// Percentages are of 100.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionPolicy {
    /// Fullness from which on something goes.
    pub begin_percent: f64,
    /// Down to which.
    pub end_percent: f64,
    /// A cache that was used within it stays.
    pub keep_newer: Duration,
    /// Fullness from which on it does not.
    pub urgent_percent: f64,
    /// Evictions before the storage is looked at again.
    pub at_once: usize,
}

impl Default for EvictionPolicy {
    fn default() -> Self {
        Self {
            begin_percent: 80.0,
            end_percent: 75.0,
            keep_newer: Duration::from_hours(24),
            urgent_percent: 95.0,
            at_once: 16,
        }
    }
}

/// How full that is what all caches share.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Fullness {
    pub used: u64,
    /// Used and still to be had; 0: it cannot be told.
    pub total: u64,
    /// Of what else can run out, inodes or room for metadata, the fullest; in percent.
    pub other_percent: Option<f64>,
}

/// Who uses a project's daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    /// It is kept up, or will be.
    pub hot: bool,
    pub leases: usize,
    pub connections: usize,
    /// Something runs, or is on its way up or down.
    pub running: bool,
}

/// What something is that could go. Ordered: the earlier goes before the later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// In the trash.
    Trash,
    /// The copy of a fork, a member, or a trial, with its daemon.
    Copy,
    /// The snapshots of an idle project but those that one would go back to.
    Snapshots,
    /// The cache of an idle project, with all of its snapshots.
    Cache,
}

/// Something that could go. `what` is whatever its maker knows it by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<T> {
    what: T,
    kind: Kind,
    key: Key,
    since: Timestamp,
    bytes: Option<u64>,
}

/// One that has to go.
#[derive(Debug, Clone, PartialEq)]
pub struct Eviction<T> {
    pub what: T,
    pub kind: Kind,
    pub key: Key,
    /// What it is expected to free.
    pub bytes: Option<u64>,
    pub reason: Reason,
}

/// Why. Its `Display` is what people read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reason {
    pub percent: f64,
    pub down_to: f64,
    pub kind: Kind,
    /// For how long it has been in the trash, or nobody has used it.
    pub unused: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan<T> {
    /// In the order in which to go about it.
    pub evictions: Vec<Eviction<T>>,
    /// The storage is not down yet to where eviction ends: to be told to the next look.
    pub under_way: bool,
}

impl Use {
    /// Somebody needs it, or will.
    const fn is_wanted(&self) -> bool {
        self.hot || self.leases > 0 || self.connections > 0
    }
}

impl<T> Candidate<T> {
    pub const fn trash(what: T, key: Key, since: Timestamp, bytes: Option<u64>) -> Self {
        Self { what, kind: Kind::Trash, key, since, bytes }
    }

    /// A derived key's volume. One that runs may go if nobody wants it: its worker asks the daemon before it stops it.
    pub fn copy(what: T, key: Key, by: &Use, last_used: Timestamp, bytes: Option<u64>) -> Option<Self> {
        let free = key.role() != Role::Project && !by.is_wanted();
        free.then_some(Self { what, kind: Kind::Copy, key, since: last_used, bytes })
    }

    /// `bytes` is what those hold alone that would go.
    pub fn snapshots(what: T, key: Key, by: &Use, last_used: Timestamp, bytes: Option<u64>) -> Option<Self> {
        Self::of_idle(Kind::Snapshots, what, key, by, last_used, bytes)
    }

    /// `bytes` is what comes free with the volume and all of its snapshots.
    pub fn cache(what: T, key: Key, by: &Use, last_used: Timestamp, bytes: Option<u64>) -> Option<Self> {
        Self::of_idle(Kind::Cache, what, key, by, last_used, bytes)
    }

    fn of_idle(kind: Kind, what: T, key: Key, by: &Use, last_used: Timestamp, bytes: Option<u64>) -> Option<Self> {
        let idle = key.role() == Role::Project && !by.is_wanted() && !by.running;
        idle.then_some(Self { what, kind, key, since: last_used, bytes })
    }

    fn order(&self, other: &Self) -> Ordering {
        (self.kind, self.since, &self.key).cmp(&(other.kind, other.since, &other.key))
    }
}

impl Fullness {
    fn bytes_percent(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.used as f64 * 100.0 / self.total as f64 }
    }

    /// Of whatever is fullest.
    pub fn percent(&self) -> f64 {
        self.bytes_percent().max(self.other_percent.unwrap_or(0.0))
    }

    /// Freeing bytes is no measure for what else runs out.
    fn is_short_of_bytes(&self) -> bool {
        self.bytes_percent() >= self.other_percent.unwrap_or(0.0)
    }

    #[must_use]
    const fn without(self, bytes: u64) -> Self {
        Self { used: self.used.saturating_sub(bytes), ..self }
    }
}

/// Whether anything has to go now. `under_way`: the last plan said so.
pub fn is_due(fullness: &Fullness, under_way: bool, policy: &EvictionPolicy) -> bool {
    let begin = if under_way { policy.end_percent } else { policy.begin_percent.max(policy.end_percent) };
    let percent = fullness.percent();
    percent > policy.end_percent && percent >= begin
}

/// What has to go now.
pub fn plan<T>(
    fullness: &Fullness,
    candidates: Vec<Candidate<T>>,
    under_way: bool,
    now: Timestamp,
    policy: &EvictionPolicy,
) -> Plan<T> {
    let percent = fullness.percent();
    let mut plan = Plan { evictions: Vec::new(), under_way: is_due(fullness, under_way, policy) };
    if !plan.under_way {
        return plan;
    }
    let mut candidates = candidates;
    candidates.sort_by(Candidate::order);
    let mut expected = *fullness;
    for Candidate { what, kind, key, since, bytes } in candidates {
        let known = bytes.filter(|_| fullness.is_short_of_bytes());
        let first = plan.evictions.is_empty();
        let unused = now.since(since);
        let enough = expected.percent() <= policy.end_percent;
        let stays = kind == Kind::Cache && unused < policy.keep_newer && expected.percent() < policy.urgent_percent;
        // The caches that follow were used later still.
        if enough || stays || plan.evictions.len() >= policy.at_once.max(1) || (known.is_none() && !first) {
            break;
        }
        let reason = Reason { percent, down_to: policy.end_percent, kind, unused };
        plan.evictions.push(Eviction { what, kind, key, bytes, reason });
        let Some(bytes) = known else { break };
        expected = expected.without(bytes);
    }
    plan
}

impl Kind {
    /// A word for a metric.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trash => "trash",
            Self::Copy => "copy",
            Self::Snapshots => "snapshots",
            Self::Cache => "cache",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { percent, down_to, kind, unused } = self;
        let unused = span(*unused);
        write!(f, "the caches' storage is {percent:.0} % full and has to be down to {down_to:.0} %: ")?;
        match kind {
            Kind::Trash => write!(f, "this has been in the trash for {unused}"),
            Kind::Copy => write!(f, "this copy of a cache has not been used for {unused}"),
            Kind::Snapshots => write!(f, "the project has not been used for {unused}, so its older snapshots go"),
            Kind::Cache => write!(f, "nobody has used this cache for {unused}, and every other for less"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: EvictionPolicy = EvictionPolicy {
        begin_percent: 80.0,
        end_percent: 75.0,
        keep_newer: Duration::from_mins(60),
        urgent_percent: 95.0,
        at_once: 4,
    };
    const FREE: Use = Use { hot: false, leases: 0, connections: 0, running: false };
    /// In minutes.
    const NOW: u32 = 10_000;

    fn minute(minute: u32) -> Timestamp {
        Timestamp::from_millis(i64::from(minute) * 60_000)
    }

    fn key() -> Key {
        "pbcce5b6205652dd7".parse().expect("a key")
    }

    fn of_kind(what: u32, kind: Kind, by: &Use, since: u32, bytes: Option<u64>) -> Option<Candidate<u32>> {
        match kind {
            Kind::Trash => Some(Candidate::trash(what, key(), minute(since), bytes)),
            Kind::Copy => Candidate::copy(what, key().fork(), by, minute(since), bytes),
            Kind::Snapshots => Candidate::snapshots(what, key(), by, minute(since), bytes),
            Kind::Cache => Candidate::cache(what, key(), by, minute(since), bytes),
        }
    }

    /// Each is known by the minute since which it is unused.
    fn candidate(kind: Kind, since: u32, bytes: impl Into<Option<u64>>) -> Candidate<u32> {
        of_kind(since, kind, &FREE, since, bytes.into()).expect("free")
    }

    fn full(used: u64) -> Fullness {
        Fullness { used, total: 100, other_percent: None }
    }

    fn gone(fullness: Fullness, candidates: Vec<Candidate<u32>>, under_way: bool) -> (Vec<u32>, bool) {
        let plan = plan(&fullness, candidates, under_way, minute(NOW), &POLICY);
        (plan.evictions.iter().map(|eviction| eviction.what).collect(), plan.under_way)
    }

    #[test]
    fn the_least_worth_goes_first_and_no_more_than_it_takes() {
        use Kind::{Cache, Copy, Snapshots, Trash};
        let all = |bytes| {
            vec![
                candidate(Cache, 2, bytes),
                candidate(Cache, 1, bytes),
                candidate(Snapshots, 3, bytes),
                candidate(Copy, 4, bytes),
                candidate(Trash, 6, bytes),
                candidate(Trash, 5, bytes),
            ]
        };
        assert_eq!(gone(full(79), all(1), false), (vec![], false));
        assert_eq!(gone(full(80), all(5), false), (vec![5], true));
        assert_eq!(gone(full(80), all(3), false), (vec![5, 6], true));
        assert_eq!(gone(full(90), all(4), false), (vec![5, 6, 4, 3], true), "four at a time");
        assert_eq!(gone(full(90), vec![candidate(Cache, 2, 4), candidate(Cache, 1, 4)], true), (vec![1, 2], true));
        assert_eq!(gone(full(90), vec![], false), (vec![], true), "nothing can go, and it is looked at again");
    }

    #[test]
    fn what_began_goes_on_below_where_it_would_begin() {
        let one = || vec![candidate(Kind::Trash, 1, 1)];
        assert_eq!(gone(full(79), one(), true), (vec![1], true));
        assert_eq!(gone(full(76), one(), true), (vec![1], true));
        assert_eq!(gone(full(75), one(), true), (vec![], false));
        assert_eq!(gone(Fullness::default(), one(), true), (vec![], false), "a size that cannot be told");
    }

    #[test]
    fn what_cannot_be_estimated_goes_alone() {
        use Kind::{Cache, Trash};
        assert_eq!(gone(full(90), vec![candidate(Trash, 1, None), candidate(Trash, 2, 1)], false).0, [1]);
        assert_eq!(gone(full(90), vec![candidate(Trash, 1, 1), candidate(Trash, 2, None)], false).0, [1]);
        let inodes = Fullness { other_percent: Some(85.0), ..full(10) };
        assert_eq!(gone(inodes, vec![candidate(Cache, 1, 1), candidate(Cache, 2, 1)], false).0, [1]);
        let bytes = Fullness { other_percent: Some(60.0), ..full(85) };
        assert_eq!(gone(bytes, vec![candidate(Cache, 1, 5), candidate(Cache, 2, 5)], false).0, [1, 2]);
    }

    #[test]
    fn a_cache_that_was_used_lately_stays_until_it_is_urgent() {
        use Kind::{Cache, Copy};
        let lately = |kind| candidate(kind, NOW - 59, 1);
        assert_eq!(gone(full(94), vec![lately(Cache)], false).0, []);
        assert_eq!(gone(full(94), vec![candidate(Cache, NOW - 60, 1)], false).0, [NOW - 60]);
        assert_eq!(gone(full(95), vec![lately(Cache)], false).0, [NOW - 59]);
        let three = vec![candidate(Cache, NOW - 3, 1), candidate(Cache, NOW - 2, 1), candidate(Cache, NOW - 1, 1)];
        assert_eq!(gone(full(96), three, false).0, [NOW - 3, NOW - 2], "only down to where it is not urgent any more");
        assert_eq!(gone(full(94), vec![lately(Copy)], false).0, [NOW - 59], "a copy is made again");
    }

    #[test]
    fn what_is_used_is_no_candidate() {
        for by in [
            Use { hot: true, ..FREE },
            Use { leases: 1, ..FREE },
            Use { connections: 1, ..FREE },
            Use { running: true, ..FREE },
        ] {
            assert_eq!(of_kind(1, Kind::Cache, &by, 1, None), None, "{by:?}");
            assert_eq!(of_kind(1, Kind::Snapshots, &by, 1, None), None, "{by:?}");
            assert_eq!(of_kind(1, Kind::Copy, &by, 1, None).is_some(), by.running, "{by:?}");
        }
        assert_eq!(Candidate::cache(1, key().fork(), &FREE, minute(1), None), None, "a fork is no cache");
        assert_eq!(Candidate::copy(1, key(), &FREE, minute(1), None), None, "and a cache no copy");
    }

    #[test]
    fn reasons_are_words() {
        let reason = |kind| Reason { percent: 82.4, down_to: 75.0, kind, unused: Duration::from_hours(50) };
        assert_eq!(
            reason(Kind::Cache).to_string(),
            "the caches' storage is 82 % full and has to be down to 75 %: nobody has used this cache for 2 d 2 h, and \
             every other for less"
        );
        assert!(reason(Kind::Trash).to_string().ends_with("this has been in the trash for 2 d 2 h"));
    }

    fn any_candidate() -> impl Strategy<Value = Candidate<u32>> {
        let kind = prop_oneof![Just(Kind::Trash), Just(Kind::Copy), Just(Kind::Snapshots), Just(Kind::Cache)];
        (kind, 0..NOW, proptest::option::weighted(0.8, 0..20_u64))
            .prop_map(|(kind, since, b)| candidate(kind, since, b))
    }

    proptest! {
        #[test]
        fn in_order_and_bounded_and_no_more_than_it_takes(
            candidates in proptest::collection::vec(any_candidate(), 0..12), used in 0..=100_u64, under_way in any::<bool>(),
            other in proptest::option::of(0.0..100.0_f64), recent in 0..NOW,
        ) {
            let fullness = Fullness { other_percent: other, ..full(used) };
            let policy = EvictionPolicy { keep_newer: Duration::from_mins(u64::from(recent)), ..POLICY };
            let plan = plan(&fullness, candidates.clone(), under_way, minute(NOW), &policy);
            let begin = if under_way { 75.0 } else { 80.0 };
            if fullness.percent() < begin {
                prop_assert!(plan.evictions.is_empty() && !plan.under_way);
            }
            prop_assert!(plan.evictions.len() <= policy.at_once);

            // A run from the front of the order: nothing is passed over but what stays.
            let mut ordered = candidates;
            ordered.sort_by_key(|c| (c.kind, c.since));
            let order: Vec<_> = ordered.iter().map(|c| (c.kind, c.what)).collect();
            let gone: Vec<_> = plan.evictions.iter().map(|e| (e.kind, e.what)).collect();
            prop_assert_eq!(&order[..gone.len()], gone.as_slice());

            // Alone, or of a known size.
            let by_bytes = used as f64 >= other.unwrap_or(0.0);
            prop_assert!(gone.len() <= 1 || (by_bytes && plan.evictions.iter().all(|e| e.bytes.is_some())));

            // Without the last one it would not have been enough.
            let freed: u64 = plan.evictions.iter().rev().skip(1).filter_map(|e| e.bytes).sum();
            prop_assert!(gone.is_empty() || fullness.without(freed).percent() > policy.end_percent);

            for eviction in plan.evictions.iter().filter(|e| e.kind == Kind::Cache) {
                let late = eviction.reason.unused < policy.keep_newer;
                prop_assert!(!late || fullness.percent() >= policy.urgent_percent, "{}", eviction.reason);
            }
        }

        /// Carried out and measured again until it is done: it ends, and it is down unless nothing is left that may go.
        #[test]
        fn it_comes_to_an_end(candidates in proptest::collection::vec(any_candidate(), 0..30), used in 80..=100_u64) {
            let (mut candidates, mut fullness, mut under_way) = (candidates, full(used), false);
            for _ in 0..=30 {
                let plan = plan(&fullness, candidates.clone(), under_way, minute(NOW), &POLICY);
                under_way = plan.under_way;
                if plan.evictions.is_empty() {
                    break;
                }
                for eviction in plan.evictions {
                    let at = candidates.iter().position(|c| (c.kind, c.what) == (eviction.kind, eviction.what));
                    candidates.remove(at.expect("one of them"));
                    fullness = fullness.without(eviction.bytes.unwrap_or(1));
                }
            }
            let stays = |c: &Candidate<u32>| c.kind == Kind::Cache && NOW - c.what < 60;
            prop_assert!(fullness.percent() <= POLICY.end_percent || candidates.iter().all(stays), "{fullness:?}");
        }
    }
}
