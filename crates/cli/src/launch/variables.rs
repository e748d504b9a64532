//! What the ranks of a job find in their environment.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs as _, UdpSocket};
use std::os::unix::ffi::OsStrExt as _;

use gradwire_control::{BrokerAccess, JobConfig, Token};
use gradwire_proto::Secret;
use gradwire_proto::secret::hex;

use super::LaunchPlan;
use super::agents::{AgentLink, RemoteOptions};
use super::ranks::Spot;
use super::report::LaunchError;
use crate::agent::wire::{Hello, Plan};

/// What makes this run of a job different from every other. The secret is never printed.
pub(super) struct Identity {
    pub(super) job: String,
    pub(super) instance: [u8; 16],
    pub(super) secret: Secret,
}

impl Identity {
    /// Makes a fresh instance, and a fresh secret if none is given: by one that is, others can read the job's records.
    pub(super) fn fresh(job: Option<&str>, given: Option<Secret>) -> Result<Self, LaunchError> {
        let (mut instance, mut secret) = ([0; 16], [0; 32]);
        getrandom::fill(&mut instance).and_then(|()| getrandom::fill(&mut secret)).map_err(|error| {
            LaunchError::failed(format!("the system gives no random bytes for the secret: {error}"))
        })?;
        let job = job.map_or_else(|| format!("job-{}", hex(&instance[..4])), str::to_owned);
        Ok(Self { job, instance, secret: given.unwrap_or_else(|| Secret::from_bytes(secret)) })
    }

    pub(super) fn instance_hex(&self) -> String {
        hex(&self.instance)
    }
}

/// The address under which all hosts of the job reach this one; none when there are no others. Others may come later
/// where the address is given.
pub(super) fn own_address(
    agents: &[AgentLink],
    remote: &RemoteOptions,
    others_may_come: bool,
) -> Result<Option<IpAddr>, LaunchError> {
    let other = agents.iter().find(|agent| !agent.host.local);
    if other.is_none() && !others_may_come {
        return Ok(None);
    }
    if let Some(address) = remote.address {
        return match TcpListener::bind((address, 0)) {
            Ok(_) => Ok(Some(address)),
            Err(error) => Err(LaunchError::usage(format!("--address {address} is not one of this machine: {error}"))),
        };
    }
    let Some(agent) = other else { return Ok(None) };
    let host = &agent.host.name;
    let seen = agent.hello.as_ref().and_then(ssh_addresses).map(|(own, _)| own);
    seen.or_else(|| towards(host)).filter(|address| TcpListener::bind((*address, 0)).is_ok()).map(Some).ok_or_else(
        || {
            LaunchError::usage(format!(
                "it is unknown under which address {host} reaches this machine: give it with --address IP"
            ))
        },
    )
}

/// The two ends of an ssh connection as the remote one sees them: our address, its address.
fn ssh_addresses(hello: &Hello) -> Option<(IpAddr, IpAddr)> {
    let mut fields = hello.ssh_connection.as_deref()?.split_ascii_whitespace();
    let own = fields.next()?.parse().ok()?;
    let theirs = fields.nth(1)?.parse().ok()?;
    Some((own, theirs))
}

/// The address from which this machine would send to a host. Nothing is sent.
fn towards(host: &str) -> Option<IpAddr> {
    let name = host.rsplit_once('@').map_or(host, |(_, name)| name);
    let target = (name, 22).to_socket_addrs().ok()?.next()?;
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(target).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// What agents need to know to start ranks, at the job's start and later. Holds the secret.
pub(super) struct Recipe {
    common: Plan,
    own: Option<IpAddr>,
}

impl Recipe {
    pub(super) fn new(
        plan: &LaunchPlan,
        identity: &Identity,
        broker: &BrokerAccess,
        agents: &[AgentLink],
        own: Option<IpAddr>,
    ) -> Result<Self, LaunchError> {
        let directory = match &plan.directory {
            Some(directory) => std::path::absolute(directory),
            None => std::env::current_dir(),
        };
        let directory =
            directory.map_err(|error| LaunchError::failed(format!("the present directory is gone: {error}")))?;
        let variables = common_variables(plan, identity, broker, agents, own);
        let common = Plan {
            command: plan.command.iter().map(|part| part.as_bytes().to_vec()).collect(),
            directory: directory.as_os_str().as_bytes().to_vec(),
            variables: variables.iter().map(|(n, v)| (n.as_bytes().to_vec(), v.as_bytes().to_vec())).collect(),
            ranks: Vec::new(),
        };
        Ok(Self { common, own })
    }

    /// The job as its ranks find it; nothing if they would find none.
    pub(super) fn job(&self) -> Option<JobConfig> {
        let value = |name: &str| {
            let set = self.common.variables.iter().rfind(|(known, _)| known == name.as_bytes());
            set.and_then(|(_, value)| String::from_utf8(value.clone()).ok()).filter(|value| !value.is_empty())
        };
        gradwire::env::job(&value).ok()
    }

    /// The plan for ranks of one agent, on a host where so many were to be from the start: each with its place and how
    /// often it was started before.
    pub(super) fn plan(&self, index: usize, agent: &AgentLink, local: u32, ranks: &[(u32, Spot, u32)]) -> Plan {
        let ranks = ranks.iter().map(|(rank, spot, restart)| {
            let mut variables = self.place_variables(agent, local, *rank, *spot);
            variables.push(("GRADWIRE_AGENT".to_owned(), index.to_string()));
            variables.push(("GRADWIRE_RESTART".to_owned(), restart.to_string()));
            (*rank, variables)
        });
        Plan { ranks: ranks.collect(), ..self.common.clone() }
    }

    fn place_variables(&self, agent: &AgentLink, local: u32, rank: u32, spot: Spot) -> Vec<(String, String)> {
        let mut variables = vec![
            ("RANK".to_owned(), rank.to_string()),
            ("LOCAL_RANK".to_owned(), spot.slot.to_string()),
            ("LOCAL_WORLD_SIZE".to_owned(), local.max(spot.slot + 1).to_string()),
        ];
        // With several hosts each rank advertises the address under which its host was reached.
        let chosen = ["GRADWIRE_ADDRESS", "GRADWIRE_INTERFACE"].iter().any(|name| std::env::var_os(name).is_some());
        if self.own.is_some() && !chosen {
            let address = host_address(agent, self.own);
            if address.parse::<IpAddr>().is_ok() {
                variables.push(("GRADWIRE_ADDRESS".to_owned(), address));
            }
        }
        variables
    }
}

fn common_variables(
    plan: &LaunchPlan,
    identity: &Identity,
    broker: &BrokerAccess,
    agents: &[AgentLink],
    own: Option<IpAddr>,
) -> Vec<(OsString, OsString)> {
    // Settings of gradwire that this process has hold for all ranks, wherever they run.
    let mut variables: Vec<(OsString, OsString)> =
        std::env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"GRADWIRE_") && !is_given(name)).collect();
    let mut set = |name: &str, value: &str| variables.push((name.into(), value.into()));
    let first = agents.first();
    let (master, port) = first.map_or_else(
        || ("127.0.0.1".to_owned(), 0),
        |agent| (host_address(agent, own), agent.hello.as_ref().map_or(0, |hello| hello.free_port)),
    );
    set("WORLD_SIZE", &plan.ranks.to_string());
    set("MASTER_ADDR", &master);
    set("MASTER_PORT", &port.to_string());
    set("GRADWIRE_JOB", &identity.job);
    set("GRADWIRE_INSTANCE", &identity.instance_hex());
    set("GRADWIRE_SECRET", &identity.secret.to_hex());
    set("GRADWIRE_BROKER", &broker.url);
    if let Some(Token::Text(token)) = &broker.token {
        set("GRADWIRE_BROKER_TOKEN", token);
    }
    if let Some(transport) = plan.transport {
        set("GRADWIRE_TRANSPORT", transport.as_str());
    }
    if let Some(wire) = plan.wire {
        set("GRADWIRE_WIRE", wire.as_str());
    }
    if let Some(least) = plan.ranks_min {
        if crate::job::variable("GRADWIRE_RECOVERY").is_none() {
            set("GRADWIRE_RECOVERY", "redo");
        }
        set("GRADWIRE_RANKS_MIN", &least.to_string());
    }
    if let Some(most) = plan.ranks_max {
        set("GRADWIRE_RANKS_MAX", &most.to_string());
    }
    variables.extend(plan.env.iter().cloned());
    variables
}

/// Whether a variable says what the launcher itself decides: one of another job must not shine through.
fn is_given(name: &OsString) -> bool {
    ["GRADWIRE_SECRET_FILE", "GRADWIRE_SSH", "GRADWIRE_REMOTE"].iter().any(|given| name == given)
}

/// The address, or else the name, under which the other hosts reach this agent's host.
fn host_address(agent: &AgentLink, own: Option<IpAddr>) -> String {
    if agent.host.local {
        return own.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string();
    }
    let host = &agent.host.name;
    let name = host.rsplit_once('@').map_or(host.as_str(), |(_, name)| name);
    match agent.hello.as_ref().and_then(ssh_addresses) {
        Some((_, theirs)) => theirs.to_string(),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(connection: Option<&str>) -> Hello {
        Hello {
            version: String::new(),
            hostname: String::new(),
            ssh_connection: connection.map(str::to_owned),
            free_port: 1,
        }
    }

    #[test]
    fn both_ends_of_an_ssh_connection_are_read() {
        let ends = ssh_addresses(&hello(Some("10.0.0.1 51234 10.0.0.2 22")));
        assert_eq!(ends, Some((IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]))));
        for bad in [None, Some(""), Some("10.0.0.1 51234"), Some("x 1 y 2")] {
            assert_eq!(ssh_addresses(&hello(bad)), None);
        }
    }

    #[test]
    fn identities_differ_and_name_the_job() {
        let (a, b) = (Identity::fresh(None, None).unwrap(), Identity::fresh(Some("mine"), None).unwrap());
        assert_ne!(a.instance, b.instance);
        assert!(a.secret != b.secret);
        assert!(a.job.starts_with("job-"));
        assert_eq!(b.job, "mine");
        let given = Secret::from_bytes([7; 32]);
        assert!(Identity::fresh(None, Some(given.clone())).unwrap().secret == given);
    }
}
