//! Options of a call, and the defaults of a pool.

use std::borrow::Cow;
use std::time::Duration;

use crate::base::clock::nanos;
use crate::base::error::{ErrorKind, LockError};

/// Time limit of an acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Up to this time. Zero means one attempt.
    For(Duration),
    /// Until the lock is acquired, the future is dropped or the pool shuts down. An unreachable store
    /// still ends the wait.
    Forever,
}

impl From<Duration> for Wait {
    fn from(wait: Duration) -> Self {
        Self::For(wait)
    }
}

/// Whether the lease is renewed while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renew {
    /// Never: the ttl is a hard limit on the hold.
    Off,
    /// Every third of the ttl.
    Auto,
    /// At this interval: at least 2 ms, at most half of the ttl.
    Every(Duration),
}

impl From<bool> for Renew {
    fn from(renew: bool) -> Self {
        if renew { Self::Auto } else { Self::Off }
    }
}

impl From<Duration> for Renew {
    fn from(interval: Duration) -> Self {
        Self::Every(interval)
    }
}

/// What happens to the body of an annotated function when its lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLost {
    /// The body is dropped at its next await and the call returns the error.
    Cancel,
    /// The body continues; only the guard reports the loss.
    Notify,
}

/// Whether a body's result waits for the release of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseMode {
    /// The result is returned after the store has freed the lock.
    Awaited,
    /// The result is returned immediately, and the driver releases the lock: one round trip less per call. A release that
    /// fails is only reported to `tracing`, as with [`Awaited`](Self::Awaited).
    Background,
}

/// What an acquire does while the store is down.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOutage {
    /// It waits for the store as it waits for the lock, up to its `wait`.
    Wait,
    /// It returns [`ErrorKind::Backend`] immediately. The store counts as down when all requests within 500 ms have failed.
    /// The pool then sends probes, and serves again after the first answer.
    Fail,
}

/// The options of one call. Unset options have the defaults of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockOptions {
    ttl: Option<Duration>,
    wait: Option<Wait>,
    renew: Option<Renew>,
    max_hold: Option<Duration>,
    min_hold: Option<Duration>,
    lock_delay: Option<Duration>,
    linger: Option<Duration>,
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

macro_rules! written {
    ($($getter:ident: $name:ident: $type:ty,)*) => {
        $(
            pub(crate) const fn $getter(&self) -> Option<$type> {
                self.$name
            }
        )*
    };
}

impl LockOptions {
    /// Options without any value set.
    #[must_use]
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self {
            ttl: None,
            wait: None,
            renew: None,
            max_hold: None,
            min_hold: None,
            lock_delay: None,
            linger: None,
            on_lost: None,
            release: None,
            retry_delay: None,
            retry_count: None,
            reentrant: None,
            fencing: None,
        }
    }

    /// Refuses options of this call that are for one key only.
    pub(crate) fn check_key_count(&self, keys: usize) -> Result<(), LockError> {
        match self.linger {
            Some(linger) if keys > 1 && !linger.is_zero() => Err(refused(
                format!("`linger` is for one key, and the call has {keys}"),
                "leave `linger` out",
            )),
            _ => Ok(()),
        }
    }

    written! {
        written_ttl: ttl: Duration,
        written_wait: wait: Wait,
        written_renew: renew: Renew,
        written_max_hold: max_hold: Duration,
        written_min_hold: min_hold: Duration,
    }

    setters! {
        ttl: Duration,
        wait: Wait,
        renew: Renew,
        max_hold: Duration,
        min_hold: Duration,
        lock_delay: Duration,
        linger: Duration,
        on_lost: OnLost,
        release: ReleaseMode,
        retry_delay: Duration,
        retry_count: u32,
        reentrant: bool,
        fencing: bool,
    }
}

/// A pool's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Defaults {
    pub(crate) ttl: Duration,
    pub(crate) wait: Wait,
    pub(crate) retry_delay: Option<Duration>,
    pub(crate) retry_count: Option<u32>,
    pub(crate) drift_factor: f64,
    /// How long after a grant its first renewal is due; `None` for the interval between renewals.
    pub(crate) first_renewal: Option<Duration>,
    /// For locks that can linger.
    pub(crate) linger: Duration,
    /// Whether a grant identifies its process.
    pub(crate) owner_info: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(30),
            wait: Wait::For(Duration::from_secs(3)),
            retry_delay: None,
            retry_count: None,
            drift_factor: 0.01,
            first_renewal: None,
            linger: Duration::ZERO,
            owner_info: true,
        }
    }
}

/// A longer time is considered a typo.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A lock that lingers for longer would be one that its process keeps.
const LONGEST_LINGER: Duration = Duration::from_secs(60);

/// The resolution of timers.
pub(crate) const TIMER: Duration = Duration::from_millis(1);

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
    const MIN: Duration = Duration::from_millis(10);
    const MAX: Duration = LONGEST;
    const MAX_DELAY: Duration = Duration::from_secs(60);

    /// With a greater drift factor, less than half of the ttl remains after the first renewal. That is too little for a
    /// hand-off, and for a second renewal if the first one fails.
    const MAX_DRIFT: f64 = 0.25;

    fn new(length: Duration, drift_factor: f64) -> Result<Self, LockError> {
        if !(Self::MIN..=Self::MAX).contains(&length) {
            return Err(refused(
                format!("a ttl of {length:?} is not between 10 ms and 7 days"),
                "the ttl is how long a crashed holder blocks other owners; write for example `ttl = \"30s\"`",
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
    fn with_delay(self, delay: Duration) -> Result<Self, LockError> {
        if delay > Self::MAX_DELAY {
            return Err(refused(
                format!("a lock_delay of {delay:?} is longer than a minute"),
                "it is how long the late writes of a lost holder may take; write for example `lock_delay = \"2s\"`",
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
    fn longest_interval(self, cancel_margin: Duration) -> Duration {
        (self.validity().saturating_sub(cancel_margin) * 2 / 3).min(self.get() / 2)
    }

    /// The shortest ttl that is kept by a renewal every third of it.
    fn shortest_renewed(drift_factor: f64) -> Duration {
        let is_kept = |length: &Duration| {
            let ttl = Self::new(*length, drift_factor);
            ttl.is_ok_and(|ttl| ttl.get() / 3 <= ttl.longest_interval(cancel_margin(ttl, None)))
        };
        (10..=1_000).map(Duration::from_millis).find(is_kept).unwrap_or(Duration::from_secs(1))
    }
}

/// How long before the end of its validity a body is cancelled, so that it has stopped by then. It is a tenth of the hold,
/// between 1 ms and 500 ms.
fn cancel_margin(ttl: Ttl, max_hold: Option<Duration>) -> Duration {
    let hold = max_hold.map_or(ttl.get(), |max_hold| max_hold.min(ttl.get()));
    (hold / 10).clamp(Duration::from_millis(1), Duration::from_millis(500))
}

/// The shortest interval between renewals.
pub(crate) const SHORTEST_INTERVAL: Duration = Duration::from_millis(2);

/// The options of one call, complete and validated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) ttl: Ttl,
    pub(crate) wait: Wait,
    /// The interval between renewals; with `None` the ttl is a hard limit.
    pub(crate) renew_every: Option<Duration>,
    /// How long after a grant the first renewal is due.
    pub(crate) first_renewal: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Duration,
    /// How long the process keeps the lock after a body, for its own next call. Zero if it does not.
    pub(crate) linger: Duration,
    pub(crate) on_lost: OnLost,
    pub(crate) release: ReleaseMode,
    pub(crate) reentrant: bool,
    pub(crate) retry_delay: Option<Duration>,
    pub(crate) retry_count: Option<u32>,
    pub(crate) fencing: bool,
    pub(crate) owner_info: bool,
}

impl Policy {
    /// Completes `options` with a pool's `defaults` and validates the combination.
    pub(crate) fn new(options: &LockOptions, defaults: &Defaults) -> Result<Self, LockError> {
        let ttl = Ttl::new(options.ttl.unwrap_or(defaults.ttl), defaults.drift_factor)?
            .with_delay(options.lock_delay.unwrap_or_default())?;
        let renew = options.renew.unwrap_or(Renew::Auto);
        let min_hold = options.min_hold.unwrap_or_default();
        let retry_delay = options.retry_delay.or(defaults.retry_delay);
        let renew_every = match renew {
            Renew::Off => None,
            Renew::Auto => Some(ttl.get() / 3),
            Renew::Every(interval) => Some(interval),
        };
        let first_renewal = |every| defaults.first_renewal.map_or(every, |first| first.min(every));
        let mut policy = Self {
            ttl,
            wait: options.wait.unwrap_or(defaults.wait),
            renew_every,
            first_renewal: renew_every.map(first_renewal),
            max_hold: options.max_hold,
            min_hold,
            linger: options.linger.unwrap_or_default(),
            on_lost: options.on_lost.unwrap_or(OnLost::Cancel),
            release: options.release.unwrap_or(ReleaseMode::Awaited),
            reentrant: options.reentrant.unwrap_or(false),
            retry_delay,
            retry_count: options.retry_count.or(defaults.retry_count),
            fencing: options.fencing.unwrap_or(false),
            owner_info: defaults.owner_info,
        };
        policy.check_renewal_interval(renew, defaults)?;
        policy.check_hold_limits()?;
        if options.linger.is_none() && policy.may_not_linger().is_none() {
            policy.linger = defaults.linger;
        }
        policy.check_linger()?;
        if policy.reentrant {
            policy.check_reentrancy(renew)?;
        }
        if retry_delay.is_some_and(|delay| delay.is_zero() || delay > LONGEST) {
            return Err(refused(
                format!(
                    "a retry_delay of {:?} is not between zero, which would retry without a pause, and 7 days",
                    retry_delay.unwrap_or_default()
                ),
                "write for example `retry_delay = \"50ms\"`, or leave it out",
            ));
        }
        Ok(policy)
    }

    fn check_renewal_interval(&self, renew: Renew, defaults: &Defaults) -> Result<(), LockError> {
        let Some(interval) = self.renew_every else { return Ok(()) };
        let (ttl, longest) = (self.ttl.get(), self.ttl.longest_interval(self.cancel_margin()));
        if interval > longest && renew == Renew::Auto {
            let shortest = Ttl::shortest_renewed(defaults.drift_factor);
            return Err(refused(
                format!(
                    "a ttl of {ttl:?} with a drift_factor of {} is over before a renewal can be confirmed",
                    defaults.drift_factor
                ),
                format!("choose a `ttl` of at least {shortest:?}, or a smaller `drift_factor`"),
            ));
        }
        if interval > longest {
            return Err(refused(
                format!("a renewal every {interval:?} does not keep a lease of {ttl:?} alive"),
                format!(
                    "leave `renew` out for a third of the ttl, or choose an interval of at most {longest:?}"
                ),
            ));
        }
        if interval < SHORTEST_INTERVAL {
            return Err(refused(
                format!("a renewal every {interval:?} is more frequent than renewals can be"),
                "leave `renew` out for a third of the ttl, or choose an interval of at least 2 ms",
            ));
        }
        Ok(())
    }

    fn check_hold_limits(&self) -> Result<(), LockError> {
        let min_hold = self.min_hold;
        if min_hold > LONGEST {
            return Err(refused(
                format!("a min_hold of {min_hold:?} is longer than 7 days"),
                "`min_hold` is the minimum time for which the lock stays taken; write for example `min_hold = \"1m\"`",
            ));
        }
        let Some(max_hold) = self.max_hold else { return Ok(()) };
        if max_hold < Ttl::MIN || max_hold < min_hold {
            return Err(refused(
                format!(
                    "a max_hold of {max_hold:?} is shorter than 10 ms or than min_hold ({min_hold:?})"
                ),
                "raise `max_hold`, or leave it out for no limit",
            ));
        }
        if self.renew_every.is_none() && max_hold > self.ttl.get() {
            return Err(refused(
                format!(
                    "without renewal the hold ends with its ttl of {:?}, before a max_hold of {max_hold:?}",
                    self.ttl.get()
                ),
                "leave `max_hold` out, or `renew = false`",
            ));
        }
        Ok(())
    }

    /// The option that excludes `linger`, if there is one. A lock that lingers is passed on from one hold to the next, so
    /// nothing may be bound to a single hold.
    fn may_not_linger(&self) -> Option<&'static str> {
        if self.max_hold.is_some() {
            Some("max_hold")
        } else if !self.min_hold.is_zero() {
            Some("min_hold")
        } else if self.renew_every.is_none() {
            Some("renew = false")
        } else {
            None
        }
    }

    fn check_linger(&self) -> Result<(), LockError> {
        let linger = self.linger;
        if linger > LONGEST_LINGER {
            return Err(refused(
                format!("a linger of {linger:?} is longer than a minute"),
                "it is how long the process keeps a lock that it does not use; write for example `linger = \"50ms\"`",
            ));
        }
        match self.may_not_linger() {
            Some(other) if !linger.is_zero() => Err(refused(
                format!("`linger` and `{other}` exclude each other"),
                format!(
                    "leave `linger` or `{other}` out: a lock that lingers has one lease for several holds"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// A reentrant call that uses the lock of an outer call has no lease of its own to limit, keep or renew.
    fn check_reentrancy(&self, renew: Renew) -> Result<(), LockError> {
        let name = if self.max_hold.is_some() {
            "max_hold"
        } else if !self.min_hold.is_zero() {
            "min_hold"
        } else if !self.ttl.delay().is_zero() {
            "lock_delay"
        } else if renew != Renew::Auto {
            "renew"
        } else {
            return Ok(());
        };
        Err(refused(
            format!(
                "`{name}` and `reentrant` exclude each other: a call that passes through has no lease of its own"
            ),
            format!(
                "set `{name}` on the outermost call, or lock in a function that is not `reentrant`"
            ),
        ))
    }

    /// How long the store keeps a grant without further requests.
    pub(crate) fn kept_for(&self) -> Duration {
        self.ttl.stored().max(self.min_hold)
    }

    /// Whether the acquire may make more than one attempt.
    pub(crate) fn waits(&self) -> bool {
        self.wait != Wait::For(Duration::ZERO) && self.retry_count != Some(0)
    }

    /// Whether `attempts` are all that `retry_count` allows, or a `wait` of zero. The deadline may be later, for a release
    /// of this process before the request.
    pub(crate) fn is_out_of_attempts(&self, attempts: u32) -> bool {
        let most = if self.waits() { self.retry_count } else { Some(0) };
        most.is_some_and(|count| attempts > count)
    }

    /// How long before the end of its validity a body is cancelled.
    pub(crate) fn cancel_margin(&self) -> Duration {
        cancel_margin(self.ttl, self.max_hold)
    }
}

#[cold]
fn refused(cause: String, remedy: impl Into<Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepted options work: the body is cancelled before the validity ends, and every renewal leaves time to
    /// confirm it.
    #[test]
    fn an_accepted_lease_can_be_renewed() {
        let mut accepted = 0;
        for ttl in [10, 11, 12, 13, 14, 16, 20, 50, 100, 1_000, 30_000, 604_800_000] {
            let ttl = Duration::from_millis(ttl);
            for drift_factor in [0.0, 0.01, 0.05, 0.1, 0.2, 0.25] {
                let defaults = Defaults { ttl, drift_factor, ..Defaults::default() };
                let fractions = (2..10_u32).map(|n| Renew::Every(ttl / n));
                for renew in fractions.chain([Renew::Off, Renew::Auto]) {
                    let case = format!("{ttl:?} {drift_factor} {renew:?}");
                    let policy = Policy::new(&LockOptions::new().renew(renew), &defaults);
                    let Ok(policy) = policy else {
                        assert!(ttl < Duration::from_millis(20) || drift_factor > 0.05, "{case}");
                        continue;
                    };
                    accepted += 1;
                    let cancel_at = policy.ttl.validity() - policy.cancel_margin();
                    assert!(cancel_at > policy.cancel_margin(), "{case}");
                    if let Some(interval) = policy.renew_every {
                        assert!(cancel_at - interval >= interval / 2, "{case}");
                    }
                }
            }
        }
        assert!(accepted > 500, "{accepted}");
    }

    #[test]
    fn the_remedy_of_a_rejected_ttl_is_accepted() {
        let defaults = Defaults { drift_factor: 0.25, ..Defaults::default() };
        let with = |ttl| Policy::new(&LockOptions::new().ttl(ttl), &defaults);
        let error = with(Duration::from_millis(10)).unwrap_err().to_string();
        assert!(error.contains("at least 14ms"), "{error}");
        with(Duration::from_millis(14)).unwrap();
        let renewed = LockOptions::new().renew(Renew::Every(Duration::from_secs(15)));
        let error = Policy::new(&renewed, &defaults).unwrap_err().to_string();
        let limit = defaults.ttl.mul_f64(0.75) - Duration::from_millis(502);
        assert!(error.contains(&format!("at most {:?}", limit * 2 / 3)), "{error}");
        Policy::new(&renewed.renew(Renew::Every(limit * 2 / 3)), &defaults).unwrap();
    }
}
