//! How rank 0 hands the secret and the broker to the other ranks of its host, where the launcher hands out nothing: by
//! a file that only this user can read, in a directory that only this user can write to.
//!
//! The file's name derives from what the launcher calls the run. It says which process wrote it, so that what a dead
//! job left behind is never taken for a living one's; rank 0 removes such files when it comes across them, and its own
//! when its guard is dropped.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use gradwire_proto::secret::hex;
use gradwire_proto::{Fault, FaultKind, Secret};

use super::process::ProcessName;
use gradwire_control::{BrokerAccess, Token};

use super::{Variables, unhex};

/// First line of a file.
const HEADING: &str = "gradwire-handover 1";
/// Beginning of a file's name.
const PREFIX: &str = "gradwire-job-";
/// Largest file.
const FILE_BYTES_MAX: u64 = 16 * 1024;
/// Between two looks for the file.
const INTERVAL: Duration = Duration::from_millis(10);
/// How often publishing is tried again when another job of this user cleans up at the same moment.
const TRIES_MAX: u32 = 100;

/// What rank 0 hands over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Handover {
    pub(super) world_size: u32,
    pub(super) instance: [u8; 16],
    pub(super) secret: Secret,
    pub(super) broker: BrokerAccess,
}

/// Rank 0's file. Dropped, it is removed.
#[derive(Debug)]
pub(super) struct Published {
    path: PathBuf,
}

impl Drop for Published {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        // The directory goes with its last file; one of the user's session is never empty.
        if let Some(directory) = self.path.parent().filter(|directory| is_ours(directory)) {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Where the files of this user lie.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    directory: PathBuf,
    /// Whether this module makes the directory.
    made: bool,
}

impl Exchange {
    /// `$XDG_RUNTIME_DIR`, or else a directory of this user below `$TMPDIR` or `/tmp`.
    pub(super) fn find(variables: Variables<'_>) -> Self {
        let absolute = |name: &str| variables(name).map(PathBuf::from).filter(|path| path.is_absolute());
        match absolute("XDG_RUNTIME_DIR").filter(|path| check_directory(path).is_ok()) {
            Some(directory) => Self { directory, made: false },
            None => {
                let parent = absolute("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"));
                Self { directory: parent.join(format!("gradwire-{}", uid())), made: true }
            }
        }
    }

    /// Publishes what the others wait for under this name.
    ///
    /// # Errors
    /// [`FaultKind::JobNameTaken`] when a living job has published under the same name; [`FaultKind::System`] when the
    /// directory is another's or cannot be written.
    pub(super) fn publish(&self, name: &str, handover: &Handover) -> Result<Published, Fault> {
        let own = ProcessName::of(std::process::id()).ok_or_else(|| {
            Fault::new(
                FaultKind::System,
                "cannot read /proc: mount it, or export GRADWIRE_SECRET and GRADWIRE_BROKER to all ranks",
            )
        })?;
        let text = encode(handover, &own);
        let path = self.path(name);
        for _ in 0..TRIES_MAX {
            self.prepare()?;
            self.remove_stale();
            match self.place(&path, &text) {
                Ok(()) => return Ok(Published { path }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if let Some((_, owner)) = read(&path).filter(|(_, owner)| owner.alive()) {
                        let text = format!(
                            "process {} of this user runs a job that this launcher gives the same name; give each its \
                             own: export GRADWIRE_JOB",
                            owner.pid
                        );
                        return Err(Fault::new(FaultKind::JobNameTaken, text));
                    }
                    let _ = fs::remove_file(&path);
                }
                // Another job has just removed the empty directory.
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.made => {}
                Err(error) => return Err(self.refused(&error)),
            }
        }
        Err(self.refused(&io::Error::other("other jobs get in the way")))
    }

    /// Waits for what rank 0 publishes under this name.
    ///
    /// # Errors
    /// [`FaultKind::DeadlineExceeded`] when it does not; [`FaultKind::WorldMismatch`] when it is of another number of
    /// ranks.
    pub(super) fn wait(&self, name: &str, world_size: u32, deadline: Instant) -> Result<Handover, Fault> {
        let path = self.path(name);
        loop {
            if let Some((handover, _)) = read(&path).filter(|(_, owner)| owner.alive()) {
                if handover.world_size != world_size {
                    let text =
                        format!("rank 0 has a job of {} ranks, and this rank one of {world_size}", handover.world_size);
                    return Err(Fault::new(FaultKind::WorldMismatch, text));
                }
                return Ok(handover);
            }
            if Instant::now() >= deadline {
                let text = format!(
                    "rank 0 has not handed over the job's secret in {}: it did not start, it runs on another host, or all \
                     ranks had joined before this process was started, and the file is gone; for several hosts, and for \
                     processes that join a running job, export GRADWIRE_SECRET and GRADWIRE_BROKER to all",
                    path.display()
                );
                return Err(Fault::new(FaultKind::DeadlineExceeded, text).at(gradwire_proto::Rank(0)));
            }
            thread::sleep(INTERVAL);
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        // A digest: what launchers call a run may be long and hold anything.
        let digest = Secret::from_bytes([0; 32]).proof("handover name", &[name.as_bytes()]);
        self.directory.join(format!("{PREFIX}{}", hex(&digest[..16])))
    }

    /// Makes the directory if it has to be made, and makes sure that nobody else can write to it.
    fn prepare(&self) -> Result<(), Fault> {
        if self.made {
            match DirBuilder::new().mode(0o700).create(&self.directory) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(self.refused(&error)),
            }
        }
        match check_directory(&self.directory) {
            // Another job may just have removed it: the next try makes it again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            checked => checked.map_err(|error| self.refused(&error)),
        }
    }

    fn place(&self, path: &Path, text: &str) -> io::Result<()> {
        let draft = path.with_extension(format!("{}.draft", std::process::id()));
        let _ = fs::remove_file(&draft);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            // A link, not a rename: it never replaces what another has published.
            .and_then(|()| fs::hard_link(&draft, path));
        let _ = fs::remove_file(&draft);
        written
    }

    /// Removes what dead jobs left: their secrets are of no use, and should not lie around.
    fn remove_stale(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let of_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
            if !of_ours {
                continue;
            }
            let draft_of = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_suffix(".draft")?.rsplit_once('.')?.1.parse::<u32>().ok());
            let dead = match draft_of {
                Some(pid) => ProcessName::of(pid).is_none(),
                None => read(&path).is_some_and(|(_, owner)| !owner.alive()),
            };
            if dead {
                let _ = fs::remove_file(&path);
            }
        }
    }

    fn refused(&self, error: &io::Error) -> Fault {
        let text = format!(
            "cannot hand the job's secret to the other ranks in {}: {error}; set XDG_RUNTIME_DIR or TMPDIR to a directory \
             of yours, or export GRADWIRE_SECRET and GRADWIRE_BROKER to all ranks",
            self.directory.display()
        );
        Fault::new(FaultKind::System, text)
    }
}

/// Whether only this user can read and write there.
fn check_directory(path: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    let refuse = |text: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    if !metadata.is_dir() {
        return refuse("it is not a directory");
    }
    if metadata.uid() != uid() {
        return refuse("it belongs to another user");
    }
    if metadata.mode() & 0o077 != 0 {
        return refuse("others have access to it");
    }
    Ok(())
}

/// Whether this is a directory that this module made.
fn is_ours(directory: &Path) -> bool {
    directory.file_name().and_then(|name| name.to_str()) == Some(&format!("gradwire-{}", uid()))
}

fn uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Reads a file, if it is one that this user wrote and only this user can read.
fn read(path: &Path) -> Option<(Handover, ProcessName)> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.uid() != uid() || metadata.mode() & 0o077 != 0 {
        return None;
    }
    decode(&read_text(file)?)
}

fn read_text(file: File) -> Option<String> {
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

fn encode(handover: &Handover, owner: &ProcessName) -> String {
    let BrokerAccess { url, token, trust } = &handover.broker;
    let token = token.as_ref().map(|token| match token {
        Token::Text(text) => format!("token {text}\n"),
        Token::File(path) => format!("token_file {}\n", path.display()),
    });
    let trust = trust.as_ref().map(|path| format!("trust {}\n", path.display()));
    let more = [token, trust].map(Option::unwrap_or_default).concat();
    format!(
        "{HEADING}\npid {}\nstart {}\nboot {}\nworld_size {}\ninstance {}\nsecret {}\nbroker {}\n{more}end\n",
        owner.pid,
        owner.start,
        owner.boot,
        handover.world_size,
        hex(&handover.instance),
        handover.secret.to_hex(),
        url,
    )
}

fn decode(text: &str) -> Option<(Handover, ProcessName)> {
    let mut lines = text.lines();
    if lines.next()? != HEADING || text.lines().next_back()? != "end" {
        return None;
    }
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let owner = ProcessName {
        pid: field("pid")?.parse().ok()?,
        start: field("start")?.parse().ok()?,
        boot: field("boot")?.to_owned(),
    };
    let token = field("token").map(|text| Token::Text(text.to_owned()));
    let broker = BrokerAccess {
        url: field("broker")?.to_owned(),
        token: token.or_else(|| Some(Token::File(field("token_file")?.into()))),
        trust: field("trust").map(Into::into),
    };
    let handover = Handover {
        world_size: field("world_size")?.parse().ok()?,
        instance: unhex(field("instance")?)?,
        secret: Secret::from_hex(field("secret")?)?,
        broker,
    };
    Some((handover, owner))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use proptest::prelude::*;

    use super::*;

    fn handover() -> Handover {
        Handover {
            world_size: 4,
            instance: [7; 16],
            secret: Secret::from_bytes([9; 32]),
            broker: BrokerAccess::new("pulsar://127.0.0.1:6650").with_token(Token::Text("abc".to_owned())),
        }
    }

    fn exchange(directory: &Path) -> Exchange {
        Exchange { directory: directory.join(format!("gradwire-{}", uid())), made: true }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn what_is_published_is_found_and_gone_afterwards() {
        let directory = tempfile::tempdir().unwrap();
        let exchange = exchange(directory.path());
        let published = exchange.publish("job", &handover()).unwrap();
        assert_eq!(exchange.wait("job", 4, soon()).unwrap(), handover());
        assert_eq!(exchange.wait("job", 3, soon()).unwrap_err().kind, FaultKind::WorldMismatch);
        assert_eq!(exchange.wait("other", 4, soon()).unwrap_err().kind, FaultKind::DeadlineExceeded);
        assert_eq!(fs::metadata(&published.path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(exchange.publish("job", &handover()).unwrap_err().kind, FaultKind::JobNameTaken);
        drop(published);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_dead_job_left_is_not_taken_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let exchange = exchange(directory.path());
        let published = exchange.publish("dead", &handover()).unwrap();
        let own = ProcessName::of(std::process::id()).unwrap();
        fs::write(&published.path, encode(&handover(), &ProcessName { start: own.start + 1, ..own })).unwrap();
        assert_eq!(exchange.wait("dead", 4, soon()).unwrap_err().kind, FaultKind::DeadlineExceeded);
        let living = exchange.publish("living", &handover()).unwrap();
        assert!(!published.path.exists());
        assert!(living.path.exists());
    }

    #[test]
    fn a_directory_or_file_that_others_can_touch_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let exchange = exchange(directory.path());
        let published = exchange.publish("job", &handover()).unwrap();
        fs::set_permissions(&published.path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(exchange.wait("job", 4, soon()).unwrap_err().kind, FaultKind::DeadlineExceeded);
        drop(published);

        fs::create_dir(&exchange.directory).unwrap();
        fs::set_permissions(&exchange.directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(exchange.publish("job", &handover()).unwrap_err().kind, FaultKind::System);
        fs::remove_dir(&exchange.directory).unwrap();

        std::os::unix::fs::symlink(directory.path(), &exchange.directory).unwrap();
        assert_eq!(exchange.publish("job", &handover()).unwrap_err().kind, FaultKind::System);
    }

    #[test]
    fn the_session_directory_is_used_only_if_it_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let text = directory.path().to_str().unwrap().to_owned();
        let find = || Exchange::find(&|name| (name == "XDG_RUNTIME_DIR").then(|| text.clone()));
        fs::set_permissions(&text, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!find().made);
        fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find().directory, Path::new("/tmp").join(format!("gradwire-{}", uid())));
    }

    proptest! {
        #[test]
        fn any_text_is_a_handover_or_none(text in "(gradwire-handover 1\n)?([a-z_]{2,10} [0-9a-f]{0,70}\n){0,8}(end\n)?") {
            let _ = decode(&text);
        }

        #[test]
        fn part_of_a_file_is_none(length in 0_usize..300) {
            let text = encode(&handover(), &ProcessName { pid: 1, start: 2, boot: "b".to_owned() });
            // Without the last newline it says the same.
            prop_assume!(length < text.len() - 1);
            prop_assert!(decode(&text[..length]).is_none());
        }
    }
}
