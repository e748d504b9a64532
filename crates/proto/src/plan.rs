//! The layout that every rank derives alike from the agreed declarations: which tensors share a bucket, how buckets
//! are cut into shards and units, and which rank owns each.
//!
//! Everything here is a pure function of (declarations, members). A bucket is cut into one block per owner, in
//! rotated order so that small buckets do not all fall to rank 0; a block into shards; a shard, where several tensors
//! meet in it, into units.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use crate::dtype::{Collective, DType, ReduceOp};
use crate::ids::{BucketId, Rank, TensorId, UnitIndex};
use crate::limits::{SHARD_ELEMENTS_MAX, SHARD_ELEMENTS_MULTIPLE};
use crate::manifest::Declaration;

/// Allreduce tensors of at most this many bytes share buckets.
pub const FUSED_BYTES_MAX: u64 = 64 << 10;
/// A bucket of fused tensors takes no further one beyond this many bytes.
pub const BUCKET_BYTES_TARGET: u64 = 1 << 20;
/// A block is cut into about this many shards, so that sending, reducing and returning overlap.
const SHARDS_PER_BLOCK: u64 = 8;

/// One declared tensor and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Its name.
    pub name: String,
    /// Its bucket.
    pub bucket: BucketId,
    /// Number of elements.
    pub elements: u64,
    /// Its first element's place in the bucket.
    pub in_bucket: u64,
    /// Its units, contiguous.
    pub units: Range<u32>,
    /// Higher goes first.
    pub priority: i32,
}

/// Tensors that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Element type in memory.
    pub dtype: DType,
    /// Element type on the wire.
    pub wire: DType,
    /// What is done with it.
    pub collective: Collective,
    /// How contributions are combined.
    pub reduce: ReduceOp,
    /// Number of elements.
    pub elements: u64,
    /// Its units, contiguous, in the order of their elements.
    pub units: Range<u32>,
    /// By rank: the units that it owns, contiguous. None for ranks that are no members.
    pub owned: Vec<Range<u32>>,
    /// Contributions are read from, and results placed into, the tensor's own memory: there is one tensor, and it
    /// travels as it is. Otherwise the bucket has staging memory.
    pub direct: bool,
    /// The operation ends at an owner only when all its receivers have said that they have everything, because what
    /// they read is given back to the caller, or because nothing else would tell that it may be overwritten.
    pub acked: bool,
}

impl BucketPlan {
    /// Whether contributions carry data (in allgather and broadcast they only say that the receiver is ready).
    #[must_use]
    pub const fn contributes(&self) -> bool {
        matches!(self.collective, Collective::AllReduce | Collective::ReduceScatter)
    }

    /// Whether owners send results to the other ranks.
    #[must_use]
    pub const fn distributes(&self) -> bool {
        !matches!(self.collective, Collective::ReduceScatter)
    }

    /// Bytes of `elements` elements on the wire.
    #[must_use]
    pub const fn wire_bytes(&self, elements: u64) -> u64 {
        elements * self.wire.size() as u64
    }
}

/// The part of one tensor that lies in one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPlan {
    /// The tensor.
    pub tensor: TensorId,
    /// The bucket.
    pub bucket: BucketId,
    /// The shard within the bucket. Consecutive units of one shard can travel in one frame.
    pub shard: u32,
    /// Who reduces it.
    pub owner: Rank,
    /// Its first element's place in the tensor.
    pub in_tensor: u64,
    /// Its first element's place in the bucket.
    pub in_bucket: u64,
    /// Number of elements.
    pub elements: u32,
}

/// The layout of everything declared so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The ranks that share the work, ascending.
    pub members: Arc<[Rank]>,
    /// By [`TensorId`].
    pub tensors: Vec<TensorPlan>,
    /// By [`BucketId`].
    pub buckets: Vec<BucketPlan>,
    /// By [`UnitIndex`].
    pub units: Vec<UnitPlan>,
}

impl Plan {
    /// A plan for these ranks, ascending, with nothing declared.
    #[must_use]
    pub const fn new(members: Arc<[Rank]>) -> Self {
        Self { members, tensors: Vec::new(), buckets: Vec::new(), units: Vec::new() }
    }

    /// The length of arrays by rank.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.members.last().map_or(0, |last| last.index() + 1)
    }

    /// The tensor.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &TensorPlan {
        &self.tensors[id.index()]
    }

    /// The bucket.
    #[must_use]
    pub fn bucket(&self, id: BucketId) -> &BucketPlan {
        &self.buckets[id.index()]
    }

    /// The unit.
    #[must_use]
    pub fn unit(&self, index: UnitIndex) -> &UnitPlan {
        &self.units[index.index()]
    }

    /// The bytes of a run of units within their bucket, as it lies on the wire.
    #[must_use]
    pub fn run_bytes(&self, first: UnitIndex, count: u32) -> Range<u64> {
        let (start, last) = (self.unit(first), self.unit(UnitIndex(first.0 + count.max(1) - 1)));
        let bucket = self.bucket(start.bucket);
        bucket.wire_bytes(start.in_bucket)..bucket.wire_bytes(last.in_bucket + u64::from(last.elements))
    }

    /// How many bytes on the wire behind the start of its owner's block this unit begins.
    #[must_use]
    pub fn bytes_in_block(&self, unit: UnitIndex) -> u64 {
        let unit = self.unit(unit);
        let bucket = self.bucket(unit.bucket);
        let block = self.units[bucket.owned[unit.owner.index()].start as usize].in_bucket;
        bucket.wire_bytes(unit.in_bucket - block)
    }

    /// Bytes on the wire of all units of the bucket that a rank owns.
    #[must_use]
    pub fn owned_bytes(&self, bucket: &BucketPlan, owner: Rank) -> u64 {
        let owned = &bucket.owned[owner.index()];
        let units = &self.units[owned.start as usize..owned.end as usize];
        units.iter().map(|unit| bucket.wire_bytes(u64::from(unit.elements))).sum()
    }

    /// Adds a round of declarations, in the agreed order. They get the next ids.
    pub fn extend(&mut self, declarations: &[Declaration]) {
        let first = self.tensors.len() as u32;
        for declaration in declarations {
            self.tensors.push(TensorPlan {
                name: declaration.name.clone(),
                bucket: BucketId(0),
                elements: declaration.elements(),
                in_bucket: 0,
                units: 0..0,
                priority: declaration.priority,
            });
        }
        for members in group(declarations) {
            let ids: Vec<TensorId> = members.iter().map(|index| TensorId(first + *index as u32)).collect();
            self.add_bucket(&declarations[members[0]], &ids);
        }
    }

    /// Forgets all tensors but the first `tensors`, which must be those of whole rounds.
    pub fn truncate(&mut self, tensors: usize) {
        self.tensors.truncate(tensors);
        let is_kept = |bucket: &BucketPlan, units: &[UnitPlan]| {
            units.get(bucket.units.start as usize).is_some_and(|unit| unit.tensor.index() < tensors)
        };
        self.buckets.retain(|bucket| is_kept(bucket, &self.units));
        self.units.truncate(self.buckets.last().map_or(0, |bucket| bucket.units.end as usize));
    }

    fn add_bucket(&mut self, declaration: &Declaration, members: &[TensorId]) {
        let id = BucketId(self.buckets.len() as u32);
        let mut elements = 0;
        for member in members {
            let tensor = &mut self.tensors[member.index()];
            tensor.bucket = id;
            tensor.in_bucket = elements;
            elements += tensor.elements;
        }
        let wire = declaration.wire.wire_dtype(declaration.dtype);
        let large = elements * declaration.dtype.size() as u64 > FUSED_BYTES_MAX;
        let direct = members.len() == 1 && wire == declaration.dtype && large;
        let first_unit = self.units.len() as u32;
        let mut bucket = BucketPlan {
            dtype: declaration.dtype,
            wire,
            collective: declaration.collective,
            reduce: declaration.reduce,
            elements,
            units: first_unit..first_unit,
            owned: alloc::vec![first_unit..first_unit; self.ranks()],
            direct,
            acked: direct || declaration.collective != Collective::AllReduce,
        };
        self.cut(id, &mut bucket, members);
        bucket.units.end = self.units.len() as u32;
        self.buckets.push(bucket);
    }

    /// Cuts a bucket into blocks, shards and units.
    fn cut(&mut self, id: BucketId, bucket: &mut BucketPlan, members: &[TensorId]) {
        let blocks = blocks(id, bucket, &self.members);
        let mut members = members.iter().copied().peekable();
        let mut taken = 0; // of the member at the front
        let mut shard = 0;
        for (owner, block) in blocks {
            let first = self.units.len() as u32;
            let shard_elements = shard_elements(block.end - block.start);
            let mut at = block.start;
            loop {
                let shard_end = (at + shard_elements).min(block.end);
                while let Some(&tensor) = members.peek() {
                    let elements = self.tensors[tensor.index()].elements;
                    let here = (elements - taken).min(shard_end - at);
                    // An empty part is a unit only when the whole tensor is empty, so that operations on it still meet.
                    if here == 0 && elements > 0 {
                        break;
                    }
                    self.push_unit(UnitPlan {
                        tensor,
                        bucket: id,
                        shard,
                        owner,
                        in_tensor: taken,
                        in_bucket: at,
                        elements: here as u32,
                    });
                    at += here;
                    taken += here;
                    if taken == elements {
                        members.next();
                        taken = 0;
                    }
                }
                shard += 1;
                if at >= block.end {
                    break;
                }
            }
            bucket.owned[owner.index()] = first..self.units.len() as u32;
        }
    }

    fn push_unit(&mut self, unit: UnitPlan) {
        let index = self.units.len() as u32;
        let tensor = &mut self.tensors[unit.tensor.index()];
        if tensor.units.is_empty() {
            tensor.units.start = index;
        }
        tensor.units.end = index + 1;
        self.units.push(unit);
    }

    /// Block `index` of a tensor as [`Collective::ReduceScatter`] and [`Collective::AllGather`] cut it for `count`
    /// members, in elements. The n-th member has block n.
    #[must_use]
    pub fn block(elements: u64, count: usize, index: usize) -> Range<u64> {
        let size = elements.div_ceil(count as u64);
        let start = (size * index as u64).min(elements);
        start..(start + size).min(elements)
    }
}

/// The blocks of a bucket with their owners, in the order of their elements. At least one, even of nothing.
fn blocks(id: BucketId, bucket: &BucketPlan, members: &[Rank]) -> Vec<(Rank, Range<u64>)> {
    let among = members.len() as u64;
    match bucket.collective {
        Collective::Broadcast { root } => {
            // Where the root is gone, operations on the bucket are refused; somebody owns its units all the same.
            let root = if members.contains(&root) { root } else { members[0] };
            alloc::vec![(root, 0..bucket.elements)]
        }
        Collective::ReduceScatter | Collective::AllGather => {
            let block = |index| Plan::block(bucket.elements, members.len(), index);
            members.iter().enumerate().map(|(index, rank)| (*rank, block(index))).collect()
        }
        Collective::AllReduce => {
            let size = bucket.elements.div_ceil(among).next_multiple_of(SHARD_ELEMENTS_MULTIPLE).max(1);
            let count = bucket.elements.div_ceil(size).max(1);
            let owner = |index: u64| members[((index + u64::from(id.0)) % among) as usize];
            (0..count).map(|i| (owner(i), i * size..((i + 1) * size).min(bucket.elements))).collect()
        }
    }
}

fn shard_elements(block_elements: u64) -> u64 {
    block_elements
        .div_ceil(SHARDS_PER_BLOCK)
        .next_multiple_of(SHARD_ELEMENTS_MULTIPLE)
        .clamp(SHARD_ELEMENTS_MULTIPLE, SHARD_ELEMENTS_MAX)
}

/// Which declarations share a bucket: indices, each group in declared order.
fn group(declarations: &[Declaration]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(usize, u64)> = Vec::new(); // group, bytes
    for (index, declaration) in declarations.iter().enumerate() {
        let bytes = declaration.elements() * declaration.dtype.size() as u64;
        let fusable = declaration.collective == Collective::AllReduce && bytes <= FUSED_BYTES_MAX;
        if !fusable {
            groups.push(alloc::vec![index]);
            continue;
        }
        let alike = |group: &[usize]| {
            let first = &declarations[group[0]];
            first.dtype == declaration.dtype && first.reduce == declaration.reduce && first.wire == declaration.wire
        };
        match open
            .iter_mut()
            .find(|(group, held)| alike(&groups[*group]) && held.saturating_add(bytes) <= BUCKET_BYTES_TARGET)
        {
            Some((group, held)) => {
                groups[*group].push(index);
                *held += bytes;
            }
            None => {
                open.retain(|(group, _)| !alike(&groups[*group]));
                open.push((groups.len(), bytes));
                groups.push(alloc::vec![index]);
            }
        }
    }
    groups
}
