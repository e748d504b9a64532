//! What is sent, and in which order: messages first, then buckets by priority, results before contributions, peers
//! in turn.

use alloc::sync::Arc;
use alloc::vec::Vec;

use arrayvec::ArrayVec;

use super::epoch::write_sync;
use super::newcomer::STEPS_PER_MESSAGE;
use super::state::Outgoing;
use super::{Data, Session, Transmit};
use crate::frame::{FLAG_NACK_RESULT, FLAG_NONFINITE, FLAG_OFFER, FrameHeader, FrameKind, payload_crc};
use crate::ids::{BucketId, Rank, Step, TensorId, UnitIndex};
use crate::limits::{FRAME_HEADER_BYTES, MESSAGE_BODY_BYTES_MAX, MESSAGE_BYTES_MAX};

/// An encoded message: header and body.
pub type MessageBytes = ArrayVec<u8, MESSAGE_BYTES_MAX>;
pub(super) type Body = ArrayVec<u8, MESSAGE_BODY_BYTES_MAX>;

/// Most units that one request can name.
const NACK_UNITS_MAX: u32 = (MESSAGE_BODY_BYTES_MAX * 8) as u32;

impl Session {
    /// Encodes the next message whose peer is not blocked into `out` and returns its receiver. It stays the next one
    /// until [`Session::pop_message`].
    pub fn peek_message(&mut self, out: &mut MessageBytes) -> Option<Rank> {
        loop {
            let at = self.outgoing.iter().position(|message| self.may_go(message))?;
            // What is passed over is for peers that are blocked; the order for each peer stays.
            let message = self.outgoing.remove(at)?;
            if self.encode(&message, out) {
                let peer = message.peer();
                self.outgoing.push_front(message);
                return Some(peer);
            }
        }
    }

    /// The message of the last [`Session::peek_message`] was taken by the transport.
    pub fn pop_message(&mut self) {
        let Some(message) = self.outgoing.pop_front() else { return };
        let rest = match message {
            Outgoing::Manifest { peer, offset } => {
                let offset = offset + MESSAGE_BODY_BYTES_MAX as u32;
                let more = self.declaring.as_ref().is_some_and(|round| (offset as usize) < round.manifest.len());
                more.then_some(Outgoing::Manifest { peer, offset })
            }
            Outgoing::Steps { peer, offset } => {
                let offset = offset + STEPS_PER_MESSAGE;
                ((offset as usize) < self.tensors.len()).then_some(Outgoing::Steps { peer, offset })
            }
            _ => None,
        };
        if let Some(rest) = rest {
            self.outgoing.push_front(rest);
        }
    }

    fn may_go(&self, message: &Outgoing) -> bool {
        let drained = match message {
            // Ordered after everything else, so that what a peer has not got by then never comes.
            Outgoing::Goodbye(_) => self.active.is_empty() && self.queue.is_empty(),
            _ => true,
        };
        let always = matches!(
            message,
            Outgoing::Abort(_)
                | Outgoing::Resignation(_)
                | Outgoing::Heartbeat(_)
                | Outgoing::Sync { .. }
                | Outgoing::Synced(_)
                | Outgoing::Steps { .. }
        );
        let peer = message.peer().index();
        drained && (always || self.peers[peer].open) && !self.blocked.get(peer)
    }

    /// Returns false if there is nothing left to say.
    fn encode(&self, message: &Outgoing, out: &mut MessageBytes) -> bool {
        let mut body = Body::new();
        let kind = match message {
            Outgoing::Abort(_) => FrameKind::Abort,
            Outgoing::Ack { .. } => FrameKind::Ack,
            Outgoing::Nack { .. } | Outgoing::NackRun { .. } => FrameKind::Nack,
            Outgoing::Waiting { .. } => FrameKind::Waiting,
            Outgoing::Manifest { .. } => FrameKind::Manifest,
            Outgoing::Ready { .. } => FrameKind::Ready,
            Outgoing::Goodbye(_) | Outgoing::Resignation(_) => FrameKind::Goodbye,
            Outgoing::GoodbyeAck(_) => FrameKind::GoodbyeAck,
            Outgoing::Heartbeat(_) => FrameKind::Heartbeat,
            Outgoing::HasAll { .. } => FrameKind::HasAll,
            Outgoing::Sync { .. } => FrameKind::Sync,
            Outgoing::Synced(_) => FrameKind::Synced,
            Outgoing::Steps { .. } => FrameKind::Steps,
        };
        let mut header = FrameHeader::new(kind, self.config.epoch);
        match message {
            Outgoing::Goodbye(_) | Outgoing::GoodbyeAck(_) | Outgoing::Synced(_) => {}
            Outgoing::Heartbeat(_) => header.unit_count = self.beats_within_ms(),
            Outgoing::HasAll { commits, wish, .. } => {
                header.step = Step(*commits);
                header.unit_count = *wish as u32;
            }
            Outgoing::Steps { offset, .. } => self.write_steps(*offset, &mut header, &mut body),
            Outgoing::Sync { landing, .. } => {
                let Some(sync) = &self.own_sync else { return false };
                write_sync(sync, *landing, &mut header, &mut body);
            }
            Outgoing::Abort(_) | Outgoing::Resignation(_) => self.write_fault(&mut body),
            Outgoing::Ack { tensor, step, .. } => self.name_tensor(&mut header, *tensor, *step),
            Outgoing::Waiting { tensor, step, .. } => {
                self.name_tensor(&mut header, *tensor, *step);
                write_bitmap(&mut body, self.peers.len() as u32, self.missing_contributors(*tensor).map(|rank| rank.0));
            }
            Outgoing::NackRun { bucket, unit_first, unit_count, step, results, .. } => {
                header.bucket = *bucket;
                header.step = *step;
                header.unit_first = *unit_first;
                header.unit_count = (*unit_count).min(NACK_UNITS_MAX);
                header.flags = if *results { FLAG_NACK_RESULT } else { 0 };
                write_bitmap(&mut body, header.unit_count, 0..header.unit_count);
            }
            Outgoing::Nack { peer, tensor, step, results, .. } => {
                return self.write_nack(header, *peer, *tensor, *step, *results, out);
            }
            Outgoing::Manifest { offset, .. } => {
                let Some(round) = &self.declaring else { return false };
                let rest = &round.manifest[*offset as usize..];
                body.extend(rest.iter().copied().take(MESSAGE_BODY_BYTES_MAX));
                header.bucket = BucketId(self.rounds);
                header.unit_first = UnitIndex(*offset);
                header.unit_count = round.manifest.len() as u32;
            }
            Outgoing::Ready { round, landing, .. } => {
                header.bucket = BucketId(*round);
                header.step = self.config.first_step;
                header.location = *landing;
            }
        }
        self.seal(header, &body, out);
        true
    }

    fn seal(&self, mut header: FrameHeader, body: &[u8], out: &mut MessageBytes) {
        header.payload_len = body.len() as u32;
        header.payload_crc = payload_crc(body);
        out.clear();
        out.extend(header.encode(&self.config.job));
        debug_assert_eq!(out.len(), FRAME_HEADER_BYTES);
        out.extend(body.iter().copied());
    }

    fn name_tensor(&self, header: &mut FrameHeader, tensor: TensorId, step: Step) {
        let plan = self.plan.tensor(tensor);
        header.bucket = plan.bucket;
        header.unit_first = UnitIndex(plan.units.start);
        header.unit_count = 1;
        header.step = step;
    }

    fn write_fault(&self, body: &mut Body) {
        let Some(fault) = &self.fault else { return };
        let mut fault = fault.clone();
        fault.reporter.get_or_insert(self.config.rank);
        let mut bytes = Vec::new();
        fault.encode(&mut bytes);
        body.extend(bytes.into_iter().take(MESSAGE_BODY_BYTES_MAX));
    }

    /// A request for all of the tensor that is still missing from `peer`, from the first missing unit on.
    fn write_nack(
        &self,
        mut header: FrameHeader,
        peer: Rank,
        tensor: TensorId,
        step: Step,
        results: bool,
        out: &mut MessageBytes,
    ) -> bool {
        let state = &self.tensors[tensor.index()];
        let plan = self.plan.tensor(tensor);
        let bucket = &self.buckets[plan.bucket.index()];
        let owned = if results { &self.plan.bucket(plan.bucket).owned[peer.index()] } else { &bucket.owned };
        let range = plan.units.start.max(owned.start)..plan.units.end.min(owned.end);
        let world = self.peers.len();
        let is_missing = |unit: &u32| {
            if results {
                return !bucket.received.get((*unit - bucket.units.start) as usize);
            }
            let own = (*unit - bucket.owned.start) as usize;
            !bucket.is_published(own, step) && !bucket.arrived.get(own * world + peer.index())
        };
        let Some(first) = range.clone().find(is_missing) else { return false };
        if !state.active || state.step != step {
            return false;
        }
        header.bucket = plan.bucket;
        header.step = step;
        header.unit_first = UnitIndex(first);
        header.unit_count = (range.end - first).min(NACK_UNITS_MAX);
        header.flags = if results { FLAG_NACK_RESULT } else { 0 };
        let mut body = Body::new();
        let end = first + header.unit_count;
        write_bitmap(&mut body, header.unit_count, (first..end).filter(is_missing).map(|unit| unit - first));
        self.seal(header, &body, out);
        true
    }

    /// The next data frame to send to a peer that is not blocked.
    pub fn poll_transmit(&mut self, now: u64) -> Option<Transmit> {
        let mut at = 0;
        while let Some(bucket) = self.queue.get(at).copied() {
            let state = &self.buckets[bucket.index()];
            if state.contributions_to_send == 0 && state.results_to_send == 0 {
                self.buckets[bucket.index()].queued = false;
                self.queue.remove(at);
                continue;
            }
            let results = state.results_to_send > 0;
            let contributions = state.contributions_to_send > 0 && (state.ready || now >= state.hold_until);
            let found = results.then(|| self.next_result(bucket)).flatten();
            let found = found.or_else(|| contributions.then(|| self.next_contribution(bucket)).flatten());
            if found.is_some() {
                return found;
            }
            at += 1;
        }
        None
    }

    /// Peers in the order of their turns in this bucket.
    fn turns(&self, bucket: BucketId) -> impl Iterator<Item = Rank> + use<> {
        let (members, me, turn) =
            (Arc::clone(&self.plan.members), self.seat, self.buckets[bucket.index()].turn as usize);
        let others = members.len() - 1;
        (0..others).map(move |at| members[(me + 1 + (turn + at) % others) % members.len()])
    }

    fn next_result(&mut self, bucket: BucketId) -> Option<Transmit> {
        for peer in self.turns(bucket) {
            if self.blocked.get(peer.index()) || !self.peers[peer.index()].open {
                continue;
            }
            let state = &mut self.buckets[bucket.index()];
            let Some(own) = state.next_result(peer, 0) else { continue };
            let first = state.owned.start + own as u32;
            let step = before(state.expected(own));
            let nonfinite = state.is_nonfinite(own);
            let shard = self.plan.units[first as usize].shard;
            let mut end = first;
            while end < state.owned.end
                && self.plan.units[end as usize].shard == shard
                && before(state.expected((end - state.owned.start) as usize)) == step
                && state.unmark_result((end - state.owned.start) as usize, peer)
            {
                end += 1;
            }
            state.turn = (state.turn + 1) % (self.plan.members.len() as u32 - 1);
            return Some(Transmit {
                peer,
                data: Data::Result { nonfinite },
                bucket,
                unit_first: UnitIndex(first),
                unit_count: end - first,
                step,
                attempt: state.attempt,
                commits: 0,
            });
        }
        None
    }

    fn next_contribution(&mut self, bucket: BucketId) -> Option<Transmit> {
        let contributes = self.plan.bucket(bucket).contributes();
        for peer in self.turns(bucket) {
            if self.blocked.get(peer.index()) || !self.peers[peer.index()].open {
                continue;
            }
            let owned = self.plan.bucket(bucket).owned[peer.index()].clone();
            let state = &mut self.buckets[bucket.index()];
            let Some(first) = state.next_contribution(&owned) else { continue };
            let me = self.config.rank.index();
            let of = |unit: u32| {
                let tensor = &self.tensors[self.plan.units[unit as usize].tensor.index()];
                (tensor.step, tensor.commits[me])
            };
            let shard = self.plan.units[first as usize].shard;
            let (step, commits) = of(first);
            let mut end = first;
            while end < owned.end
                && self.plan.units[end as usize].shard == shard
                && of(end) == (step, commits)
                && state.unmark_contribution(end)
            {
                end += 1;
            }
            state.turn = (state.turn + 1) % (self.plan.members.len() as u32 - 1);
            return Some(Transmit {
                peer,
                data: if contributes { Data::Contribution } else { Data::Offer },
                bucket,
                unit_first: UnitIndex(first),
                unit_count: end - first,
                step,
                attempt: state.attempt,
                commits,
            });
        }
        None
    }

    /// The header of a data frame, but for its place and its checksum.
    #[must_use]
    pub fn header(&self, transmit: &Transmit) -> FrameHeader {
        let kind =
            if matches!(transmit.data, Data::Result { .. }) { FrameKind::Result } else { FrameKind::Contribution };
        let mut header = FrameHeader::new(kind, self.config.epoch);
        header.bucket = transmit.bucket;
        header.unit_first = transmit.unit_first;
        header.unit_count = transmit.unit_count;
        header.step = transmit.step;
        header.attempt = transmit.attempt;
        header.commits = transmit.commits;
        if transmit.data == Data::Offer {
            header.flags = FLAG_OFFER;
            return header;
        }
        if transmit.data == (Data::Result { nonfinite: true }) {
            header.flags = FLAG_NONFINITE;
        }
        let run = self.plan.run_bytes(transmit.unit_first, transmit.unit_count);
        header.dtype = Some(self.plan.bucket(transmit.bucket).wire);
        header.payload_len = (run.end - run.start) as u32;
        header
    }

    /// The transport took this frame.
    pub fn handle_sent(&mut self, transmit: &Transmit) {
        if !matches!(transmit.data, Data::Result { .. }) {
            return;
        }
        for unit in transmit.unit_first.0..transmit.unit_first.0 + transmit.unit_count {
            let tensor = self.plan.units[unit as usize].tensor;
            self.tensors[tensor.index()].results_to_send -= 1;
            self.finish_if_complete(tensor);
        }
    }

    /// The transport did not take this frame: it is offered again later.
    pub fn handle_refused(&mut self, transmit: &Transmit) {
        let state = &mut self.buckets[transmit.bucket.index()];
        for unit in transmit.unit_first.0..transmit.unit_first.0 + transmit.unit_count {
            if matches!(transmit.data, Data::Result { .. }) {
                state.mark_result((unit - state.owned.start) as usize, transmit.peer);
            } else {
                state.ready = true;
                state.mark_contribution(unit);
            }
        }
        self.enqueue(transmit.bucket);
    }

    /// Sends nothing to `peer` until [`Session::unblock`]: its queue is full.
    pub fn block(&mut self, peer: Rank) {
        self.blocked.insert(peer.index());
    }

    /// Queues may have drained.
    pub fn unblock(&mut self) {
        self.blocked.clear();
    }

    /// Marks a result of an owned unit as to be sent; returns whether it was not already.
    pub(super) fn mark_result(&mut self, unit: UnitIndex, peer: Rank) -> bool {
        let plan = self.plan.unit(unit);
        let state = &mut self.buckets[plan.bucket.index()];
        let new = state.mark_result((unit.0 - state.owned.start) as usize, peer);
        if new {
            self.tensors[plan.tensor.index()].results_to_send += 1;
            self.enqueue(plan.bucket);
        }
        new
    }

    /// Puts a bucket that has something to send in its place in the queue.
    pub(super) fn enqueue(&mut self, bucket: BucketId) {
        let state = &mut self.buckets[bucket.index()];
        if state.queued || (state.contributions_to_send == 0 && state.results_to_send == 0) {
            return;
        }
        state.queued = true;
        let priority = self.priorities[bucket.index()];
        let at = self.queue.partition_point(|other| self.priorities[other.index()] >= priority);
        self.queue.insert(at, bucket);
    }
}

/// The step whose result is published when `expected` is the next.
fn before(expected: Step) -> Step {
    Step(expected.0.saturating_sub(1))
}

fn write_bitmap(body: &mut Body, len: u32, members: impl Iterator<Item = u32>) {
    body.extend((0..len.div_ceil(8)).map(|_| 0));
    for member in members {
        body[member as usize / 8] |= 1 << (member % 8);
    }
}
