//! What can be repaired is: where nothing happens that ends a rank or a link, every rank ends well, with all its steps.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::Plan;
use crate::report::{ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct Progress {
    plan: Rc<Plan>,
    repairable: bool,
    done: BTreeMap<ProcessId, u32>,
    ended: BTreeSet<ProcessId>,
}

impl Progress {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), repairable: plan.is_repairable(), done: BTreeMap::new(), ended: BTreeSet::new() }
    }
}

impl Checker for Progress {
    fn invariant(&self) -> &'static str {
        "progress"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        if !self.repairable {
            return Ok(());
        }
        match report {
            Report::Failed { fault, .. } | Report::Ended(Err(fault)) | Report::RoundFailed { fault, .. } => {
                return Err(format!("p{} failed although all that happened could be repaired: {fault}", process.0));
            }
            Report::StepDone { .. } | Report::RoundCompleted { .. } => *self.done.entry(process).or_default() += 1,
            Report::Ended(Ok(())) => _ = self.ended.insert(process),
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        let (ended, places) = (self.ended.len(), self.plan.places() as usize);
        if self.repairable && ended != places {
            return Err(format!("{ended} of {places} processes ended well"));
        }
        // A contributor that comes late begins with the round that is current.
        let all = self.plan.federated.is_none();
        if let Some((process, steps)) = self.done.iter().find(|(_, steps)| all && **steps != self.plan.steps) {
            return Err(format!("p{} did {steps} of {} steps", process.0, self.plan.steps));
        }
        Ok(())
    }
}
