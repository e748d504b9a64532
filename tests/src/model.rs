//! A trainer that saves its state: what it comes to is a function of the steps made, whoever took part in them.

use std::path::Path;

use gradwire::durable::SavedState;
use gradwire::{
    Builder, DType, Fault, FaultKind, Group, ReduceOp, State, StateTensor, StateTensorMut, Tensor, TensorSpec,
};

const GRADIENTS: usize = 1000;

/// Some megabytes, so that several pieces are saved.
#[derive(Debug, PartialEq, Eq)]
pub struct Model {
    weights: Vec<u8>,
    momentum: Vec<u8>,
    seed: Vec<u8>,
}

impl Default for Model {
    fn default() -> Self {
        Self { weights: vec![1; 10_000_000], momentum: vec![2; 4_000_004], seed: vec![3; 8] }
    }
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        let parts = [("weights", &self.weights), ("momentum", &self.momentum), ("seed", &self.seed)];
        parts.into_iter().map(|(name, bytes)| StateTensor { name, bytes }).collect()
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        let parts = [("weights", &mut self.weights), ("momentum", &mut self.momentum), ("seed", &mut self.seed)];
        parts.into_iter().map(|(name, bytes)| StateTensorMut { name, bytes }).collect()
    }
}

/// Whole numbers: the mean over any number of ranks is exact.
fn gradient(step: u64, at: usize) -> f32 {
    ((step * 31 + at as u64 * 7) % 1000) as f32
}

impl Model {
    /// Makes the step as one process would.
    pub fn step(&mut self, step: u64) {
        let gradients: Vec<f32> = (0..GRADIENTS).map(|at| gradient(step, at)).collect();
        self.apply(&gradients);
    }

    fn apply(&mut self, gradients: &[f32]) {
        for part in [&mut self.weights, &mut self.momentum, &mut self.seed] {
            for (word, gradient) in part.as_chunks_mut::<4>().0.iter_mut().zip(gradients.iter().cycle()) {
                let next = u32::from_le_bytes(*word).wrapping_mul(2_654_435_761).wrapping_add(*gradient as u32);
                *word = next.rotate_left(5).to_le_bytes();
            }
        }
    }

    /// Names its content.
    #[must_use]
    pub fn digest(&self) -> String {
        let digests = self.parts().iter().map(|part| gradwire_codec::crc32(part.bytes)).collect::<Vec<u32>>();
        format!("{digests:08x?}")
    }
}

/// Goes on from the latest save in `directory`, saves after each `every` steps, and ends after `steps`. Says before and
/// after each save that it does so. Where `E2E_GATE` names a file it begins when that is there.
///
/// # Errors
/// Those of gradwire, but for saves that could not be made: it goes on without them.
pub fn train(builder: Builder, directory: &str, steps: u64, every: u64) -> Result<String, Fault> {
    let directory = Path::new(directory);
    let saved = SavedState::latest(directory)?;
    let builder = match &saved {
        Some(saved) => builder.first_step(saved.step()),
        None => builder,
    };
    let group = builder.connect()?;
    let mut model = Model::default();
    let mut step = 0;
    if let Some(saved) = &saved {
        step = group.restore(saved, &mut model)?.step.0;
    }
    println!("begins with {step}");
    let gate = std::env::var_os("E2E_GATE");
    while gate.as_ref().is_some_and(|gate| !Path::new(gate).exists()) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let spec = TensorSpec::new("gradient", &[GRADIENTS as u64], DType::F32).reduce(ReduceOp::Mean);
    let tensor = group.declare(&[spec])?.remove(0);
    while step < steps {
        train_step(&group, &tensor, &mut model, step)?;
        step += 1;
        if step.is_multiple_of(every) {
            println!("saving {step} ");
            match group.save(directory, &model) {
                Ok(saved) => {
                    let name = saved.path.file_name().unwrap_or_default().to_string_lossy();
                    println!("saved {} {name}", saved.step.0);
                }
                Err(fault) if fault.kind == FaultKind::NotSaved => println!("not saved {step} {fault}"),
                Err(fault) => return Err(fault),
            }
        }
    }
    drop(tensor);
    group.close()?;
    Ok(model.digest())
}

fn train_step(group: &Group, tensor: &Tensor, model: &mut Model, step: u64) -> Result<(), Fault> {
    let mut data = group.buffer(tensor)?;
    for (at, value) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
        *value = gradient(step, at);
    }
    let mut mean = group.allreduce(tensor, data)?.wait()?.output;
    let commit = group.commit()?;
    if let Some(replaced) = commit.replaced.into_iter().next() {
        assert_eq!(replaced.tensor.name(), "gradient", "what is gradwire's own is no result");
        mean = replaced.output;
    }
    model.apply(mean.as_slice());
    Ok(())
}
