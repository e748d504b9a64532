//! What went wrong: one typed error that can be passed on to every rank.

mod wire;

use alloc::format;
use alloc::string::String;
use core::fmt;

use crate::ids::{Rank, Step};

/// The kind of a fault. The number is its code on the wire and in records: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u16)]
pub enum FaultKind {
    /// An argument of the call is wrong. Nothing was sent.
    InvalidArgument = 1,
    /// A name that was never declared. Nothing was sent.
    UndeclaredTensor = 2,
    /// The tensor has an operation in flight already. Nothing was sent.
    TensorBusy = 3,
    /// Ranks declared the same name with different shapes.
    ShapeMismatch = 4,
    /// Ranks declared the same name with different element types.
    DTypeMismatch = 5,
    /// Ranks declared the same name with different collectives, reductions or wire formats.
    OperationMismatch = 6,
    /// Some ranks declared a tensor that others did not.
    DeclarationMismatch = 7,
    /// A rank did not offer its part of an operation before the deadline.
    NotOffered = 8,
    /// An operation, or joining, did not end before the deadline.
    DeadlineExceeded = 9,
    /// A rank left the job in good order while it was still needed.
    RankLeft = 10,
    /// A rank's links closed without a farewell: it exited or was killed.
    RankDied = 11,
    /// Ranks disagree on how many they are, or a rank number is taken twice or out of range.
    WorldMismatch = 12,
    /// A live job with this name exists on the broker.
    JobNameTaken = 13,
    /// A peer does not know the job's secret, or we do not know the peer's.
    SecretMismatch = 14,
    /// No secret was given.
    SecretMissing = 15,
    /// A peer speaks another version of the protocol.
    ProtocolVersion = 16,
    /// A port or socket name is in use.
    AddressInUse = 17,
    /// An advertised address cannot be reached.
    AddressUnreachable = 18,
    /// The control plane's broker cannot be reached, or refused us.
    BrokerUnreachable = 19,
    /// Memory could not be had.
    MemoryUnavailable = 20,
    /// A peer sent what the protocol does not allow.
    ProtocolViolation = 21,
    /// A chunk stayed corrupt however often it was sent again.
    IntegrityExhausted = 22,
    /// The caller gave the operation up.
    Cancelled = 23,
    /// The group was closed.
    Closed = 24,
    /// The operating system refused something.
    System = 25,
    /// The others went on without this rank.
    Removed = 26,
    /// The control log was lost, and ranks had gone on with different members.
    Diverged = 27,
    /// Commits could not be published within their bound.
    Unrecorded = 28,
    /// A rank was lost in this step, which is to be repeated from its beginning.
    StepAborted = 29,
    /// A peer is in another epoch.
    EpochMismatch = 30,
    /// The state could not be saved, on any rank. Everything else goes on: the save before is whole, and the next one may
    /// succeed.
    NotSaved = 31,
    /// A saved state is damaged, or not one that can be restored here.
    NotRestored = 32,
}

impl FaultKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [Self; 32] = [
        Self::InvalidArgument,
        Self::UndeclaredTensor,
        Self::TensorBusy,
        Self::ShapeMismatch,
        Self::DTypeMismatch,
        Self::OperationMismatch,
        Self::DeclarationMismatch,
        Self::NotOffered,
        Self::DeadlineExceeded,
        Self::RankLeft,
        Self::RankDied,
        Self::WorldMismatch,
        Self::JobNameTaken,
        Self::SecretMismatch,
        Self::SecretMissing,
        Self::ProtocolVersion,
        Self::AddressInUse,
        Self::AddressUnreachable,
        Self::BrokerUnreachable,
        Self::MemoryUnavailable,
        Self::ProtocolViolation,
        Self::IntegrityExhausted,
        Self::Cancelled,
        Self::Closed,
        Self::System,
        Self::Removed,
        Self::Diverged,
        Self::Unrecorded,
        Self::StepAborted,
        Self::EpochMismatch,
        Self::NotSaved,
        Self::NotRestored,
    ];

    /// The kind with this code.
    #[must_use]
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == code)
    }

    /// What the fault reaches: decides what may go on after it.
    #[must_use]
    pub const fn scope(self) -> Scope {
        match self {
            Self::InvalidArgument
            | Self::UndeclaredTensor
            | Self::TensorBusy
            | Self::Closed
            | Self::NotSaved
            | Self::NotRestored => Scope::Operation,
            Self::ProtocolViolation | Self::IntegrityExhausted | Self::EpochMismatch => Scope::Link,
            Self::RankDied | Self::RankLeft | Self::AddressUnreachable => Scope::Peer,
            Self::NotOffered | Self::DeadlineExceeded | Self::Cancelled => Scope::Step,
            _ => Scope::Job,
        }
    }

    /// Whether the machine of the rank that met it lacks something, such as memory or descriptors: others may not.
    #[must_use]
    pub const fn is_shortage(self) -> bool {
        matches!(self, Self::MemoryUnavailable | Self::System)
    }
}

/// What a fault reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The one call. Everything else goes on.
    Operation,
    /// One link between two ranks.
    Link,
    /// One rank.
    Peer,
    /// The step that was going on.
    Step,
    /// The whole job.
    Job,
}

/// A typed error: what happened, at which rank, to which tensor, and what to do.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub struct Fault {
    /// What kind of thing happened.
    pub kind: FaultKind,
    /// The rank that caused it or that it happened to, where one is known.
    pub rank: Option<Rank>,
    /// The tensor it happened to.
    pub tensor: Option<String>,
    /// The step of that tensor.
    pub step: Option<Step>,
    /// The rank that noticed, when it was not this one.
    pub reporter: Option<Rank>,
    /// What was wrong and what to do, for people.
    pub detail: String,
}

impl Fault {
    /// A fault of this kind; `detail` says what was wrong and what to do.
    #[must_use]
    pub fn new(kind: FaultKind, detail: impl Into<String>) -> Self {
        Self { kind, rank: None, tensor: None, step: None, reporter: None, detail: detail.into() }
    }

    /// `peer` sent something that the protocol does not allow; `what` completes "rank 1 sent ...".
    #[must_use]
    pub fn violation(peer: Rank, what: &str) -> Self {
        let detail = format!(
            "{peer} sent {what}, which the protocol does not allow: both ranks must run the same version of gradwire, and nothing else may use its ports"
        );
        Self::new(FaultKind::ProtocolViolation, detail).at(peer)
    }

    /// Names the rank that caused it or that it happened to.
    #[must_use]
    pub fn at(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Names the tensor.
    #[must_use]
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Names the step.
    #[must_use]
    pub fn step(mut self, step: Step) -> Self {
        self.step = Some(step);
        self
    }

    /// Names the rank that noticed.
    #[must_use]
    pub fn reported_by(mut self, rank: Rank) -> Self {
        self.reporter = Some(rank);
        self
    }

    /// What the fault reaches.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        self.kind.scope()
    }
}

/// As `Display`: programs that return a fault from `main` print this.
impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = &self.tensor {
            write!(f, "tensor '{tensor}'")?;
            if let Some(step) = self.step {
                write!(f, " ({step})")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.detail)?;
        match (self.rank, self.reporter) {
            (Some(rank), Some(reporter)) => write!(f, " [{:?}, {rank}, reported by {reporter}]", self.kind),
            (Some(rank), None) => write!(f, " [{:?}, {rank}]", self.kind),
            (None, Some(reporter)) => write!(f, " [{:?}, reported by {reporter}]", self.kind),
            (None, None) => write!(f, " [{:?}]", self.kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn every_kind_has_its_own_code_and_is_found_by_it() {
        let codes: BTreeSet<u16> = FaultKind::ALL.iter().map(|kind| *kind as u16).collect();
        assert_eq!(codes.len(), FaultKind::ALL.len());
        for kind in FaultKind::ALL {
            assert_eq!(FaultKind::from_code(kind as u16), Some(kind));
        }
        assert_eq!(FaultKind::from_code(0), None);
        assert_eq!(FaultKind::from_code(FaultKind::ALL.len() as u16 + 1), None);
    }

    #[test]
    fn it_reads_as_one_sentence_with_all_that_is_known() {
        let bare = Fault::new(FaultKind::Closed, "the group was closed");
        assert_eq!(bare.to_string(), "the group was closed [Closed]");
        assert_eq!(bare.clone().at(Rank(3)).to_string(), "the group was closed [Closed, rank 3]");
        assert_eq!(bare.reported_by(Rank(1)).to_string(), "the group was closed [Closed, reported by rank 1]");
        let full = Fault::new(FaultKind::NotOffered, "rank 2 did not offer its part within 30 s")
            .at(Rank(2))
            .tensor("fc1.weight")
            .step(Step(7))
            .reported_by(Rank(0));
        assert_eq!(
            full.to_string(),
            "tensor 'fc1.weight' (step 7): rank 2 did not offer its part within 30 s [NotOffered, rank 2, reported by \
             rank 0]"
        );
    }

    #[test]
    fn a_fault_of_the_callers_own_making_reaches_only_the_call() {
        assert_eq!(Fault::new(FaultKind::TensorBusy, "").scope(), Scope::Operation);
        assert_eq!(Fault::new(FaultKind::ProtocolViolation, "").scope(), Scope::Link);
        assert_eq!(Fault::new(FaultKind::RankDied, "").scope(), Scope::Peer);
        assert_eq!(Fault::new(FaultKind::NotOffered, "").scope(), Scope::Step);
        assert_eq!(Fault::new(FaultKind::ShapeMismatch, "").scope(), Scope::Job);
    }
}
