//! What an embedded broker listens on, admits and holds.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use gradwire_proto::{Fault, FaultKind};

use super::tls::BrokerTls;
use crate::access::Token;

/// What an [`EmbeddedBroker`](super::EmbeddedBroker) listens on, admits and holds.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    /// Address and port to listen on. Port 0 takes any free one.
    pub listen: SocketAddr,
    /// `host:port` that clients are told to use. Without it, each client is told the address that it reached.
    pub advertise: Option<String>,
    /// What clients must show (authentication method `token`). Without it, everyone who reaches the port is admitted,
    /// or everyone who shows a certificate where [`BrokerTls::client_ca`] asks for one.
    pub token: Option<Token>,
    /// Makes the port speak TLS, and only that.
    pub tls: Option<BrokerTls>,
    /// Where topics are kept; made if it is not there. Without it they are in memory only.
    pub data_dir: Option<PathBuf>,
    /// Whether everything is written to the disk itself before a client hears that it is kept. Then it survives a loss
    /// of power; otherwise, the end of the process.
    pub fsync: bool,
    /// Largest payload of one message, in bytes.
    pub message_bytes_max: usize,
    /// Most bytes that one topic holds. A full topic drops what all its durable subscriptions have acknowledged, then
    /// what its policy lets it drop, and else refuses messages.
    pub topic_bytes_max: usize,
    /// Most bytes that all topics hold together. Their subscriptions may take a quarter of it on top.
    pub total_bytes_max: usize,
    /// Most topics.
    pub topics_max: usize,
    /// What topics keep, by the ends of their names; the first that fits counts. Topics without policy keep everything
    /// until they are full.
    pub policies: Vec<TopicPolicy>,
    /// A Shared or Key_Shared consumer gets no more while it holds this many unacknowledged messages.
    pub unacked_per_consumer_max: u64,
    /// The same for all consumers of a subscription together.
    pub unacked_per_subscription_max: u64,
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
    /// The defaults, for a broker that listens at `listen`: 5 MiB per message, 64 MiB per topic, 512 MiB in all; topics
    /// whose names end with `-versions` or `-snapshots` are compacted, and the former drop their oldest when that is
    /// not enough, as do those that end with `-audit` or `-results`.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            advertise: None,
            token: None,
            tls: None,
            data_dir: None,
            fsync: false,
            message_bytes_max: 5 << 20,
            topic_bytes_max: 64 << 20,
            total_bytes_max: 512 << 20,
            topics_max: 4096,
            policies: vec![
                TopicPolicy { compact: true, drop_oldest: true, ..TopicPolicy::for_suffix("-versions") },
                TopicPolicy { compact: true, ..TopicPolicy::for_suffix("-snapshots") },
                // It grows with every commit: when it is full, what was committed last has to be on record all the same.
                TopicPolicy { drop_oldest: true, ..TopicPolicy::for_suffix("-audit") },
                // Results of the federated mode are read as they come, and by nobody's durable subscription.
                TopicPolicy { drop_oldest: true, ..TopicPolicy::for_suffix("-results") },
            ],
            unacked_per_consumer_max: 50_000,
            unacked_per_subscription_max: 200_000,
            links_max: 8192,
            pending_links_max: 256,
            connect_timeout: Duration::from_secs(5),
            keep_alive: Duration::from_secs(30),
        }
    }

    /// # Errors
    /// [`FaultKind::InvalidArgument`] that says which of it cannot be.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let Some(advertise) = &self.advertise else { return Ok(()) };
        check_host_and_port(advertise).map_err(|what| {
            let detail = format!(
                "the address '{}' for clients of the embedded broker {what}: give HOST:PORT, such as \
                 broker.example:6650 or [::1]:6650",
                advertise.escape_debug()
            );
            Fault::new(FaultKind::InvalidArgument, detail)
        })
    }

    /// The policy of a topic.
    pub(super) fn policy(&self, topic: &str) -> TopicPolicy {
        self.policies.iter().find(|policy| topic.ends_with(&policy.suffix)).cloned().unwrap_or_default()
    }
}

/// What a topic keeps.
///
/// A log from which others rebuild their state must have neither `drop_oldest` nor retention or a time to live: it
/// would lose its head without a word. Such a log refuses messages when it is full.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicPolicy {
    /// The end of the names of the topics that it is for.
    pub suffix: String,
    /// Most bytes that are kept of what all durable subscriptions have acknowledged. All of a topic counts as
    /// acknowledged while it has no durable subscription.
    pub retention_bytes: Option<usize>,
    /// How long what all durable subscriptions have acknowledged is kept, counted from its arrival.
    pub retention_time: Option<Duration>,
    /// Messages that are older than this count as acknowledged by every subscription.
    pub time_to_live: Option<Duration>,
    /// Whether a full topic drops its oldest messages, acknowledged or not.
    pub drop_oldest: bool,
    /// Whether messages go for which a newer one of their key is there, and empty ones with a key. Their numbers do not
    /// come again, and durable subscriptions that read all messages get them first. Batches and chunked messages stay
    /// as they are. It happens before the topic is full; without `drop_oldest` also by itself, when half of what the
    /// topic holds would go. Readers of the compacted topic see the latest of each key alone at any time.
    pub compact: bool,
}

impl TopicPolicy {
    /// A policy that keeps everything, for topics whose names end with `suffix`.
    #[must_use]
    pub fn for_suffix(suffix: &str) -> Self {
        Self { suffix: suffix.to_owned(), ..Self::default() }
    }
}

fn check_host_and_port(text: &str) -> Result<(), &'static str> {
    if text.contains("://") {
        return Err("has a scheme");
    }
    let bracketed = text.ends_with(']');
    let (host, port) = text.rsplit_once(':').filter(|_| !bracketed).ok_or("has no port")?;
    if !port.parse::<u16>().is_ok_and(|port| port > 0) || port.starts_with('+') {
        return Err("has a port that is no number from 1 to 65535");
    }
    let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match inside {
        Some(inside) if inside.parse::<Ipv6Addr>().is_ok() => Ok(()),
        None if host.is_empty() => Err("has no host"),
        None if host.contains(':') => Err("has an IPv6 address without brackets, or two ports"),
        None if host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte)) => Ok(()),
        _ => Err("has a host that cannot be"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertised_address_has_host_and_port() {
        let check = |advertise: &str| {
            let config = BrokerConfig::new(([127, 0, 0, 1], 0).into());
            BrokerConfig { advertise: Some(advertise.to_owned()), ..config }.check()
        };
        for good in ["localhost:6650", "broker_1.example:1", "10.0.0.1:65535", "[::1]:6650", "[2001:db8::2]:80"] {
            check(good).unwrap();
        }
        for (bad, what) in [
            ("foo", "has no port"),
            ("[::1]", "has no port"),
            ("", "has no port"),
            ("foo:", "a port that"),
            ("foo:0", "a port that"),
            ("foo:65536", "a port that"),
            ("foo:+80", "a port that"),
            (":6650", "has no host"),
            ("::1:6650", "without brackets"),
            ("[x]:6650", "a host that cannot be"),
            ("a b:6650", "a host that cannot be"),
            ("pulsar://foo:6650", "has a scheme"),
        ] {
            let fault = check(bad).unwrap_err();
            assert_eq!(fault.kind, FaultKind::InvalidArgument);
            let text = fault.to_string();
            assert!(text.contains(what) && text.contains("HOST:PORT"), "{bad}: {text}");
        }
    }
}
