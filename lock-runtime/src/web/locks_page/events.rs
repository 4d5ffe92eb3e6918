//! Server-sent events: the page has changed.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::api::serve::stopping;
use crate::base::clock::{Clock, Instant};
use crate::exec::driver::Driver;
use crate::web::locks_page::LocksPage;
use bytes::Bytes;

/// How often a stream compares the locks.
const INTERVAL: Duration = Duration::from_millis(250);

/// A stream ends after this time, so that it does not delay the shutdown of a server that the runtime does not stop. A
/// browser connects again.
const LONGEST: Duration = Duration::from_secs(20);

/// The browser connects again after a second.
const GREETING: &str = "retry: 1000\n\n";

const CHANGED: &str = "event: changed\ndata:\n\n";

/// The chunks of the stream.
pub(super) struct PageEvents {
    next: NextChunk,
}

/// The next chunk and what is watched from then on, or the end of the stream.
type NextChunk = Pin<Box<dyn Future<Output = Option<(Bytes, Watched)>> + Send>>;

/// What the last event was about.
struct Watched {
    page: LocksPage,
    ends_at: Instant,
    told: Option<u64>,
    told_at: Instant,
    stop: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl PageEvents {
    pub(super) fn new(page: LocksPage) -> Self {
        let told = page.fingerprint().number;
        let now = Clock::Boot.now();
        let stop = Box::pin(stopping());
        let watched = Watched { page, ends_at: now + LONGEST, told, told_at: now, stop };
        Self {
            next: Box::pin(async move { Some((Bytes::from_static(GREETING.as_bytes()), watched)) }),
        }
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some((chunk, watched)) = ready!(self.next.as_mut().poll(cx)) else {
            // A server may poll once more.
            self.next = Box::pin(std::future::ready(None));
            return Poll::Ready(None);
        };
        self.next = Box::pin(watched.changed());
        Poll::Ready(Some(chunk))
    }
}

impl Watched {
    /// `None` when the stream ends.
    async fn changed(mut self) -> Option<(Bytes, Self)> {
        loop {
            tokio::select! {
                () = &mut self.stop => return None,
                paused = pause() => paused?,
            }
            let now = Clock::Boot.now();
            if now >= self.ends_at {
                return None;
            }
            let current = self.page.fingerprint();
            let is_old = current.number.is_some() && now >= self.told_at + current.shown_for;
            if current.number != self.told || is_old {
                (self.told, self.told_at) = (current.number, now);
                return Some((Bytes::from_static(CHANGED.as_bytes()), self));
            }
        }
    }
}

/// Sleeps for the interval. The server's runtime may have no timers. `None` if the driver is gone.
async fn pause() -> Option<()> {
    let sleep = async { Clock::Boot.sleep_until(Clock::Boot.now() + INTERVAL).await };
    Driver::background().ok()?.run(sleep).await.ok()
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn a_stream_that_has_ended_is_polled_again() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut events = PageEvents { next: Box::pin(async { None }) };
        for _ in 0..3 {
            assert_eq!(events.poll_next(&mut cx), Poll::Ready(None));
        }
    }
}
