//! Plans from seeds.

use super::{Elements, Fault, Federated, LinkFault, Links, Operation, Plan, Recovery, Reduce, Tensor, Timed, Wire};
use crate::random::Random;

/// When the members have met and steps begin, about, in microseconds.
const JOINED_US: u64 = 2_800;

/// What plans are made: bounds within which the seed decides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// How many ranks, if not for the seed to decide.
    pub ranks: Option<u32>,
    /// Whether the mode is the federated one, if not for the seed to decide.
    pub federated: Option<bool>,
    /// What becomes of a step in which a rank is lost, if not for the seed to decide.
    pub recovery: Option<Recovery>,
}

impl Plan {
    /// The plan of a seed. Of eight one has no faults, and two have only such as must be repaired. Half of all jobs redo the
    /// step in which a rank is lost, a quarter aborts it; the rest fails then, or is federated.
    #[must_use]
    pub fn generate(seed: u64, shape: &Shape) -> Self {
        let mut random = Random::new(seed);
        let ranks = random.spread(2, 17) as u32;
        let ranks = shape.ranks.unwrap_or(ranks);
        let federated = random.chance(15);
        let federated = shape.federated.unwrap_or(federated);
        let recovery = match random.below(85) {
            _ if federated => Recovery::Fail,
            0..50 => Recovery::Redo,
            50..75 => Recovery::Abort,
            _ => Recovery::Fail,
        };
        let recovery = shape.recovery.unwrap_or(recovery);
        let mut plan = Self {
            seed,
            ranks,
            steps: random.within(1, if ranks < 6 { 9 } else { 5 }) as u32,
            recovery,
            ranks_min: 1,
            ranks_max: ranks,
            rounds: if federated { 1 } else { random.within(1, 4) as u32 },
            links: if random.chance(50) { Links::OneSided } else { Links::Asked },
            deadline_ms: random.within(8_000, 20_000),
            compute_us: random.spread(30, 8_000),
            broker_keeps: random.chance(70) || federated,
            tensors: Vec::new(),
            federated: federated.then(|| Federated {
                aggregators: random.within(1, 4) as u32,
                quorum: random.within(u64::from(ranks / 2).max(1), u64::from(ranks) + 1) as u32,
                carry: random.chance(50),
                shard_elements: random.spread(16, 2_000) as u32,
            }),
            faults: Vec::new(),
        };
        let tensors = if federated { 1 } else { random.within(1, 6) };
        for _ in 0..tensors {
            plan.tensors.push(tensor(&mut random, ranks, federated));
        }
        if let (Some(federated), Some(model)) = (&mut plan.federated, plan.tensors.first()) {
            // So many shards that they go their own ways, and not so many that they do nothing else.
            federated.shard_elements = federated.shard_elements.max(model.elements.div_ceil(40) as u32);
        }
        if plan.is_elastic() {
            plan.let_join(&mut random);
        }
        match random.below(8) {
            0 => {}
            1..3 => plan.add_faults(&mut random, true),
            _ => plan.add_faults(&mut random, false),
        }
        plan
    }

    fn add_faults(&mut self, random: &mut Random, repairable: bool) {
        if !repairable && self.is_elastic() && random.chance(40) {
            self.add_turnover(random);
        } else if !repairable && self.federated.is_none() && random.chance(60) {
            self.add_lateness(random);
        }
        let most = if self.faults.is_empty() { 7 } else { 5 };
        for _ in 0..random.within(1, most) {
            let fault = fault(random, self, repairable);
            let steps_us = u64::from(self.steps) * self.step_us();
            let at_us = match random.below(10) {
                0 => random.below(JOINED_US),
                // After the first crash the others go on a while later.
                1 => JOINED_US + random.spread(1, 2_000_000),
                _ => JOINED_US + random.below(steps_us),
            };
            self.faults.push(Timed { at_us, fault });
            if repairable && !self.is_repairable() {
                self.faults.pop();
            }
        }
        self.faults.sort_by_key(|timed| timed.at_us);
    }
}

impl Plan {
    /// Jobs that go on with other ranks: more of them may come, sometimes they have to, and the job lasts so long that they
    /// can.
    fn let_join(&mut self, random: &mut Random) {
        let ranks_most = u64::from(self.ranks) + 1;
        self.ranks_min = if random.chance(30) { random.within(1, ranks_most) as u32 } else { 1 };
        self.ranks_max = self.ranks + random.below(3) as u32;
        self.deadline_ms = random.within(15_000, 40_000);
        if random.chance(50) {
            self.compute_us = random.spread(8_000, 200_000);
            self.steps += random.within(2, 9) as u32;
        }
    }

    /// Ranks come and go, and some of that while others come.
    fn add_turnover(&mut self, random: &mut Random) {
        let steps_us = u64::from(self.steps) * self.step_us();
        let mut at_us = JOINED_US + random.below(steps_us / 2 + 1);
        for _ in 0..random.within(1, 4) {
            let rank = random.below(u64::from(self.ranks)) as u32;
            let back_us = random.chance(75).then(|| random.spread(100, 100_000));
            let fault = match random.below(6) {
                0 => Fault::Leave { rank },
                1 | 2 if self.ranks_max > self.ranks => {
                    Fault::Join { rank: random.within(self.ranks.into(), self.ranks_max.into()) as u32 }
                }
                _ => Fault::Crash { rank, back_us, disk: random.chance(50), silent: random.chance(15) },
            };
            self.faults.push(Timed { at_us, fault });
            at_us += random.spread(100, 300_000);
        }
    }

    /// About how long a step takes.
    const fn step_us(&self) -> u64 {
        self.compute_us + self.compute_us / 8 + 50
    }

    /// Writes that come again all the time, much later, while one rank keeps the others waiting and members change: what
    /// epochs and slots are there for.
    fn add_lateness(&mut self, random: &mut Random) {
        self.compute_us = random.spread(30, 500);
        let delay_us = random.spread(200, 3_000);
        let step_us = self.step_us() + 2 * delay_us;
        let rank = |random: &mut Random| random.below(u64::from(self.ranks)) as u32;
        let for_us = 3_000_000;
        let late = LinkFault {
            for_us,
            late: random.within(500, 1001) as u32,
            late_us: step_us * random.within(1, 4) + 2_500,
            reorder: if random.chance(50) { random.within(100, 600) as u32 } else { 0 },
            ..LinkFault::default()
        };
        let slow = LinkFault { for_us, from: Some(rank(random)), delay_us, ..LinkFault::default() };
        let mut faults = vec![Timed { at_us: JOINED_US - 500, fault: Fault::Link(late) }];
        faults.push(Timed { at_us: JOINED_US - 500, fault: Fault::Link(slow) });
        if random.chance(80) && self.ranks > 2 {
            let at_us = JOINED_US + random.below(u64::from(self.steps) * step_us);
            let back_us = Some(random.spread(100, 50_000));
            let crash = Fault::Crash { rank: rank(random), back_us, disk: random.chance(50), silent: false };
            faults.push(Timed { at_us, fault: crash });
        }
        self.faults.append(&mut faults);
    }
}

fn tensor(random: &mut Random, ranks: u32, federated: bool) -> Tensor {
    // The more ranks, the less each: all of it is sent to all of them.
    let elements_max = if random.chance(20) { 160_000 } else { 24_000 } / u64::from(ranks);
    let elements = if random.chance(5) { 0 } else { random.spread(1, elements_max) };
    if federated {
        let wire = *random.pick(&[Wire::Fp32, Wire::Fp32, Wire::Fp16, Wire::Bf16]);
        let reduce = *random.pick(&[Reduce::Sum, Reduce::Mean, Reduce::Mean]);
        return Tensor {
            elements: elements.max(1),
            dtype: Elements::F32,
            wire,
            collective: Operation::AllReduce,
            reduce,
        };
    }
    let others = [Elements::F64, Elements::F16, Elements::Bf16, Elements::I32, Elements::I64];
    Tensor {
        elements,
        dtype: if random.chance(60) { Elements::F32 } else { *random.pick(&others) },
        wire: *random.pick(&[Wire::Fp32, Wire::Fp32, Wire::Fp16, Wire::Bf16]),
        collective: match random.below(10) {
            0 => Operation::ReduceScatter,
            1 => Operation::AllGather,
            2 => Operation::Broadcast,
            _ => Operation::AllReduce,
        },
        reduce: *random.pick(&[Reduce::Sum, Reduce::Sum, Reduce::Mean, Reduce::Mean, Reduce::Min, Reduce::Max]),
    }
}

fn fault(random: &mut Random, plan: &Plan, repairable: bool) -> Fault {
    let aggregators = u64::from(plan.places() - plan.ranks);
    let rank = if aggregators > 0 && random.chance(50) {
        u64::from(plan.ranks) + random.below(aggregators)
    } else {
        random.below(u64::from(plan.places()))
    } as u32;
    let all_us = plan.deadline_ms * 1000;
    // Most are short against a deadline, some are longer than it.
    let long = !repairable && random.chance(20);
    let for_us = random.spread(1_000, if long { all_us * 2 } else { all_us / 16 });
    let kinds = match (repairable, plan.is_elastic()) {
        (true, _) => 14,
        (false, false) => 24,
        (false, true) => 30,
    };
    match random.below(kinds) {
        0..6 => Fault::Link(link(random, plan, for_us, repairable)),
        6 => Fault::Cut { for_us, side: random.below(1 << plan.ranks.min(63)), one_way: random.chance(50) },
        7 => Fault::Slow { rank, for_us, by_us: random.spread(1, 2_000) },
        8 | 9 => Fault::Stop { rank, for_us },
        10 => Fault::BrokerLink { rank },
        11 => Fault::BrokerSlow { for_us, by_us: random.spread(10, 20_000) },
        12 => Fault::BrokerTwice { for_us, odds: random.within(50, 500) as u32 },
        13 => Fault::BrokerDown { for_us, restart: !repairable && random.chance(60) },
        14 if plan.ranks > 1 => {
            let a = random.below(u64::from(plan.ranks)) as u32;
            let b = (a + 1 + random.below(u64::from(plan.ranks) - 1) as u32) % plan.ranks;
            Fault::Break { a, b }
        }
        15 => Fault::BrokerDown { for_us, restart: true },
        16 | 17 => Fault::Replace { rank },
        24 => Fault::Leave { rank },
        25 | 26 => Fault::Join { rank },
        // Long enough that the others go on without it.
        27 => Fault::Stop { rank, for_us: random.within(2_600_000, 8_000_000) },
        // As likely shorter than the others wait as longer than that.
        28 => Fault::Hang { rank, for_us: random.within(all_us / 2, all_us * 5 / 4) },
        _ => Fault::Crash {
            rank,
            back_us: random.chance(60).then(|| random.spread(100, 400_000)),
            disk: random.chance(50),
            silent: random.chance(25),
        },
    }
}

fn link(random: &mut Random, plan: &Plan, for_us: u64, repairable: bool) -> LinkFault {
    let one = |random: &mut Random| random.chance(40).then(|| random.below(u64::from(plan.ranks)) as u32);
    let (from, to) = (one(random), one(random));
    let odds = |random: &mut Random, percent: u64, most: u64| -> u32 {
        if random.chance(percent) { (most / 20 + random.below(most * 19 / 20)) as u32 } else { 0 }
    };
    let wild = if repairable { 0 } else { 12 };
    LinkFault {
        for_us,
        from,
        to,
        lose: odds(random, 35, 400),
        repeat: odds(random, 35, 900),
        late: odds(random, 45, 1000),
        late_us: random.spread(10, 50_000),
        corrupt: odds(random, 35, 250),
        truncate: odds(random, 20, 50),
        reorder: odds(random, 35, 900),
        repeat_messages: odds(random, 25, 300),
        lose_messages: odds(random, wild, 200),
        corrupt_headers: odds(random, wild, 100),
        delay_us: if random.chance(30) { random.spread(1, 5_000) } else { 0 },
    }
}
