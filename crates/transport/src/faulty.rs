//! A transport that spoils chosen writes and messages: for tests of what is above it.
//!
//! Owns: [`Faulty`], which wraps any [`Transport`]. With an empty [`FaultPlan`] it changes nothing. What it does follows
//! from the plan and the order of calls alone: the same calls give the same faults.
//!
//! Memory that a peer reads in place ([`Transport::view`]) cannot be spoiled from here; on such links only messages
//! and writes can.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use gradwire_proto::{Fault, Rank, RegionKey};

use crate::establish::Arrival;
use crate::{Buffer, Capabilities, Limits, Refused, Remote, Sink, Slice, Transport};

/// What happens to a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteFault {
    /// One bit of the payload arrives flipped. An empty payload arrives as it is.
    Corrupt,
    /// Only the first half of the payload arrives, with the whole immediate.
    Truncate,
    /// It arrives twice, the second time perhaps behind later ones.
    Duplicate,
    /// It never arrives. Its token comes back with the next poll.
    Drop,
}

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageFault {
    /// It arrives twice, the second time perhaps behind later ones.
    Duplicate,
    /// It never arrives.
    Drop,
}

/// Which writes are spoiled. Every rule that applies counts on, the first that strikes decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteRule {
    /// The write with this number, counted from 0 over the writes to this peer.
    Nth(Rank, u64, WriteFault),
    /// Every write whose number, counted from 1 over the writes to all peers, this divides.
    Every(u64, WriteFault),
    /// Each write with a probability of this many in a million, drawn from the plan's seed.
    PerMillion(u32, WriteFault),
}

/// Decides on a message by its receiver and its bytes. Asked at every offer, also when a full queue then refuses it.
pub type MessageRule = Box<dyn FnMut(Rank, &[u8]) -> Option<MessageFault> + Send>;

/// Decides on a write by its receiver and its immediate. Asked after the other rules.
pub type ChosenWrites = Box<dyn FnMut(Rank, &[u8]) -> Option<WriteFault> + Send>;

/// What a [`Faulty`] does.
#[derive(Default)]
pub struct FaultPlan {
    /// Decides which bit is flipped, and the draws of [`WriteRule::PerMillion`].
    pub seed: u64,
    /// Which writes are spoiled.
    pub writes: Vec<WriteRule>,
    /// Which others are, by what they are.
    pub chosen_writes: Option<ChosenWrites>,
    /// Which messages are.
    pub messages: Option<MessageRule>,
}

impl std::fmt::Debug for FaultPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultPlan")
            .field("seed", &self.seed)
            .field("writes", &self.writes)
            .field("messages", &self.messages.is_some())
            .finish()
    }
}

/// How often each fault was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Writes with a bit flipped.
    pub writes_corrupted: u64,
    /// Writes cut in half.
    pub writes_truncated: u64,
    /// Writes done twice.
    pub writes_duplicated: u64,
    /// Writes never done.
    pub writes_dropped: u64,
    /// Messages sent twice.
    pub messages_duplicated: u64,
    /// Messages never sent.
    pub messages_dropped: u64,
}

/// A transport that spoils what its plan says. See the module's description.
#[derive(Debug)]
pub struct Faulty<T> {
    inner: T,
    plan: FaultPlan,
    random: u64,
    writes: u64,
    writes_per_peer: Vec<u64>,
    counters: FaultCounters,
    flights: Flights,
    /// Second copies that did not fit yet.
    late: VecDeque<Late>,
}

/// A second copy that is still to be sent.
#[derive(Debug)]
enum Late {
    Message(Rank, Vec<u8>),
    Write { peer: Rank, immediate: Vec<u8>, source: Slice, target: Remote, flight: usize },
}

impl Late {
    const fn peer(&self) -> Rank {
        match self {
            Self::Message(peer, _) | Self::Write { peer, .. } => *peer,
        }
    }
}

/// Drops the second copies for a peer whose link ended.
fn forget_late(late: &mut VecDeque<Late>, flights: &mut Flights, peer: Rank) {
    late.retain(|copy| {
        if let Late::Write { peer: to, flight, .. } = copy
            && *to == peer
        {
            flights.landed(*flight);
        }
        copy.peer() != peer
    });
}

impl<T: Transport> Faulty<T> {
    /// Wraps `inner`.
    pub fn new(inner: T, plan: FaultPlan) -> Self {
        let random = plan.seed;
        Self {
            inner,
            plan,
            random,
            writes: 0,
            writes_per_peer: Vec::new(),
            counters: FaultCounters::default(),
            flights: Flights::default(),
            late: VecDeque::new(),
        }
    }

    /// The transport inside.
    pub const fn inner(&self) -> &T {
        &self.inner
    }

    /// The transport inside, for what is not part of [`Transport`]: attaching peers.
    pub const fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// How often each fault was done so far.
    pub const fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// Replaces the plan. Numbers of writes count on.
    pub fn set_plan(&mut self, plan: FaultPlan) {
        self.random = plan.seed;
        self.plan = plan;
    }

    /// What the plan has for the next write to `peer`. Asked once per write that is taken.
    fn strike(&mut self, peer: Rank, immediate: &[u8]) -> Option<WriteFault> {
        let to_peer = self.writes_per_peer.get(peer.index()).copied().unwrap_or(0);
        let number = self.writes + 1;
        let (random, rules) = (&mut self.random, &self.plan.writes);
        let struck = rules.iter().fold(None, |struck, rule| {
            let here = match *rule {
                WriteRule::Nth(rank, nth, fault) => (rank == peer && nth == to_peer).then_some(fault),
                WriteRule::Every(every, fault) => (every > 0 && number.is_multiple_of(every)).then_some(fault),
                WriteRule::PerMillion(rate, fault) => {
                    (next_random(random) % 1_000_000 < u64::from(rate)).then_some(fault)
                }
            };
            struck.or(here)
        });
        struck.or_else(|| self.plan.chosen_writes.as_mut()?(peer, immediate))
    }

    fn count_write(&mut self, peer: Rank) {
        if self.writes_per_peer.len() <= peer.index() {
            self.writes_per_peer.resize(peer.index() + 1, 0);
        }
        self.writes_per_peer[peer.index()] += 1;
        self.writes += 1;
    }

    fn spoiled_write(
        &mut self,
        fault: WriteFault,
        peer: Rank,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        let flight = self.flights.start(peer, token);
        let taken = match fault {
            WriteFault::Drop => Ok(()),
            WriteFault::Corrupt if !source.is_empty() => match self.copied(&source, source.len(), flight) {
                Ok(copy) => self.inner.write(peer, immediate, copy, target, flight as u64),
                Err(refused) => Err(refused),
            },
            WriteFault::Truncate => match self.copied(&source, source.len() / 2, flight) {
                Ok(copy) => self.inner.write(peer, immediate, copy, target, flight as u64),
                Err(refused) => Err(refused),
            },
            WriteFault::Corrupt | WriteFault::Duplicate => {
                self.inner.write(peer, immediate, source.clone(), target, flight as u64)
            }
        };
        if let Err(refused) = taken {
            self.flights.cancel(flight);
            return Err(refused);
        }
        match fault {
            WriteFault::Corrupt => self.counters.writes_corrupted += 1,
            WriteFault::Truncate => self.counters.writes_truncated += 1,
            WriteFault::Drop => {
                self.counters.writes_dropped += 1;
                self.flights.landed(flight);
            }
            WriteFault::Duplicate => {
                self.counters.writes_duplicated += 1;
                self.flights.one_more(flight);
                self.late.push_back(Late::Write { peer, immediate: immediate.to_vec(), source, target, flight });
                self.send_late();
            }
        }
        Ok(())
    }

    /// A copy of the first `bytes` bytes of `source`, in memory that the flight keeps; of all of it, with one bit
    /// flipped.
    fn copied(&mut self, source: &Slice, bytes: usize, flight: usize) -> Result<Slice, Refused> {
        let (scratch, replaced) = self.flights.scratch(flight, bytes)?;
        if let Some(key) = replaced {
            self.inner.deregister(key);
        }
        // The caller holds no unique borrow of what it hands over as the source of a write.
        let original = &source.mapping().bytes()[source.offset()..source.offset() + bytes];
        let copy = &mut scratch.bytes_mut()[..bytes];
        copy.copy_from_slice(original);
        if bytes == source.len() {
            let bit = (next_random(&mut self.random) % (bytes as u64 * 8)) as usize;
            copy[bit / 8] ^= 1 << (bit % 8);
        }
        self.inner.register(scratch).map_err(|_| Refused::Full)?;
        Ok(scratch.slice(0..bytes))
    }

    /// Sends the second copies that fit by now.
    fn send_late(&mut self) -> usize {
        let mut count = 0;
        while let Some(late) = self.late.pop_front() {
            let sent = match &late {
                Late::Message(peer, message) => self.inner.send(*peer, message),
                Late::Write { peer, immediate, source, target, flight } => {
                    self.inner.write(*peer, immediate, source.clone(), *target, *flight as u64)
                }
            };
            match (sent, late) {
                (Ok(()), _) => count += 1,
                (Err(Refused::Full), late) => {
                    self.late.push_front(late);
                    return count;
                }
                (Err(_), Late::Write { flight, .. }) => self.flights.landed(flight),
                (Err(_), Late::Message(..)) => {}
            }
        }
        count
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn name(&self, peer: Rank) -> &'static str {
        self.inner.name(peer)
    }

    fn capabilities(&self, peer: Rank) -> Capabilities {
        self.inner.capabilities(peer)
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn register(&mut self, buffer: &Buffer) -> Result<(), Fault> {
        self.inner.register(buffer)
    }

    fn deregister(&mut self, key: RegionKey) {
        self.inner.deregister(key);
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<(), Refused> {
        let fault = self.plan.messages.as_mut().and_then(|rule| rule(peer, message));
        match fault {
            Some(MessageFault::Drop) => self.counters.messages_dropped += 1,
            Some(MessageFault::Duplicate) => {
                self.inner.send(peer, message)?;
                self.counters.messages_duplicated += 1;
                self.late.push_back(Late::Message(peer, message.to_vec()));
                self.send_late();
            }
            None => self.inner.send(peer, message)?,
        }
        Ok(())
    }

    fn write(
        &mut self,
        peer: Rank,
        immediate: &[u8],
        source: Slice,
        target: Remote,
        token: u64,
    ) -> Result<(), Refused> {
        let random = self.random;
        let taken = match self.strike(peer, immediate) {
            Some(fault) => self.spoiled_write(fault, peer, immediate, source, target, token),
            None => {
                let flight = self.flights.start(peer, token);
                let taken = self.inner.write(peer, immediate, source, target, flight as u64);
                if taken.is_err() {
                    self.flights.cancel(flight);
                }
                taken
            }
        };
        match taken {
            Ok(()) => self.count_write(peer),
            // Offered again, the same write draws the same lot.
            Err(_) => self.random = random,
        }
        taken
    }

    fn view(&self, peer: Rank, place: Remote, bytes: usize) -> Result<&[u8], Refused> {
        self.inner.view(peer, place, bytes)
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> usize {
        let late = self.send_late();
        let moved = self.inner.poll(&mut Landing { sink, flights: &mut self.flights, late: &mut self.late });
        late + moved + self.flights.report(sink)
    }

    fn arm(&mut self) -> bool {
        self.inner.arm() && !self.flights.has_landed()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.event_fd()
    }

    fn welcome(&mut self, arrival: Arrival, deadline: Instant) -> Result<(), Fault> {
        self.inner.welcome(arrival, deadline)
    }

    fn disconnect(&mut self, peer: Rank) {
        self.inner.disconnect(peer);
        forget_late(&mut self.late, &mut self.flights, peer);
    }

    fn is_flushed(&self, peer: Rank) -> bool {
        self.inner.is_flushed(peer) && !self.late.iter().any(|late| late.peer() == peer)
    }
}

/// The writes under way: the token that the inner transport has is an index here.
#[derive(Debug, Default)]
struct Flights {
    all: Vec<Flight>,
    free: Vec<usize>,
    /// Flights that are over without the inner transport saying so.
    landed: VecDeque<usize>,
}

#[derive(Debug)]
struct Flight {
    peer: Rank,
    token: u64,
    /// How many times the inner transport, or this one, still has to report it.
    copies: u32,
    /// Memory for a spoiled copy; kept for the next one.
    scratch: Option<Buffer>,
}

impl Flights {
    fn start(&mut self, peer: Rank, token: u64) -> usize {
        let Some(index) = self.free.pop() else {
            self.all.push(Flight { peer, token, copies: 1, scratch: None });
            return self.all.len() - 1;
        };
        let flight = &mut self.all[index];
        (flight.peer, flight.token, flight.copies) = (peer, token, 1);
        index
    }

    fn one_more(&mut self, index: usize) {
        self.all[index].copies += 1;
    }

    fn cancel(&mut self, index: usize) {
        self.free.push(index);
    }

    fn landed(&mut self, index: usize) {
        self.landed.push_back(index);
    }

    fn has_landed(&self) -> bool {
        !self.landed.is_empty()
    }

    /// The flight's scratch memory, and the key of the one that it replaced because that was too small.
    fn scratch(&mut self, index: usize, bytes: usize) -> Result<(&mut Buffer, Option<RegionKey>), Refused> {
        let scratch = &mut self.all[index].scratch;
        let replaced = scratch.take_if(|buffer| buffer.len() < bytes).map(|buffer| buffer.key());
        let buffer = match scratch.take() {
            Some(buffer) => buffer,
            None => Buffer::allocate(bytes).map_err(|_| Refused::Full)?,
        };
        Ok((scratch.insert(buffer), replaced))
    }

    /// One copy is done. The caller's token, when it was the last.
    fn copy_done(&mut self, index: usize) -> Option<(Rank, u64)> {
        let flight = self.all.get_mut(index)?;
        flight.copies = flight.copies.checked_sub(1)?;
        if flight.copies > 0 {
            return None;
        }
        self.free.push(index);
        Some((flight.peer, flight.token))
    }

    fn report(&mut self, sink: &mut dyn Sink) -> usize {
        let mut count = 0;
        while let Some(index) = self.landed.pop_front() {
            if let Some((peer, token)) = self.copy_done(index) {
                sink.sent(peer, token);
            }
            count += 1;
        }
        count
    }
}

/// The caller's sink, with its own tokens.
struct Landing<'a> {
    sink: &'a mut dyn Sink,
    flights: &'a mut Flights,
    late: &'a mut VecDeque<Late>,
}

impl Sink for Landing<'_> {
    fn admit(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) -> bool {
        self.sink.admit(peer, immediate, target, bytes)
    }

    fn message(&mut self, peer: Rank, message: &[u8]) {
        self.sink.message(peer, message);
    }

    fn written(&mut self, peer: Rank, immediate: &[u8], target: Remote, bytes: usize) {
        self.sink.written(peer, immediate, target, bytes);
    }

    fn sent(&mut self, _peer: Rank, token: u64) {
        if let Some((peer, token)) = self.flights.copy_done(token as usize) {
            self.sink.sent(peer, token);
        }
    }

    fn peer_down(&mut self, peer: Rank, fault: Fault) {
        forget_late(self.late, self.flights, peer);
        self.flights.report(self.sink);
        self.sink.peer_down(peer, fault);
    }
}

/// The next number of SplitMix64 (Steele, Lea and Flood, 2014).
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
