//! A process's memory: registered regions, as bytes. What peers write lands here, whoever looks.

use std::collections::BTreeMap;
use std::ops::Range;

use gradwire_proto::RegionKey;
use gradwire_proto::frame::Location;

/// One process's regions.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: BTreeMap<RegionKey, Vec<u8>>,
    next: u64,
    bytes: usize,
}

impl Memory {
    /// Memory whose keys no other process has.
    pub(crate) fn new(process: u32) -> Self {
        Self { regions: BTreeMap::new(), next: (u64::from(process) + 1) << 24, bytes: 0 }
    }

    /// A new region, filled with zeros, under a key that never was one.
    pub(crate) fn allocate(&mut self, bytes: usize) -> RegionKey {
        let key = RegionKey(self.next);
        self.next += 1;
        self.bytes += bytes;
        self.regions.insert(key, vec![0; bytes]);
        key
    }

    /// Ends a region: what is written to it from now on is lost.
    pub(crate) fn free(&mut self, key: RegionKey) {
        if let Some(region) = self.regions.remove(&key) {
            self.bytes -= region.len();
        }
    }

    pub(crate) fn bytes_in_use(&self) -> usize {
        self.bytes
    }

    /// How many regions there are.
    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// The region's bytes; none of a region that there is not.
    pub(crate) fn get(&self, key: RegionKey) -> &[u8] {
        self.regions.get(&key).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn get_mut(&mut self, key: RegionKey) -> &mut [u8] {
        self.regions.get_mut(&key).map_or(&mut [], Vec::as_mut_slice)
    }

    /// A part of a region, if there is such a one.
    pub(crate) fn part(&self, key: RegionKey, range: Range<usize>) -> Option<&[u8]> {
        self.regions.get(&key)?.get(range)
    }

    /// Two different regions at once.
    pub(crate) fn copy(&mut self, from: (RegionKey, Range<usize>), to: (RegionKey, usize)) {
        let Some(source) = self.part(from.0, from.1).map(<[u8]>::to_vec) else { return };
        if let Some(target) = self.get_mut(to.0).get_mut(to.1..to.1 + source.len()) {
            target.copy_from_slice(&source);
        }
    }

    /// Takes a region out to change it while others are read; [`Memory::put`] it back.
    pub(crate) fn take(&mut self, key: RegionKey) -> Vec<u8> {
        self.regions.get_mut(&key).map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn put(&mut self, key: RegionKey, bytes: Vec<u8>) {
        if let Some(region) = self.regions.get_mut(&key) {
            *region = bytes;
        }
    }

    /// A peer's write. Returns whether it landed: not where there is no such place.
    pub(crate) fn land(&mut self, place: Location, bytes: &[u8]) -> bool {
        let Ok(start) = usize::try_from(place.offset) else { return false };
        let Some(end) = start.checked_add(bytes.len()) else { return false };
        let target = self.regions.get_mut(&place.region).and_then(|region| region.get_mut(start..end));
        target.is_some_and(|target| {
            target.copy_from_slice(bytes);
            true
        })
    }
}
