//! Ranks that join a job that runs, and steps that are given up for want of ranks.
//!
//! A newcomer begins with what the others declared, and enters its first epoch as they enter it. Its Sync says that it is
//! new: the others come to their decision without it. The member of the lowest rank then tells it (Steps) which step every
//! tensor is at, and from there on it is a member like the others: what they do again, it does for the first time.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::state::{Outgoing, PeerState};
use super::transmit::Body;
use super::{Event, Session, SessionConfig};
use crate::fault::{Fault, FaultKind};
use crate::frame::FrameHeader;
use crate::ids::{Epoch, Rank, Step, TensorId, UnitIndex};
use crate::limits::{MESSAGE_BODY_BYTES_MAX, STEPS_MAX};
use crate::manifest::Declaration;
use crate::plan::Plan;
use crate::wire::Reader;

/// Bytes of one tensor's step.
const STEP_BYTES: usize = 8;
/// Most tensors whose steps one message tells.
pub(super) const STEPS_PER_MESSAGE: u32 = (MESSAGE_BODY_BYTES_MAX / STEP_BYTES) as u32;

/// What a newcomer was told of where the others are.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Steps that are final.
    pub(super) commits: u64,
    /// By tensor, as far as they are here.
    steps: Vec<Step>,
    by: Option<Rank>,
}

impl Session {
    /// A session of a rank that joins a running job: in epoch `config.epoch` with these members, ascending, this rank
    /// among them, and with what was declared so far, by round. It begins as after [`Session::enter`].
    ///
    /// Until [`Event::Synced`] its failure is nobody else's affair.
    #[must_use]
    pub fn newcomer(config: SessionConfig, members: &[Rank], declared: &[Vec<Declaration>]) -> Self {
        let epoch = config.epoch;
        let mut session = Self::new(SessionConfig { epoch: Epoch(epoch.0 - 1), ..config });
        session.newcomer = Some(Told::default());
        session.plan = Plan::new(members.into());
        session.seat = members.iter().position(|rank| *rank == config.rank).unwrap_or_default();
        session.peers.resize_with(session.plan.ranks().max(config.rank.index() + 1), PeerState::default);
        for round in declared {
            session.lay_out(round);
            session.rounds += 1;
        }
        session.enter(epoch, members, &[]);
        session
    }

    /// What was declared, by round, in the rounds that are over.
    #[must_use]
    pub fn declared(&self) -> &[Vec<Declaration>] {
        &self.declared[..(self.rounds as usize).min(self.declared.len())]
    }

    /// Whether nothing of the next step has begun: an epoch that begins now has nothing to do again.
    #[must_use]
    pub const fn is_between_steps(&self) -> bool {
        self.touched.is_empty() && self.committing.is_none() && !self.is_undecided() && self.declaring.is_none()
    }

    /// Whether another member has entered this epoch, or a later one, already.
    #[must_use]
    pub fn is_awaited_in(&self, epoch: Epoch) -> bool {
        self.peers.iter().any(|peer| peer.sync.as_ref().is_some_and(|sync| sync.epoch >= epoch))
    }

    /// Whether this epoch has too few members for a step to begin.
    #[must_use]
    pub fn is_small(&self) -> bool {
        self.members().len() < self.config.ranks_min as usize
    }

    /// In an epoch with too few members, once it is known what becomes of the step: what was posted of one that is not
    /// final ends, so that the caller is free while it waits for others.
    pub(super) fn rest(&mut self) {
        let detail = self.too_few();
        let aborted = !self.touched.is_empty() || self.committing.is_some();
        let fault = Fault::new(FaultKind::StepAborted, format!("{detail}: repeat the step from its beginning"));
        // First, for a caller whose operations end begins the step again at once.
        self.events.push_back(Event::Resting { fault, aborted });
        if aborted {
            self.abort_step(&detail);
        }
        // As in an epoch that begins: what is posted waits for the next.
        (self.syncing, self.suspended) = (true, true);
    }

    /// Why no step begins.
    #[must_use]
    pub fn too_few(&self) -> String {
        let needed = self.config.ranks_min;
        match self.members().len() {
            1 => format!("1 rank is left, and at least {needed} are needed to go on"),
            left => format!("{left} ranks are left, and at least {needed} are needed to go on"),
        }
    }

    /// Whether this rank knows where the others are: any but a newcomer does.
    pub(super) fn is_told(&self) -> bool {
        self.newcomer.as_ref().is_none_or(|told| told.by.is_some() && told.steps.len() == self.tensors.len())
    }

    /// Fails where newcomers are left alone, of whom nobody knows where the job was.
    pub(super) fn is_orphaned(&mut self) -> bool {
        let is_new = |peer: Rank| self.peers[peer.index()].sync.as_ref().is_some_and(|sync| sync.newcomer);
        let orphaned = self.newcomer.is_some() && self.others().all(is_new);
        if orphaned {
            let detail = "all ranks that knew where the job is were lost before they could say so: start it again from what was saved";
            self.fail(Fault::new(FaultKind::RankDied, detail));
        }
        orphaned
    }

    /// Takes over what the others came to.
    pub(super) fn take_over(&mut self, rounds: u32, now: u64) {
        if self.rounds != rounds {
            let detail = "the others declared further tensors while this rank joined: start it again";
            self.fail(Fault::new(FaultKind::OperationMismatch, detail));
            return;
        }
        let Some(Told { commits, steps, .. }) = self.newcomer.take() else { return };
        self.commits = commits;
        for (tensor, step) in (0..).map(TensorId).zip(steps) {
            let state = &mut self.tensors[tensor.index()];
            (state.step, state.base) = (step, step);
            self.expect(tensor);
        }
        self.begin_again(now);
    }

    /// Tells newcomers where all are, where that is this rank's part.
    pub(super) fn tell_newcomers(&mut self) {
        let is_new = |rank: Rank| self.peers[rank.index()].sync.as_ref().is_some_and(|sync| sync.newcomer);
        let teller = self.members().iter().copied().find(|rank| *rank == self.config.rank || !is_new(*rank));
        if teller == Some(self.config.rank) {
            let new: Vec<Rank> = self.others().filter(|rank| is_new(*rank)).collect();
            self.outgoing.extend(new.into_iter().map(|peer| Outgoing::Steps { peer, offset: 0 }));
        }
    }

    pub(super) fn write_steps(&self, offset: u32, header: &mut FrameHeader, body: &mut Body) {
        header.step = Step(self.commits);
        header.unit_first = UnitIndex(offset);
        header.unit_count = self.tensors.len() as u32;
        let rest = self.tensors.iter().skip(offset as usize).take(STEPS_PER_MESSAGE as usize);
        rest.for_each(|tensor| body.extend(tensor.step.0.to_le_bytes()));
    }

    pub(super) fn handle_steps(
        &mut self,
        peer: Rank,
        header: &FrameHeader,
        body: &[u8],
        now: u64,
    ) -> Result<(), Fault> {
        let tensors = self.tensors.len();
        let bad = |what: &str| Fault::violation(peer, &format!("word of where all are {what}"));
        let Some(told) = &mut self.newcomer else { return Err(bad("to a rank that knows")) };
        let follows = header.unit_first.0 as usize == told.steps.len() && told.by.is_none_or(|by| by == peer);
        let count = body.len() / STEP_BYTES;
        if !follows || !body.len().is_multiple_of(STEP_BYTES) || told.steps.len() + count > tensors {
            return Err(bad("that does not follow on what came before"));
        }
        if header.unit_count as usize != tensors {
            let detail = format!(
                "the others have {} tensors and this rank {tensors}: they declared further ones while it joined; start it again",
                header.unit_count
            );
            self.fail(Fault::new(FaultKind::OperationMismatch, detail));
            return Ok(());
        }
        (told.by, told.commits) = (Some(peer), header.step.0);
        let mut reader = Reader::new(body);
        for _ in 0..count {
            let step = reader.u64().ok().filter(|step| *step < STEPS_MAX).ok_or_else(|| bad("that cannot be"))?;
            told.steps.push(Step(step));
        }
        self.check_synced(now);
        Ok(())
    }
}
