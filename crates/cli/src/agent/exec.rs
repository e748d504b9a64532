//! `gradwire __exec`: the last step between an agent and a rank's program. Its own process group was made by the
//! agent; here the process is tied to the agent's life, and becomes the program.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
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
    eprintln!(
        "gradwire: cannot run '{}': {error}{}",
        program.to_string_lossy(),
        hint(Path::new(program), error.kind())
    );
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// What the system's words leave open: a file that is there is "not found" too, where the `PATH` or its interpreter lacks.
fn hint(program: &Path, kind: io::ErrorKind) -> String {
    let is_searched = program.parent() == Some(Path::new(""));
    match kind {
        io::ErrorKind::NotFound if is_searched && program.is_file() => {
            format!("; it is not on the PATH: for the file in this directory write ./{}", program.display())
        }
        io::ErrorKind::NotFound if is_searched => "; it is not on the PATH".to_owned(),
        io::ErrorKind::NotFound if program.is_file() => {
            "; the file is there: what its first line names to run it, or its loader, is not".to_owned()
        }
        io::ErrorKind::PermissionDenied if program.is_file() => {
            "; make the file executable (chmod +x), or name the program that runs it".to_owned()
        }
        _ => String::new(),
    }
}
