//! `gradwire trace`: what a job left on its broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::process::{Command, Output};

use gradwire_control::{BrokerConfig, EmbeddedBroker};
use support::gradwire;

const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

fn broker() -> EmbeddedBroker {
    EmbeddedBroker::start(BrokerConfig::new("127.0.0.1:0".parse().unwrap())).unwrap()
}

/// A job of two ranks that trains for a few steps.
fn train(broker: &EmbeddedBroker) {
    let mut launch = gradwire();
    launch.env("GRADWIRE_SECRET", SECRET).env("GRADWIRE_COMMIT_INTERVAL_MS", "0");
    launch.args(["launch", "-n", "2", "--job", "traced", "--broker", broker.url(), "--"]);
    launch.arg(env!("CARGO_BIN_EXE_gradwire"));
    launch.args(["__demo-rank", "--steps", "5", "--transport", "tcp", "--wire", "fp32", "--seed", "1"]);
    let output = launch.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn trace(broker: &EmbeddedBroker, what: &[&str]) -> Command {
    let mut command = gradwire();
    command.env("GRADWIRE_SECRET", SECRET);
    command.arg("trace").args(what).args(["--job", "traced", "--broker", broker.url()]);
    command
}

fn json(output: &Output) -> Vec<serde_json::Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn versions_and_audit_are_read_back() {
    let broker = broker();
    train(&broker);
    let versions = json(&trace(&broker, &["versions", "--json"]).output().unwrap());
    let steps = |owner: u64| -> Vec<u64> {
        let of_owner = versions.iter().filter(|version| version["owner"] == owner);
        of_owner.map(|version| version["step"].as_u64().unwrap()).collect()
    };
    // The first is that of the weights that all begin with.
    assert_eq!((steps(0), steps(1)), ((0..6).collect(), (0..6).collect()));
    assert!(versions.iter().all(|version| version["contributors"] == serde_json::json!([0, 1])));
    let some = json(&trace(&broker, &["versions", "--json", "--owner", "1", "--steps", "2..4"]).output().unwrap());
    assert_eq!(some.len(), 2);

    let audit = json(&trace(&broker, &["audit", "--json", "--since", "1h"]).output().unwrap());
    let kinds = |kind: &str| audit.iter().filter(|record| record["kind"] == kind).count();
    assert_eq!((kinds("joined"), kinds("committed"), kinds("left")), (2, 12, 2));
    let joined = audit.iter().find(|record| record["kind"] == "joined").unwrap();
    let detail = joined["detail"].as_str().unwrap();
    assert!(detail.contains("addresses") && detail.contains("identity"), "{detail}");
    let one = json(&trace(&broker, &["audit", "--json", "--rank", "1", "--kind", "left"]).output().unwrap());
    assert_eq!(one.len(), 1);
    let none = json(&trace(&broker, &["audit", "--json", "--until", "1h"]).output().unwrap());
    assert_eq!(none.len(), 0);
    let table = String::from_utf8(trace(&broker, &["audit"]).output().unwrap().stdout).unwrap();
    assert!(table.contains("rank 0") && table.contains("in good order"), "{table}");
}

#[test]
fn what_does_not_verify_is_counted_and_left_out() {
    let broker = broker();
    train(&broker);
    let mut other = trace(&broker, &["versions"]);
    other.env("GRADWIRE_SECRET", SECRET.replace("00", "01"));
    let output = other.output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with("no records in persistent://"), "{said}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("12 messages are left out"));
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let broker = broker();
    let failed = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let secret = failed(trace(&broker, &["versions"]).env_remove("GRADWIRE_SECRET"));
    assert!(secret.contains("GRADWIRE_SECRET") && secret.contains("--secret-file"), "{secret}");
    let missing =
        failed(trace(&broker, &["audit", "--secret-file", "/nonexistent/secret"]).env_remove("GRADWIRE_SECRET"));
    assert!(missing.contains("/nonexistent/secret"), "{missing}");
    let steps = failed(&mut trace(&broker, &["versions", "--steps", "9..3"]));
    assert!(steps.contains("10..20"), "{steps}");
    let kind = failed(&mut trace(&broker, &["audit", "--kind", "oops"]));
    assert!(kind.contains("round-closed"), "{kind}");
    let url = broker.url().to_owned();
    drop(broker);
    let gone =
        failed(gradwire().env("GRADWIRE_SECRET", SECRET).args(["trace", "audit", "--job", "traced", "--broker", &url]));
    assert!(gone.contains(&url), "{gone}");
}
