//! A contributor: gives its part of each round, and takes the result.

use std::collections::BTreeMap;
use std::rc::Rc;

use gradwire_codec::{crc32, pack, unpack};
use gradwire_proto::rounds::{Body as RoundsBody, ContributionId, Entry, Open};
use gradwire_proto::{DType, Fault, FaultKind, Rank, Round, WireFormat};

use super::{Follower, Outbox, contribution};
use crate::broker::{Body, Record, Topic};
use crate::event::{Nanos, US};
use crate::plan::Plan;
use crate::process::{Context, Identity, Incoming, Out, Program};
use crate::report::{Part, Report};

/// What a record without a receipt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Shard,
    Word,
}

#[derive(Debug)]
pub(crate) struct Contributor {
    me: Identity,
    follower: Follower,
    outbox: Outbox<Tag>,
    /// The log was read to what was its end.
    caught_up: bool,
    opened: bool,
    /// The round that it gives its part of, or waits for the result of.
    round: Round,
    state: State,
    /// Results of this round and later ones, by round and shard: digest and data.
    results: BTreeMap<(u64, u32), Vec<Found>>,
    ended: bool,
}

/// A result of a shard: digest and data.
type Found = (u32, Rc<[u8]>);

#[derive(Debug)]
enum State {
    /// Computes until then.
    Computing(Nanos),
    /// Its data is on the way to the broker.
    Giving { id: ContributionId, crcs: Vec<u32>, by: Nanos },
    /// Waits for the result until then.
    Waiting(Nanos),
}

impl Contributor {
    pub(crate) fn new(me: Identity) -> Self {
        let round = Round(me.stored.unwrap_or(0) + 1);
        Self {
            me,
            follower: Follower::default(),
            outbox: Outbox::new(),
            caught_up: false,
            opened: false,
            round,
            state: State::Computing(0),
            results: BTreeMap::new(),
            ended: false,
        }
    }

    fn take(&mut self, context: &mut Context<'_>, incoming: Incoming) {
        match incoming {
            Incoming::BrokerUp => self.outbox.link_opened(),
            Incoming::BrokerDown => self.outbox.link_lost(),
            Incoming::CaughtUp if !self.caught_up => {
                self.caught_up = true;
                // Who was started again without a disk goes on with the round that is current.
                if self.me.stored.is_none() {
                    self.round = self.follower.log.round();
                }
                self.compute(context);
            }
            Incoming::Record { topic: Topic::Rounds, place, record } => {
                self.follower.take(context, place, &record);
            }
            Incoming::Record { topic: Topic::Results, record, .. } => {
                if let Body::Data { round, shard, digest, bytes, .. } = record.body
                    && round >= self.round.0
                {
                    let known = self.results.entry((round, shard)).or_default();
                    if !known.iter().any(|(other, data)| *other == digest && *data == bytes) {
                        known.push((digest, bytes));
                    }
                }
            }
            Incoming::Receipt { token, .. } => {
                let taken = self.outbox.receipt(token);
                if taken == Some(Tag::Shard) {
                    self.tell_if_given(context);
                }
            }
            _ => {}
        }
    }

    fn compute(&mut self, context: &mut Context<'_>) {
        let compute = context.plan.compute_us * US;
        self.state = State::Computing(context.now + compute + context.some(compute / 4 + 1));
    }

    /// Computing is over: hands the contribution over, if it can still count.
    fn give(&mut self, context: &mut Context<'_>) {
        let plan = self.me.plan.clone();
        let by = context.now + plan.deadline_ns();
        context.report(Report::RoundPosted { round: self.round.0, by });
        let entry = Entry { contributor: Rank(self.me.place), origin: self.round };
        if self.follower.log.contribution(entry).is_some() || !self.follower.log.accepts(self.round) {
            self.state = State::Waiting(by);
            return;
        }
        let Some(open) = open_of(&plan) else { return };
        if !self.opened && self.follower.log.open().is_none() {
            self.opened = true;
            self.outbox.say(context, self.me.place, &RoundsBody::Open(open), Tag::Word);
        }
        let id = context.unique();
        let part = Part { contributor: self.me.place, origin: self.round.0, attempt: id };
        let values = contribution(&plan, &part);
        let mut crcs = Vec::new();
        for shard in 0..open.shards() {
            let data = wire_of(&plan, &values, open.range(shard));
            crcs.push(crc32(&data));
            let body = Body::Data { round: self.round.0, shard, attempt: id, digest: 0, bytes: data.into() };
            let record = Record { id: context.unique(), rank: self.me.place, key: shard, body };
            self.outbox.push(Topic::Updates, record, Tag::Shard);
        }
        self.state = State::Giving { id, crcs, by };
    }

    /// Says that it contributed, once every shard has its receipt.
    fn tell_if_given(&mut self, context: &mut Context<'_>) {
        let left = self.outbox.pending.iter().any(|pending| pending.tag == Tag::Shard);
        let State::Giving { id, crcs, by } = &self.state else { return };
        if left {
            return;
        }
        let body = RoundsBody::Contributed { round: self.round, contribution: *id, crcs: crcs.as_slice().into() };
        let by = *by;
        self.outbox.say(context, self.me.place, &body, Tag::Word);
        self.state = State::Waiting(by);
    }

    /// The whole result of this round, if it is complete and here.
    fn result(&self) -> Option<Vec<u8>> {
        let complete = self.follower.log.complete(self.round)?;
        let plan = &self.me.plan;
        let tensor = plan.tensors[0];
        let (dtype, wire) = (DType::F32, wire_dtype(plan));
        let mut native = Vec::new();
        for (shard, published) in (0..).zip(&complete.published) {
            let known = self.results.get(&(self.round.0, shard))?;
            let (_, data) =
                known.iter().find(|(digest, data)| *digest == complete.digest && crc32(data) == published.crc)?;
            let start = native.len();
            native.resize(start + data.len() / wire.size() * dtype.size(), 0);
            unpack(wire, dtype, data, &mut native[start..]).ok()?;
        }
        (native.len() as u64 == tensor.elements * dtype.size() as u64).then_some(native)
    }

    fn advance(&mut self, context: &mut Context<'_>) {
        let (State::Giving { by, .. } | State::Waiting(by)) = &self.state else {
            if let State::Computing(until) = self.state
                && self.caught_up
                && until <= context.now
            {
                self.give(context);
            }
            return;
        };
        let by = *by;
        if let Some(bytes) = self.result() {
            context.report(Report::RoundCompleted { round: self.round.0, bytes: bytes.into() });
            context.out.push(Out::Store { step: self.round.0 });
            self.results.retain(|(round, _), _| *round > self.round.0);
            self.round = self.round.next();
            if self.round.0 > u64::from(context.plan.steps) {
                self.end(context, Ok(()));
            } else {
                self.compute(context);
            }
        } else if by <= context.now {
            let detail = "the round had no result before its deadline: too few contributors, or no aggregator";
            let fault = Fault::new(FaultKind::DeadlineExceeded, detail).at(Rank(self.me.place));
            context.report(Report::RoundFailed { round: self.round.0, fault: fault.clone() });
            self.end(context, Err(fault));
        }
    }

    fn end(&mut self, context: &mut Context<'_>, result: Result<(), Fault>) {
        self.ended = true;
        context.report(Report::Ended(result));
    }
}

impl Program for Contributor {
    fn run(&mut self, context: &mut Context<'_>, incoming: &mut Vec<Incoming>) -> Option<Nanos> {
        if self.round.0 > u64::from(context.plan.steps) && !self.ended {
            // It was started again after its last round.
            self.end(context, Ok(()));
        }
        for one in incoming.drain(..) {
            if !self.ended {
                self.take(context, one);
            }
        }
        if self.ended {
            return None;
        }
        self.advance(context);
        self.outbox.flush(context);
        match self.state {
            State::Computing(until) => self.caught_up.then_some(until),
            State::Giving { by, .. } | State::Waiting(by) => Some(by),
        }
    }

    fn has_ended(&self) -> bool {
        self.ended
    }
}

/// How the plan's job is run.
pub(super) fn open_of(plan: &Plan) -> Option<Open> {
    let federated = plan.federated?;
    let tensor = plan.tensors.first()?;
    Some(Open {
        contributors: plan.ranks,
        quorum: federated.quorum,
        late: federated.late(),
        wire: tensor.wire.into(),
        op: tensor.reduce.into(),
        shard_elements: federated.shard_elements,
        elements: tensor.elements,
    })
}

pub(super) fn wire_dtype(plan: &Plan) -> DType {
    let wire: WireFormat = plan.tensors[0].wire.into();
    wire.wire_dtype(DType::F32)
}

/// A range of elements as they travel.
fn wire_of(plan: &Plan, values: &[u8], range: std::ops::Range<usize>) -> Vec<u8> {
    let (dtype, wire) = (DType::F32, wire_dtype(plan));
    let native = &values[range.start * dtype.size()..range.end * dtype.size()];
    let mut packed = vec![0; range.len() * wire.size()];
    // The lengths fit, and f32 can travel as any wire type.
    let _ = pack(dtype, wire, native, &mut packed);
    packed
}
