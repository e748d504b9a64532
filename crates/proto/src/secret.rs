//! The job's secret: what a process must know to join.

use alloc::string::String;
use core::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a secret.
pub const SECRET_BYTES: usize = 32;
/// Bytes of a proof made with it.
pub const PROOF_BYTES: usize = 32;

/// The job's secret. Never printed: `Debug` shows only that there is one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// A secret of these bytes, which must come from a cryptographic source.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(bytes)
    }

    /// Reads what [`Secret::to_hex`] wrote: 64 hexadecimal digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        let text = text.trim().as_bytes();
        if text.len() != SECRET_BYTES * 2 {
            return None;
        }
        let mut bytes = [0; SECRET_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            *byte = (high * 16 + low) as u8;
        }
        Some(Self(bytes))
    }

    /// The secret as text, for handing it to a rank by environment or file.
    #[must_use]
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }

    /// HMAC-SHA-256 over `parts`, keyed with the secret and bound to one purpose. Parts are length-prefixed, so
    /// that no two lists of parts give the same input.
    #[must_use]
    pub fn proof(&self, purpose: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(purpose, parts).finalize().into_bytes().into()
    }

    /// Whether `proof` is [`Secret::proof`] of the same purpose and parts, compared in constant time.
    #[must_use]
    pub fn verifies(&self, purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(purpose, parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        mac.update(&(purpose.len() as u64).to_le_bytes());
        mac.update(purpose.as_bytes());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// `bytes` as lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trips_and_rejects_what_is_not_hex() {
        let secret = Secret::from_bytes(core::array::from_fn(|i| i as u8 * 7));
        assert_eq!(Secret::from_hex(&secret.to_hex()), Some(secret));
        for bad in ["", "00", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert_eq!(Secret::from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_proof_is_bound_to_secret_purpose_and_parts() {
        let secret = Secret::from_bytes([1; 32]);
        let proof = secret.proof("link", &[b"ab", b"c"]);
        assert!(secret.verifies("link", &[b"ab", b"c"], &proof));
        assert!(!secret.verifies("link", &[b"a", b"bc"], &proof));
        assert!(!secret.verifies("token", &[b"ab", b"c"], &proof));
        assert!(!Secret::from_bytes([2; 32]).verifies("link", &[b"ab", b"c"], &proof));
        assert!(!secret.verifies("link", &[b"ab", b"c"], &proof[..31]));
    }

    #[test]
    fn debug_never_shows_the_secret() {
        let secret = Secret::from_bytes([0xab; 32]);
        assert!(!alloc::format!("{secret:?}").contains("ab"));
    }
}
