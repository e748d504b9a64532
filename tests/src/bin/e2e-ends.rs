//! A trainer that ends as it is told: with the step that its commits name, and with a save where all ranks end.
//!
//! `e2e-ends STEPS PAUSE_MS [RANK:STEP:DEED]...`, with a pause before each step. Deeds: `stop` and `leave` ask for that;
//! `outlast-N` asks for a stop after N steps
//! in which others were gone; `deaf` goes on from then on, whatever commits say; `compute-MS` computes for so long in the middle of the step; `panic`
//! panics there, and `panic-thread` does so in a thread, with a process that goes on for a while. `E2E_SAVES` is the
//! directory for the save; with `E2E_UNASKED` SIGTERM is not taken as notice.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use gradwire::{
    Buffer, Builder, DType, Fault, FaultKind, Group, Next, Rank, State, StateTensor, StateTensorMut, Tensor, TensorSpec,
};

/// Owned by one rank, by some, and by all.
const SIZES: [u64; 3] = [10, 5000, 70_000];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments[at].parse().expect("a number");
    let deeds: Vec<Deed> = arguments[2..].iter().map(|text| Deed::parse(text)).collect();
    let (steps, pause) = (number(0), Duration::from_millis(number(1)));
    let in_thread = deeds.iter().any(|deed| deed.what == "panic-thread");
    let train = move || train(steps, pause, &deeds);
    let said = if in_thread {
        std::thread::spawn(train).join().unwrap_or_else(|_| {
            println!("goes on");
            std::thread::sleep(Duration::from_secs(3));
            Ok("without its trainer".into())
        })
    } else {
        train()
    };
    match said {
        Ok(said) => println!("ok {said}"),
        Err(fault) => {
            let rank = fault.rank.map_or("-".to_owned(), |rank| rank.0.to_string());
            println!("fault {:?} rank={rank}: {fault}", fault.kind);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// What one rank does in one step.
struct Deed {
    rank: Rank,
    step: u64,
    what: String,
}

impl Deed {
    fn parse(text: &str) -> Self {
        let mut words = text.split(':');
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        let (rank, step) = (Rank(number() as u32), number());
        Self { rank, step, what: words.next().expect("a deed").to_owned() }
    }
}

struct Model {
    weights: Vec<u8>,
}

impl State for Model {
    fn parts(&self) -> Vec<StateTensor<'_>> {
        vec![StateTensor { name: "weights", bytes: &self.weights }]
    }

    fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
        vec![StateTensorMut { name: "weights", bytes: &mut self.weights }]
    }
}

impl Model {
    fn update(&mut self, results: &[Buffer]) {
        let bytes = results.iter().flat_map(|result| result.bytes());
        for (weight, byte) in self.weights.iter_mut().zip(bytes) {
            *weight = weight.wrapping_mul(31).wrapping_add(*byte);
        }
    }

    fn digest(&self) -> String {
        format!("{:08x}", gradwire_codec::crc32(&self.weights))
    }
}

fn train(steps: u64, pause: Duration, deeds: &[Deed]) -> Result<String, Fault> {
    let notice = std::env::var_os("E2E_UNASKED").is_none();
    let group = Builder::from_env()?.stop_on_sigterm(notice).connect()?;
    let tensors = group.declare(&SIZES.map(|size| TensorSpec::new(format!("t{size}"), &[size], DType::F32)))?;
    let mut model = Model { weights: vec![1; 2_000_000] };
    println!("pid {}", std::process::id());
    let (mut step, mut deaf, mut outlasts, mut outlasted) = (0, false, None, 0);
    while step < steps {
        std::thread::sleep(pause);
        let mine = || deeds.iter().filter(|deed| deed.rank == group.rank() && deed.step == step);
        for deed in mine() {
            match deed.what.as_str() {
                "stop" => group.request_stop()?,
                "leave" => group.request_leave()?,
                "deaf" => deaf = true,
                what => outlasts = outlasts.or_else(|| what.strip_prefix("outlast-")?.parse::<usize>().ok()),
            }
        }
        let middle = mine()
            .map(|deed| deed.what.as_str())
            .find(|what| what.starts_with("compute-") || what.starts_with("panic"));
        let next = match train_step(&group, &tensors, &mut model, step, middle) {
            Ok(next) => next,
            Err(fault) if fault.kind == FaultKind::StepAborted => continue,
            Err(fault) => return Err(fault),
        };
        step += 1;
        outlasted += usize::from(group.members().len() < group.world_size() as usize);
        if outlasts == Some(outlasted) {
            group.request_stop()?;
        }
        if next != Next::GoOn && !deaf {
            return end(group, tensors, &model, step, next);
        }
    }
    drop(tensors);
    group.close()?;
    Ok(format!("{steps} steps {}", model.digest()))
}

fn end(group: Group, tensors: Vec<Tensor>, model: &Model, steps: u64, next: Next) -> Result<String, Fault> {
    if let Some(saves) = std::env::var_os("E2E_SAVES").filter(|_| next == Next::End) {
        group.save(std::path::Path::new(&saves), model)?;
    }
    drop(tensors);
    let since = Instant::now();
    group.close()?;
    println!("closed in {} ms", since.elapsed().as_millis());
    Ok(format!("{} after {steps} steps {}", if next == Next::End { "ended" } else { "left" }, model.digest()))
}

fn train_step(
    group: &Group,
    tensors: &[Tensor],
    model: &mut Model,
    step: u64,
    middle: Option<&str>,
) -> Result<Next, Fault> {
    let mut handles = Vec::new();
    for (nth, tensor) in tensors.iter().enumerate() {
        if let Some(deed) = middle.filter(|_| nth == 1) {
            act(deed);
        }
        let mut data = group.buffer(tensor)?;
        for (at, value) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *value = contribution(group.rank(), step, at);
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
    for result in &results {
        for (at, value) in result.as_slice::<f32>().iter().enumerate() {
            let expected: f32 = commit.contributors.iter().map(|rank| contribution(*rank, step, at)).sum();
            assert_eq!(*value, expected, "step {step}, element {at} of {}", result.len() / 4);
        }
    }
    model.update(&results);
    let contributors: Vec<String> = commit.contributors.iter().map(|rank| rank.0.to_string()).collect();
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    println!("step {step} by {} is {} at {now}", contributors.join(","), model.digest());
    Ok(commit.next)
}

fn act(deed: &str) {
    if let Some(ms) = deed.strip_prefix("compute-") {
        let until = Instant::now() + Duration::from_millis(ms.parse().expect("milliseconds"));
        while Instant::now() < until {
            std::hint::black_box((0..1000).sum::<u64>());
        }
    } else {
        panic!("as it was told to");
    }
}

/// Whole numbers: sums are exact in any order.
fn contribution(rank: Rank, step: u64, at: usize) -> f32 {
    ((u64::from(rank.0) * 31 + step * 7 + at as u64) % 97) as f32
}
