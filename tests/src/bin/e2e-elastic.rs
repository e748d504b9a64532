//! A trainer that may join while the others train: its state is the same bits on every rank after every step, however
//! it came there. Every result is checked against the contributors that the commit names.
//!
//! `e2e-elastic STEPS [PAUSE_MS [STATE_KIB [LARGE_MIB]]]`: with a pause between steps, a state that is larger by so much,
//! and a further tensor of this size, of which a few elements are checked. Each step is printed with the microseconds of
//! the machine's monotonic clock at its end. `E2E_SAVES` is a directory in which every second state is saved. With
//! `E2E_EXIT` a fault shows in the exit code, for launchers. It leaves when there is a file `E2E_LEAVE`. `E2E_APPLY_MS` is how long applying a step takes.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use gradwire::{
    Buffer, Builder, Commit, DType, Fault, FaultKind, Group, Rank, State, StateTensor, StateTensorMut, StepResults,
    Tensor, TensorSpec, Trainer,
};
use sha2::{Digest as _, Sha256};

const PAGE: usize = 4096;
/// Sizes: fused, small, and large enough to travel as it is.
const SIZES: [u64; 4] = [10, 3000, 50_000, 100_000];

fn main() -> ExitCode {
    let number = |at: usize| std::env::args().nth(at).map_or(0, |text| text.parse().expect("a number"));
    match train(number(1), Duration::from_millis(number(2)), number(3), number(4)) {
        Ok(said) => println!("ok {said}"),
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            println!("fault {:?} rank={rank}: {fault}", fault.kind);
            if std::env::var_os("E2E_EXIT").is_some() {
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// The model, and how many steps it has seen.
struct Model {
    weights: Vec<(String, Vec<f32>)>,
    steps: [u64; 1],
    /// Parts that only have to be there.
    ballast: Vec<u8>,
}

impl Model {
    fn new(ballast: usize) -> Self {
        let weights = SIZES.map(|size| (format!("t{size}"), vec![1.0; size as usize])).into();
        Self { weights, steps: [0], ballast: vec![0; ballast] }
    }

    /// What a rank that begins has, and one that joins has to get: each page something else.
    fn fill_ballast(&mut self) {
        self.ballast.chunks_mut(PAGE).enumerate().for_each(|(nth, page)| page.fill((nth % 251) as u8));
    }

    fn has_ballast(&self) -> bool {
        self.ballast.chunks(PAGE).enumerate().all(|(nth, page)| page.iter().all(|byte| *byte == (nth % 251) as u8))
    }

    /// What a rank contributes: whole numbers, so that sums are exact in any order.
    fn contribution(&self, rank: Rank, tensor: usize, at: usize) -> f32 {
        ((rank.0 as usize * 31 + self.steps[0] as usize * 7 + at + tensor) % 17) as f32
            + (self.weights[tensor].1[at] as u32 % 3) as f32
    }

    fn check(&self, tensor: usize, contributors: &[Rank], sum: &[f32]) {
        for (at, value) in sum.iter().enumerate() {
            let expected: f32 = contributors.iter().map(|rank| self.contribution(*rank, tensor, at)).sum();
            assert_eq!(*value, expected, "t{} at {at} in step {} by {contributors:?}", SIZES[tensor], self.steps[0]);
        }
    }

    fn update(&mut self, tensor: usize, sum: &[f32]) {
        for (weight, sum) in self.weights[tensor].1.iter_mut().zip(sum) {
            *weight += sum * 0.5;
        }
    }

    /// Of what changes.
    fn hash(&self) -> String {
        let mut hash = Sha256::new();
        self.weights.iter().for_each(|(_, values)| hash.update(bytemuck::cast_slice::<f32, u8>(values)));
        hash.update(self.steps[0].to_le_bytes());
        gradwire_proto::secret::hex(&hash.finalize()[..8])
    }
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        let weights =
            self.weights.iter().map(|(name, values)| StateTensor { name, bytes: bytemuck::cast_slice(values) });
        let steps = StateTensor { name: "steps", bytes: bytemuck::cast_slice(&self.steps) };
        weights.chain([steps, StateTensor { name: "ballast", bytes: &self.ballast }]).collect()
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        let weights = self.weights.iter_mut();
        let weights = weights.map(|(name, values)| StateTensorMut { name, bytes: bytemuck::cast_slice_mut(values) });
        let steps = StateTensorMut { name: "steps", bytes: bytemuck::cast_slice_mut(&mut self.steps) };
        weights.chain([steps, StateTensorMut { name: "ballast", bytes: &mut self.ballast }]).collect()
    }
}

impl Trainer for Model {
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault> {
        assert_eq!(results.step().0, self.steps[0], "one after the other");
        let pause = std::env::var("E2E_APPLY_MS").map_or(0, |text| text.parse().expect("milliseconds"));
        std::thread::sleep(Duration::from_millis(pause));
        for tensor in 0..SIZES.len() {
            let name = self.weights[tensor].0.clone();
            let sum = results.get(&name).expect("every tensor is used in every step").as_slice::<f32>();
            self.check(tensor, results.contributors(), sum);
            self.update(tensor, sum);
        }
        self.steps[0] += 1;
        println!("applied {} by {} is {}", results.step().0, names(results.contributors()), self.hash());
        Ok(())
    }
}

fn names(ranks: &[Rank]) -> String {
    ranks.iter().map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(",")
}

fn train(steps: u64, pause: Duration, ballast_kib: u64, large_mib: u64) -> Result<String, Fault> {
    let mut model = Model::new(ballast_kib as usize * 1024);
    let wide = u64::from(std::env::var_os("E2E_WIDER").is_some());
    let mut specs = SIZES.map(|size| TensorSpec::new(format!("t{size}"), &[size + wide], DType::F32)).to_vec();
    if large_mib > 0 {
        specs.push(TensorSpec::new("large", &[large_mib << 18], DType::F32));
    }
    if wide > 0 {
        model.ballast.push(0);
    }
    println!("pid {}", std::process::id());
    let start = Instant::now();
    let joined = Builder::from_env()?.join(&specs, &mut model)?;
    println!("joined at {} over {} in {} ms", joined.step.0, joined.group.transport(), start.elapsed().as_millis());
    if let Some(transfer) = joined.transfer {
        let gradwire::Transfer { bytes, took, members, lost, .. } = transfer;
        println!("fetched {bytes} bytes from {members} in {} us, {lost} lost", took.as_micros());
    }
    if joined.step.0 == 0 {
        model.fill_ballast();
    }
    let (group, tensors) = (joined.group, joined.tensors);
    assert_eq!(joined.step.0, model.steps[0]);
    let saves = std::env::var_os("E2E_SAVES").map(std::path::PathBuf::from);
    let leave = std::env::var_os("E2E_LEAVE").map(std::path::PathBuf::from);
    let offers_first = std::env::var_os("E2E_OFFERS_FIRST").is_some();
    let mut aborted = 0;
    while model.steps[0] < steps {
        let exchange = || {
            std::thread::sleep(pause);
            exchange(&group, &tensors, &model)
        };
        let exchanged = if offers_first {
            group.offer_state(&model)?;
            exchange()
        } else {
            group.offer_state_during(&model, exchange)?
        };
        match exchanged {
            Ok(exchanged) => {
                let next = exchanged.commit.next;
                apply(&mut model, exchanged);
                if next == gradwire::Next::Leave {
                    break;
                }
                if leave.as_ref().is_some_and(|leave| leave.exists()) {
                    group.request_leave()?;
                }
                if let Some(saves) = saves.as_ref().filter(|_| model.steps[0].is_multiple_of(2)) {
                    group.save(saves, &model)?;
                }
            }
            Err(fault) if fault.kind == FaultKind::StepAborted => aborted += 1,
            Err(fault) => return Err(fault),
        }
    }
    // Only now: in the step that this rank begins with, the others would wait for it.
    assert!(model.has_ballast(), "the state is not what it was");
    println!("aborted {aborted}");
    drop(tensors);
    group.close()?;
    Ok(format!("{} steps", model.steps[0]))
}

/// What a step came to: the results of the model's tensors, and then of the large one.
struct Exchanged {
    results: Vec<Buffer>,
    commit: Commit,
}

/// Leaves the model alone: the others may be copying it.
fn exchange(group: &Group, tensors: &[Tensor], model: &Model) -> Result<Exchanged, Fault> {
    let mut handles = Vec::new();
    if let Some(large) = tensors.get(SIZES.len()) {
        let mut data = group.buffer(large)?;
        let (rank, at) = (group.rank().0 as f32, model.steps[0] as usize);
        data.as_mut_slice::<f32>()[at] = rank;
        handles.push(group.submit(large, data)?);
    }
    for (nth, tensor) in tensors.iter().take(SIZES.len()).enumerate() {
        let mut data = group.buffer(tensor)?;
        for (at, value) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *value = model.contribution(group.rank(), nth, at);
        }
        handles.push(group.submit(tensor, data)?);
    }
    let mut results = Vec::new();
    for handle in handles {
        results.push(handle.wait()?.output);
    }
    if tensors.len() > SIZES.len() {
        results.rotate_left(1);
    }
    let mut commit = group.commit()?;
    for gradwire::Replaced { tensor, output, .. } in commit.replaced.drain(..) {
        let at = tensors.iter().position(|other| other.name() == tensor.name()).expect("one of ours");
        results[at] = output;
    }
    Ok(Exchanged { results, commit })
}

fn apply(model: &mut Model, exchanged: Exchanged) {
    let Exchanged { results, commit } = exchanged;
    if let Some(large) = results.get(SIZES.len()) {
        let sum: f32 = commit.contributors.iter().map(|rank| rank.0 as f32).sum();
        assert_eq!(large.as_slice::<f32>()[model.steps[0] as usize], sum);
    }
    for (nth, result) in results.iter().take(SIZES.len()).enumerate() {
        model.check(nth, &commit.contributors, result.as_slice());
        model.update(nth, result.as_slice());
    }
    assert_eq!(commit.version.step.0, model.steps[0]);
    model.steps[0] += 1;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    println!("step {} by {} is {} at {now}", model.steps[0] - 1, names(&commit.contributors), model.hash());
}
