//! What happens to the ranks of a job, in order: for the summary at its end and, as JSON lines, for programs.

use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use super::report::LaunchError;

/// What can happen to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Happening {
    /// It runs, from the job's start.
    Started,
    /// It failed, its host was lost, or it ended without having left the job.
    Lost,
    /// It runs again.
    Restarted,
    /// It runs on a host or slot that was added.
    Added,
    /// It was told to end: its host or slot was taken away.
    Removed,
    /// It exited with 0, or was ended by the launcher.
    Ended,
}

/// Something that happened. As JSON it is a line of the file of events.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Entry {
    /// Milliseconds since the job's start.
    pub(super) ms: u64,
    pub(super) event: Happening,
    pub(super) rank: u32,
    pub(super) host: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ms, event, rank, host, reason } = self;
        let reason = reason.as_deref().unwrap_or_default();
        write!(f, "after {}.{} s: ", ms / 1000, ms % 1000 / 100)?;
        match event {
            Happening::Started => write!(f, "rank {rank} was started on {host}"),
            Happening::Lost | Happening::Ended => write!(f, "rank {rank} on {host} {reason}"),
            Happening::Restarted => write!(f, "rank {rank} was started again on {host} ({reason})"),
            Happening::Added => write!(f, "rank {rank} was added on {host}"),
            Happening::Removed => write!(f, "rank {rank} on {host} was told to end: {reason}"),
        }
    }
}

/// Keeps what the summary lists, and writes everything to the file of events.
pub(super) struct Journal {
    start: Instant,
    file: Option<File>,
    listed: Vec<Entry>,
}

impl Journal {
    /// Time counts from now. The file, if there is one, is made anew.
    pub(super) fn start(path: Option<&Path>) -> Result<Self, LaunchError> {
        let create = |path: &Path| {
            let wrong = |error| LaunchError::usage(format!("--events {} cannot be written: {error}", path.display()));
            File::create(path).map_err(wrong)
        };
        Ok(Self { start: Instant::now(), file: path.map(create).transpose()?, listed: Vec::new() })
    }

    pub(super) fn note(&mut self, event: Happening, rank: u32, host: &str, reason: Option<String>) {
        let ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let entry = Entry { ms, event, rank, host: host.to_owned(), reason };
        self.write(&entry);
        if !matches!(event, Happening::Started | Happening::Ended) {
            self.listed.push(entry);
        }
    }

    /// One write a line: a reader sees whole lines. A disk that is full does not end a job.
    fn write(&mut self, entry: &Entry) {
        let Some(file) = &mut self.file else { return };
        let written = serde_json::to_vec(entry).map_err(std::io::Error::other).and_then(|mut line| {
            line.push(b'\n');
            file.write_all(&line)
        });
        if let Err(error) = written {
            eprintln!("gradwire: the file of events cannot be written any more, and the job goes on: {error}");
            self.file = None;
        }
    }

    /// Losses, restarts, and ranks that came and went.
    pub(super) fn into_listed(self) -> Vec<Entry> {
        self.listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_a_line_and_the_summary_has_what_is_out_of_the_ordinary() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events");
        let mut journal = Journal::start(Some(&path)).unwrap();
        journal.note(Happening::Started, 1, "a", None);
        journal.note(Happening::Lost, 1, "a", Some("exited with code 3".to_owned()));
        let lines: Vec<serde_json::Value> =
            std::fs::read_to_string(&path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            (&lines[0]["event"], &lines[0]["rank"], &lines[0]["host"]),
            (&"started".into(), &1.into(), &"a".into())
        );
        assert_eq!(lines[1]["reason"], "exited with code 3");
        assert!(lines[1]["ms"].is_u64());
        let listed = journal.into_listed();
        assert_eq!(listed.len(), 1);
        assert!(listed[0].to_string().ends_with("s: rank 1 on a exited with code 3"), "{}", listed[0]);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let error = Journal::start(Some(Path::new("/nonexistent/events"))).err().unwrap();
        assert!(error.to_string().contains("--events /nonexistent/events"), "{error}");
    }
}
