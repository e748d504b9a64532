//! Ranks that `gradwire launch` starts again, and those that it does not because that would be of no use.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use gradwire_tests::binary;

/// How long ranks wait for others to join.
const DEADLINE: Duration = Duration::from_secs(30);

/// Runs this shell script on so many ranks, with `$E2E` for a trainer that makes so many steps of 100 ms. Any may be lost.
fn launch(ranks: &str, steps: u32, script: &str) -> Output {
    launch_with(ranks, steps, script, &["--min-ranks", "1", "--restarts", "6"])
}

/// The same, with these options.
fn launch_with(ranks: &str, steps: u32, script: &str, options: &[&str]) -> Output {
    let trainer = format!("{} {steps} 100", binary("e2e-elastic").display());
    let mut command = Command::new(binary("gradwire"));
    command.args(["launch", "-n", ranks, "--env", "E2E_EXIT=1"]).args(options);
    command.args(["--", "sh", "-c", script]).env("E2E", trainer);
    command.output().expect("runs")
}

/// Asserts how it exited, and returns what it said.
fn said(output: &Output, code: i32) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{out}\n{err}");
    format!("{out}\n{err}")
}

#[test]
fn a_rank_that_is_started_again_takes_part_again() {
    let script = "case $RANK$GRADWIRE_RESTART in 10) exec timeout -s KILL 2 $E2E;; *) exec $E2E;; esac";
    let said = said(&launch("2", 60, script), 0);
    assert_eq!(said.matches("starting it again in 0.1 s (1 of 6 restarts)").count(), 1, "{said}");
    assert!(said.contains("[1] joined") && said.contains("[1] ok 60 steps"), "{said}");
    assert!(said.contains("gradwire: all ranks ended well"), "{said}");
}

#[test]
fn with_all_ranks_lost_at_once_the_job_ends_without_a_try() {
    let began = Instant::now();
    let said = said(&launch("3", 9000, "exec timeout -s KILL 4 $E2E"), 137);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let words =
        "was killed by SIGKILL: no rank is left that has the job's state: start the job again, from what was saved";
    assert_eq!(said.matches(words).count(), 1, "{said}");
    assert!(!said.contains("ok "), "{said}");
}

#[test]
fn a_rank_of_another_model_uses_no_restarts_up() {
    let script =
        "case $RANK$GRADWIRE_RESTART in 10) exec timeout -s KILL 2 $E2E;; 11) export E2E_WIDER=1;; esac; exec $E2E";
    let said = said(&launch("2", 60, script), 0);
    assert_eq!(said.matches("starting it again").count(), 1, "{said}");
    assert!(
        said.contains("rank 1 on localhost exited with code 1: it is not started again, for it would meet the same"),
        "{said}"
    );
    assert!(said.contains("another model") && said.contains("[0] ok 60 steps"), "{said}");
}

#[test]
fn a_rank_that_fails_when_the_others_are_through_is_not_started_again() {
    let script = "$E2E || exit 1; [ $RANK = 0 ] || { sleep 3; exit 3; }";
    let said = said(&launch("2", 5, script), 0);
    assert!(!said.contains("starting it again"), "{said}");
    assert!(said.contains("exited with code 3: it is not started again, for the others are through"), "{said}");
}

#[test]
fn without_a_rank_that_died_before_it_joined_the_job_ends_at_once_and_says_which() {
    // At once, and when the others have joined; with no restarts left, and where a restart would be of no use.
    for (script, restarts, code, why) in [
        ("[ $RANK = 1 ] && exit 3; exec $E2E", "0", 3, "--restarts allows none"),
        ("[ $RANK = 1 ] && { sleep 3; kill -KILL $$; }; exec $E2E", "1", 137, "all restarts are used up"),
        ("[ $RANK = 1 ] && { sleep 1; exit 2; }; exec $E2E", "1", 2, "it would end the same way"),
    ] {
        let began = Instant::now();
        let said = said(&launch_with("3", 60, script, &["--min-ranks", "2", "--restarts", restarts]), code);
        assert!(began.elapsed() < DEADLINE, "{said}");
        let words = "it had not joined the job, which begins with all 3 ranks, and is not started again: ";
        assert!(said.contains("gradwire: rank 1 on localhost ") && said.contains(&format!("{words}{why}")), "{said}");
        assert!(!said.contains("go on without it") && !said.contains("joined at"), "{said}");
    }
}

#[test]
fn a_rank_that_hangs_is_killed_and_started_again() {
    // It stands still for good, in its process.
    let script = "case $RANK$GRADWIRE_RESTART in 10) (sleep 2; kill -STOP $$) & esac; exec $E2E";
    let began = Instant::now();
    let said = said(&launch_with("3", 200, script, &["--min-ranks", "2", "--restarts", "1"]), 0);
    assert!(said.contains("rank 1 on localhost hangs: the others went on without it, so it is killed"), "{said}");
    assert!(said.contains("rank 1 on localhost hung and was killed: starting it again"), "{said}");
    assert_eq!(said.matches("s: rank 1 on localhost hung and was killed\n").count(), 1, "{said}");
    assert_eq!(said.matches(" ok 200 steps").count(), 3, "{said}");
    assert!(began.elapsed() < Duration::from_secs(60), "{said}");
}

#[test]
fn a_rank_that_hangs_keeps_no_job_from_its_end() {
    let script = "case $RANK in 1) (sleep 2; kill -STOP $$) & esac; exec $E2E";
    let said = said(&launch_with("3", 40, script, &["--min-ranks", "2"]), 0);
    assert!(said.contains("hangs: the others went on without it"), "{said}");
    assert!(said.contains("[0] ok 40 steps") && said.contains("[2] ok 40 steps"), "{said}");
}

#[test]
fn a_rank_that_ends_with_0_and_has_not_left_the_job_is_lost() {
    // The script around the trainer hides how it ended; with and without restarts.
    let script = "[ $RANK = 1 ] || exec $E2E; timeout -s KILL 3 $E2E; exit 0";
    for (restarts, again) in [("0", 0), ("2", 1)] {
        let said = said(&launch_with("3", 60, script, &["--min-ranks", "2", "--restarts", restarts]), 0);
        let words =
            "gradwire: rank 1 on localhost exited with code 0 and had not left the job: the others went on without it";
        assert_eq!(said.matches(words).count(), 1, "{said}");
        assert!(said.contains("Call Group::close, or drop the group, before its process ends"), "{said}");
        assert_eq!(said.matches("It is not started again: by 0").count(), again, "{said}");
        assert!(said.contains("gradwire: all other ranks ended well\n"), "{said}");
        let listed =
            "s: rank 1 on localhost exited with code 0 and had not left the job, and the others went on without it";
        assert_eq!(said.matches(listed).count(), 1, "{said}");
        assert!(said.contains("[0] ok 60 steps") && said.contains("[2] ok 60 steps"), "{said}");
        assert!(!said.contains("starting it again"), "{said}");
    }
}

#[test]
fn ranks_that_leave_in_good_order_one_after_the_other_are_not_taken_for_lost() {
    let script = "case $RANK in 1) E2E_LEAVE=/dev/null exec $E2E;; 2) $E2E;; *) $E2E; sleep 4;; esac";
    let said = said(&launch_with("3", 30, script, &["--min-ranks", "1", "--restarts", "1"]), 0);
    assert!(!said.contains("had not left") && !said.contains("gradwire: "), "{said}");
}

#[test]
fn the_others_go_on_without_a_rank_that_died_when_the_job_had_begun() {
    let script = "case $RANK in 1) exec timeout -s KILL 3 $E2E;; *) exec $E2E;; esac";
    let said = said(&launch_with("3", 60, script, &["--min-ranks", "2"]), 0);
    assert_eq!(
        said.matches("rank 1 on localhost was killed by SIGKILL: the others go on without it").count(),
        1,
        "{said}"
    );
    assert!(said.contains("[0] ok 60 steps") && said.contains("[2] ok 60 steps"), "{said}");
}
