//! Results of the latest steps, kept for newcomers that follow.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use gradwire_proto::{DType, Epoch, Rank, TensorId, UnitIndex};

/// Most bytes of results that are kept: a newcomer that falls further behind begins anew.
const BYTES_MAX: usize = 4 << 30;

/// By step, ascending.
#[derive(Debug, Default)]
pub(super) struct Journal {
    steps: VecDeque<Entry>,
    bytes: usize,
}

/// The results of a step, as far as they are kept here.
#[derive(Debug)]
struct Entry {
    /// Steps that were final before it.
    commits: u64,
    epoch: Epoch,
    /// Whose contributions are in it, once it is final.
    members: Option<Vec<Rank>>,
    units: BTreeMap<UnitIndex, Made>,
}

/// One unit of results, as it travels.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) tensor: TensorId,
    /// Its first element's place in the tensor.
    pub(crate) at: u64,
    pub(crate) elements: u32,
    pub(crate) wire: DType,
    pub(crate) bytes: Arc<[u8]>,
}

impl Entry {
    const fn new(commits: u64, epoch: Epoch) -> Self {
        Self { commits, epoch, members: None, units: BTreeMap::new() }
    }

    fn bytes(&self) -> usize {
        self.units.values().map(|made| made.bytes.len()).sum()
    }
}

impl Journal {
    /// The step after `commits` final ones, which is made in this epoch. Where it was begun in an earlier one it is done
    /// again, and its units are others.
    fn entry(&mut self, commits: u64, epoch: Epoch) -> Option<&mut Entry> {
        let Self { steps, bytes } = self;
        if steps.back().is_none_or(|last| last.commits != commits) {
            steps.push_back(Entry::new(commits, epoch));
        }
        let last = steps.back_mut()?;
        if last.epoch != epoch {
            *bytes -= last.bytes();
            (last.epoch, last.units) = (epoch, BTreeMap::new());
        }
        Some(last)
    }

    /// Keeps a unit of the step after `commits` final ones, which is being made in this epoch.
    pub(super) fn keep(&mut self, commits: u64, epoch: Epoch, unit: UnitIndex, made: Made) {
        let added = made.bytes.len();
        let Some(entry) = self.entry(commits, epoch) else { return };
        // An operation that was given up, or came twice, counts as it came last.
        let earlier = entry.units.insert(unit, made).map_or(0, |earlier| earlier.bytes.len());
        self.bytes = self.bytes + added - earlier;
        while self.bytes > BYTES_MAX
            && let Some(first) = self.steps.pop_front()
        {
            self.bytes -= first.bytes();
        }
    }

    /// The step after `commits` final ones is final too: made in this epoch, of what these members contributed.
    pub(super) fn commit(&mut self, commits: u64, epoch: Epoch, members: &[Rank]) {
        if let Some(entry) = self.entry(commits, epoch) {
            entry.members = Some(members.to_vec());
        }
    }

    /// The step after `commits` final ones, if it is final and kept: its epoch, its contributors, and those of its units
    /// that are wanted.
    pub(super) fn step(
        &self,
        commits: u64,
        wanted: impl Fn(UnitIndex) -> bool,
    ) -> Option<(Epoch, Vec<Rank>, Vec<Made>)> {
        let entry = self.steps.iter().find(|entry| entry.commits == commits)?;
        let units = entry.units.iter().filter(|(unit, _)| wanted(**unit)).map(|(_, made)| made.clone());
        Some((entry.epoch, entry.members.clone()?, units.collect()))
    }

    /// Earlier steps are kept no longer.
    pub(super) fn forget_before(&mut self, commits: u64) {
        while self.steps.front().is_some_and(|entry| entry.commits < commits) {
            if let Some(entry) = self.steps.pop_front() {
                self.bytes -= entry.bytes();
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(at: u64, byte: u8) -> Made {
        Made { tensor: TensorId(0), at, elements: 1, wire: DType::F32, bytes: Arc::from([byte; 4]) }
    }

    fn bytes(journal: &Journal, commits: u64) -> Option<(u64, Vec<u8>)> {
        let (epoch, _, made) = journal.step(commits, |_| true)?;
        Some((epoch.0, made.iter().map(|made| made.bytes[0]).collect()))
    }

    #[test]
    fn a_step_is_there_once_it_is_final_with_what_came_last() {
        let mut journal = Journal::default();
        for (unit, byte) in [(0, 1), (1, 2), (0, 3)] {
            journal.keep(7, Epoch(1), UnitIndex(unit), made(u64::from(unit), byte));
        }
        assert_eq!(bytes(&journal, 7), None);
        journal.commit(7, Epoch(1), &[Rank(0)]);
        assert_eq!(bytes(&journal, 7), Some((1, vec![3, 2])));
        assert_eq!(journal.step(7, |unit| unit == UnitIndex(1)).expect("it is kept").2.len(), 1);
        // A step in which nothing of what is kept here was made.
        journal.commit(8, Epoch(1), &[Rank(0)]);
        assert_eq!(bytes(&journal, 8), Some((1, vec![])));
        assert_eq!(journal.bytes, 8);
        journal.forget_before(8);
        assert_eq!((bytes(&journal, 7), journal.bytes), (None, 0));
    }

    #[test]
    fn what_is_done_again_replaces_all_that_was_made_before() {
        let mut journal = Journal::default();
        journal.keep(0, Epoch(1), UnitIndex(0), made(0, 1));
        journal.keep(0, Epoch(1), UnitIndex(5), made(5, 1));
        journal.keep(0, Epoch(2), UnitIndex(1), made(0, 2));
        journal.commit(0, Epoch(2), &[Rank(0)]);
        assert_eq!((bytes(&journal, 0), journal.bytes), (Some((2, vec![2])), 4));
        // Of what was done again nothing has its home here.
        journal.keep(1, Epoch(2), UnitIndex(1), made(0, 3));
        journal.commit(1, Epoch(3), &[Rank(0)]);
        assert_eq!((bytes(&journal, 1), journal.bytes), (Some((3, vec![])), 4));
    }
}
