//! How links come up: where this rank listens and can be reached, and the hello that both ends of a new connection
//! go through before anything else is believed.
//!
//! [`Listeners`] owns the listening sockets from before the rank publishes its endpoint until its mesh is complete
//! (see [`crate::mesh`]); then they are closed, and nothing is left that a stranger could connect to, but for jobs that
//! others may join later: those keep a [`Door`].

pub(crate) mod accept;
mod address;
mod arrival;
pub(crate) mod dial;
mod door;
pub(crate) mod hello;
mod state;
mod sys;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, secret};
use socket2::{Domain, SockAddr, Socket, Type};

pub use arrival::Arrival;
pub(crate) use arrival::Way;
pub use door::{Caller, Door, dial_state};
pub use state::StateStream;

/// Connections that the kernel keeps for us while we are busy.
const BACKLOG: i32 = 1024;

/// Where to listen.
#[derive(Clone, Debug, Default)]
pub struct ListenConfig {
    /// The address to bind and to advertise. By default all addresses are bound, and the likely ones advertised.
    pub address: Option<IpAddr>,
    /// The TCP port; 0 for any that is free.
    pub port: u16,
    /// The network interface whose address is bound and advertised, where `address` is not given.
    pub interface: Option<String>,
    /// Where peers reach this rank if not at what is bound: behind a forwarded port, for one that is in a container. A
    /// port of 0 stands for the one that is bound.
    pub advertise: Option<SocketAddr>,
}

/// The sockets that peers dial: one for TCP and, for peers on this host, one in the abstract Unix namespace, which
/// leaves nothing in the file system. Dropping them closes them.
#[derive(Debug)]
pub struct Listeners {
    pub(crate) tcp: Socket,
    pub(crate) unix: Option<Socket>,
    endpoint: Endpoint,
}

impl Listeners {
    /// Opens the listening sockets.
    ///
    /// # Errors
    /// A [`Fault`] that names the address: `AddressInUse` when the port is taken, `AddressUnreachable` when the
    /// address is not one of this host's, `InvalidArgument` when there is no such interface, `System` otherwise.
    pub fn bind(config: &ListenConfig) -> Result<Self, Fault> {
        let (bind, advertise) = match (config.address, &config.interface) {
            (Some(address), _) if !address.is_unspecified() => (Some(address), vec![address]),
            (None, Some(interface)) => {
                let addresses = address::of_interface(interface)?;
                (addresses.first().copied(), addresses.into_iter().take(1).collect())
            }
            (given, _) => (given, address::likely()),
        };
        let tcp = match bind {
            Some(address) => listen_tcp(SocketAddr::new(address, config.port))?,
            // Both families where the host has IPv6 at all.
            None => listen_tcp(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), config.port)).or_else(|fault| {
                let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), config.port);
                if fault.kind == FaultKind::AddressInUse { Err(fault) } else { listen_tcp(any) }
            })?,
        };
        let port = tcp.local_addr().ok().and_then(|address| address.as_socket()).map_or(config.port, |own| own.port());
        let (unix, socket) = match listen_unix() {
            Ok((unix, name)) => (Some(unix), name),
            Err(error) => {
                tracing::info!(%error, "no abstract Unix socket: peers on this host are linked over tcp");
                (None, String::new())
            }
        };
        let mut addresses: Vec<_> = advertise.into_iter().map(|address| SocketAddr::new(address, port)).collect();
        if let Some(given) = config.advertise {
            addresses = vec![SocketAddr::new(given.ip(), if given.port() == 0 { port } else { given.port() })];
        }
        let endpoint = Endpoint { addresses, host: address::host_id(), socket, hostname: address::hostname() };
        Ok(Self { tcp, unix, endpoint })
    }

    /// Where peers can reach this rank: to be published to them.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

fn listen_tcp(address: SocketAddr) -> Result<Socket, Fault> {
    let open = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false)?;
        }
        // A port that an earlier run left in TIME_WAIT may be taken; one that somebody listens on may not.
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    };
    open().map_err(|error: std::io::Error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Fault::new(
            FaultKind::AddressInUse,
            format!(
                "{address} is in use by another process: end it, choose another port, or give port 0 for any free one"
            ),
        ),
        std::io::ErrorKind::AddrNotAvailable => Fault::new(
            FaultKind::AddressUnreachable,
            format!(
                "{} is not an address of this host ({}): set GRADWIRE_ADDRESS to one of its own, or \
                 GRADWIRE_INTERFACE to the interface to use",
                address.ip(),
                address::hostname()
            ),
        ),
        _ => Fault::new(
            FaultKind::System,
            format!("cannot listen on {address} ({error}): choose another address or port"),
        ),
    })
}

fn listen_unix() -> Result<(Socket, String), std::io::Error> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(std::io::Error::other)?;
    let name = format!("gradwire-{}", secret::hex(&random));
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&abstract_address(&name)?)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok((socket, name))
}

/// The address of an abstract Unix socket.
pub(crate) fn abstract_address(name: &str) -> Result<SockAddr, std::io::Error> {
    SockAddr::unix(format!("\0{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(port: u16) -> ListenConfig {
        ListenConfig { address: Some(Ipv4Addr::LOCALHOST.into()), port, ..ListenConfig::default() }
    }

    #[test]
    fn a_port_in_use_is_a_fault_that_names_it() {
        let first = Listeners::bind(&loopback(0)).expect("bind");
        let taken = first.endpoint().addresses[0];
        let fault = Listeners::bind(&loopback(taken.port())).expect_err("taken");
        assert_eq!(fault.kind, FaultKind::AddressInUse);
        assert!(fault.detail.contains(&taken.to_string()), "{fault}");
        let any = ListenConfig { port: taken.port(), ..ListenConfig::default() };
        assert_eq!(Listeners::bind(&any).expect_err("taken").kind, FaultKind::AddressInUse);
    }

    #[test]
    fn an_address_of_another_host_is_a_fault_that_names_the_remedy() {
        let config = ListenConfig { address: Some(Ipv4Addr::new(203, 0, 113, 77).into()), ..ListenConfig::default() };
        let fault = Listeners::bind(&config).expect_err("not ours");
        assert_eq!(fault.kind, FaultKind::AddressUnreachable);
        assert!(fault.detail.contains("203.0.113.77") && fault.detail.contains("GRADWIRE_ADDRESS"), "{fault}");
    }

    #[test]
    fn what_is_advertised_need_not_be_what_is_bound() {
        let advertised = |advertise: &str| {
            let advertise = Some(advertise.parse().expect("an address"));
            let listeners = Listeners::bind(&ListenConfig { advertise, ..loopback(0) }).expect("bind");
            let bound = listeners.tcp.local_addr().expect("bound").as_socket().expect("an address");
            (listeners.endpoint().addresses.clone(), bound)
        };
        let (addresses, bound) = advertised("203.0.113.77:0");
        assert_eq!(addresses, [SocketAddr::new(Ipv4Addr::new(203, 0, 113, 77).into(), bound.port())]);
        assert!(bound.ip().is_loopback());
        assert_eq!(advertised("[2001:db8::1]:7000").0, ["[2001:db8::1]:7000".parse().expect("an address")]);
    }

    #[test]
    fn an_unknown_interface_is_a_fault_that_names_those_there_are() {
        let config = ListenConfig { interface: Some("nosuch0".into()), ..ListenConfig::default() };
        let fault = Listeners::bind(&config).expect_err("no such interface");
        assert_eq!(fault.kind, FaultKind::InvalidArgument);
        assert!(fault.detail.contains("nosuch0") && fault.detail.contains("lo"), "{fault}");
    }

    #[test]
    fn the_default_endpoint_has_loopback_a_host_and_a_socket_of_its_own() {
        let (a, b) = (Listeners::bind(&ListenConfig::default()), Listeners::bind(&ListenConfig::default()));
        let (a, b) = (a.expect("bind"), b.expect("bind"));
        assert!(a.endpoint().addresses.iter().any(|address| address.ip().is_loopback() && address.port() != 0));
        assert!(a.endpoint().host.is_same(b.endpoint().host));
        assert!(!a.endpoint().socket.is_empty() && a.endpoint().socket != b.endpoint().socket);
        let on_lo = ListenConfig { interface: Some("lo".into()), ..ListenConfig::default() };
        let lo = Listeners::bind(&on_lo).expect("bind");
        assert_eq!(lo.endpoint().addresses[0].ip(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }
}
