//! Starts jobs of real processes for the end-to-end tests, and collects what their ranks say.
//!
//! A rank is the binary `e2e-rank` with the name of a scenario. It ends with one line on standard output: `ok ...`, or
//! `fault KIND rank=R tensor=T: TEXT`.

pub mod broker;
pub mod dice;
pub mod model;
pub mod network;
pub mod steps;
pub mod sys;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use gradwire_control::{BrokerConfig, EmbeddedBroker, broker_token};
use gradwire_proto::Secret;
use gradwire_proto::secret::hex;
use rustix::process::{Pid, Signal, kill_process};

/// How long a whole job may take before a test gives up on it. Far above what any needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A job of real processes. Dropping it kills what still runs.
#[derive(Debug)]
pub struct Job {
    ranks: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

/// How one rank ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// The lines it printed.
    pub lines: Vec<String>,
}

impl Ended {
    /// Its last line.
    ///
    /// # Panics
    /// When it printed nothing.
    #[must_use]
    pub fn verdict(&self) -> &str {
        self.lines.last().unwrap_or_else(|| panic!("a rank printed nothing, and ended with {}", self.status))
    }

    /// Of each step that it made, or applied after others had made it: who contributed, and what it came to. Their lines
    /// are `step N by RANKS is HASH`, or begin with `applied`.
    #[must_use]
    pub fn steps(&self) -> BTreeMap<usize, (String, String)> {
        let step = |line: &String| {
            let mut words = line.strip_prefix("step ").or_else(|| line.strip_prefix("applied "))?.split(' ');
            let step = words.next()?.parse().ok()?;
            Some((step, (words.nth(1)?.to_owned(), words.nth(1)?.to_owned())))
        };
        self.lines.iter().filter_map(step).collect()
    }
}

/// What a job's ranks are started with.
#[derive(Debug)]
pub struct Plan {
    /// Variables for all ranks.
    pub variables: BTreeMap<String, String>,
    /// How many ranks.
    pub world_size: u32,
    broker: Option<EmbeddedBroker>,
}

impl Plan {
    /// A job with a fresh secret and an embedded broker of its own, over `transport`.
    ///
    /// # Panics
    /// When the broker cannot be started.
    #[must_use]
    pub fn new(world_size: u32, transport: &str) -> Self {
        Self::with_broker(world_size, transport, BrokerConfig::new(([127, 0, 0, 1], 0).into()))
    }

    /// The same, where the broker is configured like this but for its token.
    ///
    /// # Panics
    /// When the broker cannot be started.
    #[must_use]
    pub fn with_broker(world_size: u32, transport: &str, mut config: BrokerConfig) -> Self {
        let secret = Secret::from_bytes(random());
        let token = broker_token(&secret);
        config.token = Some(token.clone().into());
        let broker = EmbeddedBroker::start(config).unwrap_or_else(|fault| panic!("no broker: {fault}"));
        let (url, token) = (broker.url().to_owned(), Some(token));
        Self { broker: Some(broker), ..Self::at(&url, token, &secret, world_size, transport) }
    }

    /// A job with a fresh secret at a broker that admits everybody.
    #[must_use]
    pub fn over(broker: &str, world_size: u32, transport: &str) -> Self {
        Self::at(broker, None, &Secret::from_bytes(random()), world_size, transport)
    }

    fn at(broker: &str, token: Option<String>, secret: &Secret, world_size: u32, transport: &str) -> Self {
        let instance: [u8; 16] = random();
        let variables = [
            ("GRADWIRE_JOB", "e2e".to_owned()),
            ("GRADWIRE_INSTANCE", hex(&instance)),
            ("GRADWIRE_SECRET", secret.to_hex()),
            ("GRADWIRE_BROKER", broker.to_owned()),
            ("GRADWIRE_TRANSPORT", transport.to_owned()),
        ];
        let token = token.map(|token| ("GRADWIRE_BROKER_TOKEN", token));
        let variables = variables.into_iter().chain(token).map(|(name, value)| (name.to_owned(), value)).collect();
        Self { variables, world_size, broker: None }
    }

    /// Sets a variable for all ranks.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.variables.insert(name.to_owned(), value.to_string());
        self
    }

    /// The job's embedded broker.
    ///
    /// # Panics
    /// When it has none, or not any more.
    #[must_use]
    pub fn broker(&self) -> &EmbeddedBroker {
        self.broker.as_ref().expect("an embedded broker")
    }

    /// Ends the broker, as if it had died.
    pub fn stop_broker(&mut self) {
        drop(self.broker.take());
    }

    /// The command of one rank.
    #[must_use]
    pub fn command(&self, rank: u32, arguments: &[&str]) -> Command {
        self.command_of("e2e-rank", rank, arguments)
    }

    /// The command of one rank that is another binary.
    #[must_use]
    pub fn command_of(&self, name: &str, rank: u32, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary(name));
        command.args(arguments).env_clear().envs(&self.variables);
        if let Some(path) = std::env::var_os("PATH") {
            command.env("PATH", path);
        }
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.world_size.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", self.world_size.to_string());
        command
    }

    /// Starts all ranks with the same arguments.
    #[must_use]
    pub fn start(&self, arguments: &[&str]) -> Job {
        Job::start((0..self.world_size).map(|rank| self.command(rank, arguments)))
    }

    /// Starts all ranks and waits for them.
    #[must_use]
    pub fn run(&self, arguments: &[&str]) -> Vec<Ended> {
        self.start(arguments).wait()
    }
}

impl Job {
    /// Starts one process per command.
    ///
    /// # Panics
    /// When one cannot be started.
    pub fn start(commands: impl IntoIterator<Item = Command>) -> Self {
        Self { ranks: commands.into_iter().map(Running::start).collect() }
    }

    /// Starts one more process. Returns its place among the others.
    pub fn add(&mut self, command: Command) -> usize {
        self.ranks.push(Running::start(command));
        self.ranks.len() - 1
    }

    /// The process id of a rank.
    #[must_use]
    pub fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].child.id()
    }

    /// Sends a signal to a rank, which is still there, if only because nobody has waited for it.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_raw(self.pid(rank).cast_signed()).expect("a process");
        kill_process(pid, signal).expect("it is there");
    }

    /// Waits until the rank has printed a line that begins like this, and returns it.
    ///
    /// # Panics
    /// When it ends or [`PATIENCE`] passes before.
    pub fn wait_for_line(&mut self, rank: usize, beginning: &str) -> String {
        self.wait_for(rank, beginning, |line| line.starts_with(beginning))
    }

    /// Waits until the rank has printed such a line, and returns it. `what` says what is awaited.
    ///
    /// # Panics
    /// When it ends or [`PATIENCE`] passes before.
    pub fn wait_for(&mut self, rank: usize, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        let running = &mut self.ranks[rank];
        let limit = Instant::now() + PATIENCE;
        if let Some(line) = running.seen.iter().find(|line| is_it(line)) {
            return line.clone();
        }
        loop {
            match running.lines.recv_timeout(limit.saturating_duration_since(Instant::now())) {
                Ok(line) => running.seen.push(line),
                Err(_) => panic!("rank {rank} never printed '{what}', but {:?}", running.seen),
            }
            if let Some(line) = running.seen.last().filter(|line| is_it(line)) {
                return line.clone();
            }
        }
    }

    /// Waits for all ranks.
    ///
    /// # Panics
    /// When one still runs after [`PATIENCE`].
    #[must_use]
    pub fn wait(mut self) -> Vec<Ended> {
        let limit = Instant::now() + PATIENCE;
        std::mem::take(&mut self.ranks)
            .into_iter()
            .enumerate()
            .map(|(rank, running)| running.wait(rank, limit))
            .collect()
    }
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} could not be started: {error}"));
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Self { child, lines, seen: Vec::new() }
    }

    fn wait(mut self, rank: usize, limit: Instant) -> Ended {
        loop {
            match self.lines.recv_timeout(limit.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("rank {rank} still runs; it printed {:?}", self.seen),
            }
        }
        let status = self.child.wait().unwrap_or_else(|error| panic!("rank {rank} cannot be waited for: {error}"));
        Ended { status, lines: std::mem::take(&mut self.seen) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A number that the kernel tells of a running process, such as `VmRSS` (KiB) or `Threads`.
///
/// # Panics
/// When there is no such process, or no such number.
#[must_use]
pub fn status_of(pid: u32, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let value = |line: &str| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim().to_owned());
    let value = status.lines().find_map(value).expect("a line");
    value.trim_end_matches(" kB").parse().expect("a number")
}

/// A binary of this workspace, beside the running test.
///
/// # Panics
/// When it was not built: `cargo build --workspace` first.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap_or_else(|error| panic!("no path to this test: {error}"));
    path.pop();
    if path.ends_with("deps") {
        path.pop();
    }
    path.push(name);
    assert!(path.exists(), "{} is not there: run `cargo build --workspace` first", path.display());
    path
}

/// Random bytes.
///
/// # Panics
/// When the system has none.
#[must_use]
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).unwrap_or_else(|error| panic!("no random bytes: {error}"));
    bytes
}

/// Asserts that every rank ended well with the same verdict, and returns it.
///
/// # Panics
/// When they did not.
pub fn assert_same_verdict(ended: &[Ended]) -> String {
    for rank in ended {
        assert!(rank.status.success() && rank.verdict().starts_with("ok"), "{ended:#?}");
        assert_eq!(rank.verdict(), ended[0].verdict(), "{ended:#?}");
    }
    ended[0].verdict().to_owned()
}

/// Asserts that these ranks ended with a fault of this kind whose line holds all of `words`.
///
/// # Panics
/// When they did not.
pub fn assert_faults(ended: &[Ended], ranks: &[usize], kind: &str, words: &[&str]) {
    for rank in ranks {
        let verdict = ended[*rank].verdict();
        assert!(verdict.starts_with(&format!("fault {kind} ")), "rank {rank}: {ended:#?}");
        for word in words {
            assert!(verdict.contains(word), "rank {rank} does not say '{word}': {ended:#?}");
        }
    }
}
