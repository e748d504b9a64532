//! The contributor's thread: sends what is contributed, follows the log, reads results, over links that come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use gradwire_proto::rounds::{Body, Change, ContributionId, Entry, Open, Standing};
use gradwire_proto::{Fault, FaultKind, Round};
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{Producer, TokioExecutor};
use tokio::sync::{mpsc, watch};

use super::results::Results;
use super::{Contributed, Reply, Shared};
use crate::federated::bulk::{Outgoing, Update};
use crate::federated::follow::{Applied, Follower, Lost, lock};
use crate::federated::{
    BULK_RECEIPT_MAX, BYTES_IN_FLIGHT_MAX, ContributorConfig, OPEN_MAX, check_agreed, secret_mismatch,
};
use crate::job::Topic;
use crate::link::{Client, LinkError, next, receipt, receipt_place, send, unique_name};
use crate::record::{Header, RECORD_VERSION, RecordKey};
use crate::supervise::supervise;
use crate::worker::random_id;

/// How many pieces of results are read ahead.
const RESULTS_AHEAD: u32 = 16;

/// What the owner wants.
#[derive(Debug)]
pub(super) enum Order {
    Contribute {
        round: Round,
        outgoing: Outgoing,
        reply: Reply<Contributed>,
    },
    Result {
        round: Round,
        reply: Reply<(Vec<Entry>, Vec<Vec<u8>>)>,
    },
    /// It waits no longer.
    GiveUp,
}

/// A result as it came: what was added up, and the data of each shard.
pub(super) type Whole = (Vec<Entry>, Vec<Vec<u8>>);

/// The thread's state: what outlives a link.
pub(super) struct Worker {
    config: ContributorConfig,
    proposed: Open,
    key: RecordKey,
    follower: Follower,
    results: Option<Results>,
    orders: mpsc::Receiver<Order>,
    sending: Option<Sending>,
    waiting: Option<(Round, Reply<Whole>)>,
    joined: Option<SyncSender<Result<Open, Fault>>>,
    shared: Arc<Shared>,
}

/// A contribution on its way.
struct Sending {
    entry: Entry,
    id: ContributionId,
    crcs: Arc<[u32]>,
    outgoing: Outgoing,
    in_flight_bytes: usize,
    /// Whether the record that completes it was written over this link.
    told: bool,
    reply: Reply<Contributed>,
}

/// What is open at the broker.
struct Link {
    log: Reader<Vec<u8>, TokioExecutor>,
    results: Reader<Vec<u8>, TokioExecutor>,
    updates: Producer<TokioExecutor>,
    rounds: Producer<TokioExecutor>,
    client: Client,
    name: String,
}

/// Each of a piece, of which contribution and of how many bytes, or of a record of the log.
type Receipts = FuturesOrdered<BoxFuture<'static, Result<Option<(ContributionId, usize)>, LinkError>>>;

/// Why [`Worker::attempt`] ended well.
struct Done;

impl Worker {
    pub(super) fn new(
        config: ContributorConfig,
        proposed: Open,
        orders: mpsc::Receiver<Order>,
        joined: SyncSender<Result<Open, Fault>>,
    ) -> Self {
        let follower = Follower::new(&config.job);
        let shared = Shared {
            log: follower.shared(),
            unlinked: std::sync::Mutex::default(),
            ended: std::sync::Mutex::default(),
            links_lost: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
        };
        Self {
            key: config.job.record_key(),
            config,
            proposed,
            follower,
            results: None,
            orders,
            sending: None,
            waiting: None,
            joined: Some(joined),
            shared: Arc::new(shared),
        }
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Serves until told to stop, or until nothing more can be done.
    pub(super) fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                return self.end(Fault::new(FaultKind::System, format!("no event loop from the system: {error}")));
            }
        };
        let fault = runtime.block_on(async {
            tokio::select! {
                fault = self.serve() => Some(fault),
                _ = stopped.wait_for(|stop| *stop) => None,
            }
        });
        runtime.shutdown_background();
        if let Some(fault) = fault {
            self.end(fault);
        }
    }

    /// Tells everybody who waits, now and later, why there is nothing more.
    fn end(&mut self, fault: Fault) {
        *lock(&self.shared.ended) = Some(fault.clone());
        if let Some(joined) = self.joined.take() {
            let _ = joined.try_send(Err(fault.clone()));
        }
        if let Some(sending) = self.sending.take() {
            let _ = sending.reply.try_send(Err(fault.clone()));
        }
        if let Some((_, reply)) = self.waiting.take() {
            let _ = reply.try_send(Err(fault));
        }
    }

    /// Goes on over one link after the other. Returns what ends the job for this contributor.
    async fn serve(&mut self) -> Fault {
        let (shared, url) = (self.shared.clone(), self.config.job.broker.url.clone());
        let ended = supervise("contributor", &shared.links_lost, async || match self.attempt().await {
            Ok(Done) => Ok(Fault::new(FaultKind::Closed, "the contributor was closed")),
            Err(Lost::Fault(fault)) => Ok(fault),
            Err(Lost::Link(mut error)) => {
                self.link_lost();
                *lock(&shared.unlinked) = Some(error.reason.clone());
                // Once it worked, what does not work will again.
                error.permanent &= self.joined.is_some();
                Err(error)
            }
        });
        ended.await.unwrap_or_else(|error| error.into_fault(&url))
    }

    fn link_lost(&mut self) {
        if let Some(sending) = &mut self.sending {
            sending.outgoing.link_lost();
            sending.told = false;
            sending.in_flight_bytes = 0;
        }
    }

    async fn attempt(&mut self) -> Result<Done, Lost> {
        let mut link = self.open().await?;
        *lock(&self.shared.unlinked) = None;
        let Some(open) = self.follower.log().open().copied() else {
            return Err(LinkError { reason: "the job is not open".to_owned(), permanent: false }.into());
        };
        if let Some(joined) = self.joined.take() {
            let _ = joined.try_send(Ok(open));
        }
        let mut receipts = Receipts::new();
        loop {
            self.send(&mut link, &mut receipts).await?;
            self.answer(&open);
            let wants_results = self.results.as_ref().is_some_and(Results::wants_more);
            tokio::select! {
                applied = self.follower.next(&mut link.log) => {
                    if let Some(applied) = applied? {
                        self.applied(&applied);
                    }
                }
                message = next(&mut link.results), if wants_results => {
                    let (position, message) = message?;
                    self.read_result(&open, position, &message);
                }
                Some(received) = receipts.next() => {
                    if let Some((contribution, bytes)) = received? {
                        self.received(contribution, bytes);
                    }
                }
                order = self.orders.recv() => match order {
                    Some(order) => self.obey(order, &open, &mut link).await?,
                    None => return Ok(Done),
                },
            }
        }
    }

    /// Opens everything, reads the log, and opens the job if nobody has.
    async fn open(&mut self) -> Result<Link, Lost> {
        let job = &self.config.job;
        let name = unique_name(&job.instance, self.config.contributor.0, &random_id()[..8]);
        let client = Client::connect(&job.broker, OPEN_MAX).await?;
        let mut log = self.follower.open(&client, &name, OPEN_MAX, |_| {}).await?;
        let mut rounds = client.producer(&job.topic(Topic::Rounds), OPEN_MAX).await?;
        if self.follower.log().open().is_none() {
            if self.follower.unverified > 0 {
                return Err(secret_mismatch(job).into());
            }
            let open = Body::Open(self.proposed);
            let payload = self.key.seal(self.header(open.kind(), random_id()), &open.encode());
            receipt(send(&mut rounds, Message { payload, ..Default::default() }).await?).await?;
            while self.follower.log().open().is_none() {
                self.follower.next(&mut log).await?;
            }
        }
        let open = self.follower.log().open().copied().unwrap_or(self.proposed);
        let job = &self.config.job;
        check_agreed(&open, &self.proposed, job)?;
        let updates = client.producer(&job.topic(Topic::Updates), OPEN_MAX).await?;
        let current = self.follower.log().round();
        let read = self.results.get_or_insert_with(|| Results::new(&open, current));
        let start = read.start(&self.follower.log());
        let topic = job.topic(Topic::Results);
        let results = client.bounded_reader(&topic, &name, (start, false), RESULTS_AHEAD, OPEN_MAX).await?;
        client.seal();
        Ok(Link { log, results, updates, rounds, client, name })
    }

    fn header(&self, kind: u16, id: ContributionId) -> Header {
        let (instance, rank) = (self.config.job.instance, self.config.contributor);
        Header { version: RECORD_VERSION, kind, instance, id, rank }
    }

    /// Sends what may be sent now.
    async fn send(&mut self, link: &mut Link, receipts: &mut Receipts) -> Result<(), LinkError> {
        let Some(sending) = &mut self.sending else { return Ok(()) };
        while sending.in_flight_bytes < BYTES_IN_FLIGHT_MAX {
            let (round, contribution) = (sending.entry.origin, sending.id);
            let Some((shard, header, data)) = sending.outgoing.next() else { break };
            let body = Update { round, contribution, shard, header, data }.encode();
            let id = piece_id(contribution, shard, header.index);
            let (instance, rank) = (self.config.job.instance, self.config.contributor);
            let record = Header { version: RECORD_VERSION, kind: Body::UPDATE, instance, id, rank };
            let payload = self.key.seal(record, &body);
            let bytes = payload.len();
            let message = Message { payload, partition_key: Some(shard.to_string()), ..Default::default() };
            let sent = send(&mut link.updates, message).await?;
            sending.in_flight_bytes += bytes;
            self.shared.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
            receipts.push_back(Box::pin(async move {
                receipt_place(sent, BULK_RECEIPT_MAX).await.map(|_| Some((contribution, bytes)))
            }));
        }
        // The record that completes it may count only once its round has begun in the log.
        let begun = self.follower.log().round() >= sending.entry.origin;
        if sending.outgoing.is_settled() && !sending.told && begun {
            sending.told = true;
            let body =
                Body::Contributed { round: sending.entry.origin, contribution: sending.id, crcs: sending.crcs.clone() };
            let (instance, rank) = (self.config.job.instance, self.config.contributor);
            let record = Header { version: RECORD_VERSION, kind: body.kind(), instance, id: sending.id, rank };
            let payload = self.key.seal(record, &body.encode());
            let sent = send(&mut link.rounds, Message { payload, ..Default::default() }).await?;
            receipts.push_back(Box::pin(async move { receipt(sent).await.map(|()| None) }));
        }
        Ok(())
    }

    /// A piece has its receipt. Its contribution may have been given up meanwhile.
    fn received(&mut self, contribution: ContributionId, bytes: usize) {
        if let Some(sending) = self.sending.as_mut().filter(|sending| sending.id == contribution) {
            sending.in_flight_bytes -= bytes;
            sending.outgoing.settle();
        }
    }

    /// A record of the log was applied: our own says what became of a contribution.
    fn applied(&mut self, applied: &Applied) {
        let Some(sending) = &self.sending else { return };
        let outcome = match applied.change {
            Change::Late(_) if applied.id == sending.id => Some(Contributed::Late),
            Change::Repeated(_) if applied.id == sending.id => Some(Contributed::Already),
            _ => self.outcome(sending.entry, sending.id),
        };
        if let Some(outcome) = outcome {
            self.finish(outcome);
        }
    }

    /// What the log says of a contribution by now.
    fn outcome(&self, entry: Entry, id: ContributionId) -> Option<Contributed> {
        let log = self.follower.log();
        match log.contribution(entry) {
            Some(known) if known != id => Some(Contributed::Already),
            Some(_) => {
                let decided = log.round() > entry.origin || log.round() == entry.origin && log.closed().is_some();
                let waits = log.standing(entry, id, 0) == Standing::Waiting;
                Some(if decided && waits { Contributed::Carried } else { Contributed::InTime })
            }
            None if !log.accepts(entry.origin) => Some(Contributed::Late),
            None => None,
        }
    }

    fn finish(&mut self, outcome: Contributed) {
        if let Some(sending) = self.sending.take() {
            let _ = sending.reply.try_send(Ok(outcome));
        }
    }

    async fn obey(&mut self, order: Order, open: &Open, link: &mut Link) -> Result<(), LinkError> {
        match order {
            Order::GiveUp => {
                self.sending = None;
                self.waiting = None;
            }
            Order::Contribute { round, outgoing, reply } => self.begin(round, outgoing, reply),
            Order::Result { round, reply } => {
                self.waiting = Some((round, reply));
                let again = match &mut self.results {
                    Some(results) => results.want(open, &self.follower.log(), round),
                    None => false,
                };
                if again {
                    self.read_again(link).await?;
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, round: Round, outgoing: Outgoing, reply: Reply<Contributed>) {
        let entry = Entry { contributor: self.config.contributor, origin: round };
        let (id, crcs) = (random_id(), outgoing.crcs().into());
        self.sending = Some(Sending { entry, id, crcs, outgoing, in_flight_bytes: 0, told: false, reply });
        // Nothing need be sent where the log has decided already.
        if let Some(outcome) = self.outcome(entry, id) {
            self.finish(outcome);
        }
    }

    /// Opens the results topic at an earlier place.
    async fn read_again(&mut self, link: &mut Link) -> Result<(), LinkError> {
        let Some(results) = &self.results else { return Ok(()) };
        let start = results.start(&self.follower.log());
        let name = format!("{}-{}", link.name, gradwire_proto::secret::hex(&random_id()[..4]));
        let topic = self.config.job.topic(Topic::Results);
        link.results = link.client.bounded_reader(&topic, &name, (start, false), RESULTS_AHEAD, OPEN_MAX).await?;
        Ok(())
    }

    fn read_result(&mut self, open: &Open, position: crate::link::Position, message: &[u8]) {
        let Some(results) = &mut self.results else { return };
        self.shared.bytes_read.fetch_add(message.len() as u64, Ordering::Relaxed);
        let own = |header: &Header| {
            header.version == RECORD_VERSION
                && header.kind == Body::RESULT
                && header.instance == self.config.job.instance
        };
        match self.key.open(message) {
            Ok(record) if record.verified && own(&record.header) => results.take(open, position, record.body),
            _ => results.rejected += 1,
        }
        self.shared.rejected.store(results.rejected, Ordering::Relaxed);
    }

    /// Answers who waits for a result, once it is whole.
    fn answer(&mut self, open: &Open) {
        let (Some((round, _)), Some(results)) = (&self.waiting, &self.results) else { return };
        let log = self.follower.log();
        let Some((decided, shards)) = results.whole(open, &log, *round) else { return };
        let shards = shards.into_iter().map(<[u8]>::to_vec).collect();
        drop(log);
        if let Some((_, reply)) = self.waiting.take() {
            let _ = reply.try_send(Ok((decided.entries, shards)));
        }
    }
}

/// The id of a piece's record: the same when it is sent again.
fn piece_id(contribution: ContributionId, shard: u32, index: u16) -> ContributionId {
    let mut id = contribution;
    id[8..12].copy_from_slice(&shard.to_le_bytes());
    id[12..14].copy_from_slice(&index.to_le_bytes());
    id[14..].fill(0xff);
    id
}
