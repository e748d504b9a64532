//! Measures what it costs the embedded broker to keep its topics, and prints JSON: from publishing 1 kB to the receipt,
//! one message at a time and with many producers, and the start with 100,000 records.
//!
//! `cargo run --release -p gradwire-control --example broker_storage DIRECTORY`; the directory decides which disk is
//! measured, and is left empty.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gradwire_control::{BrokerConfig, EmbeddedBroker};
use pulsar::{Producer, ProducerOptions, Pulsar, TokioExecutor};

const MESSAGES: usize = 5000;
const WARM_UP_MESSAGES: usize = 500;
const MESSAGE_BYTES: usize = 1024;
const PRODUCERS: usize = 16;
const RECORDS: usize = 100_000;
/// Receipts that may be outstanding at a time.
const WINDOW: usize = 1000;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let parent = PathBuf::from(std::env::args().nth(1).ok_or("give a directory")?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut results = Vec::new();
    for (name, data_dir, fsync) in [("memory", false, false), ("data_dir", true, false), ("fsync", true, true)] {
        let directory = parent.join(name);
        let config = config(data_dir.then(|| directory.clone()), fsync);
        let broker = EmbeddedBroker::start(config)?;
        let (median, p99) = runtime.block_on(latency(broker.url()))?;
        let (together, shared_median) = runtime.block_on(many(broker.url()))?;
        broker.stop()?;
        results.push(format!(
            "\"{name}\":{{\"receipt_us_median\":{:.0},\"receipt_us_p99\":{:.0},\"producers\":{PRODUCERS},\
             \"together_per_s\":{together:.0},\"together_us_median\":{:.0}}}",
            micros(median),
            micros(p99),
            micros(shared_median),
        ));
        if data_dir {
            std::fs::remove_dir_all(&directory)?;
        }
    }
    let (after_stop, after_crash) = start(&runtime, &parent)?;
    println!(
        "{{\"message_bytes\":{MESSAGE_BYTES},{},\"start\":{{\"records\":{RECORDS},\"after_stop_ms\":{:.0},\
         \"after_crash_ms\":{:.0},\"after_stop_cpu_ms\":{:.0},\"after_crash_cpu_ms\":{:.0}}}}}",
        results.join(","),
        micros(after_stop.0) / 1e3,
        micros(after_crash.0) / 1e3,
        micros(after_stop.1) / 1e3,
        micros(after_crash.1) / 1e3,
    );
    Ok(())
}

fn config(data_dir: Option<PathBuf>, fsync: bool) -> BrokerConfig {
    let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
    config.topic_bytes_max = 512 << 20;
    config.data_dir = data_dir;
    config.fsync = fsync;
    config
}

async fn producer(url: &str, topic: &str) -> Outcome<Producer<TokioExecutor>> {
    let client = Pulsar::builder(url, TokioExecutor).build().await?;
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    Ok(client.producer().with_topic(topic).with_options(options).build().await?)
}

/// From publishing to the receipt, one at a time: median and 99th percentile.
async fn latency(url: &str) -> Outcome<(Duration, Duration)> {
    let times = publish(producer(url, "latency").await?, WARM_UP_MESSAGES + MESSAGES).await?;
    let mut times = times[WARM_UP_MESSAGES..].to_vec();
    times.sort();
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// Many producers, each with one message at a time: messages per second, and the median.
async fn many(url: &str) -> Outcome<(f64, Duration)> {
    let mut producers = Vec::new();
    for number in 0..PRODUCERS {
        producers.push(producer(url, &format!("many-{number}")).await?);
    }
    let start = Instant::now();
    let tasks: Vec<_> = producers.into_iter().map(|producer| tokio::spawn(publish(producer, 500))).collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await??);
    }
    let rate = times.len() as f64 / start.elapsed().as_secs_f64();
    times.sort();
    Ok((rate, times[times.len() / 2]))
}

async fn publish(mut producer: Producer<TokioExecutor>, messages: usize) -> Outcome<Vec<Duration>> {
    let mut times = Vec::with_capacity(messages);
    for _ in 0..messages {
        let start = Instant::now();
        producer.send_non_blocking(vec![7; MESSAGE_BYTES]).await?.await?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// How long something took, and how much of that on a processor.
type Took = (Duration, Duration);

/// How long a start takes, after a stop and after a crash.
fn start(runtime: &tokio::runtime::Runtime, parent: &Path) -> Outcome<(Took, Took)> {
    let (directory, crashed) = (parent.join("start"), parent.join("crashed"));
    let broker = EmbeddedBroker::start(config(Some(directory.clone()), false))?;
    runtime.block_on(async {
        let mut producer = producer(broker.url(), "records").await?;
        let mut receipts = std::collections::VecDeque::new();
        for _ in 0..RECORDS {
            receipts.push_back(producer.send_non_blocking(vec![7; MESSAGE_BYTES]).await?);
            if receipts.len() > WINDOW
                && let Some(receipt) = receipts.pop_front()
            {
                receipt.await?;
            }
        }
        for receipt in receipts {
            receipt.await?;
        }
        Outcome::Ok(())
    })?;
    // Behind the last checkpoint, so that files do not change meanwhile: what a crash would leave.
    std::thread::sleep(Duration::from_secs(5));
    std::fs::create_dir(&crashed)?;
    for entry in std::fs::read_dir(&directory)? {
        let entry = entry?;
        std::fs::copy(entry.path(), crashed.join(entry.file_name()))?;
    }
    broker.stop()?;
    let timed = |directory: &Path| {
        let (start, cpu) = (Instant::now(), cpu_time()?);
        let broker = EmbeddedBroker::start(config(Some(directory.to_owned()), false))?;
        let took = (start.elapsed(), cpu_time()? - cpu);
        broker.stop()?;
        std::fs::remove_dir_all(directory)?;
        Outcome::Ok(took)
    };
    Ok((timed(&directory)?, timed(&crashed)?))
}

fn cpu_time() -> Outcome<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(Duration::new(time.tv_sec.try_into()?, time.tv_nsec.try_into()?))
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
