//! Mapping memory files. The only place that turns addresses into slices.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A sealed anonymous memory file, mapped for reading and writing by this process alone: the seals let peers map it
/// for reading only, and forbid to change its size, so that no access to the mapping can fault.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping is plain memory, owned by this value; access through it follows the borrow rules of `Buffer`
// and of the transports (see `bytes`, `bytes_mut` and `as_ptr`).
unsafe impl Send for Mapping {}
// SAFETY: as above: shared references only read, except for the transports' writes, whose rules `as_ptr` states.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A zeroed mapping of at least `len` bytes, all pages present.
    pub(crate) fn allocate(len: usize) -> Result<Self, Errno> {
        let len = len.max(1);
        let file = rustix::fs::memfd_create("gradwire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let size = u64::try_from(len).map_err(|_| Errno::NOMEM)?;
        rustix::fs::ftruncate(&file, size)?;
        // Pages are taken now, so that too little memory is an error here and not a signal later.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlaps nothing.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &file,
                0,
            )?
        };
        let address = NonNull::new(address.cast()).ok_or(Errno::NOMEM)?;
        let mapping = Self { address, len, file };
        // Best effort: large pages where the system allows them for shared memory.
        // SAFETY: advice on our own mapping; this one never changes its contents.
        let _ = unsafe { rustix::mm::madvise(address.as_ptr().cast(), len, Advice::LinuxHugepage) };
        rustix::fs::fcntl_add_seals(
            &mapping.file,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        )?;
        Ok(mapping)
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) const fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` readable bytes for as long as `self` lives. Only `Buffer` calls this, whose
        // borrow rules exclude `bytes_mut`. A transport writes to it only within `Transport::poll`, into places
        // that its owner admitted and holds no borrow of (`Buffer`s are borrowed by the thread that polls, never
        // across a poll). Peers cannot write to it: the seals forbid it.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    /// The start of the mapping, for transports. Whoever writes through it must be inside `Transport::poll`, and
    /// within the bounds of the mapping.
    pub(crate) const fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Tells the system that all of this memory is about to be written to, so that what of it is not there yet comes in large
/// pages: a fault for every small one takes longer than what is written. Best effort.
pub fn expect_writes(memory: &mut [u8]) {
    let page = rustix::param::page_size();
    let skipped = memory.as_ptr().align_offset(page).min(memory.len());
    let whole = (memory.len() - skipped) / page * page;
    let pages = &mut memory[skipped..skipped + whole];
    if !pages.is_empty() {
        // SAFETY: advice on whole pages that the caller has borrowed mutably; it never changes their contents.
        let _ = unsafe { rustix::mm::madvise(pages.as_mut_ptr().cast(), whole, Advice::LinuxHugepage) };
    }
}

/// The mapping's bytes for writing. Takes the `Arc` by unique reference because only a `Buffer`, of which there is
/// one per mapping, may write.
pub(super) fn bytes_mut(mapping: &mut Arc<Mapping>) -> &mut [u8] {
    let (address, len) = (mapping.address.as_ptr(), mapping.len);
    // SAFETY: as `Mapping::bytes`; the only safe path to here is `Buffer::bytes_mut`, which borrows the one `Buffer`
    // of this mapping mutably. Other `Arc`s belong to transports, which hold no references into it.
    unsafe { std::slice::from_raw_parts_mut(address, len) }
}

/// A peer's memory file, mapped for reading only.
#[derive(Debug)]
pub(crate) struct PeerMapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: plain read-only memory, owned by this value.
unsafe impl Send for PeerMapping {}
// SAFETY: as above.
unsafe impl Sync for PeerMapping {}

impl PeerMapping {
    /// Maps all of `file`, which must be sealed against shrinking: an unsealed file could be cut short under the
    /// mapping, and reading it would then be a signal.
    pub(crate) fn map(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(Errno::PERM);
        }
        let len = usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(|_| Errno::OVERFLOW)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it overlaps nothing.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        let address = NonNull::new(address.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { address, len })
    }

    /// The bytes. The peer may change them at any time as far as the kernel is concerned; it proved the job's
    /// secret, and keeps to the protocol's turns: it leaves alone what it announced until it is told that it was
    /// read. A peer that breaks this can spoil values, which checksums find where they are asked for; lengths and
    /// descriptors are never read from here.
    pub(crate) const fn bytes(&self) -> &[u8] {
        // SAFETY: `len` readable bytes for as long as `self` lives: the seals keep the file from shrinking.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
    }
}
