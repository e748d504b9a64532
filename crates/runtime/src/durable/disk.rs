//! The few things that are done to files, each of them announced before it is done: so tests can stop after any of them,
//! as a crash would, or let one fail.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

/// Something that is about to be done to the file system.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests look at what it is done to"))]
pub(super) enum Operation<'a> {
    CreateDirectory(&'a Path),
    Create(&'a Path),
    Write(&'a Path),
    Sync(&'a Path),
    SyncDirectory(&'a Path),
    Rename(&'a Path, &'a Path),
    RemoveFile(&'a Path),
    RemoveDirectory(&'a Path),
}

/// Hears of every operation, and can refuse it.
pub(super) type Before<'a> = &'a (dyn Fn(Operation<'_>) -> io::Result<()> + Sync);

/// The file system.
#[derive(Clone, Copy)]
pub(super) struct Disk<'a> {
    before: Before<'a>,
}

impl Disk<'static> {
    /// The real one.
    pub(super) fn real() -> Self {
        Self { before: &|_| Ok(()) }
    }
}

impl<'a> Disk<'a> {
    #[cfg(test)]
    pub(super) const fn watched(before: Before<'a>) -> Self {
        Self { before }
    }

    /// Makes a directory, with those above it. One that is there is fine: every rank makes it.
    pub(super) fn create_directory(self, path: &Path) -> io::Result<()> {
        if path.as_os_str().is_empty() || path.is_dir() {
            return Ok(());
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        self.create_directory(parent)?;
        (self.before)(Operation::CreateDirectory(path))?;
        match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            made => made?,
        }
        self.sync_directory(parent)
    }

    pub(super) fn create(self, path: &Path) -> io::Result<File> {
        (self.before)(Operation::Create(path))?;
        File::create(path)
    }

    pub(super) fn write(self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        (self.before)(Operation::Write(path))?;
        file.write_all(bytes)
    }

    /// What was written survives a loss of power from here on, and the space for it was really there.
    pub(super) fn sync(self, file: &File, path: &Path) -> io::Result<()> {
        (self.before)(Operation::Sync(path))?;
        file.sync_all()
    }

    /// So do the names in this directory.
    pub(super) fn sync_directory(self, path: &Path) -> io::Result<()> {
        (self.before)(Operation::SyncDirectory(path))?;
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        File::open(path)?.sync_all()
    }

    pub(super) fn rename(self, from: &Path, to: &Path) -> io::Result<()> {
        (self.before)(Operation::Rename(from, to))?;
        fs::rename(from, to)
    }

    pub(super) fn remove_file(self, path: &Path) -> io::Result<()> {
        (self.before)(Operation::RemoveFile(path))?;
        fs::remove_file(path)
    }

    /// Removes an empty directory.
    pub(super) fn remove_directory(self, path: &Path) -> io::Result<()> {
        (self.before)(Operation::RemoveDirectory(path))?;
        fs::remove_dir(path)
    }
}
