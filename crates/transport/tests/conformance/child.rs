//! A process at the other end of a link, to be killed.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use gradwire_proto::{Rank, RegionKey};
use gradwire_transport::Transport as _;

use crate::cluster::{Event, Node, at};
use crate::fixture::{Fixture, Shm, Tcp};

const ROLE: &str = "GRADWIRE_CONFORMANCE_CHILD";
const SENT: &str = "gradwire-conformance-child-has-sent";

/// This very test program, run as rank 1. Killed when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Child {
    pub(crate) fn start(backend: &str, address: &str, region: RegionKey) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "child::role", "--ignored", "--nocapture", "--quiet"])
            .env(ROLE, format!("{backend} {address} {}", region.0))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let output = BufReader::new(process.stdout.take().expect("output"));
        Self { process, output }
    }

    pub(crate) fn wait_until_it_has_sent(&mut self) {
        let mut line = String::new();
        while !line.contains(SENT) {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("read") > 0, "the child ended early");
        }
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("kill");
        self.process.wait().expect("wait");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "the other end of `a_killed_peer_is_noticed`, which runs it in a process of its own"]
fn role() {
    let role = std::env::var(ROLE).expect("run by `a_killed_peer_is_noticed` only");
    let parts: Vec<&str> = role.split(' ').collect();
    let [backend, address, region] = parts[..] else { panic!("{role}") };
    let region = RegionKey(region.parse().expect("key"));
    match backend {
        "tcp" => play::<Tcp>(address, region),
        _ => play::<Shm>(address, region),
    }
}

fn play<F: Fixture>(address: &str, region: RegionKey) {
    let mut node = Node::new(1, F::create());
    F::dial(&mut node.transport, address, Rank(0));
    node.transport.send(Rank(0), b"hello").expect("room");
    node.until("the start", |node| node.sink.events.contains(&Event::Message(Rank(0), b"go".to_vec())));
    for n in 0..100u64 {
        node.transport.send(Rank(0), &n.to_le_bytes()).expect("room");
    }
    let source = node.region(4096, |_| 9);
    let source = node.slice(source, 0..4096);
    node.transport.write(Rank(0), b"end", source, at(region, 0), 1).expect("room");
    // The other side does not poll now: what can leave has left after a few polls.
    for _ in 0..100 {
        node.poll();
    }
    println!("{SENT}");
    while !node.is_down() {
        node.sleep("being killed");
    }
}
