//! An allocator that counts bytes, per thread.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts { held: 0, held_max: 0, largest: 0 }) };
}

/// What this thread has asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Bytes that it has now; less than none if it freed what others asked for.
    pub(crate) held: isize,
    /// The most that it ever had since the last [`start`].
    pub(crate) held_max: isize,
    /// The largest piece since the last [`start`].
    pub(crate) largest: usize,
}

/// Starts to look for the most and the largest.
pub(crate) fn start() -> Counts {
    let counts = counts();
    COUNTS.set(Counts { held_max: counts.held, largest: 0, ..counts });
    COUNTS.get()
}

pub(crate) fn counts() -> Counts {
    COUNTS.get()
}

/// The system's allocator, counted.
pub(crate) struct Counting;

fn count(more: usize, less: usize) {
    // A thread that is ending has no counts any more; nobody asks for them.
    let _ = COUNTS.try_with(|counts| {
        let mut now = counts.get();
        now.held += more.cast_signed() - less.cast_signed();
        now.held_max = now.held_max.max(now.held);
        now.largest = now.largest.max(more);
        counts.set(now);
    });
}

// SAFETY: everything is passed on to `System` unchanged; counting touches only a thread-local value that needs no
// allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}
