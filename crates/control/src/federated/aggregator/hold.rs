//! What an aggregator holds: messages that it got and has neither acknowledged nor handed back, and their data.
//!
//! A pure state machine: messages, changes of the log and time go in; what to acknowledge, what to hand back and what
//! can be added up come out. Its invariants:
//! - A message is acknowledged only when the log says that it is not needed, or when another message with the same piece
//!   is held.
//! - Data is bounded. What does not fit is forgotten, all but the name of its message, and handed back once there is
//!   room. The shard that is due first always fits, so that the round goes on.
//! - What was handed back is forgotten completely: it comes again, here or elsewhere, from the first message on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gradwire_proto::Round;
use gradwire_proto::rounds::{ContributionId, Entry, Log, Standing};
use pulsar::message::proto::MessageIdData;
use tokio::time::Instant;

use crate::federated::bulk::Update;
use crate::pieces::{Collected, Collector, PieceHeader};

/// A shard that is due and does not move for this long is handed back; twice as long the next time, up to the second.
const STALL_MIN: Duration = Duration::from_millis(100);
const STALL_MAX: Duration = Duration::from_secs(2);
/// Where other shards move, it is given this many times as long: then there is only much to do.
const STALL_BUSY: u32 = 4;
/// Where nothing moved for this long, there is nothing to do.
const IDLE: Duration = Duration::from_millis(50);
/// Most contributions that are remembered as discarded.
const DISCARDED_MAX: usize = 4096;

/// What is held.
#[derive(Debug)]
pub(super) struct Hold {
    bytes_max: usize,
    bytes: usize,
    collector: Collector<(u32, Entry, ContributionId)>,
    shards: BTreeMap<u32, Shard>,
    /// Messages whose data did not fit, by what they belong to.
    forgotten: BTreeMap<Group, Vec<MessageIdData>>,
    /// Groups whose messages were asked for again: room is kept for them.
    asked: BTreeSet<Group>,
    moved: Instant,
    acks: Vec<MessageIdData>,
    nacks: Vec<MessageIdData>,
    discarded: VecDeque<(Entry, ContributionId)>,
    events: Vec<Event>,
    pub(super) counters: Counters,
}

/// What is due together: a shard of a round. Lower ones are due first.
type Group = (Round, u32);

/// What happened to messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) updates: u64,
    pub(super) duplicates: u64,
    pub(super) late: u64,
    pub(super) handed_back: u64,
}

/// Something to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A contribution will never count: it came too late.
    Late(Entry),
    /// A contribution was rejected: why.
    Rejected(Entry, &'static str),
}

/// A shard of which every entry is here.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) round: Round,
    pub(super) shard: u32,
    pub(super) digest: u32,
    /// In the order in which they are added up.
    pub(super) inputs: Vec<Arc<Vec<u8>>>,
}

#[derive(Debug)]
struct Shard {
    parts: BTreeMap<(Entry, ContributionId), Part>,
    /// When it last got a message.
    moved: Instant,
    stall: Duration,
    /// It is being added up or published, for this round.
    working: Option<Round>,
}

/// One contribution's data for one shard.
#[derive(Debug)]
struct Part {
    header: PieceHeader,
    /// By number of the piece.
    messages: BTreeMap<u16, MessageIdData>,
    whole: Option<Arc<Vec<u8>>>,
}

impl Hold {
    pub(super) fn new(bytes_max: usize, now: Instant) -> Self {
        Self {
            bytes_max,
            bytes: 0,
            // Bounded here.
            collector: Collector::new(usize::MAX),
            shards: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            asked: BTreeSet::new(),
            moved: now,
            acks: Vec::new(),
            nacks: Vec::new(),
            discarded: VecDeque::new(),
            events: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// Messages to acknowledge.
    pub(super) fn take_acks(&mut self) -> Vec<MessageIdData> {
        std::mem::take(&mut self.acks)
    }

    /// Messages to hand back.
    pub(super) fn take_nacks(&mut self) -> Vec<MessageIdData> {
        std::mem::take(&mut self.nacks)
    }

    /// What there is to tell.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Takes a piece that fits the model. True if the shard should be looked at by [`Hold::ready`].
    pub(super) fn update(
        &mut self,
        log: &Log,
        now: Instant,
        message: MessageIdData,
        entry: Entry,
        update: &Update<'_>,
    ) -> bool {
        let (shard, id) = (update.shard, update.contribution);
        self.moved = now;
        match log.standing(entry, id, shard) {
            Standing::Needed | Standing::Waiting => {}
            Standing::Done => {
                self.counters.duplicates += 1;
                self.acks.push(message);
                return false;
            }
            Standing::Never => {
                self.discard(log, entry, id);
                self.acks.push(message);
                return false;
            }
        }
        if log.crc(entry, shard).is_some_and(|crc| crc != update.header.crc) {
            self.reject(entry, "data of another checksum than it announced");
            self.acks.push(message);
            return false;
        }
        let known = self.shards.get(&shard).is_some_and(|shard| shard.parts.contains_key(&(entry, id)));
        if !known && !self.make_room(log, (entry.origin.max(log.round()), shard), update.header.bytes as usize) {
            self.forgotten.entry((entry.origin.max(log.round()), shard)).or_default().push(message);
            return false;
        }
        self.insert(now, message, entry, update)
    }

    /// A message that is no contribution: it must not come again.
    pub(super) fn refuse(&mut self, message: MessageIdData) {
        self.acks.push(message);
    }

    fn insert(&mut self, now: Instant, message: MessageIdData, entry: Entry, update: &Update<'_>) -> bool {
        let Update { shard: number, contribution: id, header, data, .. } = *update;
        let fresh = || Shard { parts: BTreeMap::new(), moved: now, stall: STALL_MIN, working: None };
        let shard = self.shards.entry(number).or_insert_with(fresh);
        shard.moved = now;
        let part = shard.parts.entry((entry, id)).or_insert_with(|| {
            self.bytes += header.bytes as usize;
            Part { header, messages: BTreeMap::new(), whole: None }
        });
        let same = (part.header.bytes, part.header.crc, part.header.count) == (header.bytes, header.crc, header.count);
        if !same {
            self.reject(entry, "pieces that do not belong together");
            self.acks.push(message);
            return false;
        }
        match part.messages.get(&header.index) {
            // The same message once more, since the broker thought that it got lost.
            Some(held) if *held == message => return false,
            // The held one stays unacknowledged: so this one may go.
            Some(_) => {
                self.counters.duplicates += 1;
                self.acks.push(message);
                return false;
            }
            None => {}
        }
        part.messages.insert(header.index, message);
        self.counters.updates += 1;
        match self.collector.add(&(number, entry, id), header, data) {
            Collected::Open => false,
            Collected::Complete(whole) => {
                part.whole = Some(Arc::new(whole));
                true
            }
            Collected::Wrong => {
                self.reject(entry, "pieces whose data does not have their checksum");
                let dropped = self.drop_part(number, (entry, id));
                self.acks.extend(dropped);
                false
            }
        }
    }

    /// The shard's inputs, if it is due and all are here. It counts as being worked on from then on.
    pub(super) fn ready(&mut self, log: &Log, number: u32) -> Option<Ready> {
        let (closed, round) = (log.closed()?, log.round());
        let shard = self.shards.get_mut(&number).filter(|shard| shard.working != Some(round))?;
        if closed.published.get(number as usize)?.is_some() {
            return None;
        }
        let input = |(entry, contribution): &(Entry, gradwire_proto::rounds::Contribution)| {
            shard.parts.get(&(*entry, contribution.id))?.whole.clone()
        };
        let inputs = closed.entries.iter().map(input).collect::<Option<Vec<_>>>()?;
        shard.working = Some(round);
        Some(Ready { round, shard: number, digest: closed.digest(), inputs })
    }

    /// Numbers of the shards that are held.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.shards.keys().copied().collect()
    }

    /// The log has changed in a way that may have settled what is held of this shard, or of all of them.
    pub(super) fn review(&mut self, log: &Log, only: Option<u32>) {
        let numbers = only.map_or_else(|| self.numbers(), |shard| vec![shard]);
        for number in numbers {
            let Some(shard) = self.shards.get_mut(&number) else { continue };
            if shard.working.is_some_and(|round| !is_due(log, round, number)) {
                shard.working = None;
                shard.stall = STALL_MIN;
            }
            let parts: Vec<_> = shard.parts.keys().copied().collect();
            self.review_parts(log, number, parts);
        }
        self.make_use_of_room(log);
    }

    /// The log has heard of a contribution: what is held of it, and of other attempts, may be settled.
    pub(super) fn review_entry(&mut self, log: &Log, entry: Entry) {
        for number in self.numbers() {
            let Some(shard) = self.shards.get(&number) else { continue };
            let of_entry = shard.parts.range((entry, [0; 16])..=(entry, [u8::MAX; 16]));
            let parts: Vec<_> = of_entry.map(|(key, _)| *key).collect();
            self.review_parts(log, number, parts);
        }
    }

    fn review_parts(&mut self, log: &Log, number: u32, parts: Vec<(Entry, ContributionId)>) {
        for (entry, id) in parts {
            let part = self.shards.get(&number).and_then(|shard| shard.parts.get(&(entry, id)));
            let Some(crc) = part.map(|part| part.header.crc) else { continue };
            match log.standing(entry, id, number) {
                Standing::Done => {}
                Standing::Never => self.discard(log, entry, id),
                Standing::Needed | Standing::Waiting if log.crc(entry, number).is_none_or(|known| known == crc) => {
                    continue;
                }
                Standing::Needed | Standing::Waiting => {
                    self.reject(entry, "data of another checksum than it announced");
                }
            }
            let dropped = self.drop_part(number, (entry, id));
            self.acks.extend(dropped);
        }
    }

    /// Another aggregator has subscribed: some of what is held may be its own now. Everything that is not being worked on
    /// goes back, since the broker gives it nothing of a shard as long as anything of that is held here.
    pub(super) fn hand_back_all(&mut self, log: &Log) {
        for number in self.numbers() {
            self.hand_back(log, number);
        }
        self.asked.clear();
        self.nack_forgotten(|_| true);
    }

    /// Shards that are due and do not move go back: the rest of them may be held by another aggregator, or for it.
    pub(super) fn hand_back_stalled(&mut self, log: &Log, now: Instant) {
        for number in self.numbers() {
            if self.stalls_at(log, number).is_some_and(|at| at <= now) {
                self.hand_back(log, number);
                if let Some(shard) = self.shards.get_mut(&number) {
                    shard.stall = (shard.stall * 2).min(STALL_MAX);
                    shard.moved = now;
                }
                self.nack_forgotten(|(_, shard)| *shard == number);
            }
        }
        self.make_use_of_room(log);
    }

    /// When [`Hold::hand_back_stalled`] should be called.
    pub(super) fn stalls_next(&self, log: &Log) -> Option<Instant> {
        log.closed()?;
        self.shards.keys().filter_map(|number| self.stalls_at(log, *number)).min()
    }

    fn stalls_at(&self, log: &Log, number: u32) -> Option<Instant> {
        let shard = self.shards.get(&number)?;
        let due = is_due(log, log.round(), number) && shard.working != Some(log.round()) && !shard.parts.is_empty();
        let patient = shard.moved + shard.stall * STALL_BUSY;
        due.then(|| (shard.moved + shard.stall).max(self.moved + IDLE).min(patient))
    }

    fn hand_back(&mut self, log: &Log, number: u32) {
        let Some(shard) = self.shards.get(&number) else { return };
        let working = shard.working == Some(log.round());
        let back: Vec<_> = shard
            .parts
            .keys()
            .filter(|(entry, id)| !working || log.standing(*entry, *id, number) != Standing::Needed)
            .copied()
            .collect();
        for part in back {
            let dropped = self.drop_part(number, part);
            self.counters.handed_back += dropped.len() as u64;
            self.nacks.extend(dropped);
        }
    }

    /// Forgets a part; gives its messages.
    fn drop_part(&mut self, number: u32, key: (Entry, ContributionId)) -> Vec<MessageIdData> {
        self.collector.forget(&(number, key.0, key.1));
        let Some(part) = self.shards.get_mut(&number).and_then(|shard| shard.parts.remove(&key)) else {
            return Vec::new();
        };
        self.bytes -= part.header.bytes as usize;
        part.messages.into_values().collect()
    }

    /// Makes room for data of this group: what is due later is forgotten. False if it does not fit.
    fn make_room(&mut self, log: &Log, group: Group, bytes: usize) -> bool {
        while self.bytes + bytes > self.bytes_max {
            let last = self.shards.iter().rev().flat_map(|(number, shard)| {
                let free = shard.working != Some(log.round());
                shard.parts.keys().filter(move |_| free).map(|key| ((key.0.origin.max(log.round()), *number), *key))
            });
            let Some((latest, key)) = last.max().filter(|(latest, _)| *latest > group) else { break };
            let dropped = self.drop_part(latest.1, key);
            self.forgotten.entry(latest).or_default().extend(dropped);
        }
        self.bytes + bytes <= self.bytes_max || self.is_first(log, group)
    }

    /// Whether nothing that is held or forgotten is due before this.
    fn is_first(&self, log: &Log, group: Group) -> bool {
        let free = |shard: &Shard| shard.working != Some(log.round());
        let held =
            self.shards.iter().filter(|(_, shard)| free(shard)).flat_map(|(number, shard)| {
                shard.parts.keys().map(|(entry, _)| (entry.origin.max(log.round()), *number))
            });
        let first = held.chain(self.forgotten.keys().copied()).chain(self.asked.iter().copied()).min();
        first.is_none_or(|first| group <= first)
    }

    /// Asks for forgotten messages again, as far as there is room for what they belong to.
    fn make_use_of_room(&mut self, log: &Log) {
        let Some(open) = log.open() else { return };
        self.asked
            .retain(|(round, shard)| *round > log.round() || log.closed().is_none() || is_due(log, *round, *shard));
        while let Some(group) = self.forgotten.keys().next().copied() {
            let whole = |group: &Group| open.contributors as usize * open.shard_bytes(group.1);
            let kept: usize =
                self.asked.iter().map(|asked| whole(asked).saturating_sub(self.held_bytes(*asked, log))).sum();
            if self.bytes + kept + whole(&group) > self.bytes_max && !self.is_first(log, group) {
                return;
            }
            self.asked.insert(group);
            self.nack_forgotten(|other| *other == group);
        }
    }

    fn held_bytes(&self, (round, number): Group, log: &Log) -> usize {
        let parts = self.shards.get(&number).into_iter().flat_map(|shard| &shard.parts);
        let of_round = parts.filter(|((entry, _), _)| entry.origin.max(log.round()) == round);
        of_round.map(|(_, part)| part.header.bytes as usize).sum()
    }

    fn nack_forgotten(&mut self, such: impl Fn(&Group) -> bool) {
        let groups: Vec<Group> = self.forgotten.keys().filter(|group| such(group)).copied().collect();
        for group in groups {
            let messages = self.forgotten.remove(&group).unwrap_or_default();
            self.counters.handed_back += messages.len() as u64;
            self.nacks.extend(messages);
        }
    }

    /// A contribution will never count: told once.
    fn discard(&mut self, log: &Log, entry: Entry, id: ContributionId) {
        // Of another attempt that counts, nobody need hear.
        if log.contribution(entry).is_some() || self.discarded.contains(&(entry, id)) {
            return;
        }
        if self.discarded.len() == DISCARDED_MAX {
            self.discarded.pop_front();
        }
        self.discarded.push_back((entry, id));
        self.counters.late += 1;
        self.events.push(Event::Late(entry));
    }

    fn reject(&mut self, entry: Entry, what: &'static str) {
        self.events.push(Event::Rejected(entry, what));
    }
}

/// Whether a shard's result is what the log waits for.
fn is_due(log: &Log, round: Round, shard: u32) -> bool {
    log.round() == round
        && log.closed().is_some_and(|closed| closed.published.get(shard as usize).is_some_and(Option::is_none))
}

#[cfg(test)]
#[path = "hold_tests.rs"]
mod tests;
