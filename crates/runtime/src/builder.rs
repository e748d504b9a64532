//! Joining a job: place, rendezvous, links, engine.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradwire_control::{COMMIT_INTERVAL_DEFAULT, ControlEvent, ControlPlane, JobConfig, JoinRequest, Policy};
use gradwire_proto::frame::JobTag;
use gradwire_proto::hello::HelloParams;
use gradwire_proto::limits::STEPS_MAX;
use gradwire_proto::session::{Recovery, SessionConfig, Timing};
use gradwire_proto::{Epoch, Fault, FaultKind, Secret, Step, WireFormat};
use gradwire_transport::Transport;
use gradwire_transport::establish::{ListenConfig, Listeners};
use gradwire_transport::mesh::{Choice, MeshConfig};
use rustix::process::{Resource, Rlimit};

use crate::driver::Driver;
use crate::durable::SaveIdentity;
use crate::engine::{Engine, EngineConfig};
use crate::env::{Guard, Place};
use crate::group::{Group, Identity};
use crate::retained::Retained;
use crate::types::{Integrity, TransportChoice};

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
    saves_kept: usize,
}

impl Builder {
    /// Finds this process's place from the environment that `gradwire launch`, `mpirun`, `srun` or `torchrun` made, and
    /// takes `GRADWIRE_TRANSPORT` (auto, shm, tcp), `GRADWIRE_WIRE` (fp32, fp16, bf16), `GRADWIRE_INTEGRITY` (links,
    /// all), `GRADWIRE_DEADLINE_MS`, `GRADWIRE_COMMIT_INTERVAL_MS`, `GRADWIRE_RETAIN_STEPS`, `GRADWIRE_RECOVERY` (fail,
    /// abort, redo) and `GRADWIRE_RANKS_MIN` as defaults.
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
        let ranks_min = match variable("GRADWIRE_RANKS_MIN") {
            None => 1,
            Some(text) => {
                let number = text.parse().ok().filter(|number| *number > 0);
                number.ok_or_else(|| wrong("GRADWIRE_RANKS_MIN", &text, "a number of ranks, at least 1"))?
            }
        };
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

    /// Joins the job. Every rank must do so before the deadline.
    ///
    /// # Errors
    /// A [`Fault`] that names the rank, address or broker that was wrong or missing, and what to do; within the deadline,
    /// and at once where it is known at once. Nothing of this rank is left behind then.
    pub fn connect(mut self) -> Result<Group, Fault> {
        self.deadline = self.deadline.min(DEADLINE_MAX);
        if self.first_step.0 >= STEPS_MAX / 2 {
            let detail = format!("the first step is {}, but must be below {}", self.first_step.0, STEPS_MAX / 2);
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        let place = self.place.take().ok_or_else(|| Fault::new(FaultKind::InvalidArgument, "no place in a job"))?;
        let deadline = Instant::now() + self.deadline;
        raise_descriptor_limit();
        let crowded = thread::available_parallelism().is_ok_and(|cores| place.local_world_size as usize > cores.get());
        let listeners =
            Listeners::bind(&ListenConfig { address: place.address, port: 0, interface: place.interface.clone() })?;
        let (control, epoch, members) = if place.world_size == 1 {
            (None, Epoch(1), vec![listeners.endpoint().clone()])
        } else {
            let request = self.join_request(&place, &listeners)?;
            let (control, view) = ControlPlane::join(request)?;
            let members = view.members.into_iter().map(|member| member.endpoint).collect();
            (Some(Arc::new(control)), view.epoch, members)
        };
        let hello = HelloParams {
            secret: place.secret.clone(),
            job: job_tag(&place.secret, &place.instance),
            epoch,
            rank: place.rank,
            world_size: place.world_size,
        };
        let mesh = MeshConfig {
            hello: hello.clone(),
            members,
            choice: match self.transport {
                TransportChoice::Auto => Choice::Auto,
                TransportChoice::Shm => Choice::Shm,
                TransportChoice::Tcp => Choice::Tcp,
            },
            deadline: deadline.saturating_duration_since(Instant::now()),
        };
        let stop = || control.as_ref().and_then(|control| failure(control));
        let links = listeners.connect(&mesh, &stop).inspect_err(|fault| {
            // The others wait for links that will not come: they are told why.
            if let Some(control) = control.as_ref().filter(|_| fault.reporter.is_none()) {
                control.report(fault);
            }
        })?;
        let saves = self.save_identity(&place);
        let mut guard = place.guard;
        guard.all_joined();
        let config = SessionConfig {
            rank: place.rank,
            world_size: place.world_size,
            epoch,
            job: hello.job,
            first_step: self.first_step,
            timing: Timing { deadline_ns: self.deadline.as_nanos() as u64, ..Timing::default() },
            copies: self.retain_steps > 0 && control.is_some(),
            // A rank on its own has nobody to lose.
            recovery: if control.is_some() { self.recovery } else { Recovery::Fail },
        };
        self.assemble(config, Box::new(links), control, Some(guard), crowded, saves)
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
            Recovery::Abort | Recovery::Redo => Policy::Elastic { ranks_min: self.ranks_min },
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
    fn assemble(
        &self,
        config: SessionConfig,
        transport: Box<dyn Transport>,
        control: Option<Arc<ControlPlane>>,
        guard: Option<Guard>,
        crowded: bool,
        saves: SaveIdentity,
    ) -> Result<Group, Fault> {
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
        let engine = EngineConfig { session: config, integrity: self.integrity, retained };
        let engine = Engine::new(engine, transport);
        let (driver, thread) = Driver::start(engine, control.clone(), crowded)?;
        Group::new(identity, driver, thread, control, guard, saves)
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
        self.assemble(config, transport, control, None, true, saves)
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
            saves_kept: SAVES_KEPT_DEFAULT,
        }
    }
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

/// A failure that another rank reported.
fn failure(control: &ControlPlane) -> Option<Fault> {
    std::iter::from_fn(|| control.event()).find_map(|event| match event {
        ControlEvent::Failed(fault) => Some(fault),
        _ => None,
    })
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
