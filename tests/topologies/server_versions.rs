//! Every version of Redis and Valkey that is installed, in every supported setup.

#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use lock_runtime::backend::Backend;
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{LockError, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Trap, named, nutcracker};
use lock_tests::server::Config;
use lock_tests::tls::{Authority, Tls};
use lock_tests::tunnel::TlsTunnel;
use lock_tests::versions::{self, Make, Version};
use lock_tests::{FaultProxy, RedisServer, eventually_async};
use tokio::time::sleep;

const KEY: &str = "app:order:42";
const SOON: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(60);

fn server_of(version: &Version) -> Config {
    // A later failure belongs to this version.
    println!("{version}, {}", version.program.display());
    RedisServer::builder().program(&version.program)
}

async fn conforms(url: &str) {
    conforms_as(url, true).await;
}

async fn conforms_without_fences(url: &str) {
    conforms_as(url, false).await;
}

/// The suite itself goes by what the store says that it can do.
async fn conforms_as(url: &str, fencing: bool) {
    let [one, other] = [open_backend(url).await.unwrap(), open_backend(url).await.unwrap()];
    for store in [&one, &other] {
        assert_eq!(store.capabilities().fencing, fencing, "{url}");
    }
    conformance(one, other).await;
}

/// Two pools hand a lock off through the wait queue, and a foreign release is pushed.
async fn takes_turns(server: &RedisServer, url: &str) {
    let connect = async || LockPool::builder(url).wait(LONG).connect().await.unwrap();
    let (one, other) = (connect().await, connect().await);
    let published = server.calls("publish");
    let mut last = None;
    for (holder, waiter) in [(&one, &other), (&other, &one)] {
        let held = holder.lock(KEY).acquire().await.unwrap();
        assert!(held.fence() > last, "fences grow");
        last = held.fence();
        let waiting = tokio::spawn(waiter.lock(KEY).acquire());
        let line = format!("{KEY}:lock_runtime:line");
        eventually_async(SOON, "the waiter is queued", async || {
            server.cli(&["ZCARD", &line]) == "1"
        })
        .await;
        held.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(
        server.calls("publish") >= published + 4,
        "the holder and the next waiter are notified"
    );
    is_pushed_to(server, &one).await;
}

/// A deletion of the key by another client wakes the waiter.
async fn is_pushed_to(server: &RedisServer, pool: &LockPool) {
    let armed = server.calls("client|caching") + server.calls("client");
    server.cli(&["SET", KEY, "another client"]);
    let waiting = tokio::spawn(pool.lock(KEY).fencing(false).acquire());
    eventually_async(SOON, "the waiter has the key watched", async || {
        server.calls("client|caching") + server.calls("client") > armed
    })
    .await;
    server.cli(&["DEL", KEY]);
    waiting.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.cli(&["EXISTS", KEY]), "0");
}

/// The user that the chapter on Redis recommends, for keys of `keys`.
fn documented_user(keys: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let chapter = fs::read_to_string(root.join("docs/redis.md")).unwrap();
    let (_, rest) = chapter.split_once("ACL SETUSER locks on >password ~app:* ").unwrap();
    let (rules, _) = rest.split_once("```").unwrap();
    let rules: Vec<_> = rules.split_whitespace().collect();
    format!("user locks on >password {keys} resetchannels -@all {}", rules.join(" "))
}

/// The commands that the error for a missing permission recommends.
async fn recommended_commands(version: &Version) -> String {
    let server = server_of(version).config_line("user locks on >password ~* &* -@all +hello +ping");
    let error = refused(&server.start(), "?scripts=on").await.to_string();
    error.split('`').find(|part| part.starts_with("+set ")).unwrap().to_owned()
}

fn url_of_user(server: &RedisServer) -> String {
    format!("redis://locks:password@127.0.0.1:{}", server.port())
}

async fn refused(server: &RedisServer, query: &str) -> LockError {
    match LockPool::connect(&format!("{}{query}", url_of_user(server))).await {
        Ok(_) => panic!("it connects"),
        Err(error) => error,
    }
}

#[test]
fn every_version_passes_the_suite_and_hands_over() {
    on_each(versions::installed(), async |version| {
        let server = server_of(&version).start();
        conforms(&server.url()).await;
        takes_turns(&server, &server.url()).await;
    });
}

#[test]
fn every_version_serves_over_tls_with_a_client_certificate() {
    let authority = Authority::new();
    on_each(versions::installed(), async |version| {
        let tls = Tls::new(&authority).require_client_certificate();
        let config = server_of(&version);
        // Some were built without TLS.
        let server = if version.tls { config.tls(tls.clone()).start() } else { config.start() };
        let tunnel = (!version.tls).then(|| TlsTunnel::start(&server, &tls));
        let (port, files) = match &tunnel {
            Some(tunnel) => (tunnel.port(), tunnel.files()),
            None => (server.tls_port().unwrap(), server.tls_files()),
        };
        let ca = format!("rediss://localhost:{port}?ca={}", files.authority.display());
        let url = format!(
            "{ca}&cert={}&key={}",
            files.client_certificate.display(),
            files.client_key.display()
        );
        conforms(&url).await;
        takes_turns(&server, &url).await;
        conforms_without_fences(&format!("{url}&scripts=off")).await;
        let error = LockPool::connect(&ca).await.unwrap_err();
        let text = error.to_string().to_lowercase();
        assert!(error.is_backend() && text.contains("certificate"), "{error}");
    });
}

#[test]
fn every_version_serves_the_user_that_is_documented() {
    on_each(versions::installed(), async |version| {
        let server = server_of(&version)
            .config_line(&documented_user("~app:*"))
            .config_line(&documented_user("~*").replacen("locks", "suite", 1))
            .start();
        conforms(&url_of_user(&server).replacen("locks", "suite", 1)).await;
        let connect = async || {
            let pool = LockPool::builder(url_of_user(&server)).key_prefix("app:").wait(LONG);
            pool.connect().await.unwrap()
        };
        let (one, other) = (connect().await, connect().await);
        let held = one.lock("order:7").acquire().await.unwrap();
        let waiting = tokio::spawn(other.lock("order:7").acquire());
        eventually_async(SOON, "the waiter is queued", async || {
            server.cli(&["ZCARD", "app:order:7:lock_runtime:line"]) == "1"
        })
        .await;
        held.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        assert_eq!(one.health().await.unwrap().warnings, []);
    });
}

#[test]
fn every_version_serves_the_user_that_the_error_recommends() {
    on_each(versions::installed(), async |version| {
        let commands = recommended_commands(&version).await;
        let user =
            format!("user locks on >password ~* resetchannels &lock_runtime:* -@all {commands}");
        let server = server_of(&version).config_line(&user).start();
        conforms(&url_of_user(&server)).await;
        takes_turns(&server, &url_of_user(&server)).await;
    });
}

/// Servers before 7.0 redirect a command of which they have some keys and not others. What follows a redirection must not take a
/// key for missing that has not moved yet.
#[test]
fn a_lock_has_one_owner_while_its_slot_is_divided_whatever_the_server_answers() {
    const HELD: &str = "{7}:held";
    const BOTH: [&str; 2] = ["{7}:moves", "{7}:stays"];
    // Later ones answer like 7.0.
    let mut versions = versions::installed();
    versions.retain(|version| version.make == Make::Redis && version.number.0 < 8);
    on_each(versions, async |version| {
        let node = || server_of(&version).arg("cluster-enabled", "yes").start();
        let (from, to) = (node(), node());
        let id = |node: &RedisServer| node.cli(&["CLUSTER", "MYID"]);
        let (from_id, to_id) = (id(&from), id(&to));
        let slots: Vec<_> = (0..16_384).map(|slot| slot.to_string()).collect();
        let all = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
        assert_eq!(from.cli(&all.collect::<Vec<_>>()), "OK");
        let knows = |node: &RedisServer, id: &str| node.cli(&["CLUSTER", "NODES"]).contains(id);
        eventually_async(LONG, "both serve all slots", async || {
            sleep(ms(20)).await;
            // Each further meeting of known servers would cost them a handshake.
            if !knows(&from, &to_id) {
                from.cli(&["CLUSTER", "MEET", "127.0.0.1", &to.port().to_string()]);
            }
            let serves =
                |node| RedisServer::cli(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok");
            knows(&from, &to_id) && knows(&to, &from_id) && serves(&from) && serves(&to)
        })
        .await;
        let url = format!("redis+cluster://127.0.0.1:{}", from.port());
        let connect = async || {
            let pool = LockPool::builder(&url).ttl(ms(12_000)).first_renewal(ms(1_000));
            pool.request_timeout(ms(8_000)).connect().await.unwrap()
        };
        let (ours, theirs) = (connect().await, connect().await);
        let held = ours.lock(HELD).fencing(false).acquire().await.unwrap();
        let both = ours.lock_all(BOTH).fencing(false).acquire().await.unwrap();
        let slot = from.cli(&["CLUSTER", "KEYSLOT", HELD]);
        assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
        assert_eq!(from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
        let port = to.port().to_string();
        assert_eq!(from.cli(&["MIGRATE", "127.0.0.1", &port, BOTH[0], "0", "5000"]), "OK");
        let client = redis::Client::open(to.url()).unwrap();
        let mut target = client.get_multiplexed_async_connection().await.unwrap();
        let (mut last, mut are_renewed) = ([i64::MAX; 2], [false; 2]);
        eventually_async(LONG, "both keys are renewed", async || {
            sleep(ms(20)).await;
            let mut asking = redis::pipe();
            let asking = asking.cmd("ASKING").ignore().cmd("PTTL").arg(BOTH[0]);
            let (moved,): (i64,) = asking.query_async(&mut target).await.unwrap();
            let stays = from.cli(&["PTTL", BOTH[1]]).parse().unwrap();
            for (at, left) in [moved, stays].into_iter().enumerate() {
                are_renewed[at] |=
                    left > std::mem::replace(&mut last[at], left).saturating_add(500);
            }
            are_renewed == [true; 2]
        })
        .await;
        let waiter = theirs.lock(HELD).fencing(false).wait(ms(2_000)).acquire();
        assert!(waiter.await.is_err(), "{version}: it is held");
        for guard in [&held, &both] {
            guard.verify().await.unwrap_or_else(|error| panic!("{version}: {error}"));
        }
        both.release().await.unwrap();
        held.release().await.unwrap();
        let next = theirs.lock(HELD).fencing(false).try_acquire().await.unwrap();
        next.expect("it is free").release().await.unwrap();
        for node in [&from, &to] {
            assert_eq!(node.cli(&["KEYS", "{7}:*"]), "");
        }
    });
}

#[test]
fn every_version_serves_without_scripts() {
    on_each(versions::installed(), async |version| {
        let server = server_of(&version).start();
        let url = format!("{}?scripts=off", server.url());
        conforms_without_fences(&url).await;
        let pool = LockPool::builder(&url).wait(LONG).connect().await.unwrap();
        is_pushed_to(&server, &pool).await;
        assert_eq!(server.calls("eval") + server.calls("evalsha"), 0, "no script is sent");
        let compared = server.calls("delex") + server.calls("delifeq");
        if version.compares() {
            assert!(compared > 100, "{compared} releases by comparing");
        } else {
            assert!(server.calls("exec") > 100, "releases by transactions");
        }
    });
}

#[test]
fn every_version_is_found_to_refuse_scripts() {
    on_each(versions::installed(), async |version| {
        for rules in ["+@all -@scripting", "+@all -eval -evalsha"] {
            let user = format!("user locks on >password ~* &* {rules}");
            let server = server_of(&version).config_line(&user).start();
            conforms_without_fences(&url_of_user(&server)).await;
            let error = refused(&server, "?scripts=on").await.to_string();
            assert!(error.contains("NOPERM"), "{error}");
        }
        let user = "user locks on >password ~* &* +@all -@scripting -watch";
        let server = server_of(&version).config_line(user).start();
        if version.compares() {
            LockPool::connect(&url_of_user(&server)).await.unwrap();
        } else {
            let error = refused(&server, "").await.to_string();
            assert!(error.contains("no other way to free a lock safely"), "{error}");
        }
    });
}

/// Nothing but commands that compare: behind a proxy without scripts and without transactions.
#[tokio::test]
async fn a_server_that_compares_needs_no_transactions() {
    for version in versions::installed().into_iter().filter(Version::compares) {
        let server = server_of(&version).start();
        let proxy = FaultProxy::start(&server);
        proxy.know_only(|command| {
            let compares = command.is("DELEX") || command.is("DELIFEQ");
            compares || (nutcracker(command) && !command.is("EVAL") && !command.is("EVALSHA"))
        });
        let pool = LockPool::builder(proxy.url())
            .ttl(Duration::from_millis(2_500))
            // A release has twice that: for a try without an answer, then for a new connection on a busy machine.
            .request_timeout(Duration::from_secs(3))
            .wait(LONG);
        let pool = pool.connect().await.unwrap();
        let before = proxy.hang_ups();
        let lock = || pool.lock(KEY).fencing(false);
        let holder = || server.cli(&["GET", KEY]);

        let interval = Duration::from_millis(300);
        let guard = lock().ttl(10 * interval).renew(interval).acquire().await.unwrap();
        let sets = server.calls("set");
        eventually_async(SOON, "renewals", async || server.calls("set") >= sets + 3).await;
        guard.verify().await.unwrap();
        assert!(lock().try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        assert_eq!(holder(), "(nil)");

        let stolen = lock().acquire().await.unwrap();
        server.cli(&["SET", KEY, "another client"]);
        assert!(stolen.release().await.unwrap_err().is_lost());
        assert_eq!(holder(), "another client");
        server.cli(&["DEL", KEY]);

        let kept = lock().min_hold(Duration::from_secs(30)).acquire().await.unwrap();
        kept.release().await.unwrap();
        assert_ne!(holder(), "(nil)");
        server.cli(&["DEL", KEY]);

        let error = pool.lock_all([KEY, "other"]).fencing(false).acquire().await.unwrap_err();
        assert!(error.to_string().contains("several keys"), "{error}");
        assert_eq!(server.cli(&["DBSIZE"]), "0");

        assert_eq!(proxy.hang_ups(), before);
        // A grant without an answer is free after its ttl, and can then be acquired.
        for action in [Action::DropReply, Action::CutBeforeReply] {
            let trap: Trap = proxy.on_next(named("SET"), action);
            let guard = lock().acquire().await.unwrap();
            assert!(trap.sprung());
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
            // Longer than a release without an answer.
            let guard = lock().ttl(LONG).acquire().await.unwrap();
            let compared = proxy.on_next(|it| it.is("DELEX") || it.is("DELIFEQ"), action);
            guard.release().await.unwrap();
            assert!(compared.sprung());
            assert_eq!(holder(), "(nil)");
        }
        // Each new connection is greeted in full, once; nothing else goes wrong.
        assert!(proxy.hang_ups() <= before + 8, "{} hang-ups", proxy.hang_ups() - before);
    }
}
