//! The `gradwire` command: starts jobs, shows what they do, and measures.
#![forbid(unsafe_code)]

mod agent;
mod aggregate;
mod args;
mod bench;
mod broker;
mod demo;
mod doctor;
mod job;
mod launch;
mod pulsar;
mod secret;
mod sizes;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Gradient exchange for data-parallel training: checked end to end, the same bits on every rank.
#[derive(Debug, Parser)]
#[command(
    name = "gradwire",
    version,
    max_term_width = 110,
    after_help = "\
Examples:
  gradwire demo                                    train on real images with 4 ranks, and check the result
  gradwire launch -n 4 -- python train.py          start a program on 4 ranks
  gradwire bench allreduce --ranks 2 --bytes 64MiB measure
  gradwire doctor                                  see what this machine offers

`gradwire COMMAND --help` has more. RUST_LOG=gradwire=debug logs to standard error."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Launch(launch::LaunchArgs),
    Demo(demo::DemoArgs),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Broker(broker::BrokerArgs),
    Pulsar(pulsar::PulsarArgs),
    Aggregate(aggregate::AggregateArgs),
    Secret(secret::SecretArgs),
    Trace(trace::TraceArgs),
    #[command(name = "__agent", hide = true)]
    Agent(agent::AgentArgs),
    #[command(name = "__exec", hide = true)]
    Exec(agent::exec::ExecArgs),
    #[command(name = "__demo-rank", hide = true)]
    DemoRank(demo::DemoRankArgs),
    #[command(name = "__demo-federated", hide = true)]
    DemoFederated(demo::DemoFederatedArgs),
    #[command(name = "__bench-rank", hide = true)]
    BenchRank(bench::BenchRankArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr();
    match cli.command {
        Command::Launch(args) => launch::execute(args),
        Command::Demo(args) => demo::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Broker(args) => broker::run(&args),
        Command::Pulsar(args) => pulsar::run(&args),
        Command::Aggregate(args) => aggregate::run(&args),
        Command::Secret(args) => secret::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Agent(args) => agent::run(&args),
        Command::Exec(args) => agent::exec::run(&args),
        Command::DemoRank(args) => demo::run_rank(args),
        Command::DemoFederated(args) => demo::run_federated(&args),
        Command::BenchRank(args) => bench::run_rank(args),
    }
}

/// Logs go to standard error, and only warnings unless `RUST_LOG` asks for more.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,pulsar=off"));
    // Fails only where something logs already: then that does.
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_writer(std::io::stderr).try_init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_a_user_types_is_read() {
        let read = |line: &str| Cli::try_parse_from(line.split(' '));
        for good in [
            "gradwire launch -n 4 -- true",
            "gradwire launch -H a:2,b:2 --transport tcp --wire fp16 -- python -c pass",
            "gradwire launch -n 1 --env A=b --env PATH --job j --broker pulsar://h:1 -- ./x --help",
            "gradwire doctor --json",
            "gradwire aggregate --job j --broker pulsar://h:1 --quorum 3 --late carry --round-deadline 0.5 --memory 2GiB",
            "gradwire demo --mode federated --ranks 4 --aggregators 2 --wire fp16",
            "gradwire demo --ranks 4 --kill 2@40 --kill 3@41 --stall 1@60:5s --transport tcp",
            "gradwire secret",
            "gradwire pulsar setup --admin http://h:8080 --tenant t --namespace n --job j --role a --role b --dry-run",
        ] {
            assert!(read(good).is_ok(), "{good}: {}", read(good).unwrap_err());
        }
        for bad in [
            "gradwire",
            "gradwire launch -- true",
            "gradwire launch -n 4",
            "gradwire launch -n 4 true",
            "gradwire launch -n x -- true",
            "gradwire launch -n 2 -H a:0 -- true",
            "gradwire launch -n 2 --transport ib -- true",
            "gradwire launch -n 2 --broker here -- true",
            "gradwire pulsar",
            "gradwire pulsar setup --admin pulsar://h:6650 --tenant t --namespace n --job j",
            "gradwire pulsar setup --admin http://h --tenant t/x --namespace n --job j",
            "gradwire pulsar setup --admin http://h --tenant t --namespace n --job J",
            "gradwire aggregate --broker embedded",
            "gradwire aggregate --late sometimes",
            "gradwire demo --aggregators 0",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
