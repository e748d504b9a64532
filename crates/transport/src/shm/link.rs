//! One link: two lanes, the stream, the peer's regions, and the writes under way.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::announce::{Announcements, PeerRegions};
use super::packet::{Packet, Received, Receiver, Sent, send};
use super::record::{Body, Record, Write, message_words, write_words};
use super::ring::{Awaits, Bell, Broken, CLOSED, Consumer, DONE, Memory, OwnMemory, Producer, Sleep};
use super::sys::{OwnLane, PeerLane, copy};
use super::{OwnRegions, RING_WORDS, WRITES_MAX};
use crate::region::Mapping;
use crate::{Refused, Remote, Sink, Slice};

/// Most records that one poll delivers from one link, so that every link gets its turn.
const RECORDS_PER_POLL_MAX: usize = 64;
/// Most payload bytes that one poll copies from one link.
const BYTES_PER_POLL_MAX: u64 = 1 << 20;
/// Most packets that one look at the stream takes.
const PACKETS_PER_LOOK_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Link {
    peer: Rank,
    stream: OwnedFd,
    receiver: Receiver,
    own: OwnLane,
    theirs: PeerLane,
    producer: Producer,
    consumer: Consumer,
    sleep: Sleep,
    bell: Bell,
    /// Writes that the peer has not carried out yet, oldest first: token and source.
    writes: VecDeque<(u64, Slice)>,
    /// How many of our writes the peer has carried out.
    writes_done: u64,
    /// How many of the peer's writes we have carried out.
    carried_out: u64,
    /// The peer's oldest write was admitted, and this much of it is copied.
    copied: Option<u64>,
    announcements: Announcements,
    regions: PeerRegions,
    /// A send or write did not fit into the ring, and nothing has been consumed since.
    is_starved: bool,
    /// The next record names announcements that have not arrived.
    is_held: bool,
    /// The peer's end of the stream is closed: what is in the ring is all there will be.
    is_ended: bool,
    /// The stream is watched for room for announcements.
    is_watched_for_room: bool,
    /// Why the link must end, found where it could not be told.
    fault: Option<Fault>,
}

impl Link {
    pub(super) fn new(peer: Rank, stream: OwnedFd, own: OwnLane, theirs: PeerLane) -> Self {
        Self {
            peer,
            stream,
            receiver: Receiver::default(),
            own,
            theirs,
            producer: Producer::new(RING_WORDS as u64),
            consumer: Consumer::new(RING_WORDS as u64),
            sleep: Sleep::default(),
            bell: Bell::default(),
            writes: VecDeque::with_capacity(WRITES_MAX),
            writes_done: 0,
            carried_out: 0,
            copied: None,
            announcements: Announcements::default(),
            regions: PeerRegions::default(),
            is_starved: false,
            is_held: false,
            is_ended: false,
            is_watched_for_room: false,
            fault: None,
        }
    }

    pub(super) const fn peer(&self) -> Rank {
        self.peer
    }

    pub(super) fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Offers a region to the peer.
    pub(super) fn offer(&mut self, key: RegionKey, mapping: &Arc<Mapping>, len: usize) {
        self.announcements.register(key, mapping, len, self.producer.tail());
    }

    /// Tells the peer to let go of a region once it has consumed everything sent so far.
    pub(super) fn withdraw(&mut self, key: RegionKey) {
        self.announcements.deregister(key, self.producer.tail());
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), Refused> {
        let words = message_words(self.announcements.count(), message.len());
        self.push(&words, message)
    }

    pub(super) fn write(&mut self, immediate: &[u8], source: Slice, target: Remote, token: u64) -> Result<(), Refused> {
        if self.writes.len() >= WRITES_MAX {
            return Err(Refused::Full);
        }
        let from = Remote { region: source.key(), offset: source.offset() as u64 };
        let words = write_words(self.announcements.count(), immediate.len(), from, target, source.len());
        self.push(&words, immediate)?;
        self.writes.push_back((token, source));
        Ok(())
    }

    pub(super) fn view(&self, place: Remote, bytes: usize) -> Result<&[u8], Refused> {
        self.regions.view(place, bytes).ok_or(Refused::Invalid("the place is not within a region that the peer offers"))
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.writes.is_empty() && self.announcements.is_empty()
    }

    /// Moves what can be moved. An error ends the link: everything that had arrived was delivered.
    pub(super) fn progress(
        &mut self,
        own_regions: &OwnRegions,
        record: &mut [u64],
        sink: &mut dyn Sink,
    ) -> Result<usize, Fault> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        self.announce();
        let (delivered, is_drained) = self.deliver(own_regions, record, sink)?;
        let mut count = delivered + self.complete(sink)?;
        if delivered > 0 && self.bell.must_ring(&self.theirs, Awaits::Progress) {
            self.ring();
        }
        if self.is_starved && self.producer.has_moved(&self.theirs) {
            self.is_starved = false;
            count += 1;
        }
        if self.is_ended && is_drained {
            return Err(self.died());
        }
        Ok(count)
    }

    /// Announces that this side is about to sleep; see [`Sleep`] for what must follow.
    pub(super) fn fall_asleep(&mut self) {
        let awaits = if self.is_starved || !self.writes.is_empty() { Awaits::Progress } else { Awaits::Records };
        self.sleep.announce(&self.own, awaits);
    }

    pub(super) fn wake_up(&self) {
        Sleep::end(&self.own);
    }

    /// Whether [`Link::progress`] would do something that no packet on the stream will tell of.
    pub(super) fn has_work(&self) -> bool {
        self.fault.is_some()
            || self.is_ended
            || (!self.is_held && self.consumer.is_ready(&self.theirs))
            || (!self.writes.is_empty() && self.theirs.load(DONE) != self.writes_done)
            || (self.is_starved && self.producer.has_moved(&self.theirs))
    }

    /// Has `epoll` watch the stream for what this link waits for there.
    pub(super) fn watch(&mut self, epoll: BorrowedFd<'_>) -> Result<(), Errno> {
        let for_room = !self.announcements.is_empty();
        if for_room == self.is_watched_for_room {
            return Ok(());
        }
        let mut flags = EventFlags::IN;
        flags.set(EventFlags::OUT, for_room);
        epoll::modify(epoll, &self.stream, EventData::new_u64(u64::from(self.peer.0)), flags)?;
        self.is_watched_for_room = for_room;
        Ok(())
    }

    /// Sends the announcements that the stream has room for. Returns whether all are sent.
    pub(super) fn announce(&mut self) -> bool {
        if let Err(errno) = self.announcements.flush(self.stream.as_fd()) {
            self.stream_failed(errno);
        }
        self.announcements.is_empty()
    }

    /// Takes in what the peer said over the stream.
    pub(super) fn look_at_stream(&mut self) {
        for _ in 0..PACKETS_PER_LOOK_MAX {
            if self.is_ended || self.fault.is_some() {
                return;
            }
            let taken = match self.receiver.receive(self.stream.as_fd()) {
                Ok(Received::Nothing) => return,
                Ok(Received::End) => {
                    self.is_ended = true;
                    return;
                }
                Ok(Received::Packet(packet, file)) => self.regions.take(packet, file, self.consumer.head()),
                Ok(Received::Malformed) => Err(violation("a packet on the stream is malformed")),
                Ok(Received::NoDescriptor) => Err(Fault::new(
                    FaultKind::System,
                    "a peer's memory could not be taken in because all file descriptors are in use: raise the limit on open files (ulimit -n)",
                )),
                Err(errno) => return self.stream_failed(errno),
            };
            if let Err(fault) = taken {
                self.fault = Some(fault.at(self.peer));
            }
        }
    }

    /// The tokens of the writes that were not carried out.
    pub(super) fn take_tokens(&mut self) -> impl Iterator<Item = u64> {
        self.writes.drain(..).map(|(token, _)| token)
    }

    fn push(&mut self, words: &[u64], bytes: &[u8]) -> Result<(), Refused> {
        if self.is_ended || self.fault.is_some() {
            return Err(Refused::NoLink);
        }
        match self.producer.push(&self.own, &self.theirs, words, bytes) {
            Ok(true) => {
                self.is_starved = false;
                if self.bell.must_ring(&self.theirs, Awaits::Records) {
                    self.ring();
                }
                Ok(())
            }
            Ok(false) => {
                self.is_starved = true;
                Err(Refused::Full)
            }
            Err(Broken(reason)) => {
                self.fault = Some(violation(reason).at(self.peer));
                Err(Refused::NoLink)
            }
        }
    }

    /// Delivers records. Returns how much happened, and whether nothing is left that could be delivered.
    fn deliver(
        &mut self,
        own_regions: &OwnRegions,
        record: &mut [u64],
        sink: &mut dyn Sink,
    ) -> Result<(usize, bool), Fault> {
        let mut count = 0;
        let mut bytes_left = BYTES_PER_POLL_MAX;
        self.is_held = false;
        while count < RECORDS_PER_POLL_MAX && bytes_left > 0 {
            let Some(words) = self.consumer.peek(&self.theirs, record).map_err(|broken| self.broken(broken))? else {
                return Ok((count, true));
            };
            let parsed = Record::parse(&record[..words]).map_err(|broken| self.broken(broken))?;
            if parsed.announced > self.regions.heard() {
                self.look_at_stream();
                if let Some(fault) = self.fault.take() {
                    return Err(fault);
                }
                if parsed.announced > self.regions.heard() {
                    self.is_held = true;
                    return Ok((count, true));
                }
            }
            match parsed.body {
                Body::Message(message) => {
                    self.consumer.consume(&self.own, words);
                    sink.message(self.peer, message);
                }
                Body::Write(write) => {
                    if self.carry_out(own_regions, &write, &mut bytes_left, sink)? {
                        self.consumer.consume(&self.own, words);
                    }
                }
            }
            self.regions.let_go(self.consumer.head());
            count += 1;
        }
        Ok((count, false))
    }

    /// Carries out a write of the peer's, or discards it; of a large one only as much as `bytes_left` allows. Returns
    /// whether it is done with.
    fn carry_out(
        &mut self,
        own_regions: &OwnRegions,
        write: &Write<'_>,
        bytes_left: &mut u64,
        sink: &mut dyn Sink,
    ) -> Result<bool, Fault> {
        let Write { immediate, source, target, bytes } = *write;
        let place = own_regions.place(target, bytes);
        let is_welcome = (bytes == 0 || place.is_some())
            && (self.copied.is_some() || sink.admit(self.peer, immediate, target, bytes as usize));
        if is_welcome {
            let from = self.copied.unwrap_or(0);
            let count = (bytes - from).min(*bytes_left);
            if let Some(ours) = place.filter(|_| bytes > 0) {
                let is_copied = self
                    .regions
                    .place(source, bytes)
                    .is_some_and(|theirs| copy(theirs, source.offset + from, ours, target.offset + from, count));
                if !is_copied {
                    return Err(violation("a write's source is not within a region that it offers").at(self.peer));
                }
                // Once the peer has ended the link, it may change the source: what was copied may be neither old
                // nor new. If the flag is still down now, the copy was made before.
                self.theirs.fence(Ordering::Acquire);
                if self.theirs.load(CLOSED) != 0 {
                    return Err(self.died());
                }
                *bytes_left -= count;
                if from + count < bytes {
                    self.copied = Some(from + count);
                    return Ok(false);
                }
            }
            sink.written(self.peer, immediate, target, bytes as usize);
        }
        self.copied = None;
        self.carried_out += 1;
        self.own.store(DONE, self.carried_out, Ordering::Release);
        Ok(true)
    }

    /// Gives back the tokens of the writes that the peer has carried out.
    fn complete(&mut self, sink: &mut dyn Sink) -> Result<usize, Fault> {
        if self.writes.is_empty() {
            return Ok(0);
        }
        let done = self.theirs.load(DONE);
        // The peer read the sources before it counted them.
        self.theirs.fence(Ordering::Acquire);
        let count = done.wrapping_sub(self.writes_done);
        if count > self.writes.len() as u64 {
            return Err(violation("it counts writes that were never made").at(self.peer));
        }
        for (token, _) in self.writes.drain(..count as usize) {
            sink.sent(self.peer, token);
        }
        self.writes_done = done;
        Ok(count as usize)
    }

    /// Wakes the peer. A stream without room holds packets that the peer has not read, and those wake it.
    fn ring(&mut self) {
        match send(self.stream.as_fd(), Packet::Wake, None) {
            Ok(Sent::Yes | Sent::Later | Sent::Gone) => {}
            Err(errno) => self.stream_failed(errno),
        }
    }

    fn stream_failed(&mut self, errno: Errno) {
        let detail = format!(
            "the stream beside the shared memory failed ({errno}): start the job again, and report this if it happens again"
        );
        self.fault.get_or_insert(Fault::new(FaultKind::System, detail).at(self.peer));
    }

    fn broken(&self, broken: Broken) -> Fault {
        violation(broken.0).at(self.peer)
    }

    fn died(&self) -> Fault {
        Fault::new(
            FaultKind::RankDied,
            "its end of the shared-memory link closed without a farewell: look for its exit status and its last lines",
        )
        .at(self.peer)
    }
}

impl Drop for Link {
    /// Sources of our writes may change from now on; the peer must not take them for what was written.
    fn drop(&mut self) {
        self.own.store(CLOSED, 1, Ordering::Relaxed);
        self.own.fence(Ordering::SeqCst);
    }
}

pub(super) fn violation(reason: &str) -> Fault {
    let detail = format!(
        "a peer broke the rules of the shared-memory link ({reason}): run the same gradwire version on all ranks, and look for what overwrites its memory"
    );
    Fault::new(FaultKind::ProtocolViolation, detail)
}
