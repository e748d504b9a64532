//! What a member keeps for a newcomer: its share of the state at one step, and the results of later steps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gradwire_codec::crc32;
use gradwire_proto::manifest::Declaration;
use gradwire_proto::saved::{SavedPart, check_parts};
use gradwire_proto::transfer::{No, Outline, Reason, Results, Snapshot, keeps, pieces};
use gradwire_proto::{DType, Epoch, Fault, FaultKind, Rank, Step, TensorId};

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
    kept: Option<Kept>,
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

/// A share of the state.
#[derive(Debug)]
struct Kept {
    snapshot: Snapshot,
    /// In the order of `snapshot.sums`.
    pieces: Vec<Vec<u8>>,
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

    /// The trainer offers its state, which is that after `commits` final steps: copied if a newcomer waits for just this
    /// one. Waits for others where too few ranks are left.
    pub(crate) fn offer(&self, commits: u64, state: &dyn State, patience: Duration) -> Result<(), Fault> {
        self.offered.store(commits + 1, Ordering::Release);
        if !self.wanted.load(Ordering::Acquire) {
            return Ok(());
        }
        let end = Instant::now() + patience;
        let mut inner = self.lock();
        loop {
            if inner.wish.is_some_and(|wish| wish.commits <= commits) && inner.kept.is_none() {
                inner.take_snapshot(commits, state)?;
                self.settle(&inner);
                self.changed.notify_all();
            }
            let Some(fault) = inner.too_few.clone().filter(|_| !inner.closed) else { break };
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
        Ok(())
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

    /// The snapshot, waiting for it for so long. Nothing if it is not there yet.
    pub(super) fn snapshot(&self, asker: Asker, patience: Duration) -> Result<Option<Snapshot>, No> {
        let mut inner = self.lock();
        let end = Instant::now() + patience;
        loop {
            if inner.asker != Some(asker) {
                return Err(inner.no(Reason::TooLate, "the state of that step has passed"));
            }
            if let Some(kept) = &inner.kept {
                return Ok(Some(kept.snapshot.clone()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A piece of the snapshot. It is given away once: what is sent needs not be kept.
    pub(super) fn piece(&self, asker: Asker, piece: u32) -> Result<Vec<u8>, No> {
        let mut inner = self.lock();
        let mine = inner.asker == Some(asker);
        let found = inner.kept.as_mut().filter(|_| mine).and_then(|kept| {
            let at = kept.snapshot.sums.binary_search_by_key(&piece, |(piece, _)| *piece).ok()?;
            kept.pieces.get_mut(at).map(std::mem::take)
        });
        found.filter(|bytes| !bytes.is_empty()).ok_or_else(|| inner.no(Reason::TooLate, "this piece is not kept here"))
    }

    /// The results of the step after `commits` final ones; earlier ones are forgotten.
    pub(super) fn results(&self, asker: Asker, commits: u64) -> Result<(Results, Vec<Made>), No> {
        let mut inner = self.lock();
        if inner.asker != Some(asker) {
            return Err(inner.no(Reason::TooLate, "nothing is kept for this newcomer"));
        }
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
        (self.asker, self.wish, self.kept) = (None, None, None);
        self.journal.clear();
        self.journal_bytes = 0;
    }

    fn no(&self, reason: Reason, detail: &str) -> No {
        No { reason, commits: self.commits, detail: detail.to_owned() }
    }

    fn take_snapshot(&mut self, commits: u64, state: &dyn State) -> Result<(), Fault> {
        let Some(Wish { commits: wanted, seat, holders }) = self.wish else { return Ok(()) };
        if wanted < commits {
            // It was asked for too late: who asked has to name a later step.
            self.forget();
            return Ok(());
        }
        let parts = state.parts();
        let described = parts_of(&parts)?;
        let lengths: Vec<u64> = described.iter().map(|part| part.bytes).collect();
        let layout =
            pieces(&lengths).ok_or_else(|| Fault::new(FaultKind::InvalidArgument, "the state is too large"))?;
        let mut kept = Kept { snapshot: Snapshot { parts: described, sums: Vec::new() }, pieces: Vec::new() };
        for (piece, (part, range)) in (0..).zip(layout) {
            if keeps(piece, seat, holders) {
                let bytes = parts[part as usize].bytes[range.start as usize..range.end as usize].to_vec();
                kept.snapshot.sums.push((piece, crc32(&bytes)));
                kept.pieces.push(bytes);
            }
        }
        self.kept = Some(kept);
        Ok(())
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
