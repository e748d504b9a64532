//! A rank that is killed at any moment: the others end every step with the same bits and the contributors on record.
//!
//! `GRADWIRE_TEST_KILLS=50` tries so many moments for each rank and each transport, `GRADWIRE_TEST_SEED` those of an
//! earlier run.

use std::time::{Duration, Instant};

use gradwire_tests::dice::Dice;
use gradwire_tests::steps::{assert_recorded, assert_same};
use gradwire_tests::{Job, Plan};
use rustix::process::Signal;

const RANKS: u32 = 4;
const STEPS: usize = 12;
/// Moments for each rank, over each transport in turn, where the environment says nothing.
const MOMENTS: u64 = 8;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn start(transport: &str, recovery: &str) -> (Plan, Job) {
    let plan = Plan::new(RANKS, transport)
        .with("GRADWIRE_RECOVERY", recovery)
        .with("GRADWIRE_DEADLINE_MS", 30_000)
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0);
    let mut job = Job::start((0..RANKS).map(|rank| plan.command_of("e2e-elastic", rank, &[&STEPS.to_string()])));
    for rank in 0..RANKS as usize {
        job.wait_for_line(rank, "joined ");
    }
    (plan, job)
}

/// How long a job takes that is left alone, from when all have joined.
fn undisturbed(transport: &str) -> Duration {
    let (plan, job) = start(transport, "redo");
    let begun = Instant::now();
    let ended = job.wait();
    let all = assert_same(&ended, &[0, 1, 2, 3], STEPS);
    assert_recorded(&plan, &all, &[0, 1, 2, 3]);
    begun.elapsed()
}

fn kill(transport: &str, recovery: &str, victim: u32, after: Duration) {
    let (plan, job) = start(transport, recovery);
    std::thread::sleep(after);
    job.signal(victim as usize, Signal::KILL);
    let ended = job.wait();
    let others: Vec<u32> = (0..RANKS).filter(|rank| *rank != victim).collect();
    let through: Vec<usize> = others.iter().map(|rank| *rank as usize).collect();
    let all = assert_same(&ended, &through, STEPS);
    let names = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let (everybody, without) = (names(&[0, 1, 2, 3]), names(&others));
    let lost_in = all.values().position(|(by, _)| *by == without).unwrap_or(STEPS);
    for (step, (by, _)) in &all {
        assert_eq!(*by, if *step < lost_in { &*everybody } else { &*without }, "step {step}: {all:?}");
    }
    assert_recorded(&plan, &all, &others);
}

#[test]
fn whenever_a_rank_is_killed_the_others_end_every_step_alike() {
    let mut dice = Dice::thrown();
    let asked = number("GRADWIRE_TEST_KILLS");
    let lengths = ["tcp", "shm"].map(|transport| (transport, undisturbed(transport)));
    // The last moments are those of jobs that abort the step in which a rank is lost, and repeat it.
    let moments = asked.unwrap_or(MOMENTS);
    for moment in 0..moments + moments.div_ceil(4) {
        let recovery = if moment < moments { "redo" } else { "abort" };
        for victim in 0..RANKS {
            for (nth, (transport, length)) in (0..).zip(lengths) {
                let fraction = dice.fraction();
                if asked.is_some() || moment % 2 == nth {
                    let after = length.mul_f64(fraction);
                    println!("moment {moment}: rank {victim} over {transport} after {after:?}, {recovery}");
                    kill(transport, recovery, victim, after);
                }
            }
        }
    }
}
