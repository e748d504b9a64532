//! Prints how long joining takes with 4 ranks, and how long a version record takes to its receipt.
//!
//! `cargo run --release -p gradwire-control --example control_latency [pulsar://host:port]`

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gradwire_control::{
    BrokerAccess, BrokerConfig, ControlPlane, EmbeddedBroker, JobConfig, JoinRequest, Policy, VersionRecord,
};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Epoch, Fault, Rank, Secret, Step, UnitIndex};

const RANKS: u32 = 4;
const JOINS: u8 = 20;
const RECORDS: u64 = 1000;

fn main() -> Result<(), Fault> {
    let embedded = EmbeddedBroker::start(BrokerConfig::new(([127, 0, 0, 1], 0).into()))?;
    let url = std::env::args().nth(1).unwrap_or_else(|| embedded.url().to_owned());
    let mut joins = Vec::new();
    let mut receipts = Vec::new();
    for round in 0..JOINS {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let job = format!("latency-{}", now.as_nanos()).parse()?;
        let config = JobConfig::new(job, [round; 16], Secret::from_bytes([1; 32]), BrokerAccess::new(&url));
        let started = Instant::now();
        let planes = join(&config)?;
        joins.push(started.elapsed());
        if round + 1 == JOINS {
            for step in 0..RECORDS {
                receipts.push(publish(&planes[0], step)?);
            }
        }
        for plane in planes {
            plane.leave(Duration::from_secs(5), Duration::from_secs(5))?;
        }
    }
    print("joining with 4 ranks", joins);
    print("version record to receipt", receipts);
    Ok(())
}

fn join(config: &JobConfig) -> Result<Vec<ControlPlane>, Fault> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS)
            .map(|rank| {
                let request = JoinRequest {
                    config: config.clone(),
                    rank: Rank(rank),
                    world_size: RANKS,
                    policy: Policy::Fixed,
                    endpoint: Endpoint::default(),
                    deadline: Duration::from_secs(30),
                    commit_interval: Duration::ZERO,
                };
                scope.spawn(move || ControlPlane::join(request).map(|(plane, _)| plane))
            })
            .collect();
        let gone = |_| Err(Fault::new(gradwire_proto::FaultKind::System, "a rank panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(gone)).collect()
    })
}

fn publish(plane: &ControlPlane, step: u64) -> Result<Duration, Fault> {
    let crcs = (0..120).map(|unit| (UnitIndex(unit), unit)).collect();
    let contributors = (0..RANKS).map(Rank).collect();
    let record = VersionRecord { epoch: Epoch(1), step: Step(step), owner: Rank(0), contributors, crcs };
    let started = Instant::now();
    plane.publish_version(record)?;
    plane.flush(Duration::from_secs(5))?;
    Ok(started.elapsed())
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    println!("{what}: median {:?}, p99 {:?}, worst {:?} of {}", at(0.5), at(0.99), at(1.0), times.len());
}
