//! Element types, wire formats, reductions and collectives.

use core::fmt;

/// Element type of a tensor, and of what travels on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary64.
    F64 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 4,
    /// Two's complement, 32 bits.
    I32 = 5,
    /// Two's complement, 64 bits.
    I64 = 6,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 6] = [Self::F32, Self::F64, Self::F16, Self::Bf16, Self::I32, Self::I64];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// Whether the type is an integer.
    #[must_use]
    pub const fn is_integer(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// The type with this code on the wire.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F64),
            3 => Some(Self::F16),
            4 => Some(Self::Bf16),
            5 => Some(Self::I32),
            6 => Some(Self::I64),
            _ => None,
        }
    }

    /// Name as users write it: `f32`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How f32 tensors travel. All other types travel as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WireFormat {
    /// Exact.
    #[default]
    Fp32 = 1,
    /// Rounded to the nearest binary16, ties to even.
    Fp16 = 2,
    /// Rounded to the nearest bfloat16, ties to even.
    Bf16 = 3,
}

impl WireFormat {
    /// All wire formats.
    pub const ALL: [Self; 3] = [Self::Fp32, Self::Fp16, Self::Bf16];

    /// The type that elements of `dtype` have on the wire under this format.
    #[must_use]
    pub const fn wire_dtype(self, dtype: DType) -> DType {
        match (dtype, self) {
            (DType::F32, Self::Fp16) => DType::F16,
            (DType::F32, Self::Bf16) => DType::Bf16,
            (other, _) => other,
        }
    }

    /// Name as users write it: `fp32`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        }
    }

    /// The format with this code on the wire.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Fp32),
            2 => Some(Self::Fp16),
            3 => Some(Self::Bf16),
            _ => None,
        }
    }
}

impl fmt::Display for WireFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl core::str::FromStr for WireFormat {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or(UnknownName)
    }
}

/// A name that stands for nothing known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected one of fp32, fp16, bf16")]
pub struct UnknownName;

/// How contributions are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum in rank order. Integers wrap, as two's complement does.
    #[default]
    Sum = 1,
    /// The sum in rank order, divided once by the number of contributors. Integers round towards zero.
    Mean = 2,
    /// The smallest. NaN if any is NaN.
    Min = 3,
    /// The largest. NaN if any is NaN.
    Max = 4,
}

impl ReduceOp {
    /// All reductions.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Mean, Self::Min, Self::Max];

    /// The reduction with this code on the wire.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Sum),
            2 => Some(Self::Mean),
            3 => Some(Self::Min),
            4 => Some(Self::Max),
            _ => None,
        }
    }

    /// Name as users write it: `mean`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an operation on a tensor does with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of the whole tensor.
    #[default]
    AllReduce,
    /// Rank r gets the reduction of block r: `ceil(elements / world)` elements, the last blocks shorter or empty.
    ReduceScatter,
    /// Every rank gets the tensor whose block r (cut as for `ReduceScatter`) comes from rank r.
    AllGather,
    /// Every rank gets the root's tensor.
    Broadcast {
        /// The rank whose tensor it is.
        root: crate::Rank,
    },
}

impl Collective {
    /// Name as users write it: `allreduce`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "allreduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "allgather",
            Self::Broadcast { .. } => "broadcast",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            other => f.write_str(other.name()),
        }
    }
}
