//! Fixed-size sets of small numbers.

use alloc::boxed::Box;
use alloc::vec;

/// A set of numbers below a fixed length, one bit each. Allocated once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits {
    words: Box<[u64]>,
    len: usize,
}

impl Bits {
    /// An empty set of numbers below `len`.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(64)].into_boxed_slice(), len }
    }

    /// The bound: members are below it.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the bound is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `index` is a member. False for anything at or above the bound.
    #[must_use]
    pub fn get(&self, index: usize) -> bool {
        index < self.len && self.words[index / 64] & (1 << (index % 64)) != 0
    }

    /// Adds `index`; returns whether it was new.
    ///
    /// # Panics
    /// When `index` is not below the bound.
    pub fn insert(&mut self, index: usize) -> bool {
        assert!(index < self.len, "bit {index} of {}", self.len);
        let word = &mut self.words[index / 64];
        let before = *word;
        *word |= 1 << (index % 64);
        *word != before
    }

    /// Takes `index` out; returns whether it was a member.
    pub fn remove(&mut self, index: usize) -> bool {
        if !self.get(index) {
            return false;
        }
        self.words[index / 64] &= !(1 << (index % 64));
        true
    }

    /// Takes all members out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// How many members there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The smallest member that is at least `from` and below `to`.
    #[must_use]
    pub fn next(&self, from: usize, to: usize) -> Option<usize> {
        self.find(from, to, 0)
    }

    /// The smallest number that is at least `from`, below `to`, and no member.
    #[must_use]
    pub fn next_absent(&self, from: usize, to: usize) -> Option<usize> {
        self.find(from, to, u64::MAX)
    }

    fn find(&self, from: usize, to: usize, flip: u64) -> Option<usize> {
        let to = to.min(self.len);
        if from >= to {
            return None;
        }
        let mut mask = u64::MAX << (from % 64);
        for word in from / 64..to.div_ceil(64) {
            let found = (self.words[word] ^ flip) & mask;
            if found != 0 {
                let index = word * 64 + found.trailing_zeros() as usize;
                return (index < to).then_some(index);
            }
            mask = u64::MAX;
        }
        None
    }

    /// The members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let mut from = 0;
        core::iter::from_fn(move || {
            let index = self.next(from, self.len)?;
            from = index + 1;
            Some(index)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_as_a_set(
            len in 1usize..300,
            changes in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 0..200),
            from in 0usize..310,
            to in 0usize..310,
        ) {
            let mut bits = Bits::new(len);
            let mut set = BTreeSet::new();
            for (add, index) in changes {
                let index = index.index(len);
                if add {
                    prop_assert_eq!(bits.insert(index), set.insert(index));
                } else {
                    prop_assert_eq!(bits.remove(index), set.remove(&index));
                }
            }
            prop_assert_eq!(bits.count(), set.len());
            prop_assert_eq!(bits.iter().collect::<Vec<_>>(), set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(bits.next(from, to), (from..to.min(len)).find(|i| set.contains(i)));
            prop_assert_eq!(bits.next_absent(from, to), (from..to.min(len)).find(|i| !set.contains(i)));
        }
    }
}
