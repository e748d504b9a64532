//! What owners do, and what is sent: adding up in rank order, packing, checksums, places.

use gradwire_codec::{Input, Outputs, Reduction, crc32, has_nonfinite, pack, unpack};
use gradwire_proto::frame::{FLAG_CHECKED, FrameHeader, Location};
use gradwire_proto::session::{Data, Transmit, Work};
use gradwire_proto::{Fault, FaultKind, RegionKey, UnitIndex};

use super::exchange::Exchange;
use super::regions::{beyond, crc_of, local};
use crate::mutation::Mutation;
use crate::process::{Context, Out};

impl Exchange {
    pub(super) fn work(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(work) = self.session.poll_work() {
            moved = true;
            let done = match work {
                Work::Reduce(unit) => self.reduce(context, unit),
                Work::Publish(unit) => self.publish(context, unit),
            };
            match done {
                Ok(nonfinite) => self.session.handle_reduced(work, nonfinite, context.now),
                Err(fault) => self.session.fail(fault),
            }
        }
        moved
    }

    /// Adds all contributions to a unit in rank order.
    fn reduce(&mut self, context: &mut Context<'_>, unit: UnitIndex) -> Result<bool, Fault> {
        let layout = self.session.plan();
        let plan = layout.unit(unit);
        let bucket = layout.bucket(plan.bucket);
        let me = self.me().index();
        let wire = bucket.wire_bytes(plan.in_bucket)..bucket.wire_bytes(plan.in_bucket + u64::from(plan.elements));
        let wire_len = (wire.end - wire.start) as usize;
        let native = native_range(plan.in_tensor, plan.elements, bucket.dtype.size());
        let staged = local(&wire, self.memory.buckets[plan.bucket.index()].staged_at);
        let landed_at = self.memory.landing_offset(layout, unit) as usize;
        let slot = self.slots[plan.tensor.index()];
        let output_key = slot.output.ok_or_else(no_memory)?;

        let results_key = self.memory.round(plan.bucket).results;
        let mut results = context.memory.take(results_key);
        let mut output = context.memory.take(output_key);
        let own: Option<&[u8]> = slot.input.map(|input| &context.memory.get(input)[native.clone()]);
        let order = self.order(context, plan.bucket.index(), unit);
        let contribution = |rank: usize| -> &[u8] {
            let part = self
                .memory
                .checked(plan.bucket, rank)
                .and_then(|key| context.memory.part(key, landed_at..landed_at + wire_len));
            part.unwrap_or(&[])
        };
        // A planted bug moves this rank's own contribution too: it has to be out of the way of the result.
        let copy = output[native.clone()].to_vec();
        let inputs = |at: usize| {
            let rank = order[at];
            if rank == me { own.map_or(Input::Native(&copy), Input::Native) } else { Input::Wire(contribution(rank)) }
        };
        let wire_out = (!bucket.direct).then(|| &mut results[staged.clone()]);
        let outputs = Outputs { wire: wire_out, native: Some(&mut output[native.clone()]) };
        let contributors = order.len() as u32;
        let reduction = Reduction::new(bucket.dtype, bucket.wire, bucket.reduce, contributors);
        let summary = reduction.and_then(|reduction| reduction.run(inputs, outputs));
        let sent = if bucket.direct { &output[native] } else { &results[staged] };
        let crc = crc32(sent);
        let kept = self.holder.journals().then(|| sent.to_vec());
        context.memory.put(results_key, results);
        context.memory.put(output_key, output);
        self.memory.set_crc(unit, crc);
        self.memory.buckets[plan.bucket.index()].arrival.retain(|(other, _)| *other != unit.0);
        if let Some(bytes) = kept {
            self.keep_result(unit, &bytes);
        }
        Ok(summary?.nonfinite)
    }

    /// The ranks in the order in which their contributions are added: each once, ascending.
    fn order(&self, context: &Context<'_>, bucket: usize, unit: UnitIndex) -> Vec<usize> {
        let mut order: Vec<usize> = self.session.members().iter().map(|rank| rank.index()).collect();
        if context.has(Mutation::ArrivalOrder) {
            let arrival = self.memory.buckets[bucket].arrival.iter().filter(|(other, _)| *other == unit.0);
            order = arrival.map(|(_, rank)| *rank as usize).collect();
            order.insert(order.len() / 2, self.me().index());
        }
        if context.has(Mutation::CountTwice) && order.len() > 2 {
            order.push(order[0]);
        }
        order
    }

    /// Makes this rank's own data for a unit the result.
    fn publish(&mut self, context: &mut Context<'_>, unit: UnitIndex) -> Result<bool, Fault> {
        let layout = self.session.plan();
        let plan = layout.unit(unit);
        let bucket = layout.bucket(plan.bucket);
        let native = native_range(plan.in_tensor, plan.elements, bucket.dtype.size());
        let wire = bucket.wire_bytes(plan.in_bucket)..bucket.wire_bytes(plan.in_bucket + u64::from(plan.elements));
        let staged = local(&wire, self.memory.buckets[plan.bucket.index()].staged_at);
        let output_key = self.slots[plan.tensor.index()].output.ok_or_else(no_memory)?;
        if bucket.direct {
            let data = &context.memory.get(output_key)[native];
            let nonfinite = has_nonfinite(bucket.dtype, data);
            self.memory.set_crc(unit, crc32(data));
            return nonfinite;
        }
        let results_key = self.memory.round(plan.bucket).results;
        let mut results = context.memory.take(results_key);
        let packed = &mut results[staged];
        let data = &mut context.memory.get_mut(output_key)[native];
        let nonfinite = pack(bucket.dtype, bucket.wire, data, packed)
            .and_then(|()| unpack(bucket.wire, bucket.dtype, packed, data));
        self.memory.set_crc(unit, crc32(packed));
        context.memory.put(results_key, results);
        nonfinite
    }

    pub(super) fn send_frame(&mut self, context: &mut Context<'_>, transmit: &Transmit) -> Result<(), Fault> {
        let layout = self.session.plan();
        let bucket = layout.bucket(transmit.bucket);
        let direct = bucket.direct;
        let result = matches!(transmit.data, Data::Result { .. });
        let mut header = self.session.header(transmit);
        let run = layout.run_bytes(transmit.unit_first, transmit.unit_count);
        if !result {
            header.location = self.result_place(transmit.unit_first).unwrap_or_default();
        }
        if transmit.data == Data::Offer {
            self.send_header(context, transmit, &header);
            return Ok(());
        }
        if transmit.data == Data::Contribution && !direct {
            self.pack_run(context, transmit)?;
        }
        if header.payload_len == 0 {
            self.send_header(context, transmit, &header);
            return Ok(());
        }
        let (source, base) = self.source(transmit)?;
        let range = local(&run, base);
        header.flags |= FLAG_CHECKED;
        header.payload_crc = if result && transmit.unit_count == 1 {
            self.memory.crcs[transmit.unit_first.index()]
        } else {
            crc_of(context, source, range.clone())
        };
        let target = self.target(transmit, run.start);
        let immediate = Box::new(header.encode(&super::exchange::JOB));
        let peer = &mut self.peers[transmit.peer.index()];
        peer.writes_waiting += 1;
        self.memory.buckets[transmit.bucket.index()].writes_in_flight += 1;
        let token = self.view.epoch.0 << 32 | u64::from(transmit.bucket.0);
        context.out.push(Out::Write { to: peer.process, immediate, target, source: (source, range), token });
        Ok(())
    }

    fn send_header(&self, context: &mut Context<'_>, transmit: &Transmit, header: &FrameHeader) {
        let to = self.peers[transmit.peer.index()].process;
        context.out.push(Out::Message { to, bytes: header.encode(&super::exchange::JOB).into() });
    }

    /// Packs the contribution to a run of a staged bucket.
    fn pack_run(&mut self, context: &mut Context<'_>, transmit: &Transmit) -> Result<(), Fault> {
        let layout = self.session.plan();
        let bucket = layout.bucket(transmit.bucket);
        let base = self.memory.buckets[transmit.bucket.index()].staged_at;
        let key = self.memory.round(transmit.bucket).contributions;
        let mut staging = context.memory.take(key);
        let mut packed = Ok(());
        for index in transmit.unit_first.0..transmit.unit_first.0 + transmit.unit_count {
            let unit = layout.unit(UnitIndex(index));
            let slot = self.slots[unit.tensor.index()];
            let Some(source) = slot.input.or(slot.output) else { continue };
            let native = native_range(unit.in_tensor, unit.elements, bucket.dtype.size());
            let start = bucket.wire_bytes(unit.in_bucket);
            let staged = local(&(start..start + bucket.wire_bytes(u64::from(unit.elements))), base);
            let source = &context.memory.get(source)[native];
            packed = packed.and_then(|()| pack(bucket.dtype, bucket.wire, source, &mut staging[staged]));
        }
        context.memory.put(key, staging);
        packed
    }

    /// The region that a frame's payload is in, and where the bucket begins in it.
    fn source(&self, transmit: &Transmit) -> Result<(RegionKey, u64), Fault> {
        let result = matches!(transmit.data, Data::Result { .. });
        let layout = self.session.plan();
        if !layout.bucket(transmit.bucket).direct {
            let base = self.memory.buckets[transmit.bucket.index()].staged_at;
            let round = self.memory.round(transmit.bucket);
            return Ok((if result { round.results } else { round.contributions }, base));
        }
        let slot = self.slots[layout.unit(transmit.unit_first).tensor.index()];
        let key = if result { slot.output } else { slot.input.or(slot.output) };
        let missing = || Fault::violation(transmit.peer, "a request for data of an operation that has ended");
        Ok((key.ok_or_else(missing)?, 0))
    }

    /// Where this frame's payload goes in the peer's memory.
    fn target(&self, transmit: &Transmit, run_start: u64) -> Location {
        if matches!(transmit.data, Data::Result { .. }) {
            let memory = &self.memory.buckets[transmit.bucket.index()];
            return beyond(memory.contribution_at[transmit.peer.index()], run_start);
        }
        let offset = self.memory.landing_offset(self.session.plan(), transmit.unit_first);
        let round = self.memory.buckets[transmit.bucket.index()].round as u32;
        beyond(self.session.landing(transmit.peer, round), offset)
    }
}

/// The bytes of a unit in its tensor's memory.
fn native_range(in_tensor: u64, elements: u32, size: usize) -> std::ops::Range<usize> {
    let start = in_tensor as usize * size;
    start..start + elements as usize * size
}

fn no_memory() -> Fault {
    Fault::new(FaultKind::System, "a unit is to be reduced whose tensor has no memory")
}
