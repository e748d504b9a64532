//! Several transports of one backend, linked with each other, and driven by one thread.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gradwire_proto::{Fault, Rank, RegionKey};
use gradwire_transport::{Buffer, Refused, Remote, Sink, Slice, Transport};

use crate::fixture::Fixture;

/// How long anything may take before the test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Something that a sink was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Message(Rank, Vec<u8>),
    /// Peer, immediate, target, and the payload as it was in memory when the notice came.
    Written(Rank, Vec<u8>, Remote, Vec<u8>),
    Sent(Rank, u64),
    Down(Rank, Fault),
}

/// A sink that remembers, with the buffers that its peers write to.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) events: VecDeque<Event>,
    /// Refuse writes.
    pub(crate) refuses: bool,
    pub(crate) asked: usize,
}

impl Recorder {
    pub(crate) fn buffer(&mut self, key: RegionKey) -> &mut Buffer {
        self.buffers.iter_mut().find(|buffer| buffer.key() == key).expect("a buffer of this node")
    }
}

impl Sink for Recorder {
    fn admit(&mut self, _peer: Rank, _immediate: &[u8], _target: Remote, _bytes: usize) -> bool {
        self.asked += 1;
        !self.refuses
    }

    fn message(&mut self, peer: Rank, message: &[u8]) {
        self.events.push_back(Event::Message(peer, message.to_vec()));
    }

    fn written(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) {
        let payload = match bytes {
            0 => Vec::new(),
            _ => self.buffer(target.region).bytes()[target.offset as usize..][..bytes].to_vec(),
        };
        self.events.push_back(Event::Written(peer, immediate.to_vec(), target, payload));
    }

    fn sent(&mut self, peer: Rank, token: u64) {
        self.events.push_back(Event::Sent(peer, token));
    }

    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        self.events.push_back(Event::Down(peer, fault));
    }
}

/// A transport with its sink.
pub(crate) struct Node<T> {
    pub(crate) rank: Rank,
    pub(crate) transport: T,
    pub(crate) sink: Recorder,
}

impl<T: Transport> Node<T> {
    pub(crate) fn new(rank: u32, transport: T) -> Self {
        Self { rank: Rank(rank), transport, sink: Recorder::default() }
    }

    pub(crate) fn poll(&mut self) -> usize {
        self.transport.poll(&mut self.sink)
    }

    /// Polls until `done` says so.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{}: {what} never happened; events: {:?}", self.rank, self.sink.events);
            if self.poll() == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until there is something to do, then polls.
    pub(crate) fn sleep(&mut self, what: &str) -> usize {
        if self.transport.arm() {
            let mut descriptor =
                [rustix::event::PollFd::from_borrowed_fd(self.transport.event_fd(), rustix::event::PollFlags::IN)];
            let timeout = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            let ready = rustix::event::poll(&mut descriptor, Some(&timeout)).expect("poll");
            assert!(ready > 0, "{}: nothing woke it for {what}", self.rank);
        }
        self.poll()
    }

    /// A registered buffer of `len` bytes, `fill` at each place, kept by the sink.
    pub(crate) fn region(&mut self, len: usize, fill: impl Fn(usize) -> u8) -> RegionKey {
        let mut buffer = Buffer::allocate(len).expect("allocate");
        buffer.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = fill(at));
        self.transport.register(&buffer).expect("register");
        let key = buffer.key();
        self.sink.buffers.push(buffer);
        key
    }

    pub(crate) fn slice(&mut self, key: RegionKey, range: std::ops::Range<usize>) -> Slice {
        self.sink.buffer(key).slice(range)
    }

    /// Takes the events of the kind that `pick` wants; the others stay.
    pub(crate) fn take<R>(&mut self, pick: impl Fn(&Event) -> Option<R>) -> Vec<R> {
        let mut picked = Vec::new();
        self.sink.events.retain(|event| match pick(event) {
            Some(result) => {
                picked.push(result);
                false
            }
            None => true,
        });
        picked
    }

    pub(crate) fn count(&self, pick: impl Fn(&Event) -> bool) -> usize {
        self.sink.events.iter().filter(|event| pick(event)).count()
    }

    pub(crate) fn is_down(&self) -> bool {
        self.count(|event| matches!(event, Event::Down(..))) > 0
    }

    /// The tokens that came back, sorted.
    pub(crate) fn tokens(&mut self) -> Vec<u64> {
        let mut tokens = self.take(|event| match event {
            Event::Sent(_, token) => Some(*token),
            _ => None,
        });
        tokens.sort_unstable();
        tokens
    }
}

/// Transports that are all linked with each other; the index is the rank.
pub(crate) struct Cluster<F: Fixture> {
    pub(crate) nodes: Vec<Node<F::T>>,
}

impl<F: Fixture> Cluster<F> {
    pub(crate) fn new(size: u32) -> Self {
        let mut cluster = Self { nodes: (0..size).map(|rank| Node::new(rank, F::create())).collect() };
        for a in 0..size as usize {
            for b in a + 1..size as usize {
                cluster.link(a, b);
            }
        }
        cluster
    }

    pub(crate) fn link(&mut self, a: usize, b: usize) {
        let [one, other] = self.pair(a, b);
        F::link((&mut one.transport, one.rank), (&mut other.transport, other.rank));
    }

    pub(crate) fn pair(&mut self, a: usize, b: usize) -> [&mut Node<F::T>; 2] {
        self.nodes.get_disjoint_mut([a, b]).expect("two nodes")
    }

    pub(crate) fn poll(&mut self) -> usize {
        self.nodes.iter_mut().map(Node::poll).sum()
    }

    /// Polls everybody until `done` says so.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            if self.poll() == 0 {
                assert!(Instant::now() < deadline, "{what} never happened");
                std::thread::yield_now();
            }
        }
    }

    /// Offers an operation again, polling everybody, until it is taken.
    pub(crate) fn offer(&mut self, what: &str, mut offer: impl FnMut(&mut Self) -> Result<(), Refused>) {
        self.until(what, |cluster| match offer(cluster) {
            Ok(()) => true,
            Err(Refused::Full) => false,
            Err(refused) => panic!("{what}: {refused}"),
        });
    }

    pub(crate) fn send(&mut self, from: usize, to: usize, message: &[u8]) {
        self.offer("a message being taken", |cluster| cluster.nodes[from].transport.send(Rank(to as u32), message));
    }

    pub(crate) fn write(&mut self, from: usize, to: usize, immediate: &[u8], source: &Slice, at: Remote, token: u64) {
        self.offer("a write being taken", |cluster| {
            cluster.nodes[from].transport.write(Rank(to as u32), immediate, source.clone(), at, token)
        });
    }
}

/// `Remote` in short.
pub(crate) const fn at(region: RegionKey, offset: usize) -> Remote {
    Remote { region, offset: offset as u64 }
}
