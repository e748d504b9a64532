//! One rank at the control log: joins, keeps to the members, and says what has to be said. No socket, no clock.
//!
//! Who the members are is decided by [`gradwire_proto::membership::Log`] from the records alone; here is what is this
//! rank's own affair: when to propose, when to give up, what to tell the owner, and what else is on the log.
//!
//! Every rank appends a Join and reads the log. When all ranks have joined, rank 0 (another one if nothing comes)
//! proposes the members of epoch 1. A conflict (another world size, a rank taken twice, another protocol version)
//! that stands in the log before such a proposal ends the job on every rank. With [`Policy::Fixed`] the members stay
//! as they are; with [`Policy::Elastic`] members that leave or are suspected are left out of the next epoch, and
//! processes that join later are taken in once they say that they are ready ([`Rendezvous::ready`]).
//!
//! Only records with a valid MAC count. Records of other instances of the job (other launches, with other secrets)
//! cannot be verified: from them it is only learnt that another job of this name may be alive. Such a job is asked
//! ([`Body::Challenge`]), and the newcomer gives way if it answers. A forged answer can keep a job from starting,
//! never disturb a running one; whoever can forge it could as well fill the topic.
//!
//! Call [`Rendezvous::link_opened`] after each (re)connection, [`Rendezvous::handle_record`] for each record, and
//! [`Rendezvous::handle_timeout`] at [`Rendezvous::poll_timeout`]; then drain [`Rendezvous::poll_append`] and
//! [`Rendezvous::poll_event`], and look at [`Rendezvous::outcome`]. Records may come more than once.

mod joining;
mod others;
mod types;
mod words;

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::membership::{Body, Change, Departure, FIRST_EPOCH, Log, RecordId, Replica, Snapshot, View};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank};

use crate::record::{RECORD_VERSION, Record};
use others::Others;
pub(crate) use types::{Append, Me};
pub use types::{ControlEvent, Policy};

/// How long a rank waits for the ranks before it to propose.
const PROPOSE_GRACE: Duration = Duration::from_millis(300);
/// How long a change that only adds members waits for others that come at the same time.
const GROW_GRACE: Duration = Duration::from_millis(100);
/// When a proposal is made again that did not lead to a view: others changed at the same time.
const PROPOSE_AGAIN: Duration = Duration::from_secs(1);
/// How long a member waits for the ranks before it to write a lost log again.
const RESTATE_GRACE: Duration = Duration::from_millis(50);
/// A snapshot is stored after a new view, and after this many changes.
const SNAPSHOT_CHANGES: u64 = 64;
/// How long a rank waits for the ranks before it to ask whether another job lives.
const CHALLENGE_GRACE: Duration = Duration::from_millis(100);
/// Longest grace, whatever the rank.
const GRACE_MAX: Duration = Duration::from_secs(10);
/// Most events that wait to be taken.
const EVENTS_MAX: usize = 1024;

/// The protocol version of the data path that a Join announces.
pub(crate) const PROTOCOL_VERSION: u16 = gradwire_proto::frame::PROTOCOL_VERSION as u16;

#[derive(Debug)]
enum State {
    Joining,
    /// It joined a job that runs, and is no member yet.
    Late,
    Member,
    Removed,
    Failed(Fault),
}

/// One rank's view of the control log.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    me: Me,
    deadline: Instant,
    deadline_after: Duration,
    state: State,
    replica: Replica,
    /// When to say what the log lacks, after a reconnection: everything before our own Join was read.
    restate_at: Option<Instant>,
    /// When the last rank joined.
    complete_at: Option<Instant>,
    /// From when on a proposal of the next epoch is wanted.
    change_due_at: Option<Instant>,
    others: Others,
    /// Ranks of this instance that wrote what does not verify.
    unverified: BTreeSet<Rank>,
    suspect_at: Option<Instant>,
    proposed: bool,
    /// The last proposal of a later epoch: the view that it followed, and the members.
    proposed_next: Option<(RecordId, Vec<RecordId>)>,
    /// Why a member does not want this process.
    unwanted: Option<String>,
    /// This process joined a running job, and has what it needs to take part.
    ready: bool,
    /// The epoch, and the number of changes, of the last snapshot that was stored.
    stored: (Epoch, u64),
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
            replica: Replica::new(me.world_size),
            restate_at: None,
            complete_at: None,
            change_due_at: None,
            others: Others::new(me.instance, me.rank),
            unverified: BTreeSet::new(),
            suspect_at: None,
            proposed: false,
            proposed_next: None,
            unwanted: None,
            ready: false,
            stored: (FIRST_EPOCH, 0),
            appends: VecDeque::new(),
            events: VecDeque::new(),
            rejected: 0,
            me,
        }
    }

    fn log(&self) -> &Log {
        self.replica.log()
    }

    /// How joining ended, once it has: with a view that this process is in or, in a running job, with one that it is not
    /// in yet.
    pub(crate) fn outcome(&self) -> Option<Result<&View, &Fault>> {
        match &self.state {
            State::Joining => None,
            State::Late | State::Member | State::Removed => Some(Ok(self.log().view())),
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

    /// A snapshot to store, where it is this rank's turn and the last one is old.
    pub(crate) fn poll_snapshot(&mut self) -> Option<Snapshot> {
        let (epoch, changes) = self.stored;
        let now = (self.log().view().epoch, self.log().applied());
        let old = now.0 > epoch || now.1 >= changes + SNAPSHOT_CHANGES;
        if !old
            || self.replica.is_lost()
            || !self.is_elastic_member()
            || self.log().live().next()?.id != self.me.join_id
        {
            return None;
        }
        self.stored = now;
        Some(self.log().snapshot())
    }

    /// How many records of this instance were ignored because they did not verify or were malformed.
    pub(crate) fn rejected(&self) -> u64 {
        self.rejected
    }

    /// A link to the broker is open, and the log will be read: from its start, or from behind a snapshot, which is
    /// then handed to [`Rendezvous::handle_snapshot`] first. Says again what this rank has to say: a broker that keeps
    /// its log in memory may have lost it.
    pub(crate) fn link_opened(&mut self) {
        let Me { world_size, endpoint, join_id, .. } = self.me.clone();
        let join = Body::Join { world_size, protocol: PROTOCOL_VERSION, endpoint };
        self.appends.push_back(Append { id: Some(join_id), body: join });
        self.proposed = false;
        if self.ready && matches!(self.state, State::Late) {
            self.append(Body::Ready { author: join_id });
        }
        self.others.link_opened();
        self.replica.read_again();
        self.restate_at = None;
    }

    /// Takes a snapshot that stands for the part of the log that is not read.
    pub(crate) fn handle_snapshot(&mut self, now: Instant, rank: Rank, id: RecordId, snapshot: Snapshot) {
        self.others.settle();
        // For who has read the log before it is where reading again begins, and no news.
        let is_new = self.log().view().epoch == Epoch(0);
        self.handle_body(now, rank, id, Body::Snapshot(snapshot), is_new);
    }

    /// This process joined a running job, and has what it needs to take part: the members may take it in.
    pub(crate) fn ready(&mut self) {
        if !self.ready && matches!(self.state, State::Late) {
            self.ready = true;
            self.append(Body::Ready { author: self.me.join_id });
        }
    }

    /// Tells the others that this rank does not count on this process any more, if it is a member. Returns its rank then.
    /// A rank alone would not do: another process may have it by now.
    pub(crate) fn suspect(&mut self, process: RecordId, reason: String) -> Option<Rank> {
        let view = self.log().view();
        let rank = view.member(process)?.rank;
        let body = Body::Suspect { author: self.me.join_id, epoch: view.epoch, member: process, reason };
        self.append(body);
        Some(rank)
    }

    /// When [`Rendezvous::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let joining = matches!(self.state, State::Joining);
        let while_joining = [Some(self.deadline), self.suspect_at, self.first_propose_at(), self.others.challenge_at()];
        let later = [self.next_propose_at(), self.restate_at];
        let always = later.into_iter().flatten().chain(self.others.answer_at());
        while_joining.into_iter().flatten().filter(|_| joining).chain(always).min()
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if let Some(challenge) = self.others.take_answer(now) {
            self.append(Body::Alive { challenge });
        }
        if self.restate_at.take_if(|at| *at <= now).is_some() {
            self.restate(now);
        }
        if self.next_propose_at().is_some_and(|at| at <= now) {
            self.proposed_next = Some(self.next_proposal());
            self.append(self.log().proposal(self.me.join_id));
            self.change_due_at = Some(now + PROPOSE_AGAIN);
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
        } else if self.first_propose_at().is_some_and(|at| at <= now) {
            self.proposed = true;
            self.append(self.log().proposal(self.me.join_id));
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
        } else if header.version != RECORD_VERSION {
            self.conflict(words::version(header.rank, "control records", header.version, RECORD_VERSION));
        } else {
            match Body::decode(header.kind, record.body) {
                Ok(Some(body)) => {
                    let is_new = self.replica.remember(header.id);
                    self.handle_body(now, header.rank, header.id, body, is_new);
                }
                Ok(None) => {}
                Err(_) => self.rejected += 1,
            }
        }
        self.weigh_suspicion(now);
    }

    /// Not `is_new`: the record was read before. It changes nothing then, but in a log that is read again.
    fn handle_body(&mut self, now: Instant, rank: Rank, id: RecordId, body: Body, is_new: bool) {
        if let Body::Join { world_size, protocol, .. } = body {
            if is_new {
                self.others.settle();
            }
            if let Err(fault) = self.check_join(rank, world_size, protocol) {
                if is_new {
                    self.turn_away(id, fault);
                }
                return;
            }
        }
        let change = self.replica.apply(rank, id, &body, is_new);
        if self.replica.is_restating(self.me.join_id, id, &change) {
            self.restate_at = Some(now + grace(RESTATE_GRACE, self.live_index()));
        }
        match &body {
            Body::Join { .. } if is_new => self.handle_join(now, rank, id, &change),
            Body::Suspect { member, reason, .. } if *member == self.me.join_id => self.unwanted = Some(reason.clone()),
            Body::Failed { author, fault } if is_new && *author != self.me.join_id => {
                self.handle_failed(rank, *author, fault.clone());
            }
            Body::Challenge if is_new => self.others.challenged(now, id),
            Body::Alive { challenge } if is_new => self.others.answered(*challenge),
            _ => {}
        }
        self.handle_change(now, change);
        self.weigh_change(now);
        self.weigh_end();
    }

    fn handle_failed(&mut self, rank: Rank, author: RecordId, fault: Fault) {
        let fault = if fault.reporter.is_none() { fault.reported_by(rank) } else { fault };
        // Once there are members, who is none has no say: a newcomer that was not taken in, or one that was removed.
        let view = self.log().view();
        let has_say = match self.me.policy {
            _ if view.epoch == Epoch(0) => true,
            Policy::Fixed => view.member(author).is_some(),
            Policy::Elastic { .. } => self.log().live().any(|member| member.id == author),
        };
        match self.state {
            _ if !has_say => {}
            State::Joining => self.fail(fault),
            _ => self.tell(ControlEvent::Failed(fault)),
        }
    }

    fn handle_change(&mut self, now: Instant, change: Change) {
        match change {
            Change::View => self.handle_view(),
            Change::Restored => self.handle_restored(now),
            Change::Gone(member, Departure::Left) if member.id != self.me.join_id => {
                let rank = member.rank;
                let detail = format!("{rank} left before the job had started; look at its output for the reason");
                self.conflict(Fault::new(FaultKind::RankLeft, detail).at(rank));
            }
            Change::Gone(member, Departure::Suspected(by))
                if member.id == self.me.join_id && matches!(self.state, State::Joining) =>
            {
                self.fail(self.refused(by));
            }
            Change::Gone(member, Departure::Suspected(by))
                if member.id == self.me.join_id && matches!(self.state, State::Late) =>
            {
                self.state = State::Removed;
                self.tell(ControlEvent::Removed(self.refused(by)));
            }
            Change::Diverged if matches!(self.state, State::Member | State::Late) => {
                self.tell(ControlEvent::Failed(self.diverged()));
            }
            _ => {}
        }
    }

    fn handle_view(&mut self) {
        let view = self.log().view();
        let member = view.member(self.me.join_id).is_some();
        match self.state {
            State::Joining if member => self.state = State::Member,
            State::Joining if self.log().is_gone(self.me.join_id) => self.fail(self.removed()),
            State::Joining if self.me.policy == Policy::Fixed => self.fail(self.too_late()),
            State::Late | State::Member if member => {
                let view = view.clone();
                self.state = State::Member;
                self.tell(ControlEvent::View(view));
            }
            State::Late if !self.log().is_gone(self.me.join_id) => self.tell(ControlEvent::View(view.clone())),
            State::Member | State::Late => {
                self.state = State::Removed;
                self.tell(ControlEvent::Removed(self.removed()));
            }
            _ => {}
        }
        self.weigh_lateness();
        self.change_due_at = None;
    }

    /// The log was lost, and stands again: with other candidates, and others gone.
    fn handle_restored(&mut self, now: Instant) {
        self.complete_at = None;
        self.change_due_at = None;
        self.weigh_completeness(now);
        if matches!(self.state, State::Late) && self.log().is_gone(self.me.join_id) {
            self.state = State::Removed;
            self.tell(ControlEvent::Removed(self.removed()));
        }
        self.weigh_lateness();
    }

    /// Whether a next epoch is wanted, and since when.
    fn weigh_change(&mut self, now: Instant) {
        if !self.is_elastic_member() || !self.log().is_change_due() {
            self.change_due_at = None;
            return;
        }
        let next = self.log().next_members();
        let only_grows = self.log().view().members.iter().all(|member| next.iter().any(|one| one.id == member.id));
        let due = if only_grows { now + GROW_GRACE } else { now };
        let earlier = self.change_due_at.unwrap_or(due);
        // A further suspicion of the same process is no news: what was proposed is proposed again after a while only.
        let is_news = self.proposed_next != Some(self.next_proposal());
        self.change_due_at = Some(if only_grows || !is_news { earlier } else { earlier.min(due) });
    }

    /// Whether nobody is left who could take this process in.
    fn weigh_end(&mut self) {
        if matches!(self.state, State::Late) && self.log().is_over() {
            self.state = State::Removed;
            self.tell(ControlEvent::Failed(self.over()));
        }
    }

    fn next_proposal(&self) -> (RecordId, Vec<RecordId>) {
        (self.log().view().id, self.log().next_members().into_iter().map(|member| member.id).collect())
    }

    fn is_elastic_member(&self) -> bool {
        let elastic = matches!(self.me.policy, Policy::Elastic { .. });
        elastic && matches!(self.state, State::Member) && !self.log().is_gone(self.me.join_id)
    }

    fn fail(&mut self, fault: Fault) {
        self.state = State::Failed(fault);
    }

    fn tell(&mut self, event: ControlEvent) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        }
    }

    fn append(&mut self, body: Body) {
        self.appends.push_back(Append { id: None, body });
    }

    /// Says what the log lacks that was read again.
    fn restate(&mut self, now: Instant) {
        let (bodies, change) = self.replica.restate(self.me.join_id);
        bodies.into_iter().for_each(|body| self.append(body));
        self.handle_change(now, change);
        self.weigh_change(now);
    }

    fn next_propose_at(&self) -> Option<Instant> {
        if self.replica.is_lost() {
            return None;
        }
        Some(self.change_due_at? + grace(PROPOSE_GRACE, self.live_index()))
    }

    /// How many live members have a lower rank.
    fn live_index(&self) -> u32 {
        self.log().live().take_while(|member| member.id != self.me.join_id).count() as u32
    }
}

/// A delay that keeps ranks from doing the same thing at once.
fn grace(each: Duration, index: u32) -> Duration {
    each.saturating_mul(index).min(GRACE_MAX)
}

#[cfg(test)]
mod tests;
