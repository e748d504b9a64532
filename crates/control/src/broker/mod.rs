//! The embedded broker: one node that speaks Pulsar's wire protocol on a real port.
//!
//! It serves a job's control plane where no cluster is at hand: topics in memory, producers, exclusive consumers and
//! readers, with every limit in [`BrokerConfig`]. What it does not do (replication, storage, other subscription
//! types, partitions, schemas) it answers with an error of the protocol; it never lets a client wait.
//!
//! What a bad client can cost: bytes that are no frame, or are too large, close that client's link only. A link that
//! does not show its token in time is closed, and the number of such links is bounded. Memory is bounded by
//! [`BrokerConfig::topic_bytes_max`], [`BrokerConfig::total_bytes_max`] and a fixed amount for each link.

mod cursor;
mod frame;
mod link;
mod replies;
mod session;
#[allow(dead_code)]
mod storage;
mod store;
mod tls;
mod token;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gradwire_proto::{Fault, FaultKind};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use store::{Limits, Store};
use token::Admission;
use tokio_rustls::TlsAcceptor;

pub use tls::BrokerTls;
pub use token::BrokerToken;

/// How often a refused `accept` (out of descriptors) is tried again.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// How long the broker's tasks may take to end.
const STOP_MAX: Duration = Duration::from_secs(1);

/// What an [`EmbeddedBroker`] listens on, admits and holds.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    /// Address and port to listen on. Port 0 takes any free one.
    pub listen: SocketAddr,
    /// `host:port` that clients are told to use. Without it, each client is told the address that it reached.
    pub advertise: Option<String>,
    /// What clients must show (authentication method `token`). Without it, everyone who reaches the port is admitted,
    /// or everyone who shows a certificate where [`BrokerTls::client_ca`] asks for one.
    pub token: Option<BrokerToken>,
    /// Makes the port speak TLS, and only that.
    pub tls: Option<BrokerTls>,
    /// Largest payload of one message, in bytes.
    pub message_bytes_max: usize,
    /// Most bytes that one topic holds. A full topic refuses messages, unless all its durable subscriptions have
    /// acknowledged its oldest ones, or its name ends with one of [`BrokerConfig::drop_oldest_suffixes`].
    pub topic_bytes_max: usize,
    /// Most bytes that all topics hold together.
    pub total_bytes_max: usize,
    /// Most topics.
    pub topics_max: usize,
    /// Names of topics of which the latest records count: when full, they drop their oldest. Control logs must not
    /// be among them: members rebuild their state from the first record on.
    pub drop_oldest_suffixes: Vec<String>,
    /// Most links at a time.
    pub links_max: usize,
    /// Most links at a time that have not shown their token yet.
    pub pending_links_max: usize,
    /// How long a link may take to show its token.
    pub connect_timeout: Duration,
    /// A link that was silent for this long is asked for a sign of life, and closed after the same time again.
    pub keep_alive: Duration,
}

impl BrokerConfig {
    /// The defaults, for a broker that listens at `listen`: 5 MiB per message, 64 MiB per topic, 512 MiB in all.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            advertise: None,
            token: None,
            tls: None,
            message_bytes_max: 5 << 20,
            topic_bytes_max: 64 << 20,
            total_bytes_max: 512 << 20,
            topics_max: 4096,
            drop_oldest_suffixes: vec!["-versions".to_owned()],
            links_max: 8192,
            pending_links_max: 256,
            connect_timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(30),
        }
    }
}

/// A running broker, on its own thread. Dropping it stops it and closes every link.
#[derive(Debug)]
pub struct EmbeddedBroker {
    address: SocketAddr,
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl EmbeddedBroker {
    /// Starts a broker. It answers from the moment that this returns.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] when a file of the configuration cannot be used, and names it;
    /// [`FaultKind::AddressInUse`] when the port is taken; [`FaultKind::System`] when the address cannot be bound or
    /// the system gives no thread.
    pub fn start(config: BrokerConfig) -> Result<Self, Fault> {
        let broker = Broker::new(config)?;
        let config = &broker.config;
        let listener = bind(config.listen)?;
        let address =
            listener.local_addr().map_err(|error| system(format!("the broker's socket has no address: {error}")))?;
        let url = broker.url_for(&reachable(address).to_string());
        let broker = Arc::new(broker);
        let (stop, stopped) = watch::channel(false);
        let (started, outcome) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("gradwire-broker".to_owned())
            // The event loop is made in its thread: it must not be dropped within the caller's, if that has one.
            .spawn(move || serve(&broker, listener, &started, stopped))
            .map_err(|error| system(format!("the embedded broker gets no thread from the system: {error}")))?;
        outcome.recv().unwrap_or_else(|_| Err(system("the embedded broker's thread ended".to_owned())))?;
        Ok(Self { address, url, stop, thread: Some(thread) })
    }

    /// The URL for clients: `pulsar://host:port`, or `pulsar+ssl://host:port` with TLS.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the broker and closes every link. What its topics held is gone. Ends within about a second.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        self.end();
    }
}

/// What all links share.
pub(crate) struct Broker {
    config: BrokerConfig,
    store: Mutex<Store>,
    admission: Admission,
    tls: Option<TlsAcceptor>,
    links: AtomicUsize,
    pending_links: AtomicUsize,
}

impl Broker {
    fn new(config: BrokerConfig) -> Result<Self, Fault> {
        let limits = Limits {
            topic_bytes_max: config.topic_bytes_max,
            total_bytes_max: config.total_bytes_max,
            topics_max: config.topics_max,
            drop_oldest_suffixes: config.drop_oldest_suffixes.clone(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ledger = u64::try_from(now.as_millis()).unwrap_or_default().max(1);
        let tls = config.tls.as_ref();
        Ok(Self {
            admission: Admission::new(config.token.as_ref(), tls.is_some_and(|tls| tls.client_ca.is_some()))?,
            tls: tls.map(BrokerTls::load).transpose()?,
            store: Mutex::new(Store::new(limits, ledger)),
            links: AtomicUsize::new(0),
            pending_links: AtomicUsize::new(0),
            config,
        })
    }

    /// A panic while the lock was held would be a bug; the store stays usable, so the other links go on.
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The URL that a client which reached us at this `host:port` is told.
    fn url_for(&self, reached: &str) -> String {
        let scheme = if self.tls.is_some() { "pulsar+ssl" } else { "pulsar" };
        format!("{scheme}://{}", self.config.advertise.as_deref().unwrap_or(reached))
    }

    fn link_settled(&self) {
        self.pending_links.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker").field("config", &self.config).finish_non_exhaustive()
    }
}

fn serve(
    broker: &Arc<Broker>,
    listener: std::net::TcpListener,
    started: &SyncSender<Result<(), Fault>>,
    stopped: watch::Receiver<bool>,
) {
    let failed = |error| Err(system(format!("the embedded broker gets no event loop from the system: {error}")));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return drop(started.send(failed(error))),
    };
    runtime.block_on(async {
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                let _ = started.send(Ok(()));
                accept(broker, &listener, stopped).await;
            }
            Err(error) => drop(started.send(failed(error))),
        }
    });
    // The links saw the same signal; this bounds what they may still take.
    runtime.shutdown_timeout(STOP_MAX);
}

async fn accept(broker: &Arc<Broker>, listener: &TcpListener, stopped: watch::Receiver<bool>) {
    let mut stop = stopped.clone();
    let mut links = 0;
    loop {
        let accepted = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                links += 1;
                admit(broker, stream, peer, links, stopped.clone());
            }
            Err(error) => {
                tracing::warn!(%error, "the embedded broker cannot accept a link; it tries again");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

fn admit(broker: &Arc<Broker>, stream: TcpStream, peer: SocketAddr, link: u64, stopped: watch::Receiver<bool>) {
    if broker.pending_links.load(Ordering::Relaxed) >= broker.config.pending_links_max
        || broker.links.load(Ordering::Relaxed) >= broker.config.links_max
    {
        tracing::warn!(%peer, "the embedded broker has too many links and closes a new one");
        return;
    }
    broker.pending_links.fetch_add(1, Ordering::Relaxed);
    broker.links.fetch_add(1, Ordering::Relaxed);
    let broker = broker.clone();
    tokio::spawn(async move {
        link::serve(broker.clone(), stream, link, stopped).await;
        broker.links.fetch_sub(1, Ordering::Relaxed);
    });
}

fn bind(address: SocketAddr) -> Result<std::net::TcpListener, Fault> {
    let in_use = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    let listen = || -> std::io::Result<_> {
        // The standard library sets SO_REUSEADDR: a broker that was just stopped does not block its port.
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error| {
        if in_use(&error) {
            let detail = format!(
                "the embedded broker cannot listen on {address}: the port is in use; stop what uses it, or choose \
                 another port (0 takes a free one)"
            );
            return Fault::new(FaultKind::AddressInUse, detail);
        }
        system(format!("the embedded broker cannot listen on {address}: {error}; choose an address of this machine"))
    })
}

/// An address that a client on this machine can dial: an unspecified one stands for all.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn system(detail: String) -> Fault {
    Fault::new(FaultKind::System, detail)
}
