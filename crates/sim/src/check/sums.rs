//! Invariant 2: a result is the sum, in rank order, over exactly the recorded contributors, each once, divided by their
//! number; and all of them had handed it over.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_codec::{has_nonfinite, reference};
use gradwire_proto::{DType, ReduceOp, WireFormat};

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::{Operation, Plan, Tensor};
use crate::report::{ProcessId, Report, Version};
use crate::workload::Contribution;
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct ExactSums {
    plan: Rc<Plan>,
    posted: BTreeSet<(Version, usize, ProcessId)>,
    expected: BTreeMap<(Version, usize), Vec<u8>>,
}

impl ExactSums {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), posted: BTreeSet::new(), expected: BTreeMap::new() }
    }

    /// The whole result.
    fn expect(&self, version: Version, index: usize, contributors: &[ProcessId]) -> Result<Vec<u8>, String> {
        let tensor = self.plan.tensors[index];
        let (dtype, wire): (DType, WireFormat) = (tensor.dtype.into(), tensor.wire.into());
        let wire = wire.wire_dtype(dtype);
        let values = |process: ProcessId| self.values(version, index, process);
        let result = match tensor.collective {
            Operation::AllReduce | Operation::ReduceScatter => {
                let contributions: Vec<Vec<u8>> = contributors.iter().copied().map(values).collect();
                let contributions: Vec<&[u8]> = contributions.iter().map(Vec::as_slice).collect();
                reference(dtype, wire, tensor.reduce.into(), &contributions)
            }
            Operation::Broadcast => reference(dtype, wire, ReduceOp::Sum, &[&values(contributors[0])]),
            Operation::AllGather => {
                let mut all = Vec::new();
                for (rank, process) in contributors.iter().enumerate() {
                    all.extend_from_slice(block(&values(*process), &tensor, contributors.len(), rank));
                }
                reference(dtype, wire, ReduceOp::Sum, &[&all])
            }
        };
        result.map_err(|fault| fault.to_string())
    }

    fn values(&self, version: Version, index: usize, process: ProcessId) -> Vec<u8> {
        let tensor = self.plan.tensors[index];
        let (seed, epoch, step) = (self.plan.seed, version.epoch.0, version.step.0);
        let dtype: DType = tensor.dtype.into();
        let mut values = vec![0; tensor.elements as usize * dtype.size()];
        Contribution { seed, process: process.0, epoch, step, tensor: index }.fill(&tensor, &mut values);
        values
    }
}

impl Checker for ExactSums {
    fn invariant(&self) -> &'static str {
        "2 exactly once"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        if let Report::Posted { version, tensor, .. } = report {
            self.posted.insert((*version, *tensor, process));
        }
        let Report::Completed { version, tensor, contributors, rank, bytes, nonfinite } = report else { return Ok(()) };
        if !contributors.windows(2).all(|pair| pair[0] != pair[1]) || contributors.is_empty() {
            return Err(format!("{} has a contributor twice, or none", version.step));
        }
        let plan = self.plan.tensors[*tensor];
        // In the others a rank without a block of its own gives nothing.
        let adds = matches!(plan.collective, Operation::AllReduce | Operation::ReduceScatter);
        let absent = contributors.iter().find(|other| !self.posted.contains(&(*version, *tensor, **other)));
        if let Some(absent) = absent.filter(|_| adds) {
            return Err(format!("p{} is said to be in t{tensor} of {}, and never was", absent.0, version.step));
        }
        if !self.expected.contains_key(&(*version, *tensor)) {
            let expected = self.expect(*version, *tensor, contributors)?;
            self.expected.insert((*version, *tensor), expected);
        }
        let whole = &self.expected[&(*version, *tensor)];
        let expected = match plan.collective {
            Operation::ReduceScatter => block(whole, &plan, contributors.len(), *rank as usize),
            _ => whole,
        };
        let at = expected.iter().zip(bytes.iter()).position(|(expected, found)| expected != found);
        if at.is_some() || expected.len() != bytes.len() {
            return Err(format!(
                "p{} has a wrong result for t{tensor} in {} {}, of {} contributors: byte {at:?} of {}",
                process.0,
                version.epoch,
                version.step,
                contributors.len(),
                expected.len()
            ));
        }
        let odd = has_nonfinite(plan.dtype.into(), bytes).map_err(|fault| fault.to_string())?;
        if odd != *nonfinite {
            return Err(format!("p{} says {nonfinite} of infinities in t{tensor} of {}", process.0, version.step));
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}

/// A rank's block of a tensor: all have the same number of elements, but the last.
fn block<'a>(bytes: &'a [u8], tensor: &Tensor, world: usize, rank: usize) -> &'a [u8] {
    let dtype: DType = tensor.dtype.into();
    let size = (tensor.elements as usize).div_ceil(world) * dtype.size();
    let start = (size * rank).min(bytes.len());
    &bytes[start..(start + size).min(bytes.len())]
}
