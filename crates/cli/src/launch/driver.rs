//! One job from its first agent to its last: the order of things, and the deadlines. What only jobs do whose ranks come
//! and go is in `elastic.rs`.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use gradwire_control::{BrokerAccess, Token};
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM};

use super::agents::{self, AgentLink, Event, RemoteOptions};
use super::beginning::Beginning;
use super::elastic::Site;
use super::hung::{self, Hung};
use super::journal::{Happening, Journal};
use super::output::{Flow, Line, Outlet, Output, Tail};
use super::prospects::Prospects;
use super::ranks::{Ranks, Spot, State};
use super::report::{Failure, LaunchError, Report, Words, signal_name};
use super::signals::SignalWatch;
use super::starter::Starter;
use super::vanished::Vanished;
use super::variables::{self, Identity, Recipe};
use super::{HostsFile, LaunchPlan, hosts};
use crate::agent::wire::{Command, End, Hello, Report as AgentReport};
use crate::args::BrokerChoice;
use crate::broker::RunningBroker;

/// How long an agent may take to answer. Longer than ssh's own time-out, so that its message is seen.
pub(super) const HELLO_TIME_MAX: Duration = Duration::from_secs(15);
/// Between SIGTERM and SIGKILL for the ranks that a failure leaves behind.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// What agents get on top of that before they are ended themselves. All ranks are gone within 5 s of a failure.
const AGENT_GRACE: Duration = Duration::from_secs(2);
/// How long what a lost agent left behind may take to be found and ended.
const SWEEP_TIME_MAX: Duration = Duration::from_secs(3);
/// SIGTERM so soon after the first is none by which somebody wants to say more: coreutils' timeout, and schedulers, send it to
/// a process and then to its group. A person at a keyboard sends SIGINT.
const SIGNAL_SETTLES: Duration = Duration::from_millis(500);
/// After SIGHUP was passed on: how long others may take once the first rank has ended by it, and how long a bad end is
/// put down to it.
const HANGUP_GRACE: Duration = Duration::from_secs(10);

/// Starts the ranks of a plan and returns when the last of them, and all that they started, has ended.
///
/// Lines that ranks write go to the sink, on a thread of its own, one at a time; all of them have when this returns,
/// unless a signal came while the sink was stuck. With each comes the way to ask for one more rank. While it runs, SIGINT
/// and SIGTERM are passed on to the ranks as SIGTERM, and SIGHUP, SIGUSR1 and SIGUSR2 as they are. Nothing else is printed,
/// but for a job with `ranks_min`: what becomes of its ranks and hosts goes to standard error.
///
/// # Errors
/// When not every rank could be started: a host cannot be reached, the broker does not start, the plan makes no sense.
/// Nothing runs then.
pub(crate) fn run(
    plan: LaunchPlan,
    mut sink: impl FnMut(Line<'_>, &Starter) + Send + 'static,
) -> Result<Report, LaunchError> {
    let hosts = hosts::find(plan.ranks, &plan.hosts)?;
    let (sender, events) = mpsc::channel();
    let no_thread = |error: io::Error| LaunchError::failed(format!("cannot start a thread: {error}"));
    let _watch = SignalWatch::start(sender.clone()).map_err(no_thread)?;
    let starter = Starter::new(sender.clone());
    let output = Output::start(move |line| sink(line, &starter), &sender).map_err(no_thread)?;
    let given = gradwire::env::secret(&crate::job::variable).map_err(|fault| LaunchError::usage(fault.detail))?;
    let identity = Identity::fresh(plan.job.as_deref(), given)?;
    let counts = hosts::distribute(plan.ranks, &hosts);
    let now = Instant::now();
    let mut driver = Driver {
        agents: Vec::new(),
        sites: hosts.into_iter().zip(&counts).map(|(host, count)| Site::new(host, *count, now)).collect(),
        ranks: Ranks::new(plan.ranks_max.unwrap_or(plan.ranks), plan.restarts),
        ranks_min: plan.ranks_min,
        hosts_file: plan.hosts_file.clone().filter(|_| plan.ranks_min.is_some()),
        grace: plan.grace,
        events,
        sender,
        outlet: Arc::clone(&output.outlet),
        remote: plan.remote.clone(),
        instance_hex: identity.instance_hex(),
        recipe: None,
        reachable: true,
        journal: Journal::start(plan.events.as_deref())?,
        report: Report::default(),
        paused: false,
        closed: false,
        stopping: false,
        stop_at: None,
        kill_at: None,
        added: HashSet::new(),
        poll_at: now,
        idle_since: None,
        interrupt: None,
        prospects: Prospects::default(),
        beginning: Beginning::default(),
        hung: Hung::new(plan.patience),
        vanished: Vanished::default(),
    };
    for site in (0..counts.len()).filter(|site| counts[*site] > 0) {
        driver.connect(site)?;
    }
    driver.await_hellos()?;
    // Lives as long as the ranks do.
    let _broker = driver.start_ranks(&plan, &identity)?;
    driver.serve();
    let tails = driver.finish_output(output);
    Ok(driver.into_report(tails))
}

pub(super) struct Driver {
    pub(super) agents: Vec<AgentLink>,
    /// The hosts of the job; those that were taken away too, without slots.
    pub(super) sites: Vec<Site>,
    pub(super) ranks: Ranks,
    /// With at least so many the others go on without ranks that fail.
    pub(super) ranks_min: Option<u32>,
    pub(super) hosts_file: Option<HostsFile>,
    pub(super) grace: Duration,
    events: Receiver<Event>,
    pub(super) sender: Sender<Event>,
    pub(super) outlet: Arc<Outlet>,
    pub(super) remote: RemoteOptions,
    pub(super) instance_hex: String,
    /// What ranks get, once the first agents have answered.
    recipe: Option<Recipe>,
    /// Whether ranks on other hosts can reach the job's broker.
    pub(super) reachable: bool,
    pub(super) journal: Journal,
    pub(super) report: Report,
    /// Whether the agents were told to read no more output.
    paused: bool,
    /// Whether no further rank will be started.
    pub(super) closed: bool,
    /// Whether the agents were told to end their ranks.
    pub(super) stopping: bool,
    /// When they will be.
    stop_at: Option<Instant>,
    /// When agents that are still there are ended themselves.
    kill_at: Option<Instant>,
    /// Ranks that were told to start because slots were added, and are not known to run yet.
    pub(super) added: HashSet<u32>,
    /// When the file of hosts is looked at.
    pub(super) poll_at: Instant,
    /// Since when no rank runs although some should.
    pub(super) idle_since: Option<Instant>,
    /// Whether starting lost ranks again can help.
    pub(super) prospects: Prospects,
    /// Whether the job can begin without lost ranks.
    pub(super) beginning: Beginning,
    /// Ranks that the others went on without.
    pub(super) hung: Hung,
    /// Ranks that ended with 0, perhaps without having left the job.
    pub(super) vanished: Vanished,
    /// The first signal of those that end programs, and when it was passed on.
    interrupt: Option<(i32, Instant)>,
}

impl Driver {
    fn await_hellos(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + HELLO_TIME_MAX;
        while let Some(waiting) = self.agents.iter().position(|agent| agent.hello.is_none()) {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Report(index, AgentReport::Hello(hello))) => self.greet(index, hello)?,
                Ok(Event::Ended(index, why)) => return Err(no_agent(&mut self.agents[index], why)),
                Ok(Event::Signal(signal)) => return Err(LaunchError::interrupted(signal)),
                Ok(_) => {}
                Err(_) => {
                    let agent = &mut self.agents[waiting];
                    agent.kill();
                    let words = agent.last_words();
                    let (host, seconds) = (&agent.host.name, HELLO_TIME_MAX.as_secs());
                    return Err(LaunchError::failed(format!(
                        "no answer from gradwire on {host} within {seconds} s ({words}): see what `ssh {host} gradwire \
                         --version` does"
                    )));
                }
            }
        }
        Ok(())
    }

    /// An agent has answered.
    pub(super) fn greet(&mut self, index: usize, hello: Hello) -> Result<(), LaunchError> {
        let agent = &mut self.agents[index];
        if hello.version != env!("CARGO_PKG_VERSION") {
            return Err(LaunchError::failed(format!(
                "{} has gradwire {}, this is {}: install the same version, or name another binary there with \
                 --remote-gradwire",
                agent.host.name,
                hello.version,
                env!("CARGO_PKG_VERSION")
            )));
        }
        agent.hello = Some(hello);
        if let Some(site) = self.sites.iter_mut().find(|site| site.agent == Some(index)) {
            site.answered();
        }
        Ok(())
    }

    /// Starts the job's broker, unless there is one, and tells every agent what to run.
    fn start_ranks(&mut self, plan: &LaunchPlan, identity: &Identity) -> Result<Option<RunningBroker>, LaunchError> {
        let own = variables::own_address(&self.agents, &plan.remote, self.hosts_file.is_some())?;
        let (broker, access) = self.start_broker(plan, identity, own)?;
        let recipe = Recipe::new(plan, identity, &access, &self.agents, own)?;
        self.prospects.begin(recipe.job(), plan.ranks);
        self.recipe = Some(recipe);
        let mut rank = 0;
        for site in 0..self.sites.len() {
            let places: Vec<_> = (0..self.sites[site].planned).map(|slot| (rank + slot, Spot { site, slot })).collect();
            rank += self.sites[site].planned;
            if let Some(index) = self.sites[site].agent
                && self.start_at(index, &places).is_err()
            {
                return Err(no_agent(&mut self.agents[index], None));
            }
        }
        if self.ranks_min.is_none() {
            self.close();
        }
        Ok(broker)
    }

    fn start_broker(
        &mut self,
        plan: &LaunchPlan,
        identity: &Identity,
        own: Option<IpAddr>,
    ) -> Result<(Option<RunningBroker>, BrokerAccess), LaunchError> {
        if let BrokerChoice::Url(url) = &plan.broker {
            return Ok((None, BrokerAccess::new(url)));
        }
        self.reachable = own.is_some();
        let token = gradwire_proto::secret::hex(&identity.secret.proof("broker token", &[&identity.instance]));
        let broker = RunningBroker::start_for_job(own, token.clone())
            .map_err(|fault| LaunchError::failed(format!("the embedded broker does not start: {fault}")))?;
        let access = BrokerAccess::new(broker.url()).with_token(Token::Text(token));
        Ok((Some(broker), access))
    }

    /// Has an agent start ranks in these places. Where it is gone already, it is heard of as lost, with these ranks.
    pub(super) fn start_at(&mut self, index: usize, places: &[(u32, Spot)]) -> io::Result<()> {
        let now = Instant::now();
        let Some(recipe) = &self.recipe else { return Ok(()) };
        let mut ranks = Vec::with_capacity(places.len());
        let mut local = 0;
        for (rank, spot) in places {
            ranks.push((*rank, *spot, self.ranks.start(*rank, *spot, index, now)));
            local = self.sites[spot.site].planned;
        }
        let plan = recipe.plan(index, &self.agents[index], local, &ranks);
        self.agents[index].tell(&Command::Start(plan))?;
        // One that came later has not heard it.
        if self.paused { self.agents[index].tell(&Command::Pause) } else { Ok(()) }
    }

    /// Goes on until no agent is left, and none is to come.
    fn serve(&mut self) {
        while self.agents.iter().any(AgentLink::alive) || self.goes_on() {
            let now = Instant::now();
            if self.stop_at.is_some_and(|at| now >= at) {
                self.end_of_grace();
            }
            if self.kill_at.is_some_and(|at| now >= at) {
                self.kill_agents();
                break;
            }
            self.tend(now);
            let wake = self.stop_at.into_iter().chain(self.kill_at).chain(self.next_due(now)).min();
            let wait = wake.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(now));
            match self.events.recv_timeout(wait) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                // Cannot be while this end holds a sender; if it is, nothing more will be heard.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.end_roll();
        self.end_vanished();
        let until = Instant::now() + SWEEP_TIME_MAX;
        for site in self.sites.iter().filter(|site| !site.unswept.is_empty()) {
            agents::sweep(&site.host, &self.remote, &self.instance_hex, until);
        }
    }

    fn kill_agents(&mut self) {
        for (index, agent) in self.agents.iter_mut().enumerate().filter(|(_, agent)| agent.alive()) {
            agent.kill();
            agent.lost = true;
            if let Some(site) = self.sites.iter_mut().find(|site| site.host.is(&agent.host)) {
                site.unswept.push(index);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Report(index, AgentReport::Hello(hello)) => self.late_hello(index, hello),
            Event::Report(index, AgentReport::Started { rank }) => self.rank_started(index, rank),
            Event::Report(index, AgentReport::Ended { rank, end }) => self.rank_ended(index, rank, end),
            Event::Report(index, AgentReport::NotStarted { rank, detail }) => self.not_started(index, rank, detail),
            Event::Report(index, AgentReport::Ending) => self.agent_ends(index),
            Event::Report(index, AgentReport::Done { leftovers }) => {
                self.report.leftovers = self.report.leftovers.saturating_add(leftovers);
                self.agent_done(index);
            }
            Event::OutputDone => {}
            Event::OneMore => self.add_one(),
            Event::Census(rank, census) => self.take_census(rank, census),
            Event::Roll(census) => self.take_roll(census),
            Event::Members(census) => self.take_members(census),
            Event::Ended(index, why) => self.agent_ended(index, why),
            Event::Flow(flow) => {
                self.paused = flow == Flow::Pause;
                self.tell_all(|| match flow {
                    Flow::Pause => Command::Pause,
                    Flow::Resume => Command::Resume,
                });
            }
            Event::Signal(signal) => self.signal(signal),
        }
    }

    fn rank_ended(&mut self, index: usize, rank: u32, end: End) {
        let Some(State::Running { spot, agent, since, leaving, .. }) = self.ranks.state(rank) else { return };
        if agent != index {
            return;
        }
        self.vanished.ended(Instant::now());
        let host = self.sites[spot.site].host.name.clone();
        let hung = end == End::Signal(SIGKILL) && self.hung.was_killed(rank, since);
        let reason = if hung { hung::WORDS.to_owned() } else { Words(end).to_string() };
        let told_to = self
            .interrupt
            .filter(|(signal, at)| *signal != SIGHUP || end == End::Signal(SIGHUP) || at.elapsed() < HANGUP_GRACE);
        let over = leaving || end.success() || self.stopping;
        if !over && told_to.is_none() {
            let held = self.holds(index, spot);
            self.lose(rank, &host, end, reason.clone(), held, since.elapsed());
            return self.go_on_or(Failure::Rank { rank, host, end, reason });
        }
        self.ranks.set(rank, if leaving { State::Removed } else { State::Ended(end) });
        if end.success() && !leaving && told_to.is_none() {
            self.ended_well(rank, &host);
        }
        self.journal.note(Happening::Ended, rank, &host, Some(reason));
        if let (false, Some((signal, _))) = (over, told_to) {
            self.report.interrupted = Some(signal);
            self.stop_at.get_or_insert(Instant::now() + HANGUP_GRACE);
        }
    }

    /// Ends the job because of this, unless it is ending already.
    pub(super) fn fail(&mut self, failure: Failure) {
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
        self.ranks.give_up_waiting();
        self.stop_at = None;
        let kill_at = Instant::now() + grace + AGENT_GRACE;
        self.kill_at = Some(self.kill_at.map_or(kill_at, |at| at.min(kill_at)));
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.tell_all(|| Command::Stop { grace_ms });
    }

    /// No further rank will be started: agents go when those that they have are through.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.ranks.give_up_waiting();
        // Who has not answered yet has started nothing, and need not be waited for.
        for agent in self.agents.iter_mut().filter(|agent| agent.alive() && agent.hello.is_none()) {
            agent.kill();
            agent.lost = true;
        }
        self.tell_all(|| Command::Close);
    }

    fn signal(&mut self, number: i32) {
        let ends = [SIGINT, SIGTERM].contains(&number);
        let told_before = self.interrupt.filter(|(signal, _)| *signal != SIGHUP);
        if let (true, Some((first, at))) = (ends, told_before) {
            if [first, number] == [SIGTERM; 2] && at.elapsed() < SIGNAL_SETTLES {
                return;
            }
            self.report.interrupted = Some(first);
            return self.stop(Duration::ZERO);
        }
        let now = Instant::now();
        if ends {
            self.interrupt = Some((number, now));
            self.stop_at = Some(now + self.grace);
            for (rank, state) in self.ranks.iter().collect::<Vec<_>>() {
                // It would have been started again: the signal is why it did not end well.
                if let State::Waiting { end, .. } = state {
                    self.ranks.set(rank, State::Ended(end));
                    self.report.interrupted = Some(number);
                }
            }
            self.close();
        } else if number == SIGHUP && told_before.is_none() {
            self.interrupt = Some((number, now));
        }
        // A program that wants to end in order has to watch for one signal, not for two.
        let number = if ends { SIGTERM } else { number };
        tracing::debug!("passing {} on to the ranks", signal_name(number));
        self.tell_all(|| Command::Signal { number, ranks: None });
    }

    /// Whether a signal that ends programs was passed on.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupt.is_some_and(|(signal, _)| signal != SIGHUP)
    }

    /// Ranks that a signal should have ended have had their time.
    fn end_of_grace(&mut self) {
        match self.interrupt {
            Some((signal, _)) if signal != SIGHUP => {
                self.report.interrupted = Some(signal);
                self.report.overdue = Some(self.grace);
                self.stop(Duration::ZERO);
            }
            _ => self.stop(STOP_GRACE),
        }
    }

    pub(super) fn tell_all(&mut self, command: impl Fn() -> Command) {
        for agent in self.agents.iter_mut().filter(|agent| agent.alive()) {
            // One that is gone shows as an event of its own.
            let _ = agent.tell(&command());
        }
    }

    /// Waits until all that the ranks wrote was handed on. The reader may take its time, as with any program that
    /// writes to a pipe; a signal ends the wait.
    fn finish_output(&mut self, output: Output) -> HashMap<u32, Tail> {
        output.outlet.finish();
        loop {
            match self.events.recv() {
                Ok(Event::OutputDone) => break,
                Ok(Event::Signal(signal)) if [SIGINT, SIGTERM, SIGHUP].contains(&signal) => return HashMap::new(),
                Ok(_) => {}
                Err(_) => return HashMap::new(),
            }
        }
        output.into_tails()
    }

    fn into_report(mut self, mut tails: HashMap<u32, Tail>) -> Report {
        let mut report = std::mem::take(&mut self.report);
        let blamed = match &report.failure {
            Some(Failure::Rank { rank, .. } | Failure::NotStarted { rank, .. }) => Some(*rank),
            _ => None,
        };
        report.last_lines = blamed.and_then(|rank| tails.remove(&rank)).map(Tail::into_lines).unwrap_or_default();
        let elastic = self.ranks_min.is_some();
        let bad_end = |state| match state {
            State::Ended(end) => (!end.success()).then_some(end),
            // The history has it where the others may go on without it.
            State::Lost(end) => (!elastic).then_some(end),
            State::Running { leaving, .. } => (!leaving).then_some(End::Unknown),
            State::Unused | State::Waiting { .. } | State::Removed => None,
        };
        report.others = self
            .ranks
            .iter()
            .filter_map(|(rank, state)| Some((rank, bad_end(state)?)))
            .filter(|(rank, _)| blamed != Some(*rank))
            .collect();
        if elastic {
            report.history = self.journal.into_listed();
        }
        report
    }
}

/// An agent did not come up.
fn no_agent(agent: &mut AgentLink, why: Option<String>) -> LaunchError {
    let words = agent.last_words();
    let host = &agent.host.name;
    let why = why.map(|why| format!("{why}; ")).unwrap_or_default();
    let remedy = if agent.host.local {
        String::new()
    } else if words.contains("exited with code 127") || words.contains("exited with code 126") {
        ": install gradwire there, or say where it is with --remote-gradwire PATH".to_owned()
    } else {
        format!(": `ssh {host} gradwire --version` has to work without a password")
    };
    LaunchError::failed(format!("cannot start gradwire on {host}: {why}{words}{remedy}"))
}
