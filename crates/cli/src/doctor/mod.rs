//! `gradwire doctor`: what this machine offers to gradwire, and the remedy for what is missing.

mod broker;
mod network;
mod place;
mod system;

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use gradwire_control::{BrokerAccess, Token};
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
    /// Also try this broker: reaching it, TLS, the token, rights, sizes, and how long messages take.
    #[arg(long, env = "GRADWIRE_BROKER", value_name = "URL", default_value = "embedded")]
    broker: BrokerChoice,
    /// File with what to show to it; GRADWIRE_BROKER_TOKEN or GRADWIRE_BROKER_TOKEN_FILE if not given.
    #[arg(long, value_name = "FILE")]
    broker_token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust, for a broker with TLS.
    #[arg(long, env = "GRADWIRE_BROKER_CA", value_name = "FILE")]
    broker_ca: Option<PathBuf>,
    /// What is tried is the topic of this name and `-doctor`: give TENANT/NAMESPACE/JOB where rights are limited.
    #[arg(long, value_name = "PREFIX", default_value = "public/default/gradwire")]
    topic_prefix: String,
    /// The cluster's admin interface, to compare clocks with.
    #[arg(long, value_name = "URL", value_parser = crate::pulsar::parse_url)]
    admin: Option<String>,
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
    findings.extend(place::examine());
    if let BrokerChoice::Url(url) = &args.broker {
        findings.extend(examine_broker(args, url));
    }
    findings
}

fn examine_broker(args: &DoctorArgs, url: &str) -> Vec<Finding> {
    let access = match gradwire::env::access(url.to_owned(), &crate::job::variable) {
        Ok(access) => access,
        Err(fault) => return vec![Finding::fail("broker token", fault.detail, "give a file with a token")],
    };
    let access = BrokerAccess {
        token: args.broker_token_file.clone().map(Token::File).or(access.token),
        trust: args.broker_ca.clone().or(access.trust),
        ..access
    };
    let target = broker::Target {
        access,
        topic_prefix: args.topic_prefix.clone(),
        admin: args.admin.clone(),
        admin_ca: args.broker_ca.clone(),
    };
    broker::examine(&target)
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

    fn args(broker: BrokerChoice) -> DoctorArgs {
        DoctorArgs {
            json: false,
            ranks: None,
            broker,
            broker_token_file: None,
            broker_ca: None,
            topic_prefix: "public/default/gradwire".to_owned(),
            admin: None,
        }
    }

    #[test]
    fn every_subject_is_found_once_and_every_complaint_has_a_remedy() {
        let findings = examine(&args(BrokerChoice::Embedded));
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
        let findings = examine(&args(BrokerChoice::Url(url.clone())));
        assert!(findings.iter().any(|finding| finding.level == Level::Fail && finding.fact.contains(&url)));
    }
}
