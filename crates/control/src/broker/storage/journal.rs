//! The journal: what was changed since the table was written last, appended in the order in which it happened.
//!
//! A file starts with a [`FileHeader`], and is named after the number of its first frame. A frame is `u32 size | u64
//! number | u32 CRC-32 of the operations | u32 check | operations`, little-endian; the check is the CRC-32 of what is
//! before it, mixed with the file's salt, so that nothing that a client sends can pass for a frame. Numbers are
//! consecutive. There is always a file, so the number that must come next is known even when everything is in the table.
//! A failed append leaves the file as it was. What the end of a file says about what happened is in [`super::ending`].

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gradwire_proto::frame::payload_crc;
use gradwire_proto::wire::Reader;

use super::header::{FILE_HEADER_BYTES, FileHeader};
use super::rows::Ops;
use super::table::TableError;

/// Bytes before a frame's operations.
pub(super) const FRAME_HEADER_BYTES: usize = 20;
/// Bytes of them before the check.
const CHECKED_BYTES: usize = 16;
/// A buffer that grew beyond this is given back.
const BUFFER_BYTES_KEPT: usize = 1 << 20;
const PREFIX: &str = "journal-";
/// Files that are being made: of no value until they have their names.
pub(super) const NEW: &str = ".new";

/// The journal file that is written now.
#[derive(Debug)]
pub(super) struct Journal {
    directory: PathBuf,
    path: PathBuf,
    pub(super) file: Arc<File>,
    header: FileHeader,
    /// Bytes of the header and of whole frames.
    bytes: u64,
    /// The file may hold a part of a frame behind them.
    torn: bool,
    next: u64,
    buffer: Vec<u8>,
}

/// A journal file that is not written any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) path: PathBuf,
    /// The number of its first frame, and that after its last one.
    first: u64,
    end: u64,
    pub(super) bytes: u64,
}

impl Sealed {
    /// Its frames, of which none may be missing.
    pub(super) fn read(&self) -> Result<Frames, TableError> {
        Frames::read(&self.path, self.first, self.end)
    }
}

impl Journal {
    /// Starts a file for the frames from number `next` on. `synced` says whether each is synced before the next comes.
    /// A file of that name holds nothing that counts, since its first frame would have this number, and is replaced.
    pub(super) fn create(directory: &Path, next: u64, synced: bool) -> io::Result<Self> {
        let path = directory.join(format!("{PREFIX}{next:016x}"));
        let header = FileHeader::new(next, synced);
        // Whole, or not there: a file without its header was damaged.
        let new = path.with_extension("new");
        let file = File::options().append(true).create(true).mode(0o600).open(&new)?;
        file.set_len(0)?;
        (&file).write_all(&header.encode())?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_directory(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            path,
            file: Arc::new(file),
            header,
            bytes: FILE_HEADER_BYTES as u64,
            torn: false,
            next,
            buffer: Vec::new(),
        })
    }

    /// Bytes in this file.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether there are no frames in this file.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes == FILE_HEADER_BYTES as u64
    }

    /// Appends a frame. When this returns, it survives the end of this process.
    pub(super) fn append(&mut self, ops: &Ops) -> io::Result<()> {
        self.mend()?;
        // Who removes the files of a broker that runs would get receipts for what nobody can read again.
        if self.file.metadata()?.nlink() == 0 {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("{} was removed", self.path.display())));
        }
        let operations = ops.bytes();
        let size = u32::try_from(operations.len()).map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
        self.buffer.clear();
        self.buffer.extend_from_slice(&size.to_le_bytes());
        self.buffer.extend_from_slice(&self.next.to_le_bytes());
        self.buffer.extend_from_slice(&payload_crc(operations).to_le_bytes());
        let check = check(&self.buffer, &self.header);
        self.buffer.extend_from_slice(&check.to_le_bytes());
        self.buffer.extend_from_slice(operations);
        let written = (&*self.file).write_all(&self.buffer);
        let bytes = self.buffer.len() as u64;
        if self.buffer.capacity() > BUFFER_BYTES_KEPT {
            self.buffer = Vec::new();
        }
        if let Err(error) = written {
            self.torn = true;
            // If this fails too, it is tried again before anything else is written.
            let _ = self.mend();
            return Err(error);
        }
        self.bytes += bytes;
        self.next += 1;
        Ok(())
    }

    /// Takes the last frame back, which was of `bytes` in all.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.next -= 1;
        self.torn = true;
        let _ = self.mend();
    }

    /// Ends this file and starts another one. Gives the former, if something is in it.
    pub(super) fn rotate(&mut self) -> io::Result<Option<Sealed>> {
        self.mend()?;
        let next = Self::create(&self.directory, self.next, self.header.synced)?;
        let before = std::mem::replace(self, next);
        let (first, end) = (before.header.first, before.next);
        // An empty one was replaced by that of the same name.
        Ok((first < end).then_some(Sealed { path: before.path, first, end, bytes: before.bytes }))
    }

    fn mend(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.bytes)?;
            self.torn = false;
        }
        Ok(())
    }
}

/// The journal files in a directory, in the order in which they were written, with the number that the first frame of
/// each has or would have.
pub(super) fn files(directory: &Path) -> io::Result<BTreeMap<u64, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).filter(|digits| digits.len() == 16);
        if let Some(number) = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()) {
            found.insert(number, entry.path());
        }
    }
    Ok(found)
}

/// The whole frames of a journal file.
#[derive(Debug)]
pub(super) struct Frames {
    pub(super) bytes: Vec<u8>,
    pub(super) header: FileHeader,
    pub(super) position: usize,
    /// The number of the frame that is next.
    pub(super) number: u64,
    /// What comes from this number on is in the next file.
    end: u64,
}

/// What is before a frame's operations.
#[derive(Debug)]
pub(super) struct FrameHeader {
    pub(super) bytes: usize,
    pub(super) number: u64,
    crc: u32,
}

impl Frames {
    /// Reads a file, whose frames count up to that with number `end`.
    ///
    /// # Errors
    /// When the system does not let it, and when the file does not start as one for frames from `first` on.
    pub(super) fn read(path: &Path, first: u64, end: u64) -> Result<Self, TableError> {
        let bytes = fs::read(path).map_err(TableError::Io)?;
        let header = FileHeader::decode(&bytes).filter(|header| header.first == first).ok_or_else(|| {
            TableError::Damaged(format!(
                "the journal file {} is of {} bytes, and does not start as it was written",
                path.display(),
                bytes.len()
            ))
        })?;
        Ok(Self { bytes, header, position: FILE_HEADER_BYTES, number: first, end })
    }

    /// The next frame's number and operations.
    pub(super) fn next(&mut self) -> Option<(u64, &[u8])> {
        let header = self.header_at(self.position).filter(|header| header.number == self.number)?;
        if header.number >= self.end {
            return None;
        }
        let start = self.position + FRAME_HEADER_BYTES;
        let operations = self.bytes.get(start..start.checked_add(header.bytes)?)?;
        if payload_crc(operations) != header.crc {
            return None;
        }
        self.position = start + header.bytes;
        self.number += 1;
        Some((header.number, operations))
    }

    /// The header of a frame that starts there, if one does.
    pub(super) fn header_at(&self, position: usize) -> Option<FrameHeader> {
        let bytes = self.bytes.get(position..)?.get(..FRAME_HEADER_BYTES)?;
        let mut reader = Reader::new(bytes);
        let (size, number) = (reader.u32().ok()?, reader.u64().ok()?);
        let (crc, found) = (reader.u32().ok()?, reader.u32().ok()?);
        (check(&bytes[..CHECKED_BYTES], &self.header) == found).then_some(FrameHeader {
            bytes: size as usize,
            number,
            crc,
        })
    }

    /// What is behind the last whole frame.
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.position..]
    }

    /// Whether everything that counts was read.
    pub(super) fn is_done(&self) -> bool {
        self.is_complete() || self.rest().is_empty()
    }

    /// Whether all frames that the file should have were read.
    pub(super) fn is_complete(&self) -> bool {
        self.number >= self.end
    }
}

fn check(checked: &[u8], header: &FileHeader) -> u32 {
    payload_crc(checked) ^ header.salt
}

/// Keeps what is cut off a journal file in a file beside it, and returns its path.
pub(super) fn keep_cut(file: &Path, cut: &[u8]) -> io::Result<PathBuf> {
    for number in 1_u32.. {
        let extension = if number == 1 { "torn".to_owned() } else { format!("torn-{number}") };
        let path = file.with_extension(extension);
        // A start that ended here is repeated.
        match fs::read(&path) {
            Ok(before) if before == cut => return Ok(path),
            Ok(_) => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        write_new(&path, cut)?;
        return Ok(path);
    }
    Err(io::Error::other("too many files of what was cut off"))
}

/// Writes a file that is there whole, or not at all.
pub(super) fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(NEW);
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// Makes it survive a loss of power which files a directory holds.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
