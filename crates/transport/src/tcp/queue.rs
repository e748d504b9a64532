//! What waits to be sent to one peer: a bounded ring of messages and writes, allocated once.

use std::collections::VecDeque;

use super::header::{Header, LINK_HEADER_BYTES, Write};
use super::sys::{PARTS_MAX, Part};
use crate::{Refused, Remote, Slice};

/// Most messages and writes that wait for one peer.
const ENTRIES_MAX: usize = 512;
/// Bytes of headers, immediates and messages that wait for one peer.
const INLINE_BYTES_MAX: usize = 128 * 1024;
/// Bytes of payload that wait for one peer: enough to keep a fast link busy between polls, and not so much that
/// something urgent waits long behind it. One write of any size is taken when no other payload waits.
const PAYLOAD_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Most bytes offered to the kernel at once, so that sends and receives take turns and stay in the caches.
const SEND_BYTES_MAX: usize = 1024 * 1024;

/// The queue to one peer.
#[derive(Debug)]
pub(super) struct SendQueue {
    entries: VecDeque<Entry>,
    inline: InlineRing,
    /// Bytes of the first entry that the kernel has taken.
    head_sent: usize,
    payload_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    inline_start: usize,
    inline_len: usize,
    payload: Option<(Slice, u64)>,
}

impl Entry {
    fn payload_len(&self) -> usize {
        self.payload.as_ref().map_or(0, |(slice, _)| slice.len())
    }

    fn len(&self) -> usize {
        self.inline_len + self.payload_len()
    }
}

impl SendQueue {
    pub(super) fn new() -> Self {
        Self {
            entries: VecDeque::with_capacity(ENTRIES_MAX),
            inline: InlineRing { bytes: vec![0; INLINE_BYTES_MAX].into_boxed_slice(), start: 0, end: 0 },
            head_sent: 0,
            payload_bytes: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Queues a message. Its length is within the limits.
    pub(super) fn push_message(&mut self, message: &[u8]) -> Result<(), Refused> {
        self.push(Header { inline: message.len(), write: None }, message, None)
    }

    /// Queues a write. Its lengths are within the limits.
    pub(super) fn push_write(
        &mut self,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        if self.payload_bytes > 0 && self.payload_bytes + source.len() > PAYLOAD_BYTES_MAX {
            return Err(Refused::Full);
        }
        let write = Write { payload: source.len(), target };
        self.push(Header { inline: immediate.len(), write: Some(write) }, immediate, Some((source, token)))
    }

    fn push(&mut self, header: Header, inline: &[u8], payload: Option<(Slice, u64)>) -> Result<(), Refused> {
        if self.entries.len() == ENTRIES_MAX {
            return Err(Refused::Full);
        }
        let inline_len = LINK_HEADER_BYTES + inline.len();
        let inline_start = self.inline.take(inline_len).ok_or(Refused::Full)?;
        let place = &mut self.inline.bytes[inline_start..inline_start + inline_len];
        place[..LINK_HEADER_BYTES].copy_from_slice(&header.encode());
        place[LINK_HEADER_BYTES..].copy_from_slice(inline);
        let entry = Entry { inline_start, inline_len, payload };
        self.payload_bytes += entry.payload_len();
        self.entries.push_back(entry);
        Ok(())
    }

    /// What to send next, in order: from the first unsent byte, as much as one send should carry.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let mut skip = self.head_sent;
        let mut left = SEND_BYTES_MAX;
        self.entries.iter().take(PARTS_MAX).flat_map(move |entry| {
            let inline_skip = skip.min(entry.inline_len);
            let payload_skip = skip - inline_skip;
            skip = 0;
            // Headers are never cut by the budget: they are small, and a cut would only cost another call.
            let inline = &self.inline.bytes[entry.inline_start + inline_skip..entry.inline_start + entry.inline_len];
            let inline = (!inline.is_empty() && left > 0).then_some(Part::Bytes(inline));
            let payload = entry.payload.as_ref().filter(|(slice, _)| slice.len() > payload_skip && left > 0);
            let payload = payload.map(|(slice, _)| {
                let part = (slice.len() - payload_skip).min(left);
                left -= part;
                Part::Memory(slice, payload_skip, part)
            });
            inline.into_iter().chain(payload)
        })
    }

    /// Notes that the kernel took `bytes` more, and calls `sent` with the token of each write it has all of.
    pub(super) fn advance(&mut self, bytes: usize, mut sent: impl FnMut(u64)) {
        self.head_sent += bytes;
        while let Some(entry) = self.entries.front() {
            let len = entry.len();
            if self.head_sent < len {
                break;
            }
            self.head_sent -= len;
            self.pop(&mut sent);
        }
    }

    /// Drops everything, and calls `sent` with the token of each write.
    pub(super) fn clear(&mut self, mut sent: impl FnMut(u64)) {
        self.head_sent = 0;
        while !self.entries.is_empty() {
            self.pop(&mut sent);
        }
    }

    fn pop(&mut self, sent: &mut impl FnMut(u64)) {
        let Some(entry) = self.entries.pop_front() else { return };
        self.payload_bytes -= entry.payload_len();
        self.inline.release_until(self.entries.front().map(|next| next.inline_start));
        if let Some((slice, token)) = entry.payload {
            drop(slice);
            sent(token);
        }
    }
}

/// A ring that hands out contiguous pieces and takes them back in order.
#[derive(Debug)]
struct InlineRing {
    bytes: Box<[u8]>,
    /// Where the oldest piece starts.
    start: usize,
    /// Where the newest piece ends. At `start` only when there are no pieces: a piece never closes the gap.
    end: usize,
}

impl InlineRing {
    fn take(&mut self, len: usize) -> Option<usize> {
        let at = if self.end >= self.start {
            if self.bytes.len() - self.end >= len {
                self.end
            } else if len < self.start {
                0
            } else {
                return None;
            }
        } else if self.start - self.end > len {
            self.end
        } else {
            return None;
        };
        self.end = at + len;
        Some(at)
    }

    /// Everything before the piece that starts at `next` is free; all of it when there is none.
    fn release_until(&mut self, next: Option<usize>) {
        match next {
            Some(start) => self.start = start,
            None => (self.start, self.end) = (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Buffer;
    use gradwire_proto::RegionKey;

    const TARGET: Remote = Remote { region: RegionKey(1), offset: 0 };

    fn offered(queue: &SendQueue) -> Vec<u8> {
        let mut out = Vec::new();
        for part in queue.parts().take(PARTS_MAX) {
            match part {
                Part::Bytes(bytes) => out.extend_from_slice(bytes),
                Part::Memory(slice, skip, most) => {
                    let start = slice.offset() + skip;
                    out.extend_from_slice(&slice.mapping().bytes()[start..start + (slice.len() - skip).min(most)]);
                }
            }
        }
        out
    }

    #[test]
    fn a_full_queue_refuses_and_takes_again_after_room_was_made() {
        let mut queue = SendQueue::new();
        let mut taken = 0;
        while queue.push_message(&[7; 4000]).is_ok() {
            taken += 1;
        }
        assert!((30..=33).contains(&taken), "{taken} messages of 4000 bytes in 128 KiB");
        queue.advance(LINK_HEADER_BYTES + 4000, |_| unreachable!("messages have no token"));
        queue.push_message(&[7; 3000]).expect("there is room again");
    }

    #[test]
    fn payload_in_flight_is_bounded_but_one_large_write_is_taken() {
        let buffer = Buffer::allocate(PAYLOAD_BYTES_MAX + 1).expect("allocate");
        let mut queue = SendQueue::new();
        queue.push_write(&[], buffer.slice(0..buffer.len()), TARGET, 1).expect("alone");
        assert!(matches!(queue.push_write(&[], buffer.slice(0..1), TARGET, 2), Err(Refused::Full)));
        queue.push_write(&[], buffer.slice(0..0), TARGET, 3).expect_err("behind a full one");
        queue.push_message(b"urgent").expect("messages are not counted");
        let mut tokens = Vec::new();
        queue.clear(|token| tokens.push(token));
        assert_eq!(tokens, [1]);
        assert!(queue.is_empty());
    }

    proptest! {
        /// Whatever the sizes and however the kernel cuts the stream, what is offered is what was queued, in order.
        #[test]
        fn the_stream_is_what_was_queued(
            items in proptest::collection::vec((0usize..300, proptest::option::of(0usize..200_000)), 1..80),
            cuts in proptest::collection::vec(1usize..600_000, 1..40),
        ) {
            let mut buffer = Buffer::allocate(200_000).expect("allocate");
            for (index, byte) in buffer.bytes_mut().iter_mut().enumerate() {
                *byte = (index * 31 % 251) as u8;
            }
            let mut queue = SendQueue::new();
            let (mut expected, mut got, mut tokens, mut tokens_expected) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            let mut items = items.iter().enumerate().peekable();
            let mut cuts = cuts.iter().cycle();
            while items.peek().is_some() || !queue.is_empty() {
                while let Some((index, (inline, payload))) = items.peek() {
                    let bytes = vec![*index as u8; (*inline).min(super::super::IMMEDIATE_BYTES_MAX)];
                    let header = Header { inline: bytes.len(), write: payload.map(|payload| Write { payload, target: TARGET }) };
                    let taken = match payload {
                        Some(len) => queue.push_write(&bytes, buffer.slice(0..*len), TARGET, *index as u64),
                        None => queue.push_message(&bytes),
                    };
                    if taken.is_err() {
                        break;
                    }
                    expected.extend_from_slice(&header.encode());
                    expected.extend_from_slice(&bytes);
                    if let Some(len) = payload {
                        expected.extend_from_slice(&buffer.bytes()[..*len]);
                        tokens_expected.push(*index as u64);
                    }
                    items.next();
                }
                let offered = offered(&queue);
                prop_assert!(!offered.is_empty());
                let taken = offered.len().min(*cuts.next().unwrap_or(&1));
                got.extend_from_slice(&offered[..taken]);
                queue.advance(taken, |token| tokens.push(token));
            }
            prop_assert!(got == expected);
            prop_assert_eq!(tokens, tokens_expected);
            prop_assert_eq!(queue.payload_bytes, 0);
        }
    }
}
