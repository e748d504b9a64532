//! What arbitrary bytes are fed into, by the random tests beside this and by the fuzz targets in fuzz/. Each function
//! panics when something does not hold.

use bytes::BytesMut;
use gradwire_control::BrokerConfig;
use gradwire_control::broker::bare::{self, BareBroker, BareLink};

/// Largest message of the brokers here.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Largest frame of the brokers here.
pub(crate) const FRAME_BYTES_MAX: usize = MESSAGE_BYTES_MAX + (64 << 10);
/// What all topics of the brokers here may hold.
const TOTAL_BYTES_MAX: usize = 1 << 20;
/// CONNECT, protocol version 19.
const CONNECT: &[u8] = b"\0\0\0\x0d\0\0\0\x09\x08\x02\x12\x05\x0a\x01t\x20\x13";

/// Frames are taken one by one, whatever the bytes.
pub(crate) fn broker_frame(bytes: &[u8]) {
    assert!(bare::frames(bytes, FRAME_BYTES_MAX) <= bytes.len() / 8);
    let mut whole = Vec::new();
    put_frame(&mut whole, bytes);
    assert!(bare::frames(&whole, FRAME_BYTES_MAX) <= 1);
}

/// Two links of one broker say whatever they want. One that is closed is followed by another.
pub(crate) fn broker_session(bytes: &[u8]) {
    let mut session = Session::new();
    for part in Parts(bytes) {
        session.say(part);
    }
}

/// A broker, and two links that have connected.
pub(crate) struct Session {
    broker: BareBroker,
    links: [BareLink; 2],
}

impl Session {
    pub(crate) fn new() -> Self {
        let mut config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
        config.message_bytes_max = MESSAGE_BYTES_MAX;
        config.topic_bytes_max = TOTAL_BYTES_MAX / 2;
        config.total_bytes_max = TOTAL_BYTES_MAX;
        config.topics_max = 64;
        let mut broker = BareBroker::new(config).unwrap_or_else(|fault| panic!("{fault}"));
        let links = [connected(&mut broker), connected(&mut broker)];
        Self { broker, links }
    }

    /// The first byte chooses a link and whether the rest is a frame's content or raw bytes. Gives what both links got,
    /// and the reason if the first one was closed.
    pub(crate) fn say(&mut self, part: &[u8]) -> (BytesMut, Option<String>) {
        let Some((how, rest)) = part.split_first() else { return Default::default() };
        let mut frame = Vec::new();
        if how & 2 == 0 {
            put_frame(&mut frame, rest);
        } else {
            frame.extend_from_slice(rest);
        }
        let index = usize::from(how & 1);
        let (mut heard, closed) = self.links[index].feed(&frame);
        // The other link may have got a message.
        heard.unsplit(self.links[1 - index].feed(&[]).0);
        if closed.is_some() {
            self.links[index] = connected(&mut self.broker);
        }
        assert!(self.broker.bytes() <= TOTAL_BYTES_MAX + (1 << 20), "{} bytes", self.broker.bytes());
        (heard, closed)
    }
}

fn connected(broker: &mut BareBroker) -> BareLink {
    let mut link = broker.link();
    let (answer, closed) = link.feed(CONNECT);
    assert!(closed.is_none() && !answer.is_empty(), "{closed:?}");
    link
}

/// Parts behind a 2-byte length each.
struct Parts<'a>(&'a [u8]);

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (size, rest) = self.0.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*size))).unwrap_or((rest, &[]));
        self.0 = rest;
        Some(part)
    }
}

/// Appends a frame whose content is this (size of the command, command, tail), with a size and a checksum that are
/// right, so that more than one in 2^32 gets past them.
pub(crate) fn put_frame(out: &mut Vec<u8>, content: &[u8]) {
    let start = out.len();
    out.extend_from_slice(&(content.len() as u32).to_be_bytes());
    out.extend_from_slice(content);
    let Some(size) = content.first_chunk() else { return };
    let tail = start + 8 + u32::from_be_bytes(*size) as usize;
    if out.get(tail..tail.saturating_add(2)).is_some_and(|magic| magic == [0x0e, 0x01]) && out.len() >= tail + 6 {
        let crc = crc32c(&out[tail + 6..]);
        out[tail + 2..tail + 6].copy_from_slice(&crc.to_be_bytes());
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}
