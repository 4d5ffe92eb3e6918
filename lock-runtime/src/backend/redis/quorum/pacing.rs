//! How long a server takes to answer, and from when on it counts as silent.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::base::clock::Instant;

/// What is known of one server from its answers so far. A server that answers is slow, and not silent, however
/// many requests wait for it: the limit runs from its last answer.
#[derive(Debug, Default)]
pub(crate) struct Pace(Mutex<Answers>);

/// An estimate of the response time after RFC 6298, section 2.
#[derive(Debug, Default)]
struct Answers {
    /// The smoothed response time and its variation; `None` before the first answer.
    usual: Option<(Duration, Duration)>,
    /// How often the limit has doubled since the last answer (RFC 6298, 5.5).
    doublings: u32,
    last: Option<Instant>,
}

impl Pace {
    /// The limit before the first answer (RFC 6298, 2.1), and the greatest one.
    const MOST: Duration = Duration::from_secs(1);
    const MOST_DOUBLINGS: u32 = 4;

    /// A request sent at `sent` was answered at `now`.
    pub(crate) fn answered(&self, sent: Instant, now: Instant) {
        let took = now.since(sent);
        let mut answers = self.answers();
        answers.last = answers.last.max(Some(now));
        answers.doublings = 0;
        answers.usual = Some(match answers.usual {
            None => (took, took / 2),
            Some((smoothed, variation)) => {
                let off = smoothed.abs_diff(took);
                (smoothed - smoothed / 8 + took / 8, variation - variation / 4 + off / 4)
            }
        });
    }

    /// A request was given up.
    pub(crate) fn gave_up(&self) {
        let mut answers = self.answers();
        answers.doublings = (answers.doublings + 1).min(Self::MOST_DOUBLINGS);
    }

    /// When the server counts as silent to a request sent at `sent`, unless it answers something before: `limit`
    /// after its last answer, or after what it usually takes, but for `least`.
    pub(crate) fn silent_at(
        &self,
        sent: Instant,
        least: Duration,
        limit: Option<Duration>,
    ) -> Instant {
        let answers = self.answers();
        let from = answers.last.map_or(sent, |last| last.max(sent));
        from + limit.unwrap_or_else(|| answers.limit(least))
    }

    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Answers {
    fn limit(&self, least: Duration) -> Duration {
        let Some((smoothed, variation)) = self.usual else { return Pace::MOST };
        let limit = (smoothed + variation * 4).max(least);
        limit.saturating_mul(1 << self.doublings).min(Pace::MOST).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(50);

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn silent_after(pace: &Pace, sent: u64) -> Duration {
        pace.silent_at(at(sent), LEAST, None).since(at(sent))
    }

    #[test]
    fn the_limit_follows_what_the_server_takes() {
        let pace = Pace::default();
        assert_eq!(silent_after(&pace, 0), Pace::MOST, "nothing is known yet");
        for round in 0..50 {
            pace.answered(at(round * 10), at(round * 10 + 1));
        }
        assert_eq!(silent_after(&pace, 1_000), LEAST);
        for round in 0..50 {
            pace.answered(at(1_000 + round * 200), at(1_000 + round * 200 + 150));
        }
        let far = silent_after(&pace, 50_000);
        assert!((ms(150)..ms(400)).contains(&far), "{far:?}");
        pace.gave_up();
        assert_eq!(silent_after(&pace, 50_000), far * 2);
        for _ in 0..100 {
            pace.gave_up();
        }
        assert_eq!(silent_after(&pace, 50_000), Pace::MOST);
        pace.answered(at(50_000), at(50_150));
        assert!(silent_after(&pace, 60_000) < ms(400));
    }

    #[test]
    fn a_server_that_answers_others_is_slow_and_not_silent() {
        let pace = Pace::default();
        for round in 0..50 {
            pace.answered(at(round), at(round + 1));
        }
        // Sent long ago, and behind others whose answers come.
        pace.answered(at(900), at(1_000));
        assert!(pace.silent_at(at(100), LEAST, None) >= at(1_050));
        assert_eq!(pace.silent_at(at(100), LEAST, Some(ms(7))), at(1_007), "as it is set");
        assert_eq!(pace.silent_at(at(2_000), LEAST, Some(ms(7))), at(2_007));
    }
}
