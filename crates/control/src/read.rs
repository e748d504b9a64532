//! Reading a job's version records back.

use std::time::Duration;

use futures::StreamExt;
use gradwire_proto::{Fault, FaultKind};
use tokio::time::{Instant, timeout_at};

use crate::job::JobConfig;
use crate::link::{Client, LinkError, unique_name};
use crate::record::{Assembly, RECORD_VERSION, RecordKey, VersionPart, VersionRecord};
use crate::worker::random_id;

/// Reads every version record of the job that the broker holds, in the order in which they became complete. Records
/// of all launches of the job that used this secret are read; ones that do not verify are left out.
///
/// # Errors
/// [`FaultKind::BrokerUnreachable`] when the broker cannot be reached or refuses us;
/// [`FaultKind::DeadlineExceeded`] when reading takes longer than `timeout`.
pub fn read_versions(config: &JobConfig, timeout: Duration) -> Result<Vec<VersionRecord>, Fault> {
    let system = |error: std::io::Error| Fault::new(FaultKind::System, format!("no thread from the system: {error}"));
    // On a thread of its own, so that it can be called from within an asynchronous runtime too.
    std::thread::scope(|scope| {
        let read = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
            let result = runtime.block_on(read(config, timeout));
            runtime.shutdown_background();
            result
        };
        let thread = std::thread::Builder::new().name("gradwire-read".to_owned()).spawn_scoped(scope, read);
        let joined = thread.map_err(system)?.join();
        joined.unwrap_or_else(|_| Err(Fault::new(FaultKind::System, "reading version records ended unexpectedly")))
    })
}

async fn read(config: &JobConfig, time_max: Duration) -> Result<Vec<VersionRecord>, Fault> {
    let deadline = Instant::now() + time_max;
    match timeout_at(deadline, read_all(config, time_max)).await {
        Ok(result) => result.map_err(|error| error.into_fault(&config.broker_url)),
        Err(_) => {
            let detail = format!(
                "reading the version records of job '{}' took longer than {} s",
                config.job,
                time_max.as_secs_f64()
            );
            Err(Fault::new(FaultKind::DeadlineExceeded, detail))
        }
    }
}

async fn read_all(config: &JobConfig, time_max: Duration) -> Result<Vec<VersionRecord>, LinkError> {
    let client = Client::connect(config, time_max).await?;
    let name = unique_name(&config.instance, u32::MAX, &random_id()[..8]);
    let mut reader = client.reader(&config.versions_topic(), &name, time_max).await?;
    let last = reader.get_last_message_id().await?;
    let (key, mut assembly, mut records) = (config.record_key(), Assembly::default(), Vec::new());
    // Brokers say that a topic is empty by the id -1.
    let mut done = last.entry_id == u64::MAX;
    while !done {
        let message = match reader.next().await {
            Some(message) => message?,
            None => return Err(LinkError { reason: "the broker closed the link".to_owned(), permanent: false }),
        };
        let id = message.message_id();
        done = (id.ledger_id, id.entry_id) >= (last.ledger_id, last.entry_id);
        records.extend(take(&key, &mut assembly, &message.payload.data));
    }
    Ok(records)
}

fn take(key: &RecordKey, assembly: &mut Assembly, message: &[u8]) -> Option<VersionRecord> {
    let record = key.open(message).ok().filter(|record| record.verified)?;
    if record.header.version != RECORD_VERSION || record.header.kind != VersionPart::KIND {
        return None;
    }
    assembly.add(record.header.id, VersionPart::decode(record.body).ok()?)
}
