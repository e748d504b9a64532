//! Memory of an exchange: staging, landing places, and where in them things are.

use std::collections::BTreeSet;
use std::ops::Range;

use gradwire_codec::crc32;
use gradwire_proto::frame::Location;
use gradwire_proto::plan::Plan as Layout;
use gradwire_proto::{BucketId, RegionKey, UnitIndex};

use super::exchange::Exchange;
use crate::mutation::Mutation;
use crate::plan::Links;
use crate::process::Context;

const ALIGNMENT: u64 = 64;

/// Memory of the exchange itself.
#[derive(Debug, Default)]
pub(super) struct Regions {
    pub(super) rounds: Vec<RoundMemory>,
    pub(super) buckets: Vec<BucketMemory>,
    /// By unit: the checksum of the last result of those that this rank owns.
    pub(super) crcs: Vec<u32>,
    /// Units that this rank reduced since the last commit.
    pub(super) dirty: BTreeSet<u32>,
    /// Of earlier epochs: what is still read or written, and by how many writes.
    pub(super) old_rounds: Vec<RoundMemory>,
    pub(super) old_writes_in_flight: u32,
}

/// Memory of the buckets of one declaration round.
#[derive(Debug)]
pub(super) struct RoundMemory {
    pub(super) contributions: RegionKey,
    pub(super) results: RegionKey,
    /// By rank: where its contributions land.
    landings: Vec<Option<RegionKey>>,
    /// By rank: what of them was checked and is used. Over links that ask, the same as `landings`.
    checked: Vec<Option<RegionKey>>,
}

#[derive(Debug)]
pub(super) struct BucketMemory {
    pub(super) round: usize,
    pub(super) staged_at: u64,
    landing_at: Vec<u64>,
    /// By peer: where the bucket is in its memory.
    pub(super) contribution_at: Vec<Location>,
    pub(super) writes_in_flight: u32,
    /// Order in which contributions to each owned unit were counted. Only a planted bug looks at it.
    pub(super) arrival: Vec<(u32, u32)>,
}

impl Exchange {
    /// Allocates what the buckets from `first` on need.
    pub(super) fn add_round(&mut self, context: &mut Context<'_>, first: usize) {
        let (layout, me) = (self.session.plan(), self.session.config().rank);
        let world = layout.ranks();
        self.memory.discard_from(first as u32);
        let round = self.memory.rounds.len();
        let (mut staged, mut landing) = (0, vec![0; world]);
        for bucket in &layout.buckets[first..] {
            let landing_at = landing.clone();
            if bucket.contributes() {
                for owner in layout.members.iter() {
                    landing[owner.index()] += layout.owned_bytes(bucket, *owner).next_multiple_of(ALIGNMENT);
                }
            }
            self.memory.buckets.push(BucketMemory {
                round,
                staged_at: staged,
                landing_at,
                contribution_at: vec![Location::default(); world],
                writes_in_flight: 0,
                arrival: Vec::new(),
            });
            if !bucket.direct || self.links == Links::OneSided {
                staged += bucket.wire_bytes(bucket.elements).next_multiple_of(ALIGNMENT);
            }
        }
        self.memory.crcs.resize(layout.units.len(), 0);
        let mut memory = RoundMemory {
            contributions: context.memory.allocate(staged as usize),
            results: context.memory.allocate(staged as usize),
            landings: vec![None; world],
            checked: vec![None; world],
        };
        for rank in layout.members.iter().filter(|rank| **rank != me && landing[me.index()] > 0) {
            let bytes = landing[me.index()] as usize;
            let landed = context.memory.allocate(bytes);
            memory.landings[rank.index()] = Some(landed);
            // What a peer can write to at any time must not be what is used.
            let copied = self.links == Links::OneSided && !context.has(Mutation::FreeSlotEarly);
            memory.checked[rank.index()] = Some(if copied { context.memory.allocate(bytes) } else { landed });
        }
        self.memory.rounds.push(memory);
    }

    /// Bytes of the contributions that land here of each peer, each bucket's aligned as in memory.
    pub(super) fn owned(&self) -> usize {
        let (layout, me) = (self.session.plan(), self.session.config().rank);
        let owned = |bucket| layout.owned_bytes(bucket, me).next_multiple_of(ALIGNMENT);
        layout.buckets.iter().filter(|bucket| bucket.contributes()).map(owned).sum::<u64>() as usize
    }

    /// By rank: where contributions to the latest round are to be written.
    pub(super) fn landings(&self) -> Vec<Location> {
        let of = |key: &Option<RegionKey>| key.map_or(Location::default(), |region| Location { region, offset: 0 });
        self.memory.rounds.last().map_or(Vec::new(), |round| round.landings.iter().map(of).collect())
    }
}

impl Regions {
    /// Makes room for the layout of another epoch. What is there stays until nothing reads or writes it any more.
    pub(super) fn set_aside(&mut self) {
        self.old_writes_in_flight += self.buckets.iter().map(|bucket| bucket.writes_in_flight).sum::<u32>();
        self.old_rounds.append(&mut self.rounds);
        self.buckets.clear();
        self.crcs.clear();
        self.dirty.clear();
    }

    /// The buckets from `first` on are laid out anew: an epoch that began while ranks declared had laid them out too.
    pub(super) fn discard_from(&mut self, first: u32) {
        self.buckets.truncate(first as usize);
        if first == 0 {
            self.old_rounds.append(&mut self.rounds);
        }
    }

    /// Frees what was set aside.
    pub(super) fn free_old(&mut self, context: &mut Context<'_>) {
        let leaks = context.has(Mutation::LeakEpoch);
        for round in self.old_rounds.drain(..).filter(|_| !leaks) {
            let RoundMemory { contributions, results, landings, checked } = round;
            for key in [contributions, results].into_iter().chain(landings.into_iter().chain(checked).flatten()) {
                context.memory.free(key);
            }
        }
    }

    pub(super) fn set_crc(&mut self, unit: UnitIndex, crc: u32) {
        self.crcs[unit.index()] = crc;
        self.dirty.insert(unit.0);
    }

    /// Units that were reduced since the last time, and their checksums.
    pub(super) fn take_checksums(&mut self) -> Vec<(u32, u32)> {
        let dirty = std::mem::take(&mut self.dirty);
        dirty.into_iter().map(|unit| (unit, self.crcs[unit as usize])).collect()
    }

    pub(super) fn round(&self, bucket: BucketId) -> &RoundMemory {
        &self.rounds[self.buckets[bucket.index()].round]
    }

    /// Where a rank's contributions to a bucket land, and where what was checked of them is.
    pub(super) fn landing(&self, bucket: BucketId, rank: usize) -> Option<RegionKey> {
        self.round(bucket).landings.get(rank).copied().flatten()
    }

    pub(super) fn checked(&self, bucket: BucketId, rank: usize) -> Option<RegionKey> {
        self.round(bucket).checked.get(rank).copied().flatten()
    }

    /// Where the run begins in the landing memory that its owner keeps for a contributor.
    pub(super) fn landing_offset(&self, layout: &Layout, first: UnitIndex) -> u64 {
        let unit = layout.unit(first);
        self.buckets[unit.bucket.index()].landing_at[unit.owner.index()] + layout.bytes_in_block(first)
    }

    /// Where results of a bucket are put by peers, if not into its tensor.
    pub(super) fn staged(&self, bucket: BucketId) -> Location {
        Location { region: self.round(bucket).results, offset: self.buckets[bucket.index()].staged_at }
    }
}

/// A range of 64-bit offsets as one of memory that exists, and so fits.
pub(super) const fn local(range: &Range<u64>, base: u64) -> Range<usize> {
    (base + range.start) as usize..(base + range.end) as usize
}

/// The place `bytes` behind `base`.
pub(super) const fn beyond(base: Location, bytes: u64) -> Location {
    Location { region: base.region, offset: base.offset.wrapping_add(bytes) }
}

/// The checksum of a part of memory; of nothing where it is not there.
pub(super) fn crc_of(context: &Context<'_>, key: RegionKey, range: Range<usize>) -> u32 {
    context.memory.part(key, range).map_or(0, crc32)
}
