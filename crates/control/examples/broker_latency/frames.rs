//! A client that does as little as possible: what is measured with it is the broker.

use std::io::{BufReader, BufWriter, Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use prost::Message as _;
use pulsar::message::proto::{
    BaseCommand, CommandAck, CommandConnect, CommandFlow, CommandLookupTopic, CommandProducer, CommandSend,
    CommandSubscribe, MessageMetadata, base_command::Type, command_ack::AckType,
};
use pulsar::message::{Codec, Message, Payload};
use tokio_util::codec::Encoder as _;

/// Commands are written together up to this size.
const BUFFER_BYTES: usize = 64 << 10;
/// Permits are given again after this many messages.
const PERMITS: u32 = 1000;

struct Link {
    reader: BufReader<TcpStream>,
    writer: BufWriter<TcpStream>,
    frame: Vec<u8>,
}

impl Link {
    /// Connected, and told where the topic is.
    fn open(url: &str, topic: &str) -> std::io::Result<Self> {
        let address = url.strip_prefix("pulsar://").unwrap_or(url);
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let reader = BufReader::with_capacity(1 << 20, stream.try_clone()?);
        let mut link = Self { reader, writer: BufWriter::with_capacity(BUFFER_BYTES, stream), frame: Vec::new() };
        let connect =
            CommandConnect { client_version: "measure".to_owned(), protocol_version: Some(12), ..Default::default() };
        link.ask(BaseCommand { connect: Some(connect), ..command(Type::Connect) })?;
        let lookup = CommandLookupTopic { topic: topic.to_owned(), request_id: 1, ..Default::default() };
        link.ask(BaseCommand { lookup_topic: Some(lookup), ..command(Type::Lookup) })?;
        Ok(link)
    }

    /// Sends a command and waits for its answer.
    fn ask(&mut self, command: BaseCommand) -> std::io::Result<()> {
        self.say(command, None)?;
        self.hear()
    }

    fn say(&mut self, command: BaseCommand, payload: Option<Payload>) -> std::io::Result<()> {
        let mut frame = BytesMut::new();
        Codec.encode(Message { command, payload }, &mut frame).map_err(std::io::Error::other)?;
        self.writer.write_all(&frame)
    }

    /// Reads one frame. What was said has left before it waits for one.
    fn hear(&mut self) -> std::io::Result<()> {
        if self.reader.buffer().is_empty() {
            self.writer.flush()?;
        }
        let mut total = [0; 4];
        self.reader.read_exact(&mut total)?;
        self.frame.resize(u32::from_be_bytes(total) as usize, 0);
        self.reader.read_exact(&mut self.frame)
    }

    /// The command of the last frame.
    fn command(&self) -> Option<BaseCommand> {
        let size = u32::from_be_bytes(self.frame.get(..4)?.try_into().ok()?) as usize;
        BaseCommand::decode(self.frame.get(4..4 + size)?).ok()
    }

    /// Whether the last frame has this type: behind the command's size comes the number of its field, and the type.
    fn is(&self, kind: Type) -> bool {
        self.frame.get(4..6) == Some(&[8, kind as u8])
    }
}

/// Reads a log from its head, from the first command to the last record.
pub(crate) fn replay(url: &str, topic: &str, records: usize) -> std::io::Result<Duration> {
    let started = Instant::now();
    let mut link = Link::open(url, topic)?;
    subscribe(&mut link, topic, Some(false), 1)?;
    permit(&mut link, records as u32)?;
    let mut read = 0;
    while read < records {
        link.hear()?;
        read += usize::from(link.is(Type::Message));
    }
    Ok(started.elapsed())
}

/// Messages that are not batched, with at most `window` without a receipt, until a consumer has acknowledged each of
/// them. Gives messages per second.
pub(crate) fn small_messages(
    url: &str,
    topic: &str,
    messages: usize,
    bytes: usize,
    window: usize,
) -> std::io::Result<f64> {
    let (mut sending, mut receiving) = (Link::open(url, topic)?, Link::open(url, topic)?);
    subscribe(&mut receiving, topic, None, 0)?;
    let producer = CommandProducer { topic: topic.to_owned(), producer_id: 1, request_id: 2, ..Default::default() };
    sending.ask(BaseCommand { producer: Some(producer), ..command(Type::Producer) })?;
    let started = Instant::now();
    let consumer = thread::spawn(move || consume(&mut receiving, messages));
    let mut receipts = 0;
    for sequence_id in 0..messages as u64 {
        while sequence_id - receipts >= window as u64 {
            sending.hear()?;
            receipts += u64::from(sending.is(Type::SendReceipt));
        }
        let send = CommandSend { producer_id: 1, sequence_id, num_messages: Some(1), ..Default::default() };
        let metadata =
            MessageMetadata { producer_name: "measure".to_owned(), sequence_id, publish_time: 1, ..Default::default() };
        let payload = Payload { metadata, data: vec![7; bytes] };
        sending.say(BaseCommand { send: Some(send), ..command(Type::Send) }, Some(payload))?;
    }
    while receipts < messages as u64 {
        sending.hear()?;
        receipts += u64::from(sending.is(Type::SendReceipt));
    }
    consumer.join().map_err(|_| std::io::Error::other("the consumer panicked"))??;
    Ok(messages as f64 / started.elapsed().as_secs_f64())
}

fn consume(link: &mut Link, messages: usize) -> std::io::Result<()> {
    permit(link, 2 * PERMITS)?;
    let mut read = 0;
    while read < messages {
        link.hear()?;
        let Some(message) = link.command().and_then(|command| command.message) else { continue };
        let ack = CommandAck {
            consumer_id: 1,
            ack_type: AckType::Individual as i32,
            message_id: vec![message.message_id],
            ..Default::default()
        };
        link.say(BaseCommand { ack: Some(ack), ..command(Type::Ack) }, None)?;
        read += 1;
        if read.is_multiple_of(PERMITS as usize) {
            permit(link, PERMITS)?;
        }
    }
    link.writer.flush()
}

fn subscribe(link: &mut Link, topic: &str, durable: Option<bool>, position: i32) -> std::io::Result<()> {
    let subscribe = CommandSubscribe {
        topic: topic.to_owned(),
        subscription: "frames".to_owned(),
        consumer_id: 1,
        request_id: 2,
        durable,
        initial_position: Some(position),
        ..Default::default()
    };
    link.ask(BaseCommand { subscribe: Some(subscribe), ..command(Type::Subscribe) })
}

fn permit(link: &mut Link, message_permits: u32) -> std::io::Result<()> {
    link.say(BaseCommand { flow: Some(CommandFlow { consumer_id: 1, message_permits }), ..command(Type::Flow) }, None)?;
    link.writer.flush()
}

fn command(kind: Type) -> BaseCommand {
    BaseCommand { r#type: kind as i32, ..Default::default() }
}
