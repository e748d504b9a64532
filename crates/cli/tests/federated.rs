//! The federated mode as real processes: aggregators that are killed, and the demo.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use gradwire::federated::{BrokerAccess, Contributor, ContributorConfig, JobConfig, federated_instance};
use gradwire::{DType, Rank, ReduceOp, Secret, WireFormat};
use rustix::process::Signal;
use support::{DEADLINE, gradwire, kill};

const ELEMENTS: usize = 100_000;
const SECRET: [u8; 32] = [0x5a; 32];

/// A child process that does not outlive the test.
struct Process(Child);

impl Process {
    fn signal(&mut self, signal: Signal) -> Option<i32> {
        kill(self.0.id().cast_signed(), signal);
        self.0.wait().unwrap().code()
    }

    fn output(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.stdout.take().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn broker() -> (Process, String) {
    broker_at("127.0.0.1:0", &[])
}

fn broker_at(listen: &str, arguments: &[&str]) -> (Process, String) {
    let mut command = gradwire();
    command.args(["broker", "--listen", listen, "--no-auth"]).args(arguments);
    let mut broker = Process(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut url = String::new();
    broker.output().read_line(&mut url).unwrap();
    (broker, url.trim().to_owned())
}

fn aggregator(url: &str, arguments: &[&str]) -> Command {
    let mut command = gradwire();
    command.args(["aggregate", "--job", "e2e", "--round-deadline", "60"]).args(arguments);
    command.env("GRADWIRE_BROKER", url).env("GRADWIRE_SECRET", Secret::from_bytes(SECRET).to_hex());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts an aggregator, and waits until it works.
fn started(url: &str) -> Process {
    let mut process = Process(aggregator(url, &[]).spawn().unwrap());
    let mut errors = BufReader::new(process.0.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("of job 'e2e' works at") {
        assert!(errors.read_line(&mut said).unwrap() > 0, "{said}");
    }
    std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
    process
}

fn join(url: &str, number: u32, contributors: u32) -> Contributor {
    let name: gradwire::federated::JobName = "e2e".parse().unwrap();
    let instance = federated_instance(&name, None);
    let job = JobConfig::new(name, instance, Secret::from_bytes(SECRET), BrokerAccess::new(url));
    let mut config = ContributorConfig::new(job, Rank(number), contributors, ELEMENTS as u64);
    (config.wire, config.piece_bytes) = (WireFormat::Fp16, 4096);
    Contributor::join(config).unwrap()
}

fn values(contributor: u32, round: u64) -> Vec<f32> {
    (0..ELEMENTS as u64).map(|index| ((index * 31 + round * 7 + u64::from(contributor)) % 1009) as f32 / 13.0).collect()
}

fn assert_round(contributors: &mut [Contributor], round: u64) {
    let inputs: Vec<Vec<u8>> = (0..contributors.len() as u32)
        .map(|number| values(number, round).into_iter().flat_map(f32::to_le_bytes).collect())
        .collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let reference = gradwire_codec::reference(DType::F32, DType::F16, ReduceOp::Mean, &inputs).unwrap();
    let count = contributors.len();
    for contributor in contributors {
        let result = contributor.result(round, DEADLINE).unwrap();
        assert_eq!(result.entries.len(), count);
        let bytes: Vec<u8> = result.values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert!(bytes == reference, "round {round} has other bits than the reference");
    }
}

fn contribute(contributors: &mut [Contributor], round: u64) {
    for contributor in contributors {
        let number = contributor.number().0;
        contributor.contribute(round, &values(number, round)).unwrap();
    }
}

#[test]
fn aggregators_that_are_killed_and_added_in_mid_round_lose_and_double_nothing() {
    let (_broker, url) = broker();
    // The job is opened by the contributors; an aggregator may be there before.
    let early = Process(aggregator(&url, &[]).stderr(Stdio::null()).spawn().unwrap());
    let mut contributors: Vec<Contributor> = (0..4).map(|number| join(&url, number, 4)).collect();
    let mut running = vec![early, started(&url)];
    contribute(&mut contributors, 1);
    assert_round(&mut contributors, 1);
    for round in 2..=6 {
        contribute(&mut contributors[..2], round);
        if round % 2 == 0 {
            let mut killed = running.remove(0);
            killed.signal(Signal::KILL);
        }
        running.push(started(&url));
        let since = Instant::now();
        contribute(&mut contributors[2..], round);
        assert_round(&mut contributors, round);
        eprintln!("round {round}: the rest took {:?}", since.elapsed());
    }
    for mut process in running {
        let mut output = process.output();
        assert_eq!(process.signal(Signal::TERM), Some(0));
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let counters: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(counters["rounds"].as_u64().is_some() && counters["rejected"] == 0, "{counters}");
    }
}

#[test]
fn a_broker_that_is_killed_and_started_again_with_its_data_only_delays() {
    let data = tempfile::tempdir().unwrap();
    let arguments = ["--data-dir", data.path().to_str().unwrap()];
    let (mut broker, url) = broker_at("127.0.0.1:0", &arguments);
    let address = url.strip_prefix("pulsar://").unwrap().to_owned();
    let mut contributors: Vec<Contributor> = (0..3).map(|number| join(&url, number, 3)).collect();
    let _aggregators = [started(&url), started(&url)];
    contribute(&mut contributors, 1);
    assert_round(&mut contributors, 1);
    for round in 2..=4 {
        contribute(&mut contributors[..1], round);
        // The others are in the middle of it when the broker dies.
        let rest: Vec<_> = contributors
            .drain(1..)
            .map(|mut contributor| {
                std::thread::spawn(move || {
                    contribute(std::slice::from_mut(&mut contributor), round);
                    contributor
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(5 * round));
        broker.signal(Signal::KILL);
        std::thread::sleep(Duration::from_millis(200));
        (broker, _) = broker_at(&address, &arguments);
        contributors.extend(rest.into_iter().map(|thread| thread.join().unwrap()));
        assert_round(&mut contributors, round);
    }
    assert!(contributors[0].links_lost() > 0);
}

#[test]
fn the_federated_demo_trains_to_the_bits_of_one_process() {
    for (ranks, aggregators, wire) in [("4", "2", "fp16"), ("3", "1", "fp32")] {
        let output = gradwire()
            .args(["demo", "--mode", "federated", "--steps", "300", "--json", "-"])
            .args(["--ranks", ranks, "--aggregators", aggregators, "--wire", wire])
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(report["weights_sha256"], report["reference_sha256"], "{report}");
        assert_eq!((&report["transport"], report["ranks"].to_string().as_str()), (&"broker".into(), ranks), "{report}");
        assert!(report["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.95), "{report}");
    }
}

#[test]
fn an_aggregator_that_lacks_something_says_what() {
    for (left_out, code, words) in
        [("GRADWIRE_SECRET", 1, ["GRADWIRE_SECRET", "gradwire secret"]), ("GRADWIRE_BROKER", 2, ["--broker", "URL"])]
    {
        let output = aggregator("pulsar://127.0.0.1:1", &[]).env_remove(left_out).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    // A broker that is away is waited for, and that is said.
    let mut waiting = Process(aggregator("pulsar://127.0.0.1:1", &[]).spawn().unwrap());
    let mut lines = BufReader::new(waiting.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.next().unwrap().contains("an aggregator of job"));
    let line = lines.next().unwrap();
    assert!(line.contains("could not be opened"), "{line}");
    let since = Instant::now();
    assert_eq!(waiting.signal(Signal::TERM), Some(0));
    assert!(since.elapsed() < Duration::from_secs(10));
}
