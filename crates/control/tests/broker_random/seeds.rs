//! What a client may say: one content of a frame for each command that the broker knows.

use bytes::BytesMut;
use pulsar::message::proto::{
    BaseCommand, CommandAck, CommandAuthResponse, CommandCloseConsumer, CommandCloseProducer, CommandConsumerStats,
    CommandFlow, CommandGetLastMessageId, CommandGetOrCreateSchema, CommandGetSchema, CommandGetTopicsOfNamespace,
    CommandLookupTopic, CommandNewTxn, CommandPartitionedTopicMetadata, CommandPing, CommandPong, CommandProducer,
    CommandRedeliverUnacknowledgedMessages, CommandSeek, CommandSend, CommandSubscribe, CommandUnsubscribe, KeyValue,
    MessageIdData, MessageMetadata, Schema, base_command::Type, command_subscribe::SubType,
};
use pulsar::message::{Codec, Message, Payload};
use tokio_util::codec::Encoder;

/// All of them, in an order in which they make sense.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![plain(Type::Ping, |command| command.ping = Some(CommandPing {}))];
    seeds.extend(asking());
    seeds.extend(producing());
    seeds.extend(consuming());
    seeds
}

fn topic(number: u64) -> String {
    ["a", "b-versions", "non-persistent://public/default/c"][number as usize % 3].to_owned()
}

fn asking() -> Vec<Vec<u8>> {
    let (request_id, namespace) = (1, "public/default".to_owned());
    vec![
        plain(Type::Pong, |command| command.pong = Some(CommandPong {})),
        plain(Type::PartitionedMetadata, |command| {
            command.partition_metadata =
                Some(CommandPartitionedTopicMetadata { topic: topic(0), request_id, ..Default::default() });
        }),
        plain(Type::Lookup, |command| {
            command.lookup_topic = Some(CommandLookupTopic { topic: topic(1), request_id, ..Default::default() });
        }),
        plain(Type::GetTopicsOfNamespace, |command| {
            command.get_topics_of_namespace =
                Some(CommandGetTopicsOfNamespace { request_id, namespace, ..Default::default() });
        }),
        plain(Type::GetSchema, |command| {
            command.get_schema = Some(CommandGetSchema { request_id, topic: topic(0), schema_version: None });
        }),
        plain(Type::GetOrCreateSchema, |command| {
            command.get_or_create_schema =
                Some(CommandGetOrCreateSchema { request_id, topic: topic(0), schema: schema() });
        }),
        plain(Type::NewTxn, |command| {
            command.new_txn = Some(CommandNewTxn { request_id, ..Default::default() });
        }),
        plain(Type::AuthResponse, |command| command.auth_response = Some(CommandAuthResponse::default())),
    ]
}

fn producing() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for producer_id in 0..3 {
        seeds.push(plain(Type::Producer, |command| {
            command.producer = Some(CommandProducer {
                topic: topic(producer_id),
                producer_id,
                request_id: 2,
                producer_name: Some(format!("p{producer_id}")),
                producer_access_mode: Some(producer_id as i32),
                ..Default::default()
            });
        }));
        for sequence_id in 0..4 {
            let metadata = MessageMetadata {
                producer_name: format!("p{producer_id}"),
                sequence_id,
                publish_time: 1,
                partition_key: Some(format!("k{sequence_id}")),
                num_messages_in_batch: Some(3).filter(|_| sequence_id == 3),
                properties: vec![KeyValue { key: "a".to_owned(), value: "b".to_owned() }],
                ..Default::default()
            };
            let payload = Payload { metadata, data: vec![7; 50 * sequence_id as usize] };
            let send = CommandSend { producer_id, sequence_id, num_messages: Some(1), ..Default::default() };
            let command = BaseCommand { r#type: Type::Send as i32, send: Some(send), ..Default::default() };
            seeds.push(content(command, Some(payload)));
        }
    }
    seeds.push(plain(Type::CloseProducer, |command| {
        command.close_producer = Some(CommandCloseProducer { producer_id: 1, request_id: 3 });
    }));
    seeds
}

fn consuming() -> Vec<Vec<u8>> {
    let (mut seeds, request_id) = (Vec::new(), 4);
    let kinds = [SubType::Exclusive, SubType::Shared, SubType::Failover, SubType::KeyShared];
    for (consumer_id, kind) in (0..).zip(kinds) {
        let message_id = MessageIdData { ledger_id: u64::MAX, entry_id: consumer_id, ..Default::default() };
        seeds.push(plain(Type::Subscribe, |command| {
            command.subscribe = Some(CommandSubscribe {
                topic: topic(consumer_id),
                subscription: format!("s{consumer_id}"),
                sub_type: kind as i32,
                consumer_id,
                request_id,
                initial_position: Some(1),
                durable: Some(consumer_id % 2 == 0),
                read_compacted: Some(consumer_id == 0),
                ..Default::default()
            });
        }));
        seeds.push(plain(Type::Flow, |command| {
            command.flow = Some(CommandFlow { consumer_id, message_permits: 5 });
        }));
        seeds.push(plain(Type::Ack, |command| {
            command.ack = Some(CommandAck {
                consumer_id,
                ack_type: i32::from(consumer_id == 0),
                message_id: vec![message_id.clone()],
                request_id: Some(request_id),
                ..Default::default()
            });
        }));
        seeds.push(plain(Type::RedeliverUnacknowledgedMessages, |command| {
            command.redeliver_unacknowledged_messages =
                Some(CommandRedeliverUnacknowledgedMessages { consumer_id, ..Default::default() });
        }));
        seeds.push(plain(Type::ConsumerStats, |command| {
            command.consumer_stats = Some(CommandConsumerStats { consumer_id, request_id });
        }));
        seeds.push(plain(Type::GetLastMessageId, |command| {
            command.get_last_message_id = Some(CommandGetLastMessageId { consumer_id, request_id });
        }));
        seeds.push(plain(Type::Seek, |command| {
            let message_id = Some(message_id);
            command.seek = Some(CommandSeek { consumer_id, request_id, message_id, ..Default::default() });
        }));
    }
    seeds.push(plain(Type::Unsubscribe, |command| {
        command.unsubscribe = Some(CommandUnsubscribe { consumer_id: 1, request_id });
    }));
    seeds.push(plain(Type::CloseConsumer, |command| {
        command.close_consumer = Some(CommandCloseConsumer { consumer_id: 2, request_id });
    }));
    seeds
}

fn schema() -> Schema {
    Schema { name: "s".to_owned(), r#type: 1, schema_data: Vec::new(), properties: Vec::new() }
}

fn plain(kind: Type, fill: impl FnOnce(&mut BaseCommand)) -> Vec<u8> {
    let mut command = BaseCommand { r#type: kind as i32, ..Default::default() };
    fill(&mut command);
    content(command, None)
}

/// A frame without its size.
fn content(command: BaseCommand, payload: Option<Payload>) -> Vec<u8> {
    let mut out = BytesMut::new();
    Codec.encode(Message { command, payload }, &mut out).expect("a frame");
    out[4..].to_vec()
}
