//! Getting pieces of the state from several members at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gradwire_proto::saved::SavedPart;
use gradwire_proto::transfer::{Snapshot, Sums, giver, home, pieces};
use gradwire_proto::{Fault, FaultKind, Rank};

use super::Trouble;
use crate::rank::state::TrainerState;
use crate::report::ProcessId;

/// Pieces that are asked of one member before the first of them is here.
const WINDOW: usize = 4;

#[derive(Debug)]
pub(super) struct Fetch {
    layout: Vec<(u32, std::ops::Range<u64>)>,
    /// The checksums of those that are here.
    sums: BTreeMap<u32, u32>,
    /// Pieces that are neither here nor asked for.
    todo: BTreeSet<u32>,
    /// By seat: which process, and what it was asked for. Nothing once it is lost.
    holders: Vec<(ProcessId, Option<VecDeque<u32>>)>,
}

impl Fetch {
    /// # Errors
    /// When a member's state has other parts.
    pub(super) fn new(
        parts: &[SavedPart],
        ranks: &[Rank],
        processes: Vec<ProcessId>,
        snapshots: &[Snapshot],
    ) -> Result<Self, Trouble> {
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        let layout = pieces(&lengths).unwrap_or_default();
        if let Some((rank, _)) = ranks.iter().zip(snapshots).find(|(_, snapshot)| snapshot.parts != parts) {
            let fault = Fault::new(FaultKind::ShapeMismatch, "its state has other parts").at(*rank);
            return Err(Trouble::Never(fault));
        }
        let todo = (0..layout.len() as u32).collect();
        let holders = processes.into_iter().map(|process| (process, Some(VecDeque::new()))).collect();
        Ok(Self { layout, sums: BTreeMap::new(), todo, holders })
    }

    /// Compares what is here with what a member keeps.
    ///
    /// # Errors
    /// `Diverged` where they differ.
    pub(super) fn compare(&self, rank: Rank, sums: &Sums) -> Result<(), Trouble> {
        match sums.0.iter().find(|(piece, crc)| self.sums.get(piece).is_some_and(|known| known != crc)) {
            Some((piece, _)) => {
                let detail = format!("members have different states in piece {piece}");
                Err(Trouble::Never(Fault::new(FaultKind::Diverged, detail).at(rank)))
            }
            None => Ok(()),
        }
    }

    /// Asks for what can be asked for. Returns which processes are waited for.
    pub(super) fn ask(&mut self, mut ask: impl FnMut(ProcessId, u32)) -> Vec<(ProcessId, bool)> {
        let count = self.holders.len() as u32;
        let lives: Vec<bool> = self.holders.iter().map(|(_, asked)| asked.is_some()).collect();
        let gives = |seat: u32, piece: u32| giver(home(piece, count), count, |seat| lives[seat as usize]) == Some(seat);
        let mut waited = Vec::new();
        for (seat, (process, asked)) in (0..).zip(&mut self.holders) {
            let Some(asked) = asked else { continue };
            while asked.len() < WINDOW
                && let Some(piece) = self.todo.iter().copied().find(|piece| gives(seat, *piece))
            {
                self.todo.remove(&piece);
                asked.push_back(piece);
                ask(*process, piece);
            }
            waited.push((*process, !asked.is_empty()));
        }
        waited
    }

    /// Takes the next piece of a process. Returns false if it is another one.
    pub(super) fn take(&mut self, from: ProcessId, crc: u32, bytes: &[u8], state: &mut TrainerState) -> bool {
        let holder = self.holders.iter_mut().find(|(process, _)| *process == from);
        let Some(piece) = holder.and_then(|(_, asked)| asked.as_mut()?.pop_front()) else { return false };
        let (part, range) = self.layout[piece as usize].clone();
        let place = state.parts[part as usize].get_mut(range.start as usize..range.end as usize);
        match place.filter(|place| place.len() == bytes.len()) {
            Some(place) => {
                self.sums.insert(piece, crc);
                place.copy_from_slice(bytes);
                true
            }
            None => {
                self.todo.insert(piece);
                false
            }
        }
    }

    /// What this process was asked for others have to give.
    pub(super) fn lose(&mut self, process: ProcessId) {
        for (_, asked) in self.holders.iter_mut().filter(|(holder, _)| *holder == process) {
            self.todo.extend(asked.take().into_iter().flatten());
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.todo.is_empty() && !self.is_waiting()
    }

    fn is_waiting(&self) -> bool {
        self.holders.iter().any(|(_, asked)| asked.as_ref().is_some_and(|asked| !asked.is_empty()))
    }

    /// Nobody is left that keeps what is missing.
    pub(super) fn is_hopeless(&self) -> bool {
        !self.todo.is_empty() && !self.is_waiting()
    }
}
