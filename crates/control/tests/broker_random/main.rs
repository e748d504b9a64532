//! Random and damaged frames, a million of them: none makes the broker panic, or take more memory than its limits
//! allow. The seed is the same in every run; fuzz/ looks further.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../entry/mod.rs"]
mod entry;
mod seeds;
mod sys;

use std::fs;

use pulsar::message::Codec;
use pulsar::message::proto::BaseCommand;
use tokio_util::codec::Decoder as _;

use entry::{FRAME_BYTES_MAX, Session, put_frame};
use sys::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FRAMES: usize = 1_000_000;
/// A broker is given up for another one after this many.
const FRAMES_PER_BROKER: usize = 1000;

/// Splitmix64: no run differs from another.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// A seed, changed a little or not at all, or something that never was one.
fn random_part(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut part = vec![random.next() as u8 & 0xfd];
    if random.below(50) == 0 {
        part[0] |= 2;
    }
    if random.below(20) == 0 {
        part.extend((0..random.below(200)).map(|_| 0).collect::<Vec<u8>>());
        part[1..].fill_with(|| random.next() as u8);
        return part;
    }
    part.extend_from_slice(&seeds[random.below(seeds.len())]);
    for _ in 0..random.below(4) {
        let position = 1 + random.below(part.len() - 1);
        match random.below(5) {
            0 => part[position] = random.next() as u8,
            1 => part[position] ^= 1 << random.below(8),
            2 => part.truncate(position.max(2)),
            3 => part.insert(position, random.next() as u8),
            _ => {
                let other = &seeds[random.below(seeds.len())];
                part.truncate(position);
                part.extend_from_slice(&other[random.below(other.len())..]);
            }
        }
        if part.len() < 2 {
            part.push(0);
        }
    }
    part
}

#[test]
fn a_million_random_frames_neither_panic_nor_take_more_than_their_size_allows() {
    let (seeds, mut random) = (seeds::seeds(), Random(0x6772_6164));
    for broker in 0..FRAMES / FRAMES_PER_BROKER {
        let before = sys::start();
        let mut session = Session::new();
        for frame in 0..FRAMES_PER_BROKER {
            let part = random_part(&mut random, &seeds);
            session.say(&part);
            let counts = sys::counts();
            // Frames here are far below the limit, so whatever comes near it was promised by a number in one.
            assert!(counts.largest <= FRAME_BYTES_MAX, "frame {frame} of broker {broker}: {counts:?}, {part:?}");
        }
        drop(session);
        let after = sys::counts();
        assert!(after.held - before.held < 4096, "a broker that is gone left memory: {before:?}, {after:?}");
    }
}

#[test]
fn the_frames_that_are_damaged_here_are_good_ones() {
    let mut session = Session::new();
    let (mut receipts, mut messages, mut others) = (0, 0, 0);
    for seed in seeds::seeds() {
        let (mut heard, closed) = session.say(&[&[0], &seed[..]].concat());
        assert!(closed.is_none(), "{closed:?}: {seed:?}");
        while let Some(message) = Codec.decode(&mut heard).unwrap() {
            match message.command {
                BaseCommand { send_receipt: Some(_), .. } => receipts += 1,
                BaseCommand { message: Some(_), .. } => messages += 1,
                _ => others += 1,
            }
        }
    }
    assert!(receipts >= 8 && messages >= 8 && others >= 20, "{receipts}, {messages}, {others}");
}

#[test]
fn a_frame_of_nothing_but_empty_parts_takes_a_bounded_amount_of_memory() {
    // A thousand times: ACK with an empty message id, 2 bytes each. In memory, an id has dozens of bytes.
    let ids = 40_000_usize;
    let mut ack = vec![8, 0, 16, 0];
    ack.extend([0x1a, 0].repeat(ids));
    let mut command = vec![8, 10, 0x52];
    let mut size = ack.len();
    while size > 0x7f {
        command.push(size as u8 | 0x80);
        size >>= 7;
    }
    command.push(size as u8);
    command.extend(ack);
    let mut content = (command.len() as u32).to_be_bytes().to_vec();
    content.extend(command);
    let mut part = vec![0];
    part.extend(content);
    let mut session = Session::new();
    let before = sys::start();
    session.say(&part);
    let counts = sys::counts();
    assert!(counts.largest < 16 << 20, "{counts:?}");
    assert!(counts.held - before.held < 1 << 20, "{counts:?}");
    // More than that is refused before it is looked at.
    let mut part = vec![2];
    put_frame(&mut part, &[&(300_u32 << 10).to_be_bytes()[..], &vec![0; 300 << 10]].concat());
    let before = sys::start();
    session.say(&part);
    assert!(sys::counts().held_max - before.held < 2 << 20, "{:?}", sys::counts());
}

#[test]
fn a_size_field_takes_no_memory() {
    let mut session = Session::new();
    let before = sys::start();
    // A frame of the largest size that is allowed, of which nothing comes.
    let mut part = vec![2];
    part.extend_from_slice(&(FRAME_BYTES_MAX as u32).to_be_bytes());
    part.extend_from_slice(&[0, 0, 0, 4]);
    session.say(&part);
    let counts = sys::counts();
    assert!(counts.held_max - before.held < 64 << 10, "{counts:?}");
}

#[test]
fn the_seeds_of_the_fuzz_targets_hold() {
    let fuzz = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
    type Entry = fn(&[u8]);
    let targets = [("broker_frame", entry::broker_frame as Entry), ("broker_session", entry::broker_session)];
    for (target, run) in targets {
        let mut inputs = 0;
        for input in fs::read_dir(format!("{fuzz}/{target}")).unwrap() {
            run(&fs::read(input.unwrap().path()).unwrap());
            inputs += 1;
        }
        assert!(inputs > 0, "{target} has no seeds");
    }
}
