//! Operations: from what a caller hands over to what it gets back.

use std::time::Duration;

use gradwire_proto::{Collective, Fault, FaultKind, TensorId};
use gradwire_transport::Buffer;

use super::Engine;
use crate::handle::OpResult;
use crate::types::{Completed, OpError, Outcome};

/// An operation that a caller hands over.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) tensor: TensorId,
    /// Out of place: where the contribution is. In place: none, it is in `output`.
    pub(crate) input: Option<Buffer>,
    pub(crate) output: Buffer,
    pub(crate) deadline: Option<Duration>,
    /// The caller waits for it right away: its bucket need not wait for others.
    pub(crate) urgent: bool,
    /// How many aborted steps the caller has heard of.
    pub(crate) heard: u64,
}

impl Engine {
    /// Starts an operation, or ends it at once with an error.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let Submission { tensor, input, output, deadline, urgent, heard } = submission;
        if let Some(fault) = self.epochs.unheard(heard) {
            return self.reject(tensor, fault, input, output);
        }
        if self.slots[tensor.index()].replaces {
            return self.epochs.deferred.push(Submission { tensor, input, output, deadline, urgent, heard });
        }
        let (input, output) = match self.result_apart(tensor, input.as_ref()) {
            Ok(None) => (input, output),
            Ok(Some(result)) => (Some(output), result),
            Err(fault) => return self.reject(tensor, fault, input, output),
        };
        if let Err(fault) = self.check_submission(tensor, input.as_ref(), &output) {
            self.reject(tensor, fault, input, output);
            return;
        }
        let slot = &mut self.slots[tensor.index()];
        slot.input = input;
        slot.output = Some(output);
        let now = self.now();
        let deadline_ns = deadline.map(|deadline| u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX));
        match self.session.post(tensor, now, deadline_ns) {
            Ok(_) if urgent => self.session.flush(tensor),
            Ok(_) => {}
            Err(fault) => self.give_back(tensor, fault),
        }
    }

    /// Checks what the session cannot see, and makes the buffers known to the transport where it works on them.
    fn check_submission(&mut self, tensor: TensorId, input: Option<&Buffer>, output: &Buffer) -> Result<(), Fault> {
        if self.slots[tensor.index()].output.is_some() {
            let detail = "an operation on this tensor is in flight: wait for it before the next one";
            return Err(
                Fault::new(FaultKind::TensorBusy, detail).tensor(self.session.plan().tensor(tensor).name.clone())
            );
        }
        let plan = self.session.plan();
        if let Collective::Broadcast { root } = plan.bucket(plan.tensor(tensor).bucket).collective
            && !self.session.members().contains(&root)
        {
            // Another member's data in place of the root's would be what nobody asked for.
            let detail = format!("its root, {root}, is no member any more: declare a tensor whose root is one");
            return Err(Fault::new(FaultKind::RankLeft, detail).tensor(plan.tensor(tensor).name.clone()).at(root));
        }
        input.into_iter().chain([output]).try_for_each(|buffer| self.register(tensor, buffer))
    }

    /// Makes a buffer of a tensor known to the peers before its first use.
    pub(crate) fn register(&mut self, tensor: TensorId, buffer: &Buffer) -> Result<(), Fault> {
        let plan = self.session.plan();
        if plan.bucket(plan.tensor(tensor).bucket).direct { self.transport.register(buffer) } else { Ok(()) }
    }

    /// Ends an operation that was in flight when the job failed. Peers may still read buffers that they were told of,
    /// and transports still write and send them: such buffers stay here, and the caller gets copies.
    pub(super) fn end(&mut self, tensor: TensorId, fault: Fault) {
        let plan = self.session.plan();
        if !plan.bucket(plan.tensor(tensor).bucket).direct {
            self.give_back(tensor, fault);
            return;
        }
        let slot = &mut self.slots[tensor.index()];
        let Some(output) = slot.output.take() else { return };
        let originals = slot.input.take().into_iter().chain([output]);
        let mut copies = Vec::new();
        for original in originals {
            // Without memory for a copy the caller gets the error alone.
            if let Ok(mut copy) = Buffer::allocate(original.len()) {
                copy.bytes_mut().copy_from_slice(original.bytes());
                copies.push(copy);
            }
            self.quarantine.push(original);
        }
        self.ended += 1;
        self.slots[tensor.index()].shared.complete(Err(OpError { fault, buffers: copies }));
    }

    /// Ends a tensor's operation with a fault and gives its buffers back.
    fn give_back(&mut self, tensor: TensorId, fault: Fault) {
        let slot = &mut self.slots[tensor.index()];
        let input = slot.input.take();
        if let Some(output) = slot.output.take() {
            self.reject(tensor, fault, input, output);
        }
    }

    fn reject(&mut self, tensor: TensorId, fault: Fault, input: Option<Buffer>, output: Buffer) {
        let buffers = input.into_iter().chain([output]).collect();
        self.ended += 1;
        self.slots[tensor.index()].shared.complete(Err(OpError { fault, buffers }));
    }

    /// Lets a tensor travel without the rest of its bucket: somebody waits for it.
    pub(crate) fn flush(&mut self, tensor: TensorId) {
        self.session.flush(tensor);
    }

    /// The job failed: every caller gets its buffers and the reason.
    pub(super) fn end_all(&mut self, fault: &Fault) {
        self.failed = true;
        self.finishing.clear();
        self.spoilt.clear();
        self.epochs.failed(fault);
        self.slots.iter_mut().for_each(|slot| slot.replaces = false);
        for tensor in (0..self.slots.len() as u32).map(TensorId) {
            self.end(tensor, fault.clone());
        }
    }

    /// Hands results over whose buffers nothing reads any more.
    pub(super) fn finish(&mut self) -> usize {
        let before = self.finishing.len();
        let mut at = 0;
        while let Some((tensor, step, nonfinite)) = self.finishing.get(at).copied() {
            let bucket = self.session.plan().tensor(tensor).bucket;
            if self.memory.buckets[bucket.index()].writes_in_flight > 0 || self.memory.old_writes_in_flight > 0 {
                at += 1;
                continue;
            }
            self.finishing.swap_remove(at);
            let contributors = self.session.members().len() as u32;
            let epoch = self.session.config().epoch;
            let outcome = Outcome { found_nonfinite: nonfinite, contributors, step, epoch };
            let retains = self.retains(tensor);
            let slot = &mut self.slots[tensor.index()];
            let mut input = slot.input.take();
            if retains {
                slot.retained = input.take();
            }
            if let Some(output) = slot.output.take() {
                self.ended += 1;
                if std::mem::take(&mut slot.replaces) {
                    self.epochs.replaced.push((tensor, output, outcome));
                    continue;
                }
                let completed: OpResult = Ok(Completed { input, output, outcome });
                slot.shared.complete(completed);
            }
        }
        let after = self.finishing.len();
        self.end_commit();
        before - after
    }
}
