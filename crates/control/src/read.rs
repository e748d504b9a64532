//! Reading a job's records back: versions, the audit log, and who takes part.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::time::Duration;

use futures::StreamExt;
use gradwire_proto::membership::{Body, Log, RecordId};
use gradwire_proto::{Epoch, Fault, FaultKind, Rank, Step};
use pulsar::TokioExecutor;
use pulsar::reader::Reader;
use tokio::time::{Instant, timeout_at};

use crate::job::{JobConfig, Topic};
use crate::link::{Client, LinkError, Position, Start, unique_name};
use crate::record::{
    AUDIT_KIND, Assembly, AuditKind, AuditRecord, RECORD_VERSION, RecordKey, VersionPart, VersionRecord,
};
use crate::worker::random_id;

/// Which version records to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VersionQuery {
    /// Those of this owner only.
    pub owner: Option<Rank>,
    /// Those of these steps only.
    pub steps: Option<Range<Step>>,
    /// Of each owner only the latest that fits the rest.
    pub latest: bool,
}

impl VersionQuery {
    fn takes(&self, record: &VersionRecord) -> bool {
        self.owner.is_none_or(|owner| owner == record.owner)
            && self.steps.as_ref().is_none_or(|steps| steps.contains(&record.step))
    }
}

/// Which audit records to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Those written at these times only, in milliseconds since 1970.
    pub times_ms: Option<Range<u64>>,
    /// Those about this rank, or written by it, only.
    pub rank: Option<Rank>,
    /// Those of these kinds only; all where it is empty.
    pub kinds: Vec<AuditKind>,
}

impl AuditQuery {
    fn takes(&self, entry: &AuditEntry) -> bool {
        let AuditEntry { author, record } = entry;
        self.times_ms.as_ref().is_none_or(|times| times.contains(&record.time_ms))
            && self.rank.is_none_or(|rank| rank == *author || Some(rank) == record.rank)
            && (self.kinds.is_empty() || self.kinds.contains(&record.kind))
    }
}

/// An entry of the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// The rank that wrote it.
    pub author: Rank,
    /// What it says.
    pub record: AuditRecord,
}

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Records<T> {
    /// Those that the query asked for, in the order of the topic.
    pub records: Vec<T>,
    /// How many messages were left out because they are no records, or do not verify with the job's secret.
    pub rejected: u64,
}

/// Reads version records of the job that the broker holds, in the order in which they became complete: of all
/// launches of the job that used this secret.
///
/// # Errors
/// [`FaultKind::BrokerUnreachable`] when the broker cannot be reached or refuses us;
/// [`FaultKind::DeadlineExceeded`] when reading takes longer than `timeout`.
pub fn read_versions(
    config: &JobConfig,
    query: &VersionQuery,
    timeout: Duration,
) -> Result<Records<VersionRecord>, Fault> {
    let mut assembly = Assembly::default();
    // Compaction keeps the last message of an owner, whatever that is: of what is there, the last that verifies and was
    // not there before counts.
    let mut records = read(config, Topic::Versions, timeout, |key, message| {
        let record = opened(key, message, VersionPart::KIND)?;
        let part = VersionPart::decode(record.1).map_err(|_| NotRecord)?;
        Ok(assembly.add(record.0.id, part).filter(|record| query.takes(record)))
    })?;
    if query.latest {
        let mut latest = std::collections::BTreeMap::new();
        for record in records.records {
            latest.insert(record.owner, record);
        }
        records.records = latest.into_values().collect();
    }
    Ok(records)
}

/// Reads the job's audit log, as far as the broker holds it: of all launches of the job that used this secret.
///
/// # Errors
/// As [`read_versions`].
pub fn read_audit(config: &JobConfig, query: &AuditQuery, timeout: Duration) -> Result<Records<AuditEntry>, Fault> {
    let mut seen = HashSet::new();
    read(config, Topic::Audit, timeout, |key, message| {
        let (header, body) = opened(key, message, AUDIT_KIND)?;
        if !seen.insert(header.id) {
            return Ok(None);
        }
        let record = AuditRecord::decode(body).map_err(|_| NotRecord)?;
        let entry = record.map(|record| AuditEntry { author: header.rank, record });
        Ok(entry.filter(|entry| query.takes(entry)))
    })
}

/// Who takes part in a launch of a job, as its control log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// The present epoch; 0 while the job has not begun.
    pub epoch: Epoch,
    /// The members that can be counted on as far as the log knows, by the ids of their Joins.
    pub members: Vec<(Rank, RecordId)>,
    /// All processes that ever joined.
    pub joined: BTreeSet<(Rank, RecordId)>,
    /// Those of them that the others went on without, and that had not said that they leave.
    pub removed: BTreeSet<(Rank, RecordId)>,
    /// What processes met that ended them, by the ids of their Joins.
    pub faults: Vec<(RecordId, Fault)>,
}

impl Census {
    fn take(&mut self, log: &mut Log, rank: Rank, id: RecordId, body: &Body) {
        match body {
            Body::Join { .. } => drop(self.joined.insert((rank, id))),
            Body::Failed { author, fault } => self.faults.push((*author, fault.clone())),
            _ => {}
        }
        log.apply(rank, id, body);
    }
}

/// Reads who takes part in this launch of the job, which began with `world_size` ranks.
///
/// # Errors
/// As [`read_versions`].
pub fn read_census(config: &JobConfig, world_size: u32, timeout: Duration) -> Result<Census, Fault> {
    let (mut census, mut log, mut left) = (Census::default(), Log::new(world_size), BTreeSet::new());
    read::<()>(config, Topic::Control, timeout, |key, message| {
        let record = key.open(message).map_err(|_| NotRecord)?;
        let header = record.header;
        let ours = record.verified && header.version == RECORD_VERSION && header.instance == config.instance;
        if ours && let Ok(Some(body)) = Body::decode(header.kind, record.body) {
            if let Body::Left { author } = &body {
                left.insert(*author);
            }
            census.take(&mut log, header.rank, header.id, &body);
        }
        Ok(None)
    })?;
    census.epoch = log.view().epoch;
    let is_removed = |(_, id): &&(Rank, RecordId)| log.is_gone(*id) && !left.contains(id);
    census.removed = census.joined.iter().filter(is_removed).copied().collect();
    census.members = log.live().map(|member| (member.rank, member.id)).collect();
    Ok(census)
}

/// A message that is no record, or does not verify.
struct NotRecord;

fn opened<'a>(key: &RecordKey, message: &'a [u8], kind: u16) -> Result<(crate::record::Header, &'a [u8]), NotRecord> {
    let record = key.open(message).map_err(|_| NotRecord)?;
    let header = record.header;
    let good = record.verified && header.version == RECORD_VERSION && header.kind == kind;
    if good { Ok((header, record.body)) } else { Err(NotRecord) }
}

/// Reads a topic from its start to its present end.
fn read<T: Send>(
    config: &JobConfig,
    topic: Topic,
    timeout: Duration,
    mut take: impl FnMut(&RecordKey, &[u8]) -> Result<Option<T>, NotRecord> + Send,
) -> Result<Records<T>, Fault> {
    let key = config.record_key();
    let mut found = Records { records: Vec::new(), rejected: 0 };
    let deadline = Instant::now() + timeout;
    let reading = async {
        let client = Client::connect(&config.broker, timeout).await?;
        let name = unique_name(&config.instance, u32::MAX, &random_id()[..8]);
        let mut reader = client.reader(&config.topic(topic), &name, (Start::Earliest, false), timeout).await?;
        read_to_end(&mut reader, |_, message| match take(&key, message) {
            Ok(record) => found.records.extend(record),
            Err(NotRecord) => found.rejected += 1,
        })
        .await
    };
    on_a_thread("gradwire-read", async move {
        match timeout_at(deadline, reading).await {
            Ok(result) => result.map_err(|error: LinkError| error.into_fault(&config.broker.url)),
            Err(_) => {
                let detail = format!(
                    "reading the {} topic of job '{}' took longer than {} s",
                    topic.suffix(),
                    config.job,
                    timeout.as_secs_f64()
                );
                Err(Fault::new(FaultKind::DeadlineExceeded, detail))
            }
        }
    })?;
    Ok(found)
}

/// Runs a future on a thread of its own, so that it can be waited for from within an asynchronous runtime too.
fn on_a_thread<T: Send>(name: &str, future: impl Future<Output = Result<T, Fault>> + Send) -> Result<T, Fault> {
    let system = |error: std::io::Error| Fault::new(FaultKind::System, format!("no thread from the system: {error}"));
    std::thread::scope(|scope| {
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
            let result = runtime.block_on(future);
            runtime.shutdown_background();
            result
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(crate::link::STACK_BYTES);
        let thread = thread.spawn_scoped(scope, run).map_err(system)?;
        thread.join().unwrap_or_else(|_| Err(Fault::new(FaultKind::System, "reading records ended unexpectedly")))
    })
}

/// Hands on every message up to the one that is the last when this is called.
pub(crate) async fn read_to_end(
    reader: &mut Reader<Vec<u8>, TokioExecutor>,
    mut take: impl FnMut(Position, &[u8]),
) -> Result<(), LinkError> {
    let last = Position::of(&reader.get_last_message_id().await?);
    // Brokers say that a topic is empty by the id -1.
    let mut done = last.entry == u64::MAX;
    while !done {
        let message = match reader.next().await {
            Some(message) => message?,
            None => return Err(LinkError::closed()),
        };
        let position = Position::of(message.message_id());
        done = position >= last;
        take(position, &message.payload.data);
    }
    Ok(())
}
