//! What control records say, by kind (docs/wire.md, section 7).

use alloc::string::String;
use alloc::vec::Vec;

use super::{Departure, Member, RecordId, Snapshot, View};
use crate::limits::{FAULT_DETAIL_BYTES_MAX, WORLD_SIZE_MAX};
use crate::member::Endpoint;
use crate::wire::{Malformed, Reader, owned_text, put_text};
use crate::{Epoch, Fault, Rank};

/// Most candidates that wait, and that a snapshot holds.
pub const SNAPSHOT_CANDIDATES_MAX: usize = WORLD_SIZE_MAX as usize;
/// Most gone processes that a snapshot holds: every member and candidate may be one.
const SNAPSHOT_GONE_MAX: usize = SNAPSHOT_CANDIDATES_MAX + WORLD_SIZE_MAX as usize;

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A process wants to be a member. The record's id names it from now on.
    Join {
        /// How many ranks the job starts with.
        world_size: u32,
        /// Version of the data path's protocol.
        protocol: u16,
        /// Where it can be reached.
        endpoint: Endpoint,
    },
    /// The members of the next epoch.
    Propose {
        /// Join of the proposing process.
        author: RecordId,
        /// The epoch that would begin.
        epoch: Epoch,
        /// The view that it follows: all zero before the first.
        base: RecordId,
        /// In ascending order of their ranks.
        members: Vec<ProposedMember>,
    },
    /// The process met a fault that ends the job.
    Failed {
        /// Its Join.
        author: RecordId,
        /// What it met.
        fault: Fault,
    },
    /// The process is gone, in good order.
    Left {
        /// Its Join.
        author: RecordId,
    },
    /// Asks other live jobs of this name to answer. The record's id names the question.
    Challenge,
    /// Answers a challenge: this job lives.
    Alive {
        /// The question.
        challenge: RecordId,
    },
    /// A member does not count on a process any more.
    Suspect {
        /// Join of the member that says so.
        author: RecordId,
        /// The epoch in which it says so.
        epoch: Epoch,
        /// Join of the process.
        member: RecordId,
        /// Why, for people.
        reason: String,
    },
    /// What a member knows, for who cannot read the log from its start.
    Snapshot(Snapshot),
    /// A process that joined a running job has what it needs to take part.
    Ready {
        /// Its Join.
        author: RecordId,
    },
}

/// A member as a proposal names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProposedMember {
    /// Its rank.
    pub rank: Rank,
    /// Its Join.
    pub id: RecordId,
}

impl Body {
    /// The kind of a Join.
    pub const JOIN: u16 = 1;
    /// The kind of a Propose.
    pub const PROPOSE: u16 = 2;
    /// The kind of a Snapshot.
    pub const SNAPSHOT: u16 = 8;
    /// The kind of a Ready.
    pub const READY: u16 = 9;

    /// The number of this kind in the record's header.
    #[must_use]
    pub const fn kind(&self) -> u16 {
        match self {
            Self::Join { .. } => Self::JOIN,
            Self::Propose { .. } => Self::PROPOSE,
            Self::Failed { .. } => 3,
            Self::Left { .. } => 4,
            Self::Challenge => 5,
            Self::Alive { .. } => 6,
            Self::Suspect { .. } => 7,
            Self::Snapshot(_) => Self::SNAPSHOT,
            Self::Ready { .. } => Self::READY,
        }
    }

    /// The body as it travels. A reason is cut to [`FAULT_DETAIL_BYTES_MAX`] bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Join { world_size, protocol, endpoint } => {
                out.extend_from_slice(&world_size.to_le_bytes());
                out.extend_from_slice(&protocol.to_le_bytes());
                endpoint.encode(&mut out);
            }
            Self::Propose { author, epoch, base, members } => {
                out.extend_from_slice(author);
                out.extend_from_slice(&epoch.0.to_le_bytes());
                out.extend_from_slice(base);
                out.extend_from_slice(&(members.len() as u32).to_le_bytes());
                for member in members {
                    out.extend_from_slice(&member.rank.0.to_le_bytes());
                    out.extend_from_slice(&member.id);
                }
            }
            Self::Failed { author, fault } => {
                out.extend_from_slice(author);
                fault.encode(&mut out);
            }
            Self::Left { author } | Self::Ready { author } => out.extend_from_slice(author),
            Self::Challenge => {}
            Self::Alive { challenge } => out.extend_from_slice(challenge),
            Self::Suspect { author, epoch, member, reason } => {
                out.extend_from_slice(author);
                out.extend_from_slice(&epoch.0.to_le_bytes());
                out.extend_from_slice(member);
                put_text(&mut out, reason, FAULT_DETAIL_BYTES_MAX);
            }
            Self::Snapshot(snapshot) => encode_snapshot(snapshot, &mut out),
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
            Self::JOIN => Self::Join {
                world_size: reader.u32()?,
                protocol: reader.u16()?,
                endpoint: Endpoint::decode(&mut reader)?,
            },
            Self::PROPOSE => Self::Propose {
                author: reader.array()?,
                epoch: Epoch(reader.u64()?),
                base: reader.array()?,
                members: list(&mut reader, WORLD_SIZE_MAX as usize, |reader| {
                    Ok(ProposedMember { rank: Rank(reader.u32()?), id: reader.array()? })
                })?,
            },
            3 => {
                let author = reader.array()?;
                let fault = Fault::decode(reader.bytes(reader.remaining())?)?;
                Self::Failed { author, fault }
            }
            4 => Self::Left { author: reader.array()? },
            5 => Self::Challenge,
            6 => Self::Alive { challenge: reader.array()? },
            7 => Self::Suspect {
                author: reader.array()?,
                epoch: Epoch(reader.u64()?),
                member: reader.array()?,
                reason: owned_text(&mut reader, FAULT_DETAIL_BYTES_MAX)?,
            },
            Self::SNAPSHOT => Self::Snapshot(decode_snapshot(&mut reader)?),
            Self::READY => Self::Ready { author: reader.array()? },
            _ => return Ok(None),
        };
        reader.finish()?;
        Ok(Some(body))
    }
}

fn encode_snapshot(snapshot: &Snapshot, out: &mut Vec<u8>) {
    let Snapshot { view, candidates, ready, gone, retired } = snapshot;
    out.extend_from_slice(&view.epoch.0.to_le_bytes());
    out.extend_from_slice(&view.id);
    for members in [&view.members, candidates] {
        out.extend_from_slice(&(members.len() as u32).to_le_bytes());
        for member in members {
            out.extend_from_slice(&member.rank.0.to_le_bytes());
            out.extend_from_slice(&member.id);
            member.endpoint.encode(out);
        }
    }
    out.extend_from_slice(&(ready.len() as u32).to_le_bytes());
    out.extend(ready.iter().flatten());
    out.extend_from_slice(&(gone.len() as u32).to_le_bytes());
    for (id, departure) in gone {
        out.extend_from_slice(id);
        let by = match departure {
            Departure::Left => u32::MAX,
            Departure::Suspected(by) => by.0,
        };
        out.extend_from_slice(&by.to_le_bytes());
    }
    out.extend_from_slice(&(retired.len() as u32).to_le_bytes());
    out.extend(retired.iter().flatten());
}

fn decode_snapshot(reader: &mut Reader<'_>) -> Result<Snapshot, Malformed> {
    let (epoch, id) = (Epoch(reader.u64()?), reader.array()?);
    let member = |reader: &mut Reader<'_>| {
        let (rank, id) = (Rank(reader.u32()?), reader.array()?);
        Ok(Member { rank, id, endpoint: Endpoint::decode(reader)? })
    };
    let members = list(reader, WORLD_SIZE_MAX as usize, member)?;
    if !members.windows(2).all(|pair| pair[0].rank < pair[1].rank) {
        return Err(Malformed("members that are not in the order of their ranks"));
    }
    let candidates = list(reader, SNAPSHOT_CANDIDATES_MAX, member)?;
    let ready = list(reader, SNAPSHOT_CANDIDATES_MAX, |reader| reader.array())?;
    let gone = list(reader, SNAPSHOT_GONE_MAX, |reader| {
        let (id, by) = (reader.array()?, reader.u32()?);
        Ok((id, if by == u32::MAX { Departure::Left } else { Departure::Suspected(Rank(by)) }))
    })?;
    let retired = list(reader, super::RETIRED_MAX, |reader| reader.array())?;
    Ok(Snapshot { view: View { epoch, id, members }, candidates, ready, gone, retired })
}

/// A list behind its 4-byte length, which is checked before anything is read or allocated.
fn list<T>(
    reader: &mut Reader<'_>,
    items_max: usize,
    mut item: impl FnMut(&mut Reader<'_>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let count = reader.u32()? as usize;
    if count > items_max {
        return Err(Malformed("a list that is longer than it may be"));
    }
    (0..count).map(|_| item(reader)).collect()
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;
    use crate::member::HostId;
    use crate::{FaultKind, Step};

    fn bodies() -> Vec<Body> {
        let endpoint = Endpoint {
            addresses: vec!["10.0.0.1:7000".parse().unwrap(), "[::1]:1".parse().unwrap()],
            host: HostId([7; 16]),
            socket: "gradwire/1".to_owned(),
            hostname: "node".to_owned(),
        };
        let member = |rank: u32| Member { rank: Rank(rank), id: [rank as u8; 16], endpoint: endpoint.clone() };
        let fault =
            Fault::new(FaultKind::RankDied, "gone").at(Rank(3)).tensor("w").step(Step(1 << 40)).reported_by(Rank(0));
        let members =
            vec![ProposedMember { rank: Rank(0), id: [1; 16] }, ProposedMember { rank: Rank(5), id: [2; 16] }];
        vec![
            Body::Join { world_size: 4, protocol: 1, endpoint: endpoint.clone() },
            Body::Propose { author: [1; 16], epoch: Epoch(2), base: [3; 16], members },
            Body::Failed { author: [1; 16], fault },
            Body::Failed { author: [1; 16], fault: Fault::new(FaultKind::Closed, "") },
            Body::Left { author: [1; 16] },
            Body::Challenge,
            Body::Alive { challenge: [9; 16] },
            Body::Suspect { author: [1; 16], epoch: Epoch(7), member: [2; 16], reason: "silent for 3 s".to_owned() },
            Body::Snapshot(Snapshot {
                view: View { epoch: Epoch(3), id: [8; 16], members: vec![member(0), member(2)] },
                candidates: vec![member(7)],
                ready: vec![[7; 16]],
                gone: vec![([2; 16], Departure::Left), ([7; 16], Departure::Suspected(Rank(0)))],
                retired: vec![[1; 16]],
            }),
            Body::Ready { author: [4; 16] },
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
    }

    #[test]
    fn lists_are_bounded_before_they_are_read() {
        let propose = [&[0; 40][..], &u32::MAX.to_le_bytes()].concat();
        assert_eq!(Body::decode(2, &propose), Err(Malformed("a list that is longer than it may be")));
        let snapshot = [&[0; 24][..], &u32::MAX.to_le_bytes()].concat();
        assert_eq!(Body::decode(8, &snapshot), Err(Malformed("a list that is longer than it may be")));
    }

    proptest! {
        #[test]
        fn random_bodies_never_panic(kind in 0_u16..11, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(Some(body)) = Body::decode(kind, &bytes) {
                prop_assert_eq!(Body::decode(kind, &body.encode()), Ok(Some(body)));
            }
        }

        #[test]
        fn damaged_bodies_never_panic(index in 0_usize..10, position in 0_usize..400, value in any::<u8>()) {
            let body = &bodies()[index];
            let mut bytes = body.encode();
            if !bytes.is_empty() {
                let position = position % bytes.len();
                bytes[position] = value;
                let _ = Body::decode(body.kind(), &bytes);
            }
        }
    }
}
