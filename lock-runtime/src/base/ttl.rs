//! The length of a lease.

use std::time::Duration;

use crate::base::clock::nanos;
use crate::base::error::LockError;
use crate::base::options::refused;

/// The length of a lease, always between 10 ms and 7 days. Timers and networks cannot keep a shorter one. A longer one is
/// considered a typo, with which a crashed holder would block the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ttl {
    length: Nanos,
    validity: Nanos,
    /// How much longer the store keeps the lease (Chubby's lock-delay).
    delay: Nanos,
}

/// A span of a ttl in nanoseconds, in half the room of a [`Duration`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Nanos(u64);

impl Nanos {
    fn of(span: Duration) -> Self {
        Self(nanos(span))
    }

    const fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl Ttl {
    pub(super) const MIN: Duration = Duration::from_millis(10);
    pub(super) const MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
    const MAX_DELAY: Duration = Duration::from_secs(60);

    /// With a greater drift factor, less than half of the ttl remains after the first renewal. That is too little for a
    /// hand-off, and for a second renewal if the first one fails.
    const MAX_DRIFT: f64 = 0.25;

    pub(super) fn new(length: Duration, drift_factor: f64) -> Result<Self, LockError> {
        if !(Self::MIN..=Self::MAX).contains(&length) {
            return Err(refused(
                format!("a ttl of {length:?} is not between 10 ms and 7 days"),
                "the ttl is how long a crashed holder blocks other owners; choose for example 30 s",
            ));
        }
        if !(0.0..=Self::MAX_DRIFT).contains(&drift_factor) {
            return Err(refused(
                format!(
                    "a drift_factor of {drift_factor} is not between 0 and {}",
                    Self::MAX_DRIFT
                ),
                "it is the share of a ttl by which two clocks may drift apart during it; write for example `.drift_factor(0.01)`",
            ));
        }
        // Two clocks may drift apart, and stores round by a millisecond.
        let drift = length.mul_f64(drift_factor) + Duration::from_millis(2);
        let validity = Nanos::of(length.saturating_sub(drift));
        Ok(Self { length: Nanos::of(length), validity, delay: Nanos(0) })
    }

    /// This ttl, with a store that keeps each lease for `delay` longer.
    pub(super) fn with_delay(self, delay: Duration) -> Result<Self, LockError> {
        if delay > Self::MAX_DELAY {
            return Err(refused(
                format!("a lock_delay of {delay:?} is longer than a minute"),
                "it is how long the late writes of a lost holder may take; choose for example 2 s",
            ));
        }
        Ok(Self { delay: Nanos::of(delay), ..self })
    }

    pub(crate) const fn get(self) -> Duration {
        self.length.get()
    }

    /// How long the store keeps a grant that is not renewed.
    pub(crate) const fn stored(self) -> Duration {
        self.length.get().saturating_add(self.delay.get())
    }

    pub(crate) const fn delay(self) -> Duration {
        self.delay.get()
    }

    /// How long a grant is valid, from before its request was sent (Redlock's validity time). It is the ttl less the drift
    /// (1 % + 2 ms by default).
    pub(crate) const fn validity(self) -> Duration {
        self.validity.get()
    }

    /// The longest interval between renewals. It leaves half of its length to confirm a renewal before the body is
    /// cancelled. An interval above half of the ttl leaves no time for a second try.
    pub(super) fn longest_interval(self, cancel_margin: Duration) -> Duration {
        (self.validity().saturating_sub(cancel_margin) * 2 / 3).min(self.get() / 2)
    }

    /// The shortest ttl that is kept by a renewal every third of it.
    pub(super) fn shortest_renewed(drift_factor: f64) -> Duration {
        let is_kept = |length: &Duration| {
            let ttl = Self::new(*length, drift_factor);
            ttl.is_ok_and(|ttl| ttl.get() / 3 <= ttl.longest_interval(ttl.cancel_margin(None)))
        };
        (10..=1_000).map(Duration::from_millis).find(is_kept).unwrap_or(Duration::from_secs(1))
    }

    /// How long before the end of its validity a body is cancelled, so that it has stopped by then. It is a tenth of the hold,
    /// between 1 ms and 500 ms.
    pub(super) fn cancel_margin(self, max_hold: Option<Duration>) -> Duration {
        let hold = max_hold.map_or(self.get(), |max_hold| max_hold.min(self.get()));
        (hold / 10).clamp(Duration::from_millis(1), Duration::from_millis(500))
    }
}
