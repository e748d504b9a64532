//! Frames of Pulsar's wire protocol: where one ends, and how a message is passed on without touching its bytes.
//!
//! A frame is `u32 total | u32 command size | command`, for messages followed by
//! `u16 0x0e01 | u32 CRC | u32 metadata size | metadata | payload`; integers are big-endian. The part behind the
//! command, the *tail*, is stored as it came and sent on as it is, so that a consumer checks the CRC that the
//! producer made.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message as _;
use pulsar::message::proto::{BaseCommand, CommandMessage, CommandSendReceipt, ServerError, base_command};
use pulsar::message::{Codec, Message, Metadata};
use tokio_util::codec::{Decoder, Encoder};

use super::replies;
use super::store::Refused;

/// Marks a tail that carries a checksum.
const TAIL_MAGIC: [u8; 2] = [0x0e, 0x01];
/// Bytes of the two sizes that every frame starts with.
const SIZES_BYTES: usize = 8;
/// Largest command. The largest that mean something have a schema, or acknowledge many messages; in memory, a command
/// of nothing but empty parts is dozens of times as large as in its frame.
const COMMAND_BYTES_MAX: usize = 256 << 10;
/// Largest metadata of a message, for the same reason.
const METADATA_BYTES_MAX: usize = 256 << 10;
/// Where the size of the metadata is in a tail.
const METADATA_SIZE: std::ops::Range<usize> = 6..10;

/// The link sent what is not a frame. It is closed: where the next frame would start is unknown.
#[derive(Debug)]
pub(super) struct BadFrame(pub(super) String);

/// One frame as it came in.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) command: BaseCommand,
    pub(super) tail: Option<Tail>,
    /// Why its tail was left out.
    pub(super) refused: Option<Refused>,
}

/// A message's metadata and payload as its producer sent them.
#[derive(Debug)]
pub(super) struct Tail {
    /// Magic, CRC, metadata and payload; verified.
    pub(super) bytes: Bytes,
    pub(super) metadata: Metadata,
    pub(super) payload_bytes: usize,
}

/// Takes the first frame out of `input`, or nothing if it is not complete yet.
///
/// # Errors
/// When the frame is larger than `frame_bytes_max`, is malformed, or its CRC is wrong.
pub(super) fn take_frame(input: &mut BytesMut, frame_bytes_max: usize) -> Result<Option<Frame>, BadFrame> {
    let Some((mut sizes, _)) = input.split_at_checked(SIZES_BYTES) else { return Ok(None) };
    let total = sizes.get_u32() as usize;
    let command_bytes = sizes.get_u32() as usize;
    if total > frame_bytes_max {
        return Err(BadFrame(format!("a frame of {total} bytes; at most {frame_bytes_max} are allowed here")));
    }
    if command_bytes + 4 > total || command_bytes > COMMAND_BYTES_MAX {
        return Err(BadFrame(format!("a command of {command_bytes} bytes in a frame of {total}")));
    }
    if input.len() < total + 4 {
        return Ok(None);
    }
    let mut frame = input.split_to(total + 4);
    let tail = &frame[SIZES_BYTES + command_bytes..];
    if !tail.is_empty() && !tail.starts_with(&TAIL_MAGIC) {
        return Err(BadFrame("a payload without checksum".to_owned()));
    }
    if let Some(mut size) = tail.get(METADATA_SIZE) {
        let metadata_bytes = size.get_u32() as usize;
        if metadata_bytes > tail.len() - METADATA_SIZE.end {
            return Err(BadFrame(format!("metadata of {metadata_bytes} bytes in a frame of {total}")));
        }
        if metadata_bytes > METADATA_BYTES_MAX {
            let detail =
                format!("a message with {metadata_bytes} bytes of metadata; the limit is {METADATA_BYTES_MAX}");
            let command = BaseCommand::decode(&frame[SIZES_BYTES..SIZES_BYTES + command_bytes])
                .map_err(|error| BadFrame(error.to_string()))?;
            return Ok(Some(Frame {
                command,
                tail: None,
                refused: Some(Refused(ServerError::NotAllowedError, detail)),
            }));
        }
    }
    // A copy, so that what is stored is exactly as large as what is counted.
    let tail = Bytes::copy_from_slice(tail);
    let message = Codec
        .decode(&mut frame)
        .map_err(|error| BadFrame(error.to_string()))?
        .ok_or_else(|| BadFrame("an incomplete frame".to_owned()))?;
    let tail = message.payload.map(|payload| Tail {
        bytes: tail,
        payload_bytes: payload.data.len(),
        metadata: payload.metadata,
    });
    Ok(Some(Frame { command: message.command, tail, refused: None }))
}

/// Reads a tail that was verified when it came, and is stored where damage is found by other means.
///
/// # Errors
/// When it is malformed.
pub(super) fn parse_tail(bytes: Bytes) -> Result<Tail, BadFrame> {
    let size = bytes.get(METADATA_SIZE).filter(|_| bytes.starts_with(&TAIL_MAGIC)).map(|mut size| size.get_u32());
    let rest = bytes.get(METADATA_SIZE.end..).zip(size).and_then(|(rest, size)| rest.split_at_checked(size as usize));
    let (metadata, payload) = rest.ok_or_else(|| BadFrame("it is no metadata and payload".to_owned()))?;
    let metadata = Metadata::decode(metadata).map_err(|error| BadFrame(error.to_string()))?;
    let payload_bytes = payload.len();
    Ok(Tail { bytes, payload_bytes, metadata })
}

/// Turns the receipts among these answers into errors: what they were for is not kept.
pub(super) fn refuse_receipts(answers: &mut BytesMut, reason: &str) {
    let mut refused = BytesMut::with_capacity(answers.len());
    while let Ok(Some(message)) = Codec.decode(answers) {
        put_command(
            &mut refused,
            match message.command.send_receipt {
                Some(receipt) => {
                    let error = Refused(ServerError::PersistenceError, reason.to_owned());
                    replies::send_error(receipt.producer_id, receipt.sequence_id, error)
                }
                None => message.command,
            },
        );
    }
    *answers = refused;
}

/// Appends a command without tail.
pub(super) fn put_command(out: &mut BytesMut, command: BaseCommand) {
    // Encoding into a growing buffer cannot fail; were it to, the client would time out on its request.
    if let Err(error) = Codec.encode(Message { command, payload: None }, out) {
        tracing::error!(%error, "could not encode a reply");
    }
}

/// Appends a SEND_RECEIPT.
pub(super) fn put_receipt(out: &mut BytesMut, receipt: &CommandSendReceipt) {
    put_with_tail(out, base_command::Type::SendReceipt, receipt, &[]);
}

/// Appends a MESSAGE with the stored tail.
pub(super) fn put_message(out: &mut BytesMut, message: &CommandMessage, tail: &[u8]) {
    put_with_tail(out, base_command::Type::Message, message, tail);
}

/// Appends a command of the kind that is sent for every message. They are encoded without a [`BaseCommand`], whose
/// many fields take kilobytes to make and to move. A command's field has the number of its type.
fn put_with_tail(out: &mut BytesMut, kind: base_command::Type, command: &impl prost::Message, tail: &[u8]) {
    let start = out.len();
    out.put_bytes(0, SIZES_BYTES);
    prost::encoding::int32::encode(1, &(kind as i32), out);
    prost::encoding::message::encode(kind as u32, command, out);
    let command_bytes = out.len() - start - SIZES_BYTES;
    out.put_slice(tail);
    let total = out.len() - start - 4;
    out[start..start + 4].copy_from_slice(&(total as u32).to_be_bytes());
    out[start + 4..start + SIZES_BYTES].copy_from_slice(&(command_bytes as u32).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pulsar::message::Payload;
    use pulsar::message::proto::{CommandPing, CommandSend, MessageIdData, MessageMetadata};

    use super::*;

    fn send_frame(data: &[u8]) -> BytesMut {
        frame_of(MessageMetadata { producer_name: "p".to_owned(), sequence_id: 7, ..Default::default() }, data)
    }

    fn frame_of(metadata: MessageMetadata, data: &[u8]) -> BytesMut {
        let command = BaseCommand {
            r#type: base_command::Type::Send as i32,
            send: Some(CommandSend { producer_id: 1, sequence_id: 7, ..Default::default() }),
            ..Default::default()
        };
        let mut out = BytesMut::new();
        Codec.encode(Message { command, payload: Some(Payload { metadata, data: data.to_vec() }) }, &mut out).unwrap();
        out
    }

    #[test]
    fn a_tail_is_passed_on_byte_for_byte() {
        let mut input = send_frame(b"gradient");
        let tail = take_frame(&mut input, 1000).unwrap().unwrap().tail.unwrap();
        assert_eq!((tail.payload_bytes, tail.metadata.sequence_id), (8, 7));
        let stored = parse_tail(tail.bytes.clone()).unwrap();
        assert_eq!((stored.payload_bytes, stored.metadata), (8, tail.metadata));
        let mut out = BytesMut::new();
        let id = MessageIdData { ledger_id: 3, entry_id: 4, partition: Some(-1), ..Default::default() };
        put_message(&mut out, &CommandMessage { consumer_id: 9, message_id: id, ..Default::default() }, &tail.bytes);
        // The client's own decoder accepts it, checksum included.
        let passed_on = Codec.decode(&mut out).unwrap().unwrap();
        assert_eq!(passed_on.payload.unwrap().data, b"gradient");
        assert_eq!(passed_on.command.message.unwrap().message_id.entry_id, 4);
        assert!(out.is_empty());
    }

    #[test]
    fn a_receipt_is_what_the_clients_decoder_expects() {
        let receipt = CommandSendReceipt { producer_id: 3, sequence_id: 4, ..Default::default() };
        let mut out = BytesMut::new();
        put_receipt(&mut out, &receipt);
        let decoded = Codec.decode(&mut out).unwrap().unwrap();
        assert_eq!(decoded.command.r#type, base_command::Type::SendReceipt as i32);
        assert_eq!(decoded.command.send_receipt, Some(receipt));
        assert!(decoded.payload.is_none() && out.is_empty());
    }

    #[test]
    fn half_frames_wait_and_whole_ones_are_taken_one_by_one() {
        let whole = send_frame(b"x");
        let mut input = BytesMut::new();
        for (index, byte) in whole.iter().enumerate() {
            assert!(take_frame(&mut input, 1000).unwrap().is_none(), "after {index} bytes");
            input.put_u8(*byte);
        }
        put_command(
            &mut input,
            BaseCommand { r#type: base_command::Type::Ping as i32, ping: Some(CommandPing {}), ..Default::default() },
        );
        assert!(take_frame(&mut input, 1000).unwrap().unwrap().command.send.is_some());
        assert!(take_frame(&mut input, 1000).unwrap().unwrap().command.ping.is_some());
        assert!(take_frame(&mut input, 1000).unwrap().is_none());
    }

    #[test]
    fn a_flipped_bit_in_the_payload_is_found() {
        let mut input = send_frame(b"gradient");
        let last = input.len() - 1;
        input[last] ^= 1;
        assert!(take_frame(&mut input, 1000).is_err());
    }

    #[test]
    fn large_metadata_is_left_out_and_the_next_frame_is_found() {
        let large = MessageMetadata { partition_key: Some("k".repeat(METADATA_BYTES_MAX)), ..Default::default() };
        let mut input = frame_of(large, b"x");
        input.unsplit(send_frame(b"y"));
        let frame = take_frame(&mut input, 1 << 20).unwrap().unwrap();
        assert!(frame.command.send.is_some() && frame.tail.is_none());
        let Refused(error, detail) = frame.refused.unwrap();
        assert_eq!(error, ServerError::NotAllowedError);
        assert!(detail.contains("262154 bytes") && detail.contains("the limit is 262144"), "{detail}");
        assert!(take_frame(&mut input, 1 << 20).unwrap().unwrap().tail.is_some());
    }

    #[test]
    fn metadata_that_is_larger_than_its_frame_is_malformed() {
        let mut input = send_frame(b"x");
        let start = SIZES_BYTES + u32::from_be_bytes(input[4..8].try_into().unwrap()) as usize + METADATA_SIZE.start;
        input[start..start + 4].copy_from_slice(&(METADATA_BYTES_MAX as u32 + 1).to_be_bytes());
        assert!(take_frame(&mut input, 1 << 20).is_err());
    }

    #[test]
    fn a_large_size_is_refused_before_its_bytes_come() {
        let mut input = BytesMut::from(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 4][..]);
        assert!(take_frame(&mut input, 1 << 20).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), small in any::<bool>()) {
            let mut input = BytesMut::from(&bytes[..]);
            if small && input.len() >= 4 {
                // Sizes that fit, so that the rest of the parser is reached.
                let total = (input.len() - 4) as u32;
                input[..4].copy_from_slice(&total.to_be_bytes());
            }
            while let Ok(Some(_)) = take_frame(&mut input, 1000) {}
        }

        #[test]
        fn a_damaged_frame_never_panics(position in 0_usize..60, value in any::<u8>()) {
            let mut input = send_frame(b"gradient");
            let position = position % input.len();
            input[position] = value;
            let _ = take_frame(&mut input, 1000);
        }
    }
}
