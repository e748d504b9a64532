//! CRC-32 of payloads.

use crc32fast::Hasher;

/// The CRC-32 (ISO-HDLC: the one of Ethernet, gzip and PNG) of `bytes`.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// The CRC-32 of `a` followed by `b`, from the CRC-32 of each and the length of `b` in bytes, without touching either.
#[must_use]
pub fn crc32_combine(a: u32, b: u32, b_bytes: u64) -> u32 {
    let mut hasher = Hasher::new_with_initial(a);
    hasher.combine(&Hasher::new_with_initial_len(b, b_bytes));
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn check_value_of_the_catalogue() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    proptest! {
        #[test]
        fn combining_equals_one_pass(bytes in prop::collection::vec(any::<u8>(), 0..4096), at in any::<prop::sample::Index>()) {
            let (a, b) = bytes.split_at(at.index(bytes.len() + 1));
            prop_assert_eq!(crc32_combine(crc32(a), crc32(b), b.len() as u64), crc32(&bytes));
        }
    }
}
