//! Driving a future to a chosen poll and dropping it there.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::Notify;

/// How long a poll waits for the future's waker. A future that never wakes is polled anyway, as
/// any executor may.
const WAKE_TIMEOUT: Duration = Duration::from_millis(200);

/// Polls `future` up to `polls` times and drops it; each poll but the first comes after its waker
/// fired, or 200 ms after the poll before.
///
/// Must be awaited on a tokio runtime.
pub async fn poll_n<F: Future>(future: F, polls: usize) -> Poll<F::Output> {
    let mut future = pin!(future);
    let notifier = Arc::new(Notifier(Notify::new()));
    let waker = Waker::from(Arc::clone(&notifier));
    for poll in 0..polls {
        if poll > 0 {
            // Late is allowed, see WAKE_TIMEOUT.
            let _ = tokio::time::timeout(WAKE_TIMEOUT, notifier.0.notified()).await;
        }
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Poll::Ready(output);
        }
    }
    Poll::Pending
}

/// Drops `make()` before its first poll, after one, after two ..., until it completes; runs
/// `after(polls)` after each. Returns after how many polls it completed.
///
/// # Panics
///
/// When it has not completed within 1,000 polls.
pub async fn drop_at_every_poll<F: Future>(
    mut make: impl FnMut() -> F,
    mut after: impl AsyncFnMut(usize),
) -> usize {
    for polls in 0..=1000 {
        let completed = poll_n(make(), polls).await.is_ready();
        after(polls).await;
        if completed {
            return polls;
        }
    }
    panic!("not ready after 1,000 polls");
}

struct Notifier(Notify);

impl Wake for Notifier {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct CountsDrop<'a>(&'a Cell<usize>);

    impl Drop for CountsDrop<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[tokio::test]
    async fn a_future_is_dropped_at_each_of_its_poll_points() {
        let dropped = Cell::new(0);
        let reached = Cell::new(0);
        let make = || async {
            let _on_drop = CountsDrop(&dropped);
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_millis(2)).await;
                reached.set(reached.get() + 1);
            }
        };
        let mut steps = Vec::new();
        let polls = drop_at_every_poll(make, async |_| steps.push(reached.take())).await;
        assert_eq!(polls, 4);
        assert_eq!(steps, [0, 0, 1, 2, 3]);
        assert_eq!(dropped.get(), 4, "never polled, never begun");
    }

    #[tokio::test]
    async fn a_future_that_never_wakes_is_polled_all_the_same() {
        assert!(poll_n(std::future::pending::<()>(), 2).await.is_pending());
    }
}
