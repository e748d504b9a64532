//! The hello's messages as bytes (docs/wire.md, section 1). Fixed sizes, reserved bytes zero.

use super::{NONCE_BYTES, OPENING_BYTES, Purpose};
use crate::frame::PROTOCOL_VERSION;
use crate::ids::{Epoch, Rank};
use crate::secret::PROOF_BYTES;
use crate::wire::{Malformed, Reader};

const MAGIC: [u8; 4] = *b"GWHL";

/// The first message of each side. Every version of the protocol keeps its layout.
pub(super) struct Opening {
    pub(super) nonce: [u8; NONCE_BYTES],
}

/// What an opening is when it is not one of ours.
pub(super) enum OpeningError {
    /// Of this version.
    Version(u8),
    /// Not an opening, and why.
    Garbage(&'static str),
}

impl From<Malformed> for OpeningError {
    fn from(malformed: Malformed) -> Self {
        Self::Garbage(malformed.0)
    }
}

impl Opening {
    pub(super) fn encode(&self) -> [u8; OPENING_BYTES] {
        let mut out = [0; OPENING_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = PROTOCOL_VERSION;
        out[8..].copy_from_slice(&self.nonce);
        out
    }

    /// The version is looked at before the reserved bytes, which another version may have filled.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, OpeningError> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(OpeningError::Garbage("other magic"));
        }
        match reader.u8()? {
            PROTOCOL_VERSION => {}
            other => return Err(OpeningError::Version(other)),
        }
        if reader.array()? != [0; 3] {
            return Err(OpeningError::Garbage("reserved bytes set"));
        }
        let nonce = reader.array()?;
        reader.finish()?;
        Ok(Self { nonce })
    }
}

/// Who the dialer says it is and whom it wants; its proof follows the fields.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) rank: Rank,
    pub(super) target: Rank,
    pub(super) epoch: Epoch,
    pub(super) world_size: u32,
    pub(super) purpose: Purpose,
}

impl Claim {
    pub(super) const FIELDS_BYTES: usize = 24;
    pub(super) const BYTES: usize = Self::FIELDS_BYTES + PROOF_BYTES;

    /// The message, with zeros where the proof goes.
    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&self.rank.0.to_le_bytes());
        out[4..8].copy_from_slice(&self.target.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[16..20].copy_from_slice(&self.world_size.to_le_bytes());
        out[20..24].copy_from_slice(&(self.purpose as u32).to_le_bytes());
        out
    }

    pub(super) fn decode(fields: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(fields);
        let claim = Self {
            rank: Rank(reader.u32()?),
            target: Rank(reader.u32()?),
            epoch: Epoch(reader.u64()?),
            world_size: reader.u32()?,
            purpose: match reader.u32()? {
                0 => Purpose::Link,
                1 => Purpose::State,
                _ => return Err(Malformed("unknown purpose of a link")),
            },
        };
        reader.finish()?;
        Ok(claim)
    }
}

/// What the acceptor makes of a claim. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    /// The link is up.
    Welcome = 0,
    // 1 is `Verdict::proof_refused`, which carries nothing and is compared as a whole.
    /// The acceptor is in another epoch.
    Epoch = 2,
    /// The acceptor counts other ranks.
    WorldSize = 3,
    /// The acceptor is not the rank that was dialled.
    Target = 4,
    /// The dialer has a rank that no dialer can have here.
    Rank = 5,
}

/// The acceptor's answer; its proof follows the fields.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) code: Code,
    pub(super) rank: Rank,
    pub(super) epoch: Epoch,
    pub(super) world_size: u32,
}

impl Verdict {
    pub(super) const FIELDS_BYTES: usize = 24;
    pub(super) const BYTES: usize = Self::FIELDS_BYTES + PROOF_BYTES;

    /// The answer to whoever did not prove the secret: the same for everybody.
    pub(super) const fn proof_refused() -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0] = 1;
        out
    }

    /// The message, with zeros where the proof goes.
    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&(self.code as u32).to_le_bytes());
        out[4..8].copy_from_slice(&self.rank.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[16..20].copy_from_slice(&self.world_size.to_le_bytes());
        out
    }

    pub(super) fn decode(fields: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(fields);
        let code = match reader.u32()? {
            0 => Code::Welcome,
            2 => Code::Epoch,
            3 => Code::WorldSize,
            4 => Code::Target,
            5 => Code::Rank,
            _ => return Err(Malformed("unknown code in the answer to a hello")),
        };
        let verdict = Self { code, rank: Rank(reader.u32()?), epoch: Epoch(reader.u64()?), world_size: reader.u32()? };
        zeros(reader.u32()?)?;
        reader.finish()?;
        Ok(verdict)
    }
}

fn zeros(reserved: u32) -> Result<(), Malformed> {
    if reserved == 0 { Ok(()) } else { Err(Malformed("reserved bytes set")) }
}

const _: () = assert!(Claim::BYTES == 56 && Claim::BYTES <= super::HELLO_BYTES_MAX);
const _: () = assert!(Verdict::BYTES == 56 && Verdict::BYTES <= super::HELLO_BYTES_MAX);
