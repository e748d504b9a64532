//! Sizes of tensors, as people write them.

use std::fmt;
use std::str::FromStr;

use gradwire_proto::limits::TENSOR_ELEMENTS_MAX;

use crate::sizes::{UNITS, parse_bytes};

/// Bytes of one element of the tensors that are measured.
pub(super) const ELEMENT_BYTES: u64 = size_of::<f32>() as u64;

/// Size of an f32 tensor in bytes: at least one element, and whole ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorBytes(u64);

impl TensorBytes {
    pub(super) const fn bytes(self) -> u64 {
        self.0
    }

    pub(super) const fn elements(self) -> u64 {
        self.0 / ELEMENT_BYTES
    }
}

impl FromStr for TensorBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_bytes(text)? {
            0 => Err("an allreduce of no bytes measures nothing: give at least 4".to_owned()),
            bytes if bytes % ELEMENT_BYTES != 0 => {
                Err(format!("{bytes} bytes are not whole f32 elements: give a multiple of {ELEMENT_BYTES}"))
            }
            bytes if bytes / ELEMENT_BYTES <= TENSOR_ELEMENTS_MAX => Ok(Self(bytes)),
            _ => Err(format!("{text} is more than a tensor of {TENSOR_ELEMENTS_MAX} elements can hold")),
        }
    }
}

impl fmt::Display for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().rev().find(|(_, factor)| self.0.is_multiple_of(*factor));
        match unit {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_bytes_or_have_a_binary_unit() {
        for (text, bytes) in [
            ("4", 4),
            ("4096", 4096),
            ("4096B", 4096),
            ("4KiB", 4096),
            (" 4 KiB ", 4096),
            ("64MiB", 64 << 20),
            ("3GiB", 3 << 30),
            ("1125899906842624", 1 << 50),
        ] {
            assert_eq!(text.parse::<TensorBytes>().map(TensorBytes::bytes), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn wrong_sizes_say_what_is_wrong() {
        for (text, complaint) in [
            ("", "no number"),
            ("MiB", "no number"),
            ("-4", "unknown unit '-4'"),
            ("64MB", "unknown unit 'MB'"),
            ("1.5MiB", "unknown unit '.5MiB'"),
            ("4kib", "unknown unit"),
            ("0", "measures nothing"),
            ("0MiB", "measures nothing"),
            ("6", "multiple of 4"),
            ("99999999999999999999", "too large"),
            ("18446744073709551615GiB", "too large"),
            ("2097152GiB", "more than a tensor"),
        ] {
            let error = text.parse::<TensorBytes>().expect_err(text);
            assert!(error.contains(complaint), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_or_is_refused(text in ".{0,24}") {
            let _ = text.parse::<TensorBytes>();
        }

        #[test]
        fn what_is_shown_parses_to_the_same(elements in 1u64..1 << 40) {
            let size = TensorBytes(elements * ELEMENT_BYTES);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
