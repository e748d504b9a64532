//! An aggregator: consumes contributions, adds up what the log says, publishes, and only then acknowledges.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use gradwire_codec::{Input, Outputs, Reduction, crc32};
use gradwire_proto::rounds::{Body as RoundsBody, Change, ContributionId, Entry, Published, Standing};
use gradwire_proto::{DType, Rank, Round};

use super::contributor::wire_dtype;
use super::{Follower, Outbox};
use crate::broker::{Body, Record, Topic};
use crate::event::{MS, Nanos, SECOND};
use crate::mutation::Mutation;
use crate::process::{Context, Identity, Incoming, Out, Program};
use crate::report::Report;

/// How long a round waits for more contributions than it needs.
const CLOSE_AFTER: Nanos = 30 * MS;
/// A shard that is due and does not move is handed back after this long; twice as long the next time.
const STALL_MIN: Nanos = 100 * MS;
const STALL_MAX: Nanos = 2 * SECOND;

/// What a record without a receipt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Word,
    Result { round: Round, shard: u32, crc: u32 },
}

/// An update that is held: where it is in the topic, and its data.
#[derive(Clone, Debug)]
struct Held {
    places: Vec<usize>,
    data: Rc<[u8]>,
}

#[derive(Debug)]
pub(crate) struct Aggregator {
    me: Identity,
    follower: Follower,
    outbox: Outbox<Tag>,
    held: BTreeMap<(u32, Entry, ContributionId), Held>,
    /// Shards whose result was handed to the broker.
    working: BTreeSet<(u64, u32)>,
    /// When the current round was first contributed to, and when it was last proposed to close it.
    first_at: Option<Nanos>,
    close_at: Option<Nanos>,
    /// Since when nothing moves, and how long that may be.
    moved_at: Nanos,
    stall: Nanos,
    /// When the log last changed.
    news_at: Nanos,
    ended: bool,
}

impl Aggregator {
    pub(crate) fn new(me: Identity) -> Self {
        Self {
            me,
            follower: Follower::default(),
            outbox: Outbox::new(),
            held: BTreeMap::new(),
            working: BTreeSet::new(),
            first_at: None,
            close_at: None,
            moved_at: 0,
            stall: STALL_MIN,
            news_at: 0,
            ended: false,
        }
    }

    fn take(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        match incoming {
            Incoming::BrokerUp => self.outbox.link_opened(),
            Incoming::CaughtUp => {
                context.out.push(Out::Subscribe);
                let body = RoundsBody::AggregatorJoined { aggregator: self.me.join };
                self.outbox.say(context, u32::MAX, &body, Tag::Word);
            }
            Incoming::BrokerDown => {
                self.outbox.link_lost();
                // The broker gives them to whoever is there.
                self.held.clear();
            }
            Incoming::Record { topic: Topic::Rounds, place, record } => {
                if let Some((body, change)) = self.follower.take(context, place, &record) {
                    self.heed(context, &body, change);
                }
            }
            Incoming::Record { topic: Topic::Updates, place, record } => self.hold(context, place, record),
            Incoming::Receipt { token, place } => {
                if let Some(Tag::Result { round, shard, crc }) = self.outbox.receipt(token)
                    && let Some(number) = self.follower.log.aggregator(self.me.join)
                {
                    let result = Published { crc, ledger: 0, entry: place as u64 };
                    self.outbox.say(context, number.0, &RoundsBody::Published { round, shard, result }, Tag::Word);
                }
            }
            _ => {}
        }
    }

    /// The log has changed.
    fn heed(&mut self, context: &mut Context<'_>, body: &RoundsBody, change: Change) {
        self.news_at = context.now;
        match change {
            Change::Contributed(_) => _ = self.first_at.get_or_insert(context.now),
            Change::Closed | Change::Complete(_) => {
                self.first_at = self.follower.log.arrived().next().map(|_| context.now);
                self.close_at = None;
                self.moved_at = context.now;
                self.stall = STALL_MIN;
            }
            Change::Aggregator(_) => {
                if let RoundsBody::AggregatorJoined { aggregator } = body
                    && *aggregator != self.me.join
                {
                    // Some keys are its from now on: the broker waits until they are let go of.
                    self.hand_back(context, |_| true);
                }
            }
            _ => {}
        }
    }

    fn hold(&mut self, context: &mut Context<'_>, place: usize, record: Record) {
        let Body::Data { round, shard, attempt, bytes, .. } = record.body else { return };
        let entry = Entry { contributor: Rank(record.rank), origin: Round(round) };
        self.moved_at = context.now;
        let held = self.held.entry((shard, entry, attempt)).or_insert_with(|| Held { places: Vec::new(), data: bytes });
        if !held.places.contains(&place) {
            held.places.push(place);
        }
    }

    /// Acknowledges what is done, or can never count.
    fn acknowledge(&mut self, context: &mut Context<'_>) {
        let log = &self.follower.log;
        let settled: Vec<_> = (self.held.keys().copied())
            .filter(|(shard, entry, id)| matches!(log.standing(*entry, *id, *shard), Standing::Done | Standing::Never))
            .collect();
        for key in settled {
            for place in self.held.remove(&key).map(|held| held.places).unwrap_or_default() {
                context.out.push(Out::Settle { place, back: false });
            }
        }
    }

    /// Hands back what is held for these shards, but for those whose result is under way.
    fn hand_back(&mut self, context: &mut Context<'_>, of: impl Fn(u32) -> bool) {
        let round = self.follower.log.round().0;
        let working = &self.working;
        let back: Vec<_> =
            self.held.keys().copied().filter(|(shard, ..)| of(*shard) && !working.contains(&(round, *shard))).collect();
        for key in back {
            for place in self.held.remove(&key).map(|held| held.places).unwrap_or_default() {
                context.out.push(Out::Settle { place, back: true });
            }
        }
    }

    /// Adds up the shards of which every entry is here.
    fn add_up(&mut self, context: &mut Context<'_>) {
        let log = &self.follower.log;
        let (Some(open), Some(closed)) = (log.open().copied(), log.closed()) else { return };
        let round = log.round();
        let mut ready = Vec::new();
        for shard in (0..open.shards()).filter(|shard| closed.published[*shard as usize].is_none()) {
            if self.working.contains(&(round.0, shard)) {
                continue;
            }
            let data = closed.entries.iter().map(|(entry, contribution)| {
                let held = self.held.get(&(shard, *entry, contribution.id))?;
                (crc32(&held.data) == contribution.crcs[shard as usize]).then(|| held.data.clone())
            });
            let data: Vec<Option<Rc<[u8]>>> = data.collect();
            let any = data.iter().any(Option::is_some);
            if data.iter().all(Option::is_some) || any && context.has(Mutation::AddWhatIsHere) {
                ready.push((shard, data.into_iter().flatten().collect::<Vec<_>>(), closed.digest()));
            }
        }
        let Some(number) = log.aggregator(self.me.join) else { return };
        for (shard, inputs, digest) in ready {
            let wire = wire_dtype(&self.me.plan);
            let mut result = vec![0; open.shard_bytes(shard)];
            let reduction = Reduction::new(DType::F32, wire, open.op, inputs.len() as u32);
            let outputs = Outputs { wire: Some(&mut result), native: None };
            if reduction.and_then(|reduction| reduction.run(|at| Input::Wire(&inputs[at]), outputs)).is_err() {
                continue;
            }
            self.moved_at = context.now;
            self.working.insert((round.0, shard));
            let crc = crc32(&result);
            let body = Body::Data { round: round.0, shard, attempt: self.me.join, digest, bytes: result.into() };
            let record = Record { id: context.unique(), rank: number.0, key: shard, body };
            self.outbox.push(Topic::Results, record, Tag::Result { round, shard, crc });
        }
        self.working.retain(|(of, _)| *of >= round.0);
    }

    fn propose(&mut self, context: &mut Context<'_>) {
        let due = self.first_at.map(|at| at + CLOSE_AFTER).filter(|_| self.follower.log.has_quorum());
        let (Some(due), Some(number)) = (due, self.follower.log.aggregator(self.me.join)) else { return };
        if due <= context.now && self.close_at.is_none_or(|at| at + SECOND <= context.now) {
            self.close_at = Some(context.now);
            let proposal = self.follower.log.proposal();
            self.outbox.say(context, number.0, &proposal, Tag::Word);
        }
    }

    /// A shard that does not move may be another's: lets go of it.
    fn check_stall(&mut self, context: &mut Context<'_>) {
        if self.follower.log.closed().is_some() && self.moved_at + self.stall <= context.now {
            self.moved_at = context.now;
            self.stall = (self.stall * 2).min(STALL_MAX);
            self.hand_back(context, |_| true);
        }
    }

    fn give_up_at(&self, context: &Context<'_>) -> Nanos {
        self.news_at + 2 * context.plan.deadline_ns()
    }
}

impl Program for Aggregator {
    fn run(&mut self, context: &mut Context<'_>, incoming: &mut Vec<Incoming>) -> Option<Nanos> {
        for one in incoming.drain(..) {
            self.take(context, one);
        }
        self.add_up(context);
        self.acknowledge(context);
        self.propose(context);
        self.check_stall(context);
        self.outbox.flush(context);
        let over = self.follower.log.round().0 > u64::from(context.plan.steps) && self.outbox.pending.is_empty();
        // An aggregator serves as long as it is let; here it ends where nobody needs it any more.
        if over || self.give_up_at(context) <= context.now {
            self.ended = true;
            context.report(Report::Ended(Ok(())));
            return None;
        }
        let close = self
            .first_at
            .filter(|_| self.follower.log.has_quorum())
            .map(|at| self.close_at.map_or(at + CLOSE_AFTER, |proposed| proposed + SECOND));
        let stall = self.follower.log.closed().map(|_| self.moved_at + self.stall);
        [close, stall, Some(self.give_up_at(context))].into_iter().flatten().min()
    }

    fn has_ended(&self) -> bool {
        self.ended
    }
}
