//! `gradwire demo`: a small network learns real handwritten digits, data-parallel over rank processes on this machine.
//!
//! The parent starts the ranks through the launcher, shows their progress, then trains the same job once more in its
//! own process with the same rank-ordered sums, and says whether the final weights are the same bits. Nothing here is
//! special to the demo: [`rank`] does what any trainer does. With [`disturb`] ranks die, stall and join in the middle.

mod data;
mod disturb;
mod event;
mod federated;
mod history;
mod learner;
mod model;
mod progress;
mod rank;
mod reference;
mod report;
mod story;
mod verify;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use gradwire_proto::{Fault, FaultKind};

use crate::args::{BrokerChoice, Mode, Transport, Wire};
use crate::bench::output::{JsonTarget, complain};
use crate::bench::ranks;
use crate::launch::{self, LaunchPlan};
use data::BATCH;
use disturb::Disturbances;
use event::Event;
pub(crate) use federated::DemoFederatedArgs;
use progress::Progress;
pub(crate) use rank::DemoRankArgs;
use reference::Task;
use report::{Found, Report};
use story::Story;

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
    #[command(flatten)]
    disturbances: Disturbances,
    /// Write the result as JSON to this file, or with '-' as the only thing on standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<JsonTarget>,
}

/// Runs the demo. Fails when a rank fails, when any two ranks or the reference end with different weights, and when
/// the network did not learn.
pub(crate) fn run(args: DemoArgs) -> ExitCode {
    demonstrate(&args).unwrap_or_else(ranks::Failure::exit_code)
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
    if args.mode == Mode::Federated && args.disturbances.any() {
        let detail = "--kill, --stall and --join: expected --mode allreduce, where ranks depend on each other";
        return Err(Fault::new(FaultKind::InvalidArgument, detail).into());
    }
    args.disturbances.check(args.ranks, args.steps)?;
    let report = evaluate(args, train(args)?)?;

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

/// Starts the ranks, and hears them to their end.
fn train(args: &DemoArgs) -> Result<Story, ranks::Failure> {
    let processes = match args.mode {
        Mode::Allreduce => args.ranks,
        Mode::Federated => args.ranks + args.aggregators,
    };
    let mut plan = LaunchPlan::local(processes, launch_command(args)?);
    plan.broker = args.broker.clone();
    if args.disturbances.any() {
        // One more that fails than are killed on purpose is a failure.
        plan.ranks_min = Some(args.ranks - args.disturbances.kills() as u32);
        plan.ranks_max = Some(args.ranks + args.disturbances.joins() as u32);
        // Who is stopped on purpose hangs for so long, and comes back.
        plan.patience += args.disturbances.longest_stall();
        if std::env::var_os("RUST_LOG").is_none() {
            // What ranks would warn of was asked for, and is told in a line of our own.
            plan.env.push(("RUST_LOG".into(), "error,pulsar=off".into()));
        }
    }
    let story = Arc::new(Mutex::new(Story::new(args.ranks)));
    let mut progress = Progress::new(args.steps);
    let finish = progress.finisher();
    let (heard, disturbances) = (Arc::clone(&story), args.disturbances.clone());
    let mut due = BTreeSet::new();
    let trained = ranks::run(plan, move |rank, event, starter| {
        let mut story = heard.lock().unwrap_or_else(PoisonError::into_inner);
        match &event {
            Event::Progress { step, loss } => progress.show(*step, *loss),
            // Any of the ranks may be the first to begin the step.
            Event::Due { step, at } if due.insert(*step) => {
                for _ in 0..disturbances.joins_in(*step) {
                    starter.start_one();
                    progress.tell(&story.started(*step, *at));
                }
            }
            Event::Stalled { step, pid, .. } => {
                let time = disturbances.stalls_in(rank, *step).unwrap_or_default();
                if let Err(fault) = disturb::stop_for(*pid, time) {
                    complain(&fault);
                }
            }
            _ => {}
        }
        story.take(rank, event).iter().for_each(|line| progress.tell(line));
    });
    finish();
    trained?;
    let mut story = story.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::replace(&mut story, Story::new(args.ranks)))
}

fn launch_command(args: &DemoArgs) -> Result<Vec<std::ffi::OsString>, Fault> {
    let of_mode = match args.mode {
        Mode::Allreduce => ["__demo-rank".to_owned(), format!("--transport={}", args.transport)],
        Mode::Federated => ["__demo-federated".to_owned(), format!("--ranks={}", args.ranks)],
    };
    let common = [format!("--steps={}", args.steps), format!("--wire={}", args.wire), format!("--seed={}", args.seed)];
    let options = of_mode.into_iter().chain(common).chain(args.disturbances.arguments());
    launch::own_command(options)
        .map_err(|error| Fault::new(FaultKind::System, format!("this program's own path is unknown: {error}")))
}

/// Trains once more in this process, with the contributors that the ranks recorded, and compares.
fn evaluate(args: &DemoArgs, mut story: Story) -> Result<Report, ranks::Failure> {
    let missing = verify::missing(&story, args.ranks);
    let measured = story.measured.take();
    let (Some((_, weights_sha256, history)), Some(measured), []) =
        (verify::finished(&story).first().copied(), measured, &missing[..])
    else {
        let heard = missing.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let detail = format!("not every one of the {} ranks reported its result (missing: rank {heard})", args.ranks);
        return Err(Fault::new(FaultKind::ProtocolViolation, detail).into());
    };
    let task = Task { ranks: args.ranks, steps: args.steps, wire: args.wire.into(), seed: args.seed };
    let reference = reference::train(&task, history)?;
    Ok(Report::new(Found {
        ranks: args.ranks,
        steps: args.steps,
        wire: args.wire,
        measured,
        weights_sha256: weights_sha256.to_owned(),
        reference_sha256: reference.model.sha256(),
        history,
        story: &story,
        // All but one rank send to an owner, and get the mean back; or all send to aggregators, and get it back.
        dense_copies: match args.mode {
            Mode::Allreduce => |ranks| 2 * (ranks - 1),
            Mode::Federated => |ranks| 2 * ranks,
        },
        differences: verify::problems(&story, &reference),
        absences: verify::not_joined(&story),
    }))
}
