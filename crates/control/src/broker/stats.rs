//! What the broker holds and whom it serves, for operators and tests.

/// A moment of an [`EmbeddedBroker`](super::EmbeddedBroker).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BrokerStats {
    /// Open links.
    pub links: usize,
    /// Bytes that all topics hold together, as the limits count them.
    pub bytes: usize,
    /// All topics, by name.
    pub topics: Vec<TopicStats>,
}

/// One topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicStats {
    /// Its full name.
    pub name: String,
    /// Entries (messages or batches) that it holds.
    pub entries: usize,
    /// What they and the schemas cost, as the limits count it.
    pub bytes: usize,
    /// What compaction would free of that.
    pub garbage_bytes: usize,
    /// Entries that were ever published to it.
    pub published: u64,
    /// Names of its producers.
    pub producers: Vec<String>,
    /// Producers that wait until they may be the only one.
    pub waiting_producers: usize,
    /// Versions of its schema.
    pub schemas: usize,
    /// Its subscriptions, by name.
    pub subscriptions: Vec<SubscriptionStats>,
}

/// One subscription.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriptionStats {
    /// Its name.
    pub name: String,
    /// `Exclusive`, `Failover`, `Shared` or `Key_Shared`; that of its last consumers when it has none.
    pub kind: &'static str,
    /// Whether it outlives its consumers.
    pub durable: bool,
    /// Its consumers, in the order in which they came.
    pub consumers: Vec<ConsumerStats>,
    /// Entries that are not acknowledged.
    pub backlog: u64,
    /// Messages (Shared, Key_Shared) or entries that consumers hold and have not acknowledged.
    pub unacked: u64,
    /// Entries that wait: to be handed out again, or for the consumer of their key.
    pub waiting: u64,
    /// Entries that were given back, or that a consumer left behind when it ended.
    pub redelivered: u64,
}

/// One consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerStats {
    /// Its name.
    pub name: String,
    /// Messages that it is ready to take.
    pub permits: i64,
    /// Messages that it holds and has not acknowledged.
    pub unacked: u64,
    /// Whether it gets nothing because it holds too many.
    pub blocked: bool,
    /// Messages that it was given.
    pub delivered: u64,
}
