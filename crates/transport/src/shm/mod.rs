//! Links between ranks of one host: memory that each side writes for itself and the other maps for reading.
//!
//! Owns: the shared-memory backend. A link is two *lanes* (`ring.rs`), each a sealed memory file that one side writes
//! and the other can only read, and the Unix stream over which the two were exchanged, which stays open as the sign
//! of life, as the way for announcements of regions and as the doorbell (`packet.rs`). A message is a record in the
//! sender's ring. A write is a record that says where the payload lies in the sender's memory: the receiver copies it,
//! in [`Transport::poll`], to where it belongs.
//!
//! Invariants:
//! - No process maps memory of another for writing, and no descriptor's state is shared: a peer that breaks the rules
//!   loses its link, and can neither change our memory nor make us wait.
//! - Nothing has a name: memory files and sockets end with the processes that hold them, however those end.
//! - Between sleeps, polling makes one system call in `POLLS_PER_LOOK` polls; sending makes none to a peer that is
//!   awake. Nothing is allocated after links and regions are set up.

mod announce;
mod link;
#[cfg(all(test, loom))]
mod model;
mod packet;
mod record;
mod ring;
mod setup;
mod sys;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use gradwire_proto::limits::{MESSAGE_BYTES_MAX, WORLD_SIZE_MAX};
use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use rustix::event::epoll;

use crate::establish::{Arrival, Way};
use crate::region::Mapping;
use crate::{Buffer, Capabilities, Limits, Refused, Remote, Sink, Slice, Transport};
use link::Link;
use record::{IMMEDIATE_BYTES_MAX, RECORD_WORDS_MAX, WRITE_BYTES_MAX};
pub use setup::Opening;

/// Words of one direction's ring: 128 KiB.
const RING_WORDS: usize = 1 << 14;
/// Most writes under way to one peer.
const WRITES_MAX: usize = 1024;
/// How many polls pass between two looks at the streams, which tell of regions and of deaths.
const POLLS_PER_LOOK: u32 = 64;
/// How many streams one look finds ready; the others are found by the next.
const EVENTS_MAX: usize = 64;

const _: () = assert!(RING_WORDS.is_power_of_two() && RING_WORDS > 8 * RECORD_WORDS_MAX);

/// Links to peers on the same host. See the module's description.
#[derive(Debug)]
pub struct ShmTransport {
    links: Vec<Link>,
    /// For each rank the index of its link.
    slots: Vec<Option<usize>>,
    regions: OwnRegions,
    /// The streams of all links, with the rank as data.
    epoll: OwnedFd,
    /// The record that is being delivered: read from its own copy, which no peer can change.
    record: Box<[u64; RECORD_WORDS_MAX]>,
    /// Tokens of writes that were dropped by [`Transport::disconnect`], for the next poll.
    orphans: VecDeque<(Rank, u64)>,
    is_armed: bool,
    polls_since_look: u32,
}

/// Our registered regions.
#[derive(Debug, Default)]
struct OwnRegions(BTreeMap<RegionKey, OwnRegion>);

#[derive(Debug)]
struct OwnRegion {
    mapping: Arc<Mapping>,
    len: usize,
}

impl OwnRegions {
    /// The memory of a region, if it holds `bytes` bytes at `place`.
    fn place(&self, place: Remote, bytes: u64) -> Option<&Mapping> {
        let region = self.0.get(&place.region)?;
        sys::within(place.offset, bytes, region.len).then_some(&*region.mapping)
    }
}

impl ShmTransport {
    /// A transport without links.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when the system gives no descriptor.
    pub fn new() -> Result<Self, Fault> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| {
            Fault::new(
                FaultKind::System,
                format!("no epoll descriptor could be had ({errno}): raise the limit on open files (ulimit -n)"),
            )
        })?;
        Ok(Self {
            links: Vec::new(),
            slots: Vec::new(),
            regions: OwnRegions::default(),
            epoll,
            record: Box::new([0; RECORD_WORDS_MAX]),
            orphans: VecDeque::new(),
            is_armed: false,
            polls_since_look: 0,
        })
    }

    /// Sets up the link to `peer` over a stream whose other end does the same, after the hello: [`Self::open`] and
    /// [`Self::finish`] in one. Replaces the link to `peer` if there is one, as [`Transport::disconnect`] does.
    ///
    /// Waits for the other side until `deadline`. Ranks that attach several peers one after the other must do so in
    /// ascending order of rank, so that no circle of ranks wait for each other; or open all links, then finish all.
    ///
    /// # Errors
    /// A [`Fault`] that names `peer`: `DeadlineExceeded` or `RankDied` when the other side does not do its part,
    /// `ProtocolViolation`, `MemoryUnavailable`, `System`. No link is left behind then.
    pub fn attach(&mut self, peer: Rank, stream: UnixStream, deadline: Instant) -> Result<(), Fault> {
        let opening = Self::open(peer, stream)?;
        self.finish(opening, deadline)
    }

    /// Begins to set up a link, without waiting for the other side.
    ///
    /// # Errors
    /// As [`Self::attach`], and `InvalidArgument` for a rank that is out of range.
    pub fn open(peer: Rank, stream: UnixStream) -> Result<Opening, Fault> {
        if peer.0 >= WORLD_SIZE_MAX {
            let detail = format!("ranks of a job are below {WORLD_SIZE_MAX}: start fewer");
            return Err(Fault::new(FaultKind::InvalidArgument, detail).at(peer));
        }
        Opening::start(peer, stream)
    }

    /// Ends what [`Self::open`] began, waiting for the other side until `deadline`.
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn finish(&mut self, opening: Opening, deadline: Instant) -> Result<(), Fault> {
        let peer = opening.peer();
        self.disconnect(peer);
        let mut link = opening.finish(deadline)?;
        for (key, region) in &self.regions.0 {
            link.offer(*key, &region.mapping, region.len);
        }
        link.announce();
        let data = epoll::EventData::new_u64(u64::from(peer.0));
        epoll::add(&self.epoll, link.stream(), data, epoll::EventFlags::IN).map_err(|errno| {
            let detail = format!("the link's stream could not be watched ({errno}): raise fs.epoll.max_user_watches");
            Fault::new(FaultKind::System, detail).at(peer)
        })?;
        if self.slots.len() <= peer.index() {
            self.slots.resize(peer.index() + 1, None);
        }
        self.slots[peer.index()] = Some(self.links.len());
        self.links.push(link);
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<&Link> {
        self.slot(peer).and_then(|slot| self.links.get(slot))
    }

    fn link_mut(&mut self, peer: Rank) -> Option<&mut Link> {
        self.slot(peer).and_then(|slot| self.links.get_mut(slot))
    }

    fn slot(&self, peer: Rank) -> Option<usize> {
        self.slots.get(peer.index()).copied().flatten()
    }

    /// Takes a link out, and stops watching its stream.
    fn remove(&mut self, slot: usize) -> Link {
        let link = self.links.swap_remove(slot);
        let _ = epoll::delete(&self.epoll, link.stream());
        self.slots[link.peer().index()] = None;
        if let Some(moved) = self.links.get(slot) {
            self.slots[moved.peer().index()] = Some(slot);
        }
        link
    }

    /// Takes in what came over the streams.
    fn look_at_streams(&mut self) {
        self.polls_since_look = 0;
        let mut events = [std::mem::MaybeUninit::<epoll::Event>::uninit(); EVENTS_MAX];
        let no_wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = match epoll::wait(&self.epoll, &mut events[..], Some(&no_wait)) {
            Ok((ready, _)) => ready,
            // Nothing but an interruption can go wrong here; the next look makes up for it.
            Err(_) => return,
        };
        for event in ready {
            let rank = event.data.u64() as usize;
            if let Some(link) = self.slots.get(rank).copied().flatten().and_then(|slot| self.links.get_mut(slot)) {
                link.look_at_stream();
            }
        }
    }
}

impl Transport for ShmTransport {
    fn name(&self, _peer: Rank) -> &'static str {
        "shm"
    }

    fn capabilities(&self, _peer: Rank) -> Capabilities {
        Capabilities { peer_read: true, admission: true }
    }

    fn limits(&self) -> Limits {
        Limits {
            message_bytes_max: MESSAGE_BYTES_MAX,
            immediate_bytes_max: IMMEDIATE_BYTES_MAX,
            write_bytes_max: WRITE_BYTES_MAX,
        }
    }

    fn register(&mut self, buffer: &Buffer) -> Result<(), Fault> {
        let region = OwnRegion { mapping: Arc::clone(buffer.mapping()), len: buffer.len() };
        if self.regions.0.insert(buffer.key(), region).is_none() {
            for link in &mut self.links {
                link.offer(buffer.key(), buffer.mapping(), buffer.len());
                link.announce();
            }
        }
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        if self.regions.0.remove(&key).is_some() {
            for link in &mut self.links {
                link.withdraw(key);
                link.announce();
            }
        }
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<(), Refused> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(Refused::Invalid("the message is too long"));
        }
        self.link_mut(peer).ok_or(Refused::NoLink)?.send(message)
    }

    fn write(
        &mut self,
        peer: Rank,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        if immediate.len() > IMMEDIATE_BYTES_MAX {
            return Err(Refused::Invalid("the immediate is too long"));
        }
        if source.len() > WRITE_BYTES_MAX {
            return Err(Refused::Invalid("the payload is too long"));
        }
        if !source.is_empty() && !self.regions.0.contains_key(&source.key()) {
            return Err(Refused::Invalid("the source is not registered"));
        }
        self.link_mut(peer).ok_or(Refused::NoLink)?.write(immediate, source, target, token)
    }

    fn view(&self, peer: Rank, place: Remote, bytes: usize) -> Result<&[u8], Refused> {
        self.link(peer).ok_or(Refused::NoLink)?.view(place, bytes)
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> usize {
        let mut count = 0;
        while let Some((peer, token)) = self.orphans.pop_front() {
            sink.sent(peer, token);
            count += 1;
        }
        if std::mem::take(&mut self.is_armed) {
            self.links.iter().for_each(Link::wake_up);
            self.polls_since_look = POLLS_PER_LOOK;
        }
        self.polls_since_look += 1;
        if self.polls_since_look > POLLS_PER_LOOK {
            self.look_at_streams();
        }
        // Backwards, because a link that ends is replaced by the last one.
        for slot in (0..self.links.len()).rev() {
            match self.links[slot].progress(&self.regions, &mut self.record[..], sink) {
                Ok(happened) => count += happened,
                Err(fault) => {
                    let mut link = self.remove(slot);
                    let peer = link.peer();
                    link.take_tokens().for_each(|token| sink.sent(peer, token));
                    drop(link);
                    sink.peer_down(peer, fault);
                    count += 1;
                }
            }
        }
        count
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        for link in &mut self.links {
            link.fall_asleep();
            if let Err(errno) = link.watch(self.epoll.as_fd()) {
                tracing::warn!(peer = link.peer().0, %errno, "the stream of a link could not be watched for room");
            }
        }
        // Either a peer sees that we sleep, or we see what it published.
        fence(Ordering::SeqCst);
        self.orphans.is_empty() && !self.links.iter().any(Link::has_work)
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn welcome(&mut self, arrival: Arrival, deadline: Instant) -> Result<(), Fault> {
        match arrival.way {
            Way::Shm(opening) => self.finish(opening, deadline),
            Way::Tcp(_) => {
                let detail = "a link over tcp cannot be taken up by shared memory";
                Err(Fault::new(FaultKind::InvalidArgument, detail).at(arrival.peer))
            }
        }
    }

    fn disconnect(&mut self, peer: Rank) {
        if let Some(slot) = self.slot(peer) {
            let mut link = self.remove(slot);
            self.orphans.extend(link.take_tokens().map(|token| (peer, token)));
        }
    }

    fn is_flushed(&self, peer: Rank) -> bool {
        self.link(peer).is_none_or(Link::is_flushed)
    }
}
