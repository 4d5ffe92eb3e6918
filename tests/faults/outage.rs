//! A store that is down: with `OnOutage::Fail` an acquire returns at once, and service returns with the store.

#![allow(clippy::disallowed_methods)]

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use lock_runtime::{ErrorKind, LockError, LockPool, OnOutage, Progress};
use lock_tests::logs::OnEvent;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::runtimes::multi_thread;
use lock_tests::{FaultProxy, Latency, RedisServer, eventually_async, http, in_own_process};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::Event;
use tracing::field::{Field, Visit};

const SOON: Duration = ms(20_000);

async fn failing_fast(url: &str) -> LockPool {
    let pool = LockPool::builder(url).on_outage(OnOutage::Fail).wait(SOON * 3);
    pool.connect().await.unwrap()
}

/// Waits until an acquire is refused without a wait.
async fn until_refused(pool: &LockPool) {
    eventually_async(SOON, "an acquire is refused", async || {
        let error = pool.lock("probe").wait(Duration::ZERO).acquire().await.err();
        error.is_some_and(|error| error.to_string().contains("the store has been down for"))
    })
    .await;
}

async fn until_served(pool: &LockPool) {
    eventually_async(SOON, "the pool serves again", async || {
        pool.lock("probe").acquire().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_killed_store_is_an_error_at_once_until_it_is_back() {
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    cycle(&pool, "k").await;
    for _ in 0..2 {
        server.kill();
        until_refused(&pool).await;
        for request in [pool.lock("k"), pool.lock_all(["k", "l"])] {
            let error = within(SOON, "a refusal", request.acquire()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Backend);
            assert_eq!(error.progress(), Progress::NotStarted);
        }
        server.restart();
        until_served(&pool).await;
        cycle(&pool, "k").await;
        pool.lock_all(["k", "l"]).acquire().await.unwrap().release().await.unwrap();
    }
}

/// The connection stays open, and no answer arrives.
#[tokio::test]
async fn a_frozen_store_is_an_error_at_once_until_it_goes_on() {
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    cycle(&pool, "k").await;
    server.pause();
    until_refused(&pool).await;
    server.resume();
    until_served(&pool).await;
}

/// Waiters that came before the outage: of one key, of several keys, and behind another task.
#[tokio::test]
async fn waiters_are_rejected_when_the_outage_is_seen() {
    let server = RedisServer::start();
    server.cli(&["SET", "taken", "another", "PX", "600000"]);
    let pool = failing_fast(&server.url()).await;
    let mut waiting = JoinSet::new();
    for keys in [vec!["taken"], vec!["taken"], vec!["free", "taken"]] {
        let request = pool.lock_all(keys);
        waiting.spawn(async move { request.acquire().await.map(drop) });
    }
    until_queued(&server, "taken", 1).await;
    server.kill();
    let rejected = within(SOON, "all are rejected", waiting.join_all()).await;
    for outcome in rejected {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Backend);
    }
}

/// One call a second is sent to the store all the same. Behind a holder of this process it would wait instead.
#[tokio::test]
async fn a_call_that_is_refused_behind_a_holder_leaves_its_queue() {
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    let held = pool.lock("k").ttl(SOON * 3).acquire().await.unwrap();
    server.kill();
    until_refused(&pool).await;
    let began = Instant::now();
    while began.elapsed() < ms(2_500) {
        let error = pool.lock("k").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        let snapshot = pool.snapshot();
        assert!(snapshot.waiting.is_empty(), "{snapshot:?}");
        tokio::time::sleep(ms(20)).await;
    }
    drop(held);
}

/// It needs no request.
#[tokio::test]
async fn a_call_in_an_outage_gets_a_lock_that_lingers() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = failing_fast(proxy.url()).await;
    let lingering = || pool.lock("k").ttl(SOON * 3).linger(SOON * 2);
    lingering().acquire().await.unwrap().release().await.unwrap();
    server.pause();
    until_refused(&pool).await;
    assert!(matches!(&pool.snapshot().held[..], [lock] if lock.lingers));
    eventually_async(SOON, "a call has the lock", async || lingering().acquire().await.is_ok())
        .await;
    server.resume();
}

#[tokio::test]
async fn a_short_cut_is_no_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = failing_fast(proxy.url()).await;
    // A busy machine may take longer than the tolerance for a new connection, but not each time.
    for _ in 0..20 {
        until_served(&pool).await;
        proxy.cut();
        // It waits for the new connection.
        if let Ok(guard) = pool.lock("k").acquire().await {
            return guard.release().await.unwrap();
        }
    }
    panic!("each cut was an outage");
}

#[tokio::test]
async fn without_the_setting_an_acquire_waits_for_the_store() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::builder(proxy.url()).wait(SOON).connect().await.unwrap();
    cycle(&pool, "k").await;
    proxy.refuse(true);
    proxy.cut();
    let waits = pool.lock("k");
    let waits = tokio::spawn(async move { waits.acquire().await.map(drop) });
    // Twice as long as the failures that make an outage.
    tokio::time::sleep(ms(1_000)).await;
    assert!(!waits.is_finished());
    proxy.refuse(false);
    joined("it is granted", waits).await.unwrap();
}

async fn settle(State(pool): State<LockPool>, Path(id): Path<u64>) -> Result<String, LockError> {
    pool.lock(format!("order:{id}")).run(async { id.to_string() }).await
}

/// How often the runtime has sent the events of an outage.
#[derive(Clone, Debug, Default)]
struct OutageEvents {
    lost: Arc<AtomicUsize>,
    back: Arc<AtomicUsize>,
}

impl OutageEvents {
    fn of_this_process() -> Self {
        let events = Self::default();
        let seen = events.clone();
        let subscriber = OnEvent(move |event: &Event<'_>| event.record(&mut seen.clone()));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        events
    }

    fn counts(&self) -> [usize; 2] {
        [&self.lost, &self.back].map(|count| count.load(Ordering::SeqCst))
    }
}

impl Visit for OutageEvents {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let count = match (field.name(), &*format!("{value:?}")) {
            ("message", "the store is down") => &self.lost,
            ("message", "the store is back") => &self.back,
            _ => return,
        };
        count.fetch_add(1, Ordering::SeqCst);
    }
}

struct Answer {
    sent: Instant,
    took: Duration,
    status: u16,
}

/// 200 requests a second, each with a number of its own, until `over`.
async fn load(address: SocketAddr, route: &str, over: Arc<AtomicBool>) -> Vec<Answer> {
    let (mut sending, mut ticks) = (JoinSet::new(), tokio::time::interval(ms(5)));
    while !over.load(Ordering::SeqCst) {
        ticks.tick().await;
        let path = format!("/{route}/{}", sending.len());
        sending.spawn(async move {
            let sent = Instant::now();
            let (status, head) = http::post(address, &path).await.unwrap();
            assert_eq!(status == 503, head.contains("retry-after: 1"), "{head}");
            assert!([200, 503].contains(&status), "{head}");
            Answer { sent, took: sent.elapsed(), status }
        });
    }
    within(3 * SOON, "all are answered", sending.join_all()).await
}

fn p99(answers: &[Answer], sent: &Range<Instant>) -> Duration {
    let mut took: Vec<_> =
        answers.iter().filter(|it| sent.contains(&it.sent)).map(|it| it.took).collect();
    took.sort();
    took[took.len() * 99 / 100]
}

/// In a process of its own, for its subscriber. `LOCK_OUTAGE_SECONDS` is how long the store is down.
#[test]
fn requests_during_an_outage_do_not_wait() {
    in_own_process(concat!(module_path!(), "::requests_during_an_outage_do_not_wait"), || {
        multi_thread().block_on(outages_under_load());
    });
}

async fn outages_under_load() {
    /// From the second second of an outage on.
    const P99: Duration = ms(50);
    /// From the return of the store to full service.
    const RECOVERY: Duration = ms(1_000);
    /// A request that takes longer was not served as usual.
    const SLOW: Duration = ms(500);
    let seconds = std::env::var("LOCK_OUTAGE_SECONDS").map_or(2, |text| text.parse().unwrap());
    let events = OutageEvents::of_this_process();
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = Router::new().route("/order/{id}", post(settle)).with_state(pool.clone());
    // What the machine itself adds.
    let routes = routes.route("/plain/{id}", post(async || ""));
    let serving = tokio::spawn(async move { axum::serve(listener, routes).await });
    let (mut fast, mut recovered) = (Latency::below(P99, 1), Latency::below(RECOVERY, 1));
    for round in 1.. {
        let over = Arc::<AtomicBool>::default();
        let [locked, plain] =
            ["order", "plain"].map(|route| tokio::spawn(load(address, route, over.clone())));
        tokio::time::sleep(ms(500)).await;
        server.kill();
        let killed = Instant::now();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let down = killed + Duration::from_secs(1)..Instant::now();
        server.restart();
        let back = Instant::now();
        eventually_async(SOON, "the event of the return", async || events.counts()[1] >= round)
            .await;
        tokio::time::sleep(RECOVERY).await;
        over.store(true, Ordering::SeqCst);
        let answers = within(4 * SOON, "responses", locked).await.unwrap();
        let plain = within(4 * SOON, "responses", plain).await.unwrap();
        assert_eq!(events.counts(), [round; 2], "each event once for each outage");
        let served = |it: &Answer| it.status == 200 && it.took < SLOW;
        assert!(answers.iter().any(|it| it.sent < killed && served(it)));
        let refused =
            answers.iter().filter(|it| down.contains(&it.sent)).map(|it| it.status == 503);
        // A request may be sent as the store returns.
        assert!(refused.clone().filter(|refused| *refused).count() * 10 > refused.count() * 9);
        let last = answers.iter().filter(|it| !served(it)).map(|it| it.sent + it.took).max();
        let recovery = last.map_or(Duration::ZERO, |last| last.saturating_duration_since(back));
        let of_machine = p99(&plain, &down);
        let p99 = p99(&answers, &down);
        println!(
            "{} requests, down for {seconds} s: p99 {p99:?} from the second second on, {of_machine:?} without a lock; \
             full service {recovery:?} after the return",
            answers.len()
        );
        fast.push(p99.saturating_sub(of_machine));
        recovered.push(recovery);
        if !fast.wants_more() && !recovered.wants_more() {
            break;
        }
    }
    serving.abort();
}

/// A lease that is renewed in time outlives an outage; the refusal is about acquires alone.
#[tokio::test]
async fn a_held_lock_outlives_an_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = failing_fast(proxy.url()).await;
    let guard = pool.lock("k").ttl(ms(60_000)).acquire().await.unwrap();
    proxy.hold(Direction::ToClient);
    until_refused(&pool).await;
    proxy.release_held();
    until_served(&pool).await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

/// The lock is known to be unused, and not known to be free.
#[tokio::test]
async fn a_store_that_dies_before_a_release_is_no_conflict() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let acquire = async || pool.lock("k").wait(Duration::ZERO).acquire().await.unwrap_err();
    cycle(&pool, "k").await;
    let guard = pool.lock("k").acquire().await.unwrap();
    server.kill();
    drop(guard);
    eventually_async(SOON, "the release has failed", async || {
        acquire().await.kind() == ErrorKind::Backend
    })
    .await;
    for _ in 0..5 {
        assert_eq!(acquire().await.kind(), ErrorKind::Backend);
    }
    server.restart();
    until_served(&pool).await;
    eventually_async(SOON, "the key is free", async || {
        pool.lock("k").wait(Duration::ZERO).acquire().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_single_try_waits_for_a_release_of_the_same_process() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    for _ in 0..50 {
        drop(pool.lock("k").acquire().await.unwrap());
        let next = pool.lock("k").try_acquire().await.unwrap();
        let several = pool.lock_all(["k", "l"]).try_acquire().await.unwrap();
        assert!(next.is_some() && several.is_none());
        drop(next);
        let both = pool.lock_all(["k", "l"]).try_acquire().await.unwrap();
        assert!(both.is_some());
    }
}

#[tokio::test]
async fn a_conflict_with_a_release_of_the_same_process_says_so() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    cycle(&pool, "k").await;
    let guard = pool.lock("k").acquire().await.unwrap();
    server.pause();
    drop(guard);
    let error = pool.lock("k").wait(ms(50)).acquire().await.unwrap_err();
    server.resume();
    assert!(error.to_string().contains("this process is still releasing the lock"), "{error}");
    until_served(&pool).await;
}
