//! Results on their way: added up, published piece by piece, and then said to be there.

use std::collections::VecDeque;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesOrdered, FuturesUnordered};
use gradwire_proto::rounds::{Body, Open, Published};
use gradwire_proto::{DType, Fault, FaultKind, Rank, Round};
use pulsar::producer::Message;
use pulsar::{Producer, TokioExecutor};

use super::hold::Ready;
use crate::federated::bulk::{Outgoing, ResultPiece};
use crate::federated::{BULK_RECEIPT_MAX, BYTES_IN_FLIGHT_MAX};
use crate::link::{LinkError, Position, receipt_place, send};
use crate::record::{Header, Instance, RECORD_VERSION, RecordKey};
use crate::worker::random_id;

/// Most shards that are added up at the same time.
const REDUCTIONS_MAX: usize = 2;

/// Who writes records.
#[derive(Clone, Debug)]
pub(super) struct Author {
    pub(super) key: RecordKey,
    pub(super) instance: Instance,
    pub(super) rank: Rank,
}

impl Author {
    /// A record with a new id.
    pub(super) fn seal(&self, kind: u16, body: &[u8]) -> Vec<u8> {
        let (instance, rank) = (self.instance, self.rank);
        self.key.seal(Header { version: RECORD_VERSION, kind, instance, id: random_id(), rank }, body)
    }
}

/// What is being added up and published over one link.
pub(super) struct Publishing {
    ready: VecDeque<Ready>,
    reducing: FuturesUnordered<BoxFuture<'static, Result<Reduced, Fault>>>,
    sending: VecDeque<Sending>,
    receipts: FuturesOrdered<BoxFuture<'static, PieceReceipt>>,
    bytes_in_flight: usize,
    piece_bytes: usize,
}

/// How many bytes a piece had, and where it is.
type PieceReceipt = Result<(usize, Option<Position>), LinkError>;

/// A shard's sum, not yet sent.
#[derive(Debug)]
pub(super) struct Reduced {
    round: Round,
    shard: u32,
    digest: u32,
    data: Vec<u8>,
}

/// A result on its way.
#[derive(Debug)]
struct Sending {
    round: Round,
    shard: u32,
    digest: u32,
    crc: u32,
    outgoing: Outgoing,
    first: Option<Position>,
}

/// What happened to results.
pub(super) enum Progress {
    /// A sum is made.
    Reduced(Reduced),
    /// A piece has its receipt. With it all of a result may have: then this is to be said.
    Receipt(Option<Body>),
}

impl Publishing {
    pub(super) fn new(piece_bytes: usize) -> Self {
        Self {
            ready: VecDeque::new(),
            reducing: FuturesUnordered::new(),
            sending: VecDeque::new(),
            receipts: FuturesOrdered::new(),
            bytes_in_flight: 0,
            piece_bytes,
        }
    }

    /// A shard is to be added up.
    pub(super) fn add(&mut self, open: &Open, ready: Ready) {
        self.ready.push_back(ready);
        self.reduce_some(open);
    }

    fn reduce_some(&mut self, open: &Open) {
        while self.reducing.len() < REDUCTIONS_MAX
            && let Some(ready) = self.ready.pop_front()
        {
            let open = *open;
            let task = tokio::task::spawn_blocking(move || reduce(&open, &ready));
            self.reducing.push(Box::pin(async move {
                task.await.unwrap_or_else(|error| {
                    Err(Fault::new(FaultKind::System, format!("adding up a shard ended unexpectedly: {error}")))
                })
            }));
        }
    }

    /// Waits until something happens; for ever, where nothing is under way.
    pub(super) async fn next(&mut self) -> Result<Progress, super::worker::Lost> {
        tokio::select! {
            Some(reduced) = self.reducing.next() => Ok(Progress::Reduced(reduced?)),
            Some(receipt) = self.receipts.next() => {
                let (bytes, place) = receipt?;
                Ok(Progress::Receipt(self.received(bytes, place)))
            }
            else => std::future::pending().await,
        }
    }

    /// Queues a sum to be sent.
    pub(super) fn publish(&mut self, open: &Open, reduced: Reduced) {
        let Reduced { round, shard, digest, data } = reduced;
        let all = 0..data.len();
        let outgoing = Outgoing::new(data, [(shard, all)], self.piece_bytes);
        let crc = outgoing.crcs().first().copied().unwrap_or_default();
        self.sending.push_back(Sending { round, shard, digest, crc, outgoing, first: None });
        self.reduce_some(open);
    }

    /// Sends what may be sent now.
    pub(super) async fn send(
        &mut self,
        author: &Author,
        results: &mut Producer<TokioExecutor>,
    ) -> Result<(), LinkError> {
        for sending in &mut self.sending {
            while self.bytes_in_flight < BYTES_IN_FLIGHT_MAX {
                let Some((shard, header, data)) = sending.outgoing.next() else { break };
                let (round, digest) = (sending.round, sending.digest);
                let body = ResultPiece { round, shard, digest, header, data }.encode();
                let payload = author.seal(Body::RESULT, &body);
                let bytes = payload.len();
                let message = Message { payload, partition_key: Some(shard.to_string()), ..Default::default() };
                let sent = send(results, message).await?;
                self.bytes_in_flight += bytes;
                self.receipts.push_back(Box::pin(async move {
                    receipt_place(sent, BULK_RECEIPT_MAX).await.map(|place| (bytes, place))
                }));
            }
            if !sending.outgoing.is_sent() {
                break;
            }
        }
        Ok(())
    }

    /// The oldest piece that was sent has its receipt.
    fn received(&mut self, bytes: usize, place: Option<Position>) -> Option<Body> {
        self.bytes_in_flight -= bytes;
        let sending = self.sending.front_mut()?;
        sending.outgoing.settle();
        // A broker that does not say where: then readers look from the start.
        sending.first = sending.first.or(place).or(Some(Position { ledger: 0, entry: 0 }));
        if !sending.outgoing.is_settled() {
            return None;
        }
        let Sending { round, shard, crc, first, .. } = self.sending.pop_front()?;
        let Position { ledger, entry } = first?;
        Some(Body::Published { round, shard, result: Published { crc, ledger, entry } })
    }
}

/// Adds up in the order of the entries, in fp32; divides once where the mean is wanted; rounds once to what travels.
fn reduce(open: &Open, ready: &Ready) -> Result<Reduced, Fault> {
    let wire = open.wire_dtype();
    let count = ready.inputs.len() as u32;
    let mut data = vec![0; open.shard_bytes(ready.shard)];
    let reduction = gradwire_codec::Reduction::new(DType::F32, wire, open.op, count)?;
    let outputs = gradwire_codec::Outputs { wire: Some(&mut data), native: None };
    reduction.run(|index| gradwire_codec::Input::Wire(&ready.inputs[index]), outputs)?;
    Ok(Reduced { round: ready.round, shard: ready.shard, digest: ready.digest, data })
}
