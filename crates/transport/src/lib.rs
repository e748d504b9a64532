//! gradwire's transports: one trait, and a backend per kind of link.
//!
//! A [`Transport`] moves bytes between this rank and its peers: small ordered messages, one-sided writes into memory
//! that the peer registered, and (where a backend offers it) reading a peer's memory in place. It knows nothing of
//! tensors, steps or checksums. It is driven by one thread at a time, never blocks and
//! after its links are up it neither allocates nor locks.
#![deny(unsafe_code)]

pub mod establish;
#[cfg(feature = "faults")]
pub mod faulty;
pub mod links;
pub mod mesh;
pub mod region;
pub mod shm;
pub mod tcp;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use establish::Arrival;
use gradwire_proto::{Fault, Rank, RegionKey};

pub use region::{Buffer, Element, Pool, Slice, available_memory, expect_writes};

/// What a backend can do beyond messages and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// [`Transport::view`] works: a peer's registered memory can be read in place.
    pub peer_read: bool,
    /// [`Sink::admit`] is asked before the payload of a write lands, so that a receiver can refuse it.
    pub admission: bool,
}

/// The sizes a backend works with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest message in bytes.
    pub message_bytes_max: usize,
    /// Largest immediate of a write in bytes.
    pub immediate_bytes_max: usize,
    /// Largest payload of one write in bytes.
    pub write_bytes_max: usize,
}

/// A place in a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The region's key at the peer.
    pub region: RegionKey,
    /// Bytes from its start.
    pub offset: u64,
}

/// Why an operation was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The queue to this peer is full. Nothing was taken; offer it again after a [`Transport::poll`].
    #[error("the queue is full")]
    Full,
    /// There is no link to this peer (never attached, disconnected or failed). [`Sink::peer_down`] said or says why.
    #[error("no link to this peer")]
    NoLink,
    /// Larger than the backend's [`Limits`], or a slice of memory that was not registered with it.
    #[error("not possible on this transport: {0}")]
    Invalid(&'static str),
}

/// Receives what [`Transport::poll`] finds. Calls come in the order in which the peer sent, per peer.
pub trait Sink {
    /// Whether the payload of a write may land at `target`. Asked before it lands, where
    /// [`Capabilities::admission`] is set. When refused, the payload is discarded, the link goes on, and
    /// [`Sink::written`] is not called for it.
    fn admit(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) -> bool;

    /// A message arrived.
    fn message(&mut self, peer: Rank, message: &[u8]);

    /// A write landed: `bytes` bytes at `target` in this rank's memory, all of them visible.
    fn written(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize);

    /// The source memory of the write with this token is no longer read. Also called when its link fails.
    fn sent(&mut self, peer: Rank, token: u64);

    /// The link to `peer` ended. Called once per link, after everything that had arrived before it. Everything still
    /// queued for the peer was dropped, each write with its [`Sink::sent`].
    fn peer_down(&mut self, peer: Rank, fault: Fault);
}

/// Moves bytes between this rank and its peers.
///
/// Messages and writes to one peer form one ordered stream: a message or the notice of a write is delivered after
/// everything that was sent before it, and after the payloads of all earlier writes are visible.
///
/// Dropping a transport closes its links; memory that it still reads or writes stays alive until it is done.
pub trait Transport: Send {
    /// The name of the backend that reaches `peer`: `tcp`, `shm`.
    fn name(&self, peer: Rank) -> &'static str;

    /// What the link to `peer` can do.
    fn capabilities(&self, peer: Rank) -> Capabilities;

    /// The sizes this backend works with.
    fn limits(&self) -> Limits;

    /// Makes `buffer` a target for peers' writes and, with [`Capabilities::peer_read`], readable in place by them,
    /// under its [`Buffer::key`]. Idempotent. The memory stays alive until [`Transport::deregister`].
    ///
    /// # Errors
    /// A [`Fault`] of kind `System` or `MemoryUnavailable`.
    fn register(&mut self, buffer: &Buffer) -> Result<(), Fault>;

    /// Ends a registration: later writes to it are discarded as if refused, and peers' views of it end.
    fn deregister(&mut self, key: RegionKey);

    /// Queues a message.
    ///
    /// # Errors
    /// [`Refused`]; nothing was taken then.
    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<(), Refused>;

    /// Queues a one-sided write of `source` to `target`, with an immediate that is delivered after the payload.
    /// [`Sink::sent`] gives `token` back when the source is no longer read. An empty source is allowed: only the
    /// immediate is delivered then.
    ///
    /// # Errors
    /// [`Refused`]; nothing was taken then.
    fn write(&mut self, peer: Rank, immediate: &[u8], source: Slice, target: Remote, token: u64)
    -> Result<(), Refused>;

    /// `bytes` bytes of a peer's registered memory, read in place. The peer must have said, by a message, that they
    /// are ready, and must not change them until it is told that they were read.
    ///
    /// # Errors
    /// [`Refused::NoLink`], or [`Refused::Invalid`] when the backend cannot, or the place is not within a region
    /// that the peer registered.
    fn view(&self, peer: Rank, place: Remote, bytes: usize) -> Result<&[u8], Refused>;

    /// Moves what can be moved without waiting, and reports it to `sink`. Returns how many things happened (bytes
    /// moved count, so a half-received payload is something); 0 means that nothing could be done.
    fn poll(&mut self, sink: &mut dyn Sink) -> usize;

    /// Prepares to sleep: from now on [`Transport::event_fd`] becomes readable when there is something to do.
    /// Returns false if there is something to do already: poll instead of sleeping. [`Transport::poll`] disarms.
    fn arm(&mut self) -> bool;

    /// A descriptor to wait on (level-triggered, readable), together with those of other sources.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Takes up the link to a newcomer, in place of the one to its rank if there is one. Waits, until `deadline`, for the
    /// newcomer to do its part, which it does as soon as all of its links are open.
    ///
    /// # Errors
    /// A [`Fault`] that names the newcomer. There is no link to it then.
    fn welcome(&mut self, arrival: Arrival, deadline: Instant) -> Result<(), Fault>;

    /// Ends the link to `peer`, if there is one: queued work is dropped ([`Sink::sent`] comes with the next poll),
    /// and [`Sink::peer_down`] is not called. The peer sees the link end.
    fn disconnect(&mut self, peer: Rank);

    /// Whether everything queued for `peer` has left this process.
    fn is_flushed(&self, peer: Rank) -> bool;
}
