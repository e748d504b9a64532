//! Where a rank can be reached: what it publishes for its peers to dial (docs/wire.md, section 6).

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::wire::{Malformed, Reader, owned_text, put_text};

/// Most addresses in one endpoint.
pub const ADDRESSES_MAX: usize = 16;
/// Longest socket name or host name in an endpoint, in bytes of UTF-8.
pub const ENDPOINT_NAME_BYTES_MAX: usize = 255;

const ADDRESS_V4: u8 = 4;
const ADDRESS_V6: u8 = 6;

/// Names one running kernel: ranks with the same one can share memory. All zero: unknown, equal to no other.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct HostId(pub [u8; 16]);

impl HostId {
    /// Whether ranks at these two hosts are certainly on the same one.
    #[must_use]
    pub fn is_same(self, other: Self) -> bool {
        self == other && self != Self::default()
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({})", crate::secret::hex(&self.0))
    }
}

/// Where one rank listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// TCP addresses, the best first. At most [`ADDRESSES_MAX`] are published.
    pub addresses: Vec<SocketAddr>,
    /// The host it runs on.
    pub host: HostId,
    /// Name of its abstract Unix socket, without the leading zero byte; empty if it has none.
    pub socket: String,
    /// Name of its host, for people.
    pub hostname: String,
}

impl Endpoint {
    /// Appends the endpoint as it travels. Addresses past [`ADDRESSES_MAX`] and names past
    /// [`ENDPOINT_NAME_BYTES_MAX`] are cut off; IPv6 flow labels and scopes are not sent.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let addresses = &self.addresses[..self.addresses.len().min(ADDRESSES_MAX)];
        out.extend_from_slice(&self.host.0);
        out.push(addresses.len() as u8);
        for address in addresses {
            match address.ip() {
                IpAddr::V4(ip) => {
                    out.push(ADDRESS_V4);
                    out.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(ADDRESS_V6);
                    out.extend_from_slice(&ip.octets());
                }
            }
            out.extend_from_slice(&address.port().to_le_bytes());
        }
        put_text(out, &self.socket, ENDPOINT_NAME_BYTES_MAX);
        put_text(out, &self.hostname, ENDPOINT_NAME_BYTES_MAX);
    }

    /// Reads an endpoint; what follows it stays in `reader`.
    ///
    /// # Errors
    /// [`Malformed`] when it ends early, has too many addresses, an address of an unknown family, or a name that is
    /// too long or not UTF-8.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let host = HostId(reader.array()?);
        let count = usize::from(reader.u8()?);
        if count > ADDRESSES_MAX {
            return Err(Malformed("more addresses than an endpoint can have"));
        }
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            addresses.push(match reader.u8()? {
                ADDRESS_V4 => SocketAddrV4::new(Ipv4Addr::from(reader.array::<4>()?), reader.u16()?).into(),
                ADDRESS_V6 => SocketAddrV6::new(Ipv6Addr::from(reader.array::<16>()?), reader.u16()?, 0, 0).into(),
                _ => return Err(Malformed("unknown family of address")),
            });
        }
        let socket = owned_text(reader, ENDPOINT_NAME_BYTES_MAX)?;
        let hostname = owned_text(reader, ENDPOINT_NAME_BYTES_MAX)?;
        Ok(Self { addresses, host, socket, hostname })
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            addresses: vec![([192, 0, 2, 7], 29_500).into(), ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 1).into()],
            host: HostId([9; 16]),
            socket: "gradwire-5f3a".into(),
            hostname: "größe.example".into(),
        }
    }

    fn encoded(endpoint: &Endpoint) -> Vec<u8> {
        let mut out = Vec::new();
        endpoint.encode(&mut out);
        out
    }

    #[test]
    fn an_endpoint_travels_and_leaves_what_follows() {
        for endpoint in [endpoint(), Endpoint::default()] {
            let bytes = [&encoded(&endpoint)[..], b"more"].concat();
            let mut reader = Reader::new(&bytes);
            assert_eq!(Endpoint::decode(&mut reader), Ok(endpoint));
            assert_eq!(reader.bytes(4), Ok(&b"more"[..]));
        }
    }

    #[test]
    fn what_is_too_much_is_cut_so_that_it_can_be_read() {
        let address = endpoint().addresses[0];
        let large = Endpoint {
            addresses: vec![address; 300],
            socket: "s".repeat(1000),
            hostname: "é".repeat(1000),
            ..endpoint()
        };
        let back = Endpoint::decode(&mut Reader::new(&encoded(&large))).unwrap();
        assert_eq!(back.addresses, vec![address; ADDRESSES_MAX]);
        assert_eq!(back.socket, "s".repeat(ENDPOINT_NAME_BYTES_MAX));
        assert_eq!(back.hostname, "é".repeat(ENDPOINT_NAME_BYTES_MAX / 2));
    }

    #[test]
    fn what_a_peer_may_not_publish_is_refused() {
        let good = encoded(&endpoint());
        for short in 0..good.len() {
            assert!(Endpoint::decode(&mut Reader::new(&good[..short])).is_err(), "{short} bytes");
        }
        let mut too_many = good.clone();
        too_many[16] = ADDRESSES_MAX as u8 + 1;
        let mut family = good.clone();
        family[17] = 5;
        for (bad, flaw) in
            [(too_many, "more addresses than an endpoint can have"), (family, "unknown family of address")]
        {
            assert_eq!(Endpoint::decode(&mut Reader::new(&bad)), Err(Malformed(flaw)));
        }
    }

    #[test]
    fn an_unknown_host_is_the_same_as_no_other() {
        assert!(HostId([1; 16]).is_same(HostId([1; 16])));
        assert!(!HostId([1; 16]).is_same(HostId([2; 16])));
        assert!(!HostId::default().is_same(HostId::default()));
    }
}
