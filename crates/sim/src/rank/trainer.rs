//! What a trainer does with a rank: offers its state, computes, hands tensors over, waits, commits, applies the results.

use std::rc::Rc;

use gradwire_codec::crc32;
use gradwire_proto::membership::RecordId;
use gradwire_proto::{Collective, Epoch, Fault, Rank, RegionKey, Step, TensorId};

use super::epoch::Made;
use super::exchange::{Exchange, Finished, Outcome, Slot, retains};
use super::state::TrainerState;
use crate::event::{Nanos, US};
use crate::mutation::Mutation;
use crate::plan::{Recovery, Tensor};
use crate::process::Context;
use crate::report::{COMMIT, CommitRecord, Final, ProcessId, Report};
use crate::workload::Contribution;

#[derive(Debug)]
pub(super) struct Trainer {
    buffers: Vec<Buffers>,
    pub(super) state: TrainerState,
    /// The step that is computed or exchanged: as many are final.
    pub(super) step: u64,
    /// How often it has begun a step.
    attempt: u64,
    doing: Doing,
    /// How many tensors of the step were handed over, and when the next one is.
    posted: usize,
    next_at: Nanos,
    in_flight: Vec<bool>,
    /// By tensor: the result that there is of it.
    results: Vec<Option<Final>>,
    /// It is to leave after its step.
    pub(super) leaves: bool,
    /// It computes until then at least.
    pub(super) hangs_until: Nanos,
    /// Commits that are to be put on record.
    pub(super) records: Vec<CommitRecord>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Declaring,
    /// Begins a step. Where too few ranks are left, others are waited for until then.
    Offering(Nanos),
    Exchanging,
    Committing,
    Through,
}

/// A tensor's memory. Without an input the contribution is in the output.
#[derive(Clone, Debug)]
struct Buffers {
    input: Option<RegionKey>,
    output: RegionKey,
    spare: Option<RegionKey>,
    /// Results that were given back, and their checksums.
    held: Vec<(RegionKey, u32)>,
}

impl Trainer {
    /// `joined`: the state of a process that joined a running job, and after how many steps it is that.
    pub(super) fn new(context: &mut Context<'_>, joined: Option<(TrainerState, u64)>) -> Self {
        let plan = context.plan;
        let buffers = plan.tensors.iter().enumerate().map(|(index, tensor)| {
            let contributes = matches!(tensor.collective.into(), Collective::AllReduce | Collective::ReduceScatter);
            let (bytes, retained) = (bytes_of(tensor), retains(plan, index));
            let input = (retained || contributes && index % 2 == 1).then(|| context.memory.allocate(bytes));
            let spare = retained.then(|| context.memory.allocate(bytes));
            Buffers { input, output: context.memory.allocate(bytes), spare, held: Vec::new() }
        });
        let buffers: Vec<Buffers> = buffers.collect();
        let (in_flight, results) = (vec![false; buffers.len()], vec![None; buffers.len()]);
        let mut trainer = Self {
            buffers,
            state: TrainerState::new(plan.seed),
            step: 0,
            attempt: 0,
            doing: Doing::Declaring,
            posted: 0,
            next_at: 0,
            hangs_until: 0,
            in_flight,
            results,
            leaves: false,
            records: Vec::new(),
        };
        if let Some((state, step)) = joined {
            trainer.state = state;
            trainer.begin(context, step);
        }
        trainer
    }

    pub(super) fn is_through(&self) -> bool {
        self.doing == Doing::Through
    }

    pub(super) fn is_committing(&self) -> bool {
        self.doing == Doing::Committing
    }

    /// Begins a step, for the first time or again.
    fn begin(&mut self, context: &Context<'_>, step: u64) {
        self.step = step;
        self.attempt += 1;
        self.posted = 0;
        self.results.fill(None);
        let over = step >= u64::from(context.plan.steps) || self.leaves;
        self.doing = if over { Doing::Through } else { Doing::Offering(context.now + context.plan.deadline_ns()) };
    }

    pub(super) fn next_at(&self) -> Option<Nanos> {
        match self.doing {
            Doing::Offering(until) => Some(until),
            Doing::Exchanging if self.posted < self.buffers.len() => Some(self.next_at.max(self.hangs_until)),
            _ => None,
        }
    }

    /// Does what it can do now. Returns whether that was anything.
    ///
    /// # Errors
    /// When too few ranks are left, and no others came in time.
    pub(super) fn advance(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) -> Result<bool, Fault> {
        let mut moved = false;
        while let Some(outcome) = exchange.outcomes.pop_front() {
            moved = true;
            match outcome {
                Outcome::Done(finished) => self.finish(context, finished),
                Outcome::Aborted(fault) => {
                    self.fail(context, &fault);
                    if !matches!(self.doing, Doing::Declaring | Doing::Through) {
                        self.begin(context, self.step);
                    }
                }
                Outcome::Committed { made, replaced } => self.end_step(context, exchange, &made, replaced),
                Outcome::Synced => {}
            }
        }
        if exchange.failed.is_some() {
            return Ok(moved);
        }
        match self.doing {
            Doing::Declaring if exchange.is_prepared() => self.begin(context, 0),
            Doing::Offering(until) => {
                exchange.holder.offer(self.step, &self.state);
                if context.has(Mutation::StateAsIs) {
                    exchange.holder.as_is = Some(self.state.clone());
                }
                if exchange.holder.resting {
                    let fault = exchange.holder.too_few().filter(|_| context.now >= until).cloned();
                    return fault.map_or(Ok(moved), Err);
                }
                self.doing = Doing::Exchanging;
                let compute = context.plan.compute_us * US;
                self.next_at = context.now + compute + context.some(compute / 4 + 1);
            }
            Doing::Exchanging if self.posted < self.buffers.len() => {
                let before = self.posted;
                self.post(context, exchange);
                return Ok(moved || before < self.posted);
            }
            Doing::Exchanging if self.results.iter().all(Option::is_some) => self.begin_commit(context, exchange),
            _ => return Ok(moved),
        }
        Ok(true)
    }

    /// Hands over the tensors that are due.
    fn post(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) {
        while self.posted < self.buffers.len() && self.next_at.max(self.hangs_until) <= context.now {
            let index = self.posted;
            self.posted += 1;
            self.next_at = context.now + context.some(20 * US);
            self.post_one(context, exchange, index);
            if exchange.session.fault().is_some() {
                return;
            }
        }
    }

    fn post_one(&mut self, context: &mut Context<'_>, exchange: &mut Exchange, index: usize) {
        self.check_held(context, index);
        let Buffers { input, output, spare, .. } = self.buffers[index];
        let (process, attempt, step) = (context.process.0, self.attempt, self.step);
        let contribution = Contribution { seed: context.plan.seed, process, attempt, step, tensor: index };
        contribution.fill(&context.plan.tensors[index], context.memory.get_mut(input.unwrap_or(output)));
        exchange.slots[index] = Slot { input, output: Some(output), spare, ..Slot::default() };
        self.in_flight[index] = true;
        let by = context.now + context.plan.deadline_ns();
        // What is handed over after the step was given up is for the next epoch.
        let epoch = Epoch(exchange.view.epoch.0 + u64::from(exchange.epochs.suspended));
        context.report(Report::Posted { epoch, step: Step(step), tensor: index, attempt, by });
        let tensor = TensorId(index as u32);
        match exchange.session.post(tensor, context.now, None) {
            // Somebody waits for it right away, or not.
            Ok(_) if context.some(2) == 0 => exchange.session.flush(tensor),
            Ok(_) => {}
            Err(fault) => {
                exchange.slots[index] = Slot::default();
                self.fail_one(context, index, &fault);
            }
        }
    }

    fn begin_commit(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) {
        context.report(Report::CommitBegun { by: context.now + context.plan.deadline_ns() });
        self.doing = Doing::Committing;
        if context.plan.recovery == Recovery::Fail || context.has(Mutation::CommitAtOnce) {
            exchange.session.commit();
            exchange.end_commit();
        } else if let Err(fault) = exchange.session.begin_commit(context.now, None) {
            exchange.session.fail(fault);
        }
    }

    /// An operation ended well.
    fn finish(&mut self, context: &mut Context<'_>, finished: Finished) {
        let Finished { tensor: index, version, contributors, nonfinite, output, replaces } = finished;
        let tensor = context.plan.tensors[index];
        let whole = context.memory.get(output);
        let rank = place_in(&contributors, context.process);
        let bytes: Rc<[u8]> = match tensor.collective.into() {
            Collective::ReduceScatter => own_block(whole, &tensor, contributors.len(), rank).into(),
            _ => whole.into(),
        };
        // What replaces a result is the trainer's with the commit only: until then it may be done again.
        if !replaces {
            self.buffers[index].held.push((output, crc32(whole)));
        }
        self.in_flight[index] = false;
        self.results[index] = Some(Final { crc: crc32(&bytes), nonfinite });
        context.report(Report::Completed { version, tensor: index, contributors, rank: rank.0, bytes, nonfinite });
    }

    /// The step is final.
    fn end_step(&mut self, context: &mut Context<'_>, exchange: &mut Exchange, made: &Made, replaced: Vec<Finished>) {
        let Made { version, contributors, ranks, crcs } = made;
        for finished in &replaced {
            let crc = crc32(context.memory.get(finished.output));
            self.buffers[finished.tensor].held.push((finished.output, crc));
        }
        let mut results: Vec<Final> = self.results.iter().flatten().copied().collect();
        if context.has(Mutation::KeepReplaced) {
            for finished in &replaced {
                let first = self.buffers[finished.tensor].held.first();
                results[finished.tensor].crc = first.map_or(0, |(_, crc)| *crc);
            }
        }
        let reduced = |(index, result): (usize, &Final)| {
            let tensor = &context.plan.tensors[index];
            let all = Collective::from(tensor.collective) == Collective::AllReduce && tensor.elements > 0;
            all.then_some(*result)
        };
        let applied: Vec<Option<Final>> = results.iter().enumerate().map(reduced).collect();
        self.state.apply(version.step.0, ranks, &applied);
        let rank = place_in(contributors, context.process);
        let done = Report::StepDone {
            version: *version,
            contributors: contributors.clone(),
            rank: rank.0,
            results: results.into(),
        };
        context.report(done);
        context.report(Report::State { commits: version.step.0 + 1, digest: self.state.digest() });
        let id: RecordId = context.unique();
        let owner = exchange.me().0;
        self.records.push(CommitRecord { id, version: *version, owner, crcs: crcs.clone() });
        self.begin(context, version.step.0 + 1);
    }

    /// Every operation in flight ended with a fault, and so did the commit.
    pub(super) fn fail(&mut self, context: &mut Context<'_>, fault: &Fault) {
        for index in 0..self.buffers.len() {
            if self.in_flight[index] {
                self.fail_one(context, index, fault);
            }
        }
        if self.doing == Doing::Committing {
            context.report(Report::Failed { tensor: COMMIT, fault: fault.clone() });
        }
        // Nothing further is handed over in this step.
        self.posted = self.buffers.len();
    }

    fn fail_one(&mut self, context: &mut Context<'_>, index: usize, fault: &Fault) {
        self.in_flight[index] = false;
        context.report(Report::Failed { tensor: index, fault: fault.clone() });
    }

    /// Looks whether what was given back is still what it was: nobody may write to it.
    fn check_held(&mut self, context: &mut Context<'_>, index: usize) {
        for (output, crc) in std::mem::take(&mut self.buffers[index].held) {
            let intact = crc32(context.memory.get(output)) == crc;
            context.report(Report::Held { tensor: index, intact });
        }
    }

    pub(super) fn check_all_held(&mut self, context: &mut Context<'_>) {
        for index in 0..self.buffers.len() {
            self.check_held(context, index);
        }
    }
}

/// Which contributor a process is.
fn place_in(contributors: &[ProcessId], process: ProcessId) -> Rank {
    Rank(contributors.iter().position(|one| *one == process).unwrap_or_default() as u32)
}

fn bytes_of(tensor: &Tensor) -> usize {
    let dtype: gradwire_proto::DType = tensor.dtype.into();
    tensor.elements as usize * dtype.size()
}

/// The block of a reduce-scatter that is this rank's.
fn own_block<'a>(output: &'a [u8], tensor: &Tensor, world: usize, rank: Rank) -> &'a [u8] {
    let dtype: gradwire_proto::DType = tensor.dtype.into();
    let block = (tensor.elements as usize).div_ceil(world) * dtype.size();
    let start = (block * rank.index()).min(output.len());
    &output[start..(start + block).min(output.len())]
}
