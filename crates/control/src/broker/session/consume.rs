//! A link's consumers.

use bytes::BytesMut;
use pulsar::message::proto::command_subscribe::SubType;
use pulsar::message::proto::{
    BaseCommand, CommandAck, CommandConsumerStatsResponse, CommandRedeliverUnacknowledgedMessages, CommandSeek,
    CommandSubscribe, ServerError, command_ack,
};

use super::super::dispatch::Applicant;
use super::super::frame::put_command;
use super::super::names::full_name;
use super::super::store::{Refused, Seat, Target, no_consumer};
use super::super::{now_ms, replies, schema};
use super::{Session, check_endpoint};

impl Session {
    pub(super) fn subscribe(&mut self, mut request: CommandSubscribe) -> Result<(), Refused> {
        let topic = full_name(&request.topic)?;
        if request.subscription.is_empty() {
            return Err(Refused(ServerError::MetadataError, "Empty subscription name".to_owned()));
        }
        let kind = SubType::try_from(request.sub_type).map_err(|_| {
            let detail = format!("the embedded broker does not know subscription type {}", request.sub_type);
            Refused(ServerError::NotAllowedError, detail)
        })?;
        let mut store = self.broker.store();
        if let Some(open) = self.consumers.get(&request.consumer_id)
            && store.is_seated(open)
        {
            // A repeated request after a lost answer.
            if open.topic == topic && open.subscription == request.subscription {
                return Ok(());
            }
            return Err(Refused(ServerError::NotAllowedError, "this consumer id is in use on this link".to_owned()));
        }
        check_endpoint(self.consumers.len(), &request.subscription)?;
        check_endpoint(0, request.consumer_name())?;
        let name = request.consumer_name.take().filter(|name| !name.is_empty()).unwrap_or_else(|| store.new_name());
        let applicant = Applicant {
            key: store.new_key(),
            consumer_id: request.consumer_id,
            name,
            priority: request.priority_level.unwrap_or_default(),
            kind,
            key_shared: request.key_shared_meta.take(),
            epoch: request.consumer_epoch,
            outbox: self.outbox.clone(),
        };
        let key = applicant.key;
        let schema = schema::given(request.schema.take());
        store.subscribe(&topic, &request, schema, applicant, now_ms())?;
        drop(store);
        self.consumers.insert(request.consumer_id, Seat { topic, subscription: request.subscription, key });
        Ok(())
    }

    pub(super) fn flow(&mut self, consumer_id: u64, permits: u32) {
        if let Some(seat) = self.consumers.get(&consumer_id) {
            self.broker.store().flow(seat, permits);
        }
    }

    pub(super) fn ack(&mut self, ack: &CommandAck, out: &mut BytesMut) {
        let cumulative = ack.ack_type == command_ack::AckType::Cumulative as i32;
        let done = match self.consumers.get(&ack.consumer_id) {
            Some(seat) => self.broker.store().acknowledge(seat, &ack.message_id, cumulative),
            None => Err(no_consumer()),
        };
        if let Some(request_id) = ack.request_id {
            put_command(out, replies::ack_response(ack.consumer_id, request_id, done.err()));
        }
    }

    pub(super) fn redeliver(&mut self, redeliver: &CommandRedeliverUnacknowledgedMessages) {
        if let Some(seat) = self.consumers.get(&redeliver.consumer_id) {
            self.broker.store().redeliver(seat, &redeliver.message_ids, redeliver.consumer_epoch);
        }
    }

    pub(super) fn seek(&mut self, seek: &CommandSeek) -> Result<(), Refused> {
        let seat = self.consumers.get(&seek.consumer_id).ok_or_else(no_consumer)?;
        let target = match (&seek.message_id, seek.message_publish_time) {
            (Some(id), _) => Target::Id(id),
            (None, Some(time)) => Target::PublishTime(time),
            (None, None) => return Err(Refused(ServerError::MetadataError, "a SEEK without position".to_owned())),
        };
        self.broker.store().seek(seat, &target, now_ms())
    }

    pub(super) fn last_message_id(&self, consumer_id: u64, request_id: u64) -> BaseCommand {
        let ids = self.consumers.get(&consumer_id).and_then(|seat| self.broker.store().last_message_ids(seat));
        match ids {
            Some((last, mark)) => replies::last_message_id(request_id, last, mark),
            None => replies::error(request_id, no_consumer()),
        }
    }

    pub(super) fn stats(&self, consumer_id: u64, request_id: u64) -> BaseCommand {
        let found = self.consumers.get(&consumer_id).and_then(|seat| self.broker.store().consumer_stats(seat));
        let response = match found {
            Some((consumer, subscription)) => CommandConsumerStatsResponse {
                request_id,
                consumer_name: Some(consumer.name),
                available_permits: Some(u64::try_from(consumer.permits).unwrap_or_default()),
                unacked_messages: Some(consumer.unacked),
                blocked_consumer_on_unacked_msgs: Some(consumer.blocked),
                r#type: Some(subscription.kind.to_owned()),
                msg_backlog: Some(subscription.backlog),
                ..Default::default()
            },
            None => CommandConsumerStatsResponse {
                request_id,
                error_code: Some(ServerError::ConsumerNotFound as i32),
                error_message: Some(no_consumer().1),
                ..Default::default()
            },
        };
        replies::stats(response)
    }

    /// Ends a consumer. A subscription that is not durable goes with it.
    pub(super) fn close_consumer(&mut self, consumer_id: u64) {
        if let Some(seat) = self.consumers.remove(&consumer_id) {
            self.broker.store().detach(&seat);
        }
    }

    pub(super) fn unsubscribe(&mut self, consumer_id: u64) -> Result<(), Refused> {
        let seat = self.consumers.get(&consumer_id).ok_or_else(no_consumer)?;
        self.broker.store().unsubscribe(seat)?;
        self.consumers.remove(&consumer_id);
        Ok(())
    }
}
