//! The demo over a broker alone: what a trainer does as a contributor of a federated job, and the aggregators beside it.
//!
//! The processes are started alike. Those whose rank is beyond the contributors are aggregators, until the last round is
//! complete.

use std::time::{Duration, Instant};

use gradwire::federated::{Aggregator, AggregatorConfig, Contributor, ContributorConfig, job_from_env};
use gradwire::{Fault, FaultKind, Rank};

use super::data::{Samples, Split, gradient_scale};
use super::event::{Event, Measured, Moment};
use super::history::History;
use super::model::{ELEMENTS, Model, Momentum, PARAMETERS};
use super::rank::is_report_due;
use crate::args::Wire;
use crate::bench::{ranks, timing};

/// How long one round may take.
const ROUND_MAX: Duration = Duration::from_secs(120);
/// How often an aggregator looks whether the last round is complete.
const LOOK: Duration = Duration::from_millis(20);

/// What the parent asks of a process.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoFederatedArgs {
    #[arg(long)]
    ranks: u32,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    #[arg(long, value_enum)]
    wire: Wire,
    #[arg(long)]
    seed: u64,
}

/// Trains, or aggregates, by the rank that the environment names.
///
/// # Errors
/// Any [`Fault`] of gradwire; and one of kind `InvalidArgument` when training diverges.
pub(super) fn run(args: &DemoFederatedArgs) -> Result<(), Fault> {
    let seat = gradwire::env::seat(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))?;
    if seat.rank.0 < args.ranks { contribute(args, seat.rank) } else { aggregate(args) }
}

fn aggregate(args: &DemoFederatedArgs) -> Result<(), Fault> {
    let aggregator = Aggregator::start(AggregatorConfig::new(job_from_env()?))?;
    while aggregator.complete_round() < u64::from(args.steps) {
        if let Some(ended) = aggregator.wait(LOOK) {
            return ended;
        }
    }
    aggregator.stop()
}

fn contribute(args: &DemoFederatedArgs, rank: Rank) -> Result<(), Fault> {
    let split = Split::load()?;
    let mut config = ContributorConfig::new(job_from_env()?, rank, args.ranks, ELEMENTS as u64);
    (config.wire, config.deadline) = (args.wire.into(), ROUND_MAX);
    let mut contributor = Contributor::join(config)?;
    let mut model = Model::seeded(args.seed);
    let mut optimizer = Momentum::new();
    let mut samples = Samples::new(rank.0, args.ranks, args.seed);
    ranks::emit(&Event::Began { at: Moment::now() })?;
    let mut step_ns = Vec::with_capacity(args.steps as usize);
    for step in 1..=args.steps {
        let started = Instant::now();
        let part = split.train.select(samples.next());
        let mut gradient = vec![0.0; ELEMENTS];
        let loss = model.backward(&part, gradient_scale(args.ranks), |index, values| {
            gradient[place(index)].iter_mut().zip(values).for_each(|(into, value)| *into = *value);
            Ok::<(), Fault>(())
        })?;
        let result = contributor.exchange(u64::from(step), &gradient, ROUND_MAX)?;
        if result.found_nonfinite {
            let detail = format!("gradients became infinite or NaN in step {step}: try another --seed or --wire fp32");
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        for index in 0..PARAMETERS.len() {
            optimizer.update(&mut model, index, result.values[place(index)].iter().copied());
        }
        step_ns.push(timing::elapsed_ns(started));
        if rank == Rank(0) && is_report_due(step, args.steps) {
            ranks::emit(&Event::Progress { step, loss })?;
        }
    }
    step_ns.sort_unstable();
    let (sent, read) = contributor.bytes();
    let measured = Measured {
        transport: "broker".to_owned(),
        epoch: 1,
        accuracy: model.accuracy(&split.test),
        wire_bytes: sent + read,
        step_ms_p50: timing::percentile_ms(&step_ns, 50),
        step_ms_p99: timing::percentile_ms(&step_ns, 99),
    };
    let history = History::constant(args.ranks);
    ranks::emit(&Event::Finished { weights_sha256: model.sha256(), history, measured: Some(measured) })
}

/// Where a parameter lies in the vector of all.
fn place(index: usize) -> std::ops::Range<usize> {
    let start = PARAMETERS[..index].iter().map(super::model::Parameter::elements).sum();
    start..start + PARAMETERS[index].elements()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_one_after_the_other() {
        assert_eq!(place(0).start, 0);
        assert!((1..PARAMETERS.len()).all(|index| place(index).start == place(index - 1).end));
        assert_eq!(place(PARAMETERS.len() - 1).end, ELEMENTS);
    }
}
