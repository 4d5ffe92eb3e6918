//! Locks that calls nest in opposite orders are named, without any deadlock.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lock_runtime::{
    CallSite, LockError, LockOrder, LockOrderInversion, LockPool, LockedAt, call_sites,
    distributed_lock, lock_order_inversions,
};
use lock_tests::prelude::*;
use tracing::Level;
use tracing::subscriber::NoSubscriber;

use crate::seen::{Traced, watch};

const EVENT: &str = "locks are nested in opposite orders";

trait Inner: Future<Output = Result<(), LockError>> + Send {}

impl<F: Future<Output = Result<(), LockError>> + Send> Inner for F {}

#[distributed_lock(key = "lo-order:<id>", pool = pool)]
async fn order(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "lo-stock:<id>", pool = pool)]
async fn stock(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "lo-bill:<id>", pool = pool)]
async fn bill(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

/// Other names of the placeholders, the keys of two orders.
#[distributed_lock(keys = ["lo-order:<from>", "lo-order:<to>"], pool = pool)]
async fn merge(pool: &LockPool, from: u64, to: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "lo-order:<id>", pool = pool, reentrant = true)]
async fn order_again(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "lo-stock:<id>", pool = pool, wait = "0s")]
async fn try_stock(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = key, pool = pool)]
async fn computed(pool: &LockPool, key: String, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

async fn nothing() -> Result<(), LockError> {
    Ok(())
}

/// A pool with a name, that of its test.
async fn installed(name: &str) -> LockPool {
    let pool = with_order(LockOrder::Warn).await;
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

async fn with_order(lock_order: LockOrder) -> LockPool {
    LockPool::builder("memory://").lock_order(lock_order).connect().await.unwrap()
}

fn inversions(pool: &str) -> Vec<LockOrderInversion> {
    let mut all = lock_order_inversions();
    all.retain(|it| it.stacks.iter().flatten().any(|lock| lock.pool == pool));
    all
}

/// The names of the functions of each stack.
fn functions(inversion: &LockOrderInversion) -> Vec<Vec<&str>> {
    inversion.stacks.iter().map(|stack| stack.iter().map(function).collect()).collect()
}

fn function(lock: &LockedAt) -> &str {
    lock.name.as_deref().unwrap().rsplit("::").next().unwrap()
}

fn site(function: &str) -> CallSite {
    let mut sites = call_sites();
    sites.retain(|site| site.module() == module_path!() && site.function() == function);
    sites[0]
}

#[tokio::test]
async fn functions_that_nest_in_opposite_orders_are_named_with_both_stacks() {
    watch();
    let pool = installed("opposite").await;
    // Never at the same time, and never the same key: nothing can deadlock here.
    order(&pool, 1, stock(&pool, 2, nothing())).await.unwrap();
    assert_eq!(inversions("opposite"), []);
    stock(&pool, 3, order(&pool, 4, nothing())).await.unwrap();
    let found = inversions("opposite");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [["stock", "order"], ["order", "stock"]]);
    for lock in found[0].stacks.iter().flatten() {
        let site = site(function(lock));
        assert_eq!((lock.file, lock.line), (site.file(), site.line()));
        assert_eq!((lock.template, &*lock.pool), (site.template(), "opposite"));
    }
    // Once, however often it happens.
    stock(&pool, 3, order(&pool, 4, nothing())).await.unwrap();
    order(&pool, 1, stock(&pool, 2, nothing())).await.unwrap();
    assert_eq!(inversions("opposite").len(), 1);
    let traced = Traced::of("opposite").await_event(EVENT).await;
    let event = traced.one(EVENT);
    let shown = |function| {
        let site = site(function);
        format!("{} ({}:{})", site.name(), site.file(), site.line())
    };
    let [one, other] = [shown("stock"), shown("order")];
    event.has(&[
        ("lock", "lo-order:<id>"),
        ("name", concat!(module_path!(), "::order")),
        ("stack", &format!("{one} > {other}")),
        ("opposite", &format!("{other} > {one}")),
    ]);
    assert_eq!(event.level, Level::WARN);
    let text = found[0].to_string();
    assert_eq!(text, format!("{EVENT}: {one} > {other}; {other} > {one}"));
}

#[tokio::test]
async fn a_cycle_of_three_is_found_with_all_stacks() {
    let pool = installed("three").await;
    order(&pool, 1, stock(&pool, 1, nothing())).await.unwrap();
    stock(&pool, 1, bill(&pool, 1, nothing())).await.unwrap();
    assert_eq!(inversions("three"), []);
    bill(&pool, 1, order(&pool, 1, nothing())).await.unwrap();
    let found = inversions("three");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [["bill", "order"], ["order", "stock"], ["stock", "bill"]]);
}

#[tokio::test]
async fn a_stack_has_all_locks_around_a_call() {
    let pool = installed("deep").await;
    order(&pool, 1, bill(&pool, 1, stock(&pool, 1, nothing()))).await.unwrap();
    stock(&pool, 1, order(&pool, 1, nothing())).await.unwrap();
    let found = inversions("deep");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [vec!["stock", "order"], vec!["order", "bill", "stock"]]);
}

#[tokio::test]
async fn a_call_that_never_gets_its_lock_counts() {
    let pool = installed("refused").await;
    order(&pool, 1, stock(&pool, 1, nothing())).await.unwrap();
    let held = pool.lock("lo-order:1").acquire().await.unwrap();
    let waits = stock(&pool, 1, order(&pool, 1, nothing()));
    assert!(tokio::time::timeout(ms(50), waits).await.is_err(), "it waits, and is given up");
    held.release().await.unwrap();
    assert_eq!(inversions("refused").len(), 1);
}

#[tokio::test]
async fn keys_count_by_their_templates_whatever_their_placeholders_are_called() {
    let pool = installed("shapes").await;
    merge(&pool, 1, 2, stock(&pool, 1, nothing())).await.unwrap();
    stock(&pool, 1, order(&pool, 7, nothing())).await.unwrap();
    let found = inversions("shapes");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [["stock", "order"], ["merge", "stock"]]);
}

#[tokio::test]
async fn a_computed_key_counts_by_its_function() {
    let pool = installed("computed").await;
    let key = |text: &str| text.to_owned();
    computed(&pool, key("a"), stock(&pool, 1, nothing())).await.unwrap();
    stock(&pool, 1, computed(&pool, key("b"), nothing())).await.unwrap();
    let found = inversions("computed");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [["stock", "computed"], ["computed", "stock"]]);
}

#[tokio::test]
async fn two_locks_of_one_function_are_named_if_the_order_of_their_keys_differs() {
    let pool = installed("transfer").await;
    order(&pool, 1, order(&pool, 2, nothing())).await.unwrap();
    order(&pool, 2, order(&pool, 5, nothing())).await.unwrap();
    assert_eq!(inversions("transfer"), [], "in the order of the keys");
    order(&pool, 4, order(&pool, 3, nothing())).await.unwrap();
    order(&pool, 6, order(&pool, 3, nothing())).await.unwrap();
    let found = inversions("transfer");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(functions(&found[0]), [["order", "order"], ["order", "order"]]);
}

#[tokio::test]
async fn requests_with_a_template_count_with_the_place_that_gives_it() {
    let pool = installed("requests").await;
    let one = |n: u64| pool.lock(format!("lo-one:{n}")).template("lo-one:<n>");
    let first = line!() - 1;
    let two = |n: u64| pool.lock(format!("lo-two:{n}")).template("lo-two:<n>");
    one(1).run(two(1).run(async {})).await.unwrap().unwrap();
    two(2).run(one(2).acquire()).await.unwrap().unwrap().release().await.unwrap();
    let found = inversions("requests");
    assert_eq!(found.len(), 1, "{found:#?}");
    let [stack, _] = &found[0].stacks[..] else { panic!("{found:#?}") };
    assert_eq!((stack[1].template, &stack[1].name), ("lo-one:<n>", &None));
    assert_eq!((stack[1].file, stack[1].line), (file!(), first));
}

#[tokio::test]
async fn what_cannot_deadlock_is_not_named() {
    let pool = installed("innocent").await;
    // One order, also by way of a third lock.
    for _ in 0..2 {
        order(&pool, 1, stock(&pool, 2, bill(&pool, 3, nothing()))).await.unwrap();
        order(&pool, 1, bill(&pool, 3, nothing())).await.unwrap();
    }
    // One call for several keys, in any order.
    merge(&pool, 1, 2, nothing()).await.unwrap();
    merge(&pool, 2, 1, nothing()).await.unwrap();
    // One attempt waits for nothing.
    bill(&pool, 1, try_stock(&pool, 1, nothing())).await.unwrap();
    // A call that passes through.
    let again = order_again(&pool, 1, nothing());
    order(&pool, 1, bill(&pool, 1, again)).await.unwrap();
    // A task of its own does not hold the locks of the body.
    let elsewhere = pool.clone();
    let spawning = async move {
        let task = tokio::spawn(async move { order(&elsewhere, 9, nothing()).await });
        joined("the task", task).await
    };
    stock(&pool, 1, spawning).await.unwrap();
    // Side by side in one body.
    let side_by_side = async {
        let yields = || async {
            tokio::task::yield_now().await;
            Ok(())
        };
        let (one, two) = tokio::join!(bill(&pool, 5, yields()), stock(&pool, 5, yields()));
        one.and(two)
    };
    order(&pool, 1, side_by_side).await.unwrap();
    // A request without a template has no kind.
    pool.lock("anything").run(order(&pool, 1, nothing())).await.unwrap().unwrap();
    order(&pool, 1, pool.lock("anything").run(async {})).await.unwrap();
    assert_eq!(inversions("innocent"), []);
}

#[tokio::test]
async fn locks_of_other_pools_are_other_locks() {
    let [one, other] = [with_order(LockOrder::Warn).await, with_order(LockOrder::Warn).await];
    let before = inversions("unnamed").len();
    order(&one, 1, stock(&other, 1, nothing())).await.unwrap();
    stock(&one, 1, order(&other, 1, nothing())).await.unwrap();
    order(&one, 1, stock(&one, 1, nothing())).await.unwrap();
    assert_eq!(inversions("unnamed").len(), before);
    stock(&other, 1, order(&one, 1, nothing())).await.unwrap();
    assert_eq!(inversions("unnamed").len(), before + 1);
}

#[tokio::test]
async fn a_pool_may_leave_the_check_out() {
    let pool = with_order(LockOrder::Off).await;
    lock_runtime::install("off", pool.clone()).unwrap();
    order(&pool, 1, stock(&pool, 2, nothing())).await.unwrap();
    stock(&pool, 3, order(&pool, 4, nothing())).await.unwrap();
    assert_eq!(inversions("off"), []);
}

#[tokio::test]
async fn the_call_panics_where_that_is_asked_for() {
    let pool = with_order(LockOrder::Panic).await;
    lock_runtime::install("panics-in-order", pool.clone()).unwrap();
    order(&pool, 1, stock(&pool, 2, nothing())).await.unwrap();
    let panicking = pool.clone();
    let task =
        tokio::spawn(async move { stock(&panicking, 3, order(&panicking, 4, nothing())).await });
    let panic = within(DEADLINE, "the task", task).await.unwrap_err().into_panic();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.starts_with(EVENT) && text.contains("lock_order::order ("), "{text}");
    // Both are free.
    for key in ["lo-stock:3", "lo-order:4"] {
        let free = pool.lock(key).wait(DEADLINE).acquire().await.unwrap();
        free.release().await.unwrap();
    }
    assert_eq!(inversions("panics-in-order").len(), 1);
}

#[distributed_lock(key = "lo-aisle:<id>", pool = pool)]
async fn aisle(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "lo-shelf:<id>", pool = pool)]
async fn shelf(pool: &LockPool, id: u64, inner: impl Inner) -> Result<(), LockError> {
    inner.await
}

/// Whether a shelf around an aisle panics.
async fn shelf_first_panics(pool: &LockPool) -> bool {
    let pool = pool.clone();
    let task = tokio::spawn(async move { shelf(&pool, 3, aisle(&pool, 4, nothing())).await });
    match within(DEADLINE, "the task", task).await {
        Ok(ended) => {
            ended.unwrap();
            false
        }
        Err(error) => {
            let panic = error.into_panic();
            assert!(panic.downcast_ref::<String>().unwrap().starts_with(EVENT));
            true
        }
    }
}

#[tokio::test]
async fn the_call_panics_also_where_a_pool_of_its_name_has_reported_the_order() {
    watch();
    let of_shelves = |name: &str| {
        let all = inversions(name).into_iter();
        all.filter(|it| it.to_string().contains("lock_order::shelf")).count()
    };
    for name in ["reported-before", "unnamed"] {
        let mut unnamed = Vec::new();
        for lock_order in [LockOrder::Warn, LockOrder::Panic, LockOrder::Panic] {
            let pool = with_order(lock_order).await;
            if name != "unnamed" {
                lock_runtime::install(name, pool.clone()).unwrap();
            }
            aisle(&pool, 1, shelf(&pool, 2, nothing())).await.unwrap();
            for _ in 0..2 {
                let panics = shelf_first_panics(&pool).await;
                assert_eq!(panics, lock_order == LockOrder::Panic, "{name}");
            }
            if name == "unnamed" {
                unnamed.push(pool);
            } else {
                pool.shutdown(Duration::ZERO).await;
            }
        }
        assert_eq!(of_shelves(name), 1, "{name}");
    }
    let traced = Traced::of("reported-before").await_event(EVENT).await;
    assert_eq!(traced.all(EVENT).len(), 1);
}

/// Without a lock around a call the check has nothing to do, on or off.
#[tokio::test]
async fn a_call_that_is_not_nested_costs_no_allocation() {
    // Events of the pool allocate as soon as another test has installed the subscriber.
    let _unobserved = tracing::subscriber::set_default(NoSubscriber::default());
    let mut counts = Vec::new();
    for lock_order in [LockOrder::Off, LockOrder::Warn] {
        let pool = with_order(lock_order).await;
        let cycle = async || {
            let request = pool.lock("lo-cost").template("lo-cost").wait(Duration::from_secs(1));
            request.run(async {}).await.unwrap();
        };
        cycle().await;
        let mut least = u64::MAX;
        for _ in 0..10 {
            least = least.min(allocations(cycle()).await);
        }
        counts.push(least);
    }
    assert_eq!(counts[0], counts[1], "off, on");
}

/// How many allocations this thread makes in the polls of `cycle`.
async fn allocations(cycle: impl Future<Output = ()>) -> u64 {
    let mut count = 0;
    let mut cycle = pin!(cycle);
    poll_fn(|cx| {
        let mut polled = Poll::Pending;
        let measured = allocation_counter::measure(|| polled = cycle.as_mut().poll(cx));
        count += measured.count_total;
        polled
    })
    .await;
    count
}
