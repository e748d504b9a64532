//! Leaving: goodbyes, links that end, and what a rank that is gone is still needed for.

use alloc::format;

use super::state::{Outgoing, PeerState};
use super::{Event, Recovery, Session};
use crate::fault::{Fault, FaultKind, Scope};
use crate::ids::{Rank, TensorId};

impl Session {
    /// Whether the links to all other ranks have ended.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.others().all(|peer| self.peers[peer.index()].down)
    }

    /// Whether all other ranks have said goodbye: nobody goes on.
    #[must_use]
    pub fn have_others_left(&self) -> bool {
        self.others().all(|peer| self.peers[peer.index()].left)
    }

    /// Says goodbye: this rank takes part in nothing further. [`Event::Farewell`] comes once every peer has what it
    /// needs; until then the driver goes on.
    pub fn leave(&mut self) {
        if self.leaving {
            return;
        }
        self.leaving = true;
        for peer in self.others() {
            if self.peers[peer.index()].reachable() {
                self.outgoing.push_back(Outgoing::Goodbye(peer));
            } else {
                self.peers[peer.index()].goodbye_acked = true;
            }
        }
        self.check_farewell();
    }

    /// The link to `peer` ended.
    pub fn handle_link_down(&mut self, peer: Rank, fault: Fault) {
        let state = &mut self.peers[peer.index()];
        state.down = true;
        state.goodbye_acked = true;
        let left = state.left;
        self.outgoing.retain(|message| message.peer() != peer);
        if self.leaving {
            self.check_farewell();
        }
        if left {
            self.check_departed_all();
        } else if self.config.recovery == Recovery::Fail {
            self.fail(fault);
        } else {
            self.lose(peer, fault);
        }
    }

    /// What `peer` sent cannot be, or its link spoils everything (a fault of scope `Link`): nothing more is believed of it.
    /// Where lost ranks do not fail the job it counts as lost, and the driver ends its link when [`Event::Lost`] says so;
    /// otherwise, and for all other faults, the job fails.
    pub fn give_up(&mut self, peer: Rank, fault: Fault) {
        if self.config.recovery == Recovery::Fail || fault.kind.scope() != Scope::Link {
            self.fail(fault);
        } else if self.fault.is_none() {
            self.peers[peer.index()].given_up = true;
            self.handle_link_down(peer, fault);
        }
    }

    /// After a peer's goodbye: fails what it is still needed for.
    pub(super) fn check_departed_all(&mut self) {
        for at in 0..self.active.len() {
            // A failure empties the list.
            let Some(tensor) = self.active.get(at).copied() else { break };
            self.check_departed(tensor);
        }
        self.check_departed_commit();
        if let Some(round) = &self.declaring {
            let gone = self.others().find(|peer| self.peers[peer.index()].left && self.is_behind(round, *peer));
            if let Some(rank) = gone.filter(|_| self.config.recovery == Recovery::Fail) {
                let detail = format!("{rank} left the job while the other ranks were declaring tensors");
                self.fail(Fault::new(FaultKind::RankLeft, detail).at(rank));
            }
        }
    }

    /// Fails a commit that waits for a rank which has left, where nobody goes on without it.
    pub(super) fn check_departed_commit(&mut self) {
        let absent = |peer: &PeerState| peer.left && peer.has_all_of <= self.commits;
        let gone = self.others().find(|peer| absent(&self.peers[peer.index()]));
        if let Some(rank) = gone.filter(|_| self.committing.is_some() && self.config.recovery == Recovery::Fail) {
            let detail = format!(
                "{rank} left the job and did not commit this step: every rank must run the same number of steps"
            );
            self.fail(Fault::new(FaultKind::RankLeft, detail).at(rank));
        }
    }

    /// Fails an operation that needs a rank which has left; asks such a rank for results that it may still have.
    pub(super) fn check_departed(&mut self, tensor: TensorId) {
        for peer in self.others() {
            let state = &self.peers[peer.index()];
            if !state.left || self.fault.is_some() {
                continue;
            }
            let down = state.down;
            let plan = self.plan.tensor(tensor);
            let (bucket, step) = (plan.bucket, self.tensors[tensor.index()].step);
            let absent = self.lacks_contribution(tensor, peer);
            let lacking = self.plan.bucket(bucket).distributes() && !self.has_all_of(tensor, peer);
            if !down && !absent && lacking {
                self.say(Outgoing::Nack { peer, bucket, tensor, step, results: true });
            } else if (absent || lacking) && self.config.recovery == Recovery::Fail {
                self.fail_departed(tensor, peer);
            }
        }
    }

    /// Whether this rank owns a unit of the tensor that cannot be reduced for want of this peer's contribution.
    pub(super) fn lacks_contribution(&self, tensor: TensorId, peer: Rank) -> bool {
        let plan = self.plan.tensor(tensor);
        let state = &self.buckets[plan.bucket.index()];
        let step = self.tensors[tensor.index()].step;
        let world = self.peers.len();
        let contributes = self.plan.bucket(plan.bucket).contributes();
        let acked = self.tensors[tensor.index()].acks.get(peer.index());
        (plan.units.start.max(state.owned.start)..plan.units.end.min(state.owned.end))
            .map(|unit| (unit - state.owned.start) as usize)
            .any(|own| {
                let settled = if contributes { state.is_published(own, step) } else { acked };
                !settled && !state.arrived.get(own * world + peer.index())
            })
    }

    pub(super) fn fail_departed(&mut self, tensor: TensorId, peer: Rank) {
        let step = self.tensors[tensor.index()].step;
        let detail = format!(
            "{peer} left the job and did not take part in this step: every rank must run the same number of steps"
        );
        self.fail(
            Fault::new(FaultKind::RankLeft, detail).at(peer).tensor(self.plan.tensor(tensor).name.clone()).step(step),
        );
    }

    /// Tells ranks that said goodbye that this rank needs nothing more from them, once that is so.
    pub(super) fn answer_goodbyes(&mut self) {
        if !self.somebody_left {
            return;
        }
        for peer in self.others() {
            if !self.peers[peer.index()].owes_goodbye_ack {
                continue;
            }
            // Where the others go on without it, an operation in which it took no part waits for an epoch, not for it.
            let aside = self.config.recovery != Recovery::Fail;
            let stood_aside = aside && self.peers[peer.index()].stood_aside;
            let needed = self.active.iter().any(|tensor| {
                let distributes = self.plan.bucket(self.plan.tensor(*tensor).bucket).distributes();
                distributes && !self.has_all_of(*tensor, peer) && !(aside && self.lacks_contribution(*tensor, peer))
            });
            if !needed || stood_aside {
                self.peers[peer.index()].owes_goodbye_ack = false;
                self.say(Outgoing::GoodbyeAck(peer));
            }
        }
    }

    /// Ranks whose contributions this rank, as owner, waits for in the tensor's current step.
    pub(super) fn missing_contributors(&self, tensor: TensorId) -> impl Iterator<Item = Rank> + '_ {
        let inactive = !self.tensors[tensor.index()].active;
        self.members().iter().copied().filter(move |rank| {
            if *rank == self.config.rank { inactive } else { self.lacks_contribution(tensor, *rank) }
        })
    }

    pub(super) fn check_farewell(&mut self) {
        let done = self.others().all(|peer| self.peers[peer.index()].goodbye_acked);
        if self.leaving && done && !self.farewell {
            self.farewell = true;
            self.events.push_back(Event::Farewell);
        }
    }
}
