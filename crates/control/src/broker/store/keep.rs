//! What of the store has to be kept beyond the process, and is not yet.
//!
//! With a data directory, a message is *staged* first: it has its number and counts in the limits, but nobody gets to
//! see it. Staged messages and other changes are taken in groups ([`Store::take_group`]); when a group is kept, its
//! messages join their logs and are handed out ([`Store::settle`]), and whoever waited for that ([`Store::kept`]) is
//! told. When it could not be kept, all staged messages are dropped, as if they had never come, and everything else
//! stays changed and is taken again with the next group.
//!
//! Topics whose names start with `non-persistent://` and subscriptions that are not durable are not kept.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use gradwire_proto::Fault;
use tokio::sync::{Notify, oneshot};

use super::{Store, Topic, subscription_cost};
use crate::broker::config::BrokerConfig;
use crate::broker::cursor::Cursor;
use crate::broker::dispatch::Subscription;
use crate::broker::frame::parse_tail;
use crate::broker::log::{Entry, Log};
use crate::broker::schema::Schemas;
use crate::broker::storage::{Head, Loaded, Ops, StoredTopic, unreadable};

/// Whether a group was kept; if not, why.
pub(in crate::broker) type Outcome = Result<(), String>;

/// Tells the task that keeps groups that there is one.
#[derive(Debug, Default)]
pub(in crate::broker) struct Signals {
    /// Somebody waits for it.
    pub(in crate::broker) now: Notify,
    /// Nobody does.
    pub(in crate::broker) soon: Notify,
}

/// What is kept, and what is not yet.
#[derive(Debug)]
pub(super) struct Keeping {
    signals: Arc<Signals>,
    kept: BTreeMap<String, Kept>,
    next_number: u64,
    /// Topics whose messages, schemas or epochs changed, or that are gone.
    topics: BTreeSet<String>,
    /// Topics whose subscriptions changed.
    cursors: BTreeSet<String>,
    /// Answers have to wait for the next group.
    urgent: bool,
    waiters: Vec<oneshot::Sender<Outcome>>,
}

/// A topic as it is kept.
#[derive(Debug)]
struct Kept {
    number: u64,
    ledger: u64,
    cursors: BTreeMap<String, Cursor>,
    schemas: usize,
}

/// Changes to be kept together.
#[derive(Debug)]
pub(in crate::broker) struct Group {
    pub(in crate::broker) ops: Ops,
    parts: Vec<Part>,
    waiters: Vec<oneshot::Sender<Outcome>>,
}

/// A topic's part of a group.
#[derive(Debug)]
struct Part {
    name: String,
    number: u64,
    /// Nothing for a topic that is gone.
    ledger: Option<u64>,
    staged: usize,
    removed: Vec<Range<u64>>,
    cursors: Vec<(String, Option<Cursor>)>,
    schemas: usize,
}

impl Store {
    /// A store with what a data directory held, which keeps what happens from now on.
    ///
    /// # Errors
    /// When something that was kept cannot be read. Names the directory.
    pub(in crate::broker) fn restore(
        config: BrokerConfig,
        now_ms: u64,
        loaded: Loaded,
        directory: &Path,
        signals: Arc<Signals>,
    ) -> Result<Self, Fault> {
        // Larger than all before, whatever the clock says.
        let mut store = Self::new(config, now_ms.max(loaded.ledger + 1));
        let mut keeping = Keeping {
            signals,
            kept: BTreeMap::new(),
            next_number: loaded.topics.last_key_value().map_or(0, |(number, _)| number + 1),
            topics: BTreeSet::new(),
            cursors: BTreeSet::new(),
            urgent: false,
            waiters: Vec::new(),
        };
        for (number, stored) in loaded.topics {
            let name = stored.head.name.clone();
            if store.topics.contains_key(&name) {
                return Err(unreadable(directory, &name, "it is there twice"));
            }
            let (topic, kept) =
                store.restore_topic(number, stored).map_err(|what| unreadable(directory, &name, &what))?;
            store.bytes += topic.bytes();
            store.subscription_bytes +=
                topic.subscriptions.keys().map(|subscription| subscription_cost(&name, subscription)).sum::<usize>();
            store.topics.insert(name.clone(), topic);
            keeping.kept.insert(name, kept);
        }
        store.keeping = Some(keeping);
        Ok(store)
    }

    fn restore_topic(&self, number: u64, stored: StoredTopic) -> Result<(Topic, Kept), String> {
        let head = stored.head;
        let mut log = Log::new(head.ledger);
        let mut gaps = Vec::new();
        for entry in stored.entries {
            let tail = parse_tail(entry.tail).map_err(|bad| format!("message {}: {}", entry.number, bad.0))?;
            if !log.is_empty() && entry.number > log.end() {
                gaps.push(log.end()..entry.number);
            }
            log.place(entry.number, Entry::new(&tail, entry.arrival_ms));
        }
        if log.end() < head.next {
            gaps.push(log.end()..head.next);
        }
        log.skip_to(head.next);
        let mut topic = Topic::new(&head.name, log, self.config.policy(&head.name), false);
        topic.keep = true;
        topic.producers.restore_epoch(head.epoch);
        topic.schemas = Schemas::decode(&stored.schemas).map_err(|error| error.to_string())?;
        let mut cursors = BTreeMap::new();
        for (name, state) in stored.subscriptions {
            let cursor = Cursor::decode(&state).map_err(|error| format!("subscription '{name}': {error}"))?;
            let mut subscription = Subscription::restored(&head.name, cursor.clone(), self.unacked_limits());
            gaps.iter().for_each(|gap| subscription.skip(gap.clone()));
            subscription.skip(0..topic.log.first());
            topic.subscriptions.insert(name.clone(), subscription);
            cursors.insert(name, cursor);
        }
        let kept = Kept { number, ledger: head.ledger, cursors, schemas: topic.schemas.len() };
        Ok((topic, kept))
    }

    /// Whether messages are kept.
    pub(super) fn is_kept(&self, topic: &str) -> bool {
        self.keeping.is_some() && !topic.starts_with(super::NON_PERSISTENT)
    }

    /// A topic changed, and the answer that is given to that has to wait until it is kept.
    pub(super) fn note(&mut self, topic: &str) {
        if !self.is_kept(topic) {
            return;
        }
        let Some(keeping) = &mut self.keeping else { return };
        keeping.topics.insert(topic.to_owned());
        keeping.cursors.insert(topic.to_owned());
        keeping.urgent = true;
        keeping.signals.now.notify_one();
    }

    /// A message was staged.
    pub(super) fn note_staged(&mut self, topic: &str) {
        let Some(keeping) = &mut self.keeping else { return };
        if !keeping.topics.contains(topic) {
            keeping.topics.insert(topic.to_owned());
        }
        keeping.urgent = true;
        keeping.signals.now.notify_one();
    }

    /// What a topic's subscriptions have acknowledged changed. Nobody waits for that.
    pub(super) fn note_cursors(&mut self, topic: &str) {
        if !self.is_kept(topic) {
            return;
        }
        let Some(keeping) = &mut self.keeping else { return };
        if !keeping.cursors.contains(topic) {
            keeping.cursors.insert(topic.to_owned());
        }
        keeping.signals.soon.notify_one();
    }

    /// A topic may have dropped messages. Nobody waits for that.
    pub(super) fn note_removed(&mut self, topic: &str) {
        if self.topics.get(topic).is_none_or(|topic| topic.removed.is_empty()) {
            return;
        }
        let Some(keeping) = &mut self.keeping else { return };
        if !keeping.topics.contains(topic) {
            keeping.topics.insert(topic.to_owned());
        }
        keeping.signals.soon.notify_one();
    }

    /// Something to wait for, if an answer that was given since the last group has to wait.
    pub(in crate::broker) fn kept(&mut self) -> Option<oneshot::Receiver<Outcome>> {
        let keeping = self.keeping.as_mut().filter(|keeping| keeping.urgent)?;
        let (sender, receiver) = oneshot::channel();
        keeping.waiters.push(sender);
        Some(receiver)
    }

    /// Takes what changed since the last group, if anything did. [`Store::settle`] must follow before the next call.
    pub(in crate::broker) fn take_group(&mut self) -> Option<Group> {
        let keeping = self.keeping.as_mut()?;
        let (topics, cursors) = (std::mem::take(&mut keeping.topics), std::mem::take(&mut keeping.cursors));
        let mut ops = Ops::default();
        let mut parts = Vec::new();
        let mut new_topics = false;
        for name in topics.union(&cursors) {
            let kept = keeping.kept.get(name);
            let topic = self.topics.get_mut(name).filter(|topic| kept.is_some() || topic.is_worth_keeping());
            if let Some(kept) = kept.filter(|kept| topic.as_ref().is_none_or(|topic| topic.log.ledger() != kept.ledger))
            {
                ops.remove_topic(kept.number);
                parts.push(Part::gone(name, kept.number));
            }
            let Some(topic) = topic else { continue };
            let kept = kept.filter(|kept| kept.ledger == topic.log.ledger());
            let number = kept.map_or(keeping.next_number, |kept| kept.number);
            if kept.is_none() {
                keeping.next_number += 1;
                new_topics = true;
            }
            parts.push(Part::take(name, topic, number, kept, cursors.contains(name), &mut ops));
        }
        if new_topics {
            ops.put_ledger(self.ledger);
        }
        keeping.urgent = false;
        let waiters = std::mem::take(&mut keeping.waiters);
        let group = Group { ops, parts, waiters };
        Some(group).filter(|group| !group.parts.is_empty() || !group.waiters.is_empty())
    }

    /// A group was kept, or could not be.
    pub(in crate::broker) fn settle(&mut self, group: Group, outcome: &Outcome) {
        let mut waiters = group.waiters;
        for part in group.parts {
            match outcome {
                Ok(()) => self.settle_kept(part),
                Err(_) => self.settle_refused(part),
            }
        }
        if outcome.is_err() {
            self.drop_staged();
            if let Some(keeping) = &mut self.keeping {
                keeping.urgent = false;
                waiters.append(&mut keeping.waiters);
            }
        }
        for waiter in waiters {
            // A link that ended meanwhile does not listen any more.
            let _ = waiter.send(outcome.clone());
        }
    }

    fn settle_kept(&mut self, part: Part) {
        let Some(keeping) = &mut self.keeping else { return };
        let Some(ledger) = part.ledger else {
            keeping.kept.remove(&part.name);
            return;
        };
        let new = || Kept { number: part.number, ledger, cursors: BTreeMap::new(), schemas: 0 };
        let kept = keeping.kept.entry(part.name.clone()).or_insert_with(new);
        kept.schemas = part.schemas;
        for (name, cursor) in part.cursors {
            match cursor {
                Some(cursor) => drop(kept.cursors.insert(name, cursor)),
                None => drop(kept.cursors.remove(&name)),
            }
        }
        if let Some(topic) = self.topics.get_mut(&part.name) {
            topic.publish_staged(part.staged);
        }
    }

    fn settle_refused(&mut self, part: Part) {
        let Some(keeping) = &mut self.keeping else { return };
        keeping.topics.insert(part.name.clone());
        keeping.cursors.insert(part.name.clone());
        if let Some(topic) = self.topics.get_mut(&part.name) {
            topic.removed.extend(part.removed);
        }
    }

    /// Messages that follow one that was not kept have numbers that do not come.
    fn drop_staged(&mut self) {
        let mut unused = Vec::new();
        for topic in self.topics.values_mut() {
            self.bytes -= topic.drop_staged();
            if topic.is_unused() {
                unused.push(topic.name.clone());
            }
        }
        unused.iter().for_each(|name| self.remove_topic(name));
    }
}

impl Part {
    fn gone(name: &str, number: u64) -> Self {
        let (removed, cursors) = (Vec::new(), Vec::new());
        Self { name: name.to_owned(), number, ledger: None, staged: 0, removed, cursors, schemas: 0 }
    }

    fn take(
        name: &str,
        topic: &mut Topic,
        number: u64,
        kept: Option<&Kept>,
        with_cursors: bool,
        ops: &mut Ops,
    ) -> Self {
        let removed = std::mem::take(&mut topic.removed);
        removed.iter().for_each(|entries| ops.remove_entries(number, entries.clone()));
        let log = &topic.log;
        for (entry, index) in topic.staged().iter().zip(log.end()..) {
            ops.put_entry(number, index, entry.arrival_ms, &entry.tail);
        }
        let staged = topic.staged().len();
        let head = Head {
            name: name.to_owned(),
            ledger: log.ledger(),
            next: log.end() + staged as u64,
            entries: (log.len() + staged) as u64,
            epoch: topic.producers.epoch(),
        };
        ops.put_head(number, &head);
        for (index, schema) in topic.schemas.encode().enumerate().skip(kept.map_or(0, |kept| kept.schemas)) {
            ops.put_schema(number, index as u32, &schema);
        }
        let cursors = if with_cursors { changed_cursors(topic, kept) } else { Vec::new() };
        for (subscription, cursor) in &cursors {
            match cursor {
                Some(cursor) => ops.put_subscription(number, subscription, &cursor.encode()),
                None => ops.remove_subscription(number, subscription),
            }
        }
        let (ledger, schemas) = (Some(head.ledger), topic.schemas.len());
        Self { name: name.to_owned(), number, ledger, staged, removed, cursors, schemas }
    }
}

/// Durable subscriptions that differ from what is kept of them, and those that are gone.
fn changed_cursors(topic: &Topic, kept: Option<&Kept>) -> Vec<(String, Option<Cursor>)> {
    let before = |name: &String| kept.and_then(|kept| kept.cursors.get(name));
    let durable = topic.subscriptions.iter().filter(|(_, found)| found.durable);
    let changed = durable.clone().filter(|(name, found)| before(name) != Some(found.cursor()));
    let mut cursors: Vec<_> = changed.map(|(name, found)| (name.clone(), Some(found.cursor().clone()))).collect();
    let is_gone = |name: &&String| topic.subscriptions.get(*name).is_none_or(|found| !found.durable);
    let gone = kept.into_iter().flat_map(|kept| kept.cursors.keys()).filter(is_gone);
    cursors.extend(gone.map(|name| (name.clone(), None)));
    cursors
}

#[cfg(test)]
mod tests;
