//! The fast path against [`gradwire_codec::reference`], bit for bit.
#![allow(clippy::unwrap_used, reason = "a failure here is to stop the run")]

use gradwire_codec::{Input, Outputs, Reduction, has_nonfinite, pack, reference, unpack};
use gradwire_proto::{DType, FaultKind, ReduceOp};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;

/// Every pair of a native and a wire type.
const PAIRS: [(DType, DType); 8] = [
    (DType::F32, DType::F32),
    (DType::F32, DType::F16),
    (DType::F32, DType::Bf16),
    (DType::F64, DType::F64),
    (DType::F16, DType::F16),
    (DType::Bf16, DType::Bf16),
    (DType::I32, DType::I32),
    (DType::I64, DType::I64),
];

/// How a rank's contribution reaches the reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Via {
    Wire,
    Native,
    Own,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    wire: DType,
    op: ReduceOp,
    contributions: Vec<Vec<u8>>,
    via: Vec<Via>,
    /// Bytes that every slice lies beyond its buffer's start.
    misalignment: usize,
    outputs: (bool, bool),
    /// Where the range is cut in two, in elements.
    cut: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let elements = prop_oneof![4 => 0..80_usize, 1 => select(vec![0, 1, 3, 1023, 1024, 1025, 4095, 4096, 4097])];
    let own = prop::option::of(any::<prop::sample::Index>());
    (select(&PAIRS[..]), select(&ReduceOp::ALL[..]), elements, 1..=8_usize, own, 0..9_usize, any::<(bool, bool)>())
        .prop_flat_map(|((dtype, wire), op, elements, ranks, own, misalignment, mut outputs)| {
            outputs.1 |= own.is_some() || !outputs.0;
            let contribution = prop::collection::vec(element(dtype), elements).prop_map(|elements| elements.concat());
            let contributions = prop::collection::vec(contribution, ranks);
            let via = prop::collection::vec(select(vec![Via::Wire, Via::Native]), ranks);
            (contributions, via, 0..=elements).prop_map(move |(contributions, mut via, cut)| {
                if let Some(own) = own {
                    via[own.index(ranks)] = Via::Own;
                }
                Case { dtype, wire, op, contributions, via, misalignment, outputs, cut }
            })
        })
}

/// One element: ordinary, special, or any bits.
fn element(dtype: DType) -> BoxedStrategy<Vec<u8>> {
    match dtype {
        DType::F32 => float(|value| value as f32).prop_map(|value: f32| value.to_le_bytes().to_vec()).boxed(),
        DType::F64 => float(|value| value).prop_map(|value| value.to_le_bytes().to_vec()).boxed(),
        DType::F16 => float(f16::from_f64).prop_map(|value| value.to_le_bytes().to_vec()).boxed(),
        DType::Bf16 => float(bf16::from_f64).prop_map(|value| value.to_le_bytes().to_vec()).boxed(),
        DType::I32 => prop_oneof![-9..9_i32, any::<i32>(), select(vec![i32::MIN, i32::MAX])]
            .prop_map(|value| value.to_le_bytes().to_vec())
            .boxed(),
        DType::I64 => prop_oneof![-9..9_i64, any::<i64>(), select(vec![i64::MIN, i64::MAX])]
            .prop_map(|value| value.to_le_bytes().to_vec())
            .boxed(),
    }
}

fn float<F: Copy + std::fmt::Debug + 'static>(from: fn(f64) -> F) -> impl Strategy<Value = F> {
    let special = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        2048.0,
        65504.0,
        65519.0,
        65520.0,
        -65536.0,
        f64::from(f32::MAX),
        f64::from(f32::MIN),
        f64::from(f32::MIN_POSITIVE) / 3.0,
        -6e-8,
        3e-8,
        2.9e-8,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        1.0 + 1.0 / 256.0,
        f64::MAX,
        f64::MIN_POSITIVE / 5.0,
    ];
    let nonfinite = vec![f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -f64::NAN];
    prop_oneof![8 => -2.0..2.0_f64, 2 => -7e4..7e4_f64, 3 => select(special), 1 => select(nonfinite)].prop_map(from)
}

/// A copy of `bytes` that begins `misalignment` bytes into its buffer.
fn shifted(bytes: &[u8], misalignment: usize) -> Vec<u8> {
    [vec![0xa5; misalignment], bytes.to_vec()].concat()
}

/// Runs the case over `range` of its elements. Gives wire and native output and whether any is not finite.
fn run(case: &Case, range: std::ops::Range<usize>) -> (Option<Vec<u8>>, Option<Vec<u8>>, bool) {
    let (size, shift) = (case.dtype.size(), case.misalignment);
    let native = |rank: usize| &case.contributions[rank][range.start * size..range.end * size];
    let own = case.via.iter().position(|via| *via == Via::Own);
    let buffers: Vec<Vec<u8>> = (0..case.via.len())
        .map(|rank| match case.via[rank] {
            Via::Wire => {
                let mut packed = vec![0; range.len() * case.wire.size() + shift];
                pack(case.dtype, case.wire, native(rank), &mut packed[shift..]).unwrap();
                packed
            }
            _ => shifted(native(rank), shift),
        })
        .collect();
    let mut wire = vec![0x5a; range.len() * case.wire.size() + shift];
    let mut result = own.map_or_else(|| vec![0x5a; range.len() * size + shift], |rank| buffers[rank].clone());
    let inputs = |rank: usize| match case.via[rank] {
        Via::Wire => Input::Wire(&buffers[rank][shift..]),
        Via::Native => Input::Native(&buffers[rank][shift..]),
        Via::Own => Input::Own,
    };
    let outputs = Outputs {
        wire: case.outputs.0.then_some(&mut wire[shift..]),
        native: case.outputs.1.then_some(&mut result[shift..]),
    };
    let reduction = Reduction::new(case.dtype, case.wire, case.op, case.via.len() as u32).unwrap();
    let summary = reduction.run(inputs, outputs).unwrap();
    (
        case.outputs.0.then(|| wire[shift..].to_vec()),
        case.outputs.1.then(|| result[shift..].to_vec()),
        summary.nonfinite,
    )
}

fn expected(case: &Case) -> Vec<u8> {
    let contributions: Vec<&[u8]> = case.contributions.iter().map(Vec::as_slice).collect();
    reference(case.dtype, case.wire, case.op, &contributions).unwrap()
}

/// Inf or NaN by their definition, element by element.
fn nonfinite(dtype: DType, bytes: &[u8]) -> bool {
    bytes.chunks_exact(dtype.size()).any(|bytes| match dtype {
        DType::F32 => !f32::from_le_bytes(bytes.try_into().unwrap()).is_finite(),
        DType::F64 => !f64::from_le_bytes(bytes.try_into().unwrap()).is_finite(),
        DType::F16 => !f16::from_le_bytes(bytes.try_into().unwrap()).is_finite(),
        DType::Bf16 => !bf16::from_le_bytes(bytes.try_into().unwrap()).is_finite(),
        DType::I32 | DType::I64 => false,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn reduction_equals_the_reference(case in cases()) {
        let expected = expected(&case);
        let elements = expected.len() / case.dtype.size();
        let (wire, native, found) = run(&case, 0..elements);
        if let Some(native) = native {
            prop_assert_eq!(&native, &expected);
        }
        if let Some(wire) = wire {
            let mut unpacked = vec![0; expected.len()];
            prop_assert_eq!(unpack(case.wire, case.dtype, &wire, &mut unpacked).unwrap(), found);
            prop_assert_eq!(&unpacked, &expected);
        }
        prop_assert_eq!(found, nonfinite(case.dtype, &expected));
    }

    #[test]
    fn a_cut_range_has_the_same_bits(case in cases()) {
        let elements = case.contributions[0].len() / case.dtype.size();
        let (wire, native, found) = run(&case, 0..elements);
        let (first, second) = (run(&case, 0..case.cut), run(&case, case.cut..elements));
        prop_assert_eq!(wire, first.0.zip(second.0).map(|(a, b)| [a, b].concat()));
        prop_assert_eq!(native, first.1.zip(second.1).map(|(a, b)| [a, b].concat()));
        prop_assert_eq!(found, first.2 | second.2);
    }

    #[test]
    fn minimum_and_maximum_do_not_depend_on_order(case in cases()) {
        let mut reversed = case.clone();
        reversed.contributions.reverse();
        if matches!(case.op, ReduceOp::Min | ReduceOp::Max) {
            prop_assert_eq!(expected(&case), expected(&reversed));
        }
    }

    #[test]
    fn scans_and_conversions_equal_their_definition(case in cases()) {
        let native = shifted(&case.contributions[0], case.misalignment);
        let native = &native[case.misalignment..];
        let mut packed = vec![0; native.len() / case.dtype.size() * case.wire.size() + case.misalignment];
        let packed = &mut packed[case.misalignment..];
        pack(case.dtype, case.wire, native, packed).unwrap();
        prop_assert_eq!(has_nonfinite(case.dtype, native).unwrap(), nonfinite(case.dtype, native));
        let mut unpacked = vec![0; native.len()];
        let found = unpack(case.wire, case.dtype, packed, &mut unpacked).unwrap();
        prop_assert_eq!(found, nonfinite(case.wire, packed));
        if case.dtype == case.wire {
            prop_assert_eq!(native, &unpacked[..]);
        } else {
            let once = reference(case.dtype, case.wire, ReduceOp::Sum, &[native]).unwrap();
            prop_assert_eq!(once, unpacked);
        }
    }
}

#[test]
fn every_length_around_a_block_reduces_exactly() {
    for (dtype, wire) in PAIRS {
        for elements in [0, 1, 3, 15, 16, 17, 1023, 1024, 1025, 4095, 4096, 4097] {
            for ranks in [1, 2, 3] {
                let bytes = |rank: usize| -> Vec<u8> {
                    // Exponents stay in range in every type because only low bits vary.
                    let words = (0..elements * dtype.size()).map(|at| (at * 31 + rank * 17) as u8);
                    words.enumerate().map(|(at, byte)| if at % 2 == 1 { byte & 0x3f } else { byte }).collect()
                };
                let contributions = (0..ranks).map(bytes).collect();
                let via = (0..ranks).map(|rank| if rank == 0 { Via::Own } else { Via::Wire }).collect();
                let case = Case {
                    dtype,
                    wire,
                    op: ReduceOp::Mean,
                    contributions,
                    via,
                    misalignment: 1,
                    outputs: (true, true),
                    cut: 0,
                };
                let (_, native, _) = run(&case, 0..elements);
                assert_eq!(native.as_ref(), Some(&expected(&case)), "{dtype} as {wire}, {elements} of {ranks}");
            }
        }
    }
}

fn half_bytes(values: &[f32]) -> Vec<Vec<u8>> {
    values.iter().map(|value| f16::from_f32(*value).to_le_bytes().to_vec()).collect()
}

/// Reduces one f16 element of each rank.
fn reduce_f16(op: ReduceOp, values: &[f32]) -> (f32, bool) {
    let inputs = half_bytes(values);
    let mut result = [0; 2];
    let reduction = Reduction::new(DType::F16, DType::F16, op, values.len() as u32).unwrap();
    let outputs = Outputs { native: Some(&mut result), wire: None };
    let summary = reduction.run(|rank| Input::Wire(&inputs[rank]), outputs).unwrap();
    (f16::from_le_bytes(result).to_f32(), summary.nonfinite)
}

#[test]
fn small_addends_are_not_lost_wherever_the_large_one_stands() {
    // Added in binary16, 2048 + 1 + 1 + 1 is 2048: each one is half a unit in the last place.
    for large in 0..4 {
        let mut values = [1.0; 4];
        values[large] = 2048.0;
        assert_eq!(reduce_f16(ReduceOp::Sum, &values), (2052.0, false));
    }
}

#[test]
fn a_mean_may_pass_through_what_binary16_cannot_hold() {
    assert_eq!(reduce_f16(ReduceOp::Mean, &[40000.0, 40000.0]), (40000.0, false));
    assert_eq!(reduce_f16(ReduceOp::Sum, &[40000.0, 40000.0]), (f32::INFINITY, true));
}

#[test]
fn the_first_value_is_not_added_to_zero() {
    let (sum, _) = reduce_f16(ReduceOp::Sum, &[-0.0, -0.0]);
    assert!(sum == 0.0 && sum.is_sign_negative());
    let (sum, _) = reduce_f16(ReduceOp::Sum, &[-0.0]);
    assert!(sum == 0.0 && sum.is_sign_negative());
}

#[test]
fn zeros_of_both_signs_are_ordered() {
    for values in [[0.0, -0.0], [-0.0, 0.0]] {
        assert!(reduce_f16(ReduceOp::Min, &values).0.is_sign_negative());
        assert!(reduce_f16(ReduceOp::Max, &values).0.is_sign_positive());
    }
}

#[test]
fn integer_sums_wrap_and_means_are_exact() {
    let reduce = |op, values: &[i64]| {
        let inputs: Vec<[u8; 8]> = values.iter().map(|value| value.to_le_bytes()).collect();
        let mut result = [0; 8];
        let reduction = Reduction::new(DType::I64, DType::I64, op, values.len() as u32).unwrap();
        let outputs = Outputs { native: Some(&mut result), wire: None };
        reduction.run(|rank| Input::Wire(&inputs[rank]), outputs).unwrap();
        i64::from_le_bytes(result)
    };
    assert_eq!(reduce(ReduceOp::Sum, &[i64::MAX, 1]), i64::MIN);
    assert_eq!(reduce(ReduceOp::Mean, &[i64::MAX, i64::MAX, i64::MAX]), i64::MAX);
    assert_eq!(reduce(ReduceOp::Mean, &[i64::MIN, i64::MIN, i64::MIN]), i64::MIN);
    assert_eq!(reduce(ReduceOp::Mean, &[-3, -4]), -3);
    assert_eq!(reduce(ReduceOp::Mean, &[3, 4]), 3);
}

#[test]
fn wrong_arguments_are_refused_and_nothing_is_written() {
    let kind = |result: Result<_, gradwire_proto::Fault>| result.map(|_: ()| ()).unwrap_err().kind;
    let invalid = FaultKind::InvalidArgument;
    assert_eq!(kind(Reduction::new(DType::F64, DType::F32, ReduceOp::Sum, 2).map(|_| ())), invalid);
    assert_eq!(kind(Reduction::new(DType::F32, DType::F32, ReduceOp::Sum, 0).map(|_| ())), invalid);
    let reduction = Reduction::new(DType::F32, DType::F16, ReduceOp::Sum, 2).unwrap();
    let run = |inputs: [Input<'_>; 2], wire: usize, native: usize| {
        let (mut wire_bytes, mut native_bytes) = (vec![7; wire], vec![7; native]);
        let outputs = Outputs {
            wire: (wire > 0).then_some(&mut wire_bytes[..]),
            native: (native > 0).then_some(&mut native_bytes[..]),
        };
        let result = reduction.run(|rank| inputs[rank], outputs).map(|_| ());
        assert!(result.is_ok() || wire_bytes.iter().chain(&native_bytes).all(|byte| *byte == 7));
        result
    };
    let (wire, native) = (&[0; 4][..], &[0; 8][..]);
    assert_eq!(run([Input::Wire(wire), Input::Native(native)], 4, 8), Ok(()));
    assert_eq!(kind(run([Input::Wire(wire), Input::Native(native)], 0, 0)), invalid, "no output");
    assert_eq!(kind(run([Input::Wire(native), Input::Native(native)], 4, 8)), invalid, "long wire input");
    assert_eq!(kind(run([Input::Wire(wire), Input::Native(wire)], 4, 8)), invalid, "short native input");
    assert_eq!(kind(run([Input::Wire(wire), Input::Own], 4, 0)), invalid, "own without native output");
    assert_eq!(kind(run([Input::Wire(wire), Input::Wire(wire)], 4, 4)), invalid, "outputs of two lengths");
    assert_eq!(kind(run([Input::Wire(&[0; 3]), Input::Wire(&[0; 3])], 3, 0)), invalid, "part of an element");
    assert_eq!(kind(pack(DType::F32, DType::F16, native, &mut [0; 6])), invalid);
    assert_eq!(kind(pack(DType::F16, DType::F32, wire, &mut [0; 8])), invalid);
    assert_eq!(kind(unpack(DType::F16, DType::F32, wire, &mut [0; 4]).map(|_| ())), invalid);
    assert_eq!(kind(has_nonfinite(DType::F32, &[0; 5]).map(|_| ())), invalid);
    assert_eq!(kind(reference(DType::F32, DType::F32, ReduceOp::Sum, &[]).map(|_| ())), invalid);
}
