//! Runs waiters, holders, releases, cancellations, lost locks and shutdowns in tens of thousands of interleavings.
//!
//! Shuttle runs each scenario on one thread and decides at every mutex and every await which task is next. Clocks
//! stand still, so no timer fires: a task that is not woken hangs forever, and that fails the test.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shuttle::future::{block_on, yield_now};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner, thread};
use tokio::sync::Notify;

use self::model_store::{FirstRefusal, ModelServer};
use crate::api::guard::LockGuard;
use crate::api::pool::LockPool;
use crate::backend::Owner;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::mutex::Mutex;
use crate::base::options::Wait;
use crate::base::sync::scheduler;
use crate::lock::acquire::run;

mod model_store;

const KEY: Key = Key::from_static("k");
const BEFORE: Key = Key::from_static("before");
const AFTER: Key = Key::from_static("z");

/// What happens in one run.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    backend: ModelBackend,
    first_refusal: FirstRefusal,
    waiters: usize,
    /// How many of the waiters may be cancelled.
    cancels: usize,
    /// How many times the key is deleted.
    deletes: usize,
    /// Whether a guard is held from the start until all waiters are served or cancelled.
    /// It does not notice if its key is deleted.
    held_throughout: bool,
    /// Whether requests differ in ttl and fencing, so that not every hand-off is possible.
    mixed: bool,
    /// How many further waiters request this key and others.
    multi_key: usize,
    /// How many times requests for several keys release the keys that they keep.
    back_offs: usize,
    /// Whether holders of the key also request the key before it.
    nests: bool,
    shuts_down: bool,
    hands_off: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelBackend {
    /// `memory://`, which answers on the caller's thread.
    Local,
    /// `memory://name`, with this number of pools.
    Shared(usize),
    /// A server with a wait queue, and this number of pools.
    Remote(usize),
}

/// The keys that are requested together with the key, in the order of the keys.
#[derive(Clone, Copy, Debug)]
enum OtherKeys {
    Before,
    After,
    Both,
}

const PLAIN: Scenario = Scenario {
    backend: ModelBackend::Local,
    first_refusal: FirstRefusal::AskAgain,
    waiters: 3,
    cancels: 0,
    deletes: 0,
    held_throughout: false,
    mixed: false,
    multi_key: 0,
    back_offs: 0,
    nests: false,
    shuts_down: false,
    hands_off: true,
};

/// Runs `scenario` in this number of schedules: half of them random, half with few preemptions.
fn explore(scenario: Scenario, schedules: usize) {
    /// Schedules that share a runtime.
    const CHUNK: usize = 1_000;
    let times = std::env::var("LOCK_SCHEDULES").ok().and_then(|times| times.parse().ok());
    let chunks = schedules.div_ceil(CHUNK) * times.unwrap_or(1);
    let mut explored = 0;
    let handed_off = Arc::new(AtomicUsize::new(0));
    for chunk in 0..chunks {
        let seed = chunk as u64;
        scheduler::set(|| {
            explored += if chunk % 2 == 0 {
                run_schedules(scenario, RandomScheduler::new_from_seed(seed, CHUNK), &handed_off)
            } else {
                run_schedules(scenario, PctScheduler::new_from_seed(seed, 3, CHUNK), &handed_off)
            };
        });
    }
    let handed_off = handed_off.load(Ordering::Relaxed);
    println!("{explored} schedules, handed off {handed_off} times: {scenario:?}");
    assert_eq!(explored, chunks * CHUNK);
    assert_eq!(handed_off > explored / 5, scenario.hands_off, "handed off {handed_off} times");
}

fn run_schedules(
    scenario: Scenario,
    scheduler: impl Scheduler + 'static,
    handed_off: &Arc<AtomicUsize>,
) -> usize {
    let handed_off = handed_off.clone();
    in_order_of(scheduler, move || {
        handed_off.fetch_add(run_once(scenario), Ordering::Relaxed);
    })
}

/// Runs `test` in each schedule of `scheduler`, and returns their number.
pub(crate) fn in_order_of(
    scheduler: impl Scheduler + 'static,
    test: impl Fn() + Send + Sync + 'static,
) -> usize {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.failure_persistence = FailurePersistence::None;
    Runner::new(scheduler, config).run(test)
}

/// Runs the scenario once, and returns the number of hand-offs.
fn run_once(scenario: Scenario) -> usize {
    let server = Arc::new(ModelServer::new(scenario.first_refusal));
    let pools: Vec<_> = match scenario.backend {
        ModelBackend::Local => vec![connect(LockPool::builder("memory://"), scenario)],
        ModelBackend::Shared(pools) => {
            static RUNS: AtomicUsize = AtomicUsize::new(0);
            let url = format!("memory://model-{}", RUNS.fetch_add(1, Ordering::Relaxed));
            (0..pools).map(|_| connect(LockPool::builder(&url), scenario)).collect()
        }
        ModelBackend::Remote(pools) => (0..pools)
            .map(|_| connect(LockPool::with_backend(server.connect()), scenario))
            .collect(),
    };
    let monitor = Arc::new(HoldMonitor {
        server: server.clone(),
        is_safe: scenario.deletes == 0,
        holders: Mutex::default(),
    });
    let held_guard = scenario.held_throughout.then(|| {
        let guard = block_on(pools[0].lock(KEY).acquire()).unwrap();
        monitor.enter(&guard);
        guard
    });
    let mut threads = Vec::new();
    for n in 0..scenario.waiters + scenario.multi_key {
        let pool = pools[n % pools.len()].clone();
        let cancel = (n < scenario.cancels).then(|| Arc::new(Notify::new()));
        if let Some(cancel) = cancel.clone() {
            threads.push(thread::spawn(move || {
                random_delay();
                cancel.notify_one();
            }));
        }
        let monitor = monitor.clone();
        let others = n
            .checked_sub(scenario.waiters)
            .map(|n| [OtherKeys::Before, OtherKeys::After, OtherKeys::Both][n % 3]);
        threads.push(thread::spawn(move || {
            block_on(wait_and_hold(scenario, &pool, others, cancel, &monitor));
        }));
    }
    for _ in 0..scenario.deletes {
        let server = server.clone();
        threads.push(thread::spawn(move || {
            random_delay();
            server.delete(&KEY);
        }));
    }
    for n in 0..scenario.back_offs {
        let pool = pools[n % pools.len()].clone();
        threads.push(thread::spawn(move || {
            random_delay();
            back_off(&pool);
        }));
    }
    if scenario.shuts_down {
        let pool = pools[0].clone();
        threads.push(thread::spawn(move || {
            random_delay();
            block_on(pool.shutdown(Duration::ZERO));
        }));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    if let Some(guard) = held_guard {
        if scenario.deletes == 0 {
            let other = &pools[1].core();
            block_on(other.tracker.idle());
            assert!(other.queue.is_empty(), "an empty queue is removed");
        }
        monitor.leave(&guard);
        drop(guard);
    }
    nothing_is_left(&pools, &server);
    // Later requests are not blocked.
    for pool in &pools {
        match block_on(pool.lock(KEY).wait(Wait::Forever).acquire()) {
            Ok(guard) => block_on(guard.release()).unwrap(),
            Err(error) => assert!(scenario.shuts_down, "{error}"),
        }
    }
    nothing_is_left(&pools, &server);
    monitor.holders.lock().handed_off
}

fn nothing_is_left(pools: &[LockPool], server: &ModelServer) {
    // The last message may cause another one.
    for _ in 0..2 {
        for pool in pools {
            block_on(pool.core().tracker.idle());
        }
        block_on(server.settled());
    }
    for pool in pools {
        // The queue is removed just after the last lease ends. If one remained, shuttle would run out of steps.
        while !pool.core().queue.is_empty() {
            thread::yield_now();
        }
    }
    assert!(server.is_empty(), "the store contains a lock without an owner: {server:?}");
}

/// Varies the order of events.
fn random_delay() {
    for _ in 0..thread_rng().gen_range(0..60) {
        thread::yield_now();
    }
}

/// Makes multi-key requests of `pool` release the keys that they keep, as their time limit does.
fn back_off(pool: &LockPool) {
    let core = pool.core();
    run::pass_on(core, core.queue.end_all_reservations());
}

/// Acquires the key before the held one. Clocks stand still, so it makes the other requests back off.
async fn nested(pool: &LockPool) {
    let acquiring = pool.lock(BEFORE).wait(Wait::Forever).fencing(false).acquire();
    let backing_off = async {
        loop {
            back_off(pool);
            yield_now().await;
        }
    };
    tokio::select! {
        biased;
        guard = acquiring => drop(guard),
        () = backing_off => {}
    }
}

fn connect(builder: crate::api::pool::PoolBuilder, scenario: Scenario) -> LockPool {
    let slice = if scenario.hands_off { Duration::from_millis(5) } else { Duration::ZERO };
    block_on(builder.on_current_runtime().local_handoff_limit(slice).connect()).unwrap()
}

/// Waits until granted or cancelled, holds for a moment, and releases in one of the possible ways.
async fn wait_and_hold(
    scenario: Scenario,
    pool: &LockPool,
    others: Option<OtherKeys>,
    cancel: Option<Arc<Notify>>,
    monitor: &HoldMonitor,
) {
    let keys = match others {
        None => vec![KEY],
        Some(OtherKeys::After) => vec![KEY, AFTER],
        Some(OtherKeys::Before) => vec![BEFORE, KEY],
        Some(OtherKeys::Both) => vec![BEFORE, KEY, AFTER],
    };
    let mut request = pool.lock_all(keys).wait(Wait::Forever).fencing(false);
    if scenario.mixed {
        let ttl = if thread_rng().gen_bool(0.3) { 20 } else { 30 };
        let fencing = thread_rng().gen_bool(0.6);
        request = request.ttl(Duration::from_secs(ttl)).fencing(fencing);
    }
    let cancelled = async {
        match &cancel {
            Some(cancel) => cancel.notified().await,
            None => std::future::pending().await,
        }
    };
    let guard = tokio::select! {
        biased;
        () = cancelled => return,
        guard = request.acquire() => guard,
    };
    let guard = match guard {
        Ok(guard) => guard,
        Err(error) if scenario.shuts_down || (scenario.deletes > 0 && error.is_lost()) => return,
        Err(error) => panic!("{error}"),
    };
    monitor.enter(&guard);
    for _ in 0..thread_rng().gen_range(0..8) {
        yield_now().await;
    }
    if scenario.nests && others.is_none() {
        nested(pool).await;
    }
    monitor.leave(&guard);
    let view = guard.borrowed();
    match thread_rng().gen_range(0..3) {
        0 => drop(guard),
        1 => drop(guard.release()),
        _ => {
            let released = guard.release().await;
            assert!(
                released.is_ok() || scenario.deletes > 0 || scenario.shuts_down,
                "{released:?}"
            );
        }
    }
    assert!(!view.is_held(), "a released lock is not held");
}

/// Checks mutual exclusion and fencing tokens of the holders.
struct HoldMonitor {
    server: Arc<ModelServer>,
    /// Whether no key is deleted.
    is_safe: bool,
    holders: Mutex<Holders>,
}

#[derive(Default)]
struct Holders {
    views: Vec<LockGuard>,
    last_fence: Option<(Owner, Fence)>,
    last_owner: Option<Owner>,
    handed_off: usize,
}

impl HoldMonitor {
    fn enter(&self, guard: &LockGuard) {
        let owner = guard.lease().owner;
        let mut holders = self.holders.lock();
        for other in &holders.views {
            let other_owner = other.lease().owner;
            // The key of one of them was deleted, and the holder has not noticed.
            let deleted = [other_owner, owner].iter().any(|one| self.server.was_deleted(one));
            let is_explained = other_owner != owner && deleted;
            assert!(!other.is_held() || !guard.is_held() || is_explained, "two holders at once");
        }
        if let Some(fence) = guard.fence() {
            if let Some((last_owner, last)) = holders.last_fence
                && (self.is_safe || last_owner == owner)
            {
                assert!(fence > last, "{fence} after {last}");
            }
            holders.last_fence = Some((owner, fence));
        }
        holders.handed_off += usize::from(holders.last_owner.replace(owner) == Some(owner));
        holders.views.push(guard.borrowed());
    }

    fn leave(&self, guard: &LockGuard) {
        let mut holders = self.holders.lock();
        let at = holders.views.iter().position(|other| Arc::ptr_eq(other.lease(), guard.lease()));
        let view = holders.views.swap_remove(at.unwrap());
        drop(holders);
        drop(view);
    }
}

macro_rules! scenarios {
    ($($name:ident: $schedules:literal of { $($what:tt)* })*) => { $(
        #[test]
        fn $name() {
            explore(Scenario { $($what)*, ..PLAIN }, $schedules);
        }
    )* };
}

scenarios! {
    local_some_waiters_are_cancelled: 3_000 of { waiters: 4, cancels: 3 }
    local_without_hand_off: 2_000 of { cancels: 2, hands_off: false }
    local_some_requests_have_two_keys: 3_000 of { waiters: 4, cancels: 2, multi_key: 2 }
    local_some_requests_for_two_keys_are_cancelled: 2_000 of { waiters: 2, cancels: 5, multi_key: 3, back_offs: 2 }
    local_holders_request_another_key: 2_000 of { waiters: 2, multi_key: 3, nests: true, hands_off: false }
    local_two_keys_and_the_pool_shuts_down: 2_000 of { waiters: 2, cancels: 1, multi_key: 2, back_offs: 1, shuts_down: true, hands_off: false }
    local_the_pool_shuts_down: 3_000 of { cancels: 1, shuts_down: true }
    shared_two_pools: 3_000 of { backend: ModelBackend::Shared(2), waiters: 5, cancels: 3 }
    shared_two_pools_without_hand_off: 2_000 of { backend: ModelBackend::Shared(2), waiters: 4, cancels: 2, hands_off: false }
    shared_all_waiters_are_cancelled_while_the_lock_is_held: 2_000 of { backend: ModelBackend::Shared(2), waiters: 4, cancels: 4, held_throughout: true, hands_off: false }
    shared_two_keys_and_three_pools: 3_000 of { backend: ModelBackend::Shared(3), waiters: 3, cancels: 2, multi_key: 3, back_offs: 2, hands_off: false }
    shared_holders_request_another_key: 2_000 of { backend: ModelBackend::Shared(2), waiters: 2, multi_key: 2, nests: true, hands_off: false }
    shared_a_pool_shuts_down: 3_000 of { backend: ModelBackend::Shared(2), waiters: 3, cancels: 1, multi_key: 2, shuts_down: true, hands_off: false }
    remote_some_waiters_are_cancelled: 4_000 of { backend: ModelBackend::Remote(1), waiters: 4, cancels: 3, mixed: true }
    remote_two_pools: 4_000 of { backend: ModelBackend::Remote(2), waiters: 5, cancels: 3 }
    remote_two_pools_without_hand_off: 4_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 2, hands_off: false }
    remote_all_waiters_are_cancelled: 4_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 4, mixed: true }
    remote_all_waiters_are_cancelled_while_the_lock_is_held: 3_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 4, held_throughout: true, hands_off: false }
    remote_some_requests_have_two_keys: 4_000 of { backend: ModelBackend::Remote(2), cancels: 3, multi_key: 2 }
    remote_holders_request_another_key: 2_000 of { backend: ModelBackend::Remote(2), waiters: 2, multi_key: 2, nests: true, hands_off: false }
    remote_multi_key_requests_back_off: 2_000 of { backend: ModelBackend::Remote(2), waiters: 2, cancels: 3, multi_key: 3, back_offs: 3, hands_off: false }
    remote_two_keys_and_three_pools: 3_000 of { backend: ModelBackend::Remote(3), waiters: 3, cancels: 1, multi_key: 3, hands_off: false }
    remote_some_requests_for_two_keys_are_cancelled: 4_000 of { backend: ModelBackend::Remote(2), waiters: 2, cancels: 5, multi_key: 3, hands_off: false }
    remote_two_keys_and_a_pool_shuts_down: 4_000 of { backend: ModelBackend::Remote(2), waiters: 2, cancels: 1, multi_key: 2, shuts_down: true, hands_off: false }
    remote_one_of_two_keys_is_deleted: 4_000 of { backend: ModelBackend::Remote(2), waiters: 2, cancels: 1, multi_key: 2, deletes: 2, hands_off: false }
    remote_the_key_is_deleted: 4_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 1, deletes: 2, mixed: true }
    remote_the_key_is_deleted_unnoticed: 4_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 1, deletes: 1, held_throughout: true }
    remote_one_pool_shuts_down: 4_000 of { backend: ModelBackend::Remote(2), waiters: 4, cancels: 1, shuts_down: true, mixed: true }
    first_requests_wait_in_two_pools: 4_000 of { backend: ModelBackend::Remote(2), first_refusal: FirstRefusal::Waits, waiters: 5, cancels: 3 }
    first_requests_wait_without_hand_off: 4_000 of { backend: ModelBackend::Remote(2), first_refusal: FirstRefusal::Waits, waiters: 4, cancels: 2, hands_off: false }
    first_requests_wait_for_one_or_two_keys: 4_000 of { backend: ModelBackend::Remote(2), first_refusal: FirstRefusal::Waits, waiters: 2, cancels: 3, multi_key: 3, hands_off: false }
    first_requests_wait_and_all_are_cancelled: 3_000 of { backend: ModelBackend::Remote(2), first_refusal: FirstRefusal::Waits, waiters: 4, cancels: 4, held_throughout: true, hands_off: false }
    first_requests_wait_and_a_pool_shuts_down: 4_000 of { backend: ModelBackend::Remote(2), first_refusal: FirstRefusal::Waits, waiters: 4, cancels: 1, shuts_down: true, mixed: true }
}
