//! Ranks that leave between two steps, that say goodbye to some only, and that resign.

use super::*;

#[test]
fn a_rank_that_leaves_between_two_steps_is_let_go_though_the_others_have_begun_the_next() {
    for leaver in 0..3 {
        // The first is owned by one rank, so that the others have to ask whether it takes part.
        let mut world = World::new(3, &[10, 200_000, 0], Recovery::Redo, 7);
        for _ in 0..2 {
            for rank in 0..3 {
                world.train(rank);
            }
            world.drain();
        }
        assert!(world.nodes.iter().all(|node| node.committed.len() == 1));
        for rank in (0..3).filter(|rank| *rank != leaver) {
            world.train(rank);
        }
        world.nodes[leaver].session.leave();
        world.drain();
        assert!(world.nodes[leaver].farewell, "rank {leaver} waits in vain");
        world.nodes[leaver].state = State::Dead;
        world.remove(leaver);
        world.finish();
        world.check();
        assert!(world.nodes.iter().all(|node| node.aborted == 0));
    }
}

#[test]
fn a_rank_that_said_goodbye_to_its_peers_only_is_lost_after_the_silence_limit() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    world.nodes[1].session.leave();
    world.drain();
    let session = &mut world.nodes[0].session;
    session.handle_link_down(Rank(1), Fault::new(FaultKind::RankDied, "it ended"));
    let lost = |session: &mut Session| {
        let events = core::iter::from_fn(|| session.poll_event());
        events.filter(|event| matches!(event, Event::Lost { peer: Rank(1), .. })).count()
    };
    for half_seconds in 1..=5 {
        session.handle_timeout(half_seconds * 500_000_000);
        assert_eq!(lost(session), 0, "the control log may say so yet");
    }
    session.handle_timeout(3_100_000_000);
    assert_eq!(lost(session), 1);
}

#[test]
fn a_rank_that_resigns_is_lost_to_those_who_can_go_on_and_fails_the_others() {
    for recovery in [Recovery::Abort, Recovery::Fail] {
        let mut world = World::new(2, &[10], recovery, 7);
        let fault = Fault::new(FaultKind::RankDied, "it panicked").at(Rank(1));
        world.nodes[1].session.resign(fault.clone());
        let mut bytes = MessageBytes::new();
        assert_eq!(world.nodes[1].session.peek_message(&mut bytes), Some(Rank(0)));
        let (header, body) = bytes.split_at(FRAME_HEADER_BYTES);
        let header = FrameHeader::decode(header, &JOB).unwrap();
        let session = &mut world.nodes[0].session;
        session.handle_message(Rank(1), &header, body, 0).unwrap();
        let fault = fault.reported_by(Rank(1));
        let event = core::iter::from_fn(|| session.poll_event()).last();
        if recovery == Recovery::Fail {
            assert_eq!((event, session.fault()), (Some(Event::Failed(fault.clone())), Some(&fault)));
        } else {
            assert_eq!((event, session.fault()), (Some(Event::Lost { peer: Rank(1), fault }), None));
        }
    }
}

#[test]
fn a_rank_that_resigns_in_an_epoch_that_others_have_not_entered_is_lost_to_them_all_the_same() {
    // Its memory cannot be laid out, as it enters an epoch that the others hear of before or after that.
    for others_first in [true, false] {
        let mut world = World::new(4, &[10, 200_000], Recovery::Redo, 7);
        world.nodes[3].state = State::Dead;
        world.remove(3);
        if others_first {
            assert!(world.learn(0) && world.learn(1));
        }
        assert!(world.learn(2));
        let fault = Fault::new(FaultKind::MemoryUnavailable, "no descriptors are left").at(Rank(2));
        world.nodes[2].session.resign(fault.clone());
        world.drain();
        for rank in 0..2 {
            let lost = core::mem::take(&mut world.nodes[rank].lost);
            assert_eq!(lost.first(), Some(&(Rank(2), fault.clone().reported_by(Rank(2)))), "{lost:?}");
        }
        if !others_first {
            // What was said in the epoch before counts in this one too.
            assert!(world.learn(0) && world.learn(1));
            assert!((0..2).all(|rank| world.nodes[rank].lost.iter().any(|(peer, _)| *peer == Rank(2))));
        }
        world.nodes[2].state = State::Dead;
        // Its own, which is nobody else's.
        assert_eq!(world.nodes[2].fault.take(), Some(fault));
        world.remove(2);
        world.finish();
        world.check();
        assert!((0..2).all(|rank| world.nodes[rank].committed.len() as u64 == STEPS));
    }
}
