//! What waits to be published behind the steps: version records and audit records, in order, in bounded memory.
//!
//! The data path only ever takes a short lock. Commits that follow each other within the commit interval are one
//! record: of the last of them, with the latest checksum of every unit. While the broker is away records wait, and
//! are sent in order when it is back; what does not fit is refused, so that the caller knows.
//!
//! Whatever was sent and has no receipt is sent again over the next link, in the same order, with the same ids.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gradwire_proto::Rank;
use gradwire_proto::membership::RecordId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::job::Topic;
use crate::record::{
    AUDIT_KIND, AuditKind, AuditRecord, Header, Instance, RECORD_VERSION, RecordKey, VersionPart, VersionRecord,
};

/// Most records that wait to be sent.
const QUEUED_MAX: usize = 4096;
/// Most bytes of records that wait to be sent.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Most parts that wait for a receipt.
const SENT_MAX: usize = 64;
/// No further record is prepared while parts of this size wait for a receipt.
const SENT_BYTES_FULL: usize = 8 << 20;

/// Something to publish.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Version(VersionRecord),
    Audit(AuditRecord),
}

impl Item {
    fn bytes(&self) -> usize {
        match self {
            Self::Version(record) => record.bytes(),
            Self::Audit(record) => size_of::<Self>() + record.detail.len(),
        }
    }

    fn is_valid(&self) -> bool {
        match self {
            Self::Version(record) => record.is_valid(),
            Self::Audit(_) => true,
        }
    }
}

#[derive(Debug)]
struct Waiting {
    item: Item,
    since: Instant,
    /// How many items were accepted up to and with this one.
    number: u64,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    bytes: usize,
    accepted: u64,
    /// All items up to this number have their receipts.
    settled: u64,
    refused: u64,
    /// Somebody waits: what would still be merged is sent at once.
    urgent: bool,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    interval: Duration,
    /// Wakes the thread that sends.
    filled: Notify,
    settled: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end that the data path sees.
#[derive(Clone, Debug)]
pub(crate) struct Publisher(Arc<Shared>);

/// The end that sends.
#[derive(Debug)]
pub(crate) struct Outbox {
    shared: Arc<Shared>,
    /// Parts in the order in which they are sent. The first `sent` of them wait for a receipt.
    parts: VecDeque<Part>,
    sent: usize,
    bytes: usize,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) topic: Topic,
    pub(crate) key: Option<String>,
    pub(crate) payload: Vec<u8>,
    /// Items up to this number are settled by its receipt.
    settles: Option<u64>,
}

/// Both ends. Commits within `interval` become one record.
pub(crate) fn outbox(interval: Duration) -> (Publisher, Outbox) {
    let shared = Arc::new(Shared { queue: Mutex::default(), interval, filled: Notify::new(), settled: Condvar::new() });
    let outbox = Outbox { shared: shared.clone(), parts: VecDeque::new(), sent: 0, bytes: 0 };
    (Publisher(shared), outbox)
}

impl Publisher {
    /// Queues an item. False if it was refused: the queue is full, or the item breaks the format's bounds.
    pub(crate) fn publish(&self, item: Item) -> bool {
        let bytes = item.bytes();
        let mut queue = self.0.queue();
        let item = match queue.merge(item, self.0.interval) {
            Ok(()) => return true,
            Err(item) => item,
        };
        let full = queue.waiting.len() >= QUEUED_MAX || queue.bytes + bytes > QUEUED_BYTES_MAX;
        if full || !item.is_valid() {
            queue.refused += 1;
            return false;
        }
        queue.bytes += bytes;
        queue.accepted += 1;
        let number = queue.accepted;
        queue.waiting.push_back(Waiting { item, since: Instant::now(), number });
        let first = queue.waiting.len() == 1;
        drop(queue);
        if first {
            self.0.filled.notify_one();
        }
        true
    }

    /// How many items have their receipts.
    pub(crate) fn settled(&self) -> u64 {
        self.0.queue().settled
    }

    /// How many items were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.0.queue().refused
    }

    /// Waits until every item accepted so far has its receipt. Otherwise tells how many have none.
    pub(crate) fn wait(&self, time_max: Duration) -> Result<(), u64> {
        let mut queue = self.0.queue();
        queue.urgent = true;
        self.0.filled.notify_one();
        let accepted = queue.accepted;
        let waited = self.0.settled.wait_timeout_while(queue, time_max, |queue| queue.settled < accepted);
        let (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if queue.settled < accepted { Err(accepted - queue.settled) } else { Ok(()) }
    }
}

impl Queue {
    /// Adds a commit to the one that waits last, where both are of one interval. Gives the item back otherwise.
    fn merge(&mut self, item: Item, interval: Duration) -> Result<(), Item> {
        let (Item::Version(newer), Some(last)) = (&item, self.waiting.back_mut()) else { return Err(item) };
        let Item::Version(older) = &mut last.item else { return Err(item) };
        let one_interval = last.since.elapsed() < interval;
        if !one_interval || !newer.follows(older) {
            return Err(item);
        }
        let before = older.bytes();
        older.absorb(newer);
        self.bytes = self.bytes + older.bytes() - before;
        Ok(())
    }
}

impl Outbox {
    /// The next item, once it is complete and there is room to send it. The number names it.
    pub(crate) async fn take(&mut self) -> (Item, u64) {
        if self.parts.len() >= SENT_MAX || self.bytes >= SENT_BYTES_FULL {
            return std::future::pending().await;
        }
        loop {
            let ripe_at = {
                let mut queue = self.shared.queue();
                let queue = &mut *queue;
                match queue.waiting.front() {
                    None => {
                        queue.urgent = false;
                        None
                    }
                    Some(first) => {
                        let last = queue.waiting.len() == 1;
                        let open = last && !queue.urgent && matches!(first.item, Item::Version(_));
                        let ripe_at = first.since + self.shared.interval;
                        if (!open || ripe_at <= Instant::now())
                            && let Some(Waiting { item, number, .. }) = queue.waiting.pop_front()
                        {
                            queue.bytes -= item.bytes();
                            return (item, number);
                        }
                        Some(ripe_at)
                    }
                }
            };
            match ripe_at {
                Some(ripe_at) => tokio::select! {
                    () = sleep_until(ripe_at) => {}
                    () = self.shared.filled.notified() => {}
                },
                None => self.shared.filled.notified().await,
            }
        }
    }

    /// Prepares a taken item. The id of its record is made by `new_id`.
    pub(crate) fn prepare(
        &mut self,
        (item, number): &(Item, u64),
        key: &RecordKey,
        (instance, rank): (Instance, Rank),
        mut new_id: impl FnMut() -> RecordId,
    ) {
        let mut header = |kind| Header { version: RECORD_VERSION, kind, instance, id: new_id(), rank };
        let audit = match item {
            Item::Version(record) => {
                let header = header(VersionPart::KIND);
                for part in record.parts() {
                    self.add(Topic::Versions, Some(part.key()), key.seal(header, &part.encode()));
                }
                &AuditRecord::now(AuditKind::Committed, record.summary()).at(record.epoch, record.step)
            }
            Item::Audit(record) => record,
        };
        self.add(Topic::Audit, None, key.seal(header(AUDIT_KIND), &audit.encode()));
        if let Some(part) = self.parts.back_mut() {
            part.settles = Some(*number);
        }
    }

    fn add(&mut self, topic: Topic, key: Option<String>, payload: Vec<u8>) {
        self.bytes += payload.len();
        self.parts.push_back(Part { topic, key, payload, settles: None });
    }

    /// The next part to send.
    pub(crate) fn next_to_send(&mut self) -> Option<Part> {
        let part = self.parts.get(self.sent)?;
        self.sent += 1;
        Some(part.clone())
    }

    /// The oldest part that was sent has its receipt.
    pub(crate) fn settle(&mut self) {
        let Some(part) = self.parts.pop_front() else { return };
        self.sent = self.sent.saturating_sub(1);
        self.bytes -= part.payload.len();
        if let Some(number) = part.settles {
            self.shared.queue().settled = number;
            self.shared.settled.notify_all();
        }
    }

    /// What was sent without a receipt is sent again.
    pub(crate) fn link_lost(&mut self) {
        self.sent = 0;
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.shared.queue().waiting.is_empty()
    }

    /// From now on nothing waits to be merged.
    pub(crate) fn hurry(&self) {
        self.shared.queue().urgent = true;
        self.shared.filled.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Epoch, Secret, Step, UnitIndex};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn record(step: u64, crcs: impl IntoIterator<Item = (u32, u32)>) -> VersionRecord {
        let crcs = crcs.into_iter().map(|(unit, crc)| (UnitIndex(unit), crc)).collect();
        VersionRecord { epoch: Epoch(1), step: Step(step), owner: Rank(0), contributors: vec![Rank(0)], crcs }
    }

    fn large(step: u64) -> VersionRecord {
        record(step, (0..250_000).map(|unit| (unit, step as u32)))
    }

    fn take(outbox: &mut Outbox) -> Option<(Item, u64)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(Duration::from_millis(20), outbox.take()).await.ok() })
    }

    fn prepare_all(outbox: &mut Outbox) {
        let key = RecordKey::new(Secret::from_bytes([1; 32]), "job");
        let mut ids = 0_u128;
        while let Some(item) = take(outbox) {
            outbox.prepare(&item, &key, ([0; 16], Rank(0)), || {
                ids += 1;
                ids.to_le_bytes()
            });
        }
    }

    #[test]
    fn commits_of_one_interval_are_one_record() {
        let (publisher, mut outbox) = outbox(HOUR);
        assert!(publisher.publish(Item::Version(record(1, [(0, 10), (1, 11)]))));
        assert!(publisher.publish(Item::Version(record(2, [(1, 21), (2, 22)]))));
        assert!(take(&mut outbox).is_none(), "more may come");
        outbox.hurry();
        let (Item::Version(merged), 1) = take(&mut outbox).unwrap() else { panic!("one record") };
        assert_eq!(merged, record(2, [(0, 10), (1, 21), (2, 22)]));
        // Another contributor set is another record.
        let mut other = record(4, [(0, 1)]);
        other.contributors = vec![];
        publisher.publish(Item::Version(record(3, [(0, 1)])));
        publisher.publish(Item::Version(other));
        assert!(take(&mut outbox).is_some());
    }

    #[test]
    fn without_an_interval_every_commit_is_a_record_in_order() {
        let (publisher, mut outbox) = outbox(Duration::ZERO);
        for step in 0..5 {
            publisher.publish(Item::Version(record(step, [(0, 1)])));
        }
        for step in 0..5 {
            let (Item::Version(taken), number) = take(&mut outbox).unwrap() else { panic!("a version") };
            assert_eq!((taken.step, number), (Step(step), step + 1));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_counted() {
        let (publisher, _outbox) = outbox(Duration::ZERO);
        let accepted = (0..QUEUED_MAX as u64 + 2).filter(|step| publisher.publish(Item::Version(record(*step, []))));
        assert_eq!((accepted.count(), publisher.refused()), (QUEUED_MAX, 2));
        let (publisher, _outbox) = super::outbox(Duration::ZERO);
        let accepted = (0..100).filter(|step| publisher.publish(Item::Version(large(*step)))).count();
        assert_eq!(accepted, QUEUED_BYTES_MAX / large(0).bytes());
        let mut impossible = record(0, []);
        impossible.contributors = vec![Rank(5000)];
        assert!(!super::outbox(HOUR).0.publish(Item::Version(impossible)));
    }

    #[test]
    fn what_has_no_receipt_is_sent_again_in_order() {
        let (publisher, mut outbox) = outbox(Duration::ZERO);
        publisher.publish(Item::Version(large(1)));
        publisher.publish(Item::Version(record(2, [(0, 1)])));
        prepare_all(&mut outbox);
        let sent: Vec<_> = std::iter::from_fn(|| outbox.next_to_send()).collect();
        let keys: Vec<_> = sent.iter().map(|part| part.key.as_deref()).collect();
        assert_eq!(keys, [Some("0"), Some("0.1"), Some("0.2"), None, Some("0"), None]);
        outbox.settle();
        outbox.link_lost();
        let again: Vec<_> = std::iter::from_fn(|| outbox.next_to_send()).collect();
        assert_eq!(again, sent[1..]);
        (0..3).for_each(|_| outbox.settle());
        assert_eq!(publisher.wait(Duration::ZERO), Err(1));
        (0..2).for_each(|_| outbox.settle());
        assert_eq!(publisher.wait(Duration::ZERO), Ok(()));
        assert!(outbox.is_empty());
    }

    #[test]
    fn nothing_is_taken_while_much_waits_for_receipts() {
        let (publisher, mut outbox) = outbox(Duration::ZERO);
        for step in 0..40 {
            publisher.publish(Item::Version(record(step, [])));
        }
        prepare_all(&mut outbox);
        assert_eq!(outbox.parts.len(), SENT_MAX);
    }
}
