//! The small commands: `secret`, `broker`, `doctor`, `--version`, and what a user sees who types something wrong.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use rustix::process::Signal;
use support::{await_condition, gradwire, kill};

#[test]
fn a_secret_is_printed_or_written_for_its_owner_alone() {
    let print = || gradwire().arg("secret").output().unwrap().stdout;
    let (first, second) = (print(), print());
    assert_eq!(first.len(), 65);
    assert!(first[..64].iter().all(u8::is_ascii_hexdigit));
    assert_ne!(first, second);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    let write = || gradwire().arg("secret").arg("--file").arg(&path).output().unwrap();
    let written = write();
    assert!(written.status.success() && written.stdout.is_empty());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let content = fs::read(&path).unwrap();
    assert_eq!(content.len(), 65);
    let again = write();
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("secret"));
    assert_eq!(fs::read(&path).unwrap(), content);
}

#[test]
fn a_broker_prints_its_url_answers_and_ends_when_asked() {
    let mut child = gradwire()
        .args(["broker", "--listen", "127.0.0.1:0", "--no-auth"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let address = url.trim().strip_prefix("pulsar://").unwrap();
    TcpStream::connect(address).unwrap();
    let doctor = gradwire().args(["doctor", "--json", "--broker", url.trim()]).output().unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let broker = findings.as_array().unwrap().iter().find(|finding| finding["subject"] == "broker").unwrap();
    assert_eq!(broker["level"], "ok", "{broker}");
    kill(child.id().cast_signed(), Signal::TERM);
    let status = await_condition("the broker ends", || child.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_broker_has_to_be_told_whom_to_admit() {
    let silent = gradwire().args(["broker", "--listen", "127.0.0.1:0"]).output().unwrap();
    assert_eq!(silent.status.code(), Some(2));
    let text = String::from_utf8_lossy(&silent.stderr);
    assert!(text.contains("--token-file") && text.contains("--no-auth"), "{text}");
    let missing =
        gradwire().args(["broker", "--listen", "127.0.0.1:0", "--token-file", "/nonexistent"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent"));
}

#[test]
fn the_doctor_fails_when_something_does() {
    let output = gradwire().args(["doctor", "--broker", "pulsar://127.0.0.1:1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.starts_with("fail  broker: pulsar://127.0.0.1:1")), "{text}");
    assert!(
        text.lines().all(|line| ["ok    ", "warn  ", "fail  "].iter().any(|level| line.starts_with(level))),
        "{text}"
    );
}

#[test]
fn version_and_help_are_there() {
    let version = gradwire().arg("--version").output().unwrap();
    assert_eq!(String::from_utf8(version.stdout).unwrap().trim(), format!("gradwire {}", env!("CARGO_PKG_VERSION")));
    let help = gradwire().args(["launch", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("Examples:") && help.contains("MASTER_PORT") && help.contains("Exit code:"), "{help}");
}
