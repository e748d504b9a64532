//! What came of a launch.

use std::fmt;
use std::process::ExitCode;

use crate::agent::wire::End;

/// A job did not start, or not all of it. Says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{detail}")]
pub(crate) struct LaunchError {
    detail: String,
    code: u8,
}

impl LaunchError {
    /// The request cannot be met as it is.
    pub(crate) fn usage(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), code: 2 }
    }

    /// The system, a host or the broker would not.
    pub(crate) fn failed(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), code: 1 }
    }

    /// A signal came before the ranks were started.
    pub(crate) fn interrupted(signal: i32) -> Self {
        let detail = format!("{} before the ranks were started", signal_name(signal));
        Self { detail, code: End::Signal(signal).shell_code() }
    }

    /// What to exit with: 2 when the request is at fault, 128 + the signal when one came, else 1.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

/// What ended a job early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// This rank ended badly, before any other did.
    Rank {
        /// Its number.
        rank: u32,
        /// Its host.
        host: String,
        /// How it ended.
        end: End,
    },
    /// This rank could not be started.
    NotStarted {
        /// Its number.
        rank: u32,
        /// Its host.
        host: String,
        /// Why.
        detail: String,
    },
    /// The agent of this host is gone, and its ranks with it.
    AgentLost {
        /// The host.
        host: String,
        /// The ranks there.
        ranks: std::ops::Range<u32>,
        /// What is known about it.
        detail: String,
    },
}

/// What happened. Its `Display` is for standard error when the job was no success.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// What ended the job early, if anything did.
    pub(super) failure: Option<Failure>,
    /// The last lines of the rank that failed.
    pub(super) last_lines: Vec<Vec<u8>>,
    /// How the other ranks that did not end well ended: rank, end.
    pub(super) others: Vec<(u32, End)>,
    /// The ranks without which the others went on: rank, host, end.
    pub(super) lost: Vec<(u32, String, End)>,
    /// The signal that was passed on to the ranks and ended them.
    pub(super) interrupted: Option<i32>,
    /// How many processes ranks had left behind.
    pub(super) leftovers: u32,
}

impl Report {
    /// Whether every rank exited with 0, but for those without which the others went on.
    pub(crate) fn success(&self) -> bool {
        self.failure.is_none() && self.others.is_empty()
    }

    /// The first failing rank's code, or 128 + its signal; 128 + the signal when one was passed on and ended the job.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    /// Whether there is something to say although all ranks ended well.
    pub(crate) const fn has_notes(&self) -> bool {
        self.leftovers > 0 || !self.lost.is_empty()
    }

    fn code(&self) -> u8 {
        match (&self.failure, self.interrupted) {
            (Some(Failure::Rank { end, .. }), _) => end.shell_code().max(1),
            (Some(Failure::NotStarted { .. } | Failure::AgentLost { .. }), _) => 1,
            (None, _) if self.others.is_empty() => 0,
            (None, Some(signal)) => End::Signal(signal).shell_code(),
            (None, None) => 1,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.failure, self.interrupted) {
            (Some(failure), _) => write!(f, "{failure}")?,
            (None, Some(signal)) if !self.others.is_empty() => write!(f, "ended by {}", signal_name(signal))?,
            (None, _) if self.lost.is_empty() => write!(f, "all ranks ended well")?,
            (None, _) => write!(f, "all other ranks ended well")?,
        }
        for (rank, host, end) in &self.lost {
            write!(f, "\n  rank {rank} on {host} {}, and the others went on without it", Words(*end))?;
        }
        if let Some(Failure::Rank { rank, .. }) = &self.failure {
            if self.last_lines.is_empty() {
                write!(f, "\n  it wrote nothing")?;
            } else {
                write!(f, "\n  the last it wrote:")?;
                for line in &self.last_lines {
                    write!(f, "\n    [{rank}] {}", String::from_utf8_lossy(line))?;
                }
            }
        }
        if self.failure.is_some() {
            let (ended, failed): (Vec<_>, Vec<_>) = self.others.iter().partition(|(_, end)| ended_by_us(*end));
            if !failed.is_empty() {
                let list: Vec<_> = failed.iter().map(|(rank, end)| format!("rank {rank} {}", Words(*end))).collect();
                write!(f, "\n  afterwards: {}", list.join(", "))?;
            }
            if !ended.is_empty() {
                let list: Vec<_> = ended.iter().map(|(rank, _)| rank.to_string()).collect();
                write!(f, "\n  then ended by gradwire: rank{} {}", plural(ended.len()), list.join(", "))?;
            }
        }
        if self.leftovers > 0 {
            write!(f, "\n  ended {} process(es) that ranks had left behind", self.leftovers)?;
        }
        Ok(())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank { rank, host, end } => write!(f, "rank {rank} on {host} {}", Words(*end)),
            Self::NotStarted { rank, host, detail } => write!(f, "rank {rank} cannot be started on {host}: {detail}"),
            Self::AgentLost { host, ranks, detail } => {
                write!(
                    f,
                    "lost the agent on {host} (ranks {} to {}): {detail}",
                    ranks.start,
                    ranks.end.saturating_sub(1)
                )
            }
        }
    }
}

/// An end in words.
struct Words(End);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            End::Code(code) => write!(f, "exited with code {code}"),
            End::Signal(signal) => write!(f, "was killed by {}", signal_name(signal)),
            End::Unknown => write!(f, "ended in a way that nobody saw"),
        }
    }
}

/// Whether this is how a rank ends that the launcher ended.
const fn ended_by_us(end: End) -> bool {
    matches!(end, End::Signal(signal_hook::consts::SIGTERM | signal_hook::consts::SIGKILL) | End::Unknown)
}

const fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// `SIGKILL` and so on; real-time signals by number.
pub(crate) fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(end: End) -> Report {
        let failure = Failure::Rank { rank: 2, host: "localhost".to_owned(), end };
        Report { failure: Some(failure), last_lines: vec![b"boom".to_vec()], ..Report::default() }
    }

    #[test]
    fn a_failure_names_rank_host_end_and_last_lines() {
        let mut report = failed(End::Code(3));
        report.others = vec![(0, End::Signal(15)), (1, End::Code(1)), (3, End::Signal(9))];
        let text = report.to_string();
        assert!(text.starts_with("rank 2 on localhost exited with code 3"), "{text}");
        assert!(text.contains("[2] boom"), "{text}");
        assert!(text.contains("afterwards: rank 1 exited with code 1"), "{text}");
        assert!(text.contains("ended by gradwire: ranks 0, 3"), "{text}");
        assert!(failed(End::Signal(11)).to_string().contains("was killed by SIGSEGV"));
    }

    #[test]
    fn codes_are_the_failing_ranks() {
        assert_eq!(failed(End::Code(3)).code(), 3);
        assert_eq!(failed(End::Signal(11)).code(), 139);
        // 256 & 0xff would look like success.
        assert_eq!(failed(End::Code(256)).code(), 1);
        assert_eq!(Report::default().code(), 0);
        assert_eq!(Report { interrupted: Some(15), ..Report::default() }.code(), 0);
        assert_eq!(
            Report { interrupted: Some(15), others: vec![(0, End::Signal(15))], ..Report::default() }.code(),
            143
        );
    }
}
