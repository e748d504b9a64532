//! Version records on their way to the broker: a bounded queue, and what is sent but has no receipt yet.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use gradwire_proto::Rank;
use tokio::sync::mpsc;

use crate::record::{Header, Instance, RECORD_VERSION, RecordId, RecordKey, VersionPart, VersionRecord};

/// Most version records that wait to be sent.
const QUEUED_MAX: usize = 4096;
/// Most bytes of version records that wait to be sent.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Most parts that wait for a receipt.
const SENT_MAX: usize = 64;
/// No further record is prepared while parts of this size wait for a receipt.
const SENT_BYTES_FULL: usize = 8 << 20;

/// The end of the queue that the data path sees.
#[derive(Debug)]
pub(crate) struct Publisher {
    queue: mpsc::Sender<VersionRecord>,
    accepted: AtomicU64,
    dropped: AtomicU64,
    queued_bytes: Arc<AtomicUsize>,
    settled: Arc<Settled>,
}

/// The end of the queue that sends.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: mpsc::Receiver<VersionRecord>,
    queued_bytes: Arc<AtomicUsize>,
    settled: Arc<Settled>,
    /// Parts in the order in which they are sent. The first `sent` of them wait for a receipt.
    parts: VecDeque<Part>,
    sent: usize,
    bytes: usize,
}

/// How many records have their receipt. Only the sending thread and who waits for it meet here.
#[derive(Debug, Default)]
struct Settled(Mutex<u64>, Condvar);

#[derive(Debug)]
struct Part {
    key: String,
    payload: Vec<u8>,
    /// Whether its receipt settles the record.
    last: bool,
}

pub(crate) fn queue() -> (Publisher, Outbox) {
    let (sender, receiver) = mpsc::channel(QUEUED_MAX);
    let settled = Arc::new(Settled::default());
    let queued_bytes = Arc::new(AtomicUsize::new(0));
    let publisher = Publisher {
        queue: sender,
        accepted: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
        queued_bytes: queued_bytes.clone(),
        settled: settled.clone(),
    };
    let outbox = Outbox { queue: receiver, queued_bytes, settled, parts: VecDeque::new(), sent: 0, bytes: 0 };
    (publisher, outbox)
}

impl Publisher {
    /// Queues a record. False if it was dropped: the queue is full, or the record breaks the format's bounds.
    pub(crate) fn publish(&self, record: VersionRecord) -> bool {
        let bytes = record.bytes();
        let (epoch, step) = (record.epoch, record.step);
        let full = self.queued_bytes.load(Ordering::Relaxed) + bytes > QUEUED_BYTES_MAX;
        if full || !record.is_valid() || !self.enqueue(record, bytes) {
            let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(%epoch, %step, dropped, "a version record was dropped: its queue is full");
            return false;
        }
        self.accepted.fetch_add(1, Ordering::Release);
        true
    }

    /// How many records were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until every record accepted so far has its receipt. Otherwise tells how many have none.
    pub(crate) fn wait(&self, time_max: Duration) -> Result<(), u64> {
        let accepted = self.accepted.load(Ordering::Acquire);
        let settled = self.settled.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.settled.1.wait_timeout_while(settled, time_max, |settled| *settled < accepted);
        let (settled, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *settled < accepted { Err(accepted - *settled) } else { Ok(()) }
    }

    fn enqueue(&self, record: VersionRecord, bytes: usize) -> bool {
        // Counted before it is visible, so that the other end never takes off more than was added.
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let queued = self.queue.try_send(record).is_ok();
        if !queued {
            self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        queued
    }
}

impl Outbox {
    /// The next record, once there is room to send it.
    pub(crate) async fn take(&mut self) -> Option<VersionRecord> {
        if self.parts.len() >= SENT_MAX || self.bytes >= SENT_BYTES_FULL {
            return std::future::pending().await;
        }
        let record = self.queue.recv().await?;
        self.queued_bytes.fetch_sub(record.bytes(), Ordering::Relaxed);
        Some(record)
    }

    /// Prepares a taken record.
    pub(crate) fn prepare(
        &mut self,
        record: &VersionRecord,
        key: &RecordKey,
        instance: Instance,
        rank: Rank,
        id: RecordId,
    ) {
        let header = Header { version: RECORD_VERSION, kind: VersionPart::KIND, instance, id, rank };
        for part in record.parts() {
            let payload = key.seal(header, &part.encode());
            self.bytes += payload.len();
            self.parts.push_back(Part { key: part.key(), payload, last: false });
        }
        if let Some(part) = self.parts.back_mut() {
            part.last = true;
        }
    }

    /// The next part to send: its key and bytes.
    pub(crate) fn next_to_send(&mut self) -> Option<(String, Vec<u8>)> {
        let part = self.parts.get(self.sent)?;
        self.sent += 1;
        Some((part.key.clone(), part.payload.clone()))
    }

    /// The oldest part that was sent has its receipt.
    pub(crate) fn settle(&mut self) {
        let Some(part) = self.parts.pop_front() else { return };
        self.sent = self.sent.saturating_sub(1);
        self.bytes -= part.payload.len();
        if part.last {
            *self.settled.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            self.settled.1.notify_all();
        }
    }

    /// The link was lost: what has no receipt is sent again, in order. Readers know repeated parts by their ids.
    pub(crate) fn link_lost(&mut self) {
        self.sent = 0;
    }

    /// Whether everything accepted so far has its receipt.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Epoch, Secret, Step, UnitIndex};

    use super::*;

    fn record(crcs: u32) -> VersionRecord {
        VersionRecord {
            epoch: Epoch(1),
            step: Step(1),
            owner: Rank(0),
            contributors: vec![Rank(0)],
            crcs: (0..crcs).map(|unit| (UnitIndex(unit), unit)).collect(),
        }
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (publisher, _outbox) = queue();
        for _ in 0..QUEUED_MAX {
            assert!(publisher.publish(record(1)));
        }
        assert!(!publisher.publish(record(1)));
        assert_eq!(publisher.dropped(), 1);
        assert_eq!(publisher.wait(Duration::ZERO), Err(QUEUED_MAX as u64));
    }

    #[test]
    fn the_queue_is_bounded_in_bytes() {
        let (publisher, _outbox) = queue();
        let large = record(1 << 20);
        let fit = QUEUED_BYTES_MAX / large.bytes();
        let accepted = (0..fit + 2).filter(|_| publisher.publish(large.clone())).count();
        assert_eq!(accepted, fit);
    }

    #[test]
    fn what_has_no_receipt_is_sent_again_in_order() {
        let (publisher, mut outbox) = queue();
        let key = RecordKey::new(Secret::from_bytes([1; 32]), "job");
        outbox.prepare(&record(250_000), &key, [0; 16], Rank(0), [1; 16]);
        outbox.prepare(&record(1), &key, [0; 16], Rank(0), [2; 16]);
        let sent: Vec<_> = std::iter::from_fn(|| outbox.next_to_send()).collect();
        assert_eq!(sent.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["0", "0.1", "0.2", "0"]);
        outbox.settle();
        outbox.link_lost();
        let again: Vec<_> = std::iter::from_fn(|| outbox.next_to_send()).collect();
        assert_eq!(again, sent[1..]);
        let settled = || *publisher.settled.0.lock().unwrap();
        outbox.settle();
        outbox.settle();
        assert_eq!(settled(), 1);
        outbox.settle();
        assert_eq!(settled(), 2);
        assert!(outbox.is_empty());
    }
}
