//! What outlives the process: topics in a data directory.
//!
//! Memory is what is read; the directory is read once, at the start. Changes are appended to a journal, in groups: a
//! group that was appended survives the end of the process, and a loss of power when it was synced too. From the
//! journal they come into the table, a checksummed file, at checkpoints about once a second. So the journal is short,
//! a start after a crash is a checkpoint like any other, and a loss of power costs at most what was not synced.
//!
//! A failed append leaves nothing behind. A failed checkpoint changes nothing, and is made up for by the next one; until
//! then, nothing more is kept.

mod directory;
mod ending;
mod header;
mod journal;
mod keeper;
mod rows;
mod table;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use gradwire_proto::Fault;
use gradwire_proto::wire::Malformed;

use directory::{Directory, Files, damaged, fault, refused};
use ending::Part;
use journal::{Frames, Journal, Sealed};
use rows::Row;
use table::{Table, TableError};

pub(super) use keeper::Keeper;
pub(super) use rows::{Head, Ops};

/// A journal file of this size is followed by another one: a checkpoint reads whole files into memory.
const JOURNAL_FILE_BYTES_MAX: u64 = 32 << 20;
/// Nothing more is taken while this much waits for checkpoints that fail.
const JOURNAL_BYTES_MAX: u64 = 1 << 30;
/// The row with the highest ledger that a topic ever got.
const LEDGER: &str = "ledger";

/// A data directory that is in use.
#[derive(Debug)]
pub(super) struct Storage {
    directory: Directory,
    table: Arc<Mutex<Table>>,
    journal: Journal,
    /// Journal files before it that are not in the table yet.
    sealed: Vec<Sealed>,
    /// Bytes of the frame that was appended last.
    last_frame_bytes: u64,
}

/// What a directory held.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// The highest ledger that a topic ever got.
    pub(super) ledger: u64,
    pub(super) topics: BTreeMap<u64, StoredTopic>,
}

/// One topic as it was kept.
#[derive(Debug)]
pub(super) struct StoredTopic {
    pub(super) head: Head,
    pub(super) entries: Vec<StoredEntry>,
    pub(super) subscriptions: Vec<(String, Vec<u8>)>,
    pub(super) schemas: Vec<Vec<u8>>,
}

/// One entry as it was kept.
#[derive(Debug)]
pub(super) struct StoredEntry {
    pub(super) number: u64,
    pub(super) arrival_ms: u64,
    pub(super) tail: Bytes,
}

/// Work for another thread: brings the table up to date.
#[derive(Debug)]
pub(super) struct Checkpoint {
    table: Arc<Mutex<Table>>,
    files: Vec<Sealed>,
    /// What must still be in the directory when it is done.
    needed: Files,
}

impl Storage {
    /// Takes a directory, made if it is not there, and reads what is in it. `synced` says whether each group is synced
    /// before the next one is appended.
    ///
    /// # Errors
    /// When it is not a broker's, in use, damaged, of another version, or the system refuses something. Names the
    /// directory, and what to do.
    pub(super) fn open(path: &Path, synced: bool) -> Result<(Self, Loaded), Fault> {
        let directory = Directory::take(path)?;
        let refused = |error: io::Error| refused(path, &error);
        let fault = |error: TableError| fault(path, &error);
        let mut table = Table::open(&directory.table()).map_err(fault)?;
        let files = journal::files(path).map_err(refused)?;
        if files.is_empty() && table.has_journal() {
            return Err(damaged(path, "its journal is missing"));
        }
        // All of it is looked at before anything is changed.
        let parts = ending::examine(&files, table.applied()).map_err(fault)?;
        parts.iter().try_for_each(keep_cut).map_err(refused)?;
        for part in parts.iter().filter(|part| part.first < part.end) {
            Frames::read(&part.path, part.first, part.end)
                .and_then(|mut frames| table.apply(&mut frames))
                .map_err(fault)?;
        }
        let loaded = load(&table).map_err(fault)?;
        let next = table.applied() + 1;
        let journal = Journal::create(path, next, synced).map_err(refused)?;
        table.note_journal().map_err(fault)?;
        for (_, file) in files.iter().filter(|(number, _)| **number != next) {
            fs::remove_file(file).map_err(refused)?;
        }
        let table = Arc::new(Mutex::new(table));
        Ok((Self { directory, table, journal, sealed: Vec::new(), last_frame_bytes: 0 }, loaded))
    }

    pub(super) fn path(&self) -> &Path {
        &self.directory.path
    }

    /// Keeps a group of changes. When this returns, they survive the end of this process.
    pub(super) fn append(&mut self, ops: &Ops) -> io::Result<()> {
        if self.journal.bytes() >= JOURNAL_FILE_BYTES_MAX {
            self.seal()?;
        }
        let waiting: u64 = self.sealed.iter().map(|sealed| sealed.bytes).sum();
        if waiting + self.journal.bytes() > JOURNAL_BYTES_MAX {
            let kind = io::ErrorKind::StorageFull;
            return Err(io::Error::new(kind, "the journal is full, because topics.redb cannot be written"));
        }
        let before = self.journal.bytes();
        self.journal.append(ops)?;
        self.last_frame_bytes = self.journal.bytes() - before;
        Ok(())
    }

    /// For syncing what was appended, on another thread.
    pub(super) fn journal_file(&self) -> Arc<File> {
        self.journal.file.clone()
    }

    /// What was appended last could not be synced, and does not count.
    pub(super) fn take_back(&mut self) {
        self.journal.take_back(self.last_frame_bytes);
        // Pages that the system could not write may be lost without another word: nothing more goes to this file.
        if let Err(error) = self.seal() {
            tracing::warn!(%error, "the embedded broker cannot start a new journal file");
        }
    }

    /// What a checkpoint has to do, if anything.
    ///
    /// # Errors
    /// When the directory is not there any more, or takes no new file.
    pub(super) fn checkpoint(&mut self) -> io::Result<Option<Checkpoint>> {
        self.directory.files().check()?;
        if !self.journal.is_empty() {
            self.seal()?;
        }
        let (files, needed) = (self.sealed.clone(), self.directory.files().clone());
        let checkpoint = Checkpoint { table: self.table.clone(), files, needed };
        Ok(Some(checkpoint).filter(|checkpoint| !checkpoint.files.is_empty()))
    }

    /// A checkpoint is done: what it wrote is not needed in the journal any more.
    pub(super) fn checkpointed(&mut self, done: &Checkpoint) {
        self.sealed.retain(|sealed| !done.files.contains(sealed));
        for Sealed { path, .. } in &done.files {
            // One that stays is skipped at the next start.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(file = %path.display(), %error, "the embedded broker cannot remove a journal file");
            }
        }
    }

    fn seal(&mut self) -> io::Result<()> {
        let sealed = self.journal.rotate()?;
        self.sealed.extend(sealed);
        Ok(())
    }
}

impl Checkpoint {
    /// Writes the table.
    pub(super) fn run(&self) -> io::Result<()> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        for file in &self.files {
            file.read().and_then(|mut frames| table.apply_all(&mut frames)).map_err(|error| match error {
                TableError::Io(error) => error,
                TableError::Damaged(what) => io::Error::new(io::ErrorKind::InvalidData, what),
                TableError::Newer => io::Error::other("it was replaced by one of a newer version"),
            })?;
        }
        self.needed.check()
    }
}

/// Keeps what will be cut off a journal file, and says so.
fn keep_cut(part: &Part) -> io::Result<()> {
    let Some(cut) = part.cut else { return Ok(()) };
    let content = fs::read(&part.path)?;
    let cut = content.get(cut..).unwrap_or_default();
    let kept = journal::keep_cut(&part.path, cut)?;
    let (file, bytes, kept) = (part.path.display(), cut.len(), kept.display());
    tracing::warn!(%file, bytes, %kept, "the journal ends in changes that were not written whole: they are cut off");
    Ok(())
}

impl Loaded {
    fn owner(&mut self, topic: u64) -> Result<&mut StoredTopic, Malformed> {
        self.topics.get_mut(&topic).ok_or(Malformed("a row of a topic that is not there"))
    }
}

/// Reads all rows. They are in the order topics, entries, subscriptions, schemas.
fn load(table: &Table) -> Result<Loaded, TableError> {
    let mut loaded = Loaded::default();
    table.each_row(|key, value| {
        let row = Row::read(key, value)?;
        if let Row::Head { topic, head } = row {
            let none = (Vec::new(), Vec::new(), Vec::new());
            let (entries, subscriptions, schemas) = none;
            loaded.topics.insert(topic, StoredTopic { head, entries, subscriptions, schemas });
            return Ok(());
        }
        match row {
            Row::Meta { name: LEDGER, value } => loaded.ledger = value,
            Row::Entry { topic, number, arrival_ms, tail } => {
                loaded.owner(topic)?.entries.push(StoredEntry {
                    number,
                    arrival_ms,
                    tail: Bytes::copy_from_slice(tail),
                });
            }
            Row::Subscription { topic, name, state } => {
                loaded.owner(topic)?.subscriptions.push((name.to_owned(), state.to_owned()));
            }
            Row::Schema { topic, version, schema } => {
                let schemas = &mut loaded.owner(topic)?.schemas;
                if schemas.len() != version as usize {
                    return Err(Malformed("a version of a schema is missing"));
                }
                schemas.push(schema.to_owned());
            }
            Row::Meta { .. } | Row::Head { .. } => {}
        }
        Ok(())
    })?;
    for topic in loaded.topics.values() {
        check(topic).map_err(|what| TableError::Damaged(format!("topic {}: {what}", topic.head.name)))?;
    }
    Ok(loaded)
}

fn check(topic: &StoredTopic) -> Result<(), String> {
    let (found, head) = (topic.entries.len() as u64, &topic.head);
    if found != head.entries {
        return Err(format!("it has {} messages, and {found} of them are there", head.entries));
    }
    if topic.entries.last().is_some_and(|last| last.number >= head.next) {
        return Err("it holds a message with a number that was not given yet".to_owned());
    }
    Ok(())
}

impl Ops {
    /// Notes the highest ledger that a topic ever got.
    pub(super) fn put_ledger(&mut self, ledger: u64) {
        self.put_meta(LEDGER, ledger);
    }
}

/// The fault for a message or subscription in `path` that its topic cannot take.
pub(super) fn unreadable(path: &Path, topic: &str, what: &str) -> Fault {
    damaged(path, &format!("topic {topic}: {what}"))
}

#[cfg(test)]
mod tests;
