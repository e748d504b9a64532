//! Topics in memory: an append-only log each, with its producers and subscriptions.
//!
//! Memory is bounded by [`Limits`]. A full topic first drops what every durable subscription has acknowledged; then,
//! if its name says that the latest records are the ones that count, its oldest entries; otherwise it refuses the
//! message, so that a log from which others rebuild state never silently loses its head.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use pulsar::message::proto::{MessageIdData, ServerError};

use super::cursor::Subscription;
use super::frame::Tail;

/// What an entry costs beside its bytes.
const ENTRY_OVERHEAD_BYTES: usize = 128;
/// Longest topic, subscription or producer name.
pub(super) const NAME_BYTES_MAX: usize = 512;
/// Most subscriptions of one topic.
const SUBSCRIPTIONS_MAX: usize = 4096;

/// What the store may hold.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) topic_bytes_max: usize,
    pub(super) total_bytes_max: usize,
    pub(super) topics_max: usize,
    pub(super) drop_oldest_suffixes: Vec<String>,
}

/// A request that the broker refuses, in the protocol's own terms.
#[derive(Debug)]
pub(super) struct Refused(pub(super) ServerError, pub(super) String);

/// All topics.
#[derive(Debug)]
pub(super) struct Store {
    limits: Limits,
    /// The ledger number of every message id: differs between two runs of the broker, and grows.
    pub(super) ledger: u64,
    bytes: usize,
    topics: BTreeMap<String, Topic>,
    names_given: u64,
}

/// One topic.
#[derive(Debug)]
pub(super) struct Topic {
    entries: VecDeque<Entry>,
    /// Number of the oldest entry that is held.
    first: u64,
    bytes: usize,
    drop_oldest: bool,
    /// Names of live producers.
    producers: std::collections::BTreeSet<String>,
    pub(super) subscriptions: BTreeMap<String, Subscription>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) tail: Bytes,
    /// Messages in the batch; 1 without batching.
    pub(super) messages: u32,
    batched: bool,
    publish_time_ms: u64,
}

impl Store {
    pub(super) fn new(limits: Limits, ledger: u64) -> Self {
        Self { limits, ledger, bytes: 0, topics: BTreeMap::new(), names_given: 0 }
    }

    /// The topic, made if it is not there and `create` allows it.
    ///
    /// # Errors
    /// When it is not there, or there are too many.
    pub(super) fn topic(&mut self, name: &str, create: bool) -> Result<&mut Topic, Refused> {
        if !self.topics.contains_key(name) {
            if !create {
                return Err(Refused(ServerError::TopicNotFound, format!("topic {name} does not exist")));
            }
            if self.topics.len() >= self.limits.topics_max {
                return Err(Refused(
                    ServerError::NotAllowedError,
                    format!("the embedded broker holds {} topics, which is its limit", self.topics.len()),
                ));
            }
            let drop_oldest = self.limits.drop_oldest_suffixes.iter().any(|suffix| name.ends_with(suffix.as_str()));
            self.topics.insert(name.to_owned(), Topic::new(drop_oldest));
        }
        self.existing(name).ok_or_else(|| Refused(ServerError::TopicNotFound, format!("topic {name} does not exist")))
    }

    /// The topic, if it is there.
    pub(super) fn existing(&mut self, name: &str) -> Option<&mut Topic> {
        self.topics.get_mut(name)
    }

    /// Names of the topics that start with `prefix`.
    pub(super) fn names<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a String> {
        self.topics.keys().filter(move |name| name.starts_with(prefix))
    }

    /// A producer name that was never given out before by this broker.
    pub(super) fn new_producer_name(&mut self) -> String {
        self.names_given += 1;
        format!("embedded-{:x}-{}", self.ledger, self.names_given)
    }

    /// Appends a message and wakes the topic's consumers. Returns the entry's number.
    ///
    /// # Errors
    /// When the topic or the store is full.
    pub(super) fn append(&mut self, name: &str, tail: &Tail) -> Result<u64, Refused> {
        let bytes = tail.bytes.len() + ENTRY_OVERHEAD_BYTES;
        let (topic_bytes_max, total_bytes_max) = (self.limits.topic_bytes_max, self.limits.total_bytes_max);
        let others = self.bytes - self.topics.get(name).map_or(0, |topic| topic.bytes);
        let topic = self.topic(name, true)?;
        let full = |held: usize| held + bytes > topic_bytes_max || others + held + bytes > total_bytes_max;
        while full(topic.bytes) && topic.may_drop() {
            topic.drop_first();
        }
        let refused = full(topic.bytes);
        if !refused {
            topic.push(tail, bytes);
        }
        let (held, end) = (topic.bytes, topic.end());
        self.bytes = others + held;
        if refused {
            let detail = format!(
                "topic {name} is full: it holds {held} bytes (limit {topic_bytes_max}), the broker {} (limit \
                 {total_bytes_max}); raise the embedded broker's limits, restart it, or use an Apache Pulsar cluster",
                self.bytes
            );
            return Err(Refused(ServerError::ProducerBlockedQuotaExceededException, detail));
        }
        Ok(end - 1)
    }

    /// Forgets the topic if nothing is in it and nobody is at it.
    pub(super) fn forget_if_unused(&mut self, name: &str) {
        if self.topics.get(name).is_some_and(Topic::is_unused) {
            self.topics.remove(name);
        }
    }
}

impl Topic {
    fn new(drop_oldest: bool) -> Self {
        Self {
            entries: VecDeque::new(),
            first: 0,
            bytes: 0,
            drop_oldest,
            producers: Default::default(),
            subscriptions: BTreeMap::new(),
        }
    }

    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The number that the next entry will get.
    pub(super) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    pub(super) fn entry(&self, number: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// Registers a producer.
    ///
    /// # Errors
    /// When a live one has this name.
    pub(super) fn add_producer(&mut self, topic: &str, name: &str) -> Result<(), Refused> {
        if self.producers.insert(name.to_owned()) {
            return Ok(());
        }
        let detail = format!("producer with name '{name}' is already connected to topic {topic}");
        Err(Refused(ServerError::ProducerBusy, detail))
    }

    pub(super) fn remove_producer(&mut self, name: &str) {
        self.producers.remove(name);
    }

    /// The subscription of this name, made at `position` if it is not there.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn subscription(
        &mut self,
        name: &str,
        durable: bool,
        position: u64,
    ) -> Result<&mut Subscription, Refused> {
        if self.subscriptions.len() >= SUBSCRIPTIONS_MAX && !self.subscriptions.contains_key(name) {
            let detail = format!("a topic of the embedded broker has at most {SUBSCRIPTIONS_MAX} subscriptions");
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        Ok(self.subscriptions.entry(name.to_owned()).or_insert_with(|| Subscription::new(durable, position)))
    }

    /// The first entry that was published at this time or later, by the clocks of its producers.
    pub(super) fn position_at_time(&self, publish_time_ms: u64) -> u64 {
        let index = self.entries.iter().position(|entry| entry.publish_time_ms >= publish_time_ms);
        self.first + index.unwrap_or(self.entries.len()) as u64
    }

    /// The id of an entry, as in receipts and messages.
    pub(super) fn message_id(ledger: u64, entry: u64) -> MessageIdData {
        MessageIdData { ledger_id: ledger, entry_id: entry, partition: Some(-1), ..Default::default() }
    }

    /// The id of the last message: of the last one in its batch, if the last entry is a batch.
    pub(super) fn last_message_id(&self, ledger: u64) -> MessageIdData {
        let Some(last) = self.entries.back() else { return Self::message_id(u64::MAX, u64::MAX) };
        let mut id = Self::message_id(ledger, self.end() - 1);
        if last.batched {
            id.batch_index = Some(last.messages.saturating_sub(1) as i32);
            id.batch_size = Some(last.messages as i32);
        }
        id
    }

    fn may_drop(&self) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let mut durable = self.subscriptions.values().filter(|subscription| subscription.durable).peekable();
        self.drop_oldest || durable.peek().is_some() && durable.all(|subscription| subscription.mark() > self.first)
    }

    fn drop_first(&mut self) {
        if let Some(entry) = self.entries.pop_front() {
            self.first += 1;
            self.bytes -= entry.tail.len() + ENTRY_OVERHEAD_BYTES;
        }
    }

    fn push(&mut self, tail: &Tail, bytes: usize) {
        let messages = tail.metadata.num_messages_in_batch;
        self.entries.push_back(Entry {
            tail: tail.bytes.clone(),
            messages: messages.and_then(|count| u32::try_from(count).ok()).unwrap_or(1).max(1),
            batched: messages.is_some(),
            publish_time_ms: tail.metadata.publish_time,
        });
        self.bytes += bytes;
        for subscription in self.subscriptions.values() {
            if let Some(consumer) = &subscription.consumer {
                consumer.wake.notify_one();
            }
        }
    }

    fn is_unused(&self) -> bool {
        // A dropped entry's number must not come again, so a topic that ever held one stays.
        self.end() == 0 && self.producers.is_empty() && self.subscriptions.is_empty()
    }
}

/// The full name of a topic: `persistent://tenant/namespace/name`, as Pulsar completes short names.
///
/// # Errors
/// When it is no topic name.
pub(super) fn full_name(name: &str) -> Result<String, Refused> {
    let refused = || Refused(ServerError::InvalidTopicName, format!("'{}' is not a topic name", name.escape_debug()));
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return Err(Refused(
            ServerError::InvalidTopicName,
            "a topic name is empty, too long or unprintable".to_owned(),
        ));
    }
    let (domain, rest) = name.split_once("://").unwrap_or(("persistent", name));
    if domain != "persistent" && domain != "non-persistent" {
        return Err(refused());
    }
    let parts: Vec<&str> = rest.splitn(3, '/').collect();
    match parts[..] {
        [topic] => Ok(format!("{domain}://public/default/{topic}")),
        [tenant, namespace, topic] if !tenant.is_empty() && !namespace.is_empty() && !topic.is_empty() => {
            Ok(format!("{domain}://{rest}"))
        }
        _ => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use pulsar::message::Metadata;

    use super::*;

    const TOPIC: &str = "persistent://public/default/t";

    fn store(drop_oldest_suffixes: &[&str]) -> Store {
        let limits = Limits {
            topic_bytes_max: 4 * (100 + ENTRY_OVERHEAD_BYTES),
            total_bytes_max: 6 * (100 + ENTRY_OVERHEAD_BYTES),
            topics_max: 3,
            drop_oldest_suffixes: drop_oldest_suffixes.iter().map(|suffix| (*suffix).to_owned()).collect(),
        };
        Store::new(limits, 1)
    }

    fn tail(publish_time: u64) -> Tail {
        let metadata = Metadata { publish_time, ..Default::default() };
        Tail { bytes: Bytes::from(vec![0; 100]), metadata, payload_bytes: 90 }
    }

    #[test]
    fn a_full_log_refuses_and_keeps_its_head() {
        let mut store = store(&[]);
        for entry in 0..4 {
            assert_eq!(store.append(TOPIC, &tail(entry)).unwrap(), entry);
        }
        let Refused(error, detail) = store.append(TOPIC, &tail(4)).unwrap_err();
        assert_eq!(error, ServerError::ProducerBlockedQuotaExceededException);
        assert!(detail.contains(TOPIC), "{detail}");
        assert!(store.existing(TOPIC).unwrap().entry(0).is_some());
        // The store as a whole is bounded too.
        store.append("persistent://public/default/u", &tail(0)).unwrap();
        store.append("persistent://public/default/u", &tail(0)).unwrap();
        store.append("persistent://public/default/u", &tail(0)).unwrap_err();
    }

    #[test]
    fn a_topic_of_latest_records_drops_its_oldest() {
        let mut store = store(&["/t"]);
        for entry in 0..9 {
            assert_eq!(store.append(TOPIC, &tail(entry)).unwrap(), entry);
        }
        let topic = store.existing(TOPIC).unwrap();
        assert_eq!((topic.first(), topic.end()), (5, 9));
        assert_eq!(topic.position_at_time(7), 7);
        assert_eq!(topic.position_at_time(0), 5);
        assert_eq!(topic.position_at_time(100), 9);
    }

    #[test]
    fn what_all_durable_subscriptions_acknowledged_makes_room() {
        let mut store = store(&[]);
        for entry in 0..4 {
            store.append(TOPIC, &tail(entry)).unwrap();
        }
        let topic = store.existing(TOPIC).unwrap();
        topic.subscription("fast", true, 0).unwrap().ack_until(3, 4);
        topic.subscription("slow", true, 0).unwrap().ack_until(0, 4);
        topic.subscription("reader", false, 0).unwrap();
        assert_eq!(store.append(TOPIC, &tail(4)).unwrap(), 4);
        store.append(TOPIC, &tail(5)).unwrap_err();
    }

    #[test]
    fn topics_are_counted_and_unused_ones_forgotten() {
        let mut store = store(&[]);
        for name in ["a", "b", "c"] {
            store.topic(&full_name(name).unwrap(), true).unwrap();
        }
        assert!(matches!(store.topic("persistent://x/y/z", true), Err(Refused(ServerError::NotAllowedError, _))));
        store.forget_if_unused("persistent://public/default/a");
        store.topic("persistent://x/y/z", true).unwrap();
        assert!(matches!(store.topic("persistent://x/y/other", false), Err(Refused(ServerError::TopicNotFound, _))));
        assert_eq!(store.names("persistent://x/y/").count(), 1);
    }

    #[test]
    fn short_names_are_completed_and_bad_ones_refused() {
        assert_eq!(full_name("t").unwrap(), TOPIC);
        assert_eq!(full_name("non-persistent://a/b/c/d").unwrap(), "non-persistent://a/b/c/d");
        for bad in ["", "a/b", "http://a/b/c", "persistent://a//c", "a\nb", &"x".repeat(513)] {
            full_name(bad).unwrap_err();
        }
    }
}
