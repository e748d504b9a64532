//! Little memory and few descriptors while a rank is lost and another joins: whoever lacks them says so, or ends, and the
//! others go on.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use gradwire_tests::steps::assert_same;
use gradwire_tests::{Job, Plan, status_of};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

const STEPS: usize = 60;

fn plan(recovery: &str) -> Plan {
    Plan::new(3, "auto")
        .with("GRADWIRE_RECOVERY", recovery)
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_DEADLINE_MS", 10_000)
        .with("E2E_EXIT", 1)
}

fn command(plan: &Plan, rank: u32) -> Command {
    plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "20", "3000"])
}

/// The same under `ulimit` with this option.
fn limited(plan: &Plan, rank: u32, option: &str) -> Command {
    let command = command(plan, rank);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {option} && exec \"$0\" \"$@\"")]).arg(command.get_program());
    shell.args(command.get_args()).env_clear();
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell
}

/// Sets a limit of a running process.
fn limit(job: &Job, rank: usize, what: Resource, most: u64) {
    let pid = Pid::from_raw(job.pid(rank).cast_signed()).expect("a process");
    prlimit(Some(pid), what, Rlimit { current: Some(most), maximum: Some(most) }).expect("it is ours");
}

#[test]
fn a_newcomer_that_has_too_little_says_of_what_and_disturbs_nobody() {
    let plan = plan("redo");
    let mut job = Job::start((0..3).map(|rank| command(&plan, rank)));
    job.wait_for_line(0, "step 3 ");
    // From too few for a connection to the broker up to too few for links and tensors; and too little for threads.
    let options = ["-n 6", "-n 8", "-n 12", "-n 18", "-v 40000"];
    let newcomers: Vec<usize> =
        (3..).zip(options).map(|(rank, option)| job.add(limited(&plan, rank, option))).collect();
    let ended = job.wait();
    assert_same(&ended, &[0, 1, 2], STEPS);
    for (newcomer, option) in newcomers.into_iter().zip(options) {
        let said = ended[newcomer].verdict();
        // Where an allocation fails that has no other way out, the process ends loudly: which one it is, is by chance.
        if option.starts_with("-v") && ended[newcomer].status.signal() == Some(Signal::ABORT.as_raw()) {
            continue;
        }
        let kinds = ["System", "MemoryUnavailable", "BrokerUnreachable", "RankLeft", "DeadlineExceeded"];
        assert!(kinds.iter().any(|kind| said.starts_with(&format!("fault {kind} "))), "{option}: {said}");
        assert_eq!(ended[newcomer].status.code(), Some(1), "{option}: {said}");
    }
}

#[test]
fn a_member_without_memory_goes_on_without_a_lost_rank() {
    for recovery in ["redo", "abort"] {
        let plan = plan(recovery);
        let mut job = Job::start((0..3).map(|rank| command(&plan, rank)));
        job.wait_for_line(0, "step 3 ");
        limit(&job, 2, Resource::As, (status_of(job.pid(2), "VmSize") as u64 + 300) * 1024);
        job.signal(1, Signal::KILL);
        let ended = job.wait();
        assert_same(&ended, &[0], STEPS);
        // Where an allocation fails that has no other way out, the process ends loudly, and is a lost rank itself.
        let said = ended[2].verdict();
        assert!(said == format!("ok {STEPS} steps") || !ended[2].status.success(), "{ended:#?}");
    }
}

#[test]
fn a_member_without_descriptors_when_members_change_resigns_and_the_others_go_on() {
    for recovery in ["redo", "abort"] {
        let mut plan = plan(recovery);
        plan.world_size = 4;
        let mut job = Job::start((0..4).map(|rank| command(&plan, rank)));
        job.wait_for_line(0, "step 3 ");
        // Fewer than it has: no further one can be opened.
        limit(&job, 2, Resource::Nofile, 3);
        job.signal(1, Signal::KILL);
        let ended = job.wait();
        assert_same(&ended, &[0, 3], STEPS);
        let said = ended[2].verdict();
        // Of memory for what it exchanges, or of room for that of others.
        let kinds = ["MemoryUnavailable", "System"];
        let begins = |kind: &&str| said.starts_with(&format!("fault {kind} rank=2: rank 2 cannot go on in epoch"));
        assert!(kinds.iter().any(begins), "{said}");
        assert!(said.contains("the limit on open files") && !said.contains("reported by"), "{said}");
    }
}
