//! Deterministic simulation of gradwire under faults.
//!
//! [`simulate`] runs a whole job in virtual time: ranks that drive the real protocol of `gradwire-proto`, links, a broker
//! and disks, with the faults of a [`Plan`]. Nothing in it knows a clock, a thread or a source of randomness, so that a
//! plan gives the same run each time: a seed that fails can be looked at again and made small ([`shrink`]).
//!
//! | module | owns |
//! | --- | --- |
//! | `plan` | what is simulated, from a seed or a file |
//! | `world`, `event`, `network`, `broker`, `memory` | what processes live in, and what goes wrong there |
//! | `rank`, `federated` | the drivers of the protocol: what `crates/runtime` and `crates/control` are in the product |
//! | `check` | the invariants: they see what processes report, and nothing else |
//! | `mutation` | planted bugs that the simulation has to find |
#![forbid(unsafe_code)]

mod broker;
mod check;
mod event;
mod federated;
mod memory;
mod mutation;
mod network;
pub mod plan;
mod process;
mod random;
mod rank;
mod report;
mod shrink;
mod trace;
mod workload;
mod world;

use std::rc::Rc;

use check::Judge;
pub use check::{Tally, Violation};
pub use mutation::Mutation;
pub use network::Traffic;
pub use plan::{Plan, Shape};
pub use shrink::shrink;
use world::World;

/// How a run went.
#[derive(Debug)]
pub struct Outcome {
    /// The first invariant that did not hold.
    pub violation: Option<Violation>,
    /// A number that is the same for the same run.
    pub digest: u64,
    /// How many events there were.
    pub events: u64,
    /// How long it took, in microseconds of virtual time.
    pub virtual_us: u64,
    /// What happened.
    pub tally: Tally,
    /// What links carried.
    pub traffic: Traffic,
    /// Records in the control log.
    pub control_records: u64,
    /// What happened, in words, if that was wanted.
    pub text: Vec<String>,
}

/// Runs a plan. `mutation` plants a bug; `text` keeps what happens in words.
#[must_use]
pub fn simulate(plan: &Plan, mutation: Option<Mutation>, text: bool) -> Outcome {
    let plan = Rc::new(plan.clone());
    let mut judge = Judge::new(&plan);
    let ending = World::new(plan, mutation, text, &mut judge).run();
    let (tally, violation) = judge.finish(&ending);
    Outcome {
        violation,
        digest: ending.trace.digest(),
        events: ending.trace.events(),
        virtual_us: ending.now / 1000,
        tally,
        traffic: ending.traffic,
        control_records: ending.broker.len(broker::Topic::Control) as u64,
        text: ending.trace.into_text(),
    }
}

/// Runs a plan twice. A second run that differs is a violation of its own: then something else than the plan decides.
#[must_use]
pub fn simulate_twice(plan: &Plan, mutation: Option<Mutation>) -> Outcome {
    let mut outcome = simulate(plan, mutation, false);
    let again = simulate(plan, mutation, false);
    if (outcome.digest, outcome.events) != (again.digest, again.events) && outcome.violation.is_none() {
        outcome.violation = Some(Violation {
            invariant: "replay",
            at_us: outcome.virtual_us,
            detail: format!("two runs of one plan differ: {:016x} and {:016x}", outcome.digest, again.digest),
        });
    }
    outcome
}
