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

/// A host of the job: all that a list says of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// The name by which the list has it first.
    pub(super) name: String,
    /// Whether it is this machine.
    pub(super) local: bool,
    /// Most ranks there.
    pub(super) slots: u32,
}

impl Host {
    /// Whether both are one machine, as far as names tell.
    pub(super) fn is(&self, other: &Self) -> bool {
        (self.local && other.local) || self.name == other.name
    }
}

/// The hosts of a list. One that is named twice has the slots of both; all names of this machine are one host.
pub(super) fn merge(list: &[HostSlots]) -> Vec<Host> {
    let mut merged: Vec<Host> = Vec::new();
    for HostSlots { name, slots } in list {
        let host = Host { name: name.clone(), local: is_local(name), slots: *slots };
        match merged.iter_mut().find(|known| known.is(&host)) {
            Some(known) => known.slots = known.slots.saturating_add(host.slots),
            None => merged.push(host),
        }
    }
    merged
}

/// The hosts on which so many ranks can be: those of a list or, if that is empty, this machine.
pub(super) fn find(ranks: u32, list: &[HostSlots]) -> Result<Vec<Host>, LaunchError> {
    if ranks == 0 || ranks > WORLD_SIZE_MAX {
        return Err(LaunchError::usage(format!("{ranks} ranks cannot be: a job has 1 to {WORLD_SIZE_MAX}")));
    }
    if list.is_empty() {
        return Ok(vec![Host { name: "localhost".to_owned(), local: true, slots: ranks }]);
    }
    let hosts = merge(list);
    let total: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
    if u64::from(ranks) > total {
        let list = hosts.iter().map(|host| format!("{}:{}", host.name, host.slots)).collect::<Vec<_>>().join(",");
        return Err(LaunchError::usage(format!(
            "{ranks} ranks do not fit into the {total} slots of {list}: give hosts more slots (HOST:SLOTS) or start \
             fewer ranks (-n {total})"
        )));
    }
    Ok(hosts)
}

/// How many ranks each host gets: they fill the slots in the order of the hosts.
pub(super) fn distribute(ranks: u32, hosts: &[Host]) -> Vec<u32> {
    let mut rest = ranks;
    let mut take = |slots: u32| {
        let count = slots.min(rest);
        rest -= count;
        count
    };
    hosts.iter().map(|host| take(host.slots)).collect()
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
        let place = |ranks, list: &str| {
            let hosts = find(ranks, &hosts(list)).unwrap();
            let counts = distribute(ranks, &hosts);
            hosts.into_iter().zip(counts).map(|(host, count)| (host.name, host.local, count)).collect::<Vec<_>>()
        };
        assert_eq!(place(3, "a:2,b:2"), [("a".to_owned(), false, 2), ("b".to_owned(), false, 1)]);
        let placed = place(4, "a:1,localhost:1,a:1,127.0.0.1:1");
        assert_eq!(placed, [("a".to_owned(), false, 2), ("localhost".to_owned(), true, 2)]);
        assert_eq!(place(2, "a:2,b:2")[1].2, 0);
        assert!(find(2, &[]).unwrap()[0].local);
        assert!(!is_local("127.0.0.2"));
        assert!(is_local(&agent::hostname()));
    }

    #[test]
    fn too_many_ranks_name_the_remedy() {
        let text = find(5, &hosts("a:2,b:2")).unwrap_err().to_string();
        assert!(text.contains("-n 4") && text.contains("a:2,b:2"), "{text}");
        assert!(find(0, &[]).is_err());
        assert!(find(WORLD_SIZE_MAX + 1, &[]).is_err());
    }
}
