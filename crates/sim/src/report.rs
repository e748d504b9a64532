//! What processes say of themselves. Checkers see this and nothing else.

use std::rc::Rc;

use gradwire_proto::frame::FrameHeader;
use gradwire_proto::membership::RecordId;
use gradwire_proto::rounds::ContributionId;
use gradwire_proto::{Epoch, Fault, Step};

use crate::event::Nanos;

/// A process: counted from 0 over the whole run, so that one that is started again is another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ProcessId(pub(crate) u32);

impl ProcessId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which result: of which members, in which step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) epoch: Epoch,
    /// The proposal that began the epoch: tells two epochs with one number apart.
    pub(crate) view: RecordId,
    pub(crate) step: Step,
}

/// Stands for the commit among the operations of a step.
pub(crate) const COMMIT: usize = usize::MAX;

/// What a tensor is when its step is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Final {
    /// Of what this rank has of it.
    pub(crate) crc: u32,
    pub(crate) nonfinite: bool,
}

/// What an owner puts on record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommitRecord {
    /// The same when it is written again.
    pub(crate) id: RecordId,
    pub(crate) version: Version,
    /// The place of the rank that wrote it.
    pub(crate) owner: u32,
    /// Unit and CRC-32.
    pub(crate) crcs: Vec<(u32, u32)>,
}

/// A contribution of the federated mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part {
    pub(crate) contributor: u32,
    pub(crate) origin: u64,
    pub(crate) attempt: ContributionId,
}

/// What happened at a process.
#[derive(Clone, Debug)]
pub(crate) enum Report {
    /// It was started.
    Started { place: u32 },
    /// It ended without being asked.
    Died,
    /// It stands still from now on.
    Stopped,
    /// It goes on.
    Resumed,
    /// It goes by a new view from now on.
    View { epoch: Epoch, id: RecordId, members: Rc<[(u32, RecordId)]> },
    /// It has links to all members of its first epoch.
    Linked,
    /// It joined a running job, knows where the others are, and has applied all results up to there.
    Joined { commits: u64 },
    /// It handed an operation over, which has to end by then: its `attempt`-th contribution to it, which counts in this
    /// epoch and in later ones.
    Posted { epoch: Epoch, step: Step, tensor: usize, attempt: u64, by: Nanos },
    /// It began to commit its step, which has to end by then.
    CommitBegun { by: Nanos },
    /// The operation ended well. `bytes`: what of the tensor this rank now has.
    Completed {
        version: Version,
        tensor: usize,
        contributors: Rc<[ProcessId]>,
        rank: u32,
        bytes: Rc<[u8]>,
        nonfinite: bool,
    },
    /// The operation, or the commit ([`COMMIT`]), ended with a fault.
    Failed { tensor: usize, fault: Fault },
    /// The step is final, with these results. The version is of the epoch in which they were made.
    StepDone { version: Version, contributors: Rc<[ProcessId]>, rank: u32, results: Rc<[Final]> },
    /// What its trainer's state is after so many steps.
    State { commits: u64, digest: u64 },
    /// A buffer that was given back is used again, and still is what it was or not.
    Held { tensor: usize, intact: bool },
    /// Data of a peer was counted, or placed. `crc` is of the bytes that were used; the step is the one that this rank
    /// is at.
    Applied { from: ProcessId, header: FrameHeader, crc: u32, epoch: Epoch, step: Step },
    /// A record of a commit got its receipt.
    Committed(Rc<CommitRecord>),
    /// How much it holds as the owner of so many bytes among so many members: what waits to be sent, told or done,
    /// registered memory, and what it remembers of processes and records.
    Load { owned: usize, members: usize, queued: usize, regions: usize, bytes: usize, remembered: usize },
    /// The process ended by itself.
    Ended(Result<(), Fault>),
    /// A contributor began to wait for a round's result, which has to come by then.
    RoundPosted { round: u64, by: Nanos },
    /// What is added up in this round, as this process knows it.
    RoundClosed { round: u64, parts: Rc<[Part]> },
    /// A contributor has a round's result.
    RoundCompleted { round: u64, bytes: Rc<[u8]> },
    /// A contributor gave up on a round.
    RoundFailed { round: u64, fault: Fault },
}
