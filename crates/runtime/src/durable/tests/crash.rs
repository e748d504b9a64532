//! A crash after every single operation on files: of the process, where all that was done stays; and of the machine, where
//! what was not synced is lost, each as badly as can be.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::super::disk::Operation;
use super::*;

/// Lets so many operations pass, and none after them. Knows what a loss of power takes.
struct Crash {
    state: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    left: usize,
    crashed: bool,
    /// Files with content that was not synced.
    content: BTreeSet<PathBuf>,
    /// Names that were made in a directory that was not synced since.
    names: Vec<PathBuf>,
    renames: Vec<(PathBuf, PathBuf)>,
}

impl Crash {
    fn after(left: usize) -> Self {
        Self { state: Mutex::new(Pending { left, ..Pending::default() }) }
    }

    fn before(&self, operation: Operation<'_>) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic");
        if state.left == 0 {
            state.crashed = true;
            return Err(io::Error::other("crashed"));
        }
        state.left -= 1;
        match operation {
            Operation::CreateDirectory(path) => state.names.push(path.to_owned()),
            Operation::Create(path) => {
                state.names.push(path.to_owned());
                state.content.insert(path.to_owned());
            }
            Operation::Write(path) => drop(state.content.insert(path.to_owned())),
            Operation::Sync(path) => drop(state.content.remove(path)),
            Operation::SyncDirectory(path) => {
                state.names.retain(|name| name.parent() != Some(path));
                state.renames.retain(|(_, to)| to.parent() != Some(path));
            }
            Operation::Rename(from, to) => {
                let moved = |name: &PathBuf| name.strip_prefix(from).map_or(name.clone(), |rest| to.join(rest));
                state.content = state.content.iter().map(moved).collect();
                state.names = state.names.iter().map(moved).collect();
                state.renames.push((from.to_owned(), to.to_owned()));
            }
            Operation::RemoveFile(path) | Operation::RemoveDirectory(path) => {
                state.content.remove(path);
                state.names.retain(|name| name != path);
            }
        }
        Ok(())
    }

    /// What was written is half there, what was made is gone, and what was renamed has its old name: as far as nothing said
    /// that it must stay.
    fn lose_power(&self, renames_stay: bool) {
        let state = self.state.lock().expect("no panic");
        for path in &state.content {
            if let Ok(file) = File::options().write(true).open(path) {
                let length = file.metadata().expect("a file").len();
                file.set_len(length / 2).expect("cut");
            }
        }
        for path in &state.names {
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
        for (from, to) in state.renames.iter().rev().filter(|_| !renames_stay) {
            let _ = fs::rename(to, from);
        }
    }

    fn crashed(&self) -> bool {
        self.state.lock().expect("no panic").crashed
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Nothing,
    Unsynced,
    UnsyncedButRenames,
}

fn crash_everywhere(first: &[u64]) {
    for loss in [Loss::Nothing, Loss::Unsynced, Loss::UnsyncedButRenames] {
        for operations in 0.. {
            let directory = saved(first);
            let path = directory.path();
            let crash = Crash::after(operations);
            let before = |operation: Operation<'_>| crash.before(operation);
            let ended = save(Disk::watched(&before), path, 77, 3);
            if loss != Loss::Nothing {
                crash.lose_power(loss == Loss::UnsyncedButRenames);
            }
            let at = format!("{loss:?} after {operations} operations");
            assert_found(path, first, ended.is_ok(), &at);
            save(Disk::real(), path, 78, 4).expect("the next save");
            assert_eq!(assert_whole(path), 78, "{at}");
            let kept = entries(path);
            assert!(kept.len() <= 2 && kept.iter().all(|name| !name.contains('.')), "{at}: {kept:?}");
            if !crash.crashed() {
                // Every shard takes several operations, and so does what is removed.
                assert!(ended.is_ok() && operations > 20, "{at}");
                break;
            }
        }
    }
}

/// The save before, or the new one if that was complete: nothing else, and nothing damaged.
fn assert_found(path: &Path, first: &[u64], complete: bool, at: &str) {
    let found = SavedState::latest(path).unwrap_or_else(|fault| panic!("{at}: {fault}"));
    match (found, first.last()) {
        (None, before) => assert!(before.is_none() && !complete, "{at}"),
        (Some(_), before) => {
            let step = assert_whole(path);
            assert!(step == 77 || !complete && Some(&step) == before, "{at}: found {step}");
        }
    }
}

#[test]
fn a_crash_at_any_moment_leaves_the_save_before_or_the_new_one() {
    crash_everywhere(&[1, 2]);
}

#[test]
fn a_crash_in_the_first_save_leaves_none() {
    crash_everywhere(&[]);
}
