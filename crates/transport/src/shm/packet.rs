//! What travels over a link's Unix stream: packets of 32 bytes, some with a memory file (docs/wire.md, section 9).
//!
//! The stream never carries payload. Both ends use it without blocking and hold their own end of it: nothing that a
//! peer does to its end can make this one wait.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gradwire_proto::RegionKey;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Bytes of a packet.
pub(super) const PACKET_BYTES: usize = 32;

/// One packet. Announcements are numbered: `seq` counts them from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packet {
    /// The first packet of either side, with its lane's memory file.
    Setup {
        /// Words of the lane's ring.
        ring_words: u64,
    },
    /// A region can be read from now on; its memory file comes with the packet.
    Register { seq: u64, key: RegionKey, len: u64 },
    /// A region is no longer offered, once the records before `after` (a position in the sender's ring) are consumed.
    Deregister { seq: u64, key: RegionKey, after: u64 },
    /// The announcements up to `seq` cancelled each other before they were sent.
    Nothing { seq: u64 },
    /// Wake up: there are news in the lane.
    Wake,
}

/// A packet that says nothing known, or lacks its memory file, or has one too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

const VERSION: u8 = 1;

impl Packet {
    pub(super) fn encode(self) -> [u8; PACKET_BYTES] {
        let (kind, fields) = match self {
            Self::Setup { ring_words } => (1, [u64::from(VERSION), ring_words, 0]),
            Self::Register { seq, key, len } => (2, [seq, key.0, len]),
            Self::Deregister { seq, key, after } => (3, [seq, key.0, after]),
            Self::Nothing { seq } => (4, [seq, 0, 0]),
            Self::Wake => (5, [0; 3]),
        };
        let mut bytes = [0; PACKET_BYTES];
        bytes[0] = kind;
        for (place, field) in bytes[8..].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PACKET_BYTES]) -> Result<Self, Malformed> {
        let ([head, a, b, c], []) = bytes.as_chunks::<8>() else { return Err(Malformed) };
        let (a, b, c) = (u64::from_le_bytes(*a), u64::from_le_bytes(*b), u64::from_le_bytes(*c));
        let packet = match head[0] {
            1 if a == u64::from(VERSION) => Self::Setup { ring_words: b },
            2 => Self::Register { seq: a, key: RegionKey(b), len: c },
            3 => Self::Deregister { seq: a, key: RegionKey(b), after: c },
            4 => Self::Nothing { seq: a },
            5 => Self::Wake,
            _ => return Err(Malformed),
        };
        // Reserved bytes are zero: nothing that is not written here is accepted.
        if packet.encode() == *bytes { Ok(packet) } else { Err(Malformed) }
    }

    /// Whether a memory file belongs to it.
    pub(super) const fn has_file(self) -> bool {
        matches!(self, Self::Setup { .. } | Self::Register { .. })
    }
}

/// What became of an attempt to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The kernel has it.
    Yes,
    /// No room now; nothing was taken.
    Later,
    /// The other end is gone. Reading will tell.
    Gone,
}

/// Sends a packet, with its file if it has one, without waiting.
pub(super) fn send(stream: BorrowedFd<'_>, packet: Packet, file: Option<BorrowedFd<'_>>) -> Result<Sent, Errno> {
    let bytes = packet.encode();
    let files = file.as_slice();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        return match rustix::net::sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, flags) {
            // Unix sockets take a packet this small whole or not at all.
            Ok(PACKET_BYTES) => Ok(Sent::Yes),
            Ok(_) => Err(Errno::MSGSIZE),
            Err(Errno::INTR) => continue,
            // TOOMANYREFS: too many files are on their way at once; the peers take them in.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS) => Ok(Sent::Later),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(Sent::Gone),
            Err(errno) => Err(errno),
        };
    }
}

/// What an attempt to receive gave.
#[derive(Debug)]
pub(super) enum Received {
    /// A packet, with its file if it has one.
    Packet(Packet, Option<OwnedFd>),
    /// Nothing now.
    Nothing,
    /// The other end is gone, and everything that it sent was read.
    End,
    /// What came is no packet.
    Malformed,
    /// The file that came could not be taken for want of a free descriptor.
    NoDescriptor,
}

/// Puts packets together from what the stream gives.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    bytes: [u8; PACKET_BYTES],
    filled: usize,
    file: Option<OwnedFd>,
}

impl Receiver {
    /// The next packet, without waiting.
    pub(super) fn receive(&mut self, stream: BorrowedFd<'_>) -> Result<Received, Errno> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let mut rest = [IoSliceMut::new(&mut self.bytes[self.filled..])];
            let message = match rustix::net::recvmsg(stream.as_fd(), &mut rest, &mut control, flags) {
                Ok(message) => message,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Ok(Received::End),
                Err(errno) => return Err(errno),
            };
            for part in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = part {
                    for file in files {
                        if self.file.replace(file).is_some() {
                            return Ok(Received::Malformed);
                        }
                    }
                }
            }
            if message.flags.contains(ReturnFlags::CTRUNC) {
                return Ok(Received::NoDescriptor);
            }
            if message.bytes == 0 {
                return Ok(if self.filled == 0 { Received::End } else { Received::Malformed });
            }
            self.filled += message.bytes;
            if self.filled < PACKET_BYTES {
                continue;
            }
            self.filled = 0;
            let file = self.file.take();
            return Ok(match Packet::decode(&self.bytes) {
                Ok(packet) if packet.has_file() == file.is_some() => Received::Packet(packet, file),
                _ => Received::Malformed,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    fn packets() -> impl Strategy<Value = Packet> {
        let three = (any::<u64>(), any::<u64>(), any::<u64>());
        prop_oneof![
            any::<u64>().prop_map(|ring_words| Packet::Setup { ring_words }),
            three.prop_map(|(seq, key, len)| Packet::Register { seq, key: RegionKey(key), len }),
            three.prop_map(|(seq, key, after)| Packet::Deregister { seq, key: RegionKey(key), after }),
            any::<u64>().prop_map(|seq| Packet::Nothing { seq }),
            Just(Packet::Wake),
        ]
    }

    proptest! {
        #[test]
        fn packets_round_trip(packet in packets()) {
            prop_assert_eq!(Packet::decode(&packet.encode()), Ok(packet));
        }

        #[test]
        fn only_what_encode_writes_is_accepted(packet in packets(), at in 0..PACKET_BYTES, flip in 1u8..) {
            let mut bytes = packet.encode();
            bytes[at] ^= flip;
            if let Ok(other) = Packet::decode(&bytes) {
                prop_assert_eq!(other.encode(), bytes);
                prop_assert_ne!(other, packet);
            }
        }

        #[test]
        fn bytes_in_any_pieces_give_the_same_packets(
            sent in proptest::collection::vec(packets().prop_filter("no file", |p| !p.has_file()), 1..20),
            cuts in proptest::collection::vec(1usize..70, 1..40),
        ) {
            let (mut ours, theirs) = UnixStream::pair().expect("pair");
            let bytes: Vec<u8> = sent.iter().flat_map(|packet| packet.encode()).collect();
            let (mut rest, mut got, mut receiver) = (&bytes[..], Vec::new(), Receiver::default());
            let mut cuts = cuts.into_iter().cycle();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(cuts.next().expect("cycle")));
                ours.write_all(piece).expect("write");
                rest = after;
                while let Received::Packet(packet, None) = receiver.receive(theirs.as_fd()).expect("receive") {
                    got.push(packet);
                }
            }
            prop_assert_eq!(got, sent);
            drop(ours);
            prop_assert!(matches!(receiver.receive(theirs.as_fd()), Ok(Received::End)));
        }
    }

    #[test]
    fn files_come_with_their_packets_and_only_with_those() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let file = File::open("/dev/null").expect("open");
        let mut receiver = Receiver::default();
        let region = |seq| Packet::Register { seq, key: RegionKey(7), len: 1 };
        for seq in 1..4 {
            assert_eq!(send(ours.as_fd(), Packet::Nothing { seq }, None), Ok(Sent::Yes));
            assert_eq!(send(ours.as_fd(), region(seq), Some(file.as_fd())), Ok(Sent::Yes));
        }
        for seq in 1..4 {
            assert!(matches!(receiver.receive(theirs.as_fd()),
                Ok(Received::Packet(packet, None)) if packet == Packet::Nothing { seq }));
            assert!(matches!(receiver.receive(theirs.as_fd()),
                Ok(Received::Packet(packet, Some(_))) if packet == region(seq)));
        }
        assert!(matches!(receiver.receive(theirs.as_fd()), Ok(Received::Nothing)));
        assert_eq!(send(ours.as_fd(), region(9), None), Ok(Sent::Yes));
        assert!(matches!(receiver.receive(theirs.as_fd()), Ok(Received::Malformed)));
        assert_eq!(send(ours.as_fd(), Packet::Wake, Some(file.as_fd())), Ok(Sent::Yes));
        assert!(matches!(receiver.receive(theirs.as_fd()), Ok(Received::Malformed)));
    }

    #[test]
    fn a_full_stream_takes_nothing_and_a_closed_one_says_so() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let mut count = 0;
        while send(ours.as_fd(), Packet::Wake, None) == Ok(Sent::Yes) {
            count += 1;
        }
        assert!(count > 0);
        assert_eq!(send(ours.as_fd(), Packet::Wake, None), Ok(Sent::Later));
        drop(theirs);
        assert_eq!(send(ours.as_fd(), Packet::Wake, None), Ok(Sent::Gone));
    }
}
