//! How ranks become members: a state machine over the records of the control log. No socket and no clock in here.
//!
//! Every rank appends a Join and reads the log from its start. When all ranks have joined, rank 0 (another one if
//! nothing comes) proposes the members of epoch 1 by the ids of their Joins; the first valid proposal in log order
//! wins, on every rank the same one, since all read the same log. A conflict (another world size, a rank taken
//! twice, another protocol version) that stands in the log before such a proposal ends the job on every rank.
//!
//! Only records with a valid MAC count. Records of other instances of the job (other launches, with other secrets)
//! cannot be verified: from them it is only learnt that another job of this name may be alive. Such a job is asked
//! ([`Body::Challenge`]), and the newcomer gives way if it answers. A forged answer can keep a job from starting,
//! never disturb a running one; whoever can forge it could as well fill the topic.
//!
//! Call [`Rendezvous::link_opened`] after each (re)connection, [`Rendezvous::handle_record`] for each record, and
//! [`Rendezvous::handle_timeout`] at [`Rendezvous::poll_timeout`]; then drain [`Rendezvous::poll_append`] and
//! [`Rendezvous::poll_event`], and look at [`Rendezvous::outcome`]. Records may come more than once.

mod others;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Epoch, Fault, FaultKind, Rank};

use crate::record::{Body, Instance, RECORD_VERSION, Record, RecordId};
use others::Others;

/// How long a rank waits for the ranks before it to propose.
const PROPOSE_GRACE: Duration = Duration::from_millis(300);
/// How long a rank waits for the ranks before it to ask whether another job lives.
const CHALLENGE_GRACE: Duration = Duration::from_millis(100);
/// How long another job has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long ranks whose records do not verify have to show ones that do, before the secret is called different.
const SUSPECT_GRACE: Duration = Duration::from_secs(1);
/// Longest grace, whatever the rank.
const GRACE_MAX: Duration = Duration::from_secs(10);
/// Most events that wait to be taken.
const EVENTS_MAX: usize = 1024;
/// Most record ids that are remembered, for each rank.
const IDS_PER_RANK_MAX: usize = 64;

/// The first epoch: the members that the job starts with.
pub(crate) const FIRST_EPOCH: Epoch = Epoch(1);
/// The protocol version of the data path that a Join announces.
pub(crate) const PROTOCOL_VERSION: u16 = gradwire_proto::frame::PROTOCOL_VERSION as u16;

/// The members of an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Its number.
    pub epoch: Epoch,
    /// Where each member can be reached, by rank.
    pub members: Vec<Endpoint>,
}

/// What other ranks made known after joining.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlEvent {
    /// A rank met a fault that ends the job. `reporter` names it.
    Failed(Fault),
}

/// Who this rank is.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    pub(crate) job: String,
    pub(crate) instance: Instance,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) endpoint: Endpoint,
    /// The id of this process's Join.
    pub(crate) join_id: RecordId,
}

/// A record to append. Without an id it gets a new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Append {
    pub(crate) id: Option<RecordId>,
    pub(crate) body: Body,
}

#[derive(Debug)]
enum State {
    Joining,
    Member(Membership),
    Failed(Fault),
}

#[derive(Debug)]
struct Joined {
    id: RecordId,
    endpoint: Endpoint,
}

/// One rank's view of the control log.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    me: Me,
    deadline: Instant,
    deadline_after: Duration,
    state: State,
    joins: BTreeMap<Rank, Joined>,
    /// The members' Joins, once decided.
    members: Vec<RecordId>,
    /// When the last rank joined.
    complete_at: Option<Instant>,
    /// When our own Join was seen: everything that was in the log before it has been read.
    seen_self_at: Option<Instant>,
    others: Others,
    /// Ranks of this instance that wrote what does not verify.
    unverified: BTreeSet<Rank>,
    suspect_at: Option<Instant>,
    ids: (BTreeSet<RecordId>, VecDeque<RecordId>),
    proposed: bool,
    appends: VecDeque<Append>,
    events: VecDeque<ControlEvent>,
    /// Records of this instance that did not verify or were malformed.
    rejected: u64,
}

impl Rendezvous {
    pub(crate) fn new(me: Me, deadline: Instant, deadline_after: Duration) -> Self {
        Self {
            deadline,
            deadline_after,
            state: State::Joining,
            joins: BTreeMap::new(),
            members: Vec::new(),
            complete_at: None,
            seen_self_at: None,
            others: Others::new(me.instance, me.rank),
            unverified: BTreeSet::new(),
            suspect_at: None,
            ids: Default::default(),
            proposed: false,
            appends: VecDeque::new(),
            events: VecDeque::new(),
            rejected: 0,
            me,
        }
    }

    /// How joining ended, once it has.
    pub(crate) fn outcome(&self) -> Option<Result<&Membership, &Fault>> {
        match &self.state {
            State::Joining => None,
            State::Member(membership) => Some(Ok(membership)),
            State::Failed(fault) => Some(Err(fault)),
        }
    }

    /// The next record to append.
    pub(crate) fn poll_append(&mut self) -> Option<Append> {
        self.appends.pop_front()
    }

    /// The next event.
    pub(crate) fn poll_event(&mut self) -> Option<ControlEvent> {
        self.events.pop_front()
    }

    /// How many records of this instance were ignored because they did not verify or were malformed.
    pub(crate) fn rejected(&self) -> u64 {
        self.rejected
    }

    /// A link to the broker is open, and the log will be read from its start. Says (again) what this rank has to
    /// say: a broker that keeps its log in memory may have lost it.
    pub(crate) fn link_opened(&mut self) {
        let Me { world_size, endpoint, join_id, .. } = self.me.clone();
        let join = Body::Join { world_size, protocol: PROTOCOL_VERSION, endpoint };
        self.appends.push_back(Append { id: Some(join_id), body: join });
        self.proposed = false;
        self.others.link_opened();
        if matches!(self.state, State::Member(_)) {
            self.propose(self.members.clone());
        }
    }

    /// When [`Rendezvous::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let joining = matches!(self.state, State::Joining);
        let while_joining = [Some(self.deadline), self.suspect_at, self.propose_at(), self.others.challenge_at()];
        while_joining.into_iter().flatten().filter(|_| joining).chain(self.others.answer_at()).min()
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if let Some(challenge) = self.others.take_answer(now) {
            self.append(Body::Alive { challenge });
        }
        if !matches!(self.state, State::Joining) {
            return;
        }
        if self.suspect_at.is_some_and(|at| at <= now) {
            self.fail(self.other_secret());
        } else if now >= self.deadline {
            self.fail(self.deadline_fault());
        } else if self.others.take_challenge(now) {
            self.append(Body::Challenge);
        } else if self.propose_at().is_some_and(|at| at <= now) {
            self.propose((0..self.me.world_size).filter_map(|rank| Some(self.joins.get(&Rank(rank))?.id)).collect());
        }
    }

    /// Takes one record of the log.
    pub(crate) fn handle_record(&mut self, now: Instant, record: &Record<'_>) {
        let header = record.header;
        if header.instance != self.me.instance {
            // Not verified: see the module's head for what is made of it.
            if header.version == RECORD_VERSION
                && let Ok(Some(body)) = Body::decode(header.kind, record.body)
                && self.others.handle(now, &header, &body)
                && matches!(self.state, State::Joining)
            {
                self.fail(self.name_taken());
            }
            return;
        }
        if !record.verified {
            self.rejected += 1;
            if header.rank != self.me.rank && header.rank.0 < WORLD_SIZE_MAX {
                self.unverified.insert(header.rank);
            }
        } else if self.remember(header.id) {
            if header.version != RECORD_VERSION {
                self.conflict(version_fault(header.rank, "control records", header.version, RECORD_VERSION));
            } else {
                match Body::decode(header.kind, record.body) {
                    Ok(Some(body)) => self.handle_body(now, header.rank, header.id, body),
                    Ok(None) => {}
                    Err(_) => self.rejected += 1,
                }
            }
        }
        self.weigh_suspicion(now);
    }

    fn handle_body(&mut self, now: Instant, rank: Rank, id: RecordId, body: Body) {
        match body {
            Body::Join { world_size, protocol, endpoint } => {
                self.handle_join(now, rank, id, (world_size, protocol, endpoint));
            }
            Body::Propose { epoch, members } => self.handle_propose(epoch, &members),
            Body::Failed(fault) if rank != self.me.rank => {
                let fault = if fault.reporter.is_none() { fault.reported_by(rank) } else { fault };
                match self.state {
                    State::Joining => self.fail(fault),
                    _ if self.events.len() < EVENTS_MAX => self.events.push_back(ControlEvent::Failed(fault)),
                    _ => {}
                }
            }
            Body::Left if rank != self.me.rank => {
                let detail = format!("{rank} left before the job had started; look at its output for the reason");
                self.conflict(Fault::new(FaultKind::RankLeft, detail).at(rank));
            }
            Body::Challenge => self.others.challenged(now, id),
            Body::Alive { challenge } => self.others.answered(challenge),
            Body::Failed(_) | Body::Left => {}
        }
    }

    fn handle_join(&mut self, now: Instant, rank: Rank, id: RecordId, join: (u32, u16, Endpoint)) {
        let (world_size, protocol, endpoint) = join;
        self.others.settle();
        if protocol != PROTOCOL_VERSION {
            return self.conflict(version_fault(rank, "protocol", protocol, PROTOCOL_VERSION));
        }
        if world_size != self.me.world_size {
            let detail = format!(
                "{rank} joined job '{}' with world size {world_size}, but {} has world size {}: start all ranks with \
                 the same world size",
                self.me.job, self.me.rank, self.me.world_size
            );
            return self.conflict(Fault::new(FaultKind::WorldMismatch, detail).at(rank));
        }
        if rank.0 >= world_size {
            let detail = format!("{rank} joined a job of {world_size} ranks: ranks count from 0");
            return self.conflict(Fault::new(FaultKind::WorldMismatch, detail).at(rank));
        }
        if self.joins.get(&rank).is_some_and(|joined| joined.id != id) {
            return self.conflict(self.taken_twice(rank));
        }
        if rank == self.me.rank && id == self.me.join_id {
            self.seen_self_at.get_or_insert(now);
            self.others.seen_self(now);
        }
        self.joins.insert(rank, Joined { id, endpoint });
        if self.joins.len() == self.me.world_size as usize {
            self.complete_at.get_or_insert(now);
        }
    }

    fn handle_propose(&mut self, epoch: Epoch, members: &[RecordId]) {
        let valid = matches!(self.state, State::Joining)
            && epoch == FIRST_EPOCH
            && members.len() == self.me.world_size as usize
            && members
                .iter()
                .zip(0..)
                .all(|(id, rank)| self.joins.get(&Rank(rank)).is_some_and(|joined| joined.id == *id));
        if !valid {
            return;
        }
        if members.get(self.me.rank.index()) != Some(&self.me.join_id) {
            return self.fail(self.taken_twice(self.me.rank));
        }
        members.clone_into(&mut self.members);
        let members = self.joins.values().map(|joined| joined.endpoint.clone()).collect();
        self.state = State::Member(Membership { epoch, members });
    }

    /// What stands in the log before the members were decided ends the job on every rank; later it is the affair of
    /// the rank that wrote it.
    fn conflict(&mut self, fault: Fault) {
        if matches!(self.state, State::Joining) {
            self.fail(fault);
        }
    }

    fn fail(&mut self, fault: Fault) {
        self.state = State::Failed(fault);
    }

    fn append(&mut self, body: Body) {
        self.appends.push_back(Append { id: None, body });
    }

    fn propose(&mut self, members: Vec<RecordId>) {
        self.proposed = true;
        self.append(Body::Propose { epoch: FIRST_EPOCH, members });
    }

    fn propose_at(&self) -> Option<Instant> {
        if self.proposed {
            return None;
        }
        let ready = self.complete_at?.max(self.others.clear_at(ANSWER_MAX)?);
        Some(ready + grace(PROPOSE_GRACE, self.me.rank))
    }

    /// Remembers a record's id. False if it was seen before.
    fn remember(&mut self, id: RecordId) -> bool {
        let (known, order) = &mut self.ids;
        if !known.insert(id) {
            return false;
        }
        order.push_back(id);
        if order.len() > IDS_PER_RANK_MAX * self.me.world_size as usize
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
        true
    }

    /// If nothing of all the others verifies, it is this rank that has another secret. The others cannot conclude
    /// anything from *our* records: an outsider could write such ones, and must not be able to end a job. They name
    /// us when their deadline has passed.
    fn weigh_suspicion(&mut self, now: Instant) {
        let others_joined = self.joins.keys().any(|rank| *rank != self.me.rank);
        let all_unverified =
            (0..self.me.world_size).map(Rank).all(|rank| rank == self.me.rank || self.unverified.contains(&rank));
        if self.me.world_size > 1 && all_unverified && !others_joined {
            self.suspect_at.get_or_insert(now + SUSPECT_GRACE);
        } else {
            self.suspect_at = None;
        }
    }

    fn other_secret(&self) -> Fault {
        let me = self.me.rank;
        let detail = format!(
            "no record of the other ranks of job '{}' verifies with the secret of {me}: give all ranks the same \
             secret (the launcher makes one for each launch)",
            self.me.job
        );
        Fault::new(FaultKind::SecretMismatch, detail).at(me)
    }

    fn name_taken(&self) -> Fault {
        let detail = format!(
            "a live job named '{}' is on this broker: end it, or give this job another name or namespace",
            self.me.job
        );
        Fault::new(FaultKind::JobNameTaken, detail)
    }

    fn taken_twice(&self, rank: Rank) -> Fault {
        let detail = format!(
            "two processes joined job '{}' as {rank}: give each process its own rank, from 0 to {}",
            self.me.job,
            self.me.world_size - 1
        );
        Fault::new(FaultKind::WorldMismatch, detail).at(rank)
    }

    fn deadline_fault(&self) -> Fault {
        let missing: Vec<Rank> =
            (0..self.me.world_size).map(Rank).filter(|rank| !self.joins.contains_key(rank)).collect();
        let seconds = self.deadline_after.as_secs_f64();
        let Some(first) = missing.first() else {
            let detail = format!(
                "all {} ranks of job '{}' joined, but the members were not agreed on within {seconds} s: is the \
                 broker overloaded?",
                self.me.world_size, self.me.job
            );
            return Fault::new(FaultKind::DeadlineExceeded, detail);
        };
        let mut detail = format!(
            "{} of {} ranks have not joined job '{}' within {seconds} s: {}; are they running, with the same job \
             name, instance and broker?",
            missing.len(),
            self.me.world_size,
            self.me.job,
            list(&missing)
        );
        let other_secret: Vec<Rank> = missing.iter().copied().filter(|rank| self.unverified.contains(rank)).collect();
        if !other_secret.is_empty() {
            let records = format!(" Records came from {} that do not verify: another secret?", list(&other_secret));
            detail.push_str(&records);
        }
        Fault::new(FaultKind::DeadlineExceeded, detail).at(*first)
    }
}

/// A delay that keeps ranks from doing the same thing at once.
fn grace(each: Duration, rank: Rank) -> Duration {
    each.saturating_mul(rank.0).min(GRACE_MAX)
}

fn version_fault(rank: Rank, what: &str, theirs: u16, ours: u16) -> Fault {
    let detail =
        format!("{rank} speaks {what} version {theirs}, this rank version {ours}: run the same gradwire on every rank");
    Fault::new(FaultKind::ProtocolVersion, detail).at(rank)
}

/// Ranks for people: at most 16 of them.
fn list(ranks: &[Rank]) -> String {
    let mut text = ranks.iter().take(16).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() > 16 {
        text.push_str(", ...");
    }
    text
}

#[cfg(test)]
mod tests;
