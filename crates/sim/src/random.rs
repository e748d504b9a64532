//! Chance, from one seed. Nothing else in this crate may be a source of it.
//!
//! What happens to the n-th item on a link is a function of the seed and of that item's name alone, not of a generator
//! that everybody draws from: taking one fault out of a plan leaves the rest as it was, so that plans can be made small.

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng as _, SeedableRng as _};

/// Draws in order: for plans, which are made in one go.
#[derive(Debug)]
pub(crate) struct Random(Pcg64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Pcg64::seed_from_u64(seed))
    }

    /// Below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        scale(self.0.next_u64(), bound)
    }

    /// At least `low`, below `high`.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// With a probability of `percent` in a hundred.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// About as often of each power of two: at least `low`, below `high`.
    pub(crate) fn spread(&mut self, low: u64, high: u64) -> u64 {
        let (low_bits, high_bits) = (low.max(1).ilog2(), high.max(2).ilog2());
        let bits = self.within(u64::from(low_bits), u64::from(high_bits) + 1);
        let (from, to) = ((1 << bits).max(low), (2 << bits).min(high));
        if from < to { self.within(from, to) } else { low }
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

/// A number that depends on all of `parts`, and looks like chance.
pub(crate) fn mix(seed: u64, parts: &[u64]) -> u64 {
    parts.iter().fold(finish(seed ^ 0x9e37_79b9_7f4a_7c15), |hash, part| {
        finish(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93))
    })
}

/// Draws in order from a named place: the same name, the same draws.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64, parts: &[u64]) -> Self {
        Self(mix(seed, parts))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        finish(self.0)
    }

    /// Below `bound`; 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        scale(self.next(), bound)
    }

    /// With a probability of `permille` in a thousand.
    pub(crate) fn strikes(&mut self, permille: u32) -> bool {
        self.below(1000) < u64::from(permille)
    }
}

/// The mixer of SplitMix64.
fn finish(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn scale(bits: u64, bound: u64) -> u64 {
    ((u128::from(bits) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_within_their_bounds_and_come_again() {
        let mut random = Random::new(7);
        for _ in 0..1000 {
            assert!((3..9).contains(&random.within(3, 9)));
            assert!((1..20_000).contains(&random.spread(1, 20_000)));
        }
        assert_eq!(Draws::new(1, &[2, 3]).next(), Draws::new(1, &[2, 3]).next());
        assert_ne!(mix(1, &[2, 3]), mix(1, &[3, 2]));
    }
}
