//! What the store keeps, drops and refuses.

use std::time::Duration;

use pulsar::message::proto::command_subscribe::{InitialPosition, SubType};

use super::room::SUBSCRIPTION_BYTES_LEAST;
use super::*;
use crate::broker::config::TopicPolicy;
use crate::broker::log::ENTRY_OVERHEAD_BYTES;
use crate::broker::log::tests::tail;
use crate::broker::outbox::Outbox;

const TOPIC: &str = "persistent://public/default/t";
const OTHER: &str = "persistent://public/default/u";
const COST: usize = 100 + ENTRY_OVERHEAD_BYTES;

fn store(policy: TopicPolicy) -> Store {
    let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
    config.topic_bytes_max = 4 * COST;
    config.total_bytes_max = 6 * COST;
    config.topics_max = 3;
    config.policies = vec![policy];
    Store::new(config, 1)
}

fn keep_all() -> TopicPolicy {
    TopicPolicy::for_suffix("/none")
}

fn publish(store: &mut Store, key: &str, now_ms: u64) -> Result<u64, Refused> {
    store.append(TOPIC, &tail(key, now_ms), now_ms).map(|id| id.entry_id)
}

/// Attaches a consumer that takes everything, and returns where it is.
fn subscribe(store: &mut Store, name: &str, durable: bool) -> (Seat, std::sync::Arc<Outbox>) {
    let (key, outbox) = (store.new_key(), Outbox::detached());
    let request = CommandSubscribe {
        subscription: name.to_owned(),
        durable: Some(durable),
        initial_position: Some(InitialPosition::Earliest as i32),
        ..Default::default()
    };
    let applicant = Applicant {
        key,
        consumer_id: key,
        name: format!("c{key}"),
        priority: 0,
        kind: SubType::Exclusive,
        key_shared: None,
        epoch: None,
        outbox: outbox.clone(),
    };
    store.subscribe(TOPIC, &request, None, applicant, 0).unwrap();
    let seat = Seat { topic: TOPIC.to_owned(), subscription: name.to_owned(), key };
    store.flow(&seat, 1000);
    (seat, outbox)
}

fn ack_until(store: &mut Store, seat: &Seat, entry_id: u64) {
    let ledger_id = store.topics[TOPIC].log.ledger();
    store.acknowledge(seat, &[MessageIdData { ledger_id, entry_id, ..Default::default() }], true).unwrap();
}

fn held(store: &Store) -> Vec<u64> {
    store.topics[TOPIC].log.iter_from(0).map(|entry| entry.number).collect()
}

fn numbers(outbox: &Outbox) -> Vec<u64> {
    outbox.take_messages().iter().map(|message| message.id.entry_id).collect()
}

#[test]
fn a_full_log_refuses_and_keeps_its_head() {
    let mut store = store(keep_all());
    for entry in 0..4 {
        assert_eq!(publish(&mut store, "", entry).unwrap(), entry);
    }
    let Refused(error, detail) = publish(&mut store, "", 4).unwrap_err();
    assert_eq!(error, ServerError::ProducerBlockedQuotaExceededException);
    assert!(detail.contains(TOPIC), "{detail}");
    assert_eq!(held(&store), [0, 1, 2, 3]);
    // The store as a whole is bounded too.
    store.append(OTHER, &tail("", 0), 0).unwrap();
    store.append(OTHER, &tail("", 0), 0).unwrap();
    store.append(OTHER, &tail("", 0), 0).unwrap_err();
    assert_eq!(store.bytes(), 6 * COST);
}

#[test]
fn a_topic_of_latest_records_drops_its_oldest() {
    let mut store = store(TopicPolicy { drop_oldest: true, ..TopicPolicy::for_suffix("/t") });
    let (_, to_slow) = subscribe(&mut store, "slow", true);
    for entry in 0..9 {
        assert_eq!(publish(&mut store, "", entry).unwrap(), entry);
    }
    assert_eq!(held(&store), [5, 6, 7, 8]);
    assert_eq!(store.bytes(), 4 * COST);
    assert_eq!(numbers(&to_slow), (0..9).collect::<Vec<_>>());
    assert_eq!(store.topics[TOPIC].subscriptions["slow"].cursor().mark(), 5);
}

#[test]
fn what_all_durable_subscriptions_acknowledged_makes_room() {
    let mut store = store(keep_all());
    let (fast, _) = subscribe(&mut store, "fast", true);
    let (slow, _) = subscribe(&mut store, "slow", true);
    let (_, _reader) = subscribe(&mut store, "reader", false);
    for entry in 0..4 {
        publish(&mut store, "", entry).unwrap();
    }
    ack_until(&mut store, &fast, 3);
    ack_until(&mut store, &slow, 0);
    assert_eq!(publish(&mut store, "", 4).unwrap(), 4);
    publish(&mut store, "", 5).unwrap_err();
    assert_eq!(held(&store), [1, 2, 3, 4]);
}

#[test]
fn a_full_compacted_topic_is_compacted_before_it_refuses() {
    let mut store = store(TopicPolicy { compact: true, ..TopicPolicy::for_suffix("/t") });
    // A key costs its length too.
    store.config.topic_bytes_max = 4 * (COST + 1);
    for entry in 0..9 {
        assert_eq!(publish(&mut store, if entry % 2 == 0 { "a" } else { "b" }, entry).unwrap(), entry);
    }
    publish(&mut store, "c", 9).unwrap();
    publish(&mut store, "d", 10).unwrap();
    publish(&mut store, "e", 11).unwrap_err();
    assert_eq!(held(&store), [7, 8, 9, 10]);
    // What a durable subscription to all messages has still to get stays.
    let (seat, outbox) = subscribe(&mut store, "all", true);
    publish(&mut store, "a", 12).unwrap_err();
    assert_eq!(numbers(&outbox), [7, 8, 9, 10]);
    ack_until(&mut store, &seat, 8);
    publish(&mut store, "a", 12).unwrap();
}

#[test]
fn retention_is_for_what_is_acknowledged() {
    let policy = TopicPolicy {
        retention_bytes: Some(2 * COST),
        retention_time: Some(Duration::from_secs(10)),
        ..TopicPolicy::for_suffix("/t")
    };
    let mut store = store(policy);
    let (seat, _outbox) = subscribe(&mut store, "s", true);
    for entry in 0..4 {
        publish(&mut store, "", entry * 1000).unwrap();
    }
    store.tick(11_000);
    assert_eq!(held(&store), [0, 1, 2, 3], "nothing of it is acknowledged");
    ack_until(&mut store, &seat, 2);
    store.tick(10_500);
    assert_eq!(held(&store), [1, 2, 3], "two may stay, if they are not too old");
    store.tick(11_500);
    assert_eq!(held(&store), [2, 3]);
    assert_eq!(store.bytes(), 2 * COST);
}

#[test]
fn messages_that_lived_too_long_count_as_acknowledged() {
    let mut store = store(TopicPolicy { time_to_live: Some(Duration::from_secs(5)), ..TopicPolicy::for_suffix("/t") });
    let (seat, _outbox) = subscribe(&mut store, "s", true);
    store.detach(&seat);
    for entry in 0..4 {
        publish(&mut store, "", entry * 1000).unwrap();
    }
    store.tick(7500);
    let (_, outbox) = subscribe(&mut store, "s", true);
    assert_eq!(numbers(&outbox), [3]);
}

#[test]
fn topics_are_counted_and_unused_ones_forgotten() {
    let mut store = store(keep_all());
    for name in ["a", "b", "c"] {
        store.create_topic(&format!("persistent://public/default/{name}")).unwrap();
    }
    assert!(matches!(store.create_topic("persistent://x/y/z"), Err(Refused(ServerError::NotAllowedError, _))));
    store.remove_topic("persistent://public/default/a");
    store.create_topic("persistent://x/y/z").unwrap();
    assert_eq!(store.names("persistent://x/y/").count(), 1);
    let request = CommandSubscribe { force_topic_creation: Some(false), ..Default::default() };
    let applicant = Applicant {
        key: 1,
        consumer_id: 1,
        name: String::new(),
        priority: 0,
        kind: SubType::Shared,
        key_shared: None,
        epoch: None,
        outbox: Outbox::detached(),
    };
    let Refused(error, _) = store.subscribe("persistent://x/y/other", &request, None, applicant, 0).unwrap_err();
    assert_eq!(error, ServerError::TopicNotFound);
}

#[test]
fn a_reader_that_does_not_come_back_after_a_seek_is_forgotten() {
    let mut store = store(keep_all());
    publish(&mut store, "", 0).unwrap();
    let (seat, outbox) = subscribe(&mut store, "r", false);
    store.seek(&seat, &Target::PublishTime(0), 1000).unwrap();
    assert!(outbox.take_commands().remove(0).close_consumer.is_some());
    assert!(!store.is_seated(&seat));
    let (seat, outbox) = subscribe(&mut store, "r", false);
    assert_eq!(numbers(&outbox), [0]);
    store.tick(1000 + READER_RETURN_MS);
    assert!(store.is_seated(&seat), "it is back");
    store.seek(&seat, &Target::PublishTime(0), 1000).unwrap();
    store.tick(1000 + READER_RETURN_MS);
    assert!(store.topics[TOPIC].subscriptions.is_empty());
}

#[test]
fn a_schema_is_agreed_on_before_anything_is_published() {
    use pulsar::message::proto::schema::Type;
    let mut store = store(keep_all());
    let schema = |kind: Type| Schema { r#type: kind as i32, ..Default::default() };
    let version = store.add_schema(TOPIC, schema(Type::String)).unwrap();
    assert_eq!(store.schema(TOPIC, None).unwrap().0, version);
    let topic = store.topics.get_mut(TOPIC).unwrap();
    topic.take_consumer_schema(schema(Type::String)).unwrap();
    topic.take_consumer_schema(schema(Type::Json)).unwrap_err();
    assert_eq!(store.bytes(), store.topics[TOPIC].bytes());
    // Bytes without schema contradict any.
    store.append(OTHER, &tail("", 0), 0).unwrap();
    store.topics.get_mut(OTHER).unwrap().take_consumer_schema(schema(Type::String)).unwrap_err();
}

#[test]
fn subscriptions_are_bounded_by_what_they_cost() {
    let mut store = store(keep_all());
    let cost = subscription_cost(TOPIC, &"n".repeat(500));
    let room = SUBSCRIPTION_BYTES_LEAST / cost;
    store.create_topic(TOPIC).unwrap();
    let name = |number: usize| format!("{number:0>500}");
    for number in 0..room {
        store.ensure_subscription(TOPIC, &name(number)).unwrap();
        store.ensure_subscription(TOPIC, &name(number)).unwrap();
    }
    assert_eq!(store.subscription_bytes, room * cost, "each is counted once");
    let Refused(error, detail) = store.ensure_subscription(TOPIC, &name(room)).unwrap_err();
    assert_eq!(error, ServerError::NotAllowedError);
    assert!(detail.contains("limit 1048576"), "{detail}");
    // Those that are there are served, and the end of one makes room for another.
    let (seat, _) = subscribe(&mut store, &name(0), true);
    store.unsubscribe(&seat).unwrap();
    let (seat, _) = subscribe(&mut store, &name(room), false);
    store.detach(&seat);
    assert_eq!(store.subscription_bytes, (room - 1) * cost);
}
