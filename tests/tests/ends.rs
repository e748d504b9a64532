//! Ends that are agreed on: by SIGTERM to the launcher or to a rank, or because a rank asks for it.

use std::process::Command;
use std::time::{Duration, Instant};

use gradwire::durable::SavedState;
use gradwire_tests::{Ended, Job, Plan, binary};
use rustix::process::Signal;

const STEPS: u64 = 10_000;

fn plan(ranks: u32, transport: &str, recovery: &str) -> Plan {
    Plan::new(ranks, transport).with("GRADWIRE_RECOVERY", recovery).with("GRADWIRE_DEADLINE_MS", 20_000)
}

fn start(plan: &Plan, arguments: &[&str]) -> Job {
    Job::start((0..plan.world_size).map(|rank| plan.command_of("e2e-ends", rank, arguments)))
}

/// `gradwire launch` with three ranks, which pass these deeds on.
fn launch(arguments: &[&str], deeds: &[&str], variables: &[(&str, &str)]) -> Job {
    let mut command = Command::new(binary("gradwire"));
    command.args(["launch", "-n", "3"]).args(arguments).arg("--").arg(binary("e2e-ends"));
    command.args([&STEPS.to_string(), "2"]).args(deeds).envs(variables.iter().copied());
    Job::start([command])
}

/// What the ranks of a launcher said.
fn ranks(launcher: &Ended) -> Vec<Ended> {
    let of = |rank: usize| {
        let prefix = format!("[{rank}] ");
        launcher.lines.iter().filter_map(|line| line.strip_prefix(&prefix).map(str::to_owned)).collect()
    };
    (0..3).map(|rank| Ended { status: launcher.status, lines: of(rank) }).collect()
}

/// The rank's last step, from the verdict that it ended like this.
fn last_step(ended: &Ended, how: &str) -> u64 {
    let rest = ended.verdict().strip_prefix(&format!("ok {how} after ")).unwrap_or_else(|| panic!("{ended:#?}"));
    rest.split(' ').next().and_then(|steps| steps.parse().ok()).expect("a number of steps")
}

fn assert_all_ended(ended: &[Ended]) -> u64 {
    for one in ended {
        assert_eq!(one.verdict(), ended[0].verdict(), "{ended:#?}");
    }
    last_step(&ended[0], "ended")
}

#[test]
fn sigterm_to_the_launcher_ends_all_ranks_with_the_same_step_and_a_save() {
    for arguments in [&["--min-ranks", "2"][..], &["--transport", "tcp"]] {
        let directory = tempfile::tempdir().expect("a directory");
        let saves = directory.path().join("saves");
        let recovery = if arguments[0] == "--min-ranks" { "redo" } else { "fail" };
        let variables = [("E2E_SAVES", saves.to_str().expect("a path")), ("GRADWIRE_RECOVERY", recovery)];
        let mut job = launch(arguments, &[], &variables);
        job.wait_for_line(0, "[1] step 20 ");
        let told = Instant::now();
        job.signal(0, Signal::TERM);
        let ended = job.wait().remove(0);
        assert!(ended.status.success() && told.elapsed() < Duration::from_secs(15), "{ended:#?}");
        let steps = assert_all_ended(&ranks(&ended));
        let saved = SavedState::latest(&saves).expect("a directory").expect("a save");
        assert_eq!(saved.step().0, steps);
    }
}

#[test]
fn a_rank_that_goes_on_all_the_same_is_killed_when_its_time_is_over() {
    let mut job = launch(&["--min-ranks", "2", "--grace", "3"], &["1:0:deaf"], &[]);
    job.wait_for_line(0, "[1] step 20 ");
    let told = Instant::now();
    job.signal(0, Signal::TERM);
    let ended = job.wait().remove(0);
    let took = told.elapsed();
    assert!((Duration::from_secs(3)..Duration::from_secs(10)).contains(&took), "{took:?}");
    assert_eq!(ended.status.code(), Some(143), "{ended:#?}");
    let ranks = ranks(&ended);
    assert_eq!(last_step(&ranks[0], "ended"), last_step(&ranks[2], "ended"));
    assert!(ranks[1].verdict().starts_with("step "), "{ended:#?}");
}

/// Asserts that these ranks left with one step, with which their contributions end, and that the others went on to another.
fn assert_left(ended: &[Ended], leavers: &[usize]) {
    let left = last_step(&ended[leavers[0]], "left");
    let (gone, stayed): (Vec<usize>, Vec<usize>) = (0..ended.len()).partition(|rank| leavers.contains(rank));
    for rank in gone {
        assert!(ended[rank].status.success() && last_step(&ended[rank], "left") == left, "{ended:#?}");
    }
    for rank in &stayed {
        assert_eq!(ended[*rank].verdict(), ended[stayed[0]].verdict(), "{ended:#?}");
        assert!(last_step(&ended[*rank], "ended") > left, "{ended:#?}");
        for (step, (by, _)) in ended[*rank].steps() {
            let with = leavers.iter().all(|rank| by.split(',').any(|name| name == rank.to_string()));
            assert_eq!(with, (step as u64) < left, "step {step} by {by}, and ranks {leavers:?} left after {left}");
        }
    }
}

/// Until rank 1 has made five steps without those that left.
const OUTLAST: [&str; 3] = ["10000", "5", "1:0:outlast-5"];

#[test]
fn a_rank_that_is_given_notice_leaves_with_a_step_and_the_others_go_on() {
    for (transport, leaver) in [("tcp", 0), ("shm", 2)] {
        let plan = plan(3, transport, "redo");
        let mut job = start(&plan, &OUTLAST);
        job.wait_for_line(0, "step 10 ");
        job.signal(leaver, Signal::TERM);
        assert_left(&job.wait(), &[leaver]);
    }
}

#[test]
fn ranks_that_are_given_notice_one_soon_after_the_other_leave_together() {
    let plan = plan(4, "tcp", "abort");
    let mut job = start(&plan, &OUTLAST);
    job.wait_for_line(0, "step 10 ");
    job.signal(0, Signal::TERM);
    std::thread::sleep(Duration::from_millis(100));
    job.signal(3, Signal::TERM);
    assert_left(&job.wait(), &[0, 3]);
}

#[test]
fn a_rank_may_ask_to_leave_or_that_all_end() {
    let ended = start(&plan(3, "auto", "redo"), &["10000", "0", "2:10:leave", "1:0:outlast-5"]).wait();
    assert_eq!(last_step(&ended[2], "left"), 11);
    assert_left(&ended, &[2]);
    for recovery in ["redo", "fail"] {
        let ended = start(&plan(3, "auto", recovery), &["60", "0", "1:10:stop"]).wait();
        assert_eq!(assert_all_ended(&ended), 11);
    }
}

#[test]
fn where_nobody_can_go_on_without_a_rank_notice_to_one_ends_all() {
    let plan = plan(3, "shm", "fail");
    let mut job = start(&plan, &[&STEPS.to_string(), "2"]);
    job.wait_for_line(0, "step 20 ");
    job.signal(2, Signal::TERM);
    let ended = job.wait();
    assert!(ended.iter().all(|one| one.status.success()), "{ended:#?}");
    assert_all_ended(&ended);
}

#[test]
fn a_program_that_did_not_ask_for_it_is_ended_by_sigterm() {
    let plan = plan(2, "auto", "redo").with("E2E_UNASKED", 1);
    let mut job = start(&plan, &["25", "5"]);
    job.wait_for_line(0, "step 5 ");
    job.signal(1, Signal::TERM);
    let ended = job.wait();
    assert!(!ended[1].status.success() && ended[1].status.code().is_none(), "{ended:#?}");
    assert!(ended[0].verdict().starts_with("ok 25 steps"), "{ended:#?}");
}
