//! Tensors and handles: how callers name what they declared, and wait for what they started.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use gradwire_proto::plan::{BucketPlan, TensorPlan};
use gradwire_proto::{DType, Fault, FaultKind, TensorId};
use gradwire_transport::Pool;

use crate::driver::Driver;
use crate::types::{Completed, OpError};

pub(crate) type OpResult = Result<Completed, OpError>;

/// One tensor's mailbox between the engine and whoever waits.
#[derive(Debug)]
pub(crate) struct TensorShared {
    pub(crate) id: TensorId,
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) elements: u64,
    /// Its operation combines contributions.
    pub(crate) contributes: bool,
    pub(crate) pool: Pool,
    /// The engine is gone.
    pub(crate) closed: AtomicBool,
    state: AtomicU8,
    results: ArrayQueue<OpResult>,
}

/// No operation.
const IDLE: u8 = 0;
/// An operation in flight, and a handle that wants its result.
const IN_FLIGHT: u8 = 1;
/// The result waits for its handle.
const DONE: u8 = 2;
/// An operation in flight whose handle was dropped.
const ABANDONED: u8 = 3;

impl TensorShared {
    pub(crate) fn new(id: TensorId, plan: &TensorPlan, bucket: &BucketPlan, pool: Pool) -> Arc<Self> {
        Arc::new(Self {
            id,
            name: plan.name.clone(),
            dtype: bucket.dtype,
            elements: plan.elements,
            contributes: bucket.contributes(),
            pool,
            closed: AtomicBool::new(false),
            state: AtomicU8::new(IDLE),
            results: ArrayQueue::new(1),
        })
    }

    /// Claims the tensor for an operation; false if it has one.
    pub(crate) fn begin(&self) -> bool {
        self.state.compare_exchange(IDLE, IN_FLIGHT, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Puts the result where the handle finds it; drops it if there is no handle any more.
    pub(crate) fn complete(&self, result: OpResult) {
        drop(self.results.force_push(result));
        if self.state.compare_exchange(IN_FLIGHT, DONE, Ordering::AcqRel, Ordering::Acquire).is_err() {
            self.discard();
        }
    }

    /// Takes back a result that its handle has not taken: the operation is in flight again. Nothing if it was taken, or
    /// nobody wants it.
    pub(crate) fn take_back(&self) -> Option<OpResult> {
        self.take_to(IN_FLIGHT)
    }

    fn take(&self) -> Option<OpResult> {
        self.take_to(IDLE)
    }

    /// Takes the result, if it is there. The tensor is in this state then.
    fn take_to(&self, state: u8) -> Option<OpResult> {
        let result = if self.is_ready() { self.results.pop() } else { None };
        if result.is_some() {
            self.state.store(state, Ordering::Release);
        }
        result
    }

    fn discard(&self) {
        drop(self.results.pop());
        self.state.store(IDLE, Ordering::Release);
    }

    fn abandon(&self) {
        if self.state.compare_exchange(IN_FLIGHT, ABANDONED, Ordering::AcqRel, Ordering::Acquire).is_err() {
            self.discard();
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.state.load(Ordering::Acquire) == DONE
    }
}

/// A declared tensor. Cheap to clone.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) shared: Arc<TensorShared>,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {} x {})", self.shared.name, self.shared.elements, self.shared.dtype)
    }
}

impl Tensor {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// Its number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shared.elements
    }
}

/// An operation in flight.
///
/// Dropping a handle does not stop the operation: it goes on for the other ranks' sake, and its buffers go back to the
/// tensor's pool when it ends.
#[must_use = "the result comes through the handle"]
#[derive(Debug)]
pub struct Handle {
    tensor: Arc<TensorShared>,
    driver: Arc<Driver>,
    taken: bool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.taken {
            self.tensor.abandon();
        }
    }
}

impl Handle {
    pub(crate) const fn new(tensor: Arc<TensorShared>, driver: Arc<Driver>) -> Self {
        Self { tensor, driver, taken: false }
    }

    /// Whether the result is there. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.tensor.is_ready()
    }

    /// Waits for the result. Ends by the operation's deadline at the latest.
    ///
    /// # Errors
    /// [`OpError`] with the [`Fault`] that ended it, and the buffers.
    pub fn wait(mut self) -> Result<Completed, OpError> {
        loop {
            if let Some(result) = self.wait_until(None) {
                return result;
            }
        }
    }

    /// Waits for at most `limit`.
    ///
    /// # Errors
    /// The handle itself if there is no result by then: the operation goes on.
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Result<Completed, OpError>, Self> {
        self.wait_until(Instant::now().checked_add(limit)).ok_or(self)
    }

    fn wait_until(&mut self, limit: Option<Instant>) -> Option<OpResult> {
        let tensor = &self.tensor;
        self.driver.drive(Some(tensor.id), limit, || tensor.is_ready() || tensor.closed.load(Ordering::Acquire));
        let mut result = tensor.take();
        if result.is_none() && tensor.closed.load(Ordering::Acquire) {
            let fault = Fault::new(FaultKind::Closed, "the group was closed").tensor(tensor.name.clone());
            result = Some(Err(OpError { fault, buffers: Vec::new() }));
        }
        if let Some(Err(error)) = &result {
            self.driver.aborts.tell(&error.fault);
        }
        self.taken = result.is_some();
        result
    }

    /// Gives the operation up, and with it the job: the other ranks cannot end it without this one. Every rank gets a
    /// fault of kind `Cancelled` that names this rank and the tensor. If the operation has ended already, this is
    /// [`Handle::wait`].
    ///
    /// # Errors
    /// [`OpError`] with the fault, and the buffers.
    pub fn cancel(self) -> Result<Completed, OpError> {
        if !self.is_done() {
            let detail = "the operation was cancelled by its caller: the job cannot go on without it";
            self.driver.fail(Fault::new(FaultKind::Cancelled, detail).tensor(self.tensor.name.clone()));
        }
        self.wait()
    }
}
