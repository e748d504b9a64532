//! One rank of a benchmark.

use std::time::Instant;

use clap::Args;
use gradwire::{Buffer, Builder, DType, Fault, Group, Rank, ReduceOp, Tensor, TensorSpec, WireFormat};
use serde::{Deserialize, Serialize};

use super::pattern::{self, Expected};
use super::sizes::TensorBytes;
use super::{ranks, timing};
use crate::args::{Transport, Wire};

/// Most iterations of one size: the times of all are kept until its end.
pub(super) const ITERATIONS_MAX: i64 = 1_000_000;
/// Bytes that the measured iterations of one size reduce in all, by default.
const BYTES_DEFAULT: u64 = 1 << 30;

/// What the parent asks of a rank. Who and where the rank is, the environment says.
#[derive(Debug, Args)]
pub(crate) struct BenchRankArgs {
    #[arg(long, value_delimiter = ',', required = true)]
    bytes: Vec<TensorBytes>,
    #[arg(long, value_enum)]
    transport: Transport,
    #[arg(long, value_enum)]
    wire: Wire,
    #[arg(long)]
    iters: Option<u32>,
    #[arg(long)]
    warmup: Option<u32>,
    #[arg(long)]
    in_place: bool,
    #[arg(long)]
    commit: bool,
}

/// What a rank tells the parent when a size is done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Event {
    /// Which of the sizes.
    pub(super) size_index: usize,
    /// The first wrong result of this rank, if any was.
    pub(super) wrong: Option<String>,
    /// From rank 0: the slowest rank's times.
    pub(super) timing: Option<Timing>,
}

/// Times of one size's iterations, each that of the slowest rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Timing {
    pub(super) transport: String,
    pub(super) iters: usize,
    pub(super) ms_min: f64,
    pub(super) ms_p50: f64,
    pub(super) ms_p99: f64,
}

/// Joins the job, measures all sizes, reports each, and leaves.
///
/// # Errors
/// Any [`Fault`] of gradwire.
pub(super) fn run(args: &BenchRankArgs) -> Result<(), Fault> {
    let group = Builder::from_env()?.transport(args.transport.into()).wire(args.wire.into()).connect()?;
    for (size_index, size) in args.bytes.iter().enumerate() {
        let measured = args.iters.unwrap_or_else(|| iterations(*size));
        let warmup = args.warmup.unwrap_or_else(|| measured.div_ceil(10));
        let mut bench = Bench::new(&group, size_index, *size, measured, args)?;
        let mut times_ns = bench.run(warmup, measured)?;
        group.allreduce_slice(&bench.times, &mut times_ns)?;
        times_ns.sort_unstable();
        let timing = (group.rank() == Rank(0)).then(|| Timing {
            transport: group.transport().to_owned(),
            iters: times_ns.len(),
            ms_min: timing::percentile_ms(&times_ns, 0),
            ms_p50: timing::percentile_ms(&times_ns, 50),
            ms_p99: timing::percentile_ms(&times_ns, 99),
        });
        ranks::emit(&Event { size_index, wrong: bench.wrong, timing })?;
    }
    group.close()
}

/// One size being measured.
struct Bench<'a> {
    group: &'a Group,
    tensor: Tensor,
    /// By which ranks find the slowest one's time of each iteration.
    times: Tensor,
    expected: Expected,
    in_place: bool,
    commit: bool,
    /// Those of the iteration before, unless gradwire still has them.
    buffers: [Option<Buffer>; 2],
    wrong: Option<String>,
}

impl<'a> Bench<'a> {
    fn new(
        group: &'a Group,
        size_index: usize,
        size: TensorBytes,
        iterations: u32,
        args: &BenchRankArgs,
    ) -> Result<Self, Fault> {
        let times = TensorSpec::new(format!("bench.{size_index}.ns"), &[u64::from(iterations)], DType::I64);
        let specs = [
            TensorSpec::new(format!("bench.{size_index}"), &[size.elements()], DType::F32).reduce(ReduceOp::Sum),
            times.reduce(ReduceOp::Max),
        ];
        let [tensor, times] = ranks::exactly(group.declare(&specs)?)?;
        let expected = Expected::new(size, group.world_size(), WireFormat::from(args.wire))?;
        let (in_place, commit, buffers) = (args.in_place, args.commit, [None, None]);
        Ok(Self { group, tensor, times, expected, in_place, commit, buffers, wrong: None })
    }

    /// This rank's times of the measured iterations.
    fn run(&mut self, warmup: u32, measured: u32) -> Result<Vec<i64>, Fault> {
        let mut times_ns = Vec::with_capacity(measured as usize);
        for round in 1..=u64::from(warmup) + u64::from(measured) {
            let ns = self.iterate(round)?;
            if round > u64::from(warmup) {
                times_ns.push(ns);
            }
        }
        Ok(times_ns)
    }

    /// One iteration. Only the operation itself is timed, and the commit where there is one: neither the barrier before
    /// it, nor making its input, nor checking its result.
    fn iterate(&mut self, round: u64) -> Result<i64, Fault> {
        let rank = self.group.rank().0;
        let [input, output] = std::mem::take(&mut self.buffers);
        let is_new = input.is_none();
        let mut input = input.map_or_else(|| self.group.buffer(&self.tensor), Ok)?;
        if self.in_place || is_new {
            pattern::fill(input.as_mut_slice(), rank, round);
        } else {
            pattern::stamp(input.as_mut_slice(), rank, round);
        }
        let mut apart =
            (!self.in_place).then(|| output.map_or_else(|| self.group.buffer(&self.tensor), Ok)).transpose()?;
        if let Some(output) = &mut apart {
            // So that an element that is not written is found: all ones are a NaN that no sum gives.
            output.bytes_mut().fill(0xff);
        }
        self.expected.stamp(round)?;
        self.group.barrier()?;
        let start = Instant::now();
        let handle = match apart {
            None => self.group.allreduce(&self.tensor, input),
            Some(output) => self.group.allreduce_into(&self.tensor, input, output),
        };
        let completed = handle.map_err(|error| error.fault)?.wait().map_err(|error| error.fault)?;
        if self.commit {
            let commit = self.group.commit()?;
            debug_assert!(commit.replaced.is_empty(), "no rank is lost here");
        }
        let ns = timing::elapsed_ns(start);
        self.check(round, completed.output.bytes());
        self.buffers = match completed.input {
            Some(input) => [Some(input), Some(completed.output)],
            None if self.in_place => [Some(completed.output), None],
            // Kept until the commit, to be reduced again if a rank is lost.
            None => [None, Some(completed.output)],
        };
        Ok(ns)
    }

    /// Keeps the first result that is wrong.
    fn check(&mut self, round: u64, found: &[u8]) {
        if self.wrong.is_some() {
            return;
        }
        self.wrong = self.expected.mismatch(found).map(|mismatch| {
            let (rank, index) = (self.group.rank(), mismatch.index);
            let (found, expected) = (mismatch.found, mismatch.expected);
            let bits = format!("{:#010x} instead of {:#010x}", found.to_bits(), expected.to_bits());
            format!("{rank}, iteration {round}: element {index} is {found}, not {expected} (bits {bits})")
        });
    }
}

/// How often a size is measured where nothing is said.
fn iterations(size: TensorBytes) -> u32 {
    (BYTES_DEFAULT / size.bytes()).clamp(10, 1000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_sizes_are_measured_often_and_large_ones_at_least_ten_times() {
        let of = |text: &str| iterations(text.parse().expect("size"));
        assert_eq!(["4", "1MiB", "16MiB", "64MiB", "8GiB"].map(of), [1000, 1000, 64, 16, 10]);
    }
}
