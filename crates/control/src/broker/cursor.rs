//! What a subscription has acknowledged.
//!
//! Positions are entry numbers of the topic's log. Everything below `mark` is acknowledged; `acked` holds what is
//! acknowledged above it; `partial` holds the batches of which only some messages are. Invariants: `mark` is not in
//! `acked`, everything in `acked` is above it, and no entry is in both `acked` and `partial`.

use std::collections::BTreeMap;
use std::ops::Range;

use gradwire_proto::wire::{Malformed, Reader};

use super::ranges::RangeSet;

/// Messages in one word of an ack set.
const WORD_BITS: usize = 64;

/// A subscription's acknowledgements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    mark: u64,
    acked: RangeSet,
    /// One bit for each message of a batch that is still wanted.
    partial: BTreeMap<u64, Vec<i64>>,
}

impl Cursor {
    /// A cursor whose first entry is `position`.
    pub(super) fn new(position: u64) -> Self {
        Self { mark: position, acked: RangeSet::default(), partial: BTreeMap::new() }
    }

    /// The first entry that is not acknowledged.
    pub(super) fn mark(&self) -> u64 {
        self.mark
    }

    pub(super) fn is_acked(&self, entry: u64) -> bool {
        entry < self.mark || self.acked.contains(entry)
    }

    /// The first entry from `entry` on that is not acknowledged.
    pub(super) fn next_from(&self, entry: u64) -> u64 {
        let entry = entry.max(self.mark);
        self.acked.end_of(entry).unwrap_or(entry)
    }

    /// How many entries of `mark..end` are not acknowledged, if the log has no gaps there.
    pub(super) fn unacked_below(&self, end: u64) -> u64 {
        end.saturating_sub(self.mark).saturating_sub(self.acked.count_below(end))
    }

    /// The messages of a batch that are still wanted; nothing when all of them are.
    pub(super) fn wanted(&self, entry: u64) -> Option<&Vec<i64>> {
        self.partial.get(&entry)
    }

    /// Entries are acknowledged.
    pub(super) fn ack(&mut self, entries: Range<u64>) {
        if entries.end <= self.mark {
            return;
        }
        self.acked.insert(entries.start.max(self.mark)..entries.end);
        let inside: Vec<u64> = self.partial.range(entries).map(|(entry, _)| *entry).collect();
        for entry in inside {
            self.partial.remove(&entry);
        }
        if let Some(end) = self.acked.end_of(self.mark) {
            self.ack_until(end);
        }
    }

    /// Some messages of a batch of `messages` are acknowledged: those whose bit in `wanted` is not set. Returns whether
    /// all of them are by now.
    pub(super) fn ack_partly(&mut self, entry: u64, messages: u32, wanted: &[i64]) -> bool {
        if self.is_acked(entry) {
            return true;
        }
        let left = self.partial.entry(entry).or_insert_with(|| all_messages(messages as usize));
        for (index, word) in left.iter_mut().enumerate() {
            *word &= wanted.get(index).copied().unwrap_or_default();
        }
        let all = left.iter().all(|word| *word == 0);
        if all {
            self.ack(entry..entry + 1);
        }
        all
    }

    /// All entries below this one are acknowledged.
    pub(super) fn ack_until(&mut self, entry: u64) {
        if entry <= self.mark {
            return;
        }
        self.mark = self.acked.end_of(entry).unwrap_or(entry);
        self.acked.remove_below(self.mark);
        self.partial = self.partial.split_off(&self.mark);
    }

    /// Starts over at this entry, forgetting all acknowledgements.
    pub(super) fn seek(&mut self, entry: u64) {
        self.mark = entry;
        self.acked.clear();
        self.partial.clear();
    }

    /// For a data directory.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = self.mark.to_le_bytes().to_vec();
        let acked: Vec<Range<u64>> = self.acked.iter().collect();
        out.extend_from_slice(&(acked.len() as u32).to_le_bytes());
        for range in acked {
            out.extend_from_slice(&range.start.to_le_bytes());
            out.extend_from_slice(&range.end.to_le_bytes());
        }
        out.extend_from_slice(&(self.partial.len() as u32).to_le_bytes());
        for (entry, wanted) in &self.partial {
            out.extend_from_slice(&entry.to_le_bytes());
            out.extend_from_slice(&(wanted.len() as u32).to_le_bytes());
            wanted.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        }
        out
    }

    /// Reads what [`Cursor::encode`] wrote.
    ///
    /// # Errors
    /// When it is something else.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let mut cursor = Self::new(reader.u64()?);
        for _ in 0..reader.u32()? {
            let range = reader.u64()?..reader.u64()?;
            if range.start <= cursor.mark || range.is_empty() {
                return Err(Malformed("acknowledged entries are not above the mark"));
            }
            cursor.acked.insert(range);
        }
        for _ in 0..reader.u32()? {
            let (entry, words) = (reader.u64()?, reader.u32()? as usize);
            let mut bytes = Reader::new(reader.bytes(words.saturating_mul(8))?);
            if cursor.is_acked(entry) {
                return Err(Malformed("a batch is acknowledged in whole and in part"));
            }
            let wanted: Result<Vec<i64>, Malformed> = (0..words).map(|_| Ok(bytes.u64()?.cast_signed())).collect();
            cursor.partial.insert(entry, wanted?);
        }
        reader.finish()?;
        Ok(cursor)
    }

    /// What is acknowledged above the mark.
    pub(super) fn acked(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.acked.iter()
    }

    /// The batches of which some messages are still wanted, with those.
    #[cfg(test)]
    pub(super) fn partial(&self) -> impl Iterator<Item = (u64, &[i64])> {
        self.partial.iter().map(|(entry, wanted)| (*entry, wanted.as_slice()))
    }
}

fn all_messages(messages: usize) -> Vec<i64> {
    let mut words = vec![-1; messages.div_ceil(WORD_BITS)];
    if let Some(last) = words.last_mut()
        && !messages.is_multiple_of(WORD_BITS)
    {
        *last = (u64::MAX >> (WORD_BITS - messages % WORD_BITS)).cast_signed();
    }
    words
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn open(cursor: &Cursor, end: u64) -> Vec<u64> {
        (0..end).filter(|entry| !cursor.is_acked(*entry)).collect()
    }

    #[test]
    fn the_mark_follows_what_is_acknowledged_without_a_gap() {
        let mut cursor = Cursor::new(0);
        cursor.ack(1..2);
        cursor.ack(3..4);
        assert_eq!((cursor.mark(), cursor.next_from(1), cursor.unacked_below(5)), (0, 2, 3));
        cursor.ack(0..1);
        assert_eq!((cursor.mark(), open(&cursor, 5)), (2, vec![2, 4]));
        cursor.ack_until(3);
        assert_eq!(cursor.mark(), 4);
        cursor.seek(1);
        assert_eq!(open(&cursor, 3), [1, 2]);
    }

    #[test]
    fn a_batch_is_acknowledged_when_all_of_its_messages_are() {
        let mut cursor = Cursor::new(0);
        // Messages 0 and 1 of 70 are done.
        assert!(!cursor.ack_partly(0, 70, &[!3, -1]));
        assert_eq!(cursor.wanted(0), Some(&vec![!3, 0x3f]));
        assert!(!cursor.ack_partly(0, 70, &[-1]), "words that are left out are acknowledged");
        assert_eq!(cursor.wanted(0), Some(&vec![!3, 0]));
        assert!(cursor.ack_partly(0, 70, &[3]));
        assert_eq!((cursor.mark(), cursor.wanted(0)), (1, None));
        assert!(cursor.ack_partly(0, 70, &[-1, -1]), "it stays so");
    }

    #[test]
    fn batches_of_any_size_are_acknowledged_one_by_one() {
        for messages in 1..200_u32 {
            let mut cursor = Cursor::new(0);
            for index in 0..messages {
                let mut wanted = [-1_i64; 4];
                wanted[index as usize / WORD_BITS] &= !(1 << (index as usize % WORD_BITS));
                assert_eq!(cursor.ack_partly(0, messages, &wanted), index + 1 == messages, "{index} of {messages}");
                let left: u32 = cursor.wanted(0).map_or(0, |words| words.iter().map(|word| word.count_ones()).sum());
                assert_eq!(left, messages - index - 1, "{index} of {messages}");
            }
            assert_eq!(cursor.mark(), 1);
        }
    }

    proptest! {
        /// Whatever the order of acknowledgements, exactly the others are open.
        #[test]
        fn acknowledged_once_means_for_ever(acks in proptest::collection::vec((0_u64..20, 0_u8..3), 0..40)) {
            let mut cursor = Cursor::new(0);
            let mut expected: BTreeSet<u64> = (0..20).collect();
            for (entry, kind) in acks {
                match kind {
                    0 => {
                        cursor.ack_until(entry + 1);
                        expected.retain(|other| *other > entry);
                    }
                    1 => {
                        cursor.ack(entry..entry + 1);
                        expected.remove(&entry);
                    }
                    _ => {
                        cursor.ack_partly(entry, 3, &[0b101]);
                    }
                }
                prop_assert_eq!(open(&cursor, 20), expected.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(cursor.unacked_below(20), expected.len() as u64);
                prop_assert_eq!(cursor.mark(), expected.first().copied().unwrap_or(20));
                prop_assert!(cursor.partial().all(|(entry, _)| expected.contains(&entry)));
                prop_assert!(cursor.acked().all(|range| range.start > cursor.mark()));
            }
        }
    }
}
