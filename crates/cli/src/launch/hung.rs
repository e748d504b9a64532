//! Ranks that hang: the others went on without them, and their processes are still there. One that wakes up learns that it
//! was removed, and ends by itself. One that does not would keep its place from a restart, and the job from its end.
//!
//! That the others went on stands in the control log, which is read every few seconds while ranks may be lost. Programs that
//! do not use gradwire leave nothing there, and may take as long as they like.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gradwire_control::Census;
use signal_hook::consts::SIGKILL;

use super::agents::Event;
use super::driver::Driver;
use super::elastic::say;
use super::ranks::State;
use crate::agent::wire::Command;

/// How often the log is read.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// How a rank ended that was killed because of that. The signal alone would look like one of somebody else's.
pub(super) const WORDS: &str = "hung and was killed";

/// Ranks that the others went on without, while their processes run.
pub(super) struct Hung {
    /// How long such a process may still be there.
    patience: Duration,
    look_at: Option<Instant>,
    /// Since when it is read, while it is.
    reading: Option<Instant>,
    /// When which process began, and since when it is known.
    known: HashMap<u32, (Instant, Instant)>,
    /// When processes began that were killed.
    killed: HashMap<u32, Instant>,
}

impl Hung {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, look_at: None, reading: None, known: HashMap::new(), killed: HashMap::new() }
    }

    /// The log is to be read by then, where that would be later.
    pub(super) fn look_by(&mut self, at: Instant) {
        self.look_at = Some(self.look_at.map_or(at, |before| before.min(at)));
    }

    /// Whether this rank's process, which began at `began`, was killed because it hung.
    pub(super) fn was_killed(&mut self, rank: u32, began: Instant) -> bool {
        self.killed.remove(&rank) == Some(began)
    }

    /// Whether this rank's process, which began at `began`, has been among them for too long.
    fn is_overdue(&mut self, rank: u32, began: Instant, is_removed: bool, now: Instant) -> bool {
        if !is_removed {
            self.known.remove(&rank);
            return false;
        }
        let known = self.known.entry(rank).or_insert((began, now));
        if known.0 != began {
            *known = (began, now);
        }
        now.duration_since(known.1) >= self.patience && self.known.remove(&rank).is_some()
    }
}

impl Driver {
    /// Reads who is a member, if it is time.
    pub(super) fn look_for_hung(&mut self, now: Instant) {
        // Not at the start, when nobody has joined.
        let due = *self.hung.look_at.get_or_insert(now + LOOK_EVERY) <= now;
        if due && self.hung.reading.is_none() {
            self.hung.look_at = Some(now + LOOK_EVERY);
            self.hung.reading = self.read_log(Event::Members).then_some(now);
        }
    }

    /// The log was read, if it could be.
    pub(super) fn take_members(&mut self, census: Option<Census>) {
        let Some(read_at) = self.hung.reading.take() else { return };
        let Some(census) = census.filter(|_| !self.closed && !self.stopping) else { return };
        let now = Instant::now();
        for (rank, state) in self.ranks.iter().collect::<Vec<_>>() {
            let State::Running { spot, agent, since, leaving: false, .. } = state else { continue };
            let is_removed = self.prospects.is_removed(rank, self.ranks.starts(rank), &census);
            if self.hung.is_overdue(rank, since, is_removed, now) {
                let host = &self.sites[spot.site].host.name;
                say(&format!("rank {rank} on {host} hangs: the others went on without it, so it is killed"));
                self.hung.killed.insert(rank, since);
                let _ = self.agents[agent].tell(&Command::Signal { number: SIGKILL, ranks: Some(vec![rank]) });
            }
        }
        self.find_vanished(&census, read_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_given_time_to_end_by_itself_and_its_successor_is_another_one() {
        let mut hung = Hung::new(Duration::from_secs(5));
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(!hung.is_overdue(1, began, true, at(10)));
        assert!(!hung.is_overdue(1, began, true, at(14)));
        assert!(!hung.is_overdue(2, began, true, at(15)), "each has its own time");
        assert!(hung.is_overdue(1, began, true, at(15)));
        // It joined again.
        assert!(!hung.is_overdue(2, began, false, at(20)));
        assert!(!hung.is_overdue(2, began, true, at(21)));
        // Another process has its rank.
        assert!(!hung.is_overdue(2, at(25), true, at(26)));
        assert!(!hung.is_overdue(2, at(25), true, at(30)));
        assert!(hung.is_overdue(2, at(25), true, at(31)));
    }
}
