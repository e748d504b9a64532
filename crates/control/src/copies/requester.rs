//! A rank that lacks copies: asks, checks what comes, and asks again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use gradwire_proto::{Fault, FaultKind, Rank};
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{Producer, TokioExecutor};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::record::{COPY_KIND, Copy, REQUEST_KIND, Request};
use super::{CopyRequest, ShardVersion, Shared, now_ms};
use crate::job::Topic;
use crate::link::{Client, LinkError, Start, next, receipt, send, unique_name};
use crate::outbox::Item;
use crate::pieces::{Collected, Collector};
use crate::record::{AuditKind, AuditRecord, RECORD_VERSION};
use crate::worker::random_id;

/// Copies that are asked for at a time.
const WANTED_MAX: usize = 256;
/// How long an answer may take before it is asked for again: doubles to the second.
const PATIENCE_MIN: Duration = Duration::from_millis(500);
const PATIENCE_MAX: Duration = Duration::from_secs(5);
/// Most bytes of copies that are being put together.
const COLLECTED_BYTES_MAX: usize = 256 << 20;
/// How long opening a link may take.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// How long a link is kept when nothing is wanted.
const LINGER: Duration = Duration::from_secs(5);

type Receipts = FuturesUnordered<BoxFuture<'static, Result<(), LinkError>>>;
type Answer = Box<dyn FnOnce(Result<Vec<Vec<u8>>, Fault>) + Send>;

/// One fetch.
pub(super) struct Ask {
    pub(super) requests: Vec<CopyRequest>,
    pub(super) deadline: Instant,
    pub(super) timeout: Duration,
    pub(super) answer: Answer,
}

/// A fetch that is under way.
struct Fetch {
    ask: Ask,
    copies: Vec<Option<Vec<u8>>>,
    missing: usize,
    /// How many answers said that nobody holds it.
    refusals: u64,
}

/// A copy that was asked for.
struct Wanted {
    /// The fetch, and the place of the copy in it.
    fetch: u64,
    place: usize,
    crc: Option<u32>,
    attempt: u16,
    ask_again_at: Instant,
    patience: Duration,
}

pub(super) struct Requester<'a> {
    shared: &'a Shared,
    asked: mpsc::Receiver<Ask>,
    fetches: BTreeMap<u64, Fetch>,
    fetches_begun: u64,
    /// What is not asked for yet: fetch and place.
    waiting: VecDeque<(u64, usize)>,
    wanted: BTreeMap<ShardVersion, Wanted>,
    collector: Collector<(ShardVersion, Rank)>,
}

impl<'a> Requester<'a> {
    pub(super) fn new(shared: &'a Shared, asked: mpsc::Receiver<Ask>) -> Self {
        Self {
            shared,
            asked,
            fetches: BTreeMap::new(),
            fetches_begun: 0,
            waiting: VecDeque::new(),
            wanted: BTreeMap::new(),
            collector: Collector::new(COLLECTED_BYTES_MAX),
        }
    }

    /// Waits for fetches and serves them over one link at a time. Ends when its owner is gone.
    pub(super) async fn serve(&mut self) -> Result<(), LinkError> {
        loop {
            if self.fetches.is_empty() {
                match self.asked.recv().await {
                    Some(ask) => self.begin(ask),
                    None => return Ok(()),
                }
            }
            self.serve_over_a_link().await?;
        }
    }

    /// Ends every fetch with this fault.
    pub(super) fn fail(&mut self, fault: Fault) {
        self.waiting.clear();
        self.wanted.clear();
        for (_, fetch) in std::mem::take(&mut self.fetches) {
            (fetch.ask.answer)(Err(fault.clone()));
        }
    }

    async fn serve_over_a_link(&mut self) -> Result<(), LinkError> {
        let config = &self.shared.config;
        let deadline = self.fetches.values().map(|fetch| fetch.ask.deadline).max();
        let opening = async {
            let client = Client::connect(&config.broker, OPEN_MAX).await?;
            let name = unique_name(&config.instance, self.shared.rank.0, &random_id()[..8]);
            let [request_topic, copy_topic] = [Topic::Retransmit, Topic::Copies].map(|topic| config.topic(topic));
            // Answers are read from now on, so the reader comes before the first request.
            let reader = client.reader(&copy_topic, &name, (Start::Latest, false), OPEN_MAX).await?;
            let requests = client.producer(&request_topic, OPEN_MAX).await?;
            client.seal();
            Ok::<_, LinkError>((client, reader, requests))
        };
        let opened = tokio::select! {
            opened = opening => Some(opened),
            () = until(deadline) => None,
        };
        let Some(opened) = opened else {
            self.expire();
            return Ok(());
        };
        let (_client, mut reader, mut requests) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.expire();
                return Err(error);
            }
        };
        // What the last link took may be lost.
        for wanted in self.wanted.values_mut() {
            wanted.ask_again_at = Instant::now();
        }
        self.drive(&mut reader, &mut requests).await
    }

    async fn drive(
        &mut self,
        reader: &mut Reader<Vec<u8>, TokioExecutor>,
        requests: &mut Producer<TokioExecutor>,
    ) -> Result<(), LinkError> {
        let mut receipts = Receipts::new();
        let mut idle_until = None;
        loop {
            self.expire();
            self.ask(requests, &mut receipts).await?;
            let idle = self.fetches.is_empty();
            idle_until = if idle { idle_until.or_else(|| Some(Instant::now() + LINGER)) } else { None };
            if idle && idle_until.is_some_and(|at| at <= Instant::now()) {
                return Ok(());
            }
            let due = self.wanted.values().map(|wanted| wanted.ask_again_at).min();
            let deadline = self.fetches.values().map(|fetch| fetch.ask.deadline).min();
            let wake = [due, deadline, idle_until].into_iter().flatten().min();
            tokio::select! {
                message = next(reader) => self.take(&message?.1),
                Some(received) = receipts.next() => received?,
                ask = self.asked.recv() => match ask {
                    Some(ask) => self.begin(ask),
                    None => return Ok(()),
                },
                () = until(wake) => {}
            }
        }
    }

    fn begin(&mut self, ask: Ask) {
        if ask.requests.is_empty() {
            (ask.answer)(Ok(Vec::new()));
            return;
        }
        let (number, count) = (self.fetches_begun, ask.requests.len());
        self.fetches_begun += 1;
        self.waiting.extend((0..count).map(|place| (number, place)));
        self.fetches.insert(number, Fetch { ask, copies: vec![None; count], missing: count, refusals: 0 });
    }

    /// Ends fetches that are past their deadline.
    fn expire(&mut self) {
        let now = Instant::now();
        let expired: Vec<u64> =
            self.fetches.iter().filter(|(_, fetch)| fetch.ask.deadline <= now).map(|(number, _)| *number).collect();
        for number in expired {
            let Some(fetch) = self.fetches.remove(&number) else { continue };
            self.wanted.retain(|_, wanted| wanted.fetch != number);
            self.waiting.retain(|(waiting, _)| *waiting != number);
            let fault = overdue(&fetch);
            (fetch.ask.answer)(Err(fault));
        }
    }

    /// Asks for what is wanted and was not asked for lately.
    async fn ask(&mut self, requests: &mut Producer<TokioExecutor>, receipts: &mut Receipts) -> Result<(), LinkError> {
        let now = Instant::now();
        let mut deferred = VecDeque::new();
        while self.wanted.len() < WANTED_MAX
            && let Some((number, place)) = self.waiting.pop_front()
        {
            let Some(fetch) = self.fetches.get(&number) else { continue };
            let CopyRequest { shard, crc } = fetch.ask.requests[place];
            if self.wanted.contains_key(&shard) {
                // Another fetch wants the same one: it is asked for when that has it.
                deferred.push_back((number, place));
                continue;
            }
            let wanted = Wanted { fetch: number, place, crc, attempt: 0, ask_again_at: now, patience: PATIENCE_MIN };
            self.wanted.insert(shard, wanted);
        }
        self.waiting.append(&mut deferred);
        for (shard, wanted) in self.wanted.iter_mut().filter(|(_, wanted)| wanted.ask_again_at <= now) {
            let Some(fetch) = self.fetches.get(&wanted.fetch) else { continue };
            let left = fetch.ask.deadline.saturating_duration_since(now);
            let deadline_ms = now_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            let request =
                Request { requester: self.shared.rank, shard: *shard, attempt: wanted.attempt, hop: 0, deadline_ms };
            let payload = self.shared.seal(REQUEST_KIND, &request.encode());
            let message = Message { payload, partition_key: Some(request.key()), ..Default::default() };
            receipts.push(Box::pin(receipt(send(requests, message).await?)));
            if wanted.patience > PATIENCE_MIN {
                self.shared.asked_again.fetch_add(1, Ordering::Relaxed);
            }
            wanted.ask_again_at = now + wanted.patience;
            wanted.patience = (wanted.patience * 2).min(PATIENCE_MAX);
        }
        Ok(())
    }

    /// Takes an answer: to us, or to somebody else.
    fn take(&mut self, message: &[u8]) {
        let shared = self.shared;
        let record = shared.key.open(message).ok().filter(|record| record.verified);
        let Some(record) = record.filter(|record| record.header.version == RECORD_VERSION) else {
            shared.reject("a message on the copies topic that is no record, or does not verify");
            return;
        };
        if record.header.instance != shared.config.instance || record.header.kind != COPY_KIND {
            return;
        }
        let Ok(copy) = Copy::decode(record.body) else {
            shared.reject(&format!("a malformed copy from {}", record.header.rank));
            return;
        };
        if copy.requester != shared.rank || !self.wanted.contains_key(&copy.shard) {
            return;
        }
        let Some((header, piece)) = copy.piece else {
            if let Some(wanted) = self.wanted.get(&copy.shard)
                && let Some(fetch) = self.fetches.get_mut(&wanted.fetch)
            {
                fetch.refusals += 1;
            }
            return;
        };
        let from = record.header.rank;
        match self.collector.add(&(copy.shard, from), header, piece) {
            Collected::Open => {}
            Collected::Complete(data) => self.complete(from, copy.shard, data),
            Collected::Wrong => shared.reject(&format!("a copy from {from} whose pieces do not fit together")),
        }
    }

    fn complete(&mut self, from: Rank, shard: ShardVersion, data: Vec<u8>) {
        let Some(wanted) = self.wanted.get_mut(&shard) else { return };
        if wanted.crc.is_some_and(|crc| crc != crc32fast::hash(&data)) {
            wanted.attempt = wanted.attempt.wrapping_add(1);
            wanted.ask_again_at = Instant::now();
            let detail = format!("a copy of unit {} from {from} that is not the version's", shard.unit.0);
            self.shared.reject(&detail);
            return;
        }
        self.shared.fetched.fetch_add(1, Ordering::Relaxed);
        let Some(Wanted { fetch: number, place, .. }) = self.wanted.remove(&shard) else { return };
        let Some(fetch) = self.fetches.get_mut(&number) else { return };
        fetch.copies[place] = Some(data);
        fetch.missing -= 1;
        if fetch.missing == 0
            && let Some(fetch) = self.fetches.remove(&number)
        {
            let detail = format!("{} shards by {}", fetch.copies.len(), self.shared.rank);
            let record = AuditRecord::now(AuditKind::Read, detail).at(shard.epoch, shard.step).about(self.shared.rank);
            self.shared.publisher.publish(Item::Audit(record));
            (fetch.ask.answer)(Ok(fetch.copies.into_iter().flatten().collect()));
        }
    }
}

fn overdue(fetch: &Fetch) -> Fault {
    let Fetch { ask, copies, missing, refusals } = fetch;
    let first = copies.iter().position(Option::is_none).unwrap_or_default();
    let shard = ask.requests[first].shard;
    let mut detail = format!(
        "{missing} of {} shards did not come within {} s, the first of them unit {} of step {} in {}",
        copies.len(),
        ask.timeout.as_secs_f64(),
        shard.unit.0,
        shard.step.0,
        shard.epoch
    );
    detail.push_str(if *refusals > 0 {
        ": no rank that answers requests holds it; do ranks retain this many steps?"
    } else {
        ": no rank answered; does any hold versions, and is the broker reachable?"
    });
    Fault::new(FaultKind::DeadlineExceeded, detail).step(shard.step)
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
