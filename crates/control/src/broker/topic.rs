//! A topic: its log, what is kept of it, and who is at it.

use std::collections::BTreeMap;
use std::ops::Range;

use pulsar::message::proto::{Schema, ServerError};

use super::config::TopicPolicy;
use super::dispatch::{Subscription, UnackedLimits};
use super::log::{Entry, Log};
use super::producers::Producers;
use super::schema::Schemas;
use super::stats::TopicStats;
use super::store::Refused;

/// Most subscriptions of one topic.
const SUBSCRIPTIONS_MAX: usize = 4096;
/// Less garbage than this is not worth a look through the log.
const GARBAGE_BYTES_MIN: usize = 256 << 10;

/// One topic.
#[derive(Debug)]
pub(super) struct Topic {
    pub(super) name: String,
    pub(super) log: Log,
    pub(super) policy: TopicPolicy,
    /// Keeps nothing for who is not there.
    pub(super) volatile: bool,
    pub(super) producers: Producers,
    pub(super) schemas: Schemas,
    pub(super) subscriptions: BTreeMap<String, Subscription>,
    /// Whether it is kept beyond the process.
    pub(super) keep: bool,
    /// Messages that are not kept yet. Nobody sees them, and they have the numbers behind the log's.
    staged: Vec<Entry>,
    staged_bytes: usize,
    /// Numbers of entries that left the log, and are still kept.
    pub(super) removed: Vec<Range<u64>>,
    /// Compaction waits for this much garbage.
    compact_at: usize,
}

impl Topic {
    pub(super) fn new(name: &str, log: Log, policy: TopicPolicy, volatile: bool) -> Self {
        let mut topic = Self {
            name: name.to_owned(),
            log,
            policy,
            volatile,
            producers: Producers::default(),
            schemas: Schemas::default(),
            subscriptions: BTreeMap::new(),
            keep: false,
            staged: Vec::new(),
            staged_bytes: 0,
            removed: Vec::new(),
            compact_at: GARBAGE_BYTES_MIN,
        };
        if topic.policy.compact {
            topic.log.index_keys();
        }
        topic
    }

    /// What it costs.
    pub(super) fn bytes(&self) -> usize {
        self.log.bytes() + self.staged_bytes + self.schemas.bytes()
    }

    /// Makes the subscription of this name, starting at `position`, if it is not there.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn add_subscription(
        &mut self,
        name: &str,
        durable: bool,
        position: u64,
        limits: UnackedLimits,
    ) -> Result<(), Refused> {
        if self.subscriptions.contains_key(name) {
            return Ok(());
        }
        if self.subscriptions.len() >= SUBSCRIPTIONS_MAX {
            let detail = format!("a topic of the embedded broker has at most {SUBSCRIPTIONS_MAX} subscriptions");
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        let subscription = Subscription::new(&self.name, durable && !self.volatile, position, limits);
        self.subscriptions.insert(name.to_owned(), subscription);
        Ok(())
    }

    /// Appends an entry, and hands it out.
    pub(super) fn push(&mut self, entry: Entry) -> u64 {
        let number = self.log.push(entry);
        for subscription in self.subscriptions.values_mut() {
            subscription.dispatch(&self.log);
        }
        number
    }

    /// Holds an entry back until it is kept. Returns the number that it will have.
    pub(super) fn stage(&mut self, entry: Entry) -> u64 {
        self.staged_bytes += entry.cost();
        self.staged.push(entry);
        self.log.end() + self.staged.len() as u64 - 1
    }

    pub(super) fn staged(&self) -> &[Entry] {
        &self.staged
    }

    /// The first `count` staged entries are kept: they are handed out.
    pub(super) fn publish_staged(&mut self, count: usize) {
        let later = self.staged.split_off(count.min(self.staged.len()));
        for entry in std::mem::replace(&mut self.staged, later) {
            self.staged_bytes -= entry.cost();
            self.push(entry);
        }
    }

    /// Staged entries cannot be kept. Returns what they cost.
    pub(super) fn drop_staged(&mut self) -> usize {
        self.staged.clear();
        std::mem::take(&mut self.staged_bytes)
    }

    /// Frees memory, as little as possible, until it is not `full` any more or nothing may go.
    pub(super) fn make_room(&mut self, full: impl Fn(usize) -> bool) {
        if !full(self.bytes()) {
            return;
        }
        let consumed = self.consumed().unwrap_or_default();
        self.drop_head(|topic| topic.log.first() < consumed && full(topic.bytes()));
        if full(self.bytes()) {
            self.compact();
        }
        let drop_oldest = self.policy.drop_oldest || self.volatile;
        self.drop_head(|topic| drop_oldest && full(topic.bytes()));
    }

    /// Lets go what its policy does not keep any longer.
    pub(super) fn tidy(&mut self, now_ms: u64) {
        let garbage = self.log.garbage_bytes();
        if garbage >= self.compact_at && garbage * 2 >= self.log.bytes() {
            self.compact();
        }
        self.trim(now_ms);
    }

    /// Messages that lived too long count as acknowledged. Returns whether there were any.
    pub(super) fn expire(&mut self, now_ms: u64) -> bool {
        let Some(time_to_live) = self.policy.time_to_live else { return false };
        let position = self.log.position_at_arrival(now_ms.saturating_sub(millis(time_to_live)));
        let mut expired = false;
        for subscription in self.subscriptions.values_mut() {
            let mark = subscription.cursor().mark();
            if mark < position {
                subscription.skip(mark..position);
                subscription.dispatch(&self.log);
                expired = true;
            }
        }
        expired
    }

    /// Checks a consumer's schema, or makes it the topic's when nothing is there that it could contradict.
    ///
    /// # Errors
    /// When it does not go with the topic's, or with what was published without one.
    pub(super) fn take_consumer_schema(&mut self, schema: Schema) -> Result<(), Refused> {
        if self.schemas.len() > 0 {
            return self.schemas.check(&schema);
        }
        let used = self.producers.live() > 0
            || self.log.end() > 0
            || self.subscriptions.values().any(Subscription::has_consumers);
        if used {
            let detail = format!("topic {} does not have a schema to check", self.name);
            return Err(Refused(ServerError::IncompatibleSchema, detail));
        }
        self.schemas.add(schema).map(drop)
    }

    /// Whether nothing is in it, ever was, and nobody is at it.
    pub(super) fn is_unused(&self) -> bool {
        let empty = self.log.end() == 0 && self.staged.is_empty() && self.schemas.len() == 0;
        empty && self.producers.is_empty() && self.subscriptions.is_empty()
    }

    /// Whether something is in it that a restart must not lose.
    pub(super) fn is_worth_keeping(&self) -> bool {
        self.log.end() > 0
            || !self.staged.is_empty()
            || self.schemas.len() > 0
            || self.producers.epoch().is_some()
            || self.subscriptions.values().any(|found| found.durable)
    }

    pub(super) fn stats(&self) -> TopicStats {
        TopicStats {
            name: self.name.clone(),
            entries: self.log.len(),
            bytes: self.bytes(),
            garbage_bytes: self.log.garbage_bytes(),
            published: self.log.end(),
            producers: self.producers.names().cloned().collect(),
            waiting_producers: self.producers.waiting(),
            schemas: self.schemas.len(),
            subscriptions: self.subscriptions.iter().map(|(name, found)| found.stats(name, &self.log)).collect(),
        }
    }

    /// Where what all subscriptions that count have acknowledged ends; nothing when there are none.
    fn consumed(&self) -> Option<u64> {
        let subscriptions = self.subscriptions.values();
        if self.volatile {
            return Some(subscriptions.map(Subscription::read_position).min().unwrap_or(self.log.end()));
        }
        subscriptions.filter(|found| found.durable).map(|found| found.cursor().mark()).min()
    }

    fn trim(&mut self, now_ms: u64) {
        let bytes_max = if self.volatile { Some(0) } else { self.policy.retention_bytes.map(|bytes| bytes as u64) };
        let time_max_ms = self.policy.retention_time.map(millis);
        if bytes_max.is_none() && time_max_ms.is_none() {
            return;
        }
        let consumed = self.consumed().unwrap_or(self.log.end());
        self.drop_head(|topic| {
            let too_old =
                |max| topic.log.first_from(0).is_some_and(|first| first.arrival_ms.saturating_add(max) < now_ms);
            topic.log.first() < consumed
                && (bytes_max.is_some_and(|max| topic.log.bytes_below(consumed) > max)
                    || time_max_ms.is_some_and(too_old))
        });
    }

    /// Drops the oldest entries while `condition` holds.
    fn drop_head(&mut self, condition: impl Fn(&Self) -> bool) {
        let before = self.log.first();
        while !self.log.is_empty() && condition(self) {
            self.log.drop_first();
        }
        let first = self.log.first();
        if first == before {
            return;
        }
        self.note_removed(before..first);
        for subscription in self.subscriptions.values_mut() {
            let mark = subscription.cursor().mark();
            if mark < first {
                subscription.skip(mark..first);
            }
        }
    }

    /// Removes garbage that no durable subscription to all messages has still to get.
    fn compact(&mut self) {
        if !self.policy.compact || self.log.garbage_bytes() == 0 {
            return;
        }
        let reading = self.subscriptions.values().filter(|found| found.durable && !found.is_compacted());
        let end = reading.map(|found| found.cursor().mark()).min().unwrap_or(self.log.end());
        for entries in self.log.compact(end) {
            self.note_removed(entries.clone());
            for subscription in self.subscriptions.values_mut() {
                subscription.skip(entries.clone());
            }
        }
        // What had to stay this time is not looked at again before as much is added.
        self.compact_at = (self.log.garbage_bytes() * 2).max(GARBAGE_BYTES_MIN);
    }

    fn note_removed(&mut self, entries: Range<u64>) {
        match self.removed.last_mut() {
            _ if !self.keep => {}
            Some(last) if last.end == entries.start => last.end = entries.end,
            _ => self.removed.push(entries),
        }
    }
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
