//! Starting this program's own ranks, and hearing from them.
//!
//! A rank reports events as single lines of JSON on its standard output. Everything else that it prints belongs to
//! people, and goes to standard error, so that standard output stays the command's own.

use std::io::{self, Write as _};
use std::process::ExitCode;

use gradwire::TransportChoice;
use gradwire_proto::{Fault, FaultKind, WireFormat};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::output::complain;
use crate::args::{Transport, Wire};
use crate::launch::{self, LaunchPlan, Line, Starter, Stream};

/// Why a command that starts ranks ends without a result.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command itself failed.
    Fault(Fault),
    /// A rank failed, which was reported; this is the exit code to pass on.
    Ranks(ExitCode),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Failure {
    /// Says why, unless that was said, and gives the exit code: 2 where the command line makes no sense, as for what is
    /// wrong with it at first sight.
    pub(crate) fn exit_code(self) -> ExitCode {
        match self {
            Self::Ranks(code) => code,
            Self::Fault(fault) => {
                complain(&fault);
                if fault.kind == FaultKind::InvalidArgument { ExitCode::from(2) } else { ExitCode::FAILURE }
            }
        }
    }
}

/// Runs all ranks of `plan` to their end. `on_event` gets each event as it comes, with the rank that it came from and the
/// way to ask for one more.
///
/// # Errors
/// [`Failure`], after saying on standard error which rank failed and how.
pub(crate) fn run<E: DeserializeOwned>(
    plan: LaunchPlan,
    mut on_event: impl FnMut(u32, E, &Starter) + Send + 'static,
) -> Result<(), Failure> {
    let started = launch::run(plan, move |line, starter| match event(&line) {
        Some(event) => on_event(line.rank, event, starter),
        None => pass_on(&line),
    });
    match started {
        Ok(report) if report.success() => Ok(()),
        Ok(report) => {
            complain(&report);
            Err(Failure::Ranks(report.exit_code()))
        }
        Err(error) => {
            complain(&error);
            Err(Failure::Ranks(error.exit_code()))
        }
    }
}

/// Tells the parent about an event. Called by ranks.
///
/// # Errors
/// A [`Fault`] of kind `System` when the parent does not listen any more.
pub(crate) fn emit(event: &impl Serialize) -> Result<(), Fault> {
    let failed = |error: &dyn std::fmt::Display| {
        Fault::new(FaultKind::System, format!("the command that started this rank cannot be told anything: {error}"))
    };
    let mut line = serde_json::to_string(event).map_err(|error| failed(&error))?;
    line.push('\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| failed(&error))
}

/// Says what a rank's result was, and gives its exit code.
pub(crate) fn exit_code(result: Result<(), Fault>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            complain(&fault);
            ExitCode::FAILURE
        }
    }
}

/// The items of a list whose length the caller knows.
///
/// # Errors
/// A [`Fault`] of kind `ProtocolViolation` when the length is another.
pub(crate) fn exactly<T, const N: usize>(items: Vec<T>) -> Result<[T; N], Fault> {
    let found = items.len();
    items.try_into().map_err(|_| {
        let detail = format!("{found} items came back for {N}: this is a defect in gradwire, please report it");
        Fault::new(FaultKind::ProtocolViolation, detail)
    })
}

impl From<Wire> for WireFormat {
    fn from(wire: Wire) -> Self {
        match wire {
            Wire::Fp32 => Self::Fp32,
            Wire::Fp16 => Self::Fp16,
            Wire::Bf16 => Self::Bf16,
        }
    }
}

impl From<Transport> for TransportChoice {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Shm => Self::Shm,
            Transport::Tcp => Self::Tcp,
        }
    }
}

fn event<E: DeserializeOwned>(line: &Line<'_>) -> Option<E> {
    match line.stream {
        Stream::Stdout => serde_json::from_slice(line.bytes).ok(),
        Stream::Stderr => None,
    }
}

fn pass_on(line: &Line<'_>) {
    match line.stream {
        Stream::Stderr => launch::forward_line(line),
        Stream::Stdout => launch::forward_line(&Line { rank: line.rank, stream: Stream::Stderr, bytes: line.bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_json_on_standard_output_is_an_event() {
        let event = |stream, bytes| event::<Vec<u32>>(&Line { rank: 0, stream, bytes });
        assert_eq!(event(Stream::Stdout, b"[1, 2]"), Some(vec![1, 2]));
        assert_eq!(event(Stream::Stdout, b"[1, 2] and more"), None);
        assert_eq!(event(Stream::Stdout, b"\xff"), None);
        assert_eq!(event(Stream::Stderr, b"[1, 2]"), None);
    }

    #[test]
    fn a_list_of_another_length_is_a_fault() {
        assert_eq!(exactly::<_, 2>(vec![1, 2]), Ok([1, 2]));
        assert_eq!(exactly::<_, 2>(vec![1]).map_err(|fault| fault.kind), Err(FaultKind::ProtocolViolation));
    }
}
