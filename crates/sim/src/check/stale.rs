//! Invariant 3: nothing of an older epoch or step is ever used, and nobody writes to what was given back.

use gradwire_proto::frame::FrameKind;

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::report::{ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct NothingStale;

impl Checker for NothingStale {
    fn invariant(&self) -> &'static str {
        "3 no stale write"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Applied { from, header, epoch, step, .. } => {
                // A peer that has everything may go on with the next step while this one still lacks something.
                let early = header.kind == FrameKind::Contribution && header.step == step.next();
                if header.epoch != *epoch || (header.step != *step && !early) {
                    return Err(format!(
                        "p{} used a {:?} of {} {} from p{} while in {epoch} {step}",
                        process.0, header.kind, header.epoch, header.step, from.0
                    ));
                }
                Ok(())
            }
            Report::Held { tensor, intact: false } => {
                Err(format!("somebody wrote to t{tensor} of p{} after it was given back", process.0))
            }
            _ => Ok(()),
        }
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
