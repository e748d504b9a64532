//! What the system gives, or a fault that says what to do.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

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
    Builder::new().name(name.to_owned()).spawn(run).map_err(|error| no_thread(&error))
}

/// A thread of this name that ends within `scope`. [`Scope::spawn`] would panic where there is none to be had.
pub(crate) fn scoped<'scope, T: Send + 'scope>(
    name: &str,
    scope: &'scope Scope<'scope, '_>,
    run: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, Fault> {
    #[cfg(test)]
    if tests::REFUSES.get() {
        return Err(no_thread(&io::ErrorKind::WouldBlock.into()));
    }
    Builder::new().name(name.to_owned()).spawn_scoped(scope, run).map_err(|error| no_thread(&error))
}

fn no_thread(error: &io::Error) -> Fault {
    let detail = format!(
        "no thread could be started: {error}; raise the limits on processes and memory (ulimit -u and -v, and those of \
         the container)"
    );
    Fault::new(FaultKind::System, detail)
}

/// Lets other threads go first where there are not cores enough. For threads that do nothing else: there is no way back.
pub(crate) fn yield_to_others() {
    // Of the calling thread: on Linux niceness is each thread's own.
    let nice = rustix::process::getpriority_process(None).unwrap_or(0);
    let _ = rustix::process::setpriority_process(None, nice + NICER);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// This thread gets no more scoped threads.
        pub(crate) static REFUSES: Cell<bool> = const { Cell::new(false) };
    }
}
