//! What arrives: which frames are admitted, and what they change.

use alloc::format;

use super::state::{Outgoing, PeerState};
use super::{Event, Recovery, Session};
use crate::dtype::Collective;
use crate::fault::{Fault, FaultKind};
use crate::frame::{FLAG_NACK_RESULT, FLAG_OFFER, FrameHeader, FrameKind, payload_crc};
use crate::ids::{BucketId, Rank, Step, TensorId, UnitIndex};

/// A peer that sends this many corrupt frames in a row is given up.
const CORRUPT_STREAK_MAX: u32 = 64;

/// What to do with the payload of a data frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is wanted: let it land, check it, place it, and report it.
    Accept,
    /// It was here before, or is of another epoch or an older step: drop it. It was counted.
    Discard,
}

impl Session {
    /// Decides on a contribution or result before its payload is touched.
    ///
    /// # Errors
    /// `ProtocolViolation` when the frame is none that a peer may send: the link should be ended.
    pub fn admit(&mut self, peer: Rank, header: &FrameHeader) -> Result<Admission, Fault> {
        if self.fault.is_some() {
            return Ok(Admission::Discard);
        }
        let PeerState { removed, given_up, .. } = self.peers[peer.index()];
        if header.epoch != self.config.epoch || self.syncing || removed || given_up {
            self.reject_stale(peer);
            return Ok(Admission::Discard);
        }
        self.check_run(peer, header)?;
        let fresh = match header.kind {
            FrameKind::Contribution => self.is_contribution_fresh(peer, header)?,
            FrameKind::Result => self.is_result_fresh(peer, header)?,
            _ => return Err(Fault::violation(peer, "a message as data")),
        };
        if fresh {
            return Ok(Admission::Accept);
        }
        self.counters.duplicates += 1;
        self.repeat_ack(peer, header);
        Ok(Admission::Discard)
    }

    /// Checks that the run exists, lies in one shard of the right owner, and has the payload that it must have.
    fn check_run(&self, peer: Rank, header: &FrameHeader) -> Result<(), Fault> {
        let bucket =
            self.plan.buckets.get(header.bucket.index()).ok_or_else(|| Fault::violation(peer, "an unknown bucket"))?;
        let last = self.check_range(peer, header)?;
        let (first, last) = (self.plan.unit(header.unit_first), self.plan.unit(last));
        let owner = if header.kind == FrameKind::Contribution { self.config.rank } else { peer };
        if first.shard != last.shard || first.owner != owner {
            return Err(Fault::violation(peer, "units that are not of one shard of the right owner"));
        }
        let offer = header.kind == FrameKind::Contribution && !bucket.contributes();
        let bytes = bucket.wire_bytes(last.in_bucket + u64::from(last.elements) - first.in_bucket);
        let (bytes, dtype) = if offer { (0, None) } else { (bytes, Some(bucket.wire)) };
        if (header.flags & FLAG_OFFER != 0) != offer || u64::from(header.payload_len) != bytes || header.dtype != dtype
        {
            return Err(Fault::violation(peer, "a payload of another size or type than the units have"));
        }
        Ok(())
    }

    /// The last unit of the header's run, if all of it lies in its bucket.
    fn check_range(&self, peer: Rank, header: &FrameHeader) -> Result<UnitIndex, Fault> {
        let bucket =
            self.plan.buckets.get(header.bucket.index()).ok_or_else(|| Fault::violation(peer, "an unknown bucket"))?;
        let first = header.unit_first.0;
        match first.checked_add(header.unit_count) {
            Some(end) if header.unit_count > 0 && first >= bucket.units.start && end <= bucket.units.end => {
                Ok(UnitIndex(end - 1))
            }
            _ => Err(Fault::violation(peer, "units outside the bucket")),
        }
    }

    fn is_contribution_fresh(&self, peer: Rank, header: &FrameHeader) -> Result<bool, Fault> {
        let contributes = self.plan.bucket(header.bucket).contributes();
        let state = &self.buckets[header.bucket.index()];
        let world = self.peers.len();
        let mut fresh = true;
        for unit in run(header) {
            let own = (unit.0 - state.owned.start) as usize;
            let tensor = &self.tensors[self.plan.unit(unit).tensor.index()];
            // A receiver that has its result may offer for the next step before this owner is through with its own.
            let (first, last) = if contributes {
                (state.expected(own), state.expected(own))
            } else if tensor.active && tensor.acks.get(peer.index()) {
                (tensor.step.next(), tensor.step.next())
            } else {
                (tensor.step, tensor.step)
            };
            if header.step > last {
                return Err(Fault::violation(peer, "a contribution to a step that cannot have begun"));
            }
            fresh &= header.step >= first && !state.arrived.get(own * world + peer.index());
        }
        Ok(fresh)
    }

    fn is_result_fresh(&self, peer: Rank, header: &FrameHeader) -> Result<bool, Fault> {
        let state = &self.buckets[header.bucket.index()];
        let mut fresh = self.plan.bucket(header.bucket).distributes();
        for unit in run(header) {
            let tensor = &self.tensors[self.plan.unit(unit).tensor.index()];
            if header.step > tensor.step {
                return Err(Fault::violation(peer, "a result of a step that has not begun"));
            }
            let received = state.received.get((unit.0 - state.units.start) as usize);
            fresh &= tensor.active && header.step == tensor.step && !received;
        }
        Ok(fresh)
    }

    /// Counts an admitted and verified contribution.
    pub fn handle_contribution(&mut self, peer: Rank, header: &FrameHeader, now: u64) {
        self.peers[peer.index()].corrupt_streak = 0;
        for unit in run(header) {
            if self.fault.is_some() {
                return;
            }
            let tensor = self.plan.unit(unit).tensor;
            self.arrive(unit, peer, header.step, header.commits);
            self.tensors[tensor.index()].progress(now);
        }
        self.enqueue(header.bucket);
    }

    /// Counts one unit of an admitted and verified result, which is in its place.
    pub fn handle_result_unit(&mut self, unit: UnitIndex, nonfinite: bool, now: u64) {
        let plan = self.plan.unit(unit);
        let state = &mut self.buckets[plan.bucket.index()];
        if !state.received.insert((unit.0 - state.units.start) as usize) {
            return;
        }
        state.unmark_contribution(unit.0);
        let tensor = &mut self.tensors[plan.tensor.index()];
        tensor.results_missing -= 1;
        tensor.nonfinite |= nonfinite;
        tensor.progress(now);
    }

    /// Ends an admitted and verified result, after [`Session::handle_result_unit`] of all its units.
    pub fn handle_result(&mut self, peer: Rank, header: &FrameHeader) {
        self.peers[peer.index()].corrupt_streak = 0;
        let acked = self.plan.bucket(header.bucket).acked;
        let mut last = None;
        for unit in run(header) {
            let tensor = self.plan.unit(unit).tensor;
            if last == Some(tensor) {
                continue;
            }
            last = Some(tensor);
            if acked && self.has_all_of(tensor, peer) {
                self.say(Outgoing::Ack { peer, tensor, step: header.step });
            }
            self.finish_if_complete(tensor);
        }
    }

    fn reject_stale(&mut self, peer: Rank) {
        self.counters.stale += 1;
        self.peers[peer.index()].rejected.stale += 1;
    }

    /// An admitted frame's payload did not match its checksum: it is asked for again.
    pub fn handle_corrupt(&mut self, peer: Rank, header: &FrameHeader) {
        self.counters.corrupt += 1;
        let state = &mut self.peers[peer.index()];
        state.rejected.corrupt += 1;
        state.corrupt_streak += 1;
        if state.corrupt_streak >= CORRUPT_STREAK_MAX {
            let detail = format!(
                "{CORRUPT_STREAK_MAX} frames in a row from {peer} did not match their checksums, however often they were sent again: check the network, the memory and the NIC between this rank and that one"
            );
            let tensor = self.plan.unit(header.unit_first).tensor;
            let fault = Fault::new(FaultKind::IntegrityExhausted, detail).at(peer);
            self.give_up(peer, fault.tensor(self.plan.tensor(tensor).name.clone()).step(header.step));
            return;
        }
        if self.config.copies && header.kind == FrameKind::Result && state.corrupt_streak > 1 {
            self.events.push_back(Event::Spoilt { peer, header: *header });
            return;
        }
        self.counters.nacked += u64::from(header.unit_count);
        self.say(Outgoing::NackRun {
            peer,
            bucket: header.bucket,
            unit_first: header.unit_first,
            unit_count: header.unit_count,
            step: header.step,
            results: header.kind == FrameKind::Result,
        });
    }

    /// Whether all results of the tensor that `owner` owns are here.
    pub(super) fn has_all_of(&self, tensor: TensorId, owner: Rank) -> bool {
        self.next_missing_result(tensor, owner).is_none()
    }

    /// The first unit of the tensor that `owner` owns and whose result is missing.
    pub(super) fn next_missing_result(&self, tensor: TensorId, owner: Rank) -> Option<u32> {
        let plan = self.plan.tensor(tensor);
        let owned = &self.plan.bucket(plan.bucket).owned[owner.index()];
        let state = &self.buckets[plan.bucket.index()];
        let (start, end) = (plan.units.start.max(owned.start), plan.units.end.min(owned.end));
        if start >= end {
            return None;
        }
        let base = state.units.start;
        state.received.next_absent((start - base) as usize, (end - base) as usize).map(|at| at as u32 + base)
    }

    /// Something came twice: perhaps its sender never saw the acknowledgement.
    fn repeat_ack(&mut self, peer: Rank, header: &FrameHeader) {
        let plan = self.plan.bucket(header.bucket);
        if !plan.acked {
            return;
        }
        let tensor = self.plan.unit(header.unit_first).tensor;
        let step = header.step;
        let state = &self.tensors[tensor.index()];
        let settled = match header.kind {
            FrameKind::Result => {
                state.step > step || (state.step == step && state.active && self.has_all_of(tensor, peer))
            }
            _ => plan.collective == Collective::ReduceScatter && self.is_used(tensor, header.bucket, step),
        };
        if settled {
            self.say(Outgoing::Ack { peer, tensor, step });
        }
    }

    /// Whether all units of the tensor that this rank owns were reduced in `step`.
    fn is_used(&self, tensor: TensorId, bucket: BucketId, step: Step) -> bool {
        let state = &self.buckets[bucket.index()];
        let units = &self.plan.tensor(tensor).units;
        (units.start.max(state.owned.start)..units.end.min(state.owned.end))
            .all(|unit| state.expected((unit - state.owned.start) as usize) > step)
    }

    /// In reduce_scatter nothing comes back that would tell contributors that they are through.
    pub(super) fn acknowledge_use(&mut self, tensor: TensorId, bucket: BucketId) {
        let step = self.tensors[tensor.index()].step;
        if self.is_used(tensor, bucket, step) {
            for peer in self.others() {
                self.say(Outgoing::Ack { peer, tensor, step });
            }
        }
    }

    /// A message arrived: its header, and the body behind it.
    ///
    /// # Errors
    /// `ProtocolViolation` when it is none that a peer may send: the link should be ended.
    pub fn handle_message(&mut self, peer: Rank, header: &FrameHeader, body: &[u8], now: u64) -> Result<(), Fault> {
        if self.fault.is_some() {
            return Ok(());
        }
        let PeerState { removed, given_up, .. } = self.peers[peer.index()];
        if given_up {
            self.reject_stale(peer);
            return Ok(());
        }
        if header.payload_len as usize != body.len() || payload_crc(body) != header.payload_crc {
            return Err(Fault::violation(peer, "a message whose body does not match its header"));
        }
        // A peer may enter an epoch before this rank hears of it. That it is gone is true in every epoch.
        let early = header.kind == FrameKind::Sync && header.epoch > self.config.epoch;
        let resigns = header.kind == FrameKind::Goodbye && !body.is_empty();
        // While too few members rest, there is no step.
        let off = self.suspended
            && !matches!(
                header.kind,
                FrameKind::Heartbeat
                    | FrameKind::Sync
                    | FrameKind::Synced
                    | FrameKind::Abort
                    | FrameKind::Goodbye
                    | FrameKind::GoodbyeAck
            );
        if removed || off || header.epoch != self.config.epoch && !early && !resigns {
            self.reject_stale(peer);
            return Ok(());
        }
        match header.kind {
            FrameKind::Heartbeat => self.handle_heartbeat(peer, header),
            FrameKind::Sync => self.handle_sync(peer, header, body, now),
            FrameKind::Synced => self.handle_synced(peer),
            FrameKind::Steps => self.handle_steps(peer, header, body, now),
            FrameKind::HasAll => self.handle_has_all(peer, header),
            FrameKind::Ack => self.handle_ack(peer, header, now),
            FrameKind::Nack => self.handle_nack(peer, header, body),
            FrameKind::Waiting => self.handle_waiting(peer, header, body, now),
            FrameKind::Abort => self.handle_abort(peer, body),
            FrameKind::Goodbye if resigns => self.handle_resignation(peer, body),
            FrameKind::Goodbye => {
                self.peers[peer.index()].left = true;
                self.peers[peer.index()].owes_goodbye_ack = true;
                self.somebody_left = true;
                self.check_departed_all();
                self.answer_goodbyes();
                Ok(())
            }
            FrameKind::GoodbyeAck => {
                self.peers[peer.index()].goodbye_acked = true;
                self.check_farewell();
                Ok(())
            }
            FrameKind::Manifest => self.handle_manifest(peer, header, body),
            FrameKind::Ready => self.handle_ready(peer, header),
            FrameKind::Contribution | FrameKind::Result => Err(Fault::violation(peer, "data as a message")),
            FrameKind::Ask | FrameKind::Give => Err(Fault::violation(peer, "what is for newcomers")),
        }
    }

    fn handle_ack(&mut self, peer: Rank, header: &FrameHeader, now: u64) -> Result<(), Fault> {
        self.check_range(peer, header)?;
        let tensor = self.plan.unit(header.unit_first).tensor;
        let state = &mut self.tensors[tensor.index()];
        if !state.active || state.step != header.step || state.acks_missing == 0 || !state.acks.insert(peer.index()) {
            return Ok(());
        }
        state.acks_missing -= 1;
        state.progress(now);
        self.settle(tensor, peer);
        self.finish_if_complete(tensor);
        Ok(())
    }

    /// `peer` has everything of this operation: nothing more is to be sent to it, and it may offer for the next.
    fn settle(&mut self, tensor: TensorId, peer: Rank) {
        let plan = self.plan.tensor(tensor);
        let bucket = self.plan.bucket(plan.bucket);
        let state = &mut self.buckets[plan.bucket.index()];
        let owned = state.owned.clone();
        for unit in plan.units.start.max(owned.start)..plan.units.end.min(owned.end) {
            let own = (unit - owned.start) as usize;
            if state.unmark_result(own, peer) {
                self.tensors[tensor.index()].results_to_send -= 1;
            }
            if !bucket.contributes() {
                state.forget_arrival(own, self.peers.len(), peer);
            }
        }
        if bucket.collective == Collective::ReduceScatter {
            let theirs = &bucket.owned[peer.index()];
            for unit in plan.units.start.max(theirs.start)..plan.units.end.min(theirs.end) {
                state.unmark_contribution(unit);
            }
        }
    }

    fn handle_nack(&mut self, peer: Rank, header: &FrameHeader, body: &[u8]) -> Result<(), Fault> {
        self.check_range(peer, header)?;
        if body.len() != (header.unit_count as usize).div_ceil(8) {
            return Err(Fault::violation(peer, "a request whose bitmap has the wrong length"));
        }
        let wanted = run(header).zip(0usize..).filter(|(_, at)| body[at / 8] & (1 << (at % 8)) != 0);
        let mut waiting = None;
        for (unit, _) in wanted {
            if header.flags & FLAG_NACK_RESULT == 0 {
                self.resend_contribution(peer, unit, header.step)?;
            } else if !self.resend_result(peer, unit, header.step)? {
                waiting = Some(self.plan.unit(unit).tensor);
            }
        }
        if let Some(tensor) = waiting {
            self.say(Outgoing::Waiting { peer, tensor, step: header.step });
        }
        self.buckets[header.bucket.index()].next_attempt();
        self.enqueue(header.bucket);
        Ok(())
    }

    fn resend_contribution(&mut self, peer: Rank, unit: UnitIndex, step: Step) -> Result<(), Fault> {
        let plan = self.plan.unit(unit);
        if plan.owner != peer {
            return Err(Fault::violation(peer, "a request for contributions that are not its own to reduce"));
        }
        let tensor = &self.tensors[plan.tensor.index()];
        let state = &mut self.buckets[plan.bucket.index()];
        let received = state.received.get((unit.0 - state.units.start) as usize);
        if tensor.active && tensor.step == step && !received && state.mark_contribution(unit.0) {
            state.ready = true;
            self.counters.resent += 1;
        }
        Ok(())
    }

    /// Returns false if the result is not there yet.
    fn resend_result(&mut self, peer: Rank, unit: UnitIndex, step: Step) -> Result<bool, Fault> {
        let plan = self.plan.unit(unit);
        if plan.owner != self.config.rank {
            return Err(Fault::violation(peer, "a request for results that this rank does not own"));
        }
        let state = &self.buckets[plan.bucket.index()];
        let own = (unit.0 - state.owned.start) as usize;
        if step >= state.expected(own) {
            return Ok(false);
        }
        if self.plan.bucket(plan.bucket).acked {
            let tensor = &self.tensors[plan.tensor.index()];
            if !tensor.active || tensor.step != step || tensor.acks.get(peer.index()) {
                // Once acknowledged, the data may be the caller's again.
                return Ok(true);
            }
            // Where it is to go comes with the peer's own part. What needs no contributions is there before that.
            if self.lacks_contribution(plan.tensor, peer) {
                let (bucket, unit_first, unit_count) = (plan.bucket, unit, 1);
                self.say(Outgoing::NackRun { peer, bucket, unit_first, unit_count, step, results: false });
                return Ok(false);
            }
        }
        if state.is_published(own, step) && self.mark_result(unit, peer) {
            self.counters.resent += 1;
        }
        Ok(true)
    }

    fn handle_waiting(&mut self, peer: Rank, header: &FrameHeader, body: &[u8], now: u64) -> Result<(), Fault> {
        self.check_range(peer, header)?;
        let tensor = self.plan.unit(header.unit_first).tensor;
        let world = self.peers.len();
        let state = &mut self.tensors[tensor.index()];
        if !state.active || state.step != header.step {
            return Ok(());
        }
        state.blamed.clear();
        for rank in (0..world).filter(|rank| body.get(rank / 8).is_some_and(|byte| byte & (1 << (rank % 8)) != 0)) {
            state.blamed.insert(rank);
        }
        state.progress_at = now;
        // Of itself a rank that left knows. What an owner says of others may be older than their goodbyes, which came
        // over other links: if it still lacks their part when they are gone, it says so itself.
        let gone = state.blamed.get(peer.index()) && self.peers[peer.index()].left;
        if gone && self.config.recovery == Recovery::Fail {
            self.fail_departed(tensor, peer);
        } else if gone {
            self.peers[peer.index()].stood_aside = true;
            self.answer_goodbyes();
        }
        Ok(())
    }

    fn handle_abort(&mut self, peer: Rank, body: &[u8]) -> Result<(), Fault> {
        let fault = Fault::decode(body).map_err(|_| Fault::violation(peer, "a fault that cannot be read"))?;
        let fault = if fault.reporter.is_none() { fault.reported_by(peer) } else { fault };
        self.fail(fault);
        Ok(())
    }
}

/// The units of the header's run.
fn run(header: &FrameHeader) -> impl Iterator<Item = UnitIndex> + use<> {
    (header.unit_first.0..header.unit_first.0 + header.unit_count).map(UnitIndex)
}
