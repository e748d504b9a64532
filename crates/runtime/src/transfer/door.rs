//! The thread at a member's door.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use gradwire_proto::hello::HelloParams;
use gradwire_proto::{Epoch, Fault};
use gradwire_transport::establish::{Arrival, Caller, Door, StateStream};

use super::holder::{Asker, Holder};
use super::server;
use crate::system;

/// Most newcomers that are served at once.
const SERVED_MAX: usize = 16;
/// How often the thread looks up, at least.
const TICK: Duration = Duration::from_secs(1);

/// Lets newcomers in. Dropping it closes the door, and ends what is being given away.
#[derive(Debug)]
pub(crate) struct DoorKeeper {
    pub(crate) holder: Arc<Holder>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    epoch: AtomicU64,
    stop: AtomicBool,
    wake: OwnedFd,
}

impl DoorKeeper {
    /// `arrived` is called, on the keeper's thread, with each link that a newcomer opened.
    ///
    /// # Errors
    /// `System` when there is no thread or descriptor to be had.
    pub(crate) fn start(
        door: Door,
        params: HelloParams,
        holder: Arc<Holder>,
        arrived: impl Fn(Arrival) + Send + 'static,
    ) -> Result<Self, Fault> {
        let wake = system::event()?;
        let epoch = AtomicU64::new(params.epoch.0);
        let shared = Arc::new(Shared { epoch, stop: AtomicBool::new(false), wake });
        let keeper = Keeper {
            door,
            params,
            holder: Arc::clone(&holder),
            arrived,
            shared: Arc::clone(&shared),
            streams: Vec::new(),
            asked: 0,
        };
        let thread = system::thread("gradwire-door", move || keeper.run())?;
        Ok(Self { holder, shared, thread: Some(thread) })
    }

    /// What tells the keeper of epochs.
    pub(crate) fn bell(&self) -> DoorBell {
        DoorBell(Arc::clone(&self.shared))
    }
}

/// Tells a [`DoorKeeper`] of epochs.
#[derive(Clone, Debug)]
pub(crate) struct DoorBell(Arc<Shared>);

impl DoorBell {
    /// Links of newcomers are let in for this epoch now.
    pub(crate) fn set_epoch(&self, epoch: Epoch) {
        self.0.epoch.store(epoch.0, Ordering::Release);
        self.0.wake();
    }
}

impl Shared {
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for DoorKeeper {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread at the door panicked");
        }
    }
}

struct Keeper<F> {
    door: Door,
    params: HelloParams,
    holder: Arc<Holder>,
    arrived: F,
    shared: Arc<Shared>,
    streams: Vec<(StateStream, JoinHandle<()>)>,
    /// Newcomers that have asked for the state so far.
    asked: Asker,
}

impl<F: Fn(Arrival)> Keeper<F> {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.door.wait(self.shared.wake.as_fd(), TICK);
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.shared.wake, &mut count);
            self.params.epoch = Epoch(self.shared.epoch.load(Ordering::Acquire));
            match self.door.advance(&self.params) {
                Ok(callers) => callers.into_iter().for_each(|caller| self.let_in(caller)),
                Err(fault) => {
                    tracing::warn!(%fault, "newcomers cannot be let in");
                    std::thread::sleep(TICK);
                }
            }
            self.streams.retain(|(_, thread)| !thread.is_finished());
        }
        self.holder.close();
        for (stream, thread) in self.streams {
            stream.end();
            let _ = thread.join();
        }
    }

    fn let_in(&mut self, caller: Caller) {
        let (peer, stream) = match caller {
            Caller::Link(arrival) => return (self.arrived)(arrival),
            Caller::State(peer, stream) => (peer, stream),
        };
        if self.streams.len() >= SERVED_MAX {
            return server::turn_away(stream, self.params.job, "many ranks are joining");
        }
        self.asked += 1;
        let asker = self.asked;
        let (job, holder) = (self.params.job, Arc::clone(&self.holder));
        let Ok(handle) = stream.try_clone() else { return };
        tracing::info!(%peer, "gives the state to a newcomer");
        match system::thread("gradwire-state", move || server::serve(stream, job, &holder, asker)) {
            Ok(thread) => self.streams.push((handle, thread)),
            Err(fault) => {
                tracing::warn!(%fault, "the state cannot be given to a newcomer");
                server::turn_away(handle, job, &fault.detail);
            }
        }
    }
}
