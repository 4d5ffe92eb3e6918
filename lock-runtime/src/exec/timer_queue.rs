//! Entries by the time they are due, and a wait for the next one.

use std::collections::BTreeMap;

use tokio::sync::Notify;

use crate::base::clock::{Clock, Instant};
use crate::base::sync::Mutex;

/// Entries by the moment they are due, on a clock that counts suspend. One task waits for [`due`](Self::due); any task
/// inserts and removes.
#[derive(Debug)]
pub(crate) struct TimerQueue<T> {
    timers: Mutex<Timers<T>>,
    /// Wakes the waiting task when an entry is due before its next check.
    rescheduled: Notify,
}

#[derive(Debug)]
struct Timers<T> {
    entries: BTreeMap<(Instant, u64), T>,
    /// When the waiting task checks on its own. It does so even if the entry is removed by then. An unneeded check is
    /// cheaper than a wake-up for every entry that comes and goes.
    next_check: Option<Instant>,
}

impl<T> Default for TimerQueue<T> {
    fn default() -> Self {
        let timers = Timers { entries: BTreeMap::new(), next_check: None };
        Self { timers: Mutex::new(timers), rescheduled: Notify::new() }
    }
}

impl<T> TimerQueue<T> {
    /// Inserts `entry`, due at `at`. `id` distinguishes it from others of the same moment.
    pub(crate) fn insert(&self, at: Instant, id: u64, entry: T) {
        let mut timers = self.timers.lock();
        timers.entries.insert((at, id), entry);
        if timers.next_check.is_none_or(|next_check| at < next_check) {
            timers.next_check = Some(at);
            self.rescheduled.notify_one();
        }
    }

    /// Replaces the entry `former` of this moment by `entry`, under the number `id`. Returns the new one if the former is not here.
    pub(crate) fn replace(&self, at: Instant, former: u64, id: u64, entry: T) -> Result<(), T> {
        let mut timers = self.timers.lock();
        let Some(removed) = timers.entries.remove(&(at, former)) else { return Err(entry) };
        timers.entries.insert((at, id), entry);
        drop(timers);
        drop(removed);
        Ok(())
    }

    /// Removes the entry, if it is here.
    pub(crate) fn remove(&self, at: Instant, id: u64) {
        let entry = self.timers.lock().entries.remove(&(at, id));
        drop(entry);
    }

    /// Takes the entries that are due at `moment`.
    pub(crate) fn take_until(&self, moment: Instant) -> Vec<T> {
        let mut timers = self.timers.lock();
        let later = timers.entries.split_off(&(moment, u64::MAX));
        std::mem::replace(&mut timers.entries, later).into_values().collect()
    }

    /// Waits until an entry may be due.
    pub(crate) async fn due(&self, clock: Clock) {
        loop {
            let next = {
                let mut timers = self.timers.lock();
                timers.next_check = timers.entries.first_key_value().map(|(&(at, _), _)| at);
                timers.next_check
            };
            match next {
                None => self.rescheduled.notified().await,
                Some(at) => tokio::select! {
                    () = clock.sleep_until(at) => return,
                    () = self.rescheduled.notified() => {}
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_earlier_entry_wakes_the_waiting_task_and_a_later_one_does_not() {
        let clock = Clock::runtime();
        let (queue, began) = (TimerQueue::default(), clock.now());
        let at = |secs| began + Duration::from_secs(secs);
        queue.insert(at(10), 1, "late");
        let mut due = pin!(queue.due(clock));
        assert!(due.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        queue.insert(at(20), 2, "later");
        queue.insert(at(1), 3, "early");
        due.await;
        assert_eq!(clock.now(), at(1));
        assert_eq!(queue.take_until(at(1)), ["early"]);
        queue.due(clock).await;
        assert_eq!((clock.now(), queue.take_until(at(30))), (at(10), vec!["late", "later"]));
    }
}
