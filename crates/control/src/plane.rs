//! The control plane as the runtime sees it: plain calls, none of which waits for the broker unless it says so.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::{Fault, FaultKind, Rank};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::copies::{Copies, CopyRequest, CopyStats, CopyStore, PIECE_BYTES_DEFAULT};
use crate::job::JobConfig;
use crate::outbox::{Item, Publisher, outbox};
use crate::record::{AuditKind, AuditRecord, VersionRecord};
use crate::rendezvous::{ControlEvent, Me, Policy};
use crate::worker::{Leave, Order, Shared, Worker, random_id};

/// Beyond its deadline, how long the thread may take to say how joining ended.
const OUTCOME_SLACK: Duration = Duration::from_secs(3);
/// How long a dropped control plane may take to say that it leaves.
const DROP_MAX: Duration = Duration::from_millis(500);
/// Most reports and suspicions that wait to be written.
const ORDERS_MAX: usize = 64;
/// How long a commit waits for others to share a version record with, unless something else is said.
pub const COMMIT_INTERVAL_DEFAULT: Duration = Duration::from_millis(100);

/// What a rank needs to join.
#[derive(Clone, Debug)]
pub struct JoinRequest {
    /// The job.
    pub config: JobConfig,
    /// The rank of this process.
    pub rank: Rank,
    /// How many ranks the job starts with.
    pub world_size: u32,
    /// What happens when members are lost. The same on every rank.
    pub policy: Policy,
    /// Where this rank can be reached.
    pub endpoint: Endpoint,
    /// How long joining may take.
    pub deadline: Duration,
    /// Commits that follow each other within this time share a version record.
    pub commit_interval: Duration,
}

/// A rank's part in the control plane. Dropping it leaves the job, within half a second.
pub struct ControlPlane {
    shared: Arc<Shared>,
    publisher: Publisher,
    orders: mpsc::Sender<Order>,
    leave: watch::Sender<Option<Leave>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    config: JobConfig,
    rank: Rank,
    join_id: RecordId,
    /// Made when it is first needed.
    copies: Mutex<Option<Arc<Copies>>>,
}

impl fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlPlane").field("publisher", &self.publisher).finish_non_exhaustive()
    }
}

impl ControlPlane {
    /// Joins the job: waits until all ranks have joined and agreed on the members of epoch 1. In a running job that takes
    /// newcomers in ([`Policy::Elastic`]) this process waits to become a member from then on, and the view is one without
    /// it: see [`ControlPlane::ready`].
    ///
    /// # Errors
    /// Within the deadline, and on every living rank that reads the log:
    /// [`FaultKind::InvalidArgument`] for a rank or world size that cannot be;
    /// [`FaultKind::BrokerUnreachable`] when the broker cannot be reached, or refuses us;
    /// [`FaultKind::WorldMismatch`] when ranks disagree on their number, or two processes have one rank;
    /// [`FaultKind::ProtocolVersion`] when a rank runs another version;
    /// [`FaultKind::SecretMismatch`] on the rank whose secret is another one than that of all others;
    /// [`FaultKind::JobNameTaken`] when another job of this name lives;
    /// [`FaultKind::RankLeft`] or what it reported, when a rank gave up;
    /// [`FaultKind::DeadlineExceeded`] that names the ranks which have not joined.
    pub fn join(request: JoinRequest) -> Result<(Self, View), Fault> {
        check(&request)?;
        let JoinRequest { config, rank, world_size, policy, endpoint, deadline, commit_interval } = request;
        let join_id = random_id();
        let me =
            Me { job: config.job.to_string(), instance: config.instance, rank, world_size, policy, endpoint, join_id };
        let (broker_url, job) = (config.broker.url.clone(), config.clone());
        let (publisher, outbox) = outbox(commit_interval);
        let (orders, orders_receiver) = mpsc::channel(ORDERS_MAX);
        let (leave, leave_receiver) = watch::channel(None);
        let (joined, outcome) = sync_channel(1);
        let shared = Arc::new(Shared::default());
        let worker = Worker {
            config,
            me,
            deadline: Instant::now() + deadline,
            deadline_after: deadline,
            publisher: publisher.clone(),
            outbox,
            orders: orders_receiver,
            leave: leave_receiver,
            shared: shared.clone(),
            joined,
        };
        let thread = spawn(worker)?;
        let (thread, copies) = (Mutex::new(Some(thread)), Mutex::new(None));
        let plane = Self { shared, publisher, orders, leave, thread, config: job, rank, join_id, copies };
        // From here on, dropping `plane` ends the thread.
        match outcome.recv_timeout(deadline + OUTCOME_SLACK) {
            Ok(Ok(membership)) => Ok((plane, membership)),
            Ok(Err(fault)) => Err(fault),
            Err(RecvTimeoutError::Timeout) => {
                let detail = format!(
                    "joining did not end by its deadline; the broker at {broker_url} or this machine is overloaded"
                );
                Err(Fault::new(FaultKind::DeadlineExceeded, detail))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::new(FaultKind::System, "the control plane's thread ended unexpectedly; look at its output"))
            }
        }
    }

    /// Queues a version record to be written behind the step. Never waits. Records that follow each other within the
    /// commit interval are written as one.
    ///
    /// # Errors
    /// [`FaultKind::Unrecorded`] if there is no room: the broker has been slow or away for too long. The record is not
    /// written then; those that wait already still are.
    pub fn publish_version(&self, record: VersionRecord) -> Result<(), Fault> {
        let (epoch, step) = (record.epoch, record.step);
        if self.publisher.publish(Item::Version(record)) {
            return Ok(());
        }
        let detail = format!(
            "the commit of step {} ({epoch}) cannot be published: too many wait already, since the broker has been \
             slow or away for too long; see to the broker, or raise the commit interval",
            step.0
        );
        Err(Fault::new(FaultKind::Unrecorded, detail).step(step))
    }

    /// How many version and audit records were refused for lack of room.
    #[must_use]
    pub fn records_refused(&self) -> u64 {
        self.publisher.refused()
    }

    /// Writes to the job's audit log, behind the steps. Never waits; what does not fit is counted by
    /// [`ControlPlane::records_refused`].
    pub fn audit(&self, kind: AuditKind, about: Option<Rank>, detail: impl Into<String>) {
        let mut record = AuditRecord::now(kind, detail);
        record.rank = about;
        self.publisher.publish(Item::Audit(record));
    }

    /// How many records of this launch were ignored, because they did not verify or were malformed.
    #[must_use]
    pub fn records_rejected(&self) -> u64 {
        self.shared.records_rejected.load(Ordering::Relaxed)
    }

    /// How often the link to the broker was lost, or could not be opened.
    #[must_use]
    pub fn links_lost(&self) -> u64 {
        self.shared.links_lost.load(Ordering::Relaxed)
    }

    /// Tells the other ranks of a fault that ends the job. Does not wait; dropped if very many wait already.
    pub fn report(&self, fault: &Fault) {
        self.order(Order::Report(fault.clone()));
    }

    /// Says that this rank does not count on another process any more, named by its Join: with [`Policy::Elastic`] the
    /// next epoch begins without it, unless it was quicker to say so of this one. A later process of the same rank is not
    /// meant. Does not wait; dropped if very many wait already.
    pub fn suspect(&self, process: RecordId, reason: impl Into<String>) {
        self.order(Order::Suspect(process, reason.into()));
    }

    /// Names this process among the members of a view.
    #[must_use]
    pub const fn join_id(&self) -> RecordId {
        self.join_id
    }

    /// Says that this process, which joined a running job, has what it needs to take part. A [`ControlEvent::View`] with
    /// it follows when the members have taken it in. Does not wait.
    pub fn ready(&self) {
        self.order(Order::Ready);
    }

    fn order(&self, order: Order) {
        if self.orders.try_send(order).is_err() {
            tracing::warn!("a report was dropped: too many wait for the broker");
        }
    }

    /// The next event that another rank made known. Does not wait; cheap when there is none.
    pub fn event(&self) -> Option<ControlEvent> {
        self.shared.take_event()
    }

    /// Sets what is called, on the control plane's thread, after an event was queued: at once if one waits already.
    /// It must not block.
    pub fn set_waker(&self, waker: impl Fn() + Send + Sync + 'static) {
        self.shared.set_waker(Arc::new(waker));
    }

    /// Waits until the broker has every version and audit record that was accepted so far.
    ///
    /// # Errors
    /// [`FaultKind::DeadlineExceeded`] that says how many it has not; they stay queued.
    pub fn flush(&self, timeout: Duration) -> Result<(), Fault> {
        self.publisher.wait(timeout).map_err(|missing| {
            let detail = format!(
                "the broker has not taken {missing} version and audit records within {} s: is it running and not full?",
                timeout.as_secs_f64()
            );
            Fault::new(FaultKind::DeadlineExceeded, detail)
        })
    }

    /// From now on this rank answers requests for copies of shards from this store.
    ///
    /// # Errors
    /// [`FaultKind::System`] when the system gives no thread for it.
    pub fn hold_copies(&self, store: Arc<dyn CopyStore>) -> Result<(), Fault> {
        self.copies()?.hold(store);
        Ok(())
    }

    /// Waits until the broker knows that this rank holds copies. False if it does not in time.
    #[must_use]
    pub fn wait_until_holding(&self, timeout: Duration) -> bool {
        self.copies().is_ok_and(|copies| copies.wait_until_holding(timeout))
    }

    /// Gets copies of shards from ranks that hold their versions, over the broker. Gives their bytes in the order of
    /// the requests, each with the checksum that was asked for.
    ///
    /// # Errors
    /// [`FaultKind::DeadlineExceeded`] that names the first shard which nobody could give;
    /// [`FaultKind::BrokerUnreachable`] when the broker refuses us.
    pub fn fetch_copies(&self, requests: &[CopyRequest], timeout: Duration) -> Result<Vec<Vec<u8>>, Fault> {
        self.copies()?.fetch(requests, timeout)
    }

    /// As [`ControlPlane::fetch_copies`], without waiting: `answer` is called with the outcome, on the thread that
    /// exchanges copies. It must not block.
    ///
    /// # Errors
    /// [`FaultKind::System`] when very many fetches wait already, or the system gives no thread; `answer` is not
    /// called then.
    pub fn request_copies(
        &self,
        requests: &[CopyRequest],
        timeout: Duration,
        answer: impl FnOnce(Result<Vec<Vec<u8>>, Fault>) + Send + 'static,
    ) -> Result<(), Fault> {
        self.copies()?.request(requests, timeout, answer)
    }

    /// What was counted of copies.
    #[must_use]
    pub fn copy_stats(&self) -> CopyStats {
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.as_ref().map(|copies| copies.stats()).unwrap_or_default()
    }

    fn copies(&self) -> Result<Arc<Copies>, Fault> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copies) = &*copies {
            return Ok(copies.clone());
        }
        let publisher = self.publisher.clone();
        let started = Arc::new(Copies::start(self.config.clone(), self.rank, PIECE_BYTES_DEFAULT, publisher)?);
        *copies = Some(started.clone());
        Ok(started)
    }

    /// Leaves the job in good order: writes what is queued, then that this rank has left. Returns when that is done, or
    /// the broker has taken nothing for as long as `patience`, or after `timeout`.
    ///
    /// # Errors
    /// [`FaultKind::Unrecorded`] that says how many records the broker has not taken. They are lost.
    pub fn leave(&self, patience: Duration, timeout: Duration) -> Result<(), Fault> {
        let since = Instant::now();
        self.end(patience, timeout);
        self.publisher.wait(Duration::ZERO).map_err(|missing| {
            let detail = format!(
                "{missing} version and audit records are not on record: the broker did not take them within {:.1} s of \
                 leaving; was it away?",
                since.elapsed().as_secs_f64()
            );
            Fault::new(FaultKind::Unrecorded, detail)
        })
    }

    fn end(&self, patience: Duration, timeout: Duration) {
        // What it publishes is still written below.
        drop(self.copies.lock().unwrap_or_else(PoisonError::into_inner).take());
        let limits = Leave { patience, by: Instant::now() + timeout };
        self.leave.send_if_modified(|leave| {
            let first = leave.is_none();
            leave.get_or_insert(limits);
            first
        });
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the control plane's thread panicked");
        }
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.end(DROP_MAX, DROP_MAX);
    }
}

fn check(request: &JoinRequest) -> Result<(), Fault> {
    let JoinRequest { rank, world_size, .. } = request;
    if *world_size == 0 || *world_size > WORLD_SIZE_MAX {
        let detail = format!("a world size of {world_size}: a job has 1 to {WORLD_SIZE_MAX} ranks");
        return Err(Fault::new(FaultKind::InvalidArgument, detail));
    }
    let ranks_max = request.policy.ranks_max(*world_size);
    if rank.0 >= ranks_max {
        let detail = format!("{rank} in a job of {ranks_max} ranks: ranks count from 0");
        return Err(Fault::new(FaultKind::InvalidArgument, detail).at(*rank));
    }
    Ok(())
}

fn spawn(worker: Worker) -> Result<JoinHandle<()>, Fault> {
    let system = |error: std::io::Error| {
        Fault::new(FaultKind::System, format!("the control plane gets no thread or event loop: {error}"))
    };
    std::thread::Builder::new()
        .name("gradwire-control".to_owned())
        .stack_size(crate::link::STACK_BYTES)
        // The event loop is made in its thread: it must not be dropped within the caller's, if that has one.
        .spawn(move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                runtime.block_on(worker.run());
                // Closes the sockets, and with them all that the broker holds for this rank.
                runtime.shutdown_background();
            }
            Err(error) => drop(worker.joined.try_send(Err(system(error)))),
        })
        .map_err(system)
}
