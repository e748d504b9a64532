//! The journal: what was changed since the table was written last, appended in the order in which it happened.
//!
//! A frame is `u32 size | u32 CRC-32 | u64 sequence number | operations`, little-endian; the CRC covers the number and
//! the operations. Numbers are consecutive, and a file is named after its first one. There is always a file, so the
//! number that must come next is known even when everything is in the table. A frame that was not written whole, which only a crash leaves behind, ends
//! what is read of its file. A failed append leaves the file as it was.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gradwire_proto::frame::payload_crc;
use gradwire_proto::wire::Reader;

use super::rows::Ops;

/// Bytes before a frame's operations.
const FRAME_HEADER_BYTES: usize = 16;
/// A buffer that grew beyond this is given back.
const BUFFER_BYTES_KEPT: usize = 1 << 20;
const PREFIX: &str = "journal-";

/// The journal file that is written now.
#[derive(Debug)]
pub(super) struct Journal {
    directory: PathBuf,
    path: PathBuf,
    pub(super) file: Arc<File>,
    /// Bytes of whole frames.
    bytes: u64,
    /// The file may hold a part of a frame behind them.
    torn: bool,
    next: u64,
    buffer: Vec<u8>,
}

impl Journal {
    /// Starts a file for the frames from number `next` on.
    pub(super) fn create(directory: &Path, next: u64) -> io::Result<Self> {
        let path = directory.join(format!("{PREFIX}{next:016x}"));
        // One of this name holds nothing that counts: its first frame would have this number.
        let file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        file.set_len(0)?;
        sync_directory(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            path,
            file: Arc::new(file),
            bytes: 0,
            torn: false,
            next,
            buffer: Vec::new(),
        })
    }

    /// Bytes in this file.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a frame. When this returns, it survives the end of this process.
    pub(super) fn append(&mut self, ops: &Ops) -> io::Result<()> {
        self.mend()?;
        self.buffer.clear();
        let operations = ops.bytes();
        let size = u32::try_from(operations.len()).map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
        self.buffer.extend_from_slice(&size.to_le_bytes());
        self.buffer.extend_from_slice(&[0; 4]);
        self.buffer.extend_from_slice(&self.next.to_le_bytes());
        self.buffer.extend_from_slice(operations);
        let crc = payload_crc(&self.buffer[8..]);
        self.buffer[4..8].copy_from_slice(&crc.to_le_bytes());
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

    /// Ends this file and starts another one.
    pub(super) fn rotate(&mut self) -> io::Result<PathBuf> {
        self.mend()?;
        let next = Self::create(&self.directory, self.next)?;
        Ok(std::mem::replace(self, next).path)
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
    bytes: Vec<u8>,
    position: usize,
}

impl Frames {
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        Ok(Self { bytes: fs::read(path)?, position: 0 })
    }

    /// The next frame's number and operations.
    pub(super) fn next(&mut self) -> Option<(u64, &[u8])> {
        let rest = self.bytes.get(self.position..)?;
        let mut reader = Reader::new(rest);
        let (size, crc) = (reader.u32().ok()? as usize, reader.u32().ok()?);
        let covered = reader.bytes(size.checked_add(8)?).ok()?;
        if payload_crc(covered) != crc {
            return None;
        }
        self.position += FRAME_HEADER_BYTES + size;
        let (number, operations) = covered.split_first_chunk()?;
        Some((u64::from_le_bytes(*number), operations))
    }

    /// Bytes behind the last whole frame.
    pub(super) fn torn_bytes(&self) -> usize {
        self.bytes.len() - self.position
    }
}

/// Makes it survive a loss of power which files a directory holds.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
