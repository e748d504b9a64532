//! Who counts as there and who as lost: ranks that compute for long, with settings of their own, and that panic.

use std::time::Duration;

use gradwire_control::{AuditKind, AuditQuery, read_audit};
use gradwire_tests::{Ended, Job, Plan, assert_faults};

const STEPS: usize = 25;

fn plan(transport: &str, recovery: &str) -> Plan {
    Plan::new(3, transport).with("GRADWIRE_RECOVERY", recovery).with("GRADWIRE_DEADLINE_MS", 20_000)
}

fn start(plan: &Plan, deeds: &[&str]) -> Job {
    let arguments: Vec<&str> = ["25", "2"].into_iter().chain(deeds.iter().copied()).collect();
    Job::start((0..3).map(|rank| plan.command_of("e2e-ends", rank, &arguments)))
}

/// Asserts that these ranks are through, and that the others have no part in any step from this one on.
fn assert_through(ended: &[Ended], through: &[usize], by: &str, from: usize) {
    for rank in through {
        assert!(ended[*rank].verdict().starts_with(&format!("ok {STEPS} steps ")), "rank {rank}: {ended:#?}");
        let steps = ended[*rank].steps();
        assert_eq!(steps.len(), STEPS);
        for (step, (contributors, _)) in &steps {
            assert_eq!(contributors, if *step < from { "0,1,2" } else { by }, "step {step}: {ended:#?}");
        }
        assert_eq!(steps, ended[through[0]].steps(), "rank {rank}: {ended:#?}");
    }
}

#[test]
fn a_rank_that_computes_for_several_times_the_silence_limit_is_not_lost() {
    for transport in ["tcp", "shm"] {
        let plan = plan(transport, "redo").with("GRADWIRE_HEARTBEAT_MS", 100).with("GRADWIRE_SILENCE_MS", 1000);
        let ended = start(&plan, &["0:5:compute-4000", "1:9:compute-4000"]).wait();
        assert_through(&ended, &[0, 1, 2], "0,1,2", 0);
    }
}

#[test]
fn ranks_with_other_settings_do_not_lose_each_other() {
    let plan = plan("tcp", "redo").with("GRADWIRE_HEARTBEAT_MS", 100).with("GRADWIRE_SILENCE_MS", 1000);
    let arguments = ["25", "2", "1:5:compute-5000"];
    let ranks = (0..3).map(|rank| {
        let mut command = plan.command_of("e2e-ends", rank, &arguments);
        if rank == 1 {
            command.env("GRADWIRE_HEARTBEAT_MS", "2500").env("GRADWIRE_SILENCE_MS", "9000");
        }
        command
    });
    assert_through(&Job::start(ranks).wait(), &[0, 1, 2], "0,1,2", 0);
}

#[test]
fn settings_that_make_no_sense_are_refused_with_the_remedy() {
    let cases = [(2000, 5000, "at least 3 heartbeats"), (100_000, 400_000, "1 to 60000 ms"), (500, 40_000, "deadline")];
    for (heartbeat, silence, words) in cases {
        let plan = plan("tcp", "redo").with("GRADWIRE_HEARTBEAT_MS", heartbeat).with("GRADWIRE_SILENCE_MS", silence);
        assert_faults(&start(&plan, &[]).wait(), &[0, 1, 2], "InvalidArgument", &["GRADWIRE_", words]);
    }
}

#[test]
fn a_rank_that_panics_costs_its_contributions_only_and_the_others_are_told() {
    for (transport, deed, recovery) in
        [("tcp", "panic", "redo"), ("shm", "panic-thread", "redo"), ("tcp", "panic-thread", "abort")]
    {
        let plan = plan(transport, recovery);
        let ended = start(&plan, &[&format!("1:10:{deed}")]).wait();
        assert_through(&ended, &[0, 2], "0,2", 10);
        let said = if deed == "panic" { "step 9 " } else { "ok without its trainer" };
        assert!(ended[1].verdict().starts_with(said), "{ended:#?}");
        let job = gradwire::env::job(&|name| plan.variables.get(name).cloned()).expect("what the ranks had");
        let query = AuditQuery { kinds: vec![AuditKind::Suspected], ..AuditQuery::default() };
        let told = read_audit(&job, &query, Duration::from_secs(20)).expect("an audit log").records;
        assert!(
            !told.is_empty() && told.iter().all(|entry| entry.record.detail.contains("rank 1 panicked")),
            "{told:?}"
        );
    }
}

#[test]
fn where_nobody_can_go_on_without_a_rank_its_panic_fails_all() {
    for deed in ["panic", "panic-thread"] {
        let ended = start(&plan("tcp", "fail"), &[&format!("1:10:{deed}")]).wait();
        assert_faults(&ended, &[0, 2], "RankDied", &["rank=1"]);
    }
}
