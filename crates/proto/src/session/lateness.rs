//! Ranks that are there, and do not do their part: a trainer that hangs while its process still answers.
//!
//! Whether a rank hangs or only computes nobody can tell but by waiting, and the deadline says for how long. Shortly before
//! it a rank whose part is still missing is given up, if at least half of the members did theirs: so that the others can end
//! the step without it by the deadline, instead of failing with it. Where more are missing it is likelier that the others are
//! wrong, and the operation fails at its deadline, everywhere. Of two halves that wait for each other the first one in the
//! control log stays; one that hangs says nothing there.

use alloc::format;
use alloc::vec::Vec;

use super::{Recovery, Session};
use crate::fault::{Fault, FaultKind};
use crate::ids::{Rank, TensorId};

/// Most time that is kept for going on without a late rank.
const RESERVE_NS_MAX: u64 = 5_000_000_000;

/// Most time that owners have to say whose parts they lack.
const ANSWER_NS_MAX: u64 = 500_000_000;

/// How long before a deadline so far away a late rank is given up: a quarter of it, five seconds at most.
pub(super) fn reserve(deadline_ns: u64) -> u64 {
    (deadline_ns / 4).min(RESERVE_NS_MAX)
}

impl Session {
    /// Gives up the ranks that keep the others waiting for too long.
    pub(super) fn give_up_late(&mut self, now: u64) {
        if self.config.recovery == Recovery::Fail || self.fault.is_some() {
            return;
        }
        let pause = reserve(self.config.timing.deadline_ns) / 2;
        self.ask_who_is_late(now, pause);
        let mut late: Vec<Rank> = Vec::new();
        if self.late_check_at.take_if(|at| *at <= now).is_some() {
            // Who did its part of another operation that is not through may wait for that one, as this rank does. And who did
            // a part of this one does the rest.
            let first = self.active.first().into_iter().flat_map(|tensor| self.without_part(*tensor));
            let is_late = |rank: &Rank| {
                let mut operations = self.active.iter();
                operations.all(|tensor| self.without_part(*tensor).contains(rank) && !self.has_begun(*tensor, *rank))
            };
            late.extend(first.filter(is_late));
        }
        if let Some(committing) = self.committing.as_mut().filter(|committing| now >= committing.late_at) {
            committing.late_at = now.saturating_add(pause);
            // Who did nothing in this step may have made a commit too many.
            if committing.said && !self.touched.is_empty() {
                late.extend(self.others().filter(|peer| self.peers[peer.index()].has_all_of <= self.commits));
            }
        }
        late.retain(|rank| *rank != self.config.rank);
        late.sort_unstable();
        late.dedup();
        // While others are lost, and just after, whoever is late may have waited for them; and who did not run itself has no
        // word on others.
        let loses = self.syncing || self.others().any(|peer| self.peers[peer.index()].lost);
        if loses || now < self.watches_from.saturating_add(pause) || 2 * late.len() > self.members().len() {
            return;
        }
        for rank in late {
            let detail = format!(
                "{rank} did not do its part shortly before the deadline, while others had: its trainer may hang; a rank that is only slow needs a longer deadline"
            );
            self.lose(rank, Fault::new(FaultKind::NotOffered, detail).at(rank));
        }
    }

    /// Asks owners, shortly before it counts, whose parts they lack: what they said before may be long over.
    fn ask_who_is_late(&mut self, now: u64, pause: u64) {
        let mut due = false;
        for tensor in &self.active {
            let state = &mut self.tensors[tensor.index()];
            if now >= state.late_at {
                state.late_at = now.saturating_add(pause);
                due = true;
            }
        }
        if !due || self.syncing || self.late_check_at.is_some() {
            return;
        }
        self.late_check_at = Some(now.saturating_add((pause / 2).min(ANSWER_NS_MAX)));
        for at in 0..self.active.len() {
            let tensor = self.active[at];
            self.tensors[tensor.index()].blamed.clear();
            self.request_missing(tensor);
        }
    }

    /// Whether something of this rank's part of the operation has arrived here.
    fn has_begun(&self, tensor: TensorId, rank: Rank) -> bool {
        let plan = self.plan.tensor(tensor);
        let state = &self.buckets[plan.bucket.index()];
        let units = plan.units.start.max(state.owned.start)..plan.units.end.min(state.owned.end);
        let world = self.peers.len();
        units.map(|unit| (unit - state.owned.start) as usize).any(|own| state.arrived.get(own * world + rank.index()))
    }

    /// When [`Session::give_up_late`] has something to do.
    pub(super) fn late_at(&self) -> Option<u64> {
        if self.config.recovery == Recovery::Fail {
            return None;
        }
        let operations = self.active.iter().map(|tensor| self.tensors[tensor.index()].late_at);
        let committing = self.committing.as_ref().map(|committing| committing.late_at);
        operations.chain(committing).chain(self.late_check_at).min()
    }

    /// Ranks whose part of this operation is missing, as far as this rank knows or was told, in ascending order.
    pub(super) fn without_part(&self, tensor: TensorId) -> Vec<Rank> {
        let mut absent: Vec<Rank> = self.missing_contributors(tensor).collect();
        for rank in self.tensors[tensor.index()].blamed.iter().map(|rank| Rank(rank as u32)) {
            if !absent.contains(&rank) {
                absent.push(rank);
            }
        }
        absent.sort_unstable();
        absent
    }
}
