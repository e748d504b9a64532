//! Which ranks run where.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use gradwire_proto::limits::WORLD_SIZE_MAX;

use super::report::LaunchError;
use crate::agent;

/// A host and how many ranks it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostSlots {
    /// The name, as ssh takes it: `host`, `user@host`, an address, or an alias of `~/.ssh/config`.
    pub(crate) name: String,
    /// Most ranks there.
    pub(crate) slots: u32,
}

impl FromStr for HostSlots {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, slots) = split(text).ok_or_else(|| format!("'{text}': expected HOST or HOST:SLOTS"))?;
        let slots = match slots {
            None => 1,
            Some(slots) => slots.parse().map_err(|_| format!("'{text}': '{slots}' is not a number of slots"))?,
        };
        if slots == 0 {
            return Err(format!("'{text}': a host needs at least one slot"));
        }
        // A name that begins so would be an option to ssh.
        if name.is_empty() || name.starts_with('-') || name.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(format!("'{text}': '{name}' is not the name of a host"));
        }
        Ok(Self { name: name.to_owned(), slots })
    }
}

/// Splits off the slots. An IPv6 address with slots stands in brackets; a bare one has more than one colon.
fn split(text: &str) -> Option<(&str, Option<&str>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (address, rest) = rest.split_once(']')?;
        return if rest.is_empty() { Some((address, None)) } else { Some((address, Some(rest.strip_prefix(':')?))) };
    }
    match text.split_once(':') {
        Some((_, rest)) if rest.contains(':') => Some((text, None)),
        Some((name, slots)) => Some((name, Some(slots))),
        None => Some((text, None)),
    }
}

impl fmt::Display for HostSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.slots)
    }
}

/// The ranks of one host: a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Its name; `localhost` for this machine.
    pub(crate) host: String,
    /// Whether that is this machine.
    pub(crate) local: bool,
    /// The first rank there.
    pub(crate) first: u32,
    /// How many ranks there.
    pub(crate) count: u32,
}

/// Distributes ranks over hosts, in blocks, in the order of the hosts. A host that is named twice has the slots of
/// both; all names of this machine are one host. Without hosts, all ranks run on this machine.
pub(crate) fn place(ranks: u32, hosts: &[HostSlots]) -> Result<Vec<Placement>, LaunchError> {
    if ranks == 0 || ranks > WORLD_SIZE_MAX {
        return Err(LaunchError::usage(format!("{ranks} ranks cannot be: a job has 1 to {WORLD_SIZE_MAX}")));
    }
    if hosts.is_empty() {
        return Ok(vec![Placement { host: "localhost".to_owned(), local: true, first: 0, count: ranks }]);
    }
    let mut merged: Vec<(String, bool, u64)> = Vec::new();
    for host in hosts {
        let local = is_local(&host.name);
        let known = merged.iter_mut().find(|(name, known_local, _)| (local && *known_local) || *name == host.name);
        match known {
            Some((_, _, slots)) => *slots += u64::from(host.slots),
            None => merged.push((host.name.clone(), local, host.slots.into())),
        }
    }
    let total: u64 = merged.iter().map(|(_, _, slots)| slots).sum();
    if u64::from(ranks) > total {
        let list = merged.iter().map(|(name, _, slots)| format!("{name}:{slots}")).collect::<Vec<_>>().join(",");
        return Err(LaunchError::usage(format!(
            "{ranks} ranks do not fit into the {total} slots of -H {list}: give hosts more slots (-H HOST:SLOTS) or \
             start fewer ranks (-n {total})"
        )));
    }
    let mut first = 0;
    let mut placements = Vec::new();
    for (host, local, slots) in merged {
        let count = (ranks - first).min(u32::try_from(slots).unwrap_or(u32::MAX));
        if count > 0 {
            placements.push(Placement { host, local, first, count });
            first += count;
        }
    }
    Ok(placements)
}

/// Whether a name is one of this machine. Another loopback address than 127.0.0.1 is not: whoever writes 127.0.0.2
/// wants to go through ssh.
fn is_local(name: &str) -> bool {
    let own = agent::hostname();
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let loopback = name.parse::<IpAddr>().is_ok_and(|address| {
        address == IpAddr::from([127, 0, 0, 1]) || address == IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])
    });
    name == "localhost" || loopback || name == own || (!name.contains('.') && name == short(&own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<HostSlots> {
        text.split(',').map(|host| host.parse().unwrap()).collect()
    }

    #[test]
    fn hosts_are_read() {
        let read = |text: &str| text.parse::<HostSlots>().map(|host| (host.name, host.slots));
        assert_eq!(read("a"), Ok(("a".to_owned(), 1)));
        assert_eq!(read("me@a.b:4"), Ok(("me@a.b".to_owned(), 4)));
        assert_eq!(read("[fe80::1]:2"), Ok(("fe80::1".to_owned(), 2)));
        assert_eq!(read("fe80::1"), Ok(("fe80::1".to_owned(), 1)));
        for bad in ["", ":2", "a:", "a:0", "a:x", "a:-1", "-oProxyCommand=x", "a b", "[::1", "[::1]2"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranks_are_placed_in_blocks() {
        let placed = place(3, &hosts("a:2,b:2")).unwrap();
        let blocks: Vec<_> = placed.iter().map(|p| (p.host.as_str(), p.local, p.first, p.count)).collect();
        assert_eq!(blocks, [("a", false, 0, 2), ("b", false, 2, 1)]);
        let placed = place(4, &hosts("a:1,localhost:1,a:1,127.0.0.1:1")).unwrap();
        let blocks: Vec<_> = placed.iter().map(|p| (p.host.as_str(), p.local, p.first, p.count)).collect();
        assert_eq!(blocks, [("a", false, 0, 2), ("localhost", true, 2, 2)]);
        assert_eq!(place(2, &hosts("a:2,b:2")).unwrap().len(), 1);
        assert!(place(2, &[]).unwrap()[0].local);
        assert!(!is_local("127.0.0.2"));
        assert!(is_local(&agent::hostname()));
    }

    #[test]
    fn too_many_ranks_name_the_remedy() {
        let text = place(5, &hosts("a:2,b:2")).unwrap_err().to_string();
        assert!(text.contains("-n 4") && text.contains("a:2,b:2"), "{text}");
        assert!(place(0, &[]).is_err());
        assert!(place(WORLD_SIZE_MAX + 1, &[]).is_err());
    }
}
