//! Peers that break the rules: what they do costs them their link, and nobody else anything.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gradwire_proto::{Fault, FaultKind, Rank, RegionKey};
use proptest::prelude::*;

use super::packet::{Packet, send};
use super::record::{message_words, write_words};
use super::ring::{DONE, HEAD, OwnMemory, RING, TAIL};
use super::sys::OwnLane;
use super::{RING_WORDS, ShmTransport};
use crate::{Buffer, Remote, Sink, Transport};

const ROGUE: Rank = Rank(1);
const FRIEND: Rank = Rank(0);

#[derive(Default)]
struct Seen {
    messages: Vec<(Rank, Vec<u8>)>,
    written: usize,
    down: Vec<(Rank, FaultKind)>,
}

impl Sink for Seen {
    fn admit(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) -> bool {
        true
    }
    fn message(&mut self, peer: Rank, message: &[u8]) {
        self.messages.push((peer, message.to_vec()));
    }
    fn written(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) {
        self.written += 1;
    }
    fn sent(&mut self, _: Rank, _: u64) {}
    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        self.down.push((peer, fault.kind));
    }
}

/// A transport with a link to a friend, and one to a rogue of which the test holds the lane and the stream.
struct Stage {
    transport: ShmTransport,
    friend: ShmTransport,
    lane: OwnLane,
    stream: UnixStream,
    target: Buffer,
}

impl Stage {
    fn new() -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        let (mut transport, mut friend) = (ShmTransport::new().expect("new"), ShmTransport::new().expect("new"));
        let target = Buffer::allocate(4096).expect("allocate");
        transport.register(&target).expect("register");
        let (near, far) = UnixStream::pair().expect("pair");
        let opening = ShmTransport::open(Rank(2), far).expect("open");
        transport.attach(FRIEND, near, deadline).expect("attach");
        friend.finish(opening, deadline).expect("finish");
        let (near, stream) = UnixStream::pair().expect("pair");
        let lane = OwnLane::allocate(RING_WORDS).expect("lane");
        let setup = Packet::Setup { ring_words: RING_WORDS as u64 };
        send(stream.as_fd(), setup, Some(lane.file())).expect("send");
        transport.attach(ROGUE, near, deadline).expect("attach");
        Self { transport, friend, lane, stream, target }
    }

    /// Puts words at the start of the rogue's ring, and its tail behind them.
    fn put(&self, words: &[u64]) {
        for (at, word) in words.iter().enumerate() {
            self.lane.store(RING + at, *word, Ordering::Relaxed);
        }
        self.lane.store(TAIL, words.len() as u64, Ordering::Release);
    }

    /// Polls for a while, and checks that the friend's link still works.
    fn play(&mut self) -> Seen {
        let mut seen = Seen::default();
        for _ in 0..200 {
            self.transport.poll(&mut seen);
        }
        self.friend.send(Rank(2), b"still here").expect("send");
        self.transport.poll(&mut seen);
        assert_eq!(seen.messages.pop(), Some((FRIEND, b"still here".to_vec())));
        seen
    }
}

fn record(body: &[u64]) -> Vec<u64> {
    [&[body.len() as u64], body].concat()
}

#[test]
fn each_broken_rule_costs_the_rogue_its_link_and_nothing_else() {
    let place = Remote { region: RegionKey(77), offset: 0 };
    type Crime = fn(&mut Stage, Remote);
    let crimes: [(&str, Crime); 12] = [
        ("a tail beyond the ring", |stage, _| stage.lane.store(TAIL, RING_WORDS as u64 + 1, Ordering::Release)),
        ("an empty record", |stage, _| stage.put(&[0, 0])),
        ("a record beyond the tail", |stage, _| stage.put(&[9, 1, 0])),
        ("a record longer than any", |stage, _| {
            stage.put(&[5000]);
            stage.lane.store(TAIL, 6000, Ordering::Release);
        }),
        ("a record of no kind", |stage, _| stage.put(&record(&[9, 0, 0]))),
        ("a message that ends early", |stage, _| stage.put(&record(&message_words(0, 100)))),
        ("a write from nowhere", |stage, place| {
            let target = Remote { region: stage.target.key(), offset: 0 };
            stage.put(&record(&write_words(0, 0, place, target, 10)));
        }),
        ("writes done that were never made", |stage, place| {
            let source = stage.target.slice(0..10);
            stage.transport.write(ROGUE, b"", source, place, 1).expect("write");
            stage.lane.store(DONE, 2, Ordering::Release);
        }),
        ("a head beyond the tail", |stage, _| {
            stage.lane.store(HEAD, 1 << 40, Ordering::Release);
            while stage.transport.send(ROGUE, &[0; 4096]).is_ok() {}
        }),
        ("bytes that are no packet", |stage, _| stage.stream.write_all(&[0xff; 64]).expect("write")),
        ("a region without memory", |stage, _| {
            let packet = Packet::Register { seq: 1, key: RegionKey(1), len: 1 };
            send(stage.stream.as_fd(), packet, None).expect("send");
        }),
        ("memory that is not sealed", |stage, _| {
            let packet = Packet::Register { seq: 1, key: RegionKey(1), len: 0 };
            let file = rustix::fs::memfd_create("rogue", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
            send(stage.stream.as_fd(), packet, Some(file.as_fd())).expect("send");
        }),
    ];
    for (name, crime) in crimes {
        let mut stage = Stage::new();
        crime(&mut stage, place);
        let seen = stage.play();
        assert_eq!(seen.down, [(ROGUE, FaultKind::ProtocolViolation)], "{name}");
        assert_eq!((seen.written, seen.messages.len()), (0, 0), "{name}");
        assert!(stage.target.bytes().iter().all(|byte| *byte == 0), "{name}");
    }
}

#[test]
fn a_record_that_waits_for_an_announcement_waits_until_it_comes_or_the_link_ends() {
    let mut stage = Stage::new();
    stage.put(&record(&message_words(1, 0)));
    let seen = stage.play();
    assert!(seen.messages.is_empty() && seen.down.is_empty());
    assert!(stage.transport.arm(), "only the stream can help");
    send(stage.stream.as_fd(), Packet::Nothing { seq: 1 }, None).expect("send");
    assert_eq!(stage.play().messages, [(ROGUE, Vec::new())]);

    let mut stage = Stage::new();
    stage.put(&record(&message_words(1, 0)));
    let (_, other) = UnixStream::pair().expect("pair");
    drop(std::mem::replace(&mut stage.stream, other));
    let seen = stage.play();
    assert!(seen.messages.is_empty());
    assert_eq!(seen.down, [(ROGUE, FaultKind::RankDied)]);
}

#[test]
fn a_side_that_never_sets_up_is_given_up_at_the_deadline() {
    let mut transport = ShmTransport::new().expect("new");
    let (near, far) = UnixStream::pair().expect("pair");
    let fault = transport.attach(ROGUE, near, Instant::now() + Duration::from_millis(20)).expect_err("deadline");
    assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(ROGUE)));
    drop(far);
    let (near, far) = UnixStream::pair().expect("pair");
    drop(far);
    let fault = transport.attach(ROGUE, near, Instant::now() + Duration::from_secs(30)).expect_err("gone");
    assert_eq!(fault.kind, FaultKind::RankDied);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever lies in the rogue's lane, nobody else's link suffers.
    #[test]
    fn garbage_in_a_lane_harms_nobody(
        words in proptest::collection::vec(prop_oneof![0u64..20, any::<u64>()], 1..200),
        head: u64, done: u64,
    ) {
        let mut stage = Stage::new();
        stage.lane.store(HEAD, head, Ordering::Relaxed);
        stage.lane.store(DONE, done, Ordering::Relaxed);
        stage.put(&words);
        let seen = stage.play();
        prop_assert!(seen.down.len() <= 1);
    }
}
