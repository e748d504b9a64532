//! Going on after a link to the broker is lost: when to try again, and what was counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use crate::link::LinkError;
use crate::worker::random_id;

/// Pause before a lost link is opened again: doubles from the first to the second.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A link that held this long starts over with the shortest pause.
const STEADY: Duration = Duration::from_secs(10);

/// Whoever joins hears after so long that the broker cannot be reached, and how often after that.
const OUTAGE_AFTER: Duration = Duration::from_secs(2);
const OUTAGE_AGAIN: Duration = Duration::from_secs(10);

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

/// Tells whoever joins that the broker cannot be reached yet: not at once, for it may be about to be there, and then now
/// and then.
#[derive(Debug)]
pub(crate) struct Outage {
    url: String,
    /// Joining ends then.
    until: Instant,
    /// When it is said next, while there is no link.
    due: Option<Instant>,
    reason: Option<String>,
}

impl Outage {
    pub(crate) fn new(url: &str, until: Instant) -> Self {
        Self { url: url.to_owned(), until, due: None, reason: None }
    }

    /// Opens a link, and speaks up where that takes long, or was tried for long.
    pub(crate) async fn watch<T>(&mut self, open: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
        let mut open = std::pin::pin!(open);
        let mut due = *self.due.get_or_insert_with(|| Instant::now() + OUTAGE_AFTER);
        let opened = loop {
            tokio::select! {
                opened = &mut open => break opened,
                () = sleep_until(due), if due < self.until => {
                    tracing::warn!("{}", self.text(due));
                    due += OUTAGE_AGAIN;
                }
            }
        };
        self.due = Some(due).filter(|_| opened.is_err());
        self.reason = opened.as_ref().err().map(|error| error.reason.clone());
        opened
    }

    fn text(&self, now: Instant) -> String {
        let reason = self.reason.as_deref().unwrap_or("it has not answered");
        let left = self.until.saturating_duration_since(now).as_secs_f64();
        format!("the broker at {} cannot be reached yet: {reason}; it is tried for {left:.0} s more", self.url)
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

    #[test]
    fn an_outage_names_the_broker_the_reason_and_the_time_that_is_left() {
        let now = Instant::now();
        let mut outage = Outage::new("pulsar://broker:6650", now + Duration::from_secs(30));
        let said = outage.text(now + OUTAGE_AFTER);
        assert!(
            said.contains("pulsar://broker:6650 cannot be reached yet: it has not answered; it is tried for 28 s more")
        );
        outage.reason = Some("Connection refused".into());
        assert!(outage.text(now + OUTAGE_AGAIN).contains("yet: Connection refused; it is tried for 20 s more"));
    }

    #[test]
    fn an_outage_is_over_with_a_link_and_grows_with_attempts_that_fail() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut outage = Outage::new("pulsar://broker:6650", Instant::now() + Duration::from_secs(30));
            let refused = || LinkError { reason: "refused".to_owned(), permanent: false };
            assert!(outage.watch(async { Err::<(), _>(refused()) }).await.is_err());
            let due = outage.due.unwrap();
            assert!(outage.watch(async { Err::<(), _>(refused()) }).await.is_err());
            assert_eq!((outage.due, outage.reason.as_deref()), (Some(due), Some("refused")));
            assert!(outage.watch(async { Ok(()) }).await.is_ok());
            assert_eq!((outage.due, outage.reason), (None, None));
        });
    }
}
