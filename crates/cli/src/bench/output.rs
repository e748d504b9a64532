//! Where results go: standard output, or a file that is either complete or not there.

use std::ffi::OsString;
use std::fmt::Display;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use gradwire_proto::{Fault, FaultKind};

/// Where JSON goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JsonTarget {
    /// Standard output, which then carries nothing else.
    Stdout,
    /// A file, replaced as a whole.
    File(PathBuf),
}

impl From<OsString> for JsonTarget {
    fn from(text: OsString) -> Self {
        if text == "-" { Self::Stdout } else { Self::File(text.into()) }
    }
}

impl JsonTarget {
    /// Finds out before the work whether the result could be written after it, as far as that can be known.
    ///
    /// # Errors
    /// A [`Fault`] of kind `InvalidArgument`.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        let Self::File(path) = self else { return Ok(()) };
        let folder = folder_of(path);
        if path.as_os_str().is_empty() || path.is_dir() {
            Err(Fault::new(FaultKind::InvalidArgument, format!("--json: '{}' is not a file's name", path.display())))
        } else if !folder.is_dir() {
            let detail = format!("--json: there is no folder '{}': make it first", folder.display());
            Err(Fault::new(FaultKind::InvalidArgument, detail))
        } else {
            Ok(())
        }
    }

    /// Writes `text` and a newline where it has none. A file is written beside its place and then moved there, so that
    /// nobody ever reads half of it.
    ///
    /// # Errors
    /// A [`Fault`] of kind `System`.
    pub(crate) fn write(&self, text: &str) -> Result<(), Fault> {
        let text = format!("{}\n", text.trim_end_matches('\n'));
        match self {
            Self::Stdout => say(&text),
            Self::File(path) => write_file(path, text.as_bytes()).map_err(|error| {
                Fault::new(FaultKind::System, format!("'{}' cannot be written: {error}", path.display()))
            }),
        }
    }
}

/// Writes to standard output.
///
/// # Errors
/// A [`Fault`] of kind `System`: unlike `print!`, which panics.
pub(crate) fn say(text: &str) -> Result<(), Fault> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| Fault::new(FaultKind::System, format!("standard output takes no more: {error}")))
}

/// Writes an error to standard error.
pub(crate) fn complain(error: &dyn Display) {
    // There is nowhere left to complain about a failure to complain.
    let _ = writeln!(io::stderr(), "error: {error}");
}

/// A number of bytes with a binary unit, to be read and not to be parsed.
pub(crate) fn human_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64 / 1024.0;
    if value < 1.0 {
        return format!("{bytes} B");
    }
    let mut index = 0;
    while value >= 1024.0 && index + 1 < units.len() {
        value /= 1024.0;
        index += 1;
    }
    format!("{value:.1} {}", units[index])
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Pipes and devices are written as they are: replacing /dev/null by a file would be a surprise.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return std::fs::OpenOptions::new().write(true).open(path)?.write_all(bytes);
    }
    // Readable as any new file is; the umask takes from this what it takes from others.
    let permissions = Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder_of(path))?;
    file.write_all(bytes)?;
    file.as_file().sync_data()?;
    file.persist(path).map(|_| ()).map_err(|error| error.error)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(path: &Path) -> JsonTarget {
        JsonTarget::from(path.as_os_str().to_owned())
    }

    #[test]
    fn files_are_replaced_as_a_whole_and_leave_nothing_beside_them() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("result.json");
        for text in ["{\"a\": 1}", "{}\n"] {
            target(&path).check().expect("check");
            target(&path).write(text).expect("write");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), format!("{}\n", text.trim_end()));
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 1);
    }

    #[test]
    fn impossible_targets_are_found_before_the_work() {
        let folder = tempfile::tempdir().expect("folder");
        for (path, complaint) in [
            (folder.path().to_owned(), "not a file's name"),
            (PathBuf::new(), "not a file's name"),
            (folder.path().join("no/result.json"), "make it first"),
        ] {
            let fault = target(&path).check().expect_err("must be refused");
            assert!(fault.detail.contains(complaint), "{fault}");
        }
        target(Path::new("result.json")).check().expect("a name alone is a file in the current folder");
        assert_eq!(JsonTarget::from(OsString::from("-")), JsonTarget::Stdout);
    }

    #[test]
    fn devices_are_written_not_replaced() {
        use std::os::unix::fs::FileTypeExt as _;
        target(Path::new("/dev/null")).write("{}").expect("write");
        assert!(std::fs::metadata("/dev/null").expect("metadata").file_type().is_char_device());
    }

    #[test]
    fn bytes_have_the_unit_that_fits() {
        let shown = [0, 1023, 1024, 1536, 1 << 20, u64::MAX].map(human_bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "16.0 EiB"]);
    }
}
