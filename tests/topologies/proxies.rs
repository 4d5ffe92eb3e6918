//! Redis behind proxies that know a part of its commands, and close the connection on the others.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::backend::Warning;
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::monitor::Caller;
use lock_tests::proxy::{Action, Command, named, nutcracker};
use lock_tests::{FaultProxy, Monitor, RedisServer, eventually_async};
use tokio::task::JoinSet;

const KEY: &str = "order:42";
const SOON: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(60);

/// Like [`nutcracker`], without scripts.
fn without_scripts(command: &Command) -> bool {
    nutcracker(command) && !command.is("EVAL") && !command.is("EVALSHA")
}

/// As [`without_scripts`], with transactions.
fn with_transactions(command: &Command) -> bool {
    const TRANSACTIONS: [&str; 4] = ["WATCH", "UNWATCH", "MULTI", "EXEC"];
    without_scripts(command) || TRANSACTIONS.iter().any(|name| command.is(name))
}

fn behind(known: fn(&Command) -> bool) -> (RedisServer, FaultProxy) {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    proxy.know_only(known);
    (server, proxy)
}

#[tokio::test]
async fn the_suite_passes_behind_a_proxy_that_hangs_up() {
    let (_server, proxy) = behind(nutcracker);
    let open = async || open_backend(proxy.url()).await.unwrap();
    let (one, other) = (open().await, open().await);
    let before = proxy.hang_ups();
    assert!(before > 0, "the proxy does not know HELLO");
    conformance(one, other).await;
    assert_eq!(
        proxy.hang_ups(),
        before,
        "once connected it sends nothing that the proxy does not know"
    );
}

#[tokio::test]
async fn no_script_has_the_locks_of_two_owners() {
    let (server, proxy) = behind(nutcracker);
    share_no_script(&server, proxy.url()).await;
}

/// Some proxies answer what they do not know with an error. They offer no more than this user has.
#[tokio::test]
async fn nor_without_tracking_and_messages() {
    let server = RedisServer::builder()
        .config_line("user plain on >secret ~* resetchannels +@all -@pubsub -client|tracking")
        .start();
    share_no_script(&server, &format!("redis://plain:secret@127.0.0.1:{}", server.port())).await;
}

/// A proxy that spreads keys over servers sends a script to the server of its first key.
async fn share_no_script(server: &RedisServer, url: &str) {
    const COUNT: usize = 40;
    let ttl = Duration::from_secs(3);
    let pool = LockPool::builder(url).wait(LONG).ttl(ttl).connect().await.unwrap();
    let monitor = Monitor::start(server);
    let mut tasks = JoinSet::new();
    for n in 0..COUNT {
        tasks.spawn(pool.lock(format!("{KEY}:{n}")).acquire());
    }
    let guards: Vec<_> = tasks.join_all().await.into_iter().map(Result::unwrap).collect();
    let acquired = monitor.settled().len();
    let renewed = || {
        let lines = monitor.lines();
        lines[acquired..].iter().filter(|ran| ran.by != Caller::Script).count()
    };
    eventually_async(LONG, "all are renewed", async || renewed() >= COUNT).await;
    let mut tasks = JoinSet::new();
    for guard in guards {
        tasks.spawn(guard.release());
    }
    tasks.join_all().await.into_iter().for_each(|released| released.unwrap());
    for ran in monitor.settled().into_iter().filter(|ran| ran.by != Caller::Script) {
        let locks = ran.args.iter().filter(|arg| arg.starts_with(KEY)).count();
        assert!(locks <= 1, "{ran:?}");
    }
}

#[tokio::test]
async fn a_waiter_behind_it_polls_until_it_is_its_turn() {
    let (server, proxy) = behind(nutcracker);
    let pools = [
        LockPool::builder(proxy.url()).wait(LONG).connect().await.unwrap(),
        LockPool::builder(proxy.url()).wait(LONG).connect().await.unwrap(),
        // With pushes, without the proxy.
        LockPool::builder(server.url()).wait(LONG).connect().await.unwrap(),
    ];
    let before = proxy.hang_ups();
    let monitor = Monitor::start(&server);
    let mut last = None;
    for (holder, waiter) in [(0, 1), (1, 2), (2, 0)] {
        let held = pools[holder].lock(KEY).acquire().await.unwrap();
        assert!(held.fence() > last, "fences grow");
        last = held.fence();
        let request = pools[waiter].lock(KEY).acquire();
        let waiting = tokio::spawn(async move { request.await.unwrap() });
        let asked = |at: usize| {
            monitor.lines().iter().skip(at).filter(|ran| ran.name().starts_with("EVAL")).count()
        };
        let seen = monitor.lines().len();
        eventually_async(SOON, "the waiter polls", async || asked(seen) >= 2).await;
        assert!(!waiting.is_finished());
        held.release().await.unwrap();
        waiting.await.unwrap().release().await.unwrap();
    }
    let together = pools[0].lock_all([KEY, "order:43"]).min_hold(Duration::from_millis(1));
    together.acquire().await.unwrap().release().await.unwrap();
    let ttl = Duration::from_millis(1_500);
    let renewed = pools[0].lock("order:44").ttl(ttl).acquire().await.unwrap();
    tokio::time::sleep(ttl * 4 / 3).await;
    renewed.verify().await.unwrap();
    renewed.release().await.unwrap();
    assert_eq!(proxy.hang_ups(), before);
    let warnings = pools[0].health().await.unwrap().warnings;
    assert!(warnings[0].to_string().contains("hash tag"), "{warnings:?}");
    let warnings = pools[2].health().await.unwrap().warnings;
    assert!(!warnings.iter().any(|warning| warning.to_string().contains("proxy")), "{warnings:?}");
}

#[tokio::test]
async fn it_comes_back_after_the_proxy_was_away() {
    let (_server, proxy) = behind(nutcracker);
    let pool = LockPool::builder(proxy.url()).wait(LONG).connect().await.unwrap();
    for _ in 0..3 {
        proxy.cut();
        let guard = pool.lock(KEY).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_password_goes_through_and_a_wrong_one_is_reported() {
    let server = RedisServer::builder().password("pw").start();
    let proxy = FaultProxy::start(&server);
    proxy.know_only(nutcracker);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    pool.lock(KEY).acquire().await.unwrap().release().await.unwrap();
    let wrong = proxy.url().replace(":pw@", ":c4n4ry@");
    let error = LockPool::connect(&wrong).await.unwrap_err().to_string();
    assert!(error.contains("does not accept") && !error.contains("c4n4ry"), "{error}");
    let database = format!("{}/3", proxy.url());
    let error = LockPool::connect(&database).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
}

/// It knows only the greeting of the new protocol.
#[tokio::test]
async fn a_proxy_that_hangs_up_later_is_noticed_too() {
    let (_server, proxy) = behind(|command| nutcracker(command) || command.is("HELLO"));
    let open = async || open_backend(proxy.url()).await.unwrap();
    let (one, other) = (open().await, open().await);
    let before = proxy.hang_ups();
    conformance(one, other).await;
    assert_eq!(proxy.hang_ups(), before);
}

/// A server that disappears during the greeting is not taken for a proxy, which would be polled from then on.
#[tokio::test]
async fn a_connection_that_breaks_while_it_is_made_is_no_proxy() {
    for command in ["HELLO", "SUBSCRIBE", "EVAL"] {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(&server);
        let trap = proxy.on_next(named(command), Action::CutBeforeForward);
        let pool = LockPool::connect(proxy.url()).await.unwrap();
        assert!(trap.sprung(), "{command}");
        let warnings = pool.health().await.unwrap().warnings;
        let is_of_a_proxy = |warning: &Warning| warning.to_string().contains("proxy");
        assert!(!warnings.iter().any(is_of_a_proxy), "{command}: {warnings:?}");
        let clients = server.cli(&["CLIENT", "LIST"]);
        assert!(clients.contains("resp=3") && clients.contains("sub=1"), "{command}: {clients}");
    }
}

#[tokio::test]
async fn a_proxy_that_hangs_up_on_scripts_serves_without_them() {
    let (_server, proxy) = behind(with_transactions);
    let open = async || open_backend(proxy.url()).await.unwrap();
    let (one, other) = (open().await, open().await);
    let before = proxy.hang_ups();
    conformance(one, other).await;
    assert_eq!(proxy.hang_ups(), before);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    assert!(warnings[0].to_string().contains("no scripts"), "{warnings:?}");
}

#[tokio::test]
async fn a_proxy_through_which_no_lock_can_be_freed_safely_is_refused() {
    for scripts in ["", "?scripts=off"] {
        let (server, proxy) = behind(without_scripts);
        let error = LockPool::connect(&format!("{}{scripts}", proxy.url())).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        for says in ["no other way to free a lock safely", "`EVAL`", "proxy"] {
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!(server.cli(&["DBSIZE"]), "0");
    }
    // With `scripts=on` the error states that there are none.
    let (_server, proxy) = behind(without_scripts);
    let error = LockPool::connect(&format!("{}?scripts=on", proxy.url())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
}
