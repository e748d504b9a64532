//! Hosts and slots that are added and taken away while the job runs, as its file of hosts says.

use std::time::Instant;

use signal_hook::consts::SIGTERM;

use super::driver::Driver;
use super::elastic::{POLL_INTERVAL, Site, say};
use super::hosts::{self, Host, HostSlots};
use super::journal::Happening;
use super::ranks::State;
use crate::agent::wire::Command;

impl Driver {
    /// Looks whether the file has changed, if it is time.
    pub(super) fn look_at_hosts(&mut self, now: Instant) {
        if now < self.poll_at {
            return;
        }
        self.poll_at = now + POLL_INTERVAL;
        match self.hosts_file.as_mut().and_then(|file| file.poll()) {
            Some(Ok(list)) => self.follow(&list, now),
            Some(Err(error)) => say(&format!("{error}; nothing changes")),
            None => {}
        }
    }

    fn follow(&mut self, list: &[HostSlots], now: Instant) {
        let hosts = hosts::merge(list);
        if let Some(words) = self.ranks_min.and_then(|least| too_few(&hosts, least)) {
            say(&words);
        }
        for site in 0..self.sites.len() {
            let known = &self.sites[site].host;
            let slots = hosts.iter().find(|host| host.is(known)).map_or(0, |host| host.slots);
            if slots < known.slots {
                self.take_away(site, slots, now);
            }
        }
        for host in hosts {
            let site = self.sites.iter().position(|site| site.host.is(&host)).unwrap_or_else(|| {
                self.sites.push(Site::new(Host { slots: 0, ..host.clone() }, 0, now));
                self.sites.len() - 1
            });
            if host.slots > self.sites[site].host.slots {
                self.add(site, host.slots, now);
            }
        }
    }

    fn add(&mut self, site: usize, slots: u32, now: Instant) {
        let place = &mut self.sites[site];
        if !place.host.local && !self.reachable {
            let host = &place.host.name;
            return say(&format!(
                "{host} is not added: the job's broker serves this machine only; start the job with --address IP, or with \
                 --broker URL"
            ));
        }
        place.wanted += slots - place.host.slots;
        (place.host.slots, place.failures, place.retry_at) = (slots, 0, now);
    }

    /// One more rank is wanted on the first host, for which a slot is made if none is free.
    pub(super) fn add_one(&mut self) {
        let slots = self.sites[0].host.slots;
        let host = &mut self.sites[0];
        host.wanted += 1;
        if self.ranks.free_slot(0, slots).is_none() {
            host.host.slots += 1;
        }
    }

    /// The ranks that have no slot any more are told to end: those in the last slots.
    fn take_away(&mut self, site: usize, slots: u32, now: Instant) {
        let place = &mut self.sites[site];
        place.wanted = place.wanted.saturating_sub(place.host.slots - slots);
        place.host.slots = slots;
        let host = place.host.name.clone();
        let leaves = |rank| matches!(self.ranks.state(rank), Some(State::Running { leaving: true, .. }));
        let mut stay: Vec<(u32, u32)> = self.ranks.on_site(site).filter(|(rank, _)| !leaves(*rank)).collect();
        stay.sort_by_key(|(_, slot)| *slot);
        for (rank, _) in stay.into_iter().skip(slots as usize) {
            self.remove(rank, &host, now);
        }
    }

    fn remove(&mut self, rank: u32, host: &str, now: Instant) {
        match self.ranks.state(rank) {
            Some(State::Running { spot, agent, since, .. }) => {
                let kill_at = Some(now + self.grace);
                self.ranks.set(rank, State::Running { spot, agent, since, leaving: true, kill_at });
                let _ = self.agents[agent].tell(&Command::Signal { number: SIGTERM, ranks: Some(vec![rank]) });
            }
            _ => self.ranks.set(rank, State::Removed),
        }
        let reason = "its slot was taken away".to_owned();
        say(&format!("rank {rank} on {host} is told to end: {reason}"));
        self.journal.note(Happening::Removed, rank, host, Some(reason));
    }
}

/// That a job which needs at least so many ranks has too few slots, if so. Allowed all the same: others may follow.
fn too_few(hosts: &[Host], least: u32) -> Option<String> {
    let slots = hosts.iter().fold(0_u32, |sum, host| sum.saturating_add(host.slots));
    let plural = if slots == 1 { "" } else { "s" };
    (slots < least).then(|| {
        format!(
            "the hosts file has {slots} slot{plural}, and --min-ranks asks for {least}: add slots, or the ranks that are left \
             wait for others until their deadline, and fail"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_slots_are_told_with_both_numbers() {
        let host = |name: &str, slots| Host { name: name.to_owned(), local: false, slots };
        assert_eq!(too_few(&[host("a", 1), host("b", 2)], 3), None);
        let words = too_few(&[host("a", 1), host("b", 2)], 4).unwrap();
        assert!(words.starts_with("the hosts file has 3 slots, and --min-ranks asks for 4: add slots"), "{words}");
        assert!(too_few(&[host("a", 1)], 2).unwrap().contains("1 slot, and"));
    }
}
