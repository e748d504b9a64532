//! What goes wrong while a job runs: every living rank gets a typed error that names rank, tensor and cause, in time.

use std::time::{Duration, Instant};

use gradwire_tests::{PATIENCE, Plan, assert_faults};
use rustix::process::Signal;

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

#[test]
fn declarations_that_differ_are_named_on_every_rank() {
    let cases = [
        ("shape", "ShapeMismatch", ["'weights'", "[3]", "[1]", "rank 1"]),
        ("dtype", "DTypeMismatch", ["'weights'", "i32", "f32", "rank 1"]),
        ("reduce", "OperationMismatch", ["'weights'", "max", "sum", "rank 1"]),
        ("missing", "DeclarationMismatch", ["'weights'", "rank 1", "ranks 0 and 2", "declare"]),
    ];
    for (difference, kind, words) in cases {
        let ended = Plan::new(3, "shm").run(&["declare", difference]);
        assert_faults(&ended, &[0, 1, 2], kind, &words);
    }
}

#[test]
fn a_rank_that_declares_nothing_is_named_at_the_deadline() {
    let plan = Plan::new(3, "tcp").with("GRADWIRE_DEADLINE_MS", 3000);
    assert_faults(&plan.run(&["declare", "never"]), &[0, 1, 2], "NotOffered", &["rank=1", "rank 1"]);
}

#[test]
fn a_tensor_that_one_rank_never_offers_is_named_at_the_deadline() {
    for transport in TRANSPORTS {
        let plan = Plan::new(3, transport).with("GRADWIRE_DEADLINE_MS", 3000);
        let began = Instant::now();
        assert_faults(&plan.run(&["skip"]), &[0, 1, 2], "NotOffered", &["rank=1 tensor=skipped", "rank 1"]);
        assert!(began.elapsed() < PATIENCE);
    }
}

#[test]
fn ranks_that_run_different_numbers_of_steps_are_told_at_once() {
    for transport in TRANSPORTS {
        let began = Instant::now();
        let ended = Plan::new(3, transport).run(&["uneven"]);
        assert_faults(&ended, &[1, 2], "RankLeft", &["rank=0", "tensor=weights", "same number of steps"]);
        assert_eq!(ended[0].verdict(), "ok 5 steps");
        assert!(began.elapsed() < Duration::from_secs(30), "not only at the deadline");
    }
}

#[test]
fn ranks_that_resume_from_different_steps_are_told() {
    assert_faults(&Plan::new(2, "tcp").run(&["steps-differ"]), &[0, 1], "OperationMismatch", &["step 0", "step 5"]);
}

#[test]
fn an_undeclared_name_is_refused_and_breaks_nothing() {
    let ended = Plan::new(2, "shm").run(&["undeclared"]);
    assert_faults(&ended, &[0, 1], "UndeclaredTensor", &["tensor=unknown", "declare"]);
}

#[test]
fn a_rank_that_exits_or_is_killed_is_named_at_once() {
    for transport in TRANSPORTS {
        for when in ["before", "middle"] {
            for how in ["exit", "kill"] {
                let began = Instant::now();
                let ended = Plan::new(3, transport).run(&["die", when, how]);
                assert_faults(&ended, &[0, 2], "RankDied", &["rank=1"]);
                assert!(
                    began.elapsed() < Duration::from_secs(28),
                    "not only at the deadline: {transport} {when} {how}"
                );
            }
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_at_the_deadline() {
    for transport in TRANSPORTS {
        let plan = Plan::new(3, transport).with("GRADWIRE_DEADLINE_MS", 4000);
        let mut job = plan.start(&["stay"]);
        for rank in 0..3 {
            job.wait_for_line(rank, "step");
        }
        job.signal(1, Signal::STOP);
        for rank in [0, 2] {
            let said = job.wait_for_line(rank, "fault ");
            assert!(said.starts_with("fault NotOffered rank=1 tensor=weights"), "{said}");
        }
        job.signal(1, Signal::CONT);
        let ended = job.wait();
        // Awake again, it learns that the job went on without it.
        assert!(ended[1].verdict().starts_with("fault "), "{ended:#?}");
    }
}

#[test]
fn a_broker_that_dies_after_the_start_disturbs_no_step() {
    let mut plan = Plan::new(2, "tcp");
    let mut job = plan.start(&["many-steps", "4000"]);
    job.wait_for_line(0, "joined");
    job.wait_for_line(1, "joined");
    plan.stop_broker();
    for rank in job.wait() {
        assert_eq!(rank.verdict(), "ok flat");
    }
}
