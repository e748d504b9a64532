//! A link's producers.

use bytes::BytesMut;
use pulsar::message::proto::{
    BaseCommand, CommandProducer, CommandSend, CommandSendReceipt, MessageIdData, ProducerAccessMode, ServerError,
};

use super::super::frame::{Tail, put_command, put_receipt};
use super::super::names::full_name;
use super::super::producers::{Admission, Producer};
use super::super::store::Refused;
use super::super::{now_ms, replies, schema};
use super::{Session, check_endpoint};

/// A producer of this link.
#[derive(Debug)]
pub(super) struct OpenProducer {
    topic: String,
    name: String,
    key: u64,
    /// How it was taken in, for a request that is repeated.
    admission: Admission,
    schema_version: Vec<u8>,
}

/// Why a message was not stored.
enum NotStored {
    Refused(Refused),
    /// The client was told that its producer ended; it will send again.
    ProducerEnded,
}

impl From<Refused> for NotStored {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl Session {
    pub(super) fn open_producer(&mut self, request: CommandProducer) -> BaseCommand {
        let (id, producer_id) = (request.request_id, request.producer_id);
        let opened = self.try_open_producer(request).map(|()| self.producers.get(&producer_id));
        match opened {
            Ok(Some(open)) => {
                replies::producer_success(id, open.name.clone(), open.admission, open.schema_version.clone())
            }
            Ok(None) => replies::error(id, no_producer()),
            Err(refused) => replies::error(id, refused),
        }
    }

    fn try_open_producer(&mut self, request: CommandProducer) -> Result<(), Refused> {
        let topic = full_name(&request.topic)?;
        let mode = request.producer_access_mode.unwrap_or_default();
        let mode = ProducerAccessMode::try_from(mode).map_err(|_| {
            Refused(ServerError::NotAllowedError, format!("the embedded broker does not know access mode {mode}"))
        })?;
        let asked = request.producer_name.filter(|name| !name.is_empty());
        if let Some(open) = self.producers.get(&request.producer_id)
            && self.broker.store().has_producer(&open.topic, &open.name, open.key)
        {
            // A repeated request after a lost answer.
            if open.topic == topic && asked.as_ref().is_none_or(|name| *name == open.name) {
                return Ok(());
            }
            return Err(Refused(ServerError::NotAllowedError, "this producer id is in use on this link".to_owned()));
        }
        check_endpoint(self.producers.len(), asked.as_deref().unwrap_or_default())?;
        let user_named = asked.is_some() && request.user_provided_producer_name.unwrap_or(true);
        let mut store = self.broker.store();
        let schema_version = schema::given(request.schema)
            .map(|schema| store.add_schema(&topic, schema))
            .transpose()?
            .unwrap_or_default();
        let name = asked.unwrap_or_else(|| store.new_name());
        let key = store.new_key();
        let producer = Producer {
            key,
            producer_id: request.producer_id,
            request_id: request.request_id,
            name: name.clone(),
            user_named,
            mode,
            epoch: request.epoch.unwrap_or_default(),
            topic_epoch: request.topic_epoch,
            schema_version: schema_version.clone(),
            outbox: self.outbox.clone(),
        };
        let admission = store.add_producer(&topic, producer)?;
        if let Some(subscription) = request.initial_subscription_name.filter(|name| !name.is_empty()) {
            check_endpoint(0, &subscription)?;
            store.ensure_subscription(&topic, &subscription)?;
        }
        drop(store);
        let open = OpenProducer { topic, name, key, admission, schema_version };
        self.producers.insert(request.producer_id, open);
        Ok(())
    }

    /// Stores a message, and answers. Without tail, it says why that was left out.
    pub(super) fn send(&mut self, send: &CommandSend, tail: Result<Option<Tail>, Refused>, out: &mut BytesMut) {
        match self.store_message(send, tail) {
            Ok(id) => {
                let receipt = CommandSendReceipt {
                    producer_id: send.producer_id,
                    sequence_id: send.sequence_id,
                    message_id: Some(id),
                    highest_sequence_id: send.highest_sequence_id,
                };
                put_receipt(out, &receipt);
            }
            Err(NotStored::Refused(refused)) => {
                put_command(out, replies::send_error(send.producer_id, send.sequence_id, refused));
            }
            Err(NotStored::ProducerEnded) => {}
        }
    }

    fn store_message(
        &mut self,
        send: &CommandSend,
        tail: Result<Option<Tail>, Refused>,
    ) -> Result<MessageIdData, NotStored> {
        let producer = self.producers.get(&send.producer_id).ok_or_else(no_producer)?;
        let tail =
            tail?.ok_or_else(|| Refused(ServerError::NotAllowedError, "a message without payload frame".to_owned()))?;
        let bytes_max = self.broker.config.message_bytes_max;
        if tail.payload_bytes > bytes_max {
            let detail = format!("a message of {} bytes; the limit is {bytes_max}", tail.payload_bytes);
            return Err(Refused(ServerError::NotAllowedError, detail).into());
        }
        let mut store = self.broker.store();
        if !store.may_send(&producer.topic, &producer.name, producer.key) {
            if store.has_producer(&producer.topic, &producer.name, producer.key) {
                let detail = "this producer waits for exclusive access and may not send yet".to_owned();
                return Err(Refused(ServerError::NotAllowedError, detail).into());
            }
            return Err(NotStored::ProducerEnded);
        }
        Ok(store.append(&producer.topic, &tail, now_ms())?)
    }

    pub(super) fn close_producer(&mut self, producer_id: u64) {
        if let Some(producer) = self.producers.remove(&producer_id) {
            self.broker.store().remove_producer(&producer.topic, &producer.name, producer.key);
        }
    }
}

fn no_producer() -> Refused {
    Refused(ServerError::NotAllowedError, "no such producer on this link".to_owned())
}
