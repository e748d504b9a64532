//! Ranks that stand still (SIGSTOP) in one phase or another of a step, until the others have gone on without them: awake
//! again they learn that they were removed, and never have another result.

use std::time::Duration;

use gradwire_tests::steps::assert_same;
use gradwire_tests::{Ended, Job, Plan, random};
use rustix::process::Signal;

const STEPS: usize = 30;
const RANKS: u32 = 3;

fn plan(transport: &str) -> Plan {
    Plan::new(RANKS, transport)
        .with("GRADWIRE_RECOVERY", "redo")
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_DEADLINE_MS", 60_000)
}

fn start(plan: &Plan, pause_ms: u32) -> Job {
    Job::start((0..RANKS).map(|rank| command(plan, rank, pause_ms)))
}

fn command(plan: &Plan, rank: u32, pause_ms: u32) -> std::process::Command {
    plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), &pause_ms.to_string()])
}

/// Up to `most`, evenly.
fn up_to(most: Duration) -> Duration {
    most.mul_f64(f64::from(u32::from_le_bytes(random())) / f64::from(u32::MAX))
}

/// Waits until a rank is through with a step that was made by these.
fn wait_for_step_by(job: &mut Job, rank: usize, by: &str) {
    job.wait_for(rank, &format!("a step by {by}"), |line| {
        line.starts_with("step ") && line.contains(&format!(" by {by} "))
    });
}

fn assert_removed(ended: &Ended) {
    let said = ended.verdict();
    assert!(said.starts_with("fault Removed rank=") && said.contains("went on without"), "{ended:#?}");
}

/// Several jobs at a time: they mostly wait for the silence to be long enough.
fn at_once(count: usize, one: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        for nth in 0..count {
            let one = &one;
            scope.spawn(move || one(nth));
        }
    });
}

#[test]
fn a_rank_that_stood_still_in_any_phase_of_a_step_learns_that_it_was_removed() {
    // Without a pause most stops are in the middle of operations, with one most are between steps.
    at_once(8, |nth| {
        let (transport, pause) = ([("tcp", 0), ("shm", 0), ("tcp", 30)])[nth % 3];
        let recovery = if nth < 6 { "redo" } else { "abort" };
        let plan = plan(transport).with("GRADWIRE_RECOVERY", recovery);
        let mut job = start(&plan, pause);
        job.wait_for_line(0, "step 5 ");
        std::thread::sleep(up_to(Duration::from_millis(60)));
        let victim = nth / 3 % 2 + 1;
        job.signal(victim, Signal::STOP);
        let by = if victim == 1 { "0,2" } else { "0,1" };
        wait_for_step_by(&mut job, 0, by);
        std::thread::sleep(up_to(Duration::from_millis(300)));
        job.signal(victim, Signal::CONT);
        let ended = job.wait();
        assert_removed(&ended[victim]);
        let through: Vec<usize> = (0..3).filter(|rank| *rank != victim).collect();
        assert_same(&ended, &through, STEPS);
    });
}

/// Where it wakes up just as the others lose patience, it is a member or it is not: for all of them alike.
#[test]
fn a_rank_that_wakes_up_at_the_last_moment_goes_on_or_is_removed() {
    at_once(6, |nth| {
        let plan = plan(["tcp", "shm"][nth % 2]);
        let mut job = start(&plan, 5);
        job.wait_for_line(0, "step 3 ");
        std::thread::sleep(up_to(Duration::from_millis(40)));
        job.signal(1, Signal::STOP);
        let stops = [Duration::ZERO, Duration::from_millis(2200), Duration::from_millis(2400)];
        std::thread::sleep(stops[nth / 2] + up_to(Duration::from_millis(800)));
        job.signal(1, Signal::CONT);
        let ended = job.wait();
        if ended[1].verdict() == format!("ok {STEPS} steps") {
            assert_same(&ended, &[0, 1, 2], STEPS);
        } else {
            assert_removed(&ended[1]);
            assert_same(&ended, &[0, 2], STEPS);
        }
    });
}

/// The one that stands still is a newcomer that fetches the state, or a member that gives it away.
#[test]
fn ranks_that_stand_still_while_another_joins_hold_nobody_up() {
    at_once(4, |nth| {
        let plan = plan(["tcp", "shm"][nth % 2]);
        let mut job = start(&plan, 30);
        job.wait_for_line(0, "step 5 ");
        let newcomer = job.add(command(&plan, 4, 30));
        job.wait_for_line(newcomer, "pid ");
        std::thread::sleep(up_to(Duration::from_millis(300)));
        let victim = if nth < 2 { newcomer } else { 1 };
        job.signal(victim, Signal::STOP);
        // Whether the newcomer was a member by then, and whether it caught up in time, is left open.
        job.wait_for_line(0, "ok ");
        job.wait_for_line(2, "ok ");
        job.signal(victim, Signal::CONT);
        let ended = job.wait();
        assert_same(&ended, &[0, 2], STEPS);
        for process in [1, newcomer] {
            let said = ended[process].verdict();
            assert!(said.starts_with("ok ") || said.starts_with("fault "), "{ended:#?}");
        }
        if victim == 1 {
            assert_removed(&ended[1]);
        }
    });
}
