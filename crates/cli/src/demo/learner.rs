//! What a rank of the demo learns: the network, its optimizer and how far it is, and what it remembers of its steps.
//!
//! It is a state as gradwire wants one, so that a process that joins a running demo can be given it, and can apply the
//! steps that the others make meanwhile.

use gradwire::{Buffer, Fault, FaultKind, Rank, State, StateTensor, StateTensorMut, StepResults, Trainer};

use super::history::{self, Memory};
use super::model::{Model, Momentum, PARAMETERS};

/// The network in training.
#[derive(Debug)]
pub(super) struct Learner {
    pub(super) model: Model,
    optimizer: Momentum,
    /// A part of the state, so that whoever is given it knows how far it is.
    next_step: [u32; 1],
    pub(super) memory: Memory,
}

impl Learner {
    /// One that is to be given its weights.
    pub(super) fn new() -> Self {
        Self { model: Model::zeroed(), optimizer: Momentum::new(), next_step: [1], memory: Memory::new() }
    }

    /// The step that it has not made yet.
    pub(super) const fn next_step(&self) -> u32 {
        self.next_step[0]
    }

    /// Updates the weights with a step's means, by parameter, and remembers them.
    pub(super) fn update(&mut self, means: [&Buffer; PARAMETERS.len()], contributors: &[Rank]) {
        for (index, mean) in means.iter().enumerate() {
            self.optimizer.update(&mut self.model, index, mean.as_slice::<f32>().iter().copied());
        }
        let step = self.next_step();
        self.memory.add(step, &numbers(contributors), history::checksum(means.map(Buffer::bytes)));
        self.next_step = [step + 1];
    }
}

impl State for Learner {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        let Self { model, optimizer, next_step, .. } = self;
        let weights = PARAMETERS.iter().zip(model.values()).map(|(parameter, values)| (parameter.name, values));
        let velocities =
            PARAMETERS.iter().zip(optimizer.values()).map(|(parameter, values)| (parameter.momentum, values));
        let floats = weights.chain(velocities).map(|(name, values)| (name, bytemuck::cast_slice(values)));
        let all = floats.chain([("step", bytemuck::cast_slice(next_step))]);
        all.map(|(name, bytes)| StateTensor { name, bytes }).collect()
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        let Self { model, optimizer, next_step, .. } = self;
        let weights = PARAMETERS.iter().zip(model.values_mut()).map(|(parameter, values)| (parameter.name, values));
        let velocities =
            PARAMETERS.iter().zip(optimizer.values_mut()).map(|(parameter, values)| (parameter.momentum, values));
        let floats = weights.chain(velocities).map(|(name, values)| (name, bytemuck::cast_slice_mut(values)));
        let all = floats.chain([("step", bytemuck::cast_slice_mut(next_step))]);
        all.map(|(name, bytes)| StateTensorMut { name, bytes }).collect()
    }
}

impl Trainer for Learner {
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault> {
        let wrong = |what: String| Fault::new(FaultKind::ProtocolViolation, what);
        let step = self.next_step();
        if results.step().0 != u64::from(step) {
            return Err(wrong(format!(
                "the results of step {} came where those of step {step} were due",
                results.step().0
            )));
        }
        let mut means = Vec::with_capacity(PARAMETERS.len());
        for parameter in &PARAMETERS {
            let mean = results.get(parameter.name);
            means.push(mean.ok_or_else(|| wrong(format!("step {step} has no gradient '{}'", parameter.name)))?);
        }
        self.update(crate::bench::ranks::exactly(means)?, results.contributors());
        Ok(())
    }
}

/// Ranks as the parent hears of them.
pub(super) fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_the_next_step_depends_on_is_part_of_the_state() {
        let mut one = Learner::new();
        one.model = Model::seeded(5);
        let means = PARAMETERS.map(|parameter| {
            let mut mean = Buffer::allocate(parameter.elements() * size_of::<f32>()).expect("memory");
            mean.as_mut_slice::<f32>().fill(0.5);
            mean
        });
        one.update(means.each_ref(), &[Rank(0)]);
        let mut other = Learner::new();
        for (to, from) in other.parts_mut().into_iter().zip(one.parts()) {
            assert_eq!(to.name, from.name);
            to.bytes.copy_from_slice(from.bytes);
        }
        assert_eq!((other.next_step(), other.model.sha256()), (2, one.model.sha256()));
        // The second step shows whether the optimizer came along.
        for learner in [&mut one, &mut other] {
            learner.update(means.each_ref(), &[Rank(0), Rank(2)]);
        }
        assert_eq!(other.model.sha256(), one.model.sha256());
        assert_eq!((one.memory.history.first(), other.memory.history.first()), (1, 2));
    }
}
