//! Element types: how [`LANES`] of them are read, combined and written at once.
//!
//! Everything here is `#[inline(always)]` because [`crate::sys`] compiles it for several instruction sets, and written
//! as loops over fixed arrays because those become vector instructions on all of them.

use bytemuck::{Pod, cast};

use crate::sys::Isa;

/// Elements handled at once: one or more full vectors of every element type.
pub(crate) const LANES: usize = 16;

/// An element type as it lies in memory.
pub(crate) trait Format: Copy {
    /// What elements are accumulated in.
    type Value: Value;
    /// The bytes of [`LANES`] elements.
    type Block: Pod;
    /// The largest magnitude seen so far in each lane: tells whether any was inf or NaN.
    type Peak: Copy;

    /// The peak of no elements.
    const NO_PEAK: Self::Peak;

    /// Widens elements to values.
    fn load<I: Isa>(isa: I, block: &Self::Block) -> [Self::Value; LANES];

    /// Rounds values to elements: to nearest, ties to even; NaN to the canonical NaN. Integers wrap.
    fn store<I: Isa>(isa: I, values: [Self::Value; LANES]) -> Self::Block;

    /// Takes note of elements.
    fn watch(peak: &mut Self::Peak, block: &Self::Block);

    /// Whether any of the elements taken note of was inf or NaN.
    fn nonfinite(peak: &Self::Peak) -> bool;
}

/// What elements are accumulated in.
pub(crate) trait Value: Copy {
    /// Fills accumulators before they are used.
    const ZERO: Self;

    /// The sum.
    fn plus(self, other: Self) -> Self;
    /// The lesser; NaN if one is; -0.0 before +0.0.
    fn lesser(self, other: Self) -> Self;
    /// The greater; NaN if one is; +0.0 before -0.0.
    fn greater(self, other: Self) -> Self;
    /// The quotient, integers rounded towards zero.
    fn over(self, divisor: u32) -> Self;
}

/// A way to combine two values.
pub(crate) trait Combine: Copy {
    /// Combines two values, the earlier rank's first.
    fn combine<V: Value>(a: V, b: V) -> V;
}

#[derive(Clone, Copy)]
pub(crate) struct Add;
#[derive(Clone, Copy)]
pub(crate) struct Min;
#[derive(Clone, Copy)]
pub(crate) struct Max;

impl Combine for Add {
    #[inline(always)]
    fn combine<V: Value>(a: V, b: V) -> V {
        a.plus(b)
    }
}

impl Combine for Min {
    #[inline(always)]
    fn combine<V: Value>(a: V, b: V) -> V {
        a.lesser(b)
    }
}

impl Combine for Max {
    #[inline(always)]
    fn combine<V: Value>(a: V, b: V) -> V {
        a.greater(b)
    }
}

macro_rules! float_value {
    ($float:ty) => {
        impl Value for $float {
            const ZERO: Self = 0.0;

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                // Equal values have equal bits, except zeros: there one sign is enough to make the result negative.
                let equal = Self::from_bits(self.to_bits() | other.to_bits());
                let lesser = if self < other { self } else { other };
                let ordered = if self == other { equal } else { lesser };
                // If the other one is NaN, neither comparison holds, and it is chosen already.
                if self.is_nan() { self } else { ordered }
            }

            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                let equal = Self::from_bits(self.to_bits() & other.to_bits());
                let greater = if self > other { self } else { other };
                let ordered = if self == other { equal } else { greater };
                if self.is_nan() { self } else { ordered }
            }

            #[inline(always)]
            fn over(self, divisor: u32) -> Self {
                self / divisor as Self
            }
        }
    };
}

float_value!(f32);
float_value!(f64);

/// Sums of i32: no number of ranks can overflow it.
impl Value for i64 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    #[inline(always)]
    fn lesser(self, other: Self) -> Self {
        self.min(other)
    }

    #[inline(always)]
    fn greater(self, other: Self) -> Self {
        self.max(other)
    }

    #[inline(always)]
    fn over(self, divisor: u32) -> Self {
        self / i64::from(divisor)
    }
}

/// Sums of i64: no number of ranks can overflow it.
impl Value for i128 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    #[inline(always)]
    fn lesser(self, other: Self) -> Self {
        self.min(other)
    }

    #[inline(always)]
    fn greater(self, other: Self) -> Self {
        self.max(other)
    }

    #[inline(always)]
    fn over(self, divisor: u32) -> Self {
        // Division of 128 bits is a slow call, and few sums need it.
        match i64::try_from(self) {
            Ok(small) => i128::from(small / i64::from(divisor)),
            Err(_) => self / i128::from(divisor),
        }
    }
}

/// IEEE 754 binary32.
#[derive(Clone, Copy)]
pub(crate) struct F32;

impl Format for F32 {
    type Value = f32;
    type Block = [u8; 4 * LANES];
    type Peak = [i32; LANES];

    const NO_PEAK: Self::Peak = [0; LANES];

    #[inline(always)]
    fn load<I: Isa>(_: I, block: &Self::Block) -> [f32; LANES] {
        cast(*block)
    }

    #[inline(always)]
    fn store<I: Isa>(_: I, values: [f32; LANES]) -> Self::Block {
        let mut bits = [0_u32; LANES];
        for (bits, value) in bits.iter_mut().zip(values) {
            *bits = if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
        }
        cast(bits)
    }

    #[inline(always)]
    fn watch(peak: &mut Self::Peak, block: &Self::Block) {
        let bits: [i32; LANES] = cast(*block);
        for (peak, bits) in peak.iter_mut().zip(bits) {
            *peak = (*peak).max(bits & 0x7fff_ffff);
        }
    }

    #[inline(always)]
    fn nonfinite(peak: &Self::Peak) -> bool {
        peak.iter().any(|peak| *peak >= 0x7f80_0000)
    }
}

/// IEEE 754 binary64.
#[derive(Clone, Copy)]
pub(crate) struct F64;

impl Format for F64 {
    type Value = f64;
    type Block = [u8; 8 * LANES];
    type Peak = [i64; LANES];

    const NO_PEAK: Self::Peak = [0; LANES];

    #[inline(always)]
    fn load<I: Isa>(_: I, block: &Self::Block) -> [f64; LANES] {
        cast(*block)
    }

    #[inline(always)]
    fn store<I: Isa>(_: I, values: [f64; LANES]) -> Self::Block {
        let mut bits = [0_u64; LANES];
        for (bits, value) in bits.iter_mut().zip(values) {
            *bits = if value.is_nan() { 0x7ff8_0000_0000_0000 } else { value.to_bits() };
        }
        cast(bits)
    }

    #[inline(always)]
    fn watch(peak: &mut Self::Peak, block: &Self::Block) {
        let bits: [i64; LANES] = cast(*block);
        for (peak, bits) in peak.iter_mut().zip(bits) {
            *peak = (*peak).max(bits & i64::MAX);
        }
    }

    #[inline(always)]
    fn nonfinite(peak: &Self::Peak) -> bool {
        peak.iter().any(|peak| *peak >= 0x7ff0_0000_0000_0000)
    }
}

/// IEEE 754 binary16.
#[derive(Clone, Copy)]
pub(crate) struct F16;

impl Format for F16 {
    type Value = f32;
    type Block = [u8; 2 * LANES];
    type Peak = [i16; LANES];

    const NO_PEAK: Self::Peak = [0; LANES];

    #[inline(always)]
    fn load<I: Isa>(isa: I, block: &Self::Block) -> [f32; LANES] {
        isa.widen(cast(*block))
    }

    #[inline(always)]
    fn store<I: Isa>(isa: I, values: [f32; LANES]) -> Self::Block {
        let mut bits = isa.narrow(values);
        for bits in &mut bits {
            *bits = if *bits & 0x7fff > 0x7c00 { 0x7e00 } else { *bits };
        }
        cast(bits)
    }

    #[inline(always)]
    fn watch(peak: &mut Self::Peak, block: &Self::Block) {
        watch_16_bits(peak, cast(*block));
    }

    #[inline(always)]
    fn nonfinite(peak: &Self::Peak) -> bool {
        peak.iter().any(|peak| *peak >= 0x7c00)
    }
}

/// bfloat16. Not by crate `half`, whose loops for it are scalar.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl Format for Bf16 {
    type Value = f32;
    type Block = [u8; 2 * LANES];
    type Peak = [i16; LANES];

    const NO_PEAK: Self::Peak = [0; LANES];

    #[inline(always)]
    fn load<I: Isa>(_: I, block: &Self::Block) -> [f32; LANES] {
        let bits: [u16; LANES] = cast(*block);
        let mut values = [0_u32; LANES];
        for (value, bits) in values.iter_mut().zip(bits) {
            *value = u32::from(bits) << 16;
        }
        cast(values)
    }

    #[inline(always)]
    fn store<I: Isa>(_: I, values: [f32; LANES]) -> Self::Block {
        let wide: [u32; LANES] = cast(values);
        let mut bits = [0_u16; LANES];
        for (bits, wide) in bits.iter_mut().zip(wide) {
            // Carries into the upper half above one half unit in the last place, and at exactly one half if that
            // makes it even. A carry out of the mantissa is the next exponent, in the end infinity, as it should be.
            let rounded = wide.wrapping_add(0x7fff + ((wide >> 16) & 1)) >> 16;
            *bits = if wide & 0x7fff_ffff > 0x7f80_0000 { 0x7fc0 } else { rounded } as u16;
        }
        cast(bits)
    }

    #[inline(always)]
    fn watch(peak: &mut Self::Peak, block: &Self::Block) {
        watch_16_bits(peak, cast(*block));
    }

    #[inline(always)]
    fn nonfinite(peak: &Self::Peak) -> bool {
        peak.iter().any(|peak| *peak >= 0x7f80)
    }
}

#[inline(always)]
fn watch_16_bits(peak: &mut [i16; LANES], bits: [i16; LANES]) {
    for (peak, bits) in peak.iter_mut().zip(bits) {
        *peak = (*peak).max(bits & 0x7fff);
    }
}

macro_rules! integer_format {
    ($(#[$doc:meta])* $name:ident, $integer:ty, $value:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Format for $name {
            type Value = $value;
            type Block = [u8; size_of::<$integer>() * LANES];
            type Peak = ();

            const NO_PEAK: () = ();

            #[inline(always)]
            fn load<I: Isa>(_: I, block: &Self::Block) -> [$value; LANES] {
                let integers: [$integer; LANES] = cast(*block);
                let mut values = [0; LANES];
                for (value, integer) in values.iter_mut().zip(integers) {
                    *value = <$value>::from(integer);
                }
                values
            }

            #[inline(always)]
            fn store<I: Isa>(_: I, values: [$value; LANES]) -> Self::Block {
                let mut integers = [0; LANES];
                for (integer, value) in integers.iter_mut().zip(values) {
                    *integer = value as $integer;
                }
                cast(integers)
            }

            #[inline(always)]
            fn watch((): &mut (), _: &Self::Block) {}

            #[inline(always)]
            fn nonfinite((): &()) -> bool {
                false
            }
        }
    };
}

integer_format!(
    /// Two's complement, 32 bits.
    I32, i32, i64
);
integer_format!(
    /// Two's complement, 64 bits.
    I64, i64, i128
);

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use half::{bf16, f16};

    use super::*;
    use crate::kernel::{Convert, Pass, Reduce};
    use crate::sys::{Kernel, Portable, dispatch};

    /// Converts with the best instruction set and with the portable code, which have to agree.
    fn convert<S: Format, T: Format<Value = S::Value>>(source: &[u8], target_bytes: usize) -> Vec<u8> {
        let (mut best, mut portable) = (vec![0; target_bytes], vec![1; target_bytes]);
        let a = dispatch(Convert::<S, T> { source, target: &mut best, formats: PhantomData });
        let b = Convert::<S, T> { source, target: &mut portable, formats: PhantomData }.run(Portable);
        assert_eq!(a, b);
        assert!(best == portable, "instruction sets disagree");
        best
    }

    /// Every sign, exponent and upper mantissa, with the lower mantissas around which rounding decides.
    fn singles() -> Vec<u32> {
        let low = [0, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];
        (0..=u16::MAX).flat_map(|high| low.map(|low| u32::from(high) << 16 | low)).collect()
    }

    #[test]
    fn rounding_is_that_of_crate_half() {
        let singles = singles();
        let halves = convert::<F32, F16>(cast_to_bytes(&singles), singles.len() * 2);
        let brains = convert::<F32, Bf16>(cast_to_bytes(&singles), singles.len() * 2);
        for ((single, half), brain) in singles.iter().zip(halves.chunks_exact(2)).zip(brains.chunks_exact(2)) {
            let (half, brain) = (u16::from_le_bytes([half[0], half[1]]), u16::from_le_bytes([brain[0], brain[1]]));
            let single = f32::from_bits(*single);
            let nan = single.is_nan();
            assert_eq!(half, if nan { 0x7e00 } else { f16::from_f32_const(single).to_bits() }, "{single:e} as f16");
            assert_eq!(brain, if nan { 0x7fc0 } else { bf16::from_f32(single).to_bits() }, "{single:e} as bf16");
        }
    }

    #[test]
    fn widening_is_that_of_crate_half() {
        let every: Vec<u16> = (0..=u16::MAX).collect();
        let canonical = |value: f32| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
        let from_halves = convert::<F16, F32>(cast_to_bytes(&every), every.len() * 4);
        let from_brains = convert::<Bf16, F32>(cast_to_bytes(&every), every.len() * 4);
        for ((bits, half), brain) in every.iter().zip(from_halves.chunks_exact(4)).zip(from_brains.chunks_exact(4)) {
            assert_eq!(half, canonical(f16::from_bits(*bits).to_f32_const()).to_le_bytes(), "{bits:#06x} from f16");
            assert_eq!(brain, canonical(bf16::from_bits(*bits).to_f32()).to_le_bytes(), "{bits:#06x} from bf16");
        }
    }

    #[test]
    fn instruction_sets_reduce_to_the_same_bits() {
        fn check<F: Format, C: Combine>(a: &[u8], b: &[u8]) {
            for divisor in [None, Some(3)] {
                let (mut best, mut portable) = (vec![0; a.len()], vec![1; a.len()]);
                let pass = Pass::PairFinish { a, b, divisor, out: &mut best };
                let x = dispatch(Reduce::<F, C> { pass, operation: PhantomData });
                let pass = Pass::PairFinish { a, b, divisor, out: &mut portable };
                let y = Reduce::<F, C> { pass, operation: PhantomData }.run(Portable);
                assert_eq!(x, y);
                assert!(best == portable, "instruction sets disagree");
            }
        }
        fn check_operations<F: Format>(a: &[u8], b: &[u8]) {
            check::<F, Add>(a, b);
            check::<F, Min>(a, b);
            check::<F, Max>(a, b);
        }
        let a = singles();
        let b: Vec<u32> = a.iter().rev().map(|bits| bits.rotate_left(7) ^ 0x5555_aaaa).collect();
        let (a, b) = (cast_to_bytes(&a), cast_to_bytes(&b));
        check_operations::<F32>(a, b);
        check_operations::<F64>(a, b);
        check_operations::<F16>(a, b);
        check_operations::<Bf16>(a, b);
        check_operations::<I32>(a, b);
        check_operations::<I64>(a, b);
    }

    fn cast_to_bytes<T: Pod>(elements: &[T]) -> &[u8] {
        bytemuck::cast_slice(elements)
    }
}
