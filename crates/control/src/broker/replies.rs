//! What the broker says: one constructor for each command that it sends.

use pulsar::message::proto::{
    BaseCommand, CommandAckResponse, CommandConnected, CommandConsumerStatsResponse, CommandError,
    CommandGetLastMessageIdResponse, CommandGetOrCreateSchemaResponse, CommandGetSchemaResponse,
    CommandGetTopicsOfNamespaceResponse, CommandLookupTopicResponse, CommandPartitionedTopicMetadataResponse,
    CommandPing, CommandPong, CommandProducerSuccess, CommandSendError, CommandSendReceipt, CommandSuccess,
    MessageIdData, ServerError, base_command::Type, command_lookup_topic_response,
    command_partitioned_topic_metadata_response,
};

use super::store::Refused;

/// The highest protocol version that the broker answers with.
const PROTOCOL_VERSION_MAX: i32 = 19;
/// How the broker names itself.
const SERVER_VERSION: &str = concat!("gradwire-", env!("CARGO_PKG_VERSION"));
/// The request id of an error that answers no request.
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

pub(super) fn producer_success(request_id: u64, producer_name: String) -> BaseCommand {
    BaseCommand {
        producer_success: Some(CommandProducerSuccess {
            request_id,
            producer_name,
            last_sequence_id: Some(-1),
            schema_version: Some(Vec::new()),
            topic_epoch: None,
            producer_ready: Some(true),
        }),
        ..command(Type::ProducerSuccess)
    }
}

pub(super) fn receipt(producer_id: u64, sequence_id: u64, highest: Option<u64>, id: MessageIdData) -> BaseCommand {
    BaseCommand {
        send_receipt: Some(CommandSendReceipt {
            producer_id,
            sequence_id,
            message_id: Some(id),
            highest_sequence_id: highest,
        }),
        ..command(Type::SendReceipt)
    }
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

pub(super) fn topics(request_id: u64, topics: Vec<String>) -> BaseCommand {
    BaseCommand {
        get_topics_of_namespace_response: Some(CommandGetTopicsOfNamespaceResponse {
            request_id,
            topics,
            ..Default::default()
        }),
        ..command(Type::GetTopicsOfNamespaceResponse)
    }
}

pub(super) fn stats(response: CommandConsumerStatsResponse) -> BaseCommand {
    BaseCommand { consumer_stats_response: Some(response), ..command(Type::ConsumerStatsResponse) }
}

pub(super) fn no_schema(request_id: u64, topic: &str) -> BaseCommand {
    BaseCommand {
        get_schema_response: Some(CommandGetSchemaResponse {
            request_id,
            error_code: Some(ServerError::TopicNotFound as i32),
            error_message: Some(format!("topic {topic} has no schema")),
            ..Default::default()
        }),
        ..command(Type::GetSchemaResponse)
    }
}

pub(super) fn schemas_not_kept(request_id: u64) -> BaseCommand {
    BaseCommand {
        get_or_create_schema_response: Some(CommandGetOrCreateSchemaResponse {
            request_id,
            error_code: Some(ServerError::NotAllowedError as i32),
            error_message: Some("the embedded broker keeps no schemas".to_owned()),
            ..Default::default()
        }),
        ..command(Type::GetOrCreateSchemaResponse)
    }
}
