//! A consumer as its subscription sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use pulsar::message::proto::KeySharedMeta;
use pulsar::message::proto::command_subscribe::SubType;

use super::super::outbox::Outbox;
use super::super::selector::ConsumerKey;

/// A consumer that wants to be attached.
#[derive(Clone, Debug)]
pub(in crate::broker) struct Applicant {
    pub(in crate::broker) key: ConsumerKey,
    /// Its number on its link.
    pub(in crate::broker) consumer_id: u64,
    pub(in crate::broker) name: String,
    /// Lower goes first.
    pub(in crate::broker) priority: i32,
    pub(in crate::broker) kind: SubType,
    pub(in crate::broker) key_shared: Option<KeySharedMeta>,
    /// Counts the redeliveries that the client asked for; messages show it, so that it can tell old ones.
    pub(in crate::broker) epoch: Option<u64>,
    pub(in crate::broker) outbox: Arc<Outbox>,
}

/// An attached consumer.
#[derive(Debug)]
pub(super) struct Consumer {
    pub(super) applicant: Applicant,
    /// Messages that the client is ready to take. Below zero when the last batch was larger than that.
    pub(super) permits: i64,
    /// Messages in `pending`.
    pub(super) unacked: u64,
    /// Entries that it was given and has not acknowledged. Empty where only one consumer at a time gets any.
    pub(super) pending: BTreeMap<u64, Pending>,
    pub(super) delivered: u64,
}

/// What is remembered of an entry that a consumer holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) messages: u32,
    /// Where Key_Shared counts it.
    pub(super) slot: u16,
}

impl Consumer {
    pub(super) fn new(applicant: Applicant) -> Self {
        Self { applicant, permits: 0, unacked: 0, pending: BTreeMap::new(), delivered: 0 }
    }

    /// Whether it may be given a message now.
    pub(super) fn is_available(&self, unacked_max: u64) -> bool {
        self.permits > 0 && self.unacked < unacked_max && self.applicant.outbox.has_room(self.applicant.consumer_id)
    }

    /// Takes back what was not sent to it yet.
    pub(super) fn purge(&mut self) {
        let messages = self.applicant.outbox.purge(self.applicant.key);
        self.delivered = self.delivered.saturating_sub(messages);
        self.permits = self.permits.saturating_add_unsigned(messages);
    }
}
