//! A network between ranks that spoils, holds, cuts and half-closes: what is wrong is never applied, and whoever is not cut
//! off ends every step with the same bits.

use std::time::Duration;

use gradwire_tests::network::{End, Network, Part, Spoil};
use gradwire_tests::steps::{Steps, assert_same};
use gradwire_tests::{Ended, Job, Plan, assert_faults, random};

const STEPS: usize = 20;
const RANKS: u32 = 4;

fn plan() -> Plan {
    Plan::new(RANKS, "tcp")
        .with("GRADWIRE_RECOVERY", "redo")
        .with("GRADWIRE_RANKS_MAX", 8)
        .with("GRADWIRE_DEADLINE_MS", 40_000)
}

fn command(plan: &Plan, network: &Network, rank: u32) -> std::process::Command {
    let mut command = plan.command_of("e2e-elastic", rank, &[&STEPS.to_string(), "10", "1000"]);
    network.connect(&mut command, rank);
    command
}

fn start(plan: &Plan, network: &Network) -> Job {
    Job::start((0..plan.world_size).map(|rank| command(plan, network, rank)))
}

/// Those that are through with all steps.
fn through(ended: &[Ended]) -> Vec<usize> {
    (0..ended.len()).filter(|process| ended[*process].verdict().starts_with("ok ")).collect()
}

/// Asserts that all but one are through, and that this one, which is among `suspects`, knows that it was left behind.
fn assert_one_lost(ended: &[Ended], suspects: &[u32]) -> Steps {
    let through = through(ended);
    assert_eq!(through.len(), ended.len() - 1, "{ended:#?}");
    let lost = (0..ended.len()).find(|process| !through.contains(process)).expect("one is not through");
    assert!(suspects.contains(&(lost as u32)), "rank {lost} is lost, but the trouble is between {suspects:?}");
    assert!(ended[lost].verdict().starts_with(&format!("fault Removed rank={lost}")), "{ended:#?}");
    assert_same(ended, &through, STEPS)
}

fn below(most: u64) -> u64 {
    u64::from_le_bytes(random()) % most
}

#[test]
fn payloads_that_the_network_spoils_are_sent_again() {
    let (plan, network) = (plan(), Network::new(RANKS));
    let mut job = start(&plan, &network);
    job.wait_for_line(0, "step 2 ");
    network.spoil(Some(Spoil { part: Part::Payload, one_in: 300_000, most: 1000, rank: None }));
    let ended = job.wait();
    let all = assert_same(&ended, &[0, 1, 2, 3], STEPS);
    assert!(network.spoilt() > 20, "only {} bytes were spoilt", network.spoilt());
    assert!(all.values().all(|(by, _)| by == "0,1,2,3"), "{all:?}");
}

/// Found by this test: one spoilt byte in a frame's header, or in a message, failed the whole job.
#[test]
fn a_header_or_message_that_the_network_spoils_costs_one_rank() {
    for part in [Part::Header, Part::Inline] {
        let (plan, network) = (plan(), Network::new(RANKS));
        let mut job = start(&plan, &network);
        job.wait_for_line(0, "step 3 ");
        let rank = Some(below(RANKS.into()) as u32);
        network.spoil(Some(Spoil { part, one_in: 3000, most: 1, rank }));
        let ended = job.wait();
        assert_eq!(network.spoilt(), 1);
        assert_one_lost(&ended, &[0, 1, 2, 3]);
    }
}

#[test]
fn a_link_that_spoils_everything_costs_one_rank() {
    let (plan, network) = (plan(), Network::new(RANKS));
    let mut job = start(&plan, &network);
    job.wait_for_line(0, "step 3 ");
    network.spoil(Some(Spoil { part: Part::Payload, one_in: 20, most: u64::MAX, rank: Some(2) }));
    let ended = job.wait();
    // All links of rank 2 are bad: others may be suspected by it before it is.
    let through = through(&ended);
    assert!(!through.is_empty(), "{ended:#?}");
    assert_same(&ended, &through, STEPS);
    for process in (0..ended.len()).filter(|process| !through.contains(process)) {
        assert!(ended[process].verdict().starts_with("fault Removed"), "{ended:#?}");
    }
}

#[test]
fn where_lost_ranks_fail_the_job_a_spoilt_message_is_named_on_every_rank() {
    let network = Network::new(3);
    let plan = Plan::new(3, "tcp").with("GRADWIRE_DEADLINE_MS", 20_000);
    let ranks = (0..3).map(|rank| {
        let mut command = plan.command(rank, &["stay"]);
        network.connect(&mut command, rank);
        command
    });
    let mut job = Job::start(ranks);
    job.wait_for_line(0, "step");
    network.spoil(Some(Spoil { part: Part::Inline, one_in: 1000, most: 1, rank: None }));
    assert_faults(&job.wait(), &[0, 1, 2], "ProtocolViolation", &["rank"]);
}

#[test]
fn a_network_that_stands_still_for_a_moment_costs_nothing() {
    let (plan, network) = (plan(), Network::new(RANKS));
    let mut job = start(&plan, &network);
    for step in [3, 6, 9] {
        job.wait_for_line(0, &format!("step {step} "));
        network.hold(below(RANKS.into()) as u32);
        std::thread::sleep(Duration::from_millis(300));
        network.release();
    }
    let all = assert_same(&job.wait(), &[0, 1, 2, 3], STEPS);
    assert!(all.values().all(|(by, _)| by == "0,1,2,3"), "{all:?}");
}

#[test]
fn a_rank_that_the_network_holds_for_too_long_is_lost_or_the_others_are() {
    let (plan, network) = (plan(), Network::new(RANKS));
    let mut job = start(&plan, &network);
    job.wait_for_line(0, "step 3 ");
    network.hold(3);
    // Whoever is quicker to say that it has not heard of the other goes on: the others of 3, or 3 without some of them.
    std::thread::sleep(Duration::from_secs(5));
    network.release();
    let ended = job.wait();
    let through = through(&ended);
    assert!(!through.is_empty(), "{ended:#?}");
    assert_same(&ended, &through, STEPS);
    for process in (0..ended.len()).filter(|process| !through.contains(process)) {
        assert!(ended[process].verdict().starts_with("fault Removed"), "{ended:#?}");
    }
}

#[test]
fn a_link_that_ends_anywhere_in_a_frame_costs_one_of_its_two_ranks() {
    for end in [End::Cut, End::HalfClosed, End::Cut, End::HalfClosed] {
        let (plan, network) = (plan(), Network::new(RANKS));
        let mut job = start(&plan, &network);
        job.wait_for_line(0, "step 3 ");
        let from = below(RANKS.into()) as u32;
        let to = (from + 1 + below(u64::from(RANKS) - 1) as u32) % RANKS;
        assert!(network.end(from, to, below(600_000), end), "no link from {from} to {to}");
        assert_one_lost(&job.wait(), &[from, to]);
    }
}

/// A newcomer gets its state through a network that spoils it; whatever becomes of it, the others are not disturbed.
#[test]
fn state_that_the_network_spoils_is_never_taken() {
    let (plan, network) = (plan(), Network::new(RANKS + 1));
    let mut job = start(&plan, &network);
    job.wait_for_line(0, "step 3 ");
    network.spoil(Some(Spoil { part: Part::State, one_in: 500_000, most: 3, rank: None }));
    let newcomer = job.add(command(&plan, &network, RANKS));
    let ended = job.wait();
    assert_same(&ended, &[0, 1, 2, 3], STEPS);
    let said = ended[newcomer].verdict();
    assert!(said.starts_with("ok ") || said.starts_with("fault "), "{said}");
}

#[test]
fn a_hello_that_the_network_spoils_is_a_link_or_a_fault_on_every_rank() {
    let (plan, network) = (plan().with("GRADWIRE_DEADLINE_MS", 10_000), Network::new(RANKS));
    network.spoil(Some(Spoil { part: Part::Hello, one_in: 200, most: 2, rank: None }));
    let ended = start(&plan, &network).wait();
    let through = through(&ended);
    if !through.is_empty() {
        assert_same(&ended, &through, STEPS);
    }
    for process in (0..ended.len()).filter(|process| !through.contains(process)) {
        assert!(ended[process].verdict().starts_with("fault "), "{ended:#?}");
    }
}
