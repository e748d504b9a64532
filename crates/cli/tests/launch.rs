//! `gradwire launch`: what ranks get, what comes out, and that nothing stays, whatever happens.

mod support;

use std::time::Duration;

use rustix::process::Signal;
use support::{Launcher, await_condition, gradwire, kill, launch};

/// A failure has to end the job within this time.
const END_TIME_MAX: Duration = Duration::from_secs(5);

#[test]
fn ranks_find_their_place() {
    let outcome = launch(
        &["-n", "3", "--transport", "tcp", "--wire", "fp16", "--job", "j", "--env", "MINE=a=b"],
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GRADWIRE_JOB $GRADWIRE_TRANSPORT \
         $GRADWIRE_WIRE $MINE; test $MASTER_PORT -gt 0 && test ${#GRADWIRE_SECRET} = 64 && \
         test ${#GRADWIRE_INSTANCE} = 32 && test -n \"$GRADWIRE_BROKER\"",
    );
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    let expected: Vec<_> = (0..3).map(|rank| format!("[{rank}] {rank} 3 {rank} 3 127.0.0.1 j tcp fp16 a=b")).collect();
    assert_eq!(outcome.lines(), expected);
    assert_eq!(outcome.stderr, "");
}

#[test]
fn ranks_share_the_secret_and_the_next_job_has_another() {
    let lines = || launch(&["-n", "2"], "echo $GRADWIRE_SECRET $GRADWIRE_INSTANCE $MASTER_PORT").lines();
    let (first, second) = (lines(), lines());
    assert_eq!(first[0][4..], first[1][4..]);
    assert_ne!(first[0], second[0]);
}

#[test]
fn the_secret_is_on_no_command_line() {
    let launcher = Launcher::start(&["-n", "1"], "echo $GRADWIRE_SECRET; exec sleep 60");
    let line = launcher.await_line("[0] ");
    let secret = &line[4..];
    assert_eq!(secret.len(), 64);
    let lines: Vec<Vec<u8>> = support::all_processes()
        .filter_map(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok())
        .filter(|line| !line.is_empty())
        .collect();
    assert!(!lines.is_empty());
    assert!(!lines.iter().any(|line| line.windows(64).any(|part| part == secret.as_bytes())));
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.finish().code(), Some(143));
}

#[test]
fn output_keeps_its_bytes_its_lines_and_its_stream() {
    let outcome = launch(
        &["-n", "2"],
        r"printf 'a\nb\n\n'; printf '\377\000x\n'; head -c 70000 /dev/zero | tr '\0' y; printf '\nlast'; echo e$RANK >&2",
    );
    assert_eq!(outcome.code(), Some(0));
    for rank in 0..2 {
        let prefix = format!("[{rank}] ").into_bytes();
        let lines: Vec<&[u8]> =
            outcome.stdout.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(&prefix[..])).collect();
        let lengths: Vec<_> = lines.iter().map(|line| line.len()).collect();
        assert_eq!(lines[..4], [b"a".as_slice(), b"b", b"", b"\xff\0x"]);
        assert_eq!(lengths[4..], [65536, 70000 - 65536, 4]);
        assert_eq!(lines[6], b"last");
        assert!(outcome.stderr.lines().any(|line| line == format!("[{rank}] e{rank}")), "{}", outcome.stderr);
    }
}

#[test]
fn lines_of_many_ranks_stay_whole() {
    let outcome = launch(
        &["-n", "4"],
        "i=0; while [ $i -lt 200 ]; do echo \"$RANK:$i:abcdefghijklmnopqrstuvwxyz\"; i=$((i+1)); done",
    );
    let lines = outcome.lines();
    assert_eq!(lines.len(), 800);
    for rank in 0..4 {
        for i in 0..200 {
            assert!(lines.contains(&format!("[{rank}] {rank}:{i}:abcdefghijklmnopqrstuvwxyz")));
        }
    }
}

#[test]
fn the_first_rank_that_fails_is_named_and_its_code_is_the_launchers() {
    let outcome = launch(&["-n", "3"], "if [ $RANK = 1 ]; then seq 1 30; echo boom >&2; exit 7; fi; exec sleep 60");
    assert_eq!(outcome.code(), Some(7), "{}", outcome.stderr);
    assert!(outcome.took < END_TIME_MAX);
    assert!(outcome.stderr.contains("rank 1 on localhost exited with code 7"), "{}", outcome.stderr);
    let last_lines = outcome.stderr.lines().filter(|line| line.starts_with("    [1] ")).count();
    assert_eq!(last_lines, 20);
    assert!(outcome.stderr.contains("    [1] boom"));
    assert!(outcome.stderr.contains("ended by gradwire: ranks 0, 2"), "{}", outcome.stderr);
}

#[test]
fn ranks_that_fail_because_of_it_are_listed_and_not_blamed() {
    // Rank 1 waits until rank 0 has its trap: a signal before that would end it as a signal does.
    let directory = tempfile::tempdir().unwrap();
    let outcome = launch(
        &["-n", "2", "--directory", directory.path().to_str().unwrap()],
        "if [ $RANK = 1 ]; then until [ -e trapped ]; do sleep 0.05; done; exit 7; fi; \
         trap 'exit 9' TERM; touch trapped; while :; do sleep 0.05; done",
    );
    assert_eq!(outcome.code(), Some(7), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("afterwards: rank 0 exited with code 9"), "{}", outcome.stderr);
}

#[test]
fn a_signal_that_killed_a_rank_is_named() {
    let outcome = launch(&["-n", "2"], "if [ $RANK = 0 ]; then kill -SEGV $$; fi; exec sleep 60");
    assert_eq!(outcome.code(), Some(139), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("rank 0 on localhost was killed by SIGSEGV"), "{}", outcome.stderr);
}

#[test]
fn a_rank_that_will_not_go_is_killed_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let outcome = launch(
        &["-n", "2", "--directory", directory.path().to_str().unwrap()],
        "if [ $RANK = 0 ]; then until [ -e trapped ]; do sleep 0.05; done; exit 3; fi; \
         trap '' TERM INT; touch trapped; while :; do sleep 1; done",
    );
    assert_eq!(outcome.code(), Some(3), "{}", outcome.stderr);
    assert!(outcome.took < END_TIME_MAX, "{:?}", outcome.took);
}

#[test]
fn a_rank_may_end_well_before_the_others() {
    let outcome = launch(&["-n", "2"], "if [ $RANK = 1 ]; then sleep 0.5; echo late; fi");
    assert_eq!(outcome.code(), Some(0));
    assert_eq!(outcome.lines(), ["[1] late"]);
}

#[test]
fn a_program_that_is_missing_is_named() {
    let outcome = Launcher::start_command(&["-n", "2"], &["/nonexistent/program"]).finish();
    assert_eq!(outcome.code(), Some(127));
    assert!(outcome.stderr.contains("/nonexistent/program"), "{}", outcome.stderr);
    // What the system calls missing may be there, and what it does not let run may be a script.
    let place = tempfile::tempdir().unwrap();
    let [script, plain] = ["train-script", "train-plain"].map(|name| place.path().join(name));
    std::fs::write(&script, "#!/nonexistent/python\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::write(&plain, "").unwrap();
    for (program, code, words) in [
        (
            "nonexistent-program",
            127,
            "'nonexistent-program': No such file or directory (os error 2); it is not on the PATH\n",
        ),
        ("train-script", 127, "it is not on the PATH: for the file in this directory write ./train-script\n"),
        ("./train-script", 127, "the file is there: what its first line names to run it, or its loader, is not\n"),
        ("./train-plain", 126, "make the file executable (chmod +x), or name the program that runs it\n"),
    ] {
        let directory = place.path().to_str().unwrap();
        let outcome = Launcher::start_command(&["-n", "1", "--directory", directory], &[program]).finish();
        assert_eq!(outcome.code(), Some(code), "{program}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(words), "{program}: {}", outcome.stderr);
    }
    let outcome = launch(&["-n", "1", "--directory", "/nonexistent"], "true");
    assert_eq!(outcome.code(), Some(1));
    assert!(outcome.stderr.contains("/nonexistent") && outcome.stderr.contains("rank 0"), "{}", outcome.stderr);
}

#[test]
fn descendants_that_hide_are_ended_too() {
    // In a session of its own, without a parent, its output elsewhere, deaf to SIGTERM.
    let hide =
        "(setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' </dev/null >/dev/null 2>&1 &) ; echo hidden";
    let outcome = launch(&["-n", "2"], hide);
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("left behind"), "{}", outcome.stderr);

    let failing = format!("{hide}; if [ $RANK = 1 ]; then exit 4; fi; exec sleep 60");
    let outcome = launch(&["-n", "2"], &failing);
    assert_eq!(outcome.code(), Some(4), "{}", outcome.stderr);
    assert!(outcome.took < END_TIME_MAX, "{:?}", outcome.took);
}

/// Ranks with descendants of the stubborn kind, which say when they are up.
const STUBBORN: &str = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' &); \
                        sleep 60 & echo up; while :; do sleep 1; done";

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    let launcher = Launcher::start(&["-n", "2"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    assert!(launcher.processes().len() >= 6);
    launcher.signal(Signal::KILL);
    assert_eq!(launcher.finish().code(), None);
}

#[test]
fn an_agent_that_is_killed_is_reported_and_nothing_outlives_it() {
    let launcher = Launcher::start(&["-n", "2"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    let agents = launcher.agents();
    assert_eq!(agents.len(), 1);
    kill(agents[0], Signal::KILL);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(1));
    assert!(outcome.stderr.contains("lost the agent on localhost (ranks 0 to 1)"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("SIGKILL"), "{}", outcome.stderr);
}

#[test]
fn an_agent_that_is_asked_to_end_ends_its_ranks() {
    let launcher = Launcher::start(&["-n", "2"], STUBBORN);
    launcher.await_line("up");
    launcher.await_line("up");
    kill(launcher.agents()[0], Signal::TERM);
    assert_eq!(launcher.finish().code(), Some(137));
}

#[test]
fn signals_reach_every_rank() {
    let script = "trap 'echo got usr1' USR1; trap 'echo got usr2' USR2; trap 'echo got hup' HUP; trap 'exit 0' TERM; \
                  echo up; while :; do sleep 0.05; done";
    let launcher = Launcher::start(&["-n", "2"], script);
    launcher.await_line("up");
    launcher.await_line("up");
    for (signal, name) in [(Signal::USR1, "got usr1"), (Signal::USR2, "got usr2"), (Signal::HUP, "got hup")] {
        launcher.signal(signal);
        launcher.await_line(name);
        launcher.await_line(name);
    }
    launcher.signal(Signal::TERM);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
}

#[test]
fn an_interrupt_that_ends_the_ranks_is_no_rank_s_fault() {
    let launcher = Launcher::start(&["-n", "2"], "echo up; exec sleep 60");
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::INT);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(130), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("ended by SIGINT"), "{}", outcome.stderr);
}

#[test]
fn a_second_interrupt_kills() {
    let launcher =
        Launcher::start(&["-n", "2"], "trap '' INT; trap 'echo once' TERM; echo up; while :; do sleep 0.05; done");
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::INT);
    launcher.await_line("once");
    launcher.signal(Signal::INT);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(130), "{}", outcome.stderr);
}

#[test]
fn a_reader_that_is_slow_or_gone_does_not_harm_the_job() {
    use std::io::Read as _;
    let mut child = gradwire()
        .args([
            "launch",
            "-n",
            "2",
            "--",
            "sh",
            "-c",
            "yes $(head -c 200 /dev/zero | tr '\\0' x) | head -c 30000000; echo done $RANK >&2",
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 16];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let status = await_condition("the launcher ends", || child.try_wait().unwrap());
    assert!(status.success());
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(
        errors.contains("[0] done 0") && errors.contains("[1] done 1") && errors.contains("nobody reads"),
        "{errors}"
    );
}

#[test]
fn what_makes_no_sense_is_refused_with_the_remedy() {
    for (arguments, words) in [
        (vec!["-n", "3", "-H", "localhost:2"], "-n 2"),
        (vec!["-n", "0"], "1 to 1024"),
        (vec!["-n", "2", "-H", "localhost:x"], "number of slots"),
        (vec!["-n", "1", "--env", "NOT_SET_ANYWHERE_AT_ALL"], "NOT_SET_ANYWHERE_AT_ALL=VALUE"),
        (vec!["-n", "1", "--job", "a/b"], "letters, digits"),
        (vec!["-n", "1", "--transport", "ib"], "auto, shm, tcp"),
        (vec!["-n", "1", "--broker", "host:6650"], "pulsar://"),
    ] {
        let outcome = launch(&arguments, "true");
        assert_eq!(outcome.code(), Some(2), "{arguments:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(words), "{arguments:?}: {}", outcome.stderr);
    }
}

#[test]
fn with_enough_ranks_left_the_others_go_on() {
    let script = "case $RANK in 1) exit 3;; esac; [ \"$GRADWIRE_RECOVERY $GRADWIRE_RANKS_MIN\" = 'redo 2' ] || exit 9; sleep 0.5";
    let outcome = Launcher::start(&["-n", "3", "--min-ranks", "2"], script).finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("rank 1 on") && outcome.stderr.contains("went on without it"),
        "{}",
        outcome.stderr
    );

    let script = "case $RANK in 0) sleep 30;; *) exit 4;; esac";
    let outcome = Launcher::start(&["-n", "3", "--min-ranks", "2"], script).finish();
    assert_eq!(outcome.code(), Some(4), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("then ended by gradwire: rank 0"), "{}", outcome.stderr);
    // What is said of the first of them, if anything, comes before.
    let stderr = format!("\n{}", outcome.stderr);
    let summary = stderr.rsplit_once("\ngradwire: ").unwrap().1;
    assert!(
        summary.contains("exited with code 4: 1 rank is left, and --min-ranks asks for 2, and --restarts allows none"),
        "{summary}"
    );
    assert!(!summary.contains("went on"), "{summary}");

    let refused = Launcher::start(&["-n", "3", "--min-ranks", "4"], "exit 0").finish();
    assert_eq!(refused.code(), Some(2), "{}", refused.stderr);
}
