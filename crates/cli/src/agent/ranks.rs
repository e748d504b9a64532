//! One rank's process, as its agent sees it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::wire::{End, Plan};

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The launcher has something to say, or is gone.
    Launcher,
    /// Some child has ended.
    Children,
    /// The agent itself was asked to end.
    Terminations,
    /// The rank with this index has ended.
    Exit(usize),
    /// The rank with this index wrote to standard output (0) or error (1), or closed it.
    Output(usize, usize),
}

impl Source {
    pub(super) fn token(self) -> EventData {
        EventData::new_u64(match self {
            Self::Launcher => 0,
            Self::Children => 1,
            Self::Terminations => 2,
            Self::Exit(index) => 3 + index as u64 * 3,
            Self::Output(index, stream) => 4 + index as u64 * 3 + stream as u64,
        })
    }

    pub(super) fn from_token(token: EventData) -> Option<Self> {
        Some(match token.u64() {
            0 => Self::Launcher,
            1 => Self::Children,
            2 => Self::Terminations,
            other => {
                let index = usize::try_from((other - 3) / 3).ok()?;
                match (other - 3) % 3 {
                    0 => Self::Exit(index),
                    1 => Self::Output(index, 0),
                    _ => Self::Output(index, 1),
                }
            }
        })
    }
}

/// A rank's process and the ends of what it writes.
pub(super) struct RankProcess {
    pub(super) rank: u32,
    pub(super) pid: Pid,
    /// How it ended, once it has.
    pub(super) end: Option<End>,
    exit: OwnedFd,
    outputs: [Option<File>; 2],
}

impl RankProcess {
    /// Starts a rank, in its own process group, by way of `gradwire __exec`.
    ///
    /// # Errors
    /// When the directory is missing, or the system has no room for another process. That the *program* is missing
    /// shows as the exit code 127.
    pub(super) fn start(plan: &Plan, rank: u32, variables: &[(String, String)]) -> io::Result<Self> {
        let directory = Path::new(OsStr::from_bytes(&plan.directory));
        if !directory.is_dir() {
            let text = format!("there is no directory {} there; choose one with --directory", directory.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let mut command = Command::new("/proc/self/exe");
        command.arg0("gradwire").arg("__exec").arg(std::process::id().to_string()).arg("--");
        command.args(plan.command.iter().map(|part| OsStr::from_bytes(part)));
        command.env_remove("GRADWIRE_SECRET_FILE");
        for (name, value) in &plan.variables {
            command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.current_dir(directory).process_group(0);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let outputs = [
            child.stdout.take().map(|stream| File::from(OwnedFd::from(stream))),
            child.stderr.take().map(|stream| File::from(OwnedFd::from(stream))),
        ];
        let pid = Pid::from_child(&child);
        let exit = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { rank, pid, end: None, exit, outputs })
    }

    /// Watches its exit.
    pub(super) fn watch_exit(&self, epoll: &OwnedFd, index: usize) -> io::Result<()> {
        Ok(epoll::add(epoll, &self.exit, Source::Exit(index).token(), EventFlags::IN)?)
    }

    pub(super) fn unwatch_exit(&self, epoll: &OwnedFd) {
        let _ = epoll::delete(epoll, &self.exit);
    }

    /// Watches what it writes, or leaves it in the pipe for now.
    pub(super) fn watch_output(&self, epoll: &OwnedFd, index: usize, watched: bool) {
        for (stream, output) in self.outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            // Taken out, not masked: a closed pipe would still wake the agent all the time.
            let _ = if watched {
                epoll::add(epoll, output, Source::Output(index, stream).token(), EventFlags::IN)
            } else {
                epoll::delete(epoll, output)
            };
        }
    }

    /// Reads what one pipe has; 0 when it has ended, which also closes it.
    pub(super) fn read_output(&mut self, epoll: &OwnedFd, stream: usize, bytes: &mut [u8]) -> usize {
        let Some(slot) = self.outputs.get_mut(stream) else { return 0 };
        let Some(output) = slot else { return 0 };
        match output.read(bytes) {
            Ok(count) if count > 0 => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Ok(_) | Err(_) => {
                let _ = epoll::delete(epoll, &*output);
                *slot = None;
                0
            }
        }
    }

    pub(super) fn output_ended(&self) -> bool {
        self.outputs.iter().all(Option::is_none)
    }

    /// Whether nothing more will be heard of it: another rank may take its index.
    pub(super) fn is_over(&self) -> bool {
        self.end.is_some() && self.output_ended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        let ranks = (0..3).flat_map(|index| [Source::Exit(index), Source::Output(index, 0), Source::Output(index, 1)]);
        for source in [Source::Launcher, Source::Children, Source::Terminations].into_iter().chain(ranks) {
            assert_eq!(Source::from_token(source.token()), Some(source));
        }
    }
}
