//! The engine: drives one rank's session, codec and transport. One thread at a time has it.
//!
//! It owns all memory that the exchange needs beyond the callers' buffers, and keeps to the order of calls that
//! [`Session`] asks for. In steady state it neither allocates nor locks.
//!
//! Invariant: a caller's buffer is given back only when the session is through with its tensor and no write that
//! reads the buffer is in flight. When the job fails, buffers that peers may still read are not given back: copies are.

mod declare;
mod epoch;
mod memory;
mod operations;
mod receive;
mod reduce;
mod transmit;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gradwire_proto::frame::{FrameHeader, JobTag};
use gradwire_proto::manifest::Declaration;
use gradwire_proto::membership::{FIRST_EPOCH, RecordId};
use gradwire_proto::session::{Event, Rejected, Session, SessionConfig, Wish};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Step, TensorId};
use gradwire_transport::{Buffer, Capabilities, Transport};

use crate::handle::TensorShared;
use crate::retained::Retained;
use crate::transfer::Holder;
use crate::types::{Integrity, Stats};
use epoch::Epochs;
pub(crate) use epoch::{Aborts, Committed, Made};
use memory::Memory;
pub(crate) use operations::Submission;
use receive::Receiver;
use transmit::Scratch;

/// One tensor's buffers while an operation is in flight.
#[derive(Debug)]
struct Slot {
    input: Option<Buffer>,
    output: Option<Buffer>,
    /// The contribution of an operation that is done, until its step is final: it may have to be done again.
    retained: Option<Buffer>,
    /// The operation is done again, and the caller has the result that it gave before.
    replaces: bool,
    shared: Arc<TensorShared>,
}

/// What the engine is told when it is made.
#[derive(Debug)]
pub(crate) struct EngineConfig {
    pub(crate) session: SessionConfig,
    pub(crate) integrity: Integrity,
    /// Where results are kept for ranks that ask for copies, if they are.
    pub(crate) retained: Option<Arc<Retained>>,
    /// What newcomers are given, in a job that takes them in.
    pub(crate) holder: Option<Arc<Holder>>,
    /// The members' processes.
    pub(crate) processes: Vec<(Rank, RecordId)>,
    /// What was declared in the job that this rank joins while it runs, by round.
    pub(crate) joins: Option<Vec<Vec<Declaration>>>,
}

/// One rank's exchange.
pub(crate) struct Engine {
    transport: Box<dyn Transport>,
    session: Session,
    memory: Memory,
    slots: Vec<Slot>,
    /// By rank.
    capabilities: Vec<Capabilities>,
    /// Frames whose data is read in place, in the order of arrival.
    inbox: VecDeque<(Rank, FrameHeader)>,
    /// Operations that the session is through with, but whose buffers may still be read.
    finishing: Vec<(TensorId, Step, bool)>,
    /// Buffers of operations that failed while peers or transports could still use them. Kept until the links end.
    quarantine: Vec<Buffer>,
    scratch: Scratch,
    job: JobTag,
    integrity: Integrity,
    origin: Instant,
    stats: Stats,
    failed: bool,
    /// The job goes on without this rank, which said why.
    resigned: bool,
    farewell: bool,
    /// Operations that ended since somebody last looked.
    ended: u64,
    /// Results that links spoilt again and again, not asked for as copies yet; and those that are.
    spoilt: Vec<(Rank, FrameHeader)>,
    spoilt_asked: Vec<FrameHeader>,
    /// What was rejected by the last time somebody asked; and by rank.
    rejected: u64,
    rejected_by: Vec<Rejected>,
    epochs: Epochs,
    holder: Option<Arc<Holder>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("rank", &self.rank()).field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl Engine {
    pub(crate) fn new(config: EngineConfig, transport: Box<dyn Transport>) -> Self {
        let me = config.session.rank;
        let session = match &config.joins {
            None => Session::new(SessionConfig { epoch: FIRST_EPOCH, ..config.session }),
            Some(declared) => {
                let members: Vec<Rank> = config.processes.iter().map(|(rank, _)| *rank).collect();
                Session::newcomer(config.session, &members, declared)
            }
        };
        let ranks = session.plan().ranks();
        let capabilities = (0..ranks as u32)
            .map(Rank)
            .map(|peer| if peer == me { Capabilities::default() } else { transport.capabilities(peer) })
            .collect();
        let mut engine = Self {
            transport,
            session,
            memory: Memory::new(
                config.retained,
                config.holder.clone(),
                config.session.epoch,
                config.session.first_step,
            ),
            slots: Vec::new(),
            capabilities,
            inbox: VecDeque::with_capacity(1024),
            finishing: Vec::new(),
            quarantine: Vec::new(),
            scratch: Scratch::new(),
            job: config.session.job,
            integrity: config.integrity,
            origin: Instant::now(),
            stats: Stats::default(),
            failed: false,
            resigned: false,
            farewell: false,
            ended: 0,
            spoilt: Vec::new(),
            spoilt_asked: Vec::new(),
            rejected: 0,
            rejected_by: vec![Rejected::default(); ranks],
            epochs: Epochs::new(config.processes),
            holder: config.holder,
        };
        engine.make_slots();
        if config.joins.is_none() && config.session.epoch > FIRST_EPOCH {
            // Some were lost while links came up: the others begin in the first epoch, and go on as all do.
            let members: Vec<Rank> = engine.epochs.members().collect();
            engine.session.enter(config.session.epoch, &members, &[]);
            engine.take_events();
        }
        engine
    }

    fn rank(&self) -> Rank {
        self.session.config().rank
    }

    /// Nanoseconds since the engine was made: the session's clock.
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.session.fault()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.session.operations_in_flight() == 0 && self.finishing.is_empty()
    }

    pub(crate) const fn said_farewell(&self) -> bool {
        self.farewell
    }

    /// Whether every other rank is gone.
    pub(crate) fn is_alone(&self) -> bool {
        self.session.is_alone()
    }

    /// Whether all other ranks have said goodbye: nobody goes on.
    pub(crate) fn have_others_left(&self) -> bool {
        self.session.have_others_left()
    }

    pub(crate) fn aborts(&self) -> Arc<Aborts> {
        Arc::clone(&self.epochs.aborts)
    }

    /// How many operations have ended so far, well or badly.
    pub(crate) const fn ended(&self) -> u64 {
        self.ended
    }

    pub(crate) fn stats(&self) -> Stats {
        let counters = self.session.counters();
        Stats {
            corrupt_frames: counters.corrupt,
            duplicate_frames: counters.duplicates,
            stale_frames: counters.stale,
            units_requested_again: counters.nacked,
            units_resent: counters.resent,
            ..self.stats
        }
    }

    /// What of each peer was rejected since the last call, if anything was.
    pub(crate) fn take_rejected(&mut self) -> Vec<(Rank, Rejected)> {
        let counters = self.session.counters();
        let rejected = counters.corrupt + counters.stale;
        if rejected == self.rejected {
            return Vec::new();
        }
        self.rejected = rejected;
        let session = &self.session;
        let news = self.rejected_by.iter_mut().zip((0..).map(Rank)).filter_map(|(before, peer)| {
            let now = session.rejected(peer);
            let new = Rejected { corrupt: now.corrupt - before.corrupt, stale: now.stale - before.stale };
            *before = now;
            (new != Rejected::default()).then_some((peer, new))
        });
        news.collect()
    }

    pub(crate) fn fail(&mut self, fault: Fault) {
        self.session.fail(fault);
    }

    pub(crate) fn leave(&mut self) {
        self.session.leave();
    }

    /// Does everything that can be done without waiting. Returns whether anything was done.
    pub(crate) fn progress(&mut self) -> bool {
        let now = self.now();
        let mut receiver = Receiver {
            session: &mut self.session,
            memory: &mut self.memory,
            slots: &mut self.slots,
            capabilities: &self.capabilities,
            inbox: &mut self.inbox,
            stats: &mut self.stats,
            job: &self.job,
            now,
        };
        let mut moved = self.transport.poll(&mut receiver);
        moved += self.take_in_place(now);
        // What an epoch changed has to be known before anything is sent.
        moved += self.take_events();
        if self.session.poll_timeout().is_some_and(|at| at <= now) {
            self.session.handle_timeout(now);
        }
        moved += self.work(now);
        self.session.unblock();
        moved += self.send_messages();
        moved += self.send_data(now);
        moved += self.take_events();
        moved += self.finish();
        self.submit_deferred();
        self.free_old();
        moved += usize::from(self.try_enter());
        moved > 0
    }

    fn take_events(&mut self) -> usize {
        let mut moved = 0;
        while let Some(event) = self.session.poll_event() {
            moved += 1;
            match event {
                Event::Done { tensor, step, nonfinite } => self.finishing.push((tensor, step, nonfinite)),
                Event::Manifests => self.agree(),
                Event::Prepared => {
                    if let Some(holder) = &self.holder {
                        holder.declared(self.session.declared());
                    }
                }
                Event::Failed(fault) => self.end_all(&fault),
                Event::Farewell => self.farewell = true,
                Event::Spoilt { peer, header } if !self.spoilt_asked.contains(&header) => {
                    self.spoilt_asked.push(header);
                    self.spoilt.push((peer, header));
                }
                Event::Spoilt { .. } => {}
                Event::Lost { peer, fault } => self.lose(peer, fault),
                Event::Entered => self.lay_out_epoch(),
                Event::Synced => self.end_sync(),
                Event::Resting { fault, aborted } => self.rest(fault, aborted),
                Event::Again { tensor } => self.do_again(tensor),
                Event::Aborted { fault, begun } => self.abort_step(&fault, begun),
                Event::Committed { .. } => moved += self.committed(),
            }
        }
        moved
    }

    /// How long the caller may sleep, if nothing arrives; `None` if there is something to do at once.
    pub(crate) fn prepare_sleep(&mut self) -> Option<Duration> {
        const SLEEP_MAX: Duration = Duration::from_millis(500);
        if !self.transport.arm() {
            return None;
        }
        let now = self.now();
        match self.session.poll_timeout() {
            Some(at) if at <= now => None,
            Some(at) => Some(Duration::from_nanos(at - now).min(SLEEP_MAX)),
            None => Some(SLEEP_MAX),
        }
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.transport.event_fd()
    }

    /// Whether everything said to peers has left this process.
    pub(crate) fn is_flushed(&self) -> bool {
        self.session.members().iter().all(|peer| *peer == self.rank() || self.transport.is_flushed(*peer))
    }

    /// Whether there is nothing left to say to peers either.
    pub(crate) fn is_through(&self) -> bool {
        self.session.backlog() == 0 && self.is_flushed()
    }

    /// The names of the transports in use, in alphabetical order.
    pub(crate) fn transport_names(&self) -> Vec<&'static str> {
        let me = self.rank();
        let others = self.session.members().iter().filter(|peer| **peer != me);
        let mut names: Vec<&str> = others.map(|peer| self.transport.name(*peer)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// What this rank wants when its step ends.
    pub(crate) const fn set_wish(&mut self, wish: Wish) {
        self.session.set_wish(wish);
    }

    /// Ends a step, in a job that fails with its first lost rank.
    pub(crate) fn commit(&mut self) -> Result<Committed, Fault> {
        self.session.check_idle()?;
        self.session.commit();
        self.memory.step = self.memory.step.next();
        let next = self.session.next();
        Ok(Committed { made: self.made(), replaced: Vec::new(), rejected: self.take_rejected(), next })
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.session.config().epoch
    }

    pub(crate) fn members(&self) -> &[Rank] {
        self.session.members()
    }

    /// Results that should be asked for as copies: their owner, the frame that they should have come in, and the
    /// version that they belong to.
    pub(crate) fn take_spoilt(&mut self) -> Option<(Rank, FrameHeader, Step)> {
        let (peer, header) = self.spoilt.pop()?;
        Some((peer, header, self.memory.step))
    }

    /// Nobody could give these results as copies: they may be asked for again.
    pub(crate) fn no_copies(&mut self, header: &FrameHeader) {
        self.spoilt_asked.retain(|asked| asked != header);
    }

    pub(crate) fn shared(&self, tensor: TensorId) -> &Arc<TensorShared> {
        &self.slots[tensor.index()].shared
    }

    /// Marks every tensor as closed, so that nobody waits for a result that will not come.
    pub(crate) fn close(&mut self) {
        let detail = "the group was closed while the operation was in flight: wait for operations before closing";
        self.session.fail(Fault::new(FaultKind::Closed, detail));
        self.take_events();
        for slot in &self.slots {
            slot.shared.closed.store(true, Ordering::Release);
        }
    }
}
