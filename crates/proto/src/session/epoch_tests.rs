//! Trainers that go on while ranks are lost at any moment: what one commits, all commit, with one set of contributors.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::super::tests::{JOB, declaration};
use super::super::transmit::MessageBytes;
use super::super::*;
use crate::dtype::Collective;
use crate::frame::{FrameHeader, FrameKind, Location};
use crate::ids::Epoch;
use crate::limits::FRAME_HEADER_BYTES;
use crate::manifest::Declaration;

const STEPS: u64 = 4;

/// What a unit's result was made of: the epoch in which it was reduced, and by whom.
type Origin = (Epoch, Vec<Rank>);

#[derive(Clone, Debug)]
enum Packet {
    Message(Vec<u8>),
    /// With the origin of each unit, where it is a result.
    Data(FrameHeader, Vec<Origin>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    /// Its process was stopped.
    Stopped,
    Dead,
}

struct Node {
    session: Session,
    state: State,
    /// Views that it knows, and the first that it was in.
    views: usize,
    born: usize,
    /// Steps that were final when it joined; nothing until it knows.
    first: Option<u64>,
    /// By unit: the result's origin.
    results: Vec<Option<Origin>>,
    /// Those of the last epoch, until it is known what becomes of the step.
    before: Option<Vec<Option<Origin>>>,
    /// The operations that it posted in its step and that are not done.
    waits_for: Vec<TensorId>,
    posted: bool,
    committing: bool,
    /// By step: the origins of its results when it was committed.
    committed: Vec<Vec<Origin>>,
    /// And what all made of their wishes.
    outcomes: Vec<Next>,
    aborted: u64,
    again: u64,
    rests: u64,
    farewell: bool,
    lost: Vec<(Rank, Fault)>,
    fault: Option<Fault>,
}

struct World {
    nodes: Vec<Node>,
    links: Vec<Vec<VecDeque<Packet>>>,
    /// With the rank that joins in it, if one does.
    views: Vec<(Epoch, Vec<Rank>, Option<Rank>)>,
    declared: Vec<Declaration>,
    tensors: u32,
    random: u64,
    now: u64,
}

impl Node {
    fn new(session: Session, born: usize, first: Option<u64>) -> Self {
        Self {
            session,
            state: State::Runs,
            views: born,
            born,
            first,
            results: Vec::new(),
            before: None,
            waits_for: Vec::new(),
            posted: false,
            committing: false,
            committed: Vec::new(),
            outcomes: Vec::new(),
            aborted: 0,
            again: 0,
            rests: 0,
            farewell: false,
            lost: Vec::new(),
            fault: None,
        }
    }

    fn commits(&self) -> Option<u64> {
        Some(self.first? + self.committed.len() as u64)
    }
}

fn declarations(sizes: &[u64]) -> Vec<Declaration> {
    let named = |(index, size): (usize, &u64)| declaration(&alloc::format!("t{index}"), *size, Collective::AllReduce);
    sizes.iter().enumerate().map(named).collect()
}

impl World {
    fn new(size: u32, sizes: &[u64], recovery: Recovery, seed: u64) -> Self {
        let declared = declarations(sizes);
        let mut nodes: Vec<Node> = (0..size)
            .map(|rank| {
                let timing = Timing { deadline_ns: u64::MAX / 4, ..Timing::default() };
                let config = SessionConfig {
                    copies: false,
                    recovery,
                    ranks_min: 1,
                    rank: Rank(rank),
                    world_size: size,
                    epoch: Epoch(1),
                    job: JOB,
                    first_step: Step(0),
                    timing,
                };
                Node::new(Session::new(config), 0, Some(0))
            })
            .collect();
        for node in &mut nodes {
            node.session.declare(vec![1; 10], 0, None).unwrap();
        }
        let count = size as usize;
        let links = vec![vec![VecDeque::new(); count]; count];
        let (views, tensors) = (Vec::new(), sizes.len() as u32);
        let mut world = Self { nodes, links, views, declared, tensors, random: seed | 1, now: 0 };
        world.drain();
        for node in &mut world.nodes {
            assert_eq!(node.session.take_manifests().len(), count);
            node.session.lay_out(&world.declared);
            node.results = vec![None; node.session.plan().units.len()];
            node.session.prepare(&vec![Location::default(); count]);
        }
        world.drain();
        assert!(world.nodes.iter().all(|node| node.session.round() == 1));
        world
    }

    fn random(&mut self, below: usize) -> usize {
        // Numerical Recipes' linear congruence; the upper bits are random enough here.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    /// Everything that is sent arrives.
    fn drain(&mut self) {
        loop {
            let mut moved = 0;
            for rank in 0..self.nodes.len() {
                moved += self.pump(rank, usize::MAX);
                for from in 0..self.nodes.len() {
                    moved += usize::from(self.deliver(from, rank));
                }
            }
            if moved == 0 {
                return;
            }
        }
    }

    /// One rank does up to `most` of what it has to do.
    fn pump(&mut self, rank: usize, most: usize) -> usize {
        if self.nodes[rank].state != State::Runs {
            return 0;
        }
        let mut moved = self.take_events(rank);
        let node = &mut self.nodes[rank];
        while moved < most
            && let Some(work) = node.session.poll_work()
        {
            let (Work::Reduce(unit) | Work::Publish(unit)) = work;
            node.results[unit.index()] = Some((node.session.config().epoch, node.session.members().to_vec()));
            node.session.handle_reduced(work, false, self.now);
            moved += 1;
        }
        let mut bytes = MessageBytes::new();
        while moved < most
            && let Some(peer) = node.session.peek_message(&mut bytes)
        {
            node.session.pop_message();
            self.links[rank][peer.index()].push_back(Packet::Message(bytes.to_vec()));
            moved += 1;
        }
        while moved < most
            && let Some(transmit) = node.session.poll_transmit(self.now + 1_000_000_000)
        {
            let header = node.session.header(&transmit);
            let units = transmit.unit_first.0..transmit.unit_first.0 + transmit.unit_count;
            let origins = match header.kind {
                FrameKind::Result => units.map(|unit| node.results[unit as usize].clone().unwrap()).collect(),
                _ => Vec::new(),
            };
            node.session.handle_sent(&transmit);
            self.links[rank][transmit.peer.index()].push_back(Packet::Data(header, origins));
            moved += 1;
        }
        moved + self.take_events(rank)
    }

    fn take_events(&mut self, rank: usize) -> usize {
        let mut moved = 0;
        let node = &mut self.nodes[rank];
        while let Some(event) = node.session.poll_event() {
            moved += 1;
            match event {
                Event::Done { tensor, .. } => node.waits_for.retain(|waits| *waits != tensor),
                Event::Failed(fault) => node.fault = Some(fault),
                Event::Entered => {
                    let new = vec![None; node.session.plan().units.len()];
                    let old = core::mem::replace(&mut node.results, new);
                    node.before.get_or_insert(old);
                    node.session.sync(&vec![Location::default(); 16], self.now);
                }
                // The trainer has its result, and hears of another when it commits.
                Event::Again { .. } => node.again += 1,
                Event::Resting { .. } => node.rests += 1,
                Event::Aborted { .. } => {
                    node.aborted += 1;
                    node.waits_for.clear();
                    (node.posted, node.committing) = (false, false);
                }
                Event::Committed { commits } => {
                    assert_eq!(Some(commits), node.commits().map(|before| before + 1), "one after the other");
                    let results = node.before.as_ref().unwrap_or(&node.results);
                    // Where there is nothing to add, nobody need have added it.
                    let units = node.session.plan().units.iter();
                    let is_empty = |unit: usize| units.clone().nth(unit).is_none_or(|unit| unit.elements == 0);
                    let origins = results.iter().enumerate().filter(|(unit, _)| !is_empty(*unit));
                    let origins: Vec<Origin> = origins.filter_map(|(_, origin)| origin.clone()).collect();
                    node.committed.push(origins);
                    node.outcomes.push(node.session.outcome);
                    (node.posted, node.committing) = (false, false);
                }
                Event::Synced => {
                    node.before = None;
                    node.first.get_or_insert(node.session.commits());
                }
                Event::Lost { peer, fault } => node.lost.push((peer, fault)),
                Event::Manifests | Event::Prepared => {}
                Event::Farewell => node.farewell = true,
                Event::Spoilt { .. } => unreachable!("{event:?}"),
            }
        }
        moved
    }

    /// What the trainer of this rank does next, if it can do something.
    fn train(&mut self, rank: usize) -> usize {
        let (tensors, wish) = (self.tensors, self.random(24));
        let node = &mut self.nodes[rank];
        if node.state != State::Runs || node.fault.is_some() || node.commits().is_none_or(|commits| commits == STEPS) {
            return 0;
        }
        if !node.posted {
            node.posted = true;
            for tensor in (0..tensors).map(TensorId) {
                node.session.post(tensor, self.now, None).unwrap();
                node.waits_for.push(tensor);
            }
            return 1;
        }
        if node.waits_for.is_empty() && !node.committing {
            let wishes = [Wish::LeaveSoon, Wish::Leave, Wish::End];
            node.session.set_wish(wishes.get(wish).copied().unwrap_or_default().max(node.session.wish));
            // What was done may be done again in an epoch that the trainer has not heard of.
            node.session.begin_commit(self.now, None).unwrap();
            node.committing = true;
            return 1;
        }
        0
    }

    fn deliver(&mut self, from: usize, to: usize) -> bool {
        // Nothing comes over the link to a newcomer until the receiver knows that it is one.
        let receiver = &self.nodes[to];
        let knows = receiver.views >= self.nodes[from].born && receiver.session.peers.len() > from;
        if self.nodes[to].state == State::Stopped || !knows {
            return false;
        }
        let Some(packet) = self.links[from][to].pop_front() else { return false };
        if self.nodes[to].state == State::Dead {
            return true;
        }
        let (node, peer, now) = (&mut self.nodes[to], Rank(from as u32), self.now);
        match packet {
            Packet::Message(bytes) => {
                let (header, body) = bytes.split_at(FRAME_HEADER_BYTES);
                let header = FrameHeader::decode(header, &JOB).unwrap();
                node.session.handle_message(peer, &header, body, now).unwrap();
            }
            Packet::Data(header, origins) => {
                if node.session.admit(peer, &header).unwrap() == Admission::Discard {
                    return true;
                }
                assert_eq!(header.epoch, node.session.config().epoch, "nothing of another epoch is applied");
                if header.kind == FrameKind::Contribution {
                    node.session.handle_contribution(peer, &header, now);
                } else {
                    for (unit, origin) in (header.unit_first.0..).zip(origins) {
                        node.results[unit as usize] = Some(origin);
                        node.session.handle_result_unit(UnitIndex(unit), false, now);
                    }
                    node.session.handle_result(peer, &header);
                }
            }
        }
        self.take_events(to);
        true
    }

    /// A rank learns of the next view, if there is one.
    fn learn(&mut self, rank: usize) -> bool {
        let node = &mut self.nodes[rank];
        let Some((epoch, members, joins)) = self.views.get(node.views).filter(|_| node.state == State::Runs) else {
            return false;
        };
        node.views += 1;
        node.session.enter(*epoch, members, joins.as_slice());
        self.take_events(rank);
        true
    }

    /// The present view's epoch and members.
    fn view(&self) -> (Epoch, Vec<Rank>) {
        match self.views.last() {
            Some((epoch, members, _)) => (*epoch, members.clone()),
            None => (Epoch(1), (0..self.nodes.len() as u32).map(Rank).collect()),
        }
    }

    /// The others agree to go on without this rank.
    fn remove(&mut self, rank: usize) {
        let (epoch, mut members) = self.view();
        members.retain(|member| member.index() != rank);
        self.views.push((Epoch(epoch.0 + 1), members, None));
    }

    /// The members agree to take in a process with this rank, which nobody alive has.
    fn add(&mut self, rank: usize) {
        let (epoch, mut members) = self.view();
        members.push(Rank(rank as u32));
        members.sort_unstable();
        let epoch = Epoch(epoch.0 + 1);
        let config = SessionConfig { rank: Rank(rank as u32), epoch, ..*self.nodes[0].session.config() };
        let session = Session::newcomer(config, &members, core::slice::from_ref(&self.declared));
        self.views.push((epoch, members, Some(Rank(rank as u32))));
        let node = Node::new(session, self.views.len(), None);
        if rank < self.nodes.len() {
            self.nodes[rank] = node;
            for other in 0..self.nodes.len() {
                self.links[rank][other].clear();
                self.links[other][rank].clear();
            }
        } else {
            self.nodes.push(node);
            self.links.push(Vec::new());
            let count = self.nodes.len();
            self.links.iter_mut().for_each(|links| links.resize_with(count, VecDeque::new));
        }
        self.take_events(rank);
    }

    fn step(&mut self) -> usize {
        let count = self.nodes.len();
        let mut moved = 0;
        let rank = self.random(count);
        match self.random(8) {
            0 => moved += usize::from(self.learn(rank)),
            1 | 2 => moved += self.train(rank),
            3 | 4 => {
                let most = 1 + self.random(4);
                moved += self.pump(rank, most);
            }
            _ => {
                let from = self.random(count);
                moved += usize::from(self.deliver(from, rank));
            }
        }
        moved
    }

    /// Everything that can happen happens, in order, until nothing can.
    fn finish(&mut self) {
        loop {
            let mut moved = 0;
            for rank in 0..self.nodes.len() {
                moved += usize::from(self.learn(rank)) + self.train(rank) + self.pump(rank, usize::MAX);
                for from in 0..self.nodes.len() {
                    moved += usize::from(self.deliver(from, rank));
                }
            }
            if moved == 0 {
                return;
            }
        }
    }

    fn check(&self) {
        let (_, members) = self.view();
        let mut agreed: Vec<Option<&Origin>> = vec![None; STEPS as usize];
        let mut ended: Vec<Option<Next>> = vec![None; STEPS as usize];
        // Where only newcomers are left that nobody told where the job is, it has failed; whoever has not noticed loses those
        // that have.
        let orphans = members.iter().all(|member| self.nodes[member.index()].first.is_none());
        let failed = members.iter().any(|member| self.nodes[member.index()].fault.is_some());
        assert!(failed || !orphans, "nobody noticed");
        for (rank, node) in self.nodes.iter().enumerate() {
            // So has one of them that noticed, and was lost after that.
            if orphans && (members.contains(&Rank(rank as u32)) || node.first.is_none()) {
                assert!(node.fault.as_ref().is_none_or(|fault| fault.kind == FaultKind::RankDied), "{:?}", node.fault);
                continue;
            }
            assert_eq!(node.fault, None, "rank {rank}");
            if members.contains(&Rank(rank as u32)) {
                assert_eq!(node.commits(), Some(STEPS), "rank {rank} is not through");
                // Of those that are left: what one that is lost took with it, nobody need know.
                for (step, outcome) in (node.first.unwrap_or_default() as usize..).zip(&node.outcomes) {
                    let agreed = *ended[step].get_or_insert(*outcome);
                    assert_eq!(*outcome, agreed, "rank {rank} ends step {step} otherwise than others");
                }
            }
            for (step, origins) in (node.first.unwrap_or_default() as usize..).zip(&node.committed) {
                let Some(one) = origins.first() else { continue };
                assert!(origins.iter().all(|origin| origin == one), "rank {rank} step {step}: {origins:?}");
                let agreed = *agreed[step].get_or_insert(one);
                assert_eq!(one, agreed, "rank {rank} has other results of step {step}");
            }
        }
    }
}

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![Just(0), Just(3), 1u64..30_000, 100_000u64..400_000], 1..4)
}

/// Loses ranks and lets others join, and checks what holds then. `losses`: after how many steps of the world which rank is
/// lost, and whether it was only stopped. `joins`: after which of them, and how many steps later, a process joins, with the
/// lost one's rank or a new one.
fn lose_and_join(mut world: World, losses: &[(usize, usize, bool)], joins: &[(usize, usize, bool)]) {
    let mut left = world.nodes.len();
    for (nth, (after, rank, stopped)) in losses.iter().copied().enumerate() {
        let rank = rank % world.nodes.len();
        for _ in 0..after {
            world.step();
        }
        if left == 1 || world.nodes[rank].state != State::Runs {
            continue;
        }
        left -= 1;
        world.nodes[rank].state = if stopped { State::Stopped } else { State::Dead };
        // What it sent last may be lost with it, from some point on.
        if !stopped {
            for to in 0..world.nodes.len() {
                let kept = world.random(4);
                world.links[rank][to].truncate(kept);
            }
        }
        world.remove(rank);
        for (_, later, again) in joins.iter().filter(|(loss, ..)| *loss == nth) {
            for _ in 0..*later {
                world.step();
            }
            let free = *again && world.nodes[rank].state == State::Dead;
            world.add(if free { rank } else { world.nodes.len() });
            left += 1;
        }
    }
    world.finish();
    // Those that were stopped wake up, find what was sent to them before, and change nothing.
    for node in world.nodes.iter_mut().filter(|node| node.state == State::Stopped) {
        node.state = State::Runs;
    }
    world.finish();
    world.check();
}

/// Found by the property below: to others that were behind, a newcomer was ahead, and what it did not know counted.
#[test]
fn a_newcomer_knows_how_the_step_before_it_ended() {
    let world = World::new(5, &[212_993], Recovery::Abort, 10_921_235_707_180_264_112);
    lose_and_join(world, &[(1454, 0, false), (438, 1, false), (47, 6, false)], &[(0, 31, false)]);
}

/// Found by it too: newcomers among themselves, of whom one notices, and is lost after that.
#[test]
fn a_newcomer_that_noticed_that_nobody_knows_may_be_lost_before_the_others_notice() {
    let world = World::new(2, &[0], Recovery::Abort, 68_300_451_922_995_794);
    lose_and_join(world, &[(159, 0, true), (16, 5, false), (92, 3, false)], &[(0, 217, false), (0, 14, false)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_one_rank_commits_all_commit_whoever_is_lost_whenever(
        size in 2u32..6,
        sizes in sizes(),
        seed in any::<u64>(),
        // When which rank is lost, and whether it was only stopped.
        losses in prop::collection::vec((1usize..3000, 0usize..8, any::<bool>()), 0..5),
        // After which of these losses a process joins, with the lost one's rank or a new one.
        joins in prop::collection::vec((0usize..5, 0usize..300, any::<bool>()), 0..3),
        redo in prop::bool::weighted(0.8),
    ) {
        let recovery = if redo { Recovery::Redo } else { Recovery::Abort };
        lose_and_join(World::new(size, &sizes, recovery, seed), &losses, &joins);
    }
}

#[test]
fn without_losses_nothing_is_done_again() {
    let mut world = World::new(3, &[0, 10, 200_000], Recovery::Redo, 7);
    world.finish();
    world.check();
    assert!(world.nodes.iter().all(|node| node.again == 0 && node.aborted == 0));
}

#[test]
fn a_rank_that_joins_between_two_steps_takes_part_in_the_next_and_nothing_is_done_again() {
    let mut world = World::new(2, &[0, 10, 200_000], Recovery::Redo, 7);
    while world.nodes.iter().any(|node| node.committed.is_empty()) {
        for rank in 0..2 {
            if world.nodes[rank].committed.is_empty() {
                world.train(rank);
            }
        }
        world.drain();
    }
    assert!(world.nodes.iter().all(|node| node.session.is_between_steps()));
    world.add(2);
    assert!(!world.nodes[0].session.is_awaited_in(Epoch(2)));
    world.learn(0);
    world.pump(0, usize::MAX);
    world.deliver(0, 1);
    assert!(world.nodes[1].session.is_awaited_in(Epoch(2)));
    world.finish();
    world.check();
    assert_eq!(world.nodes[2].first, Some(1));
    assert_eq!(world.nodes[2].committed[0][0].1, [Rank(0), Rank(1), Rank(2)]);
    assert!(world.nodes.iter().all(|node| node.again == 0 && node.aborted == 0));
}

#[test]
fn a_newcomer_that_fails_before_it_knows_where_the_others_are_tells_nobody() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    world.add(2);
    let session = &mut world.nodes[2].session;
    session.fail(Fault::new(FaultKind::System, "no memory"));
    let mut bytes = MessageBytes::new();
    assert_eq!(session.peek_message(&mut bytes), None);
}

#[test]
fn too_few_members_abort_the_step_and_repeat_it_with_others() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    world.nodes.iter_mut().for_each(|node| node.session.config.ranks_min = 2);
    for rank in 0..3 {
        world.train(rank);
    }
    for rank in 0..3 {
        world.pump(rank, 3);
        world.deliver(rank, (rank + 1) % 3);
    }
    for lost in [1, 2] {
        world.nodes[lost].state = State::Dead;
    }
    world.remove(1);
    world.remove(2);
    while world.learn(0) {}
    assert_eq!((world.nodes[0].aborted, world.nodes[0].rests), (1, 1));
    // What is posted again waits; what still comes of the old step does not count.
    world.train(0);
    world.drain();
    assert!(world.nodes[0].committed.is_empty() && !world.nodes[0].waits_for.is_empty());
    world.add(1);
    world.nodes[1].session.config.ranks_min = 2;
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}

#[test]
fn a_step_of_which_all_that_are_left_have_all_is_final_though_they_are_too_few() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    world.nodes.iter_mut().for_each(|node| node.session.config.ranks_min = 3);
    for rank in 0..3 {
        world.train(rank);
    }
    world.drain();
    for rank in 0..3 {
        world.train(rank);
    }
    // Rank 2 hears from both that they have all: the step is final to it, and it goes. The others do not hear of it.
    for rank in 0..3 {
        world.pump(rank, usize::MAX);
    }
    for from in [0, 1] {
        while world.deliver(from, 2) {}
    }
    world.take_events(2);
    assert_eq!(world.nodes[2].committed.len(), 1);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    for rank in 0..2 {
        world.learn(rank);
    }
    world.drain();
    for node in &world.nodes[..2] {
        assert_eq!((node.committed.len(), node.aborted, node.rests), (1, 0, 1));
        assert_eq!(node.committed[0][0].1, [Rank(0), Rank(1), Rank(2)]);
    }
}

#[test]
fn a_step_that_cannot_be_done_again_is_aborted_by_all_and_repeated() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Abort, 7);
    for rank in 0..3 {
        world.train(rank);
    }
    world.pump(0, usize::MAX);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert!(world.nodes[..2].iter().all(|node| node.aborted == 1 && node.again == 0));
}

#[test]
fn a_tensor_that_was_posted_twice_in_a_step_cannot_be_done_again() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    for _ in 0..2 {
        for rank in 0..2 {
            world.nodes[rank].session.post(TensorId(0), 0, None).unwrap();
        }
        world.drain();
    }
    world.nodes[1].state = State::Dead;
    world.remove(1);
    world.learn(0);
    assert_eq!((world.nodes[0].aborted, world.nodes[0].again), (1, 0));
    assert_eq!(world.nodes[0].session.step(TensorId(0)), Step(0), "it begins anew");
}

#[test]
fn operations_of_a_step_that_is_committed_are_waited_for() {
    let mut world = World::new(2, &[10], Recovery::Redo, 7);
    world.train(0);
    let fault = world.nodes[0].session.begin_commit(0, None).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorBusy);
    world.train(1);
    world.drain();
    world.nodes[0].session.begin_commit(0, None).unwrap();
    assert_eq!(world.nodes[0].session.post(TensorId(0), 0, None).unwrap_err().kind, FaultKind::TensorBusy);
}

#[test]
fn a_silent_peer_is_reported_once_and_one_that_is_heard_is_not() {
    let mut world = World::new(3, &[10], Recovery::Redo, 7);
    world.nodes[2].state = State::Stopped;
    let mut lost = Vec::new();
    for _ in 0..20 {
        world.now += 500_000_000;
        for rank in 0..3 {
            let node = &mut world.nodes[rank];
            if node.state == State::Runs {
                node.session.handle_timeout(world.now);
                while let Some(event) = node.session.poll_event() {
                    let Event::Lost { peer, fault } = event else { continue };
                    assert_eq!((fault.kind, fault.rank), (FaultKind::RankDied, Some(peer)));
                    lost.push((rank, peer, world.now / 1_000_000));
                }
            }
        }
        for (from, to) in [(0, 1), (1, 0)] {
            world.nodes[to].session.heard(Rank(from), world.now);
        }
    }
    assert_eq!(lost.len(), 2, "{lost:?}");
    assert!(lost.iter().all(|(_, peer, at)| *peer == Rank(2) && (2500..=4000).contains(at)), "{lost:?}");
}

/// Found across processes: one spoilt byte in a header failed the whole job.
#[test]
fn a_peer_whose_frames_cannot_be_is_lost_and_the_others_go_on() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    let fault = Fault::violation(Rank(2), "a message whose body does not match its header");
    world.train(0);
    world.nodes[0].session.give_up(Rank(2), fault.clone());
    let events: Vec<Event> = core::iter::from_fn(|| world.nodes[0].session.poll_event()).collect();
    assert_eq!(events, [Event::Lost { peer: Rank(2), fault }]);
    assert_eq!(world.nodes[0].session.fault(), None);
    // What still comes from it is not looked at.
    for rank in 1..3 {
        world.train(rank);
    }
    world.drain();
    let node = &world.nodes[0];
    for (unit, result) in node.session.plan().units.iter().zip(&node.results) {
        assert_eq!(result.is_some(), unit.owner == Rank(1), "{unit:?}");
    }
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}

#[test]
fn a_link_that_spoils_everything_costs_its_peer_only() {
    let mut world = World::new(3, &[200_000], Recovery::Redo, 7);
    for rank in 0..3 {
        world.train(rank);
    }
    let session = &mut world.nodes[1].session;
    let transmit = core::iter::from_fn(|| session.poll_transmit(1_000_000_000)).find(|one| one.peer == Rank(0));
    let header = session.header(&transmit.expect("something for rank 0"));
    let session = &mut world.nodes[0].session;
    for _ in 0..1000 {
        session.handle_corrupt(Rank(1), &header);
    }
    let lost: Vec<Event> = core::iter::from_fn(|| session.poll_event()).collect();
    assert!(
        matches!(&lost[..], [Event::Lost { peer: Rank(1), fault }] if fault.kind == FaultKind::IntegrityExhausted),
        "{lost:?}"
    );
}

#[test]
fn a_peer_without_a_link_is_reported_in_every_epoch_that_has_it() {
    let mut world = World::new(3, &[10], Recovery::Redo, 7);
    let lost = |world: &mut World| {
        let session = &mut world.nodes[0].session;
        let events = core::iter::from_fn(|| session.poll_event());
        events.filter(|event| matches!(event, Event::Lost { peer: Rank(1), .. })).count()
    };
    world.nodes[0].session.handle_link_down(Rank(1), Fault::new(FaultKind::RankDied, "cut"));
    assert_eq!(lost(&mut world), 1);
    // The others were quicker to go on without rank 2.
    world.nodes[0].session.enter(Epoch(2), &[Rank(0), Rank(1)], &[]);
    assert_eq!(lost(&mut world), 1);
}

/// Found across processes: a newcomer that failed right after it had become a member.
#[test]
fn a_rank_that_leaves_in_the_middle_of_a_step_fails_nobody_where_others_go_on() {
    let mut world = World::new(3, &[10, 200_000], Recovery::Redo, 7);
    for rank in 0..2 {
        world.train(rank);
    }
    world.nodes[2].session.leave();
    for _ in 0..4 {
        world.drain();
        world.now += 400_000_000;
        for rank in 0..2 {
            world.nodes[rank].session.handle_timeout(world.now);
        }
    }
    world.drain();
    assert!(world.nodes.iter().all(|node| node.fault.is_none()), "{:?}", world.nodes[0].fault);
    world.nodes[2].state = State::Dead;
    world.remove(2);
    world.finish();
    world.check();
    assert_eq!(world.nodes[0].committed[0][0].1, [Rank(0), Rank(1)]);
}

#[path = "epoch_found_tests.rs"]
mod found;

#[path = "departure_tests.rs"]
mod departures;

#[path = "mismatch_tests.rs"]
mod mismatches;
