//! The task that keeps what the store changes: groups into the journal, checkpoints into the table.
//!
//! It is woken once for all links that were ready together, so their messages are one group. While a group is synced
//! or a checkpoint runs, on another thread, links are served.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until};

use super::{Checkpoint, Storage};
use crate::broker::Broker;
use crate::broker::store::Outcome;

/// How long changes that nobody waits for may wait for others.
const SOON: Duration = Duration::from_millis(50);
/// How often the table is brought up to date.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(1);
/// How long nothing is kept again after that failed, unless a client wants it.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// How long no checkpoint is tried again after one failed. Until one succeeds, messages are refused.
const AFTER_FAILED_CHECKPOINT: Duration = Duration::from_secs(1);

/// Keeps what a broker's store changes.
pub(in crate::broker) struct Keeper {
    broker: Arc<Broker>,
    storage: Storage,
    /// Groups are synced before anybody hears that they are kept.
    sync: bool,
    /// What nobody waits for is kept then.
    soon: Option<Instant>,
    /// When the next checkpoint is due, if something is in the journal.
    checkpoint_at: Option<Instant>,
    running: Option<JoinHandle<(Checkpoint, io::Result<()>)>>,
    /// The last group was not kept, and the log says so.
    failing: bool,
    /// Why the last checkpoint failed, if it did.
    checkpoint_failure: Option<String>,
}

impl Keeper {
    pub(in crate::broker) fn new(broker: Arc<Broker>, storage: Storage) -> Self {
        let sync = broker.config.fsync;
        let (soon, checkpoint_at, running) = (None, None, None);
        Self { broker, storage, sync, soon, checkpoint_at, running, failing: false, checkpoint_failure: None }
    }

    /// Works until the broker stops, and leaves everything in the table.
    ///
    /// # Errors
    /// When it is not all there. Names the directory.
    pub(in crate::broker) async fn run(mut self, mut stopped: watch::Receiver<bool>) -> Outcome {
        loop {
            let signals = &self.broker.signals;
            let far = Instant::now() + Duration::from_secs(3600);
            let (soon, checkpoint) = (self.soon.unwrap_or(far), self.checkpoint_at.unwrap_or(far));
            tokio::select! {
                () = signals.now.notified() => drop(self.keep_group().await),
                () = signals.soon.notified(), if self.soon.is_none() => self.soon = Some(Instant::now() + SOON),
                () = sleep_until(soon), if self.soon.is_some() => drop(self.keep_group().await),
                () = sleep_until(checkpoint), if self.running.is_none() && self.checkpoint_at.is_some() => {
                    self.start_checkpoint();
                }
                done = finished(&mut self.running) => self.end_checkpoint(done),
                () = stop(&mut stopped) => break,
            }
        }
        self.finish().await
    }

    async fn keep_group(&mut self) -> Outcome {
        self.soon = None;
        let group = self.broker.store().take_group();
        let Some(group) = group else { return Ok(()) };
        let is_empty = group.ops.is_empty();
        let outcome = if is_empty { Ok(()) } else { self.write(&group.ops).await };
        self.broker.store().settle(group, &outcome);
        match &outcome {
            Ok(()) if is_empty => {}
            Ok(()) => {
                self.checkpoint_at = self.checkpoint_at.or(Some(Instant::now() + CHECKPOINT_EVERY));
                if std::mem::take(&mut self.failing) {
                    tracing::warn!(directory = %self.shown(), "the embedded broker takes messages again");
                }
            }
            Err(reason) => {
                self.soon = Some(Instant::now() + AFTER_FAILURE);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(reason, "the embedded broker refuses messages");
                }
            }
        }
        outcome
    }

    async fn write(&mut self, ops: &super::Ops) -> Outcome {
        // What is in the journal could be all that there ever is of it: nothing is promised on top.
        if let Some(reason) = &self.checkpoint_failure {
            return Err(reason.clone());
        }
        let failed = |path: String, error: io::Error| Err(cannot_write(&path, &error));
        if let Err(error) = self.storage.append(ops) {
            return failed(self.shown(), error);
        }
        if self.sync {
            let file = self.storage.journal_file();
            let synced = spawn_blocking(move || file.sync_data()).await;
            if let Err(error) = synced.unwrap_or_else(|gone| Err(io::Error::other(gone))) {
                self.storage.take_back();
                return failed(self.shown(), error);
            }
        }
        Ok(())
    }

    fn start_checkpoint(&mut self) {
        self.checkpoint_at = None;
        match self.storage.checkpoint() {
            Ok(None) => self.checkpoint_failure = None,
            Ok(Some(checkpoint)) => {
                self.running = Some(spawn_blocking(move || {
                    let outcome = checkpoint.run();
                    (checkpoint, outcome)
                }));
            }
            Err(error) => self.checkpoint_failed(&error),
        }
    }

    fn end_checkpoint(&mut self, done: Option<(Checkpoint, io::Result<()>)>) {
        self.running = None;
        match done {
            Some((checkpoint, Ok(()))) => {
                self.storage.checkpointed(&checkpoint);
                self.checkpoint_failure = None;
            }
            Some((_, Err(error))) => self.checkpoint_failed(&error),
            None => self.checkpoint_failed(&io::Error::other("its thread ended")),
        }
    }

    /// Nothing is lost as long as the journal is there.
    fn checkpoint_failed(&mut self, error: &io::Error) {
        let reason = cannot_write(&self.shown(), error);
        if self.checkpoint_failure.is_none() {
            tracing::error!(reason, "the embedded broker cannot bring topics.redb up to date, and refuses messages");
            // A client that comes next hears of it; the log has it already.
            self.failing = true;
        }
        self.checkpoint_failure = Some(reason);
        self.checkpoint_at = Some(Instant::now() + AFTER_FAILED_CHECKPOINT);
    }

    async fn finish(mut self) -> Outcome {
        if self.running.is_some() || self.checkpoint_failure.is_some() {
            self.checkpoint().await;
        }
        let kept = self.keep_group().await;
        self.checkpoint().await;
        self.checkpoint_failure.take().map_or(kept, Err)
    }

    /// Waits for the checkpoint that runs, or else for a new one.
    async fn checkpoint(&mut self) {
        if self.running.is_none() {
            self.start_checkpoint();
        }
        if self.running.is_some() {
            let done = finished(&mut self.running).await;
            self.end_checkpoint(done);
        }
    }

    fn shown(&self) -> String {
        self.storage.path().display().to_string()
    }
}

fn cannot_write(directory: &str, error: &io::Error) -> String {
    format!("the embedded broker cannot write to its data directory {directory}: {error}")
}

async fn stop(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// The checkpoint that runs, when it has ended; never while none runs.
async fn finished(
    running: &mut Option<JoinHandle<(Checkpoint, io::Result<()>)>>,
) -> Option<(Checkpoint, io::Result<()>)> {
    match running {
        Some(handle) => handle.await.ok(),
        None => std::future::pending().await,
    }
}
