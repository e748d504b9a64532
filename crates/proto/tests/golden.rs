//! The blocks marked `golden` in docs/wire.md are what this release writes and reads, byte for byte. A change here is
//! a change of the format: it needs a new protocol version (docs/wire.md, "Versions").

use std::collections::BTreeMap;

use gradwire_proto::frame::{
    FLAG_CHECKED, FLAG_HAS_ALL, FLAG_NACK_RESULT, FLAG_NONFINITE, FLAG_OFFER, FrameHeader, FrameKind, JobTag, Location,
    payload_crc,
};
use gradwire_proto::hello::{Handshake, HelloParams, Purpose};
use gradwire_proto::limits::FRAME_HEADER_BYTES;
use gradwire_proto::manifest::{Declaration, Manifest};
use gradwire_proto::member::{Endpoint, HostId};
use gradwire_proto::saved::{SavedManifest, SavedPart, SavedShard, ShardHeader};
use gradwire_proto::secret::hex;
use gradwire_proto::transfer::{Ask, Given, No, Reason};
use gradwire_proto::wire::Reader;
use gradwire_proto::{
    Attempt, BucketId, Collective, DType, Epoch, Fault, FaultKind, Rank, ReduceOp, RegionKey, Secret, Step, UnitIndex,
    WireFormat,
};

/// 00 01 02 .. 0f.
fn job() -> JobTag {
    JobTag(std::array::from_fn(|i| i as u8))
}

/// The document's golden blocks by name: hexadecimal digits, with comments behind `#`.
fn document() -> BTreeMap<String, String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/wire.md");
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut blocks = BTreeMap::new();
    for block in text.split("```golden ").skip(1) {
        let (name, rest) = block.split_once('\n').expect("a block has lines");
        let (body, _) = rest.split_once("```").expect("a block ends");
        let digits: String = body
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default())
            .flat_map(str::split_whitespace)
            .collect();
        assert!(blocks.insert(name.to_owned(), digits).is_none(), "{name} is there twice");
    }
    blocks
}

#[track_caller]
fn assert_golden(blocks: &BTreeMap<String, String>, name: &str, bytes: &[u8]) {
    let actual = hex(bytes);
    match blocks.get(name) {
        Some(golden) => assert_eq!(*golden, actual, "{name} is not as docs/wire.md has it"),
        None => panic!("docs/wire.md has no golden block {name}; it would be {actual}"),
    }
}

fn from_hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits.bytes().map(|digit| char::from(digit).to_digit(16).expect("a digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] * 16 + pair[1]).collect()
}

fn fault() -> Fault {
    Fault::new(FaultKind::NotOffered, "no data within 30 s").at(Rank(2)).tensor("fc1.weight").step(Step(7))
}

fn manifest() -> Manifest {
    let weight = Declaration {
        name: "w".into(),
        shape: vec![64, 10],
        dtype: DType::F32,
        collective: Collective::AllReduce,
        reduce: ReduceOp::Mean,
        wire: WireFormat::Fp16,
        priority: -1,
    };
    let seed = Declaration {
        name: "seed".into(),
        shape: vec![],
        dtype: DType::I64,
        collective: Collective::Broadcast { root: Rank(3) },
        reduce: ReduceOp::Sum,
        wire: WireFormat::Fp32,
        priority: 0,
    };
    Manifest { tensors: vec![weight, seed] }
}

/// One frame of each kind, with its body where it is a message.
fn frames() -> Vec<(&'static str, FrameHeader, Vec<u8>)> {
    let frame = |kind: FrameKind| FrameHeader {
        step: Step(7),
        bucket: BucketId(2),
        unit_first: UnitIndex(40),
        unit_count: 3,
        ..FrameHeader::new(kind, Epoch(1))
    };
    let plain = |kind: FrameKind| FrameHeader::new(kind, Epoch(1));
    let with_body = |header: FrameHeader, body: &[u8]| FrameHeader {
        payload_len: body.len() as u32,
        payload_crc: payload_crc(body),
        ..header
    };
    let data = FrameHeader {
        dtype: Some(DType::F16),
        payload_len: 24,
        payload_crc: payload_crc(&[0; 24]),
        flags: FLAG_CHECKED,
        location: Location { region: RegionKey(5), offset: 4096 },
        ..frame(FrameKind::Contribution)
    };
    let mut abort = Vec::new();
    fault().encode(&mut abort);
    let mut piece = Vec::new();
    manifest().encode(&mut piece).expect("it is within the limits");
    let whole = piece.len() as u32;
    let piece = &piece[32..];
    let ask = Ask::Snapshot { commits: 9, seat: 1, holders: 3 }.encode();
    let give = No { reason: Reason::TooLate, commits: 11, detail: "passed".to_owned() }.encode();
    let checked = |kind| FrameHeader { flags: FLAG_CHECKED, epoch: Epoch(0), ..plain(kind) };
    let steps = [9_u64.to_le_bytes(), 12_u64.to_le_bytes()].concat();
    let empties = [&3u32.to_le_bytes()[..], &12u64.to_le_bytes()].concat();
    vec![
        ("frame-contribution", data, vec![]),
        (
            "frame-result",
            FrameHeader {
                kind: FrameKind::Result,
                flags: FLAG_CHECKED | FLAG_NONFINITE,
                attempt: Attempt(1),
                location: Location::default(),
                ..data
            },
            vec![],
        ),
        ("frame-offer", FrameHeader { flags: FLAG_OFFER, ..frame(FrameKind::Contribution) }, vec![]),
        ("frame-ack", FrameHeader { unit_count: 1, ..frame(FrameKind::Ack) }, vec![]),
        (
            "frame-nack",
            with_body(FrameHeader { flags: FLAG_NACK_RESULT, ..frame(FrameKind::Nack) }, &[0b101]),
            vec![0b101],
        ),
        ("frame-abort", with_body(plain(FrameKind::Abort), &abort), abort.clone()),
        ("frame-goodbye-lost", with_body(plain(FrameKind::Goodbye), &abort), abort),
        ("frame-goodbye", plain(FrameKind::Goodbye), vec![]),
        ("frame-goodbye-ack", plain(FrameKind::GoodbyeAck), vec![]),
        (
            "frame-manifest",
            with_body(
                FrameHeader { unit_first: UnitIndex(32), unit_count: whole, ..plain(FrameKind::Manifest) },
                piece,
            ),
            piece.to_vec(),
        ),
        (
            "frame-ready",
            FrameHeader {
                step: Step(0),
                location: Location { region: RegionKey(6), offset: 0 },
                ..plain(FrameKind::Ready)
            },
            vec![],
        ),
        ("frame-waiting", with_body(FrameHeader { unit_count: 1, ..frame(FrameKind::Waiting) }, &[0b100]), vec![0b100]),
        ("frame-heartbeat", FrameHeader { unit_count: 500, ..plain(FrameKind::Heartbeat) }, vec![]),
        ("frame-has-all", FrameHeader { step: Step(9), unit_count: 2, ..plain(FrameKind::HasAll) }, vec![]),
        (
            "frame-sync",
            with_body(
                FrameHeader {
                    epoch: Epoch(2),
                    step: Step(9),
                    flags: FLAG_HAS_ALL,
                    bucket: BucketId(2),
                    unit_count: 1,
                    location: Location { region: RegionKey(6), offset: 0 },
                    ..plain(FrameKind::Sync)
                },
                &empties,
            ),
            empties.clone(),
        ),
        ("frame-synced", FrameHeader { epoch: Epoch(2), ..plain(FrameKind::Synced) }, vec![]),
        (
            "frame-steps",
            with_body(FrameHeader { epoch: Epoch(2), step: Step(9), unit_count: 2, ..plain(FrameKind::Steps) }, &steps),
            steps.clone(),
        ),
        ("frame-ask", with_body(checked(FrameKind::Ask), &ask), ask.clone()),
        (
            "frame-give",
            with_body(
                FrameHeader { bucket: BucketId(Given::No as u32), unit_count: 1, ..checked(FrameKind::Give) },
                &give,
            ),
            give.clone(),
        ),
    ]
}

#[test]
fn frames_are_golden() {
    let blocks = document();
    for (name, header, body) in frames() {
        assert_golden(&blocks, name, &[&header.encode(&job())[..], &body].concat());
        let golden = from_hex(&blocks[name]);
        let (head, rest) = golden.split_at(FRAME_HEADER_BYTES);
        assert_eq!(FrameHeader::decode(head, &job()), Ok(header), "{name}");
        assert_eq!(rest, body, "{name}");
    }
}

#[test]
fn every_kind_of_frame_has_a_golden_one() {
    let blocks = document();
    let mut known = FrameHeader::new(FrameKind::Ack, Epoch(1)).encode(&job());
    for code in 0..=u8::MAX {
        known[3] = code;
        let crc = payload_crc(&[&job().0[..], &known[..4], &known[8..]].concat());
        known[4..8].copy_from_slice(&crc.to_le_bytes());
        if FrameHeader::decode(&known, &job()).is_ok() {
            let golden = |(name, digits): (&String, &String)| name.starts_with("frame-") && from_hex(digits)[3] == code;
            assert!(blocks.iter().any(golden), "docs/wire.md has no golden frame of kind {code}");
        }
    }
}

#[test]
fn every_golden_block_of_this_crate_is_tested() {
    let tested: Vec<&str> = frames()
        .iter()
        .map(|(name, ..)| *name)
        .chain(["hello-dialer", "hello-acceptor", "hello-claim", "hello-welcome", "hello-epoch", "hello-refused"])
        .chain(["fault", "manifest", "endpoint", "saved-manifest", "saved-shard"])
        .collect();
    // The other crates test the sections that they own.
    let elsewhere = ["control-", "federated-", "tcp-", "shm-"];
    for name in document().keys() {
        let known = tested.contains(&name.as_str()) || elsewhere.iter().any(|prefix| name.starts_with(prefix));
        assert!(known, "no test compares the block {name}");
    }
}

fn hello(rank: u32, epoch: u64, secret: u8) -> HelloParams {
    HelloParams {
        secret: Secret::from_bytes([secret; 32]),
        job: job(),
        epoch: Epoch(epoch),
        rank: Rank(rank),
        world_size: 4,
    }
}

/// The four messages of a hello between rank 2, which dials, and rank 1.
fn hello_messages(acceptor: &HelloParams) -> [Vec<u8>; 4] {
    let (mut dialer, opening) = Handshake::dial(&hello(2, 1, 0x55), Rank(1), Purpose::Link, [0xd1; 32]);
    let mut acceptor = Handshake::accept(acceptor, [0xac; 32]);
    let answer = acceptor.receive(&opening).expect("an opening").send;
    let claim = dialer.receive(&answer).expect("an opening").send;
    let verdict = match acceptor.receive(&claim) {
        Ok(reply) => reply.send,
        Err(rejected) => rejected.send,
    };
    [opening.to_vec(), answer.to_vec(), claim.to_vec(), verdict.to_vec()]
}

#[test]
fn the_hello_is_golden() {
    let blocks = document();
    let [dialer, acceptor, claim, welcome] = hello_messages(&hello(1, 1, 0x55));
    assert_golden(&blocks, "hello-dialer", &dialer);
    assert_golden(&blocks, "hello-acceptor", &acceptor);
    assert_golden(&blocks, "hello-claim", &claim);
    assert_golden(&blocks, "hello-welcome", &welcome);
    let [.., other_epoch] = hello_messages(&hello(1, 2, 0x55));
    assert_golden(&blocks, "hello-epoch", &other_epoch);
    let [.., refused] = hello_messages(&hello(1, 1, 0x56));
    assert_golden(&blocks, "hello-refused", &refused);
}

#[test]
fn fault_manifest_and_endpoint_are_golden() {
    let blocks = document();
    let mut bytes = Vec::new();
    fault().encode(&mut bytes);
    assert_golden(&blocks, "fault", &bytes);
    assert_eq!(Fault::decode(&from_hex(&blocks["fault"])), Ok(fault()));

    let mut bytes = Vec::new();
    manifest().encode(&mut bytes).expect("it is within the limits");
    assert_golden(&blocks, "manifest", &bytes);
    assert_eq!(Manifest::decode(&from_hex(&blocks["manifest"])), Ok(manifest()));

    let endpoint = Endpoint {
        addresses: vec!["192.0.2.7:29500".parse().expect("v4"), "[2001:db8::1]:29501".parse().expect("v6")],
        host: HostId([0x11; 16]),
        socket: "gradwire".into(),
        hostname: "node7".into(),
    };
    let mut bytes = Vec::new();
    endpoint.encode(&mut bytes);
    assert_golden(&blocks, "endpoint", &bytes);
    assert_eq!(Endpoint::decode(&mut Reader::new(&from_hex(&blocks["endpoint"]))), Ok(endpoint));
}

fn saved() -> SavedManifest {
    let part = |name: &str, bytes| SavedPart { name: name.into(), bytes };
    let mut manifest = SavedManifest {
        sequence: 12,
        id: std::array::from_fn(|i| i as u8 + 16),
        step: Step(600),
        epoch: Epoch(2),
        world_size: 3,
        job: "digits".into(),
        model_version: String::new(),
        piece_bytes: 4 << 20,
        parts: vec![part("weights", 16), part("seed", 8)],
        shards: [0, 2].map(|rank| SavedShard { rank: Rank(rank), file_bytes: 0, seal: 0 }).to_vec(),
    };
    let crc = payload_crc(&saved_data()).to_le_bytes();
    for (index, checksums) in [(0, &[][..]), (1, &crc[..])] {
        let header = manifest.shard_header(index);
        let file_bytes = manifest.cut().file_bytes(index);
        manifest.shards[index as usize] = SavedShard { file_bytes, seal: header.seal(checksums), rank: header.rank };
    }
    manifest
}

fn saved_data() -> Vec<u8> {
    (0..24).collect()
}

#[test]
fn a_saved_state_is_golden() {
    let blocks = document();
    let manifest = saved();
    assert_golden(&blocks, "saved-manifest", &manifest.encode().expect("it is within the limits"));
    assert_eq!(SavedManifest::decode(&from_hex(&blocks["saved-manifest"])), Ok(manifest.clone()));
    let (header, data) = (manifest.shard_header(1), saved_data());
    let crc = payload_crc(&data).to_le_bytes();
    let shard = [&header.encode()[..], &data, &crc, &header.seal(&crc).to_le_bytes()].concat();
    assert_golden(&blocks, "saved-shard", &shard);
    assert_eq!(manifest.shards[1].file_bytes, shard.len() as u64);
    assert_eq!(ShardHeader::decode(&from_hex(&blocks["saved-shard"])[..64]), Ok(header));
}
