//! The first exchange with a broker, by hand: the client crate tells neither where it failed nor what it was told.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use gradwire_control::BrokerAccess;
use pulsar::message::proto::{BaseCommand, CommandConnect, ServerError, base_command};
use pulsar::message::{Codec, Message};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tokio_util::codec::{Decoder as _, Encoder as _};

const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 64 << 10;
const PROTOCOL_VERSION: i32 = 12;

/// How far it came, and why no further.
#[derive(Debug)]
pub(super) enum HandshakeError {
    Url(String),
    Unreachable(String),
    /// The file with the certificates to trust.
    Trust(String),
    Tls(String),
    NotPulsar(String),
    Refused {
        error: String,
        message: String,
    },
}

/// What the bytes go over.
#[derive(Debug)]
pub(super) enum Transport {
    Plain,
    Tls { version: &'static str, name: String },
}

/// What the broker said of itself.
#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) server_version: String,
    pub(super) message_bytes_max: Option<u64>,
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// Connects and introduces us. Ends within about 20 s.
pub(super) async fn greet(access: &BrokerAccess, token: Option<&str>) -> Result<(Transport, Greeting), HandshakeError> {
    let (tls, host, port) = parse(&access.url).ok_or_else(|| HandshakeError::Url("not a broker's URL".to_owned()))?;
    let stream = dial(&host, port).await?;
    let (transport, mut stream): (_, Box<dyn Stream>) = if tls {
        let connector = connector(access)?;
        let (version, stream) = secure(&connector, stream, &host).await?;
        (Transport::Tls { version, name: host }, Box::new(stream))
    } else {
        (Transport::Plain, Box::new(stream))
    };
    let answer = timeout(ANSWER_TIME_MAX, introduce(&mut *stream, token)).await;
    let answer = answer.map_err(|_| {
        HandshakeError::NotPulsar(format!("it accepts links, but answers nothing for {} s", ANSWER_TIME_MAX.as_secs()))
    })?;
    let command = answer.map_err(|error| HandshakeError::NotPulsar(error.to_string()))?;
    if let Some(refusal) = command.error {
        let error = ServerError::try_from(refusal.error).map_or("an error", |error| error.as_str_name());
        return Err(HandshakeError::Refused { error: error.to_owned(), message: refusal.message });
    }
    match command.connected {
        Some(connected) => Ok((
            transport,
            Greeting {
                server_version: connected.server_version,
                message_bytes_max: connected.max_message_size.and_then(|limit| u64::try_from(limit).ok()),
            },
        )),
        None => Err(HandshakeError::NotPulsar("it answers something else than is asked".to_owned())),
    }
}

/// Whether with TLS, host and port. Of several hosts the first.
fn parse(url: &str) -> Option<(bool, String, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let (tls, default_port) = match scheme {
        "pulsar" => (false, 6650),
        "pulsar+ssl" => (true, 6651),
        _ => return None,
    };
    let authority = rest.split(['/', '?', ',']).next()?;
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().ok()?),
        _ => (authority, default_port),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (tls, host.to_owned(), port))
}

async fn dial(host: &str, port: u16) -> Result<TcpStream, HandshakeError> {
    match timeout(CONNECT_TIME_MAX, TcpStream::connect((host, port))).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(HandshakeError::Unreachable(error.to_string())),
        Err(_) => Err(HandshakeError::Unreachable(format!("no answer within {} s", CONNECT_TIME_MAX.as_secs()))),
    }
}

/// Trusts what the ranks trust.
fn connector(access: &BrokerAccess) -> Result<TlsConnector, HandshakeError> {
    let mut roots = RootCertStore::empty();
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    if let Some(path) = &access.trust {
        let wrong = |error: &dyn std::fmt::Display| HandshakeError::Trust(format!("{}: {error}", path.display()));
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
        let before = roots.len();
        for certificate in certificates {
            roots.add(certificate.map_err(|error| wrong(&error))?).map_err(|error| wrong(&error))?;
        }
        if roots.len() == before {
            return Err(wrong(&"it holds no certificate"));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| HandshakeError::Tls(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

async fn secure(
    connector: &TlsConnector,
    stream: TcpStream,
    host: &str,
) -> Result<(&'static str, impl Stream + use<>), HandshakeError> {
    let name = ServerName::try_from(host.to_owned()).map_err(|error| HandshakeError::Tls(error.to_string()))?;
    let stream = timeout(ANSWER_TIME_MAX, connector.connect(name, stream)).await;
    let stream = stream
        .map_err(|_| HandshakeError::Tls("the broker does not answer as TLS does".to_owned()))?
        .map_err(|error| HandshakeError::Tls(error.to_string()))?;
    let version = match stream.get_ref().1.protocol_version() {
        Some(rustls::ProtocolVersion::TLSv1_3) => "TLS 1.3",
        Some(rustls::ProtocolVersion::TLSv1_2) => "TLS 1.2",
        _ => "TLS",
    };
    Ok((version, stream))
}

async fn introduce(stream: &mut dyn Stream, token: Option<&str>) -> io::Result<BaseCommand> {
    let invalid = |error: pulsar::error::ConnectionError| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let connect = CommandConnect {
        client_version: concat!("gradwire-", env!("CARGO_PKG_VERSION")).to_owned(),
        protocol_version: Some(PROTOCOL_VERSION),
        auth_method_name: token.map(|_| "token".to_owned()),
        auth_data: token.map(|token| token.as_bytes().to_vec()),
        ..Default::default()
    };
    let command =
        BaseCommand { r#type: base_command::Type::Connect as i32, connect: Some(connect), ..Default::default() };
    let mut bytes = BytesMut::new();
    Codec.encode(Message { command, payload: None }, &mut bytes).map_err(invalid)?;
    stream.write_all(&bytes).await?;
    bytes.clear();
    while bytes.len() < ANSWER_BYTES_MAX && stream.read_buf(&mut bytes).await? > 0 {
        if let Some(answer) = Codec.decode(&mut bytes).map_err(invalid)? {
            return Ok(answer.command);
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closes the link without an answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_their_usual_ports() {
        let is = |tls, host: &str, port| Some((tls, host.to_owned(), port));
        assert_eq!(parse("pulsar://h"), is(false, "h", 6650));
        assert_eq!(parse("pulsar+ssl://h.example/"), is(true, "h.example", 6651));
        assert_eq!(parse("pulsar://h:1,i:2"), is(false, "h", 1));
        assert_eq!(parse("pulsar://[::1]"), is(false, "::1", 6650));
        assert_eq!(parse("pulsar://[::1]:7"), is(false, "::1", 7));
        for bad in ["", "h:1", "http://h", "pulsar://", "pulsar://:1", "pulsar://h:port"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
