//! Bulk data in messages: cut into pieces that a broker takes, and put together again.
//!
//! Pieces may come in any order, more than once, and from several senders at once; data is handed out only when it is
//! complete and its checksum is right. What is being put together is bounded in bytes: the oldest is given up first.

use std::collections::BTreeMap;

use gradwire_proto::wire::{Malformed, Reader};

/// Largest data that is cut into pieces.
pub(crate) const DATA_BYTES_MAX: usize = 64 << 20;
/// What a header takes.
pub(crate) const HEADER_BYTES: usize = 16;
/// Smallest pieces that may be asked for: so that there are never very many.
pub(crate) const PIECE_BYTES_MIN: usize = 4 << 10;
/// Largest pieces: they fit a record.
pub(crate) const PIECE_BYTES_MAX: usize = 1000 << 10;

const _: () = assert!(DATA_BYTES_MAX / PIECE_BYTES_MIN <= u16::MAX as usize);

/// Says which part of the data a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceHeader {
    /// Bytes of the whole data.
    pub(crate) bytes: u32,
    /// CRC-32 of the whole data.
    pub(crate) crc: u32,
    /// Where the piece begins.
    pub(crate) offset: u32,
    /// Number of the piece, and of all pieces.
    pub(crate) index: u16,
    pub(crate) count: u16,
}

impl PieceHeader {
    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.crc.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&self.count.to_le_bytes());
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (bytes, crc, offset) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (index, count) = (reader.u16()?, reader.u16()?);
        if bytes as usize > DATA_BYTES_MAX || index >= count || offset > bytes {
            return Err(Malformed("a piece that there cannot be"));
        }
        Ok(Self { bytes, crc, offset, index, count })
    }
}

/// Cuts data into pieces of at most `piece_bytes`, at least one.
pub(crate) fn split(data: &[u8], piece_bytes: usize) -> impl Iterator<Item = (PieceHeader, &[u8])> {
    debug_assert!(data.len() <= DATA_BYTES_MAX);
    let piece_bytes = piece_bytes.clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
    let crc = crc32fast::hash(data);
    let count = data.len().div_ceil(piece_bytes).max(1);
    (0..count).map(move |index| {
        let start = index * piece_bytes;
        let piece = &data[start..data.len().min(start + piece_bytes)];
        let header = PieceHeader {
            bytes: data.len() as u32,
            crc,
            offset: start as u32,
            index: index as u16,
            count: count as u16,
        };
        (header, piece)
    })
}

/// Data that is being put together, by what it is.
#[derive(Debug)]
pub(crate) struct Collector<K> {
    open: BTreeMap<K, Open>,
    bytes: usize,
    bytes_max: usize,
    /// Counts what is opened, so that the oldest is known.
    opened: u64,
}

#[derive(Debug)]
struct Open {
    header: PieceHeader,
    data: Vec<u8>,
    missing: Vec<bool>,
    left: u16,
    number: u64,
}

/// What became of a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Collected {
    /// More pieces are missing.
    Open,
    /// The data is complete, and its checksum is right.
    Complete(Vec<u8>),
    /// The piece does not belong to the others, or the checksum is wrong: the data is given up.
    Wrong,
}

impl<K: Ord + Clone> Collector<K> {
    /// Holds at most this many bytes.
    pub(crate) const fn new(bytes_max: usize) -> Self {
        Self { open: BTreeMap::new(), bytes: 0, bytes_max, opened: 0 }
    }

    /// Takes a piece.
    pub(crate) fn add(&mut self, key: &K, header: PieceHeader, piece: &[u8]) -> Collected {
        let (start, end) = (header.offset as usize, header.offset as usize + piece.len());
        if end > header.bytes as usize {
            return Collected::Wrong;
        }
        if header.count == 1 {
            let right = piece.len() == header.bytes as usize && crc32fast::hash(piece) == header.crc;
            return if right { Collected::Complete(piece.to_vec()) } else { Collected::Wrong };
        }
        if !self.open.contains_key(key) {
            self.make_room(header.bytes as usize);
            self.opened += 1;
            self.bytes += header.bytes as usize;
            let open = Open {
                header,
                data: vec![0; header.bytes as usize],
                missing: vec![true; usize::from(header.count)],
                left: header.count,
                number: self.opened,
            };
            self.open.insert(key.clone(), open);
        }
        let Some(open) = self.open.get_mut(key) else { return Collected::Wrong };
        let same = (open.header.bytes, open.header.crc, open.header.count) == (header.bytes, header.crc, header.count);
        if !same {
            self.forget(key);
            return Collected::Wrong;
        }
        if std::mem::take(&mut open.missing[usize::from(header.index)]) {
            open.data[start..end].copy_from_slice(piece);
            open.left -= 1;
        }
        if open.left > 0 {
            return Collected::Open;
        }
        match self.forget(key) {
            Some(data) if crc32fast::hash(&data) == header.crc => Collected::Complete(data),
            _ => Collected::Wrong,
        }
    }

    /// Gives up what is being put together for this key.
    pub(crate) fn forget(&mut self, key: &K) -> Option<Vec<u8>> {
        let open = self.open.remove(key)?;
        self.bytes -= open.data.len();
        Some(open.data)
    }

    /// Whether data is being put together for this key.
    pub(crate) fn is_open(&self, key: &K) -> bool {
        self.open.contains_key(key)
    }

    fn make_room(&mut self, bytes: usize) {
        while self.bytes + bytes > self.bytes_max {
            let Some(oldest) = self.open.iter().min_by_key(|(_, open)| open.number).map(|(key, _)| key.clone()) else {
                return;
            };
            self.forget(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|index| (index * 31 + index / 7) as u8).collect()
    }

    #[test]
    fn headers_round_trip_and_bad_ones_are_refused() {
        let header = PieceHeader { bytes: 9000, crc: 7, offset: 4096, index: 1, count: 3 };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(PieceHeader::decode(&mut Reader::new(&bytes)), Ok(header));
        for bad in [
            PieceHeader { bytes: u32::MAX, ..header },
            PieceHeader { offset: 9001, ..header },
            PieceHeader { index: 3, ..header },
        ] {
            let mut bytes = Vec::new();
            bad.encode(&mut bytes);
            PieceHeader::decode(&mut Reader::new(&bytes)).unwrap_err();
        }
    }

    #[test]
    fn a_wrong_checksum_is_never_handed_out() {
        let (data, mut collector) = (data(10_000), Collector::new(1 << 20));
        let pieces: Vec<_> = split(&data, 4096).collect();
        assert_eq!(pieces.len(), 3);
        for (header, piece) in &pieces[..2] {
            assert_eq!(collector.add(&1, *header, piece), Collected::Open);
        }
        let mut spoilt = pieces[2].1.to_vec();
        spoilt[0] ^= 1;
        assert_eq!(collector.add(&1, pieces[2].0, &spoilt), Collected::Wrong);
        let (single, piece) = split(&data[..100], 4096).next().unwrap();
        assert_eq!(collector.add(&2, single, &piece[..99]), Collected::Wrong);
        assert_eq!(collector.add(&2, single, piece), Collected::Complete(data[..100].to_vec()));
    }

    #[test]
    fn pieces_of_other_data_give_it_up() {
        let (data, mut collector) = (data(10_000), Collector::new(1 << 20));
        let (first, piece) = split(&data, 4096).next().unwrap();
        assert_eq!(collector.add(&1, first, piece), Collected::Open);
        assert_eq!(collector.add(&1, PieceHeader { crc: 0, ..first }, piece), Collected::Wrong);
        assert_eq!(collector.add(&1, PieceHeader { offset: 9000, ..first }, piece), Collected::Wrong);
        assert_eq!(collector.bytes, 0);
    }

    #[test]
    fn what_is_put_together_is_bounded() {
        let (data, mut collector) = (data(10_000), Collector::new(25_000));
        for key in 0..100 {
            let (header, piece) = split(&data, 4096).next().unwrap();
            assert_eq!(collector.add(&key, header, piece), Collected::Open);
        }
        assert_eq!(collector.open.keys().copied().collect::<Vec<_>>(), [98, 99]);
        assert_eq!(collector.bytes, 20_000);
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_and_twice_give_the_data(
            bytes in 0_usize..40_000,
            piece_bytes in 0_usize..20_000,
            order in proptest::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let (data, mut collector) = (data(bytes), Collector::new(1 << 20));
            let pieces: Vec<_> = split(&data, piece_bytes).collect();
            let shuffled = order.iter().map(|index| index.index(pieces.len())).chain(0..pieces.len());
            let mut complete = 0;
            for index in shuffled {
                match collector.add(&0, pieces[index].0, pieces[index].1) {
                    Collected::Complete(whole) => {
                        prop_assert_eq!(&whole, &data);
                        complete += 1;
                    }
                    other => prop_assert_eq!(other, Collected::Open),
                }
            }
            prop_assert!(complete >= 1);
        }
    }
}
