//! A rank that answers requests for copies of the shards that it holds.
//!
//! All ranks share one Key_Shared subscription: the broker gives each request to one of them, those for the same shard
//! to the same one, in order. A request is acknowledged only when its answer, or the request passed on to another
//! holder, has its receipt: who goes away before leaves it to another.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use pulsar::consumer::Message as Received;
use pulsar::producer::{Message, SendFuture};
use pulsar::{Consumer, Producer, TokioExecutor};

use super::record::{COPY_KIND, Copy, REQUEST_KIND, Request};
use super::{CopyStore, Held, Shared, now_ms};
use crate::job::Topic;
use crate::link::{Client, LinkError, receipt, send, unique_name};
use crate::pieces::split;
use crate::record::{Header, RECORD_VERSION};
use crate::worker::random_id;

/// The subscription that all holders share.
const SUBSCRIPTION: &str = "holders";
/// Requests that a holder takes ahead.
const PERMITS: u32 = 64;
/// Requests that are being answered at a time.
const ANSWERS_MAX: usize = 32;
/// A request that this many ranks passed on is answered: nobody holds it.
const HOPS_MAX: u16 = 64;
/// How long opening a link may take.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// What clocks of two hosts may differ by.
const CLOCK_SLACK_MS: u64 = 5_000;

type Answers = FuturesUnordered<BoxFuture<'static, Result<Received<Vec<u8>>, LinkError>>>;

struct Holder<'a> {
    shared: &'a Shared,
    store: &'a dyn CopyStore,
    copies: Producer<TokioExecutor>,
    requests: Producer<TokioExecutor>,
}

/// Answers over one link, until it is lost.
pub(super) async fn hold(shared: &Shared, store: &Arc<dyn CopyStore>) -> Result<(), LinkError> {
    let config = &shared.config;
    let client = Client::connect(&config.broker, OPEN_MAX).await?;
    let name = unique_name(&config.instance, shared.rank.0, &random_id()[..8]);
    let [request_topic, copy_topic] = [Topic::Retransmit, Topic::Copies].map(|topic| config.topic(topic));
    let (consumer, copies, requests) = tokio::try_join!(
        client.key_shared(&request_topic, (SUBSCRIPTION, &name), PERMITS, OPEN_MAX),
        client.producer(&copy_topic, OPEN_MAX),
        client.producer(&request_topic, OPEN_MAX),
    )?;
    client.seal();
    shared.holding.send_replace(true);
    let mut holder = Holder { shared, store: &**store, copies, requests };
    let result = holder.serve(consumer).await;
    shared.holding.send_replace(false);
    result
}

impl Holder<'_> {
    async fn serve(&mut self, mut consumer: Consumer<Vec<u8>, TokioExecutor>) -> Result<(), LinkError> {
        let mut answers = Answers::new();
        loop {
            tokio::select! {
                request = consumer.next(), if answers.len() < ANSWERS_MAX => {
                    let request = request.ok_or_else(LinkError::closed)??;
                    let sent = self.handle(&request.payload.data).await?;
                    answers.push(Box::pin(async move {
                        for sent in sent {
                            receipt(sent).await?;
                        }
                        Ok(request)
                    }));
                }
                Some(answered) = answers.next() => {
                    let request = answered?;
                    consumer.ack(&request).await.map_err(|error| LinkError::from(pulsar::Error::from(error)))?;
                }
            }
        }
    }

    /// Does what a request asks for. Gives what needs a receipt before the request may be acknowledged.
    async fn handle(&mut self, message: &[u8]) -> Result<Vec<SendFuture>, LinkError> {
        let Some(request) = self.open(message) else {
            self.shared.reject("a message on the retransmit topic that is no request, or does not verify");
            return Ok(Vec::new());
        };
        if request.deadline_ms.saturating_add(CLOCK_SLACK_MS) < now_ms() {
            return Ok(Vec::new());
        }
        match self.store.copy(request.requester, &request.shard) {
            Held::Data(data) => {
                self.shared.served.fetch_add(1, Ordering::Relaxed);
                self.answer(&request, &data).await
            }
            Held::SentOverLink => {
                self.shared.served.fetch_add(1, Ordering::Relaxed);
                Ok(Vec::new())
            }
            Held::No if request.hop < HOPS_MAX => self.pass_on(request).await,
            Held::No => {
                let refusal = Copy { requester: request.requester, shard: request.shard, piece: None };
                let payload = self.seal(COPY_KIND, &refusal.encode());
                Ok(vec![send(&mut self.copies, Message { payload, ..Default::default() }).await?])
            }
        }
    }

    fn open(&self, message: &[u8]) -> Option<Request> {
        let record = self.shared.key.open(message).ok().filter(|record| record.verified)?;
        let Header { version, kind, instance, .. } = record.header;
        let mine = version == RECORD_VERSION && kind == REQUEST_KIND && instance == self.shared.config.instance;
        if mine { Request::decode(record.body).ok() } else { None }
    }

    async fn answer(&mut self, request: &Request, data: &[u8]) -> Result<Vec<SendFuture>, LinkError> {
        let mut sent = Vec::new();
        for piece in split(data, self.shared.piece_bytes) {
            let copy = Copy { requester: request.requester, shard: request.shard, piece: Some(piece) };
            let payload = self.seal(COPY_KIND, &copy.encode());
            let message = Message { payload, partition_key: Some(request.key()), ..Default::default() };
            sent.push(send(&mut self.copies, message).await?);
        }
        Ok(sent)
    }

    /// Lets another holder have it.
    async fn pass_on(&mut self, request: Request) -> Result<Vec<SendFuture>, LinkError> {
        self.shared.passed_on.fetch_add(1, Ordering::Relaxed);
        let request = Request { hop: request.hop + 1, ..request };
        let payload = self.seal(REQUEST_KIND, &request.encode());
        let message = Message { payload, partition_key: Some(request.key()), ..Default::default() };
        Ok(vec![send(&mut self.requests, message).await?])
    }

    fn seal(&self, kind: u16, body: &[u8]) -> Vec<u8> {
        self.shared.seal(kind, body)
    }
}

impl Shared {
    pub(super) fn seal(&self, kind: u16, body: &[u8]) -> Vec<u8> {
        let Self { config, rank, .. } = self;
        let id = random_id();
        let header = Header { version: RECORD_VERSION, kind, instance: config.instance, id, rank: *rank };
        self.key.seal(header, body)
    }
}
