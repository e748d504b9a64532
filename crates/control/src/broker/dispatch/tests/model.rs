//! Random joins, ends, publishes, acknowledgements and redeliveries against a model of what consumers hold.

use proptest::prelude::*;

use super::*;

const KEYS: [&str; 6] = ["k0", "k1", "k2", "k3", "k4", "k5"];

#[derive(Clone, Debug)]
enum Step {
    Publish(usize),
    Join,
    Leave(usize),
    Flow(usize, u32),
    /// A client reads what was sent to it.
    Take(usize),
    /// Of what the client holds.
    Ack(usize, usize),
    /// Of anything that was published: a late acknowledgement.
    AckAny(usize),
    Nack(usize, usize),
    NackAll(usize),
    /// The topic drops its oldest entry.
    DropFirst,
}

fn step() -> impl Strategy<Value = Step> {
    let any = 0..100_usize;
    prop_oneof![
        8 => (0..KEYS.len()).prop_map(Step::Publish),
        2 => Just(Step::Join),
        1 => any.clone().prop_map(Step::Leave),
        3 => (any.clone(), 1..6_u32).prop_map(|(consumer, permits)| Step::Flow(consumer, permits)),
        8 => any.clone().prop_map(Step::Take),
        6 => (any.clone(), any.clone()).prop_map(|(consumer, entry)| Step::Ack(consumer, entry)),
        1 => any.clone().prop_map(Step::AckAny),
        2 => (any.clone(), any.clone()).prop_map(|(consumer, entry)| Step::Nack(consumer, entry)),
        1 => any.clone().prop_map(Step::NackAll),
        1 => Just(Step::DropFirst),
    ]
}

/// What clients know, kept apart from the dispatcher's own books.
struct Model {
    scene: Scene,
    /// Entries that each client received and neither acknowledged nor gave back.
    holding: BTreeMap<ConsumerKey, BTreeSet<u64>>,
    permits: BTreeMap<ConsumerKey, u64>,
    hashes: Vec<u32>,
    done: BTreeSet<u64>,
    next_key: ConsumerKey,
    /// Whether a key is at one consumer at a time, and in order.
    in_order: bool,
}

impl Model {
    fn new(scene: Scene, in_order: bool) -> Self {
        let (holding, permits) = (BTreeMap::new(), BTreeMap::new());
        Self { scene, holding, permits, hashes: Vec::new(), done: BTreeSet::new(), next_key: 1, in_order }
    }

    fn consumer(&self, choice: usize) -> Option<ConsumerKey> {
        self.holding.keys().nth(choice % self.holding.len().max(1)).copied()
    }

    fn held_by(&self, consumer: ConsumerKey, choice: usize) -> Option<u64> {
        let held = &self.holding[&consumer];
        held.iter().nth(choice % held.len().max(1)).copied()
    }

    fn done(&mut self, number: u64) {
        self.done.insert(number);
        for held in self.holding.values_mut() {
            held.remove(&number);
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Publish(key) => {
                self.hashes.push(hash(KEYS[key].as_bytes()));
                self.scene.publish(KEYS[key]);
            }
            Step::Join if self.holding.len() < 5 => {
                self.scene.join(self.next_key, 0);
                self.holding.insert(self.next_key, BTreeSet::new());
                self.permits.insert(self.next_key, 0);
                self.next_key += 1;
            }
            Step::Join => {}
            Step::AckAny(choice) => {
                if let Some(number) = (self.log_len() > 0).then(|| choice as u64 % self.log_len()) {
                    self.scene.ack(number);
                    self.done(number);
                }
            }
            Step::DropFirst => {
                let first = self.scene.log.first();
                self.scene.log.drop_first();
                self.scene.subscription.skip(first..self.scene.log.first());
                (first..self.scene.log.first()).for_each(|number| self.done(number));
            }
            Step::Leave(choice)
            | Step::Flow(choice, _)
            | Step::Take(choice)
            | Step::Ack(choice, _)
            | Step::Nack(choice, _)
            | Step::NackAll(choice) => {
                if let Some(consumer) = self.consumer(choice) {
                    self.apply_to(consumer, step);
                }
            }
        }
        self.check();
    }

    fn apply_to(&mut self, consumer: ConsumerKey, step: &Step) {
        match *step {
            Step::Leave(_) => {
                self.scene.leave(consumer);
                self.holding.remove(&consumer);
            }
            Step::Flow(_, permits) => {
                self.scene.flow(consumer, permits);
                *self.permits.entry(consumer).or_default() += u64::from(permits);
            }
            Step::Take(_) => self.take(consumer),
            Step::Ack(_, choice) => {
                if let Some(number) = self.held_by(consumer, choice) {
                    self.scene.ack(number);
                    self.done(number);
                }
            }
            Step::Nack(_, choice) => {
                // What is on its way while the client gives something back comes out of order.
                self.take(consumer);
                if let Some(number) = self.held_by(consumer, choice) {
                    self.holding.entry(consumer).or_default().remove(&number);
                    self.scene.nack(consumer, &[number]);
                }
            }
            Step::NackAll(_) => {
                self.holding.insert(consumer, BTreeSet::new());
                self.scene.nack(consumer, &[]);
            }
            _ => {}
        }
    }

    fn take(&mut self, consumer: ConsumerKey) {
        for number in self.scene.take(consumer) {
            let permits = self.permits.entry(consumer).or_default();
            assert!(*permits > 0, "a message without permit");
            *permits -= 1;
            // Sent before it was acknowledged by somebody else, or dropped: nobody can call that back.
            if self.done.contains(&number) {
                continue;
            }
            for (other, held) in &self.holding {
                assert!(!held.contains(&number), "{number} is at {other} and came to {consumer}");
                if self.in_order && other != &consumer {
                    let same = held.iter().find(|held| self.hash(**held) == self.hash(number));
                    assert_eq!(same, None, "the key of {number} is at {other} too");
                }
            }
            if self.in_order {
                let before = (0..number).filter(|other| self.hash(*other) == self.hash(number));
                for other in before.filter(|other| !self.done.contains(other)) {
                    assert!(self.holding[&consumer].contains(&other), "{number} came before {other}");
                }
            }
            self.holding.entry(consumer).or_default().insert(number);
        }
    }

    /// The dispatcher's books agree with each other and with the model.
    fn check(&self) {
        let subscription = &self.scene.subscription;
        if let Mode::Keyed(keyed) = &subscription.mode {
            keyed.check();
        }
        let pending = |consumer: &Consumer| consumer.pending.values().map(|held| u64::from(held.messages)).sum::<u64>();
        assert!(subscription.consumers.values().all(|consumer| consumer.unacked == pending(consumer)));
        assert_eq!(subscription.unacked, subscription.consumers.values().map(pending).sum::<u64>());
        for number in 0..self.log_len() {
            assert_eq!(subscription.cursor.is_acked(number), self.done.contains(&number), "{number}");
        }
        let backlog = (0..self.log_len()).filter(|number| !self.done.contains(number)).count();
        assert_eq!(subscription.backlog(&self.scene.log), backlog as u64);
        for (consumer, held) in &self.holding {
            let pending = &subscription.consumers[consumer].pending;
            assert!(held.iter().all(|number| pending.contains_key(number)), "{consumer} holds what it does not");
        }
    }

    /// With consumers that take and acknowledge, everything gets done: nothing was lost.
    fn finish(&mut self) {
        self.apply(&Step::Join);
        for _ in 0..2 * self.log_len() + 10 {
            for consumer in self.holding.keys().copied().collect::<Vec<_>>() {
                self.apply_to(consumer, &Step::Flow(0, 3));
                self.take(consumer);
                for number in self.holding[&consumer].clone() {
                    self.scene.ack(number);
                    self.done(number);
                }
            }
        }
        assert_eq!(self.scene.subscription.cursor.mark(), self.log_len());
        assert_eq!(self.scene.subscription.unacked, 0);
        assert!(self.scene.subscription.redeliveries.is_empty());
        self.check();
    }

    fn hash(&self, number: u64) -> u32 {
        self.hashes[number as usize]
    }

    fn log_len(&self) -> u64 {
        self.scene.log.end()
    }
}

fn run(scene: Scene, in_order: bool, steps: &[Step]) {
    let mut model = Model::new(scene, in_order);
    steps.iter().for_each(|step| model.apply(step));
    model.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_key_is_in_order_and_at_one_consumer(steps in proptest::collection::vec(step(), 1..120)) {
        run(Scene::new(SubType::KeyShared), true, &steps);
    }

    #[test]
    fn nothing_is_lost_when_few_may_be_unacknowledged(steps in proptest::collection::vec(step(), 1..80)) {
        let limits = UnackedLimits { consumer: 3, subscription: 7 };
        run(Scene::limited(SubType::KeyShared, limits), true, &steps);
        run(Scene::limited(SubType::Shared, limits), false, &steps);
    }

    #[test]
    fn out_of_order_loses_nothing_either(steps in proptest::collection::vec(step(), 1..80)) {
        let meta = KeySharedMeta { allow_out_of_order_delivery: Some(true), ..Default::default() };
        run(Scene { meta: Some(meta), ..Scene::new(SubType::KeyShared) }, false, &steps);
    }

    #[test]
    fn shared_redelivers_exactly_what_is_not_acknowledged(steps in proptest::collection::vec(step(), 1..120)) {
        run(Scene::new(SubType::Shared), false, &steps);
    }

    /// The active consumer gets what is not acknowledged, in order and without gaps, from the mark on whenever another
    /// one becomes active.
    #[test]
    fn failover_goes_on_at_the_mark(steps in proptest::collection::vec(step(), 1..120)) {
        let mut scene = Scene::new(SubType::Failover);
        let (mut next_key, mut active, mut expected) = (1, None, 0);
        for step in &steps {
            let consumer = |choice: usize| scene.outboxes.keys().nth(choice % scene.outboxes.len().max(1)).copied();
            match *step {
                Step::Publish(key) => {
                    scene.publish(KEYS[key]);
                }
                Step::Join => {
                    scene.join(next_key, 1000);
                    next_key += 1;
                }
                Step::Leave(choice) => if let Some(key) = consumer(choice) { scene.leave(key) },
                Step::AckAny(number) if scene.log.end() > 0 => {
                    let number = number as u64 % scene.log.end();
                    scene.ack(number);
                }
                Step::NackAll(_) => if let Some(key) = active.filter(|key| scene.outboxes.contains_key(key)) {
                    scene.take(key);
                    scene.nack(key, &[]);
                    expected = scene.subscription.cursor.mark();
                },
                _ => {}
            }
            for key in scene.outboxes.keys().copied().collect::<Vec<_>>() {
                match scene.told(key) {
                    Some(true) => {
                        active = Some(key);
                        expected = scene.subscription.cursor.mark();
                    }
                    Some(false) => prop_assert!(active != Some(key) || scene.outboxes.len() > 1),
                    None => {}
                }
            }
            for key in scene.outboxes.keys().copied().collect::<Vec<_>>() {
                for number in scene.take(key) {
                    prop_assert_eq!(active, Some(key));
                    prop_assert!((expected..number).all(|before| scene.subscription.cursor.is_acked(before)));
                    expected = number + 1;
                }
            }
        }
    }
}
