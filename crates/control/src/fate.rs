//! Which control records are written, and which of the others somebody misses.

use gradwire_proto::membership::Body;

use crate::worker::RECORDS_MAX;

/// What becomes of a control record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Queued,
    /// Nobody misses it.
    Needless,
    Lost(&'static str),
}

impl Fate {
    pub(crate) fn of(body: &Body, leaving: bool, waiting: usize) -> Self {
        match body {
            // The job, or this rank, has an end that the others do not hear of.
            Body::Failed { .. } if leaving => Self::Lost("the rank has said that it leaves in good order"),
            // This rank's Left is on its way: who is a member next, who is suspected and whether somebody lives is up to
            // those that stay. At an ordinary end it is the proposal to go on without those that left a moment earlier.
            _ if leaving => Self::Needless,
            _ if waiting >= RECORDS_MAX => Self::Lost("too many wait for the broker"),
            _ => Self::Queued,
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Epoch, Fault, FaultKind, Rank};

    use super::*;

    #[test]
    fn what_a_rank_has_left_to_say_when_it_has_left_is_lost_only_where_somebody_misses_it() {
        let author = [1; 16];
        let failed = Body::Failed { author, fault: Fault::new(FaultKind::RankDied, "it died").at(Rank(1)) };
        let alive = Body::Alive { challenge: [2; 16] };
        let suspect = Body::Suspect { author, epoch: Epoch(1), member: [2; 16], reason: "its links closed".into() };
        for body in [&failed, &alive, &suspect] {
            assert_eq!(Fate::of(body, false, RECORDS_MAX - 1), Fate::Queued);
            assert!(matches!(Fate::of(body, false, RECORDS_MAX), Fate::Lost(_)));
        }
        assert_eq!(Fate::of(&alive, true, 1), Fate::Needless);
        assert_eq!(Fate::of(&suspect, true, 1), Fate::Needless);
        assert!(matches!(Fate::of(&failed, true, 1), Fate::Lost(_)));
    }
}
