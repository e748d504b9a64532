//! A trainer that misuses gradwire: `e2e-misuse HOW STEPS`. Rank 1 does it, once, in its third step; the others train. Ends
//! with `ok ...` or the fault that it met; a panic shows in the exit code.

use std::process::ExitCode;
use std::time::Duration;

use gradwire::{
    Builder, Collective, DType, Fault, FaultKind, Group, Joined, Rank, State, StateTensor, StateTensorMut, StepResults,
    Tensor, TensorSpec, Trainer,
};

/// Fused, and large enough to travel as it is.
const SIZES: [u64; 3] = [10, 5000, 100_000];
/// The step in which it goes wrong.
const WRONG_STEP: u64 = 3;
/// Longer than the others wait.
const HANG: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let argument = |at: usize| std::env::args().nth(at).unwrap_or_default();
    match train(&argument(1), argument(2).parse().expect("a number of steps")) {
        Ok(said) => println!("ok {said}"),
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            println!("fault {:?} rank={rank}: {fault}", fault.kind);
        }
    }
    ExitCode::SUCCESS
}

struct Model {
    weights: Vec<u8>,
    steps: u64,
    /// What is left out of the parts to be written to.
    short: bool,
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        vec![StateTensor { name: "weights", bytes: &self.weights }]
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        let length = self.weights.len() - usize::from(self.short);
        vec![StateTensorMut { name: "weights", bytes: &mut self.weights[..length] }]
    }
}

impl Trainer for Model {
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault> {
        self.steps = results.step().0 + 1;
        Ok(())
    }
}

fn train(how: &str, steps: u64) -> Result<String, Fault> {
    let mut model = Model { weights: vec![0; 100_000], steps: 0, short: how == "short" };
    let mut specs = SIZES.map(|size| TensorSpec::new(format!("t{size}"), &[size], DType::F32)).to_vec();
    if how == "lost-root" {
        let cast = TensorSpec::new("cast", &[50_000], DType::F32);
        specs.push(cast.collective(Collective::Broadcast { root: Rank(1) }));
    }
    let Joined { group, tensors, step, .. } = Builder::from_env()?.join(&specs, &mut model)?;
    println!("joined at {}", step.0);
    model.steps = step.0;
    let mut group = Some(group);
    let mut wrong = group.as_ref().is_some_and(|group| group.rank().0 == 1) && step.0 < WRONG_STEP;
    while let Some(open) = group.as_ref().filter(|_| model.steps < steps) {
        if how == "grow" {
            model.weights.push(0);
        }
        open.offer_state(&model)?;
        let now = std::mem::take(&mut wrong) && model.steps == WRONG_STEP;
        let done = match (how, now) {
            ("close" | "drop" | "lost-root", true) => return end_in_the_middle(group.take(), &tensors, how),
            ("commit-twice", true) => exchange(open, &tensors).and_then(|()| commit(open)).and_then(|()| commit(open)),
            ("skip-commit", true) => exchange(open, &tensors),
            ("post-while-committing", true) => post_while_committing(open, &tensors),
            ("commit-with-open", true) => commit_with_open(open, &tensors),
            ("hang", true) => {
                std::thread::sleep(HANG);
                step_of(open, &tensors)
            }
            ("offer-twice", true) => open.offer_state(&model).and_then(|()| step_of(open, &tensors)),
            ("many-threads", _) => many_threads(open, &tensors),
            _ => step_of(open, &tensors),
        };
        wrong |= !now && open.rank().0 == 1 && model.steps < WRONG_STEP;
        match done {
            Ok(()) => {
                model.steps += 1;
                println!("step {}", model.steps);
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(fault) if fault.kind == FaultKind::StepAborted => println!("aborted"),
            Err(fault) => return Err(fault),
        }
    }
    drop(tensors);
    group.map_or(Ok(()), Group::close)?;
    Ok(format!("{steps} steps"))
}

fn step_of(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    exchange(group, tensors)?;
    commit(group)
}

fn commit(group: &Group) -> Result<(), Fault> {
    group.commit().map(drop)
}

fn exchange(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    let mut handles = Vec::new();
    for tensor in tensors {
        let mut data = group.buffer(tensor)?;
        let value = if tensor.name() == "cast" { 100.0 + group.rank().0 as f32 } else { 1.0 };
        data.as_mut_slice::<f32>().fill(value);
        handles.push(group.submit(tensor, data)?);
    }
    for (handle, tensor) in handles.into_iter().zip(tensors) {
        let result = handle.wait()?.output.as_slice::<f32>()[0];
        // Who goes in the middle of a step contributes what was in its buffers: results of the step before.
        let expected = if tensor.name() == "cast" { result == 101.0 } else { result >= 1.0 && result.fract() == 0.0 };
        assert!(expected, "{} came to {result}", tensor.name());
    }
    Ok(())
}

/// With operations in flight.
fn end_in_the_middle(group: Option<Group>, tensors: &[Tensor], how: &str) -> Result<String, Fault> {
    let group = group.expect("it is open");
    let mut handles = Vec::new();
    for tensor in tensors {
        handles.push(group.submit(tensor, group.buffer(tensor)?)?);
    }
    if how == "close" {
        group.close()?;
    } else {
        drop(group);
    }
    let ended: Vec<bool> = handles.into_iter().map(|handle| handle.wait().is_ok()).collect();
    Ok(format!("ended with {ended:?}"))
}

fn commit_with_open(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    let handle = group.submit(&tensors[2], group.buffer(&tensors[2])?)?;
    let early = group.commit();
    println!("early: {:?}", early.as_ref().map(|_| ()).map_err(|fault| fault.kind));
    handle.wait()?;
    for tensor in &tensors[..2] {
        group.submit(tensor, group.buffer(tensor)?)?.wait()?;
    }
    if early.is_err() { commit(group) } else { Ok(()) }
}

/// Another thread begins an operation of the next step while this one ends.
fn post_while_committing(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    exchange(group, tensors)?;
    std::thread::scope(|scope| {
        let posted = scope.spawn(|| {
            std::thread::sleep(Duration::from_micros(200));
            group.submit(&tensors[1], group.buffer(&tensors[1])?)?.wait()?;
            Ok::<(), Fault>(())
        });
        let committed = commit(group);
        let posted = posted.join().expect("no panic");
        println!("posted: {:?}", posted.as_ref().map_err(|fault| fault.kind));
        committed
    })
}

/// Every tensor by a thread of its own, and all of them look at the group meanwhile.
fn many_threads(group: &Group, tensors: &[Tensor]) -> Result<(), Fault> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = tensors
            .iter()
            .map(|tensor| {
                scope.spawn(move || {
                    let members = group.members();
                    assert!(members.contains(&group.rank()));
                    let mut ones = vec![1.0f32; tensor.elements() as usize];
                    group.allreduce_slice(tensor, &mut ones)?;
                    let _ = (group.stats(), group.epoch(), group.fault());
                    Ok::<(), Fault>(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    commit(group)
}
