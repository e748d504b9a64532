//! What the system gives, or a fault that says what to do.

use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use gradwire_proto::{Fault, FaultKind};
use rustix::event::{EventfdFlags, eventfd};

/// By how much threads yield that others need not wait for: they get a third of what the others get.
const NICER: i32 = 5;

/// A descriptor that one thread makes readable for another.
pub(crate) fn event() -> Result<OwnedFd, Fault> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
        let detail = format!("no event descriptor could be had; raise the limit on open files: {errno}");
        Fault::new(FaultKind::System, detail)
    })
}

/// A thread of this name.
pub(crate) fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Fault> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map_err(|error| Fault::new(FaultKind::System, format!("no thread could be started: {error}")))
}

/// Lets other threads go first where there are not cores enough. For threads that do nothing else: there is no way back.
pub(crate) fn yield_to_others() {
    // Of the calling thread: on Linux niceness is each thread's own.
    let nice = rustix::process::getpriority_process(None).unwrap_or(0);
    let _ = rustix::process::setpriority_process(None, nice + NICER);
}
