//! Invariant 6: what was reported committed is on record whatever is started again; versions only grow; epochs only
//! grow, and are the same for all.

use std::collections::BTreeMap;
use std::rc::Rc;

use gradwire_proto::membership::RecordId;
use gradwire_proto::{Epoch, Step};

use super::{Checker, Verdict};
use crate::broker::{Body, Topic};
use crate::event::Nanos;
use crate::plan::Plan;
use crate::report::{CommitRecord, ProcessId, Report};
use crate::world::Ending;

#[derive(Debug)]
pub(super) struct Durable {
    /// The broker may lose what it gave receipts for: it was told to keep nothing.
    forgets: bool,
    reported: Vec<Rc<CommitRecord>>,
    epochs: BTreeMap<ProcessId, Epoch>,
    views: BTreeMap<Epoch, (RecordId, Members)>,
}

/// Rank and Join of each.
type Members = Rc<[(u32, RecordId)]>;

impl Durable {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { forgets: plan.loses_log(), reported: Vec::new(), epochs: BTreeMap::new(), views: BTreeMap::new() }
    }
}

impl Checker for Durable {
    fn invariant(&self) -> &'static str {
        "6 durable"
    }

    fn observe(&mut self, _now: Nanos, process: ProcessId, report: &Report) -> Verdict {
        match report {
            Report::Committed(record) => self.reported.push(record.clone()),
            Report::View { epoch, id, members } => {
                if self.epochs.insert(process, *epoch).is_some_and(|before| before >= *epoch) {
                    return Err(format!("p{} went back to {epoch}", process.0));
                }
                let (known, of) = self.views.entry(*epoch).or_insert_with(|| (*id, members.clone()));
                if (&*known, &*of) != (id, members) && !self.forgets {
                    return Err(format!("p{} has another {epoch} than others", process.0));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, ending: &Ending) -> Verdict {
        if self.forgets {
            return Ok(());
        }
        let records = ending.broker.records(Topic::Versions);
        let mut on_record: BTreeMap<RecordId, &CommitRecord> = BTreeMap::new();
        let mut last: BTreeMap<u32, (Epoch, Step)> = BTreeMap::new();
        for record in records {
            let Body::Commit(commit) = &record.body else { continue };
            // Written twice, because a receipt got lost.
            if on_record.insert(record.id, commit).is_some() {
                continue;
            }
            let version = (commit.version.epoch, commit.version.step);
            if last.insert(commit.owner, version).is_some_and(|before| before >= version) {
                return Err(format!(
                    "rank {} committed {} {} after a later version",
                    commit.owner, version.0, version.1
                ));
            }
        }
        for reported in &self.reported {
            if on_record.get(&reported.id) != Some(&&**reported) {
                return Err(format!(
                    "rank {} was told that {} {} is committed, and it is not on record",
                    reported.owner, reported.version.epoch, reported.version.step
                ));
            }
        }
        Ok(())
    }
}
