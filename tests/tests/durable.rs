//! State on disk: jobs that are killed as a whole, and go on from their latest save with the ranks that there are.

use std::fs;
use std::path::Path;
use std::time::Duration;

use gradwire::durable::SavedState;
use gradwire_tests::model::Model;
use gradwire_tests::{Ended, Job, Plan, assert_faults, assert_same_verdict, random};
use rustix::process::Signal;
use tempfile::TempDir;

const EVERY: u64 = 2;

fn plan(ranks: u32, transport: &str) -> Plan {
    Plan::new(ranks, transport).with("GRADWIRE_DEADLINE_MS", 60_000)
}

fn arguments(directory: &Path, steps: u64) -> [String; 4] {
    let directory = directory.to_str().expect("a path of characters").to_owned();
    ["durable".into(), directory, steps.to_string(), EVERY.to_string()]
}

fn start(plan: &Plan, directory: &Path, steps: u64) -> Job {
    let arguments = arguments(directory, steps);
    plan.start(&arguments.each_ref().map(String::as_str))
}

/// Up to `most`, evenly.
fn below(most: u64) -> u64 {
    u64::from_le_bytes(random()) % most
}

/// What one process comes to, after each number of steps.
fn references(steps: u64) -> Vec<String> {
    let mut model = Model::default();
    let mut digests = vec![model.digest()];
    for step in 0..steps {
        model.step(step);
        digests.push(model.digest());
    }
    digests
}

/// The steps in the latest save, which is whole and what one process would have.
fn assert_whole(directory: &Path, references: &[String]) -> u64 {
    let Some(saved) = SavedState::latest(directory).expect("whatever is visible is whole") else { return 0 };
    let mut model = Model::default();
    let restored = saved.restore_into(&mut model).expect("whatever is visible is whole");
    assert_eq!(model.digest(), references[restored.step.0 as usize], "after {}", restored.step);
    restored.step.0
}

#[test]
fn a_job_that_is_killed_at_any_moment_goes_on_from_its_latest_save_with_any_number_of_ranks() {
    const STEPS: u64 = 60;
    let references = references(STEPS);
    let directory = TempDir::new().expect("a directory");
    let saves = directory.path().join("saves");
    let mut reached = 0;
    for (round, ranks) in [4, 4, 3, 5, 4, 3, 5, 4].into_iter().enumerate() {
        let plan = plan(ranks, if round % 2 == 0 { "tcp" } else { "shm" });
        let mut job = start(&plan, &saves, STEPS);
        job.wait_for_line(0, &format!("begins with {reached}"));
        let save = reached + EVERY * (1 + below(3));
        job.wait_for_line(below(ranks.into()) as usize, &format!("saving {save} "));
        std::thread::sleep(Duration::from_micros(below(60_000)));
        for rank in 0..ranks {
            job.signal(rank as usize, Signal::KILL);
        }
        drop(job);
        let now = assert_whole(&saves, &references);
        assert!(now >= save - EVERY, "after {save} was begun, the latest save is of step {now}, not of the one before");
        reached = now;
    }
    for ranks in [3, 5] {
        let verdict = assert_same_verdict(&start(&plan(ranks, "tcp"), &saves, STEPS).wait());
        assert_eq!(verdict, format!("ok {}", references[STEPS as usize]));
    }
    assert_eq!(assert_whole(&saves, &references), STEPS);
    let left: Vec<_> =
        fs::read_dir(&saves).expect("a directory").map(|entry| entry.expect("one").file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn a_rank_that_is_lost_in_the_middle_of_a_save_costs_that_save_at_most() {
    const STEPS: u64 = 16;
    let references = references(STEPS);
    for victim in [0, 2] {
        let directory = TempDir::new().expect("a directory");
        let plan = plan(3, "tcp").with("GRADWIRE_RECOVERY", "redo");
        let mut job = start(&plan, directory.path(), STEPS);
        let save = EVERY * (1 + below(4));
        job.wait_for_line(1, &format!("saving {save} "));
        std::thread::sleep(Duration::from_micros(below(60_000)));
        job.signal(victim as usize, Signal::KILL);
        let ended = job.wait();
        let left: Vec<&Ended> = (0..3).filter(|rank| *rank != victim).map(|rank| &ended[rank as usize]).collect();
        for rank in &left {
            assert_eq!(rank.verdict(), format!("ok {}", references[STEPS as usize]), "{ended:#?}");
        }
        let said = |rank: &Ended| {
            let words = |line: &String| line.split(' ').take(3).collect::<Vec<_>>().join(" ");
            rank.lines.iter().filter(|line| line.contains("saved")).map(words).collect::<Vec<_>>()
        };
        assert_eq!(said(left[0]), said(left[1]), "both heard the same of every save");
        assert_eq!(assert_whole(directory.path(), &references), STEPS);
    }
}

#[test]
fn jobs_that_save_in_one_directory_hear_of_each_other_and_lose_nothing() {
    const STEPS: u64 = 16;
    let references = references(STEPS);
    // Of other names, and of the same: two launches at brokers of their own.
    for names in [["one", "two"], ["same", "same"]] {
        let directory = TempDir::new().expect("a directory");
        let gate = directory.path().join("gate");
        let jobs = names.map(|name| plan(2, "tcp").with("GRADWIRE_JOB", name).with("E2E_GATE", gate.display()));
        let mut jobs = jobs.each_ref().map(|plan| (plan, start(plan, directory.path(), STEPS)));
        for (_, job) in &mut jobs {
            job.wait_for_line(0, "begins with 0");
            job.wait_for_line(1, "begins with 0");
        }
        fs::write(gate, "").expect("written");
        let ended = jobs.map(|(_, job)| job.wait());
        let mut told = 0;
        for ranks in &ended {
            let verdict = assert_same_verdict(ranks);
            assert_eq!(verdict, format!("ok {}", references[STEPS as usize]));
            let last = ranks[0].lines.iter().rev().find_map(|line| line.strip_prefix("saved ")?.split(' ').nth(1));
            if let Some(last) = last {
                let saved = SavedState::open(&directory.path().join(last)).expect("its last save is there");
                let mut model = Model::default();
                let restored = saved.restore_into(&mut model).expect("and whole");
                assert_eq!(model.digest(), references[restored.step.0 as usize]);
            }
            let refused = ranks[0].lines.iter().filter(|line| line.starts_with("not saved "));
            for line in refused {
                assert!(line.contains("a directory of its own") || line.contains("does another job save"), "{line}");
                told += 1;
            }
        }
        assert!(told > 0, "{ended:#?}");
    }
}

#[test]
fn a_save_of_another_job_or_with_damage_is_refused_by_every_rank() {
    let directory = TempDir::new().expect("a directory");
    assert_same_verdict(&start(&plan(2, "tcp"), directory.path(), 2 * EVERY).wait());
    let other = plan(2, "tcp").with("GRADWIRE_JOB", "other");
    let ended = start(&other, directory.path(), 8).wait();
    assert_faults(&ended, &[0, 1], "NotRestored", &["was made by job 'e2e', but this is job 'other'", "restore_into"]);
    let version = plan(2, "tcp").with("GRADWIRE_MODEL_VERSION", "v2");
    let ended = start(&version, directory.path(), 8).wait();
    assert_faults(&ended, &[0, 1], "NotRestored", &["is of no version of the model, but this job of version 'v2'"]);
    let saved = SavedState::latest(directory.path()).expect("whole").expect("there");
    let shard = saved.path().join("rank-1");
    let mut bytes = fs::read(&shard).expect("a file");
    bytes[1_000_000] ^= 1;
    fs::write(&shard, bytes).expect("written");
    let ended = start(&plan(3, "tcp"), directory.path(), 8).wait();
    let words = ["rank-1: bytes 64 to 4194367 are not as they were written", "save-000001-step-2: name it"];
    assert_faults(&ended, &[0, 1, 2], "NotRestored", &words);
}
