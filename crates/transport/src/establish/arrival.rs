//! A link whose other end proved itself, before a transport takes it up.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use socket2::Socket;

use crate::shm::{Opening, ShmTransport};

/// A link to a peer that proved itself: to be taken up with [`crate::Transport::welcome`].
#[derive(Debug)]
pub struct Arrival {
    /// Whose it is.
    pub peer: Rank,
    pub(crate) way: Way,
}

/// What it goes over.
#[derive(Debug)]
pub(crate) enum Way {
    Tcp(TcpStream),
    /// This rank's lane is handed over already, so that the other end never waits for more than this.
    Shm(Opening),
}

impl Arrival {
    pub(crate) fn new(peer: Rank, socket: Socket, is_unix: bool) -> Result<Self, Fault> {
        let way = if is_unix {
            socket.set_nonblocking(false).map_err(|error| unusable(peer, &error))?;
            Way::Shm(ShmTransport::open(peer, UnixStream::from(OwnedFd::from(socket)))?)
        } else {
            Way::Tcp(socket.into())
        };
        Ok(Self { peer, way })
    }

    /// Whether the other end has closed it.
    pub(crate) fn has_ended(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let received = match &self.way {
            Way::Tcp(stream) => rustix::net::recv(stream, &mut byte[..], flags),
            Way::Shm(opening) => rustix::net::recv(opening.stream(), &mut byte[..], flags),
        };
        match received {
            Ok((_, count)) => count == 0,
            Err(errno) => errno != Errno::AGAIN,
        }
    }
}

pub(super) fn unusable(peer: Rank, error: &io::Error) -> Fault {
    Fault::new(FaultKind::System, format!("the socket to {peer} cannot be used ({error})")).at(peer)
}
