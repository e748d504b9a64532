//! The broker: ordered topics, receipts, readers that read again from the start, Key_Shared consumers, and a disk.
//!
//! It does what Apache Pulsar promises and nothing more: a record with a receipt stays (where the broker keeps its
//! topics), one without may stay or not, readers see one order, and after a lost link they see everything again.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_proto::membership::RecordId;

use crate::report::{CommitRecord, ProcessId};

/// A topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Topic {
    /// Membership: everybody reads it.
    Control,
    /// What is committed.
    Versions,
    /// The log of rounds of the federated mode: everybody reads it.
    Rounds,
    /// Contributions of the federated mode: consumed Key_Shared.
    Updates,
    /// Results of the federated mode: contributors read it.
    Results,
}

impl Topic {
    const ALL: [Self; 5] = [Self::Control, Self::Versions, Self::Rounds, Self::Updates, Self::Results];
    /// Those that every process reads from the start.
    pub(crate) const READ: [Self; 3] = [Self::Control, Self::Rounds, Self::Results];
}

/// A message.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// The same when it is written again.
    pub(crate) id: RecordId,
    /// Who wrote it: a rank, or an aggregator's number.
    pub(crate) rank: u32,
    /// For consumers that share by key.
    pub(crate) key: u32,
    pub(crate) body: Body,
}

/// What a message says.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// An encoded body of a control or rounds record, with its kind.
    Bytes(u16, Rc<[u8]>),
    /// A version record.
    Commit(Rc<CommitRecord>),
    /// A contribution to one shard, or a result of one.
    Data { round: u64, shard: u32, attempt: RecordId, digest: u32, bytes: Rc<[u8]> },
}

#[derive(Debug, Default)]
struct Log {
    records: Vec<Record>,
    /// How many of them are on the disk.
    stored: usize,
}

/// A consumer's message that waits for its acknowledgement.
#[derive(Debug)]
struct Unacked {
    consumer: Option<ProcessId>,
}

/// The broker.
#[derive(Debug)]
pub(crate) struct Broker {
    logs: BTreeMap<Topic, Log>,
    keeps: bool,
    /// When it can be reached again.
    pub(crate) down_until: u64,
    /// The link of each process that has one.
    links: BTreeMap<ProcessId, u64>,
    links_opened: u64,
    /// Key_Shared on [`Topic::Updates`].
    consumers: BTreeSet<ProcessId>,
    unacked: BTreeMap<usize, Unacked>,
    acked: BTreeSet<usize>,
}

impl Broker {
    pub(crate) fn new(keeps: bool) -> Self {
        Self {
            logs: Topic::ALL.into_iter().map(|topic| (topic, Log::default())).collect(),
            keeps,
            down_until: 0,
            links: BTreeMap::new(),
            links_opened: 0,
            consumers: BTreeSet::new(),
            unacked: BTreeMap::new(),
            acked: BTreeSet::new(),
        }
    }

    fn log(&mut self, topic: Topic) -> &mut Log {
        self.logs.entry(topic).or_default()
    }

    /// Opens a link. What is on the way over an older one counts no more.
    pub(crate) fn connect(&mut self, process: ProcessId) -> u64 {
        self.links_opened += 1;
        self.links.insert(process, self.links_opened);
        self.links_opened
    }

    pub(crate) fn linked(&self) -> impl Iterator<Item = (ProcessId, u64)> + '_ {
        self.links.iter().map(|(process, link)| (*process, *link))
    }

    /// A process has no link any more. What it consumed and did not acknowledge is anybody's again.
    pub(crate) fn disconnect(&mut self, process: ProcessId) {
        self.links.remove(&process);
        self.consumers.remove(&process);
        for unacked in self.unacked.values_mut().filter(|unacked| unacked.consumer == Some(process)) {
            unacked.consumer = None;
        }
    }

    /// Takes a record. Returns its place.
    pub(crate) fn append(&mut self, topic: Topic, record: Record) -> usize {
        let log = self.log(topic);
        log.records.push(record);
        log.records.len() - 1
    }

    /// Stores everything up to and with this place.
    pub(crate) fn store(&mut self, topic: Topic, place: usize) {
        let log = self.log(topic);
        let before = log.stored;
        log.stored = log.stored.max((place + 1).min(log.records.len()));
        let stored = log.stored;
        if topic == Topic::Updates {
            self.unacked.extend((before..stored).map(|place| (place, Unacked { consumer: None })));
        }
    }

    /// How many records of a topic are stored.
    pub(crate) fn stored(&self, topic: Topic) -> usize {
        self.logs.get(&topic).map_or(0, |log| log.stored)
    }

    pub(crate) fn record(&self, topic: Topic, place: usize) -> Option<&Record> {
        self.logs.get(&topic)?.records.get(place)
    }

    pub(crate) fn len(&self, topic: Topic) -> usize {
        self.logs.get(&topic).map_or(0, |log| log.records.len())
    }

    pub(crate) fn records(&self, topic: Topic) -> &[Record] {
        self.logs.get(&topic).map_or(&[], |log| &log.records)
    }

    /// It was started again: what is not on its disk is gone.
    pub(crate) fn restart(&mut self) {
        let keeps = self.keeps;
        for log in self.logs.values_mut() {
            let kept = if keeps { log.stored } else { 0 };
            log.records.truncate(kept);
            log.stored = kept;
        }
        let updates = self.len(Topic::Updates);
        self.unacked.retain(|place, _| *place < updates);
        self.acked.retain(|place| *place < updates);
        if !keeps {
            self.acked.clear();
        }
        // Acknowledgements that were not stored are forgotten: such messages come again.
        let forgotten: Vec<usize> = self.acked.iter().copied().filter(|place| place % 3 == 0).collect();
        for place in forgotten {
            self.acked.remove(&place);
            self.unacked.insert(place, Unacked { consumer: None });
        }
    }

    /// A process consumes updates from now on.
    pub(crate) fn subscribe(&mut self, process: ProcessId) {
        self.consumers.insert(process);
    }

    /// The consumer of a key: every key has one, and a change of consumers moves some.
    fn consumer_of(&self, key: u32) -> Option<ProcessId> {
        let weight = |consumer: &ProcessId| crate::random::mix(u64::from(key), &[u64::from(consumer.0)]);
        self.consumers.iter().copied().max_by_key(weight)
    }

    /// Hands out messages that nobody has: to whom, and which. A key that moves waits until its old consumer has let
    /// go of it.
    pub(crate) fn hand_out(&mut self) -> Vec<(ProcessId, usize)> {
        let key_of = |place: &usize| self.record(Topic::Updates, *place).map_or(0, |record| record.key);
        let mut held: BTreeMap<u32, ProcessId> = BTreeMap::new();
        for (place, unacked) in &self.unacked {
            if let Some(consumer) = unacked.consumer {
                held.insert(key_of(place), consumer);
            }
        }
        let mut given = Vec::new();
        for place in self.unacked.iter().filter(|(_, unacked)| unacked.consumer.is_none()).map(|(place, _)| *place) {
            let key = key_of(&place);
            let Some(consumer) = self.consumer_of(key) else { break };
            if held.get(&key).is_none_or(|holder| *holder == consumer) {
                given.push((consumer, place));
            }
        }
        for (consumer, place) in &given {
            if let Some(unacked) = self.unacked.get_mut(place) {
                unacked.consumer = Some(*consumer);
            }
        }
        given
    }

    /// A consumer is through with a message, or hands it back.
    pub(crate) fn settle(&mut self, process: ProcessId, place: usize, back: bool) {
        let mine = self.unacked.get(&place).is_some_and(|unacked| unacked.consumer == Some(process));
        if mine && back {
            self.unacked.insert(place, Unacked { consumer: None });
        } else if mine {
            self.unacked.remove(&place);
            self.acked.insert(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: u32) -> Record {
        Record { id: [0; 16], rank: 0, key, body: Body::Bytes(0, Rc::from([])) }
    }

    #[test]
    fn a_restart_keeps_what_is_stored_and_loses_the_rest() {
        for keeps in [true, false] {
            let mut broker = Broker::new(keeps);
            for _ in 0..3 {
                broker.append(Topic::Control, record(0));
            }
            broker.store(Topic::Control, 1);
            broker.restart();
            assert_eq!(broker.len(Topic::Control), if keeps { 2 } else { 0 });
        }
    }

    #[test]
    fn a_key_is_one_consumers_and_moves_only_when_that_lets_go() {
        let mut broker = Broker::new(true);
        broker.subscribe(ProcessId(1));
        for key in 0..20 {
            let place = broker.append(Topic::Updates, record(key));
            broker.store(Topic::Updates, place);
        }
        let first = broker.hand_out();
        assert_eq!(first.len(), 20);
        broker.subscribe(ProcessId(2));
        for key in 0..20 {
            let place = broker.append(Topic::Updates, record(key));
            broker.store(Topic::Updates, place);
        }
        let second = broker.hand_out();
        assert!(second.len() < 20, "some keys moved");
        assert!(second.iter().all(|(consumer, _)| *consumer == ProcessId(1)));
        for (consumer, place) in first.into_iter().chain(second) {
            broker.settle(consumer, place, true);
        }
        let third = broker.hand_out();
        assert_eq!(third.len(), 40);
        assert!(third.iter().any(|(consumer, _)| *consumer == ProcessId(2)));
        broker.disconnect(ProcessId(2));
        assert!(broker.hand_out().iter().all(|(consumer, _)| *consumer == ProcessId(1)));
    }
}
