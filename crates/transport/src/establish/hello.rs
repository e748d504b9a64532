//! The hello on a socket that never blocks.

use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use gradwire_proto::hello::{HELLO_BYTES_MAX, Handshake, HelloBytes, HelloParams, NONCE_BYTES, Purpose, Rejected};
use gradwire_proto::{Fault, FaultKind, Rank};
use socket2::Socket;

/// How long one connection may take for its hello.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// One hello under way.
#[derive(Debug)]
pub(crate) struct Conversation {
    socket: Socket,
    handshake: Handshake,
    inbox: ArrayVec<u8, HELLO_BYTES_MAX>,
    outbox: HelloBytes,
    done: Option<(Rank, Purpose)>,
    pub(crate) since: Instant,
}

/// Where a hello stands.
#[derive(Debug)]
pub(crate) enum Progress {
    /// It waits for the peer.
    Waiting(Box<Conversation>),
    /// The peer proved itself: the socket is a link for this now.
    Proved(Rank, Purpose, Socket),
    /// It ended otherwise; the socket is closed.
    Failed(Fault),
}

impl Conversation {
    /// Begins a hello with `peer`, which was dialled. The socket is connected and does not block.
    pub(crate) fn dial(
        socket: Socket,
        params: &HelloParams,
        (peer, purpose): (Rank, Purpose),
        now: Instant,
    ) -> Result<Box<Self>, Fault> {
        let (handshake, first) = Handshake::dial(params, peer, purpose, nonce()?);
        Ok(Self::new(socket, handshake, first.into_iter().collect(), now))
    }

    /// Waits for the hello of a connection that was accepted. The socket does not block.
    pub(crate) fn accept(socket: Socket, params: &HelloParams, now: Instant) -> Result<Box<Self>, Fault> {
        let handshake = Handshake::accept(params, nonce()?);
        Ok(Self::new(socket, handshake, HelloBytes::new(), now))
    }

    fn new(socket: Socket, handshake: Handshake, outbox: HelloBytes, since: Instant) -> Box<Self> {
        Box::new(Self { socket, handshake, inbox: ArrayVec::new(), outbox, done: None, since })
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether it waits for room to write rather than for bytes to read.
    pub(crate) fn is_writing(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Goes on as far as it can without waiting.
    pub(crate) fn advance(mut self: Box<Self>) -> Progress {
        loop {
            match self.flush() {
                Ok(true) => {}
                Ok(false) => return Progress::Waiting(self),
                Err(_) => return Progress::Failed(self.handshake.closed()),
            }
            if let Some((peer, purpose)) = self.done {
                return Progress::Proved(peer, purpose, self.socket);
            }
            // Never more than what is due: what follows the hello belongs to the link.
            let mut bytes = [0; HELLO_BYTES_MAX];
            let due = self.handshake.wanted() - self.inbox.len();
            match (&self.socket).read(&mut bytes[..due]) {
                Ok(0) => return Progress::Failed(self.handshake.closed()),
                Ok(count) => self.inbox.extend(bytes[..count].iter().copied()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::Waiting(self),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Progress::Failed(self.handshake.closed()),
            }
            if self.inbox.len() == self.handshake.wanted() {
                match self.handshake.receive(&self.inbox) {
                    Ok(reply) => (self.outbox, self.done) = (reply.send, reply.done),
                    Err(Rejected { fault, send }) => {
                        // The last word is a courtesy; a peer that does not take it at once goes without.
                        let _ = self.socket.send_with_flags(&send, libc::MSG_NOSIGNAL);
                        return Progress::Failed(fault);
                    }
                }
                self.inbox.clear();
            }
        }
    }

    /// Writes what is due. Returns whether all of it is written.
    fn flush(&mut self) -> io::Result<bool> {
        while !self.outbox.is_empty() {
            match self.socket.send_with_flags(&self.outbox, libc::MSG_NOSIGNAL) {
                Ok(count) => {
                    self.outbox.drain(..count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], Fault> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| {
        Fault::new(FaultKind::System, format!("the system gives no random numbers ({error}): links cannot be proved"))
    })?;
    Ok(nonce)
}
