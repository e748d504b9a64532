//! How each backend is connected, within a process and across two.

use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Instant;

use gradwire_proto::Rank;
use gradwire_transport::Transport;
use gradwire_transport::faulty::{FaultPlan, Faulty};
use gradwire_transport::shm::ShmTransport;
use gradwire_transport::tcp::TcpTransport;

use crate::cluster::PATIENCE;

/// A backend under test.
pub(crate) trait Fixture {
    type T: Transport;
    /// Waits for one connection.
    type Listener;

    /// The backend's name, as `child` knows it.
    const NAME: &'static str;

    /// A transport without links.
    fn create() -> Self::T;

    /// Links rank `a.1` with rank `b.1`.
    fn link(a: (&mut Self::T, Rank), b: (&mut Self::T, Rank));

    /// A listener, and its address for [`Fixture::dial`].
    fn listen() -> (Self::Listener, String);

    /// Takes one connection and attaches it as `peer`.
    fn accept(transport: &mut Self::T, listener: &Self::Listener, peer: Rank);

    /// Connects to a listener and attaches it as `peer`.
    fn dial(transport: &mut Self::T, address: &str, peer: Rank);
}

pub(crate) struct Tcp;

impl Fixture for Tcp {
    type T = TcpTransport;
    type Listener = TcpListener;

    const NAME: &'static str = "tcp";

    fn create() -> TcpTransport {
        TcpTransport::new().expect("new")
    }

    fn link(a: (&mut TcpTransport, Rank), b: (&mut TcpTransport, Rank)) {
        let (listener, address) = Self::listen();
        Self::dial(b.0, &address, a.1);
        Self::accept(a.0, &listener, b.1);
    }

    fn listen() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address").to_string();
        (listener, address)
    }

    fn accept(transport: &mut TcpTransport, listener: &TcpListener, peer: Rank) {
        let (stream, _) = listener.accept().expect("accept");
        transport.attach(peer, stream).expect("attach");
    }

    fn dial(transport: &mut TcpTransport, address: &str, peer: Rank) {
        transport.attach(peer, TcpStream::connect(address).expect("connect")).expect("attach");
    }
}

pub(crate) struct Shm;

impl Shm {
    fn attach(transport: &mut ShmTransport, stream: UnixStream, peer: Rank) {
        transport.attach(peer, stream, Instant::now() + PATIENCE).expect("attach");
    }
}

impl Fixture for Shm {
    type T = ShmTransport;
    type Listener = UnixListener;

    const NAME: &'static str = "shm";

    fn create() -> ShmTransport {
        ShmTransport::new().expect("new")
    }

    fn link(a: (&mut ShmTransport, Rank), b: (&mut ShmTransport, Rank)) {
        let (near, far) = UnixStream::pair().expect("pair");
        let near = ShmTransport::open(b.1, near).expect("open");
        Self::attach(b.0, far, a.1);
        a.0.finish(near, Instant::now() + PATIENCE).expect("finish");
    }

    fn listen() -> (UnixListener, String) {
        let random = getrandom::u64().expect("random");
        let name = format!("gradwire-conformance-{random:016x}");
        let address = SocketAddr::from_abstract_name(&name).expect("name");
        (UnixListener::bind_addr(&address).expect("bind"), name)
    }

    fn accept(transport: &mut ShmTransport, listener: &UnixListener, peer: Rank) {
        let (stream, _) = listener.accept().expect("accept");
        Self::attach(transport, stream, peer);
    }

    fn dial(transport: &mut ShmTransport, address: &str, peer: Rank) {
        let address = SocketAddr::from_abstract_name(address).expect("name");
        Self::attach(transport, UnixStream::connect_addr(&address).expect("connect"), peer);
    }
}

/// The fault-injecting wrapper, with nothing to do, around another backend.
pub(crate) struct PassThrough<F>(std::marker::PhantomData<F>);

impl<F: Fixture> Fixture for PassThrough<F> {
    type T = Faulty<F::T>;
    type Listener = F::Listener;

    const NAME: &'static str = F::NAME;

    fn create() -> Faulty<F::T> {
        Faulty::new(F::create(), FaultPlan::default())
    }

    fn link(a: (&mut Faulty<F::T>, Rank), b: (&mut Faulty<F::T>, Rank)) {
        F::link((a.0.inner_mut(), a.1), (b.0.inner_mut(), b.1));
    }

    fn listen() -> (F::Listener, String) {
        F::listen()
    }

    fn accept(transport: &mut Faulty<F::T>, listener: &F::Listener, peer: Rank) {
        F::accept(transport.inner_mut(), listener, peer);
    }

    fn dial(transport: &mut Faulty<F::T>, address: &str, peer: Rank) {
        F::dial(transport.inner_mut(), address, peer);
    }
}
