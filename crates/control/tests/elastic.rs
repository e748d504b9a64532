//! Epochs after the first: members that leave, are suspected or join a running job, over a real broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::time::Duration;

use common::*;
use futures::StreamExt;
use gradwire_control::{
    AuditKind, AuditQuery, ControlEvent, ControlPlane, JobConfig, JoinRequest, Policy, Topic, View, read_audit,
};
use gradwire_proto::FaultKind;
use pulsar::consumer::InitialPosition;

fn elastic(config: &JobConfig, rank: u32, world_size: u32) -> JoinRequest {
    JoinRequest { policy: Policy::Elastic { ranks_max: 8 }, ..request(config, rank, world_size) }
}

fn start(config: &JobConfig, ranks: u32) -> Vec<ControlPlane> {
    let joined = join_all((0..ranks).map(|rank| elastic(config, rank, ranks)).collect());
    joined.into_iter().map(|joined| joined.expect("a member").0).collect()
}

fn ranks(view: &View) -> Vec<u32> {
    view.members.iter().map(|member| member.rank.0).collect()
}

/// The next view of a member.
fn view(plane: &ControlPlane) -> View {
    match eventually("a view", || plane.event()) {
        ControlEvent::View(view) => view,
        other => panic!("{other:?} instead of a view"),
    }
}

/// Joins a running job, and becomes a member of it.
fn join_late(request: JoinRequest) -> (ControlPlane, View) {
    let (plane, before) = ControlPlane::join(request).expect("a candidate");
    assert!(before.member(plane.join_id()).is_none(), "it has to get the state first");
    plane.ready();
    loop {
        let view = view(&plane);
        if view.member(plane.join_id()).is_some() {
            return (plane, view);
        }
    }
}

#[test]
fn a_suspected_rank_is_left_out_on_every_rank_and_learns_it() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("suspect"), 1);
    let planes = start(&config, 4);
    planes[1].suspect(planes[3].join_id(), "silent for 3 s");
    let views: Vec<View> = planes[..3].iter().map(view).collect();
    assert!(views.iter().all(|view| *view == views[0]));
    assert_eq!((views[0].epoch.0, ranks(&views[0])), (2, vec![0, 1, 2]));
    let removed = eventually("the removal", || planes[3].event());
    assert!(matches!(&removed, ControlEvent::Removed(fault) if fault.kind == FaultKind::Removed), "{removed:?}");
    for plane in &planes {
        plane.flush(PATIENCE).unwrap();
    }
    let query = AuditQuery { kinds: vec![AuditKind::Suspected, AuditKind::Epoch], ..Default::default() };
    let audit = read_audit(&config, &query, PATIENCE).unwrap().records;
    assert_eq!(audit.iter().filter(|entry| entry.record.kind == AuditKind::Suspected).count(), 1);
    assert_eq!(audit.iter().filter(|entry| entry.record.kind == AuditKind::Epoch).count(), 3);
}

#[test]
fn a_job_shrinks_and_grows_while_it_runs() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("grow"), 1);
    let mut planes = start(&config, 3);
    planes.pop().unwrap().leave(PATIENCE, PATIENCE).unwrap();
    assert!(planes.iter().all(|plane| ranks(&view(plane)) == [0, 1]));
    // A new process of rank 2; then one of rank 0, while that is still there.
    let (restarted, its_view) = join_late(elastic(&config, 2, 3));
    assert_eq!((its_view.epoch.0, ranks(&its_view)), (3, vec![0, 1, 2]));
    assert!(planes.iter().all(|plane| view(plane) == its_view));
    let (waiting, _) = ControlPlane::join(elastic(&config, 0, 3)).expect("a candidate");
    waiting.ready();
    std::thread::sleep(Duration::from_millis(500));
    assert!(planes.iter().chain([&waiting]).all(|plane| plane.event().is_none()), "rank 0 lives");
    waiting.leave(PATIENCE, PATIENCE).unwrap();
    // One with a rank that the job did not start with.
    let (further, its_view) = join_late(elastic(&config, 7, 3));
    assert_eq!((its_view.epoch.0, ranks(&its_view)), (4, vec![0, 1, 2, 7]));
    assert!(planes.iter().chain([&restarted]).all(|plane| view(plane) == its_view));
    further.leave(PATIENCE, PATIENCE).unwrap();
    assert!(planes.iter().chain([&restarted]).all(|plane| ranks(&view(plane)) == [0, 1, 2]));
    restarted.leave(PATIENCE, PATIENCE).unwrap();
    assert!(planes.iter().all(|plane| ranks(&view(plane)) == [0, 1]));
}

#[test]
fn a_late_joiner_starts_from_the_latest_snapshot() {
    let broker = test_broker();
    let config = job(broker.url(), &unique("late"), 1);
    let planes = start(&config, 2);
    planes[0].suspect(planes[1].join_id(), "a test");
    assert_eq!(ranks(&view(&planes[0])), [0]);
    // Rank 1 comes and goes: each time from a snapshot of the epoch before.
    for _ in 0..5 {
        let (restarted, its_view) = join_late(elastic(&config, 1, 2));
        assert_eq!((ranks(&its_view), view(&planes[0])), (vec![0, 1], its_view));
        restarted.leave(PATIENCE, PATIENCE).unwrap();
        assert_eq!(ranks(&view(&planes[0])), [0]);
    }
    let snapshots = messages(broker.url(), &config.topic(Topic::Snapshots));
    assert!(snapshots.len() >= 5, "{} snapshots", snapshots.len());
    let control = messages(broker.url(), &config.topic(Topic::Control));
    assert!(control.len() > 10);
}

/// Everything in a topic.
fn messages(url: &str, topic: &str) -> Vec<Vec<u8>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = pulsar::Pulsar::builder(url, pulsar::TokioExecutor).build().await.unwrap();
        let options = pulsar::ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
        let build = client.reader().with_topic(topic).with_subscription(unique("read")).with_options(options);
        let mut reader: pulsar::reader::Reader<Vec<u8>, _> = build.into_reader().await.unwrap();
        let last = reader.get_last_message_id().await.unwrap();
        let mut messages = Vec::new();
        let mut done = last.entry_id == u64::MAX;
        while !done {
            let message = reader.next().await.unwrap().unwrap();
            done = message.message_id().entry_id >= last.entry_id;
            messages.push(message.payload.data);
        }
        messages
    })
}

#[test]
fn two_launches_of_an_elastic_job_never_mix() {
    let broker = test_broker();
    let name = unique("launches");
    let first = job(broker.url(), &name, 1);
    let planes = start(&first, 2);
    let second = job(broker.url(), &name, 2);
    for joined in join_all((0..2).map(|rank| elastic(&second, rank, 2)).collect()) {
        assert_eq!(joined.expect_err("the first lives").kind, FaultKind::JobNameTaken);
    }
    // The first goes on changing.
    planes[0].suspect(planes[1].join_id(), "a test");
    assert_eq!(ranks(&view(&planes[0])), [0]);
}
