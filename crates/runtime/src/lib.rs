//! gradwire exchanges gradients between the ranks of a data-parallel training job: checked end to end, versioned, and
//! the same bits on every rank.
//!
//! ```no_run
//! use gradwire::{Builder, DType, ReduceOp, TensorSpec};
//!
//! let group = Builder::from_env()?.connect()?;
//! let tensors = group.declare(&[TensorSpec::new("layer1.weight", &[784, 128], DType::F32).reduce(ReduceOp::Mean)])?;
//! let mut gradient = group.buffer(&tensors[0])?;
//! gradient.as_mut_slice::<f32>().fill(1.0);
//! let done = group.allreduce(&tensors[0], gradient)?.wait()?;
//! assert_eq!(done.output.as_slice::<f32>()[0], 1.0);
//! let commit = group.commit()?;
//! assert!(commit.replaced.is_empty());
//! group.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A rank that was lost can come back, and further ones join, while the others train: with [`Builder::join`] in place of
//! [`Builder::connect`], and [`Group::offer_state`] at the beginning of each step.
//!
//! What survives the end of all processes is saved with [`Group::save`]: see [`durable`].
//!
//! Start it on every rank with `gradwire launch`, `mpirun`, `srun` or `torchrun`.
#![forbid(unsafe_code)]

mod builder;
mod driver;
pub mod durable;
mod engine;
pub mod env;
pub mod federated;
mod group;
mod handle;
mod notice;
mod retained;
mod state;
mod system;
#[cfg(test)]
mod tests;
mod transfer;
mod types;

pub use builder::{Builder, Joined};
pub use gradwire_proto::session::{Next, Recovery};
pub use gradwire_proto::{Collective, DType, Epoch, Fault, FaultKind, Rank, ReduceOp, Scope, Secret, Step, WireFormat};
pub use gradwire_transport::{Buffer, Element};
pub use group::Group;
pub use handle::{Handle, Tensor};
pub use state::{State, StateTensor, StateTensorMut, StepResults, Trainer};
pub use types::{
    Commit, Completed, Integrity, OpError, Outcome, Replaced, Stats, TensorSpec, Transfer, TransportChoice, Version,
};
