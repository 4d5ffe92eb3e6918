//! Time for leases. The only file that reads a clock.

use std::ops::Add;
use std::time::Duration;

/// A moment on a [`Clock`], in nanoseconds since an origin of the clock's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(u64);

impl Instant {
    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero if `earlier` is the later one.
    pub(crate) const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    pub(crate) fn saturating_sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

/// Where a pool takes its time from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Clock {
    /// Monotonic time that goes on while the machine is suspended: a lease runs out in the store
    /// during a suspend too, so a clock that stops would believe in it for too long.
    Boot,
    /// The tokio runtime's clock, which a test can pause and advance.
    Runtime { origin: tokio::time::Instant },
}

impl Clock {
    #[allow(clippy::disallowed_methods)]
    pub(crate) fn runtime() -> Self {
        Self::Runtime { origin: tokio::time::Instant::now() }
    }

    #[allow(clippy::disallowed_methods)]
    pub(crate) fn now(self) -> Instant {
        match self {
            Self::Boot => Instant(boot_nanos()),
            Self::Runtime { origin } => {
                Instant(nanos(tokio::time::Instant::now().saturating_duration_since(origin)))
            }
        }
    }

    /// Sleeps until `moment`. Only for futures that run on the driver, which has timers.
    pub(crate) async fn sleep_until(self, moment: Instant) {
        // Timers stop while the machine is suspended; looking now and then bounds how late they notice.
        const LOOK: Duration = Duration::from_secs(1);
        loop {
            let left = moment.since(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LOOK)).await;
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_nanos() -> u64 {
    timespec_nanos(rustix::time::clock_gettime(rustix::time::ClockId::Boottime))
}

// On Apple systems CLOCK_MONOTONIC counts suspend; elsewhere it is the best there is.
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
fn boot_nanos() -> u64 {
    timespec_nanos(rustix::time::clock_gettime(rustix::time::ClockId::Monotonic))
}

#[cfg(unix)]
fn timespec_nanos(time: rustix::time::Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(time.tv_nsec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

// Windows' performance counter counts suspend.
#[cfg(not(unix))]
#[allow(clippy::disallowed_methods)]
fn boot_nanos() -> u64 {
    use once_cell::sync::Lazy;
    static ORIGIN: Lazy<std::time::Instant> = Lazy::new(std::time::Instant::now);
    nanos(ORIGIN.elapsed())
}

/// Microseconds since 1970 by the machine's clock, which may step. For numbers that should grow, never for
/// measuring time.
#[cfg(feature = "redis")]
pub(crate) fn wall_micros() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or_default())
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
