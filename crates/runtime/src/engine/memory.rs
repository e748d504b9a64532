//! Memory of the exchange: staging for buckets that do not travel as they are, landing places for peers' writes, and
//! what peers said of theirs.

use std::ops::Range;
use std::sync::Arc;

use gradwire_proto::bits::Bits;
use gradwire_proto::frame::Location;
use gradwire_proto::plan::Plan;
use gradwire_proto::session::Session;
use gradwire_proto::transfer::UnitResult;
use gradwire_proto::{BucketId, Epoch, Fault, Rank, Step, UnitIndex};
use gradwire_transport::{Buffer, Capabilities, Remote, Transport};

use crate::retained::Retained;
use crate::transfer::Holder;

/// Alignment of buckets within staging and landing memory: a cache line.
const ALIGNMENT: u64 = 64;

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) rounds: Vec<RoundMemory>,
    pub(super) buckets: Vec<BucketMemory>,
    /// By global unit index: CRC-32 of the last result, on the wire, of units that this rank owns.
    pub(super) crcs: Vec<u32>,
    /// Units reduced since the last commit.
    dirty: Bits,
    /// Where results are kept for ranks that ask for copies, if they are.
    retained: Option<Arc<Retained>>,
    /// Where they are kept for newcomers, in a job that takes them in.
    holder: Option<Arc<Holder>>,
    /// The step that the next commit ends.
    pub(super) step: Step,
    epoch: Epoch,
    /// Writes of earlier epochs that still read memory, and what they may read.
    pub(super) old_writes_in_flight: u32,
    pub(super) old_rounds: Vec<RoundMemory>,
}

/// Memory of the buckets of one declaration round.
#[derive(Debug)]
pub(super) struct RoundMemory {
    /// Packed contributions of staged buckets.
    pub(super) contributions: Buffer,
    /// Results of staged buckets: this rank's own, and where others' land.
    pub(super) results: Buffer,
    /// By rank: where the contributions of a peer that writes land.
    pub(super) landings: Vec<Option<Buffer>>,
}

#[derive(Debug)]
pub(super) struct BucketMemory {
    pub(super) round: usize,
    /// Where the bucket begins in staging memory.
    pub(super) staged_at: u64,
    /// By owner: where the owner's part of a contribution begins in its landing memory.
    pub(super) landing_at: Box<[u64]>,
    /// By peer: what it last said, with a contribution, of where the bucket is in its memory.
    pub(super) contribution_at: Box<[Location]>,
    /// Writes that read this bucket's memory.
    pub(super) writes_in_flight: u32,
}

impl Memory {
    pub(super) fn new(retained: Option<Arc<Retained>>, holder: Option<Arc<Holder>>, epoch: Epoch, step: Step) -> Self {
        let (rounds, buckets, crcs) = (Vec::new(), Vec::new(), Vec::new());
        let (old_writes_in_flight, old_rounds) = (0, Vec::new());
        let dirty = Bits::default();
        Self { rounds, buckets, crcs, dirty, retained, holder, step, epoch, old_writes_in_flight, old_rounds }
    }

    /// Makes room for the layout of another epoch. What is there stays until nothing reads or writes it any more.
    pub(super) fn set_aside(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.old_writes_in_flight += self.buckets.iter().map(|bucket| bucket.writes_in_flight).sum::<u32>();
        self.old_rounds.append(&mut self.rounds);
        self.buckets.clear();
        self.crcs.clear();
        self.dirty = Bits::default();
    }

    /// The buckets from `first` on are laid out anew: an epoch that began while ranks declared had laid them out too.
    pub(super) fn discard_from(&mut self, first: u32) {
        self.buckets.truncate(first as usize);
        if first == 0 {
            self.old_rounds.append(&mut self.rounds);
        }
    }

    /// Frees what was set aside. No peer may write to it any more.
    pub(super) fn free_old(&mut self, transport: &mut dyn Transport) {
        for RoundMemory { contributions, results, landings } in self.old_rounds.drain(..) {
            let landings = landings.iter().flatten().map(Buffer::key);
            landings.chain([contributions.key(), results.key()]).for_each(|key| transport.deregister(key));
        }
    }

    /// Allocates and registers what the buckets from `first_bucket` on need.
    pub(super) fn add_round(
        &mut self,
        plan: &Plan,
        first_bucket: u32,
        me: Rank,
        capabilities: &[Capabilities],
        transport: &mut dyn Transport,
    ) -> Result<(), Fault> {
        let round = self.rounds.len();
        let world = capabilities.len();
        let mut staged = 0;
        let mut landing = vec![0; world];
        for bucket in &plan.buckets[first_bucket as usize..] {
            let landing_at = landing.clone().into_boxed_slice();
            if bucket.contributes() {
                for owner in plan.members.iter() {
                    landing[owner.index()] += plan.owned_bytes(bucket, *owner).next_multiple_of(ALIGNMENT);
                }
            }
            self.buckets.push(BucketMemory {
                round,
                staged_at: staged,
                landing_at,
                contribution_at: vec![Location::default(); world].into_boxed_slice(),
                writes_in_flight: 0,
            });
            if !bucket.direct {
                staged += bucket.wire_bytes(bucket.elements).next_multiple_of(ALIGNMENT);
            }
        }
        let contributions = Buffer::allocate(to_usize(staged)?)?;
        let results = Buffer::allocate(to_usize(staged)?)?;
        transport.register(&contributions)?;
        transport.register(&results)?;
        let mut landings = Vec::with_capacity(world);
        for (peer, capabilities) in capabilities.iter().enumerate() {
            let writes = peer != me.index() && !capabilities.peer_read && landing[me.index()] > 0;
            let buffer = writes.then(|| Buffer::allocate(to_usize(landing[me.index()])?)).transpose()?;
            if let Some(buffer) = &buffer {
                transport.register(buffer)?;
            }
            landings.push(buffer);
        }
        self.rounds.push(RoundMemory { contributions, results, landings });
        self.crcs.resize(plan.units.len(), 0);
        let mut dirty = Bits::new(plan.units.len());
        for unit in self.dirty.iter() {
            dirty.insert(unit);
        }
        self.dirty = dirty;
        Ok(())
    }

    /// Keeps a result for ranks that ask for copies, and an allreduce's for newcomers, where that is wanted.
    pub(super) fn keep(&self, session: &Session, unit: UnitIndex, wire: &[u8]) {
        if let Some(retained) = &self.retained {
            retained.keep(self.epoch, self.step, unit, wire);
        }
        if let Some(holder) = self.holder.as_ref().filter(|holder| holder.journals()) {
            let result = || UnitResult::of(session.plan(), unit, wire);
            holder.keep(session.commits(), session.config().epoch, unit, result);
        }
    }

    pub(super) fn set_crc(&mut self, unit: UnitIndex, crc: u32) {
        self.crcs[unit.index()] = crc;
        self.dirty.insert(unit.index());
    }

    pub(super) fn take_checksums(&mut self) -> Vec<(UnitIndex, u32)> {
        let taken = self.dirty.iter().map(|unit| (UnitIndex(unit as u32), self.crcs[unit])).collect();
        self.dirty.clear();
        taken
    }

    /// Where the run begins in the landing memory that its owner keeps for a contributor, from its start.
    pub(super) fn landing_offset(&self, plan: &Plan, first: UnitIndex) -> u64 {
        let unit = plan.unit(first);
        self.buckets[unit.bucket.index()].landing_at[unit.owner.index()] + plan.bytes_in_block(first)
    }

    /// Where this rank's copy of a bucket is in memory that peers may read or write: of results, or contributions.
    pub(super) fn staged_location(&self, bucket: BucketId, results: bool) -> Location {
        let memory = &self.buckets[bucket.index()];
        let round = &self.rounds[memory.round];
        let buffer = if results { &round.results } else { &round.contributions };
        Location { region: buffer.key(), offset: memory.staged_at }
    }

    /// The place `bytes` into the bucket that a peer said is at `base`.
    pub(super) const fn remote(base: Location, bytes: u64) -> Remote {
        Remote { region: base.region, offset: base.offset.wrapping_add(bytes) }
    }
}

fn to_usize(bytes: u64) -> Result<usize, Fault> {
    usize::try_from(bytes).map_err(|_| {
        let detail = format!("{bytes} bytes do not fit this machine's address space");
        Fault::new(gradwire_proto::FaultKind::MemoryUnavailable, detail)
    })
}

/// A range of 64-bit offsets as one of memory that exists, and so fits.
pub(super) fn local(range: Range<u64>, base: u64) -> Range<usize> {
    (base + range.start) as usize..(base + range.end) as usize
}
