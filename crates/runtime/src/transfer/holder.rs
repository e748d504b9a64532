//! What a member keeps for newcomers: for each its share of the state at one step, and for all of them the results of
//! later steps.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gradwire_proto::manifest::Declaration;
use gradwire_proto::transfer::{Journal, No, Outline, Reason, Results, UnitResult, keeps, stands_in};
use gradwire_proto::{Epoch, Fault, Rank, Step, UnitIndex};

use super::parts::parts_of;
use super::share::{Copying, Share};
use crate::state::State;

#[cfg(test)]
mod several_tests;

/// Most newcomers for which something is kept: there is a share of the state for each step that one of them asked for.
const ASKERS_MAX: usize = 8;
/// Where there are so many, one that has asked nothing for so long makes room for another one.
const STALLED_AFTER: Duration = Duration::from_secs(3);
/// How often who leaves looks whether newcomers still ask.
const LOOKS_UP_EVERY: Duration = Duration::from_millis(100);

const LEAVES: &str = "this rank leaves";

/// Names a stream over which a newcomer asks.
pub(super) type Asker = u64;

/// A member's side. Costs next to nothing while nobody asks.
#[derive(Debug)]
pub(crate) struct Holder {
    first_step: Step,
    /// A newcomer waits for the state.
    wanted: AtomicBool,
    /// Results are kept.
    journals: AtomicBool,
    /// One more than the commits at the last offer: from there to its first operation a step has not begun, and what the
    /// trainer does between steps, such as saving, is over.
    offered: AtomicU64,
    /// A view waits to be entered at the beginning of a step.
    view_waits: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    commits: u64,
    declared: Vec<Vec<Declaration>>,
    /// The trainer waits in [`Holder::rest`].
    resting: bool,
    /// Too few ranks are left.
    too_few: Option<Fault>,
    /// Whom it all is kept for.
    askers: BTreeMap<Asker, Served>,
    journal: Journal,
    /// This rank leaves: only what it has copied is given away.
    leaving: bool,
    closed: bool,
}

/// A newcomer for which something is kept.
#[derive(Debug)]
struct Served {
    /// The state that it asked for.
    wish: Wish,
    /// It has it.
    through: bool,
    /// The share of it that is kept, or why there is none.
    kept: Option<Result<Arc<Share>, Refusal>>,
    /// It may ask for the results of the step after so many final ones, and of all later ones.
    next: u64,
    /// When it asked last, or was told that it has to wait.
    heard: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wish {
    commits: u64,
    seat: u32,
    holders: u32,
}

#[derive(Clone, Debug)]
struct Refusal {
    reason: Reason,
    why: String,
}

impl Holder {
    pub(crate) fn new(first_step: Step) -> Self {
        let (wanted, journals) = (AtomicBool::new(false), AtomicBool::new(false));
        let offered = AtomicU64::new(0);
        let view_waits = AtomicBool::new(false);
        Self { first_step, wanted, journals, offered, view_waits, inner: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tensors were declared.
    pub(crate) fn declared(&self, rounds: &[Vec<Declaration>]) {
        self.lock().declared = rounds.to_vec();
    }

    /// Where a rank that joined later begins.
    pub(crate) fn begin(&self, commits: u64) {
        self.lock().commits = commits;
    }

    /// Whether the trainer has offered its state after so many steps.
    pub(crate) fn has_offered(&self, commits: u64) -> bool {
        self.offered.load(Ordering::Acquire) == commits + 1
    }

    pub(crate) fn set_view_waits(&self, waits: bool) {
        self.view_waits.store(waits, Ordering::Release);
    }

    pub(crate) fn view_waits(&self) -> bool {
        self.view_waits.load(Ordering::Acquire)
    }

    /// Whether results are to be handed to [`Holder::keep`].
    pub(crate) fn journals(&self) -> bool {
        self.journals.load(Ordering::Relaxed)
    }

    /// Keeps a unit of the results of the step after `commits` final ones, if a newcomer is to have it from this member.
    pub(crate) fn keep(
        &self,
        commits: u64,
        epoch: Epoch,
        unit: UnitIndex,
        result: impl FnOnce() -> Option<UnitResult>,
    ) {
        let mut inner = self.lock();
        let wants = |served: &Served| keeps(unit.0, served.wish.seat, served.wish.holders);
        if inner.askers.values().any(wants)
            && let Some(result) = result()
        {
            inner.journal.keep(commits, epoch, unit, result);
        }
    }

    /// A step is final: so many are now, and these were its contributors.
    pub(crate) fn commit(&self, commits: u64, epoch: Epoch, members: &[Rank]) {
        let mut inner = self.lock();
        inner.commits = commits;
        if inner.askers.is_empty() {
            return;
        }
        inner.journal.commit(commits - 1, epoch, members);
        drop(inner);
        self.changed.notify_all();
    }

    /// Too few ranks are left to go on; or there are enough again. Returns whether the trainer waits in its offer for that.
    pub(crate) fn set_too_few(&self, fault: Option<Fault>) -> bool {
        let mut inner = self.lock();
        inner.too_few = fault;
        self.settle(&inner);
        self.changed.notify_all();
        inner.resting
    }

    /// The trainer offers its state, which is that after `commits` final steps: where newcomers wait for just this one,
    /// there is something to be copied before the state changes. Waits for others where too few ranks are left, unless
    /// the rank is asked to end.
    pub(crate) fn offer<'a>(
        &self,
        commits: u64,
        state: &'a dyn State,
        patience: Duration,
        ends: &dyn Fn() -> bool,
    ) -> Result<Option<Copying<'a>>, Fault> {
        self.offered.store(commits + 1, Ordering::Release);
        if !self.wanted.load(Ordering::Acquire) {
            return Ok(None);
        }
        let end = Instant::now() + patience;
        let mut inner = self.lock();
        let mut copying = None;
        loop {
            if inner.waiting().any(|(_, wish)| wish.commits <= commits) {
                copying = inner.begin_shares(commits, state)?;
                self.settle(&inner);
                self.changed.notify_all();
            }
            let Some(fault) = inner.too_few.clone().filter(|_| !inner.closed) else { break };
            if let Some(copying) = copying.take() {
                // There is nothing else to do meanwhile.
                drop(inner);
                copying.run();
                inner = self.lock();
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            let asked = ends();
            if left.is_zero() || asked {
                inner.resting = false;
                let why = if asked {
                    "and this rank was asked to end while it waited for others to join".to_owned()
                } else {
                    format!(
                        "but none joined within {} s (GRADWIRE_RANKS_WAIT_MS, or else GRADWIRE_DEADLINE_MS)",
                        patience.as_secs_f32()
                    )
                };
                let detail = format!("{}, {why}: the job has to be started again from what was saved", fault.detail);
                return Err(Fault { detail, ..fault });
            }
            if !inner.resting {
                tracing::warn!("{}: waiting for others to join", fault.detail);
            }
            inner.resting = true;
            // It does not come to a later step before newcomers are there: who asked for one has to ask for this one.
            let early: Vec<Asker> =
                inner.waiting().filter(|(_, wish)| wish.commits > commits).map(|(asker, _)| asker).collect();
            if !early.is_empty() {
                early.into_iter().for_each(|asker| inner.forget(asker));
                self.changed.notify_all();
            }
            inner =
                self.changed.wait_timeout(inner, left.min(LOOKS_UP_EVERY)).unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.resting = false;
        self.settle(&inner);
        Ok(copying)
    }

    /// Looks at everything again at the next offer, where there may be something to do.
    fn settle(&self, inner: &Inner) {
        let waits = inner.waiting().next().is_some();
        self.wanted.store(waits || inner.too_few.is_some(), Ordering::Release);
        self.journals.store(!inner.askers.is_empty(), Ordering::Relaxed);
    }

    pub(super) fn outline(&self) -> Outline {
        let inner = self.lock();
        let Inner { commits, resting, declared, .. } = &*inner;
        Outline { first_step: self.first_step.0, commits: *commits, resting: *resting, declared: declared.clone() }
    }

    /// Registers what a newcomer asks for. It is there when [`Holder::share`] says so.
    pub(super) fn wish(&self, asker: Asker, commits: u64, seat: u32, holders: u32) -> Result<(), No> {
        let mut inner = self.lock();
        if inner.leaving {
            return Err(inner.no(Reason::Busy, LEAVES));
        }
        if !inner.askers.contains_key(&asker) && inner.askers.len() >= ASKERS_MAX {
            let stalled = inner.askers.iter().min_by_key(|(_, served)| served.heard);
            let stalled = stalled.filter(|(_, served)| served.heard.elapsed() > STALLED_AFTER).map(|(asker, _)| *asker);
            let Some(stalled) = stalled else {
                return Err(inner.no(Reason::Busy, "many ranks are joining: ask again in a moment"));
            };
            tracing::info!("a newcomer that asks nothing makes room for another one");
            inner.forget(stalled);
        }
        inner.forget(asker);
        let wish = Wish { commits, seat, holders };
        let served = Served { wish, through: false, kept: None, next: commits, heard: Instant::now() };
        inner.askers.insert(asker, served);
        self.settle(&inner);
        self.changed.notify_all();
        Ok(())
    }

    /// The share that is kept, waiting until the step has come, for so long. Nothing if it has not.
    pub(super) fn share(&self, asker: Asker, patience: Duration) -> Result<Option<Arc<Share>>, No> {
        let mut inner = self.lock();
        let end = Instant::now() + patience;
        loop {
            let Some(served) = inner.askers.get_mut(&asker) else {
                return Err(inner.no(Reason::TooLate, "the state of that step has passed"));
            };
            served.heard = Instant::now();
            match served.kept.clone() {
                Some(Ok(share)) => return Ok(Some(share)),
                Some(Err(Refusal { reason, why })) => {
                    // It asks anew, or not at all.
                    inner.forget(asker);
                    self.settle(&inner);
                    return Err(inner.no(reason, &why));
                }
                None => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A newcomer has asked something, or was told to wait.
    pub(super) fn hear(&self, asker: Asker) {
        if let Some(served) = self.lock().askers.get_mut(&asker) {
            served.heard = Instant::now();
        }
    }

    /// What a newcomer hears that asks for what is not there.
    pub(super) fn no(&self, reason: Reason, detail: &str) -> No {
        self.lock().no(reason, detail)
    }

    /// The results of the step after `commits` final ones, as far as this seat is their home; earlier ones, and the state,
    /// are not kept for it any more.
    pub(super) fn results(&self, asker: Asker, commits: u64, seat: u32) -> Result<(Results, Vec<UnitResult>), No> {
        let mut inner = self.lock();
        inner.forget_state(asker);
        self.changed.notify_all();
        let Some(served) = inner.askers.get_mut(&asker) else {
            return Err(inner.no(Reason::TooLate, "nothing is kept for this newcomer"));
        };
        (served.next, served.heard) = (commits, Instant::now());
        let Wish { seat: own, holders, .. } = served.wish;
        inner.forget_results();
        if !stands_in(own, seat, holders) {
            return Err(inner.no(Reason::TooLate, "the results of that seat are not kept here"));
        }
        if inner.leaving {
            return Err(inner.no(Reason::TooLate, LEAVES));
        }
        if commits >= inner.commits {
            return Err(inner.no(Reason::NotYet, "that step is not final"));
        }
        let found = inner.journal.results(commits, inner.commits, (seat, holders));
        found.ok_or_else(|| inner.no(Reason::TooLate, "the results of that step are not kept any more"))
    }

    /// The newcomer is gone, or needs nothing more.
    pub(super) fn release(&self, asker: Asker) {
        let mut inner = self.lock();
        inner.forget(asker);
        self.settle(&inner);
        self.changed.notify_all();
    }

    /// This rank leaves. Who waits for its state, or follows, has to turn to others; who was promised a share gets it.
    pub(crate) fn leave(&self) {
        let mut inner = self.lock();
        inner.leaving = true;
        let waiting: Vec<Asker> = inner.waiting().map(|(asker, _)| asker).collect();
        waiting.into_iter().for_each(|asker| inner.forget(asker));
        self.settle(&inner);
        self.changed.notify_all();
    }

    /// Waits until newcomers have the shares that they were promised, for so long, and for none that asks nothing meanwhile.
    pub(crate) fn linger(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let mut inner = self.lock();
        loop {
            let takes = |served: &Served| matches!(served.kept, Some(Ok(_))) && served.heard.elapsed() < STALLED_AFTER;
            let left = end.saturating_duration_since(Instant::now());
            if inner.closed || left.is_zero() || !inner.askers.values().any(takes) {
                return;
            }
            let left = left.min(LOOKS_UP_EVERY);
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The group is closed: nobody waits any more.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        let all: Vec<Asker> = inner.askers.keys().copied().collect();
        all.into_iter().for_each(|asker| inner.forget(asker));
        self.settle(&inner);
        self.changed.notify_all();
    }
}

impl Inner {
    /// Newcomers that wait for a state, and for which.
    fn waiting(&self) -> impl Iterator<Item = (Asker, Wish)> {
        let waits = |(_, served): &(&Asker, &Served)| served.kept.is_none() && !served.through;
        self.askers.iter().filter(waits).map(|(asker, served)| (*asker, served.wish))
    }

    fn forget(&mut self, asker: Asker) {
        self.forget_state(asker);
        self.askers.remove(&asker);
        self.forget_results();
    }

    fn forget_state(&mut self, asker: Asker) {
        let Some(served) = self.askers.get_mut(&asker) else { return };
        served.through = true;
        let Some(Ok(share)) = served.kept.take() else { return };
        let is_it = |kept: &Result<Arc<Share>, Refusal>| kept.as_ref().is_ok_and(|other| Arc::ptr_eq(other, &share));
        if !self.askers.values().filter_map(|served| served.kept.as_ref()).any(is_it) {
            share.give_up();
        }
    }

    /// Results for which nobody can ask any more are kept no longer.
    fn forget_results(&mut self) {
        let first = self.askers.values().map(|served| served.next).min().unwrap_or(u64::MAX);
        self.journal.forget_before(first);
    }

    fn no(&self, reason: Reason, detail: &str) -> No {
        No { reason, commits: self.commits, detail: detail.to_owned() }
    }

    /// Room for the shares that were asked for, and what is to be copied to them. Who wants the same gets the same.
    fn begin_shares<'a>(&mut self, commits: u64, state: &'a dyn State) -> Result<Option<Copying<'a>>, Fault> {
        let parts = state.parts();
        let described = parts_of(&parts)?;
        let mut shares = Vec::new();
        for (asker, wish) in self.waiting().filter(|(_, wish)| wish.commits <= commits).collect::<Vec<_>>() {
            if wish.commits < commits {
                // It was asked for too late: who asked has to name a later step.
                self.forget(asker);
                continue;
            }
            let same = self
                .askers
                .values()
                .filter(|served| served.wish == wish)
                .find_map(|served| served.kept.as_ref().and_then(|kept| kept.as_ref().ok()).map(Arc::clone));
            let kept = match same {
                Some(share) => Ok(share),
                None => Share::new(described.clone(), wish.seat, wish.holders).map(Arc::new).map_err(|why| {
                    tracing::warn!(why, "the state cannot be kept for a newcomer");
                    // With others through there may be room.
                    let others = self.askers.values().any(|served| matches!(served.kept, Some(Ok(_))));
                    Refusal { reason: if others { Reason::Busy } else { Reason::Never }, why }
                }),
            };
            if let Ok(share) = &kept
                && share.begin()
            {
                shares.push(Arc::clone(share));
            }
            if let Some(served) = self.askers.get_mut(&asker) {
                served.kept = Some(kept);
            }
        }
        Ok((!shares.is_empty()).then_some(Copying { shares, parts }))
    }
}
