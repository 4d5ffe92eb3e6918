//! Requests and answers that get lost, come late, or are cut off.

use std::time::Duration;

use lock_runtime::{ErrorKind, LockGuard, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{Engine, EngineKind, FaultProxy, eventually_async};

on_each_engine!(
    an_acquire_with_a_late_answer_leaves_nothing_behind,
    an_acquire_with_a_late_request_leaves_nothing_behind,
    a_release_with_a_lost_or_late_answer_frees_the_lock,
    a_release_with_a_late_request_frees_the_lock,
);

/// No test waits as long, so that no ttl hides a leftover.
const TTL: Duration = ms(40_000);
/// The pool behind the proxy gives a connection up that has no answer for as long.
const REQUEST_TIMEOUT: Duration = ms(500);
/// On a busy machine a connection is replaced also without a fault. The next try is another one then.
const TRIES: usize = 12;

/// A client behind a proxy, and one with a direct connection.
struct Scene {
    engine: Engine,
    proxy: FaultProxy,
    pool: LockPool,
    other: LockPool,
}

/// What ends the acquire.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Its wait.
    Wait,
    /// Its caller.
    Abort,
}

/// What becomes of an answer that is held.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Lost,
    Late,
}

impl Scene {
    async fn new(kind: EngineKind) -> Self {
        let engine = Engine::shared(kind);
        let proxy = FaultProxy::to_port(engine.port());
        let pool = LockPool::builder(engine.url_at(proxy.port())).request_timeout(REQUEST_TIMEOUT);
        let pool = pool.ttl(TTL).wait(DEADLINE).connect().await.unwrap();
        let other = patient(engine.url(), TTL).await;
        Self { engine, proxy, pool, other }
    }

    /// Before the end of a ttl.
    async fn ends_empty(&self, key: &str) {
        within(DEADLINE, "the key is free", cycle(&self.other, key)).await;
        eventually_async(DEADLINE, "the pool is back", async || {
            self.pool.lock("other").wait(ms(500)).acquire().await.is_ok()
        })
        .await;
        let empty = async || self.engine.owners() == 0;
        eventually_async(ms(15_000), "nothing is left in the store", empty).await;
    }

    /// An acquire is given up while what flows this way is held, and what was held arrives behind that. Returns whether the
    /// fault has met it: the store had granted the lock, or the request was held, before the acquire was given up.
    async fn acquire(&self, key: &str, held: Direction, ending: Ending) -> bool {
        let _ = self.pool.lock(key).run(async {}).await;
        let was_free = self.soon(async || self.engine.holder(key).is_none()).await;
        self.proxy.hold(held);
        let acquiring = tokio::spawn(self.pool.lock(key).wait(2 * REQUEST_TIMEOUT).acquire());
        let is_sent = match held {
            Direction::ToClient => self.soon(async || self.engine.holder(key).is_some()).await,
            Direction::ToServer => self.is_held(key).await,
        };
        if ending == Ending::Abort {
            acquiring.abort();
        }
        let is_given_up = match within(DEADLINE, "the acquire", acquiring).await {
            Ok(outcome) => {
                let error = outcome.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
                // On a busy machine its wait may be over before it is aborted.
                ending == Ending::Wait
            }
            Err(error) => {
                assert!(error.is_cancelled(), "{error}");
                true
            }
        };
        self.proxy.release_held();
        self.ends_empty(key).await;
        was_free && is_sent && is_given_up
    }

    async fn soon(&self, condition: impl AsyncFn() -> bool) -> bool {
        let held = async {
            while !condition().await {
                tokio::time::sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(ms(3_000), held).await.is_ok()
    }

    /// Whether a request for `key` is soon held on its way to the store.
    async fn is_held(&self, key: &str) -> bool {
        self.soon(async || self.proxy.has_held(key)).await
    }

    /// A held lock of the pool behind the proxy.
    async fn guard(&self, key: &str) -> LockGuard {
        let guard = self.pool.lock(key).acquire().await.unwrap();
        guard.release().await.unwrap();
        self.pool.lock(key).acquire().await.unwrap()
    }
}

async fn an_acquire_with_a_late_answer_leaves_nothing_behind(kind: EngineKind) {
    acquires(kind, Direction::ToClient).await;
}

/// The connection is replaced, and the owner is released, before the request arrives.
async fn an_acquire_with_a_late_request_leaves_nothing_behind(kind: EngineKind) {
    acquires(kind, Direction::ToServer).await;
}

async fn acquires(kind: EngineKind, held: Direction) {
    let scene = Scene::new(kind).await;
    for ending in [Ending::Wait, Ending::Abort] {
        let mut met = 0;
        for n in 0..TRIES {
            met += usize::from(scene.acquire(&format!("order:{n}"), held, ending).await);
            if met == 2 {
                break;
            }
        }
        assert_eq!(met, 2);
    }
    // What has arrived last is gone too.
    scene.ends_empty("order:0").await;
}

/// A release that has freed its own lock is no loss.
async fn a_release_with_a_lost_or_late_answer_frees_the_lock(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    for answer in [Answer::Lost, Answer::Late] {
        let mut met = 0;
        for n in 0..TRIES {
            let key = format!("order:{n}");
            let guard = scene.guard(&key).await;
            scene.proxy.hold(Direction::ToClient);
            let releasing = tokio::spawn(guard.release());
            met += usize::from(scene.soon(async || scene.engine.holder(&key).is_none()).await);
            if answer == Answer::Lost {
                scene.proxy.cut();
            }
            scene.proxy.release_held();
            if let Err(error) = joined("the release", releasing).await {
                assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
            }
            scene.ends_empty(&key).await;
            if met == 2 {
                break;
            }
        }
        assert_eq!(met, 2);
    }
}

/// Also behind the end of its connection, when the release is repeated: the next holder is left alone.
async fn a_release_with_a_late_request_frees_the_lock(kind: EngineKind) {
    let scene = Scene::new(kind).await;
    for is_repeated in [false, true] {
        let mut met = false;
        for n in 0..TRIES {
            let key = format!("order:{n}");
            let guard = scene.guard(&key).await;
            let connections = scene.proxy.connections();
            scene.proxy.hold(Direction::ToServer);
            let releasing = tokio::spawn(guard.release());
            let is_sent = scene.is_held(&key).await;
            let is_replaced = async || scene.proxy.connections() > connections;
            met = is_sent && (!is_repeated || scene.soon(is_replaced).await);
            assert!(scene.engine.holder(&key).is_some());
            scene.proxy.release_held();
            let next = scene.other.lock(&*key).acquire();
            let next = within(DEADLINE, "the next holder", next).await.unwrap();
            if let Err(error) = joined("the release", releasing).await {
                assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
            }
            next.verify().await.unwrap();
            next.release().await.unwrap();
            scene.ends_empty(&key).await;
            if met {
                break;
            }
        }
        assert!(met);
    }
}
