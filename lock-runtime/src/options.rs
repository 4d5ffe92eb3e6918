//! What a caller may ask for, and what a pool fills in.

use std::time::Duration;

use crate::error::{ErrorKind, LockError};

/// How long an acquire may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Up to this long. Zero is one try.
    For(Duration),
    /// Until the lock is free, the future is dropped or the pool shuts down. An unreachable store
    /// still ends the wait.
    Forever,
}

impl From<Duration> for Wait {
    fn from(wait: Duration) -> Self {
        Self::For(wait)
    }
}

/// Whether the watchdog extends the lease while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renew {
    /// Never: the ttl is a hard limit on the hold.
    Off,
    /// Every third of the ttl.
    Third,
    /// At this interval, at most half of the ttl.
    Every(Duration),
}

impl From<bool> for Renew {
    fn from(renew: bool) -> Self {
        if renew { Self::Third } else { Self::Off }
    }
}

impl From<Duration> for Renew {
    fn from(interval: Duration) -> Self {
        Self::Every(interval)
    }
}

/// What happens to an annotated body when its lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLost {
    /// The body is dropped at its next await and the call returns the error.
    Cancel,
    /// The body goes on; only the guard tells.
    Notify,
}

/// Whether a body's result waits for the release of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseMode {
    /// The result is there when the store has freed the lock: whoever learns the result finds it free.
    Awaited,
    /// The result is there at once, and the driver releases: one round trip less for each call. A release
    /// that fails is told to `tracing` alone, as it is with [`Awaited`](Self::Awaited).
    Background,
}

/// The options of one call; what is unset comes from the pool.
#[derive(Clone, Copy, Debug)]
pub struct LockOptions {
    ttl: Option<Duration>,
    wait: Option<Wait>,
    renew: Option<Renew>,
    max_hold: Option<Duration>,
    min_hold: Option<Duration>,
    on_lost: Option<OnLost>,
    release: Option<ReleaseMode>,
    retry_delay: Option<Duration>,
    retry_count: Option<u32>,
    reentrant: Option<bool>,
    fencing: Option<bool>,
}

macro_rules! setters {
    ($($name:ident: $type:ty,)*) => {
        $(
            #[doc = concat!("Sets `", stringify!($name), "`.")]
            #[must_use]
            pub const fn $name(mut self, value: $type) -> Self {
                self.$name = Some(value);
                self
            }
        )*
    };
}

impl LockOptions {
    /// Nothing set.
    #[must_use]
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self {
            ttl: None,
            wait: None,
            renew: None,
            max_hold: None,
            min_hold: None,
            on_lost: None,
            release: None,
            retry_delay: None,
            retry_count: None,
            reentrant: None,
            fencing: None,
        }
    }

    setters! {
        ttl: Duration,
        wait: Wait,
        renew: Renew,
        max_hold: Duration,
        min_hold: Duration,
        on_lost: OnLost,
        release: ReleaseMode,
        retry_delay: Duration,
        retry_count: u32,
        reentrant: bool,
        fencing: bool,
    }
}

/// A pool's defaults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) ttl: Duration,
    pub(crate) wait: Wait,
    pub(crate) retry_delay: Option<Duration>,
    pub(crate) retry_count: Option<u32>,
    pub(crate) drift_factor: f64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(30),
            wait: Wait::For(Duration::from_secs(3)),
            retry_delay: None,
            retry_count: None,
            drift_factor: 0.01,
        }
    }
}

/// Lease length. A value that exists is between 10 ms and 7 days: less is below what timers and a
/// network can keep, more is a typo that a crashed holder would make everybody wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ttl {
    length: Duration,
    belief: Duration,
}

impl Ttl {
    const MIN: Duration = Duration::from_millis(10);
    const MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

    fn new(length: Duration, drift_factor: f64) -> Result<Self, LockError> {
        if !(Self::MIN..=Self::MAX).contains(&length) {
            return Err(LockError::new(
                ErrorKind::Config,
                format!("a ttl of {length:?} is not between 10 ms and 7 days"),
            )
            .remedy("the ttl is how long a crashed holder blocks the others; write for example `ttl = \"30s\"`"));
        }
        if !(0.0..=0.5).contains(&drift_factor) {
            return Err(LockError::new(
                ErrorKind::Config,
                format!("a drift_factor of {drift_factor} is not between 0 and 0.5"),
            )
            .remedy("it is the share of a ttl that two clocks may differ by meanwhile; write for example `.drift_factor(0.01)`"));
        }
        // Two clocks may run apart by the drift, and stores round by a millisecond.
        let drift = length.mul_f64(drift_factor) + Duration::from_millis(2);
        Ok(Self { length, belief: length.saturating_sub(drift) })
    }

    pub(crate) const fn get(self) -> Duration {
        self.length
    }

    /// How long a grant may be believed, counted from before its request was sent: the ttl less the
    /// drift (Redlock's 1 % + 2 ms).
    pub(crate) const fn belief(self) -> Duration {
        self.belief
    }
}

/// The options of one call, complete and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) ttl: Ttl,
    pub(crate) wait: Wait,
    /// The watchdog's interval; `None` is a hard limit.
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) on_lost: OnLost,
    pub(crate) release: ReleaseMode,
    pub(crate) reentrant: bool,
    pub(crate) retry_delay: Option<Duration>,
    pub(crate) retry_count: Option<u32>,
    pub(crate) fencing: bool,
}

impl Policy {
    /// Fills `options` up from a pool's `defaults`, and checks what only the sum of both can tell.
    pub(crate) fn new(options: &LockOptions, defaults: &Defaults) -> Result<Self, LockError> {
        let ttl = Ttl::new(options.ttl.unwrap_or(defaults.ttl), defaults.drift_factor)?;
        let renew_every = match options.renew.unwrap_or(Renew::Third) {
            Renew::Off => None,
            Renew::Third => Some(ttl.get() / 3),
            // Later than half-way there is no time left for a second try.
            Renew::Every(interval) if interval.is_zero() || interval > ttl.get() / 2 => {
                return Err(LockError::new(
                    ErrorKind::Config,
                    format!("a renewal every {interval:?} does not keep a lease of {:?} alive", ttl.get()),
                )
                .remedy("leave `renew` out for a third of the ttl, or choose an interval of at most half the ttl"));
            }
            Renew::Every(interval) => Some(interval),
        };
        let min_hold = options.min_hold.unwrap_or_default();
        if let Some(max_hold) = options.max_hold
            && (max_hold < Ttl::MIN || max_hold < min_hold)
        {
            return Err(LockError::new(
                ErrorKind::Config,
                format!("a max_hold of {max_hold:?} is shorter than 10 ms or than min_hold ({min_hold:?})"),
            )
            .remedy("raise `max_hold`, or leave it out for no limit"));
        }
        let retry_delay = options.retry_delay.or(defaults.retry_delay);
        if retry_delay.is_some_and(|delay| delay.is_zero()) {
            return Err(LockError::new(
                ErrorKind::Config,
                "a retry_delay of zero would ask the store without a pause",
            )
            .remedy("write for example `retry_delay = \"50ms\"`, or leave it out"));
        }
        if min_hold > Ttl::MAX {
            return Err(LockError::new(ErrorKind::Config, format!("a min_hold of {min_hold:?} is longer than 7 days"))
                .remedy("`min_hold` is how long the lock stays taken at least; write for example `min_hold = \"1m\"`"));
        }
        Ok(Self {
            ttl,
            wait: options.wait.unwrap_or(defaults.wait),
            renew_every,
            max_hold: options.max_hold,
            min_hold,
            on_lost: options.on_lost.unwrap_or(OnLost::Cancel),
            release: options.release.unwrap_or(ReleaseMode::Awaited),
            reentrant: options.reentrant.unwrap_or(false),
            retry_delay,
            retry_count: options.retry_count.or(defaults.retry_count),
            fencing: options.fencing.unwrap_or(false),
        })
    }

    /// Whether one attempt is not all there is.
    pub(crate) fn waits(&self) -> bool {
        self.wait != Wait::For(Duration::ZERO) && self.retry_count != Some(0)
    }

    /// How long before the end of belief a body is told, so that it has ended by then: a tenth of the
    /// hold, between 1 ms and 500 ms.
    pub(crate) fn notice(&self) -> Duration {
        let hold = self.max_hold.map_or(self.ttl.get(), |max_hold| max_hold.min(self.ttl.get()));
        (hold / 10).clamp(Duration::from_millis(1), Duration::from_millis(500))
    }
}
