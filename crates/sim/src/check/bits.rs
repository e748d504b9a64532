//! Invariant 1: ranks that complete a step hold the same bits, over the same contributors.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::{Operation, Plan};
use crate::report::{ProcessId, Report, Version};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct SameBits {
    plan: Rc<Plan>,
    first: BTreeMap<(Version, usize), First>,
    contributors: BTreeMap<Version, (ProcessId, Rc<[ProcessId]>)>,
}

/// What the first rank had: its bytes, and whether they have an infinity.
type First = (ProcessId, Rc<[u8]>, bool);

impl SameBits {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), first: BTreeMap::new(), contributors: BTreeMap::new() }
    }
}

impl Checker for SameBits {
    fn invariant(&self) -> &'static str {
        "1 same bits"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
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
