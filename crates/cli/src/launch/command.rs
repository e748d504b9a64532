//! The command `gradwire launch`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use gradwire_control::JobName;
use gradwire_proto::limits::WORLD_SIZE_MAX;

use super::agents::RemoteOptions;
use super::hosts::HostSlots;
use super::hosts_file::HostsFile;
use super::report::LaunchError;
use super::{LaunchPlan, forward_line, run};
use crate::args::{BrokerChoice, Transport, Wire};

/// Start a program on many ranks.
///
/// Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, in
/// GRADWIRE_RESTART how often it was started before (0 at first), and what gradwire needs to join the job. Lines that ranks
/// write come out behind `[rank]`. Standard input of the ranks is empty.
///
/// A rank fails when it exits with another code than 0, or by a signal. Without --min-ranks the others are ended then.
/// With it they go on as long as so many are left, and --restarts starts those that failed again, where that can help. A
/// rank that exits with 0 is through, and leaves the others running; one that had not left the job before, so that the others
/// went on without it, counts as lost, but is not started again.
///
/// SIGINT and SIGTERM are passed on to the ranks as SIGTERM: they can end in order, and are killed after --grace; a second
/// one of these signals kills them at once. Programs that ask gradwire for it (Builder::stop_on_sigterm) end with one and
/// the same step on all ranks: --grace has to leave time for two steps and a save. SIGHUP, SIGUSR1 and SIGUSR2 are passed
/// on as they are.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  gradwire launch -n 4 -- python train.py --epochs 3
  gradwire launch -n 8 -H node1:4,node2:4 --transport tcp -- ./train
  gradwire launch -n 2 --env OMP_NUM_THREADS=1 --broker pulsar://broker.example:6650 -- ./train
  gradwire launch --hosts-file hosts --address 10.0.0.1 --min-ranks 2 --max-ranks 16 --restarts 8 -- ./train

Exit code:
  0      all ranks exited with 0, but for those without which the others went on and those whose slots were taken away
  CODE   that of the rank whose failure ended the job: the first that failed or, with --min-ranks, the one whose loss \
left too few; 128 + the number of the signal that killed it; 127 when there is no such program, 126 when it cannot be run
  128+N  signal N to the launcher ended the ranks (130 for SIGINT, 143 for SIGTERM); 0 if all of them then exited with 0
  1      the launcher's own errors: a host cannot be reached or its agent was lost, the broker does not start
  2      the command line makes no sense

Remote hosts are reached by ssh without a password (ssh-agent or keys); gradwire has to be installed there, in the \
same version, at the same path as here or on the PATH.")]
pub(crate) struct LaunchArgs {
    /// How many ranks are started; with -H or --hosts-file, all slots if not given.
    #[arg(short = 'n', long, value_name = "RANKS", required_unless_present_any = ["hosts", "hosts_file"])]
    ranks: Option<u32>,
    /// Where they run: HOST or HOST:SLOTS (1 slot if not given), filled in order. This machine if not given.
    #[arg(short = 'H', long, value_name = "HOST:SLOTS", value_delimiter = ',')]
    hosts: Vec<HostSlots>,
    /// The same from a file, one host a line; # begins a comment. With --min-ranks the file is followed while the job runs:
    /// each slot that is added starts a further rank there, up to --max-ranks; the rank of a slot that is taken away gets
    /// SIGTERM, has --grace to end, and counts as no failure. A file with fewer slots than --min-ranks is warned of, and
    /// followed; one that makes no sense changes nothing.
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    hosts_file: Option<PathBuf>,
    /// How ranks reach each other.
    #[arg(long, value_enum)]
    transport: Option<Transport>,
    /// How values travel.
    #[arg(long, value_enum)]
    wire: Option<Wire>,
    /// Go on without ranks that fail, while so many are left: the ranks get GRADWIRE_RECOVERY=redo, unless it is set.
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..))]
    min_ranks: Option<u32>,
    /// With --min-ranks: how many ranks there can be at a time (GRADWIRE_RANKS_MAX), where more may join than are started.
    /// As many as are started if not given.
    #[arg(long, value_name = "RANKS")]
    max_ranks: Option<u32>,
    /// With --min-ranks: start ranks that failed once more, at most so many times in all. Each start counts, of whichever
    /// rank: a host that is lost with 4 ranks costs 4. The rank has the same environment but for GRADWIRE_RESTART. Between a
    /// failure and the restart is a pause of 0.1 s, doubled with each failure of that rank, at most 10 s; it begins anew when
    /// the rank has run for 60 s. A rank is not started again that exits with 2, 126 or 127 (called wrongly, cannot be run, no
    /// such program), that is of another model than the job, or that nobody could give the job's state any more. When all
    /// ranks that have it are lost, the job ends. Ranks of a host that is lost go to other hosts with free slots, or to the
    /// same when it is back.
    #[arg(long, value_name = "TIMES", default_value_t = 0, hide_default_value = true)]
    restarts: u32,
    /// How long ranks that get SIGTERM, by a signal to the launcher or because their slot was taken away, may take to end
    /// before they are killed, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = crate::args::seconds)]
    grace: Duration,
    /// Write what happens to the ranks to a file, as lines of JSON: ms (since the start), event (started, lost, restarted,
    /// added, removed, ended), rank, host and reason.
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
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
    let outcome = plan(args).and_then(|plan| run(plan, |line, _| forward_line(&line)));
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
    let (hosts_file, hosts) = match args.hosts_file.clone() {
        None => (None, args.hosts.clone()),
        Some(path) => HostsFile::open(path).map(|(file, hosts)| (Some(file), hosts)).map_err(LaunchError::usage)?,
    };
    let slots = hosts.iter().fold(0_u32, |sum, host| sum.saturating_add(host.slots));
    let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
    let mut ssh = words(&args.ssh);
    if ssh.is_empty() {
        return Err(LaunchError::usage("--ssh (or GRADWIRE_SSH) is empty: name the ssh command"));
    }
    ssh.extend(args.ssh_args.iter().flat_map(|text| words(text)));
    let ranks = args.ranks.unwrap_or(slots);
    let env = args.env.iter().map(variable).collect::<Result<Vec<_>, _>>()?;
    check_elastic(&args, ranks, &env)?;
    Ok(LaunchPlan {
        ranks,
        hosts,
        transport: args.transport,
        wire: args.wire,
        ranks_min: args.min_ranks,
        ranks_max: args.max_ranks,
        restarts: args.restarts,
        hosts_file,
        grace: args.grace,
        patience: super::PATIENCE,
        events: args.events,
        broker: args.broker,
        job: args.job,
        env,
        directory: args.directory,
        command: args.command,
        remote: RemoteOptions { ssh, gradwire: args.remote_gradwire, address: args.address },
    })
}

/// Whether what is said of ranks that come and go fits together.
fn check_elastic(args: &LaunchArgs, ranks: u32, env: &[(OsString, OsString)]) -> Result<(), LaunchError> {
    let Some(least) = args.min_ranks else {
        let needs = |flag: &str| {
            LaunchError::usage(format!(
                "{flag} is for jobs that go on without ranks that are lost: say with --min-ranks how many have to be left \
                 for that, such as --min-ranks {}",
                ranks.saturating_sub(1).max(1)
            ))
        };
        return match (args.restarts, args.max_ranks) {
            (0, None) => Ok(()),
            (0, Some(_)) => Err(needs("--max-ranks")),
            _ => Err(needs("--restarts")),
        };
    };
    if least > ranks {
        return Err(LaunchError::usage(format!("--min-ranks {least} is more than the {ranks} ranks that are started")));
    }
    if let Some(most) = args.max_ranks.filter(|most| !(ranks..=WORLD_SIZE_MAX).contains(most)) {
        return Err(LaunchError::usage(format!(
            "--max-ranks {most} cannot be: {ranks} ranks are started, and a job has at most {WORLD_SIZE_MAX}"
        )));
    }
    let given = env.iter().rfind(|(name, _)| name == "GRADWIRE_RECOVERY").map(|(_, value)| value.clone());
    if given.or_else(|| std::env::var_os("GRADWIRE_RECOVERY")).is_some_and(|value| value == "fail") {
        return Err(LaunchError::usage(
            "GRADWIRE_RECOVERY=fail ends all ranks when one is lost, and with --min-ranks the others go on: unset \
             GRADWIRE_RECOVERY, or leave --min-ranks out",
        ));
    }
    Ok(())
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
