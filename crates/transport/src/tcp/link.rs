//! One TCP link: its socket, what waits to go out, and what comes in.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use socket2::{SockRef, TcpKeepalive};

use super::queue::SendQueue;
use super::regions::Regions;
use super::stream::{Receiver, Violation};
use super::sys;
use crate::Sink;

/// Bytes that one link may move each way in one poll before the others have their turn.
const BYTES_PER_POLL: usize = 2 * 1024 * 1024;
/// A host that has answered nothing for so long, while something was asked of it, is gone.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A link to one peer.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: Rank,
    address: Option<SocketAddr>,
    stream: TcpStream,
    pub(super) queue: SendQueue,
    receiver: Receiver,
    /// The socket may have something to read, as far as is known (readiness is edge-triggered).
    readable: bool,
    /// The socket may have room.
    writable: bool,
    /// The peer closed, or the link failed: read on until the end, without waiting for another edge.
    ending: bool,
    /// Whether the link is on the transport's list of links with work.
    pub(super) listed: bool,
}

/// What one turn of a link came to.
pub(super) struct Turn {
    /// Bytes moved.
    pub(super) moved: usize,
    /// Why the link ended, if it did.
    pub(super) end: Option<Fault>,
}

impl Link {
    /// Takes over a connection whose other end proved to be `peer`.
    pub(super) fn new(peer: Rank, stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // An idle link: the host is asked after 4 s, and gone after three unanswered questions, 2 s apart. A link
        // with data on its way is watched by `silence`. (TCP_USER_TIMEOUT would do both, but it also ends links to
        // hosts that answer while the process at the other end is stopped and reads nothing.)
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(4)).with_interval(Duration::from_secs(2)).with_retries(3);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Self {
            peer,
            address: stream.peer_addr().ok(),
            stream,
            queue: SendQueue::new(),
            receiver: Receiver::new(peer),
            readable: true,
            writable: true,
            ending: false,
            listed: false,
        })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) const fn discarded(&self) -> u64 {
        self.receiver.discarded()
    }

    pub(super) fn forget_region(&mut self, key: RegionKey) {
        self.receiver.forget_region(key);
    }

    /// Notes what the kernel said about the socket.
    pub(super) fn ready(&mut self, readable: bool, writable: bool, ending: bool) {
        self.readable |= readable;
        self.writable |= writable;
        self.ending |= ending;
    }

    /// Whether a turn could move something.
    pub(super) fn has_work(&self) -> bool {
        self.readable || self.ending || (self.writable && !self.queue.is_empty())
    }

    /// Moves what can be moved, sends and receives by turns, within the budget of one poll.
    pub(super) fn turn(&mut self, regions: &Regions, sink: &mut dyn Sink) -> Turn {
        let mut moved = 0;
        let mut sent_bytes = 0;
        let mut received_bytes = 0;
        while sent_bytes < BYTES_PER_POLL && received_bytes < BYTES_PER_POLL {
            let sent = self.send(sink);
            let received = match self.receive(regions, sink) {
                Ok(received) => received,
                Err(end) => return Turn { moved: moved + sent, end: Some(self.fault(&end)) },
            };
            if sent + received == 0 {
                break;
            }
            sent_bytes += sent;
            received_bytes += received;
            moved += sent + received;
        }
        Turn { moved, end: None }
    }

    /// One send, if there is something to send and room for it. Returns the bytes that the kernel took.
    fn send(&mut self, sink: &mut dyn Sink) -> usize {
        if !self.writable || self.queue.is_empty() {
            return 0;
        }
        match sys::send(self.stream.as_fd(), self.queue.parts()) {
            Ok((offered, sent)) => {
                self.writable = sent == offered;
                self.queue.advance(sent, |token| sink.sent(self.peer, token));
                sent
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                0
            }
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "sending failed");
                // What has arrived is delivered before the link ends: no more is sent, and reading finds the end.
                self.queue.clear(|token| sink.sent(self.peer, token));
                let _ = self.stream.shutdown(std::net::Shutdown::Both);
                self.writable = false;
                self.ending = true;
                0
            }
        }
    }

    /// One receive, if there may be something. Returns the bytes that came.
    fn receive(&mut self, regions: &Regions, sink: &mut dyn Sink) -> Result<usize, End> {
        if !self.readable && !self.ending {
            return Ok(0);
        }
        let (landing, spill) = self.receiver.room();
        let wanted = landing.as_ref().map_or(0, |landing| landing.len) + spill.len();
        match sys::receive(self.stream.as_fd(), landing.as_ref(), spill) {
            Ok(0) => Err(End::Closed { in_mid_item: !self.receiver.is_between_items() }),
            Ok(bytes) => {
                // A short read emptied the socket: what comes later makes a new edge.
                self.readable = bytes == wanted;
                self.receiver.advance(bytes, regions, sink).map_err(End::Violation)?;
                Ok(bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                (self.readable, self.ending) = (false, false);
                Ok(0)
            }
            Err(error) => Err(End::Failed(error)),
        }
    }

    /// The fault of a peer whose host stopped answering, if it did: asked every few seconds.
    pub(super) fn silence(&self) -> Option<Fault> {
        let silence = sys::silence(self.stream.as_fd()).ok()?;
        (silence.unanswered >= 2 && silence.since >= SILENCE_MAX).then(|| self.fault(&End::Silent(silence.since)))
    }

    fn fault(&self, end: &End) -> Fault {
        let peer = self.peer;
        let address = self.address.map_or_else(String::new, |address| format!(" at {address}"));
        match end {
            End::Closed { in_mid_item } => {
                let middle = if *in_mid_item { ", in the middle of a message" } else { "" };
                Fault::new(
                    FaultKind::RankDied,
                    format!("the link to {peer}{address} closed without a farewell{middle}: its process exited or was killed, see its own output"),
                )
            }
            End::Failed(error) => Fault::new(
                FaultKind::RankDied,
                format!("the link to {peer}{address} failed ({error}): its process was killed, its host went down, or the network between them"),
            ),
            End::Silent(since) => Fault::new(
                FaultKind::RankDied,
                format!("the host of {peer}{address} has not answered for {} s: it went down, or the network between them", since.as_secs()),
            ),
            End::Violation(Violation(field)) => Fault::new(
                FaultKind::ProtocolViolation,
                format!("{peer}{address} sent what is not in gradwire's link format ({field}), and lost its link: check that all ranks run the same version, and that nothing on the network changes data"),
            ),
        }
        .at(peer)
    }
}

/// Why a link ended.
enum End {
    Closed { in_mid_item: bool },
    Failed(io::Error),
    Silent(Duration),
    Violation(Violation),
}
