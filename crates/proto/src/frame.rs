//! The frame header: 64 bytes in front of, or beside, every message and payload (docs/wire.md, section 2).
//!
//! The header's CRC-32 covers the payload's CRC-32 and is seeded with the job's tag, so that a frame of another job
//! never verifies.

#[cfg(test)]
mod tests;

use crate::dtype::DType;
use crate::ids::{Attempt, BucketId, Epoch, RegionKey, Step, UnitIndex};
use crate::limits::{FRAME_HEADER_BYTES, PAYLOAD_BYTES_MAX, STEPS_MAX};
use crate::wire::{Malformed, Reader};

/// Version of the protocol: frames, handshake and messages together.
pub const PROTOCOL_VERSION: u8 = 1;

const MAGIC: [u8; 2] = *b"GW";

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// One rank's data for a run of units, or its readiness for their results.
    Contribution = 1,
    /// The reduction of a run of units, from their owner.
    Result = 2,
    /// All results of one tensor that this owner had for the sender have arrived, or (reduce_scatter) all
    /// contributions have been used. `unit_first` is the tensor's first unit.
    Ack = 3,
    /// Asks for units again. Body: a bitmap over the run, bit i for unit `unit_first + i`.
    Nack = 4,
    /// The job failed. Body: the fault.
    Abort = 5,
    /// The sender takes part in nothing further. Body, where it is lost: the fault.
    Goodbye = 6,
    /// The sender needs nothing more from the rank that said goodbye.
    GoodbyeAck = 7,
    /// A piece of the sender's declarations. `unit_first` is its offset, `unit_count` the length of the whole,
    /// `bucket` the declaration round. Body: the piece.
    Manifest = 8,
    /// The sender is prepared for the tensors of declaration round `bucket`. `location.region` is where the receiver's
    /// contributions are to be written; `step` is the first step of every tensor.
    Ready = 9,
    /// Answers a NACK for results that cannot be had yet. Body: a bitmap of the ranks whose contributions are missing.
    Waiting = 10,
    /// The sender is there, and says so again within `unit_count` milliseconds.
    Heartbeat = 11,
    /// The sender has all results of the step that is its `step`-th commit, counted from 0, and wants `unit_count`
    /// ([`crate::session::Wish`]).
    HasAll = 12,
    /// The sender has entered `epoch` after `step` commits and `unit_count` declaration rounds. `location.region` is
    /// where the receiver's contributions are to be written. Body: for each tensor without elements that was posted
    /// since the last commit, its index (4 bytes) and the step that it is at (8 bytes).
    Sync = 13,
    /// The sender has every member's Sync: it may be sent everything.
    Synced = 14,
    /// To a newcomer: the step that every tensor is at.
    Steps = 15,
    /// A newcomer asks a member for what it needs ([`crate::transfer`]). Not between members.
    Ask = 16,
    /// What a member gives it. Not between members.
    Give = 17,
}

impl FrameKind {
    const ALL: [Self; 17] = [
        Self::Contribution,
        Self::Result,
        Self::Ack,
        Self::Nack,
        Self::Abort,
        Self::Goodbye,
        Self::GoodbyeAck,
        Self::Manifest,
        Self::Ready,
        Self::Waiting,
        Self::Heartbeat,
        Self::HasAll,
        Self::Sync,
        Self::Synced,
        Self::Steps,
        Self::Ask,
        Self::Give,
    ];
}

/// Set in [`FrameHeader::flags`] when the payload, or the reduction it is part of, has an infinity or a NaN.
pub const FLAG_NONFINITE: u8 = 1;
/// Set in [`FrameHeader::flags`] of a contribution that carries no data: the sender is ready for results.
pub const FLAG_OFFER: u8 = 2;
/// Set in [`FrameHeader::flags`] of a NACK that asks for results; without it contributions are asked for.
pub const FLAG_NACK_RESULT: u8 = 4;
/// Set in [`FrameHeader::flags`] when [`FrameHeader::payload_crc`] covers the payload. Links that cross a wire always
/// set it; inside one host's memory it is a setting.
pub const FLAG_CHECKED: u8 = 8;
/// Set in [`FrameHeader::flags`] of a Sync whose sender is committing its step, and has all results of it.
pub const FLAG_HAS_ALL: u8 = 16;
/// Set in [`FrameHeader::flags`] of a Sync whose sender cannot do its part of its step again.
pub const FLAG_STUCK: u8 = 32;
/// Set in [`FrameHeader::flags`] of a Sync whose sender was in no epoch before.
pub const FLAG_NEWCOMER: u8 = 64;
const FLAGS_KNOWN: u8 =
    FLAG_NONFINITE | FLAG_OFFER | FLAG_NACK_RESULT | FLAG_CHECKED | FLAG_HAS_ALL | FLAG_STUCK | FLAG_NEWCOMER;

/// Binds frames to one job: 16 bytes that every rank of it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobTag(pub [u8; 16]);

/// The fixed header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame says.
    pub kind: FrameKind,
    /// [`FLAG_NONFINITE`], [`FLAG_OFFER`], [`FLAG_NACK_RESULT`].
    pub flags: u8,
    /// Element type of the payload, where it has elements.
    pub dtype: Option<DType>,
    /// Counts transmissions of the same data.
    pub attempt: Attempt,
    /// CRC-32 of the payload or body; 0 where there is none or where it is not checked.
    pub payload_crc: u32,
    /// Length of the payload or body in bytes.
    pub payload_len: u32,
    /// The membership view that the sender is in.
    pub epoch: Epoch,
    /// The step of the tensor: below 2^48.
    pub step: Step,
    /// Of a contribution: how many commits its sender had made when it posted the operation, modulo 2^16.
    pub commits: u16,
    /// The bucket.
    pub bucket: BucketId,
    /// The first unit of the run.
    pub unit_first: UnitIndex,
    /// How many units the run has.
    pub unit_count: u32,
    /// Where the bucket's first element is in the sender's memory: of the data, for peers that read in place; of the
    /// place for the results, for peers that write.
    pub location: Location,
}

/// A place in the sender's registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// The region.
    pub region: RegionKey,
    /// Bytes from its start.
    pub offset: u64,
}

impl FrameHeader {
    /// A header of this kind with everything else zero.
    #[must_use]
    pub const fn new(kind: FrameKind, epoch: Epoch) -> Self {
        Self {
            kind,
            flags: 0,
            dtype: None,
            attempt: Attempt(0),
            payload_crc: 0,
            payload_len: 0,
            epoch,
            step: Step(0),
            commits: 0,
            bucket: BucketId(0),
            unit_first: UnitIndex(0),
            unit_count: 0,
            location: Location { region: RegionKey(0), offset: 0 },
        }
    }

    /// The header as it travels.
    #[must_use]
    pub fn encode(&self, job: &JobTag) -> [u8; FRAME_HEADER_BYTES] {
        let mut out = [0; FRAME_HEADER_BYTES];
        out[0..2].copy_from_slice(&MAGIC);
        out[2] = PROTOCOL_VERSION;
        out[3] = self.kind as u8;
        out[8..12].copy_from_slice(&self.payload_crc.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload_len.to_le_bytes());
        out[16..24].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[24..30].copy_from_slice(&self.step.0.to_le_bytes()[..6]);
        out[30..32].copy_from_slice(&self.commits.to_le_bytes());
        out[32..36].copy_from_slice(&self.bucket.0.to_le_bytes());
        out[36..40].copy_from_slice(&self.unit_first.0.to_le_bytes());
        out[40..44].copy_from_slice(&self.unit_count.to_le_bytes());
        out[44..46].copy_from_slice(&self.attempt.0.to_le_bytes());
        out[46] = self.dtype.map_or(0, |dtype| dtype as u8);
        out[47] = self.flags;
        out[48..56].copy_from_slice(&self.location.region.0.to_le_bytes());
        out[56..64].copy_from_slice(&self.location.offset.to_le_bytes());
        let crc = header_crc(&out, job);
        out[4..8].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// [`Malformed`] names the field that does not hold what it must: length, magic, version, checksum, kind, flags,
    /// element type or payload length.
    pub fn decode(bytes: &[u8], job: &JobTag) -> Result<Self, Malformed> {
        let bytes: &[u8; FRAME_HEADER_BYTES] = bytes.try_into().map_err(|_| Malformed("frame header length"))?;
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("frame magic"));
        }
        if reader.u8()? != PROTOCOL_VERSION {
            return Err(Malformed("frame version"));
        }
        let kind_code = reader.u8()?;
        if reader.u32()? != header_crc(bytes, job) {
            return Err(Malformed("frame header checksum"));
        }
        let kind = FrameKind::ALL.into_iter().find(|kind| *kind as u8 == kind_code).ok_or(Malformed("frame kind"))?;
        let payload_crc = reader.u32()?;
        let payload_len = reader.u32()?;
        if payload_len > PAYLOAD_BYTES_MAX {
            return Err(Malformed("payload length"));
        }
        let epoch = Epoch(reader.u64()?);
        let step_and_commits = reader.u64()?;
        let step = Step(step_and_commits & (STEPS_MAX - 1));
        let commits = (step_and_commits >> 48) as u16;
        let bucket = BucketId(reader.u32()?);
        let unit_first = UnitIndex(reader.u32()?);
        let unit_count = reader.u32()?;
        let attempt = Attempt(reader.u16()?);
        let dtype = match reader.u8()? {
            0 => None,
            code => Some(DType::from_code(code).ok_or(Malformed("element type"))?),
        };
        let flags = reader.u8()?;
        if flags & !FLAGS_KNOWN != 0 {
            return Err(Malformed("frame flags"));
        }
        let location = Location { region: RegionKey(reader.u64()?), offset: reader.u64()? };
        Ok(Self {
            kind,
            flags,
            dtype,
            attempt,
            payload_crc,
            payload_len,
            epoch,
            step,
            commits,
            bucket,
            unit_first,
            unit_count,
            location,
        })
    }
}

fn header_crc(header: &[u8; FRAME_HEADER_BYTES], job: &JobTag) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&job.0);
    hasher.update(&header[..4]);
    hasher.update(&header[8..]);
    hasher.finalize()
}

/// CRC-32 (the polynomial of IEEE 802.3) of a payload or body.
#[must_use]
pub fn payload_crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}
