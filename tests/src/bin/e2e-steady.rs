//! One rank that counts the allocations of steady state: all threads, in windows of steps.

use gradwire::{Builder, DType, Fault, Group, Tensor, TensorSpec};
use gradwire_tests::sys::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WINDOWS: usize = 8;
const STEPS: usize = 100;

fn main() -> Result<(), Fault> {
    let group = Builder::from_env()?.connect()?;
    // Small and fused, staged, direct.
    let specs = [3, 5000, 20_000, 300_000]
        .map(|size: u64| TensorSpec::new(format!("t{size}"), &[size], DType::F32).priority(size as i32 % 7));
    let tensors = group.declare(&specs)?;
    steps(&group, &tensors)?;
    let mut fewest = u64::MAX;
    for _ in 0..WINDOWS {
        let before = Counting::count();
        steps(&group, &tensors)?;
        fewest = fewest.min(Counting::count() - before);
    }
    group.close()?;
    // The control plane's thread may have woken up in some windows, but what a step allocates it does in all.
    println!("ok {fewest} allocations");
    Ok(())
}

fn steps(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    for _ in 0..STEPS {
        // An array, so that the test itself allocates nothing.
        let handles = [0, 1, 2, 3].map(|at| {
            let data = group.buffer(&tensors[at])?;
            Ok::<_, Fault>(group.submit(&tensors[at], data)?)
        });
        for handle in handles {
            handle?.wait()?;
        }
        group.barrier()?;
    }
    Ok(())
}
