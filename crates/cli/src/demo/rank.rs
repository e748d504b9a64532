//! One rank of the demo: what a trainer does with gradwire.
//!
//! It takes rank 0's weights, and then in every step computes its part of the batch, hands each gradient over as soon
//! as it is known, waits for the means of all ranks, and updates its weights: which stay the same bits on every rank. It
//! goes on when others are lost in the middle, if it is asked to; where the others train already, it joins them.

use std::collections::BTreeSet;
use std::time::Instant;

use gradwire::{
    Buffer, Builder, Collective, Commit, DType, Fault, FaultKind, Group, Handle, Outcome, Rank, Recovery, ReduceOp,
    Replaced, Tensor, TensorSpec,
};
use ndarray::Array2;

use super::data::{Digits, Samples, Split, gradient_scale};
use super::disturb::{self, Disturbances};
use super::event::{Event, Joined, Measured, Moment, StepEnd};
use super::learner::{Learner, numbers};
use super::model::{ELEMENTS, Model, PARAMETERS};
use crate::args::{Transport, Wire};
use crate::bench::output::complain;
use crate::bench::{ranks, timing};

/// Progress is reported about this many times in a run.
const PROGRESS_REPORTS: u32 = 100;
/// How often a rank tries to join where members are lost just then.
const TRIES_MAX: u32 = 5;

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

/// How a rank's part in the job ended.
enum Part {
    /// With the last step.
    Done,
    /// The others went on without it.
    Removed,
    /// The others were through before it had begun.
    Late,
}

/// Joins the job, trains, reports, and leaves. A rank that the others went on without joins them again, unless they are
/// through: that is no failure.
///
/// # Errors
/// Any [`Fault`] of gradwire; and one of kind `InvalidArgument` when training diverges.
pub(super) fn run(args: &DemoRankArgs) -> Result<(), Fault> {
    let split = Split::load()?;
    let mut back = false;
    while let Part::Removed = take_part(args, &split, back)? {
        back = true;
    }
    Ok(())
}

/// `back`: it was a member before.
fn take_part(args: &DemoRankArgs, split: &Split, back: bool) -> Result<Part, Fault> {
    let (mut learner, began) = (Learner::new(), Instant::now());
    let gradwire::Joined { group, tensors, transfer, .. } = match join(args, &mut learner) {
        // That the others are through is for the parent to find out: it hears from each of them how it ended.
        Err(fault) if args.disturbances.any() && matches!(fault.kind, FaultKind::RankLeft | FaultKind::RankDied) => {
            if !back {
                complain(&fault);
            }
            ranks::emit(&Event::Late { at: Moment::now(), back })?;
            return Ok(Part::Late);
        }
        joined => joined?,
    };
    let [gradients @ .., weights, step_ns, bytes]: [Tensor; PARAMETERS.len() + 3] = ranks::exactly(tensors)?;
    match transfer {
        None => {
            learner.model = initial_model(&group, &weights, args.seed)?;
            group.barrier()?;
            // What was shared so far is no part of the first step, which could not be done again with it.
            let _ = group.commit()?;
            ranks::emit(&Event::Began { at: Moment::now() })?;
        }
        Some(transfer) => {
            let (step, took_us) = (learner.next_step(), timing::elapsed_ns(began).unsigned_abs() / 1000);
            let (bytes, members) = (transfer.bytes, transfer.members);
            ranks::emit(&Event::Joined(Joined { step, at: Moment::now(), took_us, bytes, members, back }))?;
        }
    }
    let mut trainer = Trainer::new(&group, gradients, learner, args);
    let trained = train(&mut trainer, split, args, &[step_ns, bytes]);
    let removed = matches!(&trained, Err(fault) if fault.kind == FaultKind::Removed);
    if removed {
        trainer.learner.memory.send()?;
        ranks::emit(&Event::Removed { step: trainer.learner.next_step(), at: Moment::now() })?;
    } else {
        trained?;
    }
    drop((trainer, weights));
    match group.close() {
        Err(fault) if removed && fault.kind == FaultKind::Removed => Ok(Part::Removed),
        closed => closed.map(|()| if removed { Part::Removed } else { Part::Done }),
    }
}

/// Takes a place in the job, with the others' weights where it runs already.
fn join(args: &DemoRankArgs, learner: &mut Learner) -> Result<gradwire::Joined, Fault> {
    let gradients = PARAMETERS.map(|parameter| {
        let shape = [parameter.shape.0 as u64, parameter.shape.1 as u64];
        TensorSpec::new(parameter.name, &shape, DType::F32).reduce(ReduceOp::Mean).priority(parameter.priority)
    });
    // Weights travel as the integers that their bits are, so that no wire format rounds them.
    let weights = TensorSpec::new("demo.weights", &[ELEMENTS as u64], DType::I32)
        .collective(Collective::Broadcast { root: Rank(0) });
    // By which ranks share their figures: the slowest rank's time of each step, and the sum of bytes.
    let step_ns = TensorSpec::new("demo.step_ns", &[u64::from(args.steps)], DType::I64).reduce(ReduceOp::Max);
    let bytes = TensorSpec::new("demo.bytes", &[1], DType::I64).reduce(ReduceOp::Sum);
    let specs: Vec<TensorSpec> = gradients.into_iter().chain([weights, step_ns, bytes]).collect();
    let mut tries = 1;
    loop {
        let mut builder = Builder::from_env()?.transport(args.transport.into()).wire(args.wire.into());
        if args.disturbances.any() {
            builder = builder.recovery(Recovery::Redo).ranks_min(1);
        }
        match builder.join(&specs, learner) {
            // A member was lost that had what this rank needs: the others have it too.
            Err(fault) if args.disturbances.any() && fault.kind == FaultKind::RankDied && tries < TRIES_MAX => {
                tries += 1
            }
            joined => return joined,
        }
    }
}

fn train(trainer: &mut Trainer<'_>, split: &Split, args: &DemoRankArgs, totals: &[Tensor; 2]) -> Result<(), Fault> {
    let group = trainer.group;
    let bytes_before = group.stats().wire_bytes_sent;
    // A rank that joined does not measure: others may pause for those that are still to come, and it waits for them.
    let measures = trainer.learner.next_step() == 1;
    let mut step_ns = vec![0; args.steps as usize];
    while trainer.learner.next_step() <= args.steps {
        let step = trainer.learner.next_step();
        trainer.let_in(args)?;
        let started = Instant::now();
        let loss = trainer.step(split, &args.disturbances)?;
        if measures {
            step_ns[step as usize - 1] = timing::elapsed_ns(started);
        }
        if is_report_due(step, args.steps) && is_first(group) {
            ranks::emit(&Event::Progress { step, loss })?;
        }
    }
    group.barrier()?;
    let bytes = group.stats().wire_bytes_sent - bytes_before;

    let [slowest, total] = totals;
    group.allreduce_slice(slowest, &mut step_ns)?;
    let mut bytes = [i64::try_from(bytes).unwrap_or(i64::MAX)];
    group.allreduce_slice(total, &mut bytes)?;

    let learner = &mut trainer.learner;
    let measured = is_first(group).then(|| {
        step_ns.sort_unstable();
        Measured {
            transport: group.transport().to_owned(),
            epoch: group.epoch().0,
            accuracy: learner.model.accuracy(&split.test),
            wire_bytes: bytes[0].unsigned_abs(),
            step_ms_p50: timing::percentile_ms(&step_ns, 50),
            step_ms_p99: timing::percentile_ms(&step_ns, 99),
        }
    });
    learner.memory.send()?;
    let (weights_sha256, history) = (learner.model.sha256(), learner.memory.history.clone());
    ranks::emit(&Event::Finished { weights_sha256, history, measured })
}

/// Whether this is the lowest rank that is left: it speaks for all.
fn is_first(group: &Group) -> bool {
    group.members().first() == Some(&group.rank())
}

pub(super) fn is_report_due(step: u32, steps: u32) -> bool {
    step == steps || step.is_multiple_of((steps / PROGRESS_REPORTS).max(1))
}

/// A rank's model, the tensors of its gradients, and who else trains.
struct Trainer<'a> {
    group: &'a Group,
    learner: Learner,
    samples: Samples,
    gradients: [Gradient; PARAMETERS.len()],
    members: BTreeSet<u32>,
    /// How many processes that were started to join take part.
    came: usize,
}

/// A gradient's tensor, its memory, and its operation while one is in flight.
struct Gradient {
    tensor: Tensor,
    buffer: Option<Buffer>,
    handle: Option<Handle>,
}

impl<'a> Trainer<'a> {
    fn new(group: &'a Group, tensors: [Tensor; PARAMETERS.len()], learner: Learner, args: &DemoRankArgs) -> Self {
        let mut samples = Samples::new(group.rank().0, group.world_size(), args.seed);
        samples.skip(learner.next_step() - 1);
        let gradients = tensors.map(|tensor| Gradient { tensor, buffer: None, handle: None });
        // One that joined counts on those that were there before to wait for others.
        let came = if learner.next_step() == 1 { 0 } else { args.disturbances.joins() };
        let members = numbers(&group.members()).into_iter().collect();
        Self { group, learner, samples, gradients, members, came }
    }

    /// What comes before a step: processes that join, or come back, are let in, and have their time for it.
    fn let_in(&mut self, args: &DemoRankArgs) -> Result<(), Fault> {
        let (step, disturbances) = (self.learner.next_step(), &args.disturbances);
        if disturbances.joins_in(step) > 0 {
            ranks::emit(&Event::Due { step, at: Moment::now() })?;
        }
        let is_member = |rank| self.members.contains(&rank);
        if let Some(pause) = disturbances.pause_before(step, args.steps, self.came, is_member) {
            std::thread::sleep(pause);
        }
        self.group.offer_state(&self.learner)
    }

    /// One step. Returns the loss over this rank's part of the batch.
    fn step(&mut self, split: &Split, disturbances: &Disturbances) -> Result<f32, Fault> {
        let part = split.train.select(self.samples.next());
        let (loss, commit) = loop {
            match self.exchange(&part, disturbances) {
                // A rank was lost, and what it had to do with cannot be done again: all that are left begin anew.
                Err(fault) if fault.kind == FaultKind::StepAborted => {
                    self.gradients.iter_mut().for_each(|gradient| drop(gradient.handle.take()));
                    self.group.offer_state(&self.learner)?;
                }
                exchanged => break exchanged?,
            }
        };
        self.apply(&commit)?;
        self.report(&commit, disturbances)?;
        Ok(loss)
    }

    /// Hands the gradients over, and waits for the means of all ranks. Only after the commit no rank that is lost
    /// changes them any more: nothing is applied before.
    fn exchange(&mut self, part: &Digits, disturbances: &Disturbances) -> Result<(f32, Commit), Fault> {
        let Self { group, learner, gradients, .. } = self;
        let (rank, world, step) = (group.rank().0, group.world_size(), learner.next_step());
        let mut submitted = 0;
        let loss = learner.model.backward(part, gradient_scale(world), |index, gradient| {
            gradients[index].submit(group, gradient)?;
            submitted += 1;
            if submitted == PARAMETERS.len() / 2 && disturbances.kills_in(rank, step) {
                gradients.iter_mut().try_for_each(|gradient| gradient.wait(step))?;
                disturb::die(step)?;
            }
            Ok::<(), Fault>(())
        })?;
        // What was handed over first is there first: the last layer's.
        for gradient in gradients.iter_mut().rev() {
            gradient.wait(step)?;
        }
        if let Some(time) = disturbances.stalls_in(rank, step) {
            disturb::stall(step, time)?;
        }
        let mut commit = group.commit()?;
        for Replaced { tensor, output, outcome } in &mut commit.replaced {
            check_finite(*outcome, step)?;
            if let Some(gradient) = gradients.iter_mut().find(|gradient| gradient.tensor.name() == tensor.name())
                && let Some(buffer) = &mut gradient.buffer
            {
                std::mem::swap(buffer, output);
            }
        }
        Ok((loss, commit))
    }

    /// Updates the weights with the means.
    fn apply(&mut self, commit: &Commit) -> Result<(), Fault> {
        let means = self.gradients.iter().filter_map(|gradient| gradient.buffer.as_ref()).collect();
        self.learner.update(ranks::exactly(means)?, &commit.contributors);
        self.learner.memory.send_if_many()
    }

    /// Tells the parent about a step with which something changed, or in which a rank was killed.
    fn report(&mut self, commit: &Commit, disturbances: &Disturbances) -> Result<(), Fault> {
        if !disturbances.any() {
            return Ok(());
        }
        let (step, at) = (self.learner.next_step() - 1, Moment::now());
        let (contributors, members) = (numbers(&commit.contributors), numbers(&self.group.members()));
        let before = self.learner.memory.history.at(step - 1);
        let changed = contributors != members || (step > 1 && before != contributors);
        if !changed && !disturbances.kills_any_in(step) {
            return Ok(());
        }
        // Ranks that may come back by themselves are none that were started.
        let new = contributors.iter().filter(|rank| !self.members.contains(rank) && !disturbances.stalls_ever(**rank));
        self.came += new.count();
        self.members = contributors.iter().copied().collect();
        let (epoch, replaced) = (self.group.epoch().0, commit.replaced.len());
        ranks::emit(&Event::Step(StepEnd { step, at, contributors, members, epoch, replaced }))
    }
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

/// Rank 0's initial weights, on every rank.
fn initial_model(group: &Group, tensor: &Tensor, seed: u64) -> Result<Model, Fault> {
    let mut buffer = group.buffer(tensor)?;
    if group.rank() == Rank(0) {
        let weights = Model::seeded(seed);
        buffer.as_mut_slice::<i32>().iter_mut().zip(weights.weights()).for_each(|(into, weight)| {
            *into = weight.to_bits().cast_signed();
        });
    }
    let handle = group.submit(tensor, buffer).map_err(|error| error.fault)?;
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
