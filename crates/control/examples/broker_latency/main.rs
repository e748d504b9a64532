//! Measures a broker through the `pulsar` crate, and prints JSON: publish to consume, small messages per second, and
//! the replay of a log. The last two are measured a second time with a client that does as little as possible with each
//! frame, because the crate takes longer for a message than a broker does.
//!
//! `cargo run --release -p gradwire-control --example broker_latency [pulsar://host:port]`; without URL it measures
//! the embedded broker, in its own process.

mod frames;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use gradwire_control::{BrokerConfig, EmbeddedBroker};
use pulsar::consumer::InitialPosition;
use pulsar::producer::Message;
use pulsar::{Consumer, ConsumerOptions, Error, Producer, ProducerOptions, Pulsar, SubType, TokioExecutor};

type Client = Pulsar<TokioExecutor>;

const LATENCY_MESSAGES: usize = 5000;
const WARM_UP_MESSAGES: usize = 500;
const MESSAGE_BYTES: usize = 1024;
const SMALL_MESSAGES: usize = 100_000;
const SMALL_BYTES: usize = 100;
/// Records of the log that is replayed.
const RECORDS: usize = 100_000;
const RECORD_BYTES: usize = 256;
/// Receipts that may be outstanding at a time.
const WINDOW: usize = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1);
    let embedded = match url {
        Some(_) => None,
        None => Some(EmbeddedBroker::start(BrokerConfig::new(([127, 0, 0, 1], 0).into()))?),
    };
    let broker = if embedded.is_some() { "embedded" } else { "other" };
    let url = url.or_else(|| embedded.as_ref().map(|embedded| embedded.url().to_owned())).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(&url))?;
    println!("{{\"broker\":\"{broker}\",{measured}}}");
    Ok(())
}

async fn measure(url: &str) -> Result<String, Box<dyn std::error::Error>> {
    // A client of its own, with its own link, for each side.
    let (sending, receiving) = (connect(url).await?, connect(url).await?);
    let (median, p99, worst) = latency(&sending, &receiving).await?;
    let rate = small_messages(&sending, &receiving).await?;
    let topic = topic("replay");
    fill(producer(&sending, &topic).await?, RECORDS, RECORD_BYTES).await?;
    let replay_by_crate = replay(&receiving, &topic).await?;
    let replay_by_frames = frames::replay(url, &topic, RECORDS)?;
    let rate_by_frames = frames::small_messages(url, &self::topic("frames"), SMALL_MESSAGES, SMALL_BYTES, WINDOW)?;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(format!(
        "\"publish_to_consume_us\":{{\"bytes\":{MESSAGE_BYTES},\"messages\":{LATENCY_MESSAGES},\"median\":{:.1},\
         \"p99\":{:.1},\"worst\":{:.1}}},\"small_messages_per_s\":{{\"bytes\":{SMALL_BYTES},\
         \"messages\":{SMALL_MESSAGES},\"by_crate\":{rate:.0},\"by_frames\":{rate_by_frames:.0}}},\"replay_ms\":{{\"bytes\":{RECORD_BYTES},\
         \"records\":{RECORDS},\"by_crate\":{:.1},\"by_frames\":{:.1}}}",
        us(median),
        us(p99),
        us(worst),
        replay_by_crate.as_secs_f64() * 1e3,
        replay_by_frames.as_secs_f64() * 1e3,
    ))
}

/// One message at a time: from the call that sends it to the moment when a consumer on another link has it.
async fn latency(sending: &Client, receiving: &Client) -> Result<(Duration, Duration, Duration), Error> {
    let topic = topic("latency");
    let mut producer = producer(sending, &topic).await?;
    let mut consumer = consumer(receiving, &topic).await?;
    let mut times = Vec::with_capacity(LATENCY_MESSAGES);
    for number in 0..WARM_UP_MESSAGES + LATENCY_MESSAGES {
        let started = Instant::now();
        let receipt = producer.send_non_blocking(message(MESSAGE_BYTES)).await?;
        next(&mut consumer).await?;
        if number >= WARM_UP_MESSAGES {
            times.push(started.elapsed());
        }
        receipt.await?;
    }
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    Ok((at(0.5), at(0.99), at(1.0)))
}

/// Messages that are not batched, as fast as they go, until a consumer has acknowledged them all.
async fn small_messages(sending: &Client, receiving: &Client) -> Result<f64, Error> {
    let topic = topic("rate");
    let mut consumer = consumer(receiving, &topic).await?;
    let producer = producer(sending, &topic).await?;
    let started = Instant::now();
    let (sent, received) = tokio::join!(fill(producer, SMALL_MESSAGES, SMALL_BYTES), async {
        for _ in 0..SMALL_MESSAGES {
            let message = next(&mut consumer).await?;
            consumer.ack(&message).await?;
        }
        Ok::<(), Error>(())
    });
    sent?;
    received?;
    Ok(SMALL_MESSAGES as f64 / started.elapsed().as_secs_f64())
}

/// A log is read from its head, as a member does that joins late.
async fn replay(receiving: &Client, topic: &str) -> Result<Duration, Error> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let started = Instant::now();
    let builder = receiving.reader().with_topic(topic).with_options(options).with_batch_size(10_000);
    let mut reader: pulsar::reader::Reader<Vec<u8>, _> = builder.into_reader().await?;
    for _ in 0..RECORDS {
        match reader.next().await {
            Some(message) => drop(message?),
            None => return Err(Error::Custom("the reader ended".to_owned())),
        }
    }
    Ok(started.elapsed())
}

async fn fill(mut producer: Producer<TokioExecutor>, messages: usize, bytes: usize) -> Result<(), Error> {
    let mut receipts = std::collections::VecDeque::with_capacity(WINDOW);
    for _ in 0..messages {
        if receipts.len() == WINDOW
            && let Some(receipt) = receipts.pop_front()
        {
            let receipt: pulsar::producer::SendFuture = receipt;
            receipt.await?;
        }
        receipts.push_back(producer.send_non_blocking(message(bytes)).await?);
    }
    for receipt in receipts {
        receipt.await?;
    }
    Ok(())
}

async fn connect(url: &str) -> Result<Client, Error> {
    Pulsar::builder(url, TokioExecutor).build().await
}

async fn producer(client: &Client, topic: &str) -> Result<Producer<TokioExecutor>, Error> {
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await
}

async fn consumer(client: &Client, topic: &str) -> Result<Consumer<Vec<u8>, TokioExecutor>, Error> {
    let builder = client.consumer().with_topic(topic).with_subscription("measure");
    builder.with_subscription_type(SubType::Exclusive).build().await
}

async fn next(consumer: &mut Consumer<Vec<u8>, TokioExecutor>) -> Result<pulsar::consumer::Message<Vec<u8>>, Error> {
    consumer.next().await.unwrap_or_else(|| Err(Error::Custom("the consumer ended".to_owned())))
}

fn message(bytes: usize) -> Message {
    Message { payload: vec![7; bytes], ..Default::default() }
}

/// A topic that no other run uses.
fn topic(name: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("broker-{name}-{}", now.as_nanos())
}
