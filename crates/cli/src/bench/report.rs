//! A benchmark's results: as a table for people, as lines of JSON for programs, and as a verdict.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use gradwire_proto::{Fault, FaultKind};
use serde::Serialize;

use super::AllreduceArgs;
use super::output::say;
use super::rank::{Event, Timing};
use super::sizes::TensorBytes;

const HEADER: [&str; 11] =
    ["op", "transport", "wire", "ranks", "size", "iters", "min ms", "p50 ms", "p99 ms", "GB/s", "verified"];
/// Columns of [`HEADER`] that hold words; the others hold figures.
const WORDS: usize = 3;

/// The results of all sizes.
#[derive(Debug)]
pub(super) struct Report {
    rows: Vec<Row>,
    problems: Vec<String>,
}

/// The result of one size. Its fields are those of the JSON object.
#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    ranks: u32,
    transport: String,
    wire: &'static str,
    bytes: u64,
    #[serde(skip)]
    size: TensorBytes,
    in_place: bool,
    commit: bool,
    iters: usize,
    ms_min: f64,
    ms_p50: f64,
    ms_p99: f64,
    /// Bytes of the tensor per time of a median iteration, in 10^9 bytes per second.
    algbw_gbps: f64,
    verified: bool,
}

impl Report {
    /// From everything that the ranks reported.
    ///
    /// # Errors
    /// A [`Fault`] of kind `ProtocolViolation` when a rank left out, or repeated, a size.
    pub(super) fn new(args: &AllreduceArgs, events: Vec<(u32, Event)>) -> Result<Self, Fault> {
        let mut sizes: Vec<Vec<(u32, Event)>> = args.bytes.iter().map(|_| Vec::new()).collect();
        for (rank, event) in events {
            let known = sizes.get_mut(event.size_index).ok_or_else(|| incomplete(event.size_index))?;
            known.push((rank, event));
        }
        let mut report = Self { rows: Vec::new(), problems: Vec::new() };
        for (index, (size, mut events)) in args.bytes.iter().zip(sizes).enumerate() {
            events.sort_by_key(|(rank, _)| *rank);
            let is_complete = events.iter().map(|(rank, _)| *rank).eq(0..args.ranks);
            let timing = events.first_mut().and_then(|(_, event)| event.timing.take());
            let timing = timing.filter(|_| is_complete).ok_or_else(|| incomplete(index))?;
            let wrong: Vec<String> = events.into_iter().filter_map(|(_, event)| event.wrong).collect();
            report.rows.push(Row::new(args, *size, timing, wrong.is_empty()));
            report.problems.extend(wrong.iter().map(|wrong| format!("{size}: wrong result: {wrong}")));
        }
        Ok(report)
    }

    /// One line of JSON per size.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when it cannot be expressed.
    pub(super) fn json_lines(&self) -> Result<String, Fault> {
        let lines: Result<Vec<String>, _> = self.rows.iter().map(serde_json::to_string).collect();
        lines
            .map(|lines| lines.join("\n"))
            .map_err(|error| Fault::new(FaultKind::System, format!("the result cannot be written as JSON: {error}")))
    }

    /// Prints the results to standard output.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` when standard output takes no more.
    pub(super) fn print_table(&self) -> Result<(), Fault> {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(HEADER);
        for row in &self.rows {
            let milliseconds = |value: f64| format!("{value:.4}");
            let row: [String; HEADER.len()] = [
                row.op.to_owned(),
                row.transport.clone(),
                row.wire.to_owned(),
                row.ranks.to_string(),
                row.size.to_string(),
                row.iters.to_string(),
                milliseconds(row.ms_min),
                milliseconds(row.ms_p50),
                milliseconds(row.ms_p99),
                format!("{:.2}", row.algbw_gbps),
                if row.verified { "yes" } else { "NO" }.to_owned(),
            ];
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(WORDS) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        say(&format!("{table}\n"))
    }

    /// What is wrong with the results; empty when all is well.
    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }
}

impl Row {
    fn new(args: &AllreduceArgs, size: TensorBytes, timing: Timing, verified: bool) -> Self {
        Self {
            op: "allreduce",
            ranks: args.ranks,
            transport: timing.transport,
            wire: args.wire.as_str(),
            bytes: size.bytes(),
            size,
            in_place: args.in_place,
            commit: args.commit,
            iters: timing.iters,
            ms_min: timing.ms_min,
            ms_p50: timing.ms_p50,
            ms_p99: timing.ms_p99,
            algbw_gbps: size.bytes() as f64 / (timing.ms_p50.max(f64::MIN_POSITIVE) * 1e6),
            verified,
        }
    }
}

fn incomplete(size_index: usize) -> Fault {
    let detail = format!("not every rank reported size number {} exactly once", size_index + 1);
    Fault::new(FaultKind::ProtocolViolation, detail)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: AllreduceArgs,
    }

    fn args(text: &str) -> AllreduceArgs {
        Command::parse_from(["bench"].into_iter().chain(text.split_whitespace())).args
    }

    fn event(size_index: usize, is_first: bool, wrong: Option<&str>) -> Event {
        let timing = Timing { transport: "tcp".to_owned(), iters: 10, ms_min: 1.0, ms_p50: 2.0, ms_p99: 3.0 };
        Event { size_index, wrong: wrong.map(str::to_owned), timing: is_first.then_some(timing) }
    }

    #[test]
    fn json_has_a_line_per_size_with_the_promised_fields() {
        let args = args("--bytes 4KiB,1MiB --wire fp16");
        let events = [(1, 1), (0, 0), (0, 1), (1, 0)].map(|(rank, size)| (rank, event(size, rank == 0, None)));
        let report = Report::new(&args, events.into()).expect("report");
        assert!(report.problems().is_empty());
        let lines = report.json_lines().expect("serialize");
        let rows: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("parse")).collect();
        assert_eq!(rows.iter().map(|row| row["bytes"].as_u64()).collect::<Vec<_>>(), [Some(4096), Some(1 << 20)]);
        for field in "op ranks transport wire bytes ms_min ms_p50 ms_p99 verified".split(' ') {
            assert!(!rows[0][field].is_null(), "{field} is missing");
        }
        assert_eq!((&rows[1]["wire"], &rows[1]["verified"]), (&"fp16".into(), &true.into()));
        assert!((rows[1]["algbw_gbps"].as_f64().expect("figure") - 0.524_288).abs() < 1e-9);
    }

    #[test]
    fn one_wrong_rank_makes_the_size_unverified() {
        let args = args("--bytes 4KiB");
        let events = vec![(0, event(0, true, None)), (1, event(0, false, Some("element 3 is 1, not 2")))];
        let report = Report::new(&args, events).expect("report");
        assert!(report.json_lines().expect("serialize").contains("\"verified\":false"));
        assert_eq!(report.problems(), ["4KiB: wrong result: element 3 is 1, not 2"]);
    }

    #[test]
    fn missing_and_repeated_reports_are_faults() {
        let args = args("--bytes 4KiB");
        for events in [
            vec![],
            vec![(0, event(0, true, None))],
            vec![(0, event(0, true, None)), (0, event(0, true, None)), (1, event(0, false, None))],
            vec![(0, event(0, false, None)), (1, event(0, false, None))],
            vec![(0, event(0, true, None)), (1, event(0, false, None)), (0, event(1, true, None))],
        ] {
            let fault = Report::new(&args, events).expect_err("must be refused");
            assert_eq!(fault.kind, FaultKind::ProtocolViolation);
        }
    }
}
