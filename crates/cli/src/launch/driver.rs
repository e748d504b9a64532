//! One job from its first agent to its last: the order of things, and the deadlines.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gradwire_control::{BrokerAccess, Token};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::agents::{AgentLink, Event, RemoteOptions};
use super::output::{Flow, Line, Outlet, Tail};
use super::report::{Failure, LaunchError, Report, signal_name};
use super::signals::SignalWatch;
use super::variables::{self, Identity};
use super::{LaunchPlan, hosts};
use crate::agent::wire::{Command, End, Report as AgentReport};
use crate::args::BrokerChoice;
use crate::broker::RunningBroker;

/// How long all agents together may take to answer. Longer than ssh's own time-out, so that its message is seen.
const HELLO_TIME_MAX: Duration = Duration::from_secs(15);
/// Between SIGTERM and SIGKILL for the ranks that a failure leaves behind.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// What agents get on top of that before they are ended themselves. All ranks are gone within 5 s of a failure.
const AGENT_GRACE: Duration = Duration::from_secs(2);
/// How long what a lost agent left behind may take to be found and ended.
const SWEEP_TIME_MAX: Duration = Duration::from_secs(3);
/// After a signal that ends programs was passed on: how long others may take once the first rank has ended by it, and
/// how long a bad end is put down to it.
const INTERRUPT_GRACE: Duration = Duration::from_secs(10);
/// A second SIGINT within this time ends everything at once.
const SECOND_INTERRUPT: Duration = Duration::from_secs(2);

/// Starts the ranks of a plan and returns when the last of them, and all that they started, has ended.
///
/// Lines that ranks write go to the sink, on a thread of its own, one at a time; all of them have when this returns,
/// unless a signal came while the sink was stuck. While it runs, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are
/// passed on to the ranks. Nothing else is printed.
///
/// # Errors
/// When not every rank could be started: a host cannot be reached, the broker does not start, the plan makes no sense.
/// Nothing runs then.
pub(crate) fn run(plan: LaunchPlan, sink: impl FnMut(Line<'_>) + Send + 'static) -> Result<Report, LaunchError> {
    let placements = hosts::place(plan.ranks, &plan.hosts)?;
    let (sender, events) = mpsc::channel();
    let no_thread = |error: io::Error| LaunchError::failed(format!("cannot start a thread: {error}"));
    let _watch = SignalWatch::start(sender.clone()).map_err(no_thread)?;
    let output = Output::start(sink, &sender).map_err(no_thread)?;
    let given = gradwire::env::secret(&crate::job::variable).map_err(|fault| LaunchError::usage(fault.detail))?;
    let identity = Identity::fresh(plan.job.as_deref(), given)?;
    let mut driver = Driver {
        agents: Vec::with_capacity(placements.len()),
        events,
        remote: plan.remote.clone(),
        instance_hex: identity.instance_hex(),
        ends: vec![None; plan.ranks as usize],
        ranks_min: plan.ranks_min,
        report: Report::default(),
        stopping: false,
        stop_at: None,
        kill_at: None,
        interrupt: None,
    };
    for (index, placement) in placements.into_iter().enumerate() {
        driver.agents.push(AgentLink::start(index, placement, &plan.remote, &sender, &output.outlet)?);
    }
    driver.await_hellos()?;
    // Lives as long as the ranks do.
    let _broker = driver.start_ranks(&plan, &identity)?;
    driver.serve();
    let tails = driver.finish_output(output);
    Ok(driver.into_report(tails))
}

/// The thread that hands lines to the sink. Dropped, it is told that no more will come.
struct Output {
    outlet: Arc<Outlet>,
    pump: Option<JoinHandle<HashMap<u32, Tail>>>,
}

impl Output {
    fn start(sink: impl FnMut(Line<'_>) + Send + 'static, events: &Sender<Event>) -> io::Result<Self> {
        let outlet = Outlet::new();
        let (pumped, events) = (Arc::clone(&outlet), events.clone());
        let pump = std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            let tails = pumped.pump(sink, |flow| drop(events.send(Event::Flow(flow))));
            let _ = events.send(Event::OutputDone);
            tails
        })?;
        Ok(Self { outlet, pump: Some(pump) })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.outlet.finish();
    }
}

struct Driver {
    agents: Vec<AgentLink>,
    events: Receiver<Event>,
    remote: RemoteOptions,
    instance_hex: String,
    /// How each rank ended.
    ends: Vec<Option<End>>,
    /// With at least so many the others go on without ranks that fail.
    ranks_min: Option<u32>,
    report: Report,
    /// Whether the agents were told to end their ranks.
    stopping: bool,
    /// When they will be.
    stop_at: Option<Instant>,
    /// When agents that are still there are ended themselves.
    kill_at: Option<Instant>,
    /// The last signal of those that end programs, and when it was passed on.
    interrupt: Option<(i32, Instant)>,
}

impl Driver {
    fn await_hellos(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + HELLO_TIME_MAX;
        while let Some(waiting) = self.agents.iter().position(|agent| agent.hello.is_none()) {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Report(index, AgentReport::Hello(hello))) => {
                    let agent = &mut self.agents[index];
                    if hello.version != env!("CARGO_PKG_VERSION") {
                        return Err(LaunchError::failed(format!(
                            "{} has gradwire {}, this is {}: install the same version, or name another binary there \
                             with --remote-gradwire",
                            agent.placement.host,
                            hello.version,
                            env!("CARGO_PKG_VERSION")
                        )));
                    }
                    agent.hello = Some(hello);
                }
                Ok(Event::Ended(index, why)) => return Err(no_agent(&mut self.agents[index], why)),
                Ok(Event::Signal(signal)) => return Err(LaunchError::interrupted(signal)),
                Ok(Event::Report(..) | Event::Flow(_) | Event::OutputDone) => {}
                Err(_) => {
                    let agent = &mut self.agents[waiting];
                    agent.kill();
                    let words = agent.last_words();
                    let (host, seconds) = (&agent.placement.host, HELLO_TIME_MAX.as_secs());
                    return Err(LaunchError::failed(format!(
                        "no answer from gradwire on {host} within {seconds} s ({words}): see what `ssh {host} gradwire \
                         --version` does"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Starts the job's broker, unless there is one, and tells every agent what to run.
    fn start_ranks(&mut self, plan: &LaunchPlan, identity: &Identity) -> Result<Option<RunningBroker>, LaunchError> {
        let own = variables::own_address(&self.agents, &plan.remote)?;
        let (broker, access) = match &plan.broker {
            BrokerChoice::Url(url) => (None, BrokerAccess::new(url)),
            BrokerChoice::Embedded => {
                let token = gradwire_proto::secret::hex(&identity.secret.proof("broker token", &[&identity.instance]));
                let broker = RunningBroker::start_for_job(own, token.clone())
                    .map_err(|fault| LaunchError::failed(format!("the embedded broker does not start: {fault}")))?;
                let access = BrokerAccess::new(broker.url()).with_token(Token::Text(token));
                (Some(broker), access)
            }
        };
        let plans = variables::plans(plan, identity, &access, &self.agents, own)?;
        for (index, plan) in plans.into_iter().enumerate() {
            if self.agents[index].tell(&Command::Start(plan)).is_err() {
                return Err(no_agent(&mut self.agents[index], None));
            }
        }
        Ok(broker)
    }

    /// Goes on until no agent is left.
    fn serve(&mut self) {
        while self.agents.iter().any(|agent| !agent.done && !agent.lost) {
            let now = Instant::now();
            if self.stop_at.is_some_and(|at| now >= at) {
                self.stop(STOP_GRACE);
            }
            if self.kill_at.is_some_and(|at| now >= at) {
                for agent in self.agents.iter_mut().filter(|agent| !agent.done && !agent.lost) {
                    agent.kill();
                    agent.lost = true;
                }
                break;
            }
            let wait = self.stop_at.into_iter().chain(self.kill_at).min().map(|at| at.saturating_duration_since(now));
            match self.events.recv_timeout(wait.unwrap_or(Duration::from_secs(3600))) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                // Cannot be while this end holds the output thread's sender; if it is, nothing more will be heard.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let until = Instant::now() + SWEEP_TIME_MAX;
        for agent in self.agents.iter().filter(|agent| agent.lost) {
            agent.sweep(&self.remote, &self.instance_hex, until);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Report(index, AgentReport::Ended { rank, end }) => self.rank_ended(index, rank, end),
            Event::Report(index, AgentReport::NotStarted { rank, detail }) => {
                let host = self.agents[index].placement.host.clone();
                self.fail(Failure::NotStarted { rank, host, detail });
            }
            Event::Report(index, AgentReport::Done { leftovers }) => {
                self.agents[index].done = true;
                self.report.leftovers = self.report.leftovers.saturating_add(leftovers);
            }
            Event::Report(_, AgentReport::Hello(_) | AgentReport::Started) | Event::OutputDone => {}
            Event::Ended(index, why) => self.agent_ended(index, why),
            Event::Flow(flow) => self.tell_all(|| match flow {
                Flow::Pause => Command::Pause,
                Flow::Resume => Command::Resume,
            }),
            Event::Signal(signal) => self.signal(signal),
        }
    }

    fn rank_ended(&mut self, index: usize, rank: u32, end: End) {
        let agent = &self.agents[index];
        let (known, host) = (agent.has(rank), agent.placement.host.clone());
        let Some(slot) = self.ends.get_mut(rank as usize).filter(|slot| known && slot.is_none()) else { return };
        *slot = Some(end);
        if end.success() || self.stopping {
            return;
        }
        let interrupted =
            self.interrupt.filter(|(signal, at)| end == End::Signal(*signal) || at.elapsed() < INTERRUPT_GRACE);
        match interrupted {
            Some((signal, _)) => {
                self.report.interrupted = Some(signal);
                self.stop_at.get_or_insert(Instant::now() + INTERRUPT_GRACE);
            }
            None if self.can_go_on() => self.report.lost.push((rank, host, end)),
            None => self.fail(Failure::Rank { rank, host, end }),
        }
    }

    /// Whether enough ranks are left that run, or have ended well.
    fn can_go_on(&self) -> bool {
        let left = self.ends.iter().filter(|end| end.is_none_or(|end| end.success())).count();
        self.ranks_min.is_some_and(|least| left >= least as usize)
    }

    fn agent_ended(&mut self, index: usize, why: Option<String>) {
        let agent = &mut self.agents[index];
        if agent.done || agent.lost {
            return;
        }
        agent.lost = true;
        let words = agent.last_words();
        let detail = why.map_or(words.clone(), |why| format!("{why} ({words})"));
        let (host, ranks) = (agent.placement.host.clone(), agent.ranks());
        agent.kill();
        let mut gone = Vec::new();
        for rank in ranks.clone() {
            let end = &mut self.ends[rank as usize];
            if end.is_none() {
                *end = Some(End::Unknown);
                gone.push((rank, host.clone(), End::Unknown));
            }
        }
        if self.can_go_on() && !self.stopping {
            self.report.lost.append(&mut gone);
        } else {
            self.fail(Failure::AgentLost { host, ranks, detail });
        }
    }

    /// Ends the job because of this, unless it is ending already.
    fn fail(&mut self, failure: Failure) {
        if self.stopping {
            return;
        }
        if self.report.interrupted.is_none() {
            self.report.failure = Some(failure);
        }
        self.stop(STOP_GRACE);
    }

    fn stop(&mut self, grace: Duration) {
        self.stopping = true;
        self.stop_at = None;
        let kill_at = Instant::now() + grace + AGENT_GRACE;
        self.kill_at = Some(self.kill_at.map_or(kill_at, |at| at.min(kill_at)));
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.tell_all(|| Command::Stop { grace_ms });
    }

    fn signal(&mut self, number: i32) {
        let now = Instant::now();
        let again = self.interrupt.is_some_and(|(last, at)| last == SIGINT && now - at < SECOND_INTERRUPT);
        if number == SIGINT && again {
            self.report.interrupted = Some(SIGINT);
            self.stop(Duration::ZERO);
            return;
        }
        if [SIGINT, SIGTERM, SIGHUP].contains(&number) {
            self.interrupt = Some((number, now));
        }
        tracing::debug!("passing {} on to the ranks", signal_name(number));
        self.tell_all(|| Command::Signal { number });
    }

    fn tell_all(&mut self, command: impl Fn() -> Command) {
        for agent in self.agents.iter_mut().filter(|agent| !agent.done && !agent.lost) {
            // One that is gone shows as an event of its own.
            let _ = agent.tell(&command());
        }
    }

    /// Waits until all that the ranks wrote was handed on. The reader may take its time, as with any program that
    /// writes to a pipe; a signal ends the wait.
    fn finish_output(&mut self, mut output: Output) -> HashMap<u32, Tail> {
        output.outlet.finish();
        loop {
            match self.events.recv() {
                Ok(Event::OutputDone) => break,
                Ok(Event::Signal(signal)) if [SIGINT, SIGTERM, SIGHUP].contains(&signal) => return HashMap::new(),
                Ok(_) => {}
                Err(_) => return HashMap::new(),
            }
        }
        output.pump.take().and_then(|pump| pump.join().ok()).unwrap_or_default()
    }

    fn into_report(mut self, mut tails: HashMap<u32, Tail>) -> Report {
        let mut report = std::mem::take(&mut self.report);
        let blamed = match &report.failure {
            Some(Failure::Rank { rank, .. } | Failure::NotStarted { rank, .. }) => Some(*rank),
            _ => None,
        };
        report.last_lines = blamed.and_then(|rank| tails.remove(&rank)).map(Tail::into_lines).unwrap_or_default();
        report.others = (0_u32..)
            .zip(&self.ends)
            .map(|(rank, end)| (rank, end.unwrap_or(End::Unknown)))
            .filter(|(rank, end)| !end.success() && blamed != Some(*rank))
            .filter(|(rank, _)| !report.lost.iter().any(|(lost, ..)| lost == rank))
            .collect();
        report
    }
}

/// An agent did not come up.
fn no_agent(agent: &mut AgentLink, why: Option<String>) -> LaunchError {
    let words = agent.last_words();
    let host = &agent.placement.host;
    let why = why.map(|why| format!("{why}; ")).unwrap_or_default();
    let remedy = if agent.placement.local {
        String::new()
    } else if words.contains("exited with code 127") || words.contains("exited with code 126") {
        ": install gradwire there, or say where it is with --remote-gradwire PATH".to_owned()
    } else {
        format!(": `ssh {host} gradwire --version` has to work without a password")
    };
    LaunchError::failed(format!("cannot start gradwire on {host}: {why}{words}{remedy}"))
}
