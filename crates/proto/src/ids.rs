//! Identifiers, one newtype each, so that an index, a count and a version can never be mixed up.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A member of the job, `0..world_size`.
    Rank(u32), "rank "
);
id!(
    /// Number of a membership view. The first is 1; any change of members makes a higher one.
    Epoch(u64), "epoch "
);
id!(
    /// How often a tensor has been reduced: the n-th operation on it carries step n on every rank.
    Step(u64), "step "
);
id!(
    /// A round of the federated mode. The first is 1.
    Round(u64), "round "
);
id!(
    /// A declared tensor: its index in the agreed declaration order, the same on every rank.
    TensorId(u32), "tensor "
);
id!(
    /// A bucket: tensors that travel together.
    BucketId(u32), "bucket "
);
id!(
    /// A unit: the part of one tensor that lies in one shard. What is tracked, owned and reduced.
    UnitIndex(u32), "unit "
);
id!(
    /// Counts transmissions of the same data, so that every one of them is distinct.
    Attempt(u16), "attempt "
);
id!(
    /// Names a block of memory of one process to its peers. Never reused within a process.
    RegionKey(u64), "region "
);

impl Rank {
    /// The rank as an index into per-rank arrays.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl TensorId {
    /// The id as an index into per-tensor arrays.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl BucketId {
    /// The id as an index into per-bucket arrays.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl UnitIndex {
    /// The unit as an index into per-unit arrays.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Round {
    /// The round after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Step {
    /// The step after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
