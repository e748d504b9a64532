//! A trainer's state: what a rank needs, beyond the code, to go on from a step as the others do.

use gradwire_proto::{Fault, Rank, Step};
use gradwire_transport::Buffer;

/// A named part of a trainer's state.
#[derive(Clone, Copy, Debug)]
pub struct StateTensor<'a> {
    /// Its name: unique among the parts, and the same on every rank.
    pub name: &'a str,
    /// What it holds. Numbers are little-endian, as they are in memory.
    pub bytes: &'a [u8],
}

/// A named part of a trainer's state, to be written to.
#[derive(Debug)]
pub struct StateTensorMut<'a> {
    /// Its name.
    pub name: &'a str,
    /// What is to be replaced. Its length does not change.
    pub bytes: &'a mut [u8],
}

/// The state of a trainer between two steps: model and optimizer, random generators, whatever the next step needs.
///
/// It is the same bytes on every rank, so that any of them can give it to a newcomer, and all together can save it.
/// The parts are the same ones, in the same order and of the same lengths, on every rank and in every step.
pub trait State {
    /// All parts.
    fn parts(&self) -> Vec<StateTensor<'_>>;

    /// All parts, in the same order, to be written to.
    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>>;
}

/// A trainer that can join a job which runs already.
pub trait Trainer: State {
    /// Applies the results of a step that the other ranks have made meanwhile, as they did: afterwards the state is, bit
    /// for bit, what theirs was after that step.
    ///
    /// # Errors
    /// What the trainer met; joining ends with it.
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault>;
}

/// What a step came to.
#[derive(Debug)]
pub struct StepResults<'a> {
    pub(crate) step: Step,
    pub(crate) contributors: &'a [Rank],
    pub(crate) tensors: &'a [StepTensor],
}

/// One tensor's result in a step.
#[derive(Debug)]
pub(crate) struct StepTensor {
    pub(crate) name: String,
    /// Nothing if it was not used in the step.
    pub(crate) result: Option<Buffer>,
    pub(crate) found_nonfinite: bool,
}

impl StepResults<'_> {
    /// The step, as commits count them.
    #[must_use]
    pub const fn step(&self) -> Step {
        self.step
    }

    /// Whose contributions are in the results, ascending.
    #[must_use]
    pub const fn contributors(&self) -> &[Rank] {
        self.contributors
    }

    /// A tensor's result. Nothing if there was no allreduce on it in this step.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Buffer> {
        self.tensors.iter().find(|tensor| tensor.name == name)?.result.as_ref()
    }

    /// Whether a tensor's result has an infinity or a NaN.
    #[must_use]
    pub fn found_nonfinite(&self, name: &str) -> bool {
        self.tensors.iter().any(|tensor| tensor.name == name && tensor.found_nonfinite)
    }
}
