//! Brokers that end and come back, and brokers that ask for tokens.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::time::Duration;

use common::client::{client, earliest, producer, reader};
use common::*;
use futures::StreamExt;
use gradwire_control::{AuditQuery, ControlPlane, Token, Topic, VersionQuery, read_audit, read_versions};
use gradwire_proto::{Fault, FaultKind};

/// How long ranks wait for each other and for a broker that restarts: Apache Pulsar takes a while.
const DEADLINE: Duration = Duration::from_secs(120);

#[test]
fn a_broker_that_restarts_while_ranks_join_delays_them_only() {
    let mut broker = own_broker();
    let config = job(broker.url(), &unique("restart-join"), 1);
    let mut requests = [request(&config, 0, 2), request(&config, 1, 2)];
    requests.iter_mut().for_each(|request| request.deadline = DEADLINE);
    let [first, second] = requests;
    let waiting = std::thread::spawn(move || ControlPlane::join(first));
    // The first rank is at the broker when it goes away, perhaps with the log.
    eventually("the first Join", || (!log(&broker, &config.topic(Topic::Control)).is_empty()).then_some(()));
    broker.kill();
    broker.start();
    let second = ControlPlane::join(second).expect("a member");
    let first = waiting.join().unwrap().expect("a member");
    assert_eq!(first.1, second.1);
}

#[test]
fn a_broker_that_restarts_after_joining_gets_the_versions_later() {
    let mut broker = own_broker();
    let config = job(broker.url(), &unique("restart"), 1);
    let members = planes(join_all((0..2).map(|rank| request(&config, rank, 2)).collect()));
    broker.kill();
    eventually("the lost link", || (members[0].links_lost() > 0).then_some(()));
    for step in 0..5 {
        members[0].publish_version(version(0, step, 3)).expect("nothing waits for the broker");
    }
    assert_eq!(members[0].flush(Duration::ZERO).unwrap_err().kind, FaultKind::DeadlineExceeded);
    broker.start();
    members[0].flush(PATIENCE).unwrap();
    let steps: Vec<_> = all_versions(&config).iter().map(|record| record.step.0).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4]);
    // The control log works again too.
    members[1].report(&Fault::new(FaultKind::Cancelled, "enough"));
    eventually("an event", || members[0].event());
}

#[test]
fn a_dead_job_of_the_same_name_does_not_stand_in_the_way() {
    let mut broker = own_broker();
    let name = unique("dead");
    let dead = job(broker.url(), &name, 1);
    // Processes that are killed: their Joins are in the log, but no Left, and nobody answers.
    let members = planes(join_all((0..2).map(|rank| request(&dead, rank, 2)).collect()));
    let before = log(&broker, &dead.topic(Topic::Control));
    broker.kill();
    drop(members);
    broker.start();
    // A broker that holds its topics in memory has lost them.
    let kept = log(&broker, &dead.topic(Topic::Control)).len();
    assert!(kept == 0 || kept == before.len(), "{kept} of {} records are left", before.len());
    append(&broker, &dead.topic(Topic::Control), &before[kept..]);
    let next = job(broker.url(), &name, 2);
    assert_eq!(planes(join_all((0..2).map(|rank| request(&next, rank, 2)).collect())).len(), 2);
}

#[test]
fn a_wrong_or_missing_token_is_refused_and_the_right_one_admitted() {
    let broker = own_broker_with_token();
    let right = broker.token().expect("it asks for one");
    let config = job(broker.url(), "token", 1);
    for token in [None, Some(String::new()), Some(format!("{right}x")), Some("another".to_owned())] {
        let mut config = config.clone();
        config.broker.token = token.map(Token::Text);
        let fault = ControlPlane::join(request(&config, 0, 1)).expect_err("not admitted");
        assert_eq!(fault.kind, FaultKind::BrokerUnreachable, "{fault}");
        assert!(fault.detail.contains("token") && fault.detail.contains(broker.url()), "{fault}");
    }
    let mut config = config;
    config.broker.token = Some(Token::Text(right.to_owned()));
    ControlPlane::join(request(&config, 0, 1)).expect("admitted");
}

/// Everything in a topic.
fn log(broker: &TestBroker, topic: &str) -> Vec<Vec<u8>> {
    now(async {
        let mut reader = reader(&client(broker.url()).await, topic, earliest()).await;
        let last = reader.get_last_message_id().await.unwrap().entry_id;
        let mut log = Vec::new();
        while last != u64::MAX && log.len() as u64 <= last {
            log.push(reader.next().await.unwrap().unwrap().payload.data);
        }
        log
    })
}

/// Whoever may write to the topics can repeat what is there, or write anything else.
#[test]
fn records_that_come_again_change_nothing_for_readers() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("again"), 1);
    let members = planes(join_all((0..2).map(|rank| request(&config, rank, 2)).collect()));
    for step in 0..3 {
        members[0].publish_version(version(0, step, 3)).unwrap();
    }
    members.iter().for_each(|member| member.leave(PATIENCE, PATIENCE).unwrap());
    let read = || {
        let latest = VersionQuery { latest: true, ..VersionQuery::default() };
        let latest = read_versions(&config, &latest, PATIENCE).unwrap();
        let audit = read_audit(&config, &AuditQuery::default(), PATIENCE).unwrap();
        (latest.records, audit.records)
    };
    let before = read();
    assert_eq!(before.0.iter().map(|record| record.step.0).collect::<Vec<_>>(), [2]);
    for topic in [Topic::Versions, Topic::Audit] {
        let topic = config.topic(topic);
        let mut again = log(&broker, &topic);
        again.truncate(2);
        again.push(b"junk".to_vec());
        append(&broker, &topic, &again);
    }
    assert_eq!(read(), before);
}

/// Writes messages to a topic.
fn append(broker: &TestBroker, topic: &str, log: &[Vec<u8>]) {
    now(async {
        let mut producer = producer(&client(broker.url()).await, topic).await;
        for record in log {
            producer.send_non_blocking(record.clone()).await.unwrap().await.unwrap();
        }
    });
}

fn now<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
