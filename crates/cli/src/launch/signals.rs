//! Signals that the launcher passes on, as events.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use super::agents::{Event, spawn};

/// While it lives, signals become events; afterwards they do again what they do to any process.
pub(super) struct SignalWatch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    idle: Arc<AtomicBool>,
}

impl SignalWatch {
    pub(super) fn start(events: Sender<Event>) -> io::Result<Self> {
        let passed_on: Vec<i32> = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2]
            .into_iter()
            // Under nohup SIGHUP is ignored, and has to stay so.
            .filter(|signal| *signal != SIGHUP || !ignored(*signal))
            .collect();
        let idle = default_when_idle(&passed_on)?;
        idle.store(false, Ordering::SeqCst);
        let mut signals = Signals::new(&passed_on)?;
        let handle = signals.handle();
        let thread = spawn("signals", move || {
            for signal in signals.forever() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { handle, thread: Some(thread), idle })
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        self.idle.store(true, Ordering::SeqCst);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A flag: while it is set, these signals have their default effect although a handler is installed. One for the
/// process, as handlers are.
fn default_when_idle(signals: &[i32]) -> io::Result<Arc<AtomicBool>> {
    static IDLE: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(idle) = IDLE.get() {
        return Ok(Arc::clone(idle));
    }
    let idle = Arc::new(AtomicBool::new(false));
    for signal in signals {
        signal_hook::flag::register_conditional_default(*signal, Arc::clone(&idle))?;
    }
    Ok(Arc::clone(IDLE.get_or_init(|| idle)))
}

/// Whether this process was started with a signal ignored.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_programs_ignore_sigpipe_and_not_sighup() {
        assert!(ignored(signal_hook::consts::SIGPIPE));
        assert!(!ignored(signal_hook::consts::SIGALRM));
    }
}
