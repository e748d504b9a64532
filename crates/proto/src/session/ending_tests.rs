//! Who ends with which step, as one rank sees it.

use super::super::{Next, Wish};
use super::*;

/// What a rank that wants `own` makes of what all want.
fn next(recovery: Recovery, own: Wish, others: &[Wish]) -> Next {
    let timing = crate::session::Timing::default();
    let (rank, epoch, job) = (Rank(0), crate::Epoch(1), crate::frame::JobTag([7; 16]));
    let (first_step, copies, ranks_min) = (crate::Step(0), false, 1);
    let world_size = 1 + others.len() as u32;
    let config =
        crate::session::SessionConfig { rank, world_size, epoch, job, first_step, timing, copies, recovery, ranks_min };
    let mut session = Session::new(config);
    session.set_wish(own);
    session.begin_commit(0, None).unwrap();
    for (peer, wish) in others.iter().enumerate() {
        let mut header = crate::frame::FrameHeader::new(crate::frame::FrameKind::HasAll, epoch);
        header.unit_count = *wish as u32;
        session.handle_message(Rank(peer as u32 + 1), &header, &[], 0).unwrap();
    }
    assert_eq!(session.commits(), 1);
    session.next()
}

#[test]
fn whoever_was_given_notice_leaves_together_and_all_end_if_all_were() {
    use Wish::{End, GoOn, Leave, LeaveSoon};
    let redo = |own, others: &[Wish]| next(Recovery::Redo, own, others);
    assert_eq!(redo(GoOn, &[GoOn, GoOn]), Next::GoOn);
    assert_eq!(redo(LeaveSoon, &[GoOn, LeaveSoon]), Next::GoOn, "others may be about to hear the same");
    assert_eq!(redo(LeaveSoon, &[LeaveSoon, LeaveSoon]), Next::End, "they have");
    assert_eq!(redo(Leave, &[GoOn, LeaveSoon]), Next::Leave);
    assert_eq!(redo(LeaveSoon, &[GoOn, Leave]), Next::Leave);
    assert_eq!(redo(GoOn, &[LeaveSoon, Leave]), Next::GoOn);
    assert_eq!(redo(GoOn, &[End, GoOn]), Next::End);
    assert_eq!(redo(Leave, &[LeaveSoon]), Next::End);
    assert_eq!(redo(LeaveSoon, &[]), Next::End, "it is alone");
}

#[test]
fn where_nobody_can_go_on_without_a_rank_nobody_leaves_alone() {
    use Wish::{GoOn, Leave, LeaveSoon};
    let fail = |own, others: &[Wish]| next(Recovery::Fail, own, others);
    assert_eq!(fail(GoOn, &[GoOn, GoOn]), Next::GoOn);
    assert_eq!(fail(GoOn, &[LeaveSoon, GoOn]), Next::End);
    assert_eq!(fail(Leave, &[GoOn, GoOn]), Next::End);
}

#[test]
fn an_unknown_wish_is_none_that_a_peer_may_have() {
    assert!(Wish::decode(3, Rank(1)).is_ok() && Wish::decode(4, Rank(1)).is_err());
    assert!(Next::decode(2, Rank(1)).is_ok() && Next::decode(3, Rank(1)).is_err());
}
