//! What a record in the ring says (docs/wire.md, section 9).

use gradwire_proto::RegionKey;
use gradwire_proto::limits::MESSAGE_BYTES_MAX;

use super::ring::Broken;
use crate::Remote;

/// Largest immediate of a write in bytes.
pub(super) const IMMEDIATE_BYTES_MAX: usize = 256;
/// Largest payload of a write in bytes.
pub(super) const WRITE_BYTES_MAX: usize = 64 * 1024 * 1024;

const MESSAGE: u64 = 1;
const WRITE: u64 = 2;
const MESSAGE_WORDS: usize = 2;
const WRITE_WORDS: usize = 7;
/// Longest body of a record in words.
pub(super) const RECORD_WORDS_MAX: usize = MESSAGE_WORDS + MESSAGE_BYTES_MAX / 8;

const _: () = assert!(WRITE_WORDS + IMMEDIATE_BYTES_MAX / 8 <= RECORD_WORDS_MAX);
const _: () = assert!(MESSAGE_BYTES_MAX.is_multiple_of(8) && IMMEDIATE_BYTES_MAX.is_multiple_of(8));

/// A record, read from its own copy of the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    /// How many announcements the sender had made before it: they come first.
    pub(super) announced: u64,
    pub(super) body: Body<'a>,
}

/// What a record asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body<'a> {
    Message(&'a [u8]),
    Write(Write<'a>),
}

/// Copy `bytes` bytes from the sender's `source` to our `target`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write<'a> {
    pub(super) immediate: &'a [u8],
    pub(super) source: Remote,
    pub(super) target: Remote,
    pub(super) bytes: u64,
}

/// The words in front of a message's bytes.
pub(super) const fn message_words(announced: u64, bytes: usize) -> [u64; MESSAGE_WORDS] {
    [MESSAGE | (bytes as u64) << 32, announced]
}

/// The words in front of a write's immediate.
pub(super) const fn write_words(
    announced: u64,
    immediate_bytes: usize,
    source: Remote,
    target: Remote,
    bytes: usize,
) -> [u64; WRITE_WORDS] {
    [
        WRITE | (immediate_bytes as u64) << 32,
        announced,
        source.region.0,
        source.offset,
        target.region.0,
        target.offset,
        bytes as u64,
    ]
}

impl<'a> Record<'a> {
    /// Reads a record's body.
    pub(super) fn parse(words: &'a [u64]) -> Result<Self, Broken> {
        let [head, announced, ..] = *words else { return Err(Broken("a record ends too early")) };
        let (kind, bytes) = (head & u64::from(u32::MAX), (head >> 32) as usize);
        let (fixed, bytes_max) = match kind {
            MESSAGE => (MESSAGE_WORDS, MESSAGE_BYTES_MAX),
            WRITE => (WRITE_WORDS, IMMEDIATE_BYTES_MAX),
            _ => return Err(Broken("a record is of no known kind")),
        };
        if bytes > bytes_max || words.len() != fixed + bytes.div_ceil(8) {
            return Err(Broken("a record's length does not fit what it holds"));
        }
        let tail = &bytemuck::cast_slice(&words[fixed..])[..bytes];
        let body = match *words {
            [_, _, source, source_offset, target, target_offset, bytes, ..] if kind == WRITE => {
                if bytes > WRITE_BYTES_MAX as u64 {
                    return Err(Broken("a write is larger than any may be"));
                }
                Body::Write(Write {
                    immediate: tail,
                    source: Remote { region: RegionKey(source), offset: source_offset },
                    target: Remote { region: RegionKey(target), offset: target_offset },
                    bytes,
                })
            }
            _ => Body::Message(tail),
        };
        Ok(Self { announced, body })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(words: &[u64], bytes: &[u8]) -> Vec<u64> {
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(8), 0);
        let mut all = words.to_vec();
        all.extend(padded.as_chunks::<8>().0.iter().copied().map(u64::from_ne_bytes));
        all
    }

    proptest! {
        #[test]
        fn records_round_trip(
            announced: u64, source: (u64, u64), target: (u64, u64), bytes in 0..=WRITE_BYTES_MAX,
            data in proptest::collection::vec(any::<u8>(), 0..=IMMEDIATE_BYTES_MAX),
        ) {
            let words = body(&message_words(announced, data.len()), &data);
            prop_assert_eq!(Record::parse(&words), Ok(Record { announced, body: Body::Message(&data) }));
            let source = Remote { region: RegionKey(source.0), offset: source.1 };
            let target = Remote { region: RegionKey(target.0), offset: target.1 };
            let words = body(&write_words(announced, data.len(), source, target, bytes), &data);
            let write = Body::Write(Write { immediate: &data, source, target, bytes: bytes as u64 });
            prop_assert_eq!(Record::parse(&words), Ok(Record { announced, body: write }));
        }

        #[test]
        fn garbage_parses_within_bounds_or_not_at_all(
            kind in 0u64..4, bytes: u16, rest in proptest::collection::vec(any::<u64>(), 0..50),
        ) {
            let mut words = vec![kind | u64::from(bytes) << 32];
            words.extend(rest);
            match Record::parse(&words).map(|record| record.body) {
                Ok(Body::Message(message)) => prop_assert_eq!(message.len(), usize::from(bytes)),
                Ok(Body::Write(Write { immediate, bytes: payload, .. })) => {
                    prop_assert_eq!(immediate.len(), usize::from(bytes));
                    prop_assert!(payload <= WRITE_BYTES_MAX as u64);
                }
                Err(Broken(reason)) => prop_assert!(!reason.is_empty()),
            }
        }
    }
}
