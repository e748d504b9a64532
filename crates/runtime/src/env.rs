//! How a process finds its place in the job: which rank it is, the job's secret, and where the broker is.
//!
//! Owned here: the variables `GRADWIRE_*`, what other launchers set, and what rank 0 hands to the other ranks of its
//! host when the launcher hands out nothing. Everything else about a job is agreed on later, over the broker.
//!
//! | variable | what it says |
//! | --- | --- |
//! | `GRADWIRE_RANK`, `GRADWIRE_WORLD_SIZE`, `GRADWIRE_LOCAL_RANK`, `GRADWIRE_LOCAL_WORLD_SIZE` | the place, before any other |
//! | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the place, as `gradwire launch` and torchrun set it |
//! | `OMPI_COMM_WORLD_*`, `PMI_*`, `SLURM_*` | the place under mpirun, mpiexec, srun |
//! | `GRADWIRE_JOB` | the job's name |
//! | `GRADWIRE_INSTANCE` | this run of it: 32 hexadecimal digits |
//! | `GRADWIRE_SECRET`, `GRADWIRE_SECRET_FILE` | the secret: 64 hexadecimal digits, or a file with them |
//! | `GRADWIRE_BROKER` | the broker's URL |
//! | `GRADWIRE_BROKER_TOKEN`, `GRADWIRE_BROKER_TOKEN_FILE` | what to show to it; the file is read again at each connection |
//! | `GRADWIRE_BROKER_CA` | PEM file with the certificates to trust, for a broker with TLS |
//! | `GRADWIRE_TENANT` | Pulsar tenant of the job's topics: `public` if not set |
//! | `GRADWIRE_MODEL_VERSION` | version of the model: its jobs have a namespace of their own, `<job>.<version>` |
//! | `GRADWIRE_ADDRESS`, `GRADWIRE_INTERFACE` | where this rank listens, and is reached by other hosts |
//! | `GRADWIRE_PORT` | the TCP port at which it listens; the nth rank of a host takes the nth from there; any that is free if not set |
//! | `GRADWIRE_ADVERTISE` | `IP` or `IP:PORT`: where others reach it instead, through a forwarded port or out of a container; ports as above |

mod handover;
mod known;
mod ports;
mod position;
mod process;

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use gradwire_control::federated::federated_instance;
use gradwire_control::{BrokerAccess, BrokerConfig, EmbeddedBroker, JobConfig, JobName, ModelVersion, Token};
use gradwire_proto::secret::hex;
use gradwire_proto::{Fault, FaultKind, Rank, Secret};

use handover::{Exchange, Handover, Published};
pub(crate) use known::warn_of_unknown;
use ports::Ports;
use position::Position;
use process::ProcessName;

/// Largest file with a secret or token, in bytes.
const SECRET_FILE_BYTES_MAX: u64 = 4096;

/// Looks a variable up. Empty ones should count as not set.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// Nothing that says so: a job of one rank.
    None,
    /// `gradwire launch`.
    Gradwire,
    /// Somebody who sets `RANK` and `WORLD_SIZE`.
    Variables,
    /// `torchrun`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A launcher that speaks PMI: MPICH's and Intel's `mpiexec` (hydra).
    Pmi,
    /// `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "no launcher",
            Self::Gradwire => "gradwire launch",
            Self::Variables => "RANK and WORLD_SIZE",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI (MPICH, Intel MPI)",
            Self::Slurm => "Slurm",
        })
    }
}

/// Which rank a process is, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Which rank.
    pub rank: Rank,
    /// Of how many.
    pub world_size: u32,
    /// Who says so.
    pub launcher: Launcher,
}

/// Reads from variables which job a process is about that is no rank: of the federated mode, or one that reads the job's
/// records. `GRADWIRE_JOB`, the secret and the broker have to be there. Without `GRADWIRE_INSTANCE` the instance is made
/// of the job's name, so that whoever takes part finds the others, wherever and whenever it was started.
///
/// # Errors
/// [`FaultKind::InvalidArgument`], [`FaultKind::SecretMissing`], [`FaultKind::BrokerUnreachable`]: a variable is wrong or
/// missing.
pub fn job(variables: Variables<'_>) -> Result<JobConfig, Fault> {
    let given = Given::read(variables)?;
    let missing = |kind, what: &str| Fault::new(kind, format!("{what} is not set: set it for all who take part"));
    let job = given.job.ok_or_else(|| missing(FaultKind::InvalidArgument, "GRADWIRE_JOB"))?;
    let secret = given.secret.ok_or_else(|| {
        missing(FaultKind::SecretMissing, "GRADWIRE_SECRET or GRADWIRE_SECRET_FILE (`gradwire secret` makes one)")
    })?;
    let broker = given.broker.ok_or_else(|| {
        missing(FaultKind::BrokerUnreachable, "GRADWIRE_BROKER (a URL such as pulsar://broker.example:6650)")
    })?;
    let instance = given.instance.unwrap_or_else(|| federated_instance(&job, given.model_version.as_ref()));
    let mut config = JobConfig::new(job, instance, secret, broker);
    (config.model_version, config.tenant) = (given.model_version, given.tenant);
    Ok(config)
}

/// Reads from variables which rank a process is: a pure function of them.
///
/// # Errors
/// [`FaultKind::InvalidArgument`], [`FaultKind::WorldMismatch`]: a variable is no number, out of range, or alone.
pub fn seat(variables: Variables<'_>) -> Result<Seat, Fault> {
    let Position { rank, world_size, launcher, .. } = Position::find(variables)?;
    Ok(Seat { rank, world_size, launcher })
}

/// The secret that `GRADWIRE_SECRET` holds or `GRADWIRE_SECRET_FILE` names, if there is one.
///
/// # Errors
/// [`FaultKind::InvalidArgument`] that names the variable, when the file cannot be read or it is no secret.
pub fn secret(variables: Variables<'_>) -> Result<Option<Secret>, Fault> {
    let Some((text, source)) = text_or_file(variables, "GRADWIRE_SECRET")? else { return Ok(None) };
    // Never with the text itself: it may be a secret with a typing error.
    let wrong = || {
        let text = format!("{source} is not a secret of 64 hexadecimal digits: `gradwire secret` makes one");
        Fault::new(FaultKind::InvalidArgument, text)
    };
    Secret::from_hex(&text).map(Some).ok_or_else(wrong)
}

/// The broker that `GRADWIRE_BROKER` names, if there is one, with its token and the certificates to trust.
///
/// # Errors
/// [`FaultKind::InvalidArgument`] that names the variable, when it is no URL or a file cannot be read.
pub fn broker(variables: Variables<'_>) -> Result<Option<BrokerAccess>, Fault> {
    let Some(url) = variables("GRADWIRE_BROKER") else { return Ok(None) };
    check_url(&url)?;
    access(url, variables).map(Some)
}

/// How to reach the broker at this URL, with what the environment says of tokens and certificates.
///
/// # Errors
/// [`FaultKind::InvalidArgument`] that names the file that cannot be read.
pub fn access(url: String, variables: Variables<'_>) -> Result<BrokerAccess, Fault> {
    let text = variables("GRADWIRE_BROKER_TOKEN").map(|text| Token::Text(text.trim().to_owned()));
    let token = text.or_else(|| Some(Token::File(variables("GRADWIRE_BROKER_TOKEN_FILE")?.into())));
    // What cannot be read now could not be read later either.
    token.as_ref().map(Token::read).transpose()?;
    Ok(BrokerAccess { url, token, trust: variables("GRADWIRE_BROKER_CA").map(Into::into) })
}

/// A process's place in the job.
#[derive(Debug)]
pub struct Place {
    /// Which rank it is.
    pub rank: Rank,
    /// How many there are.
    pub world_size: u32,
    /// Which one on this host.
    pub local_rank: u32,
    /// How many on this host, as far as the launcher says; where it says nothing, as many as there are.
    pub local_world_size: u32,
    /// The job's name.
    pub job: JobName,
    /// The version of the model that it trains, if somebody said so.
    pub model_version: Option<ModelVersion>,
    /// Pulsar tenant of its topics.
    pub tenant: String,
    /// This run of the job: the same on all ranks, and another each time.
    pub instance: [u8; 16],
    /// What ranks prove to each other that they know.
    pub secret: Secret,
    /// Where the broker is. None only in a job of one rank, which needs none.
    pub broker: Option<BrokerAccess>,
    /// What started this process.
    pub launcher: Launcher,
    /// The address under which other hosts reach this rank, if somebody said so.
    pub address: Option<IpAddr>,
    /// The network interface under whose address they do, if somebody said so.
    pub interface: Option<String>,
    /// The TCP port at which it listens; 0 for any that is free.
    pub port: u16,
    /// Where others reach it if not where it listens; port 0 for the one at which it listens.
    pub advertise: Option<SocketAddr>,
    /// Has to live as long as this rank takes part.
    pub guard: Guard,
}

impl Place {
    /// Whether somebody named the job. Where nobody did, it has another name in each launch.
    #[must_use]
    pub fn has_given_name(&self) -> bool {
        self.job.as_str() != unnamed(&self.instance)
    }
}

/// What a job is called to which nobody gave a name: `gradwire launch` calls it so too.
fn unnamed(instance: &[u8; 16]) -> String {
    format!("job-{}", hex(&instance[..4]))
}

/// What rank 0 keeps for the others: the embedded broker, where nobody gave one, and the file that tells them of it.
/// Dropped, both are gone. On other ranks, and where the launcher gave everything, it holds nothing.
#[derive(Debug, Default)]
pub struct Guard {
    // In this order: nobody should find the file of a broker that is gone.
    published: Option<Published>,
    broker: Option<EmbeddedBroker>,
}

impl Guard {
    /// All ranks have joined: the file with the secret is not needed any more, and is removed now.
    pub fn all_joined(&mut self) {
        self.published = None;
    }

    /// Whether this process runs the job's broker: it should be the last to leave.
    #[must_use]
    pub const fn serves_broker(&self) -> bool {
        self.broker.is_some()
    }
}

/// Finds this process's place from its environment, waiting at most `wait` for rank 0 where that hands over the
/// secret. Empty variables count as not set.
///
/// # Errors
/// Those of [`discover`].
pub fn from_process(wait: Duration) -> Result<Place, Fault> {
    discover(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()), wait)
}

/// Finds a place from variables.
///
/// Without any launcher's variables that is a job of one rank. Where all ranks are on one host and nobody gave a secret
/// or a broker, rank 0 makes them, runs the broker in this process, and hands them to the others through a file that
/// only this user can read; the others wait for it, at most `wait`.
///
/// # Errors
/// - [`FaultKind::InvalidArgument`], [`FaultKind::WorldMismatch`]: a variable is no number, out of range, or alone.
/// - [`FaultKind::SecretMissing`], [`FaultKind::BrokerUnreachable`]: several hosts, and no secret or broker was given.
/// - [`FaultKind::DeadlineExceeded`]: rank 0 handed nothing over.
/// - [`FaultKind::JobNameTaken`]: another job on this host has the same name from its launcher.
/// - [`FaultKind::System`]: the system gives no random bytes, no place for the file, or no broker.
pub fn discover(variables: Variables<'_>, wait: Duration) -> Result<Place, Fault> {
    let deadline = Instant::now() + wait;
    let position = Position::find(variables)?;
    let given = Given::read(variables)?;
    let ports = given.ports.of(position.local_rank)?;
    let settled = given.settle(&position, variables, deadline).map_err(|fault| match fault.rank {
        Some(_) => fault,
        None => fault.at(position.rank),
    })?;
    Ok(Place {
        rank: position.rank,
        world_size: position.world_size,
        local_rank: position.local_rank,
        local_world_size: position.local_world_size,
        job: given.job.map_or_else(|| JobName::new(unnamed(&settled.instance)), Ok)?,
        model_version: given.model_version,
        tenant: given.tenant,
        instance: settled.instance,
        secret: settled.secret,
        broker: settled.broker,
        launcher: position.launcher,
        address: given.address,
        interface: given.interface,
        port: ports.port,
        advertise: ports.advertise,
        guard: settled.guard,
    })
}

/// What the environment says beside the place.
struct Given {
    job: Option<JobName>,
    model_version: Option<ModelVersion>,
    tenant: String,
    instance: Option<[u8; 16]>,
    secret: Option<Secret>,
    broker: Option<BrokerAccess>,
    address: Option<IpAddr>,
    interface: Option<String>,
    ports: Ports,
}

/// What all ranks agree on.
struct Settled {
    instance: [u8; 16],
    secret: Secret,
    broker: Option<BrokerAccess>,
    guard: Guard,
}

impl Given {
    fn read(variables: Variables<'_>) -> Result<Self, Fault> {
        let job = variables("GRADWIRE_JOB").map(JobName::new).transpose()?;
        let model_version = variables("GRADWIRE_MODEL_VERSION").map(ModelVersion::new).transpose()?;
        let tenant = variables("GRADWIRE_TENANT").unwrap_or_else(|| "public".to_owned());
        check_tenant(&tenant)?;
        let instance = match variables("GRADWIRE_INSTANCE") {
            None => None,
            Some(text) => Some(unhex(text.trim()).ok_or_else(|| {
                Fault::new(FaultKind::InvalidArgument, "GRADWIRE_INSTANCE is not 32 hexadecimal digits: unset it")
            })?),
        };
        let (secret, broker) = (secret(variables)?, broker(variables)?);
        let address = match variables("GRADWIRE_ADDRESS") {
            None => None,
            Some(text) => Some(text.trim().parse().map_err(|_| {
                let text = format!("GRADWIRE_ADDRESS is '{text}': expected an IP address of this host");
                Fault::new(FaultKind::InvalidArgument, text)
            })?),
        };
        Ok(Self {
            job,
            model_version,
            tenant,
            instance,
            secret,
            broker,
            address,
            interface: variables("GRADWIRE_INTERFACE"),
            ports: Ports::read(variables)?,
        })
    }

    /// Completes what was given, together with the other ranks where that takes it.
    fn settle(&self, position: &Position, variables: Variables<'_>, deadline: Instant) -> Result<Settled, Fault> {
        if position.world_size == 1 {
            return Ok(Settled {
                instance: self.instance.map_or_else(random, Ok)?,
                secret: self.secret.clone().map_or_else(|| random().map(Secret::from_bytes), Ok)?,
                broker: self.broker.clone(),
                guard: Guard::default(),
            });
        }
        if let (Some(secret), Some(broker)) = (&self.secret, &self.broker) {
            return Ok(Settled {
                instance: self.instance.unwrap_or_else(|| self.derive_instance(secret, position)),
                secret: secret.clone(),
                broker: Some(broker.clone()),
                guard: Guard::default(),
            });
        }
        if !position.one_host() {
            return Err(self.missing(position));
        }
        let exchange = Exchange::find(variables);
        let name = self.handover_name(position);
        if position.rank == Rank(0) {
            return self.hand_over(position, &exchange, &name);
        }
        let Handover { instance, secret, broker, .. } = exchange.wait(&name, position.world_size, deadline)?;
        Ok(Settled { instance, secret, broker: Some(broker), guard: Guard::default() })
    }

    /// Rank 0 makes what is missing and publishes it.
    fn hand_over(&self, position: &Position, exchange: &Exchange, name: &str) -> Result<Settled, Fault> {
        let instance = self.instance.map_or_else(random, Ok)?;
        let secret = self.secret.clone().map_or_else(|| random().map(Secret::from_bytes), Ok)?;
        let mut guard = Guard::default();
        let broker = match &self.broker {
            Some(broker) => broker.clone(),
            None => {
                let token = hex(&secret.proof("broker token", &[&instance]));
                let mut config = BrokerConfig::new((Ipv4Addr::LOCALHOST, 0).into());
                config.token = Some(token.clone().into());
                let broker = EmbeddedBroker::start(config)?;
                let url = broker.url().to_owned();
                guard.broker = Some(broker);
                BrokerAccess::new(url).with_token(Token::Text(token))
            }
        };
        let handover = Handover { world_size: position.world_size, instance, secret, broker };
        guard.published = Some(exchange.publish(name, &handover)?);
        Ok(Settled { instance, secret: handover.secret, broker: Some(handover.broker), guard })
    }

    /// What the ranks of a run call the file. Where the launcher gives the run no name, they have their parent in
    /// common.
    fn handover_name(&self, position: &Position) -> String {
        let parent = || {
            let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get().cast_unsigned());
            let start = ProcessName::of(parent).map_or(0, |process| process.start);
            format!("parent {parent} of {start}")
        };
        let session = position.session.clone().unwrap_or_else(parent);
        format!("{}\n{}\n{session}", position.launcher, self.job.as_ref().map(JobName::as_str).unwrap_or_default())
    }

    /// An instance that all ranks compute alike, from what only they know and what the launcher calls the run.
    fn derive_instance(&self, secret: &Secret, position: &Position) -> [u8; 16] {
        let job = self.job.as_ref().map(JobName::as_str).unwrap_or_default();
        let session = position.session.as_deref().unwrap_or_default();
        let digest = secret.proof("instance", &[job.as_bytes(), session.as_bytes()]);
        let mut instance = [0; 16];
        instance.copy_from_slice(&digest[..16]);
        instance
    }

    fn missing(&self, position: &Position) -> Fault {
        let (kind, missing) = match (&self.secret, &self.broker) {
            (None, None) => (FaultKind::SecretMissing, "GRADWIRE_SECRET and GRADWIRE_BROKER are"),
            (None, Some(_)) => (FaultKind::SecretMissing, "GRADWIRE_SECRET is"),
            (Some(_), _) => (FaultKind::BrokerUnreachable, "GRADWIRE_BROKER is"),
        };
        let hand_on = match position.launcher {
            Launcher::OpenMpi => "start with `mpirun -x GRADWIRE_SECRET -x GRADWIRE_BROKER -x GRADWIRE_BROKER_TOKEN`",
            Launcher::Pmi => "start with `mpiexec -genvlist GRADWIRE_SECRET,GRADWIRE_BROKER,GRADWIRE_BROKER_TOKEN`",
            Launcher::Slurm => "start with `srun --export=ALL`",
            _ => "set them for every rank",
        };
        let text = format!(
            "the job has ranks on several hosts and {missing} not set: `export GRADWIRE_SECRET=$(gradwire secret) \
             GRADWIRE_BROKER=pulsar://HOST:6650` (a Pulsar broker, or `gradwire broker --listen 0.0.0.0:6650 \
             --token-file FILE` with GRADWIRE_BROKER_TOKEN), and {hand_on}"
        );
        Fault::new(kind, text)
    }
}

/// A tenant becomes part of topic names.
fn check_tenant(name: &str) -> Result<(), Fault> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '=' | ':' | '.' | '_');
    if !name.is_empty() && name.len() <= 100 && name.chars().all(allowed) {
        return Ok(());
    }
    let text = format!("GRADWIRE_TENANT is '{}': expected the name of a Pulsar tenant", name.escape_debug());
    Err(Fault::new(FaultKind::InvalidArgument, text))
}

fn check_url(url: &str) -> Result<(), Fault> {
    let host = url.strip_prefix("pulsar://").or_else(|| url.strip_prefix("pulsar+ssl://"));
    if host.is_some_and(|host| !host.is_empty() && !host.starts_with(':') && !url.contains(char::is_whitespace)) {
        return Ok(());
    }
    let text = format!("GRADWIRE_BROKER is '{url}': expected a URL such as pulsar://broker.example:6650");
    Err(Fault::new(FaultKind::InvalidArgument, text))
}

/// The value of a variable, or of the file that NAME_FILE names, and which of the two it was.
fn text_or_file(variables: Variables<'_>, name: &str) -> Result<Option<(String, String)>, Fault> {
    if let Some(text) = variables(name) {
        return Ok(Some((text.trim().to_owned(), name.to_owned())));
    }
    let file_name = format!("{name}_FILE");
    let Some(path) = variables(&file_name) else { return Ok(None) };
    let wrong =
        |what: &dyn fmt::Display| Fault::new(FaultKind::InvalidArgument, format!("{file_name} names {path}, {what}"));
    let metadata = fs::metadata(&path).map_err(|error| wrong(&format_args!("which cannot be read: {error}")))?;
    if !metadata.is_file() || metadata.len() > SECRET_FILE_BYTES_MAX {
        return Err(wrong(&format_args!("which is no file of at most {SECRET_FILE_BYTES_MAX} bytes")));
    }
    if metadata.mode() & 0o007 != 0 {
        tracing::warn!("{file_name} names {path}, which every user of this host can read: `chmod 600 {path}`");
    }
    let text = fs::read_to_string(&path).map_err(|error| wrong(&format_args!("which cannot be read: {error}")))?;
    Ok(Some((text.trim().to_owned(), format!("the content of {path}"))))
}

fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(FaultKind::System, format!("the system gives no random bytes: {error}")))?;
    Ok(bytes)
}

/// Reads hexadecimal digits.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let text = text.as_bytes();
    if text.len() != N * 2 {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
