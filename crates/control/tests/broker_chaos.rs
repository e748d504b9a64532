//! Key_Shared consumers that are killed and replaced all the time: nothing is lost, no key out of order.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::BTreeMap;
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
/// Messages for each kill, so that there are many whatever the machine's speed.
const MESSAGES_PER_ROUND: u64 = 2000;

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
    kill: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Victim {
    fn start(url: &str, topic: &str, name: String, effects: Arc<Mutex<Effects>>) -> Self {
        let (kill, killed) = oneshot::channel();
        let (url, topic) = (url.to_owned(), topic.to_owned());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    _ = killed => {}
                    () = work(&url, &topic, &name, &effects) => {}
                }
            });
            runtime.shutdown_background();
        });
        Self { kill, thread }
    }

    fn kill(self) {
        let _ = self.kill.send(());
        self.thread.join().unwrap();
    }
}

async fn work(url: &str, topic: &str, name: &str, effects: &Mutex<Effects>) {
    let client = Pulsar::builder(url, TokioExecutor).build().await.unwrap();
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription("s").with_consumer_name(name);
    let builder = builder.with_subscription_type(SubType::KeyShared).with_options(options);
    let mut consumer: Consumer<Vec<u8>, _> = builder.build().await.unwrap();
    while let Some(message) = consumer.next().await {
        let message = message.unwrap();
        let number = String::from_utf8_lossy(&message.payload.data).parse().unwrap();
        effects.lock().unwrap().apply(message.payload.metadata.partition_key.as_deref().unwrap(), number);
        // It may die between the effect and its acknowledgement.
        tokio::task::yield_now().await;
        consumer.ack(&message).await.unwrap();
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
    let client = Pulsar::builder(&url, TokioExecutor).build().await.unwrap();
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    let mut producer = client.producer().with_topic(&topic).with_options(options).build().await.unwrap();
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
    let mut receipts = Vec::new();
    for round in 0..MESSAGES / MESSAGES_PER_ROUND {
        for number in round * MESSAGES_PER_ROUND..(round + 1) * MESSAGES_PER_ROUND {
            let (key, number) = (format!("k{}", number % KEYS), number / KEYS);
            let payload = number.to_string().into_bytes();
            let message = Message { payload, partition_key: Some(key), ..Default::default() };
            receipts.push(producer.send_non_blocking(message).await.unwrap());
        }
        for receipt in receipts.drain(..) {
            receipt.await.unwrap();
        }
        tokio::time::sleep(KILL_EVERY).await;
        victims.remove(kills * 5 % CONSUMERS).kill();
        victims.push(start());
        kills += 1;
    }
    let acknowledged = || {
        let stats = broker.stats();
        let subscription = &stats.topics[0].subscriptions[0];
        (subscription.backlog == 0 && subscription.unacked == 0 && subscription.waiting == 0).then_some(())
    };
    eventually("the last acknowledgement", acknowledged);
    victims.into_iter().for_each(Victim::kill);
    drop((producer, client));
    eventually("the end of all links", || (broker.stats().links == 0).then_some(()));
    let effects = effects.lock().unwrap();
    println!("{kills} consumers were killed, {} messages came again", effects.repeated);
    assert!(effects.wrong.is_empty(), "{:?}", &effects.wrong[..effects.wrong.len().min(10)]);
    assert_eq!((effects.applied, effects.last.len() as u64), (MESSAGES, KEYS));
    assert!(broker.stats().topics[0].subscriptions[0].redelivered > 0, "nobody died with messages in hand");
}
