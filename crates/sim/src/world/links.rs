//! What processes send each other: departures, arrivals, links that end.

use gradwire_proto::frame::FrameHeader;

use super::{Departing, Event, World};
use crate::network::{Item, Write};
use crate::plan::Links;
use crate::process::Incoming;
use crate::report::ProcessId;

impl World<'_> {
    pub(super) fn send(&mut self, from: ProcessId, to: ProcessId, item: Item) {
        let (from_end, to_end) = (self.end(from), self.end(to));
        let mut arrivals = std::mem::take(&mut self.arrivals);
        self.network.carry(self.now, from_end, to_end, item, &mut arrivals);
        for (at, item) in arrivals.drain(..) {
            self.queue.plan(at, Event::Arrive { from, to, item });
        }
        self.arrivals = arrivals;
    }

    /// A write's memory is read. What is not there any more is not sent.
    pub(super) fn depart(&mut self, from: ProcessId, to: ProcessId, write: Departing) {
        let Departing { immediate, target, source: (key, range), token } = write;
        let state = &self.processes[from.index()];
        if state.program.is_none() {
            return;
        }
        let bytes = state.memory.part(key, range).map(Box::from);
        self.hand(from, Incoming::Sent { to, token });
        if let Some(bytes) = bytes {
            self.send(from, to, Item::Write(Box::new(Write { immediate, target, bytes })));
        }
    }

    pub(super) fn arrive(&mut self, from: ProcessId, to: ProcessId, item: Item) {
        self.note_arrival(from, to, &item);
        if !self.is_running(to) {
            // Whoever calls a process that is no more finds nobody, unless its machine is gone too.
            let called = matches!(item, Item::Hello { .. } | Item::State { .. });
            if called && !self.is_silent(to) && self.is_running(from) {
                self.send(to, from, Item::Down);
            }
            return;
        }
        let incoming = match item {
            Item::Hello { epoch, answer } => Incoming::Hello { from, epoch, answer },
            Item::Message(bytes) => Incoming::Message { from, bytes },
            Item::Write(write) if self.plan.links == Links::Asked => Incoming::Asked { from, write },
            Item::Write(write) => {
                let Write { immediate, target, bytes } = *write;
                // Whether the process runs or stands still.
                self.processes[to.index()].memory.land(target, &bytes);
                Incoming::Landed { from, immediate, target, bytes: bytes.len() }
            }
            Item::Down => Incoming::Down { from },
            Item::State { stream, frame } => Incoming::State { from, stream, frame },
            Item::StateEnd { stream } => Incoming::StateEnd { from, stream },
        };
        self.hand(to, incoming);
    }

    /// All links of a process end: each peer is told after everything that the process had sent.
    pub(super) fn end_links(&mut self, process: ProcessId) {
        for peer in (0..self.processes.len() as u32).map(ProcessId) {
            if peer != process && self.is_running(peer) {
                self.send(process, peer, Item::Down);
            }
        }
    }

    fn note_arrival(&mut self, from: ProcessId, to: ProcessId, item: &Item) {
        let (now, names) = (self.now, (from, to));
        match item {
            Item::Hello { epoch, answer } => {
                self.trace.note(now, (3u8, names, epoch, answer), format_args!("p{}>p{} hello {epoch}", from.0, to.0));
            }
            Item::Message(bytes) => {
                let line = format_args!("p{}>p{} {}", from.0, to.0, Frame(bytes, bytes.len()));
                self.trace.note(now, (4u8, names, bytes), line);
            }
            Item::Write(write) => {
                let line = format_args!("p{}>p{} write {}", from.0, to.0, Frame(&write.immediate, write.bytes.len()));
                self.trace.note(now, (5u8, names, write.immediate, write.bytes.len()), line);
            }
            Item::Down => self.trace.note(now, (6u8, names), format_args!("p{}>p{} ends", from.0, to.0)),
            Item::State { stream, frame } => {
                let line = format_args!("p{}>p{} stream {stream}: {}", from.0, to.0, Frame(frame, frame.len()));
                self.trace.note(now, (11u8, names, stream, frame), line);
            }
            Item::StateEnd { stream } => {
                let line = format_args!("p{}>p{} stream {stream} ends", from.0, to.0);
                self.trace.note(now, (12u8, names, stream), line);
            }
        }
    }
}

/// A frame in words.
struct Frame<'a>(&'a [u8], usize);

impl std::fmt::Display for Frame<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(bytes, length) = self;
        let head = bytes.get(..gradwire_proto::limits::FRAME_HEADER_BYTES).unwrap_or(bytes);
        match FrameHeader::decode(head, &crate::rank::JOB) {
            Ok(header) => write!(
                f,
                "{:?} {} {} {} {}+{} {} flags {} ({length} bytes)",
                header.kind,
                header.epoch,
                header.step,
                header.bucket,
                header.unit_first,
                header.unit_count,
                header.attempt,
                header.flags
            ),
            Err(malformed) => write!(f, "a frame with a bad {} ({length} bytes)", malformed.0),
        }
    }
}
