//! What the rendezvous and its owner say to each other.

use gradwire_proto::member::Endpoint;
use gradwire_proto::membership::{Body, RecordId, View};
use gradwire_proto::{Fault, Rank};

use crate::record::Instance;

/// What happens when members are lost, or more processes join. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The members of epoch 1 stay.
    Fixed,
    /// Members that leave or are suspected are left out of the next epoch, and processes that join are taken in.
    Elastic {
        /// Ranks that join later are below this; those that the job starts with always may.
        ranks_max: u32,
    },
}

impl Policy {
    /// Ranks of a job that starts with so many are below this.
    pub(crate) const fn ranks_max(self, world_size: u32) -> u32 {
        match self {
            Self::Elastic { ranks_max, .. } if ranks_max > world_size => ranks_max,
            Self::Fixed | Self::Elastic { .. } => world_size,
        }
    }
}

/// What other ranks made known after joining.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlEvent {
    /// A rank met a fault that ends the job. `reporter` names it.
    Failed(Fault),
    /// A new epoch began: this rank is a member of it, or waits to become one.
    View(View),
    /// A new epoch began without this rank, which must stop: nothing that it does counts any more.
    Removed(Fault),
}

/// Who this rank is.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    pub(crate) job: String,
    pub(crate) instance: Instance,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) policy: Policy,
    pub(crate) endpoint: Endpoint,
    /// The id of this process's Join.
    pub(crate) join_id: RecordId,
}

/// A record to append. Without an id it gets a new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Append {
    pub(crate) id: Option<RecordId>,
    pub(crate) body: Body,
}
