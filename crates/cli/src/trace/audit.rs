//! `gradwire trace audit`.

use gradwire_control::{AuditEntry, AuditKind, AuditQuery, Topic, read_audit};
use gradwire_proto::{Fault, Rank};
use serde::Serialize;

use super::{Common, parse_time, print, time_text};

#[derive(Debug, clap::Args)]
pub(super) struct AuditArgs {
    #[command(flatten)]
    common: Common,
    /// Only what happened from this time on: 2026-01-31T12:00:00Z, or how long ago, such as 10min.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<u64>,
    /// Only what happened before this time.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<u64>,
    /// Only what this rank wrote, or what is about it.
    #[arg(long)]
    rank: Option<u32>,
    /// Only this kind; may be given several times: joined, refused, committed, read, rejected, suspected, epoch, left,
    /// failed, round-closed, late.
    #[arg(long = "kind", value_name = "KIND")]
    kinds: Vec<AuditKind>,
}

/// An audit record as JSON shows it.
#[derive(Serialize)]
struct Shown {
    time: String,
    kind: &'static str,
    author: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    epoch: u64,
    step: u64,
    detail: String,
}

impl From<AuditEntry> for Shown {
    fn from(AuditEntry { author, record }: AuditEntry) -> Self {
        Self {
            time: time_text(record.time_ms),
            kind: record.kind.as_str(),
            author: author.0,
            rank: record.rank.map(|rank| rank.0),
            epoch: record.epoch.0,
            step: record.step.0,
            detail: record.detail,
        }
    }
}

pub(super) fn show(args: &AuditArgs) -> Result<(), Fault> {
    let times_ms =
        (args.since.is_some() || args.until.is_some()).then(|| args.since.unwrap_or(0)..args.until.unwrap_or(u64::MAX));
    let query = AuditQuery { times_ms, rank: args.rank.map(Rank), kinds: args.kinds.clone() };
    let config = args.common.job.config()?;
    let found = read_audit(&config, &query, args.common.timeout)?;
    let records: Vec<Shown> = found.records.into_iter().map(Shown::from).collect();
    let header = ["time", "kind", "by", "about", "epoch", "step", "detail"];
    print(args.common.json, &config.topic(Topic::Audit), &records, found.rejected, &header, |record| {
        let about_a_step = ["committed", "read", "round-closed", "late"].contains(&record.kind);
        vec![
            record.time.clone(),
            record.kind.to_owned(),
            format!("rank {}", record.author),
            record.rank.map_or_else(String::new, |rank| format!("rank {rank}")),
            if record.epoch == 0 { String::new() } else { record.epoch.to_string() },
            if about_a_step { record.step.to_string() } else { String::new() },
            record.detail.clone(),
        ]
    })
}
