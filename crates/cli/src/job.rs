//! Which job a command is about, and how to reach its broker: flags that several commands share.

use std::path::PathBuf;

use gradwire_control::{JobConfig, JobName, ModelVersion};
use gradwire_proto::{Fault, FaultKind};

use crate::args::BrokerChoice;

/// The job, its broker and its secret. What is not given is taken from the environment of ranks.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// Name of the job.
    #[arg(long, env = "GRADWIRE_JOB", value_name = "NAME", value_parser = parse_name)]
    job: JobName,
    /// Version of the model that it trains, if it has one.
    #[arg(long, env = "GRADWIRE_MODEL_VERSION", value_name = "VERSION", value_parser = parse_name)]
    model_version: Option<ModelVersion>,
    /// Pulsar tenant of its topics.
    #[arg(long, env = "GRADWIRE_TENANT", default_value = "public")]
    tenant: String,
    /// URL of the broker.
    #[arg(long, env = "GRADWIRE_BROKER", value_name = "URL")]
    broker: BrokerChoice,
    /// File with what to show to the broker; GRADWIRE_BROKER_TOKEN if not given.
    #[arg(long, value_name = "FILE")]
    broker_token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust, for a broker with TLS.
    #[arg(long, env = "GRADWIRE_BROKER_CA", value_name = "FILE")]
    broker_ca: Option<PathBuf>,
    /// File with the job's secret; GRADWIRE_SECRET or GRADWIRE_SECRET_FILE if not given.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

impl JobArgs {
    /// The job that the flags and the environment name.
    ///
    /// # Errors
    /// A [`Fault`] that names the flag or variable that is wrong or missing.
    pub(crate) fn config(&self) -> Result<JobConfig, Fault> {
        let BrokerChoice::Url(url) = &self.broker else {
            let detail = "--broker embedded: that broker ends with its job; name one that runs, by its URL";
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        };
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        // A file that is given counts, whatever the environment says.
        let variables = |name: &str| match name {
            "GRADWIRE_JOB" => Some(self.job.to_string()),
            "GRADWIRE_MODEL_VERSION" => self.model_version.as_ref().map(ToString::to_string),
            "GRADWIRE_TENANT" => Some(self.tenant.clone()),
            "GRADWIRE_BROKER" => Some(url.clone()),
            "GRADWIRE_BROKER_CA" => path(&self.broker_ca),
            "GRADWIRE_BROKER_TOKEN" if self.broker_token_file.is_some() => None,
            "GRADWIRE_BROKER_TOKEN_FILE" => path(&self.broker_token_file).or_else(|| variable(name)),
            "GRADWIRE_SECRET" if self.secret_file.is_some() => None,
            "GRADWIRE_SECRET_FILE" => path(&self.secret_file).or_else(|| variable(name)),
            _ => variable(name),
        };
        gradwire::env::job(&variables).map_err(|mut fault| {
            if fault.kind == FaultKind::SecretMissing {
                fault.detail.push_str(", or give --secret-file");
            }
            fault
        })
    }
}

/// A variable of the environment; empty ones count as not set.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn parse_name(text: &str) -> Result<JobName, String> {
    JobName::new(text).map_err(|fault| fault.detail)
}
