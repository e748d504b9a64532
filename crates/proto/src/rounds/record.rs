//! What the records of the rounds' log say, by kind (docs/wire.md, section 10).

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{ContributionId, Entry, LatePolicy, Open};
use crate::limits::{CARRY_ROUNDS_MAX, FEDERATED_SHARDS_MAX, WORLD_SIZE_MAX};
use crate::wire::{Malformed, Reader};
use crate::{Rank, ReduceOp, Round, WireFormat};

/// Most entries of one Close: each contributor's of this round, and its carried ones.
const ENTRIES_MAX: usize = WORLD_SIZE_MAX as usize * (1 + CARRY_ROUNDS_MAX as usize);

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// How the job is run: from the first contributor.
    Open(Open),
    /// All pieces of a contribution are at the broker. The record's rank is the contributor.
    Contributed {
        /// The round that it was made for.
        round: Round,
        /// Which of the contributor's attempts.
        contribution: ContributionId,
        /// CRC-32 of each shard, as it travels.
        crcs: Arc<[u32]>,
    },
    /// Who is in a round's sums. The record's rank is the aggregator's number.
    Close {
        /// The round.
        round: Round,
        /// In ascending order.
        entries: Vec<Entry>,
    },
    /// All pieces of a shard's result are at the broker. The record's rank is the aggregator's number.
    Published {
        /// The round.
        round: Round,
        /// The shard.
        shard: u32,
        /// What the result is, and where.
        result: Published,
    },
    /// An aggregator has subscribed, for the first time or again.
    AggregatorJoined {
        /// Names the process.
        aggregator: ContributionId,
    },
}

/// A shard's result, and where its first piece is in the results topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// CRC-32 of the result, as it travels.
    pub crc: u32,
    /// The broker's name for the message: ledger.
    pub ledger: u64,
    /// And entry.
    pub entry: u64,
}

impl Body {
    /// The first kind of the federated mode; others follow.
    pub const KIND_FIRST: u16 = 48;
    /// The kind of an update, in the updates topic.
    pub const UPDATE: u16 = 53;
    /// The kind of a piece of a result, in the results topic.
    pub const RESULT: u16 = 54;

    /// The number of this kind in the record's header.
    #[must_use]
    pub const fn kind(&self) -> u16 {
        match self {
            Self::Open(_) => Self::KIND_FIRST,
            Self::Contributed { .. } => 49,
            Self::Close { .. } => 50,
            Self::Published { .. } => 51,
            Self::AggregatorJoined { .. } => 52,
        }
    }

    /// The body as it travels.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Open(open) => {
                out.extend_from_slice(&open.contributors.to_le_bytes());
                out.extend_from_slice(&open.quorum.to_le_bytes());
                out.extend_from_slice(&[open.late as u8, open.wire as u8, open.op as u8, 0]);
                out.extend_from_slice(&open.shard_elements.to_le_bytes());
                out.extend_from_slice(&open.elements.to_le_bytes());
            }
            Self::Contributed { round, contribution, crcs } => {
                out.extend_from_slice(&round.0.to_le_bytes());
                out.extend_from_slice(contribution);
                out.extend_from_slice(&(crcs.len() as u32).to_le_bytes());
                crcs.iter().for_each(|crc| out.extend_from_slice(&crc.to_le_bytes()));
            }
            Self::Close { round, entries } => {
                out.extend_from_slice(&round.0.to_le_bytes());
                out.extend_from_slice(&(entries.len() as u32).to_le_bytes());
                for entry in entries {
                    out.extend_from_slice(&entry.contributor.0.to_le_bytes());
                    out.extend_from_slice(&entry.origin.0.to_le_bytes());
                }
            }
            Self::Published { round, shard, result } => {
                out.extend_from_slice(&round.0.to_le_bytes());
                out.extend_from_slice(&shard.to_le_bytes());
                out.extend_from_slice(&result.crc.to_le_bytes());
                out.extend_from_slice(&result.ledger.to_le_bytes());
                out.extend_from_slice(&result.entry.to_le_bytes());
            }
            Self::AggregatorJoined { aggregator } => out.extend_from_slice(aggregator),
        }
        out
    }

    /// Reads a body of this kind; nothing for a kind that is not known.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(kind: u16, bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let mut reader = Reader::new(bytes);
        let body = match kind {
            Self::KIND_FIRST => Self::Open(open(&mut reader)?),
            49 => {
                let (round, contribution) = (Round(reader.u64()?), reader.array()?);
                let crcs = list(&mut reader, FEDERATED_SHARDS_MAX as usize, |reader| reader.u32())?;
                Self::Contributed { round, contribution, crcs: crcs.into() }
            }
            50 => {
                let round = Round(reader.u64()?);
                let entries = list(&mut reader, ENTRIES_MAX, |reader| {
                    Ok(Entry { contributor: Rank(reader.u32()?), origin: Round(reader.u64()?) })
                })?;
                Self::Close { round, entries }
            }
            51 => Self::Published {
                round: Round(reader.u64()?),
                shard: reader.u32()?,
                result: Published { crc: reader.u32()?, ledger: reader.u64()?, entry: reader.u64()? },
            },
            52 => Self::AggregatorJoined { aggregator: reader.array()? },
            _ => return Ok(None),
        };
        reader.finish()?;
        Ok(Some(body))
    }
}

fn open(reader: &mut Reader<'_>) -> Result<Open, Malformed> {
    let (contributors, quorum) = (reader.u32()?, reader.u32()?);
    let [late, wire, op, reserved] = reader.array()?;
    let (shard_elements, elements) = (reader.u32()?, reader.u64()?);
    if reserved != 0 {
        return Err(Malformed("a reserved byte is set"));
    }
    Ok(Open {
        contributors,
        quorum,
        late: LatePolicy::from_code(late).ok_or(Malformed("an unknown policy for late contributions"))?,
        wire: WireFormat::from_code(wire).ok_or(Malformed("an unknown wire format"))?,
        op: ReduceOp::from_code(op).ok_or(Malformed("an unknown reduction"))?,
        shard_elements,
        elements,
    })
}

/// A list behind its 4-byte length, which is checked before anything is read or allocated.
fn list<T>(
    reader: &mut Reader<'_>,
    items_max: usize,
    mut item: impl FnMut(&mut Reader<'_>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let count = reader.u32()? as usize;
    if count > items_max || count > reader.remaining() {
        return Err(Malformed("a list that is longer than it may be"));
    }
    (0..count).map(|_| item(reader)).collect()
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    fn bodies() -> Vec<Body> {
        let open = Open {
            contributors: 5,
            quorum: 3,
            late: LatePolicy::Carry,
            wire: WireFormat::Fp16,
            op: ReduceOp::Mean,
            shard_elements: 4096,
            elements: 10_000,
        };
        let entries =
            vec![Entry { contributor: Rank(0), origin: Round(6) }, Entry { contributor: Rank(2), origin: Round(7) }];
        vec![
            Body::Open(open),
            Body::Contributed { round: Round(7), contribution: [1; 16], crcs: vec![1, 2, u32::MAX].into() },
            Body::Close { round: Round(7), entries },
            Body::Published { round: Round(7), shard: 3, result: Published { crc: 9, ledger: 1 << 40, entry: 5 } },
            Body::AggregatorJoined { aggregator: [4; 16] },
        ]
    }

    #[test]
    fn bodies_round_trip_and_reject_every_other_length() {
        for body in bodies() {
            let bytes = body.encode();
            assert_eq!(Body::decode(body.kind(), &bytes), Ok(Some(body.clone())));
            for length in 0..bytes.len() {
                Body::decode(body.kind(), &bytes[..length]).unwrap_err();
            }
            Body::decode(body.kind(), &[&bytes[..], &[0]].concat()).unwrap_err();
        }
        assert_eq!(Body::decode(Body::UPDATE, &[]), Ok(None));
    }

    #[test]
    fn lists_are_bounded_before_they_are_read() {
        for (kind, front) in [(49, 24), (50, 8)] {
            let bytes = [&vec![0; front][..], &u32::MAX.to_le_bytes()].concat();
            assert_eq!(Body::decode(kind, &bytes), Err(Malformed("a list that is longer than it may be")));
        }
    }

    proptest! {
        #[test]
        fn random_bodies_never_panic(kind in 48_u16..54, bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some(body)) = Body::decode(kind, &bytes) {
                prop_assert_eq!(body.encode(), bytes);
            }
        }
    }
}
