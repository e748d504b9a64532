//! What the ranks of a job say of its steps, and what its broker has on record of them.

use std::collections::BTreeMap;
use std::time::Duration;

use gradwire_control::{BrokerAccess, JobConfig, VersionQuery, read_versions};
use gradwire_proto::Secret;

use crate::{Ended, Plan};

/// How long reading the records may take.
const READ_MAX: Duration = Duration::from_secs(60);

/// Of each step: who contributed, and what it came to.
pub type Steps = BTreeMap<usize, (String, String)>;

/// Asserts that these processes are through with so many steps, and that no process had another state after any of them.
///
/// # Panics
/// When that is not so.
pub fn assert_same(ended: &[Ended], through: &[usize], steps: usize) -> Steps {
    let mut all = BTreeMap::new();
    for (process, one) in ended.iter().enumerate() {
        for (step, made) in one.steps() {
            let known = all.entry(step).or_insert_with(|| made.clone());
            assert_eq!(*known, made, "process {process} has another step {step}: {ended:#?}");
        }
    }
    for process in through {
        assert_eq!(ended[*process].verdict(), format!("ok {steps} steps"), "process {process}: {ended:#?}");
    }
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), (0..steps).collect::<Vec<_>>(), "{ended:#?}");
    all
}

/// Asserts that what each rank has on record of its commits names the contributors that ranks said there were; and that
/// there is a record of every step by each of `through`. Every commit has a record of its own only where
/// `GRADWIRE_COMMIT_INTERVAL_MS` is 0.
///
/// # Panics
/// When that is not so.
pub fn assert_recorded(plan: &Plan, all: &Steps, through: &[u32]) {
    let records = read_versions(&job(plan), &VersionQuery::default(), READ_MAX).expect("version records").records;
    let mut recorded: BTreeMap<(u32, usize), String> = BTreeMap::new();
    for record in records {
        let contributors = record.contributors.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(",");
        let step = record.step.0 as usize;
        assert_eq!(Some(&contributors), all.get(&step).map(|(by, _)| by), "{} of step {step}", record.owner);
        let before = recorded.insert((record.owner.0, step), contributors);
        assert_eq!(before, None, "{} has step {step} on record twice", record.owner);
    }
    for owner in through {
        for step in all.keys() {
            assert!(recorded.contains_key(&(*owner, *step)), "rank {owner} has step {step} not on record");
        }
    }
}

/// Whose records they are.
fn job(plan: &Plan) -> JobConfig {
    let variable = |name: &str| plan.variables.get(name);
    let given = |name: &str| variable(name).unwrap_or_else(|| panic!("the plan has no {name}"));
    let mut broker = BrokerAccess::new(given("GRADWIRE_BROKER").clone());
    if let Some(token) = variable("GRADWIRE_BROKER_TOKEN") {
        broker = broker.with_token(token.clone().into());
    }
    let secret = Secret::from_hex(given("GRADWIRE_SECRET")).expect("a secret");
    JobConfig::new(given("GRADWIRE_JOB").parse().expect("a name"), [0; 16], secret, broker)
}
