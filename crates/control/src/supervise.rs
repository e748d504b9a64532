//! Going on after a link to the broker is lost: when to try again, and what was counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::link::LinkError;
use crate::worker::random_id;

/// Pause before a lost link is opened again: doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A link that held this long starts over with the shortest pause.
const STEADY: Duration = Duration::from_secs(10);

/// Doubling pauses with jitter, so that ranks do not come back all at once.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(PAUSE_MIN)
    }
}

impl Backoff {
    /// How long to wait after a link that held for `held`.
    pub(crate) fn pause(&mut self, held: Duration) -> Duration {
        if held > STEADY {
            self.0 = PAUSE_MIN;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(PAUSE_MAX);
        let [byte, ..] = random_id();
        pause + pause / 2 * u32::from(byte) / 255
    }
}

/// Says why links are lost, and not a hundred times the same.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    last: String,
    times: u32,
}

impl Complaints {
    /// A reason that is new is said at once; after that the 2nd, 4th, 8th time and so on.
    pub(crate) fn say(&mut self, what: &str, reason: &str) {
        if self.last != reason {
            reason.clone_into(&mut self.last);
            self.times = 0;
        }
        self.times = self.times.saturating_add(1);
        if self.times.is_power_of_two() {
            let times = self.times;
            tracing::warn!(what, reason, times, "the link to the broker is lost or could not be opened");
        }
    }
}

/// Runs `attempt` until it ends well, or with an error that would come again. Every attempt opens its own link, and
/// ends with it. `lost` counts the attempts that failed.
pub(crate) async fn supervise<T>(
    what: &str,
    lost: &AtomicU64,
    mut attempt: impl AsyncFnMut() -> Result<T, LinkError>,
) -> Result<T, LinkError> {
    let (mut backoff, mut complaints) = (Backoff::default(), Complaints::default());
    loop {
        let opened = Instant::now();
        let error = match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if error.permanent => return Err(error),
            Err(error) => error,
        };
        lost.fetch_add(1, Ordering::Relaxed);
        complaints.say(what, &error.reason);
        sleep(backoff.pause(opened.elapsed())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_a_bound_and_start_over_after_a_steady_link() {
        let mut backoff = Backoff::default();
        let pauses: Vec<Duration> = (0..10).map(|_| backoff.pause(Duration::ZERO)).collect();
        assert!(pauses[0] >= PAUSE_MIN && pauses[0] <= PAUSE_MIN * 3 / 2);
        assert!(pauses[9] >= PAUSE_MAX && pauses[9] <= PAUSE_MAX * 3 / 2);
        assert!(backoff.pause(STEADY * 2) <= PAUSE_MIN * 3 / 2);
    }
}
