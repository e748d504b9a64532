//! The producers of a topic: names that are taken, and who may be there beside whom.
//!
//! The topic's epoch grows whenever a producer becomes the only one. A producer that was the only one and comes back
//! shows the epoch that it had; when a newer one was there meanwhile, it is fenced.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use pulsar::message::proto::{ProducerAccessMode, ServerError};

use super::outbox::Outbox;
use super::replies;
use super::store::Refused;

/// Most producers of one topic, those that wait included.
const PRODUCERS_MAX: usize = 16 << 10;
/// Largest epoch that is believed of a topic that is new here: one that was forgotten had some such. Epochs count
/// producers, and none had more.
const CLAIMED_EPOCH_MAX: u64 = u32::MAX as u64;

/// A producer, as its client asked for it.
#[derive(Clone, Debug)]
pub(super) struct Producer {
    /// Identifies it among all that the broker ever had.
    pub(super) key: u64,
    /// Its number on its link.
    pub(super) producer_id: u64,
    pub(super) request_id: u64,
    pub(super) name: String,
    /// Whether the client chose the name, and not the broker.
    pub(super) user_named: bool,
    pub(super) mode: ProducerAccessMode,
    /// Counts how often the client connected it.
    pub(super) epoch: u64,
    pub(super) topic_epoch: Option<u64>,
    pub(super) schema_version: Vec<u8>,
    pub(super) outbox: Arc<Outbox>,
}

/// How a producer was taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It may send. The epoch is that of the topic, if somebody ever was its only producer.
    Ready { topic_epoch: Option<u64> },
    /// It will be told when it may send.
    Waiting,
}

/// All producers of a topic.
#[derive(Debug, Default)]
pub(super) struct Producers {
    live: BTreeMap<String, Producer>,
    /// The live one is the only one that may be there.
    exclusive: bool,
    waiting: VecDeque<Producer>,
    topic_epoch: Option<u64>,
}

impl Producers {
    pub(super) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.waiting.is_empty()
    }

    /// The topic's epoch, if it ever had an only producer.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.topic_epoch
    }

    /// Goes on with the epoch that the topic had before a restart.
    pub(super) fn restore_epoch(&mut self, epoch: Option<u64>) {
        self.topic_epoch = epoch;
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.live.keys()
    }

    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether this producer may send.
    pub(super) fn may_send(&self, name: &str, key: u64) -> bool {
        self.live.get(name).is_some_and(|producer| producer.key == key)
    }

    /// Whether this producer is here, sending or waiting.
    pub(super) fn contains(&self, name: &str, key: u64) -> bool {
        self.may_send(name, key) || self.waiting.iter().any(|producer| producer.key == key)
    }

    /// Takes a producer in. Those that it fences are told.
    ///
    /// # Errors
    /// When its name is taken, or another one must be alone, or it must be and is not.
    pub(super) fn add(&mut self, producer: Producer) -> Result<Admission, Refused> {
        if self.live.len() + self.waiting.len() >= PRODUCERS_MAX {
            let detail = format!("a topic of the embedded broker has at most {PRODUCERS_MAX} producers");
            return Err(Refused(ServerError::ProducerBusy, detail));
        }
        self.replace_former_self(&producer)?;
        if producer.mode == ProducerAccessMode::Shared {
            return self.add_shared(producer);
        }
        let taken = self.exclusive || !self.live.is_empty();
        match producer.mode {
            ProducerAccessMode::WaitForExclusive if taken => {
                self.waiting.push_back(producer);
                return Ok(Admission::Waiting);
            }
            ProducerAccessMode::ExclusiveWithFencing if taken => {
                self.next_epoch(&producer)?;
                self.fence_all();
            }
            ProducerAccessMode::Exclusive if taken || !self.waiting.is_empty() => {
                let detail = if self.exclusive || !self.waiting.is_empty() {
                    format!("Topic has an existing exclusive producer: {}", self.first_name())
                } else {
                    "Topic has existing shared producers".to_owned()
                };
                return Err(Refused(ServerError::ProducerFenced, detail));
            }
            _ => {}
        }
        Ok(Admission::Ready { topic_epoch: Some(self.make_exclusive(producer)?) })
    }

    /// A producer ended. The next one that waits may send.
    pub(super) fn remove(&mut self, name: &str, key: u64) {
        self.waiting.retain(|producer| producer.key != key);
        if self.may_send(name, key) {
            self.live.remove(name);
            self.exclusive = self.exclusive && !self.live.is_empty();
            self.promote();
        }
    }

    fn add_shared(&mut self, producer: Producer) -> Result<Admission, Refused> {
        if self.exclusive || !self.waiting.is_empty() {
            let detail = format!("Topic has an existing exclusive producer: {}", self.first_name());
            return Err(Refused(ServerError::ProducerBusy, detail));
        }
        self.live.insert(producer.name.clone(), producer);
        Ok(Admission::Ready { topic_epoch: self.topic_epoch })
    }

    /// A client that connects anew, before the broker has noticed that its last link is dead, takes over from itself.
    /// It is known by a name that the broker made.
    fn replace_former_self(&mut self, producer: &Producer) -> Result<(), Refused> {
        let Some(old) = self.live.get(&producer.name) else { return Ok(()) };
        if producer.user_named || old.user_named || producer.epoch <= old.epoch {
            let detail = format!("producer with name '{}' is already connected to this topic", producer.name);
            return Err(Refused(ServerError::ProducerBusy, detail));
        }
        self.live.remove(&producer.name);
        self.exclusive = self.exclusive && !self.live.is_empty();
        Ok(())
    }

    /// The epoch that the topic has once this is its only producer.
    fn next_epoch(&self, producer: &Producer) -> Result<u64, Refused> {
        let fenced = |detail| Err(Refused(ServerError::ProducerFenced, detail));
        match (producer.topic_epoch, self.topic_epoch) {
            (Some(had), Some(now)) if had < now => {
                fenced(format!("Topic epoch has already moved. Current epoch: {now}, Producer epoch: {had}"))
            }
            (Some(had), Some(now)) if had > now => {
                fenced(format!("Topic never had this epoch. Current epoch: {now}, Producer epoch: {had}"))
            }
            (Some(had), None) if had > CLAIMED_EPOCH_MAX => {
                fenced(format!("Topic never had this epoch. Producer epoch: {had}"))
            }
            (Some(had), _) => Ok(had),
            (None, None) => Ok(0),
            (None, Some(now)) => match now.checked_add(1) {
                Some(next) => Ok(next),
                None => fenced(format!("Topic has no epoch after {now}")),
            },
        }
    }

    fn make_exclusive(&mut self, producer: Producer) -> Result<u64, Refused> {
        let epoch = self.next_epoch(&producer)?;
        self.topic_epoch = Some(epoch);
        self.exclusive = true;
        self.live.insert(producer.name.clone(), producer);
        Ok(epoch)
    }

    fn fence_all(&mut self) {
        for producer in std::mem::take(&mut self.waiting) {
            fence_waiting(&producer);
        }
        for producer in std::mem::take(&mut self.live).into_values() {
            producer.outbox.push_command(replies::close_producer(producer.producer_id));
        }
        self.exclusive = false;
    }

    fn promote(&mut self) {
        while self.live.is_empty()
            && let Some(next) = self.waiting.pop_front()
        {
            if self.next_epoch(&next).is_err() {
                fence_waiting(&next);
                continue;
            }
            let (outbox, request_id, name) = (next.outbox.clone(), next.request_id, next.name.clone());
            let version = next.schema_version.clone();
            let Ok(epoch) = self.make_exclusive(next) else { continue };
            let admission = Admission::Ready { topic_epoch: Some(epoch) };
            outbox.push_command(replies::producer_success(request_id, name, admission, version));
        }
    }

    fn first_name(&self) -> &str {
        self.live.keys().next().or_else(|| self.waiting.front().map(|producer| &producer.name)).map_or("", |name| name)
    }
}

fn fence_waiting(producer: &Producer) {
    let refused = Refused(ServerError::ProducerFenced, "Fenced out".to_owned());
    producer.outbox.push_command(replies::error(producer.request_id, refused));
}

#[cfg(test)]
mod tests {
    use ProducerAccessMode::{Exclusive, ExclusiveWithFencing, Shared, WaitForExclusive};

    use super::*;

    fn producer(key: u64, mode: ProducerAccessMode) -> Producer {
        Producer {
            key,
            producer_id: key,
            request_id: 100 + key,
            name: format!("p{key}"),
            user_named: true,
            mode,
            epoch: 0,
            topic_epoch: None,
            schema_version: Vec::new(),
            outbox: Outbox::detached(),
        }
    }

    fn ready(epoch: u64) -> Admission {
        Admission::Ready { topic_epoch: Some(epoch) }
    }

    fn refused(result: Result<Admission, Refused>) -> ServerError {
        result.unwrap_err().0
    }

    #[test]
    fn an_exclusive_producer_is_alone() {
        let mut producers = Producers::default();
        assert_eq!(producers.add(producer(1, Shared)).unwrap(), Admission::Ready { topic_epoch: None });
        assert_eq!(refused(producers.add(producer(2, Exclusive))), ServerError::ProducerFenced);
        producers.remove("p1", 1);
        assert_eq!(producers.add(producer(2, Exclusive)).unwrap(), ready(0));
        assert_eq!(refused(producers.add(producer(3, Shared))), ServerError::ProducerBusy);
        assert_eq!(refused(producers.add(producer(3, Exclusive))), ServerError::ProducerFenced);
        assert!(producers.may_send("p2", 2) && !producers.may_send("p2", 9));
    }

    #[test]
    fn who_waits_is_told_under_the_same_request() {
        let mut producers = Producers::default();
        producers.add(producer(1, WaitForExclusive)).unwrap();
        let (second, third) = (producer(2, WaitForExclusive), producer(3, WaitForExclusive));
        let (to_second, to_third) = (second.outbox.clone(), third.outbox.clone());
        assert_eq!(producers.add(second).unwrap(), Admission::Waiting);
        assert_eq!(producers.add(third).unwrap(), Admission::Waiting);
        assert!(!producers.may_send("p2", 2) && producers.contains("p2", 2));
        // One that gives up while it waits is passed over.
        producers.remove("p2", 2);
        producers.remove("p1", 1);
        assert!(to_second.take_commands().is_empty());
        let told = to_third.take_commands().remove(0).producer_success.unwrap();
        assert_eq!((told.request_id, told.producer_ready, told.topic_epoch), (103, Some(true), Some(1)));
        assert!(producers.may_send("p3", 3));
    }

    #[test]
    fn fencing_ends_the_others_and_they_cannot_come_back() {
        let mut producers = Producers::default();
        let (first, waiting) = (producer(1, Exclusive), producer(2, WaitForExclusive));
        let (to_first, to_waiting) = (first.outbox.clone(), waiting.outbox.clone());
        producers.add(first).unwrap();
        producers.add(waiting).unwrap();
        assert_eq!(producers.add(producer(3, ExclusiveWithFencing)).unwrap(), ready(1));
        assert_eq!(to_first.take_commands().remove(0).close_producer.unwrap().producer_id, 1);
        let error = to_waiting.take_commands().remove(0).error.unwrap();
        assert_eq!((error.request_id, error.error), (102, ServerError::ProducerFenced as i32));
        producers.remove("p3", 3);
        let again = Producer { topic_epoch: Some(0), ..producer(1, Exclusive) };
        assert_eq!(refused(producers.add(again)), ServerError::ProducerFenced);
        let last = Producer { topic_epoch: Some(1), ..producer(3, ExclusiveWithFencing) };
        assert_eq!(producers.add(last).unwrap(), ready(1));
    }

    #[test]
    fn an_epoch_that_the_topic_never_gave_is_refused() {
        let shows = |key, mode, epoch| Producer { topic_epoch: Some(epoch), ..producer(key, mode) };
        let mut producers = Producers::default();
        assert_eq!(refused(producers.add(shows(1, Exclusive, u64::MAX))), ServerError::ProducerFenced);
        // One that comes back to a topic that was forgotten meanwhile.
        assert_eq!(producers.add(shows(1, Exclusive, 7)).unwrap(), ready(7));
        for epoch in [8, u64::MAX] {
            assert_eq!(refused(producers.add(shows(2, ExclusiveWithFencing, epoch))), ServerError::ProducerFenced);
        }
        assert!(producers.may_send("p1", 1), "it was not fenced by those");
        let made_up = shows(3, WaitForExclusive, u64::MAX);
        let told = made_up.outbox.clone();
        assert_eq!(producers.add(made_up).unwrap(), Admission::Waiting);
        producers.remove("p1", 1);
        assert_eq!(told.take_commands().remove(0).error.unwrap().error, ServerError::ProducerFenced as i32);
        assert_eq!(producers.add(producer(4, Exclusive)).unwrap(), ready(8));
        // Whatever is in a data directory.
        let mut producers = Producers::default();
        producers.restore_epoch(Some(u64::MAX));
        assert_eq!(refused(producers.add(producer(5, Exclusive))), ServerError::ProducerFenced);
        assert_eq!(producers.add(producer(5, Shared)).unwrap(), Admission::Ready { topic_epoch: Some(u64::MAX) });
    }

    #[test]
    fn a_name_is_taken_but_by_its_former_self() {
        let mut producers = Producers::default();
        let named =
            |key, epoch, user_named| Producer { name: "n".to_owned(), epoch, user_named, ..producer(key, Shared) };
        producers.add(named(1, 0, false)).unwrap();
        assert_eq!(refused(producers.add(named(2, 0, false))), ServerError::ProducerBusy);
        assert_eq!(refused(producers.add(named(2, 1, true))), ServerError::ProducerBusy);
        producers.add(named(2, 1, false)).unwrap();
        assert!(producers.may_send("n", 2) && !producers.may_send("n", 1));
        // The end of the dead link does not end the new one.
        producers.remove("n", 1);
        assert!(producers.may_send("n", 2));
    }
}
