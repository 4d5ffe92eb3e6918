//! The effect of each error reply, provoked on real servers.
//!
//! | reply | test |
//! |---|---|
//! | READONLY, NOREPLICAS, MASTERDOWN, MISCONF, OOM, WRONGTYPE | errors: `a_server_that_refuses_says_why_and_serves_again`; a holder: [`holder`] |
//! | LOADING | errors: `a_server_that_is_loading` |
//! | BUSY | errors: `a_server_that_is_busy_with_a_script`; to a connect: [`a_connection_to_a_server_that_is_busy`] |
//! | UNKILLABLE | [`a_script_that_cannot_be_killed`] |
//! | NOSCRIPT | [`scripts_that_the_server_has_forgotten`] |
//! | NOAUTH, WRONGPASS | errors: `a_server_that_rejects_the_login`, `a_password_that_changes_under_way` |
//! | NOPERM, key and command | errors: `users_without_permissions`; under way: [`rights_that_are_taken_away_under_way`] |
//! | NOPERM, channel | wait_queue: `refused`; under way: [`rights_that_are_taken_away_under_way`] |
//! | WRONGTYPE of a key beside the lock | errors: `a_fence_counter_with_a_foreign_value`; [`a_wait_queue_key_of_another_type`] |
//! | max number of clients | errors: `a_server_with_too_many_clients` |
//! | CLUSTERDOWN | [`cluster::a_node_without_slots`] |
//! | MOVED, ASK, TRYAGAIN | [`cluster::a_node_that_does_not_have_the_slot`] |
//! | CROSSSLOT | [`cluster::keys_of_two_slots`] |
//! | EXECABORT | [`one_refusal_does_not_abort_its_batch`] |
//! | protocol garbage | errors: `a_store_that_is_down_or_is_no_store_at_init`; under way: [`wire`] |
//! | half a reply, then the end | [`wire`] |
//! | connection refused, unknown host | errors: `a_store_that_is_down_or_is_no_store_at_init`, `a_server_that_goes_down_and_comes_back` |
//! | TLS: unknown authority, wrong name, expired, no client certificate, to a plain port, plain to a TLS port | errors: `tls_that_cannot_be_trusted`; under way: [`tls_trouble_under_way`] |

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockPool, Wait};
use lock_tests::expected_error::{
    CANARY, CONNECT_TIMEOUT, ExpectedError, KEY, NOISE, REQUEST_TIMEOUT, installed, set, unshown,
    with_password, within, works,
};
use lock_tests::logs::Logs;
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Command};
use lock_tests::resp;
use lock_tests::tls::{Authority, Identity, Tls};
use lock_tests::{FaultProxy, RedisServer, eventually, eventually_async};
use tokio::task::JoinSet;

const QUEUE: &str = "order:7:lock_runtime:line";

async fn nothing_stays_taken(server: &RedisServer) {
    eventually_async(ms(20_000), "nothing stays taken", async || {
        server.cli(&["EXISTS", KEY, QUEUE]) == "0"
    })
    .await;
}

/// No caller notices: each step sends its script once more. A connection that is opened meanwhile makes scripts known again, so
/// that not every round meets the error in every step.
#[tokio::test]
async fn scripts_that_the_server_has_forgotten() {
    let server = with_password().start();
    let (ours, theirs) = (
        installed("forgotten", LockPool::builder(server.url())).await,
        installed("forgotten too", LockPool::builder(server.url())).await,
    );
    let mut known = server.errors("NOSCRIPT");
    let mut met = BTreeSet::new();
    let mut forget = |step: &'static str| {
        let count = server.errors("NOSCRIPT");
        if count > known {
            met.insert(step);
        }
        known = count;
        assert_eq!(server.cli(&["SCRIPT", "FLUSH"]), "OK");
        met.len()
    };
    let mut last = None;
    for round in 1.. {
        forget("the last release");
        let guard = ours.lock(KEY).ttl(ms(2_400)).renew(ms(200)).acquire().await.unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        forget("the acquire");
        let renewals = || server.calls("pexpire");
        let before = renewals();
        eventually_async(ms(5_000), "a renewal", async || renewals() != before).await;
        forget("a renewal");
        guard.verify().await.unwrap();
        let next = theirs.lock(KEY).wait(ms(10_000)).acquire();
        let next = tokio::spawn(next);
        eventually_async(ms(5_000), "the next is queued", async || {
            server.cli(&["ZCARD", QUEUE]) == "1"
        })
        .await;
        forget("a queued request");
        guard.release().await.unwrap();
        let guard = within(REQUEST_TIMEOUT, next).await.unwrap().unwrap();
        assert!(guard.fence() > last);
        last = guard.fence();
        forget("a release to the next waiter");
        guard.release().await.unwrap();
        let steps = forget("a release");
        let several = ours.lock_all([KEY, "order:8"]).acquire().await.unwrap();
        assert!(several.fence() > last);
        last = several.fence();
        several.release().await.unwrap();
        if round >= 3 && steps == 6 {
            break;
        }
        assert!(round < 10, "{met:?} met it");
    }
    works(&theirs).await;
    nothing_stays_taken(&server).await;
}

/// The script has written already: the server refuses SCRIPT KILL, and only waiting helps.
#[tokio::test]
async fn a_script_that_cannot_be_killed() {
    let server = with_password().arg("busy-reply-threshold", "50").start();
    let pool = installed("unkillable", LockPool::builder(server.url())).await;
    let mut looping = server.connect().unwrap();
    let script = "redis.call('SET', 'written', '1') \
        local n = 0 while n < 200000000 do n = n + 1 end";
    looping.write_all(&resp::command(&["EVAL", script, "0"])).unwrap();
    let mut error = None;
    eventually_async(ms(10_000), "the server says BUSY", async || {
        let Err(answer) = pool.lock(KEY).wait(Duration::ZERO).acquire().await else {
            return false;
        };
        let busy = answer.to_string().contains("BUSY");
        error = Some(answer);
        busy
    })
    .await;
    let expected = ExpectedError::by("unkillable");
    expected.check("a script that has written", &error.unwrap(), &["BUSY", "repeated"]);
    let refused = server.cli(&["SCRIPT", "KILL"]);
    assert!(refused.starts_with("UNKILLABLE"), "{refused}");
    // Still busy; a longer wait is served.
    let error = within(REQUEST_TIMEOUT, pool.lock(KEY).wait(ms(100)).acquire()).await.unwrap_err();
    expected.check("after SCRIPT KILL", &error, &["BUSY", "repeated"]);
    let guard = pool.lock(KEY).wait(ms(120_000)).acquire().await.unwrap();
    guard.release().await.unwrap();
    works(&pool).await;
}

/// The server accepts the log-in, and refuses `SELECT`, client tracking and the subscription. A connection without them would be
/// without notifications for as long as it lasts, so it is made again until the script has ended. Waiters go on.
#[tokio::test]
async fn a_connection_to_a_server_that_is_busy() {
    for database in [0, 3] {
        let server = RedisServer::builder().arg("busy-reply-threshold", "50").start();
        let proxy = FaultProxy::start(&server);
        let pool = LockPool::builder(format!("{}/{database}", proxy.url()));
        let pool = pool.connection_per_runtime(false).connect().await.unwrap();
        works(&pool).await;
        let mut looping = server.connect().unwrap();
        looping.write_all(&resp::command(&["EVAL", "while true do end", "0"])).unwrap();
        eventually(ms(20_000), "the server says BUSY", || {
            server.cli(&["GET", KEY]).contains("BUSY")
        });
        let waiter = tokio::spawn(pool.lock(KEY).wait(ms(120_000)).acquire());
        let before = proxy.connections();
        proxy.cut();
        eventually_async(ms(20_000), "several connects", async || {
            proxy.connections() >= before + 4
        })
        .await;
        assert!(!waiter.is_finished(), "database {database}: {:?}", waiter.await);
        assert_eq!(server.cli(&["SCRIPT", "KILL"]), "OK");
        within(REQUEST_TIMEOUT, waiter).await.unwrap().unwrap().release().await.unwrap();
        let clients = server.cli(&["CLIENT", "LIST"]);
        let is_notified =
            |client: &str| client.contains(" flags=Pt ") && client.contains(" sub=1 ");
        assert!(clients.lines().any(is_notified), "{clients}");
    }
}

#[tokio::test]
async fn rights_that_are_taken_away_under_way() {
    let server = RedisServer::builder()
        .config_line(&format!("user worker on >{CANARY} ~* &* +@all"))
        .start();
    let url = format!("redis://worker:{CANARY}@127.0.0.1:{}", server.port());
    let pool = installed("rights", LockPool::builder(&url)).await;
    for (n, (without, with, says)) in [
        (&["resetkeys", "~other:*"][..], &["allkeys"][..], "key"),
        (&["-set"], &["+@all"], "+set"),
        (&["-@all", "+hello", "+auth", "+ping"], &["+@all"], "+set"),
    ]
    .into_iter()
    .enumerate()
    {
        let rights = |rules: &[&str]| {
            let line = [&["ACL", "SETUSER", "worker"], rules].concat();
            assert_eq!(server.cli(&line), "OK");
        };
        rights(without);
        for fencing in [false, true] {
            // Waiting would not help.
            let request = pool.lock(KEY).fencing(fencing).wait(ms(20_000));
            let error = within(REQUEST_TIMEOUT, request.acquire()).await.unwrap_err();
            let case = format!("without right {n}, fencing {fencing}");
            ExpectedError::by("rights").check(&case, &error, &["NOPERM", says]);
        }
        rights(with);
        works(&pool).await;
    }
    // Without channels no waiter is notified, so waiters poll. The server closes connections that are subscribed to a
    // channel that is forbidden now.
    let guard = pool.lock(KEY).acquire().await.unwrap();
    let waiter = installed("rights of a waiter", LockPool::builder(&url)).await;
    let waiting = tokio::spawn(waiter.lock(KEY).wait(Wait::Forever).acquire());
    eventually_async(ms(5_000), "it is queued", async || server.cli(&["ZCARD", QUEUE]) == "1")
        .await;
    assert_eq!(server.cli(&["ACL", "SETUSER", "worker", "resetchannels"]), "OK");
    guard.release().await.unwrap();
    let guard = within(ms(10_000), waiting).await.unwrap().unwrap();
    let waiting = tokio::spawn(pool.lock(KEY).wait(Wait::Forever).acquire());
    guard.release().await.unwrap();
    within(ms(10_000), waiting).await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.cli(&["ACL", "SETUSER", "worker", "allchannels"]), "OK");
    works(&pool).await;
    works(&waiter).await;
}

#[tokio::test]
async fn a_wait_queue_key_of_another_type() {
    let server = with_password().start();
    let pool = installed("queues", LockPool::builder(server.url())).await;
    let other = installed("other lines", LockPool::builder(server.url())).await;
    let guard = other.lock(KEY).acquire().await.unwrap();
    server.cli(&["SET", QUEUE, "foreign"]);
    let error =
        within(REQUEST_TIMEOUT, pool.lock(KEY).wait(ms(20_000)).acquire()).await.unwrap_err();
    ExpectedError::by("queues").check(
        "a string as wait queue",
        &error,
        &["WRONGTYPE", ":lock_runtime:line"],
    );
    // The holder can still release.
    guard.release().await.unwrap();
    assert_eq!(server.cli(&["EXISTS", KEY]), "0");
    assert_eq!(server.cli(&["GET", QUEUE]), "foreign", "which is not touched");
    server.cli(&["DEL", QUEUE]);
    works(&pool).await;
}

/// There is no MULTI that one refusal could abort: many requests share only one write.
#[tokio::test]
async fn one_refusal_does_not_abort_its_batch() {
    const COUNT: usize = 60;
    let server = with_password().start();
    let proxy = FaultProxy::start(&server);
    let pool = installed("batches", LockPool::builder(proxy.url())).await;
    let key = |n: usize| format!("batch:{n}");
    let is_broken = |n: usize| n.is_multiple_of(3);
    for n in (0..COUNT).filter(|&n| is_broken(n)) {
        server.cli(&["HSET", &key(n), "uuid:1", "1"]);
    }
    for fencing in [false, true] {
        let mut tasks = JoinSet::new();
        for n in 0..COUNT {
            let request = pool.lock(&*key(n)).fencing(fencing).wait(ms(5_000));
            tasks.spawn(async move { (n, request.acquire().await) });
        }
        let (mut guards, mut refused) = (Vec::new(), 0);
        for (n, outcome) in within(REQUEST_TIMEOUT, tasks.join_all()).await {
            match outcome {
                Ok(guard) => {
                    assert!(!is_broken(n), "{n} is a hash");
                    guards.push(guard);
                }
                Err(error) => {
                    assert!(is_broken(n), "{n}: {error}");
                    let expected =
                        ExpectedError { template: Some(&key(n)), ..ExpectedError::by("batches") };
                    expected.check("a hash among locks", &error, &["WRONGTYPE", "Redisson"]);
                    refused += 1;
                }
            }
        }
        assert_eq!((guards.len(), refused), (COUNT - COUNT / 3, COUNT / 3));
        for guard in guards {
            guard.release().await.unwrap();
        }
    }
    let stats = server.cli(&["INFO", "commandstats"]);
    assert!(!stats.contains("cmdstat_multi:") && !stats.contains("cmdstat_exec:"), "{stats}");
    // A proxy that wraps requests into a MULTI of its own could still return it.
    let aborted = b"-EXECABORT Transaction discarded because of previous errors.\r\n";
    let trap = proxy.on_next(|command| command.mentions(KEY), Action::AnswerWith(aborted));
    let error = within(REQUEST_TIMEOUT, pool.lock(KEY).acquire()).await.unwrap_err();
    assert!(trap.sprung());
    ExpectedError::by("batches").check("EXECABORT", &error, &["EXECABORT"]);
    // Here the request was executed, and its result is unknown.
    server.cli(&["DEL", KEY]);
    works(&pool).await;
}

/// Errors that reach a holder.
mod holder {
    use super::*;

    const TTL: Duration = ms(2_400);

    /// These refuse every write: the lock expires.
    #[test]
    fn of_a_server_that_refuses_all_writes() {
        let cases = [
            (
                "a replica",
                &[&["REPLICAOF", "127.0.0.1", "1"][..]][..],
                &[&["REPLICAOF", "NO", "ONE"][..]][..],
                "READONLY",
            ),
            (
                "too few replicas",
                &[&["CONFIG", "SET", "min-replicas-to-write", "1"]],
                &[&["CONFIG", "SET", "min-replicas-to-write", "0"]],
                "NOREPLICAS",
            ),
            (
                "replicas without their master",
                &[
                    &["CONFIG", "SET", "replica-serve-stale-data", "no"],
                    &["REPLICAOF", "127.0.0.1", "1"],
                ],
                &[&["REPLICAOF", "NO", "ONE"]],
                "MASTERDOWN",
            ),
            (
                "a user without rights",
                &[&["ACL", "SETUSER", "default", "-pexpire", "-del", "-evalsha", "-eval"]],
                &[&["ACL", "SETUSER", "default", "+@all"]],
                "NOPERM",
            ),
        ];
        on_each(cases, async |(case, provoke, end, code)| {
            let server = with_password().start();
            let name = format!("holder: {case}");
            let pool = installed(&name, LockPool::builder(server.url())).await;
            let runs = |lines: &[&[&str]]| {
                for line in lines {
                    assert!(server.cli(line).starts_with("OK"), "{line:?}");
                }
            };
            for fencing in [false, true] {
                // The first refusal of a renewal comes long before the end of the lease.
                let request = || pool.lock(KEY).fencing(fencing).ttl(TTL).renew(ms(200)).acquire();
                let (kept, freed) = (request().await.unwrap(), pool.lock("order:8").ttl(TTL));
                let freed = freed.acquire().await.unwrap();
                runs(provoke);
                let began = Instant::now();
                // A release has two of them.
                let error = within(3 * REQUEST_TIMEOUT, freed.release()).await.unwrap_err();
                let expected =
                    ExpectedError { template: Some("order:8"), ..ExpectedError::by(&name) };
                expected.check(&format!("{case}, release"), &error, &[code]);
                let lost = within(TTL, kept.lost()).await;
                let expected = ExpectedError { kind: ErrorKind::Lost, ..ExpectedError::by(&name) };
                expected.check(&format!("{case}, lost"), &lost, &["renewal"]);
                // The log contains the reason.
                let refused = |line: &str| line.contains("not renewed yet") && line.contains(code);
                Logs::global().until(ms(10_000), case, refused).await;
                println!("{case}: lost after {:?}", began.elapsed());
                let error = within(REQUEST_TIMEOUT, kept.verify()).await.unwrap_err();
                expected.check(&format!("{case}, verify"), &error, &["renewal"]);
                drop(kept);
                runs(end);
                works(&pool).await;
            }
        });
    }

    /// This refuses only commands that take memory: locks are renewed and freed.
    #[tokio::test]
    async fn of_a_server_without_memory() {
        let server = with_password().start();
        let pool = installed("holder: memory", LockPool::builder(server.url())).await;
        let request = |key| pool.lock(key).ttl(ms(30_000)).renew(ms(200)).acquire();
        let guard = request(KEY).await.unwrap();
        let (second, third) =
            (request("order:8").await.unwrap(), request("order:9").await.unwrap());
        set(&server, "maxmemory", "1");
        let renewals = || server.calls("pexpire");
        let before = renewals();
        let all_twice = async || renewals() >= before + 9;
        eventually_async(ms(20_000), "each is renewed twice", all_twice).await;
        for guard in [&guard, &second, &third] {
            guard.verify().await.unwrap();
        }
        // By a release, by the end of the guard, and to a waiter of this process.
        let next = tokio::spawn(pool.lock("order:9").wait(ms(5_000)).acquire());
        guard.release().await.unwrap();
        drop(second);
        third.release().await.unwrap();
        eventually_async(ms(10_000), "two are free", async || {
            server.cli(&["EXISTS", KEY, "order:8"]) == "0"
        })
        .await;
        // A waiter gets an error or the lock, and never hangs.
        match within(REQUEST_TIMEOUT, next).await.unwrap() {
            Ok(guard) => guard.release().await.unwrap(),
            Err(error) => {
                let expected = ExpectedError {
                    template: Some("order:9"),
                    ..ExpectedError::by("holder: memory")
                };
                expected.check("the waiter", &error, &["OOM", "`maxmemory`"]);
            }
        }
        assert_eq!(server.cli(&["EXISTS", "order:9"]), "0");
        set(&server, "maxmemory", "0");
        works(&pool).await;
    }

    /// A key of another type is no lock.
    #[tokio::test]
    async fn of_a_key_that_became_something_else() {
        let server = with_password().start();
        let pool = installed("holder: types", LockPool::builder(server.url())).await;
        let guard = pool.lock(KEY).ttl(TTL).acquire().await.unwrap();
        server.cli(&["DEL", KEY]);
        server.cli(&["HSET", KEY, "uuid:1", "1"]);
        let lost = within(TTL, guard.lost()).await;
        let expected =
            ExpectedError { kind: ErrorKind::Lost, ..ExpectedError::by("holder: types") };
        expected.check("a hash in its place", &lost, &["does not hold it"]);
        expected.check("release", &guard.release().await.unwrap_err(), &["no longer held"]);
        assert_eq!(server.cli(&["HGET", KEY, "uuid:1"]), "1", "which is not touched");
        server.cli(&["DEL", KEY]);
        works(&pool).await;
    }
}

/// One or two nodes of a Redis Cluster behind `redis://`, the scheme of a server with all keys.
mod cluster {
    use super::*;

    /// With all keys in one slot, the node of the slot can serve everything.
    const PREFIX: &str = "{app}:";

    fn node() -> RedisServer {
        with_password()
            .arg("cluster-enabled", "yes")
            .arg("cluster-require-full-coverage", "no")
            .start()
    }

    fn all_slots_to(node: &RedisServer) {
        assert_eq!(node.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]), "OK");
        eventually(ms(10_000), "the node serves", || node.cli(&["GET", "{app}:x"]) == "(nil)");
    }

    #[tokio::test]
    async fn a_node_without_slots() {
        let node = node();
        let builder = LockPool::builder(node.url()).key_prefix(PREFIX);
        let pool = installed("no slots", builder).await;
        for fencing in [false, true] {
            let wait = ms(300);
            let (began, request) = (Instant::now(), pool.lock(KEY).fencing(fencing).wait(wait));
            let error = within(REQUEST_TIMEOUT, request.acquire()).await.unwrap_err();
            assert!(began.elapsed() >= wait, "requests repeat during a wait");
            ExpectedError::by("no slots").check("no slots", &error, &["CLUSTERDOWN", "repeated"]);
        }
        let waiting = tokio::spawn(pool.lock(KEY).wait(ms(20_000)).acquire());
        all_slots_to(&node);
        within(REQUEST_TIMEOUT, waiting).await.unwrap().unwrap().release().await.unwrap();
        works(&pool).await;
        // A holder survives it, too.
        // Longer than the node takes to serve again, also on a busy machine.
        let guard = pool.lock(KEY).ttl(ms(20_000)).renew(ms(300)).acquire().await.unwrap();
        assert_eq!(node.cli(&["CLUSTER", "DELSLOTSRANGE", "0", "16383"]), "OK");
        let refusals = node.errors("CLUSTERDOWN");
        eventually_async(ms(5_000), "a renewal is refused", async || {
            node.errors("CLUSTERDOWN") > refusals
        })
        .await;
        all_slots_to(&node);
        // Without slots a node forgets the keys of them.
        let (verified, released) = (guard.verify().await, guard.release().await);
        assert_eq!(verified.is_ok(), released.is_ok(), "{verified:?} {released:?}");
        works(&pool).await;
    }

    #[tokio::test]
    async fn a_node_that_does_not_have_the_slot() {
        let (node, other) = (node(), node());
        all_slots_to(&node);
        let (ours, theirs) = (node.cli(&["CLUSTER", "MYID"]), other.cli(&["CLUSTER", "MYID"]));
        let port = other.port().to_string();
        assert_eq!(node.cli(&["CLUSTER", "MEET", "127.0.0.1", &port]), "OK");
        eventually(ms(20_000), "the nodes know each other", || {
            let knows = |line: &str| line.starts_with(&theirs) && !line.contains("handshake");
            node.cli(&["CLUSTER", "NODES"]).lines().any(knows)
        });
        let slot = node.cli(&["CLUSTER", "KEYSLOT", PREFIX]);
        let set_slot = |rest: &[&str]| {
            let line = [&["CLUSTER", "SETSLOT", &slot], rest].concat();
            assert_eq!(node.cli(&line), "OK", "{rest:?}");
        };
        let builder = LockPool::builder(node.url()).key_prefix(PREFIX);
        let pool = installed("elsewhere", builder).await;
        // Also has the server keep a fence counter.
        works(&pool).await;
        // Waiting does not help against MOVED and ASK; it does against TRYAGAIN.
        type Case<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a [(bool, &'a str)]);
        let cases: [Case<'_>; 2] = [
            (
                "the slot is elsewhere",
                &["NODE", &theirs],
                &["NODE", &ours],
                &[(false, "MOVED"), (true, "MOVED")],
            ),
            (
                "the slot is on its way",
                &["MIGRATING", &theirs],
                &["STABLE"],
                // The lock is not there any more, but the fence counter is.
                &[(false, "ASK"), (true, "TRYAGAIN")],
            ),
        ];
        for (case, provoke, end, answers) in cases {
            if provoke[0] == "NODE" {
                // Keys would keep the slot here.
                assert_eq!(node.cli(&["FLUSHALL"]), "OK");
            }
            set_slot(provoke);
            for &(fencing, code) in answers {
                let wait = if code == "TRYAGAIN" { ms(200) } else { ms(20_000) };
                let request = pool.lock(KEY).fencing(fencing).wait(wait);
                let error = within(REQUEST_TIMEOUT, request.acquire()).await.unwrap_err();
                let remedy = if code == "TRYAGAIN" { "repeated" } else { "Redis Cluster" };
                let case = format!("{case}, fencing {fencing}");
                ExpectedError::by("elsewhere").check(&case, &error, &[code, remedy]);
            }
            set_slot(end);
            works(&pool).await;
        }
        // The holder of a lock that moves with its slot.
        let guard = pool.lock(KEY).ttl(ms(6_000)).acquire().await.unwrap();
        set_slot(&["MIGRATING", &theirs]);
        for change in ["NODE", "IMPORTING"] {
            assert_eq!(other.cli(&["CLUSTER", "SETSLOT", &slot, change, &ours]), "OK");
        }
        let lock = format!("{PREFIX}{KEY}");
        let migrate =
            ["MIGRATE", "127.0.0.1", &port, "", "0", "3000", "AUTH", CANARY, "KEYS", &lock];
        eventually_async(ms(10_000), "the other takes it", async || node.cli(&migrate) == "OK")
            .await;
        let lost = within(ms(20_000), guard.lost()).await;
        let expected = ExpectedError { kind: ErrorKind::Lost, ..ExpectedError::by("elsewhere") };
        expected.check("a held lock has moved", &lost, &["renewal"]);
        let refused = |line: &str| line.contains("not renewed yet") && line.contains("ASK ");
        Logs::global().until(ms(10_000), "it is logged", refused).await;
        drop(guard);
        set_slot(&["STABLE"]);
        works(&pool).await;
    }

    /// The fence counter is in the slot of the lock; several locks may be in several slots.
    #[tokio::test]
    async fn keys_of_two_slots() {
        let node = node();
        all_slots_to(&node);
        let pool = installed("two slots", LockPool::builder(node.url())).await;
        let guard =
            within(REQUEST_TIMEOUT, pool.lock(KEY).wait(ms(20_000)).acquire()).await.unwrap();
        assert!(guard.fence().is_some());
        guard.release().await.unwrap();
        let says = &["CROSSSLOT", "share a slot", "`order:{<id>}`"];
        let several = pool.lock_all([KEY, "order:8"]).fencing(false).wait(ms(20_000));
        let error = within(REQUEST_TIMEOUT, several.acquire()).await.unwrap_err();
        let template = error.template().unwrap_or_default().to_owned();
        let expected =
            ExpectedError { template: Some(&template), ..ExpectedError::by("two slots") };
        expected.check("several locks", &error, says);
        assert!(template.contains(KEY), "{template}");
        assert_eq!(node.cli(&["EXISTS", KEY]), "0", "nothing is left behind");
        // The cause removed: all keys in one slot.
        let pool = LockPool::builder(node.url()).key_prefix(PREFIX).connect().await.unwrap();
        works(&pool).await;
    }
}

/// A connection that worked, and then sends invalid replies.
mod wire {
    use super::*;

    const CASES: [(&str, Action); 6] = [
        ("half a reply", Action::CutInsideReply),
        ("another protocol", Action::AnswerWith(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")),
        ("noise", Action::AnswerWith(b"\xff\x00\x17\xfe\r\n")),
        ("a length that cannot be", Action::AnswerWith(b"*-7\r\n$99999999999999999999\r\n")),
        ("a map for an answer", Action::AnswerWith(b"%1\r\n+a\r\n+b\r\n")),
        ("an odd text", Action::AnswerWith(b"+QUEUED\r\n")),
    ];

    /// Without requests that take back an unanswered grant: no release contains a duration.
    fn acquires(command: &Command) -> bool {
        command.mentions(KEY) && command.mentions("30000")
    }

    /// The lock may have been granted: a waiting acquire gets it, and a single try leaves nothing.
    #[test]
    fn instead_of_the_answer_to_an_acquire() {
        on_each(CASES.into_iter().enumerate(), async |(n, (case, action))| {
            let server = with_password().start();
            let proxy = FaultProxy::start(&server);
            let name = format!("wire {n}");
            let pool = installed(&name, LockPool::builder(proxy.url())).await;
            for fencing in [false, true] {
                works(&pool).await;
                until_the_next_fence_is_a_script().await;
                let request = || pool.lock(KEY).fencing(fencing);
                let trap = proxy.on_next(acquires, action);
                let asked = request().wait(Duration::ZERO).acquire();
                let error = within(REQUEST_TIMEOUT, asked).await.unwrap_err();
                assert!(trap.sprung(), "{case}");
                ExpectedError::by(&name).check(
                    &format!("{case}, fencing {fencing}"),
                    &error,
                    &["Redis"],
                );
                nothing_stays_taken(&server).await;
                works(&pool).await;
                until_the_next_fence_is_a_script().await;
                let trap = proxy.on_next(acquires, action);
                let guard = within(ms(5_000), request().wait(ms(5_000)).acquire()).await;
                assert!(trap.sprung(), "{case}");
                let guard = guard.unwrap_or_else(|error| panic!("{case}: {error}"));
                guard.verify().await.unwrap();
                guard.release().await.unwrap();
                nothing_stays_taken(&server).await;
            }
        });
    }

    /// The lock is free then, whatever the caller receives.
    #[test]
    fn instead_of_the_answer_to_a_release() {
        on_each(CASES.into_iter().enumerate(), async |(n, (case, action))| {
            let server = with_password().start();
            let proxy = FaultProxy::start(&server);
            let name = format!("wire of a release {n}");
            let pool = installed(&name, LockPool::builder(proxy.url())).await;
            let guard = pool.lock(KEY).ttl(ms(20_000)).acquire().await.unwrap();
            let trap = proxy.on_next(|command| command.mentions(KEY), action);
            let released = within(ms(5_000), guard.release()).await;
            assert!(trap.sprung(), "{case}");
            println!("{case}: {released:?}");
            if let Err(error) = released {
                unshown(case, &lock_tests::expected_error::chain(&error));
                assert!(error.is_backend(), "{case}: {error}");
            }
            nothing_stays_taken(&server).await;
            works(&pool).await;
        });
    }

    /// One bad answer to a renewal loses no lock.
    #[test]
    fn instead_of_the_answer_to_a_renewal() {
        on_each(CASES.into_iter().enumerate(), async |(n, (case, action))| {
            let server = with_password().start();
            let proxy = FaultProxy::start(&server);
            let name = format!("wire of a renewal {n}");
            let pool = installed(&name, LockPool::builder(proxy.url())).await;
            let guard = pool.lock(KEY).ttl(ms(20_000)).renew(ms(200)).acquire().await.unwrap();
            let trap = proxy.on_next(|command| command.mentions(KEY), action);
            eventually_async(ms(5_000), "a renewal", async || trap.sprung()).await;
            let renewal = proxy.on_next(|command| command.mentions(KEY), Action::HoldReply);
            eventually_async(ms(5_000), "one more", async || renewal.sprung()).await;
            proxy.release_held();
            within(REQUEST_TIMEOUT, guard.verify()).await.unwrap_or_else(|e| panic!("{case}: {e}"));
            guard.release().await.unwrap();
            works(&pool).await;
        });
    }
}

/// The TLS settings of the server change after the connect.
#[tokio::test]
async fn tls_trouble_under_way() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let names = ["127.0.0.1", "localhost"];
    let good = authority.issue(&names);
    let server = with_password().tls(Tls::new(&authority).server(good.clone())).start();
    let (port, tls_port) = (server.port().to_string(), server.tls_port().unwrap().to_string());
    let ca = server.tls_files().authority.display().to_string();
    let pool = installed("tls", LockPool::builder(format!("{}?ca={ca}", server.url()))).await;
    works(&pool).await;
    let show = |identity: &Identity| {
        let files = server.tls_files();
        fs::write(&files.certificate, &identity.certificate).unwrap();
        fs::write(&files.key, &identity.key).unwrap();
        let (certificate, key) = (files.certificate.to_str(), files.key.to_str());
        let line =
            ["CONFIG", "SET", "tls-cert-file", certificate.unwrap(), "tls-key-file", key.unwrap()];
        assert_eq!(server.cli(&line), "OK");
    };
    let clients = |may: &str| set(&server, "tls-auth-clients", may);
    type Step<'a> = Box<dyn Fn() + 'a>;
    let step = |identity: Identity| -> Step<'_> { Box::new(move || show(&identity)) };
    let cases: [(&str, Step<'_>, Step<'_>, &str); 5] = [
        (
            "an authority that is not trusted",
            step(stranger.issue(&names)),
            step(good.clone()),
            "?ca=",
        ),
        ("another name", step(authority.issue(&["other"])), step(good.clone()), "not valid for"),
        ("an expired one", step(authority.issue_expired(&names)), step(good.clone()), "expired"),
        (
            "clients need one",
            // The certificate again: otherwise the server would resume the old session.
            Box::new(|| {
                clients("yes");
                show(&good);
            }),
            Box::new(|| clients("no")),
            "&key=",
        ),
        (
            "a plain port",
            Box::new(|| {
                set(&server, "tls-port", "0");
                set(&server, "port", &tls_port);
            }),
            Box::new(|| {
                set(&server, "port", &port);
                set(&server, "tls-port", &tls_port);
            }),
            "TLS",
        ),
    ];
    for (case, provoke, end, says) in cases {
        provoke();
        server.kill_clients();
        for wait in [ms(50), ms(300)] {
            let mut error = None;
            // A wait may end before a new connection has failed.
            eventually_async(2 * CONNECT_TIMEOUT + NOISE, case, async || {
                let asked = within(REQUEST_TIMEOUT, pool.lock(KEY).wait(wait).acquire());
                let Err(answer) = asked.await else { return false };
                let is_it = answer.to_string().contains(says);
                error = Some(answer);
                is_it
            })
            .await;
            let case = format!("{case}, a wait of {wait:?}");
            ExpectedError::by("tls").check(&case, &error.unwrap(), &[says]);
        }
        end();
        works(&pool).await;
    }
}
