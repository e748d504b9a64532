//! The embedded broker by raw bytes: what a client sends that is wrong, half, or not Pulsar at all.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Write;
use std::time::{Duration, Instant};

use common::raw::*;
use common::*;
use gradwire_control::{BrokerConfig, EmbeddedBroker};
use pulsar::message::Payload;
use pulsar::message::proto::{
    BaseCommand, CommandCloseConsumer, CommandFlow, CommandGetOrCreateSchema, CommandGetSchema, CommandLookupTopic,
    CommandNewTxn, CommandProducer, CommandSend, CommandSubscribe, MessageMetadata, Schema, ServerError,
    base_command::Type,
};

#[test]
fn garbage_costs_the_sender_its_link_only() {
    let broker = embedded_broker();
    let mut good = Raw::connected(&broker);
    let frames: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 64],
        &[0; 64],
        b"\0\0\0\x08\0\0\0\x04abcd",
        b"\0\0\0\x10\0\0\xff\xffabcdabcdabcd",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ];
    for garbage in frames {
        for connected in [false, true] {
            let mut bad = if connected { Raw::connected(&broker) } else { Raw::open(&broker) };
            bad.stream.write_all(garbage).unwrap();
            // What follows is never looked at.
            let _ = bad.stream.write_all(&bytes(ping(), None));
            assert!(bad.hear().is_none(), "{garbage:?} was answered");
        }
    }
    assert!(good.ask(ping()).pong.is_some());
}

#[test]
fn before_connect_nothing_is_answered() {
    let broker = embedded_broker();
    for first in [ping(), subscribe("t"), producer("t")] {
        let mut raw = Raw::open(&broker);
        raw.say(first);
        assert!(raw.hear().is_none());
    }
}

#[test]
fn a_wrong_token_gets_an_error_and_the_link_closes() {
    let broker = EmbeddedBroker::start(BrokerConfig { token: Some("right".into()), ..local() }).unwrap();
    for token in [None, Some(""), Some("wrong"), Some("right ")] {
        let mut raw = Raw::open(&broker);
        let error = raw.ask(connect(token)).error.unwrap();
        assert_eq!(error.error, ServerError::AuthenticationError as i32);
        assert!(raw.hear().is_none());
    }
    assert!(Raw::open(&broker).ask(connect(Some("right"))).connected.is_some());
}

#[test]
fn links_that_show_no_token_are_bounded_in_number_size_and_time() {
    let config = BrokerConfig { pending_links_max: 8, connect_timeout: Duration::from_millis(500), ..local() };
    let broker = EmbeddedBroker::start(config).unwrap();
    // A frame that would be fine later is too large now.
    let mut large = Raw::open(&broker);
    large.stream.write_all(&(64_u32 << 10).to_be_bytes()).unwrap();
    large.stream.write_all(&[0; 4]).unwrap();
    assert!(large.hear().is_none());
    let started = Instant::now();
    let mut idle: Vec<_> = (0..40).map(|_| Raw::open(&broker)).collect();
    for raw in &mut idle {
        assert!(raw.hear().is_none());
    }
    assert!(started.elapsed() < PATIENCE);
    // Their places are free again.
    eventually("a place", || {
        let mut raw = Raw::open(&broker);
        raw.stream.write_all(&bytes(connect(None), None)).ok()?;
        raw.hear()
    });
}

#[test]
fn a_frame_may_come_byte_by_byte() {
    let broker = embedded_broker();
    let mut raw = Raw::open(&broker);
    for byte in bytes(connect(None), None) {
        raw.stream.write_all(&[byte]).unwrap();
    }
    assert!(raw.hear().unwrap().command.connected.is_some());
}

#[test]
fn many_idle_links_disturb_nobody() {
    let broker = embedded_broker();
    let mut idle: Vec<_> = (0..300).map(|_| Raw::connected(&broker)).collect();
    assert!(Raw::connected(&broker).ask(ping()).pong.is_some());
    assert!(idle[299].ask(ping()).pong.is_some());
}

#[test]
fn a_silent_client_is_asked_and_then_given_up() {
    let config = BrokerConfig { keep_alive: Duration::from_millis(100), ..local() };
    let broker = EmbeddedBroker::start(config).unwrap();
    let mut raw = Raw::connected(&broker);
    assert!(raw.hear().unwrap().command.ping.is_some());
    assert!(raw.ask(ping()).pong.is_some(), "any command is a sign of life");
    assert!(raw.hear().unwrap().command.ping.is_some());
    assert!(raw.hear().is_none());
}

#[test]
fn permits_bound_what_is_sent_and_messages_pass_unchanged() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    assert!(raw.ask(producer("t")).producer_success.is_some());
    for sequence_id in 0..5 {
        raw.stream.write_all(&send(sequence_id, vec![sequence_id as u8; 3])).unwrap();
        let receipt = raw.hear().unwrap().command.send_receipt.unwrap();
        assert_eq!((receipt.sequence_id, receipt.message_id.unwrap().entry_id), (sequence_id, sequence_id));
    }
    assert!(raw.ask(subscribe("t")).success.is_some());
    let flow = CommandFlow { consumer_id: 3, message_permits: 2 };
    raw.say(BaseCommand { flow: Some(flow), ..command(Type::Flow) });
    for number in 0..2 {
        let message = raw.hear().unwrap();
        assert_eq!(message.command.message.unwrap().message_id.entry_id, number);
        assert_eq!(message.payload.unwrap().data, vec![number as u8; 3]);
    }
    // No third one: the next thing that is heard is the answer to this.
    assert!(raw.ask(ping()).pong.is_some());
    let close = CommandCloseConsumer { consumer_id: 3, request_id: 9 };
    let closed = raw.ask(BaseCommand { close_consumer: Some(close), ..command(Type::CloseConsumer) });
    assert_eq!(closed.success.unwrap().request_id, 9);
}

#[test]
fn a_client_that_reads_nothing_holds_no_memory_and_gets_everything_later() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    assert!(raw.ask(producer("t")).producer_success.is_some());
    for sequence_id in 0..30 {
        raw.stream.write_all(&send(sequence_id, vec![7; 1 << 20])).unwrap();
        assert!(raw.hear().unwrap().command.send_receipt.is_some());
    }
    let mut slow = Raw::connected(&broker);
    assert!(slow.ask(subscribe("t")).success.is_some());
    let flow = CommandFlow { consumer_id: 3, message_permits: 1000 };
    slow.say(BaseCommand { flow: Some(flow), ..command(Type::Flow) });
    // Others are served meanwhile.
    assert!(raw.ask(ping()).pong.is_some());
    for number in 0..30 {
        assert_eq!(slow.hear().unwrap().command.message.unwrap().message_id.entry_id, number);
    }
}

#[test]
fn a_message_over_the_limit_is_refused_and_the_link_goes_on() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    assert!(raw.ask(producer("t")).producer_success.is_some());
    raw.stream.write_all(&send(0, vec![0; (5 << 20) + 1])).unwrap();
    let error = raw.hear().unwrap().command.send_error.unwrap();
    assert_eq!((error.sequence_id, error.error), (0, ServerError::NotAllowedError as i32));
    raw.stream.write_all(&send(1, vec![0; 5 << 20])).unwrap();
    assert!(raw.hear().unwrap().command.send_receipt.is_some());
    // A producer that is not there.
    let mut other = Raw::connected(&broker);
    other.stream.write_all(&send(0, vec![0; 1])).unwrap();
    assert!(other.hear().unwrap().command.send_error.is_some());
}

#[test]
fn metadata_over_the_limit_is_refused_and_the_link_goes_on() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    assert!(raw.ask(producer("t")).producer_success.is_some());
    for (sequence_id, payload_bytes) in [(0, 1), (1, 5 << 20)] {
        let metadata = MessageMetadata { partition_key: Some("k".repeat(300 << 10)), ..Default::default() };
        let send = CommandSend { producer_id: 1, sequence_id, ..Default::default() };
        let payload = Payload { metadata, data: vec![0; payload_bytes] };
        raw.stream.write_all(&bytes(BaseCommand { send: Some(send), ..command(Type::Send) }, Some(payload))).unwrap();
        let error = raw.hear().unwrap().command.send_error.unwrap();
        assert_eq!((error.sequence_id, error.error), (sequence_id, ServerError::NotAllowedError as i32));
        assert!(error.message.contains("the limit is 262144"), "{}", error.message);
    }
    raw.stream.write_all(&send(2, vec![0; 1])).unwrap();
    assert!(raw.hear().unwrap().command.send_receipt.is_some());
}

#[test]
fn who_asks_for_much_and_reads_nothing_gets_everything_later() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let schema = Schema { schema_data: vec![7; 120_000], ..Default::default() };
    let create = CommandGetOrCreateSchema { request_id: 1, topic: "t".to_owned(), schema };
    let created = raw.ask(BaseCommand { get_or_create_schema: Some(create), ..command(Type::GetOrCreateSchema) });
    assert_eq!(created.get_or_create_schema_response.unwrap().error_code, None);
    for request_id in 0..500 {
        let get = CommandGetSchema { request_id, topic: "t".to_owned(), ..Default::default() };
        raw.say(BaseCommand { get_schema: Some(get), ..command(Type::GetSchema) });
    }
    // Others are served meanwhile.
    assert!(Raw::connected(&broker).ask(ping()).pong.is_some());
    for request_id in 0..500 {
        assert_eq!(raw.hear().unwrap().command.get_schema_response.unwrap().request_id, request_id);
    }
}

#[test]
fn kinds_that_the_broker_does_not_know_are_refused() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let request = CommandSubscribe { sub_type: 9, ..subscribe("t").subscribe.unwrap() };
    let error = raw.ask(BaseCommand { subscribe: Some(request), ..command(Type::Subscribe) }).error.unwrap();
    assert_eq!(error.error, ServerError::NotAllowedError as i32);
    assert!(error.message.contains("subscription type 9"), "{}", error.message);
    let request = CommandProducer { producer_access_mode: Some(9), ..producer("t").producer.unwrap() };
    let error = raw.ask(BaseCommand { producer: Some(request), ..command(Type::Producer) }).error.unwrap();
    assert_eq!(error.error, ServerError::NotAllowedError as i32);
    assert!(error.message.contains("access mode 9"), "{}", error.message);
}

#[test]
fn what_the_broker_does_not_know_is_answered_with_an_error() {
    let broker = embedded_broker();
    let mut raw = Raw::connected(&broker);
    let txn = CommandNewTxn { request_id: 77, ..Default::default() };
    let error = raw.ask(BaseCommand { new_txn: Some(txn), ..command(Type::NewTxn) }).error.unwrap();
    assert_eq!((error.request_id, error.error), (77, ServerError::NotAllowedError as i32));
    let schema = CommandGetSchema { request_id: 78, topic: "t".to_owned(), ..Default::default() };
    let answer = raw.ask(BaseCommand { get_schema: Some(schema), ..command(Type::GetSchema) });
    assert_eq!(answer.get_schema_response.unwrap().request_id, 78);
    let close = CommandCloseConsumer { consumer_id: 5, request_id: 79 };
    assert!(raw.ask(BaseCommand { close_consumer: Some(close), ..command(Type::CloseConsumer) }).success.is_some());
    let lookup = CommandLookupTopic { topic: "a/b".to_owned(), request_id: 80, ..Default::default() };
    let answer = raw.ask(BaseCommand { lookup_topic: Some(lookup), ..command(Type::Lookup) });
    assert_eq!(answer.lookup_topic_response.unwrap().error, Some(ServerError::InvalidTopicName as i32));
}

#[test]
fn stopping_ends_every_link_promptly() {
    let broker = embedded_broker();
    let mut links: Vec<_> = (0..20).map(|_| Raw::connected(&broker)).collect();
    broker.stop().unwrap();
    for link in &mut links {
        assert!(link.hear().is_none());
    }
}
