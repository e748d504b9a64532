//! At which port ranks listen, and where they say that they are reached. The ranks of a host have the same variables, so
//! each has the port that is as far from the given one as it is from the first rank there.

use std::net::{IpAddr, SocketAddr};

use gradwire_proto::{Fault, FaultKind};

use super::Variables;

/// What the environment says of ports. 0 stands for any port that is free, or for the one at which the rank listens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) port: u16,
    pub(super) advertise: Option<SocketAddr>,
}

impl Ports {
    /// Those of the first rank on its host.
    pub(super) fn read(variables: Variables<'_>) -> Result<Self, Fault> {
        let port = match variables("GRADWIRE_PORT") {
            None => 0,
            Some(text) => text
                .trim()
                .parse()
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| wrong("GRADWIRE_PORT", &text, "a TCP port from 1 to 65535"))?,
        };
        let advertise = variables("GRADWIRE_ADVERTISE").map(|text| {
            let bare = || text.trim().parse().map(|address: IpAddr| SocketAddr::new(address, 0));
            let address = text.trim().parse().or_else(|_| bare()).ok();
            let address = address.filter(|address| !address.ip().is_unspecified());
            address.ok_or_else(|| wrong("GRADWIRE_ADVERTISE", &text, "an IP address, or one with a port"))
        });
        Ok(Self { port, advertise: advertise.transpose()? })
    }

    /// Those of another rank there.
    pub(super) fn of(self, local_rank: u32) -> Result<Self, Fault> {
        let nth = |first: u16| {
            if first == 0 {
                return Ok(0);
            }
            u16::try_from(local_rank).ok().and_then(|rank| first.checked_add(rank)).ok_or_else(|| {
                let detail = format!("there is no port {first} + {local_rank} for this rank: give a lower one");
                Fault::new(FaultKind::InvalidArgument, detail)
            })
        };
        let advertise = match self.advertise {
            Some(first) => Some(SocketAddr::new(first.ip(), nth(first.port())?)),
            None => None,
        };
        Ok(Self { port: nth(self.port)?, advertise })
    }
}

fn wrong(name: &str, text: &str, expected: &str) -> Fault {
    Fault::new(FaultKind::InvalidArgument, format!("{name} is '{text}': expected {expected}"))
}
