//! A process that joins a running job: gets the state, and follows the job until it is a member.

use std::time::{Duration, Instant};

use gradwire_control::{ControlEvent, ControlPlane};
use gradwire_proto::hello::HelloParams;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{Member, View};
use gradwire_proto::saved::SavedPart;
use gradwire_proto::transfer::{Ask, Given, No, Outline, Reason, Snapshot, Sums, pieces};
use gradwire_proto::{Fault, FaultKind, Rank, WireFormat};
use gradwire_transport::establish::dial_state;
use gradwire_transport::expect_writes;

use super::fetch::{Source, Trouble, ask_all, at_once, body, compare, decode, fetch};
use super::follow::{CaughtUp, FOLLOW_EVERY, lost};
use super::parts::{parts_mut_of, parts_of};
use super::place::Rival;
use super::stream::FrameStream;
use crate::group::RESERVED_PREFIX;
use crate::state::Trainer;
use crate::types::{TensorSpec, Transfer};

/// How long one member may take to be reached; another one is asked then.
const DIAL_MAX: Duration = Duration::from_secs(5);
/// A member from which nothing comes for so long is not asked any more.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long to wait before everything is tried again, and how much longer than the rank before.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
const AGAIN_APART: Duration = Duration::from_millis(13);
/// How much later than the members' streams the control log may say that the job has ended: as long as a farewell takes.
const WORD_MAX: Duration = Duration::from_secs(2);
/// Most steps ahead for which the members are asked to keep their state.
const AHEAD_MAX: u64 = 64;

/// What a process that joins knows.
pub(crate) struct Newcomer<'a> {
    pub(crate) control: &'a ControlPlane,
    pub(crate) params: HelloParams,
    pub(crate) endpoint: Endpoint,
    pub(crate) wire: WireFormat,
    pub(crate) specs: &'a [TensorSpec],
    pub(crate) deadline: Instant,
    /// The members now, and before this process was one.
    pub(crate) view: View,
    pub(crate) before: View,
    /// When it said that it is ready: from then on the others may count on it.
    pub(crate) ready: Option<Instant>,
    pub(crate) rival: Rival,
    /// Why the last attempt came to nothing.
    pub(crate) last: Option<String>,
}

/// Why an attempt came to nothing.
pub(super) enum Attempt {
    /// Members came or went meanwhile: again.
    Again(String),
    /// The members had made the step before they heard that its state was wanted: again, for a later one.
    Missed(String),
    Never(Fault),
}

impl From<Fault> for Attempt {
    fn from(fault: Fault) -> Self {
        Self::Never(fault)
    }
}

impl Newcomer<'_> {
    /// Gets the state, and applies the results of what follows, until there is a view with this process: it said that it
    /// is ready once it had caught up.
    ///
    /// # Errors
    /// By the deadline: `DeadlineExceeded` that says what was tried last; `WorldMismatch` where this rank lives already;
    /// `DeclarationMismatch`, `ShapeMismatch`, `DTypeMismatch` or `OperationMismatch` where this process trains another
    /// model; `Diverged` when members' states differ; what ended the job; what the trainer met.
    pub(crate) fn catch_up(&mut self, trainer: &mut dyn Trainer) -> Result<CaughtUp, Fault> {
        let caught_up = self.catch_up_or_say_why(trainer);
        // Whatever it met: with another process in its place it could not have been taken in.
        let rival = |is_over| self.rival.fault(&self.view, self.params.rank, is_over);
        caught_up.map_err(|fault| match (rival(fault.kind == FaultKind::RankLeft), &self.last) {
            (Some(rival), _) => rival,
            // The job ended while it tried.
            (None, Some(last)) if fault.kind == FaultKind::RankLeft => {
                Fault { detail: format!("{}; this rank tried to get it until then: {last}", fault.detail), ..fault }
            }
            (None, _) => fault,
        })
    }

    fn catch_up_or_say_why(&mut self, trainer: &mut dyn Trainer) -> Result<CaughtUp, Fault> {
        let parts = parts_of(&trainer.parts())?;
        let mut ahead = 1;
        loop {
            self.take_events()?;
            let held = self.is_held()?;
            if Instant::now() >= self.deadline {
                let last = self.last.as_deref().unwrap_or("no member was asked");
                let detail = format!(
                    "this rank did not get the job's state in time ({last}): does every rank offer it with Group::offer_state at the beginning of each step? A longer deadline may be needed"
                );
                return Err(Fault::new(FaultKind::DeadlineExceeded, detail).at(self.params.rank));
            }
            if held {
                // Its state would be asked for in vain, and kept from others that join.
                std::thread::sleep(AGAIN_AFTER);
                continue;
            }
            let why = match self.attempt(ahead, &parts, trainer) {
                Ok(caught_up) => return Ok(caught_up),
                Err(Attempt::Never(fault)) => return Err(fault),
                Err(Attempt::Again(why)) => why,
                Err(Attempt::Missed(why)) => {
                    ahead = (2 * ahead).min(AHEAD_MAX);
                    why
                }
            };
            tracing::info!(why, "the job's state could not be had: again");
            self.last = Some(why);
            // Two that were in each other's way do not come back together.
            std::thread::sleep(AGAIN_AFTER + AGAIN_APART * (self.params.rank.0 % 8));
        }
    }

    /// `ahead`: after how many further steps the members are to keep their state.
    fn attempt(&mut self, ahead: u64, parts: &[SavedPart], trainer: &mut dyn Trainer) -> Result<CaughtUp, Attempt> {
        let mut sources = self.connect()?;
        let outlines =
            ask_all(&mut sources, |_| Ask::Outline, |stream| decode(&body(stream, Given::Outline)?, Outline::decode))?;
        let outlines = all(&sources, outlines)?;
        let outline = outlines.iter().max_by_key(|outline| outline.commits).cloned().unwrap_or_default();
        check_specs(self.specs, &outline, self.wire)?;
        let resting = outlines.iter().all(|outline| outline.resting && outline.commits == outlines[0].commits);
        let commits = outline.commits + if resting { 0 } else { ahead };
        let holders = sources.len() as u32;
        let transfer = self.take_state(&mut sources, commits, parts, trainer)?;
        let mut caught_up = CaughtUp::new(sources, holders, outline, commits, transfer);
        let begun = Instant::now();
        while self.view.member(self.control.join_id()).is_none() {
            match caught_up.follow(trainer) {
                Ok(true) => {}
                Ok(false) if self.ready.is_none() => {
                    self.control.ready();
                    self.ready = Some(Instant::now());
                }
                Ok(false) => {
                    self.is_held()?;
                    std::thread::sleep(FOLLOW_EVERY);
                }
                // The others may count on it by now.
                Err(Attempt::Again(why)) if self.ready.is_some() => {
                    return Err(Attempt::Never(self.ended_or_lost(&why)));
                }
                Err(attempt) => return Err(attempt),
            }
            self.take_events()?;
            if Instant::now() >= self.deadline {
                return Err(Attempt::Never(self.not_taken_in(begun, &caught_up)));
            }
        }
        Ok(caught_up)
    }

    /// The members give their results no longer: perhaps because the job ends, which the control log says a little later.
    fn ended_or_lost(&mut self, why: &str) -> Fault {
        let until = self.deadline.min(Instant::now() + WORD_MAX);
        while Instant::now() < until {
            if let Err(fault) = self.take_events() {
                return fault;
            }
            std::thread::sleep(FOLLOW_EVERY);
        }
        lost(why)
    }

    /// Why this process is no member at its deadline, though it had the state since `begun`.
    fn not_taken_in(&self, begun: Instant, caught_up: &CaughtUp) -> Fault {
        let rank = self.params.rank;
        let seconds = |since: Instant| self.deadline.saturating_duration_since(since).as_secs_f64();
        let detail = match (self.view.rank(rank), self.ready) {
            (Some(other), _) => format!(
                "{rank} is held by a process on '{}' that does not answer, but that the others still count on: this one had \
                 the job's state, and waited for its place until its deadline",
                other.endpoint.hostname
            ),
            (None, Some(ready)) => format!(
                "this rank had caught up, but the members did not agree on an epoch with it in the {:.1} s that were left \
                 before its deadline: a longer one may be needed (GRADWIRE_DEADLINE_MS), or a broker that answers sooner",
                seconds(ready)
            ),
            (None, None) => format!(
                "this rank did not catch up: it had the job's state {:.1} s before its deadline, and was still {} steps \
                 behind at the end, for it applies results more slowly than the members make them, or not sooner: a faster \
                 Trainer::apply, or a longer deadline (GRADWIRE_DEADLINE_MS), may be needed",
                seconds(begun),
                caught_up.behind()
            ),
        };
        Fault::new(FaultKind::DeadlineExceeded, detail).at(rank)
    }

    /// Whether this rank lives already, as another process that answers. Looks at most every so often.
    fn is_held(&mut self) -> Result<bool, Fault> {
        self.rival.look((&self.endpoint, &self.params), (&self.view, self.control.join_id()), self.deadline)
    }

    /// Streams to all members that can be reached.
    fn connect(&self) -> Result<Vec<Source>, Attempt> {
        let limit = self.deadline.min(Instant::now() + DIAL_MAX);
        // Whoever has this rank, and did not answer, has nothing to give to it.
        let others: Vec<&Member> = self.view.members.iter().filter(|member| member.rank != self.params.rank).collect();
        // All at once: one that is gone takes as long as it may.
        let panicked = || Err(Fault::new(FaultKind::System, "the thread that dials panicked"));
        let dialled = at_once(others.into_iter(), panicked, |member| self.dial(member, limit))?;
        let (mut sources, mut faults) = (Vec::new(), Vec::new());
        for outcome in dialled {
            match outcome {
                Ok(source) => sources.push(source),
                Err(fault) => faults.push(fault),
            }
        }
        // These do not pass.
        let plain = [FaultKind::SecretMismatch, FaultKind::WorldMismatch, FaultKind::ProtocolVersion];
        if let Some(fault) = faults.iter().find(|fault| plain.contains(&fault.kind)) {
            return Err(fault.clone().into());
        }
        if !sources.is_empty() {
            (0..).zip(&mut sources).for_each(|(seat, source)| source.seat = seat);
            return Ok(sources);
        }
        let why = faults.last().map_or_else(|| "the job has no members".to_owned(), ToString::to_string);
        // Each was dialled again and again, and nothing listens where it did.
        if faults.iter().all(|fault| fault.kind == FaultKind::AddressUnreachable) {
            let detail = format!(
                "no rank is left that has the job's state ({why}): end the job, and start it again from what was saved"
            );
            return Err(Attempt::Never(Fault::new(FaultKind::RankDied, detail)));
        }
        Err(Attempt::Again(why))
    }

    fn dial(&self, member: &Member, limit: Instant) -> Result<Source, Fault> {
        let ends = (&self.endpoint, &member.endpoint);
        let stream = dial_state(ends, &self.params, member.rank, limit, &|| None)?;
        stream
            .set_timeout(SILENCE_MAX)
            .map_err(|error| Fault::new(FaultKind::System, error.to_string()).at(member.rank))?;
        Ok(Source {
            rank: member.rank,
            seat: 0,
            stream: FrameStream::new(stream, self.params.job, Some(self.deadline)),
        })
    }

    /// Gets the state as it is when so many steps are final. Sources that are lost meanwhile are not among them any more.
    fn take_state(
        &self,
        sources: &mut Vec<Source>,
        commits: u64,
        parts: &[SavedPart],
        trainer: &mut dyn Trainer,
    ) -> Result<Transfer, Attempt> {
        let holders = sources.len() as u32;
        let ask = |seat| Ask::Snapshot { commits, seat, holders };
        let read = |stream: &mut FrameStream| decode(&body(stream, Given::Snapshot)?, Snapshot::decode);
        let snapshots = ask_all(sources, ask, read)?;
        let snapshots = all(sources, snapshots)?;
        let start = Instant::now();
        same_parts(sources, &snapshots, parts)?;
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        let layout = pieces(&lengths).ok_or_else(|| Attempt::Again("the state is too large".to_owned()))?;
        let mut targets = Vec::with_capacity(layout.len());
        let mut pieces = layout.iter().peekable();
        for (part, state) in (0..).zip(parts_mut_of(trainer, parts)?) {
            expect_writes(state.bytes);
            let mut rest = state.bytes;
            while let Some((_, range)) = pieces.next_if(|(of, _)| *of == part) {
                let (piece, behind) = rest.split_at_mut((range.end - range.start) as usize);
                targets.push((targets.len() as u32, piece));
                rest = behind;
            }
        }
        let pieces = fetch(sources, holders, targets)?.map_err(|(rank, trouble)| attempt(rank, trouble))?;
        let read = |stream: &mut FrameStream| decode(&body(stream, Given::Sums)?, Sums::decode);
        let lost = holders - sources.len() as u32;
        let sums = ask_all(sources, |_| Ask::Sums, read)?;
        // What a member that is lost by now has given was what it kept.
        let kept: Vec<(Rank, Sums)> =
            sources.iter().zip(sums).filter_map(|(source, sums)| Some((source.rank, sums.ok()?))).collect();
        let part_of = |piece: u32| parts[layout[piece as usize].0 as usize].name.clone();
        compare(&pieces, &kept, &part_of)?;
        let bytes: u64 = lengths.iter().sum();
        let took = start.elapsed();
        tracing::info!(bytes, ms = took.as_millis() as u64, holders, lost, commits, "the job's state is here");
        Ok(Transfer { bytes, took, members: holders, lost })
    }

    /// Takes what the control log says meanwhile.
    fn take_events(&mut self) -> Result<(), Fault> {
        while let Some(event) = self.control.event() {
            match event {
                ControlEvent::View(view) => {
                    let old = std::mem::replace(&mut self.view, view);
                    if old.member(self.control.join_id()).is_none() {
                        self.before = old;
                    }
                }
                ControlEvent::Failed(fault) | ControlEvent::Removed(fault) => return Err(fault),
                _ => {}
            }
        }
        Ok(())
    }
}

/// All answers, or why to try again.
fn all<T>(sources: &[Source], answers: Vec<Result<T, Trouble>>) -> Result<Vec<T>, Attempt> {
    let named =
        |(source, answer): (&Source, Result<T, Trouble>)| answer.map_err(|trouble| attempt(source.rank, trouble));
    sources.iter().zip(answers).map(named).collect()
}

/// What becomes of an attempt that meets this.
pub(super) fn attempt(rank: Rank, trouble: Trouble) -> Attempt {
    match trouble {
        Trouble::No(No { reason: Reason::Never, detail, .. }) => {
            Attempt::Never(Fault::new(FaultKind::System, detail).at(rank))
        }
        Trouble::No(No { reason: Reason::TooLate, detail, .. }) => Attempt::Missed(format!("{rank}: {detail}")),
        trouble => Attempt::Again(trouble.describe(rank)),
    }
}

/// Checks that all members' states have the parts that this process's has.
fn same_parts(sources: &[Source], snapshots: &[Snapshot], ours: &[SavedPart]) -> Result<(), Fault> {
    for (source, snapshot) in sources.iter().zip(snapshots) {
        let theirs = &snapshot.parts;
        if theirs == ours {
            continue;
        }
        let odd = theirs.iter().zip(ours).find(|(theirs, ours)| theirs != ours);
        let what = match odd {
            Some((theirs, ours)) => {
                let SavedPart { name, bytes } = theirs;
                format!("part '{name}' of {bytes} bytes where this one has '{}' of {}", ours.name, ours.bytes)
            }
            None => format!("{} parts where this one has {}", theirs.len(), ours.len()),
        };
        let detail = format!(
            "{}'s state has {what}: this process trains another model, or runs another version of the program",
            source.rank
        );
        return Err(Fault::new(FaultKind::ShapeMismatch, detail).at(source.rank));
    }
    Ok(())
}

/// Checks that this process would declare what the job's ranks have declared.
fn check_specs(specs: &[TensorSpec], outline: &Outline, wire: WireFormat) -> Result<(), Fault> {
    let ours: Vec<Declaration> = specs.iter().map(|spec| spec.declaration(wire)).collect();
    let theirs = || outline.declared.iter().flatten().filter(|tensor| !tensor.name.starts_with(RESERVED_PREFIX));
    let hint = "this process trains another model, or runs another version of the program";
    for tensor in theirs() {
        let Some(own) = ours.iter().find(|own| own.name == tensor.name) else {
            let detail = format!("the job has declared it, but this process does not: {hint}");
            return Err(Fault::new(FaultKind::DeclarationMismatch, detail).tensor(tensor.name.clone()));
        };
        let (kind, what) = if own.shape != tensor.shape {
            (FaultKind::ShapeMismatch, format!("shape {:?} in the job and {:?} here", tensor.shape, own.shape))
        } else if own.dtype != tensor.dtype {
            (FaultKind::DTypeMismatch, format!("{} in the job and {} here", tensor.dtype, own.dtype))
        } else if (own.collective, own.reduce, own.wire) != (tensor.collective, tensor.reduce, tensor.wire) {
            (FaultKind::OperationMismatch, "another collective, reduction or wire format".to_owned())
        } else {
            continue;
        };
        return Err(Fault::new(kind, format!("{what}: {hint}")).tensor(tensor.name.clone()));
    }
    if let Some(own) = ours.iter().find(|own| !theirs().any(|tensor| tensor.name == own.name)) {
        let detail = format!("this process declares it, but the job has not: {hint}");
        return Err(Fault::new(FaultKind::DeclarationMismatch, detail).tensor(own.name.clone()));
    }
    Ok(())
}
