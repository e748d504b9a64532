//! Commits, and going on with other members: what `crates/runtime/src/engine/epoch.rs` is in the product.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::{Fault, FaultKind, Rank, TensorId};

use super::exchange::{Exchange, Finished, Outcome, Slot};
use super::links::{Links, process_of};
use crate::event::{Nanos, SECOND};
use crate::mutation::Mutation;
use crate::process::Context;
use crate::report::{ProcessId, Version};

/// How long a new member may take to open its link.
const ARRIVAL_MAX: Nanos = 5 * SECOND;

/// What is kept for commits and epochs.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// Members that are lost, and that the log was not told of yet.
    pub(super) lost: Vec<(RecordId, Fault)>,
    /// Who is a member, by rank.
    pub(super) contributors: Rc<[ProcessId]>,
    /// Of the epoch that was left, until it is known whether its step stands.
    before: Option<Made>,
    /// Results of this step that replace others which the caller has.
    pub(super) replaced: BTreeMap<usize, Finished>,
    /// The step is final, and was made so: the trainer is told once it has all results.
    pub(super) committed: Option<Made>,
    /// What it is told right after.
    next_aborted: Option<Outcome>,
    /// The view that is to be entered, and when somebody who is to open a link is given up.
    pending: Option<(View, Nanos)>,
    /// The step was given up: what is handed over now is for the next epoch.
    pub(super) suspended: bool,
}

/// What a step was made of, as far as this rank reduced it.
#[derive(Clone, Debug)]
pub(super) struct Made {
    /// The step is set when it is final.
    pub(super) version: Version,
    pub(super) contributors: Rc<[ProcessId]>,
    pub(super) ranks: Vec<Rank>,
    /// Units and their checksums.
    pub(super) crcs: Vec<(u32, u32)>,
}

impl Epochs {
    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        self.pending.as_ref().map(|(_, until)| *until)
    }
}

impl Exchange {
    /// There is a new view: it is entered as soon as newcomers have opened their links and, where it only adds members,
    /// at the beginning of a step.
    pub(super) fn set_view(&mut self, now: Nanos, view: View) {
        self.epochs.pending = Some((view, now + ARRIVAL_MAX));
    }

    /// Enters the view that waits, if it is time.
    pub(super) fn try_enter(&mut self, context: &mut Context<'_>, links: &mut Links) -> bool {
        let Some((view, until)) = &self.epochs.pending else { return false };
        if view.epoch <= self.session.config().epoch || self.session.fault().is_some() {
            self.epochs.pending = None;
            return false;
        }
        let fresh: BTreeSet<RecordId> =
            view.members.iter().map(|member| member.id).filter(|id| self.view.member(*id).is_none()).collect();
        let only_adds = self.view.members.iter().all(|member| view.member(member.id).is_some());
        if only_adds && !self.may_grow() && !self.session.is_awaited_in(view.epoch) {
            // Nobody is waited for yet.
            if let Some((_, until)) = &mut self.epochs.pending {
                *until = context.now + ARRIVAL_MAX;
            }
            return false;
        }
        let absent = view.members.iter().filter(|member| fresh.contains(&member.id));
        let mut absent = absent.filter(|member| !process_of(member).is_some_and(|process| links.is_open(process)));
        if let Some(member) = absent.next() {
            if context.now >= *until {
                let detail = format!("{} became a member, but opened no link", member.rank);
                let fault = Fault::new(FaultKind::RankDied, detail).at(member.rank);
                self.epochs.lost.push((member.id, fault));
                if let Some((_, until)) = &mut self.epochs.pending {
                    *until = context.now + ARRIVAL_MAX;
                }
            }
            return false;
        }
        let Some((view, _)) = self.epochs.pending.take() else { return false };
        self.enter(context, links, &view, &fresh);
        true
    }

    /// Whether the trainer is at the beginning of a step.
    fn may_grow(&self) -> bool {
        self.holder.has_offered(self.session.commits()) && self.session.is_between_steps()
    }

    /// Goes on with these members. Links to those that are none any more end, so that nothing of them lands.
    fn enter(&mut self, context: &mut Context<'_>, links: &mut Links, view: &View, fresh: &BTreeSet<RecordId>) {
        let made = self.made();
        self.epochs.before.get_or_insert(made);
        for member in &self.view.members {
            let gone = view.member(member.id).is_none() && member.id != self.me;
            if let Some(process) = process_of(member).filter(|_| gone) {
                links.disconnect(context, process);
            }
        }
        self.set_members(context, view);
        let members: Vec<Rank> = view.members.iter().map(|member| member.rank).collect();
        let new: Vec<Rank> =
            view.members.iter().filter(|member| fresh.contains(&member.id)).map(|member| member.rank).collect();
        self.session.enter(view.epoch, &members, &new);
        self.epochs.suspended = false;
        self.welcome(context, links, &new);
        self.take_events(context);
    }

    /// Takes what comes over these links from now on, and what has come already.
    pub(super) fn welcome(&mut self, context: &mut Context<'_>, links: &mut Links, ranks: &[Rank]) {
        let me = self.me();
        for rank in ranks.iter().copied().filter(|rank| *rank != me) {
            match links.welcome(self.peers[rank.index()].process) {
                Some(held) => held.into_iter().for_each(|incoming| self.handle(context, incoming)),
                None => self.handle_down(rank),
            }
        }
    }

    /// Too few ranks are left to go on: the caller gets its step back, to offer its state to others.
    pub(super) fn rest(&mut self, fault: Fault, aborted: bool) {
        self.epochs.suspended = true;
        let offers = self.holder.resting;
        self.holder.set_too_few(Some(Fault::new(FaultKind::DeadlineExceeded, fault.detail.as_str())));
        if aborted || offers {
            return;
        }
        // A caller that is about to begin the step has to offer its state first, too.
        if self.epochs.committed.is_some() {
            // It hears of the step that is final before.
            self.epochs.next_aborted = Some(Outcome::Aborted(fault));
        } else {
            self.outcomes.push_back(Outcome::Aborted(fault));
        }
    }

    pub(super) fn note_lost(&mut self, peer: Rank, fault: Fault) {
        if let Some(member) = self.view.rank(peer) {
            self.epochs.lost.push((member.id, fault));
        }
    }

    /// Everybody knows what becomes of the step.
    pub(super) fn end_sync(&mut self) {
        self.epochs.before = None;
        self.holder.begin(self.session.commits());
        if !self.session.is_small() {
            self.holder.set_too_few(None);
        }
        self.outcomes.push_back(Outcome::Synced);
    }

    fn made(&mut self) -> Made {
        let ranks = self.view.members.iter().map(|member| member.rank).collect();
        let version = self.version(gradwire_proto::Step(0));
        Made { version, contributors: self.epochs.contributors.clone(), ranks, crcs: self.memory.take_checksums() }
    }

    /// Lays out memory by the new plan, and tells the others.
    pub(super) fn lay_out_epoch(&mut self, context: &mut Context<'_>) {
        self.memory.set_aside();
        self.add_round(context, 0);
        self.session.sync(&self.landings(), context.now);
    }

    /// An operation that was done is done again, from the contribution that was kept.
    pub(super) fn do_again(&mut self, context: &Context<'_>, tensor: TensorId) {
        if let Some(at) = self.finishing.iter().position(|finishing| finishing.tensor == tensor.index()) {
            // Its buffers are still here.
            self.finishing.swap_remove(at);
            return;
        }
        let slot = &mut self.slots[tensor.index()];
        if context.has(Mutation::RedoFromResult) {
            slot.input = slot.output;
        }
        if slot.given && !slot.replaces {
            std::mem::swap(&mut slot.output, &mut slot.spare);
            slot.replaces = true;
        }
        self.epochs.replaced.remove(&tensor.index());
    }

    /// The step begins anew: what was in flight ends with the reason.
    pub(super) fn abort_step(&mut self, fault: Fault, begun: bool) {
        if !begun {
            // What is still here is of the step before, which is final.
            return;
        }
        self.finishing.clear();
        self.epochs.replaced.clear();
        self.epochs.before = None;
        self.memory.take_checksums();
        self.slots.fill(Slot::default());
        self.outcomes.push_back(Outcome::Aborted(fault));
    }

    /// The step is final.
    pub(super) fn end_commit(&mut self) {
        let mut made = match self.epochs.before.take() {
            Some(made) => made,
            None => self.made(),
        };
        let commits = self.session.commits();
        made.version.step = gradwire_proto::Step(commits - 1);
        self.holder.commit(commits, made.version.epoch, &made.ranks);
        self.epochs.committed = Some(made);
    }

    /// Ends a commit once all results are handed over: peers may say that they have all of the step before this rank
    /// knows that its own writes are through, and what was done again replaces what the trainer has. Nothing of the step is
    /// kept any longer.
    pub(super) fn hand_over_commit(&mut self) -> bool {
        let Some(made) = self.epochs.committed.take_if(|_| self.finishing.is_empty()) else { return false };
        self.slots.fill(Slot::default());
        let replaced = std::mem::take(&mut self.epochs.replaced).into_values().collect();
        self.outcomes.push_back(Outcome::Committed { made, replaced });
        self.outcomes.extend(self.epochs.next_aborted.take());
        true
    }

    /// Frees what earlier epochs left, once no peer writes to it and no write reads it.
    pub(super) fn free_old(&mut self, context: &mut Context<'_>) {
        let settled = self.memory.old_writes_in_flight == 0 && !self.memory.old_rounds.is_empty();
        if settled && !self.session.is_syncing() {
            self.memory.free_old(context);
        }
    }
}
