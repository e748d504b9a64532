//! What an aggregator has open at the broker, what it holds and does over it, and what it takes for a contribution.

use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use gradwire_proto::Round;
use gradwire_proto::rounds::{Body, Entry, Open};
use pulsar::consumer::Message as Received;
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{Consumer, Producer, TokioExecutor};
use tokio::time::Instant;

use super::hold::Hold;
use super::publish::{Author, Publishing};
use crate::federated::bulk::Update;
use crate::link::{LinkError, receipt, send};
use crate::record::RECORD_VERSION;

/// What is open at the broker.
pub(super) struct Link {
    pub(super) log: Reader<Vec<u8>, TokioExecutor>,
    pub(super) updates: Consumer<Vec<u8>, TokioExecutor>,
    pub(super) topic: String,
    pub(super) results: Producer<TokioExecutor>,
    pub(super) rounds: Producer<TokioExecutor>,
    pub(super) versions: Producer<TokioExecutor>,
    pub(super) audit: Producer<TokioExecutor>,
    pub(super) hold: Hold,
    pub(super) publishing: Publishing,
    pub(super) receipts: Receipts,
    pub(super) published: Receipts,
    pub(super) author: Author,
    pub(super) hand_back_at: Option<Instant>,
    /// The round for which a Close was proposed over this link.
    pub(super) proposed: Option<Round>,
}

pub(super) type Receipts = FuturesOrdered<BoxFuture<'static, Result<(), LinkError>>>;

impl Link {
    /// Writes a record to the log. Its receipt comes later; without one the link is lost.
    pub(super) async fn append(&mut self, body: &Body) -> Result<(), LinkError> {
        let payload = self.author.seal(body.kind(), &body.encode());
        let sent = send(&mut self.rounds, Message { payload, ..Default::default() }).await?;
        self.receipts.push_back(Box::pin(receipt(sent)));
        Ok(())
    }
}

/// A piece of a contribution that may count, or why it cannot be one.
pub(super) fn read_update<'a>(
    author: &Author,
    open: &Open,
    message: &'a Received<Vec<u8>>,
) -> Result<(Entry, Update<'a>), String> {
    let record = author.key.open(&message.payload.data).map_err(|error| error.to_string())?;
    let header = record.header;
    if !record.verified || header.instance != author.instance {
        return Err("a record that does not verify with this job's secret, or is of another launch".to_owned());
    }
    if header.version != RECORD_VERSION || header.kind != Body::UPDATE {
        return Err(format!("{} sent a record of kind {} and version {}", header.rank, header.kind, header.version));
    }
    let update =
        Update::decode(record.body).map_err(|error| format!("{} sent a record that is {error}", header.rank))?;
    let wrong = |what: &str| Err(format!("{} sent {what}", header.rank));
    if header.rank.0 >= open.contributors || update.round.0 == 0 {
        return wrong("a contribution, but is no contributor or names no round");
    }
    if update.shard >= open.shards() || update.header.bytes as usize != open.shard_bytes(update.shard) {
        return wrong("data that does not fit the model");
    }
    // By its key the broker decides who gets it: all pieces of a shard must have one.
    if message.key().as_deref() != Some(update.shard.to_string().as_str()) {
        return wrong("a piece under another shard's key");
    }
    Ok((Entry { contributor: header.rank, origin: update.round }, update))
}
