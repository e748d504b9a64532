//! A subscription: what it has acknowledged, what it has been given, and the one consumer that reads it.
//!
//! Positions are entry numbers of the topic's log. Everything below `mark` is acknowledged, everything in
//! `mark..read` was handed out; messages stay in the topic's log, a cursor holds only numbers. Invariant:
//! `mark <= read`, and every number in `acked` is above `mark`.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Notify;

/// The consumer of a subscription, on some link.
#[derive(Debug)]
pub(super) struct Consumer {
    pub(super) link: u64,
    pub(super) consumer_id: u64,
    pub(super) name: String,
    /// Messages that the client is ready to take.
    pub(super) permits: u64,
    /// Wakes the link's task.
    pub(super) wake: Arc<Notify>,
}

/// An exclusive subscription.
#[derive(Debug)]
pub(super) struct Subscription {
    /// Whether it outlives its consumer.
    pub(super) durable: bool,
    pub(super) consumer: Option<Consumer>,
    mark: u64,
    read: u64,
    acked: BTreeSet<u64>,
}

impl Subscription {
    /// A subscription whose first message is entry number `position`.
    pub(super) fn new(durable: bool, position: u64) -> Self {
        Self { durable, consumer: None, mark: position, read: position, acked: BTreeSet::new() }
    }

    /// The first entry that is not acknowledged.
    pub(super) fn mark(&self) -> u64 {
        self.mark
    }

    /// How many entries of `mark..end` are not acknowledged.
    pub(super) fn backlog(&self, end: u64) -> u64 {
        end.saturating_sub(self.mark).saturating_sub(self.acked.len() as u64)
    }

    /// How many entries were handed out and not acknowledged.
    pub(super) fn unacked(&self) -> u64 {
        self.read.saturating_sub(self.mark).saturating_sub(self.acked.range(..self.read).count() as u64)
    }

    /// The next entry to hand out, if the topic holds `first..end`.
    pub(super) fn next(&mut self, first: u64, end: u64) -> Option<u64> {
        self.skip_to(first);
        while self.acked.contains(&self.read) {
            self.read += 1;
        }
        (self.read < end).then_some(self.read)
    }

    /// The entry that [`Subscription::next`] gave was handed out.
    pub(super) fn advance(&mut self) {
        self.read += 1;
    }

    /// One entry is acknowledged. Entries that the topic does not hold yet are ignored.
    pub(super) fn ack(&mut self, entry: u64, end: u64) {
        if entry < self.mark || entry >= end {
            return;
        }
        self.acked.insert(entry);
        self.settle();
    }

    /// All entries up to and including this one are acknowledged.
    pub(super) fn ack_until(&mut self, entry: u64, end: u64) {
        if entry < end {
            self.skip_to(entry + 1);
        }
    }

    /// Everything that is not acknowledged will be handed out again.
    pub(super) fn rewind(&mut self) {
        self.read = self.mark;
    }

    /// Starts over at this entry, forgetting all acknowledgements.
    pub(super) fn seek(&mut self, entry: u64) {
        self.acked.clear();
        self.mark = entry;
        self.read = entry;
    }

    fn skip_to(&mut self, entry: u64) {
        if entry > self.mark {
            self.mark = entry;
            self.acked = self.acked.split_off(&entry);
            self.settle();
        }
    }

    fn settle(&mut self) {
        while self.acked.remove(&self.mark) {
            self.mark += 1;
        }
        self.read = self.read.max(self.mark);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(subscription: &mut Subscription, first: u64, end: u64) -> Vec<u64> {
        let mut given = Vec::new();
        while let Some(entry) = subscription.next(first, end) {
            subscription.advance();
            given.push(entry);
        }
        given
    }

    #[test]
    fn a_rewind_hands_out_what_is_not_acknowledged() {
        let mut subscription = Subscription::new(true, 0);
        assert_eq!(drain(&mut subscription, 0, 5), [0, 1, 2, 3, 4]);
        subscription.ack(1, 5);
        subscription.ack(3, 5);
        assert_eq!((subscription.unacked(), subscription.backlog(5)), (3, 3));
        subscription.rewind();
        assert_eq!(drain(&mut subscription, 0, 5), [0, 2, 4]);
        subscription.ack_until(3, 5);
        subscription.rewind();
        assert_eq!(drain(&mut subscription, 0, 5), [4]);
        assert_eq!(subscription.mark(), 4);
    }

    #[test]
    fn an_ack_of_what_is_not_there_changes_nothing() {
        let mut subscription = Subscription::new(true, 2);
        subscription.ack(7, 5);
        subscription.ack(0, 5);
        subscription.ack_until(9, 5);
        assert_eq!(drain(&mut subscription, 0, 5), [2, 3, 4]);
    }

    #[test]
    fn a_topic_that_dropped_its_oldest_entries_moves_the_cursor() {
        let mut subscription = Subscription::new(true, 0);
        subscription.ack(2, 5);
        assert_eq!(drain(&mut subscription, 2, 5), [3, 4]);
        assert_eq!(subscription.mark(), 3);
    }

    proptest! {
        /// Whatever the order of acknowledgements, exactly the others come again.
        #[test]
        fn acknowledged_once_means_never_again(acks in proptest::collection::vec((0_u64..20, any::<bool>()), 0..30)) {
            let mut subscription = Subscription::new(true, 0);
            drain(&mut subscription, 0, 20);
            let mut expected: BTreeSet<u64> = (0..20).collect();
            for (entry, cumulative) in acks {
                if cumulative {
                    subscription.ack_until(entry, 20);
                    expected.retain(|other| *other > entry);
                } else {
                    subscription.ack(entry, 20);
                    expected.remove(&entry);
                }
            }
            prop_assert_eq!(subscription.backlog(20), expected.len() as u64);
            subscription.rewind();
            prop_assert_eq!(drain(&mut subscription, 0, 20), expected.into_iter().collect::<Vec<_>>());
        }
    }
}
