use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::*;

const PEER: Rank = Rank(1);
const DIALER: Rank = Rank(2);

fn params(rank: Rank) -> HelloParams {
    HelloParams { secret: Secret::from_bytes([7; 32]), job: JobTag([3; 16]), epoch: Epoch(1), rank, world_size: 4 }
}

/// How each side ended: the peer it proved, or its fault. `None`: it still waits.
type Ends = (Option<Result<Rank, Fault>>, Option<Result<Rank, Fault>>);

/// Runs a hello in which `tamper(n, bytes)` may change the n-th message on its way.
fn run(dialer: &HelloParams, acceptor: &HelloParams, mut tamper: impl FnMut(usize, &mut Vec<u8>)) -> Ends {
    let (dial, opening) = Handshake::dial(dialer, PEER, Purpose::Link, [0xd1; 32]);
    let mut sides = [dial, Handshake::accept(acceptor, [0xac; 32])];
    let mut ends = [None, None];
    let mut message = opening.to_vec();
    for n in 0.. {
        tamper(n, &mut message);
        let receiver = (n + 1) % 2;
        if message.is_empty() || sides[receiver].wanted() == 0 {
            break;
        }
        match sides[receiver].receive(&message) {
            Ok(reply) => {
                ends[receiver] = reply.done.map(|(peer, _)| Ok(peer)).or(ends[receiver].take());
                message = reply.send.to_vec();
            }
            Err(rejected) => {
                assert_eq!(sides[receiver].wanted(), 0, "a rejected side wants nothing more");
                ends[receiver] = Some(Err(rejected.fault));
                message = rejected.send.to_vec();
            }
        }
    }
    let [dialer, acceptor] = ends;
    (dialer, acceptor)
}

#[test]
fn a_process_that_wants_the_state_need_not_be_in_the_epoch() {
    let acceptor = HelloParams { epoch: Epoch(9), ..params(PEER) };
    let (mut dial, opening) = Handshake::dial(&params(DIALER), PEER, Purpose::State, [1; 32]);
    let mut accept = Handshake::accept(&acceptor, [2; 32]);
    let answer = accept.receive(&opening).unwrap();
    let claim = dial.receive(&answer.send).unwrap();
    let verdict = accept.receive(&claim.send).unwrap();
    assert_eq!(verdict.done, Some((DIALER, Purpose::State)));
    assert_eq!(dial.receive(&verdict.send).unwrap().done, Some((PEER, Purpose::State)));
}

fn honest(dialer: &HelloParams, acceptor: &HelloParams) -> Ends {
    run(dialer, acceptor, |_, _| {})
}

#[track_caller]
fn assert_fault(end: Option<Result<Rank, Fault>>, kind: FaultKind, rank: Option<Rank>, says: &[&str]) {
    let fault = end.expect("still waits").expect_err("let the peer in");
    assert_eq!((fault.kind, fault.rank), (kind, rank), "{fault}");
    for text in says {
        assert!(fault.detail.contains(text), "'{text}' is not in: {fault}");
    }
}

#[test]
fn ranks_that_know_the_secret_meet() {
    assert_eq!(honest(&params(DIALER), &params(PEER)), (Some(Ok(PEER)), Some(Ok(DIALER))));
    // Any rank may dial any other.
    let (dialer, acceptor) = honest(&params(Rank(0)), &params(PEER));
    assert_eq!((dialer, acceptor), (Some(Ok(PEER)), Some(Ok(Rank(0)))));
}

#[test]
fn messages_have_their_sizes_and_each_side_ends() {
    let (mut dialer, opening) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]);
    let mut acceptor = Handshake::accept(&params(PEER), [2; 32]);
    assert_eq!((dialer.wanted(), acceptor.wanted()), (40, 40));
    let answer = acceptor.receive(&opening).unwrap();
    assert_eq!((answer.send.len(), answer.done, acceptor.wanted()), (40, None, 56));
    let claim = dialer.receive(&answer.send).unwrap();
    assert_eq!((claim.send.len(), claim.done, dialer.wanted()), (56, None, 56));
    let verdict = acceptor.receive(&claim.send).unwrap();
    assert_eq!((verdict.send.len(), verdict.done, acceptor.wanted()), (56, Some((DIALER, Purpose::Link)), 0));
    let end = dialer.receive(&verdict.send).unwrap();
    assert_eq!((end.send.len(), end.done, dialer.wanted()), (0, Some((PEER, Purpose::Link)), 0));
    for mut over in [dialer, acceptor] {
        for bytes in [&[][..], &[0; 40], &[0; 56]] {
            assert_eq!(over.receive(bytes).unwrap_err().fault.kind, FaultKind::ProtocolViolation);
        }
    }
}

#[test]
fn a_wrong_secret_or_another_job_ends_on_both_sides_and_is_not_blamed_on_a_rank_by_hearsay() {
    let wrong_secret = HelloParams { secret: Secret::from_bytes([8; 32]), ..params(DIALER) };
    let other_job = HelloParams { job: JobTag([4; 16]), ..params(DIALER) };
    for dialer in [wrong_secret, other_job] {
        let (dialer_end, acceptor_end) = honest(&dialer, &params(PEER));
        assert_fault(dialer_end, FaultKind::SecretMismatch, Some(PEER), &["rank 1 refused", "rank 2 does not have"]);
        assert_fault(acceptor_end, FaultKind::SecretMismatch, None, &["did not prove"]);
    }
}

#[test]
fn who_does_not_know_the_secret_hears_the_same_whatever_it_claims() {
    let mut heard: Vec<Vec<u8>> = Vec::new();
    for (rank, epoch, world_size) in [(2, 1, 4), (1, 1, 4), (9, 1, 4), (2, 6, 4), (2, 1, 8)] {
        let dialer = HelloParams {
            secret: Secret::from_bytes([8; 32]),
            epoch: Epoch(epoch),
            rank: Rank(rank),
            world_size,
            ..params(DIALER)
        };
        run(&dialer, &params(PEER), |n, bytes| {
            if n == 3 {
                heard.push(bytes.clone());
            }
        });
    }
    assert_eq!(heard.len(), 5);
    assert!(heard.iter().all(|verdict| *verdict == Verdict::proof_refused()));
}

#[test]
fn an_impostor_that_welcomes_without_the_secret_is_found_out() {
    let (dialer, _) = run(&params(DIALER), &params(PEER), |n, bytes| {
        if n == 3 {
            bytes[24..].fill(0x55);
        }
    });
    assert_fault(dialer, FaultKind::SecretMismatch, Some(PEER), &["rank 1's address did not prove"]);
}

#[test]
fn another_epoch_world_or_target_is_named_with_both_values_on_both_sides() {
    let epoch = HelloParams { epoch: Epoch(5), ..params(PEER) };
    let (dialer, acceptor) = honest(&params(DIALER), &epoch);
    assert_fault(dialer, FaultKind::EpochMismatch, Some(PEER), &["rank 1 is in epoch 5", "rank 2 is in epoch 1"]);
    assert_fault(acceptor, FaultKind::EpochMismatch, Some(DIALER), &["rank 2 is in epoch 1", "rank 1 is in epoch 5"]);

    let world = HelloParams { world_size: 8, ..params(PEER) };
    let (dialer, acceptor) = honest(&params(DIALER), &world);
    assert_fault(dialer, FaultKind::WorldMismatch, Some(PEER), &["rank 1 was started for 8 ranks", "rank 2 for 4"]);
    assert_fault(acceptor, FaultKind::WorldMismatch, Some(DIALER), &["rank 2 was started for 4 ranks", "rank 1 for 8"]);

    let (dialer, acceptor) = honest(&params(DIALER), &params(Rank(3)));
    let (unreachable, says) = (FaultKind::AddressUnreachable, "rank 3 answers at rank 1's address");
    assert_fault(dialer, unreachable, Some(PEER), &[says]);
    assert_fault(acceptor, unreachable, Some(DIALER), &["rank 2 dialled rank 1 and reached rank 3"]);
}

#[test]
fn a_rank_taken_twice_or_out_of_range_is_refused() {
    for rank in [PEER, Rank(4), Rank(u32::MAX)] {
        let (dialer, acceptor) = honest(&params(rank), &params(PEER));
        let says = rank.to_string() + " cannot open a link to rank 1 in a job of 4 ranks";
        assert_fault(dialer, FaultKind::WorldMismatch, Some(PEER), &[&says]);
        assert_fault(acceptor, FaultKind::WorldMismatch, Some(rank), &[&says]);
    }
}

#[test]
fn another_version_is_named_on_both_sides() {
    // The dialer's opening is of a later version, with its reserved bytes in use.
    let (_, acceptor) = run(&params(DIALER), &params(PEER), |n, bytes| {
        if n == 0 {
            bytes[4..8].copy_from_slice(&[9, 1, 2, 3]);
        }
    });
    assert_fault(acceptor, FaultKind::ProtocolVersion, None, &["version 9", "version 1"]);
    // The acceptor's is; and so it is when the acceptor rejects, which says its version as a last word.
    let (dialer, _) = run(&params(DIALER), &params(PEER), |n, bytes| {
        if n == 1 {
            bytes[4] = 9;
        }
    });
    assert_fault(dialer, FaultKind::ProtocolVersion, Some(PEER), &["rank 1 speaks protocol version 9", "version 1"]);
    let mut opening = [0; 40];
    opening[..8].copy_from_slice(b"GWHL\x09\0\0\0");
    let rejected = Handshake::accept(&params(PEER), [0xac; 32]).receive(&opening).unwrap_err();
    assert_eq!(rejected.send[..8], *b"GWHL\x01\0\0\0");
}

#[test]
fn garbage_is_a_violation_at_every_stage_and_tells_the_sender_nothing() {
    for garbage in [[0; 40], [0xff; 40], *b"GET / HTTP/1.1\r\nHost: 127.0.0.1:29500\r\n\r"] {
        let rejected = Handshake::accept(&params(PEER), [2; 32]).receive(&garbage).unwrap_err();
        assert_eq!((rejected.fault.kind, rejected.send.len()), (FaultKind::ProtocolViolation, 0));
        let rejected = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]).0.receive(&garbage).unwrap_err();
        assert_eq!((rejected.fault.kind, rejected.send.len()), (FaultKind::ProtocolViolation, 0));
    }
    let mut reserved_set = [0; 40];
    reserved_set[..8].copy_from_slice(b"GWHL\x01\0\0\x01");
    let rejected = Handshake::accept(&params(PEER), [2; 32]).receive(&reserved_set).unwrap_err();
    assert_eq!((rejected.fault.kind, rejected.send.len()), (FaultKind::ProtocolViolation, 0));
}

#[test]
fn messages_of_another_length_are_refused() {
    for length in [0, 1, 39, 41, 56, 4096] {
        let bytes = [0x47; 4096];
        let rejected = Handshake::accept(&params(PEER), [2; 32]).receive(&bytes[..length]).unwrap_err();
        assert_eq!((rejected.fault.kind, rejected.fault.rank), (FaultKind::ProtocolViolation, None));
        let rejected =
            Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]).0.receive(&bytes[..length]).unwrap_err();
        assert_eq!((rejected.fault.kind, rejected.fault.rank), (FaultKind::ProtocolViolation, Some(PEER)));
    }
}

#[test]
fn any_changed_bit_keeps_both_sides_from_trusting_each_other() {
    for (n, length) in [(0, 40), (1, 40), (2, 56), (3, 56)] {
        for bit in 0..length * 8 {
            let (dialer, acceptor) = run(&params(DIALER), &params(PEER), |at, bytes| {
                if at == n {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert!(!matches!(dialer, Some(Ok(_))), "message {n}, bit {bit}");
            // The acceptor ends with its verdict, before which nothing was changed when n is 3.
            assert!(n == 3 || !matches!(acceptor, Some(Ok(_))), "message {n}, bit {bit}");
        }
    }
}

#[test]
fn an_echo_is_refused() {
    let (mut dialer, opening) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]);
    let rejected = dialer.receive(&opening).unwrap_err();
    assert_eq!(rejected.fault.kind, FaultKind::ProtocolViolation);
    assert!(rejected.fault.detail.contains("our own nonce"), "{}", rejected.fault);
    // With a nonce of its own the echo gets our proof, which does not serve as its own.
    let (dialer, _) = run(&params(DIALER), &params(PEER), {
        let mut claim = Vec::new();
        move |n, bytes| match n {
            2 => claim.clone_from(bytes),
            3 => bytes.clone_from(&claim),
            _ => {}
        }
    });
    assert_fault(dialer, FaultKind::SecretMismatch, Some(PEER), &[]);
}

#[test]
fn a_rank_cannot_be_made_to_answer_its_own_challenge() {
    // The attacker is dialled by rank 2, and dials rank 2 in turn, passing on whatever it gets.
    let (mut dialing, opening) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]);
    let mut accepting = Handshake::accept(&params(DIALER), [2; 32]);
    let answer = accepting.receive(&opening).unwrap();
    let claim = dialing.receive(&answer.send).unwrap();
    let rejected = accepting.receive(&claim.send).unwrap_err();
    assert!(dialing.receive(&rejected.send).is_err());
}

#[test]
fn a_recorded_hello_does_not_open_a_second_link() {
    let mut recorded: Vec<Vec<u8>> = Vec::new();
    run(&params(DIALER), &params(PEER), |_, bytes| recorded.push(bytes.clone()));
    let mut acceptor = Handshake::accept(&params(PEER), [0xad; 32]);
    acceptor.receive(&recorded[0]).unwrap();
    assert_eq!(acceptor.receive(&recorded[2]).unwrap_err().fault.kind, FaultKind::SecretMismatch);
    let (mut dialer, _) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [0xd2; 32]);
    dialer.receive(&recorded[1]).unwrap();
    assert_eq!(dialer.receive(&recorded[3]).unwrap_err().fault.kind, FaultKind::SecretMismatch);
}

#[test]
fn a_closed_link_names_the_peer_that_was_dialled() {
    let (mut dialer, _) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]);
    assert_eq!((dialer.closed().kind, dialer.closed().rank), (FaultKind::AddressUnreachable, Some(PEER)));
    dialer.receive(&Opening { nonce: [2; 32] }.encode()).unwrap();
    assert_eq!((dialer.closed().kind, dialer.closed().rank), (FaultKind::AddressUnreachable, Some(PEER)));
    let acceptor = Handshake::accept(&params(PEER), [2; 32]);
    assert_eq!((acceptor.closed().kind, acceptor.closed().rank), (FaultKind::ProtocolViolation, None));
}

#[test]
fn the_secret_shows_nowhere() {
    let secret = params(DIALER).secret.to_hex();
    let (handshake, _) = Handshake::dial(&params(DIALER), PEER, Purpose::Link, [1; 32]);
    let shown: String = format!("{handshake:?}");
    assert!(shown.contains("Secret(..)") && !shown.contains(&secret) && !shown.contains("7, 7, 7"), "{shown}");
}
