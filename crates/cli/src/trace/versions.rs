//! `gradwire trace versions`.

use std::ops::Range;

use gradwire_control::{Topic, VersionQuery, VersionRecord, read_versions};
use gradwire_proto::{Fault, Rank, Step};
use serde::Serialize;

use super::{Common, parse_steps, print};

#[derive(Debug, clap::Args)]
pub(super) struct VersionsArgs {
    #[command(flatten)]
    common: Common,
    /// Only those of this owner.
    #[arg(long, value_name = "RANK")]
    owner: Option<u32>,
    /// Only those of these steps: 7, 10..20 (without 20), 10.. or ..20. Commits that follow each other within the
    /// commit interval (100 ms) share a record, which has the step of the last.
    #[arg(long, value_name = "STEPS", value_parser = parse_steps)]
    steps: Option<Range<Step>>,
    /// Only the latest of each owner.
    #[arg(long)]
    latest: bool,
}

/// A version record as JSON shows it.
#[derive(Serialize)]
struct Shown {
    epoch: u64,
    step: u64,
    owner: u32,
    contributors: Vec<u32>,
    /// Unit and CRC-32.
    shards: Vec<(u32, String)>,
}

impl From<VersionRecord> for Shown {
    fn from(record: VersionRecord) -> Self {
        Self {
            epoch: record.epoch.0,
            step: record.step.0,
            owner: record.owner.0,
            contributors: record.contributors.iter().map(|rank| rank.0).collect(),
            shards: record.crcs.iter().map(|(unit, crc)| (unit.0, format!("{crc:08x}"))).collect(),
        }
    }
}

pub(super) fn show(args: &VersionsArgs) -> Result<(), Fault> {
    let query = VersionQuery { owner: args.owner.map(Rank), steps: args.steps.clone(), latest: args.latest };
    let config = args.common.job.config()?;
    let found = read_versions(&config, &query, args.common.timeout)?;
    let records: Vec<Shown> = found.records.into_iter().map(Shown::from).collect();
    let header = ["epoch", "step", "owner", "contributors", "shards", "first checksums"];
    print(args.common.json, &config.topic(Topic::Versions), &records, found.rejected, &header, |record| {
        let first: Vec<String> = record.shards.iter().take(3).map(|(unit, crc)| format!("{unit}: {crc}")).collect();
        let more = if record.shards.len() > 3 { ", ..." } else { "" };
        vec![
            record.epoch.to_string(),
            record.step.to_string(),
            record.owner.to_string(),
            ranges(&record.contributors),
            record.shards.len().to_string(),
            format!("{}{more}", first.join(", ")),
        ]
    })
}

/// Ascending numbers, with runs as ranges.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => runs.push((*number, *number)),
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn runs_of_ranks_are_ranges() {
        assert_eq!(super::ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(super::ranges(&[]), "");
    }
}
