//! What a rendezvous says when it fails: the fault that names what was wrong and what to do.

use gradwire_proto::membership::View;
use gradwire_proto::{Fault, FaultKind, Rank};

use super::Rendezvous;

impl Rendezvous {
    pub(super) fn other_secret(&self) -> Fault {
        let me = self.me.rank;
        let detail = format!(
            "no record of the other ranks of job '{}' verifies with the secret of {me}: give all ranks the same \
             secret (the launcher makes one for each launch)",
            self.me.job
        );
        Fault::new(FaultKind::SecretMismatch, detail).at(me)
    }

    pub(super) fn name_taken(&self) -> Fault {
        let detail = format!(
            "a live job named '{}' is on this broker: end it, or give this job another name or namespace",
            self.me.job
        );
        Fault::new(FaultKind::JobNameTaken, detail)
    }

    pub(super) fn taken_twice(&self, rank: Rank) -> Fault {
        let detail = format!(
            "two processes joined job '{}' as {rank}: give each process its own rank, from 0 to {}",
            self.me.job,
            self.me.world_size - 1
        );
        Fault::new(FaultKind::WorldMismatch, detail).at(rank)
    }

    pub(super) fn deadline_fault(&self) -> Fault {
        let missing: Vec<Rank> =
            (0..self.me.world_size).map(Rank).filter(|rank| self.joined(*rank).is_none()).collect();
        let seconds = self.deadline_after.as_secs_f64();
        if self.log().view().epoch.0 > 0 {
            return self.not_taken_in(self.log().view(), seconds);
        }
        let Some(first) = missing.first() else {
            let detail = format!(
                "all {} ranks of job '{}' joined, but the members were not agreed on within {seconds} s: is the \
                 broker overloaded?",
                self.me.world_size, self.me.job
            );
            return Fault::new(FaultKind::DeadlineExceeded, detail);
        };
        let mut detail = format!(
            "{} of {} ranks have not joined job '{}' within {seconds} s: {}; are they running, with the same job \
             name, instance and broker?",
            missing.len(),
            self.me.world_size,
            self.me.job,
            list(&missing)
        );
        let other_secret: Vec<Rank> = missing.iter().copied().filter(|rank| self.unverified.contains(rank)).collect();
        if !other_secret.is_empty() {
            let records = format!(" Records came from {} that do not verify: another secret?", list(&other_secret));
            detail.push_str(&records);
        }
        Fault::new(FaultKind::DeadlineExceeded, detail).at(*first)
    }

    /// A Join with another world size.
    pub(super) fn other_world_size(&self, rank: Rank, world_size: u32) -> Fault {
        let detail = format!(
            "{rank} joined job '{}' with world size {world_size}, but {} has world size {}: start all ranks with \
             the same world size",
            self.me.job, self.me.rank, self.me.world_size
        );
        Fault::new(FaultKind::WorldMismatch, detail).at(rank)
    }

    /// A newcomer that a running job did not take in.
    fn not_taken_in(&self, view: &View, seconds: f64) -> Fault {
        let reason = match view.rank(self.me.rank) {
            Some(member) => format!(
                "{} is held by a process on '{}' that is neither gone nor suspected",
                self.me.rank, member.endpoint.hostname
            ),
            None => "its members did not agree on a next epoch".to_owned(),
        };
        let detail = format!(
            "job '{}' runs ({}, {} members) and did not take this process in within {seconds} s: {reason}",
            self.me.job,
            view.epoch,
            view.members.len()
        );
        Fault::new(FaultKind::DeadlineExceeded, detail).at(self.me.rank)
    }

    /// The others went on without this process.
    pub(super) fn removed(&self) -> Fault {
        let why = self.unwanted.as_deref().unwrap_or("it was silent or cut off for too long");
        let detail = format!(
            "the others went on without {} in {} ({why}): start it again to take part",
            self.me.rank,
            self.log().view().epoch
        );
        Fault::new(FaultKind::Removed, detail).at(self.me.rank)
    }

    /// A member does not want this process, which is none yet.
    pub(super) fn refused(&self, by: Rank) -> Fault {
        let why = self.unwanted.as_deref().unwrap_or("it does not say why");
        let detail = format!("{by} does not take this process into job '{}': {why}", self.me.job);
        Fault::new(FaultKind::Removed, detail).at(self.me.rank)
    }

    /// This process joined a job whose members stay as they are, after these were decided. Whether the one of this rank
    /// lives is not known: that it left may come later in the log.
    pub(super) fn too_late(&self) -> Fault {
        let rank = self.me.rank;
        let Fault { detail: twice, .. } = self.taken_twice(rank);
        let Fault { detail: late, .. } = self.nobody_joins(rank);
        Fault::new(FaultKind::WorldMismatch, format!("{twice}; if the other is gone: {late}")).at(rank)
    }

    /// A process joined a running job whose members stay as they are.
    pub(super) fn nobody_joins(&self, rank: Rank) -> Fault {
        let detail = format!(
            "job '{}' runs already, and {rank} cannot join it: that takes GRADWIRE_RECOVERY=redo or abort (or \
             Builder::recovery) on every rank; where the job is over, start all its ranks again",
            self.me.job
        );
        Fault::new(FaultKind::WorldMismatch, detail).at(rank)
    }

    /// This process joined a job whose members have all ended.
    pub(super) fn over(&self) -> Fault {
        let detail = format!(
            "job '{}' is over: its last ranks left in good order, and none is left that has its state",
            self.me.job
        );
        Fault::new(FaultKind::RankLeft, detail)
    }

    /// Two views of one epoch.
    pub(super) fn diverged(&self) -> Fault {
        let detail = format!(
            "the broker lost the control log of job '{}', and ranks had gone on with different members of {}: start \
             the job again from its last checkpoint, and keep the log on a broker that stores it (--data-dir, or an \
             Apache Pulsar cluster)",
            self.me.job,
            self.log().view().epoch
        );
        Fault::new(FaultKind::Diverged, detail)
    }
}

/// A fault for a rank that speaks another version.
pub(super) fn version(rank: Rank, what: &str, theirs: u16, ours: u16) -> Fault {
    let detail =
        format!("{rank} speaks {what} version {theirs}, this rank version {ours}: run the same gradwire on every rank");
    Fault::new(FaultKind::ProtocolVersion, detail).at(rank)
}

/// Ranks for people: at most 16 of them.
fn list(ranks: &[Rank]) -> String {
    let mut text = ranks.iter().take(16).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() > 16 {
        text.push_str(", ...");
    }
    text
}
