//! Which job a command is about, and how to reach its broker: flags that several commands share.

use std::path::PathBuf;

use gradwire_control::{JobConfig, JobName, ModelVersion, Token};
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
        let mut broker = gradwire::env::access(url.clone(), &variable)?;
        if let Some(path) = &self.broker_token_file {
            let token = Token::File(path.clone());
            token.read()?;
            broker.token = Some(token);
        }
        if let Some(path) = &self.broker_ca {
            broker.trust = Some(path.clone());
        }
        let from_flag = |name: &str| match (name, &self.secret_file) {
            ("GRADWIRE_SECRET", Some(_)) => None,
            ("GRADWIRE_SECRET_FILE", Some(path)) => Some(path.display().to_string()),
            _ => variable(name),
        };
        let secret = gradwire::env::secret(&from_flag)?.ok_or_else(|| {
            let detail = "the job's secret is missing, by which its records are checked: set GRADWIRE_SECRET, or give \
                          --secret-file (a launcher uses the one that it is given, else one that nobody else knows)";
            Fault::new(FaultKind::SecretMissing, detail)
        })?;
        // Reading takes no instance: it stands for this process alone.
        let mut instance = [0; 16];
        getrandom::fill(&mut instance)
            .map_err(|error| Fault::new(FaultKind::System, format!("the system gives no random bytes: {error}")))?;
        let mut config = JobConfig::new(self.job.clone(), instance, secret, broker);
        config.model_version.clone_from(&self.model_version);
        config.tenant.clone_from(&self.tenant);
        Ok(config)
    }
}

/// A variable of the environment; empty ones count as not set.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn parse_name(text: &str) -> Result<JobName, String> {
    JobName::new(text).map_err(|fault| fault.detail)
}
