//! A federated job of threads, its values and its reference, and what can go wrong on the way.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use gradwire_control::federated::{
    Aggregator, AggregatorConfig, Contributed, Contributor, ContributorConfig, LatePolicy, RoundResult,
};
use gradwire_control::{
    AuditKind, AuditQuery, BrokerConfig, EmbeddedBroker, JobConfig, Topic, VersionQuery, read_audit, read_versions,
};
use gradwire_proto::{DType, Rank, ReduceOp, WireFormat};
use pulsar::consumer::InitialPosition;
use pulsar::{ConsumerOptions, Pulsar, SubType, TokioExecutor};

use super::common::{PATIENCE, eventually, unique};

pub(crate) const SHARD_ELEMENTS: u32 = 4096;
const PIECE_BYTES: usize = 4096;

/// A job as a test wants it.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) job: JobConfig,
    pub(crate) contributors: u32,
    pub(crate) quorum: u32,
    pub(crate) late: LatePolicy,
    pub(crate) wire: WireFormat,
    pub(crate) elements: u64,
    pub(crate) round_deadline: Duration,
    pub(crate) memory_bytes_max: usize,
    /// How long contributors wait for anything.
    pub(crate) patience: Duration,
}

impl Settings {
    pub(crate) fn new(job: JobConfig, contributors: u32) -> Self {
        Self {
            job,
            contributors,
            quorum: contributors,
            late: LatePolicy::Reject,
            wire: WireFormat::Fp32,
            // Seven shards, the last one smaller.
            elements: 6 * u64::from(SHARD_ELEMENTS) + 1000,
            round_deadline: Duration::from_secs(20),
            memory_bytes_max: 64 << 20,
            patience: PATIENCE,
        }
    }

    pub(crate) fn elements(&self) -> usize {
        self.elements as usize
    }

    pub(crate) fn shards(&self) -> u32 {
        self.elements.div_ceil(u64::from(SHARD_ELEMENTS)) as u32
    }

    /// Messages of so many contributions.
    pub(crate) fn pieces(&self, contributions: u64) -> u64 {
        let size = self.wire.wire_dtype(DType::F32).size();
        let of = |elements: usize| (elements * size).div_ceil(PIECE_BYTES) as u64;
        let shards = (0..self.shards()).map(|shard| {
            let start = shard as usize * SHARD_ELEMENTS as usize;
            of(self.elements().min(start + SHARD_ELEMENTS as usize) - start)
        });
        contributions * shards.sum::<u64>()
    }

    pub(crate) fn contributor(&self, number: u32) -> ContributorConfig {
        ContributorConfig {
            quorum: self.quorum,
            late: self.late,
            wire: self.wire,
            op: ReduceOp::Mean,
            shard_elements: Some(SHARD_ELEMENTS),
            piece_bytes: PIECE_BYTES,
            deadline: self.patience,
            ..ContributorConfig::new(self.job.clone(), Rank(number), self.contributors, self.elements)
        }
    }

    pub(crate) fn aggregator_config(&self) -> AggregatorConfig {
        AggregatorConfig {
            round_deadline: self.round_deadline,
            piece_bytes: PIECE_BYTES,
            memory_bytes_max: self.memory_bytes_max,
            ..AggregatorConfig::new(self.job.clone())
        }
    }

    pub(crate) fn aggregator(&self) -> Aggregator {
        Aggregator::start(self.aggregator_config()).unwrap()
    }

    pub(crate) fn join(&self, number: u32) -> Contributor {
        Contributor::join(self.contributor(number)).unwrap()
    }

    pub(crate) fn join_all(&self) -> Vec<Contributor> {
        let threads: Vec<_> = (0..self.contributors)
            .map(|number| {
                let settings = self.clone();
                std::thread::spawn(move || settings.join(number))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    /// Which contributor this is.
    pub(crate) fn number(&self, contributor: &Contributor) -> u32 {
        contributor.number().0
    }

    /// What a contributor brings to a round: values that round, in every order differently.
    pub(crate) fn values(&self, contributor: u32, round: u64) -> Vec<f32> {
        let mut state = u64::from(contributor) << 32 | round;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / 16_777_216.0 - 0.5) * 10_f32.powi((state >> 33) as i32 % 4)
        };
        (0..self.elements()).map(|_| next()).collect()
    }

    /// Checks a result against one process that adds up the same entries.
    pub(crate) fn assert_bits(&self, result: &RoundResult) {
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let inputs: Vec<Vec<u8>> =
            result.entries.iter().map(|entry| bytes(self.values(entry.contributor.0, entry.origin.0))).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let wire = self.wire.wire_dtype(DType::F32);
        let reference = gradwire_codec::reference(DType::F32, wire, ReduceOp::Mean, &inputs).unwrap();
        assert!(bytes(result.values.clone()) == reference, "round {} has other bits than the reference", result.round);
    }

    /// All results of a round with all contributors.
    pub(crate) fn assert_results(&self, contributors: &mut [Contributor], round: u64) {
        for contributor in contributors {
            let result = contributor.result(round, self.patience).unwrap();
            let names: Vec<_> = result.entries.iter().map(|entry| (entry.contributor.0, entry.origin.0)).collect();
            assert_eq!(names, (0..self.contributors).map(|number| (number, round)).collect::<Vec<_>>());
            assert!(!result.late);
            self.assert_bits(&result);
        }
    }

    /// A round from its start to its end, with all contributors.
    pub(crate) fn exchange(&self, contributors: &mut [Contributor], round: u64) {
        contribute(self, contributors, round);
        self.assert_results(contributors, round);
    }

    /// Every shard of these rounds has one version, with the checksum of its result; every round was audited once.
    pub(crate) fn assert_recorded(&self, rounds: u64) {
        let expected: Vec<(u64, u32)> =
            (1..=rounds).flat_map(|round| (0..self.shards()).map(move |shard| (round, shard))).collect();
        let versions = eventually("all versions", || {
            let versions = read_versions(&self.job, &VersionQuery::default(), PATIENCE).unwrap().records;
            let mut found: Vec<(u64, u32)> = versions
                .iter()
                .flat_map(|version| version.crcs.iter().map(|(unit, _)| (version.step.0, unit.0)))
                .collect();
            found.sort_unstable();
            // Each aggregator writes its own: one that is asked to stop before it is told of the last result may not.
            (found == expected).then_some(versions)
        });
        assert!(versions.iter().all(|version| version.contributors.is_sorted()));
        let query = AuditQuery { kinds: vec![AuditKind::RoundClosed], ..AuditQuery::default() };
        let audited = eventually("all rounds are audited", || {
            let entries = read_audit(&self.job, &query, PATIENCE).unwrap().records;
            (entries.len() as u64 >= rounds).then_some(entries)
        });
        let mut steps: Vec<u64> = audited.iter().map(|entry| entry.record.step.0).collect();
        steps.sort_unstable();
        assert_eq!(steps, (1..=rounds).collect::<Vec<_>>());
    }

    /// A record of this job, as docs/wire.md says.
    pub(crate) fn sealed(&self, rank: u32, kind: u16, body: &[u8]) -> Vec<u8> {
        let mut out = b"GWCR".to_vec();
        out.extend_from_slice(&2_u16.to_le_bytes());
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&self.job.instance);
        out.extend_from_slice(&[rank as u8; 16]);
        out.extend_from_slice(&rank.to_le_bytes());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(body);
        let job = self.job.job.as_str().as_bytes();
        let mac = self.job.secret.proof("gradwire control record", &[job, &out]);
        out.extend_from_slice(&mac);
        out
    }

    /// A contribution as messages with their keys: one piece for each shard.
    pub(crate) fn sealed_updates(
        &self,
        contributor: u32,
        round: u64,
        contribution: [u8; 16],
        values: &[f32],
    ) -> Vec<(String, Vec<u8>)> {
        let shards = values.chunks(SHARD_ELEMENTS as usize).zip(0_u32..);
        let message = |(values, shard): (&[f32], u32)| {
            let native: Vec<u8> = values.iter().copied().flat_map(f32::to_le_bytes).collect();
            let wire = self.wire.wire_dtype(DType::F32);
            let mut data = vec![0; values.len() * wire.size()];
            gradwire_codec::pack(DType::F32, wire, &native, &mut data).unwrap();
            let mut body = round.to_le_bytes().to_vec();
            body.extend_from_slice(&contribution);
            body.extend_from_slice(&shard.to_le_bytes());
            body.extend_from_slice(&(data.len() as u32).to_le_bytes());
            body.extend_from_slice(&gradwire_codec::crc32(&data).to_le_bytes());
            body.extend_from_slice(&0_u32.to_le_bytes());
            body.extend_from_slice(&0_u16.to_le_bytes());
            body.extend_from_slice(&1_u16.to_le_bytes());
            body.extend_from_slice(&data);
            (shard.to_string(), self.sealed(contributor, 53, &body))
        };
        shards.map(message).collect()
    }
}

/// These contributors contribute, one after the other.
pub(crate) fn contribute(settings: &Settings, contributors: &mut [Contributor], round: u64) {
    for contributor in contributors {
        let number = settings.number(contributor);
        let outcome = contributor.contribute(round, &settings.values(number, round)).unwrap();
        assert_eq!(outcome, Contributed::InTime);
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Writes messages with their keys to a topic.
pub(crate) fn send_raw(job: &JobConfig, topic: Topic, messages: Vec<(String, Vec<u8>)>) {
    block_on(async {
        let client = Pulsar::builder(job.broker.url.as_str(), TokioExecutor).build().await.unwrap();
        let mut producer = client.producer().with_topic(job.topic(topic)).build().await.unwrap();
        for (key, payload) in messages {
            let partition_key = Some(key).filter(|key| !key.is_empty());
            let message = pulsar::producer::Message { payload, partition_key, ..Default::default() };
            producer.send_non_blocking(message).await.unwrap().await.unwrap();
        }
    });
}

/// Everything in a topic, with keys.
pub(crate) fn read_raw(job: &JobConfig, topic: Topic) -> Vec<(String, Vec<u8>)> {
    block_on(async {
        let client = Pulsar::builder(job.broker.url.as_str(), TokioExecutor).build().await.unwrap();
        let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest).durable(false);
        let mut reader: pulsar::reader::Reader<Vec<u8>, _> = client
            .reader()
            .with_topic(job.topic(topic))
            .with_subscription(unique("raw"))
            .with_options(options)
            .into_reader()
            .await
            .unwrap();
        let last = reader.get_last_message_id().await.unwrap();
        let mut messages = Vec::new();
        loop {
            let message = reader.next().await.unwrap().unwrap();
            let id = message.message_id().clone();
            messages.push((message.key().unwrap_or_default(), message.payload.data));
            if (id.ledger_id, id.entry_id) >= (last.ledger_id, last.entry_id) {
                return messages;
            }
        }
    })
}

/// A broker that keeps its topics when it is ended as a crash would end it: the embedded one with a directory, or an
/// Apache Pulsar of the test's own where one is given.
pub(crate) enum DurableBroker {
    Embedded { config: Box<BrokerConfig>, running: Option<EmbeddedBroker>, _data: tempfile::TempDir },
    Apache(Box<super::common::TestBroker>),
}

impl DurableBroker {
    pub(crate) fn start_new() -> Self {
        if std::env::var("GRADWIRE_TEST_PULSAR_URL").is_ok_and(|url| !url.is_empty()) {
            return Self::Apache(Box::new(super::common::own_broker()));
        }
        let data = tempfile::tempdir().unwrap();
        let mut config = BrokerConfig::new("127.0.0.1:0".parse().unwrap());
        config.data_dir = Some(data.path().to_owned());
        let running = EmbeddedBroker::start(config.clone()).unwrap();
        config.listen = running.address();
        Self::Embedded { config: Box::new(config), running: Some(running), _data: data }
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::Embedded { config, .. } => format!("pulsar://{}", config.listen),
            Self::Apache(broker) => broker.url().to_owned(),
        }
    }

    pub(crate) fn kill(&mut self) {
        match self {
            Self::Embedded { running, .. } => drop(running.take()),
            Self::Apache(broker) => broker.kill(),
        }
    }

    pub(crate) fn start(&mut self) {
        match self {
            Self::Embedded { config, running, .. } => {
                *running = Some(eventually("the port", || EmbeddedBroker::start(config.as_ref().clone()).ok()));
            }
            Self::Apache(broker) => broker.start(),
        }
    }
}

/// A consumer of the aggregators' subscription that takes messages and does nothing with them.
pub(crate) struct Hoarder {
    taken: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hoarder {
    pub(crate) fn start(job: &JobConfig) -> Self {
        let (taken, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (job, counter, stopped) = (job.clone(), taken.clone(), stop.clone());
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            block_on(async {
                let client = Pulsar::builder(job.broker.url.as_str(), TokioExecutor).build().await.unwrap();
                let hex = gradwire_proto::secret::hex(&job.instance[..4]);
                let mut consumer: pulsar::Consumer<Vec<u8>, _> = client
                    .consumer()
                    .with_topic(job.topic(Topic::Updates))
                    .with_subscription(format!("aggregators-{hex}"))
                    .with_subscription_type(SubType::KeyShared)
                    .with_consumer_name(unique("hoarder"))
                    .with_options(ConsumerOptions::default().with_initial_position(InitialPosition::Earliest))
                    .build()
                    .await
                    .unwrap();
                ready.send(()).unwrap();
                while !stopped.load(Ordering::SeqCst) {
                    let next = tokio::time::timeout(Duration::from_millis(20), consumer.next()).await;
                    counter.fetch_add(u64::from(next.is_ok()), Ordering::SeqCst);
                }
            });
        });
        started.recv().unwrap();
        Self { taken, stop, thread: Some(thread) }
    }

    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }
}

impl Drop for Hoarder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// An embedded broker behind links that can be cut.
pub(crate) struct Proxy {
    address: SocketAddr,
    open: Arc<AtomicBool>,
    links: Arc<Mutex<Vec<TcpStream>>>,
    _broker: EmbeddedBroker,
}

impl Proxy {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut config = BrokerConfig::new("127.0.0.1:0".parse().unwrap());
        config.advertise = Some(address.to_string());
        let broker = EmbeddedBroker::start(config).unwrap();
        let target = broker.address();
        let (open, links) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let (is_open, kept) = (open.clone(), links.clone());
        std::thread::spawn(move || {
            for link in listener.incoming() {
                let Ok(link) = link else { return };
                if !is_open.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(other) = TcpStream::connect(target) else { return };
                kept.lock().unwrap().extend([link.try_clone().unwrap(), other.try_clone().unwrap()]);
                for (mut from, mut to) in [(link.try_clone().unwrap(), other.try_clone().unwrap()), (other, link)] {
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 64 << 10];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, open, links, _broker: broker }
    }

    pub(crate) fn url(&self) -> String {
        format!("pulsar://{}", self.address)
    }

    /// Ends all links, and lets nobody in.
    pub(crate) fn cut(&self) {
        self.open.store(false, Ordering::SeqCst);
        for link in self.links.lock().unwrap().drain(..) {
            let _ = link.shutdown(Shutdown::Both);
        }
    }

    /// Lets everybody in again.
    pub(crate) fn mend(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}
