//! Finds out why a broker cannot be used: the `pulsar` crate says only that it cannot.

use std::time::Duration;

use bytes::BytesMut;
use pulsar::message::proto::{BaseCommand, CommandConnect, ServerError, base_command};
use pulsar::message::{Codec, Message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::codec::{Decoder, Encoder};

use crate::access::{BrokerAccess, Token};
use crate::link::{LinkError, is_refusal};

const PROBE_MAX: Duration = Duration::from_secs(2);
const ANSWER_BYTES_MAX: usize = 64 << 10;
const DEFAULT_PORT: u16 = 6650;
const PROTOCOL_VERSION: i32 = 12;

/// Connects once more, by hand, and tells what goes wrong. Nothing where nothing does, or where it cannot be told
/// (over TLS).
pub(crate) async fn diagnose(access: &BrokerAccess) -> Option<LinkError> {
    let authority = access.url.strip_prefix("pulsar://")?.trim_end_matches('/');
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let address = if has_port { authority.to_owned() } else { format!("{authority}:{DEFAULT_PORT}") };
    let token = access.token.as_ref().map(Token::read).transpose().ok()?;
    match timeout(PROBE_MAX, ask(&address, token.as_deref())).await {
        Ok(Ok(None)) => None,
        Ok(Ok(Some((error, message)))) => {
            let permanent = ServerError::try_from(error).is_ok_and(is_refusal);
            let name = ServerError::try_from(error).map_or("an error", |error| error.as_str_name());
            Some(LinkError { reason: format!("it answered {name}: {message}"), permanent })
        }
        Ok(Err(error)) => Some(LinkError { reason: error.to_string(), permanent: false }),
        Err(_) => Some(LinkError { reason: "it accepts links but does not answer".to_owned(), permanent: false }),
    }
}

async fn ask(address: &str, token: Option<&str>) -> std::io::Result<Option<(i32, String)>> {
    let invalid = |error: pulsar::error::ConnectionError| {
        std::io::Error::new(std::io::ErrorKind::InvalidData, format!("it does not speak Pulsar's protocol ({error})"))
    };
    let mut stream = TcpStream::connect(address).await?;
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
            return Ok(answer.command.error.map(|error| (error.error, error.message)));
        }
    }
    Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "it closed the link without an answer"))
}
