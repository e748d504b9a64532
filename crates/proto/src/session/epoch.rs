//! Commits and epochs: when a step is final, and how ranks go on when members change in the middle of one.
//!
//! A step is what ranks do between two commits. With [`Session::begin_commit`] a rank tells every other that it has all
//! results of its step. When all have said so the step is final: whoever gets [`Event::Committed`] knows that every
//! member has the step's results.
//!
//! [`Session::enter`] begins an epoch with other members. Each of them says how far it is (Sync), and when it has heard
//! that from all, each comes to the same decision:
//! - If some member has committed the step that another is still committing, that one has all results too, or the first
//!   could not have: the step is final.
//! - If all members have all results of the step, it is final as it is, with the contributors that it had. (A rank that
//!   is gone may have committed it, but only then.)
//! - Otherwise nobody can have committed it. Its operations are done again by the members of the new epoch, those that
//!   were done too ([`Event::Again`]), so that one set of contributors holds for the whole step. Where somebody cannot
//!   do its part again, the step is aborted by all.
//!
//! Then each says so (Synced), and only after that it is sent data: nothing of an epoch arrives where it is not known
//! what to do with it. Frames of earlier epochs are rejected by their number. Since links keep the order of frames, a
//! peer's Sync also says that none of its writes of earlier epochs are still to land.

use alloc::format;
use alloc::vec::Vec;
use core::mem;

use super::lateness::reserve;
use super::state::{Outgoing, PeerState, Sync};
use super::transmit::Body;
use super::{Event, Next, Recovery, Session, Wish, at_first, name_ranks};
use crate::bits::Bits;
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::frame::{FLAG_HAS_ALL, FLAG_NEWCOMER, FLAG_STUCK, FrameHeader, Location};
use crate::ids::{BucketId, Epoch, Rank, Step, TensorId, UnitIndex};
use crate::limits::MESSAGE_BODY_BYTES_MAX;
use crate::plan::Plan;
use crate::wire::Reader;

/// Bytes of one tensor in a Sync.
const EMPTY_BYTES: usize = 12;
/// Most tensors that a Sync can name.
const EMPTIES_MAX: usize = MESSAGE_BODY_BYTES_MAX / EMPTY_BYTES;

/// Why a step does not stand.
const ABORTED: &str =
    "members changed in the middle of this step, and its operations cannot be done again by those that there are now";

/// A commit in progress.
#[derive(Debug)]
pub(super) struct Committing {
    pub(super) deadline: u64,
    /// When members that are not through with the step are given up next.
    pub(super) late_at: u64,
    pub(super) wish: Wish,
    /// The peers were told that this rank has all results.
    pub(super) said: bool,
}

impl Session {
    /// This rank ended a step, in a job that fails with its first lost rank: operations posted from now on belong to the
    /// next.
    pub fn commit(&mut self) {
        self.pass();
    }

    /// Whether the caller has the results of all that it posted in this step.
    ///
    /// # Errors
    /// `TensorBusy` while operations are in flight. Those that are done again are no affair of the caller.
    pub fn check_idle(&self) -> Result<(), Fault> {
        let Some(tensor) = self.active.iter().find(|tensor| !self.tensors[tensor.index()].again) else { return Ok(()) };
        let detail = "its operation is in flight: wait for a step's operations before its commit";
        Err(Fault::new(FaultKind::TensorBusy, detail).tensor(self.plan.tensor(*tensor).name.clone()))
    }

    /// Begins to commit the step: [`Event::Committed`] follows when every member has all of its results.
    ///
    /// # Errors
    /// The latched fault after a failure; `TensorBusy` while operations are in flight or another commit is. Those that are
    /// done again are no affair of the caller, who has their results: the commit waits for them.
    pub fn begin_commit(&mut self, now: u64, deadline_ns: Option<u64>) -> Result<(), Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        self.check_idle()?;
        if self.committing.is_some() {
            return Err(Fault::new(FaultKind::TensorBusy, "the step is being committed by another thread"));
        }
        let deadline_ns = deadline_ns.unwrap_or(self.config.timing.deadline_ns);
        let deadline = now.saturating_add(deadline_ns);
        let late_at = deadline.saturating_sub(reserve(deadline_ns));
        self.committing = Some(Committing { deadline, late_at, wish: self.wish, said: false });
        self.say_has_all();
        self.check_departed_commit();
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// How many steps are final.
    #[must_use]
    pub const fn commits(&self) -> u64 {
        self.commits
    }

    /// Tells the peers that this rank has all results of the step that it commits, once that is so.
    pub(super) fn say_has_all(&mut self) {
        if self.syncing || !self.active.is_empty() {
            return;
        }
        let Some(committing) = self.committing.as_mut().filter(|committing| !committing.said) else { return };
        committing.said = true;
        let wish = committing.wish;
        for peer in self.others() {
            self.outgoing.push_back(Outgoing::HasAll { peer, commits: self.commits, wish });
        }
        self.check_passed_over();
        self.check_committed();
    }

    pub(super) fn handle_has_all(&mut self, peer: Rank, header: &FrameHeader) -> Result<(), Fault> {
        // A peer that has passed this rank's commit may be through with its next step, if that had no operations.
        if header.step.0 > self.commits + 1 {
            return Err(Fault::violation(peer, "word that it has all of a step that cannot have begun"));
        }
        let wish = Wish::decode(header.unit_count, peer)?;
        let state = &mut self.peers[peer.index()];
        state.has_all_of = state.has_all_of.max(header.step.0 + 1);
        state.wishes[header.step.0 as usize % 2] = wish;
        self.check_committer(peer);
        self.check_committed();
        Ok(())
    }

    fn check_committed(&mut self) {
        let said = self.committing.as_ref().is_some_and(|committing| committing.said);
        if said && !self.syncing && self.others().all(|peer| self.peers[peer.index()].has_all_of > self.commits) {
            self.conclude(self.outcome_said());
            self.pass();
            self.events.push_back(Event::Committed { commits: self.commits });
        }
    }

    /// The step is final.
    fn pass(&mut self) {
        self.commits += 1;
        for tensor in self.touched.drain(..) {
            self.tensors[tensor.index()].since_commit = 0;
        }
    }

    /// Where an epoch was entered and some members have not followed by a deadline: the fault.
    pub(super) fn unsynced(&self) -> Option<Fault> {
        let lost = self.others().find(|peer| self.peers[peer.index()].lost);
        if let (false, Some(rank)) = (self.syncing, lost) {
            let detail = format!(
                "{rank} was lost, and the others did not agree in time on how to go on without it: the broker may be away, or too few ranks left"
            );
            return Some(Fault::new(FaultKind::RankDied, detail).at(rank));
        }
        if self.suspended {
            let detail = format!(
                "{} gone; {}, and no others came in time: start more, or allow fewer; others get the state only from ranks that offer it at the beginning of each step",
                name_ranks(self.gone.iter().copied()),
                self.too_few()
            );
            return Some(at_first(Fault::new(FaultKind::RankDied, detail), &self.gone));
        }
        if !self.syncing {
            return None;
        }
        let behind: Vec<Rank> = self.others().filter(|peer| !self.is_in_epoch(*peer)).collect();
        let detail =
            format!("{} did not enter {} before the deadline", name_ranks(behind.iter().copied()), self.config.epoch);
        let fault = Fault::new(FaultKind::DeadlineExceeded, detail);
        Some(at_first(fault, &behind))
    }

    /// Goes on in an epoch with these members, ascending, of which this rank is one. Each member says how far it is, and
    /// all come to the same decision: the step that they are in stands if all of them have all of its results, and is
    /// done again by them, or aborted, otherwise. Whoever is no member any more has no say from now on. [`Event::Entered`] says what to do next. An epoch that is not later than the present one
    /// changes nothing.
    /// `fresh` are those of them that are other processes than the last that had their ranks: they were in no epoch before.
    pub fn enter(&mut self, epoch: Epoch, members: &[Rank], fresh: &[Rank]) {
        let Some(seat) = members.iter().position(|rank| *rank == self.config.rank) else { return };
        if self.fault.is_some() || epoch <= self.config.epoch {
            return;
        }
        if !self.is_small() {
            self.gone.clear();
        }
        self.gone.extend(self.plan.members.iter().filter(|rank| !members.contains(rank)));
        self.config.epoch = epoch;
        self.seat = seat;
        let ranks = self.peers.len().max(members.last().map_or(0, |last| last.index() + 1));
        self.peers.resize_with(ranks, PeerState::default);
        for (peer, rank) in self.peers.iter_mut().zip((0..).map(Rank)) {
            let member = members.contains(&rank);
            if !member {
                (peer.removed, peer.down, peer.goodbye_acked) = (true, true, true);
            } else if peer.removed || fresh.contains(&rank) {
                *peer = PeerState { sync: peer.sync.take().filter(|sync| sync.epoch >= epoch), ..PeerState::default() };
            }
            peer.manifest.clear();
            peer.landings.clear();
            (peer.manifest_len, peer.has_all_of, peer.corrupt_streak) = (None, 0, 0);
            (peer.open, peer.lost, peer.wishes) = (false, false, [Wish::GoOn; 2]);
        }
        self.outgoing.clear();
        self.work.clear();
        self.queue.clear();
        self.blocked = Bits::new(ranks);
        self.rounds_taken = self.rounds;
        // What a newcomer was told in an epoch that it has not seen through is of no use.
        self.newcomer = self.newcomer.take().map(|_| super::newcomer::Told::default());
        if let Some(committing) = &mut self.committing {
            committing.said = false;
        }
        self.lay_out_anew(members);
        (self.syncing, self.suspended, self.own_sync) = (true, false, None);
        self.events.push_back(Event::Entered);
        // What was said of them in the last epoch does not count in this one.
        for peer in self.others() {
            if self.peers[peer.index()].down {
                let detail = format!("the link to {peer} had ended when {epoch} began with it as a member");
                self.lose(peer, Fault::new(FaultKind::RankDied, detail).at(peer));
            }
        }
    }

    /// The layout of all that is declared, for the members of this epoch.
    pub(super) fn lay_out_anew(&mut self, members: &[Rank]) {
        self.plan = Plan::new(members.into());
        for round in &self.declared {
            self.plan.extend(round);
        }
        for tensor in &mut self.tensors {
            tensor.reset(self.peers.len());
        }
        self.buckets.clear();
        self.add_buckets(0);
    }

    /// Memory is laid out by the new plan: tells every member how far this rank is, and where its contributions are to
    /// be written (`landings`, by rank).
    pub fn sync(&mut self, landings: &[Location], now: u64) {
        if !self.syncing || self.own_sync.is_some() {
            return;
        }
        let touched = self.touched.iter();
        let is_empty = |tensor: &&TensorId| self.plan.tensor(**tensor).elements == 0;
        let empties: Vec<(TensorId, Step)> =
            touched.clone().filter(is_empty).map(|tensor| (*tensor, self.tensors[tensor.index()].step)).collect();
        let stuck = touched.clone().any(|tensor| self.is_stuck(*tensor)) || empties.len() > EMPTIES_MAX;
        let committing = self.committing.as_ref().filter(|_| self.active.is_empty());
        self.own_sync = Some(Sync {
            epoch: self.config.epoch,
            commits: self.commits,
            rounds: self.rounds,
            has_all: committing.is_some(),
            wish: committing.map_or(Wish::GoOn, |committing| committing.wish),
            outcome: self.outcome,
            stuck,
            newcomer: self.newcomer.is_some(),
            landing: Location::default(),
            empties: if stuck { Vec::new() } else { empties },
        });
        for peer in self.others() {
            self.peers[peer.index()].heard_at = now;
            let landing = landings.get(peer.index()).copied().unwrap_or_default();
            self.outgoing.push_back(Outgoing::Sync { peer, landing });
        }
        self.check_synced(now);
    }

    /// Whether an epoch was entered, and some member is not known to have followed and to know what becomes of the step.
    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.is_undecided() || self.others().any(|peer| !self.peers[peer.index()].open)
    }

    /// Whether an epoch was entered, and it is not known what becomes of the step.
    pub(super) const fn is_undecided(&self) -> bool {
        self.syncing && !self.suspended
    }

    /// Whether this rank cannot do its part of what was posted on the tensor in this step again.
    fn is_stuck(&self, tensor: TensorId) -> bool {
        let plan = self.plan.tensor(tensor);
        let again = self.config.recovery == Recovery::Redo
            && self.tensors[tensor.index()].since_commit == 1
            && self.plan.bucket(plan.bucket).collective == Collective::AllReduce;
        plan.elements > 0 && !again
    }

    pub(super) fn is_in_epoch(&self, peer: Rank) -> bool {
        self.peers[peer.index()].sync.as_ref().is_some_and(|sync| sync.epoch == self.config.epoch)
    }

    pub(super) fn handle_sync(&mut self, peer: Rank, header: &FrameHeader, body: &[u8], now: u64) -> Result<(), Fault> {
        let bad = || Fault::violation(peer, "word of how far it is that cannot be read");
        let mut reader = Reader::new(body);
        let mut empties = Vec::new();
        for _ in 0..body.len() / EMPTY_BYTES {
            let tensor = TensorId(reader.u32().map_err(|_| bad())?);
            empties.push((tensor, Step(reader.u64().map_err(|_| bad())?)));
        }
        if !body.len().is_multiple_of(EMPTY_BYTES) {
            return Err(bad());
        }
        let sync = Sync {
            epoch: header.epoch,
            commits: header.step.0,
            rounds: header.unit_count,
            has_all: header.flags & FLAG_HAS_ALL != 0,
            wish: Wish::decode(header.bucket.0, peer)?,
            outcome: Next::decode(header.unit_first.0, peer)?,
            stuck: header.flags & FLAG_STUCK != 0,
            newcomer: header.flags & FLAG_NEWCOMER != 0,
            landing: header.location,
            empties,
        };
        self.peers[peer.index()].sync = Some(sync);
        self.check_synced(now);
        Ok(())
    }

    pub(super) fn handle_synced(&mut self, peer: Rank) -> Result<(), Fault> {
        if !self.is_in_epoch(peer) {
            // Said again, and late: the peer has entered the next epoch since.
            if self.peers[peer.index()].sync.as_ref().is_some_and(|sync| sync.epoch > self.config.epoch) {
                return Ok(());
            }
            return Err(Fault::violation(peer, "word that it is through with an epoch that it has not entered"));
        }
        self.peers[peer.index()].open = true;
        Ok(())
    }

    /// Decides, once every member has said how far it is.
    pub(super) fn check_synced(&mut self, now: u64) {
        let Some(own) = self.own_sync.clone().filter(|_| self.is_undecided()) else { return };
        if !self.others().all(|peer| self.is_in_epoch(peer)) || self.is_orphaned() || !self.is_told() {
            return;
        }
        self.syncing = false;
        self.watches_from = now;
        let peers = self.others().filter_map(|peer| self.peers[peer.index()].sync.clone());
        let all: Vec<Sync> = peers.chain([own.clone()]).collect();
        let newcomers = all.iter().any(|sync| sync.newcomer);
        // Newcomers have no say: they take over what the others come to.
        let syncs: Vec<Sync> = all.into_iter().filter(|sync| !sync.newcomer).collect();
        let commits = syncs.iter().map(|sync| sync.commits).max().unwrap_or(own.commits);
        let rounds = syncs.iter().map(|sync| sync.rounds).max().unwrap_or(own.rounds);
        for peer in self.others() {
            let state = &mut self.peers[peer.index()];
            state.landings.push(state.sync.as_ref().map_or(Location::default(), |sync| sync.landing));
            state.rounds_ready = rounds;
        }
        // How the last step ended to those who are furthest, and how this one does if it ends now.
        let reached = syncs.iter().find(|sync| sync.commits == commits).map_or(Next::GoOn, |sync| sync.outcome);
        let agreed = self.outcome(syncs.iter().map(|sync| sync.wish));
        if own.newcomer {
            let ends = self.newcomer.as_ref().is_some_and(|told| told.commits > commits);
            self.outcome = if ends { agreed } else { reached };
            self.take_over(rounds, now);
            return;
        }
        let behind = syncs.iter().any(|sync| sync.commits < commits && !(sync.commits + 1 == commits && sync.has_all));
        if behind || own.rounds < rounds && (own.rounds + 1 < rounds || self.declared.len() < rounds as usize) {
            let detail = "members that go on together have come unequally far: please report this as a bug";
            self.fail(Fault::new(FaultKind::Diverged, detail));
            return;
        }
        if own.rounds < rounds {
            self.end_round();
            self.rounds_taken = self.rounds;
        }
        if own.commits < commits || syncs.iter().all(|sync| sync.commits == commits && sync.has_all) {
            self.conclude(if own.commits < commits { reached } else { agreed });
            self.pass();
            self.events.push_back(Event::Committed { commits: self.commits });
        }
        let at_step = |sync: &&Sync| sync.commits == self.commits;
        // A newcomer repeats the whole step: whoever is through with an empty operation would be one ahead of it.
        let stuck = |sync: &Sync| sync.stuck || newcomers && !sync.empties.is_empty();
        if self.is_small() {
            // Nothing begins again.
        } else if syncs.iter().filter(at_step).any(stuck) {
            self.abort_step(ABORTED);
        } else {
            self.pass_empties(syncs.iter().filter(at_step).flat_map(|sync| sync.empties.iter().copied()).collect());
            self.redo_step(now);
        }
        self.tell_newcomers();
        self.begin_again(now);
    }

    /// It is known what becomes of the step: the exchange goes on.
    pub(super) fn begin_again(&mut self, now: u64) {
        for peer in self.others() {
            self.outgoing.push_back(Outgoing::Synced(peer));
        }
        self.events.push_back(Event::Synced);
        if self.is_small() {
            self.rest();
        } else {
            for tensor in self.active.clone() {
                self.offer(tensor, self.plan.tensor(tensor).bucket, now);
                self.finish_if_complete(tensor);
            }
            self.restart_round();
        }
        if self.leaving {
            for peer in self.others() {
                self.outgoing.push_back(Outgoing::Goodbye(peer));
            }
        }
        self.say_has_all();
    }

    /// Operations on tensors without elements carry nothing: what one member is through with, all are.
    fn pass_empties(&mut self, reached: Vec<(TensorId, Step)>) {
        for (tensor, step) in reached {
            let Some(state) = self.tensors.get_mut(tensor.index()) else { continue };
            if state.active && state.step.next() == step {
                self.pass_empty(tensor);
            } else if state.step < step {
                // It was not posted here yet.
                state.passed = step;
            }
        }
        for tensor in self.touched.clone() {
            if self.plan.tensor(tensor).elements == 0 {
                self.expect(tensor);
            }
        }
    }

    /// Ends an operation that carries nothing.
    pub(super) fn pass_empty(&mut self, tensor: TensorId) {
        let state = &mut self.tensors[tensor.index()];
        (state.results_missing, state.acks_missing, state.results_to_send) = (0, 0, 0);
        self.finish_if_complete(tensor);
        self.expect(tensor);
    }

    /// Everything that was posted in this step begins anew, what was done too.
    fn redo_step(&mut self, now: u64) {
        for tensor in self.touched.clone() {
            if self.plan.tensor(tensor).elements == 0 {
                continue;
            }
            let timing = self.config.timing;
            let state = &mut self.tensors[tensor.index()];
            if !state.active {
                state.step = state.base;
                state.begin(now, timing.deadline_ns, timing.resend_ns);
                state.again = true;
                state.active_at = self.active.len();
                self.active.push(tensor);
                self.events.push_back(Event::Again { tensor });
            }
            self.tensors[tensor.index()].progress(now);
            self.expect(tensor);
        }
    }

    /// The step's operations end without a result, and the step begins anew.
    pub(super) fn abort_step(&mut self, why: &str) {
        let begun = !self.touched.is_empty() || self.committing.is_some();
        for tensor in mem::take(&mut self.touched) {
            let state = &mut self.tensors[tensor.index()];
            (state.step, state.since_commit, state.active) = (state.base, 0, false);
            self.expect(tensor);
        }
        self.active.clear();
        self.committing = None;
        let members = name_ranks(self.members().iter().copied());
        let detail = format!("{why}: repeat the step from its beginning; {} has {members}", self.config.epoch);
        self.events.push_back(Event::Aborted { fault: Fault::new(FaultKind::StepAborted, detail), begun });
    }

    /// The next reductions of what this rank owns of the tensor have its step.
    pub(super) fn expect(&mut self, tensor: TensorId) {
        let step = self.tensors[tensor.index()].step;
        let plan = self.plan.tensor(tensor);
        let state = &mut self.buckets[plan.bucket.index()];
        for unit in plan.units.start.max(state.owned.start)..plan.units.end.min(state.owned.end) {
            state.expect((unit - state.owned.start) as usize, step);
        }
    }
}

/// Writes a Sync into a message.
pub(super) fn write_sync(sync: &Sync, landing: Location, header: &mut FrameHeader, body: &mut Body) {
    header.step = Step(sync.commits);
    (header.bucket, header.unit_first) = (BucketId(sync.wish as u32), UnitIndex(sync.outcome as u32));
    header.unit_count = sync.rounds;
    header.location = landing;
    let flags = [(sync.has_all, FLAG_HAS_ALL), (sync.stuck, FLAG_STUCK), (sync.newcomer, FLAG_NEWCOMER)];
    header.flags = flags.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
    for (tensor, step) in &sync.empties {
        body.extend(tensor.0.to_le_bytes());
        body.extend(step.0.to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
