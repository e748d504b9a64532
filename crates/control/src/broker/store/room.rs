//! What subscriptions cost in memory, and how many there is room for.

use pulsar::message::proto::ServerError;

use super::{Refused, Store};

/// What a subscription costs beside its names.
const SUBSCRIPTION_OVERHEAD_BYTES: usize = 512;
/// Subscriptions may always cost this much, however little all topics may hold.
pub(super) const SUBSCRIPTION_BYTES_LEAST: usize = 1 << 20;

impl Store {
    /// What this subscription will cost more than now: nothing when it is there.
    ///
    /// # Errors
    /// When it is not, and there is no room for it.
    pub(super) fn added_bytes(&self, topic: &str, subscription: &str) -> Result<usize, Refused> {
        if self.topics.get(topic).is_some_and(|topic| topic.subscriptions.contains_key(subscription)) {
            return Ok(0);
        }
        let (held, cost) = (self.subscription_bytes, subscription_cost(topic, subscription));
        let bytes_max = (self.config.total_bytes_max / 4).max(SUBSCRIPTION_BYTES_LEAST);
        if held + cost > bytes_max {
            let detail = format!(
                "the subscriptions of the embedded broker hold {held} bytes (limit {bytes_max}): end some, or raise \
                 its limit of memory, of which they may have a quarter"
            );
            return Err(Refused(ServerError::NotAllowedError, detail));
        }
        Ok(cost)
    }
}

/// It knows its topic's name, and has its own here and in what is kept.
pub(super) fn subscription_cost(topic: &str, subscription: &str) -> usize {
    topic.len() + 2 * subscription.len() + SUBSCRIPTION_OVERHEAD_BYTES
}
