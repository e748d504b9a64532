//! The data directory: whose it is, which format it has, and that one broker uses it at a time.
//!
//! | file | what it is |
//! | --- | --- |
//! | `format` | says that the directory is a broker's, and of which format |
//! | `lock` | locked by the broker that uses the directory, and names its process |
//! | `topics.redb` | the table |
//! | `journal-*` | what is not in the table yet |
//! | `journal-*.torn` | what was cut off a journal at a start, for whoever wants to know; never read |

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use gradwire_proto::{Fault, FaultKind};

use super::journal::{self, NEW, write_new};
use super::table::{Table, TableError};

/// The format that this version writes, and the only one that it reads.
const FORMAT: u32 = 2;
const FORMAT_FILE: &str = "format";
const FORMAT_PREFIX: &str = "gradwire broker data, format ";
const LOCK_FILE: &str = "lock";
const TABLE_FILE: &str = "topics.redb";

/// A data directory that is ours as long as this lives.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Unlocked when it is closed, however this process ends.
    _lock: File,
    files: Files,
}

/// Files that must stay where they are while the directory is used, and which they are.
#[derive(Clone, Debug)]
pub(super) struct Files(Vec<(PathBuf, (u64, u64))>);

impl Files {
    fn find(paths: [PathBuf; 2]) -> io::Result<Self> {
        let found = paths.into_iter().map(|path| identity(&path).map(|identity| (path, identity)));
        found.collect::<io::Result<_>>().map(Self)
    }

    /// Whether they are still there: what is written to files that have no names any more is lost.
    ///
    /// # Errors
    /// When one is not there, or another one is.
    pub(super) fn check(&self) -> io::Result<()> {
        for (path, before) in &self.0 {
            let now =
                identity(path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
            if now != *before {
                return Err(io::Error::other(format!("{} was replaced", path.display())));
            }
        }
        Ok(())
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Directory {
    /// Takes a directory, and makes it if it is not there or empty.
    ///
    /// # Errors
    /// Names the directory, what is wrong with it, and what to do.
    pub(super) fn take(path: &Path) -> Result<Self, Fault> {
        let refused = |error: io::Error| refused(path, &error);
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(refused)?;
        let format = read_format(path)?;
        if format.is_none() {
            check_foreign(path)?;
        }
        let lock = take_lock(path)?;
        if format.is_none() {
            write_new(&path.join(FORMAT_FILE), format!("{FORMAT_PREFIX}{FORMAT}\n").as_bytes()).map_err(refused)?;
        }
        make_table(path)?;
        journal::sync_directory(path).map_err(refused)?;
        let files = Files::find([path.join(LOCK_FILE), path.join(TABLE_FILE)]).map_err(refused)?;
        Ok(Self { path: path.to_owned(), _lock: lock, files })
    }

    /// Where the table is.
    pub(super) fn table(&self) -> PathBuf {
        self.path.join(TABLE_FILE)
    }

    /// What must stay in it.
    pub(super) fn files(&self) -> &Files {
        &self.files
    }
}

fn make_table(directory: &Path) -> Result<(), Fault> {
    let path = directory.join(TABLE_FILE);
    if path.exists() {
        return Ok(());
    }
    if !journal::files(directory).map_err(|error| refused(directory, &error))?.is_empty() {
        return Err(damaged(directory, &format!("{TABLE_FILE} is missing")));
    }
    let new = directory.join(format!("{TABLE_FILE}{NEW}"));
    let removed = fs::remove_file(&new);
    if let Err(error) = removed.or_else(|error| ignore(error, io::ErrorKind::NotFound)) {
        return Err(refused(directory, &error));
    }
    Table::create(&new).map_err(|error| fault(directory, &error))?;
    fs::rename(&new, &path).map_err(|error| refused(directory, &error))
}

/// The fault for what was found in a directory's files.
pub(super) fn fault(path: &Path, error: &TableError) -> Fault {
    match error {
        TableError::Io(error) => refused(path, error),
        TableError::Damaged(what) => damaged(path, what),
        TableError::Newer => invalid(format!(
            "the broker's data directory {} was written by a newer version of gradwire: use that version, or another \
             directory",
            path.display()
        )),
    }
}

/// The fault for a directory whose content is not what was written.
pub(super) fn damaged(path: &Path, what: &str) -> Fault {
    invalid(format!(
        "the broker's data directory {} is damaged: {what}; nothing of it was loaded: restore it from a \
         copy, or move it away to start with an empty one",
        path.display()
    ))
}

/// The fault for what the system refused.
pub(super) fn refused(path: &Path, error: &io::Error) -> Fault {
    let shown = path.display();
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; the broker must be able to read and write it"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; make room on its disk",
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => "; it must be a directory",
        _ => "",
    };
    Fault::new(FaultKind::System, format!("the broker's data directory {shown} cannot be used: {error}{advice}"))
}

fn read_format(path: &Path) -> Result<Option<u32>, Fault> {
    let shown = path.display();
    let text = match File::open(path.join(FORMAT_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refused(path, &error)),
        Ok(file) => {
            let mut bytes = Vec::new();
            file.take(256).read_to_end(&mut bytes).map_err(|error| refused(path, &error))?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
    };
    let number = text.strip_prefix(FORMAT_PREFIX).and_then(|rest| rest.trim_end().parse().ok());
    match number {
        Some(FORMAT) => Ok(Some(FORMAT)),
        Some(older) if older < FORMAT => Err(invalid(format!(
            "the broker's data directory {shown} has format {older}, and this version of gradwire knows format {FORMAT}: \
             use the version that wrote it, or another directory"
        ))),
        Some(newer) if newer > FORMAT => Err(invalid(format!(
            "the broker's data directory {shown} has format {newer}, and this version of gradwire knows format \
             {FORMAT}: use a newer version, or another directory"
        ))),
        _ => Err(damaged(path, &format!("its file '{FORMAT_FILE}' says nothing that gradwire wrote"))),
    }
}

/// A directory with anything else in it is somebody's, and not ours to write to.
fn check_foreign(path: &Path) -> Result<(), Fault> {
    let entries = fs::read_dir(path).map_err(|error| refused(path, &error))?;
    for entry in entries {
        let name = entry.map_err(|error| refused(path, &error))?.file_name();
        let name = name.to_string_lossy();
        let ours = [LOCK_FILE, "lost+found", "format.new"];
        if !ours.contains(&&*name) {
            return Err(invalid(format!(
                "{} is not a broker's data directory: it has no file '{FORMAT_FILE}', and holds '{}': give an empty \
                 directory, or one that does not exist",
                path.display(),
                name.escape_debug()
            )));
        }
    }
    Ok(())
}

fn take_lock(path: &Path) -> Result<File, Fault> {
    let refused = |error: io::Error| refused(path, &error);
    let file = path.join(LOCK_FILE);
    let mut options = File::options();
    let mut lock =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&file).map_err(refused)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut process = String::new();
            let _ = lock.take(32).read_to_string(&mut process);
            let process = process.trim();
            let who = if process.is_empty() { String::new() } else { format!(" (process {process})") };
            return Err(invalid(format!(
                "the broker's data directory {} is in use by another broker{who}: stop that one, or use another \
                 directory",
                path.display()
            )));
        }
        Err(TryLockError::Error(error)) => return Err(refused(error)),
    }
    lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(refused)?;
    Ok(lock)
}

fn ignore(error: io::Error, kind: io::ErrorKind) -> io::Result<()> {
    if error.kind() == kind { Ok(()) } else { Err(error) }
}

fn invalid(detail: String) -> Fault {
    Fault::new(FaultKind::InvalidArgument, detail)
}
