//! Which addresses this host has, and which host it is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;

use gradwire_proto::member::HostId;
use gradwire_proto::{Fault, FaultKind, Secret};
use socket2::SockRef;

/// Addresses of documentation networks (RFC 5737, RFC 3849). Connecting a datagram socket to them sends nothing: it
/// only makes the kernel choose the address it would send from.
const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));
const DISCARD_PORT: u16 = 9;

/// The addresses that peers will likely reach this host at: loopback for those on it, and the one it sends from by
/// default; where there is no default route, those of all interfaces.
pub(super) fn likely() -> Vec<IpAddr> {
    let mut far: Vec<IpAddr> = [FAR_V4, FAR_V6].into_iter().filter_map(|far| source_address(far, None)).collect();
    if far.is_empty() {
        let names = interface_names();
        far = names.iter().filter(|name| *name != "lo").flat_map(|name| addresses_on(name)).collect();
    }
    let mut all = vec![Ipv4Addr::LOCALHOST.into()];
    for address in far {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all.truncate(gradwire_proto::member::ADDRESSES_MAX);
    all
}

/// The addresses of one interface, IPv4 first.
pub(super) fn of_interface(name: &str) -> Result<Vec<IpAddr>, Fault> {
    let addresses = addresses_on(name);
    if !addresses.is_empty() {
        return Ok(addresses);
    }
    let names = interface_names();
    let what = if names.iter().any(|known| known == name) { "has no address" } else { "does not exist" };
    Err(Fault::new(
        FaultKind::InvalidArgument,
        format!(
            "the network interface '{name}' {what} on {}: set GRADWIRE_INTERFACE to one of {}",
            hostname(),
            names.join(", ")
        ),
    ))
}

fn addresses_on(name: &str) -> Vec<IpAddr> {
    if name == "lo" {
        return vec![Ipv4Addr::LOCALHOST.into()];
    }
    [FAR_V4, FAR_V6].into_iter().filter_map(|far| source_address(far, Some(name))).collect()
}

/// The address from which the kernel would send to `far`, over any interface or this one.
fn source_address(far: IpAddr, interface: Option<&str>) -> Option<IpAddr> {
    let any: IpAddr = if far.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    if let Some(name) = interface {
        SockRef::from(&socket).bind_device(Some(name.as_bytes())).ok()?;
    }
    socket.connect(SocketAddr::new(far, DISCARD_PORT)).ok()?;
    let address = socket.local_addr().ok()?.ip();
    // Link-local addresses mean nothing without the interface, which is not the same on other hosts.
    let local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!address.is_unspecified() && !address.is_loopback() && !local).then_some(address)
}

fn interface_names() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The host this process runs on: one boot of one kernel, and the network namespace, because abstract sockets
/// cannot be reached from another. All zero, the same as no other, where that cannot be found out.
pub(super) fn host_id() -> HostId {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
    let namespace = std::fs::metadata("/proc/self/ns/net").map(|metadata| metadata.ino());
    let (Ok(boot), Ok(namespace)) = (boot, namespace) else { return HostId::default() };
    // A hash, so that a boot id, which some treat as private, is not published.
    let digest = Secret::from_bytes([0; 32]).proof("gradwire host", &[boot.trim_ascii(), &namespace.to_le_bytes()]);
    HostId(std::array::from_fn(|index| digest[index]))
}

/// The name of this host, for people.
pub(super) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
