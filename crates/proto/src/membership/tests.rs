//! Membership on a log that several actors write to, each of which may have read only a part of it.

use alloc::string::ToString;
use alloc::vec;

use proptest::prelude::*;

use super::*;

fn id(number: u32) -> RecordId {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&number.to_le_bytes());
    id
}

fn join() -> Body {
    Body::Join { world_size: 2, protocol: 1, endpoint: Endpoint::default() }
}

fn suspect(log: &Log, author: u32, member: u32) -> Body {
    Body::Suspect { author: id(author), epoch: log.view().epoch, member: id(member), reason: "silent".to_string() }
}

fn names(log: &Log) -> Vec<(u32, RecordId)> {
    log.view().members.iter().map(|member| (member.rank.0, member.id)).collect()
}

/// Processes 0, 1, ... of these ranks, in their first epoch.
fn started(ranks: u32) -> Log {
    let mut log = Log::new(ranks);
    for rank in 0..ranks {
        assert_eq!(log.apply(Rank(rank), id(rank), &join()), Change::Candidate);
    }
    let proposal = log.proposal(id(0));
    assert_eq!(log.apply(Rank(0), id(1000), &proposal), Change::View);
    assert_eq!((log.view().epoch, log.view().members.len()), (FIRST_EPOCH, ranks as usize));
    log
}

#[test]
fn the_first_valid_proposal_wins() {
    let mut log = started(3);
    let change = log.apply(Rank(0), id(1), &suspect(&log, 0, 2));
    assert!(matches!(change, Change::Gone(member, Departure::Suspected(Rank(0))) if member.rank == Rank(2)));
    let (mine, theirs) = (log.proposal(id(0)), log.proposal(id(1)));
    assert_eq!(log.apply(Rank(1), id(2001), &theirs), Change::View);
    assert_eq!(log.apply(Rank(0), id(2000), &mine), Change::None);
    assert_eq!((log.view().epoch, log.view().id), (Epoch(2), id(2001)));
    assert_eq!(names(&log), [(0, id(0)), (1, id(1))]);
}

#[test]
fn a_proposal_may_leave_out_only_who_is_gone_and_take_in_only_who_joined() {
    let log = started(3);
    let propose = |author, base, members: &[u32]| {
        let members = members.iter().map(|rank| ProposedMember { rank: Rank(*rank), id: id(*rank) }).collect();
        log.clone().apply(Rank(0), id(9), &Body::Propose { author: id(author), epoch: Epoch(2), base, members })
    };
    assert_eq!(propose(0, id(1000), &[0, 1]), Change::None, "rank 2 is alive");
    assert_eq!(propose(0, id(1000), &[0, 1, 2, 3]), Change::None, "nobody joined as rank 3");
    assert_eq!(propose(0, id(1000), &[0, 2, 1]), Change::None, "not in order");
    assert_eq!(propose(0, id(1000), &[]), Change::None);
    assert_eq!(propose(7, id(1000), &[0, 1, 2]), Change::None, "the author is no member");
    assert_eq!(propose(0, id(1001), &[0, 1, 2]), Change::None, "another view came before");
    assert_eq!(propose(0, id(1000), &[0, 1, 2]), Change::View, "the same members again are allowed");
}

#[test]
fn who_is_suspected_first_has_no_say_any_more() {
    let mut log = started(3);
    let (by_1, by_2) = (suspect(&log, 1, 2), suspect(&log, 2, 1));
    log.apply(Rank(1), id(10), &by_1);
    assert_eq!(log.apply(Rank(2), id(11), &by_2), Change::None);
    assert_eq!(log.apply(Rank(2), id(12), &log.clone().proposal(id(2))), Change::None);
    assert_eq!(log.live().map(|member| member.rank.0).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_process_that_slept_through_its_removal_changes_nothing() {
    let mut log = started(3);
    let (old_suspicion, old_proposal) = (suspect(&log, 2, 0), log.proposal(id(2)));
    log.apply(Rank(0), id(10), &suspect(&log, 0, 2));
    log.apply(Rank(0), id(11), &log.clone().proposal(id(0)));
    let before = log.clone();
    for body in [old_suspicion, old_proposal, Body::Left { author: id(2) }, log.proposal(id(2))] {
        assert_eq!(log.apply(Rank(2), id(12), &body), Change::None, "{body:?}");
    }
    // Its old Join is said again when it reconnects: it stays out.
    assert_eq!(log.apply(Rank(2), id(2), &join()), Change::None);
    assert_eq!(log, before);
    assert!(log.is_gone(id(2)));
}

#[test]
fn a_restarted_rank_waits_until_its_predecessor_is_gone() {
    let mut log = started(2);
    assert_eq!(log.apply(Rank(1), id(50), &join()), Change::RankTaken);
    assert!(!log.is_change_due());
    log.apply(Rank(0), id(51), &suspect(&log, 0, 1));
    assert!(log.is_change_due());
    log.apply(Rank(0), id(52), &log.clone().proposal(id(0)));
    assert_eq!(names(&log), [(0, id(0))], "it has not got the state yet");
    assert_eq!(log.apply(Rank(1), id(53), &Body::Ready { author: id(50) }), Change::Candidate);
    assert_eq!(log.apply(Rank(1), id(53), &Body::Ready { author: id(50) }), Change::None);
    assert!(log.is_change_due());
    log.apply(Rank(0), id(54), &log.clone().proposal(id(0)));
    assert_eq!(names(&log), [(0, id(0)), (1, id(50))]);
    assert!(log.candidates().is_empty() && log.snapshot().ready.is_empty());
}

/// Found by simulation: members go on in a log that was lost before one of them has written it again.
#[test]
fn who_reads_a_lost_log_from_its_new_start_comes_to_the_view_of_those_who_lived_through_it() {
    let mut survivor = started(3);
    let mut newcomer = Log::new(3);
    let before = survivor.snapshot();
    let suspicion = suspect(&survivor, 0, 2);
    let mut gone = survivor.clone();
    gone.apply(Rank(0), id(40), &suspicion);
    let (first, second) = (gone.proposal(id(0)), gone.proposal(id(1)));
    let records = [
        (2, id(50), join()),
        (0, id(40), suspicion),
        (0, id(41), first),
        (1, id(42), Body::Snapshot(before)),
        (1, id(43), second),
    ];
    for (rank, id, body) in records {
        survivor.apply(Rank(rank), id, &body);
        newcomer.apply(Rank(rank), id, &body);
    }
    assert_eq!((survivor.view().epoch, survivor.view().id), (Epoch(2), id(41)));
    assert_eq!(newcomer.view(), survivor.view());
    assert_eq!(newcomer.snapshot(), survivor.snapshot());
}

#[test]
fn a_job_grows_by_who_joins_and_shrinks_by_who_leaves() {
    let mut log = started(2);
    log.apply(Rank(2), id(2), &join());
    let early = Body::Propose {
        author: id(0),
        epoch: Epoch(2),
        base: log.view().id,
        members: (0..3).map(|rank| ProposedMember { rank: Rank(rank), id: id(rank) }).collect(),
    };
    assert_eq!(log.apply(Rank(0), id(59), &early), Change::None, "it is not ready");
    log.apply(Rank(2), id(58), &Body::Ready { author: id(2) });
    log.apply(Rank(0), id(60), &log.clone().proposal(id(0)));
    assert_eq!(names(&log).len(), 3);
    log.apply(Rank(0), id(61), &Body::Left { author: id(0) });
    log.apply(Rank(1), id(62), &log.clone().proposal(id(1)));
    assert_eq!((log.view().epoch, names(&log)), (Epoch(3), vec![(1, id(1)), (2, id(2))]));
}

#[test]
fn a_log_that_was_lost_is_taken_from_snapshots_and_divergence_is_found() {
    let mut log = started(3);
    let old = log.clone();
    log.apply(Rank(0), id(10), &suspect(&log, 0, 2));
    log.apply(Rank(0), id(11), &log.clone().proposal(id(0)));
    // A reader of the new log, and one that had not read the last epoch.
    for mut reader in [Log::new(3), old.clone()] {
        assert_eq!(reader.apply(Rank(0), id(12), &Body::Snapshot(log.snapshot())), Change::View);
        assert_eq!(reader.view(), log.view());
        assert_eq!(reader.apply(Rank(1), id(13), &Body::Snapshot(old.snapshot())), Change::None);
    }
    let mut other = old;
    other.apply(Rank(1), id(14), &suspect(&other, 1, 0));
    other.apply(Rank(1), id(15), &other.clone().proposal(id(1)));
    assert_eq!(other.apply(Rank(0), id(16), &Body::Snapshot(log.snapshot())), Change::Diverged);
}

/// What one actor does next, given how much of the log it has read.
#[derive(Clone, Debug)]
enum Deed {
    Join(u32),
    Ready(u32),
    Leave(u32),
    Suspect(u32, u32),
    Propose(u32),
    Repeat(usize),
}

fn deeds() -> impl Strategy<Value = Vec<(Deed, usize)>> {
    let process = 0_u32..8;
    let deed = prop_oneof![
        2 => process.clone().prop_map(Deed::Join),
        2 => process.clone().prop_map(Deed::Ready),
        1 => process.clone().prop_map(Deed::Leave),
        2 => (process.clone(), process.clone()).prop_map(|(by, of)| Deed::Suspect(by, of)),
        4 => process.prop_map(Deed::Propose),
        2 => (0_usize..64).prop_map(Deed::Repeat),
    ];
    proptest::collection::vec((deed, 0_usize..4), 1..64)
}

/// The log that comes of these deeds: process p has rank p mod 4; an actor has not read the last `lag` records.
fn written(deeds: &[(Deed, usize)], repeats: bool) -> Vec<(Rank, RecordId, Body)> {
    let mut records: Vec<(Rank, RecordId, Body)> = (0..2).map(|rank| (Rank(rank), id(rank), join())).collect();
    for (number, (deed, lag)) in deeds.iter().enumerate() {
        let seen = read(&records[..records.len() - (*lag).min(records.len() - 2)]);
        let record = |process: u32, body| (Rank(process % 4), id(1000 + number as u32), body);
        let next = match deed {
            Deed::Join(process) => (Rank(process % 4), id(*process), join()),
            // Nobody leaves before it joined, or suspects whom it has never heard of.
            Deed::Ready(process) if !is_known(&read(&records), *process) => continue,
            Deed::Ready(process) => record(*process, Body::Ready { author: id(*process) }),
            Deed::Leave(process) if !is_known(&read(&records), *process) => continue,
            Deed::Leave(process) => record(*process, Body::Left { author: id(*process) }),
            Deed::Suspect(_, of) if !is_known(&seen, *of) => continue,
            Deed::Suspect(by, of) => record(*by, suspect(&seen, *by, *of)),
            Deed::Propose(process) => record(*process, seen.proposal(id(*process))),
            Deed::Repeat(index) if repeats => records[index % records.len()].clone(),
            Deed::Repeat(_) => continue,
        };
        records.push(next);
    }
    records
}

fn is_known(log: &Log, process: u32) -> bool {
    log.view().member(id(process)).is_some() || log.candidates().iter().any(|one| one.id == id(process))
}

fn read(records: &[(Rank, RecordId, Body)]) -> Log {
    let mut log = Log::new(2);
    for (rank, id, body) in records {
        log.apply(*rank, *id, body);
    }
    log
}

proptest! {
    /// Views only grow, a removed process never comes back, and ranks are unique in every view.
    #[test]
    fn whatever_is_written_views_are_sound(deeds in deeds()) {
        let mut log = Log::new(2);
        let mut removed: Vec<RecordId> = Vec::new();
        for (rank, id, body) in written(&deeds, true) {
            let before = log.view().clone();
            let author_had_say = match &body {
                Body::Propose { author, .. } => before.epoch == Epoch(0) || log.author(*author).is_some(),
                _ => false,
            };
            if log.apply(rank, id, &body) == Change::View {
                let view = log.view();
                prop_assert_eq!(view.epoch.0, before.epoch.0 + 1);
                prop_assert!(author_had_say);
                prop_assert!(view.members.windows(2).all(|pair| pair[0].rank < pair[1].rank));
                prop_assert!(view.members.iter().all(|member| !removed.contains(&member.id)));
                removed.extend(before.members.iter().map(|member| member.id).filter(|id| view.member(*id).is_none()));
            } else {
                prop_assert_eq!(log.view(), &before);
            }
        }
    }

    /// Records that come again, at any later place, change nothing.
    #[test]
    fn repeated_records_change_nothing(deeds in deeds(), again in proptest::collection::vec((0_usize..64, 0_usize..64), 0..16)) {
        let records = written(&deeds, false);
        let mut repeated = records.clone();
        for (index, later) in again {
            let index = index % repeated.len();
            let place = index + 1 + later % (repeated.len() - index);
            let record = repeated[index].clone();
            repeated.insert(place, record);
        }
        let (once, twice) = (read(&records), read(&repeated));
        prop_assert_eq!(once.view(), twice.view());
        prop_assert_eq!(once.candidates(), twice.candidates());
    }

    /// A reader that starts from a snapshot ends where one that reads everything ends.
    #[test]
    fn a_snapshot_stands_for_what_came_before_it(deeds in deeds(), cut in 0_usize..64, overlap in 0_usize..4) {
        let records = written(&deeds, true);
        let cut = cut % records.len();
        let head = read(&records[..cut]);
        prop_assume!(head.view().epoch >= FIRST_EPOCH);
        let mut late = Log::new(2);
        late.apply(Rank(0), id(5000), &Body::Snapshot(head.snapshot()));
        for (rank, id, body) in &records[cut - overlap.min(cut)..] {
            late.apply(*rank, *id, body);
        }
        let whole = read(&records);
        prop_assert_eq!(late.snapshot(), whole.snapshot());
    }
}
