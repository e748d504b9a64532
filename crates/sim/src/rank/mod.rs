//! A rank of the simulated job: control log, exchange and trainer, put together as the product puts them together.
//!
//! # What happens when members change
//! The protocol has no way yet to keep a step over a change of members: a lost peer fails the session for good. So with
//! [`Members::Fixed`] the job ends, with a typed fault on every rank. With [`Members::Elastic`] the rank suspects who is
//! to blame, waits for the next view, drops its [`Exchange`] with everything in it and begins another one, which
//! *repeats* the step with new values (as a trainer does after `Recovery::Abort`). With which step a view's members
//! begin is told to them by the world (`first_step`), because no message of the protocol says so yet: this is the place
//! to fill in when the step rule comes.

mod control;
mod exchange;
mod receive;
mod reduce;
mod regions;
mod trainer;

use std::collections::VecDeque;
use std::rc::Rc;

use gradwire_proto::manifest::Declaration;
use gradwire_proto::membership::View;
use gradwire_proto::{Fault, FaultKind, Step};

use crate::broker::{Body, Record, Topic};
use crate::event::{MS, Nanos, SECOND};
use crate::plan::Members;
use crate::process::{Context, Identity, Incoming, Out, Program};
use crate::report::{CommitRecord, Report, Version};
use control::{Control, News};
use exchange::Exchange;
pub(crate) use exchange::JOB;
use trainer::{Finished, Trainer};

/// Tokens of version records; those of control records are below.
const COMMIT_TOKENS: u64 = 1 << 32;
/// How long a rank that is through waits for what it said to be on record.
const LAST_WORDS: Nanos = 4 * SECOND;
/// How long one that failed does.
const LAST_WORDS_FAILED: Nanos = 200 * MS;

#[derive(Debug)]
enum Phase {
    /// Waits for a view, or goes by one.
    Going,
    /// Failed in this epoch, and waits for the next one until then.
    Waiting(Nanos, Fault),
    /// Through with all steps: says goodbye.
    Leaving(Nanos),
    /// Has said that it left, or failed, and waits for the receipt.
    Ending(Nanos, Result<(), Fault>),
    Ended,
}

/// A rank's process.
#[derive(Debug)]
pub(crate) struct RankProgram {
    me: Identity,
    control: Control,
    exchange: Option<Exchange>,
    trainer: Option<Trainer>,
    declarations: Vec<Declaration>,
    phase: Phase,
    /// A view that this rank goes by only if it cannot end the last step without.
    deferred: Option<View>,
    /// Version records without a receipt, with their tokens while they are on the way.
    commits: VecDeque<(Rc<CommitRecord>, Option<u64>)>,
    commit_tokens: u64,
    linked: bool,
    finished: Vec<Finished>,
}

impl RankProgram {
    pub(crate) fn new(me: Identity, now: Nanos) -> Self {
        let declarations = me.plan.tensors.iter().enumerate().map(|(at, tensor)| tensor.declaration(at)).collect();
        Self {
            control: Control::new(me.clone(), now),
            me,
            exchange: None,
            trainer: None,
            declarations,
            phase: Phase::Going,
            deferred: None,
            commits: VecDeque::new(),
            commit_tokens: COMMIT_TOKENS,
            linked: false,
            finished: Vec::new(),
        }
    }

    fn take(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        match incoming {
            Incoming::BrokerUp => {
                self.linked = true;
                self.control.link_opened();
                self.commits.iter_mut().for_each(|(_, token)| *token = None);
            }
            Incoming::BrokerDown => {
                self.linked = false;
                self.control.link_lost();
            }
            Incoming::Record { topic: Topic::Control, record, .. } => self.control.record(context.now, &record),
            Incoming::Record { .. } => {}
            Incoming::Receipt { token, .. } if token < COMMIT_TOKENS => self.control.receipt(token),
            Incoming::Receipt { token, .. } => {
                let taken = self.commits.iter().position(|(_, sent)| *sent == Some(token));
                if let Some((record, _)) = taken.and_then(|at| self.commits.remove(at)) {
                    context.report(Report::Committed(record));
                }
            }
            other => {
                if let Some(exchange) = &mut self.exchange {
                    exchange.handle(context, other);
                }
            }
        }
    }

    fn take_news(&mut self, context: &mut Context<'_>) {
        while let Some(news) = self.control.poll_news() {
            match (&self.phase, news) {
                (Phase::Ending(..) | Phase::Ended, _) => {}
                // Through with all steps: the others go on without this rank.
                (Phase::Leaving(_), News::View(_)) => self.end(context, Ok(())),
                (Phase::Leaving(_), _) => {}
                // Others are through and have left: what is left of the last step needs nothing of them.
                (Phase::Going, News::View(view)) if self.is_last_step() && self.only_shrinks(&view) => {
                    self.deferred = Some(view);
                }
                (_, News::View(view)) => self.begin_epoch(context, &view),
                (_, News::Failed(fault)) => match &mut self.exchange {
                    Some(exchange) => exchange.session.fail(fault),
                    None => self.end(context, Err(fault)),
                },
                (_, News::Fault(fault)) => {
                    if let Some(exchange) = &mut self.exchange {
                        exchange.session.fail(fault.clone());
                        exchange.progress(context, &mut self.finished);
                    }
                    self.fail_operations(context, &fault);
                    self.end(context, Err(fault));
                }
            }
        }
    }

    fn is_last_step(&self) -> bool {
        let sound = self.exchange.as_ref().is_some_and(|exchange| exchange.failed.is_none());
        sound && self.trainer.as_ref().is_some_and(|trainer| trainer.step + 1 == u64::from(self.me.plan.steps))
    }

    fn only_shrinks(&self, view: &View) -> bool {
        let members = self.exchange.as_ref().map_or(&[][..], |exchange| &exchange.view.members);
        view.members.iter().all(|member| members.iter().any(|known| known.id == member.id))
    }

    fn begin_epoch(&mut self, context: &mut Context<'_>, view: &View) {
        let members: Rc<[(u32, _)]> = view.members.iter().map(|member| (member.rank.0, member.id)).collect();
        context.report(Report::View { epoch: view.epoch, id: view.id, members });
        self.deferred = None;
        if let Some(exchange) = self.exchange.take() {
            let detail = "the members changed while the operation was in flight: repeat the step";
            self.fail_operations(context, &Fault::new(FaultKind::Cancelled, detail));
            exchange.end(context);
        }
        let first = (context.first_step)(view);
        let trainer = self.trainer.get_or_insert_with(|| Trainer::new(context, first));
        trainer.begin(context, first);
        self.exchange = Exchange::new(context, view, self.me.join, &self.declarations, Step(first));
        self.phase = Phase::Going;
        if first >= u64::from(context.plan.steps) {
            self.leave(context);
        }
    }

    fn fail_operations(&mut self, context: &mut Context<'_>, fault: &Fault) {
        if let Some(trainer) = &mut self.trainer {
            trainer.fail(context, fault);
        }
    }

    fn leave(&mut self, context: &mut Context<'_>) {
        if let Some(exchange) = &mut self.exchange {
            exchange.session.leave();
        }
        self.phase = Phase::Leaving(context.now + context.plan.deadline_ns());
    }

    /// Says its last word to the log, and ends when that is on record.
    fn end(&mut self, context: &mut Context<'_>, result: Result<(), Fault>) {
        let patience = match &result {
            Ok(()) => {
                self.control.leave(context);
                LAST_WORDS
            }
            Err(fault) => {
                let own = fault.reporter.is_none();
                if own && !matches!(fault.kind, FaultKind::Removed | FaultKind::WorldMismatch) {
                    self.control.failed(context, fault);
                }
                LAST_WORDS_FAILED
            }
        };
        self.phase = Phase::Ending(context.now + patience, result);
    }

    /// The session failed.
    fn handle_failure(&mut self, context: &mut Context<'_>, fault: &Fault) {
        self.fail_operations(context, fault);
        if context.plan.members == Members::Fixed {
            self.end(context, Err(fault.clone()));
            return;
        }
        if let Some(view) = self.deferred.take() {
            self.begin_epoch(context, &view);
            return;
        }
        let view = self.control.view().clone();
        // Ranks of the session are the places in the view.
        let blamed = fault.rank.and_then(|rank| view.members.get(rank.index())).map(|member| member.id);
        let of_peer = matches!(
            fault.kind,
            FaultKind::RankDied
                | FaultKind::NotOffered
                | FaultKind::DeadlineExceeded
                | FaultKind::IntegrityExhausted
                | FaultKind::ProtocolViolation
        );
        if let Some(member) = blamed.filter(|member| *member != self.me.join && of_peer && fault.reporter.is_none()) {
            self.control.suspect(context, member, &fault.detail);
        }
        self.phase = Phase::Waiting(context.now + context.plan.deadline_ns(), fault.clone());
    }

    fn exchange(&mut self, context: &mut Context<'_>) {
        let Some(mut exchange) = self.exchange.take() else { return };
        let Some(mut trainer) = self.trainer.take() else { return };
        if matches!(self.phase, Phase::Going) && exchange.prepared {
            trainer.post(context, &mut exchange);
        }
        exchange.progress(context, &mut self.finished);
        let mut step_done = None;
        for finished in self.finished.drain(..) {
            if trainer.finish(context, &exchange, finished) {
                step_done = Some(trainer.version(&exchange));
            }
        }
        if matches!(self.phase, Phase::Going) && exchange.prepared && self.declarations.is_empty() {
            step_done = Some(trainer.version(&exchange));
        }
        if let Some(version) = step_done {
            self.commit(context, &mut exchange, version);
            trainer.begin(context, version.step.0 + 1);
        }
        let failed = exchange.failed.clone();
        let through = trainer.step >= u64::from(context.plan.steps);
        let farewell = exchange.farewell;
        self.exchange = Some(exchange);
        self.trainer = Some(trainer);
        match (&self.phase, failed) {
            (Phase::Going, _) if through => {
                self.leave(context);
                self.exchange(context);
            }
            (Phase::Going, Some(fault)) => {
                self.handle_failure(context, &fault);
                // Perhaps there is another view already.
                if matches!(self.phase, Phase::Going) {
                    self.exchange(context);
                }
            }
            (Phase::Leaving(_), Some(_)) => self.end(context, Ok(())),
            (Phase::Leaving(_), None) if farewell => self.end(context, Ok(())),
            _ => {}
        }
    }

    fn commit(&mut self, context: &mut Context<'_>, exchange: &mut Exchange, version: Version) {
        let crcs = exchange.commit();
        context.report(Report::StepDone { version });
        context.out.push(Out::Store { step: version.step.0 + 1 });
        let record = CommitRecord { id: context.unique(), version, owner: self.me.place, crcs };
        self.commits.push_back((Rc::new(record), None));
        context.report(Report::Load {
            rank: exchange.me().0,
            members: exchange.peers.len(),
            queued: exchange.session.backlog() + self.commits.len(),
            regions: context.memory.regions(),
            bytes: context.memory.bytes_in_use(),
            remembered: self.control.remembered(),
        });
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
            Phase::Waiting(until, fault) if *until <= now => {
                let fault = fault.clone();
                self.end(context, Err(fault));
            }
            Phase::Leaving(until) if *until <= now => self.end(context, Ok(())),
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
        self.exchange(context);
        self.publish(context);
        self.check_phase(context);
        self.publish(context);
        let phase = match &self.phase {
            Phase::Ended => return None,
            Phase::Waiting(until, _) | Phase::Leaving(until) | Phase::Ending(until, _) => Some(*until),
            Phase::Going => None,
        };
        let exchange = self.exchange.as_ref();
        let trainer = self.trainer.as_ref().filter(|_| exchange.is_some_and(|exchange| exchange.prepared));
        let posting = trainer.filter(|_| matches!(self.phase, Phase::Going)).and_then(Trainer::next_at);
        [self.control.poll_timeout(), exchange.and_then(Exchange::poll_timeout), posting, phase]
            .into_iter()
            .flatten()
            .min()
    }

    fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    fn next_step(&self) -> Option<u64> {
        self.trainer.as_ref().map(|trainer| trainer.step).or(self.me.stored)
    }
}
