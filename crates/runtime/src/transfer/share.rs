//! A member's share of a state, copied for a newcomer while the trainer goes on with its step.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gradwire_codec::crc32;
use gradwire_proto::saved::SavedPart;
use gradwire_proto::transfer::{COPIES, Sums, keeps, pieces};
use gradwire_transport::available_memory;
use rustix::fs::MemfdFlags;

use crate::state::StateTensor;

/// What is kept: an anonymous memory file. It is written to, not mapped: whole pages need neither be zeroed nor be
/// faulted in one by one then, which takes more time than copying.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) parts: Vec<SavedPart>,
    /// Ascending; of one after the other in the file.
    pieces: Vec<Piece>,
    file: File,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Nobody needs it any more.
    given_up: AtomicBool,
}

#[derive(Debug)]
struct Piece {
    index: u32,
    part: usize,
    start: usize,
    bytes: usize,
    /// Its place in the file.
    at: u64,
    /// This member is the first to keep it, so that the newcomer asks for it soon.
    first: bool,
}

#[derive(Debug)]
struct Progress {
    /// Of each piece, once it is copied.
    sums: Vec<Option<u32>>,
    left: usize,
    /// No more is copied.
    ended: Option<String>,
}

impl Share {
    /// Room for the pieces of these parts that `seat` of `holders` keeps.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub(super) fn new(parts: Vec<SavedPart>, seat: u32, holders: u32) -> Result<Self, String> {
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        // To within a few pieces.
        let needed = lengths.iter().sum::<u64>() / u64::from(holders) * u64::from(COPIES.min(holders));
        if let Some(available) = available_memory()
            && needed > available
        {
            return Err(format!(
                "{needed} bytes are needed to keep its share of the state, and {available} are available"
            ));
        }
        let layout = pieces(&lengths).ok_or("the state is too large")?;
        let (mut kept, mut at) = (Vec::new(), 0);
        for (index, (part, range)) in (0..).zip(layout).filter(|(index, _)| keeps(*index, seat, holders)) {
            let bytes = range.end - range.start;
            // It fits: the part is in memory.
            let (start, bytes_here) = (range.start as usize, bytes as usize);
            let first = index % holders == seat;
            kept.push(Piece { index, part: part as usize, start, bytes: bytes_here, at, first });
            at += bytes;
        }
        let file = rustix::fs::memfd_create("gradwire-state", MemfdFlags::CLOEXEC)
            .map_err(|error| format!("no memory file could be had for the state: {error}"))?;
        let progress = Progress { sums: vec![None; kept.len()], left: kept.len(), ended: None };
        let (changed, given_up) = (Condvar::new(), AtomicBool::new(false));
        Ok(Self { parts, pieces: kept, file: file.into(), progress: Mutex::new(progress), changed, given_up })
    }

    /// Waits until `found` finds something, for so long. Nothing if it does not.
    fn wait<T>(&self, patience: Duration, found: impl Fn(&Progress) -> Option<T>) -> Result<Option<T>, String> {
        let end = Instant::now() + patience;
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(found) = found(&progress) {
                return Ok(Some(found));
            }
            if let Some(why) = &progress.ended {
                return Err(why.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            progress = self.changed.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reads a piece into `bytes`, waiting for it for so long; returns its CRC-32. Nothing if it is not copied yet.
    ///
    /// # Errors
    /// Why it is not kept here.
    pub(super) fn read(&self, index: u32, bytes: &mut Vec<u8>, patience: Duration) -> Result<Option<u32>, String> {
        let found = self.pieces.binary_search_by_key(&index, |piece| piece.index);
        let nth = found.map_err(|_| "this piece is not kept here".to_owned())?;
        let Some(crc) = self.wait(patience, |progress| progress.sums[nth])? else { return Ok(None) };
        let piece = &self.pieces[nth];
        bytes.resize(piece.bytes, 0);
        let read = self.file.read_exact_at(bytes, piece.at);
        read.map_err(|error| format!("a piece could not be read again: {error}"))?;
        Ok(Some(crc))
    }

    /// The checksums of all pieces, waiting for them for so long. Nothing if not all are copied yet.
    ///
    /// # Errors
    /// Why not all are kept.
    pub(super) fn sums(&self, patience: Duration) -> Result<Option<Sums>, String> {
        let sums = |progress: &Progress| {
            let of = |(piece, sum): (&Piece, &Option<u32>)| Some((piece.index, (*sum)?));
            (progress.left == 0).then(|| Sums(self.pieces.iter().zip(&progress.sums).filter_map(of).collect()))
        };
        self.wait(patience, sums)
    }

    /// Nobody needs it any more: the rest is not copied.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    fn end(&self, why: String) {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).ended = Some(why);
        self.changed.notify_all();
    }

    /// Copies one piece.
    fn copy(&self, nth: usize, parts: &[StateTensor<'_>]) -> io::Result<()> {
        let piece = &self.pieces[nth];
        let bytes = &parts[piece.part].bytes[piece.start..piece.start + piece.bytes];
        self.file.write_all_at(bytes, piece.at)?;
        // Just copied, it is still in the cache.
        let crc = crc32(bytes);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        (progress.sums[nth], progress.left) = (Some(crc), progress.left - 1);
        drop(progress);
        self.changed.notify_all();
        Ok(())
    }
}

/// A share that is to be copied from the trainer's state, before that changes.
pub(crate) struct Copying<'a> {
    pub(super) share: Arc<Share>,
    pub(super) parts: Vec<StateTensor<'a>>,
}

impl Copying<'_> {
    /// Copies the share. Takes as long as that takes, and waits for nobody.
    pub(crate) fn run(&self) {
        let Self { share, parts } = self;
        let pieces = || share.pieces.iter().enumerate();
        let order = pieces().filter(|(_, piece)| piece.first).chain(pieces().filter(|(_, piece)| !piece.first));
        for (nth, _) in order {
            if share.given_up.load(Ordering::Acquire) {
                return share.end("the newcomer did not need it any more".to_owned());
            }
            if let Err(error) = share.copy(nth, parts) {
                tracing::warn!(%error, "the state cannot be kept for a newcomer");
                return share.end(format!("the state could not be kept: {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::transfer::PIECE_BYTES;

    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn share(lengths: &[u64], seat: u32, holders: u32) -> Arc<Share> {
        let part = |(nth, bytes): (usize, &u64)| SavedPart { name: format!("part {nth}"), bytes: *bytes };
        Arc::new(Share::new(lengths.iter().enumerate().map(part).collect(), seat, holders).expect("there is memory"))
    }

    #[test]
    fn what_is_kept_is_what_was_copied() {
        let memory: Vec<u8> = (0..3 * PIECE_BYTES + 77).map(|at| (at / 3) as u8).collect();
        let (a, b) = memory.split_at(PIECE_BYTES as usize + 5);
        let parts = vec![StateTensor { name: "part 0", bytes: a }, StateTensor { name: "part 1", bytes: b }];
        for (seat, holders, expected) in [(0, 1, vec![0, 1, 2, 3, 4]), (1, 3, vec![0, 1, 3, 4]), (2, 3, vec![1, 2, 4])]
        {
            let share = share(&[a.len() as u64, b.len() as u64], seat, holders);
            let mut bytes = Vec::new();
            assert_eq!(share.read(expected[0], &mut bytes, NOW), Ok(None), "not copied yet");
            assert_eq!(share.sums(NOW), Ok(None));
            Copying { share: Arc::clone(&share), parts: parts.clone() }.run();
            let sums = share.sums(NOW).expect("nothing failed").expect("all is copied");
            assert_eq!(sums.0.iter().map(|(piece, _)| *piece).collect::<Vec<_>>(), expected);
            for (piece, sum) in sums.0 {
                let lengths = [a.len() as u64, b.len() as u64];
                let (part, range) = pieces(&lengths).expect("few")[piece as usize].clone();
                assert_eq!(share.read(piece, &mut bytes, NOW), Ok(Some(sum)));
                assert_eq!(bytes, parts[part as usize].bytes[range.start as usize..range.end as usize]);
                assert_eq!(crc32(&bytes), sum);
            }
        }
    }

    #[test]
    fn what_is_not_kept_is_refused_and_waiting_for_what_is_given_up_ends() {
        let memory = [7; 100];
        let share = share(&[100], 0, 1);
        let mut bytes = Vec::new();
        assert!(share.read(1, &mut bytes, NOW).is_err_and(|why| why.contains("not kept here")));
        share.give_up();
        Copying { share: Arc::clone(&share), parts: vec![StateTensor { name: "part 0", bytes: &memory }] }.run();
        assert!(share.read(0, &mut bytes, Duration::from_secs(60)).is_err());
        assert!(share.sums(Duration::from_secs(60)).is_err());
    }

    #[test]
    fn more_than_there_is_memory_is_refused() {
        let part = SavedPart { name: "large".to_owned(), bytes: 1 << 50 };
        assert!(Share::new(vec![part], 0, 1).is_err_and(|why| why.contains("are available")));
    }
}
