//! Links to the other ranks' processes: opened once, when two of them are first members of one epoch, and kept over all
//! later ones. What `gradwire_transport`'s mesh and door are in the product.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::Fault;
use gradwire_proto::FaultKind;
use gradwire_proto::membership::{Member, RecordId, View};

use crate::event::{MS, Nanos, US};
use crate::process::{Context, Incoming, Out};
use crate::report::ProcessId;

/// A peer that has not answered is greeted again after this long, and then ever later up to the second.
const HELLO_AGAIN: Nanos = 200 * US;
const HELLO_AGAIN_MAX: Nanos = 50 * MS;

/// The process that wrote a Join: its endpoint says where it is.
pub(super) fn process_of(member: &Member) -> Option<ProcessId> {
    member.endpoint.hostname.strip_prefix('p')?.parse().ok().map(ProcessId)
}

/// All links of a process.
#[derive(Debug, Default)]
pub(super) struct Links {
    ends: BTreeMap<ProcessId, Link>,
    /// The members of the view of this id.
    members: (RecordId, BTreeSet<ProcessId>),
}

#[derive(Debug, Default)]
struct Link {
    down: bool,
    /// The exchange takes what comes. Before that it waits.
    welcome: bool,
    held: Vec<Incoming>,
}

impl Links {
    /// Whether a process is a member of this view.
    pub(super) fn is_member(&mut self, view: &View, process: ProcessId) -> bool {
        if self.members.0 != view.id {
            self.members = (view.id, view.members.iter().filter_map(process_of).collect());
        }
        self.members.1.contains(&process)
    }

    pub(super) fn open(&mut self, process: ProcessId) {
        self.ends.entry(process).or_default();
    }

    pub(super) fn is_open(&self, process: ProcessId) -> bool {
        self.ends.contains_key(&process)
    }

    /// Takes what came over a link; returns it if it is the exchange's.
    pub(super) fn take(&mut self, from: ProcessId, incoming: Incoming) -> Option<Incoming> {
        let link = self.ends.get_mut(&from).filter(|link| !link.down)?;
        link.down = matches!(incoming, Incoming::Down { .. });
        if link.welcome {
            return Some(incoming);
        }
        if !link.down {
            link.held.push(incoming);
        }
        None
    }

    /// The exchange takes what comes from now on: what came before is returned. Nothing if the link has ended.
    pub(super) fn welcome(&mut self, process: ProcessId) -> Option<Vec<Incoming>> {
        let link = self.ends.get_mut(&process).filter(|link| !link.down)?;
        link.welcome = true;
        Some(std::mem::take(&mut link.held))
    }

    /// Ends a link, so that nothing of that process comes any more.
    pub(super) fn disconnect(&mut self, context: &mut Context<'_>, process: ProcessId) {
        if let Some(link) = self.ends.get_mut(&process).filter(|link| !link.down) {
            link.down = true;
            context.out.push(Out::Down { to: process });
        }
    }
}

/// Links that come up in a process's first epoch.
#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) view: View,
    /// All members but this one: their processes, and whether this process dials them.
    others: Vec<(ProcessId, bool)>,
    /// Members before this process was one, and those that became members with it.
    before: BTreeSet<RecordId>,
    together: BTreeSet<RecordId>,
    deadline: Nanos,
    hello_at: Nanos,
    hello_again: Nanos,
}

impl Mesh {
    /// `before`: the view that a process which joins a running job was not in.
    pub(super) fn new(now: Nanos, me: RecordId, view: View, before: Option<&View>, deadline: Nanos) -> Self {
        let before: BTreeSet<RecordId> = before.iter().flat_map(|view| &view.members).map(|one| one.id).collect();
        let together = view.members.iter().map(|member| member.id).filter(|id| !before.contains(id)).collect();
        let mut mesh = Self {
            view: View::default(),
            others: Vec::new(),
            before,
            together,
            deadline,
            hello_at: now,
            hello_again: HELLO_AGAIN,
        };
        mesh.change(now, me, view);
        mesh
    }

    /// Goes on with other members.
    pub(super) fn change(&mut self, now: Nanos, me: RecordId, view: View) {
        let own = view.member(me);
        let others = view.members.iter().filter(|member| member.id != me);
        let known = |member: &Member| Some((process_of(member)?, own.is_some_and(|own| self.dials(own, member))));
        self.others = others.filter_map(known).collect();
        self.view = view;
        (self.hello_at, self.hello_again) = (now, HELLO_AGAIN);
    }

    /// Who came later dials; of those who came together, the higher rank.
    fn dials(&self, me: &Member, other: &Member) -> bool {
        let came = match (self.before.contains(&other.id), self.together.contains(&other.id)) {
            (true, _) => Ordering::Less,
            (_, true) => Ordering::Equal,
            _ => Ordering::Greater,
        };
        came.then(other.rank.cmp(&me.rank)) == Ordering::Less
    }

    /// Dials who is missing. Returns whether all links are there.
    ///
    /// # Errors
    /// `DeadlineExceeded` with a rank that is missing.
    pub(super) fn advance(&mut self, context: &mut Context<'_>, links: &Links) -> Result<bool, Fault> {
        let missing = |(process, _): &&(ProcessId, bool)| !links.is_open(*process);
        let Some((first, _)) = self.others.iter().find(missing) else { return Ok(true) };
        if context.now >= self.deadline {
            let rank = self.view.members.iter().find(|member| process_of(member) == Some(*first));
            let rank = rank.map_or(gradwire_proto::Rank(0), |member| member.rank);
            let detail = format!("no link from {rank} before the deadline");
            return Err(Fault::new(FaultKind::DeadlineExceeded, detail).at(rank));
        }
        if context.now < self.hello_at {
            return Ok(false);
        }
        for (to, _) in self.others.iter().filter(missing).filter(|(_, dials)| *dials) {
            context.out.push(Out::Hello { to: *to, epoch: self.view.epoch, answer: false });
        }
        self.hello_at = context.now + self.hello_again;
        self.hello_again = (self.hello_again * 2).min(HELLO_AGAIN_MAX);
        Ok(false)
    }

    pub(super) fn poll_timeout(&self) -> Nanos {
        self.hello_at.min(self.deadline)
    }
}
