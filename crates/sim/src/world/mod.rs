//! The world that processes live in: runs them, carries what they send, and lets happen what the plan says.

mod brokerage;
mod faults;
mod links;

use std::ops::Range;
use std::rc::Rc;

use gradwire_proto::RegionKey;
use gradwire_proto::frame::Location;
use gradwire_proto::limits::FRAME_HEADER_BYTES;

use crate::broker::Broker;
use crate::event::{Nanos, Queue, SECOND, US};
use crate::federated;
use crate::memory::Memory;
use crate::mutation::Mutation;
use crate::network::{End, Item, Network, Traffic};
use crate::plan::Plan;
use crate::process::{Context, Identity, Incoming, Out, Program, unique_id};
use crate::random::mix;
use crate::rank::RankProgram;
use crate::report::{ProcessId, Report};
use crate::trace::Trace;
use brokerage::{BrokerEvent, Brokerage};

/// How long a process takes for a turn, and for each thing that came.
const TURN: Nanos = US;
const EACH: Nanos = 200;
/// Longest that a job may take beyond its faults and deadlines.
const BEYOND: Nanos = 60 * SECOND;
/// More events than any plan has that ends, for each pair of places.
const EVENTS_MAX: u64 = 200_000;

/// What is to happen.
#[derive(Debug)]
enum Event {
    Start {
        place: u32,
    },
    Turn {
        process: ProcessId,
        number: u64,
    },
    Arrive {
        from: ProcessId,
        to: ProcessId,
        item: Item,
    },
    /// A write's memory is read, and it travels.
    Depart {
        from: ProcessId,
        to: ProcessId,
        write: Box<Departing>,
    },
    /// The n-th fault of the plan begins.
    Fault(usize),
    Resume(ProcessId),
    Quicker {
        process: ProcessId,
        by: Nanos,
    },
    /// A process's disk has it now.
    Stored {
        process: ProcessId,
        step: u64,
    },
    Broker(Box<BrokerEvent>),
}

impl From<BrokerEvent> for Event {
    /// Kept small: there are very many events, and they are moved around all the time.
    fn from(event: BrokerEvent) -> Self {
        Self::Broker(Box::new(event))
    }
}

/// A write that waits for its departure.
#[derive(Debug)]
struct Departing {
    immediate: [u8; FRAME_HEADER_BYTES],
    target: Location,
    source: (RegionKey, Range<usize>),
    token: u64,
}

struct Process {
    identity: Identity,
    /// None once it is over.
    program: Option<Box<dyn Program>>,
    memory: Memory,
    inbox: Vec<Incoming>,
    stopped: bool,
    /// Nobody was told of its end.
    silent: bool,
    slow: Nanos,
    busy_until: Nanos,
    /// When its next turn is, and which number that has: others are void.
    turn_at: Option<Nanos>,
    turn: u64,
    ids: u64,
    writes: u64,
}

/// Who looks at what processes report.
pub(crate) trait Observer {
    /// Takes note of a report.
    fn observe(&mut self, now: Nanos, process: ProcessId, report: &Report);

    /// Whether it has seen enough.
    fn is_broken(&self) -> bool;
}

/// The world.
pub(crate) struct World<'a> {
    plan: Rc<Plan>,
    mutation: Option<Mutation>,
    now: Nanos,
    queue: Queue<Event>,
    network: Network,
    pub(crate) brokerage: Brokerage,
    processes: Vec<Process>,
    /// By place: the process that has it now, and what its disk holds.
    places: Vec<Option<ProcessId>>,
    disks: Vec<Option<u64>>,
    /// Processes that are still to be started, and those that run.
    starts: usize,
    running: usize,
    observer: &'a mut dyn Observer,
    trace: Trace,
    arrivals: Vec<(Nanos, Item)>,
}

/// How a run came to its end.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) now: Nanos,
    /// Every process ended or is dead.
    pub(crate) over: bool,
    pub(crate) traffic: Traffic,
    pub(crate) broker: Broker,
    pub(crate) trace: Trace,
}

impl<'a> World<'a> {
    pub(crate) fn new(plan: Rc<Plan>, mutation: Option<Mutation>, text: bool, observer: &'a mut dyn Observer) -> Self {
        let places = plan.places() as usize;
        let mut world = Self {
            mutation,
            now: 0,
            queue: Queue::new(),
            network: Network::new(plan.seed),
            brokerage: Brokerage::new(plan.broker_keeps),
            processes: Vec::new(),
            places: vec![None; places],
            disks: vec![None; places],
            starts: 0,
            running: 0,
            observer,
            trace: Trace::new(text),
            arrivals: Vec::new(),
            plan,
        };
        for place in 0..world.plan.places_at_start() {
            world.start_at(mix(world.plan.seed, &[u64::from(place), 11]) % (300 * US), place);
        }
        for (index, timed) in world.plan.faults.iter().enumerate() {
            world.queue.plan(timed.at_us * US, Event::Fault(index));
        }
        world
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Ending {
        let patience = self.plan.deadline_ns() * (4 + u64::from(self.plan.steps)) * 2;
        let horizon = self.plan.calm_at() + patience + BEYOND;
        let pairs = u64::from(self.plan.places()).pow(2);
        let mut over = false;
        while let Some((at, event)) = self.queue.next() {
            if at > horizon || self.trace.events() > EVENTS_MAX * pairs {
                break;
            }
            self.now = at;
            self.happen(event);
            over = self.starts == 0 && self.running == 0;
            if over || self.observer.is_broken() {
                break;
            }
        }
        let Self { now, network, brokerage, trace, .. } = self;
        Ending { now, over, traffic: network.traffic, broker: brokerage.broker, trace }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Start { place } => self.start(place),
            Event::Turn { process, number } => {
                let state = &mut self.processes[process.index()];
                if state.turn == number {
                    state.turn_at = None;
                    self.run_process(process);
                }
            }
            Event::Arrive { from, to, item } => self.arrive(from, to, item),
            Event::Depart { from, to, write } => self.depart(from, to, *write),
            Event::Fault(index) => self.begin_fault(index),
            Event::Resume(process) => self.resume(process),
            Event::Quicker { process, by } => self.processes[process.index()].slow -= by,
            Event::Stored { process, step } => {
                let state = &self.processes[process.index()];
                if state.program.is_some() {
                    self.disks[state.identity.place as usize] = Some(step);
                }
            }
            Event::Broker(event) => self.happen_at_broker(*event),
        }
    }

    fn start_at(&mut self, at: Nanos, place: u32) {
        self.starts += 1;
        self.queue.plan(at, Event::Start { place });
    }

    fn start(&mut self, place: u32) {
        self.starts -= 1;
        self.running += 1;
        let process = ProcessId(self.processes.len() as u32);
        let join = unique_id(self.plan.seed, process, 0);
        let stored = self.disks[place as usize];
        let identity = Identity { process, place, join, plan: self.plan.clone(), stored };
        let program: Box<dyn Program> = match self.plan.federated {
            Some(_) if place < self.plan.ranks => Box::new(federated::Contributor::new(identity.clone())),
            Some(_) => Box::new(federated::Aggregator::new(identity.clone())),
            None => Box::new(RankProgram::new(identity.clone(), self.now)),
        };
        self.trace.note(self.now, (0u8, process, place), format_args!("p{} starts as rank {place}", process.0));
        self.processes.push(Process {
            identity,
            program: Some(program),
            memory: Memory::new(process.0),
            inbox: Vec::new(),
            stopped: false,
            silent: false,
            slow: 0,
            busy_until: self.now,
            turn_at: None,
            turn: 0,
            ids: 0,
            writes: 0,
        });
        // The machine is up again, and knows nothing of its old links.
        if let Some(before) = self.places[place as usize].replace(process).filter(|before| self.is_silent(*before)) {
            self.processes[before.index()].silent = false;
            self.end_links(before);
        }
        self.brokerage.add(process);
        self.report(process, &Report::Started { place });
        self.queue.plan(self.now + 100 * US, BrokerEvent::Connect { process }.into());
        self.turn_by(process, self.now);
    }

    fn report(&mut self, process: ProcessId, report: &Report) {
        let line = format_args!("p{} {}", process.0, crate::trace::Said(report));
        self.trace.note(self.now, (1u8, process, crate::trace::essence(report)), line);
        self.observer.observe(self.now, process, report);
    }

    fn is_running(&self, process: ProcessId) -> bool {
        self.processes[process.index()].program.is_some()
    }

    fn is_silent(&self, process: ProcessId) -> bool {
        self.processes[process.index()].silent
    }

    /// Hands something to a process, which takes it in its next turn.
    fn hand(&mut self, process: ProcessId, incoming: Incoming) {
        let state = &mut self.processes[process.index()];
        if state.program.is_none() {
            return;
        }
        state.inbox.push(incoming);
        let at = state.busy_until.max(self.now);
        self.turn_by(process, at);
    }

    /// Lets a process run at that time, if it does not run before.
    fn turn_by(&mut self, process: ProcessId, at: Nanos) {
        let now = self.now;
        let state = &mut self.processes[process.index()];
        let at = at.max(now);
        if state.stopped || state.program.is_none() || state.turn_at.is_some_and(|planned| planned <= at) {
            return;
        }
        state.turn_at = Some(at);
        state.turn += 1;
        let number = state.turn;
        self.queue.plan(at, Event::Turn { process, number });
    }

    fn run_process(&mut self, process: ProcessId) {
        let now = self.now;
        let state = &mut self.processes[process.index()];
        if state.stopped {
            return;
        }
        let Some(mut program) = state.program.take() else { return };
        let mut inbox = std::mem::take(&mut state.inbox);
        let count = inbox.len();
        let mut out = Vec::new();
        let mut context = Context {
            now,
            process,
            plan: &self.plan,
            mutation: self.mutation,
            memory: &mut state.memory,
            out: &mut out,
            ids: &mut state.ids,
        };
        let next = program.run(&mut context, &mut inbox);
        inbox.clear();
        let cost = TURN + EACH * count as u64 + state.slow * u64::from(count > 0 || !out.is_empty());
        state.busy_until = now + cost;
        state.inbox = inbox;
        let ended = program.has_ended();
        state.program = Some(program);
        self.trace.note(
            now,
            (2u8, process, count, out.len()),
            format_args!("p{} takes {count}, gives {}", process.0, out.len()),
        );
        for one in out {
            self.give(process, one);
        }
        if ended {
            self.over(process, false);
        } else if let Some(next) = next {
            let earliest = self.processes[process.index()].busy_until;
            self.turn_by(process, next.max(earliest));
        }
    }

    fn give(&mut self, process: ProcessId, out: Out) {
        match out {
            Out::Hello { to, epoch, answer } => self.send(process, to, Item::Hello { epoch, answer }),
            Out::Down { to } => self.send(process, to, Item::Down),
            Out::State { to, stream, frame } => self.send(process, to, Item::State { stream, frame }),
            Out::StateEnd { to, stream } => self.send(process, to, Item::StateEnd { stream }),
            Out::Message { to, bytes } => self.send(process, to, Item::Message(bytes)),
            Out::Write { to, immediate, target, source, token } => {
                let state = &mut self.processes[process.index()];
                state.writes += 1;
                let wait = self.network.departs_after(process, state.writes, source.1.len());
                let write = Box::new(Departing { immediate: *immediate, target, source, token });
                self.queue.plan(self.now + wait, Event::Depart { from: process, to, write });
            }
            Out::Store { step } => {
                let wait = 50 * US + mix(self.plan.seed, &[u64::from(process.0), step, 13]) % (400 * US);
                self.queue.plan(self.now + wait, Event::Stored { process, step });
            }
            Out::Report(report) => self.report(process, &report),
            Out::Append { topic, token, record } => self.append(process, topic, token, record),
            Out::Subscribe => self.subscribe(process),
            Out::Settle { place, back } => self.settle(process, place, back),
        }
    }

    /// A process is over. Unless `silent`, its links end.
    fn over(&mut self, process: ProcessId, silent: bool) {
        let state = &mut self.processes[process.index()];
        self.running -= usize::from(state.program.take().is_some());
        state.memory = Memory::new(process.0);
        state.inbox = Vec::new();
        state.silent = silent;
        self.brokerage.broker.disconnect(process);
        self.hand_out();
        if !silent {
            self.end_links(process);
        }
    }

    fn end(&self, process: ProcessId) -> End {
        End { process, place: self.processes[process.index()].identity.place }
    }
}
