//! Measures rounds of the federated mode: many contributors against some aggregators, for growing models.
//!
//! ```sh
//! cargo run --release -p gradwire-control --example federated -- --contributors 50 --aggregators 4 16384 65536
//! ```
//!
//! The numbers are elements of the model; all contributors and aggregators are threads of this process, which talk over
//! sockets to the broker: an embedded one, or the one that `--broker URL` names. Prints the median time of a round, from
//! when the first contributor begins until the last one has the result, and checks every result's bits.

use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use gradwire_control::broker::TopicPolicy;
use gradwire_control::federated::{Aggregator, AggregatorConfig, Contributor, ContributorConfig};
use gradwire_control::{BrokerAccess, BrokerConfig, EmbeddedBroker, JobConfig};
use gradwire_proto::{DType, Fault, FaultKind, Rank, ReduceOp, Secret, WireFormat};

const PATIENCE: Duration = Duration::from_secs(600);

struct Options {
    contributors: u32,
    aggregators: u32,
    rounds: u64,
    wire: WireFormat,
    broker: Option<String>,
    sizes: Vec<u64>,
}

fn main() -> ExitCode {
    match options().and_then(|options| measure(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("{fault}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options, Fault> {
    let invalid = |what: &str| Fault::new(FaultKind::InvalidArgument, format!("{what}: see the head of this file"));
    let mut options = Options {
        contributors: 50,
        aggregators: 4,
        rounds: 5,
        wire: WireFormat::Fp32,
        broker: None,
        sizes: Vec::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| invalid("a value is missing"));
        let number = |text: String| text.parse::<u32>().map_err(|_| invalid("not a number"));
        match argument.as_str() {
            "--contributors" => options.contributors = number(value()?)?,
            "--aggregators" => options.aggregators = number(value()?)?,
            "--rounds" => options.rounds = number(value()?)?.into(),
            "--wire" => options.wire = value()?.parse().map_err(|_| invalid("not a wire format"))?,
            "--broker" => options.broker = Some(value()?),
            size => options.sizes.push(size.parse().map_err(|_| invalid("not a number of elements"))?),
        }
    }
    if options.sizes.is_empty() {
        options.sizes = [14, 16, 18, 20].map(|shift| 1 << shift).to_vec();
    }
    Ok(options)
}

fn measure(options: &Options) -> Result<(), Fault> {
    let (_embedded, url) = match &options.broker {
        Some(url) => (None, url.clone()),
        None => {
            let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
            (config.topic_bytes_max, config.total_bytes_max) = (4 << 30, 6 << 30);
            config.policies.push(TopicPolicy {
                retention_bytes: Some(256 << 20),
                drop_oldest: true,
                ..TopicPolicy::for_suffix("-results")
            });
            let broker = EmbeddedBroker::start(config)?;
            let url = broker.url().to_owned();
            (Some(broker), url)
        }
    };
    let Options { contributors, aggregators, wire, .. } = options;
    println!("{contributors} contributors, {aggregators} aggregators, {wire}, {} rounds", options.rounds);
    println!("   elements   model KiB   ms a round (median, min, max)   ns a byte of all contributions");
    for elements in &options.sizes {
        let mut times = run(options, &url, *elements)?;
        times.sort_unstable();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (median, first, last) = (times[times.len() / 2], times[0], times[times.len() - 1]);
        let bytes = elements * wire.wire_dtype(DType::F32).size() as u64;
        let of_all = (bytes * u64::from(*contributors)) as f64;
        println!(
            "{elements:11} {:11} {:12.1} {:9.1} {:9.1} {:20.2}",
            bytes >> 10,
            ms(median),
            ms(first),
            ms(last),
            median.as_secs_f64() * 1e9 / of_all
        );
    }
    Ok(())
}

/// The time of each round but the first.
fn run(options: &Options, url: &str, elements: u64) -> Result<Vec<Duration>, Fault> {
    let unique = format!("bench-{}-{elements}", std::process::id());
    let job = JobConfig::new(unique.parse()?, [7; 16], Secret::from_bytes([7; 32]), BrokerAccess::new(url));
    let aggregators: Vec<Aggregator> = (0..options.aggregators)
        .map(|_| Aggregator::start(AggregatorConfig::new(job.clone())))
        .collect::<Result<_, _>>()?;
    let barrier = Arc::new(Barrier::new(options.contributors as usize));
    let expected = Arc::new(reference(options, elements)?);
    let threads: Vec<_> = (0..options.contributors)
        .map(|number| {
            let (barrier, expected) = (barrier.clone(), expected.clone());
            let config = ContributorConfig {
                wire: options.wire,
                deadline: PATIENCE,
                ..ContributorConfig::new(job.clone(), Rank(number), options.contributors, elements)
            };
            let rounds = options.rounds;
            std::thread::spawn(move || contribute(config, rounds, &barrier, &expected))
        })
        .collect();
    let mut times = Vec::new();
    for (thread, number) in threads.into_iter().zip(0..) {
        let of_one = thread.join().map_err(|_| Fault::new(FaultKind::System, "a contributor panicked"))??;
        if number == 0 {
            times = of_one;
        }
    }
    aggregators.into_iter().try_for_each(Aggregator::stop)?;
    Ok(times)
}

fn contribute(
    config: ContributorConfig,
    rounds: u64,
    barrier: &Barrier,
    expected: &[f32],
) -> Result<Vec<Duration>, Fault> {
    let own = values(config.contributor.0, config.elements);
    let mut contributor = Contributor::join(config)?;
    let mut times = Vec::new();
    for round in 1..=rounds + 1 {
        barrier.wait();
        let started = Instant::now();
        let result = contributor.exchange(round, &own, PATIENCE)?;
        barrier.wait();
        if round > 1 {
            times.push(started.elapsed());
        }
        if result.values != expected {
            return Err(Fault::new(FaultKind::IntegrityExhausted, format!("round {round} has wrong bits")));
        }
    }
    Ok(times)
}

fn values(contributor: u32, elements: u64) -> Vec<f32> {
    (0..elements).map(|index| ((index * 37 + u64::from(contributor) * 11) % 1013) as f32 / 97.0 - 5.0).collect()
}

fn reference(options: &Options, elements: u64) -> Result<Vec<f32>, Fault> {
    let inputs: Vec<Vec<u8>> = (0..options.contributors)
        .map(|number| values(number, elements).into_iter().flat_map(f32::to_le_bytes).collect())
        .collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let wire = options.wire.wire_dtype(DType::F32);
    let bytes = gradwire_codec::reference(DType::F32, wire, ReduceOp::Mean, &inputs)?;
    let (values, _) = bytes.as_chunks::<4>();
    Ok(values.iter().map(|value| f32::from_le_bytes(*value)).collect())
}
