//! The one source of chance in a schedule.

/// `SplitMix64` (Steele, Lea, Flood 2014): a word of state, and equal seeds give equal runs on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`; 0 for 0. The bias of the remainder is of no matter here.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// Both ends included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// In so many of a thousand cases.
    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let at = self.below(of.len() as u64) as usize;
        of.get(at).copied()
    }

    /// One of `of`, as often as its weight says.
    pub(crate) fn weighted<T: Copy>(&mut self, of: &[(u32, T)]) -> Option<T> {
        let total: u64 = of.iter().map(|(weight, _)| u64::from(*weight)).sum();
        let mut at = self.below(total);
        for (weight, item) in of {
            if at < u64::from(*weight) {
                return Some(*item);
            }
            at -= u64::from(*weight);
        }
        None
    }

    /// Mostly near `mean`, sometimes far above it: how long things take.
    pub(crate) fn about(&mut self, mean: u64) -> u64 {
        match self.below(10) {
            0..=6 => self.between(mean / 4, mean),
            7..=8 => self.between(mean, mean * 3),
            _ => self.between(mean * 3, mean * 10),
        }
    }
}
