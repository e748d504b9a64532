use alloc::vec;

use super::*;

fn tensor(name: &str, shape: &[u64]) -> Declaration {
    Declaration {
        name: name.into(),
        shape: shape.to_vec(),
        dtype: DType::F32,
        collective: Collective::AllReduce,
        reduce: ReduceOp::Mean,
        wire: WireFormat::Fp16,
        priority: 0,
    }
}

fn manifest(tensors: &[Declaration]) -> Manifest {
    Manifest { tensors: tensors.to_vec() }
}

fn encoded(manifest: &Manifest) -> Vec<u8> {
    let mut out = Vec::new();
    manifest.encode(&mut out).unwrap();
    out
}

#[track_caller]
fn assert_differ(manifests: &[Manifest], kind: FaultKind, rank: Option<u32>, tensor: &str, detail: &str) {
    let fault = agree(manifests).unwrap_err();
    assert_eq!(fault.detail, detail);
    assert_eq!((fault.kind, fault.rank, fault.tensor.as_deref()), (kind, rank.map(Rank), Some(tensor)));
}

#[test]
fn elements_multiply_and_never_wrap() {
    for (shape, elements) in [
        (&[][..], 1),
        (&[5], 5),
        (&[3, 4, 5], 60),
        (&[7, 0], 0),
        (&[u64::MAX, u64::MAX, 0], 0),
        (&[u64::MAX, 2], u64::MAX),
        (&[1 << 32, 1 << 32], u64::MAX),
    ] {
        assert_eq!(tensor("t", shape).elements(), elements, "{shape:?}");
    }
}

#[test]
fn a_declaration_past_a_limit_is_refused_before_it_is_sent() {
    let most = tensor(&"n".repeat(TENSOR_NAME_BYTES_MAX), &[1; TENSOR_DIMENSIONS_MAX]);
    assert_eq!(most.check(), Ok(()));
    assert_eq!(tensor("t", &[TENSOR_ELEMENTS_MAX]).check(), Ok(()));
    for bad in [
        tensor("", &[1]),
        tensor(&"n".repeat(TENSOR_NAME_BYTES_MAX + 1), &[1]),
        tensor("t", &[1; TENSOR_DIMENSIONS_MAX + 1]),
        tensor("t", &[TENSOR_ELEMENTS_MAX + 1]),
        tensor("t", &[1 << 24, 1 << 24, 2]),
        tensor("t", &[u64::MAX, u64::MAX]),
    ] {
        let fault = bad.check().unwrap_err();
        assert_eq!((fault.kind, fault.tensor.as_ref()), (FaultKind::InvalidArgument, Some(&bad.name)));
        let mut out = vec![1, 2, 3];
        assert_eq!(manifest(&[bad]).encode(&mut out), Err(fault));
        assert_eq!(out, [1, 2, 3]);
    }
}

#[test]
fn a_name_declared_twice_is_refused_on_both_ends() {
    let twice = manifest(&[tensor("a", &[1]), tensor("b", &[1]), tensor("a", &[2])]);
    let fault = twice.encode(&mut Vec::new()).unwrap_err();
    assert_eq!((fault.kind, fault.tensor.as_deref()), (FaultKind::InvalidArgument, Some("a")));
    let mut bytes = encoded(&manifest(&[tensor("a", &[1]), tensor("b", &[1])]));
    let second_name = bytes.iter().rposition(|byte| *byte == b'b').unwrap();
    bytes[second_name] = b'a';
    assert_eq!(Manifest::decode(&bytes), Err(Malformed("a tensor declared twice")));
}

#[test]
fn a_manifest_travels() {
    let mut tensors = vec![tensor("scalar", &[]), tensor("empty", &[0, 3]), tensor("größe", &[1 << 40, 3])];
    let collectives = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast { root: Rank(0) },
        Collective::Broadcast { root: Rank(1023) },
    ];
    for (index, dtype) in DType::ALL.into_iter().enumerate() {
        tensors.push(Declaration {
            dtype,
            collective: collectives[index % collectives.len()],
            reduce: ReduceOp::ALL[index % 4],
            wire: WireFormat::ALL[index % 3],
            priority: i32::MIN + index as i32,
            ..tensor(dtype.name(), &[index as u64])
        });
    }
    for manifest in [Manifest::default(), manifest(&tensors)] {
        assert_eq!(Manifest::decode(&encoded(&manifest)), Ok(manifest));
    }
}

#[test]
fn a_count_that_the_bytes_cannot_hold_is_refused_before_anything_is_allocated() {
    for count in [1, TENSORS_MAX, TENSORS_MAX + 1, u32::MAX] {
        let mut bytes = count.to_le_bytes().to_vec();
        bytes.resize(bytes.len() + DECLARATION_BYTES_MIN - 1, 0);
        assert_eq!(Manifest::decode(&bytes), Err(Malformed("more tensors than a manifest can have")), "{count}");
    }
    let whole = encoded(&manifest(&[tensor("a", &[2, 3])]));
    assert_eq!(Manifest::decode(&[&whole[..], &[0]].concat()), Err(Malformed("longer than its fields")));
}

#[test]
fn ranks_that_declare_the_same_agree_on_rank_0s_order_and_priorities() {
    let (a, b, c) = (tensor("a", &[1]), tensor("b", &[2]), tensor("c", &[]));
    let first = manifest(&[Declaration { priority: 5, ..b.clone() }, a.clone(), c.clone()]);
    let second = manifest(&[a.clone(), Declaration { priority: -1, ..b }, c.clone()]);
    let third = manifest(&[c, first.tensors[0].clone(), a]);
    assert_eq!(agree(&[first.clone(), second, third]), Ok(first.tensors.clone()));
    assert_eq!(agree(core::slice::from_ref(&first)), Ok(first.tensors));
    assert_eq!(agree(&[]), Ok(Vec::new()));
    assert_eq!(agree(&[Manifest::default(), Manifest::default()]), Ok(Vec::new()));
}

#[test]
fn shapes_that_differ_are_named_with_their_ranks() {
    let one = manifest(&[tensor("x", &[7]), tensor("w", &[1])]);
    let three = manifest(&[tensor("w", &[3]), tensor("x", &[7])]);
    assert_differ(
        &[one.clone(), three.clone(), one.clone(), one.clone()],
        FaultKind::ShapeMismatch,
        Some(1),
        "w",
        "declared as [3] by rank 1 but as [1] by ranks 0, 2 and 3: declare the same shape on every rank",
    );
    assert_differ(
        &[three, one.clone(), one],
        FaultKind::ShapeMismatch,
        Some(0),
        "w",
        "declared as [3] by rank 0 but as [1] by ranks 1 and 2: declare the same shape on every rank",
    );
    // The same number of elements is not the same shape; of two ranks none is the odd one.
    assert_differ(
        &[manifest(&[tensor("w", &[2, 3])]), manifest(&[tensor("w", &[6])])],
        FaultKind::ShapeMismatch,
        None,
        "w",
        "declared as [2, 3] by rank 0 but as [6] by rank 1: declare the same shape on every rank",
    );
}

#[test]
fn types_and_operations_that_differ_are_named_with_their_ranks() {
    let base = tensor("w", &[4]);
    let with = |declaration: Declaration| [manifest(core::slice::from_ref(&base)), manifest(&[declaration])];
    assert_differ(
        &with(Declaration { dtype: DType::I32, ..base.clone() }),
        FaultKind::DTypeMismatch,
        None,
        "w",
        "declared as f32 by rank 0 but as i32 by rank 1: declare the same element type on every rank",
    );
    let remedy = "declare the same collective, reduction and wire format on every rank";
    for (other, words) in [
        (Declaration { reduce: ReduceOp::Max, ..base.clone() }, "allreduce (max, fp16 on the wire)"),
        (Declaration { wire: WireFormat::Bf16, ..base.clone() }, "allreduce (mean, bf16 on the wire)"),
        (
            Declaration { collective: Collective::Broadcast { root: Rank(1) }, ..base.clone() },
            "broadcast from rank 1 (mean, fp16 on the wire)",
        ),
    ] {
        let detail =
            format!("declared as allreduce (mean, fp16 on the wire) by rank 0 but as {words} by rank 1: {remedy}");
        assert_differ(&with(other), FaultKind::OperationMismatch, None, "w", &detail);
    }
}

#[test]
fn a_tensor_that_some_ranks_lack_is_named_with_them() {
    let both = manifest(&[tensor("a", &[1]), tensor("b", &[1])]);
    let one = manifest(&[tensor("a", &[1])]);
    let remedy = "declare the same tensors, under the same names, on every rank";
    assert_differ(
        &[both.clone(), both.clone(), one.clone()],
        FaultKind::DeclarationMismatch,
        Some(2),
        "b",
        &format!("declared by ranks 0 and 1 but not by rank 2: {remedy}"),
    );
    assert_differ(
        &[one.clone(), one.clone(), both.clone(), one],
        FaultKind::DeclarationMismatch,
        Some(2),
        "b",
        &format!("declared by rank 2 but not by ranks 0, 1 and 3: {remedy}"),
    );
    assert_differ(
        &[Manifest::default(), both],
        FaultKind::DeclarationMismatch,
        None,
        "a",
        &format!("declared by rank 1 but not by rank 0: {remedy}"),
    );
}

#[test]
fn of_several_differences_the_first_in_rank_0s_order_is_reported() {
    let first = manifest(&[tensor("a", &[1]), tensor("b", &[1]), tensor("c", &[1])]);
    let second = manifest(&[tensor("c", &[2]), tensor("b", &[1]), tensor("a", &[1]), tensor("z", &[1])]);
    let third = manifest(&[tensor("y", &[1]), tensor("a", &[1]), tensor("c", &[1])]);
    assert_eq!(agree(&[first.clone(), second.clone(), third]).unwrap_err().tensor.as_deref(), Some("b"));
    assert_eq!(agree(&[first, second]).unwrap_err().tensor.as_deref(), Some("c"));
}

#[test]
fn a_broadcast_from_no_rank_of_the_job_is_refused() {
    let root = Collective::Broadcast { root: Rank(2) };
    let all = manifest(&[Declaration { collective: root, ..tensor("w", &[1]) }]);
    assert!(agree(&[all.clone(), all.clone(), all.clone()]).is_ok());
    let fault = agree(&[all.clone(), all]).unwrap_err();
    assert_eq!((fault.kind, fault.tensor.as_deref()), (FaultKind::InvalidArgument, Some("w")));
}

#[test]
fn many_values_and_many_ranks_stay_readable() {
    let ranks: Vec<Manifest> = (0..1000).map(|rank| manifest(&[tensor("w", &[rank % 7])])).collect();
    let fault = agree(&ranks).unwrap_err();
    assert!(fault.detail.len() < crate::limits::FAULT_DETAIL_BYTES_MAX, "{fault}");
    assert!(fault.detail.contains("[6] by ranks 6, 13, 20, 27 and 138 more"), "{fault}");
    assert!(fault.detail.contains("and in 3 more ways by others"), "{fault}");
    let ranks: Vec<Manifest> = (0..100).map(|rank| manifest(&[tensor("w", &[u64::from(rank != 40)])])).collect();
    let detail = "declared as [0] by rank 40 but as [1] by ranks 0 to 39 and 41 to 99: declare the same shape on every \
                  rank";
    assert_differ(&ranks, FaultKind::ShapeMismatch, Some(40), "w", detail);
}

#[test]
fn a_hundred_thousand_tensors_in_any_order_are_matched() {
    let tensors: Vec<Declaration> =
        (0..100_000).map(|index| tensor(&format!("layers.{index}.weight"), &[index])).collect();
    let mut ranks = vec![manifest(&tensors)];
    for rank in 1..8 {
        let mut order = tensors.clone();
        order.reverse();
        order.rotate_left(rank * 9_999);
        ranks.push(manifest(&order));
    }
    assert_eq!(agree(&ranks).as_ref(), Ok(&tensors));
    ranks[7].tensors.retain(|tensor| tensor.name != "layers.70000.weight");
    assert_eq!(agree(&ranks).unwrap_err().tensor.as_deref(), Some("layers.70000.weight"));
}
