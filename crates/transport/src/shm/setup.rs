//! Setting a link up: each side hands its lane to the other.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::RING_WORDS;
use super::link::{Link, violation};
use super::packet::{Packet, Received, Receiver, Sent, send};
use super::sys::{OwnLane, PeerLane};

/// A link whose lane has been handed to the other side, and that waits for theirs. Dropping it closes the stream.
#[derive(Debug)]
pub struct Opening {
    peer: Rank,
    stream: OwnedFd,
    own: OwnLane,
    is_sent: bool,
}

impl Opening {
    /// Makes a lane and hands it to the other side of `stream`, without waiting.
    pub(super) fn start(peer: Rank, stream: UnixStream) -> Result<Self, Fault> {
        let own = OwnLane::allocate(RING_WORDS).map_err(|errno| {
            let detail = format!("{} bytes for a shared-memory link could not be had ({errno}): free memory, or raise the container's memory limit or the limit on open files (ulimit -n)", RING_WORDS * 8);
            Fault::new(FaultKind::MemoryUnavailable, detail).at(peer)
        })?;
        let mut opening = Self { peer, stream: stream.into(), own, is_sent: false };
        opening.send()?;
        Ok(opening)
    }

    /// The rank at the other side.
    #[must_use]
    pub const fn peer(&self) -> Rank {
        self.peer
    }

    pub(crate) const fn stream(&self) -> &OwnedFd {
        &self.stream
    }

    /// Takes the other side's lane in, waiting for it until `deadline`.
    pub(super) fn finish(mut self, deadline: Instant) -> Result<Link, Fault> {
        let peer = self.peer;
        while !self.is_sent {
            wait(peer, &self.stream, PollFlags::OUT, deadline)?;
            self.send()?;
        }
        let mut receiver = Receiver::default();
        let (ring_words, file) = loop {
            match receiver.receive(self.stream.as_fd()) {
                Ok(Received::Packet(Packet::Setup { ring_words }, Some(file))) => break (ring_words, file),
                Ok(Received::Nothing) => wait(peer, &self.stream, PollFlags::IN, deadline)?,
                Ok(Received::End) => return Err(gone(peer)),
                Ok(Received::NoDescriptor) => return Err(system(peer, Errno::MFILE)),
                Ok(Received::Packet(..) | Received::Malformed) => {
                    return Err(violation("its first packet is not the setup of a link").at(peer));
                }
                Err(errno) => return Err(system(peer, errno)),
            }
        };
        if ring_words != RING_WORDS as u64 {
            return Err(violation("its ring is of another size").at(peer));
        }
        let theirs = PeerLane::map(file, RING_WORDS).map_err(|errno| match errno {
            Errno::PERM | Errno::INVAL | Errno::BADF => violation("its memory file is not what it says").at(peer),
            errno => system(peer, errno),
        })?;
        Ok(Link::new(peer, self.stream, self.own, theirs))
    }

    fn send(&mut self) -> Result<(), Fault> {
        let setup = Packet::Setup { ring_words: RING_WORDS as u64 };
        match send(self.stream.as_fd(), setup, Some(self.own.file())) {
            Ok(Sent::Yes) => self.is_sent = true,
            Ok(Sent::Later) => {}
            Ok(Sent::Gone) => return Err(gone(self.peer)),
            Err(errno) => return Err(system(self.peer, errno)),
        }
        Ok(())
    }
}

/// Waits until the stream is ready or the deadline has passed.
fn wait(peer: Rank, stream: &OwnedFd, ready_for: PollFlags, deadline: Instant) -> Result<(), Fault> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        let detail = "it did not set up its side of the shared-memory link before the deadline: look whether it is alive, or allow more time";
        return Err(Fault::new(FaultKind::DeadlineExceeded, detail).at(peer));
    }
    let timeout =
        Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() };
    match rustix::event::poll(&mut [PollFd::new(stream, ready_for)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(system(peer, errno)),
    }
}

fn gone(peer: Rank) -> Fault {
    let detail =
        "it closed the stream before the shared-memory link was set up: look for its exit status and its last lines";
    Fault::new(FaultKind::RankDied, detail).at(peer)
}

fn system(peer: Rank, errno: Errno) -> Fault {
    let detail = format!(
        "a shared-memory link could not be set up ({errno}): check the limits on open files (ulimit -n) and memory"
    );
    Fault::new(FaultKind::System, detail).at(peer)
}
