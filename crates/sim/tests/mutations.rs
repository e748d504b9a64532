//! The simulation finds bugs: each of the planted ones shows within the seeds that every run of the tests has, and none
//! of those seeds fails without it.

use gradwire_sim::{Mutation, Plan, Shape, shrink, simulate};

/// As many as `ci/test` simulates.
const SEEDS: std::ops::Range<u64> = 1..1001;

/// The first seed that fails with this bug, its plan, and the invariant that is broken.
fn find(mutation: Mutation) -> (u64, Plan, &'static str) {
    for seed in SEEDS {
        let plan = Plan::generate(seed, &Shape::default());
        if let Some(violation) = simulate(&plan, Some(mutation), false).violation {
            println!("{mutation:?}: seed {seed}, {violation}");
            assert_eq!(simulate(&plan, None, false).violation, None, "seed {seed} fails by itself");
            return (seed, plan, violation.invariant);
        }
    }
    panic!("{mutation:?} was not found");
}

macro_rules! found {
    ($($name:ident: $mutation:ident, $($invariant:literal)|+;)*) => {
        $(#[test]
        fn $name() {
            let (_, _, invariant) = find(Mutation::$mutation);
            assert!([$($invariant),+].contains(&invariant), "{invariant}");
        })*
    };
}

found! {
    frames_of_another_epoch_that_pass: SkipEpochCheck, "2 exactly once" | "3 no stale write" | "4 bounded";
    sums_in_the_order_of_arrival: ArrivalOrder, "2 exactly once";
    slots_that_are_given_back_too_early: FreeSlotEarly, "2 exactly once";
    contributions_that_count_twice: CountTwice, "2 exactly once";
    payloads_that_nobody_checks: SkipCrc, "5 integrity";
    writes_that_land_unasked: SkipAdmission, "1 same bits" | "2 exactly once" | "3 no stale write";
    deadlines_that_nobody_keeps: IgnoreDeadline, "4 bounded";
    receipts_for_what_is_not_stored: EarlyReceipt, "6 durable" | "4 bounded" | "progress" | "1 same bits";
    memory_that_outlives_its_epoch: LeakEpoch, "7 bounded memory";
    federated_sums_over_what_is_there: AddWhatIsHere, "federated sums";
    what_is_done_again_from_a_result: RedoFromResult, "2 exactly once";
    results_that_should_have_been_replaced: KeepReplaced, "2 exactly once" | "1 same bits" | "same state";
    commits_that_wait_for_nobody: CommitAtOnce, "4 bounded" | "1 same bits" | "2 exactly once" | "same state";
    ranks_that_do_not_care_that_they_were_removed: IgnoreRemoval, "1 same bits" | "2 exactly once" | "same state";
    newcomers_that_leave_out_a_step: SkipResults, "same state";
    states_of_another_step_for_newcomers: StateAsIs, "same state";
}

#[test]
fn a_failing_plan_is_made_small_and_still_fails() {
    let (_, plan, invariant) = find(Mutation::SkipCrc);
    let (smaller, violation) = shrink(&plan, Some(Mutation::SkipCrc), 400);
    assert_eq!(violation.map(|violation| violation.invariant), Some(invariant));
    assert_eq!(simulate(&smaller, Some(Mutation::SkipCrc), false).violation.map(|v| v.invariant), Some(invariant));
    assert_eq!((smaller.faults.len(), smaller.tensors.len(), smaller.steps), (1, 1, 1), "{}", smaller.to_text());
    assert!(smaller.ranks <= 3, "{}", smaller.to_text());
    let read = Plan::from_text(&smaller.to_text()).expect("it is a plan");
    assert_eq!(read, smaller);
}

#[test]
fn what_does_not_fail_is_left_as_it_is() {
    let plan = Plan::generate(1, &Shape::default());
    let (same, violation) = shrink(&plan, None, 10);
    assert_eq!((same, violation), (plan, None));
}
