//! Key_Shared: which entries wait for which consumer, so that the messages of a key stay in order.
//!
//! Ordering is by hash. A hash is *held* by the consumer that has unacknowledged entries of it; while it is, nobody
//! else gets any, even when the hash belongs to another consumer by now (it *drains*). Entries that cannot be handed
//! out wait, ordered by number within their hash. Invariants: a waiting hash is in `ready` exactly when its consumer
//! may have it now, under its lowest number; `order` holds exactly the entries in `waiting`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use pulsar::message::proto::{KeySharedMeta, KeySharedMode};

use super::super::selector::{ConsumerKey, Ranges, Ring, Selector};

/// The state of a Key_Shared subscription.
#[derive(Debug)]
pub(super) struct Keyed {
    pub(super) selector: Selector,
    /// Whether the messages of a key are kept in order when it moves to another consumer.
    in_order: bool,
    held: HashMap<u16, Held>,
    waiting: HashMap<u16, Waiting>,
    /// Waiting entries and their hashes.
    order: BTreeMap<u64, u16>,
    ready: BTreeMap<ConsumerKey, BTreeSet<(u64, u16)>>,
}

#[derive(Debug)]
struct Held {
    consumer: ConsumerKey,
    entries: u32,
}

#[derive(Debug, Default)]
struct Waiting {
    entries: BTreeSet<u64>,
    /// Where it is in `ready`.
    place: Option<(ConsumerKey, u64)>,
}

impl Keyed {
    pub(super) fn new(meta: Option<&KeySharedMeta>) -> Self {
        let sticky = is_sticky(meta);
        Self {
            selector: if sticky { Selector::Sticky(Ranges::default()) } else { Selector::AutoSplit(Ring::default()) },
            in_order: is_in_order(meta),
            held: HashMap::new(),
            waiting: HashMap::new(),
            order: BTreeMap::new(),
            ready: BTreeMap::new(),
        }
    }

    /// Whether a consumer with these wishes may join.
    pub(super) fn agrees_with(&self, meta: Option<&KeySharedMeta>) -> bool {
        matches!(self.selector, Selector::Sticky(_)) == is_sticky(meta) && self.in_order == is_in_order(meta)
    }

    /// How many entries wait.
    pub(super) fn waiting_entries(&self) -> usize {
        self.order.len()
    }

    /// Who gets a new entry of this hash, if somebody may get it now.
    pub(super) fn target(&self, hash: u16) -> Option<ConsumerKey> {
        if self.waiting.contains_key(&hash) { None } else { self.owner(hash) }
    }

    /// An entry waits.
    pub(super) fn wait(&mut self, hash: u16, number: u64) {
        self.order.insert(number, hash);
        self.waiting.entry(hash).or_default().entries.insert(number);
        self.place(hash);
    }

    /// The first waiting entry that this consumer may have.
    pub(super) fn next_for(&self, consumer: ConsumerKey) -> Option<u64> {
        self.ready.get(&consumer)?.first().map(|(number, _)| *number)
    }

    /// The consumers for which something waits.
    pub(super) fn consumers_with_ready(&self) -> Vec<ConsumerKey> {
        self.ready.keys().copied().collect()
    }

    /// An entry waits no more.
    pub(super) fn forget(&mut self, number: u64) {
        let Some(hash) = self.order.remove(&number) else { return };
        if let Some(waiting) = self.waiting.get_mut(&hash) {
            waiting.entries.remove(&number);
        }
        self.place(hash);
    }

    /// These entries wait no more.
    pub(super) fn forget_range(&mut self, numbers: Range<u64>) {
        while let Some((&first, _)) = self.order.range(numbers.clone()).next() {
            self.forget(first);
        }
    }

    /// Nothing waits and nobody holds anything.
    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.waiting.clear();
        self.order.clear();
        self.ready.clear();
    }

    /// The consumer got an entry of this hash.
    pub(super) fn hold(&mut self, hash: u16, consumer: ConsumerKey) {
        if self.in_order {
            self.held.entry(hash).or_insert(Held { consumer, entries: 0 }).entries += 1;
        }
    }

    /// A consumer has one entry of this hash less.
    pub(super) fn release(&mut self, hash: u16) {
        let Some(held) = self.held.get_mut(&hash) else { return };
        held.entries -= 1;
        if held.entries == 0 {
            self.held.remove(&hash);
            self.place(hash);
        }
    }

    /// Consumers came or went: hashes may belong to others now.
    pub(super) fn place_all(&mut self) {
        for hash in self.waiting.keys().copied().collect::<Vec<_>>() {
            self.place(hash);
        }
    }

    /// Who may have entries of this hash now.
    fn owner(&self, hash: u16) -> Option<ConsumerKey> {
        let owner = self.selector.select(hash)?;
        self.held.get(&hash).is_none_or(|held| held.consumer == owner).then_some(owner)
    }

    /// Puts a hash where it belongs in `ready`.
    fn place(&mut self, hash: u16) {
        let owner = self.owner(hash);
        let Some(waiting) = self.waiting.get_mut(&hash) else { return };
        let head = waiting.entries.first().copied();
        let place = owner.zip(head);
        if let Some((consumer, number)) = waiting.place.filter(|before| Some(*before) != place)
            && let Some(ready) = self.ready.get_mut(&consumer)
        {
            ready.remove(&(number, hash));
            if ready.is_empty() {
                self.ready.remove(&consumer);
            }
        }
        waiting.place = place;
        if let Some((consumer, number)) = place {
            self.ready.entry(consumer).or_default().insert((number, hash));
        }
        if head.is_none() {
            self.waiting.remove(&hash);
        }
    }
}

fn is_sticky(meta: Option<&KeySharedMeta>) -> bool {
    meta.is_some_and(|meta| meta.key_shared_mode() == KeySharedMode::Sticky)
}

fn is_in_order(meta: Option<&KeySharedMeta>) -> bool {
    !meta.is_some_and(|meta| meta.allow_out_of_order_delivery())
}

#[cfg(test)]
impl Keyed {
    /// Panics where an invariant of this module does not hold.
    pub(super) fn check(&self) {
        let waiting: usize = self.waiting.values().map(|waiting| waiting.entries.len()).sum();
        assert_eq!(waiting, self.order.len());
        for (hash, waiting) in &self.waiting {
            let place = self.owner(*hash).zip(waiting.entries.first().copied());
            assert_eq!(waiting.place, place, "hash {hash}");
            assert!(!waiting.entries.is_empty());
        }
        let placed = self.waiting.values().filter(|waiting| waiting.place.is_some()).count();
        assert_eq!(placed, self.ready.values().map(BTreeSet::len).sum::<usize>());
    }
}
