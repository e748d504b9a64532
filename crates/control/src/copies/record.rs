//! What travels on `<job>-retransmit` and `<job>-copies` (docs/wire.md, section 7).

use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Epoch, Rank, Step, UnitIndex};

use crate::pieces::PieceHeader;

/// The kind of a request in a record's header.
pub(super) const REQUEST_KIND: u16 = 33;
/// The kind of a copy in a record's header.
pub(super) const COPY_KIND: u16 = 34;

/// Which result: one unit, as it was after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardVersion {
    /// The epoch of the version.
    pub epoch: Epoch,
    /// The step of the version.
    pub step: Step,
    /// The unit.
    pub unit: UnitIndex,
}

impl ShardVersion {
    fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.step.0.to_le_bytes());
        out.extend_from_slice(&self.unit.0.to_le_bytes());
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { epoch: Epoch(reader.u64()?), step: Step(reader.u64()?), unit: UnitIndex(reader.u32()?) })
    }
}

/// Asks whoever holds a copy for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) requester: Rank,
    pub(super) shard: ShardVersion,
    /// How often the requester got a wrong copy.
    pub(super) attempt: u16,
    /// How many ranks passed it on because they did not hold it.
    pub(super) hop: u16,
    /// Milliseconds since 1970 after which nobody waits for an answer any more, by the requester's clock.
    pub(super) deadline_ms: u64,
}

impl Request {
    /// The message key: the shard, so that requests for one are answered in order by one holder. Passed on, or after a
    /// wrong copy, it has another one, so that another holder may get it.
    pub(super) fn key(&self) -> String {
        let unit = self.shard.unit.0;
        match (self.attempt, self.hop) {
            (0, 0) => unit.to_string(),
            (attempt, hop) => format!("{unit}#{attempt}.{hop}"),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(36);
        out.extend_from_slice(&self.requester.0.to_le_bytes());
        self.shard.encode(&mut out);
        out.extend_from_slice(&self.attempt.to_le_bytes());
        out.extend_from_slice(&self.hop.to_le_bytes());
        out.extend_from_slice(&self.deadline_ms.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let requester = Rank(reader.u32()?);
        let shard = ShardVersion::decode(&mut reader)?;
        let (attempt, hop) = (reader.u16()?, reader.u16()?);
        let request = Self { requester, shard, attempt, hop, deadline_ms: reader.u64()? };
        reader.finish()?;
        Ok(request)
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Copy<'a> {
    pub(super) requester: Rank,
    pub(super) shard: ShardVersion,
    /// A piece of the data; nothing if nobody was found who holds it.
    pub(super) piece: Option<(PieceHeader, &'a [u8])>,
}

impl<'a> Copy<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.piece.map_or(0, |(_, piece)| piece.len()));
        out.extend_from_slice(&self.requester.0.to_le_bytes());
        self.shard.encode(&mut out);
        out.push(u8::from(self.piece.is_some()));
        if let Some((header, piece)) = &self.piece {
            header.encode(&mut out);
            out.extend_from_slice(piece);
        }
        out
    }

    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let requester = Rank(reader.u32()?);
        let shard = ShardVersion::decode(&mut reader)?;
        let piece = match reader.u8()? {
            0 => None,
            1 => {
                let header = PieceHeader::decode(&mut reader)?;
                Some((header, reader.bytes(reader.remaining())?))
            }
            _ => return Err(Malformed("neither a copy nor a refusal")),
        };
        reader.finish()?;
        Ok(Self { requester, shard, piece })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shard() -> ShardVersion {
        ShardVersion { epoch: Epoch(2), step: Step(1 << 40), unit: UnitIndex(7) }
    }

    #[test]
    fn requests_round_trip_and_reject_every_other_length() {
        let request = Request { requester: Rank(3), shard: shard(), attempt: 1, hop: 2, deadline_ms: 99 };
        let bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Ok(request));
        for length in 0..bytes.len() {
            Request::decode(&bytes[..length]).unwrap_err();
        }
        Request::decode(&[&bytes[..], &[0]].concat()).unwrap_err();
        assert_eq!(request.key(), "7#1.2");
        assert_eq!(Request { attempt: 0, hop: 0, ..request }.key(), "7");
    }

    #[test]
    fn copies_round_trip() {
        let header = PieceHeader { bytes: 4, crc: 1, offset: 0, index: 0, count: 1 };
        for piece in [None, Some((header, &b"data"[..])), Some((header, &b""[..]))] {
            let copy = Copy { requester: Rank(3), shard: shard(), piece };
            assert_eq!(Copy::decode(&copy.encode()), Ok(copy));
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(request) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(), &bytes[..]);
            }
            if let Ok(copy) = Copy::decode(&bytes) {
                prop_assert_eq!(copy.encode(), &bytes[..]);
            }
        }
    }
}
