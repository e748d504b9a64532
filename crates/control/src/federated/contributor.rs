//! The contributor's side, as a trainer sees it: calls that block, each with a deadline, over a thread that keeps the
//! links to the broker.

mod results;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use gradwire_proto::rounds::{Entry, Log, Open};
use gradwire_proto::{DType, Fault, FaultKind, Rank, Round, Step};
use tokio::sync::{mpsc, watch};

use super::ContributorConfig;
use super::follow::{SharedLog, lock};
use worker::{Order, Worker};

/// One of the ranks of a federated job.
///
/// Every call ends by its deadline with a result or a [`Fault`] that says what was missing; while the broker is away,
/// calls wait. Dropping it ends its thread; what it contributed stays.
#[derive(Debug)]
pub struct Contributor {
    open: Open,
    contributor: Rank,
    deadline: Duration,
    piece_bytes: usize,
    orders: mpsc::Sender<Order>,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// What became of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contributed {
    /// It counts in its round, unless that was being closed without it at the same moment: the round's result says.
    InTime,
    /// Its round was closed already: it counts in a later one.
    Carried,
    /// Its round was closed already, and late contributions do not count.
    Late,
    /// This contributor contributed to the round already, before it was started again: that counts.
    Already,
}

/// A round's result.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundResult {
    /// Which round.
    pub round: u64,
    /// The reduced vector.
    pub values: Vec<f32>,
    /// What was added up, in this order: contributors, each with the round that it contributed to.
    pub entries: Vec<Entry>,
    /// Whether this contributor's own contribution to the round is not among them.
    pub late: bool,
    /// Whether any value is infinite or NaN.
    pub found_nonfinite: bool,
}

/// What the thread shares with its owner.
#[derive(Debug)]
struct Shared {
    log: SharedLog,
    /// Why there is no link to the broker, while there is none.
    unlinked: Mutex<Option<String>>,
    /// Why the thread ended.
    ended: Mutex<Option<Fault>>,
    links_lost: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_read: AtomicU64,
    /// Messages of the results topic that are not results of this job.
    rejected: AtomicU64,
}

impl Contributor {
    /// Takes part in a job; opens it, if nobody has. Aggregators need not be there yet.
    ///
    /// # Errors
    /// - [`FaultKind::InvalidArgument`]: the configuration cannot be.
    /// - [`FaultKind::WorldMismatch`], [`FaultKind::ShapeMismatch`], [`FaultKind::OperationMismatch`]: the job is run
    ///   otherwise.
    /// - [`FaultKind::SecretMismatch`], [`FaultKind::ProtocolVersion`]: the others are not of our job.
    /// - [`FaultKind::BrokerUnreachable`]: the broker cannot be used; with its reason, by the deadline.
    pub fn join(config: ContributorConfig) -> Result<Self, Fault> {
        let proposed = config.open()?;
        let (contributor, deadline, piece_bytes) = (config.contributor, config.deadline, config.piece_bytes);
        let url = config.job.broker.url.clone();
        let (orders, received) = mpsc::channel(4);
        let (stop, stopped) = watch::channel(false);
        let (joined, outcome) = sync_channel(1);
        let worker = Worker::new(config, proposed, received, joined);
        let shared = worker.shared();
        let thread = std::thread::Builder::new()
            .name("gradwire-contributor".to_owned())
            .stack_size(crate::link::STACK_BYTES)
            .spawn(move || worker.run(stopped))
            .map_err(|error| Fault::new(FaultKind::System, format!("no thread from the system: {error}")))?;
        let open = Open { contributors: 0, ..proposed };
        let mut this = Self { open, contributor, deadline, piece_bytes, orders, shared, stop, thread: Some(thread) };
        this.open = match outcome.recv_timeout(deadline) {
            Ok(open) => open?,
            Err(_) => return Err(this.shared.ended().unwrap_or_else(|| this.shared.unlinked(&url, deadline))),
        };
        Ok(this)
    }

    /// How the job is run.
    #[must_use]
    pub const fn open(&self) -> &Open {
        &self.open
    }

    /// Which contributor this is.
    #[must_use]
    pub const fn number(&self) -> Rank {
        self.contributor
    }

    /// The round to contribute to now: the first one that is not closed, as far as this contributor has heard. After a
    /// restart, this is where to go on.
    #[must_use]
    pub fn round(&self) -> u64 {
        self.shared.current().0
    }

    /// How many links to the broker were lost or could not be opened.
    #[must_use]
    pub fn links_lost(&self) -> u64 {
        self.shared.links_lost.load(Ordering::Relaxed)
    }

    /// Bytes of contributions that were sent, and of results that were read, with what surrounds them.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.shared.bytes_sent.load(Ordering::Relaxed), self.shared.bytes_read.load(Ordering::Relaxed))
    }

    /// How many messages of the results topic were left out: forged, malformed, or of something else.
    #[must_use]
    pub fn results_rejected(&self) -> u64 {
        self.shared.rejected.load(Ordering::Relaxed)
    }

    /// Contributes to a round: rounds count from 1, and each begins when the one before is closed. Returns once the
    /// broker has everything, and the log says what becomes of it. Exactly one contribution of each contributor counts
    /// for a round, however often this is called, and whatever dies in between.
    ///
    /// # Errors
    /// - [`FaultKind::InvalidArgument`]: another number of values than the job has, or a round that has not begun.
    /// - [`FaultKind::DeadlineExceeded`]: the broker did not take everything in time. It may count nevertheless, if only
    ///   its last receipt was missing: calling again is safe.
    /// - Faults that end the job: [`FaultKind::Diverged`] when the broker lost the log, among others.
    pub fn contribute(&mut self, round: u64, values: &[f32]) -> Result<Contributed, Fault> {
        if values.len() as u64 != self.open.elements {
            let detail = format!("{} values, but the job has {} elements", values.len(), self.open.elements);
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let current = self.shared.current();
        if round == 0 || round > current.0 {
            let detail = format!(
                "a contribution to round {round}, but the job is at {current}: contribute to round {} and wait for its \
                 result first",
                current.0
            );
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let data = pack(&self.open, values)?;
        let shards = (0..self.open.shards()).map(|shard| (shard, byte_range(&self.open, shard)));
        let outgoing = super::bulk::Outgoing::new(data, shards, self.piece_bytes);
        let (reply, answer) = sync_channel(1);
        let order = Order::Contribute { round: Round(round), outgoing, reply };
        self.ask(order, &answer, self.deadline, |this| {
            format!(
                "the broker did not take the contribution to round {round} within {} s{}",
                this.deadline.as_secs_f64(),
                this.shared.link_state()
            )
        })
    }

    /// Waits for a round's result. Rounds are best asked for in order; the last 64 can be had again.
    ///
    /// # Errors
    /// - [`FaultKind::DeadlineExceeded`]: names the contributors that are missing, or says that no aggregator published
    ///   the result. Calling again is safe.
    /// - [`FaultKind::InvalidArgument`]: the round is too long ago.
    /// - Faults that end the job, as for [`Contributor::contribute`].
    pub fn result(&mut self, round: u64, deadline: Duration) -> Result<RoundResult, Fault> {
        let round = Round(round.max(1));
        if !results::is_kept(&lock(&self.shared.log), round) {
            let detail =
                format!("the result of {round} is gone: those of the last {} rounds can be had", results::KEPT);
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let (reply, answer) = sync_channel(1);
        let (entries, shards) = self.ask(Order::Result { round, reply }, &answer, deadline, |this| {
            let log = lock(&this.shared.log);
            let reason = missing(&log, &this.open, round);
            let state = this.shared.link_state();
            format!("no result of {round} within {} s: {reason}{state}", deadline.as_secs_f64())
        })?;
        let mut values = vec![0.0; self.open.elements as usize];
        let mut found_nonfinite = false;
        for (shard, data) in (0..self.open.shards()).zip(&shards) {
            found_nonfinite |= unpack(&self.open, data, &mut values[self.open.range(shard)])?;
        }
        let own = Entry { contributor: self.contributor, origin: round };
        let late = !entries.contains(&own);
        Ok(RoundResult { round: round.0, values, entries, late, found_nonfinite })
    }

    /// Contributes to a round and waits for its result.
    ///
    /// # Errors
    /// Those of both.
    pub fn exchange(&mut self, round: u64, values: &[f32], deadline: Duration) -> Result<RoundResult, Fault> {
        self.contribute(round, values)?;
        self.result(round, deadline)
    }

    /// Hands an order to the thread and waits for the answer. `late` says what was missing at the deadline.
    fn ask<T>(
        &self,
        order: Order,
        answer: &std::sync::mpsc::Receiver<Result<T, Fault>>,
        deadline: Duration,
        late: impl Fn(&Self) -> String,
    ) -> Result<T, Fault> {
        if let Err(refused) = self.orders.try_send(order) {
            return Err(match refused {
                // Orders that nobody waits for any more are taken back once there is a link again.
                mpsc::error::TrySendError::Full(_) => Fault::new(FaultKind::BrokerUnreachable, late(self)),
                mpsc::error::TrySendError::Closed(_) => self.shared.closed(),
            });
        }
        match answer.recv_timeout(deadline) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.closed()),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.orders.try_send(Order::GiveUp);
                Err(Fault::new(FaultKind::DeadlineExceeded, late(self)).step(Step(self.shared.current().0)))
            }
        }
    }
}

impl Drop for Contributor {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn current(&self) -> Round {
        let log = lock(&self.log);
        if log.closed().is_some() { log.round().next() } else { log.round() }
    }

    fn ended(&self) -> Option<Fault> {
        lock(&self.ended).clone()
    }

    fn closed(&self) -> Fault {
        self.ended().unwrap_or_else(|| Fault::new(FaultKind::Closed, "the contributor has ended"))
    }

    /// For messages: why there is no link, if there is none.
    fn link_state(&self) -> String {
        match &*lock(&self.unlinked) {
            Some(reason) => format!("; the broker cannot be reached: {reason}"),
            None => String::new(),
        }
    }

    fn unlinked(&self, url: &str, deadline: Duration) -> Fault {
        let reason = lock(&self.unlinked).clone().unwrap_or_else(|| "it did not answer in time".to_owned());
        let detail =
            format!("no link to the broker at {url} within {} s: {reason}; is it running?", deadline.as_secs_f64());
        Fault::new(FaultKind::BrokerUnreachable, detail)
    }
}

/// What a round lacks, in words.
fn missing(log: &Log, open: &Open, round: Round) -> String {
    if log.round() < round {
        return format!("the job is at {}", log.round());
    }
    if log.round() == round && log.closed().is_none() {
        let arrived: std::collections::BTreeSet<Rank> = log.arrived().collect();
        let missing = (0..open.contributors).map(Rank).filter(|contributor| !arrived.contains(contributor));
        let names: Vec<String> = missing.map(|contributor| contributor.0.to_string()).collect();
        let (count, quorum) = (arrived.len(), open.quorum);
        let who =
            format!("{count} of {} contributed (quorum {quorum}); missing: {}", open.contributors, names.join(", "));
        return match (count >= quorum as usize, log.aggregators()) {
            (true, 0) => format!("{who}; and no aggregator is there to close it: start `gradwire aggregate`"),
            _ => who,
        };
    }
    match log.closed() {
        Some(closed) => {
            let waiting = closed.published.iter().filter(|published| published.is_none()).count();
            let hint =
                if log.aggregators() == 0 { "none subscribed: start `gradwire aggregate`" } else { "do they run?" };
            format!("aggregators have not published {waiting} of {} shards; {hint}", open.shards())
        }
        None => "its results have not arrived; a topic that is too small may have dropped them".to_owned(),
    }
}

fn byte_range(open: &Open, shard: u32) -> std::ops::Range<usize> {
    let (range, size) = (open.range(shard), open.wire_dtype().size());
    range.start * size..range.end * size
}

/// The vector as it travels.
fn pack(open: &Open, values: &[f32]) -> Result<Vec<u8>, Fault> {
    let wire = open.wire_dtype();
    let native: Vec<u8> = values.iter().copied().flat_map(f32::to_le_bytes).collect();
    let mut data = vec![0; values.len() * wire.size()];
    gradwire_codec::pack(DType::F32, wire, &native, &mut data)?;
    Ok(data)
}

/// Reads what [`pack`] wrote; tells whether any value is infinite or NaN.
fn unpack(open: &Open, data: &[u8], values: &mut [f32]) -> Result<bool, Fault> {
    let mut native = vec![0; values.len() * 4];
    let nonfinite = gradwire_codec::unpack(open.wire_dtype(), DType::F32, data, &mut native)?;
    let (elements, _) = native.as_chunks::<4>();
    values.iter_mut().zip(elements).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
    Ok(nonfinite)
}

type Reply<T> = SyncSender<Result<T, Fault>>;
