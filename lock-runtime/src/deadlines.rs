//! Things that are due at some moment, and a wait for the next of them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::clock::{Clock, Instant};

/// Entries by the moment they are due. One task waits for [`due`](Self::due); the others file and remove.
#[derive(Debug)]
pub(crate) struct Deadlines<T> {
    entries: Mutex<BTreeMap<(Instant, u64), T>>,
    /// Wakes the waiting task when an entry becomes the next one.
    sooner: Notify,
}

impl<T> Default for Deadlines<T> {
    fn default() -> Self {
        Self { entries: Mutex::new(BTreeMap::new()), sooner: Notify::new() }
    }
}

impl<T> Deadlines<T> {
    /// Files `entry`; `id` tells it from others of the same moment.
    pub(crate) fn file(&self, at: Instant, id: u64, entry: T) {
        let mut entries = self.entries();
        let is_next = entries.first_key_value().is_none_or(|(next, _)| at < next.0);
        entries.insert((at, id), entry);
        if is_next {
            self.sooner.notify_one();
        }
    }

    pub(crate) fn remove(&self, at: Instant, id: u64) {
        self.entries().remove(&(at, id));
    }

    pub(crate) fn take_until(&self, moment: Instant) -> Vec<T> {
        let mut entries = self.entries();
        let later = entries.split_off(&(moment, u64::MAX));
        std::mem::replace(&mut *entries, later).into_values().collect()
    }

    /// Waits until an entry is due.
    pub(crate) async fn due(&self, clock: Clock) {
        loop {
            let next = self.entries().first_key_value().map(|(&(at, _), _)| at);
            match next {
                None => self.sooner.notified().await,
                Some(at) => tokio::select! {
                    () = clock.sleep_until(at) => return,
                    () = self.sooner.notified() => {}
                },
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<(Instant, u64), T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
