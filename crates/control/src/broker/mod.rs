//! The embedded broker: one node that speaks Pulsar's wire protocol on a real port.
//!
//! It serves a job's control plane where no cluster is at hand: topics in memory, all four kinds of subscriptions,
//! readers, compaction, exclusive producers, schemas, with every limit in [`BrokerConfig`]. What it does not do
//! (replication, partitions, transactions, delayed delivery) it answers with an error of the protocol or leaves out;
//! it never lets a client wait.
//!
//! What a bad client can cost: bytes that are no frame, or are too large, close that client's link only. A link that
//! does not show its token in time is closed, and the number of such links is bounded. Memory is bounded by
//! [`BrokerConfig::topic_bytes_max`], [`BrokerConfig::total_bytes_max`] and a fixed amount for each link.

#[doc(hidden)]
pub mod bare;
mod complaints;
mod config;
mod cursor;
mod dispatch;
mod frame;
mod hash;
mod link;
mod log;
mod names;
mod outbox;
mod producers;
mod ranges;
mod replies;
mod schema;
mod selector;
mod session;
mod stats;
mod storage;
mod store;
mod tls;
mod token;
mod topic;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gradwire_proto::{Fault, FaultKind};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use complaints::Complaints;
use session::Close;
use storage::{Keeper, Storage};
use store::{Signals, Store};
use token::Admission;
use tokio_rustls::TlsAcceptor;

pub use config::{BrokerConfig, TopicPolicy};
pub use stats::{BrokerStats, ConsumerStats, SubscriptionStats, TopicStats};
pub use tls::BrokerTls;

/// How often a refused `accept` (out of descriptors) is tried again.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// How long the broker's tasks may take to end.
const STOP_MAX: Duration = Duration::from_secs(1);
/// How often it looks for what time alone changes.
const TICK: Duration = Duration::from_secs(1);

/// A running broker, on its own thread. Dropping it stops it and closes every link.
#[derive(Debug)]
pub struct EmbeddedBroker {
    broker: Arc<Broker>,
    address: SocketAddr,
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<Result<(), Fault>>>,
}

impl EmbeddedBroker {
    /// Starts a broker. It answers from the moment that this returns.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] when a file of the configuration cannot be used, and names it;
    /// [`FaultKind::AddressInUse`] when the port is taken; [`FaultKind::System`] when the address cannot be bound or
    /// the system gives no thread.
    pub fn start(config: BrokerConfig) -> Result<Self, Fault> {
        // First of all: two brokers with the same port are as likely as two with the same directory.
        let listener = bind(config.listen)?;
        let (broker, storage) = Broker::new(config)?;
        let address =
            listener.local_addr().map_err(|error| system(format!("the broker's socket has no address: {error}")))?;
        let url = broker.url_for(&reachable(address).to_string());
        let broker = Arc::new(broker);
        let keeper = storage.map(|storage| Keeper::new(broker.clone(), storage));
        let (stop, stopped) = watch::channel(false);
        let served = broker.clone();
        let (started, outcome) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("gradwire-broker".to_owned())
            // The event loop is made in its thread: it must not be dropped within the caller's, if that has one.
            .spawn(move || serve(&served, listener, keeper, &started, stopped))
            .map_err(|error| system(format!("the embedded broker gets no thread from the system: {error}")))?;
        outcome.recv().unwrap_or_else(|_| Err(system("the embedded broker's thread ended".to_owned())))?;
        Ok(Self { broker, address, url, stop, thread: Some(thread) })
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

    /// What it holds and whom it serves at this moment.
    #[must_use]
    pub fn stats(&self) -> BrokerStats {
        let links = self.broker.links.load(Ordering::Relaxed);
        let store = self.broker.store();
        BrokerStats { links, bytes: store.bytes(), topics: store.stats() }
    }

    /// Stops the broker and closes every link. What its topics held is gone, unless they are kept in a data directory.
    /// Ends within about a second.
    ///
    /// # Errors
    /// [`FaultKind::System`] when the data directory could not be brought up to date; the fault names it. It ended all
    /// the same. What got a receipt is in the directory's journal, if that is still there.
    pub fn stop(mut self) -> Result<(), Fault> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Fault> {
        let _ = self.stop.send(true);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| Err(system("the embedded broker's thread ended by itself".to_owned())))
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        if let Err(fault) = self.end() {
            tracing::error!(%fault, "the embedded broker did not stop well");
        }
    }
}

/// What all links share.
pub(crate) struct Broker {
    config: BrokerConfig,
    store: Mutex<Store>,
    /// Wakes the task that keeps what the store changes.
    signals: Arc<Signals>,
    admission: Admission,
    tls: Option<TlsAcceptor>,
    complaints: Mutex<Complaints>,
    links: AtomicUsize,
    pending_links: AtomicUsize,
}

impl Broker {
    /// The broker, and its data directory if it has one.
    fn new(config: BrokerConfig) -> Result<(Self, Option<Storage>), Fault> {
        config.check()?;
        let tls = config.tls.as_ref();
        let opened = config.data_dir.as_deref().map(|path| Storage::open(path, config.fsync)).transpose()?;
        let signals = Arc::new(Signals::default());
        let (store, storage) = match opened {
            None => (Store::new(config.clone(), now_ms()), None),
            Some((storage, loaded)) => {
                let store = Store::restore(config.clone(), now_ms(), loaded, storage.path(), signals.clone())?;
                (store, Some(storage))
            }
        };
        let broker = Self {
            admission: Admission::new(config.token.as_ref(), tls.is_some_and(|tls| tls.client_ca.is_some()))?,
            tls: tls.map(BrokerTls::load).transpose()?,
            store: Mutex::new(store),
            signals,
            complaints: Mutex::default(),
            links: AtomicUsize::new(0),
            pending_links: AtomicUsize::new(0),
            config,
        };
        Ok((broker, storage))
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

    /// Says why a link is closed: for all to see when its client is at fault, but not again and again.
    fn tell_closed(&self, link: u64, peer: Option<SocketAddr>, close: &Close) {
        let reason = &close.reason;
        if let Some(peer) = peer
            && close.bad_frame
            && self.complaints.lock().unwrap_or_else(PoisonError::into_inner).is_new(peer.ip(), reason, Instant::now())
        {
            tracing::warn!(%peer, reason, "the embedded broker closes a link: what came is no frame, or is too large");
        } else {
            tracing::debug!(link, reason, "broker link closed");
        }
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
    keeper: Option<Keeper>,
    started: &SyncSender<Result<(), Fault>>,
    stopped: watch::Receiver<bool>,
) -> Result<(), Fault> {
    let failed = |error| Err(system(format!("the embedded broker gets no event loop from the system: {error}")));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = started.send(failed(error));
            return Ok(());
        }
    };
    let kept = runtime.block_on(async {
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                let _ = started.send(Ok(()));
                tokio::spawn(tick(broker.clone(), stopped.clone()));
                let keeper = keeper.map(|keeper| tokio::spawn(keeper.run(stopped.clone())));
                accept(broker, &listener, stopped).await;
                let Some(keeper) = keeper else { return Ok(()) };
                keeper.await.unwrap_or_else(|gone| Err(format!("the embedded broker stopped keeping topics: {gone}")))
            }
            Err(error) => {
                let _ = started.send(failed(error));
                Ok(())
            }
        }
    });
    // The links saw the same signal; this bounds what they may still take.
    runtime.shutdown_timeout(STOP_MAX);
    kept.map_err(system)
}

async fn tick(broker: Arc<Broker>, mut stopped: watch::Receiver<bool>) {
    while tokio::time::timeout(TICK, stopped.wait_for(|stop| *stop)).await.is_err() {
        broker.store().tick(now_ms());
    }
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
    let place = Place::take(broker.clone());
    tokio::spawn(async move {
        link::serve(place.0.clone(), stream, link, stopped).await;
    });
}

/// One of the broker's places for links. It is free again however the link's task ends, a panic included.
struct Place(Arc<Broker>);

impl Place {
    fn take(broker: Arc<Broker>) -> Self {
        broker.links.fetch_add(1, Ordering::Relaxed);
        Self(broker)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.links.fetch_sub(1, Ordering::Relaxed);
    }
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

/// Milliseconds since 1970, by this machine's clock.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or_default().max(1)
}

fn system(detail: String) -> Fault {
    Fault::new(FaultKind::System, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_panics_gives_its_place_back() {
        let (broker, _) = Broker::new(BrokerConfig::new(([127, 0, 0, 1], 0).into())).unwrap();
        let broker = Arc::new(broker);
        let place = Place::take(broker.clone());
        assert_eq!(broker.links.load(Ordering::Relaxed), 1);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let link = runtime.spawn(async move {
            let _place = place;
            panic!("a bug");
        });
        assert!(runtime.block_on(link).unwrap_err().is_panic());
        assert_eq!(broker.links.load(Ordering::Relaxed), 0);
    }
}
