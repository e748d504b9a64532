//! Some ranks that train, and links between them on which everything takes as long as the test wants.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::super::super::tests::{JOB, declaration};
use super::super::super::transmit::MessageBytes;
use super::super::super::*;
use crate::dtype::Collective;
use crate::frame::{FrameHeader, FrameKind, Location};
use crate::ids::Epoch;
use crate::limits::FRAME_HEADER_BYTES;
use crate::manifest::Declaration;

pub(super) const STEPS: u64 = 4;

/// What a unit's result was made of: the epoch in which it was reduced, and by whom.
pub(super) type Origin = (Epoch, Vec<Rank>);

#[derive(Clone, Debug)]
pub(super) enum Packet {
    Message(Vec<u8>),
    /// With the origin of each unit, where it is a result.
    Data(FrameHeader, Vec<Origin>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Runs,
    /// Its process was stopped.
    Stopped,
    Dead,
}

pub(super) struct Node {
    pub(super) session: Session,
    pub(super) state: State,
    /// Views that it knows, and the first that it was in.
    pub(super) views: usize,
    pub(super) born: usize,
    /// Steps that were final when it joined; nothing until it knows.
    pub(super) first: Option<u64>,
    /// By unit: the result's origin.
    pub(super) results: Vec<Option<Origin>>,
    /// Those of the last epoch, until it is known what becomes of the step.
    pub(super) before: Option<Vec<Option<Origin>>>,
    /// The operations that it posted in its step and that are not done.
    pub(super) waits_for: Vec<TensorId>,
    pub(super) posted: bool,
    pub(super) committing: bool,
    /// By step: the origins of its results when it was committed.
    pub(super) committed: Vec<Vec<Origin>>,
    /// And what all made of their wishes.
    pub(super) outcomes: Vec<Next>,
    pub(super) aborted: u64,
    pub(super) again: u64,
    pub(super) rests: u64,
    pub(super) farewell: bool,
    pub(super) lost: Vec<(Rank, Fault)>,
    pub(super) fault: Option<Fault>,
}

pub(super) struct World {
    pub(super) nodes: Vec<Node>,
    pub(super) links: Vec<Vec<VecDeque<Packet>>>,
    /// With the rank that joins in it, if one does.
    pub(super) views: Vec<(Epoch, Vec<Rank>, Option<Rank>)>,
    pub(super) declared: Vec<Declaration>,
    pub(super) tensors: u32,
    pub(super) random: u64,
    pub(super) now: u64,
}

impl Node {
    pub(super) fn new(session: Session, born: usize, first: Option<u64>) -> Self {
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

    pub(super) fn commits(&self) -> Option<u64> {
        Some(self.first? + self.committed.len() as u64)
    }
}

pub(super) fn declarations(sizes: &[u64]) -> Vec<Declaration> {
    let named = |(index, size): (usize, &u64)| declaration(&alloc::format!("t{index}"), *size, Collective::AllReduce);
    sizes.iter().enumerate().map(named).collect()
}

impl World {
    pub(super) fn new(size: u32, sizes: &[u64], recovery: Recovery, seed: u64) -> Self {
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

    pub(super) fn random(&mut self, below: usize) -> usize {
        // Numerical Recipes' linear congruence; the upper bits are random enough here.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    /// Everything that is sent arrives.
    pub(super) fn drain(&mut self) {
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
    pub(super) fn pump(&mut self, rank: usize, most: usize) -> usize {
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

    pub(super) fn take_events(&mut self, rank: usize) -> usize {
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
    pub(super) fn train(&mut self, rank: usize) -> usize {
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

    pub(super) fn deliver(&mut self, from: usize, to: usize) -> bool {
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
    pub(super) fn learn(&mut self, rank: usize) -> bool {
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
    pub(super) fn view(&self) -> (Epoch, Vec<Rank>) {
        match self.views.last() {
            Some((epoch, members, _)) => (*epoch, members.clone()),
            None => (Epoch(1), (0..self.nodes.len() as u32).map(Rank).collect()),
        }
    }

    /// The others agree to go on without this rank.
    pub(super) fn remove(&mut self, rank: usize) {
        let (epoch, mut members) = self.view();
        members.retain(|member| member.index() != rank);
        self.views.push((Epoch(epoch.0 + 1), members, None));
    }

    /// The members agree to take in a process with this rank, which nobody alive has.
    pub(super) fn add(&mut self, rank: usize) {
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

    pub(super) fn step(&mut self) -> usize {
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
    pub(super) fn finish(&mut self) {
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

    pub(super) fn check(&self) {
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
