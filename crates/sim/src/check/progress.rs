//! What can be repaired is: where nothing happens that ends a rank or a link, every rank ends well, with all its steps.
//! Where ranks are lost and others go on, all that are not lost do.

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
    /// The places of those that may be lost, while all others have to end well.
    losses: Option<BTreeSet<u32>>,
    place: BTreeMap<ProcessId, u32>,
    linked: usize,
    done: BTreeMap<ProcessId, u32>,
    ended: BTreeSet<ProcessId>,
}

impl Progress {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self {
            plan: plan.clone(),
            repairable: plan.is_repairable(),
            losses: plan.losses(),
            place: BTreeMap::new(),
            linked: 0,
            done: BTreeMap::new(),
            ended: BTreeSet::new(),
        }
    }

    fn is_sure(&self, process: ProcessId) -> bool {
        let place = self.place.get(&process);
        let survives = |losses: &BTreeSet<u32>| place.is_some_and(|place| !losses.contains(place));
        self.repairable || self.losses.as_ref().is_some_and(survives)
    }

    /// Something happens before all have links that the others do not survive: they wait for a lost one until their
    /// deadline.
    fn note_loss(&mut self) {
        if self.linked < self.plan.ranks as usize {
            self.losses = None;
        }
    }
}

impl Checker for Progress {
    fn invariant(&self) -> &'static str {
        "progress"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Started { place } => {
                self.place.insert(process, *place);
                // Two processes in one place before the members are decided end the job.
                if self.place.len() > self.plan.places_at_start() as usize {
                    self.note_loss();
                }
            }
            Report::Linked => self.linked += 1,
            Report::Died | Report::Stopped => self.note_loss(),
            Report::Ended(Err(fault)) if self.repairable || !self.is_sure(process) => {
                self.note_loss();
                if self.repairable {
                    return Err(format!("p{} failed although all that happened could be repaired: {fault}", process.0));
                }
            }
            Report::Failed { fault, .. } | Report::RoundFailed { fault, .. } if self.repairable => {
                return Err(format!("p{} failed although all that happened could be repaired: {fault}", process.0));
            }
            Report::Ended(Err(fault)) => {
                return Err(format!(
                    "p{} failed although it was to survive what happened to others: {fault}",
                    process.0
                ));
            }
            Report::StepDone { .. } | Report::RoundCompleted { .. } => *self.done.entry(process).or_default() += 1,
            Report::Ended(Ok(())) => _ = self.ended.insert(process),
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        let (ended, places) = (self.ended.len(), self.plan.places_at_start() as usize);
        if self.repairable && ended != places {
            return Err(format!("{ended} of {places} processes ended well"));
        }
        // A contributor that comes late begins with the round that is current.
        if self.plan.federated.is_some() {
            return Ok(());
        }
        for process in self.place.keys().filter(|process| self.is_sure(**process)) {
            let done = self.done.get(process).copied().unwrap_or_default();
            if done != self.plan.steps || !self.ended.contains(process) {
                return Err(format!("p{} did {done} of {} steps", process.0, self.plan.steps));
            }
        }
        Ok(())
    }
}
