//! The pause before a lost connection is replaced.

use std::time::Duration;

use crate::base::jitter;

/// The pauses between connections to one server, with jitter. The upper bound doubles with each pause until a
/// connection has served requests.
///
/// A completed log-in does not count as service: otherwise a server that accepts log-ins and then hangs up would be
/// dialled in a tight loop.
#[derive(Debug)]
pub(crate) struct Backoff {
    pause: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Backoff {
    /// A connection that has answered requests for this long resets the pause. So a server that hangs up later is
    /// dialled at most about once in that time.
    const STEADY: Duration = Duration::from_secs(1);

    pub(crate) const fn new(shortest: Duration, longest: Duration) -> Self {
        Self { pause: shortest, shortest, longest }
    }

    /// Whether a connection has served requests, if its last answer came `answered_for` after its log-in.
    pub(crate) fn is_steady(answered_for: Duration) -> bool {
        answered_for >= Self::STEADY
    }

    /// Records the end of a connection whose last answer came `answered_for` after its log-in.
    pub(crate) fn ended(&mut self, answered_for: Duration) {
        if Self::is_steady(answered_for) {
            self.pause = self.shortest;
        }
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = jitter::below(self.pause);
        self.pause = self.pause.saturating_mul(2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connection_that_has_served_is_followed_by_another_at_once() {
        let (shortest, longest) = (Duration::from_millis(5), Duration::from_millis(500));
        let mut backoff = Backoff::new(shortest, longest);
        let total: Duration = (0..20).map(|_| backoff.next()).sum();
        assert!(total >= longest * 3, "{total:?}");
        backoff.ended(Duration::ZERO);
        backoff.ended(Duration::from_millis(900));
        assert!(backoff.next() >= longest / 4);
        backoff.ended(Duration::from_secs(1));
        assert!(backoff.next() <= shortest);
        assert!(backoff.next() <= 2 * shortest);
    }
}
