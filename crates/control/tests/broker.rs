//! The broker through the `pulsar` crate: what holds for every broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::time::Duration;

use common::*;
use futures::StreamExt;
use gradwire_control::{BrokerConfig, EmbeddedBroker};
use gradwire_proto::FaultKind;
use pulsar::consumer::InitialPosition;
use pulsar::message::proto::MessageIdData;
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{Consumer, ConsumerOptions, OperationRetryOptions, Producer, Pulsar, SubType, TokioExecutor};
use tokio::time::timeout;

type Client = Pulsar<TokioExecutor>;
type Bytes = Vec<u8>;

async fn client(url: &str) -> Client {
    let once = OperationRetryOptions { max_retries: Some(0), ..Default::default() };
    Pulsar::builder(url, TokioExecutor).with_operation_retry_options(once).build().await.expect("a broker")
}

async fn producer(client: &Client, topic: &str) -> Producer<TokioExecutor> {
    let options = pulsar::ProducerOptions { block_queue_if_full: true, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await.expect("a producer")
}

async fn reader(client: &Client, topic: &str, options: ConsumerOptions) -> Reader<Bytes, TokioExecutor> {
    client
        .reader()
        .with_topic(topic)
        .with_subscription(unique("r"))
        .with_options(options)
        .into_reader()
        .await
        .expect("a reader")
}

async fn consumer(
    client: &Client,
    topic: &str,
    subscription: &str,
) -> Result<Consumer<Bytes, TokioExecutor>, pulsar::Error> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription(subscription);
    builder.with_subscription_type(SubType::Exclusive).with_options(options).build().await
}

fn earliest() -> ConsumerOptions {
    ConsumerOptions::default().with_initial_position(InitialPosition::Earliest)
}

async fn send(producer: &mut Producer<TokioExecutor>, text: &str) -> MessageIdData {
    let receipt = producer.send_non_blocking(text.as_bytes()).await.expect("sent").await.expect("a receipt");
    receipt.message_id.expect("an id")
}

async fn read(reader: &mut Reader<Bytes, TokioExecutor>) -> String {
    let message = timeout(PATIENCE, reader.next()).await.expect("in time").expect("open").expect("a message");
    String::from_utf8(message.payload.data).expect("text")
}

async fn take(consumer: &mut Consumer<Bytes, TokioExecutor>) -> pulsar::consumer::Message<Bytes> {
    timeout(PATIENCE, consumer.next()).await.expect("in time").expect("open").expect("a message")
}

#[tokio::test]
async fn a_reader_gets_everything_in_order_and_what_comes_later() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("order"));
    let mut producer = producer(&client, &topic).await;
    for number in 0..1500 {
        drop(producer.send_non_blocking(number.to_string()).await.unwrap());
    }
    // More than the reader's permits at once.
    let mut reader = reader(&client, &topic, earliest()).await;
    for number in 0..1500 {
        assert_eq!(read(&mut reader).await, number.to_string());
    }
    let id = send(&mut producer, "later").await;
    assert_eq!(read(&mut reader).await, "later");
    let last = reader.get_last_message_id().await.unwrap();
    assert_eq!((last.ledger_id, last.entry_id), (id.ledger_id, id.entry_id));
}

#[tokio::test]
async fn readers_start_where_they_are_told_to() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("start"));
    let mut producer = producer(&client, &topic).await;
    send(&mut producer, "a").await;
    let b = send(&mut producer, "b").await;
    send(&mut producer, "c").await;
    // A reader that starts on a message gets that one first.
    let mut from_b = reader(&client, &topic, ConsumerOptions::default().starting_on_message(b)).await;
    assert_eq!([read(&mut from_b).await, read(&mut from_b).await], ["b", "c"]);
    let mut latest = reader(&client, &topic, ConsumerOptions::default()).await;
    send(&mut producer, "d").await;
    assert_eq!(read(&mut latest).await, "d");
}

#[tokio::test]
async fn seeking_goes_to_an_id_a_time_or_an_end() {
    let broker = embedded_broker();
    let (client, topic) = (client(broker.url()).await, unique("seek"));
    let mut producer = producer(&client, &topic).await;
    let mut ids = Vec::new();
    for text in ["a", "b", "c"] {
        ids.push(send(&mut producer, text).await);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let mut reader = reader(&client, &topic, earliest()).await;
    let mut times = Vec::new();
    for _ in 0..3 {
        times.push(timeout(PATIENCE, reader.next()).await.unwrap().unwrap().unwrap().metadata().publish_time);
    }
    let id = |ledger_id, entry_id| MessageIdData { ledger_id, entry_id, ..Default::default() };
    let first = id(u64::MAX, u64::MAX);
    let last = id(i64::MAX as u64, i64::MAX as u64);
    reader.seek(Some(ids[1].clone()), None).await.unwrap();
    assert_eq!([read(&mut reader).await, read(&mut reader).await], ["b", "c"]);
    reader.seek(None, Some(times[2])).await.unwrap();
    assert_eq!(read(&mut reader).await, "c");
    reader.seek(Some(first), None).await.unwrap();
    assert_eq!([read(&mut reader).await, read(&mut reader).await, read(&mut reader).await], ["a", "b", "c"]);
    reader.seek(Some(last), None).await.unwrap();
    send(&mut producer, "d").await;
    assert_eq!(read(&mut reader).await, "d");
}

#[tokio::test]
async fn a_durable_subscription_goes_on_behind_what_was_acknowledged() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("durable"));
    let mut producer = producer(&client, &topic).await;
    let mut first = consumer(&client, &topic, "s").await.unwrap();
    for text in ["a", "b", "c", "d"] {
        send(&mut producer, text).await;
    }
    let mut messages = Vec::new();
    for _ in 0..4 {
        messages.push(take(&mut first).await);
    }
    first.cumulative_ack(&messages[1]).await.unwrap();
    first.ack(&messages[3]).await.unwrap();
    // Another consumer may not come while this one is there.
    let error = consumer(&client, &topic, "s").await.err().expect("busy").to_string();
    assert!(error.contains("ConsumerBusy"), "{error}");
    first.close().await.unwrap();
    drop(first);
    let mut second = consumer(&client, &topic, "s").await.unwrap();
    assert_eq!(take(&mut second).await.payload.data, b"c");
    second.unsubscribe().await.unwrap();
    drop(second);
    let mut third = consumer(&client, &topic, "s").await.unwrap();
    assert_eq!(take(&mut third).await.payload.data, b"a", "the subscription was forgotten");
}

#[tokio::test]
async fn unacknowledged_messages_come_again_when_asked_for() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("nack"));
    let mut producer = producer(&client, &topic).await;
    let mut consumer = consumer(&client, &topic, "s").await.unwrap();
    send(&mut producer, "a").await;
    send(&mut producer, "b").await;
    let a = take(&mut consumer).await;
    let b = take(&mut consumer).await;
    consumer.ack(&a).await.unwrap();
    consumer.nack(&b).await.unwrap();
    assert_eq!(take(&mut consumer).await.payload.data, b"b");
}

#[tokio::test]
async fn batches_and_compression_arrive_whole() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("batch"));
    let options = pulsar::ProducerOptions {
        batch_size: Some(40),
        block_queue_if_full: true,
        compression: Some(pulsar::compression::Compression::Zstd(Default::default())),
        ..Default::default()
    };
    let mut producer = client.producer().with_topic(&topic).with_options(options).build().await.unwrap();
    let mut receipts = Vec::new();
    for number in 0..2000 {
        receipts.push(producer.send_non_blocking(number.to_string()).await.unwrap());
    }
    for receipt in receipts {
        timeout(PATIENCE, receipt).await.unwrap().unwrap();
    }
    let mut reader = reader(&client, &topic, earliest()).await;
    for number in 0..2000 {
        assert_eq!(read(&mut reader).await, number.to_string());
    }
}

#[tokio::test]
async fn a_producer_name_is_taken_by_one_at_a_time() {
    let broker = test_broker();
    let (client, topic, name) = (client(broker.url()).await, unique("name"), unique("p"));
    let open = || client.producer().with_topic(&topic).with_name(&name).build();
    let mut first = open().await.unwrap();
    let error = open().await.err().expect("taken").to_string();
    assert!(error.contains("ProducerBusy"), "{error}");
    first.close().await.unwrap();
    open().await.unwrap();
}

#[tokio::test]
async fn topics_of_a_namespace_are_listed() {
    use pulsar::message::proto::command_get_topics_of_namespace::Mode;
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("listed"));
    let _producer = producer(&client, &topic).await;
    let topics = client.get_topics_of_namespace("public/default".to_owned(), Mode::Persistent).await.unwrap();
    assert!(topics.contains(&format!("persistent://public/default/{topic}")), "{topics:?}");
}

#[tokio::test]
async fn a_full_topic_refuses_and_keeps_what_it_has() {
    let broker = EmbeddedBroker::start(BrokerConfig { topic_bytes_max: 100_000, ..local() }).unwrap();
    let client = client(broker.url()).await;
    let (log, versions) = (unique("full"), format!("{}-versions", unique("full")));
    let mut to_log = producer(&client, &log).await;
    let mut to_versions = producer(&client, &versions).await;
    let message = |number: u32| Message { payload: vec![number as u8; 10_000], ..Default::default() };
    let mut taken = 0;
    let refused = loop {
        match to_log.send_non_blocking(message(taken)).await.unwrap().await {
            Ok(_) => taken += 1,
            Err(error) => break format!("{error:?}"),
        }
        assert!(taken < 20, "nothing bounds the topic");
    };
    assert!(refused.contains("is full"), "{refused}");
    assert_eq!(taken, 9);
    let mut reader_of_log = reader(&client, &log, earliest()).await;
    assert_eq!(timeout(PATIENCE, reader_of_log.next()).await.unwrap().unwrap().unwrap().payload.data[0], 0);
    // Of version records the latest count.
    for number in 0..20 {
        to_versions.send_non_blocking(message(number)).await.unwrap().await.unwrap();
    }
    let mut reader_of_versions = reader(&client, &versions, earliest()).await;
    assert_eq!(timeout(PATIENCE, reader_of_versions.next()).await.unwrap().unwrap().unwrap().payload.data[0], 11);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let broker = embedded_broker();
    let fault = EmbeddedBroker::start(BrokerConfig::new(broker.address())).expect_err("in use");
    assert_eq!(fault.kind, FaultKind::AddressInUse);
    assert!(fault.detail.contains(&broker.address().to_string()), "{fault}");
    let address = broker.address();
    broker.stop();
    // The port is free again at once.
    EmbeddedBroker::start(BrokerConfig::new(address)).expect("free");
}
