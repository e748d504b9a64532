//! What happened, as a number that is the same for the same run, and as text.

use std::fmt::Arguments;
use std::hash::{DefaultHasher, Hash, Hasher as _};

use gradwire_codec::crc32;

use crate::event::Nanos;
use crate::report::Report;

/// Follows a run.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Its keys are fixed: the same on every run of one build.
    hasher: DefaultHasher,
    events: u64,
    /// The latest lines, if they are wanted.
    text: Option<Vec<String>>,
}

impl Trace {
    pub(crate) fn new(with_text: bool) -> Self {
        Self { hasher: DefaultHasher::new(), events: 0, text: with_text.then(Vec::new) }
    }

    /// Takes note of an event. `what` tells it from others; `line` says it to people.
    pub(crate) fn note(&mut self, now: Nanos, what: impl Hash, line: Arguments<'_>) {
        self.events += 1;
        now.hash(&mut self.hasher);
        what.hash(&mut self.hasher);
        if let Some(text) = &mut self.text {
            text.push(format!("{:>14} {line}", micros(now)));
        }
    }

    pub(crate) fn digest(&self) -> u64 {
        self.hasher.finish()
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    pub(crate) fn into_text(self) -> Vec<String> {
        self.text.unwrap_or_default()
    }
}

/// A report in words, without what is too long for them.
pub(crate) struct Said<'a>(pub(crate) &'a Report);

impl std::fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Report::Completed { version, tensor, bytes, .. } => write!(
                f,
                "has t{tensor} of {} {}: {} bytes, checksum {:08x}",
                version.epoch,
                version.step,
                bytes.len(),
                crc32(bytes)
            ),
            Report::Applied { from, header, .. } => {
                write!(f, "uses {:?} {} {} of p{}", header.kind, header.step, header.unit_first, from.0)
            }
            Report::View { epoch, id, members } => {
                let places: Vec<u32> = members.iter().map(|(place, _)| *place).collect();
                write!(f, "enters {epoch} ({:08x}) with ranks {places:?}", crc32(id))
            }
            Report::RoundCompleted { round, bytes } => {
                write!(f, "has round {round}: {} bytes, checksum {:08x}", bytes.len(), crc32(bytes))
            }
            other => write!(f, "{other:?}"),
        }
    }
}

/// What tells a report from others.
pub(crate) fn essence(report: &Report) -> (u8, u64, u64) {
    match report {
        Report::Started { place } => (0, u64::from(*place), 0),
        Report::Died => (1, 0, 0),
        Report::Stopped => (2, 0, 0),
        Report::Resumed => (3, 0, 0),
        Report::View { epoch, members, .. } => (4, epoch.0, members.len() as u64),
        Report::Posted { step, tensor, attempt, .. } => (5, step.0 << 32 | *attempt, *tensor as u64),
        Report::Completed { version, bytes, .. } => (6, version.step.0, u64::from(crc32(bytes))),
        Report::Failed { tensor, fault } => (7, *tensor as u64, fault.kind as u64),
        Report::StepDone { version, .. } => (8, version.epoch.0, version.step.0),
        Report::Held { tensor, intact } => (9, *tensor as u64, u64::from(*intact)),
        Report::Applied { crc, step, .. } => (10, u64::from(*crc), step.0),
        Report::Committed(record) => (11, record.version.step.0, record.crcs.len() as u64),
        Report::Load { queued, bytes, .. } => (12, *queued as u64, *bytes as u64),
        Report::Ended(result) => (13, result.as_ref().err().map_or(0, |fault| fault.kind as u64), 0),
        Report::RoundPosted { round, .. } => (14, *round, 0),
        Report::RoundClosed { round, parts } => (15, *round, parts.len() as u64),
        Report::RoundCompleted { round, bytes } => (16, *round, u64::from(crc32(bytes))),
        Report::RoundFailed { round, fault } => (17, *round, fault.kind as u64),
        Report::Linked => (18, 0, 0),
        Report::Joined { commits } => (19, *commits, 0),
        Report::CommitBegun { by } => (20, *by, 0),
        Report::State { commits, digest } => (21, *commits, *digest),
    }
}

/// "12,345.678 us" without the unit.
fn micros(now: Nanos) -> String {
    format!("{}.{:03}", now / 1000, now % 1000)
}
