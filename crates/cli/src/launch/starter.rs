//! Asking a running job for one more rank, from within this process.

use std::sync::mpsc::Sender;

use super::agents::Event;

/// The way to the launcher of a job with `ranks_min`, for whoever reads its output.
pub(crate) struct Starter(Sender<Event>);

impl Starter {
    pub(super) const fn new(events: Sender<Event>) -> Self {
        Self(events)
    }

    /// Starts one more rank on the first host: under the number and in the slot of one that was lost, if there is one,
    /// otherwise beside the others, up to the plan's `ranks_max`.
    pub(crate) fn start_one(&self) {
        // A launcher that has gone starts nothing more.
        let _ = self.0.send(Event::OneMore);
    }
}
