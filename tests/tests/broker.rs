//! A broker that is killed in the middle of training and comes back: training goes on, and every commit is on record.
//!
//! It runs against `gradwire broker --data-dir`, or, where `ci/pulsar/standalone` starts it, against that Apache Pulsar.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use gradwire_control::{BrokerAccess, JobConfig, VersionQuery, read_versions};
use gradwire_proto::Secret;
use gradwire_tests::broker::DurableBroker;
use gradwire_tests::{PATIENCE, Plan, random};

const RANKS: u32 = 3;

/// A broker that can be killed and started again, at the same URL and with the same data.
enum Broker {
    Embedded(DurableBroker),
    Apache { program: String, data: String, url: String },
}

impl Broker {
    fn start() -> Self {
        let given = |name: &str| std::env::var(name).ok();
        if let (Some(program), Some(data), Some(url)) =
            (given("PULSAR_STANDALONE"), given("PULSAR_DATA"), given("PULSAR_URL"))
        {
            return Self::Apache { program, data, url };
        }
        Self::Embedded(DurableBroker::start())
    }

    fn url(&self) -> String {
        match self {
            Self::Embedded(broker) => broker.url().to_owned(),
            Self::Apache { url, .. } => url.clone(),
        }
    }

    fn kill(&mut self) {
        match self {
            Self::Embedded(broker) => broker.kill(),
            Self::Apache { program, data, .. } => ask(program, "kill", data),
        }
    }

    fn again(&mut self) {
        match self {
            Self::Embedded(broker) => broker.again(),
            Self::Apache { program, data, .. } => ask(program, "start", data),
        }
    }
}

fn ask(program: &str, what: &str, data: &str) {
    let status = Command::new(program).args([what, data]).status().expect("it runs");
    assert!(status.success(), "Apache Pulsar cannot be asked to {what}: see above");
}

#[test]
fn a_broker_killed_in_the_middle_of_training_loses_no_commit() {
    let mut broker = Broker::start();
    let name = format!("kill-{}", u64::from_le_bytes(random()));
    let secret: [u8; 32] = random();
    let mut plan = Plan::new(RANKS, "tcp")
        .with("GRADWIRE_JOB", &name)
        .with("GRADWIRE_SECRET", Secret::from_bytes(secret).to_hex())
        .with("GRADWIRE_BROKER", broker.url())
        .with("GRADWIRE_COMMIT_INTERVAL_MS", 0);
    plan.variables.remove("GRADWIRE_BROKER_TOKEN");
    let folder = tempfile::tempdir().expect("a directory");
    let stop = folder.path().join("stop");
    let mut job = plan.start(&["commits", &stop.display().to_string()]);
    job.wait_for_line(0, "step 200");
    broker.kill();
    let away = Instant::now();
    // Steps go on while nobody records them.
    job.wait_for_line(0, "step 500");
    job.wait_for_line(2, "step 500");
    assert!(away.elapsed() < PATIENCE);
    broker.again();
    let config = JobConfig::new(
        name.parse().expect("a name"),
        [0; 16],
        Secret::from_bytes(secret),
        BrokerAccess::new(broker.url()),
    );
    let try_read = || read_versions(&config, &VersionQuery::default(), Duration::from_secs(60));
    let read = || try_read().expect("versions").records;
    // What waited is recorded once the broker is back, however long that takes. One that listens may still lack its storage.
    let back = Instant::now();
    loop {
        let found = try_read();
        let has = |owner| {
            let mut records = found.iter().flat_map(|found| &found.records);
            records.any(|record| record.owner.0 == owner && record.step.0 > 500)
        };
        if (0..RANKS).all(has) {
            break;
        }
        assert!(back.elapsed() < PATIENCE, "nothing is recorded although the broker is back: {:?}", found.err());
        std::thread::sleep(Duration::from_millis(100));
    }
    std::fs::write(&stop, "").expect("a file");
    let verdicts: Vec<String> = job.wait().iter().map(|rank| rank.verdict().to_owned()).collect();
    let last = verdicts[0].strip_prefix("ok ").and_then(|said| said.strip_suffix(" steps"));
    let last: u64 = last.and_then(|steps| steps.parse().ok()).unwrap_or_else(|| panic!("{verdicts:?}"));
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
    let records = read();
    let mut steps: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for record in records {
        steps.entry(record.owner.0).or_default().push(record.step.0);
    }
    for owner in 0..RANKS {
        let expected: Vec<u64> = (0..last).collect();
        assert!(steps.get(&owner) == Some(&expected), "rank {owner} lacks, repeats or misorders commits: {steps:?}");
    }
}
