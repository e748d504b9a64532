//! The hellos of connections that others opened: while a mesh comes up, and later at its door.
//!
//! Anybody can connect, so nothing here costs much: a bounded number of hellos at once, each bounded in time, fixed
//! message sizes, and no thread. Strangers are counted and traced at debug level; they never end the mesh.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use gradwire_proto::hello::{HelloParams, Purpose};
use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use super::Listeners;
use super::hello::{Conversation, HELLO_TIMEOUT, Progress};

/// Most hellos at once.
const PENDING_MAX: usize = 64;
/// When all places are taken, a hello that is older than this makes room: those of ranks take milliseconds.
const EVICTABLE_AFTER: Duration = Duration::from_secs(1);

/// A link that a peer opened and proved.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) peer: Rank,
    pub(crate) purpose: Purpose,
    pub(crate) socket: Socket,
    /// Over the Unix socket, and not TCP.
    pub(crate) is_unix: bool,
}

/// The listening side.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listeners: Listeners,
    pending: Vec<(Box<Conversation>, bool)>,
    /// Connections that came to nothing.
    pub(crate) turned_away: u64,
    /// Why the last one that looked like a rank of a job was turned away.
    pub(crate) last_fault: Option<Fault>,
}

impl Acceptor {
    pub(crate) fn new(listeners: Listeners) -> Self {
        Self { listeners, pending: Vec::new(), turned_away: 0, last_fault: None }
    }

    /// What to wait for.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>, now: Instant) {
        if self.has_place(now) {
            fds.push(PollFd::new(&self.listeners.tcp, PollFlags::IN));
            fds.extend(self.listeners.unix.iter().map(|unix| PollFd::new(unix, PollFlags::IN)));
        }
        for (conversation, _) in &self.pending {
            let flags = if conversation.is_writing() { PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::from_borrowed_fd(conversation.socket(), flags));
        }
    }

    /// Accepts and goes on with hellos as far as that is possible without waiting. A fault of a peer that proved the
    /// secret, but does not fit (another world size, a rank that cannot be), is returned: it will not get better.
    pub(crate) fn advance(&mut self, params: &HelloParams, now: Instant) -> Result<Vec<Accepted>, Fault> {
        self.take_connections(params, now)?;
        let mut accepted = Vec::new();
        for (conversation, is_unix) in std::mem::take(&mut self.pending) {
            let is_late = now.duration_since(conversation.since) > HELLO_TIMEOUT;
            match conversation.advance() {
                Progress::Waiting(_) if is_late => self.turn_away("no hello in time"),
                Progress::Waiting(conversation) => self.pending.push((conversation, is_unix)),
                Progress::Proved(peer, purpose, socket) => {
                    accepted.push(Accepted { peer, purpose, socket, is_unix });
                }
                Progress::Failed(fault) if fault.kind == FaultKind::WorldMismatch => return Err(fault),
                Progress::Failed(fault) => {
                    self.turn_away(&fault.detail);
                    if fault.kind != FaultKind::ProtocolViolation {
                        self.last_fault = Some(fault);
                    }
                }
            }
        }
        Ok(accepted)
    }

    fn take_connections(&mut self, params: &HelloParams, now: Instant) -> Result<(), Fault> {
        let mut open = [true, self.listeners.unix.is_some()];
        // By turns, so that a flood on one listener leaves the other its share.
        while open[0] || open[1] {
            for is_unix in [false, true] {
                let listener = if is_unix { self.listeners.unix.as_ref() } else { Some(&self.listeners.tcp) };
                let Some(listener) = listener.filter(|_| open[usize::from(is_unix)]) else { continue };
                if !self.has_place(now) {
                    return Ok(());
                }
                match listener.accept() {
                    Ok((socket, _)) => {
                        if socket.set_nonblocking(true).is_ok() {
                            self.make_place();
                            self.pending.push((Conversation::accept(socket, params, now)?, is_unix));
                        }
                    }
                    // Also when descriptors run out: the next round tries again, within the mesh's deadline.
                    Err(error) => open[usize::from(is_unix)] = error.kind() == ErrorKind::Interrupted,
                }
            }
        }
        Ok(())
    }

    /// Whether another connection can be taken now. Pending hellos are in the order of their age.
    fn has_place(&self, now: Instant) -> bool {
        let oldest = self.pending.first();
        self.pending.len() < PENDING_MAX
            || oldest.is_some_and(|(oldest, _)| now.duration_since(oldest.since) > EVICTABLE_AFTER)
    }

    fn make_place(&mut self) {
        if self.pending.len() >= PENDING_MAX {
            self.pending.remove(0);
            self.turn_away("more connections than places for hellos");
        }
    }

    pub(crate) fn turn_away(&mut self, why: &str) {
        self.turned_away += 1;
        tracing::debug!(why, count = self.turned_away, "a connection was turned away");
    }
}
