//! Frames of the streams over which a process gets the state of a job that it joins (docs/wire.md, section 12).

use gradwire_codec::crc32;
use gradwire_proto::frame::{FLAG_CHECKED, FrameHeader, FrameKind};
use gradwire_proto::limits::FRAME_HEADER_BYTES;
use gradwire_proto::transfer::{Ask, Given, No, Outline, Results, Snapshot, Sums};
use gradwire_proto::{BucketId, Epoch, UnitIndex};

use super::exchange::JOB;

/// A frame with this header, whose length and checksum are set here.
pub(super) fn frame(mut header: FrameHeader, body: &[u8]) -> Box<[u8]> {
    (header.payload_len, header.payload_crc) = (body.len() as u32, crc32(body));
    header.flags |= FLAG_CHECKED;
    [&header.encode(&JOB)[..], body].concat().into()
}

pub(super) fn ask(ask: Ask) -> Box<[u8]> {
    frame(FrameHeader::new(FrameKind::Ask, Epoch(0)), &ask.encode())
}

/// An answer. What is simulated fits into one frame.
pub(super) fn give(given: Given, body: &[u8]) -> Box<[u8]> {
    let mut header = FrameHeader::new(FrameKind::Give, Epoch(0));
    (header.unit_first, header.unit_count) = (UnitIndex(0), 1);
    header.bucket = BucketId(given as u32);
    frame(header, body)
}

/// A frame of this kind, if it is one and has its checksum.
fn open(kind: FrameKind, bytes: &[u8]) -> Option<(FrameHeader, &[u8])> {
    let (head, body) = bytes.split_at_checked(FRAME_HEADER_BYTES)?;
    let header = FrameHeader::decode(head, &JOB).ok()?;
    let good = header.kind == kind && header.payload_len as usize == body.len() && crc32(body) == header.payload_crc;
    good.then_some((header, body))
}

pub(super) fn read_ask(bytes: &[u8]) -> Option<Ask> {
    Ask::decode(open(FrameKind::Ask, bytes)?.1).ok()
}

/// A unit of results, as it travels.
#[derive(Clone, Debug)]
pub(super) struct Update {
    pub(super) header: FrameHeader,
    pub(super) bytes: Vec<u8>,
}

/// One frame of an answer.
#[derive(Debug)]
pub(super) enum Answer {
    Outline(Outline),
    Snapshot(Snapshot),
    Piece(u32, Vec<u8>),
    Sums(Sums),
    Results(Results),
    Update(Update),
    Wait,
    No(No),
}

pub(super) fn read_answer(bytes: &[u8]) -> Option<Answer> {
    let (header, body) = open(FrameKind::Give, bytes)?;
    match Given::from_code(header.bucket.0)? {
        Given::Outline => Outline::decode(body).ok().map(Answer::Outline),
        Given::Snapshot => Snapshot::decode(body).ok().map(Answer::Snapshot),
        Given::Piece => Some(Answer::Piece(header.payload_crc, body.to_vec())),
        Given::Sums => Sums::decode(body).ok().map(Answer::Sums),
        Given::Results => Results::decode(body).ok().map(Answer::Results),
        Given::Update => Some(Answer::Update(Update { header, bytes: body.to_vec() })),
        Given::Wait => Some(Answer::Wait),
        Given::No => No::decode(body).ok().map(Answer::No),
    }
}
