//! gradwire's wire formats and rank-ordered reduction, on bytes.
//!
//! This crate owns what happens to a tensor's elements: rounding to a wire format and back ([`pack`], [`unpack`]),
//! adding up what the ranks contributed ([`Reduction`]), finding inf and NaN, and checksums ([`crc32`]). It is also
//! what GPU kernels are checked against: [`reference()`] states the arithmetic once more, element by element, and shares
//! no code with the fast path. It knows nothing of tensors, frames, ranks' addresses or memory: callers hand in byte
//! slices.
//!
//! Slices hold whole elements in little-endian layout, at any alignment. No function but
//! [`reference()`] allocates, except to describe an error.
//!
//! # Arithmetic
//! What holds for every result, whatever the machine, the alignment, and the way a range is cut into calls:
//! - A contribution takes part as its wire format shows it. An f32 contribution of a tensor that travels as binary16
//!   is rounded first, also when it never leaves its rank.
//! - f32, f16 and bf16 accumulate in f32; f64 in f64; i32 and i64 exactly. The accumulator starts as the first rank's
//!   value (not zero, so that -0.0 stays -0.0) and the others follow in rank order, one rounding each.
//! - The mean is that sum, divided once by the number of contributors. Integer means round towards zero; integer sums
//!   wrap, as two's complement does.
//! - The result is rounded to the wire format once, to nearest, ties to even. Native output is that rounded result
//!   widened again: the bits that every other rank gets.
//! - Minimum and maximum are NaN if any contribution is. -0.0 is less than +0.0.
//! - Infinities propagate. Every NaN in a result, and every NaN that [`pack`] or [`unpack`] converts, is the canonical
//!   quiet NaN of its type (sign clear, only the topmost mantissa bit set): payloads would depend on operand order and
//!   processor. [`pack`] and [`unpack`] between equal types copy bits, NaN payloads included.
//!
//! Subnormals count as what they are, unless the calling thread itself has told its processor to flush them.
#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("gradwire keeps elements in little-endian layout and does not support big-endian targets");

mod checksum;
mod convert;
mod format;
mod kernel;
mod reduce;
mod reference;
#[allow(unsafe_code)]
mod sys;

pub use checksum::{crc32, crc32_combine};
pub use convert::{has_nonfinite, pack, unpack};
pub use reduce::{Input, Outputs, Reduction, Summary};
pub use reference::reference;
pub use sys::instruction_set;
