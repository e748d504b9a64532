//! What is sent: messages and data frames, with their checksums and places.

use gradwire_codec::{crc32, pack};
use gradwire_proto::frame::{FLAG_CHECKED, FrameHeader, Location};
use gradwire_proto::session::{Data, MessageBytes, Transmit};
use gradwire_proto::{BucketId, Epoch, Fault, Rank, UnitIndex};
use gradwire_transport::{Buffer, Refused, Remote, Slice};

use super::Engine;
use super::memory::{Memory, local};
use super::reduce::native_range;
use crate::types::Integrity;

/// Space for encoding.
#[derive(Debug)]
pub(super) struct Scratch {
    message: Box<MessageBytes>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { message: Box::new(MessageBytes::new()) }
    }
}

/// Names a write's memory: the bucket, and the low bits of the epoch in which it was laid out.
pub(super) const fn write_token(epoch: Epoch, bucket: BucketId) -> u64 {
    epoch.0 << 32 | bucket.0 as u64
}

impl Engine {
    pub(super) fn send_messages(&mut self) -> usize {
        let mut moved = 0;
        while let Some(peer) = self.session.peek_message(&mut self.scratch.message) {
            match self.transport.send(peer, &self.scratch.message) {
                Ok(()) => {
                    self.stats.wire_bytes_sent += self.scratch.message.len() as u64;
                    self.session.pop_message();
                    moved += 1;
                }
                Err(Refused::Full) => self.session.block(peer),
                // The end of the link is reported by the transport; the message has no receiver any more.
                Err(_) => self.session.pop_message(),
            }
        }
        moved
    }

    pub(super) fn send_data(&mut self, now: u64) -> usize {
        let mut moved = 0;
        while let Some(transmit) = self.session.poll_transmit(now) {
            match self.send_frame(&transmit) {
                Ok(Ok(())) => {
                    self.session.handle_sent(&transmit);
                    moved += 1;
                }
                Ok(Err(Refused::Invalid(what))) => {
                    let fault = Fault::violation(transmit.peer, &format!("a place that cannot be written to ({what})"));
                    self.give_up_on(&transmit, fault);
                }
                Ok(Err(_)) => {
                    self.session.handle_refused(&transmit);
                    self.session.block(transmit.peer);
                }
                Err(fault) => self.give_up_on(&transmit, fault),
            }
        }
        moved
    }

    /// What a peer asked for cannot be sent to it.
    fn give_up_on(&mut self, transmit: &Transmit, fault: Fault) {
        self.session.give_up(transmit.peer, fault);
        if self.session.fault().is_none() {
            self.session.handle_refused(transmit);
            self.session.block(transmit.peer);
        }
    }

    fn send_frame(&mut self, transmit: &Transmit) -> Result<Result<(), Refused>, Fault> {
        let plan = self.session.plan();
        let bucket = plan.bucket(transmit.bucket);
        let direct = bucket.direct;
        let mut header = self.session.header(transmit);
        let peer_read = self.capabilities[transmit.peer.index()].peer_read;
        if transmit.data == Data::Offer {
            header.location = self.result_location(transmit);
            return Ok(self.send_header(transmit.peer, &header));
        }
        if transmit.data == Data::Contribution && !direct {
            self.pack_run(transmit)?;
        }
        let run = self.session.plan().run_bytes(transmit.unit_first, transmit.unit_count);
        let bytes = (run.end - run.start) as usize;
        // To peers that write, a contribution says where the results are to go.
        if transmit.data == Data::Contribution {
            header.location = self.result_location(transmit);
        }
        if bytes == 0 {
            if peer_read {
                // The rest of the bucket is read from where this says, so it says the same as a frame with data.
                header.location =
                    self.source(transmit).map(|(source, base)| Location { region: source.key(), offset: base })?;
            }
            return Ok(self.send_header(transmit.peer, &header));
        }
        let (source, base) = self.source(transmit)?;
        let range = local(run.clone(), base);
        if !peer_read || self.integrity == Integrity::All {
            header.flags |= FLAG_CHECKED;
            header.payload_crc = self.run_crc(transmit, &source.bytes()[range.clone()]);
        }
        let taken = if peer_read {
            header.location = Location { region: source.key(), offset: base };
            self.send_header(transmit.peer, &header)
        } else {
            let slice = source.slice(range);
            self.write(transmit, &header, slice, run.start)
        };
        if taken.is_ok() {
            self.stats.payload_bytes_sent += bytes as u64;
        }
        Ok(taken)
    }

    fn write(
        &mut self,
        transmit: &Transmit,
        header: &FrameHeader,
        source: Slice,
        run_start: u64,
    ) -> Result<(), Refused> {
        let target = self.target(transmit, run_start);
        let immediate = header.encode(&self.job);
        let bytes = (immediate.len() + source.len()) as u64;
        let token = write_token(header.epoch, transmit.bucket);
        self.transport.write(transmit.peer, &immediate, source, target, token)?;
        self.memory.buckets[transmit.bucket.index()].writes_in_flight += 1;
        self.stats.wire_bytes_sent += bytes;
        Ok(())
    }

    fn send_header(&mut self, peer: Rank, header: &FrameHeader) -> Result<(), Refused> {
        let message = header.encode(&self.job);
        let taken = self.transport.send(peer, &message);
        if taken.is_ok() {
            self.stats.wire_bytes_sent += message.len() as u64;
        }
        taken
    }

    /// Packs the contribution to a run of a staged bucket into staging memory.
    fn pack_run(&mut self, transmit: &Transmit) -> Result<(), Fault> {
        let Self { session, memory, slots, .. } = self;
        let plan = session.plan();
        let bucket = plan.bucket(transmit.bucket);
        let bucket_memory = &memory.buckets[transmit.bucket.index()];
        let staging = &mut memory.rounds[bucket_memory.round].contributions;
        for index in transmit.unit_first.0..transmit.unit_first.0 + transmit.unit_count {
            let unit = plan.unit(UnitIndex(index));
            let slot = &slots[unit.tensor.index()];
            let Some(source) = slot.input.as_ref().or(slot.output.as_ref()) else { continue };
            let native = native_range(unit.in_tensor, unit.elements, bucket.dtype.size());
            let start = bucket.wire_bytes(unit.in_bucket);
            let staged = local(start..start + bucket.wire_bytes(u64::from(unit.elements)), bucket_memory.staged_at);
            pack(bucket.dtype, bucket.wire, &source.bytes()[native], &mut staging.bytes_mut()[staged])?;
        }
        Ok(())
    }

    /// The buffer that a data frame's payload is in, and where the bucket begins in it.
    fn source(&self, transmit: &Transmit) -> Result<(&Buffer, u64), Fault> {
        let result = matches!(transmit.data, Data::Result { .. });
        let plan = self.session.plan();
        if !plan.bucket(transmit.bucket).direct {
            let memory = &self.memory.buckets[transmit.bucket.index()];
            let round = &self.memory.rounds[memory.round];
            return Ok((if result { &round.results } else { &round.contributions }, memory.staged_at));
        }
        let slot = &self.slots[plan.unit(transmit.unit_first).tensor.index()];
        let buffer = if result { slot.output.as_ref() } else { slot.input.as_ref().or(slot.output.as_ref()) };
        let missing = || Fault::violation(transmit.peer, "a request for data of an operation that has ended");
        Ok((buffer.ok_or_else(missing)?, 0))
    }

    /// The checksum of a run: known already where the run is one unit of this rank's results.
    fn run_crc(&self, transmit: &Transmit, bytes: &[u8]) -> u32 {
        if matches!(transmit.data, Data::Result { .. }) && transmit.unit_count == 1 {
            return self.memory.crcs[transmit.unit_first.index()];
        }
        crc32(bytes)
    }

    /// Where a peer that writes is to put the results of this bucket.
    fn result_location(&self, transmit: &Transmit) -> Location {
        let plan = self.session.plan();
        if plan.bucket(transmit.bucket).direct {
            let slot = &self.slots[plan.unit(transmit.unit_first).tensor.index()];
            return slot
                .output
                .as_ref()
                .map_or(Location::default(), |output| Location { region: output.key(), offset: 0 });
        }
        self.memory.staged_location(transmit.bucket, true)
    }

    /// Where this frame's payload goes in the peer's memory.
    fn target(&self, transmit: &Transmit, run_start: u64) -> Remote {
        let memory = &self.memory.buckets[transmit.bucket.index()];
        if matches!(transmit.data, Data::Result { .. }) {
            return Memory::remote(memory.contribution_at[transmit.peer.index()], run_start);
        }
        let landing = self.session.landing(transmit.peer, memory.round as u32);
        let offset = self.memory.landing_offset(self.session.plan(), transmit.unit_first);
        Memory::remote(landing, offset)
    }
}
