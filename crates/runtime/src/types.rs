//! What callers say and get.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gradwire_proto::manifest::Declaration;
use gradwire_proto::session::Next;
use gradwire_proto::{Collective, DType, Epoch, Fault, FaultKind, Rank, ReduceOp, Step, WireFormat};
use gradwire_transport::Buffer;

use crate::handle::Tensor;

/// Which links to use between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory between ranks of one host, TCP otherwise.
    #[default]
    Auto,
    /// Shared memory only: all ranks must be on one host.
    Shm,
    /// TCP only.
    Tcp,
}

impl TransportChoice {
    /// Name as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportChoice {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        [Self::Auto, Self::Shm, Self::Tcp].into_iter().find(|choice| choice.name() == text).ok_or_else(|| {
            let detail = format!("transport '{text}' is not known: use auto, shm or tcp");
            Fault::new(FaultKind::InvalidArgument, detail)
        })
    }
}

/// Which payloads carry a checksum that is verified where they are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Integrity {
    /// All that crossed a wire. Within one host's shared memory nothing is copied by a wire, and only descriptors
    /// are checked.
    #[default]
    Links,
    /// All.
    All,
}

/// A tensor to declare: its name, shape and element type, and what is done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: DType,
    pub(crate) collective: Collective,
    pub(crate) reduce: ReduceOp,
    pub(crate) priority: i32,
}

impl TensorSpec {
    /// A tensor that every rank has, to be summed over all ranks ([`Collective::AllReduce`], [`ReduceOp::Sum`]).
    /// `shape` is in elements; `[]` is a scalar.
    #[must_use]
    pub fn new(name: impl Into<String>, shape: &[u64], dtype: DType) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            collective: Collective::AllReduce,
            reduce: ReduceOp::Sum,
            priority: 0,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How its contributions are combined.
    #[must_use]
    pub const fn reduce_op(&self) -> ReduceOp {
        self.reduce
    }

    /// How contributions are combined.
    #[must_use]
    pub const fn reduce(mut self, reduce: ReduceOp) -> Self {
        self.reduce = reduce;
        self
    }

    /// What is done with the tensor. `shape` is that of the whole tensor for all of them; see [`Collective`] for how
    /// it is cut into blocks.
    #[must_use]
    pub const fn collective(mut self, collective: Collective) -> Self {
        self.collective = collective;
        self
    }

    /// Among operations in flight, higher goes first. Rank 0's counts.
    #[must_use]
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    pub(crate) fn declaration(&self, wire: WireFormat) -> Declaration {
        Declaration {
            name: self.name.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
            collective: self.collective,
            reduce: self.reduce,
            wire,
            priority: self.priority,
        }
    }
}

/// How an operation ended: the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The result has an infinity or a NaN. For reduce_scatter: in this rank's block.
    pub found_nonfinite: bool,
    /// How many ranks contributed: the divisor of a mean.
    pub contributors: u32,
    /// Which operation on the tensor this was.
    pub step: Step,
    /// The membership view it was done in.
    pub epoch: Epoch,
}

/// A finished operation's buffers and outcome.
#[derive(Debug)]
pub struct Completed {
    /// Out of place: the contribution, unchanged. In place: `None`; and with
    /// [`Recovery::Redo`](crate::Recovery::Redo), where it is kept until the commit.
    pub input: Option<Buffer>,
    /// The result.
    pub output: Buffer,
    /// How it ended.
    pub outcome: Outcome,
}

/// A failed operation: why, and its buffers (the contribution first). A contribution given out of place is unchanged;
/// the contents of an output buffer are unspecified.
pub struct OpError {
    /// What happened.
    pub fault: Fault,
    /// The buffers of the operation; copies of them where other ranks could still be reading the originals.
    pub buffers: Vec<Buffer>,
}

/// As `Display`: programs that return an error from `main` print this.
impl fmt::Debug for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)
    }
}

impl std::error::Error for OpError {}

impl From<OpError> for Fault {
    fn from(error: OpError) -> Self {
        error.fault
    }
}

/// Identifies what a step made: published to the job's version log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The membership view.
    pub epoch: Epoch,
    /// Counts commits, beginning with the job's first step.
    pub step: Step,
}

/// A step that is final: every rank has the results that this one has.
#[derive(Debug)]
#[must_use = "results of the step may have been replaced"]
pub struct Commit {
    /// Names what the step made.
    pub version: Version,
    /// Whose contributions are in every result of the step, ascending.
    pub contributors: Vec<Rank>,
    /// A rank was lost in this step after operations had ended, and the others did them again without it: these results
    /// count in place of those that were handed out. Always empty with [`Recovery::Fail`](crate::Recovery::Fail) and
    /// [`Recovery::Abort`](crate::Recovery::Abort).
    pub replaced: Vec<Replaced>,
    /// What comes next. Whoever ends does so with the same step: see [`Group::request_stop`](crate::Group::request_stop)
    /// and [`Builder::stop_on_sigterm`](crate::Builder::stop_on_sigterm), without which it is [`Next::GoOn`] always.
    pub next: Next,
}

/// A result that replaces one which was handed out before.
#[derive(Debug)]
pub struct Replaced {
    /// The tensor.
    pub tensor: Tensor,
    /// The result.
    pub output: Buffer,
    /// How it ended.
    pub outcome: Outcome,
}

/// How the state came to a rank that joined a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes of all parts.
    pub bytes: u64,
    /// How long they took, once the members had them ready.
    pub took: Duration,
    /// How many members gave them.
    pub members: u32,
    /// How many of these were lost meanwhile: others gave what they had not.
    pub lost: u32,
}

/// What was counted since the group was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of tensor data sent to peers, or announced to them to be read in place.
    pub payload_bytes_sent: u64,
    /// Bytes that left for peers: headers, messages, and payloads that were written.
    pub wire_bytes_sent: u64,
    /// Bytes that came from peers, as above.
    pub wire_bytes_received: u64,
    /// Frames whose payload did not match its checksum. None was applied.
    pub corrupt_frames: u64,
    /// Frames that had come before. None was applied again.
    pub duplicate_frames: u64,
    /// Frames of another epoch or an older step.
    pub stale_frames: u64,
    /// Units asked for again.
    pub units_requested_again: u64,
    /// Units sent again.
    pub units_resent: u64,
    /// Units that a link spoilt again and again, and that came as copies from another rank, over the broker.
    pub units_from_copies: u64,
    /// Version records that could not be published.
    pub versions_dropped: u64,
}
