//! Response times of a server, and the limit after which it counts as silent.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::mutex::{Mutex, MutexGuard};

/// Response times of one server. The silence limit runs from the server's last answer to any request. A server that
/// answers is slow, not silent, however many requests wait for it.
#[derive(Debug, Default)]
pub(crate) struct ResponseTimes(Mutex<ResponseStats>);

/// An estimate of the response time by RFC 6298, section 2.
#[derive(Debug, Default)]
struct ResponseStats {
    /// The smoothed response time and its variation; `None` before the first answer.
    estimate: Option<(Duration, Duration)>,
    /// How many times the limit has doubled since the last answer (RFC 6298, 5.5).
    doublings: u32,
    last: Option<Instant>,
}

impl ResponseTimes {
    /// The limit before the first answer (RFC 6298, 2.1), and the greatest limit.
    const MAX_LIMIT: Duration = Duration::from_secs(1);
    const MAX_DOUBLINGS: u32 = 4;

    /// Records that a request sent at `sent` was answered at `now`.
    pub(crate) fn on_answer(&self, sent: Instant, now: Instant) {
        let took = now.since(sent);
        let mut stats = self.stats();
        stats.last = stats.last.max(Some(now));
        stats.doublings = 0;
        stats.estimate = Some(match stats.estimate {
            None => (took, took / 2),
            Some((smoothed, variation)) => {
                let off = smoothed.abs_diff(took);
                (smoothed - smoothed / 8 + took / 8, variation - variation / 4 + off / 4)
            }
        });
    }

    /// Records that a request has timed out.
    pub(crate) fn on_timeout(&self) {
        let mut stats = self.stats();
        stats.doublings = (stats.doublings + 1).min(Self::MAX_DOUBLINGS);
    }

    /// When the server counts as silent for a request sent at `sent`, unless it answers any request before. The time
    /// is `limit` after `sent` or after the last answer, whichever is later. Without `limit` the estimated response
    /// time applies, but at least `min_limit`.
    pub(crate) fn silent_at(
        &self,
        sent: Instant,
        min_limit: Duration,
        limit: Option<Duration>,
    ) -> Instant {
        let stats = self.stats();
        let from = stats.last.map_or(sent, |last| last.max(sent));
        from + limit.unwrap_or_else(|| stats.limit(min_limit))
    }

    fn stats(&self) -> MutexGuard<'_, ResponseStats> {
        self.0.lock()
    }
}

impl ResponseStats {
    fn limit(&self, min_limit: Duration) -> Duration {
        let Some((smoothed, variation)) = self.estimate else { return ResponseTimes::MAX_LIMIT };
        let limit = (smoothed + variation * 4).max(min_limit);
        limit.saturating_mul(1 << self.doublings).min(ResponseTimes::MAX_LIMIT).max(min_limit)
    }
}

/// The smallest silence limit for a request with this ttl. It is short compared to the ttl, so that waiting for a
/// silent node costs little of the lease.
pub(crate) fn min_silence_limit(ttl: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(5);
    const LONGEST: Duration = Duration::from_millis(50);
    (ttl / 20).clamp(SHORTEST, LONGEST)
}

/// The time limit of one round, even if the nodes continue to answer other requests. The request to a node that answers
/// nothing fails earlier, after the `request_timeout` of the pool.
pub(crate) fn max_round_time(ttl: Duration, node_timeout: Option<Duration>) -> Duration {
    (ttl / 2).max(node_timeout.unwrap_or_default())
}

/// The time limit of all rounds of a call. The pool gives up the call after four request timeouts, and the answers of the
/// nodes would be lost.
pub(crate) fn max_election_time(request_timeout: Duration) -> Duration {
    request_timeout.saturating_mul(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_LIMIT: Duration = Duration::from_millis(50);

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn silent_after(times: &ResponseTimes, sent: u64) -> Duration {
        times.silent_at(at(sent), MIN_LIMIT, None).since(at(sent))
    }

    #[test]
    fn the_limit_follows_the_response_times() {
        let times = ResponseTimes::default();
        assert_eq!(silent_after(&times, 0), ResponseTimes::MAX_LIMIT, "before the first answer");
        for round in 0..50 {
            times.on_answer(at(round * 10), at(round * 10 + 1));
        }
        assert_eq!(silent_after(&times, 1_000), MIN_LIMIT);
        for round in 0..50 {
            times.on_answer(at(1_000 + round * 200), at(1_000 + round * 200 + 150));
        }
        let far = silent_after(&times, 50_000);
        assert!((ms(150)..ms(400)).contains(&far), "{far:?}");
        times.on_timeout();
        assert_eq!(silent_after(&times, 50_000), far * 2);
        for _ in 0..100 {
            times.on_timeout();
        }
        assert_eq!(silent_after(&times, 50_000), ResponseTimes::MAX_LIMIT);
        times.on_answer(at(50_000), at(50_150));
        assert!(silent_after(&times, 60_000) < ms(400));
    }

    #[test]
    fn a_server_that_answers_other_requests_is_slow_and_not_silent() {
        let times = ResponseTimes::default();
        for round in 0..50 {
            times.on_answer(at(round), at(round + 1));
        }
        // Sent long ago, and queued behind requests that are answered.
        times.on_answer(at(900), at(1_000));
        assert!(times.silent_at(at(100), MIN_LIMIT, None) >= at(1_050));
        assert_eq!(
            times.silent_at(at(100), MIN_LIMIT, Some(ms(7))),
            at(1_007),
            "a fixed limit applies unchanged"
        );
        assert_eq!(times.silent_at(at(2_000), MIN_LIMIT, Some(ms(7))), at(2_007));
    }
}
