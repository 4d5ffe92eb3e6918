//! The signal to send a request, and by when.

use tokio::sync::Notify;

use crate::base::clock::Instant;
use crate::base::sync::Mutex;

/// Wakes a task that waits for the store. The queues of its keys share it with the task.
///
/// A signal that comes before the task waits is kept. So is the moment, until the task takes it.
#[derive(Debug, Default)]
pub(crate) struct WakeSignal {
    /// When the next request is due, as far as the store has said so. `None`: when the task has planned it.
    due: Mutex<Option<Instant>>,
    changed: Notify,
}

impl WakeSignal {
    /// The next request is due no later than `moment`.
    pub(super) fn request_by(&self, moment: Instant) {
        {
            let mut due = self.due.lock();
            *due = Some(due.map_or(moment, |known| known.min(moment)));
        }
        self.notify();
    }

    /// What the task waits for may have changed.
    pub(super) fn notify(&self) {
        self.changed.notify_one();
    }

    /// Resolves after a signal. Cancel safe.
    pub(crate) async fn notified(&self) {
        self.changed.notified().await;
    }

    /// When the next request is due, if that was said since the last call.
    pub(crate) fn take_due(&self) -> Option<Instant> {
        self.due.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_earliest_moment_is_due_and_is_kept_until_it_is_taken() {
        let signal = WakeSignal::default();
        assert_eq!(signal.take_due(), None);
        let soon = Instant::ORIGIN + Duration::from_secs(1);
        for moment in [soon + Duration::from_secs(1), soon, soon + Duration::from_secs(2)] {
            signal.request_by(moment);
        }
        signal.notified().await;
        assert_eq!((signal.take_due(), signal.take_due()), (Some(soon), None));
    }

    #[tokio::test]
    async fn a_signal_without_a_moment_changes_none() {
        let signal = WakeSignal::default();
        signal.request_by(Instant::ORIGIN);
        signal.notify();
        signal.notified().await;
        assert_eq!(signal.take_due(), Some(Instant::ORIGIN));
    }
}
