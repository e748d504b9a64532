//! What happens to jobs that go on without lost ranks and with new ones, one thing at a time: the random plans do all of
//! it at once.

use gradwire_sim::plan::{Elements, Fault, LinkFault, Links, Operation, Plan, Recovery, Reduce, Tensor, Timed, Wire};
use gradwire_sim::{Outcome, simulate_twice};

const RANKS: u32 = 4;
const STEPS: u32 = 12;

/// A job of 12 steps that take 50 ms each, and what goes wrong at these milliseconds.
fn plan(recovery: Recovery, faults: &[(u64, Fault)]) -> Plan {
    let tensor =
        |elements, wire, collective| Tensor { elements, dtype: Elements::F32, wire, collective, reduce: Reduce::Mean };
    Plan {
        seed: 11,
        ranks: RANKS,
        steps: STEPS,
        recovery,
        ranks_min: 1,
        ranks_max: RANKS + 2,
        rounds: 2,
        links: Links::Asked,
        deadline_ms: 20_000,
        compute_us: 50_000,
        broker_keeps: true,
        tensors: vec![
            tensor(3_000, Wire::Fp16, Operation::AllReduce),
            tensor(40_000, Wire::Fp32, Operation::AllReduce),
            tensor(0, Wire::Fp32, Operation::AllReduce),
        ],
        federated: None,
        faults: faults.iter().map(|(at_ms, fault)| Timed { at_us: at_ms * 1000, fault: *fault }).collect(),
    }
}

fn run(plan: &Plan) -> Outcome {
    let outcome = simulate_twice(plan, None);
    assert_eq!(outcome.violation, None, "{}", plan.to_text());
    outcome
}

const fn crash(rank: u32, back_us: Option<u64>) -> Fault {
    Fault::Crash { rank, back_us, disk: false, silent: false }
}

/// Steps that all ranks together were through with.
fn steps_of(ranks: u64) -> u64 {
    ranks * u64::from(STEPS)
}

#[test]
fn a_lost_ranks_place_is_taken_by_a_new_process_that_takes_part_to_the_end() {
    for recovery in [Recovery::Redo, Recovery::Abort] {
        for links in [Links::Asked, Links::OneSided] {
            let outcome = run(&Plan { links, ..plan(recovery, &[(60, crash(2, Some(10_000)))]) });
            assert_eq!((outcome.tally.processes, outcome.tally.joined, outcome.tally.faults), (5, 1, 0));
            assert!(outcome.tally.steps > steps_of(3), "it had steps of its own: {:?}", outcome.tally);
            assert!(outcome.traffic.state > 0);
            assert_eq!(outcome.tally.aborted > 0, recovery == Recovery::Abort);
        }
    }
}

#[test]
fn a_job_grows_between_two_steps_and_nothing_is_done_again() {
    let outcome = run(&plan(Recovery::Redo, &[(60, Fault::Join { rank: 4 }), (61, Fault::Join { rank: 5 })]));
    let tally = outcome.tally;
    assert_eq!((tally.processes, tally.joined, tally.aborted, tally.failed, tally.faults), (6, 2, 0, 0, 0));
    // Each operation of each step was done once.
    assert_eq!(tally.completed, tally.steps * 3);
}

#[test]
fn a_rank_whose_trainer_hangs_is_gone_on_without_and_one_that_only_computes_is_not() {
    for recovery in [Recovery::Redo, Recovery::Abort] {
        let outcome = run(&plan(recovery, &[(120, Fault::Hang { rank: 1, for_us: 14_000_000 })]));
        assert_eq!((outcome.tally.steps, outcome.tally.faults), (steps_of(4), 0), "{:?}", outcome.tally);
        let outcome = run(&plan(recovery, &[(120, Fault::Hang { rank: 1, for_us: 30_000_000 })]));
        assert_eq!(outcome.tally.faults, 1, "it hears that it was removed: {:?}", outcome.tally);
        assert!((steps_of(3)..steps_of(4)).contains(&outcome.tally.steps), "{:?}", outcome.tally);
    }
    // In a job that fails with its first lost rank, all hear of it.
    let outcome = run(&plan(Recovery::Fail, &[(120, Fault::Hang { rank: 1, for_us: 30_000_000 })]));
    assert_eq!(outcome.tally.faults, 4);
}

#[test]
fn a_rank_leaves_as_it_was_asked_to_and_the_others_go_on() {
    let outcome = run(&plan(Recovery::Redo, &[(120, Fault::Leave { rank: 1 })]));
    assert_eq!((outcome.tally.processes, outcome.tally.faults), (4, 0));
    assert!((steps_of(3) + 1..steps_of(4)).contains(&outcome.tally.steps), "{:?}", outcome.tally);
}

#[test]
fn too_few_ranks_wait_for_others_and_go_on_with_them() {
    for recovery in [Recovery::Redo, Recovery::Abort] {
        let faults = [(60, crash(2, Some(5_000_000)))];
        let outcome = run(&Plan { ranks_min: RANKS, ..plan(recovery, &faults) });
        assert_eq!((outcome.tally.joined, outcome.tally.faults), (1, 0), "{:?}", outcome.tally);
        assert!(outcome.tally.aborted > 0, "a step that waits is the trainer's again");
        assert!(outcome.virtual_us > 5_000_000);
        // Nobody did a step while there were too few.
        assert!(outcome.tally.steps >= steps_of(3), "{:?}", outcome.tally);
    }
}

#[test]
fn too_few_ranks_that_wait_in_vain_end_by_their_deadline() {
    let outcome = run(&Plan { ranks_min: RANKS, ..plan(Recovery::Redo, &[(60, crash(2, None))]) });
    assert_eq!((outcome.tally.joined, outcome.tally.faults), (0, 3));
    assert!(outcome.virtual_us < 30_000_000);
}

#[test]
fn too_few_ranks_are_joined_by_two_that_are_needed_at_once() {
    for recovery in [Recovery::Redo, Recovery::Abort] {
        let faults = [(60, crash(2, Some(3_000_000))), (200, crash(0, None)), (5_000, Fault::Join { rank: 0 })];
        let outcome = run(&Plan { ranks_min: RANKS, ..plan(recovery, &faults) });
        assert_eq!((outcome.tally.joined, outcome.tally.faults), (2, 0), "{:?}", outcome.tally);
        assert!(outcome.virtual_us > 5_000_000, "the first waits for the second");
    }
}

#[test]
fn newcomers_that_are_stopped_keep_no_other_out() {
    // As many as are served at once, and one more: they have asked for the state when they stop, before the step is over,
    // and wake up when everything is.
    let mut faults = Vec::new();
    for rank in RANKS..RANKS + 9 {
        faults.push((60, Fault::Join { rank }));
        faults.push((200, Fault::Stop { rank, for_us: 60_000_000 }));
    }
    faults.push((300, Fault::Join { rank: RANKS + 9 }));
    let plan = Plan { ranks_max: RANKS + 10, steps: 40, compute_us: 400_000, ..plan(Recovery::Redo, &faults) };
    let outcome = run(&plan);
    assert_eq!(outcome.tally.joined, 1, "{:?}", outcome.tally);
}

#[test]
fn a_holder_that_is_lost_while_it_gives_its_state_harms_nobody() {
    let slow = LinkFault { for_us: 1_000_000, to: Some(2), delay_us: 3_000, ..LinkFault::default() };
    let mut joined = 0;
    for at_ms in (70..130).step_by(3) {
        let mut plan = plan(Recovery::Redo, &[(50, Fault::Link(slow)), (60, crash(2, Some(10_000)))]);
        plan.faults.push(Timed { at_us: at_ms * 1000 + at_ms * 17 % 1000, fault: crash(1, None) });
        joined += run(&plan).tally.joined;
    }
    assert!(joined > 15, "nearly all get in all the same: {joined} of 20");
}

#[test]
fn a_rank_that_is_stopped_too_long_learns_that_it_was_removed() {
    for (at_us, links) in [(60_000, Links::Asked), (55_000, Links::OneSided), (64_700, Links::Asked)] {
        let mut plan = plan(Recovery::Redo, &[]);
        plan.links = links;
        plan.faults.push(Timed { at_us, fault: Fault::Stop { rank: 3, for_us: 5_000_000 } });
        let outcome = run(&plan);
        // The others have all their steps, and it ends with a fault, having had no step that they have not.
        assert_eq!(outcome.tally.faults, 1);
        assert!((steps_of(3)..steps_of(3) + 2).contains(&outcome.tally.steps), "{:?}", outcome.tally);
    }
}

#[test]
fn a_rank_that_is_lost_while_tensors_are_declared_or_links_opened_is_done_without() {
    for at_us in (2_000..2_600).step_by(20) {
        let mut plan = plan(Recovery::Redo, &[]);
        plan.faults.push(Timed { at_us, fault: crash(1, None) });
        let outcome = run(&plan);
        assert!(outcome.tally.steps >= steps_of(3) || outcome.tally.steps == 0, "{:?}", outcome.tally);
    }
}
