//! Lanes in mapped memory, and copying from a peer's memory into our own.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::ring::{Memory, OwnMemory, RING};
use crate::region::{Mapping, PeerMapping};

/// Our lane: written by us, read by the peer.
#[derive(Debug)]
pub(super) struct OwnLane {
    mapping: Mapping,
    words: usize,
}

impl OwnLane {
    /// A lane with a ring of `ring_words` words, all zero.
    pub(super) fn allocate(ring_words: usize) -> Result<Self, Errno> {
        let words = RING + ring_words;
        Ok(Self { mapping: Mapping::allocate(words * 8)?, words })
    }

    /// The memory file, for the peer.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is at least `words * 8` bytes, aligned to a page, lives as long as `self`, and is
        // accessed by this process only here and by others only to read. Every access is atomic.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().cast::<AtomicU64>(), self.words) }
    }
}

impl Memory for OwnLane {
    fn load(&self, index: usize) -> u64 {
        self.words()[index].load(Ordering::Relaxed)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

impl OwnMemory for OwnLane {
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.words()[index].store(value, order);
    }
}

/// A peer's lane, mapped for reading only: what we read there can be anything at any time.
#[derive(Debug)]
pub(super) struct PeerLane {
    address: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is owned by this value and only read, with atomic loads.
unsafe impl Send for PeerLane {}

impl PeerLane {
    /// Maps the lane in `file`, whose ring must have `ring_words` words.
    pub(super) fn map(file: OwnedFd, ring_words: usize) -> Result<Self, Errno> {
        let words = RING + ring_words;
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(Errno::PERM);
        }
        let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::OVERFLOW)?;
        if size != words as u64 * 8 {
            return Err(Errno::BADF);
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlaps nothing. The file has the size
        // that is mapped, and its seals keep it from shrinking, so that no access can fault.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), words * 8, ProtFlags::READ, MapFlags::SHARED, &file, 0)? };
        Ok(Self { address: NonNull::new(address.cast()).ok_or(Errno::NOMEM)?, words })
    }
}

impl Memory for PeerLane {
    fn load(&self, index: usize) -> u64 {
        assert!(index < self.words, "word {index} of a lane of {} words", self.words);
        // SAFETY: within the mapping, which is aligned to a page and lives as long as `self`. The memory is mapped
        // for reading only: relaxed loads of a word are the atomic access that is allowed there.
        unsafe { self.address.add(index).as_ref() }.load(Ordering::Relaxed)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

impl Drop for PeerLane {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.words * 8) };
    }
}

/// Copies `bytes` bytes from a peer's region to one of ours. Returns false, having copied nothing, when they are not
/// within both. Only to be called within `Transport::poll`.
pub(super) fn copy(source: &PeerMapping, source_offset: u64, target: &Mapping, target_offset: u64, bytes: u64) -> bool {
    let source = source.bytes();
    if !within(source_offset, bytes, source.len()) || !within(target_offset, bytes, target.len()) {
        return false;
    }
    // SAFETY: both places were just checked to be within their mappings, which the two references keep alive. They
    // cannot overlap in this process: a peer's mapping is never one of ours. We are inside `poll`, where a transport
    // may write to memory that its owner admitted and holds no borrow of (see `Mapping::bytes`).
    unsafe {
        std::ptr::copy_nonoverlapping(
            source.as_ptr().add(source_offset as usize),
            target.as_ptr().add(target_offset as usize),
            bytes as usize,
        );
    }
    true
}

/// Whether `bytes` bytes from `offset` on are within `len`.
pub(super) fn within(offset: u64, bytes: u64, len: usize) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= len as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_read_as_it_was_written_and_cannot_be_mapped_wrongly() {
        let own = OwnLane::allocate(64).expect("allocate");
        own.store(RING + 63, 42, Ordering::Release);
        let file = || own.file().try_clone_to_owned().expect("clone");
        let peer = PeerLane::map(file(), 64).expect("map");
        assert_eq!((peer.load(RING + 63), peer.load(0)), (42, 0));
        assert_eq!(PeerLane::map(file(), 32).err(), Some(Errno::BADF));
        let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        assert_eq!(PeerLane::map(unsealed, 64).err(), Some(Errno::PERM));
    }

    #[test]
    fn copying_stays_within_both_regions() {
        let ours = Mapping::allocate(100).expect("allocate");
        let theirs = Mapping::allocate(50).expect("allocate");
        let theirs = PeerMapping::map(theirs.file()).expect("map");
        assert!(copy(&theirs, 0, &ours, 50, 50) && copy(&theirs, 50, &ours, 100, 0));
        assert!(!copy(&theirs, 1, &ours, 0, 50));
        assert!(!copy(&theirs, 0, &ours, 51, 50));
        assert!(!copy(&theirs, u64::MAX, &ours, 0, 2));
        assert!(!copy(&theirs, 0, &ours, u64::MAX, 2));
    }
}
