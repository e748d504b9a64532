//! What owners do: reducing contributions, and making their own data ready to send.

use gradwire_codec::{Input, Outputs, Reduction, crc32, has_nonfinite, pack, unpack};
use gradwire_proto::session::Work;
use gradwire_proto::{Fault, FaultKind, Rank, UnitIndex};
use gradwire_transport::{Refused, Transport};

use super::memory::{Memory, RoundMemory, local};
use super::{Engine, Slot};

impl Engine {
    pub(super) fn work(&mut self, now: u64) -> usize {
        let mut moved = 0;
        while let Some(work) = self.session.poll_work() {
            moved += 1;
            let done = match work {
                Work::Reduce(unit) => self.reduce(unit),
                Work::Publish(unit) => self.publish(unit).map(Some),
            };
            match done {
                Ok(Some(nonfinite)) => self.session.handle_reduced(work, nonfinite, now),
                // What becomes of the operation is decided when the loss of the link is reported.
                Ok(None) => {}
                Err(fault) => match fault.rank {
                    Some(rank) => self.session.give_up(rank, fault),
                    None => self.session.fail(fault),
                },
            }
        }
        moved
    }

    /// Adds all contributions to a unit in rank order, into the caller's buffer and, where it is staged, into
    /// staging memory. Returns whether the result has an infinity or a NaN; nothing, if the link to a peer whose
    /// contribution is read in place has ended.
    fn reduce(&mut self, unit: UnitIndex) -> Result<Option<bool>, Fault> {
        let Self { session, memory, slots, transport, .. } = self;
        let plan = session.plan();
        let unit_plan = plan.unit(unit);
        let bucket = plan.bucket(unit_plan.bucket);
        let me = session.config().rank;
        let native = native_range(unit_plan.in_tensor, unit_plan.elements, bucket.dtype.size());
        let wire_start = bucket.wire_bytes(unit_plan.in_bucket);
        let wire_len = bucket.wire_bytes(u64::from(unit_plan.elements));
        let staged = local(wire_start..wire_start + wire_len, memory.buckets[unit_plan.bucket.index()].staged_at);
        let landed_at = memory.landing_offset(plan, unit) as usize;
        let landed = landed_at..landed_at + wire_len as usize;
        let bucket_memory = &memory.buckets[unit_plan.bucket.index()];
        let round = bucket_memory.round;
        let RoundMemory { results, landings, .. } = &mut memory.rounds[round];

        let slot = &mut slots[unit_plan.tensor.index()];
        let Slot { input, output, .. } = slot;
        let output = output.as_mut().ok_or_else(no_buffer)?;
        let peers = Peers {
            transport: &**transport,
            landings,
            contribution_at: &bucket_memory.contribution_at,
            landed,
            wire_start,
            wire_len: wire_len as usize,
        };
        let members = session.members();
        if !peers.check(members, me)? {
            return Ok(None);
        }
        let own = input.as_ref().map(|input| &input.bytes()[native.clone()]);
        let inputs = |contributor: usize| {
            let rank = members[contributor];
            if rank == me {
                own.map_or(Input::Own, Input::Native)
            } else {
                Input::Wire(peers.contribution(rank.index()))
            }
        };
        let wire_out = (!bucket.direct).then(|| &mut results.bytes_mut()[staged.clone()]);
        let outputs = Outputs { wire: wire_out, native: Some(&mut output.bytes_mut()[native.clone()]) };
        let contributors = members.len() as u32;
        let summary = Reduction::new(bucket.dtype, bucket.wire, bucket.reduce, contributors)?.run(inputs, outputs)?;
        let sent = if bucket.direct { &output.bytes()[native.clone()] } else { &results.bytes()[staged.clone()] };
        let crc = crc32(sent);
        memory.set_crc(unit, crc);
        // Borrowed anew: results are a part of the memory.
        let results = &memory.rounds[round].results;
        memory.keep(session, unit, if bucket.direct { &output.bytes()[native] } else { &results.bytes()[staged] });
        Ok(Some(summary.nonfinite))
    }

    /// Makes this rank's own data for a unit the result: rounded to the wire format in its own buffer too, so that
    /// every rank holds the same bits.
    fn publish(&mut self, unit: UnitIndex) -> Result<bool, Fault> {
        let Self { session, memory, slots, .. } = self;
        let plan = session.plan();
        let unit_plan = plan.unit(unit);
        let bucket = plan.bucket(unit_plan.bucket);
        let native = native_range(unit_plan.in_tensor, unit_plan.elements, bucket.dtype.size());
        let output = slots[unit_plan.tensor.index()].output.as_mut().ok_or_else(no_buffer)?;
        let data = &mut output.bytes_mut()[native];
        if bucket.direct {
            let nonfinite = has_nonfinite(bucket.dtype, data)?;
            let crc = crc32(data);
            memory.set_crc(unit, crc);
            memory.keep(session, unit, data);
            return Ok(nonfinite);
        }
        let wire_start = bucket.wire_bytes(unit_plan.in_bucket);
        let wire_end = wire_start + bucket.wire_bytes(u64::from(unit_plan.elements));
        let bucket_memory = &memory.buckets[unit_plan.bucket.index()];
        let staged = local(wire_start..wire_end, bucket_memory.staged_at);
        let round = bucket_memory.round;
        let packed = &mut memory.rounds[round].results.bytes_mut()[staged.clone()];
        pack(bucket.dtype, bucket.wire, data, packed)?;
        let nonfinite = unpack(bucket.wire, bucket.dtype, packed, data)?;
        let crc = crc32(packed);
        memory.set_crc(unit, crc);
        memory.keep(session, unit, &memory.rounds[round].results.bytes()[staged]);
        Ok(nonfinite)
    }
}

/// Where peers' contributions to one unit are.
struct Peers<'a> {
    transport: &'a dyn Transport,
    landings: &'a [Option<gradwire_transport::Buffer>],
    contribution_at: &'a [gradwire_proto::frame::Location],
    landed: std::ops::Range<usize>,
    wire_start: u64,
    wire_len: usize,
}

impl<'a> Peers<'a> {
    /// Checks once that every contribution can be read, so that [`Peers::contribution`] need not. False if a link has
    /// ended over which one is read.
    fn check(&self, members: &[Rank], me: Rank) -> Result<bool, Fault> {
        for rank in members.iter().filter(|rank| **rank != me) {
            match self.find(rank.index()) {
                Ok(_) => {}
                Err(Refused::NoLink) => return Ok(false),
                Err(_) => return Err(Fault::violation(*rank, "the place of a contribution that cannot be read")),
            }
        }
        Ok(true)
    }

    fn contribution(&self, rank: usize) -> &'a [u8] {
        self.find(rank).unwrap_or_default()
    }

    fn find(&self, rank: usize) -> Result<&'a [u8], Refused> {
        match &self.landings[rank] {
            _ if self.wire_len == 0 => Ok(&[]),
            Some(landing) => landing.bytes().get(self.landed.clone()).ok_or(Refused::Invalid("outside its memory")),
            None => {
                let place = Memory::remote(self.contribution_at[rank], self.wire_start);
                self.transport.view(Rank(rank as u32), place, self.wire_len)
            }
        }
    }
}

/// The bytes of a unit in its tensor's memory.
pub(super) fn native_range(in_tensor: u64, elements: u32, size: usize) -> std::ops::Range<usize> {
    let start = in_tensor as usize * size;
    start..start + elements as usize * size
}

fn no_buffer() -> Fault {
    Fault::new(FaultKind::System, "a unit is to be reduced whose tensor has no buffer: please report this as a bug")
}
