//! Waiting for a condition, with a deadline and a name for what was expected.

use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(2);

/// Waits until `condition` holds, looking every 2 ms. It blocks the thread, and with it all tasks
/// of a current-thread runtime: async tests take [`eventually_async`].
///
/// # Panics
///
/// With `what` and the time waited, when `deadline` has passed.
#[track_caller]
pub fn eventually(deadline: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    eventually_some(deadline, what, || condition().then_some(()));
}

/// Like [`eventually`], for a condition that yields something: the first `Some`.
///
/// # Panics
///
/// With `what` and the time waited, when `deadline` has passed.
#[track_caller]
pub fn eventually_some<T>(
    deadline: Duration,
    what: &str,
    mut condition: impl FnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        let waited = start.elapsed();
        assert!(waited < deadline, "waited {waited:?} in vain: {what}");
        std::thread::sleep(POLL);
    }
}

/// [`eventually`] for async tests. It counts tokio's time, so under a paused clock it is virtual.
///
/// # Panics
///
/// With `what` and the time waited, when `deadline` has passed.
pub async fn eventually_async(
    deadline: Duration,
    what: &str,
    mut condition: impl AsyncFnMut() -> bool,
) {
    let start = tokio::time::Instant::now();
    while !condition().await {
        let waited = start.elapsed();
        assert!(waited < deadline, "waited {waited:?} in vain: {what}");
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_returns_as_soon_as_the_condition_holds() {
        let mut looks = 0;
        eventually(Duration::from_secs(5), "three looks", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    #[should_panic(expected = "in vain: the impossible")]
    fn it_says_what_did_not_come() {
        eventually(Duration::from_millis(10), "the impossible", || false);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "in vain: the impossible")]
    async fn an_async_wait_follows_the_paused_clock() {
        let minute = Duration::from_secs(60);
        eventually_async(minute, "the impossible", async || false).await;
    }
}
