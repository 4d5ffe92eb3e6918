//! Grants with a fence by `MULTI`, for which a script has to have moved the fence counter to the clock shortly before. A test repeats
//! its steps until a transaction has met the fault.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::{Fence, LockError, LockGuard, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Command, Trap};
use lock_tests::{FaultProxy, RedisServer, eventually_async};

const COUNTER: &str = "lock_runtime:fence";
/// Far longer than a test takes: a key that is gone earlier was cleaned up.
const LONG: Duration = ms(60_000);
/// A round of a test takes some milliseconds.
const ROUNDS: usize = 1_000;

/// How many transactions the server has executed or refused to execute.
fn transactions(server: &RedisServer) -> u64 {
    server.calls("exec")
}

/// Makes `action` happen to the `EXEC` of the next transaction for `key`.
fn on_transaction_for(proxy: &FaultProxy, key: &str, action: Action) -> Trap {
    let key = key.to_owned();
    let mut is_begun = false;
    let matches = move |command: &Command| {
        // Scripts acquire it otherwise.
        is_begun |= command.is("SET") && command.mentions(&key);
        is_begun && command.is("EXEC")
    };
    proxy.on_next(matches, action)
}

struct Scene {
    server: RedisServer,
    proxy: FaultProxy,
    pool: LockPool,
    other: LockPool,
}

impl Scene {
    async fn new() -> Self {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(&server);
        let pool = LockPool::builder(proxy.url()).wait(ms(20_000)).request_timeout(ms(800));
        let pool = pool.connect().await.unwrap();
        let other = LockPool::connect(&server.url()).await.unwrap();
        Self { server, proxy, pool, other }
    }

    /// Acquires `k` until the trap is sprung, each time shortly after another grant with a fence.
    async fn until_sprung(
        &self,
        trap: &Trap,
        acquire: impl AsyncFn() -> Result<LockGuard, LockError>,
    ) -> Result<LockGuard, LockError> {
        for _ in 0..ROUNDS {
            cycle(&self.pool, "before").await;
            let outcome = acquire().await;
            if trap.sprung() {
                return outcome;
            }
            outcome.unwrap().release().await.unwrap();
        }
        panic!("no transaction in {ROUNDS} rounds");
    }
}

async fn check_retry(action: Action) {
    let scene = Scene::new().await;
    let last = cycle(&scene.other, "k").await;
    let trap = on_transaction_for(&scene.proxy, "k", action);
    let acquire = async || scene.pool.lock("k").ttl(LONG).acquire().await;
    let guard = scene.until_sprung(&trap, acquire).await.unwrap();
    guard.verify().await.unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
    assert!(scene.other.lock("k").try_acquire().await.unwrap().is_none());
    let last = guard.fence();
    guard.release().await.unwrap();
    assert!(cycle(&scene.other, "k").await > last);
}

async fn check_dropped(action: Action) {
    let scene = Scene::new().await;
    let trap = on_transaction_for(&scene.proxy, "k", action);
    let acquire = async || {
        let acquire = tokio::spawn(scene.pool.lock("k").ttl(LONG).acquire());
        let is_over = async || trap.sprung() || acquire.is_finished();
        eventually_async(ms(20_000), "it is sent", is_over).await;
        if trap.sprung() {
            acquire.abort();
        }
        acquire.await
    };
    let mut rounds = 0;
    while !trap.sprung() {
        rounds += 1;
        assert!(rounds <= ROUNDS, "no transaction in {ROUNDS} rounds");
        cycle(&scene.pool, "before").await;
        // Dropped without an answer, or with the grant of another try.
        drop(acquire().await);
    }
    eventually_async(ms(10_000), "the key is free", async || {
        scene.server.cli(&["EXISTS", "k"]) == "0"
    })
    .await;
    cycle(&scene.pool, "k").await;
}

macro_rules! for_each_fault {
    ($($name:ident: $action:ident;)*) => {
        $(
            mod $name {
                use super::*;

                #[tokio::test]
                async fn the_retry_has_the_lock_and_a_fence() {
                    check_retry(Action::$action).await;
                }

                #[tokio::test]
                async fn a_dropped_acquire_leaves_nothing_behind() {
                    check_dropped(Action::$action).await;
                }
            }
        )*
    };
}

for_each_fault! {
    without_a_reply: DropReply;
    cut_before_the_reply: CutBeforeReply;
    cut_inside_the_reply: CutInsideReply;
    cut_before_the_execution: CutBeforeForward;
}

/// As after a failover to a replica that does not have the last writes.
#[tokio::test]
async fn a_fence_grows_if_the_counter_goes_back() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let mut last = cycle(&pool, "k").await;
    for back in [1_000_000, 60_000_000, 1_000_000_000_000_000] {
        let before = transactions(&server);
        let mut met = 0;
        for _ in 0..ROUNDS {
            last = grown(last, cycle(&pool, "before").await);
            let counter = last.unwrap().get();
            server.cli(&["SET", COUNTER, &(counter - back).to_string()]);
            let (sent, scripts) = (transactions(&server), server.calls("evalsha"));
            last = grown(last, cycle(&pool, "k").await);
            // The transaction, the script in its place, and the release.
            met +=
                usize::from(transactions(&server) > sent && server.calls("evalsha") >= scripts + 2);
            if met == 3 {
                break;
            }
        }
        assert_eq!(met, 3, "{} transactions", transactions(&server) - before);
    }
}

#[track_caller]
fn grown(last: Option<Fence>, next: Option<Fence>) -> Option<Fence> {
    assert!(next.is_some() && next > last, "{next:?} after {last:?}");
    next
}

/// The server refuses a part of the transaction, or all of it.
#[tokio::test]
async fn a_user_without_the_commands_of_a_transaction_gets_fences_by_script() {
    for refused in [&["-multi"][..], &["-exec"], &["-incrby"], &["-multi", "-exec"]] {
        let line = "user worker on >secret ~* &* +@all";
        let server = RedisServer::builder().config_line(line).start();
        let url = format!("redis://worker:secret@127.0.0.1:{}", server.port());
        let pool = LockPool::connect(&url).await.unwrap();
        let mut last = None;
        let mut until = async |what: &str, is_done: &dyn Fn() -> bool| {
            for _ in 0..ROUNDS {
                last = grown(last, cycle(&pool, "k").await);
                if is_done() {
                    return;
                }
            }
            panic!("{refused:?}: no {what} in {ROUNDS} rounds");
        };
        until("transaction", &|| transactions(&server) > 0).await;
        assert_eq!(server.cli(&[&["ACL", "SETUSER", "worker"], refused].concat()), "OK");
        let refusals = || server.errors("NOPERM") + server.errors("EXECABORT");
        until("refusal", &|| refusals() > 0).await;
        let at_refusal = refusals();
        for _ in 0..20 {
            last = grown(last, cycle(&pool, "k").await);
        }
        assert_eq!(refusals(), at_refusal, "{refused:?}: not tried again at once");
        assert_eq!(server.cli(&["KEYS", "*"]), COUNTER, "{refused:?}");
    }
}

/// A transaction stays open there, and the server queues all later commands of its connection.
#[tokio::test]
async fn a_server_that_refuses_the_end_of_a_transaction_gets_new_connections() {
    let server = RedisServer::builder().config_line("rename-command EXEC \"\"").start();
    let pool = LockPool::builder(server.url()).wait(ms(20_000)).connect().await.unwrap();
    let mut last = None;
    for _ in 0..ROUNDS {
        last = grown(last, cycle(&pool, "k").await);
        let unfenced = pool.lock("other").fencing(false).acquire().await.unwrap();
        unfenced.release().await.unwrap();
        if server.calls("multi") > 0 {
            break;
        }
    }
    let begun = server.calls("multi");
    assert!(begun > 0, "no transaction in {ROUNDS} rounds");
    for _ in 0..20 {
        last = grown(last, cycle(&pool, "k").await);
        let unfenced = pool.lock("other").fencing(false).acquire().await.unwrap();
        unfenced.release().await.unwrap();
    }
    assert_eq!(server.calls("multi"), begun, "not tried again at once");
    assert_eq!(server.cli(&["KEYS", "*"]), COUNTER);
}

/// The script that mints the fence arrives when the grant is released, and another one may be due.
#[tokio::test]
async fn a_late_script_for_a_fence_takes_no_lock() {
    let scene = Scene::new().await;
    let mut round = 0;
    loop {
        round += 1;
        assert!(round <= ROUNDS, "no transaction in {ROUNDS} rounds");
        cycle(&scene.pool, "before").await;
        scene.server.cli(&["SET", COUNTER, "1"]);
        let (sent, mut is_granted) = (transactions(&scene.server), false);
        let matches = move |command: &Command| {
            let is_first = !is_granted;
            is_granted |= command.is("SET") && command.mentions("k");
            !is_first && command.is("EVALSHA") && command.mentions("k")
        };
        let trap = scene.proxy.on_next(matches, Action::HoldRequest);
        let acquire = tokio::spawn(scene.pool.lock("k").ttl(LONG).acquire());
        let is_sent = async || trap.sprung() || acquire.is_finished();
        eventually_async(ms(20_000), "the script is sent", is_sent).await;
        if transactions(&scene.server) == sent {
            // The first request was a script.
            acquire.await.unwrap().unwrap().release().await.unwrap();
            continue;
        }
        assert!(trap.sprung());
        acquire.abort();
        drop(acquire.await);
        break;
    }
    cycle(&scene.other, "k").await;
    let scripts = scene.server.calls("evalsha");
    scene.proxy.release_held();
    let arrived = async || scene.server.calls("evalsha") > scripts;
    eventually_async(ms(20_000), "the script arrives", arrived).await;
    let free = async || scene.server.cli(&["EXISTS", "k"]) == "0";
    eventually_async(ms(10_000), "the key is free", free).await;
}

/// `INCRBY` fails, and the `SET` before it does not.
#[tokio::test]
async fn a_counter_of_another_type_leaves_no_lock_behind() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).wait(ms(5_000)).connect().await.unwrap();
    for _ in 0..ROUNDS {
        cycle(&pool, "before").await;
        server.cli(&["DEL", COUNTER]);
        server.cli(&["HSET", COUNTER, "a", "b"]);
        let sent = transactions(&server);
        let error = pool.lock("k").ttl(LONG).acquire().await.unwrap_err();
        assert!(error.to_string().contains("WRONGTYPE"), "{error}");
        eventually_async(ms(10_000), "the key is free", async || {
            server.cli(&["EXISTS", "k"]) == "0"
        })
        .await;
        let has_met = transactions(&server) > sent;
        server.cli(&["DEL", COUNTER]);
        if has_met {
            return;
        }
        cycle(&pool, "k").await;
    }
    panic!("no transaction in {ROUNDS} rounds");
}
