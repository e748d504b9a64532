//! Measurements, printed and never asserted:
//! `cargo test -p gradwire-transport --release --test conformance -- --ignored --nocapture measure`.

use std::time::{Duration, Instant};

use gradwire_proto::{Fault, Rank};
use gradwire_transport::{Remote, Sink, Transport};

use crate::cluster::{Cluster, at};
use crate::fixture::{Fixture, Shm, Tcp};
use crate::process::exclusive;

const BATCHES: usize = 20;
const ROUNDS: usize = 5_000;

#[derive(Default)]
struct Count {
    arrived: usize,
    sent: usize,
}

impl Sink for Count {
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

/// Waits for one thing more, busily or asleep.
fn wait(transport: &mut impl Transport, count: &mut Count, target: usize, sleeps: bool) {
    while count.arrived < target {
        if transport.poll(count) == 0 && sleeps && count.arrived < target && transport.arm() {
            let mut descriptor =
                [rustix::event::PollFd::from_borrowed_fd(transport.event_fd(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut descriptor, None).expect("poll");
        }
    }
}

fn ping_pong<F: Fixture>(sleeps: bool) {
    let rounds = if sleeps { ROUNDS / 10 } else { ROUNDS };
    let mut cluster = Cluster::<F>::new(2);
    let [near, far] = cluster.pair(0, 1);
    let mut best = Duration::MAX;
    let mut all = Duration::ZERO;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut count = Count::default();
            for n in 1..=BATCHES * rounds {
                wait(&mut far.transport, &mut count, n, sleeps);
                far.transport.send(Rank(0), &[7; 64]).expect("room");
            }
            while !far.transport.is_flushed(Rank(0)) {
                far.transport.poll(&mut count);
            }
        });
        let mut count = Count::default();
        for batch in 0..BATCHES {
            let start = Instant::now();
            for n in 1..=rounds {
                near.transport.send(Rank(1), &[7; 64]).expect("room");
                wait(&mut near.transport, &mut count, batch * rounds + n, sleeps);
            }
            best = best.min(start.elapsed());
            all += start.elapsed();
        }
    });
    let one_way = |time: Duration, rounds: usize| time.as_nanos() as f64 / 2.0 / rounds as f64;
    println!(
        "{} 64-byte messages, {}: {:.0} ns one way at best, {:.0} ns on average",
        F::NAME,
        if sleeps { "sleeping between" } else { "busy polling" },
        one_way(best, rounds),
        one_way(all, BATCHES * rounds),
    );
}

fn writes<F: Fixture>() {
    const BYTES: usize = 256 * 1024;
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(BYTES, |_| 0);
    let source = cluster.nodes[0].region(BYTES, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..BYTES);
    let [near, far] = cluster.pair(0, 1);
    let (mut sender, mut receiver) = (Count::default(), Count::default());
    let mut best = Duration::MAX;
    for batch in 1..=BATCHES {
        let start = Instant::now();
        for _ in 0..32 {
            near.transport.write(Rank(1), &[0; 64], source.clone(), at(target, 0), 0).expect("room");
        }
        while sender.sent < batch * 32 {
            near.transport.poll(&mut sender);
            far.transport.poll(&mut receiver);
        }
        best = best.min(start.elapsed());
    }
    let gigabytes = (32 * BYTES) as f64 / best.as_secs_f64() / 1e9;
    println!("{} writes of {BYTES} bytes, one thread at both ends: {gigabytes:.1} GB/s at best", F::NAME);
}

#[test]
#[ignore = "a measurement"]
fn measure() {
    let _running = exclusive();
    ping_pong::<Shm>(false);
    ping_pong::<Shm>(true);
    ping_pong::<Tcp>(false);
    ping_pong::<Tcp>(true);
    writes::<Shm>();
    writes::<Tcp>();
}
