//! `gradwire broker`: the embedded broker by itself, for jobs that something else than `gradwire launch` starts.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use gradwire_control::{BrokerConfig, BrokerTls, EmbeddedBroker, Token};
use gradwire_proto::Fault;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::sizes::parse_bytes;

/// No limit may be set higher.
const LIMIT_BYTES_MAX: u64 = 1 << 40;
/// Sizes of frames are 32-bit numbers, and this leaves room for what is around a message.
const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// Run a small Pulsar broker in the foreground.
///
/// It speaks Apache Pulsar's wire protocol, and is one process on purpose: no replicas, no failover. Without --data-dir
/// it holds everything in memory: when it ends, all topics are gone. docs/broker.md says when a Pulsar cluster is the
/// better choice.
///
/// Prints its URL on standard output once it answers, and ends on SIGTERM or SIGINT.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  gradwire secret --file broker.token
  gradwire broker --listen 0.0.0.0:6650 --token-file broker.token --data-dir /var/lib/gradwire
and for the ranks:
  export GRADWIRE_BROKER=pulsar://THIS-HOST:6650 GRADWIRE_BROKER_TOKEN=$(cat broker.token)
With TLS, the URL starts with pulsar+ssl:// and names the host as its certificate does:
  gradwire broker --listen 0.0.0.0:6651 --advertise THIS-HOST:6651 --token-file broker.token \\
    --tls-cert broker.pem --tls-key broker.key")]
#[command(group = clap::ArgGroup::new("who").required(true).multiple(true))]
pub(crate) struct BrokerArgs {
    /// Address and port to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:6650")]
    listen: SocketAddr,
    /// HOST:PORT that clients are told to use; what each of them reached if not given.
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// A file with the token that clients have to show. It is read again when it has changed.
    #[arg(long, value_name = "FILE", group = "who")]
    token_file: Option<PathBuf>,
    /// Admit everyone who reaches the port.
    #[arg(long, group = "who", conflicts_with_all = ["token_file", "tls_client_ca"])]
    no_auth: bool,
    /// Speak TLS 1.3, with the certificate (and those between it and its authority) in this PEM file.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Admit only clients with a certificate from one of the authorities in this PEM file.
    #[arg(long, value_name = "FILE", requires = "tls_cert", group = "who")]
    tls_client_ca: Option<PathBuf>,
    /// Keep topics in this directory: what a client has a receipt for survives the end of the broker, kill -9 included.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Write to the disk itself before a client gets its receipt: that survives a loss of power, too.
    #[arg(long, requires = "data_dir")]
    fsync: bool,
    /// Most memory that all topics hold together.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_limit)]
    memory_max: usize,
    /// Most memory that one topic holds.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_limit)]
    topic_memory_max: usize,
    /// Largest message.
    #[arg(long, value_name = "SIZE", default_value = "5MiB", value_parser = parse_limit)]
    message_size_max: usize,
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
    let broker = EmbeddedBroker::start(config(args)?).map_err(|fault| fault.to_string())?;
    let told = writeln!(io::stdout(), "{}", broker.url()).and_then(|()| io::stdout().flush());
    told.map_err(|error| format!("cannot print the URL: {error}"))?;
    tell(args);
    let _ = signals.forever().next();
    broker.stop().map_err(|fault| fault.to_string())
}

fn config(args: &BrokerArgs) -> Result<BrokerConfig, String> {
    if args.message_size_max >= args.topic_memory_max {
        return Err(
            "--message-size-max must be smaller than --topic-memory-max: no topic could hold such a message".to_owned()
        );
    }
    if args.message_size_max > MESSAGE_BYTES_MAX {
        return Err("--message-size-max must not be larger than 1GiB: the protocol has no larger frames".to_owned());
    }
    if args.topic_memory_max > args.memory_max {
        return Err(
            "--topic-memory-max must not be larger than --memory-max, which is for all topics together".to_owned()
        );
    }
    let tls = args.tls_cert.clone().zip(args.tls_key.clone());
    let mut config = BrokerConfig::new(args.listen);
    config.advertise.clone_from(&args.advertise);
    config.token = args.token_file.clone().map(Token::File);
    config.tls = tls.map(|(certificate, key)| BrokerTls { certificate, key, client_ca: args.tls_client_ca.clone() });
    config.data_dir.clone_from(&args.data_dir);
    config.fsync = args.fsync;
    config.total_bytes_max = args.memory_max;
    config.topic_bytes_max = args.topic_memory_max;
    config.message_bytes_max = args.message_size_max;
    Ok(config)
}

/// Says what somebody might take for granted that is not so.
fn tell(args: &BrokerArgs) {
    match &args.data_dir {
        None => eprintln!(
            "gradwire: the broker holds everything in memory: when it ends, all topics are gone; --data-dir DIR keeps them"
        ),
        Some(directory) => {
            let survives = if args.fsync { "a loss of power" } else { "the end of this process" };
            eprintln!("gradwire: topics are kept in {}: what got a receipt survives {survives}", directory.display());
        }
    }
    if args.no_auth && !args.listen.ip().is_loopback() {
        eprintln!("gradwire: whoever reaches {} is admitted; --token-file FILE changes that", args.listen);
    }
    if args.token_file.is_some() && args.tls_cert.is_none() && !args.listen.ip().is_loopback() {
        eprintln!("gradwire: tokens and messages cross the network as they are; --tls-cert and --tls-key change that");
    }
}

fn parse_limit(text: &str) -> Result<usize, String> {
    match parse_bytes(text)? {
        0 => Err("nothing would fit".to_owned()),
        bytes if bytes <= LIMIT_BYTES_MAX => usize::try_from(bytes).map_err(|error| error.to_string()),
        _ => Err(format!("{text} is more than a broker can hold")),
    }
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
        config.token = Some(token.into());
        Ok(Self { broker: EmbeddedBroker::start(config)? })
    }

    /// Where ranks reach it.
    pub(crate) fn url(&self) -> String {
        self.broker.url().to_owned()
    }
}
