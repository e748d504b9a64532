//! Following the log of rounds over links that come and go: every message is applied once, in order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gradwire_proto::membership::RecordId;
use gradwire_proto::rounds::{Body, Change, Log};
use gradwire_proto::{Fault, FaultKind, Rank};
use pulsar::TokioExecutor;
use pulsar::reader::Reader;

use crate::job::{JobConfig, Topic};
use crate::link::{Client, LinkError, Position, Start, next};
use crate::record::{Header, RECORD_VERSION, RecordKey};

/// The log as far as it was read. Others may look at it.
pub(super) type SharedLog = Arc<Mutex<Log>>;

/// A record that was applied.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Applied {
    pub(super) rank: Rank,
    pub(super) id: RecordId,
    pub(super) body: Body,
    pub(super) change: Change,
}

/// Reads and applies the log.
#[derive(Debug)]
pub(super) struct Follower {
    key: RecordKey,
    config: JobConfig,
    log: SharedLog,
    /// The last message that was read.
    last: Option<(Position, Fingerprint)>,
    /// Whether the next message should be that one, since a link was lost.
    resuming: bool,
    /// Records of this job that do not verify.
    pub(super) unverified: u64,
    /// Messages that are no records, or malformed ones.
    pub(super) malformed: u64,
}

/// Tells messages apart: two that differ in one place of the log show that the log was lost.
type Fingerprint = u32;

impl Follower {
    pub(super) fn new(config: &JobConfig) -> Self {
        Self {
            key: config.record_key(),
            config: config.clone(),
            log: SharedLog::default(),
            last: None,
            resuming: false,
            unverified: 0,
            malformed: 0,
        }
    }

    /// The state so far.
    pub(super) fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    /// The state, for who only looks at it.
    pub(super) fn shared(&self) -> SharedLog {
        self.log.clone()
    }

    /// Opens the log and reads it to its present end. `applied` gets each record that was.
    pub(super) async fn open(
        &mut self,
        client: &Client,
        name: &str,
        time_max: Duration,
        mut applied: impl FnMut(&Applied),
    ) -> Result<Reader<Vec<u8>, TokioExecutor>, Lost> {
        let start = self.last.map_or(Start::Earliest, |(position, _)| Start::At(position));
        self.resuming = self.last.is_some();
        let topic = self.config.topic(Topic::Rounds);
        let mut reader = client.reader(&topic, name, (start, false), time_max).await?;
        let last = reader.get_last_message_id().await.map_err(LinkError::from)?;
        // Brokers say that a topic is empty by the entry -1.
        let end = (last.entry_id != u64::MAX).then(|| Position::of(&last));
        if end < self.last.map(|(position, _)| position) {
            return Err(self.diverged().into());
        }
        while end.is_some() && self.last.map(|(position, _)| position) < end || self.resuming {
            if let Some(record) = self.next(&mut reader).await? {
                applied(&record);
            }
        }
        Ok(reader)
    }

    /// Waits for the next message; gives the record, if it is one.
    pub(super) async fn next(&mut self, reader: &mut Reader<Vec<u8>, TokioExecutor>) -> Result<Option<Applied>, Lost> {
        let (position, message) = next(reader).await?;
        Ok(self.take(position, &message)?)
    }

    /// Applies a message.
    pub(super) fn take(&mut self, position: Position, message: &[u8]) -> Result<Option<Applied>, Fault> {
        let fingerprint = crc32fast::hash(message);
        if std::mem::take(&mut self.resuming) {
            return if self.last == Some((position, fingerprint)) { Ok(None) } else { Err(self.diverged()) };
        }
        self.last = Some((position, fingerprint));
        let Ok(record) = self.key.open(message) else {
            self.malformed += 1;
            return Ok(None);
        };
        let Header { version, kind, instance, id, rank } = record.header;
        if instance != self.config.instance {
            return Ok(None);
        }
        if !record.verified {
            self.unverified += 1;
            return Ok(None);
        }
        if version != RECORD_VERSION {
            let detail = format!(
                "{rank} writes records of version {version}, this is version {RECORD_VERSION}: all who take part in job \
                 '{}' must run the same version of gradwire",
                self.config.job
            );
            return Err(Fault::new(FaultKind::ProtocolVersion, detail).at(rank));
        }
        let body = match Body::decode(kind, record.body) {
            Ok(Some(body)) => body,
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::warn!(%rank, %error, "the log of rounds holds a malformed record");
                self.malformed += 1;
                return Ok(None);
            }
        };
        let change = self.log().apply(rank, &body);
        Ok(Some(Applied { rank, id, body, change }))
    }

    fn diverged(&self) -> Fault {
        let detail = format!(
            "the broker at {} lost the log of rounds of job '{}' (topic {}): start all who take part again, and use a \
             broker that keeps its topics",
            self.config.broker.url,
            self.config.job,
            self.config.topic(Topic::Rounds)
        );
        Fault::new(FaultKind::Diverged, detail)
    }
}

/// Why following ends.
#[derive(Debug)]
pub(super) enum Lost {
    /// The link is lost: another one may do.
    Link(LinkError),
    /// Nothing will do.
    Fault(Fault),
}

impl From<LinkError> for Lost {
    fn from(error: LinkError) -> Self {
        Self::Link(error)
    }
}

impl From<Fault> for Lost {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Secret;
    use gradwire_proto::rounds::ContributionId;

    use super::*;
    use crate::access::BrokerAccess;

    fn config(secret: u8, instance: u8) -> JobConfig {
        let broker = BrokerAccess::new("pulsar://h");
        JobConfig::new("digits".parse().unwrap(), [instance; 16], Secret::from_bytes([secret; 32]), broker)
    }

    fn record(config: &JobConfig, version: u16, aggregator: ContributionId) -> Vec<u8> {
        let body = Body::AggregatorJoined { aggregator };
        let header =
            Header { version, kind: body.kind(), instance: config.instance, id: aggregator, rank: Rank(u32::MAX) };
        config.record_key().seal(header, &body.encode())
    }

    fn at(entry: u64) -> Position {
        Position { ledger: 1, entry }
    }

    #[test]
    fn only_records_of_this_job_are_applied() {
        let own = config(1, 1);
        let mut follower = Follower::new(&own);
        let good = record(&own, RECORD_VERSION, [1; 16]);
        let applied = follower.take(at(0), &good).unwrap().unwrap();
        assert_eq!((applied.change, applied.id), (Change::Aggregator(Rank(0)), [1; 16]));
        assert_eq!(follower.take(at(1), &record(&config(2, 1), RECORD_VERSION, [2; 16])), Ok(None));
        assert_eq!(follower.take(at(2), &record(&config(1, 2), RECORD_VERSION, [2; 16])), Ok(None));
        assert_eq!(follower.take(at(3), b"noise"), Ok(None));
        assert_eq!((follower.unverified, follower.malformed, follower.log().aggregators()), (1, 1, 1));
        let fault = follower.take(at(4), &record(&own, RECORD_VERSION + 1, [3; 16])).unwrap_err();
        assert_eq!(fault.kind, FaultKind::ProtocolVersion);
    }

    #[test]
    fn a_log_that_lost_its_records_is_noticed() {
        let own = config(1, 1);
        let mut follower = Follower::new(&own);
        let (first, second) = (record(&own, RECORD_VERSION, [1; 16]), record(&own, RECORD_VERSION, [2; 16]));
        follower.take(at(0), &first).unwrap();
        follower.resuming = true;
        assert_eq!(follower.take(at(0), &first), Ok(None));
        assert!(follower.take(at(1), &second).unwrap().is_some());
        follower.resuming = true;
        assert_eq!(follower.take(at(1), &first).unwrap_err().kind, FaultKind::Diverged);
    }
}
