//! The command `gradwire launch`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use gradwire_control::JobName;

use super::agents::RemoteOptions;
use super::hosts::HostSlots;
use super::report::LaunchError;
use super::{LaunchPlan, forward_line, run};
use crate::args::{BrokerChoice, Transport, Wire};

/// Start a program on many ranks.
///
/// Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and
/// what gradwire needs to join the job. Lines that ranks write come out behind `[rank]`. Standard input of the ranks
/// is empty. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks; a second SIGINT within two
/// seconds ends them at once.
///
/// When a rank fails, the others are ended and its code (128 + the number for a signal) is the exit code. A rank that
/// exits with 0 leaves the others running.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  gradwire launch -n 4 -- python train.py --epochs 3
  gradwire launch -n 8 -H node1:4,node2:4 --transport tcp -- ./train
  gradwire launch -n 2 --env OMP_NUM_THREADS=1 --broker pulsar://broker.example:6650 -- ./train

Remote hosts are reached by ssh without a password (ssh-agent or keys); gradwire has to be installed there, in the \
same version, at the same path as here or on the PATH.")]
pub(crate) struct LaunchArgs {
    /// How many ranks; with -H, all slots if not given.
    #[arg(short = 'n', long, value_name = "RANKS", required_unless_present = "hosts")]
    ranks: Option<u32>,
    /// Where they run: HOST or HOST:SLOTS (1 slot if not given), filled in order. This machine if not given.
    #[arg(short = 'H', long, value_name = "HOST:SLOTS", value_delimiter = ',')]
    hosts: Vec<HostSlots>,
    /// How ranks reach each other.
    #[arg(long, value_enum)]
    transport: Option<Transport>,
    /// How values travel.
    #[arg(long, value_enum)]
    wire: Option<Wire>,
    /// Go on without ranks that fail, while so many are left: the ranks get GRADWIRE_RECOVERY=redo, unless it is set.
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..))]
    min_ranks: Option<u32>,
    /// 'embedded' (inside the launcher) or the URL of a Pulsar broker.
    #[arg(long, env = "GRADWIRE_BROKER", default_value = "embedded")]
    broker: BrokerChoice,
    /// The job's name: 1 to 64 lower-case letters, digits and hyphens. A fresh one if not given.
    #[arg(long, value_parser = parse_job)]
    job: Option<String>,
    /// A variable for every rank: NAME=VALUE, or NAME for the value that it has here.
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// Where every rank runs; the present directory if not given.
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// The ssh command and its first arguments, separated by spaces.
    #[arg(long, env = "GRADWIRE_SSH", default_value = "ssh")]
    ssh: String,
    /// Further arguments for ssh, separated by spaces; may be repeated.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    ssh_args: Vec<String>,
    /// Where gradwire is on remote hosts.
    #[arg(long, value_name = "PATH", env = "GRADWIRE_REMOTE")]
    remote_gradwire: Option<String>,
    /// The address of this machine that remote hosts reach; the one from which ssh reached them if not given.
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Program and arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn execute(args: LaunchArgs) -> ExitCode {
    let outcome = plan(args).and_then(|plan| run(plan, |line| forward_line(&line)));
    match outcome {
        Ok(report) => {
            if !report.success() || report.has_notes() {
                eprintln!("gradwire: {report}");
            }
            report.exit_code()
        }
        Err(error) => {
            eprintln!("gradwire: {error}");
            error.exit_code()
        }
    }
}

fn plan(args: LaunchArgs) -> Result<LaunchPlan, LaunchError> {
    let slots = args.hosts.iter().fold(0_u32, |sum, host| sum.saturating_add(host.slots));
    let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
    let mut ssh = words(&args.ssh);
    if ssh.is_empty() {
        return Err(LaunchError::usage("--ssh (or GRADWIRE_SSH) is empty: name the ssh command"));
    }
    ssh.extend(args.ssh_args.iter().flat_map(|text| words(text)));
    let ranks = args.ranks.unwrap_or(slots);
    if let Some(least) = args.min_ranks.filter(|least| *least > ranks) {
        return Err(LaunchError::usage(format!("--min-ranks {least} is more than the {ranks} ranks that are started")));
    }
    Ok(LaunchPlan {
        ranks,
        hosts: args.hosts,
        transport: args.transport,
        wire: args.wire,
        ranks_min: args.min_ranks,
        broker: args.broker,
        job: args.job,
        env: args.env.iter().map(variable).collect::<Result<_, _>>()?,
        directory: args.directory,
        command: args.command,
        remote: RemoteOptions { ssh, gradwire: args.remote_gradwire, address: args.address },
    })
}

/// `NAME=VALUE`, or `NAME` with the value that it has in this process.
fn variable(text: &OsString) -> Result<(OsString, OsString), LaunchError> {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = text.as_bytes();
    let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    };
    let name = std::ffi::OsStr::from_bytes(name);
    let shown = name.to_string_lossy();
    if name.is_empty() {
        return Err(LaunchError::usage(format!("--env '{}' has no name: write NAME=VALUE", text.to_string_lossy())));
    }
    let value = match value {
        Some(value) => std::ffi::OsStr::from_bytes(value).to_owned(),
        None => std::env::var_os(name).ok_or_else(|| {
            LaunchError::usage(format!("--env {shown}: there is no such variable here; write {shown}=VALUE"))
        })?,
    };
    Ok((name.to_owned(), value))
}

/// A job's name becomes part of topic names.
fn parse_job(text: &str) -> Result<String, String> {
    JobName::new(text).map(|name| name.to_string()).map_err(|fault| fault.detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_a_name_and_a_value() {
        let read = |text: &str| variable(&OsString::from(text)).ok();
        let pair = |name: &str, value: &str| Some((OsString::from(name), OsString::from(value)));
        assert_eq!(read("A=b=c"), pair("A", "b=c"));
        assert_eq!(read("A="), pair("A", ""));
        assert_eq!(read("PATH"), pair("PATH", &std::env::var("PATH").unwrap()));
        assert_eq!(read("=x"), None);
        assert_eq!(read("SURELY_NOT_SET_ANYWHERE"), None);
    }

    #[test]
    fn job_names_are_safe_in_topics() {
        for good in ["a", "resnet-50"] {
            assert!(parse_job(good).is_ok());
        }
        for bad in ["", "a/b", "a b", "a-partition-0", &"x".repeat(65), "ä"] {
            assert!(parse_job(bad).is_err(), "{bad}");
        }
    }
}
