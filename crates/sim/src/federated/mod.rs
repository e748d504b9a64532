//! The federated mode: contributors and aggregators that share nothing but the broker. `gradwire_proto::rounds::Log`
//! decides what is added up, as it does in the product; the rest follows `crates/control/src/federated`.
//!
//! Left out: pieces (a shard is one message here), bounds of memory with their handing back, MACs and audit records.

mod aggregator;
mod contributor;

use std::collections::VecDeque;
use std::rc::Rc;

use gradwire_proto::DType;
use gradwire_proto::rounds::{Body as RoundsBody, Change, Log};

pub(crate) use aggregator::Aggregator;
pub(crate) use contributor::Contributor;

use crate::broker::{Body, Record, Topic};
use crate::plan::Plan;
use crate::process::{Context, Out};
use crate::report::{Part, Report};
use crate::workload;

/// The values of a contribution, as native elements.
pub(crate) fn contribution(plan: &Plan, part: &Part) -> Vec<u8> {
    let tensor = plan.tensors[0];
    let dtype: DType = tensor.dtype.into();
    let attempt = part.attempt.iter().fold(0u64, |hash, byte| hash.rotate_left(7) ^ u64::from(*byte));
    let contribution =
        workload::Contribution { seed: plan.seed, process: part.contributor, attempt, step: part.origin, tensor: 0 };
    let mut values = vec![0; tensor.elements as usize * dtype.size()];
    contribution.fill(&tensor, &mut values);
    values
}

/// The log of rounds as far as it was read: each message counts once, in order, however often it comes.
#[derive(Debug, Default)]
struct Follower {
    log: Log,
    next: usize,
}

impl Follower {
    /// Applies a message that was not applied before. Reports whose entries are decided.
    fn take(&mut self, context: &mut Context<'_>, place: usize, record: &Record) -> Option<(RoundsBody, Change)> {
        if place != self.next {
            return None;
        }
        self.next += 1;
        let Body::Bytes(kind, bytes) = &record.body else { return None };
        let Ok(Some(body)) = RoundsBody::decode(*kind, bytes) else { return None };
        let change = self.log.apply(gradwire_proto::Rank(record.rank), &body);
        if change == Change::Closed
            && let Some(closed) = self.log.closed()
        {
            let parts: Rc<[Part]> = (closed.entries.iter())
                .map(|(entry, contribution)| Part {
                    contributor: entry.contributor.0,
                    origin: entry.origin.0,
                    attempt: contribution.id,
                })
                .collect();
            let round = self.log.round().0;
            context.report(Report::RoundClosed { round, parts });
        }
        Some((body, change))
    }
}

/// Records without a receipt. They are sent again over each new link, in order and with the same ids.
#[derive(Debug)]
struct Outbox<T> {
    pending: VecDeque<Pending<T>>,
    linked: bool,
    tokens: u64,
}

#[derive(Debug)]
struct Pending<T> {
    topic: Topic,
    record: Record,
    tag: T,
    token: Option<u64>,
}

impl<T> Outbox<T> {
    const fn new() -> Self {
        Self { pending: VecDeque::new(), linked: false, tokens: 0 }
    }

    fn link_opened(&mut self) {
        self.linked = true;
        self.pending.iter_mut().for_each(|pending| pending.token = None);
    }

    fn link_lost(&mut self) {
        self.linked = false;
    }

    fn push(&mut self, topic: Topic, record: Record, tag: T) {
        self.pending.push_back(Pending { topic, record, tag, token: None });
    }

    /// A record of the log of rounds.
    fn say(&mut self, context: &mut Context<'_>, rank: u32, body: &RoundsBody, tag: T) {
        let id = context.unique();
        let body = Body::Bytes(body.kind(), Rc::from(body.encode()));
        self.push(Topic::Rounds, Record { id, rank, key: 0, body }, tag);
    }

    fn flush(&mut self, context: &mut Context<'_>) {
        if !self.linked {
            return;
        }
        for pending in self.pending.iter_mut().filter(|pending| pending.token.is_none()) {
            self.tokens += 1;
            pending.token = Some(self.tokens);
            let record = pending.record.clone();
            context.out.push(Out::Append { topic: pending.topic, token: self.tokens, record });
        }
    }

    /// What got its receipt.
    fn receipt(&mut self, token: u64) -> Option<T> {
        let at = self.pending.iter().position(|pending| pending.token == Some(token))?;
        self.pending.remove(at).map(|pending| pending.tag)
    }
}
