//! `gradwire launch --min-ranks`: ranks that are started again, and hosts that come and go while the job runs.
#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::{Launcher, await_condition, kill, launch};
use tempfile::TempDir;

/// A directory for the ranks, with the job's hosts, its events, and an ssh that stays on this machine.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        // The host `x` is down as long as there is a file `down-x`.
        let script = format!(
            "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\n[ ! -e {}/down-$2 ] || exit 255\n\
             export NODE=$2 SSH_CONNECTION='127.0.0.1 1 127.0.0.1 2'\nexec sh -c \"$3\"\n",
            place.0.path().display()
        );
        fs::write(place.path("ssh"), script).unwrap();
        fs::set_permissions(place.path("ssh"), fs::Permissions::from_mode(0o700)).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn touch(&self, name: &str) {
        fs::write(self.path(name), "").unwrap();
    }

    fn hosts(&self, text: &str) {
        fs::write(self.path("hosts"), text).unwrap();
    }

    fn start(&self, arguments: &[&str], script: &str) -> Launcher {
        let text = |name: &str| self.path(name).to_str().unwrap().to_owned();
        let (directory, events, ssh) = (text(""), text("events"), text("ssh"));
        let common = ["--directory", &directory, "--events", &events, "--ssh", &ssh];
        Launcher::start(&[&common, arguments].concat(), script)
    }

    /// A job on the hosts of the file.
    fn start_on_hosts(&self, arguments: &[&str], script: &str) -> Launcher {
        let hosts = self.path("hosts");
        self.start(&[&["--hosts-file", hosts.to_str().unwrap()], arguments].concat(), script)
    }

    fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("events")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The events of a rank, with their reasons.
    fn events_of(&self, rank: u32) -> Vec<String> {
        let events = self.events().into_iter().filter(|event| event["rank"] == rank);
        events
            .map(|event| {
                let [event, reason] = ["event", "reason"].map(|key| event[key].as_str().unwrap_or_default().to_owned());
                format!("{event} {reason}").trim_end().to_owned()
            })
            .collect()
    }
}

/// Runs until there is a file `done`; at SIGTERM, says so and ends in order.
const STEADY: &str = "trap 'echo told $RANK; exit 0' TERM; echo up $RANK $LOCAL_RANK $NODE $GRADWIRE_RESTART; \
                      until [ -e done ]; do sleep 0.05; done";

#[test]
fn a_rank_that_fails_is_started_again_with_the_same_place() {
    let place = Place::new();
    let script = "[ $RANK = 0 ] || { echo $RANK $WORLD_SIZE $LOCAL_RANK $GRADWIRE_RESTART $GRADWIRE_RANKS_MAX; \
                  [ $GRADWIRE_RESTART = 2 ] || exit 3; touch done; }; until [ -e done ]; do sleep 0.05; done";
    let job = ["-n", "2", "--min-ranks", "1", "--max-ranks", "4", "--restarts", "3"];
    let outcome = place.start(&job, script).finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.lines(), ["[1] 1 2 1 0 4", "[1] 1 2 1 1 4", "[1] 1 2 1 2 4"]);
    let summary = outcome.stderr.split_once("gradwire: all ranks ended well\n").unwrap().1;
    let words: Vec<_> = summary.lines().map(|line| line.split_once(" s: ").unwrap().1).collect();
    let expected = [
        "rank 1 on localhost exited with code 3",
        "rank 1 was started again on localhost (GRADWIRE_RESTART=1)",
        "rank 1 on localhost exited with code 3",
        "rank 1 was started again on localhost (GRADWIRE_RESTART=2)",
    ];
    assert_eq!(words, expected);
    let lost = "lost exited with code 3";
    let ended = "ended exited with code 0";
    assert_eq!(place.events_of(0), ["started", ended]);
    assert_eq!(
        place.events_of(1),
        ["started", lost, "restarted GRADWIRE_RESTART=1", lost, "restarted GRADWIRE_RESTART=2", ended]
    );
    assert!(place.events().is_sorted_by_key(|event| event["ms"].as_u64().unwrap()));
    assert!(place.events().iter().all(|event| event["host"] == "localhost"));
}

#[test]
fn a_rank_that_was_killed_is_started_again_and_what_it_left_is_ended_first() {
    let place = Place::new();
    let script = "if [ $GRADWIRE_RESTART = 0 ]; then (setsid sh -c 'echo $$ >pid; exec sleep 60' >/dev/null 2>&1 &); \
                  until [ -s pid ]; do sleep 0.05; done; kill -SEGV $$; fi; \
                  while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done; echo gone";
    let outcome = place.start(&["-n", "1", "--min-ranks", "1", "--restarts", "1"], script).finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.lines(), ["[0] gone"]);
    assert_eq!(place.events_of(0)[1], "lost was killed by SIGSEGV");
}

#[test]
fn of_ranks_that_are_lost_at_once_each_line_says_which_restart_it_is() {
    let place = Place::new();
    let script = "case $RANK$GRADWIRE_RESTART in 0*) until [ -e done ]; do sleep 0.05; done;; \
                  ?0) until [ -e fail ]; do sleep 0.01; done; exit 3;; *) echo again;; esac";
    let launcher = place.start(&["-n", "4", "--min-ranks", "1", "--restarts", "3"], script);
    place.touch("fail");
    (0..3).for_each(|_| drop(launcher.await_line("again")));
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    for nth in 1..=3 {
        let words = format!("({nth} of 3 restarts)");
        assert_eq!(outcome.stderr.matches(&words).count(), 1, "{words}: {}", outcome.stderr);
    }
}

#[test]
fn with_the_restarts_used_up_the_others_go_on_or_the_job_ends() {
    let place = Place::new();
    let script =
        "case $RANK in 1) exit 4;; 2) until [ -e fail ]; do sleep 0.05; done; exit 5;; *) exec sleep 60;; esac";
    let launcher = place.start(&["-n", "3", "--min-ranks", "2", "--restarts", "1"], script);
    launcher.await_error("the others go on without it");
    place.touch("fail");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(5), "{}", outcome.stderr);
    let summary = outcome.stderr.rsplit_once("\ngradwire: ").unwrap().1;
    let words = "rank 2 on localhost exited with code 5: 1 rank is left, and --min-ranks asks for 2, and all restarts (1) \
                 are used up\n";
    assert!(summary.starts_with(words), "{summary}");
    assert!(!summary.contains("went on"), "{summary}");
    assert!(summary.contains("then ended by gradwire: rank 0"), "{summary}");
}

#[test]
fn a_rank_that_would_fail_the_same_way_again_is_not_started_again() {
    let place = Place::new();
    let script = "case $RANK in 1) exit 2;; *) sleep 1;; esac";
    let outcome = place.start(&["-n", "2", "--min-ranks", "1", "--restarts", "5"], script).finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    let words = "rank 1 on localhost exited with code 2: it would end the same way if it was started again, and the others go \
                 on without it";
    assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
    assert_eq!(place.events_of(1), ["started", "lost exited with code 2"]);
    let outcome = place.start(&["-n", "1", "--min-ranks", "1", "--restarts", "5"], "exec /no/such/program").finish();
    assert_eq!(outcome.code(), Some(127), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("starting it again would be of no use"), "{}", outcome.stderr);
    assert_eq!(place.events_of(0).len(), 2);
}

#[test]
fn a_rank_that_fails_at_once_again_and_again_is_started_more_and_more_slowly() {
    let place = Place::new();
    let outcome = place.start(&["-n", "1", "--min-ranks", "1", "--restarts", "5"], "exit 9").finish();
    assert_eq!(outcome.code(), Some(9), "{}", outcome.stderr);
    let times = |kind: &str| {
        let events = place.events().into_iter().filter(|event| event["event"] == kind);
        events.map(|event| event["ms"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let (lost, restarted) = (times("lost"), times("restarted"));
    assert_eq!((lost.len(), restarted.len()), (6, 5));
    let pauses: Vec<u64> = lost.iter().zip(&restarted).map(|(lost, again)| again - lost).collect();
    assert!(pauses.iter().zip([100, 200, 400, 800, 1600]).all(|(pause, least)| *pause >= least), "{pauses:?}");
}

#[test]
fn slots_are_added_and_taken_away_through_the_file() {
    let place = Place::new();
    place.hosts("localhost\n127.0.0.1\n");
    let launcher = place.start_on_hosts(&["--min-ranks", "1", "--max-ranks", "3"], STEADY);
    launcher.await_line("up");
    launcher.await_line("up");
    place.hosts("localhost\n");
    launcher.await_line("told 1");
    // Nobody said under which address others could reach the broker.
    place.hosts("localhost\nnodea\n");
    launcher.await_error("nodea is not added");
    launcher.await_error("--address IP");
    // What is not a list of hosts changes nothing, and is said once.
    place.hosts("localhost\n127.0.0.1:x\n");
    launcher.await_error("line 2");
    place.hosts("localhost\n127.0.0.1:2 # of three slots\n");
    let mut lines = [launcher.await_line("up"), launcher.await_line("up")];
    lines.sort();
    assert_eq!(lines, ["[1] up 1 1 1", "[2] up 2 2 0"]);
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches("nothing changes").count(), 1, "{}", outcome.stderr);
    let ended = "ended exited with code 0";
    assert_eq!(place.events_of(1), ["started", "removed its slot was taken away", ended, "added", ended]);
    assert_eq!(place.events_of(2), ["added", ended]);
}

#[test]
fn a_file_with_fewer_slots_than_the_job_needs_is_warned_of_once_a_change() {
    let place = Place::new();
    place.hosts("localhost:3\n");
    let launcher = place.start_on_hosts(&["--min-ranks", "2"], STEADY);
    (0..3).for_each(|_| drop(launcher.await_line("up")));
    place.hosts("localhost:2\n");
    launcher.await_line("told 2");
    place.hosts("localhost:1\n");
    launcher.await_line("told 1");
    launcher.await_error("the hosts file has 1 slot, and --min-ranks asks for 2: add slots");
    place.hosts("localhost:1 # still\n");
    await_condition("it is said again", || (launcher.errors().matches("has 1 slot").count() == 2).then_some(()));
    place.hosts("localhost:2\n");
    launcher.await_line("[1] up");
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches("and --min-ranks asks for").count(), 2, "{}", outcome.stderr);
}

#[test]
fn hosts_are_added_and_taken_away_through_the_file() {
    let place = Place::new();
    place.hosts("nodea\nnodeb\n");
    let script =
        format!("[ $RANK = 1 ] || {{ {STEADY}; exit 0; }}; trap '' TERM; echo up; while :; do sleep 0.05; done");
    let launcher = place.start_on_hosts(&["--min-ranks", "1", "--max-ranks", "3", "--grace", "0.5"], &script);
    launcher.await_line("up");
    launcher.await_line("up");
    place.hosts("nodea\nnodeb\nnodec\n");
    launcher.await_line("[2] up 2 0 nodec 0");
    // Rank 1 does not listen, and is killed after the grace.
    place.hosts("nodea\nnodec\n");
    let killed = "ended was killed by SIGKILL".to_owned();
    await_condition("rank 1 is killed", || place.events_of(1).contains(&killed).then_some(()));
    await_condition("the agent goes", || (launcher.agents().len() == 2).then_some(()));
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("rank 1 on nodeb was told to end"), "{}", outcome.stderr);
}

/// The agent of a host, as the ssh of [`Place`] starts it.
fn agent_of(launcher: &Launcher, node: &str) -> i32 {
    let variable = format!("NODE={node}");
    let has = |pid: &i32| {
        fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes()))
    };
    await_condition(node, || launcher.agents().into_iter().find(has))
}

#[test]
fn the_ranks_of_a_host_that_is_lost_go_to_another_or_wait_until_it_is_back() {
    let place = Place::new();
    place.hosts("nodea\nnodeb\nnodec\n");
    let launcher = place.start_on_hosts(&["-n", "2", "--min-ranks", "1", "--restarts", "2"], STEADY);
    launcher.await_line("up");
    launcher.await_line("up");
    place.touch("down-nodea");
    kill(agent_of(&launcher, "nodea"), Signal::KILL);
    launcher.await_line("[0] up 0 0 nodec 1");
    place.touch("down-nodec");
    kill(agent_of(&launcher, "nodec"), Signal::KILL);
    launcher.await_error("goes on trying");
    fs::remove_file(place.path("down-nodec")).unwrap();
    launcher.await_line("[0] up 0 0 nodec 2");
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("rank 0 on nodea went with its host"), "{}", outcome.stderr);
}

#[test]
fn the_ranks_of_an_agent_that_is_asked_to_end_are_started_by_another() {
    let place = Place::new();
    let script = "echo up $GRADWIRE_RESTART; until [ -e done ]; do sleep 0.05; done";
    let launcher = place.start(&["-n", "1", "--min-ranks", "1", "--restarts", "1"], script);
    launcher.await_line("up 0");
    kill(launcher.agents()[0], Signal::TERM);
    launcher.await_line("up 1");
    place.touch("done");
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("rank 0 on localhost was killed by SIGTERM"), "{}", outcome.stderr);
}

#[test]
fn a_signal_gives_the_ranks_time_and_starts_nothing_again() {
    let place = Place::new();
    let job = ["-n", "2", "--min-ranks", "1", "--restarts", "5", "--grace", "0.5"];
    // One ends in time, badly; the other would not.
    let script =
        "if [ $RANK = 0 ]; then trap 'exit 5' TERM; else trap '' TERM; fi; echo up; while :; do sleep 0.05; done";
    let launcher = place.start(&job, script);
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::TERM);
    let outcome = launcher.finish();
    assert_eq!(outcome.code(), Some(143), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("ended by SIGTERM, and those that had not ended after 0.5 s were killed"));
    assert_eq!(place.events_of(0), ["started", "ended exited with code 5"]);
    assert_eq!(place.events_of(1), ["started", "ended was killed by SIGKILL"]);

    // Programs watch for one signal, whichever the launcher got.
    let launcher = Launcher::start(&["-n", "2"], "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done");
    launcher.await_line("up");
    launcher.await_line("up");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.finish().code(), Some(0));
}

#[test]
fn a_signal_ends_the_wait_for_a_restart() {
    let place = Place::new();
    let launcher = place.start(&["-n", "1", "--min-ranks", "1", "--restarts", "100"], "exit 3");
    launcher.await_error("starting it again in 3.2 s");
    launcher.signal(Signal::TERM);
    let outcome = launcher.finish();
    assert!(outcome.took < Duration::from_secs(10), "{:?}", outcome.took);
    assert_eq!(outcome.code(), Some(143), "{}", outcome.stderr);
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed_while_it_restarts() {
    let place = Place::new();
    let script = "[ $RANK = 0 ] || exit 3; trap '' TERM HUP INT; \
                  (setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' &); while :; do sleep 1; done";
    let launcher = place.start(&["-n", "2", "--min-ranks", "1", "--restarts", "100"], script);
    launcher.await_error("starting it again in 0.8 s");
    assert!(launcher.processes().len() >= 2);
    launcher.signal(Signal::KILL);
    assert_eq!(launcher.finish().code(), None);
}

#[test]
fn what_does_not_fit_together_is_refused_with_the_remedy() {
    for (arguments, words) in [
        (vec!["-n", "3", "--min-ranks", "2", "--max-ranks", "2"], "3 ranks are started"),
        (vec!["-n", "3", "--restarts", "1"], "--min-ranks 2"),
        (vec!["-n", "3", "--max-ranks", "4"], "--min-ranks 2"),
        (vec!["-n", "2", "--min-ranks", "1", "--env", "GRADWIRE_RECOVERY=fail"], "unset GRADWIRE_RECOVERY"),
        (vec!["-n", "2", "--hosts-file", "/nonexistent/hosts"], "/nonexistent/hosts"),
        (vec!["-n", "2", "--events", "/nonexistent/events"], "/nonexistent/events"),
        (vec!["-n", "2", "--hosts-file", "x", "-H", "localhost:2"], "cannot be used with"),
        (vec!["-n", "2", "--grace", "soon"], "seconds"),
    ] {
        let outcome = launch(&arguments, "true");
        assert_eq!(outcome.code(), Some(2), "{arguments:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(words), "{arguments:?}: {}", outcome.stderr);
    }
}
