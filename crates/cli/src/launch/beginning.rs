//! Jobs that cannot begin. gradwire's jobs begin with all their ranks: where one is lost before it has joined, and is not
//! started again, the others would wait for it until their deadline. So the job ends at once, and says why.
//!
//! Who has joined stands in the control log, which is read after such a loss and a few times later: the others may only just
//! be starting. Programs that do not use gradwire leave nothing there, and go on.

use std::time::{Duration, Instant};

use gradwire_control::Census;
use gradwire_proto::Epoch;

use super::agents::Event;
use super::driver::Driver;
use super::elastic::say;
use super::ranks::State;
use super::report::Failure;
use crate::agent::wire::End;

/// Before the log is read once more; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// So often nothing is said while nobody is known to have joined: programs that use gradwire take a moment to.
const READS_SILENT: u32 = 3;
/// How often it is read: for half a minute, which is as long as ranks wait for others unless told otherwise.
const READS_MAX: u32 = 8;

/// Ranks that were lost while it is not known that the job has begun.
#[derive(Default)]
pub(super) struct Beginning {
    begun: bool,
    lost: Vec<Casualty>,
    reads: u32,
    reading: bool,
    read_at: Option<Instant>,
}

/// A rank that was lost, and is not started again.
pub(super) struct Casualty {
    pub(super) rank: u32,
    pub(super) host: String,
    pub(super) end: End,
    /// How it was lost, in words.
    pub(super) reason: String,
    /// Why it is not started again.
    pub(super) why: String,
    /// What is said of it where the others go on; nothing, once that was said.
    pub(super) words: Option<String>,
    /// The log was read after its end, and does not have it: what it wrote last may not be there yet.
    missing: bool,
}

impl Casualty {
    pub(super) fn new(rank: u32, host: &str, end: End, reason: &str, why: &str, words: String) -> Self {
        let (host, reason, why) = (host.to_owned(), reason.to_owned(), why.to_owned());
        Self { rank, host, end, reason, why, words: Some(words), missing: false }
    }
}

impl Beginning {
    /// When the log is to be read.
    pub(super) const fn due(&self) -> Option<Instant> {
        self.read_at
    }

    /// What the log says: the rank without which the job cannot begin, if there is one, and what there is to say.
    /// `is_gone`: a rank has no process, and gets none.
    fn judge(&mut self, census: Option<&Census>, is_gone: impl Fn(u32) -> bool) -> (Option<Casualty>, Vec<String>) {
        let mut words = Vec::new();
        let others_joined = census.is_some_and(|census| !census.joined.is_empty());
        self.begun |= census.is_some_and(|census| census.epoch > Epoch(0));
        let (begun, mut doomed, mut wait) = (self.begun, None, Vec::new());
        for mut one in self.lost.drain(..) {
            let joined = census.is_some_and(|census| census.joined.iter().any(|(rank, _)| rank.0 == one.rank));
            let counts = others_joined && !begun && !joined && is_gone(one.rank);
            if counts && one.missing && doomed.is_none() {
                doomed = Some(one);
                continue;
            }
            one.missing = counts;
            // With one that joined the job begins, and goes on without it; the log of others' programs stays empty.
            if !counts && (begun || joined || self.reads >= READS_SILENT) {
                words.extend(one.words.take());
            }
            if !begun && !joined && is_gone(one.rank) {
                wait.push(one);
            }
        }
        self.lost = wait;
        (doomed, words)
    }
}

impl Driver {
    /// The others go on without this rank, if they have begun or can begin.
    pub(super) fn go_on_without(&mut self, casualty: Casualty) {
        if self.beginning.begun || self.prospects.ranks().is_none() {
            casualty.words.iter().for_each(|words| say(words));
            return;
        }
        self.beginning.lost.push(casualty);
        self.beginning.reads = 0;
        self.read_roll();
    }

    /// Reads who has joined, if it is time.
    pub(super) fn look_at_roll(&mut self, now: Instant) {
        if self.beginning.read_at.is_some_and(|at| at <= now) {
            self.read_roll();
        }
    }

    fn read_roll(&mut self) {
        self.beginning.read_at = None;
        if self.beginning.reading || self.prospects.ranks().is_none() {
            return;
        }
        self.beginning.reading = self.read_log(Event::Roll);
        if !self.beginning.reading {
            self.take_roll(None);
        }
    }

    /// The log was read, if it could be.
    pub(super) fn take_roll(&mut self, census: Option<Census>) {
        self.beginning.reading = false;
        let ranks = &self.ranks;
        let is_gone = |rank| matches!(ranks.state(rank), Some(State::Lost(_)));
        let (doomed, words) = self.beginning.judge(census.as_ref(), is_gone);
        words.iter().for_each(|words| say(words));
        if let Some(Casualty { rank, host, end, reason, why, .. }) = doomed.filter(|_| !self.closed && !self.stopping) {
            let all = self.prospects.ranks().unwrap_or_default();
            self.report.too_few = Some(format!(
                "it had not joined the job, which begins with all {all} ranks, and is not started again: {why}"
            ));
            return self.fail(Failure::Rank { rank, host, end, reason });
        }
        self.beginning.reads += 1;
        if !self.beginning.lost.is_empty() && self.beginning.reads < READS_MAX {
            let pause = PAUSE_MIN.saturating_mul(1 << (self.beginning.reads - 1));
            self.beginning.read_at = Some(Instant::now() + pause);
        }
    }

    /// Says what was not said yet of ranks without which the others went on.
    pub(super) fn end_roll(&mut self) {
        if self.report.failure.is_none() {
            self.beginning.lost.iter_mut().filter_map(|one| one.words.take()).for_each(|words| say(&words));
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Rank;

    use super::*;

    fn lost(rank: u32) -> Beginning {
        let casualty = Casualty::new(rank, "a", End::Code(3), "broke", "no restarts", "they go on".into());
        Beginning { lost: vec![casualty], ..Beginning::default() }
    }

    fn census(epoch: u64, joined: &[u32]) -> Census {
        let joined = joined.iter().map(|rank| (Rank(*rank), [*rank as u8; 16])).collect();
        Census { epoch: Epoch(epoch), joined, ..Census::default() }
    }

    #[test]
    fn a_rank_that_is_gone_and_never_joined_keeps_the_others_from_beginning() {
        let mut beginning = lost(1);
        for census in [None, Some(census(0, &[]))] {
            let (doomed, _) = beginning.judge(census.as_ref(), |_| true);
            assert!(doomed.is_none(), "nobody is known to have joined");
        }
        let (doomed, words) = beginning.judge(Some(&census(0, &[0])), |_| true);
        assert!(doomed.is_none() && words.is_empty(), "its last words may come yet");
        let (doomed, _) = beginning.judge(Some(&census(0, &[0, 2])), |_| true);
        assert_eq!(doomed.map(|one| one.rank), Some(1));
    }

    #[test]
    fn the_others_go_on_without_one_that_joined_or_whose_job_has_begun() {
        for (epoch, joined) in [(1, vec![0, 1]), (0, vec![0, 1]), (2, vec![0])] {
            let mut beginning = lost(1);
            for _ in 0..3 {
                let (doomed, words) = beginning.judge(Some(&census(epoch, &joined)), |_| true);
                assert!(doomed.is_none());
                assert!(words == ["they go on"] || words.is_empty() && beginning.lost.is_empty());
            }
        }
        // A further process got its number.
        let mut beginning = lost(1);
        for _ in 0..2 {
            assert!(beginning.judge(Some(&census(0, &[0])), |_| false).0.is_none());
        }
    }

    #[test]
    fn what_goes_on_without_gradwire_is_said_once() {
        let mut beginning = lost(1);
        assert!(beginning.judge(Some(&Census::default()), |_| true).1.is_empty(), "it may be about to join");
        beginning.reads = READS_SILENT;
        assert_eq!(beginning.judge(Some(&Census::default()), |_| true).1, ["they go on"]);
        assert!(beginning.judge(Some(&Census::default()), |_| true).1.is_empty());
    }
}
