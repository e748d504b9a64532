//! One link's task: bytes in, bytes out, time limits.
//!
//! There is one output buffer and no queue. Messages are added to it only while it is nearly empty, and no command
//! is read while the client does not take its answers, so a slow client holds a bounded amount of memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::Broker;
use super::frame::{put_command, take_frame};
use super::replies;
use super::session::{Close, Session};

/// Largest frame before the client has shown its token.
const FRAME_BYTES_BEFORE_CONNECT_MAX: usize = 16 << 10;
/// Room in a frame for what surrounds the payload.
const FRAME_BYTES_SLACK: usize = 64 << 10;
/// No command is read while more than this waits to be sent.
const OUTPUT_BYTES_STALLED: usize = 1 << 20;
/// Least room to read into.
const READ_BYTES: usize = 16 << 10;
/// How long the last words of a link that is closed may take.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

/// Serves one link until it ends, the broker stops, or a limit is passed.
pub(super) async fn serve(broker: Arc<Broker>, mut stream: TcpStream, link: u64, mut stop: watch::Receiver<bool>) {
    let pending = Pending(&broker);
    let Ok(local) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let wake = Arc::new(Notify::new());
    let mut session = Session::new(broker.clone(), link, local, wake.clone());
    let mut out = BytesMut::new();
    let reason = tokio::select! {
        Close(reason) = run(&broker, pending, &mut stream, &mut session, &mut out, &wake) => reason,
        _ = stop.wait_for(|stop| *stop) => "the broker stops".to_owned(),
    };
    tracing::debug!(link, reason, "broker link closed");
    // Its producers and consumers are gone before the client can notice, so that it can come back at once.
    drop(session);
    let _ = timeout(FAREWELL_MAX, async {
        let _ = stream.write_all_buf(&mut out).await;
        let _ = stream.shutdown().await;
    })
    .await;
}

/// Counts a link that has not shown its token yet.
struct Pending<'a>(&'a Broker);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.link_settled();
    }
}

async fn run(
    broker: &Broker,
    pending: Pending<'_>,
    stream: &mut TcpStream,
    session: &mut Session,
    out: &mut BytesMut,
    wake: &Notify,
) -> Close {
    let mut pending = Some(pending);
    let keep_alive = broker.config.keep_alive;
    let mut silent_until = Instant::now() + broker.config.connect_timeout;
    let mut asked = false;
    let (mut reader, mut writer) = stream.split();
    let mut input = BytesMut::new();
    loop {
        session.fill(out);
        tokio::select! {
            read = reader.read_buf(&mut input), if out.len() < OUTPUT_BYTES_STALLED => {
                match read {
                    Ok(0) => return Close("the client closed it".to_owned()),
                    Ok(_) => acknowledge_at_once(reader.as_ref()),
                    Err(error) => return Close(error.to_string()),
                }
                if let Err(close) = handle_all(broker, session, &mut input, out) {
                    return close;
                }
                if session.is_connected() {
                    pending = None;
                    asked = false;
                    silent_until = Instant::now() + keep_alive;
                }
            }
            written = writer.write_buf(out), if !out.is_empty() => {
                if let Err(error) = written {
                    return Close(error.to_string());
                }
            }
            () = wake.notified() => {}
            () = sleep_until(silent_until) => {
                if asked || pending.is_some() {
                    return Close("silent for too long".to_owned());
                }
                put_command(out, replies::ping());
                asked = true;
                silent_until = Instant::now() + keep_alive;
            }
        }
    }
}

/// Clients that leave Nagle's algorithm on, as the `pulsar` crate does, hold a command back until what they sent
/// before is acknowledged. FLOW and ACK have no answer that would carry that, and the system would wait 40 ms for one.
/// It forgets the setting, so it is made after each read.
fn acknowledge_at_once(stream: &TcpStream) {
    let _ = rustix::net::sockopt::set_tcp_quickack(stream, true);
}

fn handle_all(broker: &Broker, session: &mut Session, input: &mut BytesMut, out: &mut BytesMut) -> Result<(), Close> {
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
    }
    // Room grows with what has come, never with what a size field promises.
    if input.is_empty() && input.capacity() > broker.config.message_bytes_max / 4 {
        *input = BytesMut::new();
    }
    input.reserve(READ_BYTES.max(input.len()));
    Ok(())
}
