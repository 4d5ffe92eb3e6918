//! Time of leases. The only file that reads a clock.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::Add;
use std::time::{Duration, SystemTime};

use tokio::runtime;

/// A point in time of a [`Clock`], in nanoseconds since the clock's origin.
///
/// The stored number is one more, so it is never zero and an `Option` takes no more room. Each held lock has a dozen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(NonZeroU64);

impl Instant {
    /// The first moment of a clock. It lies in the past, so what is due then is due immediately.
    pub(crate) const ORIGIN: Self = Self(NonZeroU64::MIN);
    /// A moment that does not come.
    pub(crate) const NEVER: Self = Self(NonZeroU64::MAX);

    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(nanos))
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub(crate) const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    pub(crate) fn saturating_sub(self, span: Duration) -> Self {
        Self::from_nanos(self.as_nanos().saturating_sub(nanos(span)))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instant({})", self.as_nanos())
    }
}

/// The time source of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Clock {
    /// Monotonic time that includes suspend. A lease also expires in the store during a suspend, so with a clock that
    /// stops it would stay valid for too long.
    Boot,
    /// The clock of the tokio runtime, which a test can pause and advance.
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
            Self::Boot => Instant::from_nanos(boot_nanos()),
            Self::Runtime { origin } => {
                let since = tokio::time::Instant::now().saturating_duration_since(origin);
                Instant::from_nanos(nanos(since))
            }
        }
    }

    /// The current runtime, if this is its clock and a test has paused it.
    pub(crate) fn paused_runtime(self) -> Option<runtime::Id> {
        let is_paused = matches!(self, Self::Runtime { .. }) && TwoClocks::is_paused();
        is_paused.then(|| runtime::Handle::try_current().ok().map(|it| it.id())).flatten()
    }

    /// Sleeps until `moment`. Only for futures on the driver: its runtime has timers.
    pub(crate) async fn sleep_until(self, moment: Instant) {
        // Timers stop during a suspend; checking the clock at this interval bounds the delay after it.
        const CHECK_INTERVAL: Duration = Duration::from_secs(1);
        loop {
            let left = moment.since(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(CHECK_INTERVAL)).await;
        }
    }

    /// Like [`sleep_until`](Self::sleep_until). Without a moment it never ends.
    pub(crate) async fn sleep_until_due(self, moment: Option<Instant>) {
        match moment {
            Some(moment) => self.sleep_until(moment).await,
            None => std::future::pending().await,
        }
    }
}

/// A moment in real time and on the clock of the current tokio runtime, which a test may have paused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoClocks {
    real: std::time::Instant,
    runtime: tokio::time::Instant,
}

impl TwoClocks {
    #[allow(clippy::disallowed_methods)]
    pub(crate) fn now() -> Self {
        Self { real: std::time::Instant::now(), runtime: tokio::time::Instant::now() }
    }

    /// Whether the clock of the current runtime stands still.
    pub(crate) fn is_paused() -> bool {
        // The runtime's clock is read first: one that runs then differs, however the reads are spread.
        let runtime = Self::now().runtime;
        let before = Self { runtime, ..Self::now() };
        loop {
            let now = Self::now();
            if now.real.saturating_duration_since(before.real) >= Duration::from_micros(1) {
                return now.runtime == before.runtime;
            }
        }
    }

    /// Whether the runtime's clock has followed real time since then. `None` if it is too early to say.
    #[cfg(feature = "redis")]
    pub(crate) fn agree(&self) -> Option<bool> {
        const LEAST: Duration = Duration::from_millis(1);
        let now = Self::now();
        let real = now.real.saturating_duration_since(self.real);
        let runtime = now.runtime.saturating_duration_since(self.runtime);
        (real >= LEAST).then(|| real.abs_diff(runtime) <= real / 2)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_nanos() -> u64 {
    timespec_nanos(rustix::time::clock_gettime(rustix::time::ClockId::Boottime))
}

// CLOCK_MONOTONIC includes suspend on Apple systems; other systems have no better clock.
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

// The performance counter of Windows includes suspend.
#[cfg(not(unix))]
#[allow(clippy::disallowed_methods)]
fn boot_nanos() -> u64 {
    use once_cell::sync::Lazy;
    static ORIGIN: Lazy<std::time::Instant> = Lazy::new(std::time::Instant::now);
    nanos(ORIGIN.elapsed())
}

/// The machine's clock, which may step. For comparisons with the clocks of servers, not for measuring time.
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// Microseconds since 1970 by the machine's clock. For numbers that should grow.
pub(crate) fn wall_micros() -> u64 {
    let since = wall().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or_default())
}

/// The nanoseconds of `span`, at most what the number holds: 584 years.
pub(super) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_counted_from_zero_and_stops_at_the_ends() {
        const SECOND: Duration = Duration::from_secs(1);
        let moments = [0, 1, 1_000_000_000, u64::MAX - 1].map(Instant::from_nanos);
        assert_eq!(moments.map(Instant::as_nanos), [0, 1, 1_000_000_000, u64::MAX - 1]);
        assert_eq!(moments[0] + SECOND, moments[2]);
        assert_eq!(moments[2].since(moments[0]), SECOND);
        assert_eq!(moments[0].since(moments[2]), Duration::ZERO);
        assert_eq!(moments[2].saturating_sub(SECOND), moments[0]);
        assert_eq!(moments[1].saturating_sub(SECOND), moments[0]);
        assert_eq!(moments[3] + Duration::MAX, moments[3]);
        assert_eq!(Instant::from_nanos(u64::MAX), moments[3]);
        assert_eq!([Instant::ORIGIN, Instant::NEVER], [moments[0], moments[3]]);
        assert_eq!(size_of::<Option<Instant>>(), size_of::<u64>());
    }
}
