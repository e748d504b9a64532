//! A job's name and what all of its ranks share: topics, secret, broker.

use std::fmt;
use std::str::FromStr;

use gradwire_proto::{Fault, FaultKind, Secret};

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
            "'{}' is not a job name: use 1 to {JOB_NAME_BYTES_MAX} lower-case letters, digits and hyphens, without \
             '-partition-'",
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

/// What all ranks of a job share.
#[derive(Clone, Debug)]
pub struct JobConfig {
    /// The job's name.
    pub job: JobName,
    /// Pulsar tenant of its topics.
    pub tenant: String,
    /// Pulsar namespace of its topics, within the tenant.
    pub namespace: String,
    /// This launch of the job: different for every launch, the same on all its ranks.
    pub instance: Instance,
    /// The job's secret.
    pub secret: Secret,
    /// The broker: `pulsar://host:port`, or `pulsar+ssl://host:port`.
    pub broker_url: String,
    /// What to show to the broker (authentication method `token`).
    pub broker_token: Option<String>,
}

impl JobConfig {
    /// A job in `public/default`, without a token for the broker.
    #[must_use]
    pub fn new(job: JobName, instance: Instance, secret: Secret, broker_url: impl Into<String>) -> Self {
        Self {
            job,
            tenant: "public".to_owned(),
            namespace: "default".to_owned(),
            instance,
            secret,
            broker_url: broker_url.into(),
            broker_token: None,
        }
    }

    /// The topic of the control log.
    #[must_use]
    pub fn control_topic(&self) -> String {
        self.topic("control")
    }

    /// The topic of the version records.
    #[must_use]
    pub fn versions_topic(&self) -> String {
        self.topic("versions")
    }

    pub(crate) fn record_key(&self) -> RecordKey {
        RecordKey::new(self.secret.clone(), self.job.as_str())
    }

    fn topic(&self, kind: &str) -> String {
        format!("persistent://{}/{}/{}-{kind}", self.tenant, self.namespace, self.job)
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

    #[test]
    fn topics_are_named_after_the_job() {
        let config = JobConfig::new("train".parse().unwrap(), [0; 16], Secret::from_bytes([1; 32]), "pulsar://x");
        assert_eq!(config.control_topic(), "persistent://public/default/train-control");
        assert_eq!(config.versions_topic(), "persistent://public/default/train-versions");
    }
}
