//! A store with a data directory against what it should hold: groups that are kept or not, and restarts at any moment.

use bytes::BytesMut;
use proptest::prelude::*;
use pulsar::message::proto::command_subscribe::{InitialPosition, SubType};
use pulsar::message::proto::{
    BaseCommand, CommandSend, CommandSubscribe, MessageIdData, MessageMetadata, ProducerAccessMode, Schema,
    base_command,
};
use pulsar::message::{Codec, Message, Payload};
use tempfile::TempDir;
use tokio_util::codec::Encoder;

use super::*;
use crate::broker::config::TopicPolicy;
use crate::broker::dispatch::Applicant;
use crate::broker::frame::{Tail, take_frame};
use crate::broker::outbox::Outbox;
use crate::broker::producers::Producer;
use crate::broker::storage::Storage;
use crate::broker::store::Seat;

const TOPICS: [&str; 4] = [
    "persistent://public/default/log",
    "persistent://public/default/t-latest",
    "persistent://public/default/t-compacted",
    "non-persistent://public/default/t",
];

#[derive(Clone, Debug)]
enum Step {
    Publish { topic: usize, key: u8 },
    Subscribe { topic: usize, name: u8, durable: bool },
    Acknowledge { seat: prop::sample::Index, entry: prop::sample::Index, cumulative: bool, partly: bool },
    Seek { seat: prop::sample::Index, entry: prop::sample::Index },
    Detach { seat: prop::sample::Index },
    Unsubscribe { seat: prop::sample::Index },
    Schema { topic: usize, name: u8 },
    Own { topic: usize },
    Keep,
    Fail,
    Checkpoint,
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (topic, index) = (0..TOPICS.len(), any::<prop::sample::Index>);
    let step = prop_oneof![
        20 => (topic.clone(), 0_u8..4).prop_map(|(topic, key)| Step::Publish { topic, key }),
        4 => (topic.clone(), 0_u8..3, any::<bool>())
            .prop_map(|(topic, name, durable)| Step::Subscribe { topic, name, durable }),
        8 => (index(), index(), any::<bool>(), any::<bool>())
            .prop_map(|(seat, entry, cumulative, partly)| Step::Acknowledge { seat, entry, cumulative, partly }),
        1 => (index(), index()).prop_map(|(seat, entry)| Step::Seek { seat, entry }),
        1 => index().prop_map(|seat| Step::Detach { seat }),
        1 => index().prop_map(|seat| Step::Unsubscribe { seat }),
        1 => (topic.clone(), 0_u8..3).prop_map(|(topic, name)| Step::Schema { topic, name }),
        1 => topic.prop_map(|topic| Step::Own { topic }),
        6 => Just(Step::Keep),
        2 => Just(Step::Fail),
        1 => Just(Step::Checkpoint),
        2 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..80)
}

fn config() -> BrokerConfig {
    let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
    config.topic_bytes_max = 4000;
    config.policies = vec![
        TopicPolicy { drop_oldest: true, ..TopicPolicy::for_suffix("-latest") },
        TopicPolicy { compact: true, ..TopicPolicy::for_suffix("-compacted") },
    ];
    config
}

/// A batch of two messages, with a key for the compacted topic.
fn message(key: u8, number: u64) -> Tail {
    let metadata = MessageMetadata {
        producer_name: "p".to_owned(),
        sequence_id: number,
        publish_time: number,
        partition_key: Some(format!("k{key}")),
        num_messages_in_batch: Some(2).filter(|_| key == 3),
        ..Default::default()
    };
    let command = BaseCommand {
        r#type: base_command::Type::Send as i32,
        send: Some(CommandSend::default()),
        ..Default::default()
    };
    let mut out = BytesMut::new();
    let payload = Payload { metadata, data: vec![key; 200] };
    Codec.encode(Message { command, payload: Some(payload) }, &mut out).unwrap();
    take_frame(&mut out, 1000).unwrap().unwrap().tail.unwrap()
}

/// What must be there again.
type Snapshot = BTreeMap<String, (u64, u64, Vec<(u64, bytes::Bytes)>, BTreeMap<String, Cursor>, usize, Option<u64>)>;

fn snapshot(store: &Store) -> Snapshot {
    let kept = store.topics.values().filter(|topic| topic.keep && topic.is_worth_keeping());
    kept.map(|topic| {
        let entries = topic.log.iter_from(0).map(|entry| (entry.number, entry.tail.clone())).collect();
        let durable = topic.subscriptions.iter().filter(|(_, found)| found.durable);
        let cursors = durable.map(|(name, found)| (name.clone(), found.cursor().clone())).collect();
        let (ledger, end) = (topic.log.ledger(), topic.log.end());
        (topic.name.clone(), (ledger, end, entries, cursors, topic.schemas.len(), topic.producers.epoch()))
    })
    .collect()
}

/// A store, its directory, and what was kept of it last.
struct Run {
    directory: TempDir,
    storage: Option<Storage>,
    store: Store,
    kept: Snapshot,
    seats: Vec<Seat>,
    published: u64,
}

impl Run {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (storage, store) = open(&directory);
        Self { directory, storage: Some(storage), store, kept: Snapshot::new(), seats: Vec::new(), published: 0 }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Publish { topic, key } => {
                self.published += 1;
                let _ = self.store.append(TOPICS[topic], &message(key, self.published), self.published);
            }
            Step::Subscribe { topic, name, durable } => self.subscribe(TOPICS[topic], name, durable),
            Step::Acknowledge { seat, entry, cumulative, partly } => {
                let Some((seat, id)) = self.id(&seat, &entry) else { return };
                let ack_set = if partly { vec![1] } else { Vec::new() };
                self.store.acknowledge(&seat, &[MessageIdData { ack_set, ..id }], cumulative).unwrap();
            }
            Step::Seek { seat, entry } => {
                let Some((seat, id)) = self.id(&seat, &entry) else { return };
                self.store.seek(&seat, &crate::broker::store::Target::Id(&id), 0).unwrap();
                self.seats.retain(|other| other.key != seat.key);
            }
            Step::Detach { seat } => {
                let Some(seat) = self.take_seat(&seat) else { return };
                self.store.detach(&seat);
            }
            Step::Unsubscribe { seat } => {
                let Some(seat) = self.take_seat(&seat) else { return };
                self.store.unsubscribe(&seat).unwrap();
            }
            Step::Schema { topic, name } => {
                let schema = Schema { name: format!("s{name}"), r#type: 1, ..Default::default() };
                self.store.add_schema(TOPICS[topic], schema).unwrap();
            }
            Step::Own { topic } => self.own(TOPICS[topic]),
            Step::Keep => self.keep(),
            Step::Fail => {
                let Some(group) = self.store.take_group() else { return };
                let waiter = self.store.kept();
                self.store.settle(group, &Err("full".to_owned()));
                assert!(waiter.is_none());
                assert!(self.store.topics.values().all(|topic| topic.staged().is_empty()));
            }
            Step::Checkpoint => {
                let storage = self.storage.as_mut().unwrap();
                let Some(checkpoint) = storage.checkpoint().unwrap() else { return };
                checkpoint.run().unwrap();
                storage.checkpointed(&checkpoint);
            }
            Step::Restart => self.restart(),
        }
        let held: usize = self.store.topics.values().map(Topic::bytes).sum();
        assert_eq!(self.store.bytes(), held);
    }

    fn subscribe(&mut self, topic: &str, name: u8, durable: bool) {
        let key = self.store.new_key();
        let request = CommandSubscribe {
            subscription: format!("s{name}"),
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
            outbox: Outbox::detached(),
        };
        let seat = Seat { topic: topic.to_owned(), subscription: request.subscription.clone(), key };
        if self.store.subscribe(topic, &request, None, applicant, 0).is_ok() {
            self.store.flow(&seat, 1000);
            self.seats.push(seat);
        }
    }

    /// An only producer comes and goes: the topic's epoch grows.
    fn own(&mut self, topic: &str) {
        let producer = Producer {
            key: self.store.new_key(),
            producer_id: 0,
            request_id: 0,
            name: "owner".to_owned(),
            user_named: true,
            mode: ProducerAccessMode::Exclusive,
            epoch: 0,
            topic_epoch: None,
            schema_version: Vec::new(),
            outbox: Outbox::detached(),
        };
        let key = producer.key;
        self.store.add_producer(topic, producer).unwrap();
        self.store.remove_producer(topic, "owner", key);
    }

    fn keep(&mut self) {
        let waiter = self.store.kept();
        let group = self.store.take_group();
        if let Some(group) = group {
            if !group.ops.is_empty() {
                self.storage.as_mut().unwrap().append(&group.ops).unwrap();
            }
            self.store.settle(group, &Ok(()));
        }
        assert!(waiter.is_none_or(|mut waiter| waiter.try_recv() == Ok(Ok(()))));
        assert!(self.store.take_group().is_none(), "everything is kept");
        self.kept = snapshot(&self.store);
    }

    fn restart(&mut self) {
        self.seats.clear();
        self.storage = None;
        let (storage, store) = open(&self.directory);
        assert_eq!(snapshot(&store), self.kept);
        (self.storage, self.store) = (Some(storage), store);
        let kept = self.kept.values();
        assert!(kept.map(|topic| topic.0).max().is_none_or(|ledger| self.store.ledger > ledger));
    }

    fn id(&self, seat: &prop::sample::Index, entry: &prop::sample::Index) -> Option<(Seat, MessageIdData)> {
        let seats: Vec<&Seat> = self.seats.iter().filter(|seat| self.store.is_seated(seat)).collect();
        let seat = (!seats.is_empty()).then(|| seats[seat.index(seats.len())])?;
        let log = &self.store.topics[&seat.topic].log;
        let end = usize::try_from(log.end()).unwrap();
        (end > 0).then(|| (seat.clone(), log.message_id(entry.index(end) as u64)))
    }

    fn take_seat(&mut self, seat: &prop::sample::Index) -> Option<Seat> {
        self.seats.retain(|seat| self.store.is_seated(seat));
        let index = (!self.seats.is_empty()).then(|| seat.index(self.seats.len()))?;
        Some(self.seats.swap_remove(index))
    }
}

fn open(directory: &TempDir) -> (Storage, Store) {
    let (storage, loaded) = Storage::open(directory.path(), false).unwrap();
    let store = Store::restore(config(), 1, loaded, directory.path(), Arc::default()).unwrap();
    (storage, store)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_restart_finds_what_was_kept(steps in steps()) {
        let mut run = Run::new();
        steps.into_iter().for_each(|step| run.step(step));
        run.keep();
        run.restart();
    }
}

#[test]
fn a_name_that_is_there_twice_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let (mut storage, _) = open(&directory);
    let mut ops = Ops::default();
    for topic in 0..2 {
        let name = TOPICS[0].to_owned();
        ops.put_head(topic, &Head { name, ledger: 5 + topic, next: 0, entries: 0, epoch: None });
    }
    storage.append(&ops).unwrap();
    drop(storage);
    let (_storage, loaded) = Storage::open(directory.path(), false).unwrap();
    let fault = Store::restore(config(), 1, loaded, directory.path(), Arc::default()).unwrap_err();
    for part in ["damaged", TOPICS[0], "twice", directory.path().to_str().unwrap()] {
        assert!(fault.detail.contains(part), "{fault}");
    }
}

#[test]
fn a_refused_group_refuses_what_came_meanwhile_too() {
    let mut run = Run::new();
    let publish = |run: &mut Run| run.store.append(TOPICS[0], &message(0, 0), 0).unwrap().entry_id;
    assert_eq!(publish(&mut run), 0);
    let mut first = run.store.kept().unwrap();
    let group = run.store.take_group().unwrap();
    assert_eq!(publish(&mut run), 1);
    let mut second = run.store.kept().unwrap();
    run.store.settle(group, &Err("full".to_owned()));
    assert_eq!(first.try_recv(), Ok(Err("full".to_owned())));
    assert_eq!(second.try_recv(), Ok(Err("full".to_owned())));
    // Their numbers were seen by nobody.
    assert_eq!(publish(&mut run), 0);
    run.keep();
    run.restart();
    assert_eq!(run.store.topics[TOPICS[0]].log.len(), 1);
}

#[test]
fn what_is_staged_is_seen_by_nobody_and_counts_in_the_limits() {
    let mut run = Run::new();
    run.subscribe(TOPICS[0], 0, true);
    let seat = run.seats[0].clone();
    let mut published = 0;
    while run.store.append(TOPICS[0], &message(0, 0), 0).is_ok() {
        published += 1;
    }
    assert!((3..20).contains(&published), "{published}");
    assert_eq!(run.store.last_message_ids(&seat).unwrap().0.entry_id, u64::MAX);
    run.keep();
    assert_eq!(run.store.last_message_ids(&seat).unwrap().0.entry_id, published - 1);
    run.store.append(TOPICS[0], &message(0, 0), 0).unwrap_err();
}
