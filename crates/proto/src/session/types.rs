//! What a driver and the session say to each other.

use crate::fault::Fault;
use crate::frame::{FrameHeader, JobTag};
use crate::ids::{Attempt, BucketId, Epoch, Rank, Step, TensorId, UnitIndex};

/// How long things may take, in nanoseconds of the caller's clock.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// An operation without a result this long after it was posted fails the step.
    pub deadline_ns: u64,
    /// Without progress for this long, what is missing is asked for again; doubles up to `resend_max_ns`.
    pub resend_ns: u64,
    /// The longest pause between two requests.
    pub resend_max_ns: u64,
    /// How long a bucket waits for the rest of its tensors before it travels in parts.
    pub linger_ns: u64,
    /// How often every peer is told that this rank is there.
    pub heartbeat_ns: u64,
    /// A peer from which nothing came for this long is lost.
    pub silence_ns: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            deadline_ns: 30_000_000_000,
            resend_ns: 250_000_000,
            resend_max_ns: 2_000_000_000,
            linger_ns: 1_000_000,
            heartbeat_ns: 500_000_000,
            silence_ns: 2_500_000_000,
        }
    }
}

/// Who this rank is.
#[derive(Clone, Copy, Debug)]
pub struct SessionConfig {
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world_size: u32,
    /// The membership view.
    pub epoch: Epoch,
    /// Binds frames to the job.
    pub job: JobTag,
    /// The step that every tensor starts with.
    pub first_step: Step,
    /// How long things may take.
    pub timing: Timing,
    /// Whether results that a link spoils again and again can be had another way: see [`Event::Spoilt`].
    pub copies: bool,
    /// What becomes of a step in which a rank is lost.
    pub recovery: Recovery,
    /// With fewer members than this no step begins: they wait for others to join. See [`Event::Resting`].
    pub ranks_min: u32,
}

/// What becomes of a step in which a rank is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recovery {
    /// The members of the next epoch do it again from their contributions, which are kept until the commit. If all of
    /// them have all results already, it stands as it is.
    #[default]
    Redo,
    /// Its operations end with [`StepAborted`](crate::FaultKind::StepAborted), and the members of the next epoch go on
    /// with the same step from its beginning. Nothing is kept. If all of them have all results already, it stands.
    Abort,
    /// The job fails on every rank. The ranks that it starts with are its members to the end.
    Fail,
}

/// What only the driver can do, because it has the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// All contributions for this unit are here: add them in rank order, then call [`Session::handle_reduced`](super::Session::handle_reduced).
    Reduce(UnitIndex),
    /// This rank's own data for this unit is the result: make it ready to send, then call
    /// [`Session::handle_reduced`](super::Session::handle_reduced).
    Publish(UnitIndex),
}

/// A data frame to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// To whom.
    pub peer: Rank,
    /// What the units are.
    pub data: Data,
    /// The bucket.
    pub bucket: BucketId,
    /// The first unit of the run; all are in one shard.
    pub unit_first: UnitIndex,
    /// How many units.
    pub unit_count: u32,
    /// The step.
    pub step: Step,
    /// Which transmission this is.
    pub attempt: Attempt,
    /// Of contributions and offers: how many commits this rank had made when it posted the operation.
    pub commits: u16,
}

/// What a data frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// This rank's contribution.
    Contribution,
    /// No data: this rank is ready for results.
    Offer,
    /// Results of units that this rank owns; whether the first unit's has an infinity or a NaN.
    Result {
        /// For a run of one unit.
        nonfinite: bool,
    },
}

/// What the driver should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The operation on this tensor ended well on this rank; nothing of it is still to be sent.
    Done {
        /// The tensor.
        tensor: TensorId,
        /// The step it was.
        step: Step,
        /// Whether the result has an infinity or a NaN: the same on every rank.
        nonfinite: bool,
    },
    /// Every rank's declarations of the current round are here: see [`Session::take_manifests`](super::Session::take_manifests).
    Manifests,
    /// Every rank is prepared for the tensors of the current round.
    Prepared,
    /// The job failed. Every operation in flight failed with it, and every later one will.
    Failed(Fault),
    /// A link spoilt results twice in a row. They can be had another way: placed and handed to
    /// [`Session::handle_result`](super::Session::handle_result) like ones that arrived. The link is asked for them again too, after a while.
    Spoilt {
        /// The link's peer, which owns the units.
        peer: Rank,
        /// The frame whose payload was spoilt, with the checksum that it should have had.
        header: FrameHeader,
    },
    /// Every peer that is still there has everything that it needs from this rank, which said goodbye.
    Farewell,
    /// A peer is lost: its link ended, it is silent, or it was given up ([`Session::give_up`](super::Session::give_up); the
    /// fault's scope is `Link` then, and the driver ends the link). Operations that need it wait for an epoch without it.
    Lost {
        /// The peer.
        peer: Rank,
        /// How that showed.
        fault: Fault,
    },
    /// A new epoch begins: lay out memory by the new [`Session::plan`](super::Session::plan), then call
    /// [`Session::sync`](super::Session::sync).
    Entered,
    /// Every member is in the new epoch and knows what becomes of the step. [`Event::Again`] came before, for each
    /// operation that is done again though it was done.
    Synced,
    /// After [`Event::Synced`], in an epoch with fewer members than there have to be: what was posted of a step that is not
    /// final was aborted, and what is posted now waits for an epoch with more.
    Resting {
        /// To tell the caller, whose next step is repeated from its beginning as one that was aborted is.
        fault: Fault,
        /// [`Event::Aborted`] follows, and tells it.
        aborted: bool,
    },
    /// The operation on this tensor was done in this step, and is done again: its contribution is needed again, and
    /// [`Event::Done`] comes again.
    Again {
        /// The tensor.
        tensor: TensorId,
    },
    /// The step does not stand: its operations end without a result, those that were done do not count, and a commit
    /// that was begun is off. It begins anew.
    Aborted {
        /// Why.
        fault: Fault,
        /// This rank had begun the step.
        begun: bool,
    },
    /// The step is final: every member has all of its results.
    Committed {
        /// How many steps are, this one included.
        commits: u64,
    },
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames whose payload did not match its checksum.
    pub corrupt: u64,
    /// Data that had arrived before.
    pub duplicates: u64,
    /// Frames of another epoch or an older step.
    pub stale: u64,
    /// Units asked for again.
    pub nacked: u64,
    /// Units sent again.
    pub resent: u64,
}

/// What of a peer was not taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Frames whose payload did not match its checksum.
    pub corrupt: u64,
    /// Frames of another epoch or an older step.
    pub stale: u64,
}
