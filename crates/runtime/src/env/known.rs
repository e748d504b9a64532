//! Which variables there are: one that is set and that nobody reads is most likely misspelt, and says nothing by itself.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

const PREFIX: &str = "GRADWIRE_";
/// How alike two names are, of 1, so that one may be meant by the other.
const ALIKE_MIN: f64 = 0.8;

/// What ranks read. Without the prefix, as all names here.
const OF_RANKS: &[&str] = &[
    "ADDRESS",
    "ADVERTISE",
    "BROKER",
    "BROKER_CA",
    "BROKER_TOKEN",
    "BROKER_TOKEN_FILE",
    "COMMIT_INTERVAL_MS",
    "DEADLINE_MS",
    "HEARTBEAT_MS",
    "INSTANCE",
    "INTEGRITY",
    "INTERFACE",
    "JOB",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MODEL_VERSION",
    "PORT",
    "RANK",
    "RANKS_MAX",
    "RANKS_MIN",
    "RANKS_WAIT_MS",
    "RECOVERY",
    "RESTART",
    "RETAIN_STEPS",
    "SECRET",
    "SECRET_FILE",
    "SILENCE_MS",
    "TENANT",
    "TRANSPORT",
    "WIRE",
    "WORLD_SIZE",
];
/// What the launcher and its agents read and set, and gradwire's own tests: ranks may have them from there.
const OF_OTHERS: &[&str] = &["AGENT", "CONFORMANCE_CHILD", "PULSAR_CACHE", "REMOTE", "SSH"];
const OF_TESTS: &str = "TEST_";

/// Warns of each variable that nobody reads, once in a process.
pub(crate) fn warn_of_unknown() {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    for name in set.filter_map(|(name, _)| name.into_string().ok()).filter(|name| is_unknown(name)) {
        let text = words(&name);
        if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name) {
            tracing::warn!("{text}");
        }
    }
}

fn is_unknown(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    !rest.starts_with(OF_TESTS) && !OF_RANKS.contains(&rest) && !OF_OTHERS.contains(&rest)
}

fn words(name: &str) -> String {
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    let alike = OF_RANKS.iter().map(|known| (strsim::jaro_winkler(rest, known), known));
    let nearest = alike.max_by(|(one, _), (other, _)| one.total_cmp(other)).filter(|(alike, _)| *alike >= ALIKE_MIN);
    let meant = nearest.map_or_else(String::new, |(_, known)| format!(": is {PREFIX}{known} meant?"));
    format!("the variable {name} is set, but there is none of this name in gradwire{meant}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The variables that the files of a folder name.
    fn named(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                named(&path, names);
                continue;
            }
            // What is no text names none.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            for after in text.split(PREFIX).skip(1) {
                let letter = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
                let end = after.find(|c| !letter(c)).unwrap_or(after.len());
                if !after[..end].is_empty() {
                    names.insert(format!("{PREFIX}{}", &after[..end]));
                }
            }
        }
    }

    #[test]
    fn what_gradwire_and_its_tests_name_is_known() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut names = BTreeSet::new();
        for folder in ["benches", "ci", "crates", "docs", "tests"] {
            named(&root.join(folder), &mut names);
        }
        assert!(names.len() >= OF_RANKS.len(), "{names:?}");
        let unknown: Vec<_> = names.iter().filter(|name| is_unknown(name)).collect();
        assert!(unknown.is_empty(), "known.rs has them not: {unknown:?}");
        for rest in OF_RANKS.iter().chain(OF_OTHERS) {
            assert!(names.contains(&format!("{PREFIX}{rest}")), "nobody names {rest}");
        }
    }

    #[test]
    fn a_name_that_is_not_known_is_told_with_the_one_that_is_meant() {
        for (rest, meant) in [
            ("DEADLINE", Some("DEADLINE_MS")),
            ("TRANSPROT", Some("TRANSPORT")),
            ("RECOVER", Some("RECOVERY")),
            ("MODELVERSION", Some("MODEL_VERSION")),
            ("WIRE_FORMAT", Some("WIRE")),
            ("XYZZY", None),
        ] {
            let name = format!("{PREFIX}{rest}");
            assert!(is_unknown(&name));
            let said = words(&name);
            assert!(said.contains(&name), "{said}");
            assert_eq!(
                said.split_once(": is ").map(|(_, said)| said),
                meant.map(|meant| format!("{PREFIX}{meant} meant?")).as_deref()
            );
        }
        assert!(!is_unknown(&format!("{PREFIX}{OF_TESTS}ANYTHING")) && !is_unknown("HOME"));
    }
}
