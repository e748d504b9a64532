//! The last step: what ranks want when a step ends, and what all of them make of it.
//!
//! With every commit each rank says what it wants ([`Wish`]), and a step is final for a rank that has this from all. So
//! all know the same, and come to the same: whoever ends with a step ends with the same one. Where a step is final by the
//! agreement at the beginning of an epoch, wishes are said there; a rank that was ahead says what it came to.

use super::{Recovery, Session};
use crate::fault::Fault;
use crate::ids::Rank;

/// What a rank wants when it commits a step. The later ones count for more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Wish {
    /// To go on.
    #[default]
    GoOn = 0,
    /// To leave before long: it was given notice, and others may be about to hear the same.
    LeaveSoon = 1,
    /// To leave with this step, together with all that were given notice.
    Leave = 2,
    /// That all end with this step.
    End = 3,
}

/// What comes after a step that is final.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Next {
    /// The next step.
    #[default]
    GoOn = 0,
    /// This rank leaves, and others go on without it.
    Leave = 1,
    /// All ranks end with this step.
    End = 2,
}

impl Wish {
    pub(super) fn decode(code: u32, peer: Rank) -> Result<Self, Fault> {
        let all = [Self::GoOn, Self::LeaveSoon, Self::Leave, Self::End];
        all.into_iter().find(|wish| *wish as u32 == code).ok_or_else(|| Fault::violation(peer, "an unknown wish"))
    }
}

impl Next {
    pub(super) fn decode(code: u32, peer: Rank) -> Result<Self, Fault> {
        let all = [Self::GoOn, Self::Leave, Self::End];
        all.into_iter().find(|next| *next as u32 == code).ok_or_else(|| Fault::violation(peer, "an unknown ending"))
    }
}

impl Session {
    /// What this rank wants from its next [`Session::begin_commit`] on.
    pub const fn set_wish(&mut self, wish: Wish) {
        self.wish = wish;
    }

    /// What comes after the last step that is final, for this rank: the same for all that wanted the same.
    #[must_use]
    pub const fn next(&self) -> Next {
        self.next
    }

    /// What all make of these wishes. [`Next::Leave`]: those leave that were given notice.
    pub(super) fn outcome(&self, wishes: impl Iterator<Item = Wish>) -> Next {
        let (mut least, mut most) = (Wish::End, Wish::GoOn);
        for wish in wishes {
            (least, most) = (least.min(wish), most.max(wish));
        }
        // Where nobody can go on without a rank, nobody leaves alone.
        let together = self.config.recovery == Recovery::Fail && most > Wish::GoOn;
        match most {
            Wish::End => Next::End,
            _ if together || least > Wish::GoOn => Next::End,
            Wish::Leave => Next::Leave,
            Wish::GoOn | Wish::LeaveSoon => Next::GoOn,
        }
    }

    /// What the members' words about the step that is being committed come to.
    pub(super) fn outcome_said(&self) -> Next {
        let own = self.committing.as_ref().map_or(Wish::GoOn, |committing| committing.wish);
        let theirs = self.others().map(|peer| self.peers[peer.index()].wish_at(self.commits));
        self.outcome(theirs.chain([own]))
    }

    /// The step that this rank commits ends like this.
    pub(super) fn conclude(&mut self, outcome: Next) {
        let noticed = self.committing.take().is_some_and(|committing| committing.wish > Wish::GoOn);
        self.outcome = outcome;
        self.next = if outcome == Next::Leave && !noticed { Next::GoOn } else { outcome };
    }
}

#[cfg(test)]
#[path = "ending_tests.rs"]
mod tests;
