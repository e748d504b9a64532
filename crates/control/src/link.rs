//! A connection to the broker through the `pulsar` crate, with the time-outs that the crate leaves to its callers.
//!
//! The crate retries some errors for ever and ends its streams on others. So it is told to retry nothing, every call
//! gets a time-out, and whoever holds a [`Link`] drops it on the first error and opens a new one.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use gradwire_proto::{Fault, FaultKind};
use pulsar::consumer::InitialPosition;
use pulsar::error::{AuthenticationError, ConnectionError, ConsumerError, ProducerError, ServiceDiscoveryError};
use pulsar::message::proto::{MessageIdData, ServerError};
use pulsar::producer::{Message, SendFuture};
use pulsar::reader::Reader;
use pulsar::{
    ConnectionRetryOptions, Consumer, ConsumerOptions, Error, OperationRetryOptions, Producer, ProducerOptions, Pulsar,
    SubType, TokioExecutor,
};
use tokio::time::timeout;

use crate::access::{BrokerAccess, Token};
use crate::job::{JobConfig, Topic};
use crate::outbox::Part;
use crate::probe;
use crate::record::Instance;

/// How long one request to the broker may take.
const OPERATION_MAX: Duration = Duration::from_secs(5);
/// How many records are read ahead.
const READ_AHEAD: u32 = 1000;
/// Stack of a thread that drives a client: without optimisation, the crate's nested futures take more than the usual
/// 2 MiB.
pub(crate) const STACK_BYTES: usize = 8 << 20;
/// How often the broker is asked for a sign of life.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Why a link could not be opened, or was lost.
#[derive(Debug)]
pub(crate) struct LinkError {
    /// What happened, for people.
    pub(crate) reason: String,
    /// Whether it would happen again: a wrong token, a wrong URL.
    pub(crate) permanent: bool,
}

impl LinkError {
    /// The fault that names the broker and the reason.
    pub(crate) fn into_fault(self, broker_url: &str) -> Fault {
        let remedy = if self.permanent {
            "check the broker's URL, its token (GRADWIRE_BROKER_TOKEN or GRADWIRE_BROKER_TOKEN_FILE), and the tenant \
             (GRADWIRE_TENANT)"
        } else if broker_url.starts_with("pulsar+ssl://") {
            // The client library keeps to itself what is wrong with a certificate.
            "is it running with TLS, can this host reach it, and is its certificate one that GRADWIRE_BROKER_CA or the \
             system trusts? `gradwire doctor --broker` with this URL says what is wrong"
        } else {
            "is it running, and can this host reach it?"
        };
        let detail = format!("the broker at {broker_url} cannot be used: {}; {remedy}", self.reason);
        Fault::new(FaultKind::BrokerUnreachable, detail)
    }

    /// The broker, or something on the way to it, closed the link.
    pub(crate) fn closed() -> Self {
        Self { reason: "the broker closed the link".to_owned(), permanent: false }
    }

    fn timed_out(what: &str, after: Duration) -> Self {
        let reason = format!("{what} took longer than {} s", after.as_secs_f64());
        Self { reason, permanent: false }
    }
}

impl From<Fault> for LinkError {
    /// What is wrong before anything was asked of the broker: a file that cannot be read.
    fn from(fault: Fault) -> Self {
        Self { reason: fault.detail, permanent: true }
    }
}

impl From<Error> for LinkError {
    fn from(error: Error) -> Self {
        Self { permanent: is_permanent(&error), reason: error.to_string() }
    }
}

/// A client of the broker.
pub(crate) struct Client {
    pulsar: Pulsar<TokioExecutor>,
    sealed: Arc<AtomicBool>,
}

/// Shows the token, as long as connections may be made.
///
/// The crate reconnects on its own, and then says nothing: a broker that lost its log meanwhile, and with it our
/// Join, would go unnoticed. It asks for the token at each connection, and gives up where there is none, so this is
/// where reconnecting is turned off.
struct Gate {
    token: Option<String>,
    sealed: Arc<AtomicBool>,
}

// The trait is made by `async_trait`; this is what that macro would write.
impl pulsar::authentication::Authentication for Gate {
    fn auth_method_name(&self) -> String {
        if self.token.is_some() { "token" } else { "none" }.to_owned()
    }

    fn initialize<'a, 'b>(&'a mut self) -> Pin<Box<dyn Future<Output = Result<(), AuthenticationError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(std::future::ready(Ok(())))
    }

    fn auth_data<'a, 'b>(
        &'a mut self,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, AuthenticationError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let data = if self.sealed.load(Ordering::Acquire) {
            Err(AuthenticationError::Custom("the link was lost".to_owned()))
        } else {
            Ok(self.token.clone().unwrap_or_default().into_bytes())
        };
        Box::pin(std::future::ready(data))
    }
}

/// A place in a topic's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) ledger: u64,
    pub(crate) entry: u64,
}

impl Position {
    pub(crate) const fn of(id: &MessageIdData) -> Self {
        Self { ledger: id.ledger_id, entry: id.entry_id }
    }
}

/// Where a reader starts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    Earliest,
    Latest,
    /// With this message, or the first that is left after it.
    At(Position),
}

impl Client {
    /// Connects, within `time_max`.
    pub(crate) async fn connect(access: &BrokerAccess, time_max: Duration) -> Result<Self, LinkError> {
        let retry = ConnectionRetryOptions {
            max_retries: 0,
            connection_timeout: time_max.min(OPERATION_MAX),
            keep_alive: KEEP_ALIVE,
            ..Default::default()
        };
        let operation = OperationRetryOptions {
            operation_timeout: time_max.min(OPERATION_MAX),
            max_retries: Some(0),
            ..Default::default()
        };
        let sealed = Arc::new(AtomicBool::new(false));
        let token = access.token.as_ref().map(Token::read).transpose()?;
        let gate = Gate { token, sealed: sealed.clone() };
        let mut builder = Pulsar::builder(access.url.as_str(), TokioExecutor)
            .with_connection_retry_options(retry)
            .with_operation_retry_options(operation)
            .with_auth_provider(Box::new(gate));
        if let Some(trusted) = access.trusted()? {
            builder = builder.with_certificate_chain(trusted);
        }
        let error = match timeout(time_max, builder.build()).await {
            Ok(Ok(pulsar)) => return Ok(Self { pulsar, sealed }),
            Ok(Err(error)) => error.into(),
            Err(_) => LinkError::timed_out("connecting", time_max),
        };
        Err(probe::diagnose(access).await.unwrap_or(error))
    }

    /// From now on no new connection is made: when one is lost, everything on it fails.
    pub(crate) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    /// A reader of a topic, within `time_max`. `compacted`: only the latest message of each key, where the broker has
    /// compacted the topic.
    pub(crate) async fn reader(
        &self,
        topic: &str,
        name: &str,
        (start, compacted): (Start, bool),
        time_max: Duration,
    ) -> Result<Reader<Vec<u8>, TokioExecutor>, LinkError> {
        self.bounded_reader(topic, name, (start, compacted), READ_AHEAD, time_max).await
    }

    /// As [`Client::reader`], for messages so large that only so many may be read ahead.
    pub(crate) async fn bounded_reader(
        &self,
        topic: &str,
        name: &str,
        (start, compacted): (Start, bool),
        ahead: u32,
        time_max: Duration,
    ) -> Result<Reader<Vec<u8>, TokioExecutor>, LinkError> {
        let mut options =
            ConsumerOptions::default().durable(false).read_compacted(compacted).with_receiver_queue_size(ahead);
        options = match start {
            Start::Earliest => options.with_initial_position(InitialPosition::Earliest),
            Start::Latest => options.with_initial_position(InitialPosition::Latest),
            Start::At(Position { ledger, entry }) => {
                options.starting_on_message(MessageIdData { ledger_id: ledger, entry_id: entry, ..Default::default() })
            }
        };
        let build = self
            .pulsar
            .reader()
            .with_topic(topic)
            // A name of its own: an exclusive one that a lost link still holds would make us wait.
            .with_subscription(name)
            .with_consumer_name(name)
            .with_batch_size(ahead)
            .with_options(options)
            .into_reader();
        let reader = timeout(time_max, build).await;
        Ok(reader.map_err(|_| LinkError::timed_out("opening a reader", time_max))??)
    }

    /// A consumer of a Key_Shared subscription, within `time_max`, that takes at most `permits` messages ahead. What
    /// it has not acknowledged goes to others when it is dropped.
    pub(crate) async fn key_shared(
        &self,
        topic: &str,
        (subscription, name): (&str, &str),
        permits: u32,
        time_max: Duration,
    ) -> Result<Consumer<Vec<u8>, TokioExecutor>, LinkError> {
        let options = ConsumerOptions::default()
            .durable(true)
            .with_initial_position(InitialPosition::Earliest)
            .with_receiver_queue_size(permits);
        let build = self
            .pulsar
            .consumer()
            .with_topic(topic)
            .with_subscription(subscription)
            .with_subscription_type(SubType::KeyShared)
            .with_consumer_name(name)
            .with_batch_size(permits)
            .with_options(options)
            .build();
        let consumer = timeout(time_max, build).await;
        Ok(consumer.map_err(|_| LinkError::timed_out("opening a consumer", time_max))??)
    }

    /// A producer, within `time_max`. Not batched: batches break keyed topics, and records are few.
    pub(crate) async fn producer(&self, topic: &str, time_max: Duration) -> Result<Producer<TokioExecutor>, LinkError> {
        // Without a name the broker gives one, so that no lost link can hold it.
        let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
        let build = self.pulsar.producer().with_topic(topic).with_options(options).build();
        let producer = timeout(time_max, build).await;
        Ok(producer.map_err(|_| LinkError::timed_out("opening a producer", time_max))??)
    }
}

/// What a rank has open at the broker.
pub(crate) struct Link {
    reader: Reader<Vec<u8>, TokioExecutor>,
    control: Producer<TokioExecutor>,
    versions: Producer<TokioExecutor>,
    audit: Producer<TokioExecutor>,
    snapshots: Producer<TokioExecutor>,
    client: Client,
}

impl Link {
    /// Opens everything, within `time_max`. The control log is read from `start`.
    pub(crate) async fn open(
        client: Client,
        config: &JobConfig,
        name: &str,
        start: Start,
        time_max: Duration,
    ) -> Result<Self, LinkError> {
        let [control_topic, versions_topic, audit_topic, snapshots_topic] =
            [Topic::Control, Topic::Versions, Topic::Audit, Topic::Snapshots].map(|topic| config.topic(topic));
        let (reader, control, versions, audit, snapshots) = tokio::try_join!(
            client.reader(&control_topic, name, (start, false), time_max),
            client.producer(&control_topic, time_max),
            client.producer(&versions_topic, time_max),
            client.producer(&audit_topic, time_max),
            client.producer(&snapshots_topic, time_max),
        )?;
        client.seal();
        Ok(Self { reader, control, versions, audit, snapshots, client })
    }

    /// Hands a record of the control log to the broker. The receipt comes later.
    pub(crate) async fn append(&mut self, payload: Vec<u8>) -> Result<SendFuture, LinkError> {
        send(&mut self.control, Message { payload, ..Default::default() }).await
    }

    /// Hands a part of what is published behind the steps to the broker. The receipt comes later.
    pub(crate) async fn publish(&mut self, part: Part) -> Result<SendFuture, LinkError> {
        let producer = match part.topic {
            Topic::Versions => &mut self.versions,
            _ => &mut self.audit,
        };
        send(producer, Message { payload: part.payload, partition_key: part.key, ..Default::default() }).await
    }

    /// Stores a snapshot.
    pub(crate) async fn store_snapshot(&mut self, payload: Vec<u8>) -> Result<SendFuture, LinkError> {
        let partition_key = Some("membership".to_owned());
        send(&mut self.snapshots, Message { payload, partition_key, ..Default::default() }).await
    }

    /// Opens the producers of what is published behind the steps again, after one failed.
    pub(crate) async fn reopen_publishers(&mut self, config: &JobConfig) -> Result<(), LinkError> {
        self.versions = self.client.producer(&config.topic(Topic::Versions), OPERATION_MAX).await?;
        self.audit = self.client.producer(&config.topic(Topic::Audit), OPERATION_MAX).await?;
        Ok(())
    }

    /// The next message of the control log, and its place.
    pub(crate) async fn next(&mut self) -> Result<(Position, Vec<u8>), LinkError> {
        next(&mut self.reader).await
    }
}

/// The next message of a topic, and its place. Its end is an error: topics of a job do not end.
pub(crate) async fn next(reader: &mut Reader<Vec<u8>, TokioExecutor>) -> Result<(Position, Vec<u8>), LinkError> {
    match reader.next().await {
        Some(Ok(message)) => Ok((Position::of(message.message_id()), message.payload.data)),
        Some(Err(error)) => Err(error.into()),
        None => Err(LinkError::closed()),
    }
}

/// Waits for a receipt, but not for ever: without one the message may or may not be there.
pub(crate) async fn receipt(sent: SendFuture) -> Result<(), LinkError> {
    receipt_place(sent, OPERATION_MAX).await.map(drop)
}

/// As [`receipt`], within `time_max`; tells where the message is, if the broker says so.
pub(crate) async fn receipt_place(sent: SendFuture, time_max: Duration) -> Result<Option<Position>, LinkError> {
    let receipt = timeout(time_max, sent).await;
    let receipt = receipt.map_err(|_| LinkError::timed_out("a receipt", time_max))??;
    Ok(receipt.message_id.as_ref().map(Position::of))
}

pub(crate) async fn send(producer: &mut Producer<TokioExecutor>, message: Message) -> Result<SendFuture, LinkError> {
    let sent = timeout(OPERATION_MAX, producer.send_non_blocking(message)).await;
    Ok(sent.map_err(|_| LinkError::timed_out("sending", OPERATION_MAX))??)
}

/// A name that no other consumer of this job has.
pub(crate) fn unique_name(instance: &Instance, rank: u32, unique: &[u8]) -> String {
    format!("gradwire-{}-{rank}-{}", gradwire_proto::secret::hex(&instance[..4]), gradwire_proto::secret::hex(unique))
}

fn is_permanent(error: &Error) -> bool {
    let connection = match error {
        Error::Connection(error)
        | Error::Consumer(ConsumerError::Connection(error))
        | Error::Producer(ProducerError::Connection(error))
        | Error::ServiceDiscovery(ServiceDiscoveryError::Connection(error)) => error,
        Error::Authentication(_) | Error::Custom(_) => return true,
        Error::ServiceDiscovery(ServiceDiscoveryError::Query(Some(error), _)) => return is_refusal(*error),
        _ => return false,
    };
    match connection {
        ConnectionError::PulsarError(Some(error), _) => is_refusal(*error),
        ConnectionError::Authentication(_) | ConnectionError::SocketAddr(_) | ConnectionError::Tls(_) => true,
        ConnectionError::Io(error) => matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported),
        _ => false,
    }
}

/// Whether the broker would say the same again.
pub(crate) fn is_refusal(error: ServerError) -> bool {
    matches!(
        error,
        ServerError::AuthenticationError
            | ServerError::AuthorizationError
            | ServerError::InvalidTopicName
            | ServerError::NotAllowedError
            | ServerError::TopicTerminatedError
            | ServerError::TopicNotFound
    )
}
