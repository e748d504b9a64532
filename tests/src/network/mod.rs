//! A network that goes wrong: every link between ranks goes through it, over TCP, and it holds, spoils, cuts and half-closes
//! them as a test says.
//!
//! Each rank listens at one address of 127.0.0.0/8 and advertises another, where the network listens for it. Those
//! addresses are of this network alone, so that ports need not be searched for.

mod framing;
mod pump;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use crate::random;
use framing::Claim;
pub use framing::Part;

/// The port of the first rank.
const PORT: u16 = 7100;

/// The links between the ranks of a job. Dropping it ends them all.
#[derive(Debug)]
pub struct Network {
    shared: Arc<Shared>,
    net: [u8; 2],
    doors: Vec<(SocketAddr, JoinHandle<()>)>,
}

/// What is done to bytes that pass.
#[derive(Clone, Copy, Debug)]
pub struct Spoil {
    /// Bytes of this part.
    pub part: Part,
    /// One of so many, on average: one of its bits is flipped.
    pub one_in: u64,
    /// Not more than these in all.
    pub most: u64,
    /// Only on links of this rank.
    pub rank: Option<u32>,
}

/// How one direction of a link ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Both sides see the link end.
    Cut,
    /// Its receiver sees the end; its sender goes on sending into nothing, and receives.
    HalfClosed,
}

#[derive(Debug, Default)]
struct Shared {
    weather: Mutex<Weather>,
    changed: Condvar,
    spoilt: AtomicU64,
    over: AtomicBool,
}

#[derive(Debug, Default)]
struct Weather {
    links: Vec<Arc<Link>>,
    /// Nothing passes on links of these ranks.
    held: BTreeSet<u32>,
    spoil: Option<Spoil>,
    random: u64,
}

#[derive(Debug)]
struct Link {
    acceptor: u32,
    claim: OnceLock<Claim>,
    /// Of the dialer, of the acceptor.
    sides: [TcpStream; 2],
    /// What becomes of it after so many further bytes from this side.
    ends: [Mutex<Option<(u64, End)>>; 2],
    is_over: AtomicBool,
}

impl Network {
    /// A network for so many ranks, in which all passes.
    ///
    /// # Panics
    /// When there are no addresses for it.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        let shared = Arc::new(Shared::default());
        shared.weather().random = u64::from_le_bytes(random()) | 1;
        let open = |net: [u8; 2]| {
            let one = |rank| TcpListener::bind(address(net, rank, 2)).map(|listener| (rank, listener));
            (0..ranks).map(one).collect::<Result<Vec<_>, _>>()
        };
        let nets = std::iter::repeat_with(|| random::<2>().map(|byte| 64 | byte & 0x7f));
        let opened = nets.take(100).find_map(|net| open(net).ok().map(|doors| (net, doors)));
        let (net, doors) = opened.expect("addresses of 127.0.0.0/8");
        let door = |(rank, listener): (u32, TcpListener)| {
            let (shared, target) = (shared.clone(), address(net, rank, 1));
            (address(net, rank, 2), thread::spawn(move || serve(&shared, &listener, rank, target)))
        };
        let doors = doors.into_iter().map(door).collect();
        Self { shared, net, doors }
    }

    /// Makes a rank listen and advertise so that its links go through this network.
    pub fn connect(&self, command: &mut Command, rank: u32) {
        let [own, advertised] = [1, 2].map(|nth| address(self.net, rank, nth).ip().to_string());
        command.env("GRADWIRE_ADDRESS", own).env("GRADWIRE_PORT", PORT.to_string());
        command.env("GRADWIRE_ADVERTISE", advertised).env("GRADWIRE_TRANSPORT", "tcp");
    }

    /// From now on bytes are spoilt like this, or not at all.
    pub fn spoil(&self, spoil: Option<Spoil>) {
        self.shared.weather().spoil = spoil;
    }

    /// How many bytes were spoilt so far.
    #[must_use]
    pub fn spoilt(&self) -> u64 {
        self.shared.spoilt.load(Ordering::SeqCst)
    }

    /// Nothing passes on the links of this rank until [`Network::release`]; nothing is lost.
    pub fn hold(&self, rank: u32) {
        self.shared.weather().held.insert(rank);
    }

    /// What was held passes.
    pub fn release(&self) {
        self.shared.weather().held.clear();
        self.shared.changed.notify_all();
    }

    /// Ends the link between two ranks after so many further bytes from the first to the second. False if there is none.
    #[must_use]
    pub fn end(&self, from: u32, to: u32, after: u64, end: End) -> bool {
        let weather = self.shared.weather();
        let between = |link: &&Arc<Link>| {
            let ends = link.claim.get().map(|claim| (claim.dialer, claim.state));
            let is_side = ends == Some((from, false)) && link.acceptor == to;
            !link.is_over() && (is_side || ends == Some((to, false)) && link.acceptor == from)
        };
        let Some(link) = weather.links.iter().find(between) else { return false };
        let side = usize::from(link.acceptor == from);
        *link.ends[side].lock().unwrap_or_else(PoisonError::into_inner) = Some((after, end));
        true
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.release();
        for (address, _) in &self.doors {
            // Wakes it: it looks whether it is over.
            let _ = TcpStream::connect(address);
        }
        for (_, door) in self.doors.drain(..) {
            let _ = door.join();
        }
        self.shared.weather().links.iter().for_each(|link| link.cut());
    }
}

impl Shared {
    fn weather(&self) -> MutexGuard<'_, Weather> {
        self.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while this link is held.
    fn wait(&self, link: &Link) {
        let is_held = |weather: &mut Weather| {
            let dialer = link.claim.get().map(|claim| claim.dialer);
            weather.held.contains(&link.acceptor) || dialer.is_some_and(|dialer| weather.held.contains(&dialer))
        };
        drop(self.changed.wait_while(self.weather(), is_held));
    }
}

impl Link {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn cut(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.sides.iter().for_each(|side| drop(side.shutdown(Shutdown::Both)));
    }

    fn has(&self, rank: u32) -> bool {
        self.acceptor == rank || self.claim.get().is_some_and(|claim| claim.dialer == rank)
    }
}

/// The nth address of a rank.
fn address(net: [u8; 2], rank: u32, nth: u8) -> SocketAddr {
    let rank = u8::try_from(rank).expect("few ranks");
    let ip = Ipv4Addr::new(127, net[0], net[1], 2 * rank + nth);
    SocketAddrV4::new(ip, PORT + u16::from(rank)).into()
}

/// Takes the connections to one rank.
fn serve(shared: &Arc<Shared>, listener: &TcpListener, rank: u32, target: SocketAddr) {
    for dialer in listener.incoming() {
        if shared.over.load(Ordering::SeqCst) {
            return;
        }
        // Nobody listens there any more: the dialer sees its connection end.
        let (Ok(dialer), Ok(acceptor)) = (dialer, TcpStream::connect(target)) else { continue };
        let sides = [dialer, acceptor];
        sides.iter().for_each(|side| drop(side.set_nodelay(true)));
        let link = Link {
            acceptor: rank,
            claim: OnceLock::new(),
            sides,
            ends: [Mutex::new(None), Mutex::new(None)],
            is_over: AtomicBool::new(false),
        };
        let link = Arc::new(link);
        let mut weather = shared.weather();
        weather.links.retain(|link| !link.is_over());
        weather.links.push(link.clone());
        drop(weather);
        for side in 0..2 {
            let (shared, link) = (shared.clone(), link.clone());
            thread::spawn(move || pump::run(&shared, &link, side));
        }
    }
}
