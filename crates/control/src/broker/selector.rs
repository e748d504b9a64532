//! Which consumer of a Key_Shared subscription a slot belongs to, and which one of a Failover subscription is active.

use std::collections::BTreeMap;

use pulsar::message::proto::{IntRange, ServerError};

use super::hash::{SLOTS, hash, shared_slot, sticky_slot};
use super::store::Refused;

/// Identifies a consumer among all that the broker ever had.
pub(super) type ConsumerKey = u64;

/// Points of one consumer on the ring.
const POINTS: usize = 100;

/// Maps slots to consumers.
#[derive(Debug)]
pub(super) enum Selector {
    /// The broker shares the slots out.
    AutoSplit(Ring),
    /// Each consumer says which slots it wants.
    Sticky(Ranges),
}

/// Consistent hashing. The points are functions of the consumers' names, so that a name that comes back gets the
/// slots that it had.
#[derive(Debug, Default)]
pub(super) struct Ring {
    /// A point that several consumers have is the first one's.
    points: BTreeMap<u16, Vec<ConsumerKey>>,
    /// Tells apart consumers of the same name: the smallest number that is free.
    indexes: BTreeMap<String, BTreeMap<u32, ConsumerKey>>,
}

/// First slot to last slot, and whose they are. Ranges do not overlap.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u16, (u16, ConsumerKey)>);

impl Selector {
    /// Adds a consumer.
    ///
    /// # Errors
    /// When the ranges that it wants are none, are no ranges, or overlap with others.
    pub(super) fn add(&mut self, key: ConsumerKey, name: &str, wanted: &[IntRange]) -> Result<(), Refused> {
        match self {
            Self::AutoSplit(ring) => ring.add(key, name),
            Self::Sticky(ranges) => return ranges.add(key, wanted),
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, key: ConsumerKey) {
        match self {
            Self::AutoSplit(ring) => ring.remove(key),
            Self::Sticky(ranges) => ranges.0.retain(|_, (_, owner)| *owner != key),
        }
    }

    /// The slot of a hash.
    pub(super) fn slot(&self, hash: u32) -> u16 {
        match self {
            Self::AutoSplit(_) => shared_slot(hash),
            Self::Sticky(_) => sticky_slot(hash),
        }
    }

    /// Whose slot this is, if it is anybody's.
    pub(super) fn select(&self, slot: u16) -> Option<ConsumerKey> {
        match self {
            Self::AutoSplit(Ring { points, .. }) => {
                let (_, consumers) = points.range(slot..).next().or_else(|| points.iter().next())?;
                consumers.first().copied()
            }
            Self::Sticky(Ranges(ranges)) => {
                let (_, (last, key)) = ranges.range(..=slot).next_back()?;
                (slot <= *last).then_some(*key)
            }
        }
    }
}

impl Ring {
    fn add(&mut self, key: ConsumerKey, name: &str) {
        let indexes = self.indexes.entry(name.to_owned()).or_default();
        let index = (0..).find(|index| !indexes.contains_key(index)).unwrap_or_default();
        indexes.insert(index, key);
        for point in 0..POINTS {
            let slot = shared_slot(hash(format!("{name}\0{index}\0{point}").as_bytes()));
            self.points.entry(slot).or_default().push(key);
        }
    }

    fn remove(&mut self, key: ConsumerKey) {
        self.points.retain(|_, consumers| {
            consumers.retain(|consumer| *consumer != key);
            !consumers.is_empty()
        });
        self.indexes.retain(|_, indexes| {
            indexes.retain(|_, owner| *owner != key);
            !indexes.is_empty()
        });
    }
}

impl Ranges {
    fn add(&mut self, key: ConsumerKey, wanted: &[IntRange]) -> Result<(), Refused> {
        let refused = |detail: String| Refused(ServerError::ConsumerAssignError, detail);
        if wanted.is_empty() {
            return Err(refused("a sticky Key_Shared consumer names no hash range; give it at least one".to_owned()));
        }
        if wanted.len() > SLOTS as usize {
            return Err(refused(format!("{} hash ranges are more than there are slots", wanted.len())));
        }
        let mut added = BTreeMap::new();
        for range in wanted {
            let named = format!("hash range {} to {}", range.start, range.end);
            let (Ok(first), Ok(last)) = (u16::try_from(range.start), u16::try_from(range.end)) else {
                return Err(refused(format!("{named} is not within 0 to {}", SLOTS - 1)));
            };
            if first > last {
                return Err(refused(format!("{named} ends before it starts")));
            }
            let overlaps = |ranges: &BTreeMap<u16, (u16, ConsumerKey)>| {
                ranges.range(..=last).next_back().is_some_and(|(_, (end, _))| *end >= first)
            };
            if overlaps(&self.0) || overlaps(&added) {
                return Err(refused(format!("{named} overlaps with a range that a consumer has already")));
            }
            added.insert(first, (last, key));
        }
        self.0.append(&mut added);
        Ok(())
    }
}

/// Which of these names, in order, is the active one of a Failover subscription of this topic. Apache Pulsar hashes
/// them so that the topics of a namespace are spread over consumers with the same names.
pub(super) fn active_index(topic: &str, names: &[&str]) -> usize {
    let topic = hash(topic.as_bytes());
    let mut ring = BTreeMap::new();
    for (index, name) in names.iter().enumerate() {
        for point in 0..POINTS {
            ring.insert(hash(format!("{name}{point}").as_bytes()), index);
        }
    }
    ring.range(topic..).next().or_else(|| ring.iter().next()).map_or(0, |(_, index)| *index)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The hashes whose consumer differs between two moments.
    fn moved(before: &[Option<ConsumerKey>], after: &[Option<ConsumerKey>]) -> BTreeSet<usize> {
        (0..before.len()).filter(|hash| before[*hash] != after[*hash]).collect()
    }

    fn range(start: i32, end: i32) -> IntRange {
        IntRange { start, end }
    }

    fn all(selector: &Selector) -> Vec<Option<ConsumerKey>> {
        (1..=u16::MAX).map(|slot| selector.select(slot)).collect()
    }

    #[test]
    fn a_consumer_that_comes_or_goes_moves_only_its_own_hashes() {
        let mut selector = Selector::AutoSplit(Ring::default());
        assert_eq!(selector.select(7), None);
        selector.add(1, "a", &[]).unwrap();
        selector.add(2, "b", &[]).unwrap();
        let before = all(&selector);
        // The same name twice is two consumers.
        selector.add(3, "a", &[]).unwrap();
        let with = all(&selector);
        assert!(moved(&before, &with).iter().all(|hash| with[*hash] == Some(3)));
        for key in 1..=3 {
            let share = with.iter().filter(|owner| **owner == Some(key)).count();
            assert!(share > with.len() / 6, "consumer {key} has {share} hashes");
        }
        selector.remove(3);
        assert_eq!(all(&selector), before);
    }

    #[test]
    fn ranges_are_given_to_one_consumer_only() {
        let mut selector = Selector::Sticky(Ranges::default());
        selector.add(1, "a", &[range(0, 99), range(200, 299)]).unwrap();
        selector.add(2, "b", &[range(100, 199)]).unwrap();
        for (hash, owner) in [(0, Some(1)), (99, Some(1)), (100, Some(2)), (250, Some(1)), (300, None)] {
            assert_eq!(selector.select(hash), owner, "{hash}");
        }
        for bad in [&[range(50, 60)][..], &[range(150, 400)], &[range(400, 300)], &[range(-1, 4)], &[]] {
            let Refused(error, _) = selector.add(3, "c", bad).unwrap_err();
            assert_eq!(error, ServerError::ConsumerAssignError, "{bad:?}");
        }
        selector.add(3, "c", &[range(300, 310), range(305, 320)]).unwrap_err();
        assert_eq!(selector.select(300), None, "what is refused leaves nothing behind");
        selector.remove(1);
        assert_eq!((selector.select(0), selector.select(100)), (None, Some(2)));
    }

    #[test]
    fn the_active_consumer_depends_on_the_topic() {
        let names = ["a", "b", "c"];
        let chosen: BTreeSet<_> = (0..50).map(|topic| active_index(&format!("topic-{topic}"), &names)).collect();
        assert_eq!(chosen.len(), 3);
        assert_eq!(active_index("topic", &["only"]), 0);
    }

    /// As seen at Apache Pulsar 4.0.7.
    #[test]
    fn keys_land_where_apache_pulsar_has_them() {
        let mut selector = Selector::AutoSplit(Ring::default());
        for (key, name) in ["k0", "k1", "k2"].into_iter().enumerate() {
            selector.add(key as u64, name, &[]).unwrap();
        }
        for (key, consumer) in [("k0", 2), ("k1", 0), ("k10", 0), ("k11", 1), ("k12", 0), ("k13", 2)] {
            assert_eq!(selector.select(selector.slot(hash(key.as_bytes()))), Some(consumer), "{key}");
        }
    }
}
