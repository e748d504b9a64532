//! `gradwire secret`: a fresh secret for jobs that something else than `gradwire launch` starts.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::ExitCode;

use gradwire_proto::Secret;

/// Print a fresh secret for a job.
///
/// `gradwire launch` makes one by itself. Under mpirun, srun or torchrun on several hosts every rank needs the same:
///
///   export GRADWIRE_SECRET=$(gradwire secret)
///   mpirun -x GRADWIRE_SECRET -x GRADWIRE_BROKER ...
///
/// or, with a file that all hosts see, GRADWIRE_SECRET_FILE.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct SecretArgs {
    /// Write it to a new file that only you can read, rather than to standard output.
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &SecretArgs) -> ExitCode {
    match make(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            match &args.file {
                Some(path) if error.kind() == io::ErrorKind::AlreadyExists => eprintln!(
                    "gradwire: {} is there already, and a job may be running with it: choose another name, or remove it",
                    path.display()
                ),
                Some(path) => eprintln!("gradwire: cannot write the secret to {}: {error}", path.display()),
                None => eprintln!("gradwire: cannot print a secret: {error}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn make(args: &SecretArgs) -> io::Result<()> {
    let mut bytes = [0; gradwire_proto::secret::SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let text = Secret::from_bytes(bytes).to_hex();
    match &args.file {
        None => writeln!(io::stdout(), "{text}"),
        // Never over an old one: a job may be running with it.
        Some(path) => {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            writeln!(file, "{text}")?;
            file.sync_all()
        }
    }
}
