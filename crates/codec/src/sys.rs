//! Instruction sets: the only file of this crate with unsafe code.
//!
//! The workspace is compiled for the oldest processor of each architecture. A [`Kernel`] is compiled twice here, for
//! that and for x86-64 with AVX2 and F16C, and [`dispatch`] picks at run time. The two differ in speed only: kernels
//! use no operation whose result depends on the instruction set.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::format::LANES;

/// A loop to be compiled for several instruction sets. `run` and all that it calls must be `#[inline(always)]`: what is
/// not inlined is compiled for the oldest processor.
pub(crate) trait Kernel {
    /// What the loop finds out.
    type Output;

    /// Runs the loop.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// Proof that the processor has an instruction set, and the operations that the compiler does not find by itself.
pub(crate) trait Isa: Copy {
    /// Widens binary16.
    fn widen(self, bits: [u16; LANES]) -> [f32; LANES];

    /// Rounds to binary16, ties to even. NaN stays NaN; its payload may depend on the processor.
    fn narrow(self, values: [f32; LANES]) -> [u16; LANES];
}

/// Runs a kernel with the best instruction set of this processor.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = avx2::Avx2::detect() {
        return avx2.run(kernel);
    }
    kernel.run(Portable)
}

/// The instruction set that conversion and reduction use on this processor, for people: `avx2+f16c` or `portable`.
#[must_use]
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if avx2::Avx2::detect().is_some() {
        return "avx2+f16c";
    }
    "portable"
}

/// What every processor of the architecture has, and what crate `half` detects by itself.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Isa for Portable {
    #[inline(always)]
    fn widen(self, bits: [u16; LANES]) -> [f32; LANES] {
        let mut values = [0.0; LANES];
        bits.reinterpret_cast::<f16>().convert_to_f32_slice(&mut values);
        values
    }

    #[inline(always)]
    fn narrow(self, values: [f32; LANES]) -> [u16; LANES] {
        let mut bits = [0; LANES];
        bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(&values);
        bits
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{__m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph};

    use bytemuck::cast;

    use super::{Isa, Kernel, LANES};

    const _: () = assert!(LANES == 16, "two vectors of eight");

    /// Proof that the processor has AVX2 and F16C: only [`Avx2::detect`] makes one.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx2 {
        #[inline]
        pub(super) fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
        }

        #[inline]
        pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
            #[target_feature(enable = "avx2,f16c")]
            fn compiled<K: Kernel>(isa: Avx2, kernel: K) -> K::Output {
                kernel.run(isa)
            }

            // SAFETY: `self` exists, so that `detect` has found both features on this processor.
            unsafe { compiled(self, kernel) }
        }
    }

    impl Isa for Avx2 {
        #[inline(always)]
        fn widen(self, bits: [u16; LANES]) -> [f32; LANES] {
            let [low, high]: [__m128i; 2] = cast(bits);
            // SAFETY: `self` exists, so that `detect` has found both features on this processor.
            unsafe { cast([widen_vector(low), widen_vector(high)]) }
        }

        #[inline(always)]
        fn narrow(self, values: [f32; LANES]) -> [u16; LANES] {
            let [low, high]: [__m256; 2] = cast(values);
            // SAFETY: `self` exists, so that `detect` has found both features on this processor.
            unsafe { cast([narrow_vector(low), narrow_vector(high)]) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widen_vector(bits: __m128i) -> __m256 {
        _mm256_cvtph_ps(bits)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn narrow_vector(values: __m256) -> __m128i {
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values)
    }
}
