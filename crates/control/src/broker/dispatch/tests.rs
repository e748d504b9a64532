//! The dispatcher as a state machine: what each kind of subscription promises, step by step and at random.

mod model;

use std::sync::Arc;

use pulsar::message::proto::{IntRange, KeySharedMeta, KeySharedMode};

use super::*;
use crate::broker::hash::hash;
use crate::broker::log::tests::tail;
use crate::broker::outbox::Outbox;

const LIMITS: UnackedLimits = UnackedLimits { consumer: 1000, subscription: 1000 };

/// A subscription, its log, and the outboxes of its consumers.
struct Scene {
    log: Log,
    subscription: Subscription,
    outboxes: BTreeMap<ConsumerKey, Arc<Outbox>>,
    kind: SubType,
    meta: Option<KeySharedMeta>,
}

impl Scene {
    fn new(kind: SubType) -> Self {
        Self::limited(kind, LIMITS)
    }

    fn limited(kind: SubType, limits: UnackedLimits) -> Self {
        Self {
            log: Log::new(1),
            subscription: Subscription::new("topic", true, 0, limits),
            outboxes: BTreeMap::new(),
            kind,
            meta: None,
        }
    }

    fn applicant(&self, key: ConsumerKey) -> Applicant {
        Applicant {
            key,
            consumer_id: key,
            name: format!("c{key}"),
            priority: 0,
            kind: self.kind,
            key_shared: self.meta.clone(),
            epoch: None,
            outbox: Outbox::detached(),
        }
    }

    fn attach(&mut self, applicant: Applicant, permits: u32) -> Result<(), Refused> {
        let (key, outbox) = (applicant.key, applicant.outbox.clone());
        self.subscription.attach(applicant, false, &self.log)?;
        self.outboxes.insert(key, outbox);
        self.flow(key, permits);
        Ok(())
    }

    fn join(&mut self, key: ConsumerKey, permits: u32) {
        self.attach(self.applicant(key), permits).unwrap();
    }

    fn leave(&mut self, key: ConsumerKey) {
        self.subscription.detach(key, &self.log);
        self.outboxes.remove(&key);
    }

    fn flow(&mut self, key: ConsumerKey, permits: u32) {
        self.subscription.flow(key, permits, &self.log);
    }

    fn publish(&mut self, key: &str) -> u64 {
        let number = self.log.push(Entry::new(&tail(key, 0), 0));
        self.subscription.dispatch(&self.log);
        number
    }

    fn publish_all(&mut self, keys: &[&str]) {
        for key in keys {
            self.publish(key);
        }
    }

    fn batch(&mut self, messages: i32) {
        let mut batch = tail("", 0);
        batch.metadata.num_messages_in_batch = Some(messages);
        self.log.push(Entry::new(&batch, 0));
        self.subscription.dispatch(&self.log);
    }

    fn id(&self, number: u64) -> MessageIdData {
        self.log.message_id(number)
    }

    fn ack(&mut self, number: u64) {
        self.subscription.acknowledge(&[self.id(number)], false, &self.log).unwrap();
    }

    fn nack(&mut self, key: ConsumerKey, numbers: &[u64]) {
        let ids: Vec<_> = numbers.iter().map(|number| self.id(*number)).collect();
        self.subscription.redeliver(key, &ids, None, &self.log);
    }

    /// What a consumer received since it was last asked.
    fn take(&self, key: ConsumerKey) -> Vec<u64> {
        self.outboxes[&key].take_messages().iter().map(|message| message.id.entry_id).collect()
    }

    /// The last thing that a consumer was told about being the active one.
    fn told(&self, key: ConsumerKey) -> Option<bool> {
        let told = self.outboxes[&key].take_commands();
        told.iter().rev().find_map(|told| told.active_consumer_change.as_ref()?.is_active)
    }

    fn refused(&mut self, applicant: Applicant) -> ServerError {
        self.attach(applicant, 0).unwrap_err().0
    }
}

#[test]
fn an_exclusive_subscription_has_one_consumer_and_one_order() {
    let mut scene = Scene::new(SubType::Exclusive);
    scene.join(1, 3);
    assert_eq!(scene.refused(scene.applicant(2)), ServerError::ConsumerBusy);
    let other_kind = Applicant { kind: SubType::Shared, ..scene.applicant(2) };
    assert_eq!(scene.refused(other_kind), ServerError::ConsumerBusy);
    scene.publish_all(&["", "", "", ""]);
    assert_eq!(scene.take(1), [0, 1, 2], "no more than it has permits for");
    scene.ack(1);
    // With some of them the order would be lost.
    scene.nack(1, &[2]);
    scene.flow(1, 10);
    assert_eq!(scene.take(1), [0, 2, 3]);
    scene.subscription.acknowledge(&[scene.id(2)], true, &scene.log).unwrap();
    scene.leave(1);
    scene.kind = SubType::Shared;
    scene.join(3, 10);
    assert_eq!(scene.take(3), [3], "the next consumer may be of another kind");
}

#[test]
fn what_was_not_sent_yet_comes_once_after_a_redelivery() {
    let mut scene = Scene::new(SubType::Exclusive);
    scene.join(1, 3);
    scene.publish_all(&["", "", "", ""]);
    scene.nack(1, &[]);
    // The permits of what was taken back are there again.
    assert_eq!(scene.take(1), [0, 1, 2]);
}

#[test]
fn failover_has_one_active_consumer_and_tells_all() {
    let mut scene = Scene::new(SubType::Failover);
    scene.join(1, 10);
    assert_eq!(scene.told(1), Some(true));
    scene.publish_all(&["", ""]);
    assert_eq!(scene.take(1), [0, 1]);
    scene.ack(0);
    let last = Applicant { priority: 2, ..scene.applicant(2) };
    scene.attach(last, 10).unwrap();
    assert_eq!((scene.told(1), scene.told(2)), (None, Some(false)));
    let first = Applicant { priority: -1, ..scene.applicant(3) };
    scene.attach(first, 10).unwrap();
    assert_eq!((scene.told(1), scene.told(2), scene.told(3)), (Some(false), Some(false), Some(true)));
    assert_eq!(scene.take(3), [1], "what the former one did not acknowledge");
    scene.leave(3);
    assert_eq!((scene.told(1), scene.told(2)), (Some(true), Some(false)));
    assert_eq!((scene.take(1), scene.take(2)), (vec![1], vec![]));
}

#[test]
fn shared_goes_round_by_permits_and_priority() {
    let mut scene = Scene::new(SubType::Shared);
    scene.join(1, 2);
    scene.join(2, 10);
    let reserve = Applicant { priority: 1, ..scene.applicant(3) };
    scene.attach(reserve, 10).unwrap();
    scene.publish_all(&["", "", "", "", "", ""]);
    assert_eq!((scene.take(1), scene.take(2), scene.take(3)), (vec![0, 2], vec![1, 3, 4, 5], vec![]));
    let cumulative = scene.subscription.acknowledge(&[scene.id(2)], true, &scene.log);
    assert_eq!(cumulative.unwrap_err().0, ServerError::NotAllowedError);
    // Who ends leaves what it has to the others; what is acknowledged does not come again.
    scene.ack(3);
    scene.leave(2);
    assert_eq!((scene.take(1), scene.take(3)), (vec![], vec![1, 4, 5]));
}

#[test]
fn redeliveries_are_counted_where_a_consumer_gave_back() {
    let mut scene = Scene::new(SubType::Shared);
    scene.join(1, 100);
    scene.publish("");
    for expected in 0..3 {
        let messages = scene.outboxes[&1].take_messages();
        assert_eq!(messages.iter().map(|message| message.redeliveries).collect::<Vec<_>>(), [expected]);
        scene.nack(1, &[0]);
    }
    scene.ack(0);
    scene.nack(1, &[0]);
    assert!(scene.subscription.redeliveries.is_empty());
}

#[test]
fn a_consumer_that_never_acknowledges_is_stopped() {
    let mut scene = Scene::limited(SubType::Shared, UnackedLimits { consumer: 3, subscription: 5 });
    scene.join(1, 1000);
    for _ in 0..10 {
        scene.publish("");
    }
    assert_eq!(scene.take(1), [0, 1, 2]);
    scene.join(2, 1000);
    assert_eq!(scene.take(2), [3, 4], "the subscription has a limit of its own");
    scene.ack(0);
    assert_eq!((scene.take(1), scene.take(2)), (vec![5], vec![]));
    scene.ack(3);
    assert_eq!((scene.take(1), scene.take(2)), (vec![], vec![6]));
}

#[test]
fn a_batch_counts_with_its_messages_and_comes_back_with_what_is_wanted_of_it() {
    let mut scene = Scene::new(SubType::Shared);
    scene.join(1, 1);
    scene.batch(3);
    scene.batch(3);
    assert_eq!(scene.take(1), [0]);
    scene.flow(1, 2);
    assert_eq!(scene.take(1), [], "two permits are still owed");
    let partly = MessageIdData { ack_set: vec![0b101], ..scene.id(0) };
    scene.subscription.acknowledge(std::slice::from_ref(&partly), false, &scene.log).unwrap();
    scene.nack(1, &[0]);
    scene.flow(1, 6);
    let messages = scene.outboxes[&1].take_messages();
    let seen: Vec<_> = messages.iter().map(|message| (message.id.entry_id, message.ack_set.clone())).collect();
    assert_eq!(seen, [(0, vec![0b101]), (1, vec![])]);
    let rest = MessageIdData { ack_set: vec![0b010], ..scene.id(0) };
    scene.subscription.acknowledge(&[rest], false, &scene.log).unwrap();
    assert_eq!(scene.subscription.cursor().mark(), 1);
}

#[test]
fn a_key_that_moves_waits_until_its_former_consumer_lets_go() {
    let mut scene = Scene::new(SubType::KeyShared);
    scene.join(1, 100);
    let keys: Vec<String> = (0..20).map(|key| format!("k{key}")).collect();
    let all: Vec<&str> = keys.iter().map(String::as_str).collect();
    scene.publish_all(&all);
    assert_eq!(scene.take(1).len(), 20);
    scene.join(2, 100);
    scene.publish_all(&all);
    let Mode::Keyed(keyed) = &scene.subscription.mode else { panic!() };
    let moved: Vec<u64> = (0..20)
        .filter(|key| keyed.selector.select(keyed.slot(hash(all[*key as usize].as_bytes()))) == Some(2))
        .collect();
    assert!(moved.len() > 3 && moved.len() < 17, "{moved:?}");
    assert_eq!(scene.take(2), [], "everything of its keys is unacknowledged elsewhere");
    assert_eq!(scene.take(1).len(), 20 - moved.len());
    scene.ack(moved[0]);
    assert_eq!(scene.take(2), [20 + moved[0]]);
    scene.nack(1, &[moved[1]]);
    assert_eq!(scene.take(2), [moved[1], 20 + moved[1]]);
    scene.leave(1);
    let taken = scene.take(2);
    assert_eq!(taken.len(), 40 - 3 - 1, "all that it has not got yet, and that is not acknowledged");
    for key in 0..20 {
        let of_key: Vec<u64> = taken.iter().copied().filter(|number| number % 20 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}

#[test]
fn keys_out_of_order_do_not_wait() {
    let meta = KeySharedMeta { allow_out_of_order_delivery: Some(true), ..Default::default() };
    let mut scene = Scene { meta: Some(meta), ..Scene::new(SubType::KeyShared) };
    let keys: Vec<String> = (0..20).map(|key| format!("k{key}")).collect();
    let all: Vec<&str> = keys.iter().map(String::as_str).collect();
    scene.join(1, 100);
    scene.publish_all(&all);
    scene.join(2, 100);
    scene.publish_all(&all);
    assert!(!scene.take(2).is_empty());
    let in_order = Applicant { key_shared: None, ..scene.applicant(3) };
    assert_eq!(scene.refused(in_order), ServerError::ConsumerBusy);
}

#[test]
fn sticky_consumers_get_their_ranges_and_what_is_nobodys_waits() {
    let sticky = |start, end| KeySharedMeta {
        key_shared_mode: KeySharedMode::Sticky as i32,
        hash_ranges: vec![IntRange { start, end }],
        ..Default::default()
    };
    let mut scene = Scene { meta: Some(sticky(0, 30_000)), ..Scene::new(SubType::KeyShared) };
    scene.join(1, 100);
    scene.publish_all(&["k0", "k3", "k1"]);
    assert_eq!(scene.take(1), [0, 2]);
    scene.meta = Some(sticky(30_000, 65_535));
    assert_eq!(scene.refused(scene.applicant(2)), ServerError::ConsumerAssignError);
    scene.meta = Some(sticky(30_001, 65_535));
    scene.join(2, 100);
    assert_eq!(scene.take(2), [1]);
    scene.meta = None;
    assert_eq!(scene.refused(scene.applicant(3)), ServerError::ConsumerBusy);
}

#[test]
fn one_slow_consumer_does_not_stop_the_keys_of_others() {
    let mut scene = Scene::new(SubType::KeyShared);
    scene.join(1, 0);
    scene.join(2, 100_000);
    let keys: Vec<String> = (0..64).map(|key| format!("k{key}")).collect();
    for number in 0..10_000 {
        scene.publish(&keys[number % 64]);
        for number in scene.take(2) {
            scene.ack(number);
        }
    }
    let Mode::Keyed(keyed) = &scene.subscription.mode else { panic!() };
    assert_eq!(keyed.waiting_entries(), 2 * LOOK_AHEAD_PER_CONSUMER, "and reading ahead is bounded");
    scene.flow(1, 100_000);
    let mut taken = scene.take(1);
    while !taken.is_empty() {
        taken.iter().for_each(|number| scene.ack(*number));
        taken = scene.take(1);
        scene.take(2).iter().for_each(|number| scene.ack(*number));
    }
    assert_eq!(scene.subscription.cursor().mark(), 10_000);
}

#[test]
fn a_full_link_gets_the_rest_when_it_has_room() {
    let mut scene = Scene::new(SubType::Shared);
    scene.join(1, 1_000_000);
    for _ in 0..10_000 {
        scene.publish("");
    }
    let first = scene.take(1).len();
    assert!(first < 1000 + 1, "{first}");
    assert_eq!(
        scene.outboxes[&1].take_stalled(),
        BTreeSet::new(),
        "its limit of unacknowledged messages stops it first"
    );
    let mut scene = Scene::new(SubType::Exclusive);
    scene.join(1, 1_000_000);
    for _ in 0..10_000 {
        scene.publish("");
    }
    let mut taken = Vec::new();
    while taken.len() < 10_000 {
        let more = scene.take(1);
        assert!(!more.is_empty() && more.len() < 5000, "{}", more.len());
        taken.extend(more);
        assert_eq!(scene.outboxes[&1].take_stalled().len(), usize::from(taken.len() < 10_000));
        scene.subscription.dispatch(&scene.log);
    }
    assert_eq!(taken, (0..10_000).collect::<Vec<_>>());
}

#[test]
fn the_compacted_view_has_the_latest_of_each_key_and_then_everything() {
    let mut scene = Scene::new(SubType::Exclusive);
    scene.log.index_keys();
    scene.publish_all(&["a", "b", "a", "", "c"]);
    let tombstone = |scene: &mut Scene, key: &str| {
        let mut empty = tail(key, 0);
        empty.payload_bytes = 0;
        scene.log.push(Entry::new(&empty, 0));
        scene.subscription.dispatch(&scene.log);
    };
    tombstone(&mut scene, "c");
    let applicant = scene.applicant(1);
    scene.outboxes.insert(1, applicant.outbox.clone());
    scene.subscription.attach(applicant, true, &scene.log).unwrap();
    assert_eq!(scene.subscription.last_visible(&scene.log).map(|entry| entry.number), Some(2));
    scene.flow(1, 100);
    assert_eq!(scene.take(1), [1, 2]);
    // Changes are told as they come, removals too.
    scene.publish_all(&["b", ""]);
    tombstone(&mut scene, "b");
    assert_eq!(scene.take(1), [6, 7, 8]);
    let shared = Applicant { kind: SubType::Shared, ..scene.applicant(2) };
    let mut other = Subscription::new("topic", true, 0, LIMITS);
    assert_eq!(other.attach(shared, true, &scene.log).unwrap_err().0, ServerError::NotAllowedError);
}

#[test]
fn gaps_in_the_log_count_as_acknowledged() {
    let mut scene = Scene::new(SubType::Shared);
    scene.log.index_keys();
    scene.publish_all(&["a", "a", "a", "b"]);
    scene.log.compact(4);
    scene.join(1, 10);
    assert_eq!(scene.take(1), [2, 3]);
    scene.ack(2);
    scene.ack(3);
    assert_eq!(scene.subscription.cursor().mark(), 4);
    // What is dropped while a consumer holds it is not redelivered.
    scene.publish_all(&["c", "d"]);
    assert_eq!(scene.take(1), [4, 5]);
    scene.subscription.skip(4..5);
    scene.nack(1, &[]);
    assert_eq!(scene.take(1), [5]);
    assert_eq!(scene.subscription.unacked, 1);
}
