//! Trainers that use gradwire in ways that make no sense: every process ends by its deadline, with a result or a fault that
//! says why; none panics, and nobody waits for ever.

use std::time::{Duration, Instant};

use gradwire_tests::{Ended, Job, Plan};

const STEPS: &str = "12";
const DEADLINE_MS: u64 = 4000;
/// Joining, an operation and a commit may each take a deadline; the rest is a machine that is busy.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

fn plan(recovery: &str) -> Plan {
    Plan::new(3, "auto")
        .with("GRADWIRE_RECOVERY", recovery)
        .with("GRADWIRE_RANKS_MAX", 4)
        .with("GRADWIRE_DEADLINE_MS", DEADLINE_MS)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0)
}

fn run(recovery: &str, how: &str) -> Vec<Ended> {
    let plan = plan(recovery);
    let start = Instant::now();
    let ended = Job::start((0..3).map(|rank| plan.command_of("e2e-misuse", rank, &[how, STEPS]))).wait();
    assert!(start.elapsed() < ENDS_WITHIN, "{how} with {recovery} took {:?}: {ended:#?}", start.elapsed());
    for rank in &ended {
        assert!(rank.status.success(), "{how} with {recovery}: {ended:#?}");
        assert!(["ok ", "fault "].iter().any(|word| rank.verdict().starts_with(word)), "{how}: {ended:#?}");
    }
    ended
}

const RECOVERIES: [&str; 3] = ["fail", "abort", "redo"];

/// These go on, or end as said, with every recovery.
#[test]
fn what_is_refused_or_harmless_disturbs_nobody() {
    for recovery in RECOVERIES {
        for how in ["many-threads", "offer-twice", "grow"] {
            for rank in run(recovery, how) {
                assert_eq!(rank.verdict(), format!("ok {STEPS} steps"), "{how} with {recovery}: {:?}", rank.lines);
            }
        }
    }
    // Whether or not it waits for the others, a commit is refused while something is in flight.
    for recovery in RECOVERIES {
        let ended = run(recovery, "commit-with-open");
        assert!(ended[1].lines.iter().any(|line| line == "early: Err(TensorBusy)"), "{ended:#?}");
        assert!(ended.iter().all(|rank| rank.verdict() == format!("ok {STEPS} steps")), "{ended:#?}");
    }
}

#[test]
fn a_group_that_is_closed_or_dropped_in_the_middle_of_a_step_waits_for_it_and_leaves() {
    for recovery in RECOVERIES {
        for how in ["close", "drop"] {
            let ended = run(recovery, how);
            assert!(ended[1].verdict().starts_with("ok ended with ["), "{how} with {recovery}: {ended:#?}");
            for rank in [&ended[0], &ended[2]] {
                let said = rank.verdict();
                let fails = said.starts_with("fault RankLeft rank=1") && said.contains("the same number of steps");
                let goes_on = said == format!("ok {STEPS} steps");
                assert!(if recovery == "fail" { fails } else { goes_on }, "{how} with {recovery}: {ended:#?}");
            }
        }
    }
}

#[test]
fn a_broadcast_whose_root_is_gone_is_refused_and_nobody_gets_anothers_data() {
    for recovery in RECOVERIES {
        let ended = run(recovery, "lost-root");
        for rank in [&ended[0], &ended[2]] {
            let said = rank.verdict();
            let words = if recovery == "fail" { "left the job" } else { "its root, rank 1, is no member any more" };
            assert!(said.starts_with("fault RankLeft rank=1") && said.contains(words), "{recovery}: {ended:#?}");
        }
    }
}

#[test]
fn commits_and_operations_that_do_not_match_are_an_error_on_every_rank() {
    for (recovery, how) in [
        ("fail", "commit-twice"),
        ("fail", "skip-commit"),
        ("redo", "commit-twice"),
        ("abort", "skip-commit"),
        ("fail", "post-while-committing"),
    ] {
        for rank in run(recovery, how) {
            let said = rank.verdict();
            let kinds = ["fault OperationMismatch", "fault NotOffered"];
            assert!(kinds.iter().any(|kind| said.starts_with(kind)), "{how} with {recovery}: {said}");
            assert!(said.contains("every rank must"), "{said}");
        }
    }
    // Where commits wait for all, a rank that is at another one is known at once, and the fault names it.
    for recovery in ["abort", "redo"] {
        let (twice, skipped) =
            (["rank 1 is at its commit 5", "after 4 commits"], ["is at its commit 4", "rank 1 does it"]);
        for (how, words) in [("commit-twice", twice), ("skip-commit", skipped)] {
            let ended = run(recovery, how);
            for rank in &ended {
                let said = rank.verdict();
                assert!(said.starts_with("fault OperationMismatch rank=1: "), "{how} with {recovery}: {ended:#?}");
                assert!(words.iter().all(|word| said.contains(word)), "{how} with {recovery}: {said}");
            }
        }
    }
    // What comes in the middle of a commit is part of the next step, or refused: by the moment.
    for recovery in ["abort", "redo"] {
        run(recovery, "post-while-committing");
    }
}

#[test]
fn a_trainer_that_hangs_costs_its_own_rank_only() {
    // Its process is there and answers; only its part of the step does not come.
    for recovery in ["abort", "redo"] {
        let ended = run(recovery, "hang");
        for rank in [&ended[0], &ended[2]] {
            assert_eq!(rank.verdict(), format!("ok {STEPS} steps"), "{recovery}: {ended:#?}");
        }
        let said = ended[1].verdict();
        assert!(said.starts_with("fault Removed rank=1") && said.contains("its trainer may hang"), "{said}");
    }
    for rank in run("fail", "hang") {
        assert!(rank.verdict().starts_with("fault NotOffered rank=1"), "{rank:?}");
    }
}

#[test]
fn a_newcomer_whose_parts_do_not_fit_together_hears_which_and_the_others_go_on() {
    let plan = plan("redo");
    let start = |rank, how: &str, steps: &str| plan.command_of("e2e-misuse", rank, &[how, steps]);
    let mut job = Job::start((0..3).map(|rank| start(rank, "grow", "300")));
    job.wait_for_line(0, "step 3");
    let (short, other) = (job.add(start(3, "short", "300")), job.add(start(3, "", "300")));
    let ended = job.wait();
    let said = ended[short].verdict();
    assert!(
        said.starts_with("fault InvalidArgument") && said.contains("part 'weights' of the state: it has"),
        "{said}"
    );
    // The state has other lengths after each step: whoever joins has another.
    let said = ended[other].verdict();
    assert!(said.starts_with("fault ShapeMismatch") && said.contains("has part 'weights' of"), "{said}");
    for rank in 0..3 {
        assert_eq!(ended[rank].verdict(), "ok 300 steps", "{ended:#?}");
    }
}
