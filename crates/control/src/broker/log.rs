//! A topic's log: entries in the order in which they came, and the latest one of each key.
//!
//! Numbers only grow, and one that was given is never given again. Entries leave at the head, or anywhere when a
//! newer one of their key is there (compaction); the numbers of the others stay.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pulsar::message::proto::{CompressionType, MessageIdData, MessageMetadata, ServerError};

use super::frame::Tail;
use super::hash::sticky_hash;
use super::store::Refused;

/// What an entry costs beside its bytes and its key.
pub(super) const ENTRY_OVERHEAD_BYTES: usize = 192;
/// Most messages of one batch.
pub(super) const BATCH_MESSAGES_MAX: u32 = 64 << 10;
/// Least that a message of a batch takes before compression: the size of its metadata, and the size of its payload in
/// that.
const BATCHED_MESSAGE_BYTES_MIN: u32 = 4 + 2;

/// One log.
#[derive(Debug)]
pub(super) struct Log {
    ledger: u64,
    entries: VecDeque<Entry>,
    next: u64,
    bytes: usize,
    /// Bytes that were ever appended.
    bytes_appended: u64,
    latest: Option<Latest>,
}

/// One message, or one batch of messages.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) number: u64,
    /// Metadata and payload as they came.
    pub(super) tail: Bytes,
    /// Messages in the batch; 1 without batching.
    pub(super) messages: u32,
    /// Where a Key_Shared subscription sends it.
    pub(super) hash: u32,
    pub(super) publish_time_ms: u64,
    /// By the broker's clock; never goes back within a log.
    pub(super) arrival_ms: u64,
    batched: bool,
    chunk: bool,
    /// Nothing where compaction does not look: without key, in a batch (its keys are inside, perhaps compressed), and
    /// in chunks (each has the key, and all are needed).
    key: Option<Arc<str>>,
    /// Its key is to be forgotten.
    tombstone: bool,
    /// Bytes that were appended to the log before it.
    offset: u64,
}

/// The latest entry of each key.
#[derive(Debug, Default)]
struct Latest {
    entries: HashMap<Arc<str>, u64>,
    /// Bytes of entries that compaction would remove.
    garbage_bytes: usize,
}

impl Entry {
    /// An entry for a message that arrived now. [`Log::push`] places it.
    pub(super) fn new(tail: &Tail, arrival_ms: u64) -> Self {
        let metadata = &tail.metadata;
        let count = metadata.num_messages_in_batch;
        let chunk = metadata.num_chunks_from_msg.unwrap_or_default() > 1;
        // An empty payload may be compressed to some bytes.
        let payload_bytes = metadata.uncompressed_size.map_or(tail.payload_bytes, |size| size as usize);
        Self {
            number: 0,
            tail: tail.bytes.clone(),
            // Held down for what a data directory has from before larger ones were refused.
            messages: batch_messages(metadata).min(BATCH_MESSAGES_MAX),
            hash: sticky_hash(metadata),
            publish_time_ms: metadata.publish_time,
            arrival_ms,
            batched: count.is_some(),
            chunk,
            key: metadata.partition_key.as_deref().filter(|_| count.is_none() && !chunk).map(Arc::from),
            tombstone: payload_bytes == 0 || metadata.null_value == Some(true),
            offset: 0,
        }
    }

    /// What it counts for in limits. A batch may be acknowledged in parts, with a bit for each of its messages.
    pub(super) fn cost(&self) -> usize {
        let bits = if self.messages > 1 { (self.messages as usize).div_ceil(8) } else { 0 };
        self.tail.len() + self.key.as_ref().map_or(0, |key| key.len()) + bits + ENTRY_OVERHEAD_BYTES
    }

    /// Whether compaction leaves it out although nothing newer is there.
    fn is_void(&self) -> bool {
        self.tombstone && self.key.is_some()
    }
}

/// Checks that a batch can have as many messages as it says: consumers' permits and acknowledgements go by that.
///
/// # Errors
/// When it cannot.
pub(super) fn check_batch(tail: &Tail) -> Result<(), Refused> {
    let messages = batch_messages(&tail.metadata);
    let plain = tail.metadata.compression() == CompressionType::None;
    // Without a size, what a compressed payload holds is not known.
    let bytes = if plain {
        tail.payload_bytes
    } else {
        tail.metadata.uncompressed_size.map_or(usize::MAX, |size| size as usize)
    };
    let fit = (bytes / BATCHED_MESSAGE_BYTES_MIN as usize).min(BATCH_MESSAGES_MAX as usize);
    if messages > 1 && messages as usize > fit {
        let detail = format!(
            "a batch that says it has {messages} messages; one of its size has at most {fit}, and the limit is \
             {BATCH_MESSAGES_MAX}"
        );
        return Err(Refused(ServerError::NotAllowedError, detail));
    }
    Ok(())
}

/// Messages that a batch says it has; 1 without batching.
fn batch_messages(metadata: &MessageMetadata) -> u32 {
    metadata.num_messages_in_batch.and_then(|count| u32::try_from(count).ok()).unwrap_or(1).max(1)
}

impl Log {
    /// An empty log. `ledger` is in all its message ids, and is larger than that of any earlier log.
    pub(super) fn new(ledger: u64) -> Self {
        Self { ledger, entries: VecDeque::new(), next: 0, bytes: 0, bytes_appended: 0, latest: None }
    }

    pub(super) fn ledger(&self) -> u64 {
        self.ledger
    }

    /// The number of the oldest entry; that of the next one when there is none.
    pub(super) fn first(&self) -> u64 {
        self.entries.front().map_or(self.next, |entry| entry.number)
    }

    /// The number that the next entry will get.
    pub(super) fn end(&self) -> u64 {
        self.next
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What all its entries cost.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&self, number: u64) -> Option<&Entry> {
        self.first_from(number).filter(|entry| entry.number == number)
    }

    /// The oldest entry whose number is at least this.
    pub(super) fn first_from(&self, number: u64) -> Option<&Entry> {
        self.entries.get(self.index_from(number))
    }

    pub(super) fn iter_from(&self, number: u64) -> impl DoubleEndedIterator<Item = &Entry> {
        self.entries.range(self.index_from(number)..)
    }

    /// How many entries have numbers in this range.
    pub(super) fn count(&self, numbers: Range<u64>) -> u64 {
        self.index_from(numbers.end).saturating_sub(self.index_from(numbers.start)) as u64
    }

    pub(super) fn last(&self) -> Option<&Entry> {
        self.entries.back()
    }

    /// Appends an entry and returns its number.
    pub(super) fn push(&mut self, mut entry: Entry) -> u64 {
        let cost = entry.cost();
        entry.number = self.next;
        entry.offset = self.bytes_appended;
        entry.arrival_ms = entry.arrival_ms.max(self.last().map_or(0, |last| last.arrival_ms));
        self.next += 1;
        self.bytes += cost;
        self.bytes_appended += cost as u64;
        self.entries.push_back(entry);
        self.note_latest(self.entries.len() - 1);
        self.next - 1
    }

    /// Puts an entry at a number that is not below [`Log::end`]: as it was before a restart.
    pub(super) fn place(&mut self, number: u64, entry: Entry) {
        self.skip_to(number);
        self.push(entry);
    }

    /// Gives out no number below this one.
    pub(super) fn skip_to(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    /// Removes the oldest entry.
    pub(super) fn drop_first(&mut self) {
        let Some(entry) = self.entries.pop_front() else { return };
        self.bytes -= entry.cost();
        let Some(latest) = &mut self.latest else { return };
        let Some(key) = &entry.key else { return };
        if latest.entries.get(key) == Some(&entry.number) {
            latest.entries.remove(key);
            if !entry.is_void() {
                return;
            }
        }
        latest.garbage_bytes = latest.garbage_bytes.saturating_sub(entry.cost());
    }

    /// Keeps track of the latest entry of each key from now on.
    pub(super) fn index_keys(&mut self) {
        if self.latest.is_none() {
            self.latest = Some(Latest::default());
            (0..self.entries.len()).for_each(|index| self.note_latest(index));
        }
    }

    /// Bytes that [`Log::compact`] would free if it might look everywhere.
    pub(super) fn garbage_bytes(&self) -> usize {
        self.latest.as_ref().map_or(0, |latest| latest.garbage_bytes)
    }

    /// Whether a newer entry of its key makes this one void.
    pub(super) fn is_superseded(&self, entry: &Entry) -> bool {
        let latest = self.latest.as_ref().zip(entry.key.as_ref());
        latest.is_some_and(|(latest, key)| latest.entries.get(key).is_some_and(|number| *number > entry.number))
    }

    /// Whether a compacted view leaves this entry out.
    pub(super) fn is_compacted_out(&self, entry: &Entry) -> bool {
        let keyless = entry.key.is_none() && !entry.batched && !entry.chunk;
        keyless || entry.is_void() || self.is_superseded(entry)
    }

    /// Removes entries below `end` that a newer one of their key, or their own emptiness, makes void. Returns their
    /// numbers.
    pub(super) fn compact(&mut self, end: u64) -> Vec<Range<u64>> {
        let Some(latest) = &mut self.latest else { return Vec::new() };
        let mut removed: Vec<Range<u64>> = Vec::new();
        let (mut bytes, mut offset) = (self.bytes, self.entries.front().map_or(0, |entry| entry.offset));
        self.entries.retain_mut(|entry| {
            let newest = entry.key.as_ref().is_none_or(|key| latest.entries.get(key) == Some(&entry.number));
            if entry.number >= end || newest && !entry.is_void() {
                entry.offset = offset;
                offset += entry.cost() as u64;
                return true;
            }
            if let Some(key) = entry.key.as_ref().filter(|_| newest) {
                latest.entries.remove(key);
            }
            bytes -= entry.cost();
            latest.garbage_bytes = latest.garbage_bytes.saturating_sub(entry.cost());
            match removed.last_mut() {
                Some(last) if last.end == entry.number => last.end += 1,
                _ => removed.push(entry.number..entry.number + 1),
            }
            false
        });
        self.bytes = bytes;
        self.bytes_appended = offset;
        removed
    }

    /// Bytes of the entries below this one.
    pub(super) fn bytes_below(&self, number: u64) -> u64 {
        let first = self.entries.front().map_or(self.bytes_appended, |entry| entry.offset);
        self.first_from(number).map_or(self.bytes_appended, |entry| entry.offset).saturating_sub(first)
    }

    /// The first entry that was published at this time or later, by the clocks of its producers.
    pub(super) fn position_at_publish_time(&self, publish_time_ms: u64) -> u64 {
        let found = self.entries.iter().find(|entry| entry.publish_time_ms >= publish_time_ms);
        found.map_or(self.next, |entry| entry.number)
    }

    /// The first entry that arrived at this time or later.
    pub(super) fn position_at_arrival(&self, arrival_ms: u64) -> u64 {
        let index = self.entries.partition_point(|entry| entry.arrival_ms < arrival_ms);
        self.entries.get(index).map_or(self.next, |entry| entry.number)
    }

    /// The id of an entry, as in receipts and messages.
    pub(super) fn message_id(&self, number: u64) -> MessageIdData {
        MessageIdData { ledger_id: self.ledger, entry_id: number, partition: Some(-1), ..Default::default() }
    }

    /// The id of the last message in an entry; that of "nothing" without one.
    pub(super) fn last_message_id(&self, entry: Option<&Entry>) -> MessageIdData {
        let Some(entry) = entry else {
            return MessageIdData { ledger_id: u64::MAX, ..self.message_id(u64::MAX) };
        };
        let mut id = self.message_id(entry.number);
        if entry.batched {
            id.batch_index = Some(entry.messages.saturating_sub(1) as i32);
            id.batch_size = Some(entry.messages as i32);
        }
        id
    }

    /// The entry that an id names, moved into what the log holds. Ids of earlier ledgers come before everything; those
    /// of "earliest" are the largest numbers, or -1, those of "latest" the largest signed ones.
    pub(super) fn position_of(&self, id: &MessageIdData) -> u64 {
        if id.ledger_id == u64::MAX || id.ledger_id < self.ledger {
            self.first()
        } else if id.ledger_id > self.ledger {
            self.next
        } else {
            id.entry_id.clamp(self.first(), self.next)
        }
    }

    fn index_from(&self, number: u64) -> usize {
        let Some(first) = self.entries.front() else { return 0 };
        let Some(guess) = number.checked_sub(first.number).and_then(|guess| usize::try_from(guess).ok()) else {
            return 0;
        };
        // Without gaps the guess is right.
        if self.entries.get(guess).is_some_and(|entry| entry.number == number) || number >= self.next {
            return guess.min(self.entries.len());
        }
        self.entries.partition_point(|entry| entry.number < number)
    }

    fn note_latest(&mut self, index: usize) {
        let (Some(latest), Some(entry)) = (&mut self.latest, self.entries.get(index)) else { return };
        let Some(key) = &entry.key else { return };
        let number = entry.number;
        if entry.is_void() {
            latest.garbage_bytes += entry.cost();
        }
        let Some(before) = latest.entries.insert(key.clone(), number) else { return };
        if let Some(before) = self.get(before).filter(|before| !before.is_void()).map(Entry::cost)
            && let Some(latest) = &mut self.latest
        {
            latest.garbage_bytes += before;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use pulsar::message::Metadata;

    use super::*;

    /// A message of 100 bytes with this key.
    pub(in crate::broker) fn tail(key: &str, publish_time: u64) -> Tail {
        let partition_key = Some(key.to_owned()).filter(|key| !key.is_empty());
        let metadata = Metadata { publish_time, partition_key, ..Default::default() };
        Tail { bytes: Bytes::from(vec![0; 100]), metadata, payload_bytes: 90 }
    }

    fn log(keys: &[&str]) -> Log {
        let mut log = Log::new(1);
        log.index_keys();
        for (time, key) in keys.iter().enumerate() {
            log.push(Entry::new(&tail(key, time as u64), time as u64));
        }
        log
    }

    fn numbers(log: &Log) -> Vec<u64> {
        log.iter_from(0).map(|entry| entry.number).collect()
    }

    #[test]
    fn compaction_keeps_the_latest_of_each_key_and_what_it_cannot_judge() {
        let mut log = log(&["a", "b", "a", "", "b", "c"]);
        let mut batch = tail("a", 9);
        batch.metadata.num_messages_in_batch = Some(3);
        log.push(Entry::new(&batch, 9));
        let cost = log.get(0).unwrap().cost();
        assert_eq!(log.garbage_bytes(), 2 * cost);
        let mut removed = log.compact(1);
        assert_eq!((numbers(&log), removed.len()), (vec![1, 2, 3, 4, 5, 6], 1));
        removed = log.compact(7);
        assert_eq!((numbers(&log), removed.pop(), removed.len()), (vec![2, 3, 4, 5, 6], Some(1..2), 0));
        assert_eq!(log.garbage_bytes(), 0);
        assert_eq!(log.bytes_below(log.end()), log.bytes() as u64);
        assert_eq!((log.first_from(0).unwrap().number, log.get(1).is_none(), log.end()), (2, true, 7));
    }

    #[test]
    fn a_batch_has_no_more_messages_than_fit_into_it() {
        let mut batch = tail("", 0);
        let mut allowed = |messages, payload_bytes, compression: CompressionType, uncompressed_size| {
            batch.payload_bytes = payload_bytes;
            batch.metadata.num_messages_in_batch = Some(messages);
            batch.metadata.compression = Some(compression as i32);
            batch.metadata.uncompressed_size = uncompressed_size;
            check_batch(&batch).map_err(|Refused(error, _)| error)
        };
        let refused = Err(ServerError::NotAllowedError);
        let max = BATCH_MESSAGES_MAX as i32;
        assert_eq!(allowed(2_147_483_584, 60, CompressionType::None, None), refused);
        assert_eq!(allowed(2_147_483_584, 60, CompressionType::Zstd, Some(u32::MAX)), refused);
        assert_eq!(allowed(2_147_483_584, 60, CompressionType::Zstd, None), refused);
        assert_eq!(allowed(11, 60, CompressionType::None, Some(66)), refused);
        assert_eq!(allowed(10, 60, CompressionType::None, None), Ok(()));
        assert_eq!(allowed(1, 0, CompressionType::None, None), Ok(()), "nothing is inside of a batch of one");
        assert_eq!(allowed(1000, 60, CompressionType::Zstd, Some(6000)), Ok(()));
        assert_eq!(allowed(max, 60, CompressionType::Lz4, Some(1 << 20)), Ok(()));
        assert_eq!(allowed(max + 1, 60, CompressionType::Lz4, Some(1 << 20)), refused);
    }

    #[test]
    fn a_batch_counts_for_what_its_acknowledgement_may_take() {
        let mut batch = tail("", 0);
        let alone = Entry::new(&batch, 0).cost();
        batch.metadata.num_messages_in_batch = Some(800);
        assert_eq!(Entry::new(&batch, 0).cost(), alone + 100);
        batch.metadata.num_messages_in_batch = Some(i32::MAX);
        assert_eq!(Entry::new(&batch, 0).messages, BATCH_MESSAGES_MAX, "one of a directory");
    }

    #[test]
    fn a_tombstone_removes_its_key_and_then_itself() {
        let mut log = log(&["a", "b"]);
        let mut empty = tail("a", 2);
        empty.payload_bytes = 0;
        log.push(Entry::new(&empty, 2));
        assert!(log.is_compacted_out(log.get(0).unwrap()) && log.is_compacted_out(log.get(2).unwrap()));
        assert_eq!(log.garbage_bytes(), 2 * log.get(0).unwrap().cost());
        log.compact(log.end());
        assert_eq!((numbers(&log), log.garbage_bytes()), (vec![1], 0));
        // The key may come again.
        log.push(Entry::new(&tail("a", 3), 3));
        assert!(!log.is_compacted_out(log.get(3).unwrap()));
    }

    #[test]
    fn times_and_ids_are_found() {
        let log = log(&["", "", ""]);
        assert_eq!((log.position_at_publish_time(1), log.position_at_publish_time(9)), (1, 3));
        assert_eq!((log.position_at_arrival(2), log.position_at_arrival(9)), (2, 3));
        let id = |ledger_id, entry_id| MessageIdData { ledger_id, entry_id, ..Default::default() };
        let latest = i64::MAX as u64;
        for (id, position) in [
            (id(u64::MAX, u64::MAX), 0),
            (id(latest, latest), 3),
            (id(0, 2), 0),
            (id(2, 0), 3),
            (id(1, 1), 1),
            (id(1, 9), 3),
        ] {
            assert_eq!(log.position_of(&id), position, "{id:?}");
        }
    }

    proptest! {
        #[test]
        fn counters_agree_with_what_is_there(
            operations in proptest::collection::vec((0_usize..4, 0_u8..10), 1..60),
        ) {
            let mut log = Log::new(1);
            log.index_keys();
            for (step, (key, what)) in operations.into_iter().enumerate() {
                match what {
                    0 => log.drop_first(),
                    1 => drop(log.compact((step / 2) as u64)),
                    2 => {
                        let mut empty = tail(["", "a", "b", "c"][key], 0);
                        empty.payload_bytes = 0;
                        log.push(Entry::new(&empty, 0));
                    }
                    _ => drop(log.push(Entry::new(&tail(["", "a", "b", "c"][key], 0), 0))),
                }
                let (mut bytes, mut garbage) = (0, 0);
                for entry in log.iter_from(0) {
                    prop_assert_eq!(log.get(entry.number).map(|entry| entry.number), Some(entry.number));
                    prop_assert_eq!(log.bytes_below(entry.number), bytes as u64);
                    bytes += entry.cost();
                    if entry.key.is_some() && log.is_compacted_out(entry) {
                        garbage += entry.cost();
                    }
                }
                prop_assert_eq!((log.bytes(), log.garbage_bytes()), (bytes, garbage));
            }
        }
    }
}
