//! A state as one run of bytes, its parts one after the other.

use std::ops::Range;

use gradwire_proto::saved::ShardHeader;

use crate::StateTensor;

/// Where the parts of a state begin and end.
#[derive(Debug)]
pub(super) struct Layout {
    /// Of each part, where it ends.
    ends: Vec<u64>,
}

impl Layout {
    pub(super) fn new(lengths: impl Iterator<Item = u64>) -> Self {
        let ends = lengths.scan(0, |end, bytes| {
            *end += bytes;
            Some(*end)
        });
        Self { ends: ends.collect() }
    }

    /// What of which parts these bytes of the state are, in order.
    pub(super) fn fragments(&self, range: Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let first = self.ends.partition_point(|end| *end <= range.start);
        let parts = (first..self.ends.len()).map(move |part| {
            let start = if part == 0 { 0 } else { self.ends[part - 1] };
            (part, start, self.ends[part])
        });
        parts.take_while(move |(_, start, _)| *start < range.end).map(move |(part, start, end)| {
            let from = range.start.max(start) - start;
            (part, from as usize..(range.end.min(end) - start) as usize)
        })
    }
}

/// The pieces of this shard as the state has them, in order, each with its checksum. Ends with the first error of `take`.
pub(super) fn each_piece<E>(
    header: &ShardHeader,
    parts: &[StateTensor<'_>],
    mut take: impl FnMut(&[u8], [u8; 4]) -> Result<(), E>,
) -> Result<(), E> {
    let layout = Layout::new(parts.iter().map(|part| part.bytes.len() as u64));
    let mut piece = Vec::with_capacity(header.piece_bytes as usize);
    let end = header.first + header.bytes;
    let mut at = header.first;
    while at < end {
        let next = (at + u64::from(header.piece_bytes)).min(end);
        piece.clear();
        for (part, range) in layout.fragments(at..next) {
            piece.extend_from_slice(&parts[part].bytes[range]);
        }
        take(&piece, gradwire_codec::crc32(&piece).to_le_bytes())?;
        at = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_cover_every_byte_once_and_leave_empty_parts_out() {
        let lengths = [0u64, 3, 0, 0, 5, 1, 0];
        let layout = Layout::new(lengths.into_iter());
        for start in 0..=9u64 {
            for end in start..=9 {
                let whole: Vec<(usize, u64)> = lengths
                    .iter()
                    .enumerate()
                    .flat_map(|(part, bytes)| (0..*bytes).map(move |at| (part, at)))
                    .collect();
                let fragments = layout.fragments(start..end);
                let bytes: Vec<(usize, u64)> =
                    fragments.flat_map(|(part, range)| range.map(move |at| (part, at as u64))).collect();
                assert_eq!(bytes, whole[start as usize..end as usize]);
            }
        }
    }
}
