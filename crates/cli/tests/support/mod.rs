//! Running the launcher in tests, always with a deadline, and seeing what it leaves behind.
#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Nothing in these tests may take longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// What a finished launcher left.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Outcome {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Standard output as sorted lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<_> = String::from_utf8_lossy(&self.stdout).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// A running launcher. Its ranks carry a marker in their environment, by which they are found wherever they are.
pub(crate) struct Launcher {
    child: Child,
    marker: String,
    started: Instant,
    lines: Receiver<String>,
    said: Arc<Mutex<Vec<u8>>>,
    stdout: Option<thread::JoinHandle<Vec<u8>>>,
    stderr: Option<thread::JoinHandle<()>>,
}

/// A `gradwire` command, without what an outer job may have set.
pub(crate) fn gradwire() -> Command {
    // Where the tests run under nohup, hang-ups are ignored, and gradwire would leave it at that.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_gradwire")]);
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if ["GRADWIRE_", "OMPI_", "PMI", "SLURM_"].iter().any(|prefix| name_text.starts_with(prefix))
            || ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].contains(&&*name_text)
        {
            command.env_remove(&name);
        }
    }
    command
}

impl Launcher {
    /// Starts `gradwire launch` with these arguments, and a shell script for each rank.
    pub(crate) fn start(arguments: &[&str], script: &str) -> Self {
        Self::start_command(arguments, &["sh", "-c", script])
    }

    pub(crate) fn start_command(arguments: &[&str], command: &[&str]) -> Self {
        let marker =
            format!("MARKER={:x}-{:?}", std::process::id(), Instant::now()).replace([' ', '{', '}', ':', ','], "_");
        let mut launch = gradwire();
        launch.arg("launch").args(arguments).arg("--env").arg(&marker).arg("--").args(command);
        let mut child = launch.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let stdout = child.stdout.take().unwrap();
        let stdout = thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut all = Vec::new();
            loop {
                let before = all.len();
                if reader.read_until(b'\n', &mut all).unwrap_or(0) == 0 {
                    return all;
                }
                let _ = sender.send(String::from_utf8_lossy(&all[before..]).trim_end().to_owned());
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&said);
        let stderr = thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut piece) {
                heard.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        Self { child, marker, started: Instant::now(), lines, said, stdout: Some(stdout), stderr: Some(stderr) }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Waits for a line of standard output that contains this.
    pub(crate) fn await_line(&self, text: &str) -> String {
        loop {
            let rest = DEADLINE.saturating_sub(self.started.elapsed());
            let line = self.lines.recv_timeout(rest).unwrap_or_else(|_| panic!("no line with '{text}'"));
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Waits until standard error contains this.
    pub(crate) fn await_error(&self, text: &str) {
        await_condition(text, || self.errors().contains(text).then_some(()));
    }

    pub(crate) fn errors(&self) -> String {
        String::from_utf8_lossy(&self.said.lock().unwrap()).into_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// Processes of the job: those with the marker in their environment.
    pub(crate) fn processes(&self) -> Vec<i32> {
        all_processes()
            .filter(|pid| {
                fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| {
                    environment.split(|byte| *byte == 0).any(|entry| entry == self.marker.as_bytes())
                })
            })
            .collect()
    }

    /// The agents that the launcher started here.
    pub(crate) fn agents(&self) -> Vec<i32> {
        children(self.pid())
    }

    /// Waits until the launcher has ended, and then until no process of the job is left.
    pub(crate) fn finish(mut self) -> Outcome {
        let status = await_condition("the launcher ends", || self.child.try_wait().unwrap());
        let took = self.started.elapsed();
        let left = || if self.processes().is_empty() { Some(()) } else { None };
        // The launcher returns after its ranks; only where it was killed is there anything to wait for.
        if status.code().is_some() {
            assert_eq!(left(), Some(()), "left behind: {:?}", self.processes());
        }
        await_condition("every process of the job ends", left);
        let stdout = self.stdout.take().unwrap().join().unwrap();
        self.stderr.take().unwrap().join().unwrap();
        let stderr = self.errors();
        Outcome { status, stdout, stderr, took }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.processes().into_iter().for_each(|pid| kill(pid, Signal::KILL));
        }
    }
}

/// Runs `gradwire launch` to its end.
pub(crate) fn launch(arguments: &[&str], script: &str) -> Outcome {
    Launcher::start(arguments, script).finish()
}

/// Waits until a condition holds.
pub(crate) fn await_condition<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn kill(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

pub(crate) fn all_processes() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The children of a process, by the kernel's list.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let list = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    found
}
