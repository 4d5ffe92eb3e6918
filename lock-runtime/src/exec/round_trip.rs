//! An estimate of how long one request takes at the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// An estimate from answered requests, like TCP's for its retransmissions (RFC 6298): the smoothed round trip and four
/// times its variation. Zero before the first answer.
#[derive(Debug, Default)]
pub(crate) struct RoundTrip(AtomicU64);

/// In microseconds.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    smoothed: u32,
    variation: u32,
}

impl RoundTrip {
    /// How long one request may take. `None` before the first answer.
    pub(crate) fn limit(&self) -> Option<Duration> {
        let estimate = Estimate::unpacked(self.0.load(Ordering::Relaxed))?;
        Some(Duration::from_micros(estimate.limit()))
    }

    /// A request was answered after `taken`.
    pub(crate) fn answered(&self, taken: Duration) {
        let taken = u32::try_from(taken.as_micros()).unwrap_or(u32::MAX).max(1);
        self.change(|estimate| {
            Some(match estimate {
                None => Estimate { smoothed: taken, variation: taken / 2 },
                Some(Estimate { smoothed, variation }) => Estimate {
                    smoothed: average(smoothed, taken, 8),
                    variation: average(variation, smoothed.abs_diff(taken), 4),
                },
            })
        });
    }

    /// A request was given up after `limit`. The next one may take twice as long.
    pub(crate) fn silent(&self, limit: Duration) {
        let twice = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX).saturating_mul(2);
        self.change(|estimate| {
            let Estimate { smoothed, .. } = estimate.filter(|it| it.limit() < twice)?;
            let variation = twice.saturating_sub(u64::from(smoothed)).div_ceil(4);
            Some(Estimate { smoothed, variation: u32::try_from(variation).unwrap_or(u32::MAX) })
        });
    }

    fn change(&self, change: impl Fn(Option<Estimate>) -> Option<Estimate>) {
        let packed = |now| change(Estimate::unpacked(now)).map(Estimate::packed);
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, packed);
    }
}

impl Estimate {
    fn limit(self) -> u64 {
        u64::from(self.smoothed) + 4 * u64::from(self.variation)
    }

    fn packed(self) -> u64 {
        u64::from(self.smoothed) << 32 | u64::from(self.variation)
    }

    fn unpacked(packed: u64) -> Option<Self> {
        let smoothed = (packed >> 32) as u32;
        (smoothed > 0).then_some(Self { smoothed, variation: packed as u32 })
    }
}

/// `old`, with one part in `parts` of `new`.
fn average(old: u32, new: u32, parts: u64) -> u32 {
    let sum = u64::from(old) * (parts - 1) + u64::from(new);
    u32::try_from(sum.div_ceil(parts)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_limit_is_what_a_request_takes_and_its_variation() {
        let round_trip = RoundTrip::default();
        assert_eq!(round_trip.limit(), None);
        round_trip.answered(ms(300));
        assert_eq!(round_trip.limit(), Some(ms(900)));
        for _ in 0..50 {
            round_trip.answered(ms(300));
        }
        let limit = round_trip.limit().unwrap();
        assert!((ms(300)..ms(310)).contains(&limit), "{limit:?}");
        for _ in 0..50 {
            round_trip.answered(ms(1));
        }
        assert!(round_trip.limit().unwrap() < ms(20));
    }

    #[test]
    fn silence_doubles_it_until_an_answer_comes() {
        let round_trip = RoundTrip::default();
        round_trip.silent(ms(250));
        assert_eq!(
            round_trip.limit(),
            None,
            "nothing is known yet, and the whole request_timeout is given"
        );
        round_trip.answered(ms(1));
        for (limit, next) in [(250, 500), (500, 1_000), (100, 1_000)] {
            round_trip.silent(ms(limit));
            let now = round_trip.limit().unwrap();
            assert!((ms(next)..=ms(next + 1)).contains(&now), "{now:?}");
        }
        round_trip.answered(ms(400));
        assert!(round_trip.limit().unwrap() > ms(400));
        for huge in [Duration::MAX, ms(u64::MAX)] {
            round_trip.silent(huge);
            round_trip.answered(huge);
            assert!(round_trip.limit().is_some());
        }
    }
}
