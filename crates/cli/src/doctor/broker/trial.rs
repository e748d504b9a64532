//! Producing and consuming on a topic, as ranks do, with a time for everything.

use std::time::{Duration, Instant};

use futures::StreamExt as _;
use gradwire_control::BrokerAccess;
use pulsar::consumer::InitialPosition;
use pulsar::producer::Message;
use pulsar::reader::Reader;
use pulsar::{
    Authentication, ConnectionRetryOptions, ConsumerOptions, Error, OperationRetryOptions, Producer, ProducerOptions,
    Pulsar, TokioExecutor,
};
use tokio::time::timeout;

const OPERATION_TIME_MAX: Duration = Duration::from_secs(10);
const MESSAGES: usize = 200;
const MESSAGE_BYTES: usize = 1000;
/// No more are sent after this: a slow broker is not asked for all.
const TRIAL_TIME_MAX: Duration = Duration::from_secs(10);
/// The first ones open connections and ledgers.
const WARM_UP: usize = 5;

type Client = Pulsar<TokioExecutor>;

/// Median and 99th percentile, each.
#[derive(Debug)]
pub(super) struct Latency {
    pub(super) messages: usize,
    pub(super) receipt: [Duration; 2],
    pub(super) consume: [Duration; 2],
}

pub(super) async fn connect(access: &BrokerAccess, token: Option<String>) -> Result<Client, Error> {
    let connection =
        ConnectionRetryOptions { max_retries: 0, connection_timeout: OPERATION_TIME_MAX, ..Default::default() };
    let operation =
        OperationRetryOptions { operation_timeout: OPERATION_TIME_MAX, max_retries: Some(0), ..Default::default() };
    let mut builder = Pulsar::builder(access.url.as_str(), TokioExecutor)
        .with_connection_retry_options(connection)
        .with_operation_retry_options(operation);
    if let Some(token) = token {
        builder = builder.with_auth(Authentication { name: "token".to_owned(), data: token.into_bytes() });
    }
    if let Some(path) = &access.trust {
        builder = builder.with_certificate_chain_file(path).map_err(|error| Error::Custom(error.to_string()))?;
    }
    in_time("connecting", builder.build()).await
}

pub(super) async fn producer(client: &Client, topic: &str) -> Result<Producer<TokioExecutor>, Error> {
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    in_time("opening a producer", client.producer().with_topic(topic).with_options(options).build()).await
}

/// A reader of what comes from now on, which leaves nothing behind.
pub(super) async fn reader(client: &Client, topic: &str) -> Result<Reader<Vec<u8>, TokioExecutor>, Error> {
    let name = format!("gradwire-doctor-{}", std::process::id());
    let options = ConsumerOptions::default().durable(false).with_initial_position(InitialPosition::Latest);
    let reader = client.reader().with_topic(topic).with_subscription(&name).with_consumer_name(&name);
    in_time("opening a reader", reader.with_options(options).into_reader()).await
}

/// Sends one message after the other, each when the one before has come back.
pub(super) async fn latency(
    mut producer: Producer<TokioExecutor>,
    mut reader: Reader<Vec<u8>, TokioExecutor>,
) -> Result<Latency, Error> {
    let (mut receipts, mut consumed) = (Vec::new(), Vec::new());
    let mark = mark();
    let began = Instant::now();
    for number in 0..MESSAGES + WARM_UP {
        let mut payload = format!("{mark} {number} ").into_bytes();
        payload.resize(MESSAGE_BYTES, b'.');
        let started = Instant::now();
        let message = Message { payload: payload.clone(), ..Default::default() };
        let receipt = in_time("sending", producer.send_non_blocking(message)).await?;
        let receipt = async {
            in_time("a receipt", receipt).await?;
            Ok::<_, Error>(started.elapsed())
        };
        let arrival = async {
            in_time("a message", wait_for(&mut reader, &payload)).await?;
            Ok::<_, Error>(started.elapsed())
        };
        let (receipt, arrival) = tokio::try_join!(receipt, arrival)?;
        if number >= WARM_UP {
            receipts.push(receipt);
            consumed.push(arrival);
        }
        if began.elapsed() > TRIAL_TIME_MAX && !receipts.is_empty() {
            break;
        }
    }
    Ok(Latency { messages: receipts.len(), receipt: percentiles(receipts), consume: percentiles(consumed) })
}

/// Other doctors may be at the same topic: theirs are passed over.
async fn wait_for(reader: &mut Reader<Vec<u8>, TokioExecutor>, payload: &[u8]) -> Result<(), Error> {
    loop {
        match reader.next().await {
            Some(message) if message.as_ref().is_ok_and(|message| message.payload.data != payload) => {}
            Some(message) => return message.map(drop),
            None => return Err(Error::Custom("the broker closed the link".to_owned())),
        }
    }
}

fn mark() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("gradwire doctor {} {}", std::process::id(), now.as_nanos())
}

fn percentiles(mut times: Vec<Duration>) -> [Duration; 2] {
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len().saturating_sub(1)) * percent / 100).copied().unwrap_or_default();
    [at(50), at(99)]
}

/// The client's own time limits are not kept everywhere.
async fn in_time<T, E: Into<Error>>(what: &str, operation: impl Future<Output = Result<T, E>>) -> Result<T, Error> {
    match timeout(OPERATION_TIME_MAX, operation).await {
        Ok(done) => done.map_err(Into::into),
        Err(_) => Err(Error::Custom(format!("{what} took longer than {} s", OPERATION_TIME_MAX.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_measured() {
        let ms = Duration::from_millis;
        assert_eq!(percentiles((1..=200).map(ms).collect()), [ms(100), ms(198)]);
        assert_eq!(percentiles(vec![ms(3)]), [ms(3), ms(3)]);
        assert_eq!(percentiles(Vec::new()), [ms(0), ms(0)]);
    }
}
