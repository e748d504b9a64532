//! Which complaints about clients were made already: a client that tries again and again would fill the log.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a complaint is not repeated.
const REPEAT_AFTER: Duration = Duration::from_secs(60);
/// Most complaints in that time.
const COMPLAINTS_MAX: usize = 256;

/// Complaints of the last minute.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    since: Option<Instant>,
    made: BTreeSet<(IpAddr, String)>,
}

impl Complaints {
    /// Whether this is to be said, and was not yet.
    pub(super) fn is_new(&mut self, peer: IpAddr, reason: &str, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= REPEAT_AFTER) {
            self.since = Some(now);
            self.made.clear();
        }
        self.made.len() < COMPLAINTS_MAX && self.made.insert((peer, reason.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_made_once_a_minute_for_each_peer() {
        let (mut complaints, now) = (Complaints::default(), Instant::now());
        let peers = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])];
        for peer in peers {
            assert!(complaints.is_new(peer, "a", now) && !complaints.is_new(peer, "a", now + REPEAT_AFTER / 2));
            assert!(complaints.is_new(peer, "b", now));
        }
        assert!(complaints.is_new(peers[0], "a", now + REPEAT_AFTER));
    }

    #[test]
    fn there_are_only_so_many_in_a_minute() {
        let (mut complaints, now) = (Complaints::default(), Instant::now());
        let peer = IpAddr::from([10, 0, 0, 1]);
        let made = (0..1000).filter(|number| complaints.is_new(peer, &number.to_string(), now)).count();
        assert_eq!(made, COMPLAINTS_MAX);
        assert!(complaints.is_new(peer, "a", now + REPEAT_AFTER));
    }
}
