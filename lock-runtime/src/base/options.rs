//! Options of a call, and the defaults of a pool.

use std::borrow::Cow;
use std::time::Duration;

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
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Wait>,
    pub(crate) renew: Option<Renew>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Option<Duration>,
    pub(super) lock_delay: Option<Duration>,
    pub(super) linger: Option<Duration>,
    pub(super) on_lost: Option<OnLost>,
    pub(super) release: Option<ReleaseMode>,
    pub(super) retry_delay: Option<Duration>,
    pub(super) retry_count: Option<u32>,
    pub(super) reentrant: Option<bool>,
    pub(super) fencing: Option<bool>,
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

/// The resolution of timers.
pub(crate) const TIMER: Duration = Duration::from_millis(1);

#[cold]
pub(super) fn refused(cause: String, remedy: impl Into<Cow<'static, str>>) -> LockError {
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}
