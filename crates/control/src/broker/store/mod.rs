//! All topics in memory, and everything that changes them.
//!
//! Memory is bounded by the limits of [`BrokerConfig`]. A full topic first drops what every durable subscription has
//! acknowledged; then what its policy lets it drop; otherwise it refuses the message, so that a log from which others
//! rebuild state never silently loses its head.
//!
//! What is worth keeping beyond the process changes in these methods only: [`Store::create_topic`],
//! [`Store::remove_topic`], [`Store::append`], [`Store::tidy`] (what is dropped and compacted), [`Store::subscribe`]
//! and [`Store::ensure_subscription`], [`Store::remove_subscription`], [`Store::add_schema`], and, for cursors,
//! [`Store::acknowledge`], [`Store::seek`] and [`Store::tick`] (time to live).

mod keep;
mod room;

use std::collections::BTreeMap;

use pulsar::message::proto::{CommandSubscribe, MessageIdData, Schema, ServerError, command_subscribe};

use super::config::BrokerConfig;
use super::dispatch::{Applicant, Subscription, UnackedLimits};
use super::frame::Tail;
use super::log::{Entry, Log, check_batch};
use super::names::{NON_PERSISTENT, check_length};
use super::producers::{Admission, Producer};
use super::selector::ConsumerKey;
use super::stats::{ConsumerStats, SubscriptionStats, TopicStats};
use super::topic::Topic;
use keep::Keeping;
use room::subscription_cost;

pub(super) use keep::{Outcome, Signals};

/// How long a reader that was told to come back after a seek may take.
const READER_RETURN_MS: u64 = 60_000;

/// A request that the broker refuses, in the protocol's own terms.
#[derive(Debug)]
pub(super) struct Refused(pub(super) ServerError, pub(super) String);

/// Where a consumer is.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) topic: String,
    pub(super) subscription: String,
    pub(super) key: ConsumerKey,
}

/// Where to seek to.
#[derive(Debug)]
pub(super) enum Target<'a> {
    Id(&'a MessageIdData),
    PublishTime(u64),
}

/// All topics.
#[derive(Debug)]
pub(super) struct Store {
    config: BrokerConfig,
    /// The ledger number of the newest topic's message ids: differs between two runs of the broker, and grows.
    ledger: u64,
    bytes: usize,
    /// What all subscriptions cost.
    subscription_bytes: usize,
    topics: BTreeMap<String, Topic>,
    names_given: u64,
    keys_given: u64,
    /// Readers without consumer, and when they are given up.
    returning: BTreeMap<(String, String), u64>,
    /// Nothing without a data directory.
    keeping: Option<Keeping>,
}

impl Store {
    /// An empty store. `ledger` is larger than that of any earlier one.
    pub(super) fn new(config: BrokerConfig, ledger: u64) -> Self {
        Self {
            config,
            ledger,
            bytes: 0,
            subscription_bytes: 0,
            topics: BTreeMap::new(),
            names_given: 0,
            keys_given: 0,
            returning: BTreeMap::new(),
            keeping: None,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Names of the topics that start with `prefix`.
    pub(super) fn names<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a String> {
        let from = (std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded);
        self.topics.range::<str, _>(from).map(|(name, _)| name).take_while(move |name| name.starts_with(prefix))
    }

    /// A producer or consumer name that was never given out before by this broker.
    pub(super) fn new_name(&mut self) -> String {
        self.names_given += 1;
        format!("embedded-{:x}-{}", self.ledger, self.names_given)
    }

    /// A number for a producer or consumer that was never given out before.
    pub(super) fn new_key(&mut self) -> u64 {
        self.keys_given += 1;
        self.keys_given
    }

    /// Makes the topic if it is not there.
    ///
    /// # Errors
    /// When there are too many, or its name is too long to be kept.
    pub(super) fn create_topic(&mut self, name: &str) -> Result<(), Refused> {
        if self.topics.contains_key(name) {
            return Ok(());
        }
        check_length(name)?;
        if self.topics.len() >= self.config.topics_max {
            let detail = format!("the embedded broker holds {} topics, which is its limit", self.topics.len());
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        self.ledger += 1;
        let log = Log::new(self.ledger);
        let mut topic = Topic::new(name, log, self.config.policy(name), name.starts_with(NON_PERSISTENT));
        topic.keep = self.is_kept(name);
        self.topics.insert(name.to_owned(), topic);
        Ok(())
    }

    /// Forgets a topic that nothing is in and nobody is at.
    fn remove_topic(&mut self, name: &str) {
        if self.topics.get(name).is_some_and(Topic::is_unused) {
            self.topics.remove(name);
            self.note(name);
        }
    }

    /// Appends a message and hands it to the topic's consumers, once it is kept where it has to be. Returns its id.
    ///
    /// # Errors
    /// When the topic or the store is full, or it is a batch that cannot be.
    pub(super) fn append(&mut self, name: &str, tail: &Tail, now_ms: u64) -> Result<MessageIdData, Refused> {
        check_batch(tail)?;
        self.create_topic(name)?;
        let entry = Entry::new(tail, now_ms);
        self.tidy(name, entry.cost(), now_ms);
        let (topic_bytes_max, total_bytes_max, total) =
            (self.config.topic_bytes_max, self.config.total_bytes_max, self.bytes);
        let topic = self.existing(name)?;
        let held = topic.bytes();
        if held + entry.cost() > topic_bytes_max || total + entry.cost() > total_bytes_max {
            let detail = format!(
                "topic {name} is full: it holds {held} bytes (limit {topic_bytes_max}), the broker {total} (limit \
                 {total_bytes_max}); raise the embedded broker's limits, restart it, or use an Apache Pulsar cluster"
            );
            return Err(Refused(ServerError::ProducerBlockedQuotaExceededException, detail));
        }
        let cost = entry.cost();
        let staged = topic.keep;
        let number = if staged { topic.stage(entry) } else { topic.push(entry) };
        let id = topic.log.message_id(number);
        self.bytes += cost;
        if staged {
            self.note_staged(name);
        }
        Ok(id)
    }

    /// Drops and compacts what a topic does not keep, and makes room for `wanted` bytes if it may.
    fn tidy(&mut self, name: &str, wanted: usize, now_ms: u64) {
        let Some(topic) = self.topics.get_mut(name) else { return };
        let (topic_bytes_max, total_bytes_max) = (self.config.topic_bytes_max, self.config.total_bytes_max);
        let before = topic.bytes();
        let others = self.bytes - before;
        topic.tidy(now_ms);
        topic.make_room(|held| held + wanted > topic_bytes_max || others + held + wanted > total_bytes_max);
        self.bytes = others + topic.bytes();
        self.note_removed(name);
    }

    /// Whether this producer may send.
    pub(super) fn may_send(&self, topic: &str, name: &str, key: u64) -> bool {
        self.topics.get(topic).is_some_and(|topic| topic.producers.may_send(name, key))
    }

    /// Whether this producer is there, sending or waiting.
    pub(super) fn has_producer(&self, topic: &str, name: &str, key: u64) -> bool {
        self.topics.get(topic).is_some_and(|topic| topic.producers.contains(name, key))
    }

    /// Takes a producer in.
    ///
    /// # Errors
    /// When there are too many topics, or the topic's other producers do not allow it.
    pub(super) fn add_producer(&mut self, topic: &str, producer: Producer) -> Result<Admission, Refused> {
        self.create_topic(topic)?;
        let producers = &mut self.existing(topic)?.producers;
        let epoch = producers.epoch();
        let added = producers.add(producer);
        if producers.epoch() != epoch {
            self.note(topic);
        }
        self.remove_topic(topic);
        added
    }

    pub(super) fn remove_producer(&mut self, topic: &str, name: &str, key: u64) {
        if let Some(found) = self.topics.get_mut(topic) {
            let epoch = found.producers.epoch();
            found.producers.remove(name, key);
            // One that waited may be the only one now.
            if found.producers.epoch() != epoch {
                self.note(topic);
            }
        }
        self.remove_topic(topic);
    }

    /// The version of a producer's schema.
    ///
    /// # Errors
    /// When it is incompatible with the topic's, or a limit is passed.
    pub(super) fn add_schema(&mut self, name: &str, schema: Schema) -> Result<Vec<u8>, Refused> {
        self.create_topic(name)?;
        let topic = self.existing(name)?;
        let before = topic.bytes();
        let added = topic.schemas.add(schema);
        let after = topic.bytes();
        self.bytes = self.bytes - before + after;
        if after != before {
            self.note(name);
        }
        self.remove_topic(name);
        added
    }

    /// A version of the topic's schema, or the newest one.
    pub(super) fn schema(&self, name: &str, version: Option<&[u8]>) -> Option<(Vec<u8>, Schema)> {
        let (version, schema) = self.topics.get(name)?.schemas.get(version)?;
        Some((version, schema.clone()))
    }

    /// Attaches a consumer, and makes topic and subscription if they are not there.
    ///
    /// # Errors
    /// When a limit is passed, or the consumer does not go with those that are there.
    pub(super) fn subscribe(
        &mut self,
        topic_name: &str,
        request: &CommandSubscribe,
        schema: Option<Schema>,
        applicant: Applicant,
        now_ms: u64,
    ) -> Result<(), Refused> {
        let durable = request.durable.unwrap_or(true);
        let compacted = request.read_compacted == Some(true);
        let added_bytes = self.added_bytes(topic_name, &request.subscription)?;
        if request.force_topic_creation.unwrap_or(true) {
            self.create_topic(topic_name)?;
        }
        let limits = self.unacked_limits();
        let topic = self.existing(topic_name)?;
        let before = topic.bytes();
        let attached = attach(topic, request, schema, applicant, limits, (durable, compacted), now_ms);
        let after = topic.bytes();
        self.bytes = self.bytes - before + after;
        if attached.is_ok() && durable || after != before {
            self.note(topic_name);
        }
        if attached.is_ok() {
            self.subscription_bytes += added_bytes;
            self.returning.remove(&(topic_name.to_owned(), request.subscription.clone()));
        }
        self.remove_topic(topic_name);
        attached
    }

    /// Makes a durable subscription that starts at the topic's head, if it is not there.
    ///
    /// # Errors
    /// When a limit is passed.
    pub(super) fn ensure_subscription(&mut self, topic: &str, subscription: &str) -> Result<(), Refused> {
        let limits = self.unacked_limits();
        let added_bytes = self.added_bytes(topic, subscription)?;
        let topic = self.existing(topic)?;
        let (name, first) = (topic.name.clone(), topic.log.first());
        topic.add_subscription(subscription, true, first, limits)?;
        self.subscription_bytes += added_bytes;
        self.note(&name);
        Ok(())
    }

    /// Whether this consumer is still where it was.
    pub(super) fn is_seated(&self, seat: &Seat) -> bool {
        self.subscription(seat).is_some()
    }

    /// A consumer ends. A subscription that is not durable goes with its last one.
    pub(super) fn detach(&mut self, seat: &Seat) {
        let Some((log, subscription)) = self.at(seat) else { return };
        subscription.detach(seat.key, log);
        if !subscription.has_consumers() && !subscription.durable {
            self.remove_subscription(&seat.topic, &seat.subscription);
        }
    }

    /// Removes the subscription of its only consumer.
    ///
    /// # Errors
    /// When there is no such consumer, or it is not the only one.
    pub(super) fn unsubscribe(&mut self, seat: &Seat) -> Result<(), Refused> {
        let (_, subscription) = self.at(seat).ok_or_else(no_consumer)?;
        if subscription.consumers() > 1 {
            let detail = "Unconnected or shared consumer attempting to unsubscribe".to_owned();
            return Err(Refused(ServerError::MetadataError, detail));
        }
        self.detach(seat);
        self.remove_subscription(&seat.topic, &seat.subscription);
        Ok(())
    }

    fn remove_subscription(&mut self, topic: &str, subscription: &str) {
        let removed = self.topics.get_mut(topic).and_then(|topic| topic.subscriptions.remove(subscription));
        if let Some(removed) = removed {
            self.subscription_bytes -= subscription_cost(topic, subscription);
            if removed.durable {
                self.note(topic);
            }
        }
        self.remove_topic(topic);
    }

    /// A consumer is ready to take more messages.
    pub(super) fn flow(&mut self, seat: &Seat, permits: u32) {
        if let Some((log, subscription)) = self.at(seat) {
            subscription.flow(seat.key, permits, log);
        }
    }

    /// A consumer's link has room again.
    pub(super) fn resume(&mut self, seat: &Seat) {
        if let Some((log, subscription)) = self.at(seat) {
            subscription.dispatch(log);
        }
    }

    /// Acknowledges messages.
    ///
    /// # Errors
    /// When there is no such consumer, or its subscription does not take cumulative acknowledgements.
    pub(super) fn acknowledge(&mut self, seat: &Seat, ids: &[MessageIdData], cumulative: bool) -> Result<(), Refused> {
        let (log, subscription) = self.at(seat).ok_or_else(no_consumer)?;
        subscription.acknowledge(ids, cumulative, log)?;
        self.note_cursors(&seat.topic);
        Ok(())
    }

    /// A consumer gives back what it was given: these entries, or all.
    pub(super) fn redeliver(&mut self, seat: &Seat, ids: &[MessageIdData], epoch: Option<u64>) {
        if let Some((log, subscription)) = self.at(seat) {
            subscription.redeliver(seat.key, ids, epoch, log);
        }
    }

    /// Moves a subscription. All its consumers are told to come back.
    ///
    /// # Errors
    /// When there is no such consumer.
    pub(super) fn seek(&mut self, seat: &Seat, target: &Target<'_>, now_ms: u64) -> Result<(), Refused> {
        let (log, subscription) = self.at(seat).ok_or_else(no_consumer)?;
        let position = match target {
            Target::Id(id) => log.position_of(id),
            Target::PublishTime(time) => log.position_at_publish_time(*time),
        };
        subscription.seek(position);
        if !subscription.durable {
            let reader = (seat.topic.clone(), seat.subscription.clone());
            self.returning.insert(reader, now_ms + READER_RETURN_MS);
        }
        self.note_cursors(&seat.topic);
        Ok(())
    }

    /// The ids of the last message that a consumer will get, and of the last one that is acknowledged.
    pub(super) fn last_message_ids(&self, seat: &Seat) -> Option<(MessageIdData, MessageIdData)> {
        let log = &self.topics.get(&seat.topic)?.log;
        let subscription = self.subscription(seat)?;
        let mark = subscription.cursor().mark().checked_sub(1).unwrap_or(u64::MAX);
        Some((log.last_message_id(subscription.last_visible(log)), log.message_id(mark)))
    }

    /// A consumer's statistics, and those of its subscription.
    pub(super) fn consumer_stats(&self, seat: &Seat) -> Option<(ConsumerStats, SubscriptionStats)> {
        let log = &self.topics.get(&seat.topic)?.log;
        let subscription = self.subscription(seat)?;
        let stats = subscription.stats(&seat.subscription, log);
        let consumer = stats.consumers.get(subscription.consumer_index(seat.key)?)?.clone();
        Some((consumer, stats))
    }

    pub(super) fn stats(&self) -> Vec<TopicStats> {
        self.topics.values().map(Topic::stats).collect()
    }

    /// What time alone changes: messages and waiting readers expire.
    pub(super) fn tick(&mut self, now_ms: u64) {
        let timed = |topic: &&Topic| {
            topic.policy.time_to_live.is_some() || topic.policy.retention_time.is_some() || topic.volatile
        };
        let names: Vec<String> = self.topics.values().filter(timed).map(|topic| topic.name.clone()).collect();
        for name in names {
            if self.topics.get_mut(&name).is_some_and(|topic| topic.expire(now_ms)) {
                self.note_cursors(&name);
            }
            self.tidy(&name, 0, now_ms);
        }
        let late: Vec<_> =
            self.returning.iter().filter(|(_, end)| **end <= now_ms).map(|(who, _)| who.clone()).collect();
        for (topic, subscription) in late {
            self.remove_subscription(&topic, &subscription);
            self.returning.remove(&(topic, subscription));
        }
    }

    fn unacked_limits(&self) -> UnackedLimits {
        UnackedLimits {
            consumer: self.config.unacked_per_consumer_max.max(1),
            subscription: self.config.unacked_per_subscription_max.max(1),
        }
    }

    fn existing(&mut self, name: &str) -> Result<&mut Topic, Refused> {
        let missing = || Refused(ServerError::TopicNotFound, format!("topic {name} does not exist"));
        self.topics.get_mut(name).ok_or_else(missing)
    }

    fn subscription(&self, seat: &Seat) -> Option<&Subscription> {
        let subscription = self.topics.get(&seat.topic)?.subscriptions.get(&seat.subscription)?;
        subscription.has_consumer(seat.key).then_some(subscription)
    }

    /// The log and the subscription of a consumer that is still there.
    fn at(&mut self, seat: &Seat) -> Option<(&Log, &mut Subscription)> {
        let topic = self.topics.get_mut(&seat.topic)?;
        let subscription = topic.subscriptions.get_mut(&seat.subscription)?;
        subscription.has_consumer(seat.key).then_some((&topic.log, subscription))
    }
}

pub(super) fn no_consumer() -> Refused {
    Refused(ServerError::ConsumerNotFound, "no such consumer on this link".to_owned())
}

fn attach(
    topic: &mut Topic,
    request: &CommandSubscribe,
    schema: Option<Schema>,
    applicant: Applicant,
    limits: UnackedLimits,
    (durable, compacted): (bool, bool),
    now_ms: u64,
) -> Result<(), Refused> {
    if let Some(schema) = schema {
        topic.take_consumer_schema(schema)?;
    }
    if compacted {
        topic.log.index_keys();
    }
    let position = start_position(topic, request, durable, now_ms);
    let new = !topic.subscriptions.contains_key(&request.subscription);
    topic.add_subscription(&request.subscription, durable, position, limits)?;
    let Topic { log, subscriptions, volatile, .. } = topic;
    let Some(subscription) = subscriptions.get_mut(&request.subscription) else { return Err(no_consumer()) };
    if subscription.durable != (durable && !*volatile) {
        let detail = format!(
            "subscription '{}' is {}durable, and this consumer wants one that is {}",
            request.subscription,
            if subscription.durable { "" } else { "not " },
            if durable { "" } else { "not" },
        );
        return Err(Refused(ServerError::NotAllowedError, detail));
    }
    let attached = subscription.attach(applicant, compacted, log);
    if attached.is_err() && new {
        subscriptions.remove(&request.subscription);
    }
    attached
}

/// Where a new subscription starts. Only one that is not durable may name a message: it starts with the entry of that
/// message, as at Apache Pulsar. The entry may be a batch, and clients leave out what they do not want of it.
fn start_position(topic: &Topic, request: &CommandSubscribe, durable: bool, now_ms: u64) -> u64 {
    let back_ms = request.start_message_rollback_duration_sec.unwrap_or_default().saturating_mul(1000);
    match &request.start_message_id {
        _ if topic.volatile => topic.log.end(),
        _ if back_ms > 0 => topic.log.position_at_publish_time(now_ms.saturating_sub(back_ms)),
        Some(id) if !durable => topic.log.position_of(id),
        _ if request.initial_position() == command_subscribe::InitialPosition::Earliest => topic.log.first(),
        _ => topic.log.end(),
    }
}

#[cfg(test)]
mod tests;
