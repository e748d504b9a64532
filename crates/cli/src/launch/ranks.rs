//! Which ranks there are and what each of them does: a table, without clock and processes.

use std::time::{Duration, Instant};

use crate::agent::wire::End;

/// Before the first restart of a rank; doubled with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A rank that ran for so long did not fail at once: pauses begin anew.
const LONG_RUN: Duration = Duration::from_secs(60);

/// The pause after so many failures in a row before the present one.
pub(super) fn pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX)
}

/// A place on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    /// Which host: an index of the driver's.
    pub(super) site: usize,
    /// Which of its slots.
    pub(super) slot: u32,
}

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing ever ran with this number.
    Unused,
    /// It runs, or was told to.
    Running {
        spot: Spot,
        /// The agent that started it.
        agent: usize,
        since: Instant,
        /// Whether it was told to end because its slot was taken away.
        leaving: bool,
        /// When it is killed if it has not ended by then.
        kill_at: Option<Instant>,
    },
    /// It will be started again from then on, in the slot that is held for it if there is one.
    Waiting { at: Instant, held: Option<Spot>, end: End },
    /// It exited with 0, or was ended with the job.
    Ended(End),
    /// It failed, and is not started again.
    Lost(End),
    /// Its slot was taken away.
    Removed,
}

#[derive(Clone, Copy)]
struct Seat {
    state: State,
    /// How often it was started.
    starts: u32,
    /// Failures in a row.
    failures: u32,
}

/// The ranks of a job, by number.
pub(super) struct Ranks {
    seats: Vec<Seat>,
    restarts_max: u32,
    restarts: u32,
    /// Restarts that were made known: of those that are planned some are still given up.
    announced: u32,
    /// Whether no rank is started again any more.
    closed: bool,
}

impl Ranks {
    /// So many numbers can be given, none is yet.
    pub(super) fn new(count: u32, restarts_max: u32) -> Self {
        let seat = Seat { state: State::Unused, starts: 0, failures: 0 };
        Self { seats: vec![seat; count as usize], restarts_max, restarts: 0, announced: 0, closed: false }
    }

    pub(super) fn state(&self, rank: u32) -> Option<State> {
        self.seats.get(rank as usize).map(|seat| seat.state)
    }

    pub(super) fn set(&mut self, rank: u32, state: State) {
        self.seats[rank as usize].state = state;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, State)> {
        (0_u32..).zip(self.seats.iter().map(|seat| seat.state))
    }

    /// It is about to be started. Tells how often it was before.
    pub(super) fn start(&mut self, rank: u32, spot: Spot, agent: usize, now: Instant) -> u32 {
        let seat = &mut self.seats[rank as usize];
        seat.state = State::Running { spot, agent, since: now, leaving: false, kill_at: None };
        seat.starts += 1;
        seat.starts - 1
    }

    /// How often it was started.
    pub(super) fn starts(&self, rank: u32) -> u32 {
        self.seats.get(rank as usize).map_or(0, |seat| seat.starts)
    }

    /// It has failed after it ran for so long. Plans a restart if one is left, and tells the pause before it.
    pub(super) fn lose(
        &mut self,
        rank: u32,
        end: End,
        held: Option<Spot>,
        ran: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let seat = &mut self.seats[rank as usize];
        if self.closed || self.restarts == self.restarts_max {
            seat.state = State::Lost(end);
            return None;
        }
        self.restarts += 1;
        if ran >= LONG_RUN {
            seat.failures = 0;
        }
        let pause = pause(seat.failures);
        seat.failures += 1;
        seat.state = State::Waiting { at: now + pause, held, end };
        Some(pause)
    }

    /// It waits to be started again, which would be of no use: it is not, and the restart is left for another.
    pub(super) fn give_up(&mut self, rank: u32) {
        let seat = &mut self.seats[rank as usize];
        if let State::Waiting { end, .. } = seat.state {
            seat.state = State::Lost(end);
            self.restarts -= 1;
        }
    }

    /// No rank is started again from now on.
    pub(super) fn give_up_waiting(&mut self) {
        self.closed = true;
        for seat in &mut self.seats {
            if let State::Waiting { end, .. } = seat.state {
                seat.state = State::Lost(end);
            }
        }
    }

    /// Restarts that were planned, and how many there may be.
    pub(super) const fn restarts(&self) -> (u32, u32) {
        (self.restarts, self.restarts_max)
    }

    /// A restart is made known, and is not given up any more. Tells which it is, counted from 1.
    pub(super) const fn announce(&mut self) -> u32 {
        self.announced += 1;
        self.announced
    }

    /// How many take part, will again, or have done their part.
    pub(super) fn left(&self) -> u32 {
        let counts = |state| match state {
            State::Running { leaving, .. } => !leaving,
            State::Waiting { .. } => true,
            State::Ended(end) => end.success(),
            State::Unused | State::Lost(_) | State::Removed => false,
        };
        u32::try_from(self.iter().filter(|(_, state)| counts(*state)).count()).unwrap_or(u32::MAX)
    }

    pub(super) fn any_running(&self) -> bool {
        self.iter().any(|(_, state)| matches!(state, State::Running { .. }))
    }

    pub(super) fn any_waiting(&self) -> bool {
        self.iter().any(|(_, state)| matches!(state, State::Waiting { .. }))
    }

    pub(super) fn any_ended_well(&self) -> bool {
        self.iter().any(|(_, state)| matches!(state, State::Ended(end) if end.success()))
    }

    pub(super) fn any_leaving(&self) -> bool {
        self.iter().any(|(_, state)| matches!(state, State::Running { leaving: true, .. }))
    }

    /// Those whose slot on this host is in use or held for them: rank and slot.
    pub(super) fn on_site(&self, site: usize) -> impl Iterator<Item = (u32, u32)> {
        self.iter().filter_map(move |(rank, state)| match state {
            State::Running { spot, .. } | State::Waiting { held: Some(spot), .. } if spot.site == site => {
                Some((rank, spot.slot))
            }
            _ => None,
        })
    }

    /// The first slot of a host with so many that is neither in use nor held.
    pub(super) fn free_slot(&self, site: usize, slots: u32) -> Option<u32> {
        // One that was taken away while it was in use may have a higher number than the slots that are left.
        let room = self.on_site(site).count() < slots as usize;
        (0..slots).filter(|_| room).find(|slot| !self.on_site(site).any(|(_, used)| used == *slot))
    }

    /// The lowest number under which nothing runs, will run, or has ended well.
    pub(super) fn free_number(&self) -> Option<u32> {
        let free = |state| matches!(state, State::Unused | State::Lost(_) | State::Removed);
        self.iter().find(|(_, state)| free(*state)).map(|(rank, _)| rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: End = End::Code(3);
    const SPOT: Spot = Spot { site: 0, slot: 0 };

    #[test]
    fn pauses_double_up_to_a_bound_and_begin_anew_after_a_long_run() {
        let now = Instant::now();
        let mut ranks = Ranks::new(1, 100);
        let mut lose = |ran| ranks.lose(0, BAD, None, ran, now).unwrap().as_millis();
        let short = Duration::from_secs(1);
        assert_eq!([lose(short), lose(short), lose(short)], [100, 200, 400]);
        for _ in 0..40 {
            lose(short);
        }
        assert_eq!([lose(short), lose(LONG_RUN), lose(short)], [10_000, 100, 200]);
    }

    #[test]
    fn restarts_are_counted_over_all_ranks() {
        let now = Instant::now();
        let mut ranks = Ranks::new(3, 2);
        for rank in 0..3 {
            assert_eq!(ranks.start(rank, Spot { site: 0, slot: rank }, 0, now), 0);
        }
        assert!(ranks.lose(0, BAD, None, Duration::ZERO, now).is_some());
        assert!(ranks.lose(1, BAD, None, Duration::ZERO, now).is_some());
        assert_eq!(ranks.left(), 3);
        assert!(ranks.lose(2, BAD, None, Duration::ZERO, now).is_none());
        assert_eq!((ranks.left(), ranks.restarts()), (2, (2, 2)));
        assert_eq!(ranks.start(0, SPOT, 0, now), 1);
        ranks.give_up(1);
        ranks.give_up(0);
        assert_eq!((ranks.left(), ranks.state(1), ranks.restarts()), (1, Some(State::Lost(BAD)), (1, 2)));
        assert!(ranks.lose(0, BAD, None, Duration::ZERO, now).is_some(), "it can be used by another");
        // Those that were given up are none that were made known.
        assert_eq!([ranks.announce(), ranks.announce()], [1, 2]);
        ranks.give_up_waiting();
        assert_eq!((ranks.left(), ranks.state(0)), (0, Some(State::Lost(BAD))));
    }

    #[test]
    fn slots_and_numbers_are_given_from_the_lowest() {
        let now = Instant::now();
        let mut ranks = Ranks::new(3, 1);
        ranks.start(0, SPOT, 0, now);
        ranks.start(1, Spot { site: 0, slot: 1 }, 0, now);
        assert_eq!((ranks.free_number(), ranks.free_slot(0, 2), ranks.free_slot(1, 1)), (Some(2), None, Some(0)));
        // A slot that waits for its rank is not free; the number of one that is through is none to give again.
        ranks.lose(1, BAD, Some(Spot { site: 0, slot: 1 }), Duration::ZERO, now);
        ranks.set(0, State::Ended(End::Code(0)));
        assert_eq!((ranks.free_number(), ranks.free_slot(0, 2)), (Some(2), Some(0)));
        ranks.set(0, State::Removed);
        assert_eq!(ranks.free_number(), Some(0));
    }
}
