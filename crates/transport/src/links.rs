//! All links of a rank behind one [`Transport`]: each peer is reached by the backend that its link was opened on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use rustix::event::epoll;

use crate::establish::{Arrival, Way};
use crate::shm::ShmTransport;
use crate::tcp::TcpTransport;
use crate::{Buffer, Capabilities, Limits, Refused, Remote, Sink, Slice, Transport};

/// The links of a rank, over shared memory and TCP. Made by [`crate::establish::Listeners::connect`].
#[derive(Debug)]
pub struct Links {
    tcp: TcpTransport,
    shm: ShmTransport,
    routes: Vec<Backend>,
    uses_tcp: bool,
    uses_shm: bool,
    epoll: OwnedFd,
}

/// What reaches a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    /// Nothing: this rank itself.
    None,
    /// [`TcpTransport`].
    Tcp,
    /// [`ShmTransport`].
    Shm,
}

impl Links {
    /// No links yet: [`Transport::welcome`] takes them up.
    pub(crate) fn new() -> Result<Self, Fault> {
        let (tcp, shm) = (TcpTransport::new()?, ShmTransport::new()?);
        let nest = || {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            for backend in [tcp.event_fd(), shm.event_fd()] {
                epoll::add(&epoll, backend, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            }
            Ok(epoll)
        };
        let epoll = nest().map_err(|errno: rustix::io::Errno| {
            Fault::new(
                FaultKind::System,
                format!("no descriptor for the links ({errno}): raise the limit on open files (ulimit -n)"),
            )
        })?;
        Ok(Self { tcp, shm, routes: Vec::new(), uses_tcp: false, uses_shm: false, epoll })
    }

    fn backend(&self, peer: Rank) -> Option<&dyn Transport> {
        match self.routes.get(peer.index())? {
            Backend::Tcp => Some(&self.tcp),
            Backend::Shm => Some(&self.shm),
            Backend::None => None,
        }
    }

    fn backend_mut(&mut self, peer: Rank) -> Option<&mut dyn Transport> {
        match self.routes.get(peer.index())? {
            Backend::Tcp => Some(&mut self.tcp),
            Backend::Shm => Some(&mut self.shm),
            Backend::None => None,
        }
    }
}

impl Transport for Links {
    fn name(&self, peer: Rank) -> &'static str {
        self.backend(peer).map_or("none", |backend| backend.name(peer))
    }

    fn capabilities(&self, peer: Rank) -> Capabilities {
        self.backend(peer).map_or_else(Capabilities::default, |backend| backend.capabilities(peer))
    }

    /// What every backend in use can take.
    fn limits(&self) -> Limits {
        let (tcp, shm) = (self.tcp.limits(), self.shm.limits());
        match (self.uses_tcp, self.uses_shm) {
            (true, false) => tcp,
            (false, true) => shm,
            _ => Limits {
                message_bytes_max: tcp.message_bytes_max.min(shm.message_bytes_max),
                immediate_bytes_max: tcp.immediate_bytes_max.min(shm.immediate_bytes_max),
                write_bytes_max: tcp.write_bytes_max.min(shm.write_bytes_max),
            },
        }
    }

    fn register(&mut self, buffer: &Buffer) -> Result<(), Fault> {
        // With both, because links to newcomers may be of either kind.
        self.tcp.register(buffer)?;
        self.shm.register(buffer)
    }

    fn deregister(&mut self, key: RegionKey) {
        self.tcp.deregister(key);
        self.shm.deregister(key);
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<(), Refused> {
        self.backend_mut(peer).ok_or(Refused::NoLink)?.send(peer, message)
    }

    fn write(
        &mut self,
        peer: Rank,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        self.backend_mut(peer).ok_or(Refused::NoLink)?.write(peer, immediate, source, target, token)
    }

    fn view(&self, peer: Rank, place: Remote, bytes: usize) -> Result<&[u8], Refused> {
        self.backend(peer).ok_or(Refused::NoLink)?.view(peer, place, bytes)
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> usize {
        let mut happened = 0;
        if self.uses_shm {
            happened += self.shm.poll(sink);
        }
        if self.uses_tcp {
            happened += self.tcp.poll(sink);
        }
        happened
    }

    fn arm(&mut self) -> bool {
        (!self.uses_shm || self.shm.arm()) && (!self.uses_tcp || self.tcp.arm())
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn welcome(&mut self, arrival: Arrival, deadline: Instant) -> Result<(), Fault> {
        let Arrival { peer, way } = arrival;
        self.disconnect(peer);
        if self.routes.len() <= peer.index() {
            self.routes.resize(peer.index() + 1, Backend::None);
        }
        self.routes[peer.index()] = match way {
            Way::Tcp(stream) => {
                self.tcp.attach(peer, stream)?;
                self.uses_tcp = true;
                Backend::Tcp
            }
            Way::Shm(opening) => {
                self.shm.finish(opening, deadline)?;
                self.uses_shm = true;
                Backend::Shm
            }
        };
        Ok(())
    }

    fn disconnect(&mut self, peer: Rank) {
        if let Some(backend) = self.backend_mut(peer) {
            backend.disconnect(peer);
        }
    }

    fn is_flushed(&self, peer: Rank) -> bool {
        self.backend(peer).is_none_or(|backend| backend.is_flushed(peer))
    }
}
