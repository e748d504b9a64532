//! One-sided writes, admission, and memory that is read in place.

use gradwire_proto::{Fault, Rank, RegionKey};
use gradwire_transport::{Buffer, Refused, Remote, Sink, Transport as _};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::Fixture;
use crate::sys::allocations;

/// The payload is in memory when the notice comes, whatever its size, and nothing beside it is touched.
pub(crate) fn a_payload_is_there_before_its_notice<F: Fixture>() {
    const BYTES: usize = 1 << 20;
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(BYTES + 2, |_| 0xee);
    let source = cluster.nodes[0].region(BYTES, |_| 0);
    for (round, len) in [1, 7, 4096, 65_537, BYTES].into_iter().enumerate() {
        cluster.nodes[0].sink.buffer(source).bytes_mut().fill(round as u8);
        let slice = cluster.nodes[0].slice(source, 0..len);
        cluster.write(0, 1, &[round as u8], &slice, at(target, 1), round as u64);
        cluster.until("a notice", |cluster| !cluster.nodes[1].sink.events.is_empty());
        let event = cluster.nodes[1].sink.events.pop_front().expect("event");
        assert!(event == Event::Written(Rank(0), vec![round as u8], at(target, 1), vec![round as u8; len]), "{len}");
        let bytes = cluster.nodes[1].sink.buffer(target).bytes();
        assert!(bytes[0] == 0xee && bytes[len + 1..].iter().all(|byte| *byte == 0xee), "{len}");
        cluster.until("a token", |cluster| cluster.nodes[0].tokens() == [round as u64]);
        cluster.nodes[1].sink.buffer(target).bytes_mut().fill(0xee);
    }
}

/// Targets that are not within a region are discarded; the link goes on.
pub(crate) fn writes_out_of_bounds_are_discarded<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(100, |_| 0);
    let gone = cluster.nodes[1].region(100, |_| 0);
    cluster.nodes[1].transport.deregister(gone);
    let source = cluster.nodes[0].region(100, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..50);
    let places = [
        at(target, 51),
        at(target, 100),
        at(target, 1 << 40),
        Remote { region: target, offset: u64::MAX },
        Remote { region: target, offset: u64::MAX - 49 },
        at(gone, 0),
        at(RegionKey(u64::MAX), 0),
        at(target, 50),
    ];
    for (token, place) in places.into_iter().enumerate() {
        cluster.write(0, 1, b"i", &source, place, token as u64);
    }
    cluster.send(0, 1, b"end");
    cluster.until("the end", |cluster| {
        cluster.nodes[1].count(|event| matches!(event, Event::Message(..))) == 1
            && cluster.nodes[0].sink.events.len() == places.len()
    });
    assert_eq!(cluster.nodes[0].tokens(), (0..places.len() as u64).collect::<Vec<_>>());
    let written = Event::Written(Rank(0), b"i".to_vec(), at(target, 50), vec![1; 50]);
    assert_eq!(cluster.nodes[1].sink.events, [written, Event::Message(Rank(0), b"end".to_vec())]);
    assert!(cluster.nodes[1].sink.buffer(target).bytes()[..50].iter().all(|byte| *byte == 0));
    assert!(cluster.nodes[1].sink.buffer(gone).bytes().iter().all(|byte| *byte == 0));
}

/// A refused write leaves memory alone and is not noticed; the link goes on, and the token comes back.
pub(crate) fn writes_can_be_refused<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    if !cluster.nodes[1].transport.capabilities(Rank(0)).admission {
        println!("SKIPPED: {} does not ask before a payload lands", F::NAME);
        return;
    }
    let target = cluster.nodes[1].region(1 << 20, |_| 0);
    let source = cluster.nodes[0].region(1 << 20, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..1 << 20);
    cluster.nodes[1].sink.refuses = true;
    cluster.write(0, 1, b"no", &source, at(target, 0), 1);
    cluster.send(0, 1, b"between");
    cluster.until("the message", |cluster| !cluster.nodes[1].sink.events.is_empty());
    assert!(cluster.nodes[1].sink.buffer(target).bytes().iter().all(|byte| *byte == 0));
    cluster.nodes[1].sink.refuses = false;
    cluster.write(0, 1, b"yes", &source, at(target, 0), 2);
    cluster.until("the notice", |cluster| {
        cluster.nodes[1].sink.events.len() == 2 && cluster.nodes[0].sink.events.len() == 2
    });
    assert_eq!(cluster.nodes[0].tokens(), [1, 2]);
    assert_eq!(cluster.nodes[1].sink.asked, 2);
    assert_eq!(cluster.nodes[1].sink.events[0], Event::Message(Rank(0), b"between".to_vec()));
    assert!(matches!(&cluster.nodes[1].sink.events[1], Event::Written(_, immediate, ..) if immediate == b"yes"));
}

/// A buffer that is dropped and deregistered right after the write still arrives whole.
pub(crate) fn sources_outlive_their_buffers<F: Fixture>() {
    const BYTES: usize = 300_000;
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(BYTES, |_| 0);
    for round in 0..20u8 {
        let mut buffer = Buffer::allocate(BYTES).expect("allocate");
        buffer.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_add(round));
        cluster.nodes[0].transport.register(&buffer).expect("register");
        let slice = buffer.slice(0..BYTES);
        cluster.write(0, 1, &[round], &slice, at(target, 0), round.into());
        drop(slice);
        cluster.nodes[0].transport.deregister(buffer.key());
        drop(buffer);
        // Memory that was freed too early would be taken by this.
        let mut other = Buffer::allocate(BYTES).expect("allocate");
        other.bytes_mut().fill(0xff);
        cluster.until("the notice", |cluster| !cluster.nodes[1].sink.events.is_empty());
        let payload: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_add(round)).collect();
        let event = cluster.nodes[1].sink.events.pop_front().expect("event");
        assert!(event == Event::Written(Rank(0), vec![round], at(target, 0), payload), "round {round}");
        cluster.until("the token", |cluster| cluster.nodes[0].tokens() == [u64::from(round)]);
    }
}

/// A view shows what the peer wrote before it said so, in regions registered before and after the link; not more.
pub(crate) fn regions_can_be_read_in_place<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    if !cluster.nodes[0].transport.capabilities(Rank(1)).peer_read {
        println!("SKIPPED: {} cannot read a peer's memory in place", F::NAME);
        return;
    }
    let mut keys = Vec::new();
    for round in 0..600usize {
        let key = cluster.nodes[0].region(64, |_| round as u8);
        keys.push(key);
        cluster.send(0, 1, &(round as u64).to_le_bytes());
    }
    cluster.until("all messages", |cluster| cluster.nodes[1].sink.events.len() == 600);
    // A link that comes later knows all of them too.
    cluster.nodes[1].transport.disconnect(Rank(0));
    cluster.until("the end of the link", |cluster| cluster.nodes[0].is_down());
    cluster.link(0, 1);
    cluster.send(0, 1, b"again");
    cluster.until("a message", |cluster| cluster.nodes[1].sink.events.len() == 601);
    for (round, key) in keys.iter().enumerate() {
        let view = cluster.nodes[1].transport.view(Rank(0), at(*key, 60), 4).expect("view");
        assert_eq!(view, [round as u8; 4]);
    }
    cluster.nodes[0].sink.buffer(keys[3]).bytes_mut()[5] = 77;
    assert_eq!(cluster.nodes[1].transport.view(Rank(0), at(keys[3], 5), 1).expect("view"), [77]);
    cluster.nodes[0].transport.deregister(keys[4]);
    cluster.send(0, 1, b"one less");
    cluster.until("a message", |cluster| cluster.nodes[1].sink.events.len() == 602);
    let transport = &cluster.nodes[1].transport;
    for (place, bytes) in
        [(at(keys[3], 61), 4), (at(keys[3], usize::MAX), 4), (at(RegionKey(0), 0), 1), (at(keys[4], 0), 1)]
    {
        assert!(matches!(transport.view(Rank(0), place, bytes), Err(Refused::Invalid(_))), "{place:?}");
    }
    assert!(matches!(transport.view(Rank(5), at(keys[0], 0), 1), Err(Refused::NoLink | Refused::Invalid(_))));
}

/// Counts, and keeps nothing.
#[derive(Default)]
struct Tally {
    arrived: usize,
    sent: usize,
}

impl Sink for Tally {
    fn admit(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) -> bool {
        true
    }
    fn message(&mut self, _: Rank, _: &[u8]) {
        self.arrived += 1;
    }
    fn written(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) {
        self.arrived += 1;
    }
    fn sent(&mut self, _: Rank, _: u64) {
        self.sent += 1;
    }
    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        panic!("{peer}: {fault}");
    }
}

/// Once warm, messages, writes, polls and sleeps ask for no memory.
pub(crate) fn steady_state_does_not_allocate<F: Fixture>() {
    const ROUNDS: usize = 500;
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(64 * 1024, |_| 0);
    let source = cluster.nodes[0].region(64 * 1024, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..64 * 1024);
    let mut tally = [Tally::default(), Tally::default()];
    let mut round = |cluster: &mut Cluster<F>, n: usize| {
        let [near, far] = cluster.pair(0, 1);
        for _ in 0..4 {
            near.transport.send(Rank(1), &[5; 300]).expect("room");
            near.transport.write(Rank(1), &[6; 64], source.clone(), at(target, 0), n as u64).expect("room");
        }
        while tally[1].arrived < 8 * n || tally[0].sent < 4 * n {
            near.transport.poll(&mut tally[0]);
            far.transport.arm();
            far.transport.poll(&mut tally[1]);
        }
    };
    (1..=ROUNDS).for_each(|n| round(&mut cluster, n));
    let before = allocations();
    (ROUNDS + 1..=2 * ROUNDS).for_each(|n| round(&mut cluster, n));
    assert_eq!(allocations() - before, 0);
}
