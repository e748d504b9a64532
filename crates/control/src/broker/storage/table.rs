//! The table: all rows, in one checksummed file of `redb`, brought up to date from the journal.
//!
//! Every call that changes it is a transaction that has reached the disk when the call returns. After an error the
//! file is as it was before, and is opened again by the next call. The file of another program, or one that was
//! damaged, is an error: `redb` verifies every page, when the file is opened after a crash, and here when it was closed
//! well. Where only the last transaction is damaged it goes back to the one before, as after a crash in the middle of
//! one; whoever calls has to see by [`Table::applied`] whether that is what it had.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gradwire_proto::wire::Malformed;
use redb::{Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition};

use super::journal::Frames;
use super::rows::{Op, each_op};

const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("rows");
/// Name and number of the last journal frame that is in the rows.
const APPLIED: TableDefinition<'_, &str, u64> = TableDefinition::new("applied");
const LAST_FRAME: &str = "last frame";
/// There is a number of this name as soon as there was a journal, from when on there always is one.
const JOURNAL: &str = "journal";
/// All rows are read once, at the start: there is little to cache.
const CACHE_BYTES: usize = 8 << 20;

/// Why the table cannot be used.
#[derive(Debug)]
pub(super) enum TableError {
    /// The system refused something; it may work later.
    Io(io::Error),
    /// What is in the file is not what was written.
    Damaged(String),
    /// The file was written by a later version.
    Newer,
}

/// The table's file.
#[derive(Debug)]
pub(super) struct Table {
    path: PathBuf,
    /// Nothing after an error.
    database: Option<Database>,
    applied: u64,
    has_journal: bool,
}

impl Table {
    /// Makes an empty one at a path where nothing is.
    pub(super) fn create(path: &Path) -> Result<(), TableError> {
        guarded(|| {
            let database = builder().create(path)?;
            let transaction = database.begin_write()?;
            transaction.open_table(ROWS)?;
            transaction.open_table(APPLIED)?.insert(LAST_FRAME, 0)?;
            Ok(transaction.commit()?)
        })
    }

    /// Opens one, and verifies all of it.
    pub(super) fn open(path: &Path) -> Result<Self, TableError> {
        guarded(|| {
            let verified = Arc::new(AtomicBool::new(false));
            let repaired = verified.clone();
            let mut builder = builder();
            builder.set_repair_callback(move |_| repaired.store(true, Ordering::Relaxed));
            let mut database = builder.open(path)?;
            // Repairing after a crash has looked at every page already.
            if !verified.load(Ordering::Relaxed) {
                // Its answer is also "no" for a file with other free space than was noted. What counts is that it went
                // through; that it did not go back to an older state is seen by the journal's numbers.
                database.check_integrity()?;
            }
            let (applied, has_journal) = read_applied(&database)?;
            Ok(Self { path: path.to_owned(), database: Some(database), applied, has_journal })
        })
    }

    /// The number of the last journal frame that is in it.
    pub(super) fn applied(&self) -> u64 {
        self.applied
    }

    /// Whether there must be a journal.
    pub(super) fn has_journal(&self) -> bool {
        self.has_journal
    }

    /// Notes that there is a journal from now on.
    pub(super) fn note_journal(&mut self) -> Result<(), TableError> {
        let Some(database) = self.database.as_ref().filter(|_| !self.has_journal) else { return Ok(()) };
        guarded(|| {
            let transaction = database.begin_write()?;
            transaction.open_table(APPLIED)?.insert(JOURNAL, 1)?;
            Ok(transaction.commit()?)
        })?;
        self.has_journal = true;
        Ok(())
    }

    /// Brings it up to date with a journal file. Frames that it has already are skipped. Returns how many were new.
    ///
    /// # Errors
    /// When frames are missing that should be there, or the table cannot be written.
    pub(super) fn apply(&mut self, frames: &mut Frames) -> Result<u64, TableError> {
        let before = self.applied;
        let database = match self.database.take() {
            Some(database) => database,
            None => guarded(|| Ok(builder().open(&self.path)?))?,
        };
        // Without a database left, whatever happens in here, the next call opens the file again.
        self.applied = guarded(|| apply(&database, before, frames))?;
        self.database = Some(database);
        Ok(self.applied - before)
    }

    /// The same with a file that was not written by another process, and must be all there.
    pub(super) fn apply_all(&mut self, frames: &mut Frames) -> Result<(), TableError> {
        self.apply(frames)?;
        if frames.is_complete() {
            return Ok(());
        }
        Err(TableError::Damaged(format!("change {} is missing in the journal", frames.number)))
    }

    /// Hands all rows to `act`, in the order of their keys.
    pub(super) fn each_row(
        &self,
        mut act: impl FnMut(&[u8], &[u8]) -> Result<(), Malformed>,
    ) -> Result<(), TableError> {
        let Some(database) = &self.database else { return Err(TableError::Io(io::Error::other("it is not open"))) };
        guarded(|| {
            let rows = database.begin_read()?.open_table(ROWS)?;
            for row in rows.iter()? {
                let (key, value) = row?;
                act(key.value(), value.value())?;
            }
            Ok(())
        })
    }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn read_applied(database: &Database) -> Result<(u64, bool), TableError> {
    let transaction = database.begin_read()?;
    transaction.open_table(ROWS)?;
    let table = transaction.open_table(APPLIED)?;
    let applied = table.get(LAST_FRAME)?.map(|number| number.value());
    let applied = applied.ok_or_else(|| TableError::Damaged("it does not say how far it is".to_owned()))?;
    Ok((applied, table.get(JOURNAL)?.is_some()))
}

fn apply(database: &Database, before: u64, frames: &mut Frames) -> Result<u64, TableError> {
    let transaction = database.begin_write()?;
    let mut applied = before;
    {
        let mut rows = transaction.open_table(ROWS)?;
        while let Some((number, operations)) = frames.next() {
            if number <= applied {
                continue;
            }
            if number != applied + 1 {
                let detail = format!("after change {applied} of the journal comes {number}");
                return Err(TableError::Damaged(detail));
            }
            each_op::<TableError>(operations, |op| apply_one(&mut rows, &op))?;
            applied = number;
        }
        if !frames.is_done() {
            return Err(TableError::Damaged(format!(
                "change {} of the journal is not as it was written",
                frames.number
            )));
        }
        transaction.open_table(APPLIED)?.insert(LAST_FRAME, applied)?;
    }
    if applied == before {
        transaction.abort()?;
    } else {
        transaction.commit()?;
    }
    Ok(applied)
}

fn apply_one(rows: &mut redb::Table<'_, &[u8], &[u8]>, op: &Op<'_>) -> Result<(), TableError> {
    match *op {
        Op::Put { key, value } => drop(rows.insert(key, value)?),
        Op::Remove { key } => drop(rows.remove(key)?),
        Op::RemoveRange { first, end } if first < end => rows.retain_in(first..end, |_, _| false)?,
        Op::RemoveRange { .. } => return Err(Malformed("empty range").into()),
    }
    Ok(())
}

/// `redb` may panic on a file whose content it does not expect.
fn guarded<T>(act: impl FnOnce() -> Result<T, TableError>) -> Result<T, TableError> {
    catch_unwind(AssertUnwindSafe(act))
        .unwrap_or_else(|_| Err(TableError::Damaged("its content makes no sense to redb".to_owned())))
}

impl From<Malformed> for TableError {
    fn from(malformed: Malformed) -> Self {
        Self::Damaged(malformed.to_string())
    }
}

impl From<redb::Error> for TableError {
    fn from(error: redb::Error) -> Self {
        match error {
            // What is no file of redb, or was cut off, comes as one of these.
            redb::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => Self::Damaged(error.to_string()),
            redb::Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => Self::Damaged(error.to_string()),
            redb::Error::Io(error) => Self::Io(error),
            redb::Error::PreviousIo => Self::Io(io::Error::other("a write before this one failed")),
            other => Self::Damaged(other.to_string()),
        }
    }
}

impl From<DatabaseError> for TableError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::UpgradeRequired(_) => Self::Newer,
            DatabaseError::DatabaseAlreadyOpen => Self::Io(io::Error::other("another program has it open")),
            other => redb::Error::from(other).into(),
        }
    }
}

impl From<StorageError> for TableError {
    fn from(error: StorageError) -> Self {
        redb::Error::from(error).into()
    }
}

impl From<redb::TransactionError> for TableError {
    fn from(error: redb::TransactionError) -> Self {
        redb::Error::from(error).into()
    }
}

impl From<redb::TableError> for TableError {
    fn from(error: redb::TableError) -> Self {
        redb::Error::from(error).into()
    }
}

impl From<redb::CommitError> for TableError {
    fn from(error: redb::CommitError) -> Self {
        redb::Error::from(error).into()
    }
}
