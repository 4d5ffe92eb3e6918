//! Batches of requests to a store.
//!
//! A request that finds none in flight is sent from the thread of its caller, which does not wait until the driver wakes
//! up. Requests that arrive meanwhile are collected and sent in one batch, and thus in one write. The driver sends it, or a
//! task on the runtime of the callers if that has a connection of its own.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::{self, Handle};
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard, spawn_on};
use crate::exec::driver::Driver;

/// Items that are sent together. Those of different kinds are sent by different calls to the store.
pub(crate) trait ItemBatch: Default + Send + 'static {
    type Item: Send + 'static;

    fn push(&mut self, item: Self::Item);

    fn len(&self) -> usize;

    /// Takes the first items of each kind, at most `most` of them.
    fn take(&mut self, most: usize) -> Self;

    /// Adds the items of `later` after its own.
    fn append(&mut self, later: Self);
}

/// Sends the batches of a [`Batcher`].
pub(crate) trait Flusher: Send + Sync + Sized + 'static {
    type Batch: ItemBatch;

    fn batcher(&self) -> &Batcher<Self::Batch>;

    fn driver(&self) -> &Driver;

    /// Sends `item` from the thread of its caller, as far as that does not wait.
    fn send_one(self: &Arc<Self>, in_flight: InFlight<Self>, item: ItemOf<Self>);

    /// Sends `batch` by one call to the store for each kind, each with an [`InFlight`]. This thread belongs to the runtime
    /// `caller`; without one it is the driver.
    fn send_batch(self: &Arc<Self>, caller: Option<runtime::Id>, batch: Self::Batch);
}

type ItemOf<F> = <<F as Flusher>::Batch as ItemBatch>::Item;

/// The items that wait for the next batch.
#[derive(Debug)]
pub(crate) struct Batcher<B> {
    pending: Mutex<Pending<B>>,
    /// Whether [`RecentBatches`] expects a large batch.
    expects_large: AtomicBool,
}

#[derive(Debug)]
struct Pending<B> {
    of_driver: B,
    /// Whether the driver has been notified.
    is_scheduled: bool,
    /// Each has a task on its runtime that sends it.
    of_callers: Vec<CallerBatch<B>>,
    /// Whether a task of the driver watches them.
    is_watched: bool,
    /// How many items have been sent and not answered yet.
    in_flight: usize,
    recent: RecentBatches,
}

/// What the callers on one runtime have collected.
#[derive(Debug)]
struct CallerBatch<B> {
    runtime: runtime::Id,
    items: B,
    /// With this many items it is sent immediately, unless more are in flight.
    threshold: usize,
    progress: CallerProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallerProgress {
    /// Begun, or sent in part, since the driver last looked.
    New,
    /// The driver has seen it once.
    Late,
    /// The driver has sent it. Until its task runs, requests of this runtime go to the driver.
    Stalled,
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
            // When many answers arrive at the same time, the first request that follows is sent on its own.
            self.is_large &= self.small_in_a_row < 2;
        }
        self.is_large
    }
}

impl<B: Default> Default for Batcher<B> {
    fn default() -> Self {
        let pending = Pending {
            of_driver: B::default(),
            is_scheduled: false,
            of_callers: Vec::new(),
            is_watched: false,
            in_flight: 0,
            recent: RecentBatches::default(),
        };
        Self { pending: Mutex::new(pending), expects_large: AtomicBool::new(false) }
    }
}

/// The maximum number of items of a kind in one batch. A store answers a call as a whole, so the first items of a longer
/// one would wait for the last.
pub(crate) const BATCH: usize = 128;

/// The threshold of the batches of `caller`. A runtime of several threads has the cost of a batch on each of them, and saves it
/// with larger ones.
fn threshold(caller: &Handle) -> usize {
    if caller.metrics().num_workers() == 1 { 8 } else { 32 }
}

/// A batch that its runtime has not sent after one to two of these is sent by the driver.
const LATE: Duration = Duration::from_millis(5);

impl<B: ItemBatch> Batcher<B> {
    /// Sends `item`, or adds it to the next batch. With `is_local` the store answers immediately, and nothing is counted.
    pub(crate) fn push<F: Flusher<Batch = B>>(flusher: &Arc<F>, item: B::Item, is_local: bool) {
        if is_local {
            let in_flight = InFlight { flusher: flusher.clone(), items: 0 };
            return flusher.send_one(in_flight, item);
        }
        let mut pending = flusher.batcher().pending.lock();
        if !pending.is_scheduled && pending.in_flight == 0 {
            pending.in_flight += 1;
            flusher.batcher().note(&mut pending, 1);
            drop(pending);
            let in_flight = InFlight { flusher: flusher.clone(), items: 1 };
            return flusher.send_one(in_flight, item);
        }
        Self::schedule(flusher, pending, item);
    }

    /// Adds `item` to the next batch of the driver.
    pub(crate) fn push_later<F: Flusher<Batch = B>>(flusher: &Arc<F>, item: B::Item) {
        Self::schedule(flusher, flusher.batcher().pending.lock(), item);
    }

    /// Adds `item` to the next batch of `caller`, the runtime of this thread. Returns it if no batch has begun and
    /// `may_begin` returns false.
    ///
    /// The answer to an item that `is_awaited` is awaited on this runtime, so that its tasks go on. After an item that is
    /// not awaited, this thread may block and would read the answer late. Pending items are then sent by the driver.
    pub(crate) fn push_on<F: Flusher<Batch = B>>(
        flusher: &Arc<F>,
        caller: &Handle,
        item: B::Item,
        is_awaited: bool,
        may_begin: impl FnOnce() -> bool,
    ) -> Result<(), B::Item> {
        let runtime = caller.id();
        let mut pending = flusher.batcher().pending.lock();
        if pending.of_caller(runtime).is_none() {
            drop(pending);
            if !may_begin() {
                return Err(item);
            }
            pending = flusher.batcher().pending.lock();
        }
        // Another thread of the runtime may have begun it meanwhile.
        if pending.of_caller(runtime).is_some() {
            return Self::add(flusher, pending, runtime, item, is_awaited);
        }
        let (threshold, progress) = (threshold(caller), CallerProgress::New);
        let mut batch = CallerBatch { runtime, items: B::default(), threshold, progress };
        batch.items.push(item);
        pending.of_callers.push(batch);
        let was_watched = std::mem::replace(&mut pending.is_watched, true);
        drop(pending);
        if !was_watched {
            flusher.driver().spawn(Self::watch(flusher.clone()));
        }
        let flusher = Arc::downgrade(flusher);
        let flush = CallerFlush { flusher, runtime, process: Process::current(), is_done: false };
        spawn_on(caller, flush.run());
        Ok(())
    }

    /// Adds `item` to the batch that `runtime` has begun, or returns it if the runtime does not send.
    ///
    /// A batch of as many items as are in flight is sent immediately: the store works on it while further tasks run.
    /// Otherwise tasks that lock in a loop end up in one batch, and all wait for the store, and then the store waits for
    /// all.
    fn add<F: Flusher<Batch = B>>(
        flusher: &Arc<F>,
        mut pending: MutexGuard<'_, Pending<B>>,
        runtime: runtime::Id,
        item: B::Item,
        is_awaited: bool,
    ) -> Result<(), B::Item> {
        let in_flight = pending.in_flight;
        let Some(batch) = pending.of_caller(runtime) else { return Err(item) };
        batch.push(item)?;
        if !is_awaited || batch.items.len() < batch.threshold.max(in_flight) {
            return Ok(());
        }
        let batch = flusher.batcher().take_from(&mut pending, Some(runtime));
        drop(pending);
        if let Some(batch) = batch {
            flusher.send_batch(Some(runtime), batch);
        }
        Ok(())
    }

    fn schedule<F: Flusher<Batch = B>>(
        flusher: &Arc<F>,
        mut pending: MutexGuard<'_, Pending<B>>,
        item: B::Item,
    ) {
        pending.of_driver.push(item);
        Self::schedule_driver(flusher, pending);
    }

    fn schedule_driver<F: Flusher<Batch = B>>(
        flusher: &Arc<F>,
        mut pending: MutexGuard<'_, Pending<B>>,
    ) {
        if !std::mem::replace(&mut pending.is_scheduled, true) {
            drop(pending);
            let flush = ScheduledFlush { flusher: flusher.clone(), is_done: false };
            flusher.driver().spawn(flush.run());
        }
    }

    /// Moves to the driver the batches that their runtimes do not send. All threads of such a runtime are blocked, or the
    /// thread that has the task is. Ends when there is none left to watch.
    async fn watch<F: Flusher<Batch = B>>(flusher: Arc<F>) {
        loop {
            sleep(LATE).await;
            let mut pending = flusher.batcher().pending.lock();
            let (mut is_needed, mut is_late) = (false, false);
            let Pending { of_driver, of_callers, .. } = &mut *pending;
            for batch in of_callers {
                match batch.progress {
                    CallerProgress::New => batch.progress = CallerProgress::Late,
                    CallerProgress::Late => {
                        batch.progress = CallerProgress::Stalled;
                        of_driver.append(std::mem::take(&mut batch.items));
                        is_late = true;
                    }
                    CallerProgress::Stalled => continue,
                }
                is_needed = true;
            }
            if !is_needed {
                pending.is_watched = false;
                return;
            }
            if is_late {
                Self::schedule_driver(&flusher, pending);
            }
        }
    }

    /// The task that sends the batch of `runtime` has been dropped, because the runtime ends.
    fn move_to_driver<F: Flusher<Batch = B>>(flusher: &Arc<F>, runtime: runtime::Id) {
        let mut pending = flusher.batcher().pending.lock();
        let Some(at) = pending.position(runtime) else { return };
        let batch = pending.of_callers.swap_remove(at);
        pending.of_driver.append(batch.items);
        Self::schedule_driver(flusher, pending);
    }

    /// Whether the next request belongs in a batch, because a large one is expected. That costs less for each of its items.
    pub(crate) fn prefers_batch(&self) -> bool {
        self.expects_large.load(Ordering::Relaxed)
    }

    fn note(&self, pending: &mut Pending<B>, count: usize) {
        let expects_large = pending.recent.note(count);
        if expects_large != self.expects_large.load(Ordering::Relaxed) {
            self.expects_large.store(expects_large, Ordering::Relaxed);
        }
    }

    /// The next batch of the runtime `caller`, or of the driver. Without any, the next item schedules a flush again.
    fn take_from(&self, pending: &mut Pending<B>, caller: Option<runtime::Id>) -> Option<B> {
        let at = match caller {
            None => None,
            Some(caller) => Some(pending.position(caller)?),
        };
        let items = match at {
            None => &mut pending.of_driver,
            Some(at) => &mut pending.of_callers[at].items,
        };
        let count = items.len();
        let batch = (count > 0).then(|| items.take(BATCH));
        if count > 0 {
            self.note(pending, count);
        }
        match at {
            None => pending.is_scheduled = batch.is_some(),
            Some(at) if batch.is_none() => drop(pending.of_callers.swap_remove(at)),
            Some(at) => pending.of_callers[at].progress = CallerProgress::New,
        }
        batch
    }

    fn clear(&self) {
        let mut pending = self.pending.lock();
        pending.is_scheduled = false;
        let items = std::mem::take(&mut pending.of_driver);
        drop(pending);
        // Their drop may push new items.
        drop(items);
    }
}

impl<B: ItemBatch> Pending<B> {
    /// What the callers on `runtime` have collected, if they have begun a batch.
    fn of_caller(&mut self, runtime: runtime::Id) -> Option<&mut CallerBatch<B>> {
        self.position(runtime).map(|at| &mut self.of_callers[at])
    }

    fn position(&self, runtime: runtime::Id) -> Option<usize> {
        self.of_callers.iter().position(|batch| batch.runtime == runtime)
    }
}

impl<B: ItemBatch> CallerBatch<B> {
    /// Adds `item`, or returns it if the runtime does not send.
    fn push(&mut self, item: B::Item) -> Result<(), B::Item> {
        if self.progress == CallerProgress::Stalled {
            return Err(item);
        }
        self.items.push(item);
        Ok(())
    }
}

/// The items of one call in flight, until it is dropped.
pub(crate) struct InFlight<F: Flusher> {
    flusher: Arc<F>,
    items: usize,
}

impl<F: Flusher> InFlight<F> {
    pub(crate) fn begin(flusher: &Arc<F>, items: usize) -> Self {
        flusher.batcher().pending.lock().in_flight += items;
        Self { flusher: flusher.clone(), items }
    }
}

impl<F: Flusher> Drop for InFlight<F> {
    fn drop(&mut self) {
        if self.items > 0 {
            self.flusher.batcher().pending.lock().in_flight -= self.items;
        }
    }
}

/// Sends the next batch of the runtime `caller`, or of the driver. Returns whether there was one.
fn send_next<F: Flusher>(flusher: &Arc<F>, caller: Option<runtime::Id>) -> bool {
    let batcher = flusher.batcher();
    let next = batcher.take_from(&mut batcher.pending.lock(), caller);
    let Some(batch) = next else { return false };
    flusher.send_batch(caller, batch);
    true
}

/// The driver's task that sends batches until nothing is pending. Dropped before that, because the driver's runtime ends, it
/// drops the pending items.
struct ScheduledFlush<F: Flusher> {
    flusher: Arc<F>,
    is_done: bool,
}

impl<F: Flusher> ScheduledFlush<F> {
    async fn run(mut self) {
        while send_next(&self.flusher, None) {
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

/// Returns after the tasks that are ready. Any worker may take the task from the queue, unlike `yield_now`, which waits
/// until its own worker is idle.
async fn to_the_end_of_the_queue() {
    let mut is_queued = false;
    poll_fn(|cx| {
        if is_queued {
            return Poll::Ready(());
        }
        is_queued = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The task that sends the batches of callers on their runtime. Dropped early, it leaves the pending items to the driver.
/// On a runtime that is not polled, it keeps no pool alive.
struct CallerFlush<F: Flusher> {
    flusher: Weak<F>,
    runtime: runtime::Id,
    process: Process,
    is_done: bool,
}

impl<F: Flusher> CallerFlush<F> {
    async fn run(mut self) {
        loop {
            // Tasks that are ready add their requests first.
            to_the_end_of_the_queue().await;
            let Some(flusher) = self.flusher.upgrade() else { break };
            if !send_next(&flusher, Some(self.runtime)) {
                break;
            }
        }
        self.is_done = true;
    }
}

impl<F: Flusher> Drop for CallerFlush<F> {
    fn drop(&mut self) {
        // In a forked child another thread may have locked the mutex at the fork.
        if !self.is_done
            && self.process.is_current()
            && let Some(flusher) = self.flusher.upgrade()
        {
            Batcher::move_to_driver(&flusher, self.runtime);
        }
    }
}

#[cfg(test)]
mod tests;
