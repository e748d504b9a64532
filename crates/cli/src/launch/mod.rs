//! `gradwire launch`, and starting ranks from within: on this machine and, by ssh, on others.
//!
//! The launcher starts one agent per host (`gradwire __agent`) and tells it over its standard input what to run: the
//! job's secret never stands on a command line. Agents live as long as the host has a part in the job; ranks come and go
//! (`elastic.rs`) in jobs that go on without those that are lost, and are started again where that can help
//! (`prospects.rs`); so do hosts and their slots (`slots.rs`). One that cannot begin without a rank ends at once
//! (`beginning.rs`), ranks that hang are killed (`hung.rs`), and those that end with 0 and have not left count as lost
//! (`vanished.rs`). It owns the job's broker unless another one is named. Whatever ends the job, a rank, a signal, the
//! death of the launcher or of an agent, no process of it stays.

mod agents;
mod beginning;
mod command;
mod driver;
mod elastic;
mod hosts;
mod hosts_file;
mod hung;
mod journal;
mod output;
mod prospects;
mod ranks;
mod report;
mod signals;
mod slots;
mod starter;
mod vanished;
mod variables;

use std::ffi::OsString;
use std::io;
use std::time::Duration;

pub(crate) use self::agents::RemoteOptions;
pub(crate) use self::command::{LaunchArgs, execute};
pub(crate) use self::driver::run;
pub(crate) use self::hosts::HostSlots;
pub(crate) use self::hosts_file::HostsFile;
pub(crate) use self::output::{Line, Stream, forward_line};
pub(crate) use self::starter::Starter;
use crate::args::{BrokerChoice, Transport, Wire};

/// How long ranks have for an end in order, if nobody says otherwise: enough for a step and a checkpoint.
const GRACE: Duration = Duration::from_secs(30);

/// How long ranks that hang are left alone, if nobody says otherwise: one that wakes up ends by itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// What to start, and where. Holds no secret: that is made when it starts.
#[derive(Clone, Debug)]
pub(crate) struct LaunchPlan {
    /// How many ranks.
    pub(crate) ranks: u32,
    /// Where; empty: all on this machine.
    pub(crate) hosts: Vec<HostSlots>,
    /// `GRADWIRE_TRANSPORT` for every rank.
    pub(crate) transport: Option<Transport>,
    /// `GRADWIRE_WIRE` for every rank.
    pub(crate) wire: Option<Wire>,
    /// With at least so many ranks the job goes on without those that fail; without it, it ends with the first.
    pub(crate) ranks_min: Option<u32>,
    /// Numbers that ranks of such a job can have: so many, if more can join than are started.
    pub(crate) ranks_max: Option<u32>,
    /// How often ranks of such a job are started again, all together.
    pub(crate) restarts: u32,
    /// The file that `hosts` is from: such a job follows its changes.
    pub(crate) hosts_file: Option<HostsFile>,
    /// Between SIGTERM and SIGKILL for ranks whose host is taken away, or when a signal ends the job.
    pub(crate) grace: Duration,
    /// How long a process may still be there once it is known that the others went on without it.
    pub(crate) patience: Duration,
    /// Where to write what happens to the ranks, as JSON lines.
    pub(crate) events: Option<std::path::PathBuf>,
    /// Where the control plane runs.
    pub(crate) broker: BrokerChoice,
    /// The job's name; a fresh one if none is given.
    pub(crate) job: Option<String>,
    /// Further variables for every rank.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Where every rank runs; this process's directory if none is given.
    pub(crate) directory: Option<std::path::PathBuf>,
    /// Program and arguments.
    pub(crate) command: Vec<OsString>,
    /// How remote hosts are reached.
    pub(crate) remote: RemoteOptions,
}

impl LaunchPlan {
    /// Ranks on this machine, with everything else as it is by default.
    pub(crate) fn local(ranks: u32, command: Vec<OsString>) -> Self {
        Self {
            ranks,
            hosts: Vec::new(),
            transport: None,
            wire: None,
            ranks_min: None,
            ranks_max: None,
            restarts: 0,
            hosts_file: None,
            grace: GRACE,
            patience: PATIENCE,
            events: None,
            broker: BrokerChoice::Embedded,
            job: None,
            env: Vec::new(),
            directory: None,
            command,
            remote: RemoteOptions::default(),
        }
    }
}

/// This very binary with these arguments, as a command for [`LaunchPlan`].
///
/// # Errors
/// When the system does not tell where this binary is.
pub(crate) fn own_command<I>(arguments: I) -> io::Result<Vec<OsString>>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let own = std::env::current_exe()?.into_os_string();
    Ok(std::iter::once(own).chain(arguments.into_iter().map(Into::into)).collect())
}
