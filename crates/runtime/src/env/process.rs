//! Naming a process so that a later one with the same number is not taken for it.

use std::fs;

/// A process of this boot of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessName {
    pub(super) pid: u32,
    /// When it started, in ticks since the boot.
    pub(super) start: u64,
    /// Which boot.
    pub(super) boot: String,
}

impl ProcessName {
    /// The living process with this number, if there is one.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(Self { pid, start: start_time(&stat)?, boot: boot.trim().to_owned() })
    }

    /// Whether it lives.
    pub(super) fn alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

/// The start time out of `/proc/PID/stat`, unless that is a zombie. The name may hold anything: fields count from its
/// end.
fn start_time(stat: &[u8]) -> Option<u64> {
    let behind_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(stat.get(behind_name..)?).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_one_that_started_otherwise_does_not() {
        let own = ProcessName::of(std::process::id()).unwrap();
        assert!(own.alive());
        assert!(!ProcessName { start: own.start + 1, ..own.clone() }.alive());
        assert!(!ProcessName { boot: "another".to_owned(), ..own }.alive());
        assert_eq!(ProcessName::of(u32::MAX), None);
    }

    #[test]
    fn a_stat_line_is_read_whatever_the_name() {
        let line = |name: &str, state: &str| {
            format!("12 ({name}) {state} 7 12 12 0 -1 4194304 94 0 0 0 0 0 0 0 20 0 1 0 10364 2600960 0")
        };
        assert_eq!(start_time(line("cat", "S").as_bytes()), Some(10364));
        assert_eq!(start_time(line("a) S 1 (b)", "R").as_bytes()), Some(10364));
        assert_eq!(start_time(line("cat", "Z").as_bytes()), None);
        for bad in ["", "12 (cat", "12 (cat) S 1 2"] {
            assert_eq!(start_time(bad.as_bytes()), None);
        }
    }
}
