//! A set of numbers, kept as ranges: what was acknowledged out of order costs memory by its gaps, not by its size.

use std::collections::BTreeMap;
use std::ops::Range;

/// The set. Ranges neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RangeSet {
    /// First number to the one behind the last.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    pub(super) fn contains(&self, number: u64) -> bool {
        self.end_of(number).is_some()
    }

    /// The number behind the range that `number` is in.
    pub(super) fn end_of(&self, number: u64) -> Option<u64> {
        self.ranges.range(..=number).next_back().map(|(_, end)| *end).filter(|end| number < *end)
    }

    pub(super) fn insert(&mut self, Range { mut start, mut end }: Range<u64>) {
        if start >= end {
            return;
        }
        while let Some((&other_start, &other_end)) = self.ranges.range(..=end).next_back()
            && other_end >= start
        {
            start = start.min(other_start);
            end = end.max(other_end);
            self.ranges.remove(&other_start);
        }
        self.ranges.insert(start, end);
    }

    /// Removes everything below `number`.
    pub(super) fn remove_below(&mut self, number: u64) {
        let end = self.end_of(number);
        self.ranges = self.ranges.split_off(&number);
        if let Some(end) = end {
            self.ranges.insert(number, end);
        }
    }

    /// How many numbers below `number` are in it.
    pub(super) fn count_below(&self, number: u64) -> u64 {
        self.ranges.range(..number).map(|(start, end)| end.min(&number) - start).sum()
    }

    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(operations in proptest::collection::vec((0_u64..60, 0_u64..8, any::<bool>()), 0..40)) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (start, length, insert) in operations {
                if insert {
                    set.insert(start..start + length);
                    model.extend(start..start + length);
                } else if length == 0 {
                    set.remove_below(start);
                    model = model.split_off(&start);
                }
                for number in 0..70 {
                    prop_assert_eq!(set.contains(number), model.contains(&number));
                }
                prop_assert_eq!(set.count_below(start), model.range(..start).count() as u64);
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }
}
