//! Which tests may run at once, and what the process holds.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static RUNNING: RwLock<()> = RwLock::new(());

/// Held by tests that do not mind others.
pub(crate) fn shared() -> RwLockReadGuard<'static, ()> {
    RUNNING.read().unwrap_or_else(PoisonError::into_inner)
}

/// Held by tests that count what the whole process holds.
pub(crate) fn exclusive() -> RwLockWriteGuard<'static, ()> {
    RUNNING.write().unwrap_or_else(PoisonError::into_inner)
}

/// What the process holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holdings {
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
    pub(crate) resident_bytes: usize,
}

impl Holdings {
    pub(crate) fn now() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        let pages: usize = statm.split(' ').nth(1).expect("resident").parse().expect("number");
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").expect("fd").count(),
            mappings: maps.lines().count(),
            resident_bytes: pages * rustix::param::page_size(),
        }
    }
}
