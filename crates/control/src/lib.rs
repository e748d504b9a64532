//! gradwire's control plane over Apache Pulsar: rendezvous, membership, version records, and an embedded broker.
//!
//! Ranks meet over an ordered log, the job's control topic: each appends its Join and reads the log from the start;
//! the members of the first epoch are decided by the order of the log alone. After that the control plane carries
//! faults to the other ranks and version records to the broker, behind the steps: nothing here is on the data path,
//! and a broker that goes away after joining disturbs no step.
//!
//! The same code talks to an Apache Pulsar cluster and to the [`EmbeddedBroker`], by URL.
#![forbid(unsafe_code)]

mod access;
pub mod broker;
mod copies;
mod fate;
pub mod federated;
mod job;
mod link;
mod outbox;
mod pieces;
mod plane;
mod probe;
mod read;
mod record;
mod rendezvous;
mod snapshots;
mod supervise;
mod worker;

pub use access::{BrokerAccess, Token};
pub use broker::{BrokerConfig, BrokerTls, EmbeddedBroker};
pub use copies::{CopyRequest, CopyStats, CopyStore, Held, PIECE_BYTES_DEFAULT, ShardVersion};
pub use gradwire_proto::membership::{Member, RecordId, View};
pub use job::{JobConfig, JobName, ModelVersion, Topic, broker_token};
pub use plane::{COMMIT_INTERVAL_DEFAULT, ControlPlane, JoinRequest};
pub use read::{AuditEntry, AuditQuery, Census, Records, VersionQuery, read_audit, read_census, read_versions};
pub use record::{AuditKind, AuditRecord, Instance, VersionRecord};
pub use rendezvous::{ControlEvent, Policy};
