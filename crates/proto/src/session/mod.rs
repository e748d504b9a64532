//! The protocol core: what one rank sends, accepts, asks for again and gives up on.
//!
//! [`Session`] is driven from outside and owns no memory but its own bookkeeping. The order in which a driver calls
//! it in one round:
//!
//! 1. hand in what happened: [`Session::post`], [`Session::admit`] and the `handle_*` calls for frames,
//!    [`Session::handle_timeout`];
//! 2. do the work it asks for: [`Session::poll_work`], each answered by [`Session::handle_reduced`];
//! 3. send what it wants sent: [`Session::peek_message`] and [`Session::poll_transmit`], until both are empty or the
//!    peer's queue is full ([`Session::block`], until [`Session::unblock`]);
//! 4. take its events: [`Session::poll_event`];
//! 5. sleep no longer than [`Session::poll_timeout`].
//!
//! Where members may change, a driver also calls [`Session::enter`] when they do, and [`Session::begin_commit`] at the
//! end of each step: see there. A rank that joins later begins with [`Session::newcomer`].
//!
//! Invariants: a unit's contribution of a step is counted once per rank; a unit is reduced only with all
//! contributions of one step; nothing is accepted twice, and nothing of another epoch or step. A fault is latched:
//! after [`Event::Failed`] the session accepts nothing, and tells every peer why.

mod declare;
mod departure;
mod ending;
mod epoch;
mod frames;
mod lateness;
mod mismatch;
mod newcomer;
mod presence;
mod state;
#[cfg(test)]
mod tests;
mod timers;
mod transmit;
mod types;

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::bits::Bits;
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::ids::{BucketId, Rank, Step, TensorId, UnitIndex};
use crate::manifest::Declaration;
use crate::plan::Plan;

pub use ending::{Next, Wish};
pub use frames::Admission;
use state::{BucketState, Outgoing, PeerState, Sync, TensorState};
pub use transmit::MessageBytes;
pub use types::{Counters, Data, Event, Recovery, Rejected, SessionConfig, Timing, Transmit, Work};

/// The protocol core of one rank. See the module's documentation for the order of calls.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    /// This rank's place among the members.
    seat: usize,
    plan: Plan,
    tensors: Vec<TensorState>,
    buckets: Vec<BucketState>,
    peers: Vec<PeerState>,
    /// By bucket: the highest priority of its tensors.
    priorities: Vec<i32>,
    /// Buckets with something to send: highest priority first, then oldest.
    queue: Vec<BucketId>,
    /// Tensors with an operation in flight, in no order.
    active: Vec<TensorId>,
    /// Tensors that were posted since the last commit.
    touched: Vec<TensorId>,
    outgoing: VecDeque<Outgoing>,
    work: VecDeque<Work>,
    events: VecDeque<Event>,
    blocked: Bits,
    declaring: Option<declare::Round>,
    /// Declaration rounds that are over, and whose manifests the driver has.
    rounds: u32,
    rounds_taken: u32,
    /// Steps that are final.
    commits: u64,
    committing: Option<epoch::Committing>,
    /// What this rank wants when its next step ends.
    wish: Wish,
    /// What all made of the last step that is final, and what that means for this rank.
    outcome: Next,
    next: Next,
    /// An epoch was entered, and it is not known yet what becomes of the step.
    syncing: bool,
    /// It is known by now, but there are too few members: nothing is exchanged until the next epoch. Only while `syncing`.
    suspended: bool,
    /// Members that are gone since there were enough.
    gone: Vec<Rank>,
    /// This rank is in its first epoch, and does not know yet where the others are.
    newcomer: Option<newcomer::Told>,
    /// What this rank said of itself in the present epoch, once its memory was laid out.
    own_sync: Option<Sync>,
    /// What was agreed on, by declaration round: those that are over, and the one in progress if it is laid out.
    declared: Vec<Vec<Declaration>>,
    /// When peers are told next that this rank is there, and when the first of them has been silent for too long.
    heartbeat_at: u64,
    silence_at: u64,
    /// Since when this rank runs, in this epoch: before that it cannot say who is late.
    watches_from: u64,
    /// When the owners have been asked whose parts they lack, and it is decided who is given up.
    late_check_at: Option<u64>,
    somebody_left: bool,
    leaving: bool,
    farewell: bool,
    fault: Option<Fault>,
    counters: Counters,
}

impl Session {
    /// A session with nothing declared.
    #[must_use]
    pub fn new(config: SessionConfig) -> Self {
        let world = config.world_size as usize;
        Self {
            config,
            seat: config.rank.index(),
            plan: Plan::new((0..config.world_size).map(Rank).collect()),
            tensors: Vec::new(),
            buckets: Vec::new(),
            peers: (0..world).map(|_| PeerState { open: true, ..PeerState::default() }).collect(),
            priorities: Vec::new(),
            queue: Vec::new(),
            active: Vec::new(),
            touched: Vec::new(),
            outgoing: VecDeque::with_capacity(4 * world + 64),
            work: VecDeque::new(),
            events: VecDeque::new(),
            blocked: Bits::new(world),
            declaring: None,
            rounds: 0,
            rounds_taken: 0,
            commits: 0,
            committing: None,
            wish: Wish::GoOn,
            outcome: Next::GoOn,
            next: Next::GoOn,
            syncing: false,
            suspended: false,
            gone: Vec::new(),
            newcomer: None,
            own_sync: None,
            declared: Vec::new(),
            heartbeat_at: 0,
            silence_at: u64::MAX,
            watches_from: 0,
            late_check_at: None,
            somebody_left: false,
            leaving: false,
            farewell: false,
            fault: None,
            counters: Counters::default(),
        }
    }

    /// The layout of everything declared so far.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The ranks that take part in this epoch, ascending.
    #[must_use]
    pub fn members(&self) -> &[Rank] {
        &self.plan.members
    }

    /// Who this rank is.
    #[must_use]
    pub const fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// What was counted since the start.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// What of this peer was not taken since the start.
    #[must_use]
    pub fn rejected(&self, peer: Rank) -> Rejected {
        self.peers.get(peer.index()).map_or_else(Rejected::default, |peer| peer.rejected)
    }

    /// Why the job failed, if it did.
    #[must_use]
    pub const fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    /// How many operations are in flight.
    #[must_use]
    pub const fn operations_in_flight(&self) -> usize {
        self.active.len()
    }

    /// How much waits: messages to send, work to do, events to take, and buckets with something to send. In proportion to
    /// the operations in flight and the number of ranks.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.outgoing.len() + self.work.len() + self.events.len() + self.queue.len()
    }

    /// The step that the tensor is at: of the operation in flight, or else of the next one.
    #[must_use]
    pub fn step(&self, tensor: TensorId) -> Step {
        self.tensors[tensor.index()].step
    }

    /// Offers this rank's part of the tensor's next operation, to end within `deadline_ns` (the configured deadline
    /// if `None`). Returns its step.
    ///
    /// # Errors
    /// `TensorBusy` while an operation on the tensor is in flight; the latched fault after a failure; `RankLeft` when
    /// a rank that is needed has left.
    pub fn post(&mut self, tensor: TensorId, now: u64, deadline_ns: Option<u64>) -> Result<Step, Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        if self.committing.is_some() {
            let detail = "the step is being committed: wait for the commit before the next step's operations";
            return Err(Fault::new(FaultKind::TensorBusy, detail).tensor(self.plan.tensor(tensor).name.clone()));
        }
        let state = &mut self.tensors[tensor.index()];
        let step = state.step;
        if state.active {
            let detail = "an operation on this tensor is in flight: wait for it before the next one";
            return Err(Fault::new(FaultKind::TensorBusy, detail)
                .tensor(self.plan.tensor(tensor).name.clone())
                .step(step));
        }
        let timing = &self.config.timing;
        state.begin(now, deadline_ns.unwrap_or(timing.deadline_ns), timing.resend_ns);
        if state.since_commit == 0 {
            state.base = step;
            self.touched.push(tensor);
        }
        state.since_commit = state.since_commit.saturating_add(1);
        state.active_at = self.active.len();
        self.active.push(tensor);
        if self.syncing {
            // It begins when it is known what becomes of the step.
            return Ok(step);
        }
        if self.tensors[tensor.index()].passed == step.next() {
            self.pass_empty(tensor);
            return Ok(step);
        }
        let bucket = self.plan.tensor(tensor).bucket;
        self.offer(tensor, bucket, now);
        self.check_committers(tensor);
        self.check_departed(tensor);
        self.finish_if_complete(tensor);
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(step),
        }
    }

    /// Marks what a freshly posted tensor has to send and to wait for.
    fn offer(&mut self, tensor: TensorId, bucket: BucketId, now: u64) {
        let me = self.config.rank;
        let plan = self.plan.bucket(bucket);
        let (collective, acked) = (plan.collective, plan.acked);
        let owned = plan.owned[me.index()].clone();
        let units = self.plan.tensor(tensor).units.clone();
        let overlaps = |range: &Range<u32>| units.start.max(range.start) < units.end.min(range.end);
        let owners = self.others().filter(|peer| overlaps(&plan.owned[peer.index()])).count();
        let owns = overlaps(&owned);
        let mut results_missing = 0;
        let state = &mut self.buckets[bucket.index()];
        for unit in units.clone() {
            let owner = self.plan.units[unit as usize].owner;
            if owner == me {
                results_missing += 1;
                continue;
            }
            state.mark_contribution(unit);
            state.received.remove((unit - state.units.start) as usize);
            if collective != Collective::ReduceScatter {
                results_missing += 1;
            }
        }
        state.hold(now + self.config.timing.linger_ns);
        let tensor_state = &mut self.tensors[tensor.index()];
        let (step, commits) = (tensor_state.step, self.commits as u16);
        tensor_state.commits[me.index()] = commits;
        tensor_state.results_missing = results_missing;
        tensor_state.acks.clear();
        tensor_state.acks_missing = match collective {
            _ if !acked => 0,
            Collective::ReduceScatter => owners as u32,
            _ if owns => self.plan.members.len() as u32 - 1,
            _ => 0,
        };
        self.enqueue(bucket);
        for unit in units.start.max(owned.start)..units.end.min(owned.end) {
            self.arrive(UnitIndex(unit), me, step, commits);
        }
    }

    /// Lets a bucket travel although not all of its tensors were posted: somebody waits for one of them.
    pub fn flush(&mut self, tensor: TensorId) {
        let bucket = self.plan.tensor(tensor).bucket;
        self.buckets[bucket.index()].ready = true;
    }

    /// Counts a contribution, or an offer, of `rank` for a unit that this rank owns, and asks for the reduction once
    /// all are here.
    fn arrive(&mut self, unit: UnitIndex, rank: Rank, step: Step, commits: u16) {
        let plan = self.plan.unit(unit);
        let contributes = self.plan.bucket(plan.bucket).contributes();
        let world = self.peers.len();
        let state = &mut self.buckets[plan.bucket.index()];
        let own = (unit.0 - state.owned.start) as usize;
        if !state.arrived.insert(own * world + rank.index()) {
            return;
        }
        state.arrived_count[own] += 1;
        self.tensors[plan.tensor.index()].commits[rank.index()] = commits;
        if let Some(other) = self.differing_commits(unit, rank, step) {
            self.fail_differing(unit, rank, other, step);
            return;
        }
        if self.is_passed_over(unit, step, commits) {
            self.fail_passed_over(self.plan.unit(unit).tensor, self.config.rank, rank);
            return;
        }
        let plan = self.plan.unit(unit);
        let state = &mut self.buckets[plan.bucket.index()];
        if contributes {
            if state.arrived_count[own] as usize == self.plan.members.len() {
                self.work.push_back(Work::Reduce(unit));
            }
        } else if rank == self.config.rank {
            self.work.push_back(Work::Publish(unit));
        } else if state.is_published(own, step) {
            self.mark_result(unit, rank);
        }
    }

    /// The driver did what [`Work`] asked for; `nonfinite`: the result has an infinity or a NaN.
    pub fn handle_reduced(&mut self, work: Work, nonfinite: bool, now: u64) {
        if self.fault.is_some() {
            return;
        }
        let (Work::Reduce(unit) | Work::Publish(unit)) = work;
        let plan = self.plan.unit(unit);
        let (tensor, bucket) = (plan.tensor, plan.bucket);
        let distributes = self.plan.bucket(bucket).distributes();
        let world = self.peers.len();
        let step = self.tensors[tensor.index()].step;
        let state = &mut self.buckets[bucket.index()];
        let own = (unit.0 - state.owned.start) as usize;
        state.publish(own, step, nonfinite);
        let waits = matches!(work, Work::Publish(_));
        for peer in self.others() {
            let ready = !waits || self.buckets[bucket.index()].arrived.get(own * world + peer.index());
            if distributes && ready {
                self.mark_result(unit, peer);
            }
        }
        if !waits {
            // From here on the next step's contributions may come.
            self.buckets[bucket.index()].forget_arrivals(own, world);
        }
        let tensor_state = &mut self.tensors[tensor.index()];
        tensor_state.results_missing -= 1;
        tensor_state.nonfinite |= nonfinite;
        tensor_state.progress(now);
        if !distributes {
            self.acknowledge_use(tensor, bucket);
        }
        self.enqueue(bucket);
        self.finish_if_complete(tensor);
    }

    /// Reports the operation as done once nothing of it is missing or still to be sent.
    fn finish_if_complete(&mut self, tensor: TensorId) {
        let state = &self.tensors[tensor.index()];
        if !state.active || state.results_missing > 0 || state.acks_missing > 0 || state.results_to_send > 0 {
            return;
        }
        self.forget_own_offer(tensor);
        let state = &mut self.tensors[tensor.index()];
        let (step, nonfinite) = (state.step, state.nonfinite);
        let at = state.active_at;
        state.end();
        self.active.swap_remove(at);
        if let Some(moved) = self.active.get(at) {
            self.tensors[moved.index()].active_at = at;
        }
        self.events.push_back(Event::Done { tensor, step, nonfinite });
        self.answer_goodbyes();
        self.say_has_all();
    }

    /// Where contributions only say that a rank is ready, each is kept until that rank has its results: this rank's
    /// own until the operation ends.
    fn forget_own_offer(&mut self, tensor: TensorId) {
        let me = self.config.rank;
        let tensor = self.plan.tensor(tensor);
        if self.plan.bucket(tensor.bucket).contributes() {
            return;
        }
        let state = &mut self.buckets[tensor.bucket.index()];
        for unit in tensor.units.start.max(state.owned.start)..tensor.units.end.min(state.owned.end) {
            state.forget_arrival((unit - state.owned.start) as usize, self.peers.len(), me);
        }
    }

    /// Takes the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Takes the next piece of work.
    pub fn poll_work(&mut self) -> Option<Work> {
        self.work.pop_front()
    }

    /// Fails the job: every operation ends with `fault`, here and (each peer is told) everywhere. Only the first
    /// fault counts.
    pub fn fail(&mut self, fault: Fault) {
        // What a newcomer makes of the job concerns nobody who never counted on it.
        let concerned = self.newcomer.is_none();
        self.end(fault, concerned.then_some(Outgoing::Abort));
    }

    /// Every operation ends with this fault, and each peer gets the word, if there is one.
    fn end(&mut self, fault: Fault, word: Option<fn(Rank) -> Outgoing>) {
        if self.fault.is_some() {
            return;
        }
        self.work.clear();
        self.queue.clear();
        self.outgoing.clear();
        self.declaring = None;
        self.committing = None;
        self.syncing = false;
        // Those who went on without this rank are not concerned.
        if let Some(word) = word.filter(|_| fault.kind != FaultKind::Removed) {
            for peer in self.others() {
                if self.peers[peer.index()].reachable() {
                    self.outgoing.push_back(word(peer));
                }
            }
        }
        self.active.clear();
        self.fault = Some(fault.clone());
        self.events.push_back(Event::Failed(fault));
    }

    /// Queues a message, once: what is waiting to be said already is not said twice.
    fn say(&mut self, message: Outgoing) {
        if !self.outgoing.contains(&message) {
            self.outgoing.push_back(message);
        }
    }

    /// Peers other than this rank, beginning with the next one.
    fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        let (members, me) = (Arc::clone(&self.plan.members), self.seat);
        (1..members.len()).map(move |distance| members[(me + distance) % members.len()])
    }
}

/// The fault with the first of these ranks as the one that is to blame, if there is one.
fn at_first(fault: Fault, ranks: &[Rank]) -> Fault {
    match ranks.first() {
        Some(rank) => fault.at(*rank),
        None => fault,
    }
}

/// `ranks` as people write them: "rank 2", "ranks 0, 2 and 3".
#[must_use]
pub fn name_ranks(ranks: impl IntoIterator<Item = Rank>) -> String {
    let names: Vec<String> = ranks.into_iter().map(|rank| format!("{}", rank.0)).collect();
    match names.as_slice() {
        [] => String::from("no rank"),
        [one] => format!("rank {one}"),
        [head @ .., last] => format!("ranks {} and {last}", head.join(", ")),
    }
}
