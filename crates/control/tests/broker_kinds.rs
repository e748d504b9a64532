//! Each kind of subscription and of producer, through the `pulsar` crate: what holds for every broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::*;
use futures::StreamExt;
use gradwire_control::BrokerConfig;
use gradwire_control::EmbeddedBroker;
use gradwire_control::broker::BrokerStats;
use pulsar::consumer::{InitialPosition, Message as Received};
use pulsar::message::proto::ProducerAccessMode;
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{
    Consumer, ConsumerOptions, OperationRetryOptions, Producer, ProducerOptions, Pulsar, SubType, TokioExecutor,
};
use tokio::time::timeout;

type Client = Pulsar<TokioExecutor>;

/// How long a test listens before it takes silence for an answer.
const SILENCE: Duration = Duration::from_millis(300);

async fn client(url: &str) -> Client {
    let once = OperationRetryOptions { max_retries: Some(0), ..Default::default() };
    Pulsar::builder(url, TokioExecutor).with_operation_retry_options(once).build().await.expect("a broker")
}

async fn consumer(
    client: &Client,
    topic: &str,
    kind: SubType,
    name: &str,
    options: ConsumerOptions,
) -> Result<Consumer<Vec<u8>, TokioExecutor>, pulsar::Error> {
    let options = options.with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription("s").with_consumer_name(name);
    builder.with_subscription_type(kind).with_options(options).build().await
}

async fn join(client: &Client, topic: &str, kind: SubType, name: &str) -> Consumer<Vec<u8>, TokioExecutor> {
    consumer(client, topic, kind, name, ConsumerOptions::default()).await.expect("a consumer")
}

async fn producer(
    client: &Client,
    topic: &str,
    mode: ProducerAccessMode,
) -> Result<Producer<TokioExecutor>, pulsar::Error> {
    let access_mode = Some(mode as i32);
    let options = ProducerOptions { block_queue_if_full: true, access_mode, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await
}

async fn publish(producer: &mut Producer<TokioExecutor>, key: &str, text: String) {
    let partition_key = Some(key.to_owned()).filter(|key| !key.is_empty());
    let message = Message { payload: text.into_bytes(), partition_key, ..Default::default() };
    producer.send_non_blocking(message).await.expect("sent").await.expect("a receipt");
}

/// What comes until nothing comes any more.
async fn drain(consumer: &mut Consumer<Vec<u8>, TokioExecutor>) -> Vec<Received<Vec<u8>>> {
    let mut received = Vec::new();
    // A broker that collects garbage, or whose machine is busy, is silent for longer.
    let silence = if std::env::var_os("GRADWIRE_TEST_PULSAR_URL").is_some() { 7 * SILENCE } else { SILENCE };
    while let Ok(message) = timeout(silence, consumer.next()).await {
        received.push(message.expect("open").expect("a message"));
    }
    received
}

/// So many messages.
async fn take_all(consumer: &mut Consumer<Vec<u8>, TokioExecutor>, count: usize) -> Vec<Received<Vec<u8>>> {
    let mut received = Vec::new();
    while received.len() < count {
        received.push(take(consumer).await);
    }
    received
}

async fn take(consumer: &mut Consumer<Vec<u8>, TokioExecutor>) -> Received<Vec<u8>> {
    timeout(PATIENCE, consumer.next()).await.expect("in time").expect("open").expect("a message")
}

fn number(message: &Received<Vec<u8>>) -> u32 {
    String::from_utf8_lossy(&message.payload.data).parse().expect("a number")
}

fn numbers(messages: &[Received<Vec<u8>>]) -> Vec<u32> {
    messages.iter().map(number).collect()
}

fn key(message: &Received<Vec<u8>>) -> String {
    message.payload.metadata.partition_key.clone().unwrap_or_default()
}

#[tokio::test]
async fn shared_spreads_messages_and_passes_on_what_a_consumer_leaves() {
    let broker = test_broker();
    let (one, two, topic) = (client(broker.url()).await, client(broker.url()).await, unique("shared"));
    let mut first = join(&one, &topic, SubType::Shared, "a").await;
    let mut second = join(&two, &topic, SubType::Shared, "b").await;
    let mut producer = producer(&one, &topic, ProducerAccessMode::Shared).await.unwrap();
    for number in 0..100 {
        publish(&mut producer, "", number.to_string()).await;
    }
    let (at_first, at_second) = (drain(&mut first).await, drain(&mut second).await);
    assert!(at_first.len() > 10 && at_second.len() > 10, "{} and {}", at_first.len(), at_second.len());
    let mut all = numbers(&at_first);
    all.extend(numbers(&at_second));
    all.sort_unstable();
    assert_eq!(all, (0..100).collect::<Vec<_>>());
    for message in &at_first {
        first.ack(message).await.unwrap();
    }
    second.close().await.unwrap();
    drop(second);
    let mut again = numbers(&drain(&mut first).await);
    again.sort_unstable();
    let mut left = numbers(&at_second);
    left.sort_unstable();
    assert_eq!(again, left, "exactly what was not acknowledged");
}

#[tokio::test]
async fn shared_redelivers_one_message_alone() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("nack"));
    let mut consumer = join(&client, &topic, SubType::Shared, "a").await;
    let mut producer = producer(&client, &topic, ProducerAccessMode::Shared).await.unwrap();
    for number in 0..3 {
        publish(&mut producer, "", number.to_string()).await;
    }
    let messages = [take(&mut consumer).await, take(&mut consumer).await, take(&mut consumer).await];
    for (message, again) in messages.iter().zip([false, true, false]) {
        if again { consumer.nack(message).await.unwrap() } else { consumer.ack(message).await.unwrap() }
    }
    for _ in 0..3 {
        let message = take(&mut consumer).await;
        assert_eq!(number(&message), 1);
        consumer.nack(&message).await.unwrap();
    }
}

#[tokio::test]
async fn failover_goes_to_another_consumer_when_the_active_one_ends() {
    let broker = test_broker();
    let topic = unique("failover");
    let mut consumers = BTreeMap::new();
    for (name, priority) in [("a", 1), ("b", 0), ("c", 2)] {
        let options = ConsumerOptions::default().with_priority_level(priority);
        let client = client(broker.url()).await;
        let joined = consumer(&client, &topic, SubType::Failover, name, options).await.unwrap();
        consumers.insert(name, (joined, client));
    }
    let sending = client(broker.url()).await;
    let mut producer = producer(&sending, &topic, ProducerAccessMode::Shared).await.unwrap();
    // The one with the lowest number leads; the others step in in that order.
    let mut expected = 0;
    for active in ["b", "a", "c"] {
        for number in 0..10 {
            publish(&mut producer, "", (expected + number).to_string()).await;
        }
        let (consumer, _) = consumers.get_mut(active).unwrap();
        for _ in 0..10 {
            let message = take(consumer).await;
            assert_eq!(number(&message), expected, "at {active}");
            consumer.ack(&message).await.unwrap();
            expected += 1;
        }
        // Acknowledgements are only queued by then.
        tokio::time::sleep(SILENCE).await;
        for (name, (consumer, _)) in consumers.iter_mut().filter(|(name, _)| **name != active) {
            assert_eq!(numbers(&drain(consumer).await), [], "{name} is not active");
        }
        let (mut ended, _) = consumers.remove(active).unwrap();
        ended.close().await.unwrap();
    }
}

#[tokio::test]
async fn key_shared_keeps_keys_together_and_in_order_when_consumers_come_and_go() {
    let broker = test_broker();
    let topic = unique("keys");
    let (one, two, sending) = (client(broker.url()).await, client(broker.url()).await, client(broker.url()).await);
    let mut first = join(&one, &topic, SubType::KeyShared, "a").await;
    let mut producer = producer(&sending, &topic, ProducerAccessMode::Shared).await.unwrap();
    let keys: Vec<String> = (0..20).map(|key| format!("k{key}")).collect();
    for round in 0..3 {
        for key in &keys {
            publish(&mut producer, key, round.to_string()).await;
        }
    }
    let held = take_all(&mut first, 60).await;
    let mut second = join(&two, &topic, SubType::KeyShared, "b").await;
    for round in 3..5 {
        for key in &keys {
            publish(&mut producer, key, round.to_string()).await;
        }
    }
    let stayed: BTreeSet<String> = drain(&mut first).await.iter().map(key).collect();
    assert!(stayed.len() > 3 && stayed.len() < 17, "{stayed:?}");
    assert_eq!(numbers(&drain(&mut second).await), [], "the first consumer holds messages of these keys");
    for message in held.iter().filter(|message| !stayed.contains(&key(message))) {
        first.nack(message).await.unwrap();
    }
    let mut rounds: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for message in take_all(&mut second, 5 * (20 - stayed.len())).await {
        rounds.entry(key(&message)).or_default().push(number(&message));
        second.ack(&message).await.unwrap();
    }
    assert_eq!(rounds.len(), 20 - stayed.len());
    assert!(rounds.values().all(|rounds| *rounds == [0, 1, 2, 3, 4]), "{rounds:?}");
    // The first one dies with everything that it holds.
    drop(first);
    drop(one);
    let mut rounds: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for message in take_all(&mut second, 5 * stayed.len()).await {
        rounds.entry(key(&message)).or_default().push(number(&message));
    }
    assert!(rounds.values().all(|rounds| *rounds == [0, 1, 2, 3, 4]), "{rounds:?}");
}

#[tokio::test]
async fn a_subscription_has_one_kind_at_a_time() {
    let broker = test_broker();
    let (client, topic) = (client(broker.url()).await, unique("kinds"));
    let kinds = [SubType::Exclusive, SubType::Shared, SubType::Failover, SubType::KeyShared];
    for kind in kinds {
        let mut open = join(&client, &topic, kind, "a").await;
        for other in kinds.into_iter().filter(|other| *other != kind || kind == SubType::Exclusive) {
            let refused = consumer(&client, &topic, other, "b", ConsumerOptions::default()).await;
            let error = refused.err().expect("refused").to_string();
            assert!(error.contains("ConsumerBusy"), "{error}");
        }
        open.close().await.unwrap();
    }
}

#[tokio::test]
async fn exclusive_producers_wait_and_fence() {
    use ProducerAccessMode::{Exclusive, ExclusiveWithFencing, Shared, WaitForExclusive};
    let broker = test_broker();
    let (one, two, topic) = (client(broker.url()).await, client(broker.url()).await, unique("exclusive"));
    let mut first = producer(&one, &topic, Exclusive).await.unwrap();
    publish(&mut first, "", "1".to_owned()).await;
    let error = producer(&two, &topic, Exclusive).await.err().expect("refused").to_string();
    assert!(error.contains("ProducerFenced"), "{error}");
    let error = producer(&two, &topic, Shared).await.err().expect("refused").to_string();
    assert!(error.contains("ProducerBusy"), "{error}");
    let waiting = tokio::spawn({
        let (two, topic) = (two.clone(), topic.clone());
        async move { producer(&two, &topic, WaitForExclusive).await }
    });
    tokio::time::sleep(SILENCE).await;
    assert!(!waiting.is_finished());
    first.close().await.unwrap();
    let mut second = timeout(PATIENCE, waiting).await.expect("its turn").unwrap().unwrap();
    publish(&mut second, "", "2".to_owned()).await;
    let mut third = producer(&one, &topic, ExclusiveWithFencing).await.unwrap();
    publish(&mut third, "", "3".to_owned()).await;
    let message = Message { payload: b"4".to_vec(), ..Default::default() };
    let fenced = timeout(10 * SILENCE, async { second.send_non_blocking(message).await?.await }).await;
    assert!(!matches!(fenced, Ok(Ok(_))), "a fenced producer got a receipt");
    let mut reader = reader(&one, &topic, false).await;
    assert_eq!([next(&mut reader).await, next(&mut reader).await, next(&mut reader).await], ["1", "2", "3"]);
    assert!(timeout(SILENCE, reader.next()).await.is_err(), "and nothing else is in the log");
}

async fn reader(client: &Client, topic: &str, compacted: bool) -> Reader<Vec<u8>, TokioExecutor> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest).read_compacted(compacted);
    client
        .reader()
        .with_topic(topic)
        .with_subscription(unique("r"))
        .with_options(options)
        .into_reader()
        .await
        .expect("a reader")
}

async fn next(reader: &mut Reader<Vec<u8>, TokioExecutor>) -> String {
    let message = timeout(PATIENCE, reader.next()).await.expect("in time").expect("open").expect("a message");
    String::from_utf8(message.payload.data).expect("text")
}

#[tokio::test]
async fn a_compacted_reader_gets_the_latest_of_each_key() {
    let broker = embedded_broker();
    let (client, topic) = (client(broker.url()).await, format!("{}-versions", unique("compacted")));
    let mut producer = producer(&client, &topic, ProducerAccessMode::Shared).await.unwrap();
    for number in 0..20 {
        publish(&mut producer, &format!("k{}", number % 4), number.to_string()).await;
    }
    publish(&mut producer, "k1", String::new()).await;
    publish(&mut producer, "", "without key".to_owned()).await;
    let mut compacted = reader(&client, &topic, true).await;
    assert_eq!(
        [next(&mut compacted).await, next(&mut compacted).await, next(&mut compacted).await],
        ["16", "18", "19"]
    );
    publish(&mut producer, "k1", "new".to_owned()).await;
    assert_eq!(next(&mut compacted).await, "new");
    // A reader of everything still gets everything.
    let mut all = reader(&client, &topic, false).await;
    assert_eq!(next(&mut all).await, "0");
}

#[tokio::test]
async fn compaction_keeps_a_topic_small_for_ever() {
    let config = BrokerConfig { topic_bytes_max: 1 << 20, ..local() };
    let broker = EmbeddedBroker::start(config).unwrap();
    let (client, topic) = (client(broker.url()).await, format!("{}-snapshots", unique("small")));
    let mut producer = producer(&client, &topic, ProducerAccessMode::Shared).await.unwrap();
    for number in 0..4000 {
        publish(&mut producer, &format!("k{}", number % 10), format!("{number:01000}")).await;
    }
    let topic_stats = &broker.stats().topics[0];
    assert!(topic_stats.bytes <= 1 << 20 && topic_stats.published == 4000, "{topic_stats:?}");
    let mut compacted = reader(&client, &topic, true).await;
    for number in 3990..4000 {
        assert_eq!(next(&mut compacted).await.trim_start_matches('0'), number.to_string());
    }
}

#[tokio::test]
async fn a_consumer_that_never_acknowledges_holds_a_bounded_number() {
    let config = BrokerConfig { unacked_per_consumer_max: 50, unacked_per_subscription_max: 80, ..local() };
    let broker = EmbeddedBroker::start(config).unwrap();
    let (client, topic) = (client(broker.url()).await, unique("never"));
    let mut producer = producer(&client, &topic, ProducerAccessMode::Shared).await.unwrap();
    let mut greedy = join(&client, &topic, SubType::Shared, "greedy").await;
    for number in 0..200 {
        publish(&mut producer, "", number.to_string()).await;
    }
    let held = drain(&mut greedy).await;
    assert_eq!(held.len(), 50);
    let mut other = join(&client, &topic, SubType::Shared, "other").await;
    assert_eq!(drain(&mut other).await.len(), 30);
    let stats = subscription(&broker.stats(), 0);
    assert_eq!((stats.0, stats.1), (200, 80));
    greedy.ack(&held[0]).await.unwrap();
    assert_eq!(drain(&mut greedy).await.len() + drain(&mut other).await.len(), 1);
}

/// Backlog and unacknowledged messages of the first subscription of a topic.
fn subscription(stats: &BrokerStats, topic: usize) -> (u64, u64) {
    let subscription = &stats.topics[topic].subscriptions[0];
    (subscription.backlog, subscription.unacked)
}

#[tokio::test]
async fn nothing_is_left_of_clients_that_are_gone() {
    let broker = embedded_broker();
    let topic = unique("left");
    for kind in [SubType::Exclusive, SubType::Shared, SubType::Failover, SubType::KeyShared] {
        let client = client(broker.url()).await;
        let mut producer = producer(&client, &topic, ProducerAccessMode::Shared).await.unwrap();
        let mut joined = join(&client, &topic, kind, "a").await;
        let _reader = reader(&client, &topic, false).await;
        publish(&mut producer, "k", "1".to_owned()).await;
        let message = take(&mut joined).await;
        assert!(broker.stats().links > 0);
        assert_eq!(broker.stats().topics[0].subscriptions.len(), 2);
        joined.ack(&message).await.unwrap();
        let acknowledged =
            |stats: &BrokerStats| stats.topics[0].subscriptions.iter().any(|found| found.durable && found.backlog == 0);
        until(|| acknowledged(&broker.stats())).await;
    }
    until(|| broker.stats().links == 0).await;
    let stats = broker.stats();
    let left = &stats.topics[0];
    assert_eq!((stats.topics.len(), left.entries, left.subscriptions.len()), (1, 4, 1));
    assert!(left.producers.is_empty() && left.subscriptions[0].consumers.is_empty());
    assert_eq!((left.subscriptions[0].backlog, left.subscriptions[0].unacked), (0, 0));
    assert_eq!(stats.bytes, left.bytes);
}

/// Waits until `condition` holds, and lets the clients of this thread work meanwhile.
async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, waiting).await.expect("in time");
}
