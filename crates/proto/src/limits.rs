//! Every bound of the protocol, with their relations asserted at compile time.

/// Most ranks in one job.
pub const WORLD_SIZE_MAX: u32 = 1024;
/// Longest tensor name, in bytes of UTF-8.
pub const TENSOR_NAME_BYTES_MAX: usize = 512;
/// Most dimensions of a tensor.
pub const TENSOR_DIMENSIONS_MAX: usize = 16;
/// Most tensors that one job may declare.
pub const TENSORS_MAX: u32 = 1 << 20;
/// Steps are below this.
pub const STEPS_MAX: u64 = 1 << 48;
/// Most elements in one tensor: offsets stay far from overflow at any element size.
pub const TENSOR_ELEMENTS_MAX: u64 = 1 << 48;
/// Shards begin at multiples of this many elements.
pub const SHARD_ELEMENTS_MULTIPLE: u64 = 4096;
/// Most elements in one shard. A shard is also one chunk: one frame, one checksum, one unit of resending.
pub const SHARD_ELEMENTS_MAX: u64 = 65_536;
/// Largest payload of one frame: a full shard of 8-byte elements.
pub const PAYLOAD_BYTES_MAX: u32 = (SHARD_ELEMENTS_MAX * 8) as u32;
/// Size of the fixed frame header.
pub const FRAME_HEADER_BYTES: usize = 64;
/// Largest message (header and body) that travels outside a region.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Largest body of a message.
pub const MESSAGE_BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX - FRAME_HEADER_BYTES;
/// Most bytes of declarations that one rank may send in one round.
pub const MANIFEST_BYTES_MAX: usize = 256 << 20;
/// Most bytes of a trainer's state that is saved: a number of pieces times a number of ranks stays far from overflow.
pub const SAVED_BYTES_MAX: u64 = 1 << 50;
/// Smallest and largest piece of a saved state. Each has one checksum, and is read into memory as a whole.
pub const SAVED_PIECE_BYTES_MIN: u32 = 4096;
/// See [`SAVED_PIECE_BYTES_MIN`].
pub const SAVED_PIECE_BYTES_MAX: u32 = 64 << 20;
/// Longest name of a job or of a model's version in a saved state.
pub const SAVED_NAME_BYTES_MAX: usize = 64;
/// Longest pause between two heartbeats, in milliseconds.
pub const HEARTBEAT_MS_MAX: u32 = 60_000;
/// A peer is given up only after so many of its heartbeats are missing: one that is late is no loss.
pub const SILENCE_HEARTBEATS_MIN: u64 = 3;
/// Longest detail text in a fault that is passed on to peers.
pub const FAULT_DETAIL_BYTES_MAX: usize = 1024;
/// Most shards that a model has in the federated mode.
pub const FEDERATED_SHARDS_MAX: u32 = 4096;
/// Largest shard in the federated mode, as it travels.
pub const FEDERATED_SHARD_BYTES_MAX: u64 = 64 << 20;
/// How many rounds later a contribution may still be carried into.
pub const CARRY_ROUNDS_MAX: u64 = 16;
/// Of how many complete rounds readers can still find the results.
pub const ROUNDS_KEPT: usize = 64;

const _: () = assert!(SHARD_ELEMENTS_MAX.is_multiple_of(SHARD_ELEMENTS_MULTIPLE));
const _: () = assert!(SHARD_ELEMENTS_MAX * 8 <= u32::MAX as u64);
const _: () = assert!(SAVED_BYTES_MAX / SAVED_PIECE_BYTES_MIN as u64 <= u64::MAX / WORLD_SIZE_MAX as u64);
const _: () = assert!(FAULT_DETAIL_BYTES_MAX + TENSOR_NAME_BYTES_MAX + 64 <= MESSAGE_BODY_BYTES_MAX);
const _: () = assert!(TENSOR_NAME_BYTES_MAX + TENSOR_DIMENSIONS_MAX * 8 + 64 <= MESSAGE_BODY_BYTES_MAX);
