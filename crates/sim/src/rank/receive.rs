//! What arrives: admitting, checking and placing.

use gradwire_codec::unpack;
use gradwire_proto::frame::{FLAG_CHECKED, FLAG_NONFINITE, FrameHeader, FrameKind, Location};
use gradwire_proto::session::Admission;
use gradwire_proto::transfer::UnitResult;
use gradwire_proto::{Fault, FaultKind, Rank, RegionKey, UnitIndex};

use super::exchange::Exchange;
use super::regions::{beyond, crc_of, local};
use crate::mutation::Mutation;
use crate::plan::Links;
use crate::process::Context;
use crate::report::Report;

impl Exchange {
    /// Asks the session, and checks that the write goes where it must.
    pub(super) fn admit_write(&mut self, peer: Rank, header: &FrameHeader, target: Location, bytes: usize) -> bool {
        if !self.admit(peer, header) {
            return false;
        }
        if self.expected_target(peer, header) != Some(target) {
            self.session.fail(Fault::violation(peer, "a write to a place that was not offered for it"));
            return false;
        }
        if bytes != header.payload_len as usize {
            self.session.handle_corrupt(peer, header);
            return false;
        }
        true
    }

    fn admit(&mut self, peer: Rank, header: &FrameHeader) -> bool {
        match self.session.admit(peer, header) {
            Ok(Admission::Accept) => true,
            Ok(Admission::Discard) => false,
            Err(fault) => {
                self.session.fail(fault);
                false
            }
        }
    }

    /// Where an admitted frame of this peer must land.
    fn expected_target(&self, peer: Rank, header: &FrameHeader) -> Option<Location> {
        let layout = self.session.plan();
        if header.kind == FrameKind::Contribution {
            let landing = self.memory.landing(header.bucket, peer.index())?;
            let offset = self.memory.landing_offset(layout, header.unit_first);
            return Some(Location { region: landing, offset });
        }
        let run = layout.run_bytes(header.unit_first, header.unit_count);
        Some(beyond(self.result_place(header.unit_first)?, run.start))
    }

    /// Where peers are to put the results of this unit's bucket.
    pub(super) fn result_place(&self, unit: UnitIndex) -> Option<Location> {
        let layout = self.session.plan();
        let unit = layout.unit(unit);
        if layout.bucket(unit.bucket).direct && self.links == Links::Asked {
            return self.slots[unit.tensor.index()].output.map(|region| Location { region, offset: 0 });
        }
        Some(self.memory.staged(unit.bucket))
    }

    /// An admitted write has landed.
    pub(super) fn handle_written(
        &mut self,
        context: &mut Context<'_>,
        peer: Rank,
        header: &FrameHeader,
        target: Location,
    ) {
        let start = target.offset as usize;
        let landed = start..start + header.payload_len as usize;
        let mut used = (target.region, landed.clone());
        if header.kind == FrameKind::Contribution
            && let Some(checked) = self.memory.checked(header.bucket, peer.index())
            && checked != target.region
        {
            context.memory.copy((target.region, landed), (checked, start));
            used.0 = checked;
        }
        let crc = crc_of(context, used.0, used.1.clone());
        let good = header.flags & FLAG_CHECKED != 0 && crc == header.payload_crc;
        if !good && !context.has(Mutation::SkipCrc) {
            self.session.handle_corrupt(peer, header);
            return;
        }
        self.apply(context, peer, header, crc, used);
    }

    /// A frame that travels as a message.
    pub(super) fn take_message(&mut self, context: &mut Context<'_>, peer: Rank, header: &FrameHeader, body: &[u8]) {
        if !matches!(header.kind, FrameKind::Contribution | FrameKind::Result) {
            if let Err(fault) = self.session.handle_message(peer, header, body, context.now) {
                self.session.fail(fault);
            }
            return;
        }
        if !self.admit(peer, header) {
            return;
        }
        if header.payload_len != 0 {
            self.session.fail(Fault::violation(peer, "data that is to be read in place over a link that cannot"));
            return;
        }
        let nowhere = (self.memory.round(header.bucket).results, 0..0);
        self.apply(context, peer, header, 0, nowhere);
    }

    /// Counts a contribution, or places a result, that was checked.
    fn apply(
        &mut self,
        context: &mut Context<'_>,
        peer: Rank,
        header: &FrameHeader,
        crc: u32,
        used: (RegionKey, std::ops::Range<usize>),
    ) {
        let unit = self.session.plan().unit(header.unit_first);
        context.report(Report::Applied {
            from: self.peers[peer.index()].process,
            header: *header,
            crc,
            epoch: self.view.epoch,
            step: self.session.step(unit.tensor),
        });
        if header.kind == FrameKind::Contribution {
            let memory = &mut self.memory.buckets[header.bucket.index()];
            memory.contribution_at[peer.index()] = header.location;
            for unit in header.unit_first.0..header.unit_first.0 + header.unit_count {
                memory.arrival.push((unit, peer.0));
            }
            self.session.handle_contribution(peer, header, context.now);
            return;
        }
        match self.place_result(context, header, used) {
            Ok(()) => self.session.handle_result(peer, header),
            Err(fault) => self.session.fail(fault),
        }
    }

    /// Puts a checked result into its tensors and counts its units.
    fn place_result(
        &mut self,
        context: &mut Context<'_>,
        header: &FrameHeader,
        (source, landed): (RegionKey, std::ops::Range<usize>),
    ) -> Result<(), Fault> {
        let run = self.session.plan().run_bytes(header.unit_first, header.unit_count);
        for index in header.unit_first.0..header.unit_first.0 + header.unit_count {
            let layout = self.session.plan();
            let unit = layout.unit(UnitIndex(index));
            let bucket = layout.bucket(unit.bucket);
            let (dtype, wire) = (bucket.dtype, bucket.wire);
            let start = bucket.wire_bytes(unit.in_bucket) - run.start;
            let wire_range = local(&(start..start + bucket.wire_bytes(u64::from(unit.elements))), landed.start as u64);
            let native_start = unit.in_tensor as usize * dtype.size();
            let native = native_start..native_start + unit.elements as usize * dtype.size();
            let Some(output) = self.slots[unit.tensor.index()].output else {
                return Err(Fault::new(FaultKind::ProtocolViolation, "a result for a tensor that has no memory"));
            };
            let sent = if output == source { native.clone() } else { wire_range.clone() };
            let kept = self.holder.journals().then(|| context.memory.part(source, sent).unwrap_or_default().to_vec());
            let nonfinite = if output == source {
                header.flags & FLAG_NONFINITE != 0
            } else {
                let mut target = context.memory.take(output);
                let unpacked =
                    unpack(wire, dtype, context.memory.part(source, wire_range).unwrap_or(&[]), &mut target[native]);
                context.memory.put(output, target);
                unpacked?
            };
            if let Some(bytes) = kept {
                self.keep_result(UnitIndex(index), &bytes);
            }
            self.session.handle_result_unit(UnitIndex(index), nonfinite, context.now);
        }
        Ok(())
    }

    /// Keeps an allreduce's result for newcomers.
    pub(super) fn keep_result(&mut self, unit: UnitIndex, bytes: &[u8]) {
        if let Some(result) = UnitResult::of(self.session.plan(), unit, bytes) {
            self.holder.keep(self.session.commits(), self.session.config().epoch, unit, result);
        }
    }
}
