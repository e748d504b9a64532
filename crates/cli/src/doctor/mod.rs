//! `gradwire doctor`: what this machine offers to gradwire, and the remedy for what is missing.

mod network;
mod place;
mod system;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

use serde::Serialize;

use crate::args::BrokerChoice;

/// See what this machine offers, and what to do about what is missing.
///
/// One line per finding: "ok", "warn" (works, but slowly or not with everything) or "fail" (something does not work).
/// The exit code is 1 if anything fails.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON: a list of objects with level, subject, fact and remedy.
    #[arg(long)]
    json: bool,
    /// The job size to judge limits for; as many as there are cores, and at least 8, if not given.
    #[arg(long, short = 'n', value_parser = clap::value_parser!(u32).range(1..=i64::from(gradwire_proto::limits::WORLD_SIZE_MAX)))]
    ranks: Option<u32>,
    /// Also see whether this broker answers.
    #[arg(long, default_value = "embedded")]
    broker: BrokerChoice,
}

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        })
    }
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    level: Level,
    subject: &'static str,
    fact: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn ok(subject: &'static str, fact: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject, fact: fact.into(), remedy: None }
    }

    fn warn(subject: &'static str, fact: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Warn, subject, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    fn fail(subject: &'static str, fact: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Fail, subject, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    /// A finding that is good or a warning.
    fn ok_if(good: bool, subject: &'static str, fact: impl Into<String>, remedy: impl Into<String>) -> Self {
        if good { Self::ok(subject, fact) } else { Self::warn(subject, fact, remedy) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<4}  {}: {}", self.level, self.subject, self.fact)?;
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, " — {remedy}"))
    }
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> ExitCode {
    let findings = examine(args);
    let failed = findings.iter().any(|finding| finding.level == Level::Fail);
    if let Err(error) = print(args.json, &findings) {
        eprintln!("gradwire: cannot print: {error}");
        return ExitCode::FAILURE;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn examine(args: &DoctorArgs) -> Vec<Finding> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let ranks = args.ranks.unwrap_or_else(|| u32::try_from(cores).unwrap_or(u32::MAX).max(8));
    let mut findings = system::examine(cores, ranks);
    findings.extend(network::examine());
    findings.extend(place::examine(&args.broker));
    findings
}

fn print(json: bool, findings: &[Finding]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, findings)?;
        writeln!(out)?;
    } else {
        for finding in findings {
            writeln!(out, "{finding}")?;
        }
    }
    out.flush()
}

/// A number of bytes for people.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_lines() {
        assert_eq!(Finding::ok("cores", "2").to_string(), "ok    cores: 2");
        assert_eq!(Finding::fail("x", "y", "do z").to_string(), "fail  x: y — do z");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
    }

    #[test]
    fn every_subject_is_found_once_and_every_complaint_has_a_remedy() {
        let findings = examine(&DoctorArgs { json: false, ranks: None, broker: BrokerChoice::Embedded });
        let mut subjects: Vec<_> = findings.iter().map(|finding| finding.subject).collect();
        subjects.sort_unstable();
        subjects.dedup();
        assert_eq!(subjects.len(), findings.len());
        assert!(findings.len() >= 18, "{findings:?}");
        for finding in &findings {
            assert!(finding.level == Level::Ok || finding.remedy.is_some(), "{finding}");
            assert!(!finding.to_string().contains('\n'), "{finding}");
        }
    }

    #[test]
    fn a_broker_that_is_not_there_fails_and_is_named() {
        let url = "pulsar://127.0.0.1:1".to_owned();
        let findings = examine(&DoctorArgs { json: false, ranks: None, broker: BrokerChoice::Url(url.clone()) });
        assert!(findings.iter().any(|finding| finding.level == Level::Fail && finding.fact.contains(&url)));
    }
}
