//! Seeds and jobs that have to hold.

use gradwire_sim::{Plan, Shape, simulate, simulate_twice};

#[test]
fn every_invariant_holds_over_a_fixed_set_of_seeds() {
    for seed in 1..=150 {
        let plan = Plan::generate(seed, &Shape::default());
        if let Some(violation) = simulate_twice(&plan, None).violation {
            panic!("seed {seed}: {violation}; again: gradwire-sim --seed {seed} --trace");
        }
    }
}

#[test]
fn two_runs_of_a_plan_are_the_same_to_the_last_event_and_others_are_not() {
    let mut digests = std::collections::BTreeSet::new();
    for seed in 1000..1020 {
        let plan = Plan::generate(seed, &Shape::default());
        let (first, second) = (simulate(&plan, None, true), simulate(&plan, None, true));
        assert_eq!(first.text, second.text);
        assert_eq!((first.digest, first.events), (second.digest, second.events));
        // Whether anybody reads along must not matter.
        assert_eq!(simulate(&plan, None, false).digest, first.digest);
        assert!(digests.insert(first.digest));
    }
}

#[test]
fn without_faults_every_operation_ends_well_whatever_the_mode() {
    for (federated, seeds) in [(false, 2000..2030), (true, 3000..3015)] {
        for seed in seeds {
            let mut plan = Plan::generate(seed, &Shape { federated: Some(federated), ..Shape::default() });
            plan.faults.clear();
            let outcome = simulate(&plan, None, false);
            assert_eq!(outcome.violation, None, "seed {seed}");
            assert_eq!(outcome.tally.failed, 0, "seed {seed}");
            let each = if federated { 1 } else { plan.tensors.len() as u64 };
            assert_eq!(outcome.tally.completed, u64::from(plan.ranks) * u64::from(plan.steps) * each, "seed {seed}");
        }
    }
}

#[test]
fn a_job_of_many_ranks_sends_as_many_messages_as_it_has_to() {
    let mut plan = Plan::generate(
        7,
        &Shape { ranks: Some(96), federated: Some(false), recovery: Some(gradwire_sim::plan::Recovery::Fail) },
    );
    plan.faults.clear();
    plan.steps = 2;
    plan.rounds = 1;
    plan.tensors.truncate(1);
    plan.tensors[0].elements = 1000;
    plan.tensors[0].collective = gradwire_sim::plan::Operation::AllReduce;
    let outcome = simulate(&plan, None, false);
    assert_eq!(outcome.violation, None);
    let steps = u64::from(plan.ranks) * u64::from(plan.steps);
    assert_eq!(outcome.tally.steps, steps);
    // One owner gets the contributions of all others, and sends each of them the result.
    assert_eq!(outcome.traffic.writes, u64::from(plan.steps) * 2 * 95);
    assert_eq!(outcome.traffic.messages, 0);
    // Each declares to each other, is prepared, says goodbye, and is told that it may go.
    assert_eq!(outcome.traffic.around, 96 * 95 * 4);
    // Where the job goes on without lost ranks each says to each other that it has all of the step.
    plan.recovery = gradwire_sim::plan::Recovery::Redo;
    let outcome = simulate(&plan, None, false);
    assert_eq!((outcome.violation, outcome.traffic.messages), (None, u64::from(plan.steps) * 96 * 95));
}
