//! Randomness from a seed (`SplitMix64`, Steele, Lea and Flood 2014): small, and good enough for moments and choices.

use std::ops::Range;
use std::time::Duration;

#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) const fn of(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for one part, so that parts do not take each other's numbers.
    pub(crate) fn part(&self, name: &str) -> Self {
        // FNV-1a.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Self(self.0 ^ hash)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `range` is not empty.
    pub(crate) fn below(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start).max(1)
    }

    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.below(range))
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(0..count) == 0
    }

    /// `None` of nothing.
    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(0..from.len() as u64) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_itself_and_parts_differ() {
        let draw = |mut chance: Chance| [chance.next(), chance.next(), chance.next()];
        assert_eq!(draw(Chance::of(7)), draw(Chance::of(7)));
        assert_ne!(draw(Chance::of(7).part("a")), draw(Chance::of(7).part("b")));
        let mut chance = Chance::of(1);
        assert!((0..1000).all(|_| (3..5).contains(&chance.below(3..5))));
    }
}
