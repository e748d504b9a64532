//! A trainer's state: what a rank needs, beyond the code, to go on from a step as the others do.

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
