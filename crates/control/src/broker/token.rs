//! Whom the broker admits: the token, where it comes from, and how what a client shows is compared with it.
//!
//! Only a keyed digest of the token is held while the broker runs: comparing digests takes the same time wherever the
//! texts differ. Nothing here prints a token.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use gradwire_proto::secret::PROOF_BYTES;
use gradwire_proto::{Fault, FaultKind, Secret};

use crate::access::{Token, check_word, read_word};

/// Longest token.
const TOKEN_BYTES_MAX: usize = 4096;
/// What the digest is made for.
const TOKEN_DIGEST: &str = "gradwire broker token digest";
/// The authentication method of Pulsar's clients that goes with a token.
const METHOD: &str = "token";

/// Decides about clients.
pub(super) struct Admission {
    key: Secret,
    file: Option<PathBuf>,
    /// Nothing if everyone is admitted.
    known: Option<Mutex<Known>>,
    /// Clients have shown a certificate before they are asked for anything else.
    certificates: bool,
}

struct Known {
    digest: [u8; PROOF_BYTES],
    version: Option<FileVersion>,
}

/// Tells whether a file was written, or replaced, since it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Admission {
    /// # Errors
    /// When the token's file cannot be read or holds no token; when the token is empty or has spaces.
    pub(super) fn new(token: Option<&Token>, certificates: bool) -> Result<Self, Fault> {
        let key = Secret::from_bytes([0x5a; 32]);
        let (file, known) = match token {
            None => (None, None),
            Some(Token::Text(token)) => {
                check_word(token, TOKEN_BYTES_MAX)
                    .map_err(|what| invalid(format!("the broker's token is no token: {what}")))?;
                (None, Some(Known { digest: digest(&key, token), version: None }))
            }
            Some(Token::File(path)) => {
                let (token, version) = read(path).map_err(invalid)?;
                // A pipe is read once: it has nothing to say the second time.
                let file = version.map(|_| path.clone());
                (file, Some(Known { digest: digest(&key, &token), version }))
            }
        };
        Ok(Self { key, file, known: known.map(Mutex::new), certificates })
    }

    /// Whether a client that shows this may connect.
    ///
    /// # Errors
    /// The reason, for the client.
    pub(super) fn check(&self, method: &str, data: &[u8]) -> Result<(), String> {
        let Some(known) = &self.known else { return Ok(()) };
        match method {
            METHOD => {}
            "" | "none" => return Err("this broker wants a token, and the client shows none".to_owned()),
            "tls" if self.certificates => {
                return Err("this broker wants a token beside the client's certificate".to_owned());
            }
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(format!(
                    "this broker takes the authentication method 'token', and the client uses '{}'",
                    other.escape_debug()
                ));
            }
        }
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        self.reload(&mut known);
        if self.key.verifies(TOKEN_DIGEST, &[data], &known.digest) {
            return Ok(());
        }
        Err(if data.is_empty() { "the token is missing" } else { "the token is wrong" }.to_owned())
    }

    /// Reads the token's file again if it has changed. While it cannot be read, the token that was read last counts.
    fn reload(&self, known: &mut Known) {
        let Some(path) = &self.file else { return };
        let now = FileVersion::of(path);
        if now.as_ref().is_ok_and(|version| *version == known.version) {
            return;
        }
        let again = match now {
            Ok(None) => Err(format!("{} is no file any more", path.display())),
            _ => read(path),
        };
        match again {
            Ok((token, version)) => {
                *known = Known { digest: digest(&self.key, &token), version };
                tracing::info!(path = %path.display(), "the embedded broker has read its token again");
            }
            Err(error) => tracing::warn!(error, "the embedded broker goes on with the token that it had"),
        }
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("file", &self.file).field("certificates", &self.certificates).finish()
    }
}

impl FileVersion {
    /// Nothing for what is no file in the narrow sense.
    fn of(path: &Path) -> std::io::Result<Option<Self>> {
        let metadata = fs::metadata(path)?;
        Ok(metadata.is_file().then(|| Self {
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }))
    }
}

fn digest(key: &Secret, token: &str) -> [u8; PROOF_BYTES] {
    key.proof(TOKEN_DIGEST, &[token.as_bytes()])
}

/// The token in a file, and which version of the file it was read from.
fn read(path: &Path) -> Result<(String, Option<FileVersion>), String> {
    let shown = path.display();
    // Taken before the file is read: what is written in between is noticed the next time.
    let version = FileVersion::of(path).map_err(|error| format!("cannot read the token from {shown}: {error}"))?;
    let token =
        read_word(path, TOKEN_BYTES_MAX).map_err(|what| format!("cannot read the token from {shown}: {what}"))?;
    Ok((token, version))
}

fn invalid(detail: String) -> Fault {
    Fault::new(FaultKind::InvalidArgument, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "  abc\n").unwrap();
        let admission = Admission::new(Some(&Token::File(path.clone())), false).unwrap();
        admission.check("token", b"abc").unwrap();
        for bad in ["", "\n", "a b", "a\nb", &"x".repeat(TOKEN_BYTES_MAX + 1), &"x".repeat(3 * TOKEN_BYTES_MAX)] {
            fs::write(&path, bad).unwrap();
            let fault = Admission::new(Some(&Token::File(path.clone())), false).unwrap_err();
            assert!(fault.detail.contains(path.to_str().unwrap()), "{fault}");
        }
        let fault = Admission::new(Some(&Token::File("/nonexistent/token".into())), false).unwrap_err();
        assert!(fault.detail.contains("/nonexistent/token"), "{fault}");
        assert_eq!(Admission::new(Some(&"".into()), false).unwrap_err().kind, FaultKind::InvalidArgument);
    }

    #[test]
    fn what_clients_hear_says_what_is_missing() {
        let admission = Admission::new(Some(&"secret".into()), false).unwrap();
        admission.check("token", b"secret").unwrap();
        for (method, data, says) in [
            ("", &b""[..], "wants a token"),
            ("none", b"", "wants a token"),
            ("basic", b"user:secret", "'basic'"),
            ("token", b"", "missing"),
            ("token", b"secret ", "wrong"),
            ("token", b"secre", "wrong"),
            ("\n", b"secret", "'\\n'"),
        ] {
            let reason = admission.check(method, data).unwrap_err();
            assert!(reason.contains(says), "{method}: {reason}");
            assert!(!reason.contains("secret"), "{reason}");
        }
        Admission::new(None, false).unwrap().check("token", b"whatever").unwrap();
    }

    #[test]
    fn a_changed_file_counts_from_the_next_client_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "first").unwrap();
        let admission = Admission::new(Some(&Token::File(path.clone())), false).unwrap();
        admission.check("token", b"first").unwrap();
        // As careful programs do it: a new file takes the old one's place.
        let new = directory.path().join("new");
        fs::write(&new, "other").unwrap();
        fs::rename(&new, &path).unwrap();
        admission.check("token", b"first").unwrap_err();
        admission.check("token", b"other").unwrap();
        // One that is gone, or holds nothing, locks nobody out.
        fs::write(&path, "").unwrap();
        admission.check("token", b"other").unwrap();
        fs::remove_file(&path).unwrap();
        admission.check("token", b"other").unwrap();
        fs::write(&path, "third").unwrap();
        admission.check("token", b"other").unwrap_err();
        admission.check("token", b"third").unwrap();
    }

    #[test]
    fn nothing_prints_a_token() {
        let token = Token::from("hush");
        let admission = Admission::new(Some(&token), false).unwrap();
        assert!(!format!("{token:?} {admission:?}").contains("hush"));
    }
}
