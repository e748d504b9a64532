//! One link's task: the TLS handshake, bytes in, bytes out, time limits.
//!
//! There is one output buffer and no queue. Messages are added to it only while it is nearly empty, and no command
//! is read while the client does not take its answers, so a slow client holds a bounded amount of memory.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use pulsar::message::proto::ServerError;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_rustls::server::TlsStream;

use super::frame::{put_command, refuse_receipts, take_frame};
use super::session::{Close, Session};
use super::store::{Outcome, Refused};
use super::{Broker, replies, tls};

/// Largest frame before the client has shown its token.
const FRAME_BYTES_BEFORE_CONNECT_MAX: usize = 16 << 10;
/// Room in a frame for what surrounds the payload: more than command and metadata may have, so that who sends too much
/// of either is told.
const FRAME_BYTES_SLACK: usize = 1 << 20;
/// No command is read or carried out while more than this waits to be sent.
const OUTPUT_BYTES_STALLED: usize = 1 << 20;
/// How long a link's commands may be carried out before it is the other links' turn.
const TURN_MAX: Duration = Duration::from_millis(2);
/// Least room to read into.
const READ_BYTES: usize = 16 << 10;
/// How long the last words of a link that is closed may take.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

/// Serves one link until it ends, the broker stops, or a limit is passed.
pub(super) async fn serve(broker: Arc<Broker>, stream: TcpStream, link: u64, mut stop: watch::Receiver<bool>) {
    let mut state = Link {
        peer: stream.peer_addr().ok(),
        pending: Some(Pending(broker.clone())),
        // One time limit for the handshake and the token together.
        silent_until: Instant::now() + broker.config.connect_timeout,
        stop: stop.clone(),
        broker,
        number: link,
    };
    let _ = stream.set_nodelay(true);
    let opened = tokio::select! {
        opened = state.open(stream) => opened,
        _ = stop.wait_for(|stop| *stop) => return,
    };
    match opened {
        Ok((Opened::Plain(stream), local)) => state.serve(stream, local.to_string()).await,
        Ok((Opened::Tls(stream), local)) => {
            // The certificate is valid for the name that the client used, so that is the name to tell it.
            let name = stream.get_ref().1.server_name().map(|name| format!("{name}:{}", local.port()));
            state.serve(*stream, name.unwrap_or_else(|| local.to_string())).await;
        }
        Err(Close { reason, .. }) => tracing::debug!(link, reason, "broker link closed before it was open"),
    }
}

/// What one link's task has beside its stream.
struct Link {
    broker: Arc<Broker>,
    number: u64,
    peer: Option<SocketAddr>,
    /// Until it has shown its token.
    pending: Option<Pending>,
    silent_until: Instant,
    stop: watch::Receiver<bool>,
}

enum Opened {
    Plain(AckingStream),
    Tls(Box<TlsStream<AckingStream>>),
}

/// Answers that must not leave before what they say is kept. Nothing is read or handed out meanwhile, so that all
/// commands and answers stay in their order.
struct Held {
    kept: oneshot::Receiver<Outcome>,
    answers: BytesMut,
}

/// Counts a link that has not shown its token yet.
struct Pending(Arc<Broker>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.link_settled();
    }
}

impl Link {
    /// Finds out what the client speaks, and carries out the TLS handshake where that is wanted. Gives the address
    /// that the client reached, too.
    async fn open(&mut self, stream: TcpStream) -> Result<(Opened, SocketAddr), Close> {
        let (local, peer) = match (stream.local_addr(), stream.peer_addr()) {
            (Ok(local), Ok(peer)) => (local, peer),
            _ => return Err(Close::new("it was closed at once".to_owned())),
        };
        let until = self.silent_until;
        let timed_out = |_| Close::new(format!("{peer} was silent for too long"));
        let speaks_tls = timeout_at(until, tls::speaks_tls(&stream)).await.map_err(timed_out)?;
        let speaks_tls = speaks_tls.ok_or_else(|| Close::new(format!("{peer} closed it without a word")))?;
        let mut stream = AckingStream(stream);
        match (&self.broker.tls, speaks_tls) {
            (None, false) => Ok((Opened::Plain(stream), local)),
            (None, true) => {
                let reason = "a client speaks TLS, and this port does not: use pulsar://";
                tracing::warn!(%peer, "the embedded broker closes a link: {reason}");
                Err(Close::new(reason))
            }
            (Some(_), false) => {
                let reason = "this port speaks TLS: use pulsar+ssl://";
                tracing::warn!(%peer, "the embedded broker closes a link of a client without TLS: {reason}");
                let mut out = BytesMut::new();
                let refused = Refused(ServerError::NotAllowedError, reason.to_owned());
                put_command(&mut out, replies::error(replies::NO_REQUEST, refused));
                // What is left unread when a socket is closed would take the answer with it.
                let _ = timeout_at(until, stream.read(&mut [0; READ_BYTES])).await;
                farewell(&mut stream, &mut out).await;
                Err(Close::new(reason))
            }
            (Some(acceptor), true) => match timeout_at(until, acceptor.accept(stream)).await.map_err(timed_out)? {
                Ok(stream) => Ok((Opened::Tls(Box::new(stream)), local)),
                Err(error) => {
                    tracing::warn!(%peer, %error, "the embedded broker closes a link: its TLS handshake failed");
                    Err(Close::new(error.to_string()))
                }
            },
        }
    }

    /// Serves an open stream. `reached` is the `host:port` that the client used, as far as it is known.
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(mut self, mut stream: S, reached: String) {
        let wake = Arc::new(Notify::new());
        let mut session = Session::new(self.broker.clone(), self.number, reached, wake.clone());
        let mut out = BytesMut::new();
        let mut stop = self.stop.clone();
        let close = tokio::select! {
            close = self.run(&mut stream, &mut session, &mut out, &wake) => close,
            _ = stop.wait_for(|stop| *stop) => Close::new("the broker stops"),
        };
        self.broker.tell_closed(self.number, self.peer, &close);
        // Its producers and consumers are gone before the client can notice, so that it can come back at once.
        drop(session);
        farewell(&mut stream, &mut out).await;
    }

    async fn run<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        session: &mut Session,
        out: &mut BytesMut,
        wake: &Notify,
    ) -> Close {
        let broker = self.broker.clone();
        let keep_alive = broker.config.keep_alive;
        let (mut asked, mut unflushed) = (false, false);
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut input = BytesMut::new();
        // Whether commands may have come that wait for the client to take its answers, or for other links' turns.
        let mut waiting = false;
        let mut held: Option<Held> = None;
        loop {
            if held.is_none() {
                session.fill(out);
            }
            let room = OUTPUT_BYTES_STALLED.saturating_sub(out.len());
            tokio::select! {
                more = more_input(&mut reader, &mut input, waiting),
                    if held.is_none() && room > 0 && !session.is_behind() =>
                {
                    match more {
                        Ok(true) => {}
                        Ok(false) => return Close::new("the client closed it"),
                        Err(error) => return Close::new(error.to_string()),
                    }
                    let mut answers = BytesMut::new();
                    let handled = handle_some(&broker, session, &mut input, &mut answers, room);
                    held = broker.store().kept().map(|kept| Held { kept, answers: answers.split() });
                    out.unsplit(answers);
                    waiting = match handled {
                        Ok(waiting) => waiting,
                        Err(close) => return close,
                    };
                    if session.is_connected() {
                        self.pending = None;
                        asked = false;
                        self.silent_until = Instant::now() + keep_alive;
                    }
                }
                written = write_some(&mut writer, out, &mut unflushed), if unflushed || !out.is_empty() => {
                    if let Err(error) = written {
                        return Close::new(error.to_string());
                    }
                }
                released = released(&mut held), if held.is_some() => {
                    held = None;
                    out.extend_from_slice(&released);
                }
                () = wake.notified(), if held.is_none() => {}
                () = sleep_until(self.silent_until) => {
                    if asked || self.pending.is_some() {
                        return Close::new("silent for too long".to_owned());
                    }
                    put_command(out, replies::ping());
                    asked = true;
                    self.silent_until = Instant::now() + keep_alive;
                }
            }
        }
    }
}

/// Waits for more to carry out, and returns whether there may be any: bytes from the client, or, when commands have
/// come already, a turn after the other links'.
async fn more_input<R: AsyncRead + Unpin>(
    reader: &mut R,
    input: &mut BytesMut,
    waiting: bool,
) -> std::io::Result<bool> {
    if waiting {
        tokio::task::yield_now().await;
        return Ok(true);
    }
    Ok(reader.read_buf(input).await? > 0)
}

/// The answers that were held, when what they say is kept; with errors instead of receipts when it is not.
async fn released(held: &mut Option<Held>) -> BytesMut {
    let Some(held) = held else { return std::future::pending().await };
    let outcome = (&mut held.kept).await;
    let mut answers = held.answers.split();
    if let Err(reason) = outcome.unwrap_or_else(|_| Err("the embedded broker stops".to_owned())) {
        refuse_receipts(&mut answers, &reason);
    }
    answers
}

/// Writes a part of `out`. What TLS holds back counts as not flushed.
async fn write_some<W: AsyncWrite + Unpin>(
    writer: &mut W,
    out: &mut BytesMut,
    unflushed: &mut bool,
) -> std::io::Result<()> {
    if !out.is_empty() {
        writer.write_buf(out).await?;
        *unflushed = true;
    }
    if out.is_empty() {
        writer.flush().await?;
        *unflushed = false;
    }
    Ok(())
}

/// Sends what is left, and closes.
async fn farewell<S: AsyncWrite + Unpin>(stream: &mut S, out: &mut BytesMut) {
    let _ = timeout(FAREWELL_MAX, async {
        let _ = stream.write_all_buf(out).await;
        let _ = stream.shutdown().await;
    })
    .await;
}

/// A stream that acknowledges what it has read at once.
///
/// Clients that leave Nagle's algorithm on, as the `pulsar` crate does, hold a command back until what they sent
/// before is acknowledged. FLOW and ACK have no answer that would carry that, and the system would wait 40 ms for one.
/// It forgets the setting, so it is made after each read.
struct AckingStream(TcpStream);

impl AsyncRead for AckingStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.0).poll_read(cx, buf);
        if buf.filled().len() > before {
            let _ = rustix::net::sockopt::set_tcp_quickack(&self.0, true);
        }
        polled
    }
}

impl AsyncWrite for AckingStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Carries out commands that have come whole: until `out` holds `room` bytes, or their turn is over. Returns whether
/// there may be more.
pub(super) fn handle_some(
    broker: &Broker,
    session: &mut Session,
    input: &mut BytesMut,
    out: &mut BytesMut,
    room: usize,
) -> Result<bool, Close> {
    let started = Instant::now();
    loop {
        let frame_bytes_max = if session.is_connected() {
            broker.config.message_bytes_max + FRAME_BYTES_SLACK
        } else {
            FRAME_BYTES_BEFORE_CONNECT_MAX
        };
        match take_frame(input, frame_bytes_max)? {
            Some(frame) => session.handle(frame, out)?,
            None => break,
        }
        if out.len() >= room || session.is_behind() || started.elapsed() >= TURN_MAX {
            return Ok(true);
        }
    }
    // Room grows with what has come, never with what a size field promises.
    if input.is_empty() && input.capacity() > broker.config.message_bytes_max / 4 {
        *input = BytesMut::new();
    }
    input.reserve(READ_BYTES.max(input.len()));
    Ok(false)
}

#[cfg(test)]
mod tests {
    use pulsar::message::Codec;
    use pulsar::message::proto::base_command::Type;
    use pulsar::message::proto::{
        BaseCommand, CommandConnect, CommandGetSchema, CommandGetTopicsOfNamespace, CommandSeek, Schema,
    };
    use tokio_util::codec::Decoder;

    use super::*;
    use crate::broker::BrokerConfig;

    const TOPIC: &str = "persistent://public/default/t";
    const SCHEMA_BYTES: usize = 120_000;

    /// A broker, and a session at it that has connected.
    fn connected() -> (Arc<Broker>, Session) {
        let (broker, _) = Broker::new(BrokerConfig::new(([127, 0, 0, 1], 0).into())).unwrap();
        let broker = Arc::new(broker);
        let mut session = Session::new(broker.clone(), 1, "localhost:6650".to_owned(), Arc::new(Notify::new()));
        let connect = BaseCommand { connect: Some(CommandConnect::default()), ..command(Type::Connect) };
        let mut input = frames([connect]);
        while handle_some(&broker, &mut session, &mut input, &mut BytesMut::new(), usize::MAX).is_ok_and(|more| more) {}
        assert!(session.is_connected());
        (broker, session)
    }

    fn command(kind: Type) -> BaseCommand {
        BaseCommand { r#type: kind as i32, ..Default::default() }
    }

    fn frames(commands: impl IntoIterator<Item = BaseCommand>) -> BytesMut {
        let mut out = BytesMut::new();
        commands.into_iter().for_each(|command| put_command(&mut out, command));
        out
    }

    fn answers(out: &mut BytesMut) -> Vec<BaseCommand> {
        std::iter::from_fn(|| Codec.decode(out).unwrap()).map(|message| message.command).collect()
    }

    #[test]
    fn small_requests_for_large_answers_wait_until_those_are_taken() {
        let (broker, mut session) = connected();
        let schema = Schema { schema_data: vec![7; SCHEMA_BYTES], ..Default::default() };
        broker.store().add_schema(TOPIC, schema).unwrap();
        let get = |request_id| CommandGetSchema { request_id, topic: TOPIC.to_owned(), schema_version: None };
        let mut input =
            frames((0..500).map(|id| BaseCommand { get_schema: Some(get(id)), ..command(Type::GetSchema) }));
        let mut ids = Vec::new();
        let mut more = true;
        while more {
            let mut out = BytesMut::new();
            more =
                handle_some(&broker, &mut session, &mut input, &mut out, OUTPUT_BYTES_STALLED).is_ok_and(|more| more);
            assert!(out.len() < OUTPUT_BYTES_STALLED + SCHEMA_BYTES + 1000, "{} bytes", out.len());
            ids.extend(answers(&mut out).into_iter().map(|answer| answer.get_schema_response.unwrap().request_id));
        }
        assert_eq!(ids, (0..500).collect::<Vec<_>>());
    }

    #[test]
    fn answers_that_the_outbox_holds_are_bounded_too() {
        let (broker, mut session) = connected();
        let seek = |request_id| CommandSeek { request_id, ..Default::default() };
        let mut input = frames((0..2000).map(|id| BaseCommand { seek: Some(seek(id)), ..command(Type::Seek) }));
        // The client takes nothing.
        for _ in 0..100 {
            assert!(handle_some(&broker, &mut session, &mut input, &mut BytesMut::new(), 1 << 20).is_ok());
        }
        assert!(session.is_behind() && !input.is_empty());
        let (mut ids, mut more) = (Vec::new(), true);
        while more {
            let mut out = BytesMut::new();
            session.fill(&mut out);
            ids.extend(answers(&mut out).into_iter().map(|answer| answer.error.unwrap().request_id));
            more = handle_some(&broker, &mut session, &mut input, &mut out, 1 << 20).is_ok_and(|more| more);
        }
        let mut out = BytesMut::new();
        session.fill(&mut out);
        ids.extend(answers(&mut out).into_iter().map(|answer| answer.error.unwrap().request_id));
        assert_eq!(ids, (0..2000).collect::<Vec<_>>());
    }

    #[test]
    fn costly_requests_leave_other_links_their_turns() {
        let (broker, mut session) = connected();
        let get = |request_id: u64| CommandGetTopicsOfNamespace {
            request_id,
            namespace: "public/default".to_owned(),
            topics_pattern: Some(format!(r"(?:\pL{{20}}){{60}}{request_id}")),
            ..Default::default()
        };
        let kind = command(Type::GetTopicsOfNamespace);
        let mut input =
            frames((0..320).map(|id| BaseCommand { get_topics_of_namespace: Some(get(id)), ..kind.clone() }));
        let mut out = BytesMut::new();
        let started = Instant::now();
        assert!(handle_some(&broker, &mut session, &mut input, &mut out, usize::MAX).is_ok_and(|more| more));
        assert!(answers(&mut out).len() < 320, "all were carried out in {:?}", started.elapsed());
    }
}
