//! A second save between two commits: what was saved is saved.
//!
//! Every rank decides for itself, by what it remembers of the first one, whose outcome was the same on all. So all decide
//! alike, without an exchange: where lost ranks do not fail the job there is none left before the next commit.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use gradwire_proto::session::Recovery;
use gradwire_proto::{Fault, FaultKind, Step};

use super::disk::Disk;
use super::read::SavedState;
use super::save::Saved;
use crate::{Group, State};

/// The last save that was begun.
#[derive(Debug)]
struct Attempt {
    step: Step,
    directory: PathBuf,
    /// Nothing while it is under way.
    outcome: Option<Result<Saved, Fault>>,
}

/// What the group remembers of its last save.
#[derive(Debug, Default)]
pub(super) struct LastSave(Mutex<Option<Attempt>>);

impl LastSave {
    fn replace(&self, attempt: Attempt) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(attempt);
    }

    /// Begins one: nothing if none was begun after this step. Otherwise the first one stays, and this is where it was to
    /// and what came of it.
    fn begin(&self, step: Step, directory: &Path) -> Option<(PathBuf, Option<Result<Saved, Fault>>)> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(last) if last.step == step => Some((last.directory.clone(), last.outcome.clone())),
            _ => {
                *last = Some(Attempt { step, directory: directory.to_owned(), outcome: None });
                None
            }
        }
    }
}

impl Group {
    pub(super) fn save_on(&self, disk: Disk<'_>, directory: &Path, state: &dyn State) -> Result<Saved, Fault> {
        let step = Step(self.commits.load(Ordering::Relaxed));
        if let Some((before, outcome)) = self.durable.last.begin(step, directory) {
            let may_repeat = self.identity.recovery == Recovery::Fail;
            match outcome {
                Some(Ok(saved)) if before == directory => {
                    if is_as_saved(&saved, state)? {
                        return Ok(saved);
                    }
                    if !may_repeat {
                        let what = format!("the state was changed after it was saved as {}", saved.path.display());
                        return Err(not_again(&what));
                    }
                }
                _ if may_repeat => {}
                Some(Err(fault)) => {
                    let detail = format!("it is not tried again before the next commit: {}", fault.detail);
                    return Err(Fault { detail, ..fault });
                }
                Some(Ok(_)) => {
                    return Err(not_again(&format!("the state after {step} was saved in {}", before.display())));
                }
                None => return Err(not_again(&format!("the state after {step} is being saved, or could not be"))),
            }
        }
        let outcome = self.save_anew(disk, directory, state, step);
        if outcome.as_ref().err().is_none_or(|fault| fault.kind == FaultKind::NotSaved) {
            let (directory, outcome) = (directory.to_owned(), Some(outcome.clone()));
            self.durable.last.replace(Attempt { step, directory, outcome });
        }
        outcome
    }
}

fn not_again(what: &str) -> Fault {
    Fault::new(FaultKind::InvalidArgument, format!("{what}: commit a step before the next save"))
}

/// Whether the save has this state: nobody should take it for saved where it is not.
fn is_as_saved(saved: &Saved, state: &dyn State) -> Result<bool, Fault> {
    SavedState::open(&saved.path).and_then(|found| found.is_of(&state.parts())).map_err(|fault| {
        let detail = format!("the state after {} was saved, but is not there any more: {}", saved.step, fault.detail);
        Fault::new(FaultKind::NotSaved, detail)
    })
}
