//! What the demo's ranks tell the parent, as lines of JSON.

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::history::History;

/// A time on the clock that all processes of this machine share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Moment(u64);

impl Moment {
    /// Now.
    pub(super) fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        Self(now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned())
    }

    /// Milliseconds from `earlier` to this; 0 if it is not earlier.
    pub(super) const fn ms_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e6
    }

    #[cfg(test)]
    pub(super) const fn at_ms(ms: u64) -> Self {
        Self(ms * 1_000_000)
    }
}

/// What a rank tells the parent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// All ranks are there, and training begins.
    Began { at: Moment },
    /// From the lowest rank that is left: so many steps are done, and the loss over its part of the last batch.
    Progress { step: u32, loss: f32 },
    /// The rank kills itself now.
    Killed { step: u32, at: Moment },
    /// The rank is ready to be stopped, for so many milliseconds.
    Stalled { step: u32, pid: i32, ms: u64, at: Moment },
    /// It was continued.
    Woke { step: u32, at: Moment },
    /// The others went on without it, which it noticed in this step. It tries to join them again.
    Removed { step: u32, at: Moment },
    /// This step begins, with which processes are to be started that join. Every rank says so.
    Due { step: u32, at: Moment },
    /// The rank takes part from this step on, in a job that ran already.
    Joined(Joined),
    /// The rank cannot take part any more: the others are through.
    Late { at: Moment, back: bool },
    /// A step that ended with other contributors or members than the one before, or in which a rank was killed.
    Step(StepEnd),
    /// Checksums of what a rank applied in each step from this one on.
    Trail { first: u32, checksums: Vec<u32> },
    /// From every rank that is left, at the end. One of them adds what was measured.
    Finished { weights_sha256: String, history: History, measured: Option<Measured> },
}

/// How a step ended on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StepEnd {
    pub(super) step: u32,
    pub(super) at: Moment,
    /// Whose contributions are in its results.
    pub(super) contributors: Vec<u32>,
    /// The ranks that go on, and the number of this view.
    pub(super) members: Vec<u32>,
    pub(super) epoch: u64,
    /// Results that this rank had already, and that others took the place of.
    pub(super) replaced: usize,
}

/// How a rank came to take part in a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Joined {
    pub(super) step: u32,
    pub(super) at: Moment,
    /// Since it began to.
    pub(super) took_us: u64,
    /// Of state that it was given, by so many members.
    pub(super) bytes: u64,
    pub(super) members: u32,
    /// Whether it had been a member before.
    pub(super) back: bool,
}

/// The job's figures, over all ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) transport: String,
    pub(super) epoch: u64,
    /// On the test images, 0..=1.
    pub(super) accuracy: f64,
    /// Bytes that all ranks that are left sent while training.
    pub(super) wire_bytes: u64,
    /// Of the slowest rank in each step.
    pub(super) step_ms_p50: f64,
    /// Of the slowest rank in each step.
    pub(super) step_ms_p99: f64,
}

impl Measured {
    /// What two ranks measured, each of its own part, together: of times the longer ones.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            wire_bytes: self.wire_bytes + other.wire_bytes,
            step_ms_p50: self.step_ms_p50.max(other.step_ms_p50),
            step_ms_p99: self.step_ms_p99.max(other.step_ms_p99),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_way_to_the_parent() {
        let measured = Measured {
            transport: "shm".to_owned(),
            epoch: 1,
            accuracy: 0.97,
            wire_bytes: u64::MAX,
            step_ms_p50: 0.1,
            step_ms_p99: 0.2,
        };
        let history = History::constant(4);
        let event =
            Event::Finished { weights_sha256: "ab".to_owned(), history: history.clone(), measured: Some(measured) };
        let line = serde_json::to_string(&event).expect("serialize");
        let Ok(Event::Finished { history: read, measured: Some(measured), .. }) = serde_json::from_str(&line) else {
            panic!("{line} became something else");
        };
        assert_eq!((measured.wire_bytes, measured.accuracy), (u64::MAX, 0.97));
        assert_eq!(read, history);
        assert!(serde_json::from_str::<Event>("step 3").is_err());
    }

    #[test]
    fn moments_are_told_apart() {
        assert_eq!(Moment::at_ms(7).ms_since(Moment::at_ms(2)), 5.0);
        assert_eq!(Moment::at_ms(2).ms_since(Moment::at_ms(7)), 0.0);
        assert!(Moment::now() <= Moment::now());
    }
}
