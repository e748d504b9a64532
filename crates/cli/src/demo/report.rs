//! The demo's result: as a table for people, as JSON for programs, and as a verdict.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use gradwire_proto::{Fault, FaultKind};
use serde::Serialize;

use super::event::Measured;
use super::history::{History, Run};
use super::model::ELEMENTS;
use super::story::{Happening, Kind, Story, list};
use crate::args::Wire;
use crate::bench::output::{human_bytes, say};

/// The result. Its fields are those of the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// At the beginning.
    ranks: u32,
    transport: String,
    wire: &'static str,
    steps: u32,
    accuracy: f64,
    /// Of the lowest rank that is left.
    weights_sha256: String,
    reference_sha256: String,
    wire_bytes: u64,
    dense_fp32_bytes: u64,
    step_ms_p50: f64,
    step_ms_p99: f64,
    epoch: u64,
    /// What happened to ranks, in the order in which it was heard of.
    events: Vec<Happening>,
    /// Whose contributions are in the steps from one on.
    contributors: Vec<Run>,
    /// The fewest ranks whose contributions are in a step.
    contributors_min: usize,
    /// Steps in which a rank was lost, and that the others did again without it.
    steps_redone: usize,
    /// Steps in which a rank was lost, and that stand with its contributions.
    steps_kept: usize,
    /// From a kill to the end of its step on the slowest of the others; null without one.
    recovery_ms_max: Option<f64>,
    /// What ranks have that others, or one process, do not have.
    #[serde(skip)]
    differences: Vec<String>,
    /// Processes that were to join, and did not.
    #[serde(skip)]
    absences: Vec<String>,
}

/// What a report is made of.
pub(super) struct Found<'a> {
    pub(super) ranks: u32,
    pub(super) steps: u32,
    pub(super) wire: Wire,
    pub(super) measured: Measured,
    pub(super) weights_sha256: String,
    pub(super) reference_sha256: String,
    pub(super) history: &'a History,
    pub(super) story: &'a Story,
    /// How many times the gradients would travel in a step without savings, by its number of contributors.
    pub(super) dense_copies: fn(u64) -> u64,
    pub(super) differences: Vec<String>,
    pub(super) absences: Vec<String>,
}

impl Report {
    pub(super) fn new(found: Found<'_>) -> Self {
        let Found { ranks, steps, wire, measured, history, story, dense_copies, .. } = found;
        let copies = (1..=steps).map(|step| dense_copies(history.at(step).len() as u64)).sum();
        Self {
            ranks,
            transport: measured.transport,
            wire: wire.as_str(),
            steps,
            accuracy: measured.accuracy,
            weights_sha256: found.weights_sha256,
            reference_sha256: found.reference_sha256,
            wire_bytes: measured.wire_bytes,
            dense_fp32_bytes: dense_fp32_bytes(copies),
            step_ms_p50: measured.step_ms_p50,
            step_ms_p99: measured.step_ms_p99,
            epoch: measured.epoch,
            events: story.happenings.clone(),
            contributors: history.runs().to_vec(),
            contributors_min: history.contributors_min(),
            steps_redone: story.count(Kind::Redone),
            steps_kept: story.count(Kind::Kept),
            recovery_ms_max: story.recovery_ms_max(),
            differences: found.differences,
            absences: found.absences,
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
        let verdict = match self.join_rows() {
            _ if !self.differences.is_empty() => format!("NOT the same bits: {}", self.differences.join("; ")),
            Some(_) => "the same bits on all ranks, those that joined too, and in one process".to_owned(),
            None if self.has_losses() => "the same bits on all other ranks and in one process".to_owned(),
            None => "the same bits on all ranks and in one process".to_owned(),
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
        for (what, value) in self.loss_rows().into_iter().chain(self.join_rows()).chain(self.contributors_row()) {
            table.add_row([what, &value]);
        }
        table.add_row(["final weights", &verdict]);
        table.add_row(["SHA-256", &self.weights_sha256]);
        say(&format!("{table}\n"))
    }

    /// What became of lost ranks and their steps; nothing where there are none.
    fn loss_rows(&self) -> Vec<(&'static str, String)> {
        if !self.has_losses() {
            return Vec::new();
        }
        let lost = self.events.iter().filter(|event| event.kind == Kind::Lost);
        let lost = lost.filter_map(|event| Some(format!("{} in step {}", event.rank?, event.step)));
        let steps = format!("{} done again, {} stood", self.steps_redone, self.steps_kept);
        let mut rows = vec![("lost ranks", lost.collect::<Vec<_>>().join(", ")), ("steps with a loss", steps)];
        if let Some(ms) = self.recovery_ms_max {
            rows.push(("from kill to end of step", format!("{ms:.1} ms at most")));
        }
        rows
    }

    /// Which ranks joined, and what it took; nothing where none did.
    fn join_rows(&self) -> Option<(&'static str, String)> {
        let joined = self.events.iter().filter(|event| event.kind == Kind::Joined);
        let lines = joined.filter_map(|event| {
            let (state, took_ms) = (human_bytes(event.bytes?), event.took_ms?);
            Some(format!("{} in step {}: {state} of state, {took_ms:.1} ms", event.rank?, event.step))
        });
        let lines: Vec<String> = lines.collect();
        (!lines.is_empty()).then(|| ("joined ranks", lines.join("\n")))
    }

    /// Who contributed to which steps; nothing where it was all of them in all.
    fn contributors_row(&self) -> Option<(&'static str, String)> {
        let ends = self.contributors.iter().skip(1).map(|next| next.from - 1).chain([self.steps]);
        let lines = self.contributors.iter().zip(ends).map(|(run, end)| {
            let steps = if run.from == end { format!("step {end}") } else { format!("steps {} to {end}", run.from) };
            format!("{} in {steps}", list(&run.ranks))
        });
        (self.contributors.len() > 1).then(|| ("contributors", lines.collect::<Vec<_>>().join("\n")))
    }

    fn has_losses(&self) -> bool {
        self.events.iter().any(|event| event.kind == Kind::Lost)
    }

    /// What is wrong with the result; empty when all is well.
    pub(super) fn problems(&self, accuracy_min: f64) -> Vec<String> {
        let mut problems = [&self.differences[..], &self.absences].concat();
        if self.accuracy.is_nan() || self.accuracy < accuracy_min {
            let (found, least) = (self.accuracy * 100.0, accuracy_min * 100.0);
            problems.push(format!("test accuracy {found:.2} % is below {least:.0} %: train longer (--steps)"));
        }
        problems
    }
}

/// Bytes of so many copies of all gradients in fp32, without headers.
fn dense_fp32_bytes(copies: u64) -> u64 {
    copies * ELEMENTS as u64 * size_of::<f32>() as u64
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::super::event::{Event, Joined, Moment, StepEnd};
    use super::*;

    fn report(story: &Story, history: &History, differences: &[&str], accuracy: f64) -> Report {
        let measured = Measured {
            transport: "shm".to_owned(),
            epoch: 1,
            accuracy,
            wire_bytes: 10,
            step_ms_p50: 0.5,
            step_ms_p99: 1.5,
        };
        Report::new(Found {
            ranks: 3,
            steps: 10,
            wire: Wire::Fp32,
            measured,
            weights_sha256: "a".to_owned(),
            reference_sha256: "a".to_owned(),
            history,
            story,
            dense_copies: |ranks| 2 * (ranks - 1),
            differences: differences.iter().map(|difference| (*difference).to_owned()).collect(),
            absences: Vec::new(),
        })
    }

    #[test]
    fn every_problem_is_found_and_named() {
        let (story, history) = (Story::new(3), History::constant(3));
        let found =
            |differences: &[&str], accuracy| report(&story, &history, differences, accuracy).problems(0.9).join("; ");
        assert_eq!(found(&[], 0.97), "");
        assert_eq!(found(&["from step 4 on"], 0.97), "from step 4 on");
        assert!(found(&[], 0.5).contains("50.00 % is below 90 %"));
        assert!(found(&["x"], f64::NAN).contains("below"));
    }

    #[test]
    fn json_has_the_fields_that_were_promised() {
        let mut story = Story::new(3);
        let mut history = History::constant(3);
        let line = report(&story, &history, &[], 0.97).json_line().expect("serialize");
        let value: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&line).expect("parse");
        let mut fields: Vec<&str> = value.keys().map(String::as_str).collect();
        let mut promised: Vec<&str> = "ranks transport wire steps accuracy weights_sha256 reference_sha256 wire_bytes \
            dense_fp32_bytes step_ms_p50 step_ms_p99 epoch events contributors contributors_min steps_redone \
            steps_kept recovery_ms_max"
            .split_whitespace()
            .collect();
        fields.sort_unstable();
        promised.sort_unstable();
        assert_eq!(fields, promised);
        assert_eq!((value["ranks"].as_u64(), value["steps"].as_u64()), (Some(3), Some(10)));
        assert_eq!((value["events"].as_array().map(Vec::len), value["recovery_ms_max"].is_null()), (Some(0), true));

        story.take(0, Event::Began { at: Moment::at_ms(1) });
        story.take(1, Event::Killed { step: 5, at: Moment::at_ms(3) });
        let (contributors, members) = (vec![0, 2], vec![0, 2]);
        let end = StepEnd { step: 5, at: Moment::at_ms(7), contributors, members, epoch: 2, replaced: 0 };
        story.take(0, Event::Step(end));
        history.push(5, &[0, 2]);
        let report = report(&story, &history, &[], 0.97);
        let value: serde_json::Value = serde_json::from_str(&report.json_line().expect("serialize")).expect("parse");
        assert_eq!(value["events"][0], serde_json::json!({"kind": "killed", "rank": 1, "step": 5, "ms": 2.0}));
        assert_eq!(value["events"][2]["epoch"], 2);
        assert_eq!((&value["contributors_min"], &value["steps_redone"]), (&2.into(), &1.into()));
        assert_eq!((&value["steps_kept"], &value["recovery_ms_max"]), (&0.into(), &4.0.into()));
        assert_eq!(report.loss_rows()[0].1, "1 in step 5");
        assert_eq!(value["contributors"][1], serde_json::json!({"from": 5, "ranks": [0, 2]}));
        let row = report.contributors_row().expect("they changed").1;
        assert_eq!(row, "0, 1, 2 in steps 1 to 4\n0, 2 in steps 5 to 10");
    }

    #[test]
    fn ranks_that_joined_are_listed_with_what_it_took() {
        let (mut story, mut history) = (Story::new(3), History::constant(3));
        assert_eq!(report(&story, &history, &[], 1.0).join_rows(), None);
        story.take(0, Event::Began { at: Moment::at_ms(1) });
        story.started(4, Moment::at_ms(5));
        let joined = Joined { step: 10, at: Moment::at_ms(9), took_us: 2500, bytes: 1024, members: 3, back: false };
        story.take(3, Event::Joined(joined));
        history.push(10, &[0, 1, 2, 3]);
        let report = report(&story, &history, &[], 1.0);
        let expected = ("joined ranks", "3 in step 10: 1.0 KiB of state, 2.5 ms".to_owned());
        assert_eq!(report.join_rows(), Some(expected));
        assert!(report.contributors_row().expect("they changed").1.ends_with("0, 1, 2, 3 in step 10"));
        let value: serde_json::Value = serde_json::from_str(&report.json_line().expect("serialize")).expect("parse");
        assert_eq!(value["events"][0], serde_json::json!({"kind": "started", "rank": null, "step": 4, "ms": 4.0}));
        let joined = serde_json::json!(
            {"kind": "joined", "rank": 3, "step": 10, "ms": 8.0, "took_ms": 2.5, "bytes": 1024}
        );
        assert_eq!(value["events"][1], joined);
    }

    #[test]
    fn dense_bytes_count_every_copy_of_those_that_contributed() {
        let elements = 64 * 128 + 128 + 128 * 10 + 10;
        assert_eq!(dense_fp32_bytes(6), 6 * elements * 4);
        let mut history = History::constant(3);
        history.push(8, &[0, 1]);
        let report = report(&Story::new(3), &history, &[], 1.0);
        assert_eq!(report.dense_fp32_bytes, (7 * 4 + 3 * 2) * elements * 4);
    }
}
