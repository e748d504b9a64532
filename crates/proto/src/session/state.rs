//! What a session keeps per tensor, bucket and peer. Everything is allocated when tensors are declared.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::ending::{Next, Wish};
use super::lateness::reserve;
use super::types::Rejected;
use crate::bits::Bits;
use crate::frame::Location;
use crate::ids::{Attempt, BucketId, Epoch, Rank, Step, TensorId, UnitIndex};
use crate::plan::BucketPlan;

/// One tensor's current or next operation.
#[derive(Debug)]
pub(super) struct TensorState {
    pub(super) step: Step,
    /// How many operations were posted since the last commit, and the step of the first of them.
    pub(super) base: Step,
    pub(super) since_commit: u32,
    pub(super) active: bool,
    /// Members were through with the operation before this step when members changed, and it carries nothing: whoever posts
    /// it later is through with it too.
    pub(super) passed: Step,
    /// The operation in flight was done before, and is done again.
    pub(super) again: bool,
    /// Its place in the list of operations in flight.
    pub(super) active_at: usize,
    pub(super) deadline: u64,
    /// When ranks whose part is missing are given up next.
    pub(super) late_at: u64,
    /// When something last got better, or was last asked for.
    pub(super) progress_at: u64,
    /// How long without progress until something is asked for.
    pub(super) patience_ns: u64,
    /// Units whose result this rank still lacks.
    pub(super) results_missing: u32,
    /// Frames of results this rank still has to hand to the transport, in units times receivers.
    pub(super) results_to_send: u32,
    /// Ranks that acknowledged, and how many still have to.
    pub(super) acks: Bits,
    pub(super) acks_missing: u32,
    pub(super) nonfinite: bool,
    /// By rank: how many commits it had made when it posted the operation, modulo 2^16.
    pub(super) commits: Box<[u16]>,
    /// Ranks that some owner waits for, as far as this rank was told.
    pub(super) blamed: Bits,
}

impl TensorState {
    pub(super) fn new(step: Step, world: usize) -> Self {
        Self {
            step,
            base: step,
            since_commit: 0,
            active: false,
            passed: Step(0),
            again: false,
            active_at: 0,
            deadline: 0,
            late_at: u64::MAX,
            progress_at: 0,
            patience_ns: 0,
            results_missing: 0,
            results_to_send: 0,
            acks: Bits::new(world),
            acks_missing: 0,
            nonfinite: false,
            commits: vec![0; world].into_boxed_slice(),
            blamed: Bits::new(world),
        }
    }

    pub(super) fn begin(&mut self, now: u64, deadline_ns: u64, resend_ns: u64) {
        (self.active, self.again) = (true, false);
        self.deadline = now.saturating_add(deadline_ns);
        self.late_at = self.deadline.saturating_sub(reserve(deadline_ns));
        self.progress(now);
        // Asked for early enough that who is to blame is known when the deadline comes.
        self.patience_ns = resend_ns.min(deadline_ns / 4).max(1);
        self.nonfinite = false;
        self.blamed.clear();
    }

    pub(super) const fn progress(&mut self, now: u64) {
        self.progress_at = now;
    }

    /// Fits what is kept by rank to other members. What was under way is as if it had not begun.
    pub(super) fn reset(&mut self, ranks: usize) {
        self.results_missing = 0;
        self.results_to_send = 0;
        self.acks = Bits::new(ranks);
        self.acks_missing = 0;
        self.nonfinite = false;
        self.commits = vec![0; ranks].into_boxed_slice();
        self.blamed = Bits::new(ranks);
    }

    pub(super) const fn end(&mut self) {
        self.active = false;
        self.step = self.step.next();
    }
}

/// One bucket's units: which were sent, arrived, reduced and received.
#[derive(Debug)]
pub(super) struct BucketState {
    /// All units, and those that this rank owns, as global unit indices.
    pub(super) units: Range<u32>,
    pub(super) owned: Range<u32>,
    /// By unit: its contribution is to be sent.
    to_contribute: Bits,
    pub(super) contributions_to_send: u32,
    /// By unit: its result of the current step is here.
    pub(super) received: Bits,
    /// By (owned unit, rank): the contribution of the expected step is here.
    pub(super) arrived: Bits,
    pub(super) arrived_count: Box<[u32]>,
    /// By (rank, owned unit): the result is to be sent.
    to_distribute: Bits,
    pub(super) results_to_send: u32,
    /// By owned unit: the step that the next reduction has.
    expected: Box<[Step]>,
    /// By owned unit: the last result has an infinity or a NaN.
    nonfinite: Bits,
    /// How many tensors were posted since contributions last travelled, of how many.
    posted: u32,
    tensors: u32,
    /// Contributions may travel.
    pub(super) ready: bool,
    /// When they may even if tensors are missing.
    pub(super) hold_until: u64,
    pub(super) attempt: Attempt,
    pub(super) queued: bool,
    /// Whose turn it is to be sent to.
    pub(super) turn: u32,
}

impl BucketState {
    /// `step`: the step of a unit's next reduction.
    pub(super) fn new(plan: &BucketPlan, tensors: u32, rank: Rank, world: usize, step: impl Fn(u32) -> Step) -> Self {
        let units = plan.units.len();
        let owned = plan.owned[rank.index()].clone();
        let own = owned.len();
        let expected = owned.clone().map(step).collect();
        Self {
            units: plan.units.clone(),
            owned,
            to_contribute: Bits::new(units),
            contributions_to_send: 0,
            received: Bits::new(units),
            arrived: Bits::new(own * world),
            arrived_count: vec![0; own].into_boxed_slice(),
            to_distribute: Bits::new(own * world),
            results_to_send: 0,
            expected,
            nonfinite: Bits::new(own),
            posted: 0,
            tensors,
            ready: false,
            hold_until: 0,
            attempt: Attempt(0),
            queued: false,
            turn: 0,
        }
    }

    /// A tensor was posted: contributions wait for the rest of the bucket, but not for long.
    pub(super) const fn hold(&mut self, until: u64) {
        self.posted += 1;
        if self.posted == 1 {
            self.hold_until = until;
        }
        if self.posted >= self.tensors {
            self.ready = true;
        }
    }

    pub(super) fn mark_contribution(&mut self, unit: u32) -> bool {
        let new = self.to_contribute.insert((unit - self.units.start) as usize);
        self.contributions_to_send += u32::from(new);
        new
    }

    pub(super) fn unmark_contribution(&mut self, unit: u32) -> bool {
        let was = self.to_contribute.remove((unit - self.units.start) as usize);
        self.contributions_to_send -= u32::from(was);
        if self.contributions_to_send == 0 {
            self.ready = false;
            self.posted = 0;
        }
        was
    }

    /// The first unit in `range` whose contribution is to be sent.
    pub(super) fn next_contribution(&self, range: &Range<u32>) -> Option<u32> {
        let base = self.units.start;
        self.to_contribute.next((range.start - base) as usize, (range.end - base) as usize).map(|at| at as u32 + base)
    }

    pub(super) fn mark_result(&mut self, own: usize, peer: Rank) -> bool {
        let new = self.to_distribute.insert(peer.index() * self.owned.len() + own);
        self.results_to_send += u32::from(new);
        new
    }

    pub(super) fn unmark_result(&mut self, own: usize, peer: Rank) -> bool {
        let was = self.to_distribute.remove(peer.index() * self.owned.len() + own);
        self.results_to_send -= u32::from(was);
        was
    }

    /// The first owned unit whose result is to be sent to `peer`.
    pub(super) fn next_result(&self, peer: Rank, from: usize) -> Option<usize> {
        let base = peer.index() * self.owned.len();
        self.to_distribute.next(base + from, base + self.owned.len()).map(|at| at - base)
    }

    /// The next reduction of this owned unit is to have this step.
    pub(super) fn expect(&mut self, own: usize, step: Step) {
        self.expected[own] = step;
    }

    pub(super) fn publish(&mut self, own: usize, step: Step, nonfinite: bool) {
        self.expected[own] = step.next();
        if nonfinite {
            self.nonfinite.insert(own);
        } else {
            self.nonfinite.remove(own);
        }
    }

    /// The step that the next reduction of this owned unit has.
    pub(super) fn expected(&self, own: usize) -> Step {
        self.expected[own]
    }

    pub(super) fn is_published(&self, own: usize, step: Step) -> bool {
        self.expected[own] == step.next()
    }

    pub(super) fn is_nonfinite(&self, own: usize) -> bool {
        self.nonfinite.get(own)
    }

    /// Makes room for the next step's contributions to this owned unit.
    pub(super) fn forget_arrivals(&mut self, own: usize, world: usize) {
        for rank in 0..world {
            self.arrived.remove(own * world + rank);
        }
        self.arrived_count[own] = 0;
    }

    pub(super) fn forget_arrival(&mut self, own: usize, world: usize, rank: Rank) {
        if self.arrived.remove(own * world + rank.index()) {
            self.arrived_count[own] -= 1;
        }
    }

    pub(super) const fn next_attempt(&mut self) {
        self.attempt = Attempt(self.attempt.0.saturating_add(1));
    }
}

/// What is known of a peer.
#[derive(Debug, Default)]
pub(super) struct PeerState {
    /// It said goodbye.
    pub(super) left: bool,
    /// It said, of a step that has begun here, that it takes no part in it.
    pub(super) stood_aside: bool,
    /// Its link is gone.
    pub(super) down: bool,
    /// It was given up for what it sent: nothing that still comes from it is believed.
    pub(super) given_up: bool,
    /// It needs nothing more from this rank, which said goodbye.
    pub(super) goodbye_acked: bool,
    /// This rank still owes it the word that it needs nothing more.
    pub(super) owes_goodbye_ack: bool,
    /// Its declarations of the round it is in, as far as they are here; and how long they are in all.
    pub(super) manifest: Vec<u8>,
    pub(super) manifest_len: Option<u32>,
    /// How many rounds it has announced, and how many it is prepared for; where our contributions go, by round.
    pub(super) rounds_ready: u32,
    pub(super) landings: Vec<Location>,
    /// Corrupt frames in a row.
    pub(super) corrupt_streak: u32,
    pub(super) rejected: Rejected,
    /// It is no member any more: nothing of it counts.
    pub(super) removed: bool,
    /// How many steps it has all results of, as far as it said so in this epoch.
    pub(super) has_all_of: u64,
    /// What it wanted when it said so: of steps after an even and an odd number of commits. It is one step ahead at most.
    pub(super) wishes: [Wish; 2],
    /// How far it was when it entered an epoch: the latest that it said.
    pub(super) sync: Option<Sync>,
    /// It may be sent data and messages: it said that it knows what becomes of the step.
    pub(super) open: bool,
    /// When something last came from it.
    pub(super) heard_at: u64,
    /// How long it is silent at most, as it said.
    pub(super) beats_within_ns: u64,
    /// Its loss was reported.
    pub(super) lost: bool,
}

/// How far a rank was when it entered an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sync {
    pub(super) epoch: Epoch,
    pub(super) commits: u64,
    /// Declaration rounds that are over.
    pub(super) rounds: u32,
    /// It is committing the step after those, and has all results.
    pub(super) has_all: bool,
    /// What it wants when that step ends, and what came of the last that is final.
    pub(super) wish: Wish,
    pub(super) outcome: Next,
    /// It cannot do its part of that step again.
    pub(super) stuck: bool,
    /// This is its first epoch: it has no part in what the others were at.
    pub(super) newcomer: bool,
    /// Where the receiver's contributions are to be written.
    pub(super) landing: Location,
    /// Tensors without elements that were posted in the step, and the step each is at.
    pub(super) empties: Vec<(TensorId, Step)>,
}

impl PeerState {
    pub(super) const fn reachable(&self) -> bool {
        !self.down
    }

    /// What it wants when the step after so many commits ends, as far as it said so.
    pub(super) const fn wish_at(&self, commits: u64) -> Wish {
        self.wishes[commits as usize % 2]
    }

    pub(super) fn has_manifest(&self) -> bool {
        self.manifest_len.is_some_and(|length| length as usize == self.manifest.len())
    }
}

/// A small message to send, encoded when it is its turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outgoing {
    Abort(Rank),
    Ack {
        peer: Rank,
        tensor: TensorId,
        step: Step,
    },
    Nack {
        peer: Rank,
        bucket: BucketId,
        tensor: TensorId,
        step: Step,
        results: bool,
    },
    NackRun {
        peer: Rank,
        bucket: BucketId,
        unit_first: UnitIndex,
        unit_count: u32,
        step: Step,
        results: bool,
    },
    Waiting {
        peer: Rank,
        tensor: TensorId,
        step: Step,
    },
    Manifest {
        peer: Rank,
        offset: u32,
    },
    Ready {
        peer: Rank,
        round: u32,
        landing: Location,
    },
    Goodbye(Rank),
    GoodbyeAck(Rank),
    Heartbeat(Rank),
    /// A goodbye that says why.
    Resignation(Rank),
    HasAll {
        peer: Rank,
        commits: u64,
        wish: Wish,
    },
    Sync {
        peer: Rank,
        landing: Location,
    },
    Synced(Rank),
    Steps {
        peer: Rank,
        offset: u32,
    },
}

impl Outgoing {
    pub(super) const fn peer(&self) -> Rank {
        match self {
            Self::Abort(peer)
            | Self::Goodbye(peer)
            | Self::GoodbyeAck(peer)
            | Self::Heartbeat(peer)
            | Self::Resignation(peer)
            | Self::Synced(peer) => *peer,
            Self::Ack { peer, .. }
            | Self::Nack { peer, .. }
            | Self::NackRun { peer, .. }
            | Self::Waiting { peer, .. }
            | Self::Manifest { peer, .. }
            | Self::Ready { peer, .. }
            | Self::HasAll { peer, .. }
            | Self::Sync { peer, .. }
            | Self::Steps { peer, .. } => *peer,
        }
    }
}
