//! Commits, and going on with other members: what the engine keeps until a step is final, and does again.
//!
//! Where steps are redone, operations are out of place: the contribution stays as it is until the commit, and the result
//! is in another buffer of the tensor's pool. Nothing is copied for it.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::session::{Next, Recovery, Rejected};
use gradwire_proto::{Collective, Epoch, Fault, FaultKind, Rank, Scope, Step, TensorId, UnitIndex};
use gradwire_transport::establish::Arrival;
use gradwire_transport::{Buffer, Capabilities};

use super::{Engine, Submission};
use crate::types::Outcome;

/// How long a new member may take to open its link; or a third of the deadline, if that is less: the others' step waits.
const ARRIVAL_MAX: Duration = Duration::from_secs(5);

/// What is kept for commits and epochs.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// Processes that are lost, and that nobody was told of yet.
    lost: Vec<(RecordId, Fault)>,
    /// Of the epoch that was left, until it is known whether its step stands.
    pub(super) before: Option<Made>,
    /// Results of this step that replace others which callers have.
    pub(super) replaced: Vec<(TensorId, Buffer, Outcome)>,
    commit: Commit,
    /// The step is final, and what it was made of; some of its results may still have to be handed over.
    ending: Option<Made>,
    /// What callers began on tensors whose operations are done again: it begins after that.
    pub(super) deferred: Vec<Submission>,
    /// Steps that were aborted; and why the last one was.
    pub(super) aborts: Arc<Aborts>,
    aborted: Option<Fault>,
    /// The processes that are members now, and which of them are since this epoch.
    processes: Vec<(Rank, RecordId)>,
    fresh: Vec<Rank>,
    /// The view that is to be entered.
    pending: Option<View>,
    /// Processes of it that have opened no link yet, and since when they are waited for.
    absent: Vec<(RecordId, Instant)>,
    /// Links that newcomers opened.
    arrivals: Vec<Arrival>,
}

#[derive(Debug, Default)]
enum Commit {
    #[default]
    None,
    Begun,
    Ended(Result<Committed, Fault>),
}

/// Steps that were aborted, and those of them that the caller has heard of. What it does before it has belongs to a step
/// that is no more: it is refused, for the caller to repeat the step from its beginning.
#[derive(Debug, Default)]
pub(crate) struct Aborts {
    made: AtomicU64,
    heard: AtomicU64,
}

impl Aborts {
    /// How many the caller has heard of.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Acquire)
    }

    /// The caller gets this error.
    pub(crate) fn tell(&self, fault: &Fault) {
        if fault.kind == FaultKind::StepAborted {
            self.heard.store(self.made.load(Ordering::Acquire), Ordering::Release);
        }
    }
}

/// What a step was made of, as far as this rank reduced it.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) epoch: Epoch,
    pub(crate) contributors: Vec<Rank>,
    /// The CRC-32 of every unit that this rank reduced in it.
    pub(crate) crcs: Vec<(UnitIndex, u32)>,
}

/// A step that is final.
#[derive(Debug)]
pub(crate) struct Committed {
    pub(crate) made: Made,
    pub(crate) replaced: Vec<(TensorId, Buffer, Outcome)>,
    /// What of peers was rejected since the last time somebody asked.
    pub(crate) rejected: Vec<(Rank, Rejected)>,
    pub(crate) next: Next,
}

impl Epochs {
    pub(super) fn new(processes: Vec<(Rank, RecordId)>) -> Self {
        Self { processes, ..Self::default() }
    }

    /// The ranks that are members now.
    pub(super) fn members(&self) -> impl Iterator<Item = Rank> {
        self.processes.iter().map(|(rank, _)| *rank)
    }

    /// The abort of a step, if a caller that has heard of so many has not heard of it.
    pub(super) fn unheard(&self, heard: u64) -> Option<Fault> {
        if heard < self.aborts.made.load(Ordering::Acquire) { self.aborted.clone() } else { None }
    }

    /// The step that the caller has begun, or is about to begin, is no more.
    fn note_abort(&mut self, fault: Fault) {
        self.aborts.made.fetch_add(1, Ordering::AcqRel);
        self.aborted = Some(fault);
    }

    /// The job failed.
    pub(super) fn failed(&mut self, fault: &Fault) {
        self.ending = None;
        if matches!(self.commit, Commit::Begun) {
            self.commit = Commit::Ended(Err(fault.clone()));
        }
    }
}

impl Engine {
    /// Whether contributions are kept until the commit.
    pub(super) fn retains(&self, tensor: TensorId) -> bool {
        let plan = self.session.plan();
        let tensor = plan.tensor(tensor);
        self.session.config().recovery == Recovery::Redo
            && tensor.elements > 0
            && plan.bucket(tensor.bucket).collective == Collective::AllReduce
    }

    /// Where contributions are kept, an operation in place gets another buffer for its result.
    pub(super) fn result_apart(&self, tensor: TensorId, input: Option<&Buffer>) -> Result<Option<Buffer>, Fault> {
        if input.is_some() || !self.retains(tensor) || self.session.fault().is_some() {
            return Ok(None);
        }
        self.slots[tensor.index()].shared.pool.take().map(Some)
    }

    /// There is a new view: it is entered as soon as newcomers have opened their links and, where it only adds members,
    /// at the beginning of a step.
    pub(crate) fn set_view(&mut self, view: View) {
        self.epochs.pending = Some(view);
        self.tell_view_waits();
    }

    fn tell_view_waits(&self) {
        if let Some(holder) = &self.holder {
            holder.set_view_waits(self.epochs.pending.is_some());
        }
    }

    /// A peer is lost. One that was given up learns of it by the end of its link.
    ///
    /// Where the link ended for want of something on this machine, it is this rank that cannot go on: taken for the peers'
    /// loss it would cost the job one healthy member after the other. A newcomer that there is no room for stays out.
    pub(super) fn lose(&mut self, peer: Rank, fault: Fault) {
        if fault.kind.is_shortage() && fault.reporter.is_none() && !self.epochs.fresh.contains(&peer) {
            return self.resign_for_want(fault);
        }
        if fault.kind.scope() == Scope::Link {
            self.transport.disconnect(peer);
        }
        // Now: when it is told, another process may have its rank.
        if let Some((_, process)) = self.epochs.processes.iter().find(|(rank, _)| *rank == peer) {
            self.epochs.lost.push((*process, fault));
        }
    }

    /// A newcomer opened its link.
    pub(crate) fn arrived(&mut self, arrival: Arrival) {
        self.epochs.arrivals.retain(|other| other.peer != arrival.peer);
        self.epochs.arrivals.push(arrival);
    }

    /// Enters the view that waits, if it is time.
    pub(super) fn try_enter(&mut self) -> bool {
        if self.epochs.ending.is_some() {
            return false;
        }
        let Some(view) = &self.epochs.pending else { return false };
        if view.epoch <= self.session.config().epoch || self.session.fault().is_some() {
            self.epochs.pending = None;
            self.tell_view_waits();
            return false;
        }
        let is_member = |rank: Rank, id: RecordId| self.epochs.processes.contains(&(rank, id));
        let fresh: Vec<Rank> =
            view.members.iter().filter(|one| !is_member(one.rank, one.id)).map(|one| one.rank).collect();
        let only_adds = self.epochs.processes.iter().all(|(_, id)| view.member(*id).is_some());
        if only_adds && !self.may_grow() && !self.session.is_awaited_in(view.epoch) {
            return false;
        }
        let is_absent = |rank: Rank| !self.epochs.arrivals.iter().any(|arrival| arrival.peer == rank);
        let absent = fresh.iter().filter(|rank| is_absent(**rank)).filter_map(|rank| view.rank(*rank));
        let absent: Vec<(Rank, RecordId)> = absent.map(|member| (member.rank, member.id)).collect();
        if !absent.is_empty() {
            self.give_up_absent(&absent);
            return false;
        }
        self.epochs.absent.clear();
        let Some(view) = self.epochs.pending.take() else { return false };
        self.tell_view_waits();
        self.enter(&view, &fresh);
        true
    }

    /// Says which new members have opened no link for too long. All that have: one after the other they would hold the
    /// others up for longer than the deadline.
    fn give_up_absent(&mut self, absent: &[(Rank, RecordId)]) {
        let deadline = Duration::from_nanos(self.session.config().timing.deadline_ns);
        let (now, most) = (Instant::now(), ARRIVAL_MAX.min(deadline / 3));
        let Epochs { absent: known, lost, .. } = &mut self.epochs;
        known.retain(|(process, _)| absent.iter().any(|(_, other)| other == process));
        for (rank, process) in absent {
            match known.iter_mut().find(|(other, _)| other == process) {
                None => known.push((*process, now)),
                Some((_, since)) if now.duration_since(*since) > most => {
                    *since = now;
                    let detail = format!("{rank} became a member, but opened no link within {} s", most.as_secs_f32());
                    lost.push((*process, Fault::new(FaultKind::RankDied, detail).at(*rank)));
                }
                Some(_) => {}
            }
        }
    }

    /// Whether the trainer is at the beginning of a step: nothing has to be done again, and it does nothing any more, such
    /// as saving, in which a newcomer would have no part.
    fn may_grow(&self) -> bool {
        let offered = self.holder.as_ref().is_some_and(|holder| holder.has_offered(self.session.commits()));
        offered && self.session.is_between_steps()
    }

    /// Goes on with these members. Links to those that are none any more end, so that nothing of them lands.
    fn enter(&mut self, view: &View, fresh: &[Rank]) {
        let made = self.made();
        self.epochs.before.get_or_insert(made);
        let members: Vec<Rank> = view.members.iter().map(|member| member.rank).collect();
        for peer in self.session.members().to_vec() {
            if !members.contains(&peer) || fresh.contains(&peer) {
                self.transport.disconnect(peer);
            }
        }
        let ranks = members.last().map_or(0, |last| last.index() + 1).max(self.capabilities.len());
        self.capabilities.resize(ranks, Capabilities::default());
        self.rejected_by.resize(ranks, Rejected::default());
        self.epochs.processes = view.members.iter().map(|member| (member.rank, member.id)).collect();
        self.epochs.fresh = fresh.to_vec();
        let mut failed = Vec::new();
        for arrival in mem::take(&mut self.epochs.arrivals) {
            let peer = arrival.peer;
            if !fresh.contains(&peer) {
                continue;
            }
            match self.transport.welcome(arrival, Instant::now() + ARRIVAL_MAX) {
                Ok(()) => self.capabilities[peer.index()] = self.transport.capabilities(peer),
                Err(fault) => failed.push((peer, fault)),
            }
            self.rejected_by[peer.index()] = Rejected::default();
        }
        self.session.enter(view.epoch, &members, fresh);
        for (peer, fault) in failed {
            self.session.handle_link_down(peer, fault);
        }
        self.take_events();
    }

    /// Too few ranks are left to go on: the caller gets its step back, to offer its state to others.
    pub(super) fn rest(&mut self, fault: Fault, aborted: bool) {
        let why = Fault::new(FaultKind::DeadlineExceeded, self.session.too_few());
        let offers = self.holder.as_ref().is_some_and(|holder| holder.set_too_few(Some(why)));
        if !aborted && !offers {
            // A caller that is about to begin the step has to offer its state first, too.
            self.epochs.note_abort(fault);
        }
    }

    /// Everybody knows what becomes of the step.
    pub(super) fn end_sync(&mut self) {
        self.epochs.before = None;
        let (commits, first_step) = (self.session.commits(), self.session.config().first_step);
        self.memory.step = Step(first_step.0 + commits);
        if let Some(holder) = &self.holder {
            holder.begin(commits);
            if !self.session.is_small() {
                holder.set_too_few(None);
            }
        }
    }

    /// Steps that are final.
    pub(crate) const fn commits(&self) -> u64 {
        self.session.commits()
    }

    /// Whether an epoch was entered, and some member is not known to have followed.
    pub(crate) fn is_syncing(&self) -> bool {
        self.session.is_syncing()
    }

    pub(super) fn made(&mut self) -> Made {
        let contributors = self.session.members().to_vec();
        Made { epoch: self.session.config().epoch, contributors, crcs: self.memory.take_checksums() }
    }

    /// Lays out memory by the new plan, and tells the others.
    pub(super) fn lay_out_epoch(&mut self) {
        self.inbox.clear();
        self.spoilt.clear();
        self.spoilt_asked.clear();
        let me = self.rank();
        let ranks = self.capabilities.len().max(self.session.plan().ranks());
        self.capabilities.resize(ranks, Capabilities::default());
        self.memory.set_aside(self.session.config().epoch);
        let plan = self.session.plan();
        if let Err(fault) = self.memory.add_round(plan, 0, me, &self.capabilities, &mut *self.transport) {
            return self.resign_for_want(fault);
        }
        let landings = self.landings();
        let now = self.now();
        self.session.sync(&landings, now);
    }

    /// An operation that was done is done again, from the contribution that was kept.
    pub(super) fn do_again(&mut self, tensor: TensorId) {
        if let Some(at) = self.finishing.iter().position(|(finishing, ..)| *finishing == tensor) {
            // Its buffers are still here.
            self.finishing.swap_remove(at);
            return;
        }
        let slot = &mut self.slots[tensor.index()];
        slot.input = slot.retained.take();
        let back = match slot.shared.take_back() {
            Some(Ok(completed)) => Some(completed.output),
            _ => None,
        };
        slot.replaces = back.is_none();
        let earlier = self.epochs.replaced.iter().position(|(replaced, ..)| *replaced == tensor);
        let back = back.or_else(|| earlier.map(|at| self.epochs.replaced.swap_remove(at).1));
        let output = match back {
            Some(output) => Ok(output),
            None => slot.shared.pool.take(),
        };
        let registered = output.and_then(|output| self.register(tensor, &output).map(|()| output));
        match registered {
            Ok(output) => self.slots[tensor.index()].output = Some(output),
            Err(fault) => self.resign_for_want(fault),
        }
    }

    /// This rank is lost to the job.
    pub(crate) fn resign(&mut self, fault: Fault) {
        self.resigned |= self.session.config().recovery != Recovery::Fail && self.session.fault().is_none();
        self.session.resign(fault);
    }

    /// This rank lacks something of its machine without which it cannot go on. The others do not.
    pub(super) fn resign_for_want(&mut self, fault: Fault) {
        let (me, epoch) = (self.rank(), self.session.config().epoch);
        let detail = format!("{me} cannot go on in {epoch}: {}", fault.detail);
        self.resign(Fault { detail, ..fault }.at(me));
    }

    /// Whether this rank's fault is its own affair: the job goes on without it.
    pub(crate) const fn has_resigned(&self) -> bool {
        self.resigned
    }

    /// Begins what waited for operations that were done again. After an abort or failure it ends with the reason.
    pub(super) fn submit_deferred(&mut self) {
        for submission in mem::take(&mut self.epochs.deferred) {
            self.submit(submission);
        }
    }

    /// The step begins anew: what was in flight ends with the reason.
    pub(super) fn abort_step(&mut self, fault: &Fault, begun: bool) {
        if !begun && self.epochs.ending.is_some() {
            // What is here is of the step before, which is final.
            return;
        }
        if begun {
            self.epochs.note_abort(fault.clone());
        }
        self.finishing.clear();
        self.epochs.replaced.clear();
        self.epochs.before = None;
        self.epochs.failed(fault);
        self.memory.take_checksums();
        for tensor in (0..self.slots.len() as u32).map(TensorId) {
            let slot = &mut self.slots[tensor.index()];
            (slot.retained, slot.replaces) = (None, false);
            if slot.output.is_some() {
                let fault = fault.clone().tensor(slot.shared.name.clone());
                self.end(tensor, fault);
            }
        }
    }

    /// Begins to commit the step. It is over when [`Engine::is_committing`] is not.
    pub(crate) fn begin_commit(&mut self, deadline: Duration, heard: u64) -> Result<(), Fault> {
        if let Some(fault) = self.epochs.unheard(heard) {
            return Err(fault);
        }
        if let Some(waits) = self.epochs.deferred.first() {
            // It is posted as soon as what is done again is through: a part of this step, as far as its caller knows.
            let name = self.slots[waits.tensor.index()].shared.name.clone();
            let detail = "its operation is in flight: wait for a step's operations before its commit";
            return Err(Fault::new(FaultKind::TensorBusy, detail).tensor(name));
        }
        let now = self.now();
        self.session.begin_commit(now, Some(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX)))?;
        self.epochs.commit = Commit::Begun;
        Ok(())
    }

    pub(crate) const fn is_committing(&self) -> bool {
        matches!(self.epochs.commit, Commit::Begun)
    }

    /// The step is final. What was done again just before is handed over with it.
    pub(super) fn committed(&mut self) -> usize {
        let made = match self.epochs.before.take() {
            Some(made) => made,
            None => self.made(),
        };
        self.memory.step = self.memory.step.next();
        if let Some(holder) = &self.holder {
            holder.commit(self.session.commits(), made.epoch, &made.contributors);
        }
        self.epochs.ending = Some(made);
        self.finish()
    }

    /// Ends the commit of a step that is final, once all its results are handed over: nothing of it is kept any longer.
    pub(super) fn end_commit(&mut self) {
        if !self.finishing.is_empty() {
            return;
        }
        let Some(made) = self.epochs.ending.take() else { return };
        for slot in &mut self.slots {
            slot.retained = None;
        }
        let (replaced, rejected) = (mem::take(&mut self.epochs.replaced), self.take_rejected());
        let next = self.session.next();
        self.epochs.commit = Commit::Ended(Ok(Committed { made, replaced, rejected, next }));
    }

    /// How the last commit ended.
    pub(crate) fn take_commit(&mut self) -> Result<Committed, Fault> {
        match mem::take(&mut self.epochs.commit) {
            Commit::Ended(ended) => ended,
            Commit::None | Commit::Begun => {
                Err(Fault::new(FaultKind::System, "a commit ended without a word: please report this as a bug"))
            }
        }
    }

    /// A process that is lost, by its Join, and how that showed.
    pub(crate) fn take_lost(&mut self) -> Option<(RecordId, Fault)> {
        self.epochs.lost.pop()
    }

    /// Frees what earlier epochs left, once no peer writes to it and no write reads it.
    pub(super) fn free_old(&mut self) {
        if self.memory.old_rounds.is_empty() && self.quarantine.is_empty() || self.failed {
            return;
        }
        if self.memory.old_writes_in_flight == 0 && !self.session.is_syncing() {
            self.memory.free_old(&mut *self.transport);
            self.quarantine.clear();
        }
    }
}
