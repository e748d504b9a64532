//! A process that has the job's state, and applies the results of what follows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gradwire_codec::unpack;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::transfer::{Ask, Given, No, Outline, Reason, Results};
use gradwire_proto::{DType, Fault, FaultKind, Rank, Step};
use gradwire_transport::Buffer;

use super::fetch::{Source, Trouble, at_once, body, decode, giver_of};
use super::newcomer::Attempt;
use super::stream::{FrameStream, invalid};
use crate::state::{StepResults, StepTensor, Trainer};
use crate::types::Transfer;

/// How often it is looked whether the next step is final.
pub(super) const FOLLOW_EVERY: Duration = Duration::from_millis(2);

/// A process that has the state, and follows the job.
pub(crate) struct CaughtUp {
    /// Those members that are not lost.
    sources: Vec<Source>,
    /// How many there were when the state was asked for.
    holders: u32,
    pub(crate) outline: Outline,
    tensors: Vec<Declaration>,
    results: Vec<StepTensor>,
    /// Of the next step, by seat: what is here.
    given: BTreeMap<u32, Part>,
    /// Steps whose results the state has, and how many were final when the last of them was had.
    pub(crate) commits: u64,
    final_by_then: u64,
    pub(crate) transfer: Transfer,
}

/// What one member gives of a step.
type Part = (Results, Vec<Update>);

/// A unit of results.
struct Update {
    tensor: u32,
    at: u64,
    elements: u32,
    wire: DType,
    bytes: Vec<u8>,
}

impl CaughtUp {
    /// A process with the state after `commits` final steps, of which each of so many holders keeps a part of the later
    /// results.
    pub(super) fn new(sources: Vec<Source>, holders: u32, outline: Outline, commits: u64, transfer: Transfer) -> Self {
        let tensors: Vec<Declaration> = outline.declared.iter().flatten().cloned().collect();
        let result =
            |tensor: &Declaration| StepTensor { name: tensor.name.clone(), result: None, found_nonfinite: false };
        let results = tensors.iter().map(result).collect();
        let (given, final_by_then) = (BTreeMap::new(), commits);
        Self { sources, holders, outline, tensors, results, given, commits, final_by_then, transfer }
    }

    /// How many steps it was behind when it last had one: at least one.
    pub(super) fn behind(&self) -> u64 {
        self.final_by_then.saturating_sub(self.commits).max(1)
    }

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
    pub(super) fn follow(&mut self, trainer: &mut dyn Trainer) -> Result<bool, Attempt> {
        if !self.gather()? {
            return Ok(false);
        }
        let given = std::mem::take(&mut self.given);
        let again = || Attempt::Again("members answered differently".to_owned());
        let (head, _) = given.values().next().ok_or_else(again)?;
        if !given.values().all(|(other, _)| (other.epoch, &other.members) == (head.epoch, &head.members)) {
            return Err(again());
        }
        let (contributors, now) = (head.members.clone(), head.commits);
        self.place(given.into_values().flat_map(|(_, updates)| updates))?;
        let step = Step(self.outline.first_step + self.commits);
        trainer.apply(&StepResults { step, contributors: &contributors, tensors: &self.results })?;
        self.commits += 1;
        self.final_by_then = now;
        Ok(true)
    }

    /// Gets what is missing of the next step. Returns false if it is not final yet.
    fn gather(&mut self) -> Result<bool, Attempt> {
        let commits = self.commits;
        let mut why = "no member is left that keeps them".to_owned();
        loop {
            let mut wanted: Vec<Vec<u32>> = self.sources.iter().map(|_| Vec::new()).collect();
            for seat in (0..self.holders).filter(|seat| !self.given.contains_key(seat)) {
                let Some(nth) = giver_of(&self.sources, seat, self.holders) else { return Err(Attempt::Again(why)) };
                wanted[nth].push(seat);
            }
            if wanted.iter().all(Vec::is_empty) {
                return Ok(true);
            }
            // Who is asked nothing needs no thread.
            let asked = |seats: &Vec<u32>| !seats.is_empty();
            let of = |(source, seats): (&Source, &Vec<u32>)| asked(seats).then_some((source.seat, source.rank));
            let whom: Vec<(u32, Rank)> = self.sources.iter().zip(&wanted).filter_map(of).collect();
            let streams = self.sources.iter_mut().map(|source| &mut source.stream);
            let panicked =
                || (Vec::new(), Some(Trouble::Lost(std::io::Error::other("the thread that reads panicked"))));
            let answers =
                at_once(streams.zip(wanted).filter(|(_, seats)| asked(seats)), panicked, |(stream, seats)| {
                    read_parts(stream, commits, &seats)
                })?;
            let (mut not_yet, mut lost) = (false, Vec::new());
            for ((seat, rank), (parts, trouble)) in whom.into_iter().zip(answers) {
                self.given.extend(parts);
                match trouble {
                    None => {}
                    Some(Trouble::No(No { reason: Reason::NotYet, .. })) => not_yet = true,
                    Some(trouble) => {
                        why = trouble.describe(rank);
                        tracing::info!(why, "a member gives results no longer");
                        lost.push(seat);
                    }
                }
            }
            self.sources.retain(|source| !lost.contains(&source.seat));
            if not_yet {
                return Ok(false);
            }
        }
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

/// What can be had of one member, and what went wrong before the rest was, if anything did.
fn read_parts(stream: &mut FrameStream, commits: u64, seats: &[u32]) -> (Vec<(u32, Part)>, Option<Trouble>) {
    let mut parts = Vec::new();
    for seat in seats.iter().copied() {
        let asked = stream.ask(Ask::Results { commits, seat }).map_err(Trouble::Lost);
        match asked.and_then(|()| read_part(stream)) {
            Ok(part) => parts.push((seat, part)),
            Err(trouble) => return (parts, Some(trouble)),
        }
    }
    (parts, None)
}

fn read_part(stream: &mut FrameStream) -> Result<Part, Trouble> {
    let results = decode(&body(stream, Given::Results)?, Results::decode)?;
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

pub(super) fn lost(why: &str) -> Fault {
    let detail = format!("the job's results were lost while this rank joined ({why}): start it again");
    Fault::new(FaultKind::RankDied, detail)
}
