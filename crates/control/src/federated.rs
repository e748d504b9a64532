//! The federated mode: ranks that share no network but the broker's.
//!
//! A [`Contributor`] sends its vector as messages to the topic `<job>-updates`; [`Aggregator`]s consume it Key_Shared by
//! shard, add up, and publish results to `<job>-results`, which every contributor reads. Who is in a round's sums is
//! decided by the log `<job>-rounds` alone ([`gradwire_proto::rounds`]); so any aggregator computes the same bits.
//!
//! What makes at-least-once delivery exactly-once sums:
//! - A contribution is complete or nothing: its Contributed record is written once every piece has a receipt, and names
//!   the attempt and the checksum of each shard.
//! - A message is acknowledged only when the log says that it is not needed any more: the result that it is in is
//!   published, or it can never be in one. So whatever dies, the broker delivers what is still needed again.
//! - Pieces that come twice are known by contribution, shard and number, and results that come twice are the same bits.
//!
//! The broker hands a shard to another aggregator only when the old one holds none of its messages. Therefore an
//! aggregator hands back what it cannot finish when another one subscribes, and when a shard that is due does not move.

mod aggregator;
mod bulk;
mod contributor;
mod follow;

use std::time::Duration;

use gradwire_proto::limits::SHARD_ELEMENTS_MULTIPLE;
use gradwire_proto::rounds::Open;
pub use gradwire_proto::rounds::{Entry, LatePolicy};
use gradwire_proto::{Fault, FaultKind, Rank, ReduceOp, WireFormat};

pub use aggregator::{Aggregator, AggregatorConfig, AggregatorCounters, Expected, MEMORY_BYTES_DEFAULT};
pub use contributor::{Contributed, Contributor, RoundResult};

use crate::job::JobConfig;
use crate::pieces::{PIECE_BYTES_MAX, PIECE_BYTES_MIN};
use crate::record::Instance;

/// Size of the messages that bulk data is cut into, unless something else is said.
pub const PIECE_BYTES_DEFAULT: usize = 256 << 10;
/// A model has about this many shards, unless something else is said: so many that they spread over aggregators.
const SHARDS_WANTED: u64 = 32;
/// Shards have at most this many elements, unless something else is said.
const SHARD_ELEMENTS_DEFAULT_MAX: u64 = 1 << 20;
/// How long opening a link may take.
const OPEN_MAX: Duration = Duration::from_secs(10);
/// How long the receipt of a piece may take: what was sent before it has to pass first.
const BULK_RECEIPT_MAX: Duration = Duration::from_secs(30);
/// No further piece is sent while so many bytes wait for their receipts.
const BYTES_IN_FLIGHT_MAX: usize = 4 << 20;

/// What a contributor brings.
#[derive(Clone, Debug)]
pub struct ContributorConfig {
    /// The job.
    pub job: JobConfig,
    /// Which contributor this is: below `contributors`, and no other process's.
    pub contributor: Rank,
    /// How many there are.
    pub contributors: u32,
    /// How many contributions a round needs before its deadline may close it.
    pub quorum: u32,
    /// What happens to contributions that miss the Close of their round.
    pub late: LatePolicy,
    /// Elements of the vector that is exchanged.
    pub elements: u64,
    /// How values travel.
    pub wire: WireFormat,
    /// How contributions are combined.
    pub op: ReduceOp,
    /// Elements of a shard; a suitable number if not given. Where the job is open already, its own counts.
    pub shard_elements: Option<u32>,
    /// Largest messages that a contribution is cut into.
    pub piece_bytes: usize,
    /// How long joining and each contribution may take.
    pub deadline: Duration,
}

impl ContributorConfig {
    /// One of `contributors`, all of whom every round needs; the mean of fp32 values.
    #[must_use]
    pub const fn new(job: JobConfig, contributor: Rank, contributors: u32, elements: u64) -> Self {
        Self {
            job,
            contributor,
            contributors,
            quorum: contributors,
            late: LatePolicy::Reject,
            elements,
            wire: WireFormat::Fp32,
            op: ReduceOp::Mean,
            shard_elements: None,
            piece_bytes: PIECE_BYTES_DEFAULT,
            deadline: Duration::from_secs(60),
        }
    }

    /// How the job is run, as far as this contributor decides it.
    fn open(&self) -> Result<Open, Fault> {
        let invalid = |detail: String| Err(Fault::new(FaultKind::InvalidArgument, detail));
        let Self { contributors, quorum, late, elements, wire, op, .. } = *self;
        let shard_elements = self.shard_elements.unwrap_or_else(|| shard_elements(elements));
        let open = Open { contributors, quorum, late, wire, op, shard_elements, elements };
        check_piece_bytes(self.piece_bytes)?;
        if self.contributor.0 >= contributors {
            return invalid(format!("contributor {} of {contributors}: numbers begin with 0", self.contributor.0));
        }
        if !open.is_valid() {
            return invalid(format!(
                "{contributors} contributors with a quorum of {quorum}, {elements} elements in shards of \
                 {shard_elements} as {wire}: there must be 1 to {} contributors, a quorum of 1 to {contributors}, and 1 \
                 to {} shards of at most {} MiB",
                gradwire_proto::limits::WORLD_SIZE_MAX,
                gradwire_proto::limits::FEDERATED_SHARDS_MAX,
                gradwire_proto::limits::FEDERATED_SHARD_BYTES_MAX >> 20
            ));
        }
        Ok(open)
    }
}

/// The instance of a federated job that no launcher started: made of its name, so that whoever takes part, wherever and
/// whenever it was started, finds the same rounds.
#[must_use]
pub fn federated_instance(job: &crate::JobName, model_version: Option<&crate::ModelVersion>) -> Instance {
    let version = model_version.map(|version| version.as_str()).unwrap_or_default();
    // Not for secrecy: records are protected by the job's secret.
    let digest = gradwire_proto::Secret::from_bytes([0; 32])
        .proof("gradwire federated instance", &[job.as_str().as_bytes(), version.as_bytes()]);
    let mut instance = [0; 16];
    instance.copy_from_slice(&digest[..16]);
    instance
}

fn shard_elements(elements: u64) -> u32 {
    let wanted = elements.div_ceil(SHARDS_WANTED).next_multiple_of(SHARD_ELEMENTS_MULTIPLE);
    let least = elements
        .div_ceil(u64::from(gradwire_proto::limits::FEDERATED_SHARDS_MAX))
        .next_multiple_of(SHARD_ELEMENTS_MULTIPLE);
    u32::try_from(wanted.min(SHARD_ELEMENTS_DEFAULT_MAX).max(least)).unwrap_or(u32::MAX)
}

fn check_piece_bytes(piece_bytes: usize) -> Result<(), Fault> {
    if (PIECE_BYTES_MIN..=PIECE_BYTES_MAX).contains(&piece_bytes) {
        return Ok(());
    }
    let detail = format!("pieces of {piece_bytes} bytes: take {PIECE_BYTES_MIN} to {PIECE_BYTES_MAX}");
    Err(Fault::new(FaultKind::InvalidArgument, detail))
}

/// Checks that we mean to run the job as it is run.
fn check_agreed(open: &Open, own: &Open, job: &JobConfig) -> Result<(), Fault> {
    let differs = |kind, what: &str, theirs: String, ours: String| {
        let detail = format!(
            "job '{}' is run with {what} {theirs}, this process wants {ours}: all who take part must agree, or take \
             another job name",
            job.job
        );
        Err(Fault::new(kind, detail))
    };
    if open.contributors != own.contributors {
        let (theirs, ours) = (open.contributors.to_string(), own.contributors.to_string());
        return differs(FaultKind::WorldMismatch, "a number of contributors of", theirs, ours);
    }
    if open.elements != own.elements {
        let (theirs, ours) = (open.elements.to_string(), own.elements.to_string());
        return differs(FaultKind::ShapeMismatch, "a number of elements of", theirs, ours);
    }
    let mismatch = FaultKind::OperationMismatch;
    if open.quorum != own.quorum {
        return differs(mismatch, "the quorum", open.quorum.to_string(), own.quorum.to_string());
    }
    if open.late != own.late {
        return differs(mismatch, "the policy for late contributions", open.late.to_string(), own.late.to_string());
    }
    if open.wire != own.wire {
        return differs(mismatch, "the wire format", open.wire.to_string(), own.wire.to_string());
    }
    if open.op != own.op {
        return differs(mismatch, "the reduction", open.op.to_string(), own.op.to_string());
    }
    Ok(())
}

/// The fault of a process that finds only records of others in the log.
fn secret_mismatch(job: &JobConfig) -> Fault {
    let detail = format!(
        "the log of rounds of job '{}' holds records that do not verify with this secret, and none that do: give all who \
         take part the same secret, or take another job name",
        job.job
    );
    Fault::new(FaultKind::SecretMismatch, detail)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Secret;

    use super::*;
    use crate::access::BrokerAccess;

    fn config() -> ContributorConfig {
        let broker = BrokerAccess::new("pulsar://h");
        let job = JobConfig::new("digits".parse().unwrap(), [1; 16], Secret::from_bytes([1; 32]), broker);
        ContributorConfig::new(job, Rank(1), 4, 10_000)
    }

    /// A change here is a change of the format: it needs a new version.
    #[test]
    fn records_are_as_documented() {
        use gradwire_proto::Round;
        use gradwire_proto::rounds::{Body, Closed, Contribution, Published};

        use crate::record::{Header, RECORD_VERSION, RecordKey, tests::golden};

        let key = RecordKey::new(Secret::from_bytes([0x55; 32]), "digits");
        let ids = |first: u8| std::array::from_fn(|i| first + i as u8);
        let check = |name: &str, kind, rank, body: &[u8]| {
            let header = Header { version: RECORD_VERSION, kind, instance: ids(0), id: ids(0x10), rank: Rank(rank) };
            assert_eq!(gradwire_proto::secret::hex(&key.seal(header, body)), golden(name), "{name}");
        };
        let (round, contribution, crc) = (Round(7), ids(0x30), 0xcbf4_3926);
        let entry = |contributor, origin| Entry { contributor: Rank(contributor), origin: Round(origin) };
        let open = Open {
            contributors: 4,
            quorum: 3,
            late: LatePolicy::Carry,
            wire: WireFormat::Fp16,
            op: ReduceOp::Mean,
            shard_elements: 4096,
            elements: 9610,
        };
        for (name, rank, body) in [
            ("federated-open", 1, Body::Open(open)),
            ("federated-contributed", 1, Body::Contributed { round, contribution, crcs: vec![crc, 1, 2].into() }),
            ("federated-close", 0, Body::Close { round, entries: vec![entry(0, 7), entry(2, 6)] }),
            (
                "federated-published",
                0,
                Body::Published { round, shard: 2, result: Published { crc, ledger: 12, entry: 345 } },
            ),
            ("federated-joined", u32::MAX, Body::AggregatorJoined { aggregator: contribution }),
        ] {
            check(name, body.kind(), rank, &body.encode());
        }
        let data: Vec<u8> = (0..8).collect();
        let (header, data) = crate::pieces::split(&data, 4096).next().expect("a piece");
        let update = bulk::Update { round, contribution, shard: 2, header, data };
        check("federated-update", Body::UPDATE, 1, &update.encode());
        let mut log = gradwire_proto::rounds::Log::default();
        log.apply(Rank(0), &Body::Open(Open { contributors: 1, quorum: 1, elements: 4096, ..open }));
        for round in 1..=7 {
            let attempt = if round == 7 { contribution } else { [round as u8; 16] };
            let crcs = vec![0].into();
            log.apply(Rank(0), &Body::Contributed { round: Round(round), contribution: attempt, crcs });
            if round < 7 {
                let result = Published { crc, ledger: 0, entry: 0 };
                log.apply(Rank(0), &Body::Published { round: Round(round), shard: 0, result });
            }
        }
        let closed: &Closed = log.closed().expect("closed");
        assert_eq!(closed.entries, [(entry(0, 7), Contribution { id: contribution, crcs: vec![0].into() })]);
        let result = bulk::ResultPiece { round, shard: 2, digest: closed.digest(), header, data };
        check("federated-result", Body::RESULT, 0, &result.encode());
    }

    #[test]
    fn shards_are_about_thirty_two_and_never_too_many_or_too_large() {
        for elements in [1, 4096, 9610, 1 << 20, 100 << 20, 1 << 32, (1 << 36) - 1] {
            let open = Open { elements, shard_elements: shard_elements(elements), ..config().open().unwrap() };
            assert!(open.is_valid(), "{open:?}");
            assert!(open.shard_elements.is_multiple_of(4096));
        }
        assert_eq!(shard_elements(9610), 4096);
        assert_eq!(shard_elements(32 << 16), 1 << 16);
        assert_eq!(shard_elements(1 << 30), 1 << 20);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_reason() {
        let good = config();
        good.open().unwrap();
        for (bad, word) in [
            (ContributorConfig { contributor: Rank(4), ..good.clone() }, "begin with 0"),
            (ContributorConfig { quorum: 5, ..good.clone() }, "quorum"),
            (ContributorConfig { elements: 0, ..good.clone() }, "shards"),
            (ContributorConfig { piece_bytes: 1, ..good.clone() }, "pieces of 1 bytes"),
        ] {
            let fault = bad.open().unwrap_err();
            assert_eq!(fault.kind, FaultKind::InvalidArgument);
            assert!(fault.detail.contains(word), "{fault}");
        }
    }

    #[test]
    fn who_means_another_job_is_told_in_what() {
        let own = config().open().unwrap();
        assert_eq!(check_agreed(&own, &own, &config().job), Ok(()));
        // Whoever is first decides how the model is cut.
        assert_eq!(check_agreed(&Open { shard_elements: 8192, ..own }, &own, &config().job), Ok(()));
        for (open, kind) in [
            (Open { contributors: 5, ..own }, FaultKind::WorldMismatch),
            (Open { elements: 5, ..own }, FaultKind::ShapeMismatch),
            (Open { quorum: 1, ..own }, FaultKind::OperationMismatch),
            (Open { late: LatePolicy::Carry, ..own }, FaultKind::OperationMismatch),
            (Open { wire: WireFormat::Fp16, ..own }, FaultKind::OperationMismatch),
            (Open { op: ReduceOp::Sum, ..own }, FaultKind::OperationMismatch),
        ] {
            assert_eq!(check_agreed(&open, &own, &config().job).unwrap_err().kind, kind);
        }
    }

    #[test]
    fn an_instance_is_made_of_the_name() {
        let name = |text: &str| text.parse::<crate::JobName>().unwrap();
        let plain = federated_instance(&name("a"), None);
        assert_eq!(plain, federated_instance(&name("a"), None));
        assert_ne!(plain, federated_instance(&name("b"), None));
        assert_ne!(plain, federated_instance(&name("a"), Some(&name("v1"))));
    }
}
