//! Bringing up a job's mesh: one link between every two ranks.
//!
//! The higher rank of two dials the lower one: over its abstract Unix socket where both are on one host (that link
//! is shared memory then), else over TCP at the addresses it advertises. Who joins later dials all that were there
//! before. One loop does it all without ever waiting for one peer alone, and ends by its deadline with links or with a
//! fault that names who is missing and why.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::time::{Duration, Instant};

use gradwire_proto::hello::{HelloParams, Purpose};
use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Epoch, Fault, FaultKind, Rank};
use rustix::event::Timespec;

use crate::Transport as _;
use crate::establish::accept::{Accepted, Acceptor};
use crate::establish::dial::{Dial, Dialled, routes};
use crate::establish::{Arrival, Door, Listeners};
use crate::links::Links;

/// Most peers that are dialled at once.
const DIALS_MAX: usize = 64;
/// How often the caller's `stop` is asked, at least.
const TICK: Duration = Duration::from_millis(100);
/// The same while there are peers to be dialled again.
const TICK_WHILE_DIALLING: Duration = Duration::from_millis(10);

/// Which backends may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Shared memory between ranks of one host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory only: all ranks must be on one host.
    Shm,
    /// TCP only.
    Tcp,
}

impl Choice {
    /// Whether links may be of this kind: shared memory, which begins with a Unix socket, or TCP.
    pub(crate) fn allows(self, is_unix: bool) -> bool {
        self != if is_unix { Self::Tcp } else { Self::Shm }
    }
}

/// What a rank has to know to bring up its links.
#[derive(Clone, Debug)]
pub struct MeshConfig {
    /// Who this rank is.
    pub hello: HelloParams,
    /// Who is to be linked, in the order of their ranks, this one included.
    pub members: Vec<MeshMember>,
    /// Which backends may be used: the same on every rank.
    pub choice: Choice,
    /// How long all of it may take.
    pub deadline: Duration,
}

/// What a mesh that comes up hears and says of its job.
pub trait MeshWatch {
    /// Asked several times a second: other members change the mesh.
    ///
    /// # Errors
    /// A fault that was learned elsewhere ends the wait.
    fn change(&mut self) -> Result<Option<MeshChange>, Fault>;

    /// After so long without a link a peer is taken for lost; by default nobody is before the deadline.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// There is no link to [`Fault::rank`]. The mesh waits on, for it or for other members, unless this returns the
    /// fault: by default it does.
    ///
    /// # Errors
    /// The fault, where nobody can go on without that rank.
    fn lost(&mut self, fault: Fault) -> Result<(), Fault> {
        Err(fault)
    }
}

impl<F: FnMut() -> Result<Option<MeshChange>, Fault>> MeshWatch for F {
    fn change(&mut self) -> Result<Option<MeshChange>, Fault> {
        self()
    }
}

/// One rank of a mesh.
#[derive(Clone, Debug)]
pub struct MeshMember {
    /// Which rank.
    pub rank: Rank,
    /// Where it can be reached.
    pub endpoint: Endpoint,
    /// Whether it became a member before this process (`Less`), with it, or after it. Who came later dials; of those who
    /// came together, the higher rank.
    pub came: Ordering,
}

/// What changed while a mesh came up.
#[derive(Debug)]
pub struct MeshChange {
    /// The epoch that is to be linked now.
    pub epoch: Epoch,
    /// Its members. Links to those that there were before are kept.
    pub members: Vec<MeshMember>,
}

impl Listeners {
    /// Brings up the links to all peers. Dropping the [`Door`] closes the listening sockets. A rank that reaches
    /// nobody, among three or more, takes itself for the lost one.
    ///
    /// # Errors
    /// A [`Fault`], by the deadline at the latest; everything that was opened is closed again then. `InvalidArgument`
    /// or `WorldMismatch` when the configuration, or a peer's, does not fit; `AddressUnreachable`, with every address
    /// that was tried, when a peer cannot be reached; `SecretMismatch` and `ProtocolVersion` from the hello;
    /// `DeadlineExceeded` with the ranks that are missing; what `watch` returned.
    pub fn connect(self, config: MeshConfig, watch: &mut dyn MeshWatch) -> Result<(Links, Door), Fault> {
        check(&config)?;
        let now = Instant::now();
        let mut mesh = Mesh {
            dials: Vec::new(),
            acceptor: Acceptor::new(self),
            links: Vec::new(),
            deadline: now + config.deadline,
            since: now,
            config,
        };
        mesh.dial_missing(now);
        while mesh.missing().next().is_some() {
            if let Some(change) = watch.change()? {
                mesh.change(change)?;
            }
            let now = Instant::now();
            mesh.advance(now, watch)?;
            mesh.give_up_missing(now, watch)?;
            if now >= mesh.deadline && mesh.missing().next().is_some() {
                return Err(mesh.overdue());
            }
            mesh.wait(now);
        }
        mesh.finish()
    }
}

/// A mesh that comes up.
struct Mesh {
    config: MeshConfig,
    acceptor: Acceptor,
    dials: Vec<Dial>,
    links: Vec<Arrival>,
    deadline: Instant,
    /// Since when these members are to be linked, or were last given up.
    since: Instant,
}

impl Mesh {
    fn missing(&self) -> impl Iterator<Item = Rank> {
        let own = self.config.hello.rank;
        let ranks = self.config.members.iter().map(|member| member.rank);
        ranks.filter(move |rank| *rank != own && !self.links.iter().any(|link| link.peer == *rank))
    }

    /// Whether this rank dials that member, which otherwise dials this one.
    fn dials(&self, member: &MeshMember) -> bool {
        member.came.then(member.rank.cmp(&self.config.hello.rank)) == Ordering::Less
    }

    /// Begins to dial who is to be dialled and is not yet.
    fn dial_missing(&mut self, now: Instant) {
        let missing: Vec<Rank> = self.missing().collect();
        let members = self.config.members.iter();
        let new: Vec<Dial> = members
            .filter(|member| missing.contains(&member.rank) && self.dials(member))
            .filter(|member| !self.dials.iter().any(|dial| dial.peer == member.rank))
            .filter_map(|member| dial(&self.config, member, now))
            .collect();
        self.dials.extend(new);
    }

    /// Goes on with other members.
    fn change(&mut self, change: MeshChange) -> Result<(), Fault> {
        let MeshChange { epoch, members } = change;
        // A rank that another process has now is another peer.
        let stays = |rank: Rank| {
            let of = |members: &[MeshMember]| {
                members.iter().find(|member| member.rank == rank).map(|member| member.endpoint.clone())
            };
            of(&members).is_some_and(|now| of(&self.config.members) == Some(now))
        };
        self.dials.retain(|dial| stays(dial.peer));
        self.links.retain(|link| stays(link.peer));
        self.config.hello.epoch = epoch;
        self.config.members = members;
        check(&self.config)?;
        self.since = Instant::now();
        self.dial_missing(self.since);
        Ok(())
    }

    /// Whether peers that cannot be reached may be lost, rather than this rank.
    fn may_blame(&self) -> bool {
        self.config.members.len() == 2 || !self.links.is_empty()
    }

    /// Says whom nothing is heard of for too long: perhaps the others go on without them.
    fn give_up_missing(&mut self, now: Instant, watch: &mut dyn MeshWatch) -> Result<(), Fault> {
        let Some(patience) = watch.patience().filter(|patience| now.duration_since(self.since) >= *patience) else {
            return Ok(());
        };
        self.since = now;
        if !self.may_blame() || now >= self.deadline {
            return Ok(());
        }
        let seconds = patience.as_secs_f32();
        for peer in self.missing().collect::<Vec<_>>() {
            let detail = format!("{peer} opened no link within {seconds} s");
            watch.lost(Fault::new(FaultKind::DeadlineExceeded, detail).at(peer))?;
        }
        Ok(())
    }

    /// Does what can be done without waiting.
    fn advance(&mut self, now: Instant, watch: &mut dyn MeshWatch) -> Result<(), Fault> {
        for accepted in self.acceptor.advance(&self.config.hello, now)? {
            self.take_accepted(accepted)?;
        }
        let params = &self.config.hello;
        let mut active = self.dials.iter().filter(|dial| dial.is_active()).count();
        let may_blame = self.may_blame();
        let mut linked = Vec::new();
        for dial in &mut self.dials {
            let was_active = dial.is_active();
            match dial.advance(params, now, active < DIALS_MAX) {
                Dialled::Pending => {}
                Dialled::Linked { socket, is_unix } => linked.push((dial.peer, socket, is_unix)),
                Dialled::Failed(fault) if fault.kind == FaultKind::AddressUnreachable && may_blame => {
                    watch.lost(fault)?;
                    dial.begin_again(now);
                }
                Dialled::Failed(fault) => return Err(fault),
            }
            active = active + usize::from(dial.is_active()) - usize::from(was_active);
        }
        for (peer, socket, is_unix) in linked {
            tracing::debug!(%peer, is_unix, "linked");
            self.dials.retain(|dial| dial.peer != peer);
            self.keep(Arrival::new(peer, socket, is_unix)?);
        }
        Ok(())
    }

    /// Takes a link that a peer opened: of a higher rank, once, over what was chosen.
    fn take_accepted(&mut self, accepted: Accepted) -> Result<(), Fault> {
        let Accepted { peer, purpose, socket, is_unix } = accepted;
        let own = self.config.hello.rank;
        if purpose == Purpose::State {
            self.acceptor.turn_away("it wants state that this rank does not have yet");
            return Ok(());
        }
        let member = self.config.members.iter().find(|member| member.rank == peer);
        if member.is_none_or(|member| self.dials(member)) {
            let detail = format!("{peer} dialled {own}, but the higher rank dials: run the same release on every rank");
            return Err(Fault::new(FaultKind::ProtocolViolation, detail).at(peer));
        }
        if !self.config.choice.allows(is_unix) {
            let (theirs, ours) = if is_unix { ("shm", "tcp") } else { ("tcp", "shm") };
            let detail = format!(
                "{peer} opened its link over {theirs}, but {own} is to use {ours} only: give every rank the same --transport"
            );
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(peer));
        }
        let link = self.links.iter().find(|link| link.peer == peer);
        if link.is_some_and(|old| !old.has_ended()) {
            let detail = format!("two processes say that they are {peer}: give every process its own rank");
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(peer));
        }
        tracing::debug!(%peer, is_unix, "linked");
        self.keep(Arrival::new(peer, socket, is_unix)?);
        Ok(())
    }

    fn keep(&mut self, arrival: Arrival) {
        self.links.retain(|link| link.peer != arrival.peer);
        self.links.push(arrival);
    }

    /// Waits until something may have changed.
    fn wait(&self, now: Instant) {
        let mut fds = Vec::new();
        self.acceptor.watch(&mut fds, now);
        self.dials.iter().for_each(|dial| dial.watch(&mut fds));
        let is_resting = self.dials.iter().any(|dial| !dial.is_active());
        let tick = if is_resting { TICK_WHILE_DIALLING } else { TICK };
        let timeout = tick.min(self.deadline.saturating_duration_since(now));
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // Interrupted or not: the loop looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }

    /// The fault of a mesh that is not complete at its deadline.
    fn overdue(&self) -> Fault {
        let seconds = self.config.deadline.as_secs_f32();
        let mut missing = self.missing();
        let Some(first) = missing.next() else {
            return Fault::new(FaultKind::DeadlineExceeded, "the links were not complete in time: try again");
        };
        let all = missing.fold(first.to_string(), |all, rank| format!("{all}, {rank}"));
        let tried = self.dials.iter().map(|dial| dial.unreachable().detail);
        let turned_away = (self.acceptor.turned_away > 0).then(|| {
            let last =
                self.acceptor.last_fault.as_ref().map_or("not from a rank of a job", |fault| fault.detail.as_str());
            format!("{} connections were turned away, the last: {last}", self.acceptor.turned_away)
        });
        let own = own(&self.config).map(|member| &member.endpoint);
        let hint = own.filter(|_| first > self.config.hello.rank).map(|own| {
            format!("check that every rank was started and that they reach {} at {:?}", own.hostname, own.addresses)
        });
        let why: Vec<_> = tried.chain(turned_away).chain(hint).collect();
        let detail = format!("no link from {all} within {seconds} s: {}", why.join("; "));
        Fault::new(FaultKind::DeadlineExceeded, detail).at(first)
    }

    /// Makes links of the connections.
    fn finish(self) -> Result<(Links, Door), Fault> {
        let mut links = Links::new()?;
        for arrival in self.links {
            links.welcome(arrival, self.deadline)?;
        }
        Ok((links, Door::new(self.acceptor, self.config.choice)))
    }
}

/// This rank among the members.
fn own(config: &MeshConfig) -> Option<&MeshMember> {
    config.members.iter().find(|member| member.rank == config.hello.rank)
}

/// What can be said about the configuration before anything is dialled.
fn check(config: &MeshConfig) -> Result<(), Fault> {
    let (hello, members) = (&config.hello, &config.members);
    let ascending = members.windows(2).all(|pair| pair[0].rank < pair[1].rank);
    let fits = hello.world_size <= WORLD_SIZE_MAX && members.last().is_some_and(|last| last.rank.0 < hello.world_size);
    let Some(own) = own(config).filter(|_| ascending && fits).map(|member| &member.endpoint) else {
        let detail = format!(
            "{} with {} endpoints for a world of {} ranks (at most {WORLD_SIZE_MAX}): start every rank with the same world size and its own rank",
            hello.rank,
            members.len(),
            hello.world_size
        );
        return Err(Fault::new(FaultKind::InvalidArgument, detail));
    };
    if config.choice != Choice::Shm {
        return Ok(());
    }
    for MeshMember { rank: peer, endpoint: theirs, .. } in members.iter().filter(|member| member.rank != hello.rank) {
        let problem = if !own.host.is_same(theirs.host) {
            format!(
                "{} is on host '{}' and {peer} on '{}', which share no memory",
                hello.rank, own.hostname, theirs.hostname
            )
        } else if own.socket.is_empty() || theirs.socket.is_empty() {
            format!("{} or {peer} could not open a Unix socket", hello.rank)
        } else {
            continue;
        };
        let detail = format!("{problem}, but the transport is to be shm: use --transport auto or tcp");
        return Err(Fault::new(FaultKind::InvalidArgument, detail).at(*peer));
    }
    Ok(())
}

fn dial(config: &MeshConfig, member: &MeshMember, now: Instant) -> Option<Dial> {
    let (unix, tcp) = (config.choice.allows(true), config.choice.allows(false));
    let ways = routes(&own(config)?.endpoint, &member.endpoint, unix, tcp);
    Some(Dial::new(member.rank, Purpose::Link, ways, now))
}
