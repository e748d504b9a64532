//! Until the members are decided, and what becomes of processes that join later: who fits, what ends the job for all, and
//! what is one process's own affair.

use std::time::{Duration, Instant};

use gradwire_proto::membership::{Body, Change, FIRST_EPOCH, Member, RecordId};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank};

use super::{PROPOSE_GRACE, PROTOCOL_VERSION, Policy, Rendezvous, State, grace, words};

/// How long another job has to answer.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long ranks whose records do not verify have to show ones that do, before the secret is called different.
pub(super) const SUSPECT_GRACE: Duration = Duration::from_secs(1);

impl Rendezvous {
    /// Whether a process may take part at all.
    pub(super) fn check_join(&self, rank: Rank, world_size: u32, protocol: u16) -> Result<(), Fault> {
        if protocol != PROTOCOL_VERSION {
            return Err(words::version(rank, "protocol", protocol, PROTOCOL_VERSION));
        }
        if world_size != self.me.world_size {
            return Err(self.other_world_size(rank, world_size));
        }
        let ranks_max = self.me.policy.ranks_max(world_size);
        if rank.0 >= ranks_max {
            let detail = format!("{rank} joined a job of {ranks_max} ranks at most: ranks count from 0");
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(rank));
        }
        Ok(())
    }

    pub(super) fn handle_join(&mut self, now: Instant, rank: Rank, id: RecordId, change: &Change) {
        if id == self.me.join_id {
            self.others.seen_self(now);
        }
        if *change == Change::RankTaken {
            self.conflict(self.taken_twice(rank));
        }
        let fixed = self.me.policy == Policy::Fixed && matches!(self.state, State::Member);
        if fixed && matches!(change, Change::Candidate | Change::RankTaken) {
            self.turn_away(id, self.nobody_joins(rank));
        }
        self.weigh_completeness(now);
        self.weigh_lateness();
    }

    /// Whether there is a process for each rank that the job starts with.
    pub(super) fn weigh_completeness(&mut self, now: Instant) {
        if self.is_undecided() && self.log().next_members().len() == self.me.world_size as usize {
            self.complete_at.get_or_insert(now);
        }
    }

    /// A process that does not fit joined. Before the members were decided that ends the job on every rank; one that joins
    /// a running job is told why by its first member, and is nobody else's affair.
    pub(super) fn turn_away(&mut self, id: RecordId, fault: Fault) {
        let is_first = self.log().live().next().is_some_and(|first| first.id == self.me.join_id);
        if self.is_undecided() {
            self.fail(fault);
        } else if is_first && matches!(self.state, State::Member) && self.log().view().member(id).is_none() {
            let (author, epoch) = (self.me.join_id, self.log().view().epoch);
            self.append(Body::Suspect { author, epoch, member: id, reason: fault.detail });
        }
    }

    /// Whether this process turns out to have joined a job that runs.
    pub(super) fn weigh_lateness(&mut self) {
        let waits = self.log().candidates().iter().any(|candidate| candidate.id == self.me.join_id);
        let elastic = matches!(self.me.policy, Policy::Elastic { .. });
        if elastic && waits && matches!(self.state, State::Joining) && self.log().view().epoch >= FIRST_EPOCH {
            self.state = State::Late;
        }
    }

    /// Whether the members of the first epoch are not known yet.
    pub(super) fn is_undecided(&self) -> bool {
        matches!(self.state, State::Joining) && self.log().view().epoch == Epoch(0)
    }

    /// What stands in the log before the members were decided ends the job on every rank; later it is the affair of
    /// the rank that wrote it.
    pub(super) fn conflict(&mut self, fault: Fault) {
        if self.is_undecided() {
            self.fail(fault);
        }
    }

    pub(super) fn first_propose_at(&self) -> Option<Instant> {
        if self.proposed || !self.is_undecided() || self.replica.is_lost() {
            return None;
        }
        let ready = self.complete_at?.max(self.others.clear_at(ANSWER_MAX)?);
        Some(ready + grace(PROPOSE_GRACE, self.me.rank.0))
    }

    /// The process that joined as this rank, and can be counted on.
    pub(super) fn joined(&self, rank: Rank) -> Option<&Member> {
        self.log().next_members().into_iter().find(|member| member.rank == rank)
    }

    /// If nothing of all the others verifies, it is this rank that has another secret. The others cannot conclude
    /// anything from *our* records: an outsider could write such ones, and must not be able to end a job. They name
    /// us when their deadline has passed.
    pub(super) fn weigh_suspicion(&mut self, now: Instant) {
        let mut others = (0..self.me.world_size).map(Rank).filter(|rank| *rank != self.me.rank).peekable();
        let all_unverified = others.peek().is_some()
            && others.all(|rank| self.unverified.contains(&rank) && self.joined(rank).is_none());
        self.suspect_at = all_unverified.then(|| self.suspect_at.unwrap_or(now + SUSPECT_GRACE));
    }
}
