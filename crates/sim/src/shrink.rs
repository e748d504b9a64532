//! Makes a failing plan small: fewer faults, ranks, tensors and steps that still break the same invariant.

use crate::mutation::Mutation;
use crate::plan::{Fault, LinkFault, Plan};
use crate::{Violation, simulate};

/// The smallest plan that was found within `runs_max` runs, and what it breaks. `plan` has to fail.
#[must_use]
pub fn shrink(plan: &Plan, mutation: Option<Mutation>, runs_max: usize) -> (Plan, Option<Violation>) {
    let first = simulate(plan, mutation, false).violation;
    let mut shrinker = Shrinker { best: plan.clone(), violation: first, mutation, runs_left: runs_max };
    loop {
        let before = shrinker.best.clone();
        shrinker.drop_faults();
        shrinker.make_sure();
        shrinker.simplify();
        if shrinker.best == before || shrinker.runs_left == 0 {
            return (shrinker.best, shrinker.violation);
        }
    }
}

struct Shrinker {
    best: Plan,
    violation: Option<Violation>,
    mutation: Option<Mutation>,
    runs_left: usize,
}

impl Shrinker {
    /// Takes over a plan that still fails as the first did.
    fn attempt(&mut self, plan: Plan) -> bool {
        let Some(violation) = &self.violation else { return false };
        if self.runs_left == 0 || plan == self.best {
            return false;
        }
        self.runs_left -= 1;
        let found = simulate(&plan, self.mutation, false).violation;
        let same = found.as_ref().is_some_and(|found| found.invariant == violation.invariant);
        if same {
            (self.best, self.violation) = (plan, found);
        }
        same
    }

    /// Delta debugging: takes away ever smaller runs of faults.
    fn drop_faults(&mut self) {
        let mut size = self.best.faults.len();
        while size > 0 {
            let mut at = 0;
            while at < self.best.faults.len() {
                let mut plan = self.best.clone();
                plan.faults.drain(at..(at + size).min(plan.faults.len()));
                if !self.attempt(plan) {
                    at += size;
                }
            }
            size /= 2;
        }
    }

    /// What strikes always, and from the start, needs less around it to do so at the right moment.
    fn make_sure(&mut self) {
        for index in 0..self.best.faults.len() {
            let mut plan = self.best.clone();
            let timed = &mut plan.faults[index];
            if let Fault::Link(link) = &mut timed.fault {
                make_sure(link);
                link.for_us += timed.at_us;
                timed.at_us = 0;
                self.attempt(plan);
            }
        }
    }

    fn simplify(&mut self) {
        for index in (0..self.best.tensors.len()).rev() {
            if self.best.tensors.len() > 1 && index < self.best.tensors.len() {
                let mut plan = self.best.clone();
                plan.tensors.remove(index);
                self.attempt(plan);
            }
        }
        self.lower(|plan| &mut plan.rounds, 1);
        self.lower(|plan| &mut plan.steps, 1);
        self.lower(|plan| &mut plan.ranks_min, 1);
        self.lower(|plan| &mut plan.ranks, 1);
        self.lower(|plan| &mut plan.ranks_max, 1);
        for index in 0..self.best.tensors.len() {
            while self.best.tensors[index].elements > 1 {
                let mut plan = self.best.clone();
                plan.tensors[index].elements /= 2;
                if !self.attempt(plan) {
                    break;
                }
            }
        }
        for index in 0..self.best.faults.len() {
            for simpler in simpler(&self.best.faults[index].fault) {
                let mut plan = self.best.clone();
                plan.faults[index].fault = simpler;
                self.attempt(plan);
            }
        }
    }

    /// Lowers a number as far as it goes.
    fn lower(&mut self, of: fn(&mut Plan) -> &mut u32, least: u32) {
        let mut plan = self.best.clone();
        let value = *of(&mut plan);
        for lower in [least, value / 2, value.saturating_sub(1)] {
            let mut plan = self.best.clone();
            if lower < least || *of(&mut plan) <= lower {
                continue;
            }
            *of(&mut plan) = lower;
            if let Some(federated) = &mut plan.federated {
                federated.quorum = federated.quorum.min(plan.ranks);
            }
            plan.ranks_min = plan.ranks_min.min(plan.places());
            if self.attempt(plan) {
                return self.lower(of, least);
            }
        }
    }
}

fn make_sure(link: &mut LinkFault) {
    let odds = [
        &mut link.lose,
        &mut link.repeat,
        &mut link.late,
        &mut link.corrupt,
        &mut link.truncate,
        &mut link.reorder,
        &mut link.repeat_messages,
        &mut link.lose_messages,
        &mut link.corrupt_headers,
    ];
    odds.into_iter().filter(|odds| **odds > 0).for_each(|odds| *odds = 1000);
}

/// Faults that do less than this one.
fn simpler(fault: &Fault) -> Vec<Fault> {
    let Fault::Link(link) = *fault else { return Vec::new() };
    let mut less = Vec::new();
    macro_rules! without {
        ($($field:ident),*) => {
            $(if link.$field != 0 {
                let mut one = link;
                one.$field = 0;
                less.push(Fault::Link(one));
            })*
        };
    }
    without!(lose, repeat, late, corrupt, truncate, reorder, repeat_messages, lose_messages, corrupt_headers, delay_us);
    less
}
