//! Invariant 7: memory is in proportion to what is in flight, and never grows with time.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::plan::Plan;
use crate::report::{ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct BoundedMemory {
    plan: Rc<Plan>,
    /// By process, what it owns and the number of members: what is registered.
    registered: BTreeMap<(ProcessId, usize, usize), usize>,
    started: usize,
}

impl BoundedMemory {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        Self { plan: plan.clone(), registered: BTreeMap::new(), started: 0 }
    }
}

impl Checker for BoundedMemory {
    fn invariant(&self) -> &'static str {
        "7 bounded memory"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        let (owned, members, queued, regions, bytes, remembered) = match report {
            Report::Started { .. } => {
                self.started += 1;
                return Ok(());
            }
            Report::Load { owned, members, queued, regions, bytes, remembered } => {
                (*owned, *members, *queued, *regions, *bytes, *remembered)
            }
            _ => return Ok(()),
        };
        // The same shards among as many members need the same memory, in every epoch and step: or less, where tensors that
        // were declared one round after the other are laid out at once, and share buckets.
        let known = self.registered.entry((process, owned, members)).or_insert(bytes);
        if bytes > *known {
            return Err(format!(
                "p{} has {bytes} bytes registered, and had {known} with as many members and the same shards",
                process.0
            ));
        }
        *known = bytes;
        let tensors = self.plan.tensors.len();
        // Of each tensor input, output, and another output for when it is done again; in each declaration round staging of
        // contributions and results; of each peer where its contributions land, and their copies. After a change of members
        // all tensors are laid out at once.
        let regions_max = 3 * tensors + (self.plan.rounds as usize + 1) * (2 + 2 * (members - 1));
        if regions > regions_max {
            return Err(format!("p{} has {regions} regions, and {regions_max} are enough", process.0));
        }
        let queued_max = 64 + 8 * tensors * members + 8 * members + self.plan.steps as usize;
        if queued > queued_max {
            return Err(format!("{queued} things wait in p{}, and {queued_max} are enough", process.0));
        }
        let remembered_max = 16 + 4 * self.started.max(self.plan.ranks as usize);
        if remembered > remembered_max {
            return Err(format!("p{} remembers {remembered} processes and records", process.0));
        }
        Ok(())
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
