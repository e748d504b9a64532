//! Ranks that commit once too often or too rarely, where commits wait for all: every rank hears at once which one is where.

use super::*;

/// Ranks that have made a step together, with these tensors.
fn after_a_step(ranks: u32, sizes: &[u64]) -> World {
    let mut world = World::new(ranks, sizes, Recovery::Redo, 7);
    for rank in 0..ranks as usize {
        post(&mut world, rank);
    }
    world.drain();
    for rank in 0..ranks as usize {
        commit(&mut world, rank);
    }
    world.drain();
    assert!(world.nodes.iter().all(|node| node.session.commits() == 1 && node.fault.is_none()));
    world
}

/// What is refused after a fault is not looked at: it shows in the events.
fn post(world: &mut World, rank: usize) {
    for tensor in (0..world.tensors).map(TensorId) {
        let _ = world.nodes[rank].session.post(tensor, world.now, None);
    }
}

fn commit(world: &mut World, rank: usize) {
    let _ = world.nodes[rank].session.begin_commit(world.now, None);
}

fn assert_told(world: &World, odd: usize, words: &[&str]) {
    for node in &world.nodes {
        let fault = node.fault.as_ref().expect("every rank hears of it, long before a deadline");
        assert_eq!((fault.kind, fault.rank), (FaultKind::OperationMismatch, Some(Rank(odd as u32))), "{fault}");
        assert!(words.iter().all(|word| fault.detail.contains(word)), "{words:?}: {fault}");
    }
}

/// Sizes that one rank owns, and that all own a part of.
const SIZES: [&[u64]; 3] = [&[10], &[200_000], &[10, 200_000]];

#[test]
fn a_commit_too_many_is_told_on_every_rank_whoever_is_first() {
    for (ranks, sizes) in [(2, SIZES[0]), (2, SIZES[1]), (3, SIZES[0]), (3, SIZES[1]), (3, SIZES[2])] {
        for odd in 0..ranks as usize {
            let others: Vec<usize> = (0..ranks as usize).filter(|rank| *rank != odd).collect();
            for order in 0..3 {
                let mut world = after_a_step(ranks, sizes);
                if order == 0 {
                    commit(&mut world, odd);
                    world.drain();
                    assert!(world.nodes.iter().all(|node| node.fault.is_none()), "the others may be slow");
                }
                others.iter().for_each(|rank| post(&mut world, *rank));
                if order == 1 {
                    world.drain();
                    assert!(world.nodes.iter().all(|node| node.fault.is_none()), "it may be slow");
                }
                if order > 0 {
                    commit(&mut world, odd);
                }
                world.drain();
                let at = alloc::format!("rank {odd} is at its commit 2 and has no part in it");
                assert_told(&world, odd, &[&at, "does it after 1 commits", "every rank must"]);
            }
        }
    }
}

#[test]
fn a_commit_too_few_is_told_on_every_rank_whoever_is_first() {
    for (ranks, sizes) in [(2, SIZES[0]), (2, SIZES[1]), (3, SIZES[0]), (3, SIZES[1])] {
        for odd in 0..ranks as usize {
            for first in [true, false] {
                let mut world = after_a_step(ranks, sizes);
                (0..ranks as usize).for_each(|rank| post(&mut world, rank));
                world.drain();
                if first {
                    post(&mut world, odd);
                    world.drain();
                }
                (0..ranks as usize).filter(|rank| *rank != odd).for_each(|rank| commit(&mut world, rank));
                world.drain();
                if !first {
                    assert!(world.nodes.iter().all(|node| node.fault.is_none()), "it may be slow");
                    post(&mut world, odd);
                    world.drain();
                }
                assert_told(&world, odd, &["is at its commit 2", "does it after 1 commits", "every rank must"]);
            }
        }
    }
}

#[test]
fn whoever_commits_a_step_without_an_operation_blames_nobody_at_its_deadline() {
    let mut world = after_a_step(2, SIZES[0]);
    world.nodes[1].session.begin_commit(0, Some(1000)).unwrap();
    world.nodes[1].session.handle_timeout(1000);
    let fault = world.nodes[1].session.fault().expect("its deadline is over");
    assert_eq!((fault.kind, fault.rank), (FaultKind::NotOffered, None), "{fault}");
    let words = ["rank 1 committed a step without an operation", "rank 0 did not commit it", "every rank must"];
    assert!(words.iter().all(|word| fault.detail.contains(word)), "{fault}");
}
