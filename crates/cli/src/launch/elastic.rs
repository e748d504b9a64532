//! What only jobs do that go on without ranks that are lost: these are started again, and hosts are lost and come back.
//! Hosts and slots that are added and taken away are in `slots.rs`.

use std::time::{Duration, Instant};

use signal_hook::consts::SIGKILL;

use super::agents::{AgentLink, Leavings};
use super::beginning::Casualty;
use super::driver::{Driver, HELLO_TIME_MAX};
use super::hosts::Host;
use super::journal::Happening;
use super::prospects::{Loss, is_for_good};
use super::ranks::{Spot, State, pause};
use super::report::{Failure, LaunchError};
use crate::agent::wire::{Command, End, Hello};

/// Between two looks at the file of hosts, and at what is overdue.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long hosts may take to come back when no rank runs any more.
const IDLE_TIME_MAX: Duration = Duration::from_secs(120);

/// A host, and what the driver knows of it.
pub(super) struct Site {
    pub(super) host: Host,
    /// The agent there.
    pub(super) agent: Option<usize>,
    /// How many ranks are to be there from the start.
    pub(super) planned: u32,
    /// How many more are to be started there, because slots were added.
    pub(super) wanted: u32,
    /// Agents that were lost there, and may have left something.
    pub(super) unswept: Vec<usize>,
    /// How often it was lost or not reached, one after the other.
    pub(super) failures: u32,
    /// How often it was not reached since it last was.
    unreached: u32,
    /// When it may be tried again.
    pub(super) retry_at: Instant,
    /// When its agent has to have answered.
    hello_by: Option<Instant>,
}

impl Site {
    pub(super) fn new(host: Host, planned: u32, now: Instant) -> Self {
        let unswept = Vec::new();
        Self {
            host,
            agent: None,
            planned,
            wanted: 0,
            unswept,
            failures: 0,
            unreached: 0,
            retry_at: now,
            hello_by: None,
        }
    }

    /// Its agent serves, and has ended what earlier ones had left.
    pub(super) fn answered(&mut self) {
        self.unswept.clear();
        (self.hello_by, self.unreached) = (None, 0);
    }

    fn failed(&mut self, now: Instant) {
        self.agent = None;
        self.hello_by = None;
        self.retry_at = now + pause(self.failures);
        self.failures += 1;
    }
}

/// Ranks: how they start, and what becomes of the job when they are lost.
impl Driver {
    pub(super) fn rank_started(&mut self, index: usize, rank: u32) {
        let Some(State::Running { spot, agent, .. }) = self.ranks.state(rank) else { return };
        if agent != index {
            return;
        }
        // A host that runs ranks is a good one again.
        self.sites[spot.site].failures = 0;
        let (event, reason) = match self.ranks.starts(rank) {
            _ if self.added.remove(&rank) => (Happening::Added, None),
            1 => (Happening::Started, None),
            starts => (Happening::Restarted, Some(format!("GRADWIRE_RESTART={}", starts - 1))),
        };
        let host = self.sites[spot.site].host.name.clone();
        self.journal.note(event, rank, &host, reason);
    }

    pub(super) fn not_started(&mut self, index: usize, rank: u32, detail: String) {
        let Some(State::Running { spot, agent, leaving, .. }) = self.ranks.state(rank) else { return };
        if agent != index {
            return;
        }
        let host = self.sites[spot.site].host.name.clone();
        if leaving {
            self.ranks.set(rank, State::Removed);
            return;
        }
        let held = self.holds(index, spot);
        self.lose(rank, &host, End::Unknown, format!("could not be started: {detail}"), held, Duration::ZERO);
        self.go_on_or(Failure::NotStarted { rank, host, detail });
    }

    /// A rank has failed after it ran for so long: it is started again, if that can be.
    pub(super) fn lose(&mut self, rank: u32, host: &str, end: End, reason: String, held: Option<Spot>, ran: Duration) {
        self.added.remove(&rank);
        let pause = self.ranks.lose(rank, end, held, ran, Instant::now());
        let for_good = pause.is_some() && is_for_good(end);
        if for_good {
            self.ranks.give_up(rank);
        }
        if let Some(pause) = pause.filter(|_| !for_good) {
            let loss = Loss { host: host.to_owned(), end, reason: reason.clone(), pause };
            self.ask_before_restart(rank, loss);
        } else if self.can_go_on() && !self.stopping {
            let why = match self.ranks.restarts() {
                _ if for_good => "it would end the same way",
                (_, 0) => "--restarts allows none",
                _ => "all restarts are used up",
            };
            let aside = if for_good { " it would end the same way if it was started again, and" } else { "" };
            let words = format!("rank {rank} on {host} {reason}:{aside} the others go on without it");
            self.go_on_without(Casualty::new(rank, host, end, &reason, why, words));
        }
        self.journal.note(Happening::Lost, rank, host, Some(reason));
    }

    /// Whether enough ranks are left that run, will run, or have ended well.
    fn can_go_on(&self) -> bool {
        self.ranks_min.is_some_and(|least| self.ranks.left() >= least)
    }

    /// Ends the job because of a loss, unless enough ranks are left.
    pub(super) fn go_on_or(&mut self, failure: Failure) {
        if self.can_go_on() || self.stopping {
            return;
        }
        if !self.closed
            && let Some(too_few) = self.too_few()
        {
            let used_up = match self.ranks.restarts() {
                (count, most) if count < most => ", and starting it again would be of no use".to_owned(),
                (_, 0) => ", and --restarts allows none to be started again".to_owned(),
                (_, most) => format!(", and all restarts ({most}) are used up"),
            };
            self.report.too_few = Some(format!("{too_few}{used_up}"));
        }
        self.fail(failure);
    }

    /// That too few are left, if so, in words.
    pub(super) fn too_few(&self) -> Option<String> {
        let least = self.ranks_min.filter(|_| !self.can_go_on())?;
        let left = match self.ranks.left() {
            0 => "no rank is left".to_owned(),
            1 => "1 rank is left".to_owned(),
            left => format!("{left} ranks are left"),
        };
        Some(format!("{left}, and --min-ranks asks for {least}"))
    }
}

/// Agents: how they come back, and where ranks find a place.
impl Driver {
    /// Starts the agent of a host.
    pub(super) fn connect(&mut self, site: usize) -> Result<(), LaunchError> {
        let place = &mut self.sites[site];
        let lost = Leavings { instance_hex: &self.instance_hex, agents: &place.unswept };
        let index = self.agents.len();
        let agent = AgentLink::start(index, &place.host, &lost, &self.remote, &self.sender, &self.outlet)?;
        self.agents.push(agent);
        place.agent = Some(index);
        place.hello_by = Some(Instant::now() + HELLO_TIME_MAX);
        Ok(())
    }

    fn try_to_connect(&mut self, site: usize, now: Instant) {
        if let Err(error) = self.connect(site) {
            self.sites[site].failed(now);
            say(&error.to_string());
        }
    }

    /// The agent of a host that came later, or again, has answered.
    pub(super) fn late_hello(&mut self, index: usize, hello: Hello) {
        if let Err(error) = self.greet(index, hello) {
            self.agents[index].kill();
            self.agent_ended(index, Some(error.to_string()));
        }
    }

    /// An agent has ended in order.
    pub(super) fn agent_done(&mut self, index: usize) {
        self.agents[index].done = true;
        self.agent_ends(index);
    }

    /// An agent starts no more ranks: those that it had will be started by another.
    pub(super) fn agent_ends(&mut self, index: usize) {
        if let Some(site) = self.sites.iter().position(|site| site.agent == Some(index)) {
            self.sites[site].agent = None;
            self.release_holds(site);
        }
    }

    /// An agent will say nothing more: it is lost, unless it had said so.
    pub(super) fn agent_ended(&mut self, index: usize, why: Option<String>) {
        let agent = &mut self.agents[index];
        if !agent.alive() {
            // What is left of its process goes too, however long the job lasts.
            return agent.kill();
        }
        agent.lost = true;
        let words = agent.last_words();
        let detail = why.map_or(words.clone(), |why| format!("{why} ({words})"));
        let (host, served) = (agent.host.clone(), agent.hello.is_some());
        agent.kill();
        let now = Instant::now();
        if let Some(site) = self.sites.iter().position(|site| site.host.is(&host)) {
            if served {
                self.sites[site].unswept.push(index);
            }
            if self.sites[site].agent == Some(index) {
                self.sites[site].failed(now);
                self.release_holds(site);
                self.sites[site].unreached += u32::from(!served);
                if self.sites[site].unreached == 1 {
                    say(&format!("cannot start gradwire on {}, and goes on trying: {detail}", host.name));
                }
            }
        }
        if !served {
            return;
        }
        let gone = self.lose_ranks_of(index, &host.name);
        if self.ranks_min.is_none() || !gone.is_empty() {
            self.go_on_or(Failure::AgentLost { host: host.name, ranks: gone, detail });
        }
    }

    /// The ranks of an agent that was lost are too. Tells which.
    fn lose_ranks_of(&mut self, index: usize, host: &str) -> Vec<u32> {
        let running = self.ranks.iter().filter_map(|(rank, state)| match state {
            State::Running { agent, since, leaving, .. } if agent == index => Some((rank, since, leaving)),
            _ => None,
        });
        let mut gone = Vec::new();
        for (rank, since, leaving) in running.collect::<Vec<_>>() {
            if leaving {
                self.ranks.set(rank, State::Removed);
                self.journal.note(Happening::Ended, rank, host, Some("went with its host".to_owned()));
            } else {
                self.lose(rank, host, End::Unknown, "went with its host".to_owned(), None, since.elapsed());
                gone.push(rank);
            }
        }
        gone
    }

    /// Ranks that were to be started again on this host have to look for another.
    fn release_holds(&mut self, site: usize) {
        for (rank, _) in self.ranks.on_site(site).collect::<Vec<_>>() {
            if let Some(State::Waiting { at, end, .. }) = self.ranks.state(rank) {
                self.ranks.set(rank, State::Waiting { at, held: None, end });
            }
        }
    }

    /// A rank's place, if it can be started again there by this agent.
    pub(super) fn holds(&self, index: usize, spot: Spot) -> Option<Spot> {
        (self.serving(spot.site) == Some(index)).then_some(spot)
    }

    /// The agent of a host, if it serves.
    fn serving(&self, site: usize) -> Option<usize> {
        self.sites[site].agent.filter(|index| self.agents[*index].alive() && self.agents[*index].hello.is_some())
    }

    /// A place for a rank that lost its own: on a host that serves, else on one that is asked to now, so that there is
    /// one later. Hosts that were lost come last.
    fn room(&mut self, now: Instant) -> Option<Spot> {
        let slot = |site: usize| self.ranks.free_slot(site, self.sites[site].host.slots);
        let free: Vec<Spot> = (0..self.sites.len()).filter_map(|site| Some(Spot { site, slot: slot(site)? })).collect();
        if let Some(spot) = free.iter().find(|spot| self.serving(spot.site).is_some()) {
            return Some(*spot);
        }
        if free.iter().all(|spot| self.sites[spot.site].agent.is_none()) {
            let ready = free.iter().map(|spot| spot.site).filter(|site| self.sites[*site].retry_at <= now);
            if let Some(site) = ready.min_by_key(|site| self.sites[*site].failures) {
                self.try_to_connect(site, now);
            }
        }
        None
    }
}

/// What is due as time goes by.
impl Driver {
    /// Whether ranks are still to be started.
    pub(super) fn goes_on(&self) -> bool {
        let wanted = || self.sites.iter().any(|site| site.wanted > 0) && !self.ranks.any_ended_well();
        !self.closed && !self.stopping && (self.ranks.any_running() || self.ranks.any_waiting() || wanted())
    }

    /// When there is something to do again.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        if self.closed || self.stopping {
            return None;
        }
        let restart = self.ranks.iter().filter_map(|(_, state)| match state {
            State::Waiting { at, .. } if at > now => Some(at),
            _ => None,
        });
        restart.chain(self.beginning.due()).chain([now + POLL_INTERVAL]).min()
    }

    /// Does what is due.
    pub(super) fn tend(&mut self, now: Instant) {
        if self.closed || self.stopping {
            return;
        }
        self.look_at_hosts(now);
        self.kill_overdue(now);
        self.look_at_roll(now);
        self.look_for_hung(now);
        self.fill(now);
        if !self.goes_on() {
            if self.ranks.left() == 0 {
                self.fail(Failure::NobodyLeft { detail: "all were taken away".to_owned() });
            }
            return self.close();
        }
        if self.ranks.any_running() {
            self.idle_since = None;
        } else if now - *self.idle_since.get_or_insert(now) > IDLE_TIME_MAX {
            let detail = format!("no host could be reached for {} s", IDLE_TIME_MAX.as_secs());
            self.fail(Failure::NobodyLeft { detail });
        }
    }

    fn kill_overdue(&mut self, now: Instant) {
        for (rank, state) in self.ranks.iter().collect::<Vec<_>>() {
            if let State::Running { spot, agent, since, leaving, kill_at: Some(at) } = state
                && at <= now
            {
                self.ranks.set(rank, State::Running { spot, agent, since, leaving, kill_at: None });
                let _ = self.agents[agent].tell(&Command::Signal { number: SIGKILL, ranks: Some(vec![rank]) });
            }
        }
        for site in &mut self.sites {
            if site.hello_by.is_some_and(|by| by <= now)
                && let Some(index) = site.agent
            {
                // It will be heard of as an agent that has ended.
                site.hello_by = None;
                self.agents[index].kill();
            }
        }
    }

    /// Starts what is due where there is room, and lets agents go whose host has no part any more.
    fn fill(&mut self, now: Instant) {
        for (rank, state) in self.ranks.iter().collect::<Vec<_>>() {
            if let State::Waiting { at, held, .. } = state
                && at <= now
                && !self.prospects.are_awaited(rank)
                && let Some(spot) = held.or_else(|| self.room(now))
            {
                self.start_one(rank, spot);
            }
        }
        for site in 0..self.sites.len() {
            self.fill_added(site, now);
            if self.sites[site].host.slots == 0
                && self.ranks.on_site(site).next().is_none()
                && let Some(index) = self.sites[site].agent.take()
            {
                self.sites[site].hello_by = None;
                let _ = self.agents[index].tell(&Command::Close);
            }
        }
    }

    fn start_one(&mut self, rank: u32, spot: Spot) {
        if let Some(index) = self.serving(spot.site) {
            let _ = self.start_at(index, &[(rank, spot)]);
        }
    }

    fn fill_added(&mut self, site: usize, now: Instant) {
        while self.sites[site].wanted > 0 {
            // What is told to end still has its slot and its number.
            let Some(slot) = self.ranks.free_slot(site, self.sites[site].host.slots) else { return };
            let Some(rank) = self.ranks.free_number() else {
                if !self.ranks.any_leaving() {
                    self.sites[site].wanted = 0;
                    let host = &self.sites[site].host.name;
                    say(&format!("no further rank starts on {host}: all that --max-ranks allows are there"));
                }
                return;
            };
            if self.serving(site).is_none() {
                if self.sites[site].agent.is_none() && self.sites[site].retry_at <= now {
                    self.try_to_connect(site, now);
                }
                return;
            }
            self.sites[site].wanted -= 1;
            self.added.insert(rank);
            self.start_one(rank, Spot { site, slot });
        }
    }
}

pub(super) fn say(text: &str) {
    eprintln!("gradwire: {text}");
}
