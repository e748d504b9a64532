//! The loops: over whole blocks of [`LANES`] elements, and one padded block for what is left.
//!
//! All slices given to one kernel hold the same number of elements; [`crate::reduce`] and [`crate::convert`] see to it.
//! Padding is zeros, which stay finite and are never written out.

use std::marker::PhantomData;

use bytemuck::{Zeroable, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};

use crate::format::{Combine, Format, LANES, Value};
use crate::sys::{Isa, Kernel};

/// Elements that an [`Accumulator`] holds: it and the slices of a few ranks stay in the first-level cache.
pub(crate) const ACCUMULATOR_ELEMENTS: usize = 1024;

/// Partial results of up to [`ACCUMULATOR_ELEMENTS`] elements.
pub(crate) type Accumulator<V> = [[V; LANES]; ACCUMULATOR_ELEMENTS / LANES];

/// One pass of a reduction, with `F` on the wire.
pub(crate) enum Pass<'a, V> {
    /// The accumulator becomes `a`.
    Load { a: &'a [u8], accumulator: &'a mut Accumulator<V> },
    /// The accumulator becomes `a` and `b` combined.
    Pair { a: &'a [u8], b: &'a [u8], accumulator: &'a mut Accumulator<V> },
    /// `a` is combined into the accumulator.
    Add { a: &'a [u8], accumulator: &'a mut Accumulator<V> },
    /// The accumulator is divided, rounded and written to `out`.
    Finish { accumulator: &'a Accumulator<V>, divisor: Option<u32>, out: &'a mut [u8] },
    /// `a` and `b` combined are divided, rounded and written to `out`: a whole reduction over two ranks.
    PairFinish { a: &'a [u8], b: &'a [u8], divisor: Option<u32>, out: &'a mut [u8] },
    /// The same where `out` holds one of the two. Combining two is commutative: which one does not matter.
    PairFinishInPlace { out: &'a mut [u8], b: &'a [u8], divisor: Option<u32> },
}

/// A [`Pass`] with its element type and operation. Tells whether any element that it wrote to `out` is inf or NaN.
pub(crate) struct Reduce<'a, F: Format, C> {
    pub(crate) pass: Pass<'a, F::Value>,
    pub(crate) operation: PhantomData<C>,
}

impl<F: Format, C: Combine> Kernel for Reduce<'_, F, C> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        match self.pass {
            Pass::Load { a, accumulator } => accumulate::<F, I>(isa, a, accumulator, |_, value| value),
            Pass::Add { a, accumulator } => accumulate::<F, I>(isa, a, accumulator, C::combine),
            Pass::Pair { a, b, accumulator } => pair::<F, C, I>(isa, a, b, accumulator),
            Pass::Finish { accumulator, divisor: None, out } => finish::<F, I>(isa, accumulator, out, |sum| sum),
            Pass::Finish { accumulator, divisor: Some(divisor), out } => {
                finish::<F, I>(isa, accumulator, out, |sum| sum.over(divisor))
            }
            Pass::PairFinish { a, b, divisor: None, out } => pair_finish::<F, C, I>(isa, a, b, out, |sum| sum),
            Pass::PairFinish { a, b, divisor: Some(divisor), out } => {
                pair_finish::<F, C, I>(isa, a, b, out, |sum| sum.over(divisor))
            }
            Pass::PairFinishInPlace { out, b, divisor: None } => pair_in_place::<F, C, I>(isa, out, b, |sum| sum),
            Pass::PairFinishInPlace { out, b, divisor: Some(divisor) } => {
                pair_in_place::<F, C, I>(isa, out, b, |sum| sum.over(divisor))
            }
        }
    }
}

#[inline(always)]
fn accumulate<F: Format, I: Isa>(
    isa: I,
    a: &[u8],
    accumulator: &mut Accumulator<F::Value>,
    combine: impl Fn(F::Value, F::Value) -> F::Value,
) -> bool {
    let (blocks, rest) = split::<F>(a);
    for (block, sums) in blocks.iter().zip(accumulator.iter_mut()) {
        *sums = zip_with(*sums, F::load(isa, block), &combine);
        one_block_at_a_time();
    }
    if let (false, Some(sums)) = (rest.is_empty(), accumulator.get_mut(blocks.len())) {
        *sums = zip_with(*sums, F::load(isa, &pad::<F>(rest)), &combine);
    }
    false
}

#[inline(always)]
fn pair<F: Format, C: Combine, I: Isa>(isa: I, a: &[u8], b: &[u8], accumulator: &mut Accumulator<F::Value>) -> bool {
    let ((a, a_rest), (b, b_rest)) = (split::<F>(a), split::<F>(b));
    for ((a, b), sums) in a.iter().zip(b).zip(accumulator.iter_mut()) {
        *sums = zip_with(F::load(isa, a), F::load(isa, b), C::combine);
        one_block_at_a_time();
    }
    if let (false, Some(sums)) = (a_rest.is_empty(), accumulator.get_mut(a.len())) {
        *sums = zip_with(F::load(isa, &pad::<F>(a_rest)), F::load(isa, &pad::<F>(b_rest)), C::combine);
    }
    false
}

#[inline(always)]
fn finish<F: Format, I: Isa>(
    isa: I,
    accumulator: &Accumulator<F::Value>,
    out: &mut [u8],
    divide: impl Fn(F::Value) -> F::Value,
) -> bool {
    let mut peak = F::NO_PEAK;
    let (blocks, rest) = split_mut::<F>(out);
    let full = blocks.len();
    for (sums, out) in accumulator.iter().zip(blocks) {
        *out = F::store(isa, map(*sums, &divide));
        F::watch(&mut peak, out);
        one_block_at_a_time();
    }
    if let (false, Some(sums)) = (rest.is_empty(), accumulator.get(full)) {
        let block = F::store(isa, map(*sums, &divide));
        keep::<F>(&block, rest);
        F::watch(&mut peak, &block);
    }
    F::nonfinite(&peak)
}

#[inline(always)]
fn pair_finish<F: Format, C: Combine, I: Isa>(
    isa: I,
    a: &[u8],
    b: &[u8],
    out: &mut [u8],
    divide: impl Fn(F::Value) -> F::Value,
) -> bool {
    let mut peak = F::NO_PEAK;
    let ((a, a_rest), (b, b_rest), (out, out_rest)) = (split::<F>(a), split::<F>(b), split_mut::<F>(out));
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        *out = F::store(isa, map(zip_with(F::load(isa, a), F::load(isa, b), C::combine), &divide));
        F::watch(&mut peak, out);
        one_block_at_a_time();
    }
    if !out_rest.is_empty() {
        let sums = zip_with(F::load(isa, &pad::<F>(a_rest)), F::load(isa, &pad::<F>(b_rest)), C::combine);
        let block = F::store(isa, map(sums, &divide));
        keep::<F>(&block, out_rest);
        F::watch(&mut peak, &block);
    }
    F::nonfinite(&peak)
}

#[inline(always)]
fn pair_in_place<F: Format, C: Combine, I: Isa>(
    isa: I,
    out: &mut [u8],
    b: &[u8],
    divide: impl Fn(F::Value) -> F::Value,
) -> bool {
    let mut peak = F::NO_PEAK;
    let ((out, out_rest), (b, b_rest)) = (split_mut::<F>(out), split::<F>(b));
    for (out, b) in out.iter_mut().zip(b) {
        *out = F::store(isa, map(zip_with(F::load(isa, out), F::load(isa, b), C::combine), &divide));
        F::watch(&mut peak, out);
        one_block_at_a_time();
    }
    if !out_rest.is_empty() {
        let sums = zip_with(F::load(isa, &pad::<F>(out_rest)), F::load(isa, &pad::<F>(b_rest)), C::combine);
        let block = F::store(isa, map(sums, &divide));
        keep::<F>(&block, out_rest);
        F::watch(&mut peak, &block);
    }
    F::nonfinite(&peak)
}

/// Converts elements of `S` to elements of `T`. Tells whether any of `S` is inf or NaN.
pub(crate) struct Convert<'a, S, T> {
    pub(crate) source: &'a [u8],
    pub(crate) target: &'a mut [u8],
    pub(crate) formats: PhantomData<(S, T)>,
}

impl<S: Format, T: Format<Value = S::Value>> Kernel for Convert<'_, S, T> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        let mut peak = S::NO_PEAK;
        let ((source, source_rest), (target, target_rest)) = (split::<S>(self.source), split_mut::<T>(self.target));
        for (source, target) in source.iter().zip(target) {
            S::watch(&mut peak, source);
            *target = T::store(isa, S::load(isa, source));
            one_block_at_a_time();
        }
        if !target_rest.is_empty() {
            let source = pad::<S>(source_rest);
            S::watch(&mut peak, &source);
            keep::<T>(&T::store(isa, S::load(isa, &source)), target_rest);
        }
        S::nonfinite(&peak)
    }
}

/// Copies elements, bits and all, to `target` if there is one. Tells whether any is inf or NaN.
pub(crate) struct Scan<'a, F> {
    pub(crate) source: &'a [u8],
    pub(crate) target: Option<&'a mut [u8]>,
    pub(crate) format: PhantomData<F>,
}

impl<F: Format> Kernel for Scan<'_, F> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, _: I) -> bool {
        let mut peak = F::NO_PEAK;
        let (source, source_rest) = split::<F>(self.source);
        F::watch(&mut peak, &pad::<F>(source_rest));
        match self.target {
            None => {
                for block in source {
                    F::watch(&mut peak, block);
                    one_block_at_a_time();
                }
            }
            Some(target) => {
                let (target, target_rest) = split_mut::<F>(target);
                for (source, target) in source.iter().zip(target) {
                    *target = *source;
                    F::watch(&mut peak, source);
                    one_block_at_a_time();
                }
                target_rest.copy_from_slice(source_rest);
            }
        }
        F::nonfinite(&peak)
    }
}

/// Ends the body of every loop over blocks. Without it the compiler takes the loop over blocks, not the lanes within,
/// for the one to make vectors of, and gathers the lanes of many blocks: five times slower. No instruction comes of it.
#[inline(always)]
fn one_block_at_a_time() {
    std::hint::black_box(());
}

#[inline(always)]
fn zip_with<V: Value>(a: [V; LANES], b: [V; LANES], combine: impl Fn(V, V) -> V) -> [V; LANES] {
    let mut out = [V::ZERO; LANES];
    for lane in 0..LANES {
        out[lane] = combine(a[lane], b[lane]);
    }
    out
}

#[inline(always)]
fn map<V: Value>(values: [V; LANES], change: impl Fn(V) -> V) -> [V; LANES] {
    let mut out = [V::ZERO; LANES];
    for lane in 0..LANES {
        out[lane] = change(values[lane]);
    }
    out
}

/// The whole blocks, and the bytes of the less than [`LANES`] elements that are left. Blocks are byte arrays: any
/// alignment will do.
#[inline(always)]
fn split<F: Format>(bytes: &[u8]) -> (&[F::Block], &[u8]) {
    let (blocks, rest) = bytes.split_at(bytes.len() - bytes.len() % size_of::<F::Block>());
    (cast_slice(blocks), rest)
}

#[inline(always)]
fn split_mut<F: Format>(bytes: &mut [u8]) -> (&mut [F::Block], &mut [u8]) {
    let (blocks, rest) = bytes.split_at_mut(bytes.len() - bytes.len() % size_of::<F::Block>());
    (cast_slice_mut(blocks), rest)
}

#[inline(always)]
fn pad<F: Format>(rest: &[u8]) -> F::Block {
    let mut block = F::Block::zeroed();
    bytes_of_mut(&mut block)[..rest.len()].copy_from_slice(rest);
    block
}

/// Writes as much of the block as there is room for.
#[inline(always)]
fn keep<F: Format>(block: &F::Block, rest: &mut [u8]) {
    rest.copy_from_slice(&bytes_of(block)[..rest.len()]);
}
