//! Joining, faults, events and version records, over a real broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use gradwire_control::{
    ControlEvent, ControlPlane, EmbeddedBroker, JobConfig, Token, Topic, VersionQuery, VersionRecord, broker_token,
    read_versions,
};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Secret, Step, UnitIndex};

fn faults(joined: Vec<Joined>) -> Vec<Fault> {
    joined.into_iter().map(|joined| joined.expect_err("a fault")).collect()
}

fn planes(joined: Vec<Joined>) -> Vec<ControlPlane> {
    joined.into_iter().map(|joined| joined.expect("a member").0).collect()
}

fn version(owner: u32, step: u64, crcs: u32) -> VersionRecord {
    VersionRecord {
        epoch: Epoch(1),
        step: Step(step),
        owner: Rank(owner),
        contributors: vec![Rank(0), Rank(1)],
        crcs: (0..crcs).map(|unit| (UnitIndex(unit), unit.wrapping_mul(31))).collect(),
    }
}

/// All version records of a job.
fn all(config: &JobConfig) -> Vec<VersionRecord> {
    read_versions(config, &VersionQuery::default(), PATIENCE).unwrap().records
}

#[test]
fn one_to_eight_ranks_agree_on_the_members() {
    let broker = test_broker();
    for world_size in [1, 2, 3, 8] {
        let config = job(broker.url(), &unique("agree"), 1);
        let requests = (0..world_size).map(|rank| request(&config, rank, world_size)).collect();
        for joined in join_all(requests) {
            let (plane, membership) = joined.expect("a member");
            assert_eq!(membership.epoch, Epoch(1));
            let names: Vec<_> = membership.members.iter().map(|member| member.endpoint.hostname.clone()).collect();
            assert_eq!(names, (0..world_size).map(|rank| format!("host-{rank}")).collect::<Vec<_>>());
            plane.leave(PATIENCE);
        }
    }
}

#[test]
fn a_job_can_be_launched_again_at_once_after_it_left() {
    let broker = test_broker();
    let name = unique("again");
    for launch in 1..4 {
        let config = job(broker.url(), &name, launch);
        for plane in planes(join_all((0..2).map(|rank| request(&config, rank, 2)).collect())) {
            plane.leave(PATIENCE);
        }
    }
}

#[test]
fn different_world_sizes_are_named_on_every_rank() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("sizes"), 1);
    let requests = vec![request(&config, 0, 3), request(&config, 1, 3), request(&config, 2, 4)];
    for fault in faults(join_all(requests)) {
        assert_eq!(fault.kind, FaultKind::WorldMismatch, "{fault}");
        assert!(fault.detail.contains("world size 3") && fault.detail.contains("world size 4"), "{fault}");
    }
}

#[test]
fn a_rank_taken_twice_is_named_on_every_rank() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("twice"), 1);
    let requests = vec![request(&config, 0, 3), request(&config, 1, 3), request(&config, 1, 3)];
    for fault in faults(join_all(requests)) {
        assert_eq!((fault.kind, fault.rank), (FaultKind::WorldMismatch, Some(Rank(1))), "{fault}");
    }
}

#[test]
fn another_secret_is_found_out() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("secret"), 1);
    let odd = JobConfig { secret: Secret::from_bytes([9; 32]), ..config.clone() };
    let mut requests = vec![request(&config, 0, 3), request(&config, 1, 3), request(&odd, 2, 3)];
    for request in &mut requests {
        request.deadline = Duration::from_secs(6);
    }
    let faults = faults(join_all(requests));
    assert_eq!(faults[2].kind, FaultKind::SecretMismatch, "{}", faults[2]);
    for fault in &faults[..2] {
        assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(2))), "{fault}");
        assert!(fault.detail.contains("do not verify"), "{fault}");
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("missing"), 1);
    let mut requests = vec![request(&config, 0, 3), request(&config, 2, 3)];
    for request in &mut requests {
        request.deadline = Duration::from_secs(3);
    }
    for fault in faults(join_all(requests)) {
        assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(1))), "{fault}");
    }
}

#[test]
fn a_second_job_of_the_same_name_gives_way() {
    let broker = test_broker();
    let name = unique("taken");
    let first = job(broker.url(), &name, 1);
    let members = planes(join_all((0..2).map(|rank| request(&first, rank, 2)).collect()));
    let second = job(broker.url(), &name, 2);
    for fault in faults(join_all((0..2).map(|rank| request(&second, rank, 2)).collect())) {
        assert_eq!(fault.kind, FaultKind::JobNameTaken, "{fault}");
        assert!(fault.detail.contains(&name), "{fault}");
    }
    // The first is unharmed: its versions still arrive.
    members[0].publish_version(version(0, 1, 1)).unwrap();
    members[0].flush(PATIENCE).unwrap();
    assert!(members.iter().all(|member| member.event().is_none()));
}

#[test]
fn a_dead_job_of_the_same_name_does_not_stand_in_the_way() {
    let broker = embedded_broker();
    let name = unique("dead");
    let dead = job(broker.url(), &name, 1);
    // A process that was killed: its Join is there, but no Left, and nobody answers.
    let planes_of_dead = planes(join_all((0..2).map(|rank| request(&dead, rank, 2)).collect()));
    let log = common_log(&broker, &dead.topic(Topic::Control));
    drop(planes_of_dead);
    drop(broker);
    let broker = embedded_broker();
    replay(&broker, &dead.topic(Topic::Control), log);
    let next = job(broker.url(), &name, 2);
    let members = planes(join_all((0..2).map(|rank| request(&next, rank, 2)).collect()));
    assert_eq!(members.len(), 2);
}

#[test]
fn reports_reach_the_other_ranks_and_wake_them() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("report"), 1);
    let members = planes(join_all((0..3).map(|rank| request(&config, rank, 3)).collect()));
    let woken = Arc::new(AtomicBool::new(false));
    let waker = woken.clone();
    members[0].set_waker(move || waker.store(true, Ordering::SeqCst));
    let fault = Fault::new(FaultKind::RankDied, "rank 1 closed its links").at(Rank(1));
    members[2].report(&fault);
    let expected = ControlEvent::Failed(fault.reported_by(Rank(2)));
    for member in &members[..2] {
        assert_eq!(eventually("an event", || member.event()), expected);
    }
    assert!(woken.load(Ordering::SeqCst));
    assert_eq!(members[2].event(), None);
}

#[test]
fn version_records_are_published_in_order_and_read_back() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("versions"), 1);
    let members = planes(join_all((0..2).map(|rank| request(&config, rank, 2)).collect()));
    // The second is larger than one message may be.
    let records = [version(0, 1, 10), version(0, 2, 250_000), version(0, 3, 0)];
    for record in &records {
        members[0].publish_version(record.clone()).unwrap();
    }
    members[0].flush(PATIENCE).unwrap();
    assert_eq!(all(&config), records);
    // Who does not know the secret reads nothing.
    let stranger = JobConfig { secret: Secret::from_bytes([9; 32]), ..config };
    let read = read_versions(&stranger, &VersionQuery::default(), PATIENCE).unwrap();
    assert_eq!((read.records, read.rejected), (vec![], 5));
}

#[test]
fn a_job_without_versions_reads_none() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("none"), 1);
    assert_eq!(all(&config), []);
}

#[test]
fn a_broker_that_restarts_while_ranks_join_delays_them_only() {
    let broker = embedded_broker();
    let address = broker.address();
    let config = job(broker.url(), &unique("restart-join"), 1);
    let first = request(&config, 0, 2);
    let waiting = std::thread::spawn(move || ControlPlane::join(first));
    // The first rank is at the broker when it goes away, with the log.
    eventually("the first Join", || (!common_log(&broker, &config.topic(Topic::Control)).is_empty()).then_some(()));
    drop(broker);
    let _broker = restart(address);
    let second = ControlPlane::join(request(&config, 1, 2)).expect("a member");
    let first = waiting.join().unwrap().expect("a member");
    assert_eq!(first.1, second.1);
}

#[test]
fn a_broker_that_restarts_after_joining_gets_the_versions_later() {
    let broker = embedded_broker();
    let address = broker.address();
    let config = job(broker.url(), &unique("restart"), 1);
    let members = planes(join_all((0..2).map(|rank| request(&config, rank, 2)).collect()));
    drop(broker);
    eventually("the lost link", || (members[0].links_lost() > 0).then_some(()));
    for step in 0..5 {
        members[0].publish_version(version(0, step, 3)).unwrap();
    }
    assert_eq!(members[0].flush(Duration::ZERO).unwrap_err().kind, FaultKind::DeadlineExceeded);
    let _broker = restart(address);
    members[0].flush(PATIENCE).unwrap();
    let steps: Vec<_> = all(&config).iter().map(|record| record.step.0).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4]);
    // The control log works again too.
    members[1].report(&Fault::new(FaultKind::Cancelled, "enough"));
    eventually("an event", || members[0].event());
}

#[test]
fn an_unreachable_broker_is_named_with_the_reason() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = job(&format!("pulsar://{nobody}"), "unreachable", 1);
    let mut request = request(&config, 0, 1);
    request.deadline = Duration::from_millis(500);
    let fault = ControlPlane::join(request).expect_err("nobody listens");
    assert_eq!(fault.kind, FaultKind::BrokerUnreachable);
    assert!(fault.detail.contains(&nobody.to_string()), "{fault}");
}

#[test]
fn a_port_that_answers_nothing_is_given_up_on_at_the_deadline() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = job(&format!("pulsar://{}", silent.local_addr().unwrap()), "silent", 1);
    let mut request = request(&config, 0, 1);
    request.deadline = Duration::from_secs(1);
    assert_eq!(ControlPlane::join(request).expect_err("no broker").kind, FaultKind::BrokerUnreachable);
}

#[test]
fn a_wrong_url_is_refused_at_once() {
    for url in ["http://127.0.0.1:1", "nonsense", "pulsar://host.invalid:6650"] {
        let mut request = request(&job(url, "url", 1), 0, 1);
        request.deadline = Duration::from_secs(2);
        let fault = ControlPlane::join(request).expect_err("no broker");
        assert_eq!(fault.kind, FaultKind::BrokerUnreachable, "{fault}");
        assert!(fault.detail.contains(url), "{fault}");
    }
}

#[test]
fn a_wrong_or_missing_token_is_refused_and_the_right_one_admitted() {
    let secret = Secret::from_bytes([1; 32]);
    let broker =
        EmbeddedBroker::start(gradwire_control::BrokerConfig { token: Some(broker_token(&secret)), ..local() })
            .unwrap();
    let config = job(broker.url(), "token", 1);
    for token in [None, Some(String::new()), Some(broker_token(&Secret::from_bytes([2; 32])))] {
        let mut config = config.clone();
        config.broker.token = token.map(Token::Text);
        let fault = ControlPlane::join(request(&config, 0, 1)).expect_err("not admitted");
        assert_eq!(fault.kind, FaultKind::BrokerUnreachable, "{fault}");
        assert!(fault.detail.contains("token") && fault.detail.contains(broker.url()), "{fault}");
    }
    let mut config = config;
    config.broker.token = Some(Token::Text(broker_token(&secret)));
    ControlPlane::join(request(&config, 0, 1)).expect("admitted");
}

#[test]
fn impossible_ranks_are_refused_before_anything_is_sent() {
    let config = job("pulsar://127.0.0.1:1", "ranks", 1);
    for (rank, world_size) in [(0, 0), (2, 2), (0, 1025)] {
        let fault = ControlPlane::join(request(&config, rank, world_size)).expect_err("impossible");
        assert_eq!(fault.kind, FaultKind::InvalidArgument);
    }
}

/// Starts a broker at an address that was just given up.
fn restart(address: std::net::SocketAddr) -> EmbeddedBroker {
    eventually("the port", || EmbeddedBroker::start(gradwire_control::BrokerConfig::new(address)).ok())
}

/// Everything in a topic.
fn common_log(broker: &EmbeddedBroker, topic: &str) -> Vec<Vec<u8>> {
    let (url, topic) = (broker.url().to_owned(), topic.to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use futures::StreamExt;
        let client = pulsar::Pulsar::builder(url, pulsar::TokioExecutor).build().await.unwrap();
        let options =
            pulsar::ConsumerOptions::default().with_initial_position(pulsar::consumer::InitialPosition::Earliest);
        let mut reader: pulsar::reader::Reader<Vec<u8>, _> = client
            .reader()
            .with_topic(topic)
            .with_subscription(unique("log"))
            .with_options(options)
            .into_reader()
            .await
            .unwrap();
        let last = reader.get_last_message_id().await.unwrap().entry_id;
        let mut log = Vec::new();
        while last != u64::MAX && log.len() as u64 <= last {
            log.push(reader.next().await.unwrap().unwrap().payload.data);
        }
        log
    })
}

/// Writes messages to a topic.
fn replay(broker: &EmbeddedBroker, topic: &str, log: Vec<Vec<u8>>) {
    let (url, topic) = (broker.url().to_owned(), topic.to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = pulsar::Pulsar::builder(url, pulsar::TokioExecutor).build().await.unwrap();
        let mut producer = client.producer().with_topic(topic).build().await.unwrap();
        for record in log {
            producer.send_non_blocking(record).await.unwrap().await.unwrap();
        }
    });
}
