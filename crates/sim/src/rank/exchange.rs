//! One rank's exchange: drives the real `gradwire_proto::session::Session` over simulated memory, with the duties that
//! `crates/runtime/src/engine` has in the product.
//!
//! Two things differ over links that do not ask ([`Links::OneSided`](crate::plan::Links::OneSided)), because there a
//! write may land at any time, also long after its slot serves something else: a contribution is copied out of the slot
//! and checked *in the copy*, which alone is used from then on; and results land in staging memory, never in a tensor
//! that is given back one day.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use gradwire_proto::frame::{FrameHeader, JobTag, Location};
use gradwire_proto::manifest::{Declaration, Manifest, agree};
use gradwire_proto::membership::{FIRST_EPOCH, RecordId, View};
use gradwire_proto::session::{Event, MessageBytes, Session, SessionConfig, Timing};
use gradwire_proto::{Collective, Fault, FaultKind, Rank, RegionKey, Step, TensorId};

use super::epoch::{Epochs, Made};
use super::holder::Holder;
use super::links::process_of;
use super::regions::Regions;
use crate::event::Nanos;
use crate::mutation::Mutation;
use crate::network::Write;
use crate::plan::{Links, Plan, Recovery};
use crate::process::{Context, Identity, Incoming, Out};
use crate::report::{ProcessId, Version};

pub(crate) const JOB: JobTag = JobTag(*b"a simulated job!");
/// Writes to one peer that may wait for departure: further ones are refused, as by a full queue.
const WRITES_MAX: u32 = 8;

#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) session: Session,
    /// The view of the session's epoch.
    pub(super) view: View,
    /// By rank.
    pub(super) peers: Vec<Peer>,
    pub(super) ranks: BTreeMap<ProcessId, Rank>,
    pub(super) memory: Regions,
    pub(super) slots: Vec<Slot>,
    /// Operations that the session is through with, but whose memory is still read.
    pub(super) finishing: Vec<Finished>,
    pub(super) links: Links,
    pub(super) me: RecordId,
    /// What is to be declared, by round; and how many rounds were begun.
    to_declare: Vec<Vec<Declaration>>,
    declared: usize,
    pub(super) holder: Holder,
    pub(super) epochs: Epochs,
    /// What the trainer has to know.
    pub(super) outcomes: VecDeque<Outcome>,
    pub(super) failed: Option<Fault>,
    pub(super) farewell: bool,
}

/// What came of what a trainer handed over.
#[derive(Debug)]
pub(super) enum Outcome {
    /// An operation ended well.
    Done(Finished),
    /// The step does not stand.
    Aborted(Fault),
    /// The step is final, with these results in place of others that were handed out before.
    Committed { made: Made, replaced: Vec<Finished> },
    /// All members know what becomes of the step.
    Synced,
}

/// An operation that ended well.
#[derive(Clone, Debug)]
pub(super) struct Finished {
    pub(super) tensor: usize,
    pub(super) version: Version,
    pub(super) contributors: Rc<[ProcessId]>,
    pub(super) nonfinite: bool,
    pub(super) output: RegionKey,
    /// The trainer has an earlier result, and gets this one with its commit.
    pub(super) replaces: bool,
}

/// A process that this one exchanges data with.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peer {
    /// Of a rank that nobody has had: the first process, which does not matter.
    pub(super) process: ProcessId,
    pub(super) down: bool,
    pub(super) writes_waiting: u32,
}

/// A tensor's memory in a step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) input: Option<RegionKey>,
    pub(super) output: Option<RegionKey>,
    /// Where the result goes if the operation is done again and the caller has the first one.
    pub(super) spare: Option<RegionKey>,
    /// The caller has a result.
    pub(super) given: bool,
    /// The next result replaces that one.
    pub(super) replaces: bool,
}

/// What a plan declares, by round.
pub(super) fn declarations(plan: &Plan) -> Vec<Vec<Declaration>> {
    let mut rounds = vec![Vec::new(); plan.rounds as usize];
    for (index, tensor) in plan.tensors.iter().enumerate() {
        rounds[index * plan.rounds as usize / plan.tensors.len()].push(tensor.declaration(index));
    }
    rounds
}

/// Whether contributions are kept until the commit, and results go elsewhere.
pub(super) fn retains(plan: &Plan, tensor: usize) -> bool {
    let tensor = &plan.tensors[tensor];
    let reduced = Collective::from(tensor.collective) == Collective::AllReduce;
    plan.recovery == Recovery::Redo && reduced && tensor.elements > 0
}

impl Exchange {
    /// Begins to exchange data in a view that this process is a member of. `joins`: what the job that it joins has
    /// declared.
    pub(super) fn new(
        context: &mut Context<'_>,
        me: &Identity,
        view: &View,
        joins: Option<&[Vec<Declaration>]>,
    ) -> Self {
        let forgotten = context.has(Mutation::IgnoreDeadline);
        let deadline_ns = if forgotten { Nanos::MAX / 4 } else { context.plan.deadline_ns() };
        let config = SessionConfig {
            rank: Rank(me.place),
            world_size: context.plan.ranks,
            recovery: context.plan.recovery.into(),
            ranks_min: context.plan.ranks_min,
            epoch: if joins.is_some() { view.epoch } else { FIRST_EPOCH },
            job: JOB,
            first_step: Step(0),
            timing: Timing { deadline_ns, ..Timing::default() },
            copies: false,
        };
        let members: Vec<Rank> = view.members.iter().map(|member| member.rank).collect();
        let session = match joins {
            Some(declared) => Session::newcomer(config, &members, declared),
            None => Session::new(config),
        };
        let mut holder = Holder::default();
        holder.declared(session.declared());
        let mut exchange = Self {
            session,
            view: View::default(),
            peers: Vec::new(),
            ranks: BTreeMap::new(),
            memory: Regions::default(),
            slots: vec![Slot::default(); context.plan.tensors.len()],
            finishing: Vec::new(),
            links: context.plan.links,
            me: me.join,
            to_declare: declarations(context.plan),
            declared: joins.map_or(0, <[_]>::len),
            holder,
            epochs: Epochs::default(),
            outcomes: VecDeque::new(),
            failed: None,
            farewell: false,
        };
        exchange.set_members(context, view);
        if joins.is_none() && view.epoch > FIRST_EPOCH {
            // Some were lost while links came up: the others begin in the first epoch, and go on as all do.
            exchange.session.enter(view.epoch, &members, &[]);
        }
        exchange.take_events(context);
        exchange
    }

    /// Takes over who is who in a view.
    pub(super) fn set_members(&mut self, context: &mut Context<'_>, view: &View) {
        let ranks = view.members.last().map_or(0, |last| last.rank.index() + 1);
        self.peers.resize(ranks.max(self.peers.len()), Peer::default());
        self.ranks.clear();
        for member in &view.members {
            let Some(process) = process_of(member) else { continue };
            let peer = &mut self.peers[member.rank.index()];
            if peer.process != process {
                *peer = Peer { process, ..Peer::default() };
            }
            self.ranks.insert(process, member.rank);
        }
        self.epochs.contributors = self.ranks_in_order().map(|rank| self.peers[rank.index()].process).collect();
        self.view = view.clone();
        let members: Rc<[(u32, _)]> = view.members.iter().map(|member| (member.rank.0, member.id)).collect();
        context.report(crate::report::Report::View { epoch: view.epoch, id: view.id, members });
    }

    fn ranks_in_order(&self) -> impl Iterator<Item = Rank> {
        let mut ranks: Vec<Rank> = self.ranks.values().copied().collect();
        ranks.sort_unstable();
        ranks.into_iter()
    }

    pub(super) fn me(&self) -> Rank {
        self.session.config().rank
    }

    pub(super) fn version(&self, step: Step) -> Version {
        Version { epoch: self.view.epoch, view: self.view.id, step }
    }

    /// Takes what comes over a link, or what comes of a write.
    pub(super) fn handle(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        if let Incoming::Sent { to, token } = incoming {
            return self.handle_sent(to, token);
        }
        let (Incoming::Message { from, .. }
        | Incoming::Asked { from, .. }
        | Incoming::Landed { from, .. }
        | Incoming::Down { from }) = incoming
        else {
            return;
        };
        let Some(rank) = self.ranks.get(&from).copied() else { return };
        self.session.heard(rank, context.now);
        match incoming {
            Incoming::Message { bytes, .. } => self.handle_message(context, rank, &bytes),
            Incoming::Asked { write, .. } => self.handle_asked(context, rank, &write),
            Incoming::Landed { immediate, target, bytes, .. } => {
                self.handle_landed(context, rank, &immediate, target, bytes);
            }
            _ => self.handle_down(rank),
        }
    }

    pub(super) fn handle_down(&mut self, rank: Rank) {
        self.peers[rank.index()].down = true;
        let detail = format!("the link to {rank} ended: it exited or was killed");
        self.session.handle_link_down(rank, Fault::new(FaultKind::RankDied, detail).at(rank));
    }

    fn handle_asked(&mut self, context: &mut Context<'_>, peer: Rank, write: &Write) {
        if context.has(Mutation::SkipAdmission) {
            context.memory.land(write.target, &write.bytes);
        }
        let Some(header) = self.header(context, peer, &write.immediate) else { return };
        if !self.admit_write(peer, &header, write.target, write.bytes.len()) {
            return;
        }
        // Memory that is gone takes nothing, and the write is as good as lost.
        if context.memory.land(write.target, &write.bytes) {
            self.handle_written(context, peer, &header, write.target);
        }
    }

    fn handle_landed(
        &mut self,
        context: &mut Context<'_>,
        peer: Rank,
        immediate: &[u8],
        target: Location,
        bytes: usize,
    ) {
        let Some(header) = self.header(context, peer, immediate) else { return };
        if self.admit_write(peer, &header, target, bytes) {
            self.handle_written(context, peer, &header, target);
        }
    }

    fn handle_sent(&mut self, to: ProcessId, token: u64) {
        let (epoch, bucket) = (token >> 32, (token & 0xffff_ffff) as usize);
        if epoch != self.view.epoch.0 {
            self.memory.old_writes_in_flight = self.memory.old_writes_in_flight.saturating_sub(1);
        } else if let Some(memory) = self.memory.buckets.get_mut(bucket) {
            memory.writes_in_flight = memory.writes_in_flight.saturating_sub(1);
        }
        if let Some(rank) = self.ranks.get(&to) {
            let peer = &mut self.peers[rank.index()];
            peer.writes_waiting = peer.writes_waiting.saturating_sub(1);
        }
    }

    /// Does all that can be done now.
    pub(super) fn progress(&mut self, context: &mut Context<'_>) {
        let now = context.now;
        // What an epoch changed has to be known before anything is sent.
        self.take_events(context);
        loop {
            // A rank on its own has agreed at once, and nothing else would have it go on.
            self.declare(now);
            if self.session.poll_timeout().is_some_and(|at| at <= now) {
                self.session.handle_timeout(now);
            }
            let mut moved = self.work(context);
            self.session.unblock();
            moved |= self.send_messages(context);
            moved |= self.send_data(context);
            moved |= self.take_events(context);
            moved |= self.finish();
            moved |= self.hand_over_commit();
            self.free_old(context);
            if !moved {
                break;
            }
        }
        self.holder.serve(context);
    }

    /// Begins the next declaration round, where one is left and the last one is over.
    fn declare(&mut self, now: Nanos) {
        let over = self.session.round() as usize == self.declared;
        if !over || self.declared == self.to_declare.len() || self.session.fault().is_some() {
            return;
        }
        let manifest = Manifest { tensors: self.to_declare[self.declared].clone() };
        self.declared += 1;
        let mut bytes = Vec::new();
        if let Err(fault) = manifest.encode(&mut bytes).and_then(|()| self.session.declare(bytes, now, None)) {
            self.session.fail(fault);
        }
    }

    /// Whether all tensors are declared, by all.
    pub(super) fn is_prepared(&self) -> bool {
        self.session.round() as usize == self.to_declare.len()
    }

    fn send_messages(&mut self, context: &mut Context<'_>) -> bool {
        let mut bytes = MessageBytes::new();
        let mut moved = false;
        while let Some(rank) = self.session.peek_message(&mut bytes) {
            moved = true;
            self.session.pop_message();
            let peer = &self.peers[rank.index()];
            // The end of the link was told; the message has no receiver any more.
            if !peer.down {
                context.out.push(Out::Message { to: peer.process, bytes: bytes.as_slice().into() });
            }
        }
        moved
    }

    fn send_data(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(transmit) = self.session.poll_transmit(context.now) {
            let peer = &self.peers[transmit.peer.index()];
            if peer.down || peer.writes_waiting >= WRITES_MAX {
                self.session.handle_refused(&transmit);
                self.session.block(transmit.peer);
                continue;
            }
            moved = true;
            match self.send_frame(context, &transmit) {
                Ok(()) => self.session.handle_sent(&transmit),
                Err(fault) => self.session.fail(fault),
            }
        }
        moved
    }

    pub(super) fn take_events(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(event) = self.session.poll_event() {
            moved = true;
            match event {
                Event::Done { tensor, step, nonfinite } => self.note_done(tensor, step, nonfinite),
                Event::Manifests => {
                    if let Err(fault) = self.agree(context) {
                        self.session.fail(fault);
                    }
                }
                Event::Prepared => self.holder.declared(self.session.declared()),
                Event::Failed(fault) => {
                    self.finishing.clear();
                    self.epochs.committed = None;
                    self.failed = Some(fault);
                }
                Event::Farewell => self.farewell = true,
                Event::Spoilt { .. } => {}
                Event::Lost { peer, fault } => self.note_lost(peer, fault),
                Event::Entered => self.lay_out_epoch(context),
                Event::Synced => self.end_sync(),
                Event::Resting { fault, aborted } => self.rest(fault, aborted),
                Event::Again { tensor } => self.do_again(context, tensor),
                Event::Aborted { fault, begun } => self.abort_step(fault, begun),
                Event::Committed { .. } => self.end_commit(),
            }
        }
        moved
    }

    /// The session is through with an operation.
    fn note_done(&mut self, tensor: TensorId, step: Step, nonfinite: bool) {
        let Slot { output: Some(output), replaces, .. } = self.slots[tensor.index()] else { return };
        let (version, contributors) = (self.version(step), self.epochs.contributors.clone());
        self.finishing.push(Finished { tensor: tensor.index(), version, contributors, nonfinite, output, replaces });
    }

    /// Hands over what ended, once nothing reads its memory any more.
    fn finish(&mut self) -> bool {
        let before = self.finishing.len();
        let mut at = 0;
        while let Some(finished) = self.finishing.get(at) {
            let tensor = TensorId(finished.tensor as u32);
            let bucket = self.session.plan().tensor(tensor).bucket;
            if self.memory.buckets[bucket.index()].writes_in_flight > 0 || self.memory.old_writes_in_flight > 0 {
                at += 1;
                continue;
            }
            let finished = self.finishing.swap_remove(at);
            let slot = &mut self.slots[finished.tensor];
            slot.given = true;
            if finished.replaces {
                self.epochs.replaced.insert(finished.tensor, finished.clone());
            }
            self.outcomes.push_back(Outcome::Done(finished));
        }
        before != self.finishing.len()
    }

    /// When there is something to do again.
    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        self.session
            .poll_timeout()
            .into_iter()
            .chain(self.holder.poll_timeout())
            .chain(self.epochs.poll_timeout())
            .min()
    }

    /// Every rank's manifest is here: all come to the same plan, or to the same fault.
    fn agree(&mut self, context: &mut Context<'_>) -> Result<(), Fault> {
        let mut manifests = Vec::new();
        for (rank, bytes) in (0..).map(Rank).zip(self.session.take_manifests()) {
            let bad = |_| Fault::violation(rank, "bad declarations");
            manifests.push(Manifest::decode(&bytes).map_err(bad)?);
        }
        let declarations = agree(&manifests)?;
        let first = self.session.lay_out(&declarations);
        self.add_round(context, first as usize);
        self.session.prepare(&self.landings());
        Ok(())
    }

    fn header(&mut self, context: &Context<'_>, peer: Rank, bytes: &[u8]) -> Option<FrameHeader> {
        match FrameHeader::decode(bytes, &JOB) {
            Ok(mut header) => {
                if context.has(Mutation::SkipEpochCheck) {
                    header.epoch = self.view.epoch;
                }
                Some(header)
            }
            Err(malformed) => {
                self.session.fail(Fault::violation(peer, &format!("a frame with a bad {}", malformed.0)));
                None
            }
        }
    }

    fn handle_message(&mut self, context: &mut Context<'_>, peer: Rank, message: &[u8]) {
        let Some((head, body)) = message.split_at_checked(gradwire_proto::limits::FRAME_HEADER_BYTES) else {
            self.session.fail(Fault::violation(peer, "a message shorter than a header"));
            return;
        };
        let Some(header) = self.header(context, peer, head) else { return };
        self.take_message(context, peer, &header, body);
    }
}
