//! The control plane's thread: drives the rendezvous over a link to the broker, and opens a new link whenever one is
//! lost. The data path never waits for it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use gradwire_proto::{Fault, FaultKind};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::job::JobConfig;
use crate::link::{Link, LinkError, receipt, unique_name};
use crate::record::{Body, Header, RECORD_VERSION, RecordId, RecordKey};
use crate::rendezvous::{Append, ControlEvent, Me, Membership, Rendezvous};
use crate::versions::Outbox;

/// How long opening a link may take.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Pause before a lost link is opened again: doubles from the first to the second.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A link that held this long starts over with the shortest pause.
const STEADY: Duration = Duration::from_secs(10);
/// Pause after the broker refused a version record.
const VERSIONS_PAUSE: Duration = Duration::from_secs(1);
/// How long the last words of a rank that could not join may take.
const FAREWELL_MAX: Duration = Duration::from_millis(500);
/// Most control records that wait for a receipt; further reports are dropped.
const RECORDS_MAX: usize = 1024;

type Receipts = FuturesOrdered<BoxFuture<'static, Result<(), LinkError>>>;
type Waker = Arc<dyn Fn() + Send + Sync>;

/// What the control plane's thread shares with its owner.
#[derive(Default)]
pub(crate) struct Shared {
    events: Mutex<VecDeque<ControlEvent>>,
    /// Lets the owner look for events without taking the lock.
    events_waiting: AtomicUsize,
    waker: Mutex<Option<Waker>>,
    pub(crate) records_rejected: AtomicU64,
    pub(crate) links_lost: AtomicU64,
}

impl Shared {
    pub(crate) fn take_event(&self) -> Option<ControlEvent> {
        if self.events_waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let event = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        self.events_waiting.fetch_sub(1, Ordering::AcqRel);
        Some(event)
    }

    /// Sets what is called after an event was queued; calls it at once if one waits already.
    pub(crate) fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
        if self.events_waiting.load(Ordering::Acquire) > 0 {
            waker();
        }
    }

    fn queue_event(&self, event: ControlEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() >= RECORDS_MAX {
            return;
        }
        events.push_back(event);
        self.events_waiting.fetch_add(1, Ordering::AcqRel);
        drop(events);
        // Called without a lock held, so that it may do what it likes.
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker();
        }
    }
}

/// The thread's state.
pub(crate) struct Worker {
    pub(crate) config: JobConfig,
    pub(crate) me: Me,
    pub(crate) deadline: Instant,
    pub(crate) deadline_after: Duration,
    pub(crate) outbox: Outbox,
    pub(crate) reports: mpsc::Receiver<Fault>,
    /// Set when the owner leaves: by when.
    pub(crate) leave: watch::Receiver<Option<Instant>>,
    pub(crate) shared: Arc<Shared>,
    /// Takes the outcome of joining, once.
    pub(crate) joined: SyncSender<Result<Membership, Fault>>,
}

impl Worker {
    /// Joins, serves and leaves. Ends when joining failed, or the owner has left.
    pub(crate) async fn run(self) {
        let mut leave = self.leave.clone();
        let running = Running {
            key: self.config.record_key(),
            rendezvous: Rendezvous::new(self.me.clone(), self.deadline.into_std(), self.deadline_after),
            worker: self,
            records: VecDeque::new(),
            sent: 0,
            outcome_told: false,
            leaving: false,
        };
        let left = async move {
            let by = told_to_leave(&mut leave).await;
            sleep_until(by).await;
        };
        tokio::select! {
            () = running.supervise() => {}
            () = left => {}
        }
    }
}

struct Running {
    worker: Worker,
    key: RecordKey,
    rendezvous: Rendezvous,
    /// Control records without a receipt, with their kinds; the first `sent` of them are on their way.
    records: VecDeque<(u16, Vec<u8>)>,
    sent: usize,
    outcome_told: bool,
    /// Set when the owner leaves; its Left record is queued then, and nothing after it.
    leaving: bool,
}

/// Why [`Running::drive`] ended well.
struct Done;

impl Running {
    async fn supervise(mut self) {
        let mut backoff = BACKOFF_MIN;
        loop {
            let opened = Instant::now();
            let error = match self.open_and_drive().await {
                Ok(Done) => return,
                Err(error) => error,
            };
            tracing::warn!(reason = error.reason, "the link to the broker is lost or could not be opened");
            self.worker.shared.links_lost.fetch_add(1, Ordering::Relaxed);
            self.link_lost();
            if opened.elapsed() > STEADY {
                backoff = BACKOFF_MIN;
            }
            let pause_end = Instant::now() + jittered(backoff);
            if !self.outcome_told && (error.permanent || pause_end >= self.worker.deadline) {
                self.tell(Err(error.into_fault(&self.worker.config.broker_url)));
                return;
            }
            self.pause(pause_end).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn open_and_drive(&mut self) -> Result<Done, LinkError> {
        let mut time_max = OPEN_MAX;
        if !self.outcome_told {
            time_max = time_max.min(self.worker.deadline.saturating_duration_since(Instant::now()));
        }
        let unique = random_id();
        let name = unique_name(&self.worker.me.instance, self.worker.me.rank.0, &unique[..8]);
        let link = Link::open(&self.worker.config, &name, time_max).await?;
        if !self.leaving {
            self.rendezvous.link_opened();
        }
        self.drive(link).await
    }

    /// What has no receipt is sent again over the next link, but for what the rendezvous will say again by itself.
    fn link_lost(&mut self) {
        self.sent = 0;
        self.records.retain(|(kind, _)| !matches!(*kind, Body::JOIN | Body::PROPOSE));
        self.worker.outbox.link_lost();
    }

    /// Serves over one link, until it is lost or there is nothing more to do.
    async fn drive(&mut self, mut link: Link) -> Result<Done, LinkError> {
        let mut receipts = Receipts::new();
        let mut version_receipts = Receipts::new();
        let mut versions_open_at: Option<Instant> = None;
        loop {
            self.collect();
            self.send_records(&mut link, &mut receipts).await?;
            if versions_open_at.is_none() {
                while let Some((key, payload)) = self.worker.outbox.next_to_send() {
                    let sent = link.publish(key, payload).await?;
                    version_receipts.push_back(Box::pin(receipt(sent)));
                }
            }
            if let Some(Done) = self.settle(&mut link, &mut receipts).await {
                return Ok(Done);
            }
            let due = self.rendezvous.poll_timeout().map(Instant::from_std);
            tokio::select! {
                message = link.next() => self.read(&message?),
                Some(received) = receipts.next() => {
                    received?;
                    self.records.pop_front();
                    self.sent -= 1;
                }
                Some(received) = version_receipts.next() => match received {
                    Ok(()) => self.worker.outbox.settle(),
                    Err(error) => {
                        tracing::warn!(reason = error.reason, "the broker did not take a version record");
                        version_receipts = Receipts::new();
                        self.worker.outbox.link_lost();
                        versions_open_at = Some(Instant::now() + VERSIONS_PAUSE);
                    }
                },
                Some(record) = self.worker.outbox.take() => {
                    let Me { instance, rank, .. } = self.worker.me;
                    self.worker.outbox.prepare(&record, &self.key, instance, rank, random_id());
                }
                Some(fault) = self.worker.reports.recv() => self.queue(None, &Body::Failed(fault)),
                () = until(due) => self.rendezvous.handle_timeout(std::time::Instant::now()),
                () = until(versions_open_at) => {
                    link.reopen_versions(&self.worker.config).await?;
                    versions_open_at = None;
                }
                _ = told_to_leave(&mut self.worker.leave), if !self.leaving => self.say_left(),
            }
        }
    }

    /// Takes what the rendezvous wants to be appended and made known.
    fn collect(&mut self) {
        while let Some(Append { id, body }) = self.rendezvous.poll_append() {
            self.queue(id, &body);
        }
        while let Some(event) = self.rendezvous.poll_event() {
            self.worker.shared.queue_event(event);
        }
        self.worker.shared.records_rejected.store(self.rendezvous.rejected(), Ordering::Relaxed);
    }

    fn read(&mut self, message: &[u8]) {
        match self.key.open(message) {
            Ok(record) => self.rendezvous.handle_record(std::time::Instant::now(), &record),
            Err(error) => tracing::debug!(%error, "the control log holds a message that is no record"),
        }
    }

    fn queue(&mut self, id: Option<RecordId>, body: &Body) {
        if self.leaving || self.records.len() >= RECORDS_MAX {
            tracing::warn!("a control record was dropped: the rank leaves, or too many wait for the broker");
            return;
        }
        let Me { instance, rank, .. } = self.worker.me;
        let id = id.unwrap_or_else(random_id);
        let header = Header { version: RECORD_VERSION, kind: body.kind(), instance, id, rank };
        self.records.push_back((body.kind(), self.key.seal(header, &body.encode())));
    }

    async fn send_records(&mut self, link: &mut Link, receipts: &mut Receipts) -> Result<(), LinkError> {
        while let Some((_, record)) = self.records.get(self.sent) {
            let sent = link.append(record.clone()).await?;
            receipts.push_back(Box::pin(receipt(sent)));
            self.sent += 1;
        }
        Ok(())
    }

    /// Tells the owner how joining ended, and ends when it failed or the owner has left and all is sent.
    async fn settle(&mut self, link: &mut Link, receipts: &mut Receipts) -> Option<Done> {
        if !self.outcome_told
            && let Some(outcome) = self.rendezvous.outcome()
        {
            let outcome = outcome.cloned().map_err(Clone::clone);
            if let Err(fault) = &outcome {
                self.say_farewell(link, receipts, fault).await;
            }
            let failed = outcome.is_err();
            self.tell(outcome);
            if failed {
                return Some(Done);
            }
        }
        let done = self.leaving && self.records.is_empty() && self.worker.outbox.is_empty();
        done.then_some(Done)
    }

    fn say_left(&mut self) {
        while let Ok(fault) = self.worker.reports.try_recv() {
            self.queue(None, &Body::Failed(fault));
        }
        self.queue(None, &Body::Left);
        self.leaving = true;
    }

    /// Joining failed: what the others cannot read from the log themselves is said, and that we are gone.
    async fn say_farewell(&mut self, link: &mut Link, receipts: &mut Receipts, fault: &Fault) {
        if fault.kind == FaultKind::DeadlineExceeded && fault.reporter.is_none() {
            self.queue(None, &Body::Failed(fault.clone()));
        }
        self.queue(None, &Body::Left);
        let _ = timeout(FAREWELL_MAX, self.deliver(link, receipts)).await;
    }

    async fn deliver(&mut self, link: &mut Link, receipts: &mut Receipts) -> Result<(), LinkError> {
        self.send_records(link, receipts).await?;
        while let Some(received) = receipts.next().await {
            received?;
        }
        self.records.clear();
        Ok(())
    }

    fn tell(&mut self, outcome: Result<Membership, Fault>) {
        self.outcome_told = true;
        let _ = self.worker.joined.try_send(outcome);
    }

    /// Waits, while reports are taken so that they do not fill their queue.
    async fn pause(&mut self, end: Instant) {
        loop {
            tokio::select! {
                Some(fault) = self.worker.reports.recv() => self.queue(None, &Body::Failed(fault)),
                () = sleep_until(end) => return,
            }
        }
    }
}

/// Waits until the owner leaves. Gives the time by which it wants to be gone: now, if it is gone without a word.
async fn told_to_leave(leave: &mut watch::Receiver<Option<Instant>>) -> Instant {
    leave.wait_for(Option::is_some).await.ok().and_then(|by| *by).unwrap_or_else(Instant::now)
}

/// Sleeps until then; for ever without a time.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Between one and one and a half of the pause, so that ranks do not come back all at once.
fn jittered(pause: Duration) -> Duration {
    let [byte, ..] = random_id();
    pause + pause / 2 * u32::from(byte) / 255
}

/// A new id. Where the system gives no randomness the ids repeat, and readers take records for known ones: so this
/// falls back to a counter and the clock, which is as unique, if not as hard to guess. Records are not protected by
/// their ids but by their MACs.
pub(crate) fn random_id() -> RecordId {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let mut id = [0; 16];
    if getrandom::fill(&mut id).is_err() {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        id[..8].copy_from_slice(&(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 40).to_le_bytes());
        id[8..].copy_from_slice(&COUNTER.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    }
    id
}
