//! A fault as bytes: the body of an abort (docs/wire.md, section 4).

use alloc::format;
use alloc::vec::Vec;

use super::{Fault, FaultKind};
use crate::ids::{Rank, Step};
use crate::limits::{FAULT_DETAIL_BYTES_MAX, MESSAGE_BODY_BYTES_MAX, TENSOR_NAME_BYTES_MAX};
use crate::wire::{Malformed, Reader, owned_text, put_text};

const HAS_RANK: u8 = 1;
const HAS_REPORTER: u8 = 2;
const HAS_STEP: u8 = 4;
const HAS_TENSOR: u8 = 8;
const PRESENCE_KNOWN: u8 = HAS_RANK | HAS_REPORTER | HAS_STEP | HAS_TENSOR;

/// Largest encoded fault: fixed fields, then two texts behind their lengths.
const FAULT_BYTES_MAX: usize = 20 + 2 + TENSOR_NAME_BYTES_MAX + 2 + FAULT_DETAIL_BYTES_MAX;
const _: () = assert!(FAULT_BYTES_MAX <= MESSAGE_BODY_BYTES_MAX);

impl Fault {
    /// Appends the fault as it travels. It always fits a message body: a detail of more than
    /// [`FAULT_DETAIL_BYTES_MAX`] bytes and a name of more than [`TENSOR_NAME_BYTES_MAX`] are cut between characters.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let presence = [
            (self.rank.is_some(), HAS_RANK),
            (self.reporter.is_some(), HAS_REPORTER),
            (self.step.is_some(), HAS_STEP),
            (self.tensor.is_some(), HAS_TENSOR),
        ];
        out.extend_from_slice(&(self.kind as u16).to_le_bytes());
        out.push(presence.into_iter().filter(|(present, _)| *present).map(|(_, bit)| bit).sum());
        out.push(0);
        out.extend_from_slice(&self.rank.unwrap_or_default().0.to_le_bytes());
        out.extend_from_slice(&self.reporter.unwrap_or_default().0.to_le_bytes());
        out.extend_from_slice(&self.step.unwrap_or_default().0.to_le_bytes());
        put_text(out, self.tensor.as_deref().unwrap_or_default(), TENSOR_NAME_BYTES_MAX);
        put_text(out, &self.detail, FAULT_DETAIL_BYTES_MAX);
    }

    /// Reads all of `bytes` as a fault. A kind that this release does not know becomes [`FaultKind::System`], and the
    /// detail names its code.
    ///
    /// # Errors
    /// [`Malformed`] when it ends early or late, a text is too long or not UTF-8, or a field that is not present is
    /// not zero.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let code = reader.u16()?;
        let presence = reader.u8()?;
        if presence & !PRESENCE_KNOWN != 0 || reader.u8()? != 0 {
            return Err(Malformed("reserved bits of a fault"));
        }
        let rank = present(presence, HAS_RANK, Rank(reader.u32()?))?;
        let reporter = present(presence, HAS_REPORTER, Rank(reader.u32()?))?;
        let step = present(presence, HAS_STEP, Step(reader.u64()?))?;
        let tensor = present(presence, HAS_TENSOR, owned_text(&mut reader, TENSOR_NAME_BYTES_MAX)?)?;
        let detail = owned_text(&mut reader, FAULT_DETAIL_BYTES_MAX)?;
        reader.finish()?;
        let (kind, detail) = match FaultKind::from_code(code) {
            Some(kind) => (kind, detail),
            None => (FaultKind::System, format!("(fault kind {code}, unknown to this release) {detail}")),
        };
        Ok(Self { kind, rank, tensor, step, reporter, detail })
    }
}

/// A field that is there only with its bit, and otherwise zero or empty: one fault has one encoding.
fn present<T: Default + PartialEq>(presence: u8, bit: u8, value: T) -> Result<Option<T>, Malformed> {
    match (presence & bit != 0, value) {
        (true, value) => Ok(Some(value)),
        (false, value) if value == T::default() => Ok(None),
        (false, _) => Err(Malformed("a field of a fault that is not present")),
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::String;

    use super::*;

    fn round_trip(fault: &Fault) -> Fault {
        let mut bytes = Vec::new();
        fault.encode(&mut bytes);
        assert!(bytes.len() <= FAULT_BYTES_MAX);
        Fault::decode(&bytes).unwrap()
    }

    #[test]
    fn every_kind_travels_with_and_without_its_places() {
        for kind in FaultKind::ALL {
            let bare = Fault::new(kind, "what to do");
            assert_eq!(round_trip(&bare), bare);
            // Zero is a rank, a step and (empty) a name of its own, not an absent one.
            let zeros = bare.at(Rank(0)).reported_by(Rank(0)).step(Step(0)).tensor("");
            assert_eq!(round_trip(&zeros), zeros);
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters_and_fit_a_message() {
        let fault = Fault::new(FaultKind::System, "é".repeat(10_000)).tensor("😀".repeat(1_000));
        let back = round_trip(&fault);
        assert_eq!(back.detail, "é".repeat(FAULT_DETAIL_BYTES_MAX / 2));
        assert_eq!(back.tensor, Some("😀".repeat(TENSOR_NAME_BYTES_MAX / 4)));
    }

    #[test]
    fn a_kind_of_a_later_release_is_kept_as_text() {
        let mut bytes = Vec::new();
        Fault::new(FaultKind::Closed, "the moon is full").at(Rank(2)).encode(&mut bytes);
        bytes[..2].copy_from_slice(&999_u16.to_le_bytes());
        let fault = Fault::decode(&bytes).unwrap();
        assert_eq!((fault.kind, fault.rank), (FaultKind::System, Some(Rank(2))));
        assert_eq!(fault.detail, "(fault kind 999, unknown to this release) the moon is full");
        // Passed on at its full length, it still fits.
        let long = Fault::new(FaultKind::System, String::from(&fault.detail) + &"x".repeat(FAULT_DETAIL_BYTES_MAX));
        assert_eq!(round_trip(&long).detail.len(), FAULT_DETAIL_BYTES_MAX);
    }

    #[test]
    fn what_is_not_present_must_be_zero_and_reserved_bits_too() {
        let mut good = Vec::new();
        Fault::new(FaultKind::Closed, "x").encode(&mut good);
        assert_eq!(Fault::decode(&[&good[..], &[0]].concat()), Err(Malformed("longer than its fields")));
        for at in [2, 3, 4, 8, 12] {
            let mut bad = good.clone();
            bad[at] = 0x80;
            assert!(Fault::decode(&bad).is_err(), "byte {at}");
        }
        for short in 0..good.len() {
            assert!(Fault::decode(&good[..short]).is_err(), "{short} bytes");
        }
    }
}
