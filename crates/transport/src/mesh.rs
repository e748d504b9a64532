//! Bringing up a job's mesh: one link between every two ranks.
//!
//! The higher rank of two dials the lower one: over its abstract Unix socket where both are on one host (that link
//! is shared memory then), else over TCP at the addresses it advertises. One loop does it all without ever waiting
//! for one peer alone, and ends by its deadline with links or with a fault that names who is missing and why.

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use gradwire_proto::hello::HelloParams;
use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::Timespec;
use socket2::Socket;

use crate::establish::Listeners;
use crate::establish::accept::{Accepted, Acceptor};
use crate::establish::dial::{Dial, Dialled, routes};
use crate::links::{Backend, Links};
use crate::shm::ShmTransport;
use crate::tcp::TcpTransport;

/// Most peers that are dialled at once.
const DIALS_MAX: usize = 64;
/// How often the caller's `stop` is asked, at least.
const TICK: Duration = Duration::from_millis(100);
/// The same while there are peers to be dialled again.
const TICK_WHILE_DIALLING: Duration = Duration::from_millis(10);

/// Which backends may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Shared memory between ranks of one host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory only: all ranks must be on one host.
    Shm,
    /// TCP only.
    Tcp,
}

/// What a rank has to know to bring up its links.
#[derive(Clone, Debug)]
pub struct MeshConfig {
    /// Who this rank is.
    pub hello: HelloParams,
    /// Where each rank can be reached, by rank, this one included.
    pub members: Vec<Endpoint>,
    /// Which backends may be used: the same on every rank.
    pub choice: Choice,
    /// How long all of it may take.
    pub deadline: Duration,
}

impl Listeners {
    /// Brings up the links to all peers, and closes the listening sockets. `stop` is asked several times a second: a
    /// fault learned elsewhere ends the wait.
    ///
    /// # Errors
    /// A [`Fault`], by the deadline at the latest; everything that was opened is closed again then. `InvalidArgument`
    /// or `WorldMismatch` when the configuration, or a peer's, does not fit; `AddressUnreachable`, with every address
    /// that was tried, when a peer cannot be reached; `SecretMismatch` and `ProtocolVersion` from the hello;
    /// `DeadlineExceeded` with the ranks that are missing; what `stop` returned.
    pub fn connect(self, config: &MeshConfig, stop: &dyn Fn() -> Option<Fault>) -> Result<Links, Fault> {
        check(config)?;
        let now = Instant::now();
        let mut mesh = Mesh {
            config,
            dials: (0..config.hello.rank.0).map(|peer| dial(config, Rank(peer), now)).collect(),
            acceptor: Acceptor::new(self),
            links: config.members.iter().map(|_| None).collect(),
            deadline: now + config.deadline,
        };
        while mesh.missing().next().is_some() {
            if let Some(fault) = stop() {
                return Err(fault);
            }
            let now = Instant::now();
            mesh.advance(now)?;
            if now >= mesh.deadline && mesh.missing().next().is_some() {
                return Err(mesh.overdue());
            }
            mesh.wait(now);
        }
        mesh.finish()
    }
}

/// A mesh that comes up.
struct Mesh<'a> {
    config: &'a MeshConfig,
    acceptor: Acceptor,
    dials: Vec<Dial>,
    links: Vec<Option<Proved>>,
    deadline: Instant,
}

/// A connection whose other end proved itself.
struct Proved {
    socket: Socket,
    is_unix: bool,
}

impl Mesh<'_> {
    fn missing(&self) -> impl Iterator<Item = Rank> {
        let own = self.config.hello.rank;
        let ranks = (0..).map(Rank).zip(&self.links);
        ranks.filter(move |(rank, link)| link.is_none() && *rank != own).map(|(rank, _)| rank)
    }

    /// Does what can be done without waiting.
    fn advance(&mut self, now: Instant) -> Result<(), Fault> {
        let params = &self.config.hello;
        for accepted in self.acceptor.advance(params, now)? {
            self.take_accepted(accepted)?;
        }
        let mut active = self.dials.iter().filter(|dial| dial.is_active()).count();
        let mut linked = Vec::new();
        for dial in &mut self.dials {
            let was_active = dial.is_active();
            match dial.advance(params, now, active < DIALS_MAX) {
                Dialled::Pending => {}
                Dialled::Linked { socket, is_unix } => linked.push((dial.peer, Proved { socket, is_unix })),
                Dialled::Failed(fault) => return Err(fault),
            }
            active = active + usize::from(dial.is_active()) - usize::from(was_active);
        }
        for (peer, proved) in linked {
            tracing::debug!(%peer, is_unix = proved.is_unix, "linked");
            self.links[peer.index()] = Some(proved);
            self.dials.retain(|dial| dial.peer != peer);
        }
        Ok(())
    }

    /// Takes a link that a peer opened: of a higher rank, once, over what was chosen.
    fn take_accepted(&mut self, accepted: Accepted) -> Result<(), Fault> {
        let Accepted { peer, socket, is_unix } = accepted;
        let own = self.config.hello.rank;
        if peer <= own || peer.index() >= self.links.len() {
            let detail = format!("{peer} dialled {own}, but the higher rank dials: run the same release on every rank");
            return Err(Fault::new(FaultKind::ProtocolViolation, detail).at(peer));
        }
        let chosen = if is_unix { self.config.choice != Choice::Tcp } else { self.config.choice != Choice::Shm };
        if !chosen {
            let (theirs, ours) = if is_unix { ("shm", "tcp") } else { ("tcp", "shm") };
            let detail = format!(
                "{peer} opened its link over {theirs}, but {own} is to use {ours} only: give every rank the same --transport"
            );
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(peer));
        }
        let link = &mut self.links[peer.index()];
        if link.as_ref().is_some_and(|old| !has_ended(&old.socket)) {
            let detail = format!("two processes say that they are {peer}: give every process its own rank");
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(peer));
        }
        tracing::debug!(%peer, is_unix, "linked");
        *link = Some(Proved { socket, is_unix });
        Ok(())
    }

    /// Waits until something may have changed.
    fn wait(&self, now: Instant) {
        let mut fds = Vec::new();
        self.acceptor.watch(&mut fds, now);
        self.dials.iter().for_each(|dial| dial.watch(&mut fds));
        let is_resting = self.dials.iter().any(|dial| !dial.is_active());
        let tick = if is_resting { TICK_WHILE_DIALLING } else { TICK };
        let timeout = tick.min(self.deadline.saturating_duration_since(now));
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // Interrupted or not: the loop looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }

    /// The fault of a mesh that is not complete at its deadline.
    fn overdue(&self) -> Fault {
        let seconds = self.config.deadline.as_secs_f32();
        let mut missing = self.missing();
        let Some(first) = missing.next() else {
            return Fault::new(FaultKind::DeadlineExceeded, "the links were not complete in time: try again");
        };
        let all = missing.fold(first.to_string(), |all, rank| format!("{all}, {rank}"));
        let tried = self.dials.iter().map(|dial| dial.unreachable().detail);
        let turned_away = (self.acceptor.turned_away > 0).then(|| {
            let last =
                self.acceptor.last_fault.as_ref().map_or("not from a rank of a job", |fault| fault.detail.as_str());
            format!("{} connections were turned away, the last: {last}", self.acceptor.turned_away)
        });
        let own = &self.config.members[self.config.hello.rank.index()];
        let hint = (first > self.config.hello.rank).then(|| {
            format!("check that every rank was started and that they reach {} at {:?}", own.hostname, own.addresses)
        });
        let why: Vec<_> = tried.chain(turned_away).chain(hint).collect();
        let detail = format!("no link from {all} within {seconds} s: {}", why.join("; "));
        Fault::new(FaultKind::DeadlineExceeded, detail).at(first)
    }

    /// Makes links of the connections. In ascending order of rank, because both ends of a shared-memory link set it
    /// up together: so no two ranks wait for each other in a circle.
    fn finish(self) -> Result<Links, Fault> {
        drop(self.acceptor);
        let (mut tcp, mut shm) = (TcpTransport::new()?, ShmTransport::new()?);
        let mut backends = Vec::with_capacity(self.links.len());
        for (peer, proved) in (0..).map(Rank).zip(self.links) {
            let Some(Proved { socket, is_unix }) = proved else {
                backends.push(Backend::None);
                continue;
            };
            if is_unix {
                socket.set_nonblocking(false).map_err(|error| unusable(peer, &error))?;
                shm.attach(peer, UnixStream::from(OwnedFd::from(socket)), self.deadline)?;
                backends.push(Backend::Shm);
            } else {
                tcp.attach(peer, socket.into())?;
                backends.push(Backend::Tcp);
            }
        }
        Links::new(tcp, shm, backends)
    }
}

/// What can be said about the configuration before anything is dialled.
fn check(config: &MeshConfig) -> Result<(), Fault> {
    let (hello, members) = (&config.hello, &config.members);
    if hello.world_size > WORLD_SIZE_MAX
        || members.len() != hello.world_size as usize
        || hello.rank.0 >= hello.world_size
    {
        let detail = format!(
            "{} with {} endpoints for a world of {} ranks (at most {WORLD_SIZE_MAX}): start every rank with the same world size and its own rank",
            hello.rank,
            members.len(),
            hello.world_size
        );
        return Err(Fault::new(FaultKind::InvalidArgument, detail));
    }
    if config.choice != Choice::Shm {
        return Ok(());
    }
    let own = &members[hello.rank.index()];
    for (peer, theirs) in (0..).map(Rank).zip(members).filter(|(peer, _)| *peer != hello.rank) {
        let problem = if !own.host.is_same(theirs.host) {
            format!(
                "{} is on host '{}' and {peer} on '{}', which share no memory",
                hello.rank, own.hostname, theirs.hostname
            )
        } else if own.socket.is_empty() || theirs.socket.is_empty() {
            format!("{} or {peer} could not open a Unix socket", hello.rank)
        } else {
            continue;
        };
        let detail = format!("{problem}, but the transport is to be shm: use --transport auto or tcp");
        return Err(Fault::new(FaultKind::InvalidArgument, detail).at(peer));
    }
    Ok(())
}

fn dial(config: &MeshConfig, peer: Rank, now: Instant) -> Dial {
    let (ours, theirs) = (&config.members[config.hello.rank.index()], &config.members[peer.index()]);
    Dial::new(peer, routes(ours, theirs, config.choice != Choice::Tcp, config.choice != Choice::Shm), now)
}

/// Whether the other end of a connection, over which nothing was sent yet, has closed it.
fn has_ended(socket: &Socket) -> bool {
    let mut byte = [std::mem::MaybeUninit::uninit()];
    match socket.recv_with_flags(&mut byte, libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

fn unusable(peer: Rank, error: &std::io::Error) -> Fault {
    Fault::new(FaultKind::System, format!("the socket to {peer} cannot be used ({error})")).at(peer)
}
