//! What a member keeps for a newcomer: its share of the state at one step, and the results of later steps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gradwire_proto::manifest::Declaration;
use gradwire_proto::saved::{SavedPart, check_parts};
use gradwire_proto::transfer::{No, Outline, Reason, Results};
use gradwire_proto::{DType, Epoch, Fault, Rank, Step, TensorId};

use super::share::{Copying, Share};
use crate::state::{State, StateTensor};

/// Most bytes of results that are kept: a newcomer that falls further behind begins anew.
const JOURNAL_BYTES_MAX: usize = 4 << 30;

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
    asker: Option<Asker>,
    wish: Option<Wish>,
    /// The share of the state that is kept, or why there is none.
    kept: Option<Result<Arc<Share>, String>>,
    journal: VecDeque<Entry>,
    journal_bytes: usize,
    closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Wish {
    commits: u64,
    seat: u32,
    holders: u32,
}

/// The results of a step, as far as this rank reduced them.
#[derive(Debug)]
struct Entry {
    commits: u64,
    epoch: Epoch,
    members: Option<Vec<Rank>>,
    /// By tensor, and place in it.
    made: BTreeMap<(TensorId, u64), Made>,
}

impl Entry {
    const fn new(commits: u64, epoch: Epoch) -> Self {
        Self { commits, epoch, members: None, made: BTreeMap::new() }
    }

    fn bytes(&self) -> usize {
        self.made.values().map(|made| made.bytes.len()).sum()
    }
}

/// One unit of results, as it travels.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) tensor: TensorId,
    /// Its first element's place in the tensor.
    pub(crate) at: u64,
    pub(crate) elements: u32,
    pub(crate) wire: DType,
    pub(crate) bytes: Vec<u8>,
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

    /// Keeps a unit that this rank reduced in the step after `commits` final ones.
    pub(crate) fn keep(&self, commits: u64, epoch: Epoch, made: Made) {
        let mut inner = self.lock();
        if inner.asker.is_none() {
            return;
        }
        let Inner { journal, journal_bytes, .. } = &mut *inner;
        if let Some(last) = journal.back_mut().filter(|last| last.commits == commits && last.epoch != epoch) {
            // It is done again by others.
            *journal_bytes -= last.bytes();
            last.made.clear();
            last.epoch = epoch;
        }
        if journal.back().is_none_or(|last| last.commits != commits) {
            journal.push_back(Entry::new(commits, epoch));
        }
        let Some(last) = journal.back_mut() else { return };
        // An operation that was given up, or came twice, counts as it came last.
        *journal_bytes += made.bytes.len();
        if let Some(earlier) = last.made.insert((made.tensor, made.at), made) {
            *journal_bytes -= earlier.bytes.len();
        }
        while *journal_bytes > JOURNAL_BYTES_MAX
            && let Some(first) = journal.pop_front()
        {
            *journal_bytes -= first.bytes();
        }
    }

    /// A step is final: so many are now, and these were its contributors.
    pub(crate) fn commit(&self, commits: u64, epoch: Epoch, members: &[Rank]) {
        let mut inner = self.lock();
        inner.commits = commits;
        if inner.asker.is_none() {
            return;
        }
        let step = commits - 1;
        if inner.journal.back().is_none_or(|last| last.commits != step) {
            inner.journal.push_back(Entry::new(step, epoch));
        }
        if let Some(last) = inner.journal.back_mut() {
            last.members = Some(members.to_vec());
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Too few ranks are left to go on; or there are enough again.
    pub(crate) fn set_too_few(&self, fault: Option<Fault>) {
        let mut inner = self.lock();
        inner.too_few = fault;
        self.settle(&inner);
        self.changed.notify_all();
    }

    /// The trainer offers its state, which is that after `commits` final steps: where a newcomer waits for just this one,
    /// there is something to be copied before the state changes. Waits for others where too few ranks are left.
    pub(crate) fn offer<'a>(
        &self,
        commits: u64,
        state: &'a dyn State,
        patience: Duration,
    ) -> Result<Option<Copying<'a>>, Fault> {
        self.offered.store(commits + 1, Ordering::Release);
        if !self.wanted.load(Ordering::Acquire) {
            return Ok(None);
        }
        let end = Instant::now() + patience;
        let mut inner = self.lock();
        let mut copying = None;
        loop {
            if inner.wish.is_some_and(|wish| wish.commits <= commits) && inner.kept.is_none() {
                copying = inner.begin_share(commits, state)?;
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
            if left.is_zero() {
                inner.resting = false;
                return Err(fault);
            }
            inner.resting = true;
            if inner.wish.is_some_and(|wish| wish.commits > commits) {
                // It does not come to that step before the newcomer is there: who asked has to ask for this one.
                inner.forget();
                self.changed.notify_all();
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.resting = false;
        self.settle(&inner);
        Ok(copying)
    }

    /// Looks at everything again at the next offer, where there may be something to do.
    fn settle(&self, inner: &Inner) {
        let waits = inner.wish.is_some() && inner.kept.is_none();
        self.wanted.store(waits || inner.too_few.is_some(), Ordering::Release);
        self.journals.store(inner.asker.is_some(), Ordering::Relaxed);
    }

    pub(super) fn outline(&self) -> Outline {
        let inner = self.lock();
        let Inner { commits, resting, declared, .. } = &*inner;
        Outline { first_step: self.first_step.0, commits: *commits, resting: *resting, declared: declared.clone() }
    }

    /// Registers what a newcomer asks for. It is there when [`Holder::snapshot`] says so.
    pub(super) fn wish(&self, asker: Asker, commits: u64, seat: u32, holders: u32) -> Result<(), No> {
        let mut inner = self.lock();
        if inner.asker.is_some_and(|other| other != asker) {
            return Err(inner.no(Reason::Busy, "another rank is joining"));
        }
        inner.forget();
        inner.asker = Some(asker);
        inner.wish = Some(Wish { commits, seat, holders });
        self.settle(&inner);
        self.changed.notify_all();
        Ok(())
    }

    /// The share that is kept, waiting until the step has come, for so long. Nothing if it has not.
    pub(super) fn share(&self, asker: Asker, patience: Duration) -> Result<Option<Arc<Share>>, No> {
        let mut inner = self.lock();
        let end = Instant::now() + patience;
        loop {
            if inner.asker != Some(asker) {
                return Err(inner.no(Reason::TooLate, "the state of that step has passed"));
            }
            match &inner.kept {
                Some(Ok(share)) => return Ok(Some(Arc::clone(share))),
                Some(Err(why)) => return Err(inner.no(Reason::Never, why)),
                None => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What a newcomer hears that asks for what is not there.
    pub(super) fn no(&self, reason: Reason, detail: &str) -> No {
        self.lock().no(reason, detail)
    }

    /// The results of the step after `commits` final ones; earlier ones, and the state, are forgotten.
    pub(super) fn results(&self, asker: Asker, commits: u64) -> Result<(Results, Vec<Made>), No> {
        let mut inner = self.lock();
        if inner.asker != Some(asker) {
            return Err(inner.no(Reason::TooLate, "nothing is kept for this newcomer"));
        }
        inner.forget_state();
        while inner.journal.front().is_some_and(|first| first.commits < commits) {
            if let Some(first) = inner.journal.pop_front() {
                inner.journal_bytes -= first.bytes();
            }
        }
        if commits >= inner.commits {
            return Err(inner.no(Reason::NotYet, "that step is not final"));
        }
        let now = inner.commits;
        match inner.journal.front() {
            Some(Entry { commits: step, epoch, members: Some(members), made }) if *step == commits => {
                let updates = made.len() as u32;
                Ok((
                    Results { epoch: *epoch, members: members.clone(), commits: now, updates },
                    made.values().cloned().collect(),
                ))
            }
            _ => Err(inner.no(Reason::TooLate, "the results of that step are not kept any more")),
        }
    }

    /// The newcomer is gone, or needs nothing more.
    pub(super) fn release(&self, asker: Asker) {
        let mut inner = self.lock();
        if inner.asker == Some(asker) {
            inner.forget();
            self.settle(&inner);
        }
    }

    /// The group is closed: nobody waits any more.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        inner.forget();
        self.settle(&inner);
        self.changed.notify_all();
    }
}

impl Inner {
    fn forget(&mut self) {
        self.asker = None;
        self.forget_state();
        self.journal.clear();
        self.journal_bytes = 0;
    }

    fn forget_state(&mut self) {
        self.wish = None;
        if let Some(Ok(share)) = self.kept.take() {
            share.give_up();
        }
    }

    fn no(&self, reason: Reason, detail: &str) -> No {
        No { reason, commits: self.commits, detail: detail.to_owned() }
    }

    /// Room for the share that was asked for, and what is to be copied to it.
    fn begin_share<'a>(&mut self, commits: u64, state: &'a dyn State) -> Result<Option<Copying<'a>>, Fault> {
        let Some(Wish { commits: wanted, seat, holders }) = self.wish else { return Ok(None) };
        if wanted < commits {
            // It was asked for too late: who asked has to name a later step.
            self.forget();
            return Ok(None);
        }
        let parts = state.parts();
        let share = Share::new(parts_of(&parts)?, seat, holders).map(Arc::new);
        self.kept = Some(share.clone());
        match share {
            Ok(share) => Ok(Some(Copying { shares: vec![share], parts })),
            Err(why) => {
                tracing::warn!(why, "the state cannot be kept for a newcomer");
                Ok(None)
            }
        }
    }
}

/// Names and lengths of a state's parts.
///
/// # Errors
/// `InvalidArgument` for a part that is nameless, named twice, or too long.
pub(crate) fn parts_of(parts: &[StateTensor<'_>]) -> Result<Vec<SavedPart>, Fault> {
    check_parts(parts.iter().map(|part| (part.name, part.bytes.len() as u64)))?;
    Ok(parts.iter().map(|part| SavedPart { name: part.name.to_owned(), bytes: part.bytes.len() as u64 }).collect())
}
