//! A job's name and what all of its ranks share: topics, secret, broker.

use std::fmt;
use std::str::FromStr;

use gradwire_proto::{Fault, FaultKind, Secret};

use crate::access::BrokerAccess;
use crate::record::{Instance, RecordKey};

/// Longest job name.
const JOB_NAME_BYTES_MAX: usize = 64;

/// The name of a job: lower-case letters, digits and hyphens, at most 64. Its topics are named after it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobName(String);

impl JobName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] that says which names are allowed.
    pub fn new(name: impl Into<String>) -> Result<Self, Fault> {
        let name = name.into();
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        // Pulsar takes "-partition-" in a topic name for a part of a partitioned topic.
        let valid = (1..=JOB_NAME_BYTES_MAX).contains(&name.len())
            && name.bytes().all(allowed)
            && !name.contains("-partition-");
        if valid {
            return Ok(Self(name));
        }
        let detail = format!(
            "'{}' is not a name for a job or a model version: use 1 to {JOB_NAME_BYTES_MAX} lower-case letters, digits \
             and hyphens, without '-partition-'",
            name.escape_debug()
        );
        Err(Fault::new(FaultKind::InvalidArgument, detail))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for JobName {
    type Err = Fault;

    fn from_str(name: &str) -> Result<Self, Fault> {
        Self::new(name)
    }
}

/// The version of a model: lower-case letters, digits and hyphens, at most 64.
pub type ModelVersion = JobName;

/// What all ranks of a job share.
#[derive(Clone, Debug)]
pub struct JobConfig {
    /// The job's name.
    pub job: JobName,
    /// The version of the model that it trains. Jobs of different versions have different namespaces, and cannot read
    /// each other's records.
    pub model_version: Option<ModelVersion>,
    /// Pulsar tenant of its topics.
    pub tenant: String,
    /// This launch of the job: different for every launch, the same on all its ranks.
    pub instance: Instance,
    /// The job's secret.
    pub secret: Secret,
    /// The broker.
    pub broker: BrokerAccess,
}

impl JobConfig {
    /// A job in `public/default`.
    #[must_use]
    pub fn new(job: JobName, instance: Instance, secret: Secret, broker: BrokerAccess) -> Self {
        Self { job, model_version: None, tenant: "public".to_owned(), instance, secret, broker }
    }

    /// The Pulsar namespace of its topics: `default`, or `<job>.<model version>`.
    #[must_use]
    pub fn namespace(&self) -> String {
        match &self.model_version {
            None => "default".to_owned(),
            // Neither part has a dot, so no two jobs share a namespace.
            Some(version) => format!("{}.{version}", self.job),
        }
    }

    /// The full name of one of its topics.
    #[must_use]
    pub fn topic(&self, topic: Topic) -> String {
        format!("persistent://{}/{}/{}-{}", self.tenant, self.namespace(), self.job, topic.suffix())
    }

    /// What records are bound to beside the secret, so that those of another version never verify.
    pub(crate) fn record_key(&self) -> RecordKey {
        match &self.model_version {
            None => RecordKey::new(self.secret.clone(), self.job.as_str()),
            Some(version) => RecordKey::new(self.secret.clone(), format!("{}.{version}", self.job)),
        }
    }
}

/// The topics of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// The control log: membership.
    Control,
    /// Snapshots of the membership, compacted.
    Snapshots,
    /// Version records, compacted.
    Versions,
    /// Requests for copies of shards. Key_Shared by shard.
    Retransmit,
    /// Copies of shards that could not travel over a data link.
    Copies,
    /// Contributions of the federated mode. Key_Shared by shard.
    Updates,
    /// The log of the federated mode's rounds.
    Rounds,
    /// Results of the federated mode.
    Results,
    /// The audit log.
    Audit,
}

impl Topic {
    /// All topics.
    pub const ALL: [Self; 9] = [
        Self::Control,
        Self::Snapshots,
        Self::Versions,
        Self::Retransmit,
        Self::Copies,
        Self::Updates,
        Self::Rounds,
        Self::Results,
        Self::Audit,
    ];

    /// What a topic's name ends with, after the job's name and a hyphen.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Snapshots => "snapshots",
            Self::Versions => "versions",
            Self::Retransmit => "retransmit",
            Self::Copies => "copies",
            Self::Updates => "updates",
            Self::Rounds => "rounds",
            Self::Results => "results",
            Self::Audit => "audit",
        }
    }
}

/// The token that ranks show to the embedded broker of their launcher: a proof of the job's secret, not the secret.
#[must_use]
pub fn broker_token(secret: &Secret) -> String {
    gradwire_proto::secret::hex(&secret.proof("gradwire broker token", &[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_break_topics_are_refused() {
        for good in ["a", "digits-4", "0", &"x".repeat(64)] {
            assert_eq!(JobName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "Job", "a b", "a/b", "a_b", "x-partition-1", &"x".repeat(65), "é"] {
            assert_eq!(JobName::new(bad).unwrap_err().kind, FaultKind::InvalidArgument, "{bad}");
        }
    }

    fn job(name: &str, version: Option<&str>) -> JobConfig {
        let broker = BrokerAccess::new("pulsar://x");
        let mut config = JobConfig::new(name.parse().unwrap(), [0; 16], Secret::from_bytes([1; 32]), broker);
        config.model_version = version.map(|version| version.parse().unwrap());
        config
    }

    #[test]
    fn topics_are_named_after_the_job_and_its_model_version() {
        let config = job("train", None);
        assert_eq!(config.topic(Topic::Control), "persistent://public/default/train-control");
        let config = job("train", Some("v7"));
        assert_eq!(config.topic(Topic::Versions), "persistent://public/train.v7/train-versions");
    }

    #[test]
    fn two_versions_of_a_model_never_meet() {
        let topics: std::collections::BTreeSet<String> =
            [job("a", Some("b-c")), job("a-b", Some("c")), job("a", None), job("a", Some("b"))]
                .iter()
                .flat_map(|config| Topic::ALL.map(|topic| config.topic(topic)))
                .collect();
        assert_eq!(topics.len(), 4 * Topic::ALL.len());
        let header = crate::record::Header {
            version: crate::record::RECORD_VERSION,
            kind: 1,
            instance: [0; 16],
            id: [1; 16],
            rank: gradwire_proto::Rank(0),
        };
        let record = job("a", Some("1")).record_key().seal(header, b"body");
        assert!(job("a", Some("1")).record_key().open(&record).unwrap().verified);
        assert!(!job("a", Some("2")).record_key().open(&record).unwrap().verified);
        assert!(!job("a", None).record_key().open(&record).unwrap().verified);
    }
}
