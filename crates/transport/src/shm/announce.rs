//! Telling peers of regions, and keeping those that peers told of.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use gradwire_proto::{Fault, FaultKind, RegionKey};
use rustix::io::Errno;

use super::link::violation;
use super::packet::{Packet, Sent, send};
use super::sys::within;
use crate::Remote;
use crate::region::{Mapping, PeerMapping};

/// Most regions of one peer. More would come near the kernel's limit on mappings (65,530).
const PEER_REGIONS_MAX: usize = 32_768;

/// Our announcements to one peer, in order, numbered from 1.
///
/// The queue is bounded whatever the peer reads: by the regions that are registered, by what fits into the stream,
/// and by the records in the ring. A registration that ends before it was sent or used is taken out again.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    made: u64,
    queue: VecDeque<Announcement>,
}

#[derive(Debug)]
struct Announcement {
    seq: u64,
    what: What,
}

#[derive(Debug)]
enum What {
    /// `tail` is the end of our ring when it was made: a record behind it may use the region.
    Register {
        key: RegionKey,
        mapping: Arc<Mapping>,
        len: usize,
        tail: u64,
    },
    Deregister {
        key: RegionKey,
        after: u64,
    },
    Nothing,
}

impl Announcements {
    /// How many were made, sent or not.
    pub(super) const fn count(&self) -> u64 {
        self.made
    }

    /// Whether all are sent.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Offers a region; `tail` is the end of what is in our ring.
    pub(super) fn register(&mut self, key: RegionKey, mapping: &Arc<Mapping>, len: usize, tail: u64) {
        self.push(What::Register { key, mapping: Arc::clone(mapping), len, tail });
    }

    /// Takes an offer back, for when everything before `tail` in our ring is consumed.
    pub(super) fn deregister(&mut self, key: RegionKey, tail: u64) {
        let unused = self.queue.iter().rposition(|announcement| {
            matches!(announcement.what, What::Register { key: other, tail: then, .. } if other == key && then == tail)
        });
        let Some(at) = unused else {
            return self.push(What::Deregister { key, after: tail });
        };
        self.queue.remove(at);
        match self.queue.back_mut() {
            // Its number covers all before it.
            Some(Announcement { seq, what: What::Nothing }) => {
                self.made += 1;
                *seq = self.made;
            }
            _ => self.push(What::Nothing),
        }
    }

    /// Sends what the stream has room for.
    pub(super) fn flush(&mut self, stream: BorrowedFd<'_>) -> Result<(), Errno> {
        while let Some(Announcement { seq, what }) = self.queue.front() {
            let seq = *seq;
            let (packet, file) = match what {
                What::Register { key, mapping, len, .. } => {
                    (Packet::Register { seq, key: *key, len: *len as u64 }, Some(mapping.file()))
                }
                What::Deregister { key, after } => (Packet::Deregister { seq, key: *key, after: *after }, None),
                What::Nothing => (Packet::Nothing { seq }, None),
            };
            match send(stream, packet, file)? {
                Sent::Yes => {
                    self.queue.pop_front();
                }
                Sent::Later | Sent::Gone => return Ok(()),
            }
        }
        Ok(())
    }

    fn push(&mut self, what: What) {
        self.made += 1;
        self.queue.push_back(Announcement { seq: self.made, what });
    }
}

/// The regions that a peer offers.
#[derive(Debug, Default)]
pub(super) struct PeerRegions {
    /// Number of the last announcement that arrived.
    heard: u64,
    mapped: BTreeMap<RegionKey, PeerRegion>,
    /// Withdrawn regions that records before this position of the peer's ring may still use.
    leaving: VecDeque<(u64, RegionKey)>,
}

#[derive(Debug)]
struct PeerRegion {
    mapping: PeerMapping,
    len: usize,
}

impl PeerRegions {
    /// Number of the last announcement that arrived.
    pub(super) const fn heard(&self) -> u64 {
        self.heard
    }

    /// Takes in a packet. `head` is the end of what was consumed from the peer's ring.
    pub(super) fn take(&mut self, packet: Packet, file: Option<OwnedFd>, head: u64) -> Result<(), Fault> {
        match packet {
            Packet::Wake => Ok(()),
            Packet::Setup { .. } => Err(violation("it set the link up twice")),
            Packet::Nothing { seq } => self.hear(seq),
            Packet::Register { seq, key, len } => {
                self.hear(seq)?;
                let file = file.ok_or_else(|| violation("a region came without its memory"))?;
                self.map(key, len, file.as_fd())
            }
            Packet::Deregister { seq, key, after } => {
                self.hear(seq)?;
                if !self.mapped.contains_key(&key) || self.leaving.iter().any(|(_, other)| *other == key) {
                    return Err(violation("it withdrew a region that it does not offer"));
                }
                self.leaving.push_back((after, key));
                self.let_go(head);
                Ok(())
            }
        }
    }

    /// Unmaps the withdrawn regions that no record from `head` on uses.
    pub(super) fn let_go(&mut self, head: u64) {
        while let Some((after, key)) = self.leaving.front().copied()
            && after <= head
        {
            self.leaving.pop_front();
            self.mapped.remove(&key);
        }
    }

    /// `bytes` bytes at `place`, if they are within a region.
    pub(super) fn view(&self, place: Remote, bytes: usize) -> Option<&[u8]> {
        let region = self.mapped.get(&place.region)?;
        let start = usize::try_from(place.offset).ok()?;
        region.mapping.bytes().get(..region.len)?.get(start..start.checked_add(bytes)?)
    }

    /// The memory of a region, if it holds `bytes` bytes at `place`.
    pub(super) fn place(&self, place: Remote, bytes: u64) -> Option<&PeerMapping> {
        let region = self.mapped.get(&place.region)?;
        within(place.offset, bytes, region.len).then_some(&region.mapping)
    }

    fn hear(&mut self, seq: u64) -> Result<(), Fault> {
        if seq <= self.heard {
            return Err(violation("its announcements are out of order"));
        }
        self.heard = seq;
        Ok(())
    }

    fn map(&mut self, key: RegionKey, len: u64, file: BorrowedFd<'_>) -> Result<(), Fault> {
        if let Some(at) = self.leaving.iter().position(|(_, other)| *other == key) {
            // Offered again before it was let go: the key still names the same memory.
            self.leaving.remove(at);
        } else if self.mapped.contains_key(&key) {
            return Err(violation("it offered a region twice"));
        }
        if self.mapped.len() >= PEER_REGIONS_MAX {
            return Err(violation("it offers more regions than any rank may"));
        }
        let mapping = PeerMapping::map(file).map_err(|errno| match errno {
            Errno::PERM | Errno::INVAL => violation("a region's memory is not sealed"),
            errno => Fault::new(
                FaultKind::MemoryUnavailable,
                format!("{len} bytes of a peer's memory could not be mapped ({errno}): raise vm.max_map_count, or the limit on address space (ulimit -v)"),
            ),
        })?;
        let len = usize::try_from(len).ok().filter(|len| *len <= mapping.bytes().len());
        let len = len.ok_or_else(|| violation("a region is longer than its memory"))?;
        self.mapped.insert(key, PeerRegion { mapping, len });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::packet::{Received, Receiver};
    use super::*;

    fn mapping() -> Arc<Mapping> {
        Arc::new(Mapping::allocate(100).expect("allocate"))
    }

    fn register(seq: u64, key: u64) -> Packet {
        Packet::Register { seq, key: RegionKey(key), len: 100 }
    }

    fn take(regions: &mut PeerRegions, packet: Packet, head: u64) -> Result<(), Fault> {
        let file = packet.has_file().then(|| mapping().file().try_clone_to_owned().expect("clone"));
        regions.take(packet, file, head)
    }

    #[test]
    fn a_region_stays_until_the_records_before_its_withdrawal_are_consumed() {
        let mut regions = PeerRegions::default();
        let place = Remote { region: RegionKey(5), offset: 90 };
        assert!(regions.view(place, 1).is_none());
        take(&mut regions, register(1, 5), 0).expect("register");
        assert_eq!(regions.view(place, 10).map(<[u8]>::len), Some(10));
        assert!(regions.view(place, 11).is_none());
        take(&mut regions, Packet::Deregister { seq: 2, key: RegionKey(5), after: 30 }, 29).expect("deregister");
        assert!(regions.view(place, 1).is_some());
        regions.let_go(30);
        assert!(regions.view(place, 1).is_none());
    }

    #[test]
    fn a_region_that_is_offered_again_in_time_stays() {
        let mut regions = PeerRegions::default();
        take(&mut regions, register(1, 5), 0).expect("register");
        take(&mut regions, Packet::Deregister { seq: 2, key: RegionKey(5), after: 30 }, 0).expect("deregister");
        take(&mut regions, register(3, 5), 0).expect("register again");
        regions.let_go(30);
        assert!(regions.view(Remote { region: RegionKey(5), offset: 0 }, 100).is_some());
    }

    #[test]
    fn what_a_sound_peer_never_says_is_a_violation() {
        let deregister = |seq, key| Packet::Deregister { seq, key: RegionKey(key), after: u64::MAX };
        let setup = Packet::Setup { ring_words: 1 };
        for (first, second) in [
            (register(1, 5), register(1, 6)),
            (register(1, 5), register(2, 5)),
            (register(1, 5), deregister(2, 6)),
            (register(1, 5), setup),
            (Packet::Nothing { seq: 1 }, Packet::Nothing { seq: 0 }),
            (register(1, 5), Packet::Register { seq: 2, key: RegionKey(6), len: 101 }),
        ] {
            let mut regions = PeerRegions::default();
            take(&mut regions, first, 0).expect("first");
            let fault = take(&mut regions, second, 0).expect_err("violation");
            assert_eq!(fault.kind, FaultKind::ProtocolViolation, "{second:?}");
        }
        let mut regions = PeerRegions::default();
        take(&mut regions, register(1, 5), 0).expect("register");
        take(&mut regions, deregister(2, 5), 0).expect("deregister");
        assert!(take(&mut regions, deregister(3, 5), 0).is_err());
    }

    #[test]
    fn unsent_pairs_leave_only_a_number_behind() {
        let mut ours = Announcements::default();
        let memory = mapping();
        ours.register(RegionKey(1), &memory, 100, 0);
        for key in 2..1000 {
            ours.register(RegionKey(key), &memory, 100, 0);
            ours.deregister(RegionKey(key), 0);
        }
        assert_eq!(ours.queue.len(), 2);
        // A record that may use the region was published: the peer must hear of it.
        ours.register(RegionKey(1000), &memory, 100, 8);
        ours.deregister(RegionKey(1000), 16);
        assert_eq!(ours.queue.len(), 4);

        let (near, far) = UnixStream::pair().expect("pair");
        ours.flush(near.as_fd()).expect("flush");
        let (mut receiver, mut theirs) = (Receiver::default(), PeerRegions::default());
        while let Ok(Received::Packet(packet, file)) = receiver.receive(far.as_fd()) {
            theirs.take(packet, file, 0).expect("sound");
        }
        assert_eq!(theirs.heard(), ours.count());
        assert_eq!(theirs.mapped.keys().copied().collect::<Vec<_>>(), [RegionKey(1), RegionKey(1000)]);
    }
}
