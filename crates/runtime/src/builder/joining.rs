//! From a place to a group: rendezvous, links, engine.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradwire_control::{ControlEvent, ControlPlane, JobConfig, JoinRequest, Policy};
use gradwire_proto::frame::JobTag;
use gradwire_proto::hello::HelloParams;
use gradwire_proto::limits::{HEARTBEAT_MS_MAX, SILENCE_HEARTBEATS_MIN, STEPS_MAX};
use gradwire_proto::manifest::Declaration;
use gradwire_proto::membership::{Member, RecordId, View};
use gradwire_proto::session::{Recovery, SessionConfig, Timing};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Secret};
use gradwire_transport::Transport;
use gradwire_transport::establish::{Door, ListenConfig, Listeners};
use gradwire_transport::mesh::{Choice, MeshChange, MeshConfig, MeshMember, MeshWatch};
use rustix::process::{Resource, Rlimit};

use super::{Builder, SILENCE_DEFAULT};
use crate::driver::Driver;
use crate::durable::SaveIdentity;
use crate::engine::{Engine, EngineConfig};
use crate::env::{Guard, Place};
use crate::group::{Group, GroupParts, Identity};
use crate::notice::NoticeWatch;
use crate::retained::Retained;
use crate::transfer::{DoorKeeper, Holder};
use crate::types::TransportChoice;

/// Longer deadlines are taken as this: a year.
const DEADLINE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// After so long without a link, or a third of the deadline, the others go on without a rank.
const LINK_PATIENCE_MAX: Duration = Duration::from_secs(10);
/// How long a process that does not take part after all may take to say so.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// A process that joined the control plane.
pub(super) struct Start {
    pub(super) place: Place,
    pub(super) deadline: Instant,
    pub(super) listeners: Listeners,
    pub(super) control: Option<Arc<ControlPlane>>,
    pub(super) view: View,
    /// The view when this process joined the control plane, where it is none of its members.
    pub(super) before: Option<View>,
    pub(super) hello: HelloParams,
}

impl Start {
    /// Whether the job runs without this process.
    pub(super) fn is_late(&self) -> bool {
        self.control.as_ref().is_some_and(|control| self.view.member(control.join_id()).is_none())
    }

    /// Says in the control log what this process met that is no member. It is nobody else's affair, but a launcher learns
    /// whether starting it again could help.
    pub(super) fn tell(&self, fault: Fault, may_be_member: bool) -> Fault {
        if let Some(control) = self.control.as_ref().filter(|_| fault.reporter.is_none()) {
            if may_be_member {
                // A member's fault would be that of all: the others go on without it as they did before.
                if let Err(fault) = control.leave(LEAVE_MAX, LEAVE_MAX) {
                    tracing::debug!(%fault, "the others were not told that this rank does not take part");
                }
            } else {
                control.report(&fault);
            }
        }
        fault
    }
}

/// What a group is made of.
pub(super) struct Parts {
    pub(super) transport: Box<dyn Transport>,
    pub(super) control: Option<Arc<ControlPlane>>,
    pub(super) guard: Option<Guard>,
    pub(super) crowded: bool,
    pub(super) processes: Vec<(Rank, RecordId)>,
    pub(super) declared: Option<Vec<Vec<Declaration>>>,
    pub(super) saves: SaveIdentity,
    pub(super) door: Option<(Door, HelloParams)>,
}

impl Builder {
    /// Finds the place, and joins the control plane.
    pub(super) fn start(&mut self) -> Result<Start, Fault> {
        self.deadline = self.deadline.min(DEADLINE_MAX);
        self.silence = self.silence.min(DEADLINE_MAX);
        if self.first_step.0 >= STEPS_MAX / 2 {
            let detail = format!("the first step is {}, but must be below {}", self.first_step.0, STEPS_MAX / 2);
            return Err(Fault::new(FaultKind::InvalidArgument, detail));
        }
        self.check_presence()?;
        let place = self.place.take().ok_or_else(|| Fault::new(FaultKind::InvalidArgument, "no place in a job"))?;
        let deadline = Instant::now() + self.deadline;
        raise_descriptor_limit();
        let listeners = Listeners::bind(&ListenConfig {
            address: place.address,
            port: place.port,
            interface: place.interface.clone(),
            advertise: place.advertise,
        })?;
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
    pub(super) fn link(&self, start: Start, declared: Option<Vec<Vec<Declaration>>>) -> Result<Group, Fault> {
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
        // A newcomer has no say in who is lost.
        let goes_on = self.recovery != Recovery::Fail && declared.is_none();
        let patience = goes_on.then(|| LINK_PATIENCE_MAX.min(self.deadline / 3));
        let joins = declared.is_some();
        let mut watch = Watch { control: control.as_deref(), view: &mut view, came: &came, patience, joins };
        let (links, door) = listeners.connect(mesh, &mut watch).inspect_err(|fault| {
            // Where this machine lacks something, and the others can go on without this rank, it only leaves.
            let leaves = goes_on && fault.kind.is_shortage();
            // Elsewhere the others wait for links that will not come: they are told why.
            let tells = fault.reporter.is_none() && declared.is_none() && !leaves;
            if let Some(control) = control.as_ref().filter(|_| tells) {
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
            timing: self.timing(),
            copies: self.retain_steps > 0 && control.is_some(),
            // A rank on its own has nobody to lose.
            recovery: if control.is_some() { self.recovery } else { Recovery::Fail },
            ranks_min: self.ranks_min,
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

    fn timing(&self) -> Timing {
        Timing {
            deadline_ns: self.deadline.as_nanos() as u64,
            heartbeat_ns: self.heartbeat.as_nanos() as u64,
            silence_ns: self.silence.as_nanos() as u64,
            ..Timing::default()
        }
    }

    /// Whether what is said of heartbeats and silence fits together.
    fn check_presence(&self) -> Result<(), Fault> {
        let (heartbeat, silence) = (self.heartbeat.as_millis(), self.silence.as_millis());
        let wrong = |detail: String| Err(Fault::new(FaultKind::InvalidArgument, detail));
        if !(1..=u128::from(HEARTBEAT_MS_MAX)).contains(&heartbeat) {
            return wrong(format!(
                "a heartbeat every {heartbeat} ms (GRADWIRE_HEARTBEAT_MS): 1 to {HEARTBEAT_MS_MAX} ms are possible"
            ));
        }
        if silence < heartbeat * u128::from(SILENCE_HEARTBEATS_MIN) {
            return wrong(format!(
                "a silence limit of {silence} ms (GRADWIRE_SILENCE_MS) and a heartbeat every {heartbeat} ms \
                 (GRADWIRE_HEARTBEAT_MS): the limit has to be at least {SILENCE_HEARTBEATS_MIN} heartbeats, or ranks are \
                 lost that are only late"
            ));
        }
        let raised = self.silence > SILENCE_DEFAULT;
        if raised && self.recovery != Recovery::Fail && self.silence >= self.deadline {
            return wrong(format!(
                "a silence limit of {silence} ms (GRADWIRE_SILENCE_MS) and a deadline of {} ms (GRADWIRE_DEADLINE_MS): the \
                 job would fail before a silent rank is lost",
                self.deadline.as_millis()
            ));
        }
        Ok(())
    }

    pub(super) fn save_identity(&self, place: &Place) -> SaveIdentity {
        SaveIdentity {
            job: if place.has_given_name() { place.job.to_string() } else { String::new() },
            model_version: place.model_version.as_ref().map(ToString::to_string).unwrap_or_default(),
            keep: self.saves_kept.max(1),
            run: *place.instance.first_chunk().unwrap_or(&[0; 8]),
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
            Recovery::Abort | Recovery::Redo => Policy::Elastic { ranks_max: self.ranks_max },
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
    pub(super) fn assemble(&self, config: SessionConfig, parts: Parts) -> Result<Group, Fault> {
        let Parts { transport, control, guard, crowded, processes, declared, saves, door } = parts;
        let identity = Identity {
            rank: config.rank,
            world_size: config.world_size,
            wire: self.wire,
            deadline: self.deadline,
            ranks_wait: self.ranks_wait.map_or(self.deadline, |patience| patience.min(DEADLINE_MAX)),
            first_step: self.first_step,
            recovery: config.recovery,
            agrees: config.recovery != Recovery::Fail || self.stop_on_sigterm || config.world_size == 1,
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
        let keep = |((door, hello), holder)| {
            let weak = Arc::downgrade(&driver);
            let arrived = move |arrival| {
                if let Some(driver) = weak.upgrade() {
                    driver.arrived(arrival);
                }
            };
            DoorKeeper::start(door, hello, holder, arrived).inspect(|keeper| driver.open_door(keeper.bell()))
        };
        let door = door.zip(holder).map(keep).transpose()?;
        let notice = self.stop_on_sigterm.then(NoticeWatch::start).transpose()?;
        let parts = GroupParts { control, guard, saves, door, joins, notice };
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
        let config = SessionConfig {
            rank: gradwire_proto::Rank(rank),
            world_size,
            epoch: Epoch(1),
            job: JobTag([7; 16]),
            first_step: self.first_step,
            timing: self.timing(),
            copies: self.retain_steps > 0 && control.is_some(),
            recovery: self.recovery,
            ranks_min: self.ranks_min,
        };
        let saves = SaveIdentity { keep: self.saves_kept.max(1), ..SaveIdentity::default() };
        let processes = (0..world_size).map(|rank| (gradwire_proto::Rank(rank), [rank as u8; 16])).collect();
        let (guard, declared, door) = (None, None, None);
        self.assemble(config, Parts { transport, control, guard, crowded: true, processes, declared, saves, door })
    }
}

/// What a rank hears of its job while its links come up.
struct Watch<'a> {
    control: Option<&'a ControlPlane>,
    view: &'a mut View,
    came: &'a dyn Fn(RecordId) -> Ordering,
    patience: Option<Duration>,
    /// The job runs.
    joins: bool,
}

impl MeshWatch for Watch<'_> {
    fn change(&mut self) -> Result<Option<MeshChange>, Fault> {
        let Some(control) = self.control else { return Ok(None) };
        let mut change = None;
        while let Some(event) = control.event() {
            match event {
                ControlEvent::Failed(fault) | ControlEvent::Removed(fault) => return Err(fault),
                ControlEvent::View(new) => {
                    change = Some(MeshChange { epoch: new.epoch, members: mesh_members(&new, self.came) });
                    *self.view = new;
                }
                _ => {}
            }
        }
        Ok(change)
    }

    fn patience(&self) -> Option<Duration> {
        self.patience
    }

    fn lost(&mut self, fault: Fault) -> Result<(), Fault> {
        match (self.control, self.patience, fault.rank) {
            (Some(control), Some(_), Some(rank)) => {
                tracing::warn!(%fault, "a rank is lost while links come up");
                if let Some(member) = self.view.rank(rank) {
                    control.suspect(member.id, fault.detail);
                }
                Ok(())
            }
            // Another newcomer, which the members notice too: there is a view without it then.
            (_, _, Some(rank)) if self.joins && self.has_come_with(rank) => Ok(()),
            _ => Err(fault),
        }
    }
}

impl Watch<'_> {
    fn has_come_with(&self, rank: Rank) -> bool {
        self.view.rank(rank).is_some_and(|member| (self.came)(member.id) == Ordering::Equal)
    }
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
