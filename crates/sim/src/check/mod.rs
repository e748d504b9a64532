//! The invariants, as checkers of what processes report. None shares code with what it checks, but for
//! `gradwire_codec::reference()`, which is the arithmetic written down once more for this purpose.
//!
//! A checker is one file with one type that implements [`Checker`]; [`Judge::new`] has the list.

mod bits;
mod bounded;
mod durable;
mod integrity;
mod memory;
mod progress;
mod rounds;
mod stale;
mod state;
mod sums;

use std::rc::Rc;

use gradwire_proto::FaultKind;

use crate::event::Nanos;
use crate::plan::Plan;
use crate::report::{ProcessId, Report};
use crate::world::{Ending, Observer};

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub invariant: &'static str,
    /// When it was noticed, in microseconds of virtual time.
    pub at_us: u64,
    /// What was seen.
    pub detail: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "invariant '{}' broken at {} us: {}", self.invariant, self.at_us, self.detail)
    }
}

/// Why an invariant does not hold.
type Verdict = Result<(), String>;

/// Watches over one invariant.
trait Checker {
    /// Its name, for people and for the shrinker: a smaller plan has to break the same.
    fn invariant(&self) -> &'static str;

    /// Takes note of a report.
    fn observe(&mut self, now: Nanos, process: ProcessId, report: &Report) -> Verdict;

    /// The run is over.
    fn finish(&mut self, ending: &Ending) -> Verdict;
}

/// All checkers. The first violation counts.
pub(crate) struct Judge {
    checkers: Vec<Box<dyn Checker>>,
    violation: Option<Violation>,
    pub(crate) tally: Tally,
}

/// What happened, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Processes that were started.
    pub processes: u64,
    /// Operations, or rounds, that ended well.
    pub completed: u64,
    /// Operations, or rounds, that ended with a fault.
    pub failed: u64,
    /// Steps that ranks were through with.
    pub steps: u64,
    /// Epochs that ranks entered.
    pub views: u64,
    /// Processes that joined a running job.
    pub joined: u64,
    /// Steps that were aborted, by operation and commit.
    pub aborted: u64,
    /// Processes that ended with a fault.
    pub faults: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.completed += other.completed;
        self.failed += other.failed;
        self.steps += other.steps;
        self.views += other.views;
        self.joined += other.joined;
        self.aborted += other.aborted;
        self.faults += other.faults;
    }
}

impl Judge {
    pub(crate) fn new(plan: &Rc<Plan>) -> Self {
        let checkers: Vec<Box<dyn Checker>> = vec![
            Box::new(bits::SameBits::new(plan)),
            Box::new(sums::ExactSums::new(plan)),
            Box::new(stale::NothingStale),
            Box::new(bounded::Bounded::new(plan)),
            Box::new(integrity::Integrity),
            Box::new(durable::Durable::new(plan)),
            Box::new(memory::BoundedMemory::new(plan)),
            Box::new(progress::Progress::new(plan)),
            Box::new(state::SameState::new(plan)),
            Box::new(rounds::Rounds::new(plan)),
        ];
        Self { checkers, violation: None, tally: Tally::default() }
    }

    /// The run is over: whether all held.
    pub(crate) fn finish(mut self, ending: &Ending) -> (Tally, Option<Violation>) {
        for checker in &mut self.checkers {
            if self.violation.is_some() {
                break;
            }
            if let Err(detail) = checker.finish(ending) {
                self.violation = Some(violation(checker.invariant(), ending.now, detail));
            }
        }
        (self.tally, self.violation)
    }
}

impl Observer for Judge {
    fn observe(&mut self, now: Nanos, process: ProcessId, report: &Report) {
        let tally = &mut self.tally;
        match report {
            Report::Started { .. } => tally.processes += 1,
            Report::Completed { .. } | Report::RoundCompleted { .. } => tally.completed += 1,
            Report::Failed { fault, .. } if fault.kind == FaultKind::StepAborted => tally.aborted += 1,
            Report::Failed { .. } | Report::RoundFailed { .. } => tally.failed += 1,
            Report::Joined { .. } => tally.joined += 1,
            Report::StepDone { .. } => tally.steps += 1,
            Report::View { .. } => tally.views += 1,
            Report::Ended(Err(_)) => tally.faults += 1,
            _ => {}
        }
        for checker in &mut self.checkers {
            if self.violation.is_some() {
                return;
            }
            if let Err(detail) = checker.observe(now, process, report) {
                self.violation = Some(violation(checker.invariant(), now, detail));
            }
        }
    }

    fn is_broken(&self) -> bool {
        self.violation.is_some()
    }
}

fn violation(invariant: &'static str, now: Nanos, detail: String) -> Violation {
    Violation { invariant, at_us: now / 1000, detail }
}
