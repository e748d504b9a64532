//! Whose a save is, and what follows from that for others in its directory.
//!
//! A save's id names the run that made it, and the line that it belongs to: a run that goes on from a save goes on with its
//! line. A run deletes saves of its own, and those of its line that were there when it went on from one of them; never
//! others. Where it finds that another job or run saves in its directory, it saves nothing there: the latest save would be
//! now this one's and now that one's.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use gradwire_proto::limits::MANIFEST_BYTES_MAX;
use gradwire_proto::saved::SavedManifest;
use gradwire_proto::{Fault, FaultKind};

use super::names::{Listing, MANIFEST, Name};
use super::write::read_bounded;

/// How long nothing was written to another run's unfinished save that is taken for abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Whose saves these are, and how many are kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct SaveIdentity {
    /// Empty if nobody gave the job a name.
    pub(crate) job: String,
    /// Empty if nobody said one.
    pub(crate) model_version: String,
    pub(crate) keep: usize,
    /// This run: the same on every rank, and on those that join later.
    pub(crate) run: [u8; 8],
}

impl SaveIdentity {
    /// The line of a run that goes on from no save. Runs of a job that has a name have one: so that what crashes left
    /// before there was a first save is known to be theirs.
    fn new_line(&self) -> u32 {
        let name = [self.job.as_bytes(), &[0], self.model_version.as_bytes()].concat();
        gradwire_codec::crc32(if self.job.is_empty() { &self.run } else { &name })
    }
}

/// Which saves in a directory are a group's.
#[derive(Debug)]
pub(super) struct Ours {
    pub(super) identity: SaveIdentity,
    line: AtomicU32,
    /// The highest sequence that was there when this run went on from a save; 0 if it did not.
    inherited: AtomicU64,
    /// The sequence of the last save that this rank had a part in.
    last: AtomicU64,
}

/// The id of a save: four random bytes, its line, and its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    line: u32,
    run: [u8; 8],
}

impl Mark {
    fn of(id: &[u8; 16]) -> Self {
        let [_, _, _, _, a, b, c, d, run @ ..] = *id;
        Self { line: u32::from_le_bytes([a, b, c, d]), run }
    }
}

impl Ours {
    pub(super) fn new(identity: SaveIdentity) -> Self {
        let line = AtomicU32::new(identity.new_line());
        Self { identity, line, inherited: AtomicU64::new(0), last: AtomicU64::new(0) }
    }

    fn mark(&self) -> Mark {
        Mark { line: self.line.load(Ordering::Relaxed), run: self.identity.run }
    }

    /// The id of a save that begins with these bytes.
    pub(super) fn id(&self, random: [u8; 4]) -> [u8; 16] {
        let Mark { line, run } = self.mark();
        let mut id = [0; 16];
        id[..4].copy_from_slice(&random);
        id[4..8].copy_from_slice(&line.to_le_bytes());
        id[8..].copy_from_slice(&run);
        id
    }

    /// A save was made.
    pub(super) fn saved(&self, id: &[u8; 16], name: Name) {
        self.line.store(Mark::of(id).line, Ordering::Relaxed);
        self.last.store(name.sequence, Ordering::Relaxed);
    }

    /// This run goes on from a save.
    pub(super) fn goes_on_from(&self, manifest: &SavedManifest, directory: Option<&Path>) {
        self.line.store(Mark::of(&manifest.id).line, Ordering::Relaxed);
        let there = directory.and_then(|directory| Listing::read(directory).ok()?.saves.last().copied());
        let latest = there.map_or(0, |name| name.sequence).max(manifest.sequence);
        self.inherited.store(latest, Ordering::Relaxed);
    }

    /// Checks that nobody else saves in this directory.
    ///
    /// # Errors
    /// `NotSaved` that names the save of another job, or of another run of this one.
    pub(super) fn check(&self, directory: &Path, listing: &Listing) -> Result<(), Fault> {
        let known = self.last.load(Ordering::Relaxed).max(self.inherited.load(Ordering::Relaxed));
        let mut others = Vec::new();
        let mut own = None;
        for name in listing.saves.iter().rev() {
            // A damaged one says nothing of whose it is.
            let Some(manifest) = manifest(&name.path(directory)) else { continue };
            if Mark::of(&manifest.id).run == self.identity.run {
                own = Some(name.sequence);
                break;
            }
            others.push((*name, manifest));
        }
        let Some((latest, manifest)) = others.first() else { return Ok(()) };
        let SaveIdentity { job, model_version, .. } = &self.identity;
        let refuse = |what: String| {
            let detail = format!(
                "{} was made by {what}: give each job a directory of its own, for they would take each other's saves for \
                 theirs",
                latest.path(directory).display()
            );
            Err(Fault::new(FaultKind::NotSaved, detail))
        };
        if !job.is_empty() && !manifest.job.is_empty() && *job != manifest.job {
            return refuse(format!("job '{}'", manifest.job));
        }
        if *model_version != manifest.model_version {
            return refuse(format!("a job of another version of the model ('{}')", manifest.model_version));
        }
        // What was there before this run began to save is what it went on from, or is left alone.
        let newest = own.or_else(|| Some(known + 1).filter(|_| known > 0));
        if newest.is_some_and(|newest| latest.sequence >= newest) {
            return refuse("another run, which saves here at the same time".to_owned());
        }
        Ok(())
    }

    /// Of these saves, which are in ascending order, those that are this run's to delete, but for the last `keep`.
    pub(super) fn to_delete<'a>(&self, directory: &Path, saves: &'a [Name], keep: usize) -> Vec<&'a Name> {
        let (own, inherited) = (self.mark(), self.inherited.load(Ordering::Relaxed));
        let is_ours = |name: &&Name| {
            let Some(manifest) = manifest(&name.path(directory)) else { return false };
            let mark = Mark::of(&manifest.id);
            mark.run == own.run || mark.line == own.line && name.sequence <= inherited
        };
        let mut ours: Vec<&Name> = saves.iter().filter(is_ours).collect();
        ours.truncate(ours.len().saturating_sub(keep));
        ours
    }

    /// Whether the unfinished save with this id, to which nothing was written for so long, is this run's to delete: its own,
    /// those of the runs that it went on from, and what is abandoned.
    pub(super) fn may_sweep(&self, id: [u8; 16], idle: Option<Duration>) -> bool {
        let (mark, own) = (Mark::of(&id), self.mark());
        let went_on = self.inherited.load(Ordering::Relaxed) > 0;
        mark.run == own.run || mark.line == own.line && went_on || idle.is_some_and(|idle| idle > ABANDONED_AFTER)
    }
}

fn manifest(save: &Path) -> Option<SavedManifest> {
    SavedManifest::decode(&read_bounded(&save.join(MANIFEST), MANIFEST_BYTES_MAX).ok()?).ok()
}
