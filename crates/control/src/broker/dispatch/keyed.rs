//! Key_Shared: which entries wait for which consumer, so that the messages of a key stay in order.
//!
//! Ordering is by slot, which is a hash of the key. A slot is *held* by the consumer that has unacknowledged entries of it; while it is, nobody
//! else gets any, even when the slot belongs to another consumer by now (it *drains*). Entries that cannot be handed
//! out wait, ordered by number within their slot. Invariants: a waiting slot is in `ready` exactly when its consumer
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
    /// Waiting entries and their slots.
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

    /// The slot of an entry's hash.
    pub(super) fn slot(&self, hash: u32) -> u16 {
        self.selector.slot(hash)
    }

    /// How many entries wait.
    pub(super) fn waiting_entries(&self) -> usize {
        self.order.len()
    }

    /// Who gets a new entry of this slot, if somebody may get it now.
    pub(super) fn target(&self, slot: u16) -> Option<ConsumerKey> {
        if self.waiting.contains_key(&slot) { None } else { self.owner(slot) }
    }

    /// An entry waits.
    pub(super) fn wait(&mut self, slot: u16, number: u64) {
        self.order.insert(number, slot);
        self.waiting.entry(slot).or_default().entries.insert(number);
        self.place(slot);
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
        let Some(slot) = self.order.remove(&number) else { return };
        if let Some(waiting) = self.waiting.get_mut(&slot) {
            waiting.entries.remove(&number);
        }
        self.place(slot);
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

    /// The consumer got an entry of this slot.
    pub(super) fn hold(&mut self, slot: u16, consumer: ConsumerKey) {
        if self.in_order {
            self.held.entry(slot).or_insert(Held { consumer, entries: 0 }).entries += 1;
        }
    }

    /// A consumer has one entry of this slot less.
    pub(super) fn release(&mut self, slot: u16) {
        let Some(held) = self.held.get_mut(&slot) else { return };
        held.entries -= 1;
        if held.entries == 0 {
            self.held.remove(&slot);
            self.place(slot);
        }
    }

    /// Consumers came or went: slots may belong to others now.
    pub(super) fn place_all(&mut self) {
        for slot in self.waiting.keys().copied().collect::<Vec<_>>() {
            self.place(slot);
        }
    }

    /// Who may have entries of this slot now.
    fn owner(&self, slot: u16) -> Option<ConsumerKey> {
        let owner = self.selector.select(slot)?;
        self.held.get(&slot).is_none_or(|held| held.consumer == owner).then_some(owner)
    }

    /// Puts a slot where it belongs in `ready`.
    fn place(&mut self, slot: u16) {
        let owner = self.owner(slot);
        let Some(waiting) = self.waiting.get_mut(&slot) else { return };
        let head = waiting.entries.first().copied();
        let place = owner.zip(head);
        if let Some((consumer, number)) = waiting.place.filter(|before| Some(*before) != place)
            && let Some(ready) = self.ready.get_mut(&consumer)
        {
            ready.remove(&(number, slot));
            if ready.is_empty() {
                self.ready.remove(&consumer);
            }
        }
        waiting.place = place;
        if let Some((consumer, number)) = place {
            self.ready.entry(consumer).or_default().insert((number, slot));
        }
        if head.is_none() {
            self.waiting.remove(&slot);
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
        for (slot, waiting) in &self.waiting {
            let place = self.owner(*slot).zip(waiting.entries.first().copied());
            assert_eq!(waiting.place, place, "slot {slot}");
            assert!(!waiting.entries.is_empty());
        }
        let placed = self.waiting.values().filter(|waiting| waiting.place.is_some()).count();
        assert_eq!(placed, self.ready.values().map(BTreeSet::len).sum::<usize>());
    }
}
