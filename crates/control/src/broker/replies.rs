//! What the broker says: one constructor for each command that it sends.

use pulsar::message::proto::{
    BaseCommand, CommandAckResponse, CommandActiveConsumerChange, CommandCloseConsumer, CommandCloseProducer,
    CommandConnected, CommandConsumerStatsResponse, CommandError, CommandGetLastMessageIdResponse,
    CommandGetOrCreateSchemaResponse, CommandGetSchemaResponse, CommandGetTopicsOfNamespaceResponse,
    CommandLookupTopicResponse, CommandPartitionedTopicMetadataResponse, CommandPing, CommandPong,
    CommandProducerSuccess, CommandSendError, CommandSuccess, MessageIdData, Schema, base_command::Type,
    command_lookup_topic_response, command_partitioned_topic_metadata_response,
};

use super::producers::Admission;
use super::store::Refused;

/// The highest protocol version that the broker answers with.
const PROTOCOL_VERSION_MAX: i32 = 19;
/// How the broker names itself.
const SERVER_VERSION: &str = concat!("gradwire-", env!("CARGO_PKG_VERSION"));
/// The request id of what answers no request. Clients would take a small one for one of theirs.
pub(super) const NO_REQUEST: u64 = u64::MAX;

fn command(kind: Type) -> BaseCommand {
    BaseCommand { r#type: kind as i32, ..Default::default() }
}

pub(super) fn connected(client_version: i32, message_bytes_max: usize) -> BaseCommand {
    BaseCommand {
        connected: Some(CommandConnected {
            server_version: SERVER_VERSION.to_owned(),
            protocol_version: Some(client_version.clamp(0, PROTOCOL_VERSION_MAX)),
            max_message_size: Some(message_bytes_max as i32),
        }),
        ..command(Type::Connected)
    }
}

pub(super) fn error(request_id: u64, Refused(error, message): Refused) -> BaseCommand {
    BaseCommand { error: Some(CommandError { request_id, error: error as i32, message }), ..command(Type::Error) }
}

pub(super) fn success(request_id: u64) -> BaseCommand {
    BaseCommand { success: Some(CommandSuccess { request_id, schema: None }), ..command(Type::Success) }
}

pub(super) fn ping() -> BaseCommand {
    BaseCommand { ping: Some(CommandPing {}), ..command(Type::Ping) }
}

pub(super) fn pong() -> BaseCommand {
    BaseCommand { pong: Some(CommandPong {}), ..command(Type::Pong) }
}

pub(super) fn partitions(request_id: u64, valid: Result<(), Refused>) -> BaseCommand {
    use command_partitioned_topic_metadata_response::LookupType;
    let mut response =
        CommandPartitionedTopicMetadataResponse { request_id, partitions: Some(0), ..Default::default() };
    response.response = Some(LookupType::Success as i32);
    if let Err(Refused(error, message)) = valid {
        response.partitions = None;
        response.response = Some(LookupType::Failed as i32);
        response.error = Some(error as i32);
        response.message = Some(message);
    }
    BaseCommand { partition_metadata_response: Some(response), ..command(Type::PartitionedMetadataResponse) }
}

pub(super) fn lookup(request_id: u64, url: Result<String, Refused>) -> BaseCommand {
    use command_lookup_topic_response::LookupType;
    let mut response = CommandLookupTopicResponse { request_id, authoritative: Some(true), ..Default::default() };
    match url {
        Ok(url) => {
            // Clients of a TLS port look for the other field.
            if url.starts_with("pulsar+ssl:") {
                response.broker_service_url_tls = Some(url);
            } else {
                response.broker_service_url = Some(url);
            }
            response.response = Some(LookupType::Connect as i32);
        }
        Err(Refused(error, message)) => {
            response.response = Some(LookupType::Failed as i32);
            response.error = Some(error as i32);
            response.message = Some(message);
        }
    }
    BaseCommand { lookup_topic_response: Some(response), ..command(Type::LookupResponse) }
}

pub(super) fn producer_success(
    request_id: u64,
    producer_name: String,
    admission: Admission,
    schema_version: Vec<u8>,
) -> BaseCommand {
    let (ready, topic_epoch) = match admission {
        Admission::Ready { topic_epoch } => (true, topic_epoch),
        Admission::Waiting => (false, None),
    };
    BaseCommand {
        producer_success: Some(CommandProducerSuccess {
            request_id,
            producer_name,
            last_sequence_id: Some(-1),
            schema_version: Some(schema_version),
            topic_epoch,
            producer_ready: Some(ready),
        }),
        ..command(Type::ProducerSuccess)
    }
}

/// The broker ends a producer.
pub(super) fn close_producer(producer_id: u64) -> BaseCommand {
    let close = CommandCloseProducer { producer_id, request_id: NO_REQUEST };
    BaseCommand { close_producer: Some(close), ..command(Type::CloseProducer) }
}

/// The broker ends a consumer.
pub(super) fn close_consumer(consumer_id: u64) -> BaseCommand {
    let close = CommandCloseConsumer { consumer_id, request_id: NO_REQUEST };
    BaseCommand { close_consumer: Some(close), ..command(Type::CloseConsumer) }
}

pub(super) fn active_consumer(consumer_id: u64, is_active: bool) -> BaseCommand {
    let change = CommandActiveConsumerChange { consumer_id, is_active: Some(is_active) };
    BaseCommand { active_consumer_change: Some(change), ..command(Type::ActiveConsumerChange) }
}

pub(super) fn send_error(producer_id: u64, sequence_id: u64, Refused(error, message): Refused) -> BaseCommand {
    BaseCommand {
        send_error: Some(CommandSendError { producer_id, sequence_id, error: error as i32, message }),
        ..command(Type::SendError)
    }
}

pub(super) fn ack_response(consumer_id: u64, request_id: u64, error: Option<Refused>) -> BaseCommand {
    let mut response = CommandAckResponse { consumer_id, request_id: Some(request_id), ..Default::default() };
    if let Some(Refused(error, message)) = error {
        response.error = Some(error as i32);
        response.message = Some(message);
    }
    BaseCommand { ack_response: Some(response), ..command(Type::AckResponse) }
}

pub(super) fn last_message_id(request_id: u64, last: MessageIdData, mark: MessageIdData) -> BaseCommand {
    BaseCommand {
        get_last_message_id_response: Some(CommandGetLastMessageIdResponse {
            last_message_id: last,
            request_id,
            consumer_mark_delete_position: Some(mark),
        }),
        ..command(Type::GetLastMessageIdResponse)
    }
}

pub(super) fn topics(request_id: u64, topics: Vec<String>, filtered: bool) -> BaseCommand {
    BaseCommand {
        get_topics_of_namespace_response: Some(CommandGetTopicsOfNamespaceResponse {
            request_id,
            topics,
            filtered: Some(filtered),
            ..Default::default()
        }),
        ..command(Type::GetTopicsOfNamespaceResponse)
    }
}

pub(super) fn stats(response: CommandConsumerStatsResponse) -> BaseCommand {
    BaseCommand { consumer_stats_response: Some(response), ..command(Type::ConsumerStatsResponse) }
}

pub(super) fn schema(request_id: u64, found: Result<(Vec<u8>, Schema), Refused>) -> BaseCommand {
    let mut response = CommandGetSchemaResponse { request_id, ..Default::default() };
    match found {
        Ok((version, schema)) => {
            response.schema = Some(schema);
            response.schema_version = Some(version);
        }
        Err(Refused(error, message)) => {
            response.error_code = Some(error as i32);
            response.error_message = Some(message);
        }
    }
    BaseCommand { get_schema_response: Some(response), ..command(Type::GetSchemaResponse) }
}

pub(super) fn schema_version(request_id: u64, version: Result<Vec<u8>, Refused>) -> BaseCommand {
    let mut response = CommandGetOrCreateSchemaResponse { request_id, ..Default::default() };
    match version {
        Ok(version) => response.schema_version = Some(version),
        Err(Refused(error, message)) => {
            response.error_code = Some(error as i32);
            response.error_message = Some(message);
        }
    }
    BaseCommand { get_or_create_schema_response: Some(response), ..command(Type::GetOrCreateSchemaResponse) }
}
