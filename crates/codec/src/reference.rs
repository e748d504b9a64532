//! The arithmetic once more: one element at a time, no blocks, no vectors, no code shared with the fast path.

use gradwire_proto::{DType, Fault, FaultKind, ReduceOp};
use half::{bf16, f16};

/// What [`crate::Reduction`] must give: the native result of reducing the ranks' native `contributions`, in rank
/// order. Slow, and meant to be read: it is the oracle of tests, of the demo and of the benchmark's verification.
///
/// # Errors
/// A [`Fault`] of kind `InvalidArgument` if there are no contributions, if they differ in length, if they do not hold
/// whole elements, or if `dtype` cannot travel as `wire`.
pub fn reference(dtype: DType, wire: DType, op: ReduceOp, contributions: &[&[u8]]) -> Result<Vec<u8>, Fault> {
    let invalid = |detail| Err(Fault::new(FaultKind::InvalidArgument, detail));
    let Some(first) = contributions.first() else {
        return invalid("a reduction over no contributions has no result: give at least one");
    };
    if contributions.iter().any(|other| other.len() != first.len() || other.len() % dtype.size() != 0) {
        return invalid("contributions must hold the same number of whole elements: give the same range of each rank");
    }
    if wire != dtype && !(dtype == DType::F32 && matches!(wire, DType::F16 | DType::Bf16)) {
        return invalid("only f32 can travel as another type, and only as f16 or bf16: choose one of these");
    }
    let mut result = Vec::with_capacity(first.len());
    for at in (0..first.len()).step_by(dtype.size()) {
        let elements = contributions.iter().map(|bytes| &bytes[at..at + dtype.size()]);
        match dtype {
            DType::F32 => result.extend(single(wire, op, elements.map(as_f32)).to_le_bytes()),
            DType::F16 => {
                let values = elements.map(|bytes| f16::from_le_bytes(array(bytes)).to_f32_const());
                result.extend(f16::from_f32_const(single(wire, op, values)).to_le_bytes());
            }
            DType::Bf16 => {
                let values = elements.map(|bytes| bf16::from_le_bytes(array(bytes)).to_f32());
                result.extend(bf16::from_f32(single(wire, op, values)).to_le_bytes());
            }
            DType::F64 => {
                let values = elements.map(|bytes| f64::from_le_bytes(array(bytes)));
                result.extend(double(op, values).to_le_bytes());
            }
            DType::I32 => {
                let values = elements.map(|bytes| i128::from(i32::from_le_bytes(array(bytes))));
                result.extend((integer(op, values) as i32).to_le_bytes());
            }
            DType::I64 => {
                let values = elements.map(|bytes| i128::from(i64::from_le_bytes(array(bytes))));
                result.extend((integer(op, values) as i64).to_le_bytes());
            }
        }
    }
    Ok(result)
}

fn as_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(array(bytes))
}

/// The first bytes of a slice: callers give exactly as many as the type has.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|index| bytes[index])
}

/// `value` as the wire shows it.
fn rounded(wire: DType, value: f32) -> f32 {
    if value.is_nan() {
        return f32::from_bits(0x7fc0_0000);
    }
    match wire {
        DType::F16 => f16::from_f32_const(value).to_f32_const(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn single(wire: DType, op: ReduceOp, values: impl Iterator<Item = f32>) -> f32 {
    let mut count = 0.0;
    let mut result: Option<f32> = None;
    for value in values {
        let value = rounded(wire, value);
        count += 1.0;
        result = Some(match (result, op) {
            (None, _) => value,
            (Some(sum), ReduceOp::Sum | ReduceOp::Mean) => sum + value,
            (Some(other), _) if other.is_nan() || value.is_nan() => f32::NAN,
            // `total_cmp` puts -0.0 before +0.0.
            (Some(other), ReduceOp::Min) => std::cmp::min_by(other, value, f32::total_cmp),
            (Some(other), ReduceOp::Max) => std::cmp::max_by(other, value, f32::total_cmp),
        });
    }
    let result = result.unwrap_or_default();
    rounded(wire, if op == ReduceOp::Mean { result / count } else { result })
}

fn double(op: ReduceOp, values: impl Iterator<Item = f64>) -> f64 {
    let mut count = 0.0;
    let mut result: Option<f64> = None;
    for value in values {
        count += 1.0;
        result = Some(match (result, op) {
            (None, _) => value,
            (Some(sum), ReduceOp::Sum | ReduceOp::Mean) => sum + value,
            (Some(other), _) if other.is_nan() || value.is_nan() => f64::NAN,
            (Some(other), ReduceOp::Min) => std::cmp::min_by(other, value, f64::total_cmp),
            (Some(other), ReduceOp::Max) => std::cmp::max_by(other, value, f64::total_cmp),
        });
    }
    let result = result.unwrap_or_default();
    let result = if op == ReduceOp::Mean { result / count } else { result };
    if result.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { result }
}

fn integer(op: ReduceOp, values: impl Iterator<Item = i128>) -> i128 {
    let mut count = 0;
    let mut result: Option<i128> = None;
    for value in values {
        count += 1;
        result = Some(match (result, op) {
            (None, _) => value,
            (Some(sum), ReduceOp::Sum | ReduceOp::Mean) => sum + value,
            (Some(other), ReduceOp::Min) => other.min(value),
            (Some(other), ReduceOp::Max) => other.max(value),
        });
    }
    let result = result.unwrap_or_default();
    if op == ReduceOp::Mean { result / count } else { result }
}
