//! Control records: what ranks write to the job's topics (docs/wire.md, section 7).
//!
//! A record carries the job's instance, the rank that wrote it, a unique id and a MAC made with the job's secret and
//! name. One that does not verify is counted, never applied: whoever can write to the topic can forge everything
//! else in it.

mod audit;
mod version;

use gradwire_proto::membership::RecordId;
use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Rank, Secret};

pub(crate) use audit::KIND as AUDIT_KIND;
pub use audit::{AuditKind, AuditRecord};
pub use version::VersionRecord;
pub(crate) use version::{Assembly, VersionPart};

/// Version of the record format. The fields of [`Header`] stay where they are in every version, and the MAC covers
/// them, so that ranks of different versions can tell each other.
pub(crate) const RECORD_VERSION: u16 = 2;
/// Largest record. Far below the size that brokers accept (5 MB by default).
pub(crate) const RECORD_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX + MAC_BYTES;

const MAGIC: [u8; 4] = *b"GWCR";
const HEADER_BYTES: usize = 48;
const MAC_BYTES: usize = 32;
const BODY_BYTES_MAX: usize = 1 << 20;
const PURPOSE: &str = "gradwire control record";

const _: () = assert!(RECORD_BYTES_MAX < 5_000_000 / 2);

/// A launch of a job: made anew for every one.
pub type Instance = [u8; 16];

/// What every record starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u16,
    pub(crate) kind: u16,
    pub(crate) instance: Instance,
    pub(crate) id: RecordId,
    pub(crate) rank: Rank,
}

/// A record as it was read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record<'a> {
    pub(crate) header: Header,
    pub(crate) body: &'a [u8],
    /// Whether it was made with our secret, for a job of our name.
    pub(crate) verified: bool,
}

/// Makes and checks records of one job.
#[derive(Clone, Debug)]
pub(crate) struct RecordKey {
    secret: Secret,
    job: String,
}

impl RecordKey {
    pub(crate) fn new(secret: Secret, job: impl Into<String>) -> Self {
        Self { secret, job: job.into() }
    }

    /// The record as it travels: header, body, MAC.
    pub(crate) fn seal(&self, header: Header, body: &[u8]) -> Vec<u8> {
        debug_assert!(body.len() <= BODY_BYTES_MAX);
        let mut out = Vec::with_capacity(HEADER_BYTES + body.len() + MAC_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&header.version.to_le_bytes());
        out.extend_from_slice(&header.kind.to_le_bytes());
        out.extend_from_slice(&header.instance);
        out.extend_from_slice(&header.id);
        out.extend_from_slice(&header.rank.0.to_le_bytes());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(body);
        let mac = self.secret.proof(PURPOSE, &[self.job.as_bytes(), &out]);
        out.extend_from_slice(&mac);
        out
    }

    /// Whether a body is small enough for a record.
    pub(crate) const fn fits(body: &[u8]) -> bool {
        body.len() <= BODY_BYTES_MAX
    }

    /// Reads a record and checks its MAC. The body is not looked at.
    ///
    /// # Errors
    /// When it is not a record.
    pub(crate) fn open<'a>(&self, bytes: &'a [u8]) -> Result<Record<'a>, Malformed> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(Malformed("larger than any record"));
        }
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("not a control record"));
        }
        let header = Header {
            version: reader.u16()?,
            kind: reader.u16()?,
            instance: reader.array()?,
            id: reader.array()?,
            rank: Rank(reader.u32()?),
        };
        let length = reader.u32()? as usize;
        let body = reader.bytes(length)?;
        let mac: [u8; MAC_BYTES] = reader.array()?;
        reader.finish()?;
        let verified = self.secret.verifies(PURPOSE, &[self.job.as_bytes(), &bytes[..HEADER_BYTES + length]], &mac);
        Ok(Record { header, body, verified })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use gradwire_proto::membership::Body;
    use gradwire_proto::{Epoch, Step, UnitIndex};
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> RecordKey {
        RecordKey::new(Secret::from_bytes([byte; 32]), "job")
    }

    fn header() -> Header {
        Header { version: RECORD_VERSION, kind: 1, instance: [2; 16], id: [3; 16], rank: Rank(4) }
    }

    /// A block marked `golden` in docs/wire.md.
    pub(crate) fn golden(name: &str) -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/wire.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (_, rest) = text.split_once(&format!("```golden {name}\n")).expect("the block is there");
        let (block, _) = rest.split_once("```").expect("a block ends");
        let digits = block.lines().map(|line| line.split('#').next().unwrap_or_default());
        digits.flat_map(str::split_whitespace).collect()
    }

    /// A change here is a change of the format: it needs a new version.
    #[test]
    fn records_are_as_documented() {
        let key = RecordKey::new(Secret::from_bytes([0x55; 32]), "digits");
        let (instance, id) = (std::array::from_fn(|i| i as u8), std::array::from_fn(|i| 0x10 + i as u8));
        let header = |kind, rank| Header { version: RECORD_VERSION, kind, instance, id, rank: Rank(rank) };
        let alive = Body::Alive { challenge: std::array::from_fn(|i| 0x20 + i as u8) };
        let bytes = key.seal(header(alive.kind(), 2), &alive.encode());
        assert_eq!(gradwire_proto::secret::hex(&bytes), golden("control-record"));
        let version = VersionRecord {
            epoch: Epoch(1),
            step: Step(7),
            owner: Rank(1),
            contributors: vec![Rank(0), Rank(1), Rank(3)],
            crcs: vec![(UnitIndex(5), 0xcbf4_3926)],
        };
        let part = version.parts().next().unwrap();
        let bytes = key.seal(header(VersionPart::KIND, 1), &part.encode());
        assert_eq!(gradwire_proto::secret::hex(&bytes), golden("control-version"));
    }

    #[test]
    fn a_record_verifies_with_its_secret_and_job_only() {
        let bytes = key(1).seal(header(), b"body");
        let record = key(1).open(&bytes).unwrap();
        assert_eq!((record.header, record.body, record.verified), (header(), &b"body"[..], true));
        assert!(!key(2).open(&bytes).unwrap().verified);
        let other_job = RecordKey::new(Secret::from_bytes([1; 32]), "other");
        assert!(!other_job.open(&bytes).unwrap().verified);
    }

    proptest! {
        #[test]
        fn any_change_is_noticed(position in 0_usize..86, flip in 1_u8..) {
            let mut bytes = key(1).seal(header(), b"body");
            bytes[position % 84] ^= flip;
            if let Ok(record) = key(1).open(&bytes) {
                prop_assert!(!record.verified);
            }
        }

        #[test]
        fn random_bytes_never_verify(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), magic in any::<bool>()) {
            if magic && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            if let Ok(record) = key(1).open(&bytes) {
                prop_assert!(!record.verified);
            }
        }
    }
}
