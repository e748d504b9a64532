//! gradwire's protocol as pure state machines.
//!
//! This crate owns what ranks say to each other and when: identifiers, frames, the link handshake, the layout of
//! tensors in buckets and shards, and [`session::Session`], which decides what to send, what to accept, what to
//! ask for again and when to give up. It never touches a socket, a clock, a source of randomness or a tensor's
//! bytes: callers hand those in, so that a run replays from its inputs alone.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod bits;
pub mod dtype;
pub mod fault;
pub mod frame;
pub mod hello;
pub mod ids;
pub mod limits;
pub mod manifest;
pub mod member;
pub mod membership;
pub mod plan;
pub mod rounds;
pub mod saved;
pub mod secret;
pub mod session;
pub mod transfer;
pub mod wire;

pub use dtype::{Collective, DType, ReduceOp, WireFormat};
pub use fault::{Fault, FaultKind, Scope};
pub use ids::{Attempt, BucketId, Epoch, Rank, RegionKey, Round, Step, TensorId, UnitIndex};
pub use secret::Secret;
