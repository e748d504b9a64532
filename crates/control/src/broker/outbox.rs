//! What the broker has to say to a link beside the answers to its requests: messages for its consumers, and commands
//! such as a consumer's end.
//!
//! Dispatchers stop filling an outbox that is full, and its link calls them again when it has drained it; so a link
//! that does not read holds a bounded amount of memory. Only the link that got something is woken.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use pulsar::message::proto::{BaseCommand, CommandMessage, MessageIdData};
use tokio::sync::Notify;

use super::frame::{put_command, put_message};
use super::selector::ConsumerKey;

/// An outbox takes messages until it holds this much.
const FULL_BYTES: usize = 256 << 10;
/// What a message costs beside its bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// One link's outbox.
#[derive(Debug)]
pub(super) struct Outbox {
    state: Mutex<State>,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    items: VecDeque<Item>,
    /// Bytes of the messages among them.
    bytes: usize,
    /// The commands among them.
    commands: usize,
    /// Consumers that would have got more.
    stalled: BTreeSet<u64>,
}

#[derive(Debug)]
enum Item {
    Command(Box<BaseCommand>),
    Message(Delivery),
}

/// A message on its way to a consumer.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) consumer: ConsumerKey,
    /// The consumer's number on its link.
    pub(super) consumer_id: u64,
    pub(super) consumer_epoch: Option<u64>,
    pub(super) id: MessageIdData,
    /// The messages of the batch that are wanted; empty for all.
    pub(super) ack_set: Vec<i64>,
    pub(super) redeliveries: u32,
    pub(super) messages: u32,
    pub(super) tail: Bytes,
}

impl Outbox {
    pub(super) fn new(wake: Arc<Notify>) -> Self {
        Self { state: Mutex::default(), wake }
    }

    pub(super) fn push_command(&self, command: BaseCommand) {
        let mut state = self.state();
        state.items.push_back(Item::Command(Box::new(command)));
        state.commands += 1;
        drop(state);
        self.wake.notify_one();
    }

    /// Tells a consumer whether it is the active one. What was not sent yet of what it was told before is left out.
    pub(super) fn push_active(&self, command: BaseCommand) {
        let about = command.active_consumer_change.as_ref().map(|change| change.consumer_id);
        let mut state = self.state();
        let before = state.items.len();
        state.items.retain(|item| match item {
            Item::Command(other) => {
                other.active_consumer_change.as_ref().is_none_or(|change| Some(change.consumer_id) != about)
            }
            Item::Message(_) => true,
        });
        state.commands -= before - state.items.len();
        drop(state);
        self.push_command(command);
    }

    pub(super) fn push_message(&self, delivery: Delivery) {
        let mut state = self.state();
        state.bytes += delivery.tail.len() + MESSAGE_OVERHEAD_BYTES;
        state.items.push_back(Item::Message(delivery));
        drop(state);
        self.wake.notify_one();
    }

    /// Whether a consumer of this link may get a message now. If not, it will be named by [`Outbox::take_stalled`].
    pub(super) fn has_room(&self, consumer_id: u64) -> bool {
        let mut state = self.state();
        if state.bytes < FULL_BYTES {
            return true;
        }
        state.stalled.insert(consumer_id);
        false
    }

    /// How many commands wait.
    pub(super) fn commands(&self) -> usize {
        self.state().commands
    }

    /// Takes back what was not sent yet to this consumer, and returns how many messages that was.
    pub(super) fn purge(&self, consumer: ConsumerKey) -> u64 {
        let (mut messages, mut bytes) = (0, 0);
        let mut state = self.state();
        state.items.retain(|item| match item {
            Item::Message(delivery) if delivery.consumer == consumer => {
                messages += u64::from(delivery.messages);
                bytes += delivery.tail.len() + MESSAGE_OVERHEAD_BYTES;
                false
            }
            _ => true,
        });
        state.bytes -= bytes;
        messages
    }

    /// Appends frames to `out` until that holds `bytes_max`.
    pub(super) fn drain(&self, out: &mut BytesMut, bytes_max: usize) {
        let mut state = self.state();
        while out.len() < bytes_max {
            match state.items.pop_front() {
                Some(Item::Command(command)) => {
                    state.commands -= 1;
                    put_command(out, *command);
                }
                Some(Item::Message(delivery)) => {
                    state.bytes -= delivery.tail.len() + MESSAGE_OVERHEAD_BYTES;
                    delivery.put(out);
                }
                None => break,
            }
        }
    }

    /// The consumers that were refused while the outbox was full, if it is not any more.
    pub(super) fn take_stalled(&self) -> BTreeSet<u64> {
        let mut state = self.state();
        if state.bytes < FULL_BYTES { std::mem::take(&mut state.stalled) } else { BTreeSet::new() }
    }

    /// A panic while the lock was held would be a bug; what is in it stays whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Delivery {
    fn put(self, out: &mut BytesMut) {
        let message = CommandMessage {
            consumer_id: self.consumer_id,
            message_id: self.id,
            redelivery_count: Some(self.redeliveries).filter(|count| *count > 0),
            ack_set: self.ack_set,
            consumer_epoch: self.consumer_epoch,
        };
        put_message(out, &message, &self.tail);
    }
}

#[cfg(test)]
impl Outbox {
    /// An outbox that nobody is woken by.
    pub(super) fn detached() -> Arc<Self> {
        Arc::new(Self::new(Arc::new(Notify::new())))
    }

    /// Takes the messages out, in order.
    pub(super) fn take_messages(&self) -> Vec<Delivery> {
        let mut state = self.state();
        state.bytes = 0;
        state.commands = 0;
        let items = std::mem::take(&mut state.items);
        items
            .into_iter()
            .filter_map(|item| if let Item::Message(message) = item { Some(message) } else { None })
            .collect()
    }

    /// Takes the commands out, in order, and leaves the messages.
    pub(super) fn take_commands(&self) -> Vec<BaseCommand> {
        let mut state = self.state();
        let (mut commands, mut messages) = (Vec::new(), VecDeque::new());
        for item in state.items.drain(..) {
            match item {
                Item::Command(command) => commands.push(*command),
                message => messages.push_back(message),
            }
        }
        state.items = messages;
        state.commands = 0;
        commands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(consumer: ConsumerKey, bytes: usize) -> Delivery {
        Delivery {
            consumer,
            consumer_id: consumer * 10,
            consumer_epoch: None,
            id: MessageIdData::default(),
            ack_set: Vec::new(),
            redeliveries: 0,
            messages: 2,
            tail: Bytes::from(vec![0; bytes]),
        }
    }

    #[test]
    fn a_full_outbox_names_who_waits_once_it_is_drained() {
        let outbox = Outbox::detached();
        assert!(outbox.has_room(10));
        outbox.push_message(delivery(1, FULL_BYTES));
        assert!(!outbox.has_room(10) && outbox.take_stalled().is_empty());
        outbox.drain(&mut BytesMut::new(), 1);
        assert_eq!(outbox.take_stalled(), BTreeSet::from([10]));
        assert!(outbox.has_room(10) && outbox.take_stalled().is_empty());
    }

    #[test]
    fn what_was_not_sent_is_taken_back() {
        let outbox = Outbox::detached();
        for consumer in [1, 2, 1] {
            outbox.push_message(delivery(consumer, 100));
        }
        assert_eq!(outbox.purge(1), 4);
        assert_eq!(outbox.take_messages().iter().map(|message| message.consumer).collect::<Vec<_>>(), [2]);
    }
}
