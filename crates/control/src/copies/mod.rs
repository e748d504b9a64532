//! Copies of shards that no data link can serve, over the broker: who lacks one asks on `<job>-retransmit`, and a rank
//! that holds that version answers on `<job>-copies`, or over a data link if it has one to the asker.
//!
//! The subscription of the holders is Key_Shared by shard: requests spread over all of them, in order for each shard.
//! Nothing here decides who owns a shard. Every copy is checked: its record's MAC, its checksum, and the checksum that
//! the asker expects, before it is handed out.
//!
//! It runs on a thread of its own, which is made when it is first needed.

mod holder;
mod record;
mod requester;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gradwire_proto::{Fault, FaultKind, Rank};
use tokio::sync::{mpsc, watch};

use crate::job::JobConfig;
use crate::outbox::{Item, Publisher};
use crate::record::{AuditKind, AuditRecord, RecordKey};
use crate::supervise::supervise;
pub use record::ShardVersion;
use requester::{Ask, Requester};

/// Pieces that copies are cut into, unless something else is said: far below the size that brokers accept.
pub const PIECE_BYTES_DEFAULT: usize = 512 << 10;
/// Most fetches that wait to be taken.
const ASKS_MAX: usize = 64;
/// Beyond its time-out, how long a fetch waits for the thread to say so.
const SLACK: Duration = Duration::from_secs(3);

/// What a holder has of a shard's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// The result's bytes, as they travel on the wire.
    Data(Vec<u8>),
    /// It has it, and has sent it to the asker over a data link.
    SentOverLink,
    /// Nothing.
    No,
}

/// The versions that a rank holds. Called on the thread that answers: it must not block for long.
pub trait CopyStore: Send + Sync {
    /// What it holds of this version, for that rank.
    fn copy(&self, requester: Rank, shard: &ShardVersion) -> Held;
}

/// A copy that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// Which version of which shard.
    pub shard: ShardVersion,
    /// The CRC-32 that it must have, as the version log says. Without it any copy that a member of the job sealed is
    /// taken.
    pub crc: Option<u32>,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Requests that this rank answered.
    pub served: u64,
    /// Requests that it passed on, since it did not hold the version.
    pub passed_on: u64,
    /// Copies that it got and that were right.
    pub fetched: u64,
    /// Messages and copies that were rejected.
    pub rejected: u64,
    /// How often it asked again.
    pub asked_again: u64,
    /// Links to the broker that were lost or could not be opened.
    pub links_lost: u64,
}

/// What the thread shares with its owner.
pub(crate) struct Shared {
    config: JobConfig,
    rank: Rank,
    key: RecordKey,
    piece_bytes: usize,
    publisher: Publisher,
    served: AtomicU64,
    passed_on: AtomicU64,
    fetched: AtomicU64,
    rejected: AtomicU64,
    asked_again: AtomicU64,
    links_lost: AtomicU64,
    /// Whether requests reach this rank now.
    holding: watch::Sender<bool>,
}

impl Shared {
    fn reject(&self, what: &str) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        self.publisher.publish(Item::Audit(AuditRecord::now(AuditKind::Rejected, what)));
    }
}

/// One rank's part in the exchange of copies. Dropping it ends it; requests that it was answering go to others.
pub(crate) struct Copies {
    shared: Arc<Shared>,
    asks: mpsc::Sender<Ask>,
    store: watch::Sender<Option<Arc<dyn CopyStore>>>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copies").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Copies {
    /// Starts the thread.
    pub(crate) fn start(
        config: JobConfig,
        rank: Rank,
        piece_bytes: usize,
        publisher: Publisher,
    ) -> Result<Self, Fault> {
        let shared = Arc::new(Shared {
            key: config.record_key(),
            config,
            rank,
            piece_bytes,
            publisher,
            served: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            asked_again: AtomicU64::new(0),
            links_lost: AtomicU64::new(0),
            holding: watch::Sender::new(false),
        });
        let (asks, asked) = mpsc::channel(ASKS_MAX);
        let (store, stored) = watch::channel(None);
        let (stop, stopped) = watch::channel(false);
        let system = |error: std::io::Error| {
            Fault::new(FaultKind::System, format!("the exchange of copies gets no thread or event loop: {error}"))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
        let running = shared.clone();
        let thread = std::thread::Builder::new()
            .name("gradwire-copies".to_owned())
            .stack_size(crate::link::STACK_BYTES)
            .spawn(move || {
                runtime.block_on(run(&running, asked, stored, stopped));
                // Closes the sockets, and with them all that the broker holds for this rank.
                runtime.shutdown_background();
            })
            .map_err(system)?;
        Ok(Self { shared, asks, store, stop, thread: Some(thread) })
    }

    /// From now on requests are answered from this store.
    pub(crate) fn hold(&self, store: Arc<dyn CopyStore>) {
        self.store.send_replace(Some(store));
    }

    /// Waits until requests reach this rank.
    pub(crate) fn wait_until_holding(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while !*self.shared.holding.borrow() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Asks for copies. `answer` gets them in the order of the requests, on the thread that exchanges them.
    pub(crate) fn request(
        &self,
        requests: &[CopyRequest],
        timeout: Duration,
        answer: impl FnOnce(Result<Vec<Vec<u8>>, Fault>) + Send + 'static,
    ) -> Result<(), Fault> {
        let (requests, answer) = (requests.to_vec(), Box::new(answer));
        let ask = Ask { requests, deadline: tokio::time::Instant::now() + timeout, timeout, answer };
        let busy = |_| Fault::new(FaultKind::System, format!("more than {ASKS_MAX} fetches of copies wait already"));
        self.asks.try_send(ask).map_err(busy)
    }

    /// Gets copies, in the order of the requests.
    pub(crate) fn fetch(&self, requests: &[CopyRequest], timeout: Duration) -> Result<Vec<Vec<u8>>, Fault> {
        let (answer, answered) = sync_channel(1);
        self.request(requests, timeout, move |copies| drop(answer.send(copies)))?;
        match answered.recv_timeout(timeout + SLACK) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                let detail = "a fetch of copies did not end by its deadline: this machine is overloaded";
                Err(Fault::new(FaultKind::DeadlineExceeded, detail))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::new(FaultKind::Closed, "the exchange of copies ended while copies were fetched"))
            }
        }
    }

    pub(crate) fn stats(&self) -> CopyStats {
        let Shared { served, passed_on, fetched, rejected, asked_again, links_lost, .. } = &*self.shared;
        CopyStats {
            served: served.load(Ordering::Relaxed),
            passed_on: passed_on.load(Ordering::Relaxed),
            fetched: fetched.load(Ordering::Relaxed),
            rejected: rejected.load(Ordering::Relaxed),
            asked_again: asked_again.load(Ordering::Relaxed),
            links_lost: links_lost.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that exchanges copies panicked");
        }
    }
}

async fn run(
    shared: &Shared,
    asked: mpsc::Receiver<Ask>,
    mut stored: watch::Receiver<Option<Arc<dyn CopyStore>>>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut requester = Requester::new(shared, asked);
    let asking = async {
        // An error that would come again is told to every fetch, and the next fetch tries again.
        loop {
            let ended = supervise("copies", &shared.links_lost, async || requester.serve().await).await;
            match ended {
                Ok(()) => return,
                Err(error) => requester.fail(error.into_fault(&shared.config.broker.url)),
            }
        }
    };
    let holding = async {
        loop {
            let Ok(store) = stored.wait_for(Option::is_some).await.map(|store| store.clone()) else { return };
            let Some(store) = store else { return };
            let ended = supervise("copies", &shared.links_lost, async || holder::hold(shared, &store).await).await;
            if let Err(error) = ended {
                tracing::error!(reason = error.reason, "this rank cannot answer requests for copies");
                return;
            }
        }
    };
    tokio::select! {
        _ = stopped.wait_for(|stop| *stop) => {}
        () = async { tokio::join!(asking, holding); } => {}
    }
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
