//! Reads one peer's stream: link headers, messages, immediates, and payloads straight into registered memory.
//!
//! No IO here: [`Receiver::room`] says where the next bytes go, [`Receiver::advance`] is told how many came.

use std::sync::Arc;

use arrayvec::ArrayVec;
use gradwire_proto::limits::MESSAGE_BYTES_MAX;
use gradwire_proto::{Rank, RegionKey};

use super::header::{Header, LINK_HEADER_BYTES, Write};
use super::regions::Regions;
use super::sys::Landing;
use super::{IMMEDIATE_BYTES_MAX, WRITE_BYTES_MAX};
use crate::Sink;
use crate::region::Mapping;

/// Bytes of the spill buffer: what is not payload goes here, and payloads that are discarded.
const SPILL_BYTES: usize = 32 * 1024;
/// How much is read beyond a large payload: the next header and immediate, but hardly any of the next payload, which
/// would have to be copied once more.
const SPILL_AFTER_PAYLOAD_BYTES: usize = 128;
/// Payloads with less than this left are small: more is read beyond them, as their successors will be small too.
const SMALL_PAYLOAD_BYTES: usize = 8 * 1024;
/// How much is read when a header is due.
const SPILL_FOR_HEADER_BYTES: usize = 8 * 1024;

const _: () = assert!(SPILL_FOR_HEADER_BYTES >= LINK_HEADER_BYTES + MESSAGE_BYTES_MAX);
const _: () = assert!(SPILL_BYTES >= SPILL_FOR_HEADER_BYTES + LINK_HEADER_BYTES + MESSAGE_BYTES_MAX);

/// The peer's stream breaks the link format in this field. Nothing after it can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

/// The receiving half of a link.
#[derive(Debug)]
pub(super) struct Receiver {
    peer: Rank,
    spill: Box<[u8]>,
    /// The bytes of the spill that came and were not used yet.
    start: usize,
    end: usize,
    state: State,
    immediate: ArrayVec<u8, IMMEDIATE_BYTES_MAX>,
    /// Writes whose payload was not let in.
    discarded: u64,
}

#[derive(Debug)]
enum State {
    /// A link header is due.
    Header,
    /// Its inline bytes are due.
    Inline(Header),
    /// Its payload is due; so many bytes are missing.
    Payload { write: Write, missing: usize, landing: Option<Arc<Mapping>> },
}

impl Receiver {
    pub(super) fn new(peer: Rank) -> Self {
        Self {
            peer,
            spill: vec![0; SPILL_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            state: State::Header,
            immediate: ArrayVec::new(),
            discarded: 0,
        }
    }

    /// How many writes were not let in: refused, or not within memory that is registered.
    pub(super) const fn discarded(&self) -> u64 {
        self.discarded
    }

    /// Whether the stream stands between two items: an end here is a clean one.
    pub(super) const fn is_between_items(&self) -> bool {
        matches!(self.state, State::Header) && self.start == self.end
    }

    /// The rest of a payload that is on its way into `region` is discarded.
    pub(super) fn forget_region(&mut self, region: RegionKey) {
        if let State::Payload { write, landing, .. } = &mut self.state
            && write.target.region == region
            && landing.take().is_some()
        {
            self.discarded += 1;
        }
    }

    /// Where the next bytes of the stream go: first what is left of the payload, then the spill.
    pub(super) fn room(&mut self) -> (Option<Landing<'_>>, &mut [u8]) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.spill.len() - self.end < LINK_HEADER_BYTES + MESSAGE_BYTES_MAX {
            self.spill.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let free = &mut self.spill[self.end..];
        match &self.state {
            State::Payload { write, missing, landing: Some(mapping) } => {
                let most = if *missing < SMALL_PAYLOAD_BYTES { free.len() } else { SPILL_AFTER_PAYLOAD_BYTES };
                let landing = Landing { mapping, offset: landing_offset(write, *missing), len: *missing };
                (Some(landing), &mut free[..most])
            }
            State::Payload { landing: None, .. } => (None, free),
            State::Header | State::Inline(_) => {
                let most = free.len().min(SPILL_FOR_HEADER_BYTES);
                (None, &mut free[..most])
            }
        }
    }

    /// Takes notice of `bytes` bytes that came into what [`Receiver::room`] returned, and tells `sink` what is
    /// complete.
    ///
    /// # Errors
    /// A [`Violation`]; everything before it was delivered, and the receiver must not be used further.
    pub(super) fn advance(&mut self, bytes: usize, regions: &Regions, sink: &mut dyn Sink) -> Result<(), Violation> {
        let mut spilled = bytes;
        if let State::Payload { missing, landing: Some(_), .. } = &mut self.state {
            let landed = bytes.min(*missing);
            *missing -= landed;
            spilled -= landed;
        }
        self.end += spilled;
        while self.step(regions, sink)? {}
        Ok(())
    }

    /// Uses up one part of an item. Returns false when more bytes are needed for the next.
    fn step(&mut self, regions: &Regions, sink: &mut dyn Sink) -> Result<bool, Violation> {
        let due = &self.spill[self.start..self.end];
        match &mut self.state {
            State::Header => {
                let Some((bytes, _)) = due.split_first_chunk() else { return Ok(false) };
                self.state = State::Inline(Header::decode(bytes).map_err(Violation)?);
                self.start += LINK_HEADER_BYTES;
            }
            State::Inline(header) => {
                let Some((inline, _)) = due.split_at_checked(header.inline) else { return Ok(false) };
                self.start += header.inline;
                match header.write {
                    None => {
                        sink.message(self.peer, inline);
                        self.state = State::Header;
                    }
                    Some(write) => {
                        self.immediate.clear();
                        // Cannot fail: the header was checked against the limit.
                        let _ = self.immediate.try_extend_from_slice(inline);
                        let landing = admit(self.peer, inline, &write, regions, sink);
                        self.discarded += u64::from(landing.is_none() && write.payload > 0);
                        self.state = State::Payload { write, missing: write.payload, landing };
                    }
                }
            }
            State::Payload { write, missing, landing } => {
                let taken = due.len().min(*missing);
                if let Some(mapping) = landing
                    && taken > 0
                {
                    Landing { mapping, offset: landing_offset(write, *missing), len: *missing }.fill(&due[..taken]);
                }
                self.start += taken;
                *missing -= taken;
                if *missing > 0 {
                    return Ok(false);
                }
                if landing.is_some() || write.payload == 0 {
                    sink.written(self.peer, &self.immediate, write.target, write.payload);
                }
                self.state = State::Header;
            }
        }
        Ok(true)
    }
}

/// Where the missing bytes of `write` go: its bounds were checked against the region when it was admitted.
const fn landing_offset(write: &Write, missing: usize) -> usize {
    write.target.offset as usize + (write.payload - missing)
}

/// The memory that the payload may land in, if it may.
fn admit(peer: Rank, immediate: &[u8], write: &Write, regions: &Regions, sink: &mut dyn Sink) -> Option<Arc<Mapping>> {
    if write.payload == 0 {
        return None;
    }
    debug_assert!(write.payload <= WRITE_BYTES_MAX);
    let Some(mapping) = regions.place(write.target, write.payload) else {
        tracing::debug!(%peer, target = ?write.target, bytes = write.payload, "a write outside of registered memory");
        return None;
    };
    sink.admit(peer, immediate, write.target, write.payload).then(|| Arc::clone(mapping))
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Fault;
    use proptest::prelude::*;

    use super::*;
    use crate::{Buffer, Remote};

    /// A message or immediate, and where its payload landed if it is a write's.
    type Item = (Vec<u8>, Option<(Remote, usize)>);

    /// What a receiver reported, flattened for comparison.
    #[derive(Debug, Default, PartialEq)]
    struct Log {
        items: Vec<Item>,
        refuse: bool,
    }

    impl Sink for Log {
        fn admit(&mut self, _: Rank, immediate: &[u8], _: Remote, _: usize) -> bool {
            !(self.refuse && immediate.first() == Some(&b'!'))
        }
        fn message(&mut self, _: Rank, message: &[u8]) {
            self.items.push((message.to_vec(), None));
        }
        fn written(&mut self, _: Rank, immediate: &[u8], target: Remote, bytes: usize) {
            self.items.push((immediate.to_vec(), Some((target, bytes))));
        }
        fn sent(&mut self, _: Rank, _: u64) {}
        fn peer_down(&mut self, _: Rank, _: Fault) {}
    }

    /// Feeds `stream` in pieces of these sizes, as a socket would.
    fn feed(
        receiver: &mut Receiver,
        stream: &[u8],
        cuts: &[usize],
        regions: &Regions,
        log: &mut Log,
    ) -> Result<(), Violation> {
        let mut rest = stream;
        let mut cuts = cuts.iter().cycle();
        while !rest.is_empty() {
            let (landing, spill) = receiver.room();
            let direct = landing.as_ref().map_or(0, |landing| landing.len);
            let take = (*cuts.next().unwrap_or(&1)).min(direct + spill.len()).min(rest.len());
            assert!(take > 0, "no room: the link would stall");
            let (landed, spilled) = rest[..take].split_at(take.min(direct));
            if let Some(landing) = landing {
                landing.fill(landed);
            }
            spill[..spilled.len()].copy_from_slice(spilled);
            rest = &rest[take..];
            receiver.advance(take, regions, log)?;
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn items_arrive_whole_and_in_order_however_the_stream_is_cut(
            items in proptest::collection::vec((0usize..=IMMEDIATE_BYTES_MAX, proptest::option::of(0usize..100_000), any::<bool>()), 1..30),
            cuts in proptest::collection::vec(1usize..150_000, 1..20),
        ) {
            let buffer = Buffer::allocate(100_000 + 64).expect("allocate");
            let mut regions = Regions::default();
            regions.insert(&buffer);
            let (mut stream, mut expected) = (Vec::new(), Log { refuse: true, ..Log::default() });
            let mut image = vec![0; buffer.len()];
            let mut discarded = 0;
            for (index, (inline, payload, refused)) in items.iter().enumerate() {
                let mut bytes = vec![index as u8; *inline];
                if let (true, Some(first)) = (*refused, bytes.first_mut()) {
                    *first = b'!';
                }
                let target = Remote { region: buffer.key(), offset: index as u64 };
                let write = payload.map(|payload| Write { payload, target });
                stream.extend_from_slice(&Header { inline: bytes.len(), write }.encode());
                stream.extend_from_slice(&bytes);
                let payload = payload.unwrap_or(0);
                stream.extend((0..payload).map(|at| (at * 7 + index) as u8));
                if payload > 0 && bytes.first() == Some(&b'!') {
                    discarded += 1;
                    continue;
                }
                for at in 0..payload {
                    image[index + at] = (at * 7 + index) as u8;
                }
                expected.items.push((bytes, write.map(|write| (write.target, write.payload))));
            }
            let mut log = Log { refuse: true, ..Log::default() };
            let mut receiver = Receiver::new(Rank(1));
            prop_assert_eq!(feed(&mut receiver, &stream, &cuts, &regions, &mut log), Ok(()));
            prop_assert!(receiver.is_between_items());
            prop_assert_eq!(receiver.discarded(), discarded);
            prop_assert_eq!(log, expected);
            prop_assert!(buffer.bytes() == image);
        }

        /// Arbitrary bytes: no panic, nothing delivered before a header that verifies, and the link ends.
        #[test]
        fn garbage_ends_the_link_and_nothing_else(
            garbage in proptest::collection::vec(any::<u8>(), LINK_HEADER_BYTES..5000),
            cuts in proptest::collection::vec(1usize..3000, 1..20),
        ) {
            let mut log = Log::default();
            let mut receiver = Receiver::new(Rank(1));
            prop_assert!(feed(&mut receiver, &garbage, &cuts, &Regions::default(), &mut log).is_err());
            prop_assert!(log.items.is_empty());
        }

        /// Valid headers with hostile fields: never outside of registered memory, and the link goes on.
        #[test]
        fn writes_outside_of_registered_memory_are_discarded(
            key_off in 0u64..3, offset in prop_oneof![0u64..9000, Just(u64::MAX), u64::MAX - 9000..u64::MAX], payload in 1usize..9000,
            cuts in proptest::collection::vec(1usize..3000, 1..20),
        ) {
            let buffer = Buffer::allocate(8192).expect("allocate");
            let mut regions = Regions::default();
            regions.insert(&buffer);
            let target = Remote { region: RegionKey(buffer.key().0.wrapping_add(key_off)), offset };
            let mut stream = Header { inline: 1, write: Some(Write { payload, target }) }.encode().to_vec();
            stream.push(b'w');
            stream.resize(stream.len() + payload, 0xaa);
            stream.extend_from_slice(&Header { inline: 4, write: None }.encode());
            stream.extend_from_slice(b"next");
            let mut log = Log::default();
            let mut receiver = Receiver::new(Rank(1));
            prop_assert_eq!(feed(&mut receiver, &stream, &cuts, &regions, &mut log), Ok(()));
            let fits = key_off == 0 && offset.checked_add(payload as u64).is_some_and(|end| end <= 8192);
            prop_assert_eq!(receiver.discarded(), u64::from(!fits));
            prop_assert_eq!(log.items.len(), 1 + usize::from(fits));
            prop_assert_eq!(log.items.last(), Some(&(b"next".to_vec(), None)));
            prop_assert_eq!(buffer.bytes().iter().filter(|byte| **byte == 0xaa).count(), if fits { payload } else { 0 });
        }
    }

    #[test]
    fn a_region_that_ends_in_mid_payload_gets_no_more_of_it() {
        let buffer = Buffer::allocate(100_000).expect("allocate");
        let mut regions = Regions::default();
        regions.insert(&buffer);
        let target = Remote { region: buffer.key(), offset: 0 };
        let mut stream = Header { inline: 0, write: Some(Write { payload: 100_000, target }) }.encode().to_vec();
        stream.resize(stream.len() + 100_000, 0xaa);
        let (mut log, mut receiver) = (Log::default(), Receiver::new(Rank(1)));
        feed(&mut receiver, &stream[..50_032], &[9000], &regions, &mut log).expect("valid");
        regions.remove(buffer.key());
        receiver.forget_region(buffer.key());
        feed(&mut receiver, &stream[50_032..], &[9000], &regions, &mut log).expect("valid");
        assert!(log.items.is_empty() && receiver.is_between_items());
        assert_eq!(receiver.discarded(), 1);
        assert_eq!(buffer.bytes().iter().filter(|byte| **byte == 0xaa).count(), 50_000);
    }
}
