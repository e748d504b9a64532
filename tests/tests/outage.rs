//! The broker is killed together with a rank. Steps wait until it is back, since it decides who goes on; by the deadline
//! they end in any case.

use std::time::Duration;

use gradwire_tests::broker::DurableBroker;
use gradwire_tests::steps::{assert_recorded, assert_same};
use gradwire_tests::{Job, Plan, random};
use rustix::process::Signal;

const STEPS: usize = 30;
const RANKS: u32 = 4;

fn plan(broker: &DurableBroker, transport: &str) -> Plan {
    Plan::over(broker.url(), RANKS, transport)
        .with("GRADWIRE_RECOVERY", "redo")
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0)
}

fn command(plan: &Plan, rank: u32, steps: usize) -> std::process::Command {
    plan.command_of("e2e-elastic", rank, &[&steps.to_string(), "20"])
}

fn start(plan: &Plan, steps: usize) -> Job {
    Job::start((0..RANKS).map(|rank| command(plan, rank, steps)))
}

fn millis(most: u16) -> Duration {
    Duration::from_millis(u64::from(u16::from_le_bytes(random()) % most))
}

#[test]
fn a_rank_and_the_broker_that_are_killed_together_cost_the_ranks_contributions_only() {
    for (round, transport) in ["tcp", "shm", "tcp", "shm"].into_iter().enumerate() {
        let mut broker = DurableBroker::start();
        let plan = plan(&broker, transport).with("GRADWIRE_DEADLINE_MS", 60_000);
        let mut job = start(&plan, STEPS);
        job.wait_for_line(0, "step 5 ");
        std::thread::sleep(millis(60));
        let victim = 1 + round % 3;
        // Either may be the first.
        if round < 2 {
            broker.kill();
            job.signal(victim, Signal::KILL);
        } else {
            job.signal(victim, Signal::KILL);
            std::thread::sleep(millis(8));
            broker.kill();
        }
        std::thread::sleep(millis(3000));
        broker.again();
        let ended = job.wait();
        let others: Vec<u32> = (0..RANKS).filter(|rank| *rank as usize != victim).collect();
        let through: Vec<usize> = others.iter().map(|rank| *rank as usize).collect();
        let all = assert_same(&ended, &through, STEPS);
        assert_recorded(&plan, &all, &others);
    }
}

#[test]
fn a_broker_that_stays_away_ends_the_step_by_its_deadline_on_every_rank() {
    let mut broker = DurableBroker::start();
    let plan = plan(&broker, "tcp").with("GRADWIRE_DEADLINE_MS", 8000);
    let mut job = start(&plan, STEPS);
    job.wait_for_line(0, "step 5 ");
    broker.kill();
    job.signal(2, Signal::KILL);
    let ended = job.wait();
    for rank in [0, 1, 3] {
        let said = ended[rank].verdict();
        assert!(said.starts_with("fault RankDied rank=2") && said.contains("the broker may be away"), "{ended:#?}");
    }
}
