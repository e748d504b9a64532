//! Nothing piles up.

use gradwire_proto::Rank;
use gradwire_transport::{Buffer, Transport as _};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::Fixture;
use crate::process::Holdings;

/// Links that end and come back hold nothing: descriptors, mappings, memory.
pub(crate) fn ten_thousand_reconnects<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let region = cluster.nodes[0].region(100, |_| 1);
    let target = cluster.nodes[1].region(100, |_| 0);
    let source = cluster.nodes[0].slice(region, 0..100);
    let mut warm = None;
    for round in 0..10_000usize {
        cluster.write(0, 1, b"w", &source, at(target, 0), round as u64);
        cluster.until("the notice", |cluster| !cluster.nodes[1].sink.events.is_empty());
        let (leaver, stayer) = (round % 2, 1 - round % 2);
        let peer = cluster.nodes[stayer].rank;
        cluster.nodes[leaver].transport.disconnect(peer);
        cluster.until("the end", |cluster| cluster.nodes[stayer].is_down());
        cluster.poll();
        assert_eq!(cluster.nodes[0].tokens(), [round as u64]);
        cluster.nodes.iter_mut().for_each(|node| node.sink.events.clear());
        cluster.link(0, 1);
        if round == 1_000 {
            warm = Some(Holdings::now());
        }
    }
    let (warm, end) = (warm.expect("warm"), Holdings::now());
    assert_eq!(end.descriptors, warm.descriptors);
    assert!(end.mappings <= warm.mappings + 8, "{warm:?} {end:?}");
    assert!(end.resident_bytes <= warm.resident_bytes + (4 << 20), "{warm:?} {end:?}");
}

/// Regions that are registered, used and deregistered again are let go on both sides.
pub(crate) fn regions_come_and_go<F: Fixture>() {
    churn(&mut Cluster::<F>::new(2));
}

/// The same, twice over one link: the second time leaves nothing behind that the first had not.
pub(crate) fn regions_leave_nothing_behind<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    churn(&mut cluster);
    let warm = Holdings::now();
    churn(&mut cluster);
    let end = Holdings::now();
    // Each time leaves its one target.
    assert_eq!(end.descriptors, warm.descriptors + 1);
    assert!(end.mappings <= warm.mappings + 8, "{warm:?} {end:?}");
    assert!(end.resident_bytes <= warm.resident_bytes + (4 << 20), "{warm:?} {end:?}");
}

fn churn<F: Fixture>(cluster: &mut Cluster<F>) {
    let target = cluster.nodes[1].region(64, |_| 0);
    let mut keys = Vec::new();
    for round in 0..10_000u64 {
        let mut buffer = Buffer::allocate(64).expect("allocate");
        buffer.bytes_mut()[0] = round as u8;
        cluster.nodes[0].transport.register(&buffer).expect("register");
        keys.push(buffer.key());
        if round % 16 == 0 {
            cluster.write(0, 1, &[round as u8], &buffer.slice(0..64), at(target, 0), round);
        }
        cluster.nodes[0].transport.deregister(buffer.key());
        // The other side looks now and then only.
        if round % 100 == 0 {
            cluster.poll();
        }
    }
    cluster.until("everything arriving", |cluster| {
        cluster.nodes[0].transport.is_flushed(Rank(1)) && cluster.nodes[0].sink.events.len() == 625
    });
    let got = cluster.nodes[1].take(|event| match event {
        Event::Written(_, immediate, _, payload) => Some((immediate[0], payload[0])),
        _ => None,
    });
    assert_eq!(got, (0..625).map(|n| ((n * 16) as u8, (n * 16) as u8)).collect::<Vec<_>>());
    cluster.send(0, 1, b"end");
    cluster.until("the end", |cluster| !cluster.nodes[1].sink.events.is_empty());
    cluster.nodes.iter_mut().for_each(|node| node.sink.events.clear());
    assert!(keys.iter().all(|key| cluster.nodes[1].transport.view(Rank(0), at(*key, 0), 1).is_err()));
}
