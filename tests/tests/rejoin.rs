//! Ranks that join while others train: they come to the same bits, and the others do not wait for them.

use std::time::Duration;

use gradwire_tests::steps::{self, Steps};
use gradwire_tests::{Ended, Job, Plan, status_of};
use rustix::process::Signal;

const STEPS: usize = 100;

fn plan(ranks: u32, transport: &str) -> Plan {
    Plan::new(ranks, transport)
        .with("GRADWIRE_RECOVERY", "redo")
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_DEADLINE_MS", 30_000)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0)
}

fn start(plan: &Plan) -> Job {
    Job::start((0..plan.world_size).map(|rank| command(plan, rank)))
}

fn command(plan: &Plan, rank: u32) -> std::process::Command {
    plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "10", "3000"])
}

/// Asserts that these processes are through, and that no process had another state after any step.
fn assert_same(ended: &[Ended], through: &[usize]) -> Steps {
    steps::assert_same(ended, through, STEPS)
}

#[test]
fn a_rank_that_was_killed_comes_back_with_the_state_and_takes_part() {
    for (transport, recovery) in [("tcp", "redo"), ("shm", "redo"), ("tcp", "abort")] {
        let plan = plan(3, transport).with("GRADWIRE_RECOVERY", recovery);
        let mut job = start(&plan);
        job.wait_for_line(0, "step 10 ");
        job.signal(1, Signal::KILL);
        job.wait_for_line(0, "step 20 ");
        let back = job.add(command(&plan, 1));
        let ended = job.wait();
        let all = assert_same(&ended, &[0, 2, back]);
        assert_eq!(all[&0].0, "0,1,2");
        assert!(all.values().any(|(by, _)| by == "0,2"), "{all:?}");
        assert_eq!(all[&(STEPS - 1)].0, "0,1,2", "{ended:#?}");
    }
}

/// Found by a user: a newcomer has no part in a save that the others make before the step that it begins with.
#[test]
fn a_rank_may_join_while_the_others_save_their_state() {
    let directory = tempfile::tempdir().expect("a directory");
    let plan = plan(3, "tcp").with("E2E_SAVES", directory.path().display());
    let mut job = start(&plan);
    let mut back = 1;
    for step in [8, 28, 48] {
        job.wait_for_line(0, &format!("step {step} "));
        job.signal(back, Signal::KILL);
        back = job.add(command(&plan, 1));
        job.wait_for_line(back, "joined ");
    }
    let ended = job.wait();
    let all = assert_same(&ended, &[0, 2, back]);
    assert_eq!(all[&(STEPS - 1)].0, "0,1,2", "{ended:#?}");
}

#[test]
fn with_nobody_left_who_has_the_state_a_newcomer_hears_so_at_once() {
    let plan = plan(2, "auto");
    let mut job = start(&plan);
    job.wait_for_line(0, "step 5 ");
    job.signal(0, Signal::KILL);
    job.signal(1, Signal::KILL);
    let alone = job.add(command(&plan, 1));
    let said = job.wait()[alone].verdict().to_owned();
    assert!(said.starts_with("fault RankDied") && said.contains("start it again from what was saved"), "{said}");
}

#[test]
fn a_job_grows_by_ranks_that_it_did_not_start_with() {
    let plan = plan(2, "auto");
    let mut job = start(&plan);
    job.wait_for_line(0, "step 5 ");
    // One of them may become a member while the other one follows: what it contributes is in the others' results.
    let [first, second] = [job.add(command(&plan, 4)), job.add(command(&plan, 2))];
    let ended = job.wait();
    let all = assert_same(&ended, &[0, 1, first, second]);
    assert_eq!(all[&(STEPS - 1)].0, "0,1,2,4", "{ended:#?}");
}

#[test]
fn below_the_minimum_a_job_waits_for_newcomers_and_goes_on() {
    let plan = plan(2, "tcp").with("GRADWIRE_RANKS_MIN", 2);
    let mut job = start(&plan);
    job.wait_for_line(0, "step 10 ");
    job.signal(1, Signal::KILL);
    let back = job.add(command(&plan, 1));
    let ended = job.wait();
    let all = assert_same(&ended, &[0, back]);
    assert!(all.values().all(|(by, _)| by == "0,1"), "{all:?}");
}

#[test]
fn below_the_minimum_it_waits_for_longer_than_an_operation_may_take_where_that_is_wanted() {
    let plan = plan(2, "tcp").with("GRADWIRE_RANKS_MIN", 2).with("GRADWIRE_RANKS_WAIT_MS", 120_000);
    let plan = plan.with("GRADWIRE_DEADLINE_MS", 4000);
    let mut job = start(&plan);
    job.wait_for_line(0, "step 10 ");
    job.signal(1, Signal::KILL);
    std::thread::sleep(Duration::from_secs(6));
    let mut newcomer = command(&plan, 1);
    newcomer.env("GRADWIRE_DEADLINE_MS", "60000");
    let back = job.add(newcomer);
    let ended = job.wait();
    assert_same(&ended, &[0, back]);
}

#[test]
fn two_newcomers_that_are_needed_at_once_are_served_at_once() {
    let plan = plan(3, "tcp").with("GRADWIRE_RANKS_MIN", 3);
    let mut job = start(&plan);
    job.wait_for_line(0, "step 10 ");
    job.signal(1, Signal::KILL);
    job.signal(2, Signal::KILL);
    let back = [job.add(command(&plan, 1)), job.add(command(&plan, 2))];
    let ended = job.wait();
    let all = assert_same(&ended, &[0, back[0], back[1]]);
    assert!(all.values().all(|(by, _)| by == "0,1,2"), "{all:?}");
}

#[test]
fn a_newcomer_of_another_model_is_refused_and_nobody_is_disturbed() {
    let plan = plan(2, "auto");
    let mut job = start(&plan);
    job.wait_for_line(0, "step 5 ");
    let mut other = command(&plan, 2);
    other.env("E2E_WIDER", "1");
    let other = job.add(other);
    let ended = job.wait();
    let said = ended[other].verdict();
    assert!(said.starts_with("fault ShapeMismatch") && said.contains("another model"), "{said}");
    let all = assert_same(&ended, &[0, 1]);
    assert!(all.values().all(|(by, _)| by == "0,1"), "{all:?}");
}

#[test]
fn a_second_process_of_a_rank_hears_that_it_lives_and_keeps_nobody_from_joining() {
    // The job ends before patience with the second process does; and long after.
    for pause in ["10", "80"] {
        let plan = plan(2, "auto");
        let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), pause, "3000"]);
        let mut job = Job::start((0..2).map(command));
        job.wait_for_line(0, "step 5 ");
        let (second, new) = (job.add(command(1)), job.add(command(2)));
        let ended = job.wait();
        let said = ended[second].verdict();
        assert!(said.starts_with("fault WorldMismatch rank=1") && said.contains("rank 1 lives already"), "{said}");
        let all = assert_same(&ended, &[0, 1, new]);
        assert_eq!(all[&(STEPS - 1)].0, "0,1,2", "{ended:#?}");
    }
}

#[test]
fn a_newcomer_that_is_slower_than_the_others_hears_that_it_is() {
    let plan = plan(2, "auto");
    let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "30", "60000"]);
    let mut job = Job::start((0..2).map(command));
    job.wait_for_line(0, "step 5 ");
    let mut slow = command(2);
    slow.env("E2E_APPLY_MS", "1500").env("GRADWIRE_DEADLINE_MS", "1000");
    let slow = job.add(slow);
    let ended = job.wait();
    let said = ended[slow].verdict();
    assert!(said.starts_with("fault DeadlineExceeded rank=2"), "{said}");
    assert!(said.contains("did not catch up") || said.contains("did not get the job's state in time"), "{said}");
    assert!(!said.contains("did not take"), "{said}");
    assert_same(&ended, &[0, 1]);
}

#[test]
fn a_newcomer_goes_on_without_a_member_that_is_lost_while_it_gives_its_state() {
    const STATE_MIB: u64 = 160;
    for transport in ["tcp", "shm"] {
        let plan = plan(4, transport);
        let state = (STATE_MIB << 10).to_string();
        let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "10", &state]);
        let mut job = Job::start((0..4).map(command));
        job.wait_for_line(0, "step 10 ");
        job.signal(3, Signal::KILL);
        let back = job.add(command(3));
        // A part of the state is there.
        while resident_mib(job.pid(back)) < STATE_MIB / 4 {
            std::thread::sleep(Duration::from_millis(1));
        }
        job.signal(1, Signal::STOP);
        std::thread::sleep(Duration::from_millis(300));
        job.signal(1, Signal::KILL);
        let ended = job.wait();
        let all = assert_same(&ended, &[0, 2, back]);
        assert_eq!(all[&(STEPS - 1)].0, "0,2,3", "{ended:#?}");
        let fetched = ended[back].lines.iter().find(|line| line.starts_with("fetched ")).expect("it joined late");
        assert!(fetched.contains("from 3 in") && fetched.ends_with(", 1 lost"), "{ended:#?}");
    }
}

#[test]
fn a_member_that_leaves_first_gives_what_it_has_promised() {
    const STATE_MIB: u64 = 384;
    const STEPS: usize = 300;
    let directory = tempfile::tempdir().expect("a directory");
    let leaves = directory.path().join("leave");
    let plan = plan(4, "tcp");
    let state = (STATE_MIB << 10).to_string();
    let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "10", &state]);
    let leaver = || {
        let mut command = command(1);
        command.env("E2E_LEAVE", &leaves);
        command
    };
    let mut job = Job::start([command(0), leaver(), command(2), command(3)]);
    job.wait_for_line(0, "step 10 ");
    job.signal(3, Signal::KILL);
    let back = job.add(command(3));
    while resident_mib(job.pid(back)) < STATE_MIB / 8 {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::write(&leaves, "").expect("a file");
    // It leaves meanwhile.
    job.signal(back, Signal::STOP);
    std::thread::sleep(Duration::from_secs(1));
    job.signal(back, Signal::CONT);
    let ended = job.wait();
    assert!(ended[1].verdict().ends_with("steps") && ended[1].verdict().starts_with("ok "), "{ended:#?}");
    let all = steps::assert_same(&ended, &[0, 2, back], STEPS);
    assert_eq!(all[&(STEPS - 1)].0, "0,2,3", "{ended:#?}");
    let fetched = ended[back].lines.iter().find(|line| line.starts_with("fetched ")).expect("it joined late");
    assert!(fetched.contains("from 3 in") && fetched.ends_with(", 0 lost"), "{ended:#?}");
}

#[test]
fn a_newcomer_goes_on_without_a_member_that_is_lost_while_it_follows() {
    for moment in 14..20 {
        let plan = plan(4, "tcp");
        let mut job = start(&plan);
        job.wait_for_line(0, "step 10 ");
        job.signal(3, Signal::KILL);
        let back = job.add(command(&plan, 3));
        job.wait_for_line(0, &format!("step {moment} "));
        job.signal(1, Signal::KILL);
        let ended = job.wait();
        let all = assert_same(&ended, &[0, 2, back]);
        assert_eq!(all[&(STEPS - 1)].0, "0,2,3", "{ended:#?}");
    }
}

/// Found by a hostile tester: the members waited for each of the dead, one after the other, and longer than their deadline.
#[test]
fn newcomers_that_die_when_they_are_ready_end_no_job() {
    const STEPS: usize = 200;
    let plan = plan(3, "auto").with("GRADWIRE_DEADLINE_MS", 5000);
    let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "20", "3000"]);
    let mut job = Job::start((0..3).map(command));
    job.wait_for_line(0, "step 10 ");
    let newcomers = [job.add(command(3)), job.add(command(4))];
    newcomers.iter().for_each(|newcomer| drop(job.wait_for_line(*newcomer, "applied ")));
    newcomers.iter().chain([&2]).for_each(|rank| job.signal(*rank, Signal::KILL));
    let ended = job.wait();
    let all = steps::assert_same(&ended, &[0, 1], STEPS);
    assert_eq!(all[&(STEPS - 1)].0, "0,1", "{ended:#?}");
}

/// Found by a hostile tester: the other one took it for unreachable, and ended, before the members gave it up.
#[test]
fn a_newcomer_that_dies_when_it_is_ready_takes_no_other_with_it() {
    const STEPS: usize = 500;
    let plan = plan(2, "auto");
    let command = |rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "20", "3000"]);
    let mut job = Job::start((0..2).map(command));
    job.wait_for_line(0, "step 10 ");
    let [dies, stays] = [job.add(command(2)), job.add(command(3))];
    job.wait_for_line(dies, "applied ");
    job.signal(dies, Signal::KILL);
    let ended = job.wait();
    let all = steps::assert_same(&ended, &[0, 1, stays], STEPS);
    assert_eq!(all[&(STEPS - 1)].0, "0,1,3", "{ended:#?}");
}

/// How much of a process's memory is there.
fn resident_mib(pid: u32) -> u64 {
    status_of(pid, "VmRSS") as u64 / 1024
}
