//! The system calls around state streams that need raw memory.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

/// Keeps SIGPIPE from the calling thread: sending from a file has no flag against it.
pub(super) fn block_sigpipe() {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set that it is given, before anything reads it; `sigaddset` and
    // `pthread_sigmask` get a valid, initialised set, and a null pointer where the former mask is not wanted. All of them
    // concern this thread's mask only.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
    }
}
