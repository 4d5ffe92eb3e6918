//! How far the clock of a server is from the local one.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use crate::base::backend_error::Warning;

/// The distance of a server's clock from the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClockDistance {
    Ahead(Duration),
    Behind(Duration),
}

impl ClockDistance {
    /// More than network latency explains.
    pub(crate) const FAR: Duration = Duration::from_secs(1);

    /// The smallest distance of a server's clock that showed `since_epoch` at some moment of `asked`. The difference between two
    /// distances is how far two nodes of a quorum disagree on the expiry of a lease. `None` if there is no such time.
    pub(crate) fn of(since_epoch: Duration, asked: &RangeInclusive<SystemTime>) -> Option<Self> {
        let server = SystemTime::UNIX_EPOCH.checked_add(since_epoch)?;
        let ahead = server.duration_since(*asked.end()).unwrap_or_default();
        let behind = asked.start().duration_since(server).unwrap_or_default();
        Some(if behind.is_zero() { Self::Ahead(ahead) } else { Self::Behind(behind) })
    }

    /// The distance without its direction.
    pub(crate) const fn abs(self) -> Duration {
        match self {
            Self::Ahead(by) | Self::Behind(by) => by,
        }
    }

    /// The difference between two clocks.
    #[cfg(feature = "redis")]
    pub(crate) fn to(self, other: Self) -> Duration {
        match (self, other) {
            (Self::Ahead(one), Self::Ahead(two)) | (Self::Behind(one), Self::Behind(two)) => {
                one.abs_diff(two)
            }
            (Self::Ahead(one), Self::Behind(two)) | (Self::Behind(one), Self::Ahead(two)) => {
                one.saturating_add(two)
            }
        }
    }

    /// The warning about a server that is too far from this machine, such as `Redis at 10.0.0.1:6379`.
    pub(crate) fn warning(self, server: impl fmt::Display) -> Option<Warning> {
        const REMEDY: &str = "synchronise both with a time server: a step of the server's clock ends locks early or late, and fences after a loss of data follow it";
        let text = || format!("the clock of {server} is {self} this machine");
        (self.abs() >= Self::FAR).then(|| Warning::new(text(), REMEDY))
    }
}

/// `4.99 s ahead of`
impl fmt::Display for ClockDistance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ahead(by) => write!(f, "{:.2} s ahead of", by.as_secs_f64()),
            Self::Behind(by) => write!(f, "{:.2} s behind", by.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(millis: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
    }

    #[test]
    fn the_way_of_an_answer_is_no_distance() {
        // Asked for at 10 s, received three seconds later.
        let asked = local(10_000)..=local(13_000);
        let at = |millis| ClockDistance::of(Duration::from_millis(millis), &asked).unwrap();
        assert_eq!(at(10_500).abs(), Duration::ZERO);
        assert_eq!(at(12_500).abs(), Duration::ZERO);
        assert_eq!(at(13_500), ClockDistance::Ahead(Duration::from_millis(500)));
        assert_eq!(at(8_500), ClockDistance::Behind(Duration::from_millis(1_500)));
        assert_eq!(ClockDistance::of(Duration::MAX, &asked), None);
    }

    #[test]
    fn a_second_is_too_far() {
        let warning = |distance: ClockDistance| distance.warning("Redis at a:1");
        for near in [Duration::ZERO, Duration::from_millis(999)] {
            assert!(warning(ClockDistance::Ahead(near)).is_none());
            assert!(warning(ClockDistance::Behind(near)).is_none());
        }
        for (distance, text) in [
            (ClockDistance::Ahead(Duration::from_secs(10)), "10.00 s ahead of this machine"),
            (ClockDistance::Behind(Duration::from_secs(1)), "1.00 s behind this machine"),
        ] {
            let warning = warning(distance).unwrap().to_string();
            assert!(
                warning.starts_with(&format!("the clock of Redis at a:1 is {text}")),
                "{warning}"
            );
        }
    }
}
