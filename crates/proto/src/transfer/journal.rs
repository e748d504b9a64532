//! Results of the latest steps, kept for newcomers that follow.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Given, Results, home};
use crate::dtype::{Collective, DType};
use crate::frame::{FrameHeader, FrameKind, Location};
use crate::ids::{BucketId, Epoch, Rank, RegionKey, TensorId, UnitIndex};
use crate::plan::Plan;

/// Most bytes of results that are kept: a newcomer that falls further behind begins anew.
const BYTES_MAX: usize = 4 << 30;

/// What a member keeps of each step, ascending.
#[derive(Debug, Default)]
pub struct Journal {
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
    units: BTreeMap<UnitIndex, UnitResult>,
}

/// One unit of results, as it travels.
#[derive(Clone, Debug)]
pub struct UnitResult {
    /// Whose it is.
    pub tensor: TensorId,
    /// Its first element's place in the tensor.
    pub at: u64,
    /// How many elements it has.
    pub elements: u32,
    /// Their type.
    pub wire: DType,
    /// They.
    pub bytes: Arc<[u8]>,
}

impl UnitResult {
    /// A unit's result as it travelled, if it is one that newcomers get: of an allreduce, and not empty.
    #[must_use]
    pub fn of(plan: &Plan, unit: UnitIndex, bytes: &[u8]) -> Option<Self> {
        let planned = plan.unit(unit);
        let bucket = plan.bucket(planned.bucket);
        (bucket.collective == Collective::AllReduce && !bytes.is_empty()).then(|| Self {
            tensor: planned.tensor,
            at: planned.in_tensor,
            elements: planned.elements,
            wire: bucket.wire,
            bytes: bytes.into(),
        })
    }

    /// The header of the frame that gives it; length and checksum are not set.
    #[must_use]
    pub fn header(&self, epoch: Epoch) -> FrameHeader {
        let mut header = FrameHeader::new(FrameKind::Give, epoch);
        header.bucket = BucketId(Given::Update as u32);
        (header.unit_first, header.unit_count) = (UnitIndex(self.tensor.0), self.elements);
        header.dtype = Some(self.wire);
        header.location = Location { region: RegionKey(0), offset: self.at };
        header
    }
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
    pub fn keep(&mut self, commits: u64, epoch: Epoch, unit: UnitIndex, made: UnitResult) {
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
    pub fn commit(&mut self, commits: u64, epoch: Epoch, members: &[Rank]) {
        if let Some(entry) = self.entry(commits, epoch) {
            entry.members = Some(members.to_vec());
        }
    }

    /// The results of the step after `commits` final ones, as far as this seat of `holders` is their home, if that step is
    /// final and kept. `now`: steps that are final.
    #[must_use]
    pub fn results(&self, commits: u64, now: u64, (seat, holders): (u32, u32)) -> Option<(Results, Vec<UnitResult>)> {
        let entry = self.steps.iter().find(|entry| entry.commits == commits)?;
        let wanted = entry.units.iter().filter(|(unit, _)| home(unit.0, holders) == seat);
        let units: Vec<UnitResult> = wanted.map(|(_, result)| result.clone()).collect();
        let members = entry.members.clone()?;
        Some((Results { epoch: entry.epoch, members, commits: now, updates: units.len() as u32 }, units))
    }

    /// Earlier steps are kept no longer.
    pub fn forget_before(&mut self, commits: u64) {
        while self.steps.front().is_some_and(|entry| entry.commits < commits) {
            if let Some(entry) = self.steps.pop_front() {
                self.bytes -= entry.bytes();
            }
        }
    }

    /// How many steps are kept.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.steps.len()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn made(at: u64, byte: u8) -> UnitResult {
        UnitResult { tensor: TensorId(0), at, elements: 1, wire: DType::F32, bytes: Arc::from([byte; 4]) }
    }

    fn bytes(journal: &Journal, commits: u64) -> Option<(u64, Vec<u8>)> {
        let (results, units) = journal.results(commits, 9, (0, 1))?;
        assert_eq!((results.commits, results.updates as usize), (9, units.len()));
        Some((results.epoch.0, units.iter().map(|unit| unit.bytes[0]).collect()))
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
        assert_eq!(journal.results(7, 9, (1, 2)).expect("it is kept").1.len(), 1);
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
