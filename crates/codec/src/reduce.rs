//! Reduction of what the ranks contributed, in rank order.

use std::marker::PhantomData;
use std::ops::Range;

use gradwire_proto::{DType, Fault, ReduceOp};

use crate::convert::{check_lengths, check_pair, invalid, pack_checked, widen_checked};
use crate::format::{Add, Bf16, Combine, F16, F32, F64, Format, I32, I64, LANES, Max, Min, Value};
use crate::kernel::{ACCUMULATOR_ELEMENTS, Accumulator, Pass, Reduce};
use crate::sys::dispatch;

/// A reduction over the contributions of some ranks: element types, operation and number of contributors.
///
/// Elements are independent of each other, so that any range of a tensor may be reduced at any time, in any number of
/// calls, with the same bits as a result. The arithmetic is stated in the [crate's documentation](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduction {
    dtype: DType,
    wire: DType,
    op: ReduceOp,
    contributors: u32,
}

/// One rank's contribution to the range that is reduced.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Wire elements, as they came from a peer.
    Wire(&'a [u8]),
    /// Native elements that were not packed yet; rounded here as [`crate::pack`] does.
    Native(&'a [u8]),
    /// Native elements, not packed yet, that lie in [`Outputs::native`] and are replaced by the result.
    Own,
}

/// Where the result goes: at least one of the two.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The result as wire elements, for the peers.
    pub wire: Option<&'a mut [u8]>,
    /// The result as native elements: what peers get when they unpack `wire`.
    pub native: Option<&'a mut [u8]>,
}

/// Gives the contribution of a rank by its index among the contributors.
type Inputs<'r, 'a> = &'r dyn Fn(usize) -> Input<'a>;

/// What a reduction found out about its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Whether any element of the result, as encoded for the wire, is inf or NaN.
    pub nonfinite: bool,
}

impl Reduction {
    /// A reduction of `contributors` contributions of `dtype` elements that travel as `wire`.
    ///
    /// # Errors
    /// A [`Fault`] of kind `InvalidArgument` if there are no contributors, or if `dtype` cannot travel as `wire`.
    pub fn new(dtype: DType, wire: DType, op: ReduceOp, contributors: u32) -> Result<Self, Fault> {
        check_pair(dtype, wire)?;
        if contributors == 0 {
            return Err(invalid("a reduction over no contributions has no result: give at least one contributor"));
        }
        Ok(Self { dtype, wire, op, contributors })
    }

    /// Reduces one range. Input `i` is the contribution of the `i`-th contributing rank in rank order.
    ///
    /// Works through the range in blocks that stay in the first-level cache, so that every input is read from memory
    /// once and every output written once. `inputs` is called for every input and block: it has to be cheap, and to
    /// give the same slice each time. Allocates nothing.
    ///
    /// # Errors
    /// A [`Fault`] of kind `InvalidArgument` if there is no output, if [`Input::Own`] is used without
    /// [`Outputs::native`], or if the slices do not hold the same number of whole elements. Nothing is written then.
    pub fn run<'a>(&self, inputs: impl Fn(usize) -> Input<'a>, outputs: Outputs<'_>) -> Result<Summary, Fault> {
        self.run_over(&inputs, outputs)
    }

    /// Generic in nothing: the kernels are compiled here, once, as this crate is optimised, and not in each crate that
    /// reduces.
    fn run_over<'a>(&self, inputs: Inputs<'_, 'a>, mut outputs: Outputs<'_>) -> Result<Summary, Fault> {
        let elements = self.check(inputs, &outputs)?;
        let nonfinite = match self.wire {
            DType::F32 => self.run_format::<F32>(inputs, &mut outputs, elements),
            DType::F64 => self.run_format::<F64>(inputs, &mut outputs, elements),
            DType::F16 => self.run_format::<F16>(inputs, &mut outputs, elements),
            DType::Bf16 => self.run_format::<Bf16>(inputs, &mut outputs, elements),
            DType::I32 => self.run_format::<I32>(inputs, &mut outputs, elements),
            DType::I64 => self.run_format::<I64>(inputs, &mut outputs, elements),
        }?;
        Ok(Summary { nonfinite })
    }

    /// Checks all slices. Gives the number of elements.
    fn check<'a>(&self, inputs: Inputs<'_, 'a>, outputs: &Outputs<'_>) -> Result<usize, Fault> {
        let (dtype, bytes) = match (&outputs.wire, &outputs.native) {
            (Some(wire), _) => (self.wire, wire.len()),
            (None, Some(native)) => (self.dtype, native.len()),
            (None, None) => return Err(invalid("a reduction needs somewhere to write its result: give an output")),
        };
        check_lengths(dtype, bytes, dtype, bytes)?;
        if let Some(native) = &outputs.native {
            check_lengths(dtype, bytes, self.dtype, native.len())?;
        }
        for index in 0..self.contributors as usize {
            match inputs(index) {
                Input::Wire(input) => check_lengths(dtype, bytes, self.wire, input.len())?,
                Input::Native(input) => check_lengths(dtype, bytes, self.dtype, input.len())?,
                Input::Own if outputs.native.is_some() => {}
                Input::Own => {
                    return Err(invalid(
                        "the own contribution is to be read from the native output, but there is none: give one",
                    ));
                }
            }
        }
        Ok(bytes / dtype.size())
    }

    fn run_format<'a, F: Format>(
        &self,
        inputs: Inputs<'_, 'a>,
        outputs: &mut Outputs<'_>,
        elements: usize,
    ) -> Result<bool, Fault> {
        match self.op {
            ReduceOp::Sum => self.run_blocks::<F, Add>(None, inputs, outputs, elements),
            ReduceOp::Mean => self.run_blocks::<F, Add>(Some(self.contributors), inputs, outputs, elements),
            ReduceOp::Min => self.run_blocks::<F, Min>(None, inputs, outputs, elements),
            ReduceOp::Max => self.run_blocks::<F, Max>(None, inputs, outputs, elements),
        }
    }

    fn run_blocks<'a, F: Format, C: Combine>(
        &self,
        divisor: Option<u32>,
        inputs: Inputs<'_, 'a>,
        outputs: &mut Outputs<'_>,
        elements: usize,
    ) -> Result<bool, Fault> {
        let mut scratch = Scratch::<F::Value>::new();
        let mut nonfinite = false;
        for start in (0..elements).step_by(ACCUMULATOR_ELEMENTS) {
            let range = start..elements.min(start + ACCUMULATOR_ELEMENTS);
            let (dtype, wire) = (self.dtype.size(), self.wire.size());
            let block = Block {
                reduction: self,
                inputs,
                divisor,
                native_bytes: range.start * dtype..range.end * dtype,
                wire_bytes: range.start * wire..range.end * wire,
            };
            nonfinite |= block.run::<F, C>(outputs, &mut scratch)?;
        }
        Ok(nonfinite)
    }
}

/// Memory for one block, on the stack.
struct Scratch<V> {
    accumulator: Accumulator<V>,
    /// Two contributions packed here.
    packed: [[u8; PACKED_BYTES]; 2],
    /// The result as wire elements where nobody asked for those.
    result: [u8; PACKED_BYTES],
}

/// A block packed: only types of 16 bits differ from the native type.
const PACKED_BYTES: usize = 2 * ACCUMULATOR_ELEMENTS;

impl<V: Value> Scratch<V> {
    fn new() -> Self {
        Self {
            accumulator: [[V::ZERO; LANES]; ACCUMULATOR_ELEMENTS / LANES],
            packed: [[0; PACKED_BYTES]; 2],
            result: [0; PACKED_BYTES],
        }
    }
}

/// At most [`ACCUMULATOR_ELEMENTS`] elements of the range.
struct Block<'r, 'a> {
    reduction: &'r Reduction,
    inputs: Inputs<'r, 'a>,
    divisor: Option<u32>,
    /// Where the block lies in slices of native elements.
    native_bytes: Range<usize>,
    /// Where the block lies in slices of wire elements.
    wire_bytes: Range<usize>,
}

impl<'a> Block<'_, 'a> {
    fn run<F: Format, C: Combine>(
        &self,
        outputs: &mut Outputs<'_>,
        scratch: &mut Scratch<F::Value>,
    ) -> Result<bool, Fault> {
        let native = part_mut(outputs.native.as_deref_mut(), &self.native_bytes)?;
        let wire = part_mut(outputs.wire.as_deref_mut(), &self.wire_bytes)?;
        let Scratch { accumulator, packed, result } = scratch;
        match (wire, native) {
            (None, Some(native)) if self.is_exact() => self.replace::<F, C>(native, accumulator, packed),
            (wire, native) => {
                let target = match wire {
                    Some(wire) => wire,
                    None => part_mut(Some(result), &(0..self.wire_bytes.len()))?.unwrap_or_default(),
                };
                let nonfinite = self.write::<F, C>(native.as_deref(), target, accumulator, packed)?;
                match native {
                    Some(native) if self.is_exact() => native.copy_from_slice(target),
                    Some(native) => _ = widen_checked(self.reduction.wire, target, native),
                    None => {}
                }
                Ok(nonfinite)
            }
        }
    }

    /// Whether wire elements are native elements.
    fn is_exact(&self) -> bool {
        self.reduction.wire == self.reduction.dtype
    }

    /// Reduces to `native`, which is native and wire elements at once and may be a contribution.
    fn replace<F: Format, C: Combine>(
        &self,
        native: &mut [u8],
        accumulator: &mut Accumulator<F::Value>,
        packed: &mut [[u8; PACKED_BYTES]; 2],
    ) -> Result<bool, Fault> {
        if self.reduction.contributors == 2 {
            let divisor = self.divisor;
            match ((self.inputs)(0), (self.inputs)(1)) {
                (Input::Own, Input::Own) => {}
                (Input::Own, peer) | (peer, Input::Own) => {
                    let b = self.wire_elements(peer, None, &mut packed[0])?;
                    return Ok(reduce::<F, C>(Pass::PairFinishInPlace { out: native, b, divisor }));
                }
                _ => return self.write::<F, C>(None, native, accumulator, packed),
            }
        }
        self.accumulate::<F, C>(Some(native), accumulator, packed)?;
        Ok(reduce::<F, C>(Pass::Finish { accumulator, divisor: self.divisor, out: native }))
    }

    /// Reduces to `target`, which is no contribution.
    fn write<F: Format, C: Combine>(
        &self,
        own: Option<&[u8]>,
        target: &mut [u8],
        accumulator: &mut Accumulator<F::Value>,
        packed: &mut [[u8; PACKED_BYTES]; 2],
    ) -> Result<bool, Fault> {
        let divisor = self.divisor;
        if self.reduction.contributors == 2 {
            let [first, second] = packed;
            let a = self.wire_elements((self.inputs)(0), own, first)?;
            let b = self.wire_elements((self.inputs)(1), own, second)?;
            return Ok(reduce::<F, C>(Pass::PairFinish { a, b, divisor, out: target }));
        }
        self.accumulate::<F, C>(own, accumulator, packed)?;
        Ok(reduce::<F, C>(Pass::Finish { accumulator, divisor, out: target }))
    }

    /// Combines all contributions in the accumulator.
    fn accumulate<F: Format, C: Combine>(
        &self,
        own: Option<&[u8]>,
        accumulator: &mut Accumulator<F::Value>,
        packed: &mut [[u8; PACKED_BYTES]; 2],
    ) -> Result<(), Fault> {
        let contributors = self.reduction.contributors as usize;
        let [first, second] = packed;
        let a = self.wire_elements((self.inputs)(0), own, first)?;
        if contributors == 1 {
            reduce::<F, C>(Pass::Load { a, accumulator });
            return Ok(());
        }
        let b = self.wire_elements((self.inputs)(1), own, second)?;
        reduce::<F, C>(Pass::Pair { a, b, accumulator });
        for index in 2..contributors {
            let a = self.wire_elements((self.inputs)(index), own, first)?;
            reduce::<F, C>(Pass::Add { a, accumulator });
        }
        Ok(())
    }

    /// The block of an input as wire elements; packed into `packed` if it has to be.
    fn wire_elements<'s>(
        &self,
        input: Input<'s>,
        own: Option<&'s [u8]>,
        packed: &'s mut [u8; PACKED_BYTES],
    ) -> Result<&'s [u8], Fault> {
        let native = match (input, own) {
            (Input::Wire(input), _) => return input.get(self.wire_bytes.clone()).ok_or_else(changed),
            (Input::Native(input), _) => input.get(self.native_bytes.clone()).ok_or_else(changed)?,
            (Input::Own, Some(own)) => own,
            (Input::Own, None) => return Err(changed()),
        };
        if self.is_exact() {
            return Ok(native);
        }
        let packed = packed.get_mut(..self.wire_bytes.len()).ok_or_else(changed)?;
        pack_checked(false, self.reduction.wire, native, packed);
        Ok(packed)
    }
}

fn reduce<F: Format, C: Combine>(pass: Pass<'_, F::Value>) -> bool {
    dispatch(Reduce::<F, C> { pass, operation: PhantomData })
}

fn part_mut<'s>(bytes: Option<&'s mut [u8]>, range: &Range<usize>) -> Result<Option<&'s mut [u8]>, Fault> {
    bytes.map(|bytes| bytes.get_mut(range.clone()).ok_or_else(changed)).transpose()
}

fn changed() -> Fault {
    invalid("a contribution changed its length while it was reduced: give the same slice for a rank each time")
}
