//! Results on their way to a contributor: pieces from the results topic put together, of the round that is waited for
//! and the one after it. Later ones stay at the broker until the contributor gets there, so memory is bounded.

use std::collections::BTreeMap;

use gradwire_proto::Round;
use gradwire_proto::limits::ROUNDS_KEPT;
use gradwire_proto::rounds::{Complete, Entry, Log, Open, Published};

use crate::federated::bulk::ResultPiece;
use crate::link::{Position, Start};
use crate::pieces::{Collected, Collector};

/// Smallest memory for incomplete results.
const COLLECTOR_BYTES_MIN: usize = 64 << 20;

/// What one result is about: of two with other digests one was made from another log.
type Key = (Round, u32, u32);

/// What a contributor holds of results.
#[derive(Debug)]
pub(super) struct Results {
    collector: Collector<Key>,
    whole: BTreeMap<Key, Vec<u8>>,
    /// Older rounds are not looked at any more.
    wanted: Round,
    /// A piece of a round that is not wanted yet. While there is one, nothing more should be read.
    early: Option<(Position, Vec<u8>)>,
    /// The last message that was read.
    read: Option<Position>,
    /// Pieces that are malformed, or not of this model.
    pub(super) rejected: u64,
}

/// What the log says of a round.
#[derive(Debug, PartialEq)]
pub(super) struct Decided {
    pub(super) entries: Vec<Entry>,
    digest: u32,
    /// Where each shard's result is, as far as it is published.
    published: Vec<Option<Published>>,
}

impl Results {
    /// For a model of this size; `wanted` is the first round that will be asked for.
    pub(super) fn new(open: &Open, wanted: Round) -> Self {
        let model = open.elements as usize * open.wire_dtype().size();
        Self {
            collector: Collector::new((2 * model).max(COLLECTOR_BYTES_MIN)),
            whole: BTreeMap::new(),
            wanted,
            early: None,
            read: None,
            rejected: 0,
        }
    }

    /// Whether more should be read.
    pub(super) const fn wants_more(&self) -> bool {
        self.early.is_none()
    }

    /// Where reading starts over a new link.
    pub(super) fn start(&self, log: &Log) -> Start {
        match self.read {
            Some(position) => Start::At(position),
            None => first_place(log, self.wanted),
        }
    }

    /// This round is asked for, and none before it. True if the topic must be read again from [`Results::start`]: what
    /// is missing has been passed already.
    pub(super) fn want(&mut self, open: &Open, log: &Log, round: Round) -> bool {
        if round < self.wanted {
            *self = Self { rejected: self.rejected, ..Self::new(open, round) };
            return true;
        }
        self.wanted = round;
        self.whole.retain(|(of, ..), _| *of >= round);
        if let Some((position, message)) = self.early.take() {
            self.take(open, position, &message);
        }
        let Some(read) = self.read else { return false };
        let Some(decided) = decided(log, round) else { return false };
        let missing = decided.published.iter().zip(0..).filter_map(|(published, shard)| {
            let place = published.map(|published| Position { ledger: published.ledger, entry: published.entry })?;
            let key = (round, shard, decided.digest);
            // One whose first piece was passed may be about to be completed.
            (!self.whole.contains_key(&key) && !self.collector.is_open(&key)).then_some(place)
        });
        let passed = missing.min().filter(|first| *first < read);
        if let Some(first) = passed {
            self.read = Some(first);
        }
        passed.is_some()
    }

    /// Takes the body of a result record.
    pub(super) fn take(&mut self, open: &Open, position: Position, body: &[u8]) {
        self.read = self.read.max(Some(position));
        let Ok(piece) = ResultPiece::decode(body) else {
            self.rejected += 1;
            return;
        };
        let fits = piece.shard < open.shards() && piece.header.bytes as usize == open.shard_bytes(piece.shard);
        if !fits {
            self.rejected += 1;
            return;
        }
        let key = (piece.round, piece.shard, piece.digest);
        if piece.round < self.wanted || self.whole.contains_key(&key) {
            return;
        }
        if piece.round > self.wanted.next() {
            self.early = Some((position, body.to_vec()));
            return;
        }
        match self.collector.add(&key, piece.header, piece.data) {
            Collected::Complete(data) => {
                self.whole.insert(key, data);
            }
            Collected::Open => {}
            Collected::Wrong => self.rejected += 1,
        }
    }

    /// All shards of a round, in order, once all are there.
    pub(super) fn whole(&self, open: &Open, log: &Log, round: Round) -> Option<(Decided, Vec<&[u8]>)> {
        let decided = decided(log, round)?;
        let shard = |shard| {
            let data = self.whole.get(&(round, shard, decided.digest))?;
            // Where the log has a checksum already, it is the log's.
            let published = decided.published.get(shard as usize).copied().flatten();
            published.is_none_or(|published| published.crc == crc32fast::hash(data)).then_some(data.as_slice())
        };
        let shards: Option<Vec<&[u8]>> = (0..open.shards()).map(shard).collect();
        Some((decided, shards?))
    }

    /// The shards of a round that are not there.
    #[cfg(test)]
    fn missing(&self, open: &Open, log: &Log, round: Round) -> Vec<u32> {
        let Some(decided) = decided(log, round) else { return (0..open.shards()).collect() };
        (0..open.shards()).filter(|shard| !self.whole.contains_key(&(round, *shard, decided.digest))).collect()
    }
}

/// What the log says of a round, once it is decided, and as long as it is remembered.
fn decided(log: &Log, round: Round) -> Option<Decided> {
    if let Some(Complete { entries, digest, published, .. }) = log.complete(round) {
        let published = published.iter().copied().map(Some).collect();
        return Some(Decided { entries: entries.clone(), digest: *digest, published });
    }
    let closed = log.closed().filter(|_| log.round() == round)?;
    let entries = closed.entries.iter().map(|(entry, _)| *entry).collect();
    Some(Decided { entries, digest: closed.digest(), published: closed.published.clone() })
}

/// Whether the results of a round can be had, or may come.
pub(super) fn is_kept(log: &Log, round: Round) -> bool {
    round >= log.round() || log.complete(round).is_some()
}

/// Where the results of a round begin, or later ones would.
fn first_place(log: &Log, round: Round) -> Start {
    let place = |published: &Published| Position { ledger: published.ledger, entry: published.entry };
    if let Some(complete) = log.complete(round) {
        return complete.published.iter().map(place).min().map_or(Start::Earliest, Start::At);
    }
    // A round is closed after the one before it is complete: so its results come after all of those.
    let before = Round(round.0.min(log.round().0).saturating_sub(1));
    let last = log.complete(before).and_then(|complete| complete.published.iter().map(place).max());
    last.map_or(Start::Earliest, Start::At)
}

/// How many rounds back results can be had, for messages.
pub(super) const KEPT: usize = ROUNDS_KEPT;

#[cfg(test)]
mod tests {
    use gradwire_proto::rounds::{Body, LatePolicy};
    use gradwire_proto::{Rank, ReduceOp, WireFormat};

    use super::*;
    use crate::pieces::split;

    fn open() -> Open {
        let (late, wire, op) = (LatePolicy::Reject, WireFormat::Fp32, ReduceOp::Sum);
        Open { contributors: 1, quorum: 1, late, wire, op, shard_elements: 2048, elements: 4000 }
    }

    fn at(entry: u64) -> Position {
        Position { ledger: 3, entry }
    }

    /// A log with complete rounds, each with its two results at 10 times its number and the place after.
    fn log(complete: u64) -> Log {
        let mut log = Log::default();
        log.apply(Rank(0), &Body::Open(open()));
        for round in 1..=complete {
            close(&mut log, round);
            for shard in 0..2 {
                let crc = crc32fast::hash(&data(round, shard));
                let result = Published { crc, ledger: 3, entry: round * 10 + u64::from(shard) };
                log.apply(Rank(0), &Body::Published { round: Round(round), shard, result });
            }
        }
        log
    }

    fn close(log: &mut Log, round: u64) {
        let crcs = vec![0; 2].into();
        log.apply(Rank(0), &Body::Contributed { round: Round(round), contribution: [round as u8; 16], crcs });
    }

    fn data(round: u64, shard: u32) -> Vec<u8> {
        vec![round as u8 * 16 + shard as u8; open().shard_bytes(shard)]
    }

    fn give(results: &mut Results, log: &Log, round: u64) {
        let digest = decided(log, Round(round)).expect("decided").digest;
        for shard in 0..2 {
            let data = data(round, shard);
            for (header, data) in split(&data, 4096) {
                let piece = ResultPiece { round: Round(round), shard, digest, header, data };
                results.take(&open(), at(round * 10 + u64::from(shard)), &piece.encode());
            }
        }
    }

    #[test]
    fn a_round_is_whole_once_every_shard_is() {
        let mut log = log(0);
        let mut results = Results::new(&open(), Round(1));
        assert_eq!(results.whole(&open(), &log, Round(1)), None);
        close(&mut log, 1);
        assert_eq!(results.missing(&open(), &log, Round(1)), [0, 1]);
        give(&mut results, &log, 1);
        let (decided, shards) = results.whole(&open(), &log, Round(1)).expect("whole");
        assert_eq!(decided.entries, [Entry { contributor: Rank(0), origin: Round(1) }]);
        assert_eq!(shards, [data(1, 0), data(1, 1)]);
    }

    #[test]
    fn results_of_other_entries_do_not_count() {
        let mut log = log(0);
        close(&mut log, 1);
        let mut results = Results::new(&open(), Round(1));
        let data = data(1, 0);
        for (header, data) in split(&data, 4096) {
            let piece = ResultPiece { round: Round(1), shard: 0, digest: 1, header, data };
            results.take(&open(), at(1), &piece.encode());
        }
        assert_eq!(results.missing(&open(), &log, Round(1)), [0, 1]);
    }

    #[test]
    fn later_rounds_wait_at_the_broker() {
        let log = log(3);
        let mut results = Results::new(&open(), Round(1));
        give(&mut results, &log, 1);
        give(&mut results, &log, 2);
        assert!(results.wants_more());
        let digest = decided(&log, Round(3)).expect("decided").digest;
        let data = data(3, 0);
        let (header, data) = split(&data, 1 << 20).next().expect("a piece");
        let piece = ResultPiece { round: Round(3), shard: 0, digest, header, data }.encode();
        results.take(&open(), at(30), &piece);
        assert!(!results.wants_more());
        assert!(!results.want(&open(), &log, Round(2)));
        assert!(results.wants_more());
        assert_eq!(results.missing(&open(), &log, Round(3)), [1]);
        assert!(results.whole(&open(), &log, Round(1)).is_none(), "given up");
        assert!(results.whole(&open(), &log, Round(2)).is_some());
    }

    #[test]
    fn what_was_passed_is_read_again_from_its_place() {
        let log = log(5);
        let mut results = Results::new(&open(), Round(4));
        assert!(matches!(results.start(&log), Start::At(place) if place == at(40)));
        give(&mut results, &log, 5);
        assert!(results.want(&open(), &log, Round(4)), "its results were passed");
        assert!(matches!(results.start(&log), Start::At(place) if place == at(40)));
        assert!(results.want(&open(), &log, Round(2)), "it is older than what was wanted");
        assert!(matches!(results.start(&log), Start::At(place) if place == at(20)));
        let later = Results::new(&open(), Round(6));
        assert!(matches!(later.start(&log), Start::At(place) if place == at(51)));
        assert!(matches!(Results::new(&open(), Round(1)).start(&Log::default()), Start::Earliest));
        assert!(is_kept(&log, Round(1)) && is_kept(&log, Round(9)));
    }

    #[test]
    fn pieces_of_another_model_are_rejected() {
        let mut results = Results::new(&open(), Round(1));
        let (header, data) = split(b"abc", 4096).next().expect("a piece");
        for shard in [0, 2] {
            results.take(&open(), at(1), &ResultPiece { round: Round(1), shard, digest: 0, header, data }.encode());
        }
        results.take(&open(), at(1), b"noise");
        assert_eq!(results.rejected, 3);
    }
}
