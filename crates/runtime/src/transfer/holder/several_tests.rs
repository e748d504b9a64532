//! Newcomers that come at once.

use gradwire_proto::{DType, FaultKind, TensorId};

use super::*;
use crate::state::StateTensor;

const SOON: Duration = Duration::from_secs(30);
const NOW: Duration = Duration::ZERO;

struct Flat(Vec<u8>);

impl State for Flat {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        vec![StateTensor { name: "weights", bytes: &self.0 }]
    }

    fn parts_mut(&mut self) -> Vec<crate::state::StateTensorMut<'_>> {
        vec![crate::state::StateTensorMut { name: "weights", bytes: &mut self.0 }]
    }
}

/// A member that makes steps of one unit.
fn holder() -> (Holder, Flat) {
    (Holder::new(Step(0)), Flat(vec![7; 100]))
}

fn make_step(holder: &Holder, step: u64) {
    let bytes = Arc::from([step as u8; 4]);
    let made = UnitResult { tensor: TensorId(0), at: 0, elements: 1, wire: DType::F32, bytes };
    holder.keep(step, Epoch(1), UnitIndex(0), || Some(made));
    holder.commit(step + 1, Epoch(1), &[Rank(0)]);
}

fn offer(holder: &Holder, commits: u64, state: &Flat) -> usize {
    let copying = holder.offer(commits, state, SOON, &|| false).expect("it goes on");
    copying.map_or(0, |copying| {
        copying.run();
        copying.shares.len()
    })
}

fn reason<T: std::fmt::Debug>(outcome: Result<T, No>) -> Reason {
    outcome.expect_err("it is refused").reason
}

#[test]
fn who_wants_the_same_state_shares_a_copy_and_who_wants_another_gets_its_own() {
    let (holder, state) = holder();
    for (asker, seat) in [(1, 0), (2, 0), (3, 1)] {
        holder.wish(asker, 1, seat, 2).expect("there is room");
        assert!(holder.share(asker, NOW).expect("it may wait").is_none());
    }
    holder.wish(4, 2, 0, 2).expect("there is room");
    make_step(&holder, 0);
    assert_eq!(offer(&holder, 1, &state), 2);
    let shares = [1, 2, 3].map(|asker| holder.share(asker, NOW).expect("it is kept").expect("it is there"));
    assert!(Arc::ptr_eq(&shares[0], &shares[1]) && !Arc::ptr_eq(&shares[0], &shares[2]));
    // One that has what it needs takes nothing away from the other.
    holder.release(1);
    assert!(shares[1].piece(0, NOW).expect("it is kept").is_some());
    assert!(holder.share(4, NOW).expect("it may wait").is_none());
    make_step(&holder, 1);
    assert_eq!(offer(&holder, 2, &state), 1);
    assert!(holder.share(4, NOW).expect("it is kept").is_some());
    assert_eq!(offer(&holder, 2, &state), 0, "nobody waits any more");
}

#[test]
fn results_are_kept_until_all_have_them() {
    let (holder, state) = holder();
    holder.wish(1, 0, 0, 1).expect("there is room");
    holder.wish(2, 0, 0, 1).expect("there is room");
    assert_eq!(offer(&holder, 0, &state), 1);
    (0..3).for_each(|step| make_step(&holder, step));
    for step in 0..3 {
        let (results, made) = holder.results(1, step, 0).expect("it is final");
        assert_eq!((results.commits, made[0].bytes[0]), (3, step as u8));
    }
    assert_eq!(reason(holder.results(1, 3, 0)), Reason::NotYet);
    assert_eq!(holder.results(2, 0, 0).expect("it is kept").1[0].bytes[0], 0);
    assert_eq!(holder.lock().journal.steps(), 3);
    holder.release(2);
    assert_eq!(holder.lock().journal.steps(), 0);
    assert!(holder.journals());
    holder.release(1);
    assert!(!holder.journals());
    assert_eq!(reason(holder.results(1, 3, 0)), Reason::TooLate);
}

#[test]
fn one_more_than_are_served_is_told_so_until_one_of_them_stalls() {
    let (holder, _) = holder();
    for asker in 0..ASKERS_MAX as Asker {
        holder.wish(asker, 5, 0, 1).expect("there is room");
    }
    let no = holder.wish(100, 5, 0, 1).expect_err("there is no room");
    assert!(no.reason == Reason::Busy && no.detail.contains("ask again"), "{no:?}");
    holder.wish(3, 6, 0, 1).expect("who has a place keeps it");
    let long_ago = Instant::now().checked_sub(2 * STALLED_AFTER).expect("the clock is not new");
    holder.lock().askers.values_mut().for_each(|served| served.heard = long_ago);
    // Those that wait for an answer do not stall.
    (0..ASKERS_MAX as Asker).filter(|asker| *asker != 5).for_each(|asker| {
        assert!(holder.share(asker, NOW).expect("it may wait").is_none());
    });
    holder.wish(100, 5, 0, 1).expect("one made room");
    assert_eq!(reason(holder.share(5, NOW)), Reason::TooLate);
    assert_eq!(reason(holder.wish(101, 5, 0, 1)), Reason::Busy);
}

#[test]
fn with_too_few_ranks_all_that_come_get_the_state_as_it_is() {
    let (holder, state) = holder();
    make_step(&holder, 0);
    holder.set_too_few(Some(Fault::new(FaultKind::DeadlineExceeded, "too few")));
    std::thread::scope(|scope| {
        let member = scope.spawn(|| holder.offer(1, &state, SOON, &|| false).map(|copying| copying.is_some()));
        while !holder.outline().resting {
            std::thread::yield_now();
        }
        for asker in [1, 2] {
            holder.wish(asker, 1, 0, 1).expect("there is room");
            let share = holder.share(asker, SOON).expect("it is kept").expect("it is there");
            assert!(share.piece(0, SOON).expect("it is kept").is_some());
            assert_eq!(reason(holder.results(asker, 1, 0)), Reason::NotYet);
        }
        // A later step does not come.
        holder.wish(3, 2, 0, 1).expect("there is room");
        assert_eq!(reason(holder.share(3, SOON)), Reason::TooLate);
        holder.set_too_few(None);
        assert_eq!(member.join().expect("no panic"), Ok(false));
    });
}

#[test]
fn with_too_few_ranks_one_that_is_asked_to_end_waits_no_longer() {
    let (holder, state) = holder();
    make_step(&holder, 0);
    let too_few = Fault::new(FaultKind::DeadlineExceeded, "too few");
    holder.set_too_few(Some(too_few.clone()));
    let ended = holder.offer(1, &state, SOON, &|| true).map(|copying| copying.is_some());
    assert!(ended.is_err_and(|fault| fault.kind == too_few.kind && fault.detail.contains("was asked to end")));
    assert!(!holder.outline().resting);
}

#[test]
fn who_leaves_gives_what_it_has_promised_and_nothing_else() {
    let (holder, state) = holder();
    holder.wish(1, 0, 0, 1).expect("there is room");
    holder.wish(2, 0, 0, 1).expect("there is room");
    holder.wish(3, 5, 0, 1).expect("there is room");
    assert_eq!(offer(&holder, 0, &state), 1);
    make_step(&holder, 0);
    assert_eq!(holder.results(2, 0, 0).expect("it is final").0.commits, 1);
    holder.leave();
    assert_eq!(reason(holder.share(3, SOON)), Reason::TooLate, "that step does not come");
    assert_eq!(reason(holder.results(2, 0, 0)), Reason::TooLate);
    assert_eq!(reason(holder.wish(4, 5, 0, 1)), Reason::Busy);
    let start = Instant::now();
    holder.linger(Duration::from_millis(20));
    assert!(start.elapsed() >= Duration::from_millis(20), "somebody was promised the state");
    std::thread::scope(|scope| {
        let lingers = scope.spawn(|| holder.linger(SOON));
        let share = holder.share(1, SOON).expect("it is kept").expect("it is there");
        assert!(share.piece(0, SOON).expect("it is kept").is_some());
        assert_eq!(reason(holder.results(1, 0, 0)), Reason::TooLate);
        lingers.join().expect("it ends once everybody has what they need");
    });
    assert!(start.elapsed() < SOON);
}
