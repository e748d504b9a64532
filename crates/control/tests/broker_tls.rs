//! The embedded broker over TLS, through the `pulsar` crate and by raw frames.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "common/certificates.rs"]
mod certificates;
mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use certificates::Authority;
use common::*;
use futures::StreamExt;
use gradwire_control::{BrokerConfig, BrokerTls, EmbeddedBroker};
use gradwire_proto::FaultKind;
use pulsar::consumer::InitialPosition;
use pulsar::message::proto::{
    BaseCommand, CommandConnect, CommandFlow, CommandPing, CommandProducer, CommandSend, CommandSubscribe,
    MessageMetadata, base_command::Type,
};
use pulsar::message::{Codec, Message, Payload};
use pulsar::{ConnectionRetryOptions, ConsumerOptions, OperationRetryOptions, Pulsar, TokioExecutor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, version};
use tokio_util::codec::{Decoder, Encoder};

fn config(authority: &Authority, names: &[&str]) -> BrokerConfig {
    let (certificate, key) = authority.issue(names);
    BrokerConfig { tls: Some(BrokerTls { certificate, key, client_ca: None }), ..local() }
}

/// The broker's URL with a name instead of an address.
fn named(broker: &EmbeddedBroker, name: &str) -> String {
    format!("pulsar+ssl://{name}:{}", broker.address().port())
}

async fn client(url: &str, trusted: Option<&Authority>) -> Result<Pulsar<TokioExecutor>, pulsar::Error> {
    let once = OperationRetryOptions { max_retries: Some(0), ..Default::default() };
    let connection = ConnectionRetryOptions { max_retries: 0, ..Default::default() };
    let mut builder = Pulsar::builder(url, TokioExecutor)
        .with_operation_retry_options(once)
        .with_connection_retry_options(connection);
    if let Some(authority) = trusted {
        builder = builder.with_certificate_chain(authority.pem());
    }
    timeout(PATIENCE, builder.build()).await.expect("an end")
}

/// A client that says what a test wants it to.
struct Raw {
    stream: TlsStream<TcpStream>,
    input: BytesMut,
}

impl Raw {
    async fn open(
        broker: &EmbeddedBroker,
        authority: &Authority,
        identity: Option<(&Path, &Path)>,
        version: &'static SupportedProtocolVersion,
    ) -> std::io::Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority.file()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_protocol_versions(&[version]).with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = vec![CertificateDer::from_pem_file(certificate).unwrap()];
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(key).unwrap()).unwrap()
            }
        };
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = TcpStream::connect(broker.address()).await?;
        let name = ServerName::try_from("localhost").unwrap();
        Ok(Self { stream: connector.connect(name, stream).await?, input: BytesMut::new() })
    }

    async fn connected(broker: &EmbeddedBroker, authority: &Authority) -> Self {
        let mut raw = Self::open(broker, authority, None, &version::TLS13).await.unwrap();
        assert!(raw.ask(connect()).await.unwrap().connected.is_some());
        raw
    }

    async fn say(&mut self, command: BaseCommand, payload: Option<Payload>) {
        let mut out = BytesMut::new();
        Codec.encode(Message { command, payload }, &mut out).unwrap();
        self.stream.write_all(&out).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    async fn ask(&mut self, command: BaseCommand) -> Option<BaseCommand> {
        self.say(command, None).await;
        Some(self.hear().await?.command)
    }

    /// The next frame; nothing when the broker closed the link.
    async fn hear(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = Codec.decode(&mut self.input).unwrap() {
                return Some(message);
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.input)).await;
            if read.expect("the broker neither answers nor closes").unwrap_or(0) == 0 {
                return None;
            }
        }
    }
}

fn command(kind: Type) -> BaseCommand {
    BaseCommand { r#type: kind as i32, ..Default::default() }
}

fn connect() -> BaseCommand {
    let connect =
        CommandConnect { client_version: "test".to_owned(), protocol_version: Some(12), ..Default::default() };
    BaseCommand { connect: Some(connect), ..command(Type::Connect) }
}

fn ping() -> BaseCommand {
    BaseCommand { ping: Some(CommandPing {}), ..command(Type::Ping) }
}

fn producer(topic: &str) -> BaseCommand {
    let producer = CommandProducer { topic: topic.to_owned(), producer_id: 1, request_id: 2, ..Default::default() };
    BaseCommand { producer: Some(producer), ..command(Type::Producer) }
}

fn send(sequence_id: u64, data: Vec<u8>) -> (BaseCommand, Option<Payload>) {
    let metadata =
        MessageMetadata { producer_name: "p".to_owned(), sequence_id, publish_time: 1, ..Default::default() };
    let send = CommandSend { producer_id: 1, sequence_id, ..Default::default() };
    (BaseCommand { send: Some(send), ..command(Type::Send) }, Some(Payload { metadata, data }))
}

#[tokio::test]
async fn the_pulsar_crate_finds_the_broker_under_its_certificates_name() {
    let authority = Authority::new();
    let broker = EmbeddedBroker::start(config(&authority, &["localhost"])).unwrap();
    assert!(broker.url().starts_with("pulsar+ssl://127.0.0.1:"), "{}", broker.url());
    // The certificate holds no address: a lookup answered with one would end here.
    let client = client(&named(&broker, "localhost"), Some(&authority)).await.unwrap();
    let topic = unique("tls");
    let mut producer = client.producer().with_topic(&topic).build().await.unwrap();
    let sizes = (0..300).map(|number| if number % 50 == 0 { 1 << 20 } else { number });
    let payloads: Vec<Vec<u8>> = sizes.enumerate().map(|(number, size)| vec![number as u8; size]).collect();
    for payload in &payloads {
        producer.send_non_blocking(payload.clone()).await.unwrap().await.unwrap();
    }
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let mut reader: pulsar::reader::Reader<Vec<u8>, _> =
        client.reader().with_topic(&topic).with_options(options).into_reader().await.unwrap();
    for payload in &payloads {
        let message = timeout(PATIENCE, reader.next()).await.unwrap().unwrap().unwrap();
        assert!(message.payload.data == *payload);
    }
}

#[tokio::test]
async fn clients_verify_authority_and_name() {
    let authority = Authority::new();
    let broker = EmbeddedBroker::start(config(&authority, &["localhost"])).unwrap();
    let other = Authority::new();
    for (name, trusted) in [("localhost", None), ("localhost", Some(&other)), ("127.0.0.1", Some(&authority))] {
        assert!(client(&named(&broker, name), trusted).await.is_err(), "{name}");
    }
    assert!(client(&named(&broker, "localhost"), Some(&authority)).await.is_ok());
}

#[tokio::test]
async fn the_wrong_kind_of_client_is_told_so_promptly() {
    let authority = Authority::new();
    let tls = EmbeddedBroker::start(config(&authority, &["localhost"])).unwrap();
    assert!(client(&format!("pulsar://{}", tls.address()), None).await.is_err());
    let mut stream = TcpStream::connect(tls.address()).await.unwrap();
    let mut out = BytesMut::new();
    Codec.encode(Message { command: connect(), payload: None }, &mut out).unwrap();
    stream.write_all(&out).await.unwrap();
    let mut heard = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut heard)).await.expect("an end").unwrap();
    let answer = Codec.decode(&mut BytesMut::from(&heard[..])).unwrap().unwrap().command.error.unwrap();
    assert!(answer.message.contains("pulsar+ssl://"), "{}", answer.message);

    let plain = embedded_broker();
    assert!(client(&named(&plain, "localhost"), Some(&authority)).await.is_err());
}

#[tokio::test]
async fn a_broker_with_a_client_authority_admits_its_clients_only() {
    let (authority, other) = (Authority::new(), Authority::new());
    let mut config = config(&authority, &["localhost"]);
    config.tls.as_mut().unwrap().client_ca = Some(authority.file());
    let broker = EmbeddedBroker::start(config).unwrap();
    let (good, bad) = (authority.issue(&["rank-0"]), other.issue(&["rank-0"]));
    for identity in [None, Some(&bad)] {
        let identity = identity.map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        // In TLS 1.3 a client learns only after its handshake that it was refused.
        match Raw::open(&broker, &authority, identity, &version::TLS13).await {
            Ok(mut raw) => {
                let mut out = BytesMut::new();
                Codec.encode(Message { command: connect(), payload: None }, &mut out).unwrap();
                let _ = raw.stream.write_all(&out).await;
                assert!(raw.hear().await.is_none(), "a client without a certificate was admitted");
            }
            Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::TimedOut),
        }
    }
    let mut raw = Raw::open(&broker, &authority, Some((&good.0, &good.1)), &version::TLS13).await.unwrap();
    assert!(raw.ask(connect()).await.unwrap().connected.is_some());
}

#[tokio::test]
async fn older_tls_is_refused() {
    let authority = Authority::new();
    let broker = EmbeddedBroker::start(config(&authority, &["localhost"])).unwrap();
    let error = Raw::open(&broker, &authority, None, &version::TLS12).await.err().expect("a refusal");
    assert!(error.to_string().contains("ProtocolVersion"), "{error}");
}

#[tokio::test]
async fn a_silent_client_is_given_up_in_every_state() {
    let authority = Authority::new();
    let connect_timeout = Duration::from_millis(200);
    let config = BrokerConfig {
        connect_timeout,
        keep_alive: Duration::from_millis(100),
        pending_links_max: 4,
        ..config(&authority, &["localhost"])
    };
    let broker = EmbeddedBroker::start(config).unwrap();
    // No byte, half a handshake, a handshake without CONNECT.
    let mut bare = TcpStream::connect(broker.address()).await.unwrap();
    let mut half = TcpStream::connect(broker.address()).await.unwrap();
    half.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").await.unwrap();
    let mut opened = Raw::open(&broker, &authority, None, &version::TLS13).await.unwrap();
    for stream in [&mut bare, &mut half] {
        let ended = timeout(PATIENCE, stream.read_buf(&mut BytesMut::new())).await.expect("an end");
        assert_eq!(ended.unwrap_or(0), 0);
    }
    assert!(opened.hear().await.is_none());
    // Their places are free again, and an open link is asked for a sign of life before it is given up.
    let mut raw = Raw::connected(&broker, &authority).await;
    assert!(raw.hear().await.unwrap().command.ping.is_some());
    assert!(raw.ask(ping()).await.unwrap().pong.is_some());
    assert!(raw.hear().await.unwrap().command.ping.is_some());
    assert!(raw.hear().await.is_none());
}

#[tokio::test]
async fn sizes_are_bounded_as_without_tls() {
    let authority = Authority::new();
    let config = BrokerConfig { message_bytes_max: 1 << 20, ..config(&authority, &["localhost"]) };
    let broker = EmbeddedBroker::start(config).unwrap();
    let mut raw = Raw::open(&broker, &authority, None, &version::TLS13).await.unwrap();
    raw.stream.write_all(b"\0\x01\0\0\0\0\0\x04").await.unwrap();
    assert!(raw.hear().await.is_none(), "a large frame before CONNECT");

    let mut raw = Raw::connected(&broker, &authority).await;
    assert!(raw.ask(producer("t")).await.unwrap().producer_success.is_some());
    let (command, payload) = send(0, vec![0; (1 << 20) + 1]);
    raw.say(command, payload).await;
    assert!(raw.hear().await.unwrap().command.send_error.is_some());
    let (command, payload) = send(1, vec![0; 1 << 20]);
    raw.say(command, payload).await;
    assert!(raw.hear().await.unwrap().command.send_receipt.is_some());
    raw.stream.write_all(b"\x01\0\0\0\0\0\0\x04").await.unwrap();
    assert!(raw.hear().await.is_none(), "a frame over the limit");
}

#[tokio::test]
async fn a_client_that_reads_nothing_gets_everything_later() {
    let authority = Authority::new();
    let broker = EmbeddedBroker::start(config(&authority, &["localhost"])).unwrap();
    let mut raw = Raw::connected(&broker, &authority).await;
    assert!(raw.ask(producer("t")).await.unwrap().producer_success.is_some());
    for sequence_id in 0..20 {
        let (command, payload) = send(sequence_id, vec![7; 1 << 20]);
        raw.say(command, payload).await;
        assert!(raw.hear().await.unwrap().command.send_receipt.is_some());
    }
    let mut slow = Raw::connected(&broker, &authority).await;
    let subscribe = CommandSubscribe {
        topic: "t".to_owned(),
        subscription: "s".to_owned(),
        consumer_id: 3,
        request_id: 4,
        durable: Some(false),
        initial_position: Some(1),
        ..Default::default()
    };
    let subscribed = slow.ask(BaseCommand { subscribe: Some(subscribe), ..command(Type::Subscribe) }).await;
    assert!(subscribed.unwrap().success.is_some());
    let flow = CommandFlow { consumer_id: 3, message_permits: 1000 };
    slow.say(BaseCommand { flow: Some(flow), ..command(Type::Flow) }, None).await;
    // Others are served meanwhile.
    assert!(raw.ask(ping()).await.unwrap().pong.is_some());
    for number in 0..20 {
        assert_eq!(slow.hear().await.unwrap().command.message.unwrap().message_id.entry_id, number);
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let (authority, other) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.issue(&["localhost"]);
    let (_, other_key) = other.issue(&["localhost"]);
    let junk = authority.path("junk");
    std::fs::write(&junk, "-----BEGIN CERTIFICATE-----\nno\n").unwrap();
    let empty = authority.path("empty");
    std::fs::write(&empty, "").unwrap();
    let missing = authority.path("missing");
    let good = BrokerTls { certificate: certificate.clone(), key: key.clone(), client_ca: None };
    let mut cases = Vec::new();
    for file in [&missing, &junk, &empty] {
        cases.push((BrokerTls { certificate: file.clone(), ..good.clone() }, file));
        cases.push((BrokerTls { key: file.clone(), ..good.clone() }, file));
        cases.push((BrokerTls { client_ca: Some(file.clone()), ..good.clone() }, file));
    }
    cases.push((BrokerTls { key: other_key.clone(), ..good.clone() }, &other_key));
    cases.push((BrokerTls { key: certificate.clone(), ..good.clone() }, &certificate));
    for (tls, named) in cases {
        let fault = EmbeddedBroker::start(BrokerConfig { tls: Some(tls), ..local() }).expect_err("unusable");
        assert_eq!(fault.kind, FaultKind::InvalidArgument, "{fault}");
        assert!(fault.detail.contains(named.to_str().unwrap()), "{fault}");
        println!("{fault}");
    }
}
