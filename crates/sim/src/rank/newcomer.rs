//! A process that joins a running job: gets the state, and follows the job until it is a member. What
//! `crates/runtime/src/transfer/{newcomer,fetch}.rs` are in the product, as a state machine.

mod fetch;
mod results;

use std::collections::BTreeMap;

use gradwire_proto::manifest::Declaration;
use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::transfer::{Ask, No, Outline, Reason, Results, Snapshot, Sums};
use gradwire_proto::{Fault, FaultKind, Rank};

use super::links::process_of;
use super::state::TrainerState;
use super::stream::{self, Answer, Update};
use crate::event::{MS, Nanos, SECOND};
use crate::process::{Context, Identity, Out};
use crate::report::{ProcessId, Report};
use fetch::Fetch;

/// A member from which nothing comes for so long is not asked any more.
const SILENCE_MAX: Nanos = 5 * SECOND;
/// How long to wait before everything is tried again, and how much longer than the rank before.
const AGAIN_AFTER: Nanos = 100 * MS;
const AGAIN_APART: Nanos = 13 * MS;
/// How often it is looked whether the next step is final.
const FOLLOW_EVERY: Nanos = 2 * MS;
/// How long all members have to be gone until nobody is looked for any more.
const REFUSED_MAX: Nanos = 5 * SECOND;

#[derive(Debug)]
pub(super) struct Newcomer {
    me: Identity,
    deadline: Nanos,
    /// The members now, and before this process was one.
    view: View,
    pub(super) before: View,
    streams: u32,
    sources: Vec<Source>,
    /// How many there were when the state was asked for.
    holders: u32,
    /// Of the next step, by seat: what is here.
    given: BTreeMap<u32, (Results, Vec<Update>)>,
    stage: Stage,
    refused_since: Option<Nanos>,
    pub(super) outline: Outline,
    tensors: Vec<Declaration>,
    pub(super) state: TrainerState,
    /// Steps whose results the state has.
    pub(super) commits: u64,
    /// It has caught up once, and the others may count on it.
    ready: bool,
    /// A member: it follows up to this step.
    goal: Option<u64>,
    last: String,
}

/// A member that is asked.
#[derive(Debug)]
struct Source {
    rank: Rank,
    process: ProcessId,
    /// Its place among those that are asked, and whose results it was asked for.
    seat: u32,
    asked: u32,
    /// Since when an answer is waited for.
    waits: Option<Nanos>,
    answer: Option<Given>,
    lost: Option<String>,
    refused: bool,
}

/// An answer as a whole.
#[derive(Debug)]
enum Given {
    Outline(Outline),
    Snapshot(Snapshot),
    Sums(Sums),
    Results(Results, Vec<Update>),
    No(No),
}

#[derive(Debug)]
enum Stage {
    Resting(Nanos),
    Outline,
    Snapshot(u64),
    Pieces(Fetch),
    /// All pieces are here, and are compared with what members keep.
    Sums(Fetch),
    /// Has caught up, and asks again then.
    Idle(Nanos),
    Results,
}

impl Newcomer {
    pub(super) fn new(me: Identity, now: Nanos, view: View, deadline: Nanos) -> Self {
        Self {
            me,
            deadline,
            before: view.clone(),
            view,
            streams: 0,
            sources: Vec::new(),
            holders: 0,
            given: BTreeMap::new(),
            stage: Stage::Resting(now),
            refused_since: None,
            outline: Outline::default(),
            tensors: Vec::new(),
            state: TrainerState::unknown(),
            commits: 0,
            ready: false,
            goal: None,
            last: "no member was asked".to_owned(),
        }
    }

    fn id(&self) -> RecordId {
        self.me.join
    }

    fn is_member(&self) -> bool {
        self.view.member(self.id()).is_some()
    }

    /// There is a new view. Returns whether this process is a member now, and was none before.
    pub(super) fn set_view(&mut self, view: View) -> bool {
        let old = std::mem::replace(&mut self.view, view);
        let was_member = old.member(self.id()).is_some();
        if !was_member {
            self.before = old;
        }
        !was_member && self.is_member()
    }

    /// It is told how many steps are final: it has to apply the results of all of them.
    pub(super) fn follow_to(&mut self, commits: u64) {
        self.goal = Some(commits);
    }

    pub(super) fn has_arrived(&self) -> bool {
        self.goal.is_some_and(|goal| self.commits >= goal)
    }

    /// Takes an answer.
    pub(super) fn take(&mut self, context: &mut Context<'_>, from: ProcessId, stream: u32, frame: &[u8]) {
        if stream != self.streams {
            return;
        }
        let Some(source) = self.sources.iter_mut().find(|source| source.process == from && source.lost.is_none())
        else {
            return;
        };
        source.waits = source.waits.map(|_| context.now);
        let answer = stream::read_answer(frame);
        if let (Stage::Pieces(fetch), Some(Answer::Piece(crc, bytes))) = (&mut self.stage, &answer) {
            if fetch.take(from, *crc, bytes, &mut self.state) {
                return;
            }
        } else if matches!(self.stage, Stage::Pieces(_)) {
            // It does not keep this piece any more.
        } else if let Some(answer) = answer {
            source.take(answer);
            return;
        }
        self.lose(from, "what it sent makes no sense", false);
        context.out.push(Out::StateEnd { to: from, stream });
    }

    /// A stream has ended, or its process: `refused` where nobody is there.
    pub(super) fn lose(&mut self, process: ProcessId, why: &str, refused: bool) {
        for source in self.sources.iter_mut().filter(|source| source.process == process && source.lost.is_none()) {
            source.lost = Some(format!("{}: {why}", source.rank));
            source.refused = refused;
            (source.waits, source.answer) = (None, None);
        }
        if let Stage::Pieces(fetch) = &mut self.stage {
            fetch.lose(process);
        }
    }

    pub(super) fn stream_ended(&mut self, process: ProcessId, stream: u32) {
        if stream == self.streams {
            self.lose(process, "it ended the stream", false);
        }
    }

    /// Does what can be done. Returns whether it has caught up for the first time.
    ///
    /// # Errors
    /// Why this process cannot join.
    pub(super) fn advance(&mut self, context: &mut Context<'_>) -> Result<bool, Fault> {
        if context.now >= self.deadline && !self.has_arrived() {
            let detail = format!("this rank did not get the job's state in time ({})", self.last);
            return Err(Fault::new(FaultKind::DeadlineExceeded, detail).at(Rank(self.me.place)));
        }
        let silent = |source: &&Source| source.waits.is_some_and(|since| context.now >= since + SILENCE_MAX);
        let silent: Vec<ProcessId> = self.sources.iter().filter(silent).map(|source| source.process).collect();
        silent.into_iter().for_each(|process| self.lose(process, "nothing came from it", false));
        loop {
            let fetches = matches!(self.stage, Stage::Pieces(_));
            if !fetches && self.sources.iter().any(|source| source.waits.is_some()) {
                return Ok(false);
            }
            match self.advance_stage(context) {
                Ok(Some(caught_up)) => {
                    let first = caught_up && !self.ready;
                    self.ready |= caught_up;
                    return Ok(first);
                }
                Ok(None) => {}
                Err(Trouble::Never(fault)) => return Err(fault),
                Err(Trouble::Again(why)) if self.ready => {
                    let detail = format!("the job's results were lost while this rank joined ({why}): start it again");
                    return Err(Fault::new(FaultKind::RankDied, detail));
                }
                Err(Trouble::Again(why)) => {
                    self.end_streams(context);
                    let pause = AGAIN_AFTER + AGAIN_APART * Nanos::from(self.me.place % 8);
                    self.stage = Stage::Resting(context.now + pause);
                    self.last = why;
                    return Ok(false);
                }
            }
        }
    }

    /// Nobody is waited for. Returns nothing where there is more to do at once, and else whether it has caught up.
    fn advance_stage(&mut self, context: &mut Context<'_>) -> Result<Option<bool>, Trouble> {
        match &self.stage {
            Stage::Resting(until) if *until > context.now => return Ok(Some(false)),
            Stage::Resting(_) => self.connect(context),
            Stage::Outline => self.take_outlines(context)?,
            Stage::Snapshot(commits) => {
                let commits = *commits;
                self.take_snapshots(commits)?;
            }
            Stage::Pieces(_) => {
                if !self.fetch(context)? {
                    return Ok(Some(false));
                }
            }
            Stage::Sums(_) => self.take_sums(context)?,
            Stage::Idle(at) if *at > context.now => return Ok(Some(false)),
            // Who is a member goes on when it is told where the others are.
            Stage::Idle(_) if self.is_member() && self.goal.is_none_or(|goal| self.commits >= goal) => {
                return Ok(Some(false));
            }
            Stage::Idle(_) => {
                self.stage = Stage::Results;
                self.ask_results(context, "no member keeps them")?;
            }
            Stage::Results => {
                let (not_yet, why) = self.take_results(context);
                if not_yet {
                    self.stage = Stage::Idle(context.now + FOLLOW_EVERY);
                    return Ok(Some(true));
                }
                if !self.ask_results(context, &why)? {
                    self.apply_results(context)?;
                    self.stage = Stage::Idle(context.now);
                }
            }
        }
        Ok(None)
    }

    pub(super) fn poll_timeout(&self) -> Nanos {
        let silence = self.sources.iter().filter_map(|source| source.waits).map(|since| since + SILENCE_MAX).min();
        let waits = silence.is_some();
        let stage = match &self.stage {
            Stage::Resting(at) => Some(*at),
            Stage::Idle(at) if !self.is_member() || self.goal.is_some_and(|goal| self.commits < goal) => Some(*at),
            _ => None,
        };
        silence.into_iter().chain(stage.filter(|_| !waits)).chain([self.deadline]).min().unwrap_or(self.deadline)
    }

    fn ask_all(&mut self, context: &mut Context<'_>, ask: impl Fn(u32) -> Ask) {
        for source in &mut self.sources {
            source.answer = None;
            if source.lost.is_none() {
                source.waits = Some(context.now);
                let frame = stream::ask(ask(source.seat));
                context.out.push(Out::State { to: source.process, stream: self.streams, frame });
            }
        }
    }

    /// Asks all members that can be reached.
    fn connect(&mut self, context: &mut Context<'_>) {
        self.streams += 1;
        self.given.clear();
        let others = self.view.members.iter().filter(|member| member.id != self.me.join);
        let source = |(rank, process)| Source {
            rank,
            process,
            seat: 0,
            asked: 0,
            waits: None,
            answer: None,
            lost: None,
            refused: false,
        };
        let known = others.filter_map(|member| Some((member.rank, process_of(member)?)));
        self.sources = known.map(source).collect();
        self.ask_all(context, |_| Ask::Outline);
        self.stage = Stage::Outline;
    }

    fn take_outlines(&mut self, context: &mut Context<'_>) -> Result<(), Trouble> {
        if !self.sources.is_empty() && self.sources.iter().all(|source| source.refused) {
            let since = *self.refused_since.get_or_insert(context.now);
            if context.now - since >= REFUSED_MAX {
                let detail = "no rank is left that has the job's state: end the job, and start it again";
                return Err(Trouble::Never(Fault::new(FaultKind::RankDied, detail)));
            }
        } else {
            self.refused_since = None;
        }
        self.sources.retain(|source| source.lost.is_none());
        let outlines: Vec<Outline> = self.answers(|given| match given {
            Given::Outline(outline) => Some(outline),
            _ => None,
        })?;
        let Some(outline) = outlines.iter().max_by_key(|outline| outline.commits).cloned() else {
            return Err(Trouble::Again("no member could be reached".to_owned()));
        };
        if outline.declared.len() < self.me.plan.rounds as usize {
            let detail = "this process declares tensors that the job has not";
            return Err(Trouble::Never(Fault::new(FaultKind::DeclarationMismatch, detail)));
        }
        let resting = outlines.iter().all(|one| one.resting && one.commits == outline.commits);
        let commits = outline.commits + u64::from(!resting);
        self.tensors = outline.declared.iter().flatten().cloned().collect();
        self.outline = outline;
        let holders = self.sources.len() as u32;
        self.holders = holders;
        (0..).zip(&mut self.sources).for_each(|(seat, source)| source.seat = seat);
        self.ask_all(context, |seat| Ask::Snapshot { commits, seat, holders });
        self.stage = Stage::Snapshot(commits);
        Ok(())
    }

    /// What all have answered, or why to try again.
    fn answers<T>(&mut self, of: impl Fn(Given) -> Option<T>) -> Result<Vec<T>, Trouble> {
        let mut answers = Vec::new();
        for source in &mut self.sources {
            let why = match (source.lost.clone(), source.answer.take()) {
                (Some(why), _) => why,
                (None, Some(Given::No(no))) if no.reason == Reason::Never => {
                    return Err(Trouble::Never(Fault::new(FaultKind::System, no.detail).at(source.rank)));
                }
                (None, Some(Given::No(no))) => format!("{}: {}", source.rank, no.detail),
                (None, Some(given)) => match of(given) {
                    Some(answer) => {
                        answers.push(answer);
                        continue;
                    }
                    None => format!("{}: another answer than what was asked for", source.rank),
                },
                (None, None) => format!("{}: no answer", source.rank),
            };
            return Err(Trouble::Again(why));
        }
        Ok(answers)
    }

    fn take_snapshots(&mut self, commits: u64) -> Result<(), Trouble> {
        let snapshots = self.answers(|given| match given {
            Given::Snapshot(snapshot) => Some(snapshot),
            _ => None,
        })?;
        let ranks: Vec<Rank> = self.sources.iter().map(|source| source.rank).collect();
        let processes: Vec<ProcessId> = self.sources.iter().map(|source| source.process).collect();
        let fetch = Fetch::new(&self.state.described(), &ranks, processes, &snapshots)?;
        self.commits = commits;
        self.stage = Stage::Pieces(fetch);
        Ok(())
    }

    /// Returns whether there is more to do at once.
    fn fetch(&mut self, context: &mut Context<'_>) -> Result<bool, Trouble> {
        let Stage::Pieces(fetch) = &mut self.stage else { return Ok(true) };
        let streams = self.streams;
        let asked = fetch.ask(|to, piece| {
            context.out.push(Out::State { to, stream: streams, frame: stream::ask(Ask::Piece(piece)) });
        });
        if fetch.is_complete() {
            self.sources.iter_mut().for_each(|source| source.waits = None);
            if let Stage::Pieces(fetch) = std::mem::replace(&mut self.stage, Stage::Outline) {
                self.stage = Stage::Sums(fetch);
            }
            self.ask_all(context, |_| Ask::Sums);
            return Ok(true);
        }
        for (process, waits) in asked {
            let source = self.sources.iter_mut().find(|source| source.process == process);
            if let Some(source) = source.filter(|source| source.lost.is_none()) {
                source.waits = waits.then_some(context.now);
            }
        }
        if fetch.is_hopeless() {
            return Err(Trouble::Again("too many members stopped giving their state".to_owned()));
        }
        Ok(false)
    }

    /// What a member that is lost by now has given was what it kept.
    fn take_sums(&mut self, context: &mut Context<'_>) -> Result<(), Trouble> {
        if let Stage::Sums(fetch) = &self.stage {
            for source in &mut self.sources {
                if let Some(Given::Sums(sums)) = source.answer.take() {
                    fetch.compare(source.rank, &sums)?;
                }
            }
        }
        self.stage = Stage::Idle(context.now);
        self.report_state(context);
        Ok(())
    }

    fn report_state(&self, context: &mut Context<'_>) {
        context.report(Report::State { commits: self.commits, digest: self.state.digest() });
    }

    /// It needs nothing more of the members.
    pub(super) fn end_streams(&mut self, context: &mut Context<'_>) {
        for source in self.sources.drain(..).filter(|source| source.lost.is_none()) {
            context.out.push(Out::StateEnd { to: source.process, stream: self.streams });
        }
    }
}

impl Source {
    fn take(&mut self, answer: Answer) {
        let complete = match (answer, &mut self.answer) {
            (Answer::Wait, _) => false,
            (Answer::Update(update), Some(Given::Results(results, updates))) => {
                updates.push(update);
                updates.len() as u32 == results.updates
            }
            (Answer::Outline(outline), answer) => {
                *answer = Some(Given::Outline(outline));
                true
            }
            (Answer::Snapshot(snapshot), answer) => {
                *answer = Some(Given::Snapshot(snapshot));
                true
            }
            (Answer::Sums(sums), answer) => {
                *answer = Some(Given::Sums(sums));
                true
            }
            (Answer::Results(results), answer) => {
                let complete = results.updates == 0;
                *answer = Some(Given::Results(results, Vec::new()));
                complete
            }
            (Answer::No(no), answer) => {
                *answer = Some(Given::No(no));
                true
            }
            (Answer::Piece(..) | Answer::Update(_), _) => {
                self.lost = Some(format!("{}: another answer than what was asked for", self.rank));
                true
            }
        };
        if complete {
            self.waits = None;
        }
    }
}

/// Why an attempt came to nothing.
#[derive(Debug)]
enum Trouble {
    /// Members came or went meanwhile: again.
    Again(String),
    Never(Fault),
}
