//! A trainer's saved state as it lies on disk (docs/wire.md, section 11): a manifest, and one shard from each member of
//! the group that saved it.
//!
//! Owned here: what the bytes mean, and which of them are refused. Reading and writing files is not. The shards' cut is
//! a pure function of the state's length and the number of members, so that it is nowhere on record and cannot be wrong.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use crate::fault::{Fault, FaultKind};
use crate::ids::{Epoch, Rank, Step};
use crate::limits::{
    MANIFEST_BYTES_MAX, SAVED_BYTES_MAX, SAVED_NAME_BYTES_MAX, SAVED_PIECE_BYTES_MAX, SAVED_PIECE_BYTES_MIN,
    TENSOR_NAME_BYTES_MAX, TENSORS_MAX, WORLD_SIZE_MAX,
};
use crate::wire::{Malformed, Reader, owned_text, put_text};

/// Version of the format.
pub const SAVED_VERSION: u16 = 1;
/// Bytes of a shard in front of its data.
pub const SHARD_HEADER_BYTES: usize = 64;

const MANIFEST_MAGIC: [u8; 4] = *b"GWSM";
const SHARD_MAGIC: [u8; 4] = *b"GWSS";
const CRC_BYTES: usize = 4;
const PART_BYTES_MIN: usize = 11;
const SHARD_ENTRY_BYTES: usize = 16;

/// Kinds of a manifest's sections.
const SECTION_PARTS: u16 = 1;
const SECTION_SHARDS: u16 = 2;

/// Why bytes are no manifest or shard that this version reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedError {
    /// It does not begin as it must.
    #[error("it is no file of gradwire's of this kind")]
    Foreign,
    /// It is of another version.
    #[error(
        "it has version {0} of the format, but this release reads version {SAVED_VERSION}: use the release that wrote it, or a newer one"
    )]
    Version(u16),
    /// Its checksum is not that of its bytes.
    #[error("its checksum is not that of its bytes: it is damaged or cut off")]
    Checksum,
    /// It holds something that this version does not know, and would lose.
    #[error("it has a section of kind {0}, which this release does not know and would lose: use a newer release")]
    UnknownSection(u16),
    /// A field holds what it may not.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// A named part of the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPart {
    /// Its name: 1 to [`TENSOR_NAME_BYTES_MAX`] bytes; no two parts have the same.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// What the manifest says of a member's shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedShard {
    /// The member that wrote it.
    pub rank: Rank,
    /// The length of the file.
    pub file_bytes: u64,
    /// The checksum at the end of the file, which covers its header and the checksums of its pieces.
    pub seal: u32,
}

/// What makes a directory with shards a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedManifest {
    /// Counts the saves in a directory: the highest one is the latest, whatever its step is.
    pub sequence: u64,
    /// Random: binds the shards to this manifest.
    pub id: [u8; 16],
    /// How many steps were final.
    pub step: Step,
    /// The membership view in which it was made.
    pub epoch: Epoch,
    /// How many ranks the job began with.
    pub world_size: u32,
    /// The job's name, if somebody gave it one; else empty.
    pub job: String,
    /// The version of the model, if somebody said so; else empty.
    pub model_version: String,
    /// Bytes of each piece but the last.
    pub piece_bytes: u32,
    /// The parts of the state, in order.
    pub parts: Vec<SavedPart>,
    /// The shards in the order of their data: ranks ascend.
    pub shards: Vec<SavedShard>,
}

impl SavedManifest {
    /// Bytes of the whole state.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.bytes))
    }

    /// Where the pieces lie.
    #[must_use]
    pub fn cut(&self) -> Cut {
        Cut { state_bytes: self.state_bytes(), piece_bytes: self.piece_bytes, shards: self.shards.len() as u32 }
    }

    /// The header that the shard of this index must have.
    #[must_use]
    pub fn shard_header(&self, index: u32) -> ShardHeader {
        let range = self.cut().share(index);
        ShardHeader {
            id: self.id,
            step: self.step,
            rank: self.shards.get(index as usize).map_or(Rank(0), |shard| shard.rank),
            index,
            shards: self.shards.len() as u32,
            piece_bytes: self.piece_bytes,
            first: range.start,
            bytes: range.end - range.start,
        }
    }

    /// The manifest's bytes.
    ///
    /// # Errors
    /// A fault of kind `InvalidArgument` that names the part that is nameless, named twice or too long, or what else is
    /// beyond a limit.
    pub fn encode(&self) -> Result<Vec<u8>, Fault> {
        check_parts(self.parts.iter().map(|part| (part.name.as_str(), part.bytes)))?;
        let mut out = Vec::new();
        out.extend_from_slice(&MANIFEST_MAGIC);
        out.extend_from_slice(&SAVED_VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.step.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.world_size.to_le_bytes());
        out.extend_from_slice(&self.piece_bytes.to_le_bytes());
        put_text(&mut out, &self.job, SAVED_NAME_BYTES_MAX);
        put_text(&mut out, &self.model_version, SAVED_NAME_BYTES_MAX);
        out.extend_from_slice(&2u32.to_le_bytes());
        put_section(&mut out, SECTION_PARTS, |out| {
            put_parts(out, &self.parts);
        });
        put_section(&mut out, SECTION_SHARDS, |out| {
            out.extend_from_slice(&(self.shards.len() as u32).to_le_bytes());
            for shard in &self.shards {
                out.extend_from_slice(&shard.rank.0.to_le_bytes());
                out.extend_from_slice(&shard.file_bytes.to_le_bytes());
                out.extend_from_slice(&shard.seal.to_le_bytes());
            }
        });
        let crc = crc32fast::hash(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        match self.flaw() {
            None if out.len() <= MANIFEST_BYTES_MAX => Ok(out),
            None => Err(Fault::new(
                FaultKind::InvalidArgument,
                format!(
                    "the names of {} parts take more than {MANIFEST_BYTES_MAX} bytes: shorten them",
                    self.parts.len()
                ),
            )),
            Some(flaw) => Err(Fault::new(FaultKind::InvalidArgument, format!("the save cannot be described: {flaw}"))),
        }
    }

    /// Reads all of `bytes` as a manifest. Allocates at most in proportion to their number.
    ///
    /// # Errors
    /// [`SavedError`]; a section of an unknown kind is an error unless it is empty.
    pub fn decode(bytes: &[u8]) -> Result<Self, SavedError> {
        if bytes.len() > MANIFEST_BYTES_MAX {
            return Err(Malformed("manifest too long").into());
        }
        check_version(bytes, MANIFEST_MAGIC)?;
        let (front, crc) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(SavedError::Checksum)?;
        if crc32fast::hash(front) != u32::from_le_bytes(*crc) {
            return Err(SavedError::Checksum);
        }
        let mut reader = Reader::new(front);
        reader.bytes(MANIFEST_MAGIC.len() + 2)?;
        if reader.u16()? != 0 {
            return Err(Malformed("reserved bytes").into());
        }
        let mut manifest = Self {
            sequence: reader.u64()?,
            id: reader.array()?,
            step: Step(reader.u64()?),
            epoch: Epoch(reader.u64()?),
            world_size: reader.u32()?,
            piece_bytes: reader.u32()?,
            job: owned_text(&mut reader, SAVED_NAME_BYTES_MAX)?,
            model_version: owned_text(&mut reader, SAVED_NAME_BYTES_MAX)?,
            parts: Vec::new(),
            shards: Vec::new(),
        };
        let sections = reader.u32()?;
        let mut before = 0;
        for _ in 0..sections {
            let kind = reader.u16()?;
            if kind <= before {
                return Err(Malformed("sections out of order").into());
            }
            before = kind;
            let length = usize::try_from(reader.u64()?).map_err(|_| Malformed("section too long"))?;
            let body = Reader::new(reader.bytes(length)?);
            match kind {
                SECTION_PARTS => {
                    let mut body = body;
                    manifest.parts = read_parts(&mut body)?;
                    body.finish()?;
                }
                SECTION_SHARDS => manifest.shards = decode_shards(body)?,
                _ if length == 0 => {}
                kind => return Err(SavedError::UnknownSection(kind)),
            }
        }
        reader.finish()?;
        if sections < 2 || before < SECTION_SHARDS {
            return Err(Malformed("a section is missing").into());
        }
        manifest.flaw().map_or(Ok(manifest), |flaw| Err(Malformed(flaw).into()))
    }

    fn flaw(&self) -> Option<&'static str> {
        let ascending = |pair: &[SavedShard]| pair[0].rank < pair[1].rank;
        if !(SAVED_PIECE_BYTES_MIN..=SAVED_PIECE_BYTES_MAX).contains(&self.piece_bytes) {
            return Some("bytes of a piece");
        }
        if self.shards.is_empty() || self.shards.len() > WORLD_SIZE_MAX as usize {
            return Some("number of shards");
        }
        if !self.shards.windows(2).all(ascending) {
            return Some("shards out of order");
        }
        if self.state_bytes() > SAVED_BYTES_MAX {
            return Some("more bytes than a state can have");
        }
        let cut = self.cut();
        if (0..).zip(&self.shards).any(|(index, shard)| shard.file_bytes != cut.file_bytes(index)) {
            return Some("length of a shard");
        }
        None
    }
}

/// Checks names and lengths of a state's parts.
///
/// # Errors
/// A fault of kind `InvalidArgument` that names the part.
pub fn check_parts<'a>(parts: impl IntoIterator<Item = (&'a str, u64)>) -> Result<(), Fault> {
    let wrong = |what: String| Err(Fault::new(FaultKind::InvalidArgument, what));
    let (mut names, mut sum) = (BTreeSet::new(), 0u64);
    for (name, bytes) in parts {
        if name.is_empty() {
            return wrong(String::from("a part of the state has no name: give every part one"));
        }
        if name.len() > TENSOR_NAME_BYTES_MAX {
            return wrong(format!(
                "a part of the state has a name of {} bytes: shorten it to at most {TENSOR_NAME_BYTES_MAX}",
                name.len()
            ));
        }
        if !names.insert(name) {
            return wrong(format!("two parts of the state are called '{name}': give every part a name of its own"));
        }
        sum = sum.saturating_add(bytes);
    }
    if names.len() > TENSORS_MAX as usize {
        return wrong(format!("the state has {} parts; at most {TENSORS_MAX} are possible", names.len()));
    }
    if sum > SAVED_BYTES_MAX {
        return wrong(format!("the state has {sum} bytes; at most {SAVED_BYTES_MAX} can be saved"));
    }
    Ok(())
}

fn put_section(out: &mut Vec<u8>, kind: u16, body: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(&kind.to_le_bytes());
    let length = out.len();
    out.extend_from_slice(&[0; 8]);
    body(out);
    let bytes = (out.len() - length - 8) as u64;
    out[length..length + 8].copy_from_slice(&bytes.to_le_bytes());
}

/// The first bytes say what it is, also of a version whose other bytes are not known.
fn check_version(bytes: &[u8], magic: [u8; 4]) -> Result<(), SavedError> {
    let mut reader = Reader::new(bytes);
    if reader.array::<4>().map_err(|_| SavedError::Foreign)? != magic {
        return Err(SavedError::Foreign);
    }
    match reader.u16().map_err(|_| SavedError::Checksum)? {
        SAVED_VERSION => Ok(()),
        other => Err(SavedError::Version(other)),
    }
}

/// Writes names and lengths of a state's parts.
pub(crate) fn put_parts(out: &mut Vec<u8>, parts: &[SavedPart]) {
    out.extend_from_slice(&(parts.len() as u32).to_le_bytes());
    for part in parts {
        put_text(out, &part.name, TENSOR_NAME_BYTES_MAX);
        out.extend_from_slice(&part.bytes.to_le_bytes());
    }
}

/// Reads what [`put_parts`] wrote. Allocates at most in proportion to what is left.
pub(crate) fn read_parts(reader: &mut Reader<'_>) -> Result<Vec<SavedPart>, Malformed> {
    let count = reader.u32()?;
    if count > TENSORS_MAX || count as usize > reader.remaining() / PART_BYTES_MIN {
        return Err(Malformed("more parts than a state can have"));
    }
    let mut parts = Vec::with_capacity(count as usize);
    for _ in 0..count {
        parts.push(SavedPart { name: owned_text(reader, TENSOR_NAME_BYTES_MAX)?, bytes: reader.u64()? });
    }
    match check_parts(parts.iter().map(|part| (part.name.as_str(), part.bytes))) {
        Ok(()) => Ok(parts),
        Err(_) => Err(Malformed("name or length of a part")),
    }
}

fn decode_shards(mut reader: Reader<'_>) -> Result<Vec<SavedShard>, Malformed> {
    let count = reader.u32()?;
    if count > WORLD_SIZE_MAX || count as usize > reader.remaining() / SHARD_ENTRY_BYTES {
        return Err(Malformed("more shards than there can be"));
    }
    let mut shards = Vec::with_capacity(count as usize);
    for _ in 0..count {
        shards.push(SavedShard { rank: Rank(reader.u32()?), file_bytes: reader.u64()?, seal: reader.u32()? });
    }
    reader.finish()?;
    Ok(shards)
}

/// How a state, its parts one after the other, is cut into pieces, and which shard each of them is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of the state.
    pub state_bytes: u64,
    /// Bytes of each piece but the last.
    pub piece_bytes: u32,
    /// How many shards there are.
    pub shards: u32,
}

impl Cut {
    /// The bytes of the state that are in this shard: whole pieces, consecutive, and as many as in any other, or one
    /// more.
    #[must_use]
    pub fn share(&self, index: u32) -> Range<u64> {
        let piece = u64::from(self.piece_bytes.max(1));
        let pieces = self.state_bytes.div_ceil(piece);
        let shards = u64::from(self.shards.max(1));
        let from = |index: u64| (pieces * index / shards * piece).min(self.state_bytes);
        let index = u64::from(index).min(shards - 1);
        from(index)..from(index + 1)
    }

    /// How many pieces are in this shard.
    #[must_use]
    pub fn pieces(&self, index: u32) -> u64 {
        let share = self.share(index);
        (share.end - share.start).div_ceil(u64::from(self.piece_bytes.max(1)))
    }

    /// The length of this shard's file: header, data, a checksum for each piece, seal.
    #[must_use]
    pub fn file_bytes(&self, index: u32) -> u64 {
        let share = self.share(index);
        SHARD_HEADER_BYTES as u64 + (share.end - share.start) + (self.pieces(index) + 1) * CRC_BYTES as u64
    }
}

/// The front of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardHeader {
    /// The save that it belongs to.
    pub id: [u8; 16],
    /// How many steps were final.
    pub step: Step,
    /// The member that wrote it.
    pub rank: Rank,
    /// Its place among the shards.
    pub index: u32,
    /// How many shards there are.
    pub shards: u32,
    /// Bytes of each piece but the last.
    pub piece_bytes: u32,
    /// Where in the state its data begins.
    pub first: u64,
    /// Bytes of its data.
    pub bytes: u64,
}

impl ShardHeader {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; SHARD_HEADER_BYTES] {
        let mut out = [0; SHARD_HEADER_BYTES];
        out[..4].copy_from_slice(&SHARD_MAGIC);
        out[4..6].copy_from_slice(&SAVED_VERSION.to_le_bytes());
        out[8..24].copy_from_slice(&self.id);
        out[24..32].copy_from_slice(&self.step.0.to_le_bytes());
        out[32..36].copy_from_slice(&self.rank.0.to_le_bytes());
        out[36..40].copy_from_slice(&self.index.to_le_bytes());
        out[40..44].copy_from_slice(&self.shards.to_le_bytes());
        out[44..48].copy_from_slice(&self.piece_bytes.to_le_bytes());
        out[48..56].copy_from_slice(&self.first.to_le_bytes());
        out[56..64].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// Reads a shard's front. Its seal covers it, and has to be checked beside.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, SavedError> {
        check_version(bytes, SHARD_MAGIC)?;
        let mut reader = Reader::new(bytes);
        reader.bytes(6)?;
        if reader.u16()? != 0 {
            return Err(Malformed("reserved bytes").into());
        }
        let header = Self {
            id: reader.array()?,
            step: Step(reader.u64()?),
            rank: Rank(reader.u32()?),
            index: reader.u32()?,
            shards: reader.u32()?,
            piece_bytes: reader.u32()?,
            first: reader.u64()?,
            bytes: reader.u64()?,
        };
        reader.finish()?;
        Ok(header)
    }

    /// The seal of a shard with this header and these checksums of its pieces, as they lie in the file.
    #[must_use]
    pub fn seal(&self, checksums: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.encode());
        hasher.update(checksums);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests;
