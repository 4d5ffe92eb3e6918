//! Redis without scripts, because of the user or of a proxy: the same locks by plain commands.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::logs::Logs;
use lock_tests::proxy::{Action, Direction, Trap, named};
use lock_tests::{FaultProxy, Monitor, RedisServer, eventually, eventually_async};

const KEY: &str = "order:42";
const SOON: Duration = Duration::from_secs(10);
/// Far longer than a test takes: a key that is gone earlier was cleaned up.
const LONG: Duration = Duration::from_secs(60);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(800);
/// The same for releases that meet a fault, and for requests that a test holds up. A release has twice that: for a try
/// without an answer, and then for a new connection on a busy machine.
const LONG_REQUEST_TIMEOUT: Duration = Duration::from_millis(1_600);
/// A value that is no owner token of this library.
const STRANGER: &str = "another client";

fn off(url: &str) -> String {
    format!("{url}?scripts=off")
}

/// A server with a user `worker` with these ACL `rules`, and its URL.
fn server_for(rules: &str) -> (RedisServer, String) {
    let server =
        RedisServer::builder().config_line(&format!("user worker on >pw ~* &* {rules}")).start();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    (server, url)
}

/// A client behind a faulty proxy, and one with a direct connection.
struct Bench {
    server: RedisServer,
    proxy: FaultProxy,
    pool: LockPool,
    other: LockPool,
}

impl Bench {
    async fn new() -> Self {
        Self::with(REQUEST_TIMEOUT).await
    }

    async fn patient() -> Self {
        Self::with(LONG_REQUEST_TIMEOUT).await
    }

    async fn with(request_timeout: Duration) -> Self {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(&server);
        // A wait in which a request without an answer leaves time for the next one.
        let builder = |url: &str| LockPool::builder(off(url)).ttl(LONG).wait(SOON);
        let pool = builder(proxy.url()).request_timeout(request_timeout).connect().await.unwrap();
        let other = builder(&server.url()).connect().await.unwrap();
        Self { server, proxy, pool, other }
    }

    fn holder(&self) -> String {
        self.server.cli(&["GET", KEY])
    }

    async fn until_free(&self) {
        eventually_async(SOON, "the key is free", async || self.holder() == "(nil)").await;
    }

    async fn until_sprung(&self, trap: &Trap) {
        eventually_async(SOON, "the proxy meets the command", async || trap.sprung()).await;
    }

    fn is_stolen(&self) {
        self.server.cli(&["DEL", KEY]);
        self.server.cli(&["SET", KEY, STRANGER, "PX", "60000"]);
    }

    /// Whether the key of the stranger is unchanged.
    fn is_still_held_by_the_stranger(&self) {
        assert_eq!(self.holder(), STRANGER);
        let left: u64 = self.server.cli(&["PTTL", KEY]).parse().unwrap();
        assert!(left > 30_000, "{left} ms left");
    }
}

#[tokio::test]
async fn the_suite_passes_where_the_url_switches_scripts_off() {
    let server = RedisServer::start();
    let monitor = Monitor::start(&server);
    let open = async || open_backend(&off(&server.url())).await.unwrap();
    conformance(open().await, open().await).await;
    let scripts = monitor.settled().into_iter().filter(|ran| ran.name().starts_with("EVAL"));
    assert_eq!(scripts.count(), 0, "no script is sent");
}

#[tokio::test]
async fn the_suite_passes_where_the_server_refuses_scripts() {
    for rules in ["+@all -@scripting", "+@all -eval -evalsha"] {
        let (_server, url) = server_for(rules);
        let open = async || open_backend(&url).await.unwrap();
        conformance(open().await, open().await).await;
    }
}

#[tokio::test]
async fn the_suite_passes_where_the_commands_of_scripts_have_other_names() {
    let server = RedisServer::builder()
        .arg("rename-command", "EVAL \"\"")
        .arg("rename-command", "EVALSHA \"\"")
        .start();
    let open = async || open_backend(&server.url()).await.unwrap();
    conformance(open().await, open().await).await;
}

#[tokio::test]
async fn the_suite_passes_with_nothing_but_the_needed_commands_and_without_pushes() {
    let (_server, url) = server_for(
        "-@all +set +get +mget +del +pexpire +pttl +ping +hello +select +watch +unwatch +multi +exec",
    );
    let open = async || open_backend(&url).await.unwrap();
    conformance(open().await, open().await).await;
}

#[tokio::test]
async fn the_mode_is_logged_once_and_stays_visible() {
    let logs = Logs::global();
    let (server, url) = server_for("+@all -@scripting");
    let pool = LockPool::connect(&url).await.unwrap();
    let at = format!("127.0.0.1:{}", server.port());
    let told = || -> Vec<_> {
        let told = logs.lines_with("without scripts");
        told.into_iter().filter(|line| line.contains(&at)).collect()
    };
    eventually(Duration::from_secs(10), "it is logged", || !told().is_empty());
    let told = told();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("WARN") && told[0].contains("NOPERM"), "{told:?}");
    let warnings = pool.health().await.unwrap().warnings;
    let warnings: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for says in [&*at, "no scripts", "no fences", "NOPERM", "`EVAL`"] {
        assert!(warnings[0].contains(says), "{warnings:?}");
    }
    // A server that runs scripts causes no warning.
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    assert!(
        warnings.iter().all(|warning| !warning.to_string().contains("scripts")),
        "{warnings:?}"
    );
    let pool = LockPool::connect(&off(&server.url())).await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    assert!(warnings[0].to_string().contains("`?scripts=off`"), "{warnings:?}");
}

#[tokio::test]
async fn scripts_that_are_asked_for_are_needed() {
    let (_server, url) = server_for("+@all -@scripting");
    let error = LockPool::connect(&format!("{url}?scripts=on")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("NOPERM") && error.to_string().contains("+eval"), "{error}");
}

#[tokio::test]
async fn a_lock_that_could_not_be_freed_safely_is_not_taken() {
    for (rules, scripts) in [
        ("+@all -@scripting -watch", ""),
        ("+@all -watch", "?scripts=off"),
        ("+@all -multi", "?scripts=off"),
        ("+@all -exec", "?scripts=off"),
        ("+@all -del", "?scripts=off"),
    ] {
        let (_server, url) = server_for(rules);
        let Err(error) = LockPool::connect(&format!("{url}{scripts}")).await else {
            panic!("connected with {rules}");
        };
        assert_eq!(error.kind(), ErrorKind::Backend, "{rules}");
        let text = error.to_string();
        for says in ["no other way to free a lock safely", "`WATCH`", "`EVAL`"] {
            assert!(text.contains(says), "{rules}: {text}");
        }
        assert!(!text.contains(":pw@"), "{text}");
    }
}

#[tokio::test]
async fn a_fence_is_refused_and_the_error_says_what_to_write() {
    let bench = Bench::new().await;
    let error = bench.pool.lock(KEY).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    for says in ["fences need scripts", "`.fencing(false)`", "`guard`", "`EVAL`"] {
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(bench.holder(), "(nil)");
    let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
    assert_eq!(guard.fence(), None);
    guard.release().await.unwrap();
    assert_eq!(bench.holder(), "(nil)");
}

#[tokio::test]
async fn processes_with_and_without_scripts_exclude_each_other_and_take_turns() {
    let server = RedisServer::start();
    let with = LockPool::builder(server.url()).wait(LONG).connect().await.unwrap();
    let without = LockPool::builder(off(&server.url())).wait(LONG).connect().await.unwrap();
    for (holder, waiter) in [(&with, &without), (&without, &with)].repeat(3) {
        let held = holder.lock(KEY).fencing(false).acquire().await.unwrap();
        assert!(waiter.lock(KEY).fencing(false).try_acquire().await.unwrap().is_none());
        let request = waiter.lock(KEY).fencing(false).acquire();
        let waiting = tokio::spawn(async move { request.await.unwrap() });
        let asked = || server.cli(&["INFO", "commandstats"]).contains("cmdstat_client|caching:");
        eventually_async(SOON, "the waiter has the key watched", async || asked()).await;
        assert!(held.is_held() && !waiting.is_finished());
        held.release().await.unwrap();
        waiting.await.unwrap().release().await.unwrap();
        server.cli(&["CONFIG", "RESETSTAT"]);
    }
    assert_eq!(server.cli(&["EXISTS", KEY]), "0");
}

#[tokio::test]
async fn a_release_wakes_the_waiter() {
    let bench = Bench::new().await;
    let held = bench.other.lock(KEY).fencing(false).acquire().await.unwrap();
    // Polling would take longer than the limit of the test.
    let request = bench.pool.lock(KEY).fencing(false).wait(LONG).acquire();
    let waiting = tokio::spawn(async move { request.await.unwrap() });
    let asked = || bench.server.cli(&["INFO", "commandstats"]).contains("cmdstat_client|caching:");
    eventually_async(SOON, "the waiter has the key watched", async || asked()).await;
    held.release().await.unwrap();
    waiting.await.unwrap().release().await.unwrap();
    bench.until_free().await;
}

#[tokio::test]
async fn a_held_lock_is_renewed_and_a_stolen_one_is_lost() {
    let bench = Bench::new().await;
    let ttl = Duration::from_secs(2);
    let guard = bench.pool.lock(KEY).fencing(false).ttl(ttl).acquire().await.unwrap();
    tokio::time::sleep(ttl * 3 / 2).await;
    assert!(guard.is_held());
    guard.verify().await.unwrap();
    bench.is_stolen();
    let lost = tokio::time::timeout(SOON, guard.lost()).await.unwrap();
    assert_eq!(lost.kind(), ErrorKind::Lost);
    assert!(guard.release().await.unwrap_err().is_lost());
    bench.is_still_held_by_the_stranger();
}

#[tokio::test]
async fn a_key_is_kept_for_its_min_hold() {
    let bench = Bench::new().await;
    let hold = Duration::from_secs(30);
    let guard = bench.pool.lock(KEY).fencing(false).min_hold(hold).acquire().await.unwrap();
    guard.release().await.unwrap();
    let left: u64 = bench.server.cli(&["PTTL", KEY]).parse().unwrap();
    assert!((20_000..=30_000).contains(&left), "{left} ms left");
}

#[tokio::test]
async fn a_key_of_another_type_is_reported_and_left_unchanged() {
    let bench = Bench::new().await;
    bench.server.cli(&["HSET", KEY, "uuid:1", "1"]);
    for keys in [vec![KEY], vec![KEY, "order:43"]] {
        let error = bench.pool.lock_all(keys).fencing(false).acquire().await.unwrap_err();
        assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    }
    assert_eq!(bench.server.cli(&["HGET", KEY, "uuid:1"]), "1");
    assert_eq!(bench.server.cli(&["EXISTS", "order:43"]), "0");
}

/// The server has granted; the reply is lost.
#[tokio::test]
async fn a_grant_whose_reply_is_lost_is_found_again() {
    for action in [Action::DropReply, Action::CutBeforeReply, Action::CutBeforeForward] {
        let bench = Bench::new().await;
        let monitor = Monitor::start(&bench.server);
        let trap = bench.proxy.on_next(|command| command.is("SET"), action);
        let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
        assert!(trap.sprung(), "{action:?}");
        guard.verify().await.unwrap();
        let left: u64 = bench.server.cli(&["PTTL", KEY]).parse().unwrap();
        assert!(left > 30_000, "{action:?}: {left} ms left");
        let token = bench.holder();
        for ran in monitor.settled().into_iter().filter(|ran| ran.is("SET", KEY)) {
            assert_eq!(ran.args[2], token, "one token for all tries");
        }
        assert!(bench.other.lock(KEY).fencing(false).try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        bench.until_free().await;
    }
}

#[tokio::test]
async fn a_single_try_whose_reply_is_lost_leaves_nothing_behind() {
    for action in [Action::DropReply, Action::CutBeforeReply] {
        let bench = Bench::new().await;
        let trap = bench.proxy.on_next(named("SET"), action);
        let error = bench.pool.lock(KEY).fencing(false).try_acquire().await.unwrap_err();
        assert!(trap.sprung() && error.is_backend(), "{error}");
        bench.until_free().await;
        let guard = bench.other.lock(KEY).fencing(false).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_request_that_arrives_after_its_caller_is_gone_is_taken_back() {
    let bench = Bench::new().await;
    let trap = bench.proxy.on_next(named("SET"), Action::HoldRequest);
    let request = bench.pool.lock(KEY).fencing(false).wait(LONG).acquire();
    let waiting = tokio::spawn(async move { request.await.map(drop) });
    bench.until_sprung(&trap).await;
    waiting.abort();
    bench.proxy.release_held();
    eventually_async(SOON, "the request arrives", async || {
        bench.server.cli(&["INFO", "commandstats"]).contains("cmdstat_set:")
    })
    .await;
    bench.until_free().await;
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_is_repeated() {
    for (command, action) in [
        ("WATCH", Action::DropReply),
        ("WATCH", Action::CutBeforeReply),
        ("WATCH", Action::CutBeforeForward),
        ("EXEC", Action::DropReply),
        ("EXEC", Action::CutBeforeReply),
        ("EXEC", Action::CutBeforeForward),
        ("MULTI", Action::CutBeforeForward),
    ] {
        let bench = Bench::patient().await;
        let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
        let trap = bench.proxy.on_next(named(command), action);
        guard.release().await.unwrap_or_else(|error| panic!("{command} {action:?}: {error}"));
        assert!(trap.sprung(), "{command} {action:?}");
        bench.until_free().await;
        let again = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
        again.release().await.unwrap();
    }
}

/// Between the read and the write of a release the lock expires, and another client takes it.
#[tokio::test]
async fn a_lock_that_changes_hands_while_it_is_released_is_not_freed() {
    let bench = Bench::patient().await;
    let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
    let trap = bench.proxy.on_next(named("MULTI"), Action::HoldRequest);
    let releasing = tokio::spawn(guard.release());
    bench.until_sprung(&trap).await;
    bench.is_stolen();
    bench.proxy.release_held();
    // After a try without an answer, "not there" may be the effect of that try, and is no error.
    let _ = releasing.await.unwrap();
    bench.is_still_held_by_the_stranger();
}

/// The same, and the transaction arrives after its sender has given up.
#[tokio::test]
async fn a_late_release_does_not_free_a_lock_of_another_owner() {
    let bench = Bench::patient().await;
    let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
    let trap = bench.proxy.on_next(named("MULTI"), Action::HoldRequest);
    guard.release().await.unwrap();
    assert!(trap.sprung());
    bench.until_free().await;
    let other = bench.other.lock(KEY).fencing(false).acquire().await.unwrap();
    let held = bench.holder();
    let before = bench.server.calls("exec");
    bench.proxy.release_held();
    eventually_async(SOON, "the late transaction", async || bench.server.calls("exec") > before)
        .await;
    assert_eq!(bench.holder(), held);
    other.verify().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_that_changes_hands_while_it_is_renewed_is_not_extended() {
    let bench = Bench::new().await;
    let ttl = Duration::from_secs(2);
    let guard = bench.pool.lock(KEY).fencing(false).ttl(ttl).acquire().await.unwrap();
    let trap = bench.proxy.on_next(named("MULTI"), Action::HoldRequest);
    bench.until_sprung(&trap).await;
    bench.server.cli(&["DEL", KEY]);
    bench.server.cli(&["SET", KEY, STRANGER]);
    bench.proxy.release_held();
    let lost = tokio::time::timeout(SOON, guard.lost()).await.unwrap();
    assert_eq!(lost.kind(), ErrorKind::Lost);
    drop(guard);
    assert_eq!(bench.server.cli(&["PTTL", KEY]), "-1");
    assert_eq!(bench.holder(), STRANGER);
}

#[tokio::test]
async fn several_keys_are_taken_in_one_transaction_or_not_at_all() {
    let bench = Bench::patient().await;
    let keys = ["order:1", "order:2", KEY];
    // One of them is taken after they were read.
    let trap = bench.proxy.on_next(named("MULTI"), Action::HoldRequest);
    let request = bench.pool.lock_all(keys).fencing(false).wait(Duration::ZERO).acquire();
    let asking = tokio::spawn(request);
    bench.until_sprung(&trap).await;
    bench.is_stolen();
    bench.proxy.release_held();
    let error = asking.await.unwrap().unwrap_err();
    assert!(error.is_conflict(), "{error}");
    assert_eq!(bench.server.cli(&["EXISTS", "order:1", "order:2"]), "0");
    bench.is_still_held_by_the_stranger();
    bench.server.cli(&["DEL", KEY]);
    // All of them were taken, and the answer is lost.
    for action in [Action::DropReply, Action::CutBeforeReply] {
        let trap = bench.proxy.on_next(named("EXEC"), action);
        let guard = bench.pool.lock_all(keys).fencing(false).acquire().await.unwrap();
        assert!(trap.sprung());
        guard.verify().await.unwrap();
        let busy = bench.other.lock("order:2").fencing(false).try_acquire().await.unwrap();
        assert!(busy.is_none());
        guard.release().await.unwrap();
        assert_eq!(bench.server.cli(&["EXISTS", "order:1", "order:2", KEY]), "0");
    }
}

/// Two exchanges on one connection would overwrite the watch of each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_counts_right() {
    let server = RedisServer::start();
    let pools = [
        LockPool::builder(off(&server.url())).wait(LONG).connect().await.unwrap(),
        LockPool::builder(off(&server.url())).wait(LONG).connect().await.unwrap(),
        LockPool::builder(server.url()).wait(LONG).connect().await.unwrap(),
    ];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..60 {
        let (pool, key) = (pools[n % 3].clone(), format!("count:{}", n % 2));
        let mut redis = redis::Client::open(server.url())
            .unwrap()
            .get_multiplexed_async_connection()
            .await
            .unwrap();
        tasks.spawn(async move {
            for _ in 0..5 {
                let guard = pool.lock(&*key).fencing(false).acquire().await.unwrap();
                let counter = format!("{key}:value");
                let get = redis::cmd("GET").arg(&counter).query_async(&mut redis).await;
                let count: Option<u64> = get.unwrap();
                let mut set = redis::cmd("SET");
                set.arg(&counter).arg(count.unwrap_or(0) + 1);
                set.exec_async(&mut redis).await.unwrap();
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    assert_eq!(server.cli(&["MGET", "count:0:value", "count:1:value"]), "150\n150");
    assert_eq!(server.cli(&["EXISTS", "count:0", "count:1"]), "0");
}

#[tokio::test]
async fn it_goes_on_when_the_server_is_back() {
    let bench = Bench::new().await;
    let guard = bench.pool.lock(KEY).fencing(false).acquire().await.unwrap();
    guard.release().await.unwrap();
    for round in 0..3 {
        match round {
            0 => bench.server.kill_clients(),
            1 => bench.server.restart(),
            _ => bench.proxy.cut(),
        }
        let guard = bench.pool.lock(KEY).fencing(false).wait(SOON).acquire().await.unwrap();
        guard.release().await.unwrap();
        bench.until_free().await;
    }
}

/// As after a fail-over: the former server answers as before, and has no lock.
#[tokio::test]
async fn transactions_follow_the_connection_to_another_server() {
    let bench = Bench::patient().await;
    let next = RedisServer::start();
    let held = async || bench.pool.lock(KEY).fencing(false).wait(SOON).acquire().await.unwrap();
    held().await.release().await.unwrap();
    assert!(bench.server.calls("exec") > 0, "the release is a transaction");
    bench.proxy.redirect(next.port());
    // Those with pushes. The connection for transactions has none, and stays open.
    for client in bench.server.cli(&["CLIENT", "LIST"]).lines().filter(|it| it.contains("resp=3")) {
        let id = client.split([' ', '=']).nth(1).unwrap();
        bench.server.cli(&["CLIENT", "KILL", "ID", id]);
    }
    let guard = held().await;
    assert_eq!(next.cli(&["EXISTS", KEY]), "1");
    guard.release().await.unwrap();
    assert_eq!(next.cli(&["EXISTS", KEY]), "0");
}

#[tokio::test]
async fn a_shutdown_frees_everything() {
    let bench = Bench::patient().await;
    let mut guards = Vec::new();
    for n in 0..20 {
        guards.push(bench.pool.lock(format!("order:{n}")).fencing(false).acquire().await.unwrap());
    }
    let report = bench.pool.shutdown(Duration::ZERO).await;
    assert_eq!((report.released, report.abandoned), (20, 0));
    assert_eq!(bench.server.cli(&["DBSIZE"]), "0");
}

/// Each release takes two round trips, and those of many tasks share them.
#[tokio::test]
async fn releases_of_many_tasks_do_not_wait_for_each_other() {
    const TASKS: u64 = 100;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let limit = Duration::from_secs(2);
    let builder = LockPool::builder(off(proxy.url())).ttl(LONG).wait(LONG).request_timeout(limit);
    let pool = builder.connect().await.unwrap();
    let mut guards = Vec::new();
    for n in 0..TASKS {
        guards.push(pool.lock(format!("k{n}")).fencing(false).acquire().await.unwrap());
    }
    let before = server.calls("watch");
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.delay(direction, Duration::from_millis(100));
    }
    let mut tasks = tokio::task::JoinSet::new();
    for (n, guard) in (0..TASKS).zip(guards) {
        tasks.spawn(async move {
            // Not in one call.
            tokio::time::sleep(Duration::from_millis(5 * n)).await;
            guard.release().await
        });
    }
    let failed: Vec<_> = tasks.join_all().await.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{} of {TASKS} releases: {}", failed.len(), failed[0]);
    let exchanges = server.calls("watch") - before;
    println!("{TASKS} releases in {exchanges} exchanges");
    assert!(exchanges < TASKS / 2, "{exchanges}");
}

/// The connection for transactions takes two round trips to log in, and the write two more: longer than one request may take.
#[tokio::test]
async fn over_a_slow_link_the_connection_for_writes_is_opened_once() {
    let server = RedisServer::builder().password("secret").start();
    let proxy = FaultProxy::to_port(server.port());
    let url = format!("redis://:secret@127.0.0.1:{}?scripts=off", proxy.port());
    let builder = LockPool::builder(url).ttl(LONG).request_timeout(LONG_REQUEST_TIMEOUT);
    let pool = builder.connect().await.unwrap();
    let guard = pool.lock(KEY).fencing(false).acquire().await.unwrap();
    proxy.delay(Direction::ToClient, Duration::from_millis(450));
    // The caller of the release may get an error before.
    drop(guard);
    eventually_async(SOON, "the key is freed", async || server.cli(&["EXISTS", KEY]) == "0").await;
}
