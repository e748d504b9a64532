//! A running job's door: who joins it comes in here, for the state first and then as a member.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use gradwire_proto::hello::{HelloParams, Purpose};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::accept::{Accepted, Acceptor};
use super::arrival::{Arrival, unusable};
use super::dial::{Dial, Dialled, routes};
use super::state::StateStream;
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
