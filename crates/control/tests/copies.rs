//! Copies of shards over the broker: who lacks a version gets it from any rank that holds it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use futures::StreamExt;
use gradwire_control::{
    AuditKind, AuditQuery, ControlPlane, CopyRequest, CopyStore, Held, JobConfig, ShardVersion, Topic, read_audit,
};
use gradwire_proto::{Epoch, FaultKind, Rank, Step, UnitIndex};

const STEP: Step = Step(41);

fn shard(unit: u32) -> ShardVersion {
    ShardVersion { epoch: Epoch(1), step: STEP, unit: UnitIndex(unit) }
}

/// What every rank that has the version has.
fn bytes_of(unit: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index as u32).wrapping_mul(31).wrapping_add(unit * 7) as u8).collect()
}

fn wanted(units: impl IntoIterator<Item = u32>, bytes: usize) -> Vec<CopyRequest> {
    let request = |unit| CopyRequest { shard: shard(unit), crc: Some(crc32fast::hash(&bytes_of(unit, bytes))) };
    units.into_iter().map(request).collect()
}

/// Holds one step of all units, of this size.
struct Versions {
    bytes: usize,
    spoilt: bool,
    asked: AtomicU64,
}

impl Versions {
    fn new(bytes: usize, spoilt: bool) -> Arc<Self> {
        Arc::new(Self { bytes, spoilt, asked: AtomicU64::new(0) })
    }
}

impl CopyStore for Versions {
    fn copy(&self, _requester: Rank, shard: &ShardVersion) -> Held {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if shard.step != STEP {
            return Held::No;
        }
        let mut data = bytes_of(shard.unit.0, self.bytes);
        if self.spoilt {
            data[0] ^= 1;
        }
        Held::Data(data)
    }
}

struct Nothing;

impl CopyStore for Nothing {
    fn copy(&self, _requester: Rank, _shard: &ShardVersion) -> Held {
        Held::No
    }
}

fn members(name: &str, ranks: u32) -> (TestBroker, JobConfig, Vec<ControlPlane>) {
    let broker = test_broker();
    let config = job(broker.url(), &unique(name), 1);
    let joined = join_all((0..ranks).map(|rank| request(&config, rank, ranks)).collect());
    let planes = joined.into_iter().map(|joined| joined.expect("a member").0).collect();
    (broker, config, planes)
}

fn hold(plane: &ControlPlane, store: Arc<dyn CopyStore>) {
    plane.hold_copies(store).unwrap();
    assert!(plane.wait_until_holding(PATIENCE));
}

#[test]
fn requests_spread_over_the_holders_and_copies_are_right() {
    let (_broker, config, planes) = members("spread", 5);
    let stores: Vec<_> = (0..4).map(|_| Versions::new(3000, false)).collect();
    for (plane, store) in planes[1..].iter().zip(&stores) {
        hold(plane, store.clone());
    }
    let copies = planes[0].fetch_copies(&wanted(0..200, 3000), PATIENCE).unwrap();
    for (unit, copy) in (0..).zip(&copies) {
        assert_eq!(copy, &bytes_of(unit, 3000), "unit {unit}");
    }
    let served: Vec<u64> = planes[1..].iter().map(|plane| plane.copy_stats().served).collect();
    assert_eq!(served.iter().sum::<u64>(), 200, "each was asked for once: {served:?}");
    assert!(served.iter().all(|served| *served > 0), "the load spreads: {served:?}");
    planes[0].flush(PATIENCE).unwrap();
    let query = AuditQuery { kinds: vec![AuditKind::Read], ..Default::default() };
    let read = read_audit(&config, &query, PATIENCE).unwrap().records;
    assert_eq!(read.iter().map(|entry| (entry.author, entry.record.step)).collect::<Vec<_>>(), [(Rank(0), STEP)]);
}

#[test]
fn a_copy_larger_than_a_message_comes_in_pieces() {
    let (_broker, _config, planes) = members("large", 2);
    hold(&planes[1], Versions::new(3 << 20, false));
    let copies = planes[0].fetch_copies(&wanted(0..3, 3 << 20), PATIENCE).unwrap();
    assert!((0..3).all(|unit| copies[unit as usize] == bytes_of(unit, 3 << 20)));
}

#[test]
fn who_lacks_a_version_passes_the_request_on() {
    let (_broker, _config, planes) = members("pass-on", 4);
    hold(&planes[1], Arc::new(Nothing));
    hold(&planes[2], Arc::new(Nothing));
    hold(&planes[3], Versions::new(100, false));
    planes[0].fetch_copies(&wanted(0..50, 100), PATIENCE).unwrap();
    let passed_on: u64 = planes[1..3].iter().map(|plane| plane.copy_stats().passed_on).sum();
    assert!(passed_on > 0);
    assert_eq!(planes[3].copy_stats().served, 50);
}

#[test]
fn a_version_that_nobody_holds_is_named_at_the_deadline() {
    let (_broker, _config, planes) = members("nobody", 3);
    let requests = wanted([7], 100);
    let fault = planes[0].fetch_copies(&requests, Duration::from_secs(1)).unwrap_err();
    assert_eq!((fault.kind, fault.step), (FaultKind::DeadlineExceeded, Some(STEP)));
    assert!(fault.detail.contains("unit 7 of step 41") && fault.detail.contains("no rank answered"), "{fault}");
    hold(&planes[1], Arc::new(Nothing));
    let fault = planes[0].fetch_copies(&requests, Duration::from_secs(4)).unwrap_err();
    assert!(fault.detail.contains("no rank that answers requests holds it"), "{fault}");
    assert_eq!(planes[0].fetch_copies(&[], PATIENCE), Ok(vec![]));
}

#[test]
fn a_wrong_copy_is_rejected_and_another_holder_asked() {
    let (_broker, config, planes) = members("wrong", 3);
    let spoilt = Versions::new(500, true);
    hold(&planes[1], spoilt.clone());
    hold(&planes[2], Versions::new(500, false));
    let copies = planes[0].fetch_copies(&wanted(0..20, 500), PATIENCE).unwrap();
    assert!((0..20).all(|unit| copies[unit as usize] == bytes_of(unit, 500)));
    let wrong = planes[0].copy_stats().rejected;
    assert_eq!(wrong, spoilt.asked.load(Ordering::Relaxed));
    assert!(wrong > 0);
    planes[0].flush(PATIENCE).unwrap();
    let query = AuditQuery { kinds: vec![AuditKind::Rejected], rank: Some(Rank(0)), ..Default::default() };
    let rejected = read_audit(&config, &query, PATIENCE).unwrap().records;
    assert_eq!(rejected.len() as u64, wrong);
    assert!(rejected[0].record.detail.contains("from rank 1"), "{rejected:?}");
}

/// A holder that takes requests and goes away without an answer.
#[test]
fn a_holder_that_leaves_in_the_middle_costs_a_redelivery_only() {
    let (broker, config, planes) = members("leaves", 2);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (url, topic) = (broker.url().to_owned(), config.topic(Topic::Retransmit));
    let (client, consumer) = runtime.block_on(async {
        let client = pulsar::Pulsar::builder(url, pulsar::TokioExecutor).build().await.unwrap();
        let consumer: pulsar::Consumer<Vec<u8>, _> = client
            .consumer()
            .with_topic(topic)
            .with_subscription("holders")
            .with_subscription_type(pulsar::SubType::KeyShared)
            .with_consumer_name("leaves")
            .build()
            .await
            .unwrap();
        (client, consumer)
    });
    std::thread::scope(|scope| {
        let fetching = scope.spawn(|| planes[0].fetch_copies(&wanted(0..30, 200), PATIENCE));
        let taken = runtime.block_on(async {
            let mut consumer = consumer;
            let taken = consumer.next().await.unwrap().unwrap();
            hold(&planes[1], Versions::new(200, false));
            drop((consumer, client));
            taken
        });
        assert!(taken.payload.data.len() > 48);
        let copies = fetching.join().unwrap().unwrap();
        assert!((0..30).all(|unit| copies[unit as usize] == bytes_of(unit, 200)));
    });
}

#[test]
fn what_does_not_verify_is_neither_answered_nor_taken() {
    let (broker, config, planes) = members("forged", 2);
    hold(&planes[1], Versions::new(100, false));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = pulsar::Pulsar::builder(broker.url(), pulsar::TokioExecutor).build().await.unwrap();
        for topic in [Topic::Retransmit, Topic::Copies] {
            let mut producer = client.producer().with_topic(config.topic(topic)).build().await.unwrap();
            for forged in [&b"no record"[..], &[0x47; 200]] {
                producer.send_non_blocking(forged.to_vec()).await.unwrap().await.unwrap();
            }
        }
    });
    eventually("the rejections", || (planes[1].copy_stats().rejected >= 2).then_some(()));
    planes[0].fetch_copies(&wanted(0..10, 100), PATIENCE).unwrap();
    assert_eq!(planes[1].copy_stats().served, 10);
}
