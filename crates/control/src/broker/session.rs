//! What one link may do and has: commands in, replies out. No socket and no clock in here.
//!
//! Every request gets exactly one answer, an error where it cannot be served, so that no client waits for its own
//! time-out. Dropping a session ends its producers and consumers.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::BytesMut;
use pulsar::message::proto::{
    BaseCommand, CommandAck, CommandConnect, CommandConsumerStatsResponse, CommandGetTopicsOfNamespace,
    CommandProducer, CommandSeek, CommandSend, CommandSubscribe, MessageIdData, ProducerAccessMode, ServerError,
    command_ack, command_get_topics_of_namespace, command_subscribe,
};
use tokio::sync::Notify;

use super::Broker;
use super::cursor::{Consumer, Subscription};
use super::frame::{BadFrame, Frame, Tail, put_command, put_message};
use super::replies;
use super::store::{NAME_BYTES_MAX, Refused, Topic, full_name};

/// Most producers, and most consumers, of one link.
const ENDPOINTS_PER_LINK_MAX: usize = 4096;
/// Messages are added to a link's output until it holds this much. What waits longer stays in the topic's log.
const OUTPUT_BYTES_FULL: usize = 256 << 10;

/// One link's state at the broker.
#[derive(Debug)]
pub(super) struct Session {
    broker: Arc<Broker>,
    link: u64,
    /// Where the client reached us, `host:port`: what it is told to use.
    reached: String,
    wake: Arc<Notify>,
    connected: bool,
    producers: BTreeMap<u64, Producer>,
    consumers: BTreeMap<u64, Reading>,
}

#[derive(Debug)]
struct Producer {
    topic: String,
    name: String,
}

#[derive(Clone, Debug)]
struct Reading {
    topic: String,
    subscription: String,
}

/// The client is told why, and the link is closed.
pub(super) struct Close(pub(super) String);

impl From<BadFrame> for Close {
    fn from(BadFrame(reason): BadFrame) -> Self {
        Self(reason)
    }
}

impl Session {
    pub(super) fn new(broker: Arc<Broker>, link: u64, reached: String, wake: Arc<Notify>) -> Self {
        Self { broker, link, reached, wake, connected: false, producers: BTreeMap::new(), consumers: BTreeMap::new() }
    }

    /// Whether the client has connected, with the right token where one is wanted.
    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// Carries out one command and appends the answer to `out`.
    ///
    /// # Errors
    /// When the link must be closed, after `out` is written.
    pub(super) fn handle(&mut self, frame: Frame, out: &mut BytesMut) -> Result<(), Close> {
        let Frame { command, tail } = frame;
        if let Some(connect) = command.connect {
            return self.connect(&connect, out);
        }
        if !self.connected {
            return Err(Close("a command before CONNECT".to_owned()));
        }
        if let Some(send) = command.send {
            self.send(&send, tail, out);
        } else if let Some(ack) = command.ack {
            self.ack(&ack, out);
        } else if let Some(flow) = command.flow {
            self.with_consumer(flow.consumer_id, |_, consumer| {
                consumer.permits = consumer.permits.saturating_add(flow.message_permits.into());
            });
        } else if let Some(redeliver) = command.redeliver_unacknowledged_messages {
            // As in Apache Pulsar, an exclusive subscription redelivers everything, to keep the order.
            self.with_subscription(redeliver.consumer_id, |_, subscription| subscription.rewind());
        } else if command.ping.is_some() {
            put_command(out, replies::pong());
        } else if command.pong.is_none() {
            self.request(command, out);
        }
        Ok(())
    }

    /// Appends messages that the link's consumers are ready to take, until `out` is full.
    pub(super) fn fill(&mut self, out: &mut BytesMut) {
        if self.consumers.is_empty() {
            return;
        }
        let mut store = self.broker.store();
        let ledger = store.ledger;
        for (consumer_id, reading) in &self.consumers {
            let Some(topic) = store.existing(&reading.topic) else { continue };
            let (first, end) = (topic.first(), topic.end());
            while out.len() < OUTPUT_BYTES_FULL {
                let Some(subscription) = topic.subscriptions.get_mut(&reading.subscription) else { break };
                if subscription.consumer.as_ref().is_none_or(|consumer| consumer.permits == 0) {
                    break;
                }
                let Some(number) = subscription.next(first, end) else { break };
                subscription.advance();
                let Some(entry) = topic.entry(number) else { break };
                put_message(out, *consumer_id, Topic::message_id(ledger, number), &entry.tail);
                let messages = u64::from(entry.messages);
                if let Some(consumer) =
                    topic.subscriptions.get_mut(&reading.subscription).and_then(|found| found.consumer.as_mut())
                {
                    consumer.permits = consumer.permits.saturating_sub(messages);
                }
            }
        }
    }

    fn connect(&mut self, connect: &CommandConnect, out: &mut BytesMut) -> Result<(), Close> {
        if self.connected {
            return Err(Close("a second CONNECT".to_owned()));
        }
        let method = connect.auth_method_name.as_deref().unwrap_or_default();
        let shown = connect.auth_data.as_deref().unwrap_or_default();
        if let Err(reason) = self.broker.admission.check(method, shown) {
            let closing = Close(format!("authentication failed: {reason}"));
            put_command(out, replies::error(replies::NO_REQUEST, Refused(ServerError::AuthenticationError, reason)));
            return Err(closing);
        }
        self.connected = true;
        let version = connect.protocol_version.unwrap_or_default();
        put_command(out, replies::connected(version, self.broker.config.message_bytes_max));
        Ok(())
    }

    /// Commands that carry a request id and want one reply.
    fn request(&mut self, command: BaseCommand, out: &mut BytesMut) {
        let reply = if let Some(request) = command.partition_metadata {
            replies::partitions(request.request_id, full_name(&request.topic).map(drop))
        } else if let Some(request) = command.lookup_topic {
            replies::lookup(request.request_id, full_name(&request.topic).map(|_| self.broker.url_for(&self.reached)))
        } else if let Some(request) = command.producer {
            let id = request.request_id;
            self.open_producer(request)
                .map_or_else(|refused| replies::error(id, refused), |name| replies::producer_success(id, name))
        } else if let Some(request) = command.subscribe {
            let id = request.request_id;
            answer(id, self.subscribe(request))
        } else if let Some(request) = command.close_producer {
            self.close_producer(request.producer_id);
            replies::success(request.request_id)
        } else if let Some(request) = command.close_consumer {
            self.close_consumer(request.consumer_id, false);
            replies::success(request.request_id)
        } else if let Some(request) = command.unsubscribe {
            answer(request.request_id, self.close_consumer(request.consumer_id, true).ok_or_else(no_consumer))
        } else if let Some(request) = command.seek {
            answer(request.request_id, self.seek(&request))
        } else if let Some(request) = command.get_last_message_id {
            let id = request.request_id;
            let ledger = self.broker.store().ledger;
            self.with_subscription(request.consumer_id, |topic, subscription| {
                let mark = subscription.mark().checked_sub(1).unwrap_or(u64::MAX);
                (topic.last_message_id(ledger), Topic::message_id(ledger, mark))
            })
            .map_or_else(|| replies::error(id, no_consumer()), |(last, mark)| replies::last_message_id(id, last, mark))
        } else if let Some(request) = command.get_topics_of_namespace {
            replies::topics(request.request_id, self.topics_of(&request))
        } else if let Some(request) = command.consumer_stats {
            self.stats(request.consumer_id, request.request_id)
        } else if let Some(request) = command.get_schema {
            replies::no_schema(request.request_id, &request.topic)
        } else if let Some(request) = command.get_or_create_schema {
            replies::schemas_not_kept(request.request_id)
        } else {
            let detail = format!("the embedded broker does not know command {}", command.r#type);
            replies::error(request_id_of(&command), Refused(ServerError::NotAllowedError, detail))
        };
        put_command(out, reply);
    }

    fn open_producer(&mut self, request: CommandProducer) -> Result<String, Refused> {
        let topic = full_name(&request.topic)?;
        if request.producer_access_mode.unwrap_or_default() != ProducerAccessMode::Shared as i32 {
            return Err(not_supported("exclusive producers"));
        }
        let asked = request.producer_name.filter(|name| !name.is_empty());
        if let Some(open) = self.producers.get(&request.producer_id) {
            // A repeated request after a lost answer.
            if open.topic == topic && asked.as_ref().is_none_or(|name| *name == open.name) {
                return Ok(open.name.clone());
            }
            return Err(Refused(ServerError::NotAllowedError, "this producer id is in use on this link".to_owned()));
        }
        check_endpoint(self.producers.len(), asked.as_deref().unwrap_or_default())?;
        let mut store = self.broker.store();
        let name = asked.unwrap_or_else(|| store.new_producer_name());
        store.topic(&topic, true)?.add_producer(&topic, &name)?;
        drop(store);
        self.producers.insert(request.producer_id, Producer { topic, name: name.clone() });
        Ok(name)
    }

    fn send(&mut self, send: &CommandSend, tail: Option<Tail>, out: &mut BytesMut) {
        let reply = match self.store_message(send, tail) {
            Ok(id) => replies::receipt(send.producer_id, send.sequence_id, send.highest_sequence_id, id),
            Err(refused) => replies::send_error(send.producer_id, send.sequence_id, refused),
        };
        put_command(out, reply);
    }

    fn store_message(&mut self, send: &CommandSend, tail: Option<Tail>) -> Result<MessageIdData, Refused> {
        let no_producer = || Refused(ServerError::NotAllowedError, "no such producer on this link".to_owned());
        let producer = self.producers.get(&send.producer_id).ok_or_else(no_producer)?;
        let tail =
            tail.ok_or_else(|| Refused(ServerError::NotAllowedError, "a message without payload frame".to_owned()))?;
        let bytes_max = self.broker.config.message_bytes_max;
        if tail.payload_bytes > bytes_max {
            let detail = format!("a message of {} bytes; the limit is {bytes_max}", tail.payload_bytes);
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        let mut store = self.broker.store();
        let entry = store.append(&producer.topic, &tail)?;
        Ok(Topic::message_id(store.ledger, entry))
    }

    fn subscribe(&mut self, request: CommandSubscribe) -> Result<(), Refused> {
        let topic_name = full_name(&request.topic)?;
        if request.sub_type != command_subscribe::SubType::Exclusive as i32 {
            return Err(not_supported("subscriptions other than Exclusive"));
        }
        if request.read_compacted == Some(true) {
            return Err(not_supported("compaction"));
        }
        if let Some(open) = self.consumers.get(&request.consumer_id) {
            // A repeated request after a lost answer.
            if open.topic == topic_name && open.subscription == request.subscription {
                return Ok(());
            }
            return Err(Refused(ServerError::NotAllowedError, "this consumer id is in use on this link".to_owned()));
        }
        check_endpoint(self.consumers.len(), &request.subscription)?;
        let durable = request.durable.unwrap_or(true);
        let mut store = self.broker.store();
        let ledger = store.ledger;
        let topic = store.topic(&topic_name, request.force_topic_creation.unwrap_or(true))?;
        let position = start_position(topic, ledger, &request, durable);
        let subscription = topic.subscription(&request.subscription, durable, position)?;
        if subscription.consumer.is_some() || subscription.durable != durable {
            let detail = format!("subscription '{}' of {topic_name} has a consumer already", request.subscription);
            return Err(Refused(ServerError::ConsumerBusy, detail));
        }
        subscription.consumer = Some(Consumer {
            link: self.link,
            consumer_id: request.consumer_id,
            name: request.consumer_name.unwrap_or_default(),
            permits: 0,
            wake: self.wake.clone(),
        });
        drop(store);
        let reading = Reading { topic: topic_name, subscription: request.subscription };
        self.consumers.insert(request.consumer_id, reading);
        Ok(())
    }

    fn ack(&mut self, ack: &CommandAck, out: &mut BytesMut) {
        let ledger = self.broker.store().ledger;
        let cumulative = ack.ack_type == command_ack::AckType::Cumulative as i32;
        let done = self.with_subscription(ack.consumer_id, |topic, subscription| {
            // With an ack set, a part of a batch is still wanted: the entry stays unacknowledged.
            let whole = |id: &&MessageIdData| id.ledger_id == ledger && id.ack_set.iter().all(|word| *word == 0);
            for id in ack.message_id.iter().filter(whole) {
                if cumulative {
                    subscription.ack_until(id.entry_id, topic.end());
                } else {
                    subscription.ack(id.entry_id, topic.end());
                }
            }
        });
        if let Some(request_id) = ack.request_id {
            let error = if done.is_some() { None } else { Some(no_consumer()) };
            put_command(out, replies::ack_response(ack.consumer_id, request_id, error));
        }
    }

    fn seek(&mut self, seek: &CommandSeek) -> Result<(), Refused> {
        let ledger = self.broker.store().ledger;
        self.with_subscription(seek.consumer_id, |topic, subscription| {
            let position = match (&seek.message_id, seek.message_publish_time) {
                (Some(id), _) => position_of(topic, ledger, id),
                (None, Some(time)) => topic.position_at_time(time),
                (None, None) => {
                    return Err(Refused(ServerError::MetadataError, "a SEEK without position".to_owned()));
                }
            };
            subscription.seek(position);
            Ok(())
        })
        .ok_or_else(no_consumer)?
    }

    fn topics_of(&self, request: &CommandGetTopicsOfNamespace) -> Vec<String> {
        use command_get_topics_of_namespace::Mode;
        let mode = request.mode.unwrap_or_default();
        let store = self.broker.store();
        let mut topics = Vec::new();
        for (domain, other) in [("persistent", Mode::NonPersistent), ("non-persistent", Mode::Persistent)] {
            if mode != other as i32 {
                topics.extend(store.names(&format!("{domain}://{}/", request.namespace)).cloned());
            }
        }
        topics
    }

    fn stats(&mut self, consumer_id: u64, request_id: u64) -> BaseCommand {
        let response = self.with_subscription(consumer_id, |topic, subscription| {
            let backlog = subscription.backlog(topic.end());
            let consumer = subscription.consumer.as_ref();
            CommandConsumerStatsResponse {
                request_id,
                consumer_name: consumer.map(|consumer| consumer.name.clone()),
                available_permits: consumer.map(|consumer| consumer.permits),
                unacked_messages: Some(subscription.unacked()),
                blocked_consumer_on_unacked_msgs: Some(false),
                r#type: Some("Exclusive".to_owned()),
                msg_backlog: Some(backlog),
                ..Default::default()
            }
        });
        let missing = || CommandConsumerStatsResponse {
            request_id,
            error_code: Some(ServerError::ConsumerNotFound as i32),
            error_message: Some(no_consumer().1),
            ..Default::default()
        };
        replies::stats(response.unwrap_or_else(missing))
    }

    fn close_producer(&mut self, producer_id: u64) {
        let Some(producer) = self.producers.remove(&producer_id) else { return };
        let mut store = self.broker.store();
        if let Some(topic) = store.existing(&producer.topic) {
            topic.remove_producer(&producer.name);
        }
        store.forget_if_unused(&producer.topic);
    }

    /// Detaches the consumer; a subscription that is not durable, or is to be removed, goes with it.
    fn close_consumer(&mut self, consumer_id: u64, remove: bool) -> Option<()> {
        let reading = self.consumers.remove(&consumer_id)?;
        let mut store = self.broker.store();
        if let Some(topic) = store.existing(&reading.topic)
            && let Some(subscription) = topic.subscriptions.get_mut(&reading.subscription)
            && subscription.consumer.as_ref().is_some_and(|consumer| consumer.link == self.link)
        {
            subscription.consumer = None;
            subscription.rewind();
            if remove || !subscription.durable {
                topic.subscriptions.remove(&reading.subscription);
            }
        }
        store.forget_if_unused(&reading.topic);
        Some(())
    }

    fn with_consumer<T>(&self, consumer_id: u64, act: impl FnOnce(&Topic, &mut Consumer) -> T) -> Option<T> {
        self.with_subscription(consumer_id, |topic, subscription| {
            let consumer = subscription.consumer.as_mut().filter(|consumer| consumer.consumer_id == consumer_id)?;
            Some(act(topic, consumer))
        })?
    }

    /// Acts on the subscription of one of this link's consumers, if there is such a consumer.
    fn with_subscription<T>(&self, consumer_id: u64, act: impl FnOnce(&Topic, &mut Subscription) -> T) -> Option<T> {
        let reading = self.consumers.get(&consumer_id)?;
        let mut store = self.broker.store();
        let topic = store.existing(&reading.topic)?;
        let mut subscription = topic.subscriptions.remove(&reading.subscription)?;
        let result = act(topic, &mut subscription);
        topic.subscriptions.insert(reading.subscription.clone(), subscription);
        Some(result)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for producer_id in self.producers.keys().copied().collect::<Vec<_>>() {
            self.close_producer(producer_id);
        }
        for consumer_id in self.consumers.keys().copied().collect::<Vec<_>>() {
            self.close_consumer(consumer_id, false);
        }
    }
}

/// Where a new subscription starts. Only one that is not durable may name a message: it starts with the entry of that
/// message, as at Apache Pulsar. The entry may be a batch, and clients leave out what they do not want of it.
fn start_position(topic: &Topic, ledger: u64, request: &CommandSubscribe, durable: bool) -> u64 {
    match &request.start_message_id {
        Some(id) if !durable => position_of(topic, ledger, id),
        _ if request.initial_position() == command_subscribe::InitialPosition::Earliest => topic.first(),
        _ => topic.end(),
    }
}

/// The entry that an id names, moved into what the topic holds. Ids of an earlier run of the broker come before
/// everything; those of "earliest" are the largest numbers, or -1, those of "latest" the largest signed ones.
fn position_of(topic: &Topic, ledger: u64, id: &MessageIdData) -> u64 {
    if id.ledger_id == u64::MAX || id.ledger_id < ledger {
        topic.first()
    } else if id.ledger_id > ledger {
        topic.end()
    } else {
        id.entry_id.clamp(topic.first(), topic.end())
    }
}

fn answer(request_id: u64, result: Result<(), Refused>) -> BaseCommand {
    result.map_or_else(|refused| replies::error(request_id, refused), |()| replies::success(request_id))
}

fn no_consumer() -> Refused {
    Refused(ServerError::ConsumerNotFound, "no such consumer on this link".to_owned())
}

fn not_supported(what: &str) -> Refused {
    Refused(ServerError::NotAllowedError, format!("the embedded broker does not support {what}"))
}

fn check_endpoint(open: usize, name: &str) -> Result<(), Refused> {
    if open >= ENDPOINTS_PER_LINK_MAX {
        return Err(Refused(ServerError::TooManyRequests, format!("{open} are open on this link already")));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(Refused(ServerError::NotAllowedError, format!("a name of {} bytes is too long", name.len())));
    }
    Ok(())
}

/// The id to answer a command with that the broker does not know, so that its sender does not wait for a time-out.
fn request_id_of(command: &BaseCommand) -> u64 {
    let ids = [
        command.new_txn.as_ref().map(|request| request.request_id),
        command.add_partition_to_txn.as_ref().map(|request| request.request_id),
        command.add_subscription_to_txn.as_ref().map(|request| request.request_id),
        command.end_txn.as_ref().map(|request| request.request_id),
        command.end_txn_on_partition.as_ref().map(|request| request.request_id),
        command.end_txn_on_subscription.as_ref().map(|request| request.request_id),
        command.tc_client_connect_request.as_ref().map(|request| request.request_id),
    ];
    ids.into_iter().flatten().next().unwrap_or(replies::NO_REQUEST)
}
