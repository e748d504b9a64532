//! A correct trainer that uses all there is, in an order of its own on each rank: `e2e-mixed STEPS PAUSE_US`. Which operations
//! a step has depends on its number alone; their order, the pauses and the threads differ. The state is a hash over all
//! results of allreduces, and is printed after each step with the contributors. With `E2E_LEAVE_AT` it leaves at that step.

use std::process::ExitCode;
use std::time::Duration;

use gradwire::{
    Builder, Collective, Commit, DType, Fault, FaultKind, Group, Handle, Joined, Next, Rank, State, StateTensor,
    StateTensorMut, StepResults, Tensor, TensorSpec, Trainer,
};
use gradwire_tests::dice::Dice;

/// Of the allreduces: fused, small, and large enough to travel as they are.
const SIZES: [u64; 6] = [1, 3, 7, 5000, 20_000, 70_000];
const REDUCE_SCATTER: usize = SIZES.len();
const ALLGATHER: usize = SIZES.len() + 1;
const BROADCAST: usize = SIZES.len() + 2;
const REDUCE_SCATTER_OF_ONE: usize = SIZES.len() + 3;

fn main() -> ExitCode {
    let argument = |at: usize| std::env::args().nth(at).map_or(0, |text| text.parse().expect("a number"));
    match train(argument(1), argument(2)) {
        Ok(said) => println!("ok {said}"),
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            println!("fault {:?} rank={rank}: {fault}", fault.kind);
        }
    }
    ExitCode::SUCCESS
}

/// Results of the allreduces, by tensor; nothing of those that the step does not have.
type Results = Vec<Option<Vec<f32>>>;

struct Model {
    /// Steps, and the hash.
    state: [u64; 2],
    ballast: Vec<u8>,
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        let state = bytemuck::cast_slice(&self.state);
        vec![StateTensor { name: "ballast", bytes: &self.ballast }, StateTensor { name: "state", bytes: state }]
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        let state = bytemuck::cast_slice_mut(&mut self.state);
        vec![
            StateTensorMut { name: "ballast", bytes: &mut self.ballast },
            StateTensorMut { name: "state", bytes: state },
        ]
    }
}

impl Model {
    fn update(&mut self, results: &Results) {
        for value in results.iter().flatten().flatten() {
            self.state[1] = (self.state[1] ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3).rotate_left(7);
        }
        self.state[0] += 1;
    }
}

impl Trainer for Model {
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault> {
        assert_eq!(results.step().0, self.state[0], "one step after the other");
        let of = |size: &u64| results.get(&format!("a{size}")).map(|buffer| buffer.as_slice::<f32>().to_vec());
        self.update(&SIZES.iter().map(of).collect());
        Ok(())
    }
}

fn shuffled(random: &mut Dice, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    (1..count).rev().for_each(|at| order.swap(at, random.below(at as u64 + 1) as usize));
    order
}

fn nap(random: &mut Dice, pause_us: u64) {
    let us = random.below(pause_us * 2);
    if us > pause_us / 2 {
        std::thread::sleep(Duration::from_micros(us));
    }
}

fn specs() -> Vec<TensorSpec> {
    let other = |name: &str, size, collective| TensorSpec::new(name, &[size], DType::F32).collective(collective);
    let reduced = SIZES.iter().map(|size| TensorSpec::new(format!("a{size}"), &[*size], DType::F32));
    reduced
        .chain([
            other("scattered", 4001, Collective::ReduceScatter),
            other("gathered", 4001, Collective::AllGather),
            other("cast", 4001, Collective::Broadcast { root: Rank(0) }),
            other("scattered-one", 1, Collective::ReduceScatter),
        ])
        .collect()
}

fn train(steps: u64, pause_us: u64) -> Result<String, Fault> {
    let mut model = Model { state: [0; 2], ballast: vec![5; 2_000_000] };
    let Joined { group, tensors, step, .. } = Builder::from_env()?.join(&specs(), &mut model)?;
    println!("joined at {}", step.0);
    assert_eq!(step.0, model.state[0], "the state is that of the step");
    // Another order in every process.
    let mut random = Dice::new(u64::from(std::process::id()));
    let leaves_at: Option<u64> = std::env::var("E2E_LEAVE_AT").ok().map(|text| text.parse().expect("a step"));
    while model.state[0] < steps {
        let step = model.state[0];
        if leaves_at == Some(step) {
            group.request_leave()?;
        }
        let mut one = Step { group: &group, tensors: &tensors, number: step, pause_us, random: &mut random };
        let done = if one.random.below(2) == 0 {
            group.offer_state(&model)?;
            one.make()
        } else {
            group.offer_state_during(&model, || one.make())?
        };
        match done {
            Ok((results, commit)) => {
                model.update(&results);
                let by: Vec<String> = commit.contributors.iter().map(|rank| rank.0.to_string()).collect();
                println!("step {step} by {} is {:016x}", by.join(","), model.state[1]);
                if commit.next != Next::GoOn {
                    break;
                }
            }
            Err(fault) if fault.kind == FaultKind::StepAborted => println!("aborted {step}"),
            Err(fault) => return Err(fault),
        }
    }
    drop(tensors);
    group.close()?;
    Ok(format!("{} steps", model.state[0]))
}

/// A step in the making.
struct Step<'a> {
    group: &'a Group,
    tensors: &'a [Tensor],
    number: u64,
    pause_us: u64,
    random: &'a mut Dice,
}

impl Step<'_> {
    fn make(&mut self) -> Result<(Results, Commit), Fault> {
        let mut results: Results = vec![None; SIZES.len()];
        nap(self.random, self.pause_us);
        match self.number % 8 {
            0 | 7 => self.all_in_any_order(&mut results)?,
            // A step without an operation.
            1 => {}
            2 => {
                self.group.barrier()?;
                nap(self.random, self.pause_us);
                self.group.barrier()?;
            }
            3 => {
                let scattered = self.post(REDUCE_SCATTER)?;
                nap(self.random, self.pause_us);
                let (reduced, one) = (self.post(1)?, self.post(REDUCE_SCATTER_OF_ONE)?);
                scattered.wait()?;
                results[1] = Some(values(reduced)?);
                one.wait()?;
            }
            4 => {
                let first = [ALLGATHER, BROADCAST][self.random.below(2) as usize];
                let handle = self.post(first)?;
                nap(self.random, self.pause_us);
                self.post(ALLGATHER + BROADCAST - first)?.wait()?;
                handle.wait()?;
            }
            5 => {
                // One tensor twice.
                self.post(3)?.wait()?;
                let beside = self.post(0)?;
                results[3] = Some(values(self.post(3)?)?);
                results[0] = Some(values(beside)?);
            }
            _ => self.all_by_threads(&mut results)?,
        }
        nap(self.random, self.pause_us);
        let commit = self.group.commit()?;
        for replaced in &commit.replaced {
            let at = self.tensors.iter().position(|tensor| tensor.name() == replaced.tensor.name());
            results[at.expect("it is one of them")] = Some(replaced.output.as_slice::<f32>().to_vec());
        }
        Ok((results, commit))
    }

    fn post(&self, tensor: usize) -> Result<Handle, Fault> {
        let mut buffer = self.group.buffer(&self.tensors[tensor])?;
        let salt = u64::from(self.group.rank().0) * 31 + self.number * 7;
        let elements = buffer.as_mut_slice::<f32>().iter_mut();
        elements.zip(salt..).for_each(|(element, value)| *element = (value % 13) as f32);
        Ok(self.group.submit(&self.tensors[tensor], buffer)?)
    }

    fn all_in_any_order(&mut self, results: &mut Results) -> Result<(), Fault> {
        let mut handles = Vec::new();
        for tensor in shuffled(self.random, SIZES.len()) {
            handles.push((tensor, self.post(tensor)?));
            nap(self.random, self.pause_us / 4);
        }
        while !handles.is_empty() {
            let (tensor, handle) = handles.swap_remove(self.random.below(handles.len() as u64) as usize);
            results[tensor] = Some(values(handle)?);
        }
        Ok(())
    }

    fn all_by_threads(&self, results: &mut Results) -> Result<(), Fault> {
        let one = |tensor: usize, result: &mut Option<Vec<f32>>| -> Result<(), Fault> {
            *result = Some(values(self.post(tensor)?)?);
            Ok(())
        };
        std::thread::scope(|scope| {
            let spawn = |(tensor, result)| scope.spawn(move || one(tensor, result));
            let threads: Vec<_> = results.iter_mut().enumerate().map(spawn).collect();
            // All of them end before one of their faults is handed on.
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
            ended.into_iter().collect()
        })
    }
}

fn values(handle: Handle) -> Result<Vec<f32>, Fault> {
    Ok(handle.wait()?.output.as_slice::<f32>().to_vec())
}
