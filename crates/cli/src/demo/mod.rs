//! `gradwire demo`: a small network learns real handwritten digits, data-parallel over rank processes on this machine.
//!
//! The parent starts the ranks through the launcher, shows their progress, then trains the same job once more in its
//! own process with the same rank-ordered sums, and says whether the final weights are the same bits. Nothing here is
//! special to the demo: [`rank`] does what any trainer does.

mod data;
mod federated;
mod model;
mod progress;
mod rank;
mod reference;
mod report;

use std::process::ExitCode;
use std::sync::mpsc;

use gradwire_proto::{Fault, FaultKind};

use crate::args::{BrokerChoice, Mode, Transport, Wire};
use crate::bench::output::{JsonTarget, complain};
use crate::bench::ranks;
use crate::launch::{self, LaunchPlan};
use data::BATCH;
pub(crate) use federated::DemoFederatedArgs;
use progress::Progress;
pub(crate) use rank::DemoRankArgs;
use report::Report;

/// Lowest test accuracy that counts as trained. The default run reaches more than 95 %.
const ACCURACY_MIN: f64 = 0.90;

/// Trains a small network on handwritten digits with several ranks, and checks the result bit by bit.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Rank processes to train with: each computes its part of every batch of 64 images.
    #[arg(short = 'n', long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=BATCH as i64))]
    ranks: u32,
    /// Training steps: 22 are one pass over the images.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// How ranks meet.
    #[arg(long, value_enum, default_value_t = Mode::Allreduce)]
    mode: Mode,
    /// Aggregator processes of the federated mode, beside the ranks.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    aggregators: u32,
    /// How ranks reach each other in the mode allreduce.
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,
    /// How gradients travel.
    #[arg(long, value_enum, default_value_t = Wire::Fp32)]
    wire: Wire,
    /// Control plane: 'embedded', or the URL of a Pulsar broker.
    #[arg(long, env = "GRADWIRE_BROKER", default_value = "embedded")]
    broker: BrokerChoice,
    /// Decides the initial weights and the order of the images.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Write the result as JSON to this file, or with '-' as the only thing on standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonTarget>,
}

/// Runs the demo. Fails when a rank fails, when any two ranks or the reference end with different weights, and when
/// the network did not learn.
pub(crate) fn run(args: DemoArgs) -> ExitCode {
    match demonstrate(&args) {
        Ok(code) => code,
        Err(ranks::Failure::Ranks(code)) => code,
        Err(ranks::Failure::Fault(fault)) => {
            complain(&fault);
            ExitCode::FAILURE
        }
    }
}

/// One rank of the demo: the hidden subcommand that [`run`] starts.
pub(crate) fn run_rank(args: DemoRankArgs) -> ExitCode {
    ranks::exit_code(rank::run(&args))
}

/// One contributor or aggregator of the federated demo: the hidden subcommand that [`run`] starts.
pub(crate) fn run_federated(args: &DemoFederatedArgs) -> ExitCode {
    ranks::exit_code(federated::run(args))
}

fn demonstrate(args: &DemoArgs) -> Result<ExitCode, ranks::Failure> {
    if let Some(target) = &args.json {
        target.check()?;
    }
    let outcome = train(args)?;
    let reference = reference::train(args.ranks, args.steps, args.wire.into(), args.seed)?;
    let report = Report::new(args.wire, args.steps, outcome, reference.sha256());

    if args.json != Some(JsonTarget::Stdout) {
        report.print_table()?;
    }
    if let Some(target) = &args.json {
        target.write(&report.json_line()?)?;
    }
    let problems = report.problems(ACCURACY_MIN);
    problems.iter().for_each(|problem| complain(problem));
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the ranks found out together.
struct Outcome {
    measured: rank::Measured,
    /// By rank.
    weights_sha256: Vec<String>,
    /// How many times the gradients would travel in each step without savings.
    dense_copies: u64,
}

fn train(args: &DemoArgs) -> Result<Outcome, ranks::Failure> {
    let processes = match args.mode {
        Mode::Allreduce => args.ranks,
        Mode::Federated => args.ranks + args.aggregators,
    };
    let mut plan = LaunchPlan::local(processes, launch_command(args)?);
    plan.broker = args.broker.clone();
    let (results, received) = mpsc::channel();
    let mut progress = Progress::new(args.steps);
    let finish = progress.finisher();
    let trained = ranks::run(plan, move |rank, event| match event {
        rank::Event::Progress { step, loss } => progress.show(step, loss),
        // The receiver outlives the run; a failed send could only mean that nobody wants the result.
        rank::Event::Finished { weights_sha256, measured } => {
            let _ = results.send((rank, weights_sha256, measured));
        }
    });
    finish();
    trained?;
    gather(args, received.try_iter().collect())
}

fn launch_command(args: &DemoArgs) -> Result<Vec<std::ffi::OsString>, Fault> {
    let of_mode = match args.mode {
        Mode::Allreduce => ["__demo-rank".to_owned(), format!("--transport={}", args.transport)],
        Mode::Federated => ["__demo-federated".to_owned(), format!("--ranks={}", args.ranks)],
    };
    let common = [format!("--steps={}", args.steps), format!("--wire={}", args.wire), format!("--seed={}", args.seed)];
    let options = of_mode.into_iter().chain(common);
    launch::own_command(options)
        .map_err(|error| Fault::new(FaultKind::System, format!("this program's own path is unknown: {error}")))
}

/// One result per rank, in the order of ranks.
fn gather(args: &DemoArgs, mut results: Vec<(u32, String, Option<rank::Measured>)>) -> Result<Outcome, ranks::Failure> {
    let ranks = args.ranks;
    results.sort_by_key(|(rank, ..)| *rank);
    let complete = results.iter().map(|(rank, ..)| *rank).eq(0..ranks);
    let mut measured = results.iter_mut().filter_map(|(_, _, measured)| measured.take());
    let first = measured.next();
    // In the federated mode each rank measures its own part.
    let measured = first.map(|first| measured.fold(first, rank::Measured::and));
    // All but one rank send to an owner, and get the mean back; or all send to aggregators, and get it back.
    let dense_copies = match args.mode {
        Mode::Allreduce => 2 * (u64::from(ranks) - 1),
        Mode::Federated => 2 * u64::from(ranks),
    };
    match measured {
        Some(measured) if complete => {
            let weights_sha256 = results.into_iter().map(|(_, sha256, _)| sha256).collect();
            Ok(Outcome { measured, weights_sha256, dense_copies })
        }
        _ => {
            let heard = results.iter().map(|(rank, ..)| rank.to_string()).collect::<Vec<_>>().join(", ");
            let detail =
                format!("not every one of the {ranks} ranks reported its result exactly once (heard of: {heard})");
            Err(Fault::new(FaultKind::ProtocolViolation, detail).into())
        }
    }
}
