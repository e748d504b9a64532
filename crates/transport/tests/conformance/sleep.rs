//! Sleeping and waking.

use std::sync::atomic::{AtomicUsize, Ordering};

use gradwire_proto::Rank;
use gradwire_transport::{Refused, Transport as _};

use crate::cluster::{Cluster, Event, at};
use crate::fixture::Fixture;

/// Sleeps until `done`; every sleep must end by itself.
macro_rules! sleep_until {
    ($node:expr, $what:literal, $done:expr) => {
        while !$done {
            $node.sleep($what);
        }
    };
}

/// A message and a write wake a thread that sleeps.
pub(crate) fn news_wake_a_sleeper<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(1 << 20, |_| 0);
    let source = cluster.nodes[0].region(1 << 20, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..1 << 20);
    let [near, far] = cluster.pair(0, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=200usize {
                sleep_until!(far, "news", far.sink.events.len() >= n);
                far.transport.send(Rank(0), b"next").expect("room");
            }
            sleep_until!(far, "the flush", far.transport.is_flushed(Rank(0)));
        });
        for n in 0..200u64 {
            if n % 2 == 0 {
                near.transport.send(Rank(1), b"news").expect("room");
            } else {
                near.transport.write(Rank(1), b"news", source.clone(), at(target, 0), n).expect("room");
            }
            sleep_until!(near, "an answer", near.count(|event| matches!(event, Event::Message(..))) > n as usize);
        }
        sleep_until!(near, "the tokens", near.count(|event| matches!(event, Event::Sent(..))) == 100);
    });
}

/// The end of a link wakes.
pub(crate) fn the_end_wakes_a_sleeper<F: Fixture>() {
    let mut cluster = Cluster::<F>::new(2);
    let far = cluster.nodes.pop().expect("node");
    let near = &mut cluster.nodes[0];
    let asleep = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while asleep.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            drop(far);
        });
        near.poll();
        while !near.is_down() {
            if near.transport.arm() {
                asleep.store(1, Ordering::Release);
            }
            near.sleep("the end");
        }
    });
}

/// A side that sleeps because its queue is full, or until its writes are done, is woken for that.
pub(crate) fn room_and_completions_wake_a_sleeper<F: Fixture>() {
    const WRITES: u64 = 400;
    let mut cluster = Cluster::<F>::new(2);
    let target = cluster.nodes[1].region(1 << 16, |_| 0);
    let source = cluster.nodes[0].region(1 << 16, |_| 1);
    let source = cluster.nodes[0].slice(source, 0..1 << 16);
    let [near, far] = cluster.pair(0, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sleep_until!(far, "everything", far.sink.events.len() as u64 >= WRITES + 4 * WRITES);
        });
        for n in 0..WRITES {
            while let Err(refused) = near.transport.write(Rank(1), b"w", source.clone(), at(target, 0), n) {
                assert!(matches!(refused, Refused::Full), "{refused}");
                near.sleep("room for a write");
            }
            for _ in 0..4 {
                while let Err(refused) = near.transport.send(Rank(1), &[1; 3000]) {
                    assert!(matches!(refused, Refused::Full), "{refused}");
                    near.sleep("room for a message");
                }
            }
        }
        sleep_until!(near, "the tokens", near.sink.events.len() as u64 == WRITES);
        sleep_until!(near, "the flush", near.transport.is_flushed(Rank(1)));
    });
    assert_eq!(near.tokens(), (0..WRITES).collect::<Vec<_>>());
}

/// Both sides send at odd moments and sleep whenever they have nothing to do. A lost wake-up ends in the deadline.
pub(crate) fn no_wake_up_is_lost<F: Fixture>() {
    const ROUNDS: usize = 2_000;
    let mut cluster = Cluster::<F>::new(2);
    let [near, far] = cluster.pair(0, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                sleep_until!(far, "a message", far.sink.events.len() >= round);
                (0..round * 7 % 61).for_each(|_| std::hint::spin_loop());
                far.transport.send(Rank(0), &[0; 8]).expect("room");
            }
            sleep_until!(far, "the flush", far.transport.is_flushed(Rank(0)));
        });
        for round in 1..=ROUNDS {
            (0..round * 13 % 97).for_each(|_| std::hint::spin_loop());
            near.transport.send(Rank(1), &[0; 8]).expect("room");
            sleep_until!(near, "an answer", near.sink.events.len() >= round);
        }
    });
}
