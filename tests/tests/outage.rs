//! The broker is killed together with a rank. Steps wait until it is back, since it decides who goes on; by the deadline
//! they end in any case. A launcher starts the rank again meanwhile.

use std::time::Duration;

use gradwire_tests::broker::DurableBroker;
use gradwire_tests::steps::{assert_recorded, assert_same};
use gradwire_tests::{Ended, Job, Plan, binary, random};
use rustix::process::{Pid, Signal, kill_process};

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

/// The process id of this rank, as it told a launcher.
fn pid(job: &mut Job, rank: usize) -> Pid {
    let beginning = format!("[{rank}] pid ");
    let line = job.wait_for_line(0, &beginning);
    Pid::from_raw(line[beginning.len()..].parse().expect("a number")).expect("a process")
}

/// What each rank of a launcher said, its processes one after the other.
fn of_ranks(launcher: &Ended) -> Vec<Ended> {
    let said = |rank: u32| {
        let prefix = format!("[{rank}] ");
        let lines = launcher.lines.iter().filter_map(|line| Some(line.strip_prefix(&prefix)?.to_owned()));
        Ended { status: launcher.status, lines: lines.collect() }
    };
    (0..RANKS).map(said).collect()
}

#[test]
fn a_rank_that_is_started_again_while_the_broker_is_away_comes_back() {
    const STEPS: usize = 400;
    for (round, away_ms) in [(0_usize, 2000), (1, 5000)] {
        let mut broker = DurableBroker::start();
        let mut launcher = std::process::Command::new(binary("gradwire"));
        launcher.args(["launch", "-n", &RANKS.to_string(), "--min-ranks", "2", "--restarts", "3"]);
        launcher.args(["--broker", broker.url(), "--env", "E2E_EXIT=1", "--"]);
        launcher.arg(binary("e2e-elastic")).args([&STEPS.to_string(), "20"]);
        let mut job = Job::start([launcher]);
        let victim = [1, 0][round];
        let process = pid(&mut job, victim);
        job.wait_for_line(0, "[2] step 5 ");
        // Either may be the first.
        if round == 0 {
            broker.kill();
            kill_process(process, Signal::KILL).expect("it runs");
        } else {
            kill_process(process, Signal::KILL).expect("it runs");
            std::thread::sleep(millis(8));
            broker.kill();
        }
        std::thread::sleep(Duration::from_millis(away_ms));
        broker.again();
        let ended = job.wait();
        assert!(ended[0].status.success(), "{ended:#?}");
        let ranks = of_ranks(&ended[0]);
        let all = assert_same(&ranks, &[0, 1, 2, 3], STEPS);
        assert!(all.values().any(|(by, _)| !by.contains(&victim.to_string())), "{all:?}");
        assert_eq!(all[&(STEPS - 1)].0, "0,1,2,3", "{ended:#?}");
        // Nobody else was taken for lost, and the next process of the rank was not either.
        for (rank, said) in ranks.iter().enumerate() {
            let joined = said.lines.iter().filter(|line| line.starts_with("joined at ")).count();
            assert_eq!(joined, 1 + usize::from(rank == victim), "{ended:#?}");
        }
    }
}

#[test]
fn a_broker_that_cannot_be_reached_is_named_while_it_is_tried() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let directory = tempfile::tempdir().expect("a directory");
    let url = format!("pulsar://{nobody}");
    let plan = Plan::over(&url, 2, "tcp").with("GRADWIRE_DEADLINE_MS", 4000);
    // This one logs.
    let output = plan.command_of("example-elastic", 0, &[directory.path().to_str().expect("a path")]).output();
    let output = output.expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let yet = format!("the broker at {url} cannot be reached yet: Connection refused (os error 111); it is tried for ");
    assert_eq!(said.matches(&yet).count(), 1, "after 2 s, and then after 10 s: {said}");
    assert!(!said.contains("the link to the broker is lost"), "{said}");
    let fault = format!("the broker at {url} cannot be used: Connection refused");
    assert!(!output.status.success() && said.contains(&fault), "{said}");
}
