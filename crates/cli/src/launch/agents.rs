//! The launcher's side of its agents: starting them here or by ssh, hearing them, ending them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use gradwire_control::Census;

use super::hosts::Host;
use super::output::{Flow, Outlet, Stream};
use super::report::{LaunchError, signal_name};
use crate::agent::wire::{self, Frames, Hello, Report};

/// Lines of an agent's or ssh's standard error that are kept for the error message.
const STDERR_LINES_MAX: usize = 10;
/// Seconds that ssh may take to connect.
const SSH_CONNECT_TIMEOUT_S: u32 = 10;
/// How long an agent that was told to go may take.
const FAREWELL: Duration = Duration::from_secs(3);

/// How remote hosts are reached.
#[derive(Clone, Debug)]
pub(crate) struct RemoteOptions {
    /// The ssh command and its arguments; `GRADWIRE_SSH` or `ssh`.
    pub(crate) ssh: Vec<OsString>,
    /// Where gradwire is there; otherwise where it is here, else on the `PATH`.
    pub(crate) gradwire: Option<String>,
    /// The address under which remote hosts reach this one; otherwise the one from which ssh reached them.
    pub(crate) address: Option<std::net::IpAddr>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { ssh: vec!["ssh".into()], gradwire: None, address: None }
    }
}

/// Something happened.
pub(super) enum Event {
    /// The agent of this index says something.
    Report(usize, Report),
    /// The agent of this index will say nothing more, and why if that is known.
    Ended(usize, Option<String>),
    /// The agents should hold output back, or go on.
    Flow(Flow),
    /// A signal came.
    Signal(i32),
    /// All output was handed on.
    OutputDone,
    /// One more rank is to be started.
    OneMore,
    /// The job's log was read, if it could be, after this rank was lost.
    Census(u32, Option<Census>),
    /// It was read, if it could be, to see whether the job can begin.
    Roll(Option<Census>),
    /// The same, to see which members are removed.
    Members(Option<Census>),
}

/// One agent. Dropped, it is told to end its ranks, and is killed if it does not go.
pub(super) struct AgentLink {
    pub(super) host: Host,
    pub(super) hello: Option<Hello>,
    pub(super) done: bool,
    pub(super) lost: bool,
    child: Child,
    input: Option<ChildStdin>,
    complaints: Arc<Mutex<VecDeque<String>>>,
    /// Closed by the thread that hears them, at their end.
    complained: Receiver<Infallible>,
}

impl AgentLink {
    /// Starts the agent of a host, and threads that hear it. Before it serves, it ends what those that were lost there
    /// have left behind.
    pub(super) fn start(
        index: usize,
        host: &Host,
        lost: &Leavings<'_>,
        remote: &RemoteOptions,
        events: &Sender<Event>,
        outlet: &Arc<Outlet>,
    ) -> Result<Self, LaunchError> {
        let mut command = agent(host, remote, &lost.arguments());
        let shown = command.get_program().to_string_lossy().into_owned();
        let failed = |what: &dyn std::fmt::Display| {
            LaunchError::failed(format!("cannot start the agent for {} with {shown}: {what}", host.name))
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error))?;
        let complaints = Arc::new(Mutex::new(VecDeque::new()));
        let (complains, complained) = mpsc::channel();
        if let Some(stderr) = child.stderr.take() {
            let (kept, host) = (Arc::clone(&complaints), host.name.clone());
            spawn("agent-stderr", move || {
                hear_complaints(stderr, &kept, &host);
                drop(complains);
            })
            .map_err(|error| failed(&error))?;
        }
        if let Some(stdout) = child.stdout.take() {
            let (events, outlet) = (events.clone(), Arc::clone(outlet));
            spawn("agent-stdout", move || {
                let why = hear(index, stdout, &events, &outlet).err();
                let why = why.filter(|error| error.kind() != io::ErrorKind::UnexpectedEof);
                let _ = events.send(Event::Ended(index, why.map(|error| error.to_string())));
            })
            .map_err(|error| failed(&error))?;
        }
        let input = child.stdin.take();
        Ok(Self { host: host.clone(), hello: None, done: false, lost: false, child, input, complaints, complained })
    }

    /// Tells the agent something. That it is gone is heard elsewhere.
    pub(super) fn tell(&mut self, command: &wire::Command) -> io::Result<()> {
        match &mut self.input {
            Some(input) => wire::send(input, command),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Whether it still can be told something.
    pub(super) const fn alive(&self) -> bool {
        !self.done && !self.lost
    }

    /// What is known about why the agent is gone: how it ended, and the last that it or ssh complained of. Waits a
    /// moment for both.
    pub(super) fn last_words(&mut self) -> String {
        self.input = None;
        let ended = match wait_until(&mut self.child, Instant::now() + Duration::from_secs(1)) {
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exited with code {code}"),
                (None, Some(signal)) => format!("was killed by {}", signal_name(signal)),
                (None, None) => "ended".to_owned(),
            },
            None => "closed its output".to_owned(),
        };
        // What it said last is perhaps not read yet.
        let _ = self.complained.recv_timeout(Duration::from_secs(1));
        let who = if self.host.local { "the agent" } else { "ssh" };
        let complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        if complaints.is_empty() {
            return format!("{who} {ended}");
        }
        format!("{who} {ended}: {}", complaints.iter().map(String::as_str).collect::<Vec<_>>().join("; "))
    }

    /// Ends the agent, or the ssh to it, at once. What it leaves is for [`sweep`].
    pub(super) fn kill(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = wait_until(&mut self.child, Instant::now() + Duration::from_secs(1));
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        self.input = None;
        if wait_until(&mut self.child, Instant::now() + FAREWELL).is_none() {
            self.kill();
        }
    }
}

/// Ends what the job left on the host of an agent that was lost. Best effort; bounded by `until`.
pub(super) fn sweep(host: &Host, remote: &RemoteOptions, instance_hex: &str, until: Instant) {
    let mut command = agent(host, remote, &["--sweep".to_owned(), instance_hex.to_owned()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Ok(mut child) = command.spawn()
        && wait_until(&mut child, until).is_none()
    {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// What agents that were lost may have left on their host: those with these numbers, of the job with this instance.
pub(super) struct Leavings<'a> {
    pub(super) instance_hex: &'a str,
    pub(super) agents: &'a [usize],
}

impl Leavings<'_> {
    fn arguments(&self) -> Vec<String> {
        if self.agents.is_empty() {
            return Vec::new();
        }
        let agents = self.agents.iter().map(|agent| format!("--in-place-of={agent}"));
        ["--sweep".to_owned(), self.instance_hex.to_owned()].into_iter().chain(agents).collect()
    }
}

fn agent(host: &Host, remote: &RemoteOptions, arguments: &[String]) -> Command {
    if host.local { local_agent(arguments) } else { remote_agent(&host.name, remote, arguments) }
}

/// This very binary, also when its file was replaced meanwhile. In a group of its own: a Ctrl-C at the terminal comes
/// to the launcher alone, which passes it on.
fn local_agent(arguments: &[String]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("gradwire").arg("__agent").args(arguments).process_group(0);
    command
}

fn remote_agent(host: &str, remote: &RemoteOptions, arguments: &[String]) -> Command {
    let mut words = remote.ssh.iter();
    let mut command = Command::new(words.next().map_or_else(|| OsString::from("ssh"), Clone::clone));
    // What the user gave comes first: of an option that is given twice, ssh takes the first.
    command.args(words);
    command.args(["-T", "-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={SSH_CONNECT_TIMEOUT_S}")]);
    command.args(["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "--", host]);
    command.arg(remote_script(remote, arguments)).process_group(0);
    command
}

/// What the remote shell, whichever it is, is to run. The arguments are words that no shell changes.
fn remote_script(remote: &RemoteOptions, arguments: &[String]) -> String {
    let arguments: String = arguments.iter().map(|argument| format!(" {argument}")).collect();
    let here = std::env::current_exe().ok();
    let script = match (&remote.gradwire, here.as_deref().and_then(|path| path.to_str())) {
        (Some(path), _) => format!("exec {} __agent{arguments}", quote(path)),
        (None, Some(path)) => {
            let path = quote(path);
            format!("if [ -x {path} ]; then exec {path} __agent{arguments}; fi; exec gradwire __agent{arguments}")
        }
        (None, None) => format!("exec gradwire __agent{arguments}"),
    };
    format!("exec sh -c {}", quote(&script))
}

fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Waits for a child with a deadline.
fn wait_until(child: &mut Child, deadline: Instant) -> Option<std::process::ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) | Err(_) => return None,
        }
    }
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// Hears an agent until its output ends or makes no sense.
fn hear(
    index: usize,
    mut stdout: std::process::ChildStdout,
    events: &Sender<Event>,
    outlet: &Outlet,
) -> io::Result<()> {
    wire::skip_to_greeting(&mut stdout)?;
    let mut frames = Frames::default();
    let mut bytes = vec![0; 64 * 1024];
    loop {
        match stdout.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => frames.feed(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        while let Some((kind, body)) = frames.next()? {
            let stream = match kind {
                wire::KIND_MESSAGE => {
                    let _ = events.send(Event::Report(index, wire::parse(body)?));
                    continue;
                }
                wire::KIND_STDOUT => Stream::Stdout,
                wire::KIND_STDERR => Stream::Stderr,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an unknown kind of message")),
            };
            let (rank, output) = wire::parse_output(body)?;
            if let Some(flow) = outlet.push(rank, stream, output) {
                let _ = events.send(Event::Flow(flow));
            }
        }
    }
}

/// Keeps the last lines that an agent or ssh complained of.
fn hear_complaints(stderr: std::process::ChildStderr, kept: &Mutex<VecDeque<String>>, host: &str) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(4096).read_until(b'\n', &mut line) {
            Ok(count) if count > 0 => {}
            _ => return,
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        tracing::debug!(host, "{text}");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == STDERR_LINES_MAX {
            kept.pop_front();
        }
        kept.push_back(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_script_survives_odd_paths() {
        let remote = RemoteOptions { gradwire: Some("/opt/it's here/gradwire".to_owned()), ..RemoteOptions::default() };
        let script = remote_script(&remote, &[]);
        // What the shell makes of it, with exec replaced by a program that shows its arguments.
        let shown = script.replacen("exec sh -c", "printf '%s'", 1);
        let output = Command::new("sh").arg("-c").arg(shown).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), r"exec '/opt/it'\''s here/gradwire' __agent");
    }

    #[test]
    fn options_of_the_user_come_before_ours_and_the_host_last() {
        let remote = RemoteOptions {
            ssh: vec!["ssh".into(), "-p".into(), "2222".into()],
            gradwire: Some("gradwire".to_owned()),
            address: None,
        };
        let command = remote_agent("me@host", &remote, &[]);
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words[..3], ["-p", "2222", "-T"]);
        assert_eq!(words[words.len() - 3..words.len() - 1], ["--", "me@host"]);
    }
}
