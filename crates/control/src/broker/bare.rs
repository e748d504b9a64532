//! The broker without sockets, for fuzz targets and tests: bytes in, bytes out, exactly as a link's task does it.

use std::sync::Arc;

use bytes::BytesMut;
use gradwire_proto::Fault;
use tokio::sync::Notify;

use super::frame::take_frame;
use super::session::Session;
use super::{Broker, BrokerConfig, link};

/// A broker of which a caller moves every byte. It has no data directory, and time does not pass in it.
#[derive(Debug)]
pub struct BareBroker {
    broker: Arc<Broker>,
    links: u64,
}

/// A link to it.
#[derive(Debug)]
pub struct BareLink {
    broker: Arc<Broker>,
    session: Session,
    input: BytesMut,
}

impl BareBroker {
    /// A broker that listens nowhere.
    ///
    /// # Errors
    /// When a file of the configuration cannot be used.
    pub fn new(config: BrokerConfig) -> Result<Self, Fault> {
        let (broker, _) = Broker::new(BrokerConfig { data_dir: None, ..config })?;
        Ok(Self { broker: Arc::new(broker), links: 0 })
    }

    /// A new link.
    pub fn link(&mut self) -> BareLink {
        self.links += 1;
        let (broker, wake) = (self.broker.clone(), Arc::new(Notify::new()));
        let session = Session::new(broker.clone(), self.links, "localhost:6650".to_owned(), wake);
        BareLink { broker, session, input: BytesMut::new() }
    }

    /// Bytes that its topics hold.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.broker.store().bytes()
    }
}

impl BareLink {
    /// Bytes come in. Gives what goes out, and the reason if the link ends with that.
    pub fn feed(&mut self, bytes: &[u8]) -> (BytesMut, Option<String>) {
        let mut out = BytesMut::new();
        self.input.extend_from_slice(bytes);
        loop {
            let mut answers = BytesMut::new();
            let handled = link::handle_some(&self.broker, &mut self.session, &mut self.input, &mut answers, usize::MAX);
            self.session.fill(&mut answers);
            out.unsplit(answers);
            match handled {
                Ok(true) => {}
                Ok(false) => return (out, None),
                Err(close) => return (out, Some(close.reason)),
            }
        }
    }
}

/// Takes all frames out of some bytes, of which each may have at most `frame_bytes_max`, and returns how many there
/// were. What does not parse ends it.
#[must_use]
pub fn frames(bytes: &[u8], frame_bytes_max: usize) -> usize {
    let mut input = BytesMut::from(bytes);
    let mut count = 0;
    while let Ok(Some(_)) = take_frame(&mut input, frame_bytes_max) {
        count += 1;
    }
    count
}
