//! Joining a job: place, rendezvous, links, engine.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradwire_control::{COMMIT_INTERVAL_DEFAULT, ControlEvent, ControlPlane, JobConfig, JoinRequest, Policy};
use gradwire_proto::frame::JobTag;
use gradwire_proto::hello::HelloParams;
use gradwire_proto::limits::{STEPS_MAX, WORLD_SIZE_MAX};
use gradwire_proto::manifest::Declaration;
use gradwire_proto::membership::{Member, RecordId, View};
use gradwire_proto::session::{Recovery, SessionConfig, Timing};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Secret, Step, WireFormat};
use gradwire_transport::Transport;
use gradwire_transport::establish::{Door, ListenConfig, Listeners};
use gradwire_transport::mesh::{Choice, MeshChange, MeshConfig, MeshMember};
use rustix::process::{Resource, Rlimit};

use crate::driver::Driver;
use crate::durable::SaveIdentity;
use crate::engine::{Engine, EngineConfig};
use crate::env::{Guard, Place};
use crate::group::{Group, GroupParts, Identity};
use crate::handle::Tensor;
use crate::retained::Retained;
use crate::state::Trainer;
use crate::transfer::{DoorKeeper, Holder, Newcomer};
use crate::types::{Integrity, TensorSpec, Transfer, TransportChoice};

/// How long joining and each operation may take, unless something else is said.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(30);
/// How many saves are kept, unless something else is said.
const SAVES_KEPT_DEFAULT: usize = 2;
/// Longer deadlines are taken as this: a year.
const DEADLINE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How to join a job. Everything has a default; the environment says the rest.
#[derive(Debug)]
pub struct Builder {
    place: Option<Place>,
    transport: TransportChoice,
    wire: WireFormat,
    integrity: Integrity,
    deadline: Duration,
    commit_interval: Duration,
    retain_steps: usize,
    first_step: Step,
    recovery: Recovery,
    ranks_min: u32,
    ranks_max: u32,
    saves_kept: usize,
}

impl Builder {
    /// Finds this process's place from the environment that `gradwire launch`, `mpirun`, `srun` or `torchrun` made, and
    /// takes `GRADWIRE_TRANSPORT` (auto, shm, tcp), `GRADWIRE_WIRE` (fp32, fp16, bf16), `GRADWIRE_INTEGRITY` (links,
    /// all), `GRADWIRE_DEADLINE_MS`, `GRADWIRE_COMMIT_INTERVAL_MS`, `GRADWIRE_RETAIN_STEPS`, `GRADWIRE_RECOVERY` (fail,
    /// abort, redo), `GRADWIRE_RANKS_MIN` and `GRADWIRE_RANKS_MAX` as defaults.
    ///
    /// # Errors
    /// A [`Fault`] that names the variable that is wrong or missing; see [`crate::env::discover`].
    pub fn from_env() -> Result<Self, Fault> {
        let deadline = milliseconds("GRADWIRE_DEADLINE_MS", 1)?.unwrap_or(DEADLINE_DEFAULT);
        let commit_interval = milliseconds("GRADWIRE_COMMIT_INTERVAL_MS", 0)?.unwrap_or(COMMIT_INTERVAL_DEFAULT);
        let transport = match variable("GRADWIRE_TRANSPORT") {
            None => TransportChoice::default(),
            Some(text) => text.parse().map_err(|_| wrong("GRADWIRE_TRANSPORT", &text, "auto, shm or tcp"))?,
        };
        let wire = match variable("GRADWIRE_WIRE") {
            None => WireFormat::default(),
            Some(text) => text.parse().map_err(|_| wrong("GRADWIRE_WIRE", &text, "fp32, fp16 or bf16"))?,
        };
        let integrity = match variable("GRADWIRE_INTEGRITY").as_deref() {
            None | Some("links") => Integrity::Links,
            Some("all") => Integrity::All,
            Some(text) => return Err(wrong("GRADWIRE_INTEGRITY", text, "links or all")),
        };
        let retain_steps = match variable("GRADWIRE_RETAIN_STEPS") {
            None => 0,
            Some(text) => text.parse().map_err(|_| wrong("GRADWIRE_RETAIN_STEPS", &text, "a number of steps"))?,
        };
        let recovery = match variable("GRADWIRE_RECOVERY").as_deref() {
            None | Some("fail") => Recovery::Fail,
            Some("abort") => Recovery::Abort,
            Some("redo") => Recovery::Redo,
            Some(text) => return Err(wrong("GRADWIRE_RECOVERY", text, "fail, abort or redo")),
        };
        let ranks_min = ranks("GRADWIRE_RANKS_MIN")?.unwrap_or(1);
        let ranks_max = ranks("GRADWIRE_RANKS_MAX")?.unwrap_or(0);
        let place = Some(crate::env::from_process(deadline)?);
        let first_step = Step(0);
        Ok(Self {
            place,
            transport,
            wire,
            integrity,
            deadline,
            commit_interval,
            retain_steps,
            first_step,
            recovery,
            ranks_min,
            ranks_max,
            saves_kept: SAVES_KEPT_DEFAULT,
        })
    }

    /// What becomes of the job when a rank is lost: [`Recovery::Fail`] by default. Must be the same on every rank.
    #[must_use]
    pub const fn recovery(mut self, recovery: Recovery) -> Self {
        self.recovery = recovery;
        self
    }

    /// With fewer ranks than this the others do not go on, but fail at their deadline: 1 by default. Must be the same on
    /// every rank.
    #[must_use]
    pub const fn ranks_min(mut self, ranks: u32) -> Self {
        self.ranks_min = ranks;
        self
    }

    /// Processes that join the running job may have ranks below this, beyond those that it starts with: see
    /// [`Builder::join`]. Must be the same on every rank.
    #[must_use]
    pub const fn ranks_max(mut self, ranks: u32) -> Self {
        self.ranks_max = ranks;
        self
    }

    /// Which links to use between ranks.
    #[must_use]
    pub const fn transport(mut self, transport: TransportChoice) -> Self {
        self.transport = transport;
        self
    }

    /// How f32 tensors travel. Must be the same on every rank.
    #[must_use]
    pub const fn wire(mut self, wire: WireFormat) -> Self {
        self.wire = wire;
        self
    }

    /// Which payloads are checked.
    #[must_use]
    pub const fn integrity(mut self, integrity: Integrity) -> Self {
        self.integrity = integrity;
        self
    }

    /// How long joining, declaring and each operation may take: 30 seconds by default, a year at most. When it is over,
    /// every rank gets a fault that names who was missing.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Commits that follow each other within this time share a version record: 100 ms by default; zero writes one for
    /// each commit.
    #[must_use]
    pub const fn commit_interval(mut self, interval: Duration) -> Self {
        self.commit_interval = interval;
        self
    }

    /// Keeps the results of this many steps, for ranks that ask for copies over the broker: because a link to the owner
    /// spoils them again and again, or because they were not there when they were made. None by default: it takes one
    /// copy of each result, and memory for all results of so many steps.
    #[must_use]
    pub const fn retain_steps(mut self, steps: usize) -> Self {
        self.retain_steps = steps;
        self
    }

    /// The step that operations and commits count from: that of the checkpoint in a resumed job. Must be the same on
    /// every rank.
    #[must_use]
    pub const fn first_step(mut self, step: Step) -> Self {
        self.first_step = step;
        self
    }

    /// How many saves stay in a directory, the new one included ([`Group::save`]): 2 by default, 1 at least. With one
    /// there is nothing to go back to when it is damaged later.
    #[must_use]
    pub const fn saves_kept(mut self, saves: usize) -> Self {
        self.saves_kept = saves;
        self
    }

    /// Joins the job as one of the ranks that it starts with. Every rank must do so before the deadline.
    ///
    /// # Errors
    /// A [`Fault`] that names the rank, address or broker that was wrong or missing, and what to do; within the deadline,
    /// and at once where it is known at once. Nothing of this rank is left behind then.
    pub fn connect(mut self) -> Result<Group, Fault> {
        let start = self.start()?;
        if start.is_late() {
            let detail = "the job runs already: take part in it with Builder::join, which gets its state first";
            return Err(Fault::new(FaultKind::WorldMismatch, detail).at(start.hello.rank));
        }
        self.link(start, None)
    }

    /// Joins the job, with what it takes to take part in one that runs already: declares `specs`, all that the job ever
    /// declares, and, where the others are ahead, gets their state into `trainer` and applies what came since. A process
    /// takes part in a running job if it has the rank of one that was lost or left, or one below [`Builder::ranks_max`] that
    /// nobody has; the others go on meanwhile. That takes [`Recovery::Redo`] or [`Recovery::Abort`] on every rank, and
    /// that they all call [`Group::offer_state`] at the beginning of each step.
    ///
    /// Whichever it was, the trainer goes on with [`Joined::step`].
    ///
    /// # Errors
    /// As [`Builder::connect`] and [`Group::declare`]. What `trainer` holds is unspecified then.
    pub fn join(mut self, specs: &[TensorSpec], trainer: &mut dyn Trainer) -> Result<Joined, Fault> {
        let start = self.start()?;
        if !start.is_late() {
            let step = self.first_step;
            let group = self.link(start, None)?;
            let tensors = group.declare(specs)?;
            return Ok(Joined { group, tensors, step, transfer: None });
        }
        let Some(control) = start.control.clone() else {
            return Err(Fault::new(FaultKind::System, "a job of one rank has no others to join"));
        };
        let mut newcomer = Newcomer {
            control: &control,
            params: start.hello.clone(),
            endpoint: start.listeners.endpoint().clone(),
            wire: self.wire,
            specs,
            deadline: start.deadline,
            view: start.view.clone(),
            before: start.view.clone(),
        };
        let mut caught_up = newcomer.catch_up(trainer)?;
        let (view, before, deadline) = (newcomer.view, newcomer.before, start.deadline);
        self.first_step = Step(caught_up.outline.first_step);
        let declared = caught_up.outline.declared.clone();
        let start = Start { view, before: Some(before), ..start };
        let group = self.link(start, Some(declared))?;
        let commits = group.wait_until_told(deadline)?;
        caught_up.follow_to(commits, deadline, trainer)?;
        let transfer = Some(caught_up.transfer);
        drop(caught_up);
        let tensors = specs.iter().map(|spec| group.tensor(&spec.name)).collect::<Result<_, _>>()?;
        Ok(Joined { group, tensors, step: Step(self.first_step.0 + commits), transfer })
    }

    /// Finds the place, and joins the control plane.
    fn start(&mut self) -> Result<Start, Fault> {
        self.deadline = self.deadline.min(DEADLINE_MAX);
        if self.first_step.0 >= STEPS_MAX / 2 {
            let detail = format!("the first step is {}, but must be below {}", self.first_step.0, STEPS_MAX / 2);
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let place = self.place.take().ok_or_else(|| Fault::new(FaultKind::InvalidArgument, "no place in a job"))?;
        let deadline = Instant::now() + self.deadline;
        raise_descriptor_limit();
        let listeners =
            Listeners::bind(&ListenConfig { address: place.address, port: 0, interface: place.interface.clone() })?;
        let alone = place.world_size == 1 && self.recovery == Recovery::Fail;
        let (control, view) = if alone || place.broker.is_none() && place.world_size == 1 {
            let only = Member { rank: place.rank, id: [0; 16], endpoint: listeners.endpoint().clone() };
            (None, View { epoch: Epoch(1), id: [0; 16], members: vec![only] })
        } else {
            let request = self.join_request(&place, &listeners)?;
            let (control, view) = ControlPlane::join(request)?;
            (Some(Arc::new(control)), view)
        };
        let hello = HelloParams {
            secret: place.secret.clone(),
            job: job_tag(&place.secret, &place.instance),
            epoch: view.epoch,
            rank: place.rank,
            world_size: place.world_size.max(self.ranks_max),
        };
        Ok(Start { place, deadline, listeners, control, view, before: None, hello })
    }

    /// Opens the links to all members, and makes the group. `declared`: what the job that this rank joins has declared.
    fn link(&self, start: Start, declared: Option<Vec<Vec<Declaration>>>) -> Result<Group, Fault> {
        let Start { place, deadline, listeners, control, mut view, before, mut hello } = start;
        let choice = match self.transport {
            TransportChoice::Auto => Choice::Auto,
            TransportChoice::Shm => Choice::Shm,
            TransportChoice::Tcp => Choice::Tcp,
        };
        hello.epoch = view.epoch;
        let before: BTreeSet<RecordId> = before.iter().flat_map(|before| &before.members).map(|one| one.id).collect();
        let together: BTreeSet<RecordId> =
            view.members.iter().map(|member| member.id).filter(|id| !before.contains(id)).collect();
        let came = |id: RecordId| match (before.contains(&id), together.contains(&id)) {
            (true, _) => Ordering::Less,
            (_, true) => Ordering::Equal,
            _ => Ordering::Greater,
        };
        let mesh = MeshConfig {
            hello: hello.clone(),
            members: mesh_members(&view, &came),
            choice,
            deadline: deadline.saturating_duration_since(Instant::now()),
        };
        let mut watch = || {
            let Some(control) = &control else { return Ok(None) };
            let mut change = None;
            while let Some(event) = control.event() {
                match event {
                    ControlEvent::Failed(fault) | ControlEvent::Removed(fault) => return Err(fault),
                    ControlEvent::View(new) => {
                        let members = mesh_members(&new, &came);
                        change = Some(MeshChange { epoch: new.epoch, members });
                        view = new;
                    }
                    _ => {}
                }
            }
            Ok(change)
        };
        let (links, door) = listeners.connect(mesh, &mut watch).inspect_err(|fault| {
            // The others wait for links that will not come: they are told why.
            if let Some(control) = control.as_ref().filter(|_| fault.reporter.is_none() && declared.is_none()) {
                control.report(fault);
            }
        })?;
        hello.epoch = view.epoch;
        let saves = self.save_identity(&place);
        let mut guard = place.guard;
        guard.all_joined();
        let config = SessionConfig {
            rank: place.rank,
            world_size: place.world_size,
            epoch: view.epoch,
            job: hello.job,
            first_step: self.first_step,
            timing: Timing { deadline_ns: self.deadline.as_nanos() as u64, ..Timing::default() },
            copies: self.retain_steps > 0 && control.is_some(),
            // A rank on its own has nobody to lose.
            recovery: if control.is_some() { self.recovery } else { Recovery::Fail },
        };
        let parts = Parts {
            transport: Box::new(links),
            control,
            guard: Some(guard),
            crowded: thread::available_parallelism().is_ok_and(|cores| place.local_world_size as usize > cores.get()),
            processes: view.members.iter().map(|member| (member.rank, member.id)).collect(),
            declared,
            saves,
            door: (self.recovery != Recovery::Fail).then_some((door, hello)),
        };
        self.assemble(config, parts)
    }

    fn save_identity(&self, place: &Place) -> SaveIdentity {
        SaveIdentity {
            job: if place.has_given_name() { place.job.to_string() } else { String::new() },
            model_version: place.model_version.as_ref().map(ToString::to_string).unwrap_or_default(),
            keep: self.saves_kept.max(1),
        }
    }

    fn join_request(&self, place: &Place, listeners: &Listeners) -> Result<JoinRequest, Fault> {
        let broker = place.broker.clone().ok_or_else(|| {
            let detail = "no broker was given: set GRADWIRE_BROKER to its URL on every rank";
            Fault::new(FaultKind::BrokerUnreachable, detail)
        })?;
        let mut config = JobConfig::new(place.job.clone(), place.instance, place.secret.clone(), broker);
        config.model_version.clone_from(&place.model_version);
        config.tenant.clone_from(&place.tenant);
        let policy = match self.recovery {
            Recovery::Fail => Policy::Fixed,
            Recovery::Abort | Recovery::Redo => {
                Policy::Elastic { ranks_min: self.ranks_min, ranks_max: self.ranks_max }
            }
        };
        Ok(JoinRequest {
            config,
            rank: place.rank,
            world_size: place.world_size,
            policy,
            endpoint: listeners.endpoint().clone(),
            deadline: self.deadline,
            commit_interval: self.commit_interval,
        })
    }

    /// A group over links that are up.
    fn assemble(&self, config: SessionConfig, parts: Parts) -> Result<Group, Fault> {
        let Parts { transport, control, guard, crowded, processes, declared, saves, door } = parts;
        let identity = Identity {
            rank: config.rank,
            world_size: config.world_size,
            wire: self.wire,
            deadline: self.deadline,
            first_step: self.first_step,
            recovery: config.recovery,
        };
        let retained = config.copies.then(|| Arc::new(Retained::new(self.retain_steps)));
        if let (Some(control), Some(retained)) = (&control, &retained) {
            control.hold_copies(retained.clone())?;
        }
        let holder = door.is_some().then(|| Arc::new(Holder::new(self.first_step)));
        if let (Some(holder), Some(declared)) = (&holder, &declared) {
            holder.declared(declared);
        }
        let joins = declared.is_some();
        let engine = EngineConfig {
            session: config,
            integrity: self.integrity,
            retained,
            holder: holder.clone(),
            processes,
            joins: declared,
        };
        let engine = Engine::new(engine, transport);
        let (driver, thread) = Driver::start(engine, control.clone(), crowded)?;
        let keeper = match (door, &holder) {
            (Some((door, hello)), Some(holder)) => {
                let weak = Arc::downgrade(&driver);
                let arrived = move |arrival| {
                    if let Some(driver) = weak.upgrade() {
                        driver.arrived(arrival);
                    }
                };
                let keeper = DoorKeeper::start(door, hello, Arc::clone(holder), arrived)?;
                driver.open_door(keeper.bell());
                Some(keeper)
            }
            _ => None,
        };
        let parts = GroupParts { control, guard, saves, door: (keeper, holder), joins };
        Group::new(identity, driver, thread, parts)
    }

    /// A group over links that a test made: no place.
    #[cfg(test)]
    pub(crate) fn over(
        self,
        rank: u32,
        world_size: u32,
        transport: Box<dyn Transport>,
        control: Option<Arc<ControlPlane>>,
    ) -> Result<Group, Fault> {
        let timing = Timing { deadline_ns: self.deadline.as_nanos() as u64, ..Timing::default() };
        let config = SessionConfig {
            rank: gradwire_proto::Rank(rank),
            world_size,
            epoch: Epoch(1),
            job: JobTag([7; 16]),
            first_step: self.first_step,
            timing,
            copies: self.retain_steps > 0 && control.is_some(),
            recovery: self.recovery,
        };
        let saves = SaveIdentity { keep: self.saves_kept.max(1), ..SaveIdentity::default() };
        let processes = (0..world_size).map(|rank| (gradwire_proto::Rank(rank), [0; 16])).collect();
        let (guard, declared, door) = (None, None, None);
        self.assemble(config, Parts { transport, control, guard, crowded: true, processes, declared, saves, door })
    }

    /// Defaults, for [`Builder::over`].
    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        Self {
            place: None,
            transport: TransportChoice::Auto,
            wire: WireFormat::Fp32,
            integrity: Integrity::Links,
            // Machines that run tests are busy ones.
            deadline: Duration::from_secs(60),
            commit_interval: COMMIT_INTERVAL_DEFAULT,
            retain_steps: 0,
            first_step: Step(0),
            recovery: Recovery::Fail,
            ranks_min: 1,
            ranks_max: 0,
            saves_kept: SAVES_KEPT_DEFAULT,
        }
    }
}

/// A process that joined the control plane.
struct Start {
    place: Place,
    deadline: Instant,
    listeners: Listeners,
    control: Option<Arc<ControlPlane>>,
    view: View,
    /// The view when this process joined the control plane, where it is none of its members.
    before: Option<View>,
    hello: HelloParams,
}

impl Start {
    /// Whether the job runs without this process.
    fn is_late(&self) -> bool {
        self.control.as_ref().is_some_and(|control| self.view.member(control.join_id()).is_none())
    }
}

/// What a group is made of.
struct Parts {
    transport: Box<dyn Transport>,
    control: Option<Arc<ControlPlane>>,
    guard: Option<Guard>,
    crowded: bool,
    processes: Vec<(Rank, RecordId)>,
    declared: Option<Vec<Vec<Declaration>>>,
    saves: SaveIdentity,
    door: Option<(Door, HelloParams)>,
}

/// A place in a job, however far that is.
#[derive(Debug)]
pub struct Joined {
    /// The group.
    pub group: Group,
    /// The tensors, in the order of their specs.
    pub tensors: Vec<Tensor>,
    /// The first step that this rank takes part in, as [`Version::step`](crate::Version::step) counts them.
    pub step: Step,
    /// How the state came here, where the job ran already.
    pub transfer: Option<Transfer>,
}

fn mesh_members(view: &View, came: &dyn Fn(RecordId) -> Ordering) -> Vec<MeshMember> {
    let member =
        |member: &Member| MeshMember { rank: member.rank, endpoint: member.endpoint.clone(), came: came(member.id) };
    view.members.iter().map(member).collect()
}

/// Every buffer and link has a descriptor: the soft limit, often 1,024, is raised as far as this process may.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current.is_some() && limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(errno) = rustix::process::setrlimit(Resource::Nofile, raised) {
            tracing::debug!(%errno, "the limit on open files stays as it is");
        }
    }
}

/// What binds frames to the job: nobody without the secret can know it.
fn job_tag(secret: &Secret, instance: &[u8; 16]) -> JobTag {
    let proof = secret.proof("gradwire job tag", &[instance]);
    let mut tag = [0; 16];
    tag.copy_from_slice(&proof[..16]);
    JobTag(tag)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A number of ranks from the environment.
fn ranks(name: &str) -> Result<Option<u32>, Fault> {
    let Some(text) = variable(name) else { return Ok(None) };
    let number = text.parse().ok().filter(|number| (1..=WORLD_SIZE_MAX).contains(number));
    let expected = format!("a number of ranks from 1 to {WORLD_SIZE_MAX}");
    number.map(Some).ok_or_else(|| wrong(name, &text, &expected))
}

/// A number of milliseconds from the environment.
fn milliseconds(name: &str, least: u64) -> Result<Option<Duration>, Fault> {
    let Some(text) = variable(name) else { return Ok(None) };
    let number = text.parse::<u64>().ok().filter(|number| *number >= least);
    let expected = format!("a number of milliseconds, at least {least}");
    number.map(|number| Some(Duration::from_millis(number))).ok_or_else(|| wrong(name, &text, &expected))
}

fn wrong(name: &str, value: &str, expected: &str) -> Fault {
    Fault::new(FaultKind::InvalidArgument, format!("{name} is '{value}', but must be {expected}"))
}
