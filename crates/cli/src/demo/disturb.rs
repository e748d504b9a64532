//! What the demo does to its own ranks in the middle of training: `--kill`, `--stall` and `--join`.
//!
//! The parent and all ranks read the same arguments, so each knows what is due in which step. A rank kills itself, which
//! gives the exact moment: half of the step's gradients are exchanged, the others never are. It asks the parent to stop
//! and continue it, because nobody continues himself: when all of the step's results are there, before its commit. It
//! tells the parent when a further process is due, which starts it.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gradwire_proto::session::Timing;
use gradwire_proto::{Fault, FaultKind};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::event::{Event, Moment};
use crate::bench::ranks;

/// Most processes that can join: each is one more on this machine.
const JOINS_MAX: usize = 64;
/// A process that joins takes part a few steps after that in which it was started: so many have to be left.
const JOIN_STEPS: u32 = 8;
/// Steps of so small a network are short beside the start of a process, and the last could be over before it is there.
/// So long the others take for all that are left once it is due, until it takes part; for a rank that is stopped, so much
/// longer than it is.
const JOIN_TIME: Duration = Duration::from_secs(10);
/// Longest pause before one step for that.
const JOIN_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest stall: the parent waits for it, however soon the others are through.
const STALL_MAX: Duration = Duration::from_secs(600);
/// How often a rank that waits to be stopped looks whether it was continued.
const LOOK: Duration = Duration::from_millis(1);

/// What is done to the ranks, and when.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Disturbances {
    /// Kills rank R in the middle of step S; may be repeated. The others go on without it.
    #[arg(long = "kill", value_name = "R@S")]
    kills: Vec<Kill>,
    /// Stops rank R in step S for a time such as 5s; may be repeated. When it is longer than 2.5 s the others go on
    /// without it, and steps are drawn out until it takes part again.
    #[arg(long = "stall", value_name = "R@S:TIME")]
    stalls: Vec<Stall>,
    /// Starts one more process when step S begins; may be repeated. It takes the place of a lost rank whose process is
    /// gone, if there is one, and is a further rank otherwise. Steps are drawn out until it takes part.
    #[arg(long = "join", value_name = "S")]
    joins: Vec<u32>,
}

/// `--kill R@S`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kill {
    rank: u32,
    step: u32,
}

/// `--stall R@S:TIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stall {
    rank: u32,
    step: u32,
    time: Duration,
}

impl FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('@').and_then(|(rank, step)| Some((rank.parse().ok()?, step.parse().ok()?)));
        let (rank, step) = parsed.ok_or("expected RANK@STEP, as in 2@40")?;
        Ok(Self { rank, step })
    }
}

impl FromStr for Stall {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, time) = text.split_once(':').ok_or("expected RANK@STEP:TIME, as in 1@60:5s")?;
        let Kill { rank, step } = place.parse().map_err(|_| "expected RANK@STEP:TIME, as in 1@60:5s")?;
        let time = humantime::parse_duration(time.trim())
            .map_err(|error| format!("'{time}' is no time ({error}): expected one such as 5s or 300ms"))?;
        Ok(Self { rank, step, time })
    }
}

impl fmt::Display for Kill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.rank, self.step)
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.rank, self.step, humantime::format_duration(self.time))
    }
}

impl Disturbances {
    /// Whether anything is done at all: the ranks go on without lost ones then.
    pub(super) const fn any(&self) -> bool {
        !self.kills.is_empty() || !self.stalls.is_empty() || !self.joins.is_empty()
    }

    /// Refuses what cannot be done to `ranks` ranks in `steps` steps.
    ///
    /// # Errors
    /// A [`Fault`] of kind `InvalidArgument` that names the argument.
    pub(super) fn check(&self, ranks: u32, steps: u32) -> Result<(), Fault> {
        let kills = self.kills.iter().map(|kill| (format!("--kill {kill}"), kill.rank, kill.step));
        let stalls = self.stalls.iter().map(|stall| (format!("--stall {stall}"), stall.rank, stall.step));
        self.check_joins(steps)?;
        for (what, rank, step) in kills.chain(stalls) {
            if rank >= ranks {
                return refuse(&what, &format!("there is no rank {rank}: expected one from 0 to {}", ranks - 1));
            }
            if step == 0 || step > steps {
                return refuse(&what, &format!("there is no step {step}: expected one from 1 to {steps}"));
            }
        }
        let touched = self.check_combinations()?;
        if touched == ranks as usize {
            let what = if self.stalls.is_empty() { "--kill" } else { "--kill and --stall" };
            return refuse(what, &format!("all {ranks} ranks could be lost: expected one that is left alone"));
        }
        Ok(())
    }

    fn check_joins(&self, steps: u32) -> Result<(), Fault> {
        let last = steps.saturating_sub(JOIN_STEPS);
        if let Some(join) = self.joins.iter().find(|join| !(1..=last).contains(*join)) {
            let expected = match last {
                0 => format!("expected more than {JOIN_STEPS} of them (--steps)"),
                last => format!("expected a step from 1 to {last}"),
            };
            let detail =
                format!("a process that joins needs {JOIN_STEPS} further steps, and there are {steps}: {expected}");
            return refuse(&format!("--join {join}"), &detail);
        }
        if self.joins.len() > JOINS_MAX {
            return refuse(
                "--join",
                &format!("{} processes would join: expected {JOINS_MAX} at most", self.joins.len()),
            );
        }
        Ok(())
    }

    /// Refuses what cannot be done to one rank together. Returns how many ranks something is done to.
    fn check_combinations(&self) -> Result<usize, Fault> {
        let mut killed = BTreeSet::new();
        for kill in &self.kills {
            if !killed.insert(kill.rank) {
                return refuse(
                    &format!("--kill {kill}"),
                    &format!("rank {} is killed twice: expected once", kill.rank),
                );
            }
        }
        let mut stalled = BTreeSet::new();
        for stall in &self.stalls {
            let what = format!("--stall {stall}");
            if killed.contains(&stall.rank) {
                return refuse(&what, &format!("rank {} is killed too: expected one or the other", stall.rank));
            }
            if !stalled.insert((stall.rank, stall.step)) {
                return refuse(&what, &format!("rank {} is stopped twice in this step: expected once", stall.rank));
            }
            if stall.time.is_zero() || stall.time > STALL_MAX {
                return refuse(&what, &format!("expected a time up to {}", humantime::format_duration(STALL_MAX)));
            }
        }
        killed.extend(stalled.into_iter().map(|(rank, _)| rank));
        Ok(killed.len())
    }

    /// The arguments by which a rank reads the same.
    pub(super) fn arguments(&self) -> impl Iterator<Item = String> {
        let kills = self.kills.iter().map(|kill| format!("--kill={kill}"));
        let stalls = self.stalls.iter().map(|stall| format!("--stall={stall}"));
        let joins = self.joins.iter().map(|step| format!("--join={step}"));
        kills.chain(stalls).chain(joins)
    }

    /// How many ranks are killed.
    pub(super) const fn kills(&self) -> usize {
        self.kills.len()
    }

    /// How many processes join.
    pub(super) const fn joins(&self) -> usize {
        self.joins.len()
    }

    /// How many processes are started when this step begins.
    pub(super) fn joins_in(&self, step: u32) -> usize {
        self.joins.iter().filter(|join| **join == step).count()
    }

    /// How long ranks pause before this step, so that those can still take part that were to be started, of which so many
    /// do, and those that are stopped and no members any more.
    pub(super) fn pause_before(
        &self,
        step: u32,
        steps: u32,
        came: usize,
        is_member: impl Fn(u32) -> bool,
    ) -> Option<Duration> {
        let pause = |time: Duration, from: u32| (time / (steps - from + 1)).min(JOIN_PAUSE_MAX);
        let due = self.joins.iter().filter(|join| **join <= step);
        let latest = due.clone().max().filter(|_| came < due.count());
        let join = latest.map(|latest| pause(JOIN_TIME, *latest));
        let away = self.stalls.iter().filter(|stall| stall.step < step && !is_member(stall.rank));
        let back = away.filter(|stall| !is_waited_for(stall.time));
        back.map(|stall| pause(stall.time + JOIN_TIME, stall.step + 1)).chain(join).max()
    }

    /// How long a rank is stopped at most.
    pub(super) fn longest_stall(&self) -> Duration {
        self.stalls.iter().map(|stall| stall.time).max().unwrap_or_default()
    }

    /// Whether this rank is stopped in any step: it keeps its number then, for it may come back by itself.
    pub(super) fn stalls_ever(&self, rank: u32) -> bool {
        self.stalls.iter().any(|stall| stall.rank == rank)
    }

    /// Whether this rank is killed in this step.
    pub(super) fn kills_in(&self, rank: u32, step: u32) -> bool {
        self.kills.contains(&Kill { rank, step })
    }

    /// For how long this rank is stopped in this step.
    pub(super) fn stalls_in(&self, rank: u32, step: u32) -> Option<Duration> {
        self.stalls.iter().find(|stall| (stall.rank, stall.step) == (rank, step)).map(|stall| stall.time)
    }

    /// Whether any rank is killed in this step: its end is measured.
    pub(super) fn kills_any_in(&self, step: u32) -> bool {
        self.kills.iter().any(|kill| kill.step == step)
    }
}

/// Kills this process, after saying so.
///
/// # Errors
/// A [`Fault`] of kind `System` when the parent does not listen any more; otherwise it does not return.
pub(super) fn die(step: u32) -> Result<(), Fault> {
    ranks::emit(&Event::Killed { step, at: Moment::now() })?;
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
    loop {
        std::thread::park();
    }
}

/// Whether the others wait for a rank that is silent for so long.
pub(super) fn is_waited_for(stall: Duration) -> bool {
    stall < Duration::from_nanos(Timing::default().silence_ns)
}

/// Asks the parent to stop this process for this time, and returns when that has continued it.
///
/// # Errors
/// A [`Fault`] of kind `System` when the parent cannot be told, or the signal not be awaited.
pub(super) fn stall(step: u32, time: Duration) -> Result<(), Fault> {
    let continued = Arc::new(AtomicBool::new(false));
    let id = signal_hook::flag::register(signal_hook::consts::SIGCONT, Arc::clone(&continued))
        .map_err(|error| Fault::new(FaultKind::System, format!("SIGCONT cannot be awaited: {error}")))?;
    let pid = std::process::id().cast_signed();
    ranks::emit(&Event::Stalled { step, pid, ms: time.as_millis() as u64, at: Moment::now() })?;
    // The flag, not the time, says that it is over: the parent may take its time before it stops this process.
    while !continued.load(Ordering::Acquire) {
        std::thread::sleep(LOOK);
    }
    signal_hook::low_level::unregister(id);
    ranks::emit(&Event::Woke { step, at: Moment::now() })
}

/// Stops a process, and continues it after `time`, in the background. The parent's part of [`stall`].
///
/// # Errors
/// A [`Fault`] of kind `System` when it cannot be stopped.
pub(super) fn stop_for(pid: i32, time: Duration) -> Result<(), Fault> {
    let failed =
        |error: rustix::io::Errno| Fault::new(FaultKind::System, format!("process {pid} cannot be stopped: {error}"));
    let pid = Pid::from_raw(pid).ok_or_else(|| failed(rustix::io::Errno::INVAL))?;
    // By descriptor: should it end meanwhile, no other process that got its number is continued.
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    pidfd_send_signal(&process, Signal::STOP).map_err(failed)?;
    let again = process.try_clone();
    let waker = std::thread::Builder::new().spawn(move || {
        std::thread::sleep(time);
        let _ = pidfd_send_signal(&process, Signal::CONT);
    });
    waker.map(drop).map_err(|error| {
        // Nobody else would wake it.
        if let Ok(process) = again {
            let _ = pidfd_send_signal(&process, Signal::CONT);
        }
        Fault::new(FaultKind::System, format!("no thread could be started that continues the process: {error}"))
    })
}

fn refuse<T>(what: &str, detail: &str) -> Result<T, Fault> {
    Err(Fault::new(FaultKind::InvalidArgument, format!("{what}: {detail}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        disturbances: Disturbances,
    }

    fn read(line: &str) -> Result<Disturbances, String> {
        let words = std::iter::once("demo").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.disturbances).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_asked_for_is_read_and_reaches_the_ranks() {
        let line = "--kill 2@40 --kill 3@40 --stall 1@60:5s --stall 1@70:1500ms --join 100 --join 100 --join 80";
        let given = read(line).expect("read");
        given.check(5, 600).expect("possible");
        let passed_on = read(&given.arguments().map(|word| word.replace(' ', "")).collect::<Vec<_>>().join(" "));
        let passed_on = passed_on.expect("ranks read it");
        assert_eq!((&passed_on.kills, &passed_on.stalls), (&given.kills, &given.stalls));
        assert_eq!((&passed_on.joins, passed_on.joins()), (&vec![100, 100, 80], 3));
        assert_eq!([79, 80, 100].map(|step| given.joins_in(step)), [0, 1, 2]);
        assert!(given.stalls_ever(1) && !given.stalls_ever(2));
        assert!(given.kills_in(2, 40) && !given.kills_in(2, 41) && !given.kills_in(1, 40));
        assert_eq!(given.stalls_in(1, 70), Some(Duration::from_millis(1500)));
        assert_eq!(given.stalls_in(0, 60), None);
        assert!(given.any() && !read("").expect("read").any());
    }

    #[test]
    fn steps_are_drawn_out_while_a_process_is_due() {
        let given = read("--join 80 --join 100").expect("read");
        let pause = |step, came| given.pause_before(step, 599, came, |_| true).map(|pause| pause.as_millis());
        assert_eq!([pause(79, 0), pause(80, 0), pause(80, 1)], [None, Some(19), None]);
        assert_eq!([pause(100, 1), pause(300, 1), pause(300, 2)], [Some(20), Some(20), None]);
        assert_eq!(given.pause_before(100, 105, 0, |_| true), Some(JOIN_PAUSE_MAX));
        assert_eq!(read("").expect("read").pause_before(1, 2, 0, |_| true), None);
    }

    #[test]
    fn steps_are_drawn_out_while_a_rank_that_was_stopped_is_away() {
        let given = read("--stall 1@60:5s --stall 2@60:1s --stall 1@80:500ms").expect("read");
        let pause = |step, away| given.pause_before(step, 210, 0, |rank| rank != away).map(|pause| pause.as_millis());
        assert_eq!([pause(60, 1), pause(61, 1), pause(61, 3)], [None, Some(100), None]);
        assert_eq!([pause(61, 2), pause(81, 2)], [None; 2], "the others wait for it");
        assert_eq!(pause(210, 1), Some(100), "in all, for as long as it is stopped and as a process takes to join");
        assert_eq!(given.pause_before(61, 65, 0, |rank| rank != 1), Some(JOIN_PAUSE_MAX));
        assert_eq!(given.longest_stall(), Duration::from_secs(5));
        // Who is to be started counts too: the longer pause is made.
        let both = read("--stall 1@60:5s --join 60").expect("read");
        assert_eq!(both.pause_before(61, 210, 0, |rank| rank != 1), Some(Duration::from_millis(100)));
        assert!(both.pause_before(61, 210, 0, |_| true).is_some_and(|pause| pause < Duration::from_millis(100)));
    }

    #[test]
    fn what_is_malformed_is_refused_with_what_is_expected() {
        for (line, argument, expected) in [
            ("--kill 2", "--kill <R@S>", "RANK@STEP"),
            ("--kill x@3", "--kill <R@S>", "RANK@STEP"),
            ("--kill=-1@3", "--kill <R@S>", "RANK@STEP"),
            ("--kill 1@3:5s", "--kill <R@S>", "RANK@STEP"),
            ("--stall 1@60", "--stall <R@S:TIME>", "1@60:5s"),
            ("--stall 60:5s", "--stall <R@S:TIME>", "1@60:5s"),
            ("--stall 1@60:5", "--stall <R@S:TIME>", "300ms"),
            ("--stall 1@60:soon", "--stall <R@S:TIME>", "300ms"),
            ("--join x", "--join <S>", "invalid digit"),
            ("--join=-1", "--join <S>", "is not in"),
            ("--join 2@40", "--join <S>", "invalid digit"),
        ] {
            let error = read(line).expect_err(line);
            assert!(error.contains(argument) && error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_before_anything_starts() {
        for (line, words) in [
            ("--kill 4@40", ["--kill 4@40", "from 0 to 3"]),
            ("--kill 1@0", ["--kill 1@0", "from 1 to 100"]),
            ("--kill 1@101", ["--kill 1@101", "from 1 to 100"]),
            ("--stall 1@101:1s", ["--stall 1@101:1s", "from 1 to 100"]),
            ("--stall 9@1:1s", ["--stall 9@1:1s", "from 0 to 3"]),
            ("--kill 1@5 --kill 1@9", ["--kill 1@9", "killed twice"]),
            ("--kill 1@5 --stall 1@3:1s", ["--stall 1@3:1s", "killed too"]),
            ("--stall 1@3:1s --stall 1@3:2s", ["--stall 1@3:2s", "stopped twice"]),
            ("--stall 1@3:0s", ["--stall 1@3:0s", "up to 10m"]),
            ("--stall 1@3:11m", ["--stall 1@3:11m", "up to 10m"]),
            ("--kill 0@1 --kill 1@2 --kill 2@3 --kill 3@4", ["--kill:", "all 4 ranks"]),
            ("--kill 0@1 --kill 1@2 --kill 2@3 --stall 3@4:1s", ["--kill and --stall:", "left alone"]),
            ("--join 0", ["--join 0", "from 1 to 92"]),
            ("--join 93", ["--join 93", "from 1 to 92"]),
            ("--join 101", ["--join 101", "there are 100"]),
        ] {
            let fault = read(line).expect("well-formed").check(4, 100).expect_err(line);
            assert_eq!(fault.kind, FaultKind::InvalidArgument);
            assert!(words.iter().all(|word| fault.detail.contains(word)), "{line}: {fault}");
        }
        let fault = read("--join 1").expect("well-formed").check(4, 8).expect_err("no step is left");
        assert!(fault.detail.contains("more than 8 of them (--steps)"), "{fault}");
        let many = "--join 1 ".repeat(JOINS_MAX + 1);
        assert!(read(&many).expect("well-formed").check(4, 100).expect_err("many").detail.contains("64 at most"));
    }
}
