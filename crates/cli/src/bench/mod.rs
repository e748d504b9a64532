//! `gradwire bench`: how long a collective takes on this machine, with every result checked.
//!
//! Also holds what the commands that start their own ranks share: starting them and hearing from them ([`ranks`]),
//! figures ([`timing`]) and output ([`output`]).

pub(crate) mod output;
mod pattern;
mod rank;
pub(crate) mod ranks;
mod report;
mod sizes;
pub(crate) mod timing;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::mpsc;

use clap::{Args, Subcommand};
use gradwire_proto::{Fault, FaultKind};

use crate::args::{BrokerChoice, Transport, Wire};
use crate::launch::{self, LaunchPlan};
use output::{JsonTarget, complain};
pub(crate) use rank::BenchRankArgs;
use report::Report;
use sizes::TensorBytes;

/// More ranks than this on one machine measure nothing; and sums of the pattern stay finite in fp16 up to here.
const RANKS_MAX: i64 = 64;

/// Measures collectives between ranks that it starts itself, and checks every result.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Sum of f32 tensors over all ranks.
    Allreduce(AllreduceArgs),
}

#[derive(Debug, Args)]
struct AllreduceArgs {
    /// Rank processes to measure between.
    #[arg(short = 'n', long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    ranks: u32,
    /// Sizes of the tensor: bytes, or with a unit KiB, MiB or GiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    bytes: Vec<TensorBytes>,
    /// How ranks reach each other.
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,
    /// How values travel.
    #[arg(long, value_enum, default_value_t = Wire::Fp32)]
    wire: Wire,
    /// Control plane: 'embedded', or the URL of a Pulsar broker.
    #[arg(long, default_value = "embedded")]
    broker: BrokerChoice,
    /// Measured iterations of each size [default: 1 GiB in all, but 10 to 1000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=rank::ITERATIONS_MAX))]
    iters: Option<u32>,
    /// Iterations of each size before the measured ones [default: a tenth of those]
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=rank::ITERATIONS_MAX))]
    warmup: Option<u32>,
    /// Reduce in place, instead of from one buffer into another.
    #[arg(long)]
    in_place: bool,
    /// End each iteration with a commit, as trainers do, and time that too.
    #[arg(long)]
    commit: bool,
    /// Write one line of JSON per size to this file, or as the only thing on standard output.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<JsonTarget>,
}

/// Runs a benchmark. Fails when a rank fails, and when a result is wrong.
pub(crate) fn run(args: BenchArgs) -> ExitCode {
    let Operation::Allreduce(args) = args.operation;
    measure(&args).unwrap_or_else(ranks::Failure::exit_code)
}

/// One rank of a benchmark: the hidden subcommand that [`run`] starts.
pub(crate) fn run_rank(args: BenchRankArgs) -> ExitCode {
    ranks::exit_code(rank::run(&args))
}

fn measure(args: &AllreduceArgs) -> Result<ExitCode, ranks::Failure> {
    if let Some(target) = &args.json {
        target.check()?;
    }
    let mut plan = LaunchPlan::local(args.ranks, launch_command(args)?);
    plan.broker = args.broker.clone();
    let (events, received) = mpsc::channel();
    // The receiver outlives the run; a failed send could only mean that nobody wants the result.
    ranks::run(plan, move |rank, event: rank::Event, _| {
        let _ = events.send((rank, event));
    })?;

    let report = Report::new(args, received.try_iter().collect())?;
    if args.json != Some(JsonTarget::Stdout) {
        report.print_table()?;
    }
    if let Some(target) = &args.json {
        target.write(&report.json_lines()?)?;
    }
    let problems = report.problems();
    problems.iter().for_each(|problem| complain(problem));
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn launch_command(args: &AllreduceArgs) -> Result<Vec<OsString>, Fault> {
    let sizes = args.bytes.iter().map(|size| size.bytes().to_string()).collect::<Vec<_>>().join(",");
    let mut options = vec![
        "__bench-rank".to_owned(),
        format!("--bytes={sizes}"),
        format!("--transport={}", args.transport),
        format!("--wire={}", args.wire),
    ];
    options.extend(args.iters.map(|iterations| format!("--iters={iterations}")));
    options.extend(args.warmup.map(|iterations| format!("--warmup={iterations}")));
    options.extend(args.in_place.then(|| "--in-place".to_owned()));
    options.extend(args.commit.then(|| "--commit".to_owned()));
    launch::own_command(options)
        .map_err(|error| Fault::new(FaultKind::System, format!("this program's own path is unknown: {error}")))
}
