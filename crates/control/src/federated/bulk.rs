//! Bulk records of the federated mode: pieces of contributions and of results (docs/wire.md, section 10), and the order
//! in which the pieces of one vector are sent and sent again.

use std::ops::Range;

use gradwire_proto::Round;
use gradwire_proto::rounds::ContributionId;
use gradwire_proto::wire::{Malformed, Reader};

use crate::pieces::{self, PieceHeader};

/// A piece of one contributor's data for one shard. The contributor is the record's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update<'a> {
    pub(super) round: Round,
    pub(super) contribution: ContributionId,
    pub(super) shard: u32,
    pub(super) header: PieceHeader,
    pub(super) data: &'a [u8],
}

impl<'a> Update<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(28 + pieces::HEADER_BYTES + self.data.len());
        out.extend_from_slice(&self.round.0.to_le_bytes());
        out.extend_from_slice(&self.contribution);
        out.extend_from_slice(&self.shard.to_le_bytes());
        self.header.encode(&mut out);
        out.extend_from_slice(self.data);
        out
    }

    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (round, contribution, shard) = (Round(reader.u64()?), reader.array()?, reader.u32()?);
        let header = PieceHeader::decode(&mut reader)?;
        Ok(Self { round, contribution, shard, header, data: reader.bytes(reader.remaining())? })
    }
}

/// A piece of one shard's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResultPiece<'a> {
    pub(super) round: Round,
    pub(super) shard: u32,
    /// Of the entries that were added up.
    pub(super) digest: u32,
    pub(super) header: PieceHeader,
    pub(super) data: &'a [u8],
}

impl<'a> ResultPiece<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 + pieces::HEADER_BYTES + self.data.len());
        out.extend_from_slice(&self.round.0.to_le_bytes());
        out.extend_from_slice(&self.shard.to_le_bytes());
        out.extend_from_slice(&self.digest.to_le_bytes());
        self.header.encode(&mut out);
        out.extend_from_slice(self.data);
        out
    }

    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (round, shard, digest) = (Round(reader.u64()?), reader.u32()?, reader.u32()?);
        let header = PieceHeader::decode(&mut reader)?;
        Ok(Self { round, shard, digest, header, data: reader.bytes(reader.remaining())? })
    }
}

/// Data of some shards on its way to the broker: in pieces, in order, each until it has its receipt.
#[derive(Debug)]
pub(super) struct Outgoing {
    data: Vec<u8>,
    pieces: Vec<Piece>,
    next: usize,
    settled: usize,
}

#[derive(Clone, Debug)]
struct Piece {
    shard: u32,
    header: PieceHeader,
    range: Range<usize>,
}

impl Outgoing {
    /// Cuts each shard, of which `shards` gives number and range, into pieces.
    pub(super) fn new(
        data: Vec<u8>,
        shards: impl IntoIterator<Item = (u32, Range<usize>)>,
        piece_bytes: usize,
    ) -> Self {
        let mut pieces = Vec::new();
        for (shard, range) in shards {
            for (header, piece) in pieces::split(&data[range.clone()], piece_bytes) {
                let start = range.start + header.offset as usize;
                pieces.push(Piece { shard, header, range: start..start + piece.len() });
            }
        }
        Self { data, pieces, next: 0, settled: 0 }
    }

    /// CRC-32 of each shard, in their order.
    pub(super) fn crcs(&self) -> Vec<u32> {
        self.pieces.iter().filter(|piece| piece.header.index == 0).map(|piece| piece.header.crc).collect()
    }

    /// The next piece to send: its shard, where it belongs, and its data.
    pub(super) fn next(&mut self) -> Option<(u32, PieceHeader, &[u8])> {
        let piece = self.pieces.get(self.next)?;
        self.next += 1;
        Some((piece.shard, piece.header, &self.data[piece.range.clone()]))
    }

    /// The oldest piece that was sent has its receipt.
    pub(super) const fn settle(&mut self) {
        self.settled += 1;
    }

    /// Whether every piece has been handed out.
    pub(super) const fn is_sent(&self) -> bool {
        self.next == self.pieces.len()
    }

    /// Whether every piece has its receipt.
    pub(super) const fn is_settled(&self) -> bool {
        self.settled == self.pieces.len()
    }

    /// What has no receipt is to be sent again.
    pub(super) const fn link_lost(&mut self) {
        self.next = self.settled;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_round_trip_and_reject_what_is_too_short() {
        let header = PieceHeader { bytes: 3, crc: 5, offset: 0, index: 0, count: 1 };
        let update = Update { round: Round(7), contribution: [1; 16], shard: 2, header, data: b"abc" };
        let bytes = update.encode();
        assert_eq!(Update::decode(&bytes), Ok(update));
        let result = ResultPiece { round: Round(7), shard: 2, digest: 9, header, data: b"abc" };
        let other = result.encode();
        assert_eq!(ResultPiece::decode(&other), Ok(result));
        for length in 0..bytes.len() - 3 {
            Update::decode(&bytes[..length]).unwrap_err();
        }
        for length in 0..other.len() - 3 {
            ResultPiece::decode(&other[..length]).unwrap_err();
        }
    }

    #[test]
    fn what_has_no_receipt_is_sent_again_in_order() {
        let data: Vec<u8> = (0..10_000).map(|index| index as u8).collect();
        let mut outgoing = Outgoing::new(data.clone(), [(0, 0..9000), (1, 9000..10_000)], 4096);
        assert_eq!(outgoing.crcs(), [crc32fast::hash(&data[..9000]), crc32fast::hash(&data[9000..])]);
        let names = |outgoing: &mut Outgoing| {
            let mut names = Vec::new();
            while let Some((shard, header, piece)) = outgoing.next() {
                let start = if shard == 0 { 0 } else { 9000 } + header.offset as usize;
                assert_eq!(piece, &data[start..start + piece.len()]);
                names.push((shard, header.index));
            }
            names
        };
        assert_eq!(names(&mut outgoing), [(0, 0), (0, 1), (0, 2), (1, 0)]);
        assert!(outgoing.is_sent() && !outgoing.is_settled());
        (0..3).for_each(|_| outgoing.settle());
        outgoing.link_lost();
        assert_eq!(names(&mut outgoing), [(1, 0)]);
        outgoing.settle();
        assert!(outgoing.is_settled());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(update) = Update::decode(&bytes) {
                prop_assert_eq!(update.encode(), bytes.clone());
            }
            if let Ok(result) = ResultPiece::decode(&bytes) {
                prop_assert_eq!(result.encode(), bytes);
            }
        }
    }
}
