//! Whether starting a lost rank again can help: what its exit code says, and what the job's own log says.
//!
//! A rank that is started again gets the job's state from ranks that have it. Which these are, and why a rank that joined
//! failed, stands in the control log, which is read when a rank is lost; the restart waits for that. Programs that do not
//! use gradwire leave nothing there, and are started again as they are.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use gradwire_control::{Census, JobConfig, RecordId, read_census};
use gradwire_proto::{Epoch, Fault, FaultKind};

use super::agents::Event;
use super::driver::Driver;
use super::elastic::say;
use super::ranks::State;
use super::report::Failure;
use crate::agent::wire::End;

/// How long the log may take to be read. A broker that is away longer keeps nobody from being started again.
const READ_TIME_MAX: Duration = Duration::from_secs(2);
/// A program was called wrongly, as argparse and clap say; cannot be run; does not exist.
const CODES_FOR_GOOD: [i32; 3] = [2, 126, 127];

/// What is known of the processes of ranks that were lost.
#[derive(Default)]
pub(super) struct Prospects {
    /// Where the job's log is, and how many ranks it began with; none where that is not known.
    job: Option<(JobConfig, u32)>,
    /// Ranks whose restart waits for what the log says.
    asked: HashMap<u32, Loss>,
    /// Processes that are gone, by the ids of their Joins, whether or not the others have noticed.
    gone: HashSet<RecordId>,
}

/// A loss after which the rank is to be started again.
pub(super) struct Loss {
    pub(super) host: String,
    pub(super) end: End,
    /// How it was lost, in words.
    pub(super) reason: String,
    pub(super) pause: Duration,
}

/// Why a rank is not started again.
#[derive(Debug, PartialEq, Eq)]
enum Hopeless {
    /// It would meet the same again.
    Fault(String),
    /// No rank is left that could give it the state.
    Alone,
}

/// Whether a rank that ends like this would again.
pub(super) fn is_for_good(end: End) -> bool {
    matches!(end, End::Code(code) if CODES_FOR_GOOD.contains(&code))
}

impl Prospects {
    /// The ranks of this job are about to start.
    pub(super) fn begin(&mut self, job: Option<JobConfig>, ranks: u32) {
        self.job = job.map(|job| (job, ranks));
    }

    /// How many ranks the job begins with, where its log is known.
    pub(super) fn ranks(&self) -> Option<u32> {
        self.job.as_ref().map(|(_, ranks)| *ranks)
    }

    /// What the job's log says, if it is known where it is and it can be read.
    pub(super) fn read(&self) -> Option<Census> {
        self.job.as_ref().and_then(|(job, ranks)| read(job, *ranks))
    }

    /// Whether a rank may not be started again yet.
    pub(super) fn are_awaited(&self, rank: u32) -> bool {
        self.asked.contains_key(&rank)
    }

    /// Whether the others went on without this rank's process, which is its `starts`th.
    pub(super) fn is_removed(&self, rank: u32, starts: u32, census: &Census) -> bool {
        let joins: Vec<RecordId> = census.joined.iter().filter(|(of, _)| of.0 == rank).map(|(_, id)| *id).collect();
        let mut own = joins.iter().filter(|id| !self.gone.contains(*id)).peekable();
        let is_removed = |id: &RecordId| census.removed.iter().any(|(_, removed)| removed == id);
        // One that has not joined yet is none that was removed.
        joins.len() >= starts as usize && own.peek().is_some() && own.all(is_removed)
    }

    /// A process of this rank is gone: what its log says of the job without it. `runs` tells which ranks have a process.
    fn judge(&mut self, rank: u32, census: &Census, runs: impl Fn(u32) -> bool) -> Option<Hopeless> {
        let mine: Vec<RecordId> = census
            .joined
            .iter()
            .filter(|(of, id)| of.0 == rank && !self.gone.contains(id))
            .map(|(_, id)| *id)
            .collect();
        self.gone.extend(&mine);
        let met = census.faults.iter().rev().find(|(author, _)| mine.contains(author));
        if let Some((_, fault)) = met.filter(|(_, fault)| stays(fault)) {
            return Some(Hopeless::Fault(fault.to_string()));
        }
        let has_state = |(of, id): &(gradwire_proto::Rank, RecordId)| runs(of.0) && !self.gone.contains(id);
        (census.epoch > Epoch(0) && !census.members.iter().any(has_state)).then_some(Hopeless::Alone)
    }
}

/// Whether a fault is one of the program, or of how it was called: the same program meets it again.
const fn stays(fault: &Fault) -> bool {
    matches!(
        fault.kind,
        FaultKind::InvalidArgument
            | FaultKind::UndeclaredTensor
            | FaultKind::ShapeMismatch
            | FaultKind::DTypeMismatch
            | FaultKind::OperationMismatch
            | FaultKind::DeclarationMismatch
            | FaultKind::WorldMismatch
            | FaultKind::ProtocolVersion
    )
}

fn read(job: &JobConfig, ranks: u32) -> Option<Census> {
    let census = read_census(job, ranks, READ_TIME_MAX);
    census.inspect_err(|fault| tracing::debug!(%fault, "the job's log cannot be read")).ok()
}

impl Driver {
    /// A rank is to be started again after its pause, if the job's log has nothing against it.
    pub(super) fn ask_before_restart(&mut self, rank: u32, loss: Loss) {
        if self.read_log(move |census| Event::Census(rank, census)) {
            self.prospects.asked.insert(rank, loss);
        } else {
            self.announce_restart(rank, &loss);
        }
    }

    /// Reads the job's log on a thread of its own. What it says, if it can be read, comes as this event; false where nobody
    /// knows where it is, or there is no thread.
    pub(super) fn read_log(&self, event: impl FnOnce(Option<Census>) -> Event + Send + 'static) -> bool {
        let Some((job, ranks)) = self.prospects.job.clone() else { return false };
        let events = self.sender.clone();
        let tell = move || drop(events.send(event(read(&job, ranks))));
        std::thread::Builder::new().name("census".to_owned()).spawn(tell).is_ok()
    }

    fn announce_restart(&mut self, rank: u32, loss: &Loss) {
        let Loss { host, reason, pause, .. } = loss;
        let (nth, (_, most)) = (self.ranks.announce(), self.ranks.restarts());
        let seconds = pause.as_secs_f64();
        say(&format!("rank {rank} on {host} {reason}: starting it again in {seconds} s ({nth} of {most} restarts)"));
    }

    /// The log was read after this rank was lost.
    pub(super) fn take_census(&mut self, rank: u32, census: Option<Census>) {
        let Some(loss) = self.prospects.asked.remove(&rank) else { return };
        if self.stopping || self.closed || !matches!(self.ranks.state(rank), Some(State::Waiting { .. })) {
            return;
        }
        let ranks = &self.ranks;
        let runs = |rank| matches!(ranks.state(rank), Some(State::Running { .. }));
        let verdict = census.and_then(|census| self.prospects.judge(rank, &census, runs));
        let Some(hopeless) = verdict else { return self.announce_restart(rank, &loss) };
        let Loss { host, end, reason, .. } = loss;
        self.ranks.give_up(rank);
        match hopeless {
            Hopeless::Fault(fault) => {
                say(&format!(
                    "rank {rank} on {host} {reason}: it is not started again, for it would meet the same: {fault}"
                ));
                self.go_on_or(Failure::Rank { rank, host, end, reason });
            }
            Hopeless::Alone if self.ranks.any_ended_well() => {
                say(&format!("rank {rank} on {host} {reason}: it is not started again, for the others are through"));
                self.go_on_or(Failure::Rank { rank, host, end, reason });
            }
            Hopeless::Alone => {
                let words = "no rank is left that has the job's state: start the job again, from what was saved";
                self.report.too_few = Some(words.to_owned());
                self.fail(Failure::Rank { rank, host, end, reason });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Rank;

    use super::*;

    const BEGUN: Epoch = Epoch(1);

    fn id(number: u8) -> RecordId {
        [number; 16]
    }

    /// Ranks 0 and 1, whose processes are named 10 and 11.
    fn census() -> Census {
        let members = vec![(Rank(0), id(10)), (Rank(1), id(11))];
        Census { epoch: BEGUN, joined: members.iter().copied().collect(), members, ..Census::default() }
    }

    #[test]
    fn a_rank_is_started_again_while_another_has_the_state() {
        let mut prospects = Prospects::default();
        assert_eq!(prospects.judge(1, &census(), |rank| rank == 0), None);
        // Its next process has joined, and is no member yet, when the other is lost.
        let mut later = census();
        later.joined.insert((Rank(1), id(21)));
        assert_eq!(prospects.judge(0, &later, |rank| rank == 1), Some(Hopeless::Alone));
        // It was one.
        later.members = vec![(Rank(0), id(10)), (Rank(1), id(21))];
        assert_eq!(Prospects::default().judge(0, &later, |rank| rank == 1), None);
    }

    #[test]
    fn with_all_lost_at_once_there_is_nothing_to_go_on_from() {
        assert_eq!(Prospects::default().judge(0, &census(), |_| false), Some(Hopeless::Alone));
        // Nothing is lost where the job had not begun, or is none of gradwire's.
        let census = Census { epoch: Epoch(0), members: Vec::new(), ..census() };
        assert_eq!(Prospects::default().judge(0, &census, |_| false), None);
        assert_eq!(Prospects::default().judge(0, &Census::default(), |_| false), None);
    }

    #[test]
    fn a_process_is_removed_when_it_joined_and_the_others_went_on_without_it() {
        let mut prospects = Prospects::default();
        let mut census = census();
        assert!(!prospects.is_removed(1, 1, &census) && !prospects.is_removed(2, 1, &census));
        census.removed.insert((Rank(1), id(11)));
        assert!(prospects.is_removed(1, 1, &census) && !prospects.is_removed(0, 1, &census));
        // It was started again, and has not joined yet; then it has.
        assert!(!prospects.is_removed(1, 2, &census));
        assert_eq!(prospects.judge(1, &census, |_| true), None);
        assert!(!prospects.is_removed(1, 1, &census), "that process is gone");
        census.joined.insert((Rank(1), id(21)));
        assert!(!prospects.is_removed(1, 2, &census));
        census.removed.insert((Rank(1), id(21)));
        assert!(prospects.is_removed(1, 2, &census));
    }

    #[test]
    fn what_a_process_met_counts_for_that_process() {
        let mut prospects = Prospects::default();
        let mut census = census();
        census.faults = vec![(id(11), Fault::new(FaultKind::ShapeMismatch, "another model"))];
        let Some(Hopeless::Fault(words)) = prospects.judge(1, &census, |_| true) else { panic!("it meets it again") };
        assert!(words.contains("another model"), "{words}");
        // The next process of this rank died of something else.
        census.joined.insert((Rank(1), id(21)));
        census.faults.push((id(21), Fault::new(FaultKind::DeadlineExceeded, "slow")));
        assert_eq!(prospects.judge(1, &census, |_| true), None);
    }

    #[test]
    fn some_exit_codes_say_that_it_would_end_the_same_way() {
        assert!([2, 126, 127].map(End::Code).into_iter().all(is_for_good));
        assert!(![End::Code(1), End::Code(3), End::Signal(2), End::Unknown].into_iter().any(is_for_good));
    }
}
