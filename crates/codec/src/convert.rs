//! Conversion between native elements and wire elements.

use std::marker::PhantomData;

use gradwire_proto::{DType, Fault, FaultKind};

use crate::format::{Bf16, F16, F32, F64, Format};
use crate::kernel::{Convert, Scan};
use crate::sys::dispatch;

/// Rounds native elements of `dtype` to wire elements of `wire`: f32 to f16 or bf16, to nearest, ties to even, NaN to
/// the canonical NaN. Between equal types it copies.
///
/// # Errors
/// A [`Fault`] of kind `InvalidArgument` if f32 is not what has to be rounded, or if the slices do not hold the same
/// number of whole elements. Nothing is written then.
pub fn pack(dtype: DType, wire: DType, source: &[u8], target: &mut [u8]) -> Result<(), Fault> {
    check_pair(dtype, wire)?;
    check_lengths(dtype, source.len(), wire, target.len())?;
    pack_checked(wire == dtype, wire, source, target);
    Ok(())
}

/// Widens wire elements of `wire` to native elements of `dtype`, and tells whether any is inf or NaN. Between equal
/// types it copies.
///
/// # Errors
/// As [`pack`].
pub fn unpack(wire: DType, dtype: DType, source: &[u8], target: &mut [u8]) -> Result<bool, Fault> {
    check_pair(dtype, wire)?;
    check_lengths(wire, source.len(), dtype, target.len())?;
    if wire == dtype {
        return Ok(scan(dtype, source, Some(target)));
    }
    Ok(widen_checked(wire, source, target))
}

/// Whether any element is inf or NaN. Never for integers.
///
/// # Errors
/// A [`Fault`] of kind `InvalidArgument` if `bytes` does not hold whole elements.
pub fn has_nonfinite(dtype: DType, bytes: &[u8]) -> Result<bool, Fault> {
    check_lengths(dtype, bytes.len(), dtype, bytes.len())?;
    Ok(scan(dtype, bytes, None))
}

/// [`pack`] after its checks.
pub(crate) fn pack_checked(same: bool, wire: DType, source: &[u8], target: &mut [u8]) {
    match wire {
        DType::F16 if !same => _ = convert::<F32, F16>(source, target),
        DType::Bf16 if !same => _ = convert::<F32, Bf16>(source, target),
        _ => target.copy_from_slice(source),
    }
}

/// Widens f16 or bf16 to f32 after the checks of [`unpack`].
pub(crate) fn widen_checked(wire: DType, source: &[u8], target: &mut [u8]) -> bool {
    match wire {
        DType::Bf16 => convert::<Bf16, F32>(source, target),
        _ => convert::<F16, F32>(source, target),
    }
}

fn convert<S: Format, T: Format<Value = S::Value>>(source: &[u8], target: &mut [u8]) -> bool {
    dispatch(Convert::<S, T> { source, target, formats: PhantomData })
}

fn scan(dtype: DType, source: &[u8], target: Option<&mut [u8]>) -> bool {
    match dtype {
        DType::F32 => dispatch(Scan::<F32> { source, target, format: PhantomData }),
        DType::F64 => dispatch(Scan::<F64> { source, target, format: PhantomData }),
        DType::F16 => dispatch(Scan::<F16> { source, target, format: PhantomData }),
        DType::Bf16 => dispatch(Scan::<Bf16> { source, target, format: PhantomData }),
        DType::I32 | DType::I64 => {
            if let Some(target) = target {
                target.copy_from_slice(source);
            }
            false
        }
    }
}

/// Checks that elements of `dtype` can travel as `wire`.
pub(crate) fn check_pair(dtype: DType, wire: DType) -> Result<(), Fault> {
    match (dtype, wire) {
        (DType::F32, DType::F16 | DType::Bf16) => Ok(()),
        (dtype, wire) if dtype == wire => Ok(()),
        (dtype, wire) => Err(invalid(format!(
            "{dtype} elements cannot travel as {wire}: take f16 or bf16 for f32, and the type itself for all others"
        ))),
    }
}

/// Checks that two slices hold the same number of whole elements.
pub(crate) fn check_lengths(a: DType, a_bytes: usize, b: DType, b_bytes: usize) -> Result<(), Fault> {
    let whole = a_bytes.is_multiple_of(a.size()) && b_bytes.is_multiple_of(b.size());
    if whole && a_bytes / a.size() == b_bytes / b.size() {
        return Ok(());
    }
    Err(invalid(format!(
        "{a_bytes} bytes of {a} and {b_bytes} bytes of {b} are not the same number of whole elements: give slices of \
         the same range of one tensor"
    )))
}

pub(crate) fn invalid(detail: impl Into<String>) -> Fault {
    Fault::new(FaultKind::InvalidArgument, detail)
}
