//! Sizes in bytes, as people write them.

/// Binary units, smallest first.
pub(crate) const UNITS: [(&str, u64); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// A number of bytes, alone or with a binary unit, as in 64MiB.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits_end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let unit = unit.trim_start();
    let factor = match unit {
        "" | "B" => 1,
        _ => UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, factor)| *factor)
            .ok_or_else(|| format!("unknown unit '{unit}': write bytes, or use KiB, MiB or GiB, as in 64MiB"))?,
    };
    if digits.is_empty() {
        return Err("no number: write bytes, or use KiB, MiB or GiB, as in 64MiB".to_owned());
    }
    let number: u64 = digits.parse().map_err(|_| format!("{digits} is too large"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text} is too large"))
}
