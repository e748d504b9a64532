//! Reaching one peer: the ways to it, tried in order of likelihood, again and again until the mesh's deadline, or
//! until it is plain that none of them leads there.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use gradwire_proto::hello::{HelloParams, Purpose};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, SockAddr, Socket, Type};

use super::abstract_address;
use super::hello::{Conversation, HELLO_TIMEOUT, Progress};

/// How long one address may take to answer a connection attempt: one that swallows packets is given up soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer whose every address was refused or unreachable for so long is given up: it published them only after it
/// listened there.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3);
/// A process that has had no descriptor for so long will hardly get one: it says so before others take it for silent.
const SHORTAGE_MAX: Duration = Duration::from_secs(1);
/// How long a peer that is in another epoch is given to hear of ours.
const EPOCH_PAUSE: Duration = Duration::from_millis(5);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// A way to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Its abstract Unix socket: the link is shared memory then.
    Unix(String),
    /// One of its TCP addresses.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(_) => f.write_str("its Unix socket"),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

/// The ways to `theirs` from `ours`, the likeliest first.
pub(crate) fn routes(ours: &Endpoint, theirs: &Endpoint, unix: bool, tcp: bool) -> Vec<Route> {
    let same_host = ours.host.is_same(theirs.host);
    let mut routes = Vec::new();
    if unix && same_host && !theirs.socket.is_empty() && !ours.socket.is_empty() {
        routes.push(Route::Unix(theirs.socket.clone()));
    }
    if tcp {
        // Another host's loopback address would lead to ourselves; where it is all there is, the attempt says so.
        let only_near = theirs.addresses.iter().all(|address| address.ip().is_loopback());
        let of = |near: bool| theirs.addresses.iter().filter(move |address| address.ip().is_loopback() == near);
        if same_host || only_near {
            routes.extend(of(true).copied().map(Route::Tcp));
        }
        routes.extend(of(false).copied().map(Route::Tcp));
    }
    routes
}

/// The attempts to reach one peer.
#[derive(Debug)]
pub(crate) struct Dial {
    pub(crate) peer: Rank,
    purpose: Purpose,
    routes: Vec<Failed>,
    next: usize,
    began: Instant,
    backoff: Duration,
    /// Since when there is no descriptor for an attempt.
    short_since: Option<Instant>,
    state: State,
}

/// A route, and why it failed last.
#[derive(Debug)]
struct Failed {
    route: Route,
    why: Option<Why>,
}

#[derive(Debug)]
struct Why {
    fault: Option<Fault>,
    text: String,
    /// It may get better while the peer comes up.
    is_passing: bool,
}

#[derive(Debug)]
enum State {
    Resting { until: Instant },
    Connecting { socket: Socket, since: Instant },
    Greeting(Box<Conversation>),
    Over,
}

/// What an attempt came to.
#[derive(Debug)]
pub(crate) enum Dialled {
    /// Nothing yet.
    Pending,
    /// The peer proved itself.
    Linked { socket: Socket, is_unix: bool },
    /// No way leads there.
    Failed(Fault),
}

impl Dial {
    pub(crate) fn new(peer: Rank, purpose: Purpose, routes: Vec<Route>, now: Instant) -> Self {
        let routes = routes.into_iter().map(|route| Failed { route, why: None }).collect();
        let (next, backoff, short_since) = (0, BACKOFF_MIN, None);
        Self { peer, purpose, routes, next, began: now, backoff, short_since, state: State::Resting { until: now } }
    }

    /// After all ways failed: tries them for as long again.
    pub(crate) fn begin_again(&mut self, now: Instant) {
        (self.began, self.state) = (now, State::Resting { until: now + self.backoff });
    }

    /// Whether an attempt is under way, which needs a descriptor.
    pub(crate) const fn is_active(&self) -> bool {
        matches!(self.state, State::Connecting { .. } | State::Greeting(_))
    }

    /// What to wait for.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        let (socket, flags): (BorrowedFd<'_>, _) = match &self.state {
            State::Connecting { socket, .. } => (socket.as_fd(), PollFlags::OUT),
            State::Greeting(talk) => (talk.socket(), if talk.is_writing() { PollFlags::OUT } else { PollFlags::IN }),
            State::Resting { .. } | State::Over => return,
        };
        fds.push(PollFd::from_borrowed_fd(socket, flags));
    }

    /// Goes on as far as that is possible without waiting. A new attempt begins only if `may_begin`.
    pub(crate) fn advance(&mut self, params: &HelloParams, now: Instant, may_begin: bool) -> Dialled {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Resting { until } if now < until || !may_begin => self.state = State::Resting { until },
            State::Resting { .. } => match self.begin() {
                Ok(socket) => (self.state, self.short_since) = (State::Connecting { socket, since: now }, None),
                Err(error) => {
                    return self.shortage(&error, now).unwrap_or_else(|| self.fail(connect_failure(&error), now));
                }
            },
            State::Connecting { socket, since } => match connected(&socket) {
                Ok(true) => match Conversation::dial(socket, params, (self.peer, self.purpose), now) {
                    Ok(conversation) => return self.greet(conversation, now),
                    Err(fault) => return Dialled::Failed(fault),
                },
                Ok(false) if now.duration_since(since) > CONNECT_TIMEOUT => {
                    let text = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs());
                    return self.fail(Why { fault: None, text, is_passing: false }, now);
                }
                Ok(false) => self.state = State::Connecting { socket, since },
                Err(error) => return self.fail(connect_failure(&error), now),
            },
            State::Greeting(conversation) => return self.greet(conversation, now),
            State::Over => {}
        }
        Dialled::Pending
    }

    fn begin(&self) -> io::Result<Socket> {
        let nowhere = || io::Error::new(io::ErrorKind::AddrNotAvailable, "no address");
        let (domain, address): (_, SockAddr) = match &self.routes.get(self.next).ok_or_else(nowhere)?.route {
            Route::Unix(name) => (Domain::UNIX, abstract_address(name)?),
            Route::Tcp(address) => (Domain::for_address(*address), (*address).into()),
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(socket),
        }
    }

    fn greet(&mut self, conversation: Box<Conversation>, now: Instant) -> Dialled {
        let since = conversation.since;
        match conversation.advance() {
            Progress::Waiting(_) if now.duration_since(since) > HELLO_TIMEOUT => {
                let text = format!("it took the connection, but said nothing for {} s", HELLO_TIMEOUT.as_secs());
                self.fail(Why { fault: None, text, is_passing: true }, now)
            }
            Progress::Waiting(conversation) => {
                self.state = State::Greeting(conversation);
                Dialled::Pending
            }
            Progress::Proved(_, _, socket) => {
                let is_unix = matches!(self.routes.get(self.next), Some(Failed { route: Route::Unix(_), .. }));
                Dialled::Linked { socket, is_unix }
            }
            Progress::Failed(fault) => {
                let text = fault.detail.clone();
                if fault.kind == FaultKind::EpochMismatch {
                    // This is the way; but the peer may not have heard of this epoch yet.
                    if let Some(failed) = self.routes.get_mut(self.next) {
                        failed.why = Some(Why { fault: Some(fault), text, is_passing: true });
                    }
                    self.state = State::Resting { until: now + EPOCH_PAUSE };
                    return Dialled::Pending;
                }
                self.fail(Why { fault: Some(fault), text, is_passing: false }, now)
            }
        }
    }

    /// Fails where this process has had no descriptor for an attempt for so long that it will hardly get one.
    fn shortage(&mut self, error: &io::Error, now: Instant) -> Option<Dialled> {
        if !matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
            self.short_since = None;
            return None;
        }
        let since = *self.short_since.get_or_insert(now);
        let detail = format!(
            "there is no descriptor to reach {} with ({error}): raise the limit on open files (ulimit -n)",
            self.peer
        );
        (now.duration_since(since) >= SHORTAGE_MAX).then(|| Dialled::Failed(Fault::new(FaultKind::System, detail)))
    }

    /// Notes why this route failed, and goes on to the next; after the last one there is a pause, or the end.
    fn fail(&mut self, why: Why, now: Instant) -> Dialled {
        let has_more = self.next + 1 < self.routes.len();
        if let Some(failed) = self.routes.get_mut(self.next) {
            tracing::debug!(peer = %self.peer, route = %failed.route, why = why.text, "dialling failed");
            if matches!(failed.route, Route::Unix(_)) && failed.why.is_none() && has_more {
                tracing::info!(peer = %self.peer, why = why.text, "the Unix socket cannot be reached: trying tcp");
            }
            failed.why = Some(why);
        }
        self.next += 1;
        if has_more {
            self.state = State::Resting { until: now };
            return Dialled::Pending;
        }
        self.next = 0;
        if let Some(fault) = self.verdict(now) {
            return Dialled::Failed(fault);
        }
        self.state = State::Resting { until: now + self.backoff };
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        Dialled::Pending
    }

    /// Whether the peer is to be given up after every route has failed once more.
    fn verdict(&self, now: Instant) -> Option<Fault> {
        let faults = self.routes.iter().filter_map(|failed| failed.why.as_ref()?.fault.as_ref());
        let plain = [FaultKind::SecretMismatch, FaultKind::ProtocolVersion, FaultKind::WorldMismatch];
        if let Some(fault) = faults.into_iter().find(|fault| plain.contains(&fault.kind)) {
            return Some(fault.clone());
        }
        let is_passing = self.routes.iter().any(|failed| failed.why.as_ref().is_none_or(|why| why.is_passing));
        (!is_passing && now.duration_since(self.began) >= GIVE_UP_AFTER).then(|| self.unreachable())
    }

    /// The fault that names every address that was tried and why it failed.
    pub(crate) fn unreachable(&self) -> Fault {
        let tried: Vec<_> = self
            .routes
            .iter()
            .map(|failed| {
                let why = failed.why.as_ref().map_or("no answer yet", |why| why.text.as_str());
                format!("{} ({why})", failed.route)
            })
            .collect();
        let tried = if tried.is_empty() { "it advertises no address for this host".into() } else { tried.join(", ") };
        let peer = self.peer;
        Fault::new(
            FaultKind::AddressUnreachable,
            format!("{peer} cannot be reached: {tried}. If it still runs, set GRADWIRE_ADDRESS on its host to an address that is reachable from here, GRADWIRE_INTERFACE to the network interface to use, or GRADWIRE_ADVERTISE to where a port of its host is forwarded"),
        )
        .at(peer)
    }
}

/// Whether a connection attempt has ended well.
fn connected(socket: &Socket) -> io::Result<bool> {
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

fn connect_failure(error: &io::Error) -> Why {
    // A full queue of connections at a Unix socket, and shortages of our own, pass.
    let shortage = [libc::EAGAIN, libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    let is_passing = error.raw_os_error().is_some_and(|code| shortage.contains(&code));
    Why { fault: None, text: error.to_string(), is_passing }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::member::HostId;

    use super::*;

    fn endpoint(host: u8, addresses: &[&str]) -> Endpoint {
        let addresses = addresses.iter().map(|text| text.parse().expect("address")).collect();
        Endpoint { addresses, host: HostId([host; 16]), socket: format!("s{host}"), hostname: format!("h{host}") }
    }

    #[test]
    fn the_likeliest_route_comes_first_and_loopback_stays_on_its_host() {
        let ours = endpoint(1, &["127.0.0.1:1"]);
        let theirs = endpoint(1, &["10.0.0.2:7", "127.0.0.1:7"]);
        let tcp = |text: &str| Route::Tcp(text.parse().expect("address"));
        let unix = Route::Unix("s1".into());
        assert_eq!(routes(&ours, &theirs, true, true), [unix.clone(), tcp("127.0.0.1:7"), tcp("10.0.0.2:7")]);
        assert_eq!(routes(&ours, &theirs, true, false), [unix]);
        let far = endpoint(2, &["127.0.0.1:7", "10.0.0.2:7"]);
        assert_eq!(routes(&ours, &far, true, true), [tcp("10.0.0.2:7")]);
        let only_loopback = endpoint(2, &["127.0.0.1:7"]);
        assert_eq!(routes(&ours, &only_loopback, true, true), [tcp("127.0.0.1:7")]);
        let unknown = Endpoint { host: HostId::default(), ..ours };
        assert_eq!(routes(&unknown, &unknown, true, true).len(), 1, "unknown hosts share no memory");
    }

    #[test]
    fn a_peer_without_addresses_says_so() {
        let fault = Dial::new(Rank(4), Purpose::Link, Vec::new(), Instant::now()).unreachable();
        assert_eq!((fault.kind, fault.rank), (FaultKind::AddressUnreachable, Some(Rank(4))));
        assert!(fault.detail.contains("advertises no address"), "{fault}");
    }
}
