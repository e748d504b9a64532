//! Stored snapshots: what a late joiner reads instead of the older part of the control log.
//!
//! The first live member writes one to the compacted topic `<job>-snapshots` after each new epoch, and now and then
//! in between. It says how far its author had read: who starts from it reads the log from there.

use gradwire_proto::Rank;
use gradwire_proto::membership::{Body, RecordId, Snapshot};
use gradwire_proto::wire::{Malformed, Reader};

use crate::job::{JobConfig, Topic};
use crate::link::{Client, LinkError, Position, Start};
use crate::read::read_to_end;
use crate::record::RECORD_VERSION;

/// The kind of a stored snapshot in a record's header.
pub(crate) const KIND: u16 = 17;

/// A snapshot as it was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) rank: Rank,
    pub(crate) id: RecordId,
    /// The last message of the control log that it holds.
    pub(crate) position: Position,
    pub(crate) snapshot: Snapshot,
}

/// The body of a stored snapshot.
pub(crate) fn encode(position: Position, snapshot: Snapshot) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&position.ledger.to_le_bytes());
    out.extend_from_slice(&position.entry.to_le_bytes());
    out.extend_from_slice(&Body::Snapshot(snapshot).encode());
    out
}

fn decode(bytes: &[u8]) -> Result<(Position, Snapshot), Malformed> {
    let mut reader = Reader::new(bytes);
    let position = Position { ledger: reader.u64()?, entry: reader.u64()? };
    match Body::decode(Body::SNAPSHOT, reader.bytes(reader.remaining())?)? {
        Some(Body::Snapshot(snapshot)) => Ok((position, snapshot)),
        _ => Err(Malformed("not a snapshot")),
    }
}

/// The latest snapshot of this instance that verifies, if there is one.
pub(crate) async fn latest(
    client: &Client,
    config: &JobConfig,
    name: &str,
    time_max: std::time::Duration,
) -> Result<Option<Stored>, LinkError> {
    let key = config.record_key();
    let topic = config.topic(Topic::Snapshots);
    let name = format!("{name}-snapshots");
    let mut reader = client.reader(&topic, &name, (Start::Earliest, true), time_max).await?;
    let mut latest: Option<Stored> = None;
    read_to_end(&mut reader, |_, message| {
        let Some(record) = key.open(message).ok().filter(|record| record.verified) else { return };
        let header = record.header;
        if header.version != RECORD_VERSION || header.kind != KIND || header.instance != config.instance {
            return;
        }
        let Ok((position, snapshot)) = decode(record.body) else { return };
        // A member that was removed may have stored an older one late.
        if latest.as_ref().is_none_or(|latest| snapshot.view.epoch >= latest.snapshot.view.epoch) {
            latest = Some(Stored { rank: header.rank, id: header.id, position, snapshot });
        }
    })
    .await?;
    Ok(latest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_snapshot_round_trips_and_rejects_every_other_length() {
        let snapshot = gradwire_proto::membership::Log::new(2).snapshot();
        let position = Position { ledger: 7, entry: 9 };
        let bytes = encode(position, snapshot.clone());
        assert_eq!(decode(&bytes), Ok((position, snapshot)));
        for length in 0..bytes.len() {
            decode(&bytes[..length]).unwrap_err();
        }
    }
}
