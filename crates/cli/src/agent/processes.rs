//! Which processes there are, from /proc, and ending them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long [`sweep`] goes on.
const SWEEP_TIME_MAX: Duration = Duration::from_secs(2);
/// Between two looks at /proc.
const SWEEP_INTERVAL: Duration = Duration::from_millis(10);

/// Sends SIGKILL to every process of this user that has all these variables (`NAME=VALUE`) in its environment: what is
/// left when an agent was killed, wherever it has moved in the tree of processes. Returns how many it found. Ends within
/// 2 s.
pub(crate) fn sweep(variables: &[String]) -> u32 {
    let own = std::process::id().cast_signed();
    let deadline = Instant::now() + SWEEP_TIME_MAX;
    let mut found = HashSet::new();
    loop {
        let alive: Vec<i32> = living()
            .filter(|process| process.pid != own && has_variables(process.pid, variables))
            .map(|process| process.pid)
            .collect();
        if alive.is_empty() || Instant::now() >= deadline {
            return u32::try_from(found.len()).unwrap_or(u32::MAX);
        }
        signal_all(&alive, Signal::KILL);
        found.extend(alive);
        std::thread::sleep(SWEEP_INTERVAL);
    }
}

/// The living (not zombie) descendants of a process.
pub(crate) fn descendants(ancestor: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    // A zombie has no children: they were handed on when it died.
    for process in living() {
        children.entry(process.parent).or_default().push(process.pid);
    }
    let mut found = Vec::new();
    let mut pending = vec![ancestor];
    while let Some(pid) = pending.pop() {
        // Removing makes this end even when /proc changed under the walk.
        for child in children.remove(&pid).unwrap_or_default() {
            found.push(child);
            pending.push(child);
        }
    }
    found
}

/// The living descendants of a process that have all these variables in their environment.
pub(crate) fn descendants_with(ancestor: i32, variables: &[String]) -> Vec<i32> {
    descendants(ancestor).into_iter().filter(|pid| has_variables(*pid, variables)).collect()
}

/// Sends a signal to each of these processes; those that are gone are passed over.
pub(crate) fn signal_all(pids: &[i32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = kill_process(pid, signal);
    }
}

struct Process {
    pid: i32,
    parent: i32,
}

fn living() -> impl Iterator<Item = Process> {
    fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| {
        let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let (alive, parent) = parse_stat(&stat)?;
        alive.then_some(Process { pid, parent })
    })
}

/// Whether it lives, and its parent, from the content of `/proc/PID/stat`. The name may hold anything, so the fields
/// are found from its end. A main thread that has ended shows as a zombie while others of its process still run.
fn parse_stat(stat: &[u8]) -> Option<(bool, i32)> {
    const THREADS: usize = 17;
    let behind_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let text = std::str::from_utf8(stat.get(behind_name..)?).ok()?;
    let fields: Vec<&str> = text.split_ascii_whitespace().take(THREADS + 1).collect();
    let threads: u32 = fields.get(THREADS)?.parse().ok()?;
    let state = *fields.first()?;
    Some((!matches!(state, "Z" | "X") || threads > 1, fields.get(1)?.parse().ok()?))
}

fn has_variables(pid: i32, variables: &[String]) -> bool {
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| {
        variables.iter().all(|wanted| environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_name() {
        let stat = |name: &[u8], state: &str, threads: u32| {
            let fields = format!(") {state} 7 12 12 0 -1 4194304 94 0 0 0 0 0 0 0 20 0 {threads} 0 10364 2600960");
            [b"12 (", name, fields.as_bytes()].concat()
        };
        assert_eq!(parse_stat(&stat(b"cat", "S", 1)), Some((true, 7)));
        assert_eq!(parse_stat(&stat(b"a) Z 1 (b)", "R", 1)), Some((true, 7)));
        assert_eq!(parse_stat(&stat(b"\xff", "R", 1)), Some((true, 7)));
        assert_eq!(parse_stat(&stat(b"cat", "Z", 1)), Some((false, 7)));
        assert_eq!(parse_stat(&stat(b"cat", "Z", 3)), Some((true, 7)));
        for bad in [b"".as_slice(), b"12 (cat", b"12 (cat)", b"12 (cat) S", b"12 (cat) S 1 2 3"] {
            assert_eq!(parse_stat(bad), None);
        }
    }

    #[test]
    fn a_child_is_a_descendant() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let own = std::process::id().cast_signed();
        assert!(descendants(own).contains(&child.id().cast_signed()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!descendants(own).contains(&child.id().cast_signed()));
    }

    #[test]
    fn a_sweep_ends_those_of_the_job_and_no_others() {
        let start = |instance: &str, agent: &str| {
            let mut command = std::process::Command::new("sleep");
            command.arg("60").env("GRADWIRE_INSTANCE", instance).env("GRADWIRE_AGENT", agent).spawn().unwrap()
        };
        let marker = format!("test-{}", std::process::id());
        let mut ours = start(&marker, "1");
        let mut others = [start(&format!("{marker}0"), "1"), start(&marker, "2")];
        let variables = [format!("GRADWIRE_INSTANCE={marker}"), "GRADWIRE_AGENT=1".to_owned()];
        // Between fork and exec a child still has its parent's variables: sweep until it was seen.
        let deadline = Instant::now() + Duration::from_secs(10);
        while sweep(&variables) == 0 {
            assert!(Instant::now() < deadline, "never found");
        }
        assert!(!ours.wait().unwrap().success());
        for other in &mut others {
            assert!(other.try_wait().unwrap().is_none());
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }
}
