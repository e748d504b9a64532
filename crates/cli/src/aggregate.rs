//! `gradwire aggregate`: an aggregator of a federated job, in the foreground.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gradwire::federated::{Aggregator, AggregatorConfig, AggregatorCounters, Expected, LatePolicy};
use gradwire_proto::{Fault, FaultKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::{Late, bytes, seconds};
use crate::bench::output::complain;
use crate::job::JobArgs;

/// How often it is looked at whether to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Run an aggregator of a federated job in the foreground.
///
/// It adds up what contributors send to the job's topics on the broker, and publishes the results there. Start as many
/// as you like, when you like: they share the work, and one that is gone is replaced by the others.
///
/// Ends on SIGTERM or SIGINT, and says what it did as JSON on standard output.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Example:
  gradwire secret --file job.secret
  gradwire aggregate --job hospitals --broker pulsar://broker.example:6650 --secret-file job.secret

What is not given is taken from the environment: GRADWIRE_JOB, GRADWIRE_BROKER, GRADWIRE_BROKER_TOKEN or
GRADWIRE_BROKER_TOKEN_FILE, GRADWIRE_BROKER_CA, GRADWIRE_SECRET or GRADWIRE_SECRET_FILE, GRADWIRE_INSTANCE,
GRADWIRE_TENANT, GRADWIRE_MODEL_VERSION.")]
pub(crate) struct AggregateArgs {
    #[command(flatten)]
    job: JobArgs,
    /// How many contributors there should be; as the job says if not given.
    #[arg(long, value_name = "COUNT")]
    contributors: Option<u32>,
    /// How many contributions a round should need; as the job says if not given.
    #[arg(long, value_name = "COUNT")]
    quorum: Option<u32>,
    /// What should happen to late contributions; as the job says if not given.
    #[arg(long, value_enum)]
    late: Option<Late>,
    /// How long a round waits after its first contribution, before a quorum is enough.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    round_deadline: Duration,
    /// Largest messages that results are cut into.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "256KiB")]
    piece_bytes: usize,
    /// Most memory for contributions: one shard of all contributors has to fit.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "1GiB")]
    memory: usize,
}

/// Runs the command.
pub(crate) fn run(args: &AggregateArgs) -> ExitCode {
    match aggregate(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            complain(&fault);
            ExitCode::FAILURE
        }
    }
}

fn aggregate(args: &AggregateArgs) -> Result<(), Fault> {
    let system = |error: io::Error| Fault::new(FaultKind::System, format!("cannot watch signals: {error}"));
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(system)?;
    }
    let config = args.config()?;
    let (job, url) = (config.job.job.clone(), config.job.broker.url.clone());
    let aggregator = Aggregator::start(config)?;
    eprintln!("gradwire: an aggregator of job '{job}' at {url}: it works once a contributor has opened the job");
    let mut told = None;
    let ended = loop {
        if let Some(ended) = aggregator.wait(LOOK) {
            break ended;
        }
        if stop.load(Ordering::Relaxed) {
            break Ok(());
        }
        // Why there is no link, while there is none, the log says.
        if aggregator.number() != told
            && let Some(number) = aggregator.number()
        {
            eprintln!("gradwire: aggregator {number} of job '{job}' works at {url}");
            told = Some(number);
        }
    };
    let counters = aggregator.counters();
    let stopped = aggregator.stop();
    report(&counters)?;
    ended.and(stopped)
}

fn report(counters: &AggregatorCounters) -> Result<(), Fault> {
    let AggregatorCounters { updates, duplicates, late, handed_back, rejected, results, rounds, links_lost, .. } =
        *counters;
    let line = serde_json::json!({
        "updates": updates,
        "duplicates": duplicates,
        "late": late,
        "handed_back": handed_back,
        "rejected": rejected,
        "results": results,
        "rounds": rounds,
        "links_lost": links_lost,
    });
    writeln!(io::stdout(), "{line}")
        .map_err(|error| Fault::new(FaultKind::System, format!("standard output takes nothing: {error}")))
}

impl AggregateArgs {
    fn config(&self) -> Result<AggregatorConfig, Fault> {
        let late = self.late.map(|late| match late {
            Late::Reject => LatePolicy::Reject,
            Late::Carry => LatePolicy::Carry,
        });
        Ok(AggregatorConfig {
            round_deadline: self.round_deadline,
            expected: Expected { contributors: self.contributors, quorum: self.quorum, late },
            piece_bytes: self.piece_bytes,
            memory_bytes_max: self.memory,
            ..AggregatorConfig::new(self.job.config()?)
        })
    }
}
