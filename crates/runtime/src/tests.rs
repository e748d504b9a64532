//! Groups of threads over real links: the engine from end to end, without processes and without a broker.

mod again;

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradwire_codec::reference;
use gradwire_control::{
    AuditKind, AuditQuery, BrokerAccess, BrokerConfig, ControlPlane, EmbeddedBroker, JobConfig, JoinRequest, Policy,
    read_audit,
};
use gradwire_proto::frame::{FrameHeader, FrameKind, JobTag};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Collective, DType, Fault, FaultKind, Rank, ReduceOp, Secret, Step, WireFormat};
use gradwire_transport::Transport;
use gradwire_transport::faulty::{ChosenWrites, FaultPlan, Faulty, WriteFault, WriteRule};
use gradwire_transport::shm::ShmTransport;
use gradwire_transport::tcp::TcpTransport;

use crate::{Builder, Group, Stats, TensorSpec};

pub(crate) fn tcp(world: u32) -> Vec<TcpTransport> {
    let mut all: Vec<TcpTransport> = (0..world).map(|_| TcpTransport::new().expect("a transport")).collect();
    for low in 0..world {
        for high in low + 1..world {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let dialed = TcpStream::connect(listener.local_addr().expect("an address")).expect("a link");
            let (accepted, _) = listener.accept().expect("a link");
            all[high as usize].attach(Rank(low), dialed).expect("attached");
            all[low as usize].attach(Rank(high), accepted).expect("attached");
        }
    }
    all
}

fn shm(world: u32) -> Vec<ShmTransport> {
    let limit = Instant::now() + Duration::from_secs(10);
    let mut streams: Vec<Vec<(Rank, UnixStream)>> = (0..world).map(|_| Vec::new()).collect();
    for low in 0..world {
        for high in low + 1..world {
            let (a, b) = UnixStream::pair().expect("a pair");
            streams[low as usize].push((Rank(high), a));
            streams[high as usize].push((Rank(low), b));
        }
    }
    let threads: Vec<_> = streams
        .into_iter()
        .map(|streams| {
            thread::spawn(move || {
                let mut transport = ShmTransport::new().expect("a transport");
                for (peer, stream) in streams {
                    transport.attach(peer, stream, limit).expect("attached");
                }
                transport
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

pub(crate) fn boxed<T: Transport + 'static>(all: Vec<T>) -> Vec<Box<dyn Transport>> {
    all.into_iter().map(|transport| Box::new(transport) as Box<dyn Transport>).collect()
}

/// Runs `act` on a group of `world` ranks, each in its thread, and returns what they made of it, by rank.
pub(crate) fn run<R: Send>(
    world: u32,
    transports: Vec<Box<dyn Transport>>,
    builder: impl Fn() -> Builder + Sync,
    act: impl Fn(&Group) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = transports
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| {
                let (builder, act) = (&builder, &act);
                scope.spawn(move || {
                    let group = builder().over(rank as u32, world, transport, None).expect("a group");
                    act(&group)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn value(rank: usize, at: usize) -> f32 {
    ((at * 7 + rank * 13) % 1000) as f32 / 8.0 - 60.0
}

fn sum_of(world: usize, at: usize) -> f32 {
    (1..world).fold(value(0, at), |sum, rank| sum + value(rank, at))
}

fn assert_sums(group: &Group, size: usize, steps: usize) {
    let spec = TensorSpec::new("weights", &[size as u64], DType::F32);
    let tensor = group.declare(&[spec]).expect("declared").remove(0);
    for step in 0..steps {
        let mut data = group.buffer(&tensor).expect("a buffer");
        for (at, element) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *element = value(group.rank().index(), at + step);
        }
        let done = group.submit(&tensor, data).expect("taken").wait().expect("reduced");
        assert_eq!(done.outcome.step, Step(step as u64));
        for (at, element) in done.output.as_slice::<f32>().iter().enumerate() {
            assert_eq!(element.to_bits(), sum_of(group.world_size() as usize, at + step).to_bits(), "element {at}");
        }
    }
}

#[test]
fn spoilt_cut_lost_and_repeated_writes_are_repaired_and_counted() {
    let faults = [WriteFault::Corrupt, WriteFault::Truncate, WriteFault::Duplicate, WriteFault::Drop];
    for fault in faults {
        let plan = || FaultPlan { writes: vec![WriteRule::Every(5, fault)], ..FaultPlan::default() };
        let transports = tcp(3).into_iter().map(|inner| Faulty::new(inner, plan())).collect();
        let stats = run(3, boxed(transports), Builder::for_tests, |group| {
            assert_sums(group, 700_000, 3);
            group.barrier().expect("everybody is through");
            group.stats()
        });
        let corrupt: u64 = stats.iter().map(|stats| stats.corrupt_frames).sum();
        let duplicates: u64 = stats.iter().map(|stats| stats.duplicate_frames).sum();
        let resent: u64 = stats.iter().map(|stats| stats.units_resent).sum();
        match fault {
            WriteFault::Corrupt | WriteFault::Truncate => assert!(corrupt > 0 && resent > 0, "{fault:?}: {stats:?}"),
            WriteFault::Duplicate => assert!(duplicates > 0, "{fault:?}: {stats:?}"),
            WriteFault::Drop => assert!(resent > 0, "{fault:?}: {stats:?}"),
        }
    }
}

/// Results from rank 0 to rank 1 never arrive whole: rank 1 gets them from whoever holds them, over the broker.
#[test]
fn results_that_a_link_always_spoils_come_as_copies_over_the_broker() {
    for wire in [WireFormat::Fp32, WireFormat::Fp16] {
        exchange_over_a_spoiling_link(wire);
    }
}

fn exchange_over_a_spoiling_link(wire: WireFormat) {
    let broker = EmbeddedBroker::start(BrokerConfig::new("127.0.0.1:0".parse().expect("an address"))).expect("a port");
    let access = BrokerAccess::new(broker.url());
    let job = JobConfig::new("copies".parse().expect("a name"), [1; 16], Secret::from_bytes([1; 32]), access);
    let spoil = |rank: usize| FaultPlan {
        chosen_writes: (rank == 0).then(|| -> ChosenWrites {
            Box::new(|peer, immediate| {
                let header = FrameHeader::decode(immediate, &JobTag([7; 16])).expect("a frame");
                (peer == Rank(1) && header.kind == FrameKind::Result).then_some(WriteFault::Corrupt)
            })
        }),
        ..FaultPlan::default()
    };
    let transports = tcp(3).into_iter().enumerate().map(|(rank, inner)| Faulty::new(inner, spoil(rank)));
    let stats: Vec<Stats> = thread::scope(|scope| {
        let threads: Vec<_> = transports
            .enumerate()
            .map(|(rank, transport)| {
                let request = JoinRequest {
                    config: job.clone(),
                    rank: Rank(rank as u32),
                    world_size: 3,
                    policy: Policy::Fixed,
                    endpoint: Endpoint::default(),
                    deadline: Duration::from_secs(20),
                    commit_interval: Duration::ZERO,
                };
                scope.spawn(move || {
                    let control = Arc::new(ControlPlane::join(request).expect("a member").0);
                    let builder = Builder::for_tests().retain_steps(1).wire(wire);
                    let group = builder.over(rank as u32, 3, Box::new(transport), Some(control)).expect("a group");
                    spoilt_sums(&group);
                    group.barrier().expect("everybody is through");
                    group.stats()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(stats[1].units_from_copies > 0, "{stats:?}");
    assert!(stats[1].corrupt_frames > 0 && stats[0].units_from_copies == 0, "{stats:?}");
    let query = AuditQuery { kinds: vec![AuditKind::Rejected], ..AuditQuery::default() };
    let audit = read_audit(&job, &query, Duration::from_secs(20)).expect("an audit log").records;
    let by_rank_1 = audit.iter().find(|entry| entry.author == Rank(1)).expect("what rank 1 rejected");
    assert_eq!(by_rank_1.record.rank, Some(Rank(0)), "{audit:?}");
    assert!(by_rank_1.record.detail.contains("corrupt"), "{audit:?}");
}

fn spoilt_sums(group: &Group) {
    const SIZE: usize = 300_000;
    let spec = TensorSpec::new("weights", &[SIZE as u64], DType::F32);
    let tensor = group.declare(&[spec]).expect("declared").remove(0);
    for _ in 0..3 {
        let mut data = group.buffer(&tensor).expect("a buffer");
        for (at, element) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *element = ((at * 7 + group.rank().index() * 13) % 100) as f32;
        }
        let done = group.submit(&tensor, data).expect("taken").wait().expect("reduced");
        for (at, sum) in done.output.as_slice::<f32>().iter().enumerate() {
            let expected: usize = (0..3).map(|rank| (at * 7 + rank * 13) % 100).sum();
            assert_eq!(*sum, expected as f32, "element {at}");
        }
        assert!(group.commit().expect("on record").replaced.is_empty());
    }
}

#[test]
fn results_do_not_depend_on_how_tensors_share_buckets() {
    let sizes = [1u64, 100, 4096, 17, 9000, 3];
    let separately = run(2, boxed(shm(2)), Builder::for_tests, |group| reduce_all(group, &sizes, true));
    let together = run(2, boxed(tcp(2)), Builder::for_tests, |group| reduce_all(group, &sizes, false));
    assert_eq!(separately[0], together[0]);
    assert_eq!(separately[0], separately[1]);
    assert_eq!(together[0], together[1]);
}

/// Reduces one tensor after the other, or all at once; returns the bytes of all results.
fn reduce_all(group: &Group, sizes: &[u64], one_by_one: bool) -> Vec<u8> {
    let specs: Vec<TensorSpec> =
        sizes.iter().map(|size| TensorSpec::new(format!("t{size}"), &[*size], DType::F32)).collect();
    let tensors = group.declare(&specs).expect("declared");
    let mut results = Vec::new();
    let mut handles = Vec::new();
    for tensor in &tensors {
        let mut data = group.buffer(tensor).expect("a buffer");
        for (at, element) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
            *element = value(group.rank().index(), at);
        }
        let handle = group.submit(tensor, data).expect("taken");
        if one_by_one {
            results.extend_from_slice(handle.wait().expect("reduced").output.bytes());
        } else {
            handles.push(handle);
        }
    }
    for handle in handles {
        results.extend_from_slice(handle.wait().expect("reduced").output.bytes());
    }
    results
}

#[test]
fn a_tensor_has_one_operation_at_a_time_and_buffers_come_back() {
    run(2, boxed(shm(2)), Builder::for_tests, |group| {
        let tensor = group.declare(&[TensorSpec::new("weights", &[1000], DType::F32)]).expect("declared").remove(0);
        let handle = group.submit(&tensor, group.buffer(&tensor).expect("a buffer")).expect("taken");
        let mut second = group.buffer(&tensor).expect("a buffer");
        second.as_mut_slice::<f32>()[7] = 7.0;
        let refused = group.submit(&tensor, second).expect_err("one at a time");
        assert_eq!(refused.fault.kind, FaultKind::TensorBusy);
        assert_eq!(refused.buffers[0].as_slice::<f32>()[7].to_bits(), 7.0f32.to_bits());
        handle.wait().expect("the first is unharmed");
        let small = gradwire_transport::Buffer::allocate(12).expect("a buffer");
        let refused = group.submit(&tensor, small).expect_err("of another size");
        assert_eq!((refused.fault.kind, refused.buffers.len()), (FaultKind::InvalidArgument, 1));
        drop(group.submit(&tensor, group.buffer(&tensor).expect("a buffer")).expect("a dropped handle stops nothing"));
        group.barrier().expect("the barrier is not held up");
        while group.submit(&tensor, group.buffer(&tensor).expect("a buffer")).is_err() {
            thread::yield_now();
        }
    });
}

#[test]
fn contributions_out_of_place_stay_as_they_are_even_when_the_step_fails() {
    let faults = run(2, boxed(tcp(2)), Builder::for_tests, |group| {
        let tensor = group.declare(&[TensorSpec::new("weights", &[300_000], DType::F32)]).expect("declared").remove(0);
        let mut input = group.buffer(&tensor).expect("a buffer");
        input.as_mut_slice::<f32>().fill(1.0);
        let done = group
            .allreduce_into(&tensor, input, group.buffer(&tensor).expect("a buffer"))
            .expect("taken")
            .wait()
            .expect("reduced");
        let input = done.input.expect("it was out of place");
        assert!(input.as_slice::<f32>().iter().all(|element| element.to_bits() == 1.0f32.to_bits()));
        assert!(done.output.as_slice::<f32>().iter().all(|element| element.to_bits() == 2.0f32.to_bits()));
        if group.rank() == Rank(1) {
            return None; // leaves
        }
        let error = group.allreduce_into(&tensor, input, done.output).expect("taken").wait().expect_err("alone");
        assert_eq!(error.buffers.len(), 2);
        assert!(error.buffers[0].as_slice::<f32>().iter().all(|element| element.to_bits() == 1.0f32.to_bits()));
        Some(error.fault)
    });
    assert_eq!(faults[0].as_ref().map(|fault: &Fault| fault.kind), Some(FaultKind::RankLeft));
}

#[test]
fn many_threads_wait_on_many_operations_at_once() {
    run(2, boxed(tcp(2)), Builder::for_tests, |group| {
        let specs: Vec<TensorSpec> =
            (0..16).map(|at| TensorSpec::new(format!("t{at}"), &[10_000 * (at + 1)], DType::F32)).collect();
        let tensors = group.declare(&specs).expect("declared");
        thread::scope(|scope| {
            for tensor in &tensors {
                scope.spawn(move || {
                    for _ in 0..20 {
                        let mut data = group.buffer(tensor).expect("a buffer");
                        data.as_mut_slice::<f32>().fill(3.0);
                        let done = group.submit(tensor, data).expect("taken").wait().expect("reduced");
                        assert!(
                            done.output.as_slice::<f32>().iter().all(|element| element.to_bits() == 6.0f32.to_bits())
                        );
                    }
                });
            }
        });
    });
}

#[test]
fn cancelling_ends_the_job_everywhere_and_says_who_did() {
    let faults = run(2, boxed(shm(2)), Builder::for_tests, |group| {
        let tensor = group.declare(&[TensorSpec::new("weights", &[1000], DType::F32)]).expect("declared").remove(0);
        if group.rank() == Rank(1) {
            return group.barrier().expect_err("cancelled");
        }
        let handle = group.submit(&tensor, group.buffer(&tensor).expect("a buffer")).expect("taken");
        let handle = handle.wait_timeout(Duration::from_millis(20)).expect_err("the other never offers");
        assert!(!handle.is_done());
        handle.cancel().expect_err("cancelled").fault
    });
    assert!(faults.iter().all(|fault| fault.kind == FaultKind::Cancelled), "{faults:?}");
    assert_eq!(faults[1].reporter, Some(Rank(0)));
}

#[test]
fn names_and_roots_that_cannot_be_are_refused_at_home() {
    run(2, boxed(shm(2)), Builder::for_tests, |group| {
        let root = Collective::Broadcast { root: Rank(9) };
        let long = "x".repeat(600);
        for spec in [
            TensorSpec::new("", &[1], DType::F32),
            TensorSpec::new("gradwire.mine", &[1], DType::F32),
            TensorSpec::new(long, &[1], DType::F32),
            TensorSpec::new("cast", &[1], DType::F32).collective(root),
            TensorSpec::new("huge", &[u64::MAX, 3], DType::F32),
        ] {
            let fault = group.declare(&[spec]).expect_err("must be refused");
            assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}");
        }
        group.barrier().expect("nothing was broken");
    });
}

#[test]
fn wire_formats_round_broadcasts_and_gathers_the_same_on_every_rank() {
    for wire in WireFormat::ALL {
        let results = run(
            3,
            boxed(tcp(3)),
            || Builder::for_tests().wire(wire),
            |group| {
                let specs = [
                    TensorSpec::new("cast", &[70_000], DType::F32).collective(Collective::Broadcast { root: Rank(2) }),
                    TensorSpec::new("gathered", &[10], DType::F32).collective(Collective::AllGather),
                ];
                let tensors = group.declare(&specs).expect("declared");
                let mut bytes = Vec::new();
                for tensor in &tensors {
                    let mut data = group.buffer(tensor).expect("a buffer");
                    for (at, element) in data.as_mut_slice::<f32>().iter_mut().enumerate() {
                        *element = value(group.rank().index(), at) / 3.0;
                    }
                    bytes.extend_from_slice(
                        group.submit(tensor, data).expect("taken").wait().expect("done").output.bytes(),
                    );
                }
                bytes
            },
        );
        assert!(results[0] == results[1] && results[1] == results[2], "{wire}");
        let cast: Vec<u8> = (0..70_000).flat_map(|at| (value(2, at) / 3.0).to_le_bytes()).collect();
        let rounded = reference(DType::F32, wire.wire_dtype(DType::F32), ReduceOp::Sum, &[&cast]).expect("rounds");
        assert!(results[0][..rounded.len()] == rounded, "{wire}");
    }
}

#[test]
fn an_empty_tensor_that_comes_late_spoils_nothing_of_its_bucket() {
    for transports in [boxed(shm(2)), boxed(tcp(2))] {
        run(2, transports, Builder::for_tests, |group| {
            let specs = [TensorSpec::new("a", &[1000], DType::F32), TensorSpec::new("b.empty", &[0], DType::F32)];
            let tensors = group.declare(&specs).expect("declared");
            for step in 0..3 {
                if group.rank() == Rank(1) {
                    thread::sleep(Duration::from_millis(60));
                }
                let mut data = group.buffer(&tensors[0]).expect("a buffer");
                data.as_mut_slice::<f32>().fill((group.rank().0 + 1 + step) as f32);
                let filled = group.submit(&tensors[0], data).expect("taken");
                thread::sleep(Duration::from_millis(20));
                let empty = group.submit(&tensors[1], group.buffer(&tensors[1]).expect("a buffer")).expect("taken");
                let sum = filled.wait().expect("reduced").output;
                empty.wait().expect("reduced");
                let expected = (3 + 2 * step) as f32;
                assert!(sum.as_slice::<f32>().iter().all(|element| element.to_bits() == expected.to_bits()));
            }
        });
    }
}

#[test]
fn many_lookers_do_not_starve_operations() {
    run(2, boxed(shm(2)), Builder::for_tests, |group| {
        let tensor = group.declare(&[TensorSpec::new("weights", &[100], DType::F32)]).expect("declared").remove(0);
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let _ = group.stats();
                    }
                });
            }
            for _ in 0..200 {
                let data = group.buffer(&tensor).expect("a buffer");
                group.submit(&tensor, data).expect("taken").wait().expect("reduced within the deadline");
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}
