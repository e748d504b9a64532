//! The example of an elastic trainer, run as its first lines say: what it shows has to be true.

use std::path::Path;
use std::process::Command;

use gradwire::durable::SavedState;
use gradwire_tests::{Ended, Job, binary};
use rustix::process::{Pid, Signal, kill_process};

/// `gradwire launch` with three ranks of the example, which saves here and makes so many steps.
fn launch(saves: &Path, steps: u64) -> Job {
    let mut command = Command::new("sh");
    // What it logs is looked at too.
    command.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(binary("gradwire"));
    command.args(["launch", "-n", "3", "--min-ranks", "1", "--restarts", "2", "--"]).arg(binary("example-elastic"));
    command.arg(saves).args([&steps.to_string(), "10"]);
    Job::start([command])
}

/// The process that said so.
fn process(line: &str) -> Pid {
    let pid = line.split(' ').nth(2).and_then(|pid| pid.parse().ok());
    Pid::from_raw(pid.unwrap_or_else(|| panic!("no process in {line}"))).expect("a process")
}

/// What each rank said in its last line, which is the same on all. An ordinary end leaves nothing to warn of.
fn end(ended: &Ended) -> String {
    assert!(ended.status.success(), "{ended:#?}");
    assert!(!ended.lines.iter().any(|line| line.contains("record was dropped")), "{ended:#?}");
    assert!(!ended.lines.iter().any(|line| line.contains("the variable GRADWIRE_")), "what the launcher sets is known");
    let said: Vec<&str> = (0..3)
        .map(|rank| {
            let prefix = format!("[{rank}] ");
            let mut said = ended.lines.iter().rev().filter_map(|line| line.strip_prefix(&prefix));
            let said = said.find(|line| line.contains(", weights "));
            said.unwrap_or_else(|| panic!("rank {rank} said no end: {ended:#?}"))
        })
        .collect();
    assert!(said.iter().all(|line| *line == said[2]), "{ended:#?}");
    said[2].to_owned()
}

/// The errors that were said, in the order of their steps.
fn errors(ended: &Ended) -> Vec<f32> {
    let error = |line: &String| line.split_once(" ranks: error ")?.1.parse().ok();
    ended.lines.iter().filter_map(error).collect()
}

#[test]
fn the_elastic_example_outlives_a_killed_rank_ends_with_its_launcher_and_goes_on_from_its_save() {
    let directory = tempfile::tempdir().expect("a directory");
    let saves = directory.path().join("saves");

    let mut job = launch(&saves, 100_000);
    let victim = process(&job.wait_for(0, "rank 1 begins", |line| line.starts_with("[1] process ")));
    job.wait_for(0, "a step by all", |line| line.contains("] step ") && line.contains(" by 3 ranks"));
    kill_process(victim, Signal::KILL).expect("it is there");
    let returned = job.wait_for(0, "rank 1 is back", |line| {
        line.starts_with("[1] process ") && line.contains(" got the state from the others")
    });
    assert_ne!(process(&returned), victim);
    let back: u64 = returned.rsplit(' ').next().and_then(|step| step.parse().ok()).expect("a step");
    // So that it is known to take part.
    let later = |line: &str| {
        let step: Option<u64> = line.split_once("] step ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        step.is_some_and(|step| step > back) && line.contains(" by 3 ranks")
    };
    job.wait_for(0, "a step by all once more", later);
    job.signal(0, Signal::TERM);
    let ended = job.wait().remove(0);
    let said = end(&ended);
    let steps = said.strip_prefix("stopped after ").and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    let steps = steps.unwrap_or_else(|| panic!("{said}"));
    let saved = SavedState::latest(&saves).expect("a directory").expect("a save");
    assert_eq!(saved.step().0, steps);

    let ended = launch(&saves, steps + 150).wait().remove(0);
    let begun = format!(" goes on from the save with step {steps}");
    assert_eq!(ended.lines.iter().filter(|line| line.ends_with(&begun)).count(), 3, "{ended:#?}");
    assert!(end(&ended).starts_with(&format!("trained after {} steps, weights ", steps + 150)), "{ended:#?}");
    // What the data's noise leaves: their square is 0.1 * 0.1 / 3 in the mean.
    let last = errors(&ended).pop().expect("an error was said");
    assert!((0.002..0.006).contains(&last), "{last}");
}

#[test]
fn the_elastic_example_learns_whoever_is_lost() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut job = launch(&directory.path().join("saves"), 300);
    let victims = [0, 2].map(|rank: usize| {
        let prefix = format!("[{rank}] process ");
        process(&job.wait_for(0, "a rank begins", |line| line.starts_with(&prefix)))
    });
    for victim in victims {
        job.wait_for(0, "a step", |line| line.contains("] step 50 "));
        kill_process(victim, Signal::KILL).expect("it is there");
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    let ended = job.wait().remove(0);
    let errors = errors(&ended);
    assert!(ended.status.success() && errors.first() > errors.last(), "{ended:#?}");
    assert!(ended.lines.iter().any(|line| line.starts_with("[1] trained after 300 steps")), "{ended:#?}");
}
