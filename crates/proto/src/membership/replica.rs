//! A process's copy of the state, through reconnections: it finds out whether the log is still the one that it read.
//!
//! The state is a function of the log alone, so all that have read as far agree. A broker that loses its records breaks
//! that: each process knows what it had read, and no two need have read the same. What they know must not decide what the
//! new log's records mean, or one would take a proposal and another refuse it. So a process reads the new log as if it had
//! never read another, and waits with what it knew until a [`Snapshot`] in the new log has brought that as far. Then it
//! goes on from there, and says again what has been forgotten.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::{Body, Change, Log, Member, RecordId};
use crate::Rank;

/// How many record ids are remembered for each rank of the job, to know a record that comes again.
const IDS_PER_RANK_MAX: usize = 64;

/// A process's copy of the state.
#[derive(Clone, Debug)]
pub struct Replica {
    world_size: u32,
    log: Log,
    again: Option<Again>,
    /// Who was gone according to a log that was lost, and is not according to the one that took its place.
    forgotten: Vec<RecordId>,
    ids: (BTreeSet<RecordId>, VecDeque<RecordId>),
}

/// The log as it is read again.
#[derive(Clone, Debug)]
struct Again {
    log: Log,
    /// It is another log than the one that was read before.
    lost: bool,
    /// Its view is another one of the same epoch: that was told.
    diverged: bool,
}

impl Replica {
    /// The state before the first record, for a job that starts with this many ranks.
    #[must_use]
    pub fn new(world_size: u32) -> Self {
        let ids = (BTreeSet::new(), VecDeque::new());
        Self { world_size, log: Log::new(world_size), again: None, forgotten: Vec::new(), ids }
    }

    /// What this process goes by.
    #[must_use]
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// The log will be read from its start, or from behind a stored snapshot. Say your Join again then: whoever reads it has
    /// read all that was there before, and calls [`Replica::restate`].
    pub fn read_again(&mut self) {
        self.again = Some(Again { log: Log::new(self.world_size), lost: false, diverged: false });
    }

    /// Whether the log was lost, and does not stand again yet: who goes by the old one must not propose meanwhile.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.again.as_ref().is_some_and(|again| again.lost)
    }

    /// Remembers a record. False if it was read before.
    pub fn remember(&mut self, id: RecordId) -> bool {
        let (known, order) = &mut self.ids;
        if !known.insert(id) {
            return false;
        }
        order.push_back(id);
        if order.len() > IDS_PER_RANK_MAX * self.world_size as usize
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
        true
    }

    /// Takes a record of the log; `is_new` as [`Replica::remember`] says.
    pub fn apply(&mut self, rank: Rank, id: RecordId, body: &Body, is_new: bool) -> Change {
        let Some(again) = &mut self.again else { return self.apply_to_log(rank, id, body, is_new) };
        // All that was read before comes before what is new: by now the two agree, or it is another log.
        if is_new && !again.lost {
            again.lost = !again.log.agrees_with(&self.log);
            if !again.lost {
                self.again = None;
                return self.apply_to_log(rank, id, body, is_new);
            }
        }
        again.log.apply(rank, id, body);
        if again.lost { self.take_over() } else { Change::None }
    }

    fn apply_to_log(&mut self, rank: Rank, id: RecordId, body: &Body, is_new: bool) -> Change {
        if is_new { self.log.apply(rank, id, body) } else { Change::None }
    }

    /// All that the log held when this process's Join was said again has been read. Gives what there is to say about it, and
    /// what has changed: what others know as well is said by all, so wait for those whose turn is before.
    pub fn restate(&mut self, author: RecordId) -> (Vec<Body>, Change) {
        let mut change = Change::None;
        if let Some(again) = &mut self.again {
            if !again.lost && again.log.agrees_with(&self.log) {
                self.again = None;
                return (Vec::new(), Change::None);
            }
            again.lost = true;
            change = self.take_over();
        }
        let mut bodies = Vec::new();
        if self.again.is_some() {
            bodies.push(Body::Snapshot(self.log.snapshot()));
        }
        let forgotten = core::mem::take(&mut self.forgotten);
        let epoch = self.log.view().epoch;
        let still =
            forgotten.into_iter().filter(|member| *member != author && self.log.live().any(|one| one.id == *member));
        bodies.extend(still.map(|member| Body::Suspect {
            author,
            epoch,
            member,
            reason: "it was gone before the broker lost the log".into(),
        }));
        (bodies, change)
    }

    /// Goes by the new log as soon as that is as far as the old one.
    fn take_over(&mut self) -> Change {
        let Some(again) = &self.again else { return Change::None };
        let (theirs, ours) = (again.log.view(), self.log.view());
        if theirs.epoch < ours.epoch {
            return Change::None;
        }
        let same = theirs.epoch == ours.epoch;
        if same && theirs.id != ours.id {
            let told = self.again.as_mut().is_some_and(|again| core::mem::replace(&mut again.diverged, true));
            return if told { Change::None } else { Change::Diverged };
        }
        let Some(again) = self.again.take() else { return Change::None };
        let before = core::mem::replace(&mut self.log, again.log);
        self.ids = (BTreeSet::new(), VecDeque::new());
        let knew = |member: &&Member| before.is_gone(member.id);
        self.forgotten = self.log.live().filter(knew).map(|member| member.id).collect();
        if same { Change::Restored } else { Change::View }
    }

    /// Whether, after this record that made this change, it is time to look for something to [`Replica::restate`]: all that
    /// was there before this process's Join was said again has been read, or the log has taken the place of the lost one.
    #[must_use]
    pub fn is_restating(&self, author: RecordId, id: RecordId, change: &Change) -> bool {
        let has_to = self.again.is_some() || !self.forgotten.is_empty();
        has_to && (id == author || matches!(change, Change::View | Change::Restored))
    }
}

impl Log {
    /// Whether what was read into both was the same.
    fn agrees_with(&self, other: &Self) -> bool {
        let Self { view, candidates, ready, gone, .. } = self;
        *view == other.view && *candidates == other.candidates && *ready == other.ready && *gone == other.gone
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::super::ProposedMember;
    use super::*;
    use crate::Epoch;
    use crate::member::Endpoint;

    const RANKS: u32 = 5;

    fn id(number: u32) -> RecordId {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        id
    }

    fn join(rank: u32) -> (Rank, RecordId, Body) {
        (Rank(rank), id(rank), Body::Join { world_size: RANKS, protocol: 1, endpoint: Endpoint::default() })
    }

    fn suspect(author: u32, member: u32) -> Body {
        Body::Suspect { author: id(author), epoch: Epoch(1), member: id(member), reason: "silent".into() }
    }

    /// A log that begins with the first epoch of ranks 0 to 4.
    fn begun() -> Vec<(Rank, RecordId, Body)> {
        let mut log: Vec<_> = (0..RANKS).map(join).collect();
        let members = (0..RANKS).map(|rank| ProposedMember { rank: Rank(rank), id: id(rank) }).collect();
        let proposal = Body::Propose { author: id(0), epoch: Epoch(1), base: RecordId::default(), members };
        log.push((Rank(0), id(1000), proposal));
        log
    }

    fn read(replica: &mut Replica, records: &[(Rank, RecordId, Body)]) -> Vec<Change> {
        let mut take = |(rank, id, body): &(Rank, RecordId, Body)| {
            let is_new = replica.remember(*id);
            replica.apply(*rank, *id, body, is_new)
        };
        records.iter().map(&mut take).filter(|change| *change != Change::None).collect()
    }

    #[test]
    fn a_log_that_is_still_there_is_read_again_without_effect() {
        let mut log = begun();
        let mut replica = Replica::new(RANKS);
        read(&mut replica, &log);
        let before = replica.log().clone();
        replica.read_again();
        log.push(join(3));
        assert_eq!(read(&mut replica, &log), []);
        assert_eq!(replica.restate(id(3)), (vec![], Change::None));
        assert!(!replica.is_lost() && !replica.is_restating(id(3), id(3), &Change::None));
        log.push((Rank(0), id(1001), suspect(0, 4)));
        assert!(matches!(read(&mut replica, &log[log.len() - 1..])[..], [Change::Gone(..)]));
        assert_eq!(before.view(), replica.log().view());
    }

    #[test]
    fn what_only_some_have_read_of_a_lost_log_decides_nothing() {
        let (old, told) = (begun(), (Rank(1), id(1001), suspect(1, 3)));
        let [mut knows, mut does_not] = [Replica::new(RANKS), Replica::new(RANKS)];
        read(&mut knows, &old);
        read(&mut knows, core::slice::from_ref(&told));
        read(&mut does_not, &old);
        // Both read a log that begins with their Joins, and with what rank 3 says to it.
        let new = [join(0), join(2), (Rank(3), id(1002), suspect(3, 1))];
        for replica in [&mut knows, &mut does_not] {
            replica.read_again();
            assert_eq!(read(replica, &new), []);
            assert!(replica.is_lost(), "a new record, and no view yet");
        }
        let (said, _) = does_not.restate(id(2));
        let [snapshot @ Body::Snapshot(_)] = &said[..] else { panic!("{said:?}") };
        let snapshot = (Rank(2), id(1003), snapshot.clone());
        for replica in [&mut knows, &mut does_not] {
            assert_eq!(read(replica, core::slice::from_ref(&snapshot)), [Change::Restored]);
        }
        assert_eq!(knows.log(), does_not.log());
        assert!(knows.log().is_gone(id(1)), "of two that suspect each other the first one in this log stays");
        // What was forgotten is said again by who knew it, and is not taken back by who is gone.
        let (said, change) = knows.restate(id(0));
        assert!(matches!(&said[..], [Body::Suspect { member, .. }] if *member == id(3)), "{said:?}");
        assert_eq!((change, knows.is_restating(id(0), id(0), &Change::None)), (Change::None, false));
    }

    #[test]
    fn two_views_of_one_epoch_are_told_once() {
        let mut replica = Replica::new(RANKS);
        read(&mut replica, &begun());
        let mut other = begun();
        other[5].1 = id(2000);
        replica.read_again();
        other.extend([(Rank(1), id(2001), suspect(1, 3)), (Rank(1), id(2002), suspect(1, 4))]);
        assert_eq!(read(&mut replica, &other), [Change::Diverged]);
        let (said, _) = replica.restate(id(0));
        assert!(
            matches!(&said[..], [Body::Snapshot(snapshot)] if snapshot.view.id == id(1000)),
            "the others hear of it"
        );
    }

    proptest! {
        /// However far each had read the log that was lost, all come to the same state.
        #[test]
        fn whatever_each_had_read_all_agree_again(
            suspicions in proptest::collection::vec((0..RANKS, 0..RANKS), 0..6),
            read_until in proptest::collection::vec(0_usize..7, RANKS as usize),
            order in Just((0..RANKS).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut old = begun();
            old.extend((0_u32..).zip(suspicions).map(|(n, (a, b))| (Rank(a), id(3000 + n), suspect(a, b))));
            let mut replicas: Vec<_> = (0..RANKS).map(|_| Replica::new(RANKS)).collect();
            for (replica, until) in replicas.iter_mut().zip(&read_until) {
                read(replica, &old[..old.len().min(6 + until)]);
                replica.read_again();
            }
            let mut new: Vec<_> = order.iter().map(|rank| join(*rank)).collect();
            let mut at = vec![0; RANKS as usize];
            for round in 0..3 {
                for rank in &order {
                    let (replica, at) = (&mut replicas[*rank as usize], &mut at[*rank as usize]);
                    let changes = read(replica, &new[*at..]);
                    prop_assert!(!changes.contains(&Change::Diverged));
                    *at = new.len();
                    let (said, _) = replica.restate(id(*rank));
                    let said = (0_u32..).zip(said);
                    new.extend(said.map(|(n, body)| (Rank(*rank), id(4000 + 100 * round + 10 * rank + n), body)));
                }
            }
            for (replica, at) in replicas.iter_mut().zip(&at) {
                read(replica, &new[*at..]);
                prop_assert!(!replica.is_lost());
            }
            prop_assert!(replicas.windows(2).all(|pair| pair[0].log().agrees_with(pair[1].log())));
        }
    }
}
