//! How long to wait before a connection is made again.

use std::time::Duration;

use crate::base::jitter;

/// The pauses between the connections to one server: each up to twice the one before, with jitter, until a
/// connection has served. One that was only logged in to has not: a server that lets its clients in and hangs up
/// would be dialled over and over.
#[derive(Debug)]
pub(crate) struct Backoff {
    pause: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Backoff {
    /// How long a connection has to answer requests until the next one is made at once. Also the bound on how often
    /// one is made to a server that hangs up later.
    const STEADY: Duration = Duration::from_secs(1);

    pub(crate) const fn new(shortest: Duration, longest: Duration) -> Self {
        Self { pause: shortest, shortest, longest }
    }

    /// Whether a connection whose last answer came so long after its log-in has served.
    pub(crate) fn is_steady(answered_for: Duration) -> bool {
        answered_for >= Self::STEADY
    }

    /// A connection is over that gave its last answer so long after its log-in.
    pub(crate) fn ended(&mut self, answered_for: Duration) {
        if Self::is_steady(answered_for) {
            self.pause = self.shortest;
        }
    }

    /// How long to wait now.
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
