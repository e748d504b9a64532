//! The link header: what stands before every message and write on a TCP stream (docs/wire.md, section 8).

use gradwire_proto::RegionKey;
use gradwire_proto::frame::payload_crc;
use gradwire_proto::limits::MESSAGE_BYTES_MAX;

use super::{IMMEDIATE_BYTES_MAX, WRITE_BYTES_MAX};
use crate::Remote;

/// Bytes of a link header.
pub(super) const LINK_HEADER_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"GWT1";
const KIND_MESSAGE: u8 = 1;
const KIND_WRITE: u8 = 2;

/// What follows on the stream: `inline` bytes (the message, or the immediate), then `payload` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the message or the immediate.
    pub(super) inline: usize,
    /// The write, if it is one and not a message.
    pub(super) write: Option<Write>,
}

/// The payload of a write and where it is to land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// Bytes of the payload.
    pub(super) payload: usize,
    /// Where it is to land in the receiver's memory.
    pub(super) target: Remote,
}

impl Header {
    /// The header as it travels. Lengths are within the limits: the send queue refused everything else.
    pub(super) fn encode(&self) -> [u8; LINK_HEADER_BYTES] {
        let mut out = [0; LINK_HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = if self.write.is_some() { KIND_WRITE } else { KIND_MESSAGE };
        out[6..8].copy_from_slice(&(self.inline as u16).to_le_bytes());
        if let Some(write) = self.write {
            out[8..12].copy_from_slice(&(write.payload as u32).to_le_bytes());
            out[12..20].copy_from_slice(&write.target.region.0.to_le_bytes());
            out[20..28].copy_from_slice(&write.target.offset.to_le_bytes());
        }
        let crc = payload_crc(&out[..28]);
        out[28..32].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// The name of the first field that does not hold what it must.
    pub(super) fn decode(bytes: &[u8; LINK_HEADER_BYTES]) -> Result<Self, &'static str> {
        if bytes[0..4] != MAGIC {
            return Err("magic");
        }
        if field::<4>(bytes, 28) != payload_crc(&bytes[..28]).to_le_bytes() {
            return Err("checksum");
        }
        if bytes[5] != 0 {
            return Err("reserved byte");
        }
        let inline = usize::from(u16::from_le_bytes(field(bytes, 6)));
        let payload = u32::from_le_bytes(field(bytes, 8)) as usize;
        let target = Remote {
            region: RegionKey(u64::from_le_bytes(field(bytes, 12))),
            offset: u64::from_le_bytes(field(bytes, 20)),
        };
        match bytes[4] {
            KIND_MESSAGE if inline > MESSAGE_BYTES_MAX => Err("message length"),
            KIND_MESSAGE if payload != 0 => Err("payload length of a message"),
            KIND_MESSAGE => Ok(Self { inline, write: None }),
            KIND_WRITE if inline > IMMEDIATE_BYTES_MAX => Err("immediate length"),
            KIND_WRITE if payload > WRITE_BYTES_MAX => Err("payload length"),
            KIND_WRITE => Ok(Self { inline, write: Some(Write { payload, target }) }),
            _ => Err("kind"),
        }
    }
}

fn field<const N: usize>(bytes: &[u8; LINK_HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(inline: usize, payload: Option<usize>, region: u64, offset: u64) -> Header {
        let target = Remote { region: RegionKey(region), offset };
        Header { inline, write: payload.map(|payload| Write { payload, target }) }
    }

    #[test]
    fn a_golden_header_keeps_its_bytes() {
        let bytes = header(64, Some(0x0004_0000), 7, 0x1000).encode();
        let mut expected = *b"GWT1\x02\0\x40\0\0\0\x04\0\x07\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\0";
        let crc = payload_crc(&expected[..28]);
        assert_eq!(crc, 0x4c50_8a70, "{crc:#x}");
        expected[28..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(bytes, expected);
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes(
            inline in 0..=IMMEDIATE_BYTES_MAX, payload in proptest::option::of(0..=WRITE_BYTES_MAX), region: u64, offset: u64,
        ) {
            let header = header(inline, payload, region, offset);
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_flipped_bit_is_found(inline in 0..=IMMEDIATE_BYTES_MAX, payload in 0..=WRITE_BYTES_MAX, bit in 0..LINK_HEADER_BYTES * 8) {
            let mut bytes = header(inline, Some(payload), 3, 9).encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn lengths_beyond_the_limits_are_refused(inline in 0..=u16::MAX, payload: u32, kind: u8) {
            let mut bytes = header(0, Some(0), 0, 0).encode();
            bytes[4] = kind;
            bytes[6..8].copy_from_slice(&inline.to_le_bytes());
            bytes[8..12].copy_from_slice(&payload.to_le_bytes());
            let crc = payload_crc(&bytes[..28]);
            bytes[28..].copy_from_slice(&crc.to_le_bytes());
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.inline <= MESSAGE_BYTES_MAX);
                prop_assert!(header.write.is_none_or(|write| write.payload <= WRITE_BYTES_MAX && header.inline <= IMMEDIATE_BYTES_MAX));
            }
        }
    }
}
