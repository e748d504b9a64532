//! Invariant 1: ranks that complete a step hold the same bits, over the same contributors. What one rank has when a step
//! is final all have that take it for final, in whatever epoch they are by then, and whether others still count on them.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::{Operation, Plan};
use crate::report::{Final, ProcessId, Report, Version};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct SameBits {
    plan: Rc<Plan>,
    first: BTreeMap<(Version, usize), First>,
    contributors: BTreeMap<Version, (ProcessId, Rc<[ProcessId]>)>,
    /// By step, or where the log may be lost by version: members may have gone on differently then.
    done: BTreeMap<(u64, Option<Version>), Done>,
}

/// What the first rank had: its bytes, and whether they have an infinity.
type First = (ProcessId, Rc<[u8]>, bool);
/// Who had it first, in which version, of whom, and what.
type Done = (ProcessId, Version, Rc<[ProcessId]>, Rc<[Final]>);

impl SameBits {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        let (first, contributors, done) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { plan: plan.clone(), first, contributors, done }
    }

    fn observe_done(&mut self, process: ProcessId, found: &Done) -> Verdict {
        let (_, version, contributors, results) = found;
        let name = (version.step.0, self.plan.loses_log().then_some(*version));
        let (other, in_version, of, what) = self.done.entry(name).or_insert_with(|| found.clone());
        if (&*of, *in_version) != (contributors, *version) {
            return Err(format!(
                "{} was made in {} of {} contributors for p{}, and in {} of {} for p{}",
                version.step,
                in_version.epoch,
                of.len(),
                other.0,
                version.epoch,
                contributors.len(),
                process.0
            ));
        }
        let each = what.iter().zip(results.iter()).zip(&self.plan.tensors);
        // Of a reduce-scatter every rank has another part.
        let differs = |((a, b), tensor): ((&Final, &Final), &crate::plan::Tensor)| {
            tensor.collective != Operation::ReduceScatter && a != b
        };
        match each.into_iter().position(differs) {
            Some(tensor) => {
                Err(format!("p{} and p{} have different bytes of t{tensor} in {}", other.0, process.0, version.step))
            }
            None if what.len() != results.len() => Err(format!("p{} has too few results", process.0)),
            None => Ok(()),
        }
    }
}

impl Checker for SameBits {
    fn invariant(&self) -> &'static str {
        "1 same bits"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        if let Report::StepDone { version, contributors, results, .. } = report {
            return self.observe_done(process, &(process, *version, contributors.clone(), results.clone()));
        }
        let Report::Completed { version, tensor, contributors, bytes, nonfinite, .. } = report else { return Ok(()) };
        let (other, known) = self.contributors.entry(*version).or_insert_with(|| (process, contributors.clone()));
        if known != contributors {
            return Err(format!(
                "p{} and p{} completed {} over different contributors",
                other.0, process.0, version.step
            ));
        }
        // Here every rank has another part.
        if self.plan.tensors[*tensor].collective == Operation::ReduceScatter {
            return Ok(());
        }
        let first = self.first.entry((*version, *tensor)).or_insert_with(|| (process, bytes.clone(), *nonfinite));
        if first.1 != *bytes {
            let at = first.1.iter().zip(bytes.iter()).position(|(a, b)| a != b);
            return Err(format!(
                "p{} and p{} have different bytes of t{tensor} in {} {}, first at {at:?}",
                first.0.0, process.0, version.epoch, version.step
            ));
        }
        if first.2 != *nonfinite {
            return Err(format!(
                "p{} and p{} say different things of infinities in t{tensor}, {}",
                first.0.0, process.0, version.step
            ));
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
