//! Links over TCP.
//!
//! Owns sockets that [`crate::establish`] connected and proved, and moves messages and writes over them in the link
//! format (docs/wire.md, section 8). Payloads are received straight into the registered memory they are meant for,
//! and sent straight from it, many frames in one call. One thread drives all links without ever waiting.
//!
//! A link ends when its peer closes it, breaks the format, or its host stops answering for 10 seconds while
//! something is wanted from it. A peer that is only slow, or stopped, keeps its link for as long as its host answers.

mod header;
mod link;
mod queue;
mod regions;
mod stream;
mod sys;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use gradwire_proto::limits::{MESSAGE_BYTES_MAX, WORLD_SIZE_MAX};
use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use rustix::event::{Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use self::link::Link;
use self::regions::Regions;
use crate::establish::{Arrival, Way};
use crate::{Buffer, Capabilities, Limits, Refused, Remote, Sink, Slice, Transport};

/// Largest immediate of a write.
const IMMEDIATE_BYTES_MAX: usize = 256;
/// Largest payload of one write.
const WRITE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How often links with data on their way are checked for hosts that stopped answering.
const WATCH_SECONDS: i64 = 2;
/// The timer's mark among the epoll descriptor's events; the others carry ranks.
const TIMER: u64 = u64::MAX;
/// Most events taken in one poll. What is left over keeps the descriptor readable.
const EVENTS_MAX: usize = 64;

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The TCP backend.
#[derive(Debug)]
pub struct TcpTransport {
    epoll: OwnedFd,
    timer: OwnedFd,
    links: Vec<Option<Box<Link>>>,
    regions: Regions,
    /// Ranks of links that may have something to move, each at most once.
    work: VecDeque<Rank>,
    /// Writes of links that were disconnected, whose tokens the next poll gives back.
    returned: VecDeque<(Rank, u64)>,
    watch_due: bool,
    /// Writes not let in on links that are gone.
    discarded_before: u64,
}

impl TcpTransport {
    /// A transport without links.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when descriptors run out.
    pub fn new() -> Result<Self, Fault> {
        let create = || {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
            epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
            Ok((epoll, timer))
        };
        let (epoll, timer) = create().map_err(|errno: rustix::io::Errno| {
            Fault::new(
                FaultKind::System,
                format!("no descriptors for TCP links ({errno}): raise the limit on open files (ulimit -n)"),
            )
        })?;
        Ok(Self {
            epoll,
            timer,
            links: Vec::new(),
            regions: Regions::default(),
            work: VecDeque::new(),
            returned: VecDeque::new(),
            watch_due: false,
            discarded_before: 0,
        })
    }

    /// Makes `stream`, whose other end proved to be `peer`, the link to it. Replaces the link to `peer` if there is
    /// one, as [`Transport::disconnect`] does.
    ///
    /// # Errors
    /// A [`Fault`] of kind `InvalidArgument` when the rank is out of range, `System` when the system refuses. No
    /// link is left behind then.
    pub fn attach(&mut self, peer: Rank, stream: TcpStream) -> Result<(), Fault> {
        if peer.0 >= WORLD_SIZE_MAX {
            let detail = format!("a job has at most {WORLD_SIZE_MAX} ranks: use a smaller world");
            return Err(Fault::new(FaultKind::InvalidArgument, detail).at(peer));
        }
        self.disconnect(peer);
        let refused = |error: std::io::Error| {
            Fault::new(FaultKind::System, format!("the socket to {peer} cannot be used ({error})")).at(peer)
        };
        let mut link = Box::new(Link::new(peer, stream).map_err(refused)?);
        self.watch_every(WATCH_SECONDS).map_err(|errno| refused(errno.into()))?;
        let interest =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.epoll, link.socket(), epoll::EventData::new_u64(u64::from(peer.0)), interest)
            .map_err(|errno| refused(errno.into()))?;
        if self.links.len() <= peer.index() {
            self.links.resize_with(peer.index() + 1, || None);
            // Room for every link now, so that polling never allocates.
            self.work.reserve(self.links.len().saturating_sub(self.work.len()));
        }
        if !self.work.contains(&peer) {
            self.work.push_back(peer);
        }
        link.listed = true;
        self.links[peer.index()] = Some(link);
        Ok(())
    }

    /// Looks after the links this often; never where the seconds are 0, as while there is none: nobody has to poll then.
    fn watch_every(&self, seconds: i64) -> Result<(), rustix::io::Errno> {
        let interval = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let period = Itimerspec { it_interval: interval, it_value: interval };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &period).map(drop)
    }

    /// How many writes of peers were not let in so far: refused by [`Sink::admit`], or not within registered memory.
    #[must_use]
    pub fn discarded_writes(&self) -> u64 {
        self.discarded_before + self.links.iter().flatten().map(|link| link.discarded()).sum::<u64>()
    }

    fn link(&self, peer: Rank) -> Option<&Link> {
        self.links.get(peer.index())?.as_deref()
    }

    fn link_mut(&mut self, peer: Rank) -> Option<&mut Link> {
        self.links.get_mut(peer.index())?.as_deref_mut()
    }

    /// Puts a link on the list of those with work, if it has some.
    fn list(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(peer.index()).and_then(Option::as_deref_mut) else { return };
        if !link.listed && link.has_work() {
            link.listed = true;
            self.work.push_back(peer);
        }
    }

    /// Takes the kernel's word on what is ready, without waiting.
    fn collect_events(&mut self) {
        let mut room = [MaybeUninit::uninit(); EVENTS_MAX];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut room, Some(&NOW)) else { return };
        for event in events {
            let epoll::Event { flags, data, .. } = *event;
            if data.u64() == TIMER {
                let mut expirations = [0; 8];
                let _ = rustix::io::read(&self.timer, &mut expirations);
                self.watch_due = true;
                continue;
            }
            let peer = Rank(data.u64() as u32);
            let ended = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            let ending = flags.intersects(ended);
            if let Some(link) = self.link_mut(peer) {
                link.ready(flags.contains(epoll::EventFlags::IN), flags.contains(epoll::EventFlags::OUT), ending);
            }
            self.list(peer);
        }
    }

    /// Ends links whose hosts stopped answering.
    fn watch(&mut self, sink: &mut dyn Sink) -> usize {
        let mut ended = 0;
        for index in 0..self.links.len() {
            let silence = self.links[index].as_deref().and_then(Link::silence);
            if let Some(fault) = silence {
                self.end(Rank(index as u32), fault, sink);
                ended += 1;
            }
        }
        ended
    }

    fn end(&mut self, peer: Rank, fault: Fault, sink: &mut dyn Sink) {
        if let Some(mut link) = self.detach(peer) {
            link.queue.clear(|token| sink.sent(peer, token));
            sink.peer_down(peer, fault);
        }
    }

    /// Takes the link out; dropping it closes the socket.
    fn detach(&mut self, peer: Rank) -> Option<Box<Link>> {
        let link = self.links.get_mut(peer.index())?.take()?;
        let _ = epoll::delete(&self.epoll, link.socket());
        self.discarded_before += link.discarded();
        if self.links.iter().all(Option::is_none) {
            // Cannot fail; if it did, somebody would poll in vain.
            let _ = self.watch_every(0);
            self.watch_due = false;
        }
        Some(link)
    }
}

impl Transport for TcpTransport {
    fn name(&self, _: Rank) -> &'static str {
        "tcp"
    }

    fn capabilities(&self, _: Rank) -> Capabilities {
        Capabilities { peer_read: false, admission: true }
    }

    fn limits(&self) -> Limits {
        Limits {
            message_bytes_max: MESSAGE_BYTES_MAX,
            immediate_bytes_max: IMMEDIATE_BYTES_MAX,
            write_bytes_max: WRITE_BYTES_MAX,
        }
    }

    fn register(&mut self, buffer: &Buffer) -> Result<(), Fault> {
        self.regions.insert(buffer);
        Ok(())
    }

    fn deregister(&mut self, key: RegionKey) {
        self.regions.remove(key);
        for link in self.links.iter_mut().flatten() {
            link.forget_region(key);
        }
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<(), Refused> {
        let link = self.link_mut(peer).ok_or(Refused::NoLink)?;
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(Refused::Invalid("the message is longer than Limits::message_bytes_max"));
        }
        link.queue.push_message(message)?;
        self.list(peer);
        Ok(())
    }

    fn write(
        &mut self,
        peer: Rank,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        let registered = source.is_empty() || self.regions.contains(source.key());
        let link = self.link_mut(peer).ok_or(Refused::NoLink)?;
        if immediate.len() > IMMEDIATE_BYTES_MAX {
            return Err(Refused::Invalid("the immediate is longer than Limits::immediate_bytes_max"));
        }
        if source.len() > WRITE_BYTES_MAX {
            return Err(Refused::Invalid("the write is longer than Limits::write_bytes_max"));
        }
        if !registered {
            return Err(Refused::Invalid("the source is not in registered memory"));
        }
        link.queue.push_write(immediate, source, target, token)?;
        self.list(peer);
        Ok(())
    }

    fn view(&self, peer: Rank, _: Remote, _: usize) -> Result<&[u8], Refused> {
        self.link(peer).ok_or(Refused::NoLink)?;
        Err(Refused::Invalid("tcp cannot read a peer's memory in place"))
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> usize {
        let mut happened = 0;
        while let Some((peer, token)) = self.returned.pop_front() {
            sink.sent(peer, token);
            happened += 1;
        }
        self.collect_events();
        if std::mem::take(&mut self.watch_due) {
            happened += self.watch(sink);
        }
        for _ in 0..self.work.len() {
            let Some(peer) = self.work.pop_front() else { break };
            let Some(link) = self.links.get_mut(peer.index()).and_then(Option::as_deref_mut) else { continue };
            link.listed = false;
            let turn = link.turn(&self.regions, sink);
            happened += turn.moved;
            match turn.end {
                Some(fault) => {
                    self.end(peer, fault, sink);
                    happened += 1;
                }
                None => self.list(peer),
            }
        }
        happened
    }

    fn arm(&mut self) -> bool {
        if !self.work.is_empty() || !self.returned.is_empty() || self.watch_due {
            return false;
        }
        // Readiness is edge-triggered: what came up before now must not be slept through, what comes up after now
        // makes the descriptor readable.
        self.collect_events();
        self.work.is_empty() && !self.watch_due
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn welcome(&mut self, arrival: Arrival, _deadline: Instant) -> Result<(), Fault> {
        match arrival.way {
            Way::Tcp(stream) => self.attach(arrival.peer, stream),
            Way::Shm(_) => {
                let detail = "a link over shared memory cannot be taken up by tcp";
                Err(Fault::new(FaultKind::InvalidArgument, detail).at(arrival.peer))
            }
        }
    }

    fn disconnect(&mut self, peer: Rank) {
        let Some(mut link) = self.detach(peer) else { return };
        let returned = &mut self.returned;
        link.queue.clear(|token| returned.push_back((peer, token)));
        self.work.retain(|listed| *listed != peer);
    }

    fn is_flushed(&self, peer: Rank) -> bool {
        self.link(peer).is_none_or(|link| link.queue.is_empty())
    }
}
