//! The memory that peers may write to.

use std::collections::HashMap;
use std::sync::Arc;

use gradwire_proto::RegionKey;

use crate::region::Mapping;
use crate::{Buffer, Remote};

/// Registered memory by key.
#[derive(Debug, Default)]
pub(super) struct Regions {
    by_key: HashMap<RegionKey, Region>,
}

#[derive(Debug)]
struct Region {
    mapping: Arc<Mapping>,
    len: u64,
}

impl Regions {
    pub(super) fn insert(&mut self, buffer: &Buffer) {
        let region = Region { mapping: Arc::clone(buffer.mapping()), len: buffer.len() as u64 };
        self.by_key.insert(buffer.key(), region);
    }

    pub(super) fn remove(&mut self, key: RegionKey) {
        self.by_key.remove(&key);
    }

    pub(super) fn contains(&self, key: RegionKey) -> bool {
        self.by_key.contains_key(&key)
    }

    /// The memory that holds `bytes` bytes at `place`, if all of them are within one registered region.
    pub(super) fn place(&self, place: Remote, bytes: usize) -> Option<&Arc<Mapping>> {
        let region = self.by_key.get(&place.region)?;
        let end = place.offset.checked_add(bytes as u64)?;
        (end <= region.len).then_some(&region.mapping)
    }
}
