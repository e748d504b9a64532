//! What ranks reduce in a benchmark, and what has to come out.
//!
//! Values are a function of (rank, round, index) whose signs and exponents vary, so that a sum in another order, a
//! contribution that is missing or counted twice, or one of another element has other bits. Most elements are those of
//! round 0 for as long as a size is measured; every [`STAMP_STRIDE`]th one changes with each round, so that a stale
//! contribution to any unit shows, at little cost.

use gradwire_proto::{DType, Fault, FaultKind, ReduceOp, WireFormat};

use super::sizes::TensorBytes;

/// Every so many elements one changes from round to round: at least one in each unit of any size.
const STAMP_STRIDE: usize = 256;
/// Elements of the reference that are computed at once.
const CHUNK_ELEMENTS: u64 = 1 << 16;

/// Fills `values` with `rank`'s contribution to `round`.
pub(super) fn fill(values: &mut [f32], rank: u32, round: u64) {
    for (index, value) in (0..).zip(values.iter_mut()) {
        *value = value_at(rank, 0, index);
    }
    stamp(values, rank, round);
}

/// Makes what [`fill`] filled into `rank`'s contribution to another round.
pub(super) fn stamp(values: &mut [f32], rank: u32, round: u64) {
    for (index, value) in (0..).step_by(STAMP_STRIDE).zip(values.iter_mut().step_by(STAMP_STRIDE)) {
        *value = value_at(rank, round, index);
    }
}

/// The result that every rank has to get.
#[derive(Debug)]
pub(super) struct Expected {
    bytes: Vec<u8>,
    world: u32,
    wire: WireFormat,
}

/// Where a result differs first.
#[derive(Debug, PartialEq)]
pub(super) struct Mismatch {
    pub(super) index: usize,
    pub(super) found: f32,
    pub(super) expected: f32,
}

impl Expected {
    /// The result of round 0.
    ///
    /// # Errors
    /// A [`Fault`] of kind `MemoryUnavailable`.
    pub(super) fn new(size: TensorBytes, world: u32, wire: WireFormat) -> Result<Self, Fault> {
        let unavailable = |_| {
            let detail = format!("{size} to check results against could not be had: give smaller --bytes");
            Fault::new(FaultKind::MemoryUnavailable, detail)
        };
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(size.bytes()).unwrap_or(usize::MAX)).map_err(unavailable)?;
        let mut expected = Self { bytes, world, wire };
        let mut start = 0;
        while start < size.elements() {
            let end = size.elements().min(start + CHUNK_ELEMENTS);
            let chunk = expected.reduce(0, start..end)?;
            expected.bytes.extend_from_slice(&chunk);
            start = end;
        }
        Ok(expected)
    }

    /// Makes this the result of another round.
    ///
    /// # Errors
    /// A [`Fault`] of the codec's.
    pub(super) fn stamp(&mut self, round: u64) -> Result<(), Fault> {
        let elements = (self.bytes.len() / size_of::<f32>()) as u64;
        let stamps = self.reduce(round, (0..elements).step_by(STAMP_STRIDE))?;
        let (stamps, _) = stamps.as_chunks::<4>();
        let (places, _) = self.bytes.as_chunks_mut::<4>();
        places.iter_mut().step_by(STAMP_STRIDE).zip(stamps).for_each(|(place, stamp)| *place = *stamp);
        Ok(())
    }

    /// The first element of `found` that is not the expected one, bit by bit. A length that differs is a mismatch at
    /// the end of the shorter one.
    pub(super) fn mismatch(&self, found: &[u8]) -> Option<Mismatch> {
        if self.bytes == found {
            return None;
        }
        let values = |bytes: &[u8]| bytes.as_chunks::<4>().0.to_vec();
        let (expected, found) = (values(&self.bytes), values(found));
        let equal = expected.iter().zip(&found).take_while(|(expected, found)| expected == found).count();
        let at = |values: &[[u8; 4]]| values.get(equal).map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
        Some(Mismatch { index: equal, found: at(&found), expected: at(&expected) })
    }

    /// The reduction of the elements at `indices` of `round`, as bytes.
    fn reduce(&self, round: u64, indices: impl Iterator<Item = u64> + Clone) -> Result<Vec<u8>, Fault> {
        let of_rank =
            |rank| indices.clone().flat_map(move |index| value_at(rank, round, index).to_le_bytes()).collect();
        let contributions: Vec<Vec<u8>> = (0..self.world).map(of_rank).collect();
        let contributions: Vec<&[u8]> = contributions.iter().map(Vec::as_slice).collect();
        gradwire_codec::reference(DType::F32, self.wire.wire_dtype(DType::F32), ReduceOp::Sum, &contributions)
    }
}

/// A value whose magnitude is at least 2^-7 and below 2^9: exponents far enough apart that the order of a sum shows,
/// and sums of 64 ranks that are finite in fp16.
fn value_at(rank: u32, round: u64, index: u64) -> f32 {
    let seed = (u64::from(rank) << 48) ^ round.rotate_right(24) ^ index;
    let random = mix(seed);
    let sign = (random >> 63) as u32;
    let exponent = 127 - 7 + ((random >> 32) & 15) as u32;
    let mantissa = (random as u32) >> 9;
    f32::from_bits(sign << 31 | exponent << 23 | mantissa)
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input changes about half the output's.
const fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(elements: usize) -> TensorBytes {
        (elements * 4).to_string().parse().expect("size")
    }

    fn contribution(elements: usize, rank: u32, round: u64) -> Vec<f32> {
        let mut values = vec![0.0; elements];
        fill(&mut values, rank, round);
        values
    }

    fn sum_in_order(elements: usize, order: &[u32], round: u64) -> Vec<u8> {
        let mut sum = contribution(elements, order[0], round);
        for rank in &order[1..] {
            sum.iter_mut().zip(contribution(elements, *rank, round)).for_each(|(sum, value)| *sum += value);
        }
        sum.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    #[test]
    fn the_expected_result_is_the_rank_ordered_sum_in_every_round() {
        for elements in [1, 255, 256, 257, 70_000] {
            let mut expected = Expected::new(size(elements), 3, WireFormat::Fp32).expect("expected");
            for round in [0, 1, 2, 1] {
                expected.stamp(round).expect("stamp");
                assert_eq!(expected.mismatch(&sum_in_order(elements, &[0, 1, 2], round)), None);
            }
        }
    }

    #[test]
    fn wrong_sums_are_found() {
        let elements = 1000;
        let mut expected = Expected::new(size(elements), 3, WireFormat::Fp32).expect("expected");
        expected.stamp(5).expect("stamp");
        for (wrong, what) in [
            (sum_in_order(elements, &[2, 1, 0], 5), "another order"),
            (sum_in_order(elements, &[0, 1], 5), "a rank left out"),
            (sum_in_order(elements, &[0, 1, 1], 5), "a rank counted twice"),
            (sum_in_order(elements, &[0, 1, 2], 4), "the round before"),
            (vec![0xff; elements * 4], "nothing written"),
        ] {
            assert!(expected.mismatch(&wrong).is_some(), "{what} was not found");
        }
        let mut wrong = sum_in_order(elements, &[0, 1, 2], 5);
        wrong[777 * 4] ^= 1;
        let mismatch = expected.mismatch(&wrong).expect("one bit");
        assert_eq!(mismatch.index, 777);
        assert_eq!(mismatch.found.to_bits() ^ mismatch.expected.to_bits(), 1);
        assert_eq!(expected.mismatch(&[]).map(|mismatch| mismatch.index), Some(0));
    }

    #[test]
    fn a_late_contribution_shows_in_every_unit() {
        let unit = gradwire_proto::limits::SHARD_ELEMENTS_MULTIPLE as usize;
        let (old, new) = (contribution(4 * unit, 1, 7), contribution(4 * unit, 1, 8));
        for (old, new) in old.chunks(unit).zip(new.chunks(unit)) {
            assert_ne!(old, new);
        }
    }

    #[test]
    fn values_keep_their_distance_from_zero_and_from_infinity() {
        for rank in [0, 63] {
            for value in contribution(10_000, rank, 3) {
                assert!((0.007_812_5..512.0).contains(&value.abs()), "{value}");
            }
        }
        assert!(half_max() > 64.0 * 512.0);
    }

    fn half_max() -> f32 {
        65_504.0
    }
}
