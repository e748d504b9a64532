use alloc::vec::Vec;

use super::*;

const JOB: JobTag = JobTag(*b"job-0123456789ab");

fn full(kind: FrameKind) -> FrameHeader {
    FrameHeader {
        kind,
        flags: FLAGS_KNOWN,
        dtype: Some(DType::Bf16),
        attempt: Attempt(u16::MAX),
        payload_crc: 0xdead_beef,
        payload_len: PAYLOAD_BYTES_MAX,
        epoch: Epoch(u64::MAX),
        step: Step(STEPS_MAX - 1),
        commits: u16::MAX - 1,
        bucket: BucketId(u32::MAX),
        unit_first: UnitIndex(u32::MAX),
        unit_count: u32::MAX,
        location: Location { region: RegionKey(u64::MAX), offset: u64::MAX },
    }
}

/// The header with its checksum made to fit whatever else it holds.
fn sealed(mut bytes: [u8; FRAME_HEADER_BYTES]) -> [u8; FRAME_HEADER_BYTES] {
    let crc = header_crc(&bytes, &JOB);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn every_kind_travels_empty_and_full() {
    for kind in FrameKind::ALL {
        for header in [FrameHeader::new(kind, Epoch(1)), full(kind)] {
            assert_eq!(FrameHeader::decode(&header.encode(&JOB), &JOB), Ok(header));
        }
    }
    for dtype in DType::ALL {
        let header = FrameHeader { dtype: Some(dtype), ..FrameHeader::new(FrameKind::Contribution, Epoch(1)) };
        assert_eq!(FrameHeader::decode(&header.encode(&JOB), &JOB), Ok(header));
    }
}

#[test]
fn any_changed_bit_is_refused() {
    for header in [FrameHeader::new(FrameKind::Contribution, Epoch(1)), full(FrameKind::Result)] {
        let bytes = header.encode(&JOB);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(FrameHeader::decode(&changed, &JOB).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn a_frame_of_another_job_is_refused() {
    let bytes = full(FrameKind::Ack).encode(&JOB);
    for bit in 0..128 {
        let mut other = JOB;
        other.0[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(FrameHeader::decode(&bytes, &other), Err(Malformed("frame header checksum")));
    }
}

#[test]
fn a_header_has_one_length() {
    let bytes = full(FrameKind::Ack).encode(&JOB);
    let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    for other in [&bytes[..0], &bytes[..63], &longer] {
        assert_eq!(FrameHeader::decode(other, &JOB), Err(Malformed("frame header length")));
    }
}

#[test]
fn what_a_correct_checksum_covers_is_checked_all_the_same() {
    let bytes = FrameHeader::new(FrameKind::Ack, Epoch(1)).encode(&JOB);
    for (at, value, flaw) in [
        (0, b'X', "frame magic"),
        (2, PROTOCOL_VERSION + 1, "frame version"),
        (3, 0, "frame kind"),
        (3, FrameKind::ALL.len() as u8 + 1, "frame kind"),
        (46, 7, "element type"),
        (47, FLAGS_KNOWN + 1, "frame flags"),
        (15, 1, "payload length"),
    ] {
        let mut changed = bytes;
        changed[at] = value;
        assert_eq!(FrameHeader::decode(&sealed(changed), &JOB), Err(Malformed(flaw)), "byte {at} is {value}");
    }
    let too_long = FrameHeader { payload_len: PAYLOAD_BYTES_MAX + 1, ..full(FrameKind::Result) };
    assert_eq!(FrameHeader::decode(&too_long.encode(&JOB), &JOB), Err(Malformed("payload length")));
}

#[test]
fn the_payload_checksum_is_crc_32_of_ieee_802_3() {
    // The check value that catalogues give for this CRC.
    assert_eq!(payload_crc(b"123456789"), 0xcbf4_3926);
    assert_eq!(payload_crc(b""), 0);
}
