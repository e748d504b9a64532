//! Audit records: what happened to a job, for people and for other programs. Only ever appended.

use std::fmt;
use std::str::FromStr;

use gradwire_proto::limits::FAULT_DETAIL_BYTES_MAX;
use gradwire_proto::wire::{Malformed, Reader, owned_text, put_text};
use gradwire_proto::{Epoch, Rank, Step};

/// The kind of every audit record in a record's header.
pub(crate) const KIND: u16 = 32;

/// What happened. The number is its code in records: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u16)]
pub enum AuditKind {
    /// A rank became a member: from which host and addresses.
    Joined = 1,
    /// A rank could not join, or its broker refused it: why.
    Refused = 2,
    /// A version was committed: how many shards, and a checksum over theirs.
    Committed = 3,
    /// Versions were read by catch-up: which, and by whom.
    Read = 4,
    /// Frames or records of a peer were rejected: how many since the last time.
    Rejected = 5,
    /// A rank does not count on another any more: why.
    Suspected = 6,
    /// A new epoch began: who its members are.
    Epoch = 7,
    /// A rank left in good order.
    Left = 8,
    /// The job failed: why.
    Failed = 9,
    /// A federated round was closed: with whom.
    RoundClosed = 10,
    /// A federated contribution came too late: what became of it.
    Late = 11,
}

impl AuditKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [Self; 11] = [
        Self::Joined,
        Self::Refused,
        Self::Committed,
        Self::Read,
        Self::Rejected,
        Self::Suspected,
        Self::Epoch,
        Self::Left,
        Self::Failed,
        Self::RoundClosed,
        Self::Late,
    ];

    /// The name, as filters and reports spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Refused => "refused",
            Self::Committed => "committed",
            Self::Read => "read",
            Self::Rejected => "rejected",
            Self::Suspected => "suspected",
            Self::Epoch => "epoch",
            Self::Left => "left",
            Self::Failed => "failed",
            Self::RoundClosed => "round-closed",
            Self::Late => "late",
        }
    }
}

impl fmt::Display for AuditKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for AuditKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|kind| kind.as_str()).collect();
            format!("'{text}' is no kind of audit record: use one of {}", names.join(", "))
        })
    }
}

/// One entry of the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRecord {
    /// Milliseconds since 1970, by the clock of who wrote it.
    pub time_ms: u64,
    /// What happened.
    pub kind: AuditKind,
    /// The epoch in which it happened; 0 outside of any.
    pub epoch: Epoch,
    /// The step that it is about; 0 if it is about none.
    pub step: Step,
    /// The rank that it is about, if it is about one.
    pub rank: Option<Rank>,
    /// More, for people. Cut to [`FAULT_DETAIL_BYTES_MAX`] bytes.
    pub detail: String,
}

impl AuditRecord {
    /// A record of now, in no epoch and about no rank.
    pub(crate) fn now(kind: AuditKind, detail: impl Into<String>) -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Self { time_ms, kind, epoch: Epoch(0), step: Step(0), rank: None, detail: detail.into() }
    }

    pub(crate) const fn at(mut self, epoch: Epoch, step: Step) -> Self {
        self.epoch = epoch;
        self.step = step;
        self
    }

    pub(crate) const fn about(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// The record as it travels.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(40 + self.detail.len());
        out.extend_from_slice(&self.time_ms.to_le_bytes());
        out.extend_from_slice(&(self.kind as u16).to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.step.0.to_le_bytes());
        out.extend_from_slice(&self.rank.map_or(u32::MAX, |rank| rank.0).to_le_bytes());
        put_text(&mut out, &self.detail, FAULT_DETAIL_BYTES_MAX);
        out
    }

    /// Reads a record; nothing for a kind that is not known.
    ///
    /// # Errors
    /// When it is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let mut reader = Reader::new(bytes);
        let (time_ms, code) = (reader.u64()?, reader.u16()?);
        let (epoch, step, rank) = (Epoch(reader.u64()?), Step(reader.u64()?), reader.u32()?);
        let detail = owned_text(&mut reader, FAULT_DETAIL_BYTES_MAX)?;
        reader.finish()?;
        let rank = (rank != u32::MAX).then_some(Rank(rank));
        let kind = AuditKind::ALL.into_iter().find(|kind| *kind as u16 == code);
        Ok(kind.map(|kind| Self { time_ms, kind, epoch, step, rank, detail }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_round_trip_and_reject_every_other_length() {
        for kind in AuditKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
            let record = AuditRecord::now(kind, "größe").at(Epoch(3), Step(1 << 40)).about(Rank(7));
            let bytes = record.encode();
            assert_eq!(AuditRecord::decode(&bytes), Ok(Some(record)));
            for length in 0..bytes.len() {
                AuditRecord::decode(&bytes[..length]).unwrap_err();
            }
            AuditRecord::decode(&[&bytes[..], &[0]].concat()).unwrap_err();
        }
        assert!("nothing".parse::<AuditKind>().unwrap_err().contains("joined"));
    }

    proptest! {
        #[test]
        fn random_records_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some(record)) = AuditRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
