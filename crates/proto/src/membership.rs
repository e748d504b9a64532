//! Membership as a replicated state machine over the job's control log.
//!
//! Every rank applies the same records in the same order, so all of them see the same members without a leader: a
//! change takes effect by a proposal for the next epoch, and **the first valid one in log order wins**. Nothing here
//! knows a clock or who "we" are; when to propose is the caller's affair, what a proposal does is decided here alone.
//!
//! What makes it safe:
//! - A process is named by the id of its Join, not by its rank: a restarted rank is another member.
//! - A record counts only if its author is a member that is neither gone nor suspected. A process that was stalled,
//!   was removed meanwhile and goes on writing changes nothing; of two ranks that suspect each other, the one whose
//!   record comes first stays.
//! - A process that joins a running job is taken in when it says that it has what it needs (Ready), not before.
//! - A proposal names the view that it follows, and may leave out only members that left or are suspected.
//! - Every rule is idempotent, so records that come twice, or again after a reconnection, change nothing.
//!
//! A log that lost its records (a broker without storage that restarted) is written again: members append a
//! [`Snapshot`] of what they know, and readers take the one of the highest epoch. Who is behind finds records in such a
//! log, before the snapshot, that are about epochs which it does not know yet: they are kept, and count once it does.
//! [`Replica`] finds out that the log was lost, and keeps what was read in it apart from the new one.

mod record;
mod replica;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

pub use record::{Body, ProposedMember, SNAPSHOT_CANDIDATES_MAX};
pub use replica::Replica;

use crate::limits::WORLD_SIZE_MAX;
use crate::member::Endpoint;
use crate::{Epoch, Rank};

/// The unique id of a record: the same when it was written twice because a receipt got lost.
pub type RecordId = [u8; 16];

/// The first epoch: the members that the job starts with.
pub const FIRST_EPOCH: Epoch = Epoch(1);
/// Most processes that are remembered as gone for good.
const RETIRED_MAX: usize = 4096;
/// Most records that are kept because they came before the snapshot that they follow.
const EARLY_MAX: usize = 1024;

/// One process of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its rank.
    pub rank: Rank,
    /// The id of its Join: names the process.
    pub id: RecordId,
    /// Where it can be reached.
    pub endpoint: Endpoint,
}

/// The members of one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Its number; 0 while there is no view.
    pub epoch: Epoch,
    /// The id of the proposal that made it: two views of the same epoch, after a log was lost, differ in it.
    pub id: RecordId,
    /// In the order of their ranks.
    pub members: Vec<Member>,
}

impl View {
    /// The member with this Join.
    #[must_use]
    pub fn member(&self, id: RecordId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }

    /// The member of this rank.
    #[must_use]
    pub fn rank(&self, rank: Rank) -> Option<&Member> {
        self.members.iter().find(|member| member.rank == rank)
    }
}

/// Why a process is no longer counted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// It said that it leaves.
    Left,
    /// A member suspects it: this rank.
    Suspected(Rank),
}

/// What a record changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing: it came twice, is of an older epoch, or its author had no say.
    None,
    /// A process joined, and is a candidate for the next view; or it is ready to be in it.
    Candidate,
    /// A process joined as a rank that another one has, which is neither gone nor suspected.
    RankTaken,
    /// A member or candidate is gone.
    Gone(Member, Departure),
    /// There is a new view.
    View,
    /// The log was lost and stands again, with the same view: who waits and who is gone may be others.
    Restored,
    /// A snapshot holds another view of this epoch: the log was lost, and ranks had gone on differently.
    Diverged,
}

/// The state that every rank derives from the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    world_size: u32,
    view: View,
    /// Processes that joined and are no members, in the order of their Joins.
    candidates: Vec<Member>,
    /// Candidates that have what they need to take part in a running job.
    ready: BTreeSet<RecordId>,
    /// Members and candidates that left or are suspected.
    gone: BTreeMap<RecordId, Departure>,
    /// Processes that were members or candidates and never will be again.
    retired: VecDeque<RecordId>,
    /// Records about epochs or processes that are not known yet, in the order of the log.
    early: VecDeque<(Rank, RecordId, Body)>,
    applied: u64,
}

/// A copy of the state: what a late joiner reads instead of the log's older part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The members.
    pub view: View,
    /// Who waits to become one.
    pub candidates: Vec<Member>,
    /// Which of these have what they need to take part.
    pub ready: Vec<RecordId>,
    /// Who is gone, of both.
    pub gone: Vec<(RecordId, Departure)>,
    /// Who was removed lately.
    pub retired: Vec<RecordId>,
}

impl Log {
    /// The state before the first record, for a job that starts with this many ranks.
    #[must_use]
    pub fn new(world_size: u32) -> Self {
        Self {
            world_size,
            view: View::default(),
            candidates: Vec::new(),
            ready: BTreeSet::new(),
            gone: BTreeMap::new(),
            retired: VecDeque::new(),
            early: VecDeque::new(),
            applied: 0,
        }
    }

    /// The members now. Epoch 0 until the first proposal.
    #[must_use]
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// Processes that wait to become members, in the order of their Joins.
    #[must_use]
    pub fn candidates(&self) -> &[Member] {
        &self.candidates
    }

    /// How many records changed something.
    #[must_use]
    pub const fn applied(&self) -> u64 {
        self.applied
    }

    /// Whether this process left, is suspected, or was removed.
    #[must_use]
    pub fn is_gone(&self, id: RecordId) -> bool {
        self.gone.contains_key(&id) || self.retired.contains(&id)
    }

    /// Whether all members are gone, and the last of them in good order: nobody is left who could take others in.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let left = |member: &Member| self.gone.get(&member.id) == Some(&Departure::Left);
        self.live().next().is_none() && self.view.members.iter().any(left)
    }

    /// Members that can be counted on, in the order of their ranks.
    pub fn live(&self) -> impl Iterator<Item = &Member> {
        self.view.members.iter().filter(|member| !self.gone.contains_key(&member.id))
    }

    /// Who should be the members of the next epoch, in the order of their ranks: the live members, and for every
    /// rank that none of them has the first live candidate that is ready. Before the first view these are all candidates
    /// of the ranks that the job starts with.
    #[must_use]
    pub fn next_members(&self) -> Vec<&Member> {
        let mut next: BTreeMap<Rank, &Member> = self.live().map(|member| (member.rank, member)).collect();
        for candidate in self.candidates.iter().filter(|candidate| self.may_enter(candidate)) {
            next.entry(candidate.rank).or_insert(candidate);
        }
        next.into_values().collect()
    }

    fn may_enter(&self, candidate: &Member) -> bool {
        let first = self.view.epoch == Epoch(0);
        let able = if first { candidate.rank.0 < self.world_size } else { self.ready.contains(&candidate.id) };
        able && !self.gone.contains_key(&candidate.id)
    }

    /// Whether the members of the next epoch would be others than those of this one.
    #[must_use]
    pub fn is_change_due(&self) -> bool {
        let next = self.next_members();
        next.len() != self.view.members.len()
            || next.iter().zip(&self.view.members).any(|(next, member)| next.id != member.id)
    }

    /// The proposal of the next view by this process, as [`Log::next_members`] says.
    #[must_use]
    pub fn proposal(&self, author: RecordId) -> Body {
        let members = self.next_members();
        let members = members.into_iter().map(|member| ProposedMember { rank: member.rank, id: member.id }).collect();
        Body::Propose { author, epoch: Epoch(self.view.epoch.0 + 1), base: self.view.id, members }
    }

    /// A copy of the state.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            view: self.view.clone(),
            candidates: self.candidates.clone(),
            ready: self.ready.iter().copied().collect(),
            gone: self.gone.iter().map(|(id, departure)| (*id, *departure)).collect(),
            retired: self.retired.iter().copied().collect(),
        }
    }

    /// Applies the record with this id of this rank. Bodies that are not about membership change nothing.
    pub fn apply(&mut self, rank: Rank, id: RecordId, body: &Body) -> Change {
        if self.is_early(body) {
            if self.early.len() == EARLY_MAX {
                self.early.pop_front();
            }
            self.early.push_back((rank, id, body.clone()));
            return Change::None;
        }
        let change = match body {
            Body::Join { endpoint, .. } => self.join(Member { rank, id, endpoint: endpoint.clone() }),
            Body::Left { author } => self.depart(*author, Departure::Left),
            Body::Ready { author } => self.ready(*author),
            Body::Suspect { author, epoch, member, .. } => self.suspect(*author, *epoch, *member),
            Body::Propose { author, epoch, base, members } => self.propose(*author, id, (*epoch, *base), members),
            Body::Snapshot(snapshot) => self.adopt(snapshot),
            Body::Failed { .. } | Body::Challenge | Body::Alive { .. } => Change::None,
        };
        self.applied += u64::from(!matches!(change, Change::None | Change::RankTaken | Change::Diverged));
        change
    }

    /// Whether a record would be understood by who has read what this reader has not: a snapshot that follows.
    fn is_early(&self, body: &Body) -> bool {
        match body {
            Body::Propose { epoch, .. } => epoch.0 > self.view.epoch.0 + 1,
            Body::Suspect { epoch, .. } => *epoch > self.view.epoch,
            Body::Left { author } | Body::Ready { author } => {
                self.process(*author).is_none() && !self.retired.contains(author)
            }
            _ => false,
        }
    }

    /// The member or candidate with this Join.
    fn process(&self, id: RecordId) -> Option<&Member> {
        self.view.member(id).or_else(|| self.candidates.iter().find(|other| other.id == id))
    }

    fn join(&mut self, member: Member) -> Change {
        let known = self.view.member(member.id).is_some() || self.candidates.iter().any(|other| other.id == member.id);
        if known || self.retired.contains(&member.id) || member.rank.0 >= WORLD_SIZE_MAX {
            return Change::None;
        }
        let others = self.live().chain(&self.candidates);
        let taken = others.filter(|other| other.rank == member.rank).any(|other| !self.gone.contains_key(&other.id));
        if self.candidates.len() >= SNAPSHOT_CANDIDATES_MAX {
            return Change::None;
        }
        self.candidates.push(member);
        if taken { Change::RankTaken } else { Change::Candidate }
    }

    fn ready(&mut self, id: RecordId) -> Change {
        let waits = self.candidates.iter().any(|candidate| candidate.id == id);
        if waits && !self.gone.contains_key(&id) && self.ready.insert(id) { Change::Candidate } else { Change::None }
    }

    fn depart(&mut self, id: RecordId, departure: Departure) -> Change {
        let Some(member) = self.process(id).cloned() else { return Change::None };
        match self.gone.get(&id) {
            // Who was suspected and says farewell has left.
            Some(Departure::Suspected(_)) if departure == Departure::Left => {}
            Some(_) => return Change::None,
            None => {}
        }
        self.gone.insert(id, departure);
        Change::Gone(member, departure)
    }

    /// The author, if it is a member with a say.
    fn author(&self, id: RecordId) -> Option<&Member> {
        self.live().find(|member| member.id == id)
    }

    fn suspect(&mut self, author: RecordId, epoch: Epoch, member: RecordId) -> Change {
        let Some(author) = self.author(author) else { return Change::None };
        if epoch != self.view.epoch || author.id == member {
            return Change::None;
        }
        self.depart(member, Departure::Suspected(author.rank))
    }

    fn propose(
        &mut self,
        author: RecordId,
        id: RecordId,
        (epoch, base): (Epoch, RecordId),
        proposed: &[ProposedMember],
    ) -> Change {
        if epoch.0 != self.view.epoch.0 + 1 || base != self.view.id || proposed.is_empty() {
            return Change::None;
        }
        let first = self.view.epoch == Epoch(0);
        let may_speak = if first { proposed.iter().any(|one| one.id == author) } else { self.author(author).is_some() };
        if !may_speak || first && proposed.len() != self.world_size as usize {
            return Change::None;
        }
        let Some(members) = proposed.iter().map(|one| self.eligible(one)).collect::<Option<Vec<Member>>>() else {
            return Change::None;
        };
        let ascending = members.windows(2).all(|pair| pair[0].rank < pair[1].rank);
        let names: BTreeSet<RecordId> = members.iter().map(|member| member.id).collect();
        let all_live_stay = self.live().all(|member| names.contains(&member.id));
        if !ascending || !all_live_stay {
            return Change::None;
        }
        self.enter(View { epoch, id, members });
        Change::View
    }

    /// A live member or candidate that may be in the next view.
    fn eligible(&self, proposed: &ProposedMember) -> Option<Member> {
        let is_it = |member: &&Member| member.id == proposed.id && member.rank == proposed.rank;
        let member = self.live().find(is_it);
        member.or_else(|| self.candidates.iter().filter(|one| self.may_enter(one)).find(is_it)).cloned()
    }

    fn enter(&mut self, view: View) {
        let removed = self.view.members.iter().filter(|member| view.member(member.id).is_none());
        let gone = self.candidates.iter().filter(|candidate| self.gone.contains_key(&candidate.id));
        let retired: Vec<RecordId> = removed.chain(gone).map(|member| member.id).collect();
        self.candidates.retain(|candidate| view.member(candidate.id).is_none() && !retired.contains(&candidate.id));
        for id in retired {
            self.gone.remove(&id);
            self.ready.remove(&id);
            if self.retired.len() == RETIRED_MAX {
                self.retired.pop_front();
            }
            self.retired.push_back(id);
        }
        self.ready.retain(|id| view.member(*id).is_none());
        self.view = view;
    }

    /// Takes over a snapshot of a later view than ours.
    fn adopt(&mut self, snapshot: &Snapshot) -> Change {
        let Snapshot { view, candidates, ready, gone, retired } = snapshot;
        if view.epoch == self.view.epoch && view.id != self.view.id && view.epoch != Epoch(0) {
            return Change::Diverged;
        }
        if view.epoch <= self.view.epoch {
            return Change::None;
        }
        // Joins that only this log has are kept: their processes wait.
        let mut merged = candidates.clone();
        let waiting = self.candidates.drain(..).filter(|one| {
            view.member(one.id).is_none()
                && !retired.contains(&one.id)
                && !candidates.iter().any(|own| own.id == one.id)
        });
        merged.extend(waiting);
        merged.truncate(SNAPSHOT_CANDIDATES_MAX);
        self.candidates = merged;
        let candidates = &self.candidates;
        self.ready.extend(ready);
        self.ready.retain(|id| candidates.iter().any(|candidate| candidate.id == *id));
        self.view = view.clone();
        let before = core::mem::take(&mut self.gone);
        self.gone = gone.iter().copied().collect();
        self.retired = retired.iter().copied().collect();
        // Departures that this log has said already, and the snapshot's author had not read.
        for (id, departure) in before {
            if self.process(id).is_some() {
                self.gone.entry(id).or_insert(departure);
            }
        }
        for (rank, id, body) in core::mem::take(&mut self.early) {
            self.apply(rank, id, &body);
        }
        Change::View
    }
}

#[cfg(test)]
mod tests;
