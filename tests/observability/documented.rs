//! Every event and span of the guide occurs with the fields that the guide names, and nothing else does.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Duration;

use axum::response::IntoResponse;
use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, Operation};
use lock_runtime::{ErrorKind, LockError, LockOrder, LockPool, distributed_lock};
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::sentinel::FakeSentinel;
use lock_tests::{RedisServer, eventually, eventually_async, in_own_process};

use crate::faulty::faulty_pool;
use crate::guide::{names, rows};
use crate::seen::{Seen, Traced, all_events, all_spans, block, watch};

/// In the keys of all calls.
const CANARY: &str = "canary-of-a-key";
const PASSWORD: &str = "canary-of-a-password";

#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s")]
async fn settle(pool: &LockPool, id: &str, takes: Duration) -> Result<(), LockError> {
    tokio::time::sleep(takes).await;
    Ok(())
}

/// Would wait for itself.
#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s")]
async fn settle_twice(pool: &LockPool, id: &str) -> Result<(), LockError> {
    settle(pool, id, Duration::ZERO).await
}

#[distributed_lock(key = "shared", pool = "redis")]
async fn share() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "shared", pool = "redis")]
async fn share_too() -> Result<(), LockError> {
    share().await
}

async fn installed(name: &str, pool: LockPool) -> LockPool {
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

/// Makes every event occur.
async fn all_of_it() {
    watch();
    let server = RedisServer::builder().password(PASSWORD).start();
    let builder = LockPool::builder(server.url()).max_waiters(1).lock_order(LockOrder::Warn);
    let pool = installed("redis", builder.connect().await.unwrap()).await;
    // Handed off, and renewed.
    let (one, two) =
        tokio::join!(settle(&pool, CANARY, ms(1_500)), settle(&pool, CANARY, Duration::ZERO));
    one.and(two).unwrap();
    Traced::of("redis").await_event("handed off").await;
    // Contended by another process, and a conflict.
    let order = |text: &str| format!("{text}:{CANARY}");
    server.cli(&["SET", &order("order"), "another", "PX", "60000"]);
    let waits = pool.lock(order("order")).wait(ms(300)).acquire().await;
    assert_eq!(waits.unwrap_err().kind(), ErrorKind::Conflict);
    // A full queue, and a wait that is given up.
    let guard = pool.lock(order("held")).ttl(ms(3_000)).acquire().await.unwrap();
    {
        let mut waiter = pin!(pool.lock(order("held")).wait(DEADLINE).acquire());
        assert!(poll_once(waiter.as_mut()).await.is_none());
        let error = pool.lock(order("held")).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QueueFull);
    }
    Traced::of("redis").await_event("cancelled").await;
    assert_eq!(share_too().await.unwrap_err().kind(), ErrorKind::WouldDeadlock);
    // Refused calls, and their answers, with keys in the errors.
    drop(pool.lock("").acquire().await.unwrap_err().into_response());
    let twice = settle_twice(&pool, &format!("{CANARY}-2")).await.unwrap_err();
    assert!(twice.kind() == ErrorKind::WouldDeadlock && twice.key().is_some(), "{twice}");
    assert!(twice.into_response().status().is_server_error());
    let reserved = pool.lock(format!("lock_runtime:{CANARY}")).template("reserved").acquire().await;
    let reserved = reserved.unwrap_err();
    assert_eq!(reserved.kind(), ErrorKind::InvalidKey);
    drop(reserved.into_response());
    let lost = {
        server.cli(&["DEL", &order("held")]);
        guard.lost().await
    };
    drop(lost.into_response());
    drop(guard);
    Traced::of("redis").await_event("lost").await;
    // By force.
    let guard = pool.lock(order("forced")).acquire().await.unwrap();
    let holder = pool.inspect(order("forced")).await.unwrap().holder.unwrap();
    assert!(pool.force_release(order("forced"), &holder).await.unwrap());
    Traced::of("redis").await_event("released by force").await;
    drop(guard);
    // Nested in opposite orders.
    let stock = || pool.lock(order("stock")).template("stock:<id>");
    let orders = pool.lock(order("order-3")).template("order:<order>");
    orders.run(stock().run(async {})).await.unwrap().unwrap();
    let id = format!("{CANARY}-4");
    stock().run(settle(&pool, &id, Duration::ZERO)).await.unwrap().unwrap();
    // A failed renewal and release.
    let (faulty, faults) = faulty_pool("faulty").await;
    faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
    faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    let guard = faulty.lock(CANARY).ttl(ms(1_000)).acquire().await.unwrap();
    Traced::of("faulty").await_event("renewed").await;
    guard.release().await.unwrap();
    faults.plan(Operation::Acquire, Fault::Fail(FailureKind::Rejected));
    assert!(faulty.lock(CANARY).acquire().await.unwrap_err().is_backend());
    // An outage: one warning in a second, for all locks.
    let (outage, faults) = faulty_pool("outage").await;
    let lock = |key| outage.lock(order(key)).ttl(ms(1_000)).acquire();
    let guards = (lock("a").await.unwrap(), lock("b").await.unwrap());
    faults.always(Fault::Fail(FailureKind::NotApplied));
    Traced::of("outage").await_events("not renewed yet", 2).await;
    drop(guards);
    Traced::of("outage").await_events("not released", 2).await;
    outage.shutdown(Duration::ZERO).await;
    // Stays with the process for a moment.
    pool.lock(order("lingers")).linger(ms(20)).run(async {}).await.unwrap();
    Traced::of("redis").await_event("lingers").await;
    // Without scripts.
    let plain = format!("{}?scripts=off", server.url());
    drop(LockPool::connect(&plain).await.unwrap());
    // Sentinels name another master.
    let (former, master) = (RedisServer::start(), RedisServer::start());
    let sentinel = FakeSentinel::start(&former);
    let moved = LockPool::connect(&FakeSentinel::url(&[&sentinel])).await.unwrap();
    sentinel.say(&master, 1);
    eventually_async(DEADLINE, "the new master is used", async || {
        let address = |server: &RedisServer| format!("127.0.0.1:{}", server.port());
        let is_told = |event: &Seen| {
            event.message() == "the master has moved"
                && event.fields["former"] == address(&former)
                && event.fields["server"] == address(&master)
        };
        all_events().iter().any(is_told)
    })
    .await;
    moved.shutdown(Duration::ZERO).await;
    // Down and back.
    server.kill();
    Traced::of("redis").await_event("the store is down").await;
    server.restart();
    Traced::of("redis").await_event("the store is back").await;
    // More events than the subscriber takes.
    block(true);
    for _ in 0..3_000 {
        faulty.lock(CANARY).acquire().await.unwrap().release().await.unwrap();
    }
    block(false);
    eventually_async(DEADLINE, "dropped events are reported", async || {
        drop(faulty.lock(CANARY).acquire().await.unwrap());
        all_events().iter().any(|event| event.message().starts_with("events were dropped"))
    })
    .await;
    faulty.shutdown(Duration::ZERO).await;
    pool.shutdown(Duration::ZERO).await;
}

#[test]
fn the_guide_names_every_event_and_span_with_its_fields() {
    in_own_process(
        concat!(module_path!(), "::the_guide_names_every_event_and_span_with_its_fields"),
        || {
            current_thread().block_on(all_of_it());
            compare_events();
            compare_spans();
            let all = format!("{:?}{:?}", all_events(), all_spans());
            for canary in [CANARY, PASSWORD] {
                assert!(!all.contains(canary), "{}", around(&all, canary));
            }
        },
    );
}

fn compare_events() {
    let mut documented = BTreeMap::new();
    for row in rows(&["event", "event about a store", "other event"]) {
        let levels: BTreeSet<_> = row.cells[1].split(", ").map(str::to_uppercase).collect();
        documented.insert(row.code(), (levels, names(&row.cells[2])));
    }
    let common = names("`lock` `name` `pool`");
    let of_locks: BTreeSet<_> = rows(&["event"]).iter().map(|row| row.code()).collect();
    let (mut seen, mut declared) = (BTreeMap::new(), BTreeMap::<_, BTreeSet<_>>::new());
    for event in all_events() {
        let (levels, fields): &mut (BTreeSet<String>, BTreeSet<String>) =
            seen.entry(event.message().to_owned()).or_default();
        levels.insert(event.level.to_string());
        let is_of_lock = of_locks.contains(event.message());
        let is_own = |name: &String| name != "message" && !(is_of_lock && common.contains(name));
        let recorded: BTreeSet<_> = event.fields.keys().map(|&name| name.to_owned()).collect();
        if is_of_lock {
            assert!(recorded.contains("lock") && recorded.contains("pool"), "{event:?}");
        }
        fields.extend(recorded.into_iter().filter(is_own));
        let all = event.declared.iter().map(|&name| name.to_owned());
        declared.entry(event.message().to_owned()).or_default().extend(all.filter(is_own));
    }
    assert_eq!(seen, documented);
    // A field that was absent in all of them may be recorded in a program.
    for (message, fields) in declared {
        assert_eq!(fields, documented[&message].1, "{message}");
    }
    let explained: BTreeSet<_> = rows(&["field"]).iter().flat_map(|row| names(&row.name)).collect();
    let used = documented.into_values().flat_map(|(_, fields)| fields).chain(common);
    let of_spans = rows(&["span"]).iter().flat_map(|row| names(&row.cells[2])).collect::<Vec<_>>();
    assert_eq!(used.chain(of_spans).collect::<BTreeSet<_>>(), explained);
}

fn compare_spans() {
    let own = || all_spans().into_iter().filter(|span| span.target == "lock_runtime");
    // The last ones end with what the driver does behind the shutdown.
    eventually(DEADLINE, "all spans are closed", || own().all(|span| span.is_closed));
    let documented: BTreeMap<_, _> = rows(&["span"])
        .into_iter()
        .map(|row| (row.code(), (row.cells[1].to_uppercase(), names(&row.cells[2]))))
        .collect();
    let mut seen = BTreeMap::new();
    for span in own() {
        let declared: BTreeSet<_> = span.declared.iter().map(|&name| name.to_owned()).collect();
        let (level, recorded): &mut (String, BTreeSet<String>) =
            seen.entry(span.name.to_owned()).or_default();
        *level = span.level.to_string();
        recorded.extend(span.fields.keys().map(|&name| name.to_owned()));
        // A field that is absent here may be recorded in a program.
        assert_eq!(documented[span.name].1, declared);
    }
    assert_eq!(seen, documented);
}

fn around<'a>(text: &'a str, canary: &str) -> &'a str {
    let at = text.find(canary).unwrap();
    &text[at.saturating_sub(300)..(at + 100).min(text.len())]
}
