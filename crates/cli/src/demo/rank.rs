//! One rank of the demo: what a trainer does with gradwire.
//!
//! It takes rank 0's weights, and then in every step computes its part of the batch, hands each gradient over as soon
//! as it is known, waits for the means of all ranks, and updates its weights: which stay the same bits on every rank. It
//! goes on when others are lost in the middle, if it is asked to.

use std::time::Instant;

use gradwire::{
    Buffer, Builder, Collective, Commit, DType, Fault, FaultKind, Group, Handle, Outcome, Rank, Recovery, ReduceOp,
    Replaced, Tensor, TensorSpec,
};
use ndarray::Array2;

use super::data::{Digits, Samples, Split, gradient_scale};
use super::disturb::{self, Disturbances};
use super::event::{Event, Measured, Moment, StepEnd};
use super::history::{self, History, Trail};
use super::model::{ELEMENTS, Model, Momentum, PARAMETERS};
use crate::args::{Transport, Wire};
use crate::bench::{ranks, timing};

/// Progress is reported about this many times in a run.
const PROGRESS_REPORTS: u32 = 100;

/// What the parent asks of a rank. Who and where the rank is, the environment says.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoRankArgs {
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    #[arg(long, value_enum)]
    transport: Transport,
    #[arg(long, value_enum)]
    wire: Wire,
    #[arg(long)]
    seed: u64,
    #[command(flatten)]
    disturbances: Disturbances,
}

/// Joins the job, trains, reports, and leaves. A rank that the others went on without says so: that is no failure.
///
/// # Errors
/// Any [`Fault`] of gradwire; and one of kind `InvalidArgument` when training diverges.
pub(super) fn run(args: &DemoRankArgs) -> Result<(), Fault> {
    let split = Split::load()?;
    let mut builder = Builder::from_env()?.transport(args.transport.into()).wire(args.wire.into());
    if args.disturbances.any() {
        builder = builder.recovery(Recovery::Redo).ranks_min(1);
    }
    let group = builder.connect()?;
    let mut trainer = Trainer::join(&group, args)?;
    let trained = train(&mut trainer, &split, args);
    let removed = matches!(&trained, Err(fault) if fault.kind == FaultKind::Removed);
    if removed {
        trainer.trail.send()?;
        ranks::emit(&Event::Removed { step: trainer.next_step, at: Moment::now() })?;
    } else {
        trained?;
    }
    drop(trainer);
    match group.close() {
        Err(fault) if removed && fault.kind == FaultKind::Removed => Ok(()),
        closed => closed,
    }
}

fn train(trainer: &mut Trainer<'_>, split: &Split, args: &DemoRankArgs) -> Result<(), Fault> {
    let group = trainer.group;
    group.barrier()?;
    if args.disturbances.any() {
        // What was shared so far is no part of the first step, which could not be done again with it.
        let _ = group.commit()?;
    }
    ranks::emit(&Event::Began { at: Moment::now() })?;
    let bytes_before = group.stats().wire_bytes_sent;
    let mut step_ns = Vec::with_capacity(args.steps as usize);
    for step in 1..=args.steps {
        let started = Instant::now();
        let loss = trainer.step(split, &args.disturbances)?;
        step_ns.push(timing::elapsed_ns(started));
        if is_report_due(step, args.steps) && is_first(group) {
            ranks::emit(&Event::Progress { step, loss })?;
        }
    }
    group.barrier()?;
    let bytes = group.stats().wire_bytes_sent - bytes_before;

    let [slowest, total] = totals(group, args.steps)?;
    group.allreduce_slice(&slowest, &mut step_ns)?;
    let mut bytes = [i64::try_from(bytes).unwrap_or(i64::MAX)];
    group.allreduce_slice(&total, &mut bytes)?;

    let measured = is_first(group).then(|| {
        step_ns.sort_unstable();
        Measured {
            transport: group.transport().to_owned(),
            epoch: group.epoch().0,
            accuracy: trainer.model.accuracy(&split.test),
            wire_bytes: bytes[0].unsigned_abs(),
            step_ms_p50: timing::percentile_ms(&step_ns, 50),
            step_ms_p99: timing::percentile_ms(&step_ns, 99),
        }
    });
    trainer.trail.send()?;
    let history = trainer.history.clone();
    ranks::emit(&Event::Finished { weights_sha256: trainer.model.sha256(), history, measured })
}

/// Whether this is the lowest rank that is left: it speaks for all.
fn is_first(group: &Group) -> bool {
    group.members().first() == Some(&group.rank())
}

/// The tensors by which ranks share their figures: the slowest rank's time of each step, and the sum of bytes.
fn totals(group: &Group, steps: u32) -> Result<[Tensor; 2], Fault> {
    let specs = [
        TensorSpec::new("demo.step_ns", &[u64::from(steps)], DType::I64).reduce(ReduceOp::Max),
        TensorSpec::new("demo.bytes", &[1], DType::I64).reduce(ReduceOp::Sum),
    ];
    ranks::exactly(group.declare(&specs)?)
}

pub(super) fn is_report_due(step: u32, steps: u32) -> bool {
    step == steps || step.is_multiple_of((steps / PROGRESS_REPORTS).max(1))
}

/// A rank's model, the tensors of its gradients, and what it remembers of its steps.
struct Trainer<'a> {
    group: &'a Group,
    model: Model,
    optimizer: Momentum,
    samples: Samples,
    gradients: [Gradient; PARAMETERS.len()],
    next_step: u32,
    history: History,
    trail: Trail,
}

/// A gradient's tensor, its memory, and its operation while one is in flight.
struct Gradient {
    tensor: Tensor,
    buffer: Option<Buffer>,
    handle: Option<Handle>,
}

impl<'a> Trainer<'a> {
    fn join(group: &'a Group, args: &DemoRankArgs) -> Result<Self, Fault> {
        let specs = PARAMETERS.map(|parameter| {
            let shape = [parameter.shape.0 as u64, parameter.shape.1 as u64];
            TensorSpec::new(parameter.name, &shape, DType::F32).reduce(ReduceOp::Mean).priority(parameter.priority)
        });
        let tensors: [Tensor; PARAMETERS.len()] = ranks::exactly(group.declare(&specs)?)?;
        Ok(Self {
            group,
            model: initial_model(group, args.seed)?,
            optimizer: Momentum::new(),
            samples: Samples::new(group.rank().0, group.world_size(), args.seed),
            gradients: tensors.map(|tensor| Gradient { tensor, buffer: None, handle: None }),
            next_step: 1,
            history: History::default(),
            trail: Trail::new(1),
        })
    }

    /// One step. Returns the loss over this rank's part of the batch.
    fn step(&mut self, split: &Split, disturbances: &Disturbances) -> Result<f32, Fault> {
        let part = split.train.select(self.samples.next());
        let (loss, commit) = loop {
            match self.exchange(&part, disturbances) {
                // A rank was lost, and what it had to do with cannot be done again: all that are left begin anew.
                Err(fault) if fault.kind == FaultKind::StepAborted => {
                    self.gradients.iter_mut().for_each(|gradient| drop(gradient.handle.take()));
                }
                exchanged => break exchanged?,
            }
        };
        self.apply(&commit)?;
        self.report(&commit, disturbances)?;
        self.next_step += 1;
        Ok(loss)
    }

    /// Hands the gradients over, and waits for the means of all ranks. Only after the commit no rank that is lost
    /// changes them any more: nothing is applied before.
    fn exchange(&mut self, part: &Digits, disturbances: &Disturbances) -> Result<(f32, Commit), Fault> {
        let Self { group, model, gradients, next_step: step, .. } = self;
        let (rank, world) = (group.rank().0, group.world_size());
        let mut submitted = 0;
        let loss = model.backward(part, gradient_scale(world), |index, gradient| {
            gradients[index].submit(group, gradient)?;
            submitted += 1;
            if submitted == PARAMETERS.len() / 2 && disturbances.kills_in(rank, *step) {
                gradients.iter_mut().try_for_each(|gradient| gradient.wait(*step))?;
                disturb::die(*step)?;
            }
            Ok::<(), Fault>(())
        })?;
        // What was handed over first is there first: the last layer's.
        for gradient in gradients.iter_mut().rev() {
            gradient.wait(*step)?;
        }
        if disturbances.stalls_in(rank, *step).is_some() {
            disturb::stall(*step)?;
        }
        let mut commit = group.commit()?;
        for Replaced { tensor, output, outcome } in &mut commit.replaced {
            check_finite(*outcome, *step)?;
            if let Some(gradient) = gradients.iter_mut().find(|gradient| gradient.tensor.name() == tensor.name())
                && let Some(buffer) = &mut gradient.buffer
            {
                std::mem::swap(buffer, output);
            }
        }
        Ok((loss, commit))
    }

    /// Updates the weights with the means, and remembers what they were.
    fn apply(&mut self, commit: &Commit) -> Result<(), Fault> {
        let Self { model, optimizer, gradients, .. } = self;
        for (index, gradient) in gradients.iter().enumerate() {
            let Some(mean) = &gradient.buffer else { continue };
            optimizer.update(model, index, mean.as_slice::<f32>().iter().copied());
        }
        let means = self.gradients.iter().filter_map(|gradient| gradient.buffer.as_ref());
        self.trail.push(history::checksum(means.map(Buffer::bytes)))?;
        self.history.push(self.next_step, &numbers(&commit.contributors));
        Ok(())
    }

    /// Tells the parent about a step with which something changed, or in which a rank was killed.
    fn report(&self, commit: &Commit, disturbances: &Disturbances) -> Result<(), Fault> {
        if !disturbances.any() {
            return Ok(());
        }
        let (step, at) = (self.next_step, Moment::now());
        let (contributors, members) = (numbers(&commit.contributors), numbers(&self.group.members()));
        let before = self.history.at(step - 1);
        let changed = contributors != members || (step > 1 && before != contributors);
        if !changed && !disturbances.kills_any_in(step) {
            return Ok(());
        }
        let (epoch, replaced) = (self.group.epoch().0, commit.replaced.len());
        ranks::emit(&Event::Step(StepEnd { step, at, contributors, members, epoch, replaced }))
    }
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.0).collect()
}

impl Gradient {
    fn submit(&mut self, group: &Group, gradient: &Array2<f32>) -> Result<(), Fault> {
        let mut buffer = match self.buffer.take() {
            Some(buffer) => buffer,
            None => group.buffer(&self.tensor)?,
        };
        buffer.as_mut_slice::<f32>().iter_mut().zip(gradient).for_each(|(into, value)| *into = *value);
        self.handle = Some(group.allreduce(&self.tensor, buffer).map_err(|error| error.fault)?);
        Ok(())
    }

    fn wait(&mut self, step: u32) -> Result<(), Fault> {
        let Some(handle) = self.handle.take() else { return Ok(()) };
        let completed = handle.wait().map_err(|error| error.fault)?;
        check_finite(completed.outcome, step)?;
        self.buffer = Some(completed.output);
        Ok(())
    }
}

fn check_finite(outcome: Outcome, step: u32) -> Result<(), Fault> {
    if outcome.found_nonfinite {
        let detail = format!("gradients became infinite or NaN in step {step}: try another --seed or --wire fp32");
        return Err(Fault::new(FaultKind::InvalidArgument, detail));
    }
    Ok(())
}

/// Rank 0's initial weights, on every rank. They travel as the integers that their bits are, so that no wire format
/// rounds them.
fn initial_model(group: &Group, seed: u64) -> Result<Model, Fault> {
    let spec = TensorSpec::new("demo.weights", &[ELEMENTS as u64], DType::I32)
        .collective(Collective::Broadcast { root: Rank(0) });
    let [tensor] = ranks::exactly(group.declare(&[spec])?)?;
    let mut buffer = group.buffer(&tensor)?;
    if group.rank() == Rank(0) {
        let weights = Model::seeded(seed);
        buffer.as_mut_slice::<i32>().iter_mut().zip(weights.weights()).for_each(|(into, weight)| {
            *into = weight.to_bits().cast_signed();
        });
    }
    let handle = group.submit(&tensor, buffer).map_err(|error| error.fault)?;
    let weights = handle.wait().map_err(|error| error.fault)?.output;
    let mut model = Model::zeroed();
    model.set_weights(weights.as_slice::<i32>().iter().map(|bits| f32::from_bits(bits.cast_unsigned())));
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_reported_about_a_hundred_times_and_at_the_end() {
        for steps in [1, 7, 99, 100, 101, 600, 100_000] {
            let reports = (1..=steps).filter(|step| is_report_due(*step, steps)).count();
            assert!(reports <= 2 * PROGRESS_REPORTS as usize, "{reports} reports in {steps} steps");
            assert!(is_report_due(steps, steps));
        }
    }
}
