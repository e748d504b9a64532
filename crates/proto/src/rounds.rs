//! Rounds of the federated mode as a replicated state machine over the log `<job>-rounds`.
//!
//! Contributors and aggregators apply the same records in the same order, so all of them agree on who is in the sums of
//! a round without a leader. Nothing here knows a clock, a broker or who "we" are: when to propose a Close is the
//! caller's affair, what it does is decided here alone.
//!
//! One round is current at a time. It is open until its entries are decided: by the record that completes the
//! contributors, or before that by **the first valid Close in log order**. Then it is closed, until every shard's result
//! is published; with the last of them the next round opens.
//!
//! What makes it safe:
//! - A contribution is an [`Entry`] (contributor and round of origin). The first Contributed of an entry names the one
//!   attempt that counts; others of the same entry, by a process that was started again, never do.
//! - An entry is taken once: it leaves the waiting ones with the Close that takes it, and is remembered for as long as
//!   it could be said again ([`CARRY_ROUNDS_MAX`] rounds; older ones are refused).
//! - What took effect has none a second time: a writer that got no receipt writes its record again, and a writer that
//!   was stalled writes late, without harm. Readers apply each message of the log once, in order.

mod record;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

pub use record::{Body, Published};

use crate::limits::{CARRY_ROUNDS_MAX, FEDERATED_SHARD_BYTES_MAX, FEDERATED_SHARDS_MAX, ROUNDS_KEPT, WORLD_SIZE_MAX};
use crate::{DType, Rank, ReduceOp, Round, WireFormat};

/// Names one attempt of a contributor at one round, or a process.
pub type ContributionId = [u8; 16];

/// Most aggregators that are remembered by their numbers.
const AGGREGATORS_MAX: usize = 4096;

/// What happens to contributions that miss the Close of their round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LatePolicy {
    /// They never count.
    #[default]
    Reject = 1,
    /// They count in the next round that closes, beside the contributor's own of that round.
    Carry = 2,
}

impl LatePolicy {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Reject, Self::Carry];

    /// The policy with this code on the wire.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Reject),
            2 => Some(Self::Carry),
            _ => None,
        }
    }

    /// Name as users write it: `carry`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reject => "reject",
            Self::Carry => "carry",
        }
    }
}

impl core::fmt::Display for LatePolicy {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// How a job is run: the same for all who take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// How many contributors there are: their numbers are below this.
    pub contributors: u32,
    /// How many contributions of its own a round needs to be closed.
    pub quorum: u32,
    /// What happens to late ones.
    pub late: LatePolicy,
    /// How values travel.
    pub wire: WireFormat,
    /// How contributions are combined.
    pub op: ReduceOp,
    /// Elements of each shard but the last, which may have fewer.
    pub shard_elements: u32,
    /// Elements of the whole model.
    pub elements: u64,
}

impl Open {
    /// Whether it stays within the format's bounds.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        (1..=WORLD_SIZE_MAX).contains(&self.contributors)
            && (1..=self.contributors).contains(&self.quorum)
            && self.elements > 0
            && self.shard_elements > 0
            && self.elements.div_ceil(u64::from(self.shard_elements)) <= u64::from(FEDERATED_SHARDS_MAX)
            && self.shard_bytes(0) as u64 <= FEDERATED_SHARD_BYTES_MAX
    }

    /// How many shards there are.
    #[must_use]
    pub const fn shards(&self) -> u32 {
        self.elements.div_ceil(self.shard_elements as u64) as u32
    }

    /// The elements of a shard.
    #[must_use]
    pub fn range(&self, shard: u32) -> Range<usize> {
        let start = u64::from(shard) * u64::from(self.shard_elements);
        start.min(self.elements) as usize..(start + u64::from(self.shard_elements)).min(self.elements) as usize
    }

    /// Bytes of a shard, as it travels.
    #[must_use]
    pub fn shard_bytes(&self, shard: u32) -> usize {
        self.range(shard).len() * self.wire_dtype().size()
    }

    /// The type that values have while they travel.
    #[must_use]
    pub const fn wire_dtype(&self) -> DType {
        self.wire.wire_dtype(DType::F32)
    }
}

/// A contribution: who made it, and for which round. In the order in which they are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Who made it.
    pub contributor: Rank,
    /// The round that it was made for.
    pub origin: Round,
}

/// What a Contributed record said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contribution {
    /// The attempt that counts.
    pub id: ContributionId,
    /// CRC-32 of each shard.
    pub crcs: Arc<[u32]>,
}

/// The current round once its entries are decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// What is added up, in this order.
    pub entries: Vec<(Entry, Contribution)>,
    /// The result of each shard that is published.
    pub published: Vec<Option<Published>>,
    left: usize,
}

impl Closed {
    /// Which of the entries this is.
    #[must_use]
    pub fn place(&self, entry: Entry) -> Option<usize> {
        self.entries.binary_search_by_key(&entry, |(known, _)| *known).ok()
    }

    /// CRC-32 over the entries and their attempts: binds a result to them.
    #[must_use]
    pub fn digest(&self) -> u32 {
        let mut digest = crc32fast::Hasher::new();
        for (entry, contribution) in &self.entries {
            digest.update(&entry.contributor.0.to_le_bytes());
            digest.update(&entry.origin.0.to_le_bytes());
            digest.update(&contribution.id);
        }
        digest.finalize()
    }
}

/// A round of which every result is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    /// Which.
    pub round: Round,
    /// What was added up.
    pub entries: Vec<Entry>,
    /// [`Closed::digest`].
    pub digest: u32,
    /// The result of each shard.
    pub published: Vec<Published>,
}

/// What becomes of a contribution's data for one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is in the current round's sum, whose result is not published.
    Needed,
    /// It may yet be in a sum.
    Waiting,
    /// The result that it is in is published.
    Done,
    /// It will never be in a sum: it is late, or another attempt counts.
    Never,
}

/// What a record changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing: it came twice, too late, or out of place.
    None,
    /// The job is open.
    Opened,
    /// A contribution waits for its round, or for the next one to be carried into.
    Contributed(Entry),
    /// A contribution came too late to count at all.
    Late(Entry),
    /// Another attempt of this entry counts already.
    Repeated(Entry),
    /// The current round's entries are decided.
    Closed,
    /// A shard's result is published.
    Published(u32),
    /// The last one is: this round is complete, and the next one open.
    Complete(Round),
    /// The aggregator with this number has subscribed.
    Aggregator(Rank),
}

/// The state that everybody derives from the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    open: Option<Open>,
    round: Round,
    closed: Option<Closed>,
    /// Contributed, and in no Close yet: of the current round, and carried ones.
    waiting: BTreeMap<Entry, Contribution>,
    /// All that counted or wait, of rounds that can still be contributed to.
    seen: BTreeMap<Round, BTreeMap<Rank, ContributionId>>,
    complete: VecDeque<Complete>,
    aggregators: VecDeque<ContributionId>,
    aggregators_before: u32,
    closer: Option<Rank>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            open: None,
            round: Round(1),
            closed: None,
            waiting: BTreeMap::new(),
            seen: BTreeMap::new(),
            complete: VecDeque::new(),
            aggregators: VecDeque::new(),
            aggregators_before: 0,
            closer: None,
        }
    }
}

impl Log {
    /// How the job is run, once somebody has said so.
    #[must_use]
    pub const fn open(&self) -> Option<&Open> {
        self.open.as_ref()
    }

    /// The current round: open or, where [`Log::closed`] has it, decided. Those before it are complete.
    #[must_use]
    pub const fn round(&self) -> Round {
        self.round
    }

    /// The current round's entries and results, once the former are decided.
    #[must_use]
    pub const fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }

    /// A complete round, if it is one of the last [`ROUNDS_KEPT`].
    #[must_use]
    pub fn complete(&self, round: Round) -> Option<&Complete> {
        self.complete.iter().rev().find(|complete| complete.round == round)
    }

    /// Who closed a round by a Close last: the aggregator's number.
    #[must_use]
    pub const fn closer(&self) -> Option<Rank> {
        self.closer
    }

    /// The number of an aggregator that has subscribed: they count from 0, in the order of the log.
    #[must_use]
    pub fn aggregator(&self, id: ContributionId) -> Option<Rank> {
        let place = self.aggregators.iter().position(|known| *known == id)?;
        Some(Rank(self.aggregators_before + place as u32))
    }

    /// How many aggregators ever subscribed.
    #[must_use]
    pub fn aggregators(&self) -> u32 {
        self.aggregators_before + self.aggregators.len() as u32
    }

    /// The contributions that the current round has of its own, while it is open.
    pub fn arrived(&self) -> impl Iterator<Item = Rank> {
        let round = self.round;
        let open = self.closed.is_none();
        self.waiting.keys().filter(move |entry| open && entry.origin == round).map(|entry| entry.contributor)
    }

    /// Whether the current round is open and has what it needs to be closed.
    #[must_use]
    pub fn has_quorum(&self) -> bool {
        self.open.is_some_and(|open| self.closed.is_none() && self.arrived().count() >= open.quorum as usize)
    }

    /// A Close of the current round with all that wait.
    #[must_use]
    pub fn proposal(&self) -> Body {
        Body::Close { round: self.round, entries: self.waiting.keys().copied().collect() }
    }

    /// The attempt of an entry that counts, as far as that is known and remembered.
    #[must_use]
    pub fn contribution(&self, entry: Entry) -> Option<ContributionId> {
        self.seen.get(&entry.origin)?.get(&entry.contributor).copied()
    }

    /// The checksum that a shard of an entry must have, where it may still be used.
    #[must_use]
    pub fn crc(&self, entry: Entry, shard: u32) -> Option<u32> {
        let closed = self.closed.as_ref();
        let in_sum = closed.and_then(|closed| Some(&closed.entries[closed.place(entry)?].1));
        in_sum.or_else(|| self.waiting.get(&entry))?.crcs.get(shard as usize).copied()
    }

    /// Whether a contribution that is not in the log yet could still count.
    #[must_use]
    pub fn accepts(&self, origin: Round) -> bool {
        let Some(open) = &self.open else { return true };
        let in_time = origin > self.round || origin == self.round && self.closed.is_none();
        in_time || open.late == LatePolicy::Carry && origin.0 + CARRY_ROUNDS_MAX >= self.round.0
    }

    /// What becomes of a shard's data of this attempt at this entry.
    #[must_use]
    pub fn standing(&self, entry: Entry, attempt: ContributionId, shard: u32) -> Standing {
        match self.contribution(entry) {
            Some(counts) if counts != attempt => return Standing::Never,
            Some(_) if self.waiting.contains_key(&entry) => return Standing::Waiting,
            Some(_) => {}
            None if self.accepts(entry.origin) => return Standing::Waiting,
            None => return Standing::Never,
        }
        let Some(closed) = &self.closed else { return Standing::Done };
        let in_sum = closed.place(entry).is_some();
        let published = closed.published.get(shard as usize).copied().flatten();
        if in_sum && published.is_none() { Standing::Needed } else { Standing::Done }
    }

    /// Applies a record that `rank` wrote.
    pub fn apply(&mut self, rank: Rank, body: &Body) -> Change {
        match body {
            Body::Open(open) => self.begin(open),
            Body::Contributed { round, contribution, crcs } => {
                let entry = Entry { contributor: rank, origin: *round };
                self.contribute(entry, Contribution { id: *contribution, crcs: crcs.clone() })
            }
            Body::Close { round, entries } => self.close_by(rank, *round, entries),
            Body::Published { round, shard, result } => self.publish(*round, *shard, *result),
            Body::AggregatorJoined { aggregator } => self.join(*aggregator),
        }
    }

    fn begin(&mut self, open: &Open) -> Change {
        if self.open.is_some() || !open.is_valid() {
            return Change::None;
        }
        self.open = Some(*open);
        Change::Opened
    }

    fn contribute(&mut self, entry: Entry, contribution: Contribution) -> Change {
        let Some(open) = self.open else { return Change::None };
        let possible = entry.contributor.0 < open.contributors
            && (Round(1)..=self.round).contains(&entry.origin)
            && contribution.crcs.len() == open.shards() as usize;
        if !possible {
            return Change::None;
        }
        match self.contribution(entry) {
            Some(known) if known == contribution.id => return Change::None,
            Some(_) => return Change::Repeated(entry),
            None if !self.accepts(entry.origin) => return Change::Late(entry),
            None => {}
        }
        self.seen.entry(entry.origin).or_default().insert(entry.contributor, contribution.id);
        self.waiting.insert(entry, contribution);
        if self.arrived().count() == open.contributors as usize {
            self.close(None);
            return Change::Closed;
        }
        Change::Contributed(entry)
    }

    fn close_by(&mut self, rank: Rank, round: Round, entries: &[Entry]) -> Change {
        let Some(open) = self.open else { return Change::None };
        let ascending = entries.windows(2).all(|pair| pair[0] < pair[1]);
        let own = entries.iter().filter(|entry| entry.origin == round).count();
        let valid = self.closed.is_none()
            && round == self.round
            && ascending
            && own >= open.quorum as usize
            && entries.iter().all(|entry| self.waiting.contains_key(entry));
        if !valid {
            return Change::None;
        }
        self.closer = Some(rank);
        self.close(Some(entries));
        Change::Closed
    }

    /// Closes the current round with these of the waiting contributions, or with all of them.
    fn close(&mut self, entries: Option<&[Entry]>) {
        let taken = match entries {
            None => core::mem::take(&mut self.waiting).into_iter().collect(),
            Some(entries) => entries.iter().filter_map(|entry| self.waiting.remove_entry(entry)).collect(),
        };
        let shards = self.open.map_or(0, |open| open.shards() as usize);
        if self.open.is_some_and(|open| open.late == LatePolicy::Reject) {
            self.forget(|_| false);
        }
        self.closed = Some(Closed { entries: taken, published: vec![None; shards], left: shards });
    }

    /// Keeps only those of the waiting contributions. What is left out counts as never said.
    fn forget(&mut self, keep: impl Fn(&Entry) -> bool) {
        let seen = &mut self.seen;
        self.waiting.retain(|entry, _| {
            let kept = keep(entry);
            if !kept && let Some(of_round) = seen.get_mut(&entry.origin) {
                of_round.remove(&entry.contributor);
            }
            kept
        });
    }

    fn publish(&mut self, round: Round, shard: u32, result: Published) -> Change {
        let Some(closed) = self.closed.as_mut().filter(|_| round == self.round) else { return Change::None };
        let Some(slot) = closed.published.get_mut(shard as usize).filter(|slot| slot.is_none()) else {
            return Change::None;
        };
        *slot = Some(result);
        closed.left -= 1;
        if closed.left > 0 {
            return Change::Published(shard);
        }
        self.finish();
        Change::Complete(round)
    }

    /// Every shard of the current round is published: the next one opens.
    fn finish(&mut self) {
        let Some(closed) = self.closed.take() else { return };
        let (round, digest) = (self.round, closed.digest());
        let entries = closed.entries.into_iter().map(|(entry, _)| entry).collect();
        let published = closed.published.into_iter().flatten().collect();
        if self.complete.len() == ROUNDS_KEPT {
            self.complete.pop_front();
        }
        self.complete.push_back(Complete { round, entries, digest, published });
        self.round = round.next();
        let oldest = Round(self.round.0.saturating_sub(CARRY_ROUNDS_MAX));
        self.forget(|entry| entry.origin >= oldest);
        self.seen = self.seen.split_off(&oldest);
    }

    fn join(&mut self, id: ContributionId) -> Change {
        if let Some(number) = self.aggregator(id) {
            return Change::Aggregator(number);
        }
        if self.aggregators.len() == AGGREGATORS_MAX {
            self.aggregators.pop_front();
            self.aggregators_before += 1;
        }
        self.aggregators.push_back(id);
        Change::Aggregator(Rank(self.aggregators() - 1))
    }
}

#[cfg(test)]
mod tests;
