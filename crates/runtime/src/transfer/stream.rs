//! Frames on a stream that blocks.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::time::Instant;

use gradwire_codec::crc32;
use gradwire_proto::frame::{FLAG_CHECKED, FrameHeader, FrameKind, JobTag};
use gradwire_proto::limits::FRAME_HEADER_BYTES;
use gradwire_proto::transfer::{ANSWER_BYTES_MAX, Ask, Given, No, PIECE_BYTES};
use gradwire_proto::{BucketId, Epoch, UnitIndex};
use gradwire_transport::establish::StateStream;

use super::share::Copied;

/// One side of a stream over which state is given away.
pub(super) struct FrameStream {
    pub(super) stream: StateStream,
    job: JobTag,
    /// Answers that take a while are waited for until then.
    deadline: Option<Instant>,
}

/// An answer that arrived.
pub(super) enum Answer {
    Body(Vec<u8>),
    No(No),
}

impl FrameStream {
    pub(super) const fn new(stream: StateStream, job: JobTag, deadline: Option<Instant>) -> Self {
        Self { stream, job, deadline }
    }

    pub(super) fn ask(&mut self, ask: Ask) -> io::Result<()> {
        self.send(FrameHeader::new(FrameKind::Ask, Epoch(0)), &ask.encode())
    }

    pub(super) fn read_ask(&mut self) -> io::Result<Ask> {
        let header = self.read_header(FrameKind::Ask)?;
        let mut body = vec![0; header.payload_len as usize];
        self.read_body(&header, &mut body)?;
        Ask::decode(&body).map_err(|malformed| invalid(malformed.0))
    }

    /// Gives an answer in as many frames as it takes.
    pub(super) fn give(&mut self, given: Given, body: &[u8]) -> io::Result<()> {
        let frames = body.len().div_ceil(PIECE_BYTES as usize).max(1);
        for nth in 0..frames {
            let at = nth * PIECE_BYTES as usize;
            let part = &body[at..body.len().min(at + PIECE_BYTES as usize)];
            let mut header = FrameHeader::new(FrameKind::Give, Epoch(0));
            (header.unit_first, header.unit_count) = (UnitIndex(nth as u32), frames as u32);
            header.bucket = BucketId(given as u32);
            self.send(header, part)?;
        }
        Ok(())
    }

    /// Gives a piece, which is in this file.
    pub(super) fn give_piece(&mut self, file: &File, Copied { at, bytes, crc }: Copied) -> io::Result<()> {
        let mut header = FrameHeader::new(FrameKind::Give, Epoch(0));
        (header.unit_count, header.bucket) = (1, BucketId(Given::Piece as u32));
        let head = self.seal(header, bytes, crc);
        self.stream.write_file(&head, file, at, bytes)
    }

    /// Sends a frame with this header, whose length and checksum are set here.
    pub(super) fn send(&mut self, header: FrameHeader, body: &[u8]) -> io::Result<()> {
        let head = self.seal(header, body.len(), crc32(body));
        self.stream.write_all(&head)?;
        self.stream.write_all(body)
    }

    fn seal(&self, mut header: FrameHeader, bytes: usize, crc: u32) -> [u8; FRAME_HEADER_BYTES] {
        (header.payload_len, header.payload_crc) = (bytes as u32, crc);
        header.flags |= FLAG_CHECKED;
        header.encode(&self.job)
    }

    /// The next answer, which must be this one or a refusal.
    pub(super) fn read_answer(&mut self, wanted: Given) -> io::Result<Answer> {
        let mut whole = Vec::new();
        loop {
            let header = self.read_given()?;
            let given = Given::from_code(header.bucket.0);
            if given == Some(Given::No) {
                return self.read_no(&header).map(Answer::No);
            }
            let length = header.payload_len as usize;
            if whole.len() + length > ANSWER_BYTES_MAX {
                return Err(invalid("an answer that is larger than it may be"));
            }
            let at = whole.len();
            whole.resize(at + length, 0);
            self.read_body(&header, &mut whole[at..])?;
            match given {
                Some(Given::Wait) if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Err(io::Error::new(ErrorKind::TimedOut, "its state was not offered in time"));
                }
                Some(Given::Wait) => whole.truncate(at),
                Some(given) if given == wanted => {
                    if header.unit_first.0 + 1 == header.unit_count {
                        return Ok(Answer::Body(whole));
                    }
                }
                _ => return Err(invalid("another answer than what was asked for")),
            }
        }
    }

    /// The refusal that this header begins.
    pub(super) fn read_no(&mut self, header: &FrameHeader) -> io::Result<No> {
        let length = header.payload_len as usize;
        if length > ANSWER_BYTES_MAX {
            return Err(invalid("an answer that is larger than it may be"));
        }
        let mut body = vec![0; length];
        self.read_body(header, &mut body)?;
        No::decode(&body).map_err(|malformed| invalid(malformed.0))
    }

    /// The header of the next answer; its body has to be read next.
    pub(super) fn read_given(&mut self) -> io::Result<FrameHeader> {
        self.read_header(FrameKind::Give)
    }

    fn read_header(&mut self, kind: FrameKind) -> io::Result<FrameHeader> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        self.stream.read_exact(&mut bytes)?;
        let header = FrameHeader::decode(&bytes, &self.job).map_err(|malformed| invalid(malformed.0))?;
        if header.kind == kind { Ok(header) } else { Err(invalid("a frame of another kind")) }
    }

    /// Reads a body of exactly this length, and checks it.
    pub(super) fn read_body(&mut self, header: &FrameHeader, body: &mut [u8]) -> io::Result<()> {
        if header.payload_len as usize != body.len() {
            return Err(invalid("a body of another length"));
        }
        self.stream.read_exact(body)?;
        if crc32(body) == header.payload_crc { Ok(()) } else { Err(invalid("a body that does not match its checksum")) }
    }
}

pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}
