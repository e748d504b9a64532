//! One rank of the demo: what a trainer does with gradwire.
//!
//! It takes rank 0's weights, and then in every step computes its part of the batch, hands each gradient over as soon
//! as it is known, waits for the means of all ranks, and updates its weights: which stay the same bits on every rank.

use std::time::Instant;

use gradwire::{
    Buffer, Builder, Collective, DType, Fault, FaultKind, Group, Handle, Rank, ReduceOp, Replaced, Tensor, TensorSpec,
};
use ndarray::Array2;
use serde::{Deserialize, Serialize};

use super::data::{BATCH, Batches, Split, gradient_scale, share};
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
}

/// What a rank tells the parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// From rank 0: so many steps are done, and the loss over its part of the last batch.
    Progress { step: u32, loss: f32 },
    /// From every rank, at the end. Rank 0 adds what was measured.
    Finished { weights_sha256: String, measured: Option<Measured> },
}

/// The job's figures, over all ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) transport: String,
    pub(super) epoch: u64,
    /// On the test images, 0..=1.
    pub(super) accuracy: f64,
    /// Bytes that all ranks sent while training.
    pub(super) wire_bytes: u64,
    /// Of the slowest rank in each step.
    pub(super) step_ms_p50: f64,
    /// Of the slowest rank in each step.
    pub(super) step_ms_p99: f64,
}

impl Measured {
    /// What two ranks measured, each of its own part, together: of times the longer ones.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            wire_bytes: self.wire_bytes + other.wire_bytes,
            step_ms_p50: self.step_ms_p50.max(other.step_ms_p50),
            step_ms_p99: self.step_ms_p99.max(other.step_ms_p99),
            ..self
        }
    }
}

/// Joins the job, trains, reports, and leaves.
///
/// # Errors
/// Any [`Fault`] of gradwire; and one of kind `InvalidArgument` when training diverges.
pub(super) fn run(args: &DemoRankArgs) -> Result<(), Fault> {
    let split = Split::load()?;
    let group = Builder::from_env()?.transport(args.transport.into()).wire(args.wire.into()).connect()?;
    let mut trainer = Trainer::join(&group, args)?;

    group.barrier()?;
    let bytes_before = group.stats().wire_bytes_sent;
    let mut step_ns = Vec::with_capacity(args.steps as usize);
    for step in 1..=args.steps {
        let started = Instant::now();
        let loss = trainer.step(&split, step)?;
        step_ns.push(timing::elapsed_ns(started));
        if group.rank() == Rank(0) && is_report_due(step, args.steps) {
            ranks::emit(&Event::Progress { step, loss })?;
        }
    }
    group.barrier()?;
    let bytes = group.stats().wire_bytes_sent - bytes_before;

    let [slowest, total] = totals(&group, args.steps)?;
    group.allreduce_slice(&slowest, &mut step_ns)?;
    let mut bytes = [i64::try_from(bytes).unwrap_or(i64::MAX)];
    group.allreduce_slice(&total, &mut bytes)?;

    let measured = (group.rank() == Rank(0)).then(|| {
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
    ranks::emit(&Event::Finished { weights_sha256: trainer.model.sha256(), measured })?;
    drop(trainer);
    group.close()
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

/// A rank's model and the tensors of its gradients.
struct Trainer<'a> {
    group: &'a Group,
    model: Model,
    optimizer: Momentum,
    batches: Batches,
    gradients: [Gradient; PARAMETERS.len()],
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
            batches: Batches::new(Split::TRAIN_IMAGES, BATCH, args.seed),
            gradients: tensors.map(|tensor| Gradient { tensor, buffer: None, handle: None }),
        })
    }

    /// One step. Returns the loss over this rank's part of the batch.
    fn step(&mut self, split: &Split, step: u32) -> Result<f32, Fault> {
        let Self { group, model, optimizer, batches, gradients } = self;
        let (rank, world) = (group.rank().0 as usize, group.world_size() as usize);
        let part = split.train.select(&batches.next()[share(BATCH, rank, world)]);
        let loss =
            model.backward(&part, gradient_scale(world), |index, gradient| gradients[index].submit(group, gradient))?;
        for gradient in gradients.iter_mut() {
            gradient.wait(step)?;
        }
        // From here on no rank that is lost changes the results any more.
        for Replaced { tensor, output, .. } in group.commit()?.replaced {
            if let Some(gradient) = gradients.iter_mut().find(|gradient| gradient.tensor.name() == tensor.name()) {
                gradient.buffer = Some(output);
            }
        }
        for (index, gradient) in gradients.iter().enumerate() {
            let Some(mean) = &gradient.buffer else { continue };
            optimizer.update(model, index, mean.as_slice::<f32>().iter().copied());
        }
        Ok(loss)
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
        if completed.outcome.found_nonfinite {
            let detail = format!("gradients became infinite or NaN in step {step}: try another --seed or --wire fp32");
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        self.buffer = Some(completed.output);
        Ok(())
    }
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

    #[test]
    fn events_survive_the_way_to_the_parent() {
        let measured = Measured {
            transport: "shm".to_owned(),
            epoch: 1,
            accuracy: 0.97,
            wire_bytes: u64::MAX,
            step_ms_p50: 0.1,
            step_ms_p99: 0.2,
        };
        let event = Event::Finished { weights_sha256: "ab".to_owned(), measured: Some(measured) };
        let line = serde_json::to_string(&event).expect("serialize");
        let Ok(Event::Finished { measured: Some(measured), .. }) = serde_json::from_str(&line) else {
            panic!("{line} became something else");
        };
        assert_eq!((measured.wire_bytes, measured.accuracy), (u64::MAX, 0.97));
        assert!(serde_json::from_str::<Event>("step 3").is_err());
    }
}
