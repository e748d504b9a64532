//! How a process that joins a running job gets what it needs from the members (docs/wire.md, section 12).
//!
//! The newcomer asks, a member gives, over a stream of frames of the kinds [`Ask`](crate::frame::FrameKind::Ask) and
//! [`Give`](crate::frame::FrameKind::Give). Here are the bodies, who gives what, and what members keep; no IO.

mod journal;
mod seats;

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

pub use journal::{Journal, UnitResult};
pub use seats::{backup, giver, home, keeps, stands_in};

use crate::ids::{Epoch, Rank};
use crate::limits::{FAULT_DETAIL_BYTES_MAX, MANIFEST_BYTES_MAX, PAYLOAD_BYTES_MAX, TENSORS_MAX, WORLD_SIZE_MAX};
use crate::manifest::{Declaration, Manifest};
use crate::saved::{SavedPart, put_parts, read_parts};
use crate::wire::{Malformed, Reader, owned_text, put_text};

/// Bytes of a piece of state; the last one of a part may be shorter.
pub const PIECE_BYTES: u64 = PAYLOAD_BYTES_MAX as u64;
/// Most pieces that a state has: 2 PiB of it.
const PIECES_MAX: u64 = u32::MAX as u64;
/// Most declaration rounds.
const ROUNDS_MAX: usize = 1 << 16;
/// Largest answer in bytes, all of its frames together.
pub const ANSWER_BYTES_MAX: usize = MANIFEST_BYTES_MAX * 2;

/// What a newcomer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// What there is: [`Outline`].
    Outline,
    /// To keep the state as it is when so many steps are final, with the results of all later steps: of both what `seat` of
    /// `holders` keeps ([`keeps`]). Answered, when that step has come, with [`Snapshot`]: the pieces are being copied then.
    Snapshot {
        /// Steps that are final.
        commits: u64,
        /// The member's place among those that are asked.
        seat: u32,
        /// How many are.
        holders: u32,
    },
    /// A piece of the state that is kept: answered when it has been copied.
    Piece(u32),
    /// The results of the step after so many final ones: [`Results`], and then each of its updates of units whose home is
    /// this seat ([`home`]), which the member keeps. The state is not needed any more.
    Results {
        /// Steps that are final before it.
        commits: u64,
        /// The member's own seat, or that of the one before it, which is lost.
        seat: u32,
    },
    /// The checksums of all pieces that are kept: answered with [`Sums`] when all is done.
    Sums,
}

impl Ask {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Outline => out.push(1),
            Self::Snapshot { commits, seat, holders } => {
                out.push(2);
                out.extend_from_slice(&commits.to_le_bytes());
                out.extend_from_slice(&seat.to_le_bytes());
                out.extend_from_slice(&holders.to_le_bytes());
            }
            Self::Piece(piece) => {
                out.push(3);
                out.extend_from_slice(&piece.to_le_bytes());
            }
            Self::Results { commits, seat } => {
                out.push(4);
                out.extend_from_slice(&commits.to_le_bytes());
                out.extend_from_slice(&seat.to_le_bytes());
            }
            Self::Sums => out.push(5),
        }
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let ask = match reader.u8()? {
            1 => Self::Outline,
            2 => Self::Snapshot { commits: reader.u64()?, seat: reader.u32()?, holders: reader.u32()? },
            3 => Self::Piece(reader.u32()?),
            4 => Self::Results { commits: reader.u64()?, seat: reader.u32()? },
            5 => Self::Sums,
            _ => return Err(Malformed("an unknown question")),
        };
        if let Self::Snapshot { seat, holders, .. } = ask
            && (holders > WORLD_SIZE_MAX || seat >= holders)
        {
            return Err(Malformed("a seat that is none"));
        }
        reader.finish()?;
        Ok(ask)
    }
}

/// What an answer is: the bucket of its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Given {
    /// An [`Outline`], in so many frames as it takes.
    Outline = 1,
    /// A [`Snapshot`], as above.
    Snapshot = 2,
    /// A piece of the state.
    Piece = 3,
    /// [`Results`], as above.
    Results = 4,
    /// One unit of results: tensor, place and type are in the header.
    Update = 5,
    /// The answer takes a while.
    Wait = 6,
    /// There is none: [`No`].
    No = 7,
    /// [`Sums`], in so many frames as it takes.
    Sums = 8,
}

impl Given {
    /// The answer with this code.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        let whole = [Self::Outline, Self::Snapshot, Self::Results, Self::Sums];
        let other = [Self::Piece, Self::Update, Self::Wait, Self::No];
        whole.into_iter().chain(other).find(|given| *given as u32 == code)
    }
}

/// What a member tells of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// The step that the job began with.
    pub first_step: u64,
    /// Steps that are final since.
    pub commits: u64,
    /// The member waits for others: it can keep its state as it is now.
    pub resting: bool,
    /// What was declared, by round.
    pub declared: Vec<Vec<Declaration>>,
}

impl Outline {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.first_step.to_le_bytes());
        out.extend_from_slice(&self.commits.to_le_bytes());
        out.push(self.resting.into());
        out.extend_from_slice(&(self.declared.len() as u32).to_le_bytes());
        for round in &self.declared {
            let at = out.len();
            out.extend_from_slice(&[0; 4]);
            // Cannot fail: it was agreed on, and so travelled as a manifest before.
            let _ = Manifest { tensors: round.clone() }.encode(&mut out);
            let length = (out.len() - at - 4) as u32;
            out[at..at + 4].copy_from_slice(&length.to_le_bytes());
        }
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (first_step, commits) = (reader.u64()?, reader.u64()?);
        let resting = flag(reader.u8()?)?;
        let rounds = count(&mut reader, ROUNDS_MAX)?;
        let mut declared = Vec::new();
        for _ in 0..rounds {
            let length = reader.u32()? as usize;
            declared.push(Manifest::decode(reader.bytes(length)?)?.tensors);
        }
        reader.finish()?;
        Ok(Self { first_step, commits, resting, declared })
    }
}

/// The state of which a member keeps its share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// All parts of the state: names, and lengths in bytes.
    pub parts: Vec<SavedPart>,
}

impl Snapshot {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_parts(&mut out, &self.parts);
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let parts = read_parts(&mut reader)?;
        reader.finish()?;
        Ok(Self { parts })
    }
}

/// The pieces that a member keeps, ascending, and the CRC-32 of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums(pub Vec<(u32, u32)>);

impl Sums {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 + self.0.len() * 8);
        out.extend_from_slice(&(self.0.len() as u32).to_le_bytes());
        for (piece, crc) in &self.0 {
            out.extend_from_slice(&piece.to_le_bytes());
            out.extend_from_slice(&crc.to_le_bytes());
        }
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let count = reader.u32()? as usize;
        if count > reader.remaining() / 8 {
            return Err(Malformed("a list that is longer than its message"));
        }
        let sums = (0..count).map(|_| Ok((reader.u32()?, reader.u32()?))).collect::<Result<_, Malformed>>()?;
        reader.finish()?;
        Ok(Self(sums))
    }
}

/// What came of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Results {
    /// The epoch in which it was made.
    pub epoch: Epoch,
    /// Who contributed.
    pub members: Vec<Rank>,
    /// Steps that are final now.
    pub commits: u64,
    /// How many updates follow.
    pub updates: u32,
}

impl Results {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.commits.to_le_bytes());
        out.extend_from_slice(&self.updates.to_le_bytes());
        out.extend_from_slice(&(self.members.len() as u32).to_le_bytes());
        self.members.iter().for_each(|rank| out.extend_from_slice(&rank.0.to_le_bytes()));
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (epoch, commits, updates) = (Epoch(reader.u64()?), reader.u64()?, reader.u32()?);
        let members = count(&mut reader, WORLD_SIZE_MAX as usize)?;
        let members = (0..members).map(|_| reader.u32().map(Rank)).collect::<Result<_, _>>()?;
        reader.finish()?;
        Ok(Self { epoch, members, commits, updates })
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct No {
    /// What to do about it.
    pub reason: Reason,
    /// Steps that are final now.
    pub commits: u64,
    /// For people.
    pub detail: String,
}

/// What kind of reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The step is not final yet: ask again.
    NotYet = 1,
    /// It was, but is not there any more: begin with a later one.
    TooLate = 2,
    /// Another newcomer is served: ask again later.
    Busy = 3,
    /// There never will be one.
    Never = 4,
}

impl No {
    /// The body.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.push(self.reason as u8);
        out.extend_from_slice(&self.commits.to_le_bytes());
        put_text(&mut out, &self.detail, FAULT_DETAIL_BYTES_MAX);
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let reason = match reader.u8()? {
            1 => Reason::NotYet,
            2 => Reason::TooLate,
            3 => Reason::Busy,
            4 => Reason::Never,
            _ => return Err(Malformed("an unknown reason")),
        };
        let (commits, detail) = (reader.u64()?, owned_text(&mut reader, FAULT_DETAIL_BYTES_MAX)?);
        reader.finish()?;
        Ok(Self { reason, commits, detail })
    }
}

/// The pieces of a state whose parts have these lengths, in their order: which part, and which of its bytes. Nothing if
/// there are more than can be.
#[must_use]
pub fn pieces(lengths: &[u64]) -> Option<Vec<(u32, Range<u64>)>> {
    let count = lengths.iter().try_fold(0_u64, |sum, length| sum.checked_add(length.div_ceil(PIECE_BYTES)))?;
    if count > PIECES_MAX || lengths.len() > TENSORS_MAX as usize {
        return None;
    }
    let of = |(part, length): (u32, &u64)| {
        let length = *length;
        let piece = move |at: u64| (part, at * PIECE_BYTES..((at + 1) * PIECE_BYTES).min(length));
        (0..length.div_ceil(PIECE_BYTES)).map(piece)
    };
    Some((0..).zip(lengths).flat_map(of).collect())
}

fn flag(byte: u8) -> Result<bool, Malformed> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed("a flag that is neither set nor clear")),
    }
}

fn count(reader: &mut Reader<'_>, max: usize) -> Result<usize, Malformed> {
    let count = reader.u32()? as usize;
    // Each item takes a byte at least, so nothing is reserved for what cannot come.
    if count > max || count > reader.remaining() { Err(Malformed("a list that is too long")) } else { Ok(count) }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;
    use crate::dtype::{Collective, DType, ReduceOp, WireFormat};

    fn outline() -> Outline {
        let declaration = Declaration {
            name: "w".to_owned(),
            shape: vec![3, 4],
            dtype: DType::F32,
            collective: Collective::AllReduce,
            reduce: ReduceOp::Sum,
            wire: WireFormat::Fp16,
            priority: -1,
        };
        Outline { first_step: 5, commits: 7, resting: true, declared: vec![vec![], vec![declaration]] }
    }

    fn exact<T: PartialEq + core::fmt::Debug>(value: &T, bytes: &[u8], decode: fn(&[u8]) -> Result<T, Malformed>) {
        assert_eq!(decode(bytes).as_ref(), Ok(value));
        for length in 0..bytes.len() {
            decode(&bytes[..length]).unwrap_err();
        }
        decode(&[bytes, &[0]].concat()).unwrap_err();
    }

    #[test]
    fn bodies_round_trip_and_reject_every_other_length() {
        let snapshot = Ask::Snapshot { commits: 1 << 40, seat: 2, holders: 3 };
        for ask in [Ask::Outline, snapshot, Ask::Piece(9), Ask::Results { commits: 10, seat: 2 }, Ask::Sums] {
            exact(&ask, &ask.encode(), Ask::decode);
        }
        exact(&outline(), &outline().encode(), Outline::decode);
        let part = |name: &str, bytes| SavedPart { name: name.to_owned(), bytes };
        let snapshot = Snapshot { parts: vec![part("a", 10), part("b", 0)] };
        exact(&snapshot, &snapshot.encode(), Snapshot::decode);
        let sums = Sums(vec![(0, 77), (5, 8)]);
        exact(&sums, &sums.encode(), Sums::decode);
        let results = Results { epoch: Epoch(4), members: vec![Rank(0), Rank(7)], commits: 12, updates: 3 };
        exact(&results, &results.encode(), Results::decode);
        for reason in [Reason::NotYet, Reason::TooLate, Reason::Busy, Reason::Never] {
            let no = No { reason, commits: 3, detail: "why".to_owned() };
            exact(&no, &no.encode(), No::decode);
        }
        Ask::decode(&Ask::Snapshot { commits: 0, seat: 3, holders: 3 }.encode()).unwrap_err();
    }

    #[test]
    fn pieces_cover_every_part_once() {
        let lengths = [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1];
        let pieces = pieces(&lengths).unwrap();
        for (part, length) in (0..).zip(lengths) {
            let mut at = 0;
            for (_, range) in pieces.iter().filter(|(of, _)| *of == part) {
                assert_eq!(range.start, at);
                assert!(range.end > range.start && range.end - range.start <= PIECE_BYTES);
                at = range.end;
            }
            assert_eq!(at, length);
        }
        assert_eq!(super::pieces(&[u64::MAX, 1]), None);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Ask::decode(&bytes), Outline::decode(&bytes), Snapshot::decode(&bytes));
            let _ = (Results::decode(&bytes), No::decode(&bytes), Sums::decode(&bytes));
        }

        #[test]
        fn damaged_bodies_never_panic(position in 0_usize..80, value in any::<u8>()) {
            let mut bytes = outline().encode();
            let at = position % bytes.len();
            bytes[at] = value;
            let _ = Outline::decode(&bytes);
        }
    }
}
