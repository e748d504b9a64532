//! How a group ends: by agreement with a step, in good order at its close, or in a panic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gradwire_control::AuditKind;
use gradwire_proto::session::{Recovery, Wish};
use gradwire_proto::{Fault, FaultKind};

use super::{Group, audit_rejected};
use crate::engine::Engine;
use crate::env::Guard;
use crate::notice::NoticeWatch;

/// How long a farewell may take: peers that need something get it, but a dead one does not hold anybody up.
const FAREWELL_MAX: Duration = Duration::from_secs(2);
/// How long a rank that was given notice waits for others that are given it too: longer than signals need to get to all
/// ranks of a job.
const NOTICE_SETTLES: Duration = Duration::from_secs(1);

impl Group {
    /// Asks that the job end: all ranks get [`Next::End`](crate::Next::End) from the commit of one and the same step, this
    /// rank's next or the one after it.
    ///
    /// # Errors
    /// `InvalidArgument` with [`Recovery::Fail`], where commits do not wait for other ranks, unless the group was made
    /// with [`Builder::stop_on_sigterm`](crate::Builder::stop_on_sigterm).
    pub fn request_stop(&self) -> Result<(), Fault> {
        self.request(&self.stop_requested)
    }

    /// Asks that this rank leave, and the others go on without it: it gets [`Next::Leave`](crate::Next::Leave) from its
    /// next commit. Its contributions to that step, and all before it, count. Where no other can go on, all end.
    ///
    /// # Errors
    /// As [`Group::request_stop`].
    pub fn request_leave(&self) -> Result<(), Fault> {
        self.request(&self.leave_requested)
    }

    fn request(&self, what: &AtomicBool) -> Result<(), Fault> {
        if !self.identity.agrees {
            let detail = "commits do not wait for other ranks here, so that ranks cannot agree on a last step: use \
                          Recovery::Redo or Abort, or Builder::stop_on_sigterm";
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        what.store(true, Ordering::Release);
        Ok(())
    }

    /// What this rank wants when its step ends.
    pub(super) fn wish(&self) -> Wish {
        let noticed = match self.notice.as_ref().and_then(NoticeWatch::given) {
            None => Wish::GoOn,
            Some(ago) if ago < NOTICE_SETTLES => Wish::LeaveSoon,
            Some(_) => Wish::Leave,
        };
        let leave = if self.leave_requested.load(Ordering::Acquire) { Wish::Leave } else { Wish::GoOn };
        let wish = noticed.max(leave);
        // Without a broker the others cannot agree on how to go on.
        let all = wish == Wish::Leave && self.guard.as_ref().is_some_and(Guard::serves_broker);
        if all || self.stop_requested.load(Ordering::Acquire) { Wish::End } else { wish }
    }

    /// Leaves the job in good order: the other ranks get what they still need from this one, for 2 seconds at most,
    /// and version records are published, while the broker takes one every 2 seconds at least, up to the deadline.
    /// Operations in flight are waited for first.
    ///
    /// # Errors
    /// Why the job failed, if it did; [`FaultKind::Unrecorded`] when commits could not be published, because the broker
    /// was away until the end.
    ///
    /// Where others go on, a process that joins them and is getting the state from this rank gets the rest first, while it
    /// goes on asking, up to the deadline.
    pub fn close(mut self) -> Result<(), Fault> {
        let fault = self.fault();
        let recorded = self.shut_down();
        fault.map_or(recorded, Err)
    }

    /// A panic unwinds this rank: it does not leave in good order. Where the others can go on without it they are told at
    /// once; where they cannot, its links close after its exit, so that a launcher sees the cause before the consequences,
    /// and they are told where the process goes on.
    fn abandon(&mut self) {
        const EXIT_FIRST: Duration = Duration::from_millis(500);
        const LAST_WORDS_MAX: Duration = Duration::from_millis(100);
        let rank = self.rank();
        let fault =
            Fault::new(FaultKind::RankDied, format!("{rank} panicked: look for the reason in its output")).at(rank);
        let (driver, thread, control) = (Arc::clone(&self.driver), self.thread.take(), self.control.take());
        std::mem::forget(self.guard.take());
        let told = if self.identity.recovery == Recovery::Fail {
            std::thread::Builder::new().spawn(move || {
                std::thread::sleep(EXIT_FIRST);
                driver.fail(fault);
            })
        } else {
            driver.resign(fault);
            // Should the panic have taken the engine with it, this ends all the same.
            let limit = Instant::now() + LAST_WORDS_MAX;
            driver.drive_to(Some(limit), |engine| engine.fault().is_some() && engine.is_through());
            std::thread::Builder::new().spawn(move || {
                thread.into_iter().for_each(|thread| driver.stop(thread));
                drop((driver, control));
            })
        };
        drop(told);
    }

    fn shut_down(&mut self) -> Result<(), Fault> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let mut recorded = Ok(());
        // Others may have an epoch without this rank before it is through: that is no fault of one that leaves.
        let in_order = self.fault().is_none();
        if let Some(door) = &self.door {
            door.holder.leave();
        }
        self.driver.drive_to(None, |engine| engine.is_idle() || engine.fault().is_some());
        self.driver.with_engine(Engine::leave);
        let limit = Instant::now().checked_add(FAREWELL_MAX);
        self.driver
            .drive_to(limit, |engine| (engine.said_farewell() || engine.fault().is_some()) && engine.is_flushed());
        if let Some(control) = self.control.take() {
            let (fault, resigned) = self.driver.with_engine(|engine| (engine.fault().cloned(), engine.has_resigned()));
            match fault.filter(|fault| fault.reporter.is_none() && fault.kind != FaultKind::Removed) {
                // What is reported ends the job for all.
                Some(fault) if resigned => control.audit(AuditKind::Failed, Some(self.rank()), fault.to_string()),
                Some(fault) => control.report(&fault),
                None => {}
            }
            audit_rejected(&control, self.driver.with_engine(Engine::take_rejected));
            recorded = control.leave(FAREWELL_MAX, self.identity.deadline);
        }
        if self.guard.as_ref().is_some_and(Guard::serves_broker) {
            // The others say to this process's broker that they leave.
            let limit = Instant::now().checked_add(FAREWELL_MAX);
            self.driver.drive_to(limit, Engine::is_alone);
        }
        if let Some(door) = self.door.take() {
            // Where others go on they would have to begin anew with those that join.
            if in_order && !self.driver.with_engine(|engine| engine.have_others_left()) {
                door.holder.linger(self.identity.deadline);
            }
        }
        self.driver.stop(thread);
        drop(self.guard.take());
        recorded
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abandon();
        } else {
            if let Err(fault) = self.shut_down() {
                tracing::error!(%fault, "a group was dropped, and not everything of it is on record");
            }
        }
    }
}
