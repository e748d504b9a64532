//! What is simulated: a job, and what happens to it. A plan and this crate's version decide everything that follows.
//!
//! Plans are made from a seed ([`Plan::generate`]) or read from a file; as text they are JSON with one fault on each
//! line ([`Plan::to_text`]), so that they can be read, cut down and kept beside a bug report.

mod generate;
mod outlook;
mod text;

use gradwire_proto::manifest::Declaration;
use gradwire_proto::rounds::LatePolicy;
use gradwire_proto::{Collective, DType, Rank, ReduceOp, WireFormat, session};
use serde::{Deserialize, Serialize};

pub use generate::Shape;
pub use text::Unreadable;

/// A job and its faults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Decides everything that the rest leaves open: delays, which item a fault strikes, values.
    pub seed: u64,
    /// How many ranks the job starts with.
    pub ranks: u32,
    /// How many steps, or rounds, there are.
    pub steps: u32,
    /// What becomes of a step in which a rank is lost. Unless the job fails then, processes may join it, too.
    pub recovery: Recovery,
    /// With fewer ranks the others wait until some have joined.
    pub ranks_min: u32,
    /// Places for ranks: those behind the ones that the job starts with are for processes that join it.
    pub ranks_max: u32,
    /// In how many rounds the tensors are declared.
    pub rounds: u32,
    /// What links do.
    pub links: Links,
    /// How long an operation may take.
    pub deadline_ms: u64,
    /// How long a rank computes before each step.
    pub compute_us: u64,
    /// Whether the broker keeps what it gave a receipt for when it is started again.
    pub broker_keeps: bool,
    /// What is reduced in each step.
    pub tensors: Vec<Tensor>,
    /// Set: ranks are contributors of the federated mode, and share no links.
    pub federated: Option<Federated>,
    /// What goes wrong.
    pub faults: Vec<Timed>,
}

/// What links do with one-sided writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Links {
    /// The receiver is asked before a payload lands, as over TCP.
    Asked,
    /// Payloads land whether the receiver runs or not, as by RDMA: it finds out afterwards.
    OneSided,
}

/// A tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// How many elements it has.
    pub elements: u64,
    /// Type of its elements.
    pub dtype: Elements,
    /// How f32 travels.
    pub wire: Wire,
    /// What is done with it.
    pub collective: Operation,
    /// How contributions are combined.
    pub reduce: Reduce,
}

/// How the federated mode is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Federated {
    /// How many aggregators there are.
    pub aggregators: u32,
    /// How many contributions a round needs.
    pub quorum: u32,
    /// Whether late contributions are carried into the next round.
    pub carry: bool,
    /// Elements of one shard. The model is the first tensor of the plan.
    pub shard_elements: u32,
}

/// A fault and when it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timed {
    /// When, from the start of the job.
    pub at_us: u64,
    /// What.
    pub fault: Fault,
}

/// What goes wrong. Ranks are named by their place in the job: a process that is started again has the same one.
/// Aggregators of the federated mode have the places behind the contributors. Odds are in a thousand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// A link spoils some of what it carries.
    Link(LinkFault),
    /// Nothing comes through from some ranks to the others. It is not lost: it comes when the cut is over.
    Cut {
        /// How long.
        for_us: u64,
        /// One bit for each rank: who is on this side.
        side: u64,
        /// Only what this side sends is held.
        one_way: bool,
    },
    /// A link ends, and both its ranks are told.
    Break {
        /// One.
        a: u32,
        /// The other.
        b: u32,
    },
    /// A rank takes longer for whatever it does.
    Slow {
        /// Which.
        rank: u32,
        /// How long.
        for_us: u64,
        /// How much longer it takes for each thing that it does.
        by_us: u64,
    },
    /// A rank stands still, as by SIGSTOP. What is written to its memory meanwhile lands all the same.
    Stop {
        /// Which.
        rank: u32,
        /// How long.
        for_us: u64,
    },
    /// A rank's trainer does nothing more for so long. Its process is there, and answers.
    Hang {
        /// Which.
        rank: u32,
        /// How long.
        for_us: u64,
    },
    /// A rank's process ends.
    Crash {
        /// Which.
        rank: u32,
        /// When it is started again, if it is.
        back_us: Option<u64>,
        /// Whether it then finds what it had stored.
        disk: bool,
        /// Nobody is told, as when the power fails.
        silent: bool,
    },
    /// A rank leaves in good order after its step.
    Leave {
        /// Which.
        rank: u32,
    },
    /// A process is started in a place where none runs.
    Join {
        /// Which.
        rank: u32,
    },
    /// Another process is started in a rank's place although the first still runs: whoever did it took that for dead.
    Replace {
        /// Which.
        rank: u32,
    },
    /// The broker cannot be reached.
    BrokerDown {
        /// How long.
        for_us: u64,
        /// It was started again: what it had not stored is gone.
        restart: bool,
    },
    /// A rank loses its link to the broker, and opens another. Receipts may be lost.
    BrokerLink {
        /// Which.
        rank: u32,
    },
    /// The broker takes longer.
    BrokerSlow {
        /// How long.
        for_us: u64,
        /// How much longer.
        by_us: u64,
    },
    /// The broker delivers some messages twice.
    BrokerTwice {
        /// How long.
        for_us: u64,
        /// How often.
        odds: u32,
    },
}

/// What a link does to what it carries. Writes are one-sided writes with a payload; messages are everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinkFault {
    /// How long.
    pub for_us: u64,
    /// From which rank, or from all.
    pub from: Option<u32>,
    /// To which rank, or to all.
    pub to: Option<u32>,
    /// A write never arrives.
    pub lose: u32,
    /// A write arrives twice.
    pub repeat: u32,
    /// A write arrives once more, up to `late_us` later.
    pub late: u32,
    /// How late that may be.
    pub late_us: u64,
    /// A bit of a payload is flipped.
    pub corrupt: u32,
    /// A payload arrives without its end.
    pub truncate: u32,
    /// A write arrives out of order.
    pub reorder: u32,
    /// A message that can be sent again (acknowledgement, request, word that something is missing) arrives twice.
    pub repeat_messages: u32,
    /// A message never arrives. No transport does this to a link that it calls up.
    pub lose_messages: u32,
    /// A bit of a header or message is flipped. No transport does this: all of them have checksums of their own.
    pub corrupt_headers: u32,
    /// Everything takes this much longer.
    pub delay_us: u64,
}

macro_rules! names {
    ($(#[$doc:meta])* $name:ident as $other:path { $($(#[$each:meta])* $variant:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$each])* $variant),* }

        impl From<$name> for $other {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => Self::$variant),* }
            }
        }
    };
}

names! {
    /// What becomes of a step in which a rank is lost, by its name in plans.
    Recovery as session::Recovery {
        /// The others do it again from their contributions.
        Redo,
        /// The others' trainers repeat it.
        Abort,
        /// The job fails.
        Fail,
    }
}
names! {
    /// An element type, by its name in plans.
    Elements as DType {
        /// IEEE 754 binary32.
        F32,
        /// IEEE 754 binary64.
        F64,
        /// IEEE 754 binary16.
        F16,
        /// bfloat16.
        Bf16,
        /// 32 bits.
        I32,
        /// 64 bits.
        I64,
    }
}
names! {
    /// A wire format, by its name in plans.
    Wire as WireFormat {
        /// Exact.
        Fp32,
        /// Rounded to binary16.
        Fp16,
        /// Rounded to bfloat16.
        Bf16,
    }
}
names! {
    /// A reduction, by its name in plans.
    Reduce as ReduceOp {
        /// The sum.
        Sum,
        /// The sum, divided once.
        Mean,
        /// The smallest.
        Min,
        /// The largest.
        Max,
    }
}

/// A collective, by its name in plans. Broadcasts come from the first member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Everybody gets the reduction.
    AllReduce,
    /// Everybody gets a part of the reduction.
    ReduceScatter,
    /// Everybody gets all parts.
    AllGather,
    /// Everybody gets the first member's.
    Broadcast,
}

impl From<Operation> for Collective {
    fn from(operation: Operation) -> Self {
        match operation {
            Operation::AllReduce => Self::AllReduce,
            Operation::ReduceScatter => Self::ReduceScatter,
            Operation::AllGather => Self::AllGather,
            Operation::Broadcast => Self::Broadcast { root: Rank(0) },
        }
    }
}

impl Tensor {
    /// As a rank declares it: the `index`-th of a plan.
    pub(crate) fn declaration(&self, index: usize) -> Declaration {
        Declaration {
            name: format!("t{index}"),
            shape: vec![self.elements],
            dtype: self.dtype.into(),
            collective: self.collective.into(),
            reduce: self.reduce.into(),
            wire: self.wire.into(),
            priority: index as i32 % 3,
        }
    }
}

impl Federated {
    pub(crate) const fn late(&self) -> LatePolicy {
        if self.carry { LatePolicy::Carry } else { LatePolicy::Reject }
    }
}

impl Plan {
    /// How many places for processes there are: ranks or contributors, and aggregators.
    #[must_use]
    pub fn places(&self) -> u32 {
        match self.federated {
            Some(federated) => self.ranks + federated.aggregators,
            None => self.ranks.max(self.ranks_max),
        }
    }

    /// How many places have processes from the start.
    pub(crate) fn places_at_start(&self) -> u32 {
        if self.federated.is_some() { self.places() } else { self.ranks }
    }

    /// Whether a job goes on when ranks are lost, and others join it.
    pub(crate) fn is_elastic(&self) -> bool {
        self.federated.is_none() && self.recovery != Recovery::Fail
    }

    /// Whether a broker that was started again has lost what it gave receipts for.
    pub(crate) fn loses_log(&self) -> bool {
        let restarts = self.faults.iter().any(|timed| matches!(timed.fault, Fault::BrokerDown { restart: true, .. }));
        restarts && !self.broker_keeps
    }

    /// How long an operation may take, in nanoseconds.
    pub(crate) const fn deadline_ns(&self) -> u64 {
        self.deadline_ms * 1_000_000
    }

    /// Whether anything that is sent can arrive as something that no rank may send.
    pub(crate) fn forges(&self) -> bool {
        self.faults.iter().any(|timed| match timed.fault {
            Fault::Link(link) => link.lose_messages > 0 || link.corrupt_headers > 0,
            _ => false,
        })
    }
}
