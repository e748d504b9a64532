//! Whatever ranks open at the broker is closed again on every path.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use gradwire_control::{ControlPlane, CopyRequest, CopyStore, EmbeddedBroker, Held, JobConfig, ShardVersion, Topic};
use gradwire_proto::{Epoch, Rank, Step, UnitIndex};

/// Ranks that join and leave, all jobs together.
const JOINS: u32 = 1000;
/// Against a broker with a disk behind it, joining takes a few hundred milliseconds.
const JOINS_SLOW: u32 = 100;
/// Jobs at a time.
const LANES: u32 = 8;

struct Store;

impl CopyStore for Store {
    fn copy(&self, _requester: Rank, _shard: &ShardVersion) -> Held {
        Held::Data(vec![7; 100])
    }
}

/// Two ranks join, exchange a copy, publish, and end: in good order, by being dropped, or after a fault.
fn live_and_die(config: &JobConfig, how: u32) {
    let mut members = planes(join_all((0..2).map(|rank| request(config, rank, 2)).collect()));
    if how.is_multiple_of(5) {
        members[1].hold_copies(Arc::new(Store)).unwrap();
        let shard = ShardVersion { epoch: Epoch(1), step: Step(0), unit: UnitIndex(how) };
        members[0].fetch_copies(&[CopyRequest { shard, crc: None }], PATIENCE).unwrap();
    }
    members[0].publish_version(version(0, 1, 3)).unwrap();
    match how % 3 {
        0 => members.drain(..).for_each(|member| member.leave(PATIENCE, PATIENCE).unwrap()),
        1 => drop(members),
        _ => {
            // A second process of a rank that is taken is refused, and closes what it had opened.
            ControlPlane::join(request(config, 1, 2)).expect_err("taken");
            drop(members);
        }
    }
}

#[test]
fn joining_and_leaving_leaves_nothing_on_the_broker() {
    let admin = std::env::var("GRADWIRE_TEST_PULSAR_URL")
        .ok()
        .map(|_| std::env::var("GRADWIRE_TEST_PULSAR_ADMIN").expect("the admin interface of the broker that is given"));
    let embedded = admin.is_none().then(embedded_broker);
    let url = embedded.as_ref().map_or_else(|| test_broker().url().to_owned(), |broker| broker.url().to_owned());
    let joins = if admin.is_some() { JOINS_SLOW } else { JOINS };
    let names: Vec<String> = (0..LANES).map(|_| unique("leak")).collect();
    std::thread::scope(|scope| {
        for (lane, name) in names.iter().enumerate() {
            let url = &url;
            scope.spawn(move || {
                for round in 0..joins / 2 / LANES + 1 {
                    live_and_die(&job(url, name, round as u8), round + lane as u32);
                }
            });
        }
    });
    match (&embedded, &admin) {
        (Some(broker), _) => check_embedded(broker),
        (_, Some(admin)) => names.iter().for_each(|name| check_apache(admin, &job(&url, name, 0))),
        _ => unreachable!("one of them is there"),
    }
}

fn check_embedded(broker: &EmbeddedBroker) {
    eventually("the last links to end", || (broker.stats().links == 0).then_some(()));
    let stats = broker.stats();
    assert!(!stats.topics.is_empty());
    for topic in &stats.topics {
        assert!(topic.producers.is_empty(), "{topic:?}");
        assert!(topic.subscriptions.iter().all(|subscription| subscription.consumers.is_empty()), "{topic:?}");
        // What outlives its consumers is the holders' subscription alone.
        assert!(topic.subscriptions.iter().all(|subscription| subscription.name == "holders"), "{topic:?}");
    }
}

fn check_apache(admin: &str, config: &JobConfig) {
    for topic in [Topic::Control, Topic::Versions, Topic::Audit, Topic::Retransmit, Topic::Copies, Topic::Snapshots] {
        let path = config.topic(topic).replace("persistent://", "/admin/v2/persistent/");
        eventually("the topic's clients to be gone", || {
            let stats = get(admin, &format!("{path}/stats"));
            (stats.contains("\"publishers\":[]") && !stats.contains("\"consumerName\"")).then_some(())
        });
    }
}

/// The body of a page of the admin interface.
fn get(admin: &str, path: &str) -> String {
    let host = admin.strip_prefix("http://").unwrap().trim_end_matches('/');
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    assert!(page.starts_with("HTTP/1.1 200"), "{path}: {page}");
    page
}
