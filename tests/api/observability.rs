//! The content of tracing events, and what they never contain.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{LockError, LockPool, distributed_lock};
use lock_tests::logs::OnEvent;
use lock_tests::prelude::*;
use lock_tests::{RedisServer, eventually_async};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s")]
async fn settle(pool: &LockPool, id: u64, takes: Duration) -> Result<(), LockError> {
    tokio::time::sleep(takes).await;
    Ok(())
}

#[tokio::test]
async fn acquire_renewal_and_release_are_traced() {
    let server = RedisServer::start();
    let pool = installed("traced", &server).await;
    settle(&pool, 7, ms(1_500)).await.unwrap();
    let traced = Traced::of("traced").await_event("released").await;
    let acquired = traced.one("acquired");
    let name = concat!(module_path!(), "::settle");
    acquired.has(&[("lock", "order:<id>"), ("name", name), ("pool", "traced")]);
    assert!(acquired.number("waited_ms") < 1_500);
    assert_eq!(acquired.fields.get("fence"), None, "none was requested");
    assert_eq!(acquired.level, Level::DEBUG);
    let renewed = traced.all("renewed");
    assert!(!renewed.is_empty(), "after 1 s of 1.5");
    renewed[0].has(&[("lock", "order:<id>"), ("name", name), ("pool", "traced")]);
    assert!((800..3_000).contains(&renewed[0].number("held_ms")), "{:?}", renewed[0]);
    let released = traced.one("released");
    released.has(&[("lock", "order:<id>"), ("name", name), ("was_held", "true")]);
    assert!((1_500..10_000).contains(&released.number("held_ms")), "{released:?}");
    for nothing in ["contended", "lost", "not renewed yet", "not released yet"] {
        assert_eq!(traced.all(nothing).len(), 0, "{nothing}");
    }
    // The value is not in the event.
    assert!(!traced.events.iter().any(|event| format!("{event:?}").contains("order:7")));
}

#[tokio::test]
async fn a_wait_is_traced() {
    let server = RedisServer::start();
    let pool = installed("waits", &server).await;
    server.cli(&["SET", "order:7", "another", "PX", "1500"]);
    let guard = pool.lock("order:7").ttl(ms(5_000)).wait(ms(20_000)).acquire().await.unwrap();
    let fence = guard.fence().unwrap().to_string();
    guard.release().await.unwrap();
    let traced = Traced::of("waits").await_event("released").await;
    let contended = traced.one("contended");
    contended.has(&[("lock", "order:7"), ("pool", "waits")]);
    assert_eq!(contended.fields.get("name"), None, "no function");
    assert!((1..=1_500).contains(&contended.number("expires_in_ms")), "{contended:?}");
    let acquired = traced.one("acquired");
    acquired.has(&[("lock", "order:7"), ("fence", &fence)]);
    assert!((300..20_000).contains(&acquired.number("waited_ms")), "{acquired:?}");
}

/// No lock is held, and none is requested.
#[tokio::test]
async fn the_store_of_an_idle_pool_is_reported_lost_and_back() {
    let server = RedisServer::start();
    drop(installed("idle", &server).await);
    server.kill();
    let traced = Traced::of("idle").await_event("the store is down").await;
    let down = traced.one("the store is down");
    assert_eq!(down.level, Level::WARN);
    assert!(!down.fields["error"].is_empty(), "{down:?}");
    server.restart();
    let traced = traced.await_event("the store is back").await;
    assert!(traced.one("the store is back").number("down_ms") >= 500);
    traced.one("the store is down");
}

/// Also the wait behind a task of the same process, which sends no request.
#[tokio::test]
async fn a_wait_in_the_process_queue_is_traced() {
    let server = RedisServer::start();
    let pool = installed("queue", &server).await;
    let (one, two) = tokio::join!(settle(&pool, 7, ms(250)), settle(&pool, 7, Duration::ZERO));
    one.and(two).unwrap();
    let traced = Traced::of("queue").await_events("released", 1).await;
    traced.one("handed off").has(&[("pool", "queue")]);
    let waits: Vec<u64> =
        traced.all("acquired").iter().map(|event| event.number("waited_ms")).collect();
    // The second one waits for the whole body of the first.
    assert!(waits[0] < waits[1] && (200..10_000).contains(&waits[1]), "{waits:?}");
}

#[tokio::test]
async fn a_loss_is_traced() {
    let server = RedisServer::start();
    let pool = installed("losses", &server).await;
    let guard = pool.lock("order:7").ttl(ms(3_000)).acquire().await.unwrap();
    server.cli(&["DEL", "order:7"]);
    assert!(guard.lost().await.is_lost());
    let traced = Traced::of("losses").await_event("lost").await;
    let lost = traced.one("lost");
    lost.has(&[("lock", "order:7"), ("pool", "losses"), ("reason", "Taken")]);
    assert_eq!(lost.level, Level::WARN);
    assert!(lost.number("held_ms") < 10_000);
    drop(guard);
    Traced::of("losses")
        .await_event("released")
        .await
        .one("released")
        .has(&[("was_held", "false")]);
}

#[tokio::test]
async fn failures_are_traced() {
    LazyLock::force(&EVENTS);
    let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
    let pool = LockPool::with_backend(backend).connect().await.unwrap();
    lock_runtime::install("trouble", pool.clone()).unwrap();
    // Before the acquire, which meets neither: a renewal may come before the next line.
    faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
    faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    let guard = pool.lock("order:7").ttl(ms(3_000)).acquire().await.unwrap();
    let traced = Traced::of("trouble").await_event("renewed").await;
    let missed = traced.one("not renewed yet");
    missed.has(&[("lock", "order:7"), ("pool", "trouble"), ("error", "a planned failure")]);
    assert_eq!(missed.level, Level::WARN);
    guard.release().await.unwrap();
    let traced = Traced::of("trouble").await_event("released").await;
    traced.one("not released yet").has(&[("lock", "order:7"), ("error", "a planned failure")]);
}

/// A pool with a name that selects its events.
async fn installed(name: &str, server: &RedisServer) -> LockPool {
    LazyLock::force(&EVENTS);
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

/// All events of the target, of all threads and tests.
static EVENTS: LazyLock<Arc<Mutex<Vec<Seen>>>> = LazyLock::new(|| {
    let events = Arc::<Mutex<Vec<Seen>>>::default();
    let collected = events.clone();
    let collect = move |event: &Event<'_>| {
        let mut seen = Seen { level: *event.metadata().level(), fields: BTreeMap::new() };
        event.record(&mut seen);
        collected.lock().unwrap().push(seen);
    };
    tracing::subscriber::set_global_default(OnEvent(collect)).unwrap();
    events
});

#[derive(Clone, Debug)]
struct Seen {
    level: Level,
    fields: BTreeMap<&'static str, String>,
}

impl Seen {
    #[track_caller]
    fn has(&self, fields: &[(&str, &str)]) {
        for (name, value) in fields {
            assert_eq!(self.fields.get(name).map(String::as_str), Some(*value), "{name}: {self:?}");
        }
    }

    #[track_caller]
    fn number(&self, field: &str) -> u64 {
        self.fields[field].parse().unwrap()
    }
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.into());
    }
}

/// The events of one pool.
struct Traced {
    pool: &'static str,
    events: Vec<Seen>,
}

impl Traced {
    fn of(pool: &'static str) -> Self {
        let events = EVENTS.lock().unwrap();
        let of_pool = |seen: &&Seen| seen.fields.get("pool").is_some_and(|it| it == pool);
        Self { pool, events: events.iter().filter(of_pool).cloned().collect() }
    }

    async fn await_event(self, message: &str) -> Self {
        self.await_events(message, 1).await
    }

    async fn await_events(mut self, message: &str, count: usize) -> Self {
        eventually_async(Duration::from_secs(20), message, async || {
            self = Self::of(self.pool);
            self.all(message).len() >= count
        })
        .await;
        self
    }

    fn all(&self, message: &str) -> Vec<&Seen> {
        self.events.iter().filter(|seen| seen.fields["message"] == message).collect()
    }

    #[track_caller]
    fn one(&self, message: &str) -> &Seen {
        let all = self.all(message);
        assert_eq!(all.len(), 1, "{message}: {:#?}", self.events);
        all[0]
    }
}
