//! A client that says what a test wants it to, byte by byte if need be.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use bytes::BytesMut;
use gradwire_control::EmbeddedBroker;
use pulsar::message::proto::{
    BaseCommand, CommandConnect, CommandPing, CommandProducer, CommandSend, CommandSubscribe, MessageMetadata,
    base_command::Type,
};
use pulsar::message::{Codec, Message, Payload};
use tokio_util::codec::{Decoder, Encoder};

use super::PATIENCE;

/// A client that says what a test wants it to.
pub struct Raw {
    pub stream: TcpStream,
    pub input: BytesMut,
}

impl Raw {
    pub fn open(broker: &EmbeddedBroker) -> Self {
        let stream = TcpStream::connect(broker.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, input: BytesMut::new() }
    }

    pub fn connected(broker: &EmbeddedBroker) -> Self {
        let mut raw = Self::open(broker);
        let connected = raw.ask(connect(None)).connected.unwrap();
        assert_eq!(connected.max_message_size, Some(5 << 20));
        assert_eq!(connected.protocol_version, Some(12));
        raw
    }

    pub fn say(&mut self, command: BaseCommand) {
        self.stream.write_all(&bytes(command, None)).unwrap();
    }

    pub fn ask(&mut self, command: BaseCommand) -> BaseCommand {
        self.say(command);
        self.hear().expect("an answer").command
    }

    /// The next frame; nothing when the broker closed the link.
    pub fn hear(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = Codec.decode(&mut self.input).unwrap() {
                return Some(message);
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.input.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("the broker neither answers nor closes: {error}"),
            }
        }
    }
}

pub fn command(kind: Type) -> BaseCommand {
    BaseCommand { r#type: kind as i32, ..Default::default() }
}

pub fn connect(token: Option<&str>) -> BaseCommand {
    let connect = CommandConnect {
        client_version: "test".to_owned(),
        protocol_version: Some(12),
        auth_method_name: token.map(|_| "token".to_owned()),
        auth_data: token.map(|token| token.as_bytes().to_vec()),
        ..Default::default()
    };
    BaseCommand { connect: Some(connect), ..command(Type::Connect) }
}

pub fn ping() -> BaseCommand {
    BaseCommand { ping: Some(CommandPing {}), ..command(Type::Ping) }
}

pub fn subscribe(topic: &str) -> BaseCommand {
    let subscribe = CommandSubscribe {
        topic: topic.to_owned(),
        subscription: "s".to_owned(),
        consumer_id: 3,
        request_id: 4,
        durable: Some(false),
        initial_position: Some(1),
        ..Default::default()
    };
    BaseCommand { subscribe: Some(subscribe), ..command(Type::Subscribe) }
}

pub fn producer(topic: &str) -> BaseCommand {
    let producer = CommandProducer { topic: topic.to_owned(), producer_id: 1, request_id: 2, ..Default::default() };
    BaseCommand { producer: Some(producer), ..command(Type::Producer) }
}

pub fn send(sequence_id: u64, data: Vec<u8>) -> BytesMut {
    let metadata =
        MessageMetadata { producer_name: "p".to_owned(), sequence_id, publish_time: 1, ..Default::default() };
    let send = CommandSend { producer_id: 1, sequence_id, ..Default::default() };
    bytes(BaseCommand { send: Some(send), ..command(Type::Send) }, Some(Payload { metadata, data }))
}

pub fn bytes(command: BaseCommand, payload: Option<Payload>) -> BytesMut {
    let mut out = BytesMut::new();
    Codec.encode(Message { command, payload }, &mut out).unwrap();
    out
}
