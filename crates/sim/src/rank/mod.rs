//! A rank of the simulated job: control log, links, exchange and trainer, put together as the product puts them together.
//! It knows what the control log, its peers and its own memory tell it, and nothing else.

mod control;
mod epoch;
mod exchange;
mod holder;
mod links;
mod newcomer;
mod receive;
mod reduce;
mod regions;
mod state;
mod stream;
mod trainer;

use std::collections::VecDeque;
use std::rc::Rc;

use gradwire_proto::frame::FrameKind;
use gradwire_proto::membership::View;
use gradwire_proto::{Epoch, Fault, FaultKind};

use crate::broker::{Body, Record, Topic};
use crate::event::{MS, Nanos, SECOND};
use crate::mutation::Mutation;
use crate::plan::Recovery;
use crate::process::{Context, Identity, Incoming, Out, Program};
use crate::report::{CommitRecord, ProcessId, Report};
use control::{Control, News};
use exchange::Exchange;
pub(crate) use exchange::JOB;
use links::{Links, Mesh};
use newcomer::Newcomer;
use trainer::Trainer;

/// Tokens of version records; those of control records are below.
const COMMIT_TOKENS: u64 = 1 << 32;
/// How long a rank that leaves gives the others what they still need, where a step is final when all have it.
const FAREWELL_MAX: Nanos = 2 * SECOND;
/// How long a rank that is through waits for what it said to be on record.
const LAST_WORDS: Nanos = 4 * SECOND;
/// How long one that failed does.
const LAST_WORDS_FAILED: Nanos = 200 * MS;

#[derive(Debug)]
enum Phase {
    /// Waits for a view.
    Joining,
    /// Joins a running job: gets the state, and follows.
    CatchingUp,
    /// A member: opens its links.
    Linking(Mesh),
    Exchanging,
    /// Through with all steps, or as far as it comes: says goodbye.
    Leaving(Nanos, Result<(), Fault>),
    /// Has said that it left, or failed, and waits for the receipt.
    Ending(Nanos, Result<(), Fault>),
    Ended,
}

/// A rank's process.
#[derive(Debug)]
pub(crate) struct RankProgram {
    me: Identity,
    /// By when it has to have joined.
    deadline: Nanos,
    control: Control,
    links: Links,
    /// Of a process that joins a running job, until it takes part.
    newcomer: Option<Newcomer>,
    exchange: Option<Exchange>,
    trainer: Option<Trainer>,
    phase: Phase,
    /// Version records without a receipt, with their tokens while they are on the way.
    commits: VecDeque<(Rc<CommitRecord>, Option<u64>)>,
    commit_tokens: u64,
    linked: bool,
    leaves: bool,
    hangs_until: Nanos,
}

impl RankProgram {
    pub(crate) fn new(me: Identity, now: Nanos) -> Self {
        Self {
            control: Control::new(me.clone(), now),
            deadline: now + me.plan.deadline_ns(),
            me,
            links: Links::default(),
            newcomer: None,
            exchange: None,
            trainer: None,
            phase: Phase::Joining,
            commits: VecDeque::new(),
            commit_tokens: COMMIT_TOKENS,
            linked: false,
            leaves: false,
            hangs_until: 0,
        }
    }

    fn take(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        match incoming {
            Incoming::BrokerUp => {
                self.linked = true;
                self.control.link_opened();
                self.control.say_ready_again(context);
                self.commits.iter_mut().for_each(|(_, token)| *token = None);
            }
            Incoming::BrokerDown => {
                self.linked = false;
                self.control.link_lost();
            }
            Incoming::Record { topic: Topic::Control, record, .. } => self.control.record(context.now, &record),
            Incoming::Record { .. } | Incoming::CaughtUp => {}
            Incoming::Receipt { token, .. } if token < COMMIT_TOKENS => self.control.receipt(token),
            Incoming::Receipt { token, .. } => {
                let taken = self.commits.iter().position(|(_, sent)| *sent == Some(token));
                if let Some((record, _)) = taken.and_then(|at| self.commits.remove(at)) {
                    context.report(Report::Committed(record));
                }
            }
            Incoming::Leave => self.leaves = true,
            Incoming::Hang { until } => self.hangs_until = self.hangs_until.max(until),
            Incoming::Hello { from, epoch, answer } => self.take_hello(context, from, epoch, answer),
            Incoming::State { from, stream, frame } => self.take_state(context, from, stream, &frame),
            Incoming::StateEnd { from, stream } => {
                if let Some(newcomer) = &mut self.newcomer {
                    newcomer.stream_ended(from, stream);
                }
                if let Some(exchange) = &mut self.exchange {
                    exchange.holder.release((from, stream));
                }
            }
            Incoming::Sent { .. } => self.hand_on(context, incoming),
            Incoming::Down { from } => {
                if let Some(newcomer) = &mut self.newcomer {
                    newcomer.lose(from, "it is gone", true);
                }
                if let Some(exchange) = &mut self.exchange {
                    exchange.holder.release_all_of(from);
                }
                self.take_linked(context, from, incoming);
            }
            Incoming::Message { from, .. } | Incoming::Asked { from, .. } | Incoming::Landed { from, .. } => {
                self.take_linked(context, from, incoming);
            }
        }
    }

    fn take_linked(&mut self, context: &mut Context<'_>, from: ProcessId, incoming: Incoming) {
        if let Some(incoming) = self.links.take(from, incoming) {
            self.hand_on(context, incoming);
        }
    }

    fn hand_on(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        if let Some(exchange) = &mut self.exchange {
            exchange.handle(context, incoming);
        }
    }

    /// Members of one epoch open links, from when they know of it.
    fn take_hello(&mut self, context: &mut Context<'_>, from: ProcessId, epoch: Epoch, answer: bool) {
        let listens = matches!(self.phase, Phase::Linking(_) | Phase::Exchanging | Phase::Leaving(..));
        let view = self.control.view();
        let is_member = self.links.is_member(view, from);
        // Whoever answers has taken the link for open, whatever epoch it is by now.
        if !listens || !is_member || !answer && view.epoch != epoch {
            return;
        }
        self.links.open(from);
        if !answer {
            context.out.push(Out::Hello { to: from, epoch, answer: true });
        }
    }

    fn take_state(&mut self, context: &mut Context<'_>, from: ProcessId, stream: u32, frame: &[u8]) {
        let is_question = frame.get(3) == Some(&(FrameKind::Ask as u8));
        match (&mut self.newcomer, &mut self.exchange) {
            (_, Some(exchange)) if is_question => exchange.holder.handle_ask(context, (from, stream), frame),
            (Some(newcomer), _) if !is_question => newcomer.take(context, from, stream, frame),
            // It has no state to give away yet.
            _ if is_question => context.out.push(Out::StateEnd { to: from, stream }),
            _ => {}
        }
    }

    fn take_news(&mut self, context: &mut Context<'_>) {
        while let Some(news) = self.control.poll_news() {
            match (&mut self.phase, news) {
                (Phase::Ending(..) | Phase::Ended, _) => {}
                (_, News::View(view)) => self.take_view(context, view),
                (Phase::Exchanging | Phase::Leaving(..), News::Removed(fault))
                    if context.has(Mutation::IgnoreRemoval) =>
                {
                    self.ignore_removal(context, &fault);
                }
                (Phase::Exchanging | Phase::Leaving(..), News::Removed(fault) | News::Failed(fault)) => {
                    if let Some(exchange) = &mut self.exchange {
                        exchange.session.fail(fault);
                        exchange.progress(context);
                    }
                }
                (_, News::Refused(fault)) => {
                    let unknown = fault.kind == FaultKind::DeadlineExceeded;
                    self.end(context, Err(fault), unknown);
                }
                (_, News::Removed(fault) | News::Failed(fault)) => self.end(context, Err(fault), false),
            }
        }
    }

    /// A planted bug: a rank that others went on without takes its step for final.
    fn ignore_removal(&mut self, context: &mut Context<'_>, fault: &Fault) {
        if let (Some(exchange), Some(trainer)) = (&mut self.exchange, &mut self.trainer) {
            if trainer.is_committing() {
                exchange.session.commit();
                exchange.end_commit();
                exchange.hand_over_commit();
                let _ = trainer.advance(context, exchange);
            }
            exchange.session.fail(fault.clone());
        }
    }

    fn take_view(&mut self, context: &mut Context<'_>, view: View) {
        let now = context.now;
        if let Some(newcomer) = &mut self.newcomer {
            let became = newcomer.set_view(view.clone());
            if became {
                self.phase = Phase::Linking(Mesh::new(now, self.me.join, view, Some(&newcomer.before), self.deadline));
                return;
            }
        }
        match &mut self.phase {
            Phase::Joining if view.member(self.me.join).is_some() => {
                self.phase = Phase::Linking(Mesh::new(now, self.me.join, view, None, self.deadline));
            }
            Phase::Joining => {
                self.newcomer = Some(Newcomer::new(self.me.clone(), now, view, self.deadline));
                self.phase = Phase::CatchingUp;
            }
            Phase::Linking(mesh) => mesh.change(now, self.me.join, view),
            Phase::Exchanging | Phase::Leaving(..) => {
                if let Some(exchange) = &mut self.exchange {
                    exchange.set_view(now, view);
                }
            }
            Phase::CatchingUp | Phase::Ending(..) | Phase::Ended => {}
        }
    }

    /// Goes on with joining, as far as that can be done now.
    fn join(&mut self, context: &mut Context<'_>) {
        if !matches!(self.phase, Phase::CatchingUp | Phase::Linking(_) | Phase::Exchanging) {
            return;
        }
        if let Some(newcomer) = &mut self.newcomer {
            match newcomer.advance(context) {
                Ok(true) => self.control.ready(context),
                Ok(false) => {}
                Err(fault) => match self.exchange.take() {
                    Some(mut exchange) => {
                        self.leave(context, &mut exchange, Err(fault));
                        self.exchange = Some(exchange);
                    }
                    None => return self.end(context, Err(fault), false),
                },
            }
        }
        let Phase::Linking(mesh) = &mut self.phase else { return };
        match mesh.advance(context, &self.links) {
            Ok(true) => {
                let view = mesh.view.clone();
                self.begin_exchange(context, &view);
            }
            Ok(false) => {}
            // The others wait for links that will not come: they are told why.
            Err(fault) => self.end(context, Err(fault), self.newcomer.is_none()),
        }
    }

    fn begin_exchange(&mut self, context: &mut Context<'_>, view: &View) {
        let declared = self.newcomer.as_ref().map(|newcomer| newcomer.outline.declared.clone());
        let mut exchange = Exchange::new(context, &self.me, view, declared.as_deref());
        let ranks: Vec<_> = view.members.iter().map(|member| member.rank).collect();
        exchange.welcome(context, &mut self.links, &ranks);
        if self.newcomer.is_none() {
            context.report(Report::Linked);
            self.trainer = Some(Trainer::new(context, None));
        }
        self.exchange = Some(exchange);
        self.phase = Phase::Exchanging;
    }

    fn leave(&mut self, context: &mut Context<'_>, exchange: &mut Exchange, result: Result<(), Fault>) {
        exchange.holder.close(context);
        exchange.session.leave();
        if let (Err(fault), Some(trainer)) = (&result, &mut self.trainer) {
            trainer.fail(context, fault);
        }
        let fails = context.plan.recovery == Recovery::Fail;
        let patience = if fails { context.plan.deadline_ns() } else { FAREWELL_MAX };
        self.phase = Phase::Leaving(context.now + patience, result);
    }

    /// Says its last words to the log, and ends when they are on record. `report`: the others have to know why.
    fn end(&mut self, context: &mut Context<'_>, result: Result<(), Fault>, report: bool) {
        if let Err(fault) = &result
            && report
            && fault.reporter.is_none()
        {
            self.control.failed(context, fault);
        }
        self.control.leave(context);
        let patience = if result.is_ok() { LAST_WORDS } else { LAST_WORDS_FAILED };
        self.phase = Phase::Ending(context.now + patience, result);
    }

    /// Lets exchange and trainer do all that they can do now.
    fn exchange(&mut self, context: &mut Context<'_>) {
        let Some(mut exchange) = self.exchange.take() else { return };
        loop {
            exchange.progress(context);
            let mut moved = exchange.try_enter(context, &mut self.links);
            if matches!(self.phase, Phase::Exchanging) {
                moved |= self.train(context, &mut exchange);
            }
            if !moved {
                break;
            }
        }
        for (member, fault) in std::mem::take(&mut exchange.epochs.lost) {
            self.control.suspect(context, member, &fault.detail);
        }
        let (failed, farewell) = (exchange.failed.clone(), exchange.farewell);
        self.exchange = Some(exchange);
        match (&self.phase, failed) {
            (Phase::Exchanging, Some(fault)) => {
                if let Some(trainer) = &mut self.trainer {
                    trainer.fail(context, &fault);
                }
                let report = fault.kind != FaultKind::Removed;
                self.end(context, Err(fault), report);
            }
            (Phase::Leaving(_, result), failed) if failed.is_some() || farewell => {
                let result = result.clone();
                self.end(context, result, false);
            }
            _ => {}
        }
    }

    /// Returns whether the exchange may have something to do.
    fn train(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) -> bool {
        let Some(trainer) = &mut self.trainer else { return self.arrive(context, exchange) };
        (trainer.leaves, trainer.hangs_until) = (self.leaves, self.hangs_until);
        let advanced = trainer.advance(context, exchange);
        for record in std::mem::take(&mut trainer.records) {
            self.commits.push_back((Rc::new(record), None));
            // What an earlier epoch left is there until all are through with it.
            if exchange.memory.old_rounds.is_empty() {
                context.report(Report::Load {
                    owned: exchange.owned(),
                    members: exchange.view.members.len(),
                    queued: exchange.session.backlog() + self.commits.len() + exchange.holder.steps_kept(),
                    regions: context.memory.regions(),
                    bytes: context.memory.bytes_in_use(),
                    remembered: self.control.remembered(),
                });
            }
        }
        let through = trainer.is_through();
        match advanced {
            Ok(moved) if !through => return moved,
            Ok(_) => self.leave(context, exchange, Ok(())),
            Err(fault) => self.leave(context, exchange, Err(fault)),
        }
        true
    }

    /// A newcomer that knows where the others are applies what it lacks, and begins to train.
    fn arrive(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) -> bool {
        exchange.outcomes.clear();
        let Some(newcomer) = self.newcomer.as_mut().filter(|_| exchange.failed.is_none()) else { return false };
        if exchange.session.is_syncing() {
            return false;
        }
        let commits = exchange.session.commits();
        newcomer.follow_to(commits);
        if !newcomer.has_arrived() {
            return false;
        }
        newcomer.end_streams(context);
        context.report(Report::Joined { commits });
        self.trainer = self.newcomer.take().map(|newcomer| Trainer::new(context, Some((newcomer.state, commits))));
        true
    }

    /// Hands to the broker what waits for it.
    fn publish(&mut self, context: &mut Context<'_>) {
        self.control.flush(context);
        if !self.linked {
            return;
        }
        for (commit, token) in self.commits.iter_mut().filter(|(_, token)| token.is_none()) {
            self.commit_tokens += 1;
            *token = Some(self.commit_tokens);
            let body = Body::Commit(commit.clone());
            let record = Record { id: commit.id, rank: self.me.place, key: self.me.place, body };
            context.out.push(Out::Append { topic: Topic::Versions, token: self.commit_tokens, record });
        }
    }

    /// What is due although nothing came.
    fn check_phase(&mut self, context: &mut Context<'_>) {
        let now = context.now;
        match &self.phase {
            Phase::Leaving(until, result) if *until <= now => {
                let result = result.clone();
                self.end(context, result, false);
            }
            Phase::Ending(until, result) => {
                let recorded = self.commits.is_empty();
                let said = self.control.is_said() && (recorded || result.is_err());
                if said || *until <= now {
                    let mut result = result.clone();
                    if result.is_ok() && !recorded {
                        let detail = "commits could not be put on record before the process ended";
                        result = Err(Fault::new(FaultKind::Unrecorded, detail));
                    }
                    if let Some(trainer) = &mut self.trainer {
                        trainer.check_all_held(context);
                    }
                    context.report(Report::Ended(result));
                    self.phase = Phase::Ended;
                }
            }
            _ => {}
        }
    }
}

impl Program for RankProgram {
    fn run(&mut self, context: &mut Context<'_>, incoming: &mut Vec<Incoming>) -> Option<Nanos> {
        for one in incoming.drain(..) {
            self.take(context, one);
        }
        self.control.handle_timeout(context);
        self.take_news(context);
        self.join(context);
        self.exchange(context);
        // Perhaps a newcomer was told where the others are.
        self.join(context);
        self.publish(context);
        self.check_phase(context);
        self.publish(context);
        let phase = match &self.phase {
            Phase::Ended => return None,
            Phase::Leaving(until, _) | Phase::Ending(until, _) => Some(*until),
            Phase::Linking(mesh) => Some(mesh.poll_timeout()),
            Phase::Joining | Phase::CatchingUp | Phase::Exchanging => None,
        };
        let going = matches!(self.phase, Phase::CatchingUp | Phase::Linking(_) | Phase::Exchanging);
        let newcomer = self.newcomer.as_ref().filter(|_| going).map(Newcomer::poll_timeout);
        let exchange = self.exchange.as_ref().and_then(Exchange::poll_timeout);
        let exchanging = matches!(self.phase, Phase::Exchanging);
        let trainer = self.trainer.as_ref().filter(|_| exchanging).and_then(Trainer::next_at);
        [self.control.poll_timeout(), newcomer, exchange, trainer, phase].into_iter().flatten().min()
    }

    fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }
}
