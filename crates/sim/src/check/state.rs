//! What ranks make of the results: after as many steps every trainer has the same state, also one that joined later.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::Plan;
use crate::report::{ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct SameState {
    /// Where the log may be lost, members may have gone on differently.
    loses_log: bool,
    first: BTreeMap<u64, (ProcessId, u64)>,
}

impl SameState {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { loses_log: plan.loses_log(), first: BTreeMap::new() }
    }
}

impl Checker for SameState {
    fn invariant(&self) -> &'static str {
        "same state"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        let Report::State { commits, digest } = report else { return Ok(()) };
        let (first, known) = self.first.entry(*commits).or_insert((process, *digest));
        if known != digest && !self.loses_log {
            return Err(format!("p{} and p{} have different states after {commits} steps", first.0, process.0));
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
