//! What a member keeps for processes that join, and gives to them: for each its share of the state at one step, and the
//! results of later steps. What `crates/runtime/src/transfer/{holder,server}.rs` are in the product, without their threads.

use std::collections::BTreeMap;

use gradwire_codec::crc32;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::transfer::{
    Ask, Given, Journal, No, Outline, Reason, Snapshot, Sums, UnitResult, keeps, pieces, stands_in,
};
use gradwire_proto::{Epoch, Fault, Rank, UnitIndex};

use super::state::TrainerState;
use super::stream;
use crate::event::{MS, Nanos, SECOND};
use crate::process::{Context, Out};
use crate::report::ProcessId;

/// A newcomer that asks nothing for so long is given up.
const IDLE_MAX: Nanos = 30 * SECOND;
/// How often a newcomer that waits is told that it has to.
const WAIT_EVERY: Nanos = 500 * MS;
/// Most newcomers for which something is kept.
const ASKERS_MAX: usize = 8;
/// Where there are so many, one that has asked nothing for so long makes room for another one.
const STALLED_AFTER: Nanos = 3 * SECOND;

/// Names a stream over which a newcomer asks.
pub(super) type Asker = (ProcessId, u32);

#[derive(Debug, Default)]
pub(super) struct Holder {
    commits: u64,
    declared: Vec<Vec<Declaration>>,
    /// One more than the commits at the last offer.
    offered: u64,
    /// The trainer waits for others, because too few are left.
    pub(super) resting: bool,
    too_few: Option<Fault>,
    /// Whom it all is kept for.
    askers: BTreeMap<Asker, For>,
    journal: Journal,
    streams: BTreeMap<Asker, Served>,
    closed: bool,
    /// Of a planted bug: the state, whatever step is asked for.
    pub(super) as_is: Option<TrainerState>,
}

/// What is kept for one newcomer.
#[derive(Debug)]
struct For {
    /// The state that it asked for.
    wish: Wish,
    /// It has it.
    through: bool,
    kept: Option<Kept>,
    /// It may ask for the results of the step after so many final ones, and of all later ones.
    next: u64,
    heard: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct Wish {
    commits: u64,
    seat: u32,
    holders: u32,
}

/// A share of the state: it is copied at once.
#[derive(Debug)]
struct Kept {
    snapshot: Snapshot,
    pieces: BTreeMap<u32, Vec<u8>>,
    sums: Sums,
}

/// A stream.
#[derive(Clone, Copy, Debug)]
struct Served {
    idle_at: Nanos,
    /// It waits for the snapshot, and is told so again then.
    wait_at: Option<Nanos>,
}

impl Holder {
    /// Tensors were declared.
    pub(super) fn declared(&mut self, rounds: &[Vec<Declaration>]) {
        self.declared = rounds.to_vec();
    }

    /// Where a rank that joined later begins.
    pub(super) fn begin(&mut self, commits: u64) {
        self.commits = commits;
    }

    /// Whether the trainer has offered its state after so many steps.
    pub(super) fn has_offered(&self, commits: u64) -> bool {
        self.offered == commits + 1
    }

    /// Whether results are to be handed to [`Holder::keep`].
    pub(super) fn journals(&self) -> bool {
        !self.askers.is_empty()
    }

    /// How many steps' results are kept.
    pub(super) fn steps_kept(&self) -> usize {
        self.journal.steps()
    }

    /// Keeps a unit of the results of the step after `commits` final ones, if a newcomer is to have it from this member.
    pub(super) fn keep(&mut self, commits: u64, epoch: Epoch, unit: UnitIndex, result: UnitResult) {
        if !self.askers.values().any(|of| keeps(unit.0, of.wish.seat, of.wish.holders)) {
            return;
        }
        self.journal.keep(commits, epoch, unit, result);
    }

    /// A step is final: so many are now, and these were its contributors.
    pub(super) fn commit(&mut self, commits: u64, epoch: Epoch, members: &[Rank]) {
        self.commits = commits;
        if self.askers.is_empty() {
            return;
        }
        self.journal.commit(commits - 1, epoch, members);
    }

    /// Too few ranks are left to go on; or there are enough again.
    pub(super) fn set_too_few(&mut self, fault: Option<Fault>) {
        self.too_few = fault;
    }

    pub(super) fn too_few(&self) -> Option<&Fault> {
        self.too_few.as_ref()
    }

    /// The trainer offers its state, which is that after `commits` final steps: copied if a newcomer waits for just this
    /// one.
    pub(super) fn offer(&mut self, commits: u64, state: &TrainerState) {
        self.offered = commits + 1;
        self.resting = self.too_few.is_some() && !self.closed;
        for asker in self.askers.keys().copied().collect::<Vec<_>>() {
            let Some(of) = self.askers.get_mut(&asker) else { continue };
            match of.wish.commits {
                _ if of.through || of.kept.is_some() => {}
                wanted if wanted == commits => of.kept = Some(Kept::of(of.wish, state)),
                // It was asked for too late: who asked has to name a later step.
                wanted if wanted < commits => self.forget(asker),
                // It does not come to that step before newcomers are there.
                _ if self.resting => self.forget(asker),
                _ => {}
            }
        }
    }

    fn outline(&self) -> Outline {
        let Self { commits, resting, declared, .. } = self;
        Outline { first_step: 0, commits: *commits, resting: *resting, declared: declared.clone() }
    }

    fn forget(&mut self, asker: Asker) {
        self.askers.remove(&asker);
        self.forget_results();
    }

    /// Results for which nobody can ask any more are kept no longer.
    fn forget_results(&mut self) {
        let first = self.askers.values().map(|of| of.next).min().unwrap_or(u64::MAX);
        self.journal.forget_before(first);
    }

    /// Room for what a newcomer asks for, if there is some or can be made.
    fn has_room(&mut self, asker: Asker, now: Nanos) -> bool {
        if self.askers.contains_key(&asker) || self.askers.len() < ASKERS_MAX {
            return true;
        }
        let stalled = self.askers.iter().min_by_key(|(_, of)| of.heard);
        let stalled = stalled.filter(|(_, of)| now > of.heard + STALLED_AFTER).map(|(asker, _)| *asker);
        stalled.inspect(|asker| self.forget(*asker)).is_some()
    }

    fn no(&self, reason: Reason, detail: &str) -> No {
        No { reason, commits: self.commits, detail: detail.to_owned() }
    }

    /// A newcomer asks.
    pub(super) fn handle_ask(&mut self, context: &mut Context<'_>, asker: Asker, frame: &[u8]) {
        let Some(ask) = stream::read_ask(frame).filter(|_| !self.closed) else {
            return self.end(context, asker);
        };
        let served = Served { idle_at: context.now + IDLE_MAX, wait_at: None };
        self.streams.insert(asker, served);
        self.hear(asker, context.now);
        match ask {
            Ask::Outline => give(context, asker, Given::Outline, &self.outline().encode()),
            Ask::Snapshot { commits, seat, holders } => {
                if !self.has_room(asker, context.now) {
                    let no = self.no(Reason::Busy, "many ranks are joining");
                    return give(context, asker, Given::No, &no.encode());
                }
                let wish = Wish { commits, seat, holders };
                let kept = self.as_is.take().map(|state| Kept::of(wish, &state));
                let of = For { wish, through: false, kept, next: commits, heard: context.now };
                self.askers.insert(asker, of);
                self.forget_results();
                self.streams.insert(asker, Served { wait_at: Some(context.now + WAIT_EVERY), ..served });
            }
            Ask::Piece(piece) => match self.piece(asker, piece) {
                Some(bytes) => give(context, asker, Given::Piece, &bytes),
                None => {
                    let no = self.no(Reason::TooLate, "this piece is not kept here");
                    give(context, asker, Given::No, &no.encode());
                }
            },
            Ask::Results { commits, seat } => self.give_results(context, asker, commits, seat),
            Ask::Sums => match self.kept(asker) {
                Some(kept) => give(context, asker, Given::Sums, &kept.sums.encode()),
                None => {
                    let no = self.no(Reason::TooLate, "no state is kept for this newcomer");
                    give(context, asker, Given::No, &no.encode());
                }
            },
        }
    }

    fn hear(&mut self, asker: Asker, now: Nanos) {
        if let Some(of) = self.askers.get_mut(&asker) {
            of.heard = now;
        }
    }

    fn kept(&self, asker: Asker) -> Option<&Kept> {
        self.askers.get(&asker)?.kept.as_ref()
    }

    fn piece(&self, asker: Asker, piece: u32) -> Option<Vec<u8>> {
        self.kept(asker)?.pieces.get(&piece).cloned()
    }

    /// The results of the step after `commits` final ones, as far as this seat is their home; earlier ones are not kept for
    /// it any more.
    fn give_results(&mut self, context: &mut Context<'_>, asker: Asker, commits: u64, seat: u32) {
        let no = if let Some(of) = self.askers.get_mut(&asker) {
            // The newcomer has the state.
            (of.through, of.kept, of.next) = (true, None, commits);
            let Wish { seat: own, holders, .. } = of.wish;
            self.forget_results();
            if !stands_in(own, seat, holders) {
                self.no(Reason::TooLate, "the results of that seat are not kept here")
            } else if commits >= self.commits {
                self.no(Reason::NotYet, "that step is not final")
            } else if let Some((results, units)) = self.journal.results(commits, self.commits, (seat, holders)) {
                give(context, asker, Given::Results, &results.encode());
                units.iter().for_each(|unit| give_update(context, asker, results.epoch, unit));
                return;
            } else {
                self.no(Reason::TooLate, "the results of that step are not kept any more")
            }
        } else {
            self.no(Reason::TooLate, "nothing is kept for this newcomer")
        };
        give(context, asker, Given::No, &no.encode());
    }

    /// Answers those that wait, and gives up those that ask nothing.
    pub(super) fn serve(&mut self, context: &mut Context<'_>) {
        if self.streams.is_empty() {
            return;
        }
        let idle: Vec<Asker> =
            self.streams.iter().filter(|(_, served)| served.idle_at <= context.now).map(|(asker, _)| *asker).collect();
        idle.into_iter().for_each(|asker| self.end(context, asker));
        let waiting: Vec<Asker> =
            self.streams.iter().filter(|(_, served)| served.wait_at.is_some()).map(|(asker, _)| *asker).collect();
        for asker in waiting {
            self.hear(asker, context.now);
            let answer = match self.askers.get(&asker) {
                Some(of) => of.kept.as_ref().map(|kept| (Given::Snapshot, kept.snapshot.encode())),
                None => Some((Given::No, self.no(Reason::TooLate, "the state of that step has passed").encode())),
            };
            let Some(served) = self.streams.get_mut(&asker) else { continue };
            if let Some((given, body)) = answer {
                (served.wait_at, served.idle_at) = (None, context.now + IDLE_MAX);
                give(context, asker, given, &body);
            } else if served.wait_at.is_some_and(|at| at <= context.now) {
                (served.wait_at, served.idle_at) = (Some(context.now + WAIT_EVERY), context.now + IDLE_MAX);
                give(context, asker, Given::Wait, &[]);
            }
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Nanos> {
        self.streams.values().map(|served| served.wait_at.unwrap_or(served.idle_at).min(served.idle_at)).min()
    }

    fn end(&mut self, context: &mut Context<'_>, asker: Asker) {
        let (to, stream) = asker;
        context.out.push(Out::StateEnd { to, stream });
        self.release(asker);
    }

    /// The newcomer is gone, or needs nothing more.
    pub(super) fn release(&mut self, asker: Asker) {
        self.streams.remove(&asker);
        self.forget(asker);
    }

    /// A process is gone, and its streams with it.
    pub(super) fn release_all_of(&mut self, process: ProcessId) {
        let gone: Vec<Asker> = self.streams.keys().filter(|(of, _)| *of == process).copied().collect();
        gone.into_iter().for_each(|asker| self.release(asker));
    }

    /// Nobody waits any more, and nobody is served.
    pub(super) fn close(&mut self, context: &mut Context<'_>) {
        self.closed = true;
        let all: Vec<Asker> = self.streams.keys().copied().collect();
        all.into_iter().for_each(|asker| self.end(context, asker));
    }
}

impl Kept {
    fn of(Wish { seat, holders, .. }: Wish, state: &TrainerState) -> Self {
        let parts = state.described();
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        let mut kept = Self { snapshot: Snapshot { parts }, pieces: BTreeMap::new(), sums: Sums::default() };
        for (piece, (part, range)) in (0..).zip(pieces(&lengths).unwrap_or_default()) {
            let bytes = &state.parts[part as usize][range.start as usize..range.end as usize];
            if keeps(piece, seat, holders) {
                kept.pieces.insert(piece, bytes.to_vec());
                kept.sums.0.push((piece, crc32(bytes)));
            }
        }
        kept
    }
}

fn give(context: &mut Context<'_>, (to, stream): Asker, given: Given, body: &[u8]) {
    context.out.push(Out::State { to, stream, frame: stream::give(given, body) });
}

fn give_update(context: &mut Context<'_>, (to, stream): Asker, epoch: Epoch, unit: &UnitResult) {
    context.out.push(Out::State { to, stream, frame: stream::frame(unit.header(epoch), &unit.bytes) });
}
