//! What is kept of topics, as rows: keys in the order in which they are loaded, and values.
//!
//! | key | value |
//! | --- | --- |
//! | 1, name | a number that is kept for the broker as a whole |
//! | 2, topic | its [`Head`] |
//! | 3, topic, entry's number | time of arrival, then metadata and payload as they came |
//! | 4, topic, subscription's name | what it has acknowledged |
//! | 5, topic, version | a version of its schema |
//!
//! Topics have numbers in keys, big-endian, so that all rows of one are together. Values are little-endian.

use std::ops::Range;

use bytes::Bytes;
use gradwire_proto::wire::{Malformed, Reader};

use crate::broker::names::NAME_BYTES_MAX;

const META: u8 = 1;
const HEAD: u8 = 2;
const ENTRY: u8 = 3;
const SUBSCRIPTION: u8 = 4;
const SCHEMA: u8 = 5;

/// Tags of operations in the journal.
const PUT: u8 = 1;
const REMOVE: u8 = 2;
const REMOVE_RANGE: u8 = 3;

/// Longest key: a subscription's.
const KEY_BYTES_MAX: usize = 1 + 8 + NAME_BYTES_MAX;

/// What a topic is beside its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::broker) struct Head {
    pub(in crate::broker) name: String,
    /// The ledger in its message ids.
    pub(in crate::broker) ledger: u64,
    /// The number that its next entry gets.
    pub(in crate::broker) next: u64,
    /// How many entries are kept of it, so that a missing one is noticed.
    pub(in crate::broker) entries: u64,
    /// Its epoch, if it ever had an only producer.
    pub(in crate::broker) epoch: Option<u64>,
}

/// One row, read.
#[derive(Debug)]
pub(super) enum Row<'a> {
    Meta { name: &'a str, value: u64 },
    Head { topic: u64, head: Head },
    Entry { topic: u64, number: u64, arrival_ms: u64, tail: &'a [u8] },
    Subscription { topic: u64, name: &'a str, state: &'a [u8] },
    Schema { topic: u64, version: u32, schema: &'a [u8] },
}

/// Changes of rows, to be made together or not at all.
#[derive(Debug, Default)]
pub(in crate::broker) struct Ops {
    bytes: Vec<u8>,
}

/// One change of rows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Op<'a> {
    Put {
        key: &'a [u8],
        value: &'a [u8],
    },
    Remove {
        key: &'a [u8],
    },
    /// Removes all keys from `first` to just below `end`.
    RemoveRange {
        first: &'a [u8],
        end: &'a [u8],
    },
}

impl Ops {
    pub(in crate::broker) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// As they are in the journal.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(in crate::broker) fn put_meta(&mut self, name: &str, value: u64) {
        let mut key = vec![META];
        key.extend_from_slice(name.as_bytes());
        self.put(&key, &[&value.to_le_bytes()]);
    }

    pub(in crate::broker) fn put_head(&mut self, topic: u64, head: &Head) {
        let mut value = Vec::with_capacity(40 + head.name.len());
        put_name(&mut value, &head.name);
        for number in [head.ledger, head.next, head.entries] {
            value.extend_from_slice(&number.to_le_bytes());
        }
        value.push(u8::from(head.epoch.is_some()));
        value.extend_from_slice(&head.epoch.unwrap_or_default().to_le_bytes());
        self.put(&key(HEAD, topic, &[]), &[&value]);
    }

    pub(in crate::broker) fn put_entry(&mut self, topic: u64, number: u64, arrival_ms: u64, tail: &Bytes) {
        self.put(&key(ENTRY, topic, &number.to_be_bytes()), &[&arrival_ms.to_le_bytes(), tail]);
    }

    pub(in crate::broker) fn remove_entries(&mut self, topic: u64, numbers: Range<u64>) {
        let first = key(ENTRY, topic, &numbers.start.to_be_bytes());
        self.remove_range(&first, &key(ENTRY, topic, &numbers.end.to_be_bytes()));
    }

    pub(in crate::broker) fn put_subscription(&mut self, topic: u64, name: &str, state: &[u8]) {
        self.put(&key(SUBSCRIPTION, topic, name.as_bytes()), &[state]);
    }

    pub(in crate::broker) fn remove_subscription(&mut self, topic: u64, name: &str) {
        let key = key(SUBSCRIPTION, topic, name.as_bytes());
        self.bytes.push(REMOVE);
        self.sized(&[&key]);
    }

    pub(in crate::broker) fn put_schema(&mut self, topic: u64, version: u32, schema: &[u8]) {
        self.put(&key(SCHEMA, topic, &version.to_be_bytes()), &[schema]);
    }

    /// Removes everything of a topic.
    pub(in crate::broker) fn remove_topic(&mut self, topic: u64) {
        for kind in [HEAD, ENTRY, SUBSCRIPTION, SCHEMA] {
            self.remove_range(&key(kind, topic, &[]), &key(kind, topic + 1, &[]));
        }
    }

    fn put(&mut self, key: &[u8], value: &[&[u8]]) {
        self.bytes.push(PUT);
        self.sized(&[key]);
        self.sized(value);
    }

    fn remove_range(&mut self, first: &[u8], end: &[u8]) {
        self.bytes.push(REMOVE_RANGE);
        self.sized(&[first]);
        self.sized(&[end]);
    }

    /// Frames are far below 4 GiB: one holds at most what the broker holds in memory of new messages.
    fn sized(&mut self, parts: &[&[u8]]) {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        self.bytes.extend_from_slice(&(bytes as u32).to_le_bytes());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
    }
}

/// Reads operations as [`Ops::bytes`] gives them, and hands each to `act`.
///
/// # Errors
/// Those of `act`, and when they are malformed.
pub(super) fn each_op<E: From<Malformed>>(bytes: &[u8], mut act: impl FnMut(Op<'_>) -> Result<(), E>) -> Result<(), E> {
    let mut reader = Reader::new(bytes);
    while reader.remaining() > 0 {
        let tag = reader.u8()?;
        let key = sized(&mut reader)?;
        if key.len() > KEY_BYTES_MAX {
            return Err(Malformed("key too long").into());
        }
        act(match tag {
            PUT => Op::Put { key, value: sized(&mut reader)? },
            REMOVE => Op::Remove { key },
            REMOVE_RANGE => Op::RemoveRange { first: key, end: sized(&mut reader)? },
            _ => return Err(Malformed("unknown operation").into()),
        })?;
    }
    Ok(())
}

impl<'a> Row<'a> {
    pub(super) fn read(key: &'a [u8], value: &'a [u8]) -> Result<Self, Malformed> {
        let (kind, rest) = key.split_first().ok_or(Malformed("empty key"))?;
        if *kind == META {
            let mut reader = Reader::new(value);
            let row = Self::Meta { name: text(rest)?, value: reader.u64()? };
            return reader.finish().map(|()| row);
        }
        let (topic, rest) = rest.split_first_chunk().ok_or(Malformed("key without topic"))?;
        let topic = u64::from_be_bytes(*topic);
        match *kind {
            HEAD => Ok(Self::Head { topic, head: read_head(value)? }),
            ENTRY => {
                let number = u64::from_be_bytes(rest.try_into().map_err(|_| Malformed("key of an entry"))?);
                let mut reader = Reader::new(value);
                let arrival_ms = reader.u64()?;
                Ok(Self::Entry { topic, number, arrival_ms, tail: reader.bytes(reader.remaining())? })
            }
            SUBSCRIPTION => Ok(Self::Subscription { topic, name: text(rest)?, state: value }),
            SCHEMA => {
                let version = u32::from_be_bytes(rest.try_into().map_err(|_| Malformed("key of a schema"))?);
                Ok(Self::Schema { topic, version, schema: value })
            }
            _ => Err(Malformed("unknown kind of row")),
        }
    }
}

fn key(kind: u8, topic: u64, rest: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(9 + rest.len());
    key.push(kind);
    key.extend_from_slice(&topic.to_be_bytes());
    key.extend_from_slice(rest);
    key
}

/// Whole, whatever its length: two names that were cut could become one.
fn put_name(out: &mut Vec<u8>, name: &str) {
    assert!(name.len() <= NAME_BYTES_MAX, "names are checked where topics are made");
    out.extend_from_slice(&(name.len() as u16).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
}

fn read_head(value: &[u8]) -> Result<Head, Malformed> {
    let mut reader = Reader::new(value);
    let name = reader.text(NAME_BYTES_MAX)?.to_owned();
    let (ledger, next, entries) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let (has_epoch, epoch) = (reader.u8()?, reader.u64()?);
    reader.finish()?;
    Ok(Head { name, ledger, next, entries, epoch: Some(epoch).filter(|_| has_epoch != 0) })
}

fn text(bytes: &[u8]) -> Result<&str, Malformed> {
    str::from_utf8(bytes).map_err(|_| Malformed("name is not UTF-8"))
}

fn sized<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
    let bytes = reader.u32()?;
    reader.bytes(bytes as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(ops: &Ops) -> Vec<String> {
        let mut rows = Vec::new();
        each_op::<Malformed>(ops.bytes(), |op| {
            rows.push(match op {
                Op::Put { key, value } => format!("{:?}", Row::read(key, value)?),
                other => format!("{other:?}"),
            });
            Ok(())
        })
        .unwrap();
        rows
    }

    #[test]
    fn rows_are_read_as_they_were_written() {
        let head = Head { name: "persistent://a/b/c".to_owned(), ledger: 1, next: 2, entries: 3, epoch: Some(0) };
        let mut ops = Ops::default();
        assert!(ops.is_empty());
        ops.put_meta("ledger", 9);
        ops.put_head(7, &head);
        ops.put_head(7, &Head { epoch: None, ..head.clone() });
        ops.put_entry(7, 258, 5, &Bytes::from_static(b"tail"));
        ops.put_subscription(7, "s", b"state");
        ops.put_schema(7, 1, b"");
        ops.remove_subscription(7, "s");
        assert_eq!(
            rows(&ops)[..6],
            [
                "Meta { name: \"ledger\", value: 9 }".to_owned(),
                format!("Head {{ topic: 7, head: {head:?} }}"),
                format!("Head {{ topic: 7, head: {:?} }}", Head { epoch: None, ..head }),
                "Entry { topic: 7, number: 258, arrival_ms: 5, tail: [116, 97, 105, 108] }".to_owned(),
                "Subscription { topic: 7, name: \"s\", state: [115, 116, 97, 116, 101] }".to_owned(),
                "Schema { topic: 7, version: 1, schema: [] }".to_owned(),
            ]
        );
    }

    #[test]
    fn names_are_never_cut() {
        let head = |bytes| Head { name: "x".repeat(bytes), ledger: 1, next: 2, entries: 3, epoch: None };
        let mut ops = Ops::default();
        ops.put_head(7, &head(NAME_BYTES_MAX));
        assert!(rows(&ops)[0].contains(&"x".repeat(NAME_BYTES_MAX)));
        std::panic::catch_unwind(|| Ops::default().put_head(7, &head(NAME_BYTES_MAX + 1))).unwrap_err();
    }

    #[test]
    fn removing_a_topic_covers_its_rows_and_no_others() {
        let mut ops = Ops::default();
        ops.remove_topic(7);
        let mut ranges = Vec::new();
        each_op::<Malformed>(ops.bytes(), |op| {
            if let Op::RemoveRange { first, end } = op {
                ranges.push(first.to_vec()..end.to_vec());
            }
            Ok(())
        })
        .unwrap();
        for kind in [HEAD, ENTRY, SUBSCRIPTION, SCHEMA] {
            for (topic, inside) in [(6, false), (7, true), (8, false)] {
                for rest in [&[][..], &[0; 8], &[0xff; 8]] {
                    let key = key(kind, topic, rest);
                    assert_eq!(ranges.iter().any(|range| range.contains(&key)), inside, "{key:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(key in proptest::collection::vec(any::<u8>(), 0..40),
                                    value in proptest::collection::vec(any::<u8>(), 0..80), kind in 0_u8..7) {
            let _ = Row::read(&key, &value);
            let _ = Row::read(&[&[kind], &key[..]].concat(), &value);
            let _ = each_op::<Malformed>(&value, |_| Ok(()));
        }
    }
}
