//! What a simulated process gets from its surroundings, and what it can ask of them.

use std::ops::Range;
use std::rc::Rc;

use gradwire_proto::frame::Location;
use gradwire_proto::limits::FRAME_HEADER_BYTES;
use gradwire_proto::membership::RecordId;
use gradwire_proto::{Epoch, RegionKey};

use crate::broker::{Record, Topic};
use crate::event::Nanos;
use crate::memory::Memory;
use crate::mutation::Mutation;
use crate::network::Write;
use crate::plan::Plan;
use crate::random::mix;
use crate::report::{ProcessId, Report};

/// What comes to a process.
#[derive(Clone, Debug)]
pub(crate) enum Incoming {
    /// A peer wants to open a link in this epoch, or answers that it is open.
    Hello { from: ProcessId, epoch: Epoch, answer: bool },
    /// A message.
    Message { from: ProcessId, bytes: Box<[u8]> },
    /// A write that has not landed: the process decides.
    Asked { from: ProcessId, write: Box<Write> },
    /// A write that has landed, or was lost because there is no such place.
    Landed { from: ProcessId, immediate: [u8; FRAME_HEADER_BYTES], target: Location, bytes: usize },
    /// The memory of a write is not read any more.
    Sent { to: ProcessId, token: u64 },
    /// The link is over.
    Down { from: ProcessId },
    /// A frame of a stream over which a process gets the state of a job that it joins. The joining process counts its
    /// streams.
    State { from: ProcessId, stream: u32, frame: Box<[u8]> },
    /// The stream is over.
    StateEnd { from: ProcessId, stream: u32 },
    /// It is to leave in good order.
    Leave,
    /// Its trainer does nothing more until then.
    Hang { until: Nanos },
    /// A link to the broker is open: topics come again from their start.
    BrokerUp,
    /// Everything that the topics had when the link was opened has come.
    CaughtUp,
    /// It is lost.
    BrokerDown,
    /// A message of a topic, and its place there.
    Record { topic: Topic, place: usize, record: Record },
    /// What was appended under this token is taken.
    Receipt { token: u64, place: usize },
}

/// What a process asks for.
#[derive(Debug)]
pub(crate) enum Out {
    Hello {
        to: ProcessId,
        epoch: Epoch,
        answer: bool,
    },
    Message {
        to: ProcessId,
        bytes: Box<[u8]>,
    },
    Write {
        to: ProcessId,
        immediate: Box<[u8; FRAME_HEADER_BYTES]>,
        target: Location,
        source: (RegionKey, Range<usize>),
        token: u64,
    },
    /// Ends the link.
    Down {
        to: ProcessId,
    },
    State {
        to: ProcessId,
        stream: u32,
        frame: Box<[u8]>,
    },
    StateEnd {
        to: ProcessId,
        stream: u32,
    },
    Append {
        topic: Topic,
        token: u64,
        record: Record,
    },
    /// Consumes updates from now on.
    Subscribe,
    /// A consumed message is done with, or handed back.
    Settle {
        place: usize,
        back: bool,
    },
    /// Keeps the step that comes next on the disk.
    Store {
        step: u64,
    },
    Report(Report),
}

/// The surroundings of a process while it runs.
pub(crate) struct Context<'a> {
    pub(crate) now: Nanos,
    pub(crate) process: ProcessId,
    pub(crate) plan: &'a Plan,
    pub(crate) mutation: Option<Mutation>,
    pub(crate) memory: &'a mut Memory,
    pub(crate) out: &'a mut Vec<Out>,
    pub(crate) ids: &'a mut u64,
}

impl Context<'_> {
    pub(crate) fn report(&mut self, report: Report) {
        self.out.push(Out::Report(report));
    }

    pub(crate) fn has(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// An id that no other record or process has.
    pub(crate) fn unique(&mut self) -> RecordId {
        *self.ids += 1;
        unique_id(self.plan.seed, self.process, *self.ids)
    }

    /// A number below `bound` that is this process's own.
    pub(crate) fn some(&mut self, bound: u64) -> u64 {
        *self.ids += 1;
        mix(self.plan.seed, &[u64::from(self.process.0), *self.ids, 5]) % bound.max(1)
    }
}

/// The `number`-th id of a process.
pub(crate) fn unique_id(seed: u64, process: ProcessId, number: u64) -> RecordId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&mix(seed, &[u64::from(process.0), number, 3]).to_le_bytes());
    id[8..12].copy_from_slice(&process.0.to_le_bytes());
    id[12..].copy_from_slice(&(number as u32).to_le_bytes());
    id
}

/// What runs in a process.
pub(crate) trait Program {
    /// Takes what came and does all there is to do. Returns when it wants to run again, if nothing comes before.
    fn run(&mut self, context: &mut Context<'_>, incoming: &mut Vec<Incoming>) -> Option<Nanos>;

    /// Whether it has ended by itself.
    fn has_ended(&self) -> bool;
}

/// Who is started: everything about a process that does not change.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) process: ProcessId,
    pub(crate) place: u32,
    /// The id of its Join.
    pub(crate) join: RecordId,
    pub(crate) plan: Rc<Plan>,
    /// The round that its disk says comes next, in the federated mode.
    pub(crate) stored: Option<u64>,
}
