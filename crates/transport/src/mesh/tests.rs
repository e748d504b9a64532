//! Meshes of threads, and everything that can keep one from coming up.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::thread;

use gradwire_proto::frame::JobTag;
use gradwire_proto::member::HostId;
use gradwire_proto::{Epoch, Secret};

use super::*;
use crate::establish::{Caller, Door, ListenConfig};
use crate::{Remote, Sink, Transport};

const PATIENCE: Duration = Duration::from_secs(30);

fn hello(rank: u32, world_size: u32) -> HelloParams {
    let (secret, job) = (Secret::from_bytes([5; 32]), JobTag([6; 16]));
    HelloParams { secret, job, epoch: Epoch(1), rank: Rank(rank), world_size }
}

fn bind() -> Listeners {
    let config = ListenConfig { address: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)), ..ListenConfig::default() };
    Listeners::bind(&config).expect("bind")
}

fn never() -> Result<Option<MeshChange>, Fault> {
    Ok(None)
}

/// A job's first members, by rank.
fn first(endpoints: &[Endpoint]) -> Vec<MeshMember> {
    let member = |(rank, endpoint): (u32, &Endpoint)| MeshMember {
        rank: Rank(rank),
        endpoint: endpoint.clone(),
        came: Ordering::Equal,
    };
    (0..).zip(endpoints).map(member).collect()
}

fn connect(listeners: Listeners, config: MeshConfig) -> Result<Links, Fault> {
    listeners.connect(config, &mut never).map(|(links, _)| links)
}

/// Connects a world of threads; `change` may spoil each rank's configuration. Results by rank.
fn world(size: u32, choice: Choice, change: impl Fn(u32, &mut MeshConfig) + Sync) -> Vec<Result<Links, Fault>> {
    let listeners: Vec<_> = (0..size).map(|_| bind()).collect();
    let members: Vec<_> = listeners.iter().map(|listeners| listeners.endpoint().clone()).collect();
    let change = &change;
    let members = &members;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(listeners)
            .map(|(rank, listeners)| {
                scope.spawn(move || {
                    let hello = hello(rank, size);
                    let mut config = MeshConfig { hello, members: first(members), choice, deadline: PATIENCE };
                    change(rank, &mut config);
                    connect(listeners, config)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

#[derive(Default)]
struct Heard(Vec<(Rank, Vec<u8>)>);

impl Sink for Heard {
    fn admit(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) -> bool {
        true
    }
    fn message(&mut self, peer: Rank, message: &[u8]) {
        self.0.push((peer, message.to_vec()));
    }
    fn written(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) {}
    fn sent(&mut self, _: Rank, _: u64) {}
    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        unreachable!("{peer} is down: {fault}");
    }
}

/// Every rank sends its number to every other, sleeping on the links' descriptor between polls.
fn all_talk(world: Vec<Result<Links, Fault>>) -> Vec<Links> {
    let size = world.len() as u32;
    let mut links: Vec<_> = world.into_iter().map(|links| links.expect("links")).collect();
    for (rank, links) in (0..).zip(&mut links) {
        for peer in (0..size).filter(|peer| *peer != rank) {
            links.send(Rank(peer), &[rank as u8]).expect("send");
        }
    }
    let mut heard: Vec<_> = links.iter().map(|_| Heard::default()).collect();
    let start = Instant::now();
    while heard.iter().any(|heard| heard.0.len() + 1 < size as usize) {
        assert!(start.elapsed() < PATIENCE, "not everybody heard everybody");
        let mut happened = 0;
        for (links, heard) in links.iter_mut().zip(&mut heard) {
            happened += links.poll(heard);
        }
        if happened == 0 && links.iter_mut().all(Transport::arm) {
            let fds: Vec<_> = links.iter().map(|links| links.event_fd()).collect();
            let mut fds: Vec<_> =
                fds.iter().map(|fd| rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)).collect();
            let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert!(rustix::event::poll(&mut fds, Some(&timeout)).expect("poll") > 0, "slept through what came");
        }
    }
    for (rank, heard) in (0..).zip(&mut heard) {
        heard.0.sort();
        let expected: Vec<_> =
            (0..size).filter(|peer| *peer != rank).map(|peer| (Rank(peer), vec![peer as u8])).collect();
        assert_eq!(heard.0, expected);
    }
    links
}

fn names(links: &Links, size: u32) -> Vec<&'static str> {
    (0..size).map(|peer| links.name(Rank(peer))).collect()
}

fn fault(result: &Result<Links, Fault>) -> &Fault {
    result.as_ref().expect_err("must not come up")
}

#[test]
fn ranks_of_one_host_meet_in_shared_memory_or_where_they_are_told() {
    for (choice, name) in [(Choice::Auto, "shm"), (Choice::Shm, "shm"), (Choice::Tcp, "tcp")] {
        let links = all_talk(world(4, choice, |_, _| {}));
        assert_eq!(names(&links[0], 4), ["none", name, name, name]);
        assert_eq!(names(&links[3], 4), [name, name, name, "none"]);
    }
}

#[test]
fn one_rank_alone_needs_no_links() {
    let mut links = all_talk(world(1, Choice::Auto, |_, _| {})).remove(0);
    assert_eq!(links.poll(&mut Heard::default()), 0);
    assert!(links.arm());
}

#[test]
fn hosts_are_linked_over_tcp_and_ranks_within_one_over_shared_memory() {
    let elsewhere = |_: u32, config: &mut MeshConfig| config.members[1].endpoint.host = HostId([9; 16]);
    let links = all_talk(world(3, Choice::Auto, elsewhere));
    assert_eq!(names(&links[0], 3), ["none", "tcp", "shm"]);
    assert_eq!(names(&links[1], 3), ["tcp", "none", "tcp"]);
}

#[test]
fn an_unreachable_unix_socket_falls_back_to_tcp_unless_shm_is_a_must() {
    let wrong = |_: u32, config: &mut MeshConfig| config.members[0].endpoint.socket = "gradwire-nobody".into();
    let links = all_talk(world(2, Choice::Auto, wrong));
    assert_eq!(names(&links[0], 2), ["none", "tcp"]);
    let results = world(2, Choice::Shm, |rank, config| {
        wrong(rank, config);
        config.deadline = Duration::from_millis(300);
    });
    assert!(fault(&results[1]).detail.contains("rank 0"), "{}", fault(&results[1]));
}

#[test]
fn shm_across_hosts_names_both_hosts_and_the_remedy() {
    let results = world(2, Choice::Shm, |_, config| {
        config.members[1].endpoint.host = HostId([9; 16]);
        config.members[0].endpoint.hostname = "alpha".into();
        config.members[1].endpoint.hostname = "beta".into();
    });
    for result in &results {
        let detail = &fault(result).detail;
        assert!(["alpha", "beta", "--transport auto or tcp"].iter().all(|part| detail.contains(part)), "{detail}");
    }
}

#[test]
fn a_rank_without_the_secret_learns_it_at_once_and_the_others_miss_it() {
    let results = world(2, Choice::Auto, |rank, config| {
        if rank == 1 {
            config.hello.secret = Secret::from_bytes([7; 32]);
        } else {
            config.deadline = Duration::from_secs(2);
        }
    });
    assert_eq!(fault(&results[1]).kind, FaultKind::SecretMismatch);
    let missed = fault(&results[0]);
    assert_eq!((missed.kind, missed.rank), (FaultKind::DeadlineExceeded, Some(Rank(1))));
    assert!(missed.detail.contains("no link from rank 1 within 2 s") && missed.detail.contains("secret"), "{missed}");
}

#[test]
fn ranks_that_count_differently_fail_on_both_sides() {
    let results = world(2, Choice::Auto, |rank, config| {
        if rank == 1 {
            config.hello.world_size = 3;
            config.members.push(MeshMember { rank: Rank(2), ..config.members[1].clone() });
        }
    });
    for (rank, result) in results.iter().enumerate() {
        let fault = fault(result);
        assert_eq!((fault.kind, fault.rank), (FaultKind::WorldMismatch, Some(Rank(1 - rank as u32))), "{fault}");
    }
}

#[test]
fn two_processes_with_one_rank_are_found_out() {
    let (listeners, third) = (bind(), bind());
    let members = vec![listeners.endpoint().clone(), third.endpoint().clone(), third.endpoint().clone()];
    let config =
        |rank| MeshConfig { hello: hello(rank, 3), members: first(&members), choice: Choice::Auto, deadline: PATIENCE };
    let over = Mutex::new(false);
    let is_over = || *over.lock().expect("lock");
    let stop = || if is_over() { Err(Fault::new(FaultKind::Closed, "the test is over")) } else { Ok(None) };
    thread::scope(|scope| {
        for _ in 0..2 {
            let (listeners, config) = (bind(), config(1));
            scope.spawn(move || listeners.connect(config, &mut { stop }).map(drop));
        }
        let fault = connect(listeners, config(0)).expect_err("two of them");
        *over.lock().expect("lock") = true;
        assert_eq!((fault.kind, fault.rank), (FaultKind::WorldMismatch, Some(Rank(1))));
        assert!(fault.detail.contains("two processes say that they are rank 1"), "{fault}");
    });
}

#[test]
fn a_missing_rank_is_named_when_the_deadline_is_over() {
    let listeners = bind();
    let members = vec![listeners.endpoint().clone(); 4];
    let deadline = Duration::from_millis(300);
    let config = MeshConfig { hello: hello(0, 4), members: first(&members), choice: Choice::Auto, deadline };
    let fault = connect(listeners, config).expect_err("nobody came");
    assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(1))));
    assert!(fault.detail.contains("no link from rank 1, rank 2, rank 3 within 0.3 s"), "{fault}");
}

#[test]
fn a_fault_learned_elsewhere_ends_the_wait() {
    let listeners = bind();
    let members = vec![listeners.endpoint().clone(); 2];
    let config = MeshConfig { hello: hello(0, 2), members: first(&members), choice: Choice::Auto, deadline: PATIENCE };
    let mut stop = || Err(Fault::new(FaultKind::JobNameTaken, "elsewhere"));
    assert_eq!(listeners.connect(config, &mut stop).expect_err("stopped").kind, FaultKind::JobNameTaken);
}

/// The endpoint of a rank 0 that is nothing but a TCP address, on another host.
fn bare_endpoint(listener: &TcpListener) -> Endpoint {
    Endpoint { addresses: vec![listener.local_addr().expect("address")], hostname: "far".into(), ..Endpoint::default() }
}

fn dial_only(endpoint: Endpoint) -> Fault {
    let listeners = bind();
    let members = vec![endpoint, listeners.endpoint().clone()];
    let config = MeshConfig { hello: hello(1, 2), members: first(&members), choice: Choice::Auto, deadline: PATIENCE };
    connect(listeners, config).expect_err("nobody there")
}

#[test]
fn a_refused_address_is_given_up_before_the_deadline_and_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = bare_endpoint(&listener);
    drop(listener);
    let address = endpoint.addresses[0].to_string();
    let fault = dial_only(endpoint);
    assert_eq!((fault.kind, fault.rank), (FaultKind::AddressUnreachable, Some(Rank(0))));
    let parts = [address.as_str(), "refused", "GRADWIRE_ADDRESS", "GRADWIRE_INTERFACE"];
    assert!(parts.iter().all(|part| fault.detail.contains(part)), "{fault}");
}

#[test]
fn another_program_at_the_address_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = bare_endpoint(&listener);
    // Answers until the dialer has given up; then the last connection is ours.
    let server = thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            if stream.write_all(b"SSH-2.0-OpenSSH_9.2p1 and more than forty bytes\r\n").is_err() {
                continue;
            }
            let mut first = [0; 1];
            if stream.read(&mut first).is_ok_and(|count| count == 1) && first == *b"Q" {
                break;
            }
        }
    });
    let address = endpoint.addresses[0];
    let fault = dial_only(endpoint);
    assert!(fault.detail.contains("is not gradwire"), "{fault}");
    assert_eq!(fault.rank, Some(Rank(0)));
    TcpStream::connect(address).and_then(|mut stream| stream.write_all(b"Q")).expect("end the server");
    server.join().expect("server");
}

#[test]
fn strangers_neither_stop_nor_slow_a_mesh_that_comes_up() {
    let listeners: Vec<_> = (0..2).map(|_| bind()).collect();
    let members: Vec<_> = listeners.iter().map(|listeners| listeners.endpoint().clone()).collect();
    let address = members[0].addresses[0];
    // In front of the only link: silence, garbage and half a hello, more than there are places for.
    let mut strangers = Vec::new();
    for index in 0..100 {
        let mut stream = TcpStream::connect(address).expect("connect");
        match index % 3 {
            0 => {}
            1 => stream.write_all(&[0xff; 4096]).expect("write"),
            _ => {
                let (_, first) = gradwire_proto::hello::Handshake::dial(&hello(1, 2), Rank(0), Purpose::Link, [3; 32]);
                stream.write_all(&first[..20]).expect("write");
            }
        }
        strangers.push(stream);
    }
    let results: Vec<_> = thread::scope(|scope| {
        let members = &members;
        let ranks: Vec<_> = (0..)
            .zip(listeners)
            .map(|(rank, listeners)| {
                let config = MeshConfig {
                    hello: hello(rank, 2),
                    members: first(members),
                    choice: Choice::Tcp,
                    deadline: PATIENCE,
                };
                scope.spawn(move || connect(listeners, config))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    all_talk(results);
    let closed = TcpStream::connect(address).expect_err("nothing listens any more");
    assert_eq!(closed.kind(), std::io::ErrorKind::ConnectionRefused);
}

/// The members of a running job wait at their doors; a newcomer links up with all of them, whichever rank is higher.
#[test]
fn a_newcomer_dials_everybody_and_is_let_in_at_the_door() {
    for choice in [Choice::Auto, Choice::Tcp] {
        let listeners: Vec<_> = [0, 2].map(|_| bind()).into();
        let newcomer = bind();
        let endpoints: Vec<_> = listeners.iter().map(|listeners| listeners.endpoint().clone()).collect();
        let member =
            |rank, endpoint: &Endpoint, came| MeshMember { rank: Rank(rank), endpoint: endpoint.clone(), came };
        let old = [member(0, &endpoints[0], Ordering::Equal), member(2, &endpoints[1], Ordering::Equal)];
        let all = vec![
            member(0, &endpoints[0], Ordering::Less),
            member(1, newcomer.endpoint(), Ordering::Equal),
            member(2, &endpoints[1], Ordering::Less),
        ];
        let config = |rank, epoch, members: &[MeshMember]| MeshConfig {
            hello: HelloParams { epoch: Epoch(epoch), ..hello(rank, 3) },
            members: members.to_vec(),
            choice,
            deadline: PATIENCE,
        };
        let mut world: Vec<(Links, Door)> = thread::scope(|scope| {
            let start = |(rank, listeners): (u32, Listeners)| {
                let config = config(rank, 1, &old);
                scope.spawn(move || listeners.connect(config, &mut never).expect("links"))
            };
            let ranks: Vec<_> = [0, 2].into_iter().zip(listeners).map(start).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        });
        let links = thread::scope(|scope| {
            let config = config(1, 2, &all);
            let joins = scope.spawn(move || connect(newcomer, config));
            for (nth, (links, door)) in world.iter_mut().enumerate() {
                // Not heard of yet: the newcomer tries again.
                let (mut params, start) = (hello([0, 2][nth], 3), Instant::now());
                let arrival = loop {
                    assert!(start.elapsed() < PATIENCE, "nobody came");
                    let mut callers = door.advance(&params).expect("no fault of our own");
                    if let Some(Caller::Link(arrival)) = callers.pop() {
                        break arrival;
                    }
                    params.epoch = Epoch(if start.elapsed() > Duration::from_millis(120) { 2 } else { 1 });
                    thread::sleep(Duration::from_millis(1));
                };
                assert_eq!(arrival.peer, Rank(1));
                // What was registered before is there for the newcomer too.
                links.welcome(arrival, start + PATIENCE).expect("a link");
            }
            joins.join().expect("no panic")
        });
        let (zero, two) = (world.remove(0), world.remove(0));
        let links = all_talk(vec![Ok(zero.0), links, Ok(two.0)]);
        let name = if choice == Choice::Tcp { "tcp" } else { "shm" };
        assert_eq!(names(&links[1], 3), [name, "none", name]);
    }
}

#[test]
fn state_is_asked_for_at_the_door_whatever_the_epoch() {
    let (member, newcomer) = (bind(), bind());
    let ours = member.endpoint().clone();
    let alone = vec![MeshMember { rank: Rank(0), endpoint: ours.clone(), came: Ordering::Equal }];
    let config = MeshConfig { hello: hello(0, 3), members: alone, choice: Choice::Shm, deadline: PATIENCE };
    let (_links, mut door) = member.connect(config, &mut never).expect("nobody is missing");
    thread::scope(|scope| {
        scope.spawn(|| {
            let params = HelloParams { epoch: Epoch(7), ..hello(2, 3) };
            let ends = (newcomer.endpoint(), &ours);
            let mut stream = crate::establish::dial_state(ends, &params, Rank(0), Instant::now() + PATIENCE, &|| None)
                .expect("let in");
            stream.write_all(b"question").expect("written");
            let mut answer = [0; 6];
            stream.read_exact(&mut answer).expect("answered");
            assert_eq!(&answer, b"answer");
        });
        let start = Instant::now();
        let (peer, mut stream) = loop {
            assert!(start.elapsed() < PATIENCE, "nobody came");
            if let Some(Caller::State(peer, stream)) = door.advance(&hello(0, 3)).expect("no fault").pop() {
                break (peer, stream);
            }
            thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(peer, Rank(2));
        let mut question = [0; 8];
        stream.read_exact(&mut question).expect("asked");
        stream.write_all(b"answer").expect("written");
    });
}

#[test]
fn members_that_change_while_a_mesh_comes_up_are_not_waited_for() {
    let (mine, other) = (bind(), bind());
    let endpoints = [mine.endpoint().clone(), other.endpoint().clone(), mine.endpoint().clone()];
    let config = |rank| MeshConfig {
        hello: hello(rank, 3),
        members: first(&endpoints),
        choice: Choice::Auto,
        deadline: PATIENCE,
    };
    thread::scope(|scope| {
        let change = || MeshChange { epoch: Epoch(2), members: first(&endpoints[..2]) };
        let watch = move || {
            let mut changes = vec![change()];
            move || Ok(changes.pop())
        };
        let ranks = [(0, mine), (1, other)].map(|(rank, listeners)| {
            let (config, mut watch) = (config(rank), watch());
            scope.spawn(move || listeners.connect(config, &mut watch).map(|(links, _)| links))
        });
        // Rank 2 never comes, and is no member any more.
        all_talk(ranks.map(|rank| rank.join().expect("no panic")).into());
    });
}

/// Gives ranks up, and goes on without them once told.
struct GoesOn<'a> {
    without: &'a [MeshMember],
    lost: Vec<Fault>,
}

impl MeshWatch for GoesOn<'_> {
    fn change(&mut self) -> Result<Option<MeshChange>, Fault> {
        let change = || MeshChange { epoch: Epoch(2), members: self.without.to_vec() };
        Ok((!self.lost.is_empty()).then(change))
    }

    fn patience(&self) -> Option<Duration> {
        Some(Duration::from_millis(200))
    }

    fn lost(&mut self, fault: Fault) -> Result<(), Fault> {
        self.lost.push(fault);
        Ok(())
    }
}

#[test]
fn a_rank_that_opens_no_link_is_lost_to_those_that_have_one() {
    let (first_two, gone) = ([bind(), bind()], bind());
    let endpoints: Vec<_> = first_two.iter().chain([&gone]).map(|listeners| listeners.endpoint().clone()).collect();
    let (members, left) = (first(&endpoints), first(&endpoints[..2]));
    // Nobody is there any more. The others are dialled by it, and so are not refused.
    drop(gone);
    thread::scope(|scope| {
        let ranks = [0, 1].into_iter().zip(first_two).map(|(rank, listeners)| {
            let config = MeshConfig {
                hello: hello(rank, 3),
                members: members.clone(),
                choice: Choice::Auto,
                deadline: PATIENCE,
            };
            let mut watch = GoesOn { without: &left, lost: Vec::new() };
            scope.spawn(move || listeners.connect(config, &mut watch).map(|(links, _)| (links, watch.lost)))
        });
        let ranks = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("no panic").expect("linked"));
        let (links, lost): (Vec<_>, Vec<_>) = ranks.unzip();
        for fault in lost.iter().flatten() {
            assert_eq!((fault.kind, fault.rank), (FaultKind::DeadlineExceeded, Some(Rank(2))), "{fault}");
        }
        assert!(lost.iter().all(|lost| !lost.is_empty()));
        all_talk(links.into_iter().map(Ok).collect());
    });
}

#[test]
fn a_rank_that_cannot_be_reached_is_lost_to_those_that_have_a_link() {
    let (gone, last_two) = (bind(), [bind(), bind()]);
    let endpoints: Vec<_> = [&gone].into_iter().chain(&last_two).map(|one| one.endpoint().clone()).collect();
    let (members, left) = (first(&endpoints), first(&endpoints)[1..].to_vec());
    drop(gone);
    thread::scope(|scope| {
        let ranks: Vec<_> = [1, 2]
            .into_iter()
            .zip(last_two)
            .map(|(rank, listeners)| {
                let config = MeshConfig {
                    hello: hello(rank, 3),
                    members: members.clone(),
                    choice: Choice::Auto,
                    deadline: PATIENCE,
                };
                let mut watch = Refused(GoesOn { without: &left, lost: Vec::new() });
                scope.spawn(move || listeners.connect(config, &mut watch).map(|_| watch.0.lost))
            })
            .collect();
        for rank in ranks {
            let lost = rank.join().expect("no panic").expect("linked");
            assert_eq!((lost[0].kind, lost[0].rank), (FaultKind::AddressUnreachable, Some(Rank(0))), "{}", lost[0]);
        }
    });
}

/// Without any patience but that of whoever dials.
struct Refused<'a>(GoesOn<'a>);

impl MeshWatch for Refused<'_> {
    fn change(&mut self) -> Result<Option<MeshChange>, Fault> {
        self.0.change()
    }

    fn lost(&mut self, fault: Fault) -> Result<(), Fault> {
        self.0.lost(fault)
    }
}

#[test]
fn a_rank_that_reaches_nobody_blames_nobody() {
    let (mine, gone) = (bind(), bind());
    let endpoints = [gone.endpoint().clone(), gone.endpoint().clone(), mine.endpoint().clone()];
    drop(gone);
    let (members, left) = (first(&endpoints), first(&endpoints)[2..].to_vec());
    let config = MeshConfig { hello: hello(2, 3), members, choice: Choice::Auto, deadline: PATIENCE };
    let mut watch = GoesOn { without: &left, lost: Vec::new() };
    let fault = mine.connect(config, &mut watch).expect_err("alone");
    assert_eq!((fault.kind, watch.lost.len()), (FaultKind::AddressUnreachable, 0), "{fault}");
}
