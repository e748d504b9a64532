//! A trainer's state: what the results of all steps have made of it, the same on every rank.

use gradwire_codec::crc32;
use gradwire_proto::Rank;
use gradwire_proto::saved::SavedPart;

use crate::random::mix;
use crate::report::Final;

/// Bytes of each part; one of them has none.
const PARTS: [usize; 6] = [8, 24, 0, 1, 64, 8];

/// The state, and after how many steps it is that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TrainerState {
    pub(super) parts: Vec<Vec<u8>>,
}

impl TrainerState {
    /// What a job begins with.
    pub(super) fn new(seed: u64) -> Self {
        let filled =
            |(part, length): (u64, usize)| (0..length).map(|at| mix(seed, &[part, at as u64, 29]) as u8).collect();
        Self { parts: (0..).zip(PARTS).map(filled).collect() }
    }

    /// What a process has that does not know the state yet.
    pub(super) fn unknown() -> Self {
        Self { parts: PARTS.iter().map(|length| vec![0; *length]).collect() }
    }

    pub(super) fn described(&self) -> Vec<SavedPart> {
        let part = |(index, part): (usize, &Vec<u8>)| SavedPart { name: format!("s{index}"), bytes: part.len() as u64 };
        self.parts.iter().enumerate().map(part).collect()
    }

    /// Applies a step: of each tensor that was reduced for all, the result.
    pub(super) fn apply(&mut self, step: u64, contributors: &[Rank], results: &[Option<Final>]) {
        let who = contributors.iter().fold(step, |hash, rank| mix(hash, &[u64::from(rank.0)]));
        let what = results.iter().fold(who, |hash, result| {
            let of = result.map_or([0; 3], |result| [1, u64::from(result.crc), u64::from(result.nonfinite)]);
            mix(hash, &of)
        });
        for (index, part) in (0u64..).zip(&mut self.parts) {
            for (at, byte) in (0u64..).zip(part) {
                *byte = mix(what, &[index, at, u64::from(*byte)]) as u8;
            }
        }
    }

    pub(super) fn digest(&self) -> u64 {
        let sums = self.parts.iter().map(|part| u64::from(crc32(part)));
        sums.fold(0, |hash, sum| mix(hash, &[sum]))
    }
}
