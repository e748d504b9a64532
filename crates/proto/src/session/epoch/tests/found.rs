//! What the simulation of whole jobs (`gradwire-sim`) found in epochs, once more as small as it is.

use super::*;

/// A world in which rank 2 is lost, and the others have entered an epoch without it but not heard from each other.
fn in_the_middle_of_a_change() -> World {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    for rank in 0..2 {
        world.learn(rank);
        assert!(world.nodes[rank].session.is_syncing());
    }
    world
}

#[test]
fn a_round_that_is_begun_while_members_change_is_told_once() {
    let mut world = in_the_middle_of_a_change();
    for rank in 0..2 {
        world.nodes[rank].session.declare(vec![2; 10], 0, None).unwrap();
    }
    // A second telling would be a violation of the protocol.
    world.drain();
    for node in &mut world.nodes[..2] {
        assert_eq!(node.fault, None);
        assert_eq!(node.session.take_manifests()[..2], [vec![2; 10], vec![2; 10]]);
    }
}

#[test]
fn a_commit_may_begin_while_what_was_done_is_done_again() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    for rank in 0..3 {
        world.train(rank);
    }
    world.drain();
    assert!(world.nodes.iter().all(|node| node.waits_for.is_empty()), "all is done");
    world.nodes[2].state = State::Dead;
    world.remove(2);
    for rank in 0..2 {
        world.learn(rank);
        world.pump(rank, usize::MAX);
    }
    world.deliver(1, 0);
    assert!(world.nodes[0].again > 0 && world.nodes[0].results.iter().any(Option::is_none), "it is not done yet");
    // Its caller has all results, and does not know that there will be others.
    world.nodes[0].session.begin_commit(0, None).unwrap();
    world.nodes[0].committing = true;
    let fault = world.nodes[0].session.begin_commit(0, None).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorBusy);
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}
