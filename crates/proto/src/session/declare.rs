//! A declaration round: every rank tells every other what it declares, and, once memory is laid out, that it is
//! prepared.

use alloc::format;
use alloc::vec::Vec;
use core::mem;

use super::state::{BucketState, Outgoing, PeerState, TensorState};
use super::{Event, Session, at_first, name_ranks};
use crate::fault::{Fault, FaultKind};
use crate::frame::{FrameHeader, Location};
use crate::ids::Rank;
use crate::limits::MANIFEST_BYTES_MAX;
use crate::manifest::Declaration;

/// The round in progress.
#[derive(Debug)]
pub(super) struct Round {
    /// This rank's declarations, encoded.
    pub(super) manifest: Vec<u8>,
    pub(super) deadline: u64,
    /// The manifests were complete and are with the driver.
    reported: bool,
    /// This rank is prepared.
    pub(super) prepared: bool,
}

impl Session {
    /// Begins a declaration round with this rank's encoded [`crate::manifest::Manifest`]. [`Event::Manifests`]
    /// follows when every rank's is here; then [`Session::take_manifests`], and [`Session::prepare`].
    ///
    /// # Errors
    /// The latched fault after a failure; `RankLeft` when a rank has left; `InvalidArgument` when the manifest is too
    /// large or a round is in progress.
    pub fn declare(&mut self, manifest: Vec<u8>, now: u64, deadline_ns: Option<u64>) -> Result<(), Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        if self.declaring.is_some() {
            return Err(Fault::new(
                FaultKind::InvalidArgument,
                "tensors are being declared by another thread: one declaration at a time",
            ));
        }
        if manifest.len() > MANIFEST_BYTES_MAX {
            let detail = format!(
                "{} bytes of declarations, and at most {MANIFEST_BYTES_MAX} are possible: declare in several rounds",
                manifest.len()
            );
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let deadline = now.saturating_add(deadline_ns.unwrap_or(self.config.timing.deadline_ns));
        self.declaring = Some(Round { manifest, deadline, reported: false, prepared: false });
        // While it is not known what becomes of the step, the round waits: it begins when that is known.
        if !self.syncing {
            for peer in self.others() {
                self.outgoing.push_back(Outgoing::Manifest { peer, offset: 0 });
            }
        }
        self.check_departed_all();
        self.check_manifests();
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// Whether `peer` has not yet done its part of this round.
    pub(super) fn is_behind(&self, round: &Round, peer: Rank) -> bool {
        let state = &self.peers[peer.index()];
        if round.reported { state.rounds_ready <= self.rounds } else { !state.has_manifest() }
    }

    pub(super) fn handle_manifest(&mut self, peer: Rank, header: &FrameHeader, body: &[u8]) -> Result<(), Fault> {
        let state = &mut self.peers[peer.index()];
        let length = header.unit_count;
        if length as usize > MANIFEST_BYTES_MAX
            // A peer that is through with a round may begin the next before this rank is.
            || header.bucket.0 != self.rounds_taken
            || header.unit_first.0 as usize != state.manifest.len()
            || state.manifest_len.is_some_and(|known| known != length)
            || state.manifest.len() + body.len() > length as usize
            || (body.is_empty() && length > 0)
        {
            return Err(Fault::violation(peer, "declarations that do not follow on what it sent before"));
        }
        state.manifest_len = Some(length);
        state.manifest.extend_from_slice(body);
        self.check_manifests();
        Ok(())
    }

    fn check_manifests(&mut self) {
        let complete = self.others().all(|peer| self.peers[peer.index()].has_manifest());
        if let Some(round) = self.declaring.as_mut().filter(|round| complete && !round.reported) {
            round.reported = true;
            self.events.push_back(Event::Manifests);
        }
    }

    /// Every rank's encoded manifest, by rank, after [`Event::Manifests`].
    pub fn take_manifests(&mut self) -> Vec<Vec<u8>> {
        let own = self.declaring.as_ref().map(|round| round.manifest.clone()).unwrap_or_default();
        let take = |(peer, rank): (&mut PeerState, Rank)| {
            peer.manifest_len = None;
            let manifest = mem::take(&mut peer.manifest);
            // Whoever is no member has no say.
            if rank != self.config.rank && self.plan.members.contains(&rank) { manifest } else { own.clone() }
        };
        self.rounds_taken += 1;
        self.peers.iter_mut().zip((0..).map(Rank)).map(take).collect()
    }

    /// Adds the agreed declarations to the plan and tells every peer where its contributions are to be written
    /// (`landings`, by rank). [`Event::Prepared`] follows when every rank has got this far.
    pub fn prepare(&mut self, landings: &[Location]) {
        let Some(round) = &mut self.declaring else { return };
        round.prepared = true;
        for peer in self.others() {
            self.outgoing.push_back(Outgoing::Ready { peer, round: self.rounds, landing: landings[peer.index()] });
        }
        self.check_prepared();
    }

    /// Lays out the agreed declarations: the plan grows by them. Returns the index of the first new bucket. Where that is
    /// the first of all, no earlier memory is used, and none counts in [`Session::landing`]: an epoch that began in the
    /// middle of this round had it laid out by then.
    pub fn lay_out(&mut self, declarations: &[Declaration]) -> u32 {
        self.drop_unfinished_round();
        let first = self.plan.buckets.len();
        if first == 0 {
            for peer in &mut self.peers {
                // A peer may be prepared already.
                let ready = peer.rounds_ready.saturating_sub(self.rounds) as usize;
                peer.landings.drain(..peer.landings.len().saturating_sub(ready));
            }
        }
        self.plan.extend(declarations);
        self.declared.push(declarations.to_vec());
        let world = self.peers.len();
        while self.tensors.len() < self.plan.tensors.len() {
            self.tensors.push(TensorState::new(self.config.first_step, world));
        }
        self.add_buckets(first);
        self.priorities.resize(self.plan.buckets.len(), i32::MIN);
        for tensor in &self.plan.tensors {
            let priority = &mut self.priorities[tensor.bucket.index()];
            *priority = (*priority).max(tensor.priority);
        }
        // Nothing grows once operations run.
        self.queue.reserve(self.plan.buckets.len());
        self.active.reserve(self.plan.tensors.len());
        self.touched.reserve(self.plan.tensors.len());
        self.events.reserve(self.plan.tensors.len() + 16);
        self.outgoing.reserve(self.plan.tensors.len().min(4096) + 4 * world);
        first as u32
    }

    /// Makes the states of the plan's buckets from `first` on, before their next operations.
    pub(super) fn add_buckets(&mut self, first: usize) {
        for bucket in &self.plan.buckets[first..] {
            let units = &self.plan.units[bucket.units.start as usize..bucket.units.end as usize];
            let tensors = units.chunk_by(|a, b| a.tensor == b.tensor).count();
            let step = |unit: u32| self.tensors[self.plan.units[unit as usize].tensor.index()].step;
            self.buckets.push(BucketState::new(bucket, tensors as u32, self.config.rank, self.peers.len(), step));
        }
        let owned: usize = self.buckets.iter().map(|state| state.owned.len()).sum();
        self.work.reserve(owned);
    }

    pub(super) fn handle_ready(&mut self, peer: Rank, header: &FrameHeader) -> Result<(), Fault> {
        let first_step = self.config.first_step;
        let state = &mut self.peers[peer.index()];
        if header.bucket.0 != state.rounds_ready || header.bucket.0 > self.rounds {
            return Err(Fault::violation(peer, "word that it is prepared for another round of declarations"));
        }
        if header.step != first_step {
            let detail = format!(
                "{peer} begins with {} but this rank with {first_step}: resume every rank from the same step",
                header.step
            );
            self.fail(Fault::new(FaultKind::OperationMismatch, detail).at(peer));
            return Ok(());
        }
        state.rounds_ready += 1;
        state.landings.push(header.location);
        self.check_prepared();
        Ok(())
    }

    fn check_prepared(&mut self) {
        let ready = self.others().all(|peer| self.peers[peer.index()].rounds_ready > self.rounds);
        if ready && self.declaring.as_ref().is_some_and(|round| round.prepared) {
            self.end_round();
        }
    }

    pub(super) fn end_round(&mut self) {
        self.declaring = None;
        self.rounds += 1;
        self.events.push_back(Event::Prepared);
    }

    /// A round that was laid out, and that some member of an earlier epoch did not see to its end, begins anew.
    fn drop_unfinished_round(&mut self) {
        if self.declared.len() <= self.rounds as usize {
            return;
        }
        self.declared.truncate(self.rounds as usize);
        let tensors = self.declared.iter().map(Vec::len).sum();
        self.plan.truncate(tensors);
        self.tensors.truncate(tensors);
        self.buckets.truncate(self.plan.buckets.len());
        self.priorities.truncate(self.plan.buckets.len());
    }

    /// Begins the round in progress anew, among other members.
    pub(super) fn restart_round(&mut self) {
        let Some(round) = &mut self.declaring else { return };
        (round.reported, round.prepared) = (false, false);
        for peer in self.others() {
            self.outgoing.push_back(Outgoing::Manifest { peer, offset: 0 });
        }
        self.check_manifests();
    }

    /// Which round is in progress, or comes next.
    #[must_use]
    pub const fn round(&self) -> u32 {
        self.rounds
    }

    /// Where this rank's contributions are to be written in the memory that `peer` laid out as its `round`th since the
    /// epoch began.
    #[must_use]
    pub fn landing(&self, peer: Rank, round: u32) -> Location {
        self.peers[peer.index()].landings[round as usize]
    }

    /// The fault of a round that is past its deadline.
    pub(super) fn undeclared(&self) -> Fault {
        let Some(round) = &self.declaring else { return Fault::new(FaultKind::DeadlineExceeded, "no round") };
        let behind: Vec<Rank> = self.others().filter(|peer| self.is_behind(round, *peer)).collect();
        let detail = format!(
            "{} did not declare tensors before the deadline, while others did: every rank must declare the same tensors, in as many calls",
            name_ranks(behind.iter().copied())
        );
        let fault = Fault::new(FaultKind::NotOffered, detail);
        at_first(fault, &behind)
    }
}
