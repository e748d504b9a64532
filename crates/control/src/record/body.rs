//! Bodies of the records of the control log.

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::member::Endpoint;
use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Epoch, Fault};

use super::RecordId;

/// What a record of the control log says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The rank is there, and can be reached at the endpoint. The record's id stands for this process.
    Join { world_size: u32, protocol: u16, endpoint: Endpoint },
    /// The members of an epoch: the ids of their Join records, by rank.
    Propose { epoch: Epoch, members: Vec<RecordId> },
    /// The rank met a fault that ends the job.
    Failed(Fault),
    /// The rank is gone, in good order.
    Left,
    /// Asks other live jobs of this name to answer. The record's id names the question.
    Challenge,
    /// Answers a challenge: this job lives.
    Alive { challenge: RecordId },
}

impl Body {
    /// The kind of a Join.
    pub(crate) const JOIN: u16 = 1;
    /// The kind of a Propose.
    pub(crate) const PROPOSE: u16 = 2;

    /// The number of this kind in the record's header.
    pub(crate) fn kind(&self) -> u16 {
        match self {
            Self::Join { .. } => Self::JOIN,
            Self::Propose { .. } => Self::PROPOSE,
            Self::Failed(_) => 3,
            Self::Left => 4,
            Self::Challenge => 5,
            Self::Alive { .. } => 6,
        }
    }

    /// The body as it travels.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Join { world_size, protocol, endpoint } => {
                out.extend_from_slice(&world_size.to_le_bytes());
                out.extend_from_slice(&protocol.to_le_bytes());
                endpoint.encode(&mut out);
            }
            Self::Propose { epoch, members } => {
                out.extend_from_slice(&epoch.0.to_le_bytes());
                out.extend_from_slice(&(members.len() as u32).to_le_bytes());
                out.extend(members.iter().flatten());
            }
            Self::Failed(fault) => fault.encode(&mut out),
            Self::Left | Self::Challenge => {}
            Self::Alive { challenge } => out.extend_from_slice(challenge),
        }
        out
    }

    /// Reads a body of this kind; nothing for a kind that is not known.
    ///
    /// # Errors
    /// When it is malformed.
    pub(crate) fn decode(kind: u16, bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let mut reader = Reader::new(bytes);
        let body = match kind {
            Self::JOIN => Self::Join {
                world_size: reader.u32()?,
                protocol: reader.u16()?,
                endpoint: Endpoint::decode(&mut reader)?,
            },
            Self::PROPOSE => {
                let epoch = Epoch(reader.u64()?);
                let count = reader.u32()?;
                if count > WORLD_SIZE_MAX {
                    return Err(Malformed("more members than a job may have"));
                }
                let members = (0..count).map(|_| reader.array()).collect::<Result<_, _>>()?;
                Self::Propose { epoch, members }
            }
            3 => return Ok(Some(Self::Failed(Fault::decode(bytes)?))),
            4 => Self::Left,
            5 => Self::Challenge,
            6 => Self::Alive { challenge: reader.array()? },
            _ => return Ok(None),
        };
        reader.finish()?;
        Ok(Some(body))
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::member::HostId;
    use gradwire_proto::{FaultKind, Rank, Step};
    use proptest::prelude::*;

    use super::*;

    fn bodies() -> Vec<Body> {
        let endpoint = Endpoint {
            addresses: vec!["10.0.0.1:7000".parse().unwrap(), "[::1]:1".parse().unwrap()],
            host: HostId([7; 16]),
            socket: "gradwire/1".to_owned(),
            hostname: "node".to_owned(),
        };
        let fault =
            Fault::new(FaultKind::RankDied, "gone").at(Rank(3)).tensor("w").step(Step(1 << 40)).reported_by(Rank(0));
        vec![
            Body::Join { world_size: 4, protocol: 1, endpoint },
            Body::Propose { epoch: Epoch(1), members: vec![[1; 16], [2; 16]] },
            Body::Failed(fault),
            Body::Failed(Fault::new(FaultKind::Closed, "")),
            Body::Left,
            Body::Challenge,
            Body::Alive { challenge: [9; 16] },
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
    fn a_list_of_members_is_bounded_before_it_is_read() {
        let mut bytes = 1_u64.to_le_bytes().to_vec();
        bytes.extend(u32::MAX.to_le_bytes());
        Body::decode(2, &bytes).unwrap_err();
    }

    proptest! {
        #[test]
        fn random_bodies_never_panic(kind in 0_u16..9, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(Some(body)) = Body::decode(kind, &bytes) {
                prop_assert_eq!(Body::decode(kind, &body.encode()), Ok(Some(body)));
            }
        }
    }
}
