//! How a broker is reached: its URL, what is shown to it, and whom to trust.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use gradwire_proto::{Fault, FaultKind};

/// Longest token that is read from a file.
const TOKEN_BYTES_MAX: usize = 64 << 10;

/// What a client shows to its broker, and a broker wants to see (authentication method `token`).
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// This text: one word.
    Text(String),
    /// The word that this file holds when a link is opened, so that a token can be renewed while a job or a broker
    /// runs. What is connected already stays.
    File(PathBuf),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Text(..)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

impl Token {
    /// The token itself.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] that names the file, when it cannot be read or does not hold one word.
    pub fn read(&self) -> Result<String, Fault> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => read_word(path, TOKEN_BYTES_MAX).map_err(|reason| {
                let detail = format!("the broker's token cannot be read from '{}': {reason}", path.display());
                Fault::new(FaultKind::InvalidArgument, detail)
            }),
        }
    }
}

impl From<String> for Token {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Token {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// The one word that a file holds.
pub(crate) fn read_word(path: &Path, bytes_max: usize) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(2 * bytes_max as u64).read_to_string(&mut text));
    read.map_err(|error| error.to_string())?;
    let word = text.trim();
    check_word(word, bytes_max)?;
    Ok(word.to_owned())
}

/// Whether this is one word.
pub(crate) fn check_word(word: &str, bytes_max: usize) -> Result<(), String> {
    if word.is_empty() {
        return Err("it is empty".to_owned());
    }
    if word.len() > bytes_max || word.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(format!("it is not one word of at most {bytes_max} bytes"));
    }
    Ok(())
}

/// How to reach a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerAccess {
    /// `pulsar://host:port`, or `pulsar+ssl://host:port` for TLS.
    pub url: String,
    /// What to show to it.
    pub token: Option<Token>,
    /// PEM file with the certificates that a TLS broker's chain may end in, in place of the system's.
    pub trust: Option<PathBuf>,
}

impl BrokerAccess {
    /// A broker without authentication, trusted by the system's certificates where it uses TLS.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), token: None, trust: None }
    }

    /// With this token.
    #[must_use]
    pub fn with_token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// The certificates to trust, in PEM.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] that names the file, when it cannot be read or holds no certificate.
    pub(crate) fn trusted(&self) -> Result<Option<Vec<u8>>, Fault> {
        let Some(path) = &self.trust else { return Ok(None) };
        let wrong = |reason: &str| {
            let detail = format!("the certificates to trust cannot be read from '{}': {reason}", path.display());
            Fault::new(FaultKind::InvalidArgument, detail)
        };
        let pem = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        if !pem.windows(11).any(|window| window == b"CERTIFICATE") {
            return Err(wrong("it holds no PEM certificate"));
        }
        Ok(Some(pem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word_and_read_anew_each_time() {
        let path = std::env::temp_dir().join(format!("gradwire-token-{}", std::process::id()));
        let token = Token::File(path.clone());
        std::fs::write(&path, "  first\n").unwrap();
        assert_eq!(token.read().unwrap(), "first");
        std::fs::write(&path, "second").unwrap();
        assert_eq!(token.read().unwrap(), "second");
        for bad in ["", "\n", "two words", "two\nlines", "a\u{7}", &"x".repeat(3 * TOKEN_BYTES_MAX)] {
            std::fs::write(&path, bad).unwrap();
            let fault = token.read().unwrap_err();
            assert!(fault.detail.contains(&path.display().to_string()), "{fault}");
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(token.read().unwrap_err().kind, FaultKind::InvalidArgument);
    }

    #[test]
    fn a_token_is_not_printed() {
        let access = BrokerAccess::new("pulsar://h").with_token(Token::Text("secret-word".to_owned()));
        assert!(!format!("{access:?}").contains("secret-word"));
    }

    #[test]
    fn a_file_without_certificates_is_named() {
        let mut access = BrokerAccess::new("pulsar+ssl://h");
        access.trust = Some("/nonexistent/ca.pem".into());
        assert!(access.trusted().unwrap_err().detail.contains("/nonexistent/ca.pem"));
        access.trust = Some("/dev/null".into());
        assert!(access.trusted().unwrap_err().detail.contains("no PEM certificate"));
    }
}
