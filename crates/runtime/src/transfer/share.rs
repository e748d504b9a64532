//! A member's share of a state, copied for newcomers while the trainer goes on with its step.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gradwire_codec::crc32;
use gradwire_proto::saved::SavedPart;
use gradwire_proto::transfer::{Sums, home, keeps, pieces};
use gradwire_transport::available_memory;
use rustix::fs::MemfdFlags;

use crate::state::StateTensor;

/// A share of no more bytes than this is kept by two. The members' step waits for what is copied: beyond this the stop would
/// be felt, which is worse than a newcomer that begins anew in the rare case that a member is lost while it gives.
const BACKUP_BYTES_MAX: u64 = 64 << 20;

/// What is kept: an anonymous memory file. It is written to, not mapped: whole pages need neither be zeroed nor be
/// faulted in one by one then, which takes more time than copying. And what was written once is sent from where it is.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) parts: Vec<SavedPart>,
    /// Ascending.
    pieces: Vec<Piece>,
    file: File,
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Somebody copies it.
    begun: AtomicBool,
    /// Nobody needs it any more.
    given_up: AtomicBool,
}

#[derive(Debug)]
struct Piece {
    index: u32,
    part: usize,
    start: usize,
    bytes: usize,
    /// This holder gives it, and not only where another one is lost.
    is_home: bool,
    /// Its place in the file; none where only its checksum is wanted.
    at: Option<u64>,
}

#[derive(Debug)]
struct Progress {
    /// Of each piece, once it is done.
    sums: Vec<Option<u32>>,
    left: usize,
    /// No more is copied.
    ended: Option<String>,
}

/// A piece that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copied {
    /// Its place in the file.
    pub(super) at: u64,
    pub(super) bytes: usize,
    pub(super) crc: u32,
}

impl Share {
    /// Room for the pieces of these parts that `seat` of `holders` keeps.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub(super) fn new(parts: Vec<SavedPart>, seat: u32, holders: u32) -> Result<Self, String> {
        let lengths: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        // To within a few pieces.
        let needed = lengths.iter().sum::<u64>() / u64::from(holders);
        if let Some(available) = available_memory()
            && needed > available
        {
            return Err(format!(
                "{needed} bytes are needed to keep its share of the state, and {available} are available"
            ));
        }
        let keeps_twice = needed <= BACKUP_BYTES_MAX;
        let layout = pieces(&lengths).ok_or("the state is too large")?;
        let (mut wanted, mut end) = (Vec::new(), 0);
        for (index, (part, range)) in (0..).zip(layout) {
            if !keeps(index, seat, holders) {
                continue;
            }
            let is_home = home(index, holders) == seat;
            let kept = is_home || keeps_twice;
            let bytes = range.end - range.start;
            let at = kept.then_some(end);
            end += if kept { bytes } else { 0 };
            // It fits: the part is in memory.
            let (start, bytes) = (range.start as usize, bytes as usize);
            wanted.push(Piece { index, part: part as usize, start, bytes, is_home, at });
        }
        let file = rustix::fs::memfd_create("gradwire-state", MemfdFlags::CLOEXEC)
            .map_err(|error| format!("no memory file could be had for the state: {error}"))?;
        let progress = Progress { sums: vec![None; wanted.len()], left: wanted.len(), ended: None };
        let (file, progress, changed) = (file.into(), Mutex::new(progress), Condvar::new());
        let (begun, given_up) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { parts, pieces: wanted, file, progress, changed, begun, given_up })
    }

    /// Takes it on: true for the first who does.
    pub(super) fn begin(&self) -> bool {
        !self.begun.swap(true, Ordering::AcqRel)
    }

    /// Where [`Copied::at`] is.
    pub(super) const fn file(&self) -> &File {
        &self.file
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

    /// A piece, waiting for it for so long. Nothing if it is not copied yet.
    ///
    /// # Errors
    /// Why it is not kept here.
    pub(super) fn piece(&self, index: u32, patience: Duration) -> Result<Option<Copied>, String> {
        let found = self.pieces.binary_search_by_key(&index, |piece| piece.index).ok();
        let kept = found.and_then(|nth| Some((nth, self.pieces[nth].at?)));
        let (nth, at) = kept.ok_or("this piece is not kept here")?;
        let crc = self.wait(patience, |progress| progress.sums[nth])?;
        Ok(crc.map(|crc| Copied { at, bytes: self.pieces[nth].bytes, crc }))
    }

    /// The checksums of all pieces, waiting for them for so long. Nothing if not all are there yet.
    ///
    /// # Errors
    /// Why not all are.
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

    /// Copies one piece, or takes its checksum.
    fn take(&self, nth: usize, parts: &[StateTensor<'_>]) -> io::Result<()> {
        let piece = &self.pieces[nth];
        let bytes = &parts[piece.part].bytes[piece.start..piece.start + piece.bytes];
        if let Some(at) = piece.at {
            self.file.write_all_at(bytes, at)?;
        }
        // Just copied, it is still in the cache.
        let crc = crc32(bytes);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        (progress.sums[nth], progress.left) = (Some(crc), progress.left - 1);
        drop(progress);
        self.changed.notify_all();
        Ok(())
    }

    /// Does all that has to be done before the trainer's state changes.
    fn take_all(&self, parts: &[StateTensor<'_>]) {
        // What is asked for first comes first.
        let (home, backup): (Vec<usize>, Vec<usize>) =
            (0..self.pieces.len()).partition(|nth| self.pieces[*nth].is_home);
        for nth in home.into_iter().chain(backup) {
            if self.given_up.load(Ordering::Acquire) {
                return self.end("the newcomer did not need it any more".to_owned());
            }
            if let Err(error) = self.take(nth, parts) {
                tracing::warn!(%error, "the state cannot be kept for a newcomer");
                return self.end(format!("the state could not be kept: {error}"));
            }
        }
    }
}

/// Shares that are to be copied from the trainer's state, before that changes.
pub(crate) struct Copying<'a> {
    pub(super) shares: Vec<Arc<Share>>,
    pub(super) parts: Vec<StateTensor<'a>>,
}

impl Copying<'_> {
    /// Copies them. Takes as long as that takes, and waits for nobody.
    pub(crate) fn run(&self) {
        self.shares.iter().for_each(|share| share.take_all(&self.parts));
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
        for (seat, holders, kept) in
            [(0, 1, vec![0, 1, 2, 3, 4]), (1, 3, vec![0, 1, 3, 4]), (2, 3, vec![1, 2, 4]), (0, 3, vec![0, 2, 3])]
        {
            let share = share(&[a.len() as u64, b.len() as u64], seat, holders);
            assert_eq!(share.piece(kept[0], NOW), Ok(None), "not copied yet");
            assert_eq!(share.sums(NOW), Ok(None));
            Copying { shares: vec![Arc::clone(&share)], parts: parts.clone() }.run();
            let sums = share.sums(NOW).expect("nothing failed").expect("all is copied");
            assert_eq!(sums.0.iter().map(|(piece, _)| *piece).collect::<Vec<_>>(), kept);
            for (piece, sum) in sums.0 {
                let lengths = [a.len() as u64, b.len() as u64];
                let (part, range) = pieces(&lengths).expect("few")[piece as usize].clone();
                let there = &parts[part as usize].bytes[range.start as usize..range.end as usize];
                assert_eq!(crc32(there), sum);
                let Copied { at, bytes, crc } = share.piece(piece, NOW).expect("it is kept").expect("it is copied");
                let mut read = vec![0; bytes];
                share.file().read_exact_at(&mut read, at).expect("it can be read");
                assert!(read == there && crc == sum);
            }
        }
    }

    #[test]
    fn what_is_not_kept_is_refused_and_waiting_for_what_is_given_up_ends() {
        let memory = [7; 100];
        let share = share(&[100], 0, 1);
        assert!(share.piece(1, NOW).is_err_and(|why| why.contains("not kept here")));
        share.give_up();
        Copying { shares: vec![Arc::clone(&share)], parts: vec![StateTensor { name: "part 0", bytes: &memory }] }.run();
        share.piece(0, Duration::from_secs(60)).unwrap_err();
        share.sums(Duration::from_secs(60)).unwrap_err();
    }

    #[test]
    fn of_a_large_state_only_its_home_keeps_a_piece() {
        for (bytes, twice) in [(2 * BACKUP_BYTES_MAX, true), (3 * BACKUP_BYTES_MAX, false)] {
            let share = share(&[bytes], 1, 2);
            assert_eq!(share.piece(1, NOW), Ok(None), "it is to be copied");
            assert_eq!(share.piece(0, NOW).is_ok(), twice);
            assert_eq!(share.pieces.len() as u64, bytes / PIECE_BYTES, "the checksum is taken all the same");
        }
    }

    #[test]
    fn more_than_there_is_memory_is_refused() {
        let part = SavedPart { name: "large".to_owned(), bytes: 1 << 50 };
        assert!(Share::new(vec![part], 0, 1).is_err_and(|why| why.contains("are available")));
    }
}
