//! The file that names a job's hosts, read again when it changes.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::hosts::HostSlots;

/// Largest file of hosts, in bytes: far more than a job has hosts.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a file of hosts: one HOST or HOST:SLOTS a line; what stands behind a # is a comment.
///
/// # Errors
/// When it cannot be read, a line makes no sense, or it names no host. Names the file, and the line.
fn read(path: &Path) -> Result<Vec<HostSlots>, String> {
    let shown = path.display();
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(|error| format!("the hosts file {shown} cannot be read: {error}"))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("the hosts file {shown} has more than {FILE_BYTES_MAX} bytes"));
    }
    parse(&text).map_err(|what| format!("the hosts file {shown}{what}"))
}

fn parse(text: &str) -> Result<Vec<HostSlots>, String> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let entry = line.split('#').next().unwrap_or_default().trim();
        if !entry.is_empty() {
            hosts.push(entry.parse().map_err(|error| format!(", line {}: {error}", index + 1))?);
        }
    }
    if hosts.is_empty() {
        return Err(" names no host".to_owned());
    }
    Ok(hosts)
}

/// What tells one state of a file from another; none where there is no file.
type Mark = Option<(u64, SystemTime, u64)>;

/// Watches a file of hosts.
#[derive(Clone, Debug)]
pub(crate) struct HostsFile {
    path: PathBuf,
    /// The state that was last handed on.
    handed_on: Mark,
    /// The state at the last look.
    seen: Mark,
}

impl HostsFile {
    /// Reads the file, and watches it from then on.
    pub(super) fn open(path: PathBuf) -> Result<(Self, Vec<HostSlots>), String> {
        let now = mark(&path);
        let hosts = read(&path)?;
        Ok((Self { path, handed_on: now, seen: now }, hosts))
    }

    /// Reads the file if it has changed, once for each change. Who writes it may take several writes to do so, and half a
    /// file would take hosts away: it is read when it was found unchanged by two looks.
    pub(super) fn poll(&mut self) -> Option<Result<Vec<HostSlots>, String>> {
        let now = mark(&self.path);
        let settled = now == self.seen;
        self.seen = now;
        if !settled || now == self.handed_on {
            return None;
        }
        self.handed_on = now;
        Some(read(&self.path))
    }
}

fn mark(path: &Path) -> Mark {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.modified().ok()?, metadata.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_host_a_line() {
        let hosts = parse("# two\na:2\n\n  me@b  # one slot\n").unwrap();
        let shown: Vec<_> = hosts.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["a:2", "me@b:1"]);
        assert!(parse("a:2\nb:x\n").unwrap_err().contains("line 2"));
        assert!(parse("a slots=2\n").is_err());
        assert!(parse("# none\n").unwrap_err().contains("names no host"));
    }

    #[test]
    fn a_change_is_handed_on_once_and_only_when_it_has_settled() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hosts");
        fs::write(&path, "a\n").unwrap();
        let mut file = HostsFile::open(path.clone()).unwrap().0;
        assert!(file.poll().is_none());
        fs::write(&path, "a\nbb\n").unwrap();
        assert!(file.poll().is_none());
        assert_eq!(file.poll().unwrap().unwrap().len(), 2);
        assert!(file.poll().is_none());
        fs::remove_file(&path).unwrap();
        assert!(file.poll().is_none());
        assert!(file.poll().unwrap().unwrap_err().contains("cannot be read"));
        assert!(file.poll().is_none());
    }
}
