//! `gradwire-sim`: simulates jobs under faults, many seeds or one plan.
#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use gradwire_sim::plan::Recovery;
use gradwire_sim::{Mutation, Outcome, Plan, Shape, Tally, shrink, simulate, simulate_twice};
use indicatif::{ProgressBar, ProgressStyle};

/// Most seeds that are told of one by one when they fail.
const FAILURES_SHOWN: usize = 3;
/// Most runs that making a plan small may take.
const SHRINK_RUNS: usize = 400;

/// Simulates gradwire jobs under faults, deterministically, and checks the invariants.
#[derive(Debug, Parser)]
#[command(
    name = "gradwire-sim",
    version,
    max_term_width = 110,
    after_help = "\
Examples:
  gradwire-sim --seeds 1000              a thousand seeds that nobody has tried yet
  gradwire-sim --seed 17 --trace         one seed, with all that happens in it
  gradwire-sim --seed 17 --print-plan    its plan, to change and to run again:
  gradwire-sim --plan plan.json
  gradwire-sim --seed 1 --ranks 1024 --calm --once"
)]
struct Cli {
    /// How many seeds to simulate.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed [default: 1 for one seed, otherwise one from the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// Ranks of every job, instead of what the seed says.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Only the federated mode, or never.
    #[arg(long)]
    federated: Option<bool>,
    /// What becomes of a step in which a rank is lost, instead of what the seed says.
    #[arg(long, value_enum)]
    recovery: Option<Recovery>,
    /// Without faults.
    #[arg(long)]
    calm: bool,
    /// Simulate this plan.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "seed", "ranks", "federated", "recovery", "calm"])]
    plan: Option<PathBuf>,
    /// Print the plan of one seed instead of running it.
    #[arg(long, conflicts_with = "seeds")]
    print_plan: bool,
    /// Print all that happens.
    #[arg(long)]
    trace: bool,
    /// Plant a bug, to see it found.
    #[arg(long, value_enum)]
    mutation: Option<Mutation>,
    /// Run a single seed or plan once, not twice.
    #[arg(long)]
    once: bool,
    /// Do not make failing plans small.
    #[arg(long)]
    no_shrink: bool,
}

impl Cli {
    fn shape(&self) -> Shape {
        Shape { ranks: self.ranks, federated: self.federated, recovery: self.recovery }
    }

    /// What makes this plan again, and what it fails with.
    fn again(&self, seed: u64) -> String {
        use std::fmt::Write as _;
        let mut line = format!("gradwire-sim --seed {seed}");
        let mut add = |name: &str, value: Option<String>| {
            // Writing to a string does not fail.
            let _ = value.map(|value| write!(line, " --{name} {value}"));
        };
        add("ranks", self.ranks.map(|ranks| ranks.to_string()));
        add("federated", self.federated.map(|federated| federated.to_string()));
        add("recovery", self.recovery.map(name_of));
        add("mutation", self.mutation.map(name_of));
        line + if self.calm { " --calm --trace" } else { " --trace" }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            complain(&problem);
            ExitCode::from(2)
        }
    }
}

fn complain(what: &str) {
    // Without standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "gradwire-sim: {what}");
}

/// Prints a line. Whoever stopped reading does not want the rest.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn run(cli: &Cli) -> Result<bool, String> {
    if let Some(file) = &cli.plan {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let plan = Plan::from_text(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        return Ok(run_one(cli, &plan));
    }
    if cli.seeds == 1 {
        return Ok(run_one(cli, &plan_of(cli, cli.seed.unwrap_or(1))));
    }
    Ok(run_many(cli, cli.seed.unwrap_or_else(fresh_seed)))
}

/// A seed that nobody has tried: the one number that comes from outside, and it is printed.
fn fresh_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |since| since.as_secs() * 100_000 + u64::from(since.subsec_micros()) / 10)
}

fn plan_of(cli: &Cli, seed: u64) -> Plan {
    let mut plan = Plan::generate(seed, &cli.shape());
    if cli.calm {
        plan.faults.clear();
    }
    plan
}

fn run_one(cli: &Cli, plan: &Plan) -> bool {
    if cli.print_plan {
        say(plan.to_text().trim_end());
        return true;
    }
    let began = Instant::now();
    let outcome = if cli.trace || cli.once {
        simulate(plan, cli.mutation, cli.trace)
    } else {
        simulate_twice(plan, cli.mutation)
    };
    for line in &outcome.text {
        say(line);
    }
    describe(plan, &outcome);
    say(&format!("{:.2} s", began.elapsed().as_secs_f64()));
    if outcome.violation.is_some() && !cli.no_shrink {
        show_smaller(cli, plan);
    }
    summary(u64::from(outcome.violation.is_none()), u64::from(outcome.violation.is_some()));
    outcome.violation.is_none()
}

/// What a run was, in a few lines.
fn describe(plan: &Plan, outcome: &Outcome) {
    let Outcome { tally, traffic, .. } = outcome;
    say(&format!(
        "{} ranks, {} steps, {} faults: {} processes, {} of them joined later, {} epochs entered, {} steps done, {} operations ended well, {} were aborted, {} failed, {} events in {} ms of virtual time, digest {:016x}",
        plan.ranks,
        plan.steps,
        plan.faults.len(),
        tally.processes,
        tally.joined,
        tally.views,
        tally.steps,
        tally.completed,
        tally.aborted,
        tally.failed,
        outcome.events,
        outcome.virtual_us / 1000,
        outcome.digest
    ));
    let per_step = |count: u64| count as f64 / (tally.steps.max(1)) as f64;
    let per_process = |count: u64| count as f64 / tally.processes.max(1) as f64;
    say(&format!(
        "for each process {:.1} messages to begin and to end, {:.1} to enter epochs, {:.1} heartbeats, {:.1} frames of state, {:.1} control records; for each rank and step {:.1} messages ({:.0} bytes) and {:.1} writes ({:.0} bytes)",
        per_process(traffic.around),
        per_process(traffic.epochs),
        per_process(traffic.heartbeats),
        per_process(traffic.state),
        per_process(outcome.control_records),
        per_step(traffic.messages),
        per_step(traffic.message_bytes),
        per_step(traffic.writes),
        per_step(traffic.payload_bytes)
    ));
    if let Some(violation) = &outcome.violation {
        say(&format!("FAILED: {violation}"));
    }
}

fn run_many(cli: &Cli, base: u64) -> bool {
    say(&format!("seeds {base} to {}, each run twice", base + cli.seeds - 1));
    let began = Instant::now();
    let bar = progress(cli.seeds);
    let mut failed = Vec::new();
    let (mut struck, mut events, mut faults) = (0, 0, 0);
    let mut sum = Tally::default();
    for seed in base..base + cli.seeds {
        let plan = plan_of(cli, seed);
        let outcome = simulate_twice(&plan, cli.mutation);
        struck += outcome.traffic.struck;
        events += outcome.events;
        faults += plan.faults.len();
        sum += outcome.tally;
        if let Some(violation) = outcome.violation {
            failed.push((plan, violation));
        }
        if let Some(bar) = &bar {
            bar.inc(1);
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    for (plan, violation) in failed.iter().take(FAILURES_SHOWN) {
        say(&format!("seed {}: {violation}", plan.seed));
        say(&format!("  again: {}", cli.again(plan.seed)));
    }
    if let Some((plan, _)) = failed.first().filter(|_| !cli.no_shrink) {
        show_smaller(cli, plan);
    }
    if failed.len() > FAILURES_SHOWN {
        let rest: Vec<String> = failed[FAILURES_SHOWN..].iter().map(|(plan, _)| plan.seed.to_string()).collect();
        say(&format!("and seeds {}", rest.join(", ")));
    }
    let seconds = began.elapsed().as_secs_f64();
    say(&format!(
        "{faults} faults, {struck} frames struck; {} processes, {} of them joined later, {} ended with a fault; {} epochs entered; {} steps done; {} operations ended well, {} were aborted, {} failed",
        sum.processes, sum.joined, sum.faults, sum.views, sum.steps, sum.completed, sum.aborted, sum.failed
    ));
    say(&format!(
        "{} seeds in {seconds:.1} s ({:.0} a second), {events} events",
        cli.seeds,
        cli.seeds as f64 / seconds
    ));
    summary(cli.seeds - failed.len() as u64, failed.len() as u64);
    failed.is_empty()
}

/// As it is written on the command line.
fn name_of(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

/// The smallest plan that fails in the same way.
fn show_smaller(cli: &Cli, plan: &Plan) {
    let (smaller, violation) = shrink(plan, cli.mutation, SHRINK_RUNS);
    let Some(violation) = violation else { return };
    let mutation = cli.mutation.map_or(String::new(), |mutation| format!(" --mutation {}", name_of(mutation)));
    say(&format!("smaller, and as broken ({violation}); save it and run `gradwire-sim --plan FILE{mutation}`:"));
    say(smaller.to_text().trim_end());
}

fn summary(passed: u64, failed: u64) {
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    say(&format!("sim result: {verdict}. {passed} passed; {failed} failed; 0 ignored"));
}

fn progress(seeds: u64) -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new(seeds);
        // A template that does not parse leaves the default style, which does as well.
        if let Ok(style) = ProgressStyle::with_template("simulating {bar:40} {pos}/{len} seeds, {per_sec}") {
            bar.set_style(style);
        }
        bar
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
