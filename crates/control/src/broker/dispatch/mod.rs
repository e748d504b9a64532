//! A subscription: what it has acknowledged, its consumers, and which of them gets which entry. No socket and no clock
//! in here: what a consumer gets is put into its link's outbox.
//!
//! An entry that is not acknowledged is in exactly one place: not read yet (from `read` on), waiting to be handed out
//! again (Shared, Key_Shared), or pending at one consumer. Exclusive and Failover track no single entries: the one
//! active consumer gets them in order, and redelivery starts over at the cursor's mark. So memory is bounded: by the
//! limits of unacknowledged messages, by the entries that Key_Shared reads ahead, and by the gaps in the cursor.

mod consumer;
mod handout;
mod keyed;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pulsar::message::proto::command_subscribe::SubType;
use pulsar::message::proto::{MessageIdData, ServerError};

use super::cursor::Cursor;
use super::log::{Entry, Log};
use super::replies;
use super::selector::{ConsumerKey, active_index};
use super::stats::{ConsumerStats, SubscriptionStats};
use super::store::Refused;
pub(super) use consumer::Applicant;
use consumer::{Consumer, Pending};
use keyed::Keyed;

/// Entries that Key_Shared reads ahead for each consumer while some keys wait, and for all together.
const LOOK_AHEAD_PER_CONSUMER: usize = 2000;
const LOOK_AHEAD_MAX: usize = 20_000;

/// How many messages may be unacknowledged before dispatch stops (Shared and Key_Shared).
#[derive(Clone, Copy, Debug)]
pub(super) struct UnackedLimits {
    pub(super) consumer: u64,
    pub(super) subscription: u64,
}

/// A subscription of one topic.
#[derive(Debug)]
pub(super) struct Subscription {
    topic: String,
    /// Whether it outlives its consumers.
    pub(super) durable: bool,
    limits: UnackedLimits,
    /// For consumers of the compacted view: entries below this are left out where compaction would remove them.
    compacted_until: Option<u64>,
    cursor: Cursor,
    /// The next entry that was not read yet.
    read: u64,
    mode: Mode,
    consumers: BTreeMap<ConsumerKey, Consumer>,
    /// Messages that are pending at all consumers.
    unacked: u64,
    /// How often entries that are not acknowledged were given back.
    redeliveries: BTreeMap<u64, u32>,
    redelivered: u64,
}

/// How entries are handed out.
#[derive(Debug)]
enum Mode {
    /// Exclusive and Failover.
    Single {
        failover: bool,
        active: Option<ConsumerKey>,
    },
    /// Entries that were given back, and who got the last one.
    Shared {
        replay: BTreeSet<u64>,
        last: ConsumerKey,
    },
    Keyed(Box<Keyed>),
}

impl Mode {
    fn new(applicant: &Applicant) -> Self {
        match applicant.kind {
            SubType::Exclusive => Self::Single { failover: false, active: None },
            SubType::Failover => Self::Single { failover: true, active: None },
            SubType::Shared => Self::Shared { replay: BTreeSet::new(), last: 0 },
            SubType::KeyShared => Self::Keyed(Box::new(Keyed::new(applicant.key_shared.as_ref()))),
        }
    }

    fn kind(&self) -> SubType {
        match self {
            Self::Single { failover: false, .. } => SubType::Exclusive,
            Self::Single { failover: true, .. } => SubType::Failover,
            Self::Shared { .. } => SubType::Shared,
            Self::Keyed(_) => SubType::KeyShared,
        }
    }
}

impl Subscription {
    /// A subscription of `topic` whose first entry is `position`.
    pub(super) fn new(topic: &str, durable: bool, position: u64, limits: UnackedLimits) -> Self {
        Self {
            topic: topic.to_owned(),
            durable,
            limits,
            compacted_until: None,
            cursor: Cursor::new(position),
            read: position,
            mode: Mode::Single { failover: false, active: None },
            consumers: BTreeMap::new(),
            unacked: 0,
            redeliveries: BTreeMap::new(),
            redelivered: 0,
        }
    }

    /// A durable subscription as it was before a restart.
    pub(super) fn restored(topic: &str, cursor: Cursor, limits: UnackedLimits) -> Self {
        Self { read: cursor.mark(), cursor, ..Self::new(topic, true, 0, limits) }
    }

    /// What it has acknowledged.
    pub(super) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// The next entry that was not read yet.
    pub(super) fn read_position(&self) -> u64 {
        self.read
    }

    pub(super) fn has_consumers(&self) -> bool {
        !self.consumers.is_empty()
    }

    /// How many consumers it has.
    pub(super) fn consumers(&self) -> usize {
        self.consumers.len()
    }

    pub(super) fn has_consumer(&self, key: ConsumerKey) -> bool {
        self.consumers.contains_key(&key)
    }

    /// Whether it shows only the latest message of each key.
    pub(super) fn is_compacted(&self) -> bool {
        self.compacted_until.is_some()
    }

    /// Attaches a consumer. It gets nothing before it gives permits.
    ///
    /// # Errors
    /// When its kind does not go with the consumers that are there, or its hash ranges overlap with theirs.
    pub(super) fn attach(&mut self, mut applicant: Applicant, compacted: bool, log: &Log) -> Result<(), Refused> {
        self.check_kind(&applicant, compacted)?;
        let key = applicant.key;
        if self.consumers.is_empty() {
            self.mode = Mode::new(&applicant);
            self.start_view(compacted, log);
        }
        if let Mode::Keyed(keyed) = &mut self.mode {
            // The selector keeps the ranges.
            let ranges = applicant.key_shared.take().map(|meta| meta.hash_ranges).unwrap_or_default();
            keyed.selector.add(key, &applicant.name, &ranges)?;
            keyed.place_all();
        }
        self.consumers.insert(key, Consumer::new(applicant));
        self.choose_active(Some(key));
        self.dispatch(log);
        Ok(())
    }

    /// Detaches a consumer. What it did not acknowledge goes to others at once, or to the next that comes.
    pub(super) fn detach(&mut self, key: ConsumerKey, log: &Log) {
        let Some(mut consumer) = self.consumers.remove(&key) else { return };
        consumer.purge();
        self.unacked -= consumer.unacked;
        if let Mode::Keyed(keyed) = &mut self.mode {
            keyed.selector.remove(key);
        }
        for (number, pending) in consumer.pending {
            self.requeue(number, pending);
        }
        if let Mode::Keyed(keyed) = &mut self.mode {
            keyed.place_all();
        }
        if self.consumers.is_empty() {
            self.rewind();
        }
        self.choose_active(None);
        self.dispatch(log);
    }

    /// Detaches all consumers and tells them, so that they come back and start over.
    pub(super) fn disconnect_all(&mut self) {
        for (_, mut consumer) in std::mem::take(&mut self.consumers) {
            consumer.purge();
            let applicant = consumer.applicant;
            applicant.outbox.push_command(replies::close_consumer(applicant.consumer_id));
        }
        self.unacked = 0;
        self.rewind();
    }

    /// A consumer is ready to take more messages.
    pub(super) fn flow(&mut self, key: ConsumerKey, permits: u32, log: &Log) {
        if let Some(consumer) = self.consumers.get_mut(&key) {
            consumer.permits = consumer.permits.saturating_add(permits.into());
            self.dispatch(log);
        }
    }

    /// Acknowledges the messages that `ids` name. An id of a batch may leave out some of its messages.
    ///
    /// # Errors
    /// When a cumulative acknowledgement is not possible.
    pub(super) fn acknowledge(&mut self, ids: &[MessageIdData], cumulative: bool, log: &Log) -> Result<(), Refused> {
        if cumulative && !matches!(self.mode, Mode::Single { .. }) {
            let detail = "only Exclusive and Failover subscriptions take cumulative acknowledgements".to_owned();
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        for id in ids.iter().filter(|id| id.ledger_id == log.ledger() && id.entry_id < log.end()) {
            if cumulative {
                self.cursor.ack_until(id.entry_id);
                self.read = self.read.max(self.cursor.mark());
                self.redeliveries = self.redeliveries.split_off(&self.cursor.mark());
            }
            self.acknowledge_one(id.entry_id, &id.ack_set, log);
        }
        self.dispatch(log);
        Ok(())
    }

    /// Gives back what a consumer was given: these entries, or all. The order of an exclusive subscription would be
    /// lost with some only, so it starts over, as at Apache Pulsar.
    pub(super) fn redeliver(&mut self, key: ConsumerKey, ids: &[MessageIdData], epoch: Option<u64>, log: &Log) {
        let Some(consumer) = self.consumers.get_mut(&key) else { return };
        consumer.applicant.epoch = epoch.or(consumer.applicant.epoch);
        if let Mode::Single { active, .. } = self.mode {
            if active == Some(key) {
                consumer.purge();
                self.rewind();
            }
        } else {
            let numbers: Vec<u64> = if ids.is_empty() {
                consumer.purge();
                consumer.pending.keys().copied().collect()
            } else {
                ids.iter().filter(|id| id.ledger_id == log.ledger()).map(|id| id.entry_id).collect()
            };
            for number in numbers {
                self.give_back(key, number);
            }
        }
        self.dispatch(log);
    }

    /// Starts over at an entry. All consumers are disconnected; clients come back by themselves.
    pub(super) fn seek(&mut self, position: u64) {
        self.disconnect_all();
        self.cursor.seek(position);
        self.read = position;
        self.redeliveries.clear();
    }

    /// Entries are gone from the log, or are not wanted any more: they count as acknowledged.
    pub(super) fn skip(&mut self, entries: Range<u64>) {
        self.cursor.ack(entries.clone());
        let pending: Vec<(ConsumerKey, u64)> = (self.consumers.iter())
            .flat_map(|(key, consumer)| consumer.pending.range(entries.clone()).map(|(number, _)| (*key, *number)))
            .collect();
        for (key, number) in pending {
            self.take_pending(key, number);
        }
        match &mut self.mode {
            Mode::Single { .. } => {}
            Mode::Shared { replay, .. } => {
                while let Some(number) = replay.range(entries.clone()).next().copied() {
                    replay.remove(&number);
                }
            }
            Mode::Keyed(keyed) => keyed.forget_range(entries.clone()),
        }
        while let Some(number) = self.redeliveries.range(entries.clone()).next().map(|(number, _)| *number) {
            self.redeliveries.remove(&number);
        }
        self.read = self.cursor.next_from(self.read);
    }

    /// The last entry that its consumers get to see.
    pub(super) fn last_visible<'a>(&self, log: &'a Log) -> Option<&'a Entry> {
        log.iter_from(0).rev().find(|entry| !self.hides(entry, log))
    }

    pub(super) fn stats(&self, name: &str, log: &Log) -> SubscriptionStats {
        let single = matches!(self.mode, Mode::Single { .. });
        let consumers = self.consumers.values().map(|consumer| ConsumerStats {
            name: consumer.applicant.name.clone(),
            permits: consumer.permits,
            unacked: if single { self.cursor.unacked_below(self.read) } else { consumer.unacked },
            blocked: !single && consumer.unacked >= self.limits.consumer,
            delivered: consumer.delivered,
        });
        SubscriptionStats {
            name: name.to_owned(),
            kind: kind_name(self.mode.kind()),
            durable: self.durable,
            consumers: consumers.collect(),
            backlog: self.backlog(log),
            unacked: if single { self.cursor.unacked_below(self.read) } else { self.unacked },
            waiting: match &self.mode {
                Mode::Single { .. } => 0,
                Mode::Shared { replay, .. } => replay.len() as u64,
                Mode::Keyed(keyed) => keyed.waiting_entries() as u64,
            },
            redelivered: self.redelivered,
        }
    }

    /// How many entries of the log are not acknowledged.
    fn backlog(&self, log: &Log) -> u64 {
        let acked: u64 = self.cursor.acked().map(|range| log.count(range)).sum();
        log.count(self.cursor.mark()..log.end()).saturating_sub(acked)
    }

    /// The position of a consumer among those of its subscription's statistics.
    pub(super) fn consumer_index(&self, key: ConsumerKey) -> Option<usize> {
        self.consumers.keys().position(|other| *other == key)
    }

    fn check_kind(&self, applicant: &Applicant, compacted: bool) -> Result<(), Refused> {
        let busy = |detail: &str| Err(Refused(ServerError::ConsumerBusy, detail.to_owned()));
        if compacted && !matches!(applicant.kind, SubType::Exclusive | SubType::Failover) {
            let detail = "readCompacted only allowed on failover or exclusive subscriptions".to_owned();
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        if self.consumers.is_empty() {
            return Ok(());
        }
        if self.mode.kind() != applicant.kind {
            return busy("Subscription is of different type");
        }
        if self.compacted_until.is_some() != compacted {
            return busy("Subscription has consumers that differ in read_compacted");
        }
        match &self.mode {
            Mode::Single { failover: false, .. } => busy("Exclusive consumer is already connected"),
            Mode::Keyed(keyed) if !keyed.agrees_with(applicant.key_shared.as_ref()) => {
                busy("Subscription has consumers with another Key_Shared policy")
            }
            _ => Ok(()),
        }
    }

    /// What the compacted view leaves out is decided when reading starts at the head; who goes on in the middle gets
    /// everything from there on, removals of keys included.
    fn start_view(&mut self, compacted: bool, log: &Log) {
        let at_head = self.cursor.mark() <= log.first();
        self.compacted_until = match (compacted, self.compacted_until) {
            (false, _) => None,
            (true, _) if at_head => Some(log.end()),
            (true, before) => Some(before.unwrap_or(self.cursor.mark())),
        };
    }

    /// Chooses the active consumer, and tells those who need to know.
    fn choose_active(&mut self, newcomer: Option<ConsumerKey>) {
        let Mode::Single { failover, active: before } = self.mode else { return };
        let mut order: Vec<&Consumer> = self.consumers.values().collect();
        order.sort_by_key(|consumer| (consumer.applicant.priority, &consumer.applicant.name));
        let first = order.first().map(|consumer| consumer.applicant.priority);
        order.retain(|consumer| Some(consumer.applicant.priority) == first);
        let names: Vec<&str> = order.iter().map(|consumer| consumer.applicant.name.as_str()).collect();
        let active = order.get(active_index(&self.topic, &names)).map(|consumer| consumer.applicant.key);
        self.mode = Mode::Single { failover, active };
        if active != before {
            if let Some(old) = before.and_then(|before| self.consumers.get_mut(&before)) {
                old.purge();
            }
            self.rewind();
        }
        if !failover {
            return;
        }
        for (key, consumer) in &self.consumers {
            if active != before || newcomer == Some(*key) {
                let id = consumer.applicant.consumer_id;
                consumer.applicant.outbox.push_active(replies::active_consumer(id, active == Some(*key)));
            }
        }
    }

    /// Everything that is not acknowledged will be handed out again.
    fn rewind(&mut self) {
        let given = self.cursor.unacked_below(self.read);
        self.redelivered += if matches!(self.mode, Mode::Single { .. }) { given } else { 0 };
        self.read = self.cursor.mark();
        match &mut self.mode {
            Mode::Single { .. } => {}
            Mode::Shared { replay, .. } => replay.clear(),
            Mode::Keyed(keyed) => keyed.clear(),
        }
    }

    fn acknowledge_one(&mut self, number: u64, wanted: &[i64], log: &Log) {
        // With an ack set that is not empty of messages, a part of a batch is still wanted.
        if wanted.iter().any(|word| *word != 0)
            && let Some(entry) = log.get(number)
            && !self.cursor.ack_partly(number, entry.messages, wanted)
        {
            return;
        }
        self.cursor.ack(number..number + 1);
        self.redeliveries.remove(&number);
        // It may be pending at another consumer than the one that acknowledges it, or wait.
        let holder = self.consumers.iter().find(|(_, consumer)| consumer.pending.contains_key(&number));
        if let Some(key) = holder.map(|(key, _)| *key) {
            self.take_pending(key, number);
            return;
        }
        match &mut self.mode {
            Mode::Single { .. } => self.read = self.read.max(self.cursor.mark()),
            Mode::Shared { replay, .. } => drop(replay.remove(&number)),
            Mode::Keyed(keyed) => keyed.forget(number),
        }
    }

    fn give_back(&mut self, key: ConsumerKey, number: u64) {
        if let Some(pending) = self.take_pending(key, number) {
            *self.redeliveries.entry(number).or_default() += 1;
            self.redelivered += 1;
            match &mut self.mode {
                Mode::Single { .. } => {}
                Mode::Shared { replay, .. } => drop(replay.insert(number)),
                Mode::Keyed(keyed) => keyed.wait(pending.slot, number),
            }
        }
    }

    /// An entry of a consumer that ended waits to be handed out again.
    fn requeue(&mut self, number: u64, pending: Pending) {
        self.redelivered += 1;
        match &mut self.mode {
            Mode::Single { .. } => {}
            Mode::Shared { replay, .. } => drop(replay.insert(number)),
            Mode::Keyed(keyed) => {
                keyed.release(pending.slot);
                keyed.wait(pending.slot, number);
            }
        }
    }

    fn take_pending(&mut self, key: ConsumerKey, number: u64) -> Option<Pending> {
        let consumer = self.consumers.get_mut(&key)?;
        let pending = consumer.pending.remove(&number)?;
        consumer.unacked -= u64::from(pending.messages);
        self.unacked -= u64::from(pending.messages);
        if let Mode::Keyed(keyed) = &mut self.mode {
            keyed.release(pending.slot);
        }
        Some(pending)
    }
}

fn kind_name(kind: SubType) -> &'static str {
    match kind {
        SubType::Exclusive => "Exclusive",
        SubType::Failover => "Failover",
        SubType::Shared => "Shared",
        SubType::KeyShared => "Key_Shared",
    }
}
