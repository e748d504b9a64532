//! The rendezvous on a simulated log, with simulated time: every rank reads the same records in the same order.

mod elastic;

use gradwire_proto::Secret;
use gradwire_proto::member::Endpoint;

use super::joining::{ANSWER_MAX, SUSPECT_GRACE};
use super::*;
use crate::record::{Header, RecordKey};

const DEADLINE: Duration = Duration::from_secs(30);

/// One rank at the log.
struct Node {
    machine: Rendezvous,
    key: RecordKey,
    me: Me,
    read: usize,
}

/// The log, its readers, and the time.
struct World {
    log: Vec<Vec<u8>>,
    nodes: Vec<Node>,
    start: Instant,
    now: Instant,
    ids: u128,
    policy: Policy,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        Self { log: Vec::new(), nodes: Vec::new(), start: now, now, ids: 0, policy: Policy::Fixed }
    }

    fn me(&mut self, instance: u8, rank: u32, world_size: u32) -> Me {
        self.ids += 1;
        Me {
            job: "job".to_owned(),
            instance: [instance; 16],
            rank: Rank(rank),
            world_size,
            policy: self.policy,
            endpoint: Endpoint { hostname: format!("host-{rank}"), ..Default::default() },
            join_id: self.ids.to_le_bytes(),
        }
    }

    /// Starts a rank. Launches of the same job have secrets of their own, unless told otherwise.
    fn start(&mut self, instance: u8, rank: u32, world_size: u32, secret: u8) -> usize {
        let me = self.me(instance, rank, world_size);
        let mut machine = Rendezvous::new(me.clone(), self.now + DEADLINE, DEADLINE);
        machine.link_opened();
        let key = RecordKey::new(Secret::from_bytes([secret; 32]), "job");
        self.nodes.push(Node { machine, key, me, read: 0 });
        self.nodes.len() - 1
    }

    /// A node suspects the process that it knows as the member of this rank.
    fn suspect(&mut self, node: usize, rank: u32, reason: &str) {
        let process = self.membership(node).rank(Rank(rank)).expect("a member").id;
        assert_eq!(self.nodes[node].machine.suspect(process, reason.to_owned()), Some(Rank(rank)));
    }

    fn start_all(&mut self, instance: u8, world_size: u32) {
        for rank in 0..world_size {
            self.start(instance, rank, world_size, instance);
        }
    }

    fn write(&mut self, node: usize, version: u16, append: Append) {
        self.ids += 1;
        let Node { key, me, .. } = &self.nodes[node];
        let id = append.id.unwrap_or(self.ids.to_le_bytes());
        let header = Header { version, kind: append.body.kind(), instance: me.instance, id, rank: me.rank };
        self.log.push(key.seal(header, &append.body.encode()));
    }

    fn say(&mut self, node: usize, body: Body) {
        self.write(node, RECORD_VERSION, Append { id: None, body });
    }

    fn leave(&mut self, node: usize) {
        let author = self.nodes[node].me.join_id;
        self.say(node, Body::Left { author });
    }

    fn fail(&mut self, node: usize, fault: Fault) {
        let author = self.nodes[node].me.join_id;
        self.say(node, Body::Failed { author, fault });
    }

    fn events(&mut self, node: usize) -> Vec<ControlEvent> {
        std::iter::from_fn(|| self.nodes[node].machine.poll_event()).collect()
    }

    fn ranks(&self, node: usize) -> (u64, Vec<u32>) {
        let view = self.membership(node);
        (view.epoch.0, view.members.iter().map(|member| member.rank.0).collect())
    }

    /// All nodes lose their link to the broker, and get another.
    fn read_again(&mut self) {
        for node in &mut self.nodes {
            node.read = 0;
            node.machine.link_opened();
        }
    }

    /// A broker without storage is started again.
    fn lose_log(&mut self) {
        self.log.clear();
        self.read_again();
    }

    /// Lets everything happen that happens without time going by.
    fn settle(&mut self) {
        loop {
            let before = self.log.len();
            for index in 0..self.nodes.len() {
                while let Some(append) = self.nodes[index].machine.poll_append() {
                    self.write(index, RECORD_VERSION, append);
                }
                let Node { machine, key, read, .. } = &mut self.nodes[index];
                for bytes in &self.log[*read..] {
                    if let Ok(record) = key.open(bytes) {
                        machine.handle_record(self.now, &record);
                    }
                }
                *read = self.log.len();
                if machine.poll_timeout().is_some_and(|at| at <= self.now) {
                    machine.handle_timeout(self.now);
                }
            }
            let quiet = self.log.len() == before
                && self.nodes.iter().all(|node| {
                    node.machine.appends.is_empty()
                        && node.machine.poll_timeout().is_none_or(|at| at > self.now)
                        && node.read == self.log.len()
                });
            if quiet {
                return;
            }
        }
    }

    /// Lets time go by until nothing is due any more.
    fn run(&mut self) {
        self.settle();
        while let Some(at) = self.nodes.iter().filter_map(|node| node.machine.poll_timeout()).min() {
            self.now = self.now.max(at);
            self.settle();
        }
    }

    fn fault(&self, node: usize) -> &Fault {
        self.nodes[node].machine.outcome().expect("decided").expect_err("a fault")
    }

    fn membership(&self, node: usize) -> &View {
        self.nodes[node].machine.outcome().expect("decided").expect("a member")
    }

    fn elapsed(&self) -> Duration {
        self.now - self.start
    }
}

#[test]
fn ranks_become_members_at_once_and_agree() {
    for world_size in [1, 2, 3, 8, 64] {
        let mut world = World::new();
        world.start_all(1, world_size);
        world.settle();
        for node in 0..world_size as usize {
            let membership = world.membership(node);
            assert_eq!(membership.epoch, Epoch(1));
            let names: Vec<_> = membership.members.iter().map(|member| member.endpoint.hostname.clone()).collect();
            assert_eq!(names, (0..world_size).map(|rank| format!("host-{rank}")).collect::<Vec<_>>());
        }
    }
}

#[test]
fn another_rank_proposes_when_rank_0_does_not() {
    let mut world = World::new();
    world.start_all(1, 3);
    for node in 0..3 {
        while let Some(append) = world.nodes[node].machine.poll_append() {
            world.write(node, RECORD_VERSION, append);
        }
    }
    // Rank 0 is stuck from here on.
    let rank_0 = world.nodes.remove(0);
    world.run();
    assert_eq!(world.elapsed(), PROPOSE_GRACE);
    assert_eq!(world.membership(0).members.len(), 3);
    // It wakes up later, and finds the decision of the others.
    world.nodes.push(rank_0);
    world.settle();
    assert_eq!(world.membership(2), world.membership(0));
}

#[test]
fn records_that_come_twice_change_nothing() {
    let mut world = World::new();
    world.start_all(1, 3);
    world.settle();
    let once = world.membership(0).clone();
    let mut again = World::new();
    again.start_all(1, 3);
    for record in &world.log {
        again.log.push(record.clone());
        again.log.push(record.clone());
    }
    again.run();
    assert_eq!(again.membership(2), &once);
    let events: Vec<_> = std::iter::from_fn(|| again.nodes[0].machine.poll_event()).collect();
    assert_eq!(events, []);
}

#[test]
fn a_lost_log_is_written_again() {
    let mut world = World::new();
    world.start_all(1, 3);
    // Ranks 0 and 1 have decided when a broker without storage restarts; rank 2 has seen nothing yet.
    let mut late = world.nodes.pop().unwrap();
    while let Some(append) = late.machine.poll_append() {
        world.nodes.push(late);
        world.write(2, RECORD_VERSION, append);
        late = world.nodes.pop().unwrap();
    }
    world.settle();
    assert!(world.nodes.iter().all(|node| matches!(node.machine.outcome(), Some(Ok(_)))));
    world.nodes.push(late);
    world.lose_log();
    // What the others proposed came before this rank's Join in the new log, so it proposes itself.
    world.run();
    assert_eq!(world.membership(2), world.membership(0));
}

#[test]
fn different_world_sizes_end_every_rank_at_once() {
    let mut world = World::new();
    world.start(1, 0, 3, 1);
    world.start(1, 1, 3, 1);
    world.start(1, 2, 4, 1);
    world.settle();
    for node in 0..3 {
        let fault = world.fault(node);
        assert_eq!(fault.kind, FaultKind::WorldMismatch);
        assert!(fault.detail.contains('3') && fault.detail.contains('4'), "{fault}");
    }
    assert_eq!(world.fault(0).rank, Some(Rank(2)));
}

#[test]
fn a_rank_taken_twice_ends_every_rank_and_names_it() {
    let mut world = World::new();
    for rank in [0, 1, 1] {
        world.start(1, rank, 3, 1);
    }
    world.settle();
    for node in 0..3 {
        assert_eq!((world.fault(node).kind, world.fault(node).rank), (FaultKind::WorldMismatch, Some(Rank(1))));
    }
}

#[test]
fn who_comes_too_late_with_a_taken_rank_does_no_harm() {
    let mut world = World::new();
    world.start_all(1, 2);
    world.settle();
    let late = world.start(1, 1, 2, 1);
    world.settle();
    assert_eq!(world.fault(late).kind, FaultKind::WorldMismatch);
    assert_eq!(world.membership(0), world.membership(1));
}

#[test]
fn another_record_version_or_protocol_is_named() {
    for (version, protocol) in [(RECORD_VERSION + 1, PROTOCOL_VERSION), (RECORD_VERSION, PROTOCOL_VERSION + 1)] {
        let mut world = World::new();
        world.start(1, 0, 2, 1);
        let other = world.start(1, 1, 2, 1);
        let endpoint = Endpoint::default();
        let body = Body::Join { world_size: 2, protocol, endpoint };
        world.write(other, version, Append { id: None, body });
        world.settle();
        let fault = world.fault(0);
        assert_eq!((fault.kind, fault.rank), (FaultKind::ProtocolVersion, Some(Rank(1))));
        let other = version.max(protocol);
        assert!(fault.detail.contains(&format!("version {other}")), "{fault}");
    }
}

#[test]
fn the_deadline_names_who_is_missing() {
    let mut world = World::new();
    world.start(1, 0, 4, 1);
    world.start(1, 2, 4, 1);
    world.run();
    assert_eq!(world.elapsed(), DEADLINE);
    for node in 0..2 {
        let fault = world.fault(node);
        assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(1))));
        assert!(fault.detail.contains("rank 1, rank 3"), "{fault}");
    }
}

#[test]
fn the_rank_with_another_secret_knows_soon_and_the_others_name_it() {
    let mut world = World::new();
    world.start(1, 0, 3, 1);
    world.start(1, 1, 3, 1);
    world.start(1, 2, 3, 9);
    world.settle();
    assert!(world.nodes.iter().all(|node| node.machine.outcome().is_none()));
    world.now += SUSPECT_GRACE;
    world.settle();
    assert_eq!((world.fault(2).kind, world.fault(2).rank), (FaultKind::SecretMismatch, Some(Rank(2))));
    assert!(world.nodes[0].machine.outcome().is_none(), "others do not trust what does not verify");
    world.run();
    let fault = world.fault(0);
    assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(2))));
    assert!(fault.detail.contains("from rank 2 that do not verify"), "{fault}");
    assert!(world.nodes[0].machine.rejected() > 0);
}

#[test]
fn forged_records_cannot_stop_ranks_that_know_the_secret() {
    let mut world = World::new();
    world.start_all(1, 3);
    // An outsider writes in the name of every rank before they come.
    let outsider = world.start(1, 0, 3, 9);
    for rank in 0..3 {
        world.nodes[outsider].me.rank = Rank(rank);
        world.fail(outsider, Fault::new(FaultKind::System, "forged"));
        world.leave(outsider);
    }
    world.nodes.pop();
    world.run();
    for node in 0..3 {
        assert_eq!(world.membership(node).members.len(), 3);
    }
}

#[test]
fn a_newcomer_gives_way_to_a_live_job_of_the_same_name() {
    let mut world = World::new();
    world.start_all(1, 2);
    world.settle();
    world.start_all(2, 3);
    world.run();
    for node in 2..5 {
        assert_eq!(world.fault(node).kind, FaultKind::JobNameTaken);
        assert!(world.fault(node).detail.contains("'job'"));
    }
    assert!(world.elapsed() < ANSWER_MAX);
    assert_eq!(world.membership(0), world.membership(1));
}

#[test]
fn of_two_launches_at_the_same_time_one_goes_on() {
    let mut world = World::new();
    for rank in 0..2 {
        world.start(1, rank, 2, 1);
        world.start(2, rank, 2, 2);
    }
    world.run();
    assert_eq!(world.membership(0), world.membership(2));
    for node in [1, 3] {
        assert_eq!(world.fault(node).kind, FaultKind::JobNameTaken);
    }
}

#[test]
fn a_dead_job_is_asked_once_and_then_superseded() {
    let mut world = World::new();
    world.start_all(1, 2);
    world.settle();
    world.nodes.clear();
    world.start_all(2, 2);
    world.run();
    assert_eq!(world.membership(0).members.len(), 2);
    assert!(world.elapsed() >= ANSWER_MAX);
    // The second launch leaves in good order: the third finds nobody to ask.
    world.leave(0);
    world.leave(1);
    world.nodes.clear();
    let before = world.now;
    world.start_all(3, 2);
    world.settle();
    assert_eq!(world.membership(1).members.len(), 2);
    assert_eq!(world.now, before);
}

#[test]
fn faults_reach_others_while_joining_and_after() {
    let mut world = World::new();
    world.start(1, 0, 2, 1);
    let failing = world.start(1, 1, 2, 1);
    let fault = Fault::new(FaultKind::AddressInUse, "port 7000 is in use");
    world.fail(failing, fault.clone());
    world.settle();
    assert_eq!(world.fault(0), &fault.clone().reported_by(Rank(1)));

    let mut world = World::new();
    world.start_all(1, 3);
    world.settle();
    world.fail(2, fault.clone());
    world.settle();
    let expected = ControlEvent::Failed(fault.reported_by(Rank(2)));
    for node in 0..2 {
        assert_eq!(world.nodes[node].machine.poll_event(), Some(expected.clone()));
        assert_eq!(world.nodes[node].machine.poll_event(), None);
    }
    assert_eq!(world.nodes[2].machine.poll_event(), None, "not to the one that reported it");
}

#[test]
fn a_rank_that_leaves_before_the_start_is_named() {
    let mut world = World::new();
    world.start(1, 0, 3, 1);
    let leaving = world.start(1, 2, 3, 1);
    world.settle();
    world.leave(leaving);
    world.settle();
    assert_eq!((world.fault(0).kind, world.fault(0).rank), (FaultKind::RankLeft, Some(Rank(2))));
}
