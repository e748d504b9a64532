//! A process that joins a running job: gets the state, and follows the job until it is a member.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gradwire_codec::unpack;
use gradwire_control::{ControlEvent, ControlPlane};
use gradwire_proto::hello::HelloParams;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{Member, View};
use gradwire_proto::saved::SavedPart;
use gradwire_proto::transfer::{Ask, Given, No, Outline, Reason, Results, Snapshot, Sums, pieces};
use gradwire_proto::{Fault, FaultKind, Rank, Step, WireFormat};
use gradwire_transport::Buffer;
use gradwire_transport::establish::dial_state;

use super::fetch::{Source, Trouble, ask_all, at_once, body, compare, fetch};
use super::holder::{parts_mut_of, parts_of};
use super::place::Rival;
use super::stream::{FrameStream, invalid};
use crate::group::RESERVED_PREFIX;
use crate::state::{StepResults, StepTensor, Trainer};
use crate::types::{TensorSpec, Transfer};

/// How long one member may take to be reached; another one is asked then.
const DIAL_MAX: Duration = Duration::from_secs(5);
/// A member from which nothing comes for so long is not asked any more.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long to wait before everything is tried again, and how much longer than the rank before.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
const AGAIN_APART: Duration = Duration::from_millis(13);
/// Most steps ahead for which the members are asked to keep their state.
const AHEAD_MAX: u64 = 64;
/// How often it is looked whether the next step is final.
const FOLLOW_EVERY: Duration = Duration::from_millis(2);

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
enum Attempt {
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

/// A process that has the state, and follows the job.
pub(crate) struct CaughtUp {
    sources: Vec<Source>,
    pub(crate) outline: Outline,
    tensors: Vec<Declaration>,
    results: Vec<StepTensor>,
    /// Steps whose results the state has, and how many were final when the last of them was had.
    pub(crate) commits: u64,
    final_by_then: u64,
    pub(crate) transfer: Transfer,
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
        caught_up.map_err(|fault| match (self.rival.fault(&self.view, self.params.rank), &self.last) {
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
            ask_all(&mut sources, |_| Ask::Outline, |stream| decode(body(stream, Given::Outline)?, Outline::decode))?;
        let outlines = all(&sources, outlines)?;
        let outline = outlines.iter().max_by_key(|outline| outline.commits).cloned().unwrap_or_default();
        let tensors: Vec<Declaration> = outline.declared.iter().flatten().cloned().collect();
        check_specs(self.specs, &tensors, self.wire)?;
        let resting = outlines.iter().all(|outline| outline.resting && outline.commits == outlines[0].commits);
        let commits = outline.commits + if resting { 0 } else { ahead };
        let transfer = self.take_state(&mut sources, commits, parts, trainer)?;
        let result =
            |tensor: &Declaration| StepTensor { name: tensor.name.clone(), result: None, found_nonfinite: false };
        let results = tensors.iter().map(result).collect();
        let final_by_then = commits;
        let mut caught_up = CaughtUp { sources, outline, tensors, results, commits, final_by_then, transfer };
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
                Err(Attempt::Again(why)) if self.ready.is_some() => return Err(Attempt::Never(lost(&why))),
                Err(attempt) => return Err(attempt),
            }
            self.take_events()?;
            if Instant::now() >= self.deadline {
                return Err(Attempt::Never(self.not_taken_in(begun, &caught_up)));
            }
        }
        Ok(caught_up)
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
                caught_up.final_by_then.saturating_sub(caught_up.commits).max(1)
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
        Ok(Source { rank: member.rank, stream: FrameStream::new(stream, self.params.job, Some(self.deadline)) })
    }

    /// Gets the state as it is when so many steps are final.
    fn take_state(
        &self,
        sources: &mut [Source],
        commits: u64,
        parts: &[SavedPart],
        trainer: &mut dyn Trainer,
    ) -> Result<Transfer, Attempt> {
        let holders = sources.len() as u32;
        let ask = |seat| Ask::Snapshot { commits, seat, holders };
        let read = |stream: &mut FrameStream| decode(body(stream, Given::Snapshot)?, Snapshot::decode);
        let snapshots = ask_all(sources, ask, read)?;
        let snapshots = all(sources, snapshots)?;
        let start = Instant::now();
        same_parts(sources, &snapshots, parts)?;
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        let layout = pieces(&lengths).ok_or_else(|| Attempt::Again("the state is too large".to_owned()))?;
        let mut targets = Vec::with_capacity(layout.len());
        let mut pieces = layout.iter().peekable();
        for (part, state) in (0..).zip(parts_mut_of(trainer, parts)?) {
            let mut rest = state.bytes;
            while let Some((_, range)) = pieces.next_if(|(of, _)| *of == part) {
                let (piece, behind) = rest.split_at_mut((range.end - range.start) as usize);
                targets.push((targets.len() as u32, piece));
                rest = behind;
            }
        }
        let pieces = fetch(sources, targets)?.map_err(|(rank, trouble)| attempt(rank, trouble))?;
        let read = |stream: &mut FrameStream| decode(body(stream, Given::Sums)?, Sums::decode);
        let sums = ask_all(sources, |_| Ask::Sums, read)?;
        // What a member that is lost by now has given was what it kept.
        let kept: Vec<(Rank, Sums)> =
            sources.iter().zip(sums).filter_map(|(source, sums)| Some((source.rank, sums.ok()?))).collect();
        let part_of = |piece: u32| parts[layout[piece as usize].0 as usize].name.clone();
        compare(&pieces, &kept, &part_of)?;
        let bytes: u64 = lengths.iter().sum();
        let took = start.elapsed();
        tracing::info!(bytes, ms = took.as_millis() as u64, holders, commits, "the job's state is here");
        Ok(Transfer { bytes, took, members: holders })
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

impl CaughtUp {
    /// Applies all results up to these steps, which are final.
    pub(crate) fn follow_to(
        &mut self,
        commits: u64,
        deadline: Instant,
        trainer: &mut dyn Trainer,
    ) -> Result<(), Fault> {
        while self.commits < commits {
            match self.follow(trainer) {
                Ok(true) => {}
                Ok(false) if Instant::now() < deadline => std::thread::sleep(FOLLOW_EVERY),
                Ok(false) => return Err(lost("the members do not say that the step is final")),
                Err(Attempt::Again(why) | Attempt::Missed(why)) => return Err(lost(&why)),
                Err(Attempt::Never(fault)) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Applies the results of the next step, if it is final.
    fn follow(&mut self, trainer: &mut dyn Trainer) -> Result<bool, Attempt> {
        let commits = self.commits;
        let read = |stream: &mut FrameStream| read_step(stream);
        let answers = ask_all(&mut self.sources, |_| Ask::Results(commits), read)?;
        let not_yet =
            |answer: &Result<_, Trouble>| matches!(answer, Err(Trouble::No(No { reason: Reason::NotYet, .. })));
        if answers.iter().any(not_yet) {
            return Ok(false);
        }
        // Whoever is gone may have had no part in this step.
        let mut lost = Vec::new();
        let mut given: BTreeMap<Rank, (Results, Vec<Update>)> = BTreeMap::new();
        for (source, answer) in self.sources.iter().zip(answers) {
            match answer {
                Ok(answer) => drop(given.insert(source.rank, answer)),
                Err(trouble) => lost.push((source.rank, describe(source.rank, &trouble))),
            }
        }
        let why = lost.first().map_or_else(|| "members answered differently".to_owned(), |(_, why)| why.clone());
        self.sources.retain(|source| !lost.iter().any(|(rank, _)| *rank == source.rank));
        let Some((_, (head, _))) = given.first_key_value() else { return Err(Attempt::Again(why)) };
        let head = head.clone();
        let complete = head.members.iter().all(|rank| {
            given.get(rank).is_some_and(|(other, _)| (other.epoch, &other.members) == (head.epoch, &head.members))
        });
        if !complete {
            return Err(Attempt::Again(why));
        }
        self.place(given.into_values().flat_map(|(_, updates)| updates))?;
        let step = Step(self.outline.first_step + commits);
        trainer.apply(&StepResults { step, contributors: &head.members, tensors: &self.results })?;
        self.commits += 1;
        self.final_by_then = head.commits;
        Ok(true)
    }

    /// Puts a step's results together.
    fn place(&mut self, updates: impl Iterator<Item = Update>) -> Result<(), Attempt> {
        let mut covered = vec![0_u64; self.tensors.len()];
        let mut memory: Vec<Option<Buffer>> = self.results.iter_mut().map(|tensor| tensor.result.take()).collect();
        let bad = || Attempt::Again("results that do not fit what was declared".to_owned());
        for Update { tensor, at, elements, wire, bytes } in updates {
            let index = tensor as usize;
            let declaration = self.tensors.get(index).ok_or_else(bad)?;
            let size = declaration.dtype.size();
            let result = &mut self.results[index];
            if result.result.is_none() {
                let kept = memory[index].take();
                result.result =
                    Some(kept.map_or_else(|| Buffer::allocate(declaration.elements() as usize * size), Ok)?);
                result.found_nonfinite = false;
            }
            let start = usize::try_from(at).ok().and_then(|at| at.checked_mul(size)).ok_or_else(bad)?;
            let range = start..start.checked_add(elements as usize * size).ok_or_else(bad)?;
            let place = result.result.as_mut().and_then(|buffer| buffer.bytes_mut().get_mut(range)).ok_or_else(bad)?;
            let fits = bytes.len() == elements as usize * wire.size();
            result.found_nonfinite |=
                unpack(wire, declaration.dtype, &bytes, place).ok().filter(|_| fits).ok_or_else(bad)?;
            covered[index] += u64::from(elements);
        }
        let whole = |(tensor, covered): (&Declaration, &u64)| *covered == 0 || *covered == tensor.elements();
        if self.tensors.iter().zip(&covered).all(whole) { Ok(()) } else { Err(bad()) }
    }
}

/// A unit of results.
struct Update {
    tensor: u32,
    at: u64,
    elements: u32,
    wire: gradwire_proto::DType,
    bytes: Vec<u8>,
}

fn read_step(stream: &mut FrameStream) -> Result<(Results, Vec<Update>), Trouble> {
    let results = decode(body(stream, Given::Results)?, Results::decode)?;
    let mut updates = Vec::new();
    for _ in 0..results.updates {
        let header = stream.read_given()?;
        let Some(wire) = header.dtype.filter(|_| header.bucket.0 == Given::Update as u32) else {
            return Err(invalid("something else than a unit of results").into());
        };
        let mut bytes = vec![0; header.payload_len as usize];
        stream.read_body(&header, &mut bytes)?;
        let (tensor, at, elements) = (header.unit_first.0, header.location.offset, header.unit_count);
        updates.push(Update { tensor, at, elements, wire, bytes });
    }
    Ok((results, updates))
}

fn decode<T>(bytes: Vec<u8>, decode: fn(&[u8]) -> Result<T, gradwire_proto::wire::Malformed>) -> Result<T, Trouble> {
    decode(&bytes).map_err(|malformed| invalid(malformed.0).into())
}

/// All answers, or why to try again.
fn all<T>(sources: &[Source], answers: Vec<Result<T, Trouble>>) -> Result<Vec<T>, Attempt> {
    let named =
        |(source, answer): (&Source, Result<T, Trouble>)| answer.map_err(|trouble| attempt(source.rank, trouble));
    sources.iter().zip(answers).map(named).collect()
}

/// What becomes of an attempt that meets this.
fn attempt(rank: Rank, trouble: Trouble) -> Attempt {
    match trouble {
        Trouble::No(No { reason: Reason::Never, detail, .. }) => {
            Attempt::Never(Fault::new(FaultKind::System, detail).at(rank))
        }
        Trouble::No(No { reason: Reason::TooLate, detail, .. }) => Attempt::Missed(format!("{rank}: {detail}")),
        trouble => Attempt::Again(describe(rank, &trouble)),
    }
}

fn describe(rank: Rank, trouble: &Trouble) -> String {
    match trouble {
        Trouble::Lost(error) => format!("{rank}: {error}"),
        Trouble::No(no) => format!("{rank}: {}", no.detail),
        Trouble::Stopped => format!("{rank}: it was not asked any more"),
    }
}

fn lost(why: &str) -> Fault {
    let detail = format!("the job's results were lost while this rank joined ({why}): start it again");
    Fault::new(FaultKind::RankDied, detail)
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
fn check_specs(specs: &[TensorSpec], declared: &[Declaration], wire: WireFormat) -> Result<(), Fault> {
    let ours: Vec<Declaration> = specs.iter().map(|spec| spec.declaration(wire)).collect();
    let theirs = || declared.iter().filter(|tensor| !tensor.name.starts_with(RESERVED_PREFIX));
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
