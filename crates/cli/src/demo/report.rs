//! The demo's result: as a table for people, as JSON for programs, and as a verdict.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use gradwire_proto::{Fault, FaultKind};
use serde::Serialize;

use super::Outcome;
use super::model::ELEMENTS;
use crate::args::Wire;
use crate::bench::output::{human_bytes, say};

/// The result. Its fields are those of the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    ranks: u32,
    transport: String,
    wire: &'static str,
    steps: u32,
    accuracy: f64,
    weights_sha256: String,
    reference_sha256: String,
    wire_bytes: u64,
    dense_fp32_bytes: u64,
    step_ms_p50: f64,
    step_ms_p99: f64,
    epoch: u64,
    /// Ranks whose weights are not those of rank 0.
    #[serde(skip)]
    strays: Vec<usize>,
}

impl Report {
    /// From what the ranks found, and the hash of the weights that the one-process reference ended with.
    pub(super) fn new(wire: Wire, steps: u32, outcome: Outcome, reference_sha256: String) -> Self {
        let Outcome { measured, weights_sha256: of_ranks, dense_copies } = outcome;
        let ranks = of_ranks.len() as u32;
        let weights_sha256 = of_ranks.first().cloned().unwrap_or_default();
        let strays = (0..of_ranks.len()).filter(|rank| of_ranks[*rank] != weights_sha256).collect();
        Self {
            ranks,
            transport: measured.transport,
            wire: wire.as_str(),
            steps,
            accuracy: measured.accuracy,
            weights_sha256,
            reference_sha256,
            wire_bytes: measured.wire_bytes,
            dense_fp32_bytes: dense_fp32_bytes(dense_copies, steps),
            step_ms_p50: measured.step_ms_p50,
            step_ms_p99: measured.step_ms_p99,
            epoch: measured.epoch,
            strays,
        }
    }

    /// The result as one line of JSON.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when it cannot be expressed.
    pub(super) fn json_line(&self) -> Result<String, Fault> {
        serde_json::to_string(self)
            .map_err(|error| Fault::new(FaultKind::System, format!("the result cannot be written as JSON: {error}")))
    }

    /// Prints the result to standard output.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when standard output takes no more.
    pub(super) fn print_table(&self) -> Result<(), Fault> {
        let verdict = match (self.strays.is_empty(), self.is_same_as_reference()) {
            (true, true) => "the same bits on all ranks and in one process",
            (true, false) => "the same bits on all ranks, but NOT in one process",
            (false, _) => "NOT the same bits on all ranks",
        };
        let share = match self.dense_fp32_bytes {
            0 => String::new(),
            dense => format!(" ({:.0} % of fp32 dense: {})", percent(self.wire_bytes, dense), human_bytes(dense)),
        };
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.add_row(["test accuracy", &format!("{:.2} %", self.accuracy * 100.0)]);
        table.add_row(["ranks, steps", &format!("{}, {}", self.ranks, self.steps)]);
        table.add_row(["step time", &format!("p50 {:.3} ms, p99 {:.3} ms", self.step_ms_p50, self.step_ms_p99)]);
        table.add_row(["bytes on the wire", &format!("{}{share}", human_bytes(self.wire_bytes))]);
        table.add_row(["transport, wire format", &format!("{}, {}", self.transport, self.wire)]);
        table.add_row(["epoch", &self.epoch.to_string()]);
        table.add_row(["final weights", verdict]);
        table.add_row(["SHA-256", &self.weights_sha256]);
        say(&format!("{table}\n"))
    }

    /// What is wrong with the result; empty when all is well.
    pub(super) fn problems(&self, accuracy_min: f64) -> Vec<String> {
        let mut problems = Vec::new();
        if !self.strays.is_empty() {
            let strays = self.strays.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            problems
                .push(format!("ranks ended with different weights: those of rank {strays} are not those of rank 0"));
        }
        if !self.is_same_as_reference() {
            let (ranks, reference) = (&self.weights_sha256, &self.reference_sha256);
            problems.push(format!("final weights {ranks} are not those of the one-process reference, {reference}"));
        }
        if self.accuracy.is_nan() || self.accuracy < accuracy_min {
            let (found, least) = (self.accuracy * 100.0, accuracy_min * 100.0);
            problems.push(format!("test accuracy {found:.2} % is below {least:.0} %: train longer (--steps)"));
        }
        problems
    }

    fn is_same_as_reference(&self) -> bool {
        self.weights_sha256 == self.reference_sha256
    }
}

/// Bytes that ranks send for the gradients of `steps` steps in fp32 without headers, so many times in each.
fn dense_fp32_bytes(copies: u64, steps: u32) -> u64 {
    copies * ELEMENTS as u64 * size_of::<f32>() as u64 * u64::from(steps)
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::super::rank::Measured;
    use super::*;

    fn report(hashes: &[&str], reference: &str, accuracy: f64) -> Report {
        let measured = Measured {
            transport: "shm".to_owned(),
            epoch: 1,
            accuracy,
            wire_bytes: 10,
            step_ms_p50: 0.5,
            step_ms_p99: 1.5,
        };
        let weights_sha256 = hashes.iter().map(|hash| (*hash).to_owned()).collect();
        Report::new(Wire::Fp32, 3, Outcome { measured, weights_sha256, dense_copies: 2 }, reference.to_owned())
    }

    #[test]
    fn every_problem_is_found_and_named() {
        assert!(report(&["a", "a"], "a", 0.97).problems(0.9).is_empty());
        let found = |report: Report| report.problems(0.9).join("; ");
        assert!(found(report(&["a", "a", "b", "c"], "a", 0.97)).contains("those of rank 2, 3 are not"));
        assert!(found(report(&["a", "a"], "b", 0.97)).contains("one-process reference, b"));
        assert!(found(report(&["a"], "a", 0.5)).contains("50.00 % is below 90 %"));
        assert!(found(report(&["a"], "a", f64::NAN)).contains("below"));
    }

    #[test]
    fn json_has_the_fields_that_were_promised() {
        let line = report(&["a", "a", "b"], "a", 0.97).json_line().expect("serialize");
        let value: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&line).expect("parse");
        let mut fields: Vec<&str> = value.keys().map(String::as_str).collect();
        let mut promised: Vec<&str> = "ranks transport wire steps accuracy weights_sha256 reference_sha256 wire_bytes \
            dense_fp32_bytes step_ms_p50 step_ms_p99 epoch"
            .split_whitespace()
            .collect();
        fields.sort_unstable();
        promised.sort_unstable();
        assert_eq!(fields, promised);
        assert_eq!((value["ranks"].as_u64(), value["steps"].as_u64()), (Some(3), Some(3)));
    }

    #[test]
    fn dense_bytes_count_every_copy() {
        let elements = 64 * 128 + 128 + 128 * 10 + 10;
        assert_eq!(dense_fp32_bytes(0, 100), 0);
        assert_eq!(dense_fp32_bytes(6, 10), 2 * 3 * elements * 4 * 10);
    }
}
