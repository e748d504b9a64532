//! Results of the latest steps, kept for ranks that ask for copies of them.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use gradwire_control::{CopyStore, Held, ShardVersion};
use gradwire_proto::{Epoch, Rank, Step, UnitIndex};

/// Results as they travel on the wire, by step and unit. Memory: `steps_max` times the bytes of all results, and it is
/// used again from step to step.
#[derive(Debug)]
pub(crate) struct Retained {
    steps_max: usize,
    /// The latest last.
    steps: Mutex<VecDeque<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    epoch: Epoch,
    step: Step,
    /// By unit; nothing where the unit had no result in this step.
    units: Vec<Option<Vec<u8>>>,
    /// Memory of units that an older step had.
    spare: Vec<Vec<u8>>,
}

impl Retained {
    pub(crate) const fn new(steps_max: usize) -> Self {
        Self { steps_max, steps: Mutex::new(VecDeque::new()) }
    }

    /// Keeps a unit's result. A later one of the same epoch and step replaces it.
    pub(crate) fn keep(&self, epoch: Epoch, step: Step, unit: UnitIndex, wire: &[u8]) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if steps.back().is_none_or(|latest| (latest.epoch, latest.step) != (epoch, step)) {
            let mut kept = if steps.len() >= self.steps_max { steps.pop_front() } else { None }.unwrap_or_default();
            (kept.epoch, kept.step) = (epoch, step);
            let Kept { units, spare, .. } = &mut kept;
            spare.extend(units.iter_mut().filter_map(Option::take));
            steps.push_back(kept);
        }
        let Some(Kept { units, spare, .. }) = steps.back_mut() else { return };
        if units.len() <= unit.index() {
            units.resize_with(unit.index() + 1, || None);
        }
        let place = units[unit.index()].get_or_insert_with(|| spare.pop().unwrap_or_default());
        place.clear();
        place.extend_from_slice(wire);
    }
}

impl CopyStore for Retained {
    fn copy(&self, _requester: Rank, shard: &ShardVersion) -> Held {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = steps.iter().rev().find(|kept| (kept.epoch, kept.step) == (shard.epoch, shard.step));
        match kept.and_then(|kept| kept.units.get(shard.unit.index())?.as_ref()) {
            Some(wire) => Held::Data(wire.clone()),
            None => Held::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(retained: &Retained, step: u64, unit: u32) -> Held {
        let shard = ShardVersion { epoch: Epoch(1), step: Step(step), unit: UnitIndex(unit) };
        retained.copy(Rank(0), &shard)
    }

    #[test]
    fn the_latest_steps_are_kept_and_their_memory_is_used_again() {
        let retained = Retained::new(2);
        for step in 0..5 {
            for unit in [0, 3] {
                retained.keep(Epoch(1), Step(step), UnitIndex(unit), &[step as u8; 8]);
            }
        }
        assert_eq!(held(&retained, 4, 3), Held::Data(vec![4; 8]));
        assert_eq!(held(&retained, 3, 0), Held::Data(vec![3; 8]));
        assert_eq!(held(&retained, 2, 0), Held::No, "it is too old");
        assert_eq!(held(&retained, 4, 1), Held::No, "it had no result");
        assert_eq!(held(&retained, 4, 9), Held::No);
        let other_epoch = ShardVersion { epoch: Epoch(2), step: Step(4), unit: UnitIndex(0) };
        assert_eq!(retained.copy(Rank(0), &other_epoch), Held::No);
        // A later operation in the same step replaces the first.
        retained.keep(Epoch(1), Step(4), UnitIndex(0), b"later");
        assert_eq!(held(&retained, 4, 0), Held::Data(b"later".to_vec()));
        let steps = retained.steps.lock().unwrap();
        assert_eq!(steps.len(), 2);
        assert!(steps.iter().all(|kept| kept.spare.is_empty()));
    }
}
