//! A trainer that may join while the others train: its state is the same bits on every rank after every step, however
//! it came there. Every result is checked against the contributors that the commit names.
//!
//! `e2e-elastic STEPS [PAUSE_MS [STATE_KIB]]`

use std::process::ExitCode;
use std::time::Duration;

use gradwire::{
    Builder, DType, Fault, FaultKind, Group, Rank, State, StateTensor, StateTensorMut, StepResults, Tensor, TensorSpec,
    Trainer,
};
use sha2::{Digest as _, Sha256};

/// Sizes: fused, small, and large enough to travel as it is.
const SIZES: [u64; 4] = [10, 3000, 50_000, 300_000];

fn main() -> ExitCode {
    let number = |at: usize| std::env::args().nth(at).map_or(0, |text| text.parse().expect("a number"));
    match train(number(1), Duration::from_millis(number(2)), number(3)) {
        Ok(said) => println!("ok {said}"),
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            println!("fault {:?} rank={rank}: {fault}", fault.kind);
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
        let ballast = (0..ballast).map(|at| (at / 7) as u8).collect();
        Self { weights, steps: [0], ballast }
    }

    /// What a rank contributes: whole numbers, so that sums are exact in any order.
    fn contribution(&self, rank: Rank, tensor: usize, at: usize) -> f32 {
        ((rank.0 as usize * 31 + self.steps[0] as usize * 7 + at + tensor) % 17) as f32
            + (self.weights[tensor].1[at] % 3.0).floor()
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

    fn hash(&self) -> String {
        let mut hash = Sha256::new();
        self.parts().iter().for_each(|part| hash.update(part.bytes));
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

fn train(steps: u64, pause: Duration, ballast_kib: u64) -> Result<String, Fault> {
    let mut model = Model::new(ballast_kib as usize * 1024);
    let wide = u64::from(std::env::var_os("E2E_WIDER").is_some());
    let specs = SIZES.map(|size| TensorSpec::new(format!("t{size}"), &[size + wide], DType::F32));
    if wide > 0 {
        model.ballast.push(0);
    }
    let joined = Builder::from_env()?.join(&specs, &mut model)?;
    println!("joined at {} over {}", joined.step.0, joined.group.transport());
    let (group, tensors) = (joined.group, joined.tensors);
    assert_eq!(joined.step.0, model.steps[0]);
    let mut aborted = 0;
    while model.steps[0] < steps {
        group.offer_state(&model)?;
        match step(&group, &tensors, &mut model) {
            Ok(()) => {}
            Err(fault) if fault.kind == FaultKind::StepAborted => aborted += 1,
            Err(fault) => return Err(fault),
        }
        std::thread::sleep(pause);
    }
    println!("aborted {aborted}");
    drop(tensors);
    group.close()?;
    Ok(format!("{steps} steps"))
}

fn step(group: &Group, tensors: &[Tensor], model: &mut Model) -> Result<(), Fault> {
    let mut handles = Vec::new();
    for (nth, tensor) in tensors.iter().enumerate() {
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
    let commit = group.commit()?;
    for gradwire::Replaced { tensor, output, .. } in commit.replaced {
        let at = tensors.iter().position(|other| other.name() == tensor.name()).expect("one of ours");
        results[at] = output;
    }
    for (nth, result) in results.iter().enumerate() {
        model.check(nth, &commit.contributors, result.as_slice());
        model.update(nth, result.as_slice());
    }
    assert_eq!(commit.version.step.0, model.steps[0]);
    model.steps[0] += 1;
    println!("step {} by {} is {}", model.steps[0] - 1, names(&commit.contributors), model.hash());
    Ok(())
}
