//! What saves are called, and which are there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gradwire_proto::saved::ShardHeader;
use gradwire_proto::{Fault, FaultKind, Rank, Step};

const PREFIX: &str = "save-";
const STEP: &str = "-step-";
const UNFINISHED: &str = "unfinished";
/// The last extension of what is being deleted.
pub(super) const REMOVED: &str = "removed";

/// The manifest of a save.
pub(super) const MANIFEST: &str = "manifest";

/// The directory of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    /// Saves count up, so that the latest is known without a clock, and whatever step a job went back to.
    pub(super) sequence: u64,
    pub(super) step: Step,
}

impl Name {
    /// Where it is found once it is whole.
    pub(super) fn path(self, directory: &Path) -> PathBuf {
        directory.join(self.to_string())
    }

    /// Where it is written.
    pub(super) fn unfinished(self, directory: &Path, id: &[u8; 16]) -> PathBuf {
        directory.join(format!("{self}.{}.{UNFINISHED}", gradwire_proto::secret::hex(id)))
    }

    fn parse(name: &str) -> Option<Self> {
        let (sequence, step) = name.strip_prefix(PREFIX)?.split_once(STEP)?;
        let name = Self { sequence: sequence.parse().ok()?, step: Step(step.parse().ok()?) };
        Some(name)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PREFIX}{:06}{STEP}{}", self.sequence, self.step.0)
    }
}

/// Where a save, whole or unfinished, is deleted: a crash in the middle of that leaves nothing that looks like a save.
pub(super) fn removed(save: &Path) -> PathBuf {
    let mut name = save.as_os_str().to_owned();
    name.push(format!(".{REMOVED}"));
    name.into()
}

/// The file with a rank's share.
pub(super) fn shard_name(rank: Rank) -> String {
    format!("rank-{}", rank.0)
}

/// Where this shard of a save is.
pub(super) fn shard_path(save: &Path, header: &ShardHeader) -> PathBuf {
    save.join(shard_name(header.rank))
}

/// What is in a directory.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// What claims to be whole saves, the latest last.
    pub(super) saves: Vec<Name>,
    /// What unfinished saves and unfinished deletions left.
    pub(super) leftovers: Vec<PathBuf>,
}

impl Listing {
    /// Reads a directory. What is not gradwire's is passed over. One that is not there has no saves.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            entries => entries?,
        };
        let mut listing = Self::default();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match name.split_once('.') {
                None => listing.saves.extend(Name::parse(&name)),
                Some((front, rest)) => {
                    let last = rest.rsplit('.').next().unwrap_or(rest);
                    if (last == REMOVED || last == UNFINISHED) && Name::parse(front).is_some() {
                        listing.leftovers.push(entry.path());
                    }
                }
            }
        }
        listing.saves.sort_unstable();
        Ok(listing)
    }
}

/// The fault of a directory that cannot be listed.
pub(super) fn unreadable(kind: FaultKind, path: &Path, error: &io::Error) -> Fault {
    Fault::new(kind, format!("{} cannot be read: {error}", path.display()))
}
