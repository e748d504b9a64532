//! One rank of an end-to-end test: does what its scenario says, and ends with a line that tells how it went.

use std::process::ExitCode;
use std::time::Duration;

use gradwire::{Buffer, Builder, Collective, DType, Fault, Group, Rank, ReduceOp, Step, Tensor, TensorSpec};
use gradwire_codec::reference;
use sha2::{Digest as _, Sha256};

type Said = Result<String, Fault>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize| arguments.get(at).map_or("", String::as_str);
    let said = match argument(0) {
        "exchange" => join().and_then(|group| exchange(&group, argument(1))),
        "small-halves" => join().and_then(|group| small_halves(&group)),
        "declare" => join().and_then(|group| declare(&group, argument(1))),
        "skip" => join().and_then(|group| skip(&group)),
        "uneven" => join().and_then(uneven),
        "undeclared" => join().and_then(|group| undeclared(&group)),
        "die" => join().and_then(|group| die(&group, argument(1), argument(2))),
        "stay" => join().and_then(|group| stay(&group)),
        "resume" => builder()
            .and_then(|builder| builder.first_step(Step(u64::from(u32::MAX) - 1)).connect())
            .and_then(|group| exchange(&group, "2")),
        "steps-differ" => steps_differ(),
        "many-steps" => join().and_then(|group| many_steps(&group, argument(1))),
        "commits" => join().and_then(|group| commits(group, argument(1))),
        "recover" => join().and_then(|group| recover(group, argument(1))),
        "durable" => builder().and_then(|builder| {
            let number = |at: usize| argument(at).parse().expect("a number of steps");
            gradwire_tests::model::train(builder, argument(1), number(2), number(3))
        }),
        "large" => join().and_then(|group| large(&group)),
        other => panic!("there is no scenario '{other}'"),
    };
    match said {
        Ok(said) => {
            println!("ok {said}");
            ExitCode::SUCCESS
        }
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            let tensor = fault.tensor.clone().unwrap_or_else(|| "-".to_owned());
            println!("fault {:?} rank={rank} tensor={tensor}: {fault}", fault.kind);
            ExitCode::SUCCESS
        }
    }
}

fn builder() -> Result<Builder, Fault> {
    Builder::from_env()
}

fn join() -> Result<Group, Fault> {
    let group = builder()?.connect()?;
    println!("joined {}", group.transport());
    Ok(group)
}

/// What a rank contributes: the same on every machine, of mixed sign and size, with some values that are special.
fn values(rank: u32, tensor: usize, step: u64, dtype: DType, bytes: &mut [u8]) {
    let mut state = u64::from(rank) << 40 ^ (tensor as u64) << 20 ^ step;
    for element in bytes.chunks_exact_mut(dtype.size()) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 40) as f32 / 65_536.0 - 128.0;
        match dtype {
            DType::F32 => element.copy_from_slice(&number.to_le_bytes()),
            DType::F64 => element.copy_from_slice(&(f64::from(number) / 3.0).to_le_bytes()),
            DType::F16 | DType::Bf16 => {
                let mut half = [0; 2];
                let packed = gradwire_codec::pack(DType::F32, dtype, &number.to_le_bytes(), &mut half);
                packed.expect("f32 packs into halves");
                element.copy_from_slice(&half);
            }
            DType::I32 => element.copy_from_slice(&((state >> 33) as i32).to_le_bytes()),
            DType::I64 => element.copy_from_slice(&(state as i64).to_le_bytes()),
        }
    }
}

/// Every element type, reduction and collective at awkward sizes: each result is compared with the reference.
fn exchange(group: &Group, steps: &str) -> Said {
    let sizes = [0, 1, 3, 4095, 4096, 4097, 70_000, 300_001];
    let mut specs = Vec::new();
    for (at, dtype) in DType::ALL.into_iter().enumerate() {
        for (nth, size) in sizes.into_iter().enumerate() {
            let reduce = ReduceOp::ALL[(at + nth) % 4];
            specs.push(TensorSpec::new(format!("{dtype}.{size}"), &[size], dtype).reduce(reduce).priority(nth as i32));
        }
    }
    for size in [1, 5000, 200_000] {
        let root = Rank(group.world_size() - 1);
        for (name, collective) in [
            ("scattered", Collective::ReduceScatter),
            ("gathered", Collective::AllGather),
            ("cast", Collective::Broadcast { root }),
        ] {
            specs.push(TensorSpec::new(format!("{name}.{size}"), &[size], DType::F32).collective(collective));
        }
    }
    if group.rank().0 % 2 == 1 {
        specs.reverse(); // the order of declaration must not matter
    }
    let tensors = group.declare(&specs)?;
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|at| tensors[*at].name().to_owned());
    let mut hash = Sha256::new();
    for step in 0..steps.parse().expect("a number of steps") {
        let mut handles = Vec::new();
        for (nth, at) in order.iter().enumerate() {
            let tensor = &tensors[*at];
            let mut data = group.buffer(tensor)?;
            values(group.rank().0, nth, step, tensor.dtype(), data.bytes_mut());
            let in_place = step % 2 == 0 || !tensor.name().starts_with(tensor.dtype().name());
            handles.push(if in_place {
                group.submit(tensor, data)?
            } else {
                let output = group.buffer(tensor)?;
                group.allreduce_into(tensor, data, output)?
            });
        }
        for (nth, handle) in handles.into_iter().enumerate() {
            let spec = &specs[order[nth]];
            let done = handle.wait()?;
            check(group, &tensors[order[nth]], spec, nth, step, &done.output);
            if !spec.name().starts_with("scattered") {
                hash.update(done.output.bytes());
                hash.update([u8::from(done.outcome.found_nonfinite)]);
            }
        }
        assert!(group.commit()?.replaced.is_empty());
        group.barrier()?;
    }
    Ok(gradwire_proto::secret::hex(&hash.finalize()[..]))
}

fn check(group: &Group, tensor: &Tensor, spec: &TensorSpec, nth: usize, step: u64, output: &Buffer) {
    let (dtype, size) = (tensor.dtype(), tensor.dtype().size());
    let inputs: Vec<Vec<u8>> = (0..group.world_size())
        .map(|rank| {
            let mut bytes = vec![0; output.len()];
            values(rank, nth, step, dtype, &mut bytes);
            bytes
        })
        .collect();
    let wire = group.wire().wire_dtype(dtype);
    let reduced = |reduce| {
        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        reference(dtype, wire, reduce, &slices).expect("the reference takes what was declared")
    };
    let rounded = |rank: usize| reference(dtype, wire, ReduceOp::Sum, &[&inputs[rank]]).expect("one contribution");
    let block = |rank: u32| {
        let block = group.block(tensor, Rank(rank));
        block.start as usize * size..block.end as usize * size
    };
    let name = tensor.name();
    if name.starts_with("scattered") {
        let own = block(group.rank().0);
        assert!(output.bytes()[own.clone()] == reduced(ReduceOp::Sum)[own], "{name} in step {step}");
    } else if name.starts_with("gathered") {
        for rank in 0..group.world_size() {
            let part = block(rank);
            assert!(output.bytes()[part.clone()] == rounded(rank as usize)[part], "{name} of {rank} in step {step}");
        }
    } else if name.starts_with("cast") {
        assert!(output.bytes() == rounded(group.world_size() as usize - 1), "{name} in step {step}");
    } else {
        assert!(output.bytes() == reduced(spec.reduce_op()), "{name} in step {step}");
    }
}

/// The two sums that others get wrong in half precision.
fn small_halves(group: &Group) -> Said {
    let world = group.world_size() as usize;
    let specs = [
        TensorSpec::new("sum", &[world as u64], DType::F32),
        TensorSpec::new("mean", &[1], DType::F32).reduce(ReduceOp::Mean),
        TensorSpec::new("overflow", &[1], DType::F32),
        TensorSpec::new("nan", &[2], DType::F32).reduce(ReduceOp::Max),
    ];
    let tensors = group.declare(&specs)?;
    // Element i has 2048 at rank i and 1 elsewhere: wherever the large one stands, the sum is the same.
    let mut sum: Vec<f32> = (0..world).map(|at| if at == group.rank().index() { 2048.0 } else { 1.0 }).collect();
    let mut mean = [40_000.0f32];
    let mut overflow = [60_000.0f32];
    let mut nan = if group.rank().0 == 1 { [f32::NAN, 1.0] } else { [1.0, f32::INFINITY] };
    group.allreduce_slice(&tensors[0], &mut sum)?;
    let finite = group.allreduce_slice(&tensors[1], &mut mean)?.found_nonfinite;
    let infinite = group.allreduce_slice(&tensors[2], &mut overflow)?.found_nonfinite;
    let not_a_number = group.allreduce_slice(&tensors[3], &mut nan)?.found_nonfinite;
    Ok(format!("{sum:?} {mean:?} {finite} {overflow:?} {infinite} {nan:?} {not_a_number}"))
}

fn declare(group: &Group, difference: &str) -> Said {
    let odd = group.rank().0 == 1;
    let mut specs = vec![TensorSpec::new("common", &[4], DType::F32)];
    specs.push(match difference {
        "shape" => TensorSpec::new("weights", &[if odd { 3 } else { 1 }], DType::F32),
        "dtype" => TensorSpec::new("weights", &[8], if odd { DType::I32 } else { DType::F32 }),
        "reduce" => {
            TensorSpec::new("weights", &[8], DType::F32).reduce(if odd { ReduceOp::Max } else { ReduceOp::Sum })
        }
        _ => TensorSpec::new("weights", &[8], DType::F32),
    });
    if difference == "missing" && odd {
        specs.pop();
    }
    if difference == "never" && odd {
        return Err(wait_for_fault(group));
    }
    group.declare(&specs)?;
    Ok("declared".into())
}

/// Rank 1 offers one tensor less than the others.
fn skip(group: &Group) -> Said {
    let specs = [TensorSpec::new("offered", &[100_000], DType::F32), TensorSpec::new("skipped", &[10], DType::F32)];
    let tensors = group.declare(&specs)?;
    group.submit(&tensors[0], group.buffer(&tensors[0])?)?.wait()?;
    if group.rank().0 != 1 {
        group.submit(&tensors[1], group.buffer(&tensors[1])?)?.wait()?;
        return Ok("reduced".into());
    }
    Err(wait_for_fault(group))
}

/// Does nothing until the job has failed.
fn wait_for_fault(group: &Group) -> Fault {
    loop {
        if let Some(fault) = group.fault() {
            return fault;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Rank 0 runs 5 steps, the others 6.
fn uneven(group: Group) -> Said {
    let tensors = group.declare(&[TensorSpec::new("weights", &[100_000], DType::F32)])?;
    let steps = if group.rank().0 == 0 { 5 } else { 6 };
    for _ in 0..steps {
        group.submit(&tensors[0], group.buffer(&tensors[0])?)?.wait()?;
    }
    group.close()?;
    Ok(format!("{steps} steps"))
}

fn undeclared(group: &Group) -> Said {
    group.declare(&[TensorSpec::new("known", &[4], DType::F32)])?;
    let fault = group.tensor("unknown").expect_err("it was never declared");
    group.barrier()?; // nothing was broken by asking
    Err(fault)
}

/// Rank 1 ends: `before` the first operation or in the `middle` of one, by `exit` or by `kill`.
fn die(group: &Group, when: &str, how: &str) -> Said {
    let tensors = group.declare(&[TensorSpec::new("weights", &[16 << 20], DType::F32)])?;
    let doomed = group.rank().0 == 1;
    if doomed && when == "before" {
        end(how);
    }
    for step in 0..1000 {
        let handle = group.submit(&tensors[0], group.buffer(&tensors[0])?)?;
        if doomed && step == 2 {
            std::thread::sleep(Duration::from_millis(3));
            end(how);
        }
        handle.wait()?;
    }
    Ok("nobody died".into())
}

fn end(how: &str) {
    if how == "exit" {
        std::process::exit(9);
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
}

/// Runs steps until it is told why not.
fn stay(group: &Group) -> Said {
    let tensors = group.declare(&[TensorSpec::new("weights", &[10_000], DType::F32)])?;
    println!("pid {}", std::process::id());
    loop {
        group.submit(&tensors[0], group.buffer(&tensors[0])?)?.wait()?;
        println!("step");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn steps_differ() -> Said {
    let builder = builder()?;
    let first = std::env::var("RANK").is_ok_and(|rank| rank == "1");
    let group = builder.first_step(Step(u64::from(first) * 5)).connect()?;
    group.barrier()?;
    Ok("nobody noticed".into())
}

/// Steps of varying sizes: afterwards memory, descriptors and threads are as before.
fn many_steps(group: &Group, steps: &str) -> Said {
    let sizes = [1u64, 1000, 5000, 20_000, 60_000, 130_000];
    let specs: Vec<TensorSpec> =
        sizes.iter().map(|size| TensorSpec::new(format!("t{size}"), &[*size], DType::F32)).collect();
    let tensors = group.declare(&specs)?;
    let steps: usize = steps.parse().expect("a number of steps");
    let mut before = None;
    for step in 0..steps {
        if step == steps / 10 {
            before = Some(Usage::now());
        }
        let mut handles = Vec::new();
        for tensor in tensors.iter().skip(step % 3).step_by(1 + step % 2) {
            handles.push(group.submit(tensor, group.buffer(tensor)?)?);
        }
        for handle in handles {
            handle.wait()?;
        }
        if step % 10 == 0 {
            assert!(group.commit()?.replaced.is_empty());
        }
    }
    let (before, after) = (before.expect("at least 10 steps"), Usage::now());
    assert!(after.descriptors <= before.descriptors + 2, "descriptors: {before:?}, then {after:?}");
    assert!(after.threads <= before.threads + 1, "threads: {before:?}, then {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 4096, "memory: {before:?}, then {after:?}");
    Ok("flat".into())
}

/// Small steps, a few hundred a second, each of them committed, until rank 0 finds this file.
fn commits(group: Group, stop: &str) -> Said {
    let tensor = group.declare(&[TensorSpec::new("weights", &[5000], DType::F32)])?.remove(0);
    let mut step = 0;
    loop {
        let mut data = group.buffer(&tensor)?;
        let elements = data.as_mut_slice::<f32>();
        elements.fill(step as f32);
        // So that all stop after the same step.
        elements[0] = if group.rank().0 == 0 && std::path::Path::new(stop).exists() { 1.0 } else { 0.0 };
        let done = group.submit(&tensor, data)?.wait()?;
        let sums = done.output.as_slice::<f32>();
        assert_eq!(sums[4999], step as f32 * group.world_size() as f32);
        let last = sums[0] > 0.0;
        assert!(group.commit()?.replaced.is_empty());
        println!("step {step}");
        step += 1;
        if last {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
    drop(tensor);
    group.close()?;
    Ok(format!("{step} steps"))
}

/// Sizes of what a trainer exchanges that goes on without lost ranks: fused, small, and large enough to travel as it is.
const RECOVERED: [u64; 4] = [10, 3000, 50_000, 600_000];

/// Trains until this many steps are final, whoever is lost. Every result is checked against the contributors that the
/// commit names; what each step came to is printed.
fn recover(group: Group, steps: &str) -> Said {
    let specs = RECOVERED.map(|size| TensorSpec::new(format!("t{size}"), &[size], DType::F32));
    let tensors = group.declare(&specs)?;
    let steps: u64 = steps.parse().expect("a number of steps");
    let (mut step, mut replaced, mut aborted) = (0, 0, 0);
    while step < steps {
        match recovered_step(&group, &tensors, step) {
            Ok(count) => {
                replaced += count;
                step += 1;
            }
            Err(fault) if fault.kind == gradwire::FaultKind::StepAborted => aborted += 1,
            Err(fault) => return Err(fault),
        }
    }
    println!("replaced {replaced} aborted {aborted}");
    drop(tensors);
    group.close()?;
    Ok(format!("{steps} steps"))
}

fn recovered_step(group: &Group, tensors: &[Tensor], step: u64) -> Result<usize, Fault> {
    let mut handles = Vec::new();
    for tensor in tensors {
        let mut data = group.buffer(tensor)?;
        for (at, value) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *value = contribution(group.rank(), step, at);
        }
        handles.push(group.submit(tensor, data)?);
        // So that ranks are lost between operations too.
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    let mut results = Vec::new();
    for handle in handles {
        results.push(handle.wait()?.output);
    }
    let commit = group.commit()?;
    let count = commit.replaced.len();
    for gradwire::Replaced { tensor, output, .. } in commit.replaced {
        let at = tensors.iter().position(|other| other.name() == tensor.name()).expect("one of ours");
        results[at] = output;
    }
    let mut crc = 0;
    for result in &results {
        for (at, value) in result.as_slice::<f32>().iter().enumerate() {
            let expected = commit.contributors.iter().map(|rank| contribution(*rank, step, at));
            let expected = expected.reduce(|sum, value| sum + value).expect("contributors");
            assert_eq!(value.to_bits(), expected.to_bits(), "step {step}, element {at} of {}", result.len() / 4);
        }
        crc = gradwire_codec::crc32_combine(crc, gradwire_codec::crc32(result.bytes()), result.len() as u64);
    }
    let contributors: Vec<String> = commit.contributors.iter().map(|rank| rank.0.to_string()).collect();
    println!("step {step} of {} is {crc:08x}", contributors.join(","));
    Ok(count)
}

/// Of mixed sign and size, so that the order of addition shows.
fn contribution(rank: gradwire::Rank, step: u64, at: usize) -> f32 {
    let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (step + 1) << 20 ^ u64::from(rank.0 + 1) << 40;
    (mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / 65_536.0 - 128.0
}

#[derive(Clone, Copy, Debug)]
struct Usage {
    descriptors: usize,
    threads: usize,
    resident_kib: usize,
}

impl Usage {
    fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident_kib = resident.and_then(|rest| rest.trim().split(' ').next()?.parse().ok()).unwrap_or(0);
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task"), resident_kib }
    }
}

/// More elements than 32 bits with a sign can count.
fn large(group: &Group) -> Said {
    let elements = (1u64 << 31) + 12_345;
    let tensors = group.declare(&[TensorSpec::new("large", &[elements], DType::Bf16)])?;
    let mut data = group.buffer(&tensors[0])?;
    let one = 0x3f80u16.to_le_bytes(); // 1.0
    for element in data.bytes_mut().chunks_exact_mut(2) {
        element.copy_from_slice(&one);
    }
    let done = group.submit(&tensors[0], data)?.wait()?;
    let sum = 1.0f32 * group.world_size() as f32;
    let expected = ((sum.to_bits() >> 16) as u16).to_le_bytes();
    assert!(done.output.bytes().chunks_exact(2).all(|element| element == expected), "a wrong sum");
    assert_eq!(done.output.len() as u64, elements * 2);
    Ok(format!("{elements} elements"))
}
