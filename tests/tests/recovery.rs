//! Ranks that are lost while others train: every step ends, with the same bits on all that are left.

use std::collections::BTreeMap;
use std::time::Duration;

use gradwire_tests::{Ended, Plan, random};
use rustix::process::Signal;

const STEPS: usize = 60;

fn plan(ranks: u32, transport: &str, recovery: &str) -> Plan {
    Plan::new(ranks, transport).with("GRADWIRE_RECOVERY", recovery).with("GRADWIRE_DEADLINE_MS", 20_000)
}

/// Asserts that these ranks are through, and that no rank has another result of a step than they.
fn assert_recovered(ended: &[Ended], left: &[usize]) -> BTreeMap<usize, (String, String)> {
    let all = ended[left[0]].steps();
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), (0..STEPS).collect::<Vec<_>>(), "{ended:#?}");
    for rank in left {
        assert_eq!(ended[*rank].verdict(), format!("ok {STEPS} steps"), "rank {rank}: {ended:#?}");
    }
    for (rank, one) in ended.iter().enumerate() {
        for (step, made) in one.steps() {
            assert_eq!(all.get(&step), Some(&made), "rank {rank} has another step {step}: {ended:#?}");
        }
    }
    all
}

#[test]
fn ranks_that_are_killed_at_any_moment_cost_their_contributions_only() {
    for transport in ["tcp", "shm"] {
        for recovery in ["redo", "abort"] {
            for victim in [0, 2] {
                let plan = plan(3, transport, recovery);
                let mut job = plan.start(&["recover", &STEPS.to_string()]);
                let begun = 5 + usize::from(random::<1>()[0] % 20);
                job.wait_for_line(0, &format!("step {begun} "));
                std::thread::sleep(Duration::from_micros(u64::from(u16::from_le_bytes(random())) / 8));
                job.signal(victim, Signal::KILL);
                let ended = job.wait();
                let left: Vec<usize> = (0..3).filter(|rank| *rank != victim).collect();
                let all = assert_recovered(&ended, &left);
                assert_eq!(all[&0].0, "0,1,2");
                assert_eq!(all[&(STEPS - 1)].0, if victim == 0 { "1,2" } else { "0,1" });
            }
        }
    }
}

#[test]
fn one_after_the_other_may_be_lost_down_to_the_last() {
    let plan = plan(4, "tcp", "redo");
    let mut job = plan.start(&["recover", &STEPS.to_string()]);
    for (victim, step) in [(1, 8), (3, 20), (0, 32)] {
        job.wait_for_line(2, &format!("step {step} "));
        job.signal(victim, Signal::KILL);
    }
    let all = assert_recovered(&job.wait(), &[2]);
    assert_eq!(all[&(STEPS - 1)].0, "2");
}

#[test]
fn a_rank_that_was_stopped_learns_that_the_others_went_on_without_it() {
    for transport in ["tcp", "shm"] {
        let plan = plan(3, transport, "redo");
        let mut job = plan.start(&["recover", &STEPS.to_string()]);
        job.wait_for_line(0, "step 10 ");
        job.signal(1, Signal::STOP);
        job.wait_for_line(0, "ok ");
        job.wait_for_line(2, "ok ");
        job.signal(1, Signal::CONT);
        let ended = job.wait();
        assert!(ended[1].verdict().starts_with("fault Removed"), "{ended:#?}");
        assert_recovered(&ended, &[0, 2]);
    }
}

#[test]
fn too_few_ranks_do_not_go_on() {
    let plan = plan(3, "tcp", "redo").with("GRADWIRE_RANKS_MIN", 3).with("GRADWIRE_DEADLINE_MS", 4000);
    let mut job = plan.start(&["recover", &STEPS.to_string()]);
    job.wait_for_line(0, "step 5 ");
    job.signal(1, Signal::KILL);
    let ended = job.wait();
    for rank in [0, 2] {
        let said = ended[rank].verdict();
        assert!(said.starts_with("fault RankDied rank=1") && said.contains("rank 1"), "{ended:#?}");
    }
}
