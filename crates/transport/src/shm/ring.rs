//! The ring of one direction, and the protocol of sleeping and waking.
//!
//! Owns: how records get from the producer to the consumer, and how a sleeping side is woken exactly when there is
//! something to do. Knows nothing of what records mean, and touches memory only through [`Memory`], so that loom
//! runs this very code (see `model.rs`).
//!
//! Every link has two *lanes*, one in the memory of each side. A side writes its own lane and reads the other's:
//!
//! | word | written by the lane's owner |
//! | --- | --- |
//! | [`TAIL`] | end of what it has published in its ring, in words since the start |
//! | [`HEAD`] | end of what it has consumed from the other side's ring |
//! | [`DONE`] | how many of the other side's writes it has carried out |
//! | [`SLEEP`] | what it sleeps for, and how often it has slept: see [`Sleep`] |
//! | [`CLOSED`] | not 0: it has ended the link, and the sources of its writes may change |
//! | [`RING`]... | the ring: records of 8-byte words |
//!
//! Invariants: `HEAD <= TAIL <= HEAD + capacity`; what lies between is whole records. A side that breaks them, or
//! whose records do not parse, costs itself the link: every word of the other side is checked after it was copied.

use std::sync::atomic::Ordering;

/// Index of the word that holds the end of what was published.
pub(super) const TAIL: usize = 0;
/// Index of the word that holds the end of what was consumed.
pub(super) const HEAD: usize = LINE_WORDS;
/// Index of the word that counts the writes carried out.
pub(super) const DONE: usize = LINE_WORDS + 1;
/// Index of the word that says whether the owner sleeps.
pub(super) const SLEEP: usize = 2 * LINE_WORDS;
/// Index of the word that says that the owner ended the link.
pub(super) const CLOSED: usize = 2 * LINE_WORDS + 1;
/// Index of the first word of the ring.
pub(super) const RING: usize = 4 * LINE_WORDS;

/// Words that one core can change without slowing down another core's use of the next ones: two cache lines, which
/// processors fetch in pairs. loom has no cache lines, but must create every word.
const LINE_WORDS: usize = if cfg!(loom) { 2 } else { 16 };

/// A lane as its reader sees it.
pub(super) trait Memory {
    /// The word at `index`, by a relaxed atomic load.
    fn load(&self, index: usize) -> u64;
    /// An atomic fence.
    fn fence(&self, order: Ordering);
}

/// A lane as its owner sees it.
pub(super) trait OwnMemory: Memory {
    /// Stores the word at `index` atomically.
    fn store(&self, index: usize, value: u64, order: Ordering);
}

/// The other side broke the rules of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken(pub(super) &'static str);

/// The producer's end of a ring.
#[derive(Debug)]
pub(super) struct Producer {
    capacity: u64,
    tail: u64,
    head_seen: u64,
}

impl Producer {
    /// An empty ring of `capacity` words, a power of two.
    pub(super) const fn new(capacity: u64) -> Self {
        Self { capacity, tail: 0, head_seen: 0 }
    }

    /// End of what was published, in words since the start.
    pub(super) const fn tail(&self) -> u64 {
        self.tail
    }

    /// Publishes a record of `words` and the bytes that follow them. Returns false, having done nothing, when it
    /// does not fit.
    pub(super) fn push(
        &mut self,
        own: &impl OwnMemory,
        peer: &impl Memory,
        words: &[u64],
        bytes: &[u8],
    ) -> Result<bool, Broken> {
        let body = (words.len() + bytes.len().div_ceil(8)) as u64;
        if !self.has_room(peer, body + 1)? {
            return Ok(false);
        }
        let mut at = self.tail;
        let mut put = |word: u64| {
            own.store(slot(at, self.capacity), word, Ordering::Relaxed);
            at += 1;
        };
        put(body);
        words.iter().copied().for_each(&mut put);
        let (whole, rest) = bytes.as_chunks::<8>();
        whole.iter().copied().map(u64::from_ne_bytes).for_each(&mut put);
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            put(u64::from_ne_bytes(last));
        }
        self.tail = at;
        // Whoever sees this tail sees the record.
        own.store(TAIL, at, Ordering::Release);
        Ok(true)
    }

    /// Whether the consumer has moved since this end last found the ring full.
    pub(super) fn has_moved(&self, peer: &impl Memory) -> bool {
        peer.load(HEAD) != self.head_seen
    }

    fn has_room(&mut self, peer: &impl Memory, words: u64) -> Result<bool, Broken> {
        if self.tail + words - self.head_seen <= self.capacity {
            return Ok(true);
        }
        let head = peer.load(HEAD);
        // What the consumer read before it moved its head was read before we write there again.
        peer.fence(Ordering::Acquire);
        if head < self.head_seen || head > self.tail {
            return Err(Broken("its consumed position is impossible"));
        }
        self.head_seen = head;
        Ok(self.tail + words - head <= self.capacity)
    }
}

/// The consumer's end of a ring.
#[derive(Debug)]
pub(super) struct Consumer {
    capacity: u64,
    head: u64,
    tail_seen: u64,
}

impl Consumer {
    /// An empty ring of `capacity` words, a power of two.
    pub(super) const fn new(capacity: u64) -> Self {
        Self { capacity, head: 0, tail_seen: 0 }
    }

    /// End of what was consumed, in words since the start.
    pub(super) const fn head(&self) -> u64 {
        self.head
    }

    /// Copies the body of the next record to the front of `record`, and returns its length in words, at least 1. It
    /// stays in the ring until [`Consumer::consume`].
    pub(super) fn peek(&mut self, peer: &impl Memory, record: &mut [u64]) -> Result<Option<usize>, Broken> {
        if self.head == self.tail_seen {
            let tail = peer.load(TAIL);
            if tail == self.head {
                return Ok(None);
            }
            // The record that this tail tells of is read after it.
            peer.fence(Ordering::Acquire);
            if tail < self.head || tail - self.head > self.capacity {
                return Err(Broken("its published position is impossible"));
            }
            self.tail_seen = tail;
        }
        let body = peer.load(slot(self.head, self.capacity));
        if body == 0 || body >= self.tail_seen - self.head {
            return Err(Broken("a record's length is impossible"));
        }
        let Some(record) = record.get_mut(..body as usize) else {
            return Err(Broken("a record is longer than any may be"));
        };
        for (at, word) in (self.head + 1..).zip(record.iter_mut()) {
            *word = peer.load(slot(at, self.capacity));
        }
        Ok(Some(record.len()))
    }

    /// Gives the space of the record that [`Consumer::peek`] returned, `words` long, back to the producer.
    pub(super) fn consume(&mut self, own: &impl OwnMemory, words: usize) {
        self.head += words as u64 + 1;
        own.store(HEAD, self.head, Ordering::Release);
    }

    /// Whether there is a record that [`Consumer::peek`] would find.
    pub(super) fn is_ready(&self, peer: &impl Memory) -> bool {
        self.head != self.tail_seen || peer.load(TAIL) != self.head
    }
}

const fn slot(position: u64, capacity: u64) -> usize {
    RING + (position & (capacity - 1)) as usize
}

/// What a side can sleep for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaits {
    /// Records only.
    Records,
    /// Also room in the ring or the completion of writes.
    Progress,
}

/// The owner's side of sleeping. The word is 0 when awake, else `count << 2 | what`, where the count makes each sleep
/// distinct: the other side rings once a sleep, however much it publishes.
///
/// No wake-up is lost: the sleeper stores the word, fences, and looks once more for something to do; the other side
/// stores its news, fences, and looks at the word. One of the two sees the other's store.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    count: u64,
}

impl Sleep {
    /// Says that the owner is about to sleep. A [`Ordering::SeqCst`] fence, and a last look for something to do, must
    /// follow.
    pub(super) fn announce(&mut self, own: &impl OwnMemory, awaits: Awaits) {
        self.count += 1;
        let what = match awaits {
            Awaits::Records => 1,
            Awaits::Progress => 2,
        };
        own.store(SLEEP, self.count << 2 | what, Ordering::Relaxed);
    }

    /// Says that the owner is awake.
    pub(super) fn end(own: &impl OwnMemory) {
        own.store(SLEEP, 0, Ordering::Relaxed);
    }
}

/// The waking side's memory of the last sleep that it rang for.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung_for: u64,
}

impl Bell {
    /// Whether the other side must be woken, after news that it sleeps for was published.
    pub(super) fn must_ring(&mut self, peer: &impl Memory, news: Awaits) -> bool {
        peer.fence(Ordering::SeqCst);
        let sleep = peer.load(SLEEP);
        let hears = match news {
            Awaits::Records => sleep & 3 != 0,
            Awaits::Progress => sleep & 3 == 2,
        };
        let ring = hears && sleep != self.rung_for;
        if ring {
            self.rung_for = sleep;
        }
        ring
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicU64, fence};

    use proptest::prelude::*;

    use super::*;

    struct Lane(Vec<AtomicU64>);

    impl Lane {
        fn new(capacity: usize) -> Self {
            Self((0..RING + capacity).map(|_| AtomicU64::new(0)).collect())
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

    fn bytes_of(record: &[u64], len: usize) -> &[u8] {
        &bytemuck::cast_slice(record)[..len]
    }

    proptest! {
        /// Any interleaving of pushes and pops keeps order and content, and refuses only what does not fit.
        #[test]
        fn records_come_out_as_they_went_in(steps in proptest::collection::vec((any::<bool>(), 0usize..80), 1..300)) {
            let (ours, theirs) = (Lane::new(16), Lane::new(16));
            let (mut producer, mut consumer) = (Producer::new(16), Consumer::new(16));
            let mut expected = std::collections::VecDeque::new();
            let mut record = [0; 16];
            for (n, (push, len)) in steps.into_iter().enumerate() {
                if push {
                    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + n) as u8).collect();
                    let used = producer.tail() - consumer.head();
                    let fits = used + 2 + len.div_ceil(8) as u64 <= 16;
                    prop_assert_eq!(producer.push(&ours, &theirs, &[n as u64], &bytes), Ok(fits));
                    if fits {
                        expected.push_back((n as u64, bytes));
                    }
                } else {
                    match (consumer.peek(&ours, &mut record).expect("sound"), expected.pop_front()) {
                        (None, None) => {}
                        (Some(words), Some((n, bytes))) => {
                            prop_assert_eq!(words, 1 + bytes.len().div_ceil(8));
                            prop_assert_eq!(record[0], n);
                            prop_assert_eq!(bytes_of(&record[1..], bytes.len()), &bytes[..]);
                            consumer.consume(&theirs, words);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }

        /// Whatever the other side's lane holds, both ends go on or call it broken.
        #[test]
        fn garbage_is_never_more_than_a_broken_link(words in proptest::collection::vec(any::<u64>(), RING + 16)) {
            let ours = Lane::new(16);
            let theirs = Lane(words.into_iter().map(AtomicU64::new).collect());
            for small in [0, 1, 5, 16, 17] {
                theirs.0[TAIL].store(small, Ordering::Relaxed);
                let (mut producer, mut consumer) = (Producer::new(16), Consumer::new(16));
                let mut record = [0; 8];
                while let Ok(Some(words)) = consumer.peek(&theirs, &mut record) {
                    prop_assert!((1..=8).contains(&words));
                    consumer.consume(&ours, words);
                }
                prop_assert!(consumer.head() <= 16);
                while producer.push(&ours, &theirs, &[1], b"x") == Ok(true) {
                    prop_assert!(producer.tail() <= 32);
                }
            }
        }
    }

    #[test]
    fn a_sleep_is_rung_for_once_and_only_for_what_it_awaits() {
        let lane = Lane::new(16);
        let (mut sleep, mut bell) = (Sleep::default(), Bell::default());
        assert!(!bell.must_ring(&lane, Awaits::Records));
        sleep.announce(&lane, Awaits::Records);
        assert!(!bell.must_ring(&lane, Awaits::Progress));
        assert!(bell.must_ring(&lane, Awaits::Records));
        assert!(!bell.must_ring(&lane, Awaits::Records));
        sleep.announce(&lane, Awaits::Progress);
        assert!(bell.must_ring(&lane, Awaits::Progress));
        Sleep::end(&lane);
        assert!(!bell.must_ring(&lane, Awaits::Records));
    }
}
