//! When a moment of a cache is worth keeping, and for how long.
//!
//! A snapshot is taken while a project is building, once each [`HistoryPolicy::every`]: after a build where possible, in the
//! middle of one when a project builds without a pause for twice as long. Nothing is taken of a cache that nobody wrote to, so
//! that what is kept are moments that differ.

use std::time::Duration;

use super::snapshot::{Snapshot, SnapshotName, Verdict};
use crate::time::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryPolicy {
    /// Zero: none is taken but by hand.
    pub every: Duration,
    /// How many are kept at most; at least 1.
    pub keep: usize,
    /// Older ones go, whatever their number; the newest good one stays.
    pub keep_for: Duration,
}

impl HistoryPolicy {
    /// What is left of a history when its storage is full: the newest, and the newest good one.
    pub const LEAST: Self = Self { every: Duration::ZERO, keep: 1, keep_for: Duration::MAX };
}

impl Default for HistoryPolicy {
    fn default() -> Self {
        Self { every: Duration::from_mins(30), keep: 6, keep_for: Duration::from_hours(24 * 14) }
    }
}

/// What a project has done since its last snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// When the newest one was taken, or was found not to be worth it; `None`: never.
    pub last: Option<Timestamp>,
    /// When somebody last used the daemon, which may have written.
    pub used: Option<Timestamp>,
    /// Somebody uses it now.
    pub building: bool,
}

/// When the next one is due; `None`: not before somebody builds.
pub fn due(activity: &Activity, now: Timestamp, policy: &HistoryPolicy) -> Option<Timestamp> {
    let Activity { last, used, building } = *activity;
    if policy.every.is_zero() || !(building || used.is_some_and(|used| last.is_none_or(|last| used > last))) {
        return None;
    }
    // The first one is worth having as soon as there is something in it; and a clock that went back delays none for ever.
    let Some(last) = last else { return Some(if building { now.plus(policy.every) } else { now }) };
    let patience = if building { policy.every * 2 } else { policy.every };
    Some(last.min(now).plus(patience))
}

/// The newest that is known to be sound.
pub fn newest_good(snapshots: &[Snapshot]) -> Option<&Snapshot> {
    snapshots.iter().filter(|snapshot| snapshot.verdict == Verdict::Good).max_by_key(|snapshot| snapshot.name)
}

/// Which ones have had their time. The newest stays, and so does the newest good one; of the others those beyond
/// [`HistoryPolicy::keep`] go, the bad ones first and then the oldest, and those that are too old.
pub fn surplus(snapshots: &[Snapshot], now: Timestamp, policy: &HistoryPolicy) -> Vec<SnapshotName> {
    let newest = snapshots.iter().map(|snapshot| snapshot.name).max();
    let good = newest_good(snapshots).map(|snapshot| snapshot.name);
    let (mut others, kept): (Vec<&Snapshot>, Vec<&Snapshot>) =
        snapshots.iter().partition(|snapshot| Some(snapshot.name) != newest && Some(snapshot.name) != good);
    others.sort_by_key(|snapshot| (snapshot.verdict != Verdict::Bad, snapshot.name));
    let beyond = (others.len() + kept.len()).saturating_sub(policy.keep.max(1)).min(others.len());
    let old = |snapshot: &&&Snapshot| now.since(snapshot.taken) > policy.keep_for;
    let (gone, rest) = others.split_at(beyond);
    let mut names: Vec<SnapshotName> =
        gone.iter().chain(rest.iter().filter(old)).map(|snapshot| snapshot.name).collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: HistoryPolicy =
        HistoryPolicy { every: Duration::from_mins(30), keep: 3, keep_for: Duration::from_hours(24) };

    fn minute(minute: i64) -> Timestamp {
        Timestamp::from_millis(minute * 60_000)
    }

    fn snapshot(sequence: u64, verdict: Verdict) -> Snapshot {
        let taken = minute(i64::try_from(sequence).expect("small") * 30);
        Snapshot { name: SnapshotName::new(sequence), taken, verdict, bytes: None }
    }

    fn due_at(last: Option<i64>, used: Option<i64>, building: bool, now: i64) -> Option<Timestamp> {
        due(&Activity { last: last.map(minute), used: used.map(minute), building }, minute(now), &POLICY)
    }

    #[test]
    fn one_after_the_first_build_and_then_on_a_cadence() {
        assert_eq!(due_at(None, None, false, 0), None);
        assert_eq!(due_at(None, Some(5), false, 6), Some(minute(6)), "the first, at once");
        assert_eq!(due_at(None, Some(5), true, 6), Some(minute(36)), "not in the middle of a build");
        assert_eq!(due_at(Some(6), Some(5), false, 7), None, "nothing was used since");
        assert_eq!(due_at(Some(6), Some(10), false, 11), Some(minute(36)));
        assert_eq!(due_at(Some(6), Some(70), false, 71), Some(minute(36)), "overdue, and nobody builds");
        assert_eq!(due_at(Some(6), Some(70), true, 60), Some(minute(66)), "in the middle only when there is no pause");
        assert_eq!(due_at(Some(1000), Some(1001), false, 10), Some(minute(40)), "a clock that went back");
        let none = HistoryPolicy { every: Duration::ZERO, ..POLICY };
        assert_eq!(due(&Activity { last: None, used: Some(minute(1)), building: false }, minute(2), &none), None);
    }

    fn gone(snapshots: &[Snapshot], now: i64) -> Vec<u64> {
        surplus(snapshots, minute(now), &POLICY).into_iter().map(SnapshotName::sequence).collect()
    }

    #[test]
    fn so_many_are_kept_and_the_newest_good_one_always() {
        use Verdict::{Bad, Good, Unchecked};
        let of = |verdicts: &[Verdict]| {
            (1..).zip(verdicts).map(|(sequence, verdict)| snapshot(sequence, *verdict)).collect::<Vec<_>>()
        };
        assert_eq!(gone(&of(&[Good, Good, Good]), 91), []);
        assert_eq!(gone(&of(&[Good, Good, Good, Good]), 121), [1]);
        assert_eq!(gone(&of(&[Good, Bad, Bad, Unchecked]), 121), [2], "a bad one before an older good one");
        assert_eq!(gone(&of(&[Good, Unchecked, Unchecked, Unchecked, Unchecked]), 151), [2, 3]);
        assert_eq!(
            gone(&of(&[Good, Good, Bad]), 24 * 60 + 61),
            [1],
            "too old, and neither the newest nor the newest good"
        );
        assert_eq!(gone(&[], 0), []);
    }

    proptest! {
        #[test]
        fn what_one_would_go_back_to_stays(
            verdicts in proptest::collection::vec(0..3_u8, 0..12), keep in 0..5_usize, now in 0..5000_i64,
        ) {
            let verdict = |v| [Verdict::Unchecked, Verdict::Good, Verdict::Bad][usize::from(v)];
            let snapshots: Vec<_> = (1..).zip(verdicts).map(|(n, v)| snapshot(n, verdict(v))).collect();
            let policy = HistoryPolicy { keep, ..POLICY };
            let gone = surplus(&snapshots, minute(now), &policy);
            let rest: Vec<_> = snapshots.iter().filter(|s| !gone.contains(&s.name)).copied().collect();
            prop_assert_eq!(newest_good(&rest), newest_good(&snapshots));
            prop_assert_eq!(rest.last(), snapshots.last());
            // Two are never given up for the sake of the number.
            prop_assert!(rest.len() <= keep.max(2));
            prop_assert_eq!(surplus(&rest, minute(now), &policy), []);
        }
    }
}
