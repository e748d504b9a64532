//! What a journal file starts with.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

use gradwire_proto::frame::payload_crc;
use gradwire_proto::wire::Reader;

/// Bytes before a file's first frame.
pub(super) const FILE_HEADER_BYTES: usize = 48;
const MAGIC: [u8; 8] = *b"gwjrnl\0\x02";

/// What a journal file starts with: `magic | u64 first number | u64 x 2 start of the system | u32 salt | u32 synced |
/// u32 zero | u32 CRC-32` of all that, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileHeader {
    /// The number of its first frame.
    pub(super) first: u64,
    /// Names the start of the system under which it was written. When that still runs, no power was lost.
    pub(super) boot: u128,
    /// Differs between files, and is known to no client.
    pub(super) salt: u32,
    /// Each frame was synced before the next was written.
    pub(super) synced: bool,
}

impl FileHeader {
    pub(super) fn new(first: u64, synced: bool) -> Self {
        // The standard library's only source of randomness.
        let salt = RandomState::new().hash_one(first) as u32;
        Self { first, boot: this_boot(), salt, synced }
    }

    pub(super) fn encode(&self) -> [u8; FILE_HEADER_BYTES] {
        let mut bytes = [0; FILE_HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.first.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.boot.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.salt.to_le_bytes());
        bytes[36..40].copy_from_slice(&u32::from(self.synced).to_le_bytes());
        let crc = payload_crc(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..FILE_HEADER_BYTES)?;
        let mut reader = Reader::new(bytes);
        if reader.bytes(8).ok()? != MAGIC {
            return None;
        }
        let first = reader.u64().ok()?;
        let boot = u128::from_le_bytes(reader.bytes(16).ok()?.try_into().ok()?);
        let (salt, synced, _) = (reader.u32().ok()?, reader.u32().ok()?, reader.u32().ok()?);
        let crc = reader.u32().ok()?;
        (payload_crc(&bytes[..44]) == crc).then_some(Self { first, boot, salt, synced: synced != 0 })
    }

    /// Whether some of the file's frames may be missing, and later ones not: the system writes pages that nobody
    /// synced in any order, and then the power went.
    pub(super) fn may_have_holes(&self) -> bool {
        !self.synced && self.boot != this_boot()
    }
}

/// Zero where the system does not tell.
fn this_boot() -> u128 {
    static BOOT: LazyLock<u128> = LazyLock::new(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or_default()
    });
    *BOOT
}
