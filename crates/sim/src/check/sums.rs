//! Invariant 2: a result is the sum, in rank order, over exactly the recorded contributors, each once, divided by their
//! number; and all of them had handed it over.

use std::collections::BTreeMap;
use std::rc::Rc;

use gradwire_codec::{crc32, has_nonfinite, reference};
use gradwire_proto::{DType, Epoch, ReduceOp, Step, WireFormat};

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::{Operation, Plan, Tensor};
use crate::report::{Final, ProcessId, Report, Version};
use crate::workload::Contribution;
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct ExactSums {
    plan: Rc<Plan>,
    /// By step, tensor and process: in which epochs it handed over which contribution. Each counts until the next.
    posted: BTreeMap<(Step, usize, ProcessId), Vec<(Epoch, u64)>>,
    expected: BTreeMap<(Version, usize), Vec<u8>>,
}

impl ExactSums {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), posted: BTreeMap::new(), expected: BTreeMap::new() }
    }

    /// The whole result.
    fn expect(&self, version: Version, index: usize, contributors: &[ProcessId]) -> Result<Vec<u8>, String> {
        let tensor = self.plan.tensors[index];
        let (dtype, wire): (DType, WireFormat) = (tensor.dtype.into(), tensor.wire.into());
        let wire = wire.wire_dtype(dtype);
        let values = |process: ProcessId| self.values(version, index, process);
        // Of nothing it does not matter whose it is.
        if tensor.elements == 0 {
            return Ok(Vec::new());
        }
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
        let (seed, step) = (self.plan.seed, version.step.0);
        let attempt = self.attempt(version, index, process).unwrap_or_default();
        let dtype: DType = tensor.dtype.into();
        let mut values = vec![0; tensor.elements as usize * dtype.size()];
        Contribution { seed, process: process.0, attempt, step, tensor: index }.fill(&tensor, &mut values);
        values
    }

    /// Which contribution of a process counts in a version.
    fn attempt(&self, version: Version, index: usize, process: ProcessId) -> Option<u64> {
        let posted = self.posted.get(&(version.step, index, process))?;
        posted.iter().rev().find(|(epoch, _)| *epoch <= version.epoch).map(|(_, attempt)| *attempt)
    }

    /// The result that a process has to have: all of it, or its block.
    fn part(&mut self, version: Version, index: usize, contributors: &[ProcessId], rank: u32) -> Result<&[u8], String> {
        if !self.expected.contains_key(&(version, index)) {
            self.check_contributors(version, index, contributors)?;
            let expected = self.expect(version, index, contributors)?;
            self.expected.insert((version, index), expected);
        }
        let whole = &self.expected[&(version, index)];
        let plan = self.plan.tensors[index];
        Ok(match plan.collective {
            Operation::ReduceScatter => block(whole, &plan, contributors.len(), rank as usize),
            _ => whole,
        })
    }

    /// Each contributor has to be there once, and to have handed something over. That all ranks say the same of them another
    /// checker looks at.
    fn check_contributors(&self, version: Version, index: usize, contributors: &[ProcessId]) -> Verdict {
        if !contributors.windows(2).all(|pair| pair[0] != pair[1]) || contributors.is_empty() {
            return Err(format!("{} has a contributor twice, or none", version.step));
        }
        let plan = self.plan.tensors[index];
        // In the others a rank without a block of its own gives nothing, and of nothing nobody has to give anything.
        let adds = matches!(plan.collective, Operation::AllReduce | Operation::ReduceScatter) && plan.elements > 0;
        let absent = contributors.iter().find(|other| self.attempt(version, index, **other).is_none());
        match absent.filter(|_| adds) {
            Some(absent) => Err(format!("p{} is said to be in t{index} of {}, and never was", absent.0, version.step)),
            None => Ok(()),
        }
    }

    /// What is final has to be what it should be, too: it may be another result than the first that was handed out.
    fn observe_done(
        &mut self,
        process: ProcessId,
        version: Version,
        contributors: &[ProcessId],
        rank: u32,
        results: &[Final],
    ) -> Verdict {
        for (index, result) in results.iter().enumerate() {
            if self.plan.tensors[index].elements == 0 {
                continue;
            }
            let expected = crc32(self.part(version, index, contributors, rank)?);
            if expected != result.crc {
                return Err(format!(
                    "p{} has a wrong result for t{index} in {}, which is final, of {} contributors of {}",
                    process.0,
                    version.step,
                    contributors.len(),
                    version.epoch
                ));
            }
        }
        Ok(())
    }
}

impl Checker for ExactSums {
    fn invariant(&self) -> &'static str {
        "2 exactly once"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Posted { epoch, step, tensor, attempt, .. } => {
                self.posted.entry((*step, *tensor, process)).or_default().push((*epoch, *attempt));
            }
            Report::StepDone { version, contributors, rank, results } => {
                return self.observe_done(process, *version, contributors, *rank, results);
            }
            _ => {}
        }
        let Report::Completed { version, tensor, contributors, rank, bytes, nonfinite } = report else { return Ok(()) };
        let plan = self.plan.tensors[*tensor];
        let expected = self.part(*version, *tensor, contributors, *rank)?;
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
