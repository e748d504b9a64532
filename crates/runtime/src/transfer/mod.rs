//! Giving a job's state to processes that join it while it runs (docs/wire.md, section 12).
//!
//! A newcomer gets the state as it was when some step became final ([`Holder`] keeps it, because the trainer changes it
//! later), from several members at once, and then the results of all later steps, which it applies as the others
//! did. Two members keep each piece and each unit of results: where one is lost, the newcomer goes on with the other.
//! When it has caught up it says so in the control log, becomes a member of the next epoch, and applies what came
//! in between. Members copy their share of the state once, beside their step where the trainer leaves its state alone
//! until that is final.

mod door;
mod fetch;
mod follow;
mod holder;
mod newcomer;
mod parts;
mod place;
mod server;
mod share;
mod stream;

pub(crate) use door::{DoorBell, DoorKeeper};
pub(crate) use holder::Holder;
pub(crate) use newcomer::Newcomer;
pub(crate) use parts::{parts_mut_of, parts_of};
pub(crate) use place::Rival;
pub(crate) use share::Copying;
