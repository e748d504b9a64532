//! What a trainer does with a rank: computes, hands tensors over, waits, commits.

use std::rc::Rc;

use gradwire_codec::crc32;
use gradwire_proto::{Collective, Fault, Rank, RegionKey, Step, TensorId};

use super::exchange::{Exchange, Slot};
use crate::event::{Nanos, US};
use crate::plan::Tensor;
use crate::process::Context;
use crate::report::{Report, Version};
use crate::workload::Contribution;

/// An operation that ended well.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) tensor: usize,
    pub(super) step: Step,
    pub(super) nonfinite: bool,
}

#[derive(Debug)]
pub(super) struct Trainer {
    buffers: Vec<Buffers>,
    /// The step that is computed or exchanged.
    pub(super) step: u64,
    /// How many tensors of it were handed over, and when the next one is.
    posted: usize,
    next_at: Nanos,
    done: usize,
    in_flight: Vec<bool>,
}

/// A tensor's memory. Without an input the contribution is in the output.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    input: Option<RegionKey>,
    output: RegionKey,
    /// Checksum of the result that was given back.
    held: Option<u32>,
}

impl Trainer {
    pub(super) fn new(context: &mut Context<'_>, step: u64) -> Self {
        let buffers = context.plan.tensors.iter().enumerate().map(|(index, tensor)| {
            let contributes = matches!(tensor.collective.into(), Collective::AllReduce | Collective::ReduceScatter);
            let bytes = bytes_of(tensor);
            let input = (contributes && index % 2 == 1).then(|| context.memory.allocate(bytes));
            Buffers { input, output: context.memory.allocate(bytes), held: None }
        });
        let buffers: Vec<Buffers> = buffers.collect();
        let in_flight = vec![false; buffers.len()];
        Self { buffers, step, posted: 0, next_at: 0, done: 0, in_flight }
    }

    /// Computes for this step from now on.
    pub(super) fn begin(&mut self, context: &mut Context<'_>, step: u64) {
        self.step = step;
        self.posted = 0;
        self.done = 0;
        let compute = context.plan.compute_us * US;
        self.next_at = context.now + compute + context.some(compute / 4 + 1);
    }

    pub(super) fn next_at(&self) -> Option<Nanos> {
        (self.posted < self.buffers.len()).then_some(self.next_at)
    }

    /// Hands over the tensors that are due.
    pub(super) fn post(&mut self, context: &mut Context<'_>, exchange: &mut Exchange) {
        while self.posted < self.buffers.len() && self.next_at <= context.now {
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
        let Buffers { input, output, .. } = self.buffers[index];
        let contribution = Contribution {
            seed: context.plan.seed,
            process: context.process.0,
            epoch: exchange.view.epoch.0,
            step: self.step,
            tensor: index,
        };
        contribution.fill(&context.plan.tensors[index], context.memory.get_mut(input.unwrap_or(output)));
        exchange.slots[index] = Slot { input, output: Some(output) };
        let version = self.version(exchange);
        self.in_flight[index] = true;
        context.report(Report::Posted { version, tensor: index, by: context.now + context.plan.deadline_ns() });
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

    pub(super) fn version(&self, exchange: &Exchange) -> Version {
        Version { epoch: exchange.view.epoch, view: exchange.view.id, step: Step(self.step) }
    }

    /// An operation ended well. Returns whether the step is over.
    pub(super) fn finish(&mut self, context: &mut Context<'_>, exchange: &Exchange, finished: Finished) -> bool {
        let Finished { tensor: index, step, nonfinite } = finished;
        let tensor = context.plan.tensors[index];
        let output = context.memory.get(self.buffers[index].output);
        let bytes: Rc<[u8]> = match tensor.collective.into() {
            Collective::ReduceScatter => own_block(output, &tensor, exchange.peers.len(), exchange.me()).into(),
            _ => output.into(),
        };
        self.buffers[index].held = Some(crc32(output));
        self.in_flight[index] = false;
        let version = Version { step, ..self.version(exchange) };
        let (contributors, rank) = (exchange.contributors(), exchange.me().0);
        context.report(Report::Completed { version, tensor: index, contributors, rank, bytes, nonfinite });
        self.done += 1;
        self.done == self.buffers.len()
    }

    /// Every operation in flight ended with a fault.
    pub(super) fn fail(&mut self, context: &mut Context<'_>, fault: &Fault) {
        for index in 0..self.buffers.len() {
            if self.in_flight[index] {
                self.fail_one(context, index, fault);
            }
        }
        // Nothing further is handed over in this epoch.
        self.posted = self.buffers.len();
    }

    fn fail_one(&mut self, context: &mut Context<'_>, index: usize, fault: &Fault) {
        self.in_flight[index] = false;
        self.buffers[index].held = None;
        context.report(Report::Failed { tensor: index, fault: fault.clone() });
    }

    /// Looks whether what was given back is still what it was: nobody may write to it.
    pub(super) fn check_held(&mut self, context: &mut Context<'_>, index: usize) {
        let buffers = &mut self.buffers[index];
        if let Some(held) = buffers.held.take() {
            let intact = crc32(context.memory.get(buffers.output)) == held;
            context.report(Report::Held { tensor: index, intact });
        }
    }

    pub(super) fn check_all_held(&mut self, context: &mut Context<'_>) {
        for index in 0..self.buffers.len() {
            self.check_held(context, index);
        }
    }
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
