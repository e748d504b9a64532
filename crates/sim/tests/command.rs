//! The command, as people use it.

use std::process::Command;

fn run(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_gradwire-sim")).args(args).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), text + &String::from_utf8_lossy(&output.stderr))
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or_default()
}

#[test]
fn many_seeds_end_with_a_line_that_can_be_counted() {
    let (good, text) = run(&["--seeds", "5", "--seed", "1"]);
    assert!(good, "{text}");
    assert_eq!(last_line(&text), "sim result: ok. 5 passed; 0 failed; 0 ignored");
    assert!(text.starts_with("seeds 1 to 5, each run twice"), "{text}");
}

#[test]
fn a_failure_says_how_to_see_it_again_and_gives_a_small_plan() {
    let (good, text) = run(&["--seeds", "40", "--seed", "1", "--mutation", "count-twice"]);
    assert!(!good);
    assert!(last_line(&text).starts_with("sim result: FAILED. "), "{text}");
    let again = text.lines().find_map(|line| line.trim().strip_prefix("again: gradwire-sim ")).expect("it says how");
    assert!(again.contains("--mutation count-twice") && text.contains("--plan FILE --mutation count-twice`"), "{text}");
    let args: Vec<&str> = again.split(' ').chain(["--no-shrink"]).collect();
    let (good, text) = run(&args);
    assert!(!good && text.contains("FAILED: invariant '2 exactly once'"), "{text}");
}

#[test]
fn a_plan_can_be_printed_changed_and_run() {
    let (good, text) = run(&["--seed", "9", "--print-plan"]);
    assert!(good, "{text}");
    let file = std::env::temp_dir().join(format!("gradwire-sim-plan-{}.json", std::process::id()));
    std::fs::write(&file, &text).expect("it can be written");
    let name = file.to_str().expect("it is UTF-8");
    let (first, again) = (run(&["--plan", name]), run(&["--seed", "9"]));
    assert!(first.0 && again.0);
    let digest = |text: &str| text.lines().find_map(|line| line.split("digest ").nth(1).map(str::to_owned));
    assert_eq!(digest(&first.1), digest(&again.1));
    std::fs::write(&file, text.replace("\"ranks\"", "\"rank\"")).expect("it can be written");
    let (good, text) = run(&["--plan", name]);
    std::fs::remove_file(&file).expect("it can be removed");
    assert!(!good && text.contains("not a plan"), "{text}");
}

#[test]
fn plans_of_many_seeds_are_not_printed() {
    let (good, text) = run(&["--seeds", "3", "--print-plan"]);
    assert!(!good && text.contains("--print-plan") && text.contains("--seeds"), "{text}");
}
