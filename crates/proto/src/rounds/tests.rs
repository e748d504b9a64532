//! Rounds on a log that contributors and aggregators write to as they like.

use alloc::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SHARDS: u32 = 3;

fn open(contributors: u32, quorum: u32, late: LatePolicy) -> Open {
    let wire = WireFormat::Fp16;
    Open { contributors, quorum, late, wire, op: ReduceOp::Mean, shard_elements: 4096, elements: 10_000 }
}

fn started(contributors: u32, quorum: u32, late: LatePolicy) -> Log {
    let mut log = Log::default();
    assert_eq!(log.apply(Rank(0), &Body::Open(open(contributors, quorum, late))), Change::Opened);
    log
}

fn contributed(round: u64, attempt: u8) -> Body {
    Body::Contributed { round: Round(round), contribution: [attempt; 16], crcs: vec![7; SHARDS as usize].into() }
}

fn entry(contributor: u32, origin: u64) -> Entry {
    Entry { contributor: Rank(contributor), origin: Round(origin) }
}

fn close(round: u64, entries: &[Entry]) -> Body {
    Body::Close { round: Round(round), entries: entries.to_vec() }
}

fn published(round: u64, shard: u32) -> Body {
    Body::Published { round: Round(round), shard, result: Published { crc: 1, ledger: 2, entry: 3 } }
}

fn complete(log: &mut Log) {
    let round = log.round().0;
    for shard in 0..SHARDS - 1 {
        assert_eq!(log.apply(Rank(0), &published(round, shard)), Change::Published(shard));
    }
    assert_eq!(log.apply(Rank(0), &published(round, SHARDS - 1)), Change::Complete(Round(round)));
}

fn entries(log: &Log) -> Vec<Entry> {
    log.closed().expect("closed").entries.iter().map(|(entry, _)| *entry).collect()
}

#[test]
fn a_configuration_is_valid_within_its_bounds_only() {
    let good = open(4, 2, LatePolicy::Reject);
    assert!(good.is_valid());
    assert_eq!((good.shards(), good.range(2), good.shard_bytes(2)), (3, 8192..10_000, 3616));
    for bad in [
        Open { contributors: 0, ..good },
        Open { contributors: WORLD_SIZE_MAX + 1, ..good },
        Open { quorum: 0, ..good },
        Open { quorum: 5, ..good },
        Open { elements: 0, ..good },
        Open { shard_elements: 0, ..good },
        Open { shard_elements: 1, ..good },
        Open { shard_elements: u32::MAX, elements: 1 << 40, ..good },
    ] {
        assert!(!bad.is_valid(), "{bad:?}");
        assert_eq!(Log::default().apply(Rank(0), &Body::Open(bad)), Change::None);
    }
}

#[test]
fn the_first_configuration_counts() {
    let mut log = started(2, 1, LatePolicy::Reject);
    assert_eq!(log.apply(Rank(1), &Body::Open(open(3, 1, LatePolicy::Carry))), Change::None);
    assert_eq!(log.open(), Some(&open(2, 1, LatePolicy::Reject)));
}

#[test]
fn the_last_contributor_closes_a_round_and_the_last_result_opens_the_next() {
    let mut log = started(2, 1, LatePolicy::Reject);
    assert_eq!(log.apply(Rank(1), &contributed(1, 1)), Change::Contributed(entry(1, 1)));
    assert_eq!(log.standing(entry(1, 1), [1; 16], 0), Standing::Waiting);
    assert_eq!(log.apply(Rank(0), &contributed(1, 0)), Change::Closed);
    assert_eq!(entries(&log), [entry(0, 1), entry(1, 1)]);
    assert_eq!(log.standing(entry(1, 1), [1; 16], 0), Standing::Needed);
    assert_eq!(log.apply(Rank(0), &contributed(2, 0)), Change::None, "round 2 is not open yet");
    assert_eq!(log.apply(Rank(0), &published(1, 0)), Change::Published(0));
    assert_eq!(log.apply(Rank(1), &published(1, 0)), Change::None);
    assert_eq!(log.standing(entry(1, 1), [1; 16], 0), Standing::Done);
    assert_eq!(log.standing(entry(1, 1), [1; 16], 1), Standing::Needed);
    assert_eq!(log.apply(Rank(0), &published(1, 1)), Change::Published(1));
    assert_eq!(log.apply(Rank(0), &published(1, 2)), Change::Complete(Round(1)));
    assert_eq!(log.round(), Round(2));
    assert_eq!(log.standing(entry(1, 1), [1; 16], 1), Standing::Done);
    assert_eq!(log.complete(Round(1)).expect("kept").entries, [entry(0, 1), entry(1, 1)]);
    assert_eq!(log.apply(Rank(0), &contributed(1, 0)), Change::None);
}

#[test]
fn only_the_first_attempt_of_a_contribution_counts() {
    let mut log = started(2, 1, LatePolicy::Reject);
    assert_eq!(log.apply(Rank(0), &contributed(1, 5)), Change::Contributed(entry(0, 1)));
    assert_eq!(log.apply(Rank(0), &contributed(1, 6)), Change::Repeated(entry(0, 1)));
    assert_eq!(log.standing(entry(0, 1), [6; 16], 0), Standing::Never);
    assert_eq!(log.contribution(entry(0, 1)), Some([5; 16]));
    assert_eq!(log.crc(entry(0, 1), 1), Some(7));
}

#[test]
fn a_close_needs_a_quorum_of_known_contributions_in_order() {
    let mut log = started(4, 2, LatePolicy::Reject);
    log.apply(Rank(0), &contributed(1, 0));
    assert!(!log.has_quorum());
    log.apply(Rank(2), &contributed(1, 2));
    log.apply(Rank(3), &contributed(1, 3));
    assert!(log.has_quorum());
    let all = [entry(0, 1), entry(2, 1), entry(3, 1)];
    for bad in [
        close(1, &all[..1]),
        close(2, &all),
        close(1, &[all[1], all[0]]),
        close(1, &[all[0], all[0]]),
        close(1, &[all[0], entry(1, 1)]),
        close(1, &[all[0], all[1], entry(9, 1)]),
    ] {
        assert_eq!(log.apply(Rank(7), &bad), Change::None, "{bad:?}");
    }
    assert_eq!(log.proposal(), close(1, &all));
    assert_eq!(log.apply(Rank(7), &close(1, &all[..2])), Change::Closed);
    assert_eq!(log.closer(), Some(Rank(7)));
    assert_eq!(log.apply(Rank(8), &close(1, &all)), Change::None, "the first one counts");
    assert_eq!(entries(&log), all[..2]);
    assert_eq!(log.standing(all[2], [3; 16], 0), Standing::Never);
    assert_eq!(log.apply(Rank(3), &contributed(1, 3)), Change::Late(all[2]));
    assert_eq!(log.apply(Rank(1), &contributed(1, 1)), Change::Late(entry(1, 1)));
}

#[test]
fn late_contributions_are_carried_into_the_next_round_once() {
    let mut log = started(2, 1, LatePolicy::Carry);
    log.apply(Rank(0), &contributed(1, 0));
    assert_eq!(log.apply(Rank(0), &close(1, &[entry(0, 1)])), Change::Closed);
    assert_eq!(log.apply(Rank(1), &contributed(1, 1)), Change::Contributed(entry(1, 1)));
    assert_eq!(log.standing(entry(1, 1), [1; 16], 0), Standing::Waiting);
    complete(&mut log);
    assert_eq!(log.apply(Rank(0), &close(2, &[entry(1, 1)])), Change::None, "carried ones make no quorum");
    log.apply(Rank(0), &contributed(2, 0));
    assert_eq!(log.apply(Rank(1), &contributed(2, 1)), Change::Closed);
    assert_eq!(entries(&log), [entry(0, 2), entry(1, 1), entry(1, 2)]);
    complete(&mut log);
    assert_eq!(log.apply(Rank(1), &contributed(1, 1)), Change::None);
    assert_eq!(log.standing(entry(1, 1), [1; 16], 0), Standing::Done);
}

#[test]
fn nothing_is_carried_for_ever_and_nothing_is_kept_for_ever() {
    let mut log = started(2, 1, LatePolicy::Carry);
    for round in 1..=200 {
        log.apply(Rank(0), &contributed(round, 0));
        if round == 1 {
            log.apply(Rank(1), &contributed(1, 1));
        } else {
            assert_eq!(log.apply(Rank(0), &close(round, &[entry(0, round)])), Change::Closed);
        }
        complete(&mut log);
        // Contributed late, and left out by every Close.
        if round == 20 {
            assert_eq!(log.apply(Rank(1), &contributed(20, 9)), Change::Contributed(entry(1, 20)));
        }
    }
    assert_eq!(log.round(), Round(201));
    assert_eq!((log.waiting.len(), log.complete.len()), (0, ROUNDS_KEPT));
    assert!(log.seen.len() as u64 <= CARRY_ROUNDS_MAX + 1);
    assert_eq!(log.standing(entry(1, 20), [9; 16], 0), Standing::Never);
    assert_eq!(log.apply(Rank(1), &contributed(20, 9)), Change::Late(entry(1, 20)));
    assert!(log.complete(Round(200 - ROUNDS_KEPT as u64)).is_none());
}

#[test]
fn aggregators_are_numbered_in_the_order_of_the_log() {
    let mut log = started(1, 1, LatePolicy::Reject);
    let joined = |id: u8| Body::AggregatorJoined { aggregator: [id; 16] };
    assert_eq!(log.apply(Rank(9), &joined(5)), Change::Aggregator(Rank(0)));
    assert_eq!(log.apply(Rank(9), &joined(6)), Change::Aggregator(Rank(1)));
    assert_eq!(log.apply(Rank(9), &joined(5)), Change::Aggregator(Rank(0)));
    assert_eq!((log.aggregators(), log.aggregator([7; 16])), (2, None));
}

/// What somebody writes: from a view of the log that is some records old.
#[derive(Clone, Debug)]
enum Act {
    Contribute { contributor: u32, attempt: u8, behind: usize },
    Propose { behind: usize, left_out: Vec<prop::sample::Index> },
    Publish { shard: u32, behind: usize },
    Again(prop::sample::Index),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0_u32..4, 0_u8..3, 0_usize..6)
            .prop_map(|(contributor, attempt, behind)| Act::Contribute { contributor, attempt, behind }),
        2 => (0_usize..6, proptest::collection::vec(any::<prop::sample::Index>(), 0..3))
            .prop_map(|(behind, left_out)| Act::Propose { behind, left_out }),
        5 => (0..SHARDS, 0_usize..3).prop_map(|(shard, behind)| Act::Publish { shard, behind }),
        2 => any::<prop::sample::Index>().prop_map(Act::Again),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn no_entry_counts_twice_and_no_round_without_quorum(
        carry in any::<bool>(),
        quorum in 1_u32..=4,
        acts in proptest::collection::vec(act(), 1..150),
    ) {
        let late = if carry { LatePolicy::Carry } else { LatePolicy::Reject };
        let mut views = vec![started(4, quorum, late)];
        let mut written: Vec<(Rank, Body)> = Vec::new();
        let mut effective: Vec<(Rank, Body)> = Vec::new();
        let mut taken: BTreeSet<Entry> = BTreeSet::new();
        for act in acts {
            let view = |behind: usize| &views[views.len() - 1 - behind.min(views.len() - 1)];
            let (rank, body) = match act {
                Act::Contribute { contributor, attempt, behind } => {
                    (Rank(contributor), contributed(view(behind).round().0, attempt))
                }
                Act::Propose { behind, left_out } => {
                    let Body::Close { round, mut entries } = view(behind).proposal() else { unreachable!() };
                    for index in left_out {
                        if !entries.is_empty() {
                            entries.remove(index.index(entries.len()));
                        }
                    }
                    (Rank(9), Body::Close { round, entries })
                }
                Act::Publish { shard, behind } => (Rank(9), published(view(behind).round().0, shard)),
                Act::Again(index) if !effective.is_empty() => effective[index.index(effective.len())].clone(),
                Act::Again(_) => continue,
            };
            let before = views[views.len() - 1].clone();
            let mut log = before.clone();
            let change = log.apply(rank, &body);
            // What took effect has none a second time.
            if effective.contains(&(rank, body.clone())) {
                prop_assert!(matches!(change, Change::None | Change::Late(_) | Change::Repeated(_)), "{change:?}");
                prop_assert_eq!(&log, &before);
            }
            match change {
                Change::None | Change::Late(_) | Change::Repeated(_) => prop_assert_eq!(&log, &before),
                _ => effective.push((rank, body.clone())),
            }
            if change == Change::Closed {
                let entries = entries(&log);
                let own = entries.iter().filter(|entry| entry.origin == log.round()).count();
                prop_assert!(own >= quorum as usize);
                prop_assert!(entries.is_sorted());
                for entry in entries {
                    prop_assert!(taken.insert(entry), "{entry:?} counts twice");
                    prop_assert!(entry.origin == log.round() || carry);
                }
            }
            prop_assert!(log.round() >= before.round());
            written.push((rank, body));
            views.push(log);
        }
        // Another reader of the same log.
        let mut other = started(4, quorum, late);
        for (rank, body) in &written {
            other.apply(*rank, body);
        }
        prop_assert_eq!(&other, &views[views.len() - 1]);
    }
}
