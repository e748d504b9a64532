//! Joining, faults, events and version records, over a real broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use gradwire_control::{ControlEvent, ControlPlane, JobConfig, VersionQuery, read_versions};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Secret};

fn faults(joined: Vec<Joined>) -> Vec<Fault> {
    joined.into_iter().map(|joined| joined.expect_err("a fault")).collect()
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
            plane.leave(PATIENCE, PATIENCE).unwrap();
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
            plane.leave(PATIENCE, PATIENCE).unwrap();
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
    assert_eq!(all_versions(&config), records);
    // Who does not know the secret reads nothing.
    let stranger = JobConfig { secret: Secret::from_bytes([9; 32]), ..config };
    let read = read_versions(&stranger, &VersionQuery::default(), PATIENCE).unwrap();
    assert_eq!((read.records, read.rejected), (vec![], 5));
}

#[test]
fn a_job_without_versions_reads_none() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("none"), 1);
    assert_eq!(all_versions(&config), []);
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
fn impossible_ranks_are_refused_before_anything_is_sent() {
    let config = job("pulsar://127.0.0.1:1", "ranks", 1);
    for (rank, world_size) in [(0, 0), (2, 2), (0, 1025)] {
        let fault = ControlPlane::join(request(&config, rank, world_size)).expect_err("impossible");
        assert_eq!(fault.kind, FaultKind::InvalidArgument);
    }
}
