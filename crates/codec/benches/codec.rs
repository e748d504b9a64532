//! Throughput of checksum, conversion and reduction, beside a plain copy and a plain loop over the same memory.
//!
//! Bytes per second are native bytes of one tensor, not the memory traffic. `unit` is one unit of the protocol, which
//! stays in the second-level cache; `64MiB` comes from memory.
#![allow(clippy::unwrap_used, reason = "a failure here is to stop the run")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gradwire_codec::{Input, Outputs, Reduction, crc32, has_nonfinite, pack, unpack};
use gradwire_proto::{DType, ReduceOp};

const SIZES: [(&str, usize); 2] = [("unit", 256 << 10), ("64MiB", 64 << 20)];

criterion_group!(benches, baselines, conversion, reduction);
criterion_main!(benches);

fn baselines(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("baseline");
    for (name, bytes) in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64));
        let source = gradients(bytes, 1);
        let mut target = gradients(bytes, 2);
        group.bench_function(BenchmarkId::new("memcpy", name), |bencher| {
            bencher.iter(|| target.copy_from_slice(black_box(&source)));
        });
        let (mut a, b) = (vec![1.0_f32; bytes / 4], vec![1e-3_f32; bytes / 4]);
        group.bench_function(BenchmarkId::new("a+=b", name), |bencher| {
            bencher.iter(|| a.iter_mut().zip(black_box(&b)).for_each(|(a, b)| *a += b));
        });
        group.bench_function(BenchmarkId::new("crc32", name), |bencher| {
            bencher.iter(|| crc32(black_box(&source)));
        });
    }
}

fn conversion(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("convert");
    for (name, bytes) in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64));
        let native = gradients(bytes, 1);
        let mut unpacked = gradients(bytes, 2);
        group.bench_function(BenchmarkId::new("has_nonfinite", name), |bencher| {
            bencher.iter(|| has_nonfinite(DType::F32, black_box(&native)));
        });
        for wire in [DType::F32, DType::F16, DType::Bf16] {
            let mut packed = vec![1; bytes / 4 * wire.size()];
            group.bench_function(BenchmarkId::new(format!("pack {wire}"), name), |bencher| {
                bencher.iter(|| pack(DType::F32, wire, black_box(&native), &mut packed));
            });
            group.bench_function(BenchmarkId::new(format!("unpack {wire}"), name), |bencher| {
                bencher.iter(|| unpack(wire, DType::F32, black_box(&packed), &mut unpacked));
            });
        }
    }
}

/// What an owner does: its own contribution, here the last rank's, lies in the tensor, the others' in landing buffers.
fn reduction(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce");
    for (name, bytes) in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64));
        let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
        for (dtype, wire, op, ranks) in [
            (f32, f32, ReduceOp::Sum, 2),
            (f32, f32, ReduceOp::Mean, 2),
            (f32, f32, ReduceOp::Max, 2),
            (f32, f32, ReduceOp::Mean, 4),
            (f32, f32, ReduceOp::Mean, 8),
            (f32, f16, ReduceOp::Mean, 2),
            (f32, f16, ReduceOp::Mean, 4),
            (f32, bf16, ReduceOp::Mean, 2),
            (f16, f16, ReduceOp::Mean, 2),
            (DType::F64, DType::F64, ReduceOp::Mean, 2),
            (DType::I32, DType::I32, ReduceOp::Sum, 2),
            (DType::I64, DType::I64, ReduceOp::Sum, 2),
        ] {
            let elements = bytes / dtype.size();
            let mut native = gradients(bytes, 0);
            let peers: Vec<Vec<u8>> = (1..ranks)
                .map(|rank| {
                    let mut packed = vec![0; elements * wire.size()];
                    pack(dtype, wire, &gradients(bytes, rank), &mut packed).unwrap();
                    packed
                })
                .collect();
            let mut result = (wire != dtype).then(|| vec![1; elements * wire.size()]);
            let reduction = Reduction::new(dtype, wire, op, ranks).unwrap();
            group.bench_function(BenchmarkId::new(format!("{dtype} as {wire} {op} of {ranks}"), name), |bencher| {
                bencher.iter(|| {
                    let inputs = |rank: usize| peers.get(rank).map_or(Input::Own, |peer| Input::Wire(peer));
                    reduction.run(inputs, Outputs { wire: result.as_deref_mut(), native: Some(&mut native) })
                });
            });
        }
        let (a, b, mut target) = (gradients(bytes, 0), gradients(bytes, 1), gradients(bytes, 2));
        let reduction = Reduction::new(f32, f32, ReduceOp::Sum, 2).unwrap();
        group.bench_function(BenchmarkId::new("f32 as f32 sum of 2, apart", name), |bencher| {
            bencher.iter(|| {
                let inputs = |rank: usize| Input::Wire(if rank == 0 { &a } else { &b });
                reduction.run(inputs, Outputs { wire: None, native: Some(&mut target) })
            });
        });
    }
}

/// Small f32 numbers of both signs, the same for the same seed.
fn gradients(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes as u32 / 4)
        .flat_map(|index| {
            let bits = index.wrapping_add(seed).wrapping_mul(0x9e37_79b9);
            ((bits >> 8) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes()
        })
        .collect()
}
