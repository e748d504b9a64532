//! Everything that parses: what was encoded is decoded again, and whatever else comes is refused without a panic and
//! without memory out of proportion.

mod entry;

use gradwire_proto::frame::{FrameHeader, FrameKind, Location};
use gradwire_proto::hello::{Handshake, HelloParams, Purpose};
use gradwire_proto::manifest::{Declaration, Manifest, agree};
use gradwire_proto::member::{Endpoint, HostId};
use gradwire_proto::saved::{Cut, SavedManifest, SavedPart, SavedShard};
use gradwire_proto::wire::Reader;
use gradwire_proto::{
    Attempt, BucketId, Collective, DType, Epoch, Fault, FaultKind, Rank, ReduceOp, RegionKey, Secret, Step, UnitIndex,
    WireFormat,
};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const KINDS: [FrameKind; 10] = [
    FrameKind::Contribution,
    FrameKind::Result,
    FrameKind::Ack,
    FrameKind::Nack,
    FrameKind::Abort,
    FrameKind::Goodbye,
    FrameKind::GoodbyeAck,
    FrameKind::Manifest,
    FrameKind::Ready,
    FrameKind::Waiting,
];

prop_compose! {
    fn frame_header()(
        kind in select(&KINDS[..]),
        flags in 0_u8..16,
        dtype in option::of(select(&DType::ALL[..])),
        (attempt, payload_crc, bucket, unit_first, unit_count) in any::<(u16, u32, u32, u32, u32)>(),
        payload_len in 0..=gradwire_proto::limits::PAYLOAD_BYTES_MAX,
        (epoch, step, region, offset) in any::<(u64, u64, u64, u64)>(),
    ) -> FrameHeader {
        FrameHeader {
            kind,
            flags,
            dtype,
            attempt: Attempt(attempt),
            payload_crc,
            payload_len,
            epoch: Epoch(epoch),
            step: Step(step % (1 << 48)),
            commits: (step >> 48) as u16,
            bucket: BucketId(bucket),
            unit_first: UnitIndex(unit_first),
            unit_count,
            location: Location { region: RegionKey(region), offset },
        }
    }
}

prop_compose! {
    fn fault()(
        kind in select(&FaultKind::ALL[..]),
        rank in option::of(any::<u32>().prop_map(Rank)),
        reporter in option::of(any::<u32>().prop_map(Rank)),
        step in option::of(any::<u64>().prop_map(Step)),
        tensor in option::of(".{0,100}"),
        detail in ".{0,200}",
    ) -> Fault {
        Fault { kind, rank, tensor, step, reporter, detail }
    }
}

prop_compose! {
    fn endpoint()(
        addresses in vec(any::<(std::net::IpAddr, u16)>().prop_map(Into::into), 0..=16),
        host in any::<[u8; 16]>().prop_map(HostId),
        socket in ".{0,60}",
        hostname in ".{0,60}",
    ) -> Endpoint {
        Endpoint { addresses, host, socket, hostname }
    }
}

fn collective() -> impl Strategy<Value = Collective> {
    prop_oneof![
        Just(Collective::AllReduce),
        Just(Collective::ReduceScatter),
        Just(Collective::AllGather),
        any::<u32>().prop_map(|root| Collective::Broadcast { root: Rank(root) }),
    ]
}

prop_compose! {
    fn declaration()(
        shape in vec(0_u64..100, 0..7),
        dtype in select(&DType::ALL[..]),
        collective in collective(),
        reduce in select(&ReduceOp::ALL[..]),
        wire in select(&WireFormat::ALL[..]),
        priority in any::<i32>(),
    ) -> Declaration {
        Declaration { name: String::new(), shape, dtype, collective, reduce, wire, priority }
    }
}

fn manifest() -> impl Strategy<Value = Manifest> {
    btree_map(".{1,60}", declaration(), 0..20).prop_map(|tensors| Manifest {
        tensors: tensors.into_iter().map(|(name, tensor)| Declaration { name, ..tensor }).collect(),
    })
}

prop_compose! {
    fn saved()(
        parts in btree_map(".{1,60}", 0_u64..1 << 34, 0..20),
        ranks in prop::collection::btree_set(0_u32..1024, 1..9),
        (sequence, id, step, epoch) in any::<(u64, [u8; 16], u64, u64)>(),
        (world_size, seal) in any::<(u32, u32)>(),
        (job, model_version) in ("[a-z0-9-]{0,64}", "[a-z0-9-]{0,64}"),
        piece_bytes in 4096_u32..=64 << 20,
    ) -> SavedManifest {
        let cut = Cut { state_bytes: parts.values().sum(), piece_bytes, shards: ranks.len() as u32 };
        let shard = |(index, rank)| SavedShard { rank: Rank(rank), file_bytes: cut.file_bytes(index), seal };
        SavedManifest {
            sequence, id, step: Step(step), epoch: Epoch(epoch), world_size, job, model_version, piece_bytes,
            parts: parts.into_iter().map(|(name, bytes)| SavedPart { name, bytes }).collect(),
            shards: (0..).zip(ranks).map(shard).collect(),
        }
    }
}

fn fault_bytes(fault: &Fault) -> Vec<u8> {
    let mut out = Vec::new();
    fault.encode(&mut out);
    out
}

fn endpoint_bytes(endpoint: &Endpoint) -> Vec<u8> {
    let mut out = Vec::new();
    endpoint.encode(&mut out);
    out
}

fn manifest_bytes(manifest: &Manifest) -> Vec<u8> {
    let mut out = Vec::new();
    manifest.encode(&mut out).expect("within the limits");
    out
}

/// A change to a message: bytes overwritten, cut off, or put in.
#[derive(Clone, Debug)]
enum Mutation {
    Overwrite(Index, u8),
    Truncate(Index),
    Insert(Index, Vec<u8>),
}

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let one = prop_oneof![
        4 => any::<(Index, u8)>().prop_map(|(at, byte)| Mutation::Overwrite(at, byte)),
        1 => any::<Index>().prop_map(Mutation::Truncate),
        1 => (any::<Index>(), vec(any::<u8>(), 1..16)).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
    ];
    vec(one, 1..6)
}

fn mutate(mut bytes: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        match mutation {
            Mutation::Overwrite(at, byte) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Mutation::Overwrite(..) => {}
            Mutation::Truncate(at) => bytes.truncate(at.index(bytes.len() + 1)),
            Mutation::Insert(at, more) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, more.iter().copied());
            }
        }
    }
    bytes
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(
        header in frame_header(), fault in fault(), endpoint in endpoint(), manifest in manifest(), saved in saved(),
    ) {
        prop_assert_eq!(SavedManifest::decode(&saved.encode().expect("within the limits")), Ok(saved));
        prop_assert_eq!(FrameHeader::decode(&header.encode(&entry::JOB), &entry::JOB), Ok(header));
        prop_assert_eq!(Fault::decode(&fault_bytes(&fault)), Ok(fault));
        prop_assert_eq!(Endpoint::decode(&mut Reader::new(&endpoint_bytes(&endpoint))), Ok(endpoint));
        prop_assert_eq!(Manifest::decode(&manifest_bytes(&manifest)), Ok(manifest));
    }

    #[test]
    fn any_changed_bit_of_a_frame_header_is_refused(header in frame_header(), bit in 0_usize..512) {
        let mut bytes = header.encode(&entry::JOB);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(FrameHeader::decode(&bytes, &entry::JOB).is_err());
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..300)) {
        entry::frame_header(&bytes);
        entry::fault(&bytes);
        entry::endpoint(&bytes);
        entry::manifest(&bytes);
        entry::hello(&bytes);
        entry::saved(&bytes);
        entry::transfer(&bytes);
    }

    #[test]
    fn any_change_of_a_saved_states_manifest_is_refused(saved in saved(), mutations in mutations()) {
        let bytes = saved.encode().expect("within the limits");
        let changed = mutate(bytes.clone(), &mutations);
        entry::saved(&changed);
        prop_assert!(changed == bytes || SavedManifest::decode(&changed).is_err());
        // As if it had been written so: the checksum made right.
        entry::saved(&mutate(bytes[..bytes.len() - 4].to_vec(), &mutations));
    }

    #[test]
    fn changed_messages_do_no_harm(
        header in frame_header(),
        fault in fault(),
        endpoint in endpoint(),
        manifest in manifest(),
        mutations in mutations(),
    ) {
        entry::frame_header(&mutate(header.encode(&entry::JOB).to_vec(), &mutations));
        entry::fault(&mutate(fault_bytes(&fault), &mutations));
        entry::endpoint(&mutate(endpoint_bytes(&endpoint), &mutations));
        entry::manifest(&mutate(manifest_bytes(&manifest), &mutations));
    }

    #[test]
    fn a_hello_from_somebody_without_the_secret_does_no_harm(
        nonce in any::<[u8; 32]>(), rest in vec(any::<u8>(), 0..120), mutations in option::of(mutations()),
    ) {
        let opening = [&b"GWHL\x01\0\0\0"[..], &nonce, &rest].concat();
        entry::hello(&mutate(opening, &mutations.unwrap_or_default()));
    }

    #[test]
    fn ranks_meet_exactly_when_they_agree_on_everything(
        dialer in (0_u32..3, 1_u64..3, 2_u32..4, 0_u8..2, 0_u8..2),
        acceptor in (0_u32..3, 1_u64..3, 2_u32..4, 0_u8..2, 0_u8..2),
        target in 0_u32..3,
    ) {
        let params = |(rank, epoch, world_size, secret, job): (u32, u64, u32, u8, u8)| HelloParams {
            secret: Secret::from_bytes([secret; 32]),
            job: gradwire_proto::frame::JobTag([job; 16]),
            epoch: Epoch(epoch),
            rank: Rank(rank),
            world_size,
        };
        let (d, a) = (params(dialer), params(acceptor));
        let fits = d.secret == a.secret && d.job == a.job && d.epoch == a.epoch && d.world_size == a.world_size
            && target == a.rank.0 && d.rank != a.rank && d.rank.0 < a.world_size;
        let (mut dialing, opening) = Handshake::dial(&d, Rank(target), Purpose::Link, [1; 32]);
        let mut accepting = Handshake::accept(&a, [2; 32]);
        let answer = accepting.receive(&opening).expect("the same version");
        let claim = dialing.receive(&answer.send).expect("the same version");
        match accepting.receive(&claim.send) {
            Ok(welcome) => {
                prop_assert!(fits);
                prop_assert_eq!(welcome.done, Some((d.rank, Purpose::Link)));
                prop_assert_eq!(dialing.receive(&welcome.send).map(|reply| reply.done), Ok(Some((a.rank, Purpose::Link))));
            }
            Err(rejected) => {
                prop_assert!(!fits);
                let fault = dialing.receive(&rejected.send).expect_err("it was refused").fault;
                prop_assert_eq!(fault.kind, rejected.fault.kind, "{} / {}", fault, rejected.fault);
            }
        }
    }

    #[test]
    fn order_does_not_matter_and_any_difference_does(
        manifest in manifest(), order in any::<u64>(), at in any::<Index>(), other in declaration(),
    ) {
        let roots_exist = |tensor: &Declaration| !matches!(tensor.collective, Collective::Broadcast { .. });
        let tensors: Vec<Declaration> = manifest.tensors.into_iter().filter(roots_exist).collect();
        let first = Manifest { tensors };
        let mut second = first.clone();
        second.tensors.sort_by_key(|tensor| crc(order, &tensor.name));
        prop_assert_eq!(agree(&[first.clone(), second.clone()]), Ok(first.tensors.clone()));
        if first.tensors.is_empty() {
            return Ok(());
        }
        let changed = &mut second.tensors[at.index(first.tensors.len())];
        let name = changed.name.clone();
        let before = (changed.shape.clone(), changed.dtype, changed.collective, changed.reduce, changed.wire);
        *changed = Declaration { name: name.clone(), ..other };
        let after = (changed.shape.clone(), changed.dtype, changed.collective, changed.reduce, changed.wire);
        let result = agree(&[first.clone(), second.clone()]);
        if before == after {
            prop_assert_eq!(result, Ok(first.tensors.clone()));
        } else {
            prop_assert_eq!(result.map_err(|fault| fault.tensor), Err(Some(name.clone())));
        }
        second.tensors.retain(|tensor| tensor.name != name);
        for ranks in [[first.clone(), second.clone()], [second, first]] {
            let fault = agree(&ranks).expect_err("one rank lacks a tensor");
            prop_assert_eq!((fault.kind, fault.tensor), (FaultKind::DeclarationMismatch, Some(name.clone())));
        }
    }
}

fn crc(seed: u64, name: &str) -> u32 {
    gradwire_proto::frame::payload_crc(&[&seed.to_le_bytes()[..], name.as_bytes()].concat())
}
