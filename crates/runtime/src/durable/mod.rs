//! State on disk: what survives the end of every process of a job.
//!
//! [`Group::save`] writes a trainer's [`State`] between two steps: every rank its share, into a directory that all ranks
//! see. It becomes visible as a whole or not at all, wherever a crash comes. A later job, of as many ranks or of
//! another number, finds it before it connects, since operations count from the step that it goes on with:
//!
//! ```no_run
//! use std::path::Path;
//!
//! use gradwire::durable::SavedState;
//! use gradwire::{Builder, FaultKind, State, StateTensor, StateTensorMut};
//!
//! struct Model { weights: Vec<u8>, seed: [u8; 8] }
//!
//! impl State for Model {
//!     fn parts(&self) -> Vec<StateTensor<'_>> {
//!         vec![
//!             StateTensor { name: "weights", bytes: &self.weights },
//!             StateTensor { name: "seed", bytes: &self.seed },
//!         ]
//!     }
//!     fn parts_mut(&mut self) -> Vec<StateTensorMut<'_>> {
//!         vec![
//!             StateTensorMut { name: "weights", bytes: &mut self.weights },
//!             StateTensorMut { name: "seed", bytes: &mut self.seed },
//!         ]
//!     }
//! }
//!
//! let mut model = Model { weights: vec![0; 4096], seed: [7; 8] };
//! let saves = Path::new("/data/digits");
//! let mut builder = Builder::from_env()?;
//! let saved = SavedState::latest(saves)?; // None: nothing was saved yet
//! if let Some(saved) = &saved {
//!     builder = builder.first_step(saved.step());
//! }
//! let group = builder.connect()?;
//! let mut step = 0;
//! if let Some(saved) = &saved {
//!     step = group.restore(saved, &mut model)?.step.0;
//! }
//! while step < 1000 {
//!     // ... the step's operations ...
//!     let _ = group.commit()?;
//!     step += 1;
//!     if step % 100 == 0 {
//!         match group.save(saves, &model) {
//!             // No reason to end: the save before is whole, and the next one may succeed.
//!             Err(fault) if fault.kind == FaultKind::NotSaved => eprintln!("{fault}"),
//!             saved => drop(saved?),
//!         }
//!     }
//! }
//! # group.close()?;
//! # Ok::<(), gradwire::Fault>(())
//! ```
//!
//! | in the directory | what |
//! | --- | --- |
//! | `save-000012-step-600/manifest` | what was saved, and the checksums of all shards |
//! | `save-000012-step-600/rank-0` ... | the shards |
//! | `save-....unfinished`, `save-....removed` | what a crash left; gone after the next save |
//!
//! The number in front counts saves: the highest is the latest, whatever its step. Every byte of these files is
//! described in docs/wire.md, section 11. One job at a time saves in a directory: one that finds another's saves there, where
//! it did not go on from them, is told so, and neither deletes what the other made.
//!
//! Not owned here: which parts a state has, when to save, and state that differs between ranks.

mod again;
mod agree;
mod disk;
mod layout;
mod names;
mod owner;
mod read;
mod save;
#[cfg(test)]
mod tests;
mod write;

#[cfg(doc)]
use crate::{Group, State};
pub(crate) use agree::Durable;
pub(crate) use owner::SaveIdentity;
pub use read::{Restored, SavedState};
pub use save::Saved;
