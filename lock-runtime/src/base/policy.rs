//! The options of one call, complete.

use std::time::Duration;

use crate::base::error::LockError;
use crate::base::options::{Defaults, LockOptions, OnLost, ReleaseMode, Renew, Wait, refused};
use crate::base::ttl::Ttl;

/// A lock that lingers for longer would be one that its process keeps.
const LONGEST_LINGER: Duration = Duration::from_secs(60);

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
            linger: Duration::ZERO,
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
        policy.set_linger(options.linger, defaults.linger)?;
        if policy.reentrant {
            policy.check_reentrancy(renew)?;
        }
        policy.check_retry_delay()?;
        Ok(policy)
    }

    fn check_retry_delay(&self) -> Result<(), LockError> {
        match self.retry_delay {
            Some(delay) if delay.is_zero() || delay > Ttl::MAX => Err(refused(
                format!(
                    "a retry_delay of {delay:?} is not between zero, which would retry without a pause, and 7 days"
                ),
                "choose for example 50 ms, or leave it out",
            )),
            _ => Ok(()),
        }
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
        if min_hold > Ttl::MAX {
            return Err(refused(
                format!("a min_hold of {min_hold:?} is longer than 7 days"),
                "`min_hold` is the minimum time for which the lock stays taken; choose for example one minute",
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
                "leave `max_hold` out, or have the lease renewed",
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

    /// Sets what the call asks for, or the `default` of its pool. The default does not apply to calls that may not linger, so
    /// that a pool with one serves them too.
    fn set_linger(&mut self, asked: Option<Duration>, default: Duration) -> Result<(), LockError> {
        let excluding = self.may_not_linger();
        let linger = asked.unwrap_or(if excluding.is_none() { default } else { Duration::ZERO });
        self.linger = linger;
        if linger > LONGEST_LINGER {
            return Err(refused(
                format!("a linger of {linger:?} is longer than a minute"),
                "it is how long the process keeps a lock that it does not use; choose for example 50 ms",
            ));
        }
        match excluding {
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

    /// Whether a grant to a holder with this policy is as good as a new one for a holder with `next`, in the same process.
    pub(crate) fn may_pass_to(&self, next: &Self) -> bool {
        // All fields, so that a new one has to be decided on. The lease checks `min_hold` and the fences.
        let Self {
            ttl,
            renew_every,
            max_hold,
            min_hold: _,
            fencing: _,
            wait: _,
            first_renewal: _,
            linger: _,
            on_lost: _,
            release: _,
            reentrant: _,
            retry_delay: _,
            retry_count: _,
            owner_info: _,
        } = *self;
        // `max_hold` limits one holder, and a renewal is sent with one ttl. The store has to know the next `min_hold` before
        // that body begins.
        renew_every.is_some()
            && max_hold.is_none()
            && next.min_hold.is_zero()
            && ttl == next.ttl
            && renew_every == next.renew_every
    }

    /// Whether a request with this policy asks the store for the same grant as one with `other`.
    pub(crate) fn requests_like(&self, other: &Self) -> bool {
        (self.ttl, self.min_hold, self.fencing) == (other.ttl, other.min_hold, other.fencing)
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
        self.ttl.cancel_margin(self.max_hold)
    }
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
