//! Sessions against each other over a simulated network that loses, repeats, spoils and holds back frames.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::transmit::MessageBytes;
use super::*;
use crate::dtype::{DType, ReduceOp, WireFormat};
use crate::frame::{FLAG_OFFER, FrameHeader, FrameKind, JobTag, Location};
use crate::ids::{Attempt, Epoch};
use crate::limits::FRAME_HEADER_BYTES;
use crate::manifest::Declaration;

pub(super) const JOB: JobTag = JobTag(*b"a job's own tag!");
const MS: u64 = 1_000_000;

#[derive(Clone, Debug)]
enum Packet {
    Data(FrameHeader),
    Message(Vec<u8>),
}

struct World {
    sessions: Vec<Session>,
    /// By (from, to).
    links: Vec<Vec<VecDeque<Packet>>>,
    now: u64,
    done: Vec<Vec<(TensorId, Step, bool)>>,
    failed: Vec<Option<Fault>>,
    farewells: usize,
    /// What happens to the n-th data frame: 0 nothing, 1 lost, 2 spoilt, 3 repeated.
    mischief: VecDeque<u8>,
    /// Units reduced, by rank: each must be once per step.
    reduced: Vec<Vec<(UnitIndex, Step)>>,
}

pub(super) fn declaration(name: &str, elements: u64, collective: Collective) -> Declaration {
    Declaration {
        name: name.into(),
        shape: vec![elements],
        dtype: DType::F32,
        collective,
        reduce: ReduceOp::Sum,
        wire: WireFormat::Fp32,
        priority: 0,
    }
}

impl World {
    fn new(size: u32, declarations: &[Declaration]) -> Self {
        let sessions = (0..size)
            .map(|rank| {
                let config = SessionConfig {
                    copies: false,
                    recovery: Recovery::Fail,
                    ranks_min: 1,
                    rank: Rank(rank),
                    world_size: size,
                    epoch: Epoch(1),
                    job: JOB,
                    first_step: Step(u64::from(u32::MAX)),
                    timing: Timing::default(),
                };
                Session::new(config)
            })
            .collect();
        let count = size as usize;
        let mut world = Self {
            sessions,
            links: vec![vec![VecDeque::new(); count]; count],
            now: 0,
            done: vec![Vec::new(); count],
            failed: vec![None; count],
            farewells: 0,
            mischief: VecDeque::new(),
            reduced: vec![Vec::new(); count],
        };
        for session in &mut world.sessions {
            session.declare(vec![7; 5000], 0, None).unwrap();
        }
        world.settle();
        for session in &mut world.sessions {
            assert_eq!(session.take_manifests(), vec![vec![7; 5000]; count]);
            session.lay_out(declarations);
            session.prepare(&vec![Location::default(); count]);
        }
        world.settle();
        assert!(world.sessions.iter().all(|session| session.round() == 1));
        world
    }

    fn post_all(&mut self, tensors: u32) {
        for rank in 0..self.sessions.len() {
            for tensor in 0..tensors {
                self.sessions[rank].post(TensorId(tensor), self.now, None).unwrap();
            }
        }
    }

    /// Runs until nothing moves.
    fn settle(&mut self) {
        while (0..self.sessions.len()).map(|rank| self.pump(rank) + self.deliver(rank)).sum::<usize>() > 0 {}
    }

    /// Runs, letting time pass where nothing moves, until all ranks are through or `ms` have passed.
    fn run(&mut self, ms: u64) {
        let end = self.now + ms * MS;
        loop {
            self.settle();
            let next = self.sessions.iter().filter_map(Session::poll_timeout).min();
            match next {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => return,
            }
            for session in &mut self.sessions {
                session.handle_timeout(self.now);
            }
        }
    }

    fn pump(&mut self, rank: usize) -> usize {
        let mut moved = 0;
        let session = &mut self.sessions[rank];
        while let Some(work) = session.poll_work() {
            let (Work::Reduce(unit) | Work::Publish(unit)) = work;
            let step = session.step(session.plan().unit(unit).tensor);
            assert!(!self.reduced[rank].contains(&(unit, step)), "{unit} reduced twice in {step}");
            self.reduced[rank].push((unit, step));
            session.handle_reduced(work, unit.0 == 1, self.now);
            moved += 1;
        }
        let mut bytes = MessageBytes::new();
        while let Some(peer) = session.peek_message(&mut bytes) {
            session.pop_message();
            self.links[rank][peer.index()].push_back(Packet::Message(bytes.to_vec()));
            moved += 1;
        }
        while let Some(transmit) = session.poll_transmit(self.now) {
            moved += 1;
            session.handle_sent(&transmit);
            self.links[rank][transmit.peer.index()].push_back(Packet::Data(session.header(&transmit)));
        }
        while let Some(event) = session.poll_event() {
            moved += 1;
            match event {
                Event::Done { tensor, step, nonfinite } => self.done[rank].push((tensor, step, nonfinite)),
                Event::Failed(fault) => self.failed[rank] = Some(fault),
                Event::Farewell => self.farewells += 1,
                Event::Spoilt { .. } => unreachable!("there are no copies here"),
                Event::Manifests | Event::Prepared => {}
                Event::Lost { .. }
                | Event::Entered
                | Event::Synced
                | Event::Again { .. }
                | Event::Resting { .. }
                | Event::Aborted { .. }
                | Event::Committed { .. } => unreachable!("members do not change here: {event:?}"),
            }
        }
        moved
    }

    fn deliver(&mut self, to: usize) -> usize {
        let mut moved = 0;
        for from in 0..self.sessions.len() {
            let Some(packet) = self.links[from][to].pop_front() else { continue };
            moved += 1;
            let fate = if matches!(packet, Packet::Data(_)) { self.mischief.pop_front().unwrap_or(0) } else { 0 };
            match fate {
                1 => {}
                3 => {
                    self.receive(from, to, &packet, false);
                    self.receive(from, to, &packet, false);
                }
                fate => self.receive(from, to, &packet, fate == 2),
            }
        }
        moved
    }

    fn receive(&mut self, from: usize, to: usize, packet: &Packet, spoilt: bool) {
        let (session, peer, now) = (&mut self.sessions[to], Rank(from as u32), self.now);
        match packet {
            Packet::Message(bytes) => {
                let (header, body) = bytes.split_at(FRAME_HEADER_BYTES);
                let header = FrameHeader::decode(header, &JOB).unwrap();
                session.handle_message(peer, &header, body, now).unwrap();
            }
            Packet::Data(header) => match session.admit(peer, header).unwrap() {
                Admission::Discard => {}
                Admission::Accept if spoilt => session.handle_corrupt(peer, header),
                Admission::Accept if header.kind == FrameKind::Contribution => {
                    session.handle_contribution(peer, header, now);
                }
                Admission::Accept => {
                    for unit in header.unit_first.0..header.unit_first.0 + header.unit_count {
                        session.handle_result_unit(UnitIndex(unit), unit == 1, now);
                    }
                    session.handle_result(peer, header);
                }
            },
        }
    }
}

fn all_kinds() -> Vec<Declaration> {
    vec![
        declaration("small.a", 3, Collective::AllReduce),
        declaration("large", 200_000, Collective::AllReduce),
        declaration("small.b", 5000, Collective::AllReduce),
        declaration("empty", 0, Collective::AllReduce),
        declaration("scattered", 100_000, Collective::ReduceScatter),
        declaration("gathered", 70_001, Collective::AllGather),
        declaration("cast", 30_000, Collective::Broadcast { root: Rank(0) }),
        declaration("one", 1, Collective::ReduceScatter),
    ]
}

#[test]
fn every_collective_ends_on_every_rank_with_the_same_flags() {
    for size in [1, 2, 3, 5] {
        let declarations = all_kinds();
        let mut world = World::new(size, &declarations);
        for step in 0..3 {
            world.post_all(declarations.len() as u32);
            world.run(1000);
            assert_eq!(world.failed, vec![None; size as usize]);
            for rank in 0..size as usize {
                assert_eq!(world.done[rank].len(), declarations.len() * (step + 1), "{size} ranks, rank {rank}");
            }
        }
        for done in &mut world.done {
            done.sort_unstable_by_key(|(tensor, step, _)| (*tensor, *step));
        }
        let expected = &world.done[0];
        let flags: Vec<_> =
            expected.iter().filter(|(tensor, ..)| *tensor != TensorId(4) && *tensor != TensorId(7)).collect();
        for done in &world.done {
            assert_eq!(
                done.iter().filter(|(tensor, ..)| *tensor != TensorId(4) && *tensor != TensorId(7)).collect::<Vec<_>>(),
                flags
            );
        }
        assert_eq!(world.sessions[0].counters(), Counters::default(), "nothing was sent twice");
    }
}

#[test]
fn a_bucket_travels_in_parts_when_somebody_waits() {
    let declarations = [declaration("a", 10, Collective::AllReduce), declaration("b", 20, Collective::AllReduce)];
    let mut world = World::new(3, &declarations);
    for rank in 0..3 {
        world.sessions[rank].post(TensorId(0), 0, None).unwrap();
        world.sessions[rank].flush(TensorId(0));
    }
    world.settle();
    assert!(world.done.iter().all(|done| done.len() == 1));
    for rank in 0..3 {
        world.sessions[rank].post(TensorId(1), 0, None).unwrap();
    }
    world.run(2);
    assert!(world.done.iter().all(|done| done.len() == 2), "the linger time ends by itself");
}

#[test]
fn a_tensor_that_one_rank_never_offers_fails_everywhere_and_names_it() {
    let mut world = World::new(4, &all_kinds());
    for rank in [0, 1, 3] {
        for tensor in 0..8 {
            world.sessions[rank].post(TensorId(tensor), 0, None).unwrap();
        }
    }
    world.run(40_000);
    for fault in &world.failed {
        let fault = fault.as_ref().expect("every rank fails");
        assert_eq!((fault.kind, fault.rank), (FaultKind::NotOffered, Some(Rank(2))), "{fault}");
        assert!(fault.tensor.is_some() && fault.step == Some(Step(u64::from(u32::MAX))), "{fault}");
    }
    assert!(world.now <= 31_000 * MS, "within the deadline");
    let refused = world.sessions[2].post(TensorId(0), world.now, None).unwrap_err();
    assert_eq!(refused.kind, FaultKind::NotOffered);
}

#[test]
fn a_rank_that_left_fails_those_who_go_on_at_once() {
    let declarations = all_kinds();
    for tensor in 0..declarations.len() as u32 {
        let mut world = World::new(3, &declarations);
        world.post_all(8);
        world.run(100);
        world.sessions[1].leave();
        world.settle();
        assert_eq!(world.farewells, 1, "nobody needs it any more");
        let before = world.now;
        for rank in [0, 2] {
            // The second may be told before it posts.
            let _ = world.sessions[rank].post(TensorId(tensor), world.now, None);
            world.settle();
        }
        world.run(10);
        for rank in [0, 2] {
            let fault = world.failed[rank].as_ref().unwrap_or_else(|| panic!("tensor {tensor}, rank {rank}"));
            assert_eq!((fault.kind, fault.rank), (FaultKind::RankLeft, Some(Rank(1))), "{fault}");
        }
        assert!(world.now <= before + 10 * MS);
    }
}

/// Found by simulation: the word of what an owner lacked and the goodbye of the rank that it lacked it from travel over
/// different links, so that the older may come last.
#[test]
fn a_rank_that_left_after_its_part_was_used_after_all_is_not_blamed() {
    let mut world = World::new(3, &[declaration("a", 10, Collective::AllReduce)]);
    world.post_all(1);
    for session in &mut world.sessions {
        session.flush(TensorId(0));
    }
    // Rank 0 owns it, and has sent what it has of it; rank 1 does not have that yet.
    for rank in [1, 2, 0] {
        world.pump(rank);
    }
    while world.deliver(0) > 0 {}
    world.pump(0);
    let held = core::mem::take(&mut world.links[0][1]);
    assert!(!held.is_empty());
    while world.deliver(2) > 0 {}
    world.pump(2);
    assert_eq!(world.done[2].len(), 1);
    world.sessions[2].leave();
    world.settle();
    let mut waiting = FrameHeader::new(FrameKind::Waiting, Epoch(1));
    (waiting.unit_count, waiting.step) = (1, Step(u64::from(u32::MAX)));
    (waiting.payload_len, waiting.payload_crc) = (1, crate::frame::payload_crc(&[1 << 2]));
    let now = world.now;
    world.sessions[1].handle_message(Rank(0), &waiting, &[1 << 2], now).unwrap();
    world.links[0][1] = held;
    world.settle();
    assert_eq!(world.failed, vec![None; 3]);
    assert_eq!(world.done[1].len(), 1);
}

#[test]
fn everybody_leaves_in_good_order() {
    let mut world = World::new(3, &all_kinds());
    world.post_all(8);
    world.run(100);
    for session in &mut world.sessions {
        session.leave();
    }
    world.settle();
    assert_eq!((world.farewells, &world.failed), (3, &vec![None; 3]));
}

#[test]
fn a_link_that_ends_fails_every_rank_and_names_the_dead() {
    let mut world = World::new(3, &all_kinds());
    world.sessions[0].post(TensorId(1), 0, None).unwrap();
    let fault = Fault::new(FaultKind::RankDied, "its link closed").at(Rank(2));
    world.sessions[0].handle_link_down(Rank(2), fault);
    world.settle();
    for rank in [0, 1] {
        assert_eq!(world.failed[rank].as_ref().map(|fault| fault.rank), Some(Some(Rank(2))));
    }
}

#[test]
fn a_peer_that_only_sends_garbage_is_given_up() {
    let mut world = World::new(2, &[declaration("large", 200_000, Collective::AllReduce)]);
    world.mischief = core::iter::repeat_n(2, 1000).collect();
    world.post_all(1);
    world.run(1000);
    for fault in &world.failed {
        assert_eq!(fault.as_ref().map(|fault| fault.kind), Some(FaultKind::IntegrityExhausted));
    }
}

#[test]
fn frames_that_no_peer_may_send_are_violations_and_old_ones_are_dropped() {
    let mut world = World::new(2, &all_kinds());
    world.post_all(8);
    world.run(100);
    let session = &mut world.sessions[0];
    let unit = session.plan().bucket(BucketId(1)).owned[0].start;
    let good = Transmit {
        peer: Rank(0),
        data: Data::Contribution,
        bucket: BucketId(1),
        unit_first: UnitIndex(unit),
        unit_count: 1,
        step: Step(u64::from(u32::MAX) + 1),
        attempt: Attempt(0),
        commits: 0,
    };
    let good = session.header(&good);
    let try_with = |session: &mut Session, change: &dyn Fn(&mut FrameHeader)| {
        let mut header = good;
        change(&mut header);
        session.admit(Rank(1), &header)
    };
    assert_eq!(try_with(session, &|_| {}), Ok(Admission::Accept));
    assert_eq!(try_with(session, &|h| h.epoch = Epoch(0)), Ok(Admission::Discard));
    assert_eq!(try_with(session, &|h| h.step = Step(u64::from(u32::MAX))), Ok(Admission::Discard));
    let violations: [&dyn Fn(&mut FrameHeader); 9] = [
        &|h| h.bucket = BucketId(99),
        &|h| h.unit_first = UnitIndex(u32::MAX),
        &|h| h.unit_count = u32::MAX,
        &|h| h.unit_count = 0,
        &|h| h.payload_len -= 4,
        &|h| h.dtype = Some(DType::F64),
        &|h| h.step = Step(u64::MAX),
        &|h| h.kind = FrameKind::Goodbye,
        &|h| h.flags = FLAG_OFFER,
    ];
    for (index, change) in violations.into_iter().enumerate() {
        let fault = try_with(session, change).expect_err("must be a violation");
        assert_eq!((fault.kind, fault.rank), (FaultKind::ProtocolViolation, Some(Rank(1))), "{index}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn lost_spoilt_and_repeated_frames_are_repaired(
        size in 2u32..5,
        mischief in proptest::collection::vec(0u8..4, 0..400),
        elements in proptest::collection::vec((0u64..150_000, 0usize..4), 1..5),
    ) {
        let kinds = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast { root: Rank(1) },
        ];
        let declarations: Vec<Declaration> = elements
            .iter()
            .enumerate()
            .map(|(at, (elements, kind))| declaration(&format!("t{at}"), *elements, kinds[*kind]))
            .collect();
        let mut world = World::new(size, &declarations);
        let count = declarations.len();
        world.mischief = mischief.into();
        for step in 1..=3 {
            world.post_all(count as u32);
            world.run(29_000);
            prop_assert_eq!(&world.failed, &vec![None; size as usize]);
            for done in &world.done {
                prop_assert_eq!(done.len(), count * step);
            }
        }
        prop_assert_eq!(world.sessions.iter().map(Session::operations_in_flight).sum::<usize>(), 0);
    }

    #[test]
    fn no_header_however_odd_makes_a_session_panic(
        kind in 0usize..10, flags in 0u8..16, dtype in proptest::option::of(0usize..6), numbers in any::<[u32; 4]>(),
        step in any::<u64>(), body in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut world = World::new(2, &all_kinds());
        world.post_all(8);
        let kinds = [
            FrameKind::Contribution, FrameKind::Result, FrameKind::Ack, FrameKind::Nack, FrameKind::Abort,
            FrameKind::Goodbye, FrameKind::GoodbyeAck, FrameKind::Manifest, FrameKind::Ready, FrameKind::Waiting,
        ];
        let mut header = FrameHeader::new(kinds[kind], Epoch(1));
        header.flags = flags;
        header.dtype = dtype.map(|at| DType::ALL[at]);
        header.bucket = BucketId(numbers[0] % 10);
        header.unit_first = UnitIndex(numbers[1] % 64);
        header.unit_count = if numbers[2] % 3 == 0 { numbers[2] } else { numbers[2] % 8 };
        header.step = if step % 2 == 0 { Step(step) } else { Step(u64::from(u32::MAX) + step % 3) };
        header.payload_len = if numbers[3] % 2 == 0 { body.len() as u32 } else { numbers[3] };
        header.payload_crc = crate::frame::payload_crc(&body);
        let session = &mut world.sessions[0];
        let _ = session.handle_message(Rank(1), &header, &body, 0);
        let _ = session.admit(Rank(1), &header);
        world.settle();
    }
}

#[test]
fn a_rank_may_begin_the_next_declaration_round_before_others_are_through_with_this_one() {
    let size = 3;
    let mut world = World::new(size, &all_kinds());
    for session in &mut world.sessions {
        session.declare(vec![1; 10], 0, None).unwrap();
    }
    world.settle();
    for rank in 0..3 {
        assert_eq!(world.sessions[rank].take_manifests().len(), 3);
        world.sessions[rank].lay_out(&[declaration("more", 10, Collective::AllReduce)]);
        world.sessions[rank].prepare(&[Location::default(); 3]);
    }
    // Rank 2's word to rank 0 is held back; rank 1 is through, and declares again.
    for rank in 0..3 {
        world.pump(rank);
    }
    let held = core::mem::take(&mut world.links[2][0]);
    world.settle();
    assert_eq!((world.sessions[0].round(), world.sessions[1].round()), (1, 2));
    world.sessions[1].declare(vec![2; 10], 0, None).unwrap();
    world.settle();
    world.links[2][0] = held;
    world.settle();
    for rank in [0, 2] {
        world.sessions[rank].declare(vec![2; 10], 0, None).unwrap();
    }
    world.settle();
    for session in &mut world.sessions {
        assert_eq!(session.take_manifests(), vec![vec![2; 10]; 3]);
    }
    assert_eq!(world.failed, vec![None; 3]);
}

/// Found by simulation: the word that it is prepared came, its declarations did not.
#[test]
fn a_rank_whose_declarations_were_lost_is_named() {
    let mut sessions = [0, 1].map(|rank| {
        Session::new(SessionConfig {
            copies: false,
            recovery: Recovery::Fail,
            ranks_min: 1,
            rank: Rank(rank),
            world_size: 2,
            epoch: Epoch(1),
            job: JOB,
            first_step: Step(0),
            timing: Timing::default(),
        })
    });
    let mut bytes = MessageBytes::new();
    for session in &mut sessions {
        session.declare(vec![7; 10], 0, None).unwrap();
    }
    let [one, other] = &mut sessions;
    let send = |from: &mut Session, bytes: &mut MessageBytes| {
        from.peek_message(bytes).unwrap();
        from.pop_message();
        FrameHeader::decode(&bytes[..FRAME_HEADER_BYTES], &JOB).unwrap()
    };
    let header = send(one, &mut bytes);
    other.handle_message(Rank(0), &header, &bytes[FRAME_HEADER_BYTES..], 0).unwrap();
    send(other, &mut bytes);
    other.take_manifests();
    other.lay_out(&[]);
    other.prepare(&[Location::default(); 2]);
    let header = send(other, &mut bytes);
    one.handle_message(Rank(1), &header, &[], 0).unwrap();
    one.handle_timeout(60_000 * MS);
    let fault = one.fault().unwrap();
    assert_eq!((fault.kind, fault.rank), (FaultKind::NotOffered, Some(Rank(1))), "{fault}");
}

#[test]
fn a_source_that_is_early_waits_for_receivers_that_are_late() {
    let kinds = [Collective::AllGather, Collective::Broadcast { root: Rank(0) }];
    for collective in kinds {
        let mut world = World::new(3, &[declaration("spread", 1, collective)]);
        for step in 1..=3 {
            world.sessions[0].post(TensorId(0), world.now, None).unwrap();
            // Long enough that what is missing is asked for, and sent again, several times.
            world.run(5000);
            for rank in [1, 2] {
                world.sessions[rank].post(TensorId(0), world.now, None).unwrap();
                world.run(3000);
            }
            assert_eq!(world.failed, vec![None; 3], "{collective}");
            assert!(world.done.iter().all(|done| done.len() == step), "{collective}");
        }
    }
}

#[test]
fn an_operation_left_out_is_told_before_its_neighbours_are_added() {
    for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
        let declarations = [declaration("a", 100_000, collective), declaration("b", 10, Collective::AllReduce)];
        let mut world = World::new(3, &declarations);
        for rank in 0..3 {
            if rank != 2 {
                world.sessions[rank].post(TensorId(0), world.now, None).unwrap();
            }
            world.sessions[rank].post(TensorId(1), world.now, None).unwrap();
            world.sessions[rank].commit();
        }
        world.settle();
        // The others wait for rank 2's part; it is in the next step, and its part is not what they wait for.
        let _ = world.sessions[2].post(TensorId(0), world.now, None);
        world.run(10);
        for fault in &world.failed {
            let fault = fault.as_ref().expect("every rank fails");
            assert_eq!(fault.kind, FaultKind::OperationMismatch, "{collective}: {fault}");
            assert_eq!(fault.tensor.as_deref(), Some("a"), "{fault}");
            assert!(fault.detail.contains("rank 2") && fault.detail.contains("after 1 commits"), "{fault}");
        }
        assert!(world.done.iter().all(|done| done.iter().all(|(tensor, ..)| *tensor == TensorId(1))));
    }
}
