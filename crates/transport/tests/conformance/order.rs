//! Everything arrives once, and in order.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use gradwire_proto::Rank;
use gradwire_transport::{Refused, Transport as _};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::Fixture;

const REGION_BYTES: usize = 256 * 1024;

#[derive(Clone, Debug)]
enum Op {
    Message { from: usize, len: usize },
    Write { from: usize, len: usize, immediate: usize, offset: usize },
    Poll { node: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => (0..2usize, 0..=4096usize).prop_map(|(from, len)| Op::Message { from, len }),
        3 => (0..2usize, prop_oneof![0..100usize, 0..=REGION_BYTES / 2], 0..=64usize, 0..REGION_BYTES / 2)
            .prop_map(|(from, len, immediate, offset)| Op::Write { from, len, immediate, offset }),
        2 => (0..2usize).prop_map(|node| Op::Poll { node }),
    ];
    proptest::collection::vec(op, 1..80)
}

/// Any sequence of messages and writes in both directions, with polls in between, arrives as it was sent.
pub(crate) fn messages_and_writes_arrive_in_order<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let sources = [0, 1].map(|node| cluster.nodes[node].region(REGION_BYTES, |at| (at * 31 + node * 7) as u8));
    let targets = [0, 1].map(|node| cluster.nodes[node].region(REGION_BYTES, |_| 0));
    let contents = [0, 1].map(|node| cluster.nodes[node].sink.buffer(sources[node]).bytes().to_vec());
    let cluster = std::cell::RefCell::new(cluster);

    let config = Config { cases: 48, failure_persistence: None, ..Config::default() };
    let run = TestRunner::new(config).run(&ops(), |ops| {
        let mut cluster = cluster.borrow_mut();
        let mut expected = [Vec::new(), Vec::new()];
        let mut tokens = [0u64; 2];
        for (n, op) in ops.into_iter().enumerate() {
            match op {
                Op::Message { from, len } => {
                    let message: Vec<u8> = (0..len).map(|i| (i + n) as u8).collect();
                    cluster.send(from, 1 - from, &message);
                    expected[1 - from].push(Event::Message(Rank(from as u32), message));
                }
                Op::Write { from, len, immediate, offset } => {
                    let immediate: Vec<u8> = (0..immediate).map(|i| (i * 3 + n) as u8).collect();
                    let source = cluster.nodes[from].slice(sources[from], offset..offset + len);
                    let target = at(targets[1 - from], REGION_BYTES / 2 - offset.min(len));
                    cluster.write(from, 1 - from, &immediate, &source, target, tokens[from]);
                    tokens[from] += 1;
                    let payload = contents[from][offset..offset + len].to_vec();
                    expected[1 - from].push(Event::Written(Rank(from as u32), immediate, target, payload));
                }
                Op::Poll { node } => {
                    cluster.nodes[node].poll();
                }
            }
        }
        for node in [0, 1] {
            let count = expected[node].len() + tokens[node] as usize;
            cluster.until("everything arriving", |cluster| cluster.nodes[node].sink.events.len() >= count);
            let sent: Vec<u64> = (0..tokens[node]).collect();
            prop_assert_eq!(cluster.nodes[node].tokens(), sent);
            let got: Vec<Event> = cluster.nodes[node].sink.events.drain(..).collect();
            prop_assert_eq!(&got, &expected[node]);
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
}

/// A queue that nobody empties becomes full; what it took arrives, and it takes more then.
pub(crate) fn a_full_queue_gives_back_and_loses_nothing<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(64 * 1024, |_| 0);
    let source = cluster.nodes[0].region(64 * 1024, |at| at as u8);
    let source = cluster.nodes[0].slice(source, 0..64 * 1024);
    for round in 0..3 {
        let mut taken = Vec::new();
        loop {
            let n = taken.len() as u64;
            let node = &mut cluster.nodes[0];
            let offered = if n % 3 == round {
                node.transport.write(Rank(1), &n.to_le_bytes(), source.clone(), at(target, 0), n)
            } else {
                node.transport.send(Rank(1), &n.to_le_bytes().repeat(64))
            };
            match offered {
                Ok(()) => taken.push(n),
                // What has room in the kernel is passed on by polling; the other side sleeps.
                Err(Refused::Full) if node.poll() > 0 => {}
                Err(Refused::Full) => break,
                Err(refused) => panic!("{refused}"),
            }
            assert!(taken.len() < 1_000_000, "the queue has no end");
        }
        assert!(taken.len() > 1, "a queue of one is not a queue");
        cluster.until("everything arriving", |cluster| {
            cluster.nodes[1].count(|event| !matches!(event, Event::Sent(..))) == taken.len()
                && cluster.nodes[0].transport.is_flushed(Rank(1))
        });
        let got = cluster.nodes[1].take(|event| match event {
            Event::Message(_, bytes) | Event::Written(_, bytes, ..) => {
                Some(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")))
            }
            _ => None,
        });
        assert_eq!(got, taken);
        let writes: Vec<u64> = taken.iter().copied().filter(|n| n % 3 == round).collect();
        cluster.until("all tokens", |cluster| {
            cluster.nodes[0].count(|event| matches!(event, Event::Sent(..))) >= writes.len()
        });
        assert_eq!(cluster.nodes[0].tokens(), writes);
    }
}

/// Four ranks, everybody sends and writes to everybody.
pub(crate) fn four_peers_at_once<F: Fixture>() {
    const ROUNDS: usize = 200;
    let mut cluster = Cluster::<F>::new(4);
    let targets: Vec<_> = (0..4).map(|node| cluster.nodes[node].region(4 * 4096, |_| 0)).collect();
    let sources: Vec<_> = (0..4).map(|node| cluster.nodes[node].region(4096, |at| (at + node) as u8)).collect();
    for round in 0..ROUNDS {
        for (from, source) in sources.iter().enumerate() {
            let source = cluster.nodes[from].slice(*source, 0..4096);
            for to in (0..4).filter(|to| *to != from) {
                cluster.write(from, to, &[round as u8], &source, at(targets[to], from * 4096), round as u64);
                cluster.send(from, to, &[from as u8, to as u8, round as u8]);
            }
        }
    }
    cluster.until("everything arriving", |cluster| {
        cluster.nodes.iter().all(|node| node.sink.events.len() == 3 * 3 * ROUNDS)
    });
    for to in 0..4u32 {
        for from in (0..4u32).filter(|from| *from != to) {
            let node = &mut cluster.nodes[to as usize];
            let payload: Vec<u8> = (0..4096).map(|at| (at + from as usize) as u8).collect();
            let got = node.take(|event| match event {
                Event::Message(peer, _) | Event::Written(peer, ..) if *peer == Rank(from) => Some(event.clone()),
                _ => None,
            });
            for (round, pair) in got.chunks(2).enumerate() {
                let target = at(targets[to as usize], from as usize * 4096);
                let written = Event::Written(Rank(from), vec![round as u8], target, payload.clone());
                let message = Event::Message(Rank(from), vec![from as u8, to as u8, round as u8]);
                assert_eq!(pair, [written, message]);
            }
        }
    }
}
