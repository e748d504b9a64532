//! Which rank of how many this process is, by the variables that launchers set. A pure function of them.

use gradwire_proto::limits::WORLD_SIZE_MAX;
use gradwire_proto::{Fault, FaultKind, Rank};

use super::{Launcher, Variables};

/// Step numbers from here on are no steps: Slurm's batch script, extern and interactive steps.
const SLURM_STEPS_END: u64 = 0xffff_fff0;

/// A process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) local_rank: u32,
    pub(super) local_world_size: u32,
    pub(super) launcher: Launcher,
    /// What the launcher calls this run; the same for all ranks, another for every run that is alive. None where
    /// nothing says so: then ranks have their parent process in common.
    pub(super) session: Option<String>,
}

impl Position {
    /// Finds the place. Without a launcher's variables it is rank 0 of 1.
    pub(super) fn find(variables: Variables<'_>) -> Result<Self, Fault> {
        for family in FAMILIES {
            if let Some(position) = family.read(variables)? {
                return Ok(position);
            }
        }
        let single = Self {
            rank: Rank(0),
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            launcher: Launcher::None,
            session: None,
        };
        Ok(single)
    }

    /// Whether all ranks are on this host, as far as the launcher tells.
    pub(super) const fn one_host(&self) -> bool {
        self.local_world_size == self.world_size
    }
}

/// The variables of one kind of launcher.
struct Family {
    rank: &'static str,
    /// Alternatives, the best first.
    world_size: &'static [&'static str],
    local_rank: &'static str,
    local_world_size: &'static [&'static str],
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Own,
    Torch,
    OpenMpi,
    Pmi,
    Slurm,
}

const FAMILIES: [Family; 5] = [
    Family {
        rank: "GRADWIRE_RANK",
        world_size: &["GRADWIRE_WORLD_SIZE"],
        local_rank: "GRADWIRE_LOCAL_RANK",
        local_world_size: &["GRADWIRE_LOCAL_WORLD_SIZE"],
        kind: Kind::Own,
    },
    Family {
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_world_size: &["LOCAL_WORLD_SIZE"],
        kind: Kind::Torch,
    },
    Family {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        kind: Kind::OpenMpi,
    },
    Family {
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_world_size: &["MPI_LOCALNRANKS"],
        kind: Kind::Pmi,
    },
    Family {
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: "SLURM_LOCALID",
        local_world_size: &[],
        kind: Kind::Slurm,
    },
];

impl Family {
    fn read(&self, variables: Variables<'_>) -> Result<Option<Position>, Fault> {
        if self.kind == Kind::Slurm && !in_slurm_step(variables) {
            return Ok(None);
        }
        let world_name = self.world_size.iter().find(|name| variables(name).is_some()).unwrap_or(&self.world_size[0]);
        let (rank, world_size) = match (number(variables, self.rank)?, number(variables, world_name)?) {
            (None, None) => return Ok(None),
            (Some(rank), Some(world_size)) => (rank, world_size),
            (Some(rank), None) => return Err(half_set(self.rank, rank, world_name)),
            (None, Some(world_size)) => return Err(half_set(world_name, world_size, self.rank)),
        };
        if self.kind == Kind::Slurm && world_size <= 1 {
            return Ok(None);
        }
        if world_size == 0 || world_size > WORLD_SIZE_MAX {
            let text = format!("{world_name} is {world_size}: a job has 1 to {WORLD_SIZE_MAX} ranks");
            return Err(Fault::new(FaultKind::WorldMismatch, text));
        }
        // Processes that join a running job may have further ranks.
        let ranks_max = variables("GRADWIRE_RANKS_MAX").and_then(|text| text.parse().ok()).unwrap_or(0);
        let ranks_max = world_size.max(ranks_max).min(WORLD_SIZE_MAX);
        if rank >= ranks_max {
            let text = format!("{} is {rank}, and {world_name} is {world_size}: ranks count from 0", self.rank);
            return Err(Fault::new(FaultKind::WorldMismatch, text));
        }
        let (local_rank, local_world_size) = self.local(variables, rank, world_size, ranks_max)?;
        Ok(Some(Position {
            rank: Rank(rank),
            world_size,
            local_rank,
            local_world_size,
            launcher: self.launcher(variables),
            session: self.session(variables),
        }))
    }

    /// Place and number of ranks on this host. Where only some is said, the rest follows if it can: a launcher that
    /// says nothing of hosts has one.
    fn local(&self, variables: Variables<'_>, rank: u32, world_size: u32, ranks_max: u32) -> Result<(u32, u32), Fault> {
        let local_name = self.local_world_size.iter().find(|name| variables(name).is_some());
        let said = match local_name {
            Some(name) => number(variables, name)?,
            None if self.kind == Kind::Slurm => slurm_tasks_here(variables, world_size),
            None => None,
        };
        let local_rank = number(variables, self.local_rank)?;
        let local_world_size = said.unwrap_or(world_size);
        let local_rank = match local_rank {
            Some(local_rank) => local_rank,
            None if local_world_size >= world_size => rank,
            None => {
                let text =
                    format!("there are {local_world_size} ranks on this host and {} is not set", self.local_rank);
                return Err(Fault::new(FaultKind::InvalidArgument, text));
            }
        };
        if local_world_size == 0 || local_world_size > ranks_max {
            let name = local_name.unwrap_or(&self.local_rank);
            let text = format!("{name} is {local_world_size} in a job of {world_size} ranks");
            return Err(Fault::new(FaultKind::WorldMismatch, text));
        }
        // A rank beyond those that the job starts with is one more on its host.
        let local_world_size = if rank >= world_size { local_world_size.max(local_rank + 1) } else { local_world_size };
        if local_rank >= local_world_size {
            let text = format!("{} is {local_rank} with {local_world_size} ranks on this host", self.local_rank);
            return Err(Fault::new(FaultKind::WorldMismatch, text));
        }
        Ok((local_rank, local_world_size))
    }

    fn launcher(&self, variables: Variables<'_>) -> Launcher {
        match self.kind {
            Kind::Torch | Kind::Own if variables("GRADWIRE_INSTANCE").is_some() => Launcher::Gradwire,
            Kind::Torch if variables("TORCHELASTIC_RUN_ID").is_some() => Launcher::Torchrun,
            Kind::Own | Kind::Torch => Launcher::Variables,
            Kind::OpenMpi => Launcher::OpenMpi,
            Kind::Pmi => Launcher::Pmi,
            Kind::Slurm => Launcher::Slurm,
        }
    }

    fn session(&self, variables: Variables<'_>) -> Option<String> {
        // Any of the names may be missing; with none of them there is no session.
        let joined = |names: &[&str]| {
            let parts: Vec<_> = names.iter().filter_map(|name| Some(format!("{name}={}", variables(name)?))).collect();
            (!parts.is_empty()).then(|| parts.join("\n"))
        };
        match self.kind {
            Kind::Own => None,
            // The run id is "none" unless the user gave one; the port belongs to one living run on this host.
            Kind::Torch => variables("MASTER_PORT").and_then(|_| {
                joined(&["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"])
            }),
            Kind::OpenMpi => joined(&[
                "PMIX_NAMESPACE",
                "OMPI_MCA_ess_base_jobid",
                "OMPI_MCA_orte_precondition_transports",
                "OMPI_MCA_orte_hnp_uri",
            ]),
            // Hydra's name for the run is told over its pipe only.
            Kind::Pmi => joined(&["PMI_KVSNAME", "PMI_JOBID"]),
            Kind::Slurm => joined(&["SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID"]),
        }
    }
}

/// Whether this process is a task of a step that srun started: a batch script has most of the variables too.
fn in_slurm_step(variables: Variables<'_>) -> bool {
    let step = variables("SLURM_STEP_ID").or_else(|| variables("SLURM_STEPID"));
    step.and_then(|step| step.trim().parse().ok()).is_some_and(|step: u64| step < SLURM_STEPS_END)
        && variables("SLURM_PROCID").is_some()
}

/// The tasks on this node, out of a list such as "2(x3),1".
fn slurm_tasks_here(variables: Variables<'_>, world_size: u32) -> Option<u32> {
    let nodes = variables("SLURM_STEP_NUM_NODES").or_else(|| variables("SLURM_NNODES"));
    if nodes.is_some_and(|nodes| nodes.trim() == "1") {
        return Some(world_size);
    }
    let list = variables("SLURM_STEP_TASKS_PER_NODE").or_else(|| variables("SLURM_TASKS_PER_NODE"))?;
    let mut node: u32 = variables("SLURM_NODEID")?.trim().parse().ok()?;
    for part in list.trim().split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1_u32),
        };
        if node < times {
            return tasks.parse().ok();
        }
        node -= times;
    }
    None
}

fn number(variables: Variables<'_>, name: &str) -> Result<Option<u32>, Fault> {
    let Some(text) = variables(name) else { return Ok(None) };
    text.trim()
        .parse()
        .map(Some)
        .map_err(|_| Fault::new(FaultKind::InvalidArgument, format!("{name} is '{text}': expected a number from 0 on")))
}

fn half_set(name: &str, value: u32, missing: &str) -> Fault {
    let text = format!("{name} is {value} and {missing} is not set: set both, or neither for a job of one rank");
    Fault::new(FaultKind::InvalidArgument, text)
}
