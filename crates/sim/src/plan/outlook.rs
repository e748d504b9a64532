//! What can be said of a plan before it is run: how long its faults hold a job up, and whom it has to survive.

use std::collections::BTreeSet;

use super::{Fault, Plan, Recovery};

/// A rank that is silent for longer is taken for lost where others go on without it; a bit less than the 2.5 seconds of
/// `gradwire_proto::session::Timing`, because what was held up does not come at once when it is over.
const SILENCE_US: u64 = 2_000_000;
/// How long it takes at most until others go on after a loss that they are told of, and one that they have to notice.
const LOSS_US: u64 = 1_500_000;
const SILENT_LOSS_US: u64 = 5_000_000;
/// How long the members of an epoch wait for a process that has joined and is lost before it has opened its links.
const JOIN_US: u64 = 6_000_000;

impl Plan {
    /// When the last fault is over, in nanoseconds. What never ends is over when it begins.
    pub(crate) fn calm_at(&self) -> u64 {
        self.faults.iter().map(|timed| (timed.at_us + timed.fault.for_us()) * 1000).max().unwrap_or(0)
    }

    /// Whether all that goes wrong can be repaired in time, so that the job has to end well, and every rank in it.
    pub(crate) fn is_repairable(&self) -> bool {
        let repaired = |fault: &Fault| fault.is_repairable() && !self.is_removed_by(fault);
        self.faults.iter().all(|timed| repaired(&timed.fault)) && self.pause_us() < self.patience_us()
    }

    /// Whether a rank stands still for so long that the others go on without it.
    fn is_removed_by(&self, fault: &Fault) -> bool {
        matches!(fault, Fault::Stop { for_us, .. } if self.is_elastic() && *for_us >= SILENCE_US)
    }

    /// The places of ranks that may be lost, where all others have to end well whatever becomes of those. Nothing where
    /// no rank can be sure of that.
    pub(crate) fn losses(&self) -> Option<BTreeSet<u32>> {
        if !self.is_elastic() || self.loses_log() || self.pause_us() >= self.patience_us() {
            return None;
        }
        let mut lost = BTreeSet::new();
        let mut all_us = self.pause_us();
        for timed in &self.faults {
            match timed.fault {
                Fault::Crash { rank, back_us, silent, .. } => {
                    lost.insert(rank);
                    all_us += if silent { SILENT_LOSS_US } else { LOSS_US };
                    all_us += if back_us.is_some() { JOIN_US } else { 0 };
                }
                Fault::Leave { rank } => {
                    lost.insert(rank);
                    all_us += LOSS_US;
                }
                Fault::Join { rank } | Fault::Replace { rank } => {
                    lost.insert(rank);
                    all_us += JOIN_US;
                }
                // Which of the two stays is for the log to decide.
                Fault::Break { a, b } => {
                    lost.extend([a, b]);
                    all_us += LOSS_US;
                }
                Fault::Stop { rank, for_us } if for_us >= SILENCE_US => {
                    lost.insert(rank);
                    all_us += SILENT_LOSS_US;
                }
                Fault::BrokerDown { .. } => {}
                other if !other.is_repairable() => return None,
                _ => {}
            }
        }
        let sure = (0..self.ranks).filter(|rank| !lost.contains(rank)).count() as u32;
        let in_time = all_us < self.deadline_ms * 1000 * 3 / 4;
        (sure >= self.ranks_min.max(1) && in_time).then_some(lost)
    }

    /// By how much faults can hold up what they do not end.
    fn pause_us(&self) -> u64 {
        self.faults.iter().map(|timed| self.pause_of(&timed.fault)).sum()
    }

    fn pause_of(&self, fault: &Fault) -> u64 {
        // Whoever is removed holds up nobody after that.
        if self.is_removed_by(fault) { 0 } else { fault.pause_us() }
    }

    fn patience_us(&self) -> u64 {
        let deadline = self.deadline_ms * 1000 / 8;
        if self.recovery == Recovery::Fail { deadline } else { deadline.min(SILENCE_US) }
    }
}

impl Fault {
    /// How long it goes on.
    const fn for_us(&self) -> u64 {
        match self {
            Self::Link(link) => link.for_us,
            Self::Cut { for_us, .. }
            | Self::Slow { for_us, .. }
            | Self::Stop { for_us, .. }
            | Self::Hang { for_us, .. }
            | Self::BrokerDown { for_us, .. }
            | Self::BrokerSlow { for_us, .. }
            | Self::BrokerTwice { for_us, .. } => *for_us,
            Self::Crash { back_us, .. } => match back_us {
                Some(back_us) => *back_us,
                None => 0,
            },
            Self::Break { .. }
            | Self::Leave { .. }
            | Self::Join { .. }
            | Self::Replace { .. }
            | Self::BrokerLink { .. } => 0,
        }
    }

    /// By how much it can hold up an operation.
    const fn pause_us(&self) -> u64 {
        match self {
            // What is lost is asked for again at the latest two seconds after the link is well.
            Self::Link(link) => link.for_us + link.delay_us,
            Self::Slow { for_us, by_us, .. } | Self::BrokerSlow { for_us, by_us } => *for_us + *by_us * 100,
            Self::Crash { .. } => 0,
            other => other.for_us(),
        }
    }

    const fn is_repairable(&self) -> bool {
        match self {
            Self::Link(link) => {
                link.lose_messages == 0 && link.corrupt_headers == 0 && link.corrupt + link.truncate <= 300
            }
            Self::Cut { .. }
            | Self::Slow { .. }
            | Self::Stop { .. }
            | Self::BrokerLink { .. }
            | Self::BrokerSlow { .. }
            | Self::BrokerTwice { .. } => true,
            Self::BrokerDown { restart, .. } => !*restart,
            Self::Break { .. }
            | Self::Crash { .. }
            | Self::Hang { .. }
            | Self::Leave { .. }
            | Self::Join { .. }
            | Self::Replace { .. } => false,
        }
    }
}
