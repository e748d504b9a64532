//! `gradwire broker`: the embedded broker by itself, for jobs that something else than `gradwire launch` starts.

use std::fs;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use gradwire_control::{BrokerConfig, EmbeddedBroker};
use gradwire_proto::Fault;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Longest token that is read from a file.
const TOKEN_BYTES_MAX: usize = 4096;

/// Run a small Pulsar broker in the foreground.
///
/// It speaks Apache Pulsar's wire protocol and holds everything in memory: when it ends, all topics are gone. It is
/// for jobs on one machine or a trusted network; use a real Pulsar cluster where records must survive.
///
/// Prints its URL on standard output once it answers, and ends on SIGTERM or SIGINT.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Example:
  gradwire secret --file broker.token
  gradwire broker --listen 0.0.0.0:6650 --token-file broker.token
and for the ranks:
  export GRADWIRE_BROKER=pulsar://THIS-HOST:6650 GRADWIRE_BROKER_TOKEN=$(cat broker.token)")]
#[command(group = clap::ArgGroup::new("who").required(true))]
pub(crate) struct BrokerArgs {
    /// Address and port to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:6650")]
    listen: SocketAddr,
    /// HOST:PORT that clients are told to use; the address that each of them reached if not given.
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// A file with the token that clients have to show.
    #[arg(long, value_name = "FILE", group = "who")]
    token_file: Option<PathBuf>,
    /// Admit everyone who reaches the port.
    #[arg(long, group = "who")]
    no_auth: bool,
}

/// Runs the command.
pub(crate) fn run(args: &BrokerArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("gradwire: {text}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &BrokerArgs) -> Result<(), String> {
    // Before the URL is printed: who reads it may end the broker at once.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(|error| format!("cannot watch signals: {error}"))?;
    let mut config = BrokerConfig::new(args.listen);
    config.advertise.clone_from(&args.advertise);
    config.token = args.token_file.as_deref().map(read_token).transpose()?;
    let broker = EmbeddedBroker::start(config).map_err(|fault| fault.to_string())?;
    let told = writeln!(io::stdout(), "{}", broker.url()).and_then(|()| io::stdout().flush());
    told.map_err(|error| format!("cannot print the URL: {error}"))?;
    eprintln!("gradwire: the broker holds everything in memory: when it ends, all topics are gone");
    if args.no_auth && !args.listen.ip().is_loopback() {
        eprintln!("gradwire: whoever reaches {} is admitted; --token-file FILE changes that", args.listen);
    }
    let _ = signals.forever().next();
    broker.stop();
    Ok(())
}

fn read_token(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read the token from {shown}: {error}"))?;
    let token = text.trim();
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX || token.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(format!("{shown} does not hold a token: one word of at most {TOKEN_BYTES_MAX} bytes"));
    }
    Ok(token.to_owned())
}

/// The broker of one job, inside the launcher.
#[derive(Debug)]
pub(crate) struct RunningBroker {
    broker: EmbeddedBroker,
}

impl RunningBroker {
    /// Starts it on any free port: at this address if there are other hosts, else where only this machine reaches it.
    ///
    /// # Errors
    /// Those of [`EmbeddedBroker::start`].
    pub(crate) fn start_for_job(address: Option<IpAddr>, token: String) -> Result<Self, Fault> {
        let mut config = BrokerConfig::new((address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0).into());
        config.token = Some(token);
        Ok(Self { broker: EmbeddedBroker::start(config)? })
    }

    /// Where ranks reach it.
    pub(crate) fn url(&self) -> String {
        self.broker.url().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "  abc\n").unwrap();
        assert_eq!(read_token(&path), Ok("abc".to_owned()));
        for bad in ["", "\n", "a b", "a\nb", &"x".repeat(TOKEN_BYTES_MAX + 1)] {
            fs::write(&path, bad).unwrap();
            assert!(read_token(&path).is_err(), "{bad}");
        }
        assert!(read_token(Path::new("/nonexistent/token")).unwrap_err().contains("/nonexistent/token"));
    }
}
