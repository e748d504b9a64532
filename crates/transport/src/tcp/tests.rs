//! What TCP links do beyond the conformance suite: hostile streams, ends of links, sleeping and waking.

use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
struct Log {
    messages: Vec<(Rank, Vec<u8>)>,
    written: Vec<(Vec<u8>, Remote, usize)>,
    sent: Vec<u64>,
    down: Vec<(Rank, Fault)>,
    refuse: bool,
}

impl Sink for Log {
    fn admit(&mut self, _: Rank, _: &[u8], _: Remote, _: usize) -> bool {
        !self.refuse
    }
    fn message(&mut self, peer: Rank, message: &[u8]) {
        self.messages.push((peer, message.to_vec()));
    }
    fn written(&mut self, _: Rank, immediate: &[u8], target: Remote, bytes: usize) {
        self.written.push((immediate.to_vec(), target, bytes));
    }
    fn sent(&mut self, _: Rank, token: u64) {
        self.sent.push(token);
    }
    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        self.down.push((peer, fault));
    }
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let dialed = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    (dialed, listener.accept().expect("accept").0)
}

fn pair() -> (TcpTransport, TcpTransport) {
    let (left, right) = connected();
    let (mut a, mut b) = (TcpTransport::new().expect("new"), TcpTransport::new().expect("new"));
    a.attach(Rank(1), left).expect("attach");
    b.attach(Rank(0), right).expect("attach");
    (a, b)
}

/// Polls both until `done`.
fn drive(a: (&mut TcpTransport, &mut Log), b: (&mut TcpTransport, &mut Log), done: impl Fn(&Log, &Log) -> bool) {
    let start = Instant::now();
    while !done(a.1, b.1) {
        a.0.poll(a.1);
        b.0.poll(b.1);
        assert!(start.elapsed() < DEADLINE, "not done in time: {:?} {:?}", a.1.down, b.1.down);
    }
}

/// A transport whose peer (rank 1) is a bare socket.
fn with_bare_peer() -> (TcpTransport, TcpStream) {
    let (left, right) = connected();
    let mut transport = TcpTransport::new().expect("new");
    transport.attach(Rank(1), left).expect("attach");
    (transport, right)
}

fn poll_until(transport: &mut TcpTransport, log: &mut Log, done: impl Fn(&Log) -> bool) {
    let start = Instant::now();
    while !done(log) {
        transport.poll(log);
        assert!(start.elapsed() < DEADLINE, "not done in time: {log:?}");
    }
}

#[test]
fn large_writes_cross_in_both_directions_and_land_exactly() {
    let (mut a, mut b) = pair();
    let mut buffers: Vec<_> = (0..4).map(|_| Buffer::allocate(6 << 20).expect("allocate")).collect();
    for (seed, buffer) in buffers.iter_mut().enumerate().take(2) {
        for (index, byte) in buffer.bytes_mut().iter_mut().enumerate() {
            *byte = (index * 131 / 7 + seed) as u8;
        }
    }
    for (transport, source, target) in [(&mut a, 0, 2), (&mut b, 1, 3)] {
        transport.register(&buffers[source]).expect("register");
        transport.register(&buffers[target]).expect("register");
    }
    let piece = 256 * 1024;
    let (mut log_a, mut log_b) = (Log::default(), Log::default());
    let pieces = (6 << 20) / piece;
    let (mut next_a, mut next_b) = (0, 0);
    let start = Instant::now();
    while log_a.written.len() < pieces || log_b.written.len() < pieces || log_a.sent.len() < pieces {
        for (transport, source, target, next) in [(&mut a, 0, 3, &mut next_a), (&mut b, 1, 2, &mut next_b)] {
            while *next < pieces {
                let range = *next * piece..(*next + 1) * piece;
                let remote = Remote { region: buffers[target].key(), offset: range.start as u64 };
                let peer = Rank(1 - source as u32);
                let immediate = [*next as u8; 64];
                match transport.write(peer, &immediate, buffers[source].slice(range), remote, *next as u64) {
                    Ok(()) => *next += 1,
                    Err(Refused::Full) => break,
                    Err(refused) => unreachable!("{refused}"),
                }
            }
        }
        a.poll(&mut log_a);
        b.poll(&mut log_b);
        assert!(start.elapsed() < DEADLINE);
    }
    assert!(buffers[0].bytes() == buffers[3].bytes() && buffers[1].bytes() == buffers[2].bytes());
    assert!(log_b.written.iter().enumerate().all(|(index, (immediate, ..))| immediate == &[index as u8; 64]));
    assert_eq!(log_a.sent, (0..pieces as u64).collect::<Vec<_>>());
}

#[test]
fn a_refused_write_is_counted_and_the_link_goes_on() {
    let (mut a, mut b) = pair();
    let (source, target) = (Buffer::allocate(300_000).expect("allocate"), Buffer::allocate(300_000).expect("allocate"));
    a.register(&source).expect("register");
    b.register(&target).expect("register");
    let (mut log_a, mut log_b) = (Log::default(), Log { refuse: true, ..Log::default() });
    let remote = Remote { region: target.key(), offset: 0 };
    a.write(Rank(1), b"imm", source.slice(0..300_000), remote, 7).expect("write");
    a.send(Rank(1), b"after").expect("send");
    drive((&mut a, &mut log_a), (&mut b, &mut log_b), |_, b| !b.messages.is_empty());
    assert!(log_b.written.is_empty() && log_b.down.is_empty());
    assert_eq!((b.discarded_writes(), log_a.sent), (1, vec![7]));
}

#[test]
fn garbage_costs_the_sender_its_link_and_names_it() {
    let (mut transport, mut bare) = with_bare_peer();
    bare.write_all(&header::Header { inline: 5, write: None }.encode()).expect("write");
    bare.write_all(b"valid").expect("write");
    bare.write_all(&[0x55; 4096]).expect("write");
    let mut log = Log::default();
    poll_until(&mut transport, &mut log, |log| !log.down.is_empty());
    assert_eq!(log.messages, [(Rank(1), b"valid".to_vec())]);
    let (peer, fault) = &log.down[0];
    assert_eq!((*peer, fault.kind, fault.rank), (Rank(1), FaultKind::ProtocolViolation, Some(Rank(1))));
    assert!(matches!(transport.send(Rank(1), b"x"), Err(Refused::NoLink)));
    assert_eq!(transport.poll(&mut log), 0);
    assert_eq!(log.down.len(), 1);
}

#[test]
fn a_peer_that_ends_has_everything_it_sent_delivered_first() {
    let (mut transport, mut bare) = with_bare_peer();
    let source = Buffer::allocate(1 << 20).expect("allocate");
    transport.register(&source).expect("register");
    let mut log = Log::default();
    // More than the kernel takes from us, so that writes are still queued when the peer ends.
    let mut queued = 0;
    while transport
        .write(Rank(1), &[], source.slice(0..1 << 20), Remote { region: source.key(), offset: 0 }, queued)
        .is_ok()
        || transport.poll(&mut log) > 0
    {
        queued = queued.max(log.sent.len() as u64) + 1;
    }
    let message = [header::Header { inline: 1, write: None }.encode().as_slice(), b"m"].concat();
    bare.write_all(&message.repeat(100)).expect("write");
    drop(bare); // With unread data: a reset.
    poll_until(&mut transport, &mut log, |log| !log.down.is_empty());
    assert_eq!(log.messages.len(), 100);
    assert_eq!(log.down[0].1.kind, FaultKind::RankDied);
    assert!(log.down[0].1.detail.contains("rank 1 at 127.0.0.1"), "{}", log.down[0].1);
}

#[test]
fn every_queued_write_gives_its_token_back_when_the_link_ends() {
    for disconnect in [false, true] {
        let (mut transport, bare) = with_bare_peer();
        let source = Buffer::allocate(64).expect("allocate");
        transport.register(&source).expect("register");
        let mut tokens = 0;
        while transport
            .write(Rank(1), &[0; 64], source.slice(0..64), Remote { region: source.key(), offset: 0 }, tokens)
            .is_ok()
        {
            tokens += 1;
        }
        assert!(tokens > 100 && !transport.is_flushed(Rank(1)));
        drop(bare);
        if disconnect {
            transport.disconnect(Rank(1));
        }
        let mut log = Log::default();
        poll_until(&mut transport, &mut log, |log| {
            log.sent.len() as u64 == tokens && (disconnect || !log.down.is_empty())
        });
        transport.poll(&mut log);
        assert_eq!(log.sent, (0..tokens).collect::<Vec<_>>());
        assert_eq!(log.down.len(), usize::from(!disconnect));
        assert!(transport.is_flushed(Rank(1)));
    }
}

#[test]
fn a_sleeper_is_woken_by_data_and_by_room() {
    let (mut transport, mut bare) = with_bare_peer();
    let mut log = Log::default();
    let wait = |transport: &mut TcpTransport, log: &mut Log| {
        let start = Instant::now();
        loop {
            while transport.poll(log) > 0 {}
            if transport.arm() {
                break;
            }
            assert!(start.elapsed() < DEADLINE, "never gets to sleep");
        }
    };
    let wakes = |transport: &TcpTransport, seconds: i64| {
        let mut outer = [rustix::event::PollFd::new(&transport.epoll, rustix::event::PollFlags::IN)];
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        rustix::event::poll(&mut outer, Some(&timeout)).expect("poll") == 1
    };
    wait(&mut transport, &mut log);
    bare.write_all(&header::Header { inline: 2, write: None }.encode()).expect("write");
    bare.write_all(b"up").expect("write");
    assert!(wakes(&transport, 20));
    poll_until(&mut transport, &mut log, |log| log.messages.len() == 1);

    // Fill the kernel's buffer, sleep, then let the peer read: room wakes, and everything comes through.
    let source = Buffer::allocate(1 << 20).expect("allocate");
    transport.register(&source).expect("register");
    let mut queued = 0u64;
    loop {
        let target = Remote { region: source.key(), offset: 0 };
        match transport.write(Rank(1), &[], source.slice(0..1 << 20), target, queued) {
            Ok(()) => queued += 1,
            Err(_) if transport.poll(&mut log) == 0 => break,
            Err(_) => {}
        }
    }
    wait(&mut transport, &mut log);
    let reader = std::thread::spawn(move || {
        let mut total = 0;
        let mut buffer = vec![0; 1 << 16];
        while let Ok(bytes @ 1..) = bare.read(&mut buffer) {
            total += bytes as u64;
        }
        total
    });
    let start = Instant::now();
    while !transport.is_flushed(Rank(1)) {
        wait(&mut transport, &mut log);
        if !transport.is_flushed(Rank(1)) {
            assert!(wakes(&transport, 20));
        }
        assert!(start.elapsed() < DEADLINE);
    }
    drop(transport);
    assert_eq!(reader.join().expect("reader"), queued * ((1 << 20) + header::LINK_HEADER_BYTES as u64));
    assert_eq!(log.sent.len() as u64, queued);
}

#[test]
fn what_is_not_possible_is_refused_and_nothing_is_taken() {
    let (mut transport, _bare) = with_bare_peer();
    let target = Remote { region: RegionKey(1), offset: 0 };
    let buffer = Buffer::allocate(64).expect("allocate");
    assert!(matches!(transport.send(Rank(1), &[0; 1 << 20]), Err(Refused::Invalid(_))));
    assert!(matches!(transport.send(Rank(2), b"x"), Err(Refused::NoLink)));
    let unregistered = transport.write(Rank(1), &[], buffer.slice(0..64), target, 0);
    assert!(matches!(unregistered, Err(Refused::Invalid(_))));
    transport.register(&buffer).expect("register");
    let long = transport.write(Rank(1), &[0; IMMEDIATE_BYTES_MAX + 1], buffer.slice(0..64), target, 0);
    assert!(matches!(long, Err(Refused::Invalid(_))));
    assert!(matches!(transport.view(Rank(1), target, 1), Err(Refused::Invalid(_))));
    assert!(matches!(transport.view(Rank(3), target, 1), Err(Refused::NoLink)));
    assert!(transport.is_flushed(Rank(1)));
    let (again, _other) = connected();
    assert_eq!(transport.attach(Rank(u32::MAX), again).expect_err("rank").kind, FaultKind::InvalidArgument);
}

#[test]
fn a_new_link_to_the_same_rank_replaces_the_old_one_without_a_word() {
    let (mut transport, mut old) = with_bare_peer();
    transport.send(Rank(1), b"queued").expect("send");
    let (left, mut new) = connected();
    transport.attach(Rank(1), left).expect("attach");
    assert_eq!(old.read(&mut [0; 64]).expect("the old link has ended"), 0);
    new.write_all(&[header::Header { inline: 1, write: None }.encode().as_slice(), b"n"].concat()).expect("write");
    let mut log = Log::default();
    poll_until(&mut transport, &mut log, |log| log.messages.len() == 1);
    assert!(log.down.is_empty());
}

/// Takes the loopback device of this network namespace down and up, which must therefore be the test's own:
/// `unshare -rn cargo test -p gradwire-transport --lib -- --ignored vanishes`.
#[test]
#[ignore = "takes 30 s and a network namespace of its own"]
fn a_host_that_vanishes_ends_the_link_and_one_that_is_only_slow_does_not() {
    let loopback = |state: &str| {
        let status = std::process::Command::new("ip").args(["link", "set", "lo", state]).status();
        assert!(status.is_ok_and(|status| status.success()), "run this under unshare -rn");
    };
    let poll_for = |transport: &mut TcpTransport, log: &mut Log, time: Duration| {
        let start = Instant::now();
        while start.elapsed() < time && log.down.is_empty() {
            transport.poll(log);
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    loopback("up");
    let source = Buffer::allocate(1 << 20).expect("allocate");
    let target = Remote { region: source.key(), offset: 0 };
    let (mut slow, _reads_nothing) = with_bare_peer();
    slow.register(&source).expect("register");
    for _ in 0..8 {
        slow.write(Rank(1), &[], source.slice(0..1 << 20), target, 0).expect("write");
    }
    let mut log = Log::default();
    poll_for(&mut slow, &mut log, link::SILENCE_MAX + Duration::from_secs(5));
    assert!(log.down.is_empty() && !slow.is_flushed(Rank(1)), "{log:?}");
    drop(slow);

    let (mut transport, _bare) = with_bare_peer();
    loopback("down");
    transport.send(Rank(1), b"lost").expect("send");
    poll_for(&mut transport, &mut log, link::SILENCE_MAX * 2);
    let (_, fault) = log.down.first().expect("the host is gone");
    assert_eq!(fault.kind, FaultKind::RankDied);
    assert!(fault.detail.contains("has not answered for"), "{fault}");
}

#[test]
fn without_links_nobody_is_woken() {
    let ready = |transport: &TcpTransport, seconds: i64| {
        let fd = transport.event_fd();
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        let limit = Timespec { tv_sec: seconds, tv_nsec: 200_000_000 };
        rustix::event::poll(&mut fds, Some(&limit)).expect("poll") > 0
    };
    let never_any = TcpTransport::new().expect("new");
    let (mut none_left, mut other) = pair();
    none_left.disconnect(Rank(1));
    assert!(!ready(&never_any, WATCH_SECONDS));
    assert!(!ready(&none_left, 0), "nor when the last is gone");
    // The other one, whose link ended, still looks after it.
    assert!(ready(&other, 0));
    let mut log = Log::default();
    while log.down.is_empty() {
        other.poll(&mut log);
    }
    assert!(!ready(&other, WATCH_SECONDS));
}
