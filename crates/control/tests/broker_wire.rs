//! What the `pulsar` crate does not ask for and other clients do, by raw commands against the embedded broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Write;

use common::raw::*;
use common::*;
use gradwire_control::EmbeddedBroker;
use pulsar::message::Payload;
use pulsar::message::proto::command_ack::AckType;
use pulsar::message::proto::command_subscribe::SubType;
use pulsar::message::proto::{
    BaseCommand, CommandAck, CommandFlow, CommandGetOrCreateSchema, CommandGetSchema, CommandGetTopicsOfNamespace,
    CommandLookupTopic, CommandMessage, CommandPartitionedTopicMetadata, CommandProducer,
    CommandRedeliverUnacknowledgedMessages, CommandSeek, CommandSubscribe, CommandUnsubscribe, IntRange, KeySharedMeta,
    KeySharedMode, MessageIdData, MessageMetadata, ProducerAccessMode, Schema, ServerError, base_command::Type, schema,
};

const TOPIC: &str = "persistent://public/default/t";

fn consumer(consumer_id: u64, kind: SubType) -> CommandSubscribe {
    CommandSubscribe {
        topic: TOPIC.to_owned(),
        subscription: "s".to_owned(),
        sub_type: kind as i32,
        consumer_id,
        request_id: 1000 + consumer_id,
        consumer_name: Some(format!("c{consumer_id}")),
        initial_position: Some(1),
        ..Default::default()
    }
}

/// Sends a SUBSCRIBE and returns the error if there is one.
fn subscribe(raw: &mut Raw, request: CommandSubscribe) -> Option<ServerError> {
    let answer = raw.ask(BaseCommand { subscribe: Some(request), ..command(Type::Subscribe) });
    answer.error.map(|error| ServerError::try_from(error.error).unwrap())
}

fn flow(raw: &mut Raw, consumer_id: u64, message_permits: u32) {
    raw.say(BaseCommand { flow: Some(CommandFlow { consumer_id, message_permits }), ..command(Type::Flow) });
}

fn message(raw: &mut Raw) -> CommandMessage {
    raw.hear().unwrap().command.message.expect("a message")
}

/// Nothing else comes: the answer to this is the next thing that is heard.
fn assert_silent(raw: &mut Raw) {
    let next = raw.ask(ping());
    assert!(next.pong.is_some(), "{next:?}");
}

fn ack(raw: &mut Raw, consumer_id: u64, id: MessageIdData, kind: AckType) -> Option<ServerError> {
    let ack = CommandAck {
        consumer_id,
        ack_type: kind as i32,
        message_id: vec![id],
        request_id: Some(77),
        ..Default::default()
    };
    let answer = raw.ask(BaseCommand { ack: Some(ack), ..command(Type::Ack) }).ack_response.unwrap();
    assert_eq!((answer.consumer_id, answer.request_id), (consumer_id, Some(77)));
    answer.error.map(|error| ServerError::try_from(error).unwrap())
}

fn publish(raw: &mut Raw, metadata: MessageMetadata) {
    let send = pulsar::message::proto::CommandSend { producer_id: 1, ..Default::default() };
    let payload = Payload { metadata, data: vec![b'x'; 1200] };
    let frame = bytes(BaseCommand { send: Some(send), ..command(Type::Send) }, Some(payload));
    raw.stream.write_all(&frame).unwrap();
    assert!(raw.hear().unwrap().command.send_receipt.is_some());
}

fn keyed(key: &str) -> MessageMetadata {
    MessageMetadata { partition_key: Some(key.to_owned()), ..Default::default() }
}

fn batch(messages: i32) -> MessageMetadata {
    MessageMetadata { num_messages_in_batch: Some(messages), ..Default::default() }
}

fn sending(broker: &EmbeddedBroker) -> Raw {
    let mut raw = Raw::connected(broker);
    assert!(raw.ask(producer("t")).producer_success.is_some());
    raw
}

#[test]
fn sticky_ranges_are_honoured_and_conflicts_named() {
    let broker = embedded_broker();
    let sticky = |consumer_id, start, end| CommandSubscribe {
        key_shared_meta: Some(KeySharedMeta {
            key_shared_mode: KeySharedMode::Sticky as i32,
            hash_ranges: vec![IntRange { start, end }],
            ..Default::default()
        }),
        ..consumer(consumer_id, SubType::KeyShared)
    };
    let (mut low, mut high, mut sender) = (Raw::connected(&broker), Raw::connected(&broker), sending(&broker));
    assert_eq!(subscribe(&mut low, sticky(1, 0, 30_000)), None);
    assert_eq!(subscribe(&mut high, sticky(2, 30_000, 65_535)), Some(ServerError::ConsumerAssignError));
    assert_eq!(subscribe(&mut high, sticky(2, 30_001, 65_535)), None);
    assert_eq!(subscribe(&mut low, consumer(3, SubType::KeyShared)), Some(ServerError::ConsumerBusy));
    flow(&mut low, 1, 10);
    flow(&mut high, 2, 10);
    for key in ["k0", "k3", "shard-0"] {
        publish(&mut sender, keyed(key));
    }
    assert_eq!(message(&mut low).message_id.entry_id, 0);
    assert_eq!((message(&mut high).message_id.entry_id, message(&mut high).message_id.entry_id), (1, 2));
    assert_silent(&mut low);
}

#[test]
fn a_batch_is_acknowledged_message_by_message() {
    let broker = embedded_broker();
    let (mut raw, mut sender) = (Raw::connected(&broker), sending(&broker));
    assert_eq!(subscribe(&mut raw, consumer(1, SubType::Shared)), None);
    publish(&mut sender, batch(3));
    publish(&mut sender, batch(3));
    flow(&mut raw, 1, 1);
    let first = message(&mut raw);
    assert!(first.ack_set.is_empty() && first.redelivery_count.is_none());
    flow(&mut raw, 1, 2);
    assert_silent(&mut raw);
    let partly = MessageIdData { ack_set: vec![0b110], batch_size: Some(3), ..first.message_id.clone() };
    assert_eq!(ack(&mut raw, 1, partly, AckType::Individual), None);
    // Another consumer gets what is wanted of it.
    let mut other = Raw::connected(&broker);
    assert_eq!(subscribe(&mut other, consumer(2, SubType::Shared)), None);
    flow(&mut other, 2, 10);
    assert_eq!(message(&mut other).message_id.entry_id, 1);
    drop(raw);
    let again = message(&mut other);
    assert_eq!((again.message_id.entry_id, &again.ack_set[..]), (0, &[0b110][..]));
    let rest = MessageIdData { ack_set: vec![0b001], ..again.message_id };
    assert_eq!(ack(&mut other, 2, rest, AckType::Individual), None);
    eventually("the acknowledgement", || (broker.stats().topics[0].subscriptions[0].backlog == 1).then_some(()));
}

#[test]
fn a_batch_of_a_made_up_size_is_refused() {
    let broker = embedded_broker();
    let mut sender = sending(&broker);
    for messages in [1_000, 2_147_483_584] {
        let send = pulsar::message::proto::CommandSend { producer_id: 1, sequence_id: 5, ..Default::default() };
        let payload = Payload { metadata: batch(messages), data: vec![0; 60] };
        sender
            .stream
            .write_all(&bytes(BaseCommand { send: Some(send), ..command(Type::Send) }, Some(payload)))
            .unwrap();
        let error = sender.hear().unwrap().command.send_error.unwrap();
        assert_eq!((error.sequence_id, error.error), (5, ServerError::NotAllowedError as i32));
        assert!(error.message.contains(&format!("{messages} messages")), "{}", error.message);
    }
    // The link goes on, with any number that fits: those of 63 messages in their last word, too.
    let mut raw = Raw::connected(&broker);
    assert_eq!(subscribe(&mut raw, consumer(1, SubType::Shared)), None);
    flow(&mut raw, 1, 1000);
    for messages in [63, 64, 127, 191] {
        publish(&mut sender, batch(messages));
        let partly = MessageIdData { ack_set: vec![5], ..message(&mut raw).message_id };
        assert_eq!(ack(&mut raw, 1, partly, AckType::Individual), None);
    }
}

#[test]
fn acknowledgements_are_answered_when_asked_for() {
    let broker = embedded_broker();
    let (mut raw, mut sender) = (Raw::connected(&broker), sending(&broker));
    assert_eq!(subscribe(&mut raw, consumer(1, SubType::Shared)), None);
    flow(&mut raw, 1, 10);
    publish(&mut sender, keyed("k"));
    let id = message(&mut raw).message_id;
    assert_eq!(ack(&mut raw, 9, id.clone(), AckType::Individual), Some(ServerError::ConsumerNotFound));
    assert_eq!(ack(&mut raw, 1, id.clone(), AckType::Cumulative), Some(ServerError::NotAllowedError));
    assert_eq!(ack(&mut raw, 1, id, AckType::Individual), None);
    assert_eq!(broker.stats().topics[0].subscriptions[0].backlog, 0);
}

#[test]
fn redeliveries_are_counted() {
    let broker = embedded_broker();
    let (mut raw, mut sender) = (Raw::connected(&broker), sending(&broker));
    assert_eq!(subscribe(&mut raw, consumer(1, SubType::Shared)), None);
    flow(&mut raw, 1, 10);
    publish(&mut sender, keyed("k"));
    let id = message(&mut raw).message_id;
    // By id, and all.
    for (expected, message_ids) in [(1, vec![id]), (2, Vec::new())] {
        let redeliver = CommandRedeliverUnacknowledgedMessages { consumer_id: 1, message_ids, consumer_epoch: None };
        let kind = command(Type::RedeliverUnacknowledgedMessages);
        raw.say(BaseCommand { redeliver_unacknowledged_messages: Some(redeliver), ..kind });
        assert_eq!(message(&mut raw).redelivery_count, Some(expected));
    }
}

#[test]
fn failover_consumers_are_told_who_is_active() {
    let broker = embedded_broker();
    let (mut one, mut two) = (Raw::connected(&broker), Raw::connected(&broker));
    assert_eq!(
        subscribe(&mut one, CommandSubscribe { priority_level: Some(1), ..consumer(1, SubType::Failover) }),
        None
    );
    let active = |raw: &mut Raw| {
        let change = raw.hear().unwrap().command.active_consumer_change.unwrap();
        (change.consumer_id, change.is_active())
    };
    assert_eq!(active(&mut one), (1, true));
    assert_eq!(subscribe(&mut two, consumer(2, SubType::Failover)), None);
    assert_eq!((active(&mut one), active(&mut two)), ((1, false), (2, true)));
    drop(two);
    assert_eq!(active(&mut one), (1, true));
}

#[test]
fn a_seek_sends_all_consumers_back_and_starts_over() {
    let broker = embedded_broker();
    let (mut one, mut two, mut sender) = (Raw::connected(&broker), Raw::connected(&broker), sending(&broker));
    assert_eq!(subscribe(&mut one, consumer(1, SubType::Shared)), None);
    assert_eq!(subscribe(&mut two, consumer(2, SubType::Shared)), None);
    flow(&mut one, 1, 10);
    for _ in 0..3 {
        publish(&mut sender, keyed("k"));
    }
    let ids: Vec<_> = (0..3).map(|_| message(&mut one).message_id).collect();
    for id in &ids {
        assert_eq!(ack(&mut one, 1, id.clone(), AckType::Individual), None);
    }
    let seek = CommandSeek { consumer_id: 1, request_id: 5, message_id: Some(ids[1].clone()), ..Default::default() };
    let first = one.ask(BaseCommand { seek: Some(seek), ..command(Type::Seek) });
    assert_eq!(first.close_consumer.unwrap().consumer_id, 1);
    assert_eq!(one.hear().unwrap().command.success.unwrap().request_id, 5);
    assert_eq!(two.hear().unwrap().command.close_consumer.unwrap().consumer_id, 2);
    // It comes back under the same number.
    assert_eq!(subscribe(&mut one, consumer(1, SubType::Shared)), None);
    flow(&mut one, 1, 10);
    assert_eq!((message(&mut one).message_id.entry_id, message(&mut one).message_id.entry_id), (1, 2));
    assert_silent(&mut one);
}

#[test]
fn only_the_last_consumer_may_unsubscribe() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    for consumer_id in [1, 2] {
        assert_eq!(subscribe(&mut raw, consumer(consumer_id, SubType::Shared)), None);
    }
    let unsubscribe = |consumer_id| {
        let unsubscribe = CommandUnsubscribe { consumer_id, request_id: 5 };
        BaseCommand { unsubscribe: Some(unsubscribe), ..command(Type::Unsubscribe) }
    };
    assert_eq!(raw.ask(unsubscribe(1)).error.unwrap().error, ServerError::MetadataError as i32);
    let close = pulsar::message::proto::CommandCloseConsumer { consumer_id: 2, request_id: 6 };
    assert!(raw.ask(BaseCommand { close_consumer: Some(close), ..command(Type::CloseConsumer) }).success.is_some());
    assert!(raw.ask(unsubscribe(1)).success.is_some());
    assert!(broker.stats().topics.is_empty(), "and the topic that was only subscribed to is forgotten");
}

#[test]
fn a_fenced_producer_is_told_and_its_late_messages_are_dropped() {
    let broker = embedded_broker();
    let (mut one, mut two) = (Raw::connected(&broker), Raw::connected(&broker));
    let exclusive = |mode: ProducerAccessMode, topic_epoch| {
        let producer = CommandProducer {
            topic: TOPIC.to_owned(),
            producer_id: 1,
            request_id: 2,
            producer_access_mode: Some(mode as i32),
            topic_epoch,
            ..Default::default()
        };
        BaseCommand { producer: Some(producer), ..command(Type::Producer) }
    };
    let first = one.ask(exclusive(ProducerAccessMode::Exclusive, None)).producer_success.unwrap();
    assert_eq!((first.topic_epoch, first.producer_ready), (Some(0), Some(true)));
    let second = two.ask(exclusive(ProducerAccessMode::ExclusiveWithFencing, None)).producer_success.unwrap();
    assert_eq!(second.topic_epoch, Some(1));
    assert_eq!(one.hear().unwrap().command.close_producer.unwrap().producer_id, 1);
    one.stream.write_all(&send(0, b"late".to_vec())).unwrap();
    assert_silent(&mut one);
    assert_eq!(broker.stats().topics[0].published, 0);
    drop(two);
    eventually("the end of the second", || broker.stats().topics.is_empty().then_some(()));
    // The topic is gone with everything that it knew; while it is there, its epoch counts.
    let mut three = Raw::connected(&broker);
    assert!(three.ask(exclusive(ProducerAccessMode::Exclusive, None)).producer_success.is_some());
    let waiting = one.ask(exclusive(ProducerAccessMode::WaitForExclusive, None)).producer_success.unwrap();
    assert_eq!(waiting.producer_ready, Some(false));
    drop(three);
    let ready = one.hear().unwrap().command.producer_success.unwrap();
    assert_eq!((ready.request_id, ready.producer_ready, ready.topic_epoch), (2, Some(true), Some(1)));
}

#[test]
fn an_epoch_that_the_topic_never_gave_disturbs_no_later_producer() {
    let broker = embedded_broker();
    let exclusive = |topic_epoch| {
        let mode = Some(ProducerAccessMode::Exclusive as i32);
        let producer = CommandProducer { producer_access_mode: mode, topic_epoch, ..producer("t").producer.unwrap() };
        BaseCommand { producer: Some(producer), ..command(Type::Producer) }
    };
    // Somebody holds the topic, so that it knows its epoch.
    let mut holder = Raw::connected(&broker);
    assert_eq!(subscribe(&mut holder, consumer(1, SubType::Shared)), None);
    let mut bad = Raw::connected(&broker);
    assert_eq!(bad.ask(exclusive(Some(u64::MAX))).error.unwrap().error, ServerError::ProducerFenced as i32);
    let mut good = Raw::connected(&broker);
    assert_eq!(good.ask(exclusive(None)).producer_success.unwrap().topic_epoch, Some(0));
}

#[test]
fn schemas_are_kept_and_given_out() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let schema = |kind: schema::Type, data: &str| Schema {
        name: "n".to_owned(),
        schema_data: data.as_bytes().to_vec(),
        r#type: kind as i32,
        ..Default::default()
    };
    let with_schema = |schema| {
        let producer = CommandProducer { schema: Some(schema), ..producer("t").producer.unwrap() };
        BaseCommand { producer: Some(producer), ..command(Type::Producer) }
    };
    let json = schema(schema::Type::Json, "{}");
    let success = raw.ask(with_schema(json.clone())).producer_success.unwrap();
    let mut other = Raw::connected(&broker);
    let error = other.ask(with_schema(schema(schema::Type::String, ""))).error.unwrap();
    assert_eq!(error.error, ServerError::IncompatibleSchema as i32);
    let mut get = CommandGetSchema { request_id: 7, topic: "t".to_owned(), schema_version: success.schema_version };
    let found = raw.ask(BaseCommand { get_schema: Some(get.clone()), ..command(Type::GetSchema) });
    assert_eq!(found.get_schema_response.unwrap().schema, Some(json.clone()));
    get.schema_version = Some(vec![0, 0, 0, 0, 0, 0, 0, 9]);
    let missing = raw.ask(BaseCommand { get_schema: Some(get.clone()), ..command(Type::GetSchema) });
    assert_eq!(missing.get_schema_response.unwrap().error_code, Some(ServerError::TopicNotFound as i32));
    let newer = schema(schema::Type::Json, "{\"a\":1}");
    let create = CommandGetOrCreateSchema { request_id: 8, topic: "t".to_owned(), schema: newer.clone() };
    let created = raw.ask(BaseCommand { get_or_create_schema: Some(create), ..command(Type::GetOrCreateSchema) });
    let version = created.get_or_create_schema_response.unwrap().schema_version;
    get.schema_version = version;
    let found = raw.ask(BaseCommand { get_schema: Some(get), ..command(Type::GetSchema) });
    assert_eq!(found.get_schema_response.unwrap().schema, Some(newer));
    let mismatched =
        CommandSubscribe { schema: Some(schema(schema::Type::String, "")), ..consumer(1, SubType::Shared) };
    assert_eq!(subscribe(&mut raw, mismatched), Some(ServerError::IncompatibleSchema));
    let matching = CommandSubscribe { schema: Some(json), ..consumer(1, SubType::Shared) };
    assert_eq!(subscribe(&mut raw, matching), None);
}

#[test]
fn topics_are_listed_by_namespace_mode_and_pattern() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let names =
        ["persistent://a/b/log-1", "persistent://a/b/log-2", "persistent://a/c/log-1", "non-persistent://a/b/log-3"];
    for (producer_id, topic) in names.into_iter().enumerate() {
        let producer = CommandProducer { producer_id: producer_id as u64, ..producer(topic).producer.unwrap() };
        assert!(
            raw.ask(BaseCommand { producer: Some(producer), ..command(Type::Producer) }).producer_success.is_some()
        );
    }
    let mut list = |mode: i32, pattern: Option<&str>| {
        let get = CommandGetTopicsOfNamespace {
            request_id: 9,
            namespace: "a/b".to_owned(),
            mode: Some(mode),
            topics_pattern: pattern.map(str::to_owned),
            topics_hash: None,
        };
        let answer = raw.ask(BaseCommand { get_topics_of_namespace: Some(get), ..command(Type::GetTopicsOfNamespace) });
        let answer = answer.get_topics_of_namespace_response.unwrap();
        (answer.topics, answer.filtered.unwrap())
    };
    assert_eq!(list(0, None), (vec![names[0].to_owned(), names[1].to_owned()], false));
    assert_eq!(list(1, None), (vec![names[3].to_owned()], false));
    assert_eq!(list(2, Some("persistent://a/b/log-[13]")), (vec![names[0].to_owned(), names[3].to_owned()], true));
    // A pattern that cannot be read is left to the client.
    assert_eq!(list(0, Some("(")), (vec![names[0].to_owned(), names[1].to_owned()], false));
}

#[test]
fn partitions_are_refused_with_what_to_do() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let topic = format!("{TOPIC}-partition-0");
    let refused = |error: Option<i32>, detail: Option<String>| {
        assert_eq!(error, Some(ServerError::NotAllowedError as i32));
        let detail = detail.unwrap();
        assert!(detail.contains("no partitioned topics: use 'persistent://public/default/t'"), "{detail}");
    };
    let lookup = CommandLookupTopic { topic: topic.clone(), request_id: 1, ..Default::default() };
    let answer =
        raw.ask(BaseCommand { lookup_topic: Some(lookup), ..command(Type::Lookup) }).lookup_topic_response.unwrap();
    refused(answer.error, answer.message);
    let metadata = CommandPartitionedTopicMetadata { topic: topic.clone(), request_id: 1, ..Default::default() };
    let answer = raw.ask(BaseCommand { partition_metadata: Some(metadata), ..command(Type::PartitionedMetadata) });
    let answer = answer.partition_metadata_response.unwrap();
    refused(answer.error, answer.message);
    let error = raw.ask(producer(&topic)).error.unwrap();
    refused(Some(error.error), Some(error.message));
}
