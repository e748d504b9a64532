//! Trainers that use all operations, in any order and from many threads, while ranks are killed, leave and join.

use std::time::Duration;

use gradwire_tests::dice::Dice;
use gradwire_tests::{Job, Plan, steps};
use rustix::process::Signal;

const STEPS: usize = 160;

fn plan(transport: &str, recovery: &str) -> Plan {
    Plan::new(4, transport)
        .with("GRADWIRE_RECOVERY", recovery)
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_DEADLINE_MS", 30_000)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0)
}

#[test]
fn whatever_they_do_when_some_are_killed_and_others_join_all_have_the_same_bits() {
    let mut dice = Dice::thrown();
    for (transport, recovery, pause_us) in [("auto", "redo", "300"), ("tcp", "abort", "300"), ("tcp", "redo", "0")] {
        let plan = plan(transport, recovery);
        let command = |rank: u32| plan.command_of("e2e-mixed", rank, &[&STEPS.to_string(), pause_us]);
        let mut job = Job::start((0..4).map(command));
        job.wait_for_line(0, &format!("step {} ", 3 + dice.below(20)));
        let (mut process_of, mut killed) = ([0, 1, 2, 3], Vec::new());
        for _ in 0..2 {
            std::thread::sleep(Duration::from_micros(dice.below(30_000)));
            // Rank 0 is the root of the broadcasts.
            let rank = 1 + dice.below(3) as usize;
            let process = process_of[rank];
            if !killed.contains(&process) {
                job.signal(process, Signal::KILL);
                killed.push(process);
                process_of[rank] = job.add(command(rank as u32));
            }
        }
        job.add(command(5));
        let ended = job.wait();
        // Before those that came later are ready the job may be through.
        let through: Vec<usize> = (0..4).filter(|process| !killed.contains(process)).collect();
        steps::assert_same(&ended, &through, STEPS);
    }
}

#[test]
fn ranks_that_leave_in_any_step_while_others_join_take_nothing_with_them() {
    let mut dice = Dice::thrown();
    for (transport, recovery) in [("auto", "redo"), ("tcp", "abort")] {
        let (plan, leaves_at) = (plan(transport, recovery), 12 + dice.below(40));
        let command = |rank: u32| {
            let mut command = plan.command_of("e2e-mixed", rank, &[&STEPS.to_string(), "2000"]);
            if rank == 1 || rank == 2 {
                command.env("E2E_LEAVE_AT", leaves_at.to_string());
            }
            command
        };
        let mut job = Job::start((0..4).map(command));
        job.wait_for_line(0, "step 10 ");
        job.add(command(5));
        job.add(command(6));
        let ended = job.wait();
        steps::assert_same(&ended, &[0, 3], STEPS);
        let made = [1, 2].map(|rank| ended[rank].steps().keys().max().copied());
        assert!(made[0] == made[1] && made[0] >= Some(leaves_at as usize), "with one step: {ended:#?}");
        assert!([1, 2].iter().all(|rank| ended[*rank].verdict().starts_with("ok ")), "{ended:#?}");
    }
}
