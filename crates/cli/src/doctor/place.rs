//! The broker, the launcher and the tools around.

use std::env;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use gradwire_transport::establish::{ListenConfig, Listeners};

use super::Finding;
use crate::broker::RunningBroker;

/// How long a broker may take to accept.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

pub(super) fn examine() -> Vec<Finding> {
    vec![
        advertised(),
        embedded_broker(),
        launcher(),
        tool("ssh", "needed for hosts by -H"),
        tool("mpirun", "not needed: gradwire launch does the same"),
    ]
}

fn advertised() -> Finding {
    const SUBJECT: &str = "advertised address";
    let config = ListenConfig::default();
    match Listeners::bind(&config) {
        Ok(listeners) => {
            let list: Vec<_> = listeners.endpoint().addresses.iter().map(|address| address.ip().to_string()).collect();
            Finding::ok(
                SUBJECT,
                format!("{} (GRADWIRE_ADDRESS or GRADWIRE_INTERFACE chooses another)", list.join(", ")),
            )
        }
        Err(fault) => Finding::fail(SUBJECT, fault.detail, "set GRADWIRE_ADDRESS to an address of this host"),
    }
}

fn embedded_broker() -> Finding {
    const SUBJECT: &str = "embedded broker";
    let remedy = "allow it to listen on 127.0.0.1, or give a broker by --broker URL";
    match RunningBroker::start_for_job(None, "doctor".to_owned()) {
        Err(fault) => Finding::fail(SUBJECT, fault.detail, remedy),
        Ok(broker) => match reach(&broker.url()) {
            Ok(()) => Finding::ok(SUBJECT, "starts and answers"),
            Err(error) => Finding::fail(SUBJECT, error, remedy),
        },
    }
}

/// Connects to the broker's port.
fn reach(url: &str) -> Result<(), String> {
    let (scheme, rest) = url.split_once("://").ok_or("not a URL")?;
    let host = rest.split(['/', '?', ',']).next().unwrap_or_default();
    let default_port = if scheme == "pulsar+ssl" { 6651 } else { 6650 };
    let bare = host.rsplit_once(']').map_or_else(|| !host.contains(':'), |(_, port)| port.is_empty());
    let target = if bare { format!("{host}:{default_port}") } else { host.to_owned() };
    let addresses: Vec<_> = target.to_socket_addrs().map_err(|error| format!("{target}: {error}"))?.collect();
    let mut last = format!("{target} has no address");
    // All addresses together get the time of one.
    let share = CONNECT_TIME_MAX / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
    for address in addresses {
        match TcpStream::connect_timeout(&address, share) {
            Ok(_) => return Ok(()),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

fn launcher() -> Finding {
    const SUBJECT: &str = "launcher";
    match gradwire::env::seat(&|name| env::var(name).ok().filter(|value| !value.is_empty())) {
        Ok(seat) => Finding::ok(SUBJECT, format!("{}: rank {} of {}", seat.launcher, seat.rank.0, seat.world_size)),
        Err(fault) => Finding::fail(SUBJECT, fault.detail, "unset what an earlier job left in the environment"),
    }
}

fn tool(name: &'static str, use_of_it: &str) -> Finding {
    match find(name) {
        Some(path) => Finding::ok(name, path.display().to_string()),
        None if name == "ssh" => Finding::warn(name, format!("not on the PATH; {use_of_it}"), "install an ssh client"),
        None => Finding::ok(name, format!("not on the PATH; {use_of_it}")),
    }
}

fn find(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(name)).find(|path| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_without_a_port_has_the_usual_one() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(reach(&format!("pulsar://127.0.0.1:{port}")), Ok(()));
        assert_eq!(reach(&format!("pulsar://127.0.0.1:{port}/")), Ok(()));
        assert!(reach("pulsar+ssl://127.0.0.1").unwrap_err().contains("6651"));
        assert!(reach("pulsar://[::1]").is_err());
        assert!(reach("nothing").is_err());
    }
}
