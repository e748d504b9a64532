//! Random numbers that can be had again.

use crate::random;

/// Numbers from a seed, by Numerical Recipes' linear congruence: its upper bits are random enough for tests.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// Those of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// From a seed that is printed, and that `GRADWIRE_TEST_SEED` gives again.
    ///
    /// # Panics
    /// When the variable is no number.
    #[must_use]
    pub fn thrown() -> Self {
        let seed = std::env::var("GRADWIRE_TEST_SEED").ok();
        let seed = seed.map(|text| text.parse().unwrap_or_else(|_| panic!("GRADWIRE_TEST_SEED={text} is no number")));
        let seed = seed.unwrap_or_else(|| u64::from_le_bytes(random()));
        println!("GRADWIRE_TEST_SEED={seed}");
        Self::new(seed)
    }

    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }

    /// One of so many; of none the first.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 33) % limit.max(1)
    }

    /// From 0 up to 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 40) as f64 / f64::from(1 << 24)
    }
}
