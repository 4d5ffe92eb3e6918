//! Things that are due at some moment, and a wait for the next of them.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use tokio::sync::Notify;

use crate::base::clock::{Clock, Instant};
use crate::base::sync::{Mutex, MutexGuard};

/// Entries by the moment they are due. One task waits for [`due`](Self::due); the others file and remove.
#[derive(Debug)]
pub(crate) struct Deadlines<T> {
    book: Mutex<Book<T>>,
    /// Wakes the waiting task when an entry is due before it would look by itself.
    sooner: Notify,
}

#[derive(Debug)]
struct Book<T> {
    entries: BTreeMap<(Instant, u64), T>,
    /// When the waiting task looks by itself, if it does. It keeps to this also if the entry it was for is
    /// gone by then: a look for nothing is cheaper than waking it for every entry that comes and goes.
    looks_at: Option<Instant>,
}

impl<T> Default for Deadlines<T> {
    fn default() -> Self {
        let book = Book { entries: BTreeMap::new(), looks_at: None };
        Self { book: Mutex::new(book), sooner: Notify::new() }
    }
}

impl<T> Deadlines<T> {
    /// Files `entry`; `id` tells it from others of the same moment.
    pub(crate) fn file(&self, at: Instant, id: u64, entry: T) {
        let mut book = self.book();
        book.entries.insert((at, id), entry);
        if book.looks_at.is_none_or(|looks_at| at < looks_at) {
            book.looks_at = Some(at);
            self.sooner.notify_one();
        }
    }

    pub(crate) fn remove(&self, at: Instant, id: u64) {
        let entry = self.book().entries.remove(&(at, id));
        drop(entry);
    }

    pub(crate) fn take_until(&self, moment: Instant) -> Vec<T> {
        let mut book = self.book();
        let later = book.entries.split_off(&(moment, u64::MAX));
        std::mem::replace(&mut book.entries, later).into_values().collect()
    }

    /// Waits until an entry may be due.
    pub(crate) async fn due(&self, clock: Clock) {
        loop {
            let next = {
                let mut book = self.book();
                book.looks_at = book.entries.first_key_value().map(|(&(at, _), _)| at);
                book.looks_at
            };
            match next {
                None => self.sooner.notified().await,
                Some(at) => tokio::select! {
                    () = clock.sleep_until(at) => return,
                    () = self.sooner.notified() => {}
                },
            }
        }
    }

    fn book(&self) -> MutexGuard<'_, Book<T>> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
