//! `gradwire trace`: what a job left on its broker, checked with its secret.

mod audit;
mod versions;

use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use gradwire_proto::{Fault, Step};
use serde::Serialize;

use crate::bench::output::{complain, say};
use crate::job::JobArgs;

/// Show what a job left on its broker.
///
/// Records are checked with the job's secret; those that do not verify are counted, and left out.
#[derive(Debug, clap::Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The versions that its ranks committed: which step, by whom, and the checksums of the shards.
    Versions(versions::VersionsArgs),
    /// Who joined, was refused or left, what was committed and read, and what was rejected.
    Audit(audit::AuditArgs),
}

/// What every trace takes.
#[derive(Debug, clap::Args)]
struct Common {
    #[command(flatten)]
    job: JobArgs,
    /// Print one JSON object per record.
    #[arg(long)]
    json: bool,
    /// How long reading may take.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

/// Runs the command.
pub(crate) fn run(args: &TraceArgs) -> ExitCode {
    let shown = match &args.what {
        What::Versions(args) => versions::show(args),
        What::Audit(args) => audit::show(args),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            complain(&fault);
            ExitCode::FAILURE
        }
    }
}

/// Prints records as lines of JSON, or as a table; and on standard error how many were left out.
fn print<T: Serialize>(
    json: bool,
    topic: &str,
    records: &[T],
    rejected: u64,
    header: &[&str],
    row: impl Fn(&T) -> Vec<String>,
) -> Result<(), Fault> {
    if json {
        for record in records {
            let line = serde_json::to_string(record).unwrap_or_default();
            say(&format!("{line}\n"))?;
        }
    } else if records.is_empty() {
        say(&format!("no records in {topic}\n"))?;
    } else {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(header);
        for record in records {
            table.add_row(row(record));
        }
        say(&format!("{table}\n"))?;
    }
    if rejected > 0 {
        complain(&format!("{rejected} messages are left out: they are no records, or do not verify with this secret"));
    }
    Ok(())
}

/// Steps as `A..B`, `A..`, `..B` or a single one.
fn parse_steps(text: &str) -> Result<Range<Step>, String> {
    let number = |text: &str, default| if text.is_empty() { Ok(default) } else { text.parse::<u64>() };
    let range = match text.split_once("..") {
        Some((from, to)) => number(from, 0).and_then(|from| Ok(from..number(to, u64::MAX)?)),
        None => text.parse().map(|step: u64| step..step.saturating_add(1)),
    };
    match range {
        Ok(range) if range.start < range.end => Ok(Step(range.start)..Step(range.end)),
        _ => Err("expected steps such as 7, 10..20, 10.. or ..20 (the end is not among them)".to_owned()),
    }
}

/// A time as RFC 3339, or as how long ago it was. Milliseconds since 1970.
fn parse_time(text: &str) -> Result<u64, String> {
    let ago = humantime::parse_duration(text).ok().and_then(|ago| SystemTime::now().checked_sub(ago));
    let time = ago.map_or_else(|| humantime::parse_rfc3339_weak(text), Ok);
    let wrong = |_| "expected a time such as 2026-01-31T12:00:00Z, or how long ago, such as 10min".to_owned();
    let since = time.map_err(wrong)?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Milliseconds since 1970, for people.
fn time_text(time_ms: u64) -> String {
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(time_ms.min(253_402_300_799_000)));
    time.map_or_else(String::new, |time| humantime::format_rfc3339_millis(time).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_ranges() {
        for (text, from, to) in [("7", 7, 8), ("3..9", 3, 9), ("3..", 3, u64::MAX), ("..9", 0, 9)] {
            assert_eq!(parse_steps(text), Ok(Step(from)..Step(to)));
        }
        for bad in ["", "x", "9..3", "3..3", "1..2..3", "-1"] {
            assert!(parse_steps(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_absolute_or_ago() {
        assert_eq!(parse_time("1970-01-01T00:00:01Z"), Ok(1000));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let hour = parse_time("1h").unwrap();
        assert!((now - hour).abs_diff(3_600_000) < 60_000);
        assert!(parse_time("yesterday").is_err());
        assert_eq!(time_text(1500), "1970-01-01T00:00:01.500Z");
        assert!(!time_text(u64::MAX).is_empty());
    }
}
