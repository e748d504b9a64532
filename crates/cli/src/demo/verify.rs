//! Whether what the ranks ended with is what one process comes to with the same contributors in each step.

use std::collections::BTreeSet;

use super::history::History;
use super::reference::Trained;
use super::story::{End, Processes, Record, Story};

/// The ranks that were through with all steps: their weights' hash and their history. First those that were there from
/// the beginning.
pub(super) fn finished(story: &Story) -> Vec<(u32, &str, &History)> {
    let finished = story.records.iter().filter_map(|record| match &record.end {
        Some(End::Finished { weights_sha256, history }) => Some((record.rank, weights_sha256.as_str(), history)),
        _ => None,
    });
    let mut finished: Vec<_> = finished.collect();
    finished.sort_by_key(|(rank, _, history)| (history.first(), *rank));
    finished
}

/// The ranks of which nobody knows how they ended.
pub(super) fn missing(story: &Story, ranks: u32) -> Vec<u32> {
    let joined = story.records.iter().map(|record| record.rank).filter(|rank| *rank >= ranks);
    let all: BTreeSet<u32> = (0..ranks).chain(joined).collect();
    all.into_iter().filter(|rank| story.latest(*rank).is_none_or(|record| record.end.is_none())).collect()
}

/// What ranks that are left have other than the first of them, and than the reference; what ranks that were lost had
/// other than that while they were there. Empty when all is well.
pub(super) fn problems(story: &Story, reference: &Trained) -> Vec<String> {
    let finished = finished(story);
    let Some((first, weights, history)) = finished.first() else {
        return vec!["no rank was through with all steps".to_owned()];
    };
    let mut problems = Vec::new();
    for (rank, _, other) in &finished {
        if let Some(step) = history.difference(other) {
            problems.push(format!(
                "from step {step} on, ranks {first} and {rank} disagree about whose contributions are in the results"
            ));
        }
    }
    let strays: Vec<String> =
        finished.iter().filter(|(_, other, _)| other != weights).map(|(rank, ..)| rank.to_string()).collect();
    if !strays.is_empty() {
        let strays = strays.join(", ");
        problems
            .push(format!("ranks ended with different weights: those of rank {strays} are not those of rank {first}"));
    }
    for record in &story.records {
        if let Some(step) = difference(record, &reference.trail) {
            problems.push(format!(
                "from step {step} on, results of rank {} are not those of the one-process reference",
                record.rank
            ));
        }
    }
    let reference = reference.model.sha256();
    if *weights != reference {
        problems.push(format!("final weights {weights} are not those of the one-process reference, {reference}"));
    }
    problems
}

/// What became of processes that were to join, if that was not what it should be.
pub(super) fn not_joined(story: &Story) -> Vec<String> {
    let Processes { started, joined, late } = story.processes();
    let mut problems = Vec::new();
    if late > 0 {
        let detail = "came when the others were through: let them join earlier, or train longer (--steps)";
        problems.push(format!("{late} of {started} processes that were to join {detail}"));
    }
    let silent = started.saturating_sub(joined + late);
    if silent > 0 {
        problems.push(format!("{silent} of {started} processes that were to join did not: look for the reason above"));
    }
    problems
}

/// The first step in which a rank had other results.
fn difference(record: &Record, reference: &[u32]) -> Option<u32> {
    let (first, checksums) = record.trail.as_ref()?;
    let expected = reference.get(*first as usize - 1..).unwrap_or_default();
    let same = checksums.iter().zip(expected).take_while(|(one, other)| one == other).count();
    // One that has more steps than there are differs too.
    (same < checksums.len()).then(|| first + same as u32)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::WireFormat;

    use super::super::event::{Event, Joined, Moment};
    use super::super::reference::{Task, train};
    use super::*;

    const STEPS: u32 = 6;

    fn reference(history: &History) -> Trained {
        train(&Task { ranks: 3, steps: STEPS, wire: WireFormat::Fp32, seed: 7 }, history).expect("train")
    }

    fn history() -> History {
        let mut history = History::constant(3);
        history.push(4, &[0, 2]);
        history
    }

    /// What ranks tell that did as `of_rank` says, by rank.
    fn story(of_rank: &[(u32, &Trained, &History)]) -> Story {
        let mut story = Story::new(3);
        for (rank, trained, history) in of_rank {
            let weights_sha256 = trained.model.sha256();
            story.take(*rank, Event::Trail { first: 1, checksums: trained.trail[..2].to_vec() });
            story.take(*rank, Event::Trail { first: 3, checksums: trained.trail[2..].to_vec() });
            story.take(*rank, Event::Finished { weights_sha256, history: (*history).clone(), measured: None });
        }
        story
    }

    #[test]
    fn what_the_ranks_did_is_what_one_process_does() {
        let (history, trained) = (history(), reference(&history()));
        let mut story = story(&[(0, &trained, &history), (2, &trained, &history)]);
        assert_eq!(missing(&story, 3), [1]);
        // The rank that was lost is held against the reference as far as it came.
        story.take(1, Event::Trail { first: 1, checksums: trained.trail[..3].to_vec() });
        story.take(1, Event::Killed { step: 4, at: Moment::at_ms(1) });
        assert_eq!((problems(&story, &trained), missing(&story, 3)), (Vec::<String>::new(), vec![]));
    }

    #[test]
    fn a_reference_with_other_contributors_is_found_from_its_step_on() {
        let (history, trained) = (history(), reference(&history()));
        let story = story(&[(0, &trained, &history), (2, &trained, &history)]);
        let mut wrong = History::constant(3);
        wrong.push(5, &[0, 2]);
        let found = problems(&story, &reference(&wrong)).join("; ");
        assert!(found.contains("from step 4 on, results of rank 0 are not those"), "{found}");
        assert!(found.contains("from step 4 on, results of rank 2 are not those"), "{found}");
        assert!(found.contains("final weights"), "{found}");
    }

    #[test]
    fn a_rank_that_did_something_else_is_named() {
        let (history, trained) = (history(), reference(&history()));
        let mut late = History::constant(3);
        late.push(6, &[0, 2]);
        let other = reference(&late);
        let found = problems(&story(&[(0, &trained, &history), (2, &other, &late)]), &trained).join("; ");
        assert!(found.contains("from step 4 on, ranks 0 and 2 disagree"), "{found}");
        assert!(found.contains("those of rank 2 are not those of rank 0"), "{found}");
        assert!(found.contains("from step 4 on, results of rank 2"), "{found}");
        assert!(!found.contains("results of rank 0") && !found.contains("final weights"), "{found}");
        assert_eq!(problems(&Story::new(3), &trained), ["no rank was through with all steps"]);
    }

    #[test]
    fn a_rank_that_joined_is_held_against_its_own_steps() {
        let mut history = History::constant(3);
        history.push(5, &[0, 1, 2, 3]);
        let mut late = History::default();
        late.push(5, &[0, 1, 2, 3]);
        let trained = reference(&history);
        let mut story = story(&[(0, &trained, &history), (1, &trained, &history), (2, &trained, &history)]);
        story.started(3, Moment::at_ms(1));
        assert_eq!(not_joined(&story).len(), 1);
        let joined = Joined { step: 5, at: Moment::at_ms(2), took_us: 1, bytes: 1, members: 3, back: false };
        story.take(3, Event::Joined(joined));
        assert_eq!((missing(&story, 3), not_joined(&story).len()), (vec![3], 0), "it has not said how it ended");
        story.take(3, Event::Trail { first: 5, checksums: trained.trail[4..].to_vec() });
        let weights_sha256 = trained.model.sha256();
        story.take(3, Event::Finished { weights_sha256, history: late, measured: None });
        assert_eq!((problems(&story, &trained), missing(&story, 3)), (Vec::<String>::new(), vec![]));
        story.started(6, Moment::at_ms(3));
        story.take(4, Event::Late { at: Moment::at_ms(4), back: false });
        assert!(
            not_joined(&story)[0].contains("1 of 2 processes that were to join came when"),
            "{:?}",
            not_joined(&story)
        );
    }

    #[test]
    fn a_removed_rank_that_had_applied_something_else_is_found() {
        let (history, trained) = (history(), reference(&history()));
        let mut story = story(&[(0, &trained, &history)]);
        story.take(1, Event::Trail { first: 1, checksums: vec![trained.trail[0], !trained.trail[1]] });
        story.take(1, Event::Removed { step: 3, at: Moment::at_ms(1) });
        let expected = "from step 2 on, results of rank 1 are not those of the one-process reference";
        assert_eq!(problems(&story, &trained), [expected]);
    }
}
