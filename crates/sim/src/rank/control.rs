//! One rank at the control log: `gradwire_proto::membership::Log` decides, as it does in the product; when to speak is
//! decided here, by the same rules as in `crates/control/src/rendezvous.rs`.
//!
//! Left out, because it is not about members: MACs, other jobs of the same name, and stored snapshots (readers begin
//! with the log's start).

use std::collections::VecDeque;
use std::rc::Rc;

use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{Body, Change, Departure, FIRST_EPOCH, Log, RecordId, Replica, View};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank};

use crate::broker::{self, Record, Topic};
use crate::event::{MS, Nanos, SECOND};
use crate::process::{Context, Identity, Out};

const PROPOSE_GRACE: Nanos = 300 * MS;
const GROW_GRACE: Nanos = 100 * MS;
const PROPOSE_AGAIN: Nanos = SECOND;
const RESTATE_GRACE: Nanos = 50 * MS;
const GRACE_MAX: Nanos = 10 * SECOND;
const PROTOCOL: u16 = gradwire_proto::frame::PROTOCOL_VERSION as u16;

/// What a rank learns from the log.
#[derive(Clone, Debug)]
pub(super) enum News {
    /// It is a member of this view, or, while it joins a running job, is not yet.
    View(View),
    /// It could not join.
    Refused(Fault),
    /// Others go on without it, or it cannot go on with them.
    Removed(Fault),
    /// A rank said that the job failed.
    Failed(Fault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Joining,
    /// It joined a job that runs, and is no member yet.
    Late,
    Member,
    Over,
}

/// A record without a receipt.
#[derive(Debug)]
struct Pending {
    id: RecordId,
    body: Body,
    token: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Control {
    me: Identity,
    elastic: bool,
    deadline: Nanos,
    state: State,
    replica: Replica,
    restate_at: Option<Nanos>,
    complete_at: Option<Nanos>,
    change_due_at: Option<Nanos>,
    proposed: bool,
    /// It joined a running job, and has what it needs to take part.
    ready: bool,
    pending: VecDeque<Pending>,
    linked: bool,
    tokens: u64,
    news: VecDeque<News>,
}

impl Control {
    pub(super) fn new(me: Identity, now: Nanos) -> Self {
        let ranks = me.plan.ranks;
        Self {
            elastic: me.plan.is_elastic(),
            deadline: now + me.plan.deadline_ns(),
            me,
            state: State::Joining,
            replica: Replica::new(ranks),
            restate_at: None,
            complete_at: None,
            change_due_at: None,
            proposed: false,
            ready: false,
            pending: VecDeque::new(),
            linked: false,
            tokens: 0,
            news: VecDeque::new(),
        }
    }

    fn log(&self) -> &Log {
        self.replica.log()
    }

    pub(super) fn view(&self) -> &View {
        self.log().view()
    }

    pub(super) fn poll_news(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// How much it remembers: candidates, the gone and the retired, and what has no receipt.
    pub(super) fn remembered(&self) -> usize {
        let snapshot = self.log().snapshot();
        snapshot.candidates.len() + snapshot.gone.len() + snapshot.retired.len() + self.pending.len()
    }

    pub(super) fn is_said(&self) -> bool {
        self.pending.is_empty()
    }

    pub(super) fn link_opened(&mut self) {
        self.linked = true;
        for pending in &mut self.pending {
            pending.token = None;
        }
        self.pending.retain(|pending| !matches!(pending.body, Body::Join { .. } | Body::Propose { .. }));
        let endpoint = Endpoint { hostname: format!("p{}", self.me.process.0), ..Endpoint::default() };
        let body = Body::Join { world_size: self.me.plan.ranks, protocol: PROTOCOL, endpoint };
        self.pending.push_front(Pending { id: self.me.join, body, token: None });
        self.proposed = false;
        self.replica.read_again();
        self.restate_at = None;
    }

    /// A broker that lost its log has to be told again what this rank said; it may be told twice.
    pub(super) fn say_ready_again(&mut self, context: &mut Context<'_>) {
        if self.ready && self.state == State::Late {
            self.say(context, Body::Ready { author: self.me.join });
        }
    }

    pub(super) fn link_lost(&mut self) {
        self.linked = false;
    }

    pub(super) fn receipt(&mut self, token: u64) {
        self.pending.retain(|pending| pending.token != Some(token));
    }

    fn say(&mut self, context: &mut Context<'_>, body: Body) {
        let id = context.unique();
        self.pending.push_back(Pending { id, body, token: None });
    }

    /// The job failed, for a reason that all have to know.
    pub(super) fn failed(&mut self, context: &mut Context<'_>, fault: &Fault) {
        self.say(context, Body::Failed { author: self.me.join, fault: fault.clone() });
    }

    pub(super) fn leave(&mut self, context: &mut Context<'_>) {
        self.say(context, Body::Left { author: self.me.join });
        self.state = State::Over;
    }

    /// This process joined a running job, and has what it needs to take part: the members may take it in.
    pub(super) fn ready(&mut self, context: &mut Context<'_>) {
        if !self.ready && self.state == State::Late {
            self.ready = true;
            self.say(context, Body::Ready { author: self.me.join });
        }
    }

    /// Another member is not counted on any more.
    pub(super) fn suspect(&mut self, context: &mut Context<'_>, member: RecordId, reason: &str) {
        let epoch = self.log().view().epoch;
        self.say(context, Body::Suspect { author: self.me.join, epoch, member, reason: reason.to_owned() });
    }

    /// Hands what has to be said to the broker.
    pub(super) fn flush(&mut self, context: &mut Context<'_>) {
        if !self.linked {
            return;
        }
        for pending in self.pending.iter_mut().filter(|pending| pending.token.is_none()) {
            self.tokens += 1;
            pending.token = Some(self.tokens);
            let body = broker::Body::Bytes(pending.body.kind(), Rc::from(pending.body.encode()));
            let record = Record { id: pending.id, rank: self.me.place, key: 0, body };
            context.out.push(Out::Append { topic: Topic::Control, token: self.tokens, record });
        }
    }

    pub(super) fn record(&mut self, now: Nanos, record: &Record) {
        let broker::Body::Bytes(kind, bytes) = &record.body else { return };
        let (rank, id) = (Rank(record.rank), record.id);
        let is_new = self.replica.remember(id);
        let Ok(Some(body)) = Body::decode(*kind, bytes) else { return };
        let change = self.replica.apply(rank, id, &body, is_new);
        if self.replica.is_restating(self.me.join, id, &change) {
            self.restate_at = Some(now + grace(RESTATE_GRACE, self.live_index()));
        }
        match &body {
            Body::Join { .. } if is_new => self.handle_join(now, rank, &change),
            Body::Failed { author, fault } if is_new && *author != self.me.join => {
                self.handle_failed(rank, *author, fault);
            }
            _ => {}
        }
        self.handle_change(now, change);
        self.weigh_change(now);
    }

    fn handle_join(&mut self, now: Nanos, rank: Rank, change: &Change) {
        if *change == Change::RankTaken {
            self.conflict(FaultKind::WorldMismatch, rank, "two processes joined as one rank");
        }
        self.weigh_completeness(now);
        self.weigh_lateness();
    }

    fn weigh_completeness(&mut self, now: Nanos) {
        if self.is_undecided() && self.is_complete() {
            self.complete_at.get_or_insert(now);
        }
    }

    /// Whether there is a process for each rank that the job starts with.
    fn is_complete(&self) -> bool {
        let ranks = self.me.plan.ranks as usize;
        self.log().candidates().len() >= ranks && self.log().next_members().len() == ranks
    }

    /// Whether this process turns out to have joined a job that runs.
    fn weigh_lateness(&mut self) {
        if !self.elastic || self.state != State::Joining || self.log().view().epoch < FIRST_EPOCH {
            return;
        }
        if self.log().candidates().iter().any(|candidate| candidate.id == self.me.join) {
            self.state = State::Late;
            self.news.push_back(News::View(self.log().view().clone()));
        }
    }

    fn handle_failed(&mut self, rank: Rank, author: RecordId, fault: &Fault) {
        let view = self.log().view();
        let has_say = if view.epoch == Epoch(0) {
            true
        } else if self.elastic {
            self.log().live().any(|member| member.id == author)
        } else {
            view.member(author).is_some()
        };
        if has_say {
            let fault = if fault.reporter.is_none() { fault.clone().reported_by(rank) } else { fault.clone() };
            match self.state {
                State::Joining => self.refuse(fault),
                _ => self.news.push_back(News::Failed(fault)),
            }
        }
    }

    fn handle_change(&mut self, now: Nanos, change: Change) {
        match change {
            Change::View => self.handle_view(),
            Change::Restored => self.handle_restored(now),
            Change::Gone(member, Departure::Left) if member.id != self.me.join => {
                self.conflict(FaultKind::RankLeft, member.rank, "a rank left before the job had started");
            }
            Change::Gone(member, Departure::Suspected(_)) if member.id == self.me.join => match self.state {
                State::Joining => self.refuse(self.removed()),
                State::Late => self.remove(self.removed()),
                State::Member | State::Over => {}
            },
            Change::Diverged if matches!(self.state, State::Member | State::Late) => {
                let detail = "the log was lost, and ranks had gone on with different members";
                self.remove(Fault::new(FaultKind::Diverged, detail).at(Rank(self.me.place)));
            }
            _ => {}
        }
    }

    fn handle_view(&mut self) {
        self.change_due_at = None;
        let view = self.log().view().clone();
        let member = view.member(self.me.join).is_some();
        let gone = self.log().is_gone(self.me.join);
        match self.state {
            State::Joining | State::Late | State::Member if member => {
                self.state = State::Member;
                self.news.push_back(News::View(view.clone()));
            }
            State::Joining if gone => self.refuse(self.removed()),
            State::Joining if !self.elastic => {
                let detail = "the job has started with another process as this rank";
                self.refuse(Fault::new(FaultKind::WorldMismatch, detail).at(Rank(self.me.place)));
            }
            State::Late if !gone => self.news.push_back(News::View(view.clone())),
            State::Late | State::Member => self.remove(self.removed()),
            State::Joining | State::Over => {}
        }
        self.weigh_lateness();
    }

    fn handle_restored(&mut self, now: Nanos) {
        self.complete_at = None;
        self.change_due_at = None;
        self.weigh_completeness(now);
        if self.state == State::Late && self.log().is_gone(self.me.join) {
            self.remove(self.removed());
        }
        self.weigh_lateness();
    }

    fn removed(&self) -> Fault {
        Fault::new(FaultKind::Removed, "the others went on without this rank").at(Rank(self.me.place))
    }

    fn is_undecided(&self) -> bool {
        self.state == State::Joining && self.log().view().epoch == Epoch(0)
    }

    /// What stands in the log before the members were decided ends the job on every rank.
    fn conflict(&mut self, kind: FaultKind, rank: Rank, detail: &str) {
        if self.is_undecided() {
            self.refuse(Fault::new(kind, detail).at(rank));
        }
    }

    fn refuse(&mut self, fault: Fault) {
        self.over(News::Refused(fault));
    }

    fn remove(&mut self, fault: Fault) {
        self.over(News::Removed(fault));
    }

    fn over(&mut self, news: News) {
        if self.state != State::Over {
            self.state = State::Over;
            self.news.push_back(news);
        }
    }

    fn weigh_change(&mut self, now: Nanos) {
        let may_propose = self.elastic && self.state == State::Member && !self.log().is_gone(self.me.join);
        if !may_propose || !self.log().is_change_due() {
            self.change_due_at = None;
            return;
        }
        let next = self.log().next_members();
        let only_grows = self.log().view().members.iter().all(|member| next.iter().any(|one| one.id == member.id));
        let due = if only_grows { now + GROW_GRACE } else { now };
        let earlier = self.change_due_at.unwrap_or(due);
        self.change_due_at = Some(if only_grows { earlier } else { earlier.min(due) });
    }

    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        let joining = self.state == State::Joining;
        let while_joining = [Some(self.deadline), self.first_propose_at()].into_iter().flatten().filter(|_| joining);
        let later = [self.next_propose_at(), self.restate_at];
        while_joining.chain(later.into_iter().flatten()).min()
    }

    pub(super) fn handle_timeout(&mut self, context: &mut Context<'_>) {
        let now = context.now;
        if self.restate_at.take_if(|at| *at <= now).is_some() {
            let (bodies, change) = self.replica.restate(self.me.join);
            bodies.into_iter().for_each(|body| self.say(context, body));
            self.handle_change(now, change);
            self.weigh_change(now);
        }
        if self.next_propose_at().is_some_and(|at| at <= now) {
            let proposal = self.log().proposal(self.me.join);
            self.say(context, proposal);
            self.change_due_at = Some(now + PROPOSE_AGAIN);
        }
        if self.state != State::Joining {
            return;
        }
        if now >= self.deadline {
            self.refuse(Fault::new(FaultKind::DeadlineExceeded, "joining did not end before the deadline"));
        } else if self.first_propose_at().is_some_and(|at| at <= now) {
            self.proposed = true;
            let proposal = self.log().proposal(self.me.join);
            self.say(context, proposal);
        }
    }

    fn first_propose_at(&self) -> Option<Nanos> {
        if self.proposed || !self.is_undecided() || self.replica.is_lost() {
            return None;
        }
        Some(self.complete_at? + grace(PROPOSE_GRACE, self.me.place))
    }

    fn next_propose_at(&self) -> Option<Nanos> {
        if self.replica.is_lost() {
            return None;
        }
        Some(self.change_due_at? + grace(PROPOSE_GRACE, self.live_index()))
    }

    fn live_index(&self) -> u32 {
        self.log().live().take_while(|member| member.id != self.me.join).count() as u32
    }
}

fn grace(each: Nanos, index: u32) -> Nanos {
    (each * u64::from(index)).min(GRACE_MAX)
}
