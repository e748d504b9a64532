//! What only the embedded broker promises, through the `pulsar` crate.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::client::*;
use common::*;
use futures::StreamExt;
use gradwire_control::{BrokerConfig, EmbeddedBroker};
use gradwire_proto::FaultKind;
use pulsar::producer::Message;
use tokio::time::timeout;

#[tokio::test]
async fn a_full_topic_refuses_and_keeps_what_it_has() {
    let broker = EmbeddedBroker::start(BrokerConfig { topic_bytes_max: 100_000, ..local() }).unwrap();
    let client = client(broker.url()).await;
    let (log, versions) = (unique("full"), format!("{}-versions", unique("full")));
    let mut to_log = producer(&client, &log).await;
    let mut to_versions = producer(&client, &versions).await;
    let message = |number: u32| Message { payload: vec![number as u8; 10_000], ..Default::default() };
    let mut taken = 0;
    let refused = loop {
        match to_log.send_non_blocking(message(taken)).await.unwrap().await {
            Ok(_) => taken += 1,
            Err(error) => break format!("{error:?}"),
        }
        assert!(taken < 20, "nothing bounds the topic");
    };
    assert!(refused.contains("is full"), "{refused}");
    assert_eq!(taken, 9);
    let mut reader_of_log = reader(&client, &log, earliest()).await;
    assert_eq!(timeout(PATIENCE, reader_of_log.next()).await.unwrap().unwrap().unwrap().payload.data[0], 0);
    // Of version records the latest count.
    for number in 0..20 {
        to_versions.send_non_blocking(message(number)).await.unwrap().await.unwrap();
    }
    let mut reader_of_versions = reader(&client, &versions, earliest()).await;
    assert_eq!(timeout(PATIENCE, reader_of_versions.next()).await.unwrap().unwrap().unwrap().payload.data[0], 11);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let broker = embedded_broker();
    let fault = EmbeddedBroker::start(BrokerConfig::new(broker.address())).expect_err("in use");
    assert_eq!(fault.kind, FaultKind::AddressInUse);
    assert!(fault.detail.contains(&broker.address().to_string()), "{fault}");
    let address = broker.address();
    broker.stop().unwrap();
    // The port is free again at once.
    EmbeddedBroker::start(BrokerConfig::new(address)).expect("free");
}
