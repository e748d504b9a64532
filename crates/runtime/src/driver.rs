//! Who drives the engine: whoever waits, and a background thread when nobody does.
//!
//! The engine is a baton. It lies in a slot, or one thread has it and drives. A thread that waits for a result takes
//! it if it lies there; if the background thread has it, that one hands it over; if another waiting thread has it,
//! that one drives for both and wakes the others when something ends. Neither the baton nor submissions use a lock.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use gradwire_control::{ControlEvent, ControlPlane, CopyRequest, ShardVersion};
use gradwire_proto::frame::FrameHeader;
use gradwire_proto::{Fault, Rank, Step, TensorId, UnitIndex};
use gradwire_transport::establish::Arrival;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::{Aborts, Engine, Submission};
use crate::system;
use crate::transfer::DoorBell;

/// Operations that can be handed over before the engine takes them up.
const SUBMISSIONS_MAX: usize = 4096;
/// Threads that can wait at the same time without polling.
const WAITERS_MAX: usize = 256;
/// The background thread looks after an idle engine this soon after a waiting thread let go of it.
const TAKEOVER: Duration = Duration::from_millis(1);
/// The background thread takes up an asynchronous operation this long after it was handed over.
const GRACE: Duration = Duration::from_micros(100);
/// While waiting threads keep using the engine, it looks less and less often, down to this.
const TAKEOVER_MAX: Duration = Duration::from_millis(16);
/// A thread that waits for the baton looks again after this long, in case its wake-up went elsewhere.
const BATON_RECHECK: Duration = Duration::from_millis(20);

/// Most links of newcomers that wait for the engine.
const ARRIVALS_MAX: usize = 1024;
/// Most answers about copies that wait for the engine.
const COPIES_MAX: usize = 256;
/// How long copies may take before their link is asked alone again.
const COPIES_TIMEOUT: Duration = Duration::from_secs(10);

/// An answer about results that a link spoilt.
struct Copies {
    owner: Rank,
    header: FrameHeader,
    /// Their bytes; nothing if nobody could give them.
    data: Option<Vec<u8>>,
}

/// How a caller ends the job, or its part in it.
type Ending = fn(&mut Engine, Fault);

/// The engine's baton, and what threads say to whoever has it.
pub(crate) struct Driver {
    engine: ArrayQueue<Box<Engine>>,
    submissions: ArrayQueue<Submission>,
    faults: ArrayQueue<(Fault, Ending)>,
    waiters: ArrayQueue<Thread>,
    /// Threads that want the baton; and those of them that want it for a moment only, whom every other lets pass.
    wanted: AtomicU32,
    wanted_briefly: AtomicU32,
    /// Threads that let others pass and want the baton back; and how often one has passed.
    returning: AtomicU32,
    passed: AtomicU64,
    /// How often a waiting thread took the baton.
    uses: AtomicU64,
    /// Whoever has the baton sleeps, or is about to.
    sleeping: AtomicBool,
    /// The engine was laid down with something still going on.
    busy: AtomicBool,
    stop: AtomicBool,
    /// The background thread was woken and has not looked yet.
    alerted: AtomicBool,
    doorbell: OwnedFd,
    control: Option<Arc<ControlPlane>>,
    control_rang: AtomicBool,
    /// Results that came as copies from other ranks, or did not.
    copies: ArrayQueue<Copies>,
    /// Links that newcomers opened; and what lets them in.
    arrivals: ArrayQueue<Arrival>,
    bell: std::sync::OnceLock<DoorBell>,
    /// What the caller has heard of.
    pub(crate) aborts: Arc<Aborts>,
    /// This driver, for those who answer later.
    me: Weak<Self>,
    spin: Duration,
    background: std::sync::OnceLock<Thread>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("wanted", &self.wanted).finish_non_exhaustive()
    }
}

impl Driver {
    /// Puts the engine into its slot and starts the background thread. `crowded`: there are more ranks than cores on
    /// this machine, so that spinning would take time from those who have work.
    pub(crate) fn start(
        engine: Engine,
        control: Option<Arc<ControlPlane>>,
        crowded: bool,
    ) -> Result<(Arc<Self>, JoinHandle<()>), Fault> {
        let doorbell = system::event()?;
        let driver = Arc::new_cyclic(|me| Self {
            copies: ArrayQueue::new(COPIES_MAX),
            arrivals: ArrayQueue::new(ARRIVALS_MAX),
            bell: std::sync::OnceLock::new(),
            me: me.clone(),
            aborts: engine.aborts(),
            engine: ArrayQueue::new(1),
            submissions: ArrayQueue::new(SUBMISSIONS_MAX),
            faults: ArrayQueue::new(16),
            waiters: ArrayQueue::new(WAITERS_MAX),
            wanted: AtomicU32::new(0),
            wanted_briefly: AtomicU32::new(0),
            returning: AtomicU32::new(0),
            passed: AtomicU64::new(0),
            uses: AtomicU64::new(0),
            sleeping: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            alerted: AtomicBool::new(false),
            doorbell,
            control,
            control_rang: AtomicBool::new(true),
            spin: if crowded { Duration::ZERO } else { Duration::from_micros(60) },
            background: std::sync::OnceLock::new(),
        });
        driver.put(Box::new(engine));
        if let Some(control) = &driver.control {
            let weak = Arc::downgrade(&driver);
            control.set_waker(move || {
                if let Some(driver) = weak.upgrade() {
                    driver.control_rang.store(true, Ordering::Release);
                    driver.ring();
                }
            });
        }
        let background = Arc::clone(&driver);
        let thread = system::thread("gradwire", move || background.run_background())?;
        let _ = driver.background.set(thread.thread().clone());
        Ok((driver, thread))
    }

    /// Hands an operation over. `background`: nobody is going to wait for it right away, so the background thread
    /// takes it up.
    pub(crate) fn submit(&self, mut submission: Submission, background: bool) {
        while let Err(refused) = self.submissions.push(submission) {
            // Full: help to empty it.
            submission = refused;
            if let Some(mut engine) = self.engine.pop() {
                self.take_submissions(&mut engine);
                engine.progress();
                self.put(engine);
            }
            self.ring();
            thread::yield_now();
        }
        if background && !self.engine.is_empty() {
            self.wake_background();
        }
        self.ring();
    }

    /// A newcomer opened its link.
    pub(crate) fn arrived(&self, arrival: Arrival) {
        drop(self.arrivals.force_push(arrival));
        self.wake_background();
        self.ring();
    }

    /// From now on newcomers are let in.
    pub(crate) fn open_door(&self, bell: DoorBell) {
        let _ = self.bell.set(bell);
    }

    /// Fails the job.
    pub(crate) fn fail(&self, fault: Fault) {
        self.end(fault, Engine::fail);
    }

    /// This rank is lost to the job; where the others can, they go on without it.
    pub(crate) fn resign(&self, fault: Fault) {
        self.end(fault, Engine::resign);
    }

    fn end(&self, fault: Fault, how: Ending) {
        let _ = self.faults.push((fault, how));
        self.wake_background();
        self.ring();
    }

    /// Lets one of those who want the baton for a moment only have it: it may be what an operation waits for. Returns
    /// with the baton, or without it at `limit` or when `done`.
    fn let_pass(&self, engine: Box<Engine>, limit: Option<Instant>, done: &dyn Fn() -> bool) -> Option<Box<Engine>> {
        let passed = self.passed.load(Ordering::SeqCst);
        let patience = Instant::now() + TAKEOVER;
        self.put(engine);
        self.wake_waiters();
        while self.wanted_briefly.load(Ordering::SeqCst) > 0
            && self.passed.load(Ordering::SeqCst) == passed
            && Instant::now() < patience
        {
            thread::yield_now();
        }
        self.returning.fetch_add(1, Ordering::SeqCst);
        let engine = self.acquire(limit, done);
        self.returning.fetch_sub(1, Ordering::SeqCst);
        engine
    }

    /// Does something with the engine, as soon as it can be had.
    pub(crate) fn with_engine<R>(&self, act: impl FnOnce(&mut Engine) -> R) -> R {
        self.wanted_briefly.fetch_add(1, Ordering::SeqCst);
        // Whoever let others pass has its turn first, or it would starve.
        let mut engine = loop {
            if self.returning.load(Ordering::SeqCst) > 0 {
                thread::yield_now();
            } else if let Some(engine) = self.acquire(Some(Instant::now() + BATON_RECHECK), &|| false) {
                break engine;
            }
        };
        self.wanted_briefly.fetch_sub(1, Ordering::SeqCst);
        self.passed.fetch_add(1, Ordering::SeqCst);
        self.take_submissions(&mut engine);
        let result = act(&mut engine);
        self.release(engine);
        result
    }

    /// Drives the engine, or waits while another thread drives it, until `done` or `limit`.
    pub(crate) fn drive(&self, flush: Option<TensorId>, limit: Option<Instant>, done: impl Fn() -> bool) {
        self.drive_engine(flush, limit, |_| done(), &done);
    }

    /// As [`Driver::drive`], for conditions that only the engine knows.
    pub(crate) fn drive_to(&self, limit: Option<Instant>, done: impl Fn(&Engine) -> bool) {
        self.drive_engine(None, limit, done, &|| false);
    }

    fn drive_engine(
        &self,
        flush: Option<TensorId>,
        limit: Option<Instant>,
        done: impl Fn(&Engine) -> bool,
        done_outside: &dyn Fn() -> bool,
    ) {
        let Some(mut engine) = self.acquire(limit, done_outside) else { return };
        self.take_submissions(&mut engine);
        if let Some(tensor) = flush {
            engine.flush(tensor);
        }
        let mut idle_since = None;
        let mut ended = engine.ended();
        while !done(&engine) && limit.is_none_or(|limit| Instant::now() < limit) {
            if self.wanted_briefly.load(Ordering::SeqCst) > 0 {
                let Some(back) = self.let_pass(engine, limit, done_outside) else { return };
                engine = back;
            }
            let moved = self.turn(&mut engine);
            if engine.ended() != ended {
                ended = engine.ended();
                self.wake_waiters();
            }
            if moved {
                idle_since = None;
            } else if !done(&engine) {
                self.pause(&mut engine, &mut idle_since, limit);
            }
        }
        self.release(engine);
    }

    /// Lets the engine take up what the control plane said and, at the beginning of a step, enter an epoch that waits.
    pub(crate) fn look_at_members(&self, view_waits: bool) {
        if view_waits || self.control_rang.load(Ordering::Acquire) {
            self.with_engine(|engine| self.turn(engine));
        }
    }

    /// One round of the engine.
    fn turn(&self, engine: &mut Engine) -> bool {
        self.take_submissions(engine);
        if self.control_rang.swap(false, Ordering::AcqRel) {
            self.take_control_events(engine);
        }
        while let Some(arrival) = self.arrivals.pop() {
            engine.arrived(arrival);
        }
        while let Some(Copies { owner, header, data }) = self.copies.pop() {
            match data {
                Some(data) => engine.take_copies(owner, &header, &data),
                None => engine.no_copies(&header),
            }
        }
        let moved = engine.progress();
        while let Some((process, fault)) = engine.take_lost() {
            tracing::warn!(%fault, "a rank is lost");
            if let Some(control) = &self.control {
                control.suspect(process, fault.detail);
            }
        }
        while let Some((owner, header, step)) = engine.take_spoilt() {
            self.ask_for_copies(engine, owner, header, step);
        }
        moved
    }

    /// Results that a link spoils again and again are asked for over the broker.
    fn ask_for_copies(&self, engine: &mut Engine, owner: Rank, header: FrameHeader, step: Step) {
        let Some(control) = &self.control else { return };
        let request = |unit| CopyRequest { shard: ShardVersion { epoch: header.epoch, step, unit }, crc: None };
        let units = header.unit_first.0..header.unit_first.0 + header.unit_count;
        let requests: Vec<CopyRequest> = units.map(|unit| request(UnitIndex(unit))).collect();
        let me = self.me.clone();
        let asked = control.request_copies(&requests, COPIES_TIMEOUT, move |copies| {
            if let Err(fault) = &copies {
                tracing::warn!(%fault, "results that a link spoilt could not be had as copies");
            }
            let Some(driver) = me.upgrade() else { return };
            // Where there is no room the link is asked again when the operation's patience is over.
            let _ = driver.copies.push(Copies { owner, header, data: copies.ok().map(|units| units.concat()) });
            driver.ring();
        });
        if let Err(fault) = asked {
            tracing::warn!(%fault, "results that a link spoilt cannot be asked for as copies");
            engine.no_copies(&header);
        }
    }

    fn take_submissions(&self, engine: &mut Engine) {
        while let Some(submission) = self.submissions.pop() {
            engine.submit(submission);
        }
        while let Some((fault, how)) = self.faults.pop() {
            how(engine, fault);
        }
    }

    fn take_control_events(&self, engine: &mut Engine) {
        let Some(control) = &self.control else { return };
        while let Some(event) = control.event() {
            match event {
                ControlEvent::Failed(fault) | ControlEvent::Removed(fault) => engine.fail(fault),
                ControlEvent::View(view) => {
                    if let Some(bell) = self.bell.get() {
                        bell.set_epoch(view.epoch);
                    }
                    engine.set_view(view);
                }
                _ => {}
            }
        }
    }

    /// Nothing moves: spins for a moment, then sleeps until something arrives.
    fn pause(&self, engine: &mut Engine, idle_since: &mut Option<Instant>, limit: Option<Instant>) {
        let now = Instant::now();
        let since = *idle_since.get_or_insert(now);
        if now.duration_since(since) < self.spin {
            std::hint::spin_loop();
            return;
        }
        self.sleep(engine, limit.map(|limit| limit.saturating_duration_since(now)), false);
    }

    /// Sleeps until the transport, a submission, a fault or the clock has something; if `yielding`, also until
    /// somebody wants the baton.
    fn sleep(&self, engine: &mut Engine, limit: Option<Duration>, yielding: bool) {
        self.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let pending = !self.submissions.is_empty()
            || !self.faults.is_empty()
            || self.control_rang.load(Ordering::SeqCst)
            || !self.copies.is_empty()
            || !self.arrivals.is_empty()
            || self.wanted_briefly.load(Ordering::SeqCst) > 0
            || (yielding && self.wanted.load(Ordering::SeqCst) > 0)
            || self.stop.load(Ordering::SeqCst);
        if !pending && let Some(timeout) = engine.prepare_sleep() {
            let timeout = limit.map_or(timeout, |limit| limit.min(timeout));
            let timeout = Timespec {
                tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(timeout.subsec_nanos()),
            };
            let mut fds = [
                PollFd::from_borrowed_fd(engine.event_fd(), PollFlags::IN),
                PollFd::new(&self.doorbell, PollFlags::IN),
            ];
            // An interrupted or failed wait only means another round.
            let _ = poll(&mut fds, Some(&timeout));
            if fds[1].revents().contains(PollFlags::IN) {
                let mut count = [0; 8];
                let _ = rustix::io::read(self.doorbell.as_fd(), &mut count);
            }
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Wakes whoever drives, if it sleeps.
    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) {
            let _ = rustix::io::write(self.doorbell.as_fd(), &1u64.to_ne_bytes());
        }
    }

    fn wake_background(&self) {
        if !self.alerted.swap(true, Ordering::SeqCst)
            && let Some(thread) = self.background.get()
        {
            thread.unpark();
        }
    }

    fn wake_waiters(&self) {
        while let Some(waiter) = self.waiters.pop() {
            waiter.unpark();
        }
    }

    /// Takes the baton; gives up at `limit` or when `done`.
    fn acquire(&self, limit: Option<Instant>, done: &dyn Fn() -> bool) -> Option<Box<Engine>> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let engine = loop {
            if done() {
                break None;
            }
            if let Some(engine) = self.engine.pop() {
                break Some(engine);
            }
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break None;
            }
            let _ = self.waiters.push(thread::current());
            self.ring();
            if self.engine.is_empty() && !done() {
                thread::park_timeout(left.map_or(BATON_RECHECK, |left| left.min(BATON_RECHECK)));
            }
        };
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        if engine.is_some() {
            self.uses.fetch_add(1, Ordering::Relaxed);
        }
        engine
    }

    /// Lays the baton down; somebody must go on if there is something to go on with.
    fn release(&self, engine: Box<Engine>) {
        let busy = !engine.is_idle() || !engine.is_flushed();
        self.busy.store(busy, Ordering::SeqCst);
        self.put(engine);
        self.wake_waiters();
        if busy {
            self.wake_background();
        }
    }

    fn put(&self, engine: Box<Engine>) {
        if self.engine.push(engine).is_err() {
            unreachable!("there is one engine and one slot");
        }
    }

    /// Drives while nobody waits.
    fn run_background(&self) {
        let mut patience = TAKEOVER;
        while !self.stop.load(Ordering::Acquire) {
            let uses = self.uses.load(Ordering::Relaxed);
            thread::park_timeout(patience);
            self.alerted.store(false, Ordering::SeqCst);
            if self.has_news() {
                // A thread that is about to wait takes it up itself, without a hand-over.
                thread::sleep(GRACE);
            }
            let in_use = self.uses.load(Ordering::Relaxed) != uses;
            let urgent = self.has_news();
            // Threads that wait again and again are left alone for a while, but not for ever: they may only look.
            if in_use && !urgent && patience < TAKEOVER_MAX {
                patience *= 2;
                continue;
            }
            if self.wanted.load(Ordering::SeqCst) > 0 {
                continue;
            }
            patience = TAKEOVER;
            if let Some(engine) = self.engine.pop() {
                self.drive_in_background(engine);
            }
        }
    }

    fn has_news(&self) -> bool {
        let left_over = self.busy.load(Ordering::SeqCst) && !self.engine.is_empty();
        left_over || !self.submissions.is_empty() || !self.faults.is_empty()
    }

    fn drive_in_background(&self, mut engine: Box<Engine>) {
        let mut ended = engine.ended();
        while self.wanted.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::Acquire) {
            let moved = self.turn(&mut engine);
            if engine.ended() != ended {
                ended = engine.ended();
                self.wake_waiters();
            }
            if !moved && self.wanted.load(Ordering::SeqCst) == 0 {
                self.sleep(&mut engine, None, true);
            }
        }
        self.put(engine);
        self.wake_waiters();
    }

    /// Ends the background thread. The engine stays in its slot, for whoever still holds a handle.
    pub(crate) fn stop(&self, thread: JoinHandle<()>) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake_background();
        self.ring();
        let _ = thread.join();
        self.with_engine(Engine::close);
    }
}
