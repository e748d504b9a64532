//! Processes and the broker: links that come and go, and what travels over them.

use super::World;
use crate::broker::{Body, Broker, Record, Topic};
use crate::event::{MS, Nanos, US};
use crate::mutation::Mutation;
use crate::process::Incoming;
use crate::random::{Draws, mix};
use crate::report::ProcessId;

/// How long the broker takes to store a record.
const STORING: Nanos = 400 * US;
/// How long a process waits before it calls the broker again.
const CALL_AGAIN: Nanos = 50 * MS;

/// What happens at the broker or comes from it. What belongs to a link is void when that is lost.
#[derive(Debug)]
pub(super) enum BrokerEvent {
    Connect { process: ProcessId },
    Append { process: ProcessId, link: u64, topic: Topic, token: u64, record: Record },
    Store { process: ProcessId, link: u64, restarts: u64, topic: Topic, place: usize, token: u64 },
    Receipt { process: ProcessId, link: u64, token: u64, place: usize },
    Deliver { process: ProcessId, link: u64, topic: Topic, place: usize },
    CaughtUp { process: ProcessId, link: u64 },
    Subscribe { process: ProcessId, link: u64 },
    Settle { process: ProcessId, link: u64, place: usize, back: bool },
    Quicker { by: Nanos },
    Once { odds: u32 },
}

/// The broker and the links to it.
#[derive(Debug)]
pub(crate) struct Brokerage {
    pub(crate) broker: Broker,
    pub(super) slow: Nanos,
    pub(super) twice: u32,
    restarts: u64,
    sent: u64,
    /// When the last record is stored: they are in order.
    stored_at: Nanos,
    /// By process.
    lines: Vec<Line>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    link: Option<u64>,
    /// Until when each way is in use: what follows comes later.
    up: Nanos,
    down: Nanos,
    /// Until when what was sent over the last lost link still arrives.
    cut_at: Nanos,
}

impl Brokerage {
    pub(super) fn new(keeps: bool) -> Self {
        Self { broker: Broker::new(keeps), slow: 0, twice: 0, restarts: 0, sent: 0, stored_at: 0, lines: Vec::new() }
    }

    pub(super) fn add(&mut self, process: ProcessId) {
        self.lines.resize(process.index() + 1, Line::default());
    }
}

impl World<'_> {
    /// How long something takes to the broker or back.
    fn trip(&mut self) -> Nanos {
        self.brokerage.sent += 1;
        let chance = mix(self.plan.seed, &[self.brokerage.sent, 17]);
        100 * US + chance % (200 * US) + self.brokerage.slow
    }

    fn up_at(&mut self, process: ProcessId) -> Nanos {
        let trip = self.trip();
        let line = &mut self.brokerage.lines[process.index()];
        line.up = line.up.max(self.now + trip);
        line.up
    }

    fn down_at(&mut self, process: ProcessId) -> Nanos {
        let trip = self.trip();
        let line = &mut self.brokerage.lines[process.index()];
        line.down = line.down.max(self.now + trip);
        line.down
    }

    fn link(&self, process: ProcessId) -> Option<u64> {
        self.brokerage.lines[process.index()].link
    }

    pub(super) fn append(&mut self, process: ProcessId, topic: Topic, token: u64, record: Record) {
        let Some(link) = self.link(process) else { return };
        let at = self.up_at(process);
        self.queue.plan(at, BrokerEvent::Append { process, link, topic, token, record }.into());
    }

    pub(super) fn subscribe(&mut self, process: ProcessId) {
        let Some(link) = self.link(process) else { return };
        let at = self.up_at(process);
        self.queue.plan(at, BrokerEvent::Subscribe { process, link }.into());
    }

    pub(super) fn settle(&mut self, process: ProcessId, place: usize, back: bool) {
        let Some(link) = self.link(process) else { return };
        let at = self.up_at(process);
        self.queue.plan(at, BrokerEvent::Settle { process, link, place, back }.into());
    }

    pub(super) fn happen_at_broker(&mut self, event: BrokerEvent) {
        match event {
            BrokerEvent::Connect { process } => self.connect(process),
            BrokerEvent::Append { process, link, topic, token, record } => {
                // Of what was on its way when the link was lost, the beginning may arrive all the same.
                let lost = self.link(process) != Some(link);
                let cut_at = self.brokerage.lines[process.index()].cut_at;
                if self.brokerage.broker.down_until > self.now || lost && self.now > cut_at {
                    return;
                }
                self.take_record(process, link, topic, token, record);
            }
            BrokerEvent::Store { process, link, restarts, topic, place, token } => {
                if restarts != self.brokerage.restarts {
                    return;
                }
                self.brokerage.broker.store(topic, place);
                if self.mutation != Some(Mutation::EarlyReceipt) {
                    self.give_receipt(process, link, token, place);
                }
                // Nobody sees what could be lost again.
                if topic == Topic::Updates {
                    self.hand_out();
                } else if Topic::READ.contains(&topic) {
                    self.deliver(topic, place);
                }
            }
            BrokerEvent::Receipt { process, link, token, place } => {
                if self.link(process) == Some(link) {
                    self.hand(process, Incoming::Receipt { token, place });
                }
            }
            BrokerEvent::Deliver { process, link, topic, place } => {
                let record = self.brokerage.broker.record(topic, place).cloned();
                if let Some(record) = record.filter(|_| self.link(process) == Some(link)) {
                    self.trace.note(
                        self.now,
                        (8u8, process, topic, place),
                        format_args!("p{} reads {topic:?} {place}", process.0),
                    );
                    self.hand(process, Incoming::Record { topic, place, record });
                }
            }
            BrokerEvent::CaughtUp { process, link } => {
                if self.link(process) == Some(link) {
                    self.hand(process, Incoming::CaughtUp);
                }
            }
            BrokerEvent::Subscribe { process, link } => {
                if self.link(process) == Some(link) {
                    self.brokerage.broker.subscribe(process);
                    self.hand_out();
                }
            }
            BrokerEvent::Settle { process, link, place, back } => {
                if self.link(process) == Some(link) {
                    self.brokerage.broker.settle(process, place, back);
                    self.hand_out();
                }
            }
            BrokerEvent::Quicker { by } => self.brokerage.slow -= by,
            BrokerEvent::Once { odds } => self.brokerage.twice -= odds,
        }
    }

    fn connect(&mut self, process: ProcessId) {
        if !self.is_running(process) || self.link(process).is_some() {
            return;
        }
        if self.brokerage.broker.down_until > self.now {
            let again = self.now + CALL_AGAIN + self.trip();
            self.queue.plan(again, BrokerEvent::Connect { process }.into());
            return;
        }
        let link = self.brokerage.broker.connect(process);
        self.brokerage.lines[process.index()].link = Some(link);
        self.trace.note(self.now, (9u8, process, link), format_args!("p{} has a link to the broker", process.0));
        self.hand(process, Incoming::BrokerUp);
        for topic in Topic::READ {
            // What is not stored yet comes to all readers when it is.
            for place in 0..self.brokerage.broker.stored(topic) {
                let at = self.down_at(process);
                self.queue.plan(at, BrokerEvent::Deliver { process, link, topic, place }.into());
            }
        }
        let at = self.down_at(process);
        self.queue.plan(at, BrokerEvent::CaughtUp { process, link }.into());
    }

    fn take_record(&mut self, process: ProcessId, link: u64, topic: Topic, token: u64, record: Record) {
        let place = self.brokerage.broker.append(topic, record);
        let said = self.brokerage.broker.record(topic, place);
        self.trace.note(
            self.now,
            (10u8, process, topic, place),
            format_args!("p{} appends to {topic:?} {place}: {}", process.0, Said(said)),
        );
        if self.mutation == Some(Mutation::EarlyReceipt) {
            self.give_receipt(process, link, token, place);
        }
        let restarts = self.brokerage.restarts;
        let stored = self.brokerage.stored_at.max(self.now + STORING + self.brokerage.slow);
        self.brokerage.stored_at = stored;
        self.queue.plan(stored, BrokerEvent::Store { process, link, restarts, topic, place, token }.into());
    }

    /// To everybody who reads, and now and then twice.
    fn deliver(&mut self, topic: Topic, place: usize) {
        let linked: Vec<(ProcessId, u64)> = self.brokerage.broker.linked().collect();
        for (process, link) in linked {
            let mut draws = Draws::new(self.plan.seed, &[u64::from(process.0), place as u64, topic as u64, 19]);
            let times = 1 + usize::from(draws.strikes(self.brokerage.twice));
            for _ in 0..times {
                let at = self.down_at(process);
                self.queue.plan(at, BrokerEvent::Deliver { process, link, topic, place }.into());
            }
        }
    }

    /// Hands updates to their consumers.
    pub(super) fn hand_out(&mut self) {
        for (process, place) in self.brokerage.broker.hand_out() {
            let Some(link) = self.link(process) else { continue };
            let at = self.down_at(process);
            self.queue.plan(at, BrokerEvent::Deliver { process, link, topic: Topic::Updates, place }.into());
        }
    }

    fn give_receipt(&mut self, process: ProcessId, link: u64, token: u64, place: usize) {
        if self.link(process) == Some(link) {
            let at = self.down_at(process);
            self.queue.plan(at, BrokerEvent::Receipt { process, link, token, place }.into());
        }
    }

    pub(super) fn lose_broker_link(&mut self, process: ProcessId) {
        if self.brokerage.lines[process.index()].link.take().is_none() {
            return;
        }
        let arrives = mix(self.plan.seed, &[self.now, u64::from(process.0), 23]) % (200 * US);
        self.brokerage.lines[process.index()].cut_at = self.now + arrives;
        self.brokerage.broker.disconnect(process);
        self.hand_out();
        self.hand(process, Incoming::BrokerDown);
        let again = self.now + self.trip();
        self.queue.plan(again, BrokerEvent::Connect { process }.into());
    }

    pub(super) fn broker_down(&mut self, until: Nanos, restart: bool) {
        self.brokerage.broker.down_until = self.brokerage.broker.down_until.max(until);
        let linked: Vec<ProcessId> = self.brokerage.broker.linked().map(|(process, _)| process).collect();
        for process in linked {
            self.lose_broker_link(process);
        }
        if restart {
            self.brokerage.restarts += 1;
            self.brokerage.broker.restart();
        }
    }
}

/// A record in words.
struct Said<'a>(Option<&'a Record>);

impl std::fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use gradwire_proto::membership::Body::{Failed, Join, Left, Propose, Snapshot, Suspect};
        let Some(record) = self.0 else { return f.write_str("nothing") };
        let body = match &record.body {
            Body::Bytes(kind, bytes) => gradwire_proto::membership::Body::decode(*kind, bytes),
            Body::Commit(commit) => return write!(f, "{} {}", commit.version.epoch, commit.version.step),
            Body::Data { round, shard, .. } => return write!(f, "round {round} shard {shard}"),
        };
        let name = |id: &[u8; 16]| format!("{:08x}", gradwire_codec::crc32(id));
        write!(f, "{} ", name(&record.id))?;
        match body {
            Ok(Some(Join { .. })) => f.write_str("Join"),
            Ok(Some(Propose { author, epoch, base, members })) => {
                let ranks: Vec<u32> = members.iter().map(|member| member.rank.0).collect();
                write!(f, "Propose {epoch} after {} by {}: {ranks:?}", name(&base), name(&author))
            }
            Ok(Some(Suspect { author, epoch, member, .. })) => {
                write!(f, "Suspect {} by {} in {epoch}", name(&member), name(&author))
            }
            Ok(Some(Left { author })) => write!(f, "Left {}", name(&author)),
            Ok(Some(Failed { fault, .. })) => write!(f, "Failed {fault}"),
            Ok(Some(Snapshot(snapshot))) => {
                let gone: Vec<String> = snapshot.gone.iter().map(|(id, _)| name(id)).collect();
                write!(f, "Snapshot of {} ({}), gone {gone:?}", snapshot.view.epoch, name(&snapshot.view.id))
            }
            _ => write!(f, "{:?}", record.id[0]),
        }
    }
}
