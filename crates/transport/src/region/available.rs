//! How much memory can still be had.

use std::fs;

/// Bytes that can be allocated without driving others out: what the machine has available, or what the control group
/// still allows if that is less. `None` where neither is known.
#[must_use]
pub fn bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    let number = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    let group = number("memory.max").zip(number("memory.current")).map(|(max, current)| max.saturating_sub(current));
    machine.into_iter().chain(group).min()
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_and_garbage_is_none() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        for garbage in ["", "MemAvailable:", "MemAvailable: x kB", "MemAvailable: 18446744073709551615 kB"] {
            assert_eq!(meminfo_available(garbage), None, "{garbage}");
        }
        assert!(bytes().is_some_and(|bytes| bytes > 0));
    }
}
