//! Version records: what an owner has committed. One for every owner and commit, in parts where it is large.

use std::collections::BTreeMap;

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::membership::RecordId;
use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Epoch, Rank, Step, UnitIndex};

use super::BODY_BYTES_MAX;

/// The kind of a version part in a record's header.
const KIND: u16 = 16;
/// Most checksums in one part.
pub(crate) const CRCS_PER_PART_MAX: usize = 100_000;
/// Most checksums in one version record.
const CRCS_MAX: usize = 1 << 24;
/// Most parts of one version record.
const PARTS_MAX: usize = CRCS_MAX.div_ceil(CRCS_PER_PART_MAX);
/// Most records that are put together at a time.
const OPEN_MAX: usize = 256;
/// Bytes of a part beside its checksums, at most.
const PART_OVERHEAD_BYTES: usize = 64 + WORLD_SIZE_MAX as usize / 8;

const _: () = assert!(CRCS_PER_PART_MAX * 8 + PART_OVERHEAD_BYTES <= BODY_BYTES_MAX);

/// What one owner committed: which step, from whom, and the checksum of each unit that it owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRecord {
    /// The membership that computed it.
    pub epoch: Epoch,
    /// The step that it commits.
    pub step: Step,
    /// The rank that owns the units.
    pub owner: Rank,
    /// The ranks whose contributions are in the sums, in ascending order.
    pub contributors: Vec<Rank>,
    /// CRC-32 of each owned unit's result.
    pub crcs: Vec<(UnitIndex, u32)>,
}

impl VersionRecord {
    /// About how much memory it takes.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.contributors.len() * 4 + self.crcs.len() * 8
    }

    /// Whether it may be merged into a record of the same owner, epoch and contributors, since it is of a later step.
    pub(crate) fn follows(&self, older: &Self) -> bool {
        self.epoch == older.epoch
            && self.owner == older.owner
            && self.step > older.step
            && self.contributors == older.contributors
    }

    /// Becomes a record of the newer one's step, with the latest checksum of each unit.
    pub(crate) fn absorb(&mut self, newer: &Self) {
        self.step = newer.step;
        let same_units = self.crcs.len() == newer.crcs.len()
            && self.crcs.iter().zip(&newer.crcs).all(|((mine, _), (theirs, _))| mine == theirs);
        if same_units {
            self.crcs.copy_from_slice(&newer.crcs);
            return;
        }
        let latest: BTreeMap<UnitIndex, u32> = self.crcs.iter().chain(&newer.crcs).copied().collect();
        self.crcs = latest.into_iter().collect();
    }

    /// In words, for the audit log.
    pub(crate) fn summary(&self) -> String {
        let mut digest = crc32fast::Hasher::new();
        for (unit, crc) in &self.crcs {
            digest.update(&unit.0.to_le_bytes());
            digest.update(&crc.to_le_bytes());
        }
        let (shards, contributors) = (self.crcs.len(), self.contributors.len());
        format!("{shards} shards, {contributors} contributors, checksum {:08x}", digest.finalize())
    }

    /// Whether it stays within the format's bounds.
    pub(crate) fn is_valid(&self) -> bool {
        self.crcs.len() <= CRCS_MAX && self.contributors.iter().all(|rank| rank.0 < WORLD_SIZE_MAX)
    }

    /// The record in parts, none larger than a record may be. At least one.
    pub(crate) fn parts(&self) -> impl Iterator<Item = VersionPart> {
        let count = self.crcs.len().div_ceil(CRCS_PER_PART_MAX).max(1);
        (0..count).map(move |part| {
            let crcs = self.crcs.chunks(CRCS_PER_PART_MAX).nth(part).unwrap_or_default().to_vec();
            let contributors = self.contributors.clone();
            let record = Self { epoch: self.epoch, step: self.step, owner: self.owner, contributors, crcs };
            VersionPart { part: part as u16, parts: count as u16, record }
        })
    }
}

/// A part of a version record: complete but for the checksums, of which it has some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VersionPart {
    part: u16,
    parts: u16,
    record: VersionRecord,
}

impl VersionPart {
    /// The kind of every part.
    pub(crate) const KIND: u16 = KIND;

    /// The message key: the owner, so that a compacted topic keeps the latest record of each, with all its parts.
    pub(crate) fn key(&self) -> String {
        let owner = self.record.owner.0;
        if self.part == 0 { owner.to_string() } else { format!("{owner}.{}", self.part) }
    }

    /// The part as it travels.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let VersionRecord { epoch, step, owner, contributors, crcs } = &self.record;
        let mut out = Vec::with_capacity(PART_OVERHEAD_BYTES + crcs.len() * 8);
        out.extend_from_slice(&epoch.0.to_le_bytes());
        out.extend_from_slice(&step.0.to_le_bytes());
        out.extend_from_slice(&owner.0.to_le_bytes());
        out.extend_from_slice(&self.part.to_le_bytes());
        out.extend_from_slice(&self.parts.to_le_bytes());
        let bits = contributors.iter().map(|rank| rank.0 + 1).max().unwrap_or(0);
        let mut bitmap = vec![0_u8; bits.div_ceil(8) as usize];
        for rank in contributors {
            bitmap[rank.index() / 8] |= 1 << (rank.0 % 8);
        }
        out.extend_from_slice(&(bitmap.len() as u32).to_le_bytes());
        out.extend_from_slice(&bitmap);
        out.extend_from_slice(&(crcs.len() as u32).to_le_bytes());
        for (unit, crc) in crcs {
            out.extend_from_slice(&unit.0.to_le_bytes());
            out.extend_from_slice(&crc.to_le_bytes());
        }
        out
    }

    /// Reads a part.
    ///
    /// # Errors
    /// When it is malformed or larger than a part may be.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (epoch, step, owner) = (Epoch(reader.u64()?), Step(reader.u64()?), Rank(reader.u32()?));
        let (part, parts) = (reader.u16()?, reader.u16()?);
        if part >= parts || usize::from(parts) > PARTS_MAX {
            return Err(Malformed("a part that there cannot be"));
        }
        let bitmap_bytes = reader.u32()?;
        if bitmap_bytes > WORLD_SIZE_MAX.div_ceil(8) {
            return Err(Malformed("more contributors than a job may have"));
        }
        let bitmap = reader.bytes(bitmap_bytes as usize)?;
        if bitmap.last() == Some(&0) {
            return Err(Malformed("a bitmap that is longer than it need be"));
        }
        let is_set = |rank: &u32| bitmap[*rank as usize / 8] & 1 << (rank % 8) != 0;
        let contributors = (0..bitmap_bytes * 8).filter(is_set).map(Rank).collect();
        let count = reader.u32()? as usize;
        if count > CRCS_PER_PART_MAX || reader.remaining() != count * 8 {
            return Err(Malformed("a wrong number of checksums"));
        }
        let crcs = (0..count).map(|_| Ok((UnitIndex(reader.u32()?), reader.u32()?))).collect::<Result<_, _>>()?;
        reader.finish()?;
        Ok(Self { part, parts, record: VersionRecord { epoch, step, owner, contributors, crcs } })
    }
}

/// Puts parts together. Parts that come twice, because a receipt got lost, change nothing.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    open: BTreeMap<RecordId, Vec<Option<VersionPart>>>,
    /// Records that were finished lately: their parts may come again.
    done: std::collections::VecDeque<RecordId>,
}

impl Assembly {
    /// Takes the part of the record with this id; gives the record when it is complete.
    pub(crate) fn add(&mut self, id: RecordId, part: VersionPart) -> Option<VersionRecord> {
        if self.done.contains(&id) {
            return None;
        }
        if self.open.len() >= OPEN_MAX && !self.open.contains_key(&id) {
            // Writers send one record after the other, so one that many others overtook will not be finished.
            self.open.pop_first();
        }
        let parts = self.open.entry(id).or_insert_with(|| vec![None; usize::from(part.parts)]);
        let index = usize::from(part.part);
        if parts.len() == usize::from(part.parts) {
            parts[index] = Some(part);
        }
        if parts.iter().any(Option::is_none) {
            return None;
        }
        self.done.push_back(id);
        if self.done.len() > OPEN_MAX {
            self.done.pop_front();
        }
        let mut parts = self.open.remove(&id)?.into_iter().flatten();
        let mut record = parts.next()?.record;
        record.crcs.extend(parts.flat_map(|part| part.record.crcs));
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(crcs: usize) -> VersionRecord {
        VersionRecord {
            epoch: Epoch(1),
            step: Step(1 << 33),
            owner: Rank(5),
            contributors: vec![Rank(0), Rank(7), Rank(8), Rank(1023)],
            crcs: (0..crcs as u32).map(|unit| (UnitIndex(unit), unit.wrapping_mul(0x9e37_79b9))).collect(),
        }
    }

    #[test]
    fn large_records_come_together_from_parts_in_any_order_and_twice() {
        for crcs in [0, 1, CRCS_PER_PART_MAX, CRCS_PER_PART_MAX * 2 + 1] {
            let record = record(crcs);
            let mut parts: Vec<_> =
                record.parts().map(|part| VersionPart::decode(&part.encode()).unwrap()).rev_if(crcs > 1);
            parts.extend(parts.clone());
            let mut assembly = Assembly::default();
            let whole: Vec<_> = parts.into_iter().filter_map(|part| assembly.add([1; 16], part)).collect();
            assert_eq!(whole, [record], "{crcs} checksums");
        }
    }

    trait RevIf: Iterator + Sized {
        fn rev_if(self, reverse: bool) -> Vec<Self::Item> {
            let mut items: Vec<_> = self.collect();
            if reverse {
                items.reverse();
            }
            items
        }
    }
    impl<I: Iterator> RevIf for I {}

    #[test]
    fn keys_name_owner_and_part() {
        let keys: Vec<_> = record(CRCS_PER_PART_MAX + 1).parts().map(|part| part.key()).collect();
        assert_eq!(keys, ["5", "5.1"]);
    }

    #[test]
    fn unfinished_records_are_bounded() {
        let mut assembly = Assembly::default();
        let first = record(CRCS_PER_PART_MAX + 1).parts().next().unwrap();
        for number in 0..1000_u128 {
            assert_eq!(assembly.add(number.to_le_bytes(), first.clone()), None);
        }
        assert_eq!(assembly.open.len(), OPEN_MAX);
    }

    proptest! {
        #[test]
        fn random_parts_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(part) = VersionPart::decode(&bytes) {
                prop_assert_eq!(part.encode(), bytes);
                Assembly::default().add([0; 16], part);
            }
        }

        #[test]
        fn damaged_parts_never_panic(position in 0_usize..200, value in any::<u8>()) {
            let mut bytes = record(3).parts().next().unwrap().encode();
            let position = position % bytes.len();
            bytes[position] = value;
            if let Ok(part) = VersionPart::decode(&bytes) {
                Assembly::default().add([0; 16], part);
            }
        }
    }
}
