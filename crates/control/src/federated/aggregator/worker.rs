//! The aggregator's thread: holds, adds up, publishes and proposes, over links that come and go.
//!
//! With a lost link all that is held is forgotten: the broker delivers it again, to this aggregator or another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use gradwire_proto::rounds::{Body, Change, ContributionId, Entry, LatePolicy, Log, Open};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Round, Step, UnitIndex};
use pulsar::consumer::Message as Received;
use pulsar::producer::Message;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::hold::{Event, Hold};
use super::link::{Link, Receipts, read_update};
use super::publish::{Author, Progress, Publishing};
use super::{AggregatorConfig, FAREWELL_MAX, Shared};
pub(super) use crate::federated::follow::Lost;
use crate::federated::follow::{Applied, Follower, lock};
use crate::federated::{OPEN_MAX, check_agreed, secret_mismatch};
use crate::job::Topic;
use crate::link::{Client, LinkError, receipt, send, unique_name};
use crate::outbox::{Item, Outbox, Publisher, outbox};
use crate::record::{AuditKind, AuditRecord, VersionRecord};
use crate::supervise::supervise;
use crate::worker::random_id;

/// After another aggregator has subscribed, this long more may do: then everything goes back at once.
const HAND_BACK_AFTER: Duration = Duration::from_millis(10);
/// How long an aggregator that did not close the last round leaves it to others to do so.
const STAGGER: Duration = Duration::from_millis(50);
/// Over so many steps.
const STAGGER_STEPS: u32 = 8;
/// Rejected messages are told together, this often at most.
const REJECTED_INTERVAL: Duration = Duration::from_secs(1);
/// The epoch that version records of the federated mode name: there is one membership, of contributors.
const EPOCH: Epoch = Epoch(1);

/// The thread's state: what outlives a link.
pub(super) struct Worker {
    config: AggregatorConfig,
    id: ContributionId,
    follower: Follower,
    publisher: Publisher,
    outbox: Outbox,
    shared: Arc<Shared>,
    /// The aggregator's number, once it has subscribed.
    number: Option<Rank>,
    /// Shards of the current round whose result was this aggregator's.
    own: BTreeMap<u32, u32>,
    /// When the current round's first contribution was heard of.
    begun: Option<(Round, Instant)>,
    /// Rejected messages that were not told yet: how many, why the last one, since when.
    rejected: Option<(u64, String, Instant)>,
}

/// Why [`Worker::attempt`] ended well.
struct Stopped;

impl Worker {
    pub(super) fn new(config: AggregatorConfig, shared: Arc<Shared>) -> Self {
        let (publisher, outbox) = outbox(Duration::ZERO);
        Self {
            id: random_id(),
            follower: Follower::new(&config.job),
            config,
            publisher,
            outbox,
            shared,
            number: None,
            own: BTreeMap::new(),
            begun: None,
            rejected: None,
        }
    }

    /// Works until told to stop, or until it cannot go on.
    pub(super) fn run(mut self, stopped: watch::Receiver<bool>) {
        let shared = self.shared.clone();
        let outcome = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                let outcome = runtime.block_on(self.serve(stopped));
                runtime.shutdown_background();
                outcome
            }
            Err(error) => Err(Fault::new(FaultKind::System, format!("no event loop from the system: {error}"))),
        };
        shared.end(outcome);
    }

    async fn serve(&mut self, stopped: watch::Receiver<bool>) -> Result<(), Fault> {
        let (shared, url) = (self.shared.clone(), self.config.job.broker.url.clone());
        let (mut told, stopped) = (stopped.clone(), stopped);
        let mut subscribed = false;
        let attempts = supervise("aggregator", &shared.links_lost, async || {
            match self.attempt(stopped.clone(), &mut subscribed).await {
                Ok(Stopped) => Ok(Ok(())),
                Err(Lost::Fault(fault)) => Ok(Err(fault)),
                Err(Lost::Link(mut error)) => {
                    self.outbox.link_lost();
                    lock(&shared.state).unlinked = Some(error.reason.clone());
                    // Once it worked, what does not work will again.
                    error.permanent &= !subscribed;
                    Err(error)
                }
            }
        });
        tokio::select! {
            outcome = attempts => outcome.unwrap_or_else(|error| Err(error.into_fault(&url))),
            // A link that is being opened, or waits for its turn, is given up; one that is open says farewell first.
            () = async {
                let _ = told.wait_for(|stop| *stop).await;
                tokio::time::sleep(FAREWELL_MAX * 2).await;
            } => Ok(()),
        }
    }

    async fn attempt(&mut self, mut stopped: watch::Receiver<bool>, subscribed: &mut bool) -> Result<Stopped, Lost> {
        let opened = tokio::select! {
            opened = self.open() => opened?,
            _ = stopped.wait_for(|stop| *stop) => return Ok(Stopped),
        };
        let (mut link, open) = opened;
        *subscribed = true;
        {
            // Contributions that were heard of while there was no link count from now.
            let log = self.follower.log();
            self.shared.complete.store(log.round().0 - 1, Ordering::Relaxed);
            let is_known = self.begun.is_some_and(|(round, _)| round == log.round());
            if !is_known && log.arrived().next().is_some() {
                self.begun = Some((log.round(), Instant::now()));
            }
        }
        {
            let mut state = lock(&self.shared.state);
            (state.number, state.unlinked) = (Some(link.author.rank), None);
        }
        // Set when it was told to stop: by when it is gone.
        let mut leaving: Option<Instant> = None;
        loop {
            self.settle(&mut link, &open).await?;
            if leaving.is_some_and(|by| by <= Instant::now() || self.may_leave()) {
                // What is held goes to others.
                let _ = timeout(FAREWELL_MAX / 4, link.updates.close()).await;
                return Ok(Stopped);
            }
            let due = self.next_due(&link).into_iter().chain(leaving).min();
            let mut applied = None;
            tokio::select! {
                message = link.updates.next() => self.received(&mut link, &open, message)?,
                record = self.follower.next(&mut link.log) => applied = record?,
                progress = link.publishing.next() => match progress? {
                    Progress::Reduced(reduced) => link.publishing.publish(&open, reduced),
                    Progress::Receipt(None) => {}
                    Progress::Receipt(Some(body)) => {
                        self.shared.results.fetch_add(1, Ordering::Relaxed);
                        link.append(&body).await?;
                    }
                },
                Some(receipt) = link.receipts.next() => receipt?,
                Some(receipt) = link.published.next() => {
                    receipt?;
                    self.outbox.settle();
                }
                item = self.outbox.take() => {
                    let Author { key, instance, rank } = &link.author;
                    self.outbox.prepare(&item, key, (*instance, *rank), random_id);
                }
                () = until(due) => self.time_passed(&mut link).await?,
                _ = stopped.wait_for(|stop| *stop), if leaving.is_none() => {
                    leaving = Some(Instant::now() + FAREWELL_MAX);
                    self.audit(AuditKind::Left, format!("aggregator {} stopped", link.author.rank.0));
                    self.outbox.hurry();
                }
            }
            if let Some(applied) = applied {
                self.applied(&mut link, &open, &applied);
            }
        }
    }

    /// Reads the log, waits until the job is open, subscribes, and says so.
    async fn open(&mut self) -> Result<(Link, Open), Lost> {
        let job = &self.config.job;
        let name = unique_name(&job.instance, u32::MAX, &random_id()[..8]);
        let client = Client::connect(&job.broker, OPEN_MAX).await?;
        // What came of this aggregator's results while it had no link.
        let (number, mut missed) = (self.number, Vec::new());
        let is_own = |applied: &Applied| {
            number.is_some() && matches!(applied.change, Change::Published(_) | Change::Complete(_))
        };
        let mut keep = |applied: &Applied| missed.extend(is_own(applied).then(|| applied.clone()));
        let mut log = self.follower.open(&client, &name, OPEN_MAX, &mut keep).await?;
        missed.iter().for_each(|applied| self.record(applied));
        let job = &self.config.job;
        if self.follower.log().open().is_none() && self.follower.unverified > 0 {
            return Err(secret_mismatch(job).into());
        }
        while self.follower.log().open().is_none() {
            self.follower.next(&mut log).await?;
        }
        let open = self.agreed()?;
        let job = &self.config.job;
        let topic = job.topic(Topic::Updates);
        // Another launch of the job has a subscription of its own: it must not take what is ours.
        let subscription = format!("aggregators-{}", gradwire_proto::secret::hex(&job.instance[..4]));
        let [results, rounds, versions, audit] =
            [Topic::Results, Topic::Rounds, Topic::Versions, Topic::Audit].map(|topic| job.topic(topic));
        let (updates, results, mut rounds, versions, audit) = tokio::try_join!(
            client.key_shared(&topic, (&subscription, &name), self.config.messages_ahead, OPEN_MAX),
            client.producer(&results, OPEN_MAX),
            client.producer(&rounds, OPEN_MAX),
            client.producer(&versions, OPEN_MAX),
            client.producer(&audit, OPEN_MAX),
        )?;
        client.seal();
        let mut author = Author { key: job.record_key(), instance: job.instance, rank: Rank(u32::MAX) };
        let joined = Body::AggregatorJoined { aggregator: self.id };
        let payload = author.seal(joined.kind(), &joined.encode());
        receipt(send(&mut rounds, Message { payload, ..Default::default() }).await?).await?;
        author.rank = loop {
            if let Some(number) = self.follower.log().aggregator(self.id) {
                break number;
            }
            self.follower.next(&mut log).await?;
        };
        self.number = Some(author.rank);
        let hold = Hold::new(self.config.memory_bytes_max, Instant::now());
        let publishing = Publishing::new(self.config.piece_bytes);
        self.audit(AuditKind::Joined, format!("aggregator {} subscribed as {name}", author.rank.0));
        let link = Link {
            log,
            updates,
            topic,
            results,
            rounds,
            versions,
            audit,
            hold,
            publishing,
            receipts: Receipts::new(),
            published: Receipts::new(),
            author,
            hand_back_at: None,
            proposed: None,
        };
        Ok((link, open))
    }

    /// How the job is run, if that is what this aggregator expects and can do.
    fn agreed(&self) -> Result<Open, Fault> {
        let Some(open) = self.follower.log().open().copied() else {
            return Err(Fault::new(FaultKind::System, "the job is not open"));
        };
        let expected = self.config.expected;
        let own = Open {
            contributors: expected.contributors.unwrap_or(open.contributors),
            quorum: expected.quorum.unwrap_or(open.quorum),
            late: expected.late.unwrap_or(open.late),
            ..open
        };
        check_agreed(&open, &own, &self.config.job)?;
        let least = open.shard_bytes(0) * open.contributors as usize;
        if least > self.config.memory_bytes_max {
            let detail = format!(
                "one shard of all {} contributors takes {least} bytes, but this aggregator may hold {}: give it more \
                 memory, or open the job with smaller shards",
                open.contributors, self.config.memory_bytes_max
            );
            return Err(Fault::new(FaultKind::MemoryUnavailable, detail));
        }
        Ok(open)
    }

    /// Does what does not have to wait.
    async fn settle(&mut self, link: &mut Link, open: &Open) -> Result<(), Lost> {
        for event in link.hold.take_events() {
            self.tell(link.author.rank, &event, open);
        }
        for message in link.hold.take_acks() {
            link.updates.ack_with_id(&link.topic, message).await.map_err(consumer_error)?;
        }
        for message in link.hold.take_nacks() {
            link.updates.nack_with_id(&link.topic, message).await.map_err(consumer_error)?;
        }
        let counters = link.hold.counters;
        link.hold.counters = super::hold::Counters::default();
        self.shared.updates.fetch_add(counters.updates, Ordering::Relaxed);
        self.shared.duplicates.fetch_add(counters.duplicates, Ordering::Relaxed);
        self.shared.late.fetch_add(counters.late, Ordering::Relaxed);
        self.shared.handed_back.fetch_add(counters.handed_back, Ordering::Relaxed);
        link.publishing.send(&link.author, &mut link.results).await?;
        while let Some(part) = self.outbox.next_to_send() {
            let producer = if part.topic == Topic::Versions { &mut link.versions } else { &mut link.audit };
            let message = Message { payload: part.payload, partition_key: part.key, ..Default::default() };
            let sent = send(producer, message).await?;
            link.published.push_back(Box::pin(receipt(sent)));
        }
        Ok(())
    }

    /// A message of the updates topic came, or there will be none any more.
    fn received(
        &mut self,
        link: &mut Link,
        open: &Open,
        message: Option<Result<Received<Vec<u8>>, pulsar::Error>>,
    ) -> Result<(), Lost> {
        let Some(message) = message else {
            return Err(LinkError { reason: "the broker closed the link".to_owned(), permanent: false }.into());
        };
        let message = message.map_err(LinkError::from)?;
        let id = message.message_id().clone();
        match read_update(&link.author, open, &message) {
            Ok((entry, update)) => {
                let log = self.follower.log();
                if link.hold.update(&log, Instant::now(), id, entry, &update)
                    && let Some(ready) = link.hold.ready(&log, update.shard)
                {
                    link.publishing.add(open, ready);
                }
            }
            Err(why) => {
                link.hold.refuse(id);
                self.reject(why);
            }
        }
        Ok(())
    }

    /// A record of the log was applied.
    fn applied(&mut self, link: &mut Link, open: &Open, applied: &Applied) {
        let now = Instant::now();
        let log = self.follower.log();
        match applied.change {
            Change::Contributed(entry) | Change::Repeated(entry) => {
                if self.begun.is_none_or(|(round, _)| round < log.round()) && log.arrived().next().is_some() {
                    self.begun = Some((log.round(), now));
                }
                link.hold.review_entry(&log, entry);
            }
            Change::Late(entry) => link.hold.review_entry(&log, entry),
            Change::Closed => {
                link.hold.review(&log, None);
                for shard in link.hold.numbers() {
                    if let Some(ready) = link.hold.ready(&log, shard) {
                        link.publishing.add(open, ready);
                    }
                }
            }
            Change::Published(shard) => link.hold.review(&log, Some(shard)),
            Change::Complete(_) => link.hold.review(&log, None),
            Change::Aggregator(number) if number != link.author.rank => {
                link.hand_back_at = link.hand_back_at.or(Some(now + HAND_BACK_AFTER));
            }
            Change::Aggregator(_) | Change::Opened | Change::None => {}
        }
        drop(log);
        self.record(applied);
    }

    /// Keeps what this aggregator did, and writes it down once its round is complete.
    fn record(&mut self, applied: &Applied) {
        let Some(number) = self.number else { return };
        let own = applied.rank == number;
        if let (Body::Published { shard, result, .. }, Change::Published(_) | Change::Complete(_)) =
            (&applied.body, applied.change)
            && own
        {
            self.own.insert(*shard, result.crc);
        }
        if let Change::Complete(round) = applied.change {
            self.complete(round, number, own);
        }
    }

    /// A round is complete: what this aggregator did for it becomes a version. Who did the last of it says with whom.
    fn complete(&mut self, round: Round, number: Rank, is_last: bool) {
        self.shared.rounds.fetch_add(1, Ordering::Relaxed);
        self.shared.complete.store(round.0, Ordering::Relaxed);
        let entries = self.follower.log().complete(round).map(|complete| complete.entries.clone()).unwrap_or_default();
        let own = std::mem::take(&mut self.own);
        if !own.is_empty() {
            let mut contributors: Vec<Rank> = entries.iter().map(|entry| entry.contributor).collect();
            contributors.dedup();
            let crcs = own.into_iter().map(|(shard, crc)| (UnitIndex(shard), crc)).collect();
            let record = VersionRecord { epoch: EPOCH, step: Step(round.0), owner: number, contributors, crcs };
            self.publish(Item::Version(record));
        }
        if is_last {
            let names: Vec<String> = entries.iter().map(|entry| name(*entry, round)).collect();
            let detail = format!("aggregator {}: {} entries: {}", number.0, names.len(), names.join(", "));
            self.publish(Item::Audit(AuditRecord::now(AuditKind::RoundClosed, detail).at(EPOCH, Step(round.0))));
        }
    }

    /// When there will be something to do, whatever comes.
    fn next_due(&self, link: &Link) -> Option<Instant> {
        let log = self.follower.log();
        let told = self.rejected.as_ref().map(|(.., since)| *since + REJECTED_INTERVAL);
        let close = self.closes_at(link, &log);
        link.hand_back_at.into_iter().chain(link.hold.stalls_next(&log)).chain(close).chain(told).min()
    }

    /// When this aggregator proposes to close the current round, if a quorum is there.
    fn closes_at(&self, link: &Link, log: &Log) -> Option<Instant> {
        let is_due = |round: Round| round == log.round() && link.proposed != Some(round) && log.has_quorum();
        let (_, begun) = self.begun.filter(|(round, _)| is_due(*round))?;
        let number = link.author.rank;
        let steps = match log.closer() {
            Some(closer) if closer == number => 0,
            Some(_) => 1 + number.0 % STAGGER_STEPS,
            None => number.0 % STAGGER_STEPS,
        };
        Some(begun + self.config.round_deadline + STAGGER * steps)
    }

    async fn time_passed(&mut self, link: &mut Link) -> Result<(), Lost> {
        let now = Instant::now();
        if link.hand_back_at.is_some_and(|at| at <= now) {
            link.hand_back_at = None;
            link.hold.hand_back_all(&self.follower.log());
        }
        link.hold.hand_back_stalled(&self.follower.log(), now);
        if self.rejected.as_ref().is_some_and(|(.., since)| *since + REJECTED_INTERVAL <= now)
            && let Some((count, why, _)) = self.rejected.take()
        {
            let number = link.author.rank.0;
            self.audit(AuditKind::Rejected, format!("aggregator {number}: {count} messages rejected, the last: {why}"));
        }
        let proposal = {
            let log = self.follower.log();
            let is_due = self.closes_at(link, &log).is_some_and(|at| at <= now);
            is_due.then(|| (log.round(), log.proposal()))
        };
        if let Some((round, proposal)) = proposal {
            link.proposed = Some(round);
            link.append(&proposal).await?;
        }
        Ok(())
    }

    /// Whether nothing is left to be done and said: a round that is decided is brought to its end.
    fn may_leave(&self) -> bool {
        self.outbox.is_empty() && self.follower.log().closed().is_none()
    }

    fn tell(&mut self, number: Rank, event: &Event, open: &Open) {
        match event {
            Event::Rejected(entry, what) => {
                self.reject(format!("{} sent {what} for {}", entry.contributor, entry.origin));
            }
            Event::Late(entry) => {
                let fate = match open.late {
                    LatePolicy::Reject => "does not count",
                    LatePolicy::Carry => "is too late to be carried any further",
                };
                let detail = format!(
                    "aggregator {}: the contribution of contributor {} to {} {fate}",
                    number.0, entry.contributor.0, entry.origin
                );
                let record = AuditRecord::now(AuditKind::Late, detail).at(EPOCH, Step(entry.origin.0));
                self.publish(Item::Audit(record.about(entry.contributor)));
            }
        }
    }

    fn reject(&mut self, why: String) {
        self.shared.rejected.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(why, "a message of the updates topic was rejected");
        match &mut self.rejected {
            Some((count, last, _)) => (*count, *last) = (*count + 1, why),
            None => self.rejected = Some((1, why, Instant::now())),
        }
    }

    fn audit(&self, kind: AuditKind, detail: String) {
        let round = self.follower.log().round();
        self.publish(Item::Audit(AuditRecord::now(kind, detail).at(EPOCH, Step(round.0))));
    }

    fn publish(&self, item: Item) {
        if !self.publisher.publish(item) {
            tracing::warn!("a version or audit record was dropped: too many wait for the broker");
        }
    }
}

/// An entry in words.
fn name(entry: Entry, round: Round) -> String {
    if entry.origin == round {
        return entry.contributor.0.to_string();
    }
    format!("{} (of {})", entry.contributor.0, entry.origin)
}

fn consumer_error(error: pulsar::error::ConsumerError) -> LinkError {
    pulsar::Error::Consumer(error).into()
}

/// Sleeps until then; for ever without a time.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
