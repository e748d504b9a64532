//! Ranks that end with status 0 and have not left the job, so that the others went on without them: the program ended without
//! closing its group, or a script around it hides how it ended (`train | tee log`). Such a rank is lost. It is not started again:
//! by 0 it says that it is through, and one that ends so with the job's last step would wait for others that are through too.
//!
//! That the others went on stands in the control log, as it was read after they had time to notice. Ranks that end together, at
//! the end of a job, are left alone: none of them went on without another.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gradwire_control::Census;

use super::driver::Driver;
use super::elastic::say;
use super::journal::Happening;
use super::ranks::State;
use super::report::Failure;
use crate::agent::wire::End;

/// How long the others may take to notice an end, by its links, and to write that down. Ranks that end within this time end
/// together.
const NOTICED_WITHIN: Duration = Duration::from_millis(500);
const WORDS: &str = "exited with code 0 and had not left the job";

/// Ranks that ended with 0, as far as they are not known to have vanished.
#[derive(Default)]
pub(super) struct Vanished {
    /// Where, and when that was heard.
    ended: HashMap<u32, (String, Instant)>,
    /// When the last of all ranks ended, well or not.
    last: Option<Instant>,
}

impl Vanished {
    pub(super) fn ended(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// Those that had ended for long enough at this time, in order.
    fn before(&self, at: Instant) -> Vec<u32> {
        let long_ago =
            self.ended.iter().filter(|(_, (_, ended))| at.saturating_duration_since(*ended) >= NOTICED_WITHIN);
        let mut ranks: Vec<u32> = long_ago.map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks
    }
}

impl Driver {
    /// A rank has ended with 0 by itself.
    pub(super) fn ended_well(&mut self, rank: u32, host: &str) {
        let now = Instant::now();
        if self.ranks_min.is_some() {
            self.vanished.ended.insert(rank, (host.to_owned(), now));
            self.hung.look_by(now + NOTICED_WITHIN);
        }
    }

    /// The log was read, at this time or later.
    pub(super) fn find_vanished(&mut self, census: &Census, read_at: Instant) {
        for rank in self.vanished.before(read_at) {
            if self.prospects.is_removed(rank, self.ranks.starts(rank), census)
                && let Some((host, _)) = self.vanished.ended.remove(&rank)
            {
                self.has_vanished(rank, host);
            }
        }
    }

    /// All ranks have ended: the log is read once more if one ended well before the last.
    pub(super) fn end_vanished(&mut self) {
        let Some(last) = self.vanished.last.filter(|last| !self.vanished.before(*last).is_empty()) else { return };
        if self.report.failure.is_none()
            && !self.stopping
            && !self.is_interrupted()
            && let Some(census) = self.prospects.read()
        {
            self.find_vanished(&census, last);
        }
    }

    fn has_vanished(&mut self, rank: u32, host: String) {
        let end = End::Code(0);
        if self.ranks.state(rank) != Some(State::Ended(end)) {
            return;
        }
        self.ranks.set(rank, State::Lost(end));
        let again = match self.ranks.restarts() {
            (_, 0) => "",
            _ => " It is not started again: by 0 a program says that it is through.",
        };
        let others = self.too_few().unwrap_or_else(|| "the others went on without it".to_owned());
        say(&format!(
            "rank {rank} on {host} {WORDS}: {others}.{again} Call Group::close, or drop the group, before \
             its process ends; a script around it has to pass its exit code on"
        ));
        self.journal.note(Happening::Lost, rank, &host, Some(WORDS.to_owned()));
        if self.ranks.left() == 0 {
            self.report.too_few = Some("no other rank is left".to_owned());
            self.fail(Failure::Rank { rank, host, end, reason: WORDS.to_owned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_end_that_the_others_had_time_to_notice_counts() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut vanished = Vanished::default();
        for (rank, ms) in [(4, 0), (0, 100), (2, 1000)] {
            vanished.ended.insert(rank, ("a".to_owned(), at(ms)));
        }
        assert_eq!(vanished.before(at(499)), [0; 0]);
        assert_eq!(vanished.before(at(500)), [4]);
        // At the end of a job: those that ended together with the last are left alone.
        assert_eq!(vanished.before(at(1100)), [0, 4]);
        assert_eq!(vanished.before(at(1500)), [0, 2, 4]);
    }
}
