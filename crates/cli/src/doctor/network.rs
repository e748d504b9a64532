//! Sockets, interfaces and devices.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use super::system::text;
use super::{Finding, bytes};

/// Below this a long, fast path is not filled.
const TCP_BUFFER_BYTES_MIN: u64 = 4 << 20;
/// How long a byte over loopback may take.
const LOOPBACK_TIME_MAX: Duration = Duration::from_secs(2);

pub(super) fn examine() -> Vec<Finding> {
    vec![abstract_sockets(), loopback(), tcp_buffers(), interfaces(), rdma()]
}

fn abstract_sockets() -> Finding {
    const SUBJECT: &str = "abstract unix sockets";
    let tried = (|| -> io::Result<()> {
        let address = SocketAddr::from_abstract_name(format!("gradwire-doctor-{}", std::process::id()))?;
        let _listener = UnixListener::bind_addr(&address)?;
        UnixStream::connect_addr(&address).map(drop)
    })();
    match tried {
        Ok(()) => Finding::ok(SUBJECT, "work"),
        Err(error) => {
            Finding::fail(SUBJECT, error.to_string(), "ranks of one host cannot share memory; use --transport tcp")
        }
    }
}

fn loopback() -> Finding {
    const SUBJECT: &str = "loopback TCP";
    let tried = (|| -> io::Result<()> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let mut stream = TcpStream::connect_timeout(&listener.local_addr()?, LOOPBACK_TIME_MAX)?;
        stream.write_all(b"x")?;
        let (mut accepted, _) = listener.accept()?;
        accepted.set_read_timeout(Some(LOOPBACK_TIME_MAX))?;
        accepted.read_exact(&mut [0])
    })();
    match tried {
        Ok(()) => Finding::ok(SUBJECT, "works"),
        Err(error) => {
            Finding::fail(SUBJECT, error.to_string(), "`ip link set lo up`, and let the firewall pass 127.0.0.1")
        }
    }
}

fn tcp_buffers() -> Finding {
    const SUBJECT: &str = "TCP buffers";
    let largest =
        |name: &str| text(format!("/proc/sys/net/ipv4/{name}"))?.split_ascii_whitespace().nth(2)?.parse().ok();
    match (largest("tcp_rmem"), largest("tcp_wmem")) {
        (Some(receive), Some(send)) => {
            let fact = format!("up to {} to receive, {} to send", bytes(receive), bytes(send));
            let remedy = "for fast networks with long paths: `sysctl -w net.ipv4.tcp_rmem='4096 131072 6291456' \
                          net.ipv4.tcp_wmem='4096 65536 6291456'`";
            Finding::ok_if(receive.min(send) >= TCP_BUFFER_BYTES_MIN, SUBJECT, fact, remedy)
        }
        _ => Finding::ok(SUBJECT, "not told by this system"),
    }
}

fn interfaces() -> Finding {
    const SUBJECT: &str = "network interfaces";
    let mut up = Vec::new();
    let mut names: Vec<_> =
        fs::read_dir("/sys/class/net").into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    for name in names.iter().filter_map(|name| name.to_str()).filter(|name| *name != "lo") {
        let read = |file: &str| text(format!("/sys/class/net/{name}/{file}"));
        if read("operstate").is_some_and(|state| state == "down") {
            continue;
        }
        let speed = read("speed").and_then(|speed| speed.parse::<i64>().ok()).filter(|speed| *speed > 0);
        let mtu = read("mtu").map(|mtu| format!("MTU {mtu}"));
        let speed = speed.map(|speed| format!("{speed} Mbit/s"));
        let details: Vec<_> = speed.into_iter().chain(mtu).collect();
        up.push(format!("{name} ({})", details.join(", ")));
    }
    if up.is_empty() {
        return Finding::warn(SUBJECT, "only loopback", "jobs on several hosts need a network");
    }
    Finding::ok(SUBJECT, up.join(", "))
}

fn rdma() -> Finding {
    const SUBJECT: &str = "RDMA devices";
    let mut names: Vec<_> = fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    if names.is_empty() {
        return Finding::ok(SUBJECT, "none");
    }
    Finding::ok(SUBJECT, format!("{}; not used by this version", names.join(", ")))
}
