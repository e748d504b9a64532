//! `gradwire __exec`: the last step between an agent and a rank's program. Its own process group was made by the
//! agent; here the process is tied to the agent's life, and becomes the program.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Arguments of `gradwire __exec`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExecArgs {
    /// The agent's process id.
    parent: i32,
    /// Program and arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Becomes the program. Returns only when that fails: 127 when there is no such program, 126 when it cannot be run,
/// as a shell would.
pub(crate) fn run(args: &ExecArgs) -> ExitCode {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        eprintln!("gradwire: cannot tie the rank to its agent: {error}");
        return ExitCode::from(126);
    }
    // The agent may have died before the line above: then nobody would ever end this process.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(args.parent) {
        return ExitCode::from(126);
    }
    let Some((program, arguments)) = args.command.split_first() else { return ExitCode::from(126) };
    let error = Command::new(program).args(arguments).exec();
    eprintln!("gradwire: cannot run '{}': {error}", program.to_string_lossy());
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}
