//! Writing a save: every member its shard, one of them the manifest.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gradwire_proto::saved::{Cut, SHARD_HEADER_BYTES, SavedManifest, SavedShard, ShardHeader};
use gradwire_proto::{Fault, FaultKind};

use super::disk::Disk;
use super::layout::each_piece;
use super::names::{Listing, MANIFEST, Name, REMOVED, removed, shard_path};
use super::owner::Ours;
use crate::StateTensor;

/// The fault of something that could not be done to a file.
fn failed(path: &Path, error: &io::Error) -> Fault {
    Fault::new(FaultKind::NotSaved, format!("{}: {error}", path.display()))
}

/// Writes the shard with this header, and sees to it that it stays.
pub(super) fn write_shard(
    disk: Disk<'_>,
    save: &Path,
    header: &ShardHeader,
    parts: &[StateTensor<'_>],
) -> Result<(), Fault> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| failed(&path, &error)
    };
    disk.create_directory(save).map_err(at(save))?;
    let path = shard_path(save, header);
    let written = write_shard_file(disk, &path, header, parts);
    if written.is_err() {
        // Nobody should take it for whole: not everything that fails leaves it short.
        let _ = disk.remove_file(&path);
    }
    written.map_err(at(&path))?;
    disk.sync_directory(save).map_err(at(save))
}

fn write_shard_file(disk: Disk<'_>, path: &Path, header: &ShardHeader, parts: &[StateTensor<'_>]) -> io::Result<()> {
    let mut file = disk.create(path)?;
    disk.write(&mut file, path, &header.encode())?;
    let mut checksums = Vec::new();
    each_piece(header, parts, |piece, checksum| {
        checksums.extend_from_slice(&checksum);
        disk.write(&mut file, path, piece)
    })?;
    let seal = header.seal(&checksums);
    checksums.extend_from_slice(&seal.to_le_bytes());
    disk.write(&mut file, path, &checksums)?;
    disk.sync(&file, path)
}

/// Why a shard is not what it should be; or the checksums of its pieces, as they lie in the file, and its seal.
pub(super) fn open_shard(path: &Path, header: &ShardHeader, cut: Cut) -> Result<(File, Vec<u8>, u32), String> {
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "it is missing".to_owned(),
        _ => format!("it cannot be read: {error}"),
    })?;
    let read = |error: io::Error| format!("it cannot be read: {error}");
    let metadata = file.metadata().map_err(read)?;
    let expected = cut.file_bytes(header.index);
    if !metadata.is_file() || metadata.len() != expected {
        return Err(format!("it has {} bytes, but must have {expected}", metadata.len()));
    }
    let mut front = [0; SHARD_HEADER_BYTES];
    file.read_exact_at(&mut front, 0).map_err(read)?;
    let found = ShardHeader::decode(&front).map_err(|error| error.to_string())?;
    if found != *header {
        let what = if found.id == header.id { "another shard of this save" } else { "a shard of another save" };
        return Err(format!("it is {what}"));
    }
    let table = SHARD_HEADER_BYTES as u64 + header.bytes;
    // Its length is that of the file, which is there.
    let mut checksums = vec![0; usize::try_from(expected - table).map_err(|error| error.to_string())?];
    file.read_exact_at(&mut checksums, table).map_err(read)?;
    let Some((rest, seal)) = checksums.split_last_chunk::<4>() else { return Err("it has no seal".to_owned()) };
    let (seal, pieces) = (u32::from_le_bytes(*seal), rest.len());
    if header.seal(rest) != seal {
        return Err("its seal does not match its header and checksums: it is damaged".to_owned());
    }
    checksums.truncate(pieces);
    Ok((file, checksums, seal))
}

/// Checks that all shards are there, writes the manifest, and gives the save its name: only then it is one. Returns
/// its path.
pub(super) fn publish(
    disk: Disk<'_>,
    directory: &Path,
    name: Name,
    manifest: &mut SavedManifest,
) -> Result<PathBuf, Fault> {
    let save = name.unfinished(directory, &manifest.id);
    let cut = manifest.cut();
    for index in 0..manifest.shards.len() as u32 {
        let header = manifest.shard_header(index);
        let path = shard_path(&save, &header);
        let (_, _, seal) = open_shard(&path, &header, cut).map_err(|what| {
            let detail = format!(
                "the share of {} is not in {}: {what}; all ranks must see the same directory",
                header.rank,
                path.display()
            );
            Fault::new(FaultKind::NotSaved, detail).at(header.rank)
        })?;
        manifest.shards[index as usize] = SavedShard { rank: header.rank, file_bytes: cut.file_bytes(index), seal };
    }
    let bytes = manifest.encode()?;
    let path = save.join(MANIFEST);
    let write = || {
        let mut file = disk.create(&path)?;
        disk.write(&mut file, &path, &bytes)?;
        disk.sync(&file, &path)?;
        disk.sync_directory(&save)
    };
    write().map_err(|error| failed(&path, &error))?;
    let published = name.path(directory);
    disk.rename(&save, &published).map_err(|error| {
        let there =
            if published.exists() { "; it is there already: does another job save in this directory?" } else { "" };
        let what = format!("{} cannot be renamed to {}: {error}{there}", save.display(), published.display());
        Fault::new(FaultKind::NotSaved, what)
    })?;
    if let Err(error) = disk.sync_directory(directory) {
        // Nobody can say whether it would still be there after a loss of power.
        take_away(disk, &published);
        return Err(failed(directory, &error));
    }
    Ok(published)
}

/// Takes an unfinished save away. Every rank may do so, and whether it or the publisher comes first is decided by the
/// file system: a directory is renamed once. Returns whether it was this call that took it away.
pub(super) fn take_away(disk: Disk<'_>, save: &Path) -> bool {
    let removed = removed(save);
    let taken = disk.rename(save, &removed).is_ok();
    // What stays is removed after the next save.
    let _ = remove(disk, &removed);
    taken
}

/// Removes a directory that has only files.
fn remove(disk: Disk<'_>, path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        disk.remove_file(&entry?.path())?;
    }
    disk.remove_directory(path)
}

/// Removes what unfinished saves left, and those saves that are this run's to delete, but for the latest, of which `name` is
/// the very latest. Never one that is later: that is another job's.
pub(super) fn prune(disk: Disk<'_>, directory: &Path, name: Name, ours: &Ours) -> io::Result<()> {
    let listing = Listing::read(directory)?;
    let older: Vec<Name> = listing.saves.into_iter().filter(|save| save.sequence < name.sequence).collect();
    let old = ours.to_delete(directory, &older, ours.identity.keep.saturating_sub(1));
    let old = old.into_iter().map(|save| save.path(directory));
    let now = last_written(&name.path(directory));
    let leftovers = listing.leftovers.into_iter().filter(|path| may_sweep(path, now, ours));
    for path in old.chain(leftovers) {
        if is_removed(&path) {
            remove(disk, &path)?;
            continue;
        }
        // Nothing that is half deleted looks like a save, nor can it become one any more.
        let removed = removed(&path);
        disk.rename(&path, &removed)?;
        disk.sync_directory(directory)?;
        remove(disk, &removed)?;
    }
    disk.sync_directory(directory)
}

fn is_removed(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == REMOVED)
}

/// Whether a leftover is to be deleted: not the save that another job is writing.
fn may_sweep(path: &Path, now: Option<SystemTime>, ours: &Ours) -> bool {
    let idle = || now?.duration_since(last_written(path)?).ok();
    let id = path.file_name().and_then(|name| crate::env::unhex(name.to_str()?.split('.').nth(1)?));
    is_removed(path) || ours.may_sweep(id.unwrap_or_default(), idle())
}

/// When something in this directory was written last, by the clock of its file system.
fn last_written(path: &Path) -> Option<SystemTime> {
    let files = fs::read_dir(path).ok()?.filter_map(|entry| entry.ok()?.metadata().ok()?.modified().ok());
    files.chain(fs::metadata(path).ok()?.modified()).max()
}

/// The bytes of a file of at most so many.
pub(super) fn read_bounded(path: &Path, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has more than {bytes_max} bytes")));
    }
    Ok(bytes)
}
