//! Joining a job: what can be said about how, and the ways in.

mod joining;

use std::time::Duration;

use gradwire_control::COMMIT_INTERVAL_DEFAULT;
use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::session::Recovery;
use gradwire_proto::{Fault, FaultKind, Step, WireFormat};

use crate::env::Place;
use crate::group::Group;
use crate::handle::Tensor;
use crate::state::Trainer;
use crate::transfer::{Newcomer, Rival, parts_mut_of, parts_of};
use crate::types::{Integrity, TensorSpec, Transfer, TransportChoice};
use joining::Start;

/// How long joining and each operation may take, unless something else is said.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(30);
/// How often peers are told that this rank is there, and how long one may be silent, unless something else is said.
const HEARTBEAT_DEFAULT: Duration = Duration::from_millis(500);
const SILENCE_DEFAULT: Duration = Duration::from_millis(2500);
/// How many saves are kept, unless something else is said.
const SAVES_KEPT_DEFAULT: usize = 2;

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
    ranks_wait: Option<Duration>,
    saves_kept: usize,
    stop_on_sigterm: bool,
    heartbeat: Duration,
    silence: Duration,
}

impl Builder {
    /// Finds this process's place from the environment that `gradwire launch`, `mpirun`, `srun` or `torchrun` made, and
    /// takes `GRADWIRE_TRANSPORT` (auto, shm, tcp), `GRADWIRE_WIRE` (fp32, fp16, bf16), `GRADWIRE_INTEGRITY` (links,
    /// all), `GRADWIRE_DEADLINE_MS`, `GRADWIRE_COMMIT_INTERVAL_MS`, `GRADWIRE_RETAIN_STEPS`, `GRADWIRE_RECOVERY` (fail,
    /// abort, redo), `GRADWIRE_HEARTBEAT_MS`, `GRADWIRE_SILENCE_MS`, `GRADWIRE_RANKS_MIN`, `GRADWIRE_RANKS_MAX` and
    /// `GRADWIRE_RANKS_WAIT_MS` as defaults. Warns once of each variable `GRADWIRE_*` that there is none of in gradwire: it
    /// may be misspelt.
    ///
    /// # Errors
    /// A [`Fault`] that names the variable that is wrong or missing; see [`crate::env::discover`].
    pub fn from_env() -> Result<Self, Fault> {
        crate::env::warn_of_unknown();
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
        let heartbeat = milliseconds("GRADWIRE_HEARTBEAT_MS", 1)?.unwrap_or(HEARTBEAT_DEFAULT);
        let silence = milliseconds("GRADWIRE_SILENCE_MS", 1)?.unwrap_or(SILENCE_DEFAULT);
        let ranks_min = ranks("GRADWIRE_RANKS_MIN")?.unwrap_or(1);
        let ranks_max = ranks("GRADWIRE_RANKS_MAX")?.unwrap_or(0);
        let ranks_wait = milliseconds("GRADWIRE_RANKS_WAIT_MS", 1)?;
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
            ranks_wait,
            saves_kept: SAVES_KEPT_DEFAULT,
            stop_on_sigterm: false,
            heartbeat,
            silence,
        })
    }

    /// What becomes of the job when a rank is lost: [`Recovery::Fail`] by default. Must be the same on every rank.
    #[must_use]
    pub const fn recovery(mut self, recovery: Recovery) -> Self {
        self.recovery = recovery;
        self
    }

    /// With fewer ranks than this the others do not go on, but wait for ranks that join, for [`Builder::ranks_wait`]: 1 by
    /// default. Must be the same on every rank.
    #[must_use]
    pub const fn ranks_min(mut self, ranks: u32) -> Self {
        self.ranks_min = ranks;
        self
    }

    /// How long [`Group::offer_state`] waits for ranks that join, where fewer than [`Builder::ranks_min`] are left: as long
    /// as an operation may take unless this says otherwise, a year at most. Machines that take long to come want more.
    #[must_use]
    pub const fn ranks_wait(mut self, patience: Duration) -> Self {
        self.ranks_wait = Some(patience);
        self
    }

    /// Processes that join the running job may have ranks below this, beyond those that it starts with: see
    /// [`Builder::join`]. Must be the same on every rank.
    #[must_use]
    pub const fn ranks_max(mut self, ranks: u32) -> Self {
        self.ranks_max = ranks;
        self
    }

    /// How often this rank tells every other that it is there, where lost ranks do not fail the job: every 500 ms by
    /// default, a minute at most. It does so by itself, however long the trainer computes.
    #[must_use]
    pub const fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// A rank from which nothing came for so long is lost: 2.5 seconds by default, and not less than three heartbeats, its
    /// own or the other's, so that ranks may have different settings. One whose process ends is lost at once.
    #[must_use]
    pub const fn silence(mut self, limit: Duration) -> Self {
        self.silence = limit;
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

    /// While the group lives, SIGTERM does not end the process, but is notice that it is to end: [`Commit::next`] says with
    /// which step. Only for programs that look at it, so no by default. Must be the same on every rank.
    ///
    /// A rank that was given notice leaves with the first step that ends a second later, and with it all others that were
    /// given notice by then ([`Next::Leave`]): the rest go on without them, and their contributions count. As soon as all
    /// were, as when the launcher or a scheduler ends the job, all end with the step ([`Next::End`]). With
    /// [`Recovery::Fail`], where nobody can go on without a rank, notice to one is notice to all; commits wait for all
    /// ranks there too, then. So does notice to the rank that serves the job's broker, where nobody named one.
    ///
    /// [`Commit::next`]: crate::Commit::next
    /// [`Next::Leave`]: crate::Next::Leave
    /// [`Next::End`]: crate::Next::End
    #[must_use]
    pub const fn stop_on_sigterm(mut self, stop: bool) -> Self {
        self.stop_on_sigterm = stop;
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
            let rank = start.hello.rank;
            let holder = start.view.rank(rank).map_or_else(String::new, |member| {
                let host = &member.endpoint.hostname;
                format!(
                    ", with a process on '{host}' as {rank}: if that one lives, give this one a rank that nobody has"
                )
            });
            let detail =
                format!("the job runs already{holder}; take part in it with Builder::join, which gets its state first");
            let fault = Fault::new(FaultKind::WorldMismatch, detail).at(rank);
            return Err(start.tell(fault, false));
        }
        self.link(start, None)
    }

    /// Joins the job, with what it takes to take part in one that runs already: declares `specs`, all that the job ever
    /// declares, and, where the others are ahead, gets their state into `trainer` and applies what came since. A process
    /// takes part in a running job if it has the rank of one that was lost or left, or one below [`Builder::ranks_max`] that
    /// nobody has; the others go on meanwhile. That takes [`Recovery::Redo`] or [`Recovery::Abort`] on every rank, and
    /// that they all call [`Group::offer_state`] at the beginning of each step.
    ///
    /// Whichever it was, the trainer goes on with [`Joined::step`]. That [`Trainer::apply`] does what the others did is
    /// taken on trust: states are compared where members give them away, not afterwards.
    ///
    /// # Errors
    /// As [`Builder::connect`] and [`Group::declare`]; `InvalidArgument` for a part of the state that is nameless or named
    /// twice, or not the same in [`State::parts_mut`](crate::State::parts_mut) as in [`State::parts`](crate::State::parts);
    /// `WorldMismatch` where this rank lives already, as another process; `RankDied` when no rank is left that has the state; `RankLeft` when the job is over, its ranks having left in good
    /// order. What `trainer` holds is unspecified then.
    pub fn join(mut self, specs: &[TensorSpec], trainer: &mut dyn Trainer) -> Result<Joined, Fault> {
        let parts = parts_of(&trainer.parts())?;
        parts_mut_of(trainer, &parts)?;
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
            ready: None,
            rival: Rival::default(),
            last: None,
        };
        let caught_up = newcomer.catch_up(trainer);
        let mut caught_up = caught_up.map_err(|fault| start.tell(fault, newcomer.ready.is_some()))?;
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
            ranks_wait: None,
            saves_kept: SAVES_KEPT_DEFAULT,
            stop_on_sigterm: false,
            heartbeat: HEARTBEAT_DEFAULT,
            silence: SILENCE_DEFAULT,
        }
    }
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
