//! Links that end: by the other side, by this side, and by SIGKILL.

use gradwire_proto::{FaultKind, Rank};
use gradwire_transport::{Refused, Transport as _};

use crate::child::Child;
use crate::cluster::{Cluster, Event, Node, at};
use crate::fixture::Fixture;

/// Everything that had left the other side is delivered before its end is.
pub(crate) fn what_arrived_before_the_end_is_delivered<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    for n in 0..100u64 {
        cluster.nodes[1].transport.send(Rank(0), &n.to_le_bytes()).expect("room");
    }
    cluster.nodes[1].until("the flush", |node| node.transport.is_flushed(Rank(0)));
    drop(cluster.nodes.pop());
    cluster.until("the end", |cluster| cluster.nodes[0].is_down());
    let node = &mut cluster.nodes[0];
    assert!(matches!(node.sink.events.pop_back(),
        Some(Event::Down(Rank(1), fault)) if fault.kind == FaultKind::RankDied && fault.rank == Some(Rank(1))));
    let got = node.take(|event| match event {
        Event::Message(Rank(1), bytes) => Some(u64::from_le_bytes(bytes[..].try_into().expect("8 bytes"))),
        _ => None,
    });
    assert_eq!(got, (0..100).collect::<Vec<_>>());
    assert!(matches!(node.transport.send(Rank(1), b"x"), Err(Refused::NoLink)));
    for _ in 0..200 {
        node.poll();
    }
    assert!(node.sink.events.is_empty(), "the end was reported once, and nothing after it");
}

/// Fills the queue to node 1 with writes, and returns how many it took.
fn fill_with_writes<F: Fixture>(cluster: &mut Cluster<F>) -> u64 {
    let target = cluster.nodes[1].region(1 << 20, |_| 0);
    let source = cluster.nodes[0].region(1 << 20, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..1 << 20);
    let mut taken = 0;
    while taken < 50 {
        match cluster.nodes[0].transport.write(Rank(1), b"w", source.clone(), at(target, 0), taken) {
            Ok(()) => taken += 1,
            Err(Refused::Full) => break,
            Err(refused) => panic!("{refused}"),
        }
    }
    assert!(taken > 0);
    taken
}

/// The other side goes while writes are queued: their tokens come back once each, before the notice of the end.
pub(crate) fn every_token_comes_back_once_when_a_peer_is_gone<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let taken = fill_with_writes(&mut cluster);
    drop(cluster.nodes.pop());
    cluster.until("the end", |cluster| cluster.nodes[0].is_down());
    let node = &mut cluster.nodes[0];
    assert!(matches!(node.sink.events.back(), Some(Event::Down(Rank(1), _))));
    assert_eq!(node.count(|event| matches!(event, Event::Down(..))), 1);
    assert_eq!(node.tokens(), (0..taken).collect::<Vec<_>>());
    for _ in 0..200 {
        node.poll();
    }
    assert_eq!(node.sink.events.len(), 1);
}

/// This side ends the link: tokens come back, it hears no `peer_down`, and the other side does.
pub(crate) fn disconnecting_drops_what_is_queued<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let taken = fill_with_writes(&mut cluster);
    cluster.nodes[0].transport.disconnect(Rank(1));
    assert!(cluster.nodes[0].transport.is_flushed(Rank(1)));
    assert!(matches!(cluster.nodes[0].transport.send(Rank(1), b"x"), Err(Refused::NoLink)));
    assert!(!cluster.nodes[0].transport.arm(), "there are tokens to report");
    cluster.nodes[0].until("the tokens", |node| node.sink.events.len() >= taken as usize);
    cluster.until("the end at the other side", |cluster| cluster.nodes[1].is_down());
    assert_eq!(cluster.nodes[0].tokens(), (0..taken).collect::<Vec<_>>());
    assert!(cluster.nodes[0].sink.events.is_empty());
    // Whatever was delivered before the link ended arrived whole.
    for event in cluster.nodes[1].sink.events.drain(..) {
        match event {
            Event::Written(_, immediate, _, payload) => {
                assert!(immediate == b"w" && payload.iter().all(|byte| *byte == 1));
            }
            Event::Down(Rank(0), _) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// After the end of a link a new one to the same rank starts clean, and regions registered before still work.
pub(crate) fn a_link_can_come_back<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(100, |_| 0);
    let source = cluster.nodes[0].region(100, |at| at as u8);
    let source = cluster.nodes[0].slice(source, 0..100);
    for round in 0..5u64 {
        cluster.write(0, 1, b"w", &source, at(target, 0), round);
        cluster.send(1, 0, &[round as u8]);
        cluster.until("both arriving", |cluster| {
            cluster.nodes[0].sink.events.len() == 2 && cluster.nodes[1].sink.events.len() == 1
        });
        assert_eq!(cluster.nodes[0].tokens(), [round]);
        assert_eq!(cluster.nodes[0].sink.events.pop_front(), Some(Event::Message(Rank(1), vec![round as u8])));
        assert!(matches!(cluster.nodes[1].sink.events.pop_front(), Some(Event::Written(..))));
        cluster.send(0, 1, b"never read");
        let (leaver, stayer) = ((round % 2) as usize, (1 - round % 2) as usize);
        let peer = cluster.nodes[stayer].rank;
        cluster.nodes[leaver].transport.disconnect(peer);
        cluster.until("the end", |cluster| cluster.nodes[stayer].is_down());
        cluster.nodes.iter_mut().for_each(|node| node.sink.events.clear());
        cluster.link(0, 1);
    }
}

/// A process that is killed: what it had sent is delivered, its end is noticed, and nothing of it is left.
pub(crate) fn a_killed_peer_is_noticed<F: Fixture>() {
    let before = left_behind();
    let (listener, address) = F::listen();
    let mut node = Node::new(0, F::create());
    let region = node.region(4096, |_| 0);
    let mut child = Child::start(F::NAME, &address, region);
    F::accept(&mut node.transport, &listener, Rank(1));
    node.until("the hello", |node| !node.sink.events.is_empty());
    assert_eq!(node.sink.events.pop_front(), Some(Event::Message(Rank(1), b"hello".to_vec())));
    node.transport.send(Rank(1), b"go").expect("room");
    node.until("the flush", |node| node.transport.is_flushed(Rank(1)));
    child.wait_until_it_has_sent();
    child.kill();

    // Asleep, so that the end has to wake us.
    while !node.is_down() {
        node.sleep("the death of its peer");
    }
    assert!(matches!(node.sink.events.pop_back(),
        Some(Event::Down(Rank(1), fault)) if fault.kind == FaultKind::RankDied));
    assert_eq!(
        node.sink.events.pop_back(),
        Some(Event::Written(Rank(1), b"end".to_vec(), at(region, 0), vec![9; 4096]))
    );
    let messages: Vec<Event> = (0..100u64).map(|n| Event::Message(Rank(1), n.to_le_bytes().to_vec())).collect();
    assert_eq!(node.sink.events, messages);
    drop(node);
    assert_eq!(left_behind(), before);
}

/// What of gradwire lies in the places where memory with a name would be.
fn left_behind() -> Vec<std::ffi::OsString> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.retain(|name| name.to_string_lossy().contains("gradwire"));
    names
}
