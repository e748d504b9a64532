//! A client by the `pulsar` crate, as the control plane uses it.

use futures::StreamExt;
use pulsar::consumer::InitialPosition;
use pulsar::message::proto::MessageIdData;
use pulsar::reader::Reader;
use pulsar::{Consumer, ConsumerOptions, OperationRetryOptions, Producer, Pulsar, SubType, TokioExecutor};
use tokio::time::timeout;

use super::{PATIENCE, unique};

pub type Client = Pulsar<TokioExecutor>;
pub type Bytes = Vec<u8>;

pub async fn client(url: &str) -> Client {
    let once = OperationRetryOptions { max_retries: Some(0), ..Default::default() };
    Pulsar::builder(url, TokioExecutor).with_operation_retry_options(once).build().await.expect("a broker")
}

pub async fn producer(client: &Client, topic: &str) -> Producer<TokioExecutor> {
    let options = pulsar::ProducerOptions { block_queue_if_full: true, ..Default::default() };
    client.producer().with_topic(topic).with_options(options).build().await.expect("a producer")
}

pub async fn reader(client: &Client, topic: &str, options: ConsumerOptions) -> Reader<Bytes, TokioExecutor> {
    client
        .reader()
        .with_topic(topic)
        .with_subscription(unique("r"))
        .with_options(options)
        .into_reader()
        .await
        .expect("a reader")
}

pub async fn consumer(
    client: &Client,
    topic: &str,
    subscription: &str,
) -> Result<Consumer<Bytes, TokioExecutor>, pulsar::Error> {
    let options = ConsumerOptions::default().with_initial_position(InitialPosition::Earliest);
    let builder = client.consumer().with_topic(topic).with_subscription(subscription);
    builder.with_subscription_type(SubType::Exclusive).with_options(options).build().await
}

pub fn earliest() -> ConsumerOptions {
    ConsumerOptions::default().with_initial_position(InitialPosition::Earliest)
}

pub async fn send(producer: &mut Producer<TokioExecutor>, text: &str) -> MessageIdData {
    let receipt = producer.send_non_blocking(text.as_bytes()).await.expect("sent").await.expect("a receipt");
    receipt.message_id.expect("an id")
}

pub async fn read(reader: &mut Reader<Bytes, TokioExecutor>) -> String {
    let message = timeout(PATIENCE, reader.next()).await.expect("in time").expect("open").expect("a message");
    String::from_utf8(message.payload.data).expect("text")
}

pub async fn take(consumer: &mut Consumer<Bytes, TokioExecutor>) -> pulsar::consumer::Message<Bytes> {
    timeout(PATIENCE, consumer.next()).await.expect("in time").expect("open").expect("a message")
}
