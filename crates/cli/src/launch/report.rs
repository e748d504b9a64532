//! What came of a launch.

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use super::journal::{Entry, Happening};
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
        /// The same in words, with what is known of why.
        reason: String,
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
        ranks: Vec<u32>,
        /// What is known about it.
        detail: String,
    },
    /// No rank is left, although none failed.
    NobodyLeft {
        /// How it came to that.
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
    /// Of a job that goes on without ranks that are lost: losses, restarts, and ranks that came and went.
    pub(super) history: Vec<Entry>,
    /// Why the others could not go on, where they would have with more of them.
    pub(super) too_few: Option<String>,
    /// The signal that was passed on to the ranks and ended them.
    pub(super) interrupted: Option<i32>,
    /// The time that they had for it, if that was not enough.
    pub(super) overdue: Option<Duration>,
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
        self.leftovers > 0 || !self.history.is_empty()
    }

    /// Whether this entry of the history is the loss of a rank that never came back.
    fn is_for_good(&self, at: usize) -> bool {
        let entry = &self.history[at];
        entry.event == Happening::Lost && self.history[at + 1..].iter().all(|later| later.rank != entry.rank)
    }

    fn code(&self) -> u8 {
        match (&self.failure, self.interrupted) {
            (Some(Failure::Rank { end, .. }), _) => end.shell_code().max(1),
            (Some(Failure::NotStarted { .. } | Failure::AgentLost { .. } | Failure::NobodyLeft { .. }), _) => 1,
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
            (None, _) if (0..self.history.len()).any(|at| self.is_for_good(at)) => {
                write!(f, "all other ranks ended well")?;
            }
            (None, _) => write!(f, "all ranks ended well")?,
        }
        if let Some(why) = &self.too_few {
            write!(f, ": {why}")?;
        }
        if let Some(grace) = self.overdue {
            write!(f, ", and those that had not ended after {} s were killed", grace.as_secs_f64())?;
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
        for (at, entry) in self.history.iter().enumerate() {
            write!(f, "\n  {entry}")?;
            if self.failure.is_none() && self.interrupted.is_none() && self.is_for_good(at) {
                write!(f, ", and the others went on without it")?;
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
            Self::Rank { rank, host, reason, .. } => write!(f, "rank {rank} on {host} {reason}"),
            Self::NotStarted { rank, host, detail } => write!(f, "rank {rank} cannot be started on {host}: {detail}"),
            Self::AgentLost { host, ranks, detail } => {
                write!(f, "lost the agent on {host} ({}): {detail}", numbers(ranks))
            }
            Self::NobodyLeft { detail } => write!(f, "no rank is left: {detail}"),
        }
    }
}

/// Ranks in words, from their numbers in order.
fn numbers(ranks: &[u32]) -> String {
    match ranks {
        [] => "no ranks".to_owned(),
        [one] => format!("rank {one}"),
        [first, .., last] if (last - first) as usize == ranks.len() - 1 => format!("ranks {first} to {last}"),
        several => format!("ranks {}", several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// An end in words.
pub(super) struct Words(pub(super) End);

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
        let reason = Words(end).to_string();
        let failure = Failure::Rank { rank: 2, host: "localhost".to_owned(), end, reason };
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
    fn ranks_are_named_one_by_one_or_as_a_range() {
        assert_eq!(numbers(&[3]), "rank 3");
        assert_eq!(numbers(&[3, 4, 5]), "ranks 3 to 5");
        assert_eq!(numbers(&[0, 2, 3]), "ranks 0, 2, 3");
    }

    #[test]
    fn only_a_loss_that_the_others_survived_is_said_to_be_one() {
        let entry =
            |event, rank| Entry { ms: 1234, event, rank, host: "a".to_owned(), reason: Some("broke".to_owned()) };
        let history = vec![entry(Happening::Lost, 2), entry(Happening::Restarted, 2), entry(Happening::Lost, 1)];
        let mut report = Report { history, ..Report::default() };
        let text = report.to_string();
        let expected = "all other ranks ended well\n  after 1.2 s: rank 2 on a broke\n  after 1.2 s: rank 2 was started \
                        again on a (broke)\n  after 1.2 s: rank 1 on a broke, and the others went on without it";
        assert_eq!(text, expected);
        report.failure = failed(End::Code(3)).failure;
        report.too_few = Some("1 rank is left".to_owned());
        let text = report.to_string();
        assert!(text.starts_with("rank 2 on localhost exited with code 3: 1 rank is left\n"), "{text}");
        assert!(!text.contains("went on"), "{text}");
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
