//! Invariant 5: what is used has the checksum that its sender gave it.

use super::{Checker, Verdict};
use crate::event::Nanos;
use crate::report::{ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct Integrity;

impl Checker for Integrity {
    fn invariant(&self) -> &'static str {
        "5 integrity"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Applied { from, header, crc, .. } if header.payload_len > 0 && *crc != header.payload_crc => {
                Err(format!(
                    "p{} used a {:?} from p{} with checksum {crc:08x} instead of {:08x}",
                    process.0, header.kind, from.0, header.payload_crc
                ))
            }
            _ => Ok(()),
        }
    }

    fn finish(&mut self, _ending: &Ending) -> Verdict {
        Ok(())
    }
}
