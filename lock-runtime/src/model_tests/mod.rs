//! All that meets at a lock, in tens of thousands of orders: those who wait, hold, release, give up, lose
//! the lock and shut down.
//!
//! Shuttle runs each scene on one thread and decides at every mutex and every await who is next. Clocks
//! stand still, so that no timer frees anybody: whoever is not woken is stuck for good, and that fails the test.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shuttle::future::{block_on, yield_now};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner, thread};
use tokio::sync::Notify;

use self::model_store::Server;
use crate::api::guard::LockGuard;
use crate::api::pool::LockPool;
use crate::backend::Owner;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::options::Wait;
use crate::base::sync::scheduler;
use crate::lock::acquire::run;

mod model_store;

const KEY: Key = Key::from_static("k");
const BEFORE: Key = Key::from_static("before");
const BEHIND: Key = Key::from_static("z");

/// What happens in a scene.
#[derive(Clone, Copy, Debug)]
struct Scene {
    store: Store,
    waiters: usize,
    /// How many of the waiters may give up.
    cancels: usize,
    /// How often somebody deletes the key.
    deletes: usize,
    /// Whether somebody has the lock from the beginning, and holds until all are served or have given up.
    /// If its key is deleted it does not cancel_margin.
    clings: bool,
    /// Whether waiters differ in what they spec for, so that not everybody can hand on to everybody.
    mixed: bool,
    /// How many more want this key and others.
    pairs: usize,
    /// How often requests for several keys give back what is kept for them.
    gives_way: usize,
    /// Whether holders of the key spec for the one before it, too.
    nests: bool,
    shuts_down: bool,
    hands_on: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// `memory://`, which answers on the caller's thread.
    InPlace,
    /// A server with a line, and so many pools on it.
    Remote(usize),
}

/// What is wanted together with the key, in the order of the keys.
#[derive(Clone, Copy, Debug)]
enum Pair {
    Before,
    Behind,
    Both,
}

const PLAIN: Scene = Scene {
    store: Store::InPlace,
    waiters: 3,
    cancels: 0,
    deletes: 0,
    clings: false,
    mixed: false,
    pairs: 0,
    gives_way: 0,
    nests: false,
    shuts_down: false,
    hands_on: true,
};

/// Plays `scene` in so many schedules, half of them picked at random, half with few preemptions.
fn explore(scene: Scene, schedules: usize) {
    /// As many share a runtime.
    const CHUNK: usize = 1_000;
    let times = std::env::var("LOCK_SCHEDULES").ok().and_then(|times| times.parse().ok());
    let chunks = schedules.div_ceil(CHUNK) * times.unwrap_or(1);
    let mut explored = 0;
    let handed_on = Arc::new(AtomicUsize::new(0));
    for chunk in 0..chunks {
        let seed = chunk as u64;
        scheduler::set(|| {
            explored += if chunk % 2 == 0 {
                play(scene, RandomScheduler::new_from_seed(seed, CHUNK), &handed_on)
            } else {
                play(scene, PctScheduler::new_from_seed(seed, 3, CHUNK), &handed_on)
            };
        });
    }
    let handed_on = handed_on.load(Ordering::Relaxed);
    println!("{explored} schedules, handed on {handed_on} times: {scene:?}");
    assert_eq!(explored, chunks * CHUNK);
    assert_eq!(handed_on > explored / 5, scene.hands_on, "handed on {handed_on} times");
}

fn play(scene: Scene, scheduler: impl Scheduler + 'static, handed_on: &Arc<AtomicUsize>) -> usize {
    let handed_on = handed_on.clone();
    in_order_of(scheduler, move || {
        handed_on.fetch_add(act(scene), Ordering::Relaxed);
    })
}

/// Runs `scene` as often as `scheduler` has an order for it; how often that was.
pub(crate) fn in_order_of(
    scheduler: impl Scheduler + 'static,
    scene: impl Fn() + Send + Sync + 'static,
) -> usize {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.failure_persistence = FailurePersistence::None;
    Runner::new(scheduler, config).run(scene)
}

/// Plays it once; how often the lock was handed on.
fn act(scene: Scene) -> usize {
    let server = Arc::new(Server::default());
    let pools: Vec<_> = match scene.store {
        Store::InPlace => vec![connect(LockPool::builder("memory://"), scene)],
        Store::Remote(pools) => {
            (0..pools).map(|_| connect(LockPool::with_backend(server.connect()), scene)).collect()
        }
    };
    let floor = Arc::new(Floor {
        server: server.clone(),
        is_safe: scene.deletes == 0,
        on: Mutex::default(),
    });
    let clinging = scene.clings.then(|| {
        let guard = block_on(pools[0].lock(KEY).acquire()).unwrap();
        floor.enter(&guard);
        guard
    });
    let mut actors = Vec::new();
    for n in 0..scene.waiters + scene.pairs {
        let pool = pools[n % pools.len()].clone();
        let cancel = (n < scene.cancels).then(|| Arc::new(Notify::new()));
        if let Some(cancel) = cancel.clone() {
            actors.push(thread::spawn(move || {
                a_while();
                cancel.notify_one();
            }));
        }
        let floor = floor.clone();
        let pair =
            n.checked_sub(scene.waiters).map(|n| [Pair::Before, Pair::Behind, Pair::Both][n % 3]);
        actors.push(thread::spawn(move || {
            block_on(wait_and_hold(scene, &pool, pair, cancel, &floor));
        }));
    }
    for _ in 0..scene.deletes {
        let server = server.clone();
        actors.push(thread::spawn(move || {
            a_while();
            server.delete(&KEY);
        }));
    }
    for n in 0..scene.gives_way {
        let pool = pools[n % pools.len()].clone();
        actors.push(thread::spawn(move || {
            a_while();
            give_way(&pool);
        }));
    }
    if scene.shuts_down {
        let pool = pools[0].clone();
        actors.push(thread::spawn(move || {
            a_while();
            block_on(pool.shutdown(Duration::ZERO));
        }));
    }
    for actor in actors {
        actor.join().unwrap();
    }
    if let Some(guard) = clinging {
        if scene.deletes == 0 {
            let other = &pools[1].core();
            block_on(other.tracker.idle());
            assert!(other.queue.is_empty(), "the line stays for nobody");
        }
        floor.leave(&guard);
        drop(guard);
    }
    nothing_is_left(&pools, &server);
    // Nor is anybody in the way of those who come later.
    for pool in &pools {
        match block_on(pool.lock(KEY).wait(Wait::Forever).acquire()) {
            Ok(guard) => block_on(guard.release()).unwrap(),
            Err(error) => assert!(scene.shuts_down, "{error}"),
        }
    }
    nothing_is_left(&pools, &server);
    floor.on.lock().unwrap().handed_on
}

fn nothing_is_left(pools: &[LockPool], server: &Server) {
    // What arrives last may lead to something.
    for _ in 0..2 {
        for pool in pools {
            block_on(pool.core().tracker.idle());
        }
        block_on(server.settled());
    }
    for pool in pools {
        // The last lease ends just before its line does. Were a line left, shuttle would run out of steps.
        while !pool.core().queue.is_empty() {
            thread::yield_now();
        }
    }
    assert!(server.is_empty(), "the store holds what nobody owns: {server:?}");
}

/// So that what comes does not always come first.
fn a_while() {
    for _ in 0..thread_rng().gen_range(0..60) {
        thread::yield_now();
    }
}

/// The time is over for which requests of `pool` for several keys keep some of them.
fn give_way(pool: &LockPool) {
    let core = pool.core();
    run::pass_on(core, core.queue.end_all_reservations());
}

/// Takes the key before the one that is held. Clocks stand still, so it sees to it that the others give way.
async fn nested(pool: &LockPool) {
    let acquiring = pool.lock(BEFORE).wait(Wait::Forever).fencing(false).acquire();
    let giving_way = async {
        loop {
            give_way(pool);
            yield_now().await;
        }
    };
    tokio::select! {
        biased;
        guard = acquiring => drop(guard),
        () = giving_way => {}
    }
}

fn connect(builder: crate::api::pool::PoolBuilder, scene: Scene) -> LockPool {
    let slice = if scene.hands_on { Duration::from_millis(5) } else { Duration::ZERO };
    block_on(builder.on_current_runtime().local_handoff_limit(slice).connect()).unwrap()
}

/// One who waits, unless told to give up, holds for a moment, and lets go in one of the possible ways.
async fn wait_and_hold(
    scene: Scene,
    pool: &LockPool,
    pair: Option<Pair>,
    cancel: Option<Arc<Notify>>,
    floor: &Floor,
) {
    let keys = match pair {
        None => vec![KEY],
        Some(Pair::Behind) => vec![KEY, BEHIND],
        Some(Pair::Before) => vec![BEFORE, KEY],
        Some(Pair::Both) => vec![BEFORE, KEY, BEHIND],
    };
    let mut request = pool.lock_all(keys).wait(Wait::Forever).fencing(false);
    if scene.mixed {
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
        Err(error) if scene.shuts_down || (scene.deletes > 0 && error.is_lost()) => return,
        Err(error) => panic!("{error}"),
    };
    floor.enter(&guard);
    for _ in 0..thread_rng().gen_range(0..8) {
        yield_now().await;
    }
    if scene.nests && pair.is_none() {
        nested(pool).await;
    }
    floor.leave(&guard);
    let view = guard.borrowed();
    match thread_rng().gen_range(0..3) {
        0 => drop(guard),
        1 => drop(guard.release()),
        _ => {
            let released = guard.release().await;
            assert!(released.is_ok() || scene.deletes > 0 || scene.shuts_down, "{released:?}");
        }
    }
    assert!(!view.is_held(), "held by one who let go");
}

/// Where those are who hold the lock.
struct Floor {
    server: Arc<Server>,
    /// Whether nobody takes the lock away from its holder.
    is_safe: bool,
    on: Mutex<Crowd>,
}

#[derive(Default)]
struct Crowd {
    here: Vec<LockGuard>,
    last_fence: Option<(Owner, Fence)>,
    last_owner: Option<Owner>,
    handed_on: usize,
}

impl Floor {
    fn enter(&self, guard: &LockGuard) {
        let owner = guard.lease().owner;
        let mut crowd = self.on.lock().unwrap_or_else(PoisonError::into_inner);
        for other in &crowd.here {
            let theirs = other.lease().owner;
            // One of them was robbed, and has not heard of it.
            let robbed = [theirs, owner].iter().any(|one| self.server.was_taken_away(one));
            let is_robbed = theirs != owner && robbed;
            assert!(!other.is_held() || !guard.is_held() || is_robbed, "two hold the lock");
        }
        if let Some(fence) = guard.fence() {
            if let Some((whose, last)) = crowd.last_fence
                && (self.is_safe || whose == owner)
            {
                assert!(fence > last, "{fence} after {last}");
            }
            crowd.last_fence = Some((owner, fence));
        }
        crowd.handed_on += usize::from(crowd.last_owner.replace(owner) == Some(owner));
        crowd.here.push(guard.borrowed());
    }

    fn leave(&self, guard: &LockGuard) {
        let mut crowd = self.on.lock().unwrap_or_else(PoisonError::into_inner);
        let at = crowd.here.iter().position(|other| Arc::ptr_eq(other.lease(), guard.lease()));
        let view = crowd.here.swap_remove(at.unwrap());
        drop(crowd);
        drop(view);
    }
}

macro_rules! scenes {
    ($($name:ident: $schedules:literal of { $($what:tt)* })*) => { $(
        #[test]
        fn $name() {
            explore(Scene { $($what)*, ..PLAIN }, $schedules);
        }
    )* };
}

scenes! {
    in_place_some_give_up: 3_000 of { waiters: 4, cancels: 3 }
    in_place_nothing_is_handed_on: 2_000 of { cancels: 2, hands_on: false }
    in_place_some_want_two_keys: 3_000 of { waiters: 4, cancels: 2, pairs: 2 }
    in_place_some_who_want_two_keys_give_up: 2_000 of { waiters: 2, cancels: 5, pairs: 3, gives_way: 2 }
    in_place_holders_ask_for_more: 2_000 of { waiters: 2, pairs: 3, nests: true, hands_on: false }
    in_place_two_keys_and_the_pool_shuts_down: 2_000 of { waiters: 2, cancels: 1, pairs: 2, gives_way: 1, shuts_down: true, hands_on: false }
    in_place_the_pool_shuts_down: 3_000 of { cancels: 1, shuts_down: true }
    remote_some_give_up: 4_000 of { store: Store::Remote(1), waiters: 4, cancels: 3, mixed: true }
    remote_two_pools: 4_000 of { store: Store::Remote(2), waiters: 5, cancels: 3 }
    remote_two_pools_nothing_is_handed_on: 4_000 of { store: Store::Remote(2), waiters: 4, cancels: 2, hands_on: false }
    remote_all_give_up: 4_000 of { store: Store::Remote(2), waiters: 4, cancels: 4, mixed: true }
    remote_all_give_up_while_one_holds: 3_000 of { store: Store::Remote(2), waiters: 4, cancels: 4, clings: true, hands_on: false }
    remote_some_want_two_keys: 4_000 of { store: Store::Remote(2), cancels: 3, pairs: 2 }
    remote_holders_ask_for_more: 2_000 of { store: Store::Remote(2), waiters: 2, pairs: 2, nests: true, hands_on: false }
    remote_some_give_way: 2_000 of { store: Store::Remote(2), waiters: 2, cancels: 3, pairs: 3, gives_way: 3, hands_on: false }
    remote_two_keys_and_three_pools: 3_000 of { store: Store::Remote(3), waiters: 3, cancels: 1, pairs: 3, hands_on: false }
    remote_some_who_want_two_keys_give_up: 4_000 of { store: Store::Remote(2), waiters: 2, cancels: 5, pairs: 3, hands_on: false }
    remote_two_keys_and_a_pool_shuts_down: 4_000 of { store: Store::Remote(2), waiters: 2, cancels: 1, pairs: 2, shuts_down: true, hands_on: false }
    remote_one_of_two_keys_is_deleted: 4_000 of { store: Store::Remote(2), waiters: 2, cancels: 1, pairs: 2, deletes: 2, hands_on: false }
    remote_the_key_is_deleted: 4_000 of { store: Store::Remote(2), waiters: 4, cancels: 1, deletes: 2, mixed: true }
    remote_the_key_is_deleted_unnoticed: 4_000 of { store: Store::Remote(2), waiters: 4, cancels: 1, deletes: 1, clings: true }
    remote_one_pool_shuts_down: 4_000 of { store: Store::Remote(2), waiters: 4, cancels: 1, shuts_down: true, mixed: true }
}
