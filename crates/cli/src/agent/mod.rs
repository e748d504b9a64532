//! `gradwire __agent`: starts the ranks of one host for a launcher, passes their output on, and sees to it that none of
//! them, nor anything they started, outlives the job.
//!
//! One thread: a rank is killed by the kernel when the *thread* that started it ends, so that the agent's own death by
//! SIGKILL ends its ranks too. The agent is the subreaper of all that the ranks start: a descendant that left its
//! group, its session or its parent is still found below the agent and ended with the rest. The launcher's death shows
//! as the end of standard input. Exits are reported in the order in which they happened: epoll hands out ready
//! descriptors in that order.

pub(crate) mod exec;
pub(crate) mod processes;
mod ranks;
pub(crate) mod wire;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, set_child_subreaper};

use self::ranks::{RankProcess, Source};
use self::wire::{Command, End, Frames, Hello, Plan, Report};

/// How long what ranks left behind may take to end by itself once all of them have exited well.
const LEFTOVER_GRACE: Duration = Duration::from_secs(1);
/// Between SIGTERM and SIGKILL when nobody said otherwise.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// The same when the launcher is gone.
const ORPHAN_GRACE: Duration = Duration::from_millis(500);
/// How long a killed process may take to be gone, and output to end, before they are given up.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Between two looks at what still lives.
const TICK: Duration = Duration::from_millis(20);

/// Arguments of `gradwire __agent`.
#[derive(Debug, clap::Args)]
pub(crate) struct AgentArgs {
    /// End what is left of the job with this instance.
    #[arg(long)]
    sweep: Option<String>,
    /// Only what the agent of this number started, and then serve in its place; may be repeated.
    #[arg(long, requires = "sweep")]
    in_place_of: Vec<usize>,
}

/// Serves one launcher, over standard input and output, until it wants no more ranks and those that it had have ended.
pub(crate) fn run(args: &AgentArgs) -> ExitCode {
    if let Some(instance) = &args.sweep {
        let instance = format!("GRADWIRE_INSTANCE={instance}");
        if args.in_place_of.is_empty() {
            processes::sweep(&[instance]);
            return ExitCode::SUCCESS;
        }
        for agent in &args.in_place_of {
            processes::sweep(&[instance.clone(), format!("GRADWIRE_AGENT={agent}")]);
        }
    }
    match Agent::new().and_then(|mut agent| agent.serve()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gradwire agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// How far the end of the job is.
enum Phase {
    /// Ranks run, or will be started.
    Running,
    /// All ranks have exited well; something they started still lives.
    Leftovers { stop_at: Instant },
    /// SIGTERM was sent.
    Stopping { kill_at: Instant },
    /// SIGKILL is sent, again and again, until nothing lives.
    Killing { give_up_at: Instant },
}

struct Agent {
    epoll: OwnedFd,
    input: File,
    output: File,
    children: UnixStream,
    terminations: UnixStream,
    frames: Frames,
    ranks: Vec<RankProcess>,
    /// Statuses that were taken before the rank's own descriptor came up.
    statuses: HashMap<i32, End>,
    phase: Phase,
    /// Whether no more ranks will be started.
    closed: bool,
    paused: bool,
    launcher_gone: bool,
    /// The variable that tells this job from others, once a rank was started.
    instance: Option<String>,
    /// The ranks that were ever started here.
    known: HashSet<u32>,
    leftovers: u32,
    drain_until: Option<Instant>,
}

impl Agent {
    fn new() -> io::Result<Self> {
        set_child_subreaper(Some(rustix::process::getpid()))?;
        let (children, children_end) = UnixStream::pair()?;
        let (terminations, terminations_end) = UnixStream::pair()?;
        children.set_nonblocking(true)?;
        terminations.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGCHLD, children_end)?;
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
            signal_hook::low_level::pipe::register(signal, terminations_end.try_clone()?)?;
        }
        let agent = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            input: File::from(io::stdin().as_fd().try_clone_to_owned()?),
            output: File::from(io::stdout().as_fd().try_clone_to_owned()?),
            children,
            terminations,
            frames: Frames::default(),
            ranks: Vec::new(),
            statuses: HashMap::new(),
            phase: Phase::Running,
            closed: false,
            paused: false,
            launcher_gone: false,
            instance: None,
            known: HashSet::new(),
            leftovers: 0,
            drain_until: None,
        };
        let add = |fd: std::os::fd::BorrowedFd<'_>, source: Source| {
            epoll::add(&agent.epoll, fd, source.token(), epoll::EventFlags::IN)
        };
        add(agent.input.as_fd(), Source::Launcher)?;
        add(agent.children.as_fd(), Source::Children)?;
        add(agent.terminations.as_fd(), Source::Terminations)?;
        Ok(agent)
    }

    fn serve(&mut self) -> io::Result<()> {
        self.output.write_all(wire::GREETING)?;
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: hostname(),
            ssh_connection: std::env::var("SSH_CONNECTION").ok(),
            free_port: TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port(),
        };
        self.report(&Report::Hello(hello));
        let mut events = Vec::with_capacity(64);
        while !self.finished() {
            let timeout = self
                .timeout()
                .map(|wait| Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: i64::from(wait.subsec_nanos()) });
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    // Without events nothing can be watched: end everything rather than leave it alone.
                    processes::signal_all(&processes::descendants(std::process::id().cast_signed()), Signal::KILL);
                    return Err(error.into());
                }
            }
            for event in events.drain(..) {
                self.handle(Source::from_token(event.data));
            }
            self.advance();
        }
        self.report(&Report::Done { leftovers: self.leftovers });
        Ok(())
    }

    fn handle(&mut self, source: Option<Source>) {
        match source {
            Some(Source::Launcher) => self.read_launcher(),
            Some(Source::Children) => {
                drain(&mut self.children);
                let _ = self.reap();
            }
            Some(Source::Terminations) => {
                drain(&mut self.terminations);
                self.report(&Report::Ending);
                self.stop(STOP_GRACE);
            }
            Some(Source::Exit(index)) => self.rank_ended(index),
            Some(Source::Output(index, stream)) => self.read_output(index, stream),
            None => {}
        }
    }

    fn read_launcher(&mut self) {
        let mut bytes = [0; 16 * 1024];
        match self.input.read(&mut bytes) {
            Ok(count) if count > 0 => self.frames.feed(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Ok(_) | Err(_) => return self.lose_launcher(),
        }
        loop {
            let command = match self.frames.next() {
                Ok(None) => return,
                Ok(Some((wire::KIND_MESSAGE, body))) => wire::parse(body),
                Ok(Some(_)) => Err(io::ErrorKind::InvalidData.into()),
                Err(error) => Err(error),
            };
            match command {
                Ok(Command::Start(plan)) => self.start(&plan),
                Ok(Command::Close) => self.closed = true,
                Ok(Command::Signal { number, ranks }) => self.pass_on(number, ranks.as_deref()),
                Ok(Command::Stop { grace_ms }) => self.stop(Duration::from_millis(grace_ms)),
                Ok(Command::Pause) => self.pause(true),
                Ok(Command::Resume) => self.pause(false),
                Err(_) => return self.lose_launcher(),
            }
        }
    }

    /// Starts ranks, and says of each whether it runs.
    fn start(&mut self, plan: &Plan) {
        for (rank, variables) in &plan.ranks {
            let (rank, detail) = (*rank, self.start_rank(plan, *rank, variables).err());
            self.report(&match detail {
                None => Report::Started { rank },
                Some(error) => Report::NotStarted { rank, detail: error.to_string() },
            });
        }
    }

    fn start_rank(&mut self, plan: &Plan, rank: u32, variables: &[(String, String)]) -> io::Result<()> {
        if self.closed {
            return Err(io::Error::other("the agent there is about to end"));
        }
        if self.instance.is_none() {
            let pair = |(name, value): &(Vec<u8>, Vec<u8>)| [name, b"=".as_slice(), value].concat();
            let instance = plan.variables.iter().rfind(|(name, _)| name == b"GRADWIRE_INSTANCE").map(pair);
            self.instance = instance.and_then(|text| String::from_utf8(text).ok());
        }
        if !self.known.insert(rank) {
            self.end_what_it_started(rank);
        }
        let mut process = RankProcess::start(plan, rank, variables)?;
        // What is over makes room: a rank that fails again and again must not fill the table, nor use up descriptors.
        let index = self.ranks.iter().position(RankProcess::is_over).unwrap_or(self.ranks.len());
        let watched = process.watch_exit(&self.epoll, index);
        if watched.is_err() {
            // Its end would not be seen.
            let _ = kill_process_group(process.pid, Signal::KILL);
            process.end = Some(End::Unknown);
        }
        process.watch_output(&self.epoll, index, !self.paused);
        if index == self.ranks.len() {
            self.ranks.push(process);
        } else {
            self.ranks[index] = process;
        }
        watched
    }

    /// Kills what an earlier process of this rank left behind: it may hold ports, memory and files of the next one.
    fn end_what_it_started(&self, rank: u32) {
        // The instance too: a rank may itself have launched a job, which has ranks of its own.
        let Some(instance) = &self.instance else { return };
        let own = std::process::id().cast_signed();
        let left = processes::descendants_with(own, &[instance.clone(), format!("RANK={rank}")]);
        processes::signal_all(&left, Signal::KILL);
    }

    fn pass_on(&self, number: i32, only: Option<&[u32]>) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        for process in self.ranks.iter().filter(|process| only.is_none_or(|only| only.contains(&process.rank))) {
            if process.end.is_none() {
                let _ = kill_process_group(process.pid, signal);
            }
            if signal == Signal::KILL {
                self.end_what_it_started(process.rank);
            }
        }
    }

    /// Begins to end everything, or brings the end forward.
    fn stop(&mut self, grace: Duration) {
        // Whoever holds output back must not hold the end back.
        self.pause(false);
        self.closed = true;
        let at = Instant::now() + grace;
        match &mut self.phase {
            Phase::Running | Phase::Leftovers { .. } => {
                if !grace.is_zero() {
                    let own = std::process::id().cast_signed();
                    processes::signal_all(&processes::descendants(own), Signal::TERM);
                }
                self.phase = Phase::Stopping { kill_at: at };
            }
            Phase::Stopping { kill_at } => *kill_at = at.min(*kill_at),
            Phase::Killing { .. } => {}
        }
    }

    fn lose_launcher(&mut self) {
        if !self.launcher_gone {
            self.launcher_gone = true;
            let _ = epoll::delete(&self.epoll, &self.input);
            self.stop(ORPHAN_GRACE);
        }
    }

    fn pause(&mut self, paused: bool) {
        let stopping = matches!(self.phase, Phase::Stopping { .. } | Phase::Killing { .. });
        if paused == self.paused || (paused && stopping) {
            return;
        }
        self.paused = paused;
        self.drain_until = None;
        for (index, process) in self.ranks.iter().enumerate() {
            process.watch_output(&self.epoll, index, !paused);
        }
    }

    /// Takes the status of every child that has ended: ranks, and the orphans that came to this process. Returns
    /// whether anything lives below this process: whatever a descendant does, as long as it lives, it or an ancestor
    /// of it is a child of this process. A walk through /proc could miss one that forks meanwhile.
    fn reap(&mut self) -> bool {
        let alive = loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    self.statuses.insert(pid.as_raw_nonzero().get(), end_of(status));
                }
                Ok(None) => break true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => break false,
            }
        };
        let ranks: Vec<i32> = self.ranks.iter().map(|process| process.pid.as_raw_nonzero().get()).collect();
        self.statuses.retain(|pid, _| ranks.contains(pid));
        alive
    }

    fn rank_ended(&mut self, index: usize) {
        let Some(process) = self.ranks.get_mut(index).filter(|process| process.end.is_none()) else { return };
        let pid = process.pid;
        let end = self.statuses.remove(&pid.as_raw_nonzero().get()).unwrap_or_else(|| take_status(pid));
        process.end = Some(end);
        process.unwatch_exit(&self.epoll);
        let rank = process.rank;
        self.report(&Report::Ended { rank, end });
    }

    fn read_output(&mut self, index: usize, stream: usize) {
        let Some(process) = self.ranks.get_mut(index) else { return };
        let rank = process.rank;
        let mut bytes = [0; wire::OUTPUT_BYTES_MAX];
        let count = process.read_output(&self.epoll, stream, &mut bytes);
        if count > 0 && !self.launcher_gone {
            let kind = if stream == 0 { wire::KIND_STDOUT } else { wire::KIND_STDERR };
            if wire::send_output(&mut self.output, kind, rank, &bytes[..count]).is_err() {
                self.lose_launcher();
            }
        }
    }

    fn report(&mut self, report: &Report) {
        if !self.launcher_gone && wire::send(&mut self.output, report).is_err() {
            self.lose_launcher();
        }
    }

    /// Moves towards the end as far as the time and what lives allow.
    fn advance(&mut self) {
        let now = Instant::now();
        let own = std::process::id().cast_signed();
        let ended_well = matches!(self.phase, Phase::Running) && self.closed && self.all_ended();
        let left_behind = ended_well && self.reap();
        match self.phase {
            Phase::Running if left_behind => self.phase = Phase::Leftovers { stop_at: now + LEFTOVER_GRACE },
            Phase::Leftovers { stop_at } if now >= stop_at => {
                self.leftovers = u32::try_from(processes::descendants(own).len()).unwrap_or(u32::MAX);
                self.stop(STOP_GRACE);
            }
            Phase::Stopping { kill_at } if now >= kill_at => {
                self.phase = Phase::Killing { give_up_at: now + LAST_WAIT };
                processes::signal_all(&processes::descendants(own), Signal::KILL);
            }
            Phase::Killing { .. } => processes::signal_all(&processes::descendants(own), Signal::KILL),
            _ => {}
        }
    }

    /// Whether all is over: nothing lives, and what was written has been read (or time for it is up).
    fn finished(&mut self) -> bool {
        let now = Instant::now();
        if let Phase::Killing { give_up_at } = self.phase
            && now >= give_up_at
        {
            return true;
        }
        if !self.closed || !self.all_ended() || self.reap() {
            return false;
        }
        if self.ranks.iter().all(RankProcess::output_ended) {
            return true;
        }
        !self.paused && now >= *self.drain_until.get_or_insert(now + LAST_WAIT)
    }

    fn all_ended(&self) -> bool {
        self.ranks.iter().all(|process| process.end.is_some())
    }

    fn timeout(&self) -> Option<Duration> {
        let waiting_for_the_end = self.closed && self.all_ended() && !self.paused;
        match self.phase {
            Phase::Running if !waiting_for_the_end => None,
            Phase::Stopping { kill_at } if !waiting_for_the_end => {
                Some(kill_at.saturating_duration_since(Instant::now()))
            }
            _ => Some(TICK),
        }
    }
}

fn take_status(pid: Pid) -> End {
    match rustix::process::waitpid(Some(pid), WaitOptions::NOHANG) {
        Ok(Some((_, status))) => end_of(status),
        Ok(None) | Err(_) => End::Unknown,
    }
}

fn end_of(status: rustix::process::WaitStatus) -> End {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => End::Code(code),
        (None, Some(signal)) => End::Signal(signal),
        (None, None) => End::Unknown,
    }
}

fn drain(stream: &mut UnixStream) {
    let mut bytes = [0; 256];
    while matches!(stream.read(&mut bytes), Ok(count) if count == bytes.len()) {}
}

/// The name of this host, as it calls itself.
pub(crate) fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}
