//! Processor, memory and limits.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, statvfs};
use rustix::process::{Resource, getrlimit};

use super::{Finding, bytes};

/// Descriptors that a process of a job needs beside those for its peers.
const DESCRIPTORS_FIXED: u64 = 64;
/// Descriptors for each peer: a link and the memory files behind it; an agent has three for each rank.
const DESCRIPTORS_PER_RANK: u64 = 8;
/// Less memory than this does not take a real model.
const MEMORY_BYTES_MIN: u64 = 1 << 30;

pub(super) fn examine(cores: usize, ranks: u32) -> Vec<Finding> {
    vec![
        core_count(cores),
        cpu_features(),
        clock(),
        memory(),
        cgroup_memory(),
        open_files(ranks),
        memlock(),
        sealed_memory(),
        dev_shm(),
        huge_pages(),
    ]
}

fn core_count(cores: usize) -> Finding {
    let remedy = "ranks that share a core wait for each other; give the process more cores";
    Finding::ok_if(cores > 1, "cores", cores.to_string(), remedy)
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Finding {
    let found = [
        ("F16C", is_x86_feature_detected!("f16c")),
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("AVX-512F", is_x86_feature_detected!("avx512f")),
        ("PCLMULQDQ", is_x86_feature_detected!("pclmulqdq")),
    ];
    let list =
        |there: bool| found.iter().filter(|(_, is)| *is == there).map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let fact = match (list(true), list(false)) {
        (all, none) if none.is_empty() => all,
        (there, missing) => format!("{}; not {missing}", if there.is_empty() { "none" } else { &there }),
    };
    let good = found.iter().all(|(name, is)| *is || *name == "AVX-512F");
    Finding::ok_if(
        good,
        "CPU features",
        fact,
        "conversion and checksums run slowly here; let a virtual machine pass the host's CPU through",
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Finding {
    Finding::ok("CPU features", format!("{}: found at run time by the libraries", std::env::consts::ARCH))
}

fn clock() -> Finding {
    let source = text("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let Some(source) = source else { return Finding::ok("clock source", "not told by this system") };
    let good = !matches!(source.as_str(), "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies" | "pit");
    Finding::ok_if(
        good,
        "clock source",
        source,
        "reading the time takes a system call; boot with clocksource=tsc if the CPU allows",
    )
}

fn memory() -> Finding {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    match (field("MemTotal"), field("MemAvailable")) {
        (Some(total), Some(available)) => {
            let fact = format!("{} of {} available", bytes(available), bytes(total));
            Finding::ok_if(
                available >= MEMORY_BYTES_MIN,
                "memory",
                fact,
                "end what else runs, or train a smaller model",
            )
        }
        _ => Finding::warn("memory", "/proc/meminfo cannot be read", "mount /proc"),
    }
}

fn cgroup_memory() -> Finding {
    const SUBJECT: &str = "memory limit of the cgroup";
    match cgroup_limit() {
        None => Finding::ok(SUBJECT, "none"),
        Some(limit) => {
            let remedy = "raise the container's memory limit: a process over it is killed";
            Finding::ok_if(limit >= MEMORY_BYTES_MIN, SUBJECT, bytes(limit), remedy)
        }
    }
}

/// The lowest limit from this process's group up to the root.
fn cgroup_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let (root, file, group) = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, group) = (fields.next()?, fields.next()?, fields.next()?);
        if controllers.is_empty() {
            Some(("/sys/fs/cgroup", "memory.max", group))
        } else if controllers.split(',').any(|controller| controller == "memory") {
            Some(("/sys/fs/cgroup/memory", "memory.limit_in_bytes", group))
        } else {
            None
        }
    })?;
    let mut path = PathBuf::from(root).join(group.trim_start_matches('/'));
    let mut lowest: Option<u64> = None;
    while path.starts_with(root) {
        let limit = text(path.join(file)).and_then(|limit| limit.parse().ok());
        // The first version writes "no limit" as a number next to the largest.
        if let Some(limit) = limit.filter(|limit| *limit < 1 << 60) {
            lowest = Some(lowest.map_or(limit, |low| low.min(limit)));
        }
        if !path.pop() {
            break;
        }
    }
    lowest
}

fn open_files(ranks: u32) -> Finding {
    let need = DESCRIPTORS_FIXED + DESCRIPTORS_PER_RANK * u64::from(ranks);
    let limit = getrlimit(Resource::Nofile);
    let (soft, hard) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    let fact = format!("{} allowed, {need} needed with {ranks} ranks", amount(soft));
    if soft >= need {
        return Finding::ok("open files", fact);
    }
    let remedy = if hard >= need {
        format!("`ulimit -n {need}` before starting")
    } else {
        format!("raise 'nofile' to {need} in /etc/security/limits.conf, or LimitNOFILE of the service")
    };
    Finding::fail("open files", fact, remedy)
}

fn memlock() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let fact = limit.map_or_else(|| "unlimited".to_owned(), bytes);
    Finding::ok("locked memory", format!("{fact} allowed; not needed: this version locks none"))
}

fn sealed_memory() -> Finding {
    const SUBJECT: &str = "shared memory (sealed memfd)";
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    let tried = memfd_create("gradwire-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).and_then(|file| {
        ftruncate(&file, 4096)?;
        fcntl_add_seals(&file, seals)?;
        fcntl_get_seals(&file)
    });
    match tried {
        Ok(found) if found.contains(seals) => Finding::ok(SUBJECT, "works"),
        Ok(_) => Finding::fail(SUBJECT, "seals have no effect", "use --transport tcp"),
        Err(error) => {
            Finding::fail(SUBJECT, error.to_string(), "allow memfd_create in the sandbox, or use --transport tcp")
        }
    }
}

fn dev_shm() -> Finding {
    const SUBJECT: &str = "/dev/shm";
    match statvfs("/dev/shm") {
        Ok(stat) => {
            let size = bytes(stat.f_blocks.saturating_mul(stat.f_frsize));
            Finding::ok(SUBJECT, format!("{size}; not used: shared memory is memfd, which its size does not bound"))
        }
        Err(_) => Finding::ok(SUBJECT, "not there; not needed: shared memory is memfd"),
    }
}

fn huge_pages() -> Finding {
    const SUBJECT: &str = "huge pages for shared memory";
    let Some(choices) = text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") else {
        return Finding::ok(SUBJECT, "not offered by this kernel");
    };
    // The one in brackets is set.
    let set = choices.split(['[', ']']).nth(1).unwrap_or(&choices).to_owned();
    match set.as_str() {
        "never" | "deny" => Finding::ok(
            SUBJECT,
            format!(
                "{set}; large tensors may gain from 'advise' in {}",
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
            ),
        ),
        _ => Finding::ok(SUBJECT, set),
    }
}

fn amount(count: u64) -> String {
    if count == u64::MAX { "unlimited".to_owned() } else { count.to_string() }
}

/// The first bytes of a small file, trimmed.
pub(super) fn text(path: impl AsRef<Path>) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(4096).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    #[test]
    fn too_few_descriptors_fail_with_the_number_that_is_needed() {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let finding = open_files(1024);
        if limit < 8256 {
            assert_eq!(finding.level, Level::Fail);
            assert!(finding.remedy.unwrap().contains("8256"));
        } else {
            assert_eq!(finding.level, Level::Ok);
        }
        assert_eq!(open_files(1).level, Level::Ok);
    }

    #[test]
    fn shared_memory_works_where_the_tests_run() {
        assert_eq!(sealed_memory().level, Level::Ok);
    }
}
