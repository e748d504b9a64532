//! Invariants 1 and 2 in the federated mode: every contributor has the same result of a round, and it is the sum over
//! exactly the entries of the log, in their order, each once.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_codec::reference;
use gradwire_proto::{DType, WireFormat};

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::federated::contribution;
use crate::plan::Plan;
use crate::report::{Part, ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct Rounds {
    plan: Rc<Plan>,
    closed: BTreeMap<u64, Rc<[Part]>>,
    counted: BTreeSet<(u32, u64)>,
    results: BTreeMap<u64, Vec<u8>>,
}

impl Rounds {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), closed: BTreeMap::new(), counted: BTreeSet::new(), results: BTreeMap::new() }
    }

    fn expect(&self, parts: &[Part]) -> Result<Vec<u8>, String> {
        let tensor = self.plan.tensors[0];
        let (dtype, wire): (DType, WireFormat) = (tensor.dtype.into(), tensor.wire.into());
        let contributions: Vec<Vec<u8>> = parts.iter().map(|part| contribution(&self.plan, part)).collect();
        let contributions: Vec<&[u8]> = contributions.iter().map(Vec::as_slice).collect();
        reference(dtype, wire.wire_dtype(dtype), tensor.reduce.into(), &contributions)
            .map_err(|fault| fault.to_string())
    }
}

impl Checker for Rounds {
    fn invariant(&self) -> &'static str {
        "federated sums"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::RoundClosed { round, parts } => {
                if let Some(known) = self.closed.get(round) {
                    return match known == parts {
                        true => Ok(()),
                        false => Err(format!("p{} has other entries in round {round} than others", process.0)),
                    };
                }
                for part in parts.iter() {
                    if !self.counted.insert((part.contributor, part.origin)) {
                        return Err(format!("contributor {} of round {} counts twice", part.contributor, part.origin));
                    }
                }
                self.closed.insert(*round, parts.clone());
            }
            Report::RoundCompleted { round, bytes } => {
                let Some(parts) = self.closed.get(round) else {
                    return Err(format!("p{} has a result of round {round}, which is open", process.0));
                };
                if !self.results.contains_key(round) {
                    let expected = self.expect(parts)?;
                    self.results.insert(*round, expected);
                }
                if self.results[round][..] != bytes[..] {
                    return Err(format!("p{} has a wrong result of round {round}", process.0));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
