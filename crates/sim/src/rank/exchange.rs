//! One rank's exchange in one epoch: drives the real `gradwire_proto::session::Session` over simulated memory, with the
//! duties that `crates/runtime/src/engine` has in the product.
//!
//! Two things differ over links that do not ask ([`Links::OneSided`]), because there a write may land at any time, also
//! long after its slot serves something else: a contribution is copied out of the slot and checked *in the copy*, which
//! alone is used from then on; and results land in staging memory, never in a tensor that is given back one day.
//!
//! Everything of an epoch (session, regions, what is known of links) lives and ends with an `Exchange`: the change of
//! epochs is what is around it ([`super`]), so that a way to keep a step over such a change can be put there.

use std::collections::BTreeMap;
use std::rc::Rc;

use gradwire_proto::frame::{FrameHeader, JobTag, Location};
use gradwire_proto::manifest::{Declaration, Manifest, agree};
use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::session::{Event, MessageBytes, Recovery, Session, SessionConfig, Timing};
use gradwire_proto::{Fault, FaultKind, Rank, RegionKey, Step, TensorId};

use super::regions::Regions;
use super::trainer::Finished;
use crate::event::{MS, Nanos, US};
use crate::mutation::Mutation;
use crate::network::{ViewName, Write};
use crate::plan::Links;
use crate::process::{Context, Incoming, Out};
use crate::report::ProcessId;

pub(crate) const JOB: JobTag = JobTag(*b"a simulated job!");
/// Writes to one peer that may wait for departure: further ones are refused, as by a full queue.
const WRITES_MAX: u32 = 8;
/// A peer that has not answered is greeted again after this long, and then ever later up to the second.
const HELLO_AGAIN: Nanos = 200 * US;
const HELLO_AGAIN_MAX: Nanos = 50 * MS;

#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) session: Session,
    pub(super) view: View,
    /// By rank of the session: the process, whether the link to it is up in this epoch, and writes that wait.
    pub(super) peers: Vec<Peer>,
    ranks: BTreeMap<ProcessId, Rank>,
    /// How many of them are neither known to go by this view nor gone.
    absent: usize,
    pub(super) memory: Regions,
    pub(super) slots: Vec<Slot>,
    /// Operations that the session is through with, but whose memory is still read.
    finishing: Vec<(TensorId, Step, bool)>,
    pub(super) crcs: Vec<u32>,
    /// Units that this rank reduced since the last commit.
    pub(super) dirty: Vec<u32>,
    pub(super) links: Links,
    hello_at: Nanos,
    hello_again: Nanos,
    manifest: Manifest,
    declared: bool,
    pub(super) prepared: bool,
    pub(super) failed: Option<Fault>,
    pub(super) farewell: bool,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) process: ProcessId,
    up: bool,
    down: bool,
    pub(super) writes_waiting: u32,
}

/// A tensor's memory while an operation is in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) input: Option<RegionKey>,
    pub(super) output: Option<RegionKey>,
}

impl Exchange {
    /// Begins an epoch. `None` where this process is no member.
    pub(super) fn new(
        context: &mut Context<'_>,
        view: &View,
        me: RecordId,
        declarations: &[Declaration],
        first_step: Step,
    ) -> Option<Self> {
        let rank = Rank(view.members.iter().position(|member| member.id == me)? as u32);
        let world = view.members.len();
        let forgotten = context.has(Mutation::IgnoreDeadline);
        let deadline_ns = if forgotten { Nanos::MAX / 4 } else { context.plan.deadline_ns() };
        let config = SessionConfig {
            rank,
            world_size: world as u32,
            recovery: Recovery::Fail,
            epoch: view.epoch,
            job: JOB,
            first_step,
            timing: Timing { deadline_ns, ..Timing::default() },
            copies: false,
        };
        let mut peers = Vec::with_capacity(world);
        for member in &view.members {
            // Who wrote a Join has been started: there is such a process.
            let process = (context.directory)(member.id)?;
            peers.push(Peer { process, up: member.id == me, down: false, writes_waiting: 0 });
        }
        let regions = Regions {
            contributions: context.memory.allocate(0),
            results: context.memory.allocate(0),
            landings: vec![None; world],
            checked: vec![None; world],
            buckets: Vec::new(),
        };
        Some(Self {
            session: Session::new(config),
            view: view.clone(),
            absent: peers.len() - 1,
            ranks: (0..).map(Rank).zip(&peers).map(|(rank, peer)| (peer.process, rank)).collect(),
            peers,
            memory: regions,
            slots: vec![Slot::default(); declarations.len()],
            finishing: Vec::new(),
            crcs: Vec::new(),
            dirty: Vec::new(),
            links: context.plan.links,
            hello_at: context.now,
            hello_again: HELLO_AGAIN,
            manifest: Manifest { tensors: declarations.to_vec() },
            declared: false,
            prepared: false,
            failed: None,
            farewell: false,
        })
    }

    /// The epoch is over: its memory is given back, and what is still written to it is lost.
    pub(super) fn end(self, context: &mut Context<'_>) {
        if context.has(Mutation::LeakEpoch) {
            return;
        }
        let Regions { contributions, results, landings, checked, .. } = self.memory;
        for key in [contributions, results].into_iter().chain(landings.into_iter().chain(checked).flatten()) {
            context.memory.free(key);
        }
    }

    pub(super) fn me(&self) -> Rank {
        self.session.config().rank
    }

    pub(super) fn rank_of(&self, process: ProcessId) -> Option<Rank> {
        self.ranks.get(&process).copied()
    }

    /// Greets those that are not known to go by this view. Of two ranks the lower greets.
    ///
    /// The product's hello names the epoch and the number of ranks, and not the view. Where a log was lost, two views can
    /// have one number for a while, and their members must not exchange data: simulation found that they would.
    fn greet(&mut self, context: &mut Context<'_>) {
        if context.now < self.hello_at || self.failed.is_some() || self.absent == 0 {
            return;
        }
        self.hello_at = context.now + self.hello_again;
        self.hello_again = (self.hello_again * 2).min(HELLO_AGAIN_MAX);
        let me = self.me().index();
        for peer in self.peers.iter().skip(me + 1).filter(|peer| !peer.up && !peer.down) {
            let view = (self.view.epoch.0, self.view.id);
            context.out.push(Out::Hello { to: peer.process, view, answer: false });
        }
    }

    fn handle_hello(&mut self, context: &mut Context<'_>, from: ProcessId, view: ViewName, answer: bool) {
        let Some(rank) = self.rank_of(from).filter(|_| view == (self.view.epoch.0, self.view.id)) else { return };
        let peer = &mut self.peers[rank.index()];
        if peer.down {
            return;
        }
        self.absent -= usize::from(!peer.up);
        peer.up = true;
        if !answer {
            context.out.push(Out::Hello { to: from, view, answer: true });
        }
    }

    /// Takes what comes over links, and what comes of writes.
    pub(super) fn handle(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        match incoming {
            Incoming::Hello { from, view, answer } => self.handle_hello(context, from, view, answer),
            Incoming::Message { from, bytes } => {
                if let Some(rank) = self.linked(from) {
                    self.handle_message(context, rank, &bytes);
                }
            }
            Incoming::Asked { from, write } => {
                if let Some(rank) = self.linked(from) {
                    self.handle_asked(context, rank, &write);
                }
            }
            Incoming::Landed { from, immediate, target, bytes } => {
                if let Some(rank) = self.linked(from) {
                    self.handle_landed(context, rank, &immediate, target, bytes);
                }
            }
            Incoming::Sent { to, token } => self.handle_sent(to, token),
            Incoming::Down { from } => {
                if let Some(rank) = self.linked(from) {
                    let peer = &mut self.peers[rank.index()];
                    self.absent -= usize::from(!peer.up);
                    (peer.up, peer.down) = (false, true);
                    let detail = format!("the link to {rank} ended: it exited or was killed");
                    self.session.handle_link_down(rank, Fault::new(FaultKind::RankDied, detail).at(rank));
                }
            }
            _ => {}
        }
    }

    fn linked(&self, from: ProcessId) -> Option<Rank> {
        self.rank_of(from).filter(|rank| !self.peers[rank.index()].down)
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
            return;
        }
        if let Some(memory) = self.memory.buckets.get_mut(bucket) {
            memory.writes_in_flight = memory.writes_in_flight.saturating_sub(1);
        }
        if let Some(rank) = self.rank_of(to) {
            let peer = &mut self.peers[rank.index()];
            peer.writes_waiting = peer.writes_waiting.saturating_sub(1);
        }
    }

    /// Does all that can be done now. Operations that ended are put into `finished`.
    pub(super) fn progress(&mut self, context: &mut Context<'_>, finished: &mut Vec<Finished>) {
        let now = context.now;
        self.greet(context);
        if !self.declared {
            self.declared = true;
            let mut bytes = Vec::new();
            let declared = self.manifest.encode(&mut bytes).and_then(|()| self.session.declare(bytes, now, None));
            if let Err(fault) = declared {
                self.session.fail(fault);
            }
        }
        loop {
            let mut moved = false;
            if self.session.poll_timeout().is_some_and(|at| at <= now) {
                self.session.handle_timeout(now);
            }
            moved |= self.work(context);
            self.session.unblock();
            self.block();
            moved |= self.send_messages(context);
            moved |= self.send_data(context);
            moved |= self.take_events(context);
            moved |= self.finish(finished);
            if !moved {
                return;
            }
        }
    }

    /// Nothing goes to peers that are not known to be in this epoch, nor to those whose queue is full.
    fn block(&mut self) {
        if self.absent == 0 {
            return;
        }
        for (rank, peer) in (0..).map(Rank).zip(&self.peers) {
            if !peer.up && !peer.down {
                self.session.block(rank);
            }
        }
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

    fn take_events(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(event) = self.session.poll_event() {
            moved = true;
            match event {
                Event::Done { tensor, step, nonfinite } => self.finishing.push((tensor, step, nonfinite)),
                Event::Manifests => {
                    if let Err(fault) = self.agree(context) {
                        self.session.fail(fault);
                    }
                }
                Event::Prepared => self.prepared = true,
                Event::Failed(fault) => {
                    self.finishing.clear();
                    self.failed = Some(fault);
                }
                Event::Farewell => self.farewell = true,
                Event::Spoilt { .. } => {}
                // With [`Recovery::Fail`] members do not change.
                Event::Lost { .. }
                | Event::Entered
                | Event::Synced
                | Event::Again { .. }
                | Event::Aborted { .. }
                | Event::Committed { .. } => unreachable!("members do not change: {event:?}"),
            }
        }
        moved
    }

    /// Hands over what ended, once nothing reads its memory any more.
    fn finish(&mut self, finished: &mut Vec<Finished>) -> bool {
        let before = self.finishing.len();
        let (session, buckets) = (&self.session, &self.memory.buckets);
        let slots = &mut self.slots;
        self.finishing.retain(|(tensor, step, nonfinite)| {
            let bucket = session.plan().tensor(*tensor).bucket;
            if buckets[bucket.index()].writes_in_flight > 0 {
                return true;
            }
            slots[tensor.index()] = Slot::default();
            finished.push(Finished { tensor: tensor.index(), step: *step, nonfinite: *nonfinite });
            false
        });
        before != self.finishing.len()
    }

    /// When there is something to do again.
    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        let greeting = (self.failed.is_none() && self.absent > 0).then_some(self.hello_at);
        greeting.into_iter().chain(self.session.poll_timeout()).min()
    }

    /// Every rank's manifest is here: all come to the same plan, or to the same fault.
    fn agree(&mut self, context: &mut Context<'_>) -> Result<(), Fault> {
        let mut manifests = Vec::new();
        for (rank, bytes) in (0..).map(Rank).zip(self.session.take_manifests()) {
            let bad = |_| Fault::violation(rank, "bad declarations");
            manifests.push(Manifest::decode(&bytes).map_err(bad)?);
        }
        let declarations = agree(&manifests)?;
        self.session.lay_out(&declarations);
        self.lay_out(context);
        let landings: Vec<Location> = (self.memory.landings.iter())
            .map(|key| key.map_or(Location::default(), |region| Location { region, offset: 0 }))
            .collect();
        self.session.prepare(&landings);
        Ok(())
    }

    /// Ends a step. Returns the checksums of what this rank reduced in it.
    pub(super) fn commit(&mut self) -> Vec<(u32, u32)> {
        self.session.commit();
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.sort_unstable();
        dirty.dedup();
        dirty.into_iter().map(|unit| (unit, self.crcs[unit as usize])).collect()
    }

    pub(super) fn contributors(&self) -> Rc<[ProcessId]> {
        self.peers.iter().map(|peer| peer.process).collect()
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
