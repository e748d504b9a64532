//! What the control plane's tests share: brokers to test against, names, jobs and patience.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]

mod apache;
mod brokers;
pub mod client;

pub mod raw;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gradwire_control::{
    BrokerAccess, BrokerConfig, ControlPlane, EmbeddedBroker, JobConfig, JoinRequest, Policy, VersionQuery,
    VersionRecord, View, read_versions,
};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Epoch, Fault, Rank, Secret, Step, UnitIndex};

pub use brokers::{TestBroker, own_broker, own_broker_with_token, test_broker};

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// An embedded broker on a free port, for tests of what only it promises.
pub fn embedded_broker() -> EmbeddedBroker {
    EmbeddedBroker::start(local()).expect("a free port")
}

/// Any free port of this machine.
pub fn local() -> BrokerConfig {
    BrokerConfig::new("127.0.0.1:0".parse().expect("an address"))
}

/// A name that no other test uses, nor another run of it on a broker that keeps its topics.
pub fn unique(name: &str) -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
    format!("{name}-{}-{}-{}", std::process::id(), now.as_nanos(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// A launch of a job.
pub fn job(url: &str, name: &str, launch: u8) -> JobConfig {
    JobConfig::new(
        name.parse().expect("a job name"),
        [launch; 16],
        Secret::from_bytes([launch; 32]),
        BrokerAccess::new(url),
    )
}

/// A rank of it.
pub fn request(config: &JobConfig, rank: u32, world_size: u32) -> JoinRequest {
    JoinRequest {
        config: config.clone(),
        rank: Rank(rank),
        world_size,
        policy: Policy::Fixed,
        endpoint: Endpoint { hostname: format!("host-{rank}"), ..Default::default() },
        deadline: Duration::from_secs(20),
        commit_interval: Duration::ZERO,
    }
}

/// What joining gives.
pub type Joined = Result<(ControlPlane, View), Fault>;

/// Joins with all requests at the same time.
pub fn join_all(requests: Vec<JoinRequest>) -> Vec<Joined> {
    let threads: Vec<_> =
        requests.into_iter().map(|request| std::thread::spawn(move || ControlPlane::join(request))).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

/// The members, where all joined.
pub fn planes(joined: Vec<Joined>) -> Vec<ControlPlane> {
    joined.into_iter().map(|joined| joined.expect("a member").0).collect()
}

/// A version record.
pub fn version(owner: u32, step: u64, crcs: u32) -> VersionRecord {
    VersionRecord {
        epoch: Epoch(1),
        step: Step(step),
        owner: Rank(owner),
        contributors: vec![Rank(0), Rank(1)],
        crcs: (0..crcs).map(|unit| (UnitIndex(unit), unit.wrapping_mul(31))).collect(),
    }
}

/// Waits until `condition` gives something.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "{what} did not happen within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// All version records of a job.
pub fn all_versions(config: &JobConfig) -> Vec<VersionRecord> {
    read_versions(config, &VersionQuery::default(), PATIENCE).expect("versions").records
}
