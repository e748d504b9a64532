//! Invariant 4: every operation ends by its deadline with a result or a typed error, and every process ends.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_proto::{Fault, FaultKind};

use super::{Checker, Verdict};
use crate::event::{MS, Nanos, US};
use crate::plan::{self, Plan};
use crate::report::{COMMIT, ProcessId, Report};
use crate::world::Ending;

/// What an operation may be late: a process has to get a turn.
const SLACK: Nanos = 100 * MS;

#[derive(Debug)]
pub(super) struct Bounded {
    plan: Rc<Plan>,
    slack: Nanos,
    /// By process: by when each tensor's operation, or the round, has to end.
    open: BTreeMap<ProcessId, BTreeMap<u64, Nanos>>,
    stopped: BTreeMap<ProcessId, ()>,
    /// Processes that take part in a running job, or did from its start.
    take_part: BTreeSet<ProcessId>,
    /// No deadline passes before.
    next: Nanos,
}

impl Bounded {
    pub(super) fn new(plan: &Rc<Plan>) -> Self {
        let slow = plan.faults.iter().map(|timed| match timed.fault {
            plan::Fault::Slow { by_us, .. } => by_us * US,
            _ => 0,
        });
        let slack = SLACK + 100 * slow.sum::<Nanos>();
        let (open, stopped, take_part) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { plan: plan.clone(), slack, open, stopped, take_part, next: Nanos::MAX }
    }

    fn overdue(&mut self, now: Nanos) -> Verdict {
        if now < self.next {
            return Ok(());
        }
        self.next = Nanos::MAX;
        for (process, open) in self.open.iter().filter(|(process, _)| !self.stopped.contains_key(process)) {
            for (which, by) in open {
                if now > by + self.slack {
                    return Err(format!(
                        "operation {which} of p{} is open {} us past its deadline",
                        process.0,
                        (now - by) / US
                    ));
                }
                self.next = self.next.min(by + self.slack);
            }
        }
        Ok(())
    }

    fn begin(&mut self, process: ProcessId, which: u64, by: Nanos) {
        self.open.entry(process).or_default().insert(which, by);
        self.next = self.next.min(by + self.slack);
    }

    fn end(&mut self, process: ProcessId, which: u64) {
        if let Some(open) = self.open.get_mut(&process) {
            open.remove(&which);
        }
    }

    /// Whether this is a fault that can be in this job: a trainer that did nothing wrong must not be told that it did.
    fn judge(&self, process: ProcessId, fault: &Fault) -> Verdict {
        let elastic = self.plan.is_elastic();
        let faults = &self.plan.faults;
        let lost_log = faults.iter().any(|timed| matches!(timed.fault, plan::Fault::BrokerDown { restart: true, .. }));
        let started_again = faults.iter().any(|timed| match timed.fault {
            plan::Fault::Crash { .. } | plan::Fault::Replace { .. } => true,
            // Before the job begins it is one too many.
            plan::Fault::Join { rank } => rank < self.plan.ranks,
            _ => false,
        });
        let spoils = faults.iter().any(|timed| match timed.fault {
            plan::Fault::Link(link) => link.corrupt > 0 || link.truncate > 0 || link.corrupt_headers > 0,
            _ => false,
        });
        let possible = match fault.kind {
            FaultKind::RankDied
            | FaultKind::RankLeft
            | FaultKind::NotOffered
            | FaultKind::DeadlineExceeded
            | FaultKind::Unrecorded => true,
            FaultKind::ProtocolViolation => self.plan.forges(),
            FaultKind::IntegrityExhausted => spoils,
            FaultKind::StepAborted | FaultKind::Removed => elastic,
            // The job has not declared all tensors yet.
            FaultKind::DeclarationMismatch => elastic && !self.take_part.contains(&process),
            FaultKind::WorldMismatch => started_again,
            FaultKind::Diverged => lost_log,
            _ => false,
        };
        let names = fault.rank.is_some()
            || matches!(fault.kind, FaultKind::StepAborted | FaultKind::Unrecorded | FaultKind::Diverged)
            || !self.take_part.contains(&process);
        let names = names || fault.kind == FaultKind::DeadlineExceeded && fault.tensor.is_none();
        if !possible || !names || fault.detail.is_empty() {
            return Err(format!("p{} is told what cannot be: {fault}", process.0));
        }
        Ok(())
    }
}

impl Checker for Bounded {
    fn invariant(&self) -> &'static str {
        "4 bounded"
    }

    fn observe(&mut self, now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Linked | Report::Joined { .. } => _ = self.take_part.insert(process),
            Report::Posted { tensor, by, .. } => self.begin(process, *tensor as u64, *by),
            Report::CommitBegun { by } => self.begin(process, COMMIT as u64, *by),
            Report::StepDone { .. } => self.end(process, COMMIT as u64),
            Report::Completed { tensor, .. } => self.end(process, *tensor as u64),
            Report::Failed { tensor, fault } => {
                self.end(process, *tensor as u64);
                self.judge(process, fault)?;
            }
            Report::RoundPosted { round, by } => self.begin(process, *round, *by),
            Report::RoundCompleted { round, .. } => self.end(process, *round),
            Report::RoundFailed { round, fault } => {
                self.end(process, *round);
                self.judge(process, fault)?;
            }
            Report::Died => _ = self.open.remove(&process),
            Report::Ended(result) => {
                if let Some(open) = self.open.remove(&process).filter(|open| !open.is_empty()) {
                    return Err(format!("p{} ended with {} operations that never did", process.0, open.len()));
                }
                if let Err(fault) = result {
                    self.judge(process, fault)?;
                }
            }
            Report::Stopped => _ = self.stopped.insert(process, ()),
            Report::Resumed => {
                self.stopped.remove(&process);
                for by in self.open.entry(process).or_default().values_mut() {
                    *by = (*by).max(now);
                }
            }
            _ => {}
        }
        self.overdue(now)
    }

    fn finish(&mut self, ending: &Ending) -> Verdict {
        self.overdue(ending.now)?;
        let left: Vec<u32> =
            self.open.iter().filter(|(_, open)| !open.is_empty()).map(|(process, _)| process.0).collect();
        if !left.is_empty() {
            return Err(format!("nothing happens any more, and operations of processes {left:?} are open"));
        }
        if !ending.over {
            return Err(format!("the job did not end within {} ms", ending.now / MS));
        }
        Ok(())
    }
}
