//! What the launcher and its agents say to each other, over the agent's standard input and output.
//!
//! Both directions carry frames: a 4-byte little-endian length, a kind byte, and that many bytes of content. What is
//! said once is JSON; the ranks' output travels as the bytes that it is. Before its first frame an agent writes
//! [`GREETING`], so that what a remote shell prints on login can be told from it and skipped.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What an agent writes first.
pub(crate) const GREETING: &[u8] = b"\0gradwire-agent-2\n";
/// Most bytes that a remote shell may print before the greeting.
pub(crate) const CHATTER_BYTES_MAX: usize = 64 * 1024;
/// Largest content of a frame.
pub(crate) const FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Largest piece of a rank's output in one frame.
pub(crate) const OUTPUT_BYTES_MAX: usize = 32 * 1024;

/// Kind of a frame: JSON of a [`Command`] or [`Report`].
pub(crate) const KIND_MESSAGE: u8 = 0;
/// Kind of a frame: a rank's number and what it wrote to standard output.
pub(crate) const KIND_STDOUT: u8 = 1;
/// Kind of a frame: a rank's number and what it wrote to standard error.
pub(crate) const KIND_STDERR: u8 = 2;

/// What the launcher asks of an agent.
#[derive(Serialize, Deserialize)]
pub(crate) enum Command {
    /// Start these ranks. May come again, for others and for those that have ended, until [`Command::Close`].
    Start(Plan),
    /// No more ranks will be started: go when those that there are have ended.
    Close,
    /// Pass a signal on to the process groups of ranks; SIGKILL also to all that they started.
    Signal {
        /// Its number.
        number: i32,
        /// To which ranks; none: to all.
        ranks: Option<Vec<u32>>,
    },
    /// End every rank: SIGTERM, and SIGKILL after the grace.
    Stop {
        /// Milliseconds between the two; 0: SIGKILL at once.
        grace_ms: u64,
    },
    /// Read no more output of the ranks for now: the launcher's reader is slow.
    Pause,
    /// Read on.
    Resume,
}

/// Ranks of one host. Holds the job's secret (in the variables): never printed.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Program and arguments, as bytes: they need not be UTF-8.
    pub(crate) command: Vec<Vec<u8>>,
    /// Where to run it.
    pub(crate) directory: Vec<u8>,
    /// Variables for every rank.
    pub(crate) variables: Vec<(Vec<u8>, Vec<u8>)>,
    /// Each rank's number and its own variables.
    pub(crate) ranks: Vec<(u32, Vec<(String, String)>)>,
}

/// What an agent tells the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// First of all.
    Hello(Hello),
    /// A rank could not be started at all.
    NotStarted {
        /// Its number.
        rank: u32,
        /// Why, and what to do.
        detail: String,
    },
    /// A rank runs.
    Started {
        /// Its number.
        rank: u32,
    },
    /// A rank ended. In the order in which they ended.
    Ended {
        /// Its number.
        rank: u32,
        /// How.
        end: End,
    },
    /// Somebody else asked the agent to end: it starts no more ranks, and ends those that it has.
    Ending,
    /// All ranks have ended, their descendants too, all output was sent, and no more ranks will be started.
    Done {
        /// How many processes the ranks had left behind.
        leftovers: u32,
    },
}

/// Who an agent is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Version of the binary: launcher and agent must be of the same one.
    pub(crate) version: String,
    /// Name of the host.
    pub(crate) hostname: String,
    /// `SSH_CONNECTION` as the agent found it: how the two hosts see each other.
    pub(crate) ssh_connection: Option<String>,
    /// A TCP port that was free on the host just now.
    pub(crate) free_port: u16,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// Somebody else took its status.
    Unknown,
}

impl End {
    /// Whether this is a good end.
    pub(crate) const fn success(self) -> bool {
        matches!(self, Self::Code(0))
    }

    /// What a shell would make of it: the code, or 128 + the signal's number.
    pub(crate) fn shell_code(self) -> u8 {
        match self {
            Self::Code(code) => u8::try_from(code & 0xff).unwrap_or(1),
            Self::Signal(number) => u8::try_from(128 + (number & 0x7f)).unwrap_or(1),
            Self::Unknown => 1,
        }
    }
}

/// Writes one message and flushes.
pub(crate) fn send<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let body = serde_json::to_vec(message).map_err(io::Error::other)?;
    write_frame(to, KIND_MESSAGE, &[&body])
}

/// Writes a piece of a rank's output and flushes.
pub(crate) fn send_output(to: &mut impl Write, kind: u8, rank: u32, bytes: &[u8]) -> io::Result<()> {
    write_frame(to, kind, &[&rank.to_le_bytes(), bytes])
}

fn write_frame(to: &mut impl Write, kind: u8, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too much for one message between launcher and agent"));
    }
    // One write: what a reader sees is whole, or the end.
    let mut frame = Vec::with_capacity(5 + length);
    frame.extend_from_slice(&(length as u32).to_le_bytes());
    frame.push(kind);
    for part in parts {
        frame.extend_from_slice(part);
    }
    to.write_all(&frame)?;
    to.flush()
}

/// Cuts a stream of bytes into frames, however they arrive.
#[derive(Default)]
pub(crate) struct Frames {
    buffer: Vec<u8>,
    start: usize,
}

impl Frames {
    /// Takes in bytes that arrived.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame.
    ///
    /// # Errors
    /// When the stream is not one of frames.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u8, &[u8])>> {
        let rest = &self.buffer[self.start..];
        let Some((head, rest)) = rest.split_first_chunk::<5>() else { return Ok(None) };
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is not the protocol of a gradwire agent"));
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.start += 5 + length;
        Ok(Some((head[4], &rest[..length])))
    }
}

/// Reads JSON of a message frame.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    serde_json::from_slice(body).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Splits an output frame into the rank and what it wrote.
pub(crate) fn parse_output(body: &[u8]) -> io::Result<(u32, &[u8])> {
    let (rank, bytes) = body
        .split_first_chunk::<4>()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "an output frame without a rank"))?;
    Ok((u32::from_le_bytes(*rank), bytes))
}

/// Reads until just behind the greeting, skipping what a login shell printed before it.
///
/// # Errors
/// When the stream ends first, or more than [`CHATTER_BYTES_MAX`] bytes come.
pub(crate) fn skip_to_greeting(from: &mut impl Read) -> io::Result<()> {
    let mut seen = Vec::new();
    let mut byte = [0];
    while seen.len() < CHATTER_BYTES_MAX {
        from.read_exact(&mut byte)?;
        seen.push(byte[0]);
        if seen.ends_with(GREETING) {
            return Ok(());
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "what answered is not a gradwire agent"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_greeting_is_found_behind_chatter() {
        let mut stream = b"Welcome!\n\0gradwire\0gradwire-agent-2\nrest".as_slice();
        skip_to_greeting(&mut stream).unwrap();
        assert_eq!(stream, b"rest");
        assert!(skip_to_greeting(&mut b"Welcome!".as_slice()).is_err());
        assert!(skip_to_greeting(&mut io::repeat(b'x')).is_err());
    }

    #[test]
    fn codes_are_those_of_a_shell() {
        assert_eq!(End::Code(0).shell_code(), 0);
        assert_eq!(End::Code(300).shell_code(), 44);
        assert_eq!(End::Code(-1).shell_code(), 255);
        assert_eq!(End::Signal(9).shell_code(), 137);
        assert!(!End::Unknown.success());
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(outputs in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)), 0..20), piece in 1_usize..64) {
            let mut stream = Vec::new();
            for (rank, bytes) in &outputs {
                send_output(&mut stream, KIND_STDOUT, *rank, bytes).unwrap();
            }
            let mut frames = Frames::default();
            let mut found = Vec::new();
            for part in stream.chunks(piece) {
                frames.feed(part);
                while let Some((kind, body)) = frames.next().unwrap() {
                    prop_assert_eq!(kind, KIND_STDOUT);
                    let (rank, bytes) = parse_output(body).unwrap();
                    found.push((rank, bytes.to_vec()));
                }
            }
            prop_assert_eq!(found, outputs);
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut frames = Frames::default();
            frames.feed(&bytes);
            while let Ok(Some((_, body))) = frames.next() {
                let _ = parse::<Command>(body);
                let _ = parse::<Report>(body);
                let _ = parse_output(body);
            }
        }
    }
}
