//! Memory of an exchange: staging, landing places, and where in them things are.

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
#[derive(Debug)]
pub(super) struct Regions {
    pub(super) contributions: RegionKey,
    pub(super) results: RegionKey,
    /// By rank: where its contributions land.
    pub(super) landings: Vec<Option<RegionKey>>,
    /// By rank: what of them was checked and is used. Over links that ask, the same as `landings`.
    pub(super) checked: Vec<Option<RegionKey>>,
    pub(super) buckets: Vec<BucketMemory>,
}

#[derive(Debug)]
pub(super) struct BucketMemory {
    pub(super) staged_at: u64,
    landing_at: Vec<u64>,
    /// By peer: where the bucket is in its memory.
    pub(super) contribution_at: Vec<Location>,
    pub(super) writes_in_flight: u32,
    /// Order in which contributions to each owned unit were counted. Only a planted bug looks at it.
    pub(super) arrival: Vec<(u32, u32)>,
}

impl Exchange {
    /// Allocates what the agreed declarations need.
    pub(super) fn lay_out(&mut self, context: &mut Context<'_>) {
        let (layout, me) = (self.session.plan(), self.session.config().rank);
        let world = layout.ranks();
        let (mut staged, mut landing) = (0, vec![0; world]);
        for bucket in &layout.buckets {
            let landing_at = landing.clone();
            if bucket.contributes() {
                for owner in layout.members.iter() {
                    landing[owner.index()] += layout.owned_bytes(bucket, *owner).next_multiple_of(ALIGNMENT);
                }
            }
            self.memory.buckets.push(BucketMemory {
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
        self.crcs = vec![0; layout.units.len()];
        for key in [self.memory.contributions, self.memory.results] {
            context.memory.free(key);
        }
        self.memory.contributions = context.memory.allocate(staged as usize);
        self.memory.results = context.memory.allocate(staged as usize);
        for rank in (0..world).filter(|rank| *rank != me.index() && landing[me.index()] > 0) {
            let bytes = landing[me.index()] as usize;
            let landed = context.memory.allocate(bytes);
            self.memory.landings[rank] = Some(landed);
            // What a peer can write to at any time must not be what is used.
            let copied = self.links == Links::OneSided && !context.has(Mutation::FreeSlotEarly);
            self.memory.checked[rank] = Some(if copied { context.memory.allocate(bytes) } else { landed });
        }
    }
}

impl Regions {
    /// Where the run begins in the landing memory that its owner keeps for a contributor.
    pub(super) fn landing_offset(&self, layout: &Layout, first: UnitIndex) -> u64 {
        let unit = layout.unit(first);
        self.buckets[unit.bucket.index()].landing_at[unit.owner.index()] + layout.bytes_in_block(first)
    }

    /// Where results of a bucket are put by peers, if not into its tensor.
    pub(super) fn staged(&self, bucket: BucketId) -> Location {
        Location { region: self.results, offset: self.buckets[bucket.index()].staged_at }
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
