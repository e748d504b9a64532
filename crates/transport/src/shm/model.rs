//! The ring and its wake-ups under loom: all interleavings, with the memory orders as they are.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p gradwire-transport --release --lib loom`

use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::ring::{Awaits, Bell, Consumer, Memory, OwnMemory, Producer, RING, Sleep};

#[derive(Clone)]
struct Lane(Arc<Vec<AtomicU64>>);

impl Lane {
    fn new(capacity: usize) -> Self {
        Self(Arc::new((0..RING + capacity).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl Memory for Lane {
    fn load(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Relaxed)
    }
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

impl OwnMemory for Lane {
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.0[index].store(value, order);
    }
}

/// Stands for the stream: a wake-up that stays until it is read.
#[derive(Clone)]
struct Doorbell(Arc<(Mutex<bool>, Condvar)>);

impl Doorbell {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn ring(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Producer of `records` two-word records, which must get through a ring of `capacity` words; both sides sleep
/// whenever they have nothing to do. A lost wake-up is a deadlock, which loom reports; a torn record fails a check.
fn pass(capacity: usize, records: u64) {
    let (ours, theirs) = (Lane::new(capacity), Lane::new(capacity));
    let (room, news) = (Doorbell::new(), Doorbell::new());

    let consumer_side = {
        let (own, peer, room, news) = (theirs.clone(), ours.clone(), room.clone(), news.clone());
        thread::spawn(move || {
            let (mut consumer, mut sleep, mut bell) =
                (Consumer::new(capacity as u64), Sleep::default(), Bell::default());
            let mut record = [0; 4];
            let mut expected = 0;
            while expected < records {
                if let Some(words) = consumer.peek(&peer, &mut record).expect("sound") {
                    assert_eq!(&record[..words], [expected, expected * 3 + 1]);
                    consumer.consume(&own, words);
                    expected += 1;
                    if bell.must_ring(&peer, Awaits::Progress) {
                        room.ring();
                    }
                    continue;
                }
                sleep.announce(&own, Awaits::Records);
                own.fence(Ordering::SeqCst);
                if !consumer.is_ready(&peer) {
                    news.wait();
                }
                Sleep::end(&own);
            }
        })
    };

    let (mut producer, mut sleep, mut bell) = (Producer::new(capacity as u64), Sleep::default(), Bell::default());
    let mut next = 0;
    while next < records {
        if producer.push(&ours, &theirs, &[next, next * 3 + 1], &[]).expect("sound") {
            next += 1;
            if bell.must_ring(&theirs, Awaits::Records) {
                news.ring();
            }
            continue;
        }
        sleep.announce(&ours, Awaits::Progress);
        ours.fence(Ordering::SeqCst);
        if !producer.has_moved(&theirs) {
            room.wait();
        }
        Sleep::end(&ours);
    }
    consumer_side.join().unwrap();
}

/// Every interleaving with at most this many switches away from a thread that could go on.
fn check(capacity: usize, records: u64, preemptions: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || pass(capacity, records));
}

#[test]
fn loom_a_record_is_never_torn_and_its_wake_up_never_lost() {
    check(4, 1, 4);
}

#[test]
fn loom_a_full_ring_is_reused_without_tearing_or_sleeping_on() {
    check(4, 3, 3);
}
