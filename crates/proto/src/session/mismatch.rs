//! Ranks that did not do the same operations between commits: found before what does not belong together is added, or as
//! soon as a rank commits a step in which it had no part in an operation of another. Who is only slow is not blamed.
//!
//! Only allreduces tell: nobody has the result of one before all owners had the contributions of all, so whoever commits a
//! step has no part in those of it that still lack its own. Whoever has its block of a reduce_scatter may still have others'
//! to send again.

use alloc::format;
use alloc::vec::Vec;

use super::{Session, at_first, name_ranks};
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::ids::{Rank, Step, TensorId, UnitIndex};

impl Session {
    /// A rank whose part of this step is here and was posted between other commits than `rank`'s: one of the two left
    /// an operation out or did one more, and what would be added does not belong together.
    pub(super) fn differing_commits(&self, unit: UnitIndex, rank: Rank, step: Step) -> Option<Rank> {
        let me = self.config.rank;
        let plan = self.plan.unit(unit);
        let tensor = &self.tensors[plan.tensor.index()];
        let state = &self.buckets[plan.bucket.index()];
        let world = self.peers.len();
        let arrived = |rank: Rank| state.arrived.get((unit.0 - state.owned.start) as usize * world + rank.index());
        if !tensor.active || tensor.step != step || !arrived(me) {
            return None;
        }
        let differs = |other: &Rank| tensor.commits[other.index()] != tensor.commits[rank.index()];
        if rank == me { self.others().filter(|peer| arrived(*peer)).find(differs) } else { Some(me).filter(differs) }
    }

    pub(super) fn fail_differing(&mut self, unit: UnitIndex, rank: Rank, other: Rank, step: Step) {
        let tensor = self.plan.unit(unit).tensor;
        let commits = |rank: Rank| self.tensors[tensor.index()].commits[rank.index()];
        let detail = format!(
            "{rank} did it after {} commits, but {other} after {}: one of them left an operation out, or did one more; every rank must do the same operations between commits",
            commits(rank),
            commits(other)
        );
        let odd = if rank == self.config.rank { other } else { rank };
        let fault = Fault::new(FaultKind::OperationMismatch, detail).at(odd);
        self.fail(fault.tensor(self.plan.tensor(tensor).name.clone()).step(step));
    }

    /// This rank begins an operation of a step that another commits already.
    pub(super) fn check_committers(&mut self, tensor: TensorId) {
        if !self.needs_all(tensor) {
            return;
        }
        if let Some(peer) = self.others().find(|peer| self.peers[peer.index()].has_all_of > self.commits) {
            self.fail_passed_over(tensor, peer, self.config.rank);
        }
    }

    /// A peer commits the step that this rank is in.
    pub(super) fn check_committer(&mut self, peer: Rank) {
        if self.syncing || self.fault.is_some() || self.peers[peer.index()].has_all_of <= self.commits {
            return;
        }
        let passed_over = |tensor: &&TensorId| self.needs_all(**tensor) && self.lacks_contribution(**tensor, peer);
        if let Some(tensor) = self.active.iter().find(passed_over).copied() {
            self.fail_passed_over(tensor, peer, self.config.rank);
        }
    }

    /// This rank commits its step: nobody may have begun an operation in it that this rank has not.
    pub(super) fn check_passed_over(&mut self) {
        let world = self.peers.len();
        let contributed =
            self.plan.buckets.iter().zip(&self.buckets).filter(|(plan, _)| plan.collective == Collective::AllReduce);
        let mut begun = contributed.filter_map(|(_, state)| {
            let own = state.arrived_count.iter().position(|count| *count > 0)?;
            let rank = (0..world).find(|rank| state.arrived.get(own * world + rank))?;
            Some((UnitIndex(state.owned.start + own as u32), Rank(rank as u32)))
        });
        let first = begun.next();
        if let Some((unit, rank)) = first {
            self.fail_passed_over(self.plan.unit(unit).tensor, self.config.rank, rank);
        }
    }

    /// Whether this contribution is one to a step that this rank commits, without an operation of its own on the tensor.
    pub(super) fn is_passed_over(&self, unit: UnitIndex, step: Step, commits: u16) -> bool {
        let tensor = self.plan.unit(unit).tensor;
        let state = &self.tensors[tensor.index()];
        let committing = self.committing.as_ref().is_some_and(|committing| committing.said);
        committing && !state.active && state.step == step && commits == self.commits as u16 && self.needs_all(tensor)
    }

    fn needs_all(&self, tensor: TensorId) -> bool {
        let plan = self.plan.tensor(tensor);
        plan.elements > 0 && self.plan.bucket(plan.bucket).collective == Collective::AllReduce
    }

    /// `committer` commits the step, in which `poster` does an operation that it has no part in.
    pub(super) fn fail_passed_over(&mut self, tensor: TensorId, committer: Rank, poster: Rank) {
        let state = &self.tensors[tensor.index()];
        let (step, commits) = (state.step, self.commits);
        // Who does an operation once more has left a commit out; otherwise the other made one too many, or left the
        // operation out.
        let own = u32::from(poster == self.config.rank);
        let odd = if state.since_commit > own { poster } else { committer };
        let detail = format!(
            "{committer} is at its commit {} and has no part in it, but {poster} does it after {commits} commits: one of them made a commit too many or too few, or left an operation out; every rank must do the same operations between commits",
            commits + 1
        );
        let fault = Fault::new(FaultKind::OperationMismatch, detail).at(odd);
        self.fail(fault.tensor(self.plan.tensor(tensor).name.clone()).step(step));
    }

    /// The fault of a commit that is past its deadline.
    pub(super) fn uncommitted(&self) -> Fault {
        self.unsynced().unwrap_or_else(|| {
            let behind: Vec<Rank> =
                self.others().filter(|peer| self.peers[peer.index()].has_all_of <= self.commits).collect();
            let names = name_ranks(behind.iter().copied());
            if self.touched.is_empty() {
                // Nothing tells whether the others are late, or this rank committed without having done anything.
                let detail = format!(
                    "{} committed a step without an operation, and {names} did not commit it before the deadline: either it made a commit too many, for every rank must commit equally often, or the others are slow and need a longer deadline",
                    self.config.rank
                );
                return Fault::new(FaultKind::NotOffered, detail);
            }
            let detail = format!(
                "{names} did not commit the step before the deadline, while others did: every rank must commit equally often; a rank that is only slow needs a longer deadline"
            );
            at_first(Fault::new(FaultKind::NotOffered, detail), &behind)
        })
    }
}
