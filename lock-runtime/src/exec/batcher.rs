//! Batches of requests to a store.
//!
//! A request that finds none in flight is sent from the thread of its caller, which does not wait until the driver wakes
//! up. Requests that arrive meanwhile are collected, and the driver sends them in one batch, so in one write.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use tokio::task::yield_now;

use crate::base::sync::{Mutex, MutexGuard};
use crate::exec::driver::Driver;

/// Sends the items of a [`Batcher`].
pub(crate) trait Flusher: Send + Sync + Sized + 'static {
    type Item: Send + 'static;

    fn batcher(&self) -> &Batcher<Self::Item>;

    fn driver(&self) -> &Driver;

    /// Sends `item` from the thread of its caller, as far as that does not wait.
    fn send_one(self: &Arc<Self>, in_flight: InFlight<Self>, item: Self::Item);

    /// Sends `batch` by one call to the store, from the driver. Its items are of one kind.
    fn send_batch(self: &Arc<Self>, in_flight: InFlight<Self>, batch: Vec<Self::Item>);

    /// The kind of `item`, below [`KINDS`]. Items of different kinds are sent by different calls.
    fn kind(item: &Self::Item) -> usize;
}

/// How many kinds of items there are.
const KINDS: usize = 2;

/// The items that wait for the next batch.
#[derive(Debug)]
pub(crate) struct Batcher<T> {
    pending: Mutex<Pending<T>>,
    /// What [`RecentBatches`] expects.
    is_busy: AtomicBool,
    /// Counts the answers of [`prefers_batch`](Self::prefers_batch) while it is busy.
    in_batches: AtomicU32,
}

#[derive(Debug)]
struct Pending<T> {
    /// By kind.
    items: [Vec<T>; KINDS],
    /// Whether the driver has been notified.
    is_scheduled: bool,
    in_flight: usize,
    recent: RecentBatches,
}

/// Expects the next batch to be as large as recent ones.
#[derive(Debug, Default)]
struct RecentBatches {
    is_large: bool,
    small_in_a_row: u8,
}

impl RecentBatches {
    /// From this many items on, a batch costs less than a request for each item.
    const LARGE: usize = 4;

    /// Notes a batch of `count` items. Returns whether the next one is expected to be large.
    fn note(&mut self, count: usize) -> bool {
        if count >= Self::LARGE {
            *self = Self { is_large: true, small_in_a_row: 0 };
        } else {
            self.small_in_a_row = self.small_in_a_row.saturating_add(1);
            // When many answers arrive at once, the first request that follows is sent alone.
            self.is_large &= self.small_in_a_row < 2;
        }
        self.is_large
    }
}

impl<T> Default for Batcher<T> {
    fn default() -> Self {
        let pending = Pending {
            items: Default::default(),
            is_scheduled: false,
            in_flight: 0,
            recent: RecentBatches::default(),
        };
        Self {
            pending: Mutex::new(pending),
            is_busy: AtomicBool::new(false),
            in_batches: AtomicU32::new(0),
        }
    }
}

/// The most items of one batch. A store answers a call as a whole, so the first items of a longer one would wait for
/// the last.
const BATCH: usize = 128;

impl<T: Send + 'static> Batcher<T> {
    /// Sends `item`, or adds it to the next batch. With `is_local` the store answers at once, and nothing is counted.
    pub(crate) fn push<F: Flusher<Item = T>>(flusher: &Arc<F>, item: T, is_local: bool) {
        if is_local {
            let in_flight = InFlight { flusher: flusher.clone(), is_counted: false };
            return flusher.send_one(in_flight, item);
        }
        let mut pending = flusher.batcher().pending();
        if !pending.is_scheduled && pending.in_flight == 0 {
            pending.in_flight += 1;
            flusher.batcher().note(&mut pending, 1);
            drop(pending);
            let in_flight = InFlight { flusher: flusher.clone(), is_counted: true };
            return flusher.send_one(in_flight, item);
        }
        Self::schedule(flusher, pending, item);
    }

    /// Adds `item` to the next batch.
    pub(crate) fn push_later<F: Flusher<Item = T>>(flusher: &Arc<F>, item: T) {
        Self::schedule(flusher, flusher.batcher().pending(), item);
    }

    fn schedule<F: Flusher<Item = T>>(
        flusher: &Arc<F>,
        mut pending: MutexGuard<'_, Pending<T>>,
        item: T,
    ) {
        pending.items[F::kind(&item)].push(item);
        if !std::mem::replace(&mut pending.is_scheduled, true) {
            drop(pending);
            let flush = ScheduledFlush { flusher: flusher.clone(), is_done: false };
            flusher.driver().spawn(flush.run());
        }
    }

    /// Whether the next request belongs into a batch, because a large one is expected, which costs less for each of its
    /// items. One in 64 does not, so that the connection of its caller is not taken for idle.
    pub(crate) fn prefers_batch(&self) -> bool {
        self.is_busy.load(Ordering::Relaxed)
            && !self.in_batches.fetch_add(1, Ordering::Relaxed).is_multiple_of(64)
    }

    fn note(&self, pending: &mut Pending<T>, count: usize) {
        let is_busy = pending.recent.note(count);
        if is_busy != self.is_busy.load(Ordering::Relaxed) {
            self.is_busy.store(is_busy, Ordering::Relaxed);
        }
    }

    /// The next batch of each kind. Without any, the next item schedules a flush again.
    fn take(&self) -> Option<[Vec<T>; KINDS]> {
        let mut pending = self.pending();
        let count: usize = pending.items.iter().map(Vec::len).sum();
        if count > 0 {
            self.note(&mut pending, count);
        }
        pending.is_scheduled = pending.items.iter().any(|items| !items.is_empty());
        pending.is_scheduled.then(|| pending.items.each_mut().map(take_batch))
    }

    fn clear(&self) {
        let mut pending = self.pending();
        pending.is_scheduled = false;
        let items = std::mem::take(&mut pending.items);
        drop(pending);
        // Their drop may push new items.
        drop(items);
    }

    fn pending(&self) -> MutexGuard<'_, Pending<T>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take_batch<T>(items: &mut Vec<T>) -> Vec<T> {
    if items.len() <= BATCH {
        return std::mem::take(items);
    }
    let rest = items.split_off(BATCH);
    std::mem::replace(items, rest)
}

/// One call in flight, until it is dropped.
pub(crate) struct InFlight<F: Flusher> {
    flusher: Arc<F>,
    is_counted: bool,
}

impl<F: Flusher> InFlight<F> {
    pub(crate) fn begin(flusher: &Arc<F>) -> Self {
        flusher.batcher().pending().in_flight += 1;
        Self { flusher: flusher.clone(), is_counted: true }
    }
}

impl<F: Flusher> Drop for InFlight<F> {
    fn drop(&mut self) {
        if self.is_counted {
            self.flusher.batcher().pending().in_flight -= 1;
        }
    }
}

/// The task that sends batches until nothing is pending. Dropped before that, because the driver's runtime ends, it
/// drops the pending items.
struct ScheduledFlush<F: Flusher> {
    flusher: Arc<F>,
    is_done: bool,
}

impl<F: Flusher> ScheduledFlush<F> {
    async fn run(mut self) {
        while let Some(batches) = self.flusher.batcher().take() {
            for batch in batches.into_iter().filter(|batch| !batch.is_empty()) {
                self.flusher.send_batch(InFlight::begin(&self.flusher), batch);
            }
            // The server works on this batch while the next one is collected.
            yield_now().await;
        }
        self.is_done = true;
    }
}

impl<F: Flusher> Drop for ScheduledFlush<F> {
    fn drop(&mut self) {
        if !self.is_done {
            self.flusher.batcher().clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_batches_are_expected_until_two_in_a_row_are_small() {
        let mut recent = RecentBatches::default();
        let mut expected = |counts: &[usize]| -> Vec<bool> {
            counts.iter().map(|count| recent.note(*count)).collect()
        };
        assert_eq!(expected(&[1, 3, 2]), [false; 3]);
        assert_eq!(expected(&[4, 1, 63, 1, 63, 3]), [true; 6]);
        assert_eq!(expected(&[1, 1, 128, 1, 1]), [false, false, true, true, false]);
    }
}
