//! Links between processes: what they carry, how long that takes, and what the plan does to it.
//!
//! A link is an ordered stream each way, as `gradwire_transport::Transport` promises it, until a fault says otherwise.

use gradwire_proto::Epoch;
use gradwire_proto::frame::{FrameKind, Location};
use gradwire_proto::limits::FRAME_HEADER_BYTES;

use crate::event::{Nanos, US};
use crate::plan::LinkFault;
use crate::random::{Draws, mix};
use crate::report::ProcessId;

/// What a link carries.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// The sender wants to open a link in this epoch, or says that it is open.
    Hello { epoch: Epoch, answer: bool },
    /// A frame that travels as a message.
    Message(Box<[u8]>),
    /// A one-sided write.
    Write(Box<Write>),
    /// The link is over, and with it all streams.
    Down,
    /// A frame of a stream over which a process gets the state of a job that it joins.
    State { stream: u32, frame: Box<[u8]> },
    /// Such a stream is over.
    StateEnd { stream: u32 },
}

/// A one-sided write: where to, what, and the header that tells of it.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) immediate: [u8; FRAME_HEADER_BYTES],
    pub(crate) target: Location,
    pub(crate) bytes: Box<[u8]>,
}

/// One end: the process, and its place in the job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) process: ProcessId,
    pub(crate) place: u32,
}

/// A fault that goes on until then.
#[derive(Clone, Copy, Debug)]
struct Active<T> {
    until: Nanos,
    what: T,
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    side: u64,
    one_way: bool,
}

/// What was carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages around the steps: what there is, who leaves, and why the job failed.
    pub around: u64,
    /// Messages with which ranks enter an epoch.
    pub epochs: u64,
    /// Heartbeats.
    pub heartbeats: u64,
    /// Frames with the state for processes that join.
    pub state: u64,
    /// Other frames that travelled as messages.
    pub messages: u64,
    /// Bytes of those.
    pub message_bytes: u64,
    /// One-sided writes.
    pub writes: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// What faults struck.
    pub struck: u64,
}

impl Traffic {
    const NONE: Self = Self {
        around: 0,
        epochs: 0,
        heartbeats: 0,
        state: 0,
        messages: 0,
        message_bytes: 0,
        writes: 0,
        payload_bytes: 0,
        struck: 0,
    };
}

/// All links.
#[derive(Debug)]
pub(crate) struct Network {
    seed: u64,
    /// By sender and receiver.
    streams: Vec<Vec<Stream>>,
    links: Vec<Active<LinkFault>>,
    cuts: Vec<Active<Cut>>,
    pub(crate) traffic: Traffic,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// How many items were sent.
    items: u64,
    /// When the last one arrives.
    last_at: Nanos,
}

impl Network {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed, streams: Vec::new(), links: Vec::new(), cuts: Vec::new(), traffic: Traffic::NONE }
    }

    pub(crate) fn begin_link_fault(&mut self, fault: LinkFault, now: Nanos) {
        self.links.push(Active { until: now + fault.for_us * US, what: fault });
    }

    pub(crate) fn begin_cut(&mut self, side: u64, one_way: bool, until: Nanos) {
        self.cuts.push(Active { until, what: Cut { side, one_way } });
    }

    /// Takes an item. What arrives of it, and when, is put into `arrivals`.
    pub(crate) fn carry(&mut self, now: Nanos, from: End, to: End, item: Item, arrivals: &mut Vec<(Nanos, Item)>) {
        self.count(&item);
        self.links.retain(|fault| fault.until > now);
        self.cuts.retain(|cut| cut.until > now);
        let (place_from, place_to) = (from.place, to.place);
        let stream = self.stream(from.process, to.process);
        let number = stream.items;
        stream.items += 1;
        let last_at = stream.last_at;
        let name = [u64::from(from.process.0), u64::from(to.process.0), number];
        let mut draws = Draws::new(self.seed, &name);
        let size = match &item {
            Item::Write(write) => write.bytes.len() as u64,
            Item::Message(bytes) => bytes.len() as u64,
            Item::State { frame, .. } => frame.len() as u64,
            Item::Hello { .. } | Item::Down | Item::StateEnd { .. } => 0,
        };
        // Between 2 and 42 us, and a nanosecond for each 10 bytes: 80 Gbit/s.
        let mut flight =
            2 * US + draws.below(10 * US) + draws.below(30 * US) * u64::from(draws.strikes(200)) + size / 10;
        let hit: Vec<(usize, LinkFault)> = (self.links.iter().map(|fault| fault.what).enumerate())
            .filter(|(_, fault)| fault.from.is_none_or(|place| place == place_from))
            .filter(|(_, fault)| fault.to.is_none_or(|place| place == place_to))
            .collect();
        flight += hit.iter().map(|(_, fault)| fault.delay_us * US).sum::<u64>();
        let held = self.held_until(place_from, place_to).unwrap_or(now);
        let mut arrives =
            Arrives { item: Some(item), at: last_at.max(held.max(now) + flight), ordered: true, more: Vec::new() };
        for (which, fault) in hit {
            let mut draws = Draws::new(self.seed, &[name[0], name[1], name[2], 1 + which as u64]);
            if arrives.strike(&fault, &mut draws, held.max(now) + flight) {
                self.traffic.struck += 1;
            }
        }
        if arrives.ordered && arrives.item.is_some() {
            self.stream(from.process, to.process).last_at = arrives.at;
        }
        arrivals.extend(arrives.item.map(|item| (arrives.at, item)));
        arrivals.append(&mut arrives.more);
    }

    fn stream(&mut self, from: ProcessId, to: ProcessId) -> &mut Stream {
        grow(grow(&mut self.streams, from.index()), to.index())
    }

    /// Until when nothing comes through.
    fn held_until(&self, from: u32, to: u32) -> Option<Nanos> {
        let on_side = |cut: &Cut, place: u32| place < 64 && cut.side & (1 << place) != 0;
        let cuts = self.cuts.iter().filter(|cut| match (on_side(&cut.what, from), on_side(&cut.what, to)) {
            (true, false) => true,
            (false, true) => !cut.what.one_way,
            _ => false,
        });
        cuts.map(|cut| cut.until).max()
    }

    fn count(&mut self, item: &Item) {
        let traffic = &mut self.traffic;
        match item {
            Item::Message(bytes) => match purpose(bytes) {
                Purpose::Step => {
                    traffic.messages += 1;
                    traffic.message_bytes += bytes.len() as u64;
                }
                Purpose::Epoch => traffic.epochs += 1,
                Purpose::Heartbeat => traffic.heartbeats += 1,
                Purpose::Around => traffic.around += 1,
            },
            Item::Write(write) => {
                traffic.writes += 1;
                traffic.payload_bytes += write.bytes.len() as u64;
            }
            Item::State { .. } => traffic.state += 1,
            Item::Hello { .. } | Item::Down | Item::StateEnd { .. } => {}
        }
    }

    /// How long a write waits before its memory is read: it has others before it.
    pub(crate) fn departs_after(&self, from: ProcessId, number: u64, bytes: usize) -> Nanos {
        US + mix(self.seed, &[u64::from(from.0), number, 77]) % (3 * US) + bytes as u64 / 20
    }
}

fn grow<T: Default>(list: &mut Vec<T>, index: usize) -> &mut T {
    if list.len() <= index {
        list.resize_with(index + 1, T::default);
    }
    &mut list[index]
}

/// What is to arrive.
struct Arrives {
    item: Option<Item>,
    at: Nanos,
    /// What is sent after it arrives after it.
    ordered: bool,
    /// Out of order.
    more: Vec<(Nanos, Item)>,
}

impl Arrives {
    /// Does to an item what the fault says. Returns whether that was anything.
    fn strike(&mut self, fault: &LinkFault, draws: &mut Draws, unordered_at: Nanos) -> bool {
        match &self.item {
            Some(Item::Write(_)) => self.strike_write(fault, draws, unordered_at),
            Some(Item::Message(_)) => self.strike_message(fault, draws),
            _ => false,
        }
    }

    fn strike_write(&mut self, fault: &LinkFault, draws: &mut Draws, unordered_at: Nanos) -> bool {
        let Some(Item::Write(write)) = &mut self.item else { return false };
        let mut struck = false;
        if draws.strikes(fault.late) {
            struck = true;
            let late = self.at + draws.below(fault.late_us * US);
            self.more.push((late, Item::Write(write.clone())));
        }
        if draws.strikes(fault.repeat) {
            struck = true;
            self.more.push((self.at + draws.below(20 * US), Item::Write(write.clone())));
        }
        if draws.strikes(fault.corrupt_headers) {
            struck = true;
            flip(&mut write.immediate, draws);
        }
        if draws.strikes(fault.corrupt) {
            struck = true;
            flip(&mut write.bytes, draws);
        }
        if draws.strikes(fault.truncate) {
            struck = true;
            write.bytes = write.bytes[..write.bytes.len() / 2].into();
        }
        if draws.strikes(fault.reorder) {
            struck = true;
            self.ordered = false;
            self.at = unordered_at + draws.below(200 * US);
        }
        if draws.strikes(fault.lose) {
            struck = true;
            self.item = None;
        }
        struck
    }

    fn strike_message(&mut self, fault: &LinkFault, draws: &mut Draws) -> bool {
        let Some(Item::Message(bytes)) = &mut self.item else { return false };
        let mut struck = false;
        if draws.strikes(fault.repeat_messages) && can_repeat(bytes) {
            struck = true;
            self.more.push((self.at + draws.below(500 * US), Item::Message(bytes.clone())));
        }
        if draws.strikes(fault.corrupt_headers) {
            struck = true;
            flip(bytes, draws);
        }
        if draws.strikes(fault.lose_messages) {
            struck = true;
            self.item = None;
        }
        struck
    }
}

/// Whether this is a message that its receiver may get twice. Of the others (declarations, word of being prepared, and of
/// where all are) the session counts the order.
fn can_repeat(message: &[u8]) -> bool {
    let once = [FrameKind::Manifest as u8, FrameKind::Ready as u8, FrameKind::Steps as u8];
    message.get(3).is_some_and(|kind| !once.contains(kind))
}

/// What messages are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Step,
    Epoch,
    Heartbeat,
    Around,
}

fn purpose(message: &[u8]) -> Purpose {
    use FrameKind::{Ack, Contribution, HasAll, Heartbeat, Nack, Result, Steps, Sync, Synced, Waiting};
    let is_one_of =
        |kinds: &[FrameKind]| message.get(3).is_some_and(|kind| kinds.iter().any(|one| *one as u8 == *kind));
    if is_one_of(&[Contribution, Result, Ack, Nack, Waiting, HasAll]) {
        Purpose::Step
    } else if is_one_of(&[Sync, Synced, Steps]) {
        Purpose::Epoch
    } else if is_one_of(&[Heartbeat]) {
        Purpose::Heartbeat
    } else {
        Purpose::Around
    }
}

fn flip(bytes: &mut [u8], draws: &mut Draws) {
    let bit = draws.below(bytes.len() as u64 * 8) as usize;
    if let Some(byte) = bytes.get_mut(bit / 8) {
        *byte ^= 1 << (bit % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (End, End) {
        (End { process: ProcessId(0), place: 0 }, End { process: ProcessId(1), place: 1 })
    }

    fn message(kind: FrameKind) -> Item {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[3] = kind as u8;
        Item::Message(bytes.into())
    }

    #[test]
    fn without_faults_everything_arrives_once_and_in_order() {
        let (from, to) = ends();
        let (mut network, mut arrivals) = (Network::new(1), Vec::new());
        for now in 0..1000 {
            network.carry(now, from, to, message(FrameKind::Ack), &mut arrivals);
        }
        assert_eq!(arrivals.len(), 1000);
        assert!(arrivals.is_sorted_by_key(|(at, _)| *at));
        assert_eq!(network.traffic.messages, 1000);
    }

    #[test]
    fn a_cut_holds_one_way_or_both() {
        for (one_way, back_held) in [(true, false), (false, true)] {
            let (from, to) = ends();
            let mut network = Network::new(1);
            network.begin_cut(1, one_way, 1_000_000);
            let mut arrive = |from, to| {
                let mut arrivals = Vec::new();
                network.carry(0, from, to, message(FrameKind::Ack), &mut arrivals);
                arrivals[0].0
            };
            assert!(arrive(from, to) >= 1_000_000);
            assert_eq!(arrive(to, from) >= 1_000_000, back_held);
        }
    }

    #[test]
    fn declarations_are_never_repeated() {
        let (from, to) = ends();
        let (mut network, mut arrivals) = (Network::new(1), Vec::new());
        let fault = LinkFault { for_us: 1000, repeat_messages: 1000, ..LinkFault::default() };
        network.begin_link_fault(fault, 0);
        for kind in [FrameKind::Manifest, FrameKind::Ready, FrameKind::Nack] {
            network.carry(0, from, to, message(kind), &mut arrivals);
        }
        assert_eq!(arrivals.len(), 4);
    }
}
