//! `gradwire pulsar setup` and `gradwire doctor --broker` against an Apache Pulsar that asks for tokens and checks what
//! their roles may do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the control plane")]
#[path = "../../control/tests/common/apache.rs"]
mod apache;
mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::Output;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use apache::Standalone;
use gradwire_control::{BrokerAccess, ControlPlane, JobConfig, JoinRequest, Policy, Token};
use gradwire_proto::member::Endpoint;
use gradwire_proto::{Fault, FaultKind, Rank, Secret};
use serde_json::{Value, json};
use support::{DEADLINE, gradwire};

/// One for all tests. It ends with this process.
static PULSAR: LazyLock<Standalone> = LazyLock::new(|| Standalone::run(&["--auth", "--tls"]));

fn variable(name: &str) -> String {
    PULSAR.variable(name).unwrap()
}

/// A file with this content, for as long as the test runs.
fn file(content: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content.as_bytes()).unwrap();
    file
}

/// `gradwire pulsar setup` for job `job` in tenant `tenant`, and namespace `training` if no other, with this token.
fn setup(admin: &str, token: Option<&str>, tenant: &str, options: &[&str]) -> Output {
    let token = token.map(file);
    let mut command = gradwire();
    command.args(["pulsar", "setup", "--admin", admin, "--tenant", tenant, "--job", "job"]);
    if !options.contains(&"--namespace") {
        command.args(["--namespace", "training"]);
    }
    if let Some(token) = &token {
        command.arg("--token-file").arg(token.path());
    }
    command.args(options).output().unwrap()
}

fn set_up(tenant: &str, options: &[&str]) -> String {
    let output = setup(&variable("PULSAR_ADMIN"), Some(&variable("PULSAR_TOKEN")), tenant, options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn assert_refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
}

/// What the admin interface has, as the super user sees it.
fn asked(path: &str) -> Option<Value> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().into();
    let request = agent.get(format!("{}/admin/v2/{path}", variable("PULSAR_ADMIN")));
    let mut answer = request.header("Authorization", format!("Bearer {}", variable("PULSAR_TOKEN"))).call().unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    answer.status().is_success().then(|| serde_json::from_str(&text).unwrap_or(Value::Null))
}

#[test]
fn setup_creates_what_a_job_needs_and_the_second_time_nothing() {
    let dry = set_up("acme", &["--role", "trainer", "--dry-run"]);
    assert!(dry.contains("nothing was changed: ") && dry.contains(", 0 are as wanted"), "{dry}");
    assert_eq!(asked("tenants/acme"), None);

    let first = set_up("acme", &["--role", "trainer", "--role", "spiffe://a/b"]);
    assert!(first.contains("12 created"), "{first}");
    let policies = asked("namespaces/acme/training").unwrap();
    assert_eq!(policies["retention_policies"]["retentionTimeInMinutes"], 14 * 24 * 60);
    assert_eq!(policies["deduplicationEnabled"], false);
    assert_eq!(policies["autoTopicCreationOverride"]["topicType"], "non-partitioned");
    assert_eq!(policies["inactive_topic_policies"]["deleteWhileInactive"], false);
    let topics = asked("persistent/acme/training").unwrap();
    for kind in ["control", "snapshots", "versions", "retransmit", "copies", "updates", "rounds", "results", "audit"] {
        let full = format!("persistent://acme/training/job-{kind}");
        assert!(topics.as_array().unwrap().contains(&json!(full)), "{topics}");
        let rights = asked(&format!("persistent/acme/training/job-{kind}/permissions")).unwrap();
        for role in ["trainer", "spiffe://a/b"] {
            let mut rights: Vec<_> = rights[role].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            rights.sort_unstable();
            assert_eq!(rights, ["consume", "produce"]);
        }
    }
    let topic = |rest: &str| asked(&format!("persistent/acme/training/job-{rest}")).unwrap();
    assert_eq!(topic("retransmit/messageTTL"), 3600);
    assert_eq!(topic("versions/compactionThreshold"), 16 << 20);
    assert_eq!(topic("control/backlogQuotaMap")["destination_storage"]["policy"], "producer_exception");
    assert_eq!(topic("control/retention"), json!({ "retentionTimeInMinutes": -1, "retentionSizeInMB": -1 }));

    // The cluster tells of what was just set with a delay.
    let end = Instant::now() + DEADLINE;
    let mut again = set_up("acme", &["--role", "trainer", "--role", "spiffe://a/b"]);
    while !again.contains("0 created, 0 set, ") && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(200));
        again = set_up("acme", &["--role", "trainer", "--role", "spiffe://a/b"]);
    }
    assert!(again.contains("0 created, 0 set, "), "{again}");
    let changed = set_up("acme", &["--ttl-s", "60", "--dry-run"]);
    assert!(changed.contains("would be set (is 3600)"), "{changed}");
}

#[test]
fn an_administrator_of_the_tenant_can_do_all_but_the_tenant() {
    let body = json!({ "adminRoles": ["boss"], "allowedClusters": ["standalone"] });
    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
    let request = agent.put(format!("{}/admin/v2/tenants/theirs", variable("PULSAR_ADMIN")));
    let request = request.header("Authorization", format!("Bearer {}", variable("PULSAR_TOKEN")));
    request.header("Content-Type", "application/json").send(body.to_string()).unwrap();
    let boss = PULSAR.token("boss", &[]);
    let output = setup(&variable("PULSAR_ADMIN"), Some(&boss), "theirs", &["--role", "trainer"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.contains("tenant theirs") && line.contains("as it was")), "{text}");
    let other = setup(&variable("PULSAR_ADMIN"), Some(&boss), "others", &[]);
    assert_refused(&other, &["no right to", "tenant others", "super user"]);
}

#[test]
fn what_is_wrong_with_a_token_is_said() {
    let admin = variable("PULSAR_ADMIN");
    let refused = |token: Option<&str>, words: &[&str]| assert_refused(&setup(&admin, token, "none", &[]), words);
    refused(None, &["asks for a token", "--token-file"]);
    refused(Some("nonsense"), &["does not accept the token", "key of this cluster"]);
    refused(Some(&PULSAR.token("admin", &["--valid", "-5"])), &["does not accept the token", "it expired ", " ago"]);
    refused(Some(&PULSAR.token("stranger", &[])), &["no right to", "stranger", "super user"]);
    refused(Some("two words"), &["one word"]);
    assert_eq!(asked("tenants/none"), None);
}

#[test]
fn what_is_no_admin_interface_is_told_apart() {
    let token = Some("token");
    // The brokers' port.
    let broker = variable("PULSAR_URL").replace("pulsar://", "http://");
    assert_refused(&setup(&broker, token, "t", &[]), &["does not speak HTTP", "8080"]);
    let output = setup(&variable("PULSAR_URL"), token, "t", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("8080"));
    // Nothing at all.
    assert_refused(&setup("http://127.0.0.1:1", token, "t", &[]), &["cannot be reached", "refused"]);
    // Something else that speaks HTTP.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello").unwrap();
    });
    assert_refused(&setup(&url, token, "t", &[]), &["not the admin interface of a Pulsar cluster"]);
    server.join().unwrap();
}

/// Two ranks that join the job with this token.
fn join_with(token: &str) -> Vec<Result<ControlPlane, Fault>> {
    let broker = BrokerAccess::new(variable("PULSAR_URL")).with_token(Token::Text(token.to_owned()));
    let config = JobConfig::new("job".parse().unwrap(), [1; 16], Secret::from_bytes([1; 32]), broker);
    let config = JobConfig { tenant: "crew".to_owned(), model_version: Some("v1".parse().unwrap()), ..config };
    let ranks = [0, 1].map(|rank| {
        let request = JoinRequest {
            config: config.clone(),
            rank: Rank(rank),
            world_size: 2,
            policy: Policy::Fixed,
            endpoint: Endpoint::default(),
            deadline: DEADLINE,
            commit_interval: Duration::ZERO,
        };
        std::thread::spawn(move || ControlPlane::join(request).map(|(plane, _)| plane))
    });
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn ranks_need_no_other_rights_than_those_of_setup() {
    // The namespace of jobs with this version of a model.
    set_up("crew", &["--namespace", "job.v1", "--role", "trainer"]);
    for plane in join_with(&PULSAR.token("trainer", &[])) {
        plane.expect("a member").leave(DEADLINE, DEADLINE).unwrap();
    }
    for fault in join_with(&PULSAR.token("stranger", &[])) {
        let fault = fault.map(drop).expect_err("not admitted");
        assert_eq!(fault.kind, FaultKind::BrokerUnreachable, "{fault}");
        assert!(fault.detail.contains("uthoriz"), "{fault}");
    }
}

/// What the doctor says about a broker, by subject.
fn doctor(url: &str, token: Option<&str>, options: &[&str]) -> Vec<Value> {
    let token = token.map(file);
    let mut command = gradwire();
    command.args(["doctor", "--json", "--broker", url, "--topic-prefix", "clinic/training/job"]);
    if let Some(token) = &token {
        command.arg("--broker-token-file").arg(token.path());
    }
    let output = command.args(options).output().unwrap();
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    findings.into_iter().filter(|finding| finding["subject"].as_str().unwrap().starts_with("broker")).collect()
}

fn assert_finding(findings: &[Value], subject: &str, level: &str, words: &[&str]) {
    let finding = findings.iter().find(|finding| finding["subject"] == subject);
    let finding = finding.unwrap_or_else(|| panic!("nothing about {subject}: {findings:?}"));
    assert_eq!(finding["level"], level, "{finding}");
    for word in words {
        assert!(finding.to_string().contains(word), "'{word}' is not in: {finding}");
    }
}

/// That latency was measured. How good it is depends on the machine.
fn assert_measured(findings: &[Value]) {
    let latency = findings.iter().find(|finding| finding["subject"] == "broker latency").unwrap();
    assert!(latency["fact"].as_str().unwrap().contains(" messages of 1 kB"), "{latency}");
}

#[test]
fn the_doctor_finds_a_broker_well_or_says_what_is_wrong() {
    set_up("clinic", &["--role", "trainer"]);
    let (url, admin) = (variable("PULSAR_URL"), variable("PULSAR_ADMIN"));
    let trainer = PULSAR.token("trainer", &["--valid", "1000"]);
    let well = doctor(&url, Some(&trainer), &["--admin", &admin]);
    for subject in ["broker", "broker message size", "broker produce", "broker consume"] {
        assert_finding(&well, subject, "ok", &[]);
    }
    assert_finding(&well, "broker login", "ok", &["it expires in "]);
    assert_finding(&well, "broker clock", "ok", &["give or take"]);
    assert_measured(&well);

    assert_finding(&doctor(&url, None, &[]), "broker login", "fail", &["--broker-token-file"]);
    let expired = PULSAR.token("trainer", &["--valid", "-5"]);
    assert_finding(&doctor(&url, Some(&expired), &[]), "broker login", "fail", &["it expired "]);
    let stranger = doctor(&url, Some(&PULSAR.token("stranger", &[])), &[]);
    assert_finding(&stranger, "broker login", "ok", &[]);
    assert_finding(&stranger, "broker produce", "fail", &["gradwire pulsar setup --role"]);
    assert_finding(&stranger, "broker consume", "fail", &["gradwire pulsar setup --role"]);
    assert!(stranger.iter().all(|finding| finding["subject"] != "broker latency"));
    let wrong_port = doctor(&admin.replace("http://", "pulsar://"), Some(&trainer), &[]);
    assert_finding(&wrong_port, "broker login", "fail", &["does not speak Pulsar's protocol"]);
}

#[test]
fn the_doctor_looks_at_tls() {
    set_up("clinic", &["--role", "trainer"]);
    let (url, ca) = (variable("PULSAR_TLS_URL"), variable("PULSAR_CA"));
    let trainer = PULSAR.token("trainer", &[]);
    let well = doctor(&url, Some(&trainer), &["--broker-ca", &ca]);
    assert_finding(&well, "broker TLS", "ok", &["TLS 1.3", "'localhost'"]);
    assert_measured(&well);
    assert_finding(&doctor(&url, Some(&trainer), &[]), "broker TLS", "fail", &["UnknownIssuer", "--broker-ca"]);
    let other_name = doctor(&url.replace("localhost", "127.0.0.1"), Some(&trainer), &["--broker-ca", &ca]);
    assert_finding(&other_name, "broker TLS", "fail", &["localhost", "use a name in the URL"]);
    let plain = variable("PULSAR_URL").replace("pulsar://", "pulsar+ssl://");
    assert_finding(&doctor(&plain, Some(&trainer), &[]), "broker TLS", "fail", &["TLS port"]);
    let no_certificate = file("nothing");
    let findings = doctor(&url, Some(&trainer), &["--broker-ca", no_certificate.path().to_str().unwrap()]);
    assert_finding(&findings, "broker TLS", "fail", &["holds no certificate", "PEM"]);
}
