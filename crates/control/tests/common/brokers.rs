//! The broker that a test runs against: the embedded one, or Apache Pulsar where GRADWIRE_TEST_PULSAR_URL names one.
//!
//! A test that only uses a broker takes [`test_broker`]. One that ends it, or needs it to ask for tokens, takes one of
//! its own: of the same kind, so that it holds for both.

use gradwire_control::{BrokerConfig, EmbeddedBroker, broker_token};
use gradwire_proto::Secret;

use super::apache::Standalone;
use super::{eventually, local};

/// A broker for one test.
pub struct TestBroker {
    url: String,
    token: Option<String>,
    process: Process,
}

enum Process {
    /// Somebody else's, shared with other tests.
    Given,
    Embedded {
        config: Box<BrokerConfig>,
        running: Option<EmbeddedBroker>,
    },
    Apache(Standalone),
}

/// The broker to test against.
pub fn test_broker() -> TestBroker {
    match given_url() {
        Some(url) => TestBroker { url, token: None, process: Process::Given },
        None => embedded(local()),
    }
}

/// A broker that the test may end and start again.
pub fn own_broker() -> TestBroker {
    if given_url().is_none() {
        return embedded(local());
    }
    apache(Standalone::run(&[]))
}

/// A broker that admits only who shows [`TestBroker::token`].
pub fn own_broker_with_token() -> TestBroker {
    if given_url().is_none() {
        let token = broker_token(&Secret::from_bytes([1; 32]));
        let config = BrokerConfig { token: Some(token.as_str().into()), ..local() };
        return TestBroker { token: Some(token), ..embedded(config) };
    }
    apache(Standalone::run(&["--auth"]))
}

impl TestBroker {
    /// Its URL, before and after a restart.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// What it asks for.
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Ends it as a crash would: nobody is told.
    pub fn kill(&mut self) {
        match &mut self.process {
            Process::Given => panic!("other tests use this broker: take own_broker()"),
            Process::Embedded { running, .. } => drop(running.take().expect("it runs")),
            Process::Apache(standalone) => standalone.kill(),
        }
    }

    /// Starts it again, at the same URL.
    pub fn start(&mut self) {
        match &mut self.process {
            Process::Given => panic!("other tests use this broker: take own_broker()"),
            Process::Embedded { config, running } => {
                *running = Some(eventually("the port", || EmbeddedBroker::start((**config).clone()).ok()));
            }
            Process::Apache(standalone) => standalone.start(),
        }
    }
}

fn given_url() -> Option<String> {
    std::env::var("GRADWIRE_TEST_PULSAR_URL").ok().filter(|url| !url.is_empty())
}

fn embedded(config: BrokerConfig) -> TestBroker {
    let running = EmbeddedBroker::start(config.clone()).expect("a free port");
    let url = running.url().to_owned();
    let config = Box::new(BrokerConfig { listen: running.address(), ..config });
    TestBroker { url, token: None, process: Process::Embedded { config, running: Some(running) } }
}

fn apache(standalone: Standalone) -> TestBroker {
    let (url, token) = (standalone.variable("PULSAR_URL").expect("a URL"), standalone.variable("PULSAR_TOKEN"));
    TestBroker { url, token, process: Process::Apache(standalone) }
}
