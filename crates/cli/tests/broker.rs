//! `gradwire broker` as a process: what survives kill -9 and a full disk, and what it refuses to start with.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use pulsar::consumer::InitialPosition;
use pulsar::{ConnectionRetryOptions, ConsumerOptions, OperationRetryOptions, Producer, ProducerOptions, Pulsar};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use support::{DEADLINE, await_condition, gradwire, kill};
use tokio::sync::mpsc;
use tokio::time::timeout;

type Client = Pulsar<pulsar::TokioExecutor>;

/// A broker that runs.
struct Broker {
    child: Child,
    url: String,
}

impl Broker {
    fn start(arguments: &[&str]) -> Self {
        Self::start_by(gradwire().arg("broker"), arguments)
    }

    fn start_in(directory: &Path, more: &[&str]) -> Self {
        let mut arguments = vec!["--data-dir", directory.to_str().unwrap()];
        arguments.extend(more);
        Self::start(&arguments)
    }

    fn start_by(command: &mut Command, arguments: &[&str]) -> Self {
        let command = command.args(["--listen", "127.0.0.1:0", "--no-auth"]).args(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { child, url: url.trim().to_owned() }
    }

    /// Ends it, and returns what it said on standard error.
    fn end(mut self, signal: Signal) -> String {
        kill(self.child.id().cast_signed(), signal);
        await_condition("the broker ends", || self.child.try_wait().unwrap());
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client that tries nothing twice: what has no receipt may be there, but not twice.
async fn client(broker: &Broker) -> Client {
    Pulsar::builder(broker.url.as_str(), pulsar::TokioExecutor)
        .with_operation_retry_options(OperationRetryOptions { max_retries: Some(0), ..Default::default() })
        .with_connection_retry_options(ConnectionRetryOptions { max_retries: 0, ..Default::default() })
        .build()
        .await
        .unwrap()
}

async fn producer(client: &Client, topic: &str) -> Producer<pulsar::TokioExecutor> {
    let options = ProducerOptions { block_queue_if_full: true, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await.unwrap()
}

/// Everything that is on a topic.
async fn everything(broker: &Broker, topic: &str) -> Vec<String> {
    let client = client(broker).await;
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let mut reader: pulsar::reader::Reader<Vec<u8>, _> =
        client.reader().with_topic(topic).with_options(options).into_reader().await.unwrap();
    let last = reader.get_last_message_id().await.unwrap();
    let mut found = Vec::new();
    loop {
        let message = timeout(DEADLINE, reader.next()).await.unwrap().unwrap().unwrap();
        let id = message.message_id.id.clone();
        found.push(String::from_utf8(message.payload.data).unwrap());
        if id.entry_id >= last.entry_id {
            return found;
        }
    }
}

fn refused(output: &Output, says: &[&str]) {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(says.iter().all(|part| text.contains(part)), "{text}");
    assert!(output.stdout.is_empty());
}

fn broker(arguments: &[&str]) -> Output {
    gradwire().args(["broker", "--listen", "127.0.0.1:0"]).args(arguments).output().unwrap()
}

/// Publishes for ever, and notes which records have receipts.
async fn publish(
    mut producer: Producer<pulsar::TokioExecutor>,
    round: usize,
    receipted: Arc<Mutex<Vec<String>>>,
    count: mpsc::Sender<()>,
) {
    let mut waiting = VecDeque::new();
    for number in 0.. {
        let record = format!("{round}-{number}-{}", "x".repeat(number * 37 % 2000));
        let Ok(sent) = producer.send_non_blocking(record.as_bytes()).await else { break };
        waiting.push_back((record, sent));
        // Some are on their way at any time.
        if waiting.len() > 16 {
            let (record, sent) = waiting.pop_front().unwrap();
            let Ok(_) = sent.await else { break };
            receipted.lock().unwrap().push(record);
            let _ = count.try_send(());
        }
    }
    // The broker is gone.
    std::future::pending().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_record_with_a_receipt_survives_kill_9_once_and_in_order() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let receipted: [Arc<Mutex<Vec<String>>>; 3] = Default::default();
    for (round, enough) in [(0, 300), (1, 700), (2, 50)] {
        let more: &[&str] = if round == 2 { &["--fsync"] } else { &[] };
        let broker = Broker::start_in(&directory, more);
        let (count, mut counted) = mpsc::channel(10_000);
        let mut producers = Vec::new();
        for topic in 0..receipted.len() {
            producers.push(producer(&client(&broker).await, &format!("t{topic}")).await);
        }
        let publishing = producers.into_iter().zip(&receipted);
        let tasks: Vec<_> = publishing
            .map(|(producer, receipted)| tokio::spawn(publish(producer, round, receipted.clone(), count.clone())))
            .collect();
        for _ in 0..enough {
            timeout(DEADLINE, counted.recv()).await.unwrap().unwrap();
        }
        drop(broker.end(Signal::KILL));
        tasks.into_iter().for_each(|task| task.abort());
    }
    let broker = Broker::start_in(&directory, &[]);
    for (topic, receipted) in receipted.iter().enumerate() {
        let receipted = receipted.lock().unwrap().clone();
        assert!(receipted.len() > 50, "{}", receipted.len());
        let found = everything(&broker, &format!("t{topic}")).await;
        // Whatever else is there had no receipt yet. Nothing is there twice.
        let mut unique = found.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), found.len());
        let mut rest = found.iter();
        for record in &receipted {
            assert!(rest.any(|found| found == record), "{record} is lost, or out of order");
        }
    }
    let said = broker.end(Signal::TERM);
    assert!(said.contains("survives the end of this process"), "{said}");
}

#[tokio::test]
async fn a_full_disk_refuses_messages_and_loses_none() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    // A limit on the size of files stands in for a disk that is full: writes fail, and later they do not.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -S -f 8192; exec \"$0\" broker \"$@\""]);
    limited.arg(env!("CARGO_BIN_EXE_gradwire")).env_remove("GRADWIRE_BROKER_TOKEN");
    let broker = Broker::start_by(&mut limited, &["--data-dir", directory.to_str().unwrap()]);
    let client_1 = client(&broker).await;
    let mut producer_1 = producer(&client_1, "t").await;
    let mut receipted = Vec::new();
    let mut send = async |producer: &mut Producer<_>, number: usize| {
        let record = format!("{number}-{}", "x".repeat(20_000));
        let sent = producer.send_non_blocking(record.as_bytes()).await.unwrap();
        let receipt = timeout(Duration::from_secs(3), sent).await;
        let kept = matches!(receipt, Ok(Ok(_)));
        if kept {
            receipted.push(record);
        }
        kept
    };
    let mut number = 0;
    while send(&mut producer_1, number).await {
        number += 1;
        assert!(number < 2000, "the limit is not reached");
    }
    assert!(number > 50, "{number}");
    // It still answers, and what is there is read.
    assert_eq!(everything(&broker, "t").await.len(), number);
    let pid = Pid::from_raw(broker.child.id().cast_signed());
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    drop((producer_1, client_1));
    let client_2 = client(&broker).await;
    let mut producer_2 = producer(&client_2, "t").await;
    for number in 5000..5100 {
        assert!(send(&mut producer_2, number).await, "there is room again");
    }
    let before = everything(&broker, "t").await;
    let said = broker.end(Signal::KILL);
    assert!(said.contains("refuses messages") && said.contains(directory.to_str().unwrap()), "{said}");
    let broker = Broker::start_in(&directory, &[]);
    let found = everything(&broker, "t").await;
    assert_eq!(found, before);
    let mut rest = found.iter();
    assert!(receipted.iter().all(|record| rest.any(|found| found == record)));
}

#[test]
fn a_stop_without_the_directory_is_no_success() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let mut broker = Broker::start_in(&directory, &[]);
    fs::remove_dir_all(&directory).unwrap();
    kill(broker.child.id().cast_signed(), Signal::TERM);
    let status = await_condition("the broker ends", || broker.child.try_wait().unwrap());
    let mut said = String::new();
    broker.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write") && said.contains(directory.to_str().unwrap()), "{said}");
}

#[test]
fn a_directory_that_cannot_be_used_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let shown = directory.to_str().unwrap();
    let running = Broker::start_in(&directory, &[]);
    let process = running.child.id().to_string();
    refused(&broker(&["--no-auth", "--data-dir", shown]), &[shown, "in use", &process]);
    running.end(Signal::TERM);

    let table = directory.join("topics.redb");
    let mut content = fs::read(&table).unwrap();
    content.iter_mut().skip(4096).step_by(1000).for_each(|byte| *byte ^= 0x55);
    fs::write(&table, content).unwrap();
    refused(&broker(&["--no-auth", "--data-dir", shown]), &[shown, "damaged", "move it away"]);

    fs::write(directory.join("format"), "gradwire broker data, format 7\n").unwrap();
    refused(&broker(&["--no-auth", "--data-dir", shown]), &[shown, "newer version"]);

    let foreign = parent.path().to_str().unwrap();
    refused(&broker(&["--no-auth", "--data-dir", foreign]), &[foreign, "not a broker's", "'data'"]);
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
}

#[test]
fn files_for_tls_are_named_when_they_cannot_be_used() {
    let parent = tempfile::tempdir().unwrap();
    let junk = parent.path().join("junk.pem");
    fs::write(&junk, "junk").unwrap();
    let junk = junk.to_str().unwrap();
    refused(&broker(&["--no-auth", "--tls-cert", junk, "--tls-key", "/nonexistent.key"]), &[junk]);
    for incomplete in [&["--no-auth", "--tls-cert", junk][..], &["--tls-client-ca", junk], &["--no-auth", "--fsync"]] {
        assert_eq!(broker(incomplete).status.code(), Some(2), "{incomplete:?}");
    }
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    for (arguments, says) in
        [(["--message-size-max", "64MiB"], "--topic-memory-max"), (["--topic-memory-max", "1GiB"], "--memory-max")]
    {
        refused(&broker(&["--no-auth", arguments[0], arguments[1]]), &[says]);
    }
    for arguments in [["--memory-max", "0"], ["--memory-max", "lots"], ["--topic-memory-max", "9999GiB"]] {
        assert_eq!(broker(&["--no-auth", arguments[0], arguments[1]]).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn without_a_directory_it_says_that_nothing_stays() {
    let broker = Broker::start(&["--memory-max", "1GiB", "--topic-memory-max", "1GiB", "--message-size-max", "8MiB"]);
    let said = broker.end(Signal::INT);
    assert!(said.contains("all topics are gone") && said.contains("--data-dir"), "{said}");
}
