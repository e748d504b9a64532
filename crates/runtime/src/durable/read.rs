//! Finding a save, checking it, and reading it into a state.

use std::collections::HashMap;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use gradwire_proto::limits::MANIFEST_BYTES_MAX;
use gradwire_proto::saved::{SHARD_HEADER_BYTES, SavedManifest};
use gradwire_proto::{Fault, FaultKind, Step};

use super::layout::{Layout, each_piece};
use super::names::{Listing, MANIFEST, Name, shard_path, unreadable};
use super::write::{open_shard, read_bounded};
use crate::{State, StateTensor, StateTensorMut};

/// A save that was found: its manifest is whole, and its shards are there and sealed. What they hold is checked when it
/// is read.
#[derive(Clone, Debug)]
pub struct SavedState {
    path: PathBuf,
    manifest: SavedManifest,
    manifest_crc: u32,
    skipped: Vec<(PathBuf, Fault)>,
}

/// What a state was restored from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Restored {
    /// How many steps are final in it: the trainer goes on with the step of this number, counted from 0.
    pub step: Step,
    /// The save.
    pub path: PathBuf,
    /// Bytes of the state.
    pub bytes: u64,
    /// Later saves that are damaged, and were passed over since the caller wished it
    /// ([`SavedState::newest_whole`]), with what is wrong with each.
    pub skipped: Vec<(PathBuf, Fault)>,
}

impl SavedState {
    /// The latest save in `directory`. None if there is none yet, or no directory.
    ///
    /// The latest is the one that was made last, whatever its step: a job may have gone back to an earlier one.
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`] if the directory cannot be read, or the latest save is damaged: it names the file, what
    /// is wrong with it, and the save before. It never takes an earlier one by itself.
    pub fn latest(directory: &Path) -> Result<Option<Self>, Fault> {
        let saves = list(directory)?;
        let Some(latest) = saves.last() else { return Ok(None) };
        Self::open(&latest.path(directory)).map(Some)
    }

    /// The latest save that is whole: where later ones are damaged, they are passed over with a warning, and are in
    /// [`Restored::skipped`]. Reads every byte of the saves that it looks at.
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`] if the directory cannot be read, or there are saves and none is whole: what is wrong with
    /// the latest.
    pub fn newest_whole(directory: &Path) -> Result<Option<Self>, Fault> {
        let mut skipped = Vec::new();
        for name in list(directory)?.iter().rev() {
            let path = name.path(directory);
            let whole = Self::open(&path).and_then(|saved| saved.verify().map(|()| saved));
            match whole {
                Ok(saved) => return Ok(Some(Self { skipped, ..saved })),
                Err(fault) => {
                    tracing::warn!(save = %path.display(), %fault, "a damaged save is passed over for an earlier one");
                    skipped.push((path, fault));
                }
            }
        }
        skipped.into_iter().next().map_or(Ok(None), |(_, fault)| Err(fault))
    }

    /// This save: `path` is its own directory.
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`] that names the file that is missing, damaged, or of another version or program.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let file = path.join(MANIFEST);
        let bytes = read_bounded(&file, MANIFEST_BYTES_MAX)
            .map_err(|error| damaged(path, &file, &format!("it cannot be read: {error}")))?;
        let manifest = SavedManifest::decode(&bytes).map_err(|error| damaged(path, &file, &error.to_string()))?;
        let manifest_crc = gradwire_codec::crc32(&bytes);
        let saved = Self { path: path.to_owned(), manifest, manifest_crc, skipped: Vec::new() };
        for index in 0..saved.manifest.shards.len() as u32 {
            saved.shard(index)?;
        }
        Ok(saved)
    }

    /// How many steps are final in it: what [`Builder::first_step`](crate::Builder::first_step) wants to know.
    #[must_use]
    pub const fn step(&self) -> Step {
        self.manifest.step
    }

    /// Its own directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The job that made it, if it had a name.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        Some(self.manifest.job.as_str()).filter(|job| !job.is_empty())
    }

    /// The version of the model, if the job said one.
    #[must_use]
    pub fn model_version(&self) -> Option<&str> {
        Some(self.manifest.model_version.as_str()).filter(|version| !version.is_empty())
    }

    /// Names and lengths of the state's parts.
    pub fn parts(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.parts.iter().map(|part| (part.name.as_str(), part.bytes))
    }

    pub(super) const fn manifest(&self) -> &SavedManifest {
        &self.manifest
    }

    /// Names this save among all.
    pub(super) fn mark(&self) -> Vec<u8> {
        [&self.manifest.id[..], &self.manifest_crc.to_le_bytes(), &self.manifest.step.0.to_le_bytes()].concat()
    }

    /// Reads and checks every byte.
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`] that names the file that is damaged.
    pub fn verify(&self) -> Result<(), Fault> {
        self.read(|_, _| {})
    }

    /// Replaces the whole state by what was saved. Parts are matched by name. Whose save it is is not asked: that is for
    /// [`Group::restore`](crate::Group::restore).
    ///
    /// # Errors
    /// [`FaultKind::NotRestored`]: the state has other parts than the save, of which the first is named with both lengths,
    /// and nothing was changed; or a file is damaged, and the state has to be made anew. What was not verified is in no
    /// part of the state in any case.
    pub fn restore_into(&self, state: &mut dyn State) -> Result<Restored, Fault> {
        let mut parts = self.matched(state.parts_mut())?;
        let layout = Layout::new(self.parts().map(|(_, bytes)| bytes));
        self.read(|first, piece| {
            let mut rest = piece;
            for (part, range) in layout.fragments(first..first + piece.len() as u64) {
                let (here, more) = rest.split_at(range.len());
                parts[part].bytes[range].copy_from_slice(here);
                rest = more;
            }
        })?;
        Ok(Restored {
            step: self.step(),
            path: self.path.clone(),
            bytes: self.manifest.state_bytes(),
            skipped: self.skipped.clone(),
        })
    }

    /// Whether a state with these parts is the one that was saved, as far as the checksums in the save's files tell; what
    /// else is in these is not read.
    pub(super) fn is_of(&self, parts: &[StateTensor<'_>]) -> Result<bool, Fault> {
        let lengths = parts.iter().map(|part| (part.name, part.bytes.len() as u64));
        if !self.parts().eq(lengths) {
            return Ok(false);
        }
        for index in 0..self.manifest.shards.len() as u32 {
            let (_, checksums) = self.shard(index)?;
            let mut saved = checksums.chunks_exact(4);
            let same =
                |_: &[u8], checksum: [u8; 4]| saved.next().filter(|saved| **saved == checksum).map(drop).ok_or(());
            if each_piece(&self.manifest.shard_header(index), parts, same).is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The state's parts in the order of the save's.
    fn matched<'a>(&self, parts: Vec<StateTensorMut<'a>>) -> Result<Vec<StateTensorMut<'a>>, Fault> {
        let refuse = |what: String| {
            let detail = format!("{} is not of this state: {what}", self.path.display());
            Err(Fault::new(FaultKind::NotRestored, detail))
        };
        let mut here: HashMap<&str, StateTensorMut<'a>> = HashMap::with_capacity(parts.len());
        for part in parts {
            let name = part.name;
            if here.insert(name, part).is_some() {
                return refuse(format!("two parts of the state are called '{name}'"));
            }
        }
        let mut matched = Vec::with_capacity(self.manifest.parts.len());
        for (name, bytes) in self.parts() {
            match here.remove(name) {
                None => return refuse(format!("it has a part '{name}' of {bytes} bytes, which the state has not")),
                Some(part) if part.bytes.len() as u64 != bytes => {
                    return refuse(format!("part '{name}' has {bytes} bytes, but {} in the state", part.bytes.len()));
                }
                Some(part) => matched.push(part),
            }
        }
        match here.into_values().min_by_key(|part| part.name) {
            None => Ok(matched),
            Some(part) => {
                refuse(format!("it has no part '{}', which the state has with {} bytes", part.name, part.bytes.len()))
            }
        }
    }

    fn shard(&self, index: u32) -> Result<(std::fs::File, Vec<u8>), Fault> {
        let header = self.manifest.shard_header(index);
        let path = shard_path(&self.path, &header);
        let (file, checksums, seal) =
            open_shard(&path, &header, self.manifest.cut()).map_err(|what| damaged(&self.path, &path, &what))?;
        if seal != self.manifest.shards[index as usize].seal {
            return Err(damaged(&self.path, &path, "its seal is not the one in the manifest"));
        }
        Ok((file, checksums))
    }

    /// Hands over every piece that is as it was written, and where it begins in the state.
    fn read(&self, mut take: impl FnMut(u64, &[u8])) -> Result<(), Fault> {
        let piece_bytes = u64::from(self.manifest.piece_bytes);
        let mut piece = Vec::new();
        for index in 0..self.manifest.shards.len() as u32 {
            let header = self.manifest.shard_header(index);
            let path = shard_path(&self.path, &header);
            let (file, checksums) = self.shard(index)?;
            for (number, checksum) in (0..).zip(checksums.chunks_exact(4)) {
                let at = number * piece_bytes;
                piece.resize((header.bytes - at).min(piece_bytes) as usize, 0);
                file.read_exact_at(&mut piece, SHARD_HEADER_BYTES as u64 + at)
                    .map_err(|error| damaged(&self.path, &path, &format!("it cannot be read: {error}")))?;
                if gradwire_codec::crc32(&piece).to_le_bytes() != checksum {
                    let from = SHARD_HEADER_BYTES as u64 + at;
                    let what =
                        format!("bytes {from} to {} are not as they were written", from + piece.len() as u64 - 1);
                    return Err(damaged(&self.path, &path, &what));
                }
                take(header.first + at, &piece);
            }
        }
        Ok(())
    }
}

fn list(directory: &Path) -> Result<Vec<Name>, Fault> {
    let listing = Listing::read(directory).map_err(|error| unreadable(FaultKind::NotRestored, directory, &error))?;
    Ok(listing.saves)
}

/// The fault of a damaged file in the save at `save`, and what can be done.
fn damaged(save: &Path, file: &Path, what: &str) -> Fault {
    let others = save.parent().and_then(|directory| {
        let saves = Listing::read(directory).ok()?.saves;
        let at = saves.iter().position(|name| name.path(directory) == save)?;
        Some(saves[..at].last()?.path(directory))
    });
    let advice = others.map_or_else(
        || "there is no save before it".to_owned(),
        |before| format!("the save before it is {}: name it to go on from there", before.display()),
    );
    Fault::new(FaultKind::NotRestored, format!("{}: {what}; {advice}", file.display()))
}
