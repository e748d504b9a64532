//! A broker by its URL: each step of using it by itself, so that the first one that fails is the one that is named.
//!
//! Reaching the port, TLS, being admitted, message sizes, the clock, producing and consuming on a topic, and how long
//! messages take. What builds on a step that failed is not tried.

mod handshake;
mod trial;

use std::path::PathBuf;
use std::time::Duration;

use gradwire_control::BrokerAccess;
use pulsar::Error;
use pulsar::error::{ConnectionError, ConsumerError, ProducerError, ServiceDiscoveryError};
use pulsar::message::proto::ServerError;

use super::{Finding, bytes};
use crate::pulsar::{DOCTOR, clock_difference, expiry_in_words};
use handshake::{Greeting, HandshakeError, Transport};
use trial::Latency;

/// Records and pieces of copies, with what is around them, are below this.
const MESSAGE_BYTES_MIN: u64 = 1100 << 10;
/// Above this, audit and version records come late, and recovery over the broker waits for it.
const CONSUME_TIME_MAX: Duration = Duration::from_millis(100);
/// Tokens and time limits on records stop to be right.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(5);

/// The broker to try.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) access: BrokerAccess,
    /// `tenant/namespace/name`, or with `persistent://` before it. What is tried is `-doctor` behind it.
    pub(super) topic_prefix: String,
    /// The cluster's admin interface: it tells the time.
    pub(super) admin: Option<String>,
    pub(super) admin_ca: Option<PathBuf>,
}

impl Target {
    fn topic(&self) -> String {
        let name = format!("{}-{DOCTOR}", self.topic_prefix.trim_end_matches('-'));
        if name.contains("://") { name } else { format!("persistent://{name}") }
    }
}

/// Tries the broker.
pub(super) fn examine(target: &Target) -> Vec<Finding> {
    // What cannot be read is told by the steps that need it.
    let token = target.access.token.as_ref().and_then(|token| token.read().ok());
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return vec![Finding::fail("broker", error.to_string(), "see what limits this process")],
    };
    let mut findings = Vec::new();
    runtime.block_on(in_turn(target, &mut findings));
    findings.extend(target.admin.as_deref().map(|admin| clock(admin, token, target.admin_ca.as_deref())));
    findings
}

async fn in_turn(target: &Target, findings: &mut Vec<Finding>) {
    let token = match target.access.token.as_ref().map(gradwire_control::Token::read).transpose() {
        Ok(token) => token,
        Err(fault) => return findings.push(Finding::fail("broker token", fault.detail, "give a file with a token")),
    };
    match handshake::greet(&target.access, token.as_deref()).await {
        Ok((transport, greeting)) => {
            findings.push(reached(target));
            findings.extend(secured(&transport));
            findings.push(admitted(&greeting, token.as_deref()));
            findings.push(message_limit(&greeting));
        }
        Err(error) => return findings.extend(refused(target, &error, token.as_deref())),
    }
    findings.extend(topic(target, token).await);
}

fn reached(target: &Target) -> Finding {
    Finding::ok("broker", format!("{} accepts connections", target.access.url))
}

fn secured(transport: &Transport) -> Option<Finding> {
    let Transport::Tls { version, name } = transport else { return None };
    Some(Finding::ok("broker TLS", format!("{version}, and the certificate is good for '{name}'")))
}

fn admitted(greeting: &Greeting, token: Option<&str>) -> Finding {
    let how = match token {
        None => "without a token".to_owned(),
        Some(token) => {
            expiry_in_words(token).map_or("with the token".to_owned(), |expiry| format!("with the token ({expiry})"))
        }
    };
    Finding::ok("broker login", format!("{} admits us {how}", greeting.server_version))
}

fn message_limit(greeting: &Greeting) -> Finding {
    const SUBJECT: &str = "broker message size";
    match greeting.message_bytes_max {
        None => Finding::ok(SUBJECT, "the broker tells no limit"),
        Some(limit) if limit >= MESSAGE_BYTES_MIN => Finding::ok(SUBJECT, format!("up to {}", bytes(limit))),
        Some(limit) => Finding::fail(
            SUBJECT,
            format!("up to {}, and gradwire sends up to {}", bytes(limit), bytes(MESSAGE_BYTES_MIN)),
            "set maxMessageSize=5242880 at the brokers, and nettyMaxFrameSizeBytes a little above it at the bookies",
        ),
    }
}

/// What is known when the greeting failed: everything before it, and why it ended there.
fn refused(target: &Target, error: &HandshakeError, token: Option<&str>) -> Vec<Finding> {
    let url = &target.access.url;
    let expiry = token.and_then(expiry_in_words).map_or(String::new(), |expiry| format!(" ({expiry})"));
    let finding = match error {
        HandshakeError::Url(reason) => {
            Finding::fail("broker", format!("{url}: {reason}"), "give a URL such as pulsar://broker.example:6650")
        }
        HandshakeError::Unreachable(reason) => {
            return vec![Finding::fail(
                "broker",
                format!("{url}: {reason}"),
                "see that it runs, that its name and port are right, and that no firewall is between",
            )];
        }
        HandshakeError::Trust(reason) => {
            Finding::fail("broker TLS", reason.clone(), "give a PEM file with certificates by --broker-ca")
        }
        HandshakeError::Tls(reason) => Finding::fail("broker TLS", reason.clone(), tls_remedy(reason)),
        HandshakeError::NotPulsar(reason) => Finding::fail(
            "broker login",
            format!("{url} does not speak Pulsar's protocol: {reason}"),
            "see that this is the brokers' port (6650, or 6651 with pulsar+ssl://), and not the admin interface's",
        ),
        HandshakeError::Refused { error, message } => Finding::fail(
            "broker login",
            format!("refused{expiry}: {error} {message}"),
            match token {
                None => "give a token by --broker-token-file",
                Some(_) => {
                    "get a token that it accepts: of a cluster, one that is signed with its key and has not expired; of `gradwire broker`, what its --token-file holds"
                }
            },
        ),
    };
    vec![reached(target), finding]
}

fn tls_remedy(reason: &str) -> &'static str {
    if reason.contains("UnknownIssuer") {
        "give its authority's certificate by --broker-ca, if this is the broker that you mean"
    } else if reason.contains("not valid for") {
        "use a name in the URL that is in the broker's certificate, or have one made for this name"
    } else if reason.contains("xpired") {
        "have the broker's certificate renewed, and see that this host's clock is right"
    } else {
        "see that this is the brokers' TLS port (6651 if nothing else is configured), and that it offers TLS 1.2 or 1.3"
    }
}

async fn topic(target: &Target, token: Option<String>) -> Vec<Finding> {
    let topic = target.topic();
    let mut findings = Vec::new();
    let client = match trial::connect(&target.access, token).await {
        Ok(client) => client,
        Err(error) => return vec![unusable("broker topics", &topic, &error)],
    };
    let producer = trial::producer(&client, &topic).await;
    let reader = trial::reader(&client, &topic).await;
    findings.push(match &producer {
        Ok(_) => Finding::ok("broker produce", format!("allowed on {topic}")),
        Err(error) => unusable("broker produce", &topic, error),
    });
    findings.push(match &reader {
        Ok(_) => Finding::ok("broker consume", format!("allowed on {topic}")),
        Err(error) => unusable("broker consume", &topic, error),
    });
    if let (Ok(producer), Ok(reader)) = (producer, reader) {
        findings.push(match trial::latency(producer, reader).await {
            Ok(latency) => in_words(&latency),
            Err(error) => unusable("broker latency", &topic, &error),
        });
    }
    findings
}

fn in_words(latency: &Latency) -> Finding {
    let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
    let pair = |[median, p99]: [Duration; 2]| format!("{} ms median, {} ms p99", ms(median), ms(p99));
    let fact = format!(
        "{} messages of 1 kB, one after the other: to the receipt {}; to the consumer {}",
        latency.messages,
        pair(latency.receipt),
        pair(latency.consume)
    );
    let remedy = "see docs/pulsar.md for settings of the cluster that count, and choose brokers that are near";
    Finding::ok_if(latency.consume[0] <= CONSUME_TIME_MAX, "broker latency", fact, remedy)
}

fn unusable(subject: &'static str, topic: &str, error: &Error) -> Finding {
    let remedy = match server_error(error) {
        Some(ServerError::AuthorizationError) => {
            "have it allowed: `gradwire pulsar setup --role ROLE`, or give a topic of yours by --topic-prefix"
        }
        Some(ServerError::TopicNotFound | ServerError::MetadataError) => {
            "have tenant, namespace and topics made by `gradwire pulsar setup`, or give others by --topic-prefix"
        }
        Some(ServerError::ProducerBlockedQuotaExceededError | ServerError::ProducerBlockedQuotaExceededException) => {
            "somebody holds back too many messages of this topic: look at its subscriptions"
        }
        _ => "look at the brokers' logs",
    };
    Finding::fail(subject, format!("{topic}: {error}").replace('\n', " "), remedy)
}

fn server_error(error: &Error) -> Option<ServerError> {
    let connection = match error {
        Error::Connection(error)
        | Error::Consumer(ConsumerError::Connection(error))
        | Error::Producer(ProducerError::Connection(error))
        | Error::ServiceDiscovery(ServiceDiscoveryError::Connection(error)) => error,
        Error::ServiceDiscovery(ServiceDiscoveryError::Query(error, _)) => return *error,
        _ => return None,
    };
    match connection {
        ConnectionError::PulsarError(error, _) => *error,
        _ => None,
    }
}

fn clock(admin: &str, token: Option<String>, ca: Option<&std::path::Path>) -> Finding {
    const SUBJECT: &str = "broker clock";
    match clock_difference(admin, token, ca) {
        Err(error) => {
            Finding::warn(SUBJECT, error, "give the URL of the admin interface by --admin, and a token that it takes")
        }
        Ok(clock) => {
            let ahead = if clock.ahead { "ahead of" } else { "behind" };
            let fact = format!(
                "{:.1} s {ahead} ours, give or take {:.1} s, by the Date of its HTTP answers",
                clock.difference.as_secs_f64(),
                clock.error.as_secs_f64()
            );
            let right = clock.difference <= CLOCK_DIFFERENCE_MAX + clock.error;
            Finding::ok_if(right, SUBJECT, fact, "run a time service on both: tokens and records carry times")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topic_that_is_tried_is_that_of_setup() {
        let target = |prefix: &str| Target {
            access: BrokerAccess::new("pulsar://h"),
            topic_prefix: prefix.to_owned(),
            admin: None,
            admin_ca: None,
        };
        assert_eq!(target("ml/training/resnet").topic(), "persistent://ml/training/resnet-doctor");
        assert_eq!(target("persistent://a/b/c-").topic(), "persistent://a/b/c-doctor");
    }

    #[test]
    fn a_small_message_limit_fails_with_what_to_set() {
        let greeting = |limit| Greeting { server_version: "x".to_owned(), message_bytes_max: limit };
        assert_eq!(message_limit(&greeting(Some(5 << 20))).level, super::super::Level::Ok);
        assert_eq!(message_limit(&greeting(None)).level, super::super::Level::Ok);
        let small = message_limit(&greeting(Some(1 << 20)));
        assert_eq!(small.level, super::super::Level::Fail);
        assert!(small.remedy.unwrap().contains("maxMessageSize"));
    }
}
