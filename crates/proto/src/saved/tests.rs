use alloc::string::ToString;
use alloc::vec;

use super::*;

fn manifest() -> SavedManifest {
    let cut = Cut { state_bytes: 9000, piece_bytes: 4096, shards: 2 };
    let shard = |index: u32, rank| SavedShard { rank: Rank(rank), file_bytes: cut.file_bytes(index), seal: 7 + index };
    SavedManifest {
        sequence: 12,
        id: [9; 16],
        step: Step(600),
        epoch: Epoch(2),
        world_size: 3,
        job: "digits".into(),
        model_version: String::new(),
        piece_bytes: 4096,
        parts: vec![
            SavedPart { name: "weights".into(), bytes: 8992 },
            SavedPart { name: "nothing".into(), bytes: 0 },
            SavedPart { name: "seed".into(), bytes: 8 },
        ],
        shards: vec![shard(0, 0), shard(1, 2)],
    }
}

/// The manifest's bytes, changed, with a checksum that is right all the same.
fn resealed(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = manifest().encode().expect("within the limits");
    bytes.truncate(bytes.len() - CRC_BYTES);
    change(&mut bytes);
    let crc = crc32fast::hash(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes
}

#[test]
fn shares_are_whole_pieces_that_cover_the_state_once() {
    for shards in [1, 2, 3, 5, 7, 1024] {
        for state_bytes in [0, 1, 4095, 4096, 4097, 40_960, 1 << 20, (1 << 30) + 5, SAVED_BYTES_MAX] {
            let cut = Cut { state_bytes, piece_bytes: 4096, shards };
            let (mut at, mut pieces) = (0, Vec::new());
            for index in 0..shards {
                let share = cut.share(index);
                assert_eq!(share.start, at);
                assert!(share.start.is_multiple_of(4096) || share.start == state_bytes);
                at = share.end;
                pieces.push(cut.pieces(index));
            }
            assert_eq!(at, state_bytes);
            assert_eq!(pieces.iter().sum::<u64>(), state_bytes.div_ceil(4096));
            assert!(pieces.iter().max().unwrap() - pieces.iter().min().unwrap() <= 1, "{pieces:?}");
        }
    }
}

#[test]
fn a_manifest_is_read_as_it_was_written_and_every_changed_bit_is_refused() {
    let bytes = manifest().encode().expect("within the limits");
    assert_eq!(SavedManifest::decode(&bytes), Ok(manifest()));
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(SavedManifest::decode(&bytes).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(SavedManifest::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn what_a_later_release_added_is_refused_unless_it_is_empty() {
    let section = |kind: u16, body: &'static [u8]| {
        resealed(|bytes| {
            // The number of sections stands in front of the first one, which is of kind 1.
            let sections = bytes.windows(6).rposition(|window| window == [2, 0, 0, 0, 1, 0]).expect("two sections");
            bytes[sections] = 3;
            bytes.extend(kind.to_le_bytes());
            bytes.extend((body.len() as u64).to_le_bytes());
            bytes.extend(body);
        })
    };
    assert_eq!(SavedManifest::decode(&section(3, b"")), Ok(manifest()));
    let refused = SavedManifest::decode(&section(3, b"residuals")).expect_err("it would be lost");
    assert_eq!(refused, SavedError::UnknownSection(3));
    assert!(refused.to_string().contains("kind 3"), "{refused}");
    assert!(matches!(SavedManifest::decode(&section(2, b"")), Err(SavedError::Malformed(_))));
}

#[test]
fn other_versions_and_other_files_are_told_apart_from_damage() {
    assert_eq!(SavedManifest::decode(&resealed(|bytes| bytes[4] = 2)), Err(SavedError::Version(2)));
    assert_eq!(SavedManifest::decode(b"PNG"), Err(SavedError::Foreign));
    assert_eq!(SavedManifest::decode(b"something else"), Err(SavedError::Foreign));
    assert_eq!(SavedManifest::decode(b"GWSM"), Err(SavedError::Checksum));
    let reserved = SavedManifest::decode(&resealed(|bytes| bytes[6] = 1));
    assert_eq!(reserved, Err(SavedError::Malformed(Malformed("reserved bytes"))));
    let header = manifest().shard_header(1);
    assert_eq!(ShardHeader::decode(&header.encode()), Ok(header));
    assert_eq!(ShardHeader::decode(&header.encode()[..63]), Err(SavedError::Malformed(Malformed("ends too early"))));
    assert_eq!(ShardHeader::decode(&manifest().encode().unwrap()), Err(SavedError::Foreign));
}

#[test]
fn what_cannot_be_is_refused_by_writers_and_readers() {
    type Change = fn(&mut SavedManifest);
    let changes: [(&str, Change); 6] = [
        ("two parts of the state are called 'seed'", |it| it.parts[0].name = "seed".into()),
        ("has no name", |it| it.parts[0].name.clear()),
        ("bytes; at most", |it| it.parts[0].bytes = u64::MAX),
        ("length of a shard", |it| it.shards[0].file_bytes += 1),
        ("shards out of order", |it| it.shards[1].rank = Rank(0)),
        ("bytes of a piece", |it| it.piece_bytes = 0),
    ];
    for (said, change) in changes {
        let mut manifest = manifest();
        change(&mut manifest);
        let fault = manifest.encode().expect_err(said);
        assert!(fault.kind == FaultKind::InvalidArgument && fault.detail.contains(said), "{fault}");
    }
}
