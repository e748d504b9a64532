//! Other launches of a job of the same name: who may still be alive, asking them, answering them.
//!
//! Which ones are asked depends on the log alone: those that joined before the first Join of our own instance, and
//! have neither left nor been followed by another launch that went on to propose (which had asked them in its turn).
//! So of two launches at the same time exactly one gives way: the one whose first Join comes later.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use gradwire_proto::Rank;
use gradwire_proto::membership::{Body, RecordId};

use super::{CHALLENGE_GRACE, grace};
use crate::record::{Header, Instance};

/// Most other instances that are remembered; the oldest are forgotten first.
const INSTANCES_MAX: usize = 64;
/// Most challenges that are remembered: ours, and others'.
const CHALLENGES_MAX: usize = 64;
/// Spreads the answers of several ranks, so that most see that another one was quicker.
const ANSWER_SPREAD: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Other {
    instance: Instance,
    joined: BTreeSet<Rank>,
    left: BTreeSet<Rank>,
}

#[derive(Debug)]
pub(super) struct Others {
    mine: Instance,
    rank: Rank,
    /// In the order of their first Joins.
    known: VecDeque<Other>,
    /// Set by the first Join of our own instance: whoever comes later is asked by nobody here.
    settled: bool,
    seen_self_at: Option<Instant>,
    /// Challenges of our own instance, and when the first of them was seen.
    challenges: VecDeque<RecordId>,
    challenged_at: Option<Instant>,
    sent_challenge: bool,
    /// Challenges of others, with the time to answer.
    answers: VecDeque<(RecordId, Instant)>,
    answered: VecDeque<RecordId>,
}

impl Others {
    pub(super) fn new(mine: Instance, rank: Rank) -> Self {
        Self {
            mine,
            rank,
            known: VecDeque::new(),
            settled: false,
            seen_self_at: None,
            challenges: VecDeque::new(),
            challenged_at: None,
            sent_challenge: false,
            answers: VecDeque::new(),
            answered: VecDeque::new(),
        }
    }

    /// A Join of our own instance was read.
    pub(super) fn settle(&mut self) {
        self.settled = true;
    }

    /// Our own Join was read.
    pub(super) fn seen_self(&mut self, now: Instant) {
        self.seen_self_at.get_or_insert(now);
    }

    pub(super) fn link_opened(&mut self) {
        self.sent_challenge = false;
    }

    /// A rank of our own instance asked.
    pub(super) fn challenged(&mut self, now: Instant, id: RecordId) {
        self.challenged_at.get_or_insert(now);
        push_bounded(&mut self.challenges, id);
    }

    /// A rank of our own instance answered this challenge: the others need not.
    pub(super) fn answered(&mut self, challenge: RecordId) {
        self.answers.retain(|(pending, _)| *pending != challenge);
        push_bounded(&mut self.answered, challenge);
    }

    /// Takes a record of another instance, verified or not. True if it answers our challenge: that job lives.
    pub(super) fn handle(&mut self, now: Instant, header: &Header, body: &Body) -> bool {
        debug_assert_ne!(header.instance, self.mine);
        let position = self.known.iter().position(|other| other.instance == header.instance);
        match (body, position) {
            (Body::Join { .. }, Some(index)) => drop(self.known[index].joined.insert(header.rank)),
            (Body::Join { .. }, None) if !self.settled => {
                if self.known.len() == INSTANCES_MAX {
                    self.known.pop_front();
                }
                let joined = BTreeSet::from([header.rank]);
                self.known.push_back(Other { instance: header.instance, joined, left: BTreeSet::new() });
            }
            (Body::Left { .. }, Some(index)) => {
                let other = &mut self.known[index];
                other.left.insert(header.rank);
                if other.joined.is_subset(&other.left) {
                    self.known.remove(index);
                }
            }
            (Body::Propose { .. }, Some(index)) => drop(self.known.drain(..index)),
            (Body::Challenge, _) => self.schedule_answer(now, header.id),
            (Body::Alive { challenge }, Some(_)) => return self.challenges.contains(challenge),
            _ => {}
        }
        false
    }

    /// From when on no other job can be alive, if nothing more is heard; nothing while that is not known.
    pub(super) fn clear_at(&self, answer_max: Duration) -> Option<Instant> {
        let seen = self.seen_self_at?;
        if self.known.is_empty() { Some(seen) } else { Some(self.challenged_at? + answer_max) }
    }

    /// When to ask.
    pub(super) fn challenge_at(&self) -> Option<Instant> {
        let waiting = self.known.is_empty() || self.challenged_at.is_some() || self.sent_challenge;
        if waiting { None } else { Some(self.seen_self_at? + grace(CHALLENGE_GRACE, self.rank.0)) }
    }

    /// Whether to ask now.
    pub(super) fn take_challenge(&mut self, now: Instant) -> bool {
        let due = self.challenge_at().is_some_and(|at| at <= now);
        self.sent_challenge |= due;
        due
    }

    /// When the next answer is due.
    pub(super) fn answer_at(&self) -> Option<Instant> {
        self.answers.iter().map(|(_, at)| *at).min()
    }

    /// The challenge to answer now.
    pub(super) fn take_answer(&mut self, now: Instant) -> Option<RecordId> {
        let index = self.answers.iter().position(|(_, at)| *at <= now)?;
        let (challenge, _) = self.answers.remove(index)?;
        push_bounded(&mut self.answered, challenge);
        Some(challenge)
    }

    /// Challenges from before our own Join were not meant for us.
    fn schedule_answer(&mut self, now: Instant, challenge: RecordId) {
        let known = self.answered.contains(&challenge) || self.answers.iter().any(|(id, _)| *id == challenge);
        if self.seen_self_at.is_none() || known || self.answers.len() >= CHALLENGES_MAX {
            return;
        }
        let spread = ANSWER_SPREAD.saturating_mul(self.rank.0).min(Duration::from_secs(1));
        self.answers.push_back((challenge, now + spread));
    }
}

fn push_bounded(ids: &mut VecDeque<RecordId>, id: RecordId) {
    if ids.contains(&id) {
        return;
    }
    if ids.len() == CHALLENGES_MAX {
        ids.pop_front();
    }
    ids.push_back(id);
}
