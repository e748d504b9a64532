//! Deadlines, and asking again for what does not come.

use alloc::format;
use alloc::vec::Vec;

use super::state::Outgoing;
use super::{Session, at_first, name_ranks};
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::ids::{Rank, TensorId, UnitIndex};

impl Session {
    /// The time at which [`Session::handle_timeout`] must be called, if nothing happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.fault.is_some() {
            return None;
        }
        let operations = self.active.iter().map(|tensor| {
            let state = &self.tensors[tensor.index()];
            state.deadline.min(state.progress_at.saturating_add(state.patience_ns))
        });
        let held = self.queue.iter().filter_map(|bucket| {
            let state = &self.buckets[bucket.index()];
            (state.contributions_to_send > 0 && !state.ready).then_some(state.hold_until)
        });
        let declaring = self.declaring.as_ref().map(|round| round.deadline);
        let committing = self.committing.as_ref().map(|committing| committing.deadline);
        operations.chain(held).chain(declaring).chain(committing).chain(self.next_beat()).chain(self.late_at()).min()
    }

    /// Time has passed: fails what is past its deadline, and asks again for what is overdue.
    pub fn handle_timeout(&mut self, now: u64) {
        self.beat(now);
        self.give_up_late(now);
        for at in 0..self.active.len() {
            // A failure empties the list.
            let Some(tensor) = self.active.get(at).copied() else { return };
            let state = &self.tensors[tensor.index()];
            if now >= state.deadline {
                let fault = self.overdue(tensor);
                self.fail(fault);
                return;
            }
            if now >= state.progress_at.saturating_add(state.patience_ns) {
                if !self.syncing {
                    self.request_missing(tensor);
                }
                let resend_ns_max = self.config.timing.resend_max_ns;
                let state = &mut self.tensors[tensor.index()];
                state.progress(now);
                state.patience_ns = state.patience_ns.saturating_mul(2).min(resend_ns_max.max(state.patience_ns));
            }
        }
        if self.committing.as_ref().is_some_and(|committing| now >= committing.deadline) {
            let fault = self.uncommitted();
            self.fail(fault);
        }
        if self.declaring.as_ref().is_some_and(|round| now >= round.deadline) {
            let fault = self.unsynced().unwrap_or_else(|| self.undeclared());
            self.fail(fault);
        }
    }

    /// Asks for everything that this operation still lacks. Whoever cannot serve it yet says so or ignores it.
    pub(super) fn request_missing(&mut self, tensor: TensorId) {
        let plan = self.plan.tensor(tensor);
        let (bucket, units) = (plan.bucket, plan.units.clone());
        let bucket_plan = self.plan.bucket(bucket);
        let (contributes, collective) = (bucket_plan.contributes(), bucket_plan.collective);
        let step = self.tensors[tensor.index()].step;
        for peer in self.others() {
            if contributes && self.missing_contributors(tensor).any(|rank| rank == peer) {
                self.say(Outgoing::Nack { peer, bucket, tensor, step, results: false });
            }
            if collective != Collective::ReduceScatter && self.next_missing_result(tensor, peer).is_some() {
                self.say(Outgoing::Nack { peer, bucket, tensor, step, results: true });
                if !contributes {
                    self.repeat_offer(tensor, peer);
                }
            }
        }
        // An acknowledgement may be what was lost: sending one unit again makes its receiver repeat it.
        let state = &self.tensors[tensor.index()];
        if state.acks_missing == 0 || state.results_missing > 0 {
            return;
        }
        for peer in self.others() {
            if self.tensors[tensor.index()].acks.get(peer.index()) {
                continue;
            }
            if collective == Collective::ReduceScatter {
                self.repeat_offer(tensor, peer);
            } else {
                let state = &self.buckets[bucket.index()];
                let first = units.start.max(state.owned.start);
                let own = (first - state.owned.start) as usize;
                let world = self.peers.len();
                // A peer that has not offered yet is only late.
                let offered = contributes || state.arrived.get(own * world + peer.index());
                if first < units.end.min(state.owned.end) && offered {
                    self.mark_result(UnitIndex(first), peer);
                }
            }
        }
        self.enqueue(bucket);
    }

    /// Sends the first contribution or offer of this tensor that is `owner`'s again.
    fn repeat_offer(&mut self, tensor: TensorId, owner: Rank) {
        let plan = self.plan.tensor(tensor);
        let owned = &self.plan.bucket(plan.bucket).owned[owner.index()];
        let first = plan.units.start.max(owned.start);
        if first < plan.units.end.min(owned.end) {
            let state = &mut self.buckets[plan.bucket.index()];
            state.mark_contribution(first);
            state.ready = true;
            self.enqueue(plan.bucket);
        }
    }

    /// The fault of an operation that is past its deadline.
    fn overdue(&self, tensor: TensorId) -> Fault {
        if let Some(fault) = self.unsynced() {
            return fault.tensor(self.plan.tensor(tensor).name.clone()).step(self.tensors[tensor.index()].step);
        }
        let state = &self.tensors[tensor.index()];
        let plan = self.plan.tensor(tensor);
        let absent = self.without_part(tensor);
        let fault = match absent.first() {
            Some(first) => {
                let detail = format!(
                    "{} did not offer it before the deadline, while others waited: every rank must run the same operations; a rank that is only slow needs a longer deadline",
                    name_ranks(absent.iter().copied())
                );
                Fault::new(FaultKind::NotOffered, detail).at(*first)
            }
            None => {
                let mut silent: Vec<Rank> =
                    self.others().filter(|peer| self.next_missing_result(tensor, *peer).is_some()).collect();
                let what = if silent.is_empty() { "did not acknowledge its part" } else { "sent no result" };
                if silent.is_empty() {
                    silent = self.others().filter(|peer| !state.acks.get(peer.index())).collect();
                }
                let detail = format!(
                    "{} {what} before the deadline although nothing is known to be missing: it may be stopped, overloaded or cut off",
                    name_ranks(silent.iter().copied())
                );
                let fault = Fault::new(FaultKind::DeadlineExceeded, detail);
                at_first(fault, &silent)
            }
        };
        fault.tensor(plan.name.clone()).step(state.step)
    }
}
