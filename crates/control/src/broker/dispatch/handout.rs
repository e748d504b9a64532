//! Handing out: which entry goes to which consumer next.
//!
//! Each call does as much as can be done now, and touches no entry twice: what is given back is taken from the places
//! where it waits, and everything else is read once, from `read` on.

use super::super::log::{Entry, Log};
use super::super::outbox::Delivery;
use super::super::selector::ConsumerKey;
use super::consumer::{Consumer, Pending};
use super::{LOOK_AHEAD_MAX, LOOK_AHEAD_PER_CONSUMER, Mode, Subscription};

impl Subscription {
    /// Hands out what can be handed out.
    pub(in crate::broker) fn dispatch(&mut self, log: &Log) {
        match self.mode {
            Mode::Single { .. } => self.dispatch_single(log),
            Mode::Shared { .. } => self.dispatch_shared(log),
            Mode::Keyed(_) => self.dispatch_keyed(log),
        }
    }

    /// Whether the compacted view leaves this entry out.
    pub(super) fn hides(&self, entry: &Entry, log: &Log) -> bool {
        self.compacted_until.is_some_and(|until| entry.number < until) && log.is_compacted_out(entry)
    }

    /// The next entry to read. Whatever lies before it, gaps in the log and what the compacted view leaves out, counts
    /// as acknowledged.
    fn next_unread<'a>(&mut self, log: &'a Log) -> Option<&'a Entry> {
        loop {
            self.read = self.cursor.next_from(self.read);
            let entry = log.first_from(self.read)?;
            self.cursor.ack(self.read..entry.number);
            self.read = entry.number;
            if self.cursor.is_acked(entry.number) {
                continue;
            }
            if !self.hides(entry, log) {
                return Some(entry);
            }
            self.cursor.ack(entry.number..entry.number + 1);
        }
    }

    fn dispatch_single(&mut self, log: &Log) {
        let Mode::Single { active: Some(key), .. } = self.mode else { return };
        while self.consumers.get(&key).is_some_and(|consumer| consumer.is_available(u64::MAX)) {
            let Some(entry) = self.next_unread(log) else { break };
            self.read += 1;
            self.deliver(key, entry, log);
        }
    }

    fn dispatch_shared(&mut self, log: &Log) {
        while self.unacked < self.limits.subscription
            && let Some(key) = self.next_in_turn()
        {
            let Mode::Shared { replay, .. } = &mut self.mode else { return };
            if let Some(number) = replay.pop_first() {
                match log.get(number) {
                    Some(entry) => self.deliver(key, entry, log),
                    None => self.cursor.ack(number..number + 1),
                }
                continue;
            }
            let Some(entry) = self.next_unread(log) else { break };
            self.read += 1;
            self.deliver(key, entry, log);
        }
    }

    /// Whose turn it is among the available consumers of the highest priority.
    fn next_in_turn(&self) -> Option<ConsumerKey> {
        let Mode::Shared { last, .. } = self.mode else { return None };
        let after = self.consumers.range(last + 1..).chain(self.consumers.range(..=last));
        let mut chosen: Option<&Consumer> = None;
        for (_, consumer) in after {
            let first = chosen.is_none_or(|chosen| consumer.applicant.priority < chosen.applicant.priority);
            if first && consumer.is_available(self.limits.consumer) {
                chosen = Some(consumer);
            }
        }
        chosen.map(|consumer| consumer.applicant.key)
    }

    fn dispatch_keyed(&mut self, log: &Log) {
        let Mode::Keyed(keyed) = &self.mode else { return };
        for key in keyed.consumers_with_ready() {
            self.dispatch_waiting(key, log);
        }
        let look_ahead = (self.consumers.len() * LOOK_AHEAD_PER_CONSUMER).min(LOOK_AHEAD_MAX);
        loop {
            let Mode::Keyed(keyed) = &self.mode else { return };
            let anybody = || self.consumers.keys().any(|key| self.may_take(*key));
            if keyed.waiting_entries() >= look_ahead || !anybody() {
                return;
            }
            let Some(entry) = self.next_unread(log) else { return };
            self.read += 1;
            let Mode::Keyed(keyed) = &mut self.mode else { return };
            let slot = keyed.slot(entry.hash);
            match keyed.target(slot) {
                Some(key)
                    if self.consumers.get(&key).is_some_and(|consumer| consumer.is_available(self.limits.consumer)) =>
                {
                    self.deliver(key, entry, log);
                }
                _ => keyed.wait(slot, entry.number),
            }
        }
    }

    /// Gives a consumer what waits for it.
    fn dispatch_waiting(&mut self, key: ConsumerKey, log: &Log) {
        while self.may_take(key) {
            let Mode::Keyed(keyed) = &mut self.mode else { return };
            let Some(number) = keyed.next_for(key) else { return };
            keyed.forget(number);
            match log.get(number) {
                Some(entry) => self.deliver(key, entry, log),
                None => self.cursor.ack(number..number + 1),
            }
        }
    }

    fn may_take(&self, key: ConsumerKey) -> bool {
        self.unacked < self.limits.subscription
            && self.consumers.get(&key).is_some_and(|consumer| consumer.is_available(self.limits.consumer))
    }

    fn deliver(&mut self, key: ConsumerKey, entry: &Entry, log: &Log) {
        let Some(consumer) = self.consumers.get_mut(&key) else { return };
        let messages = u64::from(entry.messages);
        consumer.permits = consumer.permits.saturating_sub_unsigned(messages);
        consumer.delivered += messages;
        let slot = if let Mode::Keyed(keyed) = &self.mode { keyed.slot(entry.hash) } else { 0 };
        let single = matches!(self.mode, Mode::Single { .. });
        if !single {
            consumer.pending.insert(entry.number, Pending { messages: entry.messages, slot });
            consumer.unacked += messages;
            self.unacked += messages;
        }
        match &mut self.mode {
            Mode::Single { .. } => {}
            Mode::Shared { last, .. } => *last = key,
            Mode::Keyed(keyed) => keyed.hold(slot, key),
        }
        consumer.applicant.outbox.push_message(Delivery {
            consumer: key,
            consumer_id: consumer.applicant.consumer_id,
            consumer_epoch: consumer.applicant.epoch.filter(|_| single),
            id: log.message_id(entry.number),
            ack_set: self.cursor.wanted(entry.number).cloned().unwrap_or_default(),
            redeliveries: self.redeliveries.get(&entry.number).copied().unwrap_or_default(),
            messages: entry.messages,
            tail: entry.tail.clone(),
        });
    }
}
