//! What happened to the ranks, as they tell it themselves: for people while it happens, and for the report.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use super::disturb;
use super::event::{Event, Joined, Measured, Moment, StepEnd};
use super::history::History;
use crate::bench::output::human_bytes;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Happening {
    pub(super) kind: Kind,
    /// Whom it happened to; none where it was all of them.
    pub(super) rank: Option<u32>,
    pub(super) step: u32,
    /// Since training began.
    pub(super) ms: f64,
    /// For [`Kind::Epoch`]: which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<u64>,
    /// For [`Kind::Joined`]: how long it took the rank, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) took_ms: Option<f64>,
    /// For [`Kind::Joined`]: how much state it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
}

/// The kinds of what can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// The rank was killed.
    Killed,
    /// The rank was stopped.
    Stalled,
    /// The rank was continued.
    Woke,
    /// The rank, awake again, learned that the others had gone on without it.
    Removed,
    /// One more process was started, to join.
    Started,
    /// The rank, started or awake again, cannot take part any more: the others are through.
    Late,
    /// The others go on without the rank.
    Lost,
    /// The rank takes part from this step on.
    Joined,
    /// The ranks that are left have agreed on who they are.
    Epoch,
    /// A rank was lost in this step, and the others did it again without its contributions.
    Redone,
    /// A rank was lost in this step, which stands with its contributions: every other rank had all results.
    Kept,
}

/// What one rank has told. There is another record of the same number for each time that it joined.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) rank: u32,
    /// Its checksums: the step of the first one, and all that came.
    pub(super) trail: Option<(u32, Vec<u32>)>,
    /// How it ended; none while it trains.
    pub(super) end: Option<End>,
}

/// How a rank ended.
#[derive(Debug)]
pub(super) enum End {
    /// It was through with all steps.
    Finished { weights_sha256: String, history: History },
    /// The others went on without it.
    Removed,
    /// It was killed.
    Killed,
}

/// Collects what ranks tell.
#[derive(Debug)]
pub(super) struct Story {
    began: Option<Moment>,
    epoch: u64,
    members: BTreeSet<u32>,
    /// The step in which a rank was killed, or is stopped.
    struck: BTreeMap<u32, u32>,
    kills: Vec<(u32, Moment)>,
    /// When steps in which a rank was killed ended on the slowest rank.
    ends: BTreeMap<u32, Moment>,
    pub(super) happenings: Vec<Happening>,
    /// In the order in which they began.
    pub(super) records: Vec<Record>,
    /// Processes that were started to join, and how many of them did or could not any more.
    started: Processes,
    pub(super) measured: Option<Measured>,
}

/// What became of processes that were started to join.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Processes {
    pub(super) started: usize,
    pub(super) joined: usize,
    pub(super) late: usize,
}

impl Story {
    /// Of a job that begins with `ranks` ranks.
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            began: None,
            epoch: 1,
            members: (0..ranks).collect(),
            struck: BTreeMap::new(),
            kills: Vec::new(),
            ends: BTreeMap::new(),
            happenings: Vec::new(),
            records: Vec::new(),
            started: Processes::default(),
            measured: None,
        }
    }

    /// Takes in what a rank tells. Returns lines to be shown.
    pub(super) fn take(&mut self, rank: u32, event: Event) -> Vec<String> {
        match event {
            Event::Began { at } => {
                self.began.get_or_insert(at);
                Vec::new()
            }
            Event::Progress { .. } => Vec::new(),
            Event::Killed { step, at } => {
                self.struck.insert(rank, step);
                self.kills.push((step, at));
                self.record(rank).end = Some(End::Killed);
                vec![self.happened(Kind::Killed, Some(rank), step, at, format!("rank {rank} is killed"))]
            }
            Event::Stalled { step, at, ms, .. } => {
                self.struck.insert(rank, step);
                vec![self.happened(Kind::Stalled, Some(rank), step, at, stopped(rank, Duration::from_millis(ms)))]
            }
            Event::Woke { step, at } => {
                self.struck.remove(&rank);
                vec![self.happened(Kind::Woke, Some(rank), step, at, format!("rank {rank} goes on"))]
            }
            Event::Removed { step, at } => {
                self.record(rank).end = Some(End::Removed);
                let words = format!("rank {rank} learns that the others went on without it");
                vec![self.happened(Kind::Removed, Some(rank), step, at, words)]
            }
            // The parent tells it once, when it starts the process.
            Event::Due { .. } => Vec::new(),
            Event::Joined(joined) => vec![self.joined(rank, joined)],
            Event::Late { at, back } => vec![self.late(rank, at, back)],
            Event::Step(end) => self.step_ended(&end),
            Event::Trail { first, checksums } => {
                let trail = &mut self.record(rank).trail;
                trail.get_or_insert_with(|| (first, Vec::new())).1.extend(checksums);
                Vec::new()
            }
            Event::Finished { weights_sha256, history, measured } => {
                self.record(rank).end = Some(End::Finished { weights_sha256, history });
                if let Some(measured) = measured {
                    // In the federated mode each rank measures its own part.
                    self.measured = Some(match self.measured.take() {
                        Some(others) => others.and(measured),
                        None => measured,
                    });
                }
                Vec::new()
            }
        }
    }

    /// A process was started that is to join.
    pub(super) fn started(&mut self, step: u32, at: Moment) -> String {
        self.started.started += 1;
        self.happened(Kind::Started, None, step, at, "one more process is started".to_owned())
    }

    fn joined(&mut self, rank: u32, joined: Joined) -> String {
        let Joined { step, at, took_us, bytes, members, back } = joined;
        self.started.joined += usize::from(!back);
        self.struck.remove(&rank);
        self.records.push(Record { rank, trail: None, end: None });
        let took_ms = took_us as f64 / 1000.0;
        let (again, from) =
            (if back { " again" } else { "" }, if members == 1 { "1 rank" } else { &format!("{members} ranks") });
        let words = format!(
            "rank {rank} takes part{again}: {} of state from {from}, {took_ms:.1} ms in all",
            human_bytes(bytes)
        );
        let line = self.happened(Kind::Joined, Some(rank), step, at, words);
        if let Some(happening) = self.happenings.last_mut() {
            (happening.took_ms, happening.bytes) = (Some(took_ms), Some(bytes));
        }
        line
    }

    fn late(&mut self, rank: u32, at: Moment, back: bool) -> String {
        self.started.late += usize::from(!back);
        let what = if back { "comes back too late" } else { "comes too late" };
        let words = format!("rank {rank} {what}, the others are through: it ends");
        let step = self.ends.last_key_value().map_or(0, |(step, _)| *step);
        self.happened(Kind::Late, Some(rank), step, at, words)
    }

    /// What became of processes that were started to join.
    pub(super) const fn processes(&self) -> Processes {
        self.started
    }

    /// The longest time from a kill to the end of its step on the slowest of the other ranks, in milliseconds.
    pub(super) fn recovery_ms_max(&self) -> Option<f64> {
        let times = self.kills.iter().filter_map(|(step, at)| Some(self.ends.get(step)?.ms_since(*at)));
        times.max_by(f64::total_cmp)
    }

    /// How many steps had this fate.
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.happenings.iter().filter(|happening| happening.kind == kind).count()
    }

    /// The latest record of this number.
    pub(super) fn latest(&self, rank: u32) -> Option<&Record> {
        self.records.iter().rfind(|record| record.rank == rank)
    }

    fn record(&mut self, rank: u32) -> &mut Record {
        let latest = self.records.iter().rposition(|record| record.rank == rank).unwrap_or_else(|| {
            self.records.push(Record { rank, trail: None, end: None });
            self.records.len() - 1
        });
        &mut self.records[latest]
    }

    /// The first rank that tells about a change is believed: all others tell the same, or fail at the reference.
    fn step_ended(&mut self, end: &StepEnd) -> Vec<String> {
        let StepEnd { step, at, .. } = *end;
        let slowest = self.ends.entry(step).or_insert(at);
        *slowest = at.max(*slowest);

        let mut lines = Vec::new();
        let members: BTreeSet<u32> = end.members.iter().copied().collect();
        if end.epoch <= self.epoch {
            return lines;
        }
        let lost: Vec<u32> = self.members.difference(&members).copied().collect();
        // One that was lost right after this step shows in the view already: the next report tells what came of it.
        if lost.iter().any(|rank| self.struck.get(rank).is_some_and(|struck| *struck > step)) {
            return lines;
        }
        (self.epoch, self.members) = (end.epoch, members);
        let mut fates = BTreeSet::new();
        for rank in lost {
            let (of, kept) = self.fate(rank, end);
            fates.insert((of, kept));
            lines.push(self.happened(Kind::Lost, Some(rank), of, at, format!("rank {rank} is lost")));
        }
        let words = format!("epoch {} with ranks {}", end.epoch, list(&end.members));
        let epoch = self.happened(Kind::Epoch, None, step, at, words);
        if let Some(happening) = self.happenings.last_mut() {
            happening.epoch = Some(end.epoch);
        }
        lines.push(epoch);
        for (of, kept) in fates {
            lines.extend(self.settled(of, kept, end));
        }
        lines
    }

    /// In which step a rank was lost, and whether that stands.
    fn fate(&self, rank: u32, end: &StepEnd) -> (u32, bool) {
        if end.contributors.contains(&rank) {
            return (end.step, true);
        }
        // One that had all of the step when the rank was lost tells only about the next one, which lacks it.
        match self.struck.get(&rank) {
            Some(struck) if *struck < end.step => (*struck, true),
            _ => (end.step, false),
        }
    }

    /// A step in which ranks were lost is over. Said once, however many they were.
    fn settled(&mut self, step: u32, kept: bool, end: &StepEnd) -> Option<String> {
        let kind = if kept { Kind::Kept } else { Kind::Redone };
        if self.happenings.iter().any(|happening| happening.kind == kind && happening.step == step) {
            return None;
        }
        let words = if kept {
            "stands, with the contributions of all that had begun it".to_owned()
        } else {
            let results = match end.replaced {
                0 => String::new(),
                1 => ", in place of 1 result that was there".to_owned(),
                count => format!(", in place of {count} results that were there"),
            };
            format!("done again by ranks {}{results}", list(&end.contributors))
        };
        Some(self.happened(kind, None, step, end.at, words))
    }

    fn happened(&mut self, kind: Kind, rank: Option<u32>, step: u32, at: Moment, words: String) -> String {
        let ms = self.began.map_or(0.0, |began| at.ms_since(began));
        self.happenings.push(Happening { kind, rank, step, ms, epoch: None, took_ms: None, bytes: None });
        format!("{ms:8.1} ms  step {step}: {words}")
    }
}

fn stopped(rank: u32, time: Duration) -> String {
    let note = if disturb::is_waited_for(time) { ", too short for the others to give it up" } else { "" };
    format!("rank {rank} is stopped for {}{note}", humantime::format_duration(time))
}

pub(super) fn list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u32, ms: u64, contributors: &[u32], members: &[u32], epoch: u64) -> Event {
        let (contributors, members) = (contributors.to_vec(), members.to_vec());
        Event::Step(StepEnd { step, at: Moment::at_ms(ms), contributors, members, epoch, replaced: 2 })
    }

    fn kinds(story: &Story) -> Vec<(Kind, Option<u32>, u32)> {
        story.happenings.iter().map(|happening| (happening.kind, happening.rank, happening.step)).collect()
    }

    #[test]
    fn a_step_that_was_done_again_is_told_once_and_measured_to_the_slowest() {
        let mut story = Story::new(4);
        story.take(0, Event::Began { at: Moment::at_ms(1000) });
        story.take(2, Event::Killed { step: 40, at: Moment::at_ms(1100) });
        let lines = story.take(0, step(40, 1107, &[0, 1, 3], &[0, 1, 3], 2));
        assert_eq!(lines.len(), 3);
        assert!(
            lines[2].contains("107.0 ms  step 40: done again by ranks 0, 1, 3, in place of 2 results"),
            "{lines:?}"
        );
        for (rank, ms) in [(1, 1109), (3, 1108)] {
            assert!(story.take(rank, step(40, ms, &[0, 1, 3], &[0, 1, 3], 2)).is_empty());
        }
        let expected =
            [(Kind::Killed, Some(2), 40), (Kind::Lost, Some(2), 40), (Kind::Epoch, None, 40), (Kind::Redone, None, 40)];
        assert_eq!(kinds(&story), expected);
        assert_eq!(story.recovery_ms_max(), Some(9.0));
        assert_eq!((story.count(Kind::Redone), story.count(Kind::Kept)), (1, 0));
        assert_eq!(story.happenings[2].epoch, Some(2));
    }

    #[test]
    fn a_step_that_stands_is_known_from_either_side_of_it() {
        // Rank 0 had not ended step 60 when rank 1 was lost; rank 2 had.
        let reports = [(0, step(60, 3000, &[0, 1, 2], &[0, 2], 2)), (2, step(61, 3001, &[0, 2], &[0, 2], 2))];
        for order in [[0, 1], [1, 0]] {
            let mut story = Story::new(3);
            story.take(1, Event::Stalled { step: 60, pid: 1, ms: 5000, at: Moment::at_ms(400) });
            for at in order {
                let (rank, Event::Step(end)) = &reports[at] else { unreachable!() };
                story.take(*rank, Event::Step(end.clone()));
            }
            assert_eq!((story.count(Kind::Redone), story.count(Kind::Kept)), (0, 1));
            let kept = story.happenings.iter().find(|happening| happening.kind == Kind::Kept);
            assert_eq!(kept.map(|happening| happening.step), Some(60));
            assert_eq!(story.recovery_ms_max(), None, "nobody was killed");
        }
    }

    #[test]
    fn a_view_that_is_ahead_of_its_step_is_not_taken_for_a_loss_in_it() {
        let mut story = Story::new(3);
        story.take(2, Event::Killed { step: 8, at: Moment::at_ms(10) });
        assert!(story.take(0, step(7, 12, &[0, 1, 2], &[0, 1], 2)).is_empty());
        story.take(0, step(8, 14, &[0, 1], &[0, 1], 2));
        assert_eq!((story.count(Kind::Redone), story.count(Kind::Kept)), (1, 0));
        assert_eq!(story.recovery_ms_max(), Some(4.0));
    }

    #[test]
    fn two_that_are_lost_in_one_step_are_one_step() {
        let mut story = Story::new(4);
        for rank in [1, 2] {
            story.take(rank, Event::Killed { step: 9, at: Moment::at_ms(10) });
        }
        // The second epoch in the same step, on another rank.
        story.take(0, step(9, 20, &[0, 2, 3], &[0, 2, 3], 2));
        story.take(3, step(9, 21, &[0, 3], &[0, 3], 3));
        assert_eq!((story.count(Kind::Lost), story.count(Kind::Redone), story.count(Kind::Epoch)), (2, 1, 2));
    }

    #[test]
    fn a_rank_that_takes_the_place_of_a_lost_one_has_a_record_of_its_own() {
        let mut story = Story::new(2);
        story.take(1, Event::Trail { first: 1, checksums: vec![7, 8] });
        story.take(1, Event::Killed { step: 3, at: Moment::at_ms(10) });
        story.take(0, step(3, 20, &[0], &[0], 2));
        assert!(story.started(4, Moment::at_ms(21)).contains("step 4: one more process is started"));
        let joined = Joined { step: 8, at: Moment::at_ms(29), took_us: 7500, bytes: 2048, members: 1, back: false };
        let lines = story.take(1, Event::Joined(joined));
        assert!(
            lines[0].contains("step 8: rank 1 takes part: 2.0 KiB of state from 1 rank, 7.5 ms in all"),
            "{lines:?}"
        );
        assert_eq!(story.take(0, step(8, 30, &[0, 1], &[0, 1], 3)).len(), 1, "the epoch");
        story.take(1, Event::Trail { first: 8, checksums: vec![9] });
        let trails: Vec<_> = story.records.iter().filter_map(|record| record.trail.clone()).collect();
        assert_eq!(trails, [(1, vec![7, 8]), (8, vec![9])]);
        assert!(story.latest(1).is_some_and(|record| record.end.is_none()), "it trains");
        let told = story.happenings.iter().find(|happening| happening.kind == Kind::Joined).expect("told");
        assert_eq!((told.took_ms, told.bytes), (Some(7.5), Some(2048)));
        assert_eq!(story.processes(), Processes { started: 1, joined: 1, late: 0 });
    }

    #[test]
    fn one_that_comes_back_or_too_late_is_told_as_such() {
        let mut story = Story::new(2);
        story.take(1, Event::Removed { step: 3, at: Moment::at_ms(10) });
        let joined = Joined { step: 8, at: Moment::at_ms(29), took_us: 7500, bytes: 2048, members: 3, back: true };
        let lines = story.take(1, Event::Joined(joined));
        assert!(lines[0].contains("rank 1 takes part again") && lines[0].contains("from 3 ranks"), "{lines:?}");
        let lines = story.take(2, Event::Late { at: Moment::at_ms(30), back: false });
        assert!(lines[0].contains("rank 2 comes too late, the others are through"), "{lines:?}");
        assert_eq!(story.processes(), Processes { started: 0, joined: 0, late: 1 });
        let lines = story.take(1, Event::Stalled { step: 9, pid: 1, ms: 200, at: Moment::at_ms(31) });
        assert!(lines[0].contains("rank 1 is stopped for 200ms, too short for the others to give it up"), "{lines:?}");
    }
}
