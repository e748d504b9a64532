//! What arbitrary bytes are fed into, by the properties beside this and by the fuzz targets in fuzz/. Each function
//! panics when something does not hold.

use gradwire_proto::frame::{FrameHeader, JobTag};
use gradwire_proto::hello::{HELLO_BYTES_MAX, Handshake, HelloParams, Purpose};
use gradwire_proto::limits::{FRAME_HEADER_BYTES, MESSAGE_BODY_BYTES_MAX};
use gradwire_proto::manifest::{Declaration, Manifest, agree};
use gradwire_proto::member::{ADDRESSES_MAX, Endpoint};
use gradwire_proto::saved::{SavedManifest, SavedPart, SavedShard, ShardHeader};
use gradwire_proto::transfer::{Ask, No, Outline, Results, Snapshot, Sums};
use gradwire_proto::wire::{Malformed, Reader};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Secret};

/// The job of every frame here.
pub(crate) const JOB: JobTag = JobTag([0x5a; 16]);

/// A header that is taken is exactly what its fields say: there is one encoding of each.
pub(crate) fn frame_header(bytes: &[u8]) {
    if let Ok(header) = FrameHeader::decode(bytes, &JOB) {
        assert_eq!(header.encode(&JOB), bytes);
    }
    // With the checksum made right, so that more than one in 2^32 gets past it.
    let Some(mut bytes) = bytes.first_chunk::<FRAME_HEADER_BYTES>().copied() else { return };
    bytes[..3].copy_from_slice(b"GW\x01");
    let crc = gradwire_proto::frame::payload_crc(&[&JOB.0[..], &bytes[..4], &bytes[8..]].concat());
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    if let Ok(header) = FrameHeader::decode(&bytes, &JOB) {
        assert_eq!(header.encode(&JOB), bytes);
    }
}

/// A fault that is taken has one encoding and fits a message, also when its kind is of a later release.
pub(crate) fn fault(bytes: &[u8]) {
    let Ok(fault) = Fault::decode(bytes) else { return };
    let mut again = Vec::new();
    fault.encode(&mut again);
    assert!(again.len() <= MESSAGE_BODY_BYTES_MAX);
    let code = u16::from_le_bytes([bytes[0], bytes[1]]);
    match FaultKind::from_code(code) {
        Some(kind) => {
            assert_eq!(fault.kind, kind);
            assert_eq!(again, bytes);
        }
        None => assert!(fault.kind == FaultKind::System && fault.detail.contains(&code.to_string())),
    }
}

/// An endpoint that is taken has one encoding and is within its bounds.
pub(crate) fn endpoint(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let Ok(endpoint) = Endpoint::decode(&mut reader) else { return };
    assert!(endpoint.addresses.capacity() <= ADDRESSES_MAX);
    let mut again = Vec::new();
    endpoint.encode(&mut again);
    assert_eq!(again, bytes[..bytes.len() - reader.remaining()]);
}

/// A manifest that is taken has one encoding, takes memory in proportion to its bytes, and agrees with itself.
pub(crate) fn manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::decode(bytes) else { return };
    assert!(memory(&manifest) <= 16 * bytes.len(), "{} bytes for {}", memory(&manifest), bytes.len());
    let mut again = Vec::new();
    manifest.encode(&mut again).expect("what was decoded is within the limits");
    assert_eq!(again, bytes);
    match agree(&[manifest.clone(), manifest.clone()]) {
        Ok(agreed) => assert_eq!(agreed, manifest.tensors),
        Err(fault) => assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}"),
    }
}

fn memory(manifest: &Manifest) -> usize {
    let of = |tensor: &Declaration| tensor.name.capacity() + tensor.shape.capacity() * size_of::<u64>();
    manifest.tensors.capacity() * size_of::<Declaration>() + manifest.tensors.iter().map(of).sum::<usize>()
}

/// Both sides of a hello against a peer that says `bytes`, in messages of the right length and then of whatever is
/// left: nobody who does not know the secret gets in, or hears more than a version, a nonce and a refusal.
pub(crate) fn hello(bytes: &[u8]) {
    let params =
        HelloParams { secret: Secret::from_bytes([0x77; 32]), job: JOB, epoch: Epoch(1), rank: Rank(1), world_size: 4 };
    let (dialer, _) = Handshake::dial(&params, Rank(0), Purpose::Link, [1; 32]);
    for mut side in [dialer, Handshake::accept(&params, [2; 32])] {
        let mut rest = bytes;
        let mut said = 0;
        loop {
            let wanted = side.wanted();
            assert!(wanted <= HELLO_BYTES_MAX);
            let (message, more) = rest.split_at(wanted.min(rest.len()));
            rest = more;
            match side.receive(message) {
                Ok(reply) => {
                    assert_eq!(reply.done, None, "somebody got in");
                    said += reply.send.len();
                }
                Err(rejected) => {
                    said += rejected.send.len();
                    assert!(!rejected.fault.detail.is_empty());
                    break;
                }
            }
        }
        assert!(said <= 40 + 56, "said {said} bytes");
        assert_eq!(side.wanted(), 0);
    }
}

/// What is said when state is given to a newcomer: each message that is taken has one encoding. The manifests in an outline
/// have it too, and are long: their memory is [`manifest`]'s matter.
pub(crate) fn transfer(bytes: &[u8]) {
    fn one<T>(bytes: &[u8], decode: fn(&[u8]) -> Result<T, Malformed>, encode: fn(&T) -> Vec<u8>) {
        if let Ok(message) = decode(bytes) {
            assert_eq!(encode(&message), bytes);
        }
    }
    one(bytes, Ask::decode, Ask::encode);
    one(bytes, Outline::decode, Outline::encode);
    one(bytes, Snapshot::decode, Snapshot::encode);
    one(bytes, Sums::decode, Sums::encode);
    one(bytes, Results::decode, Results::encode);
    one(bytes, No::decode, No::encode);
}

/// A saved state's manifest that is taken takes memory in proportion to its bytes, its shards cover the state, and it is
/// written as it was read, but for empty sections of later releases. So is the front of a shard.
pub(crate) fn saved(bytes: &[u8]) {
    saved_manifest(bytes);
    if let Some(front) = bytes.first_chunk::<64>()
        && let Ok(header) = ShardHeader::decode(front)
    {
        assert_eq!(header.encode(), *front);
    }
    // With a checksum that is right, so that more than one in 2^32 gets past it.
    let mut sealed = b"GWSM\x01\0\0\0".to_vec();
    sealed.extend(bytes.get(8..).unwrap_or_default());
    let crc = gradwire_proto::frame::payload_crc(&sealed);
    sealed.extend(crc.to_le_bytes());
    saved_manifest(&sealed);
}

fn saved_manifest(bytes: &[u8]) {
    let Ok(manifest) = SavedManifest::decode(bytes) else { return };
    let names: usize = manifest.parts.iter().map(|part| part.name.capacity()).sum();
    let parts = manifest.parts.capacity() * size_of::<SavedPart>();
    assert!(names + parts + manifest.shards.capacity() * size_of::<SavedShard>() <= 16 * bytes.len());
    let (cut, mut end) = (manifest.cut(), 0);
    for index in 0..manifest.shards.len() as u32 {
        let share = cut.share(index);
        assert_eq!((share.start, cut.file_bytes(index)), (end, manifest.shards[index as usize].file_bytes));
        end = share.end;
    }
    assert_eq!(end, manifest.state_bytes());
    let again = manifest.encode().expect("what was decoded is within the limits");
    assert!(again.len() <= bytes.len());
    assert_eq!(SavedManifest::decode(&again), Ok(manifest));
}
