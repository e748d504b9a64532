//! Which peers are there: heartbeats, silence, and what becomes of those that are lost.
//!
//! Each rank tells its peers how often they hear of it at least. A peer is given up when nothing came from it for three
//! times as long, or for this rank's own limit if that is longer: settings need not be the same on all ranks.

use alloc::format;

use super::state::Outgoing;
use super::{Event, Recovery, Session};
use crate::fault::{Fault, FaultKind};
use crate::frame::FrameHeader;
use crate::ids::Rank;
use crate::limits::{HEARTBEAT_MS_MAX, SILENCE_HEARTBEATS_MIN};

const NANOS_PER_MS: u64 = 1_000_000;

impl Session {
    /// Something came from this peer.
    pub fn heard(&mut self, peer: Rank, now: u64) {
        if let Some(state) = self.peers.get_mut(peer.index()) {
            state.heard_at = now;
        }
    }

    /// When [`Session::beat`] has something to do.
    pub(super) fn next_beat(&self) -> Option<u64> {
        let watches = self.config.recovery != Recovery::Fail && self.members().len() > 1;
        watches.then_some(self.heartbeat_at.min(self.silence_at))
    }

    /// Tells every peer that this rank is there, and finds those that are silent.
    pub(super) fn beat(&mut self, now: u64) {
        let every = self.config.timing.heartbeat_ns;
        if self.next_beat().is_none_or(|at| now < at) || self.fault.is_some() {
            return;
        }
        // A rank that did not run itself, or begins, has no word on others.
        let late = now > self.heartbeat_at.saturating_add(every);
        if late {
            self.watches_from = now;
        }
        let speaks = now >= self.heartbeat_at;
        if speaks {
            self.heartbeat_at = now.saturating_add(every);
        }
        self.silence_at = u64::MAX;
        for peer in self.others() {
            if late {
                self.peers[peer.index()].heard_at = now;
            }
            self.listen(peer, now);
            if speaks && self.peers[peer.index()].reachable() {
                self.say(Outgoing::Heartbeat(peer));
            }
        }
    }

    /// Gives a peer up that is silent for too long, or notes when it will be.
    fn listen(&mut self, peer: Rank, now: u64) {
        let state = &self.peers[peer.index()];
        let (left, down) = (state.left, state.down);
        // A link that ends is word enough, but after a goodbye; then the end of the link is what is waited for.
        if state.lost || left != down {
            return;
        }
        let limit = self.config.timing.silence_ns.max(state.beats_within_ns * SILENCE_HEARTBEATS_MIN);
        let silent = now.saturating_sub(state.heard_at);
        if silent <= limit {
            self.silence_at = self.silence_at.min(state.heard_at.saturating_add(limit).saturating_add(1));
            return;
        }
        let fault = if left {
            let detail = format!("{peer} said goodbye, but not to the control log: it could not reach the broker");
            Fault::new(FaultKind::RankLeft, detail)
        } else {
            let detail = format!(
                "nothing came from {peer} for {} ms: it is stopped, overloaded or cut off",
                silent / NANOS_PER_MS
            );
            Fault::new(FaultKind::RankDied, detail)
        };
        self.lose(peer, fault.at(peer));
    }

    /// How long this rank is silent at most, in milliseconds, as its heartbeats say.
    pub(super) fn beats_within_ms(&self) -> u32 {
        let ms = self.config.timing.heartbeat_ns.div_ceil(NANOS_PER_MS);
        u32::try_from(ms).unwrap_or(u32::MAX).clamp(1, HEARTBEAT_MS_MAX)
    }

    pub(super) fn handle_heartbeat(&mut self, peer: Rank, header: &FrameHeader) -> Result<(), Fault> {
        if !(1..=HEARTBEAT_MS_MAX).contains(&header.unit_count) {
            return Err(Fault::violation(peer, "a heartbeat without word of the next"));
        }
        self.peers[peer.index()].beats_within_ns = u64::from(header.unit_count) * NANOS_PER_MS;
        Ok(())
    }

    /// This rank takes part in nothing further, and not in good order: its operations end with this fault. Where lost ranks
    /// do not fail the job, the others hear that it is lost, and why; otherwise this is [`Session::fail`].
    pub fn resign(&mut self, fault: Fault) {
        if self.config.recovery == Recovery::Fail {
            self.fail(fault);
        } else {
            self.end(fault, Some(Outgoing::Resignation));
        }
    }

    pub(super) fn handle_resignation(&mut self, peer: Rank, body: &[u8]) -> Result<(), Fault> {
        let fault = Fault::decode(body).map_err(|_| Fault::violation(peer, "a reason to go that cannot be read"))?;
        if self.config.recovery == Recovery::Fail {
            self.fail(if fault.reporter.is_none() { fault.reported_by(peer) } else { fault });
        } else {
            // Nothing more comes from it, though its link lasts as long as its process.
            self.handle_link_down(peer, fault);
        }
        Ok(())
    }

    /// Reports the loss of a peer, once.
    pub(super) fn lose(&mut self, peer: Rank, fault: Fault) {
        let state = &mut self.peers[peer.index()];
        if !state.lost && !state.removed {
            state.lost = true;
            self.events.push_back(Event::Lost { peer, fault });
        }
    }
}
