//! What one link may do and has: commands in, replies out. No socket in here, and time only bounds work.
//!
//! Every request gets exactly one answer, an error where it cannot be served, so that no client waits for its own
//! time-out. Dropping a session ends its producers and consumers.

mod consume;
mod lookup;
mod produce;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::BytesMut;
use pulsar::message::proto::{BaseCommand, CommandConnect, ServerError};
use tokio::sync::Notify;

use super::Broker;
use super::frame::{BadFrame, Frame, put_command};
use super::names::{NAME_BYTES_MAX, full_name};
use super::outbox::Outbox;
use super::replies;
use super::store::{Refused, Seat};
use lookup::LastPattern;
use produce::OpenProducer;

/// Most producers, and most consumers, of one link.
const ENDPOINTS_PER_LINK_MAX: usize = 4096;
/// Messages are added to a link's output until it holds this much. What waits longer stays in the topic's log.
const OUTPUT_BYTES_FULL: usize = 256 << 10;
/// No command is carried out while more than this wait in the outbox, of which each may be an answer.
const OUTBOX_COMMANDS_MAX: usize = 256;

/// One link's state at the broker.
#[derive(Debug)]
pub(super) struct Session {
    broker: Arc<Broker>,
    link: u64,
    /// Where the client reached us, `host:port`: what it is told to use.
    reached: String,
    /// What the broker has to say by itself.
    outbox: Arc<Outbox>,
    connected: bool,
    producers: BTreeMap<u64, OpenProducer>,
    consumers: BTreeMap<u64, Seat>,
    last_pattern: LastPattern,
}

/// Why a link is closed.
pub(super) struct Close {
    pub(super) reason: String,
    /// What came is no frame, or is too large.
    pub(super) bad_frame: bool,
}

impl Close {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), bad_frame: false }
    }
}

impl From<BadFrame> for Close {
    fn from(BadFrame(reason): BadFrame) -> Self {
        Self { reason, bad_frame: true }
    }
}

impl Session {
    /// The session of a link. `wake` is notified when there is something for [`Session::fill`] to add.
    pub(super) fn new(broker: Arc<Broker>, link: u64, reached: String, wake: Arc<Notify>) -> Self {
        let outbox = Arc::new(Outbox::new(wake));
        let (producers, consumers) = (BTreeMap::new(), BTreeMap::new());
        let last_pattern = LastPattern::default();
        Self { broker, link, reached, outbox, connected: false, producers, consumers, last_pattern }
    }

    /// Whether the client has connected, with the right token where one is wanted.
    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// Whether the client leaves so much unread that no command of its may be carried out.
    pub(super) fn is_behind(&self) -> bool {
        self.outbox.commands() >= OUTBOX_COMMANDS_MAX
    }

    /// Carries out one command and appends the answer to `out`.
    ///
    /// # Errors
    /// When the link must be closed, after `out` is written.
    pub(super) fn handle(&mut self, frame: Frame, out: &mut BytesMut) -> Result<(), Close> {
        let Frame { command, tail, refused } = frame;
        if let Some(connect) = command.connect {
            return self.connect(&connect, out);
        }
        if !self.connected {
            return Err(Close::new("a command before CONNECT"));
        }
        if let Some(send) = command.send {
            self.send(&send, refused.map_or(Ok(tail), Err), out);
        } else if let Some(ack) = command.ack {
            self.ack(&ack, out);
        } else if let Some(flow) = command.flow {
            self.flow(flow.consumer_id, flow.message_permits);
        } else if let Some(redeliver) = command.redeliver_unacknowledged_messages {
            self.redeliver(&redeliver);
        } else if command.ping.is_some() {
            put_command(out, replies::pong());
        } else if command.pong.is_none() {
            self.request(command, out);
        }
        Ok(())
    }

    /// Appends what the broker has to say by itself, and messages that the link's consumers are ready to take, until
    /// `out` is full.
    pub(super) fn fill(&mut self, out: &mut BytesMut) {
        while out.len() < OUTPUT_BYTES_FULL {
            self.outbox.drain(out, OUTPUT_BYTES_FULL);
            let stalled = self.outbox.take_stalled();
            if stalled.is_empty() {
                return;
            }
            let mut store = self.broker.store();
            for seat in stalled.iter().filter_map(|consumer_id| self.consumers.get(consumer_id)) {
                store.resume(seat);
            }
        }
    }

    fn connect(&mut self, connect: &CommandConnect, out: &mut BytesMut) -> Result<(), Close> {
        if self.connected {
            return Err(Close::new("a second CONNECT"));
        }
        let method = connect.auth_method_name.as_deref().unwrap_or_default();
        let shown = connect.auth_data.as_deref().unwrap_or_default();
        if let Err(reason) = self.broker.admission.check(method, shown) {
            tracing::warn!(link = self.link, reason, "the embedded broker does not admit a client");
            let closing = Close::new(format!("authentication failed: {reason}"));
            put_command(out, replies::error(replies::NO_REQUEST, Refused(ServerError::AuthenticationError, reason)));
            return Err(closing);
        }
        self.connected = true;
        let version = connect.protocol_version.unwrap_or_default();
        put_command(out, replies::connected(version, self.broker.config.message_bytes_max));
        Ok(())
    }

    /// Commands that carry a request id and want one reply.
    fn request(&mut self, command: BaseCommand, out: &mut BytesMut) {
        let reply = if let Some(request) = command.partition_metadata {
            replies::partitions(request.request_id, full_name(&request.topic).map(drop))
        } else if let Some(request) = command.lookup_topic {
            replies::lookup(request.request_id, full_name(&request.topic).map(|_| self.broker.url_for(&self.reached)))
        } else if let Some(request) = command.producer {
            self.open_producer(request)
        } else if let Some(request) = command.subscribe {
            let id = request.request_id;
            answer(id, self.subscribe(request))
        } else if let Some(request) = command.close_producer {
            self.close_producer(request.producer_id);
            replies::success(request.request_id)
        } else if let Some(request) = command.close_consumer {
            self.close_consumer(request.consumer_id);
            replies::success(request.request_id)
        } else if let Some(request) = command.unsubscribe {
            answer(request.request_id, self.unsubscribe(request.consumer_id))
        } else if let Some(request) = command.seek {
            let reply = answer(request.request_id, self.seek(&request));
            // Behind the order to come back, which is for the consumer that asked too, as at Apache Pulsar.
            return self.outbox.push_command(reply);
        } else if let Some(request) = command.get_last_message_id {
            self.last_message_id(request.consumer_id, request.request_id)
        } else if let Some(request) = command.consumer_stats {
            self.stats(request.consumer_id, request.request_id)
        } else if let Some(request) = command.get_topics_of_namespace {
            self.topics_of(&request)
        } else if let Some(request) = command.get_schema {
            self.get_schema(&request)
        } else if let Some(request) = command.get_or_create_schema {
            self.get_or_create_schema(request)
        } else {
            let detail = format!("the embedded broker does not know command {}", command.r#type);
            replies::error(request_id_of(&command), Refused(ServerError::NotAllowedError, detail))
        };
        put_command(out, reply);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for producer_id in self.producers.keys().copied().collect::<Vec<_>>() {
            self.close_producer(producer_id);
        }
        for consumer_id in self.consumers.keys().copied().collect::<Vec<_>>() {
            self.close_consumer(consumer_id);
        }
        tracing::trace!(link = self.link, "session ended");
    }
}

fn answer(request_id: u64, result: Result<(), Refused>) -> BaseCommand {
    result.map_or_else(|refused| replies::error(request_id, refused), |()| replies::success(request_id))
}

fn check_endpoint(open: usize, name: &str) -> Result<(), Refused> {
    if open >= ENDPOINTS_PER_LINK_MAX {
        return Err(Refused(ServerError::TooManyRequests, format!("{open} are open on this link already")));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(Refused(ServerError::NotAllowedError, format!("a name of {} bytes is too long", name.len())));
    }
    Ok(())
}

/// The id to answer a command with that the broker does not know, so that its sender does not wait for a time-out.
fn request_id_of(command: &BaseCommand) -> u64 {
    let ids = [
        command.new_txn.as_ref().map(|request| request.request_id),
        command.add_partition_to_txn.as_ref().map(|request| request.request_id),
        command.add_subscription_to_txn.as_ref().map(|request| request.request_id),
        command.end_txn.as_ref().map(|request| request.request_id),
        command.end_txn_on_partition.as_ref().map(|request| request.request_id),
        command.end_txn_on_subscription.as_ref().map(|request| request.request_id),
        command.tc_client_connect_request.as_ref().map(|request| request.request_id),
    ];
    ids.into_iter().flatten().next().unwrap_or(replies::NO_REQUEST)
}
