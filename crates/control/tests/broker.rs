//! A broker through the `pulsar` crate: what holds for the embedded one and for Apache Pulsar.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::time::Duration;

use common::client::*;
use common::*;
use futures::StreamExt;
use pulsar::ConsumerOptions;
use pulsar::message::proto::MessageIdData;
use tokio::time::timeout;

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
    let broker = test_broker();
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
