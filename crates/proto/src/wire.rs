//! Little-endian readers and writers for message bodies. Reading is bounded: a length is checked against what is
//! left before anything is allocated.

use alloc::string::String;
use alloc::vec::Vec;

/// A body ended early, was too long, or held a value that its field does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// Reads fixed-width little-endian fields from the front of a slice.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader over all of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(Malformed("ends too early"))?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes as an array.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Malformed("ends too early"))?;
        self.rest = rest;
        Ok(*head)
    }

    /// The next byte.
    ///
    /// # Errors
    /// When none is left.
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// The next 2 bytes as a number.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// The next 4 bytes as a number.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// The next 8 bytes as a number.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A text of at most `bytes_max` bytes, behind its 2-byte length.
    ///
    /// # Errors
    /// When it is longer, ends early or is not UTF-8.
    pub fn text(&mut self, bytes_max: usize) -> Result<&'a str, Malformed> {
        let length = usize::from(self.u16()?);
        if length > bytes_max {
            return Err(Malformed("text too long"));
        }
        core::str::from_utf8(self.bytes(length)?).map_err(|_| Malformed("text is not UTF-8"))
    }

    /// How many bytes are left.
    #[must_use]
    pub const fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Checks that everything was read.
    ///
    /// # Errors
    /// When something is left.
    pub const fn finish(self) -> Result<(), Malformed> {
        if self.rest.is_empty() { Ok(()) } else { Err(Malformed("longer than its fields")) }
    }
}

/// Appends a text behind its 2-byte length, cut at a character boundary to at most `bytes_max` bytes.
pub fn put_text(out: &mut Vec<u8>, text: &str, bytes_max: usize) {
    let text = cut(text, bytes_max.min(usize::from(u16::MAX)));
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The longest front of `text` that has at most `bytes_max` bytes and whole characters.
fn cut(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An owned copy of a text read by [`Reader::text`].
///
/// # Errors
/// As [`Reader::text`].
pub fn owned_text(reader: &mut Reader<'_>, bytes_max: usize) -> Result<String, Malformed> {
    reader.text(bytes_max).map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_little_endian_and_end_where_the_bytes_end() {
        let bytes: Vec<u8> = (1..=16).collect();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u8(), Ok(0x01));
        assert_eq!(reader.u16(), Ok(0x0302));
        assert_eq!(reader.u32(), Ok(0x0706_0504));
        assert_eq!(reader.u64(), Ok(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(reader.remaining(), 1);
        assert_eq!(reader.u16(), Err(Malformed("ends too early")));
        assert_eq!(reader.clone().finish(), Err(Malformed("longer than its fields")));
        assert_eq!(reader.bytes(1), Ok(&[16][..]));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_text_longer_than_its_bound_is_refused_before_it_is_read() {
        let mut bytes = Vec::new();
        put_text(&mut bytes, "gradient", 8);
        assert_eq!(Reader::new(&bytes).text(8), Ok("gradient"));
        assert_eq!(Reader::new(&bytes).text(7), Err(Malformed("text too long")));
        assert_eq!(Reader::new(&bytes[..9]).text(8), Err(Malformed("ends too early")));
        bytes[2] = 0xff;
        assert_eq!(Reader::new(&bytes).text(8), Err(Malformed("text is not UTF-8")));
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let text = "aé😀";
        for (bytes_max, kept) in [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (6, "aé"), (7, "aé😀"), (usize::MAX, "aé😀")]
        {
            let mut out = Vec::new();
            put_text(&mut out, text, bytes_max);
            assert_eq!(owned_text(&mut Reader::new(&out), 7).as_deref(), Ok(kept), "{bytes_max}");
        }
    }

    #[test]
    fn a_text_past_its_length_field_is_cut() {
        let mut out = Vec::new();
        put_text(&mut out, &"x".repeat(70_000), usize::MAX);
        assert_eq!(out.len(), 2 + 65_535);
        assert_eq!(Reader::new(&out).text(65_535).map(str::len), Ok(65_535));
    }
}
