//! What the ranks write, on its way to the reader: cut into lines, in order, without ever holding the launcher up.
//!
//! Reader threads put pieces in and never wait. One thread takes them out and hands lines to the sink, which may be as
//! slow as it likes: above a high-water mark the agents are asked to leave further output in the ranks' pipes.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::agents::Event;

/// Longest line: a longer one is handed on in pieces of this size, each as a line.
pub(crate) const LINE_BYTES_MAX: usize = 64 * 1024;
/// Lines kept of every rank for the report.
const TAIL_LINES: usize = 20;
/// Bytes kept of each of them.
const TAIL_LINE_BYTES_MAX: usize = 512;
/// Bytes waiting above which the agents are asked to pause, and below which they go on.
const WAITING_BYTES_HIGH: usize = 4 << 20;
const WAITING_BYTES_LOW: usize = 1 << 20;

/// Where a line was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A line that a rank wrote.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'a> {
    /// Who wrote it.
    pub(crate) rank: u32,
    /// Where to.
    pub(crate) stream: Stream,
    /// What, without the newline; any bytes, at most [`LINE_BYTES_MAX`].
    pub(crate) bytes: &'a [u8],
}

/// Prints a line to the same stream of this process, behind `[rank] `, in one write.
pub(crate) fn forward_line(line: &Line<'_>) {
    static CLOSED: AtomicBool = AtomicBool::new(false);
    let mut text = Vec::with_capacity(line.bytes.len() + 8);
    let _ = write!(text, "[{}] ", line.rank);
    text.extend_from_slice(line.bytes);
    text.push(b'\n');
    let written = match line.stream {
        Stream::Stdout => write_whole(io::stdout().lock(), &text),
        Stream::Stderr => write_whole(io::stderr().lock(), &text),
    };
    // A reader that has gone away ends neither the job nor the other stream; say so once.
    if written.is_err() && !CLOSED.swap(true, Ordering::Relaxed) {
        let _ = writeln!(io::stderr(), "gradwire: nobody reads the ranks' output any more; the job goes on");
    }
}

/// The thread that hands lines to the sink. Dropped, it is told that no more will come.
pub(super) struct Output {
    pub(super) outlet: Arc<Outlet>,
    pump: Option<JoinHandle<HashMap<u32, Tail>>>,
}

impl Output {
    /// It tells the driver when to hold output back, and when all was handed on.
    pub(super) fn start(sink: impl FnMut(Line<'_>) + Send + 'static, events: &Sender<Event>) -> io::Result<Self> {
        let outlet = Outlet::new();
        let (pumped, events) = (Arc::clone(&outlet), events.clone());
        let pump = std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            let tails = pumped.pump(sink, |flow| drop(events.send(Event::Flow(flow))));
            let _ = events.send(Event::OutputDone);
            tails
        })?;
        Ok(Self { outlet, pump: Some(pump) })
    }

    /// The last lines of the ranks, when all was handed on.
    pub(super) fn into_tails(mut self) -> HashMap<u32, Tail> {
        self.pump.take().and_then(|pump| pump.join().ok()).unwrap_or_default()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.outlet.finish();
    }
}

fn write_whole(mut to: impl io::Write, text: &[u8]) -> io::Result<()> {
    to.write_all(text)?;
    to.flush()
}

/// The pieces that wait for the sink.
pub(super) struct Outlet {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(u32, Stream, Vec<u8>)>,
    bytes: usize,
    paused: bool,
    finished: bool,
}

/// What agents should do about the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Pause,
    Resume,
}

impl Outlet {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a piece in. Tells when the agents should pause.
    pub(super) fn push(&self, rank: u32, stream: Stream, bytes: &[u8]) -> Option<Flow> {
        let mut state = self.lock();
        state.bytes += bytes.len();
        state.waiting.push_back((rank, stream, bytes.to_vec()));
        self.changed.notify_one();
        let pause = state.bytes > WAITING_BYTES_HIGH && !state.paused;
        state.paused |= pause;
        pause.then_some(Flow::Pause)
    }

    /// No more pieces will come.
    pub(super) fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_one();
    }

    /// Hands lines to the sink until [`Outlet::finish`] and all is handed on; returns the last lines of each rank.
    /// `flow` is called when the agents may go on.
    pub(super) fn pump(&self, mut sink: impl FnMut(Line<'_>), flow: impl Fn(Flow)) -> HashMap<u32, Tail> {
        let mut lines: HashMap<(u32, Stream), Lines> = HashMap::new();
        let mut tails: HashMap<u32, Tail> = HashMap::new();
        let mut emit = |rank: u32, stream: Stream, bytes: &[u8]| {
            tails.entry(rank).or_default().push(bytes);
            sink(Line { rank, stream, bytes });
        };
        while let Some((rank, stream, bytes)) = self.pop(&flow) {
            lines.entry((rank, stream)).or_default().feed(&bytes, |line| emit(rank, stream, line));
        }
        let mut rest: Vec<_> = lines.into_iter().collect();
        rest.sort_by_key(|((rank, stream), _)| (*rank, *stream == Stream::Stderr));
        for ((rank, stream), lines) in rest {
            lines.finish(|line| emit(rank, stream, line));
        }
        tails
    }

    fn pop(&self, flow: &impl Fn(Flow)) -> Option<(u32, Stream, Vec<u8>)> {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.waiting.pop_front() {
                state.bytes -= piece.2.len();
                if state.paused && state.bytes < WAITING_BYTES_LOW {
                    state.paused = false;
                    flow(Flow::Resume);
                }
                return Some(piece);
            }
            if state.finished {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Cuts one stream into lines.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    fn feed(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.extend(&bytes[..end], &mut emit);
            emit(&self.partial);
            self.partial.clear();
            bytes = &bytes[end + 1..];
        }
        self.extend(bytes, &mut emit);
    }

    /// Adds to the line that is not complete yet; hands a piece on whenever more comes than one may hold.
    fn extend(&mut self, mut bytes: &[u8], emit: &mut impl FnMut(&[u8])) {
        while self.partial.len() + bytes.len() > LINE_BYTES_MAX {
            let (now, later) = bytes.split_at(LINE_BYTES_MAX - self.partial.len());
            self.partial.extend_from_slice(now);
            emit(&self.partial);
            self.partial.clear();
            bytes = later;
        }
        self.partial.extend_from_slice(bytes);
    }

    /// The stream has ended: what came without a newline is a line too.
    fn finish(self, mut emit: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            emit(&self.partial);
        }
    }
}

/// The last lines of a rank.
#[derive(Default)]
pub(super) struct Tail(VecDeque<Vec<u8>>);

impl Tail {
    fn push(&mut self, line: &[u8]) {
        if self.0.len() == TAIL_LINES {
            self.0.pop_front();
        }
        self.0.push_back(line[..line.len().min(TAIL_LINE_BYTES_MAX)].to_vec());
    }

    pub(super) fn into_lines(self) -> Vec<Vec<u8>> {
        self.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        for piece in pieces {
            lines.feed(piece, |line| found.push(line.to_vec()));
        }
        lines.finish(|line| found.push(line.to_vec()));
        found
    }

    #[test]
    fn lines_end_at_newlines_or_at_the_end() {
        assert_eq!(cut(&[b"a\nb", b"c\n\n", b"\xff\0d"]), [b"a".to_vec(), b"bc".to_vec(), vec![], b"\xff\0d".to_vec()]);
        assert!(cut(&[b""]).is_empty());
    }

    #[test]
    fn a_long_line_comes_in_pieces() {
        let long = vec![b'x'; LINE_BYTES_MAX + 1];
        let lengths = |bytes: &[u8]| cut(&[bytes]).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(&long), [LINE_BYTES_MAX, 1]);
        assert_eq!(lengths(&[&long[1..], b"\n"].concat()), [LINE_BYTES_MAX]);
    }

    proptest! {
        #[test]
        fn no_byte_is_lost_whatever_the_pieces(bytes in prop::collection::vec(prop::sample::select(vec![b'a', b'\n', 0xff]), 0..200), piece in 1_usize..50) {
            let pieces: Vec<&[u8]> = bytes.chunks(piece).collect();
            let mut joined = cut(&pieces).join(&b'\n');
            if bytes.ends_with(b"\n") {
                joined.push(b'\n');
            }
            prop_assert_eq!(joined, bytes);
        }
    }

    #[test]
    fn a_slow_sink_pauses_the_agents_and_lets_them_go_on() {
        let outlet = Outlet::new();
        let line = [vec![b'x'; LINE_BYTES_MAX - 1], b"\n".to_vec()].concat();
        let flows: Vec<_> = (0..80).filter_map(|_| outlet.push(0, Stream::Stdout, &line)).collect();
        assert_eq!(flows, [Flow::Pause]);
        outlet.finish();
        let resumed = std::cell::Cell::new(0);
        let mut count = 0;
        let tails = outlet.pump(|_| count += 1, |_| resumed.set(resumed.get() + 1));
        assert_eq!((count, resumed.get()), (80, 1));
        assert_eq!(tails[&0].0.len(), TAIL_LINES);
    }
}
