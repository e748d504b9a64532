//! What arrives: admitting, checking and placing.

use std::collections::VecDeque;

use gradwire_codec::{crc32, unpack};
use gradwire_proto::frame::{FLAG_CHECKED, FLAG_NONFINITE, FrameHeader, FrameKind, JobTag};
use gradwire_proto::limits::FRAME_HEADER_BYTES;
use gradwire_proto::session::{Admission, Session};
use gradwire_proto::{BucketId, Fault, FaultKind, Rank, UnitIndex};
use gradwire_transport::{Capabilities, Refused, Remote, Sink, Transport};

use super::memory::{Memory, local};
use super::transmit::write_token;
use super::{Engine, Slot};
use crate::types::Stats;

/// The engine's parts that a transport reports to while it is polled.
pub(super) struct Receiver<'a> {
    pub(super) session: &'a mut Session,
    pub(super) memory: &'a mut Memory,
    pub(super) slots: &'a mut [Slot],
    pub(super) capabilities: &'a [Capabilities],
    pub(super) inbox: &'a mut VecDeque<(Rank, FrameHeader)>,
    pub(super) stats: &'a mut Stats,
    pub(super) job: &'a JobTag,
    pub(super) now: u64,
}

impl Receiver<'_> {
    /// Decodes a header; after a bad one nothing that follows on this link can be trusted.
    fn header(&mut self, peer: Rank, bytes: &[u8]) -> Option<FrameHeader> {
        match FrameHeader::decode(bytes, self.job) {
            Ok(header) => Some(header),
            Err(malformed) => {
                self.session.give_up(peer, Fault::violation(peer, &format!("a frame with a bad {}", malformed.0)));
                None
            }
        }
    }

    /// Asks the session, and checks that the write goes where it must.
    fn admit_write(&mut self, peer: Rank, header: &FrameHeader, target: Remote, bytes: usize) -> bool {
        match self.session.admit(peer, header) {
            Ok(Admission::Accept) => {}
            Ok(Admission::Discard) => return false,
            Err(fault) => {
                self.session.give_up(peer, fault);
                return false;
            }
        }
        if self.expected_target(peer, header) != Some(target) {
            self.session.give_up(peer, Fault::violation(peer, "a write to a place that was not offered for it"));
            return false;
        }
        if bytes != header.payload_len as usize {
            // Cut short on the way: as good as corrupt, but there is nothing to let land.
            self.session.handle_corrupt(peer, header);
            return false;
        }
        true
    }

    /// Where an admitted frame of this peer must land.
    fn expected_target(&self, peer: Rank, header: &FrameHeader) -> Option<Remote> {
        let plan = self.session.plan();
        let memory = &self.memory.buckets[header.bucket.index()];
        let round = &self.memory.rounds[memory.round];
        if header.kind == FrameKind::Contribution {
            let landing = round.landings[peer.index()].as_ref()?;
            let offset = self.memory.landing_offset(plan, header.unit_first);
            return Some(Remote { region: landing.key(), offset });
        }
        let bytes = plan.run_bytes(header.unit_first, header.unit_count);
        let base = if plan.bucket(header.bucket).direct {
            let tensor = plan.unit(header.unit_first).tensor;
            let output = self.slots[tensor.index()].output.as_ref()?;
            gradwire_proto::frame::Location { region: output.key(), offset: 0 }
        } else {
            self.memory.staged_location(header.bucket, true)
        };
        Some(Memory::remote(base, bytes.start))
    }

    /// The payload of an admitted write, where it landed.
    fn landed(&self, peer: Rank, header: &FrameHeader, target: Remote, bytes: usize) -> Option<&[u8]> {
        let memory = &self.memory.buckets[header.bucket.index()];
        let round = &self.memory.rounds[memory.round];
        let buffer = if header.kind == FrameKind::Contribution {
            round.landings[peer.index()].as_ref()?
        } else if self.session.plan().bucket(header.bucket).direct {
            let tensor = self.session.plan().unit(header.unit_first).tensor;
            self.slots[tensor.index()].output.as_ref()?
        } else {
            &round.results
        };
        let start = usize::try_from(target.offset).ok()?;
        (buffer.key() == target.region).then(|| buffer.bytes().get(start..start.checked_add(bytes)?)).flatten()
    }
}

impl Sink for Receiver<'_> {
    fn admit(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) -> bool {
        let Some(header) = self.header(peer, immediate) else { return false };
        self.admit_write(peer, &header, target, bytes)
    }

    fn message(&mut self, peer: Rank, message: &[u8]) {
        let Some((head, body)) = message.split_at_checked(FRAME_HEADER_BYTES) else {
            self.session.give_up(peer, Fault::violation(peer, "a message shorter than a header"));
            return;
        };
        let Some(header) = self.header(peer, head) else { return };
        self.session.heard(peer, self.now);
        self.stats.wire_bytes_received += message.len() as u64;
        if matches!(header.kind, FrameKind::Contribution | FrameKind::Result) {
            self.inbox.push_back((peer, header));
            return;
        }
        if let Err(fault) = self.session.handle_message(peer, &header, body, self.now) {
            self.session.give_up(peer, fault);
        }
    }

    fn written(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) {
        let Some(header) = self.header(peer, immediate) else { return };
        self.session.heard(peer, self.now);
        self.stats.wire_bytes_received += (immediate.len() + bytes) as u64;
        // Where the transport could not ask before, it is asked now.
        let asked = self.capabilities[peer.index()].admission;
        if !asked && !self.admit_write(peer, &header, target, bytes) {
            return;
        }
        let Some(payload) = self.landed(peer, &header, target, bytes) else { return };
        if header.flags & FLAG_CHECKED == 0 || crc32(payload) != header.payload_crc {
            self.session.handle_corrupt(peer, &header);
            return;
        }
        if header.kind == FrameKind::Contribution {
            self.memory.buckets[header.bucket.index()].contribution_at[peer.index()] = header.location;
            self.session.handle_contribution(peer, &header, self.now);
            return;
        }
        match place_result(self.session, self.memory, self.slots, &header, None, self.now) {
            Ok(()) => self.session.handle_result(peer, &header),
            Err(fault) => self.session.fail(fault),
        }
    }

    fn sent(&mut self, _peer: Rank, token: u64) {
        let bucket = BucketId(token as u32);
        let in_flight = if token == write_token(self.session.config().epoch, bucket) {
            &mut self.memory.buckets[bucket.index()].writes_in_flight
        } else {
            &mut self.memory.old_writes_in_flight
        };
        *in_flight = in_flight.saturating_sub(1);
    }

    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        self.session.handle_link_down(peer, fault);
    }
}

impl Engine {
    /// Takes the frames whose data is read in place, in order.
    pub(super) fn take_in_place(&mut self, now: u64) -> usize {
        let count = self.inbox.len();
        for _ in 0..count {
            let Some((peer, header)) = self.inbox.pop_front() else { break };
            if let Err(fault) = self.take_frame(peer, &header, now) {
                self.session.give_up(peer, fault);
            }
        }
        count
    }

    /// Takes results that came another way than over their owner's link: checked against the frame that was spoilt.
    pub(crate) fn take_copies(&mut self, peer: Rank, header: &FrameHeader, data: &[u8]) {
        self.spoilt_asked.retain(|asked| asked != header);
        if data.len() != header.payload_len as usize || crc32(data) != header.payload_crc {
            // The link is asked again when the operation's patience is over.
            return;
        }
        let now = self.now();
        let placed = match self.session.admit(peer, header) {
            Ok(Admission::Accept) => {
                place_result(&mut self.session, &self.memory, &mut self.slots, header, Some(data), now)
            }
            Ok(Admission::Discard) => return,
            Err(fault) => Err(fault),
        };
        match placed {
            Ok(()) => {
                self.stats.units_from_copies += u64::from(header.unit_count);
                self.session.handle_result(peer, header);
            }
            Err(fault) => self.session.fail(fault),
        }
    }

    fn take_frame(&mut self, peer: Rank, header: &FrameHeader, now: u64) -> Result<(), Fault> {
        if self.session.admit(peer, header)? == Admission::Discard {
            return Ok(());
        }
        let place =
            Memory::remote(header.location, self.session.plan().run_bytes(header.unit_first, header.unit_count).start);
        let empty = header.payload_len == 0;
        if !empty && header.flags & FLAG_CHECKED != 0 {
            let Some(data) = view(&*self.transport, peer, place, header.payload_len)? else { return Ok(()) };
            if crc32(data) != header.payload_crc {
                self.session.handle_corrupt(peer, header);
                return Ok(());
            }
        }
        let memory = &mut self.memory.buckets[header.bucket.index()];
        if header.kind == FrameKind::Contribution {
            memory.contribution_at[peer.index()] = header.location;
            self.session.handle_contribution(peer, header, now);
            return Ok(());
        }
        let data = if empty { Some(&[][..]) } else { view(&*self.transport, peer, place, header.payload_len)? };
        let Some(data) = data else { return Ok(()) };
        place_result(&mut self.session, &self.memory, &mut self.slots, header, Some(data), now)?;
        self.session.handle_result(peer, header);
        Ok(())
    }
}

/// A peer's memory, read in place. Nothing if the link has ended: what becomes of the operation is decided when that is
/// reported.
fn view(transport: &dyn Transport, peer: Rank, place: Remote, bytes: u32) -> Result<Option<&[u8]>, Fault> {
    match transport.view(peer, place, bytes as usize) {
        Ok(data) => Ok(Some(data)),
        Err(Refused::NoLink) => Ok(None),
        Err(refused) => Err(Fault::violation(peer, &format!("the place of data that cannot be read ({refused})"))),
    }
}

/// Puts a checked result into the callers' buffers and counts its units. `data`: the result read in place; without
/// it, it has landed: in the tensor itself (direct) or in staging memory.
fn place_result(
    session: &mut Session,
    memory: &Memory,
    slots: &mut [Slot],
    header: &FrameHeader,
    data: Option<&[u8]>,
    now: u64,
) -> Result<(), Fault> {
    let run = session.plan().run_bytes(header.unit_first, header.unit_count);
    for index in header.unit_first.0..header.unit_first.0 + header.unit_count {
        let plan = session.plan();
        let unit = plan.unit(UnitIndex(index));
        let bucket = plan.bucket(unit.bucket);
        let (dtype, wire, direct) = (bucket.dtype, bucket.wire, bucket.direct);
        let wire_start = bucket.wire_bytes(unit.in_bucket);
        let wire_range = wire_start..wire_start + bucket.wire_bytes(u64::from(unit.elements));
        let native_start = unit.in_tensor * dtype.size() as u64;
        let native = local(native_start..native_start + u64::from(unit.elements) * dtype.size() as u64, 0);
        let Some(output) = slots[unit.tensor.index()].output.as_mut() else {
            return Err(Fault::new(FaultKind::ProtocolViolation, "a result for a tensor that has no buffer"));
        };
        let nonfinite = match data {
            None if direct => {
                memory.keep(session, UnitIndex(index), &output.bytes()[native]);
                header.flags & FLAG_NONFINITE != 0
            }
            Some(data) if direct => {
                let data = &data[local(wire_range.start - run.start..wire_range.end - run.start, 0)];
                output.bytes_mut()[native].copy_from_slice(data);
                memory.keep(session, UnitIndex(index), data);
                header.flags & FLAG_NONFINITE != 0
            }
            _ => {
                let source = match data {
                    Some(data) => &data[local(wire_range.start - run.start..wire_range.end - run.start, 0)],
                    None => {
                        let bucket = &memory.buckets[header.bucket.index()];
                        &memory.rounds[bucket.round].results.bytes()[local(wire_range, bucket.staged_at)]
                    }
                };
                memory.keep(session, UnitIndex(index), source);
                unpack(wire, dtype, source, &mut output.bytes_mut()[native])?
            }
        };
        session.handle_result_unit(UnitIndex(index), nonfinite, now);
    }
    Ok(())
}
