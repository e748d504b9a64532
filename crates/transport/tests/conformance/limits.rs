//! Capability bits and sizes are what they say.

use gradwire_proto::{Rank, RegionKey};
use gradwire_transport::{Buffer, Refused, Transport as _};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::Fixture;

/// What is advertised works, and what is not is refused.
pub(crate) fn capabilities_are_true<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    assert_eq!(cluster.nodes[0].transport.name(Rank(1)), F::NAME);
    let capabilities = cluster.nodes[0].transport.capabilities(Rank(1));
    let region = cluster.nodes[0].region(100, |at| at as u8);
    cluster.send(0, 1, b"ready");
    cluster.until("a message", |cluster| !cluster.nodes[1].sink.events.is_empty());
    let view = cluster.nodes[1].transport.view(Rank(0), at(region, 10), 3);
    if capabilities.peer_read {
        assert_eq!(view.expect("view"), [10, 11, 12]);
    } else {
        println!("SKIPPED: {} cannot read a peer's memory in place, and refuses to", F::NAME);
        assert!(matches!(view, Err(Refused::Invalid(_))), "{view:?}");
    }
    let target = cluster.nodes[1].region(100, |_| 0);
    let source = cluster.nodes[0].slice(region, 0..100);
    cluster.write(0, 1, b"x", &source, at(target, 0), 1);
    cluster.until("a token", |cluster| cluster.nodes[0].tokens() == [1]);
    cluster.until("a notice", |cluster| cluster.nodes[1].count(|event| matches!(event, Event::Written(..))) == 1);
    assert_eq!(cluster.nodes[1].sink.asked, usize::from(capabilities.admission));
}

/// Empty messages, payloads and immediates, and the largest of each.
pub(crate) fn empty_and_largest<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let limits = cluster.nodes[0].transport.limits();
    let bytes = limits.write_bytes_max;
    let target = cluster.nodes[1].region(bytes, |_| 0);
    let source = cluster.nodes[0].region(bytes, |at| (at ^ (at >> 8) ^ (at >> 16)) as u8);
    let whole = cluster.nodes[0].slice(source, 0..bytes);
    let none = cluster.nodes[0].slice(source, 7..7);
    let message: Vec<u8> = (0..limits.message_bytes_max).map(|at| at as u8).collect();
    let immediate: Vec<u8> = (0..limits.immediate_bytes_max).map(|at| !at as u8).collect();

    cluster.send(0, 1, b"");
    cluster.write(0, 1, b"", &none, at(target, 0), 0);
    cluster.write(0, 1, b"nowhere", &none, at(RegionKey(0), 0), 1);
    cluster.write(0, 1, &immediate, &whole, at(target, 0), 2);
    cluster.send(0, 1, &message);
    cluster.until("everything arriving", |cluster| {
        cluster.nodes[1].sink.events.len() == 5 && cluster.nodes[0].sink.events.len() == 3
    });
    assert_eq!(cluster.nodes[0].tokens(), [0, 1, 2]);
    let content = cluster.nodes[0].sink.buffer(source).bytes().to_vec();
    let got: Vec<Event> = cluster.nodes[1].sink.events.drain(..).collect();
    assert_eq!(got[0], Event::Message(Rank(0), Vec::new()));
    assert_eq!(got[1], Event::Written(Rank(0), Vec::new(), at(target, 0), Vec::new()));
    assert_eq!(got[2], Event::Written(Rank(0), b"nowhere".to_vec(), at(RegionKey(0), 0), Vec::new()));
    assert!(got[3] == Event::Written(Rank(0), immediate, at(target, 0), content), "the largest write was spoiled");
    assert_eq!(got[4], Event::Message(Rank(0), message));
}

/// What is over a limit is refused, and costs nothing.
pub(crate) fn over_the_limit_is_invalid<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let limits = cluster.nodes[0].transport.limits();
    let target = cluster.nodes[1].region(10, |_| 0);
    let large = cluster.nodes[0].region(limits.write_bytes_max + 1, |_| 0);
    let large = cluster.nodes[0].slice(large, 0..limits.write_bytes_max + 1);
    let small = cluster.nodes[0].region(10, |_| 0);
    let small = cluster.nodes[0].slice(small, 0..10);
    let unregistered = Buffer::allocate(10).expect("allocate").slice(0..10);
    let too_long = |len: usize| vec![0; len + 1];

    let transport = &mut cluster.nodes[0].transport;
    let refused = [
        transport.send(Rank(1), &too_long(limits.message_bytes_max)),
        transport.write(Rank(1), &too_long(limits.immediate_bytes_max), small.clone(), at(target, 0), 1),
        transport.write(Rank(1), b"", large, at(target, 0), 2),
        transport.write(Rank(1), b"", unregistered, at(target, 0), 3),
    ];
    for (n, result) in refused.iter().enumerate() {
        assert!(matches!(result, Err(Refused::Invalid(_))), "case {n}: {result:?}");
    }
    cluster.write(0, 1, b"", &small, at(target, 0), 4);
    cluster.until("a token", |cluster| cluster.nodes[0].tokens() == [4]);
}

/// Ranks that were never attached.
pub(crate) fn without_a_link_nothing_is_taken<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let region = cluster.nodes[0].region(10, |_| 0);
    let slice = cluster.nodes[0].slice(region, 0..10);
    for rank in [0, 2, 1023, u32::MAX] {
        let transport = &mut cluster.nodes[0].transport;
        assert!(matches!(transport.send(Rank(rank), b"x"), Err(Refused::NoLink)));
        assert!(matches!(transport.write(Rank(rank), b"", slice.clone(), at(region, 0), 1), Err(Refused::NoLink)));
        assert!(transport.view(Rank(rank), at(region, 0), 1).is_err());
        transport.disconnect(Rank(rank));
        assert!(transport.is_flushed(Rank(rank)));
    }
    cluster.nodes[0].poll();
    assert!(cluster.nodes[0].sink.events.is_empty());
}
