//! The embedded broker with a data directory, through the `pulsar` crate: what is there after a stop, and after a
//! crash at any moment.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::fs;
use std::path::Path;

use common::*;
use futures::StreamExt;
use gradwire_control::broker::TopicPolicy;
use gradwire_control::{BrokerConfig, EmbeddedBroker};
use gradwire_proto::FaultKind;
use pulsar::consumer::InitialPosition;
use pulsar::message::proto::{MessageIdData, Schema, command_get_topics_of_namespace::Mode, schema};
use pulsar::producer::Message;
use pulsar::{Consumer, ConsumerOptions, Producer, ProducerOptions, Pulsar, SubType, TokioExecutor};
use tempfile::TempDir;
use tokio::time::timeout;

type Client = Pulsar<TokioExecutor>;

fn config(directory: &Path) -> BrokerConfig {
    BrokerConfig { data_dir: Some(directory.to_owned()), ..local() }
}

fn start(directory: &TempDir) -> EmbeddedBroker {
    EmbeddedBroker::start(config(directory.path())).unwrap_or_else(|fault| panic!("{fault}"))
}

/// A copy of the directory of a broker that runs: what a crash at this moment would leave.
fn crashed(directory: &TempDir) -> TempDir {
    // A checkpoint may run meanwhile: the journal is removed only after the table is written, so journal first, and
    // again if it was gone by then.
    loop {
        let copy = tempfile::tempdir().unwrap();
        let mut names: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let copied =
            names.iter().try_for_each(|name| fs::copy(directory.path().join(name), copy.path().join(name)).map(drop));
        let mut after: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        after.sort();
        if copied.is_ok() && names == after {
            return copy;
        }
    }
}

async fn client(broker: &EmbeddedBroker) -> Client {
    Pulsar::builder(broker.url(), TokioExecutor).build().await.expect("a broker")
}

async fn producer(client: &Client, topic: &str) -> Producer<TokioExecutor> {
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await.expect("a producer")
}

async fn send(producer: &mut Producer<TokioExecutor>, text: &str) -> MessageIdData {
    let receipt = producer.send_non_blocking(text.as_bytes()).await.expect("sent").await.expect("a receipt");
    receipt.message_id.expect("an id")
}

async fn consumer(client: &Client, topic: &str, name: &str, kind: SubType) -> Consumer<Vec<u8>, TokioExecutor> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription(name);
    builder.with_subscription_type(kind).with_options(options).build().await.expect("a consumer")
}

async fn take(consumer: &mut Consumer<Vec<u8>, TokioExecutor>) -> pulsar::consumer::Message<Vec<u8>> {
    timeout(PATIENCE, consumer.next()).await.expect("in time").expect("open").expect("a message")
}

/// Everything that is on a topic, from its head on.
async fn everything(client: &Client, topic: &str) -> Vec<(MessageIdData, String)> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let mut reader: pulsar::reader::Reader<Vec<u8>, _> =
        client.reader().with_topic(topic).with_options(options).into_reader().await.expect("a reader");
    let last = reader.get_last_message_id().await.expect("the last id");
    let mut found: Vec<(MessageIdData, String)> = Vec::new();
    while last.entry_id != u64::MAX && found.last().is_none_or(|(id, _)| id.entry_id < last.entry_id) {
        let message = timeout(PATIENCE, reader.next()).await.expect("in time").expect("open").expect("a message");
        found.push((message.message_id.id.clone(), String::from_utf8(message.payload.data).expect("text")));
    }
    found
}

#[tokio::test]
async fn messages_and_their_ids_are_there_after_a_stop_and_after_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let broker = start(&directory);
    let client_1 = client(&broker).await;
    let mut producer_1 = producer(&client_1, "t").await;
    let mut sent = Vec::new();
    for number in 0..500 {
        let text = format!("{number} {}", "x".repeat(number * 7 % 3000));
        sent.push((send(&mut producer_1, &text).await, text));
        if number % 150 == 149 {
            let copy = crashed(&directory);
            let other = start(&copy);
            assert_eq!(everything(&client(&other).await, "t").await, sent);
        }
    }
    broker.stop().unwrap();
    for round in 0..2 {
        let broker = start(&directory);
        let client = client(&broker).await;
        assert_eq!(everything(&client, "t").await, sent);
        let id = send(&mut producer(&client, "t").await, "more").await;
        assert_eq!((id.ledger_id, id.entry_id), (sent[0].0.ledger_id, 500 + round));
        sent.push((id, "more".to_owned()));
        // A new topic's ids are above all that were there.
        let other = send(&mut producer(&client, &format!("other-{round}")).await, "x").await;
        assert!(other.ledger_id > sent[0].0.ledger_id);
    }
}

#[tokio::test]
async fn topics_with_the_longest_names_stay_apart_and_longer_ones_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let longest = "x".repeat(512 - "persistent://public/default/".len() - 1);
    let names = ["a", "b"].map(|end| format!("{longest}{end}"));
    let broker = start(&directory);
    let once = pulsar::OperationRetryOptions { max_retries: Some(0), ..Default::default() };
    let client_1 =
        Pulsar::builder(broker.url(), TokioExecutor).with_operation_retry_options(once).build().await.unwrap();
    for name in &names {
        send(&mut producer(&client_1, name).await, &name[longest.len()..]).await;
        let refused = client_1.producer().with_topic(format!("{name}c")).build().await;
        assert!(refused.is_err());
    }
    broker.stop().unwrap();
    let broker = start(&directory);
    let client_2 = client(&broker).await;
    for name in &names {
        let found = everything(&client_2, name).await;
        assert_eq!(found.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), [&name[longest.len()..]]);
    }
}

#[tokio::test]
async fn nobody_sees_a_message_that_a_crash_would_take_back() {
    let directory = tempfile::tempdir().unwrap();
    let broker = start(&directory);
    let client_1 = client(&broker).await;
    let mut consumer_1 = consumer(&client_1, "t", "s", SubType::Exclusive).await;
    let mut producer_1 = producer(&client_1, "t").await;
    for number in 0..20 {
        drop(producer_1.send_non_blocking(number.to_string()).await.unwrap());
        let seen = take(&mut consumer_1).await;
        let other = start(&crashed(&directory));
        let kept = everything(&client(&other).await, "t").await;
        assert!(kept.iter().any(|(id, _)| id.entry_id == seen.message_id.id.entry_id), "after {number}");
    }
}

// With a thread for the client, which acknowledges in the background.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledgements_are_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let broker = start(&directory);
    let client_1 = client(&broker).await;
    let mut shared = consumer(&client_1, "t", "shared", SubType::Shared).await;
    let mut exclusive = consumer(&client_1, "t", "exclusive", SubType::Exclusive).await;
    let _untouched = consumer(&client_1, "t", "untouched", SubType::Failover).await;
    let mut producer_1 = producer(&client_1, "t").await;
    for number in 0..30 {
        send(&mut producer_1, &number.to_string()).await;
    }
    for number in 0..30 {
        let message = take(&mut shared).await;
        if number % 3 == 1 {
            shared.ack(&message).await.unwrap();
        }
        let message = take(&mut exclusive).await;
        if number == 11 {
            exclusive.cumulative_ack(&message).await.unwrap();
        }
    }
    let backlogs = |broker: &EmbeddedBroker| -> Vec<(String, u64)> {
        let topic = broker.stats().topics.into_iter().find(|topic| topic.name.ends_with("/t")).unwrap();
        topic.subscriptions.into_iter().map(|found| (found.name, found.backlog)).collect()
    };
    let expected = [("exclusive".to_owned(), 18), ("shared".to_owned(), 20), ("untouched".to_owned(), 30)];
    eventually("the acknowledgements", || (backlogs(&broker) == expected).then_some(()));
    // They may lag behind in a crash, but not for long.
    eventually("kept acknowledgements", || {
        let copy = crashed(&directory);
        let other = start(&copy);
        (backlogs(&other) == expected).then_some(())
    });
    broker.stop().unwrap();
    let broker = start(&directory);
    assert_eq!(backlogs(&broker), expected);
    let client_2 = client(&broker).await;
    let mut shared = consumer(&client_2, "t", "shared", SubType::Shared).await;
    for number in (0..30).filter(|number| number % 3 != 1) {
        assert_eq!(take(&mut shared).await.payload.data, number.to_string().into_bytes());
    }
    // A subscription that is ended does not come back.
    let mut untouched = consumer(&client_2, "t", "untouched", SubType::Failover).await;
    untouched.unsubscribe().await.unwrap();
    eventually("the end", || (backlogs(&broker).len() == 2).then_some(()));
    broker.stop().unwrap();
    assert_eq!(backlogs(&start(&directory)).len(), 2);
}

#[tokio::test]
async fn schemas_are_there_after_a_restart_and_empty_or_volatile_topics_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let schema = Schema {
        name: "record".to_owned(),
        schema_data: br#"{"type":"record","name":"r","fields":[]}"#.to_vec(),
        r#type: schema::Type::Json as i32,
        properties: Vec::new(),
    };
    let open = async |broker: &EmbeddedBroker, kind: schema::Type| {
        let options =
            ProducerOptions { schema: Some(Schema { r#type: kind as i32, ..schema.clone() }), ..Default::default() };
        let once = pulsar::OperationRetryOptions { max_retries: Some(0), ..Default::default() };
        let client = Pulsar::builder(broker.url(), TokioExecutor).with_operation_retry_options(once).build();
        let client = client.await.unwrap();
        client.producer().with_topic("with-schema").with_options(options).build().await.map(drop)
    };
    let broker = start(&directory);
    open(&broker, schema::Type::Json).await.unwrap();
    let client_1 = client(&broker).await;
    send(&mut producer(&client_1, "non-persistent://public/default/volatile").await, "x").await;
    drop(producer(&client_1, "empty").await);
    broker.stop().unwrap();
    let broker = start(&directory);
    let client_2 = client(&broker).await;
    let topics = client_2.get_topics_of_namespace("public/default".to_owned(), Mode::All).await.unwrap();
    assert_eq!(topics, ["persistent://public/default/with-schema"]);
    assert!(open(&broker, schema::Type::String).await.is_err());
    open(&broker, schema::Type::Json).await.unwrap();
}

#[tokio::test]
async fn what_was_dropped_or_compacted_does_not_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let policies = vec![
        TopicPolicy { compact: true, ..TopicPolicy::for_suffix("-compacted") },
        TopicPolicy { drop_oldest: true, ..TopicPolicy::for_suffix("-latest") },
    ];
    let config = BrokerConfig { topic_bytes_max: 1 << 20, policies, ..config(directory.path()) };
    let broker = EmbeddedBroker::start(config.clone()).unwrap();
    let client_1 = client(&broker).await;
    for topic in ["t-compacted", "t-latest"] {
        let mut producer = producer(&client_1, topic).await;
        for number in 0..3000_u32 {
            let message = Message {
                payload: format!("{number} {}", "x".repeat(1000)).into_bytes(),
                partition_key: Some((number % 10).to_string()),
                ..Default::default()
            };
            drop(producer.send_non_blocking(message).await.unwrap());
        }
        send(&mut producer, "last").await;
    }
    let held = |broker: &EmbeddedBroker| -> Vec<(String, usize, usize)> {
        broker.stats().topics.into_iter().map(|topic| (topic.name, topic.entries, topic.bytes)).collect()
    };
    let (before, last) = (held(&broker), everything(&client_1, "t-latest").await);
    assert!(before.iter().all(|(_, entries, bytes)| *entries < 1500 && *bytes <= 1 << 20), "{before:?}");
    broker.stop().unwrap();
    let broker = EmbeddedBroker::start(config).unwrap();
    assert_eq!(held(&broker), before);
    assert_eq!(everything(&client(&broker).await, "t-latest").await, last);
}

#[tokio::test]
async fn the_limits_hold_with_a_data_directory() {
    let directory = tempfile::tempdir().unwrap();
    let config = BrokerConfig { topic_bytes_max: 100_000, ..config(directory.path()) };
    let broker = EmbeddedBroker::start(config.clone()).unwrap();
    let fill = async |broker: &EmbeddedBroker| {
        let client = client(broker).await;
        let mut producer = producer(&client, "t").await;
        let mut sent = 0;
        // The crate sends again what was refused, so this ends with a time-out of ours.
        while let Ok(Ok(receipt)) =
            timeout(std::time::Duration::from_secs(1), producer.send_non_blocking(vec![0; 1000]).await.unwrap()).await
        {
            assert!(receipt.message_id.is_some());
            sent += 1;
        }
        sent
    };
    let sent = fill(&broker).await;
    assert!((50..100).contains(&sent), "{sent}");
    broker.stop().unwrap();
    let broker = EmbeddedBroker::start(config).unwrap();
    assert_eq!(fill(&broker).await, 0);
    assert_eq!(broker.stats().topics[0].entries, sent);
}

#[tokio::test]
async fn synced_messages_are_there_and_many_producers_share_their_syncs() {
    let directory = tempfile::tempdir().unwrap();
    let broker = EmbeddedBroker::start(BrokerConfig { fsync: true, ..config(directory.path()) }).unwrap();
    let mut tasks = Vec::new();
    for number in 0..10 {
        let client = client(&broker).await;
        tasks.push(tokio::spawn(async move {
            let mut producer = producer(&client, &format!("t{number}")).await;
            for message in 0..20 {
                send(&mut producer, &message.to_string()).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let other = start(&crashed(&directory));
    let entries: Vec<usize> = other.stats().topics.into_iter().map(|topic| topic.entries).collect();
    assert_eq!(entries, [20; 10]);
}

#[tokio::test]
async fn without_its_directory_it_refuses_messages_and_a_stop_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("data");
    type Lose = fn(&Path) -> std::io::Result<()>;
    let ways: [Lose; 3] = [
        |path| fs::remove_dir_all(path),
        |path| fs::rename(path, path.with_extension("elsewhere")),
        |path| fs::remove_file(path.join("topics.redb")),
    ];
    for lose in ways {
        let broker = EmbeddedBroker::start(config(&path)).unwrap();
        let once = pulsar::OperationRetryOptions { max_retries: Some(0), ..Default::default() };
        let client = Pulsar::builder(broker.url(), TokioExecutor).with_operation_retry_options(once).build();
        let client = client.await.unwrap();
        let mut producer = producer(&client, "t").await;
        send(&mut producer, "kept").await;
        lose(&path).unwrap();
        let mut refused = false;
        for _ in 0..300 {
            let sent = producer.send_non_blocking("lost").await.unwrap();
            refused = !matches!(timeout(std::time::Duration::from_millis(500), sent).await, Ok(Ok(_)));
            if refused {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(refused, "it goes on giving receipts");
        let fault = broker.stop().unwrap_err();
        assert_eq!(fault.kind, FaultKind::System);
        assert!(fault.detail.contains(path.to_str().unwrap()), "{fault}");
        let _ = fs::remove_dir_all(&path);
        let _ = fs::remove_dir_all(path.with_extension("elsewhere"));
    }
    // When nothing was to be written, too.
    let broker = EmbeddedBroker::start(config(&path)).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert!(broker.stop().unwrap_err().detail.contains(path.to_str().unwrap()));
}

#[test]
fn one_directory_serves_one_broker() {
    let directory = tempfile::tempdir().unwrap();
    let broker = start(&directory);
    let fault = EmbeddedBroker::start(config(directory.path())).expect_err("in use");
    assert_eq!(fault.kind, FaultKind::InvalidArgument);
    assert!(fault.detail.contains("in use") && fault.detail.contains(directory.path().to_str().unwrap()), "{fault}");
    broker.stop().unwrap();
    start(&directory);
}

#[test]
fn a_message_that_is_no_message_is_damage() {
    // A directory whose rows are whole, but were not written by a broker.
    let directory = tempfile::tempdir().unwrap();
    start(&directory).stop().unwrap();
    let table = redb::Database::open(directory.path().join("topics.redb")).unwrap();
    let transaction = table.begin_write().unwrap();
    {
        let rows: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("rows");
        let mut rows = transaction.open_table(rows).unwrap();
        let mut head = vec![1, 0, b't'];
        head.extend([0; 8]);
        head.extend(1_u64.to_le_bytes());
        head.extend(1_u64.to_le_bytes());
        head.extend([0; 9]);
        rows.insert(&[2, 0, 0, 0, 0, 0, 0, 0, 0][..], &head[..]).unwrap();
        rows.insert(&[3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &[0; 20][..]).unwrap();
    }
    transaction.commit().unwrap();
    drop(table);
    let fault = EmbeddedBroker::start(config(directory.path())).expect_err("damaged");
    assert!(fault.detail.contains("damaged") && fault.detail.contains("message 0"), "{fault}");
}
