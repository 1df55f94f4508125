//! How large a cache may be.
//!
//! A volume begins at its first size and grows by a factor before it is full, up to its maximum. It never shrinks by itself,
//! and one that somebody made larger by hand is left as it is.
//!
//! A volume that is full all the same is a brick: the daemon cannot write its own databases, so it can neither build nor throw
//! anything away, and does not start again. So at the maximum there is a reserve, lent once: with a little room a daemon that
//! is started anew throws away what it may, and when enough of it is gone the reserve is taken back.
//!
//! ```text
//!    first ──▶ × factor ──▶ … ──▶ maximum ◀──────────── enough is free again
//!                                    │                         │
//!                                    └── full ──▶ maximum + reserve ── full again ──▶ nothing more
//! ```
//!
//! [`next`] looks at one measurement, the size that is in force included, and at nothing else. So there is nothing to lose in
//! a crash, and a step whose effect cannot be seen yet is not built upon (F24): asked again, it answers the same.

use std::fmt;

/// Of the whole host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SizePolicy {
    /// Share of its size from which on a volume grows, in percent; 0: none ever grows.
    pub threshold_percent: f64,
    /// By which it grows; 1 or less: none ever grows.
    pub factor: f64,
    /// Up to which, unless a project says otherwise. 0: none ever grows.
    pub max: u64,
    /// What is lent on top of the maximum.
    pub reserve: u64,
}

impl Default for SizePolicy {
    fn default() -> Self {
        Self { threshold_percent: 80.0, factor: 1.5, max: 240 << 30, reserve: 1 << 30 }
    }
}

/// Between what a project's volume stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    first: u64,
    max: u64,
}

/// One measurement of a live volume; all of it of the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// What counts against its size: what it has to itself, and what it shares with snapshots and clones.
    pub used: u64,
    /// What it may hold, as the storage enforces it now. Never what somebody asked for: that may not have happened.
    pub size: u64,
    /// What can still be written. Less than its size leaves when the storage itself is short.
    pub available: u64,
    /// Files that can still be made, where that is bounded.
    pub inodes_available: Option<u64>,
}

/// A size for the volume to have from now on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resize {
    pub to: u64,
    pub why: Why,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// Its first size was set to more than it has.
    Set,
    Filling {
        percent: f64,
    },
    /// The reserve is lent: the maximum is reached, and so little room is left. The daemon has to be started anew to get any
    /// use of it: only then it gives up what a failed step left behind.
    Full {
        room: u64,
    },
    /// As `Full`, in files.
    Inodes {
        available: u64,
    },
    /// The reserve is taken back.
    Relieved {
        percent: f64,
    },
}

/// Files that can still be made, below which a volume is as good as full: one checkout may have as many.
const FEWEST_INODES: u64 = 50_000;

/// Share of the maximum down to which a cache has to fall before the reserve is taken back. The ceiling of garbage collection
/// lies below it, so that a daemon that collects gets there.
const RELIEVED_PERCENT: u64 = 80;

/// So much of its size, or so much at most, is too little to go on with.
const TIGHT_PERCENT: u64 = 5;
const TIGHT_AT_MOST: u64 = 1 << 30;

impl SizePolicy {
    fn grows(&self) -> bool {
        self.threshold_percent > 0.0 && self.factor > 1.0 && self.max > 0
    }
}

impl Bounds {
    /// `first` is the size that a new volume gets, and what one that is smaller is brought to. `max` is the project's own
    /// maximum; equal to `first`: the volume never grows.
    pub fn new(first: u64, max: Option<u64>, policy: &SizePolicy) -> Self {
        let max = if policy.grows() { max.unwrap_or(policy.max) } else { first };
        Self { first, max: max.max(first) }
    }

    pub const fn first(&self) -> u64 {
        self.first
    }

    pub const fn max(&self) -> u64 {
        self.max
    }

    /// The size that counts: without the reserve, if that is lent.
    fn settled(&self, size: u64, policy: &SizePolicy) -> u64 {
        if self.is_lent(size, policy) { self.max } else { size }
    }

    const fn is_lent(&self, size: u64, policy: &SizePolicy) -> bool {
        size > self.max && size <= self.max.saturating_add(policy.reserve)
    }
}

impl Fill {
    pub fn percent(&self) -> f64 {
        if self.size == 0 { 100.0 } else { self.used as f64 * 100.0 / self.size as f64 }
    }

    /// Why no daemon could go on with what is left.
    fn tight(&self) -> Option<Why> {
        let room = self.room();
        if room <= part(self.size, TIGHT_PERCENT).min(TIGHT_AT_MOST) {
            return Some(Why::Full { room });
        }
        let available = self.inodes_available.filter(|_| self.has_fewer_files_than(FEWEST_INODES))?;
        Some(Why::Inodes { available })
    }

    fn has_fewer_files_than(&self, least: u64) -> bool {
        self.inodes_available.is_some_and(|available| available < least)
    }

    /// Up to its size.
    const fn room(&self) -> u64 {
        self.size.saturating_sub(self.used)
    }

    /// It is the storage that is short, not the volume: a larger size would give it nothing.
    const fn is_short_of_storage(&self) -> bool {
        self.available < self.room() / 2
    }
}

/// The size after one step of growth; `None`: it stays.
pub fn grow(size: u64, percent: f64, policy: &SizePolicy) -> Option<u64> {
    let reached = policy.grows() && percent >= policy.threshold_percent;
    let to = whole_gibibytes(size as f64 * policy.factor).min(policy.max);
    (reached && to > size).then_some(to)
}

/// Upwards. A float that is too large becomes the largest number.
fn whole_gibibytes(bytes: f64) -> u64 {
    const GIB: u64 = 1 << 30;
    #[expect(clippy::cast_sign_loss, reason = "sizes and factors are not negative, and what is becomes 0")]
    let count = (bytes / GIB as f64).ceil() as u64;
    count.saturating_mul(GIB)
}

/// What its size should become, if it should change.
pub fn next(fill: &Fill, bounds: &Bounds, policy: &SizePolicy) -> Option<Resize> {
    let Fill { used, size, .. } = *fill;
    if size < bounds.first {
        return Some(Resize { to: bounds.first, why: Why::Set });
    }
    let lent = bounds.is_lent(size, policy);
    if lent && used <= part(bounds.max, RELIEVED_PERCENT) && !fill.has_fewer_files_than(2 * FEWEST_INODES) {
        let percent = used as f64 * 100.0 / bounds.max as f64;
        return Some(Resize { to: bounds.max, why: Why::Relieved { percent } });
    }
    if fill.is_short_of_storage() {
        return None;
    }
    let (tight, percent) = (fill.tight(), fill.percent());
    // What is tight in any way grows, whatever its share.
    let share = if tight.is_some() { f64::INFINITY } else { percent };
    if let Some(to) = grow(size, share, &SizePolicy { max: bounds.max, ..*policy }) {
        let why = tight.filter(|why| matches!(why, Why::Inodes { .. })).unwrap_or(Why::Filling { percent });
        return Some(Resize { to, why });
    }
    let most = bounds.max.saturating_add(policy.reserve);
    tight.filter(|_| size < most).map(|why| Resize { to: most, why })
}

/// What a daemon is told of the room it has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collection {
    /// Its cache is collected down to this.
    pub ceiling: u64,
    /// And never below this, whatever else is wanted.
    pub reserved: u64,
    /// Left free.
    pub free: u64,
}

impl Collection {
    /// For a volume of this size. One that may still grow is collected only when it is fuller than what makes it grow, or it
    /// never would. One that may not keeps a quarter free: collection runs after a build, and the build in between must find
    /// room. A reserve that is lent is room for collection, not for a larger cache.
    pub fn of(size: u64, bounds: &Bounds, policy: &SizePolicy) -> Self {
        let settled = bounds.settled(size, policy);
        let (ceiling, free) = if settled < bounds.max {
            #[expect(clippy::cast_sign_loss, reason = "clamped")]
            let threshold = policy.threshold_percent.clamp(0.0, 100.0) as u64;
            let left = (100 - threshold) / 2;
            (100 - left, left / 2)
        } else {
            (75, 10)
        };
        Self { ceiling: part(settled, ceiling), reserved: part(settled, 10), free: part(settled, free) }
    }
}

/// `share` percent, at most 100 of them, without losing small sizes or overflowing on large ones.
pub fn part(bytes: u64, share: u64) -> u64 {
    bytes / 100 * share + bytes % 100 * share / 100
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set => f.write_str("it was set to more"),
            Self::Filling { percent } => write!(f, "it is {percent:.0} % full"),
            Self::Full { room } => write!(
                f,
                "it has reached its maximum and has {} MiB left: without a reserve its daemon could not even throw \
                 anything away",
                room >> 20
            ),
            Self::Inodes { available } => write!(f, "it has room for only {available} more files"),
            Self::Relieved { percent } => {
                write!(f, "it is {percent:.0} % full without the reserve, so that is taken back")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn policy(threshold_percent: f64, factor: f64, max: u64) -> SizePolicy {
        SizePolicy { threshold_percent, factor, max: max * GIB, reserve: GIB }
    }

    #[test]
    fn vectors_of_the_reference() {
        for (size, percent, threshold, factor, max, to) in [
            (60, 79.9, 80.0, 1.5, 240, 0),
            (60, 85.0, 80.0, 1.5, 240, 90),
            (60, 80.0, 80.0, 1.5, 240, 90),
            (61, 85.0, 80.0, 1.5, 240, 92),
            (200, 90.0, 80.0, 1.5, 240, 240),
            (240, 95.0, 80.0, 1.5, 240, 0),
            (60, 95.0, 0.0, 1.5, 240, 0),
            (60, 95.0, 80.0, 1.5, 0, 0),
            (60, 95.0, 80.0, 1.0, 240, 0),
            (60, 95.0, 80.0, 1e300, 240, 240),
            (60, 95.0, 80.0, f64::INFINITY, 240, 240),
            (60, 95.0, 80.0, f64::NAN, 240, 0),
            (60, 95.0, 80.0, -2.0, 240, 0),
        ] {
            let grown = grow(size * GIB, percent, &policy(threshold, factor, max)).unwrap_or(0);
            assert_eq!(grown, to * GIB, "{size} GiB, {percent} %, from {threshold} %, × {factor}, up to {max} GiB");
        }
    }

    fn full(used: u64, size: u64) -> Fill {
        Fill { used, size, available: size.saturating_sub(used), inodes_available: None }
    }

    /// In GiB, of a project of 10 that may grow to 30, with a reserve of 1.
    fn to(used: u64, size: u64) -> Option<(u64, Why)> {
        let policy = policy(80.0, 1.5, 240);
        next(&full(used * GIB, size * GIB), &Bounds::new(10 * GIB, Some(30 * GIB), &policy), &policy)
            .map(|Resize { to, why }| (to / GIB, why))
    }

    #[test]
    fn a_volume_grows_to_its_maximum_and_gets_the_reserve_once() {
        assert_eq!(to(7, 10), None);
        assert_eq!(to(8, 10), Some((15, Why::Filling { percent: 80.0 })));
        assert_eq!(
            to(15, 15),
            Some((23, Why::Filling { percent: 100.0 })),
            "the limit met before it grew is no brick yet"
        );
        assert_eq!(to(28, 30), None, "nearly, and garbage collection is at work");
        assert_eq!(to(29, 30), Some((31, Why::Full { room: GIB })));
        assert_eq!(to(30, 30), Some((31, Why::Full { room: 0 })));
        assert_eq!(to(30, 31), None, "it is lent");
        assert_eq!(to(31, 31), None, "and no more");
        assert_eq!(to(25, 31), None);
        assert_eq!(to(24, 31), Some((30, Why::Relieved { percent: 80.0 })));
        assert_eq!(to(24, 30), None);
    }

    #[test]
    fn sizes_that_somebody_gave_it() {
        assert_eq!(to(1, 5), Some((10, Why::Set)), "a first size that was raised");
        assert_eq!(to(1, 20), None, "one that was lowered shrinks nothing");
        assert_eq!(to(1, 50), None, "nor is one by hand taken back");
        assert_eq!(to(50, 50), None, "nor built upon");
    }

    #[test]
    fn one_that_never_grows_has_its_reserve_all_the_same() {
        let grows = policy(80.0, 1.5, 240);
        for (off, max) in
            [(grows, Some(10 * GIB)), (policy(0.0, 1.5, 240), None), (policy(80.0, 1.0, 240), Some(99 * GIB))]
        {
            let bounds = Bounds::new(10 * GIB, max, &off);
            assert_eq!(bounds.max(), 10 * GIB);
            assert_eq!(next(&full(9 * GIB, 10 * GIB), &bounds, &off), None);
            let lent = next(&full(10 * GIB, 10 * GIB), &bounds, &off);
            assert_eq!(lent, Some(Resize { to: 11 * GIB, why: Why::Full { room: 0 } }));
            let without = SizePolicy { reserve: 0, ..off };
            assert_eq!(next(&full(10 * GIB, 10 * GIB), &bounds, &without), None);
        }
        let large = Bounds::new(500 * GIB, None, &grows);
        assert_eq!(
            (large.first(), large.max()),
            (500 * GIB, 500 * GIB),
            "the host's maximum takes nothing from a project"
        );
    }

    #[test]
    fn a_larger_size_is_no_help_where_the_storage_is_short() {
        let policy = policy(80.0, 1.5, 240);
        let bounds = Bounds::new(10 * GIB, None, &policy);
        let short = Fill { available: 1 << 20, ..full(8 * GIB, 10 * GIB) };
        assert_eq!(next(&short, &bounds, &policy), None);
    }

    #[test]
    fn files_count_as_well_as_bytes() {
        let policy = policy(80.0, 1.5, 15);
        let bounds = Bounds::new(10 * GIB, None, &policy);
        let crowded = |size| Fill { inodes_available: Some(49_999), ..full(GIB, size) };
        let why = Why::Inodes { available: 49_999 };
        assert_eq!(next(&crowded(10 * GIB), &bounds, &policy), Some(Resize { to: 15 * GIB, why }));
        assert_eq!(next(&crowded(15 * GIB), &bounds, &policy), Some(Resize { to: 16 * GIB, why }));
        assert_eq!(next(&crowded(16 * GIB), &bounds, &policy), None, "the reserve stays while it is of use");
        let roomy = Fill { inodes_available: Some(50_000), ..full(GIB, 10 * GIB) };
        assert_eq!(next(&roomy, &bounds, &policy), None);
    }

    #[test]
    fn garbage_collection_leaves_room_to_grow_and_then_room_to_work() {
        let policy = policy(80.0, 1.5, 240);
        let bounds = Bounds::new(100, Some(200), &policy);
        let of = |size| {
            let Collection { ceiling, reserved, free } = Collection::of(size, &bounds, &policy);
            (ceiling, reserved, free)
        };
        assert_eq!(of(100), (90, 10, 5), "above what makes it grow");
        assert_eq!(of(200), (150, 20, 20));
        assert_eq!(of(200 + GIB), (150, 20, 20), "the reserve is not for the cache");
        assert_eq!(of(200 + GIB + 100).0, part(200 + GIB + 100, 75), "one that was made larger by hand");
        for threshold in 1..100 {
            let policy = SizePolicy { threshold_percent: f64::from(threshold), ..policy };
            let Collection { ceiling, free, .. } =
                Collection::of(100 * GIB, &Bounds::new(100 * GIB, None, &policy), &policy);
            assert!(ceiling > 100 * GIB / 100 * u64::try_from(threshold).expect("small"), "{threshold} %");
            assert!(ceiling + free <= 100 * GIB, "{threshold} %");
        }
    }

    #[test]
    fn parts() {
        assert_eq!((part(1, 100), part(199, 50), part(u64::MAX, 100)), (1, 99, u64::MAX));
    }

    proptest! {
        /// Whatever is measured, and however often: there is an end to it, within the bounds, and never below what is used.
        #[test]
        fn it_comes_to_rest_within_its_bounds(
            used in 0..300_u64, size in 1..300_u64, first in 1..100_u64, max in 0..300_u64, reserve in 0..3_u64,
            threshold in 0..100_u8, factor in 0.5..4.0_f64, files in proptest::option::of(0..100_000_u64),
        ) {
            let policy = SizePolicy { threshold_percent: f64::from(threshold), factor, max: 240 * GIB, reserve: reserve * GIB };
            let bounds = Bounds::new(first * GIB, Some(max * GIB), &policy);
            let (used, mut size) = (used * GIB / 2, size * GIB);
            let most = size.max(bounds.max() + policy.reserve);
            for _ in 0..400 {
                let fill = Fill { inodes_available: files, ..full(used, size) };
                let Some(Resize { to, why }) = next(&fill, &bounds, &policy) else { return Ok(()) };
                prop_assert!(to != size && to <= most && to > 0, "{size} to {to}: {why}");
                if to < size {
                    prop_assert!(matches!(why, Why::Relieved { .. }) && to >= bounds.first() && used < to, "{why}");
                }
                size = to;
            }
            prop_assert!(false, "no end to it");
        }
    }
}
