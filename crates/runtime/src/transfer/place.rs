//! Whether a newcomer's place is free.

use std::time::{Duration, Instant};

use gradwire_proto::hello::HelloParams;
use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{RecordId, View};
use gradwire_proto::{Fault, FaultKind, Rank};
use gradwire_transport::establish::dial_state;

/// How long a process that answers may have a newcomer's rank: one that ends, or was removed and does not know it yet, is
/// no member any more by then.
const HELD_MAX: Duration = Duration::from_secs(5);
/// How often it is looked, and how long it may take to answer.
const LOOK_EVERY: Duration = Duration::from_millis(300);
const ANSWER_MAX: Duration = Duration::from_millis(300);

/// Another process that has a newcomer's rank.
#[derive(Debug, Default)]
pub(crate) struct Rival {
    /// It has answered since then, whenever it was asked.
    answers_since: Option<Instant>,
    /// It has answered, whatever became of it.
    has_answered: bool,
    looked: Option<Instant>,
}

impl Rival {
    /// Whether a process that answers has this rank. One that is dead, or stopped, and that the others still count on,
    /// does not.
    ///
    /// # Errors
    /// `WorldMismatch`, when it has answered for so long that it will not go away, or until the deadline.
    pub(super) fn look(
        &mut self,
        (endpoint, params): (&Endpoint, &HelloParams),
        (view, own): (&View, RecordId),
        deadline: Instant,
    ) -> Result<bool, Fault> {
        let Some(member) = view.rank(params.rank).filter(|member| member.id != own) else {
            self.answers_since = None;
            return Ok(false);
        };
        let begun = Instant::now();
        if self.looked.is_none_or(|looked| begun.duration_since(looked) >= LOOK_EVERY) {
            let limit = deadline.min(begun + ANSWER_MAX);
            let answers = match dial_state((endpoint, &member.endpoint), params, params.rank, limit, &|| None) {
                Ok(_) => true,
                // A hello from a process of its own rank: it says so, and proves that it is one of this job.
                Err(fault) => fault.kind == FaultKind::WorldMismatch,
            };
            let now = Instant::now();
            self.looked = Some(now);
            self.answers_since = if answers { self.answers_since.or(Some(begun)) } else { None };
            self.has_answered |= answers;
        }
        let patience = deadline.min(self.answers_since.map_or(deadline, |since| since + HELD_MAX));
        match self.fault(view, params.rank, false).filter(|_| Instant::now() >= patience) {
            Some(fault) => Err(fault),
            None => Ok(self.answers_since.is_some()),
        }
    }

    /// What it means for the newcomer that such a process answered when it was asked last; or, where the job `is_over`, that
    /// it has: until it left with the others, the newcomer had no place.
    pub(super) fn fault(&self, view: &View, rank: Rank, is_over: bool) -> Option<Fault> {
        if self.answers_since.is_none() && !(is_over && self.has_answered) {
            return None;
        }
        let host = view.rank(rank).map_or("another host", |member| member.endpoint.hostname.as_str());
        let detail = format!(
            "{rank} lives already, as a process on '{host}' that takes part in the job: give this process a rank that nobody \
             has, or end the other one first"
        );
        Some(Fault::new(FaultKind::WorldMismatch, detail).at(rank))
    }
}
