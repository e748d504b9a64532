//! What is acknowledged, handed back and added up, with a log as it may come.

use gradwire_proto::rounds::{Body, LatePolicy, Open, Published};
use gradwire_proto::{Rank, ReduceOp, WireFormat};
use proptest::prelude::*;

use super::*;
use crate::pieces::split;

const PIECE_BYTES: usize = 4096;
const SHARD_BYTES: usize = 8192;

fn open(late: LatePolicy) -> Open {
    let (wire, op) = (WireFormat::Fp32, ReduceOp::Sum);
    Open { contributors: 3, quorum: 1, late, wire, op, shard_elements: 2048, elements: 8192 }
}

fn started(late: LatePolicy) -> Log {
    let mut log = Log::default();
    log.apply(Rank(0), &Body::Open(open(late)));
    log
}

fn entry(contributor: u32, origin: u64) -> Entry {
    Entry { contributor: Rank(contributor), origin: Round(origin) }
}

fn attempt(entry: Entry) -> ContributionId {
    [entry.contributor.0 as u8 * 16 + entry.origin.0 as u8; 16]
}

fn data(entry: Entry, shard: u32) -> Vec<u8> {
    (0..SHARD_BYTES).map(|index| (index as u32 * 7 + entry.contributor.0 * 31 + shard) as u8).collect()
}

fn contributed(log: &mut Log, entry: Entry) {
    let crcs: Vec<u32> = (0..4).map(|shard| crc32fast::hash(&data(entry, shard))).collect();
    let contribution = attempt(entry);
    log.apply(entry.contributor, &Body::Contributed { round: entry.origin, contribution, crcs: crcs.into() });
}

fn published(log: &mut Log, shard: u32) {
    let result = Published { crc: 0, ledger: 0, entry: 0 };
    log.apply(Rank(0), &Body::Published { round: log.round(), shard, result });
}

fn message(entry: u64) -> MessageIdData {
    MessageIdData { ledger_id: 1, entry_id: entry, ..Default::default() }
}

fn names(messages: Vec<MessageIdData>) -> Vec<u64> {
    messages.into_iter().map(|message| message.entry_id).collect()
}

/// Gives both pieces of an entry's shard, as messages `first` and the one after it. True once it is whole.
fn give(hold: &mut Hold, log: &Log, now: Instant, first: u64, entry: Entry, shard: u32) -> bool {
    let data = data(entry, shard);
    let mut whole = false;
    for ((header, data), number) in split(&data, PIECE_BYTES).zip(first..) {
        let update = Update { round: entry.origin, contribution: attempt(entry), shard, header, data };
        whole = hold.update(log, now, message(number), entry, &update);
    }
    whole
}

#[test]
fn messages_are_acknowledged_once_their_result_is_published() {
    let (mut log, now) = (started(LatePolicy::Reject), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    for contributor in 0..3 {
        assert!(give(&mut hold, &log, now, u64::from(contributor) * 2, entry(contributor, 1), 0));
        assert!(hold.ready(&log, 0).is_none());
        contributed(&mut log, entry(contributor, 1));
    }
    let ready = hold.ready(&log, 0).expect("all are here");
    assert_eq!((ready.round, ready.shard, ready.inputs.len()), (Round(1), 0, 3));
    assert_eq!(*ready.inputs[2], data(entry(2, 1), 0));
    assert!(hold.ready(&log, 0).is_none(), "it is being worked on");
    hold.review(&log, None);
    assert_eq!(names(hold.take_acks()), []);
    published(&mut log, 0);
    hold.review(&log, Some(0));
    assert_eq!(names(hold.take_acks()), [0, 1, 2, 3, 4, 5]);
    assert_eq!((hold.bytes, names(hold.take_nacks())), (0, vec![]));
    // Once more, since the acknowledgement got lost.
    assert!(!give(&mut hold, &log, now, 0, entry(0, 1), 0));
    assert_eq!(names(hold.take_acks()), [0, 1]);
    assert_eq!(hold.counters, Counters { updates: 6, duplicates: 2, late: 0, handed_back: 0 });
}

#[test]
fn a_piece_under_two_messages_is_held_under_one() {
    let (log, now) = (started(LatePolicy::Reject), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    give(&mut hold, &log, now, 0, entry(0, 1), 0);
    give(&mut hold, &log, now, 10, entry(0, 1), 0);
    assert_eq!(names(hold.take_acks()), [10, 11]);
    // The same messages again are no others.
    give(&mut hold, &log, now, 0, entry(0, 1), 0);
    assert_eq!(names(hold.take_acks()), []);
    assert_eq!(hold.counters.duplicates, 2);
}

#[test]
fn what_is_late_or_of_another_attempt_is_discarded_and_told_once() {
    let (mut log, now) = (started(LatePolicy::Reject), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    contributed(&mut log, entry(0, 1));
    give(&mut hold, &log, now, 0, entry(1, 1), 0);
    let proposal = log.proposal();
    log.apply(Rank(0), &proposal);
    hold.review(&log, None);
    assert_eq!(names(hold.take_acks()), [0, 1]);
    give(&mut hold, &log, now, 2, entry(1, 1), 1);
    assert_eq!(names(hold.take_acks()), [2, 3]);
    assert_eq!(hold.take_events(), [Event::Late(entry(1, 1))]);
    let update = Update {
        round: Round(1),
        contribution: [99; 16],
        shard: 0,
        header: split(&data(entry(0, 1), 0), PIECE_BYTES).next().expect("a piece").0,
        data: &data(entry(0, 1), 0)[..PIECE_BYTES],
    };
    hold.update(&log, now, message(4), entry(0, 1), &update);
    assert_eq!(names(hold.take_acks()), [4]);
    assert_eq!((hold.take_events(), hold.counters.late), (vec![], 1));
}

#[test]
fn data_that_is_not_what_was_announced_is_rejected() {
    let (mut log, now) = (started(LatePolicy::Reject), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    let other = vec![9; SHARD_BYTES];
    let wrong = |hold: &mut Hold, log: &Log, number| {
        let (header, data) = split(&other, PIECE_BYTES).next().expect("a piece");
        let (round, contribution) = (Round(1), attempt(entry(0, 1)));
        hold.update(log, now, message(number), entry(0, 1), &Update { round, contribution, shard: 0, header, data });
    };
    // Before anything is announced, pieces must belong together.
    give(&mut hold, &log, now, 0, entry(0, 1), 0);
    wrong(&mut hold, &log, 2);
    assert_eq!(names(hold.take_acks()), [2]);
    contributed(&mut log, entry(0, 1));
    wrong(&mut hold, &log, 3);
    assert_eq!(names(hold.take_acks()), [3]);
    assert_eq!(hold.take_events().len(), 2);
    // What was there before it was announced as something else goes too.
    let mut log = started(LatePolicy::Reject);
    let mut hold = Hold::new(1 << 20, now);
    wrong(&mut hold, &log, 4);
    contributed(&mut log, entry(0, 1));
    hold.review(&log, None);
    assert_eq!((names(hold.take_acks()), hold.bytes), (vec![4], 0));
    assert!(matches!(hold.take_events()[..], [Event::Rejected(..)]));
}

#[test]
fn all_but_what_is_worked_on_goes_back_when_another_aggregator_subscribes() {
    let (mut log, now) = (started(LatePolicy::Carry), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    for contributor in 0..3 {
        give(&mut hold, &log, now, u64::from(contributor) * 2, entry(contributor, 1), 0);
    }
    give(&mut hold, &log, now, 10, entry(0, 1), 1);
    contributed(&mut log, entry(0, 1));
    contributed(&mut log, entry(1, 1));
    let proposal = log.proposal();
    log.apply(Rank(0), &proposal);
    assert_eq!(hold.ready(&log, 0).expect("ready").inputs.len(), 2);
    hold.hand_back_all(&log);
    // The third contribution to shard 0 waits to be carried: it is not worked on.
    assert_eq!(names(hold.take_nacks()), [4, 5, 10, 11]);
    assert_eq!((names(hold.take_acks()), hold.counters.handed_back), (vec![], 4));
    // It comes again, here or elsewhere.
    assert!(give(&mut hold, &log, now, 10, entry(0, 1), 1));
}

#[test]
fn a_shard_that_is_due_and_does_not_move_goes_back_and_more_patiently_each_time() {
    let (mut log, mut now) = (started(LatePolicy::Reject), Instant::now());
    let mut hold = Hold::new(1 << 20, now);
    give(&mut hold, &log, now, 0, entry(0, 1), 0);
    assert_eq!(hold.stalls_next(&log), None, "nothing is due before the round is closed");
    (0..3).for_each(|contributor| contributed(&mut log, entry(contributor, 1)));
    let mut waited = Vec::new();
    for _ in 0..7 {
        let at = hold.stalls_next(&log).expect("due");
        hold.hand_back_stalled(&log, at - Duration::from_millis(1));
        assert_eq!(names(hold.take_nacks()), []);
        hold.hand_back_stalled(&log, at);
        assert_eq!(names(hold.take_nacks()), [0, 1]);
        assert_eq!(hold.stalls_next(&log), None, "nothing is held");
        waited.push((at - now).as_millis());
        now = at;
        give(&mut hold, &log, now, 0, entry(0, 1), 0);
    }
    assert_eq!(waited, [100, 200, 400, 800, 1600, 2000, 2000]);
    // Where other shards move, it is given more time.
    let at = hold.stalls_next(&log).expect("due");
    give(&mut hold, &log, at, 20, entry(0, 1), 1);
    assert!(hold.stalls_next(&log).expect("due") > at);
    // And once it is worked on, it does not stall.
    give(&mut hold, &log, now, 2, entry(1, 1), 0);
    give(&mut hold, &log, now, 4, entry(2, 1), 0);
    assert!(hold.ready(&log, 0).is_some());
    hold.hand_back_stalled(&log, at + STALL_MAX * STALL_BUSY);
    assert_eq!(names(hold.take_nacks()), [20, 21]);
}

#[test]
fn with_little_memory_shards_are_done_one_after_the_other() {
    let (mut log, now) = (started(LatePolicy::Reject), Instant::now());
    // Room for one shard of all contributors, and a bit.
    let mut hold = Hold::new(SHARD_BYTES * 4, now);
    let mut queue: VecDeque<(u64, Entry, u32)> = VecDeque::new();
    for (number, (shard, contributor)) in (0..4).rev().flat_map(|shard| (0..3).map(move |c| (shard, c))).enumerate() {
        queue.push_back((number as u64 * 2, entry(contributor, 1), shard));
    }
    let all = queue.clone();
    (0..3).for_each(|contributor| contributed(&mut log, entry(contributor, 1)));
    let (mut done, mut given) = (Vec::new(), 0);
    while let Some((first, entry, shard)) = queue.pop_front() {
        given += 1;
        assert!(given < 200, "it does not end: {hold:?}");
        give(&mut hold, &log, now, first, entry, shard);
        assert!(hold.bytes <= SHARD_BYTES * 4, "{}", hold.bytes);
        for number in hold.numbers() {
            if hold.ready(&log, number).is_some() {
                done.push(number);
                published(&mut log, number);
                hold.review(&log, None);
            }
        }
        let back: Vec<u64> = names(hold.take_nacks());
        let again = all.iter().filter(|(first, ..)| back.contains(first) || back.contains(&(first + 1)));
        queue.extend(again.copied());
    }
    done.sort_unstable();
    assert_eq!((done, log.round()), (vec![0, 1, 2, 3], Round(2)));
    assert_eq!(hold.bytes, 0);
    assert!(hold.forgotten.is_empty());
}

#[derive(Clone, Debug)]
enum Act {
    Give(u32, u32),
    Contribute(u32),
    Propose,
    Work,
    Join,
    Wait,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0_u32..3, 0_u32..4).prop_map(|(contributor, shard)| Act::Give(contributor, shard)),
        3 => (0_u32..3).prop_map(Act::Contribute),
        1 => Just(Act::Propose),
        3 => Just(Act::Work),
        1 => Just(Act::Join),
        1 => Just(Act::Wait),
    ]
}

proptest! {
    /// Whatever comes, a message is held, or acknowledged after it is not needed, or handed back; and a sum is made of
    /// whole contributions only.
    #[test]
    fn no_message_is_lost_and_none_is_held_for_nothing(
        carry in any::<bool>(),
        shards_max in 4_usize..20,
        acts in proptest::collection::vec(act(), 1..200),
    ) {
        let late = if carry { LatePolicy::Carry } else { LatePolicy::Reject };
        let (mut log, mut now) = (started(late), Instant::now());
        let mut hold = Hold::new(SHARD_BYTES * shards_max, now);
        let mut number = 0;
        let mut at_broker: BTreeMap<u64, (Entry, u32)> = BTreeMap::new();
        for act in acts {
            match act {
                Act::Give(contributor, shard) => {
                    let entry = entry(contributor, log.round().0);
                    give(&mut hold, &log, now, number, entry, shard);
                    at_broker.insert(number, (entry, shard));
                    at_broker.insert(number + 1, (entry, shard));
                    number += 2;
                }
                Act::Contribute(contributor) => {
                    let entry = entry(contributor, log.round().0);
                    contributed(&mut log, entry);
                    hold.review(&log, None);
                }
                Act::Propose => {
                    let proposal = log.proposal();
                    log.apply(Rank(0), &proposal);
                    hold.review(&log, None);
                }
                Act::Work => {
                    for shard in hold.numbers() {
                        if let Some(ready) = hold.ready(&log, shard) {
                            let closed = log.closed().expect("closed");
                            prop_assert_eq!(ready.inputs.len(), closed.entries.len());
                            for (input, (entry, _)) in ready.inputs.iter().zip(&closed.entries) {
                                prop_assert_eq!(&**input, &data(*entry, shard));
                            }
                            published(&mut log, shard);
                            hold.review(&log, Some(shard));
                        }
                    }
                    hold.review(&log, None);
                }
                Act::Join => hold.hand_back_all(&log),
                Act::Wait => {
                    now += STALL_MAX * STALL_BUSY;
                    hold.hand_back_stalled(&log, now);
                }
            }
            let mut dropped = hold.take_acks();
            // What is acknowledged is not needed any more, or held under another message.
            for message in &dropped {
                let (entry, shard) = at_broker[&message.entry_id];
                let standing = log.standing(entry, attempt(entry), shard);
                let held = hold.shards.get(&shard).is_some_and(|s| s.parts.contains_key(&(entry, attempt(entry))));
                prop_assert!(held || matches!(standing, Standing::Done | Standing::Never), "{entry:?} {standing:?}");
            }
            dropped.extend(hold.take_nacks());
            for message in dropped {
                prop_assert!(at_broker.remove(&message.entry_id).is_some(), "twice: {message:?}");
            }
            let parts = hold.shards.values().flat_map(|shard| shard.parts.values());
            let held = parts.flat_map(|part| part.messages.values()).chain(hold.forgotten.values().flatten());
            let held: Vec<u64> = held.map(|message| message.entry_id).collect();
            prop_assert_eq!(held.len(), at_broker.len());
            prop_assert!(held.iter().all(|message| at_broker.contains_key(message)));
        }
    }
}
