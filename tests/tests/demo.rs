//! The main job, as users run it.

use std::process::{Command, Output};

use gradwire_tests::binary;
use serde_json::Value;

/// Enough to learn what a demo has to; the default is six times as many.
const STEPS: &str = "100";

fn run(arguments: &[&str]) -> Output {
    Command::new(binary("gradwire")).arg("demo").args(arguments).output().expect("runs")
}

/// The report, and what was said beside it.
fn demo(arguments: &[&str]) -> (Value, String) {
    let output = run(&[arguments, &["--json", "-"]].concat());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    let report = serde_json::from_str(&out);
    let report = report.unwrap_or_else(|error| panic!("{arguments:?} printed more than JSON ({error}): {out}"));
    (report, err.into_owned())
}

#[test]
fn every_number_of_ranks_transport_and_wire_format_trains_to_the_reference_bits() {
    for ranks in ["1", "2", "3", "4", "7"] {
        for wire in ["fp32", "fp16", "bf16"] {
            let mut hashes = Vec::new();
            for transport in ["shm", "tcp"] {
                let (report, _) = demo(&["--ranks", ranks, "--transport", transport, "--wire", wire, "--steps", STEPS]);
                let case = format!("{ranks} ranks, {transport}, {wire}: {report}");
                assert_eq!(report["weights_sha256"], report["reference_sha256"], "{case}");
                assert!(report["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.90), "{case}");
                assert_eq!((&report["epoch"], &report["events"]), (&1.into(), &Value::Array(Vec::new())), "{case}");
                hashes.push(report["weights_sha256"].clone());
            }
            assert_eq!(hashes[0], hashes[1], "the transport must not show in the bits");
        }
    }
}

#[test]
fn what_a_user_gets_without_a_word_has_learned() {
    let (report, _) = demo(&[]);
    assert_eq!(report["weights_sha256"], report["reference_sha256"], "{report}");
    assert!(report["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.95), "{report}");
}

/// Runs a demo in which ranks are lost, and checks what holds for all of them. Which ranks are lost, and how many steps
/// that costs, is for the caller to say.
fn disturbed(arguments: &[&str], lost: &[u64], steps_with_a_loss: u64) -> (Value, String) {
    let (report, said) = demo(&[&["--steps", STEPS], arguments].concat());
    let case = format!("{arguments:?}: {report}\n{said}");
    assert_eq!(report["weights_sha256"], report["reference_sha256"], "{case}");
    let mut found = ranks_of(&report, "lost");
    found.sort_unstable();
    assert_eq!(found, lost, "{case}");
    let number = |field: &str| report[field].as_u64().unwrap_or_else(|| panic!("no {field}: {case}"));
    assert_eq!(number("contributors_min"), number("ranks") - lost.len() as u64, "{case}");
    assert_eq!(number("steps_redone") + number("steps_kept"), steps_with_a_loss, "{case}");
    for kind in ["redone", "kept"] {
        assert_eq!(events(&report, kind).len() as u64, number(&format!("steps_{kind}")), "{case}");
    }
    for event in report["events"].as_array().expect("events") {
        assert!(event["step"].as_u64().is_some_and(|step| step > 0), "{case}");
        assert!(event["ms"].as_f64().is_some_and(|ms| ms >= 0.0), "{case}");
    }
    (report, said)
}

fn events<'a>(report: &'a Value, kind: &str) -> Vec<&'a Value> {
    report["events"].as_array().expect("events").iter().filter(|event| event["kind"] == kind).collect()
}

fn ranks_of(report: &Value, kind: &str) -> Vec<u64> {
    events(report, kind).iter().map(|event| event["rank"].as_u64().expect("a rank")).collect()
}

#[test]
fn ranks_that_are_killed_cost_their_contributions_only() {
    for (transport, wire) in [("shm", "fp32"), ("shm", "bf16"), ("tcp", "fp16"), ("tcp", "fp32")] {
        // The first rank too, one after the other.
        let arguments = ["--transport", transport, "--wire", wire, "--kill", "2@1", "--kill", "0@40"];
        let (report, said) = disturbed(&arguments, &[0, 2], 2);
        assert_eq!(ranks_of(&report, "killed"), [2, 0], "{report}");
        // Half of their last step was never exchanged.
        assert_eq!((&report["steps_redone"], &report["epoch"]), (&2.into(), &3.into()), "{report}");
        assert!(report["recovery_ms_max"].as_f64().is_some_and(|ms| ms > 0.0), "{report}");
        assert!(said.contains("step 40: rank 0 is killed"), "{said}");
        assert!(said.contains("step 40: done again by ranks 1, 3"), "{said}");
    }
}

#[test]
fn two_ranks_may_be_killed_in_one_step_and_one_may_be_left() {
    let (report, _) = disturbed(&["--ranks", "3", "--kill", "0@100", "--kill", "1@100"], &[0, 1], 1);
    assert_eq!((&report["steps_redone"], &report["contributors_min"]), (&1.into(), &1.into()), "{report}");
}

#[test]
fn a_rank_that_stalls_for_long_learns_that_it_was_removed() {
    // With one step left the others are through before it is awake.
    for (transport, stall, late) in [("shm", "1@60:5s", false), ("tcp", "1@60:5s", false), ("shm", "1@99:5s", true)] {
        let arguments = ["--transport", transport, "--kill", "2@20", "--stall", stall];
        let (report, said) = disturbed(&arguments, &[1, 2], 2);
        for kind in ["stalled", "woke", "removed"] {
            assert_eq!(ranks_of(&report, kind), [1], "{kind}: {report}");
        }
        assert!(said.contains("rank 1 learns that the others went on without it"), "{said}");
        let words = "rank 1 comes back too late, the others are through: it ends";
        assert_eq!((said.contains(words), joined(&report).is_empty()), (late, late), "{report}\n{said}");
    }
}

/// Who joined, ascending. Checks what holds for all of them.
fn joined(report: &Value) -> Vec<u64> {
    for event in events(report, "joined") {
        assert!(event["took_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{report}");
        assert_eq!(event["bytes"], 2 * 4 * (64 * 128 + 128 + 128 * 10 + 10) + 4, "weights, momentum, step: {report}");
        let (rank, step) = (&event["rank"], event["step"].as_u64().expect("a step"));
        let runs = report["contributors"].as_array().expect("runs");
        let takes_part = |run: &Value| run["ranks"].as_array().expect("ranks").contains(rank);
        let run =
            runs.iter().find(|run| run["from"] == step).unwrap_or_else(|| panic!("nobody came in {step}: {report}"));
        assert!(takes_part(run), "{report}");
    }
    let mut ranks = ranks_of(report, "joined");
    ranks.sort_unstable();
    ranks
}

/// Who contributed to the last step.
fn last_contributors(report: &Value) -> Vec<u64> {
    let last = report["contributors"].as_array().and_then(|runs| runs.last()).expect("runs");
    last["ranks"].as_array().expect("ranks").iter().map(|rank| rank.as_u64().expect("a rank")).collect()
}

#[test]
fn a_process_takes_the_place_of_a_rank_that_was_killed() {
    for (transport, wire) in [("shm", "fp16"), ("tcp", "fp32")] {
        // The first rank too: who joins speaks for all then.
        let arguments = ["--transport", transport, "--wire", wire, "--kill", "0@20", "--join", "30"];
        let (report, said) = disturbed(&arguments, &[0], 1);
        assert_eq!((joined(&report), last_contributors(&report)), (vec![0], vec![0, 1, 2, 3]), "{report}");
        assert!(said.contains("step 30: one more process is started"), "{said}");
        assert!(said.contains("rank 0 takes part: 75.1 KiB of state from 3 ranks"), "{said}");
    }
}

#[test]
fn a_job_grows_by_processes_that_join() {
    for transport in ["shm", "tcp"] {
        let arguments = ["--ranks", "2", "--transport", transport, "--join", "20", "--join", "20"];
        let (report, _) = disturbed(&arguments, &[], 0);
        assert_eq!((joined(&report), last_contributors(&report)), (vec![2, 3], vec![0, 1, 2, 3]), "{report}");
        assert!(events(&report, "joined").iter().all(|event| event["step"].as_u64() > Some(20)), "{report}");
    }
}

#[test]
fn ranks_are_killed_stall_and_join_in_one_run() {
    for transport in ["shm", "tcp"] {
        let arguments = ["--transport", transport, "--kill", "2@20", "--stall", "1@40:5s", "--join", "50"];
        let (report, said) = disturbed(&arguments, &[1, 2], 2);
        assert_eq!((joined(&report), last_contributors(&report)), (vec![1, 2], vec![0, 1, 2, 3]), "{report}\n{said}");
        assert!(said.contains("rank 1 learns that the others went on without it"), "{report}\n{said}");
    }
}

#[test]
fn a_rank_that_was_stopped_for_too_long_comes_back_by_itself() {
    // The second is longer than the launcher leaves ranks alone that hang.
    for time in ["3200ms", "13s"] {
        let (report, said) = disturbed(&["--ranks", "3", "--stall", &format!("1@20:{time}")], &[1], 1);
        assert_eq!((ranks_of(&report, "removed"), joined(&report)), (vec![1], vec![1]), "{report}\n{said}");
        assert_eq!(last_contributors(&report), [0, 1, 2], "{report}");
        assert!(said.contains("rank 1 takes part again"), "{said}");
    }
}

#[test]
fn a_short_stall_only_delays_the_step() {
    for transport in ["shm", "tcp"] {
        let (report, said) = disturbed(&["--transport", transport, "--stall", "0@50:200ms"], &[], 0);
        assert!(said.contains("rank 0 is stopped for 200ms, too short for the others to give it up"), "{said}");
        assert_eq!((ranks_of(&report, "stalled"), ranks_of(&report, "woke")), (vec![0], vec![0]), "{report}");
        assert!(report["recovery_ms_max"].is_null(), "{report}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_a_clear_word() {
    for (arguments, words) in [
        (&["--ranks", "0"][..], "ranks"),
        (&["--steps", "0"], "steps"),
        (&["--wire", "fp8"], "fp16"),
        (&["--transport", "x"], "shm"),
        (&["--kill", "2"], "RANK@STEP"),
        (&["--kill", "4@40"], "--kill 4@40: there is no rank 4: expected one from 0 to 3"),
        (&["--kill", "1@601"], "--kill 1@601: there is no step 601: expected one from 1 to 600"),
        (&["--kill", "1@5", "--kill", "1@6"], "--kill 1@6: rank 1 is killed twice"),
        (&["--kill", "1@5", "--stall", "1@3:5s"], "--stall 1@3:5s: rank 1 is killed too"),
        (&["--stall", "1@3:soon"], "300ms"),
        (&["--ranks", "1", "--kill", "0@5"], "all 1 ranks could be lost"),
        (&["--mode", "federated", "--kill", "1@5"], "--mode allreduce"),
        (&["--join", "593"], "8 further steps, and there are 600: expected a step from 1 to 592"),
        (&["--join", "0"], "expected a step from 1 to 592"),
        (&["--steps", "8", "--join", "1"], "expected more than 8 of them (--steps)"),
        (&["--join", "1@5"], "invalid digit"),
        (&["--mode", "federated", "--join", "5"], "--mode allreduce"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
    }
}
