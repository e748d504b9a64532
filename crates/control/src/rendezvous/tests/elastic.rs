//! Members that come and go, and logs that are lost.

use super::*;

fn elastic(ranks: u32) -> World {
    let mut world = World::new();
    world.policy = Policy::Elastic { ranks_max: 5 };
    world.start_all(1, ranks);
    world.settle();
    world
}

/// Starts a process that joins a running job, and has what it needs at once.
fn newcomer(world: &mut World, rank: u32, world_size: u32) -> usize {
    let node = world.start(1, rank, world_size, 1);
    world.settle();
    let view = world.membership(node);
    assert!(
        view.epoch >= FIRST_EPOCH && view.member(world.nodes[node].machine.me.join_id).is_none(),
        "it is no member"
    );
    world.nodes[node].machine.ready();
    node
}

#[test]
fn a_suspected_rank_is_left_out_and_learns_it() {
    let mut world = elastic(3);
    world.suspect(1, 2, "silent");
    world.run();
    for node in 0..2 {
        assert_eq!(world.ranks(node), (2, vec![0, 1]));
        let view = world.membership(node).clone();
        assert_eq!(world.events(node), [ControlEvent::View(view)]);
    }
    let events = world.events(2);
    assert!(matches!(&events[..], [ControlEvent::Removed(fault)] if fault.kind == FaultKind::Removed), "{events:?}");
    // What it reports now concerns nobody.
    world.fail(2, Fault::new(FaultKind::System, "confused"));
    world.run();
    assert_eq!(world.events(0), []);
}

#[test]
fn with_fixed_members_nobody_is_left_out() {
    let mut world = World::new();
    world.start_all(1, 3);
    world.settle();
    world.suspect(1, 2, "silent");
    world.leave(0);
    world.run();
    assert_eq!(world.ranks(1), (1, vec![0, 1, 2]));
    assert_eq!(world.events(1), []);
}

#[test]
fn another_member_proposes_when_the_first_is_stuck() {
    let mut world = elastic(3);
    world.leave(2);
    let stuck = world.nodes.remove(0);
    world.run();
    assert_eq!(world.elapsed(), PROPOSE_GRACE);
    assert_eq!(world.ranks(0), (2, vec![0, 1]));
    world.nodes.push(stuck);
    world.run();
    assert_eq!(world.ranks(2), (2, vec![0, 1]));
}

#[test]
fn a_restarted_rank_is_taken_in_when_its_predecessor_is_gone() {
    let mut world = elastic(2);
    let restarted = newcomer(&mut world, 1, 2);
    world.settle();
    assert_eq!(world.ranks(0), (1, vec![0, 1]), "it waits");
    world.suspect(0, 1, "its link closed");
    world.settle();
    assert_eq!(world.ranks(0), (2, vec![0, 1]));
    assert_eq!(world.membership(restarted), world.membership(0));
    assert!(matches!(world.events(1)[..], [ControlEvent::Removed(_)]));
}

#[test]
fn a_suspicion_that_comes_late_is_not_of_the_next_process_of_the_rank() {
    let mut world = elastic(3);
    let suspected = world.nodes[1].me.join_id;
    let restarted = newcomer(&mut world, 1, 3);
    world.settle();
    world.suspect(0, 1, "its link closed");
    world.settle();
    assert_eq!(world.ranks(0), (2, vec![0, 1, 2]), "the next process is a member");
    // Rank 2 noticed it as well, and could not say so before: its broker was away.
    assert_eq!(world.nodes[2].machine.suspect(suspected, "its link closed".to_owned()), None);
    world.settle();
    assert_eq!(world.ranks(0), (2, vec![0, 1, 2]));
    assert_eq!(world.membership(restarted), world.membership(0));
}

#[test]
fn who_is_not_ready_is_not_taken_in_and_what_it_reports_ends_nothing() {
    let mut world = elastic(2);
    world.leave(1);
    world.run();
    let node = world.start(1, 1, 2, 1);
    world.run();
    assert_eq!(world.ranks(0), (2, vec![0]));
    assert_eq!(world.membership(node), world.membership(0), "it sees who the members are");
    world.events(0);
    world.fail(node, Fault::new(FaultKind::System, "no memory"));
    world.settle();
    assert_eq!(world.events(0), []);
    // Ready, and then the broker loses it all before anybody has read that.
    world.nodes[node].machine.ready();
    world.lose_log();
    world.run();
    assert_eq!(world.ranks(0), (3, vec![0, 1]));
    assert_eq!(world.ranks(node), (3, vec![0, 1]));
}

#[test]
fn a_job_grows_beyond_the_ranks_that_it_started_with() {
    let mut world = elastic(2);
    newcomer(&mut world, 4, 2);
    world.run();
    assert_eq!(world.ranks(0), (2, vec![0, 1, 4]));
    // One that comes too early only waits: the job starts without it.
    let mut world = World::new();
    world.policy = Policy::Elastic { ranks_max: 5 };
    let early = world.start(1, 3, 2, 1);
    world.start_all(1, 2);
    world.settle();
    assert_eq!(world.ranks(1), (1, vec![0, 1]));
    world.nodes[early].machine.ready();
    world.run();
    assert_eq!(world.ranks(early), (2, vec![0, 1, 3]));
}

#[test]
fn a_newcomer_hears_when_all_members_have_ended_in_good_order() {
    let mut world = elastic(2);
    let early = world.start(1, 3, 2, 1);
    world.run();
    assert_eq!(world.events(early), []);
    world.leave(0);
    world.run();
    assert!(world.events(early).iter().all(|event| matches!(event, ControlEvent::View(_))), "one is left");
    world.leave(1);
    world.run();
    let late = world.start(1, 2, 2, 1);
    world.run();
    for node in [early, late] {
        let events = world.events(node);
        let [ControlEvent::Failed(fault)] = &events[..] else { panic!("{events:?}") };
        assert_eq!(fault.kind, FaultKind::RankLeft);
        assert!(fault.detail.contains("is over"), "{fault}");
    }
}

#[test]
fn ranks_that_come_at_the_same_time_share_an_epoch() {
    let mut world = elastic(4);
    for node in [1, 2, 3] {
        world.leave(node);
    }
    world.run();
    assert_eq!(world.ranks(0).1, [0]);
    let epoch = world.ranks(0).0;
    for rank in [1, 2, 3] {
        newcomer(&mut world, rank, 4);
    }
    world.run();
    assert_eq!(world.ranks(0), (epoch + 1, vec![0, 1, 2, 3]));
}

#[test]
fn a_late_joiner_starts_from_a_snapshot() {
    let mut world = elastic(3);
    world.leave(2);
    world.run();
    let snapshot = world.nodes[0].machine.poll_snapshot().expect("there is a new epoch");
    assert_eq!(world.nodes[0].machine.poll_snapshot(), None, "once");
    assert_eq!(world.nodes[1].machine.poll_snapshot(), None, "it is not its turn");
    let newcomer = world.start(1, 2, 3, 1);
    let (now, read) = (world.now, world.log.len());
    let node = &mut world.nodes[newcomer];
    node.read = read;
    node.machine.handle_snapshot(now, Rank(0), [7; 16], snapshot);
    world.settle();
    world.nodes[newcomer].machine.ready();
    world.run();
    assert_eq!(world.ranks(0), (3, vec![0, 1, 2]));
    assert_eq!(world.membership(newcomer), world.membership(0));
}

#[test]
fn a_log_that_is_lost_in_a_later_epoch_is_written_again_by_one() {
    let mut world = elastic(3);
    world.leave(2);
    world.run();
    world.nodes.pop();
    world.lose_log();
    world.run();
    let kinds = world.log.iter().map(|bytes| world.nodes[0].key.open(bytes).unwrap().header.kind);
    assert_eq!(kinds.filter(|kind| *kind == Body::SNAPSHOT).count(), 1);
    let newcomer = newcomer(&mut world, 2, 3);
    world.run();
    assert_eq!(world.ranks(newcomer), (3, vec![0, 1, 2]));
}

#[test]
fn a_suspicion_that_only_some_had_read_does_not_part_them_when_the_log_is_lost() {
    let mut world = elastic(5);
    world.suspect(1, 4, "silent");
    let suspicion = world.nodes[1].machine.poll_append().expect("it is said");
    world.write(1, RECORD_VERSION, suspicion);
    // Rank 2 alone reads it before the broker restarts.
    let read = world.nodes[2].read;
    let (now, bytes) = (world.now, world.log[read].clone());
    let Node { machine, key, .. } = &mut world.nodes[2];
    machine.handle_record(now, &key.open(&bytes).expect("a record"));
    world.nodes.pop();
    world.lose_log();
    world.run();
    for node in 0..4 {
        assert_eq!(world.ranks(node), (2, vec![0, 1, 2, 3]), "rank 2 says again what has been forgotten");
        assert_eq!(world.membership(node), world.membership(0));
    }
}

#[test]
fn a_log_that_is_still_there_is_not_written_again() {
    let mut world = elastic(3);
    world.read_again();
    let before = world.log.len();
    world.run();
    assert_eq!(world.log.len(), before + 3, "three Joins again");
    assert_eq!(world.ranks(0), (1, vec![0, 1, 2]));
}

/// Of this world's log, how many records are proposals of this epoch.
fn proposals(world: &World, of: u64) -> usize {
    let key = &world.nodes[0].key;
    let is_one = |bytes: &&Vec<u8>| {
        let record = key.open(bytes).expect("a record");
        matches!(Body::decode(record.header.kind, record.body), Ok(Some(Body::Propose { epoch, .. })) if epoch.0 == of)
    };
    world.log.iter().filter(is_one).count()
}

#[test]
fn further_suspicions_of_a_process_are_no_further_proposals() {
    let mut world = elastic(5);
    for node in 0..4 {
        world.suspect(node, 4, "silent");
    }
    world.run();
    assert_eq!(world.ranks(0), (2, vec![0, 1, 2, 3]));
    assert_eq!(proposals(&world, 2), 1, "one is enough");
    // With another loss there is another to be made, at once.
    world.suspect(0, 3, "silent");
    world.suspect(1, 2, "silent");
    world.run();
    assert_eq!(world.ranks(0).1, vec![0, 1]);
    assert!(proposals(&world, 3) <= 2, "{}", proposals(&world, 3));
}

#[test]
fn who_joins_a_running_job_and_does_not_fit_is_told_why_at_once() {
    let mut world = elastic(3);
    let other_size = world.start(1, 3, 4, 1);
    world.policy = Policy::Elastic { ranks_max: 10 };
    let too_high = world.start(1, 9, 3, 1);
    world.policy = Policy::Fixed;
    let fixed = world.start(1, 1, 3, 1);
    let before = world.elapsed();
    world.run();
    for (node, words) in [(other_size, "world size"), (fixed, "two processes joined job 'job' as rank 1")] {
        assert!(world.fault(node).detail.contains(words), "{}", world.fault(node));
    }
    assert!(world.elapsed() - before < DEADLINE, "nobody waits for a deadline");
    let events = world.events(too_high);
    let [.., ControlEvent::Removed(fault)] = &events[..] else { panic!("{events:?}") };
    assert!(fault.detail.contains("rank 9 joined a job of 5 ranks at most"), "{fault}");
    for node in 0..3 {
        assert_eq!((world.ranks(node), world.events(node)), ((1, vec![0, 1, 2]), vec![]));
    }
    // Who starts from a snapshot does not see what the others said when they joined.
    world.suspect(0, 2, "silent");
    world.run();
    let snapshot = world.nodes[0].machine.poll_snapshot().expect("a new view");
    world.policy = Policy::Elastic { ranks_max: 5 };
    let late = world.start(1, 2, 4, 1);
    world.nodes[late].read = world.log.len();
    let now = world.now;
    world.nodes[late].machine.handle_snapshot(now, Rank(0), [99; 16], snapshot);
    world.settle();
    let events = world.events(late);
    let [ControlEvent::Removed(fault)] = &events[..] else { panic!("{events:?}") };
    assert!(fault.detail.contains("rank 0 does not take this process into job 'job'"), "{fault}");
    assert!(fault.detail.contains("rank 2 joined job 'job' with world size 4, but rank 0 has world size 3"), "{fault}");
}

#[test]
fn nobody_joins_a_job_whose_members_stay_and_hears_why() {
    let mut world = World::new();
    world.start_all(1, 3);
    world.settle();
    world.policy = Policy::Elastic { ranks_max: 5 };
    let late = world.start(1, 1, 3, 1);
    world.settle();
    let events = world.events(late);
    let [ControlEvent::Removed(fault)] = &events[..] else { panic!("{events:?}") };
    assert!(fault.detail.contains("GRADWIRE_RECOVERY=redo or abort"), "{fault}");
    assert_eq!(world.ranks(0), (1, vec![0, 1, 2]));
    world.policy = Policy::Fixed;
    let again = world.start(1, 2, 3, 1);
    world.settle();
    let said = &world.fault(again).detail;
    assert!(
        said.contains("two processes joined") && said.contains("if the other is gone: job 'job' runs already"),
        "{said}"
    );
}
