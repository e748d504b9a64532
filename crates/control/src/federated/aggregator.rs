//! The aggregator's side: a thread that consumes contributions, adds them up and publishes results, until it is told to
//! stop.

mod hold;
mod link;
mod publish;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use gradwire_proto::rounds::LatePolicy;
use gradwire_proto::{Fault, FaultKind, Rank};
use tokio::sync::watch;

use super::follow::lock;
use super::{PIECE_BYTES_DEFAULT, check_piece_bytes};
use crate::job::JobConfig;
use worker::Worker;

/// How much contribution data an aggregator holds, unless something else is said.
pub const MEMORY_BYTES_DEFAULT: usize = 1 << 30;
/// How long the last records of an aggregator that stops may take.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// How an aggregator works.
#[derive(Clone, Debug)]
pub struct AggregatorConfig {
    /// The job.
    pub job: JobConfig,
    /// After its first contribution a round waits this long for the others; then the quorum is enough.
    pub round_deadline: Duration,
    /// What the job should be like; what is not given is taken from whoever opened the job.
    pub expected: Expected,
    /// Largest messages that a result is cut into.
    pub piece_bytes: usize,
    /// Most bytes of contributions that are held. One shard of all contributors has to fit.
    pub memory_bytes_max: usize,
    /// Messages that are taken ahead of being looked at.
    pub messages_ahead: u32,
}

/// What an aggregator expects of its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// How many contributors.
    pub contributors: Option<u32>,
    /// How many of them a round needs.
    pub quorum: Option<u32>,
    /// What happens to late contributions.
    pub late: Option<LatePolicy>,
}

impl AggregatorConfig {
    /// An aggregator that waits 30 seconds for late contributors, and takes the rest as it comes.
    #[must_use]
    pub fn new(job: JobConfig) -> Self {
        Self {
            job,
            round_deadline: Duration::from_secs(30),
            expected: Expected::default(),
            piece_bytes: PIECE_BYTES_DEFAULT,
            memory_bytes_max: MEMORY_BYTES_DEFAULT,
            messages_ahead: 32,
        }
    }
}

/// What an aggregator has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AggregatorCounters {
    /// Pieces of contributions that were taken.
    pub updates: u64,
    /// Pieces that came once more, or after their result was published.
    pub duplicates: u64,
    /// Contributions, or parts of them, that came too late to count.
    pub late: u64,
    /// Messages that were handed back, so that another aggregator gets them or this one later.
    pub handed_back: u64,
    /// Messages that are no contributions of this job: forged, malformed, or of another model.
    pub rejected: u64,
    /// Results of shards that were published.
    pub results: u64,
    /// Rounds that were completed while it ran.
    pub rounds: u64,
    /// Links to the broker that were lost or could not be opened.
    pub links_lost: u64,
}

/// A running aggregator. Dropping it stops it; what it held goes to others.
#[derive(Debug)]
pub struct Aggregator {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares with its owner.
#[derive(Debug, Default)]
struct Shared {
    updates: AtomicU64,
    duplicates: AtomicU64,
    late: AtomicU64,
    handed_back: AtomicU64,
    rejected: AtomicU64,
    results: AtomicU64,
    rounds: AtomicU64,
    links_lost: AtomicU64,
    complete: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The aggregator's number, once it has subscribed.
    number: Option<Rank>,
    /// Why the broker cannot be used, while it cannot.
    unlinked: Option<String>,
    /// How the thread ended.
    ended: Option<Result<(), Fault>>,
}

impl Aggregator {
    /// Starts one. It waits for as long as nobody opened the job, and while the broker is away.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] for a configuration that cannot be; [`FaultKind::System`].
    pub fn start(config: AggregatorConfig) -> Result<Self, Fault> {
        check_piece_bytes(config.piece_bytes)?;
        if config.messages_ahead == 0 {
            return Err(Fault::new(FaultKind::InvalidArgument, "messages_ahead is 0: nothing would ever be taken"));
        }
        let Expected { contributors, quorum, .. } = config.expected;
        if let (Some(contributors), Some(quorum)) = (contributors, quorum)
            && quorum > contributors
        {
            let detail = format!("a quorum of {quorum} among {contributors} contributors can never be reached");
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = watch::channel(false);
        let worker = Worker::new(config, shared.clone());
        let thread = std::thread::Builder::new()
            .name("gradwire-aggregator".to_owned())
            .stack_size(crate::link::STACK_BYTES)
            .spawn(move || worker.run(stopped))
            .map_err(|error| Fault::new(FaultKind::System, format!("no thread from the system: {error}")))?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> AggregatorCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Shared { updates, duplicates, late, handed_back, rejected, results, rounds, links_lost, .. } =
            &*self.shared;
        AggregatorCounters {
            updates: of(updates),
            duplicates: of(duplicates),
            late: of(late),
            handed_back: of(handed_back),
            rejected: of(rejected),
            results: of(results),
            rounds: of(rounds),
            links_lost: of(links_lost),
        }
    }

    /// Its number in the job, once it has subscribed: version records name it as their owner.
    #[must_use]
    pub fn number(&self) -> Option<u32> {
        lock(&self.shared.state).number.map(|number| number.0)
    }

    /// The last round that is complete; 0 if none is.
    #[must_use]
    pub fn complete_round(&self) -> u64 {
        self.shared.complete.load(Ordering::Relaxed)
    }

    /// Why the broker cannot be used, while it cannot.
    #[must_use]
    pub fn unlinked(&self) -> Option<String> {
        lock(&self.shared.state).unlinked.clone()
    }

    /// Waits at most this long for it to end by itself: it does so only when it cannot go on. None while it runs.
    #[must_use]
    pub fn wait(&self, time_max: Duration) -> Option<Result<(), Fault>> {
        let state = lock(&self.shared.state);
        let waited = self.shared.changed.wait_timeout_while(state, time_max, |state| state.ended.is_none());
        waited.unwrap_or_else(std::sync::PoisonError::into_inner).0.ended.clone()
    }

    /// Tells it to stop, and waits until it has: what it held goes to others, its last records are written if that
    /// takes no more than 2 seconds.
    ///
    /// # Errors
    /// Why it had ended already, if it had.
    pub fn stop(mut self) -> Result<(), Fault> {
        self.end();
        lock(&self.shared.state).ended.clone().unwrap_or(Ok(()))
    }

    fn end(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn end(&self, outcome: Result<(), Fault>) {
        lock(&self.state).ended = Some(outcome);
        self.changed.notify_all();
    }
}
