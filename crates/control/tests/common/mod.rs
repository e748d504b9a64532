//! The broker that tests run against: the embedded one, or the Apache Pulsar that GRADWIRE_TEST_PULSAR_URL names.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gradwire_control::{
    BrokerAccess, BrokerConfig, ControlPlane, EmbeddedBroker, JobConfig, JoinRequest, Policy, View,
};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, Rank, Secret};

/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A broker for one test.
pub struct TestBroker {
    url: String,
    _embedded: Option<EmbeddedBroker>,
}

impl TestBroker {
    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// The broker to test against.
pub fn test_broker() -> TestBroker {
    match std::env::var("GRADWIRE_TEST_PULSAR_URL") {
        Ok(url) => TestBroker { url, _embedded: None },
        Err(_) => {
            let embedded = embedded_broker();
            TestBroker { url: embedded.url().to_owned(), _embedded: Some(embedded) }
        }
    }
}

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
