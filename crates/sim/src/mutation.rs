//! Bugs that are planted to show that the simulation finds such ones.
//!
//! They are planted in the simulated driver and its surroundings, and not in `gradwire-proto`: a cargo feature there
//! would be switched on for every crate that is built in the same go, the product included. What the driver does around
//! the session (checking payloads, adding up, giving slots back) is its own duty anyhow; and a check within the session
//! is as good as skipped when the driver makes whatever it looks at pass.

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mutation {
    /// Frames of another epoch pass for ones of this epoch.
    SkipEpochCheck,
    /// Contributions are added in the order in which they arrived.
    ArrivalOrder,
    /// A contribution is used where it landed, although its slot was given back and may be written to again.
    FreeSlotEarly,
    /// One contribution is added twice.
    CountTwice,
    /// Payloads are not checked.
    SkipCrc,
    /// Writes land before anybody is asked.
    SkipAdmission,
    /// Deadlines pass unnoticed.
    IgnoreDeadline,
    /// The broker gives receipts for what it has not stored.
    EarlyReceipt,
    /// Memory of an epoch stays when the epoch is over.
    LeakEpoch,
    /// In the federated mode, an aggregator adds up what it has, not what the log says.
    AddWhatIsHere,
    /// An operation that is done again adds this rank's first result in place of its contribution.
    RedoFromResult,
    /// Results that were handed out before an operation was done again stay.
    KeepReplaced,
    /// A commit waits for nobody.
    CommitAtOnce,
    /// A rank that others went on without takes its step for final.
    IgnoreRemoval,
    /// A process that joins leaves the results of a step out.
    SkipResults,
    /// A member gives a joining process the state that it has, whatever step that is of.
    StateAsIs,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::SkipEpochCheck,
        Self::ArrivalOrder,
        Self::FreeSlotEarly,
        Self::CountTwice,
        Self::SkipCrc,
        Self::SkipAdmission,
        Self::IgnoreDeadline,
        Self::EarlyReceipt,
        Self::LeakEpoch,
        Self::AddWhatIsHere,
        Self::RedoFromResult,
        Self::KeepReplaced,
        Self::CommitAtOnce,
        Self::IgnoreRemoval,
        Self::SkipResults,
        Self::StateAsIs,
    ];
}
