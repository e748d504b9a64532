//! Ranks that are there, and do not do their part.

use super::*;

const SECOND: u64 = 1_000_000_000;

/// Ranks with a deadline of 20 s, of which these post the first step's operation.
fn waiting(size: u32, posted: &[usize]) -> World {
    let mut world = World::new(size, &[64, 64], Recovery::Redo, 7);
    for node in &mut world.nodes {
        node.session.config.timing.deadline_ns = 20 * SECOND;
    }
    for rank in posted {
        world.train(*rank);
    }
    world.drain();
    world
}

/// Time goes by for these ranks, which hear from all others.
fn pass(world: &mut World, ranks: &[usize], until: u64) {
    while world.now < until {
        world.now += SECOND / 4;
        for rank in ranks {
            let session = &mut world.nodes[*rank].session;
            (0..session.peers.len() as u32).for_each(|peer| session.heard(Rank(peer), world.now));
            session.handle_timeout(world.now);
        }
        world.drain();
    }
}

fn lost(world: &World, rank: usize) -> Vec<(Rank, FaultKind)> {
    world.nodes[rank].lost.iter().map(|(peer, fault)| (*peer, fault.kind)).collect()
}

#[test]
fn a_rank_that_does_not_do_its_part_is_given_up_before_the_deadline_and_the_step_ends() {
    let mut world = waiting(4, &[0, 1, 3]);
    pass(&mut world, &[0, 1, 3], 14 * SECOND);
    assert!([0, 1, 3].iter().all(|rank| lost(&world, *rank).is_empty()), "it may compute for as long");
    pass(&mut world, &[0, 1, 3], 16 * SECOND);
    for rank in [0, 1, 3] {
        assert_eq!(lost(&world, rank), [(Rank(2), FaultKind::NotOffered)], "rank {rank}");
    }
    world.remove(2);
    for rank in [0, 1, 3] {
        world.learn(rank);
    }
    world.drain();
    for rank in [0, 1, 3] {
        assert!(world.nodes[rank].waits_for.is_empty() && world.nodes[rank].fault.is_none(), "rank {rank}");
    }
}

#[test]
fn a_rank_that_does_not_commit_is_given_up_too() {
    let mut world = waiting(4, &[0, 1, 2, 3]);
    for rank in [0, 1, 3] {
        world.train(rank);
    }
    world.drain();
    pass(&mut world, &[0, 1, 3], 16 * SECOND);
    assert_eq!(lost(&world, 0), [(Rank(2), FaultKind::NotOffered)]);
}

#[test]
fn a_rank_that_waits_for_the_one_that_hangs_is_not_given_up_with_it() {
    let mut world = waiting(5, &[0, 1, 4]);
    // Rank 2 does the operations in another order, and waits for its first.
    world.nodes[2].session.post(TensorId(1), SECOND / 2, None).expect("it is idle");
    world.nodes[2].waits_for.push(TensorId(1));
    world.drain();
    pass(&mut world, &[0, 1, 2, 4], 17 * SECOND);
    for rank in [0, 1, 4] {
        assert_eq!(lost(&world, rank), [(Rank(3), FaultKind::NotOffered)], "rank {rank}");
    }
    assert_eq!(lost(&world, 2), [(Rank(3), FaultKind::NotOffered)]);
}

#[test]
fn a_rank_that_was_late_and_did_its_part_in_time_is_not_given_up_with_one_that_hangs() {
    // Whatever owners have said of it before.
    for posted_at in [2, 8, 13, 14] {
        let mut world = waiting(5, &[0, 2, 4]);
        pass(&mut world, &[0, 1, 2, 4], posted_at * SECOND + SECOND / 2);
        world.train(1);
        world.drain();
        pass(&mut world, &[0, 1, 2, 4], 17 * SECOND);
        for rank in [0, 2, 4] {
            assert_eq!(lost(&world, rank), [(Rank(3), FaultKind::NotOffered)], "rank {rank}, {posted_at}");
        }
        // Its own deadline is later.
        assert_eq!(lost(&world, 1), [], "{posted_at}");
    }
}

#[test]
fn one_of_two_that_hangs_is_given_up_by_the_other() {
    let mut world = waiting(2, &[0]);
    pass(&mut world, &[0], 16 * SECOND);
    assert_eq!(lost(&world, 0), [(Rank(1), FaultKind::NotOffered)]);
}

#[test]
fn where_most_are_late_nobody_is_given_up() {
    let mut world = waiting(5, &[0, 1]);
    pass(&mut world, &[0, 1], 21 * SECOND);
    assert_eq!(lost(&world, 0), []);
    assert_eq!(world.nodes[0].fault.as_ref().map(|fault| fault.kind), Some(FaultKind::NotOffered));
}

#[test]
fn a_rank_that_did_not_run_itself_gives_nobody_up() {
    let mut world = waiting(4, &[0, 1, 3]);
    // Rank 0 is stopped for longer than the others wait; what they sent lies unread.
    world.now = 16 * SECOND;
    let session = &mut world.nodes[0].session;
    session.handle_timeout(world.now);
    world.drain();
    assert_eq!(lost(&world, 0), []);
}
