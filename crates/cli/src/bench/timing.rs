//! Durations and their percentiles.

use std::time::Instant;

/// Nanoseconds since `start`.
pub(crate) fn elapsed_ns(start: Instant) -> i64 {
    i64::try_from(start.elapsed().as_nanos()).unwrap_or(i64::MAX)
}

/// The value in `sorted_ns` that at least `percent` of 100 values do not exceed (the nearest rank), in milliseconds.
/// 0 where there are no values.
pub(crate) fn percentile_ms(sorted_ns: &[i64], percent: usize) -> f64 {
    let rank = (sorted_ns.len() * percent.min(100)).div_ceil(100);
    sorted_ns.get(rank.saturating_sub(1)).map_or(0.0, |ns| *ns as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred: Vec<i64> = (1..=100).map(|ms| ms * 1_000_000).collect();
        let found = |percent| percentile_ms(&hundred, percent);
        assert_eq!((found(0), found(1), found(50), found(99), found(100)), (1.0, 1.0, 50.0, 99.0, 100.0));
        let three = [1_000_000, 2_000_000, 9_000_000];
        assert_eq!((percentile_ms(&three, 50), percentile_ms(&three, 99)), (2.0, 9.0));
        assert_eq!((percentile_ms(&[7_500_000], 50), percentile_ms(&[], 50)), (7.5, 0.0));
        assert_eq!(percentile_ms(&three, 1000), 9.0);
    }
}
