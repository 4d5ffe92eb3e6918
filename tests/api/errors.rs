//! Errors of calls that the store cannot or will not serve.

#![allow(clippy::disallowed_methods)]

use std::fmt::Debug;
use std::fs;
use std::future::Future;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockError, LockPool, PoolBuilder, Wait, distributed_lock};
use lock_tests::expected_error::{
    CANARY, CONNECT_TIMEOUT, ExpectedError, KEY, REQUEST_TIMEOUT, chain, installed, set, unshown,
    with_password, within, works,
};
use lock_tests::logs::Logs;
use lock_tests::tls::{Authority, Tls};
use lock_tests::{RedisServer, eventually, eventually_async};

#[tokio::test]
async fn urls_that_cannot_be_right() {
    let secret = |rest: &str| rest.replace("PW", CANARY);
    for (url, says) in [
        ("", "no scheme"),
        ("127.0.0.1:6379", "no scheme"),
        (":PW@127.0.0.1:6379", "no scheme"),
        ("redis:/:PW@127.0.0.1", "no `://` after `redis`"),
        ("Redis:PW@127.0.0.1", "write `redis://host:6379`"),
        ("reds://:PW@127.0.0.1", "`reds://`"),
        (" redis://:PW@127.0.0.1", "redis://"),
        ("http://:PW@127.0.0.1:6379", "`http://`"),
        ("redis+sentinel://:PW@127.0.0.1", "no service"),
        ("redis+sentinel://:PW@a,/mymaster", "no host"),
        // The scheme forgotten, and this in the password.
        ("worker:PW://@127.0.0.1:6379", "no scheme"),
        ("redis://", "no host"),
        ("redis://:PW@", "host"),
        ("redis://:PW@:6379", "host"),
        ("redis://:PW@127.0.0.1:port", "port"),
        ("redis://:PW@127.0.0.1:99999", "port"),
        ("redis://:PW@127.0.0.1/orders", "`/orders`"),
        ("redis://:PW@127.0.0.1/70000", "`/70000`"),
        ("redis://:PW@127.0.0.1?ttl=5s", "set LOCK_TTL, or call `PoolBuilder::ttl`"),
        ("redis://:PW@127.0.0.1?ca=/x.pem", "rediss://"),
        ("redis://:PW@127.0.0.1#insecure", "#fragment"),
        ("rediss://:PW@127.0.0.1#insecure", "?ca="),
        ("rediss://:PW@127.0.0.1?cert=/x.pem", "&key="),
        ("rediss://:PW@127.0.0.1?ca=/nowhere.pem", "/nowhere.pem"),
        ("redis://:PW%ff@127.0.0.1", "percent-encoded"),
        // Characters that end the password, because they are not percent-encoded.
        ("redis://worker:12/PW@127.0.0.1:6379", "%2F"),
        ("redis://worker:12?PW@127.0.0.1:6379", "%3F"),
        ("redis://worker:12?PW=@127.0.0.1:6379", "%3F"),
        ("redis://worker:12#PW@127.0.0.1:6379", "%23"),
    ] {
        let url = secret(url);
        let error = within(REQUEST_TIMEOUT, lock_runtime::init(&url)).await.unwrap_err();
        ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Config) }.check(
            &url,
            &error,
            &[says],
        );
    }
}

#[tokio::test]
async fn a_store_that_is_down_or_is_no_store_at_init() {
    let free = lock_tests::server::another_port();
    let silent = Stub::start(b"");
    let closing = Stub::closing();
    let web = Stub::start(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    let garbage = Stub::start(b"\x15\x03\x01\x00\x02\x02\x16");
    for (case, port, says) in [
        ("nothing listens", free, "refused"),
        ("a port that stays silent", silent.port, "did not answer within"),
        ("a port that hangs up", closing.port, "closed the connection"),
        ("a web server", web.port, "does not speak the Redis protocol"),
        ("a port that talks garbage", garbage.port, "does not speak the Redis protocol"),
    ] {
        let url = format!("redis://worker:{CANARY}@127.0.0.1:{port}");
        let error = within(CONNECT_TIMEOUT, lock_runtime::init(&url)).await.unwrap_err();
        let at = format!("127.0.0.1:{port}");
        ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Backend) }.check(
            case,
            &error,
            &[says, &at],
        );
    }
    let url = format!("redis://:{CANARY}@no-such-host.invalid");
    let error = within(CONNECT_TIMEOUT, lock_runtime::init(&url)).await.unwrap_err();
    ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Backend) }.check(
        "a host that does not exist",
        &error,
        &["no-such-host.invalid"],
    );
}

#[tokio::test]
async fn a_server_that_rejects_the_login() {
    let server = RedisServer::builder().password(CANARY).start();
    let port = server.port();
    for (case, credentials, says) in [
        ("no password", String::new(), "wants a password"),
        ("a wrong password", format!(":{CANARY}-not@"), "does not accept"),
        ("an unknown user", format!("worker:{CANARY}@"), "does not accept"),
        ("the password in the user's place", format!("{CANARY}@"), "wants a password"),
    ] {
        let url = format!("redis://{credentials}127.0.0.1:{port}");
        let error = within(REQUEST_TIMEOUT, lock_runtime::init(&url)).await.unwrap_err();
        ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Backend) }.check(
            case,
            &error,
            &[says],
        );
    }
}

#[tokio::test]
async fn tls_that_cannot_be_trusted() {
    let authority = Authority::new();
    let names = ["127.0.0.1", "localhost"];
    let good = RedisServer::builder().tls(Tls::new(&authority)).start();
    let other =
        RedisServer::builder().tls(Tls::new(&authority).server(authority.issue(&["other"])));
    let expired = Tls::new(&authority).server(authority.issue_expired(&names));
    let (other, expired) = (other.start(), RedisServer::builder().tls(expired).start());
    let strict = RedisServer::builder().tls(Tls::new(&authority).require_client_certificate());
    let strict = strict.start();
    let ca = good.tls_files().authority.display().to_string();
    let tls = |server: &RedisServer| server.tls_port().unwrap();
    for (case, url, says) in [
        ("untrusted authority", format!("rediss://127.0.0.1:{}", tls(&good)), "?ca="),
        ("wrong host name", format!("rediss://127.0.0.1:{}?ca={ca}", tls(&other)), "not valid for"),
        ("expired", format!("rediss://127.0.0.1:{}?ca={ca}", tls(&expired)), "expired"),
        ("no client certificate", format!("rediss://127.0.0.1:{}?ca={ca}", tls(&strict)), "&key="),
        ("TLS to a plain port", format!("rediss://127.0.0.1:{}?ca={ca}", good.port()), "TLS"),
        ("plain to a TLS port", format!("redis://127.0.0.1:{}", tls(&good)), "`rediss://`"),
    ] {
        let url = url.replacen("//", &format!("//:{CANARY}@"), 1);
        let error = within(CONNECT_TIMEOUT, lock_runtime::init(&url)).await.unwrap_err();
        ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Backend) }.check(
            case,
            &error,
            &[says],
        );
    }
    // The same server accepts the right password.
    let url = format!("rediss://127.0.0.1:{}?ca={ca}", tls(&good));
    works(&LockPool::connect(&url).await.unwrap()).await;
}

#[tokio::test]
async fn users_without_permissions() {
    for (n, (case, may, fencing, says)) in [
        ("not the key", "~other:* +@all", false, ["NOPERM", "key"]),
        ("not the key, in a script", "~other:* ~lock_runtime:* +@all", true, ["NOPERM", "key"]),
        ("not the fence", "~order:* +@all", true, ["NOPERM", "lock_runtime:fence"]),
        ("no writing", "~* +@all -set", false, ["NOPERM", "+set"]),
    ]
    .into_iter()
    .enumerate()
    {
        let line = format!("user worker on >{CANARY} &* {may}");
        let server = RedisServer::builder().config_line(&line).start();
        let url = format!("redis://worker:{CANARY}@127.0.0.1:{}", server.port());
        let name = format!("acl-{n}");
        let pool = installed(&name, LockPool::builder(url)).await;
        let request = pool.lock(KEY).fencing(fencing).wait(Duration::from_secs(20));
        let error = within(REQUEST_TIMEOUT, request.acquire()).await.unwrap_err();
        ExpectedError::by(&name).check(case, &error, &says);
        assert_eq!(server.cli(&["EXISTS", KEY]), "0", "{case}: nothing is left behind");
    }
}

/// ExpectedError when connecting: a lock would be granted by a plain command, and then be stuck until its ttl is over.
#[tokio::test]
async fn a_user_without_scripts_takes_no_lock_that_it_cannot_release() {
    for may in ["~* +@all -@scripting", "~* +@all -eval -evalsha"] {
        let line = format!("user worker on >{CANARY} &* {may}");
        let server = RedisServer::builder().config_line(&line).start();
        let url = format!("redis://worker:{CANARY}@127.0.0.1:{}?scripts=on", server.port());
        let error = within(REQUEST_TIMEOUT, LockPool::connect(&url)).await.unwrap_err();
        ExpectedError::of(ErrorKind::Backend).check(may, &error, &["NOPERM", "eval"]);
    }
}

/// The user that the text for NOPERM recommends can do everything.
#[tokio::test]
async fn the_recommended_user_may_do_all_that_is_needed() {
    let refused = RedisServer::builder()
        .config_line(&format!("user worker on >{CANARY} ~* &* +@all -@scripting"))
        .start();
    let url = |server: &RedisServer| format!("redis://worker:{CANARY}@127.0.0.1:{}", server.port());
    let with_scripts = format!("{}?scripts=on", url(&refused));
    let text = LockPool::connect(&with_scripts).await.unwrap_err().to_string();
    let commands = text.split('`').find(|part| part.starts_with('+')).expect("commands are listed");
    let line =
        format!("user worker on >{CANARY} resetchannels ~order:* ~lock_runtime:* {commands}");
    let server = RedisServer::builder().config_line(&line).start();
    let pool = LockPool::connect(&url(&server)).await.unwrap();
    works(&pool).await;
    pool.health().await.unwrap();
    let guard = pool.lock(KEY).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    guard.verify().await.unwrap();
    eventually_async(Duration::from_secs(20), "renewals", async || {
        server.cli(&["INFO", "commandstats"]).contains("cmdstat_pexpire:")
    })
    .await;
    guard.release().await.unwrap();
    let guard = pool.lock(KEY).min_hold(Duration::from_millis(1)).acquire().await.unwrap();
    guard.release().await.unwrap();
    let held = pool.lock("order:8").acquire().await.unwrap();
    let busy = pool.lock_all([KEY, "order:8"]).wait(Duration::ZERO).acquire().await.unwrap_err();
    assert!(busy.is_conflict(), "{busy}");
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_server_that_refuses_says_why_and_serves_again() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    let server = with_password().arg("dir", data.to_str().unwrap()).start();
    let pool = installed("refusals", LockPool::builder(server.url())).await;
    let cases: [Refusal; 6] = [
        Refusal {
            what: "a hash where the lock should be",
            provoke: |server| drop(server.cli(&["HSET", KEY, "uuid:1", "1"])),
            end: |server| drop(server.cli(&["DEL", KEY])),
            says: &["WRONGTYPE", "hash", "Redisson"],
        },
        Refusal {
            what: "memory is full",
            provoke: |server| set(server, "maxmemory", "1"),
            end: |server| set(server, "maxmemory", "0"),
            says: &["OOM", "`maxmemory`"],
        },
        Refusal {
            what: "a replica",
            provoke: |server| drop(server.cli(&["REPLICAOF", "127.0.0.1", "1"])),
            end: |server| drop(server.cli(&["REPLICAOF", "NO", "ONE"])),
            says: &["READONLY", "master"],
        },
        Refusal {
            what: "too few replicas",
            provoke: |server| set(server, "min-replicas-to-write", "1"),
            end: |server| set(server, "min-replicas-to-write", "0"),
            says: &["NOREPLICAS", "`min-replicas-to-write`"],
        },
        Refusal {
            what: "replicas without their master",
            provoke: |server| {
                set(server, "replica-serve-stale-data", "no");
                server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
            },
            end: |server| drop(server.cli(&["REPLICAOF", "NO", "ONE"])),
            // The first refusal lasts until there is a master.
            says: &["READONLY", "master"],
        },
        // Last, as its folder is gone for good.
        Refusal {
            what: "snapshots cannot be written",
            provoke: |server| {
                set(server, "save", "3600 1");
                fs::remove_dir(server.cli(&["CONFIG", "GET", "dir"]).lines().last().unwrap())
                    .unwrap();
                server.cli(&["BGSAVE"]);
                eventually(Duration::from_secs(10), "the snapshot fails", || {
                    let info = server.cli(&["INFO", "persistence"]);
                    info.contains("rdb_last_bgsave_status:err")
                });
            },
            end: |server| set(server, "stop-writes-on-bgsave-error", "no"),
            says: &["MISCONF", "disk"],
        },
    ];
    for Refusal { what, provoke, end, says } in cases {
        provoke(&server);
        for fencing in [false, true] {
            let wait = Duration::from_millis(100);
            let request = || pool.lock(KEY).fencing(fencing).wait(wait);
            let error = until_it_says(says, async || request().acquire().await).await;
            let case = format!("{what}, {}", if fencing { "fenced" } else { "unfenced" });
            ExpectedError::by("refusals").check(&case, &error, says);
            let error = until_it_says(says, async || settle(&pool, 7, wait).await).await;
            let expected =
                ExpectedError { template: Some("order:<id>"), ..ExpectedError::by("refusals") };
            expected.check(&format!("{what}, annotated"), &error, says);
        }
        end(&server);
        works(&pool).await;
    }
}

#[tokio::test]
async fn a_fence_counter_with_a_foreign_value() {
    let server = with_password().start();
    let pool = installed("fences", LockPool::builder(server.url())).await;
    let counter = "lock_runtime:fence";
    server.cli(&["HSET", counter, "a", "b"]);
    let error = within(REQUEST_TIMEOUT, pool.lock(KEY).acquire()).await.unwrap_err();
    ExpectedError::by("fences").check("a hash as fence counter", &error, &["WRONGTYPE", counter]);
    assert_eq!(server.cli(&["EXISTS", KEY]), "0", "nothing was taken");
    server.cli(&["DEL", counter]);
    // The server's time in microseconds takes over from what is no fence.
    for garbage in ["garbage", "", "-5", "nan", "inf", "-inf", "1e300", "18446744073709551615"] {
        server.cli(&["SET", counter, garbage]);
        let mut last = 1_600_000_000_000_000;
        for _ in 0..2 {
            let guard = pool.lock(KEY).acquire().await.unwrap();
            let fence = guard.fence().unwrap().get();
            assert!((last + 1..1 << 53).contains(&fence), "{garbage}: {fence} after {last}");
            last = fence;
            guard.release().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_server_that_is_loading() {
    let server = with_password()
        .arg("enable-debug-command", "yes")
        // In microseconds. It loads for 20 s, or until the test has seen it.
        .arg("key-load-delay", "20000")
        .arg("loading-process-events-interval-bytes", "1024")
        .start();
    let pool = installed("loading", LockPool::builder(server.url())).await;
    server.cli(&["DEBUG", "POPULATE", "1000", "key", "100"]);
    server.cli(&["SAVE"]);
    let server = Arc::new(server);
    let again = Arc::clone(&server);
    let restarted = tokio::task::spawn_blocking(move || again.restart());
    let mut error = None;
    eventually_async(Duration::from_secs(20), "the server says LOADING", async || {
        // At first it may not be down yet.
        let Err(answer) = pool.lock(KEY).wait(Duration::ZERO).acquire().await else {
            return false;
        };
        let loading = answer.to_string().contains("LOADING");
        error = Some(answer);
        loading
    })
    .await;
    ExpectedError::by("loading").check("loading", &error.unwrap(), &["LOADING", "repeated"]);
    assert_eq!(server.cli(&["CONFIG", "SET", "key-load-delay", "0"]), "OK");
    // A longer wait is served.
    let guard = pool.lock(KEY).wait(Duration::from_secs(20)).acquire().await.unwrap();
    guard.release().await.unwrap();
    restarted.await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_busy_with_a_script() {
    let server = with_password().arg("busy-reply-threshold", "50").start();
    let pool = installed("busy", LockPool::builder(server.url())).await;
    let mut looping = server.connect().unwrap();
    let script = lock_tests::resp::command(&["EVAL", "while true do end", "0"]);
    looping.write_all(&script).unwrap();
    let mut error = None;
    eventually_async(Duration::from_secs(10), "the server says BUSY", async || {
        let answer = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
        let busy = answer.to_string().contains("BUSY");
        error = Some(answer);
        busy
    })
    .await;
    ExpectedError::by("busy").check(
        "a script that does not end",
        &error.unwrap(),
        &["BUSY", "SCRIPT KILL"],
    );
    assert_eq!(server.cli(&["SCRIPT", "KILL"]), "OK");
    works(&pool).await;
}

#[tokio::test]
async fn a_server_with_too_many_clients() {
    let server = with_password().start();
    let pool = installed("clients", LockPool::builder(server.url())).await;
    server.cli(&["CONFIG", "SET", "maxclients", "1"]);
    let error = within(CONNECT_TIMEOUT, lock_runtime::init(&server.url())).await.unwrap_err();
    let expected = ExpectedError { pool: Some("default"), ..ExpectedError::of(ErrorKind::Backend) };
    expected.check("too many clients at init", &error, &["`maxclients`"]);
    server.kill_clients();
    let mut error = None;
    eventually_async(Duration::from_secs(20), "the server takes no more clients", async || {
        let request = pool.lock(KEY).wait(Duration::from_millis(300)).acquire();
        let answer = within(REQUEST_TIMEOUT, request).await.unwrap_err();
        let refused = answer.to_string().contains("`maxclients`");
        error = Some(answer);
        refused
    })
    .await;
    let error = error.unwrap();
    ExpectedError::by("clients").check("too many clients later", &error, &["`maxclients`"]);
    set(&server, "maxclients", "100");
    works(&pool).await;
}

#[tokio::test]
async fn a_password_that_changes_under_way() {
    let server = with_password().start();
    let pool = installed("rotation", LockPool::builder(server.url())).await;
    set(&server, "requirepass", "another");
    server.kill_clients();
    let mut error = None;
    eventually_async(Duration::from_secs(5), "the login is refused", async || {
        let answer = pool.lock(KEY).wait(Duration::from_millis(50)).acquire().await.unwrap_err();
        let refused = answer.to_string().contains("does not accept");
        error = Some(answer);
        refused
    })
    .await;
    ExpectedError::by("rotation").check("another password by now", &error.unwrap(), &["password"]);
    set(&server, "requirepass", CANARY);
    works(&pool).await;
}

#[tokio::test]
async fn a_server_that_goes_down_and_comes_back() {
    let server = with_password().start();
    let pool = installed("down", LockPool::builder(server.url())).await;
    works(&pool).await;
    server.kill();

    let error =
        within(REQUEST_TIMEOUT, pool.lock(KEY).wait(Duration::ZERO).acquire()).await.unwrap_err();
    let at = format!("127.0.0.1:{}", server.port());
    ExpectedError::by("down").check("down, one try", &error, &[&at, "check that the server is up"]);
    assert!(pool.lock(KEY).try_acquire().await.unwrap_err().is_backend(), "not `None`");

    let wait = Duration::from_secs(1);
    let began = Instant::now();
    let error =
        within(wait + REQUEST_TIMEOUT, pool.lock(KEY).wait(wait).acquire()).await.unwrap_err();
    assert!(began.elapsed() >= wait, "it was worth waiting for");
    ExpectedError::by("down").check("down, a second's wait", &error, &[&at, "refused"]);

    let error = within(REQUEST_TIMEOUT, pool.health()).await.unwrap_err();
    ExpectedError { template: None, ..ExpectedError::by("down") }.check(
        "down, health",
        &error,
        &[&at],
    );

    // Waiters behind the head get the error of the head.
    let waits = [800, 300, 100, 0].map(Duration::from_millis);
    let mut queue = tokio::task::JoinSet::new();
    for wait in waits {
        let pool = pool.clone();
        queue.spawn(async move { pool.lock(KEY).wait(wait).acquire().await });
    }
    for outcome in within(REQUEST_TIMEOUT, queue.join_all()).await {
        ExpectedError::by("down").check("down, in the wait queue", &outcome.unwrap_err(), &[&at]);
    }

    server.restart();
    works(&pool).await;
    pool.health().await.unwrap();
}

#[tokio::test]
async fn a_server_that_hangs_is_no_conflict() {
    let server = with_password().start();
    let pool = installed("hung", LockPool::builder(server.url())).await;
    server.pause();
    // The second's wait is over before the first knows that the server hangs.
    let (first, second) = within(2 * REQUEST_TIMEOUT, async {
        tokio::join!(
            pool.lock(KEY).wait(Duration::from_millis(1_500)).acquire(),
            pool.lock(KEY).wait(Duration::from_millis(700)).acquire(),
        )
    })
    .await;
    ExpectedError::by("hung").check("hung", &first.unwrap_err(), &["answer"]);
    ExpectedError::by("hung").check("hung, in the wait queue", &second.unwrap_err(), &["answer"]);
    server.resume();
    works(&pool).await;
    eventually_async(Duration::from_secs(5), "nothing stays taken", async || {
        server.cli(&["EXISTS", KEY]) == "0"
    })
    .await;
}

/// A failure of another key is not in the errors of waiters for this one.
#[tokio::test]
async fn a_failure_of_one_key_is_not_reported_for_another() {
    let server = with_password().start();
    let pool = installed("two keys", LockPool::builder(server.url())).await;
    server.cli(&["HSET", "order:8", "a", "b"]);
    let held = pool.lock(KEY).acquire().await.unwrap();
    let (waiter, other) = tokio::join!(
        pool.lock(KEY).wait(Duration::from_millis(300)).acquire(),
        pool.lock("order:8").acquire(),
    );
    assert!(other.unwrap_err().is_backend());
    let expected = ExpectedError { kind: ErrorKind::Conflict, ..ExpectedError::by("two keys") };
    expected.check(
        "held, while another key is broken",
        &waiter.unwrap_err(),
        &["held by another call or guard of this process"],
    );
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_held_by_another_owner() {
    let server = with_password().start();
    let pool = installed("conflicts", LockPool::builder(server.url())).await;
    let expected = ExpectedError { kind: ErrorKind::Conflict, ..ExpectedError::by("conflicts") };
    server.cli(&["SET", KEY, "another", "PX", "60000"]);
    for (wait, says) in [(0, "held by another owner"), (200, "within 200ms")] {
        for fencing in [false, true] {
            let wait = Duration::from_millis(wait);
            let request = || pool.lock(KEY).fencing(fencing).wait(wait);
            let error = until_it_says(&[says], async || request().acquire().await).await;
            expected.check("held elsewhere", &error, &[says]);
        }
    }
    let wait = Duration::from_millis(100);
    let error = until_it_says(&["held"], async || settle(&pool, 7, wait).await).await;
    ExpectedError { template: Some("order:<id>"), ..expected }.check(
        "held elsewhere",
        &error,
        &["wait"],
    );
    server.cli(&["DEL", KEY]);
    let held = pool.lock(KEY).acquire().await.unwrap();
    let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
    let says = ["the lock is held by another call or guard of this process", "release it first"];
    expected.check("held by another task", &error, &says);
    held.release().await.unwrap();
}

/// A guard is not seen by the detection of nested calls.
#[tokio::test]
async fn a_call_that_waits_for_a_guard_of_its_process() {
    let pool = installed("guards", LockPool::builder("memory://")).await;
    let held = pool.lock(KEY).acquire().await.unwrap();
    let error = settle(&pool, 7, Duration::from_millis(300)).await.unwrap_err();
    let expected = ExpectedError { kind: ErrorKind::Conflict, ..ExpectedError::by("guards") };
    ExpectedError { template: Some("order:<id>"), ..expected }.check(
        "a guard of the caller",
        &error,
        &[
            "the lock is held by another call or guard of this process",
            "; not acquired within 300ms",
            "; try again later, raise `wait`, or answer the request with a conflict",
            "; a guard that the caller itself holds counts: release it first",
        ],
    );
    held.release().await.unwrap();
    settle(&pool, 7, Duration::from_millis(300)).await.unwrap();
}

#[tokio::test]
async fn a_lock_that_is_lost() {
    let server = with_password().start();
    let pool = installed("losses", LockPool::builder(server.url())).await;
    let expected = ExpectedError { kind: ErrorKind::Lost, ..ExpectedError::by("losses") };

    let guard = pool.lock(KEY).acquire().await.unwrap();
    server.cli(&["DEL", KEY]);
    let error = guard.verify().await.unwrap_err();
    expected.check("deleted, verify", &error, &["does not hold it", "fence"]);
    expected.check("deleted, release", &guard.release().await.unwrap_err(), &["no longer held"]);

    let guard = pool.lock(KEY).acquire().await.unwrap();
    server.cli(&["SET", KEY, "another"]);
    expected.check(
        "taken, release",
        &guard.release().await.unwrap_err(),
        &["no longer held", "fence"],
    );
    assert_eq!(server.cli(&["GET", KEY]), "another", "which is not touched");
    server.cli(&["DEL", KEY]);

    let ttl = Duration::from_millis(800);
    let guard = pool.lock(KEY).ttl(ttl).renew(false).acquire().await.unwrap();
    let error = within(ttl, guard.lost()).await;
    expected.check("ttl over", &error, &["ttl", "`renew = true`"]);
    drop(guard);
    // Shorter than the interval of renewals, so that no late renewal decides.
    let guard = pool.lock(KEY).ttl(10 * ttl).max_hold(ttl).acquire().await.unwrap();
    let error = within(ttl, guard.lost()).await;
    expected.check("max_hold over", &error, &["max_hold"]);
    drop(guard);
    let guard = pool.lock(KEY).ttl(2 * ttl).acquire().await.unwrap();
    server.cli(&["ACL", "SETUSER", "default", "-pexpire", "-evalsha", "-eval"]);
    let error = within(2 * ttl, guard.lost()).await;
    expected.check("not allowed any more", &error, &["renewal", "NOPERM", "allow"]);
    server.cli(&["ACL", "SETUSER", "default", "+@all"]);
    drop(guard);
    let guard = pool.lock(KEY).ttl(2 * ttl).acquire().await.unwrap();
    server.kill();
    let error = within(2 * ttl, guard.lost()).await;
    expected.check("the server is gone", &error, &["renewal", "Redis at", "longer ttl"]);
    let error = within(REQUEST_TIMEOUT, guard.verify()).await.unwrap_err();
    expected.check("the server is gone, verify", &error, &["renewal"]);
}

#[tokio::test]
async fn a_release_that_the_server_does_not_take() {
    let server = with_password().start();
    let pool = installed("releases", LockPool::builder(server.url())).await;
    let guard = pool.lock(KEY).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    server.kill();
    let error = within(2 * REQUEST_TIMEOUT, guard.release()).await.unwrap_err();
    ExpectedError::by("releases").check("release, down", &error, &["check that the server is up"]);
}

#[tokio::test]
async fn a_pool_that_shuts_down() {
    let server = with_password().start();
    let pool = installed("closed", LockPool::builder(server.url())).await;
    let expected = ExpectedError { kind: ErrorKind::PoolClosed, ..ExpectedError::by("closed") };
    let held = pool.lock(KEY).acquire().await.unwrap();
    let (waiter, lost, _) = tokio::join!(
        pool.lock(KEY).wait(Wait::Forever).acquire(),
        held.lost(),
        pool.shutdown(Duration::from_millis(50)),
    );
    expected.check("waiting while it shuts down", &waiter.unwrap_err(), &["shutting down"]);
    expected.check("held while it shuts down", &lost, &["shut down", "longer grace"]);
    let error = pool.lock(KEY).acquire().await.unwrap_err();
    expected.check("after it has shut down", &error, &["shutting down"]);
}

#[tokio::test]
async fn calls_that_cannot_work() {
    let pool = installed("calls", LockPool::builder("memory://")).await;
    let (ms, day) = (Duration::from_millis, Duration::from_secs(24 * 60 * 60));
    for (case, kind, request, says) in [
        ("ttl 1 ms", ErrorKind::Config, pool.lock(KEY).ttl(ms(1)), "between 10 ms and 7 days"),
        ("ttl 0", ErrorKind::Config, pool.lock(KEY).ttl(ms(0)), "ttl"),
        ("ttl 30 d", ErrorKind::Config, pool.lock(KEY).ttl(30 * day), "7 days"),
        ("renew = ttl", ErrorKind::Config, pool.lock(KEY).ttl(ms(50)).renew(ms(50)), "renew"),
        ("renew > ttl", ErrorKind::Config, pool.lock(KEY).ttl(ms(50)).renew(ms(60)), "renew"),
        ("renew 0", ErrorKind::Config, pool.lock(KEY).renew(ms(0)), "renew"),
        ("max_hold 1 ms", ErrorKind::Config, pool.lock(KEY).max_hold(ms(1)), "max_hold"),
        (
            "max_hold < min_hold",
            ErrorKind::Config,
            pool.lock(KEY).max_hold(ms(50)).min_hold(ms(60)),
            "min_hold",
        ),
        ("min_hold 30 d", ErrorKind::Config, pool.lock(KEY).min_hold(30 * day), "min_hold"),
        (
            "max_hold behind the ttl",
            ErrorKind::Config,
            pool.lock(KEY).ttl(ms(50)).renew(false).max_hold(ms(60)),
            "have the lease renewed",
        ),
        ("renewed too often", ErrorKind::Config, pool.lock(KEY).renew(ms(1)), "at least 2 ms"),
        (
            "renewed too late",
            ErrorKind::Config,
            pool.lock(KEY).ttl(ms(10)).renew(ms(5)),
            "at most 4.6ms",
        ),
        (
            "retry_delay without end",
            ErrorKind::Config,
            pool.lock(KEY).retry_delay(Duration::MAX),
            "50 ms",
        ),
    ] {
        let error = request.acquire().await.unwrap_err();
        ExpectedError { kind, ..ExpectedError::by("calls") }.check(case, &error, &[says]);
    }
    let expected = ExpectedError { kind: ErrorKind::InvalidKey, ..ExpectedError::by("calls") };
    let error = pool.lock("").acquire().await.unwrap_err();
    ExpectedError { template: Some(""), ..expected }.check(
        "an empty key",
        &error,
        &["empty", "order:42"],
    );
    let error = pool.lock_all(Vec::<String>::new()).acquire().await.unwrap_err();
    ExpectedError { template: Some(""), ..expected }.check("no keys", &error, &["empty"]);
    let error = named(&pool, "\u{7}", "").await.unwrap_err();
    let expected = ExpectedError { template: Some("user:<first>:<last>"), ..expected };
    expected.check("an empty placeholder", &error, &["`<last>`", "empty"]);

    for (case, builder, says) in settings_that_cannot_work() {
        let error = builder.connect().await.unwrap_err();
        ExpectedError::of(ErrorKind::Config).check(case, &error, &says);
    }
    let elsewhere = thread::spawn(|| {
        let connect = LockPool::builder("memory://").on_current_runtime().connect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        drop(runtime);
        poll_once(connect)
    });
    let error = elsewhere.join().unwrap().unwrap_err();
    ExpectedError::of(ErrorKind::Config).check("no runtime", &error, &["on_current_runtime"]);
    let error = lock_runtime::install("calls", pool.clone()).unwrap_err();
    let expected =
        ExpectedError { template: None, kind: ErrorKind::Config, ..ExpectedError::by("calls") };
    expected.check("a name that is taken", &error, &["already"]);
    let error = lock_runtime::install("", pool.clone()).unwrap_err();
    ExpectedError::of(ErrorKind::Config).check("no name", &error, &["empty", "`init`"]);
}

/// Each with a setting that would work.
fn settings_that_cannot_work() -> Vec<(&'static str, PoolBuilder, [&'static str; 2])> {
    let (nothing, tiny, long) = (Duration::ZERO, Duration::from_nanos(1), Duration::MAX);
    let (ten, second) = (Duration::from_millis(10), Duration::from_secs(1));
    let pool = || LockPool::builder("memory://");
    vec![
        ("request_timeout 0", pool().request_timeout(nothing), ["request_timeout", "1 ms"]),
        ("request_timeout 1 ns", pool().request_timeout(tiny), ["request_timeout", "1 ms"]),
        ("request_timeout without end", pool().request_timeout(long), ["request_timeout", "1 h"]),
        ("node_timeout 0", pool().node_timeout(nothing), ["node_timeout", "1 ms"]),
        (
            "node_timeout > request_timeout",
            pool().request_timeout(second).node_timeout(2 * second),
            ["node_timeout", "`request_timeout`"],
        ),
        ("drift_factor 0.5", pool().drift_factor(0.5), ["drift_factor of 0.5", "0.25"]),
        ("drift_factor 0.26", pool().drift_factor(0.26), ["drift_factor", "0.25"]),
        ("drift_factor -1", pool().drift_factor(-1.0), ["drift_factor", "0.01"]),
        ("drift_factor NaN", pool().drift_factor(f64::NAN), ["drift_factor", "0.01"]),
        (
            "a ttl as long as its drift",
            pool().ttl(ten).drift_factor(0.25),
            ["ttl", "at least 14ms"],
        ),
        ("ttl 0", pool().ttl(nothing), ["ttl", "10 ms"]),
        ("ttl without end", pool().ttl(long), ["ttl", "7 days"]),
        ("retry_delay 0", pool().retry_delay(nothing), ["retry_delay", "50 ms"]),
        ("retry_delay without end", pool().retry_delay(long), ["retry_delay", "50 ms"]),
        (
            "a slice above the ttl",
            pool().local_handoff_limit(long),
            ["local_handoff_limit", "from_millis(5)"],
        ),
        ("no window", pool().barging_window(nothing, nothing), ["barging_window", "at least 1 ms"]),
        (
            "windows all the time",
            pool().barging_window(nothing, ten),
            ["barging_window", "shorter"],
        ),
        (
            "a window of nothing",
            pool().barging_window(second, nothing),
            ["barging_window", "at least"],
        ),
        ("a window never shut", pool().barging_window(ten, ten), ["barging_window", "shorter"]),
        ("a renewal at once", pool().first_renewal(nothing), ["first_renewal", "from_millis(25)"]),
        ("memory with parameters", LockPool::builder("memory://a?size=5"), ["memory://", "?"]),
    ]
}

#[tokio::test]
async fn settings_at_the_edge_of_what_works() {
    let day = Duration::from_secs(24 * 60 * 60);
    for builder in [
        LockPool::builder("memory://").request_timeout(Duration::from_millis(1)),
        LockPool::builder("memory://")
            .request_timeout(Duration::from_secs(3600))
            .node_timeout(REQUEST_TIMEOUT),
        LockPool::builder("memory://").ttl(Duration::from_millis(10)).drift_factor(0.2),
        LockPool::builder("memory://")
            .drift_factor(0.25)
            .local_handoff_limit(Duration::from_secs(30)),
        LockPool::builder("memory://").ttl(7 * day).retry_delay(7 * day).max_waiters(0),
        LockPool::builder("memory://").barging_window(Duration::MAX, Duration::from_millis(1)),
        LockPool::builder("memory://").wait(Duration::MAX),
        LockPool::builder("memory://").first_renewal(Duration::from_millis(2)),
        LockPool::builder("memory://").first_renewal(Duration::MAX),
    ] {
        let pool = builder.connect().await.unwrap();
        // On a busy machine a ttl of 10 ms may be over before the body begins.
        let is_in_time = |outcome: Result<(), LockError>| match outcome {
            Ok(()) => true,
            Err(error) => {
                assert!(error.is_lost(), "{error}");
                false
            }
        };
        eventually_async(Duration::from_secs(20), "one lock is had", async || {
            let request = pool.lock(KEY).max_hold(Duration::MAX).wait(Duration::MAX);
            is_in_time(request.run(async {}).await)
        })
        .await;
        eventually_async(Duration::from_secs(20), "two locks are had", async || {
            is_in_time(pool.lock_all([KEY, "order:8"]).run(async {}).await)
        })
        .await;
        pool.shutdown(Duration::MAX).await;
    }
}

#[tokio::test]
async fn the_same_task_once_more() {
    let pool = installed("twice", LockPool::builder("memory://")).await;
    let inner = pool.lock(KEY).run(async { pool.lock(KEY).acquire().await });
    let error = within(Duration::ZERO, inner).await.unwrap().unwrap_err();
    let expected = ExpectedError { kind: ErrorKind::WouldDeadlock, ..ExpectedError::by("twice") };
    expected.check("the same key in the body", &error, &[KEY, "reentrant = true"]);
}

#[tokio::test]
async fn a_full_wait_queue() {
    let pool = installed("short queue", LockPool::builder("memory://").max_waiters(1)).await;
    let held = pool.lock(KEY).acquire().await.unwrap();
    let (waiter, one_more) = tokio::join!(
        pool.lock(KEY).wait(Duration::from_millis(200)).acquire(),
        pool.lock(KEY).wait(Duration::from_millis(200)).acquire(),
    );
    let expected = ExpectedError { kind: ErrorKind::QueueFull, ..ExpectedError::by("short queue") };
    expected.check("one too many", &one_more.unwrap_err(), &["max_waiters"]);
    assert!(waiter.unwrap_err().is_conflict(), "the first waiter keeps its position");
    held.release().await.unwrap();
}

#[tokio::test]
async fn pools_that_are_not_there() {
    let expected = ExpectedError {
        template: Some("order:<id>"),
        ..ExpectedError::of(ErrorKind::PoolNotFound)
    };
    let error = by_default(7).await.unwrap_err();
    ExpectedError { pool: Some("default"), ..expected }.check(
        "no init",
        &error,
        &["lock_runtime::init("],
    );
    let error = by_name(7).await.unwrap_err();
    ExpectedError { pool: Some("nowhere"), ..expected }.check(
        "no install",
        &error,
        &["lock_runtime::install(\"nowhere\""],
    );
    assert!(lock_runtime::pool("nowhere").is_none());
    if std::env::var_os("LOCK_URL").is_none() {
        let error = lock_runtime::init_from_env().await.unwrap_err();
        ExpectedError::of(ErrorKind::Config).check(
            "no LOCK_URL",
            &error,
            &["LOCK_URL", "memory://"],
        );
    }
}

/// No error above contains its password. Neither does a log or a `Debug` text.
#[tokio::test]
async fn a_password_is_never_shown() {
    let logs = Logs::global();
    let authority = Authority::new();
    let server = with_password().tls(Tls::new(&authority)).start();
    let ca = server.tls_files().authority.display().to_string();
    let plain = server.url_at(server.port());
    for (n, url) in [plain, format!("{}?ca={ca}", server.url())].into_iter().enumerate() {
        assert!(url.contains(CANARY));
        let builder = LockPool::builder(&url);
        unshown("builder", &format!("{builder:?} {builder:#?}"));
        let pool = installed(&format!("secret-{n}"), builder).await;
        let ttl = Duration::from_secs(1);
        let request = pool.lock(KEY).ttl(ttl);
        unshown("request", &format!("{request:?}"));
        let guard = request.acquire().await.unwrap();
        unshown("pool", &format!("{pool:?} {pool:#?} {guard:?} {:?}", pool.health().await));
        server.kill();
        let lost = within(ttl, guard.lost()).await;
        ExpectedError { kind: ErrorKind::Lost, ..ExpectedError::by(&format!("secret-{n}")) }.check(
            "lost",
            &lost,
            &[],
        );
        drop(guard);
        server.restart();
        works(&pool).await;
        set(&server, "requirepass", "another");
        server.kill_clients();
        eventually_async(Duration::from_secs(5), "the login is refused", async || {
            let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
            unshown("error", &chain(&error));
            error.to_string().contains("does not accept")
        })
        .await;
        set(&server, "requirepass", CANARY);
        works(&pool).await;
        pool.shutdown(Duration::ZERO).await;
    }
    assert!(logs.contains("acquired"), "something was logged:\n{}", logs.text());
    unshown("logs", &logs.text());
}

#[distributed_lock(key = "order:<id>", pool = pool, wait = wait)]
async fn settle(pool: &LockPool, id: u64, wait: Duration) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "user:<first>:<last>", pool = pool)]
async fn named(pool: &LockPool, first: &str, last: &str) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "order:<id>")]
async fn by_default(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "order:<id>", pool = "nowhere")]
async fn by_name(id: u64) -> Result<(), LockError> {
    Ok(())
}

/// Repeats `request` until its error `says` what it should. On a busy machine the answer may come after a short wait.
async fn until_it_says<T: Debug>(
    says: &[&str],
    request: impl AsyncFn() -> Result<T, LockError>,
) -> LockError {
    let mut said = None;
    eventually_async(Duration::from_secs(20), "the error says why", async || {
        let error = within(REQUEST_TIMEOUT, request()).await.unwrap_err();
        let text = error.to_string();
        println!("{text}");
        said = Some(error);
        says.iter().all(|words| text.contains(words))
    })
    .await;
    said.unwrap()
}

/// A reason of a server to refuse.
struct Refusal {
    what: &'static str,
    provoke: fn(&RedisServer),
    end: fn(&RedisServer),
    says: &'static [&'static str],
}

fn poll_once<T>(work: impl Future<Output = T>) -> T {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(work).poll(&mut context) {
        std::task::Poll::Ready(output) => output,
        std::task::Poll::Pending => panic!("not ready at once"),
    }
}

/// Accepts connections and sends one text to each; not a Redis server.
struct Stub {
    port: u16,
}

impl Stub {
    fn start(says: &'static [u8]) -> Self {
        Self::serve(move |mut stream| {
            let _ = stream.write_all(says);
            // Until the client closes the connection.
            let _ = stream.read_to_end(&mut Vec::new());
        })
    }

    fn closing() -> Self {
        Self::serve(|mut stream| {
            let _ = stream.read(&mut [0; 1024]);
        })
    }

    fn serve(answer: impl Fn(std::net::TcpStream) + Clone + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answer = answer.clone();
                thread::spawn(move || answer(stream));
            }
        });
        Self { port }
    }
}

/// A thread with a stack of 2^50 bytes does not start.
#[test]
fn a_driver_that_cannot_start_is_an_error_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["memory://", folder.path().to_str().unwrap(), "alone", "1000"];
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_waiter"));
    program.args(arguments).env("RUST_MIN_STACK", (1_u64 << 50).to_string());
    let output = program.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("limits on threads"), "{stderr}");
}
