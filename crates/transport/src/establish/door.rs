//! A running job's door: who joins it comes in here, for the state first and then as a member.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use gradwire_proto::hello::{HelloParams, Purpose};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::Socket;

use super::accept::{Accepted, Acceptor};
use super::arrival::{Arrival, unusable};
use super::dial::{Dial, Dialled, routes};
use crate::mesh::Choice;

/// How often a dial looks whether it may go on, at least.
const TICK: Duration = Duration::from_millis(20);

/// The listening sockets of a member, after its mesh came up. Dropping it closes them.
#[derive(Debug)]
pub struct Door {
    acceptor: Acceptor,
    choice: Choice,
}

/// Who came in.
#[derive(Debug)]
pub enum Caller {
    /// A process that is, or is to be, a member: its link.
    Link(Arrival),
    /// A process that wants the state.
    State(Rank, StateStream),
}

/// A stream over which state is given away: blocks, with time-outs.
#[derive(Debug)]
pub struct StateStream(Socket);

impl Door {
    pub(crate) const fn new(acceptor: Acceptor, choice: Choice) -> Self {
        Self { acceptor, choice }
    }

    /// Waits until somebody may be there, `wake` is readable or `timeout` has passed.
    pub fn wait(&self, wake: BorrowedFd<'_>, timeout: Duration) {
        let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        self.acceptor.watch(&mut fds, Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Interrupted or not: the caller looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }

    /// Goes on with hellos as far as that is possible without waiting. Whoever does not fit is turned away, traced at
    /// debug level, and told why where it proved that it knows the secret.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when the system gives no random numbers.
    pub fn advance(&mut self, params: &HelloParams) -> Result<Vec<Caller>, Fault> {
        let mut callers = Vec::new();
        match self.acceptor.advance(params, Instant::now()) {
            Ok(accepted) => {
                for one in accepted {
                    match self.take(one) {
                        Ok(caller) => callers.push(caller),
                        Err(fault) => self.acceptor.turn_away(&fault.detail),
                    }
                }
            }
            Err(fault) if fault.kind == FaultKind::WorldMismatch => self.acceptor.turn_away(&fault.detail),
            Err(fault) => return Err(fault),
        }
        Ok(callers)
    }

    fn take(&self, accepted: Accepted) -> Result<Caller, Fault> {
        let Accepted { peer, purpose, socket, is_unix } = accepted;
        if purpose == Purpose::State {
            return StateStream::over(socket)
                .map(|stream| Caller::State(peer, stream))
                .map_err(|error| unusable(peer, &error));
        }
        if !self.choice.allows(is_unix) {
            let detail = format!("{peer} opened its link over another transport: give every rank the same --transport");
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(peer));
        }
        Arrival::new(peer, socket, is_unix).map(Caller::Link)
    }
}

/// Opens a stream to a member that gives its state away.
///
/// # Errors
/// A [`Fault`] that names the peer and every address that was tried: `AddressUnreachable` when nothing answers there,
/// `DeadlineExceeded` at `deadline`; what `stop` returned.
pub fn dial_state(
    (ours, theirs): (&Endpoint, &Endpoint),
    params: &HelloParams,
    peer: Rank,
    deadline: Instant,
    stop: &dyn Fn() -> Option<Fault>,
) -> Result<StateStream, Fault> {
    let mut dial = Dial::new(peer, Purpose::State, routes(ours, theirs, true, true), Instant::now());
    loop {
        let now = Instant::now();
        match dial.advance(params, now, true) {
            Dialled::Pending => {}
            Dialled::Linked { socket, .. } => {
                return StateStream::over(socket).map_err(|error| unusable(peer, &error));
            }
            Dialled::Failed(fault) => return Err(fault),
        }
        if let Some(fault) = stop() {
            return Err(fault);
        }
        if now >= deadline {
            return Err(Fault { kind: FaultKind::DeadlineExceeded, ..dial.unreachable() });
        }
        let mut fds = Vec::new();
        dial.watch(&mut fds);
        let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }
}

impl StateStream {
    fn over(socket: Socket) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        // Of no use, and not possible, on Unix sockets.
        let _ = socket.set_tcp_nodelay(true);
        Ok(Self(socket))
    }

    /// How long reading and writing may wait for the other side.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.0.set_read_timeout(Some(timeout))?;
        self.0.set_write_timeout(Some(timeout))
    }

    /// Another handle on the same stream: e.g. to end it from another thread.
    ///
    /// # Errors
    /// What the system says.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the stream in both directions: whoever waits on it wakes up.
    pub fn end(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Read for StateStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for StateStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Whoever writes to a peer that is gone gets an error, not a signal.
        self.0.send_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
