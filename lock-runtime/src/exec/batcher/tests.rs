use tokio::runtime::{Builder, Runtime};
use tokio::time::advance;

use super::*;

#[derive(Default)]
struct Units(usize);

impl ItemBatch for Units {
    type Item = ();

    fn push(&mut self, (): ()) {
        self.0 += 1;
    }

    fn len(&self) -> usize {
        self.0
    }

    fn take(&mut self, most: usize) -> Self {
        let taken = self.0.min(most);
        self.0 -= taken;
        Self(taken)
    }

    fn append(&mut self, later: Self) {
        self.0 += later.0;
    }
}

/// A store that answers nothing on its own.
struct SilentStore {
    batcher: Batcher<Units>,
    driver: Driver,
    sent: Mutex<Vec<InFlight<Self>>>,
}

impl SilentStore {
    fn new() -> Arc<Self> {
        let driver = Driver::current().unwrap();
        Arc::new(Self { batcher: Batcher::default(), driver, sent: Mutex::default() })
    }

    fn driven_by(runtime: &Runtime) -> Arc<Self> {
        let _context = runtime.enter();
        Self::new()
    }

    fn push(self: &Arc<Self>, count: usize) {
        for _ in 0..count {
            self.push_on(&Handle::current()).unwrap();
        }
    }

    fn push_on(self: &Arc<Self>, caller: &Handle) -> Result<(), ()> {
        Batcher::push_on(self, caller, (), true, || true)
    }

    /// Without a batch of a caller.
    fn push_alone(self: &Arc<Self>) {
        Batcher::push(self, (), false);
    }

    /// The sizes of the batches that were sent, by the answers to them.
    fn answer_all(&self) -> Vec<usize> {
        let sent = std::mem::take(&mut *self.sent.lock());
        sent.iter().map(|in_flight| in_flight.items).collect()
    }
}

impl Flusher for SilentStore {
    type Batch = Units;

    fn batcher(&self) -> &Batcher<Units> {
        &self.batcher
    }

    fn driver(&self) -> &Driver {
        &self.driver
    }

    fn send_one(self: &Arc<Self>, in_flight: InFlight<Self>, (): ()) {
        self.sent.lock().push(in_flight);
    }

    fn send_batch(self: &Arc<Self>, _: Option<runtime::Id>, batch: Units) {
        let in_flight = InFlight::begin(self, batch.0);
        self.sent.lock().push(in_flight);
    }
}

/// A runtime that is polled only by `block_on`. Its time is paused.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// Polls the tasks of this runtime several times. Ends even if one of them does not.
async fn run_tasks() {
    for _ in 0..10 {
        yield_now().await;
    }
}

/// One more look of the driver at the batches of callers.
async fn pass_the_time_of_one_look() {
    run_tasks().await;
    advance(LATE + Duration::from_millis(1)).await;
    run_tasks().await;
}

/// With paused time, and a driver on this runtime, no batch is late.
#[tokio::test(start_paused = true)]
async fn half_of_the_items_are_sent_while_the_others_are_in_flight() {
    let store = SilentStore::new();
    store.push(7);
    assert!(store.answer_all().is_empty(), "too few");
    store.push(1 + 8 + 16 + 31);
    assert_eq!(store.batcher.pending.lock().in_flight, 8 + 8 + 16);
    // The task of the runtime sends the rest.
    while store.batcher.pending.lock().in_flight < 8 + 8 + 16 + 31 {
        yield_now().await;
    }
    assert_eq!(store.answer_all(), [8, 8, 16, 31]);
    assert_eq!(store.batcher.pending.lock().in_flight, 0);
    store.push(8);
    assert_eq!(store.answer_all(), [8]);
}

#[tokio::test(start_paused = true)]
async fn an_item_that_is_not_awaited_makes_no_thread_send() {
    let store = SilentStore::new();
    for _ in 0..20 {
        Batcher::push_on(&store, &Handle::current(), (), false, || true).unwrap();
    }
    assert!(store.answer_all().is_empty());
    store.push(1);
    assert_eq!(store.answer_all(), [21]);
}

#[tokio::test(start_paused = true)]
async fn no_batch_has_more_items_than_the_limit() {
    let store = SilentStore::new();
    let in_flight = InFlight::begin(&store, 3 * BATCH);
    store.push(3 * BATCH);
    assert_eq!(store.answer_all(), [BATCH]);
    while store.batcher.pending.lock().of_callers.first().is_some_and(|batch| batch.items.0 > 0) {
        yield_now().await;
    }
    assert_eq!(store.answer_all(), [BATCH, BATCH]);
    drop(in_flight);
}

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

#[tokio::test(start_paused = true)]
async fn an_item_is_sent_at_once_unless_others_are_in_flight() {
    let store = SilentStore::new();
    store.push_alone();
    let first = std::mem::take(&mut *store.sent.lock());
    assert_eq!(first.iter().map(|in_flight| in_flight.items).collect::<Vec<_>>(), [1]);
    assert_eq!(store.batcher.pending.lock().in_flight, 1);
    for _ in 0..3 {
        store.push_alone();
    }
    assert!(store.sent.lock().is_empty(), "they wait for the driver");
    run_tasks().await;
    assert_eq!(store.batcher.pending.lock().in_flight, 1 + 3);
    drop(first);
    assert_eq!(store.batcher.pending.lock().in_flight, 3);
    assert_eq!(store.answer_all(), [3]);
    assert_eq!(store.batcher.pending.lock().in_flight, 0);
    store.push_alone();
    assert_eq!(store.answer_all(), [1]);
}

#[tokio::test(start_paused = true)]
async fn the_driver_sends_what_is_pushed_for_later() {
    let store = SilentStore::new();
    Batcher::push_later(&store, ());
    assert!(store.answer_all().is_empty());
    run_tasks().await;
    assert_eq!(store.answer_all(), [1]);
    Batcher::push_later(&store, ());
    store.push_alone();
    assert!(store.answer_all().is_empty(), "the second does not overtake the first");
    run_tasks().await;
    assert_eq!(store.answer_all(), [2]);
}

#[test]
fn a_driver_that_ends_drops_the_pending_items() {
    let driver = runtime();
    let store = SilentStore::driven_by(&driver);
    Batcher::push_later(&store, ());
    drop(driver);
    assert_eq!(store.batcher.pending.lock().of_driver.0, 0);
    assert!(!store.batcher.pending.lock().is_scheduled);
    assert!(store.answer_all().is_empty());
}

#[test]
fn the_driver_sends_the_batch_of_a_late_runtime() {
    let (driver, late) = (runtime(), runtime());
    let store = SilentStore::driven_by(&driver);
    assert_eq!([(); 2].map(|()| store.push_on(late.handle())), [Ok(()); 2]);
    driver.block_on(pass_the_time_of_one_look());
    assert!(store.answer_all().is_empty(), "the batch may be new");
    driver.block_on(pass_the_time_of_one_look());
    assert_eq!(store.answer_all(), [2]);
    assert_eq!(store.push_on(late.handle()), Err(()), "the runtime does not send");
    driver.block_on(pass_the_time_of_one_look());
    assert!(!store.batcher.pending.lock().is_watched, "nothing is left to watch");

    late.block_on(run_tasks());
    assert_eq!(store.push_on(late.handle()), Ok(()));
    assert!(store.batcher.pending.lock().is_watched);
    late.block_on(run_tasks());
    assert_eq!(store.answer_all(), [1]);
}

#[test]
fn the_driver_sends_only_the_batch_of_the_runtime_that_ends() {
    let (driver, ended, other) = (runtime(), runtime(), runtime());
    let store = SilentStore::driven_by(&driver);
    for caller in [&ended, &other, &other] {
        assert_eq!(store.push_on(caller.handle()), Ok(()));
    }
    drop(ended);
    driver.block_on(run_tasks());
    assert_eq!(store.answer_all(), [1]);
    other.block_on(run_tasks());
    assert_eq!(store.answer_all(), [2]);
    assert!(store.batcher.pending.lock().of_callers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn tasks_that_are_ready_add_to_the_batch_before_it_is_sent() {
    let store = SilentStore::new();
    store.push(1);
    let of_task = store.clone();
    spawn_on(&Handle::current(), async move { of_task.push(1) });
    run_tasks().await;
    assert_eq!(store.answer_all(), [2]);
    assert!(store.batcher.pending.lock().of_callers.is_empty(), "the task of the batch has ended");
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_preferred_after_a_large_one_until_two_items_are_sent_alone() {
    let store = SilentStore::new();
    assert!(!store.batcher.prefers_batch());
    store.push(8);
    assert_eq!(store.answer_all(), [8]);
    assert!(store.batcher.prefers_batch());
    // The task of the batch finds nothing to send.
    run_tasks().await;
    assert!(store.batcher.pending.lock().of_callers.is_empty());
    for is_preferred in [true, false] {
        store.push_alone();
        assert_eq!(store.answer_all(), [1]);
        assert_eq!(store.batcher.prefers_batch(), is_preferred);
    }
}
