//! How close the fence counter is to the server's clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::clock::{Clock, Instant};

/// How far the counter may be behind the server's clock, in microseconds. A failover takes longer.
pub(super) const MAX_LAG: i64 = 100_000;

/// How long after a script transactions may count fences. The rest of [`MAX_LAG`] is for the way to the server.
const PLAIN_FOR: Duration = Duration::from_millis(50);

/// How long all grants are sent as scripts after the server has refused a transaction.
const PAUSE: Duration = Duration::from_secs(10);

/// Whether the fence counter is close to the server's clock, as far as this process knows.
pub(super) struct CounterClock {
    clock: Clock,
    /// In the clock's nanoseconds.
    close_until: AtomicU64,
    /// In the clock's nanoseconds. Transactions are refused until then.
    refused_until: AtomicU64,
}

impl CounterClock {
    pub(super) const fn new(clock: Clock) -> Self {
        Self { clock, close_until: AtomicU64::new(0), refused_until: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(super) fn is_close(&self) -> bool {
        let now = self.now().as_nanos();
        now < self.close_until.load(Ordering::Relaxed)
            && now >= self.refused_until.load(Ordering::Relaxed)
    }

    /// A script that was sent at `sent` has moved the counter.
    pub(super) fn moved(&self, sent: Instant) {
        self.close_until.fetch_max((sent + PLAIN_FOR).as_nanos(), Ordering::Relaxed);
    }

    /// A transaction has found the counter too far behind.
    pub(super) fn lags(&self) {
        self.close_until.store(0, Ordering::Relaxed);
    }

    /// The server has refused a transaction. The reason may pass.
    pub(super) fn pause(&self) {
        self.refused_until.store((self.now() + PAUSE).as_nanos(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn transactions_count_fences_shortly_after_a_script() {
        let counter_clock = CounterClock::new(Clock::runtime());
        assert!(!counter_clock.is_close());
        counter_clock.moved(counter_clock.now());
        assert!(counter_clock.is_close());
        tokio::time::advance(PLAIN_FOR).await;
        assert!(!counter_clock.is_close());
        let sent = counter_clock.now();
        counter_clock.moved(sent);
        // The answer to an earlier script.
        counter_clock.moved(sent.saturating_sub(PLAIN_FOR));
        assert!(counter_clock.is_close());
        counter_clock.lags();
        assert!(!counter_clock.is_close());
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_suspends_transactions() {
        let counter_clock = CounterClock::new(Clock::runtime());
        counter_clock.pause();
        counter_clock.moved(counter_clock.now());
        assert!(!counter_clock.is_close());
        tokio::time::advance(PAUSE).await;
        counter_clock.moved(counter_clock.now());
        assert!(counter_clock.is_close());
    }
}
