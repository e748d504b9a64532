//! The fault-injecting wrapper does what its plan says, and no more.

use gradwire_proto::Rank;
use gradwire_transport::Transport as _;
use gradwire_transport::faulty::{FaultCounters, FaultPlan, MessageFault, WriteFault, WriteRule};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::{Fixture, PassThrough, Shm, Tcp};
use crate::process::shared;

const BYTES: usize = 1000;

/// Sends `count` writes under a plan, and returns what arrived: number and payload, in order of arrival.
fn writes_under<F: Fixture>(plan: FaultPlan, count: u64) -> (Vec<(u64, Vec<u8>)>, FaultCounters) {
    let mut cluster = Cluster::<PassThrough<F>>::new(2);
    let target = cluster.nodes[1].region(BYTES, |_| 0);
    let source = cluster.nodes[0].region(BYTES, |_| 0xaa);
    cluster.nodes[0].transport.set_plan(plan);
    let source = cluster.nodes[0].slice(source, 0..BYTES);
    for n in 0..count {
        cluster.write(0, 1, &n.to_le_bytes(), &source, at(target, 0), n);
    }
    cluster.until("all tokens", |cluster| {
        cluster.nodes[0].sink.events.len() as u64 == count && cluster.nodes[0].transport.is_flushed(Rank(1))
    });
    cluster.send(0, 1, b"end");
    cluster.until("the end", |cluster| cluster.nodes[1].count(|event| matches!(event, Event::Message(..))) == 1);
    assert_eq!(cluster.nodes[0].tokens(), (0..count).collect::<Vec<_>>());
    let got = cluster.nodes[1].take(|event| match event {
        Event::Written(_, immediate, _, payload) => {
            Some((u64::from_le_bytes(immediate[..].try_into().expect("8 bytes")), payload.clone()))
        }
        _ => None,
    });
    (got, cluster.nodes[0].transport.counters())
}

fn flipped_bits(payload: &[u8]) -> u32 {
    payload.iter().map(|byte| (byte ^ 0xaa).count_ones()).sum()
}

fn each_fault_is_done_where_the_plan_says<F: Fixture>() {
    let nth = |n, fault| WriteRule::Nth(Rank(1), n, fault);
    let writes = vec![
        nth(1, WriteFault::Corrupt),
        nth(3, WriteFault::Truncate),
        nth(5, WriteFault::Drop),
        nth(7, WriteFault::Duplicate),
        WriteRule::Nth(Rank(2), 8, WriteFault::Drop),
    ];
    let (got, counters) = writes_under::<F>(FaultPlan { seed: 1, writes, messages: None, ..Default::default() }, 10);
    let mut numbers: Vec<u64> = got.iter().map(|(n, _)| *n).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 6, 7, 7, 8, 9]);
    for (n, payload) in &got {
        let (len, flipped) = match n {
            1 => (BYTES, 1),
            3 => (BYTES / 2, 0),
            _ => (BYTES, 0),
        };
        assert_eq!((payload.len(), flipped_bits(payload)), (len, flipped), "write {n}");
    }
    let expected = FaultCounters {
        writes_corrupted: 1,
        writes_truncated: 1,
        writes_duplicated: 1,
        writes_dropped: 1,
        ..FaultCounters::default()
    };
    assert_eq!(counters, expected);
}

#[test]
fn each_fault_is_done_where_the_plan_says_over_tcp() {
    let _running = shared();
    each_fault_is_done_where_the_plan_says::<Tcp>();
}

#[test]
fn each_fault_is_done_where_the_plan_says_over_shm() {
    let _running = shared();
    each_fault_is_done_where_the_plan_says::<Shm>();
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let _running = shared();
    let plan = |seed| FaultPlan {
        seed,
        writes: vec![WriteRule::PerMillion(100_000, WriteFault::Corrupt), WriteRule::Every(50, WriteFault::Drop)],
        ..Default::default()
    };
    let (first, counters) = writes_under::<Shm>(plan(7), 500);
    let (second, _) = writes_under::<Shm>(plan(7), 500);
    let (other, _) = writes_under::<Shm>(plan(8), 500);
    assert!(first == second && first != other);
    assert!(counters.writes_corrupted > 10 && counters.writes_dropped > 5, "{counters:?}");
    let spoiled = first.iter().filter(|(_, payload)| flipped_bits(payload) == 1).count();
    assert_eq!(spoiled as u64, counters.writes_corrupted);
}

#[test]
fn messages_are_dropped_and_duplicated_by_predicate() {
    let _running = shared();
    let mut cluster = Cluster::<PassThrough<Shm>>::new(2);
    cluster.nodes[0].transport.set_plan(FaultPlan {
        messages: Some(Box::new(|peer, message| match message {
            b"lose" if peer == Rank(1) => Some(MessageFault::Drop),
            b"twice" => Some(MessageFault::Duplicate),
            _ => None,
        })),
        ..FaultPlan::default()
    });
    for message in [&b"a"[..], b"lose", b"twice", b"b"] {
        cluster.send(0, 1, message);
    }
    cluster.until("four messages", |cluster| cluster.nodes[1].sink.events.len() == 4);
    let got: Vec<Event> = cluster.nodes[1].sink.events.drain(..).collect();
    let message = |bytes: &[u8]| Event::Message(Rank(0), bytes.to_vec());
    assert_eq!(got, [message(b"a"), message(b"twice"), message(b"twice"), message(b"b")]);
    let counters = cluster.nodes[0].transport.counters();
    assert_eq!((counters.messages_dropped, counters.messages_duplicated), (1, 1));
}
