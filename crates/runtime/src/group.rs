//! The group: what a trainer holds.

mod ends;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gradwire_control::{AuditKind, ControlPlane, VersionRecord};
use gradwire_proto::limits::TENSOR_NAME_BYTES_MAX;
use gradwire_proto::manifest::Manifest;
use gradwire_proto::plan::Plan;
use gradwire_proto::session::{Recovery, Rejected, Wish};
use gradwire_proto::{Collective, Epoch, Fault, FaultKind, Rank, Step, TensorId, WireFormat};
use gradwire_transport::{Buffer, Element};

use crate::driver::Driver;
use crate::durable::{Durable, SaveIdentity};
use crate::engine::{Committed, Made, Submission};
use crate::env::Guard;
use crate::handle::{Handle, Tensor, TensorShared};
use crate::notice::NoticeWatch;
use crate::state::State;
use crate::transfer::{Copying, DoorKeeper};
use crate::types::{Commit, OpError, Outcome, Replaced, Stats, TensorSpec, Version};

/// Names that begin like this are gradwire's own.
pub(crate) const RESERVED_PREFIX: &str = "gradwire.";
const BARRIER: &str = "gradwire.barrier";

/// This rank's membership in a job.
///
/// All methods may be called from any thread. Dropping the group leaves the job in good order, as [`Group::close`]
/// does, without a word about what went wrong.
pub struct Group {
    pub(crate) driver: Arc<Driver>,
    thread: Option<JoinHandle<()>>,
    control: Option<Arc<ControlPlane>>,
    pub(crate) identity: Identity,
    barrier: Option<Tensor>,
    pub(crate) durable: Durable,
    transport: String,
    pub(crate) commits: AtomicU64,
    versions_dropped: AtomicU64,
    /// The caller wants this rank to leave, or all to end.
    leave_requested: AtomicBool,
    stop_requested: AtomicBool,
    notice: Option<NoticeWatch>,
    /// Lets newcomers in.
    door: Option<DoorKeeper>,
    /// Keeps the job's rendezvous, where this process serves it, until the group is gone.
    guard: Option<Guard>,
}

/// What a group keeps and is told of.
pub(crate) struct GroupParts {
    pub(crate) control: Option<Arc<ControlPlane>>,
    pub(crate) guard: Option<Guard>,
    pub(crate) saves: SaveIdentity,
    pub(crate) door: Option<DoorKeeper>,
    /// It joins a running job: what gradwire itself needs was declared when that began.
    pub(crate) joins: bool,
    pub(crate) notice: Option<NoticeWatch>,
}

/// What does not change while the group lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) wire: WireFormat,
    pub(crate) deadline: Duration,
    /// How long it waits for others where too few ranks are left.
    pub(crate) ranks_wait: Duration,
    pub(crate) first_step: Step,
    pub(crate) recovery: Recovery,
    /// Commits wait for all ranks, and say what each wants.
    pub(crate) agrees: bool,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Group {
    /// A group over an engine that drives already. Collective: declares what gradwire itself needs.
    pub(crate) fn new(
        identity: Identity,
        driver: Arc<Driver>,
        thread: JoinHandle<()>,
        parts: GroupParts,
    ) -> Result<Self, Fault> {
        let GroupParts { control, guard, saves, door, joins, notice } = parts;
        let transport = driver.with_engine(|engine| engine.transport_names().join("+"));
        let mut group = Self {
            driver,
            thread: Some(thread),
            control,
            identity,
            barrier: None,
            durable: Durable::new(Vec::new(), saves.clone()),
            transport: if transport.is_empty() { "local".into() } else { transport },
            commits: AtomicU64::new(identity.first_step.0),
            versions_dropped: AtomicU64::new(0),
            leave_requested: AtomicBool::new(false),
            stop_requested: AtomicBool::new(false),
            notice,
            door,
            guard,
        };
        if joins {
            // They were declared when the job began.
            group.barrier = Some(group.tensor(BARRIER)?);
            let tensors = Durable::specs().map(|spec| group.tensor(spec.name())).collect::<Result<_, _>>()?;
            group.durable = Durable::new(tensors, saves);
        } else {
            let barrier = TensorSpec::new(BARRIER, &[0], gradwire_proto::DType::F32);
            let specs: Vec<TensorSpec> = Durable::specs().chain([barrier]).collect();
            let mut tensors = group.declare_any(&specs)?;
            group.barrier = tensors.pop();
            group.durable = Durable::new(tensors, saves);
        }
        Ok(group)
    }

    /// This rank.
    #[must_use]
    pub const fn rank(&self) -> Rank {
        self.identity.rank
    }

    /// How many ranks the job began with.
    #[must_use]
    pub const fn world_size(&self) -> u32 {
        self.identity.world_size
    }

    /// The membership view, as far as this rank knows.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.driver.with_engine(|engine| engine.epoch())
    }

    /// The ranks that take part, ascending, as far as this rank knows.
    #[must_use]
    pub fn members(&self) -> Vec<Rank> {
        self.driver.with_engine(|engine| engine.members().to_vec())
    }

    /// The wire format of f32 tensors.
    #[must_use]
    pub const fn wire(&self) -> WireFormat {
        self.identity.wire
    }

    /// The transports to the other ranks: `shm`, `tcp`, `shm+tcp`, or `local` for a rank on its own.
    #[must_use]
    pub fn transport(&self) -> &str {
        &self.transport
    }

    /// Declares tensors. Collective: every rank calls it as often as the others, each time with the same tensors, in
    /// any order. Returns them in the order of `specs`.
    ///
    /// # Errors
    /// When ranks differ, a [`Fault`] that names the tensor, the ranks and what each said, the same on every rank; when
    /// a rank does not call it before the deadline, one that names it. The group is unusable then.
    /// `InvalidArgument` for a name that is empty, too long, reserved or declared already.
    pub fn declare(&self, specs: &[TensorSpec]) -> Result<Vec<Tensor>, Fault> {
        for spec in specs {
            let wrong = if spec.name.is_empty() {
                "a tensor needs a name".to_owned()
            } else if spec.name.len() > TENSOR_NAME_BYTES_MAX {
                format!("its name has {} bytes: at most {TENSOR_NAME_BYTES_MAX} are possible", spec.name.len())
            } else if spec.name.starts_with(RESERVED_PREFIX) {
                format!("names that begin with '{RESERVED_PREFIX}' are gradwire's own: choose another")
            } else if let Collective::Broadcast { root } = spec.collective
                && root.0 >= self.world_size()
            {
                format!("its root is {root}, but the last is rank {}", self.world_size() - 1)
            } else {
                continue;
            };
            return Err(Fault::new(FaultKind::InvalidArgument, wrong).tensor(spec.name.clone()));
        }
        self.declare_any(specs)
    }

    fn declare_any(&self, specs: &[TensorSpec]) -> Result<Vec<Tensor>, Fault> {
        let wire = |spec: &TensorSpec| {
            // What ranks disagree on shows in their tensors, not in gradwire's own.
            if spec.name.starts_with(RESERVED_PREFIX) { WireFormat::Fp32 } else { self.identity.wire }
        };
        let tensors = specs.iter().map(|spec| spec.declaration(wire(spec))).collect();
        let manifest = Manifest { tensors };
        let round = self.driver.with_engine(|engine| {
            engine.declare(&manifest, Some(self.identity.deadline))?;
            Ok::<u32, Fault>(engine.round())
        })?;
        self.driver.drive_to(None, |engine| engine.round() > round || engine.fault().is_some());
        self.driver.with_engine(|engine| {
            if let Some(fault) = engine.fault() {
                return Err(fault.clone());
            }
            specs.iter().map(|spec| find(engine, &spec.name)).collect()
        })
    }

    /// The declared tensor of this name.
    ///
    /// # Errors
    /// `UndeclaredTensor` if there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor, Fault> {
        self.driver.with_engine(|engine| find(engine, name))
    }

    /// A block of memory of the tensor's size, which gradwire can exchange without copying it. Dropping it lets the
    /// next call have it again; what it holds is unspecified (zeros at first).
    ///
    /// # Errors
    /// `MemoryUnavailable`, `System`.
    pub fn buffer(&self, tensor: &Tensor) -> Result<Buffer, Fault> {
        let buffer = tensor.shared.pool.take().map_err(|fault| fault.tensor(tensor.name()))?;
        self.driver.with_engine(|engine| engine.register(tensor.shared.id, &buffer))?;
        Ok(buffer)
    }

    /// The elements of a tensor that are rank `rank`'s block in reduce_scatter and allgather: none if it is no member
    /// any more.
    #[must_use]
    pub fn block(&self, tensor: &Tensor, rank: Rank) -> std::ops::Range<u64> {
        let members = self.members();
        match members.iter().position(|member| *member == rank) {
            Some(index) => Plan::block(tensor.elements(), members.len(), index),
            None => 0..0,
        }
    }

    /// Starts the tensor's operation in place: `data` is this rank's part, and becomes the result. What the operation
    /// is was declared with the tensor: [`Collective`].
    ///
    /// # Errors
    /// `TensorBusy` while the tensor has an operation in flight, `InvalidArgument` for a buffer that is not from
    /// [`Group::buffer`] of this tensor. Why the job failed comes from [`Handle::wait`]; so does `RankLeft` for a broadcast
    /// whose root is no member any more.
    pub fn submit(&self, tensor: &Tensor, data: Buffer) -> Result<Handle, OpError> {
        self.start(tensor, None, data, false)
    }

    /// [`Group::submit`], for a tensor that was declared for allreduce.
    ///
    /// # Errors
    /// As [`Group::submit`].
    pub fn allreduce(&self, tensor: &Tensor, data: Buffer) -> Result<Handle, OpError> {
        self.start(tensor, None, data, false)
    }

    /// Starts an allreduce or reduce_scatter out of place: `input` is this rank's contribution and stays as it is,
    /// `output` becomes the result.
    ///
    /// # Errors
    /// As [`Group::submit`]; `InvalidArgument` for a tensor declared for allgather or broadcast, which are in place.
    pub fn allreduce_into(&self, tensor: &Tensor, input: Buffer, output: Buffer) -> Result<Handle, OpError> {
        self.start(tensor, Some(input), output, false)
    }

    fn start(&self, tensor: &Tensor, input: Option<Buffer>, output: Buffer, urgent: bool) -> Result<Handle, OpError> {
        let shared = &tensor.shared;
        let refuse = |kind, detail: &str, buffers| {
            let fault = Fault::new(kind, detail).tensor(tensor.name());
            Err(OpError { fault, buffers })
        };
        // Registrations last as long as the pool: any other memory would be registered anew each time.
        if !input.iter().chain([&output]).all(|buffer| buffer.is_from(&shared.pool)) {
            let detail = "its buffer is not one of this tensor's: get it from Group::buffer";
            return refuse(FaultKind::InvalidArgument, detail, input.into_iter().chain([output]).collect());
        }
        if input.is_some() && !shared.contributes {
            let detail = "allgather and broadcast are in place: use Group::submit";
            return refuse(FaultKind::InvalidArgument, detail, input.into_iter().chain([output]).collect());
        }
        if !shared.begin() {
            let detail = "an operation on this tensor is in flight, or its result was not taken: wait for it first";
            return refuse(FaultKind::TensorBusy, detail, input.into_iter().chain([output]).collect());
        }
        let deadline = Some(self.identity.deadline);
        let heard = self.driver.aborts.heard();
        let submission = Submission { tensor: shared.id, input, output, deadline, urgent, heard };
        self.driver.submit(submission, !urgent);
        Ok(Handle::new(Arc::clone(shared), Arc::clone(&self.driver)))
    }

    /// Reduces `data` in place and waits: for callers whose memory is not gradwire's. Copies in and out.
    ///
    /// # Errors
    /// `InvalidArgument` if the type or length is not the tensor's; otherwise as [`Handle::wait`]. `data` is unchanged
    /// then.
    pub fn allreduce_slice<T: Element>(&self, tensor: &Tensor, data: &mut [T]) -> Result<Outcome, Fault> {
        if T::DTYPE != tensor.dtype() || data.len() as u64 != tensor.elements() {
            let detail = format!(
                "{} elements of {} were given, but it was declared with {} of {}",
                data.len(),
                T::DTYPE,
                tensor.elements(),
                tensor.dtype()
            );
            return Err(Fault::new(FaultKind::InvalidArgument, detail).tensor(tensor.name()));
        }
        let mut buffer = self.buffer(tensor)?;
        buffer.as_mut_slice::<T>().copy_from_slice(data);
        let done = self.start(tensor, None, buffer, true)?.wait()?;
        data.copy_from_slice(done.output.as_slice::<T>());
        Ok(done.outcome)
    }

    /// Waits until every rank is here.
    ///
    /// # Errors
    /// As [`Handle::wait`].
    pub fn barrier(&self) -> Result<(), Fault> {
        let Some(barrier) = &self.barrier else { return Ok(()) };
        let nothing = barrier.shared.pool.take()?;
        self.start(barrier, None, nothing, true)?.wait()?;
        Ok(())
    }

    /// Ends a step: the CRC-32 of every unit that this rank reduced since the last commit goes to the job's version
    /// log, behind the steps; commits that follow each other within the commit interval share a record. Wait for the
    /// step's operations first. Never waits for the broker: while it is away, records wait for it.
    ///
    /// With [`Recovery::Redo`] and [`Recovery::Abort`] it waits until every rank has all results of the step, by the
    /// deadline: only then no rank that is lost can change them any more. It says what comes next, too: [`Commit::next`]. Apply results after the commit, and those in
    /// [`Commit::replaced`] in place of what was handed out before.
    ///
    /// Every rank commits equally often, with the same operations in between: an operation that ranks did between
    /// different commits fails everywhere with `OperationMismatch`, instead of adding what does not belong together.
    ///
    /// # Errors
    /// [`FaultKind::StepAborted`] when a rank was lost and the step's operations cannot be done again: the ranks that are
    /// left repeat it from its beginning. [`FaultKind::Removed`] when they went on without this one. `TensorBusy` while
    /// operations are in flight: nothing has changed then. [`FaultKind::Unrecorded`] when too many records wait, since the
    /// broker has been slow or away for too long: the step has ended all the same, with its results; only its version is not
    /// on record.
    pub fn commit(&self) -> Result<Commit, Fault> {
        let Committed { made, replaced, rejected, next } = if self.identity.agrees {
            self.commit_with_all().inspect_err(|fault| self.driver.aborts.tell(fault))?
        } else {
            self.driver.with_engine(|engine| engine.commit())?
        };
        let step = Step(self.commits.fetch_add(1, Ordering::Relaxed));
        let Made { epoch, contributors, crcs } = made;
        if let Some(control) = &self.control {
            audit_rejected(control, rejected);
            let record = VersionRecord { epoch, step, owner: self.rank(), contributors: contributors.clone(), crcs };
            control.publish_version(record).inspect_err(|_| {
                self.versions_dropped.fetch_add(1, Ordering::Relaxed);
            })?;
        }
        let tensor = |id| Tensor { shared: self.driver.with_engine(|engine| Arc::clone(engine.shared(id))) };
        let replaced = replaced
            .into_iter()
            .map(|(id, output, outcome)| Replaced { tensor: tensor(id), output, outcome })
            .filter(|replaced| !replaced.tensor.name().starts_with(RESERVED_PREFIX))
            .collect();
        Ok(Commit { version: Version { epoch, step }, contributors, replaced, next })
    }

    /// Waits until every rank has all results of the step.
    fn commit_with_all(&self) -> Result<Committed, Fault> {
        let heard = self.driver.aborts.heard();
        let wish = self.wish();
        self.driver.with_engine(|engine| {
            engine.set_wish(wish);
            engine.begin_commit(self.identity.deadline, heard)
        })?;
        self.driver.drive_to(None, |engine| !engine.is_committing());
        self.driver.with_engine(|engine| engine.take_commit())
    }

    /// Offers the trainer's state to processes that join the running job ([`Builder::join`](crate::Builder::join)): call it
    /// at the beginning of each step, before its first operation, on every rank, also of a step that is repeated. What is
    /// done between steps, such as [`Group::save`], comes before it: a rank that joins has no part in that. Ranks do not
    /// join in a step before which the state was saved.
    ///
    /// The state is copied, as far as it is this rank's share, only if somebody waits for the state of just this step;
    /// otherwise this costs nothing. It returns when that is done: [`Group::offer_state_during`] copies beside the step.
    ///
    /// Where so few ranks are left that they may not go on ([`Builder::ranks_min`](crate::Builder::ranks_min)) it waits for
    /// others, for [`Builder::ranks_wait`](crate::Builder::ranks_wait), or until this rank is asked to end.
    ///
    /// # Errors
    /// `DeadlineExceeded` when too few ranks are left, and no others came before that. `InvalidArgument` when two parts of the
    /// state have one name.
    pub fn offer_state(&self, state: &dyn State) -> Result<(), Fault> {
        if let Some(copying) = self.offer(state)? {
            copying.run();
        }
        Ok(())
    }

    /// [`Group::offer_state`] for a trainer that leaves its state alone until the step's commit: `step` computes, exchanges
    /// and commits while the state is copied by another thread, if anybody waits for it. Returns what `step` returned, once
    /// the copy is made: only a step that is shorter than copying takes longer for it.
    ///
    /// # Errors
    /// As [`Group::offer_state`]: `step` is not called then.
    pub fn offer_state_during<R>(&self, state: &dyn State, step: impl FnOnce() -> R) -> Result<R, Fault> {
        let Some(copying) = self.offer(state)? else { return Ok(step()) };
        std::thread::scope(|scope| {
            let copier = std::thread::Builder::new().name("gradwire-copy".into());
            if copier.spawn_scoped(scope, || copying.run()).is_err() {
                // Without a thread, before the step instead of beside it.
                copying.run();
            }
            Ok(step())
        })
    }

    fn offer<'a>(&self, state: &'a dyn State) -> Result<Option<Copying<'a>>, Fault> {
        let Some(DoorKeeper { holder, .. }) = &self.door else { return Ok(None) };
        let commits = self.commits.load(Ordering::Relaxed) - self.identity.first_step.0;
        let copying = holder.offer(commits, state, self.identity.ranks_wait, &|| self.wish() != Wish::GoOn)?;
        self.driver.look_at_members(holder.view_waits());
        Ok(copying)
    }

    /// Waits until this rank, which joins a running job, knows where the others are. Returns how many steps are final.
    pub(crate) fn wait_until_told(&self, deadline: Instant) -> Result<u64, Fault> {
        self.driver.drive_to(Some(deadline), |engine| !engine.is_syncing() || engine.fault().is_some());
        let (commits, syncing) = self.driver.with_engine(|engine| {
            engine.fault().cloned().map_or_else(|| Ok((engine.commits(), engine.is_syncing())), Err)
        })?;
        if syncing {
            let detail = "the members took this rank in, but began no step with it before its deadline: a step takes them \
                          longer than was left, or they do not offer their state (Group::offer_state) at its beginning; a \
                          longer deadline may be needed (GRADWIRE_DEADLINE_MS)";
            return Err(Fault::new(FaultKind::DeadlineExceeded, detail).at(self.rank()));
        }
        self.commits.store(self.identity.first_step.0 + commits, Ordering::Relaxed);
        Ok(commits)
    }

    /// What was counted since the group was made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.driver.with_engine(|engine| engine.stats());
        stats.versions_dropped = self.versions_dropped.load(Ordering::Relaxed);
        stats
    }

    /// Why the job failed, if it did.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.driver.with_engine(|engine| engine.fault().cloned())
    }
}

fn audit_rejected(control: &ControlPlane, rejected: Vec<(Rank, Rejected)>) {
    for (peer, Rejected { corrupt, stale }) in rejected {
        let detail =
            format!("frames rejected since the last time: {corrupt} corrupt, {stale} of another epoch or step");
        control.audit(AuditKind::Rejected, Some(peer), detail);
    }
}

fn find(engine: &mut crate::engine::Engine, name: &str) -> Result<Tensor, Fault> {
    let id: TensorId = engine.tensor(name).ok_or_else(|| {
        let detail = "it was never declared: declare it on every rank with Group::declare first";
        Fault::new(FaultKind::UndeclaredTensor, detail).tensor(name)
    })?;
    let shared: &Arc<TensorShared> = engine.shared(id);
    Ok(Tensor { shared: Arc::clone(shared) })
}
