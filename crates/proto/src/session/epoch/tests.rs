//! Trainers that go on while ranks are lost at any moment: what one commits, all commit, with one set of contributors.

mod departures;
mod found;
mod late;
mod mismatches;
mod world;

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::super::tests::JOB;
use super::super::transmit::MessageBytes;
use super::super::*;
use crate::frame::FrameHeader;
use crate::ids::Epoch;
use crate::limits::FRAME_HEADER_BYTES;
use world::{STEPS, State, World};

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![Just(0), Just(3), 1u64..30_000, 100_000u64..400_000], 1..4)
}

/// Loses ranks and lets others join, and checks what holds then. `losses`: after how many steps of the world which rank is
/// lost, and whether it was only stopped. `joins`: after which of them, and how many steps later, a process joins, with the
/// lost one's rank or a new one.
fn lose_and_join(mut world: World, losses: &[(usize, usize, bool)], joins: &[(usize, usize, bool)]) {
    let mut left = world.nodes.len();
    for (nth, (after, rank, stopped)) in losses.iter().copied().enumerate() {
        let rank = rank % world.nodes.len();
        for _ in 0..after {
            world.step();
        }
        if left == 1 || world.nodes[rank].state != State::Runs {
            continue;
        }
        left -= 1;
        world.nodes[rank].state = if stopped { State::Stopped } else { State::Dead };
        // What it sent last may be lost with it, from some point on.
        if !stopped {
            for to in 0..world.nodes.len() {
                let kept = world.random(4);
                world.links[rank][to].truncate(kept);
            }
        }
        world.remove(rank);
        for (_, later, again) in joins.iter().filter(|(loss, ..)| *loss == nth) {
            for _ in 0..*later {
                world.step();
            }
            let free = *again && world.nodes[rank].state == State::Dead;
            world.add(if free { rank } else { world.nodes.len() });
            left += 1;
        }
    }
    world.finish();
    // Those that were stopped wake up, find what was sent to them before, and change nothing.
    for node in world.nodes.iter_mut().filter(|node| node.state == State::Stopped) {
        node.state = State::Runs;
    }
    world.finish();
    world.check();
}

/// Found by the property below: to others that were behind, a newcomer was ahead, and what it did not know counted.
#[test]
fn a_newcomer_knows_how_the_step_before_it_ended() {
    let world = World::new(5, &[212_993], Recovery::Abort, 10_921_235_707_180_264_112);
    lose_and_join(world, &[(1454, 0, false), (438, 1, false), (47, 6, false)], &[(0, 31, false)]);
}

/// Found by it too: newcomers among themselves, of whom one notices, and is lost after that.
#[test]
fn a_newcomer_that_noticed_that_nobody_knows_may_be_lost_before_the_others_notice() {
    let world = World::new(2, &[0], Recovery::Abort, 68_300_451_922_995_794);
    lose_and_join(world, &[(159, 0, true), (16, 5, false), (92, 3, false)], &[(0, 217, false), (0, 14, false)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_one_rank_commits_all_commit_whoever_is_lost_whenever(
        size in 2u32..6,
        sizes in sizes(),
        seed in any::<u64>(),
        // When which rank is lost, and whether it was only stopped.
        losses in prop::collection::vec((1usize..3000, 0usize..8, any::<bool>()), 0..5),
        // After which of these losses a process joins, with the lost one's rank or a new one.
        joins in prop::collection::vec((0usize..5, 0usize..300, any::<bool>()), 0..3),
        redo in prop::bool::weighted(0.8),
    ) {
        let recovery = if redo { Recovery::Redo } else { Recovery::Abort };
        lose_and_join(World::new(size, &sizes, recovery, seed), &losses, &joins);
    }
}

#[test]
fn without_losses_nothing_is_done_again() {
    let mut world = World::new(3, &[0, 10, 200_000], Recovery::Redo, 7);
    world.finish();
    world.check();
    assert!(world.nodes.iter().all(|node| node.again == 0 && node.aborted == 0));
}

#[test]
fn a_rank_that_joins_between_two_steps_takes_part_in_the_next_and_nothing_is_done_again() {
    let mut world = World::new(2, &[0, 10, 200_000], Recovery::Redo, 7);
    while world.nodes.iter().any(|node| node.committed.is_empty()) {
        for rank in 0..2 {
            if world.nodes[rank].committed.is_empty() {
                world.train(rank);
            }
        }
        world.drain();
    }
    assert!(world.nodes.iter().all(|node| node.session.is_between_steps()));
    world.add(2);
    assert!(!world.nodes[0].session.is_awaited_in(Epoch(2)));
    world.learn(0);
    world.pump(0, usize::MAX);
    world.deliver(0, 1);
    assert!(world.nodes[1].session.is_awaited_in(Epoch(2)));
    world.finish();
    world.check();
    assert_eq!(world.nodes[2].first, Some(1));
    assert_eq!(world.nodes[2].committed[0][0].1, [Rank(0), Rank(1), Rank(2)]);
    assert!(world.nodes.iter().all(|node| node.again == 0 && node.aborted == 0));
}

#[test]
fn a_newcomer_that_fails_before_it_knows_where_the_others_are_tells_nobody() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    world.add(2);
    let session = &mut world.nodes[2].session;
    session.fail(Fault::new(FaultKind::System, "no memory"));
    let mut bytes = MessageBytes::new();
    assert_eq!(session.peek_message(&mut bytes), None);
}

#[test]
fn too_few_members_abort_the_step_and_repeat_it_with_others() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    world.nodes.iter_mut().for_each(|node| node.session.config.ranks_min = 2);
    for rank in 0..3 {
        world.train(rank);
    }
    for rank in 0..3 {
        world.pump(rank, 3);
        world.deliver(rank, (rank + 1) % 3);
    }
    for lost in [1, 2] {
        world.nodes[lost].state = State::Dead;
    }
    world.remove(1);
    world.remove(2);
    while world.learn(0) {}
    assert_eq!((world.nodes[0].aborted, world.nodes[0].rests), (1, 1));
    // What is posted again waits; what still comes of the old step does not count.
    world.train(0);
    world.drain();
    assert!(world.nodes[0].committed.is_empty() && !world.nodes[0].waits_for.is_empty());
    world.add(1);
    world.nodes[1].session.config.ranks_min = 2;
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}

#[test]
fn a_step_of_which_all_that_are_left_have_all_is_final_though_they_are_too_few() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    world.nodes.iter_mut().for_each(|node| node.session.config.ranks_min = 3);
    for rank in 0..3 {
        world.train(rank);
    }
    world.drain();
    for rank in 0..3 {
        world.train(rank);
    }
    // Rank 2 hears from both that they have all: the step is final to it, and it goes. The others do not hear of it.
    for rank in 0..3 {
        world.pump(rank, usize::MAX);
    }
    for from in [0, 1] {
        while world.deliver(from, 2) {}
    }
    world.take_events(2);
    assert_eq!(world.nodes[2].committed.len(), 1);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    for rank in 0..2 {
        world.learn(rank);
    }
    world.drain();
    for node in &world.nodes[..2] {
        assert_eq!((node.committed.len(), node.aborted, node.rests), (1, 0, 1));
        assert_eq!(node.committed[0][0].1, [Rank(0), Rank(1), Rank(2)]);
    }
}

#[test]
fn a_step_that_cannot_be_done_again_is_aborted_by_all_and_repeated() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Abort, 7);
    for rank in 0..3 {
        world.train(rank);
    }
    world.pump(0, usize::MAX);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert!(world.nodes[..2].iter().all(|node| node.aborted == 1 && node.again == 0));
}

#[test]
fn a_tensor_that_was_posted_twice_in_a_step_cannot_be_done_again() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    for _ in 0..2 {
        for rank in 0..2 {
            world.nodes[rank].session.post(TensorId(0), 0, None).unwrap();
        }
        world.drain();
    }
    world.nodes[1].state = State::Dead;
    world.remove(1);
    world.learn(0);
    assert_eq!((world.nodes[0].aborted, world.nodes[0].again), (1, 0));
    assert_eq!(world.nodes[0].session.step(TensorId(0)), Step(0), "it begins anew");
}

#[test]
fn operations_of_a_step_that_is_committed_are_waited_for() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    world.train(0);
    let fault = world.nodes[0].session.begin_commit(0, None).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorBusy);
    world.train(1);
    world.drain();
    world.nodes[0].session.begin_commit(0, None).unwrap();
    assert_eq!(world.nodes[0].session.post(TensorId(0), 0, None).unwrap_err().kind, FaultKind::TensorBusy);
}

#[test]
fn a_silent_peer_is_reported_once_and_one_that_is_heard_is_not() {
    let mut world = World::new(3, &[10], Recovery::Redo, 7);
    world.nodes[2].state = State::Stopped;
    let mut lost = Vec::new();
    for _ in 0..20 {
        world.now += 500_000_000;
        for rank in 0..3 {
            let node = &mut world.nodes[rank];
            if node.state == State::Runs {
                node.session.handle_timeout(world.now);
                while let Some(event) = node.session.poll_event() {
                    let Event::Lost { peer, fault } = event else { continue };
                    assert_eq!((fault.kind, fault.rank), (FaultKind::RankDied, Some(peer)));
                    lost.push((rank, peer, world.now / 1_000_000));
                }
            }
        }
        for (from, to) in [(0, 1), (1, 0)] {
            world.nodes[to].session.heard(Rank(from), world.now);
        }
    }
    assert_eq!(lost.len(), 2, "{lost:?}");
    assert!(lost.iter().all(|(_, peer, at)| *peer == Rank(2) && (2500..=4000).contains(at)), "{lost:?}");
}

/// Found across processes: one spoilt byte in a header failed the whole job.
#[test]
fn a_peer_whose_frames_cannot_be_is_lost_and_the_others_go_on() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    let fault = Fault::violation(Rank(2), "a message whose body does not match its header");
    world.train(0);
    world.nodes[0].session.give_up(Rank(2), fault.clone());
    let events: Vec<Event> = core::iter::from_fn(|| world.nodes[0].session.poll_event()).collect();
    assert_eq!(events, [Event::Lost { peer: Rank(2), fault }]);
    assert_eq!(world.nodes[0].session.fault(), None);
    // What still comes from it is not looked at.
    for rank in 1..3 {
        world.train(rank);
    }
    world.drain();
    let node = &world.nodes[0];
    for (unit, result) in node.session.plan().units.iter().zip(&node.results) {
        assert_eq!(result.is_some(), unit.owner == Rank(1), "{unit:?}");
    }
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}

#[test]
fn a_link_that_spoils_everything_costs_its_peer_only() {
    let mut world = World::new(3, &[200_000], Recovery::Redo, 7);
    for rank in 0..3 {
        world.train(rank);
    }
    let session = &mut world.nodes[1].session;
    let transmit = core::iter::from_fn(|| session.poll_transmit(1_000_000_000)).find(|one| one.peer == Rank(0));
    let header = session.header(&transmit.expect("something for rank 0"));
    let session = &mut world.nodes[0].session;
    for _ in 0..1000 {
        session.handle_corrupt(Rank(1), &header);
    }
    let lost: Vec<Event> = core::iter::from_fn(|| session.poll_event()).collect();
    assert!(
        matches!(&lost[..], [Event::Lost { peer: Rank(1), fault }] if fault.kind == FaultKind::IntegrityExhausted),
        "{lost:?}"
    );
}

#[test]
fn a_peer_without_a_link_is_reported_in_every_epoch_that_has_it() {
    let mut world = World::new(3, &[10], Recovery::Redo, 7);
    let lost = |world: &mut World| {
        let session = &mut world.nodes[0].session;
        let events = core::iter::from_fn(|| session.poll_event());
        events.filter(|event| matches!(event, Event::Lost { peer: Rank(1), .. })).count()
    };
    world.nodes[0].session.handle_link_down(Rank(1), Fault::new(FaultKind::RankDied, "cut"));
    assert_eq!(lost(&mut world), 1);
    // The others were quicker to go on without rank 2.
    world.nodes[0].session.enter(Epoch(2), &[Rank(0), Rank(1)], &[]);
    assert_eq!(lost(&mut world), 1);
}

/// Found across processes: a newcomer that failed right after it had become a member.
#[test]
fn a_rank_that_leaves_in_the_middle_of_a_step_fails_nobody_where_others_go_on() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    for rank in 0..2 {
        world.train(rank);
    }
    world.nodes[2].session.leave();
    for _ in 0..4 {
        world.drain();
        world.now += 400_000_000;
        for rank in 0..2 {
            world.nodes[rank].session.handle_timeout(world.now);
        }
    }
    world.drain();
    assert!(world.nodes.iter().all(|node| node.fault.is_none()), "{:?}", world.nodes[0].fault);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}
