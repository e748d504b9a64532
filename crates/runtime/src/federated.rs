//! The federated mode: ranks that share no network but the broker's, with aggregators that add up for them.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use gradwire::federated::{Contributor, ContributorConfig, job_from_env};
//! use gradwire::{Rank, WireFormat};
//!
//! let mut config = ContributorConfig::new(job_from_env()?, Rank(0), 10, 1_000_000);
//! config.quorum = 8;
//! config.wire = WireFormat::Fp16;
//! let mut contributor = Contributor::join(config)?;
//! for round in contributor.round()..=100 {
//!     let update = vec![0.5; 1_000_000];
//!     let result = contributor.exchange(round, &update, Duration::from_secs(600))?;
//!     assert_eq!(result.values.len(), 1_000_000);
//! }
//! # Ok::<(), gradwire::Fault>(())
//! ```
//!
//! Start aggregators with `gradwire aggregate`. See `docs/federated.md`.

pub use gradwire_control::federated::{
    Aggregator, AggregatorConfig, AggregatorCounters, Contributed, Contributor, ContributorConfig, Entry, Expected,
    LatePolicy, MEMORY_BYTES_DEFAULT, PIECE_BYTES_DEFAULT, RoundResult, federated_instance,
};
pub use gradwire_control::{BrokerAccess, JobConfig, JobName, ModelVersion, Token};

use crate::Fault;

/// The job that this process's environment names: `GRADWIRE_JOB`, `GRADWIRE_SECRET` or `GRADWIRE_SECRET_FILE`,
/// `GRADWIRE_BROKER` and the rest of [`crate::env`]'s variables. Empty ones count as not set.
///
/// # Errors
/// Those of [`crate::env::job`].
pub fn job_from_env() -> Result<JobConfig, Fault> {
    crate::env::job(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}
