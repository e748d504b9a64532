//! What goes wrong before a job runs: who may join, and what those who may not are told.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use gradwire_proto::Secret;
use gradwire_tests::{Job, Plan, assert_faults, assert_same_verdict, random};

const SCENARIO: [&str; 2] = ["exchange", "1"];

#[test]
fn a_wrong_secret_is_told_apart_from_a_missing_rank() {
    let plan = Plan::new(3, "tcp").with("GRADWIRE_DEADLINE_MS", 5000);
    let commands = (0..3).map(|rank| {
        let mut command = plan.command(rank, &SCENARIO);
        if rank == 2 {
            command.env("GRADWIRE_SECRET", Secret::from_bytes(random()).to_hex());
        }
        command
    });
    let ended = Job::start(commands).wait();
    assert_faults(&ended, &[2], "SecretMismatch", &["secret"]);
    for rank in [0, 1] {
        let said = ended[rank].verdict();
        assert!(said.starts_with("fault ") && said.contains("rank 2") && said.contains("secret"), "{ended:#?}");
    }
}

#[test]
fn a_missing_secret_says_what_to_set() {
    let mut plan = Plan::new(2, "tcp").with("LOCAL_WORLD_SIZE", 1);
    plan.variables.remove("GRADWIRE_SECRET");
    let mut command = plan.command(0, &SCENARIO);
    command.env("LOCAL_WORLD_SIZE", "1").env("LOCAL_RANK", "0");
    assert_faults(&Job::start([command]).wait(), &[0], "SecretMissing", &["GRADWIRE_SECRET"]);
}

#[test]
fn world_sizes_that_differ_and_ranks_that_collide_are_named() {
    let plan = Plan::new(2, "tcp");
    let mut odd = plan.command(1, &SCENARIO);
    odd.env("WORLD_SIZE", "3").env("LOCAL_WORLD_SIZE", "3");
    let ended = Job::start([plan.command(0, &SCENARIO), odd]).wait();
    assert_faults(&ended, &[0, 1], "WorldMismatch", &["2", "3"]);

    let plan = Plan::new(2, "tcp");
    let ended = Job::start([plan.command(0, &SCENARIO), plan.command(0, &SCENARIO)]).wait();
    assert_faults(&ended, &[0, 1], "WorldMismatch", &["rank 0"]);
}

#[test]
fn a_second_job_of_the_same_name_is_refused_and_the_first_is_unharmed() {
    let plan = Plan::new(2, "tcp");
    let mut first = plan.start(&["many-steps", "8000"]);
    first.wait_for_line(0, "joined");
    let again = (0..2).map(|rank| {
        let mut command = plan.command(rank, &SCENARIO);
        command.env("GRADWIRE_INSTANCE", "ab".repeat(16));
        command
    });
    assert_faults(&Job::start(again).wait(), &[0, 1], "JobNameTaken", &["e2e"]);
    for rank in first.wait() {
        assert_eq!(rank.verdict(), "ok flat");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline() {
    let plan = Plan::new(3, "tcp").with("GRADWIRE_DEADLINE_MS", 3000);
    let ended = Job::start([plan.command(0, &SCENARIO), plan.command(1, &SCENARIO)]).wait();
    assert_faults(&ended, &[0, 1], "DeadlineExceeded", &["rank 2"]);
}

#[test]
fn a_broker_that_cannot_be_reached_is_named() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
    let url = format!("pulsar://{free}");
    let plan = Plan::new(2, "tcp").with("GRADWIRE_DEADLINE_MS", 4000).with("GRADWIRE_BROKER", &url);
    assert_faults(&plan.run(&SCENARIO), &[0, 1], "BrokerUnreachable", &[&url]);
}

#[test]
fn a_broker_that_does_not_know_the_token_is_named() {
    let plan = Plan::new(2, "tcp").with("GRADWIRE_DEADLINE_MS", 6000).with("GRADWIRE_BROKER_TOKEN", "0".repeat(64));
    assert_faults(&plan.run(&SCENARIO), &[0, 1], "BrokerUnreachable", &["token"]);
}

#[test]
fn a_wrong_advertised_address_is_named_on_every_rank() {
    let plan = Plan::new(2, "tcp").with("GRADWIRE_DEADLINE_MS", 4000);
    let mut odd = plan.command(0, &SCENARIO);
    odd.env("GRADWIRE_ADDRESS", "192.0.2.1"); // an address of no host
    let ended = Job::start([odd, plan.command(1, &SCENARIO)]).wait();
    assert_faults(&ended, &[0], "AddressUnreachable", &["192.0.2.1", "GRADWIRE_ADDRESS"]);
    assert_faults(&ended, &[1], "DeadlineExceeded", &["rank 0"]);
}

#[test]
fn garbage_to_every_port_disturbs_nobody() {
    let plan = Plan::new(2, "tcp");
    let mut job = plan.start(&["many-steps", "3000"]);
    let limit = Instant::now() + Duration::from_secs(60);
    job.wait_for_line(0, "joined");
    let ports = listening_ports(&[job.pid(0), job.pid(1), std::process::id()]);
    assert!(!ports.is_empty(), "the broker at least listens");
    for port in ports {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0xff; 5000], b"GW\x01"] {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a time-out");
            let _ = stream.write_all(garbage);
            let mut answer = Vec::new();
            let _ = stream.take(4096).read_to_end(&mut answer);
            assert!(answer.len() < 200, "garbage is not worth an answer: {answer:?}");
        }
    }
    assert!(Instant::now() < limit);
    for rank in job.wait() {
        assert_eq!(rank.verdict(), "ok flat");
    }
}

/// The TCP ports that these processes listen on.
fn listening_ports(pids: &[u32]) -> Vec<u16> {
    let mut inodes = Vec::new();
    for pid in pids {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for link in entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()) {
            let name = link.to_string_lossy().into_owned();
            inodes.extend(name.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')).map(str::to_owned));
        }
    }
    let table =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default()).concat();
    let mut ports: Vec<u16> = table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
            let listens = *state == "0A" && inodes.iter().any(|known| known == inode);
            listens.then(|| u16::from_str_radix(local.rsplit(':').next()?, 16).ok()).flatten()
        })
        .collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

#[test]
fn a_finished_job_can_run_again_under_its_name() {
    let plan = Plan::new(2, "tcp");
    assert_same_verdict(&plan.run(&SCENARIO));
    let again = plan.with("GRADWIRE_INSTANCE", "cd".repeat(16));
    assert_same_verdict(&again.run(&SCENARIO));
}
