//! Key_Shared consumers that are killed and replaced all the time: nothing is lost, no key out of order.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use common::*;
use futures::StreamExt;
use pulsar::consumer::InitialPosition;
use pulsar::producer::Message;
use pulsar::{Consumer, ConsumerOptions, ProducerOptions, Pulsar, SubType, TokioExecutor};
use tokio::sync::oneshot;

const KEYS: u64 = 64;
const CONSUMERS: usize = 8;
const MESSAGES: u64 = 100_000;
const KILL_EVERY: Duration = Duration::from_millis(100);
/// Messages between kills: spread over that time, or as quick as the machine is.
const MESSAGES_PER_KILL: u64 = 2000;

/// What was done with the messages, as a database would keep it: the last one of each key that took effect.
#[derive(Default)]
struct Effects {
    last: BTreeMap<String, u64>,
    applied: u64,
    repeated: u64,
    wrong: Vec<String>,
}

impl Effects {
    /// Applies a message, unless it was applied before.
    fn apply(&mut self, key: &str, number: u64) {
        let next = self.last.get(key).map_or(0, |last| last + 1);
        if number < next {
            self.repeated += 1;
        } else if number == next {
            self.last.insert(key.to_owned(), number);
            self.applied += 1;
        } else {
            self.wrong.push(format!("{key}: {number} came where {next} should"));
        }
    }
}

/// A consumer with an event loop and a link of its own. Killing it drops both, whatever it was about to do.
struct Victim {
    /// That it is to die with the next message in hand.
    doomed: Arc<AtomicBool>,
    kill: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Victim {
    fn start(url: &str, topic: &str, name: String, effects: Arc<Mutex<Effects>>) -> Self {
        let (kill, killed) = oneshot::channel();
        let (url, topic) = (url.to_owned(), topic.to_owned());
        let doomed = Arc::new(AtomicBool::new(false));
        let seen = doomed.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    _ = killed => {}
                    () = work(&url, &topic, &name, &effects, &seen) => {}
                }
            });
            runtime.shutdown_background();
        });
        Self { doomed, kill, thread }
    }

    /// Between the effect of a message and its acknowledgement, or where it is if no message comes.
    async fn kill(self) {
        self.doomed.store(true, Ordering::Relaxed);
        for _ in 0..20 {
            if self.thread.is_finished() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let _ = self.kill.send(());
        self.thread.join().unwrap();
    }
}

async fn work(url: &str, topic: &str, name: &str, effects: &Mutex<Effects>, doomed: &AtomicBool) {
    let client = Pulsar::builder(url, TokioExecutor).build().await.unwrap();
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription("s").with_consumer_name(name);
    let builder = builder.with_subscription_type(SubType::KeyShared).with_options(options);
    let mut consumer: Consumer<Vec<u8>, _> = builder.build().await.unwrap();
    while let Some(message) = consumer.next().await {
        let message = message.unwrap();
        let number = String::from_utf8_lossy(&message.payload.data).parse().unwrap();
        effects.lock().unwrap().apply(message.payload.metadata.partition_key.as_deref().unwrap(), number);
        if doomed.load(Ordering::Relaxed) {
            return;
        }
        consumer.ack(&message).await.unwrap();
    }
}

async fn publish(url: String, topic: String) {
    let client = Pulsar::builder(url, TokioExecutor).build().await.unwrap();
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    let mut producer = client.producer().with_topic(topic).with_options(options).build().await.unwrap();
    let mut pace = tokio::time::interval(KILL_EVERY / 20);
    let mut receipts = Vec::new();
    for count in 0..MESSAGES {
        let (key, number) = (format!("k{}", count % KEYS), count / KEYS);
        let payload = number.to_string().into_bytes();
        let message = Message { payload, partition_key: Some(key), ..Default::default() };
        receipts.push(producer.send_non_blocking(message).await.unwrap());
        if count % (MESSAGES_PER_KILL / 20) == 0 {
            for receipt in receipts.drain(..) {
                receipt.await.unwrap();
            }
            pace.tick().await;
        }
    }
    for receipt in receipts {
        receipt.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_is_lost_repeated_in_effect_or_out_of_order() {
    let broker = embedded_broker();
    let (url, topic) = (broker.url().to_owned(), unique("chaos"));
    let effects = Arc::new(Mutex::new(Effects::default()));
    let mut started = 0;
    let mut start = || {
        started += 1;
        Victim::start(&url, &topic, format!("c{started}"), effects.clone())
    };
    let mut victims: Vec<Victim> = (0..CONSUMERS).map(|_| start()).collect();
    eventually("the consumers", || {
        let stats = broker.stats();
        stats
            .topics
            .iter()
            .flat_map(|topic| &topic.subscriptions)
            .any(|found| found.consumers.len() == CONSUMERS)
            .then_some(())
    });
    let mut kills = 0;
    let publishing = tokio::spawn(publish(url.clone(), topic.clone()));
    while !publishing.is_finished() {
        tokio::time::sleep(KILL_EVERY).await;
        victims.remove(kills * 5 % CONSUMERS).kill().await;
        victims.push(start());
        kills += 1;
    }
    publishing.await.unwrap();
    let acknowledged = || {
        let stats = broker.stats();
        let subscription = &stats.topics[0].subscriptions[0];
        (subscription.backlog == 0 && subscription.unacked == 0 && subscription.waiting == 0).then_some(())
    };
    eventually("the last acknowledgement", acknowledged);
    for victim in victims {
        victim.kill().await;
    }
    eventually("the end of all links", || (broker.stats().links == 0).then_some(()));
    let effects = effects.lock().unwrap();
    println!("{kills} consumers were killed, {} messages came again", effects.repeated);
    assert!(effects.wrong.is_empty(), "{:?}", &effects.wrong[..effects.wrong.len().min(10)]);
    assert_eq!((effects.applied, effects.last.len() as u64), (MESSAGES, KEYS));
    assert!(broker.stats().topics[0].subscriptions[0].redelivered > 0, "nobody died with messages in hand");
}
