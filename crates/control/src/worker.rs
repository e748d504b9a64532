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
use gradwire_proto::membership::{Body, RecordId, View};
use gradwire_proto::{Epoch, Fault, FaultKind, Step};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::fate::Fate;
use crate::job::JobConfig;
use crate::link::{Client, Link, LinkError, Position, Start, receipt, unique_name};
use crate::outbox::{Item, Outbox, Publisher};
use crate::record::{AuditKind, AuditRecord, Header, RECORD_VERSION, RecordKey};
use crate::rendezvous::{Append, ControlEvent, Me, Policy, Rendezvous};
use crate::snapshots;
use crate::supervise::{Backoff, Complaints, Outage};

/// How long opening a link may take.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Pause after the broker refused a version or audit record.
const PUBLISH_PAUSE: Duration = Duration::from_secs(1);
/// How long the last words of a rank that could not join may take.
const FAREWELL_MAX: Duration = Duration::from_millis(500);
/// Most control records that wait for a receipt; further reports are dropped.
pub(crate) const RECORDS_MAX: usize = 1024;

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
    pub(crate) publisher: Publisher,
    pub(crate) outbox: Outbox,
    pub(crate) orders: mpsc::Receiver<Order>,
    /// Set when the owner leaves.
    pub(crate) leave: watch::Receiver<Option<Leave>>,
    pub(crate) shared: Arc<Shared>,
    /// Takes the outcome of joining, once.
    pub(crate) joined: SyncSender<Result<View, Fault>>,
}

/// How long an owner that leaves waits for the broker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave {
    /// Without a receipt.
    pub(crate) patience: Duration,
    /// In any case.
    pub(crate) by: Instant,
}

/// What the owner wants to be said.
pub(crate) enum Order {
    /// A fault that ends the job.
    Report(Fault),
    /// This process is not counted on any more.
    Suspect(RecordId, String),
    /// This process is ready to become a member.
    Ready,
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
            position: None,
            outcome_told: false,
            leaving: false,
        };
        let publisher = running.worker.publisher.clone();
        let left = async move {
            // An owner that is gone without a word waits for nothing.
            let Some(Leave { patience, by }) = told_to_leave(&mut leave).await else { return };
            let mut settled = publisher.settled();
            let mut give_up = Instant::now() + patience;
            while Instant::now() < give_up.min(by) {
                sleep(patience / 16).await;
                let now = publisher.settled();
                if now != settled {
                    settled = now;
                    give_up = Instant::now() + patience;
                }
            }
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
    /// The last message of the control log that was read.
    position: Option<Position>,
    outcome_told: bool,
    /// Set when the owner leaves; its Left record is queued then, and nothing after it.
    leaving: bool,
}

/// Why [`Running::drive`] ended well.
struct Done;

impl Running {
    async fn supervise(mut self) {
        let (mut backoff, mut complaints) = (Backoff::default(), Complaints::default());
        let mut outage = Outage::new(&self.worker.config.broker.url, self.worker.deadline);
        loop {
            let opened = Instant::now();
            // Whoever joins hears of a broker that cannot be reached from the outage.
            let joins = !self.outcome_told;
            let link = if joins { outage.watch(self.open()).await } else { self.open().await };
            let (ended, is_told) = match link {
                Ok(link) => (self.drive(link).await, false),
                Err(error) => (Err(error), joins),
            };
            let error = match ended {
                Ok(Done) => return,
                Err(error) => error,
            };
            if !is_told {
                complaints.say("control", &error.reason);
            }
            self.worker.shared.links_lost.fetch_add(1, Ordering::Relaxed);
            self.link_lost();
            let pause_end = Instant::now() + backoff.pause(opened.elapsed());
            if !self.outcome_told && (error.permanent || pause_end >= self.worker.deadline) {
                self.tell(Err(error.into_fault(&self.worker.config.broker.url)));
                return;
            }
            self.pause(pause_end).await;
        }
    }

    async fn open(&mut self) -> Result<Link, LinkError> {
        let mut time_max = OPEN_MAX;
        if !self.outcome_told {
            time_max = time_max.min(self.worker.deadline.saturating_duration_since(Instant::now()));
        }
        let unique = random_id();
        let name = unique_name(&self.worker.me.instance, self.worker.me.rank.0, &unique[..8]);
        let config = &self.worker.config;
        let client = Client::connect(&config.broker, time_max).await?;
        // Members of a job whose members stay have the whole log to read: it is short.
        let stored = match self.worker.me.policy {
            Policy::Elastic { .. } => snapshots::latest(&client, config, &name, time_max).await?,
            Policy::Fixed => None,
        };
        let start = stored.as_ref().map_or(Start::Earliest, |stored| Start::At(stored.position));
        let link = Link::open(client, config, &name, start, time_max).await?;
        if !self.leaving {
            self.rendezvous.link_opened();
            if let Some(stored) = stored {
                let now = std::time::Instant::now();
                self.rendezvous.handle_snapshot(now, stored.rank, stored.id, stored.snapshot);
            }
        }
        Ok(link)
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
        let mut published = Receipts::new();
        let mut publish_again_at: Option<Instant> = None;
        loop {
            self.collect();
            self.send_records(&mut link, &mut receipts).await?;
            self.store_snapshot(&mut link, &mut published).await?;
            if publish_again_at.is_none() {
                while let Some(part) = self.worker.outbox.next_to_send() {
                    let sent = link.publish(part).await?;
                    published.push_back(Box::pin(receipt(sent)));
                }
            }
            if let Some(Done) = self.settle(&mut link, &mut receipts).await {
                return Ok(Done);
            }
            let due = self.rendezvous.poll_timeout().map(Instant::from_std);
            tokio::select! {
                message = link.next() => {
                    let (position, message) = message?;
                    self.position = Some(position);
                    self.read(&message);
                }
                Some(received) = receipts.next() => {
                    received?;
                    self.records.pop_front();
                    self.sent -= 1;
                }
                Some(received) = published.next() => match received {
                    Ok(()) => self.worker.outbox.settle(),
                    Err(error) => {
                        tracing::warn!(reason = error.reason, "the broker did not take a version or audit record");
                        published = Receipts::new();
                        self.worker.outbox.link_lost();
                        publish_again_at = Some(Instant::now() + PUBLISH_PAUSE);
                    }
                },
                item = self.worker.outbox.take() => {
                    let Me { instance, rank, .. } = self.worker.me;
                    self.worker.outbox.prepare(&item, &self.key, (instance, rank), random_id);
                }
                Some(order) = self.worker.orders.recv() => self.obey(order),
                () = until(due) => self.rendezvous.handle_timeout(std::time::Instant::now()),
                () = until(publish_again_at) => {
                    link.reopen_publishers(&self.worker.config).await?;
                    publish_again_at = None;
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
            self.audit_event(&event);
            self.worker.shared.queue_event(event);
        }
        self.worker.shared.records_rejected.store(self.rendezvous.rejected(), Ordering::Relaxed);
    }

    /// Stores a snapshot of the membership where it is this rank's turn. Receipts are in the order of what is
    /// published, so it goes out only while nothing else waits for one; without a receipt the next one replaces it.
    async fn store_snapshot(&mut self, link: &mut Link, published: &mut Receipts) -> Result<(), LinkError> {
        let Some(position) = self.position.filter(|_| published.is_empty()) else { return Ok(()) };
        let Some(snapshot) = self.rendezvous.poll_snapshot() else { return Ok(()) };
        let Me { instance, rank, .. } = self.worker.me;
        let header = Header { version: RECORD_VERSION, kind: snapshots::KIND, instance, id: random_id(), rank };
        let body = snapshots::encode(position, snapshot);
        if !RecordKey::fits(&body) {
            tracing::warn!(bytes = body.len(), "a snapshot of the membership is too large to be stored");
            return Ok(());
        }
        receipt(link.store_snapshot(self.key.seal(header, &body)).await?).await
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Report(fault) => self.report(fault),
            Order::Suspect(process, reason) => {
                // One that is no member any more is nobody's affair.
                if let Some(rank) = self.rendezvous.suspect(process, reason.clone()) {
                    self.audit(AuditRecord::now(AuditKind::Suspected, reason).about(rank));
                }
            }
            Order::Ready => self.rendezvous.ready(),
        }
    }

    fn report(&mut self, fault: Fault) {
        self.audit(AuditRecord::now(AuditKind::Failed, fault.to_string()));
        let author = self.worker.me.join_id;
        self.queue(None, &Body::Failed { author, fault });
    }

    fn audit(&self, record: AuditRecord) {
        let record = record.at(self.epoch(), Step(0));
        if !self.worker.publisher.publish(Item::Audit(record)) {
            tracing::warn!("an audit record was dropped: too many wait for the broker");
        }
    }

    fn epoch(&self) -> Epoch {
        self.rendezvous.outcome().and_then(Result::ok).map_or(Epoch(0), |view| view.epoch)
    }

    fn audit_event(&self, event: &ControlEvent) {
        match event {
            ControlEvent::View(view) => {
                let ranks: Vec<String> = view.members.iter().map(|member| member.rank.0.to_string()).collect();
                self.audit(AuditRecord::now(AuditKind::Epoch, format!("members: {}", ranks.join(", "))));
            }
            ControlEvent::Removed(fault) => {
                self.audit(AuditRecord::now(AuditKind::Left, fault.detail.clone()).about(self.worker.me.rank));
            }
            ControlEvent::Failed(_) => {}
        }
    }

    fn read(&mut self, message: &[u8]) {
        match self.key.open(message) {
            Ok(record) => self.rendezvous.handle_record(std::time::Instant::now(), &record),
            Err(error) => tracing::debug!(%error, "the control log holds a message that is no record"),
        }
    }

    fn queue(&mut self, id: Option<RecordId>, body: &Body) {
        match Fate::of(body, self.leaving, self.records.len()) {
            Fate::Queued => {}
            Fate::Needless => {
                tracing::debug!(kind = body.kind(), "a control record is not written any more: the rank has left");
                return;
            }
            Fate::Lost(why) => {
                tracing::warn!(?body, "a control record was dropped: {why}");
                return;
            }
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
            match &outcome {
                Ok(_) => self.audit_joined(),
                Err(fault) => self.say_farewell(link, receipts, fault).await,
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
        while let Ok(order) = self.worker.orders.try_recv() {
            self.obey(order);
        }
        while let Some(Append { id, body }) = self.rendezvous.poll_append() {
            self.queue(id, &body);
        }
        self.audit(AuditRecord::now(AuditKind::Left, "in good order").about(self.worker.me.rank));
        self.queue(None, &Body::Left { author: self.worker.me.join_id });
        self.worker.outbox.hurry();
        self.leaving = true;
    }

    fn audit_joined(&self) {
        let Me { rank, endpoint, join_id, .. } = &self.worker.me;
        let addresses: Vec<String> = endpoint.addresses.iter().map(ToString::to_string).collect();
        let detail = format!(
            "host '{}', process {}, addresses {}, identity {}",
            endpoint.hostname,
            std::process::id(),
            addresses.join(" "),
            gradwire_proto::secret::hex(join_id)
        );
        self.audit(AuditRecord::now(AuditKind::Joined, detail).about(*rank));
    }

    /// Joining failed: what the others cannot read from the log themselves is said, and that we are gone.
    async fn say_farewell(&mut self, link: &mut Link, receipts: &mut Receipts, fault: &Fault) {
        let Me { instance, rank, join_id, .. } = self.worker.me;
        if fault.kind == FaultKind::DeadlineExceeded && fault.reporter.is_none() {
            self.queue(None, &Body::Failed { author: join_id, fault: fault.clone() });
        }
        self.queue(None, &Body::Left { author: join_id });
        let refused = AuditRecord::now(AuditKind::Refused, fault.to_string()).about(rank);
        let item = (Item::Audit(refused), 0);
        self.worker.outbox.prepare(&item, &self.key, (instance, rank), random_id);
        let _ = timeout(FAREWELL_MAX, self.deliver(link, receipts)).await;
    }

    async fn deliver(&mut self, link: &mut Link, receipts: &mut Receipts) -> Result<(), LinkError> {
        self.send_records(link, receipts).await?;
        while let Some(part) = self.worker.outbox.next_to_send() {
            receipts.push_back(Box::pin(receipt(link.publish(part).await?)));
        }
        while let Some(received) = receipts.next().await {
            received?;
        }
        self.records.clear();
        Ok(())
    }

    fn tell(&mut self, outcome: Result<View, Fault>) {
        self.outcome_told = true;
        let _ = self.worker.joined.try_send(outcome);
    }

    /// Waits, while reports are taken so that they do not fill their queue.
    async fn pause(&mut self, end: Instant) {
        loop {
            tokio::select! {
                Some(order) = self.worker.orders.recv() => self.obey(order),
                () = sleep_until(end) => return,
            }
        }
    }
}

/// Waits until the owner leaves. Nothing, if it is gone without a word.
async fn told_to_leave(leave: &mut watch::Receiver<Option<Leave>>) -> Option<Leave> {
    leave.wait_for(Option::is_some).await.ok().and_then(|leave| *leave)
}

/// Sleeps until then; for ever without a time.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
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
