//! An elastic trainer, complete: linear regression by SGD with momentum, whose ranks may be lost, come back, join, and be
//! told to end, and which goes on from what it saved.
//!
//! ```sh
//! cargo build -p gradwire --example elastic
//! gradwire launch -n 3 --min-ranks 1 --restarts 2 -- target/debug/examples/elastic
//! ```
//!
//! `elastic [SAVES [STEPS [PAUSE_MS]]]`: the directory for saves (`elastic-saves`), which all ranks see, how many steps to
//! make (600), and how long a rank computes on top of what it has to in each (10 ms). While it runs, end a rank with
//! `kill -9`: the others go on, and it is started again and gets the state from them. End the launcher with SIGTERM: all
//! ranks end with the same step, and save. Start it again: it goes on from there.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use gradwire::durable::SavedState;
use gradwire::{
    Buffer, Builder, DType, Fault, FaultKind, Group, Joined, Next, Rank, ReduceOp, State, StateTensor, StateTensorMut,
    StepResults, Tensor, TensorSpec, Trainer,
};

/// The name of the one tensor that is exchanged.
const SUMS: &str = "sums";
/// Weights of the model: one for each feature, and what is added to all.
const WEIGHTS: usize = 16 + 1;
/// In the tensor behind the gradient: how many rows it is of, and their squared errors. So a step has the right mean
/// whoever contributed to it, and however much.
const ROWS: usize = WEIGHTS;
const ERROR: usize = WEIGHTS + 1;
/// Rows of the data, and how many of them make a step, of all ranks together.
const DATA_ROWS: u64 = 10_000;
const BATCH_ROWS: u64 = 240;
const LEARNING_RATE: f32 = 0.02;
const MOMENTUM: f32 = 0.9;
const SAVE_EVERY: u64 = 100;
const SAY_EVERY: u64 = 50;

fn main() -> ExitCode {
    // What gradwire has to say beside faults: links that are lost, a broker that cannot be reached, and so on. The library
    // that it speaks to brokers with warns of what is in order.
    let filter = tracing_subscriber::EnvFilter::new("warn,pulsar=off");
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr).init();
    let Some(options) = Options::parse() else {
        eprintln!("usage: elastic [SAVES [STEPS [PAUSE_MS]]]");
        // With this code the launcher does not try again.
        return ExitCode::from(2);
    };
    match train(&options) {
        // 0 is an end, for one that leaves too: nobody is started in its place.
        Ok(()) => ExitCode::SUCCESS,
        // Everything else is a loss: the launcher starts the rank again, where that can help.
        Err(fault) => {
            eprintln!("{fault}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    saves: PathBuf,
    steps: u64,
    pause: Duration,
}

impl Options {
    fn parse() -> Option<Self> {
        let mut arguments = std::env::args().skip(1);
        let saves = arguments.next().unwrap_or_else(|| "elastic-saves".to_owned()).into();
        let mut number = |default: u64| arguments.next().map_or(Some(default), |text| text.parse().ok());
        Some(Self { saves, steps: number(600)?, pause: Duration::from_millis(number(10)?) })
    }
}

/// What training changes: all of it is in [`State`], for whoever joins and for saves.
struct Model {
    weights: Vec<f32>,
    momentum: Vec<f32>,
}

impl Model {
    /// The same on every rank.
    fn new() -> Self {
        Self { weights: vec![0.0; WEIGHTS], momentum: vec![0.0; WEIGHTS] }
    }

    /// What these rows make of the gradient. The model stays as it is: it changes when the step is final.
    fn contribute(&self, rows: impl Iterator<Item = u64>, sums: &mut [f32]) {
        sums.fill(0.0);
        for row in rows {
            let (features, target) = data(row);
            let predicted: f32 = self.weights.iter().zip(&features).map(|(weight, feature)| weight * feature).sum();
            let error = predicted - target;
            for (sum, feature) in sums.iter_mut().zip(&features) {
                *sum += error * feature;
            }
            sums[ROWS] += 1.0;
            sums[ERROR] += error * error;
        }
    }

    /// Makes the step. The same bits on every rank, since the sums are. Returns the mean squared error before it.
    fn update(&mut self, sums: &[f32]) -> f32 {
        let rows = sums[ROWS].max(1.0);
        for ((weight, momentum), sum) in self.weights.iter_mut().zip(&mut self.momentum).zip(sums) {
            *momentum = MOMENTUM * *momentum + sum / rows;
            *weight -= LEARNING_RATE * *momentum;
        }
        sums[ERROR] / rows
    }

    /// Names the weights' bits.
    fn mark(&self) -> u32 {
        self.weights.iter().fold(0, |mark, weight| u32::rotate_left(mark, 5) ^ weight.to_bits())
    }
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        vec![
            StateTensor { name: "weights", bytes: bytemuck::cast_slice(&self.weights) },
            StateTensor { name: "momentum", bytes: bytemuck::cast_slice(&self.momentum) },
        ]
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        vec![
            StateTensorMut { name: "weights", bytes: bytemuck::cast_slice_mut(&mut self.weights) },
            StateTensorMut { name: "momentum", bytes: bytemuck::cast_slice_mut(&mut self.momentum) },
        ]
    }
}

impl Trainer for Model {
    /// A step that the others made while this rank was joining.
    fn apply(&mut self, results: &StepResults<'_>) -> Result<(), Fault> {
        if let Some(sums) = results.get(SUMS) {
            self.update(sums.as_slice());
        }
        Ok(())
    }
}

fn train(options: &Options) -> Result<(), Fault> {
    let mut model = Model::new();
    // Before joining, since steps count from there.
    let saved = SavedState::latest(&options.saves)?;
    let mut builder = Builder::from_env()?.stop_on_sigterm(true);
    if let Some(saved) = &saved {
        builder = builder.first_step(saved.step());
    }
    let spec = TensorSpec::new(SUMS, &[ERROR as u64 + 1], DType::F32).reduce(ReduceOp::Sum);
    let Joined { group, tensors, step, transfer } = builder.join(&[spec], &mut model)?;
    let how = match (&transfer, &saved) {
        // The job runs already: the others have given their state, which is newer than any save.
        (Some(_), _) => "got the state from the others",
        (None, Some(saved)) => {
            group.restore(saved, &mut model)?;
            "goes on from the save"
        }
        (None, None) => "begins",
    };
    println!("process {} {how} with step {}", std::process::id(), step.0);
    let (steps, ended) = train_from(step.0, options, &group, &tensors[0], &mut model)?;
    println!("{ended} after {steps} steps, weights {:08x}", model.mark());
    // What the group handed out goes before it.
    drop(tensors);
    group.close()
}

/// Returns how many steps are final, and why that is the end.
fn train_from(
    mut step: u64,
    options: &Options,
    group: &Group,
    sums: &Tensor,
    model: &mut Model,
) -> Result<(u64, &'static str), Fault> {
    while step < options.steps {
        // To whoever is joining. (A model that takes long to copy is offered beside the step: offer_state_during.)
        group.offer_state(model)?;
        std::thread::sleep(options.pause);
        let (result, next) = match make_step(step, group, sums, model) {
            Ok(made) => made,
            // A rank was lost, and what it contributed cannot be done without: those that are left begin the step anew.
            Err(fault) if fault.kind == FaultKind::StepAborted => continue,
            Err(fault) => return Err(fault),
        };
        let error = model.update(result.as_slice());
        step += 1;
        let members = group.members();
        if step.is_multiple_of(SAY_EVERY) && members.first() == Some(&group.rank()) {
            println!("step {step} by {} ranks: error {error:.4}", members.len());
        }
        // A rank that leaves has its part in this one still: the others count on it.
        if step.is_multiple_of(SAVE_EVERY) || step == options.steps || next == Next::End {
            save(&options.saves, group, model)?;
        }
        match next {
            Next::GoOn => {}
            // This rank was given notice: the others go on without it.
            Next::Leave => return Ok((step, "left")),
            // All were.
            Next::End => return Ok((step, "stopped")),
        }
    }
    Ok((step, "trained"))
}

/// Computes, exchanges and commits. The result counts from here on.
fn make_step(step: u64, group: &Group, sums: &Tensor, model: &Model) -> Result<(Buffer, Next), Fault> {
    let mut data = group.buffer(sums)?;
    model.contribute(rows(step, &group.members(), group.rank()), data.as_mut_slice());
    let mut result = group.allreduce(sums, data)?.wait()?.output;
    let mut commit = group.commit()?;
    // A rank was lost after that, and the others did it again without it: that is what counts.
    if let Some(again) = commit.replaced.pop() {
        result = again.output;
    }
    Ok((result, commit.next))
}

/// Which rows of a step are this rank's: every nth one, of as many members as there are now. Who is left does the work of
/// those that were lost, from the next step on.
fn rows(step: u64, members: &[Rank], rank: Rank) -> impl Iterator<Item = u64> {
    let place = members.iter().position(|member| *member == rank).unwrap_or_default();
    (0..BATCH_ROWS).skip(place).step_by(members.len().max(1)).map(move |row| (step * BATCH_ROWS + row) % DATA_ROWS)
}

/// Each rank its share. One that fails costs nothing but itself: the save before is whole, and the next one may succeed.
fn save(directory: &Path, group: &Group, model: &Model) -> Result<(), Fault> {
    match group.save(directory, model) {
        Ok(saved) if group.members().first() == Some(&group.rank()) => println!("saved {}", saved.path.display()),
        Ok(_) => {}
        Err(fault) if fault.kind == FaultKind::NotSaved => eprintln!("{fault}"),
        Err(fault) => return Err(fault),
    }
    Ok(())
}

/// A row: features between -1 and 1, then a 1; and what they should come to, give or take 0.1.
fn data(row: u64) -> ([f32; WEIGHTS], f32) {
    let mut features = [1.0; WEIGHTS];
    let random = |at: usize| noise(row * 64 + at as u64);
    for (at, feature) in features[..WEIGHTS - 1].iter_mut().enumerate() {
        *feature = random(at);
    }
    let target: f32 = features.iter().enumerate().map(|(at, feature)| (at as f32 * 0.7).sin() * feature).sum();
    (features, target + 0.1 * random(WEIGHTS))
}

/// Between -1 and 1, and the same for the same number (splitmix64).
fn noise(number: u64) -> f32 {
    let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ bits >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
}
