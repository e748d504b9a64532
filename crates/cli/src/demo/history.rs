//! What a rank remembers of its steps, so that they can be done again in one process: whose contributions are in each,
//! and a checksum of what it came to.

use gradwire::Fault;
use serde::{Deserialize, Serialize};

use super::event::Event;
use crate::bench::ranks;

/// Checksums that are sent together: far below the longest line.
const TRAIL_PART: usize = 1000;

/// Who contributed to each step: runs of steps with the same ranks. The set may shrink and grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct History {
    runs: Vec<Run>,
}

/// Steps with the same contributors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Run {
    /// The first of them.
    pub(super) from: u32,
    /// The contributors, ascending.
    pub(super) ranks: Vec<u32>,
}

impl History {
    /// All of `ranks` ranks in every step.
    pub(super) fn constant(ranks: u32) -> Self {
        Self { runs: vec![Run { from: 1, ranks: (0..ranks).collect() }] }
    }

    /// Adds a step, later than those before.
    pub(super) fn push(&mut self, step: u32, contributors: &[u32]) {
        if self.runs.last().is_none_or(|run| run.ranks != contributors) {
            self.runs.push(Run { from: step, ranks: contributors.to_vec() });
        }
    }

    /// The runs, in the order of their steps.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The contributors of a step: none of one before the first.
    pub(super) fn at(&self, step: u32) -> &[u32] {
        self.runs.iter().rev().find(|run| run.from <= step).map_or(&[], |run| &run.ranks)
    }

    /// The first step, 1 unless this is a rank's that joined later.
    pub(super) fn first(&self) -> u32 {
        self.runs.first().map_or(1, |run| run.from)
    }

    /// One more than the highest rank that ever contributed.
    pub(super) fn ranks_end(&self) -> u32 {
        self.runs.iter().flat_map(|run| &run.ranks).max().map_or(0, |rank| rank + 1)
    }

    /// The fewest contributors that a step had.
    pub(super) fn contributors_min(&self) -> usize {
        self.runs.iter().map(|run| run.ranks.len()).min().unwrap_or(0)
    }

    /// The first of the steps that both have in which they differ.
    pub(super) fn difference(&self, other: &Self) -> Option<u32> {
        let begin = self.first().max(other.first());
        let changes = self.runs.iter().chain(&other.runs).map(|run| run.from.max(begin));
        changes.filter(|step| self.at(*step) != other.at(*step)).min()
    }
}

/// What a rank remembers: of the steps that it made, and of those that it applied when it joined.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) history: History,
    /// The first step whose checksum the parent does not have yet.
    unsent_from: u32,
    unsent: Vec<u32>,
}

impl Memory {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        Self { history: History::default(), unsent_from: 1, unsent: Vec::new() }
    }

    /// Adds a step: the one after the last, or any when what came before was not lived through.
    pub(super) fn add(&mut self, step: u32, contributors: &[u32], checksum: u32) {
        if step != self.unsent_from + self.unsent.len() as u32 {
            *self = Self { unsent_from: step, ..Self::new() };
        }
        self.history.push(step, contributors);
        self.unsent.push(checksum);
    }

    /// Sends checksums to the parent where many wait.
    ///
    /// # Errors
    /// As [`ranks::emit`].
    pub(super) fn send_if_many(&mut self) -> Result<(), Fault> {
        if self.unsent.len() >= TRAIL_PART { self.send() } else { Ok(()) }
    }

    /// Sends the parent all checksums that it does not have yet.
    ///
    /// # Errors
    /// As [`ranks::emit`].
    pub(super) fn send(&mut self) -> Result<(), Fault> {
        for checksums in self.unsent.chunks(TRAIL_PART) {
            let first = self.unsent_from;
            self.unsent_from += checksums.len() as u32;
            ranks::emit(&Event::Trail { first, checksums: checksums.to_vec() })?;
        }
        self.unsent.clear();
        Ok(())
    }
}

/// The checksum of what a step came to: over the bytes of all its results, in the order of parameters.
pub(super) fn checksum<'a>(results: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    results
        .into_iter()
        .fold(0, |crc, bytes| gradwire_codec::crc32_combine(crc, gradwire_codec::crc32(bytes), bytes.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(steps: &[(u32, &[u32])]) -> History {
        let mut history = History::default();
        steps.iter().for_each(|(step, ranks)| history.push(*step, ranks));
        history
    }

    #[test]
    fn sets_shrink_and_grow_from_the_step_that_was_said() {
        let history = history(&[(1, &[0, 1, 2]), (2, &[0, 1, 2]), (3, &[0, 2]), (4, &[0, 2]), (5, &[0, 2, 3])]);
        assert_eq!(history.runs.len(), 3);
        let at: Vec<&[u32]> = [0, 1, 2, 3, 4, 5, 99].map(|step| history.at(step)).into();
        assert_eq!(at, [&[][..], &[0, 1, 2], &[0, 1, 2], &[0, 2], &[0, 2], &[0, 2, 3], &[0, 2, 3]]);
        assert_eq!((history.first(), history.ranks_end(), history.contributors_min()), (1, 4, 2));
        assert_eq!(History::constant(3).at(100_000), [0, 1, 2]);
    }

    #[test]
    fn a_difference_is_found_at_its_first_step() {
        let one = history(&[(1, &[0, 1, 2]), (40, &[0, 1]), (60, &[0])]);
        assert_eq!(one.difference(&one.clone()), None);
        assert_eq!(one.difference(&history(&[(1, &[0, 1, 2]), (41, &[0, 1]), (60, &[0])])), Some(40));
        assert_eq!(one.difference(&history(&[(1, &[0, 1, 2]), (40, &[0, 1])])), Some(60));
        // One that joined in step 50 has nothing to say about what was before.
        assert_eq!(one.difference(&history(&[(50, &[0, 1]), (60, &[0])])), None);
        assert_eq!(one.difference(&history(&[(50, &[0, 1, 3]), (60, &[0])])), Some(50));
    }

    #[test]
    fn what_was_lived_through_is_remembered_and_nothing_that_came_before_a_gap() {
        let mut memory = Memory::new();
        memory.add(1, &[0, 1], 7);
        memory.add(2, &[0], 8);
        assert_eq!((memory.history.runs().len(), memory.unsent_from, &memory.unsent[..]), (2, 1, &[7, 8][..]));
        for step in [5, 6] {
            memory.add(step, &[0, 2], step);
        }
        assert_eq!((memory.history.first(), memory.unsent_from, &memory.unsent[..]), (5, 5, &[5, 6][..]));
    }

    #[test]
    fn a_checksum_is_over_all_bytes_in_their_order() {
        assert_eq!(checksum([&b"ab"[..], b"", b"c"]), gradwire_codec::crc32(b"abc"));
        assert_ne!(checksum([&b"ab"[..], b"c"]), checksum([&b"c"[..], b"ab"]));
    }
}
