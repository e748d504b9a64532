//! SIGTERM as notice: the process is to end before long, and may say when.
//!
//! Signals are the program's own. Nothing is done about them unless a group is made with
//! [`Builder::stop_on_sigterm`](crate::Builder::stop_on_sigterm), and while no such group lives SIGTERM ends the process,
//! as it does elsewhere. Handlers that the program installed before are still called.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gradwire_proto::{Fault, FaultKind};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::system;

/// What the process knows of notice. There is one, as there is one handler.
#[derive(Debug)]
struct Notice {
    /// While it is set, SIGTERM does what it does to any process.
    idle: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    listens: bool,
    groups: usize,
    given: Option<Instant>,
}

impl Notice {
    fn the() -> &'static Self {
        static NOTICE: OnceLock<Notice> = OnceLock::new();
        NOTICE.get_or_init(|| Self { idle: Arc::new(AtomicBool::new(true)), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Installs what listens, for as long as the process lives.
    fn listen(&'static self) -> Result<(), Fault> {
        let no_handler = |error: io::Error| {
            Fault::new(FaultKind::System, format!("no handler could be installed for SIGTERM: {error}"))
        };
        signal_hook::flag::register_conditional_default(SIGTERM, Arc::clone(&self.idle)).map_err(no_handler)?;
        let mut signals = Signals::new([SIGTERM]).map_err(no_handler)?;
        let listen = move || {
            for _ in signals.forever() {
                tracing::info!("SIGTERM: this rank ends with a step");
                self.state().given.get_or_insert_with(Instant::now);
            }
        };
        drop(system::thread("gradwire-notice", listen)?);
        Ok(())
    }
}

/// While it lives, SIGTERM is notice.
#[derive(Debug)]
pub(crate) struct NoticeWatch(&'static Notice);

impl NoticeWatch {
    pub(crate) fn start() -> Result<Self, Fault> {
        let notice = Notice::the();
        let mut state = notice.state();
        if !state.listens {
            notice.listen()?;
            state.listens = true;
        }
        state.groups += 1;
        notice.idle.store(false, Ordering::SeqCst);
        Ok(Self(notice))
    }

    /// How long ago notice was given, if it was.
    pub(crate) fn given(&self) -> Option<Duration> {
        self.0.state().given.map(|at| at.elapsed())
    }
}

impl Drop for NoticeWatch {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.groups -= 1;
        if state.groups == 0 {
            self.0.idle.store(true, Ordering::SeqCst);
        }
    }
}
